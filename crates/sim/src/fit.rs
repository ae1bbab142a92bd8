//! Least squares for positive durations, and the features that iteration times are made of.

use serde::{Deserialize, Serialize};

use crate::cost::StepLoad;

/// A quantity that a duration may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feature {
    /// 1.
    Base,
    /// Requests in their prompt.
    ContextRequests,
    /// Prompt tokens.
    ContextTokens,
    /// Prompt tokens above this many: a step or a bend.
    ContextTokensAbove(u64),
    /// Keys that prompt tokens attend to.
    ContextPairs,
    /// Requests that generate.
    DecodeRequests,
    /// Generating requests above this many.
    DecodeRequestsAbove(u64),
    /// Keys that generating requests attend to.
    DecodeKv,
    /// Prompt tokens times generating requests.
    ContextTimesDecode,
}

impl Feature {
    /// Its value for a load.
    pub fn of(self, load: &StepLoad) -> f64 {
        let decode = f64::from(load.decode_requests);
        let context = load.context_tokens as f64;
        match self {
            Feature::Base => 1.0,
            Feature::ContextRequests => f64::from(load.context_requests),
            Feature::ContextTokens => context,
            Feature::ContextTokensAbove(knee) => (context - knee as f64).max(0.0),
            Feature::ContextPairs => load.context_pairs as f64,
            Feature::DecodeRequests => decode,
            Feature::DecodeRequestsAbove(knee) => (decode - knee as f64).max(0.0),
            Feature::DecodeKv => load.decode_kv as f64,
            Feature::ContextTimesDecode => context * decode,
        }
    }
}

/// A sum of features with their coefficients, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Form {
    /// Each feature with what one unit of it costs.
    pub terms: Vec<(Feature, f64)>,
}

impl Form {
    /// The form's value for a load.
    pub fn of(&self, load: &StepLoad) -> f64 {
        self.terms.iter().map(|(feature, coefficient)| coefficient * feature.of(load)).sum()
    }

    /// The form in `features` whose relative errors are smallest; large errors count less, so that a few disturbed
    /// iterations do not bend it. `None` when there are too few samples.
    pub fn fit(features: &[Feature], samples: &[(StepLoad, f64)]) -> Option<Form> {
        without_negative(features, |features| Form::fit_median(features, samples))
    }

    fn fit_median(features: &[Feature], samples: &[(StepLoad, f64)]) -> Option<Form> {
        let rows = rows(features, samples)?;
        let mut weights: Vec<f64> = samples.iter().map(|(_, t)| 1.0 / (t * t).max(1.0)).collect();
        let mut coefficients = Vec::new();
        for _ in 0..12 {
            coefficients = solve(&rows, samples, &weights)?;
            for ((weight, row), (_, t)) in weights.iter_mut().zip(&rows).zip(samples) {
                let predicted: f64 = row.iter().zip(&coefficients).map(|(x, c)| x * c).sum();
                let error = ((predicted - t) / t.max(1.0)).abs().max(0.005);
                *weight = 1.0 / (t * t).max(1.0) / error; // towards the median, not the mean
            }
        }
        Some(Form { terms: features.iter().copied().zip(coefficients).collect() })
    }

    /// The form in this one's features that is right in the mean: a request's time is a sum over all of its iterations,
    /// the disturbed ones too. One that took more than `most` times what this form says counts as so many.
    pub fn in_the_mean(&self, samples: &[(StepLoad, f64)], most: f64) -> Option<Form> {
        let usual: Vec<f64> = samples.iter().map(|(load, _)| self.of(load).max(1.0)).collect();
        let samples: Vec<(StepLoad, f64)> =
            samples.iter().zip(&usual).map(|((load, t), usual)| (*load, t.min(most * usual))).collect();
        let weights: Vec<f64> = usual.iter().map(|usual| 1.0 / (usual * usual)).collect();
        let features: Vec<Feature> = self.terms.iter().map(|(feature, _)| *feature).collect();
        without_negative(&features, |features| {
            let coefficients = solve(&rows(features, &samples)?, &samples, &weights)?;
            Some(Form { terms: features.iter().copied().zip(coefficients).collect() })
        })
    }
}

fn rows(features: &[Feature], samples: &[(StepLoad, f64)]) -> Option<Vec<Vec<f64>>> {
    let rows: Vec<Vec<f64>> = samples.iter().map(|(load, _)| features.iter().map(|f| f.of(load)).collect()).collect();
    (!features.is_empty() && rows.len() >= 2 * features.len()).then_some(rows)
}

/// More work never takes less time: a feature with a negative coefficient is noise, and is left out. Bends may be
/// downwards.
fn without_negative(features: &[Feature], fit: impl Fn(&[Feature]) -> Option<Form>) -> Option<Form> {
    let mut features = features.to_vec();
    loop {
        let form = fit(&features)?;
        let bend = |f: Feature| matches!(f, Feature::ContextTokensAbove(_) | Feature::DecodeRequestsAbove(_));
        let negative = form.terms.iter().position(|(feature, coefficient)| *coefficient < 0.0 && !bend(*feature));
        match negative {
            Some(index) if features.len() > 1 => {
                features.remove(index);
            }
            _ => return Some(form),
        }
    }
}

/// Weighted least squares by the normal equations, columns scaled to their size.
fn solve(rows: &[Vec<f64>], samples: &[(StepLoad, f64)], weights: &[f64]) -> Option<Vec<f64>> {
    let n = rows.first()?.len();
    let scales: Vec<f64> = (0..n)
        .map(|j| rows.iter().map(|row| row[j].abs()).fold(0.0, f64::max))
        .map(|s| if s > 0.0 { s } else { 1.0 })
        .collect();
    let mut matrix = vec![vec![0.0; n + 1]; n];
    for ((row, (_, t)), weight) in rows.iter().zip(samples).zip(weights) {
        for i in 0..n {
            let left = weight * row[i] / scales[i];
            for j in 0..n {
                matrix[i][j] += left * row[j] / scales[j];
            }
            matrix[i][n] += left * t;
        }
    }
    let trace: f64 = (0..n).map(|i| matrix[i][i]).sum();
    // A feature that never changes alone has no coefficient of its own: a trace of ridge shares it out.
    (0..n).for_each(|i| matrix[i][i] += 1e-9 * trace / n as f64);
    for i in 0..n {
        let pivot = (i..n).max_by(|a, b| matrix[*a][i].abs().total_cmp(&matrix[*b][i].abs()))?;
        matrix.swap(i, pivot);
        let diagonal = matrix[i][i];
        if diagonal.abs() < 1e-300 {
            return None;
        }
        for k in 0..n {
            if k != i {
                let factor = matrix[k][i] / diagonal;
                for j in i..=n {
                    let above = matrix[i][j];
                    matrix[k][j] -= factor * above;
                }
            }
        }
    }
    Some((0..n).map(|i| matrix[i][n] / matrix[i][i] / scales[i]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_truth_is_found_through_outliers() {
        let mut samples = Vec::new();
        for decode in 1..60u32 {
            for context in [0u64, 64, 200] {
                let mut load = StepLoad::default();
                (0..decode).for_each(|i| load.add_decode(100 + u64::from(i)));
                load.context_tokens = context;
                let t = 1e6 + 2e4 * f64::from(decode) + 50.0 * load.decode_kv as f64 + 3e3 * context as f64;
                samples.push((load, if decode % 17 == 0 { 5.0 * t } else { t }));
            }
        }
        let features = [Feature::Base, Feature::DecodeRequests, Feature::DecodeKv, Feature::ContextTokens];
        let form = Form::fit(&features, &samples).unwrap();
        for (load, t) in samples.iter().filter(|(load, _)| load.decode_requests % 17 != 0) {
            assert!((form.of(load) / t - 1.0).abs() < 0.01, "{form:?}");
        }
        assert_eq!(Form::fit(&features, &samples[..3]), None);
    }
}
