//! Reads `trace.sqlite` by plain SQL, as another program would.

use std::path::Path;

use rusqlite::{Connection, OpenFlags, Row};

/// One recorded op.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Op {
    pub name: String,
    pub kernel: String,
    pub category: String,
    pub layer: Option<u32>,
    pub iter: u64,
    pub start: i64,
    pub end: i64,
    pub bytes: u64,
    pub flops: u64,
}

/// One NVTX range; ops are NVTX ranges too.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Range {
    pub name: String,
    pub start: i64,
    pub end: i64,
}

/// First and last iteration of a window, and whether it was recorded to its end.
pub(crate) type Window = (u64, u64, bool);

/// What a test wants of a trace.
#[derive(Clone, Debug)]
pub(crate) struct TraceFile {
    pub ops: Vec<Op>,
    pub ranges: Vec<Range>,
    pub windows: Vec<Window>,
    pub iterations: Vec<u64>,
    pub partial: bool,
}

impl TraceFile {
    pub(crate) fn read(path: &Path) -> TraceFile {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
        let db = Connection::open_with_flags(path, flags).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let ops = "SELECT n.value, k.value, c.value, layer, iter, start, end, bytes, flops FROM STROBE_OP
                   JOIN StringIds n ON n.id = nameId JOIN StringIds k ON k.id = kernelId
                   JOIN StringIds c ON c.id = categoryId ORDER BY start";
        let ranges = "SELECT coalesce(text, value), start, end FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
                      WHERE eventType IN (59, 60) ORDER BY start, end DESC";
        let windows = "SELECT firstIter, lastIter, complete FROM STROBE_WINDOW ORDER BY firstIter";
        let partial = "SELECT value FROM STROBE_META WHERE name = 'PARTIAL'";
        TraceFile {
            ops: rows(&db, ops, |r| Op {
                name: text(r, 0),
                kernel: text(r, 1),
                category: text(r, 2),
                layer: r.get(3).unwrap(),
                iter: number(r, 4) as u64,
                start: number(r, 5),
                end: number(r, 6),
                bytes: number(r, 7) as u64,
                flops: number(r, 8) as u64,
            }),
            ranges: rows(&db, ranges, |r| Range { name: text(r, 0), start: number(r, 1), end: number(r, 2) }),
            windows: rows(&db, windows, |r| (number(r, 0) as u64, number(r, 1) as u64, number(r, 2) == 1)),
            iterations: rows(&db, "SELECT iter FROM STROBE_ITERATION ORDER BY iter", |r| number(r, 0) as u64),
            partial: rows(&db, partial, |r| text(r, 0)) == ["1"],
        }
    }

    /// Names of the ranges around forward steps, in order.
    pub(crate) fn forward_steps(&self) -> Vec<&str> {
        self.ranges.iter().map(|r| r.name.as_str()).filter(|n| n.starts_with("[Executor] _forward_step")).collect()
    }

    /// Kernels that ran ops of this name.
    pub(crate) fn kernels(&self, op: &str) -> Vec<&str> {
        let mut kernels: Vec<_> = self.ops.iter().filter(|o| o.name == op).map(|o| o.kernel.as_str()).collect();
        kernels.sort_unstable();
        kernels.dedup();
        kernels
    }
}

fn rows<T>(db: &Connection, sql: &str, read: impl Fn(&Row<'_>) -> T) -> Vec<T> {
    let mut statement = db.prepare(sql).unwrap();
    statement.query_map([], |row| Ok(read(row))).unwrap().map(Result::unwrap).collect()
}

fn text(row: &Row<'_>, column: usize) -> String {
    row.get(column).unwrap()
}

fn number(row: &Row<'_>, column: usize) -> i64 {
    row.get(column).unwrap()
}
