//! Reads the Parquet tables that `export` writes. Other Parquet files are told apart and refused: they need
//! compression, encodings and nested columns that these do not have.

mod table;
mod thrift;
mod trace;

use std::path::Path;

use crate::TraceError;

pub(crate) use trace::{is_export, read};

/// Why a table cannot be read.
#[derive(Debug, PartialEq, Eq)]
struct Damage(&'static str);

/// The beginning of the name that a writer gives itself.
const WRITER: &str = "strobe version";

/// What to say of a directory of tables, or of a table, that strobe did not write.
pub(crate) fn foreign(path: &Path) -> TraceError {
    TraceError::NotATrace {
        path: path.to_owned(),
        found: "Parquet that strobe did not write".into(),
        advice: "strobe reads the directory that `strobe convert TRACE -o NAME.parquetdir` makes; of an Nsight Systems report \
                 pass the export that `nsys export --type sqlite` makes"
            .into(),
    }
}

/// What to say of a single table.
pub(crate) fn single(path: &Path) -> TraceError {
    let all = path.parent().filter(|directory| is_export(directory));
    TraceError::NotATrace {
        path: path.to_owned(),
        found: "a single table in Parquet".into(),
        advice: match all {
            Some(directory) => format!("pass the directory with all tables: {}", directory.display()),
            None => "strobe reads the directory with all tables that `strobe convert TRACE -o NAME.parquetdir` makes; of an \
                     Nsight Systems report pass the export that `nsys export --type sqlite` makes"
                .into(),
        },
    }
}
