//! Starting on a GPU: weights, GEMM choices, buffers, the cache, graphs.

use std::sync::Arc;
use std::time::Instant;

use strobe_kernels_cuda::{
    CapturedGraph, CudaError, DeviceBuffer, DeviceInfo, Event, GemmPlugin, Gpu, KvDtype, LARGEST_VOCAB, Linear,
    PinnedBuffer, Profiler, RowOps, SampleOps, Spent, Tuned, UnfusedAttention, tune,
};
use strobe_model::program::Node;
use strobe_model::{ModelConfig, PerfectRouter};

use crate::backend::qkv_shape;
use crate::engine::CacheSize;
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
use super::{CudaBackend, CudaDevice, CudaFacts, DecodeGraph, Stage};

/// How a backend is set up.
pub struct CudaBackendOptions<'a> {
    /// The GPU and how to use it.
    pub device: &'a CudaDevice,
    /// Limits of a step.
    pub limits: StepLimits,
    /// Share of free memory for the cache, or the blocks asked for.
    pub cache: CacheSize,
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
        let gpu = open(options.device.index, build, &|| true)?;
        lap("context and kernels");
        let precision = weights::precision(build.dtype);
        let needed = device_bytes(model);
        let (free, total) = gpu.memory()?;
        if needed > free {
            return Err(EngineError::Memory {
                what: format!("the weights of {} on {}", model.config.model_name, gpu.info().name),
                arithmetic: format!("{:.1} GiB needed, {:.1} of {:.1} GiB free", gib(needed), gib(free), gib(total)),
                remedy: smaller_weights(build, &config, gpu.info()).into(),
            });
        }
        let weights = DeviceWeights::load(&gpu, model, &mut *options.progress)?;
        weights.check(&nodes, build.quantization == Quantization::Fp8)?;
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
        let workspace_bytes = linear.workspace_bytes() + before.saturating_sub(gpu.memory()?.0);
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
        // SAFETY: both stay allocated as long as `attention`, and no later op reads them before one has written them again.
        unsafe {
            attention.set_spent([&buffers.act, &buffers.normed].map(|buffer| Spent {
                memory: buffer.ptr(),
                bytes: buffer.bytes(),
                row: buffer.bytes() / limits.tokens.max(1),
            }))
        };
        let experts = Experts::new(&gpu, &config, limits, precision, options.perfect_router)?;
        let expert_bytes = experts.as_ref().map_or(0, Experts::bytes);
        let counts = experts.as_ref().map_or(0, Experts::count);
        let stage = || -> Result<Stage, CudaError> {
            let expert_counts = PinnedBuffer::new(counts)?;
            let (packed, tokens) = (PinnedBuffer::new(words)?, PinnedBuffer::new(limits.sampled)?);
            let banned = PinnedBuffer::new(FEW_BANNED)?;
            Ok(Stage {
                packed,
                banned,
                tokens,
                expert_counts,
                done: Event::new(false)?,
                sampled: 0,
                what: "nothing",
                recorded: None,
                experts_used: Vec::with_capacity(config.num_hidden_layers),
            })
        };
        let stages = [stage()?, stage()?];
        lap("buffers");

        let kv_bytes = if build.kv_cache == KvCacheType::Fp8 { 1 } else { build.dtype.bytes() };
        let block_bytes = cache_width(&config) * block_tokens * kv_bytes;
        let (free, total) = gpu.memory()?;
        let room = CacheRoom {
            free,
            total,
            weights: weights.bytes(),
            activations: buffers.bytes() + expert_bytes,
            per_block: (block_bytes * config.num_hidden_layers) as u64,
            most: limits.requests * limits.positions.div_ceil(block_tokens),
        };
        let blocks = room.blocks(options.cache)?;
        let kv_total = room.per_block * blocks as u64;
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
        let not_kept = gpu.cache().not_kept.as_ref().map(|problem| {
            format!(
                "compiled kernels could not be kept ({problem}), so that every start compiles them again; set STROBE_CACHE_DIR to a directory that can be written to"
            )
        });
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
            notes: options.device.note().into_iter().chain(not_kept).chain(tuned.notes).collect(),
            facts,
            gpu,
        };
        if options.device.replays_graphs() {
            backend.capture_graphs(|| (options.progress)(loaded))?;
        }
        lap("graphs");
        if let Some((_, milliseconds)) = times.first_mut() {
            *milliseconds += backend.facts.kernels.earlier_milliseconds;
        }
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
            // SAFETY: padding rows read token 0 of the table, attend to nothing and write no cache; all buffers were made for more rows.
            unsafe { self.run_nodes(&packed, None) }?;
            self.gpu
                .synchronize()
                .map_err(|error| error.while_waiting_for(|| format!("the first decode step of {bucket} rows")))?;
            let (mut maxima, mut launched) = (None, Vec::new());
            let graph = CapturedGraph::capture(&self.gpu, || {
                // SAFETY: padding rows read token 0 of the table, attend to nothing and write no cache; all buffers were made for more rows.
                maxima = unsafe { self.run_nodes(&packed, Some(&mut launched)) }?;
                Ok(())
            })?;
            self.graphs.push(DecodeGraph { rows: bucket, graph, maxima, launched });
        }
        self.graphs.reverse();
        self.gpu.synchronize()?;
        self.graph_bytes = before.saturating_sub(self.gpu.memory()?.0);
        self.facts.graph_buckets = self.graphs.iter().map(|graph| graph.rows).collect();
        Ok(())
    }
}

/// Choose kernels for every product of an engine by measurement, without loading it, for as long as `go_on` says so.
pub fn choose_gemms(index: u32, config: &EngineConfig, go_on: impl Fn() -> bool + Sync) -> Result<Tuned, EngineError> {
    let build = &config.build;
    check_model(&config.model, build)?;
    let gpu = open(index, build, &go_on)?;
    let plugin = if build.gemm_plugin { GemmPlugin::Auto } else { GemmPlugin::Disable };
    let mut linear = Linear::new(&gpu, weights::precision(build.dtype), plugin)?;
    let batch = build.max_batch_size.min(build.max_num_tokens);
    let limits =
        StepLimits { tokens: build.max_num_tokens, sampled: batch, requests: batch, positions: build.max_seq_len };
    linear.reserve_maxima(limits.sampled, config.model.vocab_size)?;
    Ok(tune(&gpu, &mut linear, &sites(&config.model, limits, build.quantization == Quantization::Fp8), None, go_on)?)
}

/// How weights that do not fit might.
fn smaller_weights(build: &BuildConfig, config: &ModelConfig, device: &DeviceInfo) -> &'static str {
    let half = build.dtype.bytes() == 2;
    let quantized = BuildConfig { quantization: Quantization::Fp8, ..build.clone() };
    let smallest = build.quantization == Quantization::Fp8
        || quantized.check_types(config).is_err()
        || check_device(device, &quantized).is_err();
    match (smallest, half) {
        (true, true) => "use a smaller model, or free the GPU",
        (true, false) => "use a smaller model or --dtype bfloat16, or free the GPU",
        (false, true) => "use a smaller model or --quantization fp8, or free the GPU",
        (false, false) => "use a smaller model, --dtype bfloat16 or --quantization fp8, or free the GPU",
    }
}

/// Free memory that is not given to the cache: graphs and code that libraries load later.
const GRAPH_RESERVE: u64 = 1 << 30;

/// What the cache is cut from, in bytes.
struct CacheRoom {
    /// Memory of the GPU that is free beside everything else.
    free: u64,
    /// All of its memory.
    total: u64,
    weights: u64,
    activations: u64,
    /// A block over all layers.
    per_block: u64,
    /// Blocks that the largest batch of the longest sequences fills.
    most: usize,
}

impl CacheRoom {
    /// How many blocks the cache gets, or the arithmetic by which it gets none.
    fn blocks(&self, asked: CacheSize) -> Result<usize, EngineError> {
        let &CacheRoom { free, per_block, .. } = self;
        let beside = format!(
            "{} of {} are free beside weights of {} and activations of {}",
            size(free),
            size(self.total),
            size(self.weights),
            size(self.activations)
        );
        let refused = |arithmetic: String, remedy: String| {
            Err(EngineError::Memory { what: "the KV cache".into(), arithmetic, remedy })
        };
        let smaller = "use a smaller model, lower --max-batch-size, --max-num-tokens or --max-seq-len, or free the GPU";
        match asked {
            CacheSize::Blocks(blocks) => {
                let needed = per_block.saturating_mul(blocks as u64);
                let spare = free.saturating_sub(GRAPH_RESERVE);
                if needed <= spare {
                    return Ok(blocks);
                }
                let arithmetic = format!(
                    "{blocks} blocks of {} = {}; {beside}, and {} of that is kept for graphs and libraries",
                    size(per_block),
                    size(needed),
                    size(GRAPH_RESERVE)
                );
                match spare / per_block {
                    0 => refused(arithmetic, smaller.into()),
                    fit => refused(arithmetic, format!("lower --kv-cache-blocks to {fit}, or free the GPU")),
                }
            }
            CacheSize::FreeFraction(share) => {
                let spare = free.saturating_sub(GRAPH_RESERVE);
                let bytes = (spare as f64 * share) as u64;
                let blocks = ((bytes / per_block) as usize).min(self.most);
                if blocks > 0 {
                    return Ok(blocks);
                }
                let arithmetic = format!(
                    "{beside}; less {} that is kept for graphs and libraries {} are left, and {share} of that is {}; one block needs {}",
                    size(GRAPH_RESERVE),
                    size(spare),
                    size(bytes),
                    size(per_block)
                );
                if spare < per_block {
                    return refused(arithmetic, smaller.into());
                }
                // Rounded up, so that what is named is enough.
                let least = (per_block as f64 / spare as f64 * 1e3).ceil() / 1e3;
                let remedy = format!("raise --kv-cache-free-gpu-mem-fraction to {least} or more, or free the GPU");
                refused(arithmetic, remedy)
            }
        }
    }
}

/// Bytes as people compare them.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{bytes} bytes"),
        0x10_0000..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", gib(bytes)),
    }
}

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

/// Open a GPU that can run such an engine.
fn open(index: u32, build: &BuildConfig, go_on: &(dyn Fn() -> bool + Sync)) -> Result<Gpu, EngineError> {
    build.check_gpu()?;
    let gpu = Gpu::open_while(index, go_on)?;
    check_device(gpu.info(), build)?;
    Ok(gpu)
}

/// The oldest GPUs that multiply e4m3.
const FP8_CAPABILITY: (i32, i32) = (8, 9);

/// Refuses GPUs that lack what an engine needs.
fn check_device(device: &DeviceInfo, build: &BuildConfig) -> Result<(), EngineError> {
    let ((needed, needed_minor), (major, minor)) = (FP8_CAPABILITY, device.compute_capability);
    if build.quantization == Quantization::Fp8 && device.compute_capability < FP8_CAPABILITY {
        let problem = format!(
            "needs a GPU of compute capability {needed}.{needed_minor} or newer, {} has {major}.{minor}; use --quantization none",
            device.name
        );
        return Err(EngineError::option("--quantization fp8", problem));
    }
    Ok(())
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
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use strobe_model::DType;

    use super::*;

    fn device(name: &str, compute_capability: (i32, i32)) -> DeviceInfo {
        DeviceInfo { name: name.into(), compute_capability, ..DeviceInfo::default() }
    }

    fn build(quantization: Quantization) -> BuildConfig {
        BuildConfig {
            dtype: DType::Bf16,
            max_batch_size: 8,
            max_num_tokens: 256,
            max_seq_len: 512,
            tokens_per_block: 32,
            gemm_plugin: true,
            context_fmha: true,
            paged_kv_cache: true,
            quantization,
            kv_cache: KvCacheType::Auto,
        }
    }

    #[test]
    fn fp8_needs_a_gpu_that_multiplies_it() {
        let fp8 = build(Quantization::Fp8);
        for old in [(8, 0), (8, 6)] {
            let problem = check_device(&device("NVIDIA A10", old), &fp8).unwrap_err().to_string();
            let found = format!("NVIDIA A10 has {}.{}", old.0, old.1);
            for part in ["--quantization fp8", "8.9 or newer", &found, "--quantization none"] {
                assert!(problem.contains(part), "{problem}");
            }
            assert!(check_device(&device("NVIDIA A10", old), &build(Quantization::None)).is_ok());
        }
        assert!(check_device(&device("NVIDIA L4", (8, 9)), &fp8).is_ok());
        assert!(check_device(&device("NVIDIA H200", (9, 0)), &fp8).is_ok());
    }

    #[test]
    fn the_arithmetic_of_a_cache_adds_up() {
        const GIB: u64 = 1 << 30;
        let room = CacheRoom {
            free: 11 * GIB,
            total: 80 * GIB,
            weights: 60 * GIB,
            activations: GIB,
            per_block: 1 << 20,
            most: 1 << 20,
        };
        // 11 - 1 = 10 GiB, half of them 5 GiB, in blocks of a MiB.
        assert_eq!(room.blocks(CacheSize::FreeFraction(0.5)).unwrap(), 5 * 1024);
        let most = CacheRoom { most: 7, ..room };
        assert_eq!(most.blocks(CacheSize::FreeFraction(0.5)).unwrap(), 7);
        assert_eq!(most.blocks(CacheSize::Blocks(10 * 1024)).unwrap(), 10 * 1024);

        let says = |room: &CacheRoom, asked, parts: &[&str], not: &str| {
            let said = room.blocks(asked).unwrap_err().to_string();
            parts.iter().for_each(|part| assert!(said.contains(part), "`{part}` is not in: {said}"));
            assert!(!said.contains(not), "{said}");
        };
        // The reserve alone is more than there is: no fraction helps.
        let full = CacheRoom { free: GIB - (20 << 20), per_block: 131_072, ..room };
        let parts = ["1004.00 MiB of 80.00 GiB", "less 1.00 GiB", "0 bytes are left", "131072 bytes", "free the GPU"];
        says(&full, CacheSize::FreeFraction(0.9), &parts, "fraction");
        // A block of 4 MiB in 10 MiB of which a tenth is asked for.
        let small = CacheRoom { free: GIB + (10 << 20), per_block: 4 << 20, ..room };
        let parts = ["1.01 GiB of 80", "10.00 MiB are left", "0.1 of that is 1.00 MiB", "one block needs 4.00 MiB"];
        says(&small, CacheSize::FreeFraction(0.1), &parts, "smaller model");
        says(&small, CacheSize::FreeFraction(0.1), &["--kv-cache-free-gpu-mem-fraction to 0.4 or more"], "0.39");
        assert_eq!(small.blocks(CacheSize::FreeFraction(0.4)).unwrap(), 1);
        says(
            &small,
            CacheSize::Blocks(1000),
            &["1000 blocks of 4.00 MiB = 3.91 GiB", "1.00 GiB of that is kept", "--kv-cache-blocks to 2,"],
            "less",
        );
        assert_eq!(small.blocks(CacheSize::Blocks(2)).unwrap(), 2);
        says(&full, CacheSize::Blocks(1), &["131072 bytes", "1.00 GiB of that is kept", "smaller model"], "blocks to");
    }
}
