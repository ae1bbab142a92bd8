//! Random weights: a counter-based generator, so that any element can be made alone, in any order, by any thread.

use strobe_stats::{SPLITMIX_STEP as STEP, splitmix64_mix as mix};

/// The numbers of one tensor: a pure function of (seed, tensor name, element index).
#[derive(Clone, Copy, Debug)]
pub struct RandomTensor {
    key: u64,
}

/// Sixteen-bit fields summed for one value, their mean and the standard deviation of the sum.
const FIELDS: f64 = 4.0;
const MEAN: f32 = (FIELDS * 65535.0 / 2.0) as f32;
/// `sqrt(4 * (65536^2 - 1) / 12)`.
const SUM_STD: f64 = 37_837.227_237_206_48;

impl RandomTensor {
    /// The generator of the tensor `name` under `seed`.
    pub fn new(seed: u64, name: &str) -> RandomTensor {
        // FNV-1a over the name; mixing the seed in first and last keeps neighbouring seeds unrelated.
        let mut key = mix(seed.wrapping_add(STEP)) ^ 0xCBF2_9CE4_8422_2325;
        for byte in name.bytes() {
            key = (key ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
        RandomTensor { key: mix(key ^ seed.rotate_left(32)) }
    }

    /// What the numbers are a function of, besides the element's index: for generators on other devices.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Where element `index` of `len` comes from, in an order that follows from the seed and the name. Counts how many
    /// elements have a smaller number than this one, so it is meant for short lists.
    pub fn permuted(&self, index: usize, len: usize) -> usize {
        let number = |i: usize| (mix(self.key.wrapping_add((i as u64).wrapping_mul(STEP))), i);
        (0..len).filter(|i| number(*i) < number(index)).count()
    }

    /// Elements `start..start + out.len()`: a bell of mean 0 and the given standard deviation, bounded by 3.47 of it.
    pub fn fill_normal(&self, start: u64, std: f32, out: &mut [f32]) {
        let scale = (f64::from(std) / SUM_STD) as f32;
        let mut counter = self.key.wrapping_add(start.wrapping_mul(STEP));
        for value in out {
            *value = (field_sum(mix(counter)) as f32 - MEAN) * scale;
            counter = counter.wrapping_add(STEP);
        }
    }
}

/// The sum of the four sixteen-bit fields: four uniform numbers make a fair bell (Irwin-Hall) out of one mix.
#[inline(always)]
fn field_sum(bits: u64) -> i32 {
    const ODD_FIELDS: u64 = 0x0000_FFFF_0000_FFFF;
    let pairs = (bits & ODD_FIELDS) + ((bits >> 16) & ODD_FIELDS);
    ((pairs >> 32) + (pairs & 0xFFFF_FFFF)) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_element_can_be_made_alone() {
        let tensor = RandomTensor::new(7, "model.layers.0.mlp.up_proj.weight");
        let mut all = vec![0.0; 1000];
        tensor.fill_normal(0, 0.02, &mut all);
        for start in [0usize, 1, 17, 999] {
            let mut tail = vec![0.0; all.len() - start];
            tensor.fill_normal(start as u64, 0.02, &mut tail);
            assert_eq!(tail, all[start..]);
        }
    }

    #[test]
    fn a_permutation_holds_every_index_once_and_depends_on_the_seed() {
        let order = |seed| (0..16).map(|i| RandomTensor::new(seed, "x").permuted(i, 16)).collect::<Vec<_>>();
        let mut sorted = order(1);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..16).collect::<Vec<_>>());
        assert_ne!(order(1), order(2));
        assert_eq!(order(1), order(1));
    }

    #[test]
    fn mean_deviation_and_tails_are_those_of_a_bell() {
        let mut values = vec![0.0; 400_000];
        RandomTensor::new(1, "x").fill_normal(0, 0.02, &mut values);
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let std = (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n).sqrt();
        let beyond_two = values.iter().filter(|v| v.abs() > 0.04).count() as f64 / n;
        assert!(mean.abs() < 1e-4, "mean {mean}");
        assert!((std - 0.02).abs() < 1e-4, "std {std}");
        assert!((0.03..0.06).contains(&beyond_two), "beyond two deviations: {beyond_two}");
        assert!(values.iter().all(|v| v.abs() < 0.02 * 3.47));
    }

    #[test]
    fn names_and_seeds_give_unrelated_numbers() {
        let sample = |seed, name| {
            let mut out = vec![0.0; 4096];
            RandomTensor::new(seed, name).fill_normal(0, 1.0, &mut out);
            out
        };
        let correlation = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>() / a.len() as f32;
        let base = sample(0, "layers.0");
        for other in [sample(1, "layers.0"), sample(0, "layers.1"), sample(u64::MAX, "layers.0"), sample(0, "")] {
            assert!(correlation(&base, &other).abs() < 0.08);
        }
        assert!(correlation(&base[1..], &base).abs() < 0.08);
    }
}
