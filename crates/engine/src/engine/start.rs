//! Starting an engine: its limits, its cache, its device.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::{Arc, Condvar, Mutex};

use strobe_kernels_cpu::Tier;
use strobe_model::program::{Node, program};
use strobe_model::{Balance, ModelConfig, PerfectRouter};

use crate::block_pool::BlockPool;
use crate::clock::Clock;
use crate::cpu::{CpuBackend, CpuBackendOptions};
use crate::cpu_sizes::activation_bytes;
use crate::cuda::{CudaBackend, CudaBackendOptions};
use crate::device::{Device, DeviceFacts, Runner};
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::iteration::IterationLimits;
use crate::memory;
use crate::recorder::{Recorder, StepTimes};
use crate::scheduler::{Plan, Scheduler, SchedulerConfig};
use crate::step::{Backend, StepInputs, StepLimits};

use super::flight::Flight;
use super::{CacheSize, Core, EngineInfo, EngineOptions, GPU_PROBE_BLOCK, Mailbox, Outbox, Shared};

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
        let program_options = build.program_options(device.cpu_tier());
        let nodes: Arc<[Node]> = program(&config, program_options).into();
        check_cache_options(&options)?;
        let perfect_router = perfect_router(&config, &options, tokens)?;
        let balance = perfect_router.as_ref().map(|router| *router.balance());
        let counts = config.moe.as_ref().map(|moe| (config.num_hidden_layers, moe.num_experts));
        let (backend, blocks, kernels, facts) = match device {
            Device::Cpu(cpu) => {
                build.check_cpu()?;
                let blocks = cache_blocks(model, &options, limits, cpu.tier())?;
                let facts = DeviceFacts::Cpu { tier: cpu.tier(), threads: cpu.threads() };
                let kv = build.cpu_kv_type(cpu.tier())?;
                let mut backend = CpuBackend::new(
                    cpu,
                    config.clone(),
                    model.weights.clone(),
                    &CpuBackendOptions {
                        limits,
                        tokens_per_block: block_tokens,
                        blocks,
                        dtype: build.dtype,
                        kv,
                        program: program_options,
                    },
                )?;
                if let Some(router) = perfect_router {
                    backend.set_perfect_router(router);
                }
                let kernels: Arc<[String]> = nodes.iter().map(|n| backend.kernel_name(n)).collect();
                (Runner::Cpu(Box::new(backend)), blocks, kernels, facts)
            }
            Device::Cuda(device) => {
                let setup = CudaBackendOptions {
                    device: &device,
                    limits,
                    cache: options.cache,
                    perfect_router: perfect_router.as_ref(),
                    progress,
                };
                let mut backend = CudaBackend::new(model, nodes.clone(), setup)?;
                let said = backend.notes();
                if options.probe_recorder && !backend.profiler().records() {
                    let problem = format!("finds no recorder to measure: {}", said.join("; "));
                    return Err(EngineError::option("--measure-profiler-overhead", problem));
                }
                notes.extend(said);
                let (blocks, facts) = (backend.blocks(), DeviceFacts::Cuda(Box::new(backend.facts().clone())));
                let kernels: Arc<[String]> = nodes.iter().map(|node| node.name.to_string()).collect();
                (Runner::Cuda(Box::new(backend)), blocks, kernels, facts)
            }
        };
        let clock = Clock::start();
        let operands =
            if facts.cuda().is_some() { build.gpu_operands(&model.config.model) } else { build.cpu_operands() };
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
            experts: counts,
            perfect_router: balance,
            notes,
        };
        let counts = info.expert_counts();
        let scheduler = Scheduler::new(info.scheduler, BlockPool::new(blocks, block_tokens, options.prefix_reuse));
        let mailbox = Mailbox { commands: Vec::new(), outbox: Outbox::with_room(counts), news: false, stopped: false };
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
            inputs: StepInputs::new(limits, block_tokens, operands),
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
            spare_flights: (0..2).map(|_| Flight::with_room(batch, counts)).collect(),
            leaving: Vec::with_capacity(batch),
            experts_used: Vec::with_capacity(config.num_hidden_layers),
            depth: usize::from(options.overlap),
            pass: StepTimes::default(),
            last_end: 0,
            statm: File::open("/proc/self/statm").ok(),
            host: None,
            #[cfg(feature = "handicap")]
            handicap: crate::handicap::from_env()?,
            info,
            config,
            backend,
            scheduler,
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

/// Blocks of the cache, after checking that they fit the memory of this machine.
fn cache_blocks(
    model: &LoadedModel,
    options: &EngineOptions,
    limits: StepLimits,
    tier: Tier,
) -> Result<usize, EngineError> {
    let build = &model.config.build;
    let config = &model.config.model;
    let block_tokens = build.cache_block_tokens();
    let geometry = strobe_kernels_cpu::KvGeometry {
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        tokens_per_block: block_tokens,
        blocks: 1,
        kind: build.cpu_kv_type(tier)?,
    };
    let block_bytes = geometry.bytes_per_layer() as u64 * config.num_hidden_layers as u64;
    let most = limits.requests * build.max_seq_len.div_ceil(block_tokens);
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    // Mapped weights count as available memory until they are read, so they are set aside as well.
    let mapped = if model.weights.is_mapped() { model.weights.total_bytes() } else { 0 };
    let activations = activation_bytes(config, limits, build, tier);
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

/// Block numbers are 32 bits wide.
const MOST_BLOCKS: usize = (u32::MAX - 1) as usize;
