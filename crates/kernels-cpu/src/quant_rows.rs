//! Activations as 8-bit integers, made on the fly, alone or by the op that produces them.

use crate::buffer::AlignedBuf;
use crate::cpu::{Cpu, SharedMut};
use crate::norm::{RmsNorm, add};
use crate::quant::{BLOCK, GROUP, INT4_OFFSET, INT8_OFFSET, int8_code, int8_scale, largest};
use crate::rows::{Activate, Activation, for_row_ranges_on};
use crate::simd::{Kernel, Simd, dispatch};

/// Groups of a block.
pub(crate) const GROUPS: usize = BLOCK / GROUP;

/// Rows of activations as 8-bit codes with one scale per 256 values; the input of [`Cpu::linear_quantized`]. The owner
/// reserves it once and fills it in every step.
pub struct QuantRows {
    rows: usize,
    k: usize,
    /// `[blocks][rows][256]`, -127 to 127, zero beyond k: the rows of a tile lie side by side.
    pub(crate) codes: AlignedBuf<i8>,
    /// `[blocks][rows]`.
    pub(crate) scales: AlignedBuf<f32>,
    /// `[blocks][rows]`: what a sum over a block of int8 weights starts from, to make up for the codes' offset.
    pub(crate) starts_int8: AlignedBuf<i32>,
    /// `[blocks][rows][8]`: the same for the groups of int4 weights.
    pub(crate) starts_int4: AlignedBuf<i32>,
}

impl Default for QuantRows {
    fn default() -> Self {
        QuantRows::new()
    }
}

impl QuantRows {
    /// No rows, and no room for any.
    pub fn new() -> QuantRows {
        QuantRows {
            rows: 0,
            k: 0,
            codes: AlignedBuf::zeroed(0),
            scales: AlignedBuf::zeroed(0),
            starts_int8: AlignedBuf::zeroed(0),
            starts_int4: AlignedBuf::zeroed(0),
        }
    }

    /// Makes room for `max_rows` rows of up to `max_k` values, so that filling never allocates. The rows are lost if it
    /// has to grow.
    pub fn reserve(&mut self, max_rows: usize, max_k: usize) {
        let blocks = max_k.div_ceil(BLOCK) * max_rows;
        if self.scales.len() < blocks {
            self.rows = 0;
            self.codes = AlignedBuf::zeroed(blocks * BLOCK);
            self.scales = AlignedBuf::zeroed(blocks);
            self.starts_int8 = AlignedBuf::zeroed(blocks);
            self.starts_int4 = AlignedBuf::zeroed(blocks * GROUPS);
        }
    }

    /// Bytes that room for `max_rows` rows of up to `max_k` values takes.
    pub fn bytes_of(max_rows: usize, max_k: usize) -> usize {
        max_k.div_ceil(BLOCK) * max_rows * (BLOCK + size_of::<f32>() + size_of::<i32>() * (1 + GROUPS))
    }

    /// Bytes of the room it has.
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() * (size_of::<f32>() + size_of::<i32>() * (1 + GROUPS))
    }

    /// Rows held.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Value (row, column) as the codes say it.
    ///
    /// # Panics
    /// When there is no such value.
    pub fn get(&self, row: usize, column: usize) -> f32 {
        assert!(row < self.rows && column < self.k, "value ({row}, {column}) of {} by {}", self.rows, self.k);
        let block = column / BLOCK * self.rows + row;
        f32::from(self.codes[block * BLOCK + column % BLOCK]) * self.scales[block]
    }

    /// Gives access to the rows of a new shape, each of which must then be written.
    pub(crate) fn shared(&mut self, rows: usize, k: usize) -> SharedRows {
        self.reserve(rows, k);
        (self.rows, self.k) = (rows, k);
        SharedRows {
            rows,
            codes: SharedMut::new(&mut self.codes),
            scales: SharedMut::new(&mut self.scales),
            starts_int8: SharedMut::new(&mut self.starts_int8),
            starts_int4: SharedMut::new(&mut self.starts_int4),
        }
    }
}

/// [`QuantRows`] of which the workers write different rows.
#[derive(Clone, Copy)]
pub(crate) struct SharedRows {
    rows: usize,
    codes: SharedMut<i8>,
    scales: SharedMut<f32>,
    starts_int8: SharedMut<i32>,
    starts_int4: SharedMut<i32>,
}

impl SharedRows {
    /// # Safety
    /// No other worker writes this row meanwhile.
    unsafe fn write(&self, tier: crate::Tier, row: usize, values: &[f32]) {
        for (block, values) in values.chunks(BLOCK).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { self.write_block(tier, row, block, values) };
        }
    }

    /// # Safety
    /// No other worker writes this block of this row meanwhile.
    unsafe fn write_block(&self, tier: crate::Tier, row: usize, block: usize, values: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe { dispatch(tier, self.block(row, block, values)) };
    }

    /// The same from code that is compiled for a tier.
    ///
    /// # Safety
    /// As for `write_block`, and the CPU has the features of `S`.
    #[inline(always)]
    pub(crate) unsafe fn write_block_on<S: Simd>(&self, row: usize, block: usize, values: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.block(row, block, values).simd::<S>() };
    }

    /// # Safety
    /// No other worker writes this block of this row meanwhile.
    #[inline(always)]
    unsafe fn block<'a>(&self, row: usize, block: usize, values: &'a [f32]) -> QuantizeBlock<'a> {
        let at = block * self.rows + row;
        // SAFETY: the caller's promise.
        unsafe {
            QuantizeBlock {
                values,
                codes: self.codes.slice(at * BLOCK, BLOCK),
                scale: &mut self.scales.slice(at, 1)[0],
                start_int8: &mut self.starts_int8.slice(at, 1)[0],
                starts_int4: self.starts_int4.slice(at * GROUPS, GROUPS),
            }
        }
    }
}

/// Up to 256 values of one row.
struct QuantizeBlock<'a> {
    values: &'a [f32],
    codes: &'a mut [i8],
    scale: &'a mut f32,
    start_int8: &'a mut i32,
    starts_int4: &'a mut [i32],
}

impl Kernel for QuantizeBlock<'_> {
    fn scalar(mut self) {
        let (scale, inverse) = int8_scale(largest(self.values));
        self.codes.fill(0);
        for (code, x) in self.codes.iter_mut().zip(self.values) {
            *code = int8_code(*x, inverse);
        }
        *self.scale = scale;
        self.write_starts();
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(mut self) {
        let (p, len) = (self.values.as_ptr(), self.values.len());
        // SAFETY: `n` values are left each time, and codes has room for a whole block.
        unsafe {
            let (mut most, mut poison) = (S::zero(), S::zero());
            let mut i = 0;
            while i < len {
                let n = S::LANES.min(len - i);
                let x = S::load_partial(p.add(i), n);
                most = S::max(most, S::max(x, S::sub(S::zero(), x)));
                // Stays zero unless a value is not finite.
                poison = S::fma(x, S::zero(), poison);
                i += n;
            }
            let largest = if S::sum(poison) == 0.0 { S::max_lane(most) } else { f32::NAN };
            let (scale, inverse) = int8_scale(largest);
            *self.scale = scale;
            if len < BLOCK || inverse == 0.0 {
                self.codes.fill(0);
            }
            i = 0;
            while i < len && inverse != 0.0 {
                let n = S::LANES.min(len - i);
                let x = S::load_partial(p.add(i), n);
                S::store_i8(self.codes.as_mut_ptr().add(i), S::mul(x, S::splat(inverse)));
                i += n;
            }
        }
        self.write_starts();
    }
}

impl QuantizeBlock<'_> {
    #[inline(always)]
    fn write_starts(&mut self) {
        let mut total = 0;
        for (start, codes) in self.starts_int4.iter_mut().zip(self.codes.chunks_exact(GROUP)) {
            let mut sum = 0;
            for &code in codes {
                sum += i32::from(code);
            }
            *start = -INT4_OFFSET * sum;
            total += sum;
        }
        *self.start_int8 = -INT8_OFFSET * total;
    }
}

impl Cpu {
    /// `out = x`, quantised, for rows of `k` values.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn quantize_rows(&mut self, x: &[f32], k: usize, out: &mut QuantRows) {
        assert!(k > 0 && x.len().is_multiple_of(k), "x of quantize_rows: rows of {k}, found {}", x.len());
        let (tier, rows) = (self.tier, x.len() / k);
        let out = out.shared(rows, k);
        for_row_ranges_on(&mut self.pool, rows, k, &|rows, _| {
            for row in rows {
                // SAFETY: rows are disjoint.
                unsafe { out.write(tier, row, &x[row * k..(row + 1) * k]) };
            }
        });
    }

    /// `out[i] = x[rows[i]]`, quantised, for rows of `k` values.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn quantize_gathered_rows(&mut self, x: &[f32], k: usize, rows: &[u32], out: &mut QuantRows) {
        let tier = self.tier;
        let out = out.shared(rows.len(), k);
        for_row_ranges_on(&mut self.pool, rows.len(), k, &|range, _| {
            for i in range {
                let source = rows[i] as usize * k;
                // SAFETY: rows are disjoint.
                unsafe { out.write(tier, i, &x[source..source + k]) };
            }
        });
    }

    /// [`Cpu::rms_norm`], quantised.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn rms_norm_quantized(&mut self, x: &[f32], w: &[f32], eps: f32, out: &mut QuantRows) {
        let width = w.len();
        assert!(width > 0 && x.len().is_multiple_of(width), "x of rms_norm: rows of {width}, found {}", x.len());
        self.rows_quantized(x.len() / width, width, 2 * width, out, &|tier, row, normed| {
            let x = x[row * width..].as_ptr();
            // SAFETY: x, w and the row have `width` elements.
            unsafe { dispatch(tier, RmsNorm { x, w, eps, out: normed.as_mut_ptr() }) };
        });
    }

    /// [`Cpu::add_rms_norm`], quantised.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn add_rms_norm_quantized(
        &mut self,
        residual: &mut [f32],
        delta: &[f32],
        w: &[f32],
        eps: f32,
        out: &mut QuantRows,
    ) {
        let width = w.len();
        assert_eq!(residual.len(), delta.len(), "residual and delta of add_rms_norm");
        assert!(
            width > 0 && delta.len().is_multiple_of(width),
            "rows of add_rms_norm: {width} wide, found {}",
            delta.len()
        );
        let residual = SharedMut::new(residual);
        self.rows_quantized(delta.len() / width, width, 3 * width, out, &|tier, row, normed| {
            // SAFETY: rows are disjoint.
            let residual = unsafe { residual.slice(row * width, width) };
            add(residual, &delta[row * width..(row + 1) * width]);
            // SAFETY: the residual, w and the row have `width` elements.
            unsafe { dispatch(tier, RmsNorm { x: residual.as_ptr(), w, eps, out: normed.as_mut_ptr() }) };
        });
    }

    /// [`Cpu::silu_mul`], quantised.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn silu_mul_quantized(&mut self, gate_up: &[f32], inter: usize, out: &mut QuantRows) {
        self.activate_quantized(gate_up, inter, Activation::Silu, out);
    }

    /// [`Cpu::activate`], quantised.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn activate_quantized(&mut self, gate_up: &[f32], inter: usize, activation: Activation, out: &mut QuantRows) {
        assert!(
            inter > 0 && gate_up.len().is_multiple_of(2 * inter),
            "gate_up of silu_mul: rows of {}, found {}",
            2 * inter,
            gate_up.len()
        );
        let (tier, rows) = (self.tier, gate_up.len() / (2 * inter));
        let out = out.shared(rows, inter);
        for_row_ranges_on(&mut self.pool, rows, 5 * inter, &|rows, _| {
            for row in rows {
                let (gate, up) = gate_up[row * 2 * inter..(row + 1) * 2 * inter].split_at(inter);
                // Block by block, so that products never leave the first cache.
                for (block, (gate, up)) in gate.chunks(BLOCK).zip(up.chunks(BLOCK)).enumerate() {
                    let mut product = [0.0; BLOCK];
                    let product = &mut product[..gate.len()];
                    // SAFETY: three slices of one length; rows are disjoint.
                    unsafe {
                        dispatch(tier, Activate { gate, up, activation, out: product });
                        out.write_block(tier, row, block, product);
                    }
                }
            }
        });
    }

    /// Quantises rows that `fill(tier, row, values)` makes; `cost` is the work per row, as elements.
    fn rows_quantized(
        &mut self,
        rows: usize,
        width: usize,
        cost: usize,
        out: &mut QuantRows,
        fill: &(dyn Fn(crate::Tier, usize, &mut [f32]) + Sync),
    ) {
        self.reserve_worker_scratch(width);
        let tier = self.tier;
        let (out, scratch) = (out.shared(rows, width), SharedMut::new(&mut self.worker_scratch));
        for_row_ranges_on(&mut self.pool, rows, cost, &|rows, worker| {
            // SAFETY: a worker runs one task at a time.
            let values = unsafe { &mut scratch.slice(worker, 1)[0][..width] };
            for row in rows {
                fill(tier, row, values);
                // SAFETY: rows are disjoint.
                unsafe { out.write(tier, row, values) };
            }
        });
    }
}
