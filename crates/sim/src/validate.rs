//! Simulated against measured: calibrate on some runs of an engine, predict the others.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use strobe_scheduler::scheduler::{Policy as EnginePolicy, SchedulerConfig};
use strobe_workload::{Distribution, MetricOptions, Metrics, PercentileRule, RequestRecord, metrics};

use crate::calibrate::{self, Fitted, Run};
use crate::cluster::ClusterConfig;
use crate::collector::{Collector, Summary};
use crate::cost::CostModel;
use crate::error::SimError;
use crate::lengths::LengthDist;
use crate::replay::{self, ReplayOptions};
use crate::replica::ReplicaConfig;
use crate::scenario::{Load, Policy, Scenario};

/// One latency of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Which latency.
    pub metric: &'static str,
    /// Measured mean, median and p99, in milliseconds.
    pub measured_ms: [f64; 3],
    /// The same as predicted.
    pub predicted_ms: [f64; 3],
    /// Relative errors of the three.
    pub errors: [f64; 3],
}

/// One run, measured and predicted.
#[derive(Clone, Debug, Serialize)]
pub struct RunComparison {
    /// The run directory.
    pub run: String,
    /// Whether the cost was fitted on it.
    pub fitted: bool,
    /// Requests per second that were offered; none when all came at once.
    pub offered_rate_req_s: Option<f64>,
    /// TTFT, TPOT and E2E.
    pub metrics: Vec<Comparison>,
    /// Measured and predicted output tokens per second.
    pub output_tokens_per_s: (f64, f64),
}

/// All runs, and whether those left out were predicted well.
#[derive(Clone, Debug, Serialize)]
pub struct Validation {
    /// The runs.
    pub runs: Vec<RunComparison>,
    /// For each latency over the runs left out: median error of the means, largest error of p99.
    pub left_out: Vec<(String, f64, f64)>,
    /// Median error of iterations, left out of the fit, of each kind.
    pub iteration_errors: Vec<(String, f64)>,
    /// Whether means are within 5 % (TTFT 10 %) in the median and p99 within 15 %.
    pub passed: bool,
}

fn measured(run: &Path) -> Result<Metrics, SimError> {
    let bad = |problem: String| SimError::Option { option: "RUN", problem: format!("{}: {problem}", run.display()) };
    let text =
        std::fs::read_to_string(run.join("requests.jsonl")).map_err(|e| bad(format!("no requests.jsonl: {e}")))?;
    let records = text
        .lines()
        .enumerate()
        .map(|(i, line)| serde_json::from_str(line).map_err(|e| bad(format!("requests.jsonl line {}: {e}", i + 1))))
        .collect::<Result<Vec<RequestRecord>, _>>()?;
    let options = MetricOptions { rule: PercentileRule::Linear, world_size: 1, streaming: true };
    metrics(&records, &options).map_err(|e| bad(e.to_string()))
}

/// What the report says of the scheduler: policy and whether prefixes were reused.
fn policy_of(run: &Path) -> EnginePolicy {
    let report: Option<Value> =
        std::fs::read_to_string(run.join("report.json")).ok().and_then(|text| serde_json::from_str(&text).ok());
    let name = report.as_ref().and_then(|r| r["world_info"]["scheduling_policy"].as_str().map(str::to_string));
    EnginePolicy::ALL.into_iter().find(|p| Some(p.name()) == name.as_deref()).unwrap_or(EnginePolicy::GuaranteedNoEvict)
}

/// The same requests at the same times, with modelled iterations.
fn predict(run: &Run, fitted: &Arc<Fitted>) -> Result<(crate::collector::Answer, Option<Metrics>), SimError> {
    let options = ReplayOptions { rate_scale: 1.0, jitter: false, seed: 0 };
    let recorded = replay::read(&run.path.join("requests.jsonl"), &options)?;
    let limits = &run.limits;
    let scenario = Scenario {
        num_requests: recorded.requests.len() as u64,
        load: Load::Replay(Arc::new(recorded.requests)),
        input: LengthDist::Fixed(1),
        output: LengthDist::Fixed(1),
        policy: Policy::Engine(ReplicaConfig {
            scheduler: SchedulerConfig {
                policy: policy_of(&run.path),
                max_batch_size: limits.max_batch_size,
                max_num_tokens: limits.max_num_tokens,
                max_seq_len: usize::MAX / 4,
                chunked_context: true,
                chunk_unit: limits.tokens_per_block,
                reuse_output: false,
            },
            kv_blocks: limits.kv_blocks,
            tokens_per_block: limits.tokens_per_block.max(1),
            reuse: false,
            speed: 1.0,
            skip: true,
            prefill_only: false,
        }),
        cost: CostModel::Fitted { fitted: fitted.clone(), noise: true },
        speeds: vec![1.0],
        cluster: ClusterConfig::default(),
        slos: Vec::new(),
        warm_up: 0,
        seed: 1,
    };
    let outcome = scenario.run(Collector::new(true))?;
    Ok((outcome.answer, outcome.metrics))
}

fn compare(metric: &'static str, measured: Option<&Distribution>, predicted: Option<Summary>) -> Option<Comparison> {
    let (m, p) = (measured?, predicted?);
    let (measured_ms, predicted_ms) = ([m.average, m.p50, m.p99], [p.mean, p.p50, p.p99]);
    let errors =
        std::array::from_fn(|i| if measured_ms[i] > 0.0 { predicted_ms[i] / measured_ms[i] - 1.0 } else { 0.0 });
    Some(Comparison { metric, measured_ms, predicted_ms, errors })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

/// Calibrate on every other run, beginning with the first, and predict all; those in between count.
pub fn validate(runs: Vec<Run>, version: &str) -> Result<Validation, SimError> {
    if runs.len() < 2 {
        let problem = "give at least two runs: one to calibrate on, one to predict".to_string();
        return Err(SimError::Option { option: "RUN", problem });
    }
    let (fit_on, _): (Vec<_>, Vec<_>) = runs.iter().enumerate().partition(|(i, _)| i % 2 == 0);
    let paths: Vec<_> = fit_on.iter().map(|(_, run)| run.path.clone()).collect();
    let fit_on = paths.iter().map(|path| calibrate::read_run(path)).collect::<Result<Vec<_>, _>>()?;
    let fitted = Arc::new(calibrate::fit(&fit_on, version)?);
    let mut compared = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let real = measured(&run.path)?;
        let (answer, _) = predict(run, &fitted)?;
        let rows = [
            compare("TTFT", Some(&real.ttft_ms), answer.ttft_ms),
            compare("TPOT", real.tpot_ms.as_ref(), answer.tpot_ms),
            compare("E2E", Some(&real.e2e_ms), answer.e2e_ms),
        ];
        compared.push(RunComparison {
            run: run.path.display().to_string(),
            fitted: index % 2 == 0,
            offered_rate_req_s: real.offered_rate_req_s,
            metrics: rows.into_iter().flatten().collect(),
            output_tokens_per_s: (real.output_throughput_tok_s, answer.throughput.output_tokens_per_s),
        });
    }
    let mut left_out = Vec::new();
    let mut passed = true;
    for (name, limit) in [("TTFT", 0.10), ("TPOT", 0.05), ("E2E", 0.05)] {
        let own = || compared.iter().filter(|r| !r.fitted).flat_map(|r| &r.metrics).filter(|c| c.metric == name);
        let means = median(own().map(|c| c.errors[0].abs()).collect());
        let p99 = own().map(|c| c.errors[2].abs()).fold(0.0, f64::max);
        passed &= means <= limit && p99 <= 0.15;
        left_out.push((name.to_string(), means, p99));
    }
    let kind =
        |r: &calibrate::RegionCost| serde_json::to_value(r.region).ok().and_then(|v| v.as_str().map(str::to_string));
    let iteration_errors = fitted.regions.iter().map(|r| (kind(r).unwrap_or_default(), r.median_error)).collect();
    Ok(Validation { runs: compared, left_out, iteration_errors, passed })
}
