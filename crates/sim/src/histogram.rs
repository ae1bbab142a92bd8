//! Percentiles of any number of values in fixed memory.

/// Values of one power of two share this many buckets: a value is known to 1 part in 2048.
const BITS: u32 = 10;

/// Counts of nanosecond values in buckets whose width grows with the value. Mean and extremes are exact.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    sum: f64,
    min: u64,
    max: u64,
}

fn bucket(value: u64) -> usize {
    let magnitude = (64 - value.leading_zeros()).saturating_sub(BITS + 1);
    ((u64::from(magnitude) << BITS) + (value >> magnitude)) as usize
}

/// The middle of a bucket.
fn middle(bucket: usize) -> f64 {
    let (magnitude, rest) = (bucket >> BITS, (bucket & ((1 << BITS) - 1)) as u64);
    if magnitude == 0 {
        return rest as f64;
    }
    // Buckets of magnitude m >= 1 hold values with the leading bit set, whose number therefore carries into m.
    let shift = magnitude as i32 - 1;
    ((1u64 << BITS) + rest) as f64 * 2f64.powi(shift) + (2f64.powi(shift) - 1.0) / 2.0
}

impl Histogram {
    /// Adds a value `weight` times.
    pub fn add(&mut self, value: u64, weight: u64) {
        if weight == 0 {
            return;
        }
        let index = bucket(value);
        if index >= self.counts.len() {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += weight;
        self.min = if self.count == 0 { value } else { self.min.min(value) };
        self.max = self.max.max(value);
        self.count += weight;
        self.sum += value as f64 * weight as f64;
    }

    /// How many values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their mean; none of no values.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }

    /// The largest value.
    pub fn max(&self) -> Option<u64> {
        (self.count > 0).then_some(self.max)
    }

    /// The smallest value that at least the share `q` of all values does not exceed, to 1 part in 2048.
    pub fn percentile(&self, q: f64) -> Option<f64> {
        let rank = ((q * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        let found = self.counts.iter().position(|&count| {
            seen += count;
            seen >= rank
        })?;
        Some(middle(found).clamp(self.min as f64, self.max as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_known_to_one_part_in_2048() {
        for value in
            (0..3000).chain((12..64).flat_map(|bit| [(1u64 << bit) - 1, 1 << bit, (1 << bit) + (1 << (bit - 1))]))
        {
            let found = middle(bucket(value));
            assert!((found - value as f64).abs() <= value as f64 / 2048.0, "{value}: {found}");
        }
    }

    #[test]
    fn percentiles_of_a_range() {
        let mut all = Histogram::default();
        (1..=100_000).for_each(|v| all.add(v * 1000, 1));
        for q in [0.01, 0.5, 0.9, 0.99, 1.0] {
            let found = all.percentile(q).unwrap();
            assert!((found / (q * 1e8) - 1.0).abs() < 1.0 / 2000.0, "{q}: {found}");
        }
        assert_eq!((all.max(), all.count()), (Some(100_000_000), 100_000));
        assert_eq!(all.mean(), Some(50_000_500.0));
        assert_eq!(Histogram::default().percentile(0.5), None);
    }
}
