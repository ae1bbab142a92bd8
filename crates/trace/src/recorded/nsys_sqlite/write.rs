//! From a [`Trace`] to the file.

use std::path::Path;

use rusqlite::{Connection, Statement, params};

use super::ids::{GLOBAL_VID, global_pid, global_tid};
use super::schema::{self, key};
use crate::atomic::write_whole;
use crate::recorded::nesting::{Event, place};
use crate::recorded::{Op, Trace};
use crate::{Interner, TraceError, utc};

/// Writes the trace to `path`, replacing what is there. The file appears whole or not at all.
pub fn write(trace: &Trace, path: &Path) -> Result<(), TraceError> {
    trace.validate()?;
    write_whole(path, |temporary| Writer { trace, path }.fill(temporary))
}

struct Writer<'a> {
    trace: &'a Trace,
    /// The final place, which messages name; the temporary one means nothing to a user.
    path: &'a Path,
}

impl Writer<'_> {
    fn fill(&self, temporary: &Path) -> Result<(), TraceError> {
        let mut database = Connection::open(temporary).map_err(|e| self.failed("open", "a new", e))?;
        // The file is new and hidden until complete: nobody needs a rollback journal for it.
        database
            .execute_batch("PRAGMA journal_mode = OFF; PRAGMA page_size = 4096;")
            .map_err(|e| self.failed("set up", "the", e))?;
        let transaction = database.transaction().map_err(|e| self.failed("begin", "the", e))?;
        for tables in [schema::NSYS_TABLES, schema::STROBE_TABLES] {
            transaction.execute_batch(tables).map_err(|e| self.failed("create", "tables of", e))?;
        }
        self.strings_and_threads(&transaction)?;
        let event_ids = self.events(&transaction)?;
        self.ops(&transaction, &event_ids.ops)?;
        self.ranges(&transaction, &event_ids.ranges)?;
        self.iterations(&transaction)?;
        self.about(&transaction)?;
        transaction.commit().map_err(|e| self.failed("finish", "the", e))?;
        database.close().map_err(|(_, e)| self.failed("close", "the", e))
    }

    /// The trace's strings keep their numbers; names that only the file needs follow after them.
    fn strings_and_threads(&self, database: &Connection) -> Result<(), TraceError> {
        let mut strings: Interner = self.trace.strings.clone();
        let mut thread = self.insert(database, "ThreadNames", 3)?;
        for t in &self.trace.threads {
            let name = strings.intern(&t.name);
            let global = global_tid(self.trace.process.pid, t.tid);
            self.add(&mut thread, "ThreadNames", params![name.0, None::<i64>, global])?;
        }
        let mut string = self.insert(database, "StringIds", 2)?;
        for (id, text) in strings.iter() {
            self.add(&mut string, "StringIds", params![id.0, text])?;
        }
        let process = &self.trace.process;
        let mut row = self.insert(database, "PROCESSES", 3)?;
        self.add(&mut row, "PROCESSES", params![global_pid(process.pid), process.pid, process.name])
    }

    /// All ranges and ops as NVTX ranges, in the order of time. Those that do not nest on their thread
    /// become start/end ranges, which may overlap, so that readers of push/pop ranges see a true stack.
    fn events(&self, database: &Connection) -> Result<EventIds, TraceError> {
        let trace = self.trace;
        let mut ids = EventIds { ops: vec![0; trace.ops.len()], ranges: vec![0; trace.ranges.len()] };
        let mut row = self.insert(database, "NVTX_EVENTS", 20)?;
        let mut events = place(trace);
        events.sort_by_key(|p| p.start); // stable: parents stay before children
        for (index, placed) in events.iter().enumerate() {
            let id = index as i64 + 1;
            let name = match placed.event {
                Event::Range(i) => {
                    ids.ranges[i] = id;
                    trace.ranges[i].name
                }
                Event::Op(i) => {
                    ids.ops[i] = id;
                    trace.ops[i].name
                }
            };
            let (event_type, range_id) = match placed.lane {
                0 => (schema::PUSH_POP, None),
                _ => (schema::START_END, Some(id)),
            };
            let none = None::<i64>;
            let thread = global_tid(trace.process.pid, placed.thread);
            self.add(
                &mut row,
                "NVTX_EVENTS",
                params![
                    placed.start,
                    placed.end,
                    event_type,
                    range_id,
                    none,
                    none,
                    none,
                    thread,
                    none,
                    name.0,
                    0,
                    none,
                    none,
                    none,
                    none,
                    none,
                    none,
                    none,
                    none,
                    none
                ],
            )?;
        }
        Ok(ids)
    }

    fn ops(&self, database: &Connection, event_ids: &[i64]) -> Result<(), TraceError> {
        let mut row = self.insert(database, "STROBE_OP", 14)?;
        for (i, (op, event)) in self.trace.ops.iter().zip(event_ids).enumerate() {
            let Op { shape: [m, n, k], .. } = *op;
            let whole = |field, value| sql_integer(value, || format!("ops[{i}].{field}"));
            self.add(
                &mut row,
                "STROBE_OP",
                params![
                    event,
                    op.start,
                    op.end,
                    global_tid(self.trace.process.pid, op.thread),
                    op.name.0,
                    op.category.0,
                    op.kernel.0,
                    op.layer,
                    whole("iteration", op.iteration)?,
                    whole("shape[0]", m)?,
                    whole("shape[1]", n)?,
                    whole("shape[2]", k)?,
                    whole("bytes", op.bytes)?,
                    whole("flops", op.flops)?,
                ],
            )?;
        }
        Ok(())
    }

    fn ranges(&self, database: &Connection, event_ids: &[i64]) -> Result<(), TraceError> {
        let mut row = self.insert(database, "STROBE_RANGE", 3)?;
        for (i, (range, event)) in self.trace.ranges.iter().zip(event_ids).enumerate() {
            let iteration = range.iteration.map(|n| sql_integer(n, || format!("ranges[{i}].iteration"))).transpose()?;
            self.add(&mut row, "STROBE_RANGE", params![event, range.kind.as_str(), iteration])?;
        }
        Ok(())
    }

    fn iterations(&self, database: &Connection) -> Result<(), TraceError> {
        let mut row = self.insert(database, "STROBE_ITERATION", 9)?;
        for (i, it) in self.trace.iterations.iter().enumerate() {
            self.add(
                &mut row,
                "STROBE_ITERATION",
                params![
                    sql_integer(it.iter, || format!("iterations[{i}].iter"))?,
                    it.kind().as_str(),
                    it.start,
                    it.end,
                    it.context_requests,
                    it.generation_requests,
                    it.context_tokens,
                    it.generation_tokens,
                    it.window,
                ],
            )?;
        }
        let mut row = self.insert(database, "STROBE_WINDOW", 4)?;
        for (i, window) in self.trace.meta.windows.iter().enumerate() {
            self.add(
                &mut row,
                "STROBE_WINDOW",
                params![
                    window.index,
                    sql_integer(window.first, || format!("windows[{i}].first"))?,
                    sql_integer(window.last, || format!("windows[{i}].last"))?,
                    window.complete,
                ],
            )?;
        }
        Ok(())
    }

    /// Session, capture, export and strobe's own facts.
    fn about(&self, database: &Connection) -> Result<(), TraceError> {
        let (trace, meta) = (self.trace, &self.trace.meta);
        let mut row = self.insert(database, "TARGET_INFO_SESSION_START_TIME", 3)?;
        let begin = meta.session_start_utc_ns;
        self.add(&mut row, "TARGET_INFO_SESSION_START_TIME", params![begin, utc::to_text(begin), None::<String>])?;

        let (first, last) = extent(trace);
        let mut row = self.insert(database, "ANALYSIS_DETAILS", 4)?;
        self.add(&mut row, "ANALYSIS_DETAILS", params![GLOBAL_VID, last.saturating_sub(first), first, last])?;

        let mut row = self.insert(database, "META_DATA_CAPTURE", 2)?;
        self.add(&mut row, "META_DATA_CAPTURE", params!["CAPTURE_EVENT_TYPE", "NvtxEvents"])?;

        let [major, minor, micro] = schema::NSYS_SCHEMA.map(|n| n.to_string());
        let version = [&*major, &*minor, &*micro].join(".");
        let (product, product_version) = meta.producer.split_once(' ').unwrap_or((&meta.producer, ""));
        let mut row = self.insert(database, "META_DATA_EXPORT", 2)?;
        for (name, value) in [
            ("EXPORT_PRODUCT_NAME", product),
            ("EXPORT_PRODUCT_VERSION", product_version),
            ("EXPORT_SCHEMA_VERSION", &version),
            ("EXPORT_SCHEMA_VERSION_MAJOR", &major),
            ("EXPORT_SCHEMA_VERSION_MINOR", &minor),
            ("EXPORT_SCHEMA_VERSION_MICRO", &micro),
        ] {
            self.add(&mut row, "META_DATA_EXPORT", params![name, value])?;
        }

        let mut facts: Vec<(String, String)> = [
            (key::FORMAT_VERSION, schema::FORMAT_VERSION.to_owned()),
            (key::PRODUCER, meta.producer.clone()),
            (key::PARTIAL, u8::from(meta.partial).to_string()),
            (key::STRINGS, trace.strings.len().to_string()),
            (key::OPS, trace.ops.len().to_string()),
            (key::RANGES, trace.ranges.len().to_string()),
            (key::ITERATIONS, trace.iterations.len().to_string()),
            (key::WINDOWS, meta.windows.len().to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        if let Some(peaks) = &meta.peaks {
            // `{}` of a float prints the shortest text that reads back as the same number.
            facts.push((key::PEAK_FLOPS.to_owned(), peaks.flops_per_s.to_string()));
            facts.push((key::PEAK_BYTES.to_owned(), peaks.bytes_per_s.to_string()));
            facts.push((key::PEAK_NOTE.to_owned(), peaks.note.clone()));
        }
        let extra = meta.extra.iter();
        facts.extend(extra.map(|(name, value)| (format!("{}{name}", key::EXTRA), value.clone())));
        let mut row = self.insert(database, "STROBE_META", 2)?;
        for (name, value) in &facts {
            self.add(&mut row, "STROBE_META", params![name, value])?;
        }
        Ok(())
    }

    fn insert<'d>(&self, database: &'d Connection, table: &str, columns: usize) -> Result<Statement<'d>, TraceError> {
        let places = vec!["?"; columns].join(",");
        database
            .prepare(&format!("INSERT INTO {table} VALUES ({places})"))
            .map_err(|e| self.failed("prepare", table, e))
    }

    fn add(&self, statement: &mut Statement, table: &str, values: impl rusqlite::Params) -> Result<(), TraceError> {
        statement.execute(values).map(drop).map_err(|e| self.failed("fill", table, e))
    }

    fn failed(&self, verb: &str, object: &str, source: rusqlite::Error) -> TraceError {
        TraceError::Sqlite { action: format!("{verb} {object} of"), path: self.path.to_owned(), source }
    }
}

/// Row numbers in `NVTX_EVENTS`, by index of op and range.
struct EventIds {
    ops: Vec<i64>,
    ranges: Vec<i64>,
}

/// First and last moment that anything refers to; (0, 0) for an empty trace.
fn extent(trace: &Trace) -> (i64, i64) {
    let ops = trace.ops.iter().map(|o| (o.start, o.end));
    let ranges = trace.ranges.iter().map(|r| (r.start, r.end));
    let iterations = trace.iterations.iter().map(|i| (i.start, i.end));
    ops.chain(ranges).chain(iterations).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0, 0))
}

/// SQLite's integers are signed.
fn sql_integer(value: u64, place: impl Fn() -> String) -> Result<i64, TraceError> {
    i64::try_from(value).map_err(|_| TraceError::Invalid {
        place: place(),
        problem: format!("{value} is more than the {} that SQLite can hold", i64::MAX),
    })
}
