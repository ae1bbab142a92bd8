//! Amounts of work from shapes, and how near kernels come to the hardware's ceilings.

mod synthetic;

use std::collections::BTreeMap;
use std::path::Path;

use strobe_analyze::roofline::{AmountSource, Bound, DataType, Shape, of_kernel_name, of_operator, report, roofline};
use strobe_trace::{Peaks, RangeSource, Trace, Work};
use synthetic::{Builder, context, read, real_data};

const BF16: &str = r#"["c10::BFloat16", "c10::BFloat16", "c10::BFloat16"]"#;

fn gemm(name: &str, dims: &str) -> Option<(u64, u64, u64, u64)> {
    match of_operator(name, dims, BF16)?.shape {
        Shape::Gemm { batch, m, n, k } => Some((batch, m, n, k)),
        _ => None,
    }
}

#[test]
fn gemms_are_known_by_the_dimensions_of_their_inputs() {
    assert_eq!(gemm("aten::mm", "[[8, 16], [16, 4]]"), Some((1, 8, 4, 16)));
    assert_eq!(gemm("aten::addmm", "[[4], [8, 16], [16, 4], [], []]"), Some((1, 8, 4, 16)));
    assert_eq!(gemm("aten::bmm", "[[3, 8, 16], [3, 16, 4]]"), Some((3, 8, 4, 16)));
    assert_eq!(gemm("aten::baddbmm", "[[3, 8, 4], [3, 8, 16], [3, 16, 4]]"), Some((3, 8, 4, 16)));
    assert_eq!(gemm("aten::linear", "[[2, 5, 16], [4, 16], []]"), Some((1, 10, 4, 16)));
    assert_eq!(gemm("aten::matmul", "[[2, 5, 16], [16, 4]]"), Some((1, 10, 4, 16)));
    assert_eq!(gemm("aten::matmul", "[[2, 1, 5, 16], [3, 16, 4]]"), Some((6, 5, 4, 16)));
    assert_eq!(gemm("aten::matmul", "[[16], [16]]"), Some((1, 1, 1, 16)));
    assert_eq!(gemm("aiter::gemm_a16w16", "[[32, 4096], [6144, 4096], [], []]"), Some((1, 32, 6144, 4096)));
    assert_eq!(gemm("vllm::rocm_unquantized_gemm", "[[32, 2880], [5120, 2880], [5120]]"), Some((1, 32, 5120, 2880)));
    assert_eq!(gemm("_C::cutlass_scaled_mm", "[[32, 64], [32, 128], [128, 64], [], []]"), Some((1, 32, 64, 128)));
    // Dimensions that do not fit together, packed weights, experts, and backward passes tell nothing.
    assert_eq!(gemm("aten::mm", "[[8, 16], [15, 4]]"), None);
    assert_eq!(gemm("_C::marlin_gemm", "[[32, 4096], [256, 8192]]"), None);
    assert_eq!(gemm("vllm::moe_forward", "[[32, 3072], [32, 32]]"), None);
    assert_eq!(gemm("AddmmBackward0", "[[8, 16]]"), None);
    assert_eq!(gemm("aten::mm", "not json"), None);
}

#[test]
fn nvtx_ranges_of_pytorch_carry_sizes_in_their_name() {
    let amounts = of_operator("aten::mm, seq = 3, op_id = 7, sizes = [[8, 16], [16, 4]], input_op_ids = []", "", "");
    let amounts = amounts.unwrap();
    assert_eq!(amounts.flops, Some(2.0 * 8.0 * 16.0 * 4.0));
    assert_eq!(amounts.bytes, None, "the types are not known");
    assert_eq!(of_operator("iteration 3", "", ""), None);
}

#[test]
fn tiles_and_instructions_in_names_are_not_dimensions() {
    let names = [
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1_SN",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1",
        "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_tn_align8",
        "sm80_xmma_gemm_bf16_m16n8k16",
        "_gemm_bf16_kernel_BLOCK_SIZE_M_1024_N_1024_K_64",
        "gemm_bf16_M128_N256_K64",
    ];
    for name in names {
        assert_eq!(of_kernel_name(name), None, "{name}");
    }
    let known = of_kernel_name("gemm_bf16_M32_N4096_K1024_v2").unwrap();
    assert_eq!(known.shape, Shape::Gemm { batch: 1, m: 32, n: 4096, k: 1024 });
}

#[test]
fn an_operator_counts_once_whatever_it_launches() {
    let mut builder = Builder::new();
    builder.operator(RangeSource::CpuOp, "aten::linear", 0, 100, "[[8, 2048], [4096, 2048]]", BF16);
    builder.operator(RangeSource::CpuOp, "aten::mm", 20, 90, "[[8, 2048], [2048, 4096]]", BF16);
    builder.launch("copy", (5, 10), (200, 300)); // in linear, outside mm
    builder.launch("nvjet_gemm", (30, 40), (300, 4300)).launch("splitKreduce", (50, 60), (4300, 4800));
    let trace = builder.build();
    let result = roofline(&context(&trace));
    assert_eq!(result.rows.len(), 1);
    let row = &result.rows[0];
    assert_eq!((row.op.as_str(), row.calls, row.time_ns), ("aten::mm", 1, 4500));
    assert_eq!((row.kernel.as_str(), row.source), ("nvjet_gemm", AmountSource::Operator));
    assert_eq!(row.flops, Some(2.0 * 8.0 * 2048.0 * 4096.0));
    let bytes = 2.0 * (8.0 * 2048.0 + 2048.0 * 4096.0 + 8.0 * 4096.0);
    assert_eq!(row.bytes, Some(bytes));
    assert_eq!((row.bound, row.data_type), (Some(Bound::Memory), Some(DataType::Bf16)));
    assert!((row.share().unwrap() - bytes / 4800.0 / 4500.0).abs() < 1e-9);
    assert_eq!(result.unknown, [("copy".to_owned(), 1, 100)]);
    assert_eq!((result.known_ns, result.total_ns), (4500, 4600));
}

#[test]
fn recorded_work_and_measured_peaks_come_first() {
    let mut builder = Builder::new();
    builder.trace.meta.peaks = Some(Peaks {
        flops_per_s: 1e12,
        int8_ops_per_s: None,
        bf16_flops_per_s: None,
        bytes_per_s: 1e11,
        note: String::new(),
    });
    let (op, category) = (builder.name("qkv_proj"), builder.name("gemm"));
    builder.trace.works.push(Work { op, category, layer: Some(0), shape: [1, 64, 32], bytes: 4000, flops: 4096 });
    builder.kernel("gemv_f32", 0, 100, 0);
    builder.trace.ops.work[0] = 0;
    let trace = builder.build();
    let result = roofline(&context(&trace));
    let row = &result.rows[0];
    assert_eq!((row.op.as_str(), row.source, row.bound), ("qkv_proj", AmountSource::Recorded, Some(Bound::Memory)));
    assert!((row.share().unwrap() - 0.4).abs() < 1e-9); // 4000 B at 100 GB/s take 40 ns of 100
}

#[test]
fn products_of_integers_and_of_bfloat16_have_ceilings_of_their_own() {
    let mut builder = Builder::new();
    let note = String::new();
    builder.trace.meta.peaks = Some(Peaks {
        flops_per_s: 1e12,
        int8_ops_per_s: Some(4e12),
        bf16_flops_per_s: Some(2e12),
        bytes_per_s: 1e11,
        note,
    });
    let (op, category) = (builder.name("qkv_proj"), builder.name("gemm"));
    builder.trace.works.push(Work { op, category, layer: Some(0), shape: [9, 9, 9], bytes: 1, flops: 200_000 });
    let kernels = [
        "gemm_packed_int4_x",
        "gemm_packed_f32_avx512bf16",
        "gemm_packed_bf16_avx512bf16",
        "paged_attention_int8_x",
        "paged_attention_bf16_avx512bf16",
        "unfused_scores_bf16_avx512bf16",
    ];
    for (index, kernel) in kernels.iter().enumerate() {
        builder.kernel(kernel, 1000 * index as i64, 1000 * index as i64 + 200, 0);
        builder.trace.ops.work[index] = 0;
    }
    let trace = builder.build();
    let result = roofline(&context(&trace));
    let share = |kernel: &str| result.rows.iter().find(|row| row.kernel.starts_with(kernel)).unwrap().share().unwrap();
    assert!((share("gemm_packed_int4") - 0.25).abs() < 1e-9);
    assert!((share("gemm_packed_f32") - 1.0).abs() < 1e-9);
    assert!((share("gemm_packed_bf16") - 0.5).abs() < 1e-9);
    assert!((share("paged_attention_bf16") - 0.5).abs() < 1e-9);
    assert!((share("unfused_scores_bf16") - 1.0).abs() < 1e-9, "only the cache is of bfloat16");
    assert!((share("paged_attention_int8") - 1.0).abs() < 1e-9, "only the cache is of integers");
    let rows = strobe_analyze::top_ops::top_ops(&context(&trace));
    let top = |kernel: &str| rows.iter().find(|row| row.kernel.starts_with(kernel)).unwrap().roofline.unwrap().share;
    assert!((top("gemm_packed_int4") - 0.25).abs() < 1e-9);
    assert!((top("gemm_packed_bf16") - 0.5).abs() < 1e-9);
    assert!((top("paged_attention_int8") - 1.0).abs() < 1e-9);
    assert!((top("paged_attention_bf16") - 0.5).abs() < 1e-9);
}

#[test]
fn nothing_known_says_how_to_record_it() {
    let mut builder = Builder::new();
    builder.launch("kernel", (0, 5), (10, 20));
    let trace = builder.build();
    assert!(report(&context(&trace)).not_applicable.unwrap().contains("record_shapes"));
    assert!(report(&context(&Trace::default())).not_applicable.is_some());
}

/// A CSV file with quoted fields, by column name.
fn csv(path: &Path) -> Vec<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path).unwrap();
    let (mut rows, mut row, mut field, mut quoted) = (Vec::new(), Vec::new(), String::new(), false);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => field.extend(chars.next()),
            '"' => quoted = !quoted,
            ',' if !quoted => row.push(std::mem::take(&mut field)),
            '\n' if !quoted => {
                row.push(std::mem::take(&mut field));
                rows.push(std::mem::take(&mut row));
            }
            '\r' if !quoted => {}
            c => field.push(c),
        }
    }
    let header = rows.remove(0);
    rows.into_iter().map(|row| header.iter().cloned().zip(row).collect()).collect()
}

/// Every GEMM and every attention that TraceLens reports is found with the same count, FLOPs, bytes and time.
#[test]
fn amounts_equal_those_of_tracelens() {
    let Some(data) = real_data() else { return };
    let folder = data.join("kineto/tracelens");
    let cases = [
        ("h100_qwen/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", "GEMM.csv", "h100_qwen"),
        ("h100_qwen/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", "SDPA_fwd.csv", "h100_qwen"),
        ("sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz", "GEMM.csv", "sglang_prefilldecode"),
        (
            "sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz",
            "InferenceAttention_fwd.csv",
            "sglang_prefilldecode",
        ),
        ("h100_qwen/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", "UnaryElementwise.csv", "h100_qwen"),
    ];
    for (trace, table, golden) in cases {
        let trace = read(&[folder.join(trace)]);
        let result = roofline(&context(&trace));
        for expected in csv(&folder.join(golden).join("perf_csvs").join(table)) {
            let number = |column: &str| expected[column].parse::<f64>().unwrap();
            // Their table also counts operators around others (the time of `aten::mm` again as `aiter::gemm`).
            let wrapper = expected["name"].starts_with("aiter::gemm") || expected["name"].starts_with("sglang::");
            // What their table calls by the name of the operator inside is one and the same here.
            let name = match expected["name"].as_str() {
                "aten::_scaled_dot_product_flash_attention" => "aten::_flash_attention_forward",
                name => name,
            };
            if wrapper {
                continue;
            }
            let calls = number("name_count");
            let flops = number("GFLOPS_first") * 1e9;
            let bytes = number("Data Moved (MB)_first") * 1_048_576.0;
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs().max(1.0);
            let same = |row: &&strobe_analyze::roofline::Row| {
                row.op == name
                    && close(row.bytes.unwrap() / row.calls as f64, bytes)
                    && row.flops.is_none_or(|f| close(f / row.calls as f64, flops))
            };
            let found: Vec<_> = result.rows.iter().filter(same).collect();
            let context = format!("{golden} {table} {name} {bytes} {}", expected["Input Dims_first"]);
            let (found_calls, time): (u64, i64) = found.iter().fold((0, 0), |(c, t), r| (c + r.calls, t + r.time_ns));
            // Operators with equal amounts (transposed shapes) share a row in neither table.
            let twins: f64 = csv(&folder.join(golden).join("perf_csvs").join(table))
                .iter()
                .filter(|other| other["name"] == expected["name"] && other["GFLOPS_first"] == expected["GFLOPS_first"])
                .filter(|other| other["Data Moved (MB)_first"] == expected["Data Moved (MB)_first"])
                .map(|other| other["name_count"].parse::<f64>().unwrap())
                .sum();
            assert_eq!(found_calls as f64, twins, "{context}");
            if twins == calls {
                let expected_us = number("Kernel Time (µs)_sum");
                assert!((time as f64 / 1e3 - expected_us).abs() < 0.01 * calls.max(1.0), "{context}: {time}");
            }
        }
    }
}

/// What memory limits moves as many bytes as TraceLens says, within 2 %: it leaves out the smaller of two broadcast inputs,
/// tables of positions and indices.
#[test]
fn bytes_of_what_memory_limits_equal_those_of_tracelens() {
    let Some(data) = real_data() else { return };
    let folder = data.join("kineto/tracelens");
    let traces = [
        ("h100_qwen", "Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", ["BinaryElementwise", "Reduce_fwd"].as_slice()),
        (
            "sglang_prefilldecode",
            "sglang_Qwen3-8B_prefilldecode.json.gz",
            &["RMSNorm_fwd", "RoPE_fwd", "UnaryElementwise"],
        ),
    ];
    let mut compared = 0;
    for (golden, trace, tables) in traces {
        let trace = read(&[folder.join(golden).join(trace)]);
        let result = roofline(&context(&trace));
        for table in tables {
            for expected in csv(&folder.join(golden).join("perf_csvs").join(format!("{table}.csv"))) {
                let number = |column: &str| expected[column].parse::<f64>().unwrap();
                // Rows here hold integers of all widths together.
                if !expected["Input type_first"].contains("c10::BFloat16")
                    && !expected["Input type_first"].contains("float")
                {
                    continue;
                }
                let (flops, bytes) = (number("GFLOPS_first") * 1e9, number("Data Moved (MB)_first") * 1_048_576.0);
                let near = |a: f64, b: f64| (a - b).abs() <= 0.02 * b;
                let found = result.rows.iter().filter(|row| row.op == expected["name"]).any(|row| {
                    let per_call = |amount: Option<f64>| amount.map(|amount| amount / row.calls as f64);
                    per_call(row.bytes).is_some_and(|b| near(b, bytes))
                        && per_call(row.flops).is_none_or(|f| near(f, flops))
                });
                assert!(found, "{golden} {table} {} {}", expected["name"], expected["Input Dims_first"]);
                compared += 1;
            }
        }
    }
    assert!(compared > 15, "{compared}");
}
