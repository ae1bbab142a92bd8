//! The GPU against plain computations: every op, then whole models, then a busy engine.
//!
//! Each file beside this one checks one group of ops and is one line in [`checks`]. A check makes random cases, runs the
//! op into a poisoned output, and compares with the scalar CPU op or a loop in double precision. An element that was not
//! written is still not a number, and an element written beside the output is seen in the guard around it.

mod attention;
pub mod fault;
mod gemm;
mod latent;
mod linear;
mod models;
mod moe;
pub mod rig;
mod rows;
mod sampling;
mod skinny;
mod soak;
mod timeline;
mod unfused;

use std::time::Instant;

use serde::Serialize;
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_kernels_cuda::{CudaError, DeviceInfo, Gpu};

pub use rig::{Output, Random, Rig};

/// One compared case.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The op, as the table lists it.
    pub op: String,
    /// Shape and options, enough to run it again.
    pub case: String,
    /// Element types.
    pub dtype: String,
    /// Relative error: ||found - expected|| / ||expected||, or what the check says it is.
    pub error: f64,
    /// Largest error that passes.
    pub tolerance: f64,
    /// Why it fails whatever the error is.
    pub problem: Option<String>,
}

impl Outcome {
    /// A case that was compared by value; see [`relative_error`] for `error` and `problem`.
    pub fn compared(
        (op, dtype): (&str, &str),
        case: impl Into<String>,
        found: &[f32],
        expected: &[f32],
        tolerance: f64,
    ) -> Outcome {
        let (error, problem) = relative_error(found, expected);
        Outcome { op: op.into(), case: case.into(), dtype: dtype.into(), error, tolerance, problem }
    }

    /// A case whose values must be the same to the last bit; the error is how many are not.
    pub fn exact<T: PartialEq + std::fmt::Debug>(
        (op, dtype): (&str, &str),
        case: impl Into<String>,
        found: &[T],
        expected: &[T],
    ) -> Outcome {
        let wrong = found.iter().zip(expected).filter(|(f, e)| f != e).count();
        let first = found.iter().zip(expected).position(|(f, e)| f != e);
        let problem = if found.len() != expected.len() {
            Some(format!("{} values instead of {}", found.len(), expected.len()))
        } else {
            first.map(|i| format!("value {i} is {:?} instead of {:?}", found[i], expected[i]))
        };
        Outcome { op: op.into(), case: case.into(), dtype: dtype.into(), error: wrong as f64, tolerance: 0.0, problem }
    }

    /// Whether all is well.
    pub fn passes(&self) -> bool {
        self.problem.is_none() && self.error <= self.tolerance
    }
}

/// How far `found` is from `expected`, relative to the size of `expected`; and what can't be said by a number: values
/// that are not numbers, or too few of them.
pub fn relative_error(found: &[f32], expected: &[f32]) -> (f64, Option<String>) {
    if found.len() != expected.len() {
        return (f64::INFINITY, Some(format!("{} values instead of {}", found.len(), expected.len())));
    }
    let bad = |value: &f32| !value.is_finite();
    if let Some(first) = found.iter().position(bad) {
        let count = found.iter().filter(|v| bad(v)).count();
        let text = format!("{count} of {} values are not finite or were not written, first at {first}", found.len());
        return (f64::INFINITY, Some(text));
    }
    let (mut off, mut size) = (0.0, 0.0);
    for (&f, &e) in found.iter().zip(expected) {
        off += (f64::from(f) - f64::from(e)).powi(2);
        size += f64::from(e).powi(2);
    }
    // Where nothing but zeroes is expected the error is absolute.
    let error = if size > 0.0 { (off / size).sqrt() } else { off.sqrt() };
    (error, None)
}

/// Largest difference of two values.
pub fn largest_difference(found: &[f32], expected: &[f32]) -> f64 {
    found.iter().zip(expected).map(|(&f, &e)| (f64::from(f) - f64::from(e)).abs()).fold(0.0, f64::max)
}

/// A group of ops and how to check it.
#[derive(Clone, Copy)]
pub struct Check {
    /// What `--only` takes.
    pub name: &'static str,
    /// Run all its cases.
    pub run: fn(&mut Rig) -> Result<Vec<Outcome>, CudaError>,
}

/// Every check, in the order in which they run: ops first, since what follows is made of them.
pub fn checks() -> Vec<Check> {
    vec![
        Check { name: "rows", run: rows::check },
        Check { name: "attention", run: attention::check },
        Check { name: "latent", run: latent::check },
        Check { name: "gemm", run: gemm::check },
        Check { name: "skinny", run: skinny::check },
        Check { name: "linear", run: linear::check },
        Check { name: "moe", run: moe::check },
        Check { name: "unfused", run: unfused::check },
        Check { name: "sampling", run: sampling::check },
        Check { name: "timeline", run: timeline::check },
        Check { name: "models", run: models::check },
        Check { name: "soak", run: soak::check },
        Check { name: "fault", run: fault::check },
    ]
}

/// What one check found.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// Its name.
    pub name: &'static str,
    /// Its cases.
    pub outcomes: Vec<Outcome>,
    /// How long it took.
    pub seconds: f64,
    /// Why it could not go on.
    pub fault: Option<String>,
}

/// What a whole run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// On what.
    pub device: DeviceInfo,
    /// With which random numbers.
    pub seed: u64,
    /// Whether only a few cases of each kind were run.
    pub quick: bool,
    /// The checks that ran.
    pub checks: Vec<CheckReport>,
    /// Checks that were left out because the device can't be used any more, or because of an interruption.
    pub skipped: Vec<&'static str>,
}

/// One op and type in a report's table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpRow {
    /// The op.
    pub op: String,
    /// Element types.
    pub dtype: String,
    /// Cases.
    pub cases: usize,
    /// Cases that failed.
    pub failed: usize,
    /// The largest error, relative to its tolerance.
    pub worst: f64,
    /// The tolerance of that case.
    pub tolerance: f64,
}

impl Report {
    /// Whether every case of every check passed and none was left out.
    pub fn passes(&self) -> bool {
        let fine = |check: &CheckReport| check.fault.is_none() && check.outcomes.iter().all(Outcome::passes);
        self.skipped.is_empty() && self.checks.iter().all(fine)
    }

    /// Cases that failed.
    pub fn failures(&self) -> impl Iterator<Item = &Outcome> {
        self.checks.iter().flat_map(|check| &check.outcomes).filter(|outcome| !outcome.passes())
    }

    /// The cases by op and type, in order of appearance.
    pub fn rows(&self) -> Vec<OpRow> {
        let mut rows: Vec<OpRow> = Vec::new();
        for outcome in self.checks.iter().flat_map(|check| &check.outcomes) {
            let known = rows.iter().position(|row| row.op == outcome.op && row.dtype == outcome.dtype);
            let index = known.unwrap_or_else(|| {
                let (op, dtype) = (outcome.op.clone(), outcome.dtype.clone());
                rows.push(OpRow { op, dtype, cases: 0, failed: 0, worst: 0.0, tolerance: outcome.tolerance });
                rows.len() - 1
            });
            let row = &mut rows[index];
            row.cases += 1;
            row.failed += usize::from(!outcome.passes());
            // Worse is what takes up more of its own tolerance; an exact case (tolerance 0) that differs is worst.
            let share = |error: f64, tolerance: f64| match error {
                0.0 => 0.0,
                error if error.is_nan() => f64::INFINITY,
                error => error / tolerance,
            };
            if share(outcome.error, outcome.tolerance) > share(row.worst, row.tolerance) {
                (row.worst, row.tolerance) = (outcome.error, outcome.tolerance);
            }
        }
        rows
    }
}

/// Run the checks of `names` (all of them if it is empty) on `gpu`; with `quick` a few cases of each kind of the long ones.
/// After each, `seen` hears of it and says whether to go on.
pub fn run(gpu: &Gpu, seed: u64, names: &[String], quick: bool, seen: &mut dyn FnMut(&CheckReport) -> bool) -> Report {
    let chosen = checks().into_iter().filter(|c| names.is_empty() || names.iter().any(|name| name == c.name));
    run_checks(gpu, seed, &chosen.collect::<Vec<_>>(), quick, seen)
}

fn run_checks(
    gpu: &Gpu,
    seed: u64,
    chosen: &[Check],
    quick: bool,
    seen: &mut dyn FnMut(&CheckReport) -> bool,
) -> Report {
    let mut report = Report { device: gpu.info().clone(), seed, quick, checks: Vec::new(), skipped: Vec::new() };
    let mut going = true;
    for check in chosen {
        if !going {
            report.skipped.push(check.name);
            continue;
        }
        let begin = Instant::now();
        // Each check has its own numbers, so that it finds the same alone as among others.
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
        let random = Random::named(seed, check.name);
        let mut rig = Rig { gpu, cpu: Cpu::new(Tier::Scalar, threads), random, quick };
        let (outcomes, fault) = match (check.run)(&mut rig) {
            Ok(outcomes) => (outcomes, gpu.synchronize().err().map(|error| error.to_string())),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let seconds = begin.elapsed().as_secs_f64();
        let found = CheckReport { name: check.name, outcomes, seconds, fault };
        // A fault of the device stays: every later call would only repeat it.
        going = seen(&found) && gpu.synchronize().is_ok();
        report.checks.push(found);
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(outcomes: Vec<Outcome>, fault: Option<&str>) -> Report {
        let device = DeviceInfo { name: "none".into(), ..DeviceInfo::default() };
        let check = CheckReport { name: "x", outcomes, seconds: 0.0, fault: fault.map(str::to_string) };
        Report { device, seed: 0, quick: false, checks: vec![check], skipped: Vec::new() }
    }

    fn compared(found: &[f32], expected: &[f32]) -> Outcome {
        Outcome::compared(("op", "bf16"), "case", found, expected, 1e-2)
    }

    #[test]
    fn a_right_result_passes() {
        let outcome = compared(&[1.0, 2.001, -3.0], &[1.0, 2.0, -3.0]);
        assert!(outcome.passes(), "{outcome:?}");
        assert!(outcome.error > 0.0);
        assert!(report(vec![outcome], None).passes());
    }

    #[test]
    fn a_wrong_result_fails() {
        assert!(!compared(&[1.0, 2.0, -3.0], &[1.0, 2.0, 3.0]).passes());
        assert!(!compared(&[0.1], &[0.0]).passes(), "where zero is expected the error is absolute");
        assert!(!compared(&[1.0, 2.0], &[1.0, 2.0, 3.0]).passes(), "values are missing");
        assert!(!Outcome::exact(("op", "u32"), "case", &[1u32, 2], &[1, 3]).passes());
        assert!(!Outcome::exact(("op", "u32"), "case", &[1u32], &[1, 3]).passes());
        assert!(Outcome::exact(("op", "u32"), "case", &[1u32, 3], &[1, 3]).passes());
    }

    #[test]
    fn what_is_not_a_number_or_was_not_written_fails() {
        for bad in [f32::NAN, f32::INFINITY, f32::from_bits(u32::MAX)] {
            let outcome = compared(&[1.0, bad], &[1.0, 0.0]);
            assert!(!outcome.passes());
            assert!(outcome.problem.unwrap().contains("1 of 2 values"), "{bad}");
        }
        // Poison is not a number in any type.
        assert!(half::bf16::from_bits(0xffff).is_nan() && half::f16::from_bits(0xffff).is_nan());
        // An error that can't be computed fails too.
        let outcome = Outcome { error: f64::NAN, problem: None, ..compared(&[1.0], &[1.0]) };
        assert!(!outcome.passes());
        assert_eq!(report(vec![outcome], None).rows()[0].failed, 1);
    }

    #[test]
    fn a_fault_or_a_skipped_check_fails_the_run() {
        assert!(!report(vec![compared(&[1.0], &[1.0])], Some("op x failed")).passes());
        let mut skipped = report(vec![compared(&[1.0], &[1.0])], None);
        skipped.skipped.push("y");
        assert!(!skipped.passes());
    }

    #[test]
    fn rows_hold_the_case_that_is_nearest_to_its_tolerance() {
        let near = Outcome { error: 0.5, tolerance: 1.0, ..compared(&[1.0], &[1.0]) };
        let far = Outcome { error: 0.9, tolerance: 9.0, ..near.clone() };
        let other = Outcome { dtype: "f16".into(), ..near.clone() };
        let rows = report(vec![far.clone(), near, far, other], None).rows();
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].cases, rows[0].failed, rows[0].worst, rows[0].tolerance), (3, 0, 0.5, 1.0));
        assert_eq!((rows[1].dtype.as_str(), rows[1].cases), ("f16", 1));
    }

    #[test]
    fn checks_have_names_of_their_own() {
        let names: Vec<_> = checks().iter().map(|check| check.name).collect();
        for (index, name) in names.iter().enumerate() {
            assert!(!names[..index].contains(name), "{name} twice");
        }
    }
}
