//! Profile windows on a GPU: strobe's own recorder, or the marks that Nsight Systems goes by.

use std::fmt;

use crate::cupti::Recorder;
use crate::driver::{self, Status};
use crate::error::{CudaError, check};
use crate::gpu::Gpu;
use crate::graph::GraphNode;
use crate::nvtx::Nvtx;
use crate::timeline::KernelTimeline;

/// Whether NVTX ranges are emitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvtxChoice {
    /// When a tool listens.
    #[default]
    Auto,
    /// Always.
    Enable,
    /// Never.
    Disable,
}

/// The tool that this process was started under, if its marks are in the environment.
pub fn attached_profiler() -> Option<&'static str> {
    attached(|name| std::env::var(name).ok())
}

fn attached(variable: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    if variable("NSYS_PROFILING_SESSION_ID").is_some() {
        return Some("Nsight Systems");
    }
    ["CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"].iter().find_map(|name| variable(name)).map(|path| {
        match path.to_lowercase() {
            path if path.contains("nsight-systems") || path.contains("toolsinjection") => "Nsight Systems",
            path if path.contains("nsight-compute") => "Nsight Compute",
            _ => "another profiler",
        }
    })
}

/// What is done at the edges of profile windows, and inside them. Everything is called on the thread that launches.
pub struct Profiler {
    recorder: Option<Recorder>,
    nvtx: Option<Nvtx>,
    notes: Vec<String>,
}

impl Profiler {
    /// `record` says whether any window will be recorded; without one CUPTI is not even loaded. What cannot be had is
    /// in [`Profiler::notes`]: the run goes on without it.
    pub fn open(record: bool, nvtx: NvtxChoice) -> Profiler {
        let attached = attached_profiler();
        let mut profiler = Profiler { recorder: None, nvtx: None, notes: Vec::new() };
        match attached {
            Some(tool) if record => profiler.notes.push(format!(
                "this run is under {tool}, and the GPU's profiling interface takes one client at a time: {tool} records the kernels and strobe does not; windows are marked with cuProfilerStart and cuProfilerStop"
            )),
            None if record => match Recorder::open() {
                Ok(recorder) => profiler.recorder = Some(recorder),
                Err(error) => profiler.notes.push(format!("no kernel timeline: {error}")),
            },
            _ => {}
        }
        let wanted = match nvtx {
            NvtxChoice::Auto => attached.is_some(),
            NvtxChoice::Enable => true,
            NvtxChoice::Disable => false,
        };
        if wanted {
            match Nvtx::open() {
                Ok(nvtx) => profiler.nvtx = Some(nvtx),
                Err(error) => profiler.notes.push(format!("no NVTX ranges: {error}")),
            }
        }
        profiler
    }

    /// What a user should know and has not been told yet, one line each.
    pub fn notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Whether kernels are recorded in windows.
    pub fn records(&self) -> bool {
        self.recorder.is_some()
    }

    /// Switch strobe's own recorder on with `iteration`, the last before a window, which will not be in it: the GPU then
    /// enters the window as busy as it is in any other iteration. `now` is the clock that times are wanted on.
    pub fn lead_in(&mut self, gpu: &Gpu, iteration: u64, now: &dyn Fn() -> u64) -> Result<(), CudaError> {
        if !self.is_leading_in() {
            gpu.synchronize()?;
            self.start_recorder(gpu, now);
        }
        self.begin_iteration(iteration);
        Ok(())
    }

    /// Whether the recorder runs already. Between windows that is a lead-in.
    pub fn is_leading_in(&self) -> bool {
        self.recorder.as_ref().is_some_and(Recorder::is_running)
    }

    /// Open a window. Without a lead-in the GPU is waited for, so that nothing from before is inside. `now` is the clock
    /// that times are wanted on.
    pub fn begin_window(&mut self, gpu: &Gpu, now: &dyn Fn() -> u64) -> Result<(), CudaError> {
        let leading_in = self.is_leading_in();
        if !leading_in {
            gpu.synchronize()?;
        }
        // SAFETY: no preconditions; without a tool it does nothing.
        self.mark(unsafe { driver::cuProfilerStart() }, "start");
        match &mut self.recorder {
            Some(recorder) if leading_in => recorder.skip_lead_in(now),
            _ => self.start_recorder(gpu, now),
        }
        Ok(())
    }

    /// A mark that no tool takes is worth a word, and not the run.
    fn mark(&mut self, status: Status, edge: &str) {
        if let Err(error) = check(status, || format!("marking the {edge} of a profile window")) {
            self.notes.push(format!("a profiler can't see the {edge} of a window: {error}"));
        }
    }

    fn start_recorder(&mut self, gpu: &Gpu, now: &dyn Fn() -> u64) {
        if let Some(recorder) = &mut self.recorder
            && let Err(error) = recorder.start(gpu, now)
        {
            self.notes.push(format!("no kernel timeline: {error}"));
            self.recorder = None;
        }
    }

    /// The window that a lead-in was for does not come.
    pub fn cancel_lead_in(&mut self, gpu: &Gpu, now: &dyn Fn() -> u64) -> Result<(), CudaError> {
        match &mut self.recorder {
            Some(recorder) if recorder.is_running() => {
                // A device that has faulted gives no records any more, and is not asked for them.
                gpu.synchronize()?;
                recorder.stop(gpu, now).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Inside a window: launches belong to `iteration` from here on.
    pub fn begin_iteration(&self, iteration: u64) {
        if let Some(recorder) = &self.recorder {
            recorder.begin_iteration(iteration);
        }
    }

    /// Inside a window: a graph with these nodes was just launched.
    pub fn graph_launched(&mut self, nodes: &[GraphNode]) {
        if let Some(recorder) = &mut self.recorder {
            recorder.graph_launched(nodes);
        }
    }

    /// Close the window: wait for the GPU, so that everything of the last iteration is inside, and take what was
    /// recorded. `None` where strobe does not record.
    pub fn end_window(&mut self, gpu: &Gpu, now: &dyn Fn() -> u64) -> Result<Option<KernelTimeline>, CudaError> {
        let waited = gpu.synchronize();
        // A device that has faulted gives no records any more, and is not asked for them.
        let alive = waited.is_ok();
        let timeline = self.recorder.as_mut().filter(|_| alive).map(|recorder| recorder.stop(gpu, now));
        // SAFETY: no preconditions; without a tool it does nothing.
        let status = unsafe { driver::cuProfilerStop() };
        waited?;
        self.mark(status, "end");
        match timeline {
            Some(Err(error)) => {
                self.notes.push(format!("no kernel timeline: {error}"));
                Ok(None)
            }
            Some(Ok(timeline)) => Ok(Some(timeline)),
            None => Ok(None),
        }
    }

    /// Begin an NVTX range, where they are wanted. The name is only put together then.
    pub fn push(&self, name: fmt::Arguments<'_>) {
        if let Some(nvtx) = &self.nvtx {
            nvtx.push(name);
        }
    }

    /// End the range begun last.
    pub fn pop(&self) {
        if let Some(nvtx) = &self.nvtx {
            nvtx.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_known_by_their_marks() {
        let of = |name: &'static str, value: &'static str| attached(move |asked| (asked == name).then(|| value.into()));
        assert_eq!(attached(|_| None), None);
        assert_eq!(of("NSYS_PROFILING_SESSION_ID", "1"), Some("Nsight Systems"));
        let injection = "/opt/nvidia/nsight-systems/2025.3.2/target-linux-x64/libToolsInjection64.so";
        assert_eq!(of("NVTX_INJECTION64_PATH", injection), Some("Nsight Systems"));
        assert_eq!(of("CUDA_INJECTION64_PATH", "/opt/other/libtool.so"), Some("another profiler"));
    }

    #[test]
    fn without_windows_nothing_is_loaded() {
        let mut profiler = Profiler::open(false, NvtxChoice::Disable);
        assert!(!profiler.records());
        assert!(profiler.notes().is_empty());
        profiler.push(format_args!("nobody listens"));
        profiler.pop();
    }
}
