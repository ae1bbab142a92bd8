//! Helpers shared by the engine's tests: models, a client that runs requests to their end, and scratch directories.
#![allow(dead_code)] // every test binary uses its own part

pub(crate) mod stepper;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use strobe_engine::device::Device;
use strobe_engine::scheduler::Rejection;
use strobe_engine::{
    BuildConfig, Engine, EngineOptions, FinishEvent, KvCacheType, LoadedModel, ModelRef, Outbox, Quantization, Request,
    RequestId, SamplingParams,
};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;

/// The tiny Hugging Face models made by `make_fixtures.py`, and the type of their weights.
pub(crate) const CASES: [(&str, DType); 18] = [
    ("llama", DType::F32),
    ("llama3-rope-tied", DType::Bf16),
    ("llama-bias", DType::F16),
    ("mistral-window", DType::F16),
    ("qwen2", DType::F16),
    ("qwen2-window", DType::Bf16),
    ("qwen3", DType::Bf16),
    ("llama-bf16", DType::Bf16),
    ("llama-f16", DType::F16),
    ("llama-sharded", DType::Bf16),
    ("mixtral", DType::F32),
    ("mixtral-bf16", DType::Bf16),
    ("qwen3-moe", DType::Bf16),
    ("qwen3-moe-renorm", DType::F32),
    ("gpt-oss", DType::F32),
    ("gpt-oss-mxfp4", DType::Bf16),
    ("deepseek-v3", DType::F32),
    ("deepseek-v3-plain", DType::Bf16),
];

/// The directory of one of them.
pub(crate) fn fixture(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(case)
}

/// A name for `ModelRef::open`: a fixture's directory, or a preset's name as it is.
pub(crate) fn model_name(name: &str) -> String {
    let dir = fixture(name);
    if dir.is_dir() { dir.display().to_string() } else { name.to_string() }
}

/// An empty directory of its own for a test.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("strobe-engine").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Names in a directory, sorted.
pub(crate) fn names_in(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names
}

/// Build options that every fixture takes.
pub(crate) fn build(dtype: DType) -> BuildConfig {
    BuildConfig {
        quantization: Quantization::None,
        kv_cache: KvCacheType::Auto,
        dtype,
        max_batch_size: 8,
        max_num_tokens: 128,
        max_seq_len: 128,
        tokens_per_block: 16,
        gemm_plugin: true,
        context_fmha: true,
        paged_kv_cache: true,
    }
}

/// A fixture or preset, built in memory.
pub(crate) fn load(name: &str, build: BuildConfig) -> LoadedModel {
    let model = ModelRef::open(&model_name(name), 7).unwrap();
    let config = model.engine_config(build).unwrap();
    LoadedModel::in_memory(&mut Cpu::new(Tier::detect(), 2), model, config, &mut |_| true).unwrap()
}

/// The same weights under other options; `dtype` and `gemm_plugin` are part of the weights and must not change.
pub(crate) fn rebuilt(model: &LoadedModel, change: impl Fn(&mut BuildConfig)) -> LoadedModel {
    let mut config = model.config.clone();
    change(&mut config.build);
    assert_eq!(config.build.dtype, model.config.build.dtype);
    assert_eq!(config.build.gemm_plugin, model.config.build.gemm_plugin);
    config.build.validate(&config.model).unwrap();
    LoadedModel { config, weights: model.weights.clone(), tokenizer: None, dir: model.dir.clone() }
}

/// A small random generator (xorshift).
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// `count` token ids.
    pub(crate) fn tokens(&mut self, count: usize, vocab: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocab) as u32).collect()
    }
}

/// A greedy request.
pub(crate) fn greedy(id: RequestId, prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request::new(id, prompt, SamplingParams { max_tokens, ..SamplingParams::default() })
}

/// All that an engine said over several looks.
#[derive(Default)]
pub(crate) struct Heard {
    pub tokens: BTreeMap<RequestId, Vec<u32>>,
    pub finished: BTreeMap<RequestId, FinishEvent>,
    pub rejected: Vec<(RequestId, Rejection)>,
    /// The outboxes as they came, tokens and records included.
    pub all: Vec<Outbox>,
}

impl Heard {
    pub(crate) fn take(&mut self, outbox: Outbox) {
        for event in &outbox.tokens {
            self.tokens.entry(event.request).or_default().push(event.token);
        }
        for event in &outbox.finished {
            assert!(self.finished.insert(event.request, *event).is_none(), "request {} ended twice", event.request);
        }
        self.rejected.extend(outbox.rejected.iter().cloned());
        self.all.push(outbox);
    }

    pub(crate) fn ended(&self) -> usize {
        self.finished.len() + self.rejected.len()
    }

    pub(crate) fn records(&self) -> impl Iterator<Item = &strobe_engine::IterationRecord> {
        self.all.iter().flat_map(|o| &o.iterations)
    }

    pub(crate) fn recordings(&self) -> impl Iterator<Item = &strobe_engine::recorder::Recording> {
        self.all.iter().flat_map(|o| &o.recordings)
    }
}

/// Far longer than any test takes: a hang fails instead of blocking.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Listen until `done`, or fail.
pub(crate) fn listen_until(engine: &Engine, heard: &mut Heard, done: impl Fn(&Heard) -> bool) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !done(heard) {
        let mut outbox = engine.outbox();
        let running = engine.wait(&mut outbox, Duration::from_millis(5));
        heard.take(outbox);
        assert!(running || done(heard), "the engine stopped");
        assert!(std::time::Instant::now() < deadline, "no end in sight");
    }
}

/// Run requests to their end on an engine of their own, and shut it down.
pub(crate) fn run(cpu: Cpu, model: &LoadedModel, options: EngineOptions, requests: Vec<Request>) -> Heard {
    run_windows(cpu, model, options, requests, "")
}

/// The same with profile windows.
pub(crate) fn run_windows(
    device: impl Into<Device>,
    model: &LoadedModel,
    options: EngineOptions,
    requests: Vec<Request>,
    windows: &str,
) -> Heard {
    let engine = Engine::start(device, model, options).unwrap();
    let count = requests.len();
    engine.begin_measurement(strobe_engine::window::parse_windows(windows).unwrap());
    engine.submit(requests);
    let mut heard = Heard::default();
    listen_until(&engine, &mut heard, |heard| heard.ended() == count);
    heard.take(engine.shutdown().unwrap());
    heard
}

/// Equal to the last bit.
pub(crate) fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!(f.to_bits() == e.to_bits(), "{what}: value {index} is {f:e}, expected {e:e}");
    }
}

/// Checks that an error is one line that holds every expected piece.
pub(crate) fn says<T, E: std::fmt::Display>(result: Result<T, E>, pieces: &[&str]) {
    let text = match result {
        Ok(_) => panic!("expected an error with {pieces:?}"),
        Err(error) => error.to_string(),
    };
    assert!(!text.contains('\n'), "more than one line: {text}");
    for piece in pieces {
        assert!(text.contains(piece), "`{piece}` is not in: {text}");
    }
}
