//! `strobe bench moe-balance`: learned against perfectly balanced routing.

use anyhow::{Result, bail};
use strobe_engine::staged_dir::{self, StagedDir};

use super::{BenchArgs, Call, Ready, arrival, concurrency, ready, samples, sampling};
use crate::bench::balance;
use crate::bench::experts::ExpertArgs;
use crate::output;
use crate::runtime::Runtime;

pub const EXAMPLES: &str = "EXAMPLES:
  strobe bench moe-balance --engine-dir E --dataset d.jsonl
  strobe bench moe-balance --model mixtral-small --router-skew zipf:1.2 --dataset d.jsonl --assume-ep 4
  strobe bench moe-balance --engine-dir E --dataset d.jsonl --repeat 9 --threshold 5% --output-dir DIR";

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    bench: BenchArgs,
    /// A gain above this says that routing imbalance is significant
    #[arg(long, value_name = "PERCENT", value_parser = crate::commands::compare::percent, default_value = "10%")]
    threshold: f64,
}

/// Pairs of runs where nobody says how many; fewer have no useful interval.
const PAIRS: usize = 5;

pub fn run(args: Args) -> Result<()> {
    let Args { bench: mut args, threshold } = args;
    let given = [
        ("--runtime", args.runtime != Runtime::Strobe),
        ("--profile", args.profile.is_some()),
        ("--trace-out", args.trace_out.is_some()),
        ("--measure-profiler-overhead", args.measure_profiler_overhead),
        ("--report-json", args.report_json.is_some()),
        ("--request-json", args.request_json.is_some()),
        ("--iteration-log", args.iteration_log.is_some()),
        ("--log-iteration-data", args.log_iteration_data),
        ("--request-rate", args.request_rate.is_some()),
    ];
    if let Some((name, _)) = given.iter().find(|(_, given)| *given) {
        bail!("{name} has no meaning for moe-balance; leave it out");
    }
    if args.eos_id >= 0 || !args.stop_ids.is_empty() {
        bail!("moe-balance compares runs with the same outputs' lengths; leave out --eos-id and --stop-ids");
    }
    if args.repeat == 1 {
        args.repeat = PAIRS;
    } else if args.repeat < 2 {
        bail!("--repeat must be at least 2 for moe-balance");
    }
    args.cuda.refuse_conflicts()?;
    let call = Call {
        arrival: arrival(&args)?,
        concurrency: concurrency(&args, false)?,
        params: sampling(&args)?,
        windows: Vec::new(),
        recorded: true,
        latency: false,
    };
    let device = args.build.device(&args.device)?;
    if let Some(dir) = &args.output_dir {
        staged_dir::check_target(dir, args.overwrite, &[balance::ANSWER], "result directory")?;
    }
    let samples = samples(&args)?;
    let ready = ready(&args, device, call, samples, ExpertArgs::balanced)?;
    let Ready { device, model, peaks, spec, .. } = ready;
    let staged = args
        .output_dir
        .as_ref()
        .map(|dir| StagedDir::create(dir, args.overwrite, &[balance::ANSWER], "result directory"))
        .transpose()?;
    let answer = balance::execute(device, &model, peaks, &spec, threshold)?;
    if let Some(staged) = staged {
        answer.write(staged)?;
    }
    match args.json {
        true => output::line(&format!("{:#}", answer.to_json())),
        false => output::print(&answer.text(output::width())),
    }
    if let Some(dir) = &args.output_dir {
        output::note(&format!("results: {}", dir.display()));
    }
    Ok(())
}
