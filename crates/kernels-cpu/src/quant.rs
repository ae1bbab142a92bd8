//! Weights of 8 and 4 bits: how they are stored, made and read back.
//!
//! Both kinds are packed in panels of 32 output rows, one run of bytes per panel, the same on every machine. k is padded
//! with zero weights to a multiple of 32, rows beyond `n` are zero weights.
//!
//! - **Int8**: blocks of 256 inputs (the last one may be shorter). A block is its codes `[inputs / 4][32 rows][4]`, each
//!   `q + 128` with q from -127 to 127, then 32 f32 scales, one per row.
//! - **Int4**: groups of 32 inputs. A group is 512 bytes of codes `[4][32 rows][4]`, where the byte at (s, row, i) holds
//!   the code of input `8 s + i` in its lower half and that of input `8 s + 4 + i` in its upper half, each `q + 8` with
//!   q from -8 to 7; then 32 f16 scales, one per row.

use half::f16;

use crate::matrix::PANEL;

/// Inputs that share one scale of an activation, and of an int8 weight.
pub(crate) const BLOCK: usize = 256;
/// Inputs that share one scale of an int4 weight; k is padded to a multiple of it.
pub(crate) const GROUP: usize = 32;
/// Bytes of a group of int4 codes of a panel, and with their scales.
pub(crate) const INT4_CODES: usize = GROUP / 2 * PANEL;
pub(crate) const INT4_GROUP: usize = INT4_CODES + PANEL * size_of::<f16>();
/// What is added to codes so that they have no sign.
pub(crate) const INT8_OFFSET: i32 = 128;
pub(crate) const INT4_OFFSET: i32 = 8;
/// The largest code of an int8 weight or activation.
pub(crate) const INT8_MAX: f32 = 127.0;
/// Below this a block counts as zero, since the inverse of its scale would overflow.
pub(crate) const SMALLEST: f32 = 1e-36;

/// How many bits a quantised weight has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantKind {
    /// 8 bits, one scale per output row and 256 inputs.
    Int8,
    /// 4 bits, one scale per output row and 32 inputs.
    Int4,
}

/// Bytes from one block of 256 inputs to the next within a panel.
pub(crate) fn block_stride(kind: QuantKind) -> usize {
    match kind {
        QuantKind::Int8 => BLOCK * PANEL + PANEL * size_of::<f32>(),
        QuantKind::Int4 => BLOCK / GROUP * INT4_GROUP,
    }
}

/// Bytes of one panel of a weight with `k` inputs.
pub fn panel_bytes(kind: QuantKind, k: usize) -> usize {
    let padded = k.next_multiple_of(GROUP);
    match kind {
        QuantKind::Int8 => padded * PANEL + k.div_ceil(BLOCK) * PANEL * size_of::<f32>(),
        QuantKind::Int4 => padded / GROUP * INT4_GROUP,
    }
}

/// Bytes of a quantised weight, padding included.
pub fn packed_bytes(kind: QuantKind, n: usize, k: usize) -> usize {
    n.div_ceil(PANEL) * panel_bytes(kind, k)
}

/// The shape under which a quantised weight is stored as a tensor of bytes: `[panels, bytes of a panel]`.
pub fn packed_shape(kind: QuantKind, n: usize, k: usize) -> [usize; 2] {
    [n.div_ceil(PANEL), panel_bytes(kind, k)]
}

/// Quantises panel number `panel` (rows `32 * panel ..`) into `dst` ([`panel_bytes`] long): `src_row(row, values)` fills
/// the `k` values of one row. Uses `buffer` for one row. [`crate::Cpu::quantize`] does all panels on all workers.
///
/// A block or group with a NaN, an infinity or a value beyond the range of its scale gets the scale NaN: what cannot be
/// represented must not look right.
///
/// # Panics
/// When `dst` has another length.
pub fn quantize_panel(
    kind: QuantKind,
    src_row: &impl Fn(usize, &mut [f32]),
    n: usize,
    k: usize,
    panel: usize,
    buffer: &mut Vec<f32>,
    dst: &mut [u8],
) {
    assert_eq!(dst.len(), panel_bytes(kind, k), "bytes of a quantized panel with k = {k}");
    buffer.clear();
    buffer.resize(k.next_multiple_of(GROUP), 0.0);
    for lane in 0..PANEL {
        let row = panel * PANEL + lane;
        if row < n {
            src_row(row, &mut buffer[..k]);
        } else {
            buffer.fill(0.0);
        }
        match kind {
            QuantKind::Int8 => {
                for (values, block) in buffer.chunks(BLOCK).zip(dst.chunks_mut(block_stride(kind))) {
                    quantize_block_int8(values, lane, block);
                }
            }
            QuantKind::Int4 => {
                for (values, group) in buffer.as_chunks::<GROUP>().0.iter().zip(dst.chunks_exact_mut(INT4_GROUP)) {
                    quantize_group_int4(values, lane, group);
                }
            }
        }
    }
}

/// The largest magnitude, or NaN when some value is not finite. As integers, magnitudes order like the numbers, with
/// NaN on top, so that none is lost.
pub(crate) fn largest(values: &[f32]) -> f32 {
    let bits = values.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff));
    let largest = f32::from_bits(bits);
    if largest.is_finite() { largest } else { f32::NAN }
}

/// The scale of 8-bit codes for values up to `largest`, and its inverse.
pub(crate) fn int8_scale(largest: f32) -> (f32, f32) {
    if largest.is_nan() {
        (f32::NAN, 0.0)
    } else if largest < SMALLEST {
        (0.0, 0.0)
    } else {
        (largest / INT8_MAX, INT8_MAX / largest)
    }
}

/// `x` rounded to the nearest whole number, ties to even, for magnitudes below 2^22. Unlike `f32::round_ties_even` this
/// becomes two additions on any machine.
#[inline(always)]
fn round(x: f32) -> f32 {
    const SHIFT: f32 = (3 << 22) as f32;
    (x + SHIFT) - SHIFT
}

/// The 8-bit code of `x`; 0 for what is not a number.
pub(crate) fn int8_code(x: f32, inverse: f32) -> i8 {
    if inverse == 0.0 { 0 } else { round(x * inverse) as i8 }
}

fn quantize_block_int8(values: &[f32], lane: usize, block: &mut [u8]) {
    let (scale, inverse) = int8_scale(largest(values));
    let (codes, scales) = block.split_at_mut(values.len() * PANEL);
    for (values, codes) in values.chunks_exact(4).zip(codes.chunks_exact_mut(4 * PANEL)) {
        for (x, code) in values.iter().zip(&mut codes[4 * lane..]) {
            *code = (i32::from(int8_code(*x, inverse)) + INT8_OFFSET) as u8;
        }
    }
    scales[4 * lane..4 * lane + 4].copy_from_slice(&scale.to_le_bytes());
}

fn quantize_group_int4(values: &[f32; GROUP], lane: usize, group: &mut [u8]) {
    let mut codes = [0.0; GROUP];
    let scale = fit_int4(values, &mut codes);
    let (nibbles, scales) = group.split_at_mut(INT4_CODES);
    let code = |i: usize| (codes[i] as i32 + INT4_OFFSET) as u8;
    for s in 0..GROUP / 8 {
        for i in 0..4 {
            nibbles[4 * PANEL * s + 4 * lane + i] = code(8 * s + i) | code(8 * s + 4 + i) << 4;
        }
    }
    scales[2 * lane..2 * lane + 2].copy_from_slice(&scale.to_le_bytes());
}

/// Codes at which the largest value of a group is tried to end up, the whole range first: values that came from such a
/// grid are then found again exactly.
const INT4_PEAKS: [f32; 6] = [-8.0, -7.0, -7.5, -8.5, -9.0, 7.5];

/// The scale and the codes (-8 to 7) of a group with the least squared error among a few candidates.
fn fit_int4(values: &[f32; GROUP], codes: &mut [f32; GROUP]) -> f16 {
    codes.fill(0.0);
    let size = largest(values);
    if size.is_nan() || size > -INT4_PEAKS[0] * f16::MAX.to_f32_const() {
        return f16::NAN;
    }
    if size < SMALLEST {
        return f16::ZERO;
    }
    let peak = values.iter().copied().find(|x| x.abs() == size).unwrap_or(size);
    let mut best = (f32::INFINITY, f16::ZERO);
    let mut trial = [0.0; GROUP];
    for target in INT4_PEAKS {
        let mut scale = f16_scale(peak / target);
        let mut error = int4_codes(values, scale, &mut trial);
        if error > 0.0 {
            // With the codes fixed, the best scale follows by least squares.
            let dot = sum_group(|i| values[i] * trial[i]);
            let norm = sum_group(|i| trial[i] * trial[i]);
            if norm > 0.0 && dot.is_finite() {
                scale = f16_scale(dot / norm);
                error = int4_codes(values, scale, &mut trial);
            }
        }
        if error < best.0 {
            best = (error, scale);
            *codes = trial;
        }
        if error == 0.0 {
            break;
        }
    }
    best.1
}

/// Saturates: a scale beyond the range of f16 becomes the largest number, not infinity.
fn f16_scale(scale: f32) -> f16 {
    f16::from_f32(scale.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const()))
}

/// The nearest codes for a scale, and the squared error they leave.
fn int4_codes(values: &[f32; GROUP], scale: f16, codes: &mut [f32; GROUP]) -> f32 {
    let scale = scale.to_f32();
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = round((x * inverse).clamp(-8.0, 7.0));
    }
    sum_group(|i| {
        let off = values[i] - scale * codes[i];
        off * off
    })
}

/// The sum over a group, of eight sums side by side: one alone would wait for each addition.
#[inline(always)]
fn sum_group(term: impl Fn(usize) -> f32) -> f32 {
    let mut sums = [0.0; 8];
    for i in (0..GROUP).step_by(8) {
        for (j, sum) in sums.iter_mut().enumerate() {
            *sum += term(i + j);
        }
    }
    sums.iter().sum()
}

/// Value (lane, column) of an int8 panel.
pub(crate) fn get_int8(panel: &[u8], k: usize, lane: usize, column: usize) -> f32 {
    let (block, inner) = (column / BLOCK, column % BLOCK);
    let codes = BLOCK.min(k.next_multiple_of(GROUP) - block * BLOCK) * PANEL;
    let block = &panel[block * block_stride(QuantKind::Int8)..];
    let code = i32::from(block[inner / 4 * 4 * PANEL + 4 * lane + inner % 4]) - INT8_OFFSET;
    code as f32 * int8_scale_at(&block[codes..], lane)
}

pub(crate) fn int8_scale_at(scales: &[u8], lane: usize) -> f32 {
    let bytes = &scales[4 * lane..4 * lane + 4];
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Value (lane, column) of an int4 panel.
pub(crate) fn get_int4(panel: &[u8], lane: usize, column: usize) -> f32 {
    let group = &panel[column / GROUP * INT4_GROUP..];
    int4_code(group, lane, column % GROUP) as f32 * int4_scale_at(group, lane)
}

pub(crate) fn int4_code(group: &[u8], lane: usize, inner: usize) -> i32 {
    let both = group[inner / 8 * 4 * PANEL + 4 * lane + inner % 4];
    i32::from(both >> (inner % 8 / 4 * 4) & 15) - INT4_OFFSET
}

pub(crate) fn int4_scale_at(group: &[u8], lane: usize) -> f32 {
    let bytes = &group[INT4_CODES + 2 * lane..INT4_CODES + 2 * lane + 2];
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}
