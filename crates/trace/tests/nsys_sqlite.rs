//! The trace file: what is written is read back, other tools find what they look for, bad files are refused.

mod common;

use std::fs;

use proptest::prelude::*;
use rusqlite::Connection;
use strobe_trace::recorded::{Range, Trace, nsys_sqlite};
use strobe_trace::{RangeKind, StrId, TraceError};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn reading_gives_what_was_written(trace in common::any_trace()) {
        let path = common::scratch("roundtrip.sqlite");
        nsys_sqlite::write(&trace, &path).unwrap();
        prop_assert_eq!(nsys_sqlite::read(&path).unwrap(), trace);
    }
}

/// The query every reader of nsys exports makes: names by `textId`, threads by `globalTid`.
#[test]
fn ranges_and_ops_are_nvtx_push_pop_ranges() {
    let path = common::scratch("nvtx.sqlite");
    nsys_sqlite::write(&common::small(), &path).unwrap();
    let database = Connection::open(&path).unwrap();
    let mut query = database
        .prepare(
            "SELECT s.value, e.end - e.start, e.eventType, (e.globalTid >> 24) & 0xFFFFFF, e.globalTid & 0xFFFFFF, n.value
             FROM NVTX_EVENTS e JOIN StringIds s ON s.id = e.textId
             JOIN ThreadNames t ON t.globalTid = e.globalTid JOIN StringIds n ON n.id = t.nameId
             ORDER BY e.rowid",
        )
        .unwrap();
    let rows: Vec<(String, i64, i64, i64, i64, String)> = query
        .query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?, r.get(5)?)))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let row = |name: &str, length| {
        let thread = "engine \"loop\"".to_owned();
        (name.to_owned(), length, 59, 10, 11, thread)
    };
    assert_eq!(
        rows,
        [
            row("_schedule", 1_400),
            row("[Executor] _forward_step 7: 0 ctx reqs, 3 gen reqs", 4_001),
            row("norm", 500),
            row("qkv_proj", 2_000),
        ]
    );
    let text = |sql: &str| database.query_row(sql, [], |r| r.get::<_, String>(0)).unwrap();
    assert_eq!(text("SELECT value FROM META_DATA_EXPORT WHERE name = 'EXPORT_SCHEMA_VERSION'"), "3.20.3");
    assert_eq!(text("SELECT utcTime FROM TARGET_INFO_SESSION_START_TIME"), "2026-11-15T02:55:19");
    assert_eq!(text("SELECT label FROM ENUM_NSYS_EVENT_TYPE WHERE id = 59"), "NvtxPushPopRange");
    assert_eq!(text("PRAGMA integrity_check"), "ok");
}

#[test]
fn events_that_do_not_nest_are_start_end_ranges() {
    let mut trace = common::small();
    trace.ranges.push(Range { start: 4_500, end: 6_000, kind: RangeKind::Other, ..trace.ranges[0] });
    let path = common::scratch("overlap.sqlite");
    nsys_sqlite::write(&trace, &path).unwrap();
    let database = Connection::open(&path).unwrap();
    let overlapping: (i64, i64) = database
        .query_row("SELECT start, count(*) FROM NVTX_EVENTS WHERE eventType = 60", [], |r| Ok((r.get(0)?, r.get(1)?)))
        .unwrap();
    assert_eq!(overlapping, (4_500, 1));
    assert_eq!(nsys_sqlite::read(&path).unwrap(), trace);
}

#[test]
fn a_failed_write_leaves_nothing_and_keeps_the_old_file() {
    let directory = common::scratch("failed_write");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir(&directory).unwrap();
    let path = directory.join("trace.sqlite");
    nsys_sqlite::write(&common::small(), &path).unwrap();
    let before = fs::read(&path).unwrap();

    let mut invalid = common::small();
    invalid.ops[1].bytes = u64::MAX; // noticed only while the file is being filled
    let text = nsys_sqlite::write(&invalid, &path).unwrap_err().to_string();
    assert!(text.contains("ops[1].bytes"), "{text}");
    invalid.ops[1].kernel = StrId(99);
    let text = nsys_sqlite::write(&invalid, &path).unwrap_err().to_string();
    assert!(text.contains("ops[1].kernel"), "{text}");

    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
}

#[test]
fn an_unwritable_place_is_named() {
    let path = common::scratch("no/such/directory/trace.sqlite");
    let error = nsys_sqlite::write(&Trace::default(), &path).unwrap_err();
    assert!(matches!(error, TraceError::Io { .. }));
    let text = error.to_string();
    assert!(text.contains("no/such/directory/trace.sqlite"), "{text}");
    assert!(!text.contains(".tmp"), "{text}");
}

#[test]
fn other_files_are_refused_by_what_they_are() {
    let refusal = |name: &str, content: &[u8]| {
        let path = common::scratch(name);
        fs::write(&path, content).unwrap();
        let error = nsys_sqlite::read(&path).unwrap_err();
        assert!(matches!(error, TraceError::Foreign { .. }), "{error}");
        error.to_string()
    };
    assert!(refusal("empty", b"").contains("it is empty"));
    assert!(refusal("text.json", b"{\"traceEvents\": []}").contains("not an SQLite database"));

    let path = common::scratch("foreign.sqlite");
    let _ = fs::remove_file(&path);
    let database = Connection::open(&path).unwrap();
    database.execute_batch("CREATE TABLE t (x)").unwrap();
    let text = nsys_sqlite::read(&path).unwrap_err().to_string();
    assert!(text.contains("SQLite database without strobe's tables"), "{text}");
    database.execute_batch("CREATE TABLE NVTX_EVENTS (start)").unwrap();
    let text = nsys_sqlite::read(&path).unwrap_err().to_string();
    assert!(text.contains("Nsight Systems export"), "{text}");

    let missing = nsys_sqlite::read(&common::scratch("missing.sqlite")).unwrap_err();
    assert!(matches!(missing, TraceError::Io { .. }), "{missing}");
}

#[test]
fn a_damaged_table_is_named() {
    let damage = |sql: &str| {
        let path = common::scratch("damaged.sqlite");
        nsys_sqlite::write(&common::small(), &path).unwrap();
        Connection::open(&path).unwrap().execute_batch(sql).unwrap();
        let error = nsys_sqlite::read(&path).unwrap_err();
        assert!(matches!(error, TraceError::Corrupt { .. } | TraceError::Foreign { .. }), "{error}");
        error.to_string()
    };
    let cases = [
        ("DELETE FROM STROBE_OP WHERE rowid = 1", "OPS: 2 rows were written, 1 are there"),
        ("UPDATE STROBE_OP SET bytes = -1 WHERE rowid = 2", "STROBE_OP, row 2"),
        ("UPDATE STROBE_OP SET kernelId = 77", "ops[0].kernel"),
        ("UPDATE STROBE_OP SET start = 'x'", "STROBE_OP, row 1"),
        ("UPDATE STROBE_RANGE SET kind = 'dance'", "`dance` is not a kind of range"),
        ("UPDATE STROBE_META SET value = '?' WHERE name = 'OPS'", "STROBE_META.OPS"),
        ("DELETE FROM STROBE_META WHERE name = 'PARTIAL'", "STROBE_META.PARTIAL: it is missing"),
        ("UPDATE STROBE_META SET value = '9' WHERE name = 'FORMAT_VERSION'", "format version is 9"),
        ("DELETE FROM StringIds WHERE id = 1", "StringIds"),
        ("DROP TABLE STROBE_ITERATION", "STROBE_ITERATION"),
        ("DELETE FROM PROCESSES", "PROCESSES: expected one row, found 0"),
    ];
    for (sql, expected) in cases {
        let text = damage(sql);
        assert!(text.contains(expected), "{sql}: {text}");
        assert!(!text.contains('\n'), "{text}");
    }
}

#[test]
fn every_truncation_is_an_error() {
    let mut trace = common::small();
    let op = trace.ops[0];
    trace.ops.extend((0..2_000).map(|i| strobe_trace::recorded::Op { iteration: i, ..op }));
    let path = common::scratch("whole.sqlite");
    nsys_sqlite::write(&trace, &path).unwrap();
    let whole = fs::read(&path).unwrap();
    let cut = common::scratch("cut.sqlite");
    for length in (0..whole.len()).step_by(4096 / 3) {
        fs::write(&cut, &whole[..length]).unwrap();
        assert!(nsys_sqlite::read(&cut).is_err(), "cut to {length} of {}", whole.len());
    }
}
