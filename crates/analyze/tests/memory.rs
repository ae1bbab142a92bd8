//! Memory in use over time.

mod synthetic;

use proptest::prelude::*;
use strobe_analyze::memory::{MemoryKind, MemorySeries, report, series};
use strobe_analyze::sheet::{Report, Value};
use strobe_trace::{Allocation, RangeSource, StrId, Trace};
use synthetic::{Builder, context, read, real_data};

fn allocation(time: i64, address: u64, bytes: i64) -> Allocation {
    Allocation {
        time,
        device: Some(0),
        process: 0,
        address,
        bytes,
        mem_kind: 2,
        name: StrId::NONE,
        total_allocated: None,
        total_reserved: None,
    }
}

fn cell<'r>(report: &'r Report, sheet: usize, row: usize, column: &str) -> &'r Value {
    let sheet = &report.sheets[sheet];
    &sheet.rows[row][sheet.columns.iter().position(|c| c.name == column).unwrap()]
}

#[test]
fn the_state_before_a_capture_is_the_state_at_its_start() {
    let Some(data) = real_data() else { return };
    let trace = read(&[data.join("nsys/h200/node.sqlite")]);
    let all = series(&trace);
    let of_kind = |kind: u8| all.iter().find(|s| s.kind == MemoryKind::Cupti(kind)).unwrap();
    // 82 allocations less 2 frees, all at the start of the capture.
    assert_eq!(of_kind(2).peak(), Some((2_525_128_452 - 12_582_912, 0)));
    assert_eq!(of_kind(5).peak(), Some((466_360, 0)));
    let report = report(&context(&trace));
    let usage = &report.sheets[0];
    let row = usage.rows.iter().position(|r| r[2] == Value::from("device")).unwrap();
    assert_eq!(*cell(&report, 0, row, "At Start"), Value::Int(2_512_545_540));
    assert_eq!(*cell(&report, 0, row, "Allocations"), Value::Int(82));
    assert_eq!(*cell(&report, 0, row, "Frees"), Value::Int(2));
    assert!(report.notes.iter().any(|n| n.starts_with("2315 of 2315 changes")), "{:?}", report.notes);
}

#[test]
fn totals_of_an_allocator_are_followed() {
    let Some(data) = real_data() else { return };
    let trace = read(&[data.join("kineto/tracelens/h100_qwen/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz")]);
    let all = series(&trace);
    for kind in [MemoryKind::Allocator, MemoryKind::Reserved] {
        let on_device = all.iter().find(|s| s.kind == kind && s.device.is_some()).unwrap();
        let mine = |a: &&Allocation| a.device == on_device.device;
        let total = |a: &Allocation| if kind == MemoryKind::Reserved { a.total_reserved } else { a.total_allocated };
        let last = trace.allocations.iter().rfind(mine).and_then(total).unwrap();
        assert_eq!(on_device.bytes.last(), Some(&(last as i64)));
        assert!(!on_device.lower_bound);
    }
    let report = report(&context(&trace));
    assert!(matches!(&cell(&report, 1, 0, "Operator"), Value::Text(name) if name.starts_with("aten::")));
}

fn trace_of(allocations: Vec<Allocation>) -> Trace {
    let mut builder = Builder::new();
    builder.range(RangeSource::PushPop, "load", 0, 50).range(RangeSource::PushPop, "run", 60, 200);
    builder.operator(RangeSource::CpuOp, "aten::linear", 70, 90, "", "");
    builder.operator(RangeSource::CpuOp, "aten::empty", 75, 80, "", "");
    builder.trace.allocations = allocations;
    builder.build()
}

#[test]
fn peak_and_owners_by_hand() {
    let mut trace = trace_of(vec![
        allocation(5, 1, 100),
        allocation(76, 2, 40),
        allocation(77, 3, 60),
        allocation(100, 3, -60),
        allocation(110, 4, 30),
        allocation(250, 1, -100),
    ]);
    let name = trace.strings.intern("weights");
    trace.allocations.push(Allocation { mem_kind: 5, name, ..allocation(10, 5, 7) });
    trace.finish();
    let all = series(&trace);
    let sum: &MemorySeries = all.iter().find(|s| s.kind == MemoryKind::All).unwrap();
    assert_eq!((sum.peak(), sum.at(80), sum.at(4), sum.at(1000)), (Some((207, 77)), 207, 0, 77));
    let report = report(&context(&trace));
    let owners: Vec<Vec<Value>> = report.sheets[1].rows.iter().map(|r| r[1..].to_vec()).collect();
    let text = |t: &str| Value::from(t);
    assert_eq!(
        owners,
        [
            vec![Value::Int(100), Value::Int(100), Value::Int(1), text("load"), Value::Unknown],
            // `aten::empty` is inside `aten::linear`: the operator that the program called is named.
            vec![Value::Int(100), Value::Int(100), Value::Int(2), text("run"), text("aten::linear")],
            vec![Value::Int(7), Value::Int(7), Value::Int(1), text("weights"), Value::Unknown],
            vec![Value::Int(0), Value::Int(30), Value::Int(1), text("run"), Value::Unknown],
        ]
    );
}

#[test]
fn the_order_of_rows_of_one_moment_does_not_matter() {
    // The state before a capture bears one time: an address may be in it twice, with the free between.
    let rows = [
        allocation(0, 1, 100),
        allocation(0, 1, -100),
        allocation(0, 1, 30),
        allocation(0, 2, 50),
        allocation(10, 2, -50),
        allocation(10, 2, 60),
    ];
    let shown = |order: &[usize]| {
        let mut trace = trace_of(order.iter().map(|&row| rows[row]).collect());
        let names: Vec<StrId> = ["b", "a"].iter().map(|name| trace.strings.intern(name)).collect();
        for name in if order[0] == 0 { [names[0], names[1]] } else { [names[1], names[0]] } {
            trace.allocations.push(Allocation { name, mem_kind: 5, ..allocation(0, 90 + u64::from(name.0), 7) });
        }
        trace.finish();
        report(&context(&trace)).sheets
    };
    let sheets = shown(&[0, 1, 2, 3, 4, 5]);
    for order in [[5, 4, 3, 2, 1, 0], [1, 2, 0, 5, 3, 4], [2, 1, 3, 0, 4, 5]] {
        assert_eq!(shown(&order), sheets);
    }
    let at_peak = |row: &Vec<Value>| if let Value::Int(bytes) = row[1] { bytes } else { 0 };
    assert_eq!(sheets[1].rows.iter().map(at_peak).sum::<i64>(), 30 + 60 + 7 + 7);
    assert!(sheets[0].rows.iter().any(|row| row[4] == Value::Int(30 + 60 + 7 + 7)), "{:?}", sheets[0].rows);
}

#[test]
fn giving_back_more_than_was_seen_is_a_lower_bound() {
    let trace = trace_of(vec![allocation(5, 9, -300), allocation(6, 10, 20)]);
    let all = series(&trace);
    assert_eq!((all[0].before, all[0].bytes.clone(), all[0].lower_bound), (300, vec![0, 20], true));
    assert!(report(&context(&trace)).notes.iter().any(|note| note.contains("lower bound")));
}

#[test]
fn without_allocations_a_reason_is_given() {
    let why = report(&context(&Trace::default())).not_applicable.unwrap();
    assert!(why.contains("--cuda-memory-usage=true"));
}

proptest! {
    #[test]
    fn series_never_fall_below_nothing_and_end_where_the_sum_does(
        changes in prop::collection::vec((0i64..50, -100i64..100, 0u32..2, 0u8..3), 1..60),
    ) {
        let change = |&(time, bytes, device, mem_kind): &(i64, i64, u32, u8)| {
            Allocation { device: Some(device), mem_kind, ..allocation(time, 0, bytes) }
        };
        let trace = trace_of(changes.iter().map(change).collect());
        for s in series(&trace) {
            let mine = |a: &&Allocation| a.device == s.device && (s.kind == MemoryKind::All || s.kind == MemoryKind::Cupti(a.mem_kind));
            let sum: i64 = trace.allocations.iter().filter(mine).map(|a| a.bytes).sum();
            prop_assert_eq!(s.bytes[s.bytes.len() - 1] - s.before, sum);
            prop_assert!(s.before >= 0 && s.bytes.iter().all(|&b| b >= 0));
            prop_assert!(s.times.windows(2).all(|w| w[0] < w[1]));
        }
    }
}
