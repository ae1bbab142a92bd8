//! The summaries equal what `nsys stats` prints.

mod synthetic;

use std::collections::BTreeMap;

use proptest::prelude::*;
use strobe_analyze::nsys_stats::{csv, names, report};
use strobe_analyze::sheet::Value;
use strobe_trace::{CallKind, CallRow, OpKind, Process, RangeRow, RangeSource, StrId, Thread, Trace, range_flags};
use synthetic::{Builder, read, real_data};

#[test]
fn every_csv_of_nsys_is_reproduced() {
    let Some(data) = real_data() else { return };
    let folder = data.join("nsys/h200");
    let mut compared = 0;
    for file in ["rep_sdpa", "node", "gpum"] {
        let trace = read(&[folder.join(format!("{file}.sqlite"))]);
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let Some(name) = name.strip_prefix(&format!("{file}_")).and_then(|n| n.strip_suffix(".csv")) else {
                continue;
            };
            let ours = csv(&report(name, &trace).unwrap());
            let theirs = std::fs::read_to_string(&path).unwrap();
            for (line, (ours, theirs)) in ours.lines().zip(theirs.lines()).enumerate() {
                assert_eq!(ours, theirs, "{file} {name}, line {}", line + 1);
            }
            assert_eq!(ours, theirs, "{file} {name}");
            compared += 1;
        }
    }
    assert_eq!(compared, 21);
}

#[test]
fn what_graph_mode_hides_is_said() {
    let Some(data) = real_data() else { return };
    let trace = read(&[data.join("nsys/h200/gpum.sqlite")]);
    let notes = report("cuda_gpu_kern_sum", &trace).unwrap().notes.join("\n");
    assert!(
        notes.contains("8 launches of CUDA graphs") && notes.contains("70.4 % of the device's busy time"),
        "{notes}"
    );
}

#[test]
fn every_real_file_has_every_summary_or_a_reason() {
    let Some(data) = real_data() else { return };
    for path in synthetic::all_traces(&data) {
        let trace = read(std::slice::from_ref(&path));
        for name in names() {
            let report = report(name, &trace).unwrap();
            let reason = report.not_applicable.as_ref().is_some_and(|why| !why.is_empty());
            assert!(reason != report.sheets.iter().any(|s| !s.rows.is_empty()), "{name} of {}", path.display());
            let lines = csv(&report);
            assert_eq!(reason, lines.is_empty());
        }
        let ops = |kind: OpKind| trace.ops.kind.iter().filter(|&&k| k == kind).count() as i64;
        if ops(OpKind::Kernel) > 0 {
            assert_eq!(sum(&trace, "kern-sum", "Instances"), ops(OpKind::Kernel), "{}", path.display());
        }
    }
}

/// The sum of a column of whole numbers.
fn sum(trace: &Trace, name: &str, column: &str) -> i64 {
    let report = report(name, trace).unwrap();
    let sheet = &report.sheets[0];
    let column = sheet.columns.iter().position(|c| c.name == column).unwrap();
    let whole = |row: &Vec<Value>| if let Value::Int(n) = row[column] { n } else { panic!("not a whole number") };
    sheet.rows.iter().map(whole).sum()
}

fn range(builder: &mut Builder, source: RangeSource, domain: &str, name: &str, span: (i64, i64), flags: u8) {
    builder.range(source, name, span.0, span.1);
    let last = builder.trace.ranges.len() - 1;
    builder.trace.ranges.flags[last] = flags;
    if !domain.is_empty() {
        builder.trace.ranges.domain[last] = builder.trace.strings.intern(domain);
    }
}

#[test]
fn ranges_nest_across_domains_and_leave_out_what_nsys_leaves_out() {
    let mut builder = Builder::new();
    range(&mut builder, RangeSource::PushPop, "", "step", (0, 100), 0);
    range(&mut builder, RangeSource::PushPop, "NCCL", "all, \"reduce\"", (10, 20), 0);
    range(&mut builder, RangeSource::PushPop, "", "no work", (30, 40), 0);
    range(&mut builder, RangeSource::StartEnd, "", "crossing", (50, 150), 0);
    range(&mut builder, RangeSource::StartEnd, "", "other thread", (0, 200), range_flags::CROSS_THREAD);
    range(&mut builder, RangeSource::PushPop, "", "mark", (5, 5), range_flags::MARK);
    range(&mut builder, RangeSource::PushPop, "", "open", (120, 200), range_flags::UNCLOSED);
    range(&mut builder, RangeSource::CpuOp, "", "aten::mm", (0, 200), 0);
    builder.launch("a", (12, 14), (15, 25)).launch("b", (60, 70), (80, 300)).launch("a", (130, 140), (310, 311));
    // The call reaches out of the range: it is not inside.
    builder.launch("c", (95, 105), (400, 401));
    let trace = builder.build();

    assert_eq!(
        csv(&report("nvtx_gpu_proj_sum", &trace).unwrap()),
        "Range,Style,Total Proj Time (ns),Total Range Time (ns),Range Instances,Proj Avg (ns),Proj Med (ns),Proj Min (ns),\
         Proj Max (ns),Proj StdDev (ns),Total GPU Ops,Avg GPU Ops,Avg Range Lvl,Avg Num Child\n\
         :crossing,StartEnd,321,100,1,321.0,321.0,321,321,0.0,3,3.0,0.0,0.0\n\
         :step,PushPop,285,100,1,285.0,285.0,285,285,0.0,2,2.0,0.0,1.0\n\
         \"NCCL:all, \"reduce\"\",PushPop,10,10,1,10.0,10.0,10,10,0.0,1,1.0,1.0,0.0\n\
         :open,PushPop,1,80,1,1.0,1.0,1,1,0.0,1,1.0,0.0,0.0\n"
    );
    let kernels = csv(&report("nvtx_kern_sum", &trace).unwrap());
    let rows: Vec<&str> = kernels.lines().skip(1).collect();
    assert_eq!(
        rows,
        [
            ":crossing,StartEnd,1,1,1,1,220,220.0,220.0,220,220,0.0,b",
            ":crossing,StartEnd,1,1,1,1,1,1.0,1.0,1,1,0.0,a",
            ":crossing,StartEnd,1,1,1,1,1,1.0,1.0,1,1,0.0,c",
            ":open,PushPop,1,1,1,1,1,1.0,1.0,1,1,0.0,a",
            ":step,PushPop,1,1,1,1,220,220.0,220.0,220,220,0.0,b",
            ":step,PushPop,1,1,1,1,10,10.0,10.0,10,10,0.0,a",
            "\"NCCL:all, \"reduce\"\",PushPop,1,1,1,1,10,10.0,10.0,10,10,0.0,a",
        ]
    );
    let host = report("nvtx_sum", &trace).unwrap();
    let listed: Vec<String> = host.sheets[0].rows.iter().map(|row| format!("{:?}", row.last().unwrap())).collect();
    assert_eq!(listed.len(), 6, "marks and operators are no ranges of the program: {listed:?}");
    assert!(host.notes.iter().any(|note| note.starts_with("1 range was never closed")));
}

#[test]
fn totals_tie_by_instances_then_name_and_one_kernel_has_no_deviation() {
    let mut builder = Builder::new();
    builder.kernel("z", 0, 10, 0).kernel("a", 10, 15, 0).kernel("a", 20, 25, 0).kernel("big", 30, 61, 0);
    builder.kernel("y", 70, 80, 0);
    let text = csv(&report("gpukernsum", &builder.build()).unwrap());
    assert_eq!(
        text,
        "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n\
         50.8,31,1,31.0,31.0,31,31,0.0,big\n16.4,10,1,10.0,10.0,10,10,0.0,y\n16.4,10,1,10.0,10.0,10,10,0.0,z\n\
         16.4,10,2,5.0,5.0,5,5,0.0,a\n"
    );
}

#[test]
fn versions_of_a_call_are_one_row() {
    let mut builder = Builder::new();
    builder.call("cudaLaunchKernel_v7000", 0, 5, 1).call("cudaLaunchKernel", 5, 10, 2);
    builder.call("cudaGraphLaunch_v10000", 10, 40, 3);
    let name = builder.name("poll");
    let row = CallRow { start: 0, end: 9, name, thread: 0, correlation: 0, kind: CallKind::OsRuntime, result: 0 };
    builder.trace.calls.push(row);
    let trace = builder.build();
    let text = csv(&report("api-sum", &trace).unwrap());
    assert!(text.ends_with(
        "StdDev (ns),Name\n75.0,30,1,30.0,30.0,30,30,0.0,cudaGraphLaunch_v10000\n25.0,10,2,5.0,5.0,5,5,0.0,cudaLaunchKernel\n"
    ));
    assert!(csv(&report("osrt_sum", &trace).unwrap()).ends_with("\n100.0,9,1,9.0,9.0,9,9,0.0,poll\n"));
}

#[test]
fn sizes_are_decimal_megabytes() {
    let mut builder = Builder::new();
    builder.copy([1, 1, 2], 62_500, 0, 1, 0).copy([1, 1, 2], 4_000_000, 1, 2, 0);
    let text = csv(&report("cuda_gpu_mem_size_sum", &builder.build()).unwrap());
    assert_eq!(text.lines().nth(1), Some("4.063,2,2.031,2.031,0.063,4.000,2.784,[CUDA memcpy]"));
}

#[test]
fn ops_of_a_cpu_engine_are_listed_and_belong_to_the_ranges_of_their_thread() {
    let mut builder = Builder::new();
    builder.range(RangeSource::PushPop, "iteration 0", 0, 50).op(OpKind::CpuOp, "gemm_avx512", 0, 10, 30, 0);
    let trace = builder.build();
    assert!(csv(&report("kern-sum", &trace).unwrap()).ends_with("100.0,20,1,20.0,20.0,20,20,0.0,gemm_avx512\n"));
    assert!(csv(&report("nvtx-kern-sum", &trace).unwrap()).contains(":iteration 0,PushPop,1,1,1,1,20,"));
}

#[test]
fn an_empty_trace_gives_reasons() {
    for name in names() {
        assert!(report(name, &Trace::default()).unwrap().not_applicable.is_some());
    }
    assert!(report("nonsense", &Trace::default()).is_none());
}

/// Ranges and launches on two threads of two processes, anywhere and in any order.
fn random_trace() -> impl Strategy<Value = Trace> {
    let ranges = prop::collection::vec((0u32..2, 0u32..3, 0i64..60, 0i64..40, any::<bool>()), 0..25);
    let calls = prop::collection::vec((0u32..2, 0i64..90, 0i64..6, 0i64..100, 1i64..20, 0u32..3), 0..40);
    (ranges, calls).prop_map(|(ranges, calls)| {
        let mut builder = Builder::new();
        builder.trace.processes.push(Process { pid: 2, ..Process::default() });
        builder.trace.threads.push(Thread { process: 1, tid: 2, ..Thread::default() });
        for (thread, name, start, length, push) in ranges {
            let name = builder.name(["x", "y", "z"][name as usize]);
            builder.trace.ranges.push(RangeRow {
                source: if push { RangeSource::PushPop } else { RangeSource::StartEnd },
                ..RangeRow::new(name, thread, start, start + length)
            });
        }
        for (index, (thread, start, length, at, takes, kernel)) in calls.into_iter().enumerate() {
            // Correlations repeat between the processes, and a launch has one to three kernels.
            let correlation = 1 + index as i64 / 2;
            builder.call("launch", start, start + length, correlation);
            let last = builder.trace.calls.len() - 1;
            builder.trace.calls.thread[last] = thread;
            for more in 0..=i64::from(kernel) {
                builder.kernel(["k", "l", "m"][kernel as usize], at + more, at + more + takes, correlation);
                let last = builder.trace.ops.len() - 1;
                builder.trace.ops.process[last] = thread;
            }
        }
        builder.build()
    })
}

proptest! {
    /// The projection against its definition: every range with every op.
    #[test]
    fn projections_follow_their_definition(trace in random_trace()) {
        let (ranges, ops, calls) = (&trace.ranges, &trace.ops, &trace.calls);
        let inside = |range: usize, op: usize| {
            let call = ops.launch[op] as usize;
            call < calls.len() && calls.thread[call] == ranges.thread[range]
                && ranges.start[range] <= calls.start[call] && calls.end[call] <= ranges.end[range]
        };
        let mut projected: BTreeMap<(StrId, RangeSource), (i64, i64, i64)> = BTreeMap::new();
        type Kernel = (StrId, RangeSource, u32, StrId);
        let mut kernels: BTreeMap<Kernel, (i64, i64, Vec<usize>)> = BTreeMap::new();
        for range in 0..ranges.len() {
            let mine: Vec<usize> = (0..ops.len()).filter(|&op| inside(range, op)).collect();
            let Some(start) = mine.iter().map(|&op| ops.start[op]).min() else { continue };
            let end = mine.iter().map(|&op| ops.end[op]).max().unwrap();
            let mut launches: Vec<u32> = mine.iter().map(|&op| ops.launch[op]).collect();
            launches.sort_unstable();
            launches.dedup();
            let sums = projected.entry((ranges.name[range], ranges.source[range])).or_default();
            *sums = (sums.0 + end - start, sums.1 + 1, sums.2 + launches.len() as i64);
            for op in mine {
                let key = (ranges.name[range], ranges.source[range], ranges.thread[range], ops.name[op]);
                let sums = kernels.entry(key).or_default();
                (sums.0, sums.1) = (sums.0 + 1, sums.1 + ops.duration(op));
                sums.2.push(range);
                sums.2.dedup();
            }
        }
        let cells = |name: &str, columns: &[usize]| -> Vec<Vec<String>> {
            let report = report(name, &trace).unwrap();
            let rows = report.sheets.first().map_or(&[][..], |s| &s.rows);
            let text = |value: &Value| match value {
                Value::Int(n) => n.to_string(),
                Value::Text(t) => t.clone(),
                other => format!("{other:?}"),
            };
            let mut rows: Vec<_> = rows.iter().map(|r| columns.iter().map(|&c| text(&r[c])).collect()).collect();
            rows.sort();
            rows
        };
        let label = |name: &StrId, source: &RangeSource| [format!(":{}", trace.text(*name)), format!("{source:?}")];
        let mut expected: Vec<Vec<String>> = projected.iter().map(|((name, source), sums)| {
            label(name, source).into_iter().chain([sums.0, sums.1, sums.2].map(|n| n.to_string())).collect()
        }).collect();
        expected.sort();
        prop_assert_eq!(cells("nvtx-gpu-proj-sum", &[0, 1, 2, 4, 10]), expected);
        let mut expected: Vec<Vec<String>> = kernels.iter().map(|((name, source, thread, kernel), sums)| {
            let counts = [i64::from(*thread) + 1, sums.2.len() as i64, sums.0, sums.1];
            let numbers = counts.map(|n| n.to_string());
            label(name, source).into_iter().chain(numbers).chain([trace.text(*kernel).to_owned()]).collect()
        }).collect();
        expected.sort();
        let mut inside = cells("nvtx-kern-sum", &[0, 1, 2, 4, 5, 6, 12]);
        inside.retain(|row| !row[0].is_empty()); // kernels outside of ranges have rows without one
        prop_assert_eq!(inside, expected);
    }
}
