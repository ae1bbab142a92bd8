//! Starting on a GPU: weights, GEMM choices, buffers, the cache, graphs.

use std::sync::Arc;
use std::time::Instant;

use strobe_kernels_cuda::{
    CapturedGraph, CudaError, DeviceBuffer, Event, GemmPlugin, Gpu, KvDtype, LARGEST_VOCAB, Linear, PinnedBuffer,
    Profiler, RowOps, SampleOps, Spent, Tuned, UnfusedAttention, tune,
};
use strobe_model::program::Node;
use strobe_model::{ModelConfig, PerfectRouter};

use crate::cpu::qkv_shape;
use crate::engine_config::{BuildConfig, EngineConfig};
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::quantization::{KvCacheType, Quantization};
use crate::step::{StepInputs, StepLimits};

use super::attention::{AttentionOps, cache_width, latent_config, unfused_config};
use super::buffers::{Buffers, FEW_BANNED};
use super::experts::Experts;
use super::inputs::{self, Layout, PackOptions, Packed};
use super::ops::sites;
use super::weights::{self, DeviceWeights, device_bytes};
use super::{CudaBackend, CudaDevice, CudaFacts, Stage};

/// How a backend is set up.
pub struct CudaBackendOptions<'a> {
    /// The GPU and how to use it.
    pub device: &'a CudaDevice,
    /// Limits of a step.
    pub limits: StepLimits,
    /// Share of free memory for the cache, or the blocks asked for.
    pub cache: crate::CacheSize,
    /// Balanced logits for every step, to be used instead of the routers' from the start.
    pub perfect_router: Option<&'a PerfectRouter>,
    /// Told the bytes of weights done so far, often and while kernels are chosen and graphs captured too; answers whether
    /// to go on.
    pub progress: &'a mut dyn FnMut(u64) -> bool,
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

impl CudaBackend {
    /// Open the GPU, load weights, choose GEMMs, reserve everything a step needs, size the cache from what is left, and
    /// capture graphs.
    pub fn new(
        model: &LoadedModel,
        nodes: Arc<[Node]>,
        options: CudaBackendOptions<'_>,
    ) -> Result<CudaBackend, EngineError> {
        let (build, config, limits) = (&model.config.build, model.config.model.clone(), options.limits);
        check_model(&config, build)?;
        let mut times = Vec::new();
        let mut clock = Instant::now();
        let mut lap = |name: &'static str| {
            times.push((name, clock.elapsed().as_secs_f64() * 1e3));
            clock = Instant::now();
        };
        let gpu = Gpu::open(options.device.index)?;
        build.check_gpu()?;
        if build.quantization == Quantization::Fp8 && gpu.arch().number() < 89 {
            return Err(EngineError::option(
                "--quantization fp8",
                format!("needs a GPU of compute capability 8.9 or newer; {} is older", gpu.info().name),
            ));
        }
        lap("context and kernels");
        let precision = weights::precision(build.dtype);
        let needed = device_bytes(model);
        let (free, total) = gpu.memory()?;
        if needed > free {
            return Err(EngineError::Memory {
                what: format!("the weights of {} on {}", model.config.model_name, gpu.info().name),
                arithmetic: format!("{:.1} GiB needed, {:.1} of {:.1} GiB free", gib(needed), gib(free), gib(total)),
                remedy: "use a smaller model, --dtype bfloat16 or --quantization fp8, or free the GPU".into(),
            });
        }
        let weights = DeviceWeights::load(&gpu, model, &mut *options.progress)?;
        lap("weights");

        let plugin = if build.gemm_plugin { GemmPlugin::Auto } else { GemmPlugin::Disable };
        let mut linear = Linear::new(&gpu, precision, plugin)?;
        linear.reserve_maxima(limits.sampled, config.vocab_size)?;
        let sites = match options.device.measure {
            true => sites(&config, limits, build.quantization == Quantization::Fp8),
            false => Vec::new(),
        };
        let loaded = weights.bytes();
        let stored = options.device.choices.clone();
        let tuned = tune(&gpu, &mut linear, &sites, stored, || (options.progress)(loaded))?;
        lap("choosing GEMMs");

        let shape = qkv_shape(&config);
        let kv_dtype = if build.kv_cache == KvCacheType::Fp8 { KvDtype::Fp8 } else { KvDtype::Same };
        let block_tokens = build.cache_block_tokens();
        let before = gpu.memory()?.0;
        let mut attention = AttentionOps::new(&gpu, &config, precision, kv_dtype, block_tokens, 2 * limits.requests)?;
        let through_memory = unfused_config(&config, precision, kv_dtype, block_tokens);
        let unfused = if build.context_fmha { None } else { Some(UnfusedAttention::new(&gpu, through_memory)?) };
        let sample = SampleOps::new(&gpu, limits.sampled)?;
        let workspace_bytes = before.saturating_sub(gpu.memory()?.0);
        let table = limits.positions.div_ceil(block_tokens);
        let words = Layout::most(limits, table).next_multiple_of(4);
        let buffers = Buffers::new(
            &config,
            limits,
            precision,
            build.quantization == Quantization::Fp8,
            build.context_fmha,
            words,
        )?;
        // The activation of the layer before, and the rows that q, k and v were made of: their products have read them.
        attention.set_spent([&buffers.act, &buffers.normed].map(|buffer| Spent {
            memory: buffer.ptr(),
            bytes: buffer.bytes(),
            row: buffer.bytes() / limits.tokens.max(1),
        }));
        let experts = Experts::new(&gpu, &config, limits, precision, options.perfect_router)?;
        let expert_bytes = experts.as_ref().map_or(0, Experts::bytes);
        let counts = experts.as_ref().map_or(0, Experts::count);
        let stage = || -> Result<Stage, CudaError> {
            let expert_counts = PinnedBuffer::new(counts)?;
            let (packed, tokens) = (PinnedBuffer::new(words)?, PinnedBuffer::new(limits.sampled)?);
            let banned = PinnedBuffer::new(FEW_BANNED)?;
            Ok(Stage { packed, banned, tokens, expert_counts, done: Event::new(false)?, sampled: 0, what: "nothing" })
        };
        let stages = [stage()?, stage()?];
        lap("buffers");

        let kv_bytes = if build.kv_cache == KvCacheType::Fp8 { 1 } else { build.dtype.bytes() };
        let block_bytes = cache_width(&config) * block_tokens * kv_bytes;
        let (free, total) = gpu.memory()?;
        let arithmetic = |blocks: u64, needed: u64| {
            format!(
                "{blocks} KV cache blocks of {} bytes = {:.2} GiB, {:.2} of {:.1} GiB free beside weights {:.2} GiB and activations {:.2} GiB",
                block_bytes * config.num_hidden_layers,
                gib(needed),
                gib(free),
                gib(total),
                gib(weights.bytes()),
                gib(buffers.bytes() + expert_bytes)
            )
        };
        let per_block = (block_bytes * config.num_hidden_layers) as u64;
        let most = limits.requests * limits.positions.div_ceil(block_tokens);
        let blocks = match options.cache {
            crate::CacheSize::Blocks(blocks) => blocks,
            crate::CacheSize::FreeFraction(share) => {
                // Graphs and what libraries load later need room too.
                let spare = free.saturating_sub(GRAPH_RESERVE);
                ((spare as f64 * share / per_block as f64) as usize).min(most)
            }
        };
        let kv_total = per_block.saturating_mul(blocks as u64);
        if blocks == 0 || kv_total > free {
            return Err(EngineError::Memory {
                what: "the KV cache".into(),
                arithmetic: arithmetic(blocks.max(1) as u64, kv_total.max(per_block)),
                remedy: "use a smaller model or cache, lower --max-batch-size, --max-num-tokens or --max-seq-len, or free the GPU".into(),
            });
        }
        if blocks * block_tokens > i32::MAX as usize {
            return Err(EngineError::option(
                "--kv-cache-blocks",
                "is more than the GPU's kernels can number; lower it",
            ));
        }
        let kv = DeviceBuffer::new(kv_total as usize, "the KV cache")?;
        kv.fill(0)?;
        lap("KV cache");

        let profiler = Profiler::open(options.device.record, options.device.nvtx);
        let facts = CudaFacts {
            device: gpu.info().clone(),
            arch: gpu.arch().name(),
            kernels: gpu.cache().clone(),
            graph_buckets: Vec::new(),
            gemm: tuned.choices,
            gemm_measured: tuned.measured,
            start_ms: Vec::new(),
        };
        let mut backend = CudaBackend {
            pack: PackOptions {
                tokens_per_block: block_tokens,
                tile_rows: attention.tokens_per_tile(),
                context_fmha: build.context_fmha,
                heads: shape.heads,
            },
            kv_layer: (block_bytes * blocks) as u64,
            rows: RowOps::new(&gpu, precision)?,
            fp8: build.quantization == Quantization::Fp8,
            next: 0,
            oldest: 0,
            graphs: Vec::new(),
            graph_bytes: 0,
            blocking: options.device.blocking,
            config,
            nodes,
            limits,
            linear,
            attention,
            unfused,
            sample,
            weights,
            kv,
            kv_dtype,
            buffers,
            experts,
            stages,
            workspace_bytes,
            profiler,
            notes: options.device.note().into_iter().chain(tuned.notes).collect(),
            facts,
            gpu,
        };
        if options.device.replays_graphs() {
            backend.capture_graphs(|| (options.progress)(loaded))?;
        }
        lap("graphs");
        backend.facts.start_ms = times;
        Ok(backend)
    }

    /// One graph per batch size, largest first, so that smaller ones find memory pools that fit.
    fn capture_graphs(&mut self, mut go_on: impl FnMut() -> bool) -> Result<(), CudaError> {
        let before = self.gpu.memory()?.0;
        for &bucket in buckets(self.limits.requests.min(self.limits.tokens)).iter().rev() {
            if !go_on() {
                return Err(CudaError::Interrupted);
            }
            let packed = Packed {
                layout: Layout::decode(bucket),
                sampled: bucket,
                decode: bucket,
                all_sampled: true,
                one_span_each: true,
                ..Packed::default()
            };
            // A step of nothing but padding: writes no cache, attends to nothing.
            let mut words = vec![0; packed.layout.tables()];
            let step = StepInputs::empty();
            inputs::pack(&step, &self.pack, Some(bucket), &mut words);
            self.buffers.packed.write(0, &words)?;
            // Once outside a graph: libraries load code at first use.
            self.run_nodes(&packed)?;
            self.gpu
                .synchronize()
                .map_err(|error| error.while_waiting_for(|| format!("the first decode step of {bucket} rows")))?;
            let graph = CapturedGraph::capture(&self.gpu, || self.run_nodes(&packed))?;
            self.graphs.push((bucket, graph));
        }
        self.graphs.reverse();
        self.gpu.synchronize()?;
        self.graph_bytes = before.saturating_sub(self.gpu.memory()?.0);
        self.facts.graph_buckets = self.graphs.iter().map(|(bucket, _)| *bucket).collect();
        Ok(())
    }
}

/// Choose kernels for every product of an engine by measurement, without loading it, for as long as `go_on` says so.
pub fn choose_gemms(index: u32, config: &EngineConfig, go_on: impl FnMut() -> bool) -> Result<Tuned, EngineError> {
    let build = &config.build;
    check_model(&config.model, build)?;
    let gpu = Gpu::open(index)?;
    let plugin = if build.gemm_plugin { GemmPlugin::Auto } else { GemmPlugin::Disable };
    let mut linear = Linear::new(&gpu, weights::precision(build.dtype), plugin)?;
    let batch = build.max_batch_size.min(build.max_num_tokens);
    let limits =
        StepLimits { tokens: build.max_num_tokens, sampled: batch, requests: batch, positions: build.max_seq_len };
    linear.reserve_maxima(limits.sampled, config.model.vocab_size)?;
    Ok(tune(&gpu, &mut linear, &sites(&config.model, limits, build.quantization == Quantization::Fp8), None, go_on)?)
}

/// Free memory that is not given to the cache: graphs and code that libraries load later.
const GRAPH_RESERVE: u64 = 1 << 30;

/// Batch sizes that graphs are captured for: fine steps where a step is short, coarser ones where padding costs little.
pub fn buckets(most: usize) -> Vec<usize> {
    let mut sizes = vec![1, 2, 4];
    let mut size = 8;
    while size < most {
        sizes.push(size);
        size += match size {
            0..128 => 8,
            128..512 => 32,
            512..1024 => 64,
            _ => 128,
        };
    }
    sizes.retain(|&size| size < most);
    sizes.push(most);
    sizes
}

/// Refuses models that have no kernels here.
fn check_model(config: &ModelConfig, build: &BuildConfig) -> Result<(), EngineError> {
    if config.vocab_size > LARGEST_VOCAB {
        let vocab = config.vocab_size;
        let problem =
            format!("draws from {LARGEST_VOCAB} tokens at most, and this model has {vocab}; use --device cpu");
        return Err(EngineError::option("--device cuda", problem));
    }
    if let Some(latent) = latent_config(config, weights::precision(build.dtype), build.cache_block_tokens()) {
        // Before anything is loaded.
        latent.check()?;
        if config.attention_sinks || config.sliding_window.iter().any(Option::is_some) {
            let problem = "has no kernels for latent attention with sinks or windows; use --device cpu";
            return Err(EngineError::option("--device cuda", problem));
        }
        let fp8 = |option: &str| {
            let problem = "has no kernels for latent attention on a GPU; use the model's own type";
            Err(EngineError::option(format!("{option} fp8"), problem))
        };
        if build.quantization == Quantization::Fp8 {
            return fp8("--quantization");
        }
        if build.kv_cache == KvCacheType::Fp8 {
            return fp8("--kv-cache-dtype");
        }
    }
    if config.moe.is_some() && build.quantization == Quantization::Fp8 {
        let problem = "has no kernels for experts of 8 bits; use --quantization none";
        return Err(EngineError::option("--quantization fp8", problem));
    }
    Ok(())
}
