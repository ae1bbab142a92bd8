//! What is known of every iteration, profiled or not.

use crate::block_pool::PoolCounters;
use crate::host::HostReading;
use crate::recorder::StepTimes;
use crate::scheduler::Policy;
use strobe_model::program::{SpanShape, StepWork};

/// One real forward step. Plain data, kept without allocating.
#[derive(Clone, Copy, Debug, Default)]
pub struct IterationRecord {
    /// Its number, stamped when the batch is built.
    pub iter: u64,
    /// Its phases on the engine's clock.
    pub times: StepTimes,
    /// Whether its ops were recorded.
    pub profiled: bool,
    /// Whether it was recorded ahead of a window, and left out of it.
    pub lead_in: bool,
    /// Requests in the batch, admitted ones included.
    pub active: u32,
    /// Requests in the queue after admission.
    pub queued: u32,
    /// Requests admitted for the first time.
    pub new_active: u32,
    /// Time those spent in the queue, in all, in nanoseconds.
    pub new_active_queue_ns: u64,
    /// Requests that ended.
    pub completed: u32,
    /// Requests paused.
    pub paused: u32,
    /// Requests in their prompt.
    pub context_requests: u32,
    /// Requests that generate.
    pub generation_requests: u32,
    /// Prompt tokens.
    pub context_tokens: u32,
    /// Tokens computed a second time after a pause (part of `context_tokens`).
    pub recomputed_tokens: u32,
    /// Tokens produced.
    pub new_tokens: u32,
    /// Cache blocks in use after the step's blocks were taken.
    pub kv_used: u32,
    /// Cache blocks free.
    pub kv_free: u32,
    /// Block counters since the start.
    pub pool: PoolCounters,
    /// Resident memory of the process, where known.
    pub resident_bytes: Option<u64>,
    /// Work by the definitions of MFU and MBU.
    pub work: StepWork,
    /// Keys that were looked back on.
    pub keys: KeysRead,
    /// What its threads waited for, where a reading was taken at its end.
    pub host: Option<HostReading>,
    /// Where this step's decisions are in the outbox: first and number.
    pub decisions: (u32, u32),
}

/// Keys that a step reads, by which its duration can be modelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeysRead {
    /// Keys in the cache before the prompt tokens of the step, summed over its requests.
    pub context_cached: u64,
    /// Keys that prompt tokens attend to, summed over them.
    pub context_pairs: u64,
    /// Keys that generating requests attend to.
    pub generation: u64,
}

impl KeysRead {
    /// The keys of a step's requests.
    pub fn of(spans: &[SpanShape]) -> KeysRead {
        let mut read = KeysRead::default();
        for span in spans {
            if span.context {
                let cached = span.keys.saturating_sub(span.rows);
                read.context_cached += cached;
                read.context_pairs += span.rows * cached + span.rows * (span.rows + 1) / 2;
            } else {
                read.generation += span.keys;
            }
        }
        read
    }
}

/// What does not change from iteration to iteration.
#[derive(Clone, Copy, Debug)]
pub struct IterationLimits {
    /// Batch size and tokens the engine was built for.
    pub built: (usize, usize),
    /// Batch size and tokens in force.
    pub runtime: (usize, usize),
    /// Cache blocks in all.
    pub kv_blocks: usize,
    /// Tokens per cache block.
    pub tokens_per_block: usize,
    /// Admission policy.
    pub policy: Policy,
    /// Whether prefixes are reused.
    pub reuse: bool,
    /// Whether a step is launched before the tokens of the one before are known.
    pub overlap: bool,
    /// Calendar time of the clock's zero, nanoseconds since 1970.
    pub utc_ns: u64,
}

impl IterationRecord {
    /// Wall time of the pass.
    pub fn wall_ns(&self) -> u64 {
        self.times.end.saturating_sub(self.times.start)
    }

    /// Whether no recorder was on, which takes time.
    pub fn is_unrecorded(&self) -> bool {
        !self.profiled && !self.lead_in
    }

    /// Time in ops: forward pass and sampling.
    pub fn compute_ns(&self) -> u64 {
        self.times.sampled.saturating_sub(self.times.prepared)
    }
}
