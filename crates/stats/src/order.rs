//! Order statistics.

use serde::Serialize;

/// The spread of a set of values. Percentiles interpolate linearly between the two nearest values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How many values.
    pub count: usize,
    /// The smallest.
    pub min: f64,
    /// A quarter lie below.
    pub p25: f64,
    /// Half lie below.
    pub median: f64,
    /// Three quarters lie below.
    pub p75: f64,
    /// The largest.
    pub max: f64,
    /// The arithmetic mean.
    pub mean: f64,
}

impl Summary {
    /// The summary of these values; absent when there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let at = |share: f64| {
            let place = share * (sorted.len() - 1) as f64;
            let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
            below + (above - below) * place.fract()
        };
        Some(Self {
            count: sorted.len(),
            min,
            p25: at(0.25),
            median: at(0.5),
            p75: at(0.75),
            max,
            mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        let s = Summary::of([4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((s.count, s.min, s.max), (4, 1.0, 4.0));
        assert_eq!((s.p25, s.median, s.p75, s.mean), (1.75, 2.5, 3.25, 2.5));
        assert_eq!(Summary::of([7.0]).unwrap().p75, 7.0);
        assert!(Summary::of([]).is_none());
    }
}
