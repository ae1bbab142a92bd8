//! The loop: commands, then a step, again and again.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use strobe_model::program::{StepShape, step_work};

use crate::device::Runner;
use crate::host::HostSampler;
use crate::iteration::{IterationRecord, KeysRead};
use crate::memory;
use crate::recorder::{Recorder, StepTimes, current_thread};
use crate::scheduler::{Entry, Phase, Rejection, RequestId};
use crate::step::execute;

use super::flight::{EntryFacts, finish_event, gpu_recording};
use super::{Active, Command, Core, FinishReason, Request, Shared};

impl Core {
    pub(super) fn run(mut self, say: Sender<Vec<u32>>) -> Result<(), String> {
        // Whatever ends this thread, a waiting client must hear of it.
        struct Farewell(Arc<Shared>);
        impl Drop for Farewell {
            fn drop(&mut self) {
                self.0.lock().stopped = true;
                self.0.to_client.notify_all();
            }
        }
        let _farewell = Farewell(self.shared.clone());
        let threads = self.threads();
        self.host = Some(HostSampler::open(&threads, self.info.clock));
        // Whoever started the engine may be gone.
        let _ = say.send(threads);
        let ended = self.run_loop();
        // After a failure too: what was recorded until then is worth having.
        self.close_recorder();
        ended
    }

    /// The system's numbers of this thread and the other workers.
    fn threads(&self) -> Vec<u32> {
        let helpers = match &self.backend {
            Runner::Cpu(backend) => backend.helper_ids(),
            Runner::Cuda(_) => &[],
        };
        let own = Some(current_thread()).filter(|&id| id != 0);
        own.into_iter().chain(helpers.iter().copied()).collect()
    }

    fn run_loop(&mut self) -> Result<(), String> {
        if let Runner::Cuda(backend) = &self.backend {
            backend.bind().map_err(|error| error.to_string())?;
        }
        let clock = self.info.clock;
        loop {
            if self.scheduler.is_idle() {
                self.drain()?;
            }
            let mut start = clock.now();
            if self.scheduler.is_idle() {
                if !self.wait_for_commands() {
                    break;
                }
                if let Some(host) = &mut self.host {
                    host.restart_after_idling();
                }
                start = clock.now();
            }
            self.push_range(format_args!("_fetch_new_requests"));
            let go_on = self.take_commands();
            self.pop_range();
            if !go_on? {
                break;
            }
            if !self.scheduler.is_idle() {
                self.step(start)?;
            }
        }
        self.drain()
    }

    /// Hand out a window that was cut short and name those never reached.
    fn close_recorder(&mut self) {
        let (mut cut, unreached) = self.recorder.finish();
        if std::mem::take(&mut self.window_open) {
            let gpu = gpu_recording(&mut self.backend, &self.info.clock);
            cut.iter_mut().for_each(|recording| recording.gpu = gpu.clone());
        } else if let Runner::Cuda(backend) = &mut self.backend {
            // A device that can't answer any more has already ended the run with its own error.
            let _ = backend.cancel_lead_in(&self.info.clock);
        }
        let notes = match &mut self.backend {
            Runner::Cpu(_) => Vec::new(),
            Runner::Cuda(backend) => backend.notes(),
        };
        let mut mailbox = self.shared.lock();
        mailbox.outbox.recordings.extend(cut);
        mailbox.outbox.unreached.extend(unreached);
        mailbox.outbox.notes.extend(notes);
    }

    /// Sleep until there is a command. An idle pass is not an iteration.
    fn wait_for_commands(&self) -> bool {
        let mut mailbox = self.shared.lock();
        // Idle is news in itself: a client that waits for the last answer must not wait for its timeout.
        mailbox.news = true;
        self.shared.to_client.notify_all();
        while mailbox.commands.is_empty() {
            mailbox = self.shared.to_engine.wait(mailbox).unwrap_or_else(|e| e.into_inner());
        }
        true
    }

    /// Carry out what the client asked for; false means stop.
    fn take_commands(&mut self) -> Result<bool, String> {
        {
            let mut mailbox = self.shared.lock();
            if mailbox.commands.is_empty() {
                return Ok(true);
            }
            std::mem::swap(&mut mailbox.commands, &mut self.commands);
        }
        let mut commands = std::mem::take(&mut self.commands);
        let mut go_on = true;
        for command in commands.drain(..) {
            match command {
                Command::Submit(request, queued_ns) => self.accept(request, queued_ns),
                Command::Abort(id) => {
                    if let Some(entry) = self.scheduler.abort(id) {
                        let reason = FinishReason::Aborted;
                        let event =
                            finish_event(&mut self.active, &mut self.free_slots, EntryFacts::of(&entry), reason);
                        let mut mailbox = self.shared.lock();
                        mailbox.outbox.finished.push(event);
                        mailbox.news = true;
                        self.shared.to_client.notify_all();
                    }
                }
                Command::BeginMeasurement(windows) => {
                    self.drain()?;
                    self.close_recorder();
                    self.recorder = Recorder::new(windows, self.info.program.len(), self.probe);
                    self.measuring = true;
                    if let Some(host) = &mut self.host {
                        host.restart();
                    }
                    // A step that was on its way when the last request ended has landed after anybody listened.
                    self.shared.lock().outbox.forget_iterations();
                    self.next_iteration = 0;
                    // Requests that run already count in the new numbers from here.
                    self.active.iter_mut().flatten().for_each(|active| active.iterations = None);
                    self.scheduler.reset_counters();
                }
                Command::UsePerfectRouter(on) => {
                    self.drain()?;
                    self.backend.use_perfect_router(on).map_err(|error| format!("the perfect router: {error}"))?;
                }
                Command::Shutdown => go_on = false,
            }
        }
        self.commands = commands;
        Ok(go_on)
    }

    fn accept(&mut self, request: Request, queued_ns: u64) {
        let Request { id, prompt, params } = request;
        let vocab = self.info.vocab_size;
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            return self.reject(id, Rejection::UnknownToken { token, vocab });
        }
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.active.push(None);
            // Room for every slot: a step that ends requests must not allocate.
            self.free_slots.reserve(self.active.len());
            self.active.len() as u32 - 1
        });
        let pool = self.scheduler.pool();
        let output = params.max_tokens as usize;
        let entry = Entry::new(id, slot, &prompt, output, pool.tokens_per_block(), self.info.max_seq_len);
        if let Err(rejection) = self.scheduler.submit(entry) {
            self.free_slots.push(slot);
            return self.reject(id, rejection);
        }
        let mut enders = params.stop_ids.clone();
        if !params.ignore_eos {
            enders.extend_from_slice(&self.eos_ids);
        }
        self.active[slot as usize] = Some(Active {
            request: id,
            params,
            enders,
            queued_ns,
            first_scheduled_ns: None,
            iterations: None,
            furthest: 0,
            last_row: -1,
        });
    }

    fn reject(&self, id: RequestId, rejection: Rejection) {
        let mut mailbox = self.shared.lock();
        mailbox.outbox.rejected.push((id, rejection));
        mailbox.news = true;
        self.shared.to_client.notify_all();
    }

    /// Plan one iteration and launch it, then take the tokens of those that were launched before: of this one too, unless
    /// steps may overlap.
    fn step(&mut self, mut start: u64) -> Result<(), String> {
        let clock = self.info.clock;
        if !self.window_open && self.measuring && self.approach_window()? {
            // Switching the recorder on is no part of the iteration.
            start = clock.now();
            // What was on its way has landed, and with it the last request may have ended.
            if self.scheduler.is_idle() {
                return Ok(());
            }
        }
        let mut times = StepTimes { start, fetched: clock.now(), ..StepTimes::default() };

        self.push_range(format_args!("_schedule"));
        self.scheduler.plan(&mut self.plan);
        self.pop_range();
        times.planned = clock.now();
        self.push_range(format_args!("prepare_resources"));
        self.scheduler.apply(&self.plan);
        self.pop_range();
        times.scheduled = clock.now();
        if self.plan.items.is_empty() {
            if self.plan.pause.is_empty() && self.flights.is_empty() {
                return Err("the scheduler found nothing to run although requests wait".into());
            }
            if !self.plan.pause.is_empty() {
                // Everything was paused. That is no iteration, but its decisions belong to the next one.
                self.carried.extend_from_slice(&self.plan.decisions);
            }
            return self.drain();
        }
        let iteration = self.next_iteration;
        self.next_iteration += 1;
        let profiled = self.measuring && self.recorder.begin(iteration);
        let lead_in = !profiled && self.is_leading_in();

        let (context, generation) = (self.plan.context_requests, self.plan.generation_requests);
        self.push_range(format_args!(
            "[Executor] _forward_step {iteration}: {context} ctx reqs, {generation} gen reqs"
        ));
        self.push_range(format_args!("_prepare_inputs"));
        let (new_active, new_active_queue_ns, recomputed_tokens) = self.stamp_scheduled(iteration, times.scheduled);
        let active = &self.active;
        let last_row = |slot: u32| active[slot as usize].as_ref().map_or(-1, |active| active.last_row);
        self.inputs.fill(&self.plan.items, self.scheduler.running(), last_row);
        self.say_how_to_draw();
        self.pop_range();
        times.prepared = clock.now();
        if self.flights.is_empty() {
            self.last_end = start;
        }
        self.push_range(format_args!("_forward_step"));
        let launched = self.launch(profiled, iteration);
        self.pop_range();
        self.pop_range();
        times.forwarded = launched?;

        let kv_used = self.scheduler.pool().used() as u32;
        let record = IterationRecord {
            iter: iteration,
            times,
            profiled,
            lead_in,
            active: self.scheduler.running().len() as u32,
            queued: self.scheduler.waiting().len() as u32,
            new_active,
            new_active_queue_ns,
            completed: 0,
            paused: (self.plan.pause.len() + self.carried.len()) as u32,
            context_requests: self.plan.context_requests as u32,
            generation_requests: self.plan.generation_requests as u32,
            context_tokens: self.plan.context_tokens as u32,
            recomputed_tokens,
            new_tokens: 0,
            kv_used,
            kv_free: self.info.limits.kv_blocks as u32 - kv_used,
            pool: self.scheduler.pool().counters(),
            resident_bytes: self.resident_bytes(),
            work: step_work(
                &self.config,
                &StepShape { experts_used: self.backend.experts_used(), ..self.inputs.shape() },
            ),
            keys: KeysRead::of(&self.inputs.spans),
            host: None,
            decisions: (0, 0),
        };
        self.pass = times;
        self.take_off(record);
        let depth = if profiled && self.recorder.closes(iteration) { 0 } else { self.depth };
        while self.flights.len() > depth {
            self.land()?;
        }
        Ok(())
    }

    /// Open the window that begins with the next iteration, or begin to record for one that begins right after it, where
    /// strobe itself records: that the GPU is idle when recording begins shall not show in the window. Says whether it did
    /// anything.
    fn approach_window(&mut self) -> Result<bool, String> {
        let (clock, iteration) = (self.info.clock, self.next_iteration);
        let records = matches!(&self.backend, Runner::Cuda(backend) if backend.profiler().records());
        let opens = self.recorder.opens(iteration);
        let leads_in = records && self.recorder.opens_after(iteration);
        if !opens && !leads_in {
            return Ok(false);
        }
        if !self.is_leading_in() {
            self.drain()?;
        }
        if let Runner::Cuda(backend) = &mut self.backend {
            let done = if opens { backend.begin_window(&clock) } else { backend.lead_in(iteration, &clock) };
            done.map_err(|error| error.to_string())?;
        }
        self.window_open = opens;
        if let Some(host) = self.host.as_mut().filter(|_| opens) {
            // The first iteration of the window has a reading of its own.
            host.restart();
        }
        Ok(true)
    }

    /// Whether strobe records already, for a window that opens with the next iteration.
    fn is_leading_in(&self) -> bool {
        !self.window_open && matches!(&self.backend, Runner::Cuda(backend) if backend.profiler().is_leading_in())
    }

    /// Start the device on the step; returns when the sampling began (on a CPU) or when everything was launched.
    fn launch(&mut self, profiled: bool, iteration: u64) -> Result<u64, String> {
        let clock = self.info.clock;
        let backend = match &mut self.backend {
            Runner::Cpu(backend) => &mut **backend,
            Runner::Cuda(backend) => {
                let trace = profiled.then_some((&mut self.recorder, &clock, iteration));
                let launched = backend.launch(&self.inputs, trace);
                launched.map_err(|error| format!("iteration {iteration}: {error}"))?;
                return Ok(clock.now());
            }
        };
        // A CPU has run the step before, so its tokens are there even if nobody has been told of them.
        if let Some(before) = self.flights.back() {
            for (token, &row) in self.inputs.tokens.iter_mut().zip(&self.inputs.from_last) {
                if let Some(&known) = usize::try_from(row).ok().and_then(|row| before.tokens.get(row)) {
                    *token = known;
                }
            }
        }
        let sample = self.info.program.len() - 1;
        let (forward_nodes, nodes) = (&self.info.program[..sample], &self.info.program);
        #[cfg(feature = "handicap")]
        let began = clock.now();
        {
            let trace = profiled.then_some((&mut self.recorder, &clock, iteration));
            execute(backend, &self.config, forward_nodes, 0, &self.inputs, trace);
        }
        #[cfg(feature = "handicap")]
        if let Some(share) = self.handicap {
            crate::handicap::spin(&clock, began, share);
        }
        let forwarded = clock.now();
        {
            let trace = profiled.then_some((&mut self.recorder, &clock, iteration));
            execute(backend, &self.config, nodes, sample, &self.inputs, trace);
        }
        Ok(forwarded)
    }

    /// Begin a range for Nsight Systems, where it listens; names as TensorRT-LLM gives them.
    pub(super) fn push_range(&self, name: std::fmt::Arguments<'_>) {
        if let Runner::Cuda(backend) = &self.backend {
            backend.profiler().push(name);
        }
    }

    /// End the range begun last.
    pub(super) fn pop_range(&self) {
        if let Runner::Cuda(backend) = &self.backend {
            backend.profiler().pop();
        }
    }

    /// Note when requests were first scheduled; returns newcomers, their time in the queue, and recomputed tokens.
    fn stamp_scheduled(&mut self, iteration: u64, now: u64) -> (u32, u64, u32) {
        let (mut new_active, mut queue_ns, mut recomputed) = (0, 0, 0);
        for item in &self.plan.items {
            let entry = &self.scheduler.running()[item.running];
            let Some(active) = &mut self.active[entry.slot as usize] else { continue };
            if active.first_scheduled_ns.is_none() {
                active.first_scheduled_ns = Some(now);
                new_active += 1;
                queue_ns += now.saturating_sub(active.queued_ns);
            }
            active.iterations = Some((active.iterations.map_or(iteration, |i| i.0), iteration));
            let end = item.start + item.len;
            if item.phase == Phase::Context {
                recomputed += active.furthest.saturating_sub(item.start).min(item.len) as u32;
            }
            active.furthest = active.furthest.max(end);
        }
        (new_active, queue_ns, recomputed)
    }

    /// For each sampled row: how its token is drawn, and what it may not be yet.
    fn say_how_to_draw(&mut self) {
        for item in self.plan.items.iter().filter(|item| item.samples) {
            let entry = &self.scheduler.running()[item.running];
            let Some(active) = &self.active[entry.slot as usize] else { continue };
            let generated = entry.generated();
            let early = generated < active.params.min_tokens as usize;
            let banned: &[u32] = if early { &active.enders } else { &[] };
            self.inputs.push_draw(active.params.draw(generated as u64), banned);
        }
    }

    fn resident_bytes(&self) -> Option<u64> {
        let mut text = [0u8; 128];
        let read = self.statm.as_ref()?.read_at(&mut text, 0).ok()?;
        memory::resident_from_statm(text.get(..read)?)
    }
}
