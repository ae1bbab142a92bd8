//! Once warm, steps allocate nothing: not on the engine's thread, not on its workers.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{PATIENCE, Random, build, greedy, load};
use strobe_engine::{
    BuildConfig, CacheSize, Engine, EngineOptions, KvCacheType, LoadedModel, Outbox, PerfectRouterOptions, Policy,
    Quantization, Request, SamplingParams,
};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;
use strobe_model::perfect_router::Plan;

/// Counts what other threads than the test's own take from the system while `COUNTING`.
struct Counter;

static COUNTING: AtomicBool = AtomicBool::new(false);
static TAKEN: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static EXEMPT: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if COUNTING.load(Ordering::Relaxed) && !EXEMPT.get() && !is_main_thread() {
        TAKEN.fetch_add(1, Ordering::Relaxed);
    }
}

/// The test harness lives on the main thread and may allocate as it likes.
fn is_main_thread() -> bool {
    // SAFETY: plain system calls without arguments.
    unsafe { libc::syscall(libc::SYS_gettid) == libc::c_long::from(libc::getpid()) }
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(start, layout, size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counter = Counter;

/// Allocations of other threads while `f` runs.
fn counted(f: impl FnOnce()) -> usize {
    TAKEN.store(0, Ordering::SeqCst);
    COUNTING.store(true, Ordering::SeqCst);
    f();
    COUNTING.store(false, Ordering::SeqCst);
    TAKEN.load(Ordering::SeqCst)
}

/// The counter must be able to fail the test: it sees another thread's allocations and not this one's.
fn check_the_counter() {
    let (ready, go, gone) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ready.store(true, Ordering::SeqCst);
            while !go.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
            std::hint::black_box(vec![1u8; 100]);
            std::hint::black_box(vec![0u8; 100]);
            let mut grown = Vec::with_capacity(1);
            grown.extend_from_slice(std::hint::black_box(&[1u8; 64]));
            std::hint::black_box(grown);
            gone.store(true, Ordering::SeqCst);
        });
        while !ready.load(Ordering::SeqCst) {
            std::hint::spin_loop(); // starting a thread allocates
        }
        let taken = counted(|| {
            std::hint::black_box(vec![1u8; 100]);
            go.store(true, Ordering::SeqCst);
            while !gone.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
        });
        assert_eq!(taken, 4, "one plain, one zeroed, one that grows once");
    });
}

/// A device whose helper thread has run for sure: a thread allocates when it first gets a processor.
fn started_cpu() -> Cpu {
    let mut cpu = Cpu::new(Tier::detect(), 2);
    let both = Barrier::new(2);
    cpu.parallel_for(2, &|_| {
        both.wait();
    });
    cpu
}

/// What has been seen of a run so far.
#[derive(Default)]
struct Seen {
    iterations: usize,
    finished: usize,
    pauses: u32,
    mixed: usize,
    reused: u32,
}

/// Swap mailboxes until `done`. The two outboxes go back and forth, so the engine always has one with room.
fn listen(engine: &Engine, outbox: &mut Outbox, seen: &mut Seen, done: impl Fn(&Seen) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done(seen) {
        assert!(engine.wait(outbox, Duration::from_millis(1)), "the engine stopped");
        seen.iterations += outbox.iterations.len();
        seen.mixed += outbox.iterations.iter().filter(|i| i.context_requests > 0 && i.generation_requests > 0).count();
        seen.finished += outbox.finished.len();
        seen.pauses += outbox.finished.iter().map(|f| f.pauses).sum::<u32>();
        seen.reused += outbox.finished.iter().map(|f| f.reused_tokens).sum::<u32>();
        assert!(Instant::now() < deadline, "no end in sight");
    }
}

/// One request is enough to be warm: room must not come from having grown before.
fn warm(engine: &Engine, outbox: &mut Outbox, requests: impl Fn(u64) -> Vec<Request>) {
    engine.begin_measurement(Vec::new());
    engine.submit(requests(1_000_000).pop());
    listen(engine, outbox, &mut Seen::default(), |seen| seen.finished == 1);
}

/// Submit `requests` again and again until at least `steps` steps of one round were watched from its second step on;
/// a busy machine may let a round pass before this thread looks.
fn watch(
    engine: &Engine,
    outbox: &mut Outbox,
    requests: &dyn Fn(u64) -> Vec<Request>,
    steps: usize,
    what: &str,
) -> Seen {
    let mut all = Seen::default();
    for round in 0..2000 {
        let batch = requests(round * 100);
        let count = batch.len();
        engine.submit(batch);
        let mut seen = Seen::default();
        // The first record may be the last one of the round before; with the second, all requests are in.
        listen(engine, outbox, &mut seen, |seen| seen.iterations >= 2);
        let before = seen.iterations;
        let taken = counted(|| listen(engine, outbox, &mut seen, |seen| seen.finished == count));
        assert_eq!(taken, 0, "{what}: allocations in {} steps", seen.iterations - before);
        all.pauses += seen.pauses;
        all.reused += seen.reused;
        all.mixed += seen.mixed;
        if seen.iterations - before >= steps {
            return all;
        }
    }
    panic!("{what}: never saw {steps} steps of a round");
}

fn decode(model: &LoadedModel, what: &str) {
    let engine = Engine::start(started_cpu(), model, EngineOptions::default()).unwrap();
    let mut outbox = engine.outbox();
    let mut random = Random(3);
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| random.tokens(3 + i, model.config.model.vocab_size)).collect();
    let requests = |base: u64| prompts.iter().zip(base..).map(|(p, id)| greedy(id, p.clone(), 120)).collect::<Vec<_>>();
    warm(&engine, &mut outbox, requests);
    watch(&engine, &mut outbox, &requests, 60, &format!("{what} decode"));
}

/// Prompts in chunks, generation, drawn tokens, ends, reuse and pauses of requests that are all in the queue already.
fn mixed(model: &LoadedModel, options: EngineOptions, what: &str) -> Seen {
    let engine = Engine::start(started_cpu(), model, options).unwrap();
    let mut outbox = engine.outbox();
    let vocab = model.config.model.vocab_size;
    let requests = |base: u64| {
        let request = |id: u64| {
            let drawn = SamplingParams {
                temperature: 1.0,
                top_k: 9,
                top_p: 0.9,
                seed: id,
                max_tokens: 24,
                ..SamplingParams::default()
            };
            // Three families of prompts that begin alike.
            let prompt = Random(8 + id % 3).tokens(10 + 7 * (id % 6) as usize, vocab);
            if id.is_multiple_of(2) { greedy(id, prompt, 30) } else { Request::new(id, prompt, drawn) }
        };
        (base..base + 24).map(request).collect::<Vec<_>>()
    };
    warm(&engine, &mut outbox, requests);
    let seen = watch(&engine, &mut outbox, &requests, 60, what);
    assert!(seen.mixed > 0, "{what}: prompts and generation never shared a step");
    seen
}

/// Clients that hear every token of theirs: one message a step for all of them.
fn streams(clients: usize) {
    let model = load("micro", BuildConfig { max_batch_size: clients, ..build(DType::F32) });
    let engine = Engine::start(started_cpu(), &model, EngineOptions::default()).unwrap();
    let mut outbox = engine.outbox();
    let mut random = Random(3);
    let vocab = model.config.model.vocab_size;
    let prompts: Vec<Vec<u32>> = (0..clients).map(|_| random.tokens(2, vocab)).collect();
    let requests = |base: u64| {
        prompts.iter().zip(base..).map(|(p, id)| greedy(id, p.clone(), 100).streaming()).collect::<Vec<_>>()
    };
    warm(&engine, &mut outbox, requests);
    for round in 0..2000 {
        let mut heard = vec![0; clients];
        let mut messages = 0;
        let mut listen = |until: usize| {
            while heard.iter().any(|count| *count < until) {
                // Only a message ends this wait.
                assert!(engine.wait(&mut outbox, PATIENCE), "the engine stopped");
                messages += usize::from(!outbox.tokens.is_empty());
                for event in &outbox.tokens {
                    heard[event.request as usize % clients] += 1;
                }
            }
        };
        engine.submit(requests((round * clients) as u64));
        // All requests are in once all have a token.
        listen(1);
        let taken = counted(|| listen(100));
        assert_eq!(taken, 0, "allocations for {clients} streams");
        // A busy machine may let many steps pass before this thread looks.
        if messages > 60 {
            return;
        }
    }
    panic!("{clients} streams: never saw 60 messages of a round");
}

// One test: threads of another would be counted too.
#[test]
fn steps_allocate_nothing_once_warm() {
    EXEMPT.set(true);
    check_the_counter();
    streams(64);
    let floats = [
        ("llama", DType::F32),
        ("micro", DType::Bf16),
        ("qwen3", DType::F16),
        ("deepseek-v3", DType::F32),
        ("gpt-oss-mxfp4", DType::Bf16),
    ];
    let floats = floats.map(|(name, dtype)| (name, build(dtype)));
    let integers = [
        ("micro", Quantization::Int8),
        ("qwen3", Quantization::Int4),
        ("deepseek-tiny", Quantization::Int8),
        ("qwen3-moe", Quantization::Int4),
    ]
    .map(|(name, quantization)| {
        (name, BuildConfig { quantization, kv_cache: KvCacheType::Int8, ..build(DType::Bf16) })
    });
    for (name, build) in floats.into_iter().chain(integers) {
        for (context_fmha, plain) in [(true, false), (false, true)] {
            let gemm_plugin = !plain || build.quantization.is_integer();
            let (dtype, quantization) = (build.dtype, build.quantization.name());
            let what = format!("{name} {dtype} {quantization} fmha {context_fmha} plugin {gemm_plugin}");
            let model = load(name, BuildConfig { context_fmha, gemm_plugin, tokens_per_block: 4, ..build.clone() });
            decode(&model, &what);
            let chunked =
                EngineOptions { max_num_tokens: Some(24), max_batch_size: Some(6), ..EngineOptions::default() };
            mixed(&model, chunked.clone(), &format!("{what} chunked"));
            if model.config.model.moe.is_some() {
                let perfect_router = Some(PerfectRouterOptions { ranks: 1, plan: Plan::Even });
                mixed(&model, EngineOptions { perfect_router, ..chunked.clone() }, &format!("{what} perfect router"));
            }
            let reusing = EngineOptions { prefix_reuse: true, cache: CacheSize::Blocks(28), ..chunked.clone() };
            let seen = mixed(&model, reusing, &format!("{what} reusing"));
            assert!(seen.reused > 0, "{what}: nothing was reused");
            let pausing = EngineOptions {
                policy: Policy::MaxUtilization,
                cache: CacheSize::Blocks(32),
                max_num_tokens: Some(80),
                ..chunked
            };
            let seen = mixed(&model, pausing, &format!("{what} pausing"));
            assert!(seen.pauses > 0, "{what}: nothing was paused");
        }
    }
}
