//! Synthetic datasets: random token ids of chosen lengths.

use strobe_stats::Rng;

use super::{DatasetError, Prompt, Sample};

/// No model reads a longer sequence, and a slip of the pen should not fill the memory.
const LONGEST_TOKENS: u32 = 1 << 24;

/// More requests than any run takes; a slip of the keyboard must not fill the memory.
const MOST_REQUESTS: usize = 10_000_000;

/// Lengths `max(1, ceil(normal(mean, stdev)))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormDist {
    /// Mean length in tokens.
    pub mean: f64,
    /// Standard deviation in tokens; 0 gives the same length every time.
    pub stdev: f64,
}

/// Lengths uniform from `min` to `max`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnifDist {
    /// Shortest length in tokens, at least 1.
    pub min: u32,
    /// Longest length in tokens.
    pub max: u32,
}

/// How lengths are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// Rounded normal lengths.
    Normal(NormDist),
    /// Uniform lengths.
    Uniform(UnifDist),
}

/// A synthetic dataset to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticSpec {
    /// How many samples.
    pub num_requests: usize,
    /// Prompt lengths.
    pub input: Lengths,
    /// Output lengths, drawn independently of the prompt lengths.
    pub output: Lengths,
    /// Ids are drawn from `0..vocab_size`, with replacement.
    pub vocab_size: u32,
    /// Ids that shall not occur: end and beginning of sequence.
    pub avoid_ids: Vec<u32>,
    /// Lengths and ids each have their own stream of this seed.
    pub seed: u64,
}

/// Makes a synthetic dataset. The same specification always gives the same samples.
pub fn synthetic(spec: &SyntheticSpec) -> Result<Vec<Sample>, DatasetError> {
    if spec.num_requests == 0 {
        return Err(bad_option("--num-requests", "at least 1", "0"));
    }
    if spec.num_requests > MOST_REQUESTS {
        let found = spec.num_requests.to_string();
        return Err(bad_option("--num-requests", format!("at most {MOST_REQUESTS}"), &found));
    }
    spec.input.validate("input")?;
    spec.output.validate("output")?;
    let ids = AllowedIds::new(spec.vocab_size, &spec.avoid_ids)?;

    let mut input_rng = Rng::new(spec.seed, "input lengths");
    let mut output_rng = Rng::new(spec.seed, "output lengths");
    let mut id_rng = Rng::new(spec.seed, "token ids");
    Ok((0..spec.num_requests)
        .map(|index| {
            let length = spec.input.draw(&mut input_rng);
            Sample {
                task_id: index as i64,
                prompt: Prompt::Ids((0..length).map(|_| ids.draw(&mut id_rng)).collect()),
                output_tokens: spec.output.draw(&mut output_rng),
            }
        })
        .collect())
}

impl Lengths {
    /// Checks the parameters; `side` (`input` or `output`) is the first word of the option's name.
    pub fn validate(&self, side: &str) -> Result<(), DatasetError> {
        let option = |name: &str| format!("--{side}-{name}");
        match *self {
            Lengths::Normal(NormDist { mean, stdev }) => {
                let longest = f64::from(LONGEST_TOKENS);
                if !(mean > 0.0 && mean <= longest) {
                    let expected = format!("a number above 0, at most {LONGEST_TOKENS}");
                    return Err(bad_option(option("mean"), expected, mean));
                }
                if !(0.0..=longest).contains(&stdev) {
                    let expected = format!("a number from 0 to {LONGEST_TOKENS}");
                    return Err(bad_option(option("stdev"), expected, stdev));
                }
            }
            Lengths::Uniform(UnifDist { min, max }) => {
                if min == 0 {
                    return Err(bad_option(option("min"), "at least 1", min));
                }
                if min > max {
                    let expected = format!("at least {} ({min})", option("min"));
                    return Err(bad_option(option("max"), expected, max));
                }
                if max > LONGEST_TOKENS {
                    let expected = format!("at most {LONGEST_TOKENS}");
                    return Err(bad_option(option("max"), expected, max));
                }
            }
        }
        Ok(())
    }

    fn draw(&self, rng: &mut Rng) -> u32 {
        match *self {
            // The cast saturates, so the far tail of a wide normal stays a number.
            Lengths::Normal(NormDist { mean, stdev }) => ((mean + stdev * rng.normal()).ceil() as u32).max(1),
            Lengths::Uniform(UnifDist { min, max }) => rng.between(u64::from(min), u64::from(max)) as u32,
        }
    }
}

/// The vocabulary without the ids to avoid, drawn from evenly.
struct AllowedIds {
    count: u64,
    /// Ascending, without repeats, all inside the vocabulary.
    avoided: Vec<u32>,
}

impl AllowedIds {
    fn new(vocab_size: u32, avoid: &[u32]) -> Result<AllowedIds, DatasetError> {
        let mut avoided: Vec<u32> = avoid.iter().copied().filter(|&id| id < vocab_size).collect();
        avoided.sort_unstable();
        avoided.dedup();
        let count = u64::from(vocab_size) - avoided.len() as u64;
        if count == 0 {
            let expected = "at least one id that is not a special token";
            let found = format!("{vocab_size} ids, {} of them special", avoided.len());
            return Err(bad_option("vocabulary", expected, found));
        }
        Ok(AllowedIds { count, avoided })
    }

    fn draw(&self, rng: &mut Rng) -> u32 {
        let mut id = rng.below(self.count) as u32;
        for &avoided in &self.avoided {
            // Ascending order: each avoided id at or below shifts the draw up by one.
            if avoided <= id {
                id += 1;
            }
        }
        id
    }
}

fn bad_option(option: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> DatasetError {
    DatasetError::Option { option: option.into(), expected: expected.into(), found: found.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(mean: f64, stdev: f64) -> Lengths {
        Lengths::Normal(NormDist { mean, stdev })
    }

    fn uniform(min: u32, max: u32) -> Lengths {
        Lengths::Uniform(UnifDist { min, max })
    }

    fn spec(input: Lengths, output: Lengths) -> SyntheticSpec {
        SyntheticSpec {
            num_requests: 4000,
            input,
            output,
            vocab_size: 50,
            avoid_ids: vec![2, 0, 2, 49, 1000],
            seed: 420,
        }
    }

    fn lengths(samples: &[Sample]) -> (Vec<f64>, Vec<f64>) {
        samples
            .iter()
            .map(|s| match &s.prompt {
                Prompt::Ids(ids) => (ids.len() as f64, f64::from(s.output_tokens)),
                Prompt::Text(_) => panic!("synthetic prompts are ids"),
            })
            .unzip()
    }

    fn correlation(x: &[f64], y: &[f64]) -> f64 {
        let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
        let (mx, my) = (mean(x), mean(y));
        let cov: f64 = x.iter().zip(y).map(|(a, b)| (a - mx) * (b - my)).sum();
        let sx: f64 = x.iter().map(|a| (a - mx).powi(2)).sum();
        let sy: f64 = y.iter().map(|b| (b - my).powi(2)).sum();
        cov / (sx * sy).sqrt()
    }

    #[test]
    fn input_and_output_lengths_are_independent() {
        let samples = synthetic(&spec(normal(40.0, 10.0), normal(40.0, 10.0))).unwrap();
        let (input, output) = lengths(&samples);
        assert!(correlation(&input, &output).abs() < 0.06);
        let mean = input.iter().sum::<f64>() / input.len() as f64;
        // ceil adds half a token to the mean.
        assert!((mean - 40.5).abs() < 0.7, "{mean}");
    }

    #[test]
    fn changing_the_outputs_leaves_the_prompts() {
        let a = synthetic(&spec(normal(20.0, 5.0), normal(8.0, 0.0))).unwrap();
        let b = synthetic(&spec(normal(20.0, 5.0), uniform(1, 9))).unwrap();
        assert!(a.iter().zip(&b).all(|(a, b)| a.prompt == b.prompt));
        assert!(a.iter().all(|s| s.output_tokens == 8));
        assert!(b.iter().any(|s| s.output_tokens != 8));
    }

    #[test]
    fn uniform_lengths_reach_both_ends_and_normal_ones_stay_positive() {
        let samples = synthetic(&spec(uniform(3, 6), normal(1.0, 5.0))).unwrap();
        let (input, output) = lengths(&samples);
        for length in 3..=6 {
            assert!(input.contains(&f64::from(length)));
        }
        assert!(input.iter().all(|l| (3.0..=6.0).contains(l)));
        assert!(output.iter().all(|&l| l >= 1.0));
    }

    #[test]
    fn ids_avoid_the_special_ones_and_use_all_others() {
        let samples = synthetic(&spec(uniform(8, 8), uniform(1, 1))).unwrap();
        let mut counts = [0u32; 50];
        for sample in &samples {
            if let Prompt::Ids(ids) = &sample.prompt {
                ids.iter().for_each(|&id| counts[id as usize] += 1);
            }
        }
        for (id, &count) in counts.iter().enumerate() {
            // 32000 draws over 47 ids: about 681 each, standard deviation 26.
            let expected = if [0, 2, 49].contains(&id) { 0 } else { 681 };
            assert!(count.abs_diff(expected) < 130, "{id}: {count}");
        }
    }

    #[test]
    fn bad_options_are_named() {
        let good = uniform(1, 2);
        let cases = [
            (spec(normal(f64::NAN, 0.0), good), "--input-mean"),
            (spec(normal(-1.0, 0.0), good), "--input-mean"),
            (spec(normal(1e12, 0.0), good), "--input-mean"),
            (spec(normal(5.0, -1.0), good), "--input-stdev"),
            (spec(normal(5.0, f64::NAN), good), "--input-stdev"),
            (spec(good, normal(5.0, f64::INFINITY)), "--output-stdev"),
            (spec(good, uniform(0, 5)), "--output-min"),
            (spec(good, uniform(6, 5)), "--output-max"),
            (spec(good, uniform(6, u32::MAX)), "--output-max"),
        ];
        for (spec, option) in cases {
            let error = synthetic(&spec).unwrap_err().to_string();
            assert!(error.starts_with(option), "{error}");
        }
        let mut none = spec(good, good);
        none.num_requests = 0;
        assert!(synthetic(&none).unwrap_err().to_string().starts_with("--num-requests"));
        let mut special = spec(good, good);
        (special.vocab_size, special.avoid_ids) = (2, vec![0, 1]);
        assert!(synthetic(&special).unwrap_err().to_string().contains("vocabulary"));
    }
}
