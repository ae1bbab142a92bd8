//! Starting an engine: its limits, its cache, its device.

use std::sync::Arc;

use strobe_model::{Balance, ModelConfig, PerfectRouter};

use crate::backend::DeviceRecorder;
use crate::block_pool::BlockPool;
use crate::clock::Clock;
use crate::device::{Device, Ready, Setup};
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::iteration::IterationLimits;
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::step::{StepInputs, StepLimits};

use super::flight::Flights;
use super::mailbox::Shared;
use super::measure::Measure;
use super::requests::Requests;
use super::run::Core;
use super::{CacheSize, EngineInfo, EngineOptions, Outbox};

impl Core {
    pub(super) fn new(
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
                "with {batch} requests running, an iteration of {tokens} tokens leaves less than one chunk of {unit} for prefill: long prompts wait until requests end; raise --max-num-tokens or lower --max-batch-size"
            ));
        }
        if options.prefix_reuse && !build.paged_kv_cache {
            let problem = "needs an engine with a paged KV cache; build with --paged-kv-cache enable";
            return Err(EngineError::option("prefix reuse", problem));
        }
        let limits = StepLimits { tokens, sampled: batch, requests: batch, positions: build.max_seq_len };
        let block_tokens = build.cache_block_tokens();
        check_cache_options(&options)?;
        let perfect_router = perfect_router(&config, &options, tokens)?;
        let balance = perfect_router.as_ref().map(|router| *router.balance());
        let cache = device.cache_size(model, limits, options.cache)?;
        let Ready { mut backend, nodes, kernels, operands, blocks } =
            device.open(model, Setup { limits, cache, perfect_router, progress })?;
        let facts = backend.facts();
        let said = backend.notes();
        if options.probe_recorder && facts.cuda().is_some() && backend.recorder() == DeviceRecorder::Absent {
            let problem = format!("finds no recorder to measure: {}", said.join("; "));
            return Err(EngineError::option("--measure-profiler-overhead", problem));
        }
        notes.extend(said);
        let clock = Clock::start();
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
            program: nodes,
            clock,
            experts: config.moe.as_ref().map(|moe| (config.num_hidden_layers, moe.num_experts)),
            perfect_router: balance,
            notes,
        };
        let pool = BlockPool::new(blocks, block_tokens, options.prefix_reuse);
        let probe = options.probe_recorder.then_some(info.device.probe_block());
        Ok(Core {
            shared: Arc::new(Shared::new(Outbox::with_room(info.expert_counts()))),
            backend,
            inputs: StepInputs::new(limits, block_tokens, operands),
            requests: Requests::new(Scheduler::new(info.scheduler, pool), options.eos_ids, config.vocab_size),
            flights: Flights::new(batch, 2),
            measure: Measure::new(config, probe),
            info,
        })
    }
}

/// Balanced logits for every step the engine can run.
fn perfect_router(
    config: &ModelConfig,
    options: &EngineOptions,
    tokens: usize,
) -> Result<Option<PerfectRouter>, EngineError> {
    let Some(asked) = options.perfect_router else { return Ok(None) };
    let Some(moe) = &config.moe else {
        let problem = format!("needs an MoE model; {} has no experts", config.architecture);
        return Err(EngineError::option("--perfect-router", problem));
    };
    let balance = Balance {
        method: moe.routing,
        experts: moe.num_experts,
        k: moe.experts_per_token,
        ranks: asked.ranks,
        rank: 0,
        plan: asked.plan,
    };
    Ok(Some(PerfectRouter::new(balance, tokens)?))
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

/// Block numbers are 32 bits wide.
const MOST_BLOCKS: usize = (u32::MAX - 1) as usize;
