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

use crate::buffer::AlignedBuf;
use crate::cpu::{Cpu, SharedMut};
use crate::gated::{Gated, Panels};
use crate::linear::{bias_of, part, stream_gates};
use crate::matrix::{Elems, Matrix, PANEL};
use crate::quant::{BLOCK, GROUP, INT4_GROUP, INT8_OFFSET, QuantKind, block_stride, panel_bytes};
use crate::quant::{int4_code, int4_scale_at, int8_scale_at};
use crate::quant_rows::{GROUPS, QuantRows, SharedRows};
use crate::quant_tile::{
    Ahead, BlockRows, BlockWeights, Results, UNPACKED_GROUP, int4_panels, int4_tile, int8_panels, int8_tile,
    unpack_int4,
};
use crate::rows::Activation;
use crate::runs::{Runs, threads_for};
use crate::simd::{IntKernel, Simd, SimdInt, dispatch_int};

/// Rows that are multiplied at a time: a block of their codes hardly leaves the first cache, and there are still enough of
/// them for weights to come from memory many times as fast as they are used.
const ROW_BLOCK: usize = 132;
/// Panels that a task of many rows takes together: each block of the rows is then fetched once for all of them.
const PANELS_PER_TASK: usize = 4;
/// Panels of gates whose activated columns share a scale.
const PANELS_PER_SCALE: usize = BLOCK / PANEL;
/// Tasks of whole scales that each thread has at least: fewer would leave threads waiting at the end.
const SCALE_TASKS_PER_THREAD: usize = 8;
/// Tasks that each thread has at least, where there are panels enough: the last ones keep no thread waiting for long.
const TASKS_PER_THREAD: usize = 16;
/// Weight bytes that a task of a bandwidth-bound product takes.
const STREAM_BYTES: usize = 256 * 1024;
/// Panels that are streamed side by side at most.
const STREAM_PANELS: usize = 4;
/// Rows up to which the product is bound by memory.
const STREAM_ROWS: usize = 12;

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
        self.quantized_runs(x, Runs::One(x.rows()), w, bias, None, out);
    }

    /// [`Cpu::linear_quantized`] of each run with its own weight, activated where there is an activation; data and bias are
    /// those of all weights, one after the other, and their lengths were checked.
    pub(crate) fn quantized_runs(
        &mut self,
        x: &QuantRows,
        runs: Runs<'_>,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        activation: Option<Activation>,
        out: &mut [f32],
    ) {
        let width = if activation.is_some() { w.n / 2 } else { w.n };
        assert_eq!(out.len(), x.rows() * width, "out of linear: rows of {width}, with m = {}", x.rows());
        let columns = if activation.is_some() { Columns::Gated } else { Columns::Plain };
        self.quantized_tasks(x, runs, w, bias, activation, columns, Output::Floats(SharedMut::new(out)));
    }

    /// [`Cpu::linear_activated_quantized`] of each run with its own weight.
    ///
    /// A scale belongs to 256 columns. Tasks of that many make the codes as well. They are so large that few rows, whose
    /// product is a matter of streaming weights evenly, do better with finer ones and codes made afterwards, from
    /// floats that the caches still hold.
    pub(crate) fn activated_runs(
        &mut self,
        x: &QuantRows,
        runs: Runs<'_>,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        activation: Activation,
        out: &mut QuantRows,
    ) {
        let (m, width) = (x.rows(), w.n / 2);
        let scales = width.div_ceil(BLOCK);
        if m > ROW_BLOCK || (m > STREAM_ROWS && scales >= SCALE_TASKS_PER_THREAD * self.threads()) {
            let codes = out.shared(m, width);
            self.quantized_tasks(x, runs, w, bias, Some(activation), Columns::Scales, Output::Codes(codes));
        } else {
            self.reserve_activated(m, width);
            // Such products repack nothing.
            let mut floats = std::mem::replace(&mut self.packed_rows, AlignedBuf::zeroed(0));
            self.quantized_runs(x, runs, w, bias, Some(activation), &mut floats[..m * width]);
            self.quantize_rows(&floats[..m * width], width, out);
            self.packed_rows = floats;
        }
    }

    /// Makes room for [`Cpu::linear_activated_quantized`] of up to `max_rows` rows and `max_width` activated columns, so that it
    /// never allocates.
    pub fn reserve_activated(&mut self, max_rows: usize, max_width: usize) {
        self.reserve_packed_rows(max_rows.min(ROW_BLOCK) * max_width);
    }

    fn quantized_tasks(
        &mut self,
        x: &QuantRows,
        runs: Runs<'_>,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        activation: Option<Activation>,
        columns: Columns,
        out: Output,
    ) {
        assert_eq!(x.rows(), runs.rows(), "rows of linear");
        assert_eq!(x.k(), w.k, "k of the rows and of the weight of linear");
        let (kind, data) = match w.data {
            Elems::Int8(data) => (QuantKind::Int8, data),
            Elems::Int4(data) => (QuantKind::Int4, data),
            _ => panic!("linear_quantized needs a quantized weight"),
        };
        let (m, tier, threads) = (runs.rows(), self.tier, self.threads());
        if m == 0 || w.n == 0 {
            return;
        }
        let shares = |rows: usize| {
            let least = (SCALE_TASKS_PER_THREAD * threads * rows).div_ceil(m);
            QuantShares::new(kind, rows, w, columns, least, threads_for(rows, m, threads))
        };
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
        let scratch = SharedMut::new(&mut self.worker_scratch);
        self.pool.run(tasks.total(), &|task, worker| {
            let (run, task) = tasks.locate(task);
            let rows = runs.within(run, &(0..m));
            let shares = shares(rows.len());
            // SAFETY: a worker runs one task at a time.
            let scratch = unsafe { &mut scratch.slice(worker, 1)[0] };
            let (results, rest) = scratch.split_at_mut(results);
            let own = shares.rows(task);
            let bias = bias_of(bias, run, w.n);
            let task = QuantGemm {
                x,
                rows: rows.start + own.start..rows.start + own.end,
                kind,
                data: part(data, run, w.len_of_one()),
                n: w.n,
                bias,
                gated: activation.map(|activation| Gated { activation, bias, width: w.n / 2 }),
                panels: shares.panels(task),
                results,
                unpacked: &mut rest[..UNPACKED_FLOATS],
                out,
            };
            // SAFETY: lengths were checked, and each task writes its own part of the output.
            unsafe { dispatch_int(tier, task) };
        });
        self.run_tasks = tasks;
    }
}

/// How columns are put together to tasks.
#[derive(Clone, Copy, PartialEq)]
enum Columns {
    /// As they are.
    Plain,
    /// Gates with their ups.
    Gated,
    /// The same, and all that share a scale in the output.
    Scales,
}

/// Where results go.
#[derive(Clone, Copy)]
enum Output {
    /// `[m][n]`, half as wide where it is activated.
    Floats(SharedMut<f32>),
    /// Activated, and quantised.
    Codes(SharedRows),
}

/// How a product is shared out: tasks of some panels, and of some rows where there are few columns or many rows.
struct QuantShares {
    m: usize,
    /// Panels, or pairs of gates and ups.
    units: usize,
    gated: bool,
    units_per_task: usize,
    column_tasks: usize,
    row_tasks: usize,
}

impl QuantShares {
    /// `least_scales` is how many tasks of whole scales there should be at least.
    fn new(
        kind: QuantKind,
        m: usize,
        w: Matrix<'_>,
        columns: Columns,
        least_scales: usize,
        threads: usize,
    ) -> QuantShares {
        let gated = columns != Columns::Plain;
        let panels_each = 1 + usize::from(gated);
        let units = w.n.div_ceil(PANEL) / panels_each;
        let row_blocks = m.div_ceil(ROW_BLOCK);
        let units_per_task = if columns == Columns::Scales {
            PANELS_PER_SCALE
        } else if m <= STREAM_ROWS {
            let by_size = STREAM_BYTES.div_ceil(panel_bytes(kind, w.k)).next_multiple_of(STREAM_PANELS);
            let by_size = if gated { by_size.min(stream_gates(units, threads, STREAM_PANELS)) } else { by_size };
            by_size.min(units.div_ceil(threads)).max(1)
        } else {
            units.div_ceil(TASKS_PER_THREAD * threads).clamp(1, PANELS_PER_TASK / panels_each)
        };
        let column_tasks = units.div_ceil(units_per_task);
        // Few columns: share the rows as well.
        let least = if columns == Columns::Scales { least_scales } else { 2 * threads };
        let row_tasks = least.div_ceil(column_tasks).clamp(row_blocks, m.div_ceil(STREAM_ROWS).max(row_blocks));
        QuantShares { m, units, gated, units_per_task, column_tasks, row_tasks }
    }

    fn tasks(&self) -> usize {
        self.column_tasks * self.row_tasks
    }

    /// Results of a task at most.
    fn results(&self) -> usize {
        self.units_per_task * (1 + usize::from(self.gated)) * self.m.div_ceil(self.row_tasks) * PANEL
    }

    fn rows(&self, task: usize) -> Range<usize> {
        let row_task = task / self.column_tasks;
        self.m * row_task / self.row_tasks..self.m * (row_task + 1) / self.row_tasks
    }

    fn panels(&self, task: usize) -> Panels {
        let first = task % self.column_tasks * self.units_per_task;
        let units = first..self.units.min(first + self.units_per_task);
        if self.gated { Panels::gated(units, self.units) } else { Panels::plain(units) }
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
    gated: Option<Gated<'a>>,
    panels: Panels,
    /// `[panels][rows][32]`.
    results: &'a mut [f32],
    unpacked: &'a mut [f32],
    out: Output,
}

impl IntKernel for QuantGemm<'_> {
    fn scalar(self) {
        let Output::Floats(out) = self.out else { unreachable!("the scalar tier activates separately") };
        let bytes = panel_bytes(self.kind, self.x.k());
        let first = self.panels.nth(0) * PANEL;
        for row in self.rows {
            for column in first..self.n.min(first + self.panels.len * PANEL) {
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
                unsafe { *out.ptr().add(row * self.n + column) = acc };
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
        let mut index = 0;
        // SAFETY: the panels lie within weight and output.
        unsafe {
            while index < self.panels.len {
                let count = if self.panels.adjoin(index, panels_at_once) { panels_at_once } else { 1 };
                self.stream_panels::<S>(index, count);
                index += count;
            }
            self.finish::<S>();
        }
    }

    #[inline(always)]
    unsafe fn stream_panels<S: SimdInt>(&mut self, index: usize, count: usize) {
        let rows = self.rows.len();
        let results = self.results[index * rows * PANEL..].as_mut_ptr();
        for block in 0..self.x.k().div_ceil(BLOCK) {
            let start = self.block(self.panels.nth(index), block);
            let w = BlockWeights {
                start,
                panel_stride: panel_bytes(self.kind, self.x.k()),
                k_len: self.k_len(block),
                ahead: [Ahead { at: start, step: 0 }; 2],
            };
            let c = Results { start: results, panel_stride: rows * PANEL, resume: block > 0 };
            let x = self.block_rows(block, self.rows.start);
            // SAFETY: rows, weights and results cover the tile.
            unsafe {
                match self.kind {
                    QuantKind::Int8 => int8_panels::<S>(rows, count, x, w, c),
                    QuantKind::Int4 => int4_panels::<S>(rows, count, x, w, c),
                }
            }
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
            for index in 0..self.panels.len {
                let next = if index + 1 < self.panels.len {
                    self.block(self.panels.nth(index + 1), block)
                } else {
                    self.block(self.panels.nth(0), block + 1)
                };
                let start = self.block(self.panels.nth(index), block);
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
                    let results = (index * rows + range.start) * PANEL;
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
        // SAFETY: this part of the output belongs to this task.
        unsafe { self.finish::<S>() };
    }

    /// Writes the results of all panels to the output.
    #[inline(always)]
    unsafe fn finish<S: SimdInt>(&self) {
        let (rows, gates) = (self.rows.len(), self.panels.gates());
        let of_panel = |index: usize| self.results[index * rows * PANEL..].as_ptr();
        // SAFETY: within results and output, of which no other task writes this part.
        unsafe {
            match (self.out, self.gated) {
                (Output::Floats(out), None) => {
                    for index in 0..self.panels.len {
                        self.write_sums(out, self.panels.nth(index) * PANEL, of_panel(index));
                    }
                }
                (Output::Floats(out), Some(gated)) => {
                    for index in 0..gates {
                        let panel = self.panels.nth(index);
                        let out = out.ptr().add(self.rows.start * gated.width + panel * PANEL);
                        gated.write::<S::F>(panel, rows, of_panel(index), of_panel(gates + index), out, gated.width);
                    }
                }
                (Output::Codes(out), Some(gated)) => {
                    let first = self.panels.nth(0);
                    for row in 0..rows {
                        let mut values = [0.0f32; BLOCK];
                        for index in 0..gates {
                            let [gate, up] = [index, gates + index].map(|index| of_panel(index).add(row * PANEL));
                            gated.write::<S::F>(first + index, 1, gate, up, values.as_mut_ptr().add(index * PANEL), 0);
                        }
                        let values = &values[..gates * PANEL];
                        out.write_block_on::<S::F>(self.rows.start + row, first / PANELS_PER_SCALE, values);
                    }
                }
                (Output::Codes(_), None) => unreachable!("only activated results are quantized"),
            }
        }
    }

    /// Writes a panel's results `[rows][32]` to the columns from `column` on.
    #[inline(always)]
    unsafe fn write_sums(&self, out: SharedMut<f32>, column: usize, results: *const f32) {
        let width = PANEL.min(self.n - column);
        for row in 0..self.rows.len() {
            // SAFETY: within results and output, of which no other task writes this part.
            unsafe {
                let from = std::slice::from_raw_parts(results.add(row * PANEL), width);
                let start = (self.rows.start + row) * self.n + column;
                let out = std::slice::from_raw_parts_mut(out.ptr().add(start), width);
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
