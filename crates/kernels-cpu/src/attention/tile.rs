//! Where a tile of keys or values is, and how it becomes f32.

use half::{bf16, f16};

use super::{Block, Cache, Job, TILE};
use crate::kv::{AttnBatch, KV_LANES, KvType, SeqSpan, padded_dim};
use crate::simd::{Element, Simd, SimdPairs};

/// Runs of 16 positions in a tile.
const GROUPS: usize = TILE / KV_LANES;

/// Where the runs of 16 positions of a tile are: keys as `[head_dim][16]`, values as `[16][padded head_dim]`.
pub(super) type TileParts<T> = [*const T; GROUPS];

/// A sequence's tile: positions `base..base + valid` of one kv head.
#[derive(Clone, Copy)]
pub(super) struct TileSpan<'a> {
    pub(super) batch: &'a AttnBatch<'a>,
    pub(super) seq: &'a SeqSpan,
    pub(super) kv_head: usize,
    pub(super) base: usize,
    pub(super) valid: usize,
}

impl<'a> TileSpan<'a> {
    /// The tile at `base` of a block that uses positions below `end`.
    #[inline(always)]
    pub(super) fn new(job: &Job<'a>, block: &Block<'a>, base: usize, end: usize) -> TileSpan<'a> {
        TileSpan { batch: job.batch, seq: block.seq, kv_head: block.kv_head, base, valid: TILE.min(end - base) }
    }
}

impl Cache<'_> {
    /// The keys of a tile: in place where the cache has the right form, else converted into `staging`. Positions from
    /// `valid` on hold anything.
    #[inline(always)]
    pub(super) unsafe fn keys<S: Simd>(&self, span: &TileSpan<'_>, staging: &mut [f32]) -> TileParts<f32> {
        // SAFETY: the caller has the features of `S`; `KvLayer::check` looked at sizes and block tables.
        unsafe {
            match self.geometry.kind {
                KvType::F32 if self.geometry.lanes() == KV_LANES => self.in_place(span, true),
                KvType::F32 => self.stage_keys::<S, f32>(span, staging),
                KvType::F16 => self.stage_keys::<S, f16>(span, staging),
                KvType::Bf16 => self.stage_keys::<S, bf16>(span, staging),
                KvType::Int8 => self.stage_keys::<S, i8>(span, staging),
            }
        }
    }

    /// The values of a tile, likewise.
    #[inline(always)]
    pub(super) unsafe fn values<S: Simd>(&self, span: &TileSpan<'_>, staging: &mut [f32]) -> TileParts<f32> {
        // SAFETY: as in `keys`.
        unsafe {
            match self.geometry.kind {
                KvType::F32 if self.geometry.lanes() == KV_LANES => self.in_place(span, false),
                KvType::F32 => self.stage_values::<S, f32>(span, staging),
                KvType::F16 => self.stage_values::<S, f16>(span, staging),
                KvType::Bf16 => self.stage_values::<S, bf16>(span, staging),
                KvType::Int8 => self.stage_values::<S, i8>(span, staging),
            }
        }
    }

    /// Where a run of 16 positions starts, as an element of the layer. Runs beyond the last valid position repeat the
    /// last run: they are computed, but never used.
    #[inline(always)]
    fn run(&self, span: &TileSpan<'_>, group: usize, keys: bool) -> usize {
        let position = span.base + (group * KV_LANES).min((span.valid - 1) / KV_LANES * KV_LANES);
        let (block, token) = span.batch.block(span.seq, position, self.geometry.tokens_per_block);
        if keys {
            self.geometry.key_offset(block, span.kv_head, token)
        } else {
            self.geometry.value_offset(block, span.kv_head, token)
        }
    }

    /// The runs of a tile as they are stored, 16 positions side by side.
    #[inline(always)]
    pub(super) unsafe fn in_place<T>(&self, span: &TileSpan<'_>, keys: bool) -> TileParts<T> {
        let mut parts = [std::ptr::null(); GROUPS];
        for (group, part) in parts.iter_mut().enumerate() {
            // SAFETY: within the layer.
            *part = unsafe { self.data.as_ptr().cast::<T>().add(self.run(span, group, keys)) };
        }
        parts
    }

    #[inline(always)]
    unsafe fn stage_keys<S: Simd, T: Element>(&self, span: &TileSpan<'_>, staging: &mut [f32]) -> TileParts<f32> {
        let (d, lanes) = (self.geometry.head_dim, self.geometry.lanes());
        let mut done = 0;
        while done < span.valid {
            let (block, token) = span.batch.block(span.seq, span.base + done, self.geometry.tokens_per_block);
            // SAFETY: a run of `lanes` keys lies within its block, and a run of 16 within `staging`.
            unsafe {
                let src = self.data.as_ptr().cast::<T>().add(self.geometry.key_offset(block, span.kv_head, token));
                let dst = staging.as_mut_ptr().add(done / KV_LANES * KV_LANES * d + done % KV_LANES);
                if lanes == KV_LANES {
                    convert::<S, T>(src, KV_LANES * d, dst);
                } else {
                    for i in 0..d {
                        for lane in 0..lanes {
                            *dst.add(i * KV_LANES + lane) = (*src.add(i * lanes + lane)).to_f32();
                        }
                    }
                }
            }
            done += lanes;
        }
        parts_of(staging, KV_LANES * d)
    }

    /// The scales of a tile's keys or values, where the cache has any; beyond `valid` they are 1.
    #[inline(always)]
    pub(super) unsafe fn scales(&self, span: &TileSpan<'_>, keys: bool) -> Option<[f32; TILE]> {
        if self.geometry.kind != KvType::Int8 {
            return None;
        }
        let mut scales = [1.0f32; TILE];
        let mut done = 0;
        while done < span.valid {
            let (block, token) = span.batch.block(span.seq, span.base + done, self.geometry.tokens_per_block);
            let run = (self.geometry.tokens_per_block - token).min(span.valid - done);
            // SAFETY: the scales of a block's tokens lie side by side.
            unsafe {
                let src = self.data.as_ptr().cast::<f32>();
                let src = src.add(self.geometry.scale_offset(block, span.kv_head, token, keys));
                std::ptr::copy_nonoverlapping(src, scales.as_mut_ptr().add(done), run);
            }
            done += run;
        }
        Some(scales)
    }

    /// The keys of a bfloat16 tile with dimensions in pairs, `[TILE / 16][head_dim / 2][16][2]`. Positions from `valid` on
    /// hold anything.
    #[inline(always)]
    pub(super) unsafe fn paired_keys<S: SimdPairs>(&self, span: &TileSpan<'_>, staging: &mut [f32]) -> TileParts<bf16> {
        let (d, lanes) = (self.geometry.head_dim, self.geometry.lanes());
        let staging = bytemuck::cast_slice_mut::<f32, bf16>(staging);
        let mut done = 0;
        while done < span.valid {
            let (block, token) = span.batch.block(span.seq, span.base + done, self.geometry.tokens_per_block);
            // SAFETY: a run of `lanes` keys lies within its block, and a run of 16 within `staging`.
            unsafe {
                let src = self.data.as_ptr().cast::<bf16>().add(self.geometry.key_offset(block, span.kv_head, token));
                let dst = staging.as_mut_ptr().add(done / KV_LANES * KV_LANES * d + done % KV_LANES * 2);
                for i in (0..d).step_by(2) {
                    if lanes == KV_LANES {
                        S::store(dst.add(i * KV_LANES), S::zip_halves(S::load(src.add(i * KV_LANES))));
                    } else {
                        for lane in 0..lanes {
                            *dst.add(i * KV_LANES + 2 * lane) = *src.add(i * lanes + lane);
                            *dst.add(i * KV_LANES + 2 * lane + 1) = *src.add((i + 1) * lanes + lane);
                        }
                    }
                }
            }
            done += lanes;
        }
        parts_of(staging, KV_LANES * d)
    }

    /// The values of a bfloat16 tile with positions in pairs, `[TILE / 2][padded head_dim][2]`. Positions from `valid` on
    /// hold anything.
    #[inline(always)]
    pub(super) unsafe fn paired_values<S: SimdPairs>(
        &self,
        span: &TileSpan<'_>,
        staging: &mut [f32],
    ) -> TileParts<bf16> {
        let row = padded_dim(self.geometry.head_dim);
        let staging = bytemuck::cast_slice_mut::<f32, bf16>(staging);
        let value = |position: usize| {
            let position = span.base + position.min(span.valid - 1);
            let (block, token) = span.batch.block(span.seq, position, self.geometry.tokens_per_block);
            // SAFETY: within the layer.
            unsafe { self.data.as_ptr().cast::<bf16>().add(self.geometry.value_offset(block, span.kv_head, token)) }
        };
        for position in (0..span.valid).step_by(2) {
            let (first, second) = (value(position), value(position + 1));
            for column in (0..row).step_by(KV_LANES) {
                // SAFETY: a value row is whole vectors long, and a pair of them lies within `staging`.
                unsafe {
                    let dst = staging.as_mut_ptr().add(position * row + 2 * column);
                    S::store(dst, S::zip_at(first.add(column), second.add(column)));
                }
            }
        }
        parts_of(staging, KV_LANES * row)
    }

    #[inline(always)]
    unsafe fn stage_values<S: Simd, T: Element>(&self, span: &TileSpan<'_>, staging: &mut [f32]) -> TileParts<f32> {
        let row = padded_dim(self.geometry.head_dim);
        let mut done = 0;
        while done < span.valid {
            let (block, token) = span.batch.block(span.seq, span.base + done, self.geometry.tokens_per_block);
            let run = (self.geometry.tokens_per_block - token).min(span.valid - done);
            // SAFETY: the rows of a run lie side by side in their block.
            unsafe {
                let src = self.data.as_ptr().cast::<T>().add(self.geometry.value_offset(block, span.kv_head, token));
                convert::<S, T>(src, run * row, staging.as_mut_ptr().add(done * row));
            }
            done += run;
        }
        parts_of(staging, KV_LANES * row)
    }
}

#[inline(always)]
fn parts_of<T>(staging: &[T], part: usize) -> TileParts<T> {
    let mut parts = [std::ptr::null(); GROUPS];
    for (group, p) in parts.iter_mut().enumerate() {
        *p = staging[group * part..].as_ptr();
    }
    parts
}

/// `len` elements, a multiple of 16.
#[inline(always)]
unsafe fn convert<S: Simd, T: Element>(src: *const T, len: usize, dst: *mut f32) {
    let mut i = 0;
    while i < len {
        // SAFETY: the caller's pointers cover `len` elements.
        unsafe { S::store(dst.add(i), T::load::<S>(src.add(i))) };
        i += S::LANES;
    }
}
