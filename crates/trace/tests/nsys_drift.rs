//! Other versions of the schema, other orders, and broken files.

use std::path::{Path, PathBuf};

use rusqlite::Connection;
use strobe_trace::{CallKind, GraphMode, Trace, TraceError, nsys, range_flags};

/// A copy of a real export that may be changed.
fn copy(file: &str, name: &str) -> Option<PathBuf> {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        eprintln!("skipped: STROBE_TEST_DATA is not set");
        return None;
    };
    let path = scratch(name);
    let bytes = std::fs::read(Path::new(&data).join("traces/nsys").join(file)).unwrap();
    std::fs::write(&path, bytes).unwrap();
    Some(path)
}

fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nsys_drift");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    let _ = std::fs::remove_file(&path);
    path
}

fn change(path: &Path, sql: &str) {
    Connection::open(path).unwrap().execute_batch(sql).unwrap_or_else(|e| panic!("{sql}: {e}"));
}

fn try_read(path: &Path) -> Result<Trace, TraceError> {
    nsys::read(path, &mut |_, _| {})
}

fn read(path: &Path) -> Trace {
    try_read(path).unwrap_or_else(|e| panic!("{e}"))
}

fn problem(path: &Path) -> String {
    try_read(path).map(|trace| trace.meta.producer).unwrap_err().to_string()
}

/// Ops and calls as text, in an order that does not depend on that of the file.
fn events(trace: &Trace) -> Vec<String> {
    let launch = |i: usize| trace.launch_of(i).map(|call| (call.start, trace.text(call.name)));
    let ops = (0..trace.ops.len()).map(|i| {
        let op = trace.ops.get(i);
        let place = (op.device, op.stream, op.process, op.correlation, op.bytes);
        format!("{:?}", (op.start, op.end, trace.text(op.name), op.kind, place, launch(i)))
    });
    let calls = trace.calls.iter().map(|c| format!("{:?}", (c.start, c.end, trace.text(c.name), c.thread, c.kind)));
    let ranges = trace.ranges.iter().map(|r| format!("{:?}", (r.start, r.end, trace.text(r.name), r.thread, r.flags)));
    let mut all: Vec<String> = ops.chain(calls).chain(ranges).collect();
    all.sort();
    all
}

/// As Nsight Systems 2022.1 exports: fewer tables, fewer columns, another name for the facts.
const AS_2_9_1: &str = "
    ALTER TABLE META_DATA_EXPORT RENAME TO EXPORT_META_DATA;
    UPDATE EXPORT_META_DATA SET value = '2.9.1' WHERE name = 'EXPORT_SCHEMA_VERSION';
    DROP TABLE META_DATA_CAPTURE;
    DROP TABLE DIAGNOSTIC_EVENT;
    DROP TABLE TARGET_INFO_GPU;
    DROP TABLE TARGET_INFO_CUDA_DEVICE;
    DROP TABLE ENUM_CUDA_MEMCPY_OPER;
    DROP TABLE ENUM_NSYS_EVENT_TYPE;
    ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN greenContextId;
    ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN graphNodeId;
    ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN copyCount;
    ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN greenContextId;
    ALTER TABLE NVTX_EVENTS DROP COLUMN binaryData;";

#[test]
fn an_old_schema_gives_the_same_events() {
    let Some(path) = copy("h200/node.sqlite", "old.sqlite") else { return };
    let before = read(&path);
    change(&path, AS_2_9_1);
    let after = read(&path);
    assert_eq!(events(&after), events(&before));
    assert_eq!(after.meta.sources[0].format, "Nsight Systems SQLite, schema 2.9.1");
    assert_eq!(after.meta.graph_mode, None);
    assert_eq!((after.devices[0].name.as_str(), after.devices[0].bytes_per_s), ("", None));
    assert!(after.ops.graph_node.iter().all(|node| *node == 0));

    change(&path, "DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY; DROP TABLE NVTX_EVENTS; DROP TABLE OSRT_API;");
    let less = read(&path);
    assert_eq!(less.ops.len(), after.ops.len() - 24);
    assert!(less.ranges.is_empty() && less.calls.iter().all(|call| call.kind != CallKind::OsRuntime));
}

#[test]
fn a_newer_schema_gives_the_same_events() {
    let Some(path) = copy("nsys-ai/mfu_2gpu_before.sqlite", "new.sqlite") else { return };
    let before = read(&path);
    change(
        &path,
        "CREATE TABLE SOMETHING_NEW (a INTEGER, b BLOB);
         INSERT INTO SOMETHING_NEW VALUES (1, x'00ff');
         ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN tomorrow INTEGER;
         ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN dayAfter INTEGER NOT NULL DEFAULT 5;
         ALTER TABLE NVTX_EVENTS ADD COLUMN eventId INTEGER;
         UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET tomorrow = 1 << 40 WHERE rowid % 3 = 0;
         UPDATE META_DATA_EXPORT SET value = '3.28.0' WHERE name = 'EXPORT_SCHEMA_VERSION';",
    );
    let after = read(&path);
    assert_eq!(events(&after), events(&before));
    assert_eq!(after.meta.sources[0].format, "Nsight Systems SQLite, schema 3.28.0");
}

/// Columns in another order, rows in another order, numbered otherwise.
#[test]
fn order_does_not_matter() {
    let Some(path) = copy("nsys-ai/h100_2gpu_1s.sqlite", "shuffled.sqlite") else { return };
    let before = read(&path);
    for table in
        ["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"]
    {
        change(
            &path,
            &format!(
                "CREATE TABLE other AS SELECT * FROM {table} ORDER BY (start * 7919) % 10007, rowid;
                 DROP TABLE {table}; ALTER TABLE other RENAME TO {table};"
            ),
        );
    }
    change(
        &path,
        "CREATE TABLE other AS SELECT correlationId, streamId, end, globalPid, start, contextId, deviceId, value, memKind,
             bytes FROM CUPTI_ACTIVITY_KIND_MEMSET ORDER BY end DESC;
         DROP TABLE CUPTI_ACTIVITY_KIND_MEMSET; ALTER TABLE other RENAME TO CUPTI_ACTIVITY_KIND_MEMSET;",
    );
    let after = read(&path);
    assert_eq!(events(&after), events(&before));
    assert_eq!(
        (&after.threads, &after.processes, &after.devices),
        (&before.threads, &before.processes, &before.devices)
    );
}

#[test]
fn text_journals_and_page_sizes_that_are_unusual() {
    let Some(path) = copy("h200/node.sqlite", "unusual.sqlite") else { return };
    let before = events(&read(&path));
    for (page_size, encoding) in [(512, "UTF-8"), (65_536, "UTF-8"), (4_096, "UTF-8")] {
        change(&path, &format!("PRAGMA page_size = {page_size}; VACUUM;"));
        assert_eq!(events(&read(&path)), before, "{page_size} {encoding}");
    }
    // In write-ahead mode, with the log beside the file and what it holds not yet in the file.
    let writer = Connection::open(&path).unwrap();
    writer.execute_batch("PRAGMA journal_mode = WAL; DELETE FROM NVTX_EVENTS;").unwrap();
    assert!(read(&path).ranges.is_empty());
    let alone = scratch("without_log.sqlite");
    std::fs::copy(&path, &alone).unwrap();
    let trace = read(&alone);
    assert_eq!(trace.ranges.len(), 9);
    assert!(trace.meta.notices.iter().any(|notice| notice.contains("-wal")), "{:?}", trace.meta.notices);
    drop(writer);

    // Names that are not UTF-8, and a name that does not fit on a page.
    let Some(path) = copy("h200/node.sqlite", "text.sqlite") else { return };
    let long = "x".repeat(50_000);
    change(
        &path,
        &format!(
            "UPDATE NVTX_EVENTS SET text = CAST(x'cff0e8e2e5f2' AS TEXT) WHERE rowid = 1;
             UPDATE NVTX_EVENTS SET text = '{long}' WHERE rowid = 2;"
        ),
    );
    let trace = read(&path);
    let names: Vec<&str> = trace.ranges.name.iter().map(|&name| trace.text(name)).collect();
    assert!(names.iter().any(|name| name.contains('\u{fffd}')), "{names:?}");
    assert!(names.contains(&long.as_str()));
}

#[test]
fn nvtx_rows_of_every_type() {
    let Some(path) = copy("h200/node.sqlite", "nvtx.sqlite") else { return };
    let thread: i64 = 281_490_277_532_560;
    change(
        &path,
        &format!(
            "DELETE FROM NVTX_EVENTS;
             INSERT INTO StringIds VALUES (900000, 'registered'), (900001, 'comms');
             INSERT INTO NVTX_EVENTS (start, end, eventType, text, textId, globalTid, endGlobalTid, domainId) VALUES
                 (1, NULL, 75, NULL, 900001, {thread}, NULL, 3),
                 (1, NULL, 33, 'category', NULL, {thread}, NULL, 0),
                 (1, NULL, 39, 'loop', NULL, {thread}, NULL, 0),
                 (10, 20, 59, NULL, 900000, {thread}, NULL, 3),
                 (11, 15, 60, 'moved', NULL, {thread}, {thread} + 1, 0),
                 (12, NULL, 34, 'mark', NULL, {thread}, NULL, 0),
                 (13, NULL, 59, 'open', NULL, {thread}, NULL, 0),
                 (14, 400, 70, 'imported', NULL, {thread}, {thread}, 0),
                 (15, 9, 71, 'backward', NULL, {thread}, NULL, 0),
                 (1 << 60, NULL, 59, 'absurd', NULL, {thread}, NULL, 0);"
        ),
    );
    let trace = read(&path);
    let found: Vec<(&str, &str, i64, i64, u8)> =
        (trace.ranges.iter()).map(|r| (trace.text(r.domain), trace.text(r.name), r.start, r.end, r.flags)).collect();
    assert_eq!(
        found,
        [
            ("comms", "registered", 10, 20, 0),
            ("", "moved", 11, 15, range_flags::CROSS_THREAD),
            ("", "mark", 12, 12, range_flags::MARK),
            ("", "open", 13, 400, range_flags::UNCLOSED),
            ("", "imported", 14, 400, 0),
            ("", "backward", 15, 15, 0),
        ]
    );
    assert!(trace.threads.iter().any(|thread| thread.name == "loop"));
    let notices = trace.meta.notices.join("\n");
    assert!(notices.contains("1 row left out: more than 10 years"), "{notices}");
    assert!(notices.contains("1 row kept with no length"), "{notices}");
}

#[test]
fn graphs_devices_and_machines() {
    let Some(path) = copy("h200/gpum.sqlite", "graphs.sqlite") else { return };
    change(
        &path,
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE SELECT 0, 0, deviceId, contextId, greenContextId, streamId,
             correlationId, globalPid, graphId, graphExecId FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE LIMIT 1;
         INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE SELECT start, end, 2147483647, contextId, greenContextId, streamId,
             correlationId, globalPid, graphId, graphExecId FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE LIMIT 1;
         DELETE FROM META_DATA_CAPTURE;
         INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (5, 1, 1160);
         UPDATE CUPTI_ACTIVITY_KIND_MEMSET SET deviceId = 1;
         -- The same process number on another machine.
         UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET globalPid = globalPid | (3 << 56);",
    );
    let trace = read(&path);
    assert_eq!(trace.meta.graph_mode, Some(GraphMode::Graph));
    assert_eq!(trace.ops.kind.iter().filter(|kind| **kind == strobe_trace::OpKind::Graph).count(), 8);
    assert!(trace.meta.notices.join("\n").contains("2 rows of graph launches left out"), "{:?}", trace.meta.notices);
    let ordinals: Vec<u32> = trace.devices.iter().map(|device| device.ordinal).collect();
    assert_eq!(ordinals, [0, 5, 0], "GPU 0 and GPU 5 of one machine, GPU 0 of another");
    assert_eq!(trace.processes.len(), 2);
    let copies = trace.ops.iter().filter(|op| op.kind == strobe_trace::OpKind::Memcpy);
    assert!(copies.into_iter().all(|op| op.launch == strobe_trace::NONE), "launched by a process of another machine");
}

#[test]
fn views_lacking_columns_and_ids_given_twice_are_said() {
    let Some(path) = copy("h200/node.sqlite", "odd.sqlite") else { return };
    let before = events(&read(&path));
    assert!(read(&path).meta.notices.is_empty(), "{:?}", read(&path).meta.notices);
    change(
        &path,
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO kernels;
         CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS SELECT * FROM kernels;
         CREATE VIEW GPU_METRICS AS SELECT * FROM nowhere;",
    );
    let trace = read(&path);
    assert_eq!(events(&trace), before);
    let notices = trace.meta.notices.join("\n");
    assert!(notices.contains("CUPTI_ACTIVITY_KIND_KERNEL is a view"), "{notices}");
    assert!(notices.contains("GPU_METRICS is a view that cannot be read"), "{notices}");

    let Some(path) = copy("h200/node.sqlite", "lacking.sqlite") else { return };
    change(&path, "ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN correlationId");
    let trace = read(&path);
    let notices = trace.meta.notices.join("\n");
    assert!(notices.contains("CUPTI_ACTIVITY_KIND_RUNTIME has no column correlationId"), "{notices}");
    assert_eq!(trace.ops_without_launch(), trace.ops.len());

    let Some(path) = copy("h200/node.sqlite", "without_starts.sqlite") else { return };
    change(&path, "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN start");
    let notices = read(&path).meta.notices.join("\n");
    assert!(notices.contains("CUPTI_ACTIVITY_KIND_KERNEL has no column start"), "{notices}");
    assert!(notices.contains("rows left out: without a time"), "{notices}");

    let Some(path) = copy("h200/node.sqlite", "twice.sqlite") else { return };
    let name = "(SELECT demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL LIMIT 1)";
    change(
        &path,
        &format!(
            "CREATE TABLE texts (id INTEGER, value TEXT);
             INSERT INTO texts SELECT id, value FROM StringIds;
             INSERT INTO texts SELECT {name}, 'another name';
             DELETE FROM texts WHERE id = (SELECT nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME LIMIT 1);
             DROP TABLE StringIds;
             ALTER TABLE texts RENAME TO StringIds;
             INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start + 1000000000, end + 1000000000, eventClass, globalTid,
                 correlationId, nameId, returnValue, callchainId FROM CUPTI_ACTIVITY_KIND_RUNTIME LIMIT 3;"
        ),
    );
    let trace = read(&path);
    assert!(!trace.strings.iter().any(|(_, text)| text == "another name"));
    let notices = trace.meta.notices.join("\n");
    assert!(notices.contains("1 row of StringIds left out"), "{notices}");
    assert!(notices.contains("1 id of a name is not in StringIds"), "{notices}");
    assert!(notices.contains("3 calls have the correlation id of an earlier call"), "{notices}");
}

/// What an export should never have told.
#[test]
fn secrets_are_not_imported() {
    let Some(path) = copy("h200/node.sqlite", "secrets.sqlite") else { return };
    change(
        &path,
        "INSERT INTO StringIds VALUES (900000, 'SECRET=1'), (900001, 'SECRET name');
         INSERT INTO ProcessStreams VALUES (281490277531648, 900000, 900000);
         INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (0, 'SECRET', 'SECRET', 0, 'SECRET');
         INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', 'SECRET');
         INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_HOST', 'SECRET'), ('EXPORT_USER', 'SECRET');
         INSERT INTO DIAGNOSTIC_EVENT VALUES (0, 0, 0, 2, 'SECRET: 12 events were dropped', NULL);
         INSERT INTO ThreadNames VALUES (900001, 0, 77);
         INSERT INTO PROCESSES VALUES (281490277531648, 912, '/home/SECRET/bin/python3 run.py --key SECRET'),
             (99, 99, 'SECRET');",
    );
    let trace = read(&path);
    assert_eq!(trace.processes[0].name, "python3");
    assert_eq!(trace.meta.notices, ["the profiler says once that it lost data"]);
    let told =
        format!("{:?}", Trace { meta: strobe_trace::Meta { sources: Vec::new(), ..trace.meta.clone() }, ..trace });
    assert!(!told.contains("SECRET"));
    let written = scratch("masked.sqlite");
    nsys::write(&read(&path), &written).unwrap();
    let bytes = std::fs::read(&written).unwrap();
    assert!(!bytes.windows(6).any(|window| window == b"SECRET"));
}

#[test]
fn files_that_are_no_traces_are_refused_with_the_reason() {
    let path = scratch("broken.sqlite");
    assert!(problem(&path).contains("cannot open"), "{}", problem(&path));
    std::fs::write(&path, b"").unwrap();
    assert!(problem(&path).contains("empty file"));
    std::fs::write(&path, [7; 5000]).unwrap();
    assert!(problem(&path).contains("not an SQLite database, or an encrypted one"));
    std::fs::write(&path, b"SQLite format 3\0").unwrap();
    assert!(problem(&path).contains("cut off or damaged in its header"));
    std::fs::remove_file(&path).unwrap();
    change(&path, "CREATE TABLE cats (name TEXT)");
    assert!(problem(&path).contains("without the tables of an Nsight Systems export"));
    change(&path, "DROP TABLE cats; CREATE TABLE STROBE_META (name TEXT, value TEXT)");
    assert!(problem(&path).contains("format version"), "{}", problem(&path));
    change(&path, "DROP TABLE STROBE_META; CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)");
    let trace = read(&path);
    assert!(trace.ops.is_empty() && trace.meta.notices.join("\n").contains("no GPU rows"));
}

/// Every way to cut or damage a file gives a trace or an error that names the file; never a panic.
#[test]
fn cut_and_damaged_files_do_not_panic() {
    let Some(path) = copy("h200/node.sqlite", "whole.sqlite") else { return };
    let whole = std::fs::read(&path).unwrap();
    let cut = scratch("cut.sqlite");
    for length in (0..whole.len()).step_by(9_973).chain([16, 99, 100, 101, 4_095, 4_096, whole.len() - 1]) {
        std::fs::write(&cut, &whole[..length]).unwrap();
        let text = problem(&cut);
        assert!(text.contains("cut.sqlite") && (length == 0 || text.contains("cut off")), "{length}: {text}");
        // A header that does not know its length: the damage shows where a page is missing.
        let mut unknown = whole[..length].to_vec();
        if length > 100 {
            unknown[28..32].fill(0);
            std::fs::write(&cut, &unknown).unwrap();
            if let Err(error) = try_read(&cut) {
                assert!(error.to_string().contains("cut.sqlite"), "{error}");
            }
        }
    }
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for _ in 0..150 {
        let mut damaged = whole.clone();
        for _ in 0..20 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Beyond the header and the list of tables, so that the pages themselves are read.
            let place = 4_096 + (state >> 20) as usize % (damaged.len() - 4_096);
            damaged[place] = (state >> 50) as u8;
        }
        std::fs::write(&cut, &damaged).unwrap();
        if let Err(error) = try_read(&cut) {
            assert!(error.to_string().contains("cut.sqlite"), "{error}");
        }
    }
}
