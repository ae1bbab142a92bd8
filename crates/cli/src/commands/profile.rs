//! `strobe profile`: a command under Nsight Systems with the right options, and the analysis of what it recorded.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use strobe_engine::window::parse_windows;

use crate::commands::analyze;
use crate::nsys::{self, Recording};
use crate::{interrupt, output, run_dir};

const EXAMPLES: &str = "EXAMPLES:
  strobe profile --windows 100-150 -- strobe bench throughput --engine-dir E --dataset d.jsonl
  strobe profile --windows 100-150,300-310 -o vs -- trtllm-bench ... throughput ...
  strobe profile -- python train.py            any command, recorded from start to end
  strobe profile --gpu-metrics --cuda-graph-trace graph -- strobe bench latency --engine-dir E --dataset d.jsonl

Without nsys, `strobe bench ... --profile A-B` records kernels by itself.";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Record these iterations only, a report each: A-B, N, or a comma list. strobe is told with --profile, others with
    /// TLLM_PROFILE_START_STOP; the command must call cudaProfilerStart and cudaProfilerStop
    #[arg(long, value_name = "SPEC")]
    windows: Option<String>,
    /// The nsys to use
    #[arg(long, value_name = "PATH")]
    nsys: Option<PathBuf>,
    /// Name of the reports: NAME.nsys-rep and NAME.sqlite, NAME.1.nsys-rep and so on for windows
    /// [default: runs/profile-TIME-PID]
    #[arg(short, long, value_name = "NAME")]
    output: Option<PathBuf>,
    /// Replace reports of that name
    #[arg(long)]
    overwrite: bool,
    /// Sample the GPU's hardware counters too; needs the right to read them
    #[arg(long)]
    gpu_metrics: bool,
    /// Record CUDA graphs kernel by kernel, or each launch as one piece, which costs less
    #[arg(long, value_enum, default_value_t = GraphTrace::Node)]
    cuda_graph_trace: GraphTrace,
    /// The command and its arguments, after `--`
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum GraphTrace {
    Node,
    Graph,
}

pub fn run(args: Args) -> Result<()> {
    let mut command = command(&args)?;
    let nsys = nsys::find(args.nsys.as_deref())?;
    let name = output_name(&args)?;
    let recording = Recording {
        output: &name,
        windows: args.windows.is_some(),
        graph_trace: match args.cuda_graph_trace {
            GraphTrace::Node => "node",
            GraphTrace::Graph => "graph",
        },
        gpu_metrics: args.gpu_metrics,
    };
    let words = nsys.arguments(&recording).join(" ");
    output::note(&format!("running: {} {words} {}", nsys.path.display(), words_of(&command)));
    let (status, reports) = nsys.profile(&recording, &mut command)?;
    let failure = (!status.success()).then(|| match status.code() {
        Some(code) => format!("the command ended with exit code {code}"),
        None => format!("the command was ended by a signal ({status})"),
    });
    if reports.is_empty() {
        let why = match (&failure, recording.windows) {
            (Some(failure), _) => failure.clone(),
            (None, true) => "the command never reached a window, or never calls cudaProfilerStart".into(),
            (None, false) => "nsys says above why".into(),
        };
        bail!("nsys made no report {}.nsys-rep: {why}", name.display());
    }
    let several = reports.len() > 1;
    for (index, report) in reports.iter().enumerate() {
        let database = nsys.export(report)?;
        output::note(&format!("report: {}, {}", report.display(), database.display()));
        if several {
            output::line(&format!("\nwindow {} of {}: {}\n", index + 1, reports.len(), database.display()));
        }
        analyze::first_screen(&database)?;
    }
    match failure {
        Some(failure) if !interrupt::requested() => {
            bail!("{failure}; the analysis covers what was recorded until then")
        }
        _ => Ok(()),
    }
}

/// The command with its windows told.
fn command(args: &Args) -> Result<Command> {
    let Some((program, rest)) = args.command.split_first() else { bail!("give a command after `--`") };
    let is_strobe = Path::new(program).file_name().is_some_and(|name| name == "strobe");
    let mut command = match is_strobe && on_path(program).is_none() {
        // `strobe` means this program even where it is not installed.
        true => Command::new(std::env::current_exe().context("cannot find this program")?),
        false => Command::new(program),
    };
    command.args(rest);
    let Some(spec) = &args.windows else { return Ok(command) };
    if parse_windows(spec).context("--windows")?.is_empty() {
        bail!("--windows is empty; write A-B, N, or a comma list such as 100-150,200");
    }
    if !is_strobe {
        command.env("TLLM_PROFILE_START_STOP", spec);
        return Ok(command);
    }
    if rest.first().is_none_or(|verb| verb != "bench") {
        bail!("--windows: only `strobe bench` has iterations to record; leave --windows out, or profile a benchmark");
    }
    if rest.iter().any(|word| word.to_string_lossy().split('=').next() == Some("--profile")) {
        bail!("the command has --profile already; give the windows once, with --windows");
    }
    command.arg("--profile").arg(spec);
    Ok(command)
}

/// The file that a program's name stands for.
fn on_path(program: &OsString) -> Option<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 {
        return Some(path.to_owned());
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(path)).find(|p| p.is_file())
}

fn words_of(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Where reports go; found out before anything runs.
fn output_name(args: &Args) -> Result<PathBuf> {
    let Some(given) = &args.output else {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        std::fs::create_dir_all("runs").context("cannot make the directory runs")?;
        return Ok(PathBuf::from(format!("runs/profile-{}-{}", now.as_secs(), std::process::id())));
    };
    let text = given.to_string_lossy().into_owned();
    let name = PathBuf::from(text.strip_suffix(".nsys-rep").unwrap_or(&text));
    if text.contains('%') {
        bail!("-o {text}: nsys would put something else in the place of %; use a name without it");
    }
    let database = PathBuf::from(format!("{}.sqlite", name.display()));
    if (nsys::exists(&name) || database.exists()) && !args.overwrite {
        bail!("there are reports named {} already; choose another name with -o, or add --overwrite", name.display());
    }
    run_dir::check_writable(&database)?;
    Ok(name)
}
