//! Reading GGUF files: fields and tensors, memory-mapped and completely checked when a file is opened.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::{ModelError, excerpt};
use crate::gguf_blocks::{self, BlockType};

const MAGIC: &[u8; 4] = b"GGUF";
/// Lists of lists are allowed by the format and used by nobody; a file must not decide how deep this program recurses.
const DEEPEST_LIST: usize = 4;
const MOST_DIMENSIONS: u32 = 4;
const AGAIN: &str = "copy or download the file again";

/// One GGUF file.
///
/// The file must not be cut short while it is mapped: the operating system would stop the program at the next access.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

/// A tensor inside a mapped file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GgufTensor<'a> {
    pub(crate) kind: BlockType,
    /// Its dimensions, the slowest first.
    pub(crate) shape: &'a [usize],
    pub(crate) data: &'a [u8],
}

#[derive(Debug, Default)]
struct Header {
    fields: HashMap<String, Field>,
    tensors: HashMap<String, Entry>,
    /// Where the tensors' data begins in the file.
    data_start: usize,
}

/// The value of a field. Texts and lists stay in the file until they are asked for.
#[derive(Clone, Debug)]
enum Field {
    Whole(i128),
    Number(f64),
    Flag(bool),
    Text(Range<usize>),
    List { kind: u32, count: u64, bytes: Range<usize> },
}

#[derive(Clone, Debug)]
struct Entry {
    kind: BlockType,
    shape: Vec<usize>,
    /// Byte range from the start of the data.
    bytes: Range<usize>,
}

impl Gguf {
    /// Whether a path is a file that starts as GGUF files do.
    pub fn is_gguf(path: &Path) -> bool {
        use std::io::Read;
        let mut start = [0; 4];
        path.is_file() && File::open(path).and_then(|mut f| f.read_exact(&mut start)).is_ok() && start == *MAGIC
    }

    /// Maps a file and checks all of its header: every length, count, offset and type.
    pub fn open(path: &Path) -> Result<Gguf, ModelError> {
        let file = File::open(path).map_err(ModelError::io("open", path))?;
        if !file.metadata().map_err(ModelError::io("read", path))?.is_file() {
            return Err(ModelError::gguf(path, "not a regular file; expected a GGUF file"));
        }
        // SAFETY: the map is read-only and private to this value. That nobody shortens the file meanwhile is a
        // documented condition; content that changes only changes numbers and texts, all of which are read with checks.
        let map = unsafe { Mmap::map(&file) }.map_err(ModelError::io("map", path))?;
        let header = read_header(&map).map_err(|problem| ModelError::gguf(path, problem))?;
        #[cfg(unix)]
        let _ = map.advise(memmap2::Advice::Sequential); // only a hint
        Ok(Gguf { path: path.to_path_buf(), map, header })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all tensors, in no particular order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    pub(crate) fn tensor(&self, name: &str) -> Option<GgufTensor<'_>> {
        let entry = self.header.tensors.get(name)?;
        let data = self.map.get(self.header.data_start..)?.get(entry.bytes.clone())?;
        Some(GgufTensor { kind: entry.kind, shape: &entry.shape, data })
    }

    /// A whole number of at least 0, of whatever width.
    pub(crate) fn whole(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.field(key, "a whole number", |field| match field {
            Field::Whole(value) => usize::try_from(*value).ok(),
            _ => None,
        })
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.field(key, "a number", |field| match field {
            Field::Number(value) => Some(*value),
            Field::Whole(value) => Some(*value as f64),
            _ => None,
        })
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.field(key, "true or false", |field| match field {
            Field::Flag(value) => Some(*value),
            _ => None,
        })
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.field(key, "a text in UTF-8", |field| match field {
            Field::Text(range) => std::str::from_utf8(self.map.get(range.clone())?).ok(),
            _ => None,
        })
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        self.list(key, kind::TEXT, "a list of texts in UTF-8", |cursor| {
            let range = cursor.text("a text").ok()?;
            std::str::from_utf8(self.map.get(range)?).ok()
        })
    }

    pub(crate) fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        self.list(key, kind::F32, "a list of 32-bit floats", |cursor| cursor.array().ok().map(f32::from_le_bytes))
    }

    pub(crate) fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, ModelError> {
        self.list(key, kind::I32, "a list of 32-bit whole numbers", |cursor| {
            cursor.array().ok().map(i32::from_le_bytes)
        })
    }

    fn field<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Field) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(field) = self.header.fields.get(key) else { return Ok(None) };
        let found = match field {
            Field::Whole(value) => value.to_string(),
            Field::Number(value) => value.to_string(),
            Field::Flag(value) => value.to_string(),
            Field::Text(_) => "a text".to_string(),
            Field::List { count, .. } => format!("a list of {count}"),
        };
        let wrong = || ModelError::config(&self.path, excerpt(key), format!("expected {expected}, found {found}"));
        read(field).map(Some).ok_or_else(wrong)
    }

    fn list<'a, T>(
        &'a self,
        key: &str,
        item_kind: u32,
        expected: &str,
        read: impl Fn(&mut Cursor<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        self.field(key, expected, |field| match field {
            Field::List { kind, count, bytes } if *kind == item_kind => {
                let mut cursor = Cursor { bytes: &self.map, at: bytes.start };
                (0..*count).map(|_| read(&mut cursor)).collect()
            }
            _ => None,
        })
    }
}

/// Numbers of the value types that are named in this file.
mod kind {
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const TEXT: u32 = 8;
    pub(super) const LIST: u32 = 9;
}

/// Bytes of a value of fixed size.
fn fixed_bytes(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn read_header(file: &[u8]) -> Result<Header, String> {
    let mut cursor = Cursor { bytes: file, at: 0 };
    if cursor.take(4, "the magic")? != MAGIC {
        return Err("not a GGUF file: it does not start with `GGUF`".to_string());
    }
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => {}
        1 => return Err("GGUF version 1 is not supported (2 and 3 are); convert the model again".to_string()),
        swapped if (2..=3).contains(&swapped.swap_bytes()) => {
            return Err("a big-endian GGUF file is not supported; convert the model for little-endian".to_string());
        }
        other => return Err(format!("GGUF version {other} is not supported (2 and 3 are)")),
    }
    let tensor_count = cursor.u64("the number of tensors")?;
    let field_count = cursor.u64("the number of fields")?;
    let mut header = Header::default();
    for number in 0..field_count {
        let key = cursor.name(&format!("the key of field {} of {field_count}", number + 1))?;
        let value = cursor.value(&key)?;
        if header.fields.insert(key.clone(), value).is_some() {
            return Err(format!("damaged header: field `{}` is there twice; {AGAIN}", excerpt(&key)));
        }
    }
    let alignment = alignment(&header)?;
    let mut offsets = Vec::new();
    for number in 0..tensor_count {
        let name = cursor.name(&format!("the name of tensor {} of {tensor_count}", number + 1))?;
        offsets.push((name, cursor.tensor_info()?));
    }
    header.data_start = cursor.at.next_multiple_of(alignment);
    for (name, info) in offsets {
        let entry = info.entry(file.len(), header.data_start, alignment);
        let entry = entry.map_err(|problem| format!("tensor `{}`: {problem}", excerpt(&name)))?;
        if header.tensors.insert(name.clone(), entry).is_some() {
            return Err(format!("damaged header: tensor `{}` is listed twice; {AGAIN}", excerpt(&name)));
        }
    }
    Ok(header)
}

fn alignment(header: &Header) -> Result<usize, String> {
    match header.fields.get("general.alignment") {
        None => Ok(32),
        Some(Field::Whole(value)) if (1..=1 << 20).contains(value) && value.count_ones() == 1 => Ok(*value as usize),
        Some(_) => Err("field `general.alignment`: expected a power of two, up to 1048576".to_string()),
    }
}

/// A tensor as the header lists it.
struct TensorInfo {
    /// The fastest dimension first.
    dimensions: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl TensorInfo {
    fn entry(&self, file_bytes: usize, data_start: usize, alignment: usize) -> Result<Entry, String> {
        let kind = gguf_blocks::by_number(self.kind).ok_or_else(|| {
            format!(
                "its type number {} is unknown; readable types: {}; convert the model to one of them",
                self.kind,
                gguf_blocks::READABLE
            )
        })?;
        let damaged = |problem: String| format!("{problem}; {AGAIN}");
        let elements = self.dimensions.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let row = self.dimensions.first().copied().unwrap_or(1);
        if !row.is_multiple_of(kind.elements as u64) {
            return Err(damaged(format!(
                "rows of {row} elements are not whole {} blocks of {}",
                kind.name, kind.elements
            )));
        }
        let range = || {
            let bytes = (elements? / kind.elements as u64).checked_mul(kind.bytes as u64)?;
            let begin = usize::try_from(self.offset).ok()?;
            Some(begin..begin.checked_add(usize::try_from(bytes).ok()?)?)
        };
        let range = range().ok_or_else(|| damaged(format!("shape {:?} is not possible", self.dimensions)))?;
        if !range.start.is_multiple_of(alignment) {
            return Err(damaged(format!("offset {} is not a multiple of the alignment {alignment}", range.start)));
        }
        let end = range.end.saturating_add(data_start);
        if end > file_bytes {
            let begin = range.start.saturating_add(data_start);
            return Err(damaged(format!("truncated: it needs bytes {begin}..{end} but the file ends at {file_bytes}")));
        }
        // Sizes fit: their product is no more than bytes of the file, or one of them is zero.
        let shape = self.dimensions.iter().rev().map(|size| usize::try_from(*size).ok()).collect::<Option<_>>();
        let shape = shape.ok_or_else(|| damaged(format!("shape {:?} is not possible", self.dimensions)))?;
        Ok(Entry { kind, shape, bytes: range })
    }
}

/// A place in the file. Nothing is allocated by what a count says, only by what is there.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else {
            return Err(format!(
                "truncated: {what} needs {count} bytes from byte {} but the file ends at {}; {AGAIN}",
                self.at,
                self.bytes.len()
            ));
        };
        let taken = self.bytes.get(self.at..end).unwrap_or_default();
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.take(N, "a value")?.try_into().map_err(|_| "a value is cut short".to_string())
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.take(4, what)?.try_into().unwrap_or_default()))
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.take(8, what)?.try_into().unwrap_or_default()))
    }

    fn text(&mut self, what: &str) -> Result<Range<usize>, String> {
        let length = self.u64(what)?;
        let begin = self.at;
        self.take(usize::try_from(length).unwrap_or(usize::MAX), what)?;
        Ok(begin..self.at)
    }

    /// A key or the name of a tensor.
    fn name(&mut self, what: &str) -> Result<String, String> {
        let range = self.text(what)?;
        let name = self.bytes.get(range).and_then(|bytes| std::str::from_utf8(bytes).ok());
        name.map(str::to_string).ok_or_else(|| format!("damaged header: {what} is not UTF-8; {AGAIN}"))
    }

    fn value(&mut self, key: &str) -> Result<Field, String> {
        let what = format!("field `{}`", excerpt(key));
        let kind = self.u32(&what)?;
        Ok(match kind {
            0 => Field::Whole(u8::from_le_bytes(self.array()?).into()),
            1 => Field::Whole(i8::from_le_bytes(self.array()?).into()),
            2 => Field::Whole(u16::from_le_bytes(self.array()?).into()),
            3 => Field::Whole(i16::from_le_bytes(self.array()?).into()),
            4 => Field::Whole(u32::from_le_bytes(self.array()?).into()),
            5 => Field::Whole(i32::from_le_bytes(self.array()?).into()),
            6 => Field::Number(shortest(f32::from_le_bytes(self.array()?))),
            7 => Field::Flag(self.array::<1>()? != [0]),
            kind::TEXT => Field::Text(self.text(&what)?),
            kind::LIST => self.list(&what, 1)?,
            10 => Field::Whole(u64::from_le_bytes(self.array()?).into()),
            11 => Field::Whole(i64::from_le_bytes(self.array()?).into()),
            12 => Field::Number(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("damaged header: {what} has the unknown value type {other}; {AGAIN}")),
        })
    }

    fn list(&mut self, what: &str, depth: usize) -> Result<Field, String> {
        let kind = self.u32(what)?;
        let count = self.u64(what)?;
        let begin = self.at;
        match (kind, fixed_bytes(kind)) {
            (_, Some(bytes)) => {
                let total = usize::try_from(count).ok().and_then(|count| count.checked_mul(bytes));
                self.take(total.unwrap_or(usize::MAX), what)?;
            }
            (kind::TEXT, _) => {
                for _ in 0..count {
                    self.text(what)?;
                }
            }
            (kind::LIST, _) if depth < DEEPEST_LIST => {
                for _ in 0..count {
                    self.list(what, depth + 1)?;
                }
            }
            (kind::LIST, _) => return Err(format!("damaged header: {what} holds lists too deep; {AGAIN}")),
            (other, _) => {
                return Err(format!("damaged header: {what} is a list of the unknown value type {other}; {AGAIN}"));
            }
        }
        Ok(Field::List { kind, count, bytes: begin..self.at })
    }

    fn tensor_info(&mut self) -> Result<TensorInfo, String> {
        let what = "a tensor's description";
        let rank = self.u32(what)?;
        if rank > MOST_DIMENSIONS {
            return Err(format!("damaged header: a tensor has {rank} dimensions (at most {MOST_DIMENSIONS}); {AGAIN}"));
        }
        let dimensions = (0..rank).map(|_| self.u64(what)).collect::<Result<Vec<u64>, String>>()?;
        Ok(TensorInfo { dimensions, kind: self.u32(what)?, offset: self.u64(what)? })
    }
}

/// The decimal number that was meant by a 32-bit float: 0.00001, not 0.000009999999747.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}
