//! Own matrix products: every variant that can compute a case, with everything that may follow a product.

use strobe_kernels_cuda::{
    CudaError, GemmArgs, GemmEpilogue, GemmInput, Maxima, OwnGemm, Precision, SampleOps, Scales,
};

use super::rig::fp8_value;
use super::{Outcome, Rig};

/// Types of operands; e4m3 writes bfloat16.
const KINDS: [(&str, Precision, bool); 4] = [
    ("bf16", Precision::Bf16, false),
    ("f16", Precision::F16, false),
    ("f32", Precision::F32, false),
    ("fp8", Precision::Bf16, true),
];

/// Every type, shapes that the copy engine takes and shapes that it does not.
pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let (own, sample) = (OwnGemm::new(rig.gpu)?, SampleOps::new(rig.gpu, 1)?);
    let mut outcomes = Vec::new();
    for kind in KINDS {
        for round in 0..8 {
            let (m, n, k) = match round {
                0 => (1, 256, 512),
                1..6 => (rig.random.between(2, 400), 8 * rig.random.between(1, 80), 16 * rig.random.between(1, 64)),
                _ => (rig.random.between(1, 90), rig.random.between(1, 90) * 2, rig.random.between(1, 200)),
            };
            case(rig, (&own, &sample), kind, (m, n, k), round % 2 == 0, &mut outcomes)?;
        }
    }
    Ok(outcomes)
}

fn case(
    rig: &mut Rig,
    (own, sample): (&OwnGemm, &SampleOps),
    (dtype, precision, fp8): (&str, Precision, bool),
    (m, n, k): (usize, usize, usize),
    per_row: bool,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    use GemmEpilogue::{AddResidual, SiluMul, Store, StoreF32};
    let (mut x, mut w) = (Vec::new(), Vec::new());
    let (x_device, w_device) = if fp8 {
        let mut codes = |count, values: &mut Vec<f32>| {
            // Magnitudes from a quarter to four; no code is not a number.
            let codes: Vec<u8> = (0..count).map(|_| rig.random.bits() as u8 & 0x9f | 0x28).collect();
            values.extend(codes.iter().map(|&code| fp8_value(code)));
            codes
        };
        let (x_codes, w_codes) = (codes(m * k, &mut x), codes(n * k, &mut w));
        (rig.upload(&x_codes)?, rig.upload(&w_codes)?)
    } else {
        (x, w) = (rig.random.normals(m * k, 1.0), rig.random.normals(n * k, 1.0));
        (rig.upload_rounded(&mut x, precision)?, rig.upload_rounded(&mut w, precision)?)
    };
    let mut scales = |count| -> Vec<f32> { (0..count).map(|_| 0.5 + rig.random.uniform() as f32).collect() };
    let (x_scales, w_scales) = (scales(m), scales(n));
    let (bias, hidden) = (rig.random.normals(n, 1.0), rig.random.normals(m * n, 1.0));
    let (x_scales_device, w_scales_device) = (rig.upload(&x_scales)?, rig.upload(&w_scales)?);
    let bias_device = rig.upload(&bias)?;
    let product: Vec<f64> = (0..m * n)
        .map(|i| {
            let (row, column) = (i / n, i % n);
            let pairs = x[row * k..][..k].iter().zip(&w[column * k..][..k]);
            let sum: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let (row, column) = if per_row { (row, column) } else { (0, 0) };
            if fp8 { sum * f64::from(x_scales[row]) * f64::from(w_scales[column]) } else { sum }
        })
        .collect();
    let input = if fp8 {
        GemmInput::Fp8 {
            x_scales: Scales { pointer: x_scales_device.ptr(), per_row },
            w_scales: Scales { pointer: w_scales_device.ptr(), per_row },
        }
    } else {
        GemmInput::Same
    };
    for (epilogue, biased) in [(Store, false), (Store, true), (StoreF32, false), (AddResidual, false), (SiluMul, true)]
    {
        let out_precision = if matches!(epilogue, StoreF32 | AddResidual) { Precision::F32 } else { precision };
        let width = if epilogue == SiluMul { n / 2 } else { n };
        let at =
            |row: usize, column: usize| product[row * n + column] + if biased { f64::from(bias[column]) } else { 0.0 };
        let expected: Vec<f32> = (0..m * width)
            .map(|i| {
                let (row, column) = (i / width, i % width);
                let value = at(row, column);
                (match epilogue {
                    Store | StoreF32 => value,
                    AddResidual => value + f64::from(hidden[i]),
                    SiluMul => value / (1.0 + (-value).exp()) * at(row, width + column),
                }) as f32
            })
            .collect();
        let tolerance = match (fp8, out_precision) {
            // Hopper's tensor cores cut sums of 8-bit products to some 14 bits, those of 16-bit products to about 24.
            (true, _) => 1e-2,
            (_, Precision::F32) => 5e-5,
            (_, Precision::F16) => 6e-4,
            (_, Precision::Bf16) => 4e-3,
        };
        let out = rig.output_of(m * width, out_precision)?;
        let yes = rig.upload(&[1u32])?;
        let args = GemmArgs {
            precision,
            input,
            x: x_device.ptr(),
            w: w_device.ptr(),
            out: out.ptr(),
            epilogue,
            bias: biased.then(|| bias_device.ptr()),
            maxima: None,
            spared: None,
            m,
            n,
            k,
        };
        for variant in own.variants(&args) {
            let in_place;
            let out = if epilogue == AddResidual {
                in_place = rig.in_place(&mut hidden.clone(), Precision::F32)?;
                &in_place
            } else {
                out.poison()?;
                &out
            };
            let tiles = own.keeps_maxima(&args, variant);
            let kept = rig.output(m * tiles.unwrap_or(0), 8)?;
            let maxima = tiles.map(|_| kept.ptr());
            // SAFETY: operands and results were made for this case, and live until the result was read.
            unsafe { own.run_variant(rig.gpu, &GemmArgs { out: out.ptr(), maxima, ..args }, variant) }?;
            let found = out.read(rig.gpu, out_precision)?;
            let name = format!("own gemm {epilogue:?}{}", if biased { " + bias" } else { "" });
            let text = format!("{variant}, {m} x {n} x {k}{}", if per_row { "" } else { ", one scale" });
            if let Some(tiles) = tiles {
                let tokens = rig.output(m, 4)?;
                // SAFETY: operands and results were made for this case, and live until the result was read.
                unsafe { sample.argmax_tiles(rig.gpu, Maxima { kept: kept.ptr(), tiles }, m, tokens.ptr(), 0) }?;
                let mut largest = vec![0; m];
                rig.cpu.argmax_rows(&found, n, &mut largest);
                let found = tokens.read_u32(rig.gpu)?;
                outcomes.push(Outcome::exact(("own gemm, maxima", dtype), &*text, &found, &largest));
                out.poison()?;
                kept.poison()?;
                let (untouched, spared) = (out.read_u32(rig.gpu)?, Some(yes.ptr()));
                // SAFETY: operands and results were made for this case, and live until the result was read.
                unsafe {
                    own.run_variant(rig.gpu, &GemmArgs { out: out.ptr(), maxima, spared, ..args }, variant)?;
                    sample.argmax_tiles(rig.gpu, Maxima { kept: kept.ptr(), tiles }, m, tokens.ptr(), 0)?;
                }
                let found = tokens.read_u32(rig.gpu)?;
                outcomes.push(Outcome::exact(("own gemm, maxima alone", dtype), &*text, &found, &largest));
                let found = out.read_u32(rig.gpu)?;
                outcomes.push(Outcome::exact(("own gemm, maxima alone", dtype), &*text, &found, &untouched));
            }
            outcomes.push(Outcome::compared((&name, dtype), text, &found, &expected, tolerance));
        }
    }
    Ok(())
}
