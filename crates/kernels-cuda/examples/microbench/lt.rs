//! Linear layers: every algorithm of cuBLASLt on the shapes of TinyLlama, then the whole tuning of that model.

use std::time::Instant;

use strobe_kernels_cuda::{
    CudaError, DeviceBuffer, Epilogue, GemmPlugin, Gpu, Linear, LinearShape, LinearSite, Lt, LtArgs, LtInput, LtShape,
    Precision, Weights, tune,
};

use crate::graph_microseconds;

/// Name, n, k, what becomes of it, whether a norm comes first.
const SHAPES: [(&str, usize, usize, Epilogue, bool); 5] = [
    ("qkv", 2560, 2048, Epilogue::Store, true),
    ("o", 2048, 2048, Epilogue::AddResidual, false),
    ("gate_up", 11264, 2048, Epilogue::SiluMul, true),
    ("down", 2048, 5632, Epilogue::AddResidual, false),
    ("lm_head", 32000, 2048, Epilogue::StoreF32, true),
];

pub(crate) fn run(gpu: &Gpu) -> Result<(), CudaError> {
    algorithms(gpu, LtInput::Same(Precision::Bf16), 2)?;
    if gpu.arch().number() >= 90 {
        algorithms(gpu, LtInput::Fp8RowScales, 1)?;
    }
    for plugin in [GemmPlugin::Auto, GemmPlugin::Disable] {
        for weights in [Weights::Same, Weights::Fp8] {
            if weights == Weights::Same || gpu.arch().number() >= 89 {
                whole_model(gpu, plugin, weights)?;
            }
        }
    }
    Ok(())
}

/// The library alone: its favourite against its best.
fn algorithms(gpu: &Gpu, input: LtInput, element: usize) -> Result<(), CudaError> {
    let lt = Lt::new(gpu)?;
    println!("\ncuBLASLt {}, {input:?}, best of its algorithms", lt.version());
    println!(
        "| layer | m | algorithms | favourite us | best us | TFLOP/s | weights GB/s |\n|---|---|---|---|---|---|---|"
    );
    let pool = DeviceBuffer::new(512 << 20, "weights")?;
    let x = DeviceBuffer::new(2048 * 5632 * element, "input")?;
    let out = DeviceBuffer::new(2048 * 32000 * 4, "output")?;
    let scales = DeviceBuffer::new(32000 * 4, "scales")?;
    // Either sign and magnitudes below two, in every type. Not all the same: that would draw less power.
    let mut random = 1u32;
    let mut byte = || {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 24) as u8 & 0x8f | 0x30
    };
    let pattern: Vec<u8> = (0..1 << 20).map(|_| byte()).collect();
    for buffer in [&pool, &x, &scales] {
        for start in (0..buffer.bytes()).step_by(pattern.len()) {
            buffer.write(start, &pattern[..pattern.len().min(buffer.bytes() - start)])?;
        }
    }
    out.fill(0)?;
    for (name, n, k, epilogue, _) in SHAPES {
        let accumulate = epilogue == Epilogue::AddResidual;
        let f32_out = accumulate || epilogue == Epilogue::StoreF32;
        let output = if f32_out { Precision::F32 } else { Precision::Bf16 };
        let shape = LtShape { n, k, input, output, accumulate };
        for m in [1, 16, 64, 256, 1024, 2048] {
            let stride = (n * k * element).next_multiple_of(1024);
            let places = pool.bytes() / stride;
            let mut times = Vec::new();
            let found = lt.algorithms(&shape, m, 16)?;
            for algorithm in &found {
                times.push(graph_microseconds(gpu, 20, |turn| {
                    let args = LtArgs {
                        x: x.ptr(),
                        x_scales: scales.ptr(),
                        w: pool.ptr() + (turn % places * stride) as u64,
                        w_scales: scales.ptr(),
                        out: out.ptr(),
                        m,
                    };
                    // SAFETY: operands and results were made for the largest product, and live until the times are taken.
                    unsafe { lt.run(gpu, &shape, &args, Some(*algorithm)) }
                })?);
            }
            let Some(best) = times.iter().copied().reduce(f64::min) else {
                println!("| {name} | {m} | 0 | - | - | - | - |");
                continue;
            };
            let tflops = 2.0 * (m * n * k) as f64 / best / 1e6;
            let rate = (n * k * element) as f64 / best / 1e3;
            println!("| {name} | {m} | {} | {:.2} | {best:.2} | {tflops:.0} | {rate:.0} |", times.len(), times[0]);
        }
    }
    Ok(())
}

/// What `strobe build` does: how long it takes, and what wins.
fn whole_model(gpu: &Gpu, plugin: GemmPlugin, weights: Weights) -> Result<(), CudaError> {
    let mut linear = Linear::new(gpu, Precision::Bf16, plugin)?;
    let site = |(name, n, k, epilogue, norm)| LinearSite {
        shape: LinearShape { n, k, epilogue, weights, bias: false, norm },
        max_rows: if name == "lm_head" { 2048 } else { 8192 },
    };
    let begin = Instant::now();
    let tuned = tune(gpu, &mut linear, &SHAPES.map(site), None, || true)?;
    let seconds = begin.elapsed().as_secs_f64();
    println!("\n--gemm-plugin {}, weights {weights:?}: {} choices in {seconds:.1} s", plugin.name(), tuned.measured);
    println!("| layer | rows | us | TFLOP/s | weights GB/s | winner and next best |\n|---|---|---|---|---|---|");
    for choice in &tuned.choices.choices {
        let name = SHAPES.iter().find(|s| (s.1, s.2) == (choice.shape.n, choice.shape.k)).map_or("?", |s| s.0);
        // The best of each kind of kernel, so that what lost is seen too.
        let mut shown: Vec<(&str, String)> = Vec::new();
        for timing in &choice.candidates {
            let kind = timing.kernel.split(' ').next().unwrap_or("");
            if shown.iter().all(|(seen, _)| *seen != kind) {
                shown.push((kind, format!("{} {:.2}", timing.kernel, timing.microseconds)));
            }
        }
        let shown: Vec<String> = shown.into_iter().map(|(_, text)| text).collect();
        println!(
            "| {name} | {} | {:.2} | {:.0} | {:.0} | {} |",
            choice.rows,
            choice.microseconds,
            choice.tflops,
            choice.weight_gb_per_s,
            shown.join(", ")
        );
    }
    for note in &tuned.notes {
        println!("{note}");
    }
    Ok(())
}
