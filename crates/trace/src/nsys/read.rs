//! From the file to a [`Trace`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::database::{Database, Piece};
use super::merge;
use super::part::{EVENT_TABLES, EventTable, Names, Part};
use super::strobe::{Own, Side};
use crate::{Trace, TraceError};

/// How much of a table a thread takes at a time.
const PIECE_BYTES: usize = 8 << 20;

/// Any of these makes a file a trace.
const KNOWN_TABLES: [&str; 6] =
    ["StringIds", "NVTX_EVENTS", "META_DATA_EXPORT", "EXPORT_META_DATA", "CUPTI_ACTIVITY_KIND_KERNEL", "STROBE_META"];

/// Reads an SQLite export of Nsight Systems, of any version, or a trace that strobe recorded. `progress` is told bytes
/// done and bytes in all.
///
/// What the file does not have is not recorded, and no error. Environment variables, command lines, captured output, host
/// and user names are not read.
pub fn read(path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Trace, TraceError> {
    let database = Database::open(path)?;
    read_database(&database, path, progress)
}

pub(super) fn read_database(
    database: &Database,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Trace, TraceError> {
    if !KNOWN_TABLES.iter().any(|table| database.has(table)) {
        let (found, advice) = match (database.table_count(), database.lost_log) {
            (_, true) => ("an SQLite database without its write-ahead log", "put the -wal file beside it"),
            (0, _) => ("an SQLite database without any table", "export it again"),
            _ => (
                "an SQLite database without the tables of an Nsight Systems export or a strobe trace",
                "export a report with `nsys export --type sqlite`",
            ),
        };
        return Err(database.not_a_trace(found, advice));
    }
    let own = Own::read(database)?;
    let events = scan_events(database, &own.side, progress)?;
    merge::trace(database, path, own, events)
}

/// A piece of work for a thread: a part of a table.
struct Job {
    table: &'static EventTable,
    piece: Piece,
}

/// Scans all tables of events on as many threads as there are processors; what comes back is in the order of the tables.
fn scan_events(database: &Database, side: &Side, progress: &mut dyn FnMut(u64, u64)) -> Result<Part, TraceError> {
    let mut jobs = Vec::new();
    for table in &EVENT_TABLES {
        let pieces = database.pieces(table.name, table.columns, PIECE_BYTES)?;
        jobs.extend(pieces.into_iter().map(|piece| Job { table, piece }));
    }
    let total: u64 = jobs.iter().map(|job| job.piece.bytes(&database.header)).sum();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(8).min(jobs.len());
    let next = AtomicUsize::new(0);
    // Parts are put together as they come, so that only a few exist at a time; but in order, so that the result does not
    // depend on who was faster.
    let mut whole = Part::default();
    let mut early: BTreeMap<usize, (usize, Part)> = BTreeMap::new();
    let mut wanted = 0;
    let mut names_of = vec![Vec::new(); threads];
    let mut failure = None;
    std::thread::scope(|scope| {
        let (sender, finished) = mpsc::channel();
        for thread in 0..threads {
            let (sender, next, jobs) = (sender.clone(), &next, &jobs);
            scope.spawn(move || {
                let mut scanner = database.scanner();
                let mut names = Names::default();
                while let Some((index, job)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, jobs.get(i)?)))
                {
                    let mut part = Part { names: std::mem::take(&mut names), ..Part::default() };
                    let done = match &mut scanner {
                        Ok(scanner) => scanner.scan(&job.piece, |row| (job.table.row)(&mut part, row, side)),
                        Err(_) => database.scanner().map(drop),
                    };
                    names = std::mem::take(&mut part.names);
                    part.names.new = std::mem::take(&mut names.new);
                    let done = done.map(|()| part);
                    let failed = done.is_err();
                    // The receiver is gone only after a failure elsewhere.
                    if sender.send((index, thread, done)).is_err() || failed {
                        next.store(usize::MAX / 2, Ordering::Relaxed);
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut read = 0;
        for (index, thread, done) in finished {
            match done {
                Ok(part) => drop(early.insert(index, (thread, part))),
                Err(error) => failure = failure.take().or(Some(error)),
            }
            while let Some((thread, part)) = early.remove(&wanted) {
                whole.absorb(part, &mut names_of[thread]);
                wanted += 1;
            }
            read += jobs[index].piece.bytes(&database.header);
            progress(read, total);
        }
    });
    match failure {
        Some(error) => Err(error),
        None => Ok(whole),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ways to read the same rows: decoding pages, and SQLite itself.
    #[test]
    fn pages_and_sqlite_agree() {
        let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
            eprintln!("skipped: STROBE_TEST_DATA is not set");
            return;
        };
        let mut compared = 0;
        for folder in ["h200", "nsys-ai"] {
            for entry in std::fs::read_dir(Path::new(&data).join("traces/nsys").join(folder)).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_none_or(|extension| extension != "sqlite") {
                    continue;
                }
                let mut database = Database::open(&path).unwrap();
                let from_pages = read_database(&database, &path, &mut |_, _| {}).unwrap();
                database.use_sqlite();
                assert_eq!(read_database(&database, &path, &mut |_, _| {}).unwrap(), from_pages, "{}", path.display());
                compared += 1;
            }
        }
        assert!(compared >= 6, "only {compared} files were there to compare");
    }
}
