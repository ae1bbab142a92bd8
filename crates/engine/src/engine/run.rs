//! The loop: commands, then a step, again and again.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use crate::backend::{Backend, DeviceRecorder, WindowEdge};
use crate::host::HostSampler;
use crate::iteration::{IterationRecord, KeysRead};
use crate::recorder::{Recording, StepTimes, current_thread};
use crate::step::StepInputs;

use super::EngineInfo;
use super::flight::Flights;
use super::mailbox::{Command, Shared};
use super::measure::Measure;
use super::requests::Requests;

/// The engine on its own thread.
pub(super) struct Core {
    pub(super) shared: Arc<Shared>,
    pub(super) info: EngineInfo,
    pub(super) backend: Box<dyn Backend>,
    pub(super) inputs: StepInputs,
    pub(super) requests: Requests,
    pub(super) flights: Flights,
    pub(super) measure: Measure,
}

impl Core {
    pub(super) fn run(mut self, say: Sender<Vec<u32>>) -> Result<(), String> {
        // Whatever ends this thread, a waiting client must hear of it.
        struct Farewell(Arc<Shared>);
        impl Drop for Farewell {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        let _farewell = Farewell(self.shared.clone());
        let attached = self.backend.attach();
        let helpers = attached.as_deref().unwrap_or_default();
        let own = Some(current_thread()).filter(|&id| id != 0);
        let threads: Vec<u32> = own.into_iter().chain(helpers.iter().copied()).collect();
        self.measure.host = Some(HostSampler::open(&threads, self.info.clock));
        // Whoever started the engine may be gone.
        let _ = say.send(threads);
        let ended = attached.map_err(|error| error.to_string()).and_then(|_| self.run_loop());
        // After a failure too: what was recorded until then is worth having.
        self.close_measurement();
        ended
    }

    fn run_loop(&mut self) -> Result<(), String> {
        let clock = self.info.clock;
        let mut commands = Vec::new();
        loop {
            if self.requests.is_idle() {
                self.drain()?;
            }
            let mut start = clock.now();
            if self.requests.is_idle() {
                self.shared.wait_for_commands();
                if let Some(host) = &mut self.measure.host {
                    host.restart_after_idling();
                }
                start = clock.now();
            }
            if !self.ranged(format_args!("_fetch_new_requests"), |core| core.obey(&mut commands))? {
                break;
            }
            if !self.requests.is_idle() {
                self.step(start)?;
            }
        }
        self.drain()
    }

    /// One pass: plan a step, fill its inputs and launch it, then land the steps before it, and this one too unless steps
    /// may overlap. Landing takes the sampled tokens and answers.
    fn step(&mut self, start: u64) -> Result<(), String> {
        let clock = self.info.clock;
        let Some(start) = self.approach_window(start)? else { return Ok(()) };
        let mut times = StepTimes { start, fetched: clock.now(), ..StepTimes::default() };

        self.ranged(format_args!("_schedule"), |core| core.requests.plan());
        times.planned = clock.now();
        self.ranged(format_args!("prepare_resources"), |core| core.requests.apply());
        times.scheduled = clock.now();
        let (context, generation) = self.requests.planned();
        if context + generation == 0 {
            // Everything was paused, or waits for a step on its way. That is no iteration.
            if !self.requests.carry_decisions() && self.flights.is_empty() {
                return Err("the scheduler found nothing to run although requests wait".into());
            }
            return self.drain();
        }
        let (iteration, profiled) = self.measure.begin();
        let lead_in = !profiled && self.is_leading_in();

        let name = format_args!("[Executor] _forward_step {iteration}: {context} ctx reqs, {generation} gen reqs");
        let (begun, launched) = self.ranged(name, |core| {
            let begun = core.ranged(format_args!("_prepare_inputs"), |core| {
                let begun = core.requests.stamp(iteration, times.scheduled);
                core.requests.fill(&mut core.inputs);
                begun
            });
            times.prepared = clock.now();
            let launch = |core: &mut Core| {
                let trace = core.measure.trace(iteration, profiled);
                core.backend.launch(&mut core.inputs, &clock, trace)
            };
            (begun, core.ranged(format_args!("_forward_step"), launch))
        });
        times.forwarded = launched.map_err(|error| format!("iteration {iteration}: {error}"))?;

        let record = IterationRecord {
            iter: iteration,
            times,
            profiled,
            lead_in,
            resident_bytes: self.measure.resident_bytes(),
            work: self.measure.work(&self.inputs.shape()),
            keys: KeysRead::of(&self.inputs.spans),
            ..self.requests.record(begun)
        };
        let mut flight = self.flights.take_off(record, &mut self.inputs);
        self.requests.depart(&mut flight);
        self.flights.push(flight);
        let closes = profiled && self.measure.recorder.closes(iteration);
        let ahead = usize::from(self.info.overlap && !closes);
        while self.flights.len() > ahead {
            self.land()?;
        }
        Ok(())
    }

    /// Wait for the oldest step on its way, settle its requests, and hand over what it has brought.
    fn land(&mut self) -> Result<(), String> {
        let clock = self.info.clock;
        let Some(mut flight) = self.flights.next_to_land(clock.now()) else { return Ok(()) };
        let (iteration, profiled) = (flight.record.iter, flight.record.profiled);
        let landed = self.backend.land(self.measure.trace(iteration, profiled));
        landed.map_err(|error| format!("iteration {iteration}: {error}"))?;
        flight.record.times.sampled = clock.now();
        self.ranged(format_args!("_update_requests"), |core| {
            let landed = core.backend.landed();
            core.measure.weigh(&mut flight, landed.expert_counts);
            core.requests.settle(&mut flight, landed.tokens, &core.flights);
        });
        self.ranged(format_args!("_handle_responses"), |core| {
            flight.record.times.end = clock.now();
            let recording = core.close_window(&flight.record);
            let expert_counts = core.backend.landed().expert_counts;
            core.shared.hand_over(&flight, expert_counts, core.measure.on, recording);
        });
        self.flights.landed(flight);
        Ok(())
    }

    /// Land every step that is on its way.
    fn drain(&mut self) -> Result<(), String> {
        while !self.flights.is_empty() {
            self.land()?;
        }
        Ok(())
    }

    /// Carry out what the client asked for; false means stop.
    fn obey(&mut self, commands: &mut Vec<Command>) -> Result<bool, String> {
        self.shared.take_commands(commands);
        let mut go_on = true;
        for command in commands.drain(..) {
            match command {
                Command::Submit(request, queued_ns) => {
                    let id = request.id;
                    if let Err(why) = self.requests.accept(request, queued_ns) {
                        self.shared.rejected(id, why);
                    }
                }
                Command::Abort(id) => {
                    if let Some(event) = self.requests.abort(id) {
                        self.shared.finished(event);
                    }
                }
                Command::BeginMeasurement(windows) => {
                    self.drain()?;
                    self.close_measurement();
                    self.measure.restart(windows, self.info.program.len());
                    // A step that was on its way when the last request ended has landed after anybody listened.
                    self.shared.forget_iterations();
                    self.requests.restart_counting();
                }
                Command::UsePerfectRouter(on) => {
                    self.drain()?;
                    self.backend.use_perfect_router(on).map_err(|error| format!("the perfect router: {error}"))?;
                }
                Command::Shutdown => go_on = false,
            }
        }
        Ok(go_on)
    }

    /// Open the window that begins with the next iteration, or begin to record for one that begins right after it, where the
    /// device has a recorder: that the device is idle when recording begins shall not show in the window. Returns when the
    /// pass began that `start` stands for, or nothing if there is nothing left to do in it.
    fn approach_window(&mut self, start: u64) -> Result<Option<u64>, String> {
        let (clock, iteration) = (self.info.clock, self.measure.next_iteration);
        if self.measure.window_open || !self.measure.on {
            return Ok(Some(start));
        }
        let opens = self.measure.recorder.opens(iteration);
        let leads_in =
            self.backend.recorder() != DeviceRecorder::Absent && self.measure.recorder.opens_after(iteration);
        if !opens && !leads_in {
            return Ok(Some(start));
        }
        if !self.is_leading_in() {
            self.drain()?;
        }
        let edge = if opens { WindowEdge::Open } else { WindowEdge::LeadIn(iteration) };
        self.backend.window(edge, &clock).map_err(|error| error.to_string())?;
        self.measure.window_open = opens;
        if opens {
            // The first iteration of the window has a reading of its own.
            self.measure.restart_host();
        }
        // Switching the recorder on is no part of the iteration. What was on its way has landed, and with it the last request
        // may have ended.
        Ok((!self.requests.is_idle()).then(|| clock.now()))
    }

    /// Whether the device records already, for a window that opens with the next iteration.
    fn is_leading_in(&self) -> bool {
        !self.measure.window_open && self.backend.recorder() == DeviceRecorder::On
    }

    /// The recording of the window that ends with this iteration, if one does and somebody wants it.
    fn close_window(&mut self, record: &IterationRecord) -> Option<Recording> {
        let mut recording = self.measure.end(record)?;
        self.measure.window_open = false;
        // A device that can't answer any more has already ended the run with its own error.
        recording.gpu = self.backend.window(WindowEdge::Close, &self.info.clock).ok().flatten();
        self.measure.wanted(recording)
    }

    /// Hand out a window that was cut short and name those never reached.
    fn close_measurement(&mut self) {
        let (mut cut, unreached) = self.measure.recorder.finish();
        let was_open = std::mem::take(&mut self.measure.window_open);
        let edge = if was_open { WindowEdge::Close } else { WindowEdge::Cancel };
        let gpu = self.backend.window(edge, &self.info.clock).ok().flatten();
        if let Some(recording) = &mut cut {
            recording.gpu = gpu;
        }
        self.shared.close_measurement(cut, unreached, self.backend.notes());
    }

    /// Do `part` inside a range for the profiler that listens, if one does; names as TensorRT-LLM gives them.
    fn ranged<T>(&mut self, name: fmt::Arguments<'_>, part: impl FnOnce(&mut Core) -> T) -> T {
        self.backend.push_range(name);
        let result = part(self);
        self.backend.pop_range();
        result
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;
    use std::time::Duration;

    use strobe_kernels_cpu::Tier;
    use strobe_model::program::{Operands, ProgramOptions, program};

    use super::*;
    use crate::backend::{Landed, MemoryByPool, Trace};
    use crate::block_pool::BlockPool;
    use crate::clock::Clock;
    use crate::device::DeviceFacts;
    use crate::engine::{Engine, FinishReason, Outbox, Request};
    use crate::error::EngineError;
    use crate::iteration::IterationLimits;
    use crate::recorder::GpuRecording;
    use crate::sampling::SamplingParams;
    use crate::scheduler::{Policy, Scheduler, SchedulerConfig};
    use crate::step::StepLimits;
    use crate::window::{Window, parse_windows};

    const BATCH: usize = 4;
    const POSITIONS: usize = 64;
    const BLOCK: usize = 16;

    /// A device that computes nothing: every row's token is the number of its step. It writes down what it is asked for.
    struct Scripted {
        said: Arc<Mutex<Vec<String>>>,
        recorder: DeviceRecorder,
        launched: u32,
        under_way: VecDeque<Vec<u32>>,
        landed: Vec<u32>,
        /// The step that never lands.
        fails: Option<u32>,
    }

    impl Scripted {
        fn say(&self, word: String) {
            self.said.lock().unwrap().push(word);
        }
    }

    impl Backend for Scripted {
        fn attach(&mut self) -> Result<Vec<u32>, EngineError> {
            Ok(Vec::new())
        }

        fn launch(&mut self, step: &mut StepInputs, clock: &Clock, _: Option<Trace<'_>>) -> Result<u64, EngineError> {
            self.say(format!("launch {}", self.launched));
            self.under_way.push_back(vec![self.launched; step.sampled.len()]);
            self.launched += 1;
            assert!(self.under_way.len() <= 2, "more than two steps under way");
            Ok(clock.now())
        }

        fn land(&mut self, _: Option<Trace<'_>>) -> Result<(), EngineError> {
            self.landed = self.under_way.pop_front().unwrap();
            let step = self.launched - 1 - self.under_way.len() as u32;
            self.say(format!("land {step}"));
            if self.fails == Some(step) { Err(EngineError::Stopped("it is gone".into())) } else { Ok(()) }
        }

        fn landed(&self) -> Landed<'_> {
            Landed { tokens: &self.landed, expert_counts: &[] }
        }

        fn logits(&self) -> Result<Vec<f32>, EngineError> {
            Ok(Vec::new())
        }

        fn use_perfect_router(&mut self, _: bool) -> Result<(), EngineError> {
            Ok(())
        }

        fn memory(&self) -> MemoryByPool {
            MemoryByPool::default()
        }

        fn facts(&self) -> DeviceFacts {
            DeviceFacts::Cpu { tier: Tier::Scalar, threads: 1 }
        }

        fn window(&mut self, edge: WindowEdge, _: &Clock) -> Result<Option<GpuRecording>, EngineError> {
            self.say(format!("{edge:?}"));
            if self.recorder != DeviceRecorder::Absent {
                let on = matches!(edge, WindowEdge::LeadIn(_) | WindowEdge::Open);
                self.recorder = if on { DeviceRecorder::On } else { DeviceRecorder::Off };
            }
            Ok(None)
        }

        fn recorder(&self) -> DeviceRecorder {
            self.recorder
        }
    }

    /// An engine on such a device, and what the device is asked for.
    fn engine(overlap: bool, recorder: DeviceRecorder, fails: Option<u32>) -> (Engine, Arc<Mutex<Vec<String>>>) {
        let said = Arc::new(Mutex::new(Vec::new()));
        let (launched, under_way, landed) = (0, VecDeque::new(), Vec::new());
        let backend = Scripted { said: said.clone(), recorder, launched, under_way, landed, fails };
        let config = strobe_model::preset("micro").unwrap().config();
        let options = ProgramOptions { context_fmha: true, own_table: false, activated_multiple: None };
        let nodes = program(&config, options);
        let (blocks, clock) = (BATCH * POSITIONS / BLOCK, Clock::start());
        let policy = Policy::GuaranteedNoEvict;
        let info = EngineInfo {
            limits: IterationLimits {
                built: (BATCH, POSITIONS),
                runtime: (BATCH, POSITIONS),
                kv_blocks: blocks,
                tokens_per_block: BLOCK,
                policy,
                reuse: false,
                overlap,
                utc_ns: clock.utc_ns(),
            },
            scheduler: SchedulerConfig {
                policy,
                max_batch_size: BATCH,
                max_num_tokens: POSITIONS,
                max_seq_len: POSITIONS,
                chunked_context: true,
                chunk_unit: BLOCK,
                reuse_output: true,
            },
            max_seq_len: POSITIONS,
            vocab_size: config.vocab_size,
            memory: backend.memory(),
            device: backend.facts(),
            overlap,
            kernels: nodes.iter().map(|node| node.name.to_string()).collect(),
            program: nodes.into(),
            clock,
            experts: None,
            perfect_router: None,
            notes: Vec::new(),
        };
        let limits = StepLimits { tokens: POSITIONS, sampled: BATCH, requests: BATCH, positions: POSITIONS };
        let scheduler = Scheduler::new(info.scheduler, BlockPool::new(blocks, BLOCK, false));
        let core = Core {
            shared: Arc::new(Shared::new(Outbox::default())),
            backend: Box::new(backend),
            inputs: StepInputs::new(limits, BLOCK, Operands::plain(4, 4, 4)),
            requests: Requests::new(scheduler, Vec::new(), config.vocab_size),
            flights: Flights::new(BATCH, 2),
            measure: Measure::new(config, None),
            info,
        };
        (Engine::spawn(core).unwrap(), said)
    }

    /// Run a request of `tokens` and return all that was said of it.
    fn heard(engine: Engine, windows: Vec<Window>, tokens: u32) -> (Outbox, Option<EngineError>) {
        engine.begin_measurement(windows);
        let params = SamplingParams { max_tokens: tokens, ..SamplingParams::default() };
        engine.submit([Request::new(1, vec![1, 2, 3], params)]);
        let (mut all, mut outbox) = (Outbox::default(), Outbox::default());
        let take = |all: &mut Outbox, outbox: &Outbox| {
            all.tokens.extend_from_slice(&outbox.tokens);
            all.finished.extend_from_slice(&outbox.finished);
            all.iterations.extend_from_slice(&outbox.iterations);
            all.recordings.extend_from_slice(&outbox.recordings);
        };
        let mut running = true;
        while running && all.finished.is_empty() {
            running = engine.wait(&mut outbox, Duration::from_secs(60));
            take(&mut all, &outbox);
        }
        let (rest, failure) = engine.end();
        take(&mut all, &rest);
        (all, failure)
    }

    #[test]
    fn a_device_is_asked_for_steps_in_order_and_windows_at_their_edges() {
        let cases: [(bool, DeviceRecorder, &[&str]); 4] = [
            (
                false,
                DeviceRecorder::Absent,
                &[
                    "launch 0", "land 0", "launch 1", "land 1", "Open", "launch 2", "land 2", "launch 3", "land 3",
                    "Close", "launch 4", "land 4",
                ],
            ),
            (
                true,
                DeviceRecorder::Absent,
                &[
                    "launch 0", "launch 1", "land 0", "land 1", "Open", "launch 2", "launch 3", "land 2", "land 3",
                    "Close", "launch 4", "land 4",
                ],
            ),
            (
                false,
                DeviceRecorder::Off,
                &[
                    "launch 0",
                    "land 0",
                    "LeadIn(1)",
                    "launch 1",
                    "land 1",
                    "Open",
                    "launch 2",
                    "land 2",
                    "launch 3",
                    "land 3",
                    "Close",
                    "launch 4",
                    "land 4",
                ],
            ),
            // With overlap the step before the window is still under way when it opens.
            (
                true,
                DeviceRecorder::Off,
                &[
                    "launch 0",
                    "land 0",
                    "LeadIn(1)",
                    "launch 1",
                    "Open",
                    "launch 2",
                    "land 1",
                    "launch 3",
                    "land 2",
                    "land 3",
                    "Close",
                    "launch 4",
                    "land 4",
                ],
            ),
        ];
        for (overlap, recorder, expected) in cases {
            let (engine, said) = engine(overlap, recorder, None);
            let (all, failure) = heard(engine, parse_windows("2-3").unwrap(), 5);
            assert!(failure.is_none());
            let said = said.lock().unwrap();
            // A measurement that begins or ends leaves no lead-in behind.
            let said: Vec<&str> = said.iter().map(String::as_str).filter(|word| *word != "Cancel").collect();
            assert_eq!(said, expected, "overlap {overlap}, {recorder:?}");
            assert!(all.tokens.iter().map(|event| event.token).eq(0..5), "overlap {overlap}, {recorder:?}");
            assert_eq!(all.finished.iter().map(|event| event.reason).collect::<Vec<_>>(), [FinishReason::Length]);
            let kept = |iteration: u64| (2..=3).contains(&iteration);
            assert!(all.iterations.iter().all(|record| record.profiled == kept(record.iter)));
            assert_eq!(all.iterations.iter().map(|record| record.iter).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
            let lead_in = recorder == DeviceRecorder::Off;
            assert!(all.iterations.iter().all(|record| record.lead_in == (lead_in && record.iter == 1)));
            assert_eq!(all.recordings.len(), 1);
        }
    }

    #[test]
    fn a_device_that_fails_ends_the_engine_with_the_iteration() {
        for overlap in [false, true] {
            let (engine, _) = engine(overlap, DeviceRecorder::Absent, Some(2));
            let (all, failure) = heard(engine, Vec::new(), 5);
            let text = failure.map(|error| error.to_string()).unwrap_or_default();
            assert!(text.contains("iteration 2: the engine stopped: it is gone"), "{text}");
            assert!(all.tokens.iter().map(|event| event.token).eq(0..2), "what came before is kept");
            assert!(all.finished.is_empty());
        }
    }
}
