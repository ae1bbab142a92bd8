//! Writing traces in Nsight Systems' schema: every number comes back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rusqlite::{Connection, OpenFlags};
use strobe_trace::{
    Allocation, CallKind, CallRow, Counter, Device, ExpertLoad, GraphMode, GraphNode, Iteration, KernelDetail, NONE,
    OpDetail, OpKind, OpRow, Peaks, Process, RangeKind, RangeRow, RangeSource, Source, StrId, Thread, Trace, Window,
    Work, import, nsys, range_flags,
};

fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nsys_write");
    std::fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

fn read(path: &Path) -> Trace {
    nsys::read(path, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// Everything a trace says, by table, independent of how names and details are numbered and of the order of equal times.
fn told(trace: &Trace) -> BTreeMap<&'static str, Vec<String>> {
    let text = |id: StrId| trace.text(id);
    let thread = |index: u32| trace.threads.get(index as usize).map(|t| (t.process, t.tid, t.name.as_str()));
    let call = |c: &CallRow| {
        format!("{:?}", (c.start, c.end, text(c.name), thread(c.thread), c.correlation, c.kind, c.result))
    };
    let detail = |index: u32| {
        trace.details.get(index as usize).map(|detail| match detail {
            OpDetail::Kernel(k) => {
                let rest = KernelDetail { short_name: StrId::NONE, ..*k };
                format!("{:?} {:?}", k.short_name.is_some().then(|| text(k.short_name)), rest)
            }
            other => format!("{other:?}"),
        })
    };
    let work = |index: u32| {
        let of = |w: &Work| format!("{:?}", (text(w.op), text(w.category), w.layer, w.shape, w.bytes, w.flops));
        trace.works.get(index as usize).map(of)
    };
    let op = |o: OpRow| {
        let launch = (o.launch != NONE).then(|| call(&trace.calls.get(o.launch as usize)));
        let place = (o.kind, o.device, o.stream, o.context, o.process, o.correlation, o.graph_node, o.bytes);
        format!("{:?}", (o.start, o.end, text(o.name), place, launch, detail(o.detail), work(o.work), o.iteration))
    };
    let range = |r: RangeRow| {
        let inputs = (text(r.dims), text(r.types), text(r.values), text(r.strides));
        let names = (text(r.name), text(r.domain), inputs);
        format!("{:?}", (r.start, r.end, names, thread(r.thread), r.source, r.kind, r.flags, r.iteration))
    };
    let allocation = |a: &Allocation| {
        let size = (a.bytes, a.total_allocated, a.total_reserved);
        format!("{:?}", (a.time, a.device, a.process, a.address, size, a.mem_kind, text(a.name)))
    };
    let counter = |c: &Counter| format!("{c:?}");
    let node = |n: &GraphNode| format!("{:?}", (n.node, n.original, n.start, n.end, thread(n.thread)));
    let meta = &trace.meta;
    let about = format!(
        "{:?}",
        (
            meta.session_start_utc_ns,
            &meta.producer,
            meta.graph_mode,
            meta.partial,
            &meta.windows,
            &meta.peaks,
            &meta.extra
        )
    );
    let mut tables = BTreeMap::from([
        ("ops", trace.ops.iter().map(op).collect()),
        ("calls", trace.calls.iter().map(|c| call(&c)).collect()),
        ("ranges", trace.ranges.iter().map(range).collect()),
        ("allocations", trace.allocations.iter().map(allocation).collect()),
        ("counters", trace.counters.iter().map(counter).collect()),
        ("graph nodes", trace.graph_nodes.iter().map(node).collect()),
        ("iterations", trace.iterations.iter().map(|i| format!("{i:?}")).collect()),
        ("expert loads", trace.expert_loads.iter().map(|load| format!("{load:?}")).collect()),
        ("meta", vec![about]),
    ]);
    tables.values_mut().for_each(|rows: &mut Vec<String>| rows.sort());
    // These refer to each other by number, so their order counts.
    tables.insert("devices", trace.devices.iter().map(|d| format!("{d:?}")).collect());
    tables.insert("processes", trace.processes.iter().map(|p| format!("{p:?}")).collect());
    tables.insert("threads", trace.threads.iter().map(|t| format!("{t:?}")).collect());
    tables.insert("notices", meta.notices.clone());
    tables
}

fn assert_same(found: &Trace, expected: &Trace, what: &str) {
    let (found, expected) = (told(found), told(expected));
    for (table, rows) in &expected {
        assert_eq!(found[table].len(), rows.len(), "{table} of {what}");
        for (found, expected) in found[table].iter().zip(rows) {
            assert_eq!(found, expected, "{table} of {what}");
        }
    }
}

/// Real files of other tools, Kineto's through the nsys schema included.
#[test]
fn real_traces_come_back() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        eprintln!("skipped: STROBE_TEST_DATA is not set");
        return;
    };
    let traces = Path::new(&data).join("traces");
    for file in [
        "nsys/h200/rep_sdpa.sqlite",
        "nsys/h200/node.sqlite",
        "nsys/h200/gpum.sqlite",
        "nsys/nsys-ai/mfu_2gpu_before.sqlite",
        "nsys/nsys-ai/h100_2gpu_1s.sqlite",
        "kineto/h200/kineto_graph.json.gz",
        "kineto/hta/sampled_rank-0.json.gz",
        "kineto/hta/ns_resolution_rank-0.json.gz",
        "kineto/hta/trace_diff_test.json.gz",
    ] {
        let before = import::read_files(&[traces.join(file)], &mut |_| {}).unwrap();
        let path = scratch(&format!("{}.sqlite", file.replace('/', "_")));
        nsys::write(&before, &path).unwrap();
        assert_same(&read(&path), &before, file);
        std::fs::remove_file(&path).unwrap();
    }
}

/// Two ranks become one file and keep their ranks.
#[test]
fn ranks_come_back() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        eprintln!("skipped: STROBE_TEST_DATA is not set");
        return;
    };
    let hta = Path::new(&data).join("traces/kineto/hta");
    let files = [hta.join("sampled_rank-0.json.gz"), hta.join("sampled_rank-1.json.gz")];
    let before = import::read_files(&files, &mut |_| {}).unwrap();
    let path = scratch("ranks.sqlite");
    nsys::write(&before, &path).unwrap();
    let after = read(&path);
    assert_same(&after, &before, "two ranks");
    assert_eq!(after.meta.sources.len(), 2);
    assert!(after.meta.sources.iter().zip(&before.meta.sources).all(|(a, b)| a.rank == b.rank));
}

/// Column names and types of every table.
fn schema(path: &Path) -> BTreeMap<String, Vec<(String, String)>> {
    let database = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    let mut names = database.prepare("SELECT name FROM sqlite_master WHERE type = 'table'").unwrap();
    let names: Vec<String> = names.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    let columns = |name: &str| -> Vec<(String, String)> {
        let query = format!(
            "SELECT name, type || CASE \"notnull\" WHEN 1 THEN ' NOT NULL' ELSE '' END \
                             FROM pragma_table_info('{name}')"
        );
        let mut query = database.prepare(&query).unwrap();
        query.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap().map(Result::unwrap).collect()
    };
    names.iter().map(|name| (name.clone(), columns(name))).collect()
}

#[test]
fn tables_have_the_columns_of_real_exports() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        eprintln!("skipped: STROBE_TEST_DATA is not set");
        return;
    };
    let mut compared = 0;
    for file in ["node", "gpum", "rep_sdpa"] {
        let real = Path::new(&data).join(format!("traces/nsys/h200/{file}.sqlite"));
        let path = scratch(&format!("schema_{file}.sqlite"));
        nsys::write(&read(&real), &path).unwrap();
        let (ours, theirs) = (schema(&path), schema(&real));
        for (table, columns) in ours.iter().filter(|(table, _)| !table.starts_with("STROBE_")) {
            assert_eq!(Some(columns), theirs.get(table), "{table} of {file}");
            compared += 1;
        }
    }
    assert!(compared > 50, "only {compared} tables were there to compare");
}

/// The queries that reports of other tools make still give the numbers of the original file.
#[test]
fn sql_over_a_written_file_gives_the_same_sums() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        eprintln!("skipped: STROBE_TEST_DATA is not set");
        return;
    };
    let real = Path::new(&data).join("traces/nsys/h200/node.sqlite");
    let path = scratch("sums.sqlite");
    nsys::write(&read(&real), &path).unwrap();
    for query in [
        "SELECT s.value, count(*), sum(k.end - k.start) FROM CUPTI_ACTIVITY_KIND_KERNEL k
         JOIN StringIds s ON s.id = k.demangledName GROUP BY 1 ORDER BY 1",
        "SELECT e.label, count(*), sum(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY m
         JOIN ENUM_CUDA_MEMCPY_OPER e ON e.id = m.copyKind GROUP BY 1 ORDER BY 1",
        "SELECT s.value, count(*), sum(r.end - r.start) FROM CUPTI_ACTIVITY_KIND_RUNTIME r
         JOIN StringIds s ON s.id = r.nameId GROUP BY 1 ORDER BY 1",
        "SELECT coalesce(s.value, n.text), n.eventType, n.end - n.start FROM NVTX_EVENTS n
         LEFT JOIN StringIds s ON s.id = n.textId ORDER BY n.start",
        "SELECT g.name, count(*), sum(k.registersPerThread * k.gridX) FROM CUPTI_ACTIVITY_KIND_KERNEL k
         JOIN TARGET_INFO_GPU g ON g.id = k.deviceId GROUP BY 1",
        "SELECT 'launched', count(*), count(DISTINCT r.rowid) FROM CUPTI_ACTIVITY_KIND_KERNEL k
         JOIN CUPTI_ACTIVITY_KIND_RUNTIME r
         ON r.correlationId = k.correlationId AND r.globalTid & ~0xFFFFFF = k.globalPid",
    ] {
        let answer = |path: &Path| -> Vec<(String, i64, i64)> {
            let database = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
            let mut statement = database.prepare(query).unwrap();
            let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).unwrap();
            rows.map(Result::unwrap).collect()
        };
        assert_eq!(answer(&path), answer(&real), "{query}");
        assert!(!answer(&real).is_empty());
    }
}

/// What the engine of an earlier strobe recorded.
#[test]
fn traces_of_format_version_1_are_read() {
    let path = scratch("version_1.sqlite");
    let _ = std::fs::remove_file(&path);
    Connection::open(&path)
        .unwrap()
        .execute_batch(
            "CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
             INSERT INTO StringIds VALUES (0, 'qkv_proj'), (1, 'gemm'), (2, 'gemm_f32'), (3, 'forward 4'), (4, 'main');
             CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
             INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1794711319973357605, '', NULL);
             CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL,
                 globalTid INTEGER, textId INTEGER, domainId INTEGER);
             INSERT INTO NVTX_EVENTS VALUES (10, 90, 59, 281474993487881, 3, 0), (20, 50, 59, 281474993487881, 0, 0);
             CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
             INSERT INTO PROCESSES VALUES (281474993487872, 1, 'strobe');
             CREATE TABLE ThreadNames (nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER);
             INSERT INTO ThreadNames VALUES (4, NULL, 281474993487881);
             CREATE TABLE STROBE_META (name TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL);
             INSERT INTO STROBE_META VALUES ('FORMAT_VERSION', '1'), ('PRODUCER', 'strobe 0.1.0'), ('PARTIAL', '0'),
                 ('STRINGS', '5'), ('OPS', '1'), ('RANGES', '1'), ('ITERATIONS', '1'), ('WINDOWS', '1'),
                 ('PEAK_FLOPS_PER_S', '100000000000.5'), ('PEAK_BYTES_PER_S', '20000000000'), ('PEAK_NOTE', 'measured'),
                 ('EXTRA:model', 'tiny');
             CREATE TABLE STROBE_OP (eventId INTEGER NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL,
                 globalTid INTEGER NOT NULL, nameId INTEGER NOT NULL, categoryId INTEGER NOT NULL,
                 kernelId INTEGER NOT NULL, layer INTEGER, iter INTEGER NOT NULL, m INTEGER NOT NULL,
                 n INTEGER NOT NULL, k INTEGER NOT NULL, bytes INTEGER NOT NULL, flops INTEGER NOT NULL);
             INSERT INTO STROBE_OP VALUES (2, 20, 50, 281474993487881, 0, 1, 2, 7, 4, 8, 16, 32, 1024, 8192);
             CREATE TABLE STROBE_RANGE (eventId INTEGER NOT NULL, kind TEXT NOT NULL, iter INTEGER);
             INSERT INTO STROBE_RANGE VALUES (1, 'forward_step', 4);
             CREATE TABLE STROBE_ITERATION (iter INTEGER NOT NULL, kind TEXT NOT NULL, start INTEGER NOT NULL,
                 end INTEGER NOT NULL, contextRequests INTEGER NOT NULL, generationRequests INTEGER NOT NULL,
                 contextTokens INTEGER NOT NULL, generationTokens INTEGER NOT NULL, window INTEGER NOT NULL);
             INSERT INTO STROBE_ITERATION VALUES (4, 'mixed', 5, 95, 1, 2, 100, 2, 0);
             CREATE TABLE STROBE_WINDOW (windowIndex INTEGER NOT NULL, firstIter INTEGER NOT NULL,
                 lastIter INTEGER NOT NULL, complete INTEGER NOT NULL);
             INSERT INTO STROBE_WINDOW VALUES (0, 4, 4, 1);",
        )
        .unwrap();
    let trace = read(&path);
    assert_eq!((trace.ops.len(), trace.ranges.len(), trace.iterations.len()), (1, 1, 1));
    let op = trace.ops.get(0);
    assert_eq!((op.kind, op.iteration, op.start, op.end, trace.text(op.name)), (OpKind::CpuOp, 4, 20, 50, "gemm_f32"));
    let work = trace.work_of(0).unwrap();
    assert_eq!((trace.text(work.op), trace.text(work.category)), ("qkv_proj", "gemm"));
    assert_eq!((work.layer, work.shape, work.bytes, work.flops), (Some(7), [8, 16, 32], 1024, 8192));
    assert_eq!(trace.threads[op.stream as usize], Thread { process: 0, tid: 9, name: "main".to_owned() });
    assert_eq!((trace.devices[0].name.as_str(), trace.devices[0].is_cpu), ("CPU", true));
    let range = trace.ranges.get(0);
    assert_eq!((trace.text(range.name), range.kind, range.iteration), ("forward 4", RangeKind::ForwardStep, 4));
    assert_eq!(trace.iterations[0].cpu_wait, None, "a file from before it was recorded");
    assert_eq!(trace.processes[0].name, "strobe");
    assert_eq!(trace.meta.producer, "strobe 0.1.0");
    assert_eq!(trace.meta.windows, [Window { index: 0, first: 4, last: 4, complete: true }]);
    assert_eq!(trace.meta.peaks.as_ref().map(|p| p.flops_per_s), Some(100_000_000_000.5));
    assert_eq!(trace.meta.extra["model"], "tiny");
    assert!(trace.meta.notices.is_empty(), "{:?}", trace.meta.notices);
}

#[test]
fn a_trace_that_refers_to_nothing_is_not_written() {
    let mut trace = Trace::default();
    trace.calls.push(CallRow {
        start: 0,
        end: 1,
        name: StrId::NONE,
        thread: 3,
        correlation: 0,
        kind: CallKind::Gpu,
        result: 0,
    });
    let path = scratch("invalid.sqlite");
    let _ = std::fs::remove_file(&path);
    let problem = nsys::write(&trace, &path).unwrap_err().to_string();
    assert!(problem.contains("calls[0].thread"), "{problem}");
    assert!(!path.exists());
    let nowhere = scratch("missing/folder/x.sqlite");
    assert!(nsys::write(&Trace::default(), &nowhere).unwrap_err().to_string().contains("cannot create"));
}

const NAMES: usize = 8;

fn name() -> impl Strategy<Value = StrId> {
    (0..NAMES as u32).prop_map(StrId)
}

fn maybe_name() -> impl Strategy<Value = StrId> {
    prop_oneof![1 => Just(StrId::NONE), 3 => name()]
}

fn number() -> impl Strategy<Value = u32> {
    prop_oneof![Just(NONE), 0..1000_u32]
}

fn time() -> impl Strategy<Value = i64> {
    prop_oneof![4 => -1_000_000..1_000_000_i64, 1 => 1_700_000_000_000_000_000..1_800_000_000_000_000_000_i64]
}

fn span() -> impl Strategy<Value = (i64, i64)> {
    (time(), 0..100_000_i64).prop_map(|(start, length)| (start, start + length))
}

/// Index of a detail in [`random_trace`]'s list, by kind of op.
fn op() -> impl Strategy<Value = OpRow> {
    let kind = prop_oneof![
        4 => Just(OpKind::Kernel),
        1 => Just(OpKind::Memcpy),
        1 => Just(OpKind::Memset),
        1 => Just(OpKind::Graph),
        1 => Just(OpKind::CpuOp)
    ];
    let place = (0..3_u32, 0..3_u32, any::<u32>(), 0..2_u32, prop_oneof![Just(0_i64), 1..20_i64, any::<i64>()]);
    (kind, span(), name(), place, any::<(u64, u64)>(), (any::<bool>(), prop_oneof![Just(NONE), 0..2_u32], number()))
        .prop_map(|(kind, (start, end), name, place, (graph_node, bytes), (known, work, iteration))| {
            let (device, stream, context, process, correlation) = place;
            let on_gpu = kind != OpKind::CpuOp;
            let detail = match kind {
                OpKind::Kernel => u32::from(name.0 % 2 == 0),
                OpKind::Memcpy => 2,
                OpKind::Memset => 3,
                OpKind::Graph => 4,
                OpKind::CpuOp => NONE,
            };
            OpRow {
                start,
                end,
                name,
                kind,
                device: if on_gpu { device } else { 3 },
                stream,
                context: if on_gpu { context } else { 0 },
                process: if on_gpu { process } else { stream % 2 },
                correlation: if on_gpu { correlation } else { 0 },
                launch: NONE,
                graph_node: if on_gpu && kind != OpKind::Graph { graph_node } else { 0 },
                bytes: if kind.is_memory() { bytes } else { 0 },
                detail: if known { detail } else { NONE },
                work,
                iteration,
            }
        })
}

fn call() -> impl Strategy<Value = CallRow> {
    let kind = prop_oneof![Just(CallKind::Gpu), Just(CallKind::OsRuntime), Just(CallKind::Profiler)];
    (span(), name(), 0..4_u32, prop_oneof![Just(0_i64), 1..20_i64, any::<i64>()], kind, any::<i32>()).prop_map(
        |((start, end), name, thread, correlation, kind, result)| {
            let result = if result % 3 == 0 { 0 } else { result };
            CallRow { start, end, name, thread, correlation, kind, result }
        },
    )
}

fn range() -> impl Strategy<Value = RangeRow> {
    let source = prop_oneof![
        Just(RangeSource::PushPop),
        Just(RangeSource::StartEnd),
        Just(RangeSource::Annotation),
        Just(RangeSource::GpuAnnotation),
        Just(RangeSource::CpuOp),
        Just(RangeSource::Python),
        Just(RangeSource::Other)
    ];
    let kind = prop_oneof![2 => Just(RangeKind::Other), 1 => Just(RangeKind::Layer), 1 => Just(RangeKind::Sample)];
    let flags = 0..=(range_flags::UNCLOSED | range_flags::CROSS_THREAD | range_flags::MARK);
    (span(), name(), 0..4_u32, maybe_name(), (source, kind, flags), number(), [(); 4].map(|()| maybe_name())).prop_map(
        |((start, end), name, thread, domain, (source, kind, flags), iteration, texts)| RangeRow {
            start,
            end,
            name,
            thread,
            domain,
            source,
            kind,
            flags,
            iteration,
            dims: texts[0],
            types: texts[1],
            values: texts[2],
            strides: texts[3],
        },
    )
}

fn allocation() -> impl Strategy<Value = Allocation> {
    let kind = prop_oneof![0..8_u8, Just(255_u8)];
    let totals = (any::<Option<u64>>(), any::<Option<u64>>());
    (
        time(),
        proptest::option::of(0..3_u32),
        0..2_u32,
        any::<u64>(),
        -1_000_000..1_000_000_i64,
        kind,
        maybe_name(),
        totals,
    )
        .prop_map(|(time, device, process, address, bytes, mem_kind, name, (total_allocated, total_reserved))| {
            Allocation { time, device, process, address, bytes, mem_kind, name, total_allocated, total_reserved }
        })
}

fn counter() -> impl Strategy<Value = Counter> {
    let value = prop_oneof![(-1_000_000..1_000_000_i64).prop_map(|v| v as f64), -1e12..1e12_f64];
    let samples = proptest::collection::vec((time(), value), 1..20);
    ("[a-z %]{1,12}", proptest::option::of(0..4_u32), samples).prop_map(|(name, device, mut samples)| {
        samples.sort_by_key(|(time, _)| *time);
        let (times, values) = samples.into_iter().unzip();
        Counter { name, device, times, values }
    })
}

fn events() -> impl Strategy<Value = Trace> {
    let node = (any::<(u64, u64)>(), span(), 0..4_u32).prop_map(|((node, original), (start, end), thread)| GraphNode {
        node,
        original,
        start,
        end,
        thread,
    });
    let iteration =
        (0..100_u64, span(), any::<[u32; 5]>()).prop_map(|(iter, (start, end), [a, b, c, d, window])| Iteration {
            iter,
            start,
            end,
            context_requests: a,
            generation_requests: b,
            context_tokens: c,
            generation_tokens: d,
            window,
            cpu_wait: (a % 2 == 0).then_some(i64::from(b)),
        });
    let expert_load = (0..100_u64, any::<[u32; 3]>()).prop_map(|(iter, [layer, expert, tokens])| ExpertLoad {
        iter,
        layer,
        expert,
        tokens,
    });
    (
        proptest::collection::vec(op(), 0..40),
        proptest::collection::vec(call(), 0..40),
        proptest::collection::vec(range(), 0..40),
        proptest::collection::vec(allocation(), 0..10),
        proptest::collection::vec(counter(), 0..4),
        proptest::collection::vec(node, 0..10),
        (proptest::collection::vec(iteration, 0..5), proptest::collection::vec(expert_load, 0..10)),
    )
        .prop_map(|(ops, calls, ranges, allocations, counters, graph_nodes, (iterations, expert_loads))| {
            let mut trace = Trace { allocations, counters, graph_nodes, iterations, expert_loads, ..Trace::default() };
            ops.into_iter().for_each(|row| trace.ops.push(row));
            calls.into_iter().for_each(|row| trace.calls.push(row));
            ranges.into_iter().for_each(|row| trace.ranges.push(row));
            trace
        })
}

/// Lists that random events refer to, awkward ones among them: ids too large for a global id, twice the same number.
fn random_trace() -> impl Strategy<Value = Trace> {
    let text = proptest::collection::hash_set(".{0,20}", NAMES);
    let about = (any::<Option<i64>>(), any::<bool>(), proptest::option::of((0.0..1e15_f64, 0.0..1e13_f64)), 0..3_u8);
    let ids = (proptest::array::uniform2(any::<i64>()), proptest::array::uniform4(any::<i64>()));
    (events(), text, about, ids).prop_map(|(mut trace, texts, (start, partial, peaks, mode), (pids, tids))| {
        for text in texts {
            trace.strings.intern(&text.replace('\0', "0"));
        }
        let kernel = |short_name| {
            OpDetail::Kernel(KernelDetail {
                short_name,
                grid: [u32::MAX, 2, 3],
                block: [4, 5, 6],
                registers: 7,
                static_shared: 8,
                dynamic_shared: 9,
            })
        };
        trace.details = vec![
            kernel(StrId::NONE),
            kernel(StrId(1)),
            OpDetail::Memcpy {
                copy_kind: 11,
                src_kind: 255,
                dst_kind: 2,
                src_device: None,
                dst_device: Some(3),
                cause: 2,
            },
            OpDetail::Memset { value: u32::MAX, mem_kind: 2 },
            OpDetail::Graph { graph: 5, exec: u32::MAX },
        ];
        let work = |layer| Work {
            op: StrId(2),
            category: StrId(3),
            layer,
            shape: [1, u64::MAX, 3],
            bytes: u64::MAX,
            flops: 5,
        };
        trace.works = vec![work(None), work(Some(3))];
        let gpu = Device { name: "GPU".to_owned(), bytes_per_s: Some(4.8e12), ..Device::default() };
        let cpu = Device { name: "CPU".to_owned(), is_cpu: true, memory_bytes: Some(u64::MAX), ..Device::default() };
        trace.devices =
            vec![gpu.clone(), Device { source: 1, ..gpu.clone() }, Device { ordinal: u32::MAX, ..gpu }, cpu];
        let process = |pid, source| Process { pid, name: "p".to_owned(), rank: Some(u32::from(source)), source };
        trace.processes = vec![process(pids[0], 0), process(pids[1], 1)];
        let thread = |(index, tid): (usize, i64)| Thread { process: index as u32 % 2, tid, name: format!("t{tid}") };
        trace.threads = tids.into_iter().enumerate().map(thread).collect();
        for allocation in trace.allocations.iter_mut().filter(|a| a.name.is_some()) {
            allocation.name = StrId(allocation.name.0 % NAMES as u32);
        }
        let meta = &mut trace.meta;
        meta.session_start_utc_ns = start;
        meta.partial = partial;
        meta.producer = "test 1".to_owned();
        meta.peaks = peaks.map(|(flops_per_s, bytes_per_s)| Peaks {
            flops_per_s,
            int8_ops_per_s: partial.then_some(bytes_per_s),
            bf16_flops_per_s: (!partial).then_some(bytes_per_s),
            bytes_per_s,
            note: "n".to_owned(),
        });
        meta.graph_mode = [None, Some(GraphMode::Graph), Some(GraphMode::Node)][usize::from(mode)];
        meta.windows = vec![Window { index: 1, first: 2, last: u64::MAX, complete: partial }];
        meta.extra.insert("key".to_owned(), "value".to_owned());
        meta.sources = vec![Source::default(), Source { rank: Some(1), ..Source::default() }];
        meta.notices = vec!["something".to_owned(), "something else".to_owned()];
        trace.finish();
        trace
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_number_comes_back(trace in random_trace()) {
        let path = scratch("random.sqlite");
        nsys::write(&trace, &path).unwrap();
        let mut after = read(&path);
        // Where the file has graphs or nodes but nobody said how graphs were recorded, that is told by the rows.
        if trace.meta.graph_mode.is_none() {
            after.meta.graph_mode = None;
        }
        after.meta.notices.retain(|notice| !notice.contains("no GPU rows"));
        assert_same(&after, &trace, "random trace");
    }
}
