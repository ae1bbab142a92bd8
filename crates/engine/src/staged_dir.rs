//! Directories that appear whole or not at all: written beside, then renamed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::EngineError;

/// A directory being written. Dropped without [`StagedDir::commit`], it is removed.
pub struct StagedDir {
    target: PathBuf,
    staging: PathBuf,
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
        let name = target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let staging = target.with_file_name(format!(".{name}.partial-{}", std::process::id()));
        let mut made = Vec::new();
        if let Some(parent) = target.parent().filter(|p| !p.as_os_str().is_empty()) {
            made = parent
                .ancestors()
                .take_while(|p| !p.as_os_str().is_empty() && !p.exists())
                .map(Path::to_path_buf)
                .collect();
            fs::create_dir_all(parent).map_err(|source| EngineError::Io {
                action: "create the output directory",
                path: parent.to_path_buf(),
                source,
            })?;
        }
        // A leftover of a killed process that had our number.
        if staging.exists() {
            let _ = fs::remove_dir_all(&staging);
        }
        fs::create_dir(&staging).map_err(|source| EngineError::Io {
            action: "create the output directory",
            path: target.to_path_buf(),
            source,
        })?;
        let replaces = fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_some());
        Ok(StagedDir { target: target.to_path_buf(), staging, made, replaces, committed: false })
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
            let old = self.staging.with_extension(format!("old-{}", std::process::id()));
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
    let Ok(mut entries) = fs::read_dir(target) else { return Ok(()) };
    if entries.next().is_none() {
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

impl Drop for StagedDir {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing useful can be done about a failure here; a parent that is in use by now stays.
            let _ = fs::remove_dir_all(&self.staging);
            self.made.iter().for_each(|parent| drop(fs::remove_dir(parent)));
        }
    }
}
