//! Products of few rows, with the norm before and the work after them: every number of rows, odd sizes, ways to fetch, and
//! chains whose kernels overlap.

use strobe_kernels_cuda::{
    CudaError, DeviceBuffer, Precision, Skinny, SkinnyArgs, SkinnyInput, SkinnyOutput, SkinnyTuning,
};

use super::rig::{fp8_code, fp8_value, round};
use super::{Outcome, Output, Rig};

const EPS: f32 = 1e-5;

/// What becomes of the sums, without where it goes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Store,
    StoreF32,
    AddResidual,
    SiluMul,
}

const KINDS: [Kind; 4] = [Kind::Store, Kind::StoreF32, Kind::AddResidual, Kind::SiluMul];

/// One product.
#[derive(Clone, Copy, Debug)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    kind: Kind,
    norm: bool,
    bias: bool,
}

pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let mut skinny = Skinny::new(rig.gpu)?;
    let mut outcomes = Vec::new();
    for precision in Precision::ALL {
        for fp8 in [false, true] {
            if fp8 && precision == Precision::F32 {
                continue;
            }
            let unit = if fp8 { 16 } else { 8 };
            for m in 1..=skinny.max_m() {
                let kind = KINDS[m % 4];
                let n =
                    16 * rig.random.between(1, 16) + if kind == Kind::SiluMul { 0 } else { 8 * rig.random.below(2) };
                let k = unit * rig.random.between(1, 600 / unit);
                let shape = Shape { m, n, k, kind, norm: rig.random.below(2) == 0, bias: rig.random.below(3) == 0 };
                outcomes.push(product(rig, &skinny, shape, precision, fp8)?);
            }
            // Many more weight rows than a pass takes, and a k that every warp has several pieces of.
            for (m, n, k) in [(1, 2048, 2048), (3, 264, 5632), (8, 520, 4096), (16, 1032, 1040), (12, 520, 2048)] {
                let shape = Shape { m, n, k, kind: KINDS[m % 3], norm: true, bias: false };
                outcomes.push(product(rig, &skinny, shape, precision, fp8)?);
                let shape = Shape { norm: false, kind: Kind::AddResidual, ..shape };
                outcomes.push(product(rig, &skinny, shape, precision, fp8)?);
            }
            if precision == Precision::F32 {
                continue;
            }
            for (slots, groups) in [(1, 0), (2, 1), (3, 2), (4, 1), (6, 0)] {
                skinny.tuning = SkinnyTuning { slots, groups, ahead: 64 << 10, ..SkinnyTuning::default() };
                for (m, kind) in [(1, Kind::SiluMul), (7, Kind::StoreF32), (16, Kind::Store)] {
                    let shape = Shape { m, n: 4240, k: 16 * rig.random.between(16, 40), kind, norm: true, bias: true };
                    outcomes.push(product(rig, &skinny, shape, precision, fp8)?);
                }
            }
            skinny.tuning = SkinnyTuning::default();
        }
        outcomes.append(&mut same_for_any_number_of_rows(rig, &skinny, precision)?);
        outcomes.append(&mut chain(rig, &mut skinny, precision)?);
    }
    Ok(outcomes)
}

/// One product against sums in double precision.
fn product(
    rig: &mut Rig,
    skinny: &Skinny,
    shape: Shape,
    precision: Precision,
    fp8: bool,
) -> Result<Outcome, CudaError> {
    let Shape { m, n, k, kind, .. } = shape;
    let hidden = rig.random.normals(m * k, 2.0);
    let weight: Vec<f32> = rig.random.normals(k, 0.2).iter().map(|v| 1.0 + v).collect();
    let (hidden_buffer, weight_buffer) = (rig.upload(&hidden)?, rig.upload(&weight)?);
    let mut x = rig.random.normals(m * k, 1.0);
    let x_buffer = rig.upload_rounded(&mut x, precision)?;
    let (w, w_buffer, scales) = weights(rig, n, k, precision, fp8)?;
    let scale_buffer = rig.upload(&scales)?;
    let bias = rig.random.normals(n, 1.0);
    let bias_buffer = rig.upload(&bias)?;
    let columns = if kind == Kind::SiluMul { n / 2 } else { n };
    let mut before = rig.random.normals(m * columns, 1.0);
    let out = match kind {
        Kind::Store | Kind::SiluMul => rig.output_of(m * columns, precision)?,
        Kind::StoreF32 => rig.output_of(m * columns, Precision::F32)?,
        Kind::AddResidual => rig.in_place(&mut before, Precision::F32)?,
    };
    let norm = SkinnyInput::Norm { hidden: hidden_buffer.ptr(), weight: weight_buffer.ptr(), eps: EPS };
    let args = SkinnyArgs {
        input: if shape.norm { norm } else { SkinnyInput::Plain(x_buffer.ptr()) },
        w: w_buffer.ptr(),
        w_scales: fp8.then(|| scale_buffer.ptr()),
        bias: shape.bias.then(|| bias_buffer.ptr()),
        out: target(kind, &out),
        m,
        n,
        k,
    };
    // In bf16 the norm's division comes after the product.
    let mut factors = vec![1.0; m];
    if shape.norm {
        x = hidden.clone();
        let late = precision == Precision::Bf16;
        for (row, late_factor) in x.chunks_exact_mut(k).zip(&mut factors) {
            let square: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
            let factor = (square / k as f64 + f64::from(EPS)).sqrt().recip();
            for (v, w) in row.iter_mut().zip(&weight) {
                *v = if late { *v * w } else { (f64::from(*v) * factor * f64::from(*w)) as f32 };
            }
            *late_factor = if late { factor } else { 1.0 };
        }
        round(&mut x, precision);
    }
    // SAFETY: operands and results were made for this case, and live until the result was read.
    unsafe { skinny.run(rig.gpu, &args, precision) }?;
    let dot = |token: usize, row: usize| {
        let (x, w) = (&x[token * k..][..k], &w[row * k..][..k]);
        let sum: f64 = x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        sum * factors[token] * f64::from(scales[row]) + if shape.bias { f64::from(bias[row]) } else { 0.0 }
    };
    let mut expected = Vec::with_capacity(m * columns);
    for token in 0..m {
        for column in 0..columns {
            let value = dot(token, column);
            expected.push(match kind {
                Kind::Store | Kind::StoreF32 => value,
                Kind::AddResidual => value + f64::from(before[token * columns + column]),
                Kind::SiluMul => value / (1.0 + (-value).exp()) * dot(token, column + columns),
            } as f32);
        }
    }
    let stored = if matches!(kind, Kind::Store | Kind::SiluMul) { precision } else { Precision::F32 };
    let found = out.read(rig.gpu, stored)?;
    // A norm rounds x differently where a sum of squares differs in its last bits.
    let tolerance = match (stored, shape.norm, precision) {
        (Precision::Bf16, ..) => 4e-3,
        (Precision::F16, ..) => 1e-3,
        (Precision::F32, true, Precision::F16) => 2e-4,
        (Precision::F32, ..) => 1e-5,
    };
    let op = match kind {
        Kind::Store => "skinny_store",
        Kind::StoreF32 => "skinny_store_f32",
        Kind::AddResidual => "skinny_add",
        Kind::SiluMul => "skinny_silu",
    };
    let dtype = format!("{}{}", precision.suffix(), if fp8 { " x fp8" } else { "" });
    let case = format!("{shape:?} {:?}", skinny.tuning);
    Ok(Outcome::compared((op, &dtype), case, &found, &expected, tolerance))
}

fn target(kind: Kind, out: &Output) -> SkinnyOutput {
    match kind {
        Kind::Store => SkinnyOutput::Store(out.ptr()),
        Kind::StoreF32 => SkinnyOutput::StoreF32(out.ptr()),
        Kind::AddResidual => SkinnyOutput::AddResidual(out.ptr()),
        Kind::SiluMul => SkinnyOutput::SiluMul(out.ptr()),
    }
}

/// Random weights without their scales, and the scales: ones where there are none.
fn weights(
    rig: &mut Rig,
    n: usize,
    k: usize,
    precision: Precision,
    fp8: bool,
) -> Result<(Vec<f32>, DeviceBuffer, Vec<f32>), CudaError> {
    let spread = (k as f32).powf(-0.5);
    if !fp8 {
        let mut w = rig.random.normals(n * k, spread);
        let buffer = rig.upload_rounded(&mut w, precision)?;
        return Ok((w, buffer, vec![1.0; n]));
    }
    // Every code that is a number, subnormal ones among them.
    let codes: Vec<u8> =
        (0..n * k).map(|_| fp8_code(rig.random.normal() * 20.0 * rig.random.uniform() as f32)).collect();
    let scales = (0..n).map(|_| spread * (0.05 + 0.1 * rig.random.uniform() as f32)).collect();
    Ok((codes.iter().map(|code| fp8_value(*code)).collect(), rig.upload(&codes)?, scales))
}

/// A row's result does not depend on what is computed with it.
fn same_for_any_number_of_rows(
    rig: &mut Rig,
    skinny: &Skinny,
    precision: Precision,
) -> Result<Vec<Outcome>, CudaError> {
    let mut outcomes = Vec::new();
    // A k for each place where x may be.
    for (n, k) in [(520, 1032), (264, 3000), (136, 6008)] {
        let mut x = rig.random.normals(16 * k, 1.0);
        let hidden = rig.upload(&x)?;
        let x_buffer = rig.upload_rounded(&mut x, precision)?;
        let norm_weight = rig.upload(&vec![0.7f32; k])?;
        let (_, w, _) = weights(rig, n, k, precision, false)?;
        for norm in [false, true] {
            let input = match norm {
                true => SkinnyInput::Norm { hidden: hidden.ptr(), weight: norm_weight.ptr(), eps: EPS },
                false => SkinnyInput::Plain(x_buffer.ptr()),
            };
            let args = |m: usize, out: SkinnyOutput| SkinnyArgs {
                input,
                w: w.ptr(),
                w_scales: None,
                bias: None,
                out,
                m,
                n,
                k,
            };
            if !skinny.supports(&args(16, SkinnyOutput::StoreF32(hidden.ptr())), precision) {
                continue;
            }
            let run = |m: usize| {
                let out = rig.output_of(m * n, Precision::F32)?;
                // SAFETY: operands and results were made for this case, and live until the result was read.
                unsafe { skinny.run(rig.gpu, &args(m, SkinnyOutput::StoreF32(out.ptr())), precision) }?;
                out.bytes(rig.gpu)
            };
            let all = run(16)?;
            for m in [1, 5, 8, 9] {
                let case = format!("rows of 16 among {m}, k {k}, norm {norm}");
                outcomes.push(Outcome::exact(("skinny_rows", precision.suffix()), case, &run(m)?, &all[..m * n * 4]));
            }
        }
    }
    Ok(outcomes)
}

/// Products that feed each other give the same whether or not each begins before the one in front has ended.
fn chain(rig: &mut Rig, skinny: &mut Skinny, precision: Precision) -> Result<Vec<Outcome>, CudaError> {
    let (wide, narrow, turns) = (2048, 1280, 8);
    let mut outcomes = Vec::new();
    let norm_weight = rig.upload(&vec![1.0f32; wide])?;
    let (mut down, mut up) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        down.push(weights(rig, narrow, wide, precision, false)?.1);
        up.push(weights(rig, wide, narrow, precision, false)?.1);
    }
    for m in [1, 2, 8, 16] {
        let start = rig.random.normals(m * wide, 1.0);
        let mut found = Vec::new();
        for overlap in [false, true, true, true] {
            skinny.tuning = SkinnyTuning { overlap, ..SkinnyTuning::default() };
            let hidden = rig.in_place(&mut start.clone(), Precision::F32)?;
            let middle = rig.output_of(m * narrow, precision)?;
            for (down, up) in down.iter().zip(&up) {
                let (bias, w_scales) = (None, None);
                let mut args = SkinnyArgs {
                    input: SkinnyInput::Norm { hidden: hidden.ptr(), weight: norm_weight.ptr(), eps: EPS },
                    w: down.ptr(),
                    w_scales,
                    bias,
                    out: SkinnyOutput::Store(middle.ptr()),
                    m,
                    n: narrow,
                    k: wide,
                };
                // SAFETY: operands and results were made for this case, and live until the result was read.
                unsafe { skinny.run(rig.gpu, &args, precision) }?;
                args.input = SkinnyInput::Plain(middle.ptr());
                args.out = SkinnyOutput::AddResidual(hidden.ptr());
                (args.w, args.n, args.k) = (up.ptr(), wide, narrow);
                // SAFETY: operands and results were made for this case, and live until the result was read.
                unsafe { skinny.run(rig.gpu, &args, precision) }?;
            }
            found.push(hidden.bytes(rig.gpu)?);
        }
        for again in &found[1..] {
            let case = format!("{m} rows through {turns} pairs of overlapping GEMMs");
            outcomes.push(Outcome::exact(("skinny_chain", precision.suffix()), case, again, &found[0]));
        }
    }
    skinny.tuning = SkinnyTuning::default();
    Ok(outcomes)
}
