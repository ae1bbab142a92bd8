//! Triton's dynamic batcher: a batch is formed once, runs as long as its longest member needs, and answers together.

use std::collections::VecDeque;

use crate::cost::{CostModel, Draws, StepLoad};
use crate::error::SimError;
use crate::request::{Job, SimRequest};
use crate::server::{NEVER, Server, Sink, StepRecord};

/// What happens to a request that waited too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeoutAction {
    /// It is refused.
    Reject,
    /// It goes behind every request of its level that has not timed out.
    Delay,
}

/// The batcher's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicConfig {
    /// Most requests in a batch.
    pub max_batch: usize,
    /// Sizes worth sending at once, ascending; none is `max_batch` alone.
    pub preferred: Vec<usize>,
    /// How long the oldest request may wait for more to come.
    pub max_queue_delay_ns: u64,
    /// Batches that can run at the same time.
    pub instances: usize,
    /// Priority levels; 1 is served first.
    pub priorities: u32,
    /// When a waiting request times out, and what becomes of it.
    pub timeout: Option<(u64, TimeoutAction)>,
    /// Most waiting requests per level; more are refused on arrival. 0 is no limit.
    pub max_queue_size: usize,
    /// Durations are divided by this.
    pub speed: f64,
}

/// The queue of one priority level.
#[derive(Default)]
struct Level {
    waiting: VecDeque<Job>,
    /// Requests that timed out and were delayed.
    delayed: VecDeque<Job>,
}

impl Level {
    fn len(&self) -> usize {
        self.waiting.len() + self.delayed.len()
    }
}

struct Batch {
    jobs: Vec<Job>,
    /// The ends of its steps: prompts first, then one token each.
    steps: Vec<u64>,
    record: StepRecord,
}

/// A dynamic batcher with its instances.
pub struct DynamicServer {
    number: u32,
    config: DynamicConfig,
    cost: CostModel,
    draws: Draws,
    levels: Vec<Level>,
    running: Vec<Option<Batch>>,
    /// When the queue has to be looked at again.
    due_ns: u64,
    next_batch: u64,
    refused: Vec<Job>,
    outstanding_tokens: u64,
}

/// What to do with the queue.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Send(usize),
    WaitUntil(u64),
    Nothing,
}

impl DynamicServer {
    /// An idle batcher. `seed` is for costs that are random.
    pub fn new(number: u32, config: DynamicConfig, cost: CostModel, seed: u64) -> DynamicServer {
        DynamicServer {
            number,
            cost,
            draws: Draws::new(number, seed),
            levels: (0..config.priorities.max(1)).map(|_| Level::default()).collect(),
            running: (0..config.instances.max(1)).map(|_| None).collect(),
            config,
            due_ns: NEVER,
            next_batch: 0,
            refused: Vec::new(),
            outstanding_tokens: 0,
        }
    }

    /// Requests in the order in which they are served.
    fn queue(&self) -> impl Iterator<Item = &Job> {
        self.levels.iter().flat_map(|level| level.waiting.iter().chain(&level.delayed))
    }

    /// Refuse or delay what has waited too long.
    fn expire(&mut self, now: u64) {
        let Some((timeout, action)) = self.config.timeout else { return };
        for level in &mut self.levels {
            // Levels are in order of arrival, so those that timed out are at the head.
            while level.waiting.front().is_some_and(|job| now - job.queued_ns >= timeout) {
                let Some(mut job) = level.waiting.pop_front() else { break };
                match action {
                    TimeoutAction::Delay => level.delayed.push_back(job),
                    TimeoutAction::Reject => {
                        job.refused = Some("timed out in the queue");
                        self.refused.push(job);
                    }
                }
            }
        }
    }

    fn nearest_timeout(&self) -> u64 {
        let Some((timeout, _)) = self.config.timeout else { return NEVER };
        let heads = self.levels.iter().filter_map(|level| level.waiting.front());
        heads.map(|job| job.queued_ns.saturating_add(timeout)).min().unwrap_or(NEVER)
    }

    fn verdict(&self, now: u64) -> Verdict {
        let (most, delay) = (self.config.max_batch, self.config.max_queue_delay_ns);
        let preferred: &[usize] =
            if self.config.preferred.is_empty() { std::slice::from_ref(&most) } else { &self.config.preferred };
        let largest = preferred.last().copied().unwrap_or(most);
        let (mut total, mut best, mut full, mut oldest) = (0, 0, false, NEVER);
        for job in self.queue() {
            if total + 1 > largest && best == 0 {
                best = total;
            }
            if total + 1 > most {
                full = true;
                break;
            }
            total += 1;
            oldest = oldest.min(job.queued_ns);
            if preferred.contains(&total) {
                best = total;
            }
        }
        if total == 0 {
            return Verdict::Nothing;
        }
        let age = now - oldest;
        if best > 0 && (delay == 0 || age < delay) {
            return Verdict::Send(best);
        }
        // Waits are whole microseconds, so a batch may go up to one early.
        let wait_us = delay.saturating_sub(age) / 1000;
        if full || total >= largest || wait_us == 0 {
            return Verdict::Send(total);
        }
        Verdict::WaitUntil((now + wait_us * 1000).min(self.nearest_timeout()))
    }

    /// Look at the queue: start what can be started, and know when to look again.
    fn dispatch(&mut self, now: u64) -> Result<(), SimError> {
        loop {
            self.expire(now);
            self.due_ns = self.nearest_timeout();
            let Some(instance) = self.running.iter().position(Option::is_none) else { return Ok(()) };
            match self.verdict(now) {
                Verdict::Nothing => return Ok(()),
                Verdict::WaitUntil(time) => {
                    self.due_ns = self.due_ns.min(time);
                    return Ok(());
                }
                Verdict::Send(size) => {
                    let batch = self.start(size, now)?;
                    self.running[instance] = Some(batch);
                }
            }
        }
    }

    fn start(&mut self, size: usize, now: u64) -> Result<Batch, SimError> {
        let mut jobs = Vec::with_capacity(size);
        for level in &mut self.levels {
            while jobs.len() < size
                && let Some(job) = level.waiting.pop_front().or_else(|| level.delayed.pop_front())
            {
                jobs.push(job);
            }
        }
        let mut record = StepRecord {
            server: self.number,
            iter: self.next_batch,
            start_ns: now,
            active: size as u32,
            new_active: size as u32,
            completed: size as u32,
            queued: self.levels.iter().map(Level::len).sum::<usize>() as u32,
            ..StepRecord::default()
        };
        self.next_batch += 1;
        let longest = jobs.iter().map(|job| job.request.output).max().unwrap_or(1);
        let mut load = StepLoad::default();
        let mut next = StepLoad::default();
        for job in &mut jobs {
            load.add_context(0, u64::from(job.request.input));
            next.add_decode(u64::from(job.request.input) + 1);
            record.new_active_queue_ns += now - job.queued_ns;
            record.new_tokens += job.request.output;
            job.held_by(record.iter, now);
        }
        record.load = load;
        let mut steps = Vec::with_capacity(longest as usize);
        let mut end = now;
        for _ in 0..longest {
            let duration = (self.cost.duration_ns(&load, &mut self.draws) / self.config.speed).round();
            end = end.saturating_add(duration as u64);
            if end >= NEVER / 2 {
                return Err(SimError::ClockOverflow);
            }
            steps.push(end);
            load = next;
            next.decode_kv += u64::from(next.decode_requests); // shorter members are padded to the longest
        }
        record.end_ns = end;
        Ok(Batch { jobs, steps, record })
    }

    fn complete(&mut self, batch: Batch, ended: &mut Vec<Job>, sink: &mut dyn Sink) -> Result<(), SimError> {
        let keep = sink.keeps_token_times();
        let Some(&end) = batch.steps.last() else { return Ok(()) };
        for mut job in batch.jobs {
            let tokens = job.request.output as usize;
            // Tokens come as they are made; the last one with the answer of the whole batch.
            for &time in batch.steps.iter().take(tokens - 1).chain([&end]) {
                if let Some(gap) = job.token(time, keep) {
                    sink.gap(gap, 1);
                }
            }
            self.outstanding_tokens =
                self.outstanding_tokens.saturating_sub(u64::from(job.request.input + job.request.output));
            ended.push(job);
        }
        sink.iteration(&batch.record, &[])
    }
}

impl Server for DynamicServer {
    fn offer(&mut self, mut job: Job, now_ns: u64) -> Result<(), SimError> {
        (job.queued_ns, job.server) = (now_ns, self.number);
        let limit = self.config.max_queue_size;
        let index = (job.request.priority.max(1) as usize - 1).min(self.levels.len() - 1);
        let level = &mut self.levels[index];
        if limit > 0 && level.len() >= limit {
            job.refused = Some("the queue is full");
            self.refused.push(job);
        } else {
            self.outstanding_tokens += u64::from(job.request.input + job.request.output);
            level.waiting.push_back(job);
        }
        self.due_ns = self.due_ns.min(now_ns);
        Ok(())
    }

    fn next_event_ns(&self) -> u64 {
        let ends = self.running.iter().flatten().map(|batch| batch.record.end_ns);
        ends.min().unwrap_or(NEVER).min(self.due_ns)
    }

    fn run(&mut self, limit_ns: u64, ended: &mut Vec<Job>, sink: &mut dyn Sink) -> Result<(), SimError> {
        while ended.is_empty() {
            let now = self.next_event_ns();
            if now >= limit_ns {
                break;
            }
            for instance in 0..self.running.len() {
                if self.running[instance].as_ref().is_some_and(|batch| batch.record.end_ns == now)
                    && let Some(batch) = self.running[instance].take()
                {
                    self.complete(batch, ended, sink)?;
                }
            }
            if ended.is_empty() {
                self.dispatch(now)?;
            } else {
                self.due_ns = now; // after what the ends bring about
            }
            ended.append(&mut self.refused);
        }
        Ok(())
    }

    fn outstanding(&self) -> usize {
        self.queued() + self.running.iter().flatten().map(|batch| batch.jobs.len()).sum::<usize>()
    }

    fn outstanding_tokens(&self) -> u64 {
        self.outstanding_tokens
    }

    fn cached_prefix(&self, _: &SimRequest) -> usize {
        0
    }

    fn fail(&mut self, lost: &mut Vec<Job>) {
        let running = self.running.iter_mut().filter_map(Option::take).flat_map(|batch| batch.jobs);
        let waiting = self.levels.iter_mut().flat_map(|level| level.waiting.drain(..).chain(level.delayed.drain(..)));
        lost.extend(running.chain(waiting).map(|job| Job { preemptions: job.preemptions + 1, ..job }));
        self.due_ns = NEVER;
        self.outstanding_tokens = 0;
    }

    fn queued(&self) -> usize {
        self.levels.iter().map(Level::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Linear;
    use crate::request::Content;

    fn server(config: DynamicConfig) -> DynamicServer {
        let cost = CostModel::Linear(Linear { base_ns: 1e6, ..Linear::default() });
        DynamicServer::new(0, config, cost, 0)
    }

    fn settings(max_batch: usize, preferred: &[usize], delay_us: u64) -> DynamicConfig {
        DynamicConfig {
            max_batch,
            preferred: preferred.to_vec(),
            max_queue_delay_ns: delay_us * 1000,
            instances: 1,
            priorities: 1,
            timeout: None,
            max_queue_size: 0,
            speed: 1.0,
        }
    }

    fn job(id: u64, arrival_ns: u64, priority: u32) -> Job {
        Job::new(SimRequest { id, arrival_ns, input: 1, output: 1, content: Content::Unique, priority })
    }

    fn after(config: DynamicConfig, arrivals_us: &[u64], now_us: u64) -> Verdict {
        let mut server = server(config);
        for (id, &arrival) in arrivals_us.iter().enumerate() {
            server.offer(job(id as u64, arrival * 1000, 1), arrival * 1000).unwrap();
        }
        server.verdict(now_us * 1000)
    }

    #[test]
    fn the_rules_of_the_dynamic_batcher() {
        use Verdict::{Nothing, Send, WaitUntil};
        assert_eq!(after(settings(8, &[], 100), &[], 0), Nothing);
        // Without preferred sizes the largest batch is preferred; the oldest request's age decides.
        assert_eq!(after(settings(8, &[], 100), &[0, 40], 50), WaitUntil(100_000));
        assert_eq!(after(settings(8, &[], 100), &[0, 40], 100), Send(2));
        assert_eq!(after(settings(2, &[], 100), &[0, 40, 41], 50), Send(2));
        // No delay: never wait; a preferred total first, the rest stays.
        assert_eq!(after(settings(8, &[], 0), &[0, 0, 0], 0), Send(3));
        assert_eq!(after(settings(8, &[2, 4], 0), &[0, 0, 0], 0), Send(2));
        assert_eq!(after(settings(8, &[2, 4], 0), &[0; 7], 0), Send(4));
        // A preferred total goes at once while the oldest is young; a backlog goes without preference.
        assert_eq!(after(settings(8, &[2, 4], 100), &[0, 0, 0], 50), Send(2));
        assert_eq!(after(settings(8, &[2, 4], 100), &[0, 0, 0], 100), Send(3));
        assert_eq!(after(settings(8, &[4], 100), &[0; 20], 200), Send(8));
        // Waits are whole microseconds.
        let mut fine = server(settings(8, &[], 100));
        fine.offer(job(0, 500, 1), 500).unwrap();
        assert_eq!(fine.verdict(1_000), WaitUntil(1_000 + 99_000));
        assert_eq!(fine.verdict(100_000), Send(1));
    }

    #[test]
    fn priorities_timeouts_and_the_limit_of_the_queue() {
        let mut config = settings(1, &[], 0);
        (config.priorities, config.max_queue_size) = (2, 2);
        let mut two = server(config.clone());
        [(0, 2), (1, 1), (2, 2), (3, 2)].into_iter().for_each(|(id, p)| two.offer(job(id, 0, p), 0).unwrap());
        assert_eq!(two.queue().map(|j| j.request.id).collect::<Vec<_>>(), [1, 0, 2]);
        assert_eq!(two.refused.iter().map(|j| j.request.id).collect::<Vec<_>>(), [3]);

        config.timeout = Some((1000, TimeoutAction::Delay));
        let mut late = server(config.clone());
        late.offer(job(0, 0, 1), 0).unwrap();
        late.offer(job(1, 900, 1), 900).unwrap();
        late.expire(1000);
        assert_eq!(late.queue().map(|j| j.request.id).collect::<Vec<_>>(), [1, 0]);
        config.timeout = Some((1000, TimeoutAction::Reject));
        config.max_queue_delay_ns = 1_000_000;
        config.max_batch = 8;
        let mut gone = server(config);
        gone.offer(job(0, 0, 1), 0).unwrap();
        assert_eq!(gone.verdict(0), Verdict::WaitUntil(1000), "the nearest timeout shortens the wait");
        gone.expire(1000);
        assert_eq!((gone.queued(), gone.refused.len()), (0, 1));
    }
}
