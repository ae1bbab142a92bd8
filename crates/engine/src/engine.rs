//! The engine: its own thread, its own loop, a mailbox on each side.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use strobe_model::program::{Node, ProgramOptions, program, step_work};

use crate::block_pool::BlockPool;
use crate::clock::Clock;
use crate::cpu::{CpuBackend, CpuBackendOptions, MemoryByPool, activation_bytes};
use crate::cuda::{CudaBackend, CudaBackendOptions};
use crate::device::{Device, DeviceFacts, Runner};
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::iteration::{IterationLimits, IterationRecord};
use crate::memory;
use crate::recorder::{GpuRecording, Recorder, Recording, StepEvent, StepTimes};
use crate::sampling::SamplingParams;
use crate::scheduler::{
    Decision, Entry, Phase, Plan, Policy, Rejection, RequestId, Scheduler, SchedulerConfig, check_request,
};
use crate::step::{Backend, ElementBytes, StepInputs, StepLimits, execute};
use crate::window::Window;

/// A request to the engine.
#[derive(Clone, Debug)]
pub struct Request {
    /// Number chosen by the caller, unique.
    pub id: RequestId,
    /// Token ids of the prompt, each below the vocabulary size.
    pub prompt: Vec<u32>,
    /// How to sample and when to end.
    pub params: SamplingParams,
}

/// How large the KV cache is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CacheSize {
    /// This share of the memory that is left once weights and activations are counted, but no more than the batch
    /// can ever use.
    FreeFraction(f64),
    /// Exactly this many blocks.
    Blocks(usize),
}

/// Run-time options; what is `None` comes from the build.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Admission policy.
    pub policy: Policy,
    /// Lower the batch size.
    pub max_batch_size: Option<usize>,
    /// Lower the tokens per step.
    pub max_num_tokens: Option<usize>,
    /// Spread long prompts over steps.
    pub chunked_context: bool,
    /// Size of the cache.
    pub cache: CacheSize,
    /// Reuse cached prefixes.
    pub prefix_reuse: bool,
    /// Record every second iteration (on a GPU, every second block of [`GPU_PROBE_BLOCK`]) and throw the record away, to
    /// measure what recording costs.
    pub probe_recorder: bool,
    /// Plan and launch a step before the tokens of the one before it are known to the host.
    pub overlap: bool,
    /// Tokens that end a request unless it ignores them.
    pub eos_ids: Vec<u32>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            policy: Policy::GuaranteedNoEvict,
            max_batch_size: None,
            max_num_tokens: None,
            chunked_context: true,
            cache: CacheSize::FreeFraction(0.9),
            prefix_reuse: false,
            probe_recorder: false,
            overlap: false,
            eos_ids: Vec::new(),
        }
    }
}

/// Facts about a started engine.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Limits in force.
    pub limits: IterationLimits,
    /// How requests are scheduled.
    pub scheduler: SchedulerConfig,
    /// Longest sequence.
    pub max_seq_len: usize,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Bytes by purpose.
    pub memory: MemoryByPool,
    /// Where it runs.
    pub device: DeviceFacts,
    /// Whether steps are planned before the tokens of the one before are known.
    pub overlap: bool,
    /// The model's ops.
    pub program: Arc<[Node]>,
    /// Implementation behind each op.
    pub kernels: Arc<[String]>,
    /// The clock of all stamps.
    pub clock: Clock,
    /// Things a user should know, one line each.
    pub notes: Vec<String>,
}

impl EngineInfo {
    /// Whether a request of this shape can ever run here.
    pub fn check(&self, prompt: usize, output: usize) -> Result<(), Rejection> {
        check_request(&self.scheduler, self.limits.kv_blocks, self.limits.tokens_per_block, prompt, output)
    }
}

/// A produced token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenEvent {
    /// Whose.
    pub request: RequestId,
    /// Which.
    pub token: u32,
    /// When the step that produced it had been sampled.
    pub time_ns: u64,
    /// In which iteration.
    pub iteration: u64,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// Its token limit.
    Length,
    /// An end-of-sequence token.
    Eos,
    /// One of its stop ids.
    Stop,
    /// The caller's wish.
    Aborted,
}

impl FinishReason {
    /// For records.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Length => "length",
            FinishReason::Eos => "eos",
            FinishReason::Stop => "stop",
            FinishReason::Aborted => "aborted",
        }
    }
}

/// The end of a request.
#[derive(Clone, Copy, Debug)]
pub struct FinishEvent {
    /// Whose.
    pub request: RequestId,
    /// Why.
    pub reason: FinishReason,
    /// When it entered the queue.
    pub queued_ns: u64,
    /// When it was first scheduled.
    pub first_scheduled_ns: Option<u64>,
    /// First and last iteration it was part of.
    pub iterations: Option<(u64, u64)>,
    /// How often it was paused.
    pub pauses: u32,
    /// Prompt tokens taken from the cache.
    pub reused_tokens: u32,
}

/// What the engine has to say since the last look.
#[derive(Default)]
pub struct Outbox {
    /// Tokens, in order.
    pub tokens: Vec<TokenEvent>,
    /// Ended requests.
    pub finished: Vec<FinishEvent>,
    /// Requests that can't run.
    pub rejected: Vec<(RequestId, Rejection)>,
    /// Iterations since the measurement began.
    pub iterations: Vec<IterationRecord>,
    /// Decisions of those iterations.
    pub decisions: Vec<Decision>,
    /// Recorded windows.
    pub recordings: Vec<Recording>,
    /// Windows that were never reached; filled when the engine ends.
    pub unreached: Vec<Window>,
}

impl Outbox {
    fn with_room() -> Outbox {
        Outbox {
            tokens: Vec::with_capacity(1 << 15),
            finished: Vec::with_capacity(1 << 12),
            iterations: Vec::with_capacity(1 << 12),
            decisions: Vec::with_capacity(1 << 14),
            ..Outbox::default()
        }
    }

    /// Forget everything, keep the room.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.finished.clear();
        self.rejected.clear();
        self.iterations.clear();
        self.decisions.clear();
        self.recordings.clear();
        self.unreached.clear();
    }

    /// Decisions of one of `iterations`.
    pub fn decisions_of(&self, record: &IterationRecord) -> &[Decision] {
        let (first, count) = (record.decisions.0 as usize, record.decisions.1 as usize);
        self.decisions.get(first..first + count).unwrap_or_default()
    }
}

enum Command {
    /// A request and when it was submitted.
    Submit(Request, u64),
    Abort(RequestId),
    BeginMeasurement(Vec<Window>),
    Shutdown,
}

struct Mailbox {
    commands: Vec<Command>,
    outbox: Outbox,
    /// Something the client waits for has happened.
    news: bool,
    stopped: bool,
}

struct Shared {
    mailbox: Mutex<Mailbox>,
    to_engine: Condvar,
    to_client: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Mailbox> {
        // A panic on the other side leaves plain data behind; the panic itself is reported by `shutdown`.
        self.mailbox.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Handle to a running engine.
pub struct Engine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), String>>>,
    info: EngineInfo,
}

impl Engine {
    /// Start an engine for `model` on `device`. Everything it will need is reserved here.
    pub fn start(
        device: impl Into<Device>,
        model: &LoadedModel,
        options: EngineOptions,
    ) -> Result<Engine, EngineError> {
        Engine::start_watched(device, model, options, &mut |_| true)
    }

    /// The same; `progress` is told the bytes of weights that a GPU has got so far and answers whether to go on.
    pub fn start_watched(
        device: impl Into<Device>,
        model: &LoadedModel,
        options: EngineOptions,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Engine, EngineError> {
        let core = Core::new(device.into(), model, options, progress)?;
        let info = core.info.clone();
        let shared = core.shared.clone();
        let thread = std::thread::Builder::new()
            .name("strobe-engine".into())
            .spawn(move || core.run())
            .map_err(|error| EngineError::Stopped(format!("its thread could not be started ({error})")))?;
        Ok(Engine { shared, thread: Some(thread), info })
    }

    /// Facts about this engine.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn send(&self, commands: impl IntoIterator<Item = Command>) {
        self.shared.lock().commands.extend(commands);
        self.shared.to_engine.notify_one();
    }

    /// Queue requests, all in the same instant.
    pub fn submit(&self, requests: impl IntoIterator<Item = Request>) {
        let now = self.info.clock.now();
        self.send(requests.into_iter().map(|request| Command::Submit(request, now)));
    }

    /// End a request early.
    pub fn abort(&self, request: RequestId) {
        self.send([Command::Abort(request)]);
    }

    /// Count iterations from here and record `windows`. Before the first such call nothing is recorded (warm-up).
    pub fn begin_measurement(&self, windows: Vec<Window>) {
        self.send([Command::BeginMeasurement(windows)]);
    }

    /// Wait until a request has ended or `timeout` is over, then swap what the engine said into `outbox` (whose old
    /// content is dropped). Returns false once the engine has stopped.
    pub fn wait(&self, outbox: &mut Outbox, timeout: Duration) -> bool {
        outbox.clear();
        let mut mailbox = self.shared.lock();
        if !mailbox.news && !mailbox.stopped {
            mailbox = self.shared.to_client.wait_timeout(mailbox, timeout).unwrap_or_else(|e| e.into_inner()).0;
        }
        mailbox.news = false;
        std::mem::swap(&mut mailbox.outbox, outbox);
        !mailbox.stopped
    }

    /// An outbox with the room that a run needs.
    pub fn outbox(&self) -> Outbox {
        Outbox::with_room()
    }

    /// End the loop and take what is left to say; an open window is handed out as incomplete.
    pub fn shutdown(self) -> Result<Outbox, EngineError> {
        let (outbox, failure) = self.end();
        failure.map_or(Ok(outbox), Err)
    }

    /// The same, but what was said before a failure is not lost to it.
    pub fn end(mut self) -> (Outbox, Option<EngineError>) {
        self.send([Command::Shutdown]);
        let failure = match self.thread.take().map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => None,
            Some(Ok(Err(problem))) => Some(problem),
            Some(Err(panic)) => Some(panic_text(panic.as_ref())),
        };
        (std::mem::take(&mut self.shared.lock().outbox), failure.map(EngineError::Stopped))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.send([Command::Shutdown]);
            let _ = thread.join(); // a panic there has been printed already
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string()).or_else(|| panic.downcast_ref::<String>().cloned());
    format!("internal error: {}", text.unwrap_or_else(|| "panic".into()))
}

/// What the engine keeps of a request beside the scheduler's entry.
struct Active {
    request: RequestId,
    params: SamplingParams,
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

/// A sampled row of a step on its way.
struct FlightRow {
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
struct Flight {
    record: IterationRecord,
    rows: Vec<FlightRow>,
    /// Requests that left the batch with this step.
    left: Vec<Entry>,
    /// Tokens of the rows, where the device has given them already.
    tokens: Vec<u32>,
    decisions: Vec<Decision>,
}

struct Core {
    shared: Arc<Shared>,
    info: EngineInfo,
    config: strobe_model::ModelConfig,
    backend: Runner,
    scheduler: Scheduler,
    plan: Plan,
    inputs: StepInputs,
    recorder: Recorder,
    /// Whether the device was told of a window.
    window_open: bool,
    probe: Option<u64>,
    active: Vec<Option<Active>>,
    free_slots: Vec<u32>,
    eos_ids: Vec<u32>,
    next_iteration: u64,
    measuring: bool,
    commands: Vec<Command>,
    /// Pauses of passes that ran nothing, for the next iteration's record.
    carried: Vec<Decision>,
    /// Steps on their way, oldest first, and used ones to be filled again.
    flights: VecDeque<Flight>,
    spare_flights: Vec<Flight>,
    leaving: Vec<usize>,
    /// Steps that may be on their way while the next one is planned.
    depth: usize,
    /// Host phases of the current pass, and when the last iteration was over.
    pass: StepTimes,
    last_end: u64,
    statm: Option<File>,
}

impl Core {
    fn new(
        device: Device,
        model: &LoadedModel,
        options: EngineOptions,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Core, EngineError> {
        let build = &model.config.build;
        let config = model.config.model.clone();
        let mut notes = Vec::new();
        let limit = |option: &str, asked: Option<usize>, built: usize| match asked {
            Some(0) => Err(EngineError::option(option, "must be at least 1")),
            Some(asked) if asked > built => Err(EngineError::option(
                option,
                format!("{asked} is above the {built} this engine was built for; rebuild it or lower the option"),
            )),
            asked => Ok(asked.unwrap_or(built)),
        };
        let mut batch = limit("--max-batch-size", options.max_batch_size, build.max_batch_size)?;
        let tokens = limit("--max-num-tokens", options.max_num_tokens, build.max_num_tokens)?;
        if tokens < build.tokens_per_block.min(build.max_seq_len) && options.chunked_context {
            let problem = format!("{tokens} is below the engine's tokens_per_block {}", build.tokens_per_block);
            return Err(EngineError::option("--max-num-tokens", problem));
        }
        if batch > tokens {
            notes.push(format!("max batch size lowered from {batch} to {tokens}, the tokens of one step"));
            batch = tokens;
        }
        let unit = build.tokens_per_block.min(build.max_seq_len);
        if options.chunked_context && tokens - (batch - 1) < unit {
            notes.push(format!(
                "with {batch} requests running, a step of {tokens} tokens leaves less than one chunk of {unit} for prompts: long prompts wait until some have ended; raise --max-num-tokens or lower --max-batch-size"
            ));
        }
        if options.prefix_reuse && !build.paged_kv_cache {
            let problem = "needs an engine with a paged KV cache; build with --paged-kv-cache enable";
            return Err(EngineError::option("prefix reuse", problem));
        }
        let limits = StepLimits { tokens, sampled: batch, requests: batch, positions: build.max_seq_len };
        let block_tokens = build.cache_block_tokens();
        let nodes: Arc<[Node]> = program(&config, ProgramOptions { context_fmha: build.context_fmha }).into();
        check_cache_options(&options)?;
        let (backend, blocks, kernels, facts) = match device {
            Device::Cpu(cpu) => {
                build.check_cpu()?;
                let blocks = cache_blocks(model, &options, limits)?;
                let facts = DeviceFacts::Cpu { tier: cpu.tier(), threads: cpu.threads() };
                let backend = CpuBackend::new(
                    cpu,
                    config.clone(),
                    model.weights.clone(),
                    &CpuBackendOptions {
                        limits,
                        tokens_per_block: block_tokens,
                        blocks,
                        dtype: build.dtype,
                        kv: build.cpu_kv_type()?,
                        context_fmha: build.context_fmha,
                    },
                )?;
                let kernels: Arc<[String]> = nodes.iter().map(|n| backend.kernel_name(n)).collect();
                (Runner::Cpu(Box::new(backend)), blocks, kernels, facts)
            }
            Device::Cuda(device) => {
                let setup = CudaBackendOptions { device: &device, limits, cache: options.cache, progress };
                let mut backend = CudaBackend::new(model, nodes.clone(), setup)?;
                notes.extend(backend.notes());
                let (blocks, facts) = (backend.blocks(), DeviceFacts::Cuda(Box::new(backend.facts().clone())));
                let kernels: Arc<[String]> = nodes.iter().map(|node| node.name.to_string()).collect();
                (Runner::Cuda(Box::new(backend)), blocks, kernels, facts)
            }
        };
        let clock = Clock::start();
        let activation = if facts.cuda().is_some() { build.dtype.bytes() } else { 4 };
        let bytes = ElementBytes { weight: build.weight_bytes(), kv: build.kv_bytes(), activation };
        let info = EngineInfo {
            limits: IterationLimits {
                built: (build.max_batch_size, build.max_num_tokens),
                runtime: (batch, tokens),
                kv_blocks: blocks,
                tokens_per_block: block_tokens,
                policy: options.policy,
                reuse: options.prefix_reuse,
                overlap: options.overlap,
                utc_ns: clock.utc_ns(),
            },
            scheduler: SchedulerConfig {
                policy: options.policy,
                max_batch_size: batch,
                max_num_tokens: tokens,
                max_seq_len: build.max_seq_len,
                chunked_context: options.chunked_context,
                chunk_unit: build.tokens_per_block,
                reuse_output: build.context_fmha,
            },
            max_seq_len: build.max_seq_len,
            vocab_size: config.vocab_size,
            memory: backend.memory(),
            device: facts,
            overlap: options.overlap,
            kernels,
            program: nodes.clone(),
            clock,
            notes,
        };
        let scheduler = Scheduler::new(info.scheduler, BlockPool::new(blocks, block_tokens, options.prefix_reuse));
        let mailbox = Mailbox { commands: Vec::new(), outbox: Outbox::with_room(), news: false, stopped: false };
        Ok(Core {
            shared: Arc::new(Shared {
                mailbox: Mutex::new(mailbox),
                to_engine: Condvar::new(),
                to_client: Condvar::new(),
            }),
            plan: Plan {
                pause: Vec::with_capacity(batch),
                items: Vec::with_capacity(batch),
                decisions: Vec::with_capacity(4 * batch + 4),
                ..Plan::default()
            },
            inputs: StepInputs::new(limits, block_tokens, bytes),
            recorder: Recorder::new(Vec::new(), nodes.len(), None),
            window_open: false,
            probe: options.probe_recorder.then_some(match info.device {
                DeviceFacts::Cpu { .. } => 1,
                DeviceFacts::Cuda(_) => GPU_PROBE_BLOCK,
            }),
            active: Vec::new(),
            free_slots: Vec::new(),
            eos_ids: options.eos_ids,
            next_iteration: 0,
            measuring: false,
            commands: Vec::new(),
            carried: Vec::with_capacity(batch),
            flights: VecDeque::with_capacity(2),
            spare_flights: (0..2).map(|_| Flight::with_room(batch)).collect(),
            leaving: Vec::with_capacity(batch),
            depth: usize::from(options.overlap),
            pass: StepTimes::default(),
            last_end: 0,
            statm: File::open("/proc/self/statm").ok(),
            info,
            config,
            backend,
            scheduler,
        })
    }

    fn run(mut self) -> Result<(), String> {
        // Whatever ends this thread, a waiting client must hear of it.
        struct Farewell(Arc<Shared>);
        impl Drop for Farewell {
            fn drop(&mut self) {
                self.0.lock().stopped = true;
                self.0.to_client.notify_all();
            }
        }
        let _farewell = Farewell(self.shared.clone());
        let ended = self.run_loop();
        // After a failure too: what was recorded until then is worth having.
        self.close_recorder();
        ended
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
        }
        let mut mailbox = self.shared.lock();
        mailbox.outbox.recordings.extend(cut);
        mailbox.outbox.unreached.extend(unreached);
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
                        let event = finish_event(&mut self.active, &mut self.free_slots, entry.facts(), reason);
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
                    self.next_iteration = 0;
                    // Requests that run already count in the new numbers from here.
                    self.active.iter_mut().flatten().for_each(|active| active.iterations = None);
                    self.scheduler.reset_counters();
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
        if !self.window_open && self.measuring && self.recorder.opens(self.next_iteration) {
            self.drain()?;
            if let Runner::Cuda(backend) = &mut self.backend {
                backend.begin_window(&clock).map_err(|error| error.to_string())?;
            }
            self.window_open = true;
            // Switching the recorder on is no part of the iteration.
            start = clock.now();
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
            work: step_work(&self.config, &self.inputs.shape()),
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
        {
            let trace = profiled.then_some((&mut self.recorder, &clock, iteration));
            execute(backend, &self.config, forward_nodes, 0, &self.inputs, trace);
        }
        let forwarded = clock.now();
        {
            let trace = profiled.then_some((&mut self.recorder, &clock, iteration));
            execute(backend, &self.config, nodes, sample, &self.inputs, trace);
        }
        Ok(forwarded)
    }

    /// The step was launched. Entries move on as if it were done, with tokens pending; requests that get their last token
    /// leave the batch, and their blocks can be given away, because a device runs steps in order.
    fn take_off(&mut self, record: IterationRecord) {
        let mut flight = self.spare_flights.pop().unwrap_or_else(|| Flight::with_room(self.plan.items.len()));
        flight.record = record;
        if let Runner::Cpu(backend) = &self.backend {
            flight.tokens.extend_from_slice(backend.tokens());
        }
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

    /// Begin a range for Nsight Systems, where it listens; names as TensorRT-LLM gives them.
    fn push_range(&self, name: std::fmt::Arguments<'_>) {
        if let Runner::Cuda(backend) = &self.backend {
            backend.profiler().push(name);
        }
    }

    /// End the range begun last.
    fn pop_range(&self) {
        if let Runner::Cuda(backend) = &self.backend {
            backend.profiler().pop();
        }
    }

    /// Land every step that is on its way.
    fn drain(&mut self) -> Result<(), String> {
        while !self.flights.is_empty() {
            self.land()?;
        }
        Ok(())
    }

    /// Take the tokens of the oldest step on its way: settle entries, end requests, answer, and close the iteration with
    /// its record: all in one go, so that whoever hears of an answer finds its iteration too.
    fn land(&mut self) -> Result<(), String> {
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
        }
        record.times.sampled = clock.now();
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
            let in_batch = || self.scheduler.abort(row.request).map(|entry| entry.facts());
            let later = || self.flights.iter().flat_map(|f| &f.left).find(|e| e.id == row.request).map(Entry::facts);
            let ended = left.map(|place| flight.left[place].facts()).or_else(in_batch).or_else(later);
            if let Some(facts) = ended {
                outbox.finished.push(finish_event(&mut self.active, &mut self.free_slots, facts, reason));
            }
        }
        self.pop_range();
        self.push_range(format_args!("_handle_responses"));
        if self.measuring {
            record.decisions = (outbox.decisions.len() as u32, flight.decisions.len() as u32);
            outbox.decisions.extend_from_slice(&flight.decisions);
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

impl Flight {
    fn with_room(batch: usize) -> Flight {
        Flight {
            record: IterationRecord::default(),
            rows: Vec::with_capacity(batch),
            left: Vec::with_capacity(batch),
            tokens: Vec::with_capacity(batch),
            decisions: Vec::with_capacity(5 * batch + 4),
        }
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.left.clear();
        self.tokens.clear();
        self.decisions.clear();
    }
}

/// What is reported of a request that ends.
struct EntryFacts {
    id: RequestId,
    slot: u32,
    pauses: u32,
    reused: u32,
}

impl Entry {
    fn facts(&self) -> EntryFacts {
        EntryFacts { id: self.id, slot: self.slot, pauses: self.pauses, reused: self.reused as u32 }
    }
}

/// Give a request's slot back and say how it ended.
fn finish_event(
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
fn gpu_recording(backend: &mut Runner, clock: &Clock) -> Option<GpuRecording> {
    let Runner::Cuda(backend) = backend else { return None };
    let device = backend.facts().device.clone();
    // A device that can't answer any more has already ended the run with its own error.
    let timeline = backend.end_window(clock).ok().flatten()?;
    Some(GpuRecording { device, timeline })
}

fn check_cache_options(options: &EngineOptions) -> Result<(), EngineError> {
    match options.cache {
        CacheSize::FreeFraction(share) if !(share > 0.0 && share <= 1.0) => {
            let problem = format!("must be above 0 and at most 1, found {share}");
            Err(EngineError::option("--kv-cache-free-mem-fraction", problem))
        }
        CacheSize::Blocks(blocks) if !(1..=MOST_BLOCKS).contains(&blocks) => {
            let problem = format!("must be between 1 and {MOST_BLOCKS}, found {blocks}");
            Err(EngineError::option("--kv-cache-blocks", problem))
        }
        _ => Ok(()),
    }
}

/// Blocks of the cache, after checking that they fit the memory of this machine.
fn cache_blocks(model: &LoadedModel, options: &EngineOptions, limits: StepLimits) -> Result<usize, EngineError> {
    let build = &model.config.build;
    let config = &model.config.model;
    let block_tokens = build.cache_block_tokens();
    let geometry = strobe_kernels_cpu::KvGeometry {
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        tokens_per_block: block_tokens,
        blocks: 1,
        kind: build.cpu_kv_type()?,
    };
    let block_bytes = geometry.bytes_per_layer() as u64 * config.num_hidden_layers as u64;
    let most = limits.requests * build.max_seq_len.div_ceil(block_tokens);
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    // Mapped weights count as available memory until they are read, so they are set aside as well.
    let mapped = if model.weights.is_mapped() { model.weights.total_bytes() } else { 0 };
    let activations = activation_bytes(config, limits, build.context_fmha, block_tokens);
    let available = memory::available().map_or(u64::MAX, |available| available.bytes);
    let free = available.saturating_sub(mapped.saturating_add(activations));
    let blocks = match options.cache {
        CacheSize::Blocks(blocks) => blocks,
        CacheSize::FreeFraction(fraction) => ((free as f64 * fraction / block_bytes as f64) as usize).clamp(1, most),
    };
    let needed = (blocks as u64).saturating_mul(block_bytes);
    if needed > free {
        return Err(EngineError::Memory {
            what: "this engine".into(),
            arithmetic: format!(
                "{blocks} KV cache blocks of {block_bytes} bytes = {:.1} GiB, activations {:.1} GiB, mapped weights {:.1} GiB, {:.1} GiB available",
                gib(needed),
                gib(activations),
                gib(mapped),
                gib(available)
            ),
            remedy: "use a smaller model or cache, or lower --max-batch-size, --max-num-tokens or --max-seq-len".into(),
        });
    }
    Ok(blocks)
}

/// Iterations of a block that a GPU's recorder is on or off for while its cost is measured: it can't be switched for
/// every single one.
pub const GPU_PROBE_BLOCK: u64 = 16;

/// Block numbers are 32 bits wide.
const MOST_BLOCKS: usize = (u32::MAX - 1) as usize;
