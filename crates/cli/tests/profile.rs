//! Profile windows: which iterations are recorded, and what is recorded of them.

mod common;

use std::sync::OnceLock;

use common::trace::TraceFile;
use common::{Done, Sandbox, assert_close, assert_names, int, num};
use serde_json::Value;
use strobe_kernels_cpu::Tier;

const LAYERS: usize = 4; // of micro

/// Whether the product of gates and ups applies the activation, which then is no op.
fn activates() -> bool {
    Tier::from_env().unwrap().activated_multiple().is_some()
}

fn ops_per_layer() -> usize {
    if activates() { 8 } else { 9 }
}

/// embed, the ops of each layer, final norm, gather, head and sampling.
fn ops_per_step() -> usize {
    5 + LAYERS * ops_per_layer()
}

/// A profiled run.
struct Run {
    done: Done,
    trace: TraceFile,
    iterations: Vec<Value>,
    report: Value,
}

/// `bench` on a dataset with prompts in several steps: iterations 0 to 5 mix prompts and generation.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 16), (70, 12), (9, 20), (33, 8), (50, 10)]);
    sandbox
}

const BENCH: &str = "bench throughput --model micro --dataset d.jsonl --warmup 1 --max-num-tokens 64 --output-dir run";

fn read(sandbox: &Sandbox, done: Done) -> Run {
    Run {
        done,
        trace: TraceFile::read(&sandbox.path("run/trace.sqlite")),
        iterations: sandbox.json_lines("run/iterations.jsonl"),
        report: sandbox.json("run/report.json"),
    }
}

fn profiled(variables: &[(&str, &str)], options: &str) -> Run {
    let sandbox = sandbox();
    let done = sandbox.ok_with(variables, &format!("{BENCH} {options}"));
    read(&sandbox, done)
}

/// The run that several tests look at: two windows, one of them a single iteration.
fn shared() -> &'static Run {
    static RUN: OnceLock<Run> = OnceLock::new();
    RUN.get_or_init(|| profiled(&[], "--profile 2-4,9"))
}

/// Whether exactly these iterations were recorded, in the trace and by the iteration log.
#[track_caller]
fn assert_recorded(run: &Run, expected: &[u64]) {
    assert_eq!(run.trace.iterations, expected);
    let marked: Vec<_> =
        run.iterations.iter().filter(|i| i["strobe"]["profiled"] == true).map(|i| int(i, "/iter")).collect();
    assert_eq!(marked, expected);
}

#[test]
fn a_window_is_inclusive() {
    assert_recorded(&profiled(&[], "--profile 2-4"), &[2, 3, 4]);
}

#[test]
fn a_single_number_is_one_iteration() {
    assert_recorded(&profiled(&[], "--profile 3"), &[3]);
    assert_recorded(&profiled(&[], "--profile 0"), &[0]);
}

#[test]
fn a_list_is_several_windows_in_any_order() {
    let run = profiled(&[], "--profile 8-9,0,3-4,5");
    assert_recorded(&run, &[0, 3, 4, 5, 8, 9]);
    assert_eq!(run.trace.windows, [(0, 0, true), (3, 4, true), (5, 5, true), (8, 9, true)]);
}

#[test]
fn forward_steps_are_named_by_iteration_and_batch() {
    let run = shared();
    assert_recorded(run, &[2, 3, 4, 9]);
    let expected: Vec<_> = [2, 3, 4, 9]
        .iter()
        .map(|&iter: &usize| {
            let batch = |name: &str| int(&run.iterations[iter], &format!("/inflightBatchingStats/{name}"));
            let (context, generation) = (batch("numContextRequests"), batch("numGenRequests"));
            format!("[Executor] _forward_step {iter}: {context} ctx reqs, {generation} gen reqs")
        })
        .collect();
    assert_eq!(run.trace.forward_steps(), expected);
    for phase in ["_schedule", "_prepare_inputs", "_sample_async", "_handle_responses"] {
        assert_eq!(run.trace.ranges.iter().filter(|r| r.name == phase).count(), 4, "{phase}");
    }
    assert!(!run.trace.partial);
}

#[test]
fn every_op_is_recorded_inside_its_step() {
    let trace = &shared().trace;
    assert_eq!(trace.ops.len(), 4 * ops_per_step());
    let steps: Vec<_> = trace.ranges.iter().filter(|r| r.name.starts_with("[Executor]")).collect();
    for (step, iter) in steps.iter().zip([2, 3, 4, 9]) {
        let ops: Vec<_> = trace.ops.iter().filter(|op| op.iter == iter).collect();
        assert_eq!(ops.len(), ops_per_step());
        for pair in ops.windows(2) {
            assert!(pair[0].end <= pair[1].start, "ops of one thread overlap: {pair:?}");
        }
        for op in ops.iter().filter(|op| op.category != "sampling") {
            assert!(step.start <= op.start && op.end <= step.end, "{op:?} is outside {step:?}");
        }
        for layer in 0..LAYERS as u32 {
            assert_eq!(ops.iter().filter(|op| op.layer == Some(layer)).count(), ops_per_layer());
        }
        assert!(ops.iter().filter(|op| op.category == "gemm").all(|op| op.flops > 0 && op.bytes > 0));
    }
}

#[test]
fn times_agree_with_the_iteration_log() {
    let run = shared();
    for step in run.trace.ranges.iter().filter(|r| r.name.starts_with("[Executor]")) {
        let number: usize = step.name["[Executor] _forward_step ".len()..].split(':').next().unwrap().parse().unwrap();
        let log = &run.iterations[number];
        assert_close((step.end - step.start) as f64 / 1e6, num(log, "/strobe/forwardMS"), "forward time");
        assert!(int(log, "/strobe/startNS") as i64 <= step.start);
    }
}

#[test]
fn layer_ranges_come_on_request() {
    let layers = |run: &Run| run.trace.ranges.iter().filter(|r| r.name.starts_with("layer ")).count();
    assert_eq!(layers(shared()), 0);
    for variable in ["STROBE_NVTX_DEBUG", "TLLM_NVTX_DEBUG"] {
        let run = profiled(&[(variable, "1")], "--profile 2-3");
        assert_eq!(layers(&run), 2 * LAYERS, "{variable}");
        let first = run.trace.ranges.iter().find(|r| r.name == "layer 0").unwrap();
        let inside = run.trace.ops.iter().filter(|op| first.start <= op.start && op.end <= first.end);
        assert!(inside.clone().count() == ops_per_layer() && inside.into_iter().all(|op| op.layer == Some(0)));
    }
    assert_eq!(layers(&profiled(&[("STROBE_NVTX_DEBUG", "0")], "--profile 2")), 0);
}

#[test]
fn variables_name_the_window_and_the_strongest_wins() {
    let (own, anchor, old) = ("STROBE_PROFILE_START_STOP", "TLLM_PROFILE_START_STOP", "TLLM_GPTM_PROFILE_START_STOP");
    for variable in [own, anchor, old] {
        let run = profiled(&[(variable, "1-2")], "");
        assert_recorded(&run, &[1, 2]);
        assert!(!run.done.stderr.contains("ignored"), "{}", run.done.stderr);
    }
    let run = profiled(&[(own, "1"), (anchor, "2"), (old, "3")], "");
    assert_recorded(&run, &[1]);
    assert_names(&run.done.stderr, &["warning: ", anchor, old, "ignored"]);
    let run = profiled(&[(own, ""), (anchor, "2"), (old, "3")], "");
    assert_recorded(&run, &[2]);
    let run = profiled(&[(own, "1")], "--profile 4");
    assert_recorded(&run, &[4]);
    assert_names(&run.done.stderr, &[own, "ignored"]);
}

#[test]
fn without_a_window_there_is_no_trace() {
    let sandbox = sandbox();
    let done = sandbox.ok_with(&[("TLLM_TORCH_PROFILE_TRACE", "t.json"), ("TLLM_PROFILE_START_STOP", " ")], BENCH);
    assert!(!sandbox.exists("run/trace.sqlite") && !sandbox.exists("t.json"));
    assert!(!done.stdout.contains("ITERATION BUDGET"));
    assert!(sandbox.json_lines("run/iterations.jsonl").iter().all(|i| i["strobe"]["profiled"] == false));
}

#[test]
fn windows_beyond_the_end_are_reported() {
    let run = profiled(&[], "--profile 10-500,900");
    let last = run.iterations.len() as u64 - 1;
    assert_eq!(run.trace.iterations, (10..=last).collect::<Vec<_>>());
    assert_eq!(run.trace.windows, [(10, 500, false), (900, 900, false)]);
    assert_names(&run.done.stderr, &["warning: ", "window 900", "never reached", &format!("0 to {last}")]);
    assert_names(&run.done.stdout, &["10-500 (incomplete)", "900 (never reached)"]);
    assert!(!run.trace.partial, "the run itself is whole");

    let sandbox = sandbox();
    let done = sandbox.ok(&format!("{BENCH} --profile 500"));
    assert_names(&done.stderr, &["window 500", "never reached"]);
    assert!(!sandbox.exists("run/trace.sqlite"));
    assert_eq!(sandbox.json("run/report.json")["strobe"]["windows"][0]["state"], "never reached");
}

#[test]
fn every_recorded_iteration_has_its_budget_in_the_report() {
    let run = profiled(&[], "--profile 1-3,5");
    let budgets = run.report["strobe"]["profile"]["iterations"].as_array().unwrap();
    let numbers: Vec<_> = budgets.iter().map(|b| int(b, "/iter")).collect();
    assert_eq!(numbers, [1, 2, 3, 5]);
    for budget in budgets {
        let parts: u64 = budget["parts"].as_array().unwrap().iter().map(|part| int(part, "/1")).sum();
        assert_eq!(parts, int(budget, "/wall_ns"));
    }
}

#[test]
fn the_window_belongs_to_the_run_that_is_reported() {
    let run = profiled(&[], "--profile 2-3 --repeat 2");
    assert_recorded(&run, &[2, 3]);
}

#[test]
fn budgets_add_up_to_the_wall_time() {
    let run = profiled(&[], "--profile 0-20");
    let kinds = run.report["strobe"]["profile"]["budget_by_kind"].as_array().unwrap();
    let names: Vec<_> = kinds.iter().map(|k| k["kind"].as_str().unwrap()).collect();
    assert_eq!(names, ["prefill", "mixed", "decode"]);
    for kind in kinds {
        let parts = kind["parts"].as_array().unwrap();
        let sum = |pointer: &str| parts.iter().map(|p| num(p, pointer)).sum::<f64>();
        assert_close(sum("/mean_ns"), num(kind, "/wall_ns/mean"), "parts of the mean iteration");
        assert_close(sum("/share_of_wall"), 1.0, "shares");
        for part in ["schedule", "prepare", "gemm", "attention", "norm", "rope", "sampling", "idle"] {
            assert!(parts.iter().any(|p| p["part"] == part), "{} has no {part}", kind["kind"]);
        }
        assert_eq!(parts.iter().any(|p| p["part"] == "activation"), !activates(), "{}", kind["kind"]);
    }
    let iterations: u64 = kinds.iter().map(|k| int(k, "/iterations")).sum();
    assert_eq!(iterations as usize, run.trace.iterations.len());
    assert_names(
        &run.done.stdout,
        &["ITERATION BUDGET, window 0-20", "prefill iterations", "decode iterations", "TOP OPS"],
    );
    for op in run.report["strobe"]["profile"]["top_ops"].as_array().unwrap() {
        let calls = run.trace.ops.iter().filter(|o| o.name == op["name"] && o.kernel == op["kernel"]);
        assert_eq!(int(op, "/calls") as usize, calls.count(), "{op}");
    }
}

#[test]
fn the_profilers_cost_is_measured_on_request() {
    let sandbox = sandbox();
    let done = sandbox.ok_with(&[("TLLM_PROFILE_START_STOP", "1-2")], &format!("{BENCH} --measure-profiler-overhead"));
    assert_names(&done.stdout, &["PROFILER OVERHEAD", "pairs of neighbouring iterations"]);
    assert_names(&done.stderr, &["window is ignored"]);
    let report = sandbox.json("run/report.json");
    assert!(int(&report, "/strobe/profiler_overhead/pairs") > 0);
    assert!(num(&report, "/strobe/profiler_overhead/relative").is_finite());
    assert!(!sandbox.exists("run/trace.sqlite"));
    for iteration in sandbox.json_lines("run/iterations.jsonl") {
        assert_eq!(iteration["strobe"]["profiled"], int(&iteration, "/iter") % 2 == 1);
    }
}

// Chrome traces

/// Complete events of a Chrome trace by track: start and end in nanoseconds, and name.
fn slices(trace: &Value) -> std::collections::BTreeMap<u64, Vec<(i64, i64, String)>> {
    let mut tracks = std::collections::BTreeMap::new();
    for event in trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X") {
        let ns = |pointer: &str| (num(event, pointer) * 1000.0).round() as i64;
        let slice = (ns("/ts"), ns("/ts") + ns("/dur"), event["name"].as_str().unwrap().to_string());
        tracks.entry(int(event, "/tid")).or_insert_with(Vec::new).push(slice);
    }
    tracks
}

/// On a track, two slices are either apart or one inside the other.
fn assert_nested(trace: &Value) {
    for (track, mut slices) in slices(trace) {
        slices.sort_by_key(|&(start, end, _)| (start, -end));
        let mut open: Vec<(i64, i64, String)> = Vec::new();
        for slice in slices {
            while open.last().is_some_and(|outer| outer.1 <= slice.0) {
                open.pop();
            }
            if let Some(outer) = open.last() {
                assert!(slice.1 <= outer.1, "track {track}: {slice:?} sticks out of {outer:?}");
            }
            open.push(slice);
        }
    }
}

fn names(trace: &Value) -> Vec<String> {
    slices(trace).into_values().flatten().map(|(_, _, name)| name).collect()
}

#[test]
fn a_chrome_trace_is_nested_and_has_every_op() {
    let sandbox = sandbox();
    sandbox.ok_with(&[("STROBE_NVTX_DEBUG", "1")], &format!("{BENCH} --profile 2-4 --trace-out t.json"));
    let trace = sandbox.json("t.json");
    assert_nested(&trace);
    let names = names(&trace);
    assert_eq!(names.iter().filter(|n| n.starts_with("[Executor] _forward_step")).count(), 3);
    assert_eq!(names.iter().filter(|n| n.starts_with("layer ")).count(), 3 * LAYERS);
    for op in TraceFile::read(&sandbox.path("run/trace.sqlite")).ops {
        assert!(names.contains(&op.name), "{} is missing", op.name);
    }
    assert_eq!(sandbox.names("."), ["d.jsonl", "run", "t.json"]);
}

#[test]
fn several_windows_give_several_chrome_traces() {
    let sandbox = sandbox();
    sandbox.ok(&format!("{BENCH} --profile 2-4,9 --trace-out t.json"));
    assert_eq!(sandbox.names("."), ["d.jsonl", "run", "t-window-0-rank-0.json", "t-window-1-rank-0.json"]);
    for (file, steps) in [("t-window-0-rank-0.json", 3), ("t-window-1-rank-0.json", 1)] {
        let trace = sandbox.json(file);
        assert_nested(&trace);
        assert_eq!(names(&trace).iter().filter(|n| n.starts_with("[Executor]")).count(), steps, "{file}");
        assert_eq!(names(&trace).iter().filter(|n| *n == "qkv_proj").count(), steps * LAYERS, "{file}");
    }
}

#[test]
fn the_anchors_variable_asks_for_a_chrome_trace() {
    let sandbox = sandbox();
    sandbox.ok_with(&[("TLLM_TORCH_PROFILE_TRACE", "t.json"), ("TLLM_PROFILE_START_STOP", "1-2")], BENCH);
    assert_eq!(names(&sandbox.json("t.json")).iter().filter(|n| n.starts_with("[Executor]")).count(), 2);
}
