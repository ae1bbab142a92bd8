//! The summaries of `nsys stats`, for traces of any origin: the same columns, formulas and order, so that what people
//! compare with keeps its meaning. In CSV they are the same text, see [`csv`].

mod csv;
mod projection;
mod ranges;
mod spread;
mod sums;

use strobe_trace::Trace;

use crate::sheet::Report;

pub use csv::csv;
pub(crate) use sums::without_version;

/// A summary: its name here, the names it has in nsys, and how it is made.
struct Summary {
    name: &'static str,
    nsys_names: &'static [&'static str],
    make: fn(&Trace) -> Report,
}

/// All of them. The second nsys name is that of the 2022 versions, where there was one.
const SUMMARIES: [Summary; 9] = [
    Summary { name: "kern-sum", nsys_names: &["cuda_gpu_kern_sum", "gpukernsum"], make: sums::kernels },
    Summary { name: "api-sum", nsys_names: &["cuda_api_sum", "cudaapisum"], make: sums::calls },
    Summary { name: "mem-time-sum", nsys_names: &["cuda_gpu_mem_time_sum", "gpumemtimesum"], make: sums::memory_time },
    Summary { name: "mem-size-sum", nsys_names: &["cuda_gpu_mem_size_sum", "gpumemsizesum"], make: sums::memory_size },
    Summary { name: "gpu-sum", nsys_names: &["cuda_gpu_sum", "gpusum"], make: sums::device },
    Summary { name: "nvtx-sum", nsys_names: &["nvtx_sum", "nvtxsum"], make: ranges::host_time },
    Summary { name: "nvtx-gpu-proj-sum", nsys_names: &["nvtx_gpu_proj_sum"], make: ranges::projected },
    Summary { name: "nvtx-kern-sum", nsys_names: &["nvtx_kern_sum", "nvtxkernsum"], make: ranges::kernels },
    Summary { name: "osrt-sum", nsys_names: &["osrt_sum", "osrtsum"], make: sums::os_runtime },
];

/// The names of the summaries, in the order in which they are worth reading.
pub fn names() -> impl Iterator<Item = &'static str> {
    SUMMARIES.iter().map(|s| s.name)
}

/// The name that a summary has here, by any of its names; `None` for other words.
pub fn canonical_name(name: &str) -> Option<&'static str> {
    find(name).map(|s| s.name)
}

/// The summary with this name (ours or one of nsys); `None` for other words.
pub fn report(name: &str, trace: &Trace) -> Option<Report> {
    find(name).map(|s| (s.make)(trace))
}

fn find(name: &str) -> Option<&'static Summary> {
    SUMMARIES.iter().find(|s| s.name == name || s.nsys_names.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_known_once() {
        let mut all: Vec<&str> = SUMMARIES.iter().flat_map(|s| s.nsys_names.iter().copied().chain([s.name])).collect();
        for name in &all {
            assert!(canonical_name(name).is_some());
        }
        all.sort_unstable();
        assert!(all.windows(2).all(|w| w[0] != w[1]), "{all:?}");
        assert_eq!(canonical_name("gpukernsum"), Some("kern-sum"));
        assert_eq!(canonical_name("kern"), None);
    }
}
