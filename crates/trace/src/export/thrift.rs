//! As much of Thrift's compact protocol as the headers of Parquet files need.

/// Writes structs field by field, in ascending order of their ids.
#[derive(Default)]
pub(crate) struct Compact {
    /// What was written.
    pub(crate) bytes: Vec<u8>,
    /// The last field id of every open struct.
    open: Vec<i16>,
}

const TRUE: u8 = 1;
const FALSE: u8 = 2;
const I8: u8 = 3;
const I32: u8 = 5;
const I64: u8 = 6;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;

/// Appends a number in groups of seven bits, the lowest first.
pub(crate) fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

impl Compact {
    fn header(&mut self, id: i16, kind: u8) {
        let last = self.open.last_mut().map_or(0, |last| std::mem::replace(last, id));
        let step = id - last;
        debug_assert!((1..16).contains(&step), "fields ascend in small steps");
        self.bytes.push((step as u8) << 4 | kind);
    }

    pub(crate) fn i8(&mut self, id: i16, value: i8) {
        self.header(id, I8);
        self.bytes.push(value as u8);
    }

    pub(crate) fn i32(&mut self, id: i16, value: i32) {
        self.header(id, I32);
        push_varint(&mut self.bytes, zigzag(value.into()));
    }

    pub(crate) fn i64(&mut self, id: i16, value: i64) {
        self.header(id, I64);
        push_varint(&mut self.bytes, zigzag(value));
    }

    pub(crate) fn flag(&mut self, id: i16, value: bool) {
        self.header(id, if value { TRUE } else { FALSE });
    }

    pub(crate) fn binary(&mut self, id: i16, value: &[u8]) {
        self.header(id, BINARY);
        self.push_binary(value);
    }

    fn push_binary(&mut self, value: &[u8]) {
        push_varint(&mut self.bytes, value.len() as u64);
        self.bytes.extend_from_slice(value);
    }

    /// A struct as a field of the open one.
    pub(crate) fn nested(&mut self, id: i16, fields: impl FnOnce(&mut Self)) {
        self.header(id, STRUCT);
        self.fields(fields);
    }

    /// The fields of a struct with their end.
    pub(crate) fn fields(&mut self, fields: impl FnOnce(&mut Self)) {
        self.open.push(0);
        fields(self);
        self.open.pop();
        self.bytes.push(0);
    }

    fn list(&mut self, id: i16, length: usize, kind: u8) {
        self.header(id, LIST);
        if length < 15 {
            self.bytes.push((length as u8) << 4 | kind);
        } else {
            self.bytes.push(0xf0 | kind);
            push_varint(&mut self.bytes, length as u64);
        }
    }

    pub(crate) fn structs<T>(&mut self, id: i16, items: &[T], mut fields: impl FnMut(&mut Self, &T)) {
        self.list(id, items.len(), STRUCT);
        for item in items {
            self.fields(|out| fields(out, item));
        }
    }

    pub(crate) fn i32s(&mut self, id: i16, values: &[i32]) {
        self.list(id, values.len(), I32);
        values.iter().for_each(|&value| push_varint(&mut self.bytes, zigzag(value.into())));
    }

    pub(crate) fn strings(&mut self, id: i16, values: &[&str]) {
        self.list(id, values.len(), BINARY);
        values.iter().for_each(|value| self.push_binary(value.as_bytes()));
    }
}
