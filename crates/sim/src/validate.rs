//! Simulated against measured: calibrate on some runs of an engine, predict the others.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use strobe_scheduler::scheduler::{Policy as EnginePolicy, SchedulerConfig};
use strobe_stats::median;
use strobe_workload::{Distribution, MetricOptions, Metrics, PercentileRule, RequestRecord, metrics};

use crate::calibrate::{self, Fitted, Run};
use crate::capacity::prediction_interval;
use crate::cluster::ClusterConfig;
use crate::collector::Collector;
use crate::cost::CostModel;
use crate::error::SimError;
use crate::lengths::LengthDist;
use crate::replay::{self, ReplayOptions};
use crate::replica::ReplicaConfig;
use crate::scenario::{Load, Policy, Scenario};

/// Replications of every prediction: its values are their medians.
const REPLICATIONS: u64 = 16;

/// Largest median error of means and medians, by latency, and largest error of any p99.
pub const LIMITS: [(&str, f64); 3] = [("TTFT", 0.10), ("TPOT", 0.05), ("E2E", 0.05)];
/// Largest error of any p99.
pub const P99_LIMIT: f64 = 0.15;

/// One latency of the requests of one load.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Which latency.
    pub metric: &'static str,
    /// Measured mean, median and p99, in milliseconds.
    pub measured_ms: [f64; 3],
    /// The same as predicted.
    pub predicted_ms: [f64; 3],
    /// Where the predicted ones lie with 95 % confidence, by replications and the spread between runs.
    pub interval_ms: [(f64, f64); 3],
    /// Relative errors of the three.
    pub errors: [f64; 3],
}

/// Runs at one load, their requests taken together.
#[derive(Clone, Debug, Serialize)]
pub struct LoadComparison {
    /// How requests arrived.
    pub load: String,
    /// Whether the cost was fitted on these runs.
    pub fitted: bool,
    /// The names of the run directories.
    pub runs: Vec<String>,
    /// Completed requests.
    pub requests: usize,
    /// Measured over predicted time of all iterations, for each run.
    pub slowness: Vec<f64>,
    /// TTFT, TPOT and E2E.
    pub metrics: Vec<Comparison>,
}

/// What became of one latency over all loads that were left out.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// Which latency.
    pub metric: &'static str,
    /// Median over the loads of the error of the mean.
    pub mean_error: f64,
    /// Median over the loads of the error of the median.
    pub p50_error: f64,
    /// Largest error of p99.
    pub p99_error: f64,
    /// Whether they are within the limits.
    pub passed: bool,
}

/// All loads, and whether those left out were predicted well.
#[derive(Clone, Debug, Serialize)]
pub struct Validation {
    /// The loads, each once as fitted and once as left out.
    pub loads: Vec<LoadComparison>,
    /// For each latency over the runs left out.
    pub left_out: Vec<Verdict>,
    /// Median error of iterations, left out of the fit, of each kind.
    pub iteration_errors: Vec<(String, f64)>,
    /// Standard deviation between the speeds of the runs that were fitted.
    pub run_spread: f64,
    /// What `run.json` says of the machine.
    pub machine: Value,
    /// Whether means and medians are within 5 % (TTFT 10 %) in the median and every p99 within 15 %.
    pub passed: bool,
}

fn bad(run: &Path, problem: impl std::fmt::Display) -> SimError {
    SimError::Run(format!("{}: {problem}", run.display()))
}

fn records(run: &Path) -> Result<Vec<RequestRecord>, SimError> {
    let text =
        std::fs::read_to_string(run.join("requests.jsonl")).map_err(|e| bad(run, format!("no requests.jsonl: {e}")))?;
    let parse =
        |(i, line)| serde_json::from_str(line).map_err(|e| bad(run, format!("requests.jsonl line {}: {e}", i + 1)));
    text.lines().enumerate().map(parse).collect()
}

fn metrics_of(run: &Path, records: &[RequestRecord]) -> Result<Metrics, SimError> {
    let options = MetricOptions { rule: PercentileRule::Linear, world_size: 1, streaming: true };
    metrics(records, &options).map_err(|e| bad(run, e))
}

/// How requests arrived, whatever the seed.
fn load_of(run: &Path) -> String {
    let about: Option<Value> =
        std::fs::read_to_string(run.join("run.json")).ok().and_then(|text| serde_json::from_str(&text).ok());
    let arrival = about.as_ref().and_then(|a| a["arrival"].as_str()).unwrap_or_default();
    let said = |part: &&str| !part.starts_with("seed ") && !["open loop", "no concurrency limit"].contains(part);
    arrival.split(", ").filter(said).collect::<Vec<_>>().join(", ")
}

/// What the report says of the scheduler: policy and whether prefixes were reused.
fn policy_of(run: &Path) -> EnginePolicy {
    let report: Option<Value> =
        std::fs::read_to_string(run.join("report.json")).ok().and_then(|text| serde_json::from_str(&text).ok());
    let name = report.as_ref().and_then(|r| r["world_info"]["scheduling_policy"].as_str().map(str::to_string));
    EnginePolicy::ALL.into_iter().find(|p| Some(p.name()) == name.as_deref()).unwrap_or(EnginePolicy::GuaranteedNoEvict)
}

/// The same requests at the same times, with modelled iterations.
fn scenario_of(run: &Run, fitted: &Arc<Fitted>) -> Result<Scenario, SimError> {
    let options = ReplayOptions { rate_scale: 1.0, jitter: false, seed: 0 };
    let recorded = replay::read(&run.path.join("requests.jsonl"), &options)?;
    let limits = &run.limits;
    Ok(Scenario {
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
        cost: CostModel::Fitted { fitted: fitted.clone(), noise: true, scale: 1.0 },
        speeds: vec![1.0],
        cluster: ClusterConfig::default(),
        slos: Vec::new(),
        warm_up: 0,
        seed: 1,
    })
}

fn run_name(path: &Path) -> String {
    path.file_name().map_or(path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Mean, median and p99.
fn three(distribution: &Distribution) -> [f64; 3] {
    [distribution.average, distribution.p50, distribution.p99]
}

fn latencies(metrics: &Metrics) -> [(&'static str, Option<[f64; 3]>); 3] {
    [
        ("TTFT", Some(three(&metrics.ttft_ms))),
        ("TPOT", metrics.tpot_ms.as_ref().map(three)),
        ("E2E", Some(three(&metrics.e2e_ms))),
    ]
}

/// Runs at one load, measured and predicted.
fn compare(load: &str, runs: &[&Run], is_fitted: bool, fitted: &Arc<Fitted>) -> Result<LoadComparison, SimError> {
    let Some(first) = runs.first() else {
        return Err(SimError::Option { option: "RUN", problem: "there is none".into() });
    };
    let mut measured = Vec::new();
    let mut predicted = vec![Vec::new(); REPLICATIONS as usize];
    for (place, run) in runs.iter().enumerate() {
        measured.extend(records(&run.path)?);
        let scenario = scenario_of(run, fitted)?;
        for (number, records) in (0..).zip(&mut predicted) {
            let mut collector = Collector::new(true);
            // Every run of a replication is another one.
            scenario.replication(1 + number + REPLICATIONS * place as u64).run_collecting(&mut collector)?;
            records.append(&mut collector.records);
        }
    }
    let real = metrics_of(&first.path, &measured)?;
    let predicted = predicted.iter().map(|p| metrics_of(&first.path, p)).collect::<Result<Vec<_>, _>>()?;
    let mut compared = Vec::new();
    for (index, (metric, measured_ms)) in latencies(&real).into_iter().enumerate() {
        let Some(measured_ms) = measured_ms else { continue };
        let values = |i: usize| predicted.iter().filter_map(|m| Some(latencies(m)[index].1?[i])).collect::<Vec<f64>>();
        let predicted_ms: [f64; 3] = std::array::from_fn(|i| median(&values(i)).unwrap_or(0.0));
        let error = |i: usize| if measured_ms[i] > 0.0 { predicted_ms[i] / measured_ms[i] - 1.0 } else { 0.0 };
        compared.push(Comparison {
            metric,
            measured_ms,
            predicted_ms,
            interval_ms: std::array::from_fn(|i| prediction_interval(&values(i))),
            errors: std::array::from_fn(error),
        });
    }
    Ok(LoadComparison {
        load: load.to_string(),
        fitted: is_fitted,
        runs: runs.iter().map(|run| run_name(&run.path)).collect(),
        requests: real.num_requests,
        slowness: runs.iter().map(|run| calibrate::slowness(fitted, run)).collect(),
        metrics: compared,
    })
}

/// Calibrate on every other run, beginning with the first, and predict all; those in between count. Runs whose requests
/// arrived in the same way are taken together.
pub fn validate(runs: &[Run], version: &str) -> Result<Validation, SimError> {
    if runs.len() < 2 {
        let problem = "give at least two runs: one to calibrate on, one to predict".to_string();
        return Err(SimError::Option { option: "RUN", problem });
    }
    let (fit_on, left_out): (Vec<_>, Vec<_>) = runs.iter().enumerate().partition(|(i, _)| i % 2 == 0);
    let [fit_on, left_out] = [fit_on, left_out].map(|part| part.into_iter().map(|(_, run)| run).collect::<Vec<_>>());
    let fitted = Arc::new(calibrate::fit(&fit_on, version)?);
    let mut loads = Vec::new();
    for (own, is_fitted) in [(&fit_on, true), (&left_out, false)] {
        let mut groups: Vec<(String, Vec<&Run>)> = Vec::new();
        for run in own {
            let load = load_of(&run.path);
            match groups.iter_mut().find(|(known, _)| *known == load) {
                Some((_, group)) => group.push(run),
                None => groups.push((load, vec![run])),
            }
        }
        for (load, group) in groups {
            loads.push(compare(&load, &group, is_fitted, &fitted)?);
        }
    }
    let mut verdicts = Vec::new();
    for (metric, limit) in LIMITS {
        let own = || loads.iter().filter(|l| !l.fitted).flat_map(|l| &l.metrics).filter(|c| c.metric == metric);
        let of = |i: usize| own().map(|c| c.errors[i].abs()).collect::<Vec<f64>>();
        let error = |i| median(&of(i)).unwrap_or(0.0);
        let (mean_error, p50_error) = (error(0), error(1));
        let p99_error = of(2).into_iter().fold(0.0, f64::max);
        let passed = mean_error <= limit && p50_error <= limit && p99_error <= P99_LIMIT;
        verdicts.push(Verdict { metric, mean_error, p50_error, p99_error, passed });
    }
    let kind =
        |r: &calibrate::RegionCost| serde_json::to_value(r.region).ok().and_then(|v| v.as_str().map(str::to_string));
    Ok(Validation {
        passed: verdicts.iter().all(|v| v.passed),
        loads,
        left_out: verdicts,
        iteration_errors: fitted.regions.iter().map(|r| (kind(r).unwrap_or_default(), r.median_error)).collect(),
        run_spread: fitted.run_spread,
        machine: fitted.machine.clone(),
    })
}
