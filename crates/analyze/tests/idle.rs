//! Why devices wait: every idle moment has one cause, causes add up to the idle time, and they are those that are known
//! to hold a device up.

mod synthetic;

use proptest::prelude::*;
use strobe_analyze::Context;
use strobe_analyze::budget::{Part, device_budgets};
use strobe_analyze::categories::{Categories, Rules};
use strobe_analyze::gaps::{gaps, report};
use strobe_analyze::host::{Evidence, IdleCause};
use strobe_analyze::iterations::Detected;
use strobe_analyze::sheet::Value;
use strobe_trace::{CallKind, CpuSample, Flow, Left, NONE, OnCpu, OpDetail, RangeSource, StrId, Thread, Trace};
use synthetic::{Builder, context, read, real_data};

/// Two kernels that are called one millisecond and `pause` apart; the device idles in between.
fn pause(pause: i64) -> Builder {
    let mut builder = Builder::new();
    builder.launch("a", (0, 5_000), (6_000, 10_000));
    let at = 10_000 + pause;
    builder.launch("b", (at, at + 5_000), (at + 6_000, at + 10_000));
    builder
}

/// Puts the last range or call on another thread.
fn elsewhere(builder: &mut Builder, thread: u32) {
    while builder.trace.threads.len() <= thread as usize {
        let tid = 1 + builder.trace.threads.len() as i64;
        builder.trace.threads.push(Thread { process: 0, tid, ..Thread::default() });
    }
    *builder.trace.ranges.thread.last_mut().unwrap() = thread;
}

fn causes(trace: &Trace) -> Vec<IdleCause> {
    // What a device waits for does not hang on iterations.
    let categories = Categories::of(trace, &Rules::default());
    let iterations = Detected { of_op: vec![NONE; trace.ops.len()], ..Detected::default() };
    let context = Context::with(trace, categories, iterations);
    let found = context.idle_causes().to_vec();
    for device in gaps(&context, 3) {
        let sum: i64 = found.iter().filter(|c| c.device == device.device).map(|c| c.time_ns).sum();
        assert_eq!(sum, device.all.time_ns, "causes add up to the idle time");
    }
    found
}

/// Class, name, thread and time of the largest cause.
fn largest(builder: &mut Builder) -> (&'static str, String, Option<u32>, i64) {
    let found = causes(&builder.build());
    let cause = &found[0];
    (cause.class.as_str(), cause.name.clone().unwrap_or_default(), cause.thread, cause.time_ns)
}

#[test]
fn a_data_loader_is_named_whatever_runs_inside_it() {
    let mut builder = pause(1_000_000);
    builder.range(RangeSource::Annotation, "ProfilerStep#1", 0, 2_000_000);
    let name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__";
    builder.range(RangeSource::CpuOp, name, 20_000, 920_000);
    builder.range(RangeSource::CpuOp, "aten::stack", 500_000, 900_000);
    builder.call("cudaHostAlloc", 600_000, 700_000, 0);
    assert_eq!(largest(&mut builder), ("data loading", name.to_owned(), Some(0), 900_000));
}

#[test]
fn a_call_of_the_launching_thread_is_named() {
    let mut builder = pause(1_000_000);
    builder.range(RangeSource::CpuOp, "aten::empty", 20_000, 990_000);
    builder.call("cudaMalloc_v3020", 30_000, 980_000, 0);
    assert_eq!(largest(&mut builder), ("allocation", "cudaMalloc".to_owned(), Some(0), 950_000));
}

#[test]
fn work_of_another_thread_is_named_while_the_launching_thread_sleeps() {
    let tokenize = |from, to| {
        let mut builder = pause(1_000_000);
        builder.range(RangeSource::Annotation, "ProfilerStep#1", 0, 2_000_000);
        builder.range(RangeSource::Annotation, "tokenize_batch", from, to);
        elsewhere(&mut builder, 1);
        builder
    };
    let mut builder = tokenize(20_000, 990_000);
    assert_eq!(largest(&mut builder), ("tokenizing", "tokenize_batch".to_owned(), Some(1), 970_000));
    assert_eq!(causes(&builder.build())[0].evidence, Evidence::OtherThread);
    // It goes on long after the device works again: nobody waited for it.
    assert_eq!(largest(&mut tokenize(-500_000, 1_500_000)).0, "unknown");
    // The launching thread is in a range of its own.
    let mut busy = tokenize(20_000, 990_000);
    busy.range(RangeSource::CpuOp, "aten::sort", 15_000, 995_000);
    assert_eq!(largest(&mut busy).1, "aten::sort");
    // It sleeps in a function of the system.
    let mut asleep = tokenize(20_000, 990_000);
    asleep.call("sem_wait", 12_000, 1_005_000, 0);
    *asleep.trace.calls.kind.last_mut().unwrap() = CallKind::OsRuntime;
    assert_eq!(largest(&mut asleep).1, "tokenize_batch");
}

#[test]
fn a_wait_is_named_where_nobody_is_seen_to_be_waited_for() {
    let mut builder = pause(1_000_000);
    builder.call("pthread_cond_wait", 12_000, 1_005_000, 0);
    *builder.trace.calls.kind.last_mut().unwrap() = CallKind::OsRuntime;
    let found = largest(&mut builder);
    assert_eq!((found.0, found.1.as_str()), ("waiting for a thread", "pthread_cond_wait"));
}

#[test]
fn without_evidence_the_cause_is_unknown() {
    let found = largest(&mut pause(1_000_000));
    assert_eq!((found.0, found.1.as_str(), found.3), ("unknown", "", 1_000_000));
    // What is short is the time between two calls.
    assert_eq!(largest(&mut pause(100_000)).0, "between calls");
}

/// A thread that had a CPU in these times, and left it so.
fn on_cpu(builder: &mut Builder, thread: u32, times: &[(i64, i64, Left)]) {
    let on = |&(start, end, left)| OnCpu { start, end, thread, cpu: 3, left };
    builder.trace.on_cpu.extend(times.iter().map(on));
    while builder.trace.threads.len() <= thread as usize {
        let tid = 1 + builder.trace.threads.len() as i64;
        builder.trace.threads.push(Thread { process: 0, tid, ..Thread::default() });
    }
}

#[test]
fn a_thread_without_a_cpu_is_told_from_one_that_computes() {
    use Left::{Ready, Unknown};
    let lost = |left| {
        let mut builder = pause(1_000_000);
        builder.range(RangeSource::CpuOp, "aten::sort", 15_000, 1_005_000);
        on_cpu(&mut builder, 0, &[(-10_000, 100_000, left), (900_000, 1_200_000, Unknown)]);
        on_cpu(&mut builder, 1, &[(100_000, 700_000, Unknown)]);
        builder
    };
    for (left, class) in [(Ready, "waiting for a CPU"), (Unknown, "switched out")] {
        let mut builder = lost(left);
        assert_eq!(largest(&mut builder), (class, "aten::sort".to_owned(), Some(0), 800_000));
        let trace = builder.build();
        let found = causes(&trace);
        assert_eq!(found[0].evidence, Evidence::Switches);
        let rest: i64 = found.iter().filter(|cause| cause.class.as_str() == "host code").map(|c| c.time_ns).sum();
        assert_eq!(rest, 85_000 + 105_000, "before and after it computes");
        let told = report(&context(&trace));
        let sheet = told.sheets.iter().find(|sheet| sheet.name == "cpu").unwrap();
        let row = |row: &Vec<Value>| (row[1].clone(), row[2].clone(), row[4].clone());
        let expected = [(class, "2", 600_000), (class, "nobody that was recorded", 200_000)];
        let expected = expected.map(|(class, who, ns): (_, _, i64)| (class.into(), who.into(), ns.into()));
        assert_eq!(sheet.rows.iter().map(row).collect::<Vec<_>>(), expected);
    }
    // Nothing is known before the first switch and after the last.
    let mut builder = pause(1_000_000);
    on_cpu(&mut builder, 0, &[(2_000_000, 3_000_000, Ready)]);
    assert_eq!(largest(&mut builder).0, "unknown");
}

#[test]
fn what_a_thread_computes_that_records_nothing_is_told_by_samples() {
    let silent = |on: bool, samples: &[i64]| {
        let mut builder = pause(3_000_000);
        if on {
            on_cpu(&mut builder, 0, &[(-10_000, 4_000_000, Left::Unknown)]);
        }
        let function = builder.name("augment");
        let sample = |&time: &i64| CpuSample { time, thread: 0, function, module: StrId::NONE };
        builder.trace.cpu_samples.extend(samples.iter().map(sample));
        builder
    };
    let every_half: Vec<i64> = (0..6).map(|i| 100_000 + i * 500_000).collect();
    let mut sampled = silent(true, &every_half);
    assert_eq!(largest(&mut sampled), ("host code", "augment".to_owned(), Some(0), 3_000_000));
    assert_eq!(causes(&sampled.build())[0].evidence, Evidence::Samples);
    // Without switches, samples at the usual distance say that it ran.
    assert_eq!(largest(&mut silent(false, &every_half)).1, "augment");
    // One of many does not: it slept most of the time.
    let mut asleep: Vec<i64> = (0..20).map(|i| 5_000_000 + i * 100_000).collect();
    asleep.push(500_000);
    assert_eq!(largest(&mut silent(false, &asleep)).0, "unknown");
    let mut unsampled = silent(true, &[]);
    let found = largest(&mut unsampled);
    assert_eq!((found.0, found.1.as_str(), found.3), ("host code", "", 3_000_000));
    assert_eq!(causes(&unsampled.build())[0].evidence, Evidence::Switches);
}

#[test]
fn the_host_that_works_on_unified_memory_is_named() {
    let moved = |copy_kind, cause| {
        let mut builder = pause(1_000_000);
        builder.copy([copy_kind, 4, 4], 4096, 600_000, 620_000, 0);
        *builder.trace.details.last_mut().unwrap() =
            OpDetail::Memcpy { copy_kind, src_kind: 4, dst_kind: 4, src_device: None, dst_device: None, cause };
        builder
    };
    let found = largest(&mut moved(12, 2));
    assert_eq!((found.0, found.3), ("unified memory", 590_000));
    for (kind, cause) in [(12, 1), (11, 2), (2, 0)] {
        let found = causes(&moved(kind, cause).build());
        assert!(found.iter().all(|cause| cause.class.as_str() != "unified memory"), "{kind} {cause}");
    }
}

#[test]
fn autograds_flow_says_whom_a_sleeping_thread_waits_for() {
    let backward = |flow: bool| {
        let mut builder = pause(2_000_000);
        builder.range(RangeSource::CpuOp, "autograd::engine::evaluate_function: MmBackward0", 30_000, 1_900_000);
        elsewhere(&mut builder, 1);
        // A loader works ahead at the same time.
        builder.range(RangeSource::Annotation, "load_batch", 20_000, 1_990_000);
        elsewhere(&mut builder, 2);
        if flow {
            builder.trace.flows.push(Flow { start: -1_000, end: 30_000, from: 0, to: 1 });
        }
        builder
    };
    assert_eq!(largest(&mut backward(false)).0, "data loading");
    let mut builder = backward(true);
    let found = largest(&mut builder);
    assert_eq!((found.2, found.3), (Some(1), 1_870_000));
    assert!(found.1.contains("MmBackward0"), "{}", found.1);
    assert_eq!(causes(&builder.build())[0].evidence, Evidence::Flow);
    // What is busy once the backward pass is over may be waited for.
    builder.range(RangeSource::Annotation, "tokenize_batch", 1_910_000, 1_995_000);
    elsewhere(&mut builder, 3);
    builder.trace.ranges.end[0] = 1_000_000; // the loader is done
    let after: Vec<_> = causes(&builder.build()).into_iter().filter(|c| c.class.as_str() == "tokenizing").collect();
    assert_eq!(after.iter().map(|cause| cause.time_ns).sum::<i64>(), 85_000);
    // Work for another thread says nothing of this one.
    let mut of_another = backward(false);
    of_another.trace.flows.push(Flow { start: -1_000, end: 30_000, from: 2, to: 1 });
    assert_eq!(largest(&mut of_another).0, "data loading");
}

#[test]
fn an_autograd_thread_that_sleeps_is_not_the_cause() {
    // The main thread calls the backward pass; a worker launches; the main thread frees memory while the worker sleeps.
    let mut builder = pause(2_000_000);
    builder.range(RangeSource::Annotation, "## backward ##", 0, 3_000_000);
    builder.trace.threads.push(Thread { process: 0, tid: 2, ..Thread::default() });
    builder.trace.calls.thread.fill(1);
    builder.call("hipFree", 20_000, 1_520_000, 0);
    let found = causes(&builder.build());
    let named: Vec<_> = found.iter().take(2).map(|c| (c.class.as_str(), c.name.as_deref(), c.thread)).collect();
    assert_eq!(named[0], ("free", Some("hipFree"), Some(0)));
    assert_eq!(named[1], ("unknown", Some("## backward ##"), Some(0)));
    assert_eq!(found[1].evidence, Evidence::Around);
}

#[test]
fn names_that_differ_in_numbers_are_one_cause() {
    let mut builder = Builder::new();
    for i in 0..4 {
        let at = i * 1_000_000;
        builder.range(RangeSource::PushPop, &format!("load_batch {i}"), at - 900_000, at - 10_000);
        builder.launch("k", (at, at + 5_000), (at + 6_000, at + 10_000));
    }
    let found = largest(&mut builder);
    assert_eq!((found.1.as_str(), found.3), ("load_batch N", 3 * 890_000));
}

fn random_trace() -> impl Strategy<Value = Trace> {
    let names = ["cudaLaunchKernel", "cudaStreamSynchronize", "sem_wait", "cudaMalloc", "read"];
    let labels = ["load_batch", "aten::add", "Python GC", "ProfilerStep#1", "run_backward", "forward"];
    let call = (0usize..names.len(), 0i64..3_000, 0i64..400, 0u32..3, 0i64..20);
    let op = (0i64..3_000, 0i64..100, 0u32..2, 0i64..20);
    let range = (0usize..labels.len(), 0i64..3_000, 0i64..900, 0u32..3, any::<bool>());
    let lists =
        (prop::collection::vec(call, 0..25), prop::collection::vec(op, 1..25), prop::collection::vec(range, 0..20));
    lists.prop_map(move |(calls, ops, ranges)| {
        const US: i64 = 1_000;
        let mut builder = Builder::new();
        for tid in 2..4 {
            builder.trace.threads.push(Thread { process: 0, tid, ..Thread::default() });
        }
        for (name, start, length, thread, correlation) in calls {
            builder.call(names[name], start * US, (start + length) * US, correlation);
            *builder.trace.calls.thread.last_mut().unwrap() = thread;
            if name == 2 || name == 4 {
                *builder.trace.calls.kind.last_mut().unwrap() = CallKind::OsRuntime;
            }
        }
        for (start, length, stream, correlation) in ops {
            builder.op(strobe_trace::OpKind::Kernel, "k", stream, start * US, (start + length) * US, correlation);
        }
        for (name, start, length, thread, operator) in ranges {
            let source = if operator { RangeSource::CpuOp } else { RangeSource::StartEnd };
            builder.range(source, labels[name], start * US, (start + length) * US);
            *builder.trace.ranges.thread.last_mut().unwrap() = thread;
        }
        builder.build()
    })
}

proptest! {
    #[test]
    fn causes_add_up_to_the_idle_time_of_any_trace(trace in random_trace()) {
        for cause in causes(&trace) {
            prop_assert!(cause.time_ns > 0 && cause.long_ns <= cause.time_ns && cause.longest_ns <= cause.time_ns);
            prop_assert!(cause.between_ns <= cause.time_ns && cause.gaps > 0);
        }
    }
}

/// The captures whose causes are known: `truth.json` names them and says how long the device idles in them.
#[test]
fn known_causes_are_named_with_their_time() {
    let Some(folder) = real_data().map(|data| data.join("truth")) else { return };
    let truth: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("truth.json")).unwrap()).unwrap();
    let mut seen = 0;
    for file in truth["files"].as_array().unwrap().iter().filter(|file| !file["idle"].is_null()) {
        let name = file["file"].as_str().unwrap();
        let trace = read(&[folder.join(name)]);
        let context = context(&trace);
        let idle = &file["idle"];
        let names: Vec<&str> = idle["names"].as_array().unwrap().iter().filter_map(|name| name.as_str()).collect();
        let report = report(&context);
        let sheet = report.sheets.iter().find(|sheet| sheet.name == "host").unwrap();
        let column = |name: &str| sheet.columns.iter().position(|column| column.name == name).unwrap();
        let (time, text) = (column("time"), column("range or call"));
        if std::env::var_os("STROBE_TEST_PRINT").is_some() {
            println!("{name}");
            for row in sheet.rows.iter().take(12) {
                println!("    {row:?}");
            }
        }
        let (mut of_name, mut all) = (0, 0);
        for row in &sheet.rows {
            let (Value::Int(ns), text) = (&row[time], &row[text]) else { panic!("{row:?}") };
            all += ns;
            if matches!(text, Value::Text(text) if names.iter().any(|name| text.contains(name))) {
                of_name += ns;
            }
        }
        let near = |found: i64, known: &serde_json::Value, share: f64| {
            let known = known.as_f64().unwrap();
            assert!((found as f64 / 1e6 - known).abs() <= share * known, "{name}: {found} ns, known {known} ms");
        };
        near(of_name, &idle["idle_in_cause_ms"], 0.02);
        near(all, &idle["total_idle_ms"], 0.001);
        seen += 1;
    }
    assert!(seen >= 7);
}

/// A worker launches; it waits for the interpreter lock while another thread holds it and tokenizes, then collects garbage.
fn python() -> Builder {
    let mut builder = pause(2_000_000);
    builder.range(RangeSource::PushPop, "Waiting for GIL", 20_000, 1_020_000);
    builder.range(RangeSource::StartEnd, "Python GC (generation 2)", 1_100_000, 1_400_000);
    builder.range(RangeSource::PushPop, "Holding GIL", -500_000, 1_020_000);
    elsewhere(&mut builder, 1);
    builder.range(RangeSource::PushPop, "tokenize", -400_000, 1_010_000);
    elsewhere(&mut builder, 1);
    builder
}

#[test]
fn waits_for_the_interpreter_lock_and_collections_are_causes_and_parts_of_the_budget() {
    let trace = python().build();
    let found = causes(&trace);
    let named: Vec<_> = found.iter().map(|c| (c.class.as_str(), c.name.as_deref(), c.time_ns)).collect();
    assert!(named.contains(&("waiting for the GIL", Some("Waiting for GIL"), 1_000_000)), "{named:?}");
    assert!(named.contains(&("garbage collection", Some("Python GC (generation 2)"), 300_000)), "{named:?}");
    let categories = Categories::of(&trace, &Rules::default());
    let iterations = Detected { of_op: vec![NONE; trace.ops.len()], ..Detected::default() };
    let context = Context::with(&trace, categories, iterations);
    let parts = &device_budgets(&context)[0].parts;
    assert!(parts.contains(&(Part::Gil, 1_000_000)) && parts.contains(&(Part::Gc, 300_000)), "{parts:?}");
    let report = report(&context);
    let row = |name: &str| report.sheets.iter().find(|sheet| sheet.name == name).unwrap().rows[0].clone();
    let gil = row("gil");
    assert_eq!(gil[..2], [Value::Text("1".into()), Value::Text("2".into())]);
    assert_eq!((&gil[3], &gil[7]), (&Value::Int(1_000_000), &Value::Text("tokenize".into())));
    let gc = row("gc");
    assert_eq!((&gc[1], &gc[2], &gc[3]), (&Value::Int(2), &Value::Int(1), &Value::Int(300_000)));
}

#[test]
fn causes_add_up_on_every_real_trace() {
    let Some(data) = real_data() else { return };
    for file in synthetic::all_traces(&data) {
        let trace = read(std::slice::from_ref(&file));
        let found = causes(&trace);
        if std::env::var_os("STROBE_TEST_PRINT").is_none() {
            continue;
        }
        println!("{}", file.display());
        for cause in found.iter().take(8) {
            let (ms, name) = (cause.time_ns as f64 / 1e6, cause.name.as_deref().unwrap_or(""));
            let (class, who) = (cause.class.as_str(), cause.evidence.as_str());
            println!("    {ms:9.3} ms  {class}  {name}  thread {:?}, {who}", cause.thread);
        }
    }
}
