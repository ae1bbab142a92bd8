//! Iterations as TensorRT-LLM writes them: one JSON object a line.

use serde_json::{Map, Value, json};
use strobe_engine::host::HostReading;
use strobe_engine::scheduler::{Decision, Policy, Reason};
use strobe_engine::{IterationLimits, IterationRecord};
use strobe_trace::utc::Civil;

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// A record under TensorRT-LLM's field names, with strobe's own under `strobe`. What is not known is absent.
pub(crate) fn to_json(record: &IterationRecord, limits: &IterationLimits, decisions: &[Decision]) -> Value {
    let scheduled = record.context_requests + record.generation_requests;
    let mut kv = Map::new();
    kv.insert("maxNumBlocks".into(), json!(limits.kv_blocks));
    kv.insert("freeNumBlocks".into(), json!(record.kv_free));
    kv.insert("usedNumBlocks".into(), json!(record.kv_used));
    kv.insert("tokensPerBlock".into(), json!(limits.tokens_per_block));
    kv.insert("allocTotalBlocks".into(), json!(record.pool.allocated_total));
    kv.insert("allocNewBlocks".into(), json!(record.pool.allocated_new));
    if limits.reuse {
        let (reused, missed) = (record.pool.reused, record.pool.missed);
        kv.insert("reusedBlocks".into(), json!(reused));
        kv.insert("missedBlocks".into(), json!(missed));
        if reused + missed > 0 {
            kv.insert("cacheHitRate".into(), json!(reused as f64 / (reused + missed) as f64));
        }
    }
    let mut batching = Map::new();
    batching.insert("numScheduledRequests".into(), json!(scheduled));
    batching.insert("numContextRequests".into(), json!(record.context_requests));
    if limits.policy == Policy::StaticBatch {
        batching.insert("numCtxTokens".into(), json!(record.context_tokens));
        batching.insert("numGenTokens".into(), json!(record.generation_requests));
        let empty = (limits.runtime.0 as u64).saturating_sub(u64::from(record.active));
        batching.insert("emptyGenSlots".into(), json!(empty));
    } else {
        batching.insert("numGenRequests".into(), json!(record.generation_requests));
        batching.insert("numPausedRequests".into(), json!(record.paused));
        batching.insert("numCtxTokens".into(), json!(record.context_tokens));
        if record.generation_requests > 0 {
            batching.insert("avgNumDecodedTokensPerIter".into(), json!(1.0));
        }
    }
    let batching_name =
        if limits.policy == Policy::StaticBatch { "staticBatchingStats" } else { "inflightBatchingStats" };
    let t = &record.times;
    let mut line = Map::new();
    line.insert("iter".into(), json!(record.iter));
    line.insert("timestamp".into(), json!(timestamp(limits.utc_ns + t.start, true)));
    line.insert("iterLatencyMS".into(), json!(ms(record.wall_ns())));
    line.insert("hostStepTimeMS".into(), json!(ms(record.wall_ns() - record.compute_ns())));
    line.insert("computeStepTimeMS".into(), json!(ms(record.compute_ns())));
    line.insert("numActiveRequests".into(), json!(record.active));
    line.insert("numQueuedRequests".into(), json!(record.queued));
    line.insert("numNewActiveRequests".into(), json!(record.new_active));
    if record.new_active > 0 {
        line.insert("newActiveRequestsQueueLatencyMS".into(), json!(ms(record.new_active_queue_ns)));
    }
    line.insert("numCompletedRequests".into(), json!(record.completed));
    line.insert("maxNumActiveRequests".into(), json!(limits.runtime.0));
    line.insert("maxBatchSizeStatic".into(), json!(limits.built.0));
    line.insert("maxBatchSizeRuntime".into(), json!(limits.runtime.0));
    line.insert("maxNumTokensStatic".into(), json!(limits.built.1));
    line.insert("maxNumTokensRuntime".into(), json!(limits.runtime.1));
    if let Some(bytes) = record.resident_bytes {
        line.insert("cpuMemUsage".into(), json!(bytes));
    }
    line.insert("schedulerMode".into(), json!(if limits.overlap { "overlap" } else { "non_overlap" }));
    line.insert("kvCacheStats".into(), Value::Object(kv));
    line.insert(batching_name.into(), Value::Object(batching));
    let mut own = json!({
            "startNS": t.start,
            "scheduleMS": ms(t.scheduled - t.start),
            "prepareMS": ms(t.prepared - t.scheduled),
            "forwardMS": ms(t.forwarded - t.prepared),
            "sampleMS": ms(t.sampled - t.forwarded),
            "respondMS": ms(t.end - t.sampled),
            "numNewTokens": record.new_tokens,
            "numRecomputedTokens": record.recomputed_tokens,
            "flops": record.work.flops,
            "bytes": record.work.bytes,
            "contextCachedTokens": record.keys.context_cached,
            "contextKeyPairs": record.keys.context_pairs,
            "generationKvTokens": record.keys.generation,
            "profiled": record.profiled,
            "leadIn": record.lead_in,
            "decisions": decisions.iter().map(decision_json).collect::<Vec<_>>(),
    });
    if let Some(host) = &record.host {
        own["host"] = host_json(host);
        if let Some(disturbed) = host.disturbed() {
            own["disturbed"] = json!(disturbed);
        }
    }
    line.insert("strobe".into(), own);
    Value::Object(line)
}

/// The line of older TensorRT-LLM logs: same keys, one JSON object.
pub(crate) fn to_old_style(record: &IterationRecord, limits: &IterationLimits) -> Value {
    let mut line = Map::new();
    line.insert("Active Request Count".into(), json!(record.active));
    line.insert("Context Requests".into(), json!(record.context_requests));
    line.insert("Free KV cache blocks".into(), json!(record.kv_free));
    line.insert("Generation Requests".into(), json!(record.generation_requests));
    line.insert("Iteration Counter".into(), json!(record.iter));
    line.insert("Max KV cache blocks".into(), json!(limits.kv_blocks));
    line.insert("Max Request Count".into(), json!(limits.runtime.0));
    if let Some(bytes) = record.resident_bytes {
        line.insert("Runtime CPU Memory Usage".into(), json!(bytes));
    }
    line.insert("Scheduled Requests".into(), json!(record.context_requests + record.generation_requests));
    line.insert("Timestamp".into(), json!(timestamp(limits.utc_ns + record.times.start, false)));
    line.insert("Tokens per KV cache block".into(), json!(limits.tokens_per_block));
    line.insert("Total Context Tokens".into(), json!(record.context_tokens));
    line.insert("Used KV cache blocks".into(), json!(record.kv_used));
    Value::Object(line)
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

/// `MM-DD-YYYY HH:MM:SS` in UTC, with microseconds where asked.
fn timestamp(utc_ns: u64, fraction: bool) -> String {
    let Civil { year, month, day, hour, minute, second } = Civil::of(i64::try_from(utc_ns).unwrap_or(i64::MAX));
    let text = format!("{month:02}-{day:02}-{year:04} {hour:02}:{minute:02}:{second:02}");
    if fraction { format!("{text}.{:06}", utc_ns % 1_000_000_000 / 1000) } else { text }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use strobe_engine::{BuildConfig, Engine, EngineOptions, KvCacheType, LoadedModel, ModelRef};
    use strobe_engine::{Outbox, Quantization, Request, SamplingParams};
    use strobe_kernels_cpu::{Cpu, Tier};
    use strobe_model::DType;

    use super::*;

    /// What a run of six requests told, and its limits.
    fn run(options: EngineOptions) -> (Vec<Outbox>, IterationLimits) {
        let mut cpu = Cpu::new(Tier::detect(), 2);
        let build = BuildConfig {
            quantization: Quantization::None,
            kv_cache: KvCacheType::Auto,
            dtype: DType::F32,
            max_batch_size: 8,
            max_num_tokens: 128,
            max_seq_len: 128,
            tokens_per_block: 4,
            gemm_plugin: true,
            context_fmha: true,
            paged_kv_cache: true,
        };
        let model = ModelRef::open("micro", 7).unwrap();
        let config = model.engine_config(build).unwrap();
        let model = LoadedModel::in_memory(&mut cpu, model, config, &mut |_| true).unwrap();
        let options = EngineOptions { max_num_tokens: Some(40), max_batch_size: Some(4), ..options };
        let engine = Engine::start(cpu, &model, options).unwrap();
        let request = |(id, (prompt, max_tokens))| {
            Request::new(id, (0..prompt).collect(), SamplingParams { max_tokens, ..SamplingParams::default() })
        };
        engine.begin_measurement(Vec::new());
        engine.submit((0..).zip([(64, 3), (30, 12), (5, 20), (1, 1), (17, 16), (40, 8)]).map(request));
        let limits = engine.info().limits;
        let (mut heard, mut ended) = (Vec::new(), 0);
        while ended < 6 {
            let mut outbox = engine.outbox();
            let running = engine.wait(&mut outbox, Duration::from_secs(60));
            ended += outbox.finished.len();
            assert!(running || ended == 6, "the engine stopped");
            heard.push(outbox);
        }
        heard.push(engine.shutdown().unwrap());
        (heard, limits)
    }

    fn records(heard: &[Outbox]) -> impl Iterator<Item = &IterationRecord> {
        heard.iter().flat_map(|outbox| &outbox.iterations)
    }

    fn documents(heard: &[Outbox], limits: &IterationLimits) -> Vec<Value> {
        let document = |outbox: &Outbox, record: &IterationRecord| {
            let value = to_json(record, limits, outbox.decisions_of(record));
            // One line of valid JSON that says the same when it is read back.
            let text = value.to_string();
            assert!(!text.contains('\n'));
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
            value
        };
        heard.iter().flat_map(|o| o.iterations.iter().map(move |r| document(o, r))).collect()
    }

    fn keys(value: &Value) -> Vec<&str> {
        value.as_object().unwrap().keys().map(String::as_str).collect()
    }

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
            |host| to_json(&IterationRecord { host, ..IterationRecord::default() }, &limits, &[])["strobe"].clone();
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

    #[test]
    fn records_read_as_the_json_of_tensorrt_llm() {
        let (heard, limits) = run(EngineOptions::default());
        let documents = documents(&heard, &limits);
        assert_eq!(documents.len(), records(&heard).count());
        for (document, record) in documents.iter().zip(records(&heard)) {
            for name in [
                "iter",
                "timestamp",
                "iterLatencyMS",
                "numActiveRequests",
                "numQueuedRequests",
                "numNewActiveRequests",
                "numCompletedRequests",
                "maxNumActiveRequests",
                "maxBatchSizeStatic",
                "maxBatchSizeRuntime",
                "maxNumTokensStatic",
                "maxNumTokensRuntime",
                "kvCacheStats",
                "inflightBatchingStats",
            ] {
                assert!(document.get(name).is_some(), "{name}");
            }
            let kv = &document["kvCacheStats"];
            assert_eq!(
                keys(kv),
                [
                    "maxNumBlocks",
                    "freeNumBlocks",
                    "usedNumBlocks",
                    "tokensPerBlock",
                    "allocTotalBlocks",
                    "allocNewBlocks"
                ],
                "what reuse would tell is absent without it"
            );
            assert_eq!(
                kv["usedNumBlocks"].as_u64().unwrap() + kv["freeNumBlocks"].as_u64().unwrap(),
                kv["maxNumBlocks"]
            );
            let batching = &document["inflightBatchingStats"];
            let count = |name: &str| batching[name].as_u64().unwrap();
            assert_eq!(count("numScheduledRequests"), count("numContextRequests") + count("numGenRequests"));
            assert_eq!(count("numCtxTokens"), u64::from(record.context_tokens));
            assert_eq!(document["iter"], record.iter);
            let newcomers = document["numNewActiveRequests"].as_u64().unwrap();
            assert_eq!(document.get("newActiveRequestsQueueLatencyMS").is_some(), newcomers > 0, "unknown is absent");
            // The parts of an iteration add up to it.
            let own = &document["strobe"];
            let parts = ["scheduleMS", "prepareMS", "forwardMS", "sampleMS", "respondMS"];
            let sum: f64 = parts.iter().map(|name| own[name].as_f64().unwrap()).sum();
            assert!((sum - document["iterLatencyMS"].as_f64().unwrap()).abs() < 1e-6);
        }
        // All reasons of the run are told, with their requests.
        let decisions = documents.iter().flat_map(|d| d["strobe"]["decisions"].as_array().unwrap());
        let names: BTreeSet<_> = decisions.map(|d| d["decision"].as_str().unwrap()).collect();
        for name in ["admitted", "chunked", "deferred: batch full"] {
            assert!(names.contains(name), "{name} is not in {names:?}");
        }
    }

    #[test]
    fn static_batches_and_reuse_have_their_own_fields() {
        let options = EngineOptions { policy: Policy::StaticBatch, prefix_reuse: true, ..EngineOptions::default() };
        let (heard, limits) = run(options);
        let documents = documents(&heard, &limits);
        let last = documents.last().unwrap();
        assert!(last.get("inflightBatchingStats").is_none());
        let batching = &last["staticBatchingStats"];
        assert_eq!(
            keys(batching),
            ["numScheduledRequests", "numContextRequests", "numCtxTokens", "numGenTokens", "emptyGenSlots"]
        );
        for name in ["reusedBlocks", "missedBlocks", "cacheHitRate"] {
            assert!(last["kvCacheStats"].get(name).is_some(), "{name}");
        }
    }

    #[test]
    fn the_old_line_has_the_old_keys() {
        let (heard, limits) = run(EngineOptions::default());
        for record in records(&heard) {
            let line = to_old_style(record, &limits);
            let keys = keys(&line);
            let expected = [
                "Active Request Count",
                "Context Requests",
                "Free KV cache blocks",
                "Generation Requests",
                "Iteration Counter",
                "Max KV cache blocks",
                "Max Request Count",
                "Runtime CPU Memory Usage",
                "Scheduled Requests",
                "Timestamp",
                "Tokens per KV cache block",
                "Total Context Tokens",
                "Used KV cache blocks",
            ];
            let known = |key: &&str| *key != "Runtime CPU Memory Usage" || record.resident_bytes.is_some();
            assert_eq!(keys, expected.into_iter().filter(known).collect::<Vec<_>>());
            assert_eq!(line["Iteration Counter"], record.iter);
        }
    }
}
