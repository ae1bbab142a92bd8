//! Enough of a Parquet reader to check what was written, made from the format's specification.

use std::collections::BTreeMap;

/// One value as text, `None` for null.
pub(crate) type Cell = Option<String>;

/// A file read back: the columns in order with all their values.
pub(crate) struct Columns {
    pub names: Vec<String>,
    pub values: Vec<Vec<Cell>>,
    pub row_groups: usize,
}

#[derive(Clone, Debug)]
enum Thrift {
    Int(i64),
    Flag,
    Bytes(Vec<u8>),
    List(Vec<Thrift>),
    Struct(BTreeMap<i16, Thrift>),
}

impl Thrift {
    fn field(&self, id: i16) -> Option<&Thrift> {
        match self {
            Thrift::Struct(fields) => fields.get(&id),
            other => panic!("{other:?} is not a struct"),
        }
    }

    fn int(&self, id: i16) -> i64 {
        match self.field(id) {
            Some(Thrift::Int(value)) => *value,
            other => panic!("field {id} is {other:?}"),
        }
    }

    fn list(&self, id: i16) -> &[Thrift] {
        match self.field(id) {
            Some(Thrift::List(items)) => items,
            other => panic!("field {id} is {other:?}"),
        }
    }

    fn text(&self, id: i16) -> String {
        match self.field(id) {
            Some(Thrift::Bytes(bytes)) => String::from_utf8(bytes.clone()).unwrap(),
            other => panic!("field {id} is {other:?}"),
        }
    }
}

struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn varint(&mut self) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = self.take(1)[0];
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    }

    fn zigzag(&mut self) -> i64 {
        let value = self.varint();
        (value >> 1) as i64 ^ -((value & 1) as i64)
    }

    fn thrift(&mut self, kind: u8) -> Thrift {
        match kind {
            1 | 2 => Thrift::Flag,
            3 => Thrift::Int((self.take(1)[0] as i8).into()),
            4..=6 => Thrift::Int(self.zigzag()),
            8 => {
                let length = self.varint() as usize;
                Thrift::Bytes(self.take(length).to_vec())
            }
            9 => {
                let head = self.take(1)[0];
                let length = if head >> 4 == 15 { self.varint() } else { u64::from(head >> 4) };
                Thrift::List((0..length).map(|_| self.thrift(head & 15)).collect())
            }
            12 => {
                let (mut fields, mut id) = (BTreeMap::new(), 0);
                loop {
                    let head = self.take(1)[0];
                    if head == 0 {
                        return Thrift::Struct(fields);
                    }
                    id = if head >> 4 == 0 { self.zigzag() as i16 } else { id + i16::from(head >> 4) };
                    let value = self.thrift(head & 15);
                    fields.insert(id, value);
                }
            }
            other => panic!("type {other}"),
        }
    }

    /// Runs and packed groups until `count` values were read.
    fn hybrid(&mut self, width: usize, count: usize) -> Vec<u32> {
        let mut values = Vec::new();
        while values.len() < count {
            let head = self.varint() as usize;
            if head & 1 == 0 {
                let mut value = [0; 4];
                let bytes = self.take(width.div_ceil(8));
                value[..bytes.len()].copy_from_slice(bytes);
                values.extend(std::iter::repeat_n(u32::from_le_bytes(value), head >> 1));
            } else {
                let groups = head >> 1;
                let packed = self.take(groups * width);
                let bit = |at: usize| u32::from(packed[at / 8] >> (at % 8) & 1);
                values.extend((0..groups * 8).map(|v| (0..width).map(|b| bit(v * width + b) << b).sum::<u32>()));
            }
        }
        values.truncate(count);
        values
    }
}

/// Decodes `count` plain values.
fn plain(bytes: &mut Bytes, count: usize, physical: i64, unsigned: bool) -> Vec<String> {
    let word = |bytes: &mut Bytes| u64::from_le_bytes(bytes.take(8).try_into().unwrap());
    let mut bits: Vec<bool> = Vec::new();
    if physical == 0 {
        let packed = bytes.take(count.div_ceil(8));
        bits = (0..count).map(|at| packed[at / 8] >> (at % 8) & 1 == 1).collect();
    }
    let value = |at: usize| match physical {
        0 => bits[at].to_string(),
        2 if unsigned => word(bytes).to_string(),
        2 => (word(bytes) as i64).to_string(),
        5 => f64::from_bits(word(bytes)).to_string(),
        6 => {
            let length = u32::from_le_bytes(bytes.take(4).try_into().unwrap());
            String::from_utf8(bytes.take(length as usize).to_vec()).unwrap()
        }
        other => panic!("physical type {other}"),
    };
    (0..count).map(value).collect()
}

/// Reads a whole file.
pub(crate) fn read(file: &[u8]) -> Columns {
    assert_eq!((&file[..4], &file[file.len() - 4..]), (&b"PAR1"[..], &b"PAR1"[..]));
    let length = u32::from_le_bytes(file[file.len() - 8..file.len() - 4].try_into().unwrap()) as usize;
    let footer = Bytes(&file[file.len() - 8 - length..file.len() - 8]).thrift(12);
    let schema = &footer.list(2)[1..];
    assert_eq!(footer.list(2)[0].int(5) as usize, schema.len());
    let mut columns = Columns {
        names: schema.iter().map(|element| element.text(4)).collect(),
        values: vec![Vec::new(); schema.len()],
        row_groups: footer.list(4).len(),
    };
    for group in footer.list(4) {
        for (index, chunk) in group.list(1).iter().enumerate() {
            let meta = chunk.field(3).unwrap();
            assert_eq!((meta.int(4), meta.int(5)), (0, group.int(3)), "uncompressed, all rows");
            let (physical, nullable) = (schema[index].int(1), schema[index].int(3) == 1);
            let unsigned = schema[index].field(6).is_some_and(|_| schema[index].int(6) == 14);
            let start = meta.field(11).map_or_else(|| meta.int(9), |_| meta.int(11)) as usize;
            let mut bytes = Bytes(&file[start..start + meta.int(7) as usize]);
            let (mut dictionary, mut read) = (Vec::new(), 0);
            while read < meta.int(5) as usize {
                let header = bytes.thrift(12);
                let mut page = Bytes(bytes.take(header.int(3) as usize));
                if header.int(1) == 2 {
                    let count = header.field(7).unwrap().int(1) as usize;
                    dictionary = plain(&mut page, count, physical, unsigned);
                    continue;
                }
                let data = header.field(5).unwrap();
                let rows = data.int(1) as usize;
                read += rows;
                let present = if nullable {
                    let length = u32::from_le_bytes(page.take(4).try_into().unwrap()) as usize;
                    Bytes(page.take(length)).hybrid(1, rows)
                } else {
                    vec![1; rows]
                };
                let count = present.iter().filter(|&&level| level == 1).count();
                let values = if data.int(2) == 8 {
                    let width = page.take(1)[0] as usize;
                    page.hybrid(width, count).into_iter().map(|place| dictionary[place as usize].clone()).collect()
                } else {
                    plain(&mut page, count, physical, unsigned)
                };
                assert!(page.0.is_empty(), "bytes left over in a page of {}", columns.names[index]);
                let mut values = values.into_iter();
                let cell = |level: &u32| if *level == 1 { values.next() } else { None };
                columns.values[index].extend(present.iter().map(cell));
            }
            let nulls = columns.values[index].iter().rev().take(read).filter(|cell| cell.is_none()).count();
            assert_eq!(meta.field(12).unwrap().int(3) as usize, nulls);
            assert!(bytes.0.is_empty());
        }
    }
    columns
}
