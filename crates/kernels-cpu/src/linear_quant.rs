//! `linear` over quantised weights and activations: how a product is cut into tasks, and what a task does.
//!
//! All sums of products are exact integers: over 256 inputs with int8 weights, over 32 with int4 weights. Only these are
//! rounded, in one order everywhere:
//!
//! - Int8: `acc = fma(sum, weight_scale * row_scale, acc)` for each block.
//! - Int4: `part = fma(sum, weight_scale, part)` for each group of a block, then `acc = fma(part, row_scale, acc)`.
//!
//! So every tier, the scalar one included, gives the same bits, whatever the tile, the batch or the threads.

use std::ops::Range;

use crate::cpu::{Cpu, SharedMut};
use crate::linear::{bias_of, part};
use crate::matrix::{Elems, Matrix, PANEL};
use crate::quant::{BLOCK, GROUP, INT4_GROUP, INT8_OFFSET, QuantKind, block_stride, panel_bytes};
use crate::quant::{int4_code, int4_scale_at, int8_scale_at};
use crate::quant_rows::{GROUPS, QuantRows};
use crate::quant_tile::{Ahead, BlockRows, BlockWeights, Results, UNPACKED_GROUP, int4, int8, unpack_int4};
use crate::runs::{Runs, threads_for};
use crate::simd::{IntKernel, Simd, SimdInt, dispatch_int};

/// Rows that are multiplied at a time: a block of their codes hardly leaves the first cache, and there are still enough of
/// them for weights to come from memory many times as fast as they are used.
const ROW_BLOCK: usize = 132;
/// Panels that a task of many rows takes together: each block of the rows is then fetched once for all of them.
const PANELS_PER_TASK: usize = 4;
/// Tasks that each thread has at least, where there are panels enough: the last ones keep no thread waiting for long.
const TASKS_PER_THREAD: usize = 16;
/// Weight bytes that a task of a bandwidth-bound product takes.
const STREAM_BYTES: usize = 256 * 1024;
/// Rows up to which the product is bound by memory.
const STREAM_ROWS: usize = 12;
/// Results that the tiles of a bandwidth-bound product hold at most: rows times panels.
const STREAM_RESULTS: usize = 12;

impl Cpu {
    /// `out[m][n] = x[m][k] . w^T (+ bias)` of quantised rows and a quantised weight, where m is how many rows `x` has.
    ///
    /// # Panics
    /// When the weight is not quantised, or a length does not fit the shape.
    pub fn linear_quantized(&mut self, x: &QuantRows, w: Matrix<'_>, bias: Option<&[f32]>, out: &mut [f32]) {
        w.check();
        if let Some(bias) = bias {
            assert_eq!(bias.len(), w.n, "bias of linear: n");
        }
        self.quantized_runs(x, Runs::One(x.rows()), w, bias, out);
    }

    /// [`Cpu::linear_quantized`] of each run with its own weight; data and bias are those of all weights, one after the
    /// other, and their lengths were checked.
    pub(crate) fn quantized_runs(
        &mut self,
        x: &QuantRows,
        runs: Runs<'_>,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        out: &mut [f32],
    ) {
        assert_eq!(x.rows(), runs.rows(), "rows of linear");
        assert_eq!(x.k(), w.k, "k of the rows and of the weight of linear");
        assert_eq!(out.len(), x.rows() * w.n, "out of linear: m * n with m = {}, n = {}", x.rows(), w.n);
        let (kind, data) = match w.data {
            Elems::Int8(data) => (QuantKind::Int8, data),
            Elems::Int4(data) => (QuantKind::Int4, data),
            _ => panic!("linear_quantized needs a quantised weight"),
        };
        let (m, tier, threads) = (runs.rows(), self.tier, self.threads());
        if m == 0 || w.n == 0 {
            return;
        }
        let shares = |rows: usize| QuantShares::new(kind, rows, w, threads_for(rows, m, threads));
        let mut results = 0;
        let mut tasks = std::mem::take(&mut self.run_tasks);
        for run in 0..runs.count() {
            let rows = runs.within(run, &(0..m)).len();
            results = if rows > 0 { shares(rows).results().max(results) } else { results };
        }
        tasks.fill(runs.count(), |run| match runs.within(run, &(0..m)).len() {
            0 => 0,
            rows => shares(rows).tasks(),
        });
        self.reserve_worker_scratch(results + UNPACKED_FLOATS);
        let (scratch, out) = (SharedMut::new(&mut self.worker_scratch), SharedMut::new(out));
        self.pool.run(tasks.total(), &|task, worker| {
            let (run, task) = tasks.locate(task);
            let rows = runs.within(run, &(0..m));
            let shares = shares(rows.len());
            // SAFETY: a worker runs one task at a time.
            let scratch = unsafe { &mut scratch.slice(worker, 1)[0] };
            let (results, rest) = scratch.split_at_mut(results);
            let own = shares.rows(task);
            let task = QuantGemm {
                x,
                rows: rows.start + own.start..rows.start + own.end,
                kind,
                data: part(data, run, w.len_of_one()),
                n: w.n,
                bias: bias_of(bias, run, w.n),
                panels: shares.panels(task),
                results,
                unpacked: &mut rest[..UNPACKED_FLOATS],
                out: out.ptr(),
            };
            // SAFETY: lengths were checked, and each task writes its own part of the output.
            unsafe { dispatch_int(tier, task) };
        });
        self.run_tasks = tasks;
    }
}

/// How a product is shared out: tasks of some panels, and of some rows where there are few columns or many rows.
struct QuantShares {
    m: usize,
    panels: usize,
    panels_per_task: usize,
    column_tasks: usize,
    row_tasks: usize,
}

impl QuantShares {
    fn new(kind: QuantKind, m: usize, w: Matrix<'_>, threads: usize) -> QuantShares {
        let panels = w.n.div_ceil(PANEL);
        let row_blocks = m.div_ceil(ROW_BLOCK);
        let panels_per_task = if m <= STREAM_ROWS {
            let by_size = STREAM_BYTES.div_ceil(panel_bytes(kind, w.k)).next_multiple_of(4);
            by_size.min(panels.div_ceil(threads)).max(1)
        } else {
            panels.div_ceil(TASKS_PER_THREAD * threads).clamp(1, PANELS_PER_TASK)
        };
        let column_tasks = panels.div_ceil(panels_per_task);
        // Few columns: share the rows as well.
        let row_tasks = (2 * threads).div_ceil(column_tasks).clamp(row_blocks, m.div_ceil(STREAM_ROWS).max(row_blocks));
        QuantShares { m, panels, panels_per_task, column_tasks, row_tasks }
    }

    fn tasks(&self) -> usize {
        self.column_tasks * self.row_tasks
    }

    /// Results of a task at most.
    fn results(&self) -> usize {
        self.panels_per_task * self.m.div_ceil(self.row_tasks) * PANEL
    }

    fn rows(&self, task: usize) -> Range<usize> {
        let row_task = task / self.column_tasks;
        self.m * row_task / self.row_tasks..self.m * (row_task + 1) / self.row_tasks
    }

    fn panels(&self, task: usize) -> Range<usize> {
        let first = task % self.column_tasks * self.panels_per_task;
        first..self.panels.min(first + self.panels_per_task)
    }
}

/// Room for one unpacked block of int4 weights.
const UNPACKED_FLOATS: usize = GROUPS * UNPACKED_GROUP / size_of::<f32>();

/// A range of panels times a range of rows.
struct QuantGemm<'a> {
    x: &'a QuantRows,
    rows: Range<usize>,
    kind: QuantKind,
    data: &'a [u8],
    n: usize,
    bias: Option<&'a [f32]>,
    panels: Range<usize>,
    /// `[panels][rows][32]`.
    results: &'a mut [f32],
    unpacked: &'a mut [f32],
    /// The whole output, `[m][n]`.
    out: *mut f32,
}

impl IntKernel for QuantGemm<'_> {
    fn scalar(self) {
        let bytes = panel_bytes(self.kind, self.x.k());
        for row in self.rows {
            for column in self.panels.start * PANEL..self.n.min(self.panels.end * PANEL) {
                let panel = &self.data[column / PANEL * bytes..][..bytes];
                let mut acc = 0.0f32;
                for (i, block) in panel.chunks(block_stride(self.kind)).enumerate() {
                    let at = i * self.x.rows() + row;
                    let codes = &self.x.codes[at * BLOCK..(at + 1) * BLOCK];
                    let scale = self.x.scales[at];
                    acc = match self.kind {
                        QuantKind::Int8 => scalar_int8(block, column % PANEL, codes, scale, acc),
                        QuantKind::Int4 => scalar_int4(block, column % PANEL, codes, scale, acc),
                    };
                }
                if let Some(bias) = self.bias {
                    acc += bias[column];
                }
                // SAFETY: within the output, and no other task writes here.
                unsafe { *self.out.add(row * self.n + column) = acc };
            }
        }
    }

    #[inline(always)]
    unsafe fn simd<S: SimdInt>(mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            match (self.kind, self.rows.len()) {
                (QuantKind::Int8, rows) if rows <= S::INT8_ROWS => self.stream::<S>(),
                (QuantKind::Int4, rows) if rows <= S::INT4_ROWS => self.stream::<S>(),
                _ => self.blocked::<S>(),
            }
        }
    }
}

fn scalar_int8(block: &[u8], lane: usize, codes: &[i8], scale: f32, acc: f32) -> f32 {
    let (weights, scales) = block.split_at(block.len() - PANEL * size_of::<f32>());
    let mut sum = 0;
    for (weights, codes) in weights.chunks_exact(4 * PANEL).zip(codes.chunks_exact(4)) {
        for i in 0..4 {
            sum += (i32::from(weights[4 * lane + i]) - INT8_OFFSET) * i32::from(codes[i]);
        }
    }
    (sum as f32).mul_add(int8_scale_at(scales, lane) * scale, acc)
}

fn scalar_int4(block: &[u8], lane: usize, codes: &[i8], scale: f32, acc: f32) -> f32 {
    let mut part = 0.0f32;
    for (group, codes) in block.chunks_exact(INT4_GROUP).zip(codes.chunks_exact(GROUP)) {
        let sum: i32 = codes.iter().enumerate().map(|(i, &x)| int4_code(group, lane, i) * i32::from(x)).sum();
        part = (sum as f32).mul_add(int4_scale_at(group, lane), part);
    }
    part.mul_add(scale, acc)
}

impl QuantGemm<'_> {
    /// The rows from `first` on, within block `block`.
    #[inline(always)]
    fn block_rows(&self, block: usize, first: usize) -> BlockRows {
        let at = block * self.x.rows() + first;
        BlockRows {
            codes: self.x.codes.as_ptr().wrapping_add(at * BLOCK),
            scales: self.x.scales.as_ptr().wrapping_add(at),
            starts_int8: self.x.starts_int8.as_ptr().wrapping_add(at),
            starts_int4: self.x.starts_int4.as_ptr().wrapping_add(at * GROUPS),
        }
    }

    /// Where a block of weights starts (which may be beyond the last one).
    #[inline(always)]
    fn block(&self, panel: usize, block: usize) -> *const u8 {
        let at = panel * panel_bytes(self.kind, self.x.k()) + block * block_stride(self.kind);
        self.data.as_ptr().wrapping_add(at)
    }

    #[inline(always)]
    fn k_len(&self, block: usize) -> usize {
        BLOCK.min(self.x.k().next_multiple_of(GROUP) - block * BLOCK)
    }

    /// As few rows as one tile holds: each weight is read once, from several panels side by side, because several
    /// streams keep more memory requests in flight.
    #[inline(always)]
    unsafe fn stream<S: SimdInt>(&mut self) {
        let panels_at_once = match (self.kind, self.rows.len()) {
            _ if <S::F as Simd>::LANES < 16 => 1,
            (QuantKind::Int8, 1..=2) => 4,
            (QuantKind::Int8, 3..=4) => 2,
            (QuantKind::Int4, 1) => 4,
            (QuantKind::Int4, 2..=3) => 2,
            _ => 1,
        };
        let mut panel = self.panels.start;
        // SAFETY: the panels lie within weight and output.
        unsafe {
            while panel < self.panels.end {
                let count = if panel + panels_at_once <= self.panels.end { panels_at_once } else { 1 };
                self.stream_panels::<S>(panel, count);
                panel += count;
            }
        }
    }

    #[inline(always)]
    unsafe fn stream_panels<S: SimdInt>(&self, panel: usize, count: usize) {
        let mut results = [[0.0f32; PANEL]; STREAM_RESULTS];
        let rows = self.rows.len();
        for block in 0..self.x.k().div_ceil(BLOCK) {
            let start = self.block(panel, block);
            let w = BlockWeights {
                start,
                panel_stride: panel_bytes(self.kind, self.x.k()),
                k_len: self.k_len(block),
                ahead: [Ahead { at: start, step: 0 }; 2],
            };
            let c = Results { start: results.as_mut_ptr().cast(), panel_stride: rows * PANEL, resume: block > 0 };
            let x = self.block_rows(block, self.rows.start);
            // SAFETY: rows, weights and results cover the tile.
            unsafe {
                match self.kind {
                    QuantKind::Int8 => int8_panels::<S>(rows, count, x, w, c),
                    QuantKind::Int4 => int4_panels::<S>(rows, count, x, w, c),
                }
            }
        }
        for p in 0..count {
            // SAFETY: the tile's part of the output belongs to this task.
            unsafe { self.finish(panel + p, results[p * rows..].as_ptr().cast()) };
        }
    }

    /// Many rows: a block of each panel stays in the first cache while all rows pass by.
    #[inline(always)]
    unsafe fn blocked<S: SimdInt>(&mut self) {
        let rows = self.rows.len();
        let tile_rows = if self.kind == QuantKind::Int8 { S::INT8_ROWS } else { S::INT4_ROWS };
        let strips = rows.div_ceil(tile_rows);
        for block in 0..self.x.k().div_ceil(BLOCK) {
            let k_len = self.k_len(block);
            for panel in self.panels.clone() {
                let next = if panel + 1 < self.panels.end {
                    self.block(panel + 1, block)
                } else {
                    self.block(self.panels.start, block + 1)
                };
                let start = self.block(panel, block);
                let unpacked = self.unpacked.as_mut_ptr().cast::<u8>();
                if self.kind == QuantKind::Int4 {
                    // SAFETY: the scratch holds one block.
                    unsafe { unpack_int4::<S>(start, k_len, unpacked) };
                }
                let halves = PANEL / (2 * <S::F as Simd>::LANES);
                let step = block_stride(self.kind).div_ceil((BLOCK / 4) * strips * halves);
                for strip in 0..strips {
                    let range = rows * strip / strips..rows * (strip + 1) / strips;
                    // The rows of the next tile; after the last one those of the next panel, which are the first again.
                    let next_strip = (strip + 1) % strips;
                    let next_range = rows * next_strip / strips..rows * (next_strip + 1) / strips;
                    let next_rows = self.block_rows(block, self.rows.start + next_range.start).codes;
                    let start = if self.kind == QuantKind::Int8 { start } else { unpacked };
                    let mut w = BlockWeights {
                        start,
                        panel_stride: 0,
                        k_len,
                        ahead: [
                            Ahead { at: next.wrapping_add(strip * halves * (BLOCK / 4) * step), step },
                            Ahead { at: next_rows.cast(), step: next_range.len() * BLOCK / (BLOCK / 4) },
                        ],
                    };
                    let results = ((panel - self.panels.start) * rows + range.start) * PANEL;
                    let c = Results {
                        start: self.results.as_mut_ptr().wrapping_add(results),
                        panel_stride: 0,
                        resume: block > 0,
                    };
                    let x = self.block_rows(block, self.rows.start + range.start);
                    for half in 0..halves {
                        // SAFETY: rows, weights and results cover the tile.
                        unsafe {
                            let first = half * 2 * <S::F as Simd>::LANES;
                            match self.kind {
                                QuantKind::Int8 => int8_tile::<S, false>(range.len(), x, w, c, first),
                                QuantKind::Int4 => int4_tile::<S>(range.len(), x, w, c, first),
                            }
                        }
                        w.ahead[0].at = w.ahead[0].at.wrapping_add((BLOCK / 4) * step);
                    }
                }
            }
        }
        for panel in self.panels.clone() {
            let results = self.results[(panel - self.panels.start) * rows * PANEL..].as_ptr();
            // SAFETY: this part of the output belongs to this task.
            unsafe { self.finish(panel, results) };
        }
    }

    /// Writes a panel's results `[rows][32]` to the output.
    #[inline(always)]
    unsafe fn finish(&self, panel: usize, results: *const f32) {
        let column = panel * PANEL;
        let width = PANEL.min(self.n - column);
        for row in 0..self.rows.len() {
            // SAFETY: within results and output, of which no other task writes this part.
            unsafe {
                let from = std::slice::from_raw_parts(results.add(row * PANEL), width);
                let start = (self.rows.start + row) * self.n + column;
                let out = std::slice::from_raw_parts_mut(self.out.add(start), width);
                match self.bias {
                    None => out.copy_from_slice(from),
                    Some(bias) => {
                        for ((out, from), bias) in out.iter_mut().zip(from).zip(&bias[column..]) {
                            *out = from + bias;
                        }
                    }
                }
            }
        }
    }
}

/// Makes the call with `$name` as the number of rows, for each of the numbers listed up to the limit.
macro_rules! by_rows {
    ($rows:expr, $limit:expr, [$($r:literal)*], $name:ident => $call:expr) => {
        match $rows {
            $($r if $r <= $limit => {
                const $name: usize = $r;
                $call
            })*
            _ => unreachable!("a tile is higher than the tier has registers for"),
        }
    };
}

/// A tile of two vectors across.
#[inline(always)]
unsafe fn int8_tile<S: SimdInt, const STREAM: bool>(
    rows: usize,
    x: BlockRows,
    w: BlockWeights,
    c: Results,
    first: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        by_rows!(rows, S::INT8_ROWS, [1 2 3 4 5 6 7 8 9 10 11 12], R => int8::<S, R, 1, 2, STREAM>(x, w, c, first))
    }
}

/// A tile of two vectors across, over unpacked weights.
#[inline(always)]
unsafe fn int4_tile<S: SimdInt>(rows: usize, x: BlockRows, w: BlockWeights, c: Results, first: usize) {
    // SAFETY: the caller's promise.
    unsafe { by_rows!(rows, S::INT4_ROWS, [1 2 3 4 5 6], R => int4::<S, R, 1, 2, true>(x, w, c, first)) }
}

/// All columns of one, two or four panels.
#[inline(always)]
unsafe fn int8_panels<S: SimdInt>(rows: usize, panels: usize, x: BlockRows, w: BlockWeights, c: Results) {
    // SAFETY: the caller's promise.
    unsafe {
        if <S::F as Simd>::LANES == 16 {
            match panels {
                4 => by_rows!(rows, 2, [1 2], R => int8::<S, R, 4, 2, true>(x, w, c, 0)),
                2 => by_rows!(rows, 4, [3 4], R => int8::<S, R, 2, 2, true>(x, w, c, 0)),
                _ => int8_tile::<S, true>(rows, x, w, c, 0),
            }
        } else {
            int8_tile::<S, true>(rows, x, w, c, 0);
            int8_tile::<S, true>(rows, x, w, c, PANEL / 2);
        }
    }
}

#[inline(always)]
unsafe fn int4_panels<S: SimdInt>(rows: usize, panels: usize, x: BlockRows, w: BlockWeights, c: Results) {
    // SAFETY: the caller's promise.
    unsafe {
        if <S::F as Simd>::LANES == 16 {
            match panels {
                4 => int4::<S, 1, 4, 2, false>(x, w, c, 0),
                2 => by_rows!(rows, 3, [2 3], R => int4::<S, R, 2, 2, false>(x, w, c, 0)),
                _ => by_rows!(rows, 6, [1 2 3 4 5 6], R => int4::<S, R, 1, 2, false>(x, w, c, 0)),
            }
        } else {
            by_rows!(rows, 2, [1 2], R => int4::<S, R, 1, 2, false>(x, w, c, 0));
            by_rows!(rows, 2, [1 2], R => int4::<S, R, 1, 2, false>(x, w, c, PANEL / 2));
        }
    }
}
