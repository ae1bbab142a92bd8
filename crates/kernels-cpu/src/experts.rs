//! Mixtures of experts: which rows go to which expert, their products, and the sum of what the experts of a token answer.
//!
//! Pairs of token and expert are sorted by expert, so that each expert multiplies one run of rows, with no row of padding,
//! and the products of all experts are one region of the pool. A run of one row is a GEMV, any other a GEMM; either way an output is the same chain over k, and the sum over a
//! token's experts has one order: a token's result does not depend on the other tokens of a step.

use std::ops::Range;

use crate::cpu::{Cpu, SharedMut};
use crate::linear::check_stack;
use crate::matrix::Matrix;
use crate::quant_rows::QuantRows;
use crate::rows::for_row_ranges;
use crate::runs::Runs;
use crate::simd::{Kernel, Simd, dispatch};

/// The experts of each token of a step, and the pairs of token and expert sorted by expert.
pub struct ExpertPairs {
    per_token: usize,
    tokens: usize,
    /// `[tokens][per_token]`, the best first.
    chosen: Vec<u32>,
    /// `[tokens][per_token]`.
    weights: Vec<f32>,
    /// Where the pairs of each expert start, and behind the last the number of pairs.
    starts: Vec<u32>,
    /// The token of each pair.
    pair_tokens: Vec<u32>,
    /// `[tokens][per_token]`: which pair it is.
    places: Vec<u32>,
}

impl ExpertPairs {
    /// Room for steps of up to `max_tokens` tokens that are sent to `per_token` of `experts` experts each.
    pub fn new(experts: usize, per_token: usize, max_tokens: usize) -> ExpertPairs {
        let pairs = max_tokens * per_token;
        ExpertPairs {
            per_token,
            tokens: 0,
            chosen: vec![0; pairs],
            weights: vec![0.0; pairs],
            starts: vec![0; experts + 1],
            pair_tokens: vec![0; pairs],
            places: vec![0; pairs],
        }
    }

    /// Bytes that this room takes.
    pub fn bytes_of(experts: usize, per_token: usize, max_tokens: usize) -> usize {
        size_of::<u32>() * (4 * max_tokens * per_token + experts + 1)
    }

    /// Experts there are.
    pub fn experts(&self) -> usize {
        self.starts.len() - 1
    }

    /// Pairs of this step.
    pub fn len(&self) -> usize {
        self.tokens * self.per_token
    }

    /// Whether the step has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pairs of an expert.
    pub fn of_expert(&self, expert: usize) -> Range<usize> {
        self.starts[expert] as usize..self.starts[expert + 1] as usize
    }

    /// The token of each pair.
    pub fn tokens(&self) -> &[u32] {
        &self.pair_tokens[..self.len()]
    }

    /// Sorts the pairs by expert and then by token.
    fn sort(&mut self) {
        let pairs = self.len();
        self.starts.fill(0);
        for &expert in &self.chosen[..pairs] {
            self.starts[expert as usize + 1] += 1;
        }
        for expert in 1..self.starts.len() {
            self.starts[expert] += self.starts[expert - 1];
        }
        // Each start moves on to the end of its expert, which is where the next one starts.
        for (i, &expert) in self.chosen[..pairs].iter().enumerate() {
            let place = &mut self.starts[expert as usize];
            self.places[i] = *place;
            self.pair_tokens[*place as usize] = (i / self.per_token) as u32;
            *place += 1;
        }
        self.starts.rotate_right(1);
        self.starts[0] = 0;
    }
}

impl Cpu {
    /// Fills `pairs` for `tokens` tokens: `choose(token, experts, weights)` names the experts of one token, all of them
    /// different, and what their answers count.
    ///
    /// # Panics
    /// When there is no room for so many tokens, or no such expert.
    pub fn route(
        &mut self,
        pairs: &mut ExpertPairs,
        tokens: usize,
        choose: impl Fn(usize, &mut [u32], &mut [f32]) + Sync,
    ) {
        let per_token = pairs.per_token;
        pairs.tokens = tokens;
        let (chosen, weights) = (SharedMut::new(&mut pairs.chosen), SharedMut::new(&mut pairs.weights));
        for_row_ranges(&mut self.pool, tokens, 8 * pairs.starts.len(), &|rows| {
            for token in rows {
                // SAFETY: tokens are disjoint.
                let (chosen, weights) = unsafe {
                    (chosen.slice(token * per_token, per_token), weights.slice(token * per_token, per_token))
                };
                choose(token, chosen, weights);
            }
        });
        pairs.sort();
    }

    /// `out[pair] = x[pair] . w[expert]^T (+ bias[expert])` for rows `x` that lie in the order of `pairs`; the data of `w` is that of all
    /// experts, one after the other.
    ///
    /// # Panics
    /// When a length does not fit the shape.
    pub fn expert_linear(
        &mut self,
        x: &[f32],
        pairs: &ExpertPairs,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        out: &mut [f32],
    ) {
        assert_eq!(x.len(), pairs.len() * w.k, "x of expert_linear: pairs * k");
        assert_eq!(out.len(), pairs.len() * w.n, "out of expert_linear: pairs * n");
        check_weights(pairs, w, bias);
        self.linear_runs(x, Runs::Experts(pairs), w, bias, None, out);
    }

    /// [`Cpu::expert_linear`] of quantised rows and quantised weights.
    ///
    /// # Panics
    /// When a length does not fit the shape, or the weight is not quantised.
    pub fn expert_linear_quantized(
        &mut self,
        x: &QuantRows,
        pairs: &ExpertPairs,
        w: Matrix<'_>,
        bias: Option<&[f32]>,
        out: &mut [f32],
    ) {
        assert_eq!(x.rows(), pairs.len(), "rows of expert_linear: pairs");
        assert_eq!(out.len(), pairs.len() * w.n, "out of expert_linear: pairs * n");
        check_weights(pairs, w, bias);
        self.quantized_runs(x, Runs::Experts(pairs), w, bias, None, out);
    }

    /// `out[token] = sum of weight * x[pair]` over the pairs of the token, the best expert first, for rows of `width`; with
    /// `add` the sum goes on from what `out` holds.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn expert_sum(&mut self, x: &[f32], pairs: &ExpertPairs, width: usize, add: bool, out: &mut [f32]) {
        assert_eq!(x.len(), pairs.len() * width, "x of expert_sum: pairs * width");
        assert_eq!(out.len(), pairs.tokens * width, "out of expert_sum: tokens * width");
        let (tier, k, out) = (self.tier, pairs.per_token, SharedMut::new(out));
        for_row_ranges(&mut self.pool, pairs.tokens, k * width, &|rows| {
            for token in rows {
                let own = token * k..(token + 1) * k;
                let (places, weights) = (&pairs.places[own.clone()], &pairs.weights[own]);
                // SAFETY: tokens are disjoint.
                let out = unsafe { out.slice(token * width, width) };
                // SAFETY: every place is a pair, and so a row of x.
                unsafe { dispatch(tier, WeightedSum { x, places, weights, add, out }) };
            }
        });
    }
}

/// # Panics
/// When there are not a weight and a bias for each expert.
fn check_weights(pairs: &ExpertPairs, w: Matrix<'_>, bias: Option<&[f32]>) {
    check_stack(pairs.experts(), w);
    if let Some(bias) = bias {
        assert_eq!(bias.len(), pairs.experts() * w.n, "bias of expert_linear: experts * n");
    }
}

/// One token's answers.
struct WeightedSum<'a> {
    x: &'a [f32],
    places: &'a [u32],
    weights: &'a [f32],
    add: bool,
    out: &'a mut [f32],
}

impl WeightedSum<'_> {
    #[inline(always)]
    fn row(&self, place: u32) -> &[f32] {
        &self.x[place as usize * self.out.len()..][..self.out.len()]
    }
}

impl Kernel for WeightedSum<'_> {
    fn scalar(self) {
        for i in 0..self.out.len() {
            let mut sum = if self.add { self.out[i] } else { 0.0 };
            for (&place, &weight) in self.places.iter().zip(self.weights) {
                sum = weight.mul_add(self.row(place)[i], sum);
            }
            self.out[i] = sum;
        }
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let len = self.out.len();
        let mut i = 0;
        while i < len {
            let n = S::LANES.min(len - i);
            // SAFETY: `n` elements are left in each row.
            unsafe {
                let mut sum = if self.add { S::load_partial(self.out.as_ptr().add(i), n) } else { S::zero() };
                for (&place, &weight) in self.places.iter().zip(self.weights) {
                    sum = S::fma(S::splat(weight), S::load_partial(self.row(place).as_ptr().add(i), n), sum);
                }
                S::store_partial(self.out.as_mut_ptr().add(i), sum, n);
            }
            i += n;
        }
    }
}
