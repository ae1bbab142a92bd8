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
            KvType::F32 => self.rope_kv_write_of::<f32>(qkv, shape, rope, batch, geometry, kv.data),
            KvType::F16 => self.rope_kv_write_of::<f16>(qkv, shape, rope, batch, geometry, kv.data),
            KvType::Bf16 => self.rope_kv_write_of::<bf16>(qkv, shape, rope, batch, geometry, kv.data),
        }
    }

    fn rope_kv_write_of<T: Element + bytemuck::Pod>(
        &mut self,
        qkv: &mut [f32],
        shape: QkvShape,
        rope: &RopeTable,
        batch: &AttnBatch<'_>,
        geometry: KvGeometry,
        cache: &mut [u8],
    ) {
        let (tier, row_len, d) = (self.tier, shape.row(), shape.head_dim);
        let (qkv, cache) = (SharedMut::new(qkv), SharedMut::new(bytemuck::cast_slice_mut::<u8, T>(cache)));
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
                let slot = batch.block(seq, position, geometry.tokens_per_block);
                // SAFETY: positions of a step are distinct, and `check` looked at every block.
                unsafe { write_position(&geometry, &cache, slot, keys, values) };
            });
        });
    }
}

/// Writes all heads of one position.
///
/// # Safety
/// No other thread reads or writes this position.
unsafe fn write_position<T: Element>(
    geometry: &KvGeometry,
    cache: &SharedMut<T>,
    (block, token): (usize, usize),
    keys: &[f32],
    values: &[f32],
) {
    let d = geometry.head_dim;
    for head in 0..geometry.kv_heads {
        // Neighbouring positions lie between the dimensions of this one, so no slice may span them.
        let key = geometry.key_offset(block, head, token);
        for (i, &x) in keys[head * d..(head + 1) * d].iter().enumerate() {
            // SAFETY: within the layer, and this element belongs to this position alone.
            unsafe { cache.slice(key + i * geometry.lanes(), 1)[0] = T::from_f32(x) };
        }
        // SAFETY: the value row belongs to this position alone.
        let value = unsafe { cache.slice(geometry.value_offset(block, head, token), geometry.padded_dim()) };
        let (value, padding) = value.split_at_mut(d);
        for (slot, &x) in value.iter_mut().zip(&values[head * d..]) {
            *slot = T::from_f32(x);
        }
        padding.fill(T::default());
    }
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
