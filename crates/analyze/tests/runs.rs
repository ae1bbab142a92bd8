//! Whole runs on a machine that disturbs them in bursts.

use strobe_analyze::compare::runs::{Cell, DecidedBy, Metric, RunFacts, StoredSpread, of_one_state};
use strobe_analyze::compare::{Outcome, Runs, WholeRuns};
use strobe_stats::LogSpread;

/// A run of 8 prefills and 64 decode iterations, each slower by `share`; the last `hit` iterations of both kinds take three
/// times as long.
fn run(name: &str, share: f64, hit: usize) -> RunFacts {
    let wall = |place: usize, count: usize, ms: f64| {
        // Contexts grow, so equal batches do not take exactly equal times.
        ms * 1e6
            * (1.0 + share)
            * (1.0 + 0.02 * place as f64 / count as f64)
            * if place + hit >= count { 3.0 } else { 1.0 }
    };
    let prefills = (0..8).map(|i| (2048, 0, wall(i, 8, 100.0)));
    let decodes = (0..64).map(|i| (0, 64, wall(i, 64, 12.0)));
    let iterations: Vec<(u32, u32, f64)> = prefills.chain(decodes).collect();
    let total: f64 = iterations.iter().map(|i| i.2).sum();
    let throughput = Metric {
        name: "Output throughput (tokens/sec)".into(),
        unit: "output tok/s".into(),
        higher_is_better: true,
        value: 4096.0 / (total / 1e9),
    };
    let cells = Cell::group(iterations.into_iter());
    RunFacts { name: name.into(), metrics: vec![throughput], cells, ..RunFacts::default() }
}

fn judged(a: [usize; 3], b: [usize; 3], slower: f64) -> WholeRuns {
    let side = |hits: [usize; 3], share: f64| {
        hits.iter().enumerate().map(|(process, &hit)| RunFacts { process, ..run("run", share, hit) }).collect()
    };
    Runs { sides: [side(a, 0.0), side(b, slower)], ..Runs::default() }.judge(0.05)
}

#[test]
fn bursts_of_the_machine_hide_a_difference_from_totals_and_not_from_typical_iterations() {
    let found = judged([0, 4, 1], [3, 0, 5], 0.10);
    assert_eq!((found.outcome, found.decided_by), (Outcome::Slower, DecidedBy::Iterations));
    assert_eq!(found.figures[0].outcome, Outcome::CannotTell, "{:?}", found.figures[0]);
    let decode = found.kinds.iter().find(|kind| kind.name == "decode").unwrap();
    assert!((decode.time_change - 0.10).abs() < 0.005, "{decode:?}");
}

#[test]
fn bursts_alone_are_no_difference_of_the_builds() {
    let found = judged([0, 0, 1], [5, 4, 6], 0.0);
    assert!(!found.kinds.iter().any(|kind| kind.outcome.is_difference()), "{:?}", found.kinds);
    assert!(!(found.outcome.is_difference() && found.decided_by == DecidedBy::Iterations));
}

#[test]
fn small_differences_between_blocks_of_runs_are_the_machines() {
    // All within 0.1 %, 1.5 % apart: another minute of a shared machine does that.
    let found = judged([0, 4, 1], [3, 0, 5], 0.015);
    assert!(!found.kinds.iter().any(|kind| kind.outcome.is_difference()), "{:?}", found.kinds);
}

#[test]
fn reports_without_quartiles_are_compared_by_means() {
    let mut old = [run("a", 0.0, 0), run("b", 0.0, 0), run("c", 0.2, 0), run("d", 0.2, 0)];
    old.iter_mut().flat_map(|run| &mut run.cells).for_each(|cell| cell.lower_quartile_ns = None);
    let [a, b, c, d] = old;
    let found = Runs { sides: [vec![a, b], vec![c, d]], ..Runs::default() }.judge(0.05);
    let decode = found.kinds.iter().find(|kind| kind.name == "decode").unwrap();
    assert!((decode.time_change - 0.2).abs() < 1e-6, "{decode:?}");
}

/// Runs of a share longer iterations, and the readings of the memory bandwidth around each.
fn in_states(side: &[(f64, [f64; 2])]) -> Vec<RunFacts> {
    let made = |(process, &(share, bandwidth)): (usize, &(f64, [f64; 2]))| RunFacts {
        process,
        bandwidth: bandwidth.to_vec(),
        // No two runs are equal to the last digit.
        ..run("run", share + 0.001 * process as f64, 0)
    };
    side.iter().enumerate().map(made).collect()
}

#[test]
fn runs_are_compared_within_one_state_of_the_machine() {
    const FAST: [f64; 2] = [56e9, 57e9];
    const SLOW: [f64; 2] = [92e9, 90e9];
    let judge = |a: &[(f64, [f64; 2])], b: &[(f64, [f64; 2])]| {
        Runs { sides: [in_states(a), in_states(b)], ..Runs::default() }.judge(0.05)
    };
    // The same build; two runs of B met the slow state, one both.
    let found = judge(
        &[(0.0, FAST), (0.0, FAST), (0.0, FAST)],
        &[(0.0, FAST), (0.25, SLOW), (0.12, [56e9, 92e9]), (0.0, FAST)],
    );
    assert_eq!((found.outcome, found.counts), (Outcome::NoDifference, [3, 2]), "{:?}", found.figures);
    assert!(found.set_aside[0].contains("2 of 4 of B: the machine was in another state"), "{:?}", found.set_aside);
    // A slower build that met the fast state: nothing can be told, whichever looks faster.
    let found = judge(&[(0.0, SLOW), (0.0, SLOW)], &[(-0.1, FAST), (-0.1, FAST)]);
    assert_eq!(found.outcome, Outcome::CannotTell);
    assert!(found.why_not.unwrap().contains("the machine changed between the runs"));
    // Within one state readings differ a little, and without readings nothing is known of states.
    let found = judge(&[(0.0, SLOW), (0.0, [84e9, 95e9])], &[(0.2, SLOW), (0.2, [78e9, 93e9])]);
    assert_eq!((found.outcome, found.counts), (Outcome::Slower, [2, 2]));
    let unread = |share: f64| {
        vec![RunFacts { process: 0, ..run("a", share, 0) }, RunFacts { process: 1, ..run("b", share + 0.001, 0) }]
    };
    let found = Runs { sides: [unread(0.0), unread(0.2)], ..Runs::default() }.judge(0.05);
    assert_eq!(found.outcome, Outcome::Slower);
}

#[test]
fn the_spread_of_equal_runs_is_that_of_one_state() {
    let runs = in_states(&[(0.0, [56e9, 56e9]), (0.3, [92e9, 92e9]), (0.0, [57e9, 56e9]), (0.1, [56e9, 91e9])]);
    let kept: Vec<usize> = of_one_state(&runs).iter().map(|run| run.process).collect();
    assert_eq!(kept, [0, 2]);
    assert_eq!(of_one_state(&[run("a", 0.0, 0), run("b", 0.0, 0)]).len(), 2, "no readings, no states");
}

/// A run of 8 prefills and 64 decode iterations that take so many milliseconds each, and a figure beside them.
fn made(process: usize, prefill_ms: f64, decode_ms: f64, tok_s: f64) -> RunFacts {
    let prefills = (0..8).map(|_| (2048, 0, prefill_ms * 1e6));
    let decodes = (0..64).map(|_| (0, 64, decode_ms * 1e6));
    let plain = run("run", 0.0, 0);
    let metrics = plain.metrics.into_iter().map(|metric| Metric { value: tok_s, ..metric }).collect();
    RunFacts { process, metrics, cells: Cell::group(prefills.chain(decodes)), ..RunFacts::default() }
}

fn of_made(a: [(f64, f64, f64); 3], b: [(f64, f64, f64); 3]) -> WholeRuns {
    let side = |runs: [(f64, f64, f64); 3]| {
        runs.iter().enumerate().map(|(process, (p, d, rate))| made(process, *p, *d, *rate)).collect()
    };
    Runs { sides: [side(a), side(b)], ..Runs::default() }.judge(0.05)
}

#[test]
fn a_kind_that_is_surely_slower_proves_nothing_where_the_others_may_make_up_for_it() {
    // Decode is 12 % slower, tightly; prefill is about a third faster, and nobody knows how much; whole runs are faster.
    let found = of_made(
        [(100.0, 12.0, 100.0), (130.0, 12.01, 90.0), (80.0, 11.99, 110.0)],
        [(50.0, 13.44, 125.0), (95.0, 13.45, 98.0), (70.0, 13.43, 110.0)],
    );
    let decode = found.kinds.iter().find(|kind| kind.name == "decode").unwrap();
    assert_eq!(decode.outcome, Outcome::Slower, "{decode:?}");
    assert_eq!((found.outcome, found.decided_by), (Outcome::CannotTell, DecidedBy::WholeRuns));
    let (change, interval) = (found.change().unwrap(), found.interval().unwrap());
    assert!(interval.low < change && change < interval.high, "{change} {interval:?}");
    assert_eq!(found.disagreeing().len(), 1, "decode is named");
}

#[test]
fn an_interval_of_kinds_holds_its_estimate_and_names_what_it_cannot_tell() {
    let found = judged([0, 4, 1], [3, 0, 5], 0.10);
    let (change, interval) = (found.change().unwrap(), found.interval().unwrap());
    assert!((change - 0.10).abs() < 0.01, "{change}");
    assert!(0.05 < interval.low && interval.low < change && change < interval.high, "{change} {interval:?}");
    // Prefill varies, but not enough to make up for decode.
    let found = of_made(
        [(20.0, 12.0, 100.0), (20.6, 12.01, 90.0), (20.2, 11.99, 110.0)],
        [(20.4, 14.4, 99.0), (20.1, 14.41, 85.0), (20.8, 14.39, 105.0)],
    );
    assert_eq!((found.outcome, found.decided_by), (Outcome::Slower, DecidedBy::Iterations), "{found:?}");
    assert_eq!(found.open().iter().map(|kind| kind.name.as_str()).collect::<Vec<_>>(), ["prefill"]);
}

#[test]
fn whole_runs_that_contradict_the_kinds_leave_it_open() {
    // Every iteration is 30 % slower, but whole runs are surely not.
    let found = of_made(
        [(20.0, 12.0, 100.0), (20.0, 12.01, 98.0), (20.0, 11.99, 102.0)],
        [(26.0, 15.6, 99.0), (26.0, 15.61, 100.0), (26.0, 15.59, 103.0)],
    );
    assert!(found.kinds.iter().all(|kind| kind.outcome == Outcome::Slower));
    assert!(!found.outcome.is_difference(), "{:?} {:?}", found.outcome, found.figures[0].interval);
}

#[test]
fn as_many_runs_as_the_interval_of_the_verdict_needs() {
    let side = |rates: [f64; 3]| -> Vec<RunFacts> {
        rates.iter().enumerate().map(|(process, rate)| made(process, 20.0, 12.0, *rate)).collect()
    };
    let sides = [side([100.0, 96.0, 104.0]), side([101.0, 95.0, 103.0])];
    let stored = |sd: f64| StoredSpread {
        runs: 10,
        age: "an hour ago".into(),
        spreads: [("Output throughput (tokens/sec)".to_owned(), LogSpread { sd, freedom: 9.0 })].into(),
    };
    let alone = Runs { sides: sides.clone(), ..Runs::default() }.judge(0.05);
    let backed = Runs { sides, stored: Some(stored(alone.spread.unwrap())), ..Runs::default() }.judge(0.05);
    assert!((alone.spread.unwrap() - backed.spread.unwrap()).abs() < 1e-9);
    assert!(backed.runs_needed > alone.runs_needed, "99 % takes more runs than 95 %");
}
