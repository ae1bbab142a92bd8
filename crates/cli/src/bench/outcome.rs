//! What a benchmark found, and its report document.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use strobe_analyze::budget::{budget_by_kind, budgets};
use strobe_analyze::compare::runs::Cell;
use strobe_analyze::top_ops::top_ops;
use strobe_engine::device::DeviceFacts;
use strobe_engine::window::Window;
use strobe_engine::{CacheSize, EngineConfig, EngineInfo, HostReadings, IterationRecord, WeightsOrigin};
use strobe_kernels_cuda::{GpuSamples, RecorderCost};
use strobe_stats::{Spread, spread};
use strobe_trace::Trace;
use strobe_workload::{
    Metrics, PercentileRule, ReportContext, WorldInfo, trtllm_json::EngineInfo as TrtllmEngine,
    trtllm_json::MachineInfo, trtllm_report,
};

use super::client::RunData;
use super::experts::{self, ExpertReport};
use super::facts::Facts;
use super::overhead::{self, Overhead};
use super::start::Start;
use super::utilization::{FullBatchDecode, Utilization, prefill_tokens_per_s};
use crate::machine::{Machine, MeasuredPeaks};
use crate::recording;

/// The figure by which whole runs are compared first, as reports name it.
pub(crate) const OUTPUT_THROUGHPUT: &str = "Output throughput (tokens/sec)";

/// The figures whose spread over repetitions is reported.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RepeatFigures {
    pub request_throughput_req_s: f64,
    pub output_throughput_tok_s: f64,
    pub total_latency_ms: f64,
    pub avg_request_latency_ms: f64,
    pub avg_ttft_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub avg_tpot_ms: Option<f64>,
    /// MFU of pure prompt iterations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_mfu: Option<f64>,
    /// MBU of pure generation iterations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_mbu: Option<f64>,
    /// Tokens per second of pure prompt iterations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_tok_s: Option<f64>,
    /// Tokens per second of generation with all requests in the batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_batch_decode_tok_s: Option<f64>,
    /// The machine's part in this run, where it was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostReadings>,
    /// Iterations by batch: what a comparison of kinds of iteration stands on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cells: Vec<Cell>,
    /// Memory bandwidth right before and right after this run, bytes per second: the state that it met the machine in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_around: Option<[f64; 2]>,
}

impl RepeatFigures {
    pub(crate) fn of(m: &Metrics, utilization: &[Utilization], iterations: &[IterationRecord]) -> RepeatFigures {
        let kind = |name: &str| utilization.iter().find(|u| u.kind == name);
        RepeatFigures {
            request_throughput_req_s: m.request_throughput_req_s,
            output_throughput_tok_s: m.output_throughput_tok_s,
            total_latency_ms: m.total_latency_ms,
            avg_request_latency_ms: m.e2e_ms.average,
            avg_ttft_ms: m.ttft_ms.average,
            avg_tpot_ms: m.tpot_ms.as_ref().map(|d| d.average),
            prefill_mfu: kind("prefill").map(|u| u.mfu),
            decode_mbu: kind("decode").map(|u| u.mbu),
            prefill_tok_s: prefill_tokens_per_s(iterations),
            full_batch_decode_tok_s: FullBatchDecode::of(iterations).map(|full| full.tokens_per_s),
            cells: cells(iterations),
            host: None,
            bandwidth_around: None,
        }
    }

    /// Name with unit, and value, of each figure.
    pub(crate) fn rows(&self) -> Vec<(&'static str, f64)> {
        let mut rows = vec![
            ("Request throughput (req/sec)", self.request_throughput_req_s),
            (OUTPUT_THROUGHPUT, self.output_throughput_tok_s),
            ("Total latency (ms)", self.total_latency_ms),
            ("Average request latency (ms)", self.avg_request_latency_ms),
            ("Average TTFT (ms)", self.avg_ttft_ms),
        ];
        rows.extend(self.avg_tpot_ms.map(|value| ("Average TPOT (ms)", value)));
        rows.extend(self.prefill_mfu.map(|value| ("MFU, prefill iterations (share of peak)", value)));
        rows.extend(self.decode_mbu.map(|value| ("MBU, decode iterations (share of bandwidth)", value)));
        rows.extend(self.prefill_tok_s.map(|value| ("Prefill iterations (tokens/sec)", value)));
        rows.extend(self.full_batch_decode_tok_s.map(|value| ("Decode at full batch (tokens/sec)", value)));
        rows
    }
}

/// The iterations of a run by batch. Recorded ones are left out where others are there: recording takes time.
fn cells(iterations: &[IterationRecord]) -> Vec<Cell> {
    let undisturbed: Vec<_> = iterations.iter().filter(|i| i.is_unrecorded()).collect();
    let chosen = if undisturbed.is_empty() { iterations.iter().collect() } else { undisturbed };
    Cell::group(chosen.iter().map(|i| (i.context_tokens, i.generation_requests, i.wall_ns() as f64)))
}

/// Spread of each figure over the repetitions that have it.
pub(crate) fn spreads(repeats: &[RepeatFigures]) -> Vec<(&'static str, Spread)> {
    let mut values: Vec<(&'static str, Vec<f64>)> = Vec::new();
    for (name, value) in repeats.iter().flat_map(RepeatFigures::rows) {
        match values.iter_mut().find(|(known, _)| *known == name) {
            Some((_, values)) => values.push(value),
            None => values.push((name, vec![value])),
        }
    }
    values.into_iter().map(|(name, values)| (name, spread(&values))).collect()
}

/// Everything a benchmark found.
pub(crate) struct Outcome {
    pub metrics: anyhow::Result<Metrics>,
    pub utilization: Vec<Utilization>,
    pub config: EngineConfig,
    pub engine_dir: Option<PathBuf>,
    /// Whether the weights were read from the mapped file.
    pub mapped: bool,
    /// How long the process took to its first token, where it did nothing else before.
    pub start: Option<Start>,
    pub info: EngineInfo,
    pub machine: Machine,
    pub peaks: MeasuredPeaks,
    /// Power, clocks and memory of the GPU during the run.
    pub samples: Option<GpuSamples>,
    pub run: RunData,
    pub repeats: Vec<RepeatFigures>,
    pub trace: Option<Trace>,
    pub rule: PercentileRule,
    pub cache: CacheSize,
    pub dataset: Option<String>,
    /// The windows that were asked for.
    pub windows: Vec<Window>,
    /// How many requests the run was to have.
    pub asked: usize,
    pub command: String,
    pub arrival: String,
    /// Expert-parallel ranks that the experts are thought to be divided among.
    pub assumed_ranks: usize,
}

/// What became of a profile window.
fn window_state(run: &RunData, window: &Window) -> &'static str {
    match run.recordings.iter().find(|recording| recording.window == *window) {
        Some(recording) if recording.complete => "complete",
        Some(_) => "incomplete",
        None => "never reached",
    }
}

/// The machine's part in a run, with the verdict on it.
pub(super) fn host_json(host: &HostReadings) -> Value {
    let mut value = json!(host);
    if let Some(share) = host.cpu_wait_share() {
        value["cpu_wait_share"] = json!(share);
    }
    if host.oversubscribed() {
        value["oversubscribed"] = json!(true);
    }
    if let Some(reason) = host.disturbance() {
        value["disturbance"] = json!(reason);
    }
    value
}

impl Outcome {
    /// Each window that was asked for, with what became of it.
    pub(crate) fn window_states(&self) -> Vec<(Window, &'static str)> {
        self.windows.iter().map(|window| (*window, window_state(&self.run, window))).collect()
    }

    /// Largest resident memory seen at the end of an iteration.
    pub(crate) fn peak_resident(&self) -> Option<u64> {
        self.run.iterations.iter().filter_map(|i| i.resident_bytes).max()
    }

    /// Most cache blocks in use at once.
    pub(crate) fn peak_kv_blocks(&self) -> u32 {
        self.run.iterations.iter().map(|i| i.kv_used).max().unwrap_or(0)
    }

    /// Bytes of one cache block over all layers.
    pub(crate) fn kv_block_bytes(&self) -> u64 {
        self.info.memory.kv_cache_bytes / (self.info.limits.kv_blocks as u64).max(1)
    }

    /// Whether iterations all over the run were recorded to see what that costs.
    pub(crate) fn probed(&self) -> bool {
        self.windows.is_empty() && self.run.iterations.iter().any(|i| i.profiled)
    }

    /// What the recorder cost; `None` when it was not probed, or no iterations were alike.
    pub(crate) fn overhead(&self) -> Option<Overhead> {
        self.probed().then(|| overhead::of_probe(&self.run.iterations)).flatten()
    }

    /// What the recorder is seen to cost in the profile windows, against the steps around them.
    pub(crate) fn window_overhead(&self) -> Option<Overhead> {
        (!self.windows.is_empty() && self.recorded()).then(|| overhead::of_windows(&self.run.iterations)).flatten()
    }

    /// Whether strobe itself recorded what was asked for: on a GPU another tool may, or none can.
    pub(crate) fn recorded(&self) -> bool {
        let on_gpu = matches!(self.info.device, DeviceFacts::Cuda(_));
        !on_gpu || self.run.recordings.iter().any(|recording| recording.gpu.is_some())
    }

    /// What switching a GPU's recorder on and off took for each window.
    pub(crate) fn recorder_costs(&self) -> Vec<(Window, RecorderCost)> {
        let costs = self.run.recordings.iter().filter_map(|r| Some((r.window, r.gpu.as_ref()?.timeline.cost)));
        costs.collect()
    }

    /// Most GPU memory in use at once, by all processes, and how much of it is in none of the engine's pools.
    pub(crate) fn gpu_memory(&self) -> Option<(u64, u64)> {
        let peak = self.samples.as_ref()?.summary().series("GPU memory used")?.peak as u64;
        let m = &self.info.memory;
        let pools = m.weights_bytes + m.kv_cache_bytes + m.activation_bytes + m.workspace_bytes + m.graph_bytes;
        Some((peak, peak.saturating_sub(pools)))
    }

    /// What a report says that does not follow from the records.
    pub(crate) fn context(&self) -> ReportContext {
        let build = &self.config.build;
        let mut strobe = Facts::of(self).json;
        let mut put = |key: &str, value: Value| strobe.insert(key.to_string(), value);
        put("partial", json!(self.run.partial));
        if let Some(balance) = &self.info.perfect_router {
            put("perfect_router", experts::plan_json(balance));
        }
        if let Some(report) = ExpertReport::of(self) {
            put("experts", report.to_json());
        }
        put("utilization", json!(self.utilization));
        if let Some(full) = FullBatchDecode::of(&self.run.iterations) {
            put("full_batch_decode", json!(full));
        }
        put("iterations", json!(self.run.iterations.len()));
        put("repeats", json!(self.repeats));
        if self.repeats.len() > 1 {
            let spreads: Map<_, _> =
                spreads(&self.repeats).into_iter().map(|(name, s)| (name.to_string(), json!(s))).collect();
            put("spread", Value::Object(spreads));
        }
        if self.probed() {
            put("profiler_overhead", self.overhead().map_or(json!({"pairs": 0}), |overhead| json!(overhead)));
        }
        if let Some(failure) = &self.run.failure {
            put("failure", json!(failure.to_string()));
        }
        if !self.windows.is_empty() {
            if let Some(overhead) = self.window_overhead() {
                put("recorder_cost_in_windows", json!(overhead));
            }
            let costs = self.recorder_costs();
            if !costs.is_empty() {
                put("recorder", costs.iter().map(|(w, c)| json!({"window": w.to_string(), "cost": c})).collect());
            }
            let states = self.window_states();
            put(
                "windows",
                states.iter().map(|(w, state)| json!({"first": w.first, "last": w.last, "state": state})).collect(),
            );
        }
        if let Some(trace) = &self.trace {
            let context = recording::context(trace);
            let budgets = budgets(&context);
            put(
                "profile",
                json!({
                    "budget_by_kind": budget_by_kind(&budgets),
                    "top_ops": top_ops(&context),
                    "iterations": budgets,
                }),
            );
        }
        ReportContext {
            engine: TrtllmEngine {
                model: self.config.model_name.clone(),
                model_path: match self.config.weights {
                    WeightsOrigin::Checkpoint => Some(self.config.model_name.clone()),
                    WeightsOrigin::Random { .. } => None,
                },
                engine_dir: self.engine_dir.as_ref().map(|d| d.display().to_string()),
                version: env!("CARGO_PKG_VERSION").into(),
                backend: match &self.info.device {
                    DeviceFacts::Cpu { tier, .. } => format!("strobe CPU ({})", tier.name()),
                    DeviceFacts::Cuda(facts) => format!("strobe CUDA ({})", facts.arch),
                },
                dtype: build.dtype.name().into(),
                kv_cache_dtype: Some(match &self.info.device {
                    DeviceFacts::Cpu { tier, .. } => build.cpu_kv_cache_name(*tier).into(),
                    DeviceFacts::Cuda(_) => build.gpu_kv_cache_name().into(),
                }),
                quantization: build.quantization.algorithm().map(Into::into),
                max_input_length: None,
                max_sequence_length: Some(build.max_seq_len as u64),
            },
            machine: Some(MachineInfo {
                name: self.machine.gpu.as_ref().map_or(self.machine.cpu.clone(), |gpu| gpu.name.clone()),
                memory_total_gib: {
                    let gpu = self.machine.gpu.as_ref().map(|gpu| gpu.memory_bytes);
                    gpu.or(self.machine.memory_bytes).map(|b| b as f64 / (1u64 << 30) as f64)
                },
                clocks_mem_ghz: None,
            }),
            world: WorldInfo {
                tp_size: 1,
                pp_size: 1,
                ep_size: 1,
                max_batch_size: self.info.limits.runtime.0,
                max_num_tokens: Some(self.info.limits.runtime.1),
                scheduling_policy: self.info.limits.policy.name().into(),
                kv_cache_percentage: match self.cache {
                    CacheSize::FreeFraction(fraction) => Some(fraction),
                    CacheSize::Blocks(_) => None,
                },
            },
            dataset_path: self.dataset.clone(),
            strobe,
        }
    }

    /// `report.json`.
    pub(crate) fn report(&self) -> Value {
        let context = self.context();
        match &self.metrics {
            Ok(metrics) => trtllm_report(metrics, &context),
            Err(error) => json!({"error": format!("{error:#}"), "strobe": context.strobe}),
        }
    }
}
