//! What is known of every iteration, profiled or not.

use serde_json::{Map, Value, json};

use crate::block_pool::PoolCounters;
use crate::host::HostReading;
use crate::recorder::StepTimes;
use crate::scheduler::{Decision, Policy, Reason};
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

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
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

    /// The record under the anchor's new field names, with strobe's own under `strobe`. What is not known is absent.
    pub fn to_json(&self, limits: &IterationLimits, decisions: &[Decision]) -> Value {
        let scheduled = self.context_requests + self.generation_requests;
        let mut kv = Map::new();
        kv.insert("maxNumBlocks".into(), json!(limits.kv_blocks));
        kv.insert("freeNumBlocks".into(), json!(self.kv_free));
        kv.insert("usedNumBlocks".into(), json!(self.kv_used));
        kv.insert("tokensPerBlock".into(), json!(limits.tokens_per_block));
        kv.insert("allocTotalBlocks".into(), json!(self.pool.allocated_total));
        kv.insert("allocNewBlocks".into(), json!(self.pool.allocated_new));
        if limits.reuse {
            let (reused, missed) = (self.pool.reused, self.pool.missed);
            kv.insert("reusedBlocks".into(), json!(reused));
            kv.insert("missedBlocks".into(), json!(missed));
            if reused + missed > 0 {
                kv.insert("cacheHitRate".into(), json!(reused as f64 / (reused + missed) as f64));
            }
        }
        let mut batching = Map::new();
        batching.insert("numScheduledRequests".into(), json!(scheduled));
        batching.insert("numContextRequests".into(), json!(self.context_requests));
        if limits.policy == Policy::StaticBatch {
            batching.insert("numCtxTokens".into(), json!(self.context_tokens));
            batching.insert("numGenTokens".into(), json!(self.generation_requests));
            let empty = (limits.runtime.0 as u64).saturating_sub(u64::from(self.active));
            batching.insert("emptyGenSlots".into(), json!(empty));
        } else {
            batching.insert("numGenRequests".into(), json!(self.generation_requests));
            batching.insert("numPausedRequests".into(), json!(self.paused));
            batching.insert("numCtxTokens".into(), json!(self.context_tokens));
            if self.generation_requests > 0 {
                batching.insert("avgNumDecodedTokensPerIter".into(), json!(1.0));
            }
        }
        let batching_name =
            if limits.policy == Policy::StaticBatch { "staticBatchingStats" } else { "inflightBatchingStats" };
        let t = &self.times;
        let mut record = Map::new();
        record.insert("iter".into(), json!(self.iter));
        record.insert("timestamp".into(), json!(timestamp(limits.utc_ns + t.start, true)));
        record.insert("iterLatencyMS".into(), json!(ms(self.wall_ns())));
        record.insert("hostStepTimeMS".into(), json!(ms(self.wall_ns() - self.compute_ns())));
        record.insert("computeStepTimeMS".into(), json!(ms(self.compute_ns())));
        record.insert("numActiveRequests".into(), json!(self.active));
        record.insert("numQueuedRequests".into(), json!(self.queued));
        record.insert("numNewActiveRequests".into(), json!(self.new_active));
        if self.new_active > 0 {
            record.insert("newActiveRequestsQueueLatencyMS".into(), json!(ms(self.new_active_queue_ns)));
        }
        record.insert("numCompletedRequests".into(), json!(self.completed));
        record.insert("maxNumActiveRequests".into(), json!(limits.runtime.0));
        record.insert("maxBatchSizeStatic".into(), json!(limits.built.0));
        record.insert("maxBatchSizeRuntime".into(), json!(limits.runtime.0));
        record.insert("maxNumTokensStatic".into(), json!(limits.built.1));
        record.insert("maxNumTokensRuntime".into(), json!(limits.runtime.1));
        if let Some(bytes) = self.resident_bytes {
            record.insert("cpuMemUsage".into(), json!(bytes));
        }
        record.insert("schedulerMode".into(), json!(if limits.overlap { "overlap" } else { "non_overlap" }));
        record.insert("kvCacheStats".into(), Value::Object(kv));
        record.insert(batching_name.into(), Value::Object(batching));
        let mut own = json!({
                "startNS": t.start,
                "scheduleMS": ms(t.scheduled - t.start),
                "prepareMS": ms(t.prepared - t.scheduled),
                "forwardMS": ms(t.forwarded - t.prepared),
                "sampleMS": ms(t.sampled - t.forwarded),
                "respondMS": ms(t.end - t.sampled),
                "numNewTokens": self.new_tokens,
                "numRecomputedTokens": self.recomputed_tokens,
                "flops": self.work.flops,
                "bytes": self.work.bytes,
                "contextCachedTokens": self.keys.context_cached,
                "contextKeyPairs": self.keys.context_pairs,
                "generationKvTokens": self.keys.generation,
                "profiled": self.profiled,
                "leadIn": self.lead_in,
                "decisions": decisions.iter().map(decision_json).collect::<Vec<_>>(),
        });
        if let Some(host) = &self.host {
            own["host"] = host_json(host);
            if let Some(disturbed) = host.disturbed() {
                own["disturbed"] = json!(disturbed);
            }
        }
        record.insert("strobe".into(), own);
        Value::Object(record)
    }

    /// The line of older TensorRT-LLM logs: same keys, one JSON object.
    pub fn to_old_style(&self, limits: &IterationLimits) -> Value {
        let mut line = Map::new();
        line.insert("Active Request Count".into(), json!(self.active));
        line.insert("Context Requests".into(), json!(self.context_requests));
        line.insert("Free KV cache blocks".into(), json!(self.kv_free));
        line.insert("Generation Requests".into(), json!(self.generation_requests));
        line.insert("Iteration Counter".into(), json!(self.iter));
        line.insert("Max KV cache blocks".into(), json!(limits.kv_blocks));
        line.insert("Max Request Count".into(), json!(limits.runtime.0));
        if let Some(bytes) = self.resident_bytes {
            line.insert("Runtime CPU Memory Usage".into(), json!(bytes));
        }
        line.insert("Scheduled Requests".into(), json!(self.context_requests + self.generation_requests));
        line.insert("Timestamp".into(), json!(timestamp(limits.utc_ns + self.times.start, false)));
        line.insert("Tokens per KV cache block".into(), json!(limits.tokens_per_block));
        line.insert("Total Context Tokens".into(), json!(self.context_tokens));
        line.insert("Used KV cache blocks".into(), json!(self.kv_used));
        Value::Object(line)
    }
}

/// What is not known is absent.
fn host_json(host: &HostReading) -> Value {
    let fields = [
        ("cpuWaitMaxMS", host.cpu_wait_max_ns.map(|ns| json!(ms(ns)))),
        ("cpuWaitSumMS", host.cpu_wait_sum_ns.map(|ns| json!(ms(ns)))),
        ("involuntarySwitches", host.involuntary_switches.map(|count| json!(count))),
        ("majorFaults", host.major_faults.map(|count| json!(count))),
        ("iterations", Some(json!(host.covers))),
    ];
    fields.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?))).collect::<Map<_, _>>().into()
}

fn decision_json(decision: &Decision) -> Value {
    let mut value = json!({"request": decision.request, "decision": decision.reason.name()});
    match decision.reason {
        Reason::Admitted { needed, free, reused_tokens } => {
            value["blocksNeeded"] = json!(needed);
            value["blocksFree"] = json!(free);
            value["reusedTokens"] = json!(reused_tokens);
        }
        Reason::Resumed { recompute } => value["recomputeTokens"] = json!(recompute),
        Reason::Chunked { done, of } => {
            value["tokensDone"] = json!(done);
            value["tokensTotal"] = json!(of);
        }
        Reason::KvCapacity { needed, free } => {
            value["blocksNeeded"] = json!(needed);
            value["blocksFree"] = json!(free);
        }
        Reason::Paused { freed } => value["blocksFreed"] = json!(freed),
        Reason::BatchFull | Reason::TokenBudget | Reason::StaticBatchRunning => {}
    }
    value
}

/// `MM-DD-YYYY HH:MM:SS[.ffffff]` in UTC.
fn timestamp(utc_ns: u64, fraction: bool) -> String {
    let seconds = utc_ns / 1_000_000_000;
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since 1970 to a date, after Howard Hinnant's `civil_from_days`, for dates after 1970 only.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    let text = format!("{month:02}-{day:02}-{year:04} {hour:02}:{minute:02}:{second:02}");
    if fraction { format!("{text}.{:06}", utc_ns % 1_000_000_000 / 1000) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_machine_did_is_told_as_far_as_it_is_known() {
        let limits = IterationLimits {
            built: (1, 1),
            runtime: (1, 1),
            kv_blocks: 1,
            tokens_per_block: 1,
            policy: Policy::MaxUtilization,
            reuse: false,
            overlap: false,
            utc_ns: 0,
        };
        let strobe =
            |host| IterationRecord { host, ..IterationRecord::default() }.to_json(&limits, &[])["strobe"].clone();
        assert_eq!(strobe(None).get("host").or(strobe(None).get("disturbed")), None);
        let blind = HostReading { major_faults: Some(1), covers: 3, ..HostReading::default() };
        assert_eq!(strobe(Some(blind))["host"], json!({"majorFaults": 1, "iterations": 3}));
        assert_eq!(strobe(Some(blind)).get("disturbed"), None);
        let (wait, sum) = (Some(200_000), Some(250_000));
        let seen = HostReading { cpu_wait_max_ns: wait, cpu_wait_sum_ns: sum, wall_ns: 1_000_000, ..blind };
        assert_eq!(strobe(Some(seen))["host"]["cpuWaitMaxMS"], json!(0.2));
        assert_eq!(strobe(Some(seen))["host"]["cpuWaitSumMS"], json!(0.25));
        assert_eq!(strobe(Some(seen))["disturbed"], json!(true));
    }

    #[test]
    fn dates_are_right() {
        assert_eq!(timestamp(1_702_479_314_000_000_000, false), "12-13-2023 14:55:14");
        assert_eq!(timestamp(951_782_400_123_456_789, true), "02-29-2000 00:00:00.123456");
        assert_eq!(timestamp(0, false), "01-01-1970 00:00:00");
    }
}
