//! Rotary position embedding of q and k, and the writing of k and v into the paged cache.

use half::{bf16, f16};

use crate::cpu::{Cpu, SharedMut};
use crate::kv::{AttnBatch, KvGeometry, KvLayer, KvType, QkvShape, RopeTable};
use crate::rows::for_row_ranges;
use crate::simd::{Element, Kernel, Simd, dispatch};

impl Cpu {
    /// Rotates q and k of each row in place (first half of a head against its second half), then writes k and v of the
    /// row into the cache.
    ///
    /// # Panics
    /// When a length does not fit, a position is beyond the table, or a block table is too short.
    pub fn rope_kv_write(
        &mut self,
        qkv: &mut [f32],
        shape: QkvShape,
        rope: &RopeTable,
        batch: &AttnBatch<'_>,
        kv: &mut KvLayer<'_>,
    ) {
        kv.check(shape, batch);
        assert_eq!(2 * rope.half, shape.head_dim, "head_dim must be twice the half of the rope table");
        assert_eq!(rope.cos.len(), rope.sin.len(), "cos and sin of the rope table");
        let geometry = kv.geometry;
        match geometry.kind {
            KvType::F32 => self.rope_write(qkv, shape, rope, batch, &geometry, Plain::<f32>::new(kv.data)),
            KvType::F16 => self.rope_write(qkv, shape, rope, batch, &geometry, Plain::<f16>::new(kv.data)),
            KvType::Bf16 => self.rope_write(qkv, shape, rope, batch, &geometry, Plain::<bf16>::new(kv.data)),
            KvType::Int8 => self.rope_write(qkv, shape, rope, batch, &geometry, Codes(SharedMut::new(kv.data))),
        }
    }

    fn rope_write(
        &mut self,
        qkv: &mut [f32],
        shape: QkvShape,
        rope: &RopeTable,
        batch: &AttnBatch<'_>,
        geometry: &KvGeometry,
        cache: impl CacheWriter,
    ) {
        let (tier, row_len, d) = (self.tier, shape.row(), shape.head_dim);
        let qkv = SharedMut::new(qkv);
        for_row_ranges(&mut self.pool, batch.rows(), row_len, &|rows| {
            batch.for_rows(rows, |seq, i| {
                let position = seq.first_position() + i;
                // SAFETY: each row of the batch belongs to one sequence, and each range has its own rows.
                let row = unsafe { qkv.slice((seq.q_start as usize + i) * row_len, row_len) };
                let (rotated, values) = row.split_at_mut((shape.heads + shape.kv_heads) * d);
                let angles = position * rope.half..(position + 1) * rope.half;
                let (cos, sin) = (&rope.cos[angles.clone()], &rope.sin[angles]);
                for head in rotated.chunks_exact_mut(d) {
                    // SAFETY: plain slices; the halves have the length of the angles.
                    unsafe { dispatch(tier, Rotate { head, cos, sin }) };
                }
                let keys = &rotated[shape.heads * d..];
                let (block, token) = batch.block(seq, position, geometry.tokens_per_block);
                for head in 0..geometry.kv_heads {
                    let own = head * d..(head + 1) * d;
                    // SAFETY: positions of a step are distinct, and `check` looked at every block.
                    unsafe { cache.write(geometry, (block, head, token), &keys[own.clone()], &values[own]) };
                }
            });
        });
    }
}

/// How a head of a position is stored.
trait CacheWriter: Sync {
    /// Writes key and value at `(block, head, token)`.
    ///
    /// # Safety
    /// No other thread reads or writes this position.
    unsafe fn write(&self, geometry: &KvGeometry, at: (usize, usize, usize), key: &[f32], value: &[f32]);
}

/// Elements that stand for themselves.
struct Plain<T>(SharedMut<T>);

impl<T: Element + bytemuck::Pod> Plain<T> {
    fn new(data: &mut [u8]) -> Plain<T> {
        Plain(SharedMut::new(bytemuck::cast_slice_mut(data)))
    }
}

impl<T: Element> CacheWriter for Plain<T> {
    unsafe fn write(&self, geometry: &KvGeometry, at: (usize, usize, usize), key: &[f32], value: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe { write_elements(&self.0, geometry, at, key, value, T::from_f32, T::from_f32) };
    }
}

/// 8-bit codes and their scales.
struct Codes(SharedMut<u8>);

impl CacheWriter for Codes {
    unsafe fn write(&self, geometry: &KvGeometry, at: (usize, usize, usize), key: &[f32], value: &[f32]) {
        let (key_scale, value_scale) = (code_scale(key), code_scale(value));
        // A scale of zero, or none: all codes are 0.
        let inverse = |scale: f32| if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let (per_key, per_value) = (inverse(key_scale), inverse(value_scale));
        let (block, head, token) = at;
        // SAFETY: the caller's promise; scales are f32s within the layer, whose start is aligned for them.
        unsafe {
            let (to_key, to_value) = (|x| i8::from_f32(x * per_key) as u8, |x| i8::from_f32(x * per_value) as u8);
            write_elements(&self.0, geometry, at, key, value, to_key, to_value);
            for (keys, scale) in [(true, key_scale), (false, value_scale)] {
                let offset = size_of::<f32>() * geometry.scale_offset(block, head, token, keys);
                self.0.slice(offset, size_of::<f32>()).copy_from_slice(&scale.to_ne_bytes());
            }
        }
    }
}

/// What one code is worth, so that the largest magnitude is 127. What is not finite must not pass unnoticed, so the
/// scale is NaN then.
fn code_scale(x: &[f32]) -> f32 {
    let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    if x.iter().all(|x| x.is_finite()) { max / 127.0 } else { f32::NAN }
}

/// Writes the elements of one head of one position.
///
/// # Safety
/// No other thread reads or writes this position.
unsafe fn write_elements<T: Copy + Default>(
    cache: &SharedMut<T>,
    geometry: &KvGeometry,
    (block, head, token): (usize, usize, usize),
    key: &[f32],
    value: &[f32],
    to_key: impl Fn(f32) -> T,
    to_value: impl Fn(f32) -> T,
) {
    // Neighbouring positions lie between the dimensions of this one, so no slice may span them.
    let offset = geometry.key_offset(block, head, token);
    for (i, &x) in key.iter().enumerate() {
        // SAFETY: within the layer, and this element belongs to this position alone.
        unsafe { cache.slice(offset + i * geometry.lanes(), 1)[0] = to_key(x) };
    }
    // SAFETY: the value row belongs to this position alone.
    let row = unsafe { cache.slice(geometry.value_offset(block, head, token), geometry.padded_dim()) };
    let (row, padding) = row.split_at_mut(value.len());
    for (slot, &x) in row.iter_mut().zip(value) {
        *slot = to_value(x);
    }
    padding.fill(T::default());
}

/// One head of one position.
struct Rotate<'a> {
    head: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    fn scalar(self) {
        let (first, second) = self.head.split_at_mut(self.cos.len());
        for i in 0..first.len() {
            let (a, b) = (first[i], second[i]);
            first[i] = a * self.cos[i] - b * self.sin[i];
            second[i] = b * self.cos[i] + a * self.sin[i];
        }
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let half = self.cos.len();
        let (first, second) = self.head.split_at_mut(half);
        let mut i = 0;
        while i < half {
            let n = S::LANES.min(half - i);
            // SAFETY: `n` elements are left in each slice.
            unsafe {
                let (a, b) = (S::load_partial(first.as_ptr().add(i), n), S::load_partial(second.as_ptr().add(i), n));
                let (cos, sin) =
                    (S::load_partial(self.cos.as_ptr().add(i), n), S::load_partial(self.sin.as_ptr().add(i), n));
                S::store_partial(first.as_mut_ptr().add(i), S::sub(S::mul(a, cos), S::mul(b, sin)), n);
                S::store_partial(second.as_mut_ptr().add(i), S::add(S::mul(b, cos), S::mul(a, sin)), n);
            }
            i += n;
        }
    }
}
