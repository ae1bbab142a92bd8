//! Samples of GPU metrics.

mod synthetic;

use strobe_analyze::categories::{Category, Class};
use strobe_analyze::intervals::Span;
use strobe_analyze::iterations::Found;
use strobe_analyze::metrics::{metrics, report};
use strobe_analyze::sheet::Value;
use strobe_trace::{Counter, Trace};
use synthetic::{Builder, context, read, real_data};

#[test]
fn traps_of_the_real_samples() {
    let Some(data) = real_data() else { return };
    let trace = read(&[data.join("nsys/h200/gpum.sqlite")]);
    assert_eq!(trace.counters.len(), 22);
    let found = metrics(&trace);
    assert_eq!(found.wrapped, ["Unallocated Warps in Active SMs [Avg]"]);
    assert_eq!((found.known.len(), found.outside.len()), (21, 0));
    let (start, end) = (trace.ops.start[0], *trace.ops.end.iter().max().unwrap());
    for metric in &found.known {
        // 1,504 samples were taken; the work lasts 21.1 ms, which at 20 kHz are 422.
        assert_eq!(metric.values.len(), 422, "{}", metric.name);
        assert!(metric.times.iter().all(|&t| start <= t && t <= end));
        assert!((metric.period_ns().unwrap() - 50_000.0).abs() < 100.0);
    }
    let clock = found.known.iter().find(|m| m.name == "GPC Clock Frequency [MHz]").unwrap();
    assert!(clock.values.iter().all(|&mhz| (1600.0..1981.0).contains(&mhz)));
    let report = report(&context(&trace));
    assert!(report.notes.iter().any(|note| note.contains("Unallocated Warps in Active SMs [Avg]")));
    assert!(report.notes.iter().any(|note| note.starts_with("One sample every 50.0 us")));
}

fn sampled() -> Trace {
    let mut builder = Builder::new();
    builder.kernel("gemm", 100, 200, 0).kernel("norm", 150, 160, 0).kernel("gemm", 180, 300, 0);
    let counter = |name: &str, values: Vec<f64>| Counter {
        name: name.to_owned(),
        device: Some(0),
        times: vec![50, 120, 155, 190, 290, 350],
        values,
    };
    builder.trace.counters = vec![
        counter("SMs Active [Throughput %]", vec![9.0, 10.0, 20.0, 30.0, 40.0, 9.0]),
        counter("Clock [MHz]", vec![1.9e9; 6]),
        counter("Warps [Avg]", vec![1.0, 1.0, -5.0, 1.0, 1.0, 1.0]),
    ];
    builder.build()
}

#[test]
fn means_by_hand() {
    let trace = sampled();
    let mut context = context(&trace);
    let category = |name: &str| Category { name: name.to_owned(), class: Class::Compute };
    context.categories.list = vec![category("gemm"), category("norm"), category("idle")];
    context.categories.of_op = vec![0, 1, 0];
    context.iterations.list.push(Found {
        number: 3,
        label: "step 3".to_owned(),
        kind: None,
        context_requests: None,
        generation_requests: None,
        context_tokens: None,
        generation_tokens: None,
        process: 0,
        host: Span::new(0, 300),
        device: Some(Span::new(100, 160)),
    });
    let report = report(&context);
    let rows = |sheet: &str| report.sheets.iter().find(|s| s.name == sheet).unwrap().rows.clone();
    let float = Value::Float;
    let whole = &rows("metrics")[0];
    assert_eq!(whole[2..], [Value::Int(4), float(10.0), float(25.0), float(25.0), float(40.0)]);
    assert_eq!(rows("by_iteration"), [vec![Value::Int(3), Value::from("step 3"), float(15.0), float(1900.0)]]);
    // A sample inside two ops of a category counts once.
    assert_eq!(
        rows("by_category"),
        [
            vec![Value::from("gemm"), Value::Int(4), float(25.0), float(1900.0)],
            vec![Value::from("norm"), Value::Int(1), float(20.0), float(1900.0)],
        ]
    );
}

#[test]
fn without_usable_samples_a_reason_is_given() {
    assert!(report(&context(&Trace::default())).not_applicable.unwrap().contains("--gpu-metrics-devices"));
    let mut trace = sampled();
    trace.counters.drain(..2);
    assert!(report(&context(&trace)).not_applicable.unwrap().contains("1 wrapped"));
}
