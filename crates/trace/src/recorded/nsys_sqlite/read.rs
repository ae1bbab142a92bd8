//! From the file to a [`Trace`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

use rusqlite::{Connection, ErrorCode, OpenFlags, Row};

use super::ids::tid_of;
use super::schema::{self, key};
use crate::recorded::{Meta, Op, Process, Range, Thread, Trace};
use crate::{Interner, Iteration, Peaks, RangeKind, StrId, TraceError, Window};

const EXPECTED: &str = "a trace.sqlite recorded by strobe";
const SQLITE_MAGIC: &[u8; 16] = b"SQLite format 3\0";

/// Reads a trace that [`write`](super::write()) wrote. Anything else is refused with the reason.
pub fn read(path: &Path) -> Result<Trace, TraceError> {
    check_magic(path)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let database = Connection::open_with_flags(path, flags).map_err(|source| TraceError::Sqlite {
        action: "open".to_owned(),
        path: path.to_owned(),
        source,
    })?;
    let reader = Reader { database, path };
    let trace = reader.trace()?;
    trace.validate().map_err(|e| match e {
        TraceError::Invalid { place, problem } => reader.corrupt(place, problem),
        other => other,
    })?;
    Ok(trace)
}

/// SQLite itself accepts an empty file as an empty database, and says nothing helpful of other formats.
fn check_magic(path: &Path) -> Result<(), TraceError> {
    let io = |action| move |source| TraceError::Io { action, path: path.to_owned(), source };
    let mut head = Vec::new();
    File::open(path).map_err(io("open"))?.take(SQLITE_MAGIC.len() as u64).read_to_end(&mut head).map_err(io("read"))?;
    if head == SQLITE_MAGIC {
        return Ok(());
    }
    let found = if head.is_empty() { "it is empty" } else { "it is not an SQLite database" };
    Err(TraceError::Foreign { path: path.to_owned(), found: found.to_owned(), expected: EXPECTED })
}

struct Reader<'a> {
    database: Connection,
    path: &'a Path,
}

impl Reader<'_> {
    fn trace(&self) -> Result<Trace, TraceError> {
        self.check_tables()?;
        let mut facts = self.facts()?;
        let version = self.take::<String>(&mut facts, key::FORMAT_VERSION)?;
        if version != schema::FORMAT_VERSION {
            return Err(TraceError::Foreign {
                path: self.path.to_owned(),
                found: format!("its format version is {version}"),
                expected: "format version 1; record the trace again with this strobe",
            });
        }
        let strings = self.strings(self.take(&mut facts, key::STRINGS)?)?;
        let trace = Trace {
            ops: self.ops()?,
            ranges: self.ranges()?,
            iterations: self.iterations()?,
            threads: self.threads()?,
            process: self.process()?,
            strings,
            meta: Meta {
                session_start_utc_ns: self.session_start()?,
                windows: self.windows()?,
                producer: self.take(&mut facts, key::PRODUCER)?,
                partial: self.take::<u8>(&mut facts, key::PARTIAL)? != 0,
                peaks: self.peaks(&mut facts)?,
                extra: BTreeMap::new(),
            },
        };
        for (name, found) in [
            (key::OPS, trace.ops.len()),
            (key::RANGES, trace.ranges.len()),
            (key::ITERATIONS, trace.iterations.len()),
            (key::WINDOWS, trace.meta.windows.len()),
        ] {
            let written: usize = self.take(&mut facts, name)?;
            if written != found {
                let problem = format!("{written} rows were written, {found} are there");
                return Err(self.corrupt(name, problem));
            }
        }
        let extra = facts
            .into_iter()
            .filter_map(|(name, value)| Some((name.strip_prefix(key::EXTRA)?.to_owned(), value)))
            .collect();
        Ok(Trace { meta: Meta { extra, ..trace.meta }, ..trace })
    }

    fn check_tables(&self) -> Result<(), TraceError> {
        let names: Vec<String> =
            self.rows("sqlite_master", "SELECT name FROM sqlite_master WHERE type = 'table'", |row| row.get(0))?;
        let has = |table: &str| names.iter().any(|n| n == table);
        if has("STROBE_META") {
            return Ok(());
        }
        let found = if has("NVTX_EVENTS") || has("StringIds") || has("META_DATA_EXPORT") {
            "it is an Nsight Systems export without strobe's tables"
        } else {
            "it is an SQLite database without strobe's tables"
        };
        Err(TraceError::Foreign { path: self.path.to_owned(), found: found.to_owned(), expected: EXPECTED })
    }

    fn facts(&self) -> Result<BTreeMap<String, String>, TraceError> {
        let pairs =
            self.rows("STROBE_META", "SELECT name, value FROM STROBE_META", |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(pairs.into_iter().collect())
    }

    fn take<T: FromStr>(&self, facts: &mut BTreeMap<String, String>, name: &str) -> Result<T, TraceError> {
        let text = facts.remove(name).ok_or_else(|| self.corrupt(format!("STROBE_META.{name}"), "it is missing"))?;
        text.parse().map_err(|_| self.corrupt(format!("STROBE_META.{name}"), format!("`{text}` is not a valid value")))
    }

    fn peaks(&self, facts: &mut BTreeMap<String, String>) -> Result<Option<Peaks>, TraceError> {
        if !facts.contains_key(key::PEAK_FLOPS) {
            return Ok(None);
        }
        Ok(Some(Peaks {
            flops_per_s: self.take(facts, key::PEAK_FLOPS)?,
            bytes_per_s: self.take(facts, key::PEAK_BYTES)?,
            note: self.take(facts, key::PEAK_NOTE)?,
        }))
    }

    fn strings(&self, count: u32) -> Result<Interner, TraceError> {
        let rows: Vec<(u32, String)> = self.rows(
            "StringIds",
            &format!("SELECT id, value FROM StringIds WHERE id < {count} ORDER BY id"),
            |row| Ok((row.get(0)?, row.get(1)?)),
        )?;
        let mut strings = Interner::new();
        for (id, text) in &rows {
            if strings.intern(text) != StrId(*id) {
                let problem = "the numbers have a gap or a text occurs twice";
                return Err(self.corrupt(format!("StringIds, id {id}"), problem));
            }
        }
        if rows.len() != count as usize {
            let problem = format!("{count} strings were written, {} are there", rows.len());
            return Err(self.corrupt("StringIds", problem));
        }
        Ok(strings)
    }

    fn ops(&self) -> Result<Vec<Op>, TraceError> {
        self.rows(
            "STROBE_OP",
            "SELECT nameId, categoryId, kernelId, layer, iter, globalTid, start, end, m, n, k, bytes, flops
             FROM STROBE_OP ORDER BY rowid",
            |row| {
                Ok(Op {
                    name: StrId(row.get(0)?),
                    category: StrId(row.get(1)?),
                    kernel: StrId(row.get(2)?),
                    layer: row.get(3)?,
                    iteration: unsigned(row, 4)?,
                    thread: tid_of(row.get(5)?),
                    start: row.get(6)?,
                    end: row.get(7)?,
                    shape: [unsigned(row, 8)?, unsigned(row, 9)?, unsigned(row, 10)?],
                    bytes: unsigned(row, 11)?,
                    flops: unsigned(row, 12)?,
                })
            },
        )
    }

    fn ranges(&self) -> Result<Vec<Range>, TraceError> {
        self.rows(
            "STROBE_RANGE",
            "SELECT e.textId, e.globalTid, e.start, e.end, r.kind, r.iter
             FROM STROBE_RANGE r JOIN NVTX_EVENTS e ON e.rowid = r.eventId ORDER BY r.rowid",
            |row| {
                let kind: String = row.get(4)?;
                Ok(Range {
                    name: StrId(row.get(0)?),
                    thread: tid_of(row.get(1)?),
                    start: row.get(2)?,
                    end: row.get(3)?,
                    kind: RangeKind::from_name(&kind).ok_or_else(|| {
                        let problem = format!("`{kind}` is not a kind of range");
                        rusqlite::Error::FromSqlConversionFailure(4, rusqlite::types::Type::Text, problem.into())
                    })?,
                    iteration: match row.get::<_, Option<i64>>(5)? {
                        Some(_) => Some(unsigned(row, 5)?),
                        None => None,
                    },
                })
            },
        )
    }

    fn iterations(&self) -> Result<Vec<Iteration>, TraceError> {
        self.rows(
            "STROBE_ITERATION",
            "SELECT iter, start, end, contextRequests, generationRequests, contextTokens, generationTokens, window
             FROM STROBE_ITERATION ORDER BY rowid",
            |row| {
                Ok(Iteration {
                    iter: unsigned(row, 0)?,
                    start: row.get(1)?,
                    end: row.get(2)?,
                    context_requests: row.get(3)?,
                    generation_requests: row.get(4)?,
                    context_tokens: row.get(5)?,
                    generation_tokens: row.get(6)?,
                    window: row.get(7)?,
                })
            },
        )
    }

    fn windows(&self) -> Result<Vec<Window>, TraceError> {
        self.rows(
            "STROBE_WINDOW",
            "SELECT windowIndex, firstIter, lastIter, complete FROM STROBE_WINDOW ORDER BY rowid",
            |row| {
                Ok(Window {
                    index: row.get(0)?,
                    first: unsigned(row, 1)?,
                    last: unsigned(row, 2)?,
                    complete: row.get(3)?,
                })
            },
        )
    }

    fn threads(&self) -> Result<Vec<Thread>, TraceError> {
        self.rows(
            "ThreadNames",
            "SELECT t.globalTid, s.value FROM ThreadNames t JOIN StringIds s ON s.id = t.nameId
             ORDER BY t.rowid",
            |row| Ok(Thread { tid: tid_of(row.get(0)?), name: row.get(1)? }),
        )
    }

    fn process(&self) -> Result<Process, TraceError> {
        self.one("PROCESSES", "SELECT pid, name FROM PROCESSES", |row| {
            Ok(Process { pid: row.get(0)?, name: row.get(1)? })
        })
    }

    fn session_start(&self) -> Result<i64, TraceError> {
        let table = "TARGET_INFO_SESSION_START_TIME";
        self.one(table, &format!("SELECT utcEpochNs FROM {table}"), |row| row.get(0))
    }

    fn one<T>(&self, table: &str, query: &str, convert: impl Fn(&Row) -> rusqlite::Result<T>) -> Result<T, TraceError> {
        let mut rows = self.rows(table, query, convert)?;
        match (rows.pop(), rows.len()) {
            (Some(row), 0) => Ok(row),
            (_, others) => {
                Err(self.corrupt(table, format!("expected one row, found {}", others + usize::from(others > 0))))
            }
        }
    }

    fn rows<T>(
        &self,
        table: &str,
        query: &str,
        convert: impl Fn(&Row) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, TraceError> {
        let mut statement = self.database.prepare(query).map_err(|e| self.failed(table.to_owned(), e))?;
        let mut rows = statement.query([]).map_err(|e| self.failed(table.to_owned(), e))?;
        let mut converted = Vec::new();
        loop {
            let place = || format!("{table}, row {}", converted.len() + 1);
            let row = match rows.next() {
                Ok(Some(row)) => row,
                Ok(None) => return Ok(converted),
                Err(e) => return Err(self.failed(place(), e)),
            };
            let value = convert(row).map_err(|e| self.failed(place(), e))?;
            converted.push(value);
        }
    }

    fn failed(&self, place: String, source: rusqlite::Error) -> TraceError {
        match source.sqlite_error_code() {
            Some(ErrorCode::NotADatabase) => TraceError::Foreign {
                path: self.path.to_owned(),
                found: "it is not an SQLite database".to_owned(),
                expected: EXPECTED,
            },
            Some(
                ErrorCode::CannotOpen
                | ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::PermissionDenied
                | ErrorCode::OutOfMemory
                | ErrorCode::SystemIoFailure,
            ) => TraceError::Sqlite { action: format!("read {place} of"), path: self.path.to_owned(), source },
            _ => self.corrupt(place, source.to_string()),
        }
    }

    fn corrupt(&self, place: impl Into<String>, problem: impl Into<String>) -> TraceError {
        TraceError::Corrupt { path: self.path.to_owned(), place: place.into(), problem: problem.into() }
    }
}

/// SQLite's integers are signed; these columns hold no negative ones.
fn unsigned(row: &Row, column: usize) -> rusqlite::Result<u64> {
    let value: i64 = row.get(column)?;
    u64::try_from(value).map_err(|_| rusqlite::Error::IntegralValueOutOfRange(column, value))
}
