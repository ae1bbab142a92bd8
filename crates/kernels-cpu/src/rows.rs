//! Ops that treat each row alone: gathering, arg max, SiLU; and how rows are shared out.

use std::ops::Range;

use crate::cpu::{Cpu, SharedMut};
use crate::matrix::{Elems, Layout, Matrix, PANEL};
use crate::pool::Pool;
use crate::simd::{Element, Kernel, Simd, dispatch, exp};

/// Elements below which a task is not worth waking a helper.
const ELEMENTS_PER_TASK: usize = 16 * 1024;

/// Runs `f` over all rows, in ranges of a size that pays.
pub(crate) fn for_row_ranges(pool: &mut Pool, rows: usize, width: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
    for_row_ranges_on(pool, rows, width, &|range, _worker| f(range));
}

/// The same, with the number of the worker.
pub(crate) fn for_row_ranges_on(pool: &mut Pool, rows: usize, width: usize, f: &(dyn Fn(Range<usize>, usize) + Sync)) {
    let per_task = ELEMENTS_PER_TASK.div_ceil(width.max(1)).max(rows.div_ceil(8 * pool.threads()));
    pool.run(rows.div_ceil(per_task), &|task, worker| f(task * per_task..rows.min((task + 1) * per_task), worker));
}

impl Cpu {
    /// Rows `ids` of `table` (n = vocabulary, k = hidden size; either layout), as f32.
    ///
    /// # Panics
    /// When an id is not below `table.n`, or a length does not fit.
    pub fn embed(&mut self, ids: &[u32], table: Matrix<'_>, out: &mut [f32]) {
        table.check();
        assert_eq!(out.len(), ids.len() * table.k, "out of embed: ids * k");
        let out = SharedMut::new(out);
        for_row_ranges(&mut self.pool, ids.len(), table.k, &|rows| {
            for row in rows {
                let id = ids[row] as usize;
                assert!(id < table.n, "token id {id} of embed must be below {}", table.n);
                // SAFETY: rows are disjoint.
                let out = unsafe { out.slice(row * table.k, table.k) };
                match table.data {
                    Elems::F32(data) => embed_row(data, &table, id, out),
                    Elems::F16(data) => embed_row(data, &table, id, out),
                    Elems::Bf16(data) => embed_row(data, &table, id, out),
                    Elems::Int8(_) | Elems::Int4(_) => {
                        out.iter_mut().enumerate().for_each(|(column, out)| *out = table.get(id, column));
                    }
                }
            }
        });
    }

    /// Copies rows of `width` elements: `out[i] = x[rows[i]]`.
    ///
    /// # Panics
    /// When a row is out of range or a length does not fit.
    pub fn gather_rows(&mut self, x: &[f32], width: usize, rows: &[u32], out: &mut [f32]) {
        assert_eq!(out.len(), rows.len() * width, "out of gather_rows: rows * width");
        let out = SharedMut::new(out);
        for_row_ranges(&mut self.pool, rows.len(), width, &|range| {
            for i in range {
                let source = rows[i] as usize * width;
                // SAFETY: rows are disjoint.
                unsafe { out.slice(i * width, width) }.copy_from_slice(&x[source..source + width]);
            }
        });
    }

    /// The first index of each row's maximum. NaN never wins; a row of nothing but NaN gives 0.
    ///
    /// # Panics
    /// When a length does not fit, or `width` is 0 or above `u32::MAX`.
    pub fn argmax_rows(&mut self, logits: &[f32], width: usize, out: &mut [u32]) {
        assert!(width > 0 && u32::try_from(width).is_ok(), "width of argmax_rows: {width}");
        assert_eq!(logits.len(), out.len() * width, "logits of argmax_rows: rows * width");
        let (tier, out) = (self.tier, SharedMut::new(out));
        let rows = logits.len() / width;
        for_row_ranges(&mut self.pool, rows, width, &|rows| {
            for row in rows {
                // SAFETY: rows are disjoint.
                let best = unsafe { &mut out.slice(row, 1)[0] };
                // SAFETY: plain slices.
                unsafe { dispatch(tier, ArgMax { row: &logits[row * width..(row + 1) * width], best }) };
            }
        });
    }

    /// `out = silu(gate) * up` for rows `[gate | up]`, each `inter` wide.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn silu_mul(&mut self, gate_up: &[f32], inter: usize, out: &mut [f32]) {
        self.activate(gate_up, inter, Activation::Silu, out);
    }

    /// [`Cpu::silu_mul`] with any activation.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn activate(&mut self, gate_up: &[f32], inter: usize, activation: Activation, out: &mut [f32]) {
        assert_eq!(gate_up.len(), 2 * out.len(), "gate_up of silu_mul: twice out");
        assert!(inter > 0 && out.len().is_multiple_of(inter), "out of silu_mul: rows of {inter}, found {}", out.len());
        let (tier, rows, out) = (self.tier, out.len() / inter, SharedMut::new(out));
        for_row_ranges(&mut self.pool, rows, 4 * inter, &|rows| {
            for row in rows {
                let (gate, up) = gate_up[row * 2 * inter..(row + 1) * 2 * inter].split_at(inter);
                // SAFETY: rows are disjoint.
                let out = unsafe { out.slice(row * inter, inter) };
                // SAFETY: three slices of one length.
                unsafe { dispatch(tier, Activate { gate, up, activation, out }) };
            }
        });
    }
}

fn embed_row<W: Element>(data: &[W], table: &Matrix<'_>, id: usize, out: &mut [f32]) {
    let first = table.index(id, 0);
    let step = if table.layout == Layout::Packed { PANEL } else { 1 };
    for (out, value) in out.iter_mut().zip(data[first..].iter().step_by(step)) {
        *out = value.to_f32();
    }
}

struct ArgMax<'a> {
    row: &'a [f32],
    best: &'a mut u32,
}

impl Kernel for ArgMax<'_> {
    fn scalar(self) {
        let (mut best, mut value) = (None, f32::NEG_INFINITY);
        for (i, &x) in self.row.iter().enumerate() {
            if x > value || (best.is_none() && x == value) {
                (best, value) = (Some(i), x);
            }
        }
        *self.best = best.unwrap_or(0) as u32;
    }

    /// Two passes: the maximum, then the first vector that holds it.
    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let (p, len) = (self.row.as_ptr(), self.row.len());
        let whole = len - len % S::LANES;
        // SAFETY: all loads lie within the row.
        unsafe {
            let mut max = S::splat(f32::NEG_INFINITY);
            let mut i = 0;
            while i < whole {
                max = S::max(S::load(p.add(i)), max);
                i += S::LANES;
            }
            let tail = S::load_partial(p.add(whole), len - whole);
            max = S::max(S::keep(tail, 0, (len - whole) as isize, max), max);
            let value = S::max_lane(max);
            let wanted = S::splat(value);
            i = 0;
            while i < whole && !S::any_equal(S::load(p.add(i)), wanted) {
                i += S::LANES;
            }
            while i < len && self.row[i] != value {
                i += 1;
            }
            *self.best = if i < len { i as u32 } else { 0 };
        }
    }
}

/// What is made of the gate and up projections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    Silu,
    /// `gate * sigmoid(alpha * gate) * (up + 1)` of a gate of at most `limit` and an up within `limit` around 0.
    ClampedSwiglu {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Bound of both inputs.
        limit: f32,
    },
}

impl Activation {
    #[inline(always)]
    pub(crate) unsafe fn apply<S: Simd>(self, gate: S::V, up: S::V) -> S::V {
        // SAFETY: the caller has the features of `S`.
        unsafe {
            let one = S::splat(1.0);
            match self {
                Activation::Silu => {
                    let denominator = S::add(one, exp::<S>(S::sub(S::zero(), gate)));
                    S::mul(S::div(gate, denominator), up)
                }
                Activation::ClampedSwiglu { alpha, limit } => {
                    let negated = |x| S::sub(S::zero(), x);
                    // The least of x and the limit.
                    let capped = |x| negated(S::max(negated(x), S::splat(-limit)));
                    let (gate, up) = (capped(gate), S::max(capped(up), S::splat(-limit)));
                    let denominator = S::add(one, exp::<S>(S::mul(gate, S::splat(-alpha))));
                    S::mul(S::div(gate, denominator), S::add(up, one))
                }
            }
        }
    }
}

pub(crate) struct Activate<'a> {
    pub(crate) gate: &'a [f32],
    pub(crate) up: &'a [f32],
    pub(crate) activation: Activation,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for Activate<'_> {
    fn scalar(self) {
        for ((out, &gate), &up) in self.out.iter_mut().zip(self.gate).zip(self.up) {
            *out = match self.activation {
                Activation::Silu => gate / (1.0 + (-gate).exp()) * up,
                Activation::ClampedSwiglu { alpha, limit } => {
                    let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
                    gate / (1.0 + (-alpha * gate).exp()) * (up + 1.0)
                }
            };
        }
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let len = self.out.len();
        let mut i = 0;
        while i < len {
            let n = S::LANES.min(len - i);
            // SAFETY: `n` elements are left in each slice.
            unsafe {
                let gate = S::load_partial(self.gate.as_ptr().add(i), n);
                let up = S::load_partial(self.up.as_ptr().add(i), n);
                let value = self.activation.apply::<S>(gate, up);
                S::store_partial(self.out.as_mut_ptr().add(i), value, n);
            }
            i += n;
        }
    }
}
