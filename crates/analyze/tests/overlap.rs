//! Communication against compute, against Holistic Trace Analysis, nsys-ai and by hand.

mod synthetic;

use proptest::prelude::*;
use strobe_analyze::categories::Class;
use strobe_analyze::overlap::{DeviceOverlap, overlaps, report};
use strobe_analyze::sheet::Value;
use strobe_trace::{NONE, OpKind, Trace};
use synthetic::{Builder, context, read, real_data};

/// What HTA takes an op for, by its name alone.
fn class_of_hta(trace: &Trace, op: usize) -> Class {
    let name = trace.op_name(op);
    let starts = |words: &[&str]| words.iter().any(|word| name.starts_with(word));
    if starts(&["nccl", "hip", "hccl"]) || name.contains("ncclKernel") {
        Class::Communication
    } else if starts(&["Memcpy", "Memset", "dma"]) {
        Class::Memory
    } else {
        Class::Compute
    }
}

/// The fields of the only row of `rank` in a CSV.
fn golden(path: &std::path::Path, rank: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(path).unwrap();
    let row = text.lines().skip(1).map(|l| l.split(',').collect::<Vec<_>>()).find(|row| row[1] == rank).unwrap();
    row[2..].iter().map(|field| field.parse().unwrap_or(f64::NAN)).collect()
}

#[test]
fn breakdown_and_overlap_equal_those_of_hta() {
    let Some(data) = real_data() else { return };
    let kineto = data.join("kineto");
    for (file, prefix, rank) in [
        ("h200/kineto_graph.json.gz", "h200/hta_golden/", "0"),
        ("hta/trace_diff_control.json.gz", "hta/golden/control_", "3"),
        ("hta/trace_diff_test.json.gz", "hta/golden/test_", "1"),
        ("hta/ns_resolution_rank-0.json.gz", "hta/golden/ns_resolution_", "0"),
        ("hta/sampled_rank-0.json.gz", "hta/golden/trace_filter_", "0"),
        ("hta/sampled_rank-1.json.gz", "hta/golden/trace_filter_", "1"),
        ("tracelens/h100_qwen/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", "tracelens/h100_qwen/hta_golden/", "0"),
    ] {
        let trace = read(&[kineto.join(file)]);
        // In traces of several steps HTA drops what has no launch (614 ops of one file).
        let dropped = |op: usize| file.contains("trace_diff_test") && trace.ops.launch[op] == NONE;
        let measured = overlaps(&trace, |op| (!dropped(op)).then(|| class_of_hta(&trace, op)));
        assert_eq!(measured.len(), 1, "{file}");
        let found = measured[0];
        let theirs = golden(&kineto.join(format!("{prefix}temporal_breakdown.csv")), rank);
        let ours = [found.idle(), found.compute, found.non_compute(), found.span].map(|ns| ns as f64 / 1e3);
        for (ours, theirs) in ours.iter().zip(&theirs) {
            // HTA calculates in f64 of absolute microseconds, which moves spans by up to 48 ns.
            assert!((ours - theirs).abs() < 0.06, "{file}: {ours} {theirs}");
        }
        let path = kineto.join(format!("{prefix}comm_comp_overlap.csv"));
        if path.exists() {
            let theirs = golden(&path, rank)[0];
            match found.overlapped_share() {
                Some(ours) => assert!((100.0 * ours - theirs).abs() < 0.0051, "{file}: {ours} {theirs}"),
                None => assert!(theirs.is_nan(), "{file}: {theirs}"),
            }
        }
    }
}

#[test]
fn the_training_pair_equals_nsys_ai() {
    let Some(data) = real_data() else { return };
    for (file, golden) in
        [("mfu_2gpu_before", [509.79, 25.40, 63.33, 598.51]), ("mfu_2gpu_after", [455.09, 33.74, 109.63, 598.46])]
    {
        let trace = read(&[data.join(format!("nsys/nsys-ai/{file}.sqlite"))]);
        let class = |op: usize| match trace.ops.kind[op] {
            OpKind::Kernel if trace.op_name(op).contains("nccl") => Some(Class::Communication),
            OpKind::Kernel => Some(Class::Compute),
            _ => None,
        };
        let devices = overlaps(&trace, class);
        assert_eq!(devices.len(), 2);
        let sum = |value: fn(&DeviceOverlap) -> i64| devices.iter().map(value).sum::<i64>() as f64 / 1e6;
        let ours = [sum(|d| d.compute), sum(|d| d.exposed), sum(|d| d.idle()), sum(|d| d.span)];
        for (ours, golden) in ours.iter().zip(golden) {
            assert!((ours - golden).abs() < 0.011, "{file}: {ours} {golden}");
        }
    }
}

#[test]
fn exposed_communication_is_named() {
    let mut builder = Builder::new();
    builder.kernel("gemm", 0, 100, 0).op(OpKind::Kernel, "all", 8, 50, 150, 0).op(
        OpKind::Memcpy,
        "copy",
        9,
        140,
        170,
        0,
    );
    builder.op(OpKind::Kernel, "gather", 8, 10, 30, 0);
    let trace = builder.build();
    let mut context = context(&trace);
    context.categories.list = ["gemm", "comm", "memcpy"]
        .into_iter()
        .zip([Class::Compute, Class::Communication, Class::Memory])
        .map(|(name, class)| strobe_analyze::categories::Category { name: name.to_owned(), class })
        .collect();
    let category = |op: usize| match trace.op_name(op) {
        "gemm" => 0,
        "copy" => 2,
        _ => 1,
    };
    context.categories.of_op = (0..trace.ops.len()).map(category).collect();
    let report = report(&context);
    let row = &report.sheets[0].rows[0];
    let numbers = [120, 70, 50].map(Value::Int);
    assert_eq!(row[1..4], numbers);
    assert_eq!(row[4], Value::Float(70.0 / 120.0));
    assert_eq!(row[5..9], [100, 20, 0, 170].map(Value::Int));
    let names: Vec<&Value> = report.sheets[1].rows.iter().map(|r| &r[4]).collect();
    assert_eq!(names, [&Value::from("all"), &Value::from("gather")]);
    assert_eq!(report.sheets[1].rows[0][2], Value::Int(50));
    assert_eq!(report.sheets[1].rows[1][2], Value::Int(0));
}

#[test]
fn without_communication_a_reason_is_given() {
    let trace = Builder::new().kernel("gemm", 0, 100, 0).build();
    assert!(report(&context(&trace)).not_applicable.unwrap().contains("no op of the trace is communication"));
}

proptest! {
    #[test]
    fn the_parts_add_up(ops in prop::collection::vec((0i64..200, 0i64..30, 0usize..3), 1..40)) {
        let mut builder = Builder::new();
        for &(start, length, class) in &ops {
            builder.op(OpKind::Kernel, ["compute", "comm", "memory"][class], class as u32, start, start + length, 0);
        }
        let trace = builder.build();
        let class = |op: usize| match trace.op_name(op) {
            "compute" => Class::Compute,
            "comm" => Class::Communication,
            _ => Class::Memory,
        };
        for found in overlaps(&trace, |op| Some(class(op))) {
            prop_assert_eq!(found.overlapped + found.exposed, found.communication);
            prop_assert!(found.non_compute() >= found.exposed && found.exposed >= 0 && found.idle() >= 0);
            prop_assert_eq!(found.compute + found.non_compute() + found.idle(), found.span);
        }
    }
}
