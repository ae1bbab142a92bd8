//! Weights as the kernels see them: element type, shape and layout.

use half::{bf16, f16};

use crate::quant::{QuantKind, get_int4, get_int8, packed_bytes, panel_bytes};

/// Output rows that share one packed panel: two AVX-512 vectors, four AVX2 vectors.
pub const PANEL: usize = 32;

/// Weight elements of one of the stored types.
#[derive(Clone, Copy)]
pub enum Elems<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// IEEE 16-bit floats.
    F16(&'a [f16]),
    /// bfloat16: the upper half of an f32.
    Bf16(&'a [bf16]),
    /// 8 bits with scales, in the bytes of [`QuantKind::Int8`]; always packed.
    Int8(&'a [u8]),
    /// 4 bits with scales, in the bytes of [`QuantKind::Int4`]; always packed.
    Int4(&'a [u8]),
}

impl Elems<'_> {
    /// How many elements there are; of quantised weights, how many bytes.
    pub fn len(&self) -> usize {
        match self {
            Elems::F32(values) => values.len(),
            Elems::F16(values) => values.len(),
            Elems::Bf16(values) => values.len(),
            Elems::Int8(bytes) | Elems::Int4(bytes) => bytes.len(),
        }
    }

    /// The kind of a quantised weight.
    pub fn quant_kind(&self) -> Option<QuantKind> {
        match self {
            Elems::F32(_) | Elems::F16(_) | Elems::Bf16(_) => None,
            Elems::Int8(_) => Some(QuantKind::Int8),
            Elems::Int4(_) => Some(QuantKind::Int4),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The order of a weight's elements in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// `[ceil(n / 32)][k][32]`, the last panel zero padded: what the tuned kernels stream.
    Packed,
    /// `[n][k]`, as in checkpoints.
    RowMajor,
}

/// A weight of `n` output rows and `k` inputs.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    /// The elements, in the order that `layout` says.
    pub data: Elems<'a>,
    /// Output rows.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Element order.
    pub layout: Layout,
}

impl<'a> Matrix<'a> {
    /// Weight number `index` where the data is that of several weights of this shape, one after the other.
    ///
    /// # Panics
    /// When there is no such weight.
    pub fn nth(&self, index: usize) -> Matrix<'a> {
        let len = self.len_of_one();
        let range = index * len..(index + 1) * len;
        let data = match self.data {
            Elems::F32(values) => Elems::F32(&values[range]),
            Elems::F16(values) => Elems::F16(&values[range]),
            Elems::Bf16(values) => Elems::Bf16(&values[range]),
            Elems::Int8(bytes) => Elems::Int8(&bytes[range]),
            Elems::Int4(bytes) => Elems::Int4(&bytes[range]),
        };
        Matrix { data, ..*self }
    }

    /// Element (row, column) as f32.
    pub fn get(&self, row: usize, column: usize) -> f32 {
        match self.data {
            Elems::F32(values) => values[self.index(row, column)],
            Elems::F16(values) => values[self.index(row, column)].to_f32(),
            Elems::Bf16(values) => values[self.index(row, column)].to_f32(),
            Elems::Int8(bytes) => {
                get_int8(&bytes[row / PANEL * panel_bytes(QuantKind::Int8, self.k)..], self.k, row % PANEL, column)
            }
            Elems::Int4(bytes) => {
                get_int4(&bytes[row / PANEL * panel_bytes(QuantKind::Int4, self.k)..], row % PANEL, column)
            }
        }
    }

    /// Where element (row, column) of a weight that is not quantised is in `data`.
    #[inline]
    pub fn index(&self, row: usize, column: usize) -> usize {
        match self.layout {
            Layout::Packed => (row / PANEL * self.k + column) * PANEL + row % PANEL,
            Layout::RowMajor => row * self.k + column,
        }
    }

    /// Elements of a weight of this shape and layout; of quantised weights, bytes.
    pub(crate) fn len_of_one(&self) -> usize {
        match (self.data.quant_kind(), self.layout) {
            (None, Layout::Packed) => packed_len(self.n, self.k),
            (None, Layout::RowMajor) => self.n * self.k,
            (Some(kind), Layout::Packed) => packed_bytes(kind, self.n, self.k),
            (Some(kind), Layout::RowMajor) => panic!("a weight of kind {kind:?} must be packed"),
        }
    }

    /// # Panics
    /// When the element count does not fit shape and layout.
    pub(crate) fn check(&self) {
        assert_eq!(
            self.data.len(),
            self.len_of_one(),
            "elements of a {:?} weight with n = {}, k = {}",
            self.layout,
            self.n,
            self.k
        );
    }
}

/// Elements of a packed weight, padding included.
pub fn packed_len(n: usize, k: usize) -> usize {
    n.div_ceil(PANEL) * PANEL * k
}

/// Packs a weight of `n` rows and `k` columns: `src_row(row, values)` fills the `k` values of one row.
/// Streams through a buffer of one panel. [`crate::Cpu::pack`] does the same on all workers.
///
/// # Panics
/// When `dst` is not [`packed_len`] long.
pub fn pack_panels<T: Copy + Default>(src_row: impl Fn(usize, &mut [T]), n: usize, k: usize, dst: &mut [T]) {
    assert_eq!(dst.len(), packed_len(n, k), "elements of a packed weight with n = {n}, k = {k}");
    if k == 0 {
        return;
    }
    let mut rows = Vec::new();
    for (panel, dst) in dst.chunks_exact_mut(PANEL * k).enumerate() {
        pack_panel(&src_row, n, k, panel, &mut rows, dst);
    }
}

/// Packs panel number `panel` (rows `32 * panel ..`) into `dst` (`32 * k` long), using `rows` as buffer.
pub fn pack_panel<T: Copy + Default>(
    src_row: &impl Fn(usize, &mut [T]),
    n: usize,
    k: usize,
    panel: usize,
    rows: &mut Vec<T>,
    dst: &mut [T],
) {
    // Rows a power of two apart would all fall into one cache set; the odd stride spreads them.
    let stride = k + PANEL / 2 + 1;
    rows.resize(PANEL * stride, T::default());
    let first = panel * PANEL;
    let present = n.saturating_sub(first).min(PANEL);
    for row in 0..present {
        src_row(first + row, &mut rows[row * stride..row * stride + k]);
    }
    for row in present..PANEL {
        rows[row * stride..row * stride + k].fill(T::default());
    }
    for (column, lanes) in dst.chunks_exact_mut(PANEL).enumerate() {
        for (row, lane) in lanes.iter_mut().enumerate() {
            *lane = rows[row * stride + column];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_puts_every_element_where_index_looks_for_it() {
        for (n, k) in [(1, 1), (31, 3), (32, 7), (33, 5), (100, 17)] {
            let value = |row: usize, column: usize| (row * 1000 + column + 1) as f32;
            let mut packed = vec![f32::NAN; packed_len(n, k)];
            let fill = |row: usize, values: &mut [f32]| {
                for (column, v) in values.iter_mut().enumerate() {
                    *v = value(row, column);
                }
            };
            pack_panels(fill, n, k, &mut packed);
            let matrix = Matrix { data: Elems::F32(&packed), n, k, layout: Layout::Packed };
            matrix.check();
            for row in 0..n {
                for column in 0..k {
                    assert_eq!(matrix.get(row, column), value(row, column));
                }
            }
            let padding = packed.iter().filter(|&&x| x == 0.0).count();
            assert_eq!(padding, packed.len() - n * k);
        }
    }
}
