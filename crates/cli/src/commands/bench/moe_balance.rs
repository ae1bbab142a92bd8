//! `strobe bench moe-balance`: learned against perfectly balanced routing.

use anyhow::{Result, bail};
use clap::Arg;
use strobe_engine::staged_dir::{self, LiveDir};
use strobe_engine::window::WINDOW_VARIABLES;

use super::{BenchArgs, Call, Ready, arrival, concurrency, ready, samples, sampling};
use crate::bench::balance;
use crate::bench::experts::ExpertArgs;
use crate::output;
use crate::run_writer::Problems;
use crate::runtime::Runtime;

pub(super) const EXAMPLES: &str = "EXAMPLES:
  strobe bench moe-balance --engine-dir E --dataset d.jsonl
  strobe bench moe-balance --model mixtral-small --router-skew zipf:1.2 --dataset d.jsonl --assume-ep 4
  strobe bench moe-balance --engine-dir E --dataset d.jsonl --repeat 9 --threshold 5% --output-dir DIR";

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    bench: BenchArgs,
    /// A gain above this says that routing imbalance is significant
    #[arg(long, value_name = "PERCENT", value_parser = crate::gate::percent, default_value = "10%")]
    threshold: f64,
}

/// What its directory is called in errors.
const WHAT: &str = "result directory";

/// Pairs of runs where nobody says how many; fewer have no useful interval.
const PAIRS: usize = 5;

/// Options of other benchmarks that are refused here, and not shown.
const WITHOUT_MEANING: [&str; 16] = [
    "runtime",
    "python",
    "profile",
    "trace_out",
    "measure_profiler_overhead",
    "report_json",
    "request_json",
    "iteration_log",
    "log_iteration_data",
    "streaming",
    "request_rate",
    "arrival",
    "burstiness",
    "eos_id",
    "stop_ids",
    "min_tokens",
];

/// An option of other benchmarks as it is here.
pub(super) fn in_help(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        id if WITHOUT_MEANING.contains(&id) => arg.hide(true),
        "repeat" => arg.help("Pairs of runs, one with each router [default: 5]"),
        "output_dir" => arg.help("Directory to write: balance.json, balance.txt, compare.html and the recorded pair"),
        "overwrite" => arg.help("Replace an existing directory of results"),
        "json" => arg.help("Print balance.json instead of the text"),
        _ => arg,
    }
}

pub(super) fn run(args: Args) -> Result<()> {
    let Args { bench: mut args, threshold } = args;
    let given = [
        (args.runtime != Runtime::Strobe, "runtime"),
        (args.python.is_some(), "python"),
        (args.profile.is_some(), "profile"),
        (args.trace_out.is_some(), "trace_out"),
        (args.measure_profiler_overhead, "measure_profiler_overhead"),
        (args.report_json.is_some(), "report_json"),
        (args.request_json.is_some(), "request_json"),
        (args.iteration_log.is_some(), "iteration_log"),
        (args.log_iteration_data, "log_iteration_data"),
        (args.streaming, "streaming"),
        (args.min_tokens > 0, "min_tokens"),
        (args.request_rate.is_some(), "request_rate"),
    ];
    debug_assert!(given.iter().all(|(_, id)| WITHOUT_MEANING.contains(id)));
    if let Some((_, id)) = given.iter().find(|(given, _)| *given) {
        bail!("--{} has no meaning for moe-balance; leave it out", id.replace('_', "-"));
    }
    let set = |name: &&&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    for name in WINDOW_VARIABLES.iter().filter(set) {
        output::warn(&format!("{name} is set but ignored: moe-balance records a separate pair of runs"));
    }
    if args.eos_id >= 0 || !args.stop_ids.is_empty() {
        bail!("moe-balance compares runs with the same outputs' lengths; leave out --eos-id and --stop-ids");
    }
    let pairs = *args.repeat.get_or_insert(PAIRS);
    if pairs < 2 {
        bail!("--repeat {pairs}: moe-balance needs at least 2 pairs of runs, and {PAIRS} for a useful interval");
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
        staged_dir::check_target(dir, args.overwrite, &[balance::ANSWER], WHAT)?;
        staged_dir::check_parent(dir)?;
    }
    let samples = samples(&args)?;
    let ready = ready(&args, device, call, samples, ExpertArgs::balanced)?;
    let Ready { device, model, peaks, spec, .. } = ready;
    let answer = balance::execute(device, &model, peaks, &spec, threshold)?;
    // The answer first: whatever happens to files, it is there.
    let mut problems = Problems::default();
    problems.keep(match args.json {
        true => output::try_print(&format!("{:#}\n", answer.to_json())),
        false => output::try_print(&answer.text(output::width())),
    });
    if let Some(dir) = &args.output_dir {
        let mut write = || -> Result<()> {
            let place = LiveDir::create(dir, args.overwrite, &[balance::ANSWER], WHAT)?;
            answer.write(place.path(), &mut problems);
            if std::fs::read_dir(place.path())?.next().is_none() {
                bail!("{}: nothing could be kept", dir.display());
            }
            place.keep();
            Ok(())
        };
        let written = write();
        if problems.keep(written) {
            output::note(&format!("results: {}", dir.display()));
        }
    }
    problems.into_result()
}
