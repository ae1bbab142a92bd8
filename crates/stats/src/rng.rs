//! A small seeded generator: the same seed gives the same workload on every machine.
//!
//! xoshiro256** (Blackman and Vigna), its state filled by splitmix64. Each use draws from its own
//! named stream, so that a change in one (say, output lengths) leaves the others as they were.

use std::f64::consts::TAU;

/// A seeded xoshiro256** generator.
#[derive(Clone, Debug)]
pub struct Rng {
    state: [u64; 4],
    /// Box-Muller makes two normals at a time; the second waits here.
    spare_normal: Option<f64>,
}

impl Rng {
    /// A generator for one named stream of a seed. Streams of one seed are independent.
    #[must_use]
    pub fn new(mut seed: u64, stream: &str) -> Rng {
        // The seed passes the mixer before it meets the stream's name: seed and name cannot cancel.
        let mut mixer = splitmix64(&mut seed) ^ fnv1a(stream.as_bytes());
        let state = [(); 4].map(|()| splitmix64(&mut mixer));
        Rng { state, spare_normal: None }
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in `[0, 1)`, with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform in `(0, 1]`: safe to take the logarithm of.
    fn uniform_positive(&mut self) -> f64 {
        1.0 - self.uniform()
    }

    /// A uniform integer in `0..bound`, without modulo bias (Lemire's method). `bound` 0 gives 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        // Low products under this threshold belong to the incomplete last copy of 0..bound.
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            if (product as u64) >= threshold {
                return (product >> 64) as u64;
            }
        }
    }

    /// A uniform integer from `low` to `high`, both included. `high < low` gives `low`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        match high.saturating_sub(low).checked_add(1) {
            Some(width) => low + self.below(width),
            None => self.next_u64(),
        }
    }

    /// A standard normal value (Box-Muller).
    pub fn normal(&mut self) -> f64 {
        if let Some(value) = self.spare_normal.take() {
            return value;
        }
        let radius = (-2.0 * self.uniform_positive().ln()).sqrt();
        let angle = TAU * self.uniform();
        self.spare_normal = Some(radius * angle.sin());
        radius * angle.cos()
    }

    /// An exponential value with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -self.uniform_positive().ln()
    }

    /// A gamma value with the given shape and scale 1 (Marsaglia and Tsang, 2000).
    /// A shape that is not positive and finite has no distribution: the answer is NaN.
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if !(shape > 0.0 && shape.is_finite()) {
            return f64::NAN;
        }
        if shape < 1.0 {
            // Gamma(k) = Gamma(k + 1) * U^(1/k): the method itself needs k >= 1.
            let boost = self.uniform_positive().powf(1.0 / shape);
            return self.gamma(shape + 1.0) * boost;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && self.uniform_positive().ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }
}

/// The increment of [`splitmix64`]: an odd number near 2^64 divided by the golden ratio.
pub const SPLITMIX_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The next number of the splitmix64 generator with this state.
pub fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(SPLITMIX_STEP);
    splitmix64_mix(*state)
}

/// The mixing function of splitmix64: for counter-based generators, whose state is a function of a place.
#[inline]
#[must_use]
pub fn splitmix64_mix(state: u64) -> u64 {
    let mut z = state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(draw: impl FnMut() -> f64, n: usize) -> (f64, f64) {
        let values: Vec<f64> = std::iter::repeat_with(draw).take(n).collect();
        let mean = values.iter().sum::<f64>() / n as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1) as f64;
        (mean, variance)
    }

    #[test]
    fn xoshiro_matches_the_published_vector() {
        let mut rng = Rng { state: [1, 2, 3, 4], spare_normal: None };
        let first: Vec<u64> = (0..4).map(|_| rng.next_u64()).collect();
        assert_eq!(first, [11520, 0, 1_509_978_240, 1_215_971_899_390_074_240]);
    }

    #[test]
    fn splitmix_and_fnv_match_the_published_values() {
        let mut state = 1_234_567;
        assert_eq!(splitmix64(&mut state), 6_457_827_717_110_365_317);
        assert_eq!(splitmix64(&mut state), 3_203_168_211_198_807_973);
        assert_eq!(fnv1a(b"a"), 0xAF63_DC4C_8601_EC8C);
    }

    #[test]
    fn streams_and_seeds_differ_and_repeat() {
        let draw = |seed, stream| Rng::new(seed, stream).next_u64();
        assert_eq!(draw(420, "ids"), draw(420, "ids"));
        assert_ne!(draw(420, "ids"), draw(420, "arrivals"));
        assert_ne!(draw(420, "ids"), draw(421, "ids"));
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let n = 200_000;
        let mut rng = Rng::new(7, "moments");
        let (mean, variance) = moments(|| rng.normal(), n);
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        let (mean, variance) = moments(|| rng.exponential(), n);
        assert!((mean - 1.0).abs() < 0.012 && (variance - 1.0).abs() < 0.04, "{mean} {variance}");
        for shape in [0.25, 1.0, 4.0, 40.0] {
            let (mean, variance) = moments(|| rng.gamma(shape), n);
            // Four standard errors of the mean; the variance gets a looser, relative bound.
            assert!((mean - shape).abs() < 4.0 * (shape / n as f64).sqrt(), "{shape}: {mean}");
            assert!((variance / shape - 1.0).abs() < 0.06, "{shape}: {variance}");
        }
    }

    #[test]
    fn integers_cover_their_range_evenly() {
        let mut rng = Rng::new(1, "integers");
        let mut seen = [0u32; 7];
        for _ in 0..70_000 {
            seen[rng.below(7) as usize] += 1;
        }
        // Standard deviation of each count is about 93.
        assert!(seen.iter().all(|&c| c.abs_diff(10_000) < 450), "{seen:?}");
        assert_eq!(rng.below(0), 0);
        assert_eq!(rng.between(5, 5), 5);
        assert_eq!(rng.between(5, 4), 5);
        rng.between(0, u64::MAX);
    }

    #[test]
    fn impossible_gamma_shapes_end() {
        let mut rng = Rng::new(1, "gamma");
        for shape in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(rng.gamma(shape).is_nan());
        }
    }
}
