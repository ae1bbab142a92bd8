//! CUDA graphs: a step's launches recorded once and replayed with one call.

use cudarc::driver::sys;

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
    /// Kernel, copy and memset nodes in capture order.
    pub nodes: Vec<GraphNode>,
}

// SAFETY: handles that the driver allows on any thread, used by one at a time.
unsafe impl Send for CapturedGraph {}

impl CapturedGraph {
    /// Run `work` while the GPU's stream captures instead of executing, and instantiate what it launched.
    pub fn capture(gpu: &Gpu, work: impl FnOnce() -> Result<(), CudaError>) -> Result<CapturedGraph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live and not capturing.
        check(unsafe { sys::cuStreamBeginCapture_v2(gpu.stream(), mode) }, || "beginning a graph capture".into())?;
        gpu.begin_tagging();
        let worked = work();
        let tags = gpu.end_tagging();
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends the capture begun above, whatever happened between.
        let ended =
            check(unsafe { sys::cuStreamEndCapture(gpu.stream(), &mut graph) }, || "ending a graph capture".into());
        worked?;
        ended?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: `graph` was just captured.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) };
        if let Err(error) = check(status, || "instantiating a graph".into()) {
            // SAFETY: not used again.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
            return Err(error);
        }
        // SAFETY: both handles are live.
        check(unsafe { sys::cuGraphUpload(exec, gpu.stream()) }, || "uploading a graph".into())?;
        Ok(CapturedGraph { graph, exec, nodes: tags.into_iter().map(|tag| GraphNode { tag }).collect() })
    }

    /// Replay it.
    pub fn launch(&self, gpu: &Gpu) -> Result<(), CudaError> {
        // SAFETY: the executable graph is live, and its buffers are owned by the caller.
        check(unsafe { sys::cuGraphLaunch(self.exec, gpu.stream()) }, || "launching a graph".into())
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        // SAFETY: made by `capture`, destroyed once.
        unsafe {
            let _ = sys::cuGraphExecDestroy(self.exec);
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}
