//! Products of gates and ups that end in the activation: `out = activation(x . gate^T, x . up^T)`.
//!
//! The weight is that of both, gates first. A task takes panels of gates and the panels of the same columns' ups in turns,
//! keeps their sums in a register or in its own scratch, and writes only what the activation makes of them. Sums and
//! activation are those of the product and the op after it, bit for bit.

use std::ops::Range;

use crate::cpu::Cpu;
use crate::experts::ExpertPairs;
use crate::matrix::{Layout, Matrix, PANEL};
use crate::quant_rows::QuantRows;
use crate::rows::Activation;
use crate::runs::Runs;
use crate::simd::Simd;
use crate::tier::Tier;

impl Tier {
    /// Products of packed weights apply an activation where gates and ups are a multiple of this wide each: others have
    /// gates and ups in one panel. None on the scalar tier, whose product and activation are the oracle.
    pub fn activated_multiple(self) -> Option<usize> {
        (self != Tier::Scalar).then_some(PANEL)
    }
}

impl Cpu {
    /// `out[m][n / 2] = activation` of the two halves of `x[m][k] . w^T (+ bias)`, for a weight of gates followed by ups.
    ///
    /// # Panics
    /// When a length does not fit the shape, the weight is not packed, or its width or the tier has no such product, see
    /// [`Tier::activated_multiple`].
    pub fn linear_activated(
        &mut self,
        x: &[f32],
        m: usize,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        activation: Activation,
        out: &mut [f32],
    ) {
        w.check();
        check_gated(self.tier, w);
        assert_eq!(x.len(), m * w.k, "x of linear_activated: m * k with m = {m}, k = {}", w.k);
        assert_eq!(out.len(), m * (w.n / 2), "out of linear_activated: m * n / 2 with m = {m}, n = {}", w.n);
        check_bias(1, w, bias);
        self.linear_runs(x, Runs::One(m), w, bias, Some(activation), out);
    }

    /// [`Cpu::linear_activated`] of quantised rows and a quantised weight; the output is quantised too.
    ///
    /// # Panics
    /// As [`Cpu::linear_activated`], and when the weight is not quantised.
    pub fn linear_activated_quantized(
        &mut self,
        x: &QuantRows,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        activation: Activation,
        out: &mut QuantRows,
    ) {
        w.check();
        check_gated(self.tier, w);
        check_bias(1, w, bias);
        self.activated_runs(x, Runs::One(x.rows()), w, bias, activation, out);
    }

    /// [`Cpu::linear_activated`] of each pair with the weight of its expert; rows lie in the order of `pairs`.
    ///
    /// # Panics
    /// As [`Cpu::linear_activated`].
    pub fn expert_linear_activated(
        &mut self,
        x: &[f32],
        pairs: &ExpertPairs,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        activation: Activation,
        out: &mut [f32],
    ) {
        crate::linear::check_stack(pairs.experts(), w);
        check_gated(self.tier, w);
        assert_eq!(x.len(), pairs.len() * w.k, "x of expert_linear_activated: pairs * k");
        assert_eq!(out.len(), pairs.len() * (w.n / 2), "out of expert_linear_activated: pairs * n / 2");
        check_bias(pairs.experts(), w, bias);
        self.linear_runs(x, Runs::Experts(pairs), w, bias, Some(activation), out);
    }

    /// [`Cpu::expert_linear_activated`] of quantised rows and quantised weights; the output is quantised too.
    ///
    /// # Panics
    /// As [`Cpu::linear_activated_quantized`].
    pub fn expert_linear_activated_quantized(
        &mut self,
        x: &QuantRows,
        pairs: &ExpertPairs,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        activation: Activation,
        out: &mut QuantRows,
    ) {
        crate::linear::check_stack(pairs.experts(), w);
        check_gated(self.tier, w);
        check_bias(pairs.experts(), w, bias);
        self.activated_runs(x, Runs::Experts(pairs), w, bias, activation, out);
    }
}

/// # Panics
/// When no product of this weight applies an activation.
fn check_gated(tier: Tier, w: Matrix<'_>) {
    let multiple = tier.activated_multiple();
    assert!(
        multiple.is_some_and(|multiple| w.n.is_multiple_of(2 * multiple)) && w.layout == Layout::Packed && w.k > 0,
        "a {:?} weight with n = {}, k = {} has no fused activation on the tier {}",
        w.layout,
        w.n,
        w.k,
        tier.name()
    );
}

fn check_bias(weights: usize, w: Matrix<'_>, bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        assert_eq!(bias.len(), weights * w.n, "bias of linear_activated: weights * n");
    }
}

/// The panels of a task in the order in which they are multiplied: neighbours; or those of gates, then those of the same
/// columns' ups. Taking turns would interrupt the stream of weights after every panel.
#[derive(Clone, Copy)]
pub(crate) struct Panels {
    start: usize,
    pub(crate) len: usize,
    /// How far behind its gates a panel of ups lies; 0 where there are none.
    apart: usize,
}

impl Panels {
    pub(crate) fn plain(panels: Range<usize>) -> Panels {
        Panels { start: panels.start, len: panels.len(), apart: 0 }
    }

    /// Panels of gates, and those of ups, `apart` behind.
    pub(crate) fn gated(gates: Range<usize>, apart: usize) -> Panels {
        Panels { start: gates.start, len: 2 * gates.len(), apart }
    }

    /// How many panels of gates there are, where there are gates.
    #[inline(always)]
    pub(crate) fn gates(&self) -> usize {
        self.len / 2
    }

    #[inline(always)]
    pub(crate) fn nth(&self, index: usize) -> usize {
        let is_up = self.apart > 0 && index >= self.gates();
        self.start + index + if is_up { self.apart - self.gates() } else { 0 }
    }

    /// Whether the `count` panels from one on are neighbours.
    #[inline(always)]
    pub(crate) fn adjoin(&self, index: usize, count: usize) -> bool {
        index + count <= self.len && self.nth(index + count - 1) - self.nth(index) == count - 1
    }
}

/// What becomes of the sums of gates and ups of one weight.
#[derive(Clone, Copy)]
pub(crate) struct Gated<'a> {
    pub(crate) activation: Activation,
    /// Of gates and then of ups, `width` each.
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) width: usize,
}

impl Gated<'_> {
    /// Activates the sums of a panel of gates and of its ups, `[rows][PANEL]` each, into rows `stride` apart.
    #[inline(always)]
    pub(crate) unsafe fn write<S: Simd>(
        &self,
        panel: usize,
        rows: usize,
        gates: *const f32,
        ups: *const f32,
        out: *mut f32,
        stride: usize,
    ) {
        for column in (0..PANEL).step_by(S::LANES) {
            // SAFETY: the caller's pointers cover the tile, and a bias is as long as both halves.
            unsafe {
                let (mut gate_bias, mut up_bias) = (S::zero(), S::zero());
                if let Some(bias) = self.bias {
                    let at = bias.as_ptr().add(panel * PANEL + column);
                    (gate_bias, up_bias) = (S::load(at), S::load(at.add(self.width)));
                }
                for row in 0..rows {
                    let mut gate = S::load(gates.add(row * PANEL + column));
                    let mut up = S::load(ups.add(row * PANEL + column));
                    if self.bias.is_some() {
                        (gate, up) = (S::add(gate, gate_bias), S::add(up, up_bias));
                    }
                    S::store(out.add(row * stride + column), self.activation.apply::<S>(gate, up));
                }
            }
        }
    }
}
