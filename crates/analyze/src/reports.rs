//! Every report by name.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::context::Context;
use crate::sheet::Report;
use crate::{
    advice, budget, categories, critical_path, experts, gaps, iterations, launch, layers, memory, metrics, nsys_stats,
    operators, overlap, ranks, roofline, summary,
};

/// A report that can be asked for.
pub struct Entry {
    /// Its name on the command line.
    pub name: &'static str,
    /// The question it answers.
    pub question: &'static str,
    run: fn(&Context) -> Report,
}

impl Entry {
    /// Makes the report.
    pub fn run(&self, context: &Context) -> Report {
        (self.run)(context)
    }
}

const fn entry(name: &'static str, question: &'static str, run: fn(&Context) -> Report) -> Entry {
    Entry { name, question, run }
}

/// One of Nsight Systems' summaries.
macro_rules! nsys {
    ($name:literal, $question:literal) => {
        entry($name, $question, |context| {
            nsys_stats::report($name, context.trace)
                .unwrap_or_else(|| Report::absent($name, $name, "there is no such summary"))
        })
    };
}

/// All reports, in the order they are best read.
pub const ALL: &[Entry] = &[
    entry("summary", "what the trace holds and how busy its devices were", summary::summary),
    entry("advice", "what to do about it, and the most it can gain", advice::report),
    entry("iterations", "every forward step: kind, requests, tokens, wall, busy, launches", iterations::report),
    entry("budget", "where the wall time of an iteration went; the parts add up", budget::report),
    entry("categories", "device time by family of kernel, and what no rule knows", categories::report),
    entry("layers", "device time by op and layer of the model, inside graphs too", layers::report),
    entry("experts", "how evenly tokens reached the experts of each layer", experts::report),
    entry("gaps", "when devices idled, for how long and why", gaps::report),
    entry("roofline", "% of roofline per op", roofline::report),
    entry("operators", "host time by operator of PyTorch, own and total", operators::report),
    entry("critical-path", "what the end of each iteration waited for", critical_path::report),
    entry("overlap", "how much communication hides behind compute", overlap::report),
    entry("ranks", "which rank comes late to collectives, and why", ranks::report),
    entry("launch", "from call to start: delays and queue depth", launch::report),
    entry("memory", "device memory over time: peak, by owner", memory::report),
    entry("metrics", "GPU metric samples per iteration and category", metrics::report),
    nsys!("kern-sum", "kernels by total time (cuda_gpu_kern_sum)"),
    nsys!("api-sum", "CUDA calls by total time (cuda_api_sum)"),
    nsys!("mem-time-sum", "copies and fills by time (cuda_gpu_mem_time_sum)"),
    nsys!("mem-size-sum", "copies and fills by size (cuda_gpu_mem_size_sum)"),
    nsys!("gpu-sum", "kernels, copies and fills by time (cuda_gpu_sum)"),
    nsys!("nvtx-sum", "ranges by total time (nvtx_sum)"),
    nsys!("nvtx-gpu-proj-sum", "ranges projected onto the GPU (nvtx_gpu_proj_sum)"),
    nsys!("nvtx-kern-sum", "kernels under each range (nvtx_kern_sum)"),
    nsys!("osrt-sum", "operating system calls by total time (osrt_sum)"),
];

/// Makes several reports, in the order of `entries`, on as many threads as the machine has.
pub fn run_all(entries: &[&Entry], context: &Context) -> Vec<Report> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(entries.len());
    let next = AtomicUsize::new(0);
    let work = || {
        let numbers = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&n| n < entries.len()));
        numbers.map(|number| (number, entries[number].run(context))).collect::<Vec<_>>()
    };
    let mut made = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut made = work();
        for other in others {
            made.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        made
    });
    made.sort_by_key(|&(number, _)| number);
    made.into_iter().map(|(_, report)| report).collect()
}

/// The report of this name; Nsight Systems' own names are understood too.
pub fn find(name: &str) -> Option<&'static Entry> {
    let by_name = |name: &str| ALL.iter().find(|entry| entry.name == name);
    by_name(&name.replace('_', "-")).or_else(|| by_name(nsys_stats::canonical_name(name)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_aliases_lead_to_them() {
        for (index, entry) in ALL.iter().enumerate() {
            assert!(ALL[..index].iter().all(|other| other.name != entry.name), "{}", entry.name);
            assert_eq!(find(entry.name).map(|e| e.name), Some(entry.name));
        }
        assert_eq!(find("cuda_gpu_kern_sum").map(|e| e.name), Some("kern-sum"));
        assert_eq!(find("critical_path").map(|e| e.name), Some("critical-path"));
        assert!(find("no-such").is_none());
    }

    #[test]
    fn several_reports_come_in_the_order_asked_for() {
        let trace = strobe_trace::Trace::default();
        let context = Context::new(&trace, &crate::Options::default());
        let entries: Vec<&Entry> = ALL.iter().rev().chain(ALL).collect();
        let made = run_all(&entries, &context);
        assert!(made.iter().map(|report| report.name).eq(entries.iter().map(|entry| entry.name)));
        assert!(run_all(&[], &context).is_empty());
    }

    #[test]
    fn every_report_names_itself_also_on_an_empty_trace() {
        let trace = strobe_trace::Trace::default();
        let context = Context::new(&trace, &crate::Options::default());
        for entry in ALL {
            let report = entry.run(&context);
            assert_eq!(report.name, entry.name);
            assert!(report.not_applicable.is_some() || !report.sheets.is_empty() || !report.notes.is_empty());
        }
    }
}
