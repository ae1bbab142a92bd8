//! A busy engine: requests of all lengths arrive and are aborted at random while blocks run out. Every token must be
//! what the request would have got alone, and no block may be lost.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use strobe_kernels_cpu::{Cpu, Tier};
use strobe_kernels_cuda::{CudaError, GemmChoices};
use strobe_model::DType;

use super::models::{build, gap, on_cpu, tolerance, type_name};
use super::{Outcome, Random, Rig};
use crate::cuda::CudaDevice;
use crate::device::Device;
use crate::engine_config::BuildConfig;
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::scheduler::{Policy, RequestId};
use crate::{CacheSize, Engine, EngineOptions, FinishReason, Request, SamplingParams, eval};

/// Few enough that eight requests don't fit.
const BLOCKS: usize = 30;
const BLOCK_TOKENS: usize = 16;
const BATCH: usize = 8;
const REQUESTS: u64 = 48;
/// Where a few are enough; they still outgrow the cache.
const FEW_REQUESTS: u64 = 12;
/// An engine that says nothing for this long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// How an engine is built and run.
#[derive(Clone, Copy)]
struct Setup {
    model: &'static str,
    dtype: DType,
    policy: Policy,
    graphs: bool,
    overlap: bool,
    context_fmha: bool,
    reuse: bool,
}

const PLAIN: Setup = Setup {
    model: "micro",
    dtype: DType::Bf16,
    policy: Policy::MaxUtilization,
    graphs: true,
    overlap: true,
    context_fmha: true,
    reuse: false,
};

const SETUPS: [Setup; 10] = [
    PLAIN,
    Setup { graphs: false, ..PLAIN },
    Setup { overlap: false, ..PLAIN },
    Setup { graphs: false, overlap: false, ..PLAIN },
    Setup { policy: Policy::GuaranteedNoEvict, ..PLAIN },
    Setup { reuse: true, ..PLAIN },
    Setup { context_fmha: false, ..PLAIN },
    Setup { dtype: DType::F16, ..PLAIN },
    Setup { dtype: DType::F32, ..PLAIN },
    // In 16 bits a row between two experts takes another one in a batch than alone.
    Setup { model: "moe-tiny", dtype: DType::F32, ..PLAIN },
];

impl Setup {
    fn name(&self) -> String {
        let on = |on: bool| if on { "on" } else { "off" };
        format!(
            "{}, {}, graphs {}, overlap {}, fused attention {}, reuse {}",
            self.model,
            self.policy.name(),
            on(self.graphs),
            on(self.overlap),
            on(self.context_fmha),
            on(self.reuse)
        )
    }

    /// Chunks: a step takes less than the longest prompt.
    fn build(&self) -> BuildConfig {
        let whole = build(self.dtype, BLOCKS * BLOCK_TOKENS);
        BuildConfig { max_batch_size: BATCH, max_num_tokens: 96, context_fmha: self.context_fmha, ..whole }
    }

    fn options(&self) -> EngineOptions {
        EngineOptions {
            policy: self.policy,
            cache: CacheSize::Blocks(BLOCKS),
            prefix_reuse: self.reuse,
            overlap: self.overlap,
            ..EngineOptions::default()
        }
    }
}

/// A request, and after how many tokens it is aborted.
#[derive(Clone)]
struct Visitor {
    request: Request,
    abort_after: Option<usize>,
}

fn visitors(random: &mut Random, requests: u64, vocab: usize) -> Vec<Visitor> {
    let common = random.tokens(100, vocab);
    (0..requests)
        .map(|id| {
            // Some are short, some fill many blocks, some begin alike, one needs nothing but its first token.
            let length = random.pick(&[1, 2, 15, 16, 17, 40, 97, 150, 260]) + random.below(8);
            let mut prompt = random.tokens(length, vocab);
            if random.below(3) == 0 {
                let alike = length.min(common.len());
                prompt[..alike].copy_from_slice(&common[..alike]);
            }
            let max_tokens = random.pick(&[1, 2, 7, 30, 90]) + random.below(4);
            let abort_after = (random.below(5) == 0).then(|| random.below(max_tokens));
            Visitor { request: greedy(id, prompt, max_tokens), abort_after }
        })
        .collect()
}

fn greedy(id: RequestId, prompt: Vec<u32>, max_tokens: usize) -> Request {
    let params = SamplingParams { max_tokens: max_tokens as u32, ignore_eos: true, ..SamplingParams::default() };
    Request::new(id, prompt, params)
}

/// What came of each request.
#[derive(Default)]
struct Heard {
    tokens: BTreeMap<RequestId, Vec<u32>>,
    finished: BTreeMap<RequestId, FinishReason>,
    pauses: u32,
}

impl Heard {
    /// Listen once; an engine that stopped or is silent for too long is an error.
    fn listen(&mut self, engine: &Engine, last_word: &mut Instant) -> Result<(), EngineError> {
        let mut outbox = engine.outbox();
        let running = engine.wait(&mut outbox, Duration::from_millis(2));
        if !outbox.tokens.is_empty() || !outbox.finished.is_empty() {
            *last_word = Instant::now();
        }
        for event in &outbox.tokens {
            self.tokens.entry(event.request).or_default().push(event.token);
        }
        for event in &outbox.finished {
            self.pauses += event.pauses;
            if self.finished.insert(event.request, event.reason).is_some() {
                return Err(EngineError::Stopped(format!("request {} ended twice", event.request)));
            }
        }
        if let Some((request, why)) = outbox.rejected.first() {
            return Err(EngineError::Stopped(format!("request {request} was rejected: {why:?}")));
        }
        if last_word.elapsed() > PATIENCE {
            return Err(EngineError::Stopped(format!("nothing happened for {} s", PATIENCE.as_secs())));
        }
        if !running {
            // The reason comes out of `shutdown`.
            return Err(EngineError::Stopped("the engine ended by itself".into()));
        }
        Ok(())
    }
}

/// Run `visitors` as they come and go, then one request that needs every block there is.
fn run(engine: Engine, visitors: &[Visitor], random: &mut Random, vocab: usize) -> Result<Heard, EngineError> {
    let result = converse(&engine, visitors, random, vocab);
    let ended = engine.shutdown();
    match result {
        // Why an engine stopped is known to its own thread only.
        Err(problem) => Err(ended.err().unwrap_or(problem)),
        Ok(heard) => ended.map(|_| heard),
    }
}

fn converse(engine: &Engine, visitors: &[Visitor], random: &mut Random, vocab: usize) -> Result<Heard, EngineError> {
    let mut heard = Heard::default();
    let mut last_word = Instant::now();
    let mut waiting = visitors.iter();
    let mut aborted = vec![false; visitors.len()];
    while heard.finished.len() < visitors.len() {
        // Bursts and quiet times.
        if random.below(3) == 0 {
            let burst = random.between(1, 9);
            engine.submit(waiting.by_ref().take(burst).map(|visitor| visitor.request.clone()));
        }
        heard.listen(engine, &mut last_word)?;
        for (visitor, aborted) in visitors.iter().zip(&mut aborted) {
            let id = visitor.request.id;
            let said = heard.tokens.get(&id).map_or(0, Vec::len);
            if !*aborted && visitor.abort_after.is_some_and(|after| said > after) {
                *aborted = true;
                engine.abort(id);
            }
        }
    }
    let prompt = random.tokens(BLOCKS * BLOCK_TOKENS - 8, vocab);
    engine.submit([greedy(LAST, prompt, 8)]);
    while !heard.finished.contains_key(&LAST) {
        heard.listen(engine, &mut last_word)?;
    }
    Ok(heard)
}

/// The request that needs every block.
const LAST: RequestId = RequestId::MAX;

/// One at a time, each to its end: what every request must get.
fn alone(engine: Engine, visitors: &[Visitor]) -> Result<Heard, EngineError> {
    let listen = || -> Result<Heard, EngineError> {
        let (mut heard, mut last_word) = (Heard::default(), Instant::now());
        for visitor in visitors {
            engine.submit([visitor.request.clone()]);
            while !heard.finished.contains_key(&visitor.request.id) {
                heard.listen(&engine, &mut last_word)?;
            }
        }
        Ok(heard)
    };
    let result = listen();
    let ended = engine.shutdown();
    result.map_err(|problem| ended.err().unwrap_or(problem))
}

/// Logits of a text, one row per token.
type Rows = Vec<Vec<f32>>;

/// Compare what the busy engine said with what each request got alone, and both with the CPU's logits of the same text.
/// The error is how far a chosen token may be from the best one, relative to the row of logits.
fn judge(
    visitors: &[Visitor],
    heard: &Heard,
    alone: &Heard,
    logits: &mut dyn FnMut(&[u32]) -> Result<Rows, EngineError>,
) -> Result<(f64, usize, Option<String>), EngineError> {
    let nothing = Vec::new();
    let (mut worst, mut compared) = (0f64, 0);
    for Visitor { request, abort_after } in visitors {
        let id = request.id;
        let (said, wanted) = (heard.tokens.get(&id).unwrap_or(&nothing), request.params.max_tokens as usize);
        let whole = said.len() == wanted && heard.finished.get(&id) == Some(&FinishReason::Length);
        let cut = abort_after.is_some_and(|after| (after + 1..=wanted).contains(&said.len()))
            && heard.finished.get(&id) == Some(&FinishReason::Aborted);
        if !whole && !cut {
            let reason = heard.finished.get(&id).map_or("not at all", |reason| reason.name());
            let problem = format!("request {id} ended ({reason}) after {} of {wanted} tokens", said.len());
            return Ok((worst, compared, Some(problem)));
        }
        let same_alone = alone.tokens.get(&id).unwrap_or(&nothing);
        let text: Vec<u32> = request.prompt.iter().chain(said.iter()).copied().collect();
        // The last token's successor is of no interest.
        let rows = logits(&text[..text.len() - 1])?;
        for (step, (&token, row)) in said.iter().zip(rows.iter().skip(request.prompt.len() - 1)).enumerate() {
            worst = worst.max(gap(row, best(row), token));
            compared += 1;
            let other = same_alone.get(step).copied();
            if said[..step] == same_alone[..step.min(same_alone.len())] && other != Some(token) {
                // The first token that differs: both must be as good as the best.
                worst = worst.max(other.map_or(f64::INFINITY, |other| gap(row, best(row), other)));
            }
        }
    }
    let last = heard.tokens.get(&LAST).map_or(0, Vec::len);
    let problem = (last != 8).then(|| format!("a request for every block got {last} of 8 tokens: blocks are lost"));
    Ok((worst, compared, problem))
}

fn best(row: &[f32]) -> u32 {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(token, _)| token as u32)
}

pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let (index, measure) = (rig.gpu.info().index, !rig.quick);
    let device = move |graphs, choices| Device::Cuda(CudaDevice { graphs, choices, measure, ..CudaDevice::new(index) });
    let alive = || rig.gpu.synchronize().is_ok();
    let (setups, requests) = if rig.quick { (&SETUPS[..1], FEW_REQUESTS) } else { (&SETUPS[..], REQUESTS) };
    Ok(soak(&device, &alive, setups, requests, &mut rig.random, rig.cpu.threads()))
}

/// A model and the type of its weights.
type Kind = (&'static str, DType);

/// Makes a device with or without graphs that starts from GEMM choices made before.
type MakeDevice<'a> = &'a dyn Fn(bool, Option<GemmChoices>) -> Device;

fn soak(
    device: MakeDevice<'_>,
    alive: &dyn Fn() -> bool,
    setups: &[Setup],
    requests: u64,
    random: &mut Random,
    threads: usize,
) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    // Choosing takes longer than the soak itself, and engines of one type choose the same.
    let mut chosen: Vec<(Kind, GemmChoices)> = Vec::new();
    let mut known: Vec<(Kind, LoadedModel, Vec<Visitor>, Heard)> = Vec::new();
    for setup in setups {
        let kind = (setup.model, setup.dtype);
        if !alive() {
            break;
        }
        let mut attempt = || -> Result<(f64, usize, Option<String>, u32), EngineError> {
            let place = match known.iter().position(|(known, ..)| *known == kind) {
                Some(place) => place,
                None => {
                    let model = on_cpu(setup.model, setup.build(), threads)?;
                    let visitors = visitors(random, requests, model.config.model.vocab_size);
                    let options = EngineOptions { max_batch_size: Some(1), overlap: false, ..setup.options() };
                    let one = alone(Engine::start(device(setup.graphs, None), &model, options)?, &visitors)?;
                    known.push((kind, model, visitors, one));
                    known.len() - 1
                }
            };
            let (_, model, visitors, one) = &known[place];
            let mut config = model.config.clone();
            config.build = setup.build();
            let built = LoadedModel { config, weights: model.weights.clone(), tokenizer: None, dir: None };
            let choices = chosen.iter().find(|(known, _)| *known == kind).map(|(_, choices)| choices.clone());
            let engine = Engine::start(device(setup.graphs, choices), &built, setup.options())?;
            if let Some(facts) = engine.info().device.cuda() {
                chosen.push((kind, facts.gemm.clone()));
            }
            let heard = run(engine, visitors, random, built.config.model.vocab_size)?;
            let mut logits = |text: &[u32]| Ok(eval::logits(Cpu::new(Tier::detect(), threads), model, text, 0)?.logits);
            let (error, compared, problem) = judge(visitors, &heard, one, &mut logits)?;
            Ok((error, compared, problem, heard.pauses))
        };
        let (error, compared, problem, pauses) =
            attempt().unwrap_or_else(|error| (f64::INFINITY, 0, Some(error.to_string()), 0));
        outcomes.push(Outcome {
            op: "soak".into(),
            case: format!("{}: {compared} tokens, {pauses} pauses", setup.name()),
            dtype: type_name(setup.dtype).into(),
            error,
            // Two tokens may change places when each is off by as much as it may be.
            tolerance: 2.0 * tolerance(setup.dtype),
            problem,
        });
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The soak itself, on the CPU engine, which has its own tests: nothing may be found.
    #[test]
    fn the_cpu_engine_passes() {
        let device = |_, _| Device::Cpu(Cpu::new(Tier::detect(), 2));
        let plain = Setup { dtype: DType::F32, ..PLAIN };
        let setups = [plain, Setup { overlap: false, reuse: true, ..plain }];
        let outcomes = soak(&device, &|| true, &setups, REQUESTS, &mut Random::new(5), 2);
        assert_eq!(outcomes.len(), 2);
        for outcome in outcomes {
            assert!(outcome.passes(), "{outcome:?}");
            assert!(!outcome.case.contains(" 0 pauses"), "the pool is too large to be tried: {}", outcome.case);
        }
    }

    fn one(tokens: &[u32], reason: FinishReason) -> Heard {
        let mut heard = Heard::default();
        heard.tokens.insert(0, tokens.to_vec());
        heard.finished.insert(0, reason);
        heard.tokens.insert(LAST, vec![0; 8]);
        heard
    }

    /// Logits of a made-up model in which token n + 1 follows token n, and token n + 2 is a close second for n = 1.
    fn counting(text: &[u32]) -> Result<Rows, EngineError> {
        let row = |&token: &u32| {
            let mut row = vec![0.0; 10];
            row[(token as usize + 1) % 10] = 1.0;
            row[(token as usize + 2) % 10] = if token == 1 { 0.999 } else { 0.5 };
            row
        };
        Ok(text.iter().map(row).collect())
    }

    #[test]
    fn wrong_tokens_missing_tokens_and_lost_blocks_are_found() {
        let visitors = [Visitor { request: greedy(0, vec![0], 3), abort_after: None }];
        let good = one(&[1, 2, 3], FinishReason::Length);
        let judge = |heard: &Heard, alone: &Heard| judge(&visitors, heard, alone, &mut counting).unwrap();
        assert_eq!(judge(&good, &good), (0.0, 3, None));
        let tie = one(&[1, 3, 4], FinishReason::Length);
        let (error, _, problem) = judge(&tie, &good);
        assert!(error < 1e-2 && problem.is_none(), "{error} {problem:?}");
        let wrong = one(&[1, 2, 7], FinishReason::Length);
        assert!(judge(&wrong, &good).0 > 0.5);
        assert!(judge(&good, &wrong).0 > 0.5, "what it got alone is wrong");
        assert!(judge(&one(&[1, 2], FinishReason::Length), &good).2.unwrap().contains("2 of 3"));
        assert!(judge(&one(&[1, 2], FinishReason::Aborted), &good).2.is_some(), "nobody asked for that");
        let mut lost = one(&[1, 2, 3], FinishReason::Length);
        lost.tokens.remove(&LAST);
        assert!(judge(&lost, &good).2.unwrap().contains("blocks are lost"));
    }
}
