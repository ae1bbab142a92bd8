//! Steps on their way: launched, their tokens not taken yet.

use strobe_model::program::{OpKind, StepShape, step_work};

use crate::clock::Clock;
use crate::device::Runner;
use crate::iteration::IterationRecord;
use crate::recorder::{GpuRecording, StepEvent, StepTimes};
use crate::scheduler::{Decision, Entry, RequestId};
use crate::step::Backend;

use super::{Active, Core, FinishEvent, FinishReason, TokenEvent};

/// A sampled row of a step on its way.
pub(super) struct FlightRow {
    request: RequestId,
    slot: u32,
    /// Where the request stood in the batch.
    near: usize,
    /// Tokens it had before this one.
    generated: usize,
    /// The request left the batch with this step, for this is its last token; its entry is in [`Flight::left`].
    last: bool,
}

/// A step that was launched and whose tokens have not been taken yet.
pub(super) struct Flight {
    record: IterationRecord,
    rows: Vec<FlightRow>,
    /// Requests that left the batch with this step.
    left: Vec<Entry>,
    /// Tokens of the rows, where the device has given them already.
    pub(super) tokens: Vec<u32>,
    decisions: Vec<Decision>,
    expert_counts: Vec<u32>,
    /// Packed rows of the step.
    tokens_packed: u64,
}

impl Flight {
    pub(super) fn with_room(batch: usize, expert_counts: usize) -> Flight {
        Flight {
            record: IterationRecord::default(),
            rows: Vec::with_capacity(batch),
            left: Vec::with_capacity(batch),
            tokens: Vec::with_capacity(batch),
            decisions: Vec::with_capacity(5 * batch + 4),
            expert_counts: Vec::with_capacity(expert_counts),
            tokens_packed: 0,
        }
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.left.clear();
        self.tokens.clear();
        self.decisions.clear();
        self.expert_counts.clear();
    }
}

impl Core {
    /// The step was launched. Entries move on as if it were done, with tokens pending; requests that get their last token
    /// leave the batch, and their blocks can be given away, because a device runs steps in order.
    pub(super) fn take_off(&mut self, record: IterationRecord) {
        let mut flight = self.spare_flights.pop().unwrap_or_else(|| Flight::with_room(self.plan.items.len(), 0));
        flight.record = record;
        flight.tokens_packed = self.inputs.tokens.len() as u64;
        if let Runner::Cpu(backend) = &self.backend {
            flight.tokens.extend_from_slice(backend.tokens());
        }
        flight.expert_counts.extend_from_slice(self.backend.expert_counts());
        flight.decisions.extend_from_slice(&self.carried);
        flight.decisions.extend_from_slice(&self.plan.decisions);
        self.carried.clear();
        for item in &self.plan.items {
            let entry = &self.scheduler.running()[item.running];
            if item.samples {
                let (request, slot, generated) = (entry.id, entry.slot, entry.generated());
                let mut last = true;
                if let Some(active) = &mut self.active[slot as usize] {
                    last = generated + 1 >= active.params.max_tokens as usize;
                    active.last_row = flight.rows.len() as i32;
                }
                flight.rows.push(FlightRow { request, slot, near: item.running, generated, last });
            }
            self.scheduler.begin(item);
        }
        // From the back, so that earlier places stay valid.
        self.leaving.clear();
        self.leaving.extend(flight.rows.iter().filter(|row| row.last).map(|row| row.near));
        self.leaving.sort_unstable();
        while let Some(running) = self.leaving.pop() {
            flight.left.push(self.scheduler.finish(running));
        }
        self.flights.push_back(flight);
    }

    /// Land every step that is on its way.
    pub(super) fn drain(&mut self) -> Result<(), String> {
        while !self.flights.is_empty() {
            self.land()?;
        }
        Ok(())
    }

    /// Take the tokens of the oldest step on its way: settle entries, end requests, answer, and close the iteration with
    /// its record: all in one go, so that whoever hears of an answer finds its iteration too.
    pub(super) fn land(&mut self) -> Result<(), String> {
        let Some(mut flight) = self.flights.pop_front() else { return Ok(()) };
        let clock = self.info.clock;
        let before_wait = clock.now();
        let record = &mut flight.record;
        if self.last_end > record.times.start {
            // Launched before the last landing. The time since then belongs to this iteration, and what the host did in it
            // was done for the next one.
            let launched = self.pass.start >= self.last_end;
            let pass = if launched { self.pass } else { StepTimes::default() };
            let or_start = |time: u64| time.max(self.last_end);
            record.times = StepTimes {
                start: self.last_end,
                fetched: or_start(pass.fetched),
                planned: or_start(pass.planned),
                scheduled: or_start(pass.scheduled),
                prepared: or_start(pass.prepared),
                forwarded: if launched { or_start(pass.forwarded) } else { before_wait },
                ..StepTimes::default()
            };
        }
        if let Runner::Cuda(backend) = &mut self.backend {
            let tokens = backend.wait().map_err(|error| format!("iteration {}: {error}", record.iter))?;
            flight.tokens.extend_from_slice(tokens);
            flight.expert_counts.extend_from_slice(backend.expert_counts());
            self.count_used_experts(&mut flight);
        }
        let record = &mut flight.record;
        record.times.sampled = clock.now();
        let wall = record.times.sampled.saturating_sub(record.times.start);
        record.host = self.host.as_mut().and_then(|host| host.iteration(wall, record.profiled));
        self.push_range(format_args!("_update_requests"));
        let (time_ns, iteration) = (record.times.sampled, record.iter);

        let shared = self.shared.clone();
        let mut guard = shared.lock();
        let mailbox = &mut *guard;
        let outbox = &mut mailbox.outbox;
        flight.left.sort_unstable_by_key(|entry| entry.slot);
        for (row, &token) in flight.rows.iter().zip(&flight.tokens) {
            let Some(active) = &self.active[row.slot as usize] else { continue };
            if active.request != row.request {
                continue; // ended meanwhile; its place has been given to another
            }
            let reason = if active.params.stop_ids.contains(&token) {
                Some(FinishReason::Stop)
            } else if active.enders.contains(&token) {
                Some(FinishReason::Eos)
            } else if row.generated + 1 >= active.params.max_tokens as usize {
                Some(FinishReason::Length)
            } else {
                None
            };
            let left = flight.left.binary_search_by_key(&row.slot, |entry| entry.slot).ok();
            if left.is_none() {
                self.scheduler.settle(row.request, row.near, token);
            }
            record.new_tokens += 1;
            outbox.tokens.push(TokenEvent { request: row.request, token, time_ns, iteration });
            let Some(reason) = reason else { continue };
            record.completed += 1;
            mailbox.news = true;
            // It left with this step, is in the batch (or paused), or left with the next step, which it won't need.
            let in_batch = || self.scheduler.abort(row.request).map(|entry| EntryFacts::of(&entry));
            let later = || self.flights.iter().flat_map(|f| &f.left).find(|e| e.id == row.request).map(EntryFacts::of);
            let ended = left.map(|place| EntryFacts::of(&flight.left[place])).or_else(in_batch).or_else(later);
            if let Some(facts) = ended {
                outbox.finished.push(finish_event(&mut self.active, &mut self.free_slots, facts, reason));
            }
        }
        self.pop_range();
        self.push_range(format_args!("_handle_responses"));
        if self.measuring {
            record.decisions = (outbox.decisions.len() as u32, flight.decisions.len() as u32);
            outbox.decisions.extend_from_slice(&flight.decisions);
            outbox.expert_counts.extend_from_slice(&flight.expert_counts);
            record.times.end = clock.now();
            outbox.iterations.push(*record);
        }
        self.last_end = clock.now();
        if record.profiled {
            let step = StepEvent {
                iteration: record.iter,
                times: record.times,
                context_requests: record.context_requests,
                generation_requests: record.generation_requests,
                context_tokens: record.context_tokens,
                generation_tokens: record.generation_requests,
                cpu_wait_ns: record.host.filter(|host| host.covers == 1).and_then(|host| host.cpu_wait_max_ns),
            };
            if let Some(mut recording) = self.recorder.end(step) {
                recording.gpu = gpu_recording(&mut self.backend, &clock);
                self.window_open = false;
                if self.recorder.is_probe() {
                    self.recorder.discard(recording);
                } else {
                    outbox.recordings.push(recording);
                    mailbox.news = true;
                }
            }
        }
        if mailbox.news {
            shared.to_client.notify_all();
        }
        drop(guard);
        self.pop_range();
        flight.clear();
        self.spare_flights.push(flight);
        Ok(())
    }
}

impl Core {
    /// A GPU says only now which experts tokens were sent to: take what no token needed out of what the step cost.
    fn count_used_experts(&mut self, flight: &mut Flight) {
        let Some((_, experts)) = self.info.experts else { return };
        self.experts_used.clear();
        let used = |counts: &[u32]| counts.iter().filter(|count| **count > 0).count() as u32;
        self.experts_used.extend(flight.expert_counts.chunks(experts).map(used));
        let most = StepShape { spans: &[], tokens: flight.tokens_packed, sampled: 0, ..self.inputs.shape() };
        let known = StepShape { experts_used: &self.experts_used, ..most };
        let bytes = |shape| step_work(&self.config, shape).bytes;
        let work = &mut flight.record.work;
        work.bytes = work.bytes.saturating_sub(bytes(&most).saturating_sub(bytes(&known)));
        if flight.record.profiled {
            self.recorder.correct(flight.record.iter, |event| {
                let node = self.info.program.get(event.node as usize)?;
                matches!(node.kind, OpKind::ExpertLinear { .. }).then(|| node.cost(&self.config, &known, event.ran))
            });
        }
    }
}

/// What is reported of a request that ends.
pub(super) struct EntryFacts {
    id: RequestId,
    slot: u32,
    pauses: u32,
    reused: u32,
}

impl EntryFacts {
    pub(super) fn of(entry: &Entry) -> EntryFacts {
        EntryFacts { id: entry.id, slot: entry.slot, pauses: entry.pauses, reused: entry.reused as u32 }
    }
}

/// Give a request's slot back and say how it ended.
pub(super) fn finish_event(
    active: &mut [Option<Active>],
    free_slots: &mut Vec<u32>,
    entry: EntryFacts,
    reason: FinishReason,
) -> FinishEvent {
    free_slots.push(entry.slot);
    let active = active[entry.slot as usize].take();
    FinishEvent {
        request: entry.id,
        reason,
        queued_ns: active.as_ref().map_or(0, |a| a.queued_ns),
        first_scheduled_ns: active.as_ref().and_then(|a| a.first_scheduled_ns),
        iterations: active.as_ref().and_then(|a| a.iterations),
        pauses: entry.pauses,
        reused_tokens: entry.reused,
    }
}

/// What the GPU did in the window that just ended.
pub(super) fn gpu_recording(backend: &mut Runner, clock: &Clock) -> Option<GpuRecording> {
    let Runner::Cuda(backend) = backend else { return None };
    let device = backend.facts().device.clone();
    // A device that can't answer any more has already ended the run with its own error.
    let timeline = backend.end_window(clock).ok().flatten()?;
    Some(GpuRecording { device, timeline })
}
