//! Strings stored once and named by a small number.

use std::collections::HashMap;
use std::sync::Arc;

/// The number of a string in its [`Interner`]. Only meaningful together with that interner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct StrId(pub u32);

/// A table of distinct strings, numbered from 0 in order of first appearance.
#[derive(Clone, Default)]
pub struct Interner {
    strings: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, StrId>,
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
