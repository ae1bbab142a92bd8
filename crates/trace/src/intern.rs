//! Strings stored once and named by a small number.

use std::collections::HashMap;
use std::sync::Arc;

/// The number of a string in its [`Interner`]. Only meaningful together with that interner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct StrId(pub u32);

impl StrId {
    /// No string.
    pub const NONE: StrId = StrId(u32::MAX);

    /// Whether there is a string.
    pub fn is_some(self) -> bool {
        self != Self::NONE
    }
}

impl Default for StrId {
    fn default() -> Self {
        Self::NONE
    }
}

/// Builds the hash of tables with millions of small keys. Keys come from trace files that a user chose to read: the
/// worst that a hostile one can do is to be slow.
pub(crate) type FastHash = std::hash::BuildHasherDefault<FastHasher>;

/// Multiply and rotate, eight bytes at a time.
#[derive(Clone, Copy, Default)]
pub(crate) struct FastHasher(u64);

impl FastHasher {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

impl std::hash::Hasher for FastHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.add(u64::from_le_bytes(*word)));
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.add(u64::from_le_bytes(last));
    }

    fn write_u8(&mut self, value: u8) {
        self.add(u64::from(value));
    }

    fn write_u16(&mut self, value: u16) {
        self.add(u64::from(value));
    }

    fn write_u32(&mut self, value: u32) {
        self.add(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.add(value);
    }

    fn write_i64(&mut self, value: i64) {
        self.add(value as u64);
    }

    fn finish(&self) -> u64 {
        // The table takes its buckets from the low bits, which a product mixes least.
        self.0 ^ (self.0 >> 32)
    }
}

/// A table of distinct strings, numbered from 0 in order of first appearance.
#[derive(Clone, Default)]
pub struct Interner {
    strings: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, StrId, FastHash>,
}

impl Interner {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of `text`, which is stored if it is new.
    pub fn intern(&mut self, text: &str) -> StrId {
        if let Some(&id) = self.numbers.get(text) {
            return id;
        }
        let id = StrId(self.strings.len() as u32);
        let shared: Arc<str> = Arc::from(text);
        self.strings.push(Arc::clone(&shared));
        self.numbers.insert(shared, id);
        id
    }

    /// The string with this number; `""` when there is none.
    pub fn get(&self, id: StrId) -> &str {
        self.strings.get(id.0 as usize).map_or("", |s| s)
    }

    /// The number of `text`, if it is stored.
    pub fn find(&self, text: &str) -> Option<StrId> {
        self.numbers.get(text).copied()
    }

    /// How many strings are stored.
    pub fn len(&self) -> usize {
        self.strings.len()
    }

    /// Whether no string is stored.
    pub fn is_empty(&self) -> bool {
        self.strings.is_empty()
    }

    /// The strings with their numbers, in order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (StrId, &str)> {
        self.strings.iter().enumerate().map(|(i, s)| (StrId(i as u32), &**s))
    }
}

impl PartialEq for Interner {
    fn eq(&self, other: &Self) -> bool {
        self.strings == other.strings
    }
}

impl Eq for Interner {}

impl std::fmt::Debug for Interner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.strings).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_stable_and_unknown_is_empty() {
        let mut strings = Interner::new();
        let a = strings.intern("a");
        let b = strings.intern("b");
        assert_eq!((a, b, strings.intern("a")), (StrId(0), StrId(1), StrId(0)));
        assert_eq!(strings.get(b), "b");
        assert_eq!(strings.get(StrId(99)), "");
        assert_eq!(strings.find("b"), Some(b));
        assert_eq!(strings.len(), 2);
    }
}
