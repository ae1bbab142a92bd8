//! Kernel names without what changes from build to build: template arguments, tile sizes, architectures, versions.
//!
//! Two names are worth matching when they differ only in how a kernel was specialised. There are two steps, from careful
//! to coarse: [`specialisation_free`] keeps template arguments but drops the numbers in them, [`base_name`] drops
//! the arguments as well.

use std::sync::LazyLock;

use regex::Regex;

/// The name without numbers that only say how it was specialised: `gemm<float, 128, 64>` and `gemm<float, 256, 64>`
/// become one, `add<float>` and `mul<float>` do not.
pub fn specialisation_free(name: &str) -> String {
    if is_memory_name(name) {
        return name.to_owned();
    }
    static NUMBERS: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b(\(\w+\))?-?\d+[a-zA-Z]{0,3}\b"));
    let name = demangled_path(name).unwrap_or_else(|| name.to_owned());
    let numbered = NUMBERS.replace_all(without_parameters(&name), "#");
    let parts = numbered.split_inclusive(['<', '>', ',', ' ', ':', '&', '*']);
    let words: String = parts.map(|part| words_without_specialisation(part, false)).collect();
    words.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether this is what profilers call a copy or a fill, not a kernel.
pub(super) fn is_memory_name(name: &str) -> bool {
    name.starts_with("[CUDA mem") || name.starts_with("Memcpy ") || name.starts_with("Memset ")
}

/// What a copy or fill does, whichever profiler and version wrote its name: `memcpy HtoD`, `memset`.
fn memory_base(name: &str) -> String {
    let direction = [
        ("HtoD", ["HtoD", "Host-to-Device"]),
        ("DtoH", ["DtoH", "Device-to-Host"]),
        ("DtoD", ["DtoD", "Device-to-Device"]),
        ("HtoH", ["HtoH", "Host-to-Host"]),
        ("PtoP", ["PtoP", "Peer-to-Peer"]),
    ];
    let found = direction.into_iter().find(|(_, spellings)| spellings.iter().any(|s| name.contains(s)));
    match found {
        _ if name.to_ascii_lowercase().contains("memset") => "memset".to_owned(),
        Some((direction, _)) => format!("memcpy {direction}"),
        None => name.to_owned(),
    }
}

/// The name of the function alone: no return type, parameters or template arguments, no tile sizes, architectures,
/// versions or counters. Never empty for a name that is not.
pub fn base_name(name: &str) -> String {
    if is_memory_name(name) {
        return memory_base(name);
    }
    let path = demangled_path(name).unwrap_or_else(|| name.to_owned());
    let mut named = without_parameters(&path).to_owned();
    for unnamed in ["(anonymous namespace)::", "<unnamed>::", "{anonymous}::"] {
        named = named.replace(unnamed, "");
    }
    let plain = without_template_arguments(&named);
    // What is left before the last space is the return type.
    let plain = plain.trim().rsplit(' ').next().unwrap_or_default();
    let short = words_without_specialisation(plain, true);
    if short.is_empty() { plain.to_owned() } else { short }
}

/// Only called with patterns written in this file.
fn pattern(text: &str) -> Regex {
    Regex::new(text).unwrap_or_else(|error| unreachable!("{error}"))
}

/// Drops the words between underscores that only say how a kernel was specialised. With `tensile_head` a Tensile name
/// (`Cijk_..._MT128x128x32_...`) ends where its tuning parameters begin.
fn words_without_specialisation(name: &str, tensile_head: bool) -> String {
    static SPECIAL: LazyLock<Regex> = LazyLock::new(|| {
        pattern(concat!(
            r"^(?:",
            r"#|\d+|\d+x[\dx#]+|",                 // counters and tile sizes
            r"(?:sm|compute|gfx|cc)\d+[a-z0-9]*|", // architectures
            r"(?:ampere|volta|turing|hopper|ada|blackwell|pascal|maxwell|kepler)|",
            r"v\d+(?:\.\d+)*|", // versions
            r"split[kK](?:\d+)?|sliced\d*x\d*|coop[AB]|bz|[hv]|[12]cta|",
            r"align\d+|ldg\d+|stages?\d+|warp\d+|num_?warps\d+|",
            r"(?:\d+d(?:e|c)?)+(?:\d+)?|", // specialised arguments of Triton kernels: 0d1d2de
            r"0x[0-9a-fA-F]+|[0-9a-f]*\d[0-9a-f]*[a-f][0-9a-f]*",
            r")$"
        ))
    });
    static TUNING: LazyLock<Regex> = LazyLock::new(|| pattern(r"^MT\d+x\d+x\d+"));
    let short_hash =
        |word: &str| word.len() < 6 && word.bytes().all(|b| b.is_ascii_hexdigit()) && !word.starts_with("0x");
    let mut kept: Vec<&str> = Vec::new();
    for word in name.split('_') {
        if tensile_head && TUNING.is_match(word) {
            break;
        }
        let numeric = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
        let specialised = SPECIAL.is_match(word) && (numeric || !short_hash(word));
        if !specialised {
            kept.push(word);
        }
    }
    let joined = kept.join("_");
    if tensile_head { joined.trim_end_matches('_').to_owned() } else { joined }
}

/// Cuts the parameter list at the end, `(float*, int)`.
fn without_parameters(name: &str) -> &str {
    let trimmed = name.trim_end().trim_end_matches("const").trim_end();
    if !trimmed.ends_with(')') {
        return name.trim_end();
    }
    let mut depth = 0usize;
    for (at, byte) in trimmed.bytes().enumerate().rev() {
        match byte {
            b')' => depth += 1,
            b'(' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    let head = trimmed[..at].trim_end();
                    return if head.is_empty() { trimmed } else { head };
                }
            }
            _ => {}
        }
    }
    trimmed
}

fn without_template_arguments(name: &str) -> String {
    let mut depth = 0usize;
    let mut plain = String::with_capacity(name.len());
    for letter in name.chars() {
        match letter {
            '<' => depth += 1,
            '>' if depth > 0 => depth -= 1,
            _ if depth == 0 => plain.push(letter),
            _ => {}
        }
    }
    plain
}

/// The qualified name inside a mangled one, without its template arguments: `_ZN2at6native3fooIfEEvv` is
/// `at::native::foo`. `None` for names that are not mangled or of a form not known here.
fn demangled_path(name: &str) -> Option<String> {
    let rest = name.strip_prefix("_Z")?;
    let (nested, mut rest) = match rest.strip_prefix('N') {
        Some(rest) => (true, rest.trim_start_matches(['K', 'V', 'r'])),
        None => (false, rest.strip_prefix('L').unwrap_or(rest)),
    };
    let mut path: Vec<&str> = Vec::new();
    loop {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let Some(length) = rest.get(..digits).and_then(|d| d.parse::<usize>().ok()) else { break };
        let word = rest.get(digits..digits.checked_add(length)?)?;
        rest = rest.get(digits + length..)?;
        if !word.starts_with("_GLOBAL__N_") {
            path.push(word);
        }
        if !nested {
            break;
        }
    }
    (!path.is_empty()).then(|| path.join("::"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn base_names_of_real_kernels() {
        for (name, base) in [
            ("nvjet_sm90_tst_128x64_64x9_1x2_h_bz_splitK_TNT", "nvjet_tst_TNT"),
            ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "nvjet_tst_bias_TNN"),
            ("ampere_sgemm_128x128_tn", "sgemm_tn"),
            ("volta_sgemm_128x64_tn", "sgemm_tn"),
            ("cutlass_80_tensorop_f16_s16816gemm_f16_256x128_32x3_tn_align8", "cutlass_tensorop_f16_s16816gemm_f16_tn"),
            (
                "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB0",
                "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs",
            ),
            ("triton_poi_fused_add_mul_12", "triton_poi_fused_add_mul"),
            ("triton_red_fused__to_copy_mean_3", "triton_red_fused__to_copy_mean"),
            ("_fwd_kernel_0d1d2d3de", "_fwd_kernel"),
            ("fused_moe_kernel_7f3a9bc2d1e0", "fused_moe_kernel"),
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int, at::native::FillFunctor<int>, std::array<char*, 1ul>)",
                "at::native::vectorized_elementwise_kernel",
            ),
            (
                "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIiEESt5arrayIPcLm1EEEEviT0_T1_",
                "at::native::vectorized_elementwise_kernel",
            ),
            (
                "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false>(float*, float const*, int)",
                "softmax_warp_forward",
            ),
            (
                "void at::native::<unnamed>::CatArrayBatchedCopy_vectorized<OpaqueType<2>, int, 4>(T1 *)",
                "at::native::CatArrayBatchedCopy_vectorized",
            ),
            ("loop_add_fusion_5", "loop_add_fusion"),
            ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv"),
            ("Memcpy HtoD (Pinned -> Device)", "memcpy HtoD"),
            ("[CUDA memcpy Host-to-Device]", "memcpy HtoD"),
            ("[CUDA memset]", "memset"),
            ("Memset (Device)", "memset"),
            ("128", "128"),
        ] {
            assert_eq!(base_name(name), base, "{name}");
        }
    }

    #[test]
    fn the_careful_step_keeps_functors_apart() {
        let kernel = |n: u32, functor: &str| {
            format!(
                "void at::native::vectorized_elementwise_kernel<{n}, at::native::{functor}<float>, std::array<char*, 3ul> >(int, T1)"
            )
        };
        assert_eq!(
            specialisation_free(&kernel(4, "CUDAFunctor_add")),
            specialisation_free(&kernel(8, "CUDAFunctor_add"))
        );
        assert_ne!(specialisation_free(&kernel(4, "CUDAFunctor_add")), specialisation_free(&kernel(4, "MulFunctor")));
        let attention = |tile: u32| {
            format!(
                "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, {tile}, 64, 4, false, cutlass::half_t>, true>(Flash_fwd_params)"
            )
        };
        assert_eq!(specialisation_free(&attention(128)), specialisation_free(&attention(64)));
        assert_eq!(specialisation_free("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNN"), "nvjet_tst_TNN");
    }

    proptest! {
        #[test]
        fn any_text_is_taken_and_the_result_is_stable(name in "\\PC{0,60}") {
            let base = base_name(&name);
            prop_assert!(!base.is_empty() || name.trim().is_empty() || without_template_arguments(without_parameters(&name)).trim().is_empty());
            let _ = specialisation_free(&name);
        }
    }
}
