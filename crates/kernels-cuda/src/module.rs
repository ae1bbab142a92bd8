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

/// Hopper's matrix products for one type of operand: the instances take long to compile, so each type is a file.
macro_rules! gemm_sm90 {
    ($type:literal) => {
        concat!("#define GEMM_TYPE ", $type, "\n", include_str!("../kernels/gemm_sm90.cu"))
    };
}

/// The experts' products on Hopper, in two files for the same reason.
macro_rules! moe_sm90 {
    ($type:literal) => {
        concat!(
            "#define GEMM_TYPE ",
            $type,
            "\n#define GEMM_EXPERTS\n",
            include_str!("../kernels/gemm_sm90.cu"),
            include_str!("../kernels/moe_sm90.cu")
        )
    };
}

/// Products of few rows, in two files for the same reason.
macro_rules! skinny {
    ($type:literal) => {
        concat!("#define SKINNY_TYPE ", $type, "\n", include_str!("../kernels/skinny.cu"))
    };
}

/// Every kernel file.
pub const SOURCES: &[KernelSource] = &[
    source("attention_decode.cu", include_str!("../kernels/attention_decode.cu"), 80),
    source("attention_prefill.cu", include_str!("../kernels/attention_prefill.cu"), 80),
    source("attention_rows.cu", include_str!("../kernels/attention_rows.cu"), 80),
    source("gemm.cu", include_str!("../kernels/gemm.cu"), 80),
    source("gemm_sm90_bf16.cu", gemm_sm90!("0"), 90),
    source("gemm_sm90_f16.cu", gemm_sm90!("1"), 90),
    source("gemm_sm90_fp8.cu", gemm_sm90!("2"), 90),
    source("latent.cu", include_str!("../kernels/latent.cu"), 80),
    source("linear.cu", include_str!("../kernels/linear.cu"), 80),
    source("moe.cu", include_str!("../kernels/moe.cu"), 80),
    source("moe_gemm.cu", include_str!("../kernels/moe_gemm.cu"), 80),
    source("moe_sm90_bf16.cu", moe_sm90!("0"), 90),
    source("moe_sm90_f16.cu", moe_sm90!("1"), 90),
    source("rows.cu", include_str!("../kernels/rows.cu"), 80),
    source("sample.cu", include_str!("../kernels/sample.cu"), 80),
    source("selftest.cu", include_str!("../kernels/selftest.cu"), 80),
    source("skinny_bf16.cu", skinny!("0"), 80),
    source("skinny_f16.cu", skinny!("1"), 80),
    source("unfused.cu", include_str!("../kernels/unfused.cu"), 80),
    source("weights.cu", include_str!("../kernels/weights.cu"), 80),
];

/// A kernel of a loaded module, which lives as long as the [`crate::Gpu`] that loaded it.
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
