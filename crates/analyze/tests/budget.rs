//! The budget of iterations and devices: parts add up, and say what happened.

mod gpu_common;

use gpu_common::{call, csv, empty, op, random_trace, range, read, traces};
use proptest::prelude::*;
use strobe_analyze::budget::{Part, budget_by_kind, budgets, device_budgets, report, worst};
use strobe_analyze::{Context, Options};
use strobe_trace::{Iteration, NONE, OpKind, RangeKind, Trace, Work};

fn parts(trace: &Trace) -> Vec<Vec<(String, i64)>> {
    let context = Context::new(trace, &Options::default());
    let named = |parts: &[(Part, i64)]| parts.iter().map(|(part, ns)| (part.to_string(), *ns)).collect();
    budgets(&context).iter().map(|b| named(&b.parts)).collect()
}

#[test]
fn every_cause_of_idleness_has_its_part() {
    let mut trace = empty();
    range(&mut trace, "iteration 0", (0, 1000));
    range(&mut trace, "iteration 1", (1000, 2000));
    call(&mut trace, "cudaLaunchKernel", (0, 10), 1);
    op(&mut trace, "nvjet_a", (100, 200), 1);
    call(&mut trace, "cudaLaunchKernel", (12, 20), 2);
    op(&mut trace, "ncclDevKernel_AllReduce", (150, 250), 2); // 50 hidden behind the product, 50 exposed
    call(&mut trace, "cudaMemcpyAsync", (22, 30), 3);
    op(&mut trace, "memcpy", (255, 265), 3); // queued long before: 5 of queue
    call(&mut trace, "cudaStreamSynchronize", (40, 275), 0); // the host wakes 10 after the copy has ended
    call(&mut trace, "cudaLaunchKernel", (300, 310), 4); // 25 of host work, then 10 of call and 5 of latency
    op(&mut trace, "flash_fwd_kernel", (315, 400), 4);
    call(&mut trace, "cudaLaunchKernel", (1000, 1010), 5);
    op(&mut trace, "nvjet_a", (1020, 1100), 5);
    op(&mut trace, "nvjet_a", (1150, 1160), 99); // no launch
    call(&mut trace, "cudaLaunchKernel", (1130, 1135), 6);
    op(&mut trace, "nvjet_a", (1170, 1180), 6);
    trace.finish();
    let expected: [&[(&str, i64)]; 2] = [
        &[
            ("attention", 85),
            ("gemm", 100),
            ("exposed communication", 50),
            ("exposed memory copies", 10),
            ("launch-bound idle", 15 + 20),
            ("queued idle", 5),
            ("host-bound idle", 25),
            ("between iterations", 600),
            ("sync wait", 10),
        ],
        &[("gemm", 100), ("queued idle", 10), ("unknown", 50)],
    ];
    let expected = expected.map(|parts| parts.iter().map(|&(name, ns)| (name.to_owned(), ns)).collect::<Vec<_>>());
    assert_eq!(parts(&trace), expected);
}

fn recorded(trace: &mut Trace, iter: u64, (start, end): (i64, i64), cpu_wait: Option<i64>) {
    trace.iterations.push(Iteration {
        iter,
        start,
        end,
        context_requests: 0,
        generation_requests: 1,
        context_tokens: 0,
        generation_tokens: 1,
        window: 0,
        cpu_wait,
    });
}

/// In an engine on the CPU the wait may be in any op; on a GPU no kernel waits for the host's CPU.
#[test]
fn waiting_for_a_cpu_is_a_part_of_its_own() {
    let names = |list: &[(&str, i64)]| list.iter().map(|&(name, ns)| (name.to_owned(), ns)).collect::<Vec<_>>();
    let on_cpu = |wait| {
        let mut trace = Trace::default();
        recorded(&mut trace, 0, (0, 1001), wait);
        let name = trace.strings.intern("gemm_f32");
        trace.ops.push(strobe_trace::OpRow { iteration: 0, ..strobe_trace::OpRow::new(OpKind::CpuOp, name, 0, 667) });
        trace.finish();
        parts(&trace).remove(0)
    };
    let (gemm, rest) = (667, 334);
    assert_eq!(on_cpu(None), names(&[("gemm", gemm), ("unknown", rest)]));
    assert_eq!(on_cpu(Some(0)), on_cpu(None));
    assert_eq!(on_cpu(Some(100)), names(&[("gemm", gemm - 66), ("waited for a CPU", 100), ("unknown", rest - 34)]));
    assert_eq!(on_cpu(Some(5000)), names(&[("waited for a CPU", 1001)]), "no more than there is");

    let mut trace = empty();
    for (iter, wait) in [(0i64, 60), (1, 90)] {
        let at = iter * 100;
        recorded(&mut trace, iter as u64, (at, at + 100), Some(wait));
        call(&mut trace, "cudaLaunchKernel", (at + 45, at + 50), iter + 1);
        op(&mut trace, "nvjet_a", (at + 10, at + 40), iter + 1);
        op(&mut trace, "nvjet_a", (at + 60, at + 70), iter + 1);
        let count = trace.ops.len();
        trace.ops.iteration[count - 2..].fill(iter as u32);
    }
    trace.finish();
    for parts in parts(&trace) {
        let of = |name: &str| parts.iter().find(|part| part.0 == name).map_or(0, |part| part.1);
        assert_eq!(of("gemm"), 40, "kernels keep their time: {parts:?}");
        assert!(of("waited for a CPU") > 0, "{parts:?}");
    }
    let context = Context::new(&trace, &Options::default());
    assert!(report(&context).notes.iter().any(|note| note.contains("waited for a CPU")));
    for budget in budgets(&context) {
        assert_eq!(budget.parts.iter().map(|part| part.1).sum::<i64>(), budget.wall_ns);
    }
}

proptest! {
    #[test]
    fn parts_add_up_whatever_was_waited(spans in prop::collection::vec((1..1000i64, 0..1000i64), 1..9), wait in 0..3000i64) {
        let mut trace = Trace::default();
        let name = trace.strings.intern("gemm_f32");
        let other = trace.strings.intern("flash_attention");
        let mut at = 0;
        for (index, (gap, length)) in spans.into_iter().enumerate() {
            let kernel = if index % 2 == 0 { name } else { other };
            let row = strobe_trace::OpRow::new(OpKind::CpuOp, kernel, at + gap, at + gap + length);
            trace.ops.push(strobe_trace::OpRow { iteration: 0, ..row });
            at += gap + length;
        }
        recorded(&mut trace, 0, (0, at), Some(wait));
        trace.finish();
        let context = Context::new(&trace, &Options::default());
        check_sums(&context, "waits");
        let waited = budgets(&context)[0].parts.iter().find(|part| part.0 == Part::CpuWait).map_or(0, |part| part.1);
        prop_assert_eq!(waited, wait.min(at));
    }
}

/// Two windows were recorded, with unseen iterations between them.
#[test]
fn time_between_recorded_windows_is_nobodys() {
    let mut trace = empty();
    for (window, iter, at) in [(0, 3, 0i64), (0, 4, 100), (1, 60, 9_000)] {
        trace.iterations.push(Iteration {
            iter,
            start: at,
            end: at + 90,
            context_requests: 0,
            generation_requests: 1,
            context_tokens: 0,
            generation_tokens: 1,
            window,
            cpu_wait: None,
        });
        call(&mut trace, "cuLaunchKernelEx", (at + 1, at + 5), iter as i64);
        op(&mut trace, "nvjet_a", (at + 10, at + 80), iter as i64);
        let last = trace.ops.len() - 1;
        trace.ops.iteration[last] = iter as u32;
    }
    trace.finish();
    let walls: Vec<i64> = parts(&trace).iter().map(|parts| parts.iter().map(|part| part.1).sum()).collect();
    assert_eq!(walls, [100, 70, 70]);
    let context = Context::new(&trace, &Options::default());
    let gaps = &strobe_analyze::gaps::gaps(&context, 8)[0];
    assert_eq!((gaps.span_ns, gaps.longest.len(), gaps.longest[0].span.length()), (70 + 30 + 70 + 70, 1, 30));
}

#[test]
fn kinds_have_medians_and_the_worst_is_named() {
    let mut trace = empty();
    for step in 0..5i64 {
        let at = step * 1000;
        range(&mut trace, &format!("iteration {step}: 0 ctx reqs, 4 gen reqs"), (at, at + 900));
        call(&mut trace, "cudaLaunchKernel", (at, at + 10), step + 1);
        let length = if step == 3 { 700 } else { 100 };
        op(&mut trace, "nvjet_a", (at + 20, at + 20 + length), step + 1);
    }
    trace.finish();
    let context = Context::new(&trace, &Options::default());
    let budgets = budgets(&context);
    assert_eq!(budgets.iter().map(|b| b.wall_ns).collect::<Vec<_>>(), [1000, 1000, 1000, 1000, 100]);
    let kinds = budget_by_kind(&budgets);
    assert_eq!(kinds.len(), 1);
    let gemm = kinds[0].parts.iter().find(|p| p.part == Part::Category("gemm".into())).unwrap();
    assert_eq!((gemm.median_ns, gemm.mean_ns), (100.0, 220.0));
    let means: f64 = kinds[0].parts.iter().map(|p| p.mean_ns).sum();
    assert!((means - kinds[0].wall_ns.mean).abs() < 1e-6);
    let shares: f64 = kinds[0].parts.iter().map(|p| p.share_of_wall).sum();
    assert!((shares - 1.0).abs() < 1e-9);
    assert!(worst(&budgets, &kinds).is_empty(), "no step is longer than the median");
}

fn check_sums(context: &Context, what: &str) {
    for budget in budgets(context) {
        let sum: i64 = budget.parts.iter().map(|p| p.1).sum();
        assert_eq!(sum, budget.wall_ns, "{what}: iteration {} on device {}", budget.iter, budget.device);
        assert!(budget.parts.iter().all(|p| p.1 > 0));
        assert!(budget.parts.is_sorted_by(|a, b| a.0 < b.0), "named once, in order");
    }
    let mut last = std::collections::HashMap::new();
    for budget in budgets(context) {
        let before = last.insert(budget.device, budget.window.end);
        assert!(before.is_none_or(|end| end == budget.window.start), "{what}: iterations tile the device's time");
    }
    for budget in device_budgets(context) {
        assert_eq!(budget.parts.iter().map(|p| p.1).sum::<i64>(), budget.wall_ns, "{what}");
        let busy = context.busy(budget.device).length();
        let idle: i64 = budget.parts.iter().filter(|(part, _)| part.is_idle()).map(|p| p.1).sum();
        assert_eq!(budget.wall_ns - idle, busy, "{what}");
    }
}

proptest! {
    #[test]
    fn parts_add_up_on_any_trace(trace in random_trace()) {
        check_sums(&Context::new(&trace, &Options::default()), "random");
    }
}

#[test]
fn parts_add_up_on_real_traces_and_equal_the_golden_table() {
    let Some(traces) = traces() else { return };
    let rows = csv(&traces.join("golden_intervals.csv"));
    let mut files: Vec<&String> = rows.iter().map(|r| &r["file"]).collect();
    files.dedup();
    for file in files {
        let trace = read(&traces.join(file));
        let context = Context::new(&trace, &Options::default());
        check_sums(&context, file);
        let devices = device_budgets(&context);
        let expected: Vec<_> = rows.iter().filter(|r| r["file"] == *file).collect();
        assert_eq!(devices.len(), expected.len(), "{file}");
        for row in expected {
            let number = |column: &str| row[column].parse::<i64>().unwrap();
            let device = devices
                .iter()
                .find(|d| i64::from(trace.devices[d.device as usize].ordinal) == number("device"))
                .unwrap();
            let sum = |keep: &dyn Fn(&Part) -> bool| -> i64 {
                device.parts.iter().filter(|(part, _)| keep(part)).map(|p| p.1).sum()
            };
            assert_eq!(device.wall_ns, number("span_ns"), "{file}");
            assert_eq!(sum(&|p| matches!(p, Part::Category(_))), number("compute_ns"), "{file}");
            assert_eq!(sum(&|p| *p == Part::ExposedCommunication), number("exposed_comm_ns"), "{file}");
            assert_eq!(sum(&|p| *p == Part::ExposedCopies), number("exposed_mem_ns"), "{file}");
            assert_eq!(sum(&Part::is_idle), number("idle_ns"), "{file}");
        }
        let report = report(&context);
        assert!(report.sheets.iter().any(|s| s.name == "devices"), "{file}");
    }
}

/// What is known of the H200 captures: eager decode waits for the host; the first step after the prefill loads modules;
/// replays of a graph hardly wait for the host.
#[test]
fn real_budgets_say_what_is_known() {
    let Some(traces) = traces() else { return };
    let trace = read(&traces.join("nsys/h200/rep_sdpa.sqlite"));
    let context = Context::new(&trace, &Options::default());
    let budgets = budgets(&context);
    let kinds = budget_by_kind(&budgets);
    let worst = worst(&budgets, &kinds);
    let host_share = |part: &Part| matches!(part, Part::HostBound | Part::LaunchBound | Part::BetweenIterations);
    let waiting: f64 = kinds[0].parts.iter().filter(|p| host_share(&p.part)).map(|p| p.share_of_wall).sum();
    assert!(waiting > 0.9, "{waiting}");
    assert_eq!(budgets[worst[0].budget].iter, 1, "{worst:?}");

    let trace = read(&traces.join("nsys/h200/gpum.sqlite"));
    let context = Context::new(&trace, &Options::default());
    let kinds = budget_by_kind(&strobe_analyze::budget::budgets(&context));
    let decode = kinds.iter().find(|k| k.kind == Some(strobe_trace::IterationKind::Decode)).unwrap();
    let graph = decode.parts.iter().find(|p| p.part == Part::Category("graph".into())).unwrap();
    assert!(graph.share_of_wall > 0.9, "{}", graph.share_of_wall);
}

/// A trace of an engine on the CPU: iterations, host phases, the forward step, ops on two threads.
fn random_cpu_trace() -> impl Strategy<Value = Trace> {
    let iterations = prop::collection::vec((0i64..300, 0i64..80), 1..4);
    let ops = prop::collection::vec((0i64..300, 0i64..30, 0usize..3, 0u32..4), 0..20);
    let ranges = prop::collection::vec((0i64..300, 0i64..60, 0usize..7, 0u32..4), 0..12);
    (iterations, ops, ranges).prop_map(|(iterations, ops, ranges)| {
        let mut trace = empty();
        trace.devices[0].is_cpu = true;
        for (number, (start, length)) in iterations.into_iter().enumerate() {
            trace.iterations.push(Iteration {
                iter: number as u64,
                start,
                end: start + length,
                context_requests: 0,
                generation_requests: 1,
                context_tokens: 0,
                generation_tokens: 1,
                window: 0,
                cpu_wait: None,
            });
        }
        let categories = ["gemm", "attention", "norm"];
        for (index, category) in categories.into_iter().enumerate() {
            let name = trace.strings.intern(category);
            trace.works.push(Work { op: name, category: name, layer: None, shape: [0; 3], bytes: 0, flops: 0 });
            assert_eq!(trace.works.len(), index + 1);
        }
        for (start, length, work, iteration) in ops {
            let index = op(&mut trace, "impl", (start, start + length), 0);
            trace.ops.kind[index] = OpKind::CpuOp;
            trace.ops.work[index] = work as u32;
            trace.ops.iteration[index] = iteration;
        }
        for (start, length, kind, iteration) in ranges {
            range(&mut trace, "phase", (start, start + length));
            let index = trace.ranges.len() - 1;
            trace.ranges.kind[index] = RangeKind::ALL[kind];
            trace.ranges.iteration[index] = if iteration == 3 { NONE } else { iteration };
        }
        trace.finish();
        trace
    })
}

/// The part that owns one moment of an iteration, by looking at everything.
fn owner_at(trace: &Trace, iteration: &Iteration, now: i64) -> String {
    let mine = |number: u32| u64::from(number) == iteration.iter;
    let running = (0..trace.ops.len())
        .filter(|&o| mine(trace.ops.iteration[o]) && trace.ops.start[o] <= now && now < trace.ops.end[o])
        .max_by_key(|&o| {
            let category = trace.text(trace.works[trace.ops.work[o] as usize].category);
            // Of ops that begin and end together any may own the moment: the test takes the one that the budget takes.
            (trace.ops.start[o], std::cmp::Reverse(trace.ops.end[o]), order_of(trace, category))
        });
    if let Some(op) = running {
        return trace.text(trace.works[trace.ops.work[op] as usize].category).to_owned();
    }
    let open = |phases: &[RangeKind]| {
        (0..trace.ranges.len())
            .filter(|&r| phases.contains(&trace.ranges.kind[r]))
            .filter(|&r| trace.ranges.iteration[r] == NONE || mine(trace.ranges.iteration[r]))
            .filter(|&r| trace.ranges.start[r] <= now && now < trace.ranges.end[r])
            .max_by_key(|&r| (trace.ranges.start[r], std::cmp::Reverse(trace.ranges.end[r]), trace.ranges.kind[r]))
    };
    let phases = [RangeKind::Schedule, RangeKind::Prepare, RangeKind::Sample, RangeKind::Respond];
    if let Some(range) = open(&phases) {
        return trace.ranges.kind[range].as_str().to_owned();
    }
    if open(&[RangeKind::ForwardStep, RangeKind::Layer]).is_some() { "idle".into() } else { "unknown".into() }
}

/// The place of a category among those of the trace, in order of the recorded works.
fn order_of(trace: &Trace, category: &str) -> usize {
    trace.works.iter().position(|w| trace.text(w.category) == category).unwrap_or(0)
}

proptest! {
    #[test]
    fn cpu_engines_are_split_moment_by_moment(trace in random_cpu_trace()) {
        let context = Context::new(&trace, &Options::default());
        let budgets = budgets(&context);
        prop_assert_eq!(budgets.len(), trace.iterations.len());
        for (budget, iteration) in budgets.iter().zip(&trace.iterations) {
            let mut expected = std::collections::BTreeMap::new();
            for now in iteration.start..iteration.end {
                // Claims are cut to the iteration, so that what began before it begins with it.
                *expected.entry(owner_at(&clipped(&trace, iteration), iteration, now)).or_insert(0i64) += 1;
            }
            let found: std::collections::BTreeMap<String, i64> =
                budget.parts.iter().map(|(part, ns)| (part.to_string(), *ns)).collect();
            prop_assert_eq!(found, expected);
            prop_assert_eq!(budget.wall_ns, iteration.wall_ns());
        }
    }
}

fn clipped(trace: &Trace, iteration: &Iteration) -> Trace {
    let mut trace = trace.clone();
    let clip = |times: &mut [i64]| times.iter_mut().for_each(|t| *t = (*t).clamp(iteration.start, iteration.end));
    clip(&mut trace.ops.start);
    clip(&mut trace.ops.end);
    clip(&mut trace.ranges.start);
    clip(&mut trace.ranges.end);
    trace
}
