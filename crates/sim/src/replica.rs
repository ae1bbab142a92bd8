//! One engine: the scheduler that the engine runs, with a modelled duration for every iteration.

use strobe_scheduler::block_pool::BlockPool;
use strobe_scheduler::scheduler::{Entry, Phase, Plan, RequestId, Scheduler, SchedulerConfig, check_request};

use crate::cost::{CostModel, Draws, StepLoad};
use crate::error::SimError;
use crate::request::{Content, Job, SimRequest};
use crate::server::{NEVER, Server, Sink, StepRecord};

/// Output tokens that a request in the queue has room for.
const RESERVED_OUTPUT: usize = 512;

/// Limits of a replica.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaConfig {
    /// The scheduler's limits.
    pub scheduler: SchedulerConfig,
    /// Cache blocks.
    pub kv_blocks: usize,
    /// Tokens per cache block.
    pub tokens_per_block: usize,
    /// Whether prefixes are reused.
    pub reuse: bool,
    /// Durations are divided by this.
    pub speed: f64,
    /// Take several generation steps at once where nothing changes. The results are the same.
    pub skip: bool,
    /// Only the first token of each request is made here; the rest elsewhere.
    pub prefill_only: bool,
}

/// Generation steps in which nothing but positions change, taken lazily: the scheduler learns of them at their end.
#[derive(Default)]
struct Ahead {
    /// Steps that ended.
    done: usize,
    /// Steps until something changes; 0 when the iteration is an ordinary one.
    most: usize,
    /// Their ends, where they are kept.
    ends: Vec<u64>,
    /// How many requests take a new block in the steps 1, 2, .. up to the block size, then again.
    crossings: Vec<u32>,
    touched: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Idle,
    /// Plan at this time.
    Due(u64),
    /// An iteration runs until then.
    Busy(u64),
}

/// An engine on a virtual clock.
pub struct Replica {
    number: u32,
    config: ReplicaConfig,
    cost: CostModel,
    draws: Draws,
    scheduler: Scheduler,
    plan: Plan,
    state: State,
    ahead: Ahead,
    step: StepRecord,
    next_iteration: u64,
    jobs: Vec<Option<Job>>,
    free_slots: Vec<u32>,
    outstanding_tokens: u64,
}

impl Replica {
    /// An idle replica. `seed` is for costs that are random.
    pub fn new(number: u32, config: ReplicaConfig, cost: CostModel, seed: u64) -> Replica {
        let pool = BlockPool::new(config.kv_blocks, config.tokens_per_block, config.reuse);
        Replica {
            number,
            config,
            cost,
            draws: Draws::new(number, seed),
            scheduler: Scheduler::new(config.scheduler, pool),
            plan: Plan::default(),
            state: State::Idle,
            ahead: Ahead { crossings: vec![0; config.tokens_per_block], ..Ahead::default() },
            step: StepRecord::default(),
            next_iteration: 0,
            jobs: Vec::new(),
            free_slots: Vec::new(),
            outstanding_tokens: 0,
        }
    }

    /// Whether a request can ever run here.
    pub fn check(config: &ReplicaConfig, request: &SimRequest) -> Result<(), SimError> {
        let (input, output) = (request.input as usize, request.output as usize);
        check_request(&config.scheduler, config.kv_blocks, config.tokens_per_block, input, output)
            .map_err(|reason| SimError::Impossible { id: request.id, reason })
    }

    fn job(&mut self, slot: u32) -> Option<&mut Job> {
        self.jobs.get_mut(slot as usize)?.as_mut()
    }

    /// Plan at `now` and begin an iteration, if there is anything to do.
    fn begin(&mut self, now: u64) -> Result<(), SimError> {
        loop {
            if self.scheduler.is_idle() {
                self.state = State::Idle;
                return Ok(());
            }
            self.scheduler.plan(&mut self.plan);
            if !self.plan.items.is_empty() {
                break;
            }
            if self.plan.pause.is_empty() {
                return Err(SimError::Stuck { waiting: self.scheduler.waiting().len() });
            }
            self.note_pauses();
            self.scheduler.apply(&self.plan);
        }
        self.step = StepRecord {
            server: self.number,
            iter: self.next_iteration,
            start_ns: now,
            paused: self.plan.pause.len() as u32,
            kv_total: self.config.kv_blocks as u32,
            ..StepRecord::default()
        };
        self.next_iteration += 1;
        let steps = self.scheduler.steps_ahead(&self.plan);
        if steps > 0 {
            self.begin_ahead(if self.config.skip { steps } else { 1 });
        } else {
            self.begin_planned(now);
        }
        self.step.active = self.scheduler.running().len() as u32;
        self.step.queued = self.scheduler.waiting().len() as u32;
        self.state = State::Busy(self.end_of_step(now)?);
        Ok(())
    }

    fn begin_ahead(&mut self, most: usize) {
        let Ahead { crossings, touched, ends, .. } = &mut self.ahead;
        touched.drain(..).for_each(|phase| crossings[phase as usize] = 0);
        ends.clear();
        let size = self.config.tokens_per_block;
        for entry in self.scheduler.running() {
            self.step.load.add_decode(entry.computed as u64 + 1);
            let phase = match entry.computed % size {
                0 => 0,
                filled => size - filled,
            };
            crossings[phase] += 1;
            touched.push(phase as u32);
        }
        (self.ahead.done, self.ahead.most) = (0, most);
        self.step.kv_used = self.scheduler.pool().used() as u32;
        self.step.pool = self.scheduler.pool().counters();
        self.cross_blocks();
    }

    /// Count the blocks that the step about to run takes.
    fn cross_blocks(&mut self) {
        let taken = self.ahead.crossings[self.ahead.done % self.config.tokens_per_block];
        self.step.kv_used += taken;
        self.step.pool.allocated_total += u64::from(taken);
        self.step.pool.allocated_new += u64::from(taken);
    }

    fn note_pauses(&mut self) {
        for index in 0..self.plan.pause.len() {
            let slot = self.scheduler.running()[self.plan.pause[index]].slot;
            let computed = self.scheduler.running()[self.plan.pause[index]].computed as u64;
            self.outstanding_tokens += computed;
            if let Some(job) = self.job(slot) {
                job.preemptions += 1;
            }
        }
    }

    fn begin_planned(&mut self, now: u64) {
        self.ahead.most = 0;
        self.note_pauses();
        self.scheduler.apply(&self.plan);
        self.step.load = StepLoad::of(&self.plan);
        let iteration = self.step.iter;
        let first_admitted = self.scheduler.running().len() - self.plan.admit;
        for item in &self.plan.items {
            let entry = &self.scheduler.running()[item.running];
            let Some(job) = self.jobs[entry.slot as usize].as_mut() else { continue };
            if item.phase == Phase::Context {
                if job.first_scheduled_ns.is_none() {
                    self.step.new_active += 1;
                    self.step.new_active_queue_ns += now - job.queued_ns;
                }
                if item.running >= first_admitted {
                    self.outstanding_tokens = self.outstanding_tokens.saturating_sub(item.start as u64);
                }
                if entry.pauses > 0 {
                    self.step.recomputed_tokens += item.len as u32;
                }
                job.reused = entry.reused as u32;
            }
            job.held_by(iteration, now);
        }
        self.step.kv_used = self.scheduler.pool().used() as u32;
        self.step.pool = self.scheduler.pool().counters();
    }

    fn end_of_step(&mut self, now: u64) -> Result<u64, SimError> {
        let duration = (self.cost.duration_ns(&self.step.load, &mut self.draws) / self.config.speed).round();
        // Far below the last nanosecond, so that sums of a few times never pass it.
        let end = if duration < 9e18 { now.checked_add(duration as u64) } else { None };
        end.filter(|&end| end < NEVER / 2).ok_or(SimError::ClockOverflow)
    }

    /// The iteration that runs ends at `now`.
    fn complete(&mut self, now: u64, ended: &mut Vec<Job>, sink: &mut dyn Sink) -> Result<(), SimError> {
        self.step.end_ns = now;
        if self.ahead.most > 0 {
            let requests = self.step.load.decode_requests;
            self.step.new_tokens = requests;
            self.outstanding_tokens = self.outstanding_tokens.saturating_sub(u64::from(requests));
            sink.gap(now - self.step.start_ns, u64::from(requests));
            self.ahead.done += 1;
            if sink.keeps_token_times() {
                self.ahead.ends.push(now);
            }
            if self.ahead.done < self.ahead.most {
                sink.iteration(&self.step, &self.plan.decisions)?;
                return self.next_ahead(now);
            }
            self.settle_ahead(now);
        } else {
            self.advance_items(now, sink);
        }
        let before = ended.len();
        self.finish_done(ended);
        self.step.completed = (ended.len() - before) as u32;
        self.state = State::Due(now);
        sink.iteration(&self.step, &self.plan.decisions)
    }

    /// The next of several equal generation steps.
    fn next_ahead(&mut self, now: u64) -> Result<(), SimError> {
        self.step.iter = self.next_iteration;
        self.next_iteration += 1;
        self.step.start_ns = now;
        self.step.load.decode_kv += u64::from(self.step.load.decode_requests);
        self.step.queued = self.scheduler.waiting().len() as u32;
        self.cross_blocks();
        self.state = State::Busy(self.end_of_step(now)?);
        Ok(())
    }

    /// Let the scheduler and the requests know of the steps taken.
    fn settle_ahead(&mut self, now: u64) {
        let (steps, iteration) = (self.ahead.done, self.step.iter);
        let jobs = &mut self.jobs;
        let reuse = self.config.reuse;
        self.scheduler.run_ahead(steps, |entry, position| match jobs.get(entry.slot as usize) {
            Some(Some(job)) if reuse => job.request.content.token(job.request.id, position),
            _ => 0,
        });
        for entry in self.scheduler.running() {
            let Some(job) = jobs[entry.slot as usize].as_mut() else { continue };
            job.produced += steps as u32;
            job.last_token_ns = now;
            job.token_times_ns.extend_from_slice(&self.ahead.ends);
            job.held_by(iteration, now);
        }
        self.ahead.most = 0;
    }

    fn advance_items(&mut self, now: u64, sink: &mut dyn Sink) {
        let keep = sink.keeps_token_times();
        for item in &self.plan.items {
            let slot = self.scheduler.running()[item.running].slot;
            let Some(job) = self.jobs[slot as usize].as_mut() else { continue };
            let mut token = None;
            if item.samples {
                let position = item.start + item.len;
                token = Some(if self.config.reuse { job.request.content.token(job.request.id, position) } else { 0 });
                self.step.new_tokens += 1;
                if let Some(gap) = job.token(now, keep) {
                    sink.gap(gap, 1);
                }
            }
            self.outstanding_tokens = self.outstanding_tokens.saturating_sub(item.len as u64);
            self.scheduler.advance(item, token);
        }
    }

    fn finish_done(&mut self, ended: &mut Vec<Job>) {
        let mut index = 0;
        while let Some(entry) = self.scheduler.running().get(index) {
            if entry.generated() < entry.max_new_tokens {
                index += 1;
                continue;
            }
            let entry = self.scheduler.finish(index);
            ended.extend(self.take_job(entry.slot));
        }
    }

    fn take_job(&mut self, slot: u32) -> Option<Job> {
        let job = self.jobs.get_mut(slot as usize)?.take();
        self.free_slots.push(slot);
        job
    }

    fn store(&mut self, job: Job) -> u32 {
        match self.free_slots.pop() {
            Some(slot) => {
                self.jobs[slot as usize] = Some(job);
                slot
            }
            None => {
                self.jobs.push(Some(job));
                (self.jobs.len() - 1) as u32
            }
        }
    }
}

impl Server for Replica {
    fn offer(&mut self, mut job: Job, now_ns: u64) -> Result<(), SimError> {
        let request = &job.request;
        let prompt = (request.input + job.produced) as usize;
        let output = if self.config.prefill_only { 1 } else { job.left() as usize };
        // Few wait for their whole output at once: room for all of it would be the queue's memory many times over.
        let room = prompt + output.min(RESERVED_OUTPUT);
        let mut tokens = Vec::with_capacity(room + 1);
        if self.config.reuse {
            tokens.extend((0..prompt).map(|position| request.content.token(request.id, position)));
        } else {
            tokens.resize(prompt, 0);
        }
        (job.queued_ns, job.server) = (now_ns, self.number);
        let id: RequestId = request.id;
        let imported = job.imported as usize;
        let slot = self.store(job);
        let mut entry = Entry::new(id, slot, tokens, output, self.config.tokens_per_block, room);
        entry.imported = imported;
        let queue_was_empty = self.scheduler.waiting().len() == 0;
        if let Err(reason) = self.scheduler.submit(entry) {
            self.take_job(slot);
            return Err(SimError::Impossible { id, reason });
        }
        self.outstanding_tokens += (prompt + output).saturating_sub(imported) as u64;
        if self.state == State::Idle {
            self.state = State::Due(now_ns);
        } else if queue_was_empty && self.ahead.most > 0 {
            self.ahead.most = self.ahead.done + 1; // it may join after the step that runs
        }
        Ok(())
    }

    fn next_event_ns(&self) -> u64 {
        match self.state {
            State::Idle => NEVER,
            State::Due(time) | State::Busy(time) => time,
        }
    }

    fn run(&mut self, limit_ns: u64, ended: &mut Vec<Job>, sink: &mut dyn Sink) -> Result<(), SimError> {
        while ended.is_empty() {
            match self.state {
                State::Due(time) if time < limit_ns => self.begin(time)?,
                State::Busy(time) if time < limit_ns => self.complete(time, ended, sink)?,
                _ => break,
            }
        }
        Ok(())
    }

    fn outstanding(&self) -> usize {
        self.scheduler.running().len() + self.scheduler.waiting().len()
    }

    fn outstanding_tokens(&self) -> u64 {
        self.outstanding_tokens
    }

    fn cached_prefix(&self, request: &SimRequest) -> usize {
        if !self.config.reuse || request.content == Content::Unique {
            return 0;
        }
        let prompt: Vec<u32> = (0..request.input as usize).map(|p| request.content.token(request.id, p)).collect();
        self.scheduler.pool().match_prefix(&prompt).blocks * self.config.tokens_per_block
    }

    fn fail(&mut self, lost: &mut Vec<Job>) {
        if self.ahead.most > 0 && self.ahead.done > 0 {
            let last = self.step.start_ns; // the step that runs is lost, those before it are not
            self.settle_ahead(last);
        }
        let pool = BlockPool::new(self.config.kv_blocks, self.config.tokens_per_block, self.config.reuse);
        let old = std::mem::replace(&mut self.scheduler, Scheduler::new(self.config.scheduler, pool));
        let slots = old.running().iter().chain(old.waiting()).map(|entry| entry.slot);
        for slot in slots {
            lost.extend(self.take_job(slot).map(|job| Job { preemptions: job.preemptions + 1, imported: 0, ..job }));
        }
        self.ahead.most = 0;
        self.outstanding_tokens = 0;
        self.state = State::Idle;
    }

    fn queued(&self) -> usize {
        self.scheduler.waiting().len()
    }
}
