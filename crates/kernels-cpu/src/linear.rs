//! `linear`: how products are cut into tasks. The arithmetic is in [`crate::gemm`] and [`crate::row_major`].

use std::ops::Range;

use crate::cpu::{Cpu, SharedMut};
use crate::gated::{Gated, Panels};
use crate::gemm::{self, BlockedGemm, Gemv, Strips};
use crate::matrix::{Elems, Layout, Matrix, PANEL};
use crate::quant_rows::QuantRows;
use crate::row_major::RowMajorTask;
use crate::rows::Activation;
use crate::runs::{Runs, threads_for};
use crate::simd::{Element, dispatch};
use crate::tier::Tier;

/// Rows of x that are packed and multiplied at a time: with [`gemm::K_BLOCK`] columns of them in use, they take half of
/// a 1 MiB L2 cache.
const ROW_BLOCK: usize = 504;
/// Rows (as in decoding) up to which packing x is not worth waking a helper.
pub(crate) const PACK_ALONE: usize = 1 << 15;
/// Panels that a task of the blocked GEMM takes together: each block of x is then fetched once for all of them.
const PANELS_PER_TASK: usize = 8;
/// Weight bytes that a task of a bandwidth-bound product takes, as elements.
const STREAM_ELEMENTS: usize = 128 * 1024;
/// Tasks of gates and ups that each thread has at least in such a product, where there are panels enough.
const STREAM_TASKS_PER_THREAD: usize = 4;
/// Output columns of one task on the row-major and scalar paths.
const COLUMNS_PER_TASK: usize = 32;

/// Scratch for the packed rows of a product.
pub(crate) fn packed_rows_len(m: usize, k: usize) -> usize {
    m.min(ROW_BLOCK) * k
}

impl Cpu {
    /// `out[m][n] = x[m][k] . w^T (+ bias)`.
    ///
    /// `Packed` weights run the tuned GEMM or GEMV; `RowMajor` ones a plain blocked GEMM of SIMD dot products, the
    /// baseline. Packed, each output is one chain of fused multiply-adds over k in order, whatever `m` is; of products of pairs
    /// for bfloat16 weights on a tier that [has them](Tier::multiplies_pairs), which rounds x to that type. For a quantised
    /// weight x is quantised first; [`Cpu::linear_quantized`] takes rows that already are.
    ///
    /// # Panics
    /// When a length does not fit the shape.
    pub fn linear(&mut self, x: &[f32], m: usize, w: Matrix<'_>, bias: Option<&[f32]>, out: &mut [f32]) {
        w.check();
        assert_eq!(x.len(), m * w.k, "x of linear: m * k with m = {m}, k = {}", w.k);
        assert_eq!(out.len(), m * w.n, "out of linear: m * n with m = {m}, n = {}", w.n);
        if let Some(bias) = bias {
            assert_eq!(bias.len(), w.n, "bias of linear: n");
        }
        self.linear_runs(x, Runs::One(m), w, bias, None, out);
    }

    /// `out[i] = x[i] . w[i]^T` for `count` matrices `x` of equally many rows, one after the other, as are the weights in the
    /// data of `w`.
    ///
    /// # Panics
    /// When a length does not fit the shape.
    pub fn stacked_linear(&mut self, x: &[f32], count: usize, w: Matrix<'_>, out: &mut [f32]) {
        let rows = x.len() / (count * w.k).max(1);
        assert_eq!(x.len(), count * rows * w.k, "x of stacked_linear: count * rows * k");
        assert_eq!(out.len(), count * rows * w.n, "out of stacked_linear: count * rows * n");
        check_stack(count, w);
        self.linear_runs(x, Runs::Even { runs: count, rows }, w, None, None, out);
    }

    /// [`Cpu::stacked_linear`] of quantised rows and quantised weights.
    ///
    /// # Panics
    /// When a length does not fit the shape, or the weight is not quantised.
    pub fn stacked_linear_quantized(&mut self, x: &QuantRows, count: usize, w: Matrix<'_>, out: &mut [f32]) {
        let rows = x.rows() / count.max(1);
        check_stack(count, w);
        self.quantized_runs(x, Runs::Even { runs: count, rows }, w, None, None, out);
    }

    /// `linear` of each run with its own weight, or with an activation [`Cpu::linear_activated`]; data and bias are those of
    /// all weights, one after the other. Lengths were checked.
    pub(crate) fn linear_runs(
        &mut self,
        x: &[f32],
        runs: Runs<'_>,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        activation: Option<Activation>,
        out: &mut [f32],
    ) {
        if runs.rows() == 0 || w.n == 0 {
            return;
        }
        match w.data {
            Elems::F32(data) => self.linear_of(x, runs, w, data, bias, activation, out),
            Elems::F16(data) => self.linear_of(x, runs, w, data, bias, activation, out),
            Elems::Bf16(data) if self.tier.multiplies_pairs() && w.layout == Layout::Packed && w.k > 0 => {
                self.linear_pairs(x, runs, w, data, bias, activation, out);
            }
            Elems::Bf16(data) => self.linear_of(x, runs, w, data, bias, activation, out),
            Elems::Int8(_) | Elems::Int4(_) => {
                let mut rows = std::mem::take(&mut self.quant_rows);
                self.quantize_rows(x, w.k, &mut rows);
                self.quantized_runs(&rows, runs, w, bias, activation, out);
                self.quant_rows = rows;
            }
        }
    }

    fn linear_of<W: Element>(
        &mut self,
        x: &[f32],
        runs: Runs<'_>,
        w: Matrix<'_>,
        data: &[W],
        bias: Option<&[f32]>,
        activation: Option<Activation>,
        out: &mut [f32],
    ) {
        let (m, n, k) = (runs.rows(), w.n, w.k);
        if w.layout == Layout::RowMajor || self.tier == Tier::Scalar || k == 0 {
            for run in 0..runs.count() {
                let rows = runs.within(run, &(0..m));
                let (x, out) = (&x[rows.start * k..rows.end * k], &mut out[rows.start * n..rows.end * n]);
                self.multiply_rows(x, rows.len(), w, part(data, run, w.len_of_one()), bias_of(bias, run, n), out);
            }
            return;
        }
        let blocks = m.div_ceil(ROW_BLOCK);
        for block in 0..blocks {
            let rows = m * block / blocks..m * (block + 1) / blocks;
            self.gemm_rows(x, rows, runs, w, data, bias, activation, out);
        }
    }

    /// A product without tuning.
    fn multiply_rows<W: Element>(
        &mut self,
        x: &[f32],
        m: usize,
        w: Matrix<'_>,
        data: &[W],
        bias: Option<&[f32]>,
        out: &mut [f32],
    ) {
        if m == 0 {
            return;
        }
        let (tier, out) = (self.tier, SharedMut::new(out));
        self.pool.run(w.n.div_ceil(COLUMNS_PER_TASK), &|task, _| {
            let columns = task * COLUMNS_PER_TASK..w.n.min((task + 1) * COLUMNS_PER_TASK);
            let task = RowMajorTask { x, m, w, data, bias, columns, out: out.ptr() };
            // SAFETY: lengths were checked, and each task writes its own columns.
            unsafe { dispatch(tier, task) };
        });
    }

    /// The products of a block of at most [`ROW_BLOCK`] rows.
    fn gemm_rows<W: Element>(
        &mut self,
        x: &[f32],
        block: Range<usize>,
        runs: Runs<'_>,
        w: Matrix<'_>,
        data: &[W],
        bias: Option<&[f32]>,
        activation: Option<Activation>,
        out: &mut [f32],
    ) {
        let (tier, threads, n, k) = (self.tier, self.threads(), w.n, w.k);
        let out_width = if activation.is_some() { n / 2 } else { n };
        let m = block.len();
        // A single row is multiplied as it is.
        let packed_strips = |rows: &Range<usize>| if rows.len() > 1 { Strips::new(rows.len(), tier).count } else { 0 };
        if m > 1 {
            self.reserve_packed_rows(m * k);
        }

        let mut tasks = std::mem::take(&mut self.run_tasks);
        tasks.fill(runs.count(), |run| packed_strips(&runs.within(run, &block)));
        let packed = SharedMut::new(&mut self.packed_rows);
        let pack = |task: usize, _worker: usize| {
            let (run, strip) = tasks.locate(task);
            let own = runs.within(run, &block);
            let rows = Strips::new(own.len(), tier).rows(strip);
            let rows = own.start + rows.start..own.start + rows.end;
            // SAFETY: strips are disjoint.
            let dst = unsafe { packed.slice((rows.start - block.start) * k, rows.len() * k) };
            gemm::pack_rows(&x[rows.start * k..rows.end * k], k, dst);
        };
        if m * k <= PACK_ALONE {
            (0..tasks.total()).for_each(|task| pack(task, 0));
        } else {
            self.pool.run(tasks.total(), &pack);
        }

        let gated = activation.is_some();
        let shares =
            |rows: usize| Shares::new(Strips::new(rows, tier).count, n, k, gated, threads_for(rows, m, threads));
        let sums = if gated { most_sums(runs, &block, &shares) } else { 0 };
        tasks.fill(runs.count(), |run| match runs.within(run, &block).len() {
            0 => 0,
            rows => shares(rows).tasks(),
        });
        self.reserve_worker_scratch(gemm::K_BLOCK * PANEL + sums);
        let scratch = SharedMut::new(&mut self.worker_scratch);
        let (packed_rows, out) = (&self.packed_rows[..], SharedMut::new(out));
        self.pool.run(tasks.total(), &|task, worker| {
            let (run, task) = tasks.locate(task);
            let rows = runs.within(run, &block);
            let (data, bias) = (part(data, run, w.len_of_one()), bias_of(bias, run, n));
            let gated = activation.map(|activation| Gated { activation, bias, width: out_width });
            let shares = shares(rows.len());
            let panels = shares.panels(task);
            // SAFETY: lengths were checked, each task writes its own tiles, and a worker runs one task at a time.
            unsafe {
                let out = out.ptr().add(rows.start * out_width);
                if rows.len() == 1 {
                    let x = &x[rows.start * k..rows.end * k];
                    dispatch(tier, Gemv { x, n, k, data, bias, gated, panels, out });
                    return;
                }
                let scratch = &mut scratch.slice(worker, 1)[0];
                let (expanded, rest) = scratch.split_at_mut(gemm::K_BLOCK * PANEL);
                let packed = rows.start - block.start..rows.end - block.start;
                let task = BlockedGemm {
                    packed_rows: &packed_rows[packed.start * k..packed.end * k],
                    strips: Strips::new(rows.len(), tier),
                    strip_range: shares.strips(task),
                    n,
                    k,
                    data,
                    bias,
                    gated,
                    panels,
                    expanded,
                    sums: &mut rest[..sums],
                    out,
                };
                dispatch(tier, task);
            }
        });
        self.run_tasks = tasks;
    }
}

/// # Panics
/// When there are not as many weights.
pub(crate) fn check_stack(count: usize, w: Matrix<'_>) {
    if let Some(last) = count.checked_sub(1) {
        w.nth(last).check();
    }
}

/// Part `index` of parts of `len` elements.
pub(crate) fn part<T>(data: &[T], index: usize, len: usize) -> &[T] {
    &data[index * len..(index + 1) * len]
}

/// The bias of a run.
pub(crate) fn bias_of(bias: Option<&[f32]>, run: usize, n: usize) -> Option<&[f32]> {
    bias.map(|bias| part(bias, run, n))
}

/// Panels of gates that a task of a bandwidth-bound product takes at most, in multiples of those that are read side by side:
/// with their ups they are twice as much as an ordinary task, and small weights would be shared out unevenly.
pub(crate) fn stream_gates(panels: usize, threads: usize, side_by_side: usize) -> usize {
    panels.div_ceil(STREAM_TASKS_PER_THREAD * threads).next_multiple_of(side_by_side)
}

/// Sums that a task of any run within a block of rows keeps at most.
pub(crate) fn most_sums(runs: Runs<'_>, block: &Range<usize>, shares: &impl Fn(usize) -> Shares) -> usize {
    let rows = (0..runs.count()).map(|run| runs.within(run, block).len());
    rows.filter(|rows| *rows > 0).map(|rows| shares(rows).sums(rows)).max().unwrap_or(0)
}

/// How a product is shared out: tasks of some panels, and where there are few columns, of some strips of rows. Gates count
/// together with their ups.
#[derive(Clone, Copy)]
pub(crate) struct Shares {
    strips: usize,
    /// Panels, or pairs of gates and ups.
    units: usize,
    gated: bool,
    units_per_task: usize,
    column_tasks: usize,
    row_tasks: usize,
}

impl Shares {
    pub(crate) fn new(strips: usize, n: usize, k: usize, gated: bool, threads: usize) -> Shares {
        let panels_each = 1 + usize::from(gated);
        let units = n.div_ceil(PANEL) / panels_each;
        let units_per_task = if strips == 1 {
            // Enough to stream, few enough to share out evenly.
            let by_size = STREAM_ELEMENTS.div_ceil(PANEL * k).next_multiple_of(gemm::GEMV_PANELS);
            let by_size = if gated { by_size.min(stream_gates(units, threads, gemm::GEMV_PANELS)) } else { by_size };
            by_size.min(units.div_ceil(threads)).max(1)
        } else {
            (units / (4 * threads)).clamp(1, PANELS_PER_TASK / panels_each)
        };
        let column_tasks = units.div_ceil(units_per_task);
        let row_tasks = (2 * threads).div_ceil(column_tasks).clamp(1, strips);
        Shares { strips, units, gated, units_per_task, column_tasks, row_tasks }
    }

    pub(crate) fn tasks(&self) -> usize {
        self.column_tasks * self.row_tasks
    }

    /// Most sums of a task, of which the rows are part of `rows`.
    pub(crate) fn sums(&self, rows: usize) -> usize {
        let panels = self.units_per_task * (1 + usize::from(self.gated));
        panels * rows.min(self.strips.div_ceil(self.row_tasks) * gemm::MAX_TILE_ROWS) * PANEL
    }

    pub(crate) fn strips(&self, task: usize) -> Range<usize> {
        let row_task = task % self.row_tasks;
        self.strips * row_task / self.row_tasks..self.strips * (row_task + 1) / self.row_tasks
    }

    pub(crate) fn panels(&self, task: usize) -> Panels {
        let first = task / self.row_tasks * self.units_per_task;
        let units = first..self.units.min(first + self.units_per_task);
        if self.gated { Panels::gated(units, self.units) } else { Panels::plain(units) }
    }
}
