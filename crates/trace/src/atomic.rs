//! A file appears whole or not at all: it is written beside its place and then renamed.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::TraceError;

/// Calls `fill` with a temporary path in the directory of `path` and, if it succeeds, puts that file at
/// `path`. Whatever fails, `path` is as it was before and no temporary file remains.
pub(crate) fn write_whole(path: &Path, fill: impl FnOnce(&Path) -> Result<(), TraceError>) -> Result<(), TraceError> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        let source = std::io::Error::other("it is a device or pipe, not a file");
        return Err(TraceError::Io { action: "replace", path: path.to_owned(), source });
    }
    sweep(path);
    let temporary = Temporary::beside(path)?;
    // Creating it first gives the system's plain reason (no such directory, permission denied)
    // instead of the database library's.
    let held = fs::File::create(&temporary.0).map_err(|source| TraceError::Io {
        action: "create",
        path: path.to_owned(),
        source,
    })?;
    // Held while it is written: what nobody holds is a leftover. Without locks it may be taken for one.
    let _ = held.try_lock();
    fill(&temporary.0)?;
    fs::rename(&temporary.0, path).map_err(|source| TraceError::Io {
        action: "put the finished trace at",
        path: path.to_owned(),
        source,
    })
}

/// Removes what killed processes left beside `path`.
fn sweep(path: &Path) {
    let Some(name) = path.file_name().map(|name| name.to_string_lossy()) else { return };
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let prefix = format!(".{name}.");
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let found = entry.file_name();
        let found = found.to_string_lossy();
        let number = found.strip_prefix(prefix.as_str()).and_then(|rest| rest.strip_suffix(".tmp"));
        let ours = number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()));
        if ours
            && let Ok(file) = fs::File::open(entry.path())
            && file.try_lock().is_ok()
        {
            drop(Temporary(entry.path()));
        }
    }
}

/// Removes its file, and SQLite's journal of it, when dropped; after the rename there is nothing to remove.
struct Temporary(PathBuf);

impl Temporary {
    fn beside(path: &Path) -> Result<Self, TraceError> {
        let Some(name) = path.file_name() else {
            return Err(TraceError::Io {
                action: "create",
                path: path.to_owned(),
                source: std::io::Error::other("the path does not name a file"),
            });
        };
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.tmp", std::process::id()));
        Ok(Self(path.with_file_name(hidden)))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let mut journal = self.0.clone().into_os_string();
        journal.push("-journal");
        // Both are usually gone already; a failure to remove leaves litter, not a wrong answer.
        let _ = fs::remove_file(&self.0);
        let _ = fs::remove_file(journal);
    }
}
