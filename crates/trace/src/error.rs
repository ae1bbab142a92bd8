//! What can go wrong with a trace or its file.

use std::path::PathBuf;

/// Why a trace could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, e.g. `create`.
        action: &'static str,
        /// The file or directory concerned.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Writing to a stream failed.
    #[error("cannot write the trace: {0}")]
    Stream(#[from] std::io::Error),
    /// SQLite refused an operation.
    #[error("SQLite cannot {action} {}: {source}", path.display())]
    Sqlite {
        /// What was attempted, e.g. `fill table NVTX_EVENTS of`.
        action: String,
        /// The database file.
        path: PathBuf,
        /// SQLite's reason.
        source: rusqlite::Error,
    },
    /// The file is of another kind.
    #[error("{} is not a trace written by strobe: {found}; expected {expected}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it is, as far as can be told.
        found: String,
        /// What was looked for.
        expected: &'static str,
    },
    /// The file holds nothing that can be analysed.
    #[error("{} cannot be read as a trace: it is {found}; {advice}", path.display())]
    NotATrace {
        /// The file.
        path: PathBuf,
        /// What it is, as far as can be told.
        found: String,
        /// What to do instead.
        advice: String,
    },
    /// The file is a trace of strobe's, but damaged.
    #[error("{} is damaged at {place}: {problem}; record the trace again or restore the file", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Table and row or field.
        place: String,
        /// What is wrong there.
        problem: String,
    },
    /// Files given together are of different jobs.
    #[error("{a} and {b} are not ranks of one job: {why}; to compare them type `strobe compare {a} {b}`")]
    NotRanks {
        /// One file.
        a: String,
        /// The other.
        b: String,
        /// What differs.
        why: String,
    },
    /// The trace in memory breaks a rule that every format relies on.
    #[error("the trace cannot be written: {place}: {problem}")]
    Invalid {
        /// Which event, e.g. `ops[3].name`.
        place: String,
        /// What is wrong there.
        problem: String,
    },
}
