//! The engine: its own thread, its own loop, a mailbox on each side.

mod flight;
mod mailbox;
mod measure;
mod requests;
mod run;
mod start;

use std::sync::{Arc, mpsc};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use strobe_model::program::Node;

use crate::backend::MemoryByPool;
use crate::clock::Clock;
use crate::device::{Device, DeviceFacts};
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::iteration::{IterationLimits, IterationRecord};
use crate::recorder::Recording;
use crate::sampling::SamplingParams;
use crate::scheduler::{Decision, Policy, Rejection, RequestId, SchedulerConfig, check_request};
use crate::window::Window;
use mailbox::{Command, Shared};
use run::Core;

/// A request to the engine.
#[derive(Clone, Debug)]
pub struct Request {
    /// Number chosen by the caller, unique.
    pub id: RequestId,
    /// Token ids of the prompt, each below the vocabulary size.
    pub prompt: Vec<u32>,
    /// How to sample and when to end.
    pub params: SamplingParams,
    /// Whether [`Engine::wait`] ends with every token of it, and not only with its last.
    pub stream: bool,
}

impl Request {
    /// A request that is heard of when it ends. The engine takes the prompt over, and moves it only where its memory has no
    /// room for the output and one token more.
    pub fn new(id: RequestId, prompt: Vec<u32>, params: SamplingParams) -> Request {
        Request { id, prompt, params, stream: false }
    }

    /// The same request, heard of with every token.
    pub fn streaming(self) -> Request {
        Request { stream: true, ..self }
    }
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

/// Handle to a running engine.
///
/// Tokens as they come, from a model that is built in memory:
///
/// ```
/// use std::time::Duration;
/// use strobe_engine::{BuildConfig, Engine, EngineOptions, LoadedModel, ModelRef, Request, SamplingParams};
/// use strobe_kernels_cpu::{Cpu, Tier};
///
/// let mut cpu = Cpu::new(Tier::detect(), 2);
/// let model = ModelRef::open("micro", 7)?;
/// let config = model.engine_config(BuildConfig::for_model(&model.config))?;
/// let model = LoadedModel::in_memory(&mut cpu, model, config, &mut |_| true)?;
/// let engine = Engine::start(cpu, &model, EngineOptions::default())?;
/// engine.submit([Request::new(1, vec![5, 6, 7], SamplingParams::default()).streaming()]);
/// let mut outbox = engine.outbox();
/// while outbox.finished.is_empty() && engine.wait(&mut outbox, Duration::from_secs(1)) {
///     outbox.tokens.iter().for_each(|event| println!("{}", event.token));
/// }
/// # Ok::<(), strobe_engine::EngineError>(())
/// ```
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
        Engine::spawn(Core::new(device.into(), model, options, progress)?)
    }

    fn spawn(core: Core) -> Result<Engine, EngineError> {
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

    /// Queue requests, all in the same instant.
    pub fn submit(&self, requests: impl IntoIterator<Item = Request>) {
        let now = self.info.clock.now();
        self.shared.send(requests.into_iter().map(|request| Command::Submit(request, now)));
    }

    /// End a request early.
    pub fn abort(&self, request: RequestId) {
        self.shared.send([Command::Abort(request)]);
    }

    /// Count iterations from here and record `windows`. Before the first such call nothing is recorded (warm-up).
    pub fn begin_measurement(&self, windows: Vec<Window>) {
        self.shared.send([Command::BeginMeasurement(windows)]);
    }

    /// From the next step on, balance tokens or let the router decide. An engine that was not started with a perfect
    /// router has nothing to balance them with and stays as it is.
    pub fn use_perfect_router(&self, on: bool) {
        self.shared.send([Command::UsePerfectRouter(on)]);
    }

    /// Wait until a request has ended, one that streams has got a token, or `timeout` is over, then swap what the engine
    /// said into `outbox` (whose old content is dropped). Returns false once the engine has stopped.
    ///
    /// There is one message per step: the tokens of all requests in it, whether they stream or not.
    pub fn wait(&self, outbox: &mut Outbox, timeout: Duration) -> bool {
        self.shared.wait(outbox, timeout)
    }

    /// The same for a task of an asynchronous executor: without news the task is woken by the next, and gets an empty
    /// `outbox` until then. One task listens to an engine, and hands tokens on by [`TokenEvent::request`]:
    /// `poll_fn(|task| engine.poll_wait(task, &mut outbox)).await`.
    pub fn poll_wait(&self, task: &mut Context<'_>, outbox: &mut Outbox) -> Poll<bool> {
        self.shared.poll_wait(task, outbox)
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
        self.shared.send([Command::Shutdown]);
        let failure = match self.thread.take().map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => None,
            Some(Ok(Err(problem))) => Some(problem),
            Some(Err(panic)) => Some(panic_text(panic.as_ref())),
        };
        (self.shared.rest(), failure.map(EngineError::Stopped))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.shared.send([Command::Shutdown]);
            let _ = thread.join(); // a panic there has been printed already
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string()).or_else(|| panic.downcast_ref::<String>().cloned());
    format!("internal error: {}", text.unwrap_or_else(|| "panic".into()))
}

/// Iterations of a block that a GPU's recorder is on or off for while its cost is measured: it can't be switched for
/// every single one.
pub const GPU_PROBE_BLOCK: u64 = 16;
