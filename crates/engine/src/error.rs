//! What can go wrong between a model and a running engine.

use std::path::PathBuf;

use strobe_model::ModelError;

/// One clear line each: what, where, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The model or its files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Tokens cannot be balanced over the experts.
    #[error(transparent)]
    PerfectRouter(#[from] strobe_model::PerfectRouterError),
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A field of an engine's `config.json` is missing or can't be run.
    #[error("{}: field `{field}`: expected {expected}, found {found}; rebuild the engine with `strobe build`", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Path of the field.
        field: String,
        /// What can be run.
        expected: String,
        /// What is there.
        found: String,
    },
    /// Weights are not those that were built.
    #[error("{}: tensor `{}`{}: damaged (checksum found {:016x}, expected {:016x}); rebuild the engine with `strobe build`",
            path.display(), first.tensor, more(*others), first.found, first.expected)]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The first of the damaged tensors.
        first: crate::weights::Damage,
        /// How many more there are.
        others: usize,
    },
    /// The engine was written by another version.
    #[error("{}: built by strobe {found}, this is strobe {expected}; rebuild the engine with `strobe build`", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Version there.
        found: String,
        /// Version here.
        expected: String,
    },
    /// A build or run option that does not fit.
    #[error("{option} {problem}")]
    Option {
        /// The option.
        option: String,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// Not enough memory.
    #[error("not enough memory for {what}: {arithmetic}; {remedy}")]
    Memory {
        /// What needs it.
        what: String,
        /// Needed against available.
        arithmetic: String,
        /// What to do.
        remedy: String,
    },
    /// The GPU or one of its libraries.
    #[error(transparent)]
    Cuda(strobe_kernels_cuda::CudaError),
    /// The caller's progress function asked to stop.
    #[error("interrupted; nothing was written")]
    Interrupted,
    /// The engine thread ended.
    #[error("the engine stopped: {0}")]
    Stopped(String),
}

fn more(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" and {others} more") }
}

impl From<strobe_kernels_cuda::CudaError> for EngineError {
    fn from(error: strobe_kernels_cuda::CudaError) -> EngineError {
        match error {
            strobe_kernels_cuda::CudaError::Interrupted => EngineError::Interrupted,
            other => EngineError::Cuda(other),
        }
    }
}

impl EngineError {
    /// An option with a problem.
    pub fn option(option: impl Into<String>, problem: impl Into<String>) -> EngineError {
        EngineError::Option { option: option.into(), problem: problem.into() }
    }
}
