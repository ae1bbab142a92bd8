//! The engine: its own thread, its own loop, a mailbox on each side.

mod flight;
mod run;
mod start;

use std::collections::VecDeque;
use std::fs::File;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use strobe_model::program::Node;

use crate::clock::Clock;
use crate::cpu::MemoryByPool;
use crate::device::{Device, DeviceFacts, Runner};
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::host::HostSampler;
use crate::iteration::{IterationLimits, IterationRecord};
use crate::recorder::{Recorder, Recording, StepTimes};
use crate::sampling::SamplingParams;
use crate::scheduler::{Decision, Plan, Policy, Rejection, RequestId, Scheduler, SchedulerConfig, check_request};
use crate::step::StepInputs;
use crate::window::Window;
use flight::Flight;

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
    /// Send tokens to experts in balance, whatever the router says. What the model says is then wrong by design.
    pub perfect_router: Option<PerfectRouterOptions>,
}

/// How tokens are balanced, see [`strobe_model::perfect_router`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerfectRouterOptions {
    /// Expert-parallel ranks that the experts are thought to be divided among.
    pub ranks: usize,
    /// The plan under a group limit.
    pub plan: strobe_model::perfect_router::Plan,
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
            perfect_router: None,
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
    /// Layers and experts of a layer, for which the outbox has counts; `None` for a model without experts.
    pub experts: Option<(usize, usize)>,
    /// The balance in which tokens are sent to experts, where it is not the router that decides.
    pub perfect_router: Option<strobe_model::Balance>,
    /// Things a user should know, one line each.
    pub notes: Vec<String>,
}

impl EngineInfo {
    /// Expert counts of one iteration.
    pub fn expert_counts(&self) -> usize {
        self.experts.map_or(0, |(layers, experts)| layers * experts)
    }

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
    /// Tokens sent to each expert, `[iterations][layers][experts]`; empty where it is not known.
    pub expert_counts: Vec<u32>,
    /// Recorded windows.
    pub recordings: Vec<Recording>,
    /// Windows that were never reached; filled when the engine ends.
    pub unreached: Vec<Window>,
    /// Things a user should know that came up while it ran; filled when windows end with it or begin anew.
    pub notes: Vec<String>,
}

impl Outbox {
    /// A new measurement begins.
    fn forget_iterations(&mut self) {
        self.iterations.clear();
        self.decisions.clear();
        self.expert_counts.clear();
    }

    /// `counts` are the expert counts of one iteration.
    fn with_room(counts: usize) -> Outbox {
        Outbox {
            tokens: Vec::with_capacity(1 << 15),
            finished: Vec::with_capacity(1 << 12),
            iterations: Vec::with_capacity(1 << 12),
            decisions: Vec::with_capacity(1 << 14),
            expert_counts: Vec::with_capacity((counts << 12).min(1 << 22)),
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
        self.expert_counts.clear();
        self.recordings.clear();
        self.unreached.clear();
        self.notes.clear();
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
    UsePerfectRouter(bool),
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
    /// The system's numbers of the threads that compute.
    threads: Vec<u32>,
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
        let (say, hear) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("strobe-engine".into())
            .spawn(move || core.run(say))
            .map_err(|error| EngineError::Stopped(format!("its thread could not be started ({error})")))?;
        // It says so first of all; should it end before, `wait` hears of it.
        let threads = hear.recv().unwrap_or_default();
        Ok(Engine { shared, thread: Some(thread), threads, info })
    }

    /// The system's numbers of the threads that compute: the loop's, and the other workers of a CPU. Empty where the
    /// system does not number threads.
    pub fn threads(&self) -> &[u32] {
        &self.threads
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

    /// From the next step on, balance tokens or let the router decide. An engine that was not started with a perfect
    /// router has nothing to balance them with and stays as it is.
    pub fn use_perfect_router(&self, on: bool) {
        self.send([Command::UsePerfectRouter(on)]);
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
        Outbox::with_room(self.info.expert_counts())
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
    /// Experts of each layer that some token of the step that lands was sent to.
    experts_used: Vec<u32>,
    /// Steps that may be on their way while the next one is planned.
    depth: usize,
    /// Host phases of the current pass, and when the last iteration was over.
    pass: StepTimes,
    last_end: u64,
    statm: Option<File>,
    /// There is one as soon as the loop runs.
    host: Option<HostSampler>,
    #[cfg(feature = "handicap")]
    handicap: Option<f64>,
}

/// Iterations of a block that a GPU's recorder is on or off for while its cost is measured: it can't be switched for
/// every single one.
pub const GPU_PROBE_BLOCK: u64 = 16;
