//! Comparisons of real traces, against values found by other tools.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use strobe_analyze::compare::{Basis, CompareOptions, Comparison, Gate, MatchedBy, Outcome, compare};
use strobe_analyze::{Context, Options};
use strobe_trace::import::read_files;
use strobe_trace::{NONE, Trace};

/// The folder of real traces; says so when it is not given.
fn real_data() -> Option<PathBuf> {
    let folder = std::env::var_os("STROBE_TEST_DATA").map(|data| Path::new(&data).join("traces"));
    if folder.is_none() {
        println!("skipped: STROBE_TEST_DATA is not set");
    }
    folder
}

fn read(folder: &Path, file: &str) -> Trace {
    read_files(&[folder.join(file)], &mut |_| {}).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn compared(folder: &Path, a: &str, b: &str) -> Comparison {
    let (a, b) = (read(folder, a), read(folder, b));
    let options = Options::default();
    compare(&[Context::new(&a, &options)], &[Context::new(&b, &options)], &CompareOptions::default())
}

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
fn the_training_step_of_two_gpus_before_and_after() {
    let Some(folder) = real_data() else { return };
    let comparison = compared(&folder, "nsys/nsys-ai/mfu_2gpu_before.sqlite", "nsys/nsys-ai/mfu_2gpu_after.sqlite");
    println!("{}", comparison.verdict.sentence);
    let [before, after] = comparison.windows.unwrap();
    for (window, golden) in [(before, [509.79, 25.40, 63.33, 598.51]), (after, [455.09, 33.74, 109.63, 598.46])] {
        let ours = [window.compute_ns, window.exposed_communication_ns, window.idle_ns, window.span_ns];
        for (ours, golden) in ours.into_iter().zip(golden) {
            assert!((ours / 1e6 - golden).abs() < 0.0101, "{} and {golden}", ours / 1e6);
        }
    }
    // The windows are equally long by construction; what was done in them is not.
    assert_ne!(comparison.verdict.outcome, Outcome::NoDifference);
    let first = comparison.bursts[0].change().unwrap();
    assert!((first + 0.294).abs() < 0.001, "{first}");
    assert_adds_up(&comparison);
}

#[test]
fn profiler_steps_of_two_gpus_by_exact_name() {
    let Some(folder) = real_data() else { return };
    let comparison = compared(&folder, "kineto/hta/trace_diff_control.json.gz", "kineto/hta/trace_diff_test.json.gz");
    println!("{}", comparison.verdict.sentence);
    assert_eq!(comparison.basis, Basis::Iterations);
    assert!(comparison.warnings.iter().any(|w| w.starts_with("different devices")), "{:?}", comparison.warnings);
    assert_adds_up(&comparison);
}

/// Counts per exact name in ProfilerStep#1009, against HTA's own comparison of the same step.
#[test]
fn the_first_profiler_step_agrees_with_another_tool() {
    let Some(folder) = real_data() else { return };
    let text = std::fs::read_to_string(folder.join("kineto/hta/golden/trace_diff_gpu_first_step.csv")).unwrap();
    let mut golden: HashMap<String, [f64; 2]> = HashMap::new();
    for line in text.lines().skip(1) {
        // Names hold commas and are quoted then; the seven fields after them do not.
        let mut fields: Vec<&str> = line.rsplitn(8, ',').collect();
        fields.reverse();
        let name = fields[0].trim_matches('"').replace("\"\"", "\"");
        golden.insert(name, [fields[1].parse().unwrap(), fields[3].parse().unwrap()]);
    }
    let only_first =
        Options { iteration_range: Some(regex::Regex::new("^ProfilerStep#1009$").unwrap()), ..Options::default() };
    let traces = ["control", "test"].map(|name| read(&folder, &format!("kineto/hta/trace_diff_{name}.json.gz")));
    let [a, b] = traces.each_ref().map(|trace| {
        let mut context = Context::new(trace, &only_first);
        // The other tool drops ops that no recorded call launched.
        let unlaunched =
            context.iterations.of_op.iter_mut().zip(&trace.ops.launch).filter(|(_, launch)| **launch == NONE);
        unlaunched.for_each(|(iteration, _)| *iteration = NONE);
        context
    });
    let comparison = compare(&[a], &[b], &CompareOptions::default());
    assert_eq!(comparison.groups.len(), 1);
    let mut ours: HashMap<String, [f64; 2]> = HashMap::new();
    let exact = comparison.groups[0].kernels.iter().filter(|k| k.matched_by == MatchedBy::Name);
    ours.extend(exact.map(|k| (k.a[0].clone(), [k.a_count, k.b_count])));
    for kernel in comparison.groups[0].kernels.iter().filter(|k| k.matched_by != MatchedBy::Name) {
        // One name alone on its side keeps its count; several share one.
        if let ([name], true) = (kernel.a.as_slice(), kernel.b.len() <= 1) {
            ours.insert(name.clone(), [kernel.a_count, 0.0]);
        }
        if let ([name], true) = (kernel.b.as_slice(), kernel.a.len() <= 1) {
            ours.insert(name.clone(), [0.0, kernel.b_count]);
        }
    }
    let changed = |counts: &[f64; 2]| match counts {
        [0.0, _] => "added",
        [_, 0.0] => "deleted",
        [a, b] if b > a => "increased",
        [a, b] if b < a => "decreased",
        _ => "unchanged",
    };
    let mut tally: HashMap<&str, usize> = HashMap::new();
    golden.values().for_each(|counts| *tally.entry(changed(counts)).or_default() += 1);
    assert_eq!(["added", "deleted", "increased", "decreased", "unchanged"].map(|k| tally[k]), [27, 66, 15, 9, 84]);
    for (name, counts) in &ours {
        assert_eq!(golden.get(name), Some(counts), "{name}");
    }
    let both = golden.iter().filter(|(_, [a, b])| *a > 0.0 && *b > 0.0).count();
    assert_eq!(ours.values().filter(|[a, b]| *a > 0.0 && *b > 0.0).count(), both);
    println!("{} of {} names compared", ours.len(), golden.len());
}

#[test]
fn every_trace_equals_itself() {
    let Some(folder) = real_data() else { return };
    for file in [
        "nsys/h200/rep_sdpa.sqlite",
        "nsys/h200/node.sqlite",
        "nsys/h200/gpum.sqlite",
        "nsys/nsys-ai/h100_2gpu_1s.sqlite",
        "kineto/h200/kineto_graph.json.gz",
        "kineto/hta/ns_resolution_rank-0.json.gz",
        "kineto/hta/sampled_rank-0.json.gz",
    ] {
        let comparison = compared(&folder, file, file);
        assert_eq!(comparison.verdict.outcome, Outcome::NoDifference, "{file}: {}", comparison.verdict.sentence);
        for group in &comparison.groups {
            assert!(group.delta_ns == 0.0 && group.parts.iter().all(|p| p.delta_ns == 0.0), "{file}");
            assert!(group.kernels.iter().all(|k| k.delta_ns == 0.0 && !k.count_changed()), "{file}");
        }
        assert_eq!(comparison.verdict.gate(0.0), Gate::Passed);
        assert_adds_up(&comparison);
    }
}

#[test]
fn graphs_recorded_in_two_ways_are_not_comparable() {
    let Some(folder) = real_data() else { return };
    let comparison = compared(&folder, "nsys/h200/node.sqlite", "nsys/h200/gpum.sqlite");
    assert_eq!(comparison.verdict.outcome, Outcome::NotComparable);
    let sentence = &comparison.verdict.sentence;
    assert!(sentence.contains("B as whole graphs") && sentence.contains("A node by node"), "{sentence}");
    // The numbers are still there for who wants them.
    assert!(comparison.groups.iter().any(|g| g.name == "decode, 8 requests"));
    let swapped = compared(&folder, "nsys/h200/gpum.sqlite", "nsys/h200/node.sqlite");
    assert_eq!(swapped.verdict.outcome, Outcome::NotComparable);
}

#[test]
fn two_profilers_of_one_program_see_the_same_kernels() {
    let Some(folder) = real_data() else { return };
    // One has markers with kinds, the other nothing but graph launches.
    let comparison = compared(&folder, "nsys/h200/node.sqlite", "kineto/h200/kineto_graph.json.gz");
    assert!(comparison.warnings.iter().any(|w| w.contains("different profilers")), "{:?}", comparison.warnings);
    let group = comparison.groups.iter().find(|g| g.name == "decode, 8 requests").unwrap();
    assert_eq!((group.a_iterations, group.b_iterations), (8, 8), "{:?}", comparison.notes);
    assert_eq!((group.a_kernels, group.b_kernels), (311.0, 311.0));
    for kernel in &group.kernels {
        assert!(!kernel.count_changed(), "{kernel:?}");
    }
    assert_adds_up(&comparison);
}
