//! The tuned product over packed weights: register tiles, cache blocks, and a GEMV.
//!
//! Every output element is one chain `acc = fma(x[k], w[k], acc)` over k in order, from zero. A block of k that is not
//! the first takes the chain up again from the output. So tile sizes and blocking never change a bit of the result.

use std::ops::Range;

use crate::gated::{Gated, Panels};
use crate::matrix::PANEL;
use crate::simd::{Element, Kernel, Simd};
use crate::tier::Tier;

/// Columns of x (and of weight panels) that are multiplied at a time: a panel block of 32 KiB.
pub(crate) const K_BLOCK: usize = 256;
/// Panels that the GEMV streams side by side. Two against four: 22 % more bandwidth for f32 weights on 16 cores of an
/// Emerald Rapids, no difference on a Zen 4.
pub(crate) const GEMV_PANELS: usize = 2;
/// How far ahead of its loads the GEMV asks for memory, in bytes per panel.
pub(crate) const GEMV_PREFETCH_BYTES: usize = 2048;
/// How far ahead a single strip of tiles asks for memory.
const PREFETCH_BYTES: usize = 1024;
const CACHE_LINE: usize = 64;
/// Rows up to which an AVX2 tile is as wide as a panel: 12 accumulators.
const WIDE_ROWS: usize = 3;
/// The largest tile of any tier.
pub(crate) const MAX_TILE_ROWS: usize = 12;

/// Rows of x cut into strips of nearly equal height, none above the tier's tile.
#[derive(Clone, Copy)]
pub(crate) struct Strips {
    m: usize,
    pub(crate) count: usize,
}

impl Strips {
    pub(crate) fn new(m: usize, tier: Tier) -> Strips {
        let tile_rows = if tier >= Tier::Avx512 { MAX_TILE_ROWS } else { MAX_TILE_ROWS / 2 };
        Strips { m, count: m.div_ceil(tile_rows) }
    }

    #[inline(always)]
    pub(crate) fn rows(&self, strip: usize) -> Range<usize> {
        strip * self.m / self.count..(strip + 1) * self.m / self.count
    }
}

/// Packs the rows of one strip as `[k][rows]`, the order in which a tile reads them.
pub(crate) fn pack_rows(x: &[f32], k: usize, dst: &mut [f32]) {
    let rows = dst.len() / k;
    for (row, values) in x.chunks_exact(k).enumerate() {
        for (slot, value) in dst[row..].iter_mut().step_by(rows).zip(values) {
            *slot = *value;
        }
    }
}

/// Memory to ask for while a tile is computed: `step` bytes further with each k.
#[derive(Clone, Copy)]
struct Ahead {
    start: *const u8,
    step: usize,
}

/// `MR` x (`NV * LANES`) outputs over one block of k, all in registers. `a` is `[k][MR]`, `b` is `[k][PANEL]`.
#[inline(always)]
unsafe fn tile<S: Simd, W: Element, const MR: usize, const NV: usize>(
    k: usize,
    a: *const f32,
    b: *const W,
    c: *mut f32,
    c_stride: usize,
    resume: bool,
    ahead: Ahead,
) {
    // SAFETY: the caller's pointers cover the tile.
    unsafe {
        let mut acc = [[S::zero(); NV]; MR];
        if resume {
            for row in 0..MR {
                for v in 0..NV {
                    acc[row][v] = S::load(c.add(row * c_stride + v * S::LANES));
                }
            }
        }
        let (mut a, mut b, mut next) = (a, b, ahead.start);
        for _ in 0..k {
            let mut weights = [S::zero(); NV];
            for v in 0..NV {
                weights[v] = W::load::<S>(b.add(v * S::LANES));
            }
            for row in 0..MR {
                let x = S::splat(*a.add(row));
                for v in 0..NV {
                    acc[row][v] = S::fma(x, weights[v], acc[row][v]);
                }
            }
            S::prefetch(next);
            a = a.add(MR);
            b = b.add(PANEL);
            next = next.wrapping_add(ahead.step);
        }
        for row in 0..MR {
            for v in 0..NV {
                S::store(c.add(row * c_stride + v * S::LANES), acc[row][v]);
            }
        }
    }
}

/// All columns of a panel for `rows` rows: one tile across with AVX-512, two with AVX2 unless the rows are few.
#[inline(always)]
unsafe fn panel_tile<S: Simd, W: Element>(
    rows: usize,
    k: usize,
    a: *const f32,
    b: *const W,
    c: *mut f32,
    c_stride: usize,
    resume: bool,
    mut ahead: Ahead,
) {
    if S::LANES == 8 && rows <= WIDE_ROWS {
        // SAFETY: the caller's pointers cover the panel.
        return unsafe {
            match rows {
                1 => tile::<S, W, 1, 4>(k, a, b, c, c_stride, resume, ahead),
                2 => tile::<S, W, 2, 4>(k, a, b, c, c_stride, resume, ahead),
                _ => tile::<S, W, 3, 4>(k, a, b, c, c_stride, resume, ahead),
            }
        };
    }
    let mut column = 0;
    while column < PANEL {
        // SAFETY: the caller's pointers cover the panel.
        unsafe {
            let (b, c) = (b.add(column), c.add(column));
            match rows {
                1 => tile::<S, W, 1, 2>(k, a, b, c, c_stride, resume, ahead),
                2 => tile::<S, W, 2, 2>(k, a, b, c, c_stride, resume, ahead),
                3 => tile::<S, W, 3, 2>(k, a, b, c, c_stride, resume, ahead),
                4 => tile::<S, W, 4, 2>(k, a, b, c, c_stride, resume, ahead),
                5 => tile::<S, W, 5, 2>(k, a, b, c, c_stride, resume, ahead),
                6 => tile::<S, W, 6, 2>(k, a, b, c, c_stride, resume, ahead),
                7 if S::TILE_ROWS >= 7 => tile::<S, W, 7, 2>(k, a, b, c, c_stride, resume, ahead),
                8 if S::TILE_ROWS >= 8 => tile::<S, W, 8, 2>(k, a, b, c, c_stride, resume, ahead),
                9 if S::TILE_ROWS >= 9 => tile::<S, W, 9, 2>(k, a, b, c, c_stride, resume, ahead),
                10 if S::TILE_ROWS >= 10 => tile::<S, W, 10, 2>(k, a, b, c, c_stride, resume, ahead),
                11 if S::TILE_ROWS >= 11 => tile::<S, W, 11, 2>(k, a, b, c, c_stride, resume, ahead),
                12 if S::TILE_ROWS >= 12 => tile::<S, W, 12, 2>(k, a, b, c, c_stride, resume, ahead),
                _ => unreachable!("a strip is higher than the tier's tile"),
            }
        }
        column += 2 * S::LANES;
        ahead.start = ahead.start.wrapping_add(k * ahead.step);
    }
}

/// A range of panels times a range of strips.
pub(crate) struct BlockedGemm<'a, W> {
    pub(crate) packed_rows: &'a [f32],
    pub(crate) strips: Strips,
    pub(crate) strip_range: Range<usize>,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) data: &'a [W],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) gated: Option<Gated<'a>>,
    pub(crate) panels: Panels,
    /// One panel block as f32, `K_BLOCK * PANEL` long.
    pub(crate) expanded: &'a mut [f32],
    /// Sums of gates and ups, `[panels][rows][PANEL]`; others are kept in the output.
    pub(crate) sums: &'a mut [f32],
    /// The whole output, `[m][n]`, half as wide where it is activated.
    pub(crate) out: *mut f32,
}

impl<W: Element> Kernel for BlockedGemm<'_, W> {
    fn scalar(self) {
        unreachable!("the scalar tier multiplies row by row");
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(mut self) {
        let k_block = if self.is_blocked::<S>() { K_BLOCK } else { self.k };
        // Converting on the way costs once per strip, converting beforehand once, but through the cache.
        let expand_first = !W::IS_F32 && self.strips.count > 2;
        let mut k_start = 0;
        while k_start < self.k {
            let k_len = k_block.min(self.k - k_start);
            for index in 0..self.panels.len {
                let b = self.block(self.panels.nth(index), k_start);
                let next = if index + 1 < self.panels.len {
                    self.block(self.panels.nth(index + 1), k_start)
                } else {
                    self.block(self.panels.nth(0), k_start + k_len)
                };
                // SAFETY: the caller's promise; `expanded` holds one block.
                unsafe {
                    if expand_first {
                        expand::<S, W>(b, k_len * PANEL, self.expanded.as_mut_ptr());
                        self.panel::<S, f32>(index, k_start, k_len, self.expanded.as_ptr(), next.cast());
                    } else {
                        self.panel::<S, W>(index, k_start, k_len, b, next.cast());
                    }
                }
            }
            k_start += k_len;
        }
    }
}

impl<W: Element> BlockedGemm<'_, W> {
    /// A single strip of tiles as wide as a panel reads each weight once: there is nothing to block for.
    #[inline(always)]
    fn is_blocked<S: Simd>(&self) -> bool {
        self.strips.count > 1 || (2 * S::LANES < PANEL && self.strips.m > WIDE_ROWS)
    }

    /// Where a block of weights starts (which may be beyond the last one).
    #[inline(always)]
    fn block(&self, panel: usize, k_start: usize) -> *const W {
        self.data.as_ptr().wrapping_add((panel * self.k + k_start) * PANEL)
    }

    /// All strips of one panel over one block of k, whose weights are at `b`. Meanwhile, the block at `next` is fetched.
    #[inline(always)]
    unsafe fn panel<S: Simd, B: Element>(
        &mut self,
        index: usize,
        k_start: usize,
        k_len: usize,
        b: *const B,
        next: *const u8,
    ) {
        let column = self.panels.nth(index) * PANEL;
        let width = PANEL.min(self.n - column);
        let (resume, last) = (k_start > 0, k_start + k_len == self.k);
        let first_row = self.strips.rows(self.strip_range.start).start;
        let task_rows = self.strips.rows(self.strip_range.end - 1).end - first_row;
        let mut edge = [[0.0f32; PANEL]; MAX_TILE_ROWS];
        let (row_bytes, blocked) = (PANEL * size_of::<W>(), self.is_blocked::<S>());
        for (done, strip) in self.strip_range.clone().enumerate() {
            let rows = self.strips.rows(strip);
            let ahead = if blocked {
                let tiles = PANEL / (2 * S::LANES);
                let step = row_bytes / (self.strip_range.len() * tiles);
                Ahead { start: next.wrapping_add(done * tiles * k_len * step), step }
            } else if row_bytes <= CACHE_LINE {
                Ahead { start: b.cast::<u8>().wrapping_add(PREFETCH_BYTES), step: row_bytes }
            } else {
                // Asking for every other line disturbs the hardware's own prefetching (measured: 20 % slower).
                Ahead { start: b.cast(), step: 0 }
            };
            // SAFETY: the strip's rows and the panel's columns lie within x and out; a panel that sticks out over the
            // last column goes through `edge`.
            unsafe {
                let a = self.packed_rows.as_ptr().add(rows.start * self.k + k_start * rows.len());
                if let Some(gated) = self.gated {
                    let sums = self.sums.as_mut_ptr().add((index * task_rows + rows.start - first_row) * PANEL);
                    panel_tile::<S, B>(rows.len(), k_len, a, b, sums, PANEL, resume, ahead);
                    if last && index >= self.panels.gates() {
                        let before = self.panels.gates();
                        let (panel, gates) = (self.panels.nth(index - before), sums.sub(before * task_rows * PANEL));
                        let out = self.out.add(rows.start * gated.width + panel * PANEL);
                        gated.write::<S>(panel, rows.len(), gates, sums, out, gated.width);
                    }
                    continue;
                }
                let c = self.out.add(rows.start * self.n + column);
                let (tile, stride) = if width == PANEL { (c, self.n) } else { (edge.as_mut_ptr().cast(), PANEL) };
                if width < PANEL && resume {
                    for row in 0..rows.len() {
                        std::ptr::copy_nonoverlapping(c.add(row * self.n), tile.add(row * PANEL), width);
                    }
                }
                panel_tile::<S, B>(rows.len(), k_len, a, b, tile, stride, resume, ahead);
                for row in 0..rows.len() {
                    if width < PANEL {
                        std::ptr::copy_nonoverlapping(tile.add(row * PANEL), c.add(row * self.n), width);
                    }
                    if last && let Some(bias) = self.bias {
                        let out = std::slice::from_raw_parts_mut(c.add(row * self.n), width);
                        add_bias(out, &bias[column..column + width]);
                    }
                }
            }
        }
    }
}

/// Once per element, after the chain.
#[inline(always)]
pub(crate) fn add_bias(out: &mut [f32], bias: &[f32]) {
    for (out, bias) in out.iter_mut().zip(bias) {
        *out += bias;
    }
}

/// Converts `len` elements, a multiple of the panel width.
#[inline(always)]
unsafe fn expand<S: Simd, W: Element>(src: *const W, len: usize, dst: *mut f32) {
    let mut i = 0;
    while i < len {
        // SAFETY: the caller's pointers cover `len` elements, and vectors divide panels.
        unsafe { S::store(dst.add(i), W::load::<S>(src.add(i))) };
        i += S::LANES;
    }
}

/// A range of panels times one row.
pub(crate) struct Gemv<'a, W> {
    pub(crate) x: &'a [f32],
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) data: &'a [W],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) gated: Option<Gated<'a>>,
    pub(crate) panels: Panels,
    /// The whole output, `[n]`, or half of that where it is activated.
    pub(crate) out: *mut f32,
}

impl<W: Element> Kernel for Gemv<'_, W> {
    fn scalar(self) {
        unreachable!("the scalar tier multiplies row by row");
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let mut index = 0;
        // SAFETY: the panels lie within weight and output.
        unsafe {
            while index + GEMV_PANELS <= self.panels.len {
                if S::LANES == 16 {
                    self.group::<S, GEMV_PANELS, 2>(index);
                } else {
                    self.group::<S, GEMV_PANELS, 4>(index);
                }
                index += GEMV_PANELS;
            }
            while index < self.panels.len {
                if S::LANES == 16 {
                    self.group::<S, 1, 2>(index);
                } else {
                    self.group::<S, 1, 4>(index);
                }
                index += 1;
            }
        }
    }
}

impl<W: Element> Gemv<'_, W> {
    /// `P` panels of `VP` vectors side by side: several streams keep more memory requests in flight.
    #[inline(always)]
    unsafe fn group<S: Simd, const P: usize, const VP: usize>(&self, index: usize) {
        // Gates together with their ups are still in registers when the activation needs them.
        let (first, second) = match self.gated {
            Some(_) => (index / 2, index / 2 + self.panels.gates()),
            None => (index, index + P - 1),
        };
        let (panel, panel_len) = (self.panels.nth(first), self.k * PANEL);
        let stride = (self.panels.nth(second) - panel) * panel_len;
        // SAFETY: the panels lie within weight and output; a prefetch may point anywhere.
        unsafe {
            let mut b = self.data.as_ptr().add(panel * panel_len);
            let mut acc = [[S::zero(); VP]; P];
            for &x in self.x {
                let x = S::splat(x);
                for p in 0..P {
                    let b = b.add(p * stride);
                    let ahead = b.cast::<u8>().wrapping_add(GEMV_PREFETCH_BYTES);
                    let mut line = 0;
                    while line < PANEL * size_of::<W>() {
                        S::prefetch(ahead.wrapping_add(line));
                        line += 64;
                    }
                    for v in 0..VP {
                        acc[p][v] = S::fma(x, W::load::<S>(b.add(v * S::LANES)), acc[p][v]);
                    }
                }
                b = b.add(PANEL);
            }
            let mut rows = [[0.0f32; PANEL]; P];
            for p in 0..P {
                for v in 0..VP {
                    S::store(rows[p].as_mut_ptr().add(v * S::LANES), acc[p][v]);
                }
            }
            if let Some(gated) = self.gated {
                let out = self.out.add(panel * PANEL);
                return gated.write::<S>(panel, 1, rows[0].as_ptr(), rows[P - 1].as_ptr(), out, gated.width);
            }
            for p in 0..P {
                let column = (panel + p) * PANEL;
                let width = PANEL.min(self.n - column);
                let out = std::slice::from_raw_parts_mut(self.out.add(column), width);
                out.copy_from_slice(&rows[p][..width]);
                if let Some(bias) = self.bias {
                    add_bias(out, &bias[column..column + width]);
                }
            }
        }
    }
}
