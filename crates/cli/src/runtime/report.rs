//! The report of another runtime: the same rows, keys and files as strobe's, as far as they are known.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use strobe_engine::{EngineConfig, IterationLimits, IterationRecord, Policy, WeightsOrigin};
use strobe_model::Tokenizer;
use strobe_report::human;
use strobe_report::table::Table;
use strobe_trace::IterationKind;
use strobe_workload::{
    Metrics, PercentileRule, ReportContext, RequestRecord, WorldInfo, strobe_text, trtllm_json::EngineInfo,
    trtllm_json::MachineInfo, trtllm_report, trtllm_requests_with_text, trtllm_text,
};

use super::{Facts, Run, Runtime};
use crate::bench::outcome::{RepeatFigures, spreads};
use crate::bench::text;
use crate::bench::utilization::{FullBatchDecode, kind_of};
use crate::bench::write::Files;
use crate::machine::Machine;
use crate::run_writer::Problems;
use crate::{iteration_json, run_dir};

/// A benchmark of another runtime.
pub(crate) struct Outcome {
    pub runtime: Runtime,
    pub facts: Facts,
    pub config: EngineConfig,
    pub engine_dir: Option<PathBuf>,
    pub metrics: Metrics,
    /// The run that is reported, the last one.
    pub run: Run,
    pub repeats: Vec<RepeatFigures>,
    pub rule: PercentileRule,
    pub machine: Machine,
    pub batch: usize,
    /// Most prompt tokens in a step, where the runtime has such a limit.
    pub prefill_tokens: Option<usize>,
    pub dataset: String,
    pub command: String,
    pub arrival: String,
}

impl Outcome {
    fn backend(&self) -> String {
        format!("{}: {}, torch {}", self.runtime.name(), self.facts.description, self.facts.torch)
    }

    fn policy(&self) -> &'static str {
        if self.runtime == Runtime::Pytorch { Policy::StaticBatch.name() } else { "slots refilled as requests end" }
    }

    fn limits(&self) -> IterationLimits {
        let largest = self.run.iterations.iter().map(|i| i.context_tokens + i.generation_requests).max();
        // Without a limit the largest step is as much as there can be.
        let tokens = self.prefill_tokens.unwrap_or(largest.unwrap_or(0) as usize);
        IterationLimits {
            built: (self.batch, tokens),
            runtime: (self.batch, tokens),
            kv_blocks: 0,
            tokens_per_block: 0,
            policy: Policy::GuaranteedNoEvict,
            reuse: false,
            overlap: false,
            utc_ns: 0,
        }
    }

    fn context(&self) -> ReportContext {
        let mut strobe = Map::new();
        let mut put = |key: &str, value: Value| strobe.insert(key.to_string(), value);
        put("partial", json!(false));
        put("runtime", json!(self.runtime.name()));
        put("torch", json!(self.facts.torch));
        put("python", json!(self.facts.python));
        put("implementation", json!(self.facts.description));
        put("device", json!(self.facts.device_name.as_deref().unwrap_or(&self.machine.cpu)));
        put("load_seconds", json!(self.facts.load_seconds));
        put("warmup_seconds", json!(self.facts.warmup_seconds));
        put("command", json!(self.command));
        put("arrival", json!(self.arrival));
        put("weights", json!(self.config.weights.describe()));
        put("machine", json!(self.machine));
        put(
            "memory",
            json!({
                "weights_bytes": self.facts.weight_bytes,
                "kv_cache_reserved_bytes": Some(self.facts.kv_bytes).filter(|bytes| *bytes > 0),
                "device_peak_bytes": self.run.peak_bytes,
            }),
        );
        put("iterations", json!(self.run.iterations.len()));
        if let Some(full) = FullBatchDecode::of(&self.run.iterations) {
            put("full_batch_decode", json!(full));
        }
        put("repeats", json!(self.repeats));
        if self.repeats.len() > 1 {
            let all: Map<_, _> =
                spreads(&self.repeats).into_iter().map(|(name, s)| (name.to_string(), json!(s))).collect();
            put("spread", Value::Object(all));
        }
        let build = &self.config.build;
        let checkpoint = matches!(self.config.weights, WeightsOrigin::Checkpoint);
        ReportContext {
            engine: EngineInfo {
                model: self.config.model_name.clone(),
                model_path: checkpoint.then(|| self.config.model_name.clone()),
                engine_dir: self.engine_dir.as_ref().map(|d| d.display().to_string()),
                version: env!("CARGO_PKG_VERSION").into(),
                backend: self.backend(),
                dtype: build.dtype.name().into(),
                kv_cache_dtype: Some(build.dtype.name().into()),
                quantization: None,
                max_input_length: None,
                max_sequence_length: None,
            },
            machine: Some(match &self.facts.device_name {
                Some(name) => MachineInfo {
                    name: name.clone(),
                    memory_total_gib: self.facts.device_bytes.map(gib),
                    clocks_mem_ghz: None,
                },
                None => MachineInfo {
                    name: self.machine.cpu.clone(),
                    memory_total_gib: self.machine.memory_bytes.map(gib),
                    clocks_mem_ghz: None,
                },
            }),
            world: WorldInfo {
                tp_size: 1,
                pp_size: 1,
                ep_size: 1,
                max_batch_size: self.batch,
                max_num_tokens: self.prefill_tokens,
                scheduling_policy: self.policy().into(),
                kv_cache_percentage: None,
            },
            dataset_path: Some(self.dataset.clone()),
            strobe,
        }
    }

    /// `report.json`.
    pub(crate) fn report(&self) -> Value {
        trtllm_report(&self.metrics, &self.context())
    }

    /// The report for people.
    pub(crate) fn text(&self, width: usize) -> String {
        let mut out = trtllm_text(&self.metrics, &self.context(), &self.rule.to_string());
        let _ = write!(out, "\n{}\n", strobe_text(&self.metrics));
        text::heading(&mut out, "RUNTIME, MACHINE AND MEMORY");
        let facts = &self.facts;
        let bytes = |value: Option<u64>| value.map_or(human::NOT_KNOWN.into(), human::bytes);
        let cache = if facts.kv_bytes > 0 { human::bytes(facts.kv_bytes) } else { "grows with the batch".into() };
        let device = match &facts.device_name {
            Some(name) => name.clone(),
            None => format!("{}, {} threads", self.machine.cpu, facts.threads),
        };
        for (label, value) in [
            ("Runtime:", format!("{}, Python {}", self.backend(), facts.python)),
            ("Device:", device),
            ("Weights:", format!("{}, {}", self.config.weights.describe(), self.config.build.dtype)),
            ("Scheduling:", format!("{}, at most {} requests in a step", self.policy(), self.batch)),
            ("Arrivals:", self.arrival.clone()),
            ("Loading, warm-up:", format!("{:.1} s, {:.1} s", facts.load_seconds, facts.warmup_seconds)),
            ("Device memory, peak:", bytes(self.run.peak_bytes)),
            ("  weights:", human::bytes(facts.weight_bytes)),
            ("  KV cache:", cache),
        ] {
            let _ = writeln!(out, "{label:<38}{value}");
        }
        out.push('\n');
        out.push_str(&steps(&self.run.iterations).render(width));
        text::spread_section(&mut out, &self.repeats, width);
        out
    }

    /// One JSON object per line and iteration.
    pub(crate) fn iteration_lines(&self) -> String {
        let limits = self.limits();
        self.run
            .iterations
            .iter()
            .map(|record| format!("{}\n", iteration_json::to_json(record, &limits, &[])))
            .collect()
    }

    /// The single files that were asked for.
    pub(crate) fn write_files(
        &self,
        report: &Value,
        files: &Files,
        tokenizer: Option<&Tokenizer>,
        problems: &mut Problems,
    ) {
        if let Some(path) = &files.report_json {
            problems.keep(run_dir::write_whole(path, format!("{report:#}\n").as_bytes()));
        }
        if let Some(path) = &files.request_json {
            let decode = |r: &RequestRecord| tokenizer.and_then(|t| t.decode(&r.output_ids).ok());
            let requests = trtllm_requests_with_text(&self.run.records, &decode);
            problems.keep(run_dir::write_whole(path, format!("{requests:#}\n").as_bytes()));
        }
        if let Some(path) = &files.iteration_log {
            problems.keep(run_dir::write_whole(path, self.iteration_lines().as_bytes()));
        }
    }

    /// What `run.json` says, without how far the run came.
    pub(crate) fn about(&self) -> Value {
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "command": self.command,
            "runtime": self.runtime.name(),
            "engine": self.config.to_json(),
            "engine_dir": self.engine_dir.as_ref().map(|dir| dir.display().to_string()),
            "dataset": self.dataset,
            "arrival": self.arrival,
            "machine": self.machine,
            "ranks": 1,
        })
    }

    /// Fills the run directory: everything but a trace and pages, which need more than token times.
    pub(crate) fn write(&self, report: &Value, dir: &Path, problems: &mut Problems) {
        let file = |name: &str| dir.join(name);
        let line = |record: &RequestRecord| -> Result<String> {
            Ok(serde_json::to_string(record).context("a request record can't be written as JSON")? + "\n")
        };
        let requests: Result<String> = self.run.records.iter().map(line).collect();
        problems.keep(requests.and_then(|lines| run_dir::write_whole(&file(run_dir::REQUESTS), lines.as_bytes())));
        problems.keep(run_dir::write_whole(&file(run_dir::ITERATIONS), self.iteration_lines().as_bytes()));
        problems.keep(run_dir::write_whole(&file(run_dir::REPORT_JSON), format!("{report:#}\n").as_bytes()));
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// Steps by kind.
fn steps(iterations: &[IterationRecord]) -> Table {
    let mut table = Table::new(["iterations", "count", "wall", "share", "tokens", "tokens/s"]);
    let total: u64 = iterations.iter().map(IterationRecord::wall_ns).sum();
    for kind in IterationKind::ALL {
        let chosen: Vec<_> = iterations.iter().filter(|i| kind_of(i) == kind).collect();
        let wall: u64 = chosen.iter().map(|i| i.wall_ns()).sum();
        let tokens: u64 = chosen.iter().map(|i| u64::from(i.context_tokens + i.generation_requests)).sum();
        if wall == 0 {
            continue;
        }
        table.push([
            kind.to_string(),
            chosen.len().to_string(),
            human::ns(wall as f64),
            human::percent(wall as f64 / total as f64),
            human::count(tokens),
            human::number(tokens as f64 / (wall as f64 / 1e9)),
        ]);
    }
    table
}
