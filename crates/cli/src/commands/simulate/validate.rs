//! `strobe simulate validate`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use strobe_engine::engine_dir::LoadedModel;
use strobe_report::table::Table;
use strobe_sim::validate;
use strobe_workload::{Lengths, NormDist, SyntheticSpec, read_dataset, synthetic, write_dataset};

use super::NotSo;
use crate::ab::process;
use crate::output;
use crate::run_dir::{self, RunDir};

const EXAMPLES: &str = "EXAMPLES:
  strobe simulate validate --engine-dir E                    find saturation, run at four loads, calibrate, predict
  strobe simulate validate --engine-dir E --dataset d.jsonl --rates 0.5,1,1.5 --turns 8 --output-dir RUNS
  strobe simulate validate RUN1 RUN2 RUN3 RUN4               calibrate on runs 1 and 3, predict 2 and 4";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(super) struct Args {
    /// Run directories of one engine, two or more; every other one is predicted
    #[arg(value_name = "RUN", conflicts_with = "engine_dir", required_unless_present = "engine_dir")]
    runs: Vec<PathBuf>,
    /// Make the runs first, at three rates below saturation and with all requests at once
    #[arg(long, value_name = "DIR")]
    engine_dir: Option<PathBuf>,
    /// Requests of those runs [default: random, 64 in and 32 out, +-33 %]
    #[arg(long, value_name = "FILE", requires = "engine_dir")]
    dataset: Option<PathBuf>,
    /// Their rates, in requests per second, below saturation [default: 0.2, 0.4 and 0.6 of the offline rate]
    #[arg(long, value_name = "R,..", value_delimiter = ',', requires = "engine_dir")]
    rates: Vec<f64>,
    /// Runs at every load, half of them for the calibration: fitted, left out, left out, fitted, and so on, so that a
    /// machine that gets slower or faster does so for both
    #[arg(long, value_name = "N", default_value_t = 4, requires = "engine_dir", value_parser = turns)]
    turns: u64,
    /// How long requests arrive in each run
    #[arg(long, value_name = "S", default_value_t = 15.0, requires = "engine_dir")]
    seconds: f64,
    /// Keep the runs here [default: they are not kept]
    #[arg(long, value_name = "DIR", requires = "engine_dir")]
    output_dir: Option<PathBuf>,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

fn turns(text: &str) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(n) if (2..=100).contains(&n) && n.is_multiple_of(2) => Ok(n),
        _ => Err("expected an even number from 2 to 100".into()),
    }
}

/// Shares of the saturated throughput that are validated. Nearer to saturation the slowest requests follow every whim of the
/// machine.
const SHARES: [f64; 3] = [0.2, 0.4, 0.6];

/// Requests of the run that finds saturation.
const PROBE: usize = 48;

/// Most requests of a random dataset.
const MOST_REQUESTS: usize = 4_000;

/// The benchmark as its users call it.
struct Bench<'a> {
    program: PathBuf,
    engine: &'a Path,
    dataset: PathBuf,
}

impl Bench<'_> {
    /// One run; its report.
    fn run(&self, run: &Path, rate: Option<f64>, requests: usize, seed: u64) -> Result<Value> {
        let mut command = Command::new(&self.program);
        command.args(["bench", "throughput", "--streaming", "--overwrite"]);
        command.args(["--random-seed", &seed.to_string(), "--num-requests", &requests.to_string()]);
        command.arg("--engine-dir").arg(self.engine).arg("--dataset").arg(&self.dataset).arg("--output-dir").arg(run);
        if let Some(rate) = rate {
            command.args(["--request-rate", &rate.to_string()]);
        }
        process::run(&mut command, None)?.ok_or_error("the benchmark")?;
        RunDir::open(run)?.report.with_context(|| format!("{} has no {}", run.display(), run_dir::REPORT_JSON))
    }
}

/// Random requests of moderate length for the engine's vocabulary.
fn random_dataset(engine: &Path, path: &Path) -> Result<usize> {
    let config = LoadedModel::open(engine)?.config;
    let spec = SyntheticSpec {
        num_requests: MOST_REQUESTS,
        input: Lengths::Normal(NormDist { mean: 64.0, stdev: 20.0 }),
        output: Lengths::Normal(NormDist { mean: 32.0, stdev: 10.0 }),
        vocab_size: u32::try_from(config.model.vocab_size).unwrap_or(u32::MAX),
        avoid_ids: Vec::new(),
        seed: 420,
    };
    let mut bytes = Vec::new();
    write_dataset(&mut bytes, &synthetic(&spec)?).context("cannot write the dataset")?;
    run_dir::write_whole(path, &bytes)?;
    Ok(spec.num_requests)
}

/// Run the benchmark at every load, by turns; the runs in the order in which they alternate between fitted and left out.
fn make_runs(args: &Args, engine: &Path, dir: &Path) -> Result<Vec<PathBuf>> {
    if let Some(rate) = args.rates.iter().find(|rate| !(**rate > 0.0 && rate.is_finite())) {
        bail!("--rates: expected numbers above 0, found {rate}");
    }
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        bail!("--seconds: expected a number from 0 to 3600, found {}", args.seconds);
    }
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let program = std::env::current_exe().context("cannot find the strobe binary")?;
    let (dataset, most) = match &args.dataset {
        Some(given) => (given.clone(), read_dataset(given)?.len()),
        None => {
            let path = dir.join("dataset.jsonl");
            let count = random_dataset(engine, &path)?;
            (path, count)
        }
    };
    let bench = Bench { program, engine, dataset };
    output::note("running all at once, to find saturation");
    let probe = dir.join("probe");
    let report = bench.run(&probe, None, PROBE.min(most), 419)?;
    std::fs::remove_dir_all(&probe).with_context(|| format!("cannot remove {}", probe.display()))?;
    let saturated = report["performance"]["request_throughput_req_s"].as_f64().filter(|rate| *rate > 0.0);
    let saturated = saturated.context("the benchmark reports no throughput")?;
    // Two digits are enough for a load.
    let rounded = |rate: f64| format!("{rate:.1e}").parse().unwrap_or(rate);
    let rates: Vec<f64> = match args.rates.as_slice() {
        [] => SHARES.iter().map(|share| rounded(share * saturated)).collect(),
        given => given.to_vec(),
    };
    let loads: Vec<Option<f64>> = rates.into_iter().map(Some).chain([None]).collect();
    let count = args.turns as usize * loads.len();
    let mut runs: Vec<(usize, u64, bool, PathBuf)> = Vec::new();
    for turn in 0..args.turns {
        let left_out = matches!(turn % 4, 1 | 2);
        for (place, load) in loads.iter().enumerate() {
            let name = load.map_or("at-once".to_string(), |rate| format!("rate-{rate}"));
            let run = dir.join(format!("{name}-{}-{}", turn / 2, if left_out { "left-out" } else { "fitted" }));
            output::note(&format!("run {} of {count}: {}", runs.len() + 1, run.display()));
            let requests = (load.unwrap_or(saturated) * args.seconds).ceil().clamp(4.0, most as f64) as usize;
            bench.run(&run, *load, requests, 420 + turn)?;
            runs.push((place, turn / 2, left_out, run));
        }
    }
    runs.sort();
    Ok(runs.into_iter().map(|(_, _, _, run)| run).collect())
}

/// A directory that goes when the command ends.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(super) fn run(args: &Args) -> Result<()> {
    let mut temporary = None;
    let paths = match &args.engine_dir {
        None => args.runs.clone(),
        Some(engine) => {
            let dir = args.output_dir.clone().unwrap_or_else(|| {
                let dir = std::env::temp_dir().join(format!("strobe-validate-{}", std::process::id()));
                temporary = Some(Temporary(dir.clone()));
                dir
            });
            make_runs(args, engine, &dir)?
        }
    };
    let runs = paths.iter().map(|path| run_dir::read_calibration(path)).collect::<Result<Vec<_>>>()?;
    let found = validate::validate(&runs, env!("CARGO_PKG_VERSION"))?;
    drop(temporary);
    if args.json {
        output::line(&format!("{:#}", json!(found)));
    } else {
        output::print(&text(&found));
    }
    if found.passed {
        return Ok(());
    }
    let missed: Vec<&str> = found.left_out.iter().filter(|v| !v.passed).map(|v| v.metric).collect();
    Err(NotSo(format!(
        "{} of the runs left out is not predicted within 5 % of E2E and TPOT and 10 % of TTFT in the median, and 15 % of every p99; leave the machine alone, or raise --turns and --seconds",
        missed.join(" and ")
    ))
    .into())
}

fn text(found: &validate::Validation) -> String {
    let columns =
        ["load", "requests", "", "mean", "predicted", "error", "p50 error", "p99", "predicted", "error", "95 %"];
    let mut table = Table::new(columns).left(0).left(2);
    let percent = |error: f64| format!("{:+.1} %", error * 100.0);
    for load in found.loads.iter().filter(|load| !load.fitted) {
        for (place, row) in load.metrics.iter().enumerate() {
            let (low, high) = row.interval_ms[2];
            table.push([
                if place == 0 { load.load.clone() } else { String::new() },
                if place == 0 { load.requests.to_string() } else { String::new() },
                row.metric.to_string(),
                format!("{:.1}", row.measured_ms[0]),
                format!("{:.1}", row.predicted_ms[0]),
                percent(row.errors[0]),
                percent(row.errors[1]),
                format!("{:.1}", row.measured_ms[2]),
                format!("{:.1}", row.predicted_ms[2]),
                percent(row.errors[2]),
                format!("{low:.1} to {high:.1}"),
            ]);
        }
    }
    let mut text = format!("{}runs left out of the fit, milliseconds\n", table.render(output::width()));
    for v in &found.left_out {
        text.push_str(&format!(
            "{:<5} off by {:.1} % of the mean and {:.1} % of the median (median over loads), at most {:.1} % of p99: {}\n",
            v.metric,
            v.mean_error * 100.0,
            v.p50_error * 100.0,
            v.p99_error * 100.0,
            if v.passed { "passed" } else { "missed" }
        ));
    }
    let kinds: Vec<String> =
        found.iteration_errors.iter().map(|(kind, error)| format!("{kind} {:.1} %", error * 100.0)).collect();
    text.push_str(&format!(
        "single iterations left out: {} in the median; one fitted run differs from another by {:.1} %\n",
        kinds.join(", "),
        found.run_spread * 100.0
    ));
    text
}
