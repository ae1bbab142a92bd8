//! Statistics of measurements: quantiles, resampling, intervals of differences, power and stopping rules.
//!
//! Arithmetic on plain slices. Nothing here knows what is measured.

mod difference;
mod distribution;
mod interval;
mod order;
mod percentile;
mod resample;
mod rng;
mod student;
mod summary;

pub use difference::{Estimate, Spread as LogSpread, needed_pairs, needed_runs, paired, pooled_spread, unpaired};
pub use distribution::Distribution;
pub use interval::{Interval, bootstrap_interval, effective_sample_size, percentile_interval};
pub use order::Summary;
pub use percentile::{PercentileRule, lower_percentile, percentile};
pub use resample::{FEWEST, Plan, RESAMPLES, Range, block_length, seed_of};
pub use rng::{Rng, SPLITMIX_STEP, splitmix64, splitmix64_mix};
pub use student::{normal_quantile, student_quantile};
pub use summary::{Spread, coefficient_of_variation, mean, median, sample_std_dev, sorted, spread};
