//! From logits to a token.

use std::cmp::Ordering;

use strobe_stats::{SPLITMIX_STEP, splitmix64_mix};

/// How a request's tokens are chosen and when it ends.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens with this probability; 1 keeps all.
    pub top_p: f32,
    /// Seed of this request; the same seed gives the same tokens whatever else runs.
    pub seed: u64,
    /// End after this many tokens.
    pub max_tokens: u32,
    /// End tokens and stop ids are not drawn before this many tokens.
    pub min_tokens: u32,
    /// Tokens that end the request.
    pub stop_ids: Vec<u32>,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            seed: 0,
            max_tokens: 16,
            min_tokens: 0,
            stop_ids: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// A sampling parameter outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} must be {expected}, found {found}")]
pub struct SamplingError {
    /// Name of the parameter.
    pub field: &'static str,
    /// What is allowed.
    pub expected: &'static str,
    /// What was given.
    pub found: f64,
}

impl SamplingParams {
    /// Check the ranges.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let check =
            |field, ok: bool, expected, found| if ok { Ok(()) } else { Err(SamplingError { field, expected, found }) };
        let t = self.temperature;
        check("temperature", t.is_finite() && t >= 0.0, "a number of at least 0", f64::from(t))?;
        let p = self.top_p;
        check("top_p", p > 0.0 && p <= 1.0, "above 0 and at most 1", f64::from(p))?;
        let (min, max) = (self.min_tokens, self.max_tokens);
        check("min_tokens", min <= max, "at most max_tokens", f64::from(min))
    }

    /// How the token after `index` others is drawn.
    pub fn draw(&self, index: u64) -> Draw {
        Draw { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p, seed: self.seed, index }
    }
}

/// How one token is drawn: what a backend needs of [`SamplingParams`], and the token's place in its request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set with this probability; 1 keeps all.
    pub top_p: f32,
    /// Seed of the request.
    pub seed: u64,
    /// How many tokens came before.
    pub index: u64,
}

impl Draw {
    /// Whether the most likely token is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }
}

/// Scratch space for drawing tokens; allocates only when made.
pub struct Sampler {
    candidates: Vec<(f32, u32)>,
}

/// Candidates that are ordered at first to find the most likely ones; more when they do not suffice.
const FIRST_ORDERED: usize = 64;

/// Most likely first; equals in order of id, so that the result does not depend on how they are sorted.
fn by_likelihood(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
}

impl Sampler {
    /// For rows of at most `vocab_size` logits.
    pub fn new(vocab_size: usize) -> Sampler {
        Sampler { candidates: Vec::with_capacity(vocab_size) }
    }

    /// Draw a token from `logits`, never one of `banned`.
    pub fn draw(&mut self, logits: &[f32], draw: &Draw, banned: &[u32]) -> u32 {
        let allowed = logits.iter().enumerate().map(|(id, &logit)| (logit, id as u32));
        self.candidates.clear();
        self.candidates.extend(allowed.filter(|(logit, id)| !logit.is_nan() && !banned.contains(id)));
        if draw.is_greedy() || self.candidates.len() <= 1 {
            let first_best = self.candidates.iter().copied().reduce(|best, c| if c.0 > best.0 { c } else { best });
            return first_best.map_or(0, |c| c.1);
        }
        let k = draw.top_k as usize;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, by_likelihood);
            self.candidates.truncate(k);
            self.candidates.sort_unstable_by_key(|c| c.1);
        }
        let highest = self.candidates.iter().map(|c| c.0).fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0f64;
        for candidate in &mut self.candidates {
            candidate.0 = if highest.is_finite() { ((candidate.0 - highest) / draw.temperature).exp() } else { 1.0 };
            total += f64::from(candidate.0);
        }
        if draw.top_p < 1.0 {
            total = self.keep_most_likely(total * f64::from(draw.top_p));
            self.candidates.sort_unstable_by_key(|c| c.1); // every device draws in order of id
        }
        let target = uniform(draw.seed, draw.index) * total;
        let mut sum = 0.0;
        for &(weight, id) in &self.candidates {
            sum += f64::from(weight);
            if sum > target {
                return id;
            }
        }
        self.candidates.last().map_or(0, |c| c.1)
    }

    /// Keep the fewest most likely candidates whose weights reach `target`; returns their sum. Usually a few of many
    /// thousands suffice, so only as many are put in order as are needed.
    fn keep_most_likely(&mut self, target: f64) -> f64 {
        let mut ordered = FIRST_ORDERED;
        loop {
            let all = ordered >= self.candidates.len();
            if !all {
                self.candidates.select_nth_unstable_by(ordered - 1, by_likelihood);
            }
            let head = ordered.min(self.candidates.len());
            self.candidates[..head].sort_unstable_by(by_likelihood);
            let (mut kept, mut sum) = (0, 0.0);
            while kept < head && (kept == 0 || sum < target) {
                sum += f64::from(self.candidates[kept].0);
                kept += 1;
            }
            if all || sum >= target {
                self.candidates.truncate(kept);
                return sum;
            }
            ordered *= 8;
        }
    }
}

/// The `index`-th number of stream `seed`, in `[0, 1)`. Counter-based: no state that batching could disturb.
fn uniform(seed: u64, index: u64) -> f64 {
    let z = splitmix64_mix(seed.wrapping_add((index + 1).wrapping_mul(SPLITMIX_STEP)));
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(logits: &[f32], params: &SamplingParams, n: u64) -> Vec<u32> {
        let mut sampler = Sampler::new(logits.len());
        (0..n).map(|i| sampler.draw(logits, &params.draw(i), &[])).collect()
    }

    #[test]
    fn greedy_takes_the_first_maximum_and_never_nan() {
        let params = SamplingParams::default();
        assert_eq!(draws(&[1.0, 3.0, f32::NAN, 3.0], &params, 1), [1]);
        let mut sampler = Sampler::new(4);
        assert_eq!(sampler.draw(&[1.0, 3.0, 2.0, 0.0], &params.draw(0), &[1]), 2);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let params = SamplingParams { temperature: 1.5, seed: 7, ..Default::default() };
        let n = 20_000;
        let drawn = draws(&logits, &params, n);
        let total: f64 = logits.iter().map(|l| f64::from(l / 1.5).exp()).sum();
        for (id, logit) in logits.iter().enumerate() {
            let expected = f64::from(logit / 1.5).exp() / total;
            let seen = drawn.iter().filter(|&&d| d == id as u32).count() as f64 / n as f64;
            assert!((seen - expected).abs() < 0.015, "id {id}: {seen} against {expected}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [0.0f32, 1.0, 2.0, 3.0, 4.0];
        let top_k = SamplingParams { temperature: 5.0, top_k: 2, ..Default::default() };
        assert!(draws(&logits, &top_k, 500).iter().all(|&d| d >= 3));
        let both: std::collections::BTreeSet<_> = draws(&logits, &top_k, 500).into_iter().collect();
        assert_eq!(both.len(), 2);
        let top_p = SamplingParams { temperature: 1.0, top_p: 0.5, ..Default::default() };
        assert!(draws(&logits, &top_p, 500).iter().all(|&d| d == 4), "p(4) is above one half");
        let tiny = SamplingParams { temperature: 1.0, top_p: 1e-6, ..Default::default() };
        assert!(draws(&logits, &tiny, 50).iter().all(|&d| d == 4));
    }

    /// However many candidates have to be ordered, the kept set is the one of a full sort.
    #[test]
    fn top_p_keeps_the_set_of_a_full_sort() {
        for (spread, top_p) in [(0.01f32, 0.9), (0.01, 0.999), (1.0, 0.5), (8.0, 0.99)] {
            let logits: Vec<f32> = (0..5000u32).map(|i| spread * ((i * 7919 % 5003) as f32 / 5003.0)).collect();
            let mut all: Vec<_> = logits.iter().enumerate().map(|(id, l)| (l.exp(), id as u32)).collect();
            all.sort_by(by_likelihood);
            let target = all.iter().map(|c| f64::from(c.0)).sum::<f64>() * top_p;
            let mut sum = 0.0;
            let fewest = all
                .iter()
                .take_while(|c| {
                    let below = sum < target;
                    sum += f64::from(c.0);
                    below
                })
                .count();
            let mut sampler = Sampler::new(logits.len());
            let params = SamplingParams { temperature: 1.0, top_p: top_p as f32, ..Default::default() };
            sampler.draw(&logits, &params.draw(0), &[]);
            let kept = sampler.candidates.len();
            assert!(kept.abs_diff(fewest) <= 2, "kept {kept}, a full sort keeps {fewest}");
            assert!(sampler.candidates.iter().any(|c| c.1 == all[0].1));
            assert!(sampler.candidates.is_sorted_by_key(|c| c.1));
        }
    }

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32).collect();
        let params = |seed| SamplingParams { temperature: 1.0, seed, ..Default::default() };
        assert_eq!(draws(&logits, &params(1), 50), draws(&logits, &params(1), 50));
        assert_ne!(draws(&logits, &params(1), 50), draws(&logits, &params(2), 50));
    }

    #[test]
    fn parameters_outside_their_range_are_named() {
        let bad = [
            (SamplingParams { temperature: f32::NAN, ..Default::default() }, "temperature"),
            (SamplingParams { top_p: 0.0, ..Default::default() }, "top_p"),
            (SamplingParams { top_p: f32::NAN, ..Default::default() }, "top_p"),
            (SamplingParams { min_tokens: 20, max_tokens: 3, ..Default::default() }, "min_tokens"),
        ];
        for (params, field) in bad {
            assert_eq!(params.validate().unwrap_err().field, field);
        }
    }
}
