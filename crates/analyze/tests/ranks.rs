//! Collectives of several ranks: who comes late, and why.

mod gpu_common;

use gpu_common::traces;
use strobe_analyze::ranks::{Ranks, ranks};
use strobe_analyze::{Context, Options};
use strobe_trace::{CallKind, CallRow, Device, OpKind, OpRow, Process, RangeRow, Thread, Trace};

/// Two ranks that run 6 all-reduces, each `every` apart; rank 1 spends `delay` more in `augment` before the third, and its
/// clock is ahead.
fn two_ranks(delay: i64, ahead: i64, missing: usize) -> Trace {
    let mut trace = Trace::default();
    let id = |trace: &mut Trace, text: &str| trace.strings.intern(text);
    let (reduce, launch, augment) = (
        id(&mut trace, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        id(&mut trace, "cudaLaunchKernel"),
        id(&mut trace, "augment"),
    );
    for rank in 0..2u32 {
        let source = strobe_trace::Source { rank: Some(rank), ..strobe_trace::Source::default() };
        trace.meta.sources.push(source);
        trace.processes.push(Process {
            pid: i64::from(rank),
            name: String::new(),
            rank: Some(rank),
            source: rank as u16,
        });
        trace.threads.push(Thread { process: rank, tid: 1, name: String::new() });
        trace.devices.push(Device { ordinal: 0, source: rank as u16, ..Device::default() });
        let clock = ahead * i64::from(rank);
        for step in 0..6i64 - (missing as i64) * i64::from(rank) {
            let late = if rank == 1 && step >= 2 { delay } else { 0 };
            let on_time = 1_000_000 * step;
            let (called, end) = (on_time + late + clock, on_time + delay * i64::from(step >= 2) + 400_000 + clock);
            let correlation = 10 * step + 1 + 1000 * i64::from(rank);
            trace.calls.push(CallRow {
                start: called,
                end: called + 5_000,
                name: launch,
                thread: rank,
                correlation,
                kind: CallKind::Gpu,
                result: 0,
            });
            trace.ops.push(OpRow {
                correlation,
                process: rank,
                device: rank,
                ..OpRow::new(OpKind::Kernel, reduce, called + 10_000, end)
            });
            if rank == 1 && step == 2 && delay > 0 {
                trace.ranges.push(RangeRow::new(augment, rank, called - delay, called - 1_000));
            }
        }
    }
    trace.finish();
    trace
}

fn of(trace: &Trace) -> Result<Ranks, String> {
    ranks(&Context::new(trace, &Options::default()))
}

#[test]
fn the_late_rank_is_named_with_what_it_did() {
    let found = of(&two_ranks(300_000, 0, 0)).unwrap();
    let skews: Vec<i64> = found.collectives.iter().map(|c| c.skew_ns).collect();
    assert_eq!(skews, [0, 0, 300_000, 300_000, 300_000, 300_000]);
    for collective in &found.collectives[2..] {
        assert_eq!((collective.late, collective.cause.as_deref()), (1, Some("augment")), "{collective:?}");
        assert_eq!(collective.waited_ns, 300_000);
    }
    assert!(found.collectives[..2].iter().all(|c| c.cause.is_none()));
}

#[test]
fn clocks_of_two_machines_are_brought_together_by_the_ends_of_collectives() {
    let found = of(&two_ranks(300_000, 7_000_000, 0)).unwrap();
    assert_eq!(found.clocks_ns, [0, 7_000_000]);
    assert_eq!(found.collectives[3].skew_ns, 300_000);
}

#[test]
fn what_does_not_match_is_not_compared() {
    assert!(of(&two_ranks(0, 0, 1)).unwrap_err().contains("different numbers"));
    assert!(of(&Trace::default()).unwrap_err().contains("several ranks"));
}

#[test]
fn arrival_skew_of_real_ranks_is_that_of_the_table_of_truth() {
    let Some(traces) = traces() else { return };
    let truth: serde_json::Value =
        serde_json::from_slice(&std::fs::read(traces.join("truth/truth.json")).unwrap()).unwrap();
    let entry = &truth["ranks"][0];
    let files = [0, 1].map(|rank| traces.join(format!("truth/ranks_{rank}.json.gz")));
    let trace = strobe_trace::import::read_files(&files, &mut |_| ()).unwrap();
    let found = of(&trace).unwrap();
    let want: Vec<f64> = entry["arrival_skew_ms"].as_array().unwrap().iter().map(|ms| ms.as_f64().unwrap()).collect();
    assert_eq!(found.collectives.len(), want.len());
    for (collective, want) in found.collectives.iter().zip(want) {
        let skew = collective.skew_ns as f64 / 1e6;
        assert!((skew - want).abs() <= 0.05 * want + 0.001, "{skew} ms, {want} ms expected");
        if want > 0.1 {
            assert_eq!((collective.late, collective.cause.as_deref()), (1, Some("augment_images")));
        }
    }
}
