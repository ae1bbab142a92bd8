//! Products of few rows: all of a TinyLlama step's weights in one graph, 22 layers with weights of their own, so that no
//! cache holds them. Then each layer's products alone, and the ways to fetch ahead.

use strobe_kernels_cuda::{
    CudaError, DeviceBuffer, DevicePtr, Gpu, Precision, Skinny, SkinnyArgs, SkinnyInput, SkinnyOutput, SkinnyTuning,
    WeightOps,
};

use crate::graph_microseconds;

const LAYERS: usize = 22;
const HIDDEN: usize = 2048;
const INTER: usize = 5632;
const VOCABULARY: usize = 32000;
const ROWS: [usize; 5] = [1, 2, 4, 8, 16];
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

    /// One product with the weights at `w`.
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
        let input = if norm { SkinnyInput::Norm { hidden, weight, eps } } else { SkinnyInput::Plain(plain) };
        let args = SkinnyArgs { input, w, w_scales, bias: None, out, m, n, k };
        // SAFETY: all of it was made for the most rows, and lives until the times are taken.
        unsafe { self.skinny.run(self.gpu, &args, PRECISION) }
    }

    /// Every product of a step.
    fn step(&self, m: usize) -> Result<(), CudaError> {
        let mut w = self.weights.ptr();
        for product in (0..4 * LAYERS).map(|i| i % 4).chain([4]) {
            self.product(product, w, m)?;
            w += self.weight_bytes(product) as u64;
        }
        Ok(())
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

pub(crate) fn run(gpu: &Gpu) -> Result<(), CudaError> {
    let step_bytes = 2 * (LAYERS * (2560 + HIDDEN + 2 * INTER + INTER) * HIDDEN + VOCABULARY * HIDDEN);
    let most = ROWS[ROWS.len() - 1];
    let buffer = |bytes: usize| DeviceBuffer::new(bytes, "a benchmark");
    let mut bench = Bench {
        gpu,
        skinny: Skinny::new(gpu)?,
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
    // SAFETY: all of it was made for the most rows, and lives until the times are taken.
    unsafe { random.random_normal(gpu, bench.weights.ptr(), PRECISION, 1, 0, step_bytes as u64 / 2, 0.02) }?;
    for (key, floats) in [&bench.hidden, &bench.norm, &bench.scales].into_iter().enumerate() {
        let count = floats.bytes() as u64 / 4;
        // SAFETY: all of it was made for the most rows, and lives until the times are taken.
        unsafe { random.random_normal(gpu, floats.ptr(), Precision::F32, key as u64 + 2, 0, count, 0.1) }?;
    }
    // SAFETY: all of it was made for the most rows, and lives until the times are taken.
    unsafe {
        random.random_normal(gpu, bench.x.ptr(), PRECISION, 9, 0, (most * HIDDEN) as u64, 1.0)?;
        random.random_normal(gpu, bench.act.ptr(), PRECISION, 10, 0, (most * INTER) as u64, 1.0)?;
    }
    gpu.synchronize()?;

    for fp8 in [false, true] {
        bench.fp8 = fp8;
        steps(&mut bench)?;
        products(&mut bench)?;
    }
    bench.fp8 = false;
    ways_of_fetching(&mut bench)
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

/// How many blocks and slots, and how far to fetch ahead into L2.
fn ways_of_fetching(bench: &mut Bench) -> Result<(), CudaError> {
    let default = SkinnyTuning::default();
    println!("\nms of a step by slots of a warp and groups of a block (0: one block per multiprocessor)");
    println!("| m | slots | 0 | 1 | 2 | 4 |\n|---|---|---|---|---|---|");
    for m in [1, 8] {
        for slots in [2, 3, 4, 6] {
            let mut line = format!("| {m} | {slots} |");
            for groups in [0, 1, 2, 4] {
                let tuning = SkinnyTuning { slots, groups, ..default };
                line += &format!(" {:.4} |", bench.with(tuning).step_milliseconds(m)?);
            }
            println!("{line}");
        }
    }
    println!("\nms of a step by KiB of its own weights that a block fetches ahead");
    println!("| m | groups | 0 | 32 | 128 | 512 |\n|---|---|---|---|---|---|");
    for (m, groups) in [(1, 0), (1, 1), (8, 0)] {
        let mut line = format!("| {m} | {groups} |");
        for ahead in [0, 32, 128, 512] {
            let tuning = SkinnyTuning { ahead: ahead << 10, groups, ..default };
            line += &format!(" {:.4} |", bench.with(tuning).step_milliseconds(m)?);
        }
        println!("{line}");
    }
    println!("\nus of a product of one row (weights GB/s) by groups of a block, slots and KiB fetched ahead");
    println!("| groups | slots | KiB |{}", PRODUCTS.map(|p| format!(" {} |", p.0)).concat());
    println!("|---|---|---|{}", "---|".repeat(PRODUCTS.len()));
    for (groups, slots, ahead) in
        [(0, 3, 0), (0, 4, 0), (0, 6, 0), (1, 2, 0), (2, 2, 0), (2, 3, 0), (0, 3, 128), (1, 2, 128)]
    {
        let tuning = SkinnyTuning { groups, slots, ahead: ahead << 10, ..default };
        let mut line = format!("| {groups} | {slots} | {ahead} |");
        for product in 0..PRODUCTS.len() {
            let us = bench.with(tuning).product_microseconds(product, 1)?;
            line += &format!(" {us:.2} ({:.0}) |", bench.weight_bytes(product) as f64 / us / 1e3);
        }
        println!("{line}");
    }
    bench.with(default);
    Ok(())
}
