//! What batches: the scheduler with its plan of a step, and what the engine keeps of a request beside the scheduler's entry.

use crate::iteration::IterationRecord;
use crate::sampling::SamplingParams;
use crate::scheduler::{Decision, Entry, Phase, Plan, Rejection, RequestId, Scheduler};
use crate::step::StepInputs;

use super::flight::{Flight, FlightRow, Flights};
use super::{FinishEvent, FinishReason, Request, TokenEvent};

/// Requests, queued and running.
pub(super) struct Requests {
    scheduler: Scheduler,
    plan: Plan,
    active: Vec<Option<Active>>,
    free_slots: Vec<u32>,
    eos_ids: Vec<u32>,
    vocab: usize,
    /// Decisions of passes that ran nothing, for the next iteration's record.
    carried: Vec<Decision>,
    leaving: Vec<usize>,
}

/// A request beside the scheduler's entry.
struct Active {
    request: RequestId,
    params: SamplingParams,
    stream: bool,
    /// Tokens not to be drawn before `min_tokens`.
    enders: Vec<u32>,
    queued_ns: u64,
    first_scheduled_ns: Option<u64>,
    iterations: Option<(u64, u64)>,
    /// Most positions that were ever in the cache; computing them again is waste.
    furthest: usize,
    /// Its row among the sampled ones of the last step it was in.
    last_row: i32,
}

impl Active {
    /// Why the request ends with `token`, which comes after `generated` others; `None` if it goes on.
    fn ends_with(&self, token: u32, generated: usize) -> Option<FinishReason> {
        if self.params.stop_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else if self.enders.contains(&token) {
            Some(FinishReason::Eos)
        } else if self.is_last(generated) {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Whether the token after `generated` others is the last that may be produced.
    fn is_last(&self, generated: usize) -> bool {
        generated + 1 >= self.params.max_tokens as usize
    }
}

/// What is reported of a request that ends.
struct EntryFacts {
    id: RequestId,
    slot: u32,
    pauses: u32,
    reused: u32,
}

impl EntryFacts {
    fn of(entry: &Entry) -> EntryFacts {
        EntryFacts { id: entry.id, slot: entry.slot, pauses: entry.pauses, reused: entry.reused as u32 }
    }
}

/// What a plan begins and repeats.
#[derive(Clone, Copy)]
pub(super) struct Begun {
    /// Requests that were never scheduled before, and the time they spent in the queue, in all.
    newcomers: u32,
    queue_ns: u64,
    /// Tokens that are computed a second time.
    recomputed: u32,
}

impl Requests {
    pub(super) fn new(scheduler: Scheduler, eos_ids: Vec<u32>, vocab: usize) -> Requests {
        let batch = scheduler.config().max_batch_size;
        Requests {
            scheduler,
            plan: Plan {
                pause: Vec::with_capacity(batch),
                items: Vec::with_capacity(batch),
                decisions: Vec::with_capacity(4 * batch + 4),
                ..Plan::default()
            },
            active: Vec::new(),
            free_slots: Vec::new(),
            eos_ids,
            vocab,
            carried: Vec::with_capacity(batch),
            leaving: Vec::with_capacity(batch),
        }
    }

    /// Whether there is nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Put a request in the queue, or say why it can't run.
    pub(super) fn accept(&mut self, request: Request, queued_ns: u64) -> Result<(), Rejection> {
        let Request { id, prompt, params, stream } = request;
        let vocab = self.vocab;
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(Rejection::UnknownToken { token, vocab });
        }
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.active.push(None);
            // Room for every slot: a step that ends requests must not allocate.
            self.free_slots.reserve(self.active.len());
            self.active.len() as u32 - 1
        });
        let (block, longest) = (self.scheduler.pool().tokens_per_block(), self.scheduler.config().max_seq_len);
        let entry = Entry::new(id, slot, prompt, params.max_tokens as usize, block, longest);
        if let Err(rejection) = self.scheduler.submit(entry) {
            self.free_slots.push(slot);
            return Err(rejection);
        }
        let mut enders = params.stop_ids.clone();
        if !params.ignore_eos {
            enders.extend_from_slice(&self.eos_ids);
        }
        self.active[slot as usize] = Some(Active {
            request: id,
            params,
            stream,
            enders,
            queued_ns,
            first_scheduled_ns: None,
            iterations: None,
            furthest: 0,
            last_row: -1,
        });
        Ok(())
    }

    /// End a request early, if there is one.
    pub(super) fn abort(&mut self, id: RequestId) -> Option<FinishEvent> {
        let entry = self.scheduler.abort(id)?;
        Some(self.finish(EntryFacts::of(&entry), FinishReason::Aborted))
    }

    /// Iterations are numbered anew: requests that run already count in the new numbers from here.
    pub(super) fn restart_counting(&mut self) {
        self.active.iter_mut().flatten().for_each(|active| active.iterations = None);
        self.scheduler.reset_counters();
    }

    /// Decide the next step.
    pub(super) fn plan(&mut self) {
        self.scheduler.plan(&mut self.plan);
    }

    /// Give it its cache blocks.
    pub(super) fn apply(&mut self) {
        self.scheduler.apply(&self.plan);
    }

    /// The requests of the step in their prompt, and those that generate; neither where nothing can run.
    pub(super) fn planned(&self) -> (usize, usize) {
        (self.plan.context_requests, self.plan.generation_requests)
    }

    /// Keep the decisions of a pass that runs nothing; false where it decided nothing either.
    pub(super) fn carry_decisions(&mut self) -> bool {
        if self.plan.pause.is_empty() {
            return false;
        }
        self.carried.extend_from_slice(&self.plan.decisions);
        true
    }

    /// Note when requests are scheduled, at `now`, and for which iteration.
    pub(super) fn stamp(&mut self, iteration: u64, now: u64) -> Begun {
        let mut begun = Begun { newcomers: 0, queue_ns: 0, recomputed: 0 };
        for item in &self.plan.items {
            let entry = &self.scheduler.running()[item.running];
            let Some(active) = &mut self.active[entry.slot as usize] else { continue };
            if active.first_scheduled_ns.is_none() {
                active.first_scheduled_ns = Some(now);
                begun.newcomers += 1;
                begun.queue_ns += now.saturating_sub(active.queued_ns);
            }
            active.iterations = Some((active.iterations.map_or(iteration, |i| i.0), iteration));
            let end = item.start + item.len;
            if item.phase == Phase::Context {
                begun.recomputed += active.furthest.saturating_sub(item.start).min(item.len) as u32;
            }
            active.furthest = active.furthest.max(end);
        }
        begun
    }

    /// Pack the step, and say how its tokens are drawn and which may not be yet.
    pub(super) fn fill(&self, inputs: &mut StepInputs) {
        let active = |slot: u32| self.active[slot as usize].as_ref();
        let running = self.scheduler.running();
        inputs.fill(&self.plan.items, running, |slot| active(slot).map_or(-1, |active| active.last_row));
        for item in self.plan.items.iter().filter(|item| item.samples) {
            let entry = &running[item.running];
            let Some(active) = active(entry.slot) else { continue };
            let generated = entry.generated();
            let early = generated < active.params.min_tokens as usize;
            let banned: &[u32] = if early { &active.enders } else { &[] };
            inputs.push_draw(active.params.draw(generated as u64), banned);
        }
    }

    /// What the step's record says of requests and their cache.
    pub(super) fn record(&self, begun: Begun) -> IterationRecord {
        let (plan, pool) = (&self.plan, self.scheduler.pool());
        IterationRecord {
            active: self.scheduler.running().len() as u32,
            queued: self.scheduler.waiting().len() as u32,
            new_active: begun.newcomers,
            new_active_queue_ns: begun.queue_ns,
            paused: (plan.pause.len() + self.carried.len()) as u32,
            context_requests: plan.context_requests as u32,
            generation_requests: plan.generation_requests as u32,
            context_tokens: plan.context_tokens as u32,
            recomputed_tokens: begun.recomputed,
            kv_used: pool.used() as u32,
            kv_free: (pool.total() - pool.used()) as u32,
            pool: pool.counters(),
            ..IterationRecord::default()
        }
    }

    /// The step was launched: entries move on as if it were done, with tokens pending. Requests that get their last token
    /// leave the batch, and their blocks can be given away, because a device runs steps in order.
    pub(super) fn depart(&mut self, flight: &mut Flight) {
        flight.decisions.append(&mut self.carried);
        flight.decisions.extend_from_slice(&self.plan.decisions);
        self.leaving.clear();
        for item in &self.plan.items {
            let entry = &self.scheduler.running()[item.running];
            if item.samples {
                let (request, slot, generated) = (entry.id, entry.slot, entry.generated());
                let mut last = true;
                if let Some(active) = &mut self.active[slot as usize] {
                    last = active.is_last(generated);
                    active.last_row = flight.rows.len() as i32;
                }
                if last {
                    self.leaving.push(item.running);
                }
                flight.rows.push(FlightRow { request, slot, near: item.running, generated });
            }
            self.scheduler.begin(item);
        }
        // From the back, so that earlier places stay valid.
        self.leaving.sort_unstable();
        while let Some(running) = self.leaving.pop() {
            flight.left.push(self.scheduler.finish(running));
        }
        flight.left.sort_unstable_by_key(|entry| entry.slot);
    }

    /// The step has landed with these `tokens`: settle entries and end requests. `later` steps are still on their way.
    pub(super) fn settle(&mut self, flight: &mut Flight, tokens: &[u32], later: &Flights) {
        let (time_ns, iteration) = (flight.record.times.sampled, flight.record.iter);
        for (row, &token) in flight.rows.iter().zip(tokens) {
            let active = self.active[row.slot as usize].as_ref().filter(|active| active.request == row.request);
            let Some(active) = active else { continue }; // ended meanwhile; another may have its place
            let reason = active.ends_with(token, row.generated);
            flight.wakes |= active.stream || reason.is_some();
            let left = flight.left.binary_search_by_key(&row.slot, |entry| entry.slot).ok();
            if left.is_none() {
                self.scheduler.settle(row.request, row.near, token);
            }
            flight.record.new_tokens += 1;
            flight.tokens.push(TokenEvent { request: row.request, token, time_ns, iteration });
            let Some(reason) = reason else { continue };
            flight.record.completed += 1;
            // It left with this step, is in the batch (or paused), or left with the next step, which it won't need.
            let in_batch = || self.scheduler.abort(row.request).map(|entry| EntryFacts::of(&entry));
            let later = || later.left_with(row.request).map(EntryFacts::of);
            let ended = left.map(|place| EntryFacts::of(&flight.left[place])).or_else(in_batch).or_else(later);
            if let Some(facts) = ended {
                let event = self.finish(facts, reason);
                flight.finished.push(event);
            }
        }
    }

    /// Give a request's slot back and say how it ended.
    fn finish(&mut self, entry: EntryFacts, reason: FinishReason) -> FinishEvent {
        self.free_slots.push(entry.slot);
        let active = self.active[entry.slot as usize].take();
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
}
