//! The largest rate that meets limits, and the fewest servers for a rate.

use serde::Serialize;
use strobe_workload::Arrival;

use crate::collector::{Answer, Collector, Slo};
use crate::error::SimError;
use crate::scenario::{Load, Policy, Scenario};

/// What keeps the rate from being larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Binding {
    /// Iterations take too long: the server is busy all the time.
    Compute,
    /// The KV cache is full.
    Kv,
    /// The batch is full.
    Batch,
    /// Requests wait although the server is not busy all the time: bursts, or the delay window.
    Queue,
}

/// The largest rate that meets every limit.
#[derive(Clone, Debug, Serialize)]
pub struct Capacity {
    /// Requests per second, mean over replications.
    pub rate_req_s: f64,
    /// 95 % interval of that mean.
    pub interval_req_s: (f64, f64),
    /// What each replication found.
    pub replications_req_s: Vec<f64>,
    /// Each limit with its value at that rate, in milliseconds.
    pub values_ms: Vec<(Slo, f64)>,
    /// What keeps it from being larger.
    pub binds: Binding,
    /// The answer at that rate, of the first replication.
    pub at_capacity: Answer,
}

/// No rate meets the limits.
#[derive(Clone, Debug, Serialize)]
pub struct Unmeetable {
    /// Limits that an idle server does not meet, each with the best possible value in milliseconds.
    pub best_ms: Vec<(Slo, f64)>,
}

/// Two-sided 95 % quantile of Student's t with few degrees of freedom.
fn student(degrees: usize) -> f64 {
    let table =
        [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131];
    table.get(degrees.wrapping_sub(1)).copied().unwrap_or(2.0)
}

/// A mean with its 95 % interval.
pub fn interval(values: &[f64]) -> (f64, (f64, f64)) {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    if values.len() < 2 {
        return (mean, (mean, mean));
    }
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let half = student(values.len() - 1) * (variance / n).sqrt();
    (mean, (mean - half, mean + half))
}

/// Where one more value like these lies with 95 % confidence; latencies are not below 0.
pub fn prediction_interval(values: &[f64]) -> (f64, f64) {
    let (mean, (_, high)) = interval(values);
    // The interval of the mean has half width t*s/sqrt(n); that of one more value t*s*sqrt(1 + 1/n).
    let half = (high - mean) * (values.len() as f64 + 1.0).sqrt();
    ((mean - half).max(0.0), mean + half)
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
    let mut changed = scenario.clone();
    match &mut changed.load {
        Load::Open(arrival) | Load::Sessions { arrival, .. } => *arrival = change(*arrival)?,
        Load::Closed { .. } | Load::Replay(_) => return None,
    }
    Some(changed)
}

struct Point {
    met: bool,
    values: Vec<(Slo, f64)>,
    answer: Answer,
}

fn evaluate(scenario: &Scenario) -> Result<Point, SimError> {
    let mut collector = Collector::new(false);
    let outcome = scenario.run_collecting(&mut collector)?;
    let values: Vec<(Slo, f64)> =
        scenario.slos.iter().map(|slo| (*slo, collector.value_of(slo).unwrap_or(0.0))).collect();
    let met = outcome.answer.wait_growth.is_none()
        && outcome.answer.num_refused == 0
        && values.iter().all(|(slo, value)| *value <= slo.limit_ms);
    Ok(Point { met, values, answer: outcome.answer })
}

/// What the limits would be on servers that have nothing else to do.
fn idle(scenario: &Scenario) -> Result<Point, SimError> {
    let mut alone = at_rate(scenario, 1e-6).unwrap_or_else(|| scenario.clone());
    alone.num_requests = scenario.num_requests.min(200);
    alone.warm_up = 0;
    evaluate(&alone)
}

/// Limits that no rate meets, each with the best possible value.
pub fn unmeetable(scenario: &Scenario) -> Result<Option<Unmeetable>, SimError> {
    let missed: Vec<_> = idle(scenario)?.values.into_iter().filter(|(slo, value)| *value > slo.limit_ms).collect();
    Ok((!missed.is_empty()).then_some(Unmeetable { best_ms: missed }))
}

/// The largest rate of one seed, to one part in `2^steps`.
fn largest_rate(scenario: &Scenario, steps: u32) -> Result<f64, SimError> {
    let meets = |rate: f64| {
        Ok::<_, SimError>(at_rate(scenario, rate).map(|s| evaluate(&s)).transpose()?.is_some_and(|p| p.met))
    };
    let (mut low, mut high) = (0.0, 1.0);
    while meets(high)? {
        low = high;
        high *= 2.0;
        if high > 1e9 {
            return Ok(low); // nothing binds
        }
    }
    while low == 0.0 && high > 1e-6 {
        let half = high / 2.0;
        if meets(half)? { low = half } else { high = half }
    }
    for _ in 0..steps {
        let middle = f64::midpoint(low, high);
        if meets(middle)? { low = middle } else { high = middle }
    }
    Ok(low)
}

/// What keeps a scenario from taking more.
fn binding(scenario: &Scenario, answer: &Answer) -> Binding {
    let batch = match &scenario.policy {
        Policy::Engine(config) => config.scheduler.max_batch_size,
        Policy::Dynamic(config) => config.max_batch,
    };
    let kv_full =
        answer.kv.is_some_and(|kv| kv.preemptions > 0 || f64::from(kv.peak_used_blocks) > 0.97 * f64::from(kv.blocks));
    let queued = answer.batch.mean_queued > 0.5;
    if kv_full && queued {
        Binding::Kv
    } else if answer.batch.max_requests as usize >= batch && queued {
        Binding::Batch
    } else if answer.batch.utilization > 0.9 {
        Binding::Compute
    } else {
        Binding::Queue
    }
}

/// The largest rate that meets every limit, by bisection in each of `replications` replications.
pub fn largest(scenario: &Scenario, replications: usize, threads: usize) -> Result<Capacity, SimError> {
    let numbers: Vec<u64> = (0..replications.max(1) as u64).collect();
    let rates = in_parallel(&numbers, threads, |number| largest_rate(&scenario.replication(*number), 9))?;
    let (rate_req_s, interval_req_s) = interval(&rates);
    let at = at_rate(scenario, rate_req_s.max(1e-6)).unwrap_or_else(|| scenario.clone());
    let point = evaluate(&at)?;
    let above = at_rate(scenario, rate_req_s.max(1e-6) * 1.15).map(|s| evaluate(&s)).transpose()?;
    let binds = binding(scenario, above.as_ref().map_or(&point.answer, |p| &p.answer));
    let values_ms = point.values;
    Ok(Capacity { rate_req_s, interval_req_s, replications_req_s: rates, values_ms, binds, at_capacity: point.answer })
}

/// The fewest servers, up to `most`, with which the scenario's own rate meets every limit in every replication.
pub fn fewest_servers(
    scenario: &Scenario,
    most: usize,
    replications: usize,
    threads: usize,
) -> Result<Option<usize>, SimError> {
    let speed = scenario.speeds.last().copied().unwrap_or(1.0);
    let meets = |servers: usize| -> Result<bool, SimError> {
        let numbers: Vec<u64> = (0..replications.max(1) as u64).collect();
        let met = in_parallel(&numbers, threads, |number| {
            let mut own = scenario.replication(*number);
            own.speeds.resize(servers, speed);
            Ok(evaluate(&own)?.met)
        })?;
        Ok(met.into_iter().all(|m| m))
    };
    let mut high = 1;
    while !meets(high)? {
        if high >= most {
            return Ok(None);
        }
        high = (2 * high).min(most);
    }
    let mut low = high / 2;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if meets(middle)? { high = middle } else { low = middle }
    }
    Ok(Some(high))
}

/// Apply `work` to every item on several threads; results are in the items' order.
pub fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    work: impl Fn(&T) -> Result<R, SimError> + Sync,
) -> Result<Vec<R>, SimError> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let worker = || -> Result<Vec<(usize, R)>, SimError> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
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
