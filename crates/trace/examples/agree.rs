//! Checks that two recordings of the same iterations agree: strobe's own and that of Nsight Systems. The kernels of every
//! iteration must have the same names and counts, and all kernels together must take the same time within 2 %.
//!
//!     strobe bench throughput ... --profile 20-30 --output-dir OWN
//!     strobe profile --windows 20-30 -o NSYS -- strobe bench throughput ...
//!     cargo run --release -p strobe-trace --example agree -- OWN/trace.sqlite NSYS.sqlite

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use strobe_trace::{NONE, OpKind, Trace};

const WITHIN: f64 = 0.02;

/// How often each kernel ran in each step, how long kernels ran, and the sum of their lengths. The two differ when kernels
/// are put on the device early and wait there (programmatic dependent launch): such a wait is no time of its own.
struct Kernels {
    steps: Vec<BTreeMap<String, u32>>,
    ran_ns: i64,
    sum_ns: i64,
}

/// The kernel with which a step begins: it fetches the step's inputs from the host.
const FIRST: &str = "copy_inputs";

/// The kernels of every step, in both recordings.
fn kernels(path: &Path) -> Result<Kernels, Box<dyn std::error::Error>> {
    let trace: Trace = strobe_trace::nsys::read(path, &mut |_, _| {})?;
    let ops = &trace.ops;
    let mut found = Kernels { steps: Vec::new(), ran_ns: 0, sum_ns: 0 };
    let mut last_end = i64::MIN;
    for op in 0..ops.len() {
        if ops.kind[op] != OpKind::Kernel {
            continue;
        }
        if trace.op_name(op) == FIRST {
            found.steps.push(BTreeMap::new());
        }
        found.sum_ns += ops.duration(op);
        found.ran_ns += (ops.end[op] - ops.start[op].max(last_end)).max(0);
        last_end = last_end.max(ops.end[op]);
        let Some(step) = found.steps.last_mut() else {
            return Err(format!("a kernel before the first {FIRST}").into());
        };
        *step.entry(short_name(trace.op_name(op)).to_owned()).or_default() += 1;
    }
    let recorded: std::collections::BTreeSet<u32> = ops.iteration.iter().copied().filter(|&i| i != NONE).collect();
    if !recorded.is_empty() && recorded.len() != found.steps.len() {
        return Err(format!("{} iterations were recorded, {} steps found", recorded.len(), found.steps.len()).into());
    }
    Ok(found)
}

/// A kernel's name without its parameters and what templates make of it: tools write those differently.
fn short_name(name: &str) -> &str {
    let name = name.strip_prefix("void ").unwrap_or(name);
    name.split(['<', '(']).next().unwrap_or(name).trim()
}

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let files: Vec<_> = std::env::args_os().skip(1).map(std::path::PathBuf::from).collect();
    let [own, other] = files.as_slice() else { return Err("give two SQLite files".into()) };
    let (own, other) = (kernels(own)?, kernels(other)?);
    let mut problems = 0;
    let mut say = |problem: String| {
        println!("DIFFERS: {problem}");
        problems += 1;
    };
    if own.steps.len() != other.steps.len() {
        say(format!("{} iterations against {}", own.steps.len(), other.steps.len()));
    }
    for (number, (a, b)) in own.steps.iter().zip(&other.steps).enumerate() {
        let names: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        for name in names {
            let (a, b) = (a.get(name).unwrap_or(&0), b.get(name).unwrap_or(&0));
            if a != b {
                say(format!("step {number} of the window: {name} ran {a} times against {b}"));
            }
        }
    }
    let change = |own: i64, other: i64| other as f64 / own.max(1) as f64 - 1.0;
    if change(own.ran_ns, other.ran_ns).abs() > WITHIN {
        say("total kernel time".to_string());
    }
    let launches: u32 = own.steps.iter().flat_map(BTreeMap::values).sum();
    println!(
        "{} iterations, {launches} kernels; kernels ran for {:.3} ms against {:.3} ms ({:+.2} %, {:.0} % allowed)",
        own.steps.len(),
        own.ran_ns as f64 / 1e6,
        other.ran_ns as f64 / 1e6,
        100.0 * change(own.ran_ns, other.ran_ns),
        100.0 * WITHIN
    );
    println!(
        "sum of their lengths, waits on the device included: {:.3} ms against {:.3} ms ({:+.2} %)",
        own.sum_ns as f64 / 1e6,
        other.sum_ns as f64 / 1e6,
        100.0 * change(own.sum_ns, other.sum_ns)
    );
    println!("the recordings {}", if problems == 0 { "agree" } else { "differ" });
    Ok(if problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
