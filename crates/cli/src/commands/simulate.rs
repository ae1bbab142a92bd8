//! `strobe simulate`: the engine's own scheduler on a virtual clock.

mod answer;
mod calibrate;
mod capacity;
mod explain;
mod files;
mod gpu;
mod page;
mod scenario;
mod selftest;
mod sweep;
mod validate;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Subcommand;
use serde_json::json;
use strobe_engine::staged_dir::StagedDir;
use strobe_sim::capacity::{in_parallel, judged_longer};
use strobe_sim::collector::{Answer, Intervals};
use strobe_sim::{Collector, CostModel, Load, Outcome, Scenario, SimError};

use crate::{interrupt, output, run_dir};
use scenario::ScenarioArgs;

const EXAMPLES: &str = "EXAMPLES:
  strobe simulate --rate 20 --num-requests 10000 --input-tokens 128 --output-tokens 128 \\
      --cost linear:base=2ms,per_request=10us,per_context_token=3us,per_kv_token=5ns
  strobe simulate --rate 20 --arrival gamma --burstiness 0.25 --input-tokens lognormal:512,0.8 --output-tokens geometric:128 \\
      --cost linear:base=5ms,per_context_token=20us --slo ttft:p99:500ms --slo tpot:p99:50ms --json
  strobe simulate --trace AzureLLMInferenceTrace_conv.csv --rate-scale 0.5 --cost linear:base=10ms,per_context_token=30us
  strobe simulate --dataset d.jsonl --rate 2 --cost cost.json
  strobe simulate --policy dynamic --max-batch-size 8 --max-queue-delay 5ms --rate 100 --output-tokens 1 --cost linear:base=4ms
  strobe simulate --rate 80 --replicas 4 --routing least-outstanding --cost linear:base=10ms,per_request=50us --output-dir RUN";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    plain: PlainArgs,
}

#[derive(Subcommand)]
enum Verb {
    /// Fit iteration times to the iterations that benchmarks logged
    Calibrate(calibrate::Args),
    /// The largest rate that meets limits, or the fewest servers for a rate
    Capacity(Box<capacity::Args>),
    /// A grid of scenarios, as CSV and plots
    Sweep(Box<sweep::Args>),
    /// A request's life: what it waited for, what ran beside it, and what to profile
    Explain(explain::Args),
    /// The simulator against runs of the engine: calibrate on half of them, predict the others
    Validate(validate::Args),
    /// The simulator against queueing theory
    Selftest(selftest::Args),
}

#[derive(clap::Args)]
struct PlainArgs {
    #[command(flatten)]
    scenario: ScenarioArgs,
    /// Write a run directory: report, requests, iterations and a trace
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    output_dir: Option<PathBuf>,
    /// Replace a run directory that is there
    #[arg(long, requires = "output_dir", help_heading = "Output")]
    overwrite: bool,
    /// Print the report as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Replications with other seeds, from whose spread every mean and percentile gets a 95 % prediction interval
    /// [default: 5 up to 20,000 requests, else none]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=1000), help_heading = "Answer")]
    replications: Option<u64>,
}

/// An answer that is no: exit code 1.
#[derive(Debug)]
pub(crate) struct NotSo(String);

impl std::fmt::Display for NotSo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotSo {}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.verb {
        None => plain(&args.plain),
        Some(Verb::Calibrate(args)) => calibrate::run(&args),
        Some(Verb::Capacity(args)) => capacity::run(&args),
        Some(Verb::Sweep(args)) => sweep::run(&args),
        Some(Verb::Explain(args)) => explain::run(&args),
        Some(Verb::Validate(args)) => validate::run(&args),
        Some(Verb::Selftest(args)) => selftest::run(&args),
    }
}

/// What a simulation that the user stopped before it had anything to show ends with.
fn or_interrupted<T>(result: Result<T, SimError>) -> Result<T> {
    match result {
        Err(SimError::Stopped) => Err(interrupt::Interrupted.into()),
        other => Ok(other?),
    }
}

fn plain(args: &PlainArgs) -> Result<()> {
    let built = args.scenario.build()?;
    let scenario = &built.scenario;
    if let Some(dir) = &args.output_dir {
        run_dir::check_target(dir, args.overwrite)?;
    }
    let mut collector = Collector::new(scenario.keeps_records());
    collector.stop = Some(interrupt::requested);
    // The report first: whatever happens to files, the answer is there.
    let say = |outcome: &Outcome, intervals: Option<&Intervals>| match args.json {
        true => output::line(&format!("{:#}", answer::report(&built, outcome, intervals))),
        false => output::print(&answer::text(&built, outcome, intervals, output::width())),
    };
    let outcome = match &args.output_dir {
        None => {
            let (outcome, intervals) = answered(args, scenario, &mut collector)?;
            say(&outcome, intervals.as_ref());
            outcome
        }
        Some(dir) => {
            let staged = StagedDir::create(dir, args.overwrite, run_dir::marks(dir), run_dir::WHAT)?;
            let writers = files::Writers::create(staged.path(), &built)?;
            let mut collector = collector.with_writers(writers.requests(), writers.steps());
            let (outcome, intervals) = answered(args, scenario, &mut collector)?;
            let _hold = interrupt::hold(); // the run is there: it is written whole, however long that takes
            say(&outcome, intervals.as_ref());
            writers.finish(&outcome, &collector, intervals.as_ref())?;
            drop(collector);
            staged.commit()?;
            if !args.json {
                output::line(&format!("run directory: {}", dir.display()));
            }
            outcome
        }
    };
    match answer::unstable(&built, &outcome.answer) {
        Some(unstable) if !args.scenario.allow_unstable && !outcome.partial => Err(NotSo(unstable).into()),
        _ => Ok(()),
    }
}

/// Runs the scenario, and whatever is needed to say how far its answer can be relied on.
fn answered(
    args: &PlainArgs,
    scenario: &Scenario,
    collector: &mut Collector<'_>,
) -> Result<(Outcome, Option<Intervals>)> {
    let mut outcome = or_interrupted(scenario.run_collecting(collector))?;
    if outcome.partial {
        if outcome.answer.num_offered == 0 {
            bail!(interrupt::Interrupted);
        }
        interrupt::hold_to_the_end();
        return Ok((outcome, None));
    }
    if let Some(longer) = judged_longer(scenario, &outcome.answer, interrupt::requested)? {
        let own = &mut outcome.answer;
        own.judged_on_requests = Some(longer.num_offered);
        (own.stable, own.queue_growth_per_s) = (longer.stable, longer.queue_growth_per_s);
        if longer.stable == Some(false) {
            own.served_rate_req_s = longer.served_rate_req_s;
            own.offered_rate_req_s = longer.offered_rate_req_s;
        }
    }
    Ok((outcome, intervals(args, scenario)?))
}

/// What other seeds, and runs as fast or slow as the measured ones, say of every latency. Where nothing is drawn there is
/// only one answer.
fn intervals(args: &PlainArgs, scenario: &Scenario) -> Result<Option<Intervals>> {
    let fixed = matches!(scenario.load, Load::Replay(_)) && !matches!(scenario.cost, CostModel::Fitted { .. });
    let usual = if scenario.num_requests <= 20_000 && !fixed { 5 } else { 0 };
    let count = args.replications.unwrap_or(usual);
    if count < 2 {
        return Ok(None);
    }
    let numbers: Vec<u64> = (1..=count).collect();
    let outcomes = in_parallel(&numbers, threads(), |&number| {
        let mut collector = Collector::new(false);
        collector.stop = Some(interrupt::requested);
        scenario.replication(number).run_collecting(&mut collector)
    })?;
    let whole = outcomes.iter().all(|outcome| !outcome.partial);
    let answers: Vec<Answer> = outcomes.into_iter().map(|outcome| outcome.answer).collect();
    Ok(whole.then(|| Intervals::of(&answers)))
}

/// Threads to simulate on.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Facts that every report begins with.
fn heading(built: &scenario::Built) -> serde_json::Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "command": std::env::args().skip(1).collect::<Vec<_>>().join(" "),
        "workload": built.workload,
        "server": built.server,
        "cost": built.cost,
        "seed": built.scenario.seed,
    })
}
