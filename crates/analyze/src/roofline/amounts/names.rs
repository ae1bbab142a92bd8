//! What names of kernels tell: types, masks, dimensions.

use std::sync::LazyLock;

use regex::Regex;

use super::{Amounts, DataType, Shape};

static DIMS_IN_NAME: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?:^|[^A-Za-z])M[=_]?(\d+)[_x, ]+N[=_]?(\d+)[_x, ]+K[=_]?(\d+)(?:[^0-9]|$)").expect("as above")
});

/// The largest side of a tile. Names give tiles far more often than dimensions, and a GEMM that fits a tile is no GEMM.
const LARGEST_TILE: u64 = 512;

/// What a GEMM computes, where its name carries m, n and k, e.g. `gemm_M32_N4096_K4096`. Tiles are not dimensions.
pub fn of_kernel_name(name: &str) -> Option<Amounts> {
    let found = DIMS_IN_NAME.captures(name)?;
    let before = &name[..found.get(1)?.start()];
    let tile = ["BLOCK", "TILE", "Tile", "SIZE"].iter().any(|word| before.contains(word));
    let number = |i: usize| found.get(i)?.as_str().parse::<u64>().ok();
    let (m, n, k) = (number(1)?, number(2)?, number(3)?);
    if tile || m.max(n).max(k) <= LARGEST_TILE {
        return None;
    }
    let data_type = data_type_of_kernel(name);
    let size = match data_type? {
        DataType::Fp64 => 8.0,
        DataType::Fp32 | DataType::Tf32 => 4.0,
        DataType::Bf16 | DataType::Fp16 => 2.0,
        DataType::Fp8 | DataType::Fp4 | DataType::Int8 => 0.0,
    };
    let [fm, fn_, fk] = [m, n, k].map(|d| d as f64);
    Some(Amounts {
        flops: Some(2.0 * fm * fn_ * fk),
        bytes: (size > 0.0).then_some((fm * fk + fk * fn_ + fm * fn_) * size),
        shape: Shape::Gemm { batch: 1, m, n, k },
        data_type,
        mask_not_known: false,
        untyped_elements: 0.0,
        is_product: true,
    })
}

/// The type of the inputs of a GEMM or attention kernel, where its name says it.
pub(crate) fn data_type_of_kernel(name: &str) -> Option<DataType> {
    const WORDS: [(&str, DataType); 15] = [
        // Products of strobe on a CPU; weights of 4 bits are multiplied as 8-bit integers.
        ("gemm_packed_int8", DataType::Int8),
        ("gemm_packed_int4", DataType::Int8),
        ("e4m3", DataType::Fp8),
        ("e5m2", DataType::Fp8),
        ("fp8", DataType::Fp8),
        ("tf32", DataType::Tf32),
        ("bf16", DataType::Bf16),
        ("bfloat16", DataType::Bf16),
        ("BFloat16", DataType::Bf16),
        ("fp16", DataType::Fp16),
        ("f16", DataType::Fp16),
        ("half", DataType::Fp16),
        ("i8", DataType::Int8),
        ("sgemm", DataType::Fp32),
        ("f32f32_f32", DataType::Fp32),
    ];
    let data_type = |name: &str| WORDS.iter().find(|(word, _)| name.contains(word)).map(|&(_, data_type)| data_type);
    // On this tier of strobe, named after what it adds, packed products and fused attention multiply bfloat16; others only
    // store it.
    match name.strip_suffix("_avx512bf16") {
        None => data_type(name),
        Some(stem) => {
            let multiplies = ["gemm_packed", "paged_attention"].iter().any(|kernel| stem.contains(kernel));
            data_type(stem).filter(|found| *found != DataType::Bf16 || multiplies)
        }
    }
}

/// Whether a kernel for fp32 inputs multiplies them on tensor cores as tf32. CUTLASS names the instruction, 16x8x8.
pub(in super::super) fn rounds_to_tf32(kernel: &str) -> bool {
    ["tf32", "tensorop_s1688"].iter().any(|word| kernel.contains(word))
}

static ELEMENT: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"OpaqueType<(\d+)u?>|(?:<|, ?|\(|c10::)(BFloat16|Half|double|float)\b").expect("as above")
});

/// Bytes of an element of the tensors that a kernel of PyTorch takes, from the parameters of its template.
pub(in super::super) fn element_bytes_of_kernel(kernel: &str) -> Option<f64> {
    let found = ELEMENT.captures(kernel)?;
    if let Some(bytes) = found.get(1) {
        return bytes.as_str().parse().ok();
    }
    Some(match found.get(2)?.as_str() {
        "BFloat16" | "Half" => 2.0,
        "double" => 8.0,
        _ => 4.0,
    })
}
