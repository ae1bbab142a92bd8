//! As much of Thrift's compact protocol as the headers of Parquet files need.

use super::Damage;

/// Headers nest a few levels; more is damage.
const DEEPEST: usize = 16;

/// A value of a header.
#[derive(Debug)]
pub(super) enum Value<'b> {
    Int(i64),
    Bytes(&'b [u8]),
    List(Vec<Value<'b>>),
    Struct(Vec<(i16, Value<'b>)>),
    /// Of a kind that nothing here asks for.
    Other,
}

impl<'b> Value<'b> {
    /// The field of a struct with this id.
    pub(super) fn field(&self, id: i16) -> Option<&Value<'b>> {
        match self {
            Value::Struct(fields) => fields.iter().find(|(field, _)| *field == id).map(|(_, value)| value),
            _ => None,
        }
    }

    /// A number that must be there and not negative.
    pub(super) fn number(&self, id: i16) -> Result<usize, Damage> {
        match self.field(id) {
            Some(Value::Int(number)) => usize::try_from(*number).map_err(|_| Damage("a header holds a negative size")),
            _ => Err(Damage("a header lacks a number")),
        }
    }

    /// A list that must be there.
    pub(super) fn list(&self, id: i16) -> Result<&[Value<'b>], Damage> {
        match self.field(id) {
            Some(Value::List(items)) => Ok(items),
            _ => Err(Damage("a header lacks a list")),
        }
    }

    /// Text that must be there.
    pub(super) fn text(&self, id: i16) -> Result<&'b str, Damage> {
        match self.field(id) {
            Some(Value::Bytes(bytes)) => {
                std::str::from_utf8(bytes).map_err(|_| Damage("a header holds what is not text"))
            }
            _ => Err(Damage("a header lacks a text")),
        }
    }
}

/// Bytes that are taken from the front.
pub(super) struct Bytes<'b>(pub(super) &'b [u8]);

impl<'b> Bytes<'b> {
    pub(super) fn take(&mut self, count: usize) -> Result<&'b [u8], Damage> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Damage("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8, Damage> {
        let (&byte, rest) = self.0.split_first().ok_or(Damage("it ends too early"))?;
        self.0 = rest;
        Ok(byte)
    }

    /// A word of four bytes, the lowest first.
    pub(super) fn word(&mut self) -> Result<usize, Damage> {
        let mut word = [0; 4];
        word.copy_from_slice(self.take(4)?);
        Ok(u32::from_le_bytes(word) as usize)
    }

    pub(super) fn varint(&mut self) -> Result<u64, Damage> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Damage("a number is too long"))
    }

    fn zigzag(&mut self) -> Result<i64, Damage> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// A struct of a header.
    pub(super) fn header(&mut self) -> Result<Value<'b>, Damage> {
        self.value(12, DEEPEST)
    }

    fn value(&mut self, kind: u8, deeper: usize) -> Result<Value<'b>, Damage> {
        let deeper = deeper.checked_sub(1).ok_or(Damage("its headers nest too deep"))?;
        Ok(match kind {
            1 | 2 => Value::Other,
            3 => Value::Int((self.byte()? as i8).into()),
            4..=6 => Value::Int(self.zigzag()?),
            7 => {
                self.take(8)?;
                Value::Other
            }
            8 => {
                let length = usize::try_from(self.varint()?).map_err(|_| Damage("a text is too long"))?;
                Value::Bytes(self.take(length)?)
            }
            9 | 10 => {
                let head = self.byte()?;
                let length = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
                // Every item takes a byte at least.
                if length > self.0.len() as u64 {
                    return Err(Damage("a list is longer than the file"));
                }
                let items = (0..length).map(|_| match head & 15 {
                    // Flags in lists have a byte of their own.
                    1 | 2 => self.byte().map(|_| Value::Other),
                    kind => self.value(kind, deeper),
                });
                Value::List(items.collect::<Result<_, _>>()?)
            }
            12 => {
                let (mut fields, mut id) = (Vec::new(), 0i16);
                loop {
                    let head = self.byte()?;
                    if head == 0 {
                        break Value::Struct(fields);
                    }
                    id = match head >> 4 {
                        0 => self.zigzag()? as i16,
                        step => id.wrapping_add(i16::from(step)),
                    };
                    fields.push((id, self.value(head & 15, deeper)?));
                }
            }
            _ => return Err(Damage("a header holds a value of unknown kind")),
        })
    }
}
