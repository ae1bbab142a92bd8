//! The kernels' sources, and functions of loaded modules.

use cudarc::driver::sys;

/// One `.cu` file. The prelude is put in front of each.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// File name.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Oldest architecture it is compiled for (80, 86, 89, 90).
    pub min_arch: u32,
}

/// Declarations that every kernel file starts from.
pub(crate) const PRELUDE: &str = include_str!("../kernels/prelude.cuh");

const fn source(file: &'static str, text: &'static str, min_arch: u32) -> KernelSource {
    KernelSource { file, text, min_arch }
}

/// Every kernel file.
pub const SOURCES: &[KernelSource] = &[
    source("linear.cu", include_str!("../kernels/linear.cu"), 80),
    source("rows.cu", include_str!("../kernels/rows.cu"), 80),
    source("weights.cu", include_str!("../kernels/weights.cu"), 80),
];

/// A kernel of a loaded module; modules live until the process ends.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    pub(crate) raw: sys::CUfunction,
    /// Its name, for errors and traces.
    pub name: &'static str,
}

// SAFETY: a handle that the driver allows on any thread.
unsafe impl Send for Function {}
// SAFETY: as above; nothing is changed through it.
unsafe impl Sync for Function {}
