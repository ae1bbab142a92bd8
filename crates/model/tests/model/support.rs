//! Helpers shared by the tests.

use std::path::{Path, PathBuf};

/// The tiny Hugging Face models made by `make_fixtures.py`.
pub(crate) const CASES: [&str; 10] = [
    "llama",
    "llama3-rope-tied",
    "llama-bias",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "llama-bf16",
    "llama-f16",
    "llama-sharded",
];

/// Those of them that have experts.
pub(crate) const MOE_CASES: [&str; 4] = ["mixtral", "mixtral-bf16", "qwen3-moe", "qwen3-moe-renorm"];

/// The directory of one of them.
pub(crate) fn fixture(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures").join(case)
}

/// An empty directory of its own for a test.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("strobe-model").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// A copy of a fixture, to be damaged.
pub(crate) fn copy_of(case: &str, name: &str) -> PathBuf {
    let dir = scratch(name);
    for entry in std::fs::read_dir(fixture(case)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// A small random generator (xorshift).
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Checks that an error is one line that holds every expected piece.
pub(crate) fn says<T: std::fmt::Debug, E: std::fmt::Display>(result: Result<T, E>, pieces: &[&str]) {
    let text = match result {
        Ok(value) => panic!("expected an error with {pieces:?}, got {value:?}"),
        Err(error) => error.to_string(),
    };
    assert!(!text.contains('\n'), "more than one line: {text}");
    for piece in pieces {
        assert!(text.contains(piece), "`{piece}` is not in: {text}");
    }
}
