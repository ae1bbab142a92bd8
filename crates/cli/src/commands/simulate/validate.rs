//! `strobe simulate validate`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;
use strobe_report::table::Table;
use strobe_sim::{calibrate, validate};

use super::NotSo;
use crate::output;

const EXAMPLES: &str = "EXAMPLES:
  strobe simulate validate RUN1 RUN2 RUN3 RUN4           calibrate on runs 1 and 3, predict 2 and 4
  strobe simulate validate --engine-dir E --dataset d.jsonl --rates 0.5,1,1.5 --output-dir RUNS";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Run directories of one engine, two or more; every other one is predicted
    #[arg(value_name = "RUN", conflicts_with = "engine_dir", required_unless_present = "engine_dir")]
    runs: Vec<PathBuf>,
    /// Make the runs first: two at each rate and two with all requests at once
    #[arg(long, value_name = "DIR", requires_all = ["dataset", "rates", "output_dir"])]
    engine_dir: Option<PathBuf>,
    /// Requests of those runs
    #[arg(long, value_name = "FILE", requires = "engine_dir")]
    dataset: Option<PathBuf>,
    /// Their rates, in requests per second, below saturation
    #[arg(long, value_name = "R,..", value_delimiter = ',', requires = "engine_dir")]
    rates: Vec<f64>,
    /// Where to put them
    #[arg(long, value_name = "DIR", requires = "engine_dir")]
    output_dir: Option<PathBuf>,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

/// Run the benchmark twice at every rate and twice with all requests at once, with other arrivals each time.
fn make_runs(engine: &Path, dataset: &Path, rates: &[f64], dir: &Path) -> Result<Vec<PathBuf>> {
    let program = std::env::current_exe().context("cannot find the strobe binary")?;
    let loads: Vec<Option<f64>> = rates.iter().copied().map(Some).chain([None]).collect();
    let mut runs = Vec::new();
    for load in loads {
        for turn in 0..2 {
            let name = load.map_or("at-once".to_string(), |rate| format!("rate-{rate}"));
            let run = dir.join(format!("{name}-{turn}"));
            let mut command = Command::new(&program);
            command.args([
                "bench",
                "throughput",
                "--streaming",
                "--overwrite",
                "--random-seed",
                &(420 + turn).to_string(),
            ]);
            command.arg("--engine-dir").arg(engine).arg("--dataset").arg(dataset).arg("--output-dir").arg(&run);
            if let Some(rate) = load {
                command.args(["--request-rate", &rate.to_string()]);
            }
            output::note(&format!("running {name}, turn {turn}"));
            let done = command.output().context("cannot start the benchmark")?;
            if !done.status.success() {
                let said = String::from_utf8_lossy(&done.stderr);
                bail!(
                    "the benchmark failed: {}",
                    said.lines().last().unwrap_or("no message").trim_start_matches("error: ")
                );
            }
            runs.push(run);
        }
    }
    Ok(runs)
}

pub fn run(args: &Args) -> Result<()> {
    let paths = match (&args.engine_dir, &args.dataset, &args.output_dir) {
        (Some(engine), Some(dataset), Some(dir)) => make_runs(engine, dataset, &args.rates, dir)?,
        _ => args.runs.clone(),
    };
    let runs = paths.iter().map(|path| calibrate::read_run(path)).collect::<Result<Vec<_>, _>>()?;
    let found = validate::validate(runs, env!("CARGO_PKG_VERSION"))?;
    if args.json {
        output::line(&format!("{:#}", json!(found)));
    } else {
        output::print(&text(&found));
    }
    if found.passed {
        return Ok(());
    }
    Err(NotSo("the prediction is not within 5 % of the mean E2E and TPOT, 10 % of TTFT and 15 % of every p99".into())
        .into())
}

fn text(found: &validate::Validation) -> String {
    let mut table =
        Table::new(["run", "rate", "metric", "measured mean", "predicted", "error", "p50 error", "p99 error", ""])
            .left(0)
            .left(2)
            .left(8);
    let percent = |error: f64| format!("{:+.2} %", error * 100.0);
    for run in &found.runs {
        let name = Path::new(&run.run).file_name().map_or(run.run.clone(), |n| n.to_string_lossy().into_owned());
        for row in &run.metrics {
            table.push([
                name.clone(),
                run.offered_rate_req_s.map_or("at once".into(), |rate| format!("{rate:.3}")),
                row.metric.to_string(),
                format!("{:.2} ms", row.measured_ms[0]),
                format!("{:.2} ms", row.predicted_ms[0]),
                percent(row.errors[0]),
                percent(row.errors[1]),
                percent(row.errors[2]),
                if run.fitted { "fitted" } else { "predicted" }.to_string(),
            ]);
        }
    }
    let mut text = table.render(output::width());
    for (metric, mean, p99) in &found.left_out {
        text.push_str(&format!(
            "{metric}: runs left out of the fit are off by {:.2} % of the mean in the median, at most {:.2} % of p99\n",
            mean * 100.0,
            p99 * 100.0
        ));
    }
    for (kind, error) in &found.iteration_errors {
        text.push_str(&format!("iterations, {kind}: {:.2} % in the median\n", error * 100.0));
    }
    text
}
