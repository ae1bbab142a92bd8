//! An SQLite file: which tables and columns it has, and their rows.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::pages::{Cell, Header, Layout, MAX_CELLS, PageError, Pages, Row};
use super::part::EventTable;
use crate::TraceError;

/// How much of the file a scan holds at a time.
const WINDOW_BYTES: usize = 1 << 20;

/// A database that is only read.
pub(super) struct Database {
    path: PathBuf,
    pub(super) header: Header,
    tables: BTreeMap<String, Table>,
    /// Whether rows come through SQLite because the pages hold something that [`Pages`] does not know.
    through_sqlite: bool,
    /// Whether SQLite has to apply a journal or a log that lies beside the file.
    pending: bool,
    /// Whether the file points to a write-ahead log that is not there.
    pub(super) lost_log: bool,
}

/// A table and its columns.
struct Table {
    root: u32,
    columns: Vec<Column>,
    plain: bool,
    view: bool,
}

struct Column {
    name: String,
    /// Whether it may be another name of the row number.
    row_number: bool,
}

/// What a scan reads: a part of a table.
pub(super) struct Piece {
    pub(super) table: String,
    layout: Layout,
    columns: Vec<Option<String>>,
    leaves: Vec<u32>,
}

impl Piece {
    /// Bytes of the file that it covers.
    pub(super) fn bytes(&self, header: &Header) -> u64 {
        self.leaves.len() as u64 * header.page_size as u64
    }
}

impl Database {
    /// Opens a file and reads its list of tables. Whatever cannot be read is refused with the reason.
    pub(super) fn open(path: &Path) -> Result<Self, TraceError> {
        let header = read_header(path)?;
        let beside = |suffix: &str| {
            let mut name = path.as_os_str().to_owned();
            name.push(suffix);
            std::fs::metadata(name).is_ok_and(|m| m.len() > 0)
        };
        let log = header.wal && beside("-wal");
        // A journal that is still there belongs to a writer that was killed or is at work.
        let pending = log || beside("-journal");
        let mut database = Self {
            path: path.to_owned(),
            header,
            tables: BTreeMap::new(),
            through_sqlite: pending || !header.utf8,
            pending,
            lost_log: header.wal && !log,
        };
        database.tables = database.list_tables()?;
        Ok(database)
    }

    /// Makes every scan go through SQLite.
    #[cfg(test)]
    pub(super) fn use_sqlite(&mut self) {
        self.through_sqlite = true;
    }

    pub(super) fn has(&self, table: &str) -> bool {
        self.tables.contains_key(table)
    }

    pub(super) fn table_count(&self) -> usize {
        self.tables.len()
    }

    pub(super) fn has_column(&self, table: &str, column: &str) -> bool {
        self.tables.get(table).is_some_and(|t| t.columns.iter().any(|c| c.name == column))
    }

    /// What is not as usual with tables that are read, for people: views in their place, and columns that every version of
    /// the schema has.
    pub(super) fn faults(&self, tables: &[EventTable]) -> Vec<String> {
        let mut faults = Vec::new();
        let present = tables.iter().filter_map(|table| Some((table, self.tables.get(table.name)?)));
        for (table, found) in present {
            let name = table.name;
            match (found.view, found.columns.is_empty()) {
                (true, true) => {
                    faults.push(format!("{name} is a view that cannot be read: its rows are missing"));
                    continue;
                }
                (true, false) => faults.push(format!("{name} is a view, not a table: read through SQLite")),
                (false, _) => {}
            }
            let has = |column: &str| found.columns.iter().any(|known| known.name == column);
            let lacks = table.needed.iter().filter(|column| !column.split('|').any(has));
            let lacks: Vec<String> = lacks.map(|column| column.replace('|', " or ")).collect();
            if !lacks.is_empty() {
                faults.push(format!("table {name} has no column {}: what it tells is missing", lacks.join(", ")));
            }
        }
        faults
    }

    fn connect(&self) -> Result<Connection, TraceError> {
        let failed = |source| self.failed("its header".to_owned(), source);
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
        if self.pending {
            return Connection::open_with_flags(&self.path, flags).map_err(failed);
        }
        // Without locks, so that a file on a read-only medium or in write-ahead mode opens too.
        let name = self.path.to_string_lossy();
        let escaped = name.replace('%', "%25").replace('?', "%3f").replace('#', "%23");
        let immutable = self.path.to_str().map(|_| format!("file:{escaped}?immutable=1"));
        match immutable {
            Some(uri) => Connection::open_with_flags(uri, flags).map_err(failed),
            None => Connection::open_with_flags(&self.path, flags).map_err(failed),
        }
    }

    fn list_tables(&self) -> Result<BTreeMap<String, Table>, TraceError> {
        let connection = self.connect()?;
        let failed = |source| self.failed("its list of tables".to_owned(), source);
        let mut statement = connection
            .prepare("SELECT name, rootpage, sql, type FROM sqlite_master WHERE type IN ('table', 'view')")
            .map_err(failed)?;
        let mut rows = statement.query([]).map_err(failed)?;
        let mut tables = BTreeMap::new();
        while let Some(row) = rows.next().map_err(failed)? {
            let text = |index| match row.get_ref(index) {
                Ok(ValueRef::Text(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
                _ => String::new(),
            };
            let (name, sql) = (text(0), text(2).to_ascii_uppercase());
            let root: u32 = row.get(1).unwrap_or(0);
            let view = text(3) == "view";
            let (columns, usual) = match self.columns(&connection, &name) {
                // A view may stand for tables that are not there: then it has no columns.
                Err(_) if view => (Vec::new(), false),
                columns => columns?,
            };
            let plain = usual && root > 0 && !sql.contains("WITHOUT ROWID") && sql.starts_with("CREATE TABLE");
            tables.insert(name, Table { root, columns, plain, view });
        }
        Ok(tables)
    }

    /// The columns of a table, and whether its records hold just these.
    fn columns(&self, connection: &Connection, table: &str) -> Result<(Vec<Column>, bool), TraceError> {
        let failed = |source| self.failed(format!("the columns of {table}"), source);
        let mut statement = connection
            .prepare("SELECT name, type, pk, hidden, dflt_value IS NULL FROM pragma_table_xinfo(?1) ORDER BY cid")
            .map_err(failed)?;
        let mut rows = statement.query([table]).map_err(failed)?;
        let (mut columns, mut keys, mut usual) = (Vec::new(), 0, true);
        while let Some(row) = rows.next().map_err(failed)? {
            let kind: String = row.get(1).map_err(failed)?;
            let key: i64 = row.get(2).map_err(failed)?;
            let hidden: i64 = row.get(3).map_err(failed)?;
            keys += i64::from(key > 0);
            usual &= hidden == 0 && row.get(4).map_err(failed)?;
            columns.push(Column {
                name: row.get(0).map_err(failed)?,
                row_number: key == 1 && kind.eq_ignore_ascii_case("INTEGER"),
            });
        }
        if keys > 1 {
            columns.iter_mut().for_each(|c| c.row_number = false);
        }
        Ok((columns, usual))
    }

    /// A table cut into pieces of about `bytes` each, to be scanned for `columns`. A column that the table lacks reads as
    /// NULL; a table that the file lacks has no pieces.
    pub(super) fn pieces(&self, name: &str, columns: &[&str], bytes: usize) -> Result<Vec<Piece>, TraceError> {
        let Some(table) = self.tables.get(name).filter(|table| !table.columns.is_empty()) else {
            return Ok(Vec::new());
        };
        assert!(columns.len() <= MAX_CELLS, "a scan takes at most {MAX_CELLS} columns");
        let position = |wanted: &&str| table.columns.iter().position(|c| c.name == *wanted);
        let mut layout = Layout { cell_of_column: Vec::new(), row_number: None, cells: columns.len() };
        for (cell, column) in columns.iter().map(position).enumerate() {
            let Some(column) = column else { continue };
            if layout.cell_of_column.len() <= column {
                layout.cell_of_column.resize(column + 1, Layout::SKIP);
            }
            layout.cell_of_column[column] = cell as u8;
            if table.columns[column].row_number {
                layout.row_number = Some(cell);
            }
        }
        let present: Vec<Option<String>> = columns.iter().map(|c| position(c).map(|_| (*c).to_owned())).collect();
        let piece = |leaves: &[u32]| Piece {
            table: name.to_owned(),
            layout: layout.clone(),
            columns: present.clone(),
            leaves: leaves.to_vec(),
        };
        if self.through_sqlite || !table.plain {
            return Ok(vec![piece(&[])]);
        }
        let mut pages = self.open_pages(WINDOW_BYTES / 16)?;
        let leaves = pages.leaves(table.root).map_err(|e| self.page_error(name, e))?;
        Ok(leaves.chunks((bytes / self.header.page_size).max(1)).map(piece).collect())
    }

    fn open_pages(&self, window: usize) -> Result<Pages, TraceError> {
        let io = |source| TraceError::Io { action: "open", path: self.path.clone(), source };
        Pages::open(&self.path, self.header, window).map_err(io)
    }

    /// A scanner of pieces, for one thread.
    pub(super) fn scanner(&self) -> Result<Scanner<'_>, TraceError> {
        Ok(Scanner {
            database: self,
            pages: self.open_pages(WINDOW_BYTES)?,
            overflow: self.open_pages(self.header.page_size)?,
            connection: None,
        })
    }

    /// Calls `visit` with every row of a table; none if the file lacks it.
    pub(super) fn scan(&self, table: &str, columns: &[&str], mut visit: impl FnMut(&Row)) -> Result<(), TraceError> {
        let mut scanner = self.scanner()?;
        for piece in self.pieces(table, columns, usize::MAX)? {
            scanner.scan(&piece, &mut visit)?;
        }
        Ok(())
    }

    fn page_error(&self, table: &str, error: PageError) -> TraceError {
        match error {
            PageError::Io(source) => TraceError::Io { action: "read", path: self.path.clone(), source },
            PageError::Damaged(problem) => self.corrupt(format!("table {table}"), problem),
        }
    }

    pub(super) fn not_a_trace(&self, found: impl Into<String>, advice: &str) -> TraceError {
        not_a_trace(&self.path, found, advice)
    }

    pub(super) fn corrupt(&self, place: impl Into<String>, problem: impl Into<String>) -> TraceError {
        TraceError::Corrupt { path: self.path.clone(), place: place.into(), problem: problem.into() }
    }

    fn failed(&self, place: String, source: rusqlite::Error) -> TraceError {
        match source.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => self.corrupt(place, source.to_string()),
            _ => TraceError::Sqlite { action: format!("read {place} of"), path: self.path.clone(), source },
        }
    }
}

/// Reads pieces of tables.
pub(super) struct Scanner<'d> {
    database: &'d Database,
    pages: Pages,
    overflow: Pages,
    connection: Option<Connection>,
}

impl Scanner<'_> {
    pub(super) fn scan(&mut self, piece: &Piece, visit: impl FnMut(&Row)) -> Result<(), TraceError> {
        if piece.leaves.is_empty() {
            return self.scan_through_sqlite(piece, visit);
        }
        let done = self.pages.rows(&piece.leaves, &piece.layout, &mut self.overflow, visit);
        done.map_err(|e| self.database.page_error(&piece.table, e))
    }

    fn scan_through_sqlite(&mut self, piece: &Piece, mut visit: impl FnMut(&Row)) -> Result<(), TraceError> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => none.insert(self.database.connect()?),
        };
        let failed = |source| self.database.failed(format!("table {}", piece.table), source);
        let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
        let list = piece.columns.iter().map(|c| c.as_deref().map_or("NULL".to_owned(), quoted));
        let list: Vec<String> = list.collect();
        let from = quoted(&piece.table);
        // The rows of a view have no numbers.
        let id = if self.database.tables.get(&piece.table).is_some_and(|table| table.view) { "0" } else { "rowid" };
        let statement = connection
            .prepare(&format!("SELECT {}, {id} FROM {from}", list.join(", ")))
            .or_else(|_| connection.prepare(&format!("SELECT {}, 0 FROM {from}", list.join(", "))));
        let mut statement = statement.map_err(failed)?;
        let mut rows = statement.query([]).map_err(failed)?;
        let (mut cells, mut bytes) = ([Cell::Null; MAX_CELLS], Vec::new());
        while let Some(row) = rows.next().map_err(failed)? {
            bytes.clear();
            for (index, cell) in cells[..piece.columns.len()].iter_mut().enumerate() {
                *cell = match row.get_ref(index).map_err(failed)? {
                    ValueRef::Null => Cell::Null,
                    ValueRef::Integer(value) => Cell::Int(value),
                    ValueRef::Real(value) => Cell::Real(value),
                    ValueRef::Text(value) | ValueRef::Blob(value) => {
                        let from = bytes.len() as u32;
                        bytes.extend_from_slice(value);
                        Cell::Bytes { from, len: value.len() as u32 }
                    }
                };
            }
            let id = row.get(piece.columns.len()).map_err(failed)?;
            visit(&Row { id, cells: &cells[..piece.columns.len()], bytes: &bytes });
        }
        Ok(())
    }
}

/// Tells what SQLite would not: that the file is empty, of another kind, or shorter than it says.
fn read_header(path: &Path) -> Result<Header, TraceError> {
    let io = |action| move |source| TraceError::Io { action, path: path.to_owned(), source };
    let mut file = File::open(path).map_err(io("open"))?;
    let bytes = file.metadata().map_err(io("read"))?.len();
    if bytes == 0 {
        return Err(not_a_trace(path, "an empty file", EXPORT_AGAIN));
    }
    let mut head = Vec::new();
    file.by_ref().take(100).read_to_end(&mut head).map_err(io("read"))?;
    let header = <&[u8; 100]>::try_from(head.as_slice()).ok().and_then(|head| Header::parse(head, bytes));
    let Some(header) = header else {
        let starts_right = head.starts_with(&super::pages::MAGIC[..head.len().min(16)]);
        return Err(if starts_right {
            let found = format!("an SQLite database cut off or damaged in its header ({bytes} bytes are there)");
            not_a_trace(path, found, EXPORT_AGAIN)
        } else {
            not_a_trace(path, "not an SQLite database, or an encrypted one", "export it unencrypted with `nsys export`")
        });
    };
    match header.expected_pages {
        Some(expected) if expected > header.pages => {
            let whole = u64::from(expected) * header.page_size as u64;
            let found = format!("an SQLite database that is cut off: {bytes} of {whole} bytes are there");
            Err(not_a_trace(path, found, EXPORT_AGAIN))
        }
        _ => Ok(header),
    }
}

const EXPORT_AGAIN: &str = "copy or export it again";

fn not_a_trace(path: &Path, found: impl Into<String>, advice: &str) -> TraceError {
    TraceError::NotATrace { path: path.to_owned(), found: found.into(), advice: advice.to_owned() }
}
