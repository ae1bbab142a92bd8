//! One file: its columns, decoded.

use std::collections::HashMap;

use super::thrift::{Bytes, Value};
use super::{Damage, WRITER};
use crate::{Interner, StrId};

const MAGIC: &[u8] = b"PAR1";
/// Rows of a page at most, as they are written: a damaged count must not fill the memory.
const MOST_ROWS_PER_PAGE: usize = 1 << 17;

const PLAIN: usize = 0;
const RLE_DICTIONARY: usize = 8;

/// The values of a column by row, numbers of 64 bits as they stand in the file; texts by their number.
pub(super) struct Column {
    kind: Kind,
    values: Vec<u64>,
    /// Which rows have a value, where not all have.
    present: Vec<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Flag,
    Int,
    Float,
    Text,
}

/// A table.
pub(super) struct Table {
    pub(super) rows: usize,
    columns: HashMap<String, Column>,
}

/// What a file is.
pub(super) enum Parsed {
    Table(Table),
    /// Somebody else wrote it.
    Foreign,
}

impl Column {
    fn value(&self, row: usize) -> Option<u64> {
        self.present.get(row).filter(|present| **present)?;
        self.values.get(row).copied()
    }
}

impl Table {
    fn column(&self, name: &str, kind: Kind) -> Result<Option<&Column>, Damage> {
        match self.columns.get(name) {
            Some(column) if column.kind != kind => Err(Damage("a column has another type than strobe writes")),
            found => Ok(found),
        }
    }

    /// The numbers of a column; none where the file lacks it, as those of earlier versions may.
    pub(super) fn ints(&self, name: &str) -> Result<impl Fn(usize) -> Option<i64> + use<'_>, Damage> {
        let column = self.column(name, Kind::Int)?;
        Ok(move |row| column?.value(row).map(|value| value as i64))
    }

    /// The floating-point numbers of a column.
    pub(super) fn floats(&self, name: &str) -> Result<impl Fn(usize) -> Option<f64> + use<'_>, Damage> {
        let column = self.column(name, Kind::Float)?;
        Ok(move |row| column?.value(row).map(f64::from_bits))
    }

    /// The flags of a column.
    pub(super) fn flags(&self, name: &str) -> Result<impl Fn(usize) -> bool + use<'_>, Damage> {
        let column = self.column(name, Kind::Flag)?;
        Ok(move |row| column.and_then(|column| column.value(row)) == Some(1))
    }

    /// The texts of a column, by their numbers.
    pub(super) fn texts(&self, name: &str) -> Result<impl Fn(usize) -> Option<StrId> + use<'_>, Damage> {
        let column = self.column(name, Kind::Text)?;
        Ok(move |row| column?.value(row).map(|value| StrId(value as u32)))
    }
}

/// Decodes a file; its texts are added to `texts`.
pub(super) fn parse(file: &[u8], texts: &mut Interner) -> Result<Parsed, Damage> {
    let inner = file.strip_prefix(MAGIC).and_then(|rest| rest.strip_suffix(MAGIC));
    let inner = inner.ok_or(Damage("it does not begin and end as Parquet does: it is cut, or no Parquet"))?;
    let (before, length) = inner.split_last_chunk::<4>().ok_or(Damage("it ends too early"))?;
    let length = u32::from_le_bytes(*length) as usize;
    let start = before.len().checked_sub(length).ok_or(Damage("its footer is longer than the file"))?;
    let footer = Bytes(&before[start..]).header()?;
    if !footer.text(6).is_ok_and(|writer| writer.starts_with(WRITER)) {
        return Ok(Parsed::Foreign);
    }
    let rows = footer.number(3)?;
    let [root, schema @ ..] = footer.list(2)? else { return Err(Damage("its schema is empty")) };
    if root.number(5)? != schema.len() {
        return Err(Damage("its schema does not have the columns that it counts"));
    }
    let mut columns: Vec<(Decoder, Column)> = Vec::new();
    for element in schema {
        let (decoder, kind) = Decoder::of(element)?;
        columns.push((decoder, Column { kind, values: Vec::new(), present: Vec::new() }));
    }
    for group in footer.list(4)? {
        let chunks = group.list(1)?;
        if chunks.len() != columns.len() {
            return Err(Damage("a group of rows lacks columns"));
        }
        let rows = group.number(3)?;
        for ((decoder, column), chunk) in columns.iter_mut().zip(chunks) {
            decoder.chunk(file, chunk, rows, column, texts)?;
        }
    }
    let names = schema.iter().map(|element| element.text(4).map(str::to_owned));
    let names: Vec<String> = names.collect::<Result<_, _>>()?;
    if columns.iter().any(|(_, column)| column.present.len() != rows) {
        return Err(Damage("it does not have the rows that it counts"));
    }
    let columns = names.into_iter().zip(columns.into_iter().map(|(_, column)| column)).collect();
    Ok(Parsed::Table(Table { rows, columns }))
}

/// How the values of a column stand in the file.
#[derive(Clone, Copy)]
struct Decoder {
    kind: Kind,
    nullable: bool,
}

impl Decoder {
    fn of(element: &Value) -> Result<(Self, Kind), Damage> {
        let kind = match element.number(1)? {
            0 => Kind::Flag,
            2 => Kind::Int,
            5 => Kind::Float,
            6 => Kind::Text,
            _ => return Err(Damage("a column has a type that strobe does not write")),
        };
        Ok((Self { kind, nullable: element.number(3)? == 1 }, kind))
    }

    /// Adds the values of a chunk of `rows` rows.
    fn chunk(
        self,
        file: &[u8],
        chunk: &Value,
        rows: usize,
        column: &mut Column,
        texts: &mut Interner,
    ) -> Result<(), Damage> {
        let meta = chunk.field(3).ok_or(Damage("a column has no header"))?;
        if meta.number(4)? != 0 {
            return Err(Damage("a column is compressed, which strobe does not do"));
        }
        let start = if meta.field(11).is_some() { meta.number(11)? } else { meta.number(9)? };
        let end = start.checked_add(meta.number(7)?).filter(|&end| end <= file.len());
        let range =
            end.and_then(|end| file.get(start..end)).ok_or(Damage("a column lies beyond the end of the file"))?;
        let mut bytes = Bytes(range);
        let mut dictionary: Vec<u64> = Vec::new();
        let mut read = 0;
        while read < rows {
            let header = bytes.header()?;
            let mut page = Bytes(bytes.take(header.number(3)?)?);
            if header.number(1)? == 2 {
                let count = header.field(7).ok_or(Damage("a dictionary has no header"))?.number(1)?;
                dictionary = self.plain(&mut page, count, texts)?;
                continue;
            }
            let data = header.field(5).ok_or(Damage("a page has no header"))?;
            let of_page = data.number(1)?;
            if of_page == 0 || of_page > MOST_ROWS_PER_PAGE.min(rows - read) {
                return Err(Damage("a page counts rows that it cannot have"));
            }
            read += of_page;
            let present: Vec<bool> = if self.nullable {
                let length = page.word()?;
                hybrid(&mut Bytes(page.take(length)?), 1, of_page)?.into_iter().map(|level| level == 1).collect()
            } else {
                vec![true; of_page]
            };
            let count = present.iter().filter(|present| **present).count();
            let values = match data.number(2)? {
                PLAIN => self.plain(&mut page, count, texts)?,
                RLE_DICTIONARY => {
                    let width = page.byte()?;
                    let places = hybrid(&mut page, width, count)?;
                    let value = |place: u32| dictionary.get(place as usize).copied();
                    let values = places.into_iter().map(value).collect::<Option<Vec<u64>>>();
                    values.ok_or(Damage("a value is not in the dictionary of its column"))?
                }
                _ => return Err(Damage("a page is encoded as strobe does not do")),
            };
            let mut values = values.into_iter();
            let of_row = present.iter().map(|&present| if present { values.next().unwrap_or(0) } else { 0 });
            column.values.extend(of_row);
            column.present.extend(present);
        }
        Ok(())
    }

    /// So many values one behind the other.
    fn plain(self, page: &mut Bytes, count: usize, texts: &mut Interner) -> Result<Vec<u64>, Damage> {
        match self.kind {
            Kind::Flag => {
                let packed = page.take(count.div_ceil(8))?;
                Ok((0..count).map(|at| u64::from(packed[at / 8] >> (at % 8) & 1)).collect())
            }
            Kind::Int | Kind::Float => {
                let bytes = page.take(count.checked_mul(8).ok_or(Damage("a page is too long"))?)?;
                let (words, _) = bytes.as_chunks::<8>();
                Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
            }
            Kind::Text => {
                let mut numbers = Vec::new();
                for _ in 0..count {
                    let length = page.word()?;
                    let text = std::str::from_utf8(page.take(length)?).map_err(|_| Damage("a text is not UTF-8"))?;
                    numbers.push(u64::from(texts.intern(text).0));
                }
                Ok(numbers)
            }
        }
    }
}

/// Runs and packed groups of `width` bits each until there are `count` values.
fn hybrid(bytes: &mut Bytes, width: u8, count: usize) -> Result<Vec<u32>, Damage> {
    if width > 32 {
        return Err(Damage("a page packs values into more than 32 bits"));
    }
    let width = usize::from(width);
    let mut values = Vec::with_capacity(count);
    while values.len() < count {
        let head = bytes.varint()?;
        let left = count - values.len();
        let length = usize::try_from(head >> 1).unwrap_or(usize::MAX);
        if length == 0 {
            return Err(Damage("a page holds an empty run"));
        }
        if head & 1 == 0 {
            let mut value = [0; 4];
            let given = bytes.take(width.div_ceil(8))?;
            value[..given.len()].copy_from_slice(given);
            values.extend(std::iter::repeat_n(u32::from_le_bytes(value), length.min(left)));
            continue;
        }
        let packed = bytes.take(length.checked_mul(width).ok_or(Damage("a page is too long"))?)?;
        let (mut bits, mut held, mut next) = (0u64, 0, packed.iter());
        for _ in 0..length.saturating_mul(8).min(left) {
            while held < width {
                let Some(&byte) = next.next() else { return Err(Damage("a page ends too early")) };
                bits |= u64::from(byte) << held;
                held += 8;
            }
            values.push((bits & ((1u64 << width) - 1)) as u32);
            bits >>= width;
            held -= width;
        }
    }
    Ok(values)
}
