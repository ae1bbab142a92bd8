//! The one error type of this crate. Every text is one line: what, where, what was expected and found, what to do.

use std::path::{Path, PathBuf};

/// Anything that can be wrong with a model's files, or with how they are asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "open", "read", "write", ...
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file that should be JSON is not.
    #[error("{}: line {line}: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line of the first error, from 1.
        line: usize,
        /// What is wrong there.
        problem: String,
    },
    /// A configuration field has a value this crate cannot use.
    #[error("{}: field `{field}`: {problem}", path.display())]
    Config {
        /// The file (or other origin) of the configuration.
        path: PathBuf,
        /// The field as it is spelled in the file.
        field: String,
        /// What was expected and found.
        problem: String,
    },
    /// The architecture is not one of those implemented.
    #[error(
        "{}: field `architectures`: `{found}` is not supported; supported: {}",
        path.display(),
        crate::config::SUPPORTED_ARCHITECTURES.join(", ")
    )]
    UnsupportedArchitecture {
        /// The file of the configuration.
        path: PathBuf,
        /// The architecture named there.
        found: String,
    },
    /// A safetensors file is damaged, or was asked to hold something it cannot.
    #[error("{}: {problem}", path.display())]
    SafeTensors {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A GGUF file is damaged, or of a kind this crate does not read.
    #[error("{}: {problem}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A model directory does not hold a complete checkpoint.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// The directory or the file in it.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A tensor is missing or does not have the shape or dtype its configuration asks for.
    #[error("{}: tensor `{tensor}`: {problem}", path.display())]
    Tensor {
        /// The checkpoint directory or file.
        path: PathBuf,
        /// The tensor's name in the checkpoint.
        tensor: String,
        /// What was expected and found.
        problem: String,
    },
    /// A weight was asked for with a row or a buffer that does not fit it. This is a mistake of the caller.
    #[error("weight `{weight}`: {problem}")]
    WeightAccess {
        /// The engine's name of the weight.
        weight: String,
        /// What does not fit.
        problem: String,
    },
    /// A tokenizer file is damaged or a text cannot be tokenized.
    #[error("{origin}: {problem}")]
    Tokenizer {
        /// The tokenizer file, or "byte tokenizer".
        origin: String,
        /// What is wrong.
        problem: String,
    },
}

impl ModelError {
    /// An I/O error with its action and path, for `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ModelError {
        let path = path.to_path_buf();
        move |source| ModelError::Io { action, path, source }
    }

    pub(crate) fn config(path: &Path, field: impl Into<String>, problem: impl Into<String>) -> ModelError {
        ModelError::Config { path: path.to_path_buf(), field: field.into(), problem: problem.into() }
    }

    pub(crate) fn safetensors(path: &Path, problem: impl Into<String>) -> ModelError {
        ModelError::SafeTensors { path: path.to_path_buf(), problem: problem.into() }
    }

    pub(crate) fn gguf(path: &Path, problem: impl Into<String>) -> ModelError {
        ModelError::Gguf { path: path.to_path_buf(), problem: problem.into() }
    }

    pub(crate) fn checkpoint(path: &Path, problem: impl Into<String>) -> ModelError {
        ModelError::Checkpoint { path: path.to_path_buf(), problem: problem.into() }
    }
}

/// One line of `text`, short enough to stand inside an error message.
pub(crate) fn excerpt(text: &str) -> String {
    const LONGEST: usize = 80;
    let line = text.replace(|c: char| c.is_control(), " ");
    if line.chars().count() <= LONGEST {
        return line;
    }
    let mut short: String = line.chars().take(LONGEST).collect();
    short.push('…');
    short
}
