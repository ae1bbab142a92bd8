//! The iteration budget: known splits, an independent oracle, and sums that hold for any trace.

mod spine_common;

use std::collections::BTreeMap;

use proptest::prelude::*;
use spine_common::{iteration, op, range};
use strobe_analyze::spine::{Part, budget_by_kind, budgets};
use strobe_trace::recorded::Trace;
use strobe_trace::{Iteration, IterationKind, RangeKind};

fn category(name: &str) -> Part {
    Part::Category(name.to_owned())
}

#[test]
fn a_step_is_split_as_the_loop_ran() {
    let mut trace = Trace::default();
    iteration(&mut trace, 7, (0, 3), 0, 100);
    range(&mut trace, RangeKind::Schedule, Some(7), 0, 10);
    range(&mut trace, RangeKind::ForwardStep, Some(7), 12, 80);
    range(&mut trace, RangeKind::Prepare, Some(7), 12, 20); // inside the forward step
    op(&mut trace, "gemm", 7, 20, 50);
    op(&mut trace, "attention", 7, 52, 70);
    op(&mut trace, "gemm", 7, 60, 65); // nested in attention: counted once, for the inner one
    range(&mut trace, RangeKind::Sample, Some(7), 80, 90);
    op(&mut trace, "sampling", 7, 81, 85);
    range(&mut trace, RangeKind::Respond, Some(7), 90, 97);
    op(&mut trace, "norm", 8, 30, 40); // of another iteration

    let budget = budgets(&trace).remove(0);
    assert_eq!((budget.iter, budget.kind, budget.wall_ns), (7, IterationKind::Decode, 100));
    assert_eq!(
        budget.parts,
        [
            (Part::Schedule, 10),
            (Part::Prepare, 8),
            (category("attention"), 13),
            (category("gemm"), 35),
            (category("sampling"), 4),
            (Part::Sample, 6),
            (Part::Respond, 7),
            (Part::Idle, 12),
            (Part::Unknown, 5),
        ]
    );
}

#[test]
fn kinds_are_summed_apart() {
    let mut trace = Trace::default();
    for (iter, start, length, gemm) in [(0, 0, 10, 8), (1, 10, 30, 0), (2, 40, 20, 10)] {
        iteration(&mut trace, iter, (0, 1), start, start + length);
        op(&mut trace, "gemm", iter, start, start + gemm);
    }
    iteration(&mut trace, 3, (1, 0), 60, 160);
    let kinds = budget_by_kind(&budgets(&trace));
    assert_eq!(
        kinds.iter().map(|k| (k.kind, k.iterations)).collect::<Vec<_>>(),
        [(IterationKind::Prefill, 1), (IterationKind::Decode, 3)]
    );
    let decode = &kinds[1];
    assert_eq!((decode.wall_ns.median, decode.wall_ns.mean), (20.0, 20.0));
    let gemm = &decode.parts[0];
    assert_eq!((&gemm.part, gemm.median_ns, gemm.mean_ns), (&category("gemm"), 8.0, 6.0));
    assert_eq!(gemm.share_of_wall, 0.3);
    assert_eq!(kinds[0].parts[0].part, Part::Unknown);
}

#[test]
fn extreme_times_do_not_overflow() {
    let mut trace = Trace::default();
    iteration(&mut trace, 0, (0, 1), i64::MIN, i64::MAX);
    iteration(&mut trace, 1, (0, 1), i64::MAX, i64::MIN);
    op(&mut trace, "gemm", 0, i64::MIN, i64::MAX);
    let budgets = budgets(&trace);
    assert_eq!(budgets[0].parts, [(category("gemm"), i64::MAX)]);
    assert_eq!((budgets[1].wall_ns, budgets[1].parts.len()), (0, 0));
}

/// The documented rule, applied to one nanosecond at a time.
fn oracle(trace: &Trace, it: &Iteration) -> BTreeMap<Part, i64> {
    let mut parts = BTreeMap::new();
    for now in it.start..it.end {
        let at = |start: i64, end: i64| start <= now && now < end;
        // Clipped to the iteration, as events that began before it count from its start.
        let age = |start: i64, end: i64| (start.max(it.start), std::cmp::Reverse(end.min(it.end)));
        let running = trace
            .ops
            .iter()
            .enumerate()
            .filter(|(_, o)| o.iteration == it.iter && at(o.start, o.end))
            .max_by_key(|(i, o)| (age(o.start, o.end), *i));
        let mine = trace.ranges.iter().filter(|r| r.iteration.is_none_or(|n| n == it.iter) && at(r.start, r.end));
        let phase = mine
            .clone()
            .filter_map(|r| {
                let (part, order) = match r.kind {
                    RangeKind::Schedule => (Part::Schedule, 1),
                    RangeKind::Prepare => (Part::Prepare, 2),
                    RangeKind::Sample => (Part::Sample, 3),
                    RangeKind::Respond => (Part::Respond, 4),
                    _ => return None,
                };
                Some((age(r.start, r.end), order, part))
            })
            .max_by_key(|(age, order, _)| (*age, *order));
        let stepping = mine.clone().any(|r| matches!(r.kind, RangeKind::ForwardStep | RangeKind::Layer));
        let part = match (running, phase) {
            (Some((_, o)), _) => category(trace.strings.get(o.category)),
            (None, Some((_, _, part))) => part,
            (None, None) if stepping => Part::Idle,
            (None, None) => Part::Unknown,
        };
        *parts.entry(part).or_default() += 1;
    }
    parts
}

proptest! {
    #[test]
    fn parts_add_up_and_follow_the_rule(trace in spine_common::any_trace()) {
        let budgets = budgets(&trace);
        prop_assert_eq!(budgets.len(), trace.iterations.len());
        for (budget, it) in budgets.iter().zip(&trace.iterations) {
            prop_assert_eq!(budget.parts.iter().map(|p| p.1).sum::<i64>(), budget.wall_ns);
            prop_assert!(budget.parts.iter().all(|p| p.1 > 0));
            prop_assert_eq!(budget.parts.iter().cloned().collect::<BTreeMap<_, _>>(), oracle(&trace, it));
        }
        for kind in budget_by_kind(&budgets) {
            let means: f64 = kind.parts.iter().map(|p| p.mean_ns).sum();
            prop_assert!((means - kind.wall_ns.mean).abs() < 1e-9);
            if kind.wall_ns.max > 0.0 {
                let shares: f64 = kind.parts.iter().map(|p| p.share_of_wall).sum();
                prop_assert!((shares - 1.0).abs() < 1e-12, "{}", shares);
            } else {
                prop_assert!(kind.parts.is_empty());
            }
        }
    }
}
