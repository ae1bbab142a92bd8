//! CUDA graphs: a step's launches recorded once and replayed with one call.

use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver;
use crate::error::{CudaError, check};
use crate::gpu::Gpu;

/// One node of a graph: which op it belongs to.
#[derive(Clone, Copy, Debug)]
pub struct GraphNode {
    /// Tag that was set when the launch was captured, see [`Gpu::set_tag`].
    pub tag: u32,
}

/// A captured and instantiated graph. Its launches form one chain in capture order.
pub struct CapturedGraph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    context: Arc<Context>,
    /// Kernel, copy and memset nodes in capture order.
    pub nodes: Vec<GraphNode>,
}

// SAFETY: handles that the driver allows on any thread, used by one at a time.
unsafe impl Send for CapturedGraph {}

impl CapturedGraph {
    /// Run `work` while the GPU's stream captures instead of executing, and instantiate what it launched.
    pub fn capture(gpu: &Gpu, work: impl FnOnce() -> Result<(), CudaError>) -> Result<CapturedGraph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live; the driver refuses one that captures already.
        check(unsafe { driver::cuStreamBeginCapture_v2(gpu.stream(), mode) }, || "beginning a graph capture".into())?;
        gpu.begin_tagging();
        let worked = work();
        let nodes = gpu.end_tagging().into_iter().map(|tag| GraphNode { tag }).collect();
        use std::ptr::null_mut as none;
        // Dropped, and its handles with it, when something below has failed.
        let mut captured = CapturedGraph { graph: none(), exec: none(), context: gpu.context().clone(), nodes };
        // SAFETY: ends the capture begun above, whatever happened between.
        let ended = unsafe { driver::cuStreamEndCapture(gpu.stream(), &mut captured.graph) };
        worked?;
        check(ended, || "ending a graph capture".into())?;
        // SAFETY: the graph was just captured, the rest are fields of our own.
        let made = unsafe { driver::cuGraphInstantiateWithFlags(&mut captured.exec, captured.graph, 0) };
        check(made, || "instantiating a graph".into())?;
        // SAFETY: both handles are live.
        check(unsafe { driver::cuGraphUpload(captured.exec, gpu.stream()) }, || "uploading a graph".into())?;
        Ok(captured)
    }

    /// Replay it.
    ///
    /// # Safety
    /// As for [`Gpu::launch`], of everything that was captured: what its kernels read and write is still there and in their order.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), CudaError> {
        // SAFETY: the graph lives as long as `self`; the rest is the caller's promise.
        check(unsafe { driver::cuGraphLaunch(self.exec, gpu.stream()) }, || "launching a graph".into())
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        self.context.within(|| {
            // SAFETY: made by `capture` in a context that is still there, destroyed once; those that were never made are null.
            unsafe {
                if !self.exec.is_null() {
                    let _ = driver::cuGraphExecDestroy(self.exec);
                }
                if !self.graph.is_null() {
                    let _ = driver::cuGraphDestroy(self.graph);
                }
            }
        });
    }
}
