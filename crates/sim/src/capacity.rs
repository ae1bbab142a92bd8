//! The largest rate that meets limits, and the fewest servers for a rate.
//!
//! A capacity is the largest rate at which a long run holds every limit, and keeps its queue bounded, whatever its seed.
//! Short runs end before queues have grown, so runs are lengthened until the answer no longer moves. Each seed has a
//! largest rate of its own; the answer is below nearly all of them, and is tried with fresh seeds before it is given.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde::Serialize;
use strobe_stats::{mean, median, sample_std_dev, student_quantile};
use strobe_workload::Arrival;

use crate::cluster::{ClusterConfig, Routing};
use crate::collector::{Answer, Collector, LimitValue, Slo};
use crate::cost::CostModel;
use crate::error::SimError;
use crate::replica::ReplicaConfig;
use crate::request::SimRequest;
use crate::scenario::{Load, Policy, Scenario};

/// How an answer is looked for.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// Seeds whose largest rates are compared at each length of runs.
    pub replications: usize,
    /// Fresh runs in which the answer must hold.
    pub runs: usize,
    /// Requests of the shortest runs.
    pub shortest: u64,
    /// Requests of the longest runs.
    pub longest: u64,
    /// Threads to simulate on.
    pub threads: usize,
    /// Whether a larger batch would come with a larger cache.
    pub cache_follows_batch: bool,
    /// Whether to stop now.
    pub stop: Option<fn() -> bool>,
}

impl Default for Search {
    fn default() -> Search {
        Search {
            replications: 8,
            runs: 20,
            shortest: 2_000,
            longest: 128_000,
            threads: 1,
            cache_follows_batch: false,
            stop: None,
        }
    }
}

/// A rate is found to this part of it.
const RESOLUTION: f64 = 0.004;

/// Runs are long enough when four times shorter ones give the same answer to this part.
const STEADY: f64 = 0.01;

/// And when the largest rates of their seeds spread by no more than this.
const NARROW: f64 = 0.008;

/// The answer is this many standard deviations below the mean of the seeds' largest rates: 98 % of the runs hold there.
const BELOW: f64 = 2.2;

/// At saturation a queue is as long as the run lets it be; an answer is so much below it at least.
const BELOW_SATURATION: f64 = 0.015;

/// Where the limits must break, if the answer is not too careful.
const ABOVE: f64 = 1.05;

/// Runs that show it.
const RUNS_ABOVE: usize = 8;

/// Fewer requests than this do not confirm an answer.
const FEWEST_TO_CONFIRM: u64 = 32_000;

/// Rates beyond which nothing is looked for.
const RATES: (f64, f64) = (1e-6, 1e7);

/// Numbers of replications that no search for a rate uses.
const FRESH: u64 = 1_000;

/// A server's limit counts as binding when twice of it lets the rate grow by this part.
const MATTERS: f64 = 0.02;

/// What keeps the rate from being larger.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Binding {
    /// The limit that breaks first above the answer; none when the queue grows without bound, or requests are refused, before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo: Option<Slo>,
    /// What of the server would have to be larger.
    pub resource: Resource,
}

/// What a server has too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Resource {
    /// None of its limits: iterations take too long.
    Compute,
    /// Cache blocks.
    Kv,
    /// Places in the batch.
    Batch,
    /// Tokens of an iteration.
    Tokens,
}

/// Another setting with the rate that it would allow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WhatIf {
    /// The options as they would be given.
    pub options: String,
    /// Requests per second, or conversations.
    pub rate_req_s: f64,
    /// Part by which that is more.
    pub change: f64,
}

/// A limit with its values in several runs, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Seen {
    /// The limit.
    pub slo: Slo,
    /// Median of the runs' values.
    pub median_ms: f64,
    /// The largest of them.
    pub highest_ms: f64,
}

/// Runs with what became of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Tried {
    /// Runs in which every limit held.
    pub held: usize,
    /// Runs in all.
    pub runs: usize,
    /// Requests of each.
    pub requests: u64,
}

/// The largest rate that meets every limit.
#[derive(Clone, Debug, Serialize)]
pub struct Capacity {
    /// What the load's rate may be: requests per second, or conversations.
    pub rate_req_s: f64,
    /// Requests per second at that rate.
    pub requests_per_s: f64,
    /// That rate over the scenario's own, for a recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_scale: Option<f64>,
    /// 95 % interval of the mean over seeds of the largest rate that each meets.
    pub interval_req_s: (f64, f64),
    /// Those rates, in the longest runs.
    pub replications_req_s: Vec<f64>,
    /// Fresh runs at the answer.
    pub tried: Tried,
    /// Fresh runs at 1.05 times the answer.
    pub tried_above: Tried,
    /// Whether nothing is drawn at random, so that all runs are the same.
    pub only_one_run: bool,
    /// Each limit with its values in the runs at the answer.
    pub values_ms: Vec<Seen>,
    /// What keeps the rate from being larger.
    pub binds: Binding,
    /// What would move it.
    pub what_if: Vec<WhatIf>,
    /// The numbers of the first run at the answer.
    pub at_capacity: Answer,
}

/// What a search for a rate found.
#[derive(Clone, Debug)]
pub enum Found {
    /// The largest rate.
    Rate(Box<Capacity>),
    /// The limits hold at any rate up to this.
    Unlimited(f64),
    /// They hold at none; the best possible is that of an idle server.
    Never(Unmeetable),
}

/// No rate meets the limits.
#[derive(Clone, Debug, Serialize)]
pub struct Unmeetable {
    /// Limits that an idle server does not meet, each with the best possible value in milliseconds.
    pub best_ms: Vec<(Slo, f64)>,
}

/// A mean with its 95 % interval.
pub fn interval(values: &[f64]) -> (f64, (f64, f64)) {
    let mean = mean(values).unwrap_or(0.0);
    let half = sample_std_dev(values)
        .map_or(0.0, |sd| student_quantile(0.975, values.len() as f64 - 1.0) * sd / (values.len() as f64).sqrt());
    (mean, (mean - half, mean + half))
}

/// Where one more value like these lies with 95 % confidence; latencies are not below 0.
pub fn prediction_interval(values: &[f64]) -> (f64, f64) {
    let (mean, (_, high)) = interval(values);
    // The interval of the mean has half width t*s/sqrt(n); that of one more value t*s*sqrt(1 + 1/n).
    let half = (high - mean) * (values.len() as f64 + 1.0).sqrt();
    ((mean - half).max(0.0), mean + half)
}

/// The mean rate of a scenario's load: requests per second, or conversations. None where requests wait for each other or
/// come all at once.
pub fn rate_of(scenario: &Scenario) -> Option<f64> {
    match &scenario.load {
        Load::Open(arrival) | Load::Sessions { arrival, .. } => arrival.rate(),
        Load::Closed { .. } => None,
        Load::Replay(requests) => {
            let count = requests.len().min(usize::try_from(scenario.num_requests).unwrap_or(usize::MAX));
            let span_ns = requests.get(count.checked_sub(1)?)?.arrival_ns.saturating_sub(requests.first()?.arrival_ns);
            (span_ns > 0).then(|| (count - 1) as f64 * 1e9 / span_ns as f64)
        }
    }
}

/// The scenario at another mean rate. Only loads with a rate can be changed so.
pub fn at_rate(scenario: &Scenario, rate: f64) -> Option<Scenario> {
    let change = |arrival: Arrival| {
        Some(match arrival {
            Arrival::AtOnce => return None,
            Arrival::Constant { .. } => Arrival::Constant { rate },
            Arrival::Poisson { .. } => Arrival::Poisson { rate },
            Arrival::Gamma { burstiness, .. } => Arrival::Gamma { rate, burstiness },
            Arrival::OnOff { on_s, off_s, .. } => Arrival::OnOff { rate, on_s, off_s },
            Arrival::Drift { swing, period_s, .. } => Arrival::Drift { rate, swing, period_s },
        })
    };
    let scale = rate / rate_of(scenario)?;
    let mut changed = scenario.clone();
    match &mut changed.load {
        Load::Open(arrival) | Load::Sessions { arrival, .. } => *arrival = change(*arrival)?,
        Load::Replay(requests) => {
            let moved = |r: &SimRequest| SimRequest { arrival_ns: (r.arrival_ns as f64 / scale) as u64, ..r.clone() };
            *requests = Arc::new(requests.iter().map(moved).collect());
        }
        Load::Closed { .. } => return None,
    }
    Some(changed)
}

/// Requests of each arrival: the turns of a conversation.
fn turns(scenario: &Scenario) -> u32 {
    if let Load::Sessions { turns, .. } = scenario.load { turns } else { 1 }
}

fn is_recording(scenario: &Scenario) -> bool {
    matches!(scenario.load, Load::Replay(_))
}

/// Whether another seed changes nothing.
fn is_fixed(scenario: &Scenario) -> bool {
    let is_drawn = match &scenario.cost {
        CostModel::Fitted { .. } | CostModel::Exponential { .. } | CostModel::LogNormal { .. } => true,
        CostModel::Linear(_) | CostModel::Tables(_) | CostModel::Phases(_) | CostModel::Analytic(_) => false,
    };
    let routing = scenario.cluster.routing;
    let is_routed = scenario.speeds.len() > 1 && matches!(routing, Routing::Random | Routing::PowerOf(_));
    is_recording(scenario) && !is_drawn && !is_routed
}

/// The largest number of at most four digits that is not above `value`: what is tried is what is printed.
fn rounded_down(value: f64) -> f64 {
    if !(value > 0.0 && value.is_finite()) {
        return value;
    }
    let unit = 10f64.powi(value.log10().floor() as i32 - 3);
    let digits = (value / unit).floor();
    // Through text, so that the number is the nearest one to what is printed.
    format!("{digits}e{}", value.log10().floor() as i32 - 3).parse().unwrap_or(value)
}

/// What became of one run.
struct Trial {
    held: bool,
    /// Its numbers; none when it was given up at the first limit that broke.
    answer: Option<Answer>,
}

/// The largest rates of several seeds.
struct Largest {
    rates: Vec<f64>,
}

impl Largest {
    fn mean(&self) -> f64 {
        mean(&self.rates).unwrap_or(0.0)
    }

    /// Relative standard deviation.
    fn spread(&self) -> f64 {
        sample_std_dev(&self.rates).unwrap_or(0.0) / self.mean().max(f64::MIN_POSITIVE)
    }
}

impl Search {
    /// One run of the scenario. One in which the servers are still filling is lengthened. `whole` runs do not end at the
    /// first limit that breaks.
    fn run(&self, scenario: &Scenario, whole: bool) -> Result<Trial, SimError> {
        let recording = is_recording(scenario);
        let mut sized = scenario.clone();
        loop {
            let mut collector = Collector::new(false);
            (collector.stop, collector.until_broken) = (self.stop, !whole);
            let outcome = match sized.run_collecting(&mut collector) {
                Err(SimError::Stopped) if collector.is_broken() => return Ok(Trial { held: false, answer: None }),
                Ok(outcome) if outcome.partial => return Err(SimError::Stopped),
                other => other?,
            };
            let answer = outcome.answer;
            let is_short = !recording && answer.stable != Some(false) && !self.is_settled(&sized, &answer);
            if is_short && sized.num_requests < self.longest {
                sized = sized.of_length((4 * sized.num_requests).min(self.longest));
                continue;
            }
            let held = answer.stable != Some(false)
                && !is_short
                && answer.num_refused == 0
                && answer.limits.iter().all(|limit| limit.met);
            return Ok(Trial { held, answer: Some(answer) });
        }
    }

    /// Whether the run was long compared with what a request, or a conversation, takes.
    fn is_settled(&self, scenario: &Scenario, answer: &Answer) -> bool {
        let Load::Sessions { turns, think_ns, .. } = scenario.load else { return answer.stable == Some(true) };
        let conversation_s = f64::from(turns) * (answer.e2e_ms.map_or(0.0, |e2e| e2e.mean / 1e3) + think_ns / 1e9);
        let span_s = answer.offered_rate_req_s.map_or(0.0, |rate| answer.num_offered as f64 / rate);
        answer.stable == Some(true) && span_s >= 4.0 * conversation_s
    }

    /// Whether the limits hold in one run at a rate.
    fn holds(&self, scenario: &Scenario, rate: f64) -> Result<bool, SimError> {
        match at_rate(scenario, rate) {
            Some(at) => Ok(self.run(&at, false)?.held),
            None => Ok(false),
        }
    }

    /// The largest rate of one seed: 0 when there is none, infinite when nothing breaks. It is looked for between `low` and
    /// `high` first, and beyond in steps that begin with `step`.
    fn largest_of_seed(&self, scenario: &Scenario, low: f64, high: f64, step: f64) -> Result<f64, SimError> {
        let (mut low, mut high, mut factor) = (low, high, step);
        let mut known = false; // whether `low` is known to hold
        while self.holds(scenario, high)? {
            (low, known) = (high, true);
            high *= factor;
            factor *= factor.min(2.0);
            if high > RATES.1 {
                return Ok(f64::INFINITY);
            }
        }
        factor = step;
        while !known && !self.holds(scenario, low)? {
            high = low;
            low /= factor;
            factor *= factor.min(2.0);
            if low < RATES.0 {
                return Ok(0.0);
            }
        }
        while high > low * (1.0 + RESOLUTION) {
            let middle = (low * high).sqrt();
            if self.holds(scenario, middle)? { low = middle } else { high = middle }
        }
        Ok(low)
    }

    /// The largest rates of the first `seeds` seeds in runs of some length.
    fn largest_of_seeds(
        &self,
        scenario: &Scenario,
        seeds: usize,
        (low, high): (f64, f64),
    ) -> Result<Largest, SimError> {
        let numbers: Vec<u64> = (0..seeds as u64).collect();
        let rates = in_parallel(&numbers, self.threads, |number| {
            self.largest_of_seed(&scenario.replication(*number), low, high, 1.1)
        })?;
        Ok(Largest { rates })
    }

    /// Fresh runs of a scenario; none as soon as one breaks a limit.
    fn all_hold(&self, scenario: &Scenario, runs: usize, fresh: &mut u64) -> Result<Option<Vec<Answer>>, SimError> {
        let broken = AtomicBool::new(false);
        let trials = self.fresh_runs(scenario, runs, fresh, &|number| {
            if broken.load(Ordering::Relaxed) {
                return Ok(Trial { held: false, answer: None });
            }
            let trial = self.run(&scenario.replication(number), false)?;
            broken.fetch_or(!trial.held, Ordering::Relaxed);
            Ok(trial)
        })?;
        Ok(trials.into_iter().map(|trial| trial.answer.filter(|_| trial.held)).collect())
    }

    /// How many of `runs` fresh runs hold.
    fn count(&self, scenario: &Scenario, runs: usize, fresh: &mut u64) -> Result<Tried, SimError> {
        let trials =
            self.fresh_runs(scenario, runs, fresh, &|number| self.run(&scenario.replication(number), false))?;
        let held = trials.iter().filter(|trial| trial.held).count();
        Ok(Tried { held, runs: trials.len(), requests: scenario.num_requests })
    }

    fn fresh_runs(
        &self,
        scenario: &Scenario,
        runs: usize,
        fresh: &mut u64,
        run: &(dyn Fn(u64) -> Result<Trial, SimError> + Sync),
    ) -> Result<Vec<Trial>, SimError> {
        let runs = if is_fixed(scenario) { 1 } else { runs };
        let numbers: Vec<u64> = (*fresh..*fresh + runs as u64).collect();
        *fresh += runs as u64;
        in_parallel(&numbers, self.threads, |number| run(*number))
    }

    /// Limits that no rate meets, each with the best possible value.
    pub fn unmeetable(&self, scenario: &Scenario) -> Result<Option<Unmeetable>, SimError> {
        let best_ms: Vec<_> = self
            .idle(scenario)?
            .into_iter()
            .filter_map(|limit| Some((limit.slo, limit.value_ms.filter(|value| *value > limit.slo.limit_ms)?)))
            .collect();
        Ok((!best_ms.is_empty()).then_some(Unmeetable { best_ms }))
    }

    /// What the limits would be on servers that have nothing else to do.
    pub fn idle(&self, scenario: &Scenario) -> Result<Vec<LimitValue>, SimError> {
        let few = scenario.num_requests.min(1_000);
        let alone = Scenario { num_requests: few, warm_up: 0, ..scenario.clone() };
        let alone = at_rate(&alone, RATES.0).unwrap_or(alone);
        let mut collector = Collector::new(false);
        collector.stop = self.stop;
        let outcome = alone.run_collecting(&mut collector)?;
        if outcome.partial { Err(SimError::Stopped) } else { Ok(outcome.answer.limits) }
    }

    /// The largest rate that meets every limit.
    pub fn largest(&self, scenario: &Scenario) -> Result<Found, SimError> {
        let start = rate_of(scenario).unwrap_or(1.0);
        let recording = is_recording(scenario);
        let seeds = if is_fixed(scenario) { 1 } else { self.replications.max(2) };
        let sized = |length: u64| if recording { scenario.clone() } else { scenario.of_length(length) };
        let mut length = if recording { scenario.num_requests } else { self.shortest.min(self.longest) };

        let first = self.largest_of_seed(&sized(length), start / 2.0, start, 2.0)?;
        if first == 0.0 {
            return Ok(Found::Never(Unmeetable { best_ms: self.best(scenario)? }));
        }
        if first.is_infinite() {
            return Ok(Found::Unlimited(RATES.1));
        }
        let around = |rate: f64, part: f64| (rate * (1.0 - part), rate * (1.0 + part));
        let mut largest = self.largest_of_seeds(&sized(length), seeds, around(first, 0.1))?;
        let mut drift = 0.0;
        while !recording && length < self.longest {
            let next = (4 * length).min(self.longest);
            let part = (2.5 * largest.spread()).clamp(0.01, 0.3);
            let longer = self.largest_of_seeds(&sized(next), seeds, around(largest.mean(), part))?;
            let moved = 1.0 - longer.mean() / largest.mean();
            // How fast whole runs of a measured engine are does not depend on their length.
            let has_own_speed = matches!(scenario.cost, CostModel::Fitted { .. });
            let is_narrow = longer.spread() <= NARROW || has_own_speed && longer.spread() > 0.75 * largest.spread();
            (drift, length, largest) = (moved.max(0.0) / 2.0, next, longer);
            if moved.abs() <= STEADY && is_narrow {
                break;
            }
        }
        if !largest.mean().is_finite() {
            return Ok(Found::Unlimited(RATES.1));
        }

        // Below nearly all seeds, and below what longer runs still would take off.
        let long = sized(if recording { length } else { length.max(FEWEST_TO_CONFIRM).min(self.longest) });
        let at = |rate: f64| at_rate(&long, rate).unwrap_or_else(|| long.clone());
        let exact = |rate: f64| if recording { rounded_down(rate / start) * start } else { rounded_down(rate) };
        let (first_tried, mut step_down) = match self.saturation(&long, largest.mean(), seeds)? {
            Some(served) => (served.mean() * (1.0 - (BELOW * served.spread()).max(BELOW_SATURATION)), 0.005),
            None => {
                let spread = largest.spread();
                (largest.mean() * (1.0 - BELOW * spread - drift).max(0.1), (spread / 2.0).max(0.005))
            }
        };
        let mut rate = exact(first_tried);
        let mut fresh = FRESH;
        let mut answers = None;
        while answers.is_none() && rate > RATES.0 {
            answers = self.all_hold(&at(rate), self.runs, &mut fresh)?;
            if answers.is_none() {
                rate = exact(rate * (1.0 - step_down));
                step_down = (1.2 * step_down).min(0.5);
            }
        }
        let Some(mut answers) = answers else {
            return Ok(Found::Never(Unmeetable { best_ms: self.best(scenario)? }));
        };
        let mut tried_above = self.count(&at(ABOVE * rate), RUNS_ABOVE, &mut fresh)?;
        // Not too careful either: where 5 % more holds too, go on upwards.
        for _ in 0..40 {
            if 10 * tried_above.held <= tried_above.runs {
                break;
            }
            let step = if 2 * tried_above.held > tried_above.runs { 1.03 } else { 1.01 };
            let Some(more) = self.all_hold(&at(exact(step * rate)), self.runs, &mut fresh)? else { break };
            (rate, answers) = (exact(step * rate), more);
            tried_above = self.count(&at(ABOVE * rate), RUNS_ABOVE, &mut fresh)?;
        }

        let binds_slo = self.breaks_first(&at(ABOVE * rate), &mut fresh)?;
        let (resource, what_if) = self.what_if(&sized(length.clamp(8_000, 16_000).min(self.longest)), rate)?;
        let values_ms = seen(&scenario.slos, &answers);
        let tried = Tried { held: answers.len(), runs: answers.len(), requests: long.num_requests };
        let Some(at_capacity) = answers.into_iter().next() else { return Err(SimError::Stopped) };
        Ok(Found::Rate(Box::new(Capacity {
            rate_req_s: rate,
            requests_per_s: rate * f64::from(turns(scenario)),
            rate_scale: recording.then_some(rate / start),
            interval_req_s: interval(&largest.rates).1,
            replications_req_s: largest.rates,
            tried,
            tried_above,
            only_one_run: is_fixed(scenario),
            values_ms,
            binds: Binding { slo: binds_slo, resource },
            what_if,
            at_capacity,
        })))
    }

    /// What the servers do when more arrives than they can do, in each seed, if no limit breaks then: only the queue keeps the
    /// rate from being larger. That is known far better than the rate at which its growth stands out from chance.
    fn saturation(&self, scenario: &Scenario, rate: f64, seeds: usize) -> Result<Option<Largest>, SimError> {
        let Some(above) = at_rate(scenario, ABOVE * rate).filter(|_| !is_recording(scenario)) else { return Ok(None) };
        let served = |number: &u64| {
            let answer = self.run(&above.replication(*number), true)?.answer;
            let only_grows = |answer: &Answer| {
                answer.stable == Some(false) && answer.num_refused == 0 && answer.limits.iter().all(|limit| limit.met)
            };
            let served = answer.filter(only_grows).and_then(|answer| answer.served_rate_req_s);
            Ok(served.map(|requests| requests / f64::from(turns(scenario))))
        };
        if served(&0)?.is_none() {
            return Ok(None);
        }
        let numbers: Vec<u64> = (0..seeds as u64).collect();
        let rates: Option<Vec<f64>> = in_parallel(&numbers, self.threads, served)?.into_iter().collect();
        Ok(rates.map(|rates| Largest { rates }))
    }

    fn best(&self, scenario: &Scenario) -> Result<Vec<(Slo, f64)>, SimError> {
        Ok(self.idle(scenario)?.into_iter().filter_map(|limit| Some((limit.slo, limit.value_ms?))).collect())
    }

    /// The limit that is exceeded most in a run above the answer; none when only the queue grows.
    fn breaks_first(&self, above: &Scenario, fresh: &mut u64) -> Result<Option<Slo>, SimError> {
        for _ in 0..3 {
            let trial = self.run(&above.replication(*fresh), true)?;
            *fresh += 1;
            let excess = |limit: &LimitValue| limit.value_ms.unwrap_or(0.0) / limit.slo.limit_ms;
            let limits = trial.answer.map(|answer| answer.limits).unwrap_or_default();
            let broken = limits.iter().filter(|limit| !limit.met).max_by(|a, b| excess(a).total_cmp(&excess(b)));
            if let Some(limit) = broken {
                return Ok(Some(limit.slo));
            }
        }
        Ok(None)
    }

    /// The rates that twice of each limit would allow, and the limit of the server that matters most. All are compared with
    /// the same two seeds in runs of moderate length.
    fn what_if(&self, scenario: &Scenario, rate: f64) -> Result<(Resource, Vec<WhatIf>), SimError> {
        let mut changed = vec![(None, String::new(), scenario.clone())];
        changed.extend(
            self.levers(scenario).into_iter().map(|(resource, options, other)| (Some(resource), options, other)),
        );
        let seeds = if is_fixed(scenario) { 1 } else { 2 };
        let jobs: Vec<(usize, u64)> =
            (0..changed.len()).flat_map(|index| (0..seeds).map(move |seed| (index, seed))).collect();
        let found = in_parallel(&jobs, self.threads, |&(index, seed)| {
            let (.., other) = &changed[index];
            self.largest_of_seed(&other.replication(seed), 0.97 * rate, 1.03 * rate, 1.2)
        })?;
        let means: Vec<f64> = found.chunks(seeds as usize).map(|rates| mean(rates).unwrap_or(0.0)).collect();
        let base = means.first().copied().unwrap_or(rate).max(f64::MIN_POSITIVE);
        let mut resource = (MATTERS, Resource::Compute);
        let mut what_if = Vec::new();
        for ((which, options, _), mean) in changed.into_iter().zip(means).skip(1) {
            let change = mean / base - 1.0;
            if let Some(Some(own)) = which
                && change > resource.0
            {
                resource = (change, own);
            }
            what_if.push(WhatIf { options, rate_req_s: rate * (1.0 + change), change });
        }
        Ok((resource.1, what_if))
    }

    /// The scenario with twice of one limit or the other. A limit on latencies, or more servers, belong to no resource.
    fn levers(&self, scenario: &Scenario) -> Vec<(Option<Resource>, String, Scenario)> {
        let mut levers = Vec::new();
        for (index, slo) in scenario.slos.iter().enumerate() {
            let looser = Slo { limit_ms: 2.0 * slo.limit_ms, ..*slo };
            let mut other = scenario.clone();
            other.slos[index] = looser;
            levers.push((None, format!("--slo {looser}"), other));
        }
        match &scenario.policy {
            Policy::Engine(config) => {
                let with = |change: &dyn Fn(&mut ReplicaConfig)| {
                    let mut own = *config;
                    change(&mut own);
                    Scenario { policy: Policy::Engine(own), ..scenario.clone() }
                };
                let batch = 2 * config.scheduler.max_batch_size;
                let blocks = 2 * config.kv_blocks;
                let tokens = 2 * config.scheduler.max_num_tokens;
                let both = with(&|own| {
                    own.scheduler.max_batch_size = batch;
                    own.kv_blocks = if self.cache_follows_batch { blocks } else { own.kv_blocks };
                });
                levers.push((Some(Resource::Batch), format!("--max-batch-size {batch}"), both));
                let more = with(&|own| own.kv_blocks = blocks);
                levers.push((Some(Resource::Kv), format!("--kv-cache-blocks {blocks}"), more));
                let more = with(&|own| own.scheduler.max_num_tokens = tokens);
                levers.push((Some(Resource::Tokens), format!("--max-num-tokens {tokens}"), more));
            }
            Policy::Dynamic(config) => {
                let mut own = config.clone();
                own.max_batch *= 2;
                let options = format!("--max-batch-size {}", own.max_batch);
                let other = Scenario { policy: Policy::Dynamic(own), ..scenario.clone() };
                levers.push((Some(Resource::Batch), options, other));
                let mut own = config.clone();
                own.instances *= 2;
                let options = format!("--instances {}", own.instances);
                levers.push((None, options, Scenario { policy: Policy::Dynamic(own), ..scenario.clone() }));
            }
        }
        let prompts = scenario.cluster.prefill_servers;
        let doubled = with_servers(scenario, 2 * scenario.speeds.len());
        let split = if prompts > 0 {
            format!(" --prefill-replicas {}", doubled.cluster.prefill_servers)
        } else {
            String::new()
        };
        levers.push((None, format!("--replicas {}{split}", doubled.speeds.len()), doubled));
        levers
    }

    /// The fewest servers, up to `most`, with which the scenario's own rate meets every limit in fresh long runs. Servers for
    /// prompts keep their share.
    pub fn fewest_servers(&self, scenario: &Scenario, most: usize) -> Result<Option<Fewest>, SimError> {
        let recording = is_recording(scenario);
        let fails = scenario.cluster.failures.iter().map(|failure| failure.server + 1).max().unwrap_or(1);
        let least = fails.max(if scenario.cluster.prefill_servers > 0 { 2 } else { 1 });
        let sized = |servers: usize, each: u64| {
            let own = with_servers(scenario, servers);
            if recording { own } else { own.of_length((each * servers as u64).clamp(self.shortest, self.longest)) }
        };
        let meets = |servers: usize| -> Result<bool, SimError> {
            Ok(self.all_hold(&sized(servers, 8_000), self.replications, &mut { 0 })?.is_some())
        };
        if least > most {
            return Ok(None);
        }
        let (mut low, mut high) = (least - 1, least);
        while !meets(high)? {
            if high >= most {
                return Ok(None);
            }
            (low, high) = (high, (2 * high).min(most));
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if meets(middle)? { high = middle } else { low = middle }
        }
        let mut fresh = FRESH;
        for servers in high..=most {
            let long = sized(servers, FEWEST_TO_CONFIRM);
            if let Some(answers) = self.all_hold(&long, self.runs, &mut fresh)? {
                return Ok(Some(Fewest {
                    replicas: servers,
                    prefill_replicas: long.cluster.prefill_servers,
                    tried: Tried { held: answers.len(), runs: answers.len(), requests: long.num_requests },
                    values_ms: seen(&scenario.slos, &answers),
                }));
            }
        }
        Ok(None)
    }
}

/// The fewest servers that meet every limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fewest {
    /// Servers in all.
    pub replicas: usize,
    /// Those that only prefill.
    pub prefill_replicas: usize,
    /// Fresh runs with them.
    pub tried: Tried,
    /// Each limit with its values in those runs.
    pub values_ms: Vec<Seen>,
}

/// The scenario with another number of servers; those for prefill keep their share.
fn with_servers(scenario: &Scenario, servers: usize) -> Scenario {
    let speed = scenario.speeds.last().copied().unwrap_or(1.0);
    let mut other = scenario.clone();
    other.speeds.resize(servers, speed);
    let (prompts, all) = (scenario.cluster.prefill_servers, scenario.speeds.len().max(1));
    if prompts > 0 {
        let share = (prompts * servers + all / 2) / all;
        let prefill_servers = share.clamp(1, servers.saturating_sub(1).max(1));
        other.cluster = ClusterConfig { prefill_servers, ..other.cluster };
    }
    other
}

/// Each limit with its values in several runs.
fn seen(slos: &[Slo], answers: &[Answer]) -> Vec<Seen> {
    let of =
        |index: usize| -> Vec<f64> { answers.iter().filter_map(|answer| answer.limits.get(index)?.value_ms).collect() };
    let all = slos.iter().enumerate().filter_map(|(index, slo)| {
        let values = of(index);
        let highest_ms = values.iter().copied().fold(0.0, f64::max);
        Some(Seen { slo: *slo, median_ms: median(&values)?, highest_ms })
    });
    all.collect()
}

/// Apply `work` to every item on several threads; results are in the items' order.
pub fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    work: impl Fn(&T) -> Result<R, SimError> + Sync,
) -> Result<Vec<R>, SimError> {
    let next = AtomicUsize::new(0);
    let worker = || -> Result<Vec<(usize, R)>, SimError> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return Ok(done) };
            done.push((index, work(item)?));
        }
    };
    let mut found = Vec::with_capacity(items.len());
    std::thread::scope(|scope| -> Result<(), SimError> {
        let handles: Vec<_> = (0..threads.clamp(1, items.len().max(1))).map(|_| scope.spawn(worker)).collect();
        for handle in handles {
            match handle.join() {
                Ok(part) => found.extend(part?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(())
    })?;
    found.sort_by_key(|(index, _)| *index);
    Ok(found.into_iter().map(|(_, result)| result).collect())
}

/// Requests of the shortest and the longest run that tells a stable load from one that is hardly too much.
const TO_JUDGE: (u64, u64) = (40_000, 400_000);

/// Shares of the time with requests waiting above which a run is lengthened: any in the run itself, which may have ended before
/// the server was full, and most of it in longer ones.
const WAITING: (f64, f64) = (0.01, 0.5);

/// Bursts and lulls of an arrival process that tell whether what a burst leaves is done in the lulls.
const PERIODS: f64 = 30.0;

/// Whether a run has seen too few bursts and lulls of its arrival process to call it overloaded.
fn has_few_periods(scenario: &Scenario, answer: &Answer) -> bool {
    let period_s = match scenario.load {
        Load::Open(Arrival::OnOff { on_s, off_s, .. })
        | Load::Sessions { arrival: Arrival::OnOff { on_s, off_s, .. }, .. } => on_s + off_s,
        Load::Open(Arrival::Drift { period_s, .. })
        | Load::Sessions { arrival: Arrival::Drift { period_s, .. }, .. } => period_s,
        _ => return false,
    };
    let span_s = answer.offered_rate_req_s.map_or(0.0, |rate| answer.num_offered as f64 / rate);
    span_s < PERIODS * period_s
}

/// The run with which to judge a load near saturation, where the one that was made is too short to tell: requests waited, and
/// the queue did not clearly grow, or only in the few bursts that the run has seen. Runs are lengthened until it grows or is
/// gone for most of the time. None where there is nothing to add.
pub fn judged_longer(scenario: &Scenario, answer: &Answer, stop: fn() -> bool) -> Result<Option<Answer>, SimError> {
    let is_near = |answer: &Answer, least: f64| {
        (answer.stable != Some(false) || has_few_periods(scenario, answer))
            && answer.waiting_share.is_some_and(|share| share > least)
    };
    if is_recording(scenario) || !is_near(answer, WAITING.0) {
        return Ok(None);
    }
    let is_open = |length: u64, found: &Option<Answer>| match found {
        None => true,
        Some(answer) if length < TO_JUDGE.0 => is_near(answer, 0.0) || answer.stable != Some(false),
        Some(answer) => is_near(answer, WAITING.1),
    };
    let (mut length, mut found) = (scenario.num_requests, None);
    while length < TO_JUDGE.1 && is_open(length, &found) {
        length = length.saturating_mul(8).min(TO_JUDGE.1);
        let mut collector = Collector::new(false);
        collector.stop = Some(stop);
        let outcome = scenario.of_length(length).run_collecting(&mut collector)?;
        if outcome.partial {
            return Ok(None);
        }
        found = Some(outcome.answer);
    }
    Ok(found)
}
