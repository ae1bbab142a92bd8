//! Machine code on disk. The name of a file says what it was made of and by which compiler; behind the code stands a
//! fingerprint of it, so that a file that was cut short or damaged counts as missing and is made again.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes of the fingerprint.
const SEAL: usize = size_of::<u128>();

/// FNV-1a, 128 bits wide: a name for what it is given, not a protection against anybody.
fn fnv(parts: impl Iterator<Item = u64>) -> u128 {
    parts.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, part| {
        (hash ^ u128::from(part)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

/// A name for a list of texts.
pub(crate) fn fingerprint(parts: &[&str]) -> String {
    format!("{:032x}", fnv(parts.iter().flat_map(|part| part.bytes().chain([0])).map(u64::from)))
}

/// The fingerprint of machine code: by words, because there are megabytes of it at every start.
fn seal(code: &[u8]) -> [u8; SEAL] {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    fnv(code.chunks(8).map(word).chain([code.len() as u64])).to_le_bytes()
}

/// Where the machine code of one source for one architecture is kept.
pub(crate) struct CodeCache<'a> {
    directory: &'a Path,
    /// What it was made of, as the beginning of a file's name.
    stem: String,
}

impl<'a> CodeCache<'a> {
    /// `parts` are the texts that the code depends on, but for the compiler.
    pub(crate) fn new(directory: &'a Path, name: &str, parts: &[&str]) -> CodeCache<'a> {
        CodeCache { directory, stem: format!("{name}-{}-nvrtc", fingerprint(parts)) }
    }

    fn path(&self, compiler: &str) -> PathBuf {
        self.directory.join(format!("{}{compiler}.cubin", self.stem))
    }

    /// What this version of the compiler has made.
    pub(crate) fn find(&self, compiler: &str) -> Option<Vec<u8>> {
        read(&self.path(compiler))
    }

    /// What the newest compiler up to this major version has made: a warm start needs none.
    pub(crate) fn find_any(&self, newest: i32) -> Option<Vec<u8>> {
        let entries = std::fs::read_dir(self.directory).ok()?.flatten();
        let version = |name: String| -> Option<((i32, i32), String)> {
            let (major, minor) = name.strip_prefix(&self.stem)?.strip_suffix(".cubin")?.split_once('.')?;
            Some(((major.parse().ok()?, minor.parse().ok()?), name))
        };
        let names = entries.filter_map(|entry| version(entry.file_name().into_string().ok()?));
        let mut fit: Vec<_> = names.filter(|((major, _), _)| *major <= newest).collect();
        fit.sort();
        fit.iter().rev().find_map(|(_, name)| read(&self.directory.join(name)))
    }

    /// Keep what `compiler` has made.
    pub(crate) fn keep(&self, compiler: &str, code: &[u8]) -> std::io::Result<()> {
        let path = self.path(compiler);
        // Written beside and renamed, so that others see whole files. In containers that share a directory every process
        // may have the same number, so the time is in the name too.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let beside = path.with_extension(format!("{}-{since}.tmp", std::process::id()));
        let sealed = [code, &seal(code)].concat();
        let kept = std::fs::write(&beside, sealed).and_then(|()| std::fs::rename(&beside, &path));
        if kept.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
        kept
    }
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut file = std::fs::read(path).ok()?;
    let code = file.len().checked_sub(SEAL)?;
    if seal(file.get(..code)?) != file.get(code..)? {
        return None;
    }
    file.truncate(code);
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("strobe-code-cache-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn code_comes_back_for_its_source_and_compiler_only() {
        let directory = directory("found");
        let cache = CodeCache::new(&directory, "rows-sm_90a", &["text", "options"]);
        let code: Vec<u8> = (0..1003u32).map(|i| (i * 7) as u8).collect();
        assert_eq!(cache.find("13.0"), None);
        cache.keep("13.0", &code).unwrap();
        assert_eq!(cache.find("13.0").as_ref(), Some(&code));
        assert_eq!(cache.find("13.1"), None, "another compiler makes other code");
        assert_eq!(cache.find_any(13).as_ref(), Some(&code), "where there is no compiler any will do");
        assert_eq!(cache.find_any(12), None, "but for one that is newer than the driver");
        for version in ["9.9", "12.10", "12.9"] {
            cache.keep(version, version.as_bytes()).unwrap();
        }
        assert_eq!(cache.find_any(12).as_deref(), Some("12.10".as_bytes()), "the newest of them");
        for version in ["9.9", "12.10", "12.9"] {
            std::fs::remove_file(cache.path(version)).unwrap();
        }
        assert_eq!(CodeCache::new(&directory, "rows-sm_90a", &["other", "options"]).find_any(13), None);
        assert_eq!(CodeCache::new(&directory, "rows-sm_80", &["text", "options"]).find_any(13), None);
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "nothing is left beside it");
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_damaged_file_counts_as_missing_and_is_replaced() {
        let directory = directory("damaged");
        let cache = CodeCache::new(&directory, "rows-sm_90a", &["text"]);
        let code: Vec<u8> = [b"\x7fELF".as_slice(), &[9; 500]].concat();
        cache.keep("13.0", &code).unwrap();
        let path = cache.path("13.0");
        let whole = std::fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[100] ^= 1;
        for damaged in [&[][..], &whole[..10], &whole[..whole.len() - 1], &code, &flipped] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.find("13.0"), None, "{} bytes", damaged.len());
            assert_eq!(cache.find_any(13), None, "{} bytes", damaged.len());
        }
        cache.keep("13.0", &code).unwrap();
        assert_eq!(cache.find("13.0"), Some(code));
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_directory_that_is_not_there_is_told_and_holds_nothing() {
        let cache = CodeCache::new(Path::new("/nowhere/at/all"), "rows", &[]);
        assert!(cache.keep("13.0", b"code").is_err());
        assert_eq!(cache.find_any(13), None);
    }
}
