//! `strobe simulate sweep`.

mod plots;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use strobe_sim::capacity::{in_parallel, interval};
use strobe_sim::collector::{Answer, Collector, SloMetric, Summary};

use super::scenario::{AdmissionChoice, Built, PolicyChoice, ScenarioArgs};
use super::threads;
use crate::run_writer::Problems;
use crate::{interrupt, output, progress, run_dir};

const EXAMPLES: &str = "EXAMPLES:
  strobe simulate sweep --vary rate=5,10,20,40 --vary max-batch-size=8,64 --cost cost.json --output-csv sweep.csv
  strobe simulate sweep --vary policy=inflight,dynamic,static --vary rate=10,50 --cost linear:base=5ms,per_request=50us";

/// More points than anyone reads.
const MOST_POINTS: usize = 100_000;

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    scenario: ScenarioArgs,
    /// An option with its values: rate, burstiness, max-batch-size, max-num-tokens, kv-cache-blocks, max-queue-delay,
    /// policy, scheduler-policy, replicas, routing, input-tokens, output-tokens; can be repeated
    #[arg(long, value_name = "OPTION=V,..", required = true, help_heading = "Sweep")]
    vary: Vec<String>,
    /// Replications of every point; the means are printed, with intervals in the CSV
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000), help_heading = "Sweep")]
    replications: u64,
    /// File to write; without it the rows are printed
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    output_csv: Option<PathBuf>,
    /// Also write plots as one page: latencies with intervals, goodput maps, distributions
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
    /// Also write every plot as an SVG file into this directory
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    plots: Option<PathBuf>,
}

/// One point of the grid.
struct Point {
    /// The values of the axes.
    chosen: Vec<String>,
    /// What each replication found.
    answers: Vec<Answer>,
    /// Evenly spread quantiles of the first replication.
    ttft_ms: Vec<f64>,
    e2e_ms: Vec<f64>,
}

/// Quantiles that a distribution is drawn from.
const QUANTILES: usize = 200;

struct Axis {
    option: String,
    values: Vec<String>,
}

fn axis(text: &str) -> Result<Axis> {
    let Some((option, values)) = text.split_once('=') else {
        bail!("--vary: `{text}` is not OPTION=VALUE,VALUE,..");
    };
    // Lengths such as normal:128,32 have commas of their own: their values are separated by semicolons.
    let separator = if option.ends_with("tokens") && values.contains(':') { ';' } else { ',' };
    let values: Vec<String> = values.split(separator).map(|v| v.trim().to_string()).collect();
    if values.iter().any(String::is_empty) {
        bail!("--vary: `{text}` has an empty value");
    }
    Ok(Axis { option: option.trim().to_string(), values })
}

fn set(args: &mut ScenarioArgs, option: &str, value: &str) -> Result<()> {
    fn number<T: std::str::FromStr>(option: &str, value: &str) -> Result<T> {
        value.parse().map_err(|_| anyhow::anyhow!("--vary: {option}: `{value}` is not a number"))
    }
    let choice = |problem: String| anyhow::anyhow!("--vary: {option}: {problem}");
    match option {
        "rate" => args.rate = Some(number(option, value)?),
        "burstiness" => args.burstiness = Some(number(option, value)?),
        "max-batch-size" => args.max_batch_size = Some(number(option, value)?),
        "max-num-tokens" => args.max_num_tokens = Some(number(option, value)?),
        "kv-cache-blocks" => args.kv_cache_blocks = Some(number(option, value)?),
        "replicas" => args.replicas = number(option, value)?,
        "max-queue-delay" => args.max_queue_delay = Some(value.into()),
        "routing" => args.routing = value.into(),
        "input-tokens" => args.input_tokens = Some(value.into()),
        "output-tokens" => args.output_tokens = Some(value.into()),
        "policy" => args.policy = PolicyChoice::from_str(value, true).map_err(choice)?,
        "scheduler-policy" => args.scheduler_policy = Some(AdmissionChoice::from_str(value, true).map_err(choice)?),
        other => bail!("--vary: {other} can't be varied; see --help for those that can"),
    }
    Ok(())
}

pub(super) fn run(args: &Args) -> Result<()> {
    let axes = args.vary.iter().map(|text| axis(text)).collect::<Result<Vec<_>>>()?;
    let product = axes.iter().try_fold(1usize, |points, axis| points.checked_mul(axis.values.len()));
    let Some(count) = product.filter(|count| *count <= MOST_POINTS) else {
        bail!("--vary: more than {MOST_POINTS} points; vary less");
    };
    [&args.output_csv, &args.html].into_iter().flatten().try_for_each(|path| run_dir::check_writable(path))?;
    let mut grid: Vec<(Vec<String>, Built)> = Vec::with_capacity(count);
    for index in 0..count {
        let mut rest = index;
        let mut options = args.scenario.clone();
        let mut chosen = Vec::with_capacity(axes.len());
        // The last axis changes fastest.
        for axis in axes.iter().rev() {
            let value = &axis.values[rest % axis.values.len()];
            rest /= axis.values.len();
            set(&mut options, &axis.option, value)?;
            chosen.push(value.clone());
        }
        chosen.reverse();
        let built = options.build().with_context(|| format!("point {}", chosen.join(" ")))?;
        grid.push((chosen, built));
    }
    if let Some(dir) = &args.plots {
        std::fs::create_dir_all(dir).with_context(|| format!("--plots: cannot create {}", dir.display()))?;
    }
    let bar = progress::kernels(count as u64);
    bar.set_message("points");
    // Points that were not done when the user wanted to stop are left out.
    let points = in_parallel(&grid, threads(), |(chosen, built)| {
        let mut point = Point { chosen: chosen.clone(), answers: Vec::new(), ttft_ms: Vec::new(), e2e_ms: Vec::new() };
        for number in 0..args.replications {
            let mut collector = Collector::new(false);
            collector.stop = Some(interrupt::requested);
            let outcome = built.scenario.replication(number).run_collecting(&mut collector)?;
            if outcome.partial {
                return Ok(None);
            }
            point.answers.push(outcome.answer);
            if number == 0 {
                point.ttft_ms = collector.quantiles_ms(SloMetric::Ttft, QUANTILES);
                point.e2e_ms = collector.quantiles_ms(SloMetric::E2e, QUANTILES);
            }
        }
        bar.inc(1);
        Ok(Some(point))
    })?;
    bar.finish_and_clear();
    let points: Vec<Point> = points.into_iter().flatten().collect();
    if points.is_empty() {
        bail!(interrupt::Interrupted);
    }
    let _hold = interrupt::hold();
    if points.len() < count {
        output::warn(&format!("stopped when {} of {count} points were done; the others are left out", points.len()));
    }
    let count = points.len();
    let mut csv = header(&axes);
    points.iter().for_each(|point| csv.push_str(&row(&point.chosen, &point.answers)));
    let mut problems = Problems::default();
    match &args.output_csv {
        Some(path) if problems.keep(run_dir::write_whole(path, csv.as_bytes())) => {
            output::line(&format!("{count} points in {}", path.display()));
        }
        // The points are there, whatever happens to files.
        _ => output::print(&csv),
    }
    if args.html.is_some() || args.plots.is_some() {
        let plots = plots::Plots::new(&axes, &points, !args.scenario.slo.is_empty());
        let drawn = plots.all();
        if let Some(path) = &args.html
            && problems.keep(run_dir::write_whole(path, plots::page(&drawn, &plots.headline()).as_bytes()))
        {
            output::note(&format!("plots in {}", path.display()));
        }
        if let Some(dir) = &args.plots {
            let write = |plot: &plots::Plot| {
                let path = dir.join(format!("{}.svg", plot.name));
                run_dir::write_whole(&path, plot.svg.as_str().as_bytes())
            };
            if problems.keep(drawn.iter().try_for_each(write)) {
                output::note(&format!("{} plots in {}", drawn.len(), dir.display()));
            }
        }
    }
    problems.into_result()
}

const LATENCIES: [&str; 5] = ["queue", "ttft", "tpot", "itl", "e2e"];

fn latency<'a>(answer: &'a Answer, name: &str) -> Option<&'a Summary> {
    match name {
        "queue" => answer.queue_ms.as_ref(),
        "ttft" => answer.ttft_ms.as_ref(),
        "tpot" => answer.tpot_ms.as_ref(),
        "itl" => answer.itl_ms.as_ref(),
        _ => answer.e2e_ms.as_ref(),
    }
}

fn header(axes: &[Axis]) -> String {
    let mut names: Vec<String> = axes.iter().map(|axis| axis.option.replace('-', "_")).collect();
    for latency in LATENCIES {
        names.extend(["mean", "p50", "p90", "p95", "p99", "p99_low", "p99_high"].map(|p| format!("{latency}_{p}_ms")));
    }
    names.extend(
        [
            "requests_per_s",
            "output_tokens_per_s",
            "goodput_req_s",
            "attainment",
            "mean_batch",
            "max_batch",
            "utilization",
            "kv_used_share",
            "kv_peak_blocks",
            "preemptions",
            "refused",
            "stable",
        ]
        .map(String::from),
    );
    names.join(",") + "\n"
}

fn row(chosen: &[String], answers: &[Answer]) -> String {
    let mean = |f: &dyn Fn(&Answer) -> Option<f64>| {
        let values: Vec<f64> = answers.iter().filter_map(f).collect();
        strobe_stats::mean(&values).map_or(String::new(), |mean| format!("{mean:.6}"))
    };
    // A value with a comma, such as normal:128,32, is quoted.
    let mut cells: Vec<String> =
        chosen.iter().map(|v| if v.contains(',') { format!("\"{v}\"") } else { v.clone() }).collect();
    for name in LATENCIES {
        let quantities: [fn(&Summary) -> f64; 5] = [|s| s.mean, |s| s.p50, |s| s.p90, |s| s.p95, |s| s.p99];
        cells.extend(quantities.iter().map(|f| mean(&|a| latency(a, name).map(f))));
        let p99: Vec<f64> = answers.iter().filter_map(|a| Some(latency(a, name)?.p99)).collect();
        let (_, (low, high)) = interval(&p99);
        let bound = |value: f64| if p99.len() < 2 { String::new() } else { format!("{value:.6}") };
        cells.extend([bound(low), bound(high)]);
    }
    cells.push(mean(&|a| Some(a.throughput.requests_per_s)));
    cells.push(mean(&|a| Some(a.throughput.output_tokens_per_s)));
    cells.push(mean(&|a| Some(a.goodput.requests_per_s)));
    cells.push(mean(&|a| Some(a.goodput.attainment)));
    cells.push(mean(&|a| Some(a.batch.mean_requests)));
    cells.push(mean(&|a| Some(f64::from(a.batch.max_requests))));
    cells.push(mean(&|a| Some(a.batch.utilization)));
    cells.push(mean(&|a| Some(a.kv?.mean_used_share)));
    cells.push(mean(&|a| Some(f64::from(a.kv?.peak_used_blocks))));
    cells.push(mean(&|a| Some(a.kv?.preemptions as f64)));
    cells.push(mean(&|a| Some(a.num_refused as f64)));
    let stable = answers.iter().filter_map(|a| a.stable).reduce(|a, b| a && b);
    cells.push(stable.map_or(String::new(), |s| s.to_string()));
    cells.join(",") + "\n"
}
