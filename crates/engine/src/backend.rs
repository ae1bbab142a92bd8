//! What an engine asks of a device: one step at a time, by a few verbs.

use std::fmt;

use strobe_kernels_cpu::QkvShape;
use strobe_model::ModelConfig;

use crate::clock::Clock;
use crate::device::DeviceFacts;
use crate::error::EngineError;
use crate::recorder::{GpuRecording, Recorder};
use crate::step::StepInputs;

/// A model on a device that runs its steps, in the order they were launched.
///
/// One call per step and verb: which kernel runs which op is the device's own business, and no op is dispatched through
/// this trait. At most two steps are under way, one of which runs while the other is being launched.
pub trait Backend: Send {
    /// Makes the calling thread the one that runs steps, and returns the system's numbers of the threads that compute
    /// beside it.
    fn attach(&mut self) -> Result<Vec<u32>, EngineError>;

    /// Starts a step: forward pass and sampling. Returns the time at which sampling began, or at which everything was
    /// launched where the device works on its own. Tokens that the step before has drawn and the host does not know yet
    /// ([`StepInputs::from_last`]) are the device's to find.
    fn launch(&mut self, step: &mut StepInputs, clock: &Clock, trace: Option<Trace<'_>>) -> Result<u64, EngineError>;

    /// Waits for the oldest step under way. With the trace it was launched with, costs of ops that are known only now are
    /// put right.
    fn land(&mut self, trace: Option<Trace<'_>>) -> Result<(), EngineError>;

    /// What the step that landed last has brought.
    fn landed(&self) -> Landed<'_>;

    /// Logits of the step that landed last, `[sampled][vocab]`; it must have had [`StepInputs::keep_logits`], and none may
    /// have been launched since.
    fn logits(&self) -> Result<Vec<f32>, EngineError>;

    /// Uses balanced logits, where they were made ready, or the router's own. No step may be under way.
    fn use_perfect_router(&mut self, on: bool) -> Result<(), EngineError>;

    /// Bytes by purpose.
    fn memory(&self) -> MemoryByPool;

    /// Facts about the device.
    fn facts(&self) -> DeviceFacts;

    /// Things a user should know that came up since the last call.
    fn notes(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// Passes an edge of a profile window. Closing one gives what the device recorded in it beside the ops of
    /// [`Backend::launch`].
    fn window(&mut self, edge: WindowEdge, clock: &Clock) -> Result<Option<GpuRecording>, EngineError> {
        let _ = (edge, clock);
        Ok(None)
    }

    /// Whether the device has a recorder of its own that windows switch on and off.
    fn recorder(&self) -> DeviceRecorder {
        DeviceRecorder::Absent
    }

    /// Begins a range for the profiler that listens to this device, if one does. The name is only put together then.
    fn push_range(&self, name: fmt::Arguments<'_>) {
        let _ = name;
    }

    /// Ends the range begun last.
    fn pop_range(&self) {}
}

/// What a step has brought.
#[derive(Clone, Copy, Debug, Default)]
pub struct Landed<'a> {
    /// The token of each sampled row.
    pub tokens: &'a [u32],
    /// Tokens sent to each expert, `[layers][experts]`; empty for a model without.
    pub expert_counts: &'a [u32],
}

/// Where the ops of a step leave their times and costs; there is one inside profile windows only.
pub struct Trace<'a> {
    pub(crate) recorder: &'a mut Recorder,
    pub(crate) iteration: u64,
}

/// An edge of a profile window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowEdge {
    /// A window opens after this iteration: record ahead of it, so that the device is as busy in its first step as in any.
    LeadIn(u64),
    /// The window that a lead-in was for does not come.
    Cancel,
    /// A window opens. Without a lead-in no step is under way.
    Open,
    /// It is over.
    Close,
}

/// The state of a device's own recorder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceRecorder {
    /// There is none.
    Absent,
    /// Ready.
    Off,
    /// Recording: inside a window or ahead of one.
    On,
}

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryByPool {
    /// Weights in their engine layout.
    pub weights_bytes: u64,
    /// The KV cache, reserved (touched only as it fills).
    pub kv_cache_bytes: u64,
    /// Activations, logits and kernel scratch, reserved.
    pub activation_bytes: u64,
    /// Scratch of kernels and libraries, where it is counted apart (on a GPU).
    pub workspace_bytes: u64,
    /// Captured graphs (on a GPU).
    pub graph_bytes: u64,
}

/// Heads of a model.
pub(crate) fn qkv_shape(config: &ModelConfig) -> QkvShape {
    QkvShape { heads: config.num_attention_heads, kv_heads: config.num_key_value_heads, head_dim: config.head_dim }
}
