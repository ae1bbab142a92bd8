//! Single kernels: time, rate, share of the machine's roofline, and whether the result is right.

mod cases;
mod cpu;
mod cuda;
mod report;
mod torch;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use strobe_engine::staged_dir::{self, StagedDir};
use strobe_report::human;
use strobe_stats::{PercentileRule, SPLITMIX_STEP, percentile, splitmix64_mix};

use self::cases::{Case, Kind, Op};
use self::torch::Torch;
use crate::commands::bench::command_line;
use crate::device::{Device, DeviceArgs, DeviceChoice, Needs};
use crate::machine::{self, Machine};
use crate::model_args::CpuArgs;
use crate::{interrupt, output, progress};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Measure only these ops [default: all that the device has]
    #[arg(long, value_enum, value_name = "OP,..", value_delimiter = ',')]
    op: Vec<Op>,
    /// Shapes of a preset, or of a file: a JSON list of {"op", "m", "n", "k", ..}, or TOML with one `kernel` table each
    #[arg(long, value_name = "PRESET|FILE", default_value = "tinyllama-1.1b")]
    shapes: String,
    /// Types of weights and KV cache [default: all]
    #[arg(long, value_enum, value_name = "TYPE,..", value_delimiter = ',')]
    dtype: Vec<Kind>,
    /// Also time PyTorch's matmul and scaled_dot_product_attention, where a Python with torch is there
    #[arg(long, value_enum, value_name = "WHAT")]
    versus: Option<Versus>,
    /// The Python with torch for --versus torch [default: python3]
    #[arg(long, value_name = "PATH", requires = "versus")]
    python: Option<PathBuf>,
    /// Also time GEMMs on one thread, interleaved, and print the speed-up of all threads
    #[arg(long)]
    scaling: bool,
    /// Minimum timed runs per kernel; the median is reported
    #[arg(long, value_name = "N", default_value_t = 7)]
    repeat: usize,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    cpu: CpuArgs,

    /// Print the result as JSON
    #[arg(long, conflicts_with = "csv", help_heading = "Output")]
    json: bool,
    /// Print the table as CSV
    #[arg(long, help_heading = "Output")]
    csv: bool,
    /// Directory to write: kernels.json, kernels.csv, roofline.svg, attention.svg
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    output_dir: Option<PathBuf>,
    /// Replace an existing directory of an earlier run
    #[arg(long, help_heading = "Output")]
    overwrite: bool,
}

/// What else is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Versus {
    Torch,
}

/// A kernel computed something else than the oracle. Which one has been printed.
#[derive(Debug)]
pub(crate) struct WrongResults(usize);

impl std::fmt::Display for WrongResults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kernels = if self.0 == 1 { "kernel differs" } else { "kernels differ" };
        write!(f, "{} {kernels} from the oracle by more than the tolerance", self.0)
    }
}

impl std::error::Error for WrongResults {}

/// Run times in seconds, sorted.
#[derive(Clone, Debug)]
pub(crate) struct Times(Vec<f64>);

impl Times {
    fn new(mut seconds: Vec<f64>) -> Times {
        seconds.sort_by(f64::total_cmp);
        Times(seconds)
    }

    pub(crate) fn median(&self) -> f64 {
        percentile(&self.0, 0.5, PercentileRule::Nearest).unwrap_or(f64::NAN)
    }

    pub(crate) fn min(&self) -> f64 {
        self.0[0]
    }

    pub(crate) fn max(&self) -> f64 {
        self.0[self.0.len() - 1]
    }

    pub(crate) fn runs(&self) -> usize {
        self.0.len()
    }
}

/// Which bandwidth bounds an op: reading alone, or reading and writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ceiling {
    Read,
    Copy,
}

/// What a run of one case gave.
pub(crate) struct Measured {
    pub times: Times,
    /// Operations of one call; absent where they do not matter.
    pub flops: Option<f64>,
    /// Bytes that one call must move at least.
    pub bytes: f64,
    pub ceiling: Ceiling,
    /// Largest difference from the oracle, relative to its largest value.
    pub error: f64,
    pub tolerance: f64,
    /// The same attention in three ops, or the same product with its activation in two.
    pub naive: Option<Times>,
    /// The same on one thread.
    pub one_thread: Option<Times>,
}

impl Measured {
    /// How many times as fast all threads are as one.
    pub(crate) fn scaling(&self) -> Option<f64> {
        self.one_thread.as_ref().map(|alone| alone.median() / self.times.median())
    }

    pub(crate) fn passes(&self) -> bool {
        self.error <= self.tolerance // false for NaN
    }
}

/// One line of the result.
pub(crate) struct Line {
    pub case: Case,
    pub measured: Measured,
    /// PyTorch's times, or why there are none.
    pub torch: Option<Result<Times, String>>,
}

/// What the device can do at most.
#[derive(Default)]
pub(crate) struct Ceilings {
    /// Operations per second on operands of a type, where it was measured.
    pub ops: Vec<(Kind, f64)>,
    pub read_bytes_per_s: f64,
    pub copy_bytes_per_s: f64,
}

impl Ceilings {
    pub(crate) fn ops_per_s(&self, kind: Kind) -> Option<f64> {
        self.ops.iter().find(|(known, _)| *known == kind).map(|(_, ops)| *ops)
    }
}

/// All that is reported.
pub(crate) struct Outcome {
    pub device: Device,
    pub machine: Machine,
    pub ceilings: Ceilings,
    pub lines: Vec<Line>,
    pub notes: Vec<String>,
}

/// Fewer runs have no median worth the name.
const LEAST_REPEATS: usize = 5;
const MOST_REPEATS: usize = 1000;

pub(crate) fn run(args: Args) -> Result<()> {
    if args.repeat < LEAST_REPEATS || args.repeat > MOST_REPEATS {
        bail!("--repeat must be {LEAST_REPEATS} to {MOST_REPEATS}, found {}", args.repeat);
    }
    // The kernels of the CPU are what is measured unless a GPU is asked for.
    let device = args.device.device.unwrap_or(DeviceChoice::Cpu).resolve(true, Needs::ENGINE)?;
    let cases = cases::cases(device, &args.shapes, &args.op, &args.dtype)?;
    if let Some(dir) = &args.output_dir {
        staged_dir::check_target(dir, args.overwrite, &report::MARKS, "directory of kernel measurements")?;
    }
    let outcome = match device {
        Device::Cpu => on_cpu(&args, cases)?,
        Device::Cuda(index) => on_gpu(&args, index, cases)?,
    };
    if outcome.lines.is_empty() {
        bail!(interrupt::Interrupted);
    }
    // The report first: whatever happens to files, it is there.
    match (args.json, args.csv) {
        (true, _) => output::line(&format!("{:#}", report::json(&outcome))),
        (_, true) => output::print(&report::csv(&outcome)),
        _ => output::print(&report::text(&outcome, output::width())),
    }
    if let Some(dir) = &args.output_dir {
        let staged = StagedDir::create(dir, args.overwrite, &report::MARKS, "directory of kernel measurements")?;
        report::write(&outcome, staged.path())?;
        staged.commit()?;
        output::note(&format!("written to {}", dir.display()));
    }
    match outcome.lines.iter().filter(|line| !line.measured.passes()).count() {
        0 => Ok(()),
        wrong => Err(WrongResults(wrong).into()),
    }
}

fn on_cpu(args: &Args, mut cases: Vec<Case>) -> Result<Outcome> {
    let mut bench = cpu::Bench::new(args.cpu.open()?, args.repeat, args.scaling);
    let (tier, all) = (bench.cpu.tier(), cases.len());
    cases.retain(|case| case.op != Op::GateUp || tier.activated_multiple().is_some());
    let without = format!("gate-up is not there on the tier {}: product and activation are two ops", tier.name());
    let left_out = cases.len() < all;
    if cases.is_empty() {
        bail!("{without}");
    }
    if args.scaling && bench.cpu.threads() == 1 {
        bail!("--scaling compares several threads with one; there is one, see --threads");
    }
    if args.scaling && !cases.iter().any(|case| matches!(case.op, Op::Gemm | Op::Gemv)) {
        bail!("--scaling is for --op gemm and gemv");
    }
    cases.iter().try_for_each(|case| bench.check(case))?;
    let before = machine::measure_peaks(&mut bench.cpu);
    let (lines, mut notes) = measure_all(args, Device::Cpu, bench.cpu.threads(), cases, |case| bench.run(case))?;
    if left_out {
        notes.push(format!("{without}."));
    }
    // The machine may be shared: the better of two readings is what it can do.
    let peaks = before.better_of(&machine::measure_peaks(&mut bench.cpu));
    notes.push(format!(
        "Peaks were read before and after, the better counts: {}, {} read, {} copied.",
        peaks.compute_text(),
        human::bytes_per_s(peaks.read_bytes_per_s),
        human::bytes_per_s(peaks.copy_bytes_per_s)
    ));
    let ops = |kind: Kind| match kind {
        Kind::Bfloat16 => Some((kind, peaks.bf16_flops_per_s.unwrap_or(peaks.flops_per_s))),
        Kind::Float32 | Kind::Float16 => Some((kind, peaks.flops_per_s)),
        Kind::Int8 | Kind::Int4 => peaks.int8_ops_per_s.map(|ops| (kind, ops)),
    };
    let ceilings = Ceilings {
        ops: Kind::of(Device::Cpu).iter().copied().filter_map(ops).collect(),
        read_bytes_per_s: peaks.read_bytes_per_s,
        copy_bytes_per_s: peaks.copy_bytes_per_s,
    };
    Ok(Outcome { device: Device::Cpu, machine: Machine::describe(&bench.cpu), ceilings, lines, notes })
}

fn on_gpu(args: &Args, index: u32, cases: Vec<Case>) -> Result<Outcome> {
    if args.cpu.threads.is_some() {
        bail!("--threads is for --device cpu");
    }
    if args.scaling {
        bail!("--scaling is for --device cpu");
    }
    let mut bench = cuda::Bench::open(index, args.repeat)?;
    let ceilings = bench.ceilings(&cases)?;
    let device = Device::Cuda(index);
    let (lines, mut notes) = measure_all(args, device, machine::cores(), cases, |case| bench.run(case))?;
    let of_type = |(kind, ops): &(Kind, f64)| format!("{} {}", human::flops_per_s(*ops), kind.name());
    notes.push(format!(
        "Peaks: {} by a large GEMM, {} by a copy in device memory.",
        ceilings.ops.iter().map(of_type).collect::<Vec<_>>().join(", "),
        human::bytes_per_s(ceilings.copy_bytes_per_s)
    ));
    Ok(Outcome { device, machine: bench.machine(), ceilings, lines, notes })
}

/// Every case in turn, until the user wants to stop: what was measured by then is reported. Also what to say of it.
fn measure_all(
    args: &Args,
    device: Device,
    threads: usize,
    cases: Vec<Case>,
    mut run: impl FnMut(&Case) -> Result<Measured>,
) -> Result<(Vec<Line>, Vec<String>)> {
    let python = args.python.clone().unwrap_or_else(|| PathBuf::from("python3"));
    let mut notes = Vec::new();
    let mut torch = match args.versus.map(|Versus::Torch| Torch::start(&python, device, threads)) {
        Some(Ok(torch)) => {
            notes.push(format!("torch is {} of {}, {threads} threads.", torch.version, python.display()));
            Some(torch)
        }
        Some(Err(why)) => {
            notes.push(format!("torch was not timed: {why:#}; name a Python that has it with --python PATH."));
            None
        }
        None => None,
    };
    let bar = progress::kernels(cases.len() as u64);
    let mut lines = Vec::new();
    for case in cases {
        bar.set_message(case.describe());
        let mut both = || -> Result<_> {
            let measured = run(&case)?;
            let torch = torch.as_mut().map(|torch| torch.time(&case, args.repeat)).transpose()?;
            Ok((measured, torch))
        };
        match both() {
            Ok((measured, torch)) => {
                if lines.is_empty() {
                    interrupt::hold_to_the_end();
                }
                lines.push(Line { case, measured, torch });
            }
            Err(error) if error.is::<interrupt::Interrupted>() => break,
            Err(error) => return Err(error.context(case.describe())),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mut reasons: Vec<&String> = lines.iter().filter_map(|line| line.torch.as_ref()?.as_ref().err()).collect();
    reasons.sort();
    reasons.dedup();
    notes.extend(reasons.into_iter().map(|reason| format!("torch: {reason}.")));
    Ok((lines, notes))
}

/// How long the runs of one kernel take together at least.
const BUDGET: Duration = Duration::from_millis(100);
/// A run shorter than this is repeated within one reading of the clock.
const READING: f64 = 100e-6;

/// Times of `run(turn)`, after two turns to warm up.
fn sample(repeats: usize, mut run: impl FnMut(usize)) -> Result<Times> {
    let mut times = sample_ways(repeats, 1, |_, turn| run(turn))?;
    Ok(times.remove(0))
}

/// Times of several ways to do the same, `run(way, turn)`. They take turns, so that a disturbance meets all of them.
fn sample_ways(repeats: usize, ways: usize, mut run: impl FnMut(usize, usize)) -> Result<Vec<Times>> {
    let mut turn = 0;
    let mut read = |way: usize, inner: usize| {
        let begin = Instant::now();
        for _ in 0..inner {
            run(way, turn);
            turn += 1;
        }
        begin.elapsed().as_secs_f64() / inner as f64
    };
    let inner = |seconds: f64| (READING / seconds.max(1e-9)).ceil().clamp(1.0, 1000.0) as usize;
    let inners: Vec<usize> = (0..ways).map(|way| inner(read(way, 1).min(read(way, 1)))).collect();
    let mut times = vec![Vec::new(); ways];
    let begin = Instant::now();
    while times[0].len() < repeats || begin.elapsed() < BUDGET {
        if interrupt::requested() {
            bail!(interrupt::Interrupted);
        }
        for way in 0..ways {
            times[way].push(read(way, inners[way]));
        }
    }
    Ok(times.into_iter().map(Times::new).collect())
}

/// A number in -1..1 that depends on nothing but its arguments.
fn noise(seed: u64, index: usize) -> f32 {
    let z = splitmix64_mix((index as u64).wrapping_add(seed << 48).wrapping_mul(SPLITMIX_STEP));
    ((z >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

/// Up to `count` of `rows`, the first and the last among them.
fn spread_rows(rows: usize, count: usize) -> Vec<usize> {
    let count = count.min(rows);
    if count < 2 { vec![rows - 1] } else { (0..count).map(|i| i * (rows - 1) / (count - 1)).collect() }
}

/// Largest difference, relative to the largest value wanted; NaN where something is not a number.
fn deviation<'a>(got: impl IntoIterator<Item = &'a f32>, want: &[f32]) -> f64 {
    let largest = want.iter().fold(0.0f64, |largest, x| largest.max(f64::from(x.abs())));
    let mut worst = 0.0f64;
    for (got, want) in got.into_iter().zip(want) {
        let difference = (f64::from(*got) - f64::from(*want)).abs();
        if difference.is_nan() {
            return f64::NAN;
        }
        worst = worst.max(difference);
    }
    worst / largest.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deviation_is_relative_and_never_hides_what_is_not_a_number() {
        assert_eq!(deviation(&[1.0, 3.0], &[1.0, 2.0]), 0.5);
        assert_eq!(deviation(&[0.0], &[0.0]), 0.0);
        assert!(deviation(&[f32::NAN], &[1.0]).is_nan());
        let wrong = Measured {
            times: Times::new(vec![1.0]),
            flops: None,
            bytes: 1.0,
            ceiling: Ceiling::Read,
            error: f64::NAN,
            tolerance: 1.0,
            naive: None,
            one_thread: None,
        };
        assert!(!wrong.passes());
    }

    #[test]
    fn chosen_rows_hold_both_ends() {
        assert_eq!(spread_rows(1, 8), [0]);
        assert_eq!(spread_rows(5, 1), [4]);
        assert_eq!(spread_rows(100, 3), [0, 49, 99]);
        assert_eq!(spread_rows(2, 8), [0, 1]);
    }

    #[test]
    fn noise_is_even() {
        let mean: f64 = (0..10_000).map(|i| f64::from(noise(1, i))).sum::<f64>() / 1e4;
        assert!(mean.abs() < 0.05, "{mean}");
        assert!((0..10_000).all(|i| noise(2, i).abs() <= 1.0));
    }
}
