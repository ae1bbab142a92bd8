//! How long an iteration takes.

use std::sync::Arc;

use strobe_scheduler::scheduler::{Phase, Plan};
use strobe_workload::Rng;

use crate::analytic::Analytic;
use crate::calibrate::{BLOCK, Fitted, RegionCost};
use crate::error::SimError;
use crate::profile::OperatorTables;
use crate::splitwise::PhaseTables;
use crate::units::parse_duration_ns;

/// What an iteration has to do, as far as its duration depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepLoad {
    /// Requests in their prompt.
    pub context_requests: u32,
    /// Prompt tokens computed.
    pub context_tokens: u64,
    /// Cached tokens that those prompt tokens look back on: earlier chunks and reused prefixes.
    pub context_kv: u64,
    /// Keys that prompt tokens attend to, summed over them.
    pub context_pairs: u64,
    /// Requests that generate.
    pub decode_requests: u32,
    /// Keys they read, each its whole sequence so far.
    pub decode_kv: u64,
}

impl StepLoad {
    /// The load of a plan.
    pub fn of(plan: &Plan) -> StepLoad {
        let mut load = StepLoad::default();
        for item in &plan.items {
            match item.phase {
                Phase::Generation => load.add_decode(item.start as u64 + 1),
                Phase::Context => load.add_context(item.start as u64, item.len as u64),
            }
        }
        load
    }

    /// One more request that generates and reads `keys` keys.
    pub fn add_decode(&mut self, keys: u64) {
        self.decode_requests += 1;
        self.decode_kv += keys;
    }

    /// One more request with `tokens` prompt tokens after `cached` ones.
    pub fn add_context(&mut self, cached: u64, tokens: u64) {
        self.context_requests += 1;
        self.context_tokens += tokens;
        self.context_kv += cached;
        self.context_pairs += tokens * cached + tokens * (tokens + 1) / 2;
    }

    /// Requests in the iteration.
    pub fn requests(&self) -> u64 {
        u64::from(self.context_requests) + u64::from(self.decode_requests)
    }

    /// Keys read from the cache.
    pub fn kv_tokens(&self) -> u64 {
        self.context_kv + self.decode_kv
    }
}

/// A plain linear form, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Linear {
    /// Every iteration.
    pub base_ns: f64,
    /// Every request in it.
    pub per_request_ns: f64,
    /// Every prompt token.
    pub per_context_token_ns: f64,
    /// Every cached token that is read.
    pub per_kv_token_ns: f64,
}

impl Linear {
    /// Reads `base=2ms,per_request=10us,per_context_token=3us,per_kv_token=5ns`; what is not named is 0.
    pub fn parse(text: &str) -> Result<Linear, SimError> {
        let bad = |what: String| SimError::Option {
            option: "--cost",
            problem: format!("{what}; use linear:base=2ms,per_request=10us,per_context_token=3us,per_kv_token=5ns"),
        };
        let mut linear = Linear::default();
        for part in text.split(',') {
            let Some((name, value)) = part.split_once('=') else {
                return Err(bad(format!("`{part}` is not NAME=TIME")));
            };
            let ns = parse_duration_ns(value.trim()).map_err(|problem| bad(format!("{name}: {problem}")))?;
            *match name.trim() {
                "base" => &mut linear.base_ns,
                "per_request" => &mut linear.per_request_ns,
                "per_context_token" => &mut linear.per_context_token_ns,
                "per_kv_token" => &mut linear.per_kv_token_ns,
                other => return Err(bad(format!("no such term `{other}`"))),
            } = ns;
        }
        if linear == Linear::default() {
            return Err(bad("every term is 0, so no time would pass".into()));
        }
        Ok(linear)
    }

    fn ns(&self, load: &StepLoad) -> f64 {
        self.base_ns
            + self.per_request_ns * load.requests() as f64
            + self.per_context_token_ns * load.context_tokens as f64
            + self.per_kv_token_ns * load.kv_tokens() as f64
    }
}

/// Where iteration times come from.
#[derive(Clone, Debug)]
pub enum CostModel {
    /// A plain linear form.
    Linear(Linear),
    /// Fitted to the iterations of an engine, with their noise if that is wanted.
    Fitted {
        /// The cost file.
        fitted: Arc<Fitted>,
        /// Whether iterations vary as the measured ones did.
        noise: bool,
        /// All durations are multiplied by this: one run is not as fast as another.
        scale: f64,
    },
    /// Operator tables of another tool.
    Tables(Arc<OperatorTables>),
    /// Prompt and token times of another tool.
    Phases(Arc<PhaseTables>),
    /// Operations and bytes over what a GPU can do.
    Analytic(Analytic),
    /// Exponential times of this mean whatever the iteration holds: queueing theory's server.
    Exponential {
        /// Mean, in nanoseconds.
        mean_ns: f64,
    },
    /// Lognormal times whatever the iteration holds.
    LogNormal {
        /// Mean, in nanoseconds.
        mean_ns: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
    },
}

/// What is random in the costs of one server.
pub struct Draws {
    rng: Rng,
    /// For each kind of iterations where its walk through the measured disturbances is.
    walks: [Walk; 3],
}

/// A walk once around a block of neighbours, from anywhere in it.
#[derive(Clone, Copy, Default)]
struct Walk {
    block: usize,
    at: usize,
    left: usize,
}

/// Longer iterations than so many usual ones are hardly disturbed.
const MOST_AVERAGED: f64 = 32.0;

impl Draws {
    /// The draws of server `number`.
    pub fn new(number: u32, seed: u64) -> Draws {
        Draws { rng: Rng::new(seed, &format!("costs of replica {number}")), walks: Default::default() }
    }

    /// The next disturbance of a kind: neighbours follow each other until their block was seen, then comes any other one.
    fn disturbance(&mut self, kind: usize, ratios: &[f64]) -> f64 {
        let Some(walk) = self.walks.get_mut(kind) else { return 1.0 };
        if walk.left == 0 {
            walk.block = self.rng.below(ratios.len().div_ceil(BLOCK) as u64) as usize;
            walk.left = BLOCK.min(ratios.len() - walk.block * BLOCK);
            walk.at = self.rng.below(walk.left as u64) as usize;
        }
        let length = BLOCK.min(ratios.len() - walk.block * BLOCK);
        let ratio = ratios[walk.block * BLOCK + walk.at % length];
        walk.at += 1;
        walk.left -= 1;
        ratio
    }

    /// How much longer than usual an iteration is that usually takes `ns`. One that is longer than those measured goes
    /// through several disturbances, which even out.
    fn slowness(&mut self, region: &RegionCost, ns: f64) -> f64 {
        if region.disturbances.is_empty() {
            return 1.0;
        }
        let several = (ns / region.typical_ns.max(1.0)).round().clamp(1.0, MOST_AVERAGED);
        let sum: f64 =
            (0..several as usize).map(|_| self.disturbance(region.region as usize, &region.disturbances)).sum();
        sum / several
    }
}

impl CostModel {
    /// The duration of one iteration, in nanoseconds.
    pub fn duration_ns(&self, load: &StepLoad, draws: &mut Draws) -> f64 {
        match self {
            CostModel::Linear(linear) => linear.ns(load),
            CostModel::Fitted { fitted, noise, scale } => {
                let ns = fitted.ns(load);
                let region = if *noise { fitted.region(load) } else { None };
                ns * scale * region.map_or(1.0, |region| draws.slowness(region, ns))
            }
            CostModel::Tables(tables) => tables.ns(load),
            CostModel::Phases(tables) => tables.ns(load),
            CostModel::Analytic(analytic) => analytic.ns(load),
            CostModel::Exponential { mean_ns } => mean_ns * draws.rng.exponential(),
            CostModel::LogNormal { mean_ns, sigma } => {
                mean_ns * (sigma * draws.rng.normal() - sigma * sigma / 2.0).exp()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::Region;
    use crate::fit::Form;

    #[test]
    fn disturbances_come_in_blocks_and_long_iterations_are_disturbed_less() {
        let mut draws = Draws::new(0, 1);
        let ratios: Vec<f64> = (0..80).map(f64::from).collect();
        let drawn: Vec<f64> = (0..800).map(|_| draws.disturbance(0, &ratios)).collect();
        let neighbours = drawn.windows(2).filter(|pair| pair[1] == pair[0] + 1.0).count();
        assert!(neighbours > 700, "{neighbours}");
        assert!(ratios.iter().all(|ratio| drawn.contains(ratio)));
        let region = RegionCost {
            region: Region::Prompts,
            device: Form::default(),
            host: Form::default(),
            samples: 2,
            median_error: 0.0,
            p90_error: 0.0,
            residual: 0.0,
            typical_ns: 1e6,
            disturbances: vec![0.5, 1.5],
        };
        let usual: Vec<f64> = (0..10).map(|_| draws.slowness(&region, 1e6)).collect();
        assert!(usual.contains(&0.5) && usual.contains(&1.5));
        assert_eq!(draws.slowness(&region, 20e6), 1.0);
    }

    #[test]
    fn linear_costs_are_read_and_bad_ones_named() {
        let linear = Linear::parse("base=2ms,per_request=10us,per_context_token=3us,per_kv_token=5ns").unwrap();
        assert_eq!(linear.base_ns, 2e6);
        let mut load = StepLoad::default();
        load.add_context(0, 100);
        load.add_decode(50);
        assert_eq!(linear.ns(&load), 2e6 + 2.0 * 1e4 + 100.0 * 3e3 + 50.0 * 5.0);
        for bad in ["base", "base=2", "bass=2ms", "base=-1ms", "base=nanms", "", "base=0ms"] {
            let text = Linear::parse(bad).unwrap_err().to_string();
            assert!(text.starts_with("--cost"), "{bad}: {text}");
        }
    }
}
