//! Requests that stream: their client hears of every step, in one message for all of them, and nobody else pays for it.

mod common;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use common::{PATIENCE, Random, build, greedy, load, run};
use strobe_engine::{BuildConfig, Engine, EngineOptions, LoadedModel, Outbox, Request, RequestId};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;

const OUTPUT: u32 = 300;

fn cpu() -> Cpu {
    Cpu::new(Tier::detect(), 2)
}

fn model() -> LoadedModel {
    load("micro", BuildConfig { max_seq_len: 512, ..build(DType::F32) })
}

fn requests(model: &LoadedModel) -> Vec<Request> {
    let mut random = Random(5);
    let prompt = |id: u64, random: &mut Random| random.tokens(3 + 4 * id as usize, model.config.model.vocab_size);
    (0..4).map(|id| greedy(id, prompt(id, &mut random), OUTPUT)).collect()
}

type Tokens = BTreeMap<RequestId, Vec<u32>>;

/// Messages of a run: whether each tells of an end, and the tokens of all of them.
#[derive(Default)]
struct Messages {
    ends: Vec<bool>,
    tokens: Tokens,
    ended: usize,
}

/// An idle engine speaks up, and tokens may have come when somebody looks: at its start, and once the measurement began.
const IDLE: usize = 2;

impl Messages {
    /// Messages with tokens, but no end.
    fn early(&self) -> usize {
        self.ends.iter().filter(|end| !**end).count()
    }

    fn take(&mut self, outbox: &Outbox) {
        if outbox.tokens.is_empty() {
            return;
        }
        let produced: u32 = outbox.iterations.iter().map(|record| record.new_tokens).sum();
        assert_eq!(produced as usize, outbox.tokens.len(), "whoever hears of tokens finds their iterations, whole");
        self.ends.push(!outbox.finished.is_empty());
        self.ended += outbox.finished.len();
        for event in &outbox.tokens {
            self.tokens.entry(event.request).or_default().push(event.token);
        }
    }
}

/// Hear `requests` to their end on a thread that sleeps until it is woken.
fn heard(model: &LoadedModel, options: EngineOptions, requests: Vec<Request>) -> Messages {
    let engine = Engine::start(cpu(), model, options).unwrap();
    engine.begin_measurement(Vec::new());
    let (count, mut outbox, mut messages) = (requests.len(), engine.outbox(), Messages::default());
    engine.submit(requests);
    let begin = Instant::now();
    while messages.ended < count {
        assert!(engine.wait(&mut outbox, PATIENCE), "the engine stopped");
        assert!(begin.elapsed() < PATIENCE, "nobody was woken");
        messages.take(&outbox);
    }
    messages
}

#[test]
fn one_that_streams_is_heard_of_before_it_ends_and_others_are_not() {
    let model = model();
    for overlap in [false, true] {
        let options = || EngineOptions { overlap, ..EngineOptions::default() };
        let expected = run(cpu(), &model, options(), requests(&model)).tokens;

        let quiet = heard(&model, options(), requests(&model));
        assert_eq!(quiet.tokens, expected);
        let early = quiet.early();
        assert!(early <= IDLE, "{early} messages came before an end although nobody streams");

        for streaming in [vec![0], vec![0, 1, 2, 3]] {
            let asks = |request: Request| {
                if streaming.contains(&request.id) { request.streaming() } else { request }
            };
            let streamed = heard(&model, options(), requests(&model).into_iter().map(asks).collect());
            assert_eq!(streamed.tokens, expected, "streaming changes nothing but who is woken when");
            let early = streamed.early();
            assert!(early > IDLE, "{early} of {} messages came before an end", streamed.ends.len());
        }
    }
}

/// Wakes a thread, as an executor would wake a task.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Run a future to its end on this thread, which sleeps until it is woken.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let begin = Instant::now();
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        std::thread::park_timeout(PATIENCE);
        assert!(begin.elapsed() < PATIENCE, "nobody was woken");
    }
}

#[test]
fn a_task_is_woken_by_every_step() {
    let model = model();
    let expected = run(cpu(), &model, EngineOptions::default(), requests(&model)).tokens;
    let engine = Engine::start(cpu(), &model, EngineOptions::default()).unwrap();
    engine.begin_measurement(Vec::new());
    engine.submit(requests(&model).into_iter().map(Request::streaming));
    let messages = block_on(async {
        let (mut outbox, mut messages) = (engine.outbox(), Messages::default());
        while messages.ended < 4 {
            let running = std::future::poll_fn(|task| engine.poll_wait(task, &mut outbox)).await;
            assert!(running, "the engine stopped");
            messages.take(&outbox);
        }
        messages
    });
    assert_eq!(messages.tokens, expected);
    assert!(messages.early() > IDLE, "{} messages", messages.ends.len());
}
