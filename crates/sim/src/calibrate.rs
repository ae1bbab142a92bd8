//! Iteration times from the iterations that an engine logged.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use strobe_workload::json_lines;

use strobe_stats::{PercentileRule, lower_percentile, mean, percentile, sample_std_dev, sorted};

use crate::cost::StepLoad;
use crate::error::SimError;
use crate::fit::{Feature, Form};

/// What a cost file calls itself.
pub const FORMAT: &str = "strobe-cost-2";

const FOLDS: usize = 5;

/// Fewer iterations of a kind say nothing about it.
const FEWEST: usize = 10;

/// One logged iteration.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// What it had to do.
    pub load: StepLoad,
    /// Time in ops.
    pub device_ns: f64,
    /// The rest of its wall time.
    pub host_ns: f64,
}

/// Kinds of iterations, each with a form of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Region {
    /// Generation only.
    Generation,
    /// Prompts only.
    Prompts,
    /// Both.
    Mixed,
}

impl Region {
    const ALL: [Region; 3] = [Region::Generation, Region::Prompts, Region::Mixed];

    fn of(load: &StepLoad) -> Region {
        match (load.context_requests, load.decode_requests) {
            (0, _) => Region::Generation,
            (_, 0) => Region::Prompts,
            _ => Region::Mixed,
        }
    }

    fn features(self) -> (Vec<Feature>, Vec<Feature>) {
        let knees = |above: fn(u64) -> Feature, at: &[u64]| at.iter().map(|k| above(*k)).collect::<Vec<_>>();
        let decode = knees(Feature::DecodeRequestsAbove, &[1, 2, 4, 8, 16, 32, 64, 128]);
        let context = knees(Feature::ContextTokensAbove, &[16, 64, 128, 256, 512, 1024, 2048]);
        match self {
            Region::Generation => (vec![Feature::Base, Feature::DecodeRequests, Feature::DecodeKv], decode),
            Region::Prompts => (
                vec![Feature::Base, Feature::ContextTokens],
                [vec![Feature::ContextPairs, Feature::ContextRequests], context].concat(),
            ),
            Region::Mixed => (
                vec![Feature::Base, Feature::ContextTokens, Feature::DecodeRequests],
                [vec![Feature::ContextPairs, Feature::DecodeKv, Feature::ContextTimesDecode], context, decode].concat(),
            ),
        }
    }
}

/// How one kind of iteration is priced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegionCost {
    /// Which kind.
    pub region: Region,
    /// Time in ops.
    pub device: Form,
    /// The rest.
    pub host: Form,
    /// Iterations it was fitted on.
    pub samples: usize,
    /// Median relative error on iterations left out of the fit.
    pub median_error: f64,
    /// 90th percentile of that error.
    pub p90_error: f64,
    /// Standard deviation of the relative error, without the outermost twentieth.
    pub residual: f64,
    /// What the median of them takes, in nanoseconds.
    pub typical_ns: f64,
    /// Measured over predicted, in the order of time, in blocks of [`BLOCK`] neighbours: slow spells are kept whole.
    pub disturbances: Vec<f64>,
}

/// What was seen: smallest and largest of each quantity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Requests that generate.
    pub decode_requests: (u64, u64),
    /// Keys they read.
    pub decode_kv: (u64, u64),
    /// Prompt tokens.
    pub context_tokens: (u64, u64),
}

impl Coverage {
    /// How far a load lies outside, as a ratio to the nearest bound; the quantity and the ratio.
    pub fn excess(&self, load: &StepLoad) -> Option<(&'static str, f64)> {
        let above =
            |name, value: u64, (_, most): (u64, u64)| (value > most).then(|| (name, value as f64 / most.max(1) as f64));
        let found = [
            above("generating requests", u64::from(load.decode_requests), self.decode_requests),
            above("KV tokens", load.decode_kv, self.decode_kv),
            above("prompt tokens", load.context_tokens, self.context_tokens),
        ];
        found.into_iter().flatten().max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// Limits of the engine that was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineLimits {
    /// Most requests in an iteration.
    pub max_batch_size: usize,
    /// Most tokens in an iteration.
    pub max_num_tokens: usize,
    /// Cache blocks.
    pub kv_blocks: usize,
    /// Tokens per cache block.
    pub tokens_per_block: usize,
}

/// A cost file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fitted {
    /// Always [`FORMAT`].
    pub format: String,
    /// strobe's version.
    pub version: String,
    /// The machine of the runs.
    pub machine: Value,
    /// The engine of the runs.
    pub engine: Value,
    /// Its limits.
    pub limits: EngineLimits,
    /// The runs.
    pub runs: Vec<String>,
    /// How much one run differs from another as a whole: standard deviation of measured over predicted time. 0 when there
    /// was only one.
    pub run_spread: f64,
    /// The prices.
    pub regions: Vec<RegionCost>,
    /// What was seen.
    pub covers: Coverage,
}

impl Fitted {
    /// The cost of an iteration, in nanoseconds. A kind that was never seen takes the nearest one's price.
    pub fn ns(&self, load: &StepLoad) -> f64 {
        let wanted = Region::of(load);
        let found = self.regions.iter().find(|r| r.region == wanted);
        let form = |r: &RegionCost| (r.device.of(load) + r.host.of(load)).max(1.0);
        if let Some(region) = found {
            return form(region);
        }
        match wanted {
            // Without mixed iterations their parts are added; the base is then counted twice, which is the safe side.
            Region::Mixed => {
                let prompts = StepLoad { decode_requests: 0, decode_kv: 0, ..*load };
                let generation = StepLoad {
                    decode_requests: load.decode_requests,
                    decode_kv: load.decode_kv,
                    ..StepLoad::default()
                };
                self.of_region(Region::Prompts, &prompts) + self.of_region(Region::Generation, &generation)
            }
            _ => self.of_region(Region::Mixed, load),
        }
    }

    fn of_region(&self, region: Region, load: &StepLoad) -> f64 {
        let found = self.regions.iter().find(|r| r.region == region).or(self.regions.first());
        found.map_or(1.0, |r| (r.device.of(load) + r.host.of(load)).max(1.0))
    }

    /// How iterations of this kind are priced, where they were seen.
    pub fn region(&self, load: &StepLoad) -> Option<&RegionCost> {
        let wanted = Region::of(load);
        self.regions.iter().find(|r| r.region == wanted)
    }

    /// Reads a cost file.
    pub fn read(path: &Path) -> Result<Fitted, SimError> {
        let bad =
            |problem: String| SimError::Option { option: "--cost", problem: format!("{}: {problem}", path.display()) };
        let text = std::fs::read_to_string(path).map_err(|e| bad(format!("cannot be read: {e}")))?;
        let value: Value = serde_json::from_str(&text).map_err(|e| bad(format!("is not a cost file: {e}")))?;
        match value.get("format").and_then(Value::as_str) {
            Some(FORMAT) => {}
            Some(other) => {
                return Err(bad(format!(
                    "is a cost file of format `{other}`, this strobe reads `{FORMAT}`; calibrate again"
                )));
            }
            None => {
                return Err(bad(
                    "is not a cost file; make one with `strobe simulate calibrate RUN -o cost.json`".into()
                ));
            }
        }
        let fitted: Fitted = serde_json::from_value(value).map_err(|e| bad(format!("is damaged: {e}")))?;
        if fitted.regions.is_empty() {
            return Err(bad("prices nothing; calibrate again".into()));
        }
        Ok(fitted)
    }
}

/// The logged iterations of a run with what `run.json` says about it.
pub struct Run {
    /// Where it is.
    pub path: PathBuf,
    /// Its iterations.
    pub samples: Vec<Sample>,
    /// Its limits.
    pub limits: EngineLimits,
    /// What `run.json` says of the engine.
    pub engine: Value,
    /// What `run.json` says of the machine.
    pub machine: Value,
}

/// Reads a run directory. Iterations that were profiled are left out: recording takes time of its own.
pub fn read_run(path: &Path) -> Result<Run, SimError> {
    let bad = |problem: String| SimError::Run(format!("{}: {problem}", path.display()));
    let log = path.join("iterations.jsonl");
    let text = std::fs::read(&log).map_err(|e| {
        bad(format!("no iterations.jsonl in it ({e}); give a directory that `strobe bench --output-dir` wrote"))
    })?;
    let about: Value = std::fs::read_to_string(path.join("run.json"))
        .ok()
        .and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or(Value::Null);
    let mut run = Run {
        path: path.to_path_buf(),
        samples: Vec::new(),
        limits: EngineLimits::default(),
        engine: about.get("engine").or(about.get("simulated")).cloned().unwrap_or(Value::Null),
        machine: about.get("machine").cloned().unwrap_or(Value::Null),
    };
    let read = |line: &str| {
        let record: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
        let sample = sample(&record)
            .ok_or("not an iteration of strobe with the keys it read; run the benchmark again".to_string())?;
        let count = |v: &Value, key: &str| v.get(key).and_then(Value::as_u64).unwrap_or(0) as usize;
        let kv = record.get("kvCacheStats").unwrap_or(&Value::Null);
        let limits = EngineLimits {
            max_batch_size: count(&record, "maxBatchSizeRuntime"),
            max_num_tokens: count(&record, "maxNumTokensRuntime"),
            kv_blocks: count(kv, "maxNumBlocks"),
            tokens_per_block: count(kv, "tokensPerBlock"),
        };
        let disturbed = ["profiled", "leadIn"].iter().any(|key| record["strobe"][key].as_bool().unwrap_or(false));
        Ok((limits, disturbed, sample))
    };
    // A run that was killed may end in the middle of a line.
    let lines = json_lines(&text, read)
        .map_err(|(line, problem): (usize, String)| bad(format!("iterations.jsonl line {line}: {problem}")))?;
    for (index, (limits, disturbed, sample)) in lines.records.into_iter().enumerate() {
        if index == 0 {
            run.limits = limits;
        }
        if !disturbed && sample.device_ns + sample.host_ns > 0.0 {
            run.samples.push(sample);
        }
    }
    if run.samples.is_empty() {
        return Err(bad("holds no iterations outside of profile windows".into()));
    }
    Ok(run)
}

fn sample(record: &Value) -> Option<Sample> {
    let strobe = record.get("strobe")?;
    let batch = record.get("inflightBatchingStats").or(record.get("staticBatchingStats"))?;
    let count = |value: &Value, key: &str| value.get(key).and_then(Value::as_u64);
    let wall = record.get("iterLatencyMS")?.as_f64()? * 1e6;
    let device = record.get("computeStepTimeMS")?.as_f64()? * 1e6;
    Some(Sample {
        load: StepLoad {
            context_requests: count(batch, "numContextRequests")? as u32,
            context_tokens: count(batch, "numCtxTokens")?,
            context_kv: count(strobe, "contextCachedTokens")?,
            context_pairs: count(strobe, "contextKeyPairs")?,
            decode_requests: count(batch, "numGenRequests").or(count(batch, "numGenTokens"))? as u32,
            decode_kv: count(strobe, "generationKvTokens")?,
        },
        device_ns: device,
        host_ns: (wall - device).max(0.0),
    })
}

/// Fits the cost of all kinds of iterations that the runs hold.
pub fn fit(runs: &[&Run], version: &str) -> Result<Fitted, SimError> {
    let first = runs.first().ok_or(SimError::Option { option: "RUN", problem: "give at least one run".into() })?;
    let alike = |what: &str, of: &dyn Fn(&Run) -> Value| match runs.iter().find(|run| of(run) != of(first)) {
        None => Ok(()),
        Some(other) => {
            let problem = format!(
                "{} and {} are runs {what}; calibrate each by itself",
                first.path.display(),
                other.path.display()
            );
            Err(SimError::Run(problem))
        }
    };
    alike("of different models", &|run| run.engine["model_name"].clone())?;
    alike("of engines that were built differently", &|run| {
        json!([run.engine["pretrained_config"], run.engine["build_config"]])
    })?;
    alike("on different machines", &|run| run.machine.clone())?;
    alike("with different limits", &|run| {
        json!([run.limits.max_batch_size, run.limits.max_num_tokens, run.limits.tokens_per_block])
    })?;
    let samples: Vec<Sample> = runs.iter().flat_map(|run| run.samples.iter().copied()).collect();
    let regions: Vec<RegionCost> = Region::ALL.iter().filter_map(|region| fit_region(*region, &samples)).collect();
    if regions.is_empty() {
        let paths: Vec<String> = runs.iter().map(|run| run.path.display().to_string()).collect();
        let (paths, count) = (paths.join(", "), samples.len());
        let (ending, are) = if count == 1 { ("", "is") } else { ("s", "are") };
        let problem =
            format!("{paths}: {count} iteration{ending} {are} too few to fit anything; run a longer benchmark");
        return Err(SimError::Run(problem));
    }
    let range = |f: &dyn Fn(&StepLoad) -> u64| {
        let values = samples.iter().map(|s| f(&s.load));
        (values.clone().min().unwrap_or(0), values.max().unwrap_or(0))
    };
    let mut fitted = Fitted {
        format: FORMAT.into(),
        version: version.into(),
        machine: first.machine.clone(),
        engine: first.engine.clone(),
        limits: first.limits.clone(),
        runs: runs.iter().map(|run| run.path.display().to_string()).collect(),
        run_spread: 0.0,
        regions,
        covers: Coverage {
            decode_requests: range(&|l| u64::from(l.decode_requests)),
            decode_kv: range(&|l| l.decode_kv),
            context_tokens: range(&|l| l.context_tokens),
        },
    };
    fitted.run_spread = run_spread(&fitted, runs);
    Ok(fitted)
}

/// Measured over predicted time of a run's iterations.
pub fn slowness(fitted: &Fitted, run: &Run) -> f64 {
    let (measured, predicted) = run.samples.iter().fold((0.0, 0.0), |(measured, predicted), sample| {
        let usual = fitted.ns(&sample.load);
        (measured + (sample.device_ns + sample.host_ns).min(DISTURBED * usual), predicted + usual)
    });
    measured / predicted
}

/// Standard deviation over runs of that.
fn run_spread(fitted: &Fitted, runs: &[&Run]) -> f64 {
    let ratios: Vec<f64> = runs.iter().map(|run| slowness(fitted, run)).collect();
    sample_std_dev(&ratios).unwrap_or(0.0)
}

/// Relative errors on samples that were left out of the fit, fold by fold.
fn errors_left_out(features: &[Feature], samples: &[(StepLoad, f64)]) -> Option<Vec<f64>> {
    // Folds of neighbours, so that what disturbs the machine for a while is left out together.
    let fold_of = |i: usize| (i * FOLDS * 4 / samples.len().max(1)) % FOLDS;
    let mut errors = Vec::with_capacity(samples.len());
    for fold in 0..FOLDS {
        let (test, train): (Vec<_>, Vec<_>) = samples.iter().enumerate().partition(|(i, _)| fold_of(*i) == fold);
        let train: Vec<_> = train.into_iter().map(|(_, s)| *s).collect();
        let form = Form::fit(features, &train)?;
        errors.extend(test.iter().map(|(_, (load, t))| form.of(load) / t - 1.0));
    }
    Some(errors)
}

/// An iteration that took more than this many times the usual counts as so many: a machine that stopped says nothing.
const DISTURBED: f64 = 5.0;

/// Neighbours that are kept together in [`RegionCost::disturbances`].
pub const BLOCK: usize = 32;

/// Blocks kept of each kind.
const MOST_BLOCKS: usize = 64;

/// Blocks of neighbours, evenly spread over all values, as ratios with a mean of 1.
fn blocks(ratios: &[f64]) -> Vec<f64> {
    let count = ratios.len().div_ceil(BLOCK);
    let kept = count.min(MOST_BLOCKS);
    let chosen: Vec<f64> = (0..kept)
        .flat_map(|i| {
            let first = i * count / kept * BLOCK;
            &ratios[first..(first + BLOCK).min(ratios.len())]
        })
        .copied()
        .collect();
    let mean = mean(&chosen).unwrap_or(0.0);
    chosen.iter().map(|ratio| (ratio / mean * 1e4).round() / 1e4).collect()
}

fn typical(durations: impl Iterator<Item = f64>) -> f64 {
    let durations: Vec<f64> = durations.collect();
    percentile(&sorted(&durations), 0.5, PercentileRule::Nearest).unwrap_or(0.0)
}

fn quantile_abs(errors: &[f64], q: f64) -> f64 {
    let sizes: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
    lower_percentile(&sorted(&sizes), q).unwrap_or(0.0)
}

/// The samples that price a kind of iterations: its own or, where there are few of them, those of both kinds with
/// prompts, or all. None when they do not hold what the kind is made of.
fn samples_of(region: Region, samples: &[Sample]) -> Option<(Vec<Sample>, Region)> {
    let some = |wanted: &dyn Fn(Region) -> bool| -> Vec<Sample> {
        samples.iter().filter(|s| wanted(Region::of(&s.load))).copied().collect()
    };
    let own = some(&|r| r == region);
    if own.len() >= FEWEST {
        return Some((own, region));
    }
    let with_prompts = some(&|r| r != Region::Generation);
    let wider =
        if region != Region::Generation && with_prompts.len() >= FEWEST { with_prompts } else { some(&|_| true) };
    let prompts = wider.iter().any(|s| s.load.context_tokens > 0) || region == Region::Generation;
    let generation = wider.iter().any(|s| s.load.decode_requests > 0) || region == Region::Prompts;
    (wider.len() >= FEWEST && prompts && generation).then_some((wider, Region::Mixed))
}

fn fit_region(region: Region, samples: &[Sample]) -> Option<RegionCost> {
    let (own, features_of) = samples_of(region, samples)?;
    let wall: Vec<(StepLoad, f64)> = own.iter().map(|s| (s.load, s.device_ns + s.host_ns)).collect();
    let (mut features, mut candidates) = features_of.features();
    // Fewer features where there are few samples.
    while features.len() > 1 && wall.len() < 4 * features.len() {
        features.pop();
    }
    // At most 4,000 samples decide which features are worth it; all are fitted in the end.
    let stride = wall.len().div_ceil(4_000).max(1);
    let some: Vec<(StepLoad, f64)> = wall.iter().step_by(stride).copied().collect();
    let score = |features: &[Feature]| {
        errors_left_out(features, &some).map(|e| e.iter().map(|e| e.abs().min(1.0)).sum::<f64>())
    };
    let mut best = score(&features).unwrap_or(f64::INFINITY);
    while best.is_finite() && features.len() < 7 {
        let tried = candidates.iter().enumerate().filter_map(|(i, candidate)| {
            let with: Vec<Feature> = features.iter().copied().chain([*candidate]).collect();
            Some((i, score(&with)?))
        });
        // A feature earns its place by two per cent less error on what was left out, and by more than a trifle of time.
        let trifle = 2e-4 * some.len() as f64;
        match tried.min_by(|a, b| a.1.total_cmp(&b.1)) {
            Some((i, found)) if found < 0.98 * best && found < best - trifle => {
                best = found;
                features.push(candidates.remove(i));
            }
            _ => break,
        }
    }
    let part = |f: fn(&Sample) -> f64| own.iter().map(|s| (s.load, f(s))).collect::<Vec<_>>();
    let usual = Form::fit(&features, &wall)?;
    let total = usual.in_the_mean(&wall, DISTURBED)?;
    let host = total.in_the_mean(&part(|s| s.host_ns.max(1.0)), f64::INFINITY)?;
    // Device and host add up to the fit of the whole, whose errors are known.
    let of_host =
        |feature| host.terms.iter().find(|(own, _)| *own == feature).map_or(0.0, |(_, coefficient)| *coefficient);
    let device = Form { terms: total.terms.iter().map(|(feature, t)| (*feature, t - of_host(*feature))).collect() };
    let host = Form { terms: total.terms.iter().map(|(feature, _)| (*feature, of_host(*feature))).collect() };
    let errors = errors_left_out(&features, &wall)
        .unwrap_or_else(|| wall.iter().map(|(load, t)| total.of(load) / t - 1.0).collect());
    let limit = quantile_abs(&errors, 0.95);
    let inner: Vec<f64> = errors.iter().copied().filter(|e| e.abs() <= limit).collect();
    let mean = inner.iter().sum::<f64>() / inner.len().max(1) as f64;
    let variance = inner.iter().map(|e| (e - mean).powi(2)).sum::<f64>() / inner.len().max(1) as f64;
    Some(RegionCost {
        region,
        device,
        host,
        samples: samples.iter().filter(|s| Region::of(&s.load) == region).count(),
        median_error: quantile_abs(&errors, 0.5),
        p90_error: quantile_abs(&errors, 0.9),
        residual: variance.sqrt(),
        typical_ns: typical(wall.iter().map(|(load, _)| total.of(load))),
        disturbances: blocks(
            &wall.iter().map(|(load, t)| (t / total.of(load).max(1.0)).min(DISTURBED)).collect::<Vec<_>>(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use strobe_workload::Rng;

    #[test]
    fn a_bent_truth_with_noise_is_found_in_every_region() {
        let mut rng = Rng::new(1, "calibrate");
        let truth = |load: &StepLoad| {
            let decode = f64::from(load.decode_requests);
            2e6 + 1e4 * decode
                + 4e4 * (decode - 16.0).max(0.0)
                + 3.0 * load.decode_kv as f64
                + 5e3 * load.context_tokens as f64
                + 2.0 * load.context_pairs as f64
        };
        let mut samples = Vec::new();
        for _ in 0..3000 {
            let mut load = StepLoad::default();
            (0..rng.below(40)).for_each(|_| load.add_decode(100 + rng.below(200)));
            if load.decode_requests == 0 || rng.uniform() < 0.3 {
                load.add_context(0, 16 + rng.below(500));
            }
            let wall = truth(&load) * (1.0 + 0.02 * rng.normal());
            samples.push(Sample { load, device_ns: 0.9 * wall, host_ns: 0.1 * wall });
        }
        let engine = serde_json::json!({"model_name": "m"});
        let run = |samples: &[Sample]| Run {
            path: "run".into(),
            samples: samples.to_vec(),
            limits: EngineLimits::default(),
            engine: engine.clone(),
            machine: Value::Null,
        };
        let fitted = fit(&[&run(&samples)], "0").unwrap();
        assert_eq!(fitted.regions.len(), 3);
        for sample in &samples {
            assert!((fitted.ns(&sample.load) / truth(&sample.load) - 1.0).abs() < 0.05, "{:?}", sample.load);
        }
        assert!(fitted.regions.iter().all(|r| r.median_error < 0.03 && r.residual < 0.04), "{:?}", fitted.regions);
        let text = serde_json::to_string(&fitted).unwrap();
        let read = serde_json::from_str::<Fitted>(&text).unwrap();
        assert!(samples.iter().all(|s| (read.ns(&s.load) / fitted.ns(&s.load) - 1.0).abs() < 1e-9));
        let far = StepLoad { decode_requests: 400, ..StepLoad::default() };
        assert_eq!(fitted.covers.excess(&far).unwrap().0, "generating requests");
        assert!(fit(&[&run(&samples[..2])], "0").is_err());
    }
}
