//! Row ops and what is done to weights.

use strobe_kernels_cpu::{QkvShape, pack_panels, packed_len};
use strobe_kernels_cuda::{CudaError, EmbedArgs, KvDtype, NormArgs, Precision, RopeArgs, RowOps, WeightOps};
use strobe_model::random::RandomTensor;

use super::rig;
use super::{Outcome, Rig};

/// Rounding to the type and sums in another order.
fn tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 5e-6,
        Precision::F16 => 1e-3,
        Precision::Bf16 => 6e-3,
    }
}

/// Three bits of mantissa: 2.6 % of a value on average, more for the smallest of a row.
const FP8_TOLERANCE: f64 = 0.04;

/// Widths that each kernel takes: whole groups of eight, several per thread, and any.
const WIDTHS: [usize; 11] = [8, 64, 256, 2048, 4096, 4104, 8192, 14336, 100, 7, 33_000];

pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let mut outcomes = Vec::new();
    for precision in Precision::ALL {
        let ops = RowOps::new(rig.gpu, precision)?;
        for width in WIDTHS {
            let rows = if width > 8192 { 3 } else { rig.random.between(1, 40) };
            norms(rig, &ops, precision, rows, width, &mut outcomes)?;
            activations(rig, &ops, precision, rows, width, &mut outcomes)?;
            moves(rig, &ops, precision, rows, width, &mut outcomes)?;
        }
        // More rows than a grid's y or z could count.
        moves(rig, &ops, precision, 70_000, 16, &mut outcomes)?;
        norms(rig, &ops, precision, 70_000, 16, &mut outcomes)?;
        // Enough rows for a warp or two each, on any GPU that there is.
        for width in [8, 264, 2048, 2056, 4096] {
            let rows = rig.random.between(401, 600);
            norms(rig, &ops, precision, rows, width, &mut outcomes)?;
        }
        for (heads, kv_heads, head_dim) in [
            (32, 4, 64),
            (32, 8, 128),
            (3, 3, 24),
            (16, 1, 16),
            (6, 2, 256),
            (2, 2, 40),
            (7, 1, 80),
            (4, 2, 12),
            (3, 1, 6),
            (2, 2, 250),
        ] {
            let shape = QkvShape { heads, kv_heads, head_dim };
            head_norms(rig, &ops, precision, shape, &mut outcomes)?;
            for kv_dtype in [KvDtype::Same, KvDtype::Fp8] {
                let tokens_per_block = rig.random.pick(&[1, 4, 32, 64]);
                rotation(rig, &ops, precision, shape, tokens_per_block, kv_dtype, &mut outcomes)?;
            }
        }
        weights(rig, precision, &mut outcomes)?;
    }
    Ok(outcomes)
}

fn norms(
    rig: &mut Rig,
    ops: &RowOps,
    precision: Precision,
    rows: usize,
    width: usize,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let (dtype, eps) = (precision.suffix(), 1e-5);
    let case = format!("{rows} rows of {width}");
    let count = rows * width;
    let mut weight: Vec<f32> = rig.random.normals(width, 0.3);
    weight.iter_mut().for_each(|w| *w += 1.0);
    let mut delta = rig.random.normals(count, 1.0);
    let start = rig.random.normals(count, 3.0);
    let device_weight = rig.upload(&weight)?;
    let device_delta = rig.upload_rounded(&mut delta, precision)?;
    let mut plain = vec![0.0; count];
    rig.cpu.rms_norm(&start, &weight, eps, &mut plain);
    let (mut sum, mut added) = (start.clone(), vec![0.0; count]);
    rig.cpu.add_rms_norm(&mut sum, &delta, &weight, eps, &mut added);
    for add in [false, true] {
        let (expected, expected_hidden) = if add { (&added, &sum) } else { (&plain, &start) };
        let name = if add { "add_rms_norm" } else { "rms_norm" };
        let mut values = start.clone();
        let hidden = rig.in_place(&mut values, Precision::F32)?;
        let out = rig.output_of(count, precision)?;
        let args = NormArgs {
            hidden: hidden.ptr(),
            delta: add.then(|| device_delta.ptr()),
            weight: device_weight.ptr(),
            eps,
            out: out.ptr(),
            scales: None,
            rows,
            width,
        };
        // SAFETY: inputs and outputs were made for this case, and live until the result was read.
        unsafe { ops.rms_norm(rig.gpu, &args) }?;
        let found = out.read(rig.gpu, precision)?;
        outcomes.push(Outcome::compared((name, dtype), &*case, &found, expected, tolerance(precision)));
        let found = hidden.read(rig.gpu, Precision::F32)?;
        outcomes.push(Outcome::exact((name, dtype), format!("{case}, hidden"), &found, expected_hidden));

        let hidden = rig.in_place(&mut values, Precision::F32)?;
        let (codes, scales) = (rig.output(count, 1)?, rig.output(rows, 4)?);
        let args = NormArgs { hidden: hidden.ptr(), out: codes.ptr(), scales: Some(scales.ptr()), ..args };
        // SAFETY: inputs and outputs were made for this case, and live until the result was read.
        unsafe { ops.rms_norm(rig.gpu, &args) }?;
        let name = if add { "add_rms_norm_fp8" } else { "rms_norm_fp8" };
        let found = hidden.read(rig.gpu, Precision::F32)?;
        outcomes.push(Outcome::exact((name, dtype), format!("{case}, hidden"), &found, expected_hidden));
        quantized(rig, (name, dtype), &case, (&codes, &scales), expected, width, outcomes)?;
    }
    Ok(())
}

/// Codes times scales against the values, and scales against what they are defined to be.
fn quantized(
    rig: &Rig,
    name: (&str, &str),
    case: &str,
    (codes, scales): (&rig::Output, &rig::Output),
    expected: &[f32],
    width: usize,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let scales = scales.read(rig.gpu, Precision::F32)?;
    let largest = |row: &[f32]| (row.iter().fold(0.0f32, |a, x| a.max(x.abs())) / 448.0).max(1e-12);
    let wanted: Vec<f32> = expected.chunks_exact(width).map(largest).collect();
    outcomes.push(Outcome::compared(name, format!("{case}, scales"), &scales, &wanted, 1e-5));
    let mut found = codes.read_fp8(rig.gpu)?;
    for (row, scale) in found.chunks_exact_mut(width).zip(&scales) {
        row.iter_mut().for_each(|x| *x *= scale);
    }
    outcomes.push(Outcome::compared(name, case, &found, expected, FP8_TOLERANCE));
    Ok(())
}

fn activations(
    rig: &mut Rig,
    ops: &RowOps,
    precision: Precision,
    rows: usize,
    inter: usize,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let dtype = precision.suffix();
    let case = format!("{rows} rows of {inter}");
    let count = rows * inter;
    let mut gate_up = rig.random.normals(2 * count, 3.0);
    // Far out on both sides, where exp is 0 or beyond the largest number.
    gate_up[0] = -200.0;
    gate_up[inter - 1] = 200.0;
    let device = rig.upload_rounded(&mut gate_up, precision)?;
    let mut expected = vec![0.0; count];
    rig.cpu.silu_mul(&gate_up, inter, &mut expected);
    let out = rig.output_of(count, precision)?;
    // SAFETY: inputs and outputs were made for this case, and live until the result was read.
    unsafe { ops.silu_mul(rig.gpu, device.ptr(), out.ptr(), rows, inter) }?;
    let found = out.read(rig.gpu, precision)?;
    outcomes.push(Outcome::compared(("silu_mul", dtype), &*case, &found, &expected, tolerance(precision)));

    let (codes, scales) = (rig.output(count, 1)?, rig.output(rows, 4)?);
    // SAFETY: inputs and outputs were made for this case, and live until the result was read.
    unsafe { ops.silu_mul_fp8(rig.gpu, device.ptr(), codes.ptr(), scales.ptr(), rows, inter) }?;
    quantized(rig, ("silu_mul_fp8", dtype), &case, (&codes, &scales), &expected, inter, outcomes)?;

    let mut x = rig.random.normals(count, 0.5);
    x[..inter].fill(0.0);
    let device = rig.upload_rounded(&mut x, precision)?;
    let (codes, scales) = (rig.output(count, 1)?, rig.output(rows, 4)?);
    // SAFETY: inputs and outputs were made for this case, and live until the result was read.
    unsafe { ops.quantize_rows(rig.gpu, device.ptr(), codes.ptr(), scales.ptr(), rows, inter) }?;
    quantized(rig, ("quantize_rows", dtype), &case, (&codes, &scales), &x, inter, outcomes)
}

/// Embedding, gathering, bias.
fn moves(
    rig: &mut Rig,
    ops: &RowOps,
    precision: Precision,
    rows: usize,
    width: usize,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let dtype = precision.suffix();
    let case = format!("{rows} rows of {width}");
    let vocab = 19;
    let mut table = rig.random.normals(vocab * width, 1.0);
    let device_table = rig.upload_rounded(&mut table, precision)?;
    let tokens = rig.random.tokens(rows, vocab);
    let last = rig.random.tokens(5, vocab);
    let from_sampled: Vec<i32> = (0..rows).map(|_| rig.random.below(6) as i32 - 1).collect();
    let ids: Vec<u32> = tokens
        .iter()
        .zip(&from_sampled)
        .map(|(token, &place)| usize::try_from(place).map_or(*token, |place| last[place]))
        .collect();
    let row_of = |ids: &[u32]| -> Vec<f32> {
        ids.iter().flat_map(|&id| &table[id as usize * width..(id as usize + 1) * width]).copied().collect()
    };
    let (device_tokens, device_last) = (rig.upload(&tokens)?, rig.upload(&last)?);
    let device_from = rig.upload(&from_sampled)?;
    let hidden = rig.output(rows * width, 4)?;
    let args = EmbedArgs {
        tokens: device_tokens.ptr(),
        from_sampled: device_from.ptr(),
        last_tokens: device_last.ptr(),
        table: device_table.ptr(),
        hidden: hidden.ptr(),
        rows,
        width,
    };
    // SAFETY: inputs and outputs were made for this case, and live until the result was read.
    unsafe { ops.embed(rig.gpu, &args) }?;
    let found = hidden.read(rig.gpu, Precision::F32)?;
    outcomes.push(Outcome::exact(("embed", dtype), &*case, &found, &row_of(&ids)));

    let out = rig.output_of(rows * width, precision)?;
    // SAFETY: inputs and outputs were made for this case, and live until the result was read.
    unsafe { ops.gather_rows(rig.gpu, device_table.ptr(), device_tokens.ptr(), out.ptr(), rows, width) }?;
    let found = out.read(rig.gpu, precision)?;
    outcomes.push(Outcome::exact(("gather_rows", dtype), &*case, &found, &row_of(&tokens)));

    let bias = rig.random.normals(width, 1.0);
    let device_bias = rig.upload(&bias)?;
    let mut x = rig.random.normals(rows * width, 1.0);
    let out = rig.in_place(&mut x, precision)?;
    // SAFETY: inputs and outputs were made for this case, and live until the result was read.
    unsafe { ops.add_bias(rig.gpu, out.ptr(), device_bias.ptr(), rows, width) }?;
    let expected: Vec<f32> = x.iter().enumerate().map(|(i, x)| x + bias[i % width]).collect();
    let found = out.read(rig.gpu, precision)?;
    outcomes.push(Outcome::compared(("add_bias", dtype), case, &found, &expected, tolerance(precision)));
    Ok(())
}

fn head_norms(
    rig: &mut Rig,
    ops: &RowOps,
    precision: Precision,
    shape: QkvShape,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let rows = rig.random.between(1, 50);
    let mut qkv = rig.random.normals(rows * shape.row(), 2.0);
    let (q, k) = (rig.random.normals(shape.head_dim, 1.0), rig.random.normals(shape.head_dim, 1.0));
    let (device_q, device_k) = (rig.upload(&q)?, rig.upload(&k)?);
    let device = rig.in_place(&mut qkv, precision)?;
    let (heads, kv_heads, head_dim) = (shape.heads, shape.kv_heads, shape.head_dim);
    // SAFETY: inputs and outputs were made for this case, and live until the result was read.
    unsafe {
        ops.qk_norm(rig.gpu, device.ptr(), device_q.ptr(), device_k.ptr(), 1e-6, rows, heads, kv_heads, head_dim)
    }?;
    rig.cpu.qk_norm(&mut qkv, shape, &q, &k, 1e-6);
    let found = device.read(rig.gpu, precision)?;
    let case = format!("{rows} rows, {shape:?}");
    outcomes.push(Outcome::compared(("qk_norm", precision.suffix()), case, &found, &qkv, tolerance(precision)));
    Ok(())
}

fn rotation(
    rig: &mut Rig,
    ops: &RowOps,
    precision: Precision,
    shape: QkvShape,
    tokens_per_block: usize,
    kv_dtype: KvDtype,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let QkvShape { heads, kv_heads, head_dim } = shape;
    let (rows, positions, half) = (rig.random.between(1, 60), 100, head_dim / 2);
    let blocks = rows.div_ceil(tokens_per_block) + 2;
    let angles: Vec<f32> = rig.random.normals(positions * half, 3.0);
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let places: Vec<i32> = rig.random.tokens(rows, positions).into_iter().map(|p| p as i32).collect();
    let mut slots: Vec<i32> = rig.random.permutation(blocks * tokens_per_block).into_iter().map(|s| s as i32).collect();
    slots.truncate(rows);
    slots.iter_mut().step_by(5).for_each(|slot| *slot = -1);
    let mut qkv = rig.random.normals(rows * shape.row(), 2.0);
    let device_qkv = rig.in_place(&mut qkv, precision)?;
    let cache_bytes = if kv_dtype == KvDtype::Fp8 { 1 } else { precision.bytes() };
    let cache = rig.output(blocks * 2 * kv_heads * tokens_per_block * head_dim, cache_bytes)?;
    let (device_cos, device_sin) = (rig.upload(&cos)?, rig.upload(&sin)?);
    let (device_positions, device_slots) = (rig.upload(&places)?, rig.upload(&slots)?);
    let args = RopeArgs {
        qkv: device_qkv.ptr(),
        cos: device_cos.ptr(),
        sin: device_sin.ptr(),
        positions: device_positions.ptr(),
        slots: device_slots.ptr(),
        kv: cache.ptr(),
        rows,
        heads,
        kv_heads,
        head_dim,
        tokens_per_block,
        kv_dtype,
    };
    // SAFETY: inputs and outputs were made for this case, and live until the result was read.
    unsafe { ops.rope_kv_write(rig.gpu, &args) }?;

    for (row, place) in qkv.chunks_exact_mut(shape.row()).zip(&places) {
        for head in row[..(heads + kv_heads) * head_dim].chunks_exact_mut(head_dim) {
            for i in 0..half {
                let (a, b) = (head[i], head[i + half]);
                let angle = *place as usize * half + i;
                head[i] = a * cos[angle] - b * sin[angle];
                head[i + half] = b * cos[angle] + a * sin[angle];
            }
        }
    }
    let found_qkv = device_qkv.read(rig.gpu, precision)?;
    let case = format!("{rows} rows, {shape:?}, blocks of {tokens_per_block}, cache {kv_dtype:?}");
    let name = ("rope_kv_write", precision.suffix());
    outcomes.push(Outcome::compared(name, &*case, &found_qkv, &qkv, tolerance(precision)));

    // The cache holds what stands in qkv, and elsewhere still the poison.
    let bytes = cache.bytes(rig.gpu)?;
    let mut wanted = vec![0xffu8; bytes.len()];
    for (row, slot) in found_qkv.chunks_exact(shape.row()).zip(&slots) {
        let Ok(slot) = usize::try_from(*slot) else { continue };
        for (head, values) in row[heads * head_dim..].chunks_exact(head_dim).enumerate() {
            let (which, kv_head) = (head / kv_heads, head % kv_heads);
            let block = slot / tokens_per_block;
            let place = ((block * 2 + which) * kv_heads + kv_head) * tokens_per_block + slot % tokens_per_block;
            let encoded = match kv_dtype {
                KvDtype::Same => rig::encode(values, precision),
                KvDtype::Fp8 => values.iter().map(|&x| rig::fp8_code(x)).collect(),
            };
            let start = place * head_dim * cache_bytes;
            wanted[start..start + encoded.len()].copy_from_slice(&encoded);
        }
    }
    outcomes.push(Outcome::exact(name, format!("{case}, cache"), &bytes, &wanted));
    Ok(())
}

fn weights(rig: &mut Rig, precision: Precision, outcomes: &mut Vec<Outcome>) -> Result<(), CudaError> {
    let ops = WeightOps::new(rig.gpu, precision)?;
    let dtype = precision.suffix();
    for (start, count) in [(0u64, 1usize), (7, 1001), (5_000_000_000, 300_000)] {
        let tensor = RandomTensor::new(rig.random.bits(), "model.layers.3.mlp.down_proj.weight");
        let mut expected = vec![0.0; count];
        tensor.fill_normal(start, 0.02, &mut expected);
        rig::round(&mut expected, precision);
        let out = rig.output_of(count, precision)?;
        // SAFETY: inputs and outputs were made for this case, and live until the result was read.
        unsafe { ops.random_normal(rig.gpu, out.ptr(), precision, tensor.key(), start, count as u64, 0.02) }?;
        let found = out.read(rig.gpu, precision)?;
        let case = format!("{count} elements from {start}");
        outcomes.push(Outcome::exact(("random_normal", dtype), case, &found, &expected));
    }
    for (n, k) in [(1, 1), (31, 64), (33, 65), (2560, 200)] {
        let mut rows = rig.random.normals(n * k, 1.0);
        rig::round(&mut rows, precision);
        let mut packed = vec![0.0f32; packed_len(n, k)];
        pack_panels(|row, out: &mut [f32]| out.copy_from_slice(&rows[row * k..(row + 1) * k]), n, k, &mut packed);
        let device = rig.upload(&rig::encode(&packed, precision))?;
        let out = rig.output_of(n * k, precision)?;
        // SAFETY: inputs and outputs were made for this case, and live until the result was read.
        unsafe { ops.unpack_panels(rig.gpu, device.ptr(), out.ptr(), n, k) }?;
        let found = out.read(rig.gpu, precision)?;
        outcomes.push(Outcome::exact(("unpack_panels", dtype), format!("{n} x {k}"), &found, &rows));

        let device = rig.upload(&rig::encode(&rows, precision))?;
        let (codes, scales) = (rig.output(n * k, 1)?, rig.output(n, 4)?);
        // SAFETY: inputs and outputs were made for this case, and live until the result was read.
        unsafe { ops.quantize_weight(rig.gpu, device.ptr(), codes.ptr(), scales.ptr(), n, k) }?;
        let name = ("quantize_weight", dtype);
        quantized(rig, name, &format!("{n} x {k}"), (&codes, &scales), &rows, k, outcomes)?;
    }
    let out = rig.output(1001, 4)?;
    // SAFETY: inputs and outputs were made for this case, and live until the result was read.
    unsafe { ops.fill_f32(rig.gpu, out.ptr(), 1.5, 1001) }?;
    let found = out.read(rig.gpu, Precision::F32)?;
    outcomes.push(Outcome::exact(("fill", "f32"), "1001 elements", &found, &[1.5f32; 1001]));
    Ok(())
}
