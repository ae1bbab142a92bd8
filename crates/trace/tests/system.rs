//! What exports say of threads on CPUs and of unified memory, and that it survives the formats that can hold it.

use std::path::{Path, PathBuf};

use rusqlite::Connection;
use strobe_trace::export::{Format, write};
use strobe_trace::{CpuSample, Left, NONE, OnCpu, OpDetail, Trace, import};

fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("system");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    let _ = std::fs::remove_file(&path);
    path
}

fn read(path: &Path) -> Trace {
    import::read_files(&[path.to_owned()], &mut |_| {}).unwrap_or_else(|error| panic!("{error}"))
}

/// Tables as exports of Nsight Systems 2023 to 2025 have them. Process 7 is the program, process 9 another one.
fn export(name: &str) -> PathBuf {
    let path = scratch(name);
    let database = Connection::open(&path).unwrap();
    let program = 1_i64 << 48 | 7 << 24;
    let other = 1_i64 << 48 | 9 << 24;
    database
        .execute_batch(&format!(
            "CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
             INSERT INTO StringIds VALUES (1, 'k'), (2, 'cudaLaunchKernel_v7000'), (3, '0x7e7dabb9e4fa'), (4, 'fill_page'),
                 (5, 'main'), (6, '/home/someone/lib/libwork.so.2'), (7, '[Max depth]'), (8, 'touch');
             CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
                 streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
             INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (900, 1000, 0, 1, 7, 5, {program}, 1, 1);
             CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER,
                 correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
             INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (800, 850, 0, {main}, 5, 2, 0);
             CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
                 streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER,
                 dstKind INTEGER, srcDeviceId INTEGER, dstDeviceId INTEGER, migrationCause INTEGER);
             INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (910, 920, 0, 0, 0, 0, {program}, 4096, 11, 4, 4, NULL, 0, 2),
                 (930, 940, 0, 1, 7, 0, {program}, 64, 1, 0, 2, NULL, NULL, 0);
             CREATE TABLE SCHED_EVENTS (start INTEGER, cpu INTEGER, isSchedIn INTEGER, globalTid INTEGER, threadState INTEGER,
                 threadBlock INTEGER);
             INSERT INTO SCHED_EVENTS VALUES (100, 3, 1, {main}, 0, NULL), (200, 3, 0, {main}, 1, NULL),
                 (200, 3, 1, {other_thread}, 0, NULL), (260, 3, 0, {other_thread}, 7, NULL), (260, 3, 1, {main}, 0, NULL),
                 (700, 3, 0, {main}, 0, 8), (150, 1, 1, {worker}, NULL, NULL), (400, 1, 0, {worker}, NULL, NULL);
             CREATE TABLE COMPOSITE_EVENTS (id INTEGER NOT NULL PRIMARY KEY, start INTEGER NOT NULL, cpu INTEGER,
                 threadState INTEGER, globalTid INTEGER, cpuCycles INTEGER NOT NULL);
             INSERT INTO COMPOSITE_EVENTS VALUES (1, 120, 3, 1, {main}, 1), (2, 170, 1, 1, {worker}, 1),
                 (3, 230, 3, 1, {other_thread}, 1), (4, 300, 3, 1, {main}, 1);
             CREATE TABLE SAMPLING_CALLCHAINS (id INTEGER NOT NULL, symbol INTEGER NOT NULL, module INTEGER NOT NULL,
                 unresolved INTEGER, specialEntry INTEGER, stackDepth INTEGER NOT NULL, PRIMARY KEY (id, stackDepth));
             INSERT INTO SAMPLING_CALLCHAINS VALUES (1, 3, 6, 1, NULL, 0), (1, 4, 6, NULL, NULL, 1), (1, 5, 6, NULL, NULL, 2),
                 (1, 7, 6, NULL, 1, 3), (2, 3, 6, 1, NULL, 0), (2, 7, 6, NULL, 1, 1);
             CREATE TABLE CUDA_UM_CPU_PAGE_FAULT_EVENTS (start INTEGER, globalPid INTEGER, address INTEGER,
                 originalFaultPc INTEGER, CpuInstruction INTEGER, module INTEGER, unresolvedFaultPc INTEGER);
             INSERT INTO CUDA_UM_CPU_PAGE_FAULT_EVENTS VALUES (950, {program}, 4096, NULL, 8, 6, NULL);
             CREATE TABLE CUDA_UM_GPU_PAGE_FAULT_EVENTS (start INTEGER, end INTEGER, globalPid INTEGER, deviceId INTEGER,
                 address INTEGER, numberOfPageFaults INTEGER, faultAccessType INTEGER);
             INSERT INTO CUDA_UM_GPU_PAGE_FAULT_EVENTS VALUES (905, 915, {program}, 0, 8192, 12, 2);",
            main = program | 7,
            worker = program | 8,
            other_thread = other | 9,
        ))
        .unwrap();
    path
}

#[test]
fn switches_samples_and_faults_are_read() {
    let trace = read(&export("read.sqlite"));
    let tids: Vec<i64> = trace.threads.iter().map(|thread| thread.tid).collect();
    assert_eq!((tids, trace.processes.len()), (vec![7, 8], 1), "threads of the program, those without calls too");
    let on = |start, end, thread, cpu, left| OnCpu { start, end, thread, cpu, left };
    let expected = [
        on(100, 200, 0, 3, Left::Ready),
        on(260, 700, 0, 3, Left::Waiting),
        on(150, 400, 1, 1, Left::Unknown),
        on(200, 260, NONE, 3, Left::Waiting), // another program
    ];
    assert_eq!(trace.on_cpu, expected);
    let sample = |sample: &CpuSample| {
        let text = |id| trace.text(id).to_owned();
        (sample.time, sample.thread, text(sample.function), text(sample.module))
    };
    let samples: Vec<_> = trace.cpu_samples.iter().map(sample).collect();
    let named = |time, thread, function: &str| (time, thread, function.to_owned(), "libwork.so.2".to_owned());
    let unknown = (300, 0, String::new(), String::new());
    assert_eq!(samples, [named(120, 0, "fill_page"), named(170, 1, ""), unknown], "none of other programs");
    let faults: Vec<_> = trace.page_faults.iter().map(|f| (f.start, f.end, f.device, f.address, f.count)).collect();
    assert_eq!(faults, [(905, 915, Some(0), 8192, 12), (950, 950, None, 4096, 1)]);
    assert_eq!((trace.page_faults[0].access, trace.text(trace.page_faults[1].function)), (2, "touch"));
    let cause = |op: usize| match trace.detail_of(op) {
        Some(&OpDetail::Memcpy { cause, .. }) => Some(cause),
        _ => None,
    };
    assert_eq!([0, 1, 2].map(cause), [None, Some(2), Some(0)]);
    assert_eq!(trace.meta.sources[0].lost, 0);
    assert!(!trace.strings.iter().any(|(_, text)| text.contains("someone")), "directories are not kept");
}

#[test]
fn a_switch_without_its_other_half_is_said() {
    let path = export("half.sqlite");
    let database = Connection::open(&path).unwrap();
    database.execute_batch("DELETE FROM SCHED_EVENTS WHERE start = 200 AND isSchedIn = 0").unwrap();
    drop(database);
    let trace = read(&path);
    let own: Vec<(i64, i64)> = trace.on_cpu.iter().filter(|on| on.thread == 0).map(|on| (on.start, on.end)).collect();
    assert_eq!(own, [(100, 260), (260, 700)], "nothing says that it had no CPU");
    let said = "1 row of threads between CPUs without the other half: taken as running";
    assert!(trace.meta.notices.iter().any(|notice| notice == said), "{:?}", trace.meta.notices);
}

#[test]
fn they_come_back_from_sqlite_and_from_tables() {
    let mut trace = read(&export("there.sqlite"));
    trace.flows.push(strobe_trace::Flow { start: 1, end: 2, from: 0, to: 1 });
    for (format, name) in [(Format::NsysSqlite, "back.sqlite"), (Format::Parquet, "back.parquetdir")] {
        let path = scratch(name);
        let _ = std::fs::remove_dir_all(&path);
        write(&trace, format, &path).unwrap();
        let back = read(&path);
        assert_eq!(back.on_cpu, trace.on_cpu, "{name}");
        assert_eq!(back.flows, trace.flows, "{name}");
        let samples = |trace: &Trace| {
            let text = |id| trace.text(id).to_owned();
            trace.cpu_samples.iter().map(|s| (s.time, s.thread, text(s.function), text(s.module))).collect::<Vec<_>>()
        };
        assert_eq!(samples(&back), samples(&trace), "{name}");
        let faults = |trace: &Trace| {
            let of = |f: &strobe_trace::PageFault| {
                (f.start, f.end, f.process, f.device, f.address, f.count, f.access, trace.text(f.function).to_owned())
            };
            trace.page_faults.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(faults(&back), faults(&trace), "{name}");
        let details = |trace: &Trace| (0..trace.ops.len()).map(|op| trace.detail_of(op).copied()).collect::<Vec<_>>();
        assert_eq!(details(&back)[1..], details(&trace)[1..], "{name}");
    }
}
