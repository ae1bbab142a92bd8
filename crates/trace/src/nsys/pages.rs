//! Reads the rows of tables straight from the pages of an SQLite file.
//!
//! SQLite itself spends most of a full scan in its virtual machine, one opcode per column. Exports hold tens of millions
//! of rows that are read once, front to back, so the pages are decoded here: <https://sqlite.org/fileformat2.html>.
//! Only what an export needs is covered: tables with row numbers, UTF-8 text, no journal to apply.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// The first bytes of every SQLite file.
pub(super) const MAGIC: &[u8; 16] = b"SQLite format 3\0";

/// Most columns that one scan can ask for.
pub(super) const MAX_CELLS: usize = 32;

/// A value of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Cell {
    Null,
    Int(i64),
    Real(f64),
    /// Text or a blob: where it lies in the row's bytes.
    Bytes {
        from: u32,
        len: u32,
    },
}

/// One row: the cells that were asked for, in the order they were asked for.
pub(super) struct Row<'a> {
    pub(super) id: i64,
    pub(super) cells: &'a [Cell],
    pub(super) bytes: &'a [u8],
}

impl Row<'_> {
    /// The integer in a cell; `None` when the column is absent, NULL or holds something else.
    pub(super) fn int(&self, cell: usize) -> Option<i64> {
        match self.cells.get(cell)? {
            Cell::Int(value) => Some(*value),
            // A column without a declared type may hold whole numbers as reals.
            Cell::Real(value) if value.fract() == 0.0 && value.abs() < 9e15 => Some(*value as i64),
            _ => None,
        }
    }

    /// The number in a cell.
    pub(super) fn real(&self, cell: usize) -> Option<f64> {
        match self.cells.get(cell)? {
            Cell::Int(value) => Some(*value as f64),
            Cell::Real(value) => Some(*value),
            _ => None,
        }
    }

    /// The text in a cell. Exports may hold text that is not UTF-8: what cannot be decoded is replaced.
    pub(super) fn text(&self, cell: usize) -> Option<std::borrow::Cow<'_, str>> {
        self.raw(cell).map(String::from_utf8_lossy)
    }

    /// The bytes of a text or blob.
    pub(super) fn raw(&self, cell: usize) -> Option<&[u8]> {
        match *self.cells.get(cell)? {
            Cell::Bytes { from, len } => self.bytes.get(from as usize..from as usize + len as usize),
            _ => None,
        }
    }
}

/// Which columns of a table a scan reads.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// For every column of the table up to the last one wanted: the cell it goes to, or [`Layout::SKIP`].
    pub(super) cell_of_column: Vec<u8>,
    /// The cell of the column that is another name of the row number: the record holds NULL in its place.
    pub(super) row_number: Option<usize>,
    /// How many cells.
    pub(super) cells: usize,
}

impl Layout {
    pub(super) const SKIP: u8 = u8::MAX;
}

/// Why pages cannot be read.
#[derive(Debug)]
pub(super) enum PageError {
    Io(std::io::Error),
    /// What is wrong, e.g. `page 7 lies beyond the end of the file`.
    Damaged(String),
}

impl From<std::io::Error> for PageError {
    fn from(source: std::io::Error) -> Self {
        PageError::Io(source)
    }
}

fn damaged<T>(page: u32, problem: &str) -> Result<T, PageError> {
    Err(PageError::Damaged(format!("page {page} {problem}")))
}

/// What the file's header says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Header {
    pub(super) page_size: usize,
    /// Bytes of a page that hold content.
    pub(super) usable: usize,
    /// Pages that the file has.
    pub(super) pages: u32,
    /// Pages that the file should have, where its header is to be believed.
    pub(super) expected_pages: Option<u32>,
    pub(super) utf8: bool,
    /// Whether changes may lie in a write-ahead log beside the file.
    pub(super) wal: bool,
}

impl Header {
    /// `None` when these 100 bytes are not the start of an SQLite file.
    pub(super) fn parse(head: &[u8; 100], file_bytes: u64) -> Option<Self> {
        let be16 = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let be32 = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if &head[..16] != MAGIC {
            return None;
        }
        let page_size = match be16(16) {
            1 => 65_536,
            size if size >= 512 && size.is_power_of_two() => usize::from(size),
            _ => return None,
        };
        let usable = page_size - usize::from(head[20]);
        (usable >= 480).then_some(Self {
            page_size,
            usable,
            pages: u32::try_from(file_bytes / page_size as u64).unwrap_or(u32::MAX),
            // The count is only right if the last writer knew of it, which it says by this pair.
            expected_pages: (be32(24) == be32(92) && be32(28) > 0).then(|| be32(28)),
            utf8: matches!(be32(56), 0 | 1),
            wal: head[18] == 2 || head[19] == 2,
        })
    }
}

/// Hands out pages of a file, of which it holds a stretch at a time: tables lie mostly in one piece.
pub(super) struct Pages {
    file: File,
    header: Header,
    window: Vec<u8>,
    first: u32,
    window_pages: u32,
}

impl Pages {
    pub(super) fn open(path: &Path, header: Header, window_bytes: usize) -> std::io::Result<Self> {
        let window_pages = (window_bytes / header.page_size).max(1) as u32;
        Ok(Self { file: File::open(path)?, header, window: Vec::new(), first: 0, window_pages })
    }

    /// The content of a page; pages count from 1.
    fn page(&mut self, number: u32) -> Result<&[u8], PageError> {
        let size = self.header.page_size;
        if number == 0 || number > self.header.pages {
            return damaged(number, "is referred to but lies beyond the end of the file");
        }
        let held = (self.window.len() / size) as u32;
        if self.first == 0 || number < self.first || number - self.first >= held {
            let count = self.window_pages.min(self.header.pages - number + 1);
            self.window.resize(count as usize * size, 0);
            self.first = 0; // in case reading fails
            self.file.seek(SeekFrom::Start(u64::from(number - 1) * size as u64))?;
            self.file.read_exact(&mut self.window)?;
            self.first = number;
        }
        let from = (number - self.first) as usize * size;
        Ok(&self.window[from..from + self.header.usable])
    }

    /// The leaf pages of the table whose root is `root`, in the order of its rows.
    pub(super) fn leaves(&mut self, root: u32) -> Result<Vec<u32>, PageError> {
        let mut leaves = Vec::new();
        let mut waiting = vec![root];
        let mut visited = 0_u32;
        let limit = self.header.pages;
        while let Some(number) = waiting.pop() {
            visited += 1;
            if visited > limit {
                return damaged(number, "is reached twice");
            }
            let page = self.page(number)?;
            let head = if number == 1 { 100 } else { 0 };
            match page[head] {
                13 => leaves.push(number),
                5 => {
                    let children = usize::from(be16(page, head + 3));
                    let mut below = Vec::with_capacity(children + 1);
                    for child in 0..children {
                        let pointer = head + 12 + 2 * child;
                        let Some(cell) = page.get(pointer..pointer + 2).map(|p| usize::from(be16(p, 0))) else {
                            return damaged(number, "has more cells than fit");
                        };
                        let Some(left) = page.get(cell..cell + 4) else {
                            return damaged(number, "has a cell outside of it");
                        };
                        below.push(be32(left, 0));
                    }
                    below.push(be32(page, head + 8));
                    // All children of a page have the same depth: one look tells whether they are leaves, and a large
                    // table's leaves then need not be read twice.
                    let Some(&first) = below.first() else { continue };
                    let head = if first == 1 { 100 } else { 0 };
                    if self.page(first)?[head] == 13 {
                        visited = visited.saturating_add(below.len() as u32);
                        if visited > limit {
                            return damaged(number, "is reached twice");
                        }
                        leaves.append(&mut below);
                    } else {
                        waiting.extend(below.into_iter().rev());
                    }
                }
                _ => return damaged(number, "is not a page of a table"),
            }
        }
        Ok(leaves)
    }

    /// Calls `visit` with every row of these leaf pages.
    pub(super) fn rows(
        &mut self,
        leaves: &[u32],
        layout: &Layout,
        overflow: &mut Pages,
        mut visit: impl FnMut(&Row),
    ) -> Result<(), PageError> {
        let usable = self.header.usable;
        let mut cells = [Cell::Null; MAX_CELLS];
        let cells = &mut cells[..layout.cells];
        let mut long = Vec::new();
        for &number in leaves {
            let page = self.page(number)?;
            let head = if number == 1 { 100 } else { 0 };
            if page[head] != 13 {
                return damaged(number, "is not a leaf of a table");
            }
            let count = usize::from(be16(page, head + 3));
            let Some(pointers) = page.get(head + 8..head + 8 + 2 * count) else {
                return damaged(number, "has more rows than fit");
            };
            for pointer in pointers.as_chunks::<2>().0 {
                let cell = page.get(usize::from(u16::from_be_bytes(*pointer))..).unwrap_or_default();
                let Some((length, id, local)) = row_head(cell) else {
                    return damaged(number, "has a row outside of it");
                };
                let record = if length <= usable - 35 {
                    local.get(..length)
                } else {
                    overflow.long_record(local, length, &mut long)?
                };
                let Some(record) = record.filter(|record| decode(record, layout, id, cells)) else {
                    return damaged(number, "has a row that cannot be decoded");
                };
                visit(&Row { id, cells, bytes: record });
            }
        }
        Ok(())
    }

    /// Puts together a record of which the page holds only the beginning; the rest is a chain of pages.
    fn long_record<'r>(
        &mut self,
        local: &[u8],
        length: usize,
        record: &'r mut Vec<u8>,
    ) -> Result<Option<&'r [u8]>, PageError> {
        let usable = self.header.usable;
        let least = (usable - 12) * 32 / 255 - 23;
        let kept = least + (length - least) % (usable - 4);
        let kept = if kept <= usable - 35 { kept } else { least };
        let Some(link) = local.get(kept..kept + 4) else { return Ok(None) };
        if length as u64 > u64::from(self.header.pages) * self.header.page_size as u64 {
            return Ok(None);
        }
        record.clear();
        record.extend_from_slice(&local[..kept]);
        let mut next = be32(link, 0);
        while record.len() < length {
            let page = self.page(next)?;
            next = be32(page, 0);
            let more = (length - record.len()).min(usable - 4);
            record.extend_from_slice(&page[4..4 + more]);
        }
        Ok(Some(record))
    }
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Length of the record, number of the row, and what follows.
fn row_head(cell: &[u8]) -> Option<(usize, i64, &[u8])> {
    let (length, used) = varint(cell)?;
    let cell = &cell[used..];
    let (id, used) = varint(cell)?;
    Some((usize::try_from(length).ok()?, id as i64, &cell[used..]))
}

/// A number of one to nine bytes, and how many.
#[inline]
fn varint(bytes: &[u8]) -> Option<(u64, usize)> {
    let first = *bytes.first()?;
    if first < 0x80 {
        return Some((u64::from(first), 1));
    }
    let mut value = u64::from(first & 0x7F);
    for at in 1..8 {
        let byte = *bytes.get(at)?;
        value = (value << 7) | u64::from(byte & 0x7F);
        if byte < 0x80 {
            return Some((value, at + 1));
        }
    }
    Some(((value << 8) | u64::from(*bytes.get(8)?), 9))
}

/// Takes a record apart. `false` when it contradicts itself.
fn decode(record: &[u8], layout: &Layout, id: i64, cells: &mut [Cell]) -> bool {
    cells.fill(Cell::Null);
    let Some((head, mut at)) = varint(record) else { return false };
    let Some(types) = usize::try_from(head).ok().and_then(|head| record.get(..head)) else { return false };
    let mut from = types.len();
    for &cell in &layout.cell_of_column {
        let Some(&first) = types.get(at) else { break };
        let serial = if first < 0x80 {
            at += 1;
            u64::from(first)
        } else {
            let Some((serial, used)) = varint(&types[at..]) else { return false };
            at += used;
            serial
        };
        let size = match serial {
            0 | 8 | 9 => 0,
            1..=4 => serial as usize,
            5 => 6,
            6 | 7 => 8,
            10 | 11 => return false,
            _ => usize::try_from((serial - 12) / 2).unwrap_or(usize::MAX),
        };
        let Some(value) = from.checked_add(size).and_then(|end| record.get(from..end)) else { return false };
        if cell != Layout::SKIP {
            cells[usize::from(cell)] = match serial {
                0 => Cell::Null,
                8 => Cell::Int(0),
                9 => Cell::Int(1),
                1..=6 => Cell::Int(signed(value)),
                7 => Cell::Real(f64::from_bits(signed(value) as u64)),
                _ => Cell::Bytes { from: from as u32, len: size as u32 },
            };
        }
        from += size;
    }
    if let Some(cell) = layout.row_number
        && cells[cell] == Cell::Null
    {
        cells[cell] = Cell::Int(id);
    }
    true
}

/// A big-endian two's complement number of one to eight bytes.
#[inline]
fn signed(bytes: &[u8]) -> i64 {
    let mut value = if bytes.first().is_some_and(|b| *b >= 0x80) { -1 } else { 0 };
    for &byte in bytes {
        value = (value << 8) | i64::from(byte);
    }
    value
}
