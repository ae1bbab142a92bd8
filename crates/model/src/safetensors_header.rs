//! The safetensors header: parsed and checked completely before any tensor is handed out.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

use crate::error::excerpt;

/// The length prefix is eight bytes, little-endian.
pub(crate) const PREFIX: u64 = 8;

/// The limit that other readers have as well; a real header is far smaller.
pub(crate) const MOST_HEADER_BYTES: u64 = 100_000_000;

/// One tensor: its type, shape and place in the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Byte range from the start of the data section.
    pub(crate) begin: usize,
    pub(crate) end: usize,
}

/// A checked header.
#[derive(Debug, Default)]
pub(crate) struct Header {
    /// In the order of the header.
    pub(crate) entries: Vec<(String, Entry)>,
    /// Position in `entries` by name.
    pub(crate) index: HashMap<String, usize>,
    pub(crate) metadata: BTreeMap<String, String>,
}

/// Length of the header from the first bytes of a file of `file_bytes` bytes.
pub(crate) fn header_bytes(start: &[u8], file_bytes: u64) -> Result<u64, String> {
    let Some(prefix) = start.first_chunk::<8>() else {
        return Err(format!(
            "not a safetensors file: it has {file_bytes} bytes, fewer than the 8 of the length prefix; copy the file again"
        ));
    };
    let header = u64::from_le_bytes(*prefix);
    if header > MOST_HEADER_BYTES {
        return Err(format!(
            "not a safetensors file: its length prefix asks for a header of {header} bytes (at most {MOST_HEADER_BYTES})"
        ));
    }
    if header > file_bytes - PREFIX {
        return Err(format!(
            "truncated: the header needs bytes 8..{} but the file ends at {file_bytes}; copy the file again",
            header + PREFIX
        ));
    }
    Ok(header)
}

/// Parses the header and checks every entry against a data section of `data_bytes` that begins at `data_start`.
pub(crate) fn parse(json: &[u8], data_start: u64, data_bytes: u64) -> Result<Header, String> {
    let text = std::str::from_utf8(json)
        .map_err(|e| format!("damaged header: not UTF-8 after byte {}; copy the file again", e.valid_up_to()))?;
    let members = members(text)?;
    let mut header = Header::default();
    for (name, value) in members {
        if name == "__metadata__" {
            header.metadata = metadata(value)?;
            continue;
        }
        let entry = entry(&value).and_then(|entry| check_length(&entry).map(|()| entry)).map_err(|problem| {
            format!("damaged header: tensor `{}`: {problem}; copy the file again", excerpt(&name))
        })?;
        if entry.end as u64 > data_bytes {
            // Positions in the file: that is what a user can compare with its size.
            return Err(format!(
                "truncated: tensor `{}` needs bytes {}..{} but the file ends at {}; copy the file again",
                excerpt(&name),
                (entry.begin as u64).saturating_add(data_start),
                (entry.end as u64).saturating_add(data_start),
                data_bytes + data_start
            ));
        }
        if header.index.insert(name.clone(), header.entries.len()).is_some() {
            return Err(format!("damaged header: tensor `{}` is listed twice; copy the file again", excerpt(&name)));
        }
        header.entries.push((name, entry));
    }
    check_coverage(&header.entries, data_bytes)?;
    Ok(header)
}

fn metadata(value: Value) -> Result<BTreeMap<String, String>, String> {
    serde_json::from_value(value)
        .map_err(|_| "damaged header: `__metadata__` is not a map from text to text; copy the file again".to_string())
}

fn entry(value: &Value) -> Result<Entry, String> {
    let dtype = value.get("dtype").and_then(Value::as_str).ok_or("has no `dtype`")?.to_string();
    let numbers = |field: &str| -> Result<Vec<usize>, String> {
        let list = value.get(field).and_then(Value::as_array).ok_or_else(|| format!("has no list `{field}`"))?;
        list.iter()
            .map(|item| item.as_u64().and_then(|n| usize::try_from(n).ok()))
            .collect::<Option<Vec<usize>>>()
            .ok_or_else(|| {
                format!("`{field}` is {}, not a list of whole numbers", excerpt(&Value::from(list.clone()).to_string()))
            })
    };
    let shape = numbers("shape")?;
    let offsets = numbers("data_offsets")?;
    let [begin, end] = offsets[..] else {
        return Err(format!("`data_offsets` has {} numbers instead of 2", offsets.len()));
    };
    if begin > end {
        return Err(format!("`data_offsets` runs backwards: {begin}..{end}"));
    }
    Ok(Entry { dtype, shape, begin, end })
}

/// Bits per element of every dtype the format knows.
fn bits(dtype: &str) -> Option<usize> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "F64" | "I64" | "U64" | "C64" => 64,
        _ => return None,
    })
}

fn check_length(entry: &Entry) -> Result<(), String> {
    let bits = bits(&entry.dtype).ok_or_else(|| format!("unknown dtype `{}`", excerpt(&entry.dtype)))?;
    let needed = entry
        .shape
        .iter()
        .try_fold(1usize, |product, dim| product.checked_mul(*dim))
        .and_then(|elements| elements.checked_mul(bits))
        .ok_or_else(|| format!("shape {} is too large", excerpt(&format!("{:?}", entry.shape))))?
        .div_ceil(8);
    let given = entry.end - entry.begin;
    if needed != given {
        return Err(format!(
            "{} of shape {} needs {needed} bytes but its `data_offsets` give it {given}",
            entry.dtype,
            excerpt(&format!("{:?}", entry.shape))
        ));
    }
    Ok(())
}

/// The format wants the data section covered exactly: no overlap, no hole, no rest.
fn check_coverage(entries: &[(String, Entry)], data_bytes: u64) -> Result<(), String> {
    let mut by_place: Vec<&(String, Entry)> = entries.iter().collect();
    by_place.sort_by_key(|(_, entry)| (entry.begin, entry.end));
    let mut covered = 0;
    for (name, entry) in by_place {
        if entry.begin < covered {
            return Err(format!(
                "damaged header: tensor `{}` overlaps the one before it ({} < {covered}); copy the file again",
                excerpt(name),
                entry.begin
            ));
        }
        if entry.begin > covered {
            return Err(format!(
                "damaged header: bytes {covered}..{} of the data, before tensor `{}`, belong to no tensor; copy the file again",
                entry.begin,
                excerpt(name)
            ));
        }
        covered = entry.end;
    }
    if covered as u64 != data_bytes {
        return Err(format!(
            "the tensors end after {covered} bytes of data, but the file has {data_bytes}; it was written only in part or \
             something was appended: copy the file again"
        ));
    }
    Ok(())
}

/// The members of the top object in order. A plain map would hide duplicates.
fn members(text: &str) -> Result<Vec<(String, Value)>, String> {
    struct Members;
    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, Value)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object with one member per tensor")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some(member) = map.next_entry()? {
                members.push(member);
            }
            Ok(members)
        }
    }
    let mut json = serde_json::Deserializer::from_str(text);
    json.deserialize_map(Members)
        .and_then(|members| json.end().map(|()| members))
        .map_err(|e| format!("damaged header: {}; copy the file again", excerpt(&e.to_string())))
}
