//! trtllm-bench's JSON files, so that scripts written for it read strobe's results.
//!
//! Where a key exists in trtllm-bench it has trtllm-bench's name and unit here, and the meaning its
//! name promises: trtllm-bench's known defects (the issue rate, the token gap of a run without
//! streaming) are not repeated. What strobe knows beyond that stands under `strobe`.

use serde_json::{Map, Value, json};

use crate::metrics::Metrics;
use crate::record::{Outcome, RequestRecord};
use strobe_stats::Distribution;

/// The engine that ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineInfo {
    /// The model's name.
    pub model: String,
    /// Its checkpoint, where it has one.
    pub model_path: Option<String>,
    /// The engine directory, where there is one.
    pub engine_dir: Option<String>,
    /// strobe's version.
    pub version: String,
    /// What executed the model.
    pub backend: String,
    /// The weights' data type.
    pub dtype: String,
    /// The KV cache's data type; null in the report when it is the model's own.
    pub kv_cache_dtype: Option<String>,
    /// The quantization; null in the report when there is none.
    pub quantization: Option<String>,
    /// Longest prompt the engine takes, where it has such a limit.
    pub max_input_length: Option<u64>,
    /// Longest sequence the engine takes.
    pub max_sequence_length: Option<u64>,
}

/// The machine that ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MachineInfo {
    /// The processor's or accelerator's name.
    pub name: String,
    /// Its memory, in GiB.
    pub memory_total_gib: Option<f64>,
    /// Its memory clock, in GHz.
    pub clocks_mem_ghz: Option<f64>,
}

/// How the work was split and scheduled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorldInfo {
    /// Tensor parallel ranks.
    pub tp_size: usize,
    /// Pipeline parallel ranks.
    pub pp_size: usize,
    /// Expert parallel ranks.
    pub ep_size: usize,
    /// Most requests in a step.
    pub max_batch_size: usize,
    /// Most tokens in a step; none without such a limit.
    pub max_num_tokens: Option<usize>,
    /// The scheduler's policy.
    pub scheduling_policy: String,
    /// Share of free memory given to the KV cache (0 to 1); none when blocks were given instead.
    pub kv_cache_percentage: Option<f64>,
}

/// What a report says that does not follow from the request records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReportContext {
    /// The engine.
    pub engine: EngineInfo,
    /// The machine; none when nothing is known of it.
    pub machine: Option<MachineInfo>,
    /// Ranks and scheduler limits.
    pub world: WorldInfo,
    /// Where the dataset came from.
    pub dataset_path: Option<String>,
    /// Further facts, put under `strobe` as they are.
    pub strobe: Map<String, Value>,
}

/// The `--report_json` document: trtllm-bench's keys, then `strobe` with all metrics.
#[must_use]
pub fn trtllm_report(m: &Metrics, ctx: &ReportContext) -> Value {
    let mut report = Map::new();
    report.insert("engine".into(), engine(&ctx.engine));
    report.insert("machine".into(), ctx.machine.as_ref().map_or(Value::Null, machine));
    report.insert("world_info".into(), world(m, &ctx.world));
    report.insert(
        "request_info".into(),
        json!({
            "num_requests": m.num_requests,
            "avg_num_concurrent_requests": m.avg_concurrent_requests,
            "avg_input_length": m.isl_tokens.average,
            "avg_output_length": m.osl_tokens.average,
        }),
    );
    report.insert(
        "performance".into(),
        json!({
            "total_latency_ms": m.total_latency_ms,
            "avg_request_latency_ms": m.e2e_ms.average,
            "request_throughput_req_s": m.request_throughput_req_s,
            "system_output_throughput_tok_s": m.output_throughput_tok_s,
            "system_total_throughput_tok_s": m.total_throughput_tok_s,
            "output_throughput_per_user_tok_s": m.output_throughput_per_user_tok_s,
            "output_throughput_per_gpu_tok_s": m.output_throughput_per_gpu_tok_s,
            "request_latency_percentiles_ms": percentiles(&m.e2e_ms),
        }),
    );
    if m.streaming {
        report.insert("streaming_metrics".into(), streaming(m));
    }
    report.insert("dataset".into(), dataset(m, ctx));
    report.insert("strobe".into(), strobe(m, ctx));
    Value::Object(report)
}

fn engine(e: &EngineInfo) -> Value {
    let mut out = Map::new();
    out.insert("model".into(), json!(e.model));
    insert_known(&mut out, "model_path", e.model_path.as_deref());
    insert_known(&mut out, "engine_dir", e.engine_dir.as_deref());
    out.insert("version".into(), json!(e.version));
    out.insert("backend".into(), json!(e.backend));
    out.insert("dtype".into(), json!(e.dtype));
    out.insert("kv_cache_dtype".into(), json!(e.kv_cache_dtype));
    out.insert("quantization".into(), json!(e.quantization));
    insert_known(&mut out, "max_input_length", e.max_input_length);
    insert_known(&mut out, "max_sequence_length", e.max_sequence_length);
    Value::Object(out)
}

fn machine(m: &MachineInfo) -> Value {
    let mut out = Map::new();
    out.insert("name".into(), json!(m.name));
    insert_known(&mut out, "memory.total", m.memory_total_gib);
    insert_known(&mut out, "clocks.mem", m.clocks_mem_ghz);
    Value::Object(out)
}

fn world(m: &Metrics, w: &WorldInfo) -> Value {
    let mut out = Map::new();
    out.insert("tp_size".into(), json!(w.tp_size));
    out.insert("pp_size".into(), json!(w.pp_size));
    out.insert("ep_size".into(), json!(w.ep_size));
    out.insert("world_size".into(), json!(m.world_size));
    out.insert("max_batch_size".into(), json!(w.max_batch_size));
    insert_known(&mut out, "max_num_tokens", w.max_num_tokens);
    out.insert("scheduling_policy".into(), json!(w.scheduling_policy));
    insert_known(&mut out, "kv_cache_percentage", w.kv_cache_percentage);
    insert_known(&mut out, "issue_rate", m.issue_rate_req_s);
    Value::Object(out)
}

fn streaming(m: &Metrics) -> Value {
    let mut out = Map::new();
    let speed = m.gtps_tok_s.as_ref();
    let tpot = m.tpot_ms.as_ref();
    insert_known(&mut out, "token_output_speed_tok_s", speed.map(|d| d.average));
    out.insert("avg_ttft_ms".into(), json!(m.ttft_ms.average));
    insert_known(&mut out, "avg_tpot_ms", tpot.map(|d| d.average));
    insert_known(&mut out, "tpot_percentiles", tpot.map(percentiles));
    out.insert("ttft_percentiles".into(), percentiles(&m.ttft_ms));
    insert_known(&mut out, "gen_tps_percentiles", speed.map(percentiles));
    Value::Object(out)
}

/// The dataset as it was run: the lengths are those of the completed requests.
fn dataset(m: &Metrics, ctx: &ReportContext) -> Value {
    let (isl, osl, seq) = (&m.isl_tokens, &m.osl_tokens, &m.seq_len_tokens);
    // Whole numbers, as in trtllm-bench; the exact averages are in the statistics above them.
    json!({
        "isl_stats": percentiles(isl),
        "osl_stats": percentiles(osl),
        "seq_len_stats": percentiles(seq),
        "num_requests": m.num_requests,
        "dataset_path": ctx.dataset_path,
        "max_isl": isl.maximum as u64,
        "max_osl": osl.maximum as u64,
        "max_sequence_length": seq.maximum as u64,
        "avg_isl": isl.average as u64,
        "avg_osl": osl.average as u64,
        "avg_sequence_length": seq.average as u64,
    })
}

fn strobe(m: &Metrics, ctx: &ReportContext) -> Value {
    let mut out = Map::new();
    // Plain numbers and names: nothing in it can fail to serialise.
    out.insert("metrics".into(), serde_json::to_value(m).unwrap_or_default());
    out.extend(ctx.strobe.clone());
    Value::Object(out)
}

/// trtllm-bench's seven keys, in its order.
fn percentiles(d: &Distribution) -> Value {
    json!({
        "p50": d.p50,
        "p90": d.p90,
        "p95": d.p95,
        "p99": d.p99,
        "minimum": d.minimum,
        "maximum": d.maximum,
        "average": d.average,
    })
}

fn insert_known<T: Into<Value>>(out: &mut Map<String, Value>, key: &str, value: Option<T>) {
    if let Some(value) = value {
        out.insert(key.to_string(), value.into());
    }
}

/// The `--request_json` list, without the decoded text. See [`trtllm_requests_with_text`].
#[must_use]
pub fn trtllm_requests(records: &[RequestRecord]) -> Value {
    trtllm_requests_with_text(records, &|_| None)
}

/// The `--request_json` list: times in ns, rates in tokens per ns, as in trtllm-bench. `text` gives
/// a record's decoded output where there is a tokenizer.
///
/// `start_timestamp` is the intended arrival, so `end_to_end_latency` is the report's E2E; the
/// sending has its own `sent_timestamp`. What a request did not reach is absent.
#[must_use]
pub fn trtllm_requests_with_text(records: &[RequestRecord], text: &dyn Fn(&RequestRecord) -> Option<String>) -> Value {
    records.iter().map(|r| request(r, text(r))).collect()
}

fn request(r: &RequestRecord, text: Option<String>) -> Value {
    let n = r.num_output_tokens();
    let end = r.last_token_ns().filter(|_| r.outcome() == Outcome::Completed);
    let mut out = Map::new();
    out.insert("id".into(), json!(r.id));
    out.insert("num_input_tokens".into(), json!(r.num_input_tokens));
    // trtllm-bench counts error responses here; a request fails with one.
    let failed = r.outcome() == Outcome::Failed;
    out.insert("error_tokens".into(), json!(u32::from(failed)));
    out.insert("start_timestamp".into(), json!(r.arrival_ns));
    insert_known(&mut out, "first_token_timestamp", r.first_token_ns());
    insert_known(&mut out, "end_timestamp", end);
    insert_known(&mut out, "decode_iteration", decode_iteration(r));
    out.insert("num_total_output_tokens".into(), json!(n));
    out.insert("num_generated_tokens".into(), json!(n.saturating_sub(1)));
    if let (Some(first), Some(end)) = (r.first_token_ns(), end) {
        let generation = end.saturating_sub(first);
        let e2e = end.saturating_sub(r.arrival_ns);
        let ttft = first.saturating_sub(r.arrival_ns);
        let gaps = n.saturating_sub(1) as f64;
        out.insert("generation_time".into(), json!(generation));
        out.insert("time_to_first_token".into(), json!(ttft));
        let intertoken = (gaps > 0.0).then(|| generation as f64 / gaps);
        insert_known(&mut out, "intertoken_latency", intertoken);
        out.insert("end_to_end_latency".into(), json!(e2e));
        let output_rate = (e2e > 0).then(|| n as f64 / e2e as f64);
        insert_known(&mut out, "output_token_throughput", output_rate);
        let generation_rate = (gaps > 0.0 && generation > 0).then(|| gaps / generation as f64);
        insert_known(&mut out, "generation_token_throughput", generation_rate);
    }
    insert_known(&mut out, "output", text);
    out.insert("output_tokens".into(), json!(n));

    out.insert("task_id".into(), json!(r.task_id));
    out.insert("finish_reason".into(), json!(r.finish_reason));
    insert_known(&mut out, "error", r.error.as_deref());
    out.insert("sent_timestamp".into(), json!(r.sent_ns));
    out.insert("queued_timestamp".into(), json!(r.queued_ns));
    insert_known(&mut out, "first_scheduled_timestamp", r.first_scheduled_ns);
    if let Some((first, last)) = r.iterations {
        out.insert("iterations".into(), json!([first, last]));
    }
    out.insert("preemptions".into(), json!(r.preemptions));
    out.insert("reused_tokens".into(), json!(r.reused_tokens));
    Value::Object(out)
}

/// trtllm-bench's counter of token-making steps, which starts at 0: distinct token times, less one.
fn decode_iteration(r: &RequestRecord) -> Option<u64> {
    let changes = r.token_times_ns.windows(2).filter(|w| w[0] != w[1]).count();
    r.first_token_ns().map(|_| changes as u64)
}
