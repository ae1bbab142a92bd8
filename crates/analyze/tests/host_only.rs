//! Traces of PyTorch with CPU activity only: the host computes, and nothing ran on a device.

mod synthetic;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use strobe_analyze::budget::{Part, budgets};
use strobe_analyze::operators::operators;
use strobe_analyze::reports::ALL;
use strobe_analyze::roofline::roofline;
use strobe_trace::RangeSource;
use synthetic::{Builder, context, read};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/pytorch_cpu").join(name)
}

/// The parts of one iteration by name.
fn parts(found: &strobe_analyze::budget::IterationBudget) -> BTreeMap<String, i64> {
    found.parts.iter().map(|(part, ns)| (part.to_string(), *ns)).collect()
}

#[test]
fn a_training_step_is_split_by_what_its_operators_do() {
    let trace = read(&[file("train.json.gz")]);
    let context = context(&trace);
    assert_eq!(context.iterations.list.len(), 4);
    let budgets = budgets(&context);
    assert_eq!(budgets.len(), 4);
    for budget in &budgets {
        assert_eq!(budget.parts.iter().map(|(_, ns)| ns).sum::<i64>(), budget.wall_ns);
    }
    // Steps 2 and 4 wait 1 ms longer for nothing but the loader; its operators (1 ms) are part of it.
    let (first, second) = (parts(&budgets[0]), parts(&budgets[1]));
    assert_eq!((first["data loading"], second["data loading"]), (2_000_000, 3_000_000));
    assert_eq!(first["conv"], 3_300_000); // 10 + 10 + 1480 forward, 1800 backward
    assert_eq!(first["gemm"], 1_815_000); // 10 + 5 + 600 forward, 700 + 500 backward
    assert_eq!(first["norm"], 1_420_000);
    assert_eq!(first["optimizer"], 220_000);
    assert_eq!(first["unknown"], 100_000, "nothing was recorded between the passes");
    assert_eq!(first["conv"], second["conv"]);
}

#[test]
fn python_counts_where_no_operator_runs() {
    let trace = read(&[file("infer_stack.json.gz")]);
    let context = context(&trace);
    let budgets = budgets(&context);
    assert_eq!(budgets.len(), 5);
    let parts = parts(&budgets[0]);
    assert_eq!(parts["Python"], 40_000 + 30_000 + 3 * 30_000);
    assert_eq!(parts["attention"], 410_000);
    assert_eq!(parts["gemm"], 2_830_000);
    assert!(!parts.contains_key("unknown"));
}

#[test]
fn operators_have_own_and_total_time() {
    let trace = read(&[file("train.json.gz")]);
    let context = context(&trace);
    let rows = operators(&context, false);
    let row = |name: &str| rows.iter().find(|row| row.name == name).unwrap();
    let linear = row("aten::linear");
    assert_eq!((linear.calls, linear.own_ns, linear.total_ns), (4, 40_000, 4 * 615_000));
    assert_eq!(row("aten::mm").calls, 8);
    let own: i64 = rows.iter().map(|row| row.own_ns).sum();
    assert_eq!(own, 4 * (9_450_000 - 100_000 - 1_000_000 - 70_000), "every moment in an operator counts once");
    let shapes = operators(&context, true);
    let products: Vec<_> = shapes.iter().filter(|row| row.name == "aten::mm").map(|row| row.shapes.as_str()).collect();
    assert_eq!(products, ["[[16, 10], [10, 32768]]", "[[10, 16], [16, 32768]]"]);
}

#[test]
fn amounts_are_known_and_the_roof_is_not() {
    let trace = read(&[file("train.json.gz")]);
    let result = roofline(&context(&trace));
    let row = |name: &str| result.rows.iter().find(|row| row.op == name).unwrap();
    // 2 x 16 x 32 x 32 x 32 x 3 x 9, and a bias.
    let convolution = row("aten::mkldnn_convolution");
    assert_eq!(convolution.flops, Some(4.0 * (28_311_552.0 + 524_288.0)));
    assert_eq!((convolution.calls, convolution.time_ns, convolution.share()), (4, 4 * 1_480_000, None));
    assert!(result.rows.iter().all(|row| row.kernel.is_empty() && row.least_ns.is_none()));
    assert!(result.known_ns > result.total_ns * 9 / 10, "{} of {}", result.known_ns, result.total_ns);
}

#[test]
fn every_report_applies_or_says_why_not() {
    for name in ["train.json.gz", "infer_stack.json.gz"] {
        let trace = read(&[file(name)]);
        let context = context(&trace);
        for entry in ALL {
            let report = entry.run(&context);
            let applies = matches!(
                entry.name,
                "summary" | "iterations" | "budget" | "categories" | "operators" | "roofline" | "nvtx-sum"
            );
            match &report.not_applicable {
                None => assert!(applies, "{}", entry.name),
                Some(why) => assert!(!applies && !why.contains('\n') && why.len() > 20, "{}: {why}", entry.name),
            }
        }
    }
}

#[test]
fn a_trace_without_steps_is_split_as_a_whole() {
    let mut builder = Builder::new();
    builder.trace.devices.clear();
    builder.range(RangeSource::CpuOp, "aten::linear", 100, 500).range(RangeSource::CpuOp, "aten::addmm", 150, 450);
    builder.range(RangeSource::CpuOp, "aten::view", 600, 700).range(RangeSource::CpuOp, "aten::relu", 700, 1000);
    let trace = builder.build();
    let context = context(&trace);
    assert!(context.computes_on_host());
    assert_eq!(budgets(&context), []);
    let report = strobe_analyze::budget::report(&context);
    let whole = report.sheets.iter().find(|sheet| sheet.name == "devices").unwrap();
    let cells: Vec<String> = whole.rows.iter().map(|row| format!("{:?} {:?}", row[1], row[2])).collect();
    let expected = [("all", 900), ("gemm", 400), ("activation", 300), ("other operators", 100), ("unknown", 100)];
    let expected = expected.map(|(part, ns)| format!("Text({part:?}) Int({ns})"));
    assert_eq!(cells, expected);
}

#[test]
fn launches_without_kernels_are_not_a_host_that_computes() {
    let mut builder = Builder::new();
    builder.range(RangeSource::CpuOp, "aten::mm", 0, 100).call("cudaLaunchKernel", 10, 20, 1);
    let trace = builder.build();
    let context = context(&trace);
    assert!(!context.computes_on_host());
    assert!(strobe_analyze::roofline::report(&context).not_applicable.is_some());
}

#[test]
fn deep_nesting_and_many_ranges_stay_linear() {
    let mut builder = Builder::new();
    for depth in 0..50_000 {
        builder.range(RangeSource::CpuOp, "aten::add_", depth, 1_000_000 - depth);
    }
    for i in 0..50_000 {
        builder.range(RangeSource::CpuOp, "aten::mul", 2_000_000 + 10 * i, 2_000_005 + 10 * i);
    }
    let trace = builder.build();
    let context = context(&trace);
    let started = std::time::Instant::now();
    let rows = operators(&context, false);
    assert_eq!(rows.iter().map(|row| row.own_ns).sum::<i64>(), 1_000_000 + 250_000);
    roofline(&context);
    strobe_analyze::budget::report(&context);
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

/// A part is what its name says.
#[test]
fn parts_of_a_host_are_families_of_operators() {
    let trace = read(&[file("train.json.gz")]);
    let context = context(&trace);
    for budget in budgets(&context) {
        assert!(budget.parts.iter().all(|(part, _)| matches!(part, Part::Category(_) | Part::Unknown)));
    }
}
