//! Directories and files that are never taken for whole when they are not: written beside and renamed ([`StagedDir`],
//! [`write_whole`]), or under their final name while they grow ([`LiveDir`]).
//!
//! Whoever writes one holds it by a lock of the system's, which ends with the process. What nobody holds is a leftover of
//! a killed process, and the next writer of the same target removes it.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::EngineError;

/// Hidden names beside a target: what is being written, and what it replaces.
const PARTIAL: &str = "partial";
const OLD: &str = "old";

/// Whether a process writes a file or directory now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// A living process does.
    Yes,
    /// None does.
    No,
    /// It is not there, cannot be opened, or its file system has no locks.
    Unknown,
}

/// Tells whether a process writes `path` now.
pub fn held(path: &Path) -> Held {
    let Ok(file) = File::open(path) else { return Held::Unknown };
    match file.try_lock_shared() {
        Ok(()) => Held::No,
        Err(TryLockError::WouldBlock) => Held::Yes,
        Err(TryLockError::Error(_)) => Held::Unknown,
    }
}

/// Holds `path` for as long as the answer lives. An error of kind `ResourceBusy` says that another process holds it; where the
/// file system has no locks, it is held by nobody and the answer is as good as any.
fn hold(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    // Readers hold it for a moment, to see whether it is held.
    for _ in 0..20 {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(file),
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

/// Whether `path` still names what was opened as `file`.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |found: fs::Metadata| (found.dev(), found.ino());
    file.metadata().map(identity).ok() == fs::metadata(path).map(identity).ok()
}

/// The hidden name of this process beside `target`.
fn beside(target: &Path, word: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.{word}-{}", std::process::id()))
}

/// Removes what killed processes left beside `target`: what is held stays.
fn sweep(target: &Path) {
    let Some(name) = target.file_name().map(|name| name.to_string_lossy()) else { return };
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let prefixes = [PARTIAL, OLD].map(|word| format!(".{name}.{word}-"));
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let found = entry.file_name();
        let found = found.to_string_lossy();
        let number = prefixes.iter().find_map(|prefix| found.strip_prefix(prefix.as_str()));
        let ours = number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()));
        let (path, kind) = (entry.path(), entry.file_type());
        let Some(kind) = kind.ok().filter(|kind| ours && (kind.is_dir() || kind.is_file())) else { continue };
        // Held while it is removed, so that two that sweep at once do not remove what one has just made anew.
        if let Ok(file) = File::open(&path)
            && matches!(file.try_lock(), Ok(()))
        {
            // A leftover that cannot be removed harms nobody.
            let _ = if kind.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        }
    }
}

/// Makes a fresh directory and holds it.
fn create_held(path: &Path) -> io::Result<File> {
    for _ in 0..3 {
        fs::create_dir(path)?;
        match hold(path) {
            Ok(file) if is_at(&file, path) => return Ok(file),
            Err(problem) if problem.kind() != io::ErrorKind::NotFound => return Err(problem),
            _ => {} // swept before it was held
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

/// Writes a file beside its place, then renames it: it appears whole or not at all.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if path.file_name().is_none() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it does not name a file"));
    }
    sweep(path);
    let beside = beside(path, PARTIAL);
    let write = || {
        let mut file = File::create(&beside)?;
        let _ = file.try_lock(); // without it, somebody who writes the same file may take this one for a leftover
        file.write_all(bytes)?;
        fs::rename(&beside, path)
    };
    let written = write();
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// Makes the parents of `target`; gives those that were missing, innermost first.
fn make_parents(target: &Path) -> Result<Vec<PathBuf>, EngineError> {
    let Some(parent) = target.parent().filter(|p| !p.as_os_str().is_empty()) else { return Ok(Vec::new()) };
    let missing = parent.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.exists());
    let made = missing.map(Path::to_path_buf).collect();
    fs::create_dir_all(parent).map_err(|source| EngineError::Io {
        action: "create the output directory",
        path: parent.to_path_buf(),
        source,
    })?;
    Ok(made)
}

fn has_content(dir: &Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some())
}

/// A directory being written. Dropped without [`StagedDir::commit`], it is removed.
pub struct StagedDir {
    target: PathBuf,
    staging: PathBuf,
    /// Held until it is in its place.
    _held: File,
    /// Parents made for it, innermost first.
    made: Vec<PathBuf>,
    /// Whether there was content to replace from the start.
    replaces: bool,
    committed: bool,
}

impl StagedDir {
    /// Start writing `target`. An existing directory is refused unless it is empty, or `overwrite` is set and it
    /// holds all of `marks`, the files by which our own directories are known.
    pub fn create(target: &Path, overwrite: bool, marks: &[&str], what: &str) -> Result<StagedDir, EngineError> {
        check_target(target, overwrite, marks, what)?;
        let made = make_parents(target)?;
        sweep(target);
        let staging = beside(target, PARTIAL);
        let held = create_held(&staging).map_err(|source| EngineError::Io {
            action: "create the output directory",
            path: target.to_path_buf(),
            source,
        })?;
        let replaces = has_content(target);
        Ok(StagedDir { target: target.to_path_buf(), staging, _held: held, made, replaces, committed: false })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Put the directory in its place. What was there is moved aside first, and back again if that fails.
    pub fn commit(mut self) -> Result<(), EngineError> {
        let io = |action, source| EngineError::Io { action, path: self.target.clone(), source };
        if !self.replaces {
            // Refused by the system if something other than an empty directory has appeared there meanwhile.
            fs::rename(&self.staging, &self.target).map_err(|e| io("move into place", e))?;
        } else {
            let old = beside(&self.target, OLD);
            let _held = hold(&self.target).map_err(|e| io("replace", e))?;
            fs::rename(&self.target, &old).map_err(|e| io("replace", e))?;
            if let Err(error) = fs::rename(&self.staging, &self.target) {
                fs::rename(&old, &self.target).map_err(|e| io("move back", e))?;
                return Err(io("move into place", error));
            }
            // The new one is in place; an old copy that can't be removed does not make that a failure.
            let _ = fs::remove_dir_all(&old);
        }
        self.committed = true;
        Ok(())
    }
}

impl Drop for StagedDir {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing useful can be done about a failure here; a parent that is in use by now stays.
            let _ = fs::remove_dir_all(&self.staging);
            self.made.iter().for_each(|parent| drop(fs::remove_dir(parent)));
        }
    }
}

/// A directory under its final name while it is written, held by its writer. Dropped without [`LiveDir::keep`], it is
/// removed, and what it replaced is back.
pub struct LiveDir {
    target: PathBuf,
    /// Held until it is whole or its process is dead.
    _held: File,
    /// What it replaces, moved aside and held.
    old: Option<(PathBuf, File)>,
    /// Parents made for it, innermost first.
    made: Vec<PathBuf>,
    /// Whether an empty directory was there.
    found_empty: bool,
    kept: bool,
}

impl LiveDir {
    /// Makes `target`. An existing directory is refused unless it is empty, or `overwrite` is set, it holds all of `marks` and
    /// nobody writes it now.
    pub fn create(target: &Path, overwrite: bool, marks: &[&str], what: &str) -> Result<LiveDir, EngineError> {
        check_target(target, overwrite, marks, what)?;
        let io = |action, source: io::Error| match source.kind() {
            io::ErrorKind::ResourceBusy => EngineError::option(
                "--output-dir",
                format!("`{}` is being written by another process; name another directory", target.display()),
            ),
            _ => EngineError::Io { action, path: target.to_path_buf(), source },
        };
        let made = make_parents(target)?;
        sweep(target);
        let mut old = None;
        if has_content(target) {
            let held = hold(target).map_err(|e| io("replace", e))?;
            if !is_at(&held, target) {
                return Err(io("replace", io::ErrorKind::ResourceBusy.into()));
            }
            let aside = beside(target, OLD);
            fs::rename(target, &aside).map_err(|e| io("replace", e))?;
            old = Some((aside, held));
        }
        match LiveDir::claim(target) {
            Ok((held, found_empty)) => {
                Ok(LiveDir { target: target.to_path_buf(), _held: held, old, made, found_empty, kept: false })
            }
            Err(problem) => {
                if let Some((aside, _)) = &old {
                    fs::rename(aside, target).map_err(|e| io("move back", e))?;
                }
                made.iter().for_each(|parent| drop(fs::remove_dir(parent)));
                Err(io("create the output directory", problem))
            }
        }
    }

    /// Makes and holds the directory, or one that is there and empty. Of two that try at once, one gets it.
    fn claim(target: &Path) -> io::Result<(File, bool)> {
        match create_held(target) {
            Ok(held) => return Ok((held, false)),
            Err(problem) if problem.kind() != io::ErrorKind::AlreadyExists => return Err(problem),
            Err(_) => {}
        }
        let held = hold(target)?;
        if has_content(target) || !is_at(&held, target) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok((held, true))
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.target
    }

    /// Leaves the directory as it is and removes what it replaces.
    pub fn keep(mut self) {
        self.kept = true;
        if let Some((old, _)) = &self.old {
            // The new one is in place; an old copy that can't be removed does not make that a failure.
            let _ = fs::remove_dir_all(old);
        }
    }
}

impl Drop for LiveDir {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // Nothing useful can be done about a failure here; a parent that is in use by now stays.
        let _ = fs::remove_dir_all(&self.target);
        if let Some((old, _)) = &self.old {
            let _ = fs::rename(old, &self.target);
        } else if self.found_empty {
            let _ = fs::create_dir(&self.target);
        }
        self.made.iter().for_each(|parent| drop(fs::remove_dir(parent)));
    }
}

/// Refuse a target that must not be replaced, before any work is done.
pub fn check_target(target: &Path, overwrite: bool, marks: &[&str], what: &str) -> Result<(), EngineError> {
    if target.file_name().is_none() {
        let problem = format!("`{}` is not a name for a new {what}", target.display());
        return Err(EngineError::option("--output-dir", problem));
    }
    if target.is_file() {
        let problem = format!("`{}` is a file; name a directory", target.display());
        return Err(EngineError::option("--output-dir", problem));
    }
    if !has_content(target) {
        return Ok(());
    }
    if !overwrite {
        let problem = format!("`{}` exists already; pass --overwrite to replace it, or name another", target.display());
        return Err(EngineError::option("--output-dir", problem));
    }
    if let Some(missing) = marks.iter().find(|mark| !target.join(mark).exists()) {
        let problem = format!(
            "`{}` is no {what} (it has no {missing}), so --overwrite does not touch it; name another",
            target.display()
        );
        return Err(EngineError::option("--output-dir", problem));
    }
    Ok(())
}

/// Find out before long work whether `target` can be made, by making and removing a directory where it would be.
pub fn check_parent(target: &Path) -> Result<(), EngineError> {
    let empty = target.is_dir() && !has_content(target);
    let place = match empty {
        true => target.to_path_buf(),
        false => {
            let parents = target.ancestors().skip(1).map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p });
            parents.into_iter().find(|p| p.exists()).unwrap_or(Path::new(".")).to_path_buf()
        }
    };
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let probe = place.join(format!(".{name}.probe-{}", std::process::id()));
    fs::create_dir(&probe).map_err(|source| EngineError::Io {
        action: "create the output directory",
        path: target.to_path_buf(),
        source,
    })?;
    let _ = fs::remove_dir(&probe);
    Ok(())
}
