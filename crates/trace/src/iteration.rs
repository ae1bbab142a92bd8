//! Iterations and phases of an engine's loop, as engines record them.

use serde::Serialize;

/// What a range stands for in the engine's loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RangeKind {
    /// The forward pass of one iteration.
    ForwardStep,
    /// Choosing what runs next.
    Schedule,
    /// Making the step's inputs.
    Prepare,
    /// Turning logits into tokens.
    Sample,
    /// Handing results back.
    Respond,
    /// One layer of the model.
    Layer,
    /// Anything else.
    Other,
}

impl RangeKind {
    /// Every kind, in the order of an iteration.
    pub const ALL: [RangeKind; 7] = [
        RangeKind::ForwardStep,
        RangeKind::Schedule,
        RangeKind::Prepare,
        RangeKind::Sample,
        RangeKind::Respond,
        RangeKind::Layer,
        RangeKind::Other,
    ];

    /// The name used in files.
    pub fn as_str(self) -> &'static str {
        match self {
            RangeKind::ForwardStep => "forward_step",
            RangeKind::Schedule => "schedule",
            RangeKind::Prepare => "prepare",
            RangeKind::Sample => "sample",
            RangeKind::Respond => "respond",
            RangeKind::Layer => "layer",
            RangeKind::Other => "other",
        }
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.as_str() == name)
    }
}

/// One real forward step, with the host work around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Iteration {
    /// Its number: the same in log, range name, trace and report.
    pub iter: u64,
    /// The start of scheduling.
    pub start: i64,
    /// The end of responding.
    pub end: i64,
    /// Requests in their context (prefill) phase.
    pub context_requests: u32,
    /// Requests in their generation (decode) phase.
    pub generation_requests: u32,
    /// Tokens of the context requests.
    pub context_tokens: u32,
    /// Tokens of the generation requests.
    pub generation_tokens: u32,
    /// The index of the profile window it was recorded in.
    pub window: u32,
    /// The longest time in nanoseconds that one of its threads was ready to run and waited for a CPU, where that is known.
    pub cpu_wait: Option<i64>,
}

impl Iteration {
    /// Prefill, decode or both, by the requests in it.
    pub fn kind(&self) -> IterationKind {
        match (self.context_requests > 0, self.generation_requests > 0) {
            (true, false) => IterationKind::Prefill,
            (true, true) => IterationKind::Mixed,
            (false, _) => IterationKind::Decode,
        }
    }

    /// Its wall time in nanoseconds, never negative.
    pub fn wall_ns(&self) -> i64 {
        self.end.saturating_sub(self.start).max(0)
    }
}

/// Tokens that a layer sent to one of its experts in one iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertLoad {
    /// The iteration's number.
    pub iter: u64,
    /// The layer's number in the model.
    pub layer: u32,
    /// The expert's number in the layer.
    pub expert: u32,
    /// How many tokens; experts without any are listed too.
    pub tokens: u32,
}

/// What an iteration worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IterationKind {
    /// Context requests only.
    Prefill,
    /// Context and generation requests together.
    Mixed,
    /// Generation requests only.
    Decode,
}

impl IterationKind {
    /// Every kind, in the order tables show them.
    pub const ALL: [IterationKind; 3] = [Self::Prefill, Self::Mixed, Self::Decode];

    /// Its name in tables and files.
    pub fn as_str(self) -> &'static str {
        match self {
            IterationKind::Prefill => "prefill",
            IterationKind::Mixed => "mixed",
            IterationKind::Decode => "decode",
        }
    }
}

impl std::fmt::Display for IterationKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// One profile window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its place among the windows, counted from 0.
    pub index: u32,
    /// The first iteration asked for.
    pub first: u64,
    /// The last iteration asked for, inclusive.
    pub last: u64,
    /// Whether all of it was recorded.
    pub complete: bool,
}

/// The ceilings a roofline is drawn from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Peaks {
    /// Floating-point operations per second.
    pub flops_per_s: f64,
    /// The same of products of 8-bit integers, where they run at another rate and it is known.
    pub int8_ops_per_s: Option<f64>,
    /// The same of products of bfloat16, where they run at another rate and it is known.
    pub bf16_flops_per_s: Option<f64>,
    /// Memory bandwidth in bytes per second.
    pub bytes_per_s: f64,
    /// How they were obtained, e.g. `measured, 2 threads, f32`.
    pub note: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kind_follows_the_requests() {
        let iteration = |context_requests, generation_requests| Iteration {
            iter: 0,
            start: 0,
            end: 1,
            context_requests,
            generation_requests,
            context_tokens: 0,
            generation_tokens: 0,
            window: 0,
            cpu_wait: None,
        };
        assert_eq!(iteration(1, 0).kind(), IterationKind::Prefill);
        assert_eq!(iteration(2, 3).kind(), IterationKind::Mixed);
        assert_eq!(iteration(0, 3).kind(), IterationKind::Decode);
    }

    #[test]
    fn range_kinds_have_distinct_names() {
        for kind in RangeKind::ALL {
            assert_eq!(RangeKind::from_name(kind.as_str()), Some(kind));
        }
    }
}
