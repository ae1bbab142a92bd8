//! The `strobe` binary: parse, dispatch, and turn what went wrong into one clear line and an exit code.
//!
//! Exit codes: 0 done or passed, 1 a check failed (a proven regression), 2 bad input or not comparable, 3 cannot tell where a
//! gate was asked, 130 interrupted (what was recorded is kept and marked partial).

mod ab;
mod bench;
mod build_args;
mod commands;
mod device;
mod explore;
mod gate;
mod interrupt;
mod iteration_json;
mod machine;
mod model_args;
mod noise;
mod nsys;
mod output;
mod progress;
mod recording;
mod run_dir;
mod run_facts;
mod run_writer;
mod runtime;
mod sheets;
mod shell;
mod trace_input;
mod trtllm;

use std::any::TypeId;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// An LLM inference engine that tells you where every millisecond went; also reads Nsight Systems and PyTorch traces.
#[derive(Parser)]
#[command(name = "strobe", version = env!("STROBE_VERSION"), after_help = EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "EXAMPLES:
  strobe demo                                              build, benchmark, profile, compare; under a minute, any CPU
  strobe doctor                                            what this machine offers
  strobe build --model tinyllama-1.1b --output-dir E       build an engine
  strobe prepare-dataset --model tinyllama-1.1b --output d.jsonl \\
      token-norm-dist --num-requests 64 --input-mean 128 --input-stdev 0 --output-mean 128 --output-stdev 0
  strobe bench throughput --engine-dir E --dataset d.jsonl --profile 10-20 --output-dir RUN
  strobe analyze RUN                                       where the time went; also nsys and PyTorch traces
  strobe profile --windows 10-20 -- CMD...                 the same for any command, recorded by Nsight Systems
  strobe compare RUN_A RUN_B                               what differs, and why
  strobe ab --a '--gemm-plugin auto' --b '--gemm-plugin disable' --model tinyllama-1.1b --dataset d.jsonl
                                                           two builds, interleaved until the answer is clear
  strobe simulate --rate 20 --cost linear:base=8ms,per_context_token=40us
                                                           latencies at 20 requests/s

Exit codes: 0 done or passed, 1 a check failed, 2 bad input or not comparable, 3 cannot tell where a gate was asked,
130 interrupted.";

#[derive(Subcommand)]
enum Command {
    /// Build, benchmark, profile and compare two builds of a small model, in under a minute
    Demo(commands::demo::Args),
    /// Show what this machine offers (SIMD, bandwidth, FLOP/s, GPUs, libraries); check an engine; measure noise
    Doctor(commands::doctor::Args),
    /// Make a dataset of requests
    PrepareDataset(commands::prepare_dataset::Args),
    /// Turn a checkpoint or a preset into an engine directory
    Build(commands::build::Args),
    /// Measure throughput, latency, single kernels or expert balance
    Bench(commands::bench::Args),
    /// Compute logits or perplexity, and compare them with another implementation
    Eval(commands::eval::Args),
    /// Explain where the time of a trace or run went: strobe, Nsight Systems, PyTorch
    Analyze(commands::analyze::Args),
    /// Run a command under Nsight Systems and analyze what it recorded
    Profile(commands::profile::Args),
    /// Compare two runs or traces: verdict, and which ops explain it
    Compare(commands::compare::Args),
    /// Compare two builds, binaries or commands by interleaved runs until the answer is clear
    Ab(commands::ab::Args),
    /// Convert a trace to another format
    Convert(commands::convert::Args),
    /// Simulate a server: latencies at a rate, capacity within SLOs, clusters
    Simulate(Box<commands::simulate::Args>),
    /// Check GPU kernels, whole models and an engine under load against the CPU
    Selftest(commands::selftest::Args),
    /// Print shell completions
    Completions(commands::completions::Args),
    /// Write manual pages
    Man(commands::man::Args),
}

fn main() -> ExitCode {
    bench::start::since_beginning_ms();
    let mut command = command();
    match trtllm::translate(std::env::args_os().collect(), &command) {
        Ok(translated) => {
            translated.notes.iter().for_each(|note| output::note(note));
            WORDS.get_or_init(|| translated.words);
        }
        Err(problem) => {
            output::error(&problem);
            return ExitCode::from(2);
        }
    }
    let cli = match parse(&mut command) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            output::error(&one_line(&error));
            return ExitCode::from(2);
        }
        Err(help) => {
            let _ = help.print(); // styled on a terminal only; a reader that has gone away is no error
            return ExitCode::SUCCESS;
        }
    };
    #[cfg(feature = "handicap")]
    match strobe_engine::handicap::from_env() {
        Ok(Some(share)) => output::warn(&format!(
            "{} makes every step on a CPU take {:.1} % longer; for tests of comparisons only",
            strobe_engine::handicap::VARIABLE,
            100.0 * share
        )),
        Ok(None) => {}
        Err(error) => {
            output::error(&error.to_string());
            return ExitCode::from(2);
        }
    }
    interrupt::install();
    let result: anyhow::Result<()> = match cli.command {
        Command::Demo(args) => commands::demo::run(args),
        Command::Doctor(args) => commands::doctor::run(args),
        Command::PrepareDataset(args) => commands::prepare_dataset::run(args),
        Command::Build(args) => commands::build::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Eval(args) => commands::eval::run(args),
        Command::Analyze(args) => commands::analyze::run(args),
        Command::Profile(args) => commands::profile::run(args),
        Command::Compare(args) => commands::compare::run(args),
        Command::Ab(args) => commands::ab::run(args),
        Command::Convert(args) => commands::convert::run(args),
        Command::Simulate(args) => commands::simulate::run(*args),
        Command::Selftest(args) => commands::selftest::run(args),
        Command::Completions(args) => commands::completions::run(&args),
        Command::Man(args) => commands::man::run(&args),
    };
    match result {
        Ok(()) if interrupt::requested() => ExitCode::from(130),
        Ok(()) => ExitCode::SUCCESS,
        // Whatever else went wrong: the answer is that of a run that was stopped.
        Err(error) if interrupt::requested() => {
            output::error(&with_causes(&error));
            ExitCode::from(130)
        }
        Err(error)
            if error.is::<gate::Regression>()
                || error.is::<commands::doctor::Damaged>()
                || error.is::<commands::selftest::Failed>()
                || error.is::<commands::simulate::NotSo>()
                || error.is::<bench::kernels::WrongResults>() =>
        {
            output::note(&error.to_string());
            ExitCode::from(1)
        }
        Err(error) if error.is::<gate::CannotTell>() => {
            output::note(&error.to_string());
            ExitCode::from(3)
        }
        Err(error) => {
            output::error(&with_causes(&error));
            let stopped = matches!(error.downcast_ref(), Some(strobe_engine::EngineError::Interrupted));
            ExitCode::from(if stopped || error.is::<interrupt::Interrupted>() { 130 } else { 2 })
        }
    }
}

/// The words of this call as strobe took them, the program's name first.
static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();

/// The words of this call, without the program's name.
pub fn words() -> &'static [OsString] {
    WORDS.get().and_then(|words| words.get(1..)).unwrap_or_default()
}

fn parse(command: &mut clap::Command) -> Result<Cli, clap::Error> {
    let program = std::iter::once(OsString::from("strobe"));
    let matches = command.try_get_matches_from_mut(program.chain(words().iter().cloned()))?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(command))
}

/// The command line, with what all options have in common.
fn command() -> clap::Command {
    with_underscores(with_negative_numbers(Cli::command()))
}

/// Takes every option with underscores too, as other tools spell them.
fn with_underscores(command: clap::Command) -> clap::Command {
    let spelled = |arg: clap::Arg| match arg.get_long().filter(|name| name.contains('-')) {
        // clap keeps names for as long as the program runs.
        Some(name) => {
            let name: &'static str = name.replace('-', "_").leak();
            arg.alias(name)
        }
        None => arg,
    };
    let spelled = |arg: clap::Arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default().into_iter().filter(|name| name.contains('-'));
        let aliases: Vec<&'static str> = aliases.map(|name| &*name.replace('-', "_").leak()).collect();
        spelled(arg).aliases(aliases)
    };
    command.mut_args(spelled).mut_subcommands(with_underscores)
}

/// Hand `-1` to the options that take a number, whose errors name them. clap would look for an option of that name.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let numbers = [
        TypeId::of::<usize>(),
        TypeId::of::<u64>(),
        TypeId::of::<u32>(),
        TypeId::of::<i64>(),
        TypeId::of::<f64>(),
        TypeId::of::<f32>(),
    ];
    let takes_number = |arg: &clap::Arg| {
        let value = arg.get_value_parser().type_id();
        arg.get_action().takes_values() && numbers.iter().any(|number| value == *number)
    };
    command
        .mut_args(|arg| if takes_number(&arg) { arg.allow_negative_numbers(true) } else { arg })
        .mut_subcommands(with_negative_numbers)
}

/// An error and what caused it. Many errors quote their cause in their own words already: it is not said twice.
fn with_causes(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text {
        _ if text.is_empty() => cause,
        _ if text.contains(&cause) => text,
        _ => format!("{text}: {cause}"),
    })
}

/// clap spreads an error over several lines; people and scripts want one.
fn one_line(error: &clap::Error) -> String {
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return error.render().to_string();
    }
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("For more information"));
    let (mut message, mut usage) = (Vec::new(), false);
    for line in lines {
        usage |= line.starts_with("Usage:");
        if !usage {
            message.push(line);
        }
    }
    let message = message.join(" ");
    format!("{}; try --help", message.strip_prefix("error: ").unwrap_or(&message))
}
