//! What a comparison says of traces made by hand, where the truth is known.

#![allow(clippy::needless_update)]

mod synthetic;

use proptest::prelude::*;
use strobe_analyze::Context;
use strobe_analyze::categories::{Categories, Category, Class};
use strobe_analyze::compare::{Basis, CompareOptions, Comparison, Delta, Gate, MatchedBy, Outcome, compare};
use strobe_analyze::intervals::Span;
use strobe_analyze::iterations::{Detected, Found, Method};
use strobe_trace::{Iteration, IterationKind, NONE, OpKind, RangeKind, RangeSource, Trace, Work};
use synthetic::Builder;

/// A kernel: name, duration, and the pause before it.
type Kernel<'n> = (&'n str, i64, i64);

/// An iteration: kind, requests, kernels.
type Step<'n> = (Option<IterationKind>, u32, Vec<Kernel<'n>>);

const DECODE: Option<IterationKind> = Some(IterationKind::Decode);
const PREFILL: Option<IterationKind> = Some(IterationKind::Prefill);

struct Made {
    trace: Trace,
    list: Vec<Found>,
    of_op: Vec<u32>,
}

fn made(steps: &[Step]) -> Made {
    let mut builder = Builder::new();
    let (mut now, mut list, mut of_op) = (1_000, Vec::new(), Vec::new());
    for (number, (kind, requests, kernels)) in steps.iter().enumerate() {
        let begin = now;
        for &(name, duration, pause) in kernels {
            now += pause;
            builder.launch(name, (now - 10, now - 5), (now, now + duration));
            now += duration;
            of_op.push(number as u32);
        }
        let context = *kind == PREFILL;
        let known = kind.is_some();
        list.push(Found {
            number: number as u64,
            label: format!("step {number}"),
            kind: *kind,
            context_requests: known.then_some(if context { *requests } else { 0 }),
            generation_requests: known.then_some(if context { 0 } else { *requests }),
            context_tokens: None,
            generation_tokens: None,
            process: 0,
            host: Span::new(begin, now),
            device: Some(Span::new(begin, now)),
        });
    }
    Made { trace: builder.build(), list, of_op }
}

impl Made {
    fn context(&self) -> Context<'_> {
        let mut list: Vec<Category> = Vec::new();
        let mut of_op = Vec::new();
        for op in 0..self.trace.ops.len() {
            // The category is what stands before the first underscore.
            let name = self.trace.op_name(op).split('_').next().unwrap_or_default().to_owned();
            let class = match name.as_str() {
                "comm" => Class::Communication,
                "copy" => Class::Memory,
                _ => Class::Compute,
            };
            let place = list.iter().position(|c| c.name == name).unwrap_or_else(|| {
                list.push(Category { name, class });
                list.len() - 1
            });
            of_op.push(place as u16);
        }
        let categories = Categories { list, of_op, ..Default::default() };
        let method = (!self.list.is_empty()).then(|| Method::Markers("step".into()));
        let of_call = vec![NONE; self.trace.calls.len()];
        let (list, of_op) = (self.list.clone(), self.of_op.clone());
        let iterations = Detected { method, list, of_op, of_call, ..Detected::default() };
        Context::with(&self.trace, categories, iterations)
    }
}

fn compared(a: &[Step], b: &[Step]) -> Comparison {
    let (a, b) = (made(a), made(b));
    compare(&[a.context()], &[b.context()], &CompareOptions::default())
}

/// Ten decode iterations whose times vary a little, with the given kernels.
fn decode<'n>(kernels: &[Kernel<'n>], seed: i64) -> Vec<Step<'n>> {
    let vary = |i: i64, ns: i64| ns + (i * 7 + seed * 3) % 5 * ns / 1000;
    (0..10).map(|i| (DECODE, 8, kernels.iter().map(|&(n, d, p)| (n, vary(i, d), vary(i + 1, p))).collect())).collect()
}

/// The parts of every group, and the weighted parts of the whole, add up to the change of the wall time.
fn assert_adds_up(comparison: &Comparison) {
    let close = |x: f64, y: f64| assert!((x - y).abs() <= 1e-6 * (1.0 + x.abs().max(y.abs())), "{x} and {y}");
    for group in &comparison.groups {
        close(group.parts.iter().map(|p| p.delta_ns).sum(), group.delta_ns);
        close(group.parts.iter().map(|p| p.a_ns).sum(), group.a_wall_ns);
        close(group.parts.iter().map(|p| p.b_ns).sum(), group.b_wall_ns);
    }
    for rows in [&comparison.by_category, &comparison.by_op] {
        close(rows.iter().map(|d| d.delta_ns).sum(), comparison.b_wall_ns - comparison.a_wall_ns);
    }
}

#[test]
fn a_slower_kernel_is_found_with_its_size() {
    let kernels = [("norm_a", 10_000, 100), ("gemm_x", 50_000, 100), ("attention_y", 40_000, 100)];
    let slow = [("norm_a", 10_000, 100), ("gemm_x", 70_000, 100), ("attention_y", 40_000, 100)];
    let comparison = compared(&decode(&kernels, 0), &decode(&slow, 1));
    assert_adds_up(&comparison);
    assert_eq!((comparison.verdict.outcome, comparison.basis), (Outcome::Slower, Basis::Iterations));
    let group = &comparison.groups[0];
    assert_eq!((group.name.as_str(), group.a_iterations, group.paired), ("decode, 8 requests", 10, true));
    assert!((group.delta_ns - 20_000.0).abs() < 200.0, "{}", group.delta_ns);
    let interval = group.interval_ns.unwrap();
    assert!(interval.low < group.delta_ns && group.delta_ns < interval.high && interval.low > 15_000.0);
    assert_eq!(group.parts[0].part, "gemm");
    assert_eq!(
        (group.kernels[0].a.as_slice(), group.kernels[0].matched_by),
        (["gemm_x".to_owned()].as_slice(), MatchedBy::Name)
    );
    assert!((group.kernels[0].delta_ns - 20_000.0).abs() < 200.0);
    let sentence = &comparison.verdict.sentence;
    assert!(sentence.starts_with("B is 1.20x slower: "), "{sentence}");
    assert!(
        sentence.contains("us per iteration (95 % CI 1.1") && sentence.contains("10 and 10 iterations"),
        "{sentence}"
    );
    assert!(sentence.contains("Gemm adds 20.0") || sentence.contains("Gemm adds 19.9"), "{sentence}");
    let notes = comparison.report().notes.join("\n");
    assert!(notes.contains("decode, 8 requests: B 1.20x slower") && notes.contains("--between-run"), "{notes}");
    assert_eq!(comparison.verdict.gate(0.05), Gate::Failed);
    assert_eq!(comparison.verdict.gate(0.5), Gate::Passed);
    assert_eq!(comparison.verdict.gate(0.2), Gate::CannotTell, "about as much as the limit");
}

#[test]
fn one_gemm_replaces_another_and_one_kernel_is_fused_away() {
    let a = [("norm_a", 5_000, 50), ("gemm_old", 50_000, 50), ("gemm_old", 50_000, 50), ("rope_r", 4_000, 50)];
    let b = [("norm_a", 5_000, 50), ("gemm_new", 40_000, 50), ("gemm_new", 40_000, 50)];
    let comparison = compared(&decode(&a, 0), &decode(&b, 0));
    assert_adds_up(&comparison);
    assert_eq!(comparison.verdict.outcome, Outcome::Faster);
    let group = &comparison.groups[0];
    assert_eq!((group.a_kernels, group.b_kernels), (4.0, 3.0));
    let replaced: Vec<_> = group.replaced().collect();
    assert_eq!(replaced.len(), 1);
    assert_eq!(
        (replaced[0].a[0].as_str(), replaced[0].b[0].as_str(), replaced[0].matched_by),
        ("gemm_old", "gemm_new", MatchedBy::Category)
    );
    assert_eq!(group.only_a().map(|k| k.a[0].as_str()).collect::<Vec<_>>(), ["rope_r"]);
    assert_eq!(group.only_b().count(), 0);
    let sentence = &comparison.verdict.sentence;
    assert!(sentence.contains("2 calls of gemm_old replaced by 2 of gemm_new"), "{sentence}");
    let report = comparison.report();
    assert!(report.notes.iter().any(|note| note.contains("Kernels per iteration: 4 -> 3")), "{:?}", report.notes);
    let names: Vec<&str> = report.sheets.iter().map(|s| s.name.as_str()).collect();
    assert!(
        ["kinds", "parts", "replaced", "only_a", "kernels", "pairs", "window"].iter().all(|n| names.contains(n)),
        "{names:?}"
    );
    assert!(serde_json::to_string(&comparison).unwrap().contains("\"matched_by\":\"category\""));
}

#[test]
fn more_prefills_do_not_make_a_side_slower() {
    let prefill = || (PREFILL, 1, vec![("gemm_p", 900_000, 100)]);
    let step = |ns| (DECODE, 8, vec![("gemm_d", ns, 100)]);
    let a: Vec<Step> = [prefill()].into_iter().chain((0..8).map(|i| step(10_000 + i))).collect();
    let b: Vec<Step> = (0..8).map(|_| prefill()).chain((0..8).map(|i| step(10_004 - i))).collect();
    let comparison = compared(&a, &b);
    assert_adds_up(&comparison);
    assert_eq!(comparison.groups.len(), 2);
    let decode = comparison.groups.iter().find(|group| group.kind == DECODE).unwrap();
    assert_eq!(decode.outcome, Outcome::NoDifference);
    // One prefill says nothing about how much prefills differ, and prefills are most of the time.
    assert_eq!(comparison.verdict.outcome, Outcome::CannotTell, "{}", comparison.verdict.sentence);
    assert!(comparison.verdict.sentence.contains("1 and 8 iterations"), "{}", comparison.verdict.sentence);
}

#[test]
fn sizes_without_counterpart_are_left_out_or_forbid_a_verdict() {
    let steps =
        |requests: u32| -> Vec<Step> { (0..4).map(|_| (DECODE, requests, vec![("gemm_d", 10_000, 100)])).collect() };
    let comparison = compared(&steps(8), &steps(32));
    assert_eq!((comparison.verdict.outcome, comparison.basis), (Outcome::NotComparable, Basis::WholeWindow));
    assert!(
        comparison.verdict.sentence.contains("A has 4 x decode, 8 requests, B has 4 x decode, 32 requests"),
        "{}",
        comparison.verdict.sentence
    );
    assert_eq!(comparison.verdict.gate(0.0), Gate::NotComparable);
    let both: Vec<Step> = steps(8).into_iter().chain(steps(64)).collect();
    let comparison = compared(&both, &steps(8));
    assert_eq!(comparison.left_out.iter().map(|l| (l.side, l.iterations)).collect::<Vec<_>>(), [('A', 4)]);
    assert_eq!(comparison.verdict.outcome, Outcome::NoDifference);
}

#[test]
fn a_warm_up_iteration_is_set_aside_and_listed() {
    let step = |ns: i64| (None, 0, vec![("gemm_d", ns, 100)]);
    let a: Vec<Step> = [step(900_000)].into_iter().chain((0..9).map(|i| step(10_000 + i))).collect();
    let b: Vec<Step> = (0..10).map(|i| step(11_000 + i)).collect();
    let comparison = compared(&a, &b);
    assert_adds_up(&comparison);
    let group = &comparison.groups[0];
    assert_eq!((group.a_iterations, group.b_iterations, group.paired), (9, 9, true));
    assert_eq!(comparison.verdict.outcome, Outcome::Slower);
    assert!(group.pairs[0].set_aside.as_ref().unwrap().starts_with("A: "));
    assert!(comparison.report().notes.iter().any(|n| n.contains("do not count in the means")));
}

#[test]
fn the_side_that_stands_out_is_the_one_that_is_named() {
    let step = |ns: i64| (None, 0, vec![("gemm_d", ns, 100)]);
    let even = || (0..10).map(move |i| step(10_000 + i)).collect::<Vec<Step>>();
    let mut stalled = even();
    stalled[6] = step(900_000);
    let comparison = compared(&even(), &stalled);
    let group = &comparison.groups[0];
    assert_eq!((group.a_iterations, group.b_iterations, group.paired), (9, 9, true));
    assert!(group.pairs[6].set_aside.as_ref().unwrap().starts_with("B: "), "{:?}", group.pairs[6]);
    assert!(group.pairs.iter().enumerate().all(|(place, pair)| place == 6 || pair.set_aside.is_none()));
    assert_adds_up(&comparison);
}

/// Five iterations, the first a warm-up of 32 ms among others of 1.4 to 4.8 ms: it must not hide that all take twice as
/// long.
#[test]
fn a_real_trace_slowed_down_twice_is_slower() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/nsys/mixed_node.sqlite");
    let trace = strobe_trace::import::read_files(&[file], &mut |_| {}).unwrap();
    let mut slowed = trace.clone();
    let (ops, calls, ranges) = (&mut slowed.ops, &mut slowed.calls, &mut slowed.ranges);
    let columns = [&mut ops.start, &mut ops.end, &mut calls.start, &mut calls.end, &mut ranges.start, &mut ranges.end];
    columns.into_iter().flatten().for_each(|time| *time *= 2);
    let [fast, slow] = [&trace, &slowed].map(|trace| Context::new(trace, &strobe_analyze::Options::default()));
    let options = CompareOptions::default();
    let slower = compare(std::slice::from_ref(&fast), std::slice::from_ref(&slow), &options);
    assert_eq!(slower.verdict.outcome, Outcome::Slower, "{}", slower.verdict.sentence);
    assert!(slower.groups[0].pairs[0].set_aside.is_some());
    assert_eq!(compare(&[slow], &[fast], &options).verdict.outcome, Outcome::Faster);
}

#[test]
fn a_warm_up_among_four_iterations_is_set_aside() {
    let steps = |scale: i64| -> Vec<Step> {
        [900_000, 10_000, 10_100, 10_050].iter().map(|ns| (None, 0, vec![("gemm_d", scale * ns, 100)])).collect()
    };
    let comparison = compared(&steps(1), &steps(2));
    assert_eq!((comparison.groups[0].a_iterations, comparison.verdict.outcome), (3, Outcome::Slower));
}

#[test]
fn without_iterations_whole_windows_are_compared_and_said_so() {
    let steps = decode(&[("gemm_x", 50_000, 100)], 0);
    let whole = |steps: &[Step]| Made { list: Vec::new(), of_op: vec![NONE; 1000], ..made(steps) };
    let (a, b) = (whole(&steps), whole(&steps[..7]));
    let same = compare(&[a.context()], &[a.context()], &CompareOptions::default());
    assert_eq!((same.basis, same.verdict.outcome), (Basis::WholeWindow, Outcome::NoDifference));
    assert!(same.notes.iter().any(|n| n.contains("no iterations: ")), "{:?}", same.notes);
    // The same work fewer times is no difference, and more of it never passes a gate.
    let other = compare(&[a.context()], &[b.context()], &CompareOptions::default());
    assert_eq!(other.verdict.outcome, Outcome::NoDifference);
    assert!(other.verdict.sentence.contains("B holds 7 of 10 kernels"), "{}", other.verdict.sentence);
    assert_adds_up(&other);
    let back = compare(&[b.context()], &[a.context()], &CompareOptions::default());
    assert_eq!((back.verdict.outcome, back.verdict.total_change.map(|c| c > 0.4)), (Outcome::NoDifference, Some(true)));
    assert_eq!(back.verdict.gate(0.05), Gate::CannotTell);
}

#[test]
fn two_iterations_give_no_interval_and_no_significant_regression() {
    let steps = |ns: i64| -> Vec<Step<'static>> { (0..2).map(|_| (DECODE, 8, vec![("gemm_d", ns, 0)])).collect() };
    let comparison = compared(&steps(100_000), &steps(106_000));
    let group = &comparison.groups[0];
    assert!(group.interval_ns.is_none() && group.no_interval.as_ref().unwrap().contains("2 and 2 iterations"));
    assert_eq!(comparison.verdict.outcome, Outcome::CannotTell, "{}", comparison.verdict.sentence);
    assert_eq!(comparison.verdict.gate(0.03), Gate::CannotTell);
    assert!(comparison.verdict.sentence.contains("2 and 2 iterations"), "{}", comparison.verdict.sentence);
}

#[test]
fn repeats_widen_the_interval_by_what_differs_between_runs() {
    let run = |ns: i64| made(&decode(&[("gemm_x", ns, 100)], 0));
    let (a, b) = ([50_000, 53_000, 51_500].map(run), [51_000, 54_000, 52_500].map(run));
    let of_a: Vec<Context> = a.iter().map(Made::context).collect();
    let of_b: Vec<Context> = b.iter().map(Made::context).collect();
    let comparison = compare(&of_a, &of_b, &CompareOptions::default());
    assert_adds_up(&comparison);
    assert_eq!((comparison.groups[0].a_iterations, comparison.groups[0].repeats), (30, [3, 3]));
    assert_eq!(comparison.verdict.outcome, Outcome::CannotTell, "{}", comparison.verdict.sentence);
    assert!(comparison.verdict.evidence[0].contains("from 3 and 3 traces"), "{:?}", comparison.verdict.evidence);
    // Twice as much is told apart all the same.
    let slow: Vec<Made> = [100_000, 106_000, 103_000].map(run).into();
    let of_slow: Vec<Context> = slow.iter().map(Made::context).collect();
    let slower = compare(&of_a, &of_slow, &CompareOptions::default());
    assert_eq!((slower.verdict.outcome, slower.verdict.gate(0.05)), (Outcome::Slower, Gate::Failed));
}

/// An engine on the CPU: iterations, phases and what ops mean are recorded.
fn engine_trace(linear_ns: i64, kernel: &str) -> Trace {
    let mut builder = Builder::new();
    builder.trace.devices[0].is_cpu = true;
    let works = [("qkv_proj", "gemm"), ("attention", "attention")].map(|(op, category)| Work {
        op: builder.name(op),
        category: builder.name(category),
        layer: Some(0),
        shape: [0; 3],
        bytes: 0,
        flops: 0,
    });
    builder.trace.works.extend(works);
    let mut now = 0;
    for iter in 0..6u32 {
        let start = now;
        builder.range(RangeSource::Other, "schedule", now, now + 500);
        builder.range(RangeSource::Other, "forward", now + 500, now + 2_000 + linear_ns + 4_000);
        let last = builder.trace.ranges.len();
        builder.trace.ranges.kind[last - 2] = RangeKind::Schedule;
        builder.trace.ranges.kind[last - 1] = RangeKind::ForwardStep;
        let linear = now + 1_000;
        builder.op(OpKind::CpuOp, kernel, 0, linear, linear + linear_ns, 0);
        builder.op(OpKind::CpuOp, "attention_scalar", 0, linear + linear_ns, linear + linear_ns + 4_000, 0);
        now += 2_500 + linear_ns + 4_000 + i64::from(iter);
        let ops = builder.trace.ops.len();
        for (op, work) in [(ops - 2, 0), (ops - 1, 1)] {
            builder.trace.ops.work[op] = work;
            builder.trace.ops.iteration[op] = iter;
        }
        builder.trace.iterations.push(Iteration {
            iter: u64::from(iter),
            start,
            end: now,
            context_requests: 0,
            generation_requests: 4,
            context_tokens: 0,
            generation_tokens: 4,
            window: 0,
            cpu_wait: None,
        });
    }
    builder.build()
}

#[test]
fn recordings_of_an_engine_are_matched_by_what_ops_mean() {
    let (a, b) = (engine_trace(20_000, "gemm_f32"), engine_trace(12_000, "gemm_f16"));
    let options = strobe_analyze::Options::default();
    let contexts = [&a, &b].map(|trace| Context::new(trace, &options));
    let [a, b] = contexts;
    let comparison = compare(&[a], &[b], &CompareOptions::default());
    assert_adds_up(&comparison);
    assert_eq!(comparison.verdict.outcome, Outcome::Faster);
    let group = &comparison.groups[0];
    assert_eq!((group.name.as_str(), group.paired, group.delta_ns), ("decode, 4 requests", true, -8_000.0));
    let linear = &group.kernels[0];
    assert_eq!((linear.op.as_deref(), linear.matched_by, linear.delta_ns), (Some("qkv_proj"), MatchedBy::Op, -8_000.0));
    assert_eq!((linear.a[0].as_str(), linear.b[0].as_str()), ("gemm_f32", "gemm_f16"));
    let delta = |rows: &[Delta], name: &str| {
        rows.iter().find(|d| d.name == name).map(|d| (d.category.clone(), d.delta_ns.round()))
    };
    assert_eq!(delta(&comparison.by_op, "qkv_proj"), Some(("gemm".to_owned(), -8_000.0)));
    assert_eq!(delta(&comparison.by_category, "gemm"), Some(("gemm".to_owned(), -8_000.0)));
    assert_eq!(delta(&comparison.by_op, "schedule"), Some(("host".to_owned(), 0.0)));
}

fn steps() -> impl Strategy<Value = Vec<Step<'static>>> {
    let names = prop::sample::select(vec!["gemm_a", "gemm_b", "norm_n", "comm_c", "copy_m", "attention_1"]);
    let kernel = (names, 1i64..5000, 0i64..300);
    let step = (prop::sample::select(vec![PREFILL, DECODE, None]), 1u32..3, prop::collection::vec(kernel, 1..5));
    prop::collection::vec(step, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn parts_add_up_and_exchanging_the_sides_changes_signs(a in steps(), b in steps()) {
        let (forth, back) = (compared(&a, &b), compared(&b, &a));
        assert_adds_up(&forth);
        let close = |x: f64, y: f64| (x - y).abs() <= 1e-6 * (1.0 + x.abs().max(y.abs()));
        prop_assert_eq!(forth.groups.len(), back.groups.len());
        prop_assert!(close(forth.a_wall_ns, back.b_wall_ns) && close(forth.b_wall_ns, back.a_wall_ns));
        for (x, y) in forth.groups.iter().zip(&back.groups) {
            prop_assert!(close(x.delta_ns, -y.delta_ns));
            match (x.interval_ns, y.interval_ns) {
                (Some(x), Some(y)) => prop_assert!(close(x.low, -y.high) && close(x.high, -y.low)),
                (x, y) => prop_assert!(x.is_none() && y.is_none()),
            }
            let sum = |kernels: &[strobe_analyze::compare::KernelChange]| kernels.iter().map(|k| k.delta_ns).sum::<f64>();
            prop_assert!(close(sum(&x.kernels), -sum(&y.kernels)));
            prop_assert_eq!((x.only_a().count(), x.only_b().count()), (y.only_b().count(), y.only_a().count()));
            prop_assert_eq!(x.replaced().count(), y.replaced().count());
        }
    }

    #[test]
    fn a_trace_against_itself_has_no_difference(a in steps()) {
        let same = compared(&a, &a);
        for group in &same.groups {
            prop_assert!(group.delta_ns == 0.0 && !group.outcome.is_difference());
            prop_assert!(group.parts.iter().all(|p| p.delta_ns == 0.0));
            prop_assert!(group.kernels.iter().all(|k| k.delta_ns == 0.0 && k.matched_by == MatchedBy::Name));
        }
        // Few iterations are no evidence that there is none; but never is there a difference.
        prop_assert!(!same.verdict.outcome.is_difference());
        prop_assert_eq!(same.verdict.outcome == Outcome::NotComparable, a.is_empty());
    }
}

/// Prompts of many sizes, each seen once, and decode steps that all look alike: the prompts take most of the time.
#[test]
fn sizes_seen_once_are_judged_together_and_outvote_what_is_small() {
    let run = |prompt: i64, token: i64| -> Vec<Step<'static>> {
        let prompts = (1..7).map(|n| (PREFILL, n, vec![("attention", prompt + 1_000 * i64::from(n), 10)]));
        let tokens = (0..10).map(|i| (DECODE, 8, vec![("gemm", token + i, 10)]));
        prompts.chain(tokens).collect()
    };
    let comparison = compared(&run(1_000_000, 20_000), &run(1_400_000, 19_000));
    assert_eq!(comparison.groups.len(), 2, "{:?}", comparison.groups.iter().map(|g| &g.name).collect::<Vec<_>>());
    let prompts = comparison.groups.iter().find(|g| g.kind == PREFILL).unwrap();
    assert_eq!((prompts.a_iterations, prompts.outcome), (6, Outcome::Slower));
    assert!(prompts.interval_ns.is_some());
    assert_eq!(comparison.verdict.outcome, Outcome::Slower);
    assert_adds_up(&comparison);
    assert_eq!(comparison.verdict.gate(0.05), Gate::Failed);
    let sentence = &comparison.verdict.sentence;
    assert!(sentence.contains("; but decode") || !sentence.contains("but"), "{sentence}");
}
