//! Linear layers: every kernel that could run a shape, cuBLASLt's algorithms among them, and the plan that picks one.

use strobe_kernels_cuda::{
    BUCKETS, Candidate, CudaError, DeviceBuffer, Epilogue, Linear, LinearArgs, LinearInput, LinearShape, LinearSite,
    Precision, RowOps, Weights, bucket_index, tune,
};

use super::rig::{fp8_value, round};
use super::{Outcome, Output, Rig};

const EPS: f32 = 1e-5;

/// Rows, columns of the output, columns of the input.
const SIZES: [(usize, usize, usize); 12] = [
    (1, 256, 512),
    (2, 2048, 256),
    (7, 96, 160),
    (16, 320, 1024),
    (33, 256, 2048),
    (61, 768, 128),
    (64, 512, 512),
    (129, 384, 256),
    (300, 640, 384),
    (5, 48, 24),
    (9, 34, 33),
    (70, 66, 100),
];

const EPILOGUES: [Epilogue; 5] =
    [Epilogue::Store, Epilogue::StoreF32, Epilogue::Logits, Epilogue::AddResidual, Epilogue::SiluMul];

/// All candidates of all sizes, then a plan made by tuning.
pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let mut outcomes = Vec::new();
    for precision in Precision::ALL {
        let mut linear = Linear::with_what_is_there(rig.gpu, precision)?;
        let rows = RowOps::new(rig.gpu, precision)?;
        for weights in [Weights::Same, Weights::Fp8] {
            // e4m3 needs its hardware, and is meant for activations of 16 bits.
            if weights == Weights::Fp8 && (rig.gpu.arch().number() < 89 || precision == Precision::F32) {
                continue;
            }
            for epilogue in EPILOGUES {
                for (m, n, k) in SIZES {
                    // What is tuned for a bucket runs every number of rows down to the next one.
                    let bias = epilogue == Epilogue::Store && rig.random.below(2) == 0;
                    let norm = epilogue != Epilogue::AddResidual && rig.random.below(2) == 0;
                    let shape = LinearShape { n, k, epilogue, weights, bias, norm };
                    let case = Case::new(rig, shape, m, precision)?;
                    let mut candidates = linear.candidates(&shape, BUCKETS[bucket_index(m)])?;
                    // Where the library applies scales by itself this is no candidate; it must be right all the same.
                    let aligned = n.is_multiple_of(16) && k.is_multiple_of(16);
                    if weights == Weights::Fp8 && linear.cublaslt_version().is_some() && aligned {
                        let scaled = Candidate::CublasLtScaled { algorithm: None };
                        candidates.push((scaled, "cublaslt_scaled".into()));
                    }
                    for (candidate, name) in candidates {
                        linear.reserve(&candidate)?;
                        outcomes.push(case.outcome(rig, &linear, &rows, Some(&candidate), &name)?);
                    }
                }
            }
        }
        outcomes.append(&mut planned(rig, &mut linear, &rows)?);
    }
    Ok(outcomes)
}

/// Without a plan, then by the plan that tuning makes, at every number of rows that a bucket can hold.
fn planned(rig: &mut Rig, linear: &mut Linear, rows: &RowOps) -> Result<Vec<Outcome>, CudaError> {
    let mut outcomes = Vec::new();
    let shape = |n, k, epilogue, norm| LinearShape { n, k, epilogue, weights: Weights::Same, bias: false, norm };
    let shapes = [shape(256, 192, Epilogue::Store, true), shape(384, 128, Epilogue::SiluMul, true)];
    for tuned in [false, true] {
        if tuned {
            let max_rows = 100;
            let sites = shapes.map(|shape| LinearSite { shape, max_rows });
            let first = tune(rig.gpu, linear, &sites, None, || true)?;
            let again = tune(rig.gpu, linear, &sites, Some(first.choices.clone()), || true)?;
            let measured = [first.measured, again.measured];
            let expected = [shapes.len() * (bucket_index(max_rows) + 1), 0];
            let dtype = linear.precision().suffix();
            outcomes.push(Outcome::exact(("linear_tuned", dtype), "choices measured", &measured, &expected));
        }
        for shape in shapes {
            for m in [1, 2, 3, 8, 13, 31, 64, 65, 100, 130] {
                let case = Case::new(rig, shape, m, linear.precision())?;
                let name = if tuned { "planned" } else { "unplanned" };
                outcomes.push(case.outcome(rig, linear, rows, None, name)?);
            }
        }
    }
    Ok(outcomes)
}

/// Operands of a shape on both sides.
struct Case {
    shape: LinearShape,
    m: usize,
    precision: Precision,
    hidden: DeviceBuffer,
    norm_weight: DeviceBuffer,
    x: DeviceBuffer,
    codes: DeviceBuffer,
    scales: DeviceBuffer,
    w: DeviceBuffer,
    w_scales: DeviceBuffer,
    bias: DeviceBuffer,
    before: Vec<f32>,
    /// What is expected of plain input, and of input in e4m3.
    expected: [Vec<f32>; 2],
}

impl Case {
    fn new(rig: &mut Rig, shape: LinearShape, m: usize, precision: Precision) -> Result<Case, CudaError> {
        let LinearShape { n, k, .. } = shape;
        let mut hidden = rig.random.normals(m * k, 1.5);
        let norm_weight: Vec<f32> = rig.random.normals(k, 0.1).iter().map(|v| 1.0 + v).collect();
        let mut x = if shape.norm { normed(&hidden, &norm_weight, k) } else { hidden.clone() };
        round(&mut x, precision);
        let (codes, scales) = quantized(&x, k);
        let mut w = rig.random.normals(n * k, (k as f32).powf(-0.5));
        let w_scales;
        let w_buffer = if shape.weights == Weights::Fp8 {
            let (codes, scales) = quantized(&w, k);
            w = values(&codes, &scales, k);
            w_scales = scales;
            rig.upload(&codes)?
        } else {
            w_scales = vec![f32::NAN; n];
            rig.upload_rounded(&mut w, precision)?
        };
        let bias = rig.random.normals(n, 1.0);
        let before = rig.random.normals(m * n, 1.0);
        let expect = |x: &[f32]| expected(x, &w, &bias, &before, &shape);
        let from_fp8 = if shape.weights == Weights::Fp8 { expect(&values(&codes, &scales, k)) } else { Vec::new() };
        Ok(Case {
            shape,
            m,
            precision,
            expected: [expect(&x), from_fp8],
            hidden: rig.upload_rounded(&mut hidden, Precision::F32)?,
            norm_weight: rig.upload(&norm_weight)?,
            x: rig.upload_rounded(&mut x, precision)?,
            codes: rig.upload(&codes)?,
            scales: rig.upload(&scales)?,
            w: w_buffer,
            w_scales: rig.upload(&w_scales)?,
            bias: rig.upload(&bias)?,
            before,
        })
    }

    /// Run one kernel, or what the plan says.
    fn outcome(
        &self,
        rig: &Rig,
        linear: &Linear,
        rows: &RowOps,
        candidate: Option<&Candidate>,
        name: &str,
    ) -> Result<Outcome, CudaError> {
        let (gpu, shape, m) = (rig.gpu, self.shape, self.m);
        let route =
            candidate.map_or_else(|| linear.route(&shape, m), |candidate| linear.route_of(&shape, m, candidate));
        let input = if route.folds_norm {
            LinearInput::Norm { hidden: self.hidden.ptr(), weight: self.norm_weight.ptr(), eps: EPS }
        } else if route.fp8_input {
            LinearInput::Fp8 { codes: self.codes.ptr(), scales: self.scales.ptr() }
        } else {
            LinearInput::Plain(self.x.ptr())
        };
        let silu = shape.epilogue == Epilogue::SiluMul;
        let f32_out = matches!(shape.epilogue, Epilogue::StoreF32 | Epilogue::Logits | Epilogue::AddResidual);
        let out_type = if f32_out { Precision::F32 } else { self.precision };
        let gate_up = rig.output_of(if silu && !route.folds_silu { m * shape.n } else { 0 }, out_type)?;
        let out: Output = if shape.epilogue == Epilogue::AddResidual {
            rig.in_place(&mut self.before.clone(), Precision::F32)?
        } else {
            rig.output_of(if silu { m * shape.n / 2 } else { m * shape.n }, out_type)?
        };
        let args = LinearArgs {
            shape,
            input,
            w: self.w.ptr(),
            w_scales: self.w_scales.ptr(),
            bias: self.bias.ptr(),
            out: if silu && !route.folds_silu { gate_up.ptr() } else { out.ptr() },
            spared: 0,
            m,
        };
        // SAFETY: operands and results were made for this case, and live until the result was read.
        let ran = unsafe { linear.run_route(gpu, &args, &route) };
        let dtype = match (route.fp8_input, shape.weights) {
            (true, _) => format!("fp8 to {}", out_type.suffix()),
            (false, Weights::Fp8) => format!("{} x fp8", self.precision.suffix()),
            (false, Weights::Same) => self.precision.suffix().to_string(),
        };
        let kind = name.split(' ').next().unwrap_or(name);
        let op = format!("linear_{kind}");
        let LinearShape { n, k, epilogue, bias, .. } = shape;
        let text = format!("{name}: m {m} n {n} k {k} {epilogue:?} bias {bias} norm {}", route.folds_norm);
        if let Err(error @ (CudaError::Library { .. } | CudaError::Unsupported(_))) = ran {
            let problem = Some(error.to_string());
            return Ok(Outcome { op, case: text, dtype, error: f64::INFINITY, tolerance: 0.0, problem });
        }
        ran?;
        if silu && !route.folds_silu {
            // SAFETY: operands and results were made for this case, and live until the result was read.
            unsafe { rows.silu_mul(gpu, gate_up.ptr(), out.ptr(), m, n / 2) }?;
        }
        let expected = &self.expected[usize::from(route.fp8_input)];
        Ok(Outcome::compared(
            (&op, &dtype),
            text,
            &out.read(gpu, out_type)?,
            expected,
            self.tolerance(&route, out_type),
        ))
    }

    fn tolerance(&self, route: &strobe_kernels_cuda::Route, out: Precision) -> f64 {
        // Rounding of the output, and of the input where the kernel norms it; gate and up are rounded on their way.
        let rounding = |precision: Precision| -> f64 {
            match precision {
                // Tensor cores cut their sums to about 24 bits.
                Precision::F32 => 5e-5,
                Precision::F16 => 8e-4,
                Precision::Bf16 => 5e-3,
            }
        };
        let inner = if self.shape.norm || self.shape.epilogue == Epilogue::SiluMul { self.precision } else { out };
        let plain =
            rounding(out).max(rounding(inner)) * if self.shape.epilogue == Epilogue::SiluMul { 2.0 } else { 1.0 };
        // Hopper adds up products of e4m3 with some 14 bits.
        if route.fp8_input { plain.max(1e-2) } else { plain }
    }
}

/// RMSNorm of each row.
fn normed(hidden: &[f32], weight: &[f32], k: usize) -> Vec<f32> {
    let norm = |row: &[f32]| {
        let square: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / k as f64;
        let scale = 1.0 / (square + f64::from(EPS)).sqrt();
        row.iter().zip(weight).map(|(v, w)| (f64::from(*v) * scale * f64::from(*w)) as f32).collect::<Vec<_>>()
    };
    hidden.chunks(k).flat_map(norm).collect()
}

/// e4m3 codes and one scale for each row.
fn quantized(values: &[f32], k: usize) -> (Vec<u8>, Vec<f32>) {
    let scale = |row: &[f32]| (row.iter().fold(0.0f32, |most, v| most.max(v.abs())) / 448.0).max(1e-12);
    let scales: Vec<f32> = values.chunks(k).map(scale).collect();
    let sizes: Vec<f32> = (0..=0x7e).map(fp8_value).collect();
    // The next code at or above; which of two neighbours it is does not matter to a product.
    let code = |v: f32| sizes.partition_point(|size| *size < v.abs()).min(0x7e) as u8 | if v < 0.0 { 0x80 } else { 0 };
    let codes = values.chunks(k).zip(&scales).flat_map(|(row, s)| row.iter().map(move |v| code(v / s)));
    (codes.collect(), scales)
}

fn values(codes: &[u8], scales: &[f32], k: usize) -> Vec<f32> {
    codes.chunks(k).zip(scales).flat_map(|(row, s)| row.iter().map(move |c| fp8_value(*c) * s)).collect()
}

/// The product in double precision, and what becomes of it.
fn expected(x: &[f32], w: &[f32], bias: &[f32], before: &[f32], shape: &LinearShape) -> Vec<f32> {
    let LinearShape { n, k, epilogue, .. } = *shape;
    let mut all = Vec::new();
    for (row, before) in x.chunks(k).zip(before.chunks(n)) {
        let dot = |j: usize| -> f64 {
            let products = row.iter().zip(&w[j * k..][..k]).map(|(a, b)| f64::from(*a) * f64::from(*b));
            products.sum::<f64>() + if shape.bias { f64::from(bias[j]) } else { 0.0 }
        };
        match epilogue {
            Epilogue::Store | Epilogue::StoreF32 | Epilogue::Logits => all.extend((0..n).map(|j| dot(j) as f32)),
            Epilogue::AddResidual => all.extend((0..n).map(|j| (f64::from(before[j]) + dot(j)) as f32)),
            Epilogue::SiluMul => all.extend((0..n / 2).map(|j| {
                let gate = dot(j);
                (gate / (1.0 + (-gate).exp()) * dot(n / 2 + j)) as f32
            })),
        }
    }
    all
}
