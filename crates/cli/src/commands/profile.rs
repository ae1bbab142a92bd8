//! `strobe profile`: a command under Nsight Systems with the right options, and the analysis of what it recorded.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use strobe_engine::window::parse_windows;

use crate::commands::analyze;
use crate::nsys::{self, Recording};
use crate::runtime::Runtime;
use crate::{interrupt, output, run_dir, shell};

const EXAMPLES: &str = "EXAMPLES:
  strobe profile --windows 100-150 -- strobe bench throughput --engine-dir E --dataset d.jsonl
  strobe profile --windows 100-150,300-310 -o vs -- trtllm-bench ... throughput ...
  strobe profile -- python train.py            any command, recorded from start to end
  strobe profile --gil --gc -- trtllm-bench ... throughput ...   why Python holds the device up
  strobe profile --gpu-metrics --cuda-graph-trace graph -- strobe bench latency --engine-dir E --dataset d.jsonl

Without nsys, `strobe bench ... --profile A-B` records kernels by itself.";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// Record only these iterations, one report per window: A-B, N, or a comma list. Passed to strobe as --profile, to others
    /// as TLLM_PROFILE_START_STOP; the command must call cudaProfilerStart and cudaProfilerStop
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
    /// Record who holds Python's interpreter lock (GIL) and who waits for it: nsys' -t python-gil
    #[arg(long)]
    gil: bool,
    /// Record Python's garbage collections: sets TLLM_PROFILE_RECORD_GC=1, which TensorRT-LLM's Python programs read
    #[arg(long)]
    gc: bool,
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

pub(crate) fn run(args: Args) -> Result<()> {
    let command = command(&args)?;
    let nsys = nsys::find(args.nsys.as_deref())?;
    // The last thing before nsys runs: a call that is refused leaves no directory behind.
    let (name, _dir) = match &args.output {
        Some(given) => (checked_name(given, args.overwrite)?, None),
        None => (default_name(), Some(DefaultDir::open()?)),
    };
    run_dir::check_writable(&PathBuf::from(format!("{}.sqlite", name.display())))?;
    let recording = Recording {
        output: &name,
        windows: args.windows.is_some(),
        graph_trace: match args.cuda_graph_trace {
            GraphTrace::Node => "node",
            GraphTrace::Graph => "graph",
        },
        gpu_metrics: args.gpu_metrics,
        gil: args.gil,
    };
    let call = nsys.call(&recording, &command);
    output::note(&format!("running: {}", shell::line(&call)));
    let (status, reports) = nsys.profile(call, &name)?;
    // nsys passes the command's exit code on, and has codes of its own: which of the two it is can't be told.
    let failure = (!status.success()).then(|| match status.code() {
        Some(code) => format!("nsys or the command ended with exit code {code}"),
        None => format!("nsys or the command was ended by a signal ({status})"),
    });
    if reports.is_empty() && interrupt::requested() {
        bail!(interrupt::Interrupted);
    }
    if reports.is_empty() {
        let why = match (&failure, recording.windows) {
            (Some(failure), _) => format!("{failure}; what they said is above"),
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
    if args.gc {
        command.env("TLLM_PROFILE_RECORD_GC", "1");
    }
    let Some(spec) = &args.windows else { return Ok(command) };
    if parse_windows(spec).context("--windows")?.is_empty() {
        bail!("--windows is empty; write A-B, N, or a comma list such as 100-150,200");
    }
    if !is_strobe {
        command.env("TLLM_PROFILE_START_STOP", spec);
        return Ok(command);
    }
    check_takes_windows(rest)?;
    command.arg("--profile").arg(spec);
    Ok(command)
}

/// Modes of `strobe bench` that take windows; `moe-balance` has the option, but compares whole runs.
const MODES_WITH_WINDOWS: [&str; 2] = ["throughput", "latency"];

/// Refuse a call of strobe that would complain about --profile, which the user did not write.
fn check_takes_windows(words: &[OsString]) -> Result<()> {
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let is_bench = words.first().is_some_and(|verb| verb == "bench");
    if !is_bench || words.get(1).is_none_or(|mode| !MODES_WITH_WINDOWS.contains(&mode.as_ref())) {
        let named = words.len().min(if is_bench { 2 } else { 1 });
        bail!(
            "--windows: `{}` takes no windows; leave --windows out, or profile `strobe bench {}`",
            format!("strobe {}", words[..named].join(" ")).trim_end(),
            MODES_WITH_WINDOWS.join("` or `strobe bench ")
        );
    }
    let place = |name: &str| words.iter().position(|word| word.split('=').next() == Some(name));
    if place("--profile").is_some() {
        bail!("the command has --profile already; give the windows once, with --windows");
    }
    if place("--measure-profiler-overhead").is_some() {
        bail!("--windows: --measure-profiler-overhead records iterations of its own choice; leave one of them out");
    }
    let runtime = place("--runtime").and_then(|at| match words[at].split_once('=') {
        Some((_, value)) => Some(value),
        None => words.get(at + 1).map(AsRef::as_ref),
    });
    match runtime.filter(|name| *name != Runtime::Strobe.name()) {
        Some(other) => bail!("--windows: --runtime {other} takes no windows; leave --windows out to record all of it"),
        None => Ok(()),
    }
}

/// The file that a program's name stands for.
fn on_path(program: &OsString) -> Option<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 {
        return Some(path.to_owned());
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(path)).find(|p| p.is_file())
}

/// A name of reports that nobody chose.
fn default_name() -> PathBuf {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Path::new(DEFAULT_DIR).join(format!("profile-{}-{}", now.as_secs(), std::process::id()))
}

/// The name of reports that the user chose.
fn checked_name(given: &Path, overwrite: bool) -> Result<PathBuf> {
    let text = given.to_string_lossy().into_owned();
    let name = PathBuf::from(text.strip_suffix(".nsys-rep").unwrap_or(&text));
    if text.contains('%') {
        bail!("-o {text}: nsys would put something else in the place of %; use a name without it");
    }
    if let Some(file) = nsys::existing(&name).filter(|_| !overwrite) {
        let name = name.display();
        bail!(
            "there are reports named {name} already ({}); choose another name with -o, or add --overwrite",
            file.display()
        );
    }
    Ok(name)
}

/// Where reports go that nobody named.
const DEFAULT_DIR: &str = "runs";

/// [`DEFAULT_DIR`], there while nsys runs. If it had to be made and nothing came into it, it goes again.
struct DefaultDir {
    made: bool,
}

impl DefaultDir {
    fn open() -> Result<DefaultDir> {
        match std::fs::create_dir(DEFAULT_DIR) {
            Ok(()) => Ok(DefaultDir { made: true }),
            Err(problem) if problem.kind() == ErrorKind::AlreadyExists => Ok(DefaultDir { made: false }),
            Err(problem) => Err(problem).with_context(|| format!("cannot make the directory {DEFAULT_DIR}")),
        }
    }
}

impl Drop for DefaultDir {
    fn drop(&mut self) {
        if self.made {
            let _ = std::fs::remove_dir(DEFAULT_DIR); // refuses what is not empty
        }
    }
}
