//! What a simulation answers, gathered while it runs, in memory that does not grow with the number of requests.

use serde::Serialize;
use strobe_scheduler::scheduler::{Decision, Reason};
use strobe_workload::{Distribution, Metrics, RequestRecord};

use crate::backlog::{Backlog, Trend};
use crate::calibrate::Coverage;
use crate::capacity::prediction_interval;
use crate::error::SimError;
use crate::histogram::Histogram;
use crate::request::Job;
use crate::server::{Sink, StepRecord};
use crate::units::parse_duration_ns;

/// Output tokens up to which all records are kept, so that percentiles are exact.
pub const EXACT_TOKENS: u64 = 2_000_000;

/// A latency that a limit can be about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SloMetric {
    /// Time in the queue.
    Queue,
    /// Time to first token.
    Ttft,
    /// Mean time per output token after the first.
    Tpot,
    /// Gap between two tokens.
    Itl,
    /// From arrival to last token.
    E2e,
}

/// A limit such as `ttft:p99:500ms`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Slo {
    /// Of which latency.
    pub metric: SloMetric,
    /// At which share of the requests, 0 to 1; none is the mean.
    pub quantile: Option<f64>,
    /// The limit.
    pub limit_ms: f64,
}

impl SloMetric {
    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            SloMetric::Queue => "queue",
            SloMetric::Ttft => "ttft",
            SloMetric::Tpot => "tpot",
            SloMetric::Itl => "itl",
            SloMetric::E2e => "e2e",
        }
    }
}

/// As it is written in options.
impl std::fmt::Display for Slo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}ms", self.metric.name(), self.at(), self.limit_ms)
    }
}

impl Slo {
    /// Where the limit is: `mean`, or a percentile such as `p99`.
    pub fn at(&self) -> String {
        match self.quantile {
            None => "mean".into(),
            Some(1.0) => "max".into(),
            // 0.999 times 100 is not 99.9.
            Some(q) => format!("p{}", (q * 1e8).round() / 1e6),
        }
    }

    /// Latency and percentile, such as `ttft p99`.
    pub fn name(&self) -> String {
        format!("{} {}", self.metric.name(), self.at())
    }

    /// Reads `ttft:p99:500ms`, or `ttft:500ms` for every single request.
    pub fn parse(text: &str) -> Result<Slo, SimError> {
        let bad = |why: String| SimError::Option {
            option: "--slo",
            problem: format!("{why}; write METRIC:PERCENTILE:TIME, such as ttft:p99:500ms"),
        };
        let parts: Vec<&str> = text.split(':').collect();
        let (metric, quantile, limit) = match parts.as_slice() {
            [metric, limit] => (*metric, "p99", *limit),
            [metric, quantile, limit] => (*metric, *quantile, *limit),
            _ => return Err(bad(format!("`{text}` is not a limit"))),
        };
        let metric = match metric {
            "queue" => SloMetric::Queue,
            "ttft" => SloMetric::Ttft,
            "tpot" => SloMetric::Tpot,
            "itl" => SloMetric::Itl,
            "e2e" => SloMetric::E2e,
            other => return Err(bad(format!("no such latency `{other}`, use queue, ttft, tpot, itl or e2e"))),
        };
        let quantile = match quantile {
            "mean" => None,
            "max" => Some(1.0),
            p => {
                let number = p.strip_prefix('p').and_then(|n| n.parse::<f64>().ok());
                Some(
                    number
                        .filter(|n| *n > 0.0 && *n <= 100.0)
                        .ok_or_else(|| bad(format!("no such percentile `{p}`")))?,
                )
                .map(|n| n / 100.0)
            }
        };
        let limit_ms = parse_duration_ns(limit).map_err(bad)? / 1e6;
        if limit_ms <= 0.0 {
            return Err(bad("a limit of 0 can't be met".into()));
        }
        Ok(Slo { metric, quantile, limit_ms })
    }
}

/// One latency over all requests, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How many values.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest value.
    pub max: f64,
}

impl Summary {
    fn of(histogram: &Histogram) -> Option<Summary> {
        let ms = |ns: f64| ns / 1e6;
        let at = |q| histogram.percentile(q).map(ms);
        Some(Summary {
            count: histogram.count(),
            mean: ms(histogram.mean()?),
            p50: at(0.50)?,
            p90: at(0.90)?,
            p95: at(0.95)?,
            p99: at(0.99)?,
            max: ms(histogram.max()? as f64),
        })
    }

    /// The same numbers as the benchmark's metrics have them.
    pub fn exact(d: &Distribution) -> Summary {
        Summary {
            count: d.count as u64,
            mean: d.average,
            p50: d.p50,
            p90: d.p90,
            p95: d.p95,
            p99: d.p99,
            max: d.maximum,
        }
    }
}

/// Requests and tokens per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Throughput {
    /// Requests completed per second, from the first arrival to the last token.
    pub requests_per_s: f64,
    /// Output tokens per second.
    pub output_tokens_per_s: f64,
    /// Prompt and output tokens per second.
    pub total_tokens_per_s: f64,
}

/// Requests that met every limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// Requests that met all limits, per second.
    pub requests_per_s: f64,
    /// Requests that met all limits over requests offered.
    pub attainment: f64,
    /// Requests with one token, for which limits on TPOT were not looked at.
    pub without_tpot: u64,
}

/// What the batches were like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct BatchStats {
    /// Iterations, or batches of the dynamic batcher.
    pub iterations: u64,
    /// Requests per iteration.
    pub mean_requests: f64,
    /// Requests per iteration, weighted by its time.
    pub time_mean_requests: f64,
    /// Most requests in one iteration.
    pub max_requests: u32,
    /// Tokens per iteration.
    pub mean_tokens: f64,
    /// Time in iterations over the time of all servers.
    pub utilization: f64,
    /// Mean queue length, weighted by time in iterations.
    pub mean_queued: f64,
    /// Shares of the time in iterations in which the head of the queue waited for a place in the batch.
    pub blocked_by_batch: f64,
    /// The same for tokens of an iteration.
    pub blocked_by_tokens: f64,
    /// The same for cache blocks.
    pub blocked_by_kv: f64,
}

/// A limit with what the run says of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LimitValue {
    /// The limit.
    #[serde(flatten)]
    pub slo: Slo,
    /// Its value in this run; absent where no request has such a latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_ms: Option<f64>,
    /// Whether it holds.
    pub met: bool,
}

/// What the KV cache was like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct KvStats {
    /// Blocks per server.
    pub blocks: u32,
    /// Mean share in use, weighted by time in iterations.
    pub mean_used_share: f64,
    /// Most blocks in use on one server.
    pub peak_used_blocks: u32,
    /// Times that a request was paused and computed again.
    pub preemptions: u64,
    /// Prompt tokens found in the cache.
    pub reused_tokens: u64,
}

/// The whole answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// Requests offered.
    pub num_offered: u64,
    /// Requests completed.
    pub num_requests: u64,
    /// Requests refused: queue full, timed out, no server.
    pub num_refused: u64,
    /// Completed requests with a single token, which have no TPOT.
    pub num_single_token: u64,
    /// Virtual time from the first arrival to the last token.
    pub duration_s: f64,
    /// Arrivals per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offered_rate_req_s: Option<f64>,
    /// First scheduled minus queued.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<Summary>,
    /// First token minus arrival.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<Summary>,
    /// (last - first token) / (tokens - 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<Summary>,
    /// Gaps between tokens, pooled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub itl_ms: Option<Summary>,
    /// Last token minus arrival.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub e2e_ms: Option<Summary>,
    /// How percentiles were taken.
    pub percentiles: &'static str,
    /// Per second.
    pub throughput: Throughput,
    /// Against the limits; without any, every completed request is good.
    pub goodput: Goodput,
    /// Batches.
    pub batch: BatchStats,
    /// KV cache; absent where the policy has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<KvStats>,
    /// Mean requests in the system by Little's law: completed per second times mean E2E.
    pub mean_in_system: f64,
    /// Each limit with its value.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<LimitValue>,
    /// Whether the queue stayed bounded as far as this run can tell; absent where it can't.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stable: Option<bool>,
    /// Requests of the longer run that `stable` comes from, where one was needed to tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub judged_on_requests: Option<u64>,
    /// Share of the time of arrivals with requests waiting; absent where requests do not come by themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_share: Option<f64>,
    /// Requests completed per second while requests arrived; absent where they do not come by themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served_rate_req_s: Option<f64>,
    /// Where the cost model was used outside of what it was fitted on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside: Option<Outside>,
    /// By how many requests per second the queue grows, when it is not stable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_growth_per_s: Option<f64>,
}

/// Where mean, median, p90, p95 and p99 of another such run would lie with 95 % confidence, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Intervals {
    /// Replications they come from.
    pub replications: usize,
    /// By latency: name, then low and high of each.
    #[serde(flatten)]
    pub latencies: std::collections::BTreeMap<&'static str, std::collections::BTreeMap<&'static str, (f64, f64)>>,
}

impl Intervals {
    /// The intervals that replications suggest.
    pub fn of(answers: &[Answer]) -> Intervals {
        type Latency = fn(&Answer) -> Option<&Summary>;
        type Value = fn(&Summary) -> f64;
        let latencies: [(&'static str, Latency); 5] = [
            ("queue_ms", |a| a.queue_ms.as_ref()),
            ("ttft_ms", |a| a.ttft_ms.as_ref()),
            ("tpot_ms", |a| a.tpot_ms.as_ref()),
            ("itl_ms", |a| a.itl_ms.as_ref()),
            ("e2e_ms", |a| a.e2e_ms.as_ref()),
        ];
        let values: [(&'static str, Value); 5] =
            [("mean", |s| s.mean), ("p50", |s| s.p50), ("p90", |s| s.p90), ("p95", |s| s.p95), ("p99", |s| s.p99)];
        let of_latency = |latency: Latency| {
            let bounds = values.iter().filter_map(|(name, value)| {
                let seen: Vec<f64> = answers.iter().filter_map(latency).map(value).collect();
                (seen.len() > 1).then(|| (*name, prediction_interval(&seen)))
            });
            bounds.collect()
        };
        let latencies = latencies.into_iter().map(|(name, latency)| (name, of_latency(latency))).collect();
        Intervals { replications: answers.len(), latencies }
    }
}

/// Use of a fitted cost outside of what was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Outside {
    /// Share of the iterations.
    pub share: f64,
    /// The quantity that is furthest outside.
    pub quantity: &'static str,
    /// Its largest value over the largest that was measured.
    pub times: f64,
}

/// Called with every request record.
pub type RequestWriter<'a> = Box<dyn FnMut(&RequestRecord) -> std::io::Result<()> + 'a>;
/// Called with every iteration.
pub type StepWriter<'a> = Box<dyn FnMut(&StepRecord, &[Decision]) -> std::io::Result<()> + 'a>;

/// Gathers statistics, keeps records where few are expected, and passes everything on to writers.
#[derive(Default)]
pub struct Collector<'a> {
    /// Requests the source will give.
    pub expected: u64,
    /// Whether [`Collector::records`] is filled.
    pub keep_records: bool,
    /// Every record, where kept.
    pub records: Vec<RequestRecord>,
    /// Limits a good request meets.
    pub slos: Vec<Slo>,
    /// Requests whose number is below this are left out of all latencies: the warm-up.
    pub warm_up: u64,
    /// What a fitted cost was measured on.
    pub covers: Option<Coverage>,
    /// Takes every record.
    pub request_writer: Option<RequestWriter<'a>>,
    /// Takes every iteration.
    pub step_writer: Option<StepWriter<'a>>,
    /// Whether the simulation shall end now; what was gathered until then can still be asked for.
    pub stop: Option<fn() -> bool>,
    /// End the simulation as soon as one of `slos` can no longer hold; [`Collector::is_broken`] says so.
    pub until_broken: bool,
    broken: bool,
    violations: Vec<u64>,
    backlog: Backlog,
    /// Time in which the head of the queue waited for batch, tokens and blocks.
    blocked_ns: [f64; 3],
    queue: Histogram,
    ttft: Histogram,
    tpot: Histogram,
    itl: Histogram,
    e2e: Histogram,
    offered: u64,
    refused: u64,
    single: u64,
    good: u64,
    input_tokens: u64,
    output_tokens: u64,
    first_arrival_ns: Option<u64>,
    last_arrival_ns: u64,
    last_end_ns: u64,
    steps: u64,
    busy_ns: f64,
    batch_sum: f64,
    batch_time: f64,
    token_sum: f64,
    queued_time: f64,
    batch_max: u32,
    kv_blocks: u32,
    kv_time: f64,
    kv_peak: u32,
    preemptions: u64,
    reused: u64,
    num_outside: u64,
    furthest: Option<(&'static str, f64)>,
}

/// Fewer requests say nothing of whether a queue is bounded.
const FEWEST_JUDGED: u64 = 100;

/// A run is judged when it is so many times as long as a request takes; before, the servers are still filling.
const JUDGED_SPAN: f64 = 4.0;

/// What the head of a queue waits for, as an index of [`Collector::blocked_ns`].
fn blocked_by(decisions: &[Decision]) -> Option<usize> {
    // The scheduler stops at the first request that it can't admit, so this is the last thing it says.
    match decisions.last()?.reason {
        Reason::BatchFull | Reason::StaticBatchRunning => Some(0),
        Reason::TokenBudget => Some(1),
        Reason::KvCapacity { .. } => Some(2),
        _ => None,
    }
}

impl Sink for Collector<'_> {
    fn keeps_token_times(&self) -> bool {
        self.keep_records || self.request_writer.is_some()
    }

    fn gap(&mut self, gap_ns: u64, weight: u64) {
        self.itl.add(gap_ns, weight);
    }

    fn iteration(&mut self, step: &StepRecord, decisions: &[Decision]) -> Result<(), SimError> {
        let duration = (step.end_ns - step.start_ns) as f64;
        let requests = step.load.requests();
        self.steps += 1;
        self.busy_ns += duration;
        self.batch_sum += requests as f64;
        self.batch_time += requests as f64 * duration;
        self.batch_max = self.batch_max.max(requests as u32);
        self.token_sum += (step.load.context_tokens + u64::from(step.load.decode_requests)) as f64;
        self.queued_time += f64::from(step.queued) * duration;
        self.backlog.wait(step.start_ns, step.end_ns, step.queued);
        if let Some(cause) = blocked_by(decisions).and_then(|cause| self.blocked_ns.get_mut(cause)) {
            *cause += duration;
        }
        self.kv_blocks = self.kv_blocks.max(step.kv_total);
        self.kv_time += f64::from(step.kv_used) * duration;
        self.kv_peak = self.kv_peak.max(step.kv_used);
        if let Some(excess) = self.covers.and_then(|covers| covers.excess(&step.load)) {
            self.num_outside += 1;
            self.furthest = self.furthest.filter(|f| f.1 >= excess.1).or(Some(excess));
        }
        if let Some(write) = &mut self.step_writer {
            write(step, decisions)?;
        }
        // A single request can have millions of iterations, between which nobody else asks.
        if self.steps.is_multiple_of(1024) && self.stop() { Err(SimError::Stopped) } else { Ok(()) }
    }

    fn stop(&self) -> bool {
        self.stop.is_some_and(|stop| stop())
    }

    fn request(&mut self, job: Job) -> Result<(), SimError> {
        self.offered += 1;
        let arrival = job.request.arrival_ns;
        self.first_arrival_ns = Some(self.first_arrival_ns.map_or(arrival, |first| first.min(arrival)));
        self.last_arrival_ns = self.last_arrival_ns.max(arrival);
        self.preemptions += u64::from(job.preemptions);
        if job.refused.is_some() {
            self.refused += 1;
            self.broken |= self.until_broken;
        } else {
            self.completed(&job);
        }
        if self.broken {
            return Err(SimError::Stopped);
        }
        if self.keeps_token_times() {
            let record = job.into_record();
            if let Some(write) = &mut self.request_writer {
                write(&record)?;
            }
            if self.keep_records {
                self.records.push(record);
            }
        }
        Ok(())
    }
}

impl<'a> Collector<'a> {
    /// An empty one, which keeps all records or only statistics.
    pub fn new(keep_records: bool) -> Collector<'a> {
        Collector { keep_records, ..Collector::default() }
    }

    /// Pass everything on to writers too.
    pub fn with_writers(mut self, requests: RequestWriter<'a>, steps: StepWriter<'a>) -> Collector<'a> {
        (self.request_writer, self.step_writer) = (Some(requests), Some(steps));
        self
    }

    fn completed(&mut self, job: &Job) {
        let arrival = job.request.arrival_ns;
        let wait = job.first_scheduled_ns.map_or(0, |d| d.saturating_sub(arrival));
        self.backlog.end(job.last_token_ns);
        self.last_end_ns = self.last_end_ns.max(job.last_token_ns);
        self.input_tokens += u64::from(job.request.input);
        self.output_tokens += u64::from(job.produced);
        self.reused += u64::from(job.reused);
        if job.request.id < self.warm_up {
            return;
        }
        let (ttft, e2e) = (job.first_token_ns - arrival, job.last_token_ns - arrival);
        let gaps = u64::from(job.produced) - 1;
        let tpot = (gaps > 0).then(|| (job.last_token_ns - job.first_token_ns) as f64 / gaps as f64);
        self.queue.add(wait, 1);
        self.ttft.add(ttft, 1);
        self.e2e.add(e2e, 1);
        match tpot {
            Some(tpot) => self.tpot.add(tpot.round() as u64, 1),
            None => self.single += 1,
        }
        let value_ns = |slo: &Slo| match slo.metric {
            SloMetric::Queue => Some(wait as f64),
            SloMetric::Ttft => Some(ttft as f64),
            // A pooled latency has no value per request; its mean gap stands for it.
            SloMetric::Tpot | SloMetric::Itl => tpot,
            SloMetric::E2e => Some(e2e as f64),
        };
        let exceeds = |slo: &Slo| value_ns(slo).is_some_and(|value| value > slo.limit_ms * 1e6);
        self.good += u64::from(!self.slos.iter().any(exceeds));
        if self.until_broken {
            self.violations.resize(self.slos.len(), 0);
            let counted = self.expected.saturating_sub(self.warm_up);
            for (slo, violations) in self.slos.iter().zip(&mut self.violations) {
                // Of means and of pooled gaps it is not known how many requests may exceed the limit.
                let Some(q) = slo.quantile.filter(|_| slo.metric != SloMetric::Itl) else { continue };
                *violations += u64::from(exceeds(slo));
                self.broken |= *violations > (counted as f64 * (1.0 - q)) as u64 + 1;
            }
        }
    }

    /// Whether a limit can no longer hold; only where [`Collector::until_broken`] was set.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// When the last request so far ended.
    pub fn last_end_ns(&self) -> u64 {
        self.last_end_ns
    }

    /// Requests that ended or were refused so far.
    pub fn num_ended(&self) -> u64 {
        self.offered
    }

    /// What the queue did while requests arrived.
    fn trend(&self) -> Option<Trend> {
        self.backlog.trend(self.first_arrival_ns?, self.last_arrival_ns, self.offered)
    }

    /// Whether the queue is bounded, where the run can tell: it must be long compared with what a request takes.
    fn is_stable(&self, trend: &Trend) -> Option<bool> {
        let span = self.last_arrival_ns.saturating_sub(self.first_arrival_ns?) as f64;
        let long_enough = self.e2e.mean().is_some_and(|mean| span >= JUDGED_SPAN * mean);
        if trend.grows {
            return Some(false);
        }
        (long_enough && self.offered >= FEWEST_JUDGED).then_some(true)
    }

    fn histogram(&self, metric: SloMetric) -> &Histogram {
        match metric {
            SloMetric::Queue => &self.queue,
            SloMetric::Ttft => &self.ttft,
            SloMetric::Tpot => &self.tpot,
            SloMetric::Itl => &self.itl,
            SloMetric::E2e => &self.e2e,
        }
    }

    /// A latency's value at a limit's percentile, in milliseconds.
    pub fn value_of(&self, slo: &Slo) -> Option<f64> {
        let histogram = self.histogram(slo.metric);
        Some(slo.quantile.map_or(histogram.mean(), |q| histogram.percentile(q))? / 1e6)
    }

    /// So many evenly spread quantiles of a latency, in milliseconds.
    pub fn quantiles_ms(&self, metric: SloMetric, count: usize) -> Vec<f64> {
        let histogram = self.histogram(metric);
        (0..count).filter_map(|i| Some(histogram.percentile((i as f64 + 0.5) / count as f64)? / 1e6)).collect()
    }

    /// The answer. `server_ns` is the time of all servers together, `open` whether requests came whatever became of
    /// them, so that a queue could grow; `metrics` are the exact ones where records were kept.
    pub fn answer(&self, server_ns: f64, open: bool, metrics: Option<&Metrics>) -> Answer {
        let start = self.first_arrival_ns.unwrap_or(0);
        let seconds = self.last_end_ns.saturating_sub(start) as f64 / 1e9;
        let per_s = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let completed = self.offered - self.refused;
        let arrivals_s = self.last_arrival_ns.saturating_sub(start) as f64 / 1e9;
        let steps = (self.steps as f64).max(1.0);
        let busy = self.busy_ns.max(1.0);
        let e2e = Summary::of(&self.e2e);
        let trend = if open { self.trend() } else { None };
        let stable = trend.as_ref().and_then(|trend| self.is_stable(trend));
        let limits = self.slos.iter().map(|slo| {
            let value_ms = self.value_of(slo);
            LimitValue { slo: *slo, value_ms, met: value_ms.is_none_or(|value| value <= slo.limit_ms) }
        });
        let [blocked_by_batch, blocked_by_tokens, blocked_by_kv] = self.blocked_ns.map(|ns| ns / busy);
        let pick = |exact: Option<&Distribution>, histogram: &Histogram| match metrics {
            Some(_) => exact.map(Summary::exact),
            None => Summary::of(histogram),
        };
        Answer {
            num_offered: self.offered,
            num_requests: completed,
            num_refused: self.refused,
            num_single_token: self.single,
            duration_s: seconds,
            offered_rate_req_s: (arrivals_s > 0.0).then(|| (self.offered - 1) as f64 / arrivals_s),
            queue_ms: pick(metrics.and_then(|m| m.queue_wait_ms.as_ref()), &self.queue),
            ttft_ms: pick(metrics.map(|m| &m.ttft_ms), &self.ttft),
            tpot_ms: pick(metrics.and_then(|m| m.tpot_ms.as_ref()), &self.tpot),
            itl_ms: pick(metrics.and_then(|m| m.itl_ms.as_ref()), &self.itl),
            e2e_ms: pick(metrics.map(|m| &m.e2e_ms), &self.e2e),
            percentiles: if metrics.is_some() { "linear interpolation of all values" } else { "to 1 part in 2048" },
            throughput: Throughput {
                requests_per_s: per_s(completed as f64),
                output_tokens_per_s: per_s(self.output_tokens as f64),
                total_tokens_per_s: per_s((self.input_tokens + self.output_tokens) as f64),
            },
            goodput: Goodput {
                requests_per_s: per_s(self.good as f64),
                attainment: self.good as f64 / (self.offered.saturating_sub(self.warm_up)).max(1) as f64,
                without_tpot: self.single,
            },
            batch: BatchStats {
                iterations: self.steps,
                mean_requests: self.batch_sum / steps,
                time_mean_requests: self.batch_time / busy,
                max_requests: self.batch_max,
                mean_tokens: self.token_sum / steps,
                utilization: if server_ns > 0.0 { self.busy_ns / server_ns } else { 0.0 },
                mean_queued: self.queued_time / busy,
                blocked_by_batch,
                blocked_by_tokens,
                blocked_by_kv,
            },
            kv: (self.kv_blocks > 0).then(|| KvStats {
                blocks: self.kv_blocks,
                mean_used_share: self.kv_time / busy / f64::from(self.kv_blocks),
                peak_used_blocks: self.kv_peak,
                preemptions: self.preemptions,
                reused_tokens: self.reused,
            }),
            mean_in_system: per_s(completed as f64) * e2e.map_or(0.0, |s| s.mean / 1e3),
            limits: limits.collect(),
            stable,
            judged_on_requests: None,
            waiting_share: trend.map(|trend| trend.waiting_share),
            served_rate_req_s: trend.map(|trend| trend.served_per_s),
            outside: self.furthest.map(|(quantity, times)| Outside {
                share: self.num_outside as f64 / steps,
                quantity,
                times,
            }),
            queue_growth_per_s: trend.filter(|_| stable == Some(false)).map(|trend| trend.per_s),
        }
    }
}
