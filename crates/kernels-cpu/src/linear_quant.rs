//! `linear` over quantised weights and activations: how a product is cut into tasks.
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
use crate::matrix::{Elems, Matrix, PANEL};
use crate::quant::{BLOCK, GROUP, QuantKind, block_stride, panel_bytes};
use crate::quant::{INT4_GROUP, INT8_OFFSET, int4_code, int4_scale_at, int8_scale_at};
use crate::quant_rows::QuantRows;

impl Cpu {
    /// `out[m][n] = x[m][k] . w^T (+ bias)` of quantised rows and a quantised weight, where m is how many rows `x` has.
    ///
    /// # Panics
    /// When the weight is not quantised, or a length does not fit the shape.
    pub fn linear_quantized(&mut self, x: &QuantRows, w: Matrix<'_>, bias: Option<&[f32]>, out: &mut [f32]) {
        w.check();
        let m = x.rows();
        assert_eq!(x.k(), w.k, "k of the rows and of the weight of linear");
        assert_eq!(out.len(), m * w.n, "out of linear: m * n with m = {m}, n = {}", w.n);
        if let Some(bias) = bias {
            assert_eq!(bias.len(), w.n, "bias of linear: n");
        }
        let (kind, data) = match w.data {
            Elems::Int8(data) => (QuantKind::Int8, data),
            Elems::Int4(data) => (QuantKind::Int4, data),
            _ => panic!("linear_quantized needs a quantised weight"),
        };
        let out = SharedMut::new(out);
        self.pool.run(w.n.div_ceil(PANEL), &|panel, _| {
            let columns = panel * PANEL..w.n.min((panel + 1) * PANEL);
            let task = Oracle { x, kind, data, n: w.n, bias, columns, out: out.ptr() };
            // SAFETY: lengths were checked, and each task writes its own columns.
            unsafe { task.run() };
        });
    }
}

/// The obvious loops over a range of output columns.
struct Oracle<'a> {
    x: &'a QuantRows,
    kind: QuantKind,
    data: &'a [u8],
    n: usize,
    bias: Option<&'a [f32]>,
    columns: Range<usize>,
    /// The whole output, `[m][n]`.
    out: *mut f32,
}

impl Oracle<'_> {
    unsafe fn run(&self) {
        let bytes = panel_bytes(self.kind, self.x.k());
        for row in 0..self.x.rows() {
            for column in self.columns.clone() {
                let panel = &self.data[column / PANEL * bytes..][..bytes];
                let mut acc = 0.0f32;
                for (i, block) in panel.chunks(block_stride(self.kind)).enumerate() {
                    let at = i * self.x.rows() + row;
                    let codes = &self.x.codes[at * BLOCK..(at + 1) * BLOCK];
                    let scale = self.x.scales[at];
                    acc = match self.kind {
                        QuantKind::Int8 => int8_block(block, column % PANEL, codes, scale, acc),
                        QuantKind::Int4 => int4_block(block, column % PANEL, codes, scale, acc),
                    };
                }
                if let Some(bias) = self.bias {
                    acc += bias[column];
                }
                // SAFETY: within the output, and no other task writes these columns.
                unsafe { *self.out.add(row * self.n + column) = acc };
            }
        }
    }
}

fn int8_block(block: &[u8], lane: usize, codes: &[i8], scale: f32, acc: f32) -> f32 {
    let (weights, scales) = block.split_at(block.len() - PANEL * size_of::<f32>());
    let mut sum = 0;
    for (weights, codes) in weights.chunks_exact(4 * PANEL).zip(codes.chunks_exact(4)) {
        for i in 0..4 {
            sum += (i32::from(weights[4 * lane + i]) - INT8_OFFSET) * i32::from(codes[i]);
        }
    }
    (sum as f32).mul_add(int8_scale_at(scales, lane) * scale, acc)
}

fn int4_block(block: &[u8], lane: usize, codes: &[i8], scale: f32, acc: f32) -> f32 {
    let mut part = 0.0f32;
    for (group, codes) in block.chunks_exact(INT4_GROUP).zip(codes.chunks_exact(GROUP)) {
        let sum: i32 = codes.iter().enumerate().map(|(i, &x)| int4_code(group, lane, i) * i32::from(x)).sum();
        part = (sum as f32).mul_add(int4_scale_at(group, lane), part);
    }
    part.mul_add(scale, acc)
}
