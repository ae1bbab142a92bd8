//! Axes: round ticks, in a unit that fits.

use crate::human;

/// What the values of a plot are, and so how they are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Nanoseconds, written in the unit that fits.
    Time,
    /// Bytes per second.
    BytesPerSecond,
    /// Floating-point operations per second.
    FlopsPerSecond,
    /// A fraction, written as per cent.
    Share,
    /// A plain number of these, e.g. `tok/s`; may be empty.
    Plain(String),
}

impl Unit {
    /// One value with its unit.
    pub fn format(&self, value: f64) -> String {
        match self {
            Unit::Time => human::ns(value),
            Unit::BytesPerSecond => human::bytes_per_s(value),
            Unit::FlopsPerSecond => human::flops_per_s(value),
            Unit::Share => human::percent(value),
            Unit::Plain(unit) => format!("{} {unit}", human::number(value)).trim_end().to_owned(),
        }
    }

    /// The divisor and name of the unit for an axis that reaches to `largest`.
    fn of_axis(&self, largest: f64) -> (f64, String) {
        let steps: &[&str] = match self {
            Unit::Time => &["ns", "µs", "ms", "s"],
            Unit::BytesPerSecond => &["B/s", "kB/s", "MB/s", "GB/s", "TB/s"],
            Unit::FlopsPerSecond => &["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"],
            Unit::Share => return (0.01, "%".to_owned()),
            Unit::Plain(unit) => return (1.0, unit.clone()),
        };
        let mut divisor = 1.0;
        let mut chosen = 0;
        while largest / divisor >= 1000.0 && chosen + 1 < steps.len() {
            divisor *= 1000.0;
            chosen += 1;
        }
        (divisor, steps[chosen].to_owned())
    }
}

/// A linear axis with round ends.
#[derive(Debug)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    /// Value and label of each tick; the labels leave out the unit.
    pub(super) ticks: Vec<(f64, String)>,
    /// What the labels count, e.g. `ms`.
    pub(super) unit: String,
}

impl Axis {
    /// An axis over `low..=high` with about `wanted` ticks.
    pub(super) fn new(low: f64, high: f64, unit: &Unit, wanted: usize) -> Self {
        let (divisor, name) = unit.of_axis(low.abs().max(high.abs()));
        let (low, high) = (low / divisor, high / divisor);
        let high = if high > low { high } else { low + 1.0 };
        let step = round_step((high - low) / wanted.max(1) as f64);
        let (first, last) = ((low / step).floor(), (high / step - 1e-9).ceil());
        let decimals = (-step.log10().floor()).max(0.0) as usize;
        // 2.5 needs a digit more than its power of ten.
        let decimals = decimals + usize::from((step * 10f64.powi(decimals as i32)).fract() > 1e-9);
        let ticks = (0..=(last - first) as usize)
            .map(|i| {
                let value = (first + i as f64) * step;
                let label = format!("{value:.decimals$}");
                (value * divisor, if decimals == 0 { human::group_thousands(&label) } else { label })
            })
            .collect();
        Self { low: first * step * divisor, high: last * step * divisor, ticks, unit: name }
    }

    /// Where a value lies between the ends: 0 to 1.
    pub(super) fn place(&self, value: f64) -> f64 {
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}

/// The nearest of 1, 2, 2.5 and 5 times a power of ten that is not below `rough`.
fn round_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|s| s * power >= rough * (1.0 - 1e-9));
    step.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|t| t.1.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_and_in_the_unit_that_fits() {
        let axis = Axis::new(0.0, 7.3e6, &Unit::Time, 4);
        assert_eq!((labels(&axis), &*axis.unit), (vec!["0", "2", "4", "6", "8"], "ms"));
        assert_eq!(axis.high, 8e6);
        let axis = Axis::new(0.0, 0.9, &Unit::Plain(String::new()), 4);
        assert_eq!(labels(&axis), ["0.00", "0.25", "0.50", "0.75", "1.00"]);
        let axis = Axis::new(0.0, 1.0, &Unit::Share, 4);
        assert_eq!((labels(&axis), &*axis.unit), (vec!["0", "25", "50", "75", "100"], "%"));
        let axis = Axis::new(103.0, 118.0, &Unit::Plain("x".into()), 3);
        assert_eq!(labels(&axis), ["100", "105", "110", "115", "120"]);
        let axis = Axis::new(0.0, 190_000.0, &Unit::Plain("tok/s".into()), 4);
        assert_eq!(labels(&axis), ["0", "50,000", "100,000", "150,000", "200,000"]);
    }

    #[test]
    fn an_axis_without_extent_is_still_an_axis() {
        let axis = Axis::new(0.0, 0.0, &Unit::Time, 4);
        assert!(axis.high > axis.low && axis.place(0.0) == 0.0);
    }
}
