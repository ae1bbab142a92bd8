//! What is recorded of ops' costs, on both devices, against goldens: a prefill, a mixed and a decode step of each model and
//! type. `STROBE_RECORD_GOLDENS=1 cargo test -p strobe-engine --test costs` records them again.
//!
//! A line is an op of some layers: how many, `m n k`, FLOPs and bytes. Where the op ran in another way than the model's list
//! has it, or not at all, the costs by the list and the way follow. The GPU is a driver that computes nothing
//! (`cli/tests/hollow_gpu`): it chooses the first kernel that fits, as all take the same time there.

mod common;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Heard, Random, build, fixture, greedy, load, model_name, run_windows, scratch};
use strobe_engine::cuda::CudaDevice;
use strobe_engine::device::Device;
use strobe_engine::recorder::Recording;
use strobe_engine::{BuildConfig, EngineOptions, KvCacheType, LoadedModel, ModelRef, Quantization};
use strobe_kernels_cpu::{Cpu, QuantRows, Tier};
use strobe_model::DType;
use strobe_model::program::{Cost, MatrixType, Node, OpKind, Ran, SpanShape, StepShape, program};

/// A model and how it is built.
struct Case {
    name: &'static str,
    model: &'static str,
    build: BuildConfig,
}

fn case(name: &'static str, model: &'static str, dtype: DType, change: impl Fn(&mut BuildConfig)) -> Case {
    let mut build = build(dtype);
    change(&mut build);
    Case { name, model, build }
}

fn as_is(_: &mut BuildConfig) {}

fn int8(build: &mut BuildConfig) {
    build.quantization = Quantization::Int8;
}

fn int4(build: &mut BuildConfig) {
    build.quantization = Quantization::Int4;
}

fn fp8(build: &mut BuildConfig) {
    (build.quantization, build.kv_cache) = (Quantization::Fp8, KvCacheType::Fp8);
}

fn unfused(build: &mut BuildConfig) {
    build.context_fmha = false;
}

fn cpu_cases() -> Vec<Case> {
    vec![
        case("micro-float32", "micro", DType::F32, as_is),
        case("micro-float32-unfused", "micro", DType::F32, unfused),
        case("micro-bfloat16", "micro", DType::Bf16, as_is),
        case("micro-int8", "micro", DType::Bf16, int8),
        case("micro-int4", "micro", DType::Bf16, int4),
        case("moe-tiny-float32", "moe-tiny", DType::F32, as_is),
        case("moe-tiny-int8", "moe-tiny", DType::F32, int8),
        case("gpt-oss-tiny-bfloat16", "gpt-oss-tiny", DType::Bf16, as_is),
        case("deepseek-tiny-bfloat16", "deepseek-tiny", DType::Bf16, as_is),
        case("deepseek-tiny-int8", "deepseek-tiny", DType::Bf16, int8),
    ]
}

/// Weights of any size cost nothing here.
fn gpu_cases() -> Vec<Case> {
    vec![
        case("micro-float32", "micro", DType::F32, as_is),
        case("micro-float16-unfused", "micro", DType::F16, unfused),
        case("tinyllama-1.1b-bfloat16", "tinyllama-1.1b", DType::Bf16, as_is),
        case("tinyllama-1.1b-fp8", "tinyllama-1.1b", DType::Bf16, fp8),
        case("qwen3-0.6b-fp8", "qwen3-0.6b", DType::Bf16, fp8),
        case("moe-tiny-bfloat16", "moe-tiny", DType::Bf16, as_is),
        case("gpt-oss-tiny-bfloat16", "gpt-oss-tiny", DType::Bf16, as_is),
        case("deepseek-tiny-bfloat16", "deepseek-tiny", DType::Bf16, as_is),
    ]
}

/// The steps of two requests of 20 and 33 tokens of which 40 fit into a step: both prompts, the second cut to whole blocks;
/// its rest beside the first request's output; the output of both.
fn steps() -> [(&'static str, Vec<SpanShape>, u64); 3] {
    let span = |rows, keys, context| SpanShape { rows, keys, context };
    [
        ("prefill", vec![span(20, 20, true), span(16, 16, true)], 1),
        ("mixed", vec![span(17, 33, true), span(1, 21, false)], 2),
        ("decode", vec![span(1, 22, false), span(1, 34, false)], 2),
    ]
}

fn run(device: impl Into<Device>, model: &LoadedModel) -> Heard {
    let mut random = Random(4);
    let requests = vec![greedy(0, random.tokens(20, 64), 8), greedy(1, random.tokens(33, 64), 8)];
    let options = EngineOptions { max_num_tokens: Some(40), max_batch_size: Some(4), ..EngineOptions::default() };
    run_windows(device, model, options, requests, "0-2")
}

/// The text of a golden. Experts are counted as if all that can be were used: how many are is not the list's business.
fn describe(model: &LoadedModel, on_gpu: bool, heard: &Heard) -> String {
    let (config, build) = (&model.config.model, &model.config.build);
    let operands = if on_gpu { build.gpu_operands(config) } else { build.cpu_operands() };
    let tier = (!on_gpu).then(Tier::detect);
    let nodes = program(config, build.program_options(tier));
    let recording: &Recording = heard.recordings().next().unwrap();
    let mut text = String::new();
    for ((name, spans, sampled), iteration) in steps().into_iter().zip(0..) {
        let tokens = spans.iter().map(|span| span.rows).sum();
        let step = StepShape { spans: &spans, tokens, sampled, operands, experts_used: &[] };
        writeln!(text, "{name}: {tokens} rows").unwrap();
        let ran: Vec<(u32, Ran, Cost)> = recording
            .ops
            .iter()
            .filter(|op| op.iteration == iteration)
            .map(|op| {
                let node = &nodes[op.node as usize];
                let cost = node.cost(config, &step, op.ran);
                // What is recorded is the list's cost of what ran.
                if !matches!(node.kind, OpKind::ExpertLinear { .. }) {
                    assert_eq!(op.cost, cost, "{} of the {name} step", node.name);
                }
                assert_eq!(op.cost.shape, cost.shape, "{} of the {name} step", node.name);
                (op.node, op.ran, cost)
            })
            .collect();
        let mut lines: Vec<(String, usize)> = Vec::new();
        for (index, node) in nodes.iter().enumerate().filter(|(_, node)| node.rows(&step) > 0) {
            let found = ran.iter().find(|(node, ..)| *node as usize == index).map(|(_, ran, cost)| (*ran, *cost));
            let line = line_of(node, found, node.cost(config, &step, Ran::default()));
            match lines.iter_mut().find(|(known, _)| *known == line) {
                Some((_, count)) => *count += 1,
                None => lines.push((line, 1)),
            }
        }
        for (line, count) in lines {
            writeln!(text, "{count:>4} {line}").unwrap();
        }
        let bytes: u64 = ran.iter().map(|(_, _, cost)| cost.bytes).sum();
        let listed: u64 = nodes.iter().map(|node| node.cost(config, &step, Ran::default()).bytes).sum();
        writeln!(text, "     all bytes {bytes}, by the list {listed}\n").unwrap();
    }
    text
}

fn line_of(node: &Node, found: Option<(Ran, Cost)>, listed: Cost) -> String {
    let Some((ran, cost)) = found else {
        return format!("{:16} not launched; by the list {} {}", node.name, listed.flops, listed.bytes);
    };
    let shape = cost.shape.map(|size| size.to_string()).join(" ");
    let mut line = format!("{:16} {shape:18} {:>12} {:>11}", node.name, cost.flops, cost.bytes);
    if (cost.flops, cost.bytes) != (listed.flops, listed.bytes) {
        let Ran { input, output, pass } = ran;
        let alone = Ran::default();
        let ways = [
            (input != alone.input).then(|| format!("from {input:?}")),
            (output != alone.output).then(|| format!("to {output:?}")),
            (pass != alone.pass).then(|| format!("then {pass:?}")),
        ];
        let ways: Vec<_> = ways.into_iter().flatten().collect();
        write!(line, "; by the list {} {}: {}", listed.flops, listed.bytes, ways.join(", ")).unwrap();
    }
    line
}

fn golden(device: &str, case: &Case) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/costs");
    directory.join(format!("{device}-{}.txt", case.name))
}

fn check(device: &str, case: &Case, text: &str) {
    let path = golden(device, case);
    if std::env::var_os("STROBE_RECORD_GOLDENS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    for (number, (found, expected)) in text.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "{}:{}", path.display(), number + 1);
    }
    assert_eq!(text.lines().count(), expected.lines().count(), "{}", path.display());
}

#[test]
fn costs_on_a_cpu_are_those_of_what_ran() {
    if Tier::detect() == Tier::Scalar {
        eprintln!("skipped: the scalar tier has another list of ops than the goldens");
        return;
    }
    for case in cpu_cases() {
        let model = load(case.model, case.build.clone());
        let heard = run(Cpu::new(Tier::detect(), 2), &model);
        check("cpu", &case, &describe(&model, false, &heard));
    }
}

#[test]
fn rows_of_codes_take_the_bytes_they_take() {
    for (rows, width) in [(1, 1), (3, 256), (7, 300)] {
        assert_eq!(MatrixType::Int8Rows.bytes(rows as u64, width as u64), QuantRows::bytes_of(rows, width) as u64);
    }
}

/// Which case the process is to run, and where it is to write what it found.
const CHILD: (&str, &str) = ("STROBE_COSTS_CASE", "STROBE_COSTS_FILE");

#[test]
fn costs_on_a_gpu_are_those_of_what_was_launched() {
    if let (Ok(name), Some(file)) = (std::env::var(CHILD.0), std::env::var_os(CHILD.1)) {
        // The child, which has the hollow driver on its path.
        let cases = gpu_cases();
        let case = cases.iter().find(|case| case.name == name).unwrap();
        let model = ModelRef::open(&model_name(case.model), 7).unwrap();
        let config = model.engine_config(BuildConfig { gemm_plugin: false, ..case.build.clone() }).unwrap();
        let model = LoadedModel::deferred(model, config);
        let heard = run(CudaDevice::new(0), &model);
        std::fs::write(file, describe(&model, true, &heard)).unwrap();
        return;
    }
    let directory = scratch("hollow-costs");
    let library = |source: &str, name: &str| {
        let source = fixture("../../../cli/tests/hollow_gpu").join(source);
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-w", "-o"]).arg(directory.join(name)).arg(source);
        assert!(cc.status().expect("Rust links with cc").success(), "{cc:?}");
    };
    library("driver.c", "libcuda.so.1");
    library("compiler.c", "libnvrtc.so.13");
    for case in gpu_cases() {
        let file = directory.join("found.txt");
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "costs_on_a_gpu_are_those_of_what_was_launched", "--nocapture"]);
        child.env(CHILD.0, case.name).env(CHILD.1, &file);
        child.env("LD_LIBRARY_PATH", &directory).env("STROBE_CACHE_DIR", directory.join("cache"));
        let done = child.output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{}: {said}", case.name);
        check("gpu", &case, &std::fs::read_to_string(&file).unwrap());
    }
}
