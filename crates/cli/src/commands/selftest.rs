//! `strobe selftest`: the GPU against plain computations on the CPU.

use anyhow::{Result, bail};
use strobe_engine::selftest::{self, CheckReport, Outcome, Report};
use strobe_kernels_cuda::Gpu;
use strobe_report::human;
use strobe_report::table::{Cell, Table};

use crate::device::{DeviceChoice, usable};
use crate::{interrupt, output};

const EXAMPLES: &str = "EXAMPLES:
  strobe selftest --device cuda
  strobe selftest --device cuda:1 --only attention --seed 7
  strobe selftest --json > selftest.json";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// The GPU to test: cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    device: DeviceChoice,
    /// Run only this check; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Seed of all random shapes and values
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run a few cases of each kind of the long checks (attention, latent, unfused, models, soak) and measure no kernels:
    /// enough for compute-sanitizer, which makes everything many times slower
    #[arg(long)]
    quick: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Fault on the GPU; how the check of faults calls this program
    #[arg(long, hide = true)]
    provoke_fault: bool,
}

/// Something was found to be wrong. What it is has been printed.
#[derive(Debug)]
pub(crate) struct Failed {
    cases: usize,
    checks: usize,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "selftest failed: {} cases wrong, {} checks could not be finished", self.cases, self.checks)
    }
}

impl std::error::Error for Failed {}

pub(crate) fn run(args: Args) -> Result<()> {
    let index = match args.device {
        DeviceChoice::Cuda(index) => index,
        DeviceChoice::Auto => 0,
        DeviceChoice::Cpu => bail!("selftest compares a GPU with the CPU; write --device cuda"),
    };
    let names: Vec<_> = selftest::checks().iter().map(|check| check.name).collect();
    if let Some(unknown) = args.only.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("there is no check `{unknown}`; the checks are {}", names.join(", "));
    }
    usable(index)?;
    if args.provoke_fault {
        selftest::fault::provoke(index)?;
        bail!("a write out of bounds did not fault");
    }
    let gpu = Gpu::open(index)?;
    if !args.json {
        let cache = gpu.cache();
        output::facts(&[
            ("device", format!("{}, {}", gpu.info().name, gpu.arch().name())),
            ("kernels", format!("{} compiled, {} from the cache", cache.compiled, cache.cached)),
            ("seed", args.seed.to_string()),
            ("cases", if args.quick { "a few of each kind" } else { "all" }.to_string()),
        ]);
        output::line("");
    }
    let report = selftest::run(&gpu, args.seed, &args.only, args.quick, &mut |check| {
        if !args.json {
            output::note(&progress(check));
        }
        !interrupt::requested()
    });
    if args.json {
        output::line(&serde_json::to_string_pretty(&document(&report))?);
    } else {
        output::print(&text(&report));
    }
    if interrupt::requested() || report.passes() {
        return Ok(());
    }
    let unfinished = report.checks.iter().filter(|c| c.fault.is_some()).count() + report.skipped.len();
    Err(Failed { cases: report.failures().count(), checks: unfinished }.into())
}

/// One line as soon as a check is through.
fn progress(check: &CheckReport) -> String {
    let failed = check.outcomes.iter().filter(|outcome| !outcome.passes()).count();
    let verdict = match &check.fault {
        Some(fault) => format!("STOPPED: {fault}"),
        None if failed > 0 => format!("{failed} of {} cases FAILED", check.outcomes.len()),
        None => format!("{} cases passed", check.outcomes.len()),
    };
    format!("{:<12} {verdict} in {:.1} s", check.name, check.seconds)
}

fn document(report: &Report) -> serde_json::Value {
    serde_json::json!({"passes": report.passes(), "ops": report.rows(), "report": report})
}

/// The table by op, then whatever failed in full.
fn text(report: &Report) -> String {
    let mut table = Table::new(["op", "types", "cases", "worst error", "tolerance", "verdict"]).left(1).left(5);
    for row in report.rows() {
        let verdict = if row.failed == 0 { "pass".into() } else { format!("{} FAILED", row.failed) };
        table.push([
            Cell::from(row.op),
            Cell::from(row.dtype),
            Cell::number(human::count(row.cases as u64), row.cases as f64),
            Cell::number(error_text(row.worst), row.worst),
            Cell::number(error_text(row.tolerance), row.tolerance),
            Cell::from(verdict),
        ]);
    }
    let mut text = format!("\n{}", table.render(output::width()));
    for failure in report.failures() {
        text.push_str(&format!("\nFAILED {}\n", case_text(failure)));
    }
    for check in &report.checks {
        if let Some(fault) = &check.fault {
            text.push_str(&format!("\nSTOPPED {}: {fault}\n", check.name));
        }
    }
    if !report.skipped.is_empty() {
        text.push_str(&format!("\nnot run: {}\n", report.skipped.join(", ")));
    }
    let cases: usize = report.checks.iter().map(|check| check.outcomes.len()).sum();
    let seconds: f64 = report.checks.iter().map(|check| check.seconds).sum();
    let verdict = match (report.passes(), report.quick) {
        (true, false) => "all passed",
        (true, true) => "all passed; --quick left many out",
        (false, _) => "FAILED",
    };
    text.push_str(&format!("\n{} cases in {seconds:.1} s: {verdict}\n", human::count(cases as u64)));
    text
}

fn error_text(value: f64) -> String {
    if value == 0.0 { "0".into() } else { format!("{value:.1e}") }
}

fn case_text(outcome: &Outcome) -> String {
    let Outcome { op, dtype, case, error, tolerance, problem } = outcome;
    let problem = problem.as_ref().map_or(String::new(), |problem| format!("; {problem}"));
    format!("{op} {dtype}, {case}: error {error:.3e}, tolerance {tolerance:.1e}{problem}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_case_is_told_in_full() {
        let outcome = Outcome {
            op: "rms_norm".into(),
            case: "3 rows of 264".into(),
            dtype: "bf16".into(),
            error: 0.5,
            tolerance: 0.01,
            problem: Some("7 of 792 values are not finite".into()),
        };
        let line = case_text(&outcome);
        for piece in ["rms_norm bf16", "3 rows of 264", "5.000e-1", "1.0e-2", "7 of 792"] {
            assert!(line.contains(piece), "{piece} is not in {line}");
        }
        let check = CheckReport { name: "rows", outcomes: vec![outcome], seconds: 1.0, fault: None };
        assert!(progress(&check).contains("1 of 1 cases FAILED"));
    }
}
