//! strobe's own matrix products: every variant is first checked against sums made on the host, then timed beside
//! cuBLASLt on the shapes of TinyLlama.

use std::io::Write;

use strobe_kernels_cuda::{
    CudaError, DeviceBuffer, GemmArgs, GemmEpilogue, GemmInput, GemmVariant, Gpu, Lt, LtArgs, LtInput, LtShape,
    OwnGemm, Precision, Scales,
};

use crate::graph_microseconds;

pub(crate) fn run(gpu: &Gpu) -> Result<(), CudaError> {
    let own = OwnGemm::new(gpu)?;
    let wrong = check_all(gpu, &own)?;
    for fp8 in [false, true] {
        time(gpu, &own, fp8)?;
    }
    if wrong > 0 {
        return Err(CudaError::Unsupported(format!("{wrong} results were wrong, see above")));
    }
    Ok(())
}

/// A small generator, so that runs repeat.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In -1..1.
    fn value(&mut self) -> f32 {
        self.next() as f32 / (1u32 << 30) as f32 - 1.0
    }
}

/// e4m3, as the hardware reads it.
fn from_fp8(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// Values on the device, and what they are exactly.
struct Matrix {
    device: DeviceBuffer,
    values: Vec<f32>,
}

impl Matrix {
    fn random(len: usize, kind: Kind, random: &mut Random) -> Result<Matrix, CudaError> {
        let mut bytes = Vec::new();
        let mut values = Vec::with_capacity(len);
        for _ in 0..len {
            let wanted = random.value();
            let value = match kind {
                Kind::Plain(Precision::F32) => {
                    bytes.extend(wanted.to_le_bytes());
                    wanted
                }
                Kind::Plain(Precision::F16) => {
                    let half = half::f16::from_f32(wanted);
                    bytes.extend(half.to_le_bytes());
                    half.to_f32()
                }
                Kind::Plain(Precision::Bf16) => {
                    let half = half::bf16::from_f32(wanted);
                    bytes.extend(half.to_le_bytes());
                    half.to_f32()
                }
                Kind::Fp8 => {
                    let code = (random.next() as u8 & 0x9f) | 0x20;
                    bytes.push(code);
                    from_fp8(code)
                }
            };
            values.push(value);
        }
        let device = DeviceBuffer::new(bytes.len(), "a matrix")?;
        device.write(0, &bytes)?;
        Ok(Matrix { device, values })
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain(Precision),
    Fp8,
}

/// Odd sizes, one and many tiles, short and long k; then sizes that no wide copy can load.
const CHECKED: [(usize, usize, usize); 9] = [
    (1, 256, 512),
    (17, 264, 2048),
    (64, 512, 1024),
    (130, 1040, 1104),
    (200, 1280, 512),
    (257, 768, 1024),
    (700, 264, 784),
    (45, 70, 77),
    (300, 202, 50),
];

/// How many were wrong.
fn check_all(gpu: &Gpu, own: &OwnGemm) -> Result<usize, CudaError> {
    use GemmEpilogue::{AddResidual, SiluMul, Store, StoreF32};
    println!("\nvariants against sums in 64 bits on the host: relative error of the whole, worst value");
    let mut random = Random(1);
    let (mut wrong, mut right) = (0, 0);
    let kinds = [Kind::Plain(Precision::Bf16), Kind::Plain(Precision::F16), Kind::Fp8, Kind::Plain(Precision::F32)];
    for kind in kinds {
        let precision = if let Kind::Plain(precision) = kind { precision } else { Precision::Bf16 };
        for (case, (m, n, k)) in CHECKED.into_iter().enumerate() {
            let (x, w) = (Matrix::random(m * k, kind, &mut random)?, Matrix::random(n * k, kind, &mut random)?);
            let f32s = |len, random: &mut Random| Matrix::random(len, Kind::Plain(Precision::F32), random);
            let (x_scales, w_scales) = (f32s(m, &mut random)?, f32s(n, &mut random)?);
            let (bias, hidden) = (f32s(n, &mut random)?, f32s(m * n, &mut random)?);
            let out = DeviceBuffer::new(m * n * 4, "output")?;
            let per_row = case % 2 == 0;
            let scaled = |row: usize, column: usize, sum: f64| match kind {
                Kind::Plain(_) => sum,
                Kind::Fp8 => {
                    let at = |index| if per_row { index } else { 0 };
                    sum * f64::from(x_scales.values[at(row)]) * f64::from(w_scales.values[at(column)])
                }
            };
            let product: Vec<f64> = (0..m * n)
                .map(|i| {
                    let (row, column) = (i / n, i % n);
                    let (a, b) = (&x.values[row * k..][..k], &w.values[column * k..][..k]);
                    scaled(row, column, a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum())
                })
                .collect();
            for (epilogue, biased) in
                [(Store, false), (Store, true), (StoreF32, false), (AddResidual, false), (SiluMul, false)]
            {
                let input = match kind {
                    Kind::Plain(_) => GemmInput::Same,
                    Kind::Fp8 => GemmInput::Fp8 {
                        x_scales: Scales { pointer: x_scales.device.ptr(), per_row },
                        w_scales: Scales { pointer: w_scales.device.ptr(), per_row },
                    },
                };
                let args = GemmArgs {
                    precision,
                    input,
                    x: x.device.ptr(),
                    w: w.device.ptr(),
                    out: out.ptr(),
                    epilogue,
                    bias: biased.then(|| bias.device.ptr()),
                    maxima: None,
                    spared: None,
                    m,
                    n,
                    k,
                };
                let at = |row: usize, column: usize| {
                    product[row * n + column] + if biased { f64::from(bias.values[column]) } else { 0.0 }
                };
                let want = |i: usize| match epilogue {
                    Store | StoreF32 => at(i / n, i % n),
                    AddResidual => at(i / n, i % n) + f64::from(hidden.values[i]),
                    SiluMul => {
                        let (row, column) = (i / (n / 2), i % (n / 2));
                        let gate = at(row, column);
                        gate / (1.0 + (-gate).exp()) * at(row, n / 2 + column)
                    }
                };
                let want: Vec<f64> = (0..m * args.width()).map(want).collect();
                let wide = matches!(epilogue, StoreF32 | AddResidual) || precision == Precision::F32;
                for variant in own.variants(&args) {
                    out.fill(0xff)?;
                    if epilogue == AddResidual {
                        out.write(0, &hidden.values)?;
                    }
                    // Said before the launch: a variant that hangs is then known.
                    print!("\r{variant} {kind:?} {m}x{n}x{k} {epilogue:?}          ");
                    let _ = std::io::stdout().flush();
                    // SAFETY: operands and results were made for this product, and live until it was waited for.
                    unsafe { own.run_variant(gpu, &args, variant) }?;
                    gpu.synchronize()?;
                    let got = read(&out, m * args.width(), wide, precision)?;
                    let (mut error, mut total, mut worst) = (0.0, 0.0, (0.0, 0));
                    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                        let difference = (f64::from(*got) - want).abs();
                        error += difference * difference;
                        total += want * want;
                        if difference > worst.0 || difference.is_nan() {
                            worst = (difference, i);
                        }
                    }
                    let relative = (error / total.max(1e-30)).sqrt();
                    let limit = match (wide, precision, kind) {
                        // Hopper's tensor cores cut sums of 8-bit products to some 14 bits.
                        (_, _, Kind::Fp8) => 1e-2,
                        (true, _, _) => 5e-5,
                        (false, Precision::F16, _) => 6e-4,
                        _ => 4e-3,
                    };
                    if relative <= limit {
                        right += 1;
                        continue;
                    }
                    wrong += 1;
                    let (row, column) = (worst.1 / args.width(), worst.1 % args.width());
                    println!(
                        "\rWRONG {variant} {kind:?} {m}x{n}x{k} {epilogue:?} bias {biased}: relative {relative:.2e} \
                         (limit {limit:.0e}), worst at row {row} column {column}: {} for {}",
                        got[worst.1], want[worst.1]
                    );
                }
            }
        }
    }
    println!("\r{right} right, {wrong} wrong                                        ");
    Ok(wrong)
}

fn read(out: &DeviceBuffer, len: usize, wide: bool, precision: Precision) -> Result<Vec<f32>, CudaError> {
    if wide {
        let mut values = vec![0f32; len];
        out.read(0, &mut values)?;
        return Ok(values);
    }
    let mut bits = vec![0u16; len];
    out.read(0, &mut bits)?;
    let value = |bits: u16| match precision {
        Precision::F16 => half::f16::from_bits(bits).to_f32(),
        _ => half::bf16::from_bits(bits).to_f32(),
    };
    Ok(bits.into_iter().map(value).collect())
}

/// Name, n, k, what becomes of it in a model.
const SHAPES: [(&str, usize, usize, GemmEpilogue); 5] = [
    ("qkv", 2560, 2048, GemmEpilogue::Store),
    ("o", 2048, 2048, GemmEpilogue::AddResidual),
    ("gate_up", 11264, 2048, GemmEpilogue::SiluMul),
    ("down", 2048, 5632, GemmEpilogue::AddResidual),
    ("lm_head", 32000, 2048, GemmEpilogue::StoreF32),
];

fn time(gpu: &Gpu, own: &OwnGemm, fp8: bool) -> Result<(), CudaError> {
    let lt = match Lt::new(gpu) {
        Ok(lt) => Some(lt),
        Err(problem) => {
            println!("without cuBLASLt: {problem}");
            None
        }
    };
    let element = if fp8 { 1 } else { 2 };
    println!(
        "\n{}: own plain and with what follows it in a model, cuBLASLt without (its activation is another launch)",
        if fp8 { "e4m3" } else { "bf16" }
    );
    println!(
        "| layer | m | plain us | TFLOP/s | variant | chosen us | cuBLASLt us | TFLOP/s | own/Lt | fused us | variant \
         |\n|---|---|---|---|---|---|---|---|---|---|---|"
    );
    let pool = DeviceBuffer::new(512 << 20, "weights")?;
    let x = DeviceBuffer::new(8192 * 5632 * element, "input")?;
    let out = DeviceBuffer::new(8192 * 32000 * 4, "output")?;
    let scales = DeviceBuffer::new(32000 * 4, "scales")?;
    // Either sign and magnitudes below two, in every type. Not all the same: that would draw less power.
    let mut random = Random(2);
    let pattern: Vec<u8> = (0..1 << 20).map(|_| (random.next() as u8 & 0x8f) | 0x30).collect();
    for buffer in [&pool, &x, &scales] {
        for start in (0..buffer.bytes()).step_by(pattern.len()) {
            buffer.write(start, &pattern[..pattern.len().min(buffer.bytes() - start)])?;
        }
    }
    let mut details = Vec::new();
    for (name, n, k, epilogue) in SHAPES {
        let rows: &[usize] = if fp8 { &[64, 256, 2048] } else { &[16, 64, 256, 1024, 2048, 8192] };
        for &m in rows {
            let stride = (n * k * element).next_multiple_of(1024);
            let places = pool.bytes() / stride;
            let place = |turn: usize| pool.ptr() + (turn % places * stride) as u64;
            let all = Scales { pointer: scales.ptr(), per_row: true };
            let args = |epilogue, turn| GemmArgs {
                precision: Precision::Bf16,
                input: if fp8 { GemmInput::Fp8 { x_scales: all, w_scales: all } } else { GemmInput::Same },
                x: x.ptr(),
                w: place(turn),
                out: out.ptr(),
                epilogue,
                bias: None,
                maxima: None,
                spared: None,
                m,
                n,
                k,
            };
            let plain = if name == "lm_head" { GemmEpilogue::StoreF32 } else { GemmEpilogue::Store };
            let repeats = if m * n * k > 1 << 34 { 5 } else { 20 };
            let timed = |epilogue: GemmEpilogue, variants: Vec<GemmVariant>| {
                let mut times = Vec::new();
                for variant in variants {
                    let us =
                        // SAFETY: operands and results were made for this product, and live until it was waited for.
                        graph_microseconds(gpu, repeats, |turn| unsafe { own.run_variant(gpu, &args(epilogue, turn), variant) })?;
                    times.push((us, variant));
                }
                times.sort_by(|a, b| a.0.total_cmp(&b.0));
                Ok::<_, CudaError>(times)
            };
            // Kernels for any GPU are slower by far where there are better ones.
            let mut variants = own.variants(&args(plain, 0));
            if variants.iter().any(|variant| variant.hopper) {
                variants.retain(|variant| variant.hopper);
            }
            let times = timed(plain, variants)?;
            let Some((best, variant)) = times.first().copied() else { continue };
            let choice = own.choose(&args(plain, 0));
            let chosen = times.iter().find(|(_, variant)| *variant == choice).map_or(f64::NAN, |(us, _)| *us);
            let mut theirs = f64::NAN;
            if let Some(lt) = &lt {
                let output = if plain == GemmEpilogue::StoreF32 { Precision::F32 } else { Precision::Bf16 };
                let input = if fp8 { LtInput::Fp8RowScales } else { LtInput::Same(Precision::Bf16) };
                let shape = LtShape { n, k, input, output, accumulate: false };
                for algorithm in lt.algorithms(&shape, m, 8)? {
                    let us = graph_microseconds(gpu, repeats, |turn| {
                        let args = LtArgs {
                            x: x.ptr(),
                            x_scales: scales.ptr(),
                            w: place(turn),
                            w_scales: scales.ptr(),
                            out: out.ptr(),
                            m,
                        };
                        // SAFETY: operands and results were made for this product, and live until it was waited for.
                        unsafe { lt.run(gpu, &shape, &args, Some(algorithm)) }
                    })?;
                    theirs = us.min(theirs);
                }
            }
            let able = own.variants(&args(epilogue, 0));
            let likely = times.iter().map(|(_, variant)| *variant).filter(|variant| able.contains(variant));
            let fused = timed(epilogue, likely.take(6).collect())?;
            let (fused_us, fused_variant) = fused.first().map_or((f64::NAN, String::new()), |f| (f.0, f.1.to_string()));
            let tflops = |us: f64| 2.0 * (m * n * k) as f64 / us / 1e6;
            println!(
                "| {name} | {m} | {best:.2} | {:.0} | {variant} | {chosen:.2} ({choice}) | {theirs:.2} | {:.0} | {:.0} % | \
                 {fused_us:.2} | {fused_variant} |",
                tflops(best),
                tflops(theirs),
                100.0 * theirs / best
            );
            let list: Vec<String> = times.iter().take(12).map(|(us, variant)| format!("{variant} {us:.2}")).collect();
            details.push(format!("{name} {m}: {}", list.join(", ")));
        }
    }
    println!("\nvariants by time, plain:");
    for line in details {
        println!("{line}");
    }
    Ok(())
}
