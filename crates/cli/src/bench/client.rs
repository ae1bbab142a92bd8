//! The client side of a benchmark: when requests are sent, and what is heard of them.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use strobe_engine::host::{HostCounters, HostReadings};
use strobe_engine::recorder::Recording;
use strobe_engine::scheduler::Decision;
use strobe_engine::window::Window;
use strobe_engine::{Engine, EngineError, IterationLimits, IterationRecord, Outbox, Request, SamplingParams};
use strobe_workload::RequestRecord;

use crate::run_writer::RunWriter;
use crate::{interrupt, iteration_json, output, progress};

/// One request of a run.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub task_id: i64,
    pub prompt: Vec<u32>,
    pub output_tokens: u32,
}

/// How requests are sent.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// Intended arrivals, relative to the start; all 0 when there is no rate.
    pub arrivals_ns: Vec<u64>,
    /// Whether a rate paces the requests (open loop).
    pub open_loop: bool,
    /// Most requests in flight.
    pub concurrency: usize,
    /// What all requests have in common.
    pub params: SamplingParams,
    /// Print the line of older TensorRT-LLM logs for every iteration.
    pub log_iterations: bool,
    /// What to say behind every such line.
    pub log_remark: &'static str,
}

/// Everything one run left behind.
#[derive(Default)]
pub(crate) struct RunData {
    pub records: Vec<RequestRecord>,
    /// Indices of the records whose request has ended, as they ended.
    pub ended: Vec<usize>,
    pub iterations: Vec<IterationRecord>,
    pub decisions: Vec<Decision>,
    /// Tokens sent to each expert, `[iterations][layers][experts]`.
    pub expert_counts: Vec<u32>,
    pub recordings: Vec<Recording>,
    pub unreached: Vec<Window>,
    /// What the engine had to say beside.
    pub notes: Vec<String>,
    pub partial: bool,
    /// The machine's part in it.
    pub host: Option<HostReadings>,
    /// Why the engine stopped before the run was over.
    pub failure: Option<EngineError>,
}

impl RunData {
    /// Decisions of one iteration.
    pub(crate) fn decisions_of(&self, record: &IterationRecord) -> &[Decision] {
        let (first, count) = (record.decisions.0 as usize, record.decisions.1 as usize);
        self.decisions.get(first..first + count).unwrap_or_default()
    }
}

/// How often the progress line changes and an interrupt is looked for.
const TICK: Duration = Duration::from_millis(100);

/// Random requests before the measurement, shaped like the first of the run. Says when the first token was drawn.
pub(crate) fn warm_up(engine: &Engine, jobs: &[Job], count: usize, params: &SamplingParams) -> Result<Option<u64>> {
    let Some(first) = jobs.first() else { return Ok(None) };
    if count == 0 {
        return Ok(None);
    }
    let spinner = progress::spinner("warm-up");
    let vocab = engine.info().vocab_size as u64;
    let request = |index: usize| {
        let id = |i: u64| ((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % vocab;
        let prompt: Vec<u32> = (0..first.prompt.len() as u64).map(|i| id(i + 1000 * index as u64) as u32).collect();
        let max_tokens = first.output_tokens.min(8);
        Request::new(index as u64, prompt, SamplingParams { max_tokens, min_tokens: 0, ..params.clone() })
    };
    engine.submit((0..count).map(request));
    let mut outbox = engine.outbox();
    let mut finished = 0;
    let mut first_token = None;
    while finished < count {
        let alive = engine.wait(&mut outbox, TICK);
        first_token = first_token.or(outbox.tokens.first().map(|token| token.time_ns));
        finished += outbox.finished.len() + outbox.rejected.len();
        if interrupt::requested() {
            bail!(interrupt::Interrupted);
        }
        if !alive {
            break;
        }
    }
    spinner.finish_and_clear();
    Ok(first_token)
}

/// Send `jobs` and collect what the engine says until all have ended; `keep` gets it as it comes.
pub(crate) fn run(
    engine: &Engine,
    jobs: &[Job],
    load: &Load,
    windows: Vec<Window>,
    keep: &mut RunWriter,
) -> Result<RunData> {
    let clock = engine.info().clock;
    let mut outbox = engine.outbox();
    let mut next = 0;
    let mut ended = 0;
    let mut tokens = 0u64;
    let total: u64 = jobs.iter().map(|job| u64::from(job.output_tokens)).sum();
    let bar = progress::generated(total);
    let mut said = None;
    let before = HostCounters::read(engine.threads());
    engine.begin_measurement(windows);
    let start = clock.now();
    let mut run = RunData::default();

    while ended < jobs.len() && !interrupt::requested() {
        // Send what is due and fits.
        let in_flight = next - ended;
        let mut due = Vec::new();
        let now = clock.now(); // what is due arrives together
        while next < jobs.len() && in_flight + due.len() < load.concurrency {
            let arrival = start.saturating_add(load.arrivals_ns.get(next).copied().unwrap_or(0));
            if load.open_loop && arrival > now {
                break;
            }
            let (job, sent) = (&jobs[next], clock.now());
            run.records.push(RequestRecord {
                id: next as u64,
                task_id: job.task_id,
                num_input_tokens: job.prompt.len() as u32,
                arrival_ns: if load.open_loop { arrival } else { now },
                sent_ns: sent,
                queued_ns: sent,
                first_scheduled_ns: None,
                token_times_ns: Vec::with_capacity(job.output_tokens as usize),
                output_ids: Vec::with_capacity(job.output_tokens as usize),
                finish_reason: "aborted".into(),
                error: None,
                iterations: None,
                preemptions: 0,
                reused_tokens: 0,
            });
            let params = SamplingParams {
                max_tokens: job.output_tokens,
                min_tokens: load.params.min_tokens.min(job.output_tokens),
                // Each request draws from its own stream of the run's seed.
                seed: load.params.seed.wrapping_add(next as u64),
                ..load.params.clone()
            };
            // The only copy, with the room that the engine needs behind it.
            let mut prompt = Vec::with_capacity(job.prompt.len() + job.output_tokens as usize + 1);
            prompt.extend_from_slice(&job.prompt);
            due.push(Request::new(next as u64, prompt, params));
            next += 1;
        }
        if !due.is_empty() {
            engine.submit(due);
        }
        let until_next = match load.arrivals_ns.get(next) {
            Some(&arrival) if load.open_loop => {
                Duration::from_nanos(start.saturating_add(arrival).saturating_sub(clock.now())).min(TICK)
            }
            _ => TICK,
        };
        let alive = engine.wait(&mut outbox, until_next);
        ended += take(&mut run, &outbox, &engine.info().limits, load);
        tokens += outbox.tokens.len() as u64;
        keep.tick(&run);
        if said.is_none_or(|said: Instant| said.elapsed() >= TICK) {
            said = Some(Instant::now());
            let elapsed = (clock.now() - start) as f64 / 1e9;
            let kv =
                run.iterations.last().map_or(0.0, |i| f64::from(i.kv_used) / engine.info().limits.kv_blocks as f64);
            let eta = if tokens > 0 { elapsed * (total.saturating_sub(tokens)) as f64 / tokens as f64 } else { 0.0 };
            bar.set_message(format!(
                "{:.1} tok/s, {ended}/{} requests, KV cache {:.1} %, eta {eta:.0} s",
                tokens as f64 / elapsed,
                jobs.len(),
                100.0 * kv
            ));
            bar.set_position(tokens);
        }
        if !alive {
            break;
        }
    }
    run.host = Some(before.until(&HostCounters::read(engine.threads()), &run.iterations));
    bar.finish_and_clear();
    run.partial = ended < jobs.len();
    Ok(run)
}

/// Move what the engine said into the run; returns how many requests ended. A request's id is its place in the run.
fn take(run: &mut RunData, outbox: &Outbox, limits: &IterationLimits, load: &Load) -> usize {
    for event in &outbox.tokens {
        if let Some(record) = run.records.get_mut(event.request as usize) {
            record.token_times_ns.push(event.time_ns);
            record.output_ids.push(event.token);
        }
    }
    for event in &outbox.finished {
        if let Some(record) = run.records.get_mut(event.request as usize) {
            record.finish_reason = event.reason.name().into();
            record.queued_ns = event.queued_ns;
            record.first_scheduled_ns = event.first_scheduled_ns;
            record.iterations = event.iterations;
            record.preemptions = event.pauses;
            record.reused_tokens = event.reused_tokens;
            run.ended.push(event.request as usize);
        }
    }
    for (id, rejection) in &outbox.rejected {
        if let Some(record) = run.records.get_mut(*id as usize) {
            record.finish_reason = "error".into();
            record.error = Some(rejection.to_string());
            run.ended.push(*id as usize);
        }
    }
    take_iterations(run, outbox, limits, load);
    outbox.finished.len() + outbox.rejected.len()
}

/// Iterations and recordings, with decisions renumbered to the run's own list.
fn take_iterations(run: &mut RunData, outbox: &Outbox, limits: &IterationLimits, load: &Load) {
    let shift = run.decisions.len() as u32;
    run.decisions.extend_from_slice(&outbox.decisions);
    run.expert_counts.extend_from_slice(&outbox.expert_counts);
    for iteration in &outbox.iterations {
        let mut iteration = *iteration;
        iteration.decisions.0 += shift;
        run.iterations.push(iteration);
        if load.log_iterations {
            output::line(&format!(
                "[strobe][INFO] {}{}",
                iteration_json::to_old_style(&iteration, limits),
                load.log_remark
            ));
        }
    }
    run.recordings.extend(outbox.recordings.iter().cloned());
    run.unreached.extend_from_slice(&outbox.unreached);
    run.notes.extend_from_slice(&outbox.notes);
}

/// Stop the engine and take what it still had to say into the last run. A run that measured something before the engine
/// failed is kept, with the failure; otherwise the failure is all there is.
pub(crate) fn finish(engine: Engine, run: &mut RunData, load: &Load) -> Result<(), EngineError> {
    let limits = engine.info().limits;
    let (outbox, failure) = engine.end();
    take(run, &outbox, &limits, load);
    if let Some(host) = &mut run.host {
        host.count_disturbed(&run.iterations);
    }
    match failure {
        Some(failure) if run.iterations.is_empty() => return Err(failure),
        Some(failure) => {
            run.partial = true;
            run.failure = Some(failure);
        }
        None => {}
    }
    Ok(())
}
