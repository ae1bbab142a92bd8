//! Products of few rows: all of a TinyLlama step's weights in one graph, 22 layers with weights of their own, so that no
//! cache holds them. Then each layer's products alone, and the ways to fetch ahead.

use strobe_kernels_cuda::{
    CudaError, DeviceBuffer, DevicePtr, Gpu, Precision, RowOps, Skinny, SkinnyArgs, SkinnyInput, SkinnyOutput,
    SkinnyTuning, WeightOps,
};

use crate::graph_microseconds;

const LAYERS: usize = 22;
const HIDDEN: usize = 2048;
const INTER: usize = 5632;
const VOCABULARY: usize = 32000;
const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const PRECISION: Precision = Precision::Bf16;

/// Name, n, k, and whether a norm comes first.
const PRODUCTS: [(&str, usize, usize, bool); 5] = [
    ("qkv", 2560, HIDDEN, true),
    ("o", HIDDEN, HIDDEN, false),
    ("gate_up", 2 * INTER, HIDDEN, true),
    ("down", HIDDEN, INTER, false),
    ("lm_head", VOCABULARY, HIDDEN, true),
];

struct Bench<'a> {
    gpu: &'a Gpu,
    skinny: Skinny,
    rows: RowOps,
    weights: DeviceBuffer,
    scales: DeviceBuffer,
    hidden: DeviceBuffer,
    norm: DeviceBuffer,
    x: DeviceBuffer,
    act: DeviceBuffer,
    qkv: DeviceBuffer,
    logits: DeviceBuffer,
    fp8: bool,
}

impl Bench<'_> {
    fn weight_bytes(&self, product: usize) -> usize {
        let (_, n, k, _) = PRODUCTS[product];
        n * k * if self.fp8 { 1 } else { 2 }
    }

    /// Bytes of all weights of a step.
    fn step_bytes(&self) -> usize {
        LAYERS * self.layer_bytes() + self.weight_bytes(4)
    }

    fn layer_bytes(&self) -> usize {
        (0..4).map(|product| self.weight_bytes(product)).sum()
    }

    /// One product with the weights at `w`, and a norm of its own in front where it can't be folded in.
    fn product(&self, product: usize, w: DevicePtr, m: usize) -> Result<(), CudaError> {
        let (_, n, k, norm) = PRODUCTS[product];
        let (hidden, weight, eps) = (self.hidden.ptr(), self.norm.ptr(), 1e-5);
        let out = match product {
            0 => SkinnyOutput::Store(self.qkv.ptr()),
            1 | 3 => SkinnyOutput::AddResidual(hidden),
            2 => SkinnyOutput::SiluMul(self.act.ptr()),
            _ => SkinnyOutput::StoreF32(self.logits.ptr()),
        };
        let plain = if product == 3 { self.act.ptr() } else { self.x.ptr() };
        let w_scales = self.fp8.then_some(self.scales.ptr());
        let mut args = SkinnyArgs { input: SkinnyInput::Plain(plain), w, w_scales, bias: None, out, m, n, k };
        if norm {
            args.input = SkinnyInput::Norm { hidden, weight, eps };
            if !self.skinny.supports(&args, PRECISION) {
                self.rows.rms_norm(self.gpu, hidden, weight, eps, plain, m, k)?;
                args.input = SkinnyInput::Plain(plain);
            }
        }
        self.skinny.run(self.gpu, &args, PRECISION)
    }

    /// Every product of a step.
    fn step(&self, m: usize) -> Result<(), CudaError> {
        let mut w = self.weights.ptr();
        for _ in 0..LAYERS {
            for product in 0..4 {
                self.product(product, w, m)?;
                w += self.weight_bytes(product) as u64;
            }
        }
        self.product(4, w, m)
    }

    fn step_milliseconds(&self, m: usize) -> Result<f64, CudaError> {
        Ok(graph_microseconds(self.gpu, 1, |_| self.step(m))? / 1e3)
    }

    /// Microseconds of one product, its weights taken from all over memory.
    fn product_microseconds(&self, product: usize, m: usize) -> Result<f64, CudaError> {
        let bytes = self.weight_bytes(product);
        let places = self.weights.bytes() / bytes;
        graph_microseconds(self.gpu, 2 * LAYERS, |turn| {
            self.product(product, self.weights.ptr() + (turn * 7 % places * bytes) as u64, m)
        })
    }

    fn with(&mut self, tuning: SkinnyTuning) -> &Self {
        self.skinny.tuning = tuning;
        self
    }
}

pub fn run(gpu: &Gpu) -> Result<(), CudaError> {
    let step_bytes = 2 * (LAYERS * (2560 + HIDDEN + 2 * INTER + INTER) * HIDDEN + VOCABULARY * HIDDEN);
    let most = ROWS[ROWS.len() - 1];
    let buffer = |bytes: usize| DeviceBuffer::new(bytes, "a benchmark");
    let mut bench = Bench {
        gpu,
        skinny: Skinny::new(gpu)?,
        rows: RowOps::new(gpu, PRECISION)?,
        weights: buffer(step_bytes)?,
        scales: buffer(VOCABULARY * 4)?,
        hidden: buffer(most * HIDDEN * 4)?,
        norm: buffer(HIDDEN * 4)?,
        x: buffer(most * HIDDEN * 2)?,
        act: buffer(most * INTER * 2)?,
        qkv: buffer(most * 2560 * 2)?,
        logits: buffer(most * VOCABULARY * 4)?,
        fp8: false,
    };
    let random = WeightOps::new(gpu, PRECISION)?;
    random.random_normal(gpu, bench.weights.ptr(), PRECISION, 1, 0, step_bytes as u64 / 2, 0.02)?;
    for (key, floats) in [&bench.hidden, &bench.norm, &bench.scales].into_iter().enumerate() {
        let count = floats.bytes() as u64 / 4;
        random.random_normal(gpu, floats.ptr(), Precision::F32, key as u64 + 2, 0, count, 0.1)?;
    }
    random.random_normal(gpu, bench.x.ptr(), PRECISION, 9, 0, (most * HIDDEN) as u64, 1.0)?;
    random.random_normal(gpu, bench.act.ptr(), PRECISION, 10, 0, (most * INTER) as u64, 1.0)?;
    gpu.synchronize()?;

    for fp8 in [false, true] {
        bench.fp8 = fp8;
        steps(&mut bench)?;
        products(&mut bench)?;
    }
    bench.fp8 = false;
    ways_of_streaming(&mut bench)?;
    ways_of_tiles(&mut bench)
}

fn steps(bench: &mut Bench) -> Result<(), CudaError> {
    let kind = if bench.fp8 { "fp8" } else { "bf16" };
    println!("\nAll products of a step, {kind} weights, {:.2} GB", bench.step_bytes() as f64 / 1e9);
    println!("| m | ms | weights GB/s | ms without overlap |\n|---|---|---|---|");
    for m in ROWS {
        let alone = bench.with(SkinnyTuning { overlap: false, ..SkinnyTuning::default() }).step_milliseconds(m)?;
        let ms = bench.with(SkinnyTuning::default()).step_milliseconds(m)?;
        println!("| {m} | {ms:.3} | {:.0} | {alone:.3} |", bench.step_bytes() as f64 / ms / 1e6);
    }
    Ok(())
}

fn products(bench: &mut Bench) -> Result<(), CudaError> {
    println!("\nEach product many times, with its norm: us (weights GB/s)");
    println!("| m |{}\n|---|{}", PRODUCTS.map(|p| format!(" {} |", p.0)).concat(), "---|".repeat(PRODUCTS.len()));
    for m in ROWS {
        let mut line = format!("| {m} |");
        for product in 0..PRODUCTS.len() {
            let us = bench.product_microseconds(product, m)?;
            line += &format!(" {us:.2} ({:.0}) |", bench.weight_bytes(product) as f64 / us / 1e3);
        }
        println!("{line}");
    }
    Ok(())
}

/// How far to fetch ahead into L2, and when to let the next kernel begin.
fn ways_of_streaming(bench: &mut Bench) -> Result<(), CudaError> {
    println!("\nms of a step by pieces fetched ahead into L2 and pieces left when the next kernel may begin");
    println!("| m | L2 pieces | 0 left | 1 left | 2 left | from the start |\n|---|---|---|---|---|---|");
    for m in [1, 8] {
        for l2_ahead in [0, 1, 2, 4, 8, 100] {
            let mut line = format!("| {m} | {l2_ahead} |");
            for early in [0, 1, 2, 10_000] {
                let tuning = SkinnyTuning { l2_ahead, early, ..SkinnyTuning::default() };
                line += &format!(" {:.4} |", bench.with(tuning).step_milliseconds(m)?);
            }
            println!("{line}");
        }
    }
    bench.with(SkinnyTuning::default());
    Ok(())
}

/// How many blocks share k, and how many slots a ring has.
fn ways_of_tiles(bench: &mut Bench) -> Result<(), CudaError> {
    println!("\nus of a product by blocks that share k, with 4 / 6 / 8 slots");
    println!("| m | product | chosen | 1 | 2 | 4 | 8 |\n|---|---|---|---|---|---|---|");
    let clusters: &[usize] = if bench.gpu.arch().number() >= 90 { &[0, 1, 2, 4, 8] } else { &[0, 1] };
    for m in [32, 64] {
        for (product, (name, ..)) in PRODUCTS.iter().enumerate() {
            let mut line = format!("| {m} | {name} |");
            for &cluster in clusters {
                let mut times = Vec::new();
                for stages in [4, 6, 8] {
                    let tuning = SkinnyTuning { cluster, stages, ..SkinnyTuning::default() };
                    times.push(format!("{:.2}", bench.with(tuning).product_microseconds(product, m)?));
                }
                line += &format!(" {} |", times.join(" / "));
            }
            println!("{line}");
        }
    }
    bench.with(SkinnyTuning::default());
    Ok(())
}
