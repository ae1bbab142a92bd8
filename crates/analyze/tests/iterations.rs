//! Iterations: as recorded, by markers, by the user's ranges, by graph launches and by repetition.

mod gpu_common;

use gpu_common::{call, csv, empty, op, range, read, traces};
use strobe_analyze::iterations::{Confidence, Method, detect, figures};
use strobe_analyze::{Context, Options};
use strobe_trace::{IterationKind, NONE, Process, Thread, Trace};

#[test]
fn markers_hold_the_ops_launched_inside_them() {
    let mut trace = empty();
    range(&mut trace, "iteration 3: 2 ctx reqs, 0 gen reqs", (0, 100));
    range(&mut trace, "iteration 4: 0 ctx reqs, 2 gen reqs", (100, 200));
    for (correlation, span) in [(1, (10, 20)), (2, (95, 105)), (3, (110, 120)), (4, (300, 310))] {
        call(&mut trace, "cudaLaunchKernel", span, correlation);
        op(&mut trace, "k", (span.1 + 500, span.1 + 505), correlation);
    }
    op(&mut trace, "k", (521, 524), 0); // without launch, inside the time of the first one's op on the device
    trace.ops.end[0] = 530;
    trace.finish();
    let found = detect(&trace, None);
    assert_eq!(found.method, Some(Method::Markers("<N>: <X> ctx reqs, <Y> gen reqs".into())));
    assert_eq!(found.of_call, [0, NONE, 1, NONE]);
    assert_eq!(found.of_op, [0, 0, NONE, 1, NONE]);
    let kinds: Vec<_> = found.list.iter().map(|f| (f.number, f.kind, f.host.length())).collect();
    assert_eq!(kinds, [(3, Some(IterationKind::Prefill), 100), (4, Some(IterationKind::Decode), 100)]);
    let figures = figures(&trace, &found);
    assert_eq!((figures[0].ops, figures[0].launches, figures[0].busy_ns, figures[0].sum_ns), (2, 1, 10, 13));
}

#[test]
fn of_nested_markers_the_most_informative_counts_once() {
    let mut trace = empty();
    for step in 0..3 {
        let at = step * 100;
        range(&mut trace, &format!("ProfilerStep#{step}"), (at, at + 90));
        range(&mut trace, "execute_context_0(0)_generation_4(4)", (at + 10, at + 80));
        range(&mut trace, "step[DECODE bs=4]", (at + 20, at + 70));
        range(&mut trace, "execute_context_0(0)_generation_4(4)", (at + 30, at + 60)); // inside itself
    }
    trace.finish();
    let found = detect(&trace, None);
    assert_eq!(found.list.iter().map(|f| f.number).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(found.list.iter().all(|f| f.generation_tokens == Some(4) && f.host.length() == 70));
}

#[test]
fn markers_of_several_engines_count_together() {
    let mut trace = empty();
    for step in 0..3 {
        range(&mut trace, "step[DECODE bs=32]", (step * 100, step * 100 + 90));
        range(&mut trace, "execute_context_0(0)_generation_32(32)", (step * 100 + 1, step * 100 + 80));
    }
    range(&mut trace, "step[EXTEND bs=15 toks=15360]", (300, 390));
    let long_form = "execute_900_context_2(sq800sk800sqsq1sqsk1)_generation_100(sq100sk4000sqsq1sqsk1)";
    range(&mut trace, long_form, (400, 490));
    // One that holds several steps is none; one around a single step is the same step, and its number is not lost.
    range(&mut trace, "iteration 1", (0, 250));
    range(&mut trace, "iteration 4", (395, 500));
    trace.finish();
    let found = detect(&trace, None);
    let steps: Vec<_> = found.list.iter().map(|f| (f.number, f.kind, f.context_tokens, f.host.length())).collect();
    use IterationKind::{Decode, Mixed, Prefill};
    assert_eq!(
        steps,
        [
            (0, Some(Decode), Some(0), 90),
            (1, Some(Decode), Some(0), 90),
            (2, Some(Decode), Some(0), 90),
            (3, Some(Prefill), Some(15360), 90),
            (4, Some(Mixed), Some(800), 105),
        ]
    );
    assert!(
        found.list[..3].iter().all(|f| f.generation_requests == Some(32) && f.label.starts_with("execute_context"))
    );
}

#[test]
fn markers_of_one_step_fill_each_other_in() {
    let mut trace = empty();
    for step in 0..2 {
        let at = i64::from(step) * 100;
        range(&mut trace, &format!("iteration {}", 7 + step), (at, at + 90));
        range(&mut trace, "step[MIXED bs=4 toks=9]", (at + 5, at + 80));
        range(&mut trace, "execute_new_2_cached_0", (at + 10, at + 70)); // a prefill: contradicts, and is not believed
    }
    trace.finish();
    let found = detect(&trace, None);
    let steps: Vec<_> = found.list.iter().map(|f| (f.number, f.kind, f.context_requests, f.host.length())).collect();
    let mixed = Some(IterationKind::Mixed);
    assert_eq!(steps, [(7, mixed, None, 90), (8, mixed, None, 90)]);
}

#[test]
fn steps_of_a_profiler_count_where_engine_markers_leave_out_most() {
    let with_marker_of = |marked: usize| {
        let mut trace = empty();
        for step in 0..4 {
            let at = step as i64 * 100;
            range(&mut trace, &format!("ProfilerStep#{step}"), (at, at + 99));
            if step < marked {
                range(&mut trace, "step[DECODE bs=4]", (at + 5, at + 90));
            }
            call(&mut trace, "cudaLaunchKernel", (at + 10, at + 12), 1 + step as i64);
            op(&mut trace, "k", (at + 20, at + 60), 1 + step as i64);
        }
        trace.finish();
        let found = detect(&trace, None);
        (found.list.len(), found.list[0].label.clone())
    };
    assert_eq!(with_marker_of(1), (4, "ProfilerStep#0".to_owned()));
    assert_eq!(with_marker_of(3), (3, "step[DECODE bs=4]".to_owned()));
}

#[test]
fn the_users_ranges_go_first_and_may_be_missing() {
    let mut trace = empty();
    range(&mut trace, "iteration 0: 1 ctx reqs, 0 gen reqs", (0, 10));
    range(&mut trace, "outer loop", (0, 50));
    trace.finish();
    let named = regex::Regex::new("^outer").unwrap();
    let found = detect(&trace, Some(&named));
    assert_eq!((found.list.len(), found.method), (1, Some(Method::RangeName("^outer".into()))));
    let none = detect(&trace, Some(&regex::Regex::new("^inner").unwrap()));
    assert_eq!(none.unmatched_range_name(), Some("^inner"));
}

#[test]
fn processes_have_iterations_of_their_own() {
    let mut trace = empty();
    trace.processes.push(Process::default());
    trace.threads.push(Thread { process: 1, ..Thread::default() });
    range(&mut trace, "iteration 0", (0, 100));
    range(&mut trace, "iteration 0", (10, 110));
    trace.ranges.thread[1] = 1;
    for thread in 0..2 {
        call(&mut trace, "cudaLaunchKernel", (50, 51), 1);
        trace.calls.thread[thread as usize] = thread;
        let index = op(&mut trace, "k", (60, 70), 1);
        trace.ops.process[index] = thread;
    }
    trace.finish();
    assert_eq!(detect(&trace, None).of_op, [0, 1]);
}

/// A step: inputs copied, one graph of five kernels, the token copied back, the host waits for it.
fn graph_step(trace: &mut Trace, at: i64, correlation: i64) {
    call(trace, "cudaMemcpyAsync", (at, at + 5), correlation);
    op(trace, "Memcpy HtoD (Pinned -> Device)", (at + 8, at + 10), correlation);
    call(trace, "cudaGraphLaunch", (at + 6, at + 12), correlation + 1);
    for kernel in 0..5 {
        op(trace, &format!("k{kernel}"), (at + 20 + kernel * 10, at + 29 + kernel * 10), correlation + 1);
    }
    call(trace, "cudaMemcpyAsync", (at + 13, at + 90), correlation + 2);
    op(trace, "Memcpy DtoH (Device -> Pageable)", (at + 75, at + 80), correlation + 2);
    let copies = trace.ops.len();
    for index in [copies - 7, copies - 1] {
        trace.ops.kind[index] = strobe_trace::OpKind::Memcpy;
    }
}

#[test]
fn graph_launches_make_steps_and_a_prefill_before_them_is_one() {
    let mut trace = empty();
    for kernel in 0..20 {
        call(&mut trace, "cudaLaunchKernel", (kernel * 10, kernel * 10 + 4), 1000 + kernel);
        op(&mut trace, "eager", (kernel * 10 + 5, kernel * 10 + 12), 1000 + kernel);
    }
    for step in 0..4 {
        graph_step(&mut trace, 1000 + step * 200, 1 + step * 10);
    }
    trace.finish();
    let found = detect(&trace, None);
    assert_eq!(found.method, Some(Method::GraphReplays));
    let figures = figures(&trace, &found);
    assert_eq!(figures.iter().map(|f| f.ops).collect::<Vec<_>>(), [20, 7, 7, 7, 7]);
    assert_eq!(figures.iter().map(|f| f.launches).collect::<Vec<_>>(), [20, 3, 3, 3, 3]);
    assert!(found.of_op.iter().all(|&i| i != NONE));
    assert_eq!(found.list[1].host.length(), 200, "without markers a step reaches to the next one's first op");
}

#[test]
fn a_repeating_sequence_of_kernels_is_found_with_its_layers() {
    let mut trace = empty();
    let mut at = 0;
    let mut kernel = |trace: &mut Trace, name: &str, pause: i64| {
        at += pause;
        op(trace, name, (at, at + 10), 0);
        at += 10;
    };
    for step in 0..6 {
        kernel(&mut trace, "embed", 500); // the host prepares the step
        for layer in 0..12 {
            for name in ["norm", "qkv", "attn", "out", "norm", "up", "down"] {
                kernel(&mut trace, name, 1);
            }
            if step == 2 && layer == 3 {
                kernel(&mut trace, "extra", 1);
            }
        }
        kernel(&mut trace, "head", 1);
        kernel(&mut trace, "argmax", 1);
    }
    trace.finish();
    let found = detect(&trace, None);
    assert_eq!(found.method, Some(Method::Repeats));
    let lengths: Vec<usize> = figures(&trace, &found).iter().map(|f| f.kernels).collect();
    assert_eq!(lengths, [87, 87, 88, 87, 87, 87]);
}

#[test]
fn nothing_is_found_where_nothing_repeats() {
    let mut trace = empty();
    (0..100).for_each(|i| {
        op(&mut trace, &format!("kernel_{i}"), (i * 10, i * 10 + 5), 0);
    });
    trace.finish();
    let found = detect(&trace, None);
    assert_eq!((found.method, found.list.len()), (None, 0));
    assert_eq!(found.of_op.len(), 100);
}

#[test]
fn real_iterations_equal_the_golden_table() {
    let Some(traces) = traces() else { return };
    let rows = csv(&traces.join("golden_iterations.csv"));
    assert_eq!(rows.len(), 30);
    let mut files: Vec<&String> = rows.iter().map(|r| &r["file"]).collect();
    files.dedup();
    for file in files {
        let trace = read(&traces.join(file));
        let found = detect(&trace, None);
        let figures = figures(&trace, &found);
        let expected: Vec<_> = rows.iter().filter(|r| r["file"] == *file).collect();
        assert_eq!(found.list.len(), expected.len());
        for ((row, found), figure) in expected.into_iter().zip(&found.list).zip(&figures) {
            let number = |column: &str| row[column].parse::<i64>().unwrap();
            assert_eq!(found.label, row["iteration"]);
            assert_eq!(found.host.start, number("range_start_ns"));
            assert_eq!(found.host.length(), number("wall_ns"));
            let device = found.device.unwrap();
            assert_eq!((device.start, device.end), (number("proj_start_ns"), number("proj_end_ns")));
            assert_eq!(device.length(), number("proj_ns"));
            assert_eq!(figure.launches as i64, number("launches"));
            assert_eq!(figure.ops as i64, number("gpu_ops"));
            assert_eq!(figure.kernels as i64, number("kernels"));
            assert_eq!(figure.sum_ns, number("gpu_sum_ns"));
            assert_eq!((figure.busy_ns, figure.idle_ns), (number("gpu_busy_ns"), number("gpu_idle_in_proj_ns")));
        }
    }
}

#[test]
fn real_traces_have_the_iterations_one_sees_in_them() {
    let Some(traces) = traces() else { return };
    let cases: [(&str, usize, Option<&str>); 10] = [
        ("kineto/h200/kineto_graph.json.gz", 9, None),
        ("kineto/hta/ns_resolution_rank-0.json.gz", 5, Some("ProfilerStep#<N>")),
        ("kineto/hta/sampled_rank-0.json.gz", 2, Some("ProfilerStep#<N>")),
        ("kineto/hta/trace_diff_control.json.gz", 6, Some("ProfilerStep#<N>")),
        ("kineto/hta/trace_diff_test.json.gz", 6, Some("ProfilerStep#<N>")),
        ("kineto/tracelens/h100_qwen/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", 1, Some("ProfilerStep#<N>")),
        ("kineto/tracelens/sglang_decode/sglang_Qwen3-8B_decode.json.gz", 1, Some("vLLM")),
        ("kineto/tracelens/sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz", 1, Some("vLLM")),
        ("kineto/tracelens/vllm_decode_full/graph_execution.json.gz", 1, Some("vLLM")),
        ("nsys/h200/rep_sdpa.sqlite", 12, Some("iteration <N>")),
    ];
    for (file, expected, markers) in cases {
        let trace = read(&traces.join(file));
        let found = detect(&trace, None);
        assert_eq!(found.list.len(), expected, "{file}");
        match (&found.method, markers) {
            (Some(Method::Markers(family)), Some(expected)) => {
                assert!(family.starts_with(expected), "{file}: {family}")
            }
            (Some(Method::GraphReplays | Method::Repeats), None) => {}
            (method, _) => panic!("{file}: {method:?}"),
        }
        let placed = found.of_op.iter().filter(|&&i| i != NONE).count();
        assert!(placed * 10 >= trace.ops.len() * 7, "{file}: {placed} of {} ops", trace.ops.len());
    }
}

/// Windows of less than a step of a training run: what repeats in them are layers, with copies and waits of their own.
#[test]
fn layers_of_a_piece_of_a_step_are_not_called_steps() {
    let Some(traces) = traces() else { return };
    for file in ["mfu_2gpu_before", "mfu_2gpu_after"] {
        let trace = read(&traces.join(format!("nsys/nsys-ai/{file}.sqlite")));
        let found = detect(&trace, None);
        assert_eq!((found.confidence, found.list.len()), (Confidence::Uncertain, 0), "{file}: {}", found.evidence);
        assert!(!found.candidates.is_empty() && found.why_none().contains("--list-iterations"), "{file}");
    }
}

/// Whether detection has the count, and four in five known steps begin with a found one.
fn is_right(found: &strobe_analyze::iterations::Detected, steps: &[(f64, f64)]) -> bool {
    let mut starts: Vec<f64> = found.list.iter().filter_map(|i| Some(i.device?.start as f64)).collect();
    starts.sort_by(f64::total_cmp);
    let (Some(&first), [want, ..]) = (starts.first(), steps) else { return false };
    if found.list.len() != steps.len() {
        return false;
    }
    // Some files hold their times with a base that the table of truth has subtracted.
    let base = if first > 1e17 && want.0 < 1e17 { first - want.0 } else { 0.0 };
    let mut periods: Vec<f64> = steps.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
    periods.sort_by(f64::total_cmp);
    let period = periods.get(periods.len().saturating_sub(1) / 2).copied().unwrap_or(want.1 - want.0);
    let hit = |&(begin, _): &(f64, f64)| {
        let begin = begin + base;
        starts.iter().any(|start| (begin - start).abs() <= 0.1 * period) || (begin == want.0 + base && first < begin)
    };
    10 * steps.iter().filter(|step| hit(step)).count() >= 8 * steps.len()
}

#[test]
fn steps_of_captures_with_known_truth_are_right() {
    let Some(traces) = traces() else { return };
    let truth: serde_json::Value =
        serde_json::from_slice(&std::fs::read(traces.join("truth/truth.json")).unwrap()).unwrap();
    let mut wrong = Vec::new();
    for entry in truth["files"].as_array().unwrap() {
        let file = entry["file"].as_str().unwrap();
        let pair = |step: &serde_json::Value| (step[0].as_f64().unwrap(), step[1].as_f64().unwrap());
        let steps: Vec<(f64, f64)> = entry["steps"].as_array().unwrap().iter().map(pair).collect();
        let found = detect(&read(&traces.join("truth").join(file)), None);
        if !is_right(&found, &steps) {
            wrong.push(format!(
                "{file}: {} of {}, {:?}: {}",
                found.list.len(),
                steps.len(),
                found.confidence,
                found.evidence
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The same program with and without markers: graph launches and repetition find what the markers say.
#[test]
fn without_markers_the_same_steps_are_found() {
    let Some(traces) = traces() else { return };
    for (file, method) in
        [("node", Method::GraphReplays), ("gpum", Method::GraphReplays), ("rep_sdpa", Method::Repeats)]
    {
        let mut trace = read(&traces.join(format!("nsys/h200/{file}.sqlite")));
        let marked = detect(&trace, None);
        trace.ranges = Default::default();
        let found = detect(&trace, None);
        assert_eq!(found.method, Some(method));
        assert_eq!(found.list.len(), marked.list.len(), "{file}");
        let same = found.of_op.iter().zip(&marked.of_op).filter(|(a, b)| a == b).count();
        assert!(same * 100 >= trace.ops.len() * 95, "{file}: {same} of {} ops are in the same step", trace.ops.len());
    }
}

#[test]
fn the_report_says_how_they_were_found() {
    let mut trace = empty();
    range(&mut trace, "iteration 0", (0, 100));
    call(&mut trace, "cudaLaunchKernel", (10, 20), 1);
    op(&mut trace, "k", (30, 40), 1);
    trace.finish();
    let report = strobe_analyze::iterations::report(&Context::new(&trace, &Options::default()));
    assert_eq!(report.notes[0], "1 iteration, found by markers `iteration <N>`.");
    assert!(!report.notes.iter().any(|note| note.contains("without a launch call")));
    op(&mut trace, "k", (32, 35), 0);
    trace.finish();
    let report = strobe_analyze::iterations::report(&Context::new(&trace, &Options::default()));
    assert!(
        report.notes.contains(&"1 op without a launch call was placed by its time.".to_owned()),
        "{:?}",
        report.notes
    );
    let nothing = strobe_analyze::iterations::report(&Context::new(&empty(), &Options::default()));
    assert!(nothing.not_applicable.unwrap().contains("--iteration-range"));
}
