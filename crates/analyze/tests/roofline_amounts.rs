//! FLOPs and bytes of operators as PyTorch's profiler records them, against values worked out by hand.

mod synthetic;

use strobe_analyze::roofline::{Beyond, Inputs, Roofline, Shape, of_inputs, roofline};
use strobe_trace::{RangeRow, RangeSource, StrId};
use synthetic::{Builder, context, read, real_data};

/// What the profiler writes of an operator, its FLOPs and its bytes.
struct Case {
    name: &'static str,
    dims: &'static str,
    types: &'static str,
    values: &'static str,
    flops: f64,
    bytes: f64,
}

fn case(
    name: &'static str,
    dims: &'static str,
    types: &'static str,
    values: &'static str,
    flops: f64,
    bytes: f64,
) -> Case {
    Case { name, dims, types, values, flops, bytes }
}

/// By hand: a multiply and an add are two operations, a function such as exp is one; each distinct tensor is read once,
/// the result is written once.
fn cases() -> Vec<Case> {
    vec![
        // 2 x 8944 x 2816 x 1024; bf16: (8944 x 1024 + 1024 x 2816 + 8944 x 2816) x 2.
        case(
            "aten::mm",
            "[[8944, 1024], [1024, 2816]]",
            r#"["c10::BFloat16", "c10::BFloat16"]"#,
            "",
            51_581_550_592.0,
            74_457_088.0,
        ),
        // 2 x 32 x 1000 x 2048 and 32 x 1000 for the bias; fp32: (1000 + 65536 + 2048000 + 32000) x 4.
        case(
            "aten::addmm",
            "[[1000], [32, 2048], [2048, 1000], [], []]",
            r#"["float", "float", "float", "Scalar", "Scalar"]"#,
            r#"["", "", "", "1", "1"]"#,
            131_104_000.0,
            8_586_144.0,
        ),
        // 2 x 96 x 128 x 128 x 64; fp16: 96 x (128 x 64 + 64 x 128 + 128 x 128) x 2.
        case(
            "aten::bmm",
            "[[96, 128, 64], [96, 64, 128]]",
            r#"["c10::Half", "c10::Half"]"#,
            "",
            201_326_592.0,
            6_291_456.0,
        ),
        // The first layer of ResNet-50: out 112 x 112 = (224 + 6 - 7) / 2 + 1. 2 x 32 x 64 x 112 x 112 x 3 x 7 x 7;
        // (32 x 3 x 224 x 224 + 64 x 3 x 7 x 7 + 32 x 64 x 112 x 112) x 4.
        case(
            "aten::cudnn_convolution",
            "[[32, 3, 224, 224], [64, 3, 7, 7], [], [], [], [], [], [], []]",
            r#"["float", "float", "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", "Scalar", "Scalar"]"#,
            r#"["", "", "[3, 3]", "[2, 2]", "[1, 1]", "1", "False", "False", "True"]"#,
            7_552_892_928.0,
            122_065_664.0,
        ),
        // Depthwise, 32 groups of one channel, with a bias: out 56 x 56. 2 x 8 x 32 x 56 x 56 x 1 x 3 x 3 and one add per
        // output; fp16: (8 x 32 x 112 x 112 + 32 x 9 + 32 + 8 x 32 x 56 x 56) x 2.
        case(
            "aten::conv2d",
            "[[8, 32, 112, 112], [32, 1, 3, 3], [32], [], [], [], []]",
            r#"["c10::Half", "c10::Half", "c10::Half", "ScalarList", "ScalarList", "ScalarList", "Scalar"]"#,
            r#"["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "32"]"#,
            15_253_504.0,
            8_028_800.0,
        ),
        // Dilated: out 24 = 28 - 2 x (3 - 1) x 1 with dilation 2 and no padding. 2 x 4 x 16 x 24 x 24 x 8 x 9;
        // (4 x 8 x 28 x 28 + 16 x 8 x 9 + 4 x 16 x 24 x 24) x 4.
        case(
            "aten::convolution",
            "[[4, 8, 28, 28], [16, 8, 3, 3], [], [], [], [], [], [], []]",
            r#"["float", "float", "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"]"#,
            r#"["", "", "", "[1, 1]", "[0, 0]", "[2, 2]", "False", "[0, 0]", "1"]"#,
            5_308_416.0,
            252_416.0,
        ),
        // Transposed: out 32 = (16 - 1) x 2 - 2 + 3 + 1; every input meets the window: 2 x 2 x 64 x 16 x 16 x 32 x 4 x 4;
        // (2 x 64 x 256 + 64 x 32 x 16 + 2 x 32 x 1024) x 4.
        case(
            "aten::convolution",
            "[[2, 64, 16, 16], [64, 32, 4, 4], [], [], [], [], [], [], []]",
            r#"["float", "float", "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"]"#,
            r#"["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "True", "[0, 0]", "1"]"#,
            33_554_432.0,
            524_288.0,
        ),
        // Both gradients, each as many operations as forward: 2 x 2 x 16 x 128 x 28 x 28 x 128 x 9. The output's gradient,
        // input, weights are read (input and weights once for each gradient's partner), two gradients are written:
        // (16 x 128 x 28 x 28 x 3 + 128 x 128 x 9 x 2) x 4.
        case(
            "aten::convolution_backward",
            "[[16, 128, 28, 28], [16, 128, 28, 28], [128, 128, 3, 3], [], [], [], [], [], [], [], []]",
            r#"["float", "float", "float", "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar", "ScalarList"]"#,
            r#"["", "", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"]"#,
            7_398_752_256.0,
            20_447_232.0,
        ),
        // Only the weights' gradient, as of the first layer: 2 x 32 x 64 x 112 x 112 x 3 x 49; gradient, input and the
        // result: (32 x 64 x 112 x 112 + 32 x 3 x 224 x 224 + 64 x 3 x 49) x 4.
        case(
            "aten::convolution_backward",
            "[[32, 64, 112, 112], [32, 3, 224, 224], [64, 3, 7, 7], [], [], [], [], [], [], [], []]",
            r#"["float", "float", "float", "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar", "ScalarList"]"#,
            r#"["", "", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1", "[False, True, False]"]"#,
            7_552_892_928.0,
            122_065_664.0,
        ),
        // Before PyTorch 1.11 the weights' shape tells the input gradient's operations: 2 x 32 x 2048 x 7 x 7 x 512; the
        // size of the result is a value: (32 x 2048 x 49 + 2048 x 512 + 32 x 512 x 49) x 4.
        case(
            "aten::cudnn_convolution_backward_input",
            "[[], [32, 2048, 7, 7], [2048, 512, 1, 1], [], [], [], [], [], [], []]",
            r#"["ScalarList", "float", "float", "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", "Scalar", "Scalar"]"#,
            r#"["[32, 512, 7, 7]", "", "", "[0, 0]", "[1, 1]", "[1, 1]", "1", "False", "False", "True"]"#,
            3_288_334_336.0,
            20_250_624.0,
        ),
        // 7 per element; input and result, weight, bias and running statistics: (2 x 32 x 64 x 112 x 112 + 4 x 64) x 4.
        case(
            "aten::cudnn_batch_norm",
            "[[32, 64, 112, 112], [64], [64], [64], [64], [], [], []]",
            r#"["float", "float", "float", "float", "float", "Scalar", "Scalar", "Scalar"]"#,
            r#"["", "", "", "", "", "True", "0.1", "1e-05"]"#,
            179_830_784.0,
            205_521_920.0,
        ),
        // 13 per element; input and gradient, weight and the saved statistics are read, three gradients written:
        // (3 x 32 x 2048 x 49 + 5 x 2048) x 4.
        case(
            "aten::cudnn_batch_norm_backward",
            "[[32, 2048, 7, 7], [32, 2048, 7, 7], [2048], [2048], [2048], [2048], [2048], [], [0]]",
            r#"["float", "float", "float", "float", "float", "float", "float", "Scalar", "unsigned char"]"#,
            "",
            41_746_432.0,
            38_576_128.0,
        ),
        // 7 per element; (2 x 1024 x 512 + 2 x 512) x 4.
        case(
            "aten::native_layer_norm",
            "[[1024, 512], [], [512], [512], []]",
            r#"["float", "ScalarList", "float", "float", "Scalar"]"#,
            r#"["", "[512]", "", "", "1e-05"]"#,
            3_670_016.0,
            4_198_400.0,
        ),
        // 13 per element; gradient, input, mean, rstd, weight and bias are read, three gradients written:
        // (3 x 1024 x 512 + 2 x 1024 + 4 x 512) x 4.
        case(
            "aten::native_layer_norm_backward",
            "[[1024, 512], [1024, 512], [], [1024, 1], [1024, 1], [512], [512], []]",
            r#"["float", "float", "ScalarList", "float", "float", "float", "float", "ScalarList"]"#,
            "",
            6_815_744.0,
            6_307_840.0,
        ),
        // 5 per element; read and written: 2 x 8 x 12 x 512 x 512 x 2 in fp16.
        case(
            "aten::_softmax",
            "[[8, 12, 512, 512], [], []]",
            r#"["c10::Half", "Scalar", "Scalar"]"#,
            r#"["", "-1", "False"]"#,
            125_829_120.0,
            100_663_296.0,
        ),
        // 4 per element; gradient and result are read, one is written: 3 x 32 x 1000 x 4.
        case(
            "aten::_log_softmax_backward_data",
            "[[32, 1000], [32, 1000], [], []]",
            r#"["float", "float", "Scalar", "Scalar"]"#,
            r#"["", "", "1", "6"]"#,
            128_000.0,
            384_000.0,
        ),
        // Out 56 = (112 + 2 - 3) / 2 + 1, a window of 9 each; input, result and an index of 8 bytes per result:
        // 32 x 64 x 112 x 112 x 4 + 32 x 64 x 56 x 56 x 12.
        case(
            "aten::max_pool2d_with_indices",
            "[[32, 64, 112, 112], [], [], [], [], []]",
            r#"["float", "ScalarList", "ScalarList", "ScalarList", "ScalarList", "Scalar"]"#,
            r#"["", "[3, 3]", "[2, 2]", "[1, 1]", "[1, 1]", "False"]"#,
            57_802_752.0,
            179_830_784.0,
        ),
        // Gradient and indices are read, the input's gradient is written, the input itself is not needed.
        case(
            "aten::max_pool2d_with_indices_backward",
            "[[32, 64, 56, 56], [32, 64, 112, 112], [], [], [], [], [], [32, 64, 56, 56]]",
            r#"["float", "float", "ScalarList", "ScalarList", "ScalarList", "ScalarList", "Scalar", "long int"]"#,
            "",
            6_422_528.0,
            179_830_784.0,
        ),
        // Adaptive: 32 x 2048 x 7 x 7 down to 1 x 1: (3211264 + 65536) x 4.
        case(
            "aten::_adaptive_avg_pool2d",
            "[[32, 2048, 7, 7], []]",
            r#"["float", "ScalarList"]"#,
            r#"["", "[1, 1]"]"#,
            3_211_264.0,
            13_107_200.0,
        ),
        // The third tensor is `out`, which is written and not read: 2 x 25690112 x 4.
        case(
            "aten::clamp_min",
            "[[32, 64, 112, 112], [], [32, 64, 112, 112]]",
            r#"["float", "Scalar", "float"]"#,
            r#"["", "0", ""]"#,
            25_690_112.0,
            205_520_896.0,
        ),
        // Gradient and activation are read, one is written: 3 x 25690112 x 4.
        case(
            "aten::threshold_backward",
            "[[32, 64, 112, 112], [32, 64, 112, 112], []]",
            r#"["float", "float", "Scalar"]"#,
            r#"["", "", "0"]"#,
            25_690_112.0,
            308_281_344.0,
        ),
        // Broadcast: the second factor has one number per row: (2 x 9158656 + 8944) x 4.
        case("aten::mul", "[[16, 559, 1024], [16, 559, 1]]", r#"["float", "float"]"#, "", 9_158_656.0, 73_305_024.0),
        // In place, with out= as large as the target: no more than two reads and a write: 3 x 1000 x 2048 x 4.
        case(
            "aten::add_",
            "[[1000, 2048], [1000, 2048], []]",
            r#"["float", "float", "Scalar"]"#,
            "",
            2_048_000.0,
            24_576_000.0,
        ),
        // A comparison of fp32 writes one byte each: 1048576 x (4 + 1).
        case("aten::gt", "[[1024, 1024], []]", r#"["float", "Scalar"]"#, r#"["", "0"]"#, 1_048_576.0, 5_242_880.0),
        // Over the last dimension: 16 x 559 results: (9158656 + 8944) x 4.
        case(
            "aten::mean",
            "[[16, 559, 1024], [], [], []]",
            r#"["float", "ScalarList", "Scalar", ""]"#,
            r#"["", "[-1]", "True", ""]"#,
            9_158_656.0,
            36_670_400.0,
        ),
        // A value and an index of 8 bytes for each row: 128 x 32000 x 2 + 128 x 8.
        case(
            "aten::argmax",
            "[[128, 32000], [], []]",
            r#"["c10::BFloat16", "Scalar", "Scalar"]"#,
            r#"["", "-1", "False"]"#,
            4_096_000.0,
            8_193_024.0,
        ),
        // Causal: half of the square: 4 x 16 x 16 x 559 x 559 / 2 x 64; four tensors of 16 x 16 x 559 x 64 in bf16.
        case(
            "aten::_scaled_dot_product_flash_attention",
            "[[16, 16, 559, 64], [16, 16, 559, 64], [16, 16, 559, 64], [], [], [], []]",
            r#"["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "Scalar", "Scalar", "Scalar", "Scalar"]"#,
            r#"["", "", "", "0.", "True", "False", "0.125"]"#,
            10_239_377_408.0,
            73_269_248.0,
        ),
        // Grouped queries, no mask: 4 x 2 x 32 x 1024 x 1024 x 128; queries and results of 32 heads, keys and values of 8:
        // 2 x 1024 x 128 x (2 x 32 + 2 x 8) x 2.
        case(
            "aten::_flash_attention_forward",
            "[[2, 1024, 32, 128], [2, 1024, 8, 128], [2, 1024, 8, 128], [], [], [], [], [], [], [], []]",
            r#"["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "", "", "Scalar", "Scalar", "Scalar", "Scalar", "Scalar", "Scalar"]"#,
            r#"["", "", "", "", "", "1024", "1024", "0.", "False", "False", ""]"#,
            34_359_738_368.0,
            41_943_040.0,
        ),
        // Five products instead of two, causal: 10 x 4 x 8 x 512 x 512 / 2 x 64; each of queries, keys, values and the
        // result with its gradient: 8 x 4 x 8 x 512 x 64 x 2.
        case(
            "aten::_scaled_dot_product_efficient_attention_backward",
            "[[4, 8, 512, 64], [4, 8, 512, 64], [4, 8, 512, 64], [4, 8, 512, 64], [], [4, 8, 512, 64], [4, 8, 512], [], [], [], [], []]",
            r#"["c10::Half", "c10::Half", "c10::Half", "c10::Half", "", "c10::Half", "float", "long int", "long int", "Scalar", "ScalarList", "Scalar"]"#,
            r#"["", "", "", "", "", "", "", "", "", "0.", "[True, True, True, False]", "True"]"#,
            2_684_354_560.0,
            16_777_216.0,
        ),
        // Rows of 1024 in bf16 are read and written, indices of 8 bytes are read: 8944 x 1024 x 2 x 2 + 8944 x 8.
        case(
            "aten::embedding",
            "[[151936, 1024], [16, 559], [], [], []]",
            r#"["c10::BFloat16", "long int", "Scalar", "Scalar", "Scalar"]"#,
            r#"["", "", "-1", "False", "False"]"#,
            0.0,
            36_706_176.0,
        ),
        // The gradient and indices are read, the whole table of 30000 rows is written: 8192 x 256 x 4 + 8192 x 8 +
        // 30000 x 256 x 4.
        case(
            "aten::embedding_dense_backward",
            "[[8, 1024, 256], [8, 1024], [], [], []]",
            r#"["float", "long int", "Scalar", "Scalar", "Scalar"]"#,
            r#"["", "", "30000", "-1", "False"]"#,
            2_097_152.0,
            39_174_144.0,
        ),
        // 64-bit to 32-bit: 1048576 x (8 + 4).
        case(
            "aten::copy_",
            "[[1024, 1024], [1024, 1024], []]",
            r#"["float", "long int", "Scalar"]"#,
            "",
            0.0,
            12_582_912.0,
        ),
        // One element per row and its label of 8 bytes: 32 x (4 + 8).
        case(
            "aten::nll_loss_forward",
            "[[32, 1000], [32], [], [], []]",
            r#"["float", "long int", "", "Scalar", "Scalar"]"#,
            r#"["", "", "", "1", "-100"]"#,
            32.0,
            384.0,
        ),
        // Engines: gates and values beside each other, the result first: 15360 x (12288 + 24576) x 2.
        case(
            "sgl_kernel::silu_and_mul",
            "[[15360, 12288], [15360, 24576]]",
            r#"["c10::BFloat16", "c10::BFloat16"]"#,
            "",
            943_718_400.0,
            1_132_462_080.0,
        ),
        // Input and residual are read and written in place: 4 x 15360 x 4096 x 2 + 4096 x 2.
        case(
            "_C::fused_add_rms_norm",
            "[[15360, 4096], [15360, 4096], [4096], []]",
            r#"["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "Scalar"]"#,
            r#"["", "", "", "1e-06"]"#,
            314_572_800.0,
            503_324_672.0,
        ),
        // Keys and values are read and written, slots of 8 bytes are read: 4 x 15360 x 1024 x 2 + 15360 x 8.
        case(
            "sglang::store_cache",
            "[[15360, 1024], [15360, 1024], [835874, 1024], [835874, 1024], [15360], [], []]",
            r#"["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "long int", "Scalar", "Scalar"]"#,
            r#"["", "", "", "", "", "2048", "0"]"#,
            0.0,
            125_952_000.0,
        ),
    ]
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 0.02 * b.abs()
}

#[test]
fn flops_and_bytes_are_those_worked_out_by_hand() {
    for Case { name, dims, types, values, flops, bytes } in cases() {
        let inputs = Inputs { name, dims, types, values, ..Inputs::default() };
        let amounts = of_inputs(&inputs).unwrap_or_else(|| panic!("{name} {dims}"));
        assert!(near(amounts.flops.unwrap_or(0.0), flops), "{name}: {:?} FLOP, not {flops}", amounts.flops);
        assert!(near(amounts.bytes.unwrap(), bytes), "{name}: {:?} bytes, not {bytes}", amounts.bytes);
    }
}

/// The same values come out of the report, from a trace with one kernel per operator.
#[test]
fn the_report_shows_what_was_worked_out_by_hand() {
    let mut builder = Builder::new();
    for (i, case) in (0..).zip(cases()) {
        operator(&mut builder, i * 100, case.name, [case.dims, case.types, case.values, ""]);
        builder.launch("kernel", (i * 100 + 10, i * 100 + 20), (i * 1000 + 500, i * 1000 + 900));
    }
    let trace = builder.build();
    let result = roofline(&context(&trace));
    assert_eq!(result.unknown, []);
    for case in cases() {
        let found = result.rows.iter().any(|row| {
            let flops = row.flops.unwrap_or(0.0) / row.calls as f64;
            row.op == case.name && near(flops, case.flops) && near(row.bytes.unwrap() / row.calls as f64, case.bytes)
        });
        assert!(found, "{} {}", case.name, case.dims);
    }
}

/// Adds an operator of 90 ns with dimensions, types, values and strides.
fn operator(builder: &mut Builder, start: i64, name: &str, texts: [&str; 4]) {
    let name = builder.name(name);
    let [dims, types, values, strides] =
        texts.map(|text| if text.is_empty() { StrId::NONE } else { builder.name(text) });
    let row = RangeRow::new(name, 0, start, start + 90);
    builder.trace.ranges.push(RangeRow { source: RangeSource::CpuOp, dims, types, values, strides, ..row });
}

const FLOATS: &str = r#"["float", "float", "float"]"#;

#[test]
fn an_expanded_tensor_is_read_once() {
    let inputs = Inputs {
        name: "aten::copy_",
        dims: "[[8, 4, 8, 128, 64], [8, 4, 8, 128, 64], []]",
        types: FLOATS,
        strides: "[[262144, 65536, 8192, 64, 1], [32768, 8192, 0, 64, 1], []]",
        ..Inputs::default()
    };
    let all = 8.0 * 4.0 * 8.0 * 128.0 * 64.0 * 4.0;
    assert_eq!(of_inputs(&inputs).unwrap().bytes, Some(all + all / 8.0));
}

#[test]
fn types_of_results_follow_those_of_inputs() {
    let bytes =
        |name, dims, types| of_inputs(&Inputs { name, dims, types, ..Inputs::default() }).unwrap().bytes.unwrap();
    // bf16 and fp32 give fp32; integers divided give fp32; a tensor of one number does not widen.
    assert_eq!(bytes("aten::add", "[[10], [10], []]", r#"["c10::BFloat16", "float", "Scalar"]"#), 100.0);
    assert_eq!(bytes("aten::div", "[[10], []]", r#"["long int", "Scalar"]"#), 120.0);
    assert_eq!(bytes("aten::mul", "[[10], []]", r#"["c10::Half", "double"]"#), 48.0);
    assert_eq!(bytes("aten::where", "[[10], [10], []]", r#"["bool", "float", "float"]"#), 10.0 + 40.0 + 4.0 + 40.0);
    // Inputs that do not go together, and types that are not known, tell nothing.
    let of = |name, dims, types| of_inputs(&Inputs { name, dims, types, ..Inputs::default() });
    assert_eq!(of("aten::add", "[[10], [11], []]", FLOATS), None);
    assert_eq!(of("aten::add", "[[10], [10], []]", "").unwrap().bytes, None);
    assert_eq!(of("aten::conv2d", "[[1, 3, 8, 8], [4, 3, 3, 3]]", FLOATS), None, "the result's size is not recorded");
    assert_eq!(of("aten::conv2d", "[[1, 5, 8, 8], [4, 3, 3, 3]]", FLOATS), None);
    assert_eq!(of("aten::where", "[[100, 8]]", r#"["bool"]"#), None, "how many places is not recorded");
    assert_eq!(of("aten::index", "[[100, 8], [[100, 8]]]", FLOATS), None, "a mask chooses an unknown number");
}

#[test]
fn broken_values_tell_nothing_and_do_no_harm() {
    let dims = "[[32, 3, 224, 224], [64, 3, 7, 7], [], [], [], [], []]";
    for values in [
        r#"["", "", "", "[0, 0]", "[3, 3]", "[1, 1]", "1"]"#,
        r#"["", "", "", "[-9223372036854775808, 1]", "[9223372036854775807, 3]", "[9223372036854775807, 1]", "1"]"#,
        r#"["", "", "", "[x", "[]", "[,]", "-1"]"#,
        "[1, 2",
    ] {
        let inputs = Inputs { name: "aten::conv2d", dims, types: FLOATS, values, ..Inputs::default() };
        assert_eq!(of_inputs(&inputs), None, "{values}");
    }
    let huge = "[[18446744073709551615, 18446744073709551615], [18446744073709551615, 18446744073709551615]]";
    for name in
        ["aten::mm", "aten::add", "aten::cat", "aten::embedding", "aten::max_pool2d", "aten::sort", "aten::_softmax"]
    {
        for dims in [huge, "[[], []]", "[[0, 0], [0]]", "[[[]], [[1]]]", "[1, null]", "{}"] {
            let values = r#"["9", "-9", "[-9, 9]"]"#;
            of_inputs(&Inputs { name, dims, types: FLOATS, values, ..Inputs::default() });
        }
    }
}

/// PyTorch of 2021 recorded no values: what comes behind has the dimensions of the result, and the operator around the
/// two gradients those of the tensors.
#[test]
fn without_values_the_operators_around_and_behind_tell() {
    let mut builder = Builder::new();
    let conv = "[[32, 3, 224, 224], [64, 3, 7, 7], [], []]";
    operator(&mut builder, 0, "aten::cudnn_convolution", [conv, FLOATS, "", ""]);
    operator(&mut builder, 100, "aten::empty", ["[[], []]", "", "", ""]);
    operator(&mut builder, 200, "aten::cudnn_batch_norm", ["[[32, 64, 112, 112], [64], [64]]", FLOATS, "", ""]);
    let around = "[[32, 512, 7, 7], [32, 2048, 7, 7], [2048, 512, 1, 1]]";
    operator(&mut builder, 300, "aten::cudnn_convolution_backward", [around, FLOATS, "", ""]);
    let (gradient, own) = ("aten::cudnn_convolution_backward_weight", "[[], [32, 2048, 7, 7], [32, 512, 7, 7]]");
    let types = r#"["GenericList", "float", "float"]"#;
    operator(&mut builder, 310, gradient, [own, types, "", ""]);
    *builder.trace.ranges.end.last_mut().unwrap() = 380;
    builder.launch("implicit_convolve_sgemm", (10, 20), (500, 600));
    builder.launch("wgrad", (320, 330), (600, 700));
    let trace = builder.build();
    let result = roofline(&context(&trace));
    let row = |name: &str| result.rows.iter().find(|row| row.op == name).unwrap();
    let forward = row("aten::cudnn_convolution");
    assert!(near(forward.flops.unwrap(), 7_552_892_928.0) && near(forward.bytes.unwrap(), 122_065_664.0));
    let size = [112, 112, 0];
    let shape = Shape::Convolution { batch: 32, inputs: 3, outputs: 64, size, kernel: [7, 7, 0], groups: 1 };
    assert_eq!(forward.shape, shape);
    assert_eq!(shape.to_string(), "32 of 3 to 64 channels, 112x112, kernel 7x7");
    let weights = row(gradient);
    assert!(near(weights.flops.unwrap(), 3_288_334_336.0) && near(weights.bytes.unwrap(), 20_250_624.0));
    assert_eq!(result.rows.len(), 2);
}

#[test]
fn helpers_inside_an_operator_count_apart_and_leave_it_its_own() {
    let mut builder = Builder::new();
    let dims = "[[16, 128, 28, 28], [16, 128, 28, 28], [128, 128, 3, 3], [], [], [], [], [], [], [], []]";
    operator(&mut builder, 0, "aten::convolution_backward", [dims, FLOATS, "", ""]);
    operator(&mut builder, 10, "aten::zero_", ["[[16, 128, 28, 28]]", r#"["float"]"#, "", ""]);
    *builder.trace.ranges.end.last_mut().unwrap() = 40;
    builder.launch("fill", (20, 30), (100, 200));
    builder.launch("dgrad", (50, 55), (200, 1200)).launch("wgrad", (60, 65), (1200, 2200));
    let trace = builder.build();
    let result = roofline(&context(&trace));
    let times: Vec<_> = result.rows.iter().map(|row| (row.op.as_str(), row.calls, row.time_ns)).collect();
    assert_eq!(times, [("aten::convolution_backward", 1, 2000), ("aten::zero_", 1, 100)]);
}

/// One elementwise op of so many elements, with the least time it can take.
fn one(device: &str, operator_name: &str, kernel: &str, dims: &str, ns: i64) -> Roofline {
    let mut builder = Builder::new();
    builder.trace.devices[0].name = device.to_owned();
    operator(&mut builder, 0, operator_name, [dims, FLOATS, "", ""]);
    builder.launch(kernel, (10, 20), (1000, 1000 + ns));
    let trace = builder.build();
    roofline(&context(&trace))
}

#[test]
fn what_is_over_the_roof_is_explained_or_called_wrong() {
    let beyond = |device, name, kernel, dims, ns| one(device, name, kernel, dims, ns).rows[0].beyond;
    // 8 MB at 4.8 TB/s take 1.75 us.
    let small = "[[1048576]]";
    assert_eq!(beyond("NVIDIA H200", "aten::neg", "neg", small, 2_000), None);
    assert_eq!(beyond("NVIDIA H200", "aten::neg", "neg", small, 1_000), Some(Beyond::FitsInCache));
    // 80 MB, of which 50 MiB can come from the cache: 16.7 us, and 5.8 us for the rest.
    let larger = "[[10000000]]";
    assert_eq!(beyond("NVIDIA H200", "aten::neg", "neg", larger, 10_000), Some(Beyond::PartlyInCache));
    assert_eq!(beyond("NVIDIA H200", "aten::neg", "neg", larger, 4_000), Some(Beyond::Wrong));
    assert_eq!(beyond("NVIDIA GH200 480GB", "aten::neg", "neg", small, 1_000), Some(Beyond::CacheNotKnown));
    assert_eq!(beyond("", "aten::neg", "neg", small, 1_000), None, "no roof");
    // 2 x 4096^3 operations in 1 ms are 137 TFLOP/s.
    let square = "[[4096, 4096], [4096, 4096]]";
    assert_eq!(beyond("NVIDIA H200", "aten::mm", "sgemm", square, 1_000_000), Some(Beyond::Wrong));
    let conv = "[[32, 256, 14, 14], [32, 256, 14, 14], [256, 256, 3, 3]]";
    let name = "aten::convolution_backward";
    assert_eq!(beyond("NVIDIA V100", name, "winograd_128x128", conv, 600_000), Some(Beyond::FewerOperations));
    assert_eq!(beyond("NVIDIA V100", name, "dgrad_engine", conv, 600_000), Some(Beyond::Wrong));
}

#[test]
fn lists_of_tensors_take_their_type_from_the_kernel() {
    let mut builder = Builder::new();
    let lists = "[[[1000], [24]], [[1000], [24]], [[1000], [24]], [[1000], [24]]]";
    let types = r#"["TensorList", "TensorList", "TensorList", "TensorList"]"#;
    operator(&mut builder, 0, "aten::_fused_adamw_", [lists, types, "", ""]);
    let adam = "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>()";
    builder.launch(adam, (10, 20), (1000, 2000));
    operator(&mut builder, 100, "aten::cat", ["[[[1000], [24]], []]", r#"["TensorList", "Scalar"]"#, "", ""]);
    builder.launch("CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4>", (110, 120), (3000, 4000));
    let trace = builder.build();
    let result = roofline(&context(&trace));
    let bytes = |name: &str| result.rows.iter().find(|row| row.op == name).unwrap().bytes;
    // Four lists are read, three written.
    assert_eq!(bytes("aten::_fused_adamw_"), Some(7.0 * 1024.0 * 4.0));
    assert_eq!(bytes("aten::cat"), Some(2.0 * 1024.0 * 2.0));
}

#[test]
fn most_of_a_training_step_has_amounts_and_no_row_is_over_the_roof_unexplained() {
    let Some(data) = real_data() else { return };
    for file in ["train_loader_kept.json.gz", "train_loader_stripped.json.gz"] {
        let trace = read(&[data.join("truth").join(file)]);
        let result = roofline(&context(&trace));
        let share = result.known_ns as f64 / result.total_ns as f64;
        assert!(share > 0.95, "{file}: {share}");
        let row = |name: &str| result.rows.iter().find(|row| row.op == name).unwrap();
        assert!((0.85..0.95).contains(&row("aten::clamp_min").share().unwrap()));
        let wrong: Vec<_> = result.rows.iter().filter(|row| row.beyond == Some(Beyond::Wrong)).collect();
        assert!(wrong.is_empty(), "{file}: {wrong:#?}");
        assert!(result.rows.iter().all(|row| row.share().is_none_or(|share| share <= 1.0) || row.beyond.is_some()));
    }
}
