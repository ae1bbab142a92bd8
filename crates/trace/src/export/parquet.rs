//! Parquet, as little of it as every reader knows: version 1 pages, uncompressed; numbers plain or, where few of them
//! are distinct, through a dictionary; text always through a dictionary.

use std::collections::HashMap;
use std::hash::Hash;
use std::io::Write;

use super::tables::{Column, Table, Values};
use super::thrift::{Compact, push_varint};
use crate::TraceError;
use crate::intern::FastHash;

const MAGIC: &[u8] = b"PAR1";
/// What readers take in at once.
const ROWS_PER_GROUP: usize = 1 << 20;
const ROWS_PER_PAGE: usize = 1 << 17;
/// Beyond this a dictionary of numbers saves little and costs time.
const MOST_DISTINCT_NUMBERS: usize = 1 << 12;

const PLAIN: i32 = 0;
const RLE: i32 = 3;
const RLE_DICTIONARY: i32 = 8;

/// Writes one table.
pub(crate) fn write(table: &Table, out: impl Write) -> Result<(), TraceError> {
    let mut out = Counted { out, bytes: 0 };
    out.write(MAGIC)?;
    let mut groups = Vec::new();
    for first in (0..table.rows).step_by(ROWS_PER_GROUP) {
        let rows = first..table.rows.min(first + ROWS_PER_GROUP);
        let length = rows.len();
        let chunks = table.columns.iter().map(|column| write_chunk(column, rows.clone(), &mut out));
        groups.push(Group { rows: length, chunks: chunks.collect::<Result<_, _>>()? });
    }
    let mut footer = Compact::default();
    footer.fields(|footer| file_meta_data(footer, table, &groups));
    out.write(&footer.bytes)?;
    out.write(&(footer.bytes.len() as u32).to_le_bytes())?;
    out.write(MAGIC)
}

struct Counted<W: Write> {
    out: W,
    bytes: u64,
}

impl<W: Write> Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), TraceError> {
        self.out.write_all(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

struct Group {
    rows: usize,
    chunks: Vec<Chunk>,
}

/// Where the values of one column of one group are.
struct Chunk {
    name: &'static str,
    physical: i32,
    values: usize,
    nulls: usize,
    start: u64,
    first_data_page: u64,
    dictionary: bool,
    bytes: u64,
    /// Smallest and largest value.
    bounds: Option<[[u8; 8]; 2]>,
}

/// The values of a chunk that are not null, ready to be encoded.
enum Encoded {
    /// Values of this many bytes each, one behind the other.
    Wide(Vec<u8>),
    Bits(Vec<bool>),
    /// Places in a dictionary of this many entries.
    Dictionary {
        entries: Vec<u8>,
        count: usize,
        places: Vec<u32>,
    },
}

fn physical_type(values: &Values) -> i32 {
    match values {
        Values::Flag(_) => 0,
        Values::Int(_) | Values::Unsigned(_) => 2,
        Values::Float(_) => 5,
        Values::Text(_) => 6,
    }
}

fn write_chunk<W: Write>(
    column: &Column,
    rows: std::ops::Range<usize>,
    out: &mut Counted<W>,
) -> Result<Chunk, TraceError> {
    let mut present = Vec::with_capacity(rows.len());
    let mut bounds = None;
    let encoded = match &column.values {
        Values::Int(get) => {
            let values = collect(rows.clone(), get, &mut present);
            bounds = bounds_of(values.iter().copied(), i64::to_le_bytes);
            numbers(&values, |value| value.to_le_bytes())
        }
        Values::Unsigned(get) => {
            let values = collect(rows.clone(), get, &mut present);
            bounds = bounds_of(values.iter().copied(), u64::to_le_bytes);
            numbers(&values, |value| value.to_le_bytes())
        }
        Values::Float(get) => {
            let values: Vec<u64> = collect(rows.clone(), &|row| get(row).map(f64::to_bits), &mut present);
            numbers(&values, |bits| bits.to_le_bytes())
        }
        Values::Flag(get) => Encoded::Bits(collect(rows.clone(), get, &mut present)),
        Values::Text(get) => {
            let mut dictionary = Dictionary::default();
            let mut entries = Vec::new();
            let mut place = |text: &str| {
                // Equal texts of a trace are nearly always one text in memory: no need to look at their letters.
                let (place, is_new) = dictionary.place((text.as_ptr() as u64, text.len() as u64));
                if is_new {
                    entries.extend_from_slice(&(text.len() as u32).to_le_bytes());
                    entries.extend_from_slice(text.as_bytes());
                }
                place
            };
            let places = collect(rows.clone(), &|row| get(row), &mut present).into_iter().map(&mut place).collect();
            Encoded::Dictionary { entries, count: dictionary.numbers.len(), places }
        }
    };
    let mut chunk = Chunk {
        name: column.name,
        physical: physical_type(&column.values),
        values: rows.len(),
        nulls: present.iter().filter(|&&p| !p).count(),
        start: out.bytes,
        first_data_page: out.bytes,
        dictionary: false,
        bytes: 0,
        bounds,
    };
    if let Encoded::Dictionary { entries, count, .. } = &encoded {
        write_page(out, entries, Page::Dictionary { entries: *count })?;
        chunk.dictionary = true;
        chunk.first_data_page = out.bytes;
    }
    let mut done = 0;
    for first in (0..rows.len()).step_by(ROWS_PER_PAGE) {
        let rows_of_page = ROWS_PER_PAGE.min(rows.len() - first);
        let mut page = Vec::new();
        let mut values = rows_of_page;
        if column.nullable {
            let levels: Vec<u32> = present[first..first + rows_of_page].iter().map(|&p| u32::from(p)).collect();
            values = levels.iter().map(|&level| level as usize).sum();
            let levels = hybrid(&levels, 1);
            page.extend_from_slice(&(levels.len() as u32).to_le_bytes());
            page.extend_from_slice(&levels);
        }
        let range = done..done + values;
        done += values;
        let encoding = match &encoded {
            Encoded::Wide(bytes) => {
                page.extend_from_slice(&bytes[8 * range.start..8 * range.end]);
                PLAIN
            }
            Encoded::Bits(bits) => {
                let byte = |bits: &[bool]| (0..).zip(bits).map(|(at, &bit)| u8::from(bit) << at).sum::<u8>();
                page.extend(bits[range].chunks(8).map(byte));
                PLAIN
            }
            Encoded::Dictionary { count, places, .. } => {
                let width = (usize::BITS - count.saturating_sub(1).leading_zeros()).max(1);
                page.push(width as u8);
                page.extend(hybrid(&places[range], width));
                RLE_DICTIONARY
            }
        };
        write_page(out, &page, Page::Data { rows: rows_of_page, encoding })?;
    }
    chunk.bytes = out.bytes - chunk.start;
    Ok(chunk)
}

fn collect<T>(rows: std::ops::Range<usize>, get: &dyn Fn(usize) -> Option<T>, present: &mut Vec<bool>) -> Vec<T> {
    let mut values = Vec::with_capacity(rows.len());
    for row in rows {
        let value = get(row);
        present.push(value.is_some());
        values.extend(value);
    }
    values
}

fn bounds_of<T: Ord + Copy>(values: impl Iterator<Item = T> + Clone, bytes: fn(T) -> [u8; 8]) -> Option<[[u8; 8]; 2]> {
    Some([bytes(values.clone().min()?), bytes(values.max()?)])
}

/// Through a dictionary if few values are distinct, else plain.
fn numbers<T: Copy + Eq + Hash>(values: &[T], bytes: impl Fn(T) -> [u8; 8]) -> Encoded {
    let mut dictionary = Dictionary::default();
    let mut entries = Vec::new();
    let mut places = Vec::with_capacity(values.len());
    for &value in values {
        let (place, is_new) = dictionary.place(value);
        if is_new {
            if dictionary.numbers.len() > MOST_DISTINCT_NUMBERS.min(values.len() / 4 + 1) {
                return Encoded::Wide(values.iter().flat_map(|&value| bytes(value)).collect());
            }
            entries.extend_from_slice(&bytes(value));
        }
        places.push(place);
    }
    if values.is_empty() {
        return Encoded::Wide(Vec::new());
    }
    Encoded::Dictionary { entries, count: dictionary.numbers.len(), places }
}

struct Dictionary<K> {
    numbers: HashMap<K, u32, FastHash>,
}

impl<K> Default for Dictionary<K> {
    fn default() -> Self {
        Self { numbers: HashMap::default() }
    }
}

impl<K: Eq + Hash> Dictionary<K> {
    /// The place of a key, and whether it is new.
    fn place(&mut self, key: K) -> (u32, bool) {
        let next = self.numbers.len() as u32;
        let place = *self.numbers.entry(key).or_insert(next);
        (place, place == next && self.numbers.len() as u32 > next)
    }
}

enum Page {
    Dictionary { entries: usize },
    Data { rows: usize, encoding: i32 },
}

fn write_page<W: Write>(out: &mut Counted<W>, payload: &[u8], page: Page) -> Result<(), TraceError> {
    let mut header = Compact::default();
    header.fields(|header| {
        header.i32(1, if matches!(page, Page::Dictionary { .. }) { 2 } else { 0 });
        header.i32(2, payload.len() as i32);
        header.i32(3, payload.len() as i32);
        match page {
            Page::Data { rows, encoding } => header.nested(5, |page| {
                page.i32(1, rows as i32);
                page.i32(2, encoding);
                page.i32(3, RLE);
                page.i32(4, RLE);
            }),
            Page::Dictionary { entries } => header.nested(7, |page| {
                page.i32(1, entries as i32);
                page.i32(2, PLAIN);
            }),
        }
    });
    out.write(&header.bytes)?;
    out.write(payload)
}

/// Runs of equal values and groups of eight packed ones, as Parquet mixes them.
fn hybrid(values: &[u32], width: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let run_at = |at: usize, most: usize| {
        let rest = &values[at..values.len().min(at.saturating_add(most))];
        rest.iter().take_while(|&&value| value == rest[0]).count()
    };
    let mut at = 0;
    while at < values.len() {
        if run_at(at, 8) == 8 {
            let run = run_at(at, usize::MAX);
            push_varint(&mut bytes, (run as u64) << 1);
            bytes.extend_from_slice(&values[at].to_le_bytes()[..width.div_ceil(8) as usize]);
            at += run;
            continue;
        }
        let start = at;
        while at < values.len() && run_at(at, 8) < 8 {
            at = values.len().min(at + 8);
        }
        let packed = &values[start..at];
        push_varint(&mut bytes, (packed.len().div_ceil(8) as u64) << 1 | 1);
        for group in packed.chunks(8) {
            let (mut bits, mut held) = (0u64, 0u32); // eight values fill whole bytes
            for at in 0..8 {
                bits |= u64::from(group.get(at).copied().unwrap_or(0)) << held;
                held += width;
                while held >= 8 {
                    bytes.push(bits as u8);
                    bits >>= 8;
                    held -= 8;
                }
            }
        }
    }
    bytes
}

fn file_meta_data(footer: &mut Compact, table: &Table, groups: &[Group]) {
    footer.i32(1, 1);
    let elements: Vec<Option<&Column>> = std::iter::once(None).chain(table.columns.iter().map(Some)).collect();
    footer.structs(2, &elements, |out, element| match element {
        None => {
            out.binary(4, table.name.as_bytes());
            out.i32(5, table.columns.len() as i32);
        }
        Some(column) => schema_element(out, column),
    });
    footer.i64(3, table.rows as i64);
    footer.structs(4, groups, |out, group| {
        out.structs(1, &group.chunks, column_chunk);
        out.i64(2, group.chunks.iter().map(|chunk| chunk.bytes as i64).sum());
        out.i64(3, group.rows as i64);
    });
    footer.binary(6, concat!("strobe version ", env!("CARGO_PKG_VERSION")).as_bytes());
    // Without it readers do not trust the bounds: every column is ordered as its type is.
    footer.structs(7, &table.columns, |out, _| out.nested(1, |_| {}));
}

fn schema_element(out: &mut Compact, column: &Column) {
    out.i32(1, physical_type(&column.values));
    out.i32(3, i32::from(column.nullable));
    out.binary(4, column.name.as_bytes());
    match column.values {
        Values::Text(_) => {
            out.i32(6, 0); // UTF8
            out.nested(10, |logical| logical.nested(1, |_| {}));
        }
        Values::Unsigned(_) => {
            out.i32(6, 14); // UINT_64
            out.nested(10, |logical| {
                logical.nested(10, |integer| {
                    integer.i8(1, 64);
                    integer.flag(2, false);
                });
            });
        }
        Values::Int(_) | Values::Float(_) | Values::Flag(_) => {}
    }
}

fn column_chunk(out: &mut Compact, chunk: &Chunk) {
    out.i64(2, chunk.start as i64);
    out.nested(3, |meta| {
        meta.i32(1, chunk.physical);
        meta.i32s(2, if chunk.dictionary { &[PLAIN, RLE, RLE_DICTIONARY] } else { &[PLAIN, RLE] });
        meta.strings(3, &[chunk.name]);
        meta.i32(4, 0); // uncompressed
        meta.i64(5, chunk.values as i64);
        meta.i64(6, chunk.bytes as i64);
        meta.i64(7, chunk.bytes as i64);
        meta.i64(9, chunk.first_data_page as i64);
        if chunk.dictionary {
            meta.i64(11, chunk.start as i64);
        }
        meta.nested(12, |statistics| {
            statistics.i64(3, chunk.nulls as i64);
            if let Some([smallest, largest]) = &chunk.bounds {
                statistics.binary(5, largest);
                statistics.binary(6, smallest);
            }
        });
    });
}
