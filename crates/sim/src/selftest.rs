//! The simulator against queueing theory.
//!
//! Every check simulates a server whose answer is known, in independent replications, and says how many standard errors
//! the mean is away: |z| below 3.5 for each check, and no more of them above 2 than chance allows.

use std::f64::consts::E;

use serde::Serialize;
use strobe_scheduler::scheduler::{Decision, Policy as EnginePolicy, SchedulerConfig};
use strobe_stats::{lower_percentile, sorted};
use strobe_workload::Arrival;

use crate::capacity::in_parallel;
use crate::cluster::{ClusterConfig, Routing, Transfer};
use crate::cost::{CostModel, Linear};
use crate::dynamic::DynamicConfig;
use crate::error::SimError;
use crate::lengths::LengthDist;
use crate::oracles;
use crate::replica::ReplicaConfig;
use crate::request::Job;
use crate::scenario::{Load, Policy, Scenario};
use crate::server::{Sink, StepRecord};

/// One time unit of theory: a millisecond.
const UNIT_NS: f64 = 1e6;

/// More standard errors than chance gives a single check.
const Z_LIMIT: f64 = 3.5;

/// How one number compares with theory.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The model and what was measured.
    pub name: String,
    /// What theory says.
    pub expected: f64,
    /// Mean over the replications.
    pub measured: f64,
    /// Standard error of that mean.
    pub standard_error: f64,
    /// Relative error of the theory itself, where it is exact in a limit only.
    pub band: f64,
    /// Distance in standard errors, less the band.
    pub z: f64,
    /// Whether it is near enough.
    pub passed: bool,
}

/// All checks.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Replications of each check.
    pub replications: usize,
    /// Requests counted in each replication.
    pub requests: u64,
    /// The checks.
    pub checks: Vec<Check>,
    /// Checks with |z| above 2, and most that chance allows.
    pub above_two: (usize, usize),
    /// Whether all is well.
    pub passed: bool,
}

/// What one replication saw.
#[derive(Default)]
struct Seen {
    warm_up: u64,
    waits: Vec<f64>,
    totals: Vec<f64>,
    batches: u64,
    batched: u64,
    busy_ns: f64,
    end_ns: u64,
    tokens: (u64, u64),
}

impl Sink for Seen {
    fn keeps_token_times(&self) -> bool {
        false
    }
    fn gap(&mut self, _: u64, _: u64) {}
    fn iteration(&mut self, step: &StepRecord, _: &[Decision]) -> Result<(), SimError> {
        self.batches += 1;
        self.batched += step.load.requests();
        self.busy_ns += (step.end_ns - step.start_ns) as f64;
        self.end_ns = self.end_ns.max(step.end_ns);
        Ok(())
    }
    fn request(&mut self, job: Job) -> Result<(), SimError> {
        self.tokens.0 += u64::from(job.request.output);
        self.tokens.1 += u64::from(job.produced);
        if job.request.id >= self.warm_up {
            let unit = |from: u64, to: u64| (to - from) as f64 / UNIT_NS;
            self.waits.push(job.first_scheduled_ns.map_or(0.0, |d| unit(job.request.arrival_ns, d)));
            self.totals.push(unit(job.request.arrival_ns, job.last_token_ns));
        }
        Ok(())
    }
}

fn mean(values: &[f64]) -> f64 {
    strobe_stats::mean(values).unwrap_or(0.0)
}

fn share(values: &[f64], holds: impl Fn(f64) -> bool) -> f64 {
    values.iter().filter(|v| holds(**v)).count() as f64 / values.len().max(1) as f64
}

fn quantile(values: &[f64], q: f64) -> f64 {
    lower_percentile(&sorted(values), q).unwrap_or(0.0)
}

/// A number taken from a replication: its name, what theory says, the band of the theory, and how it is measured.
type Measure = (&'static str, f64, f64, Box<dyn Fn(&Seen) -> f64 + Sync>);

struct Case {
    name: String,
    scenario: Scenario,
    measures: Vec<Measure>,
}

fn measure(name: &'static str, expected: f64, f: impl Fn(&Seen) -> f64 + Sync + 'static) -> Measure {
    (name, expected, 0.0, Box::new(f))
}

fn engine(slots: usize) -> Policy {
    Policy::Engine(ReplicaConfig {
        scheduler: SchedulerConfig {
            policy: EnginePolicy::GuaranteedNoEvict,
            max_batch_size: slots,
            max_num_tokens: 4096,
            max_seq_len: 1 << 20,
            chunked_context: true,
            chunk_unit: 64,
            reuse_output: false,
        },
        kv_blocks: 1 << 14,
        tokens_per_block: 64,
        reuse: false,
        speed: 1.0,
        skip: true,
        prefill_only: false,
    })
}

fn dynamic(max_batch: usize, delay_units: f64, instances: usize) -> Policy {
    Policy::Dynamic(DynamicConfig {
        max_batch,
        preferred: Vec::new(),
        max_queue_delay_ns: (delay_units * UNIT_NS) as u64,
        instances,
        priorities: 1,
        timeout: None,
        max_queue_size: 0,
        speed: 1.0,
    })
}

/// One server that takes one request at a time; arrivals at `rate` per unit.
fn single(rate: f64, cost: CostModel) -> Scenario {
    Scenario {
        load: Load::Open(Arrival::Poisson { rate: rate * 1e9 / UNIT_NS }),
        input: LengthDist::Fixed(1),
        output: LengthDist::Fixed(1),
        num_requests: 0,
        policy: engine(1),
        cost,
        speeds: vec![1.0],
        cluster: ClusterConfig::default(),
        slos: Vec::new(),
        warm_up: 0,
        seed: 0,
    }
}

fn exponential() -> CostModel {
    CostModel::Exponential { mean_ns: UNIT_NS }
}

fn linear(base_units: f64, per_request_units: f64) -> CostModel {
    let (base_ns, per_request_ns) = (base_units * UNIT_NS, per_request_units * UNIT_NS);
    CostModel::Linear(Linear { base_ns, per_request_ns, ..Linear::default() })
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add =
        |name: String, scenario: Scenario, measures: Vec<Measure>| cases.push(Case { name, scenario, measures });
    for rate in [0.3, 0.5, 0.8] {
        let p99 = 100f64.ln() / (1.0 - rate);
        add(
            format!("M/M/1 rate {rate}"),
            single(rate, exponential()),
            vec![
                measure("mean wait", rate / (1.0 - rate), |s| mean(&s.waits)),
                measure("p99 time in system", p99, |s| quantile(&s.totals, 0.99)),
                measure("arrivals that find it idle", 1.0 - rate, |s| share(&s.waits, |w| w == 0.0)),
                measure("utilisation", rate, |s| s.busy_ns / s.end_ns as f64),
            ],
        );
    }
    let lognormal = CostModel::LogNormal { mean_ns: UNIT_NS, sigma: 1.0 };
    let expected = oracles::mg1_wait(0.7, 1.0, E);
    add("M/G/1 lognormal".into(), single(0.7, lognormal), vec![measure("mean wait", expected, |s| mean(&s.waits))]);
    for rate in [0.5, 0.8] {
        let at_most = move |t| oracles::md1_wait_at_most(rate, t);
        add(
            format!("M/D/1 rate {rate}"),
            single(rate, linear(1.0, 0.0)),
            vec![
                measure("mean wait", oracles::mg1_wait(rate, 1.0, 1.0), |s| mean(&s.waits)),
                measure("P(wait <= 1.5)", at_most(1.5), |s| share(&s.waits, |w| w <= 1.5)),
                measure("P(wait <= 4)", at_most(4.0), |s| share(&s.waits, |w| w <= 4.0)),
            ],
        );
    }
    for k in [0.25, 4.0] {
        let mut scenario = single(0.7, exponential());
        scenario.load = Load::Open(Arrival::Gamma { rate: 0.7 * 1e9 / UNIT_NS, burstiness: k });
        let expected = oracles::gamma_m1_wait(0.7, k);
        add(format!("GI/M/1 gamma {k}"), scenario, vec![measure("mean wait", expected, |s| mean(&s.waits))]);
    }
    for (servers, rate) in [(2, 1.5), (8, 6.4)] {
        let (waits, wait) = oracles::mmc(rate, servers);
        let scenario = Scenario { policy: dynamic(1, 0.0, servers as usize), ..single(rate, exponential()) };
        let measures = vec![
            measure("share that waits", waits, |s| share(&s.waits, |w| w > 0.0)),
            measure("mean wait", wait, |s| mean(&s.waits)),
        ];
        add(format!("M/M/{servers} rate {rate}"), scenario, measures);
    }
    batch_cases(&mut add);
    inflight_cases(&mut add);
    cluster_cases(&mut add);
    cases
}

fn batch_cases(add: &mut impl FnMut(String, Scenario, Vec<Measure>)) {
    let batch = |s: &Seen| s.batched as f64 / s.batches as f64;
    for (rate, b) in [(3.0, 4), (6.0, 8)] {
        let (wait, size) = oracles::batch_server(rate, b);
        let scenario = Scenario { policy: dynamic(b, 0.0, 1), ..single(rate, linear(1.0, 0.0)) };
        let measures = vec![measure("mean wait", wait, |s| mean(&s.waits)), measure("mean batch", size, batch)];
        add(format!("batch server rate {rate} batch {b}"), scenario, measures);
    }
    for rate in [2.0, 5.0] {
        let (time, size) = oracles::take_all(rate, 1.0, 0.1);
        let scenario = Scenario { policy: dynamic(100_000, 0.0, 1), ..single(rate, linear(1.0, 0.1)) };
        let measures = vec![measure("mean time", time, |s| mean(&s.totals)), measure("mean batch", size, batch)];
        add(format!("take-all batching rate {rate}"), scenario, measures);
    }
    for (rate, delay, most) in [(2.0, 1.0, 4), (10.0, 0.5, 8)] {
        let (size, wait) = oracles::delay_window(rate, delay, most);
        // Waits of whole microseconds must not matter: the unit is a thousand of them, so they cost up to 1 in 1000.
        let scenario = Scenario { policy: dynamic(most, delay, 64), ..single(rate, linear(1e-6, 0.0)) };
        let measures = vec![
            ("mean batch", size, 0.001, Box::new(batch) as Box<dyn Fn(&Seen) -> f64 + Sync>),
            ("mean wait", wait, 0.002, Box::new(|s: &Seen| mean(&s.waits))),
        ];
        add(format!("delay window rate {rate} delay {delay} size {most}"), scenario, measures);
    }
}

fn inflight_cases(add: &mut impl FnMut(String, Scenario, Vec<Measure>)) {
    // The theory is exact in a limit only; the bands are what is known of its error.
    for (rate, m, slots, band) in [(5.0, 10.0, 64, 0.004), (10.0, 100.0, 256, 0.004), (30.0, 10.0, 8, 0.05)] {
        let (alpha, beta) = (0.02, 0.0005);
        let scenario = Scenario {
            policy: engine(slots),
            output: LengthDist::Geometric { mean: m },
            ..single(rate, linear(alpha, beta))
        };
        let expected = oracles::inflight(rate, m, slots, alpha, beta);
        let time: Box<dyn Fn(&Seen) -> f64 + Sync> = Box::new(|s: &Seen| mean(&s.totals));
        add(
            format!("in-flight rate {rate} outputs {m} slots {slots}"),
            scenario,
            vec![("mean time", expected, band, time)],
        );
    }
}

fn cluster_cases(add: &mut impl FnMut(String, Scenario, Vec<Measure>)) {
    let cluster = |routing| ClusterConfig { routing, seed: 1, ..ClusterConfig::default() };
    let split =
        Scenario { speeds: vec![1.0; 4], cluster: cluster(Routing::Random), ..single(4.0 * 0.8, exponential()) };
    add("random split over 4".into(), split, vec![measure("mean time", 5.0, |s| mean(&s.totals))]);
    let many = 100;
    let two = Scenario {
        speeds: vec![1.0; many],
        cluster: cluster(Routing::PowerOf(2)),
        ..single(many as f64 * 0.9, exponential())
    };
    // The formula holds for infinitely many servers; a hundred are about 1.3 % slower.
    let time: Box<dyn Fn(&Seen) -> f64 + Sync> = Box::new(|s: &Seen| mean(&s.totals));
    add(format!("power of 2 over {many}"), two, vec![("mean time", oracles::power_of_d(0.9, 2.0), 0.03, time)]);
    let tandem = Scenario {
        speeds: vec![1.0, 1.25],
        output: LengthDist::Fixed(2),
        cluster: ClusterConfig {
            prefill_servers: 1,
            transfer: Transfer { base_ns: 0.0, per_token_ns: 0.0 },
            ..ClusterConfig::default()
        },
        ..single(0.7, exponential())
    };
    let expected = 1.0 / 0.3 + 1.0 / 0.55;
    add("tandem, prefill and decode apart".into(), tandem, vec![measure("mean time", expected, |s| mean(&s.totals))]);
}

fn run_case(case: &Case, replications: usize, requests: u64, seed: u64) -> Result<Vec<Check>, SimError> {
    let servers = case.scenario.speeds.len() as u64;
    // Long against the time in which a queue at these loads forgets how it began, on every server.
    let warm_up = 2_000.max(300 * servers).max(requests / 10);
    let mut values = vec![Vec::with_capacity(replications); case.measures.len()];
    for replication in 0..replications {
        let mut scenario = case.scenario.clone();
        scenario.seed = seed.wrapping_mul(1_000_003).wrapping_add(replication as u64);
        scenario.cluster.seed = scenario.seed;
        scenario.num_requests = warm_up + requests;
        let mut seen = Seen { warm_up, ..Seen::default() };
        scenario.run_into(&mut seen)?;
        for (values, (.., f)) in values.iter_mut().zip(&case.measures) {
            values.push(f(&seen));
        }
        if seen.tokens.0 != seen.tokens.1 {
            values.iter_mut().for_each(|v| v.push(f64::NAN)); // tokens were lost: nothing measured here counts
        }
    }
    let check = |((name, expected, band, _), values): (&Measure, &Vec<f64>)| {
        let measured = mean(values);
        let n = values.len() as f64;
        let variance = values.iter().map(|v| (v - measured).powi(2)).sum::<f64>() / (n - 1.0);
        let standard_error = (variance / n).sqrt();
        let beyond = (measured - expected).abs() - band * expected;
        let z = if beyond <= 0.0 { 0.0 } else { beyond.copysign(measured - expected) / standard_error };
        Check {
            name: format!("{}: {name}", case.name),
            expected: *expected,
            measured,
            standard_error,
            band: *band,
            z,
            passed: z.abs() < Z_LIMIT,
        }
    };
    Ok(case.measures.iter().zip(&values).map(check).collect())
}

/// Most checks of `n` that may be above 2 standard errors: a binomial count exceeds it once in a thousand suites.
fn most_above_two(n: usize) -> usize {
    let p: f64 = 0.0455;
    let mut term = (1.0 - p).powi(n as i32);
    let mut cumulative = term;
    let mut count = 0;
    while cumulative < 0.999 && count < n {
        term *= (n - count) as f64 / (count + 1) as f64 * p / (1.0 - p);
        cumulative += term;
        count += 1;
    }
    count
}

/// Run every check on `threads` threads. `progress` is called after each case.
pub fn run(
    replications: usize,
    requests: u64,
    seed: u64,
    threads: usize,
    progress: &(dyn Fn() + Sync),
) -> Result<Report, SimError> {
    let cases = cases();
    let numbered: Vec<(u64, &Case)> = (0..).zip(&cases).collect();
    let found = in_parallel(&numbered, threads, |(index, case)| {
        // A seed of its own: cases with common arrivals would all be lucky or unlucky together.
        let checks = run_case(case, replications, requests, seed.wrapping_mul(1009).wrapping_add(*index));
        progress();
        checks
    })?;
    let checks: Vec<Check> = found.into_iter().flatten().collect();
    let above = checks.iter().filter(|c| c.z.abs() > 2.0).count();
    let most = most_above_two(checks.len());
    let passed = checks.iter().all(|c| c.passed) && above <= most;
    Ok(Report { replications, requests, checks, above_two: (above, most), passed })
}

/// How many cases there are.
pub fn num_cases() -> usize {
    cases().len()
}
