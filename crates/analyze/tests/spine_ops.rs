//! Op summary, roofline and comparison.

mod spine_common;

use proptest::prelude::*;
use spine_common::{any_trace, iteration, named_op, op, range};
use strobe_analyze::spine::{Bound, compare, compare_ops, top_ops, top_ops_by_kind};
use strobe_trace::recorded::Trace;
use strobe_trace::{IterationKind, Peaks, RangeKind};

#[test]
fn ops_are_summed_and_set_against_the_roofline() {
    let mut trace = Trace::default();
    iteration(&mut trace, 0, (1, 0), 0, 2_000);
    iteration(&mut trace, 1, (0, 1), 2_000, 4_000);
    named_op(&mut trace, "qkv_proj", "gemm", 0, 0, 1_000);
    named_op(&mut trace, "qkv_proj", "gemm", 1, 2_000, 2_500);
    named_op(&mut trace, "norm", "norm", 1, 2_500, 2_600);
    (trace.ops[0].flops, trace.ops[0].bytes) = (80_000, 1_000); // 800 ns of arithmetic at best
    (trace.ops[1].flops, trace.ops[1].bytes) = (100, 4_000); // 400 ns of memory at best
    assert!(top_ops(&trace).iter().all(|row| row.roofline.is_none()));

    trace.meta.peaks = Some(Peaks { flops_per_s: 1e11, bytes_per_s: 1e10, note: String::new() });
    let rows = top_ops(&trace);
    let [qkv, norm] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!((&*qkv.name, qkv.calls, qkv.total_ns, qkv.median_ns), ("qkv_proj", 2, 1_500, 750.0));
    assert_eq!((qkv.share_of_op_time, qkv.share_of_wall), (Some(1500.0 / 1600.0), Some(0.375)));
    assert_eq!((qkv.flops, qkv.bytes), (80_100, 5_000));
    let roofline = qkv.roofline.unwrap();
    assert!((roofline.share - 0.8).abs() < 1e-12, "{roofline:?}");
    assert_eq!(roofline.bound, Bound::Compute);
    // What was not recorded is absent, not zero.
    assert_eq!((norm.flops_per_s, norm.bytes_per_s, norm.roofline), (None, None, None));

    let decode = top_ops_by_kind(&trace, IterationKind::Decode);
    assert_eq!((decode[0].total_ns, decode[0].share_of_wall), (500, Some(0.25)));
    assert_eq!(decode[0].roofline.unwrap().bound, Bound::Memory);
    assert!(top_ops_by_kind(&trace, IterationKind::Mixed).is_empty());

    trace.meta.peaks = Some(Peaks { flops_per_s: f64::NAN, bytes_per_s: 0.0, note: String::new() });
    assert!(top_ops(&trace).iter().all(|row| row.roofline.is_none()));
}

/// Fused attention against three separate ops, and the recordings caught different mixes of kinds.
#[test]
fn a_difference_is_explained_by_its_ops() {
    let mut fused = Trace::default();
    iteration(&mut fused, 0, (1, 0), 0, 100);
    range(&mut fused, RangeKind::ForwardStep, Some(0), 0, 95);
    named_op(&mut fused, "qkv_proj", "gemm", 0, 0, 50);
    named_op(&mut fused, "fmha", "attention", 0, 50, 90);
    iteration(&mut fused, 1, (0, 1), 100, 110);

    let mut unfused = Trace::default();
    for iter in 0..2 {
        let t = iter as i64 * 200;
        iteration(&mut unfused, iter, (1, 0), t, t + 160);
        range(&mut unfused, RangeKind::ForwardStep, Some(iter), t, t + 155);
        named_op(&mut unfused, "qkv_proj", "gemm", iter, t, t + 50);
        named_op(&mut unfused, "scores", "attention", iter, t + 50, t + 90);
        named_op(&mut unfused, "softmax", "attention", iter, t + 90, t + 130);
        named_op(&mut unfused, "values", "attention", iter, t + 130, t + 150);
    }

    let comparison = compare(&fused, &unfused);
    assert_eq!((comparison.a_wall_ns, comparison.b_wall_ns), (100.0, 160.0));
    assert_eq!(comparison.left_out, [IterationKind::Decode]);
    let change = |name: &str| comparison.by_op.iter().find(|d| d.name == name).unwrap().delta_ns;
    assert_eq!([change("fmha"), change("scores"), change("softmax")], [-40.0, 40.0, 40.0]);
    assert_eq!([change("qkv_proj"), change("idle"), change("unknown")], [0.0; 3]);
    let largest = &comparison.by_category[0];
    assert_eq!((&*largest.name, largest.a_ns_per_iter, largest.delta_ns), ("attention", 40.0, 60.0));
}

#[test]
fn nothing_in_common_gives_no_rows() {
    let (mut a, mut b) = (Trace::default(), Trace::default());
    iteration(&mut a, 0, (1, 0), 0, 10);
    iteration(&mut b, 0, (0, 1), 0, 10);
    op(&mut a, "gemm", 0, 0, 5);
    let comparison = compare(&a, &b);
    assert!(comparison.kinds.is_empty() && comparison.by_op.is_empty());
    assert_eq!(comparison.left_out, [IterationKind::Prefill, IterationKind::Decode]);
}

proptest! {
    #[test]
    fn shares_of_op_time_add_up(trace in any_trace()) {
        let rows = top_ops(&trace);
        prop_assert_eq!(rows.iter().map(|r| r.calls).sum::<u64>(), trace.ops.len() as u64);
        prop_assert!(rows.windows(2).all(|w| w[0].total_ns >= w[1].total_ns));
        let shares: Option<Vec<f64>> = rows.iter().map(|r| r.share_of_op_time).collect();
        if let Some(shares) = shares.filter(|s| !s.is_empty()) {
            prop_assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn deltas_add_up_to_the_difference(a in any_trace(), b in any_trace()) {
        let comparison = compare(&a, &b);
        let difference = comparison.b_wall_ns - comparison.a_wall_ns;
        for rows in [&comparison.by_op, &comparison.by_category] {
            prop_assert!((rows.iter().map(|d| d.delta_ns).sum::<f64>() - difference).abs() < 1e-9);
        }
        let weights: f64 = comparison.kinds.iter().map(|k| k.weight).sum();
        prop_assert!(comparison.kinds.is_empty() || (weights - 1.0).abs() < 1e-12);
        // Swapping the sides turns every sign.
        let back: f64 = compare_ops(&b, &a).iter().map(|d| d.delta_ns).sum();
        prop_assert!((back + difference).abs() < 1e-9);
    }
}
