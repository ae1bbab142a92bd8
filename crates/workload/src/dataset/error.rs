//! What can be wrong with a dataset, said so that its author can find and mend it.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A dataset that cannot be read or made.
#[derive(Debug, Error)]
pub enum DatasetError {
    /// The file could not be read.
    #[error("cannot read dataset {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The path is a directory.
    #[error("dataset {} is a directory; expected a JSONL file", path.display())]
    IsDirectory {
        /// The directory.
        path: PathBuf,
    },
    /// The file holds no sample.
    #[error("dataset {} has no samples; make one with `strobe prepare-dataset`", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A line is not UTF-8.
    #[error("dataset {}, {place}: not UTF-8 (first bad byte at offset {offset} of the line); save the file as UTF-8", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line.
        place: String,
        /// Offset of the first bad byte in that line.
        offset: usize,
    },
    /// A line is not JSON.
    #[error("dataset {}, {place}: not valid JSON: {detail}; expected one object per line", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The line.
        place: String,
        /// The parser's words.
        detail: String,
    },
    /// A line, or a field of it, is not what it must be.
    #[error("dataset {}, {place}, field {field:?}: expected {expected}, found {found}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The line, or the sample of a single-document file.
        place: String,
        /// The field, with an index for an element of a list.
        field: String,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A line holds something other than an object.
    #[error("dataset {}, {place}: expected a JSON object, found {found}", path.display())]
    NotAnObject {
        /// The file.
        path: PathBuf,
        /// The line, or the sample of a single-document file.
        place: String,
        /// What it is.
        found: String,
    },
    /// A token id that the model does not have.
    #[error(
        "dataset {}, {place} (task_id {task_id}): vocab id out of range: input_ids[{position}] is {id}, but the model has ids 0 to {} (vocabulary {vocab_size}); make the dataset with this model's tokenizer",
        path.display(),
        vocab_size.saturating_sub(1)
    )]
    IdOutOfRange {
        /// The file.
        path: PathBuf,
        /// The line, or the sample of a single-document file.
        place: String,
        /// Its `task_id`.
        task_id: i64,
        /// The place in `input_ids`, from 0.
        position: usize,
        /// The id.
        id: u32,
        /// The model's vocabulary.
        vocab_size: u32,
    },
    /// An option of a synthetic dataset that cannot be.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// The option's name on the command line.
        option: String,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
}
