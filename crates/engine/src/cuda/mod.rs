//! The CUDA backend: buffers, cache and weights of one model on a GPU, which kernel runs which op, and graphs of whole
//! decode steps.

mod buffers;
mod inputs;
mod weights;

use std::sync::Arc;
use std::time::Instant;

use strobe_kernels_cuda::{
    Attention, AttentionConfig, CacheReport, CapturedGraph, CudaError, DecodeArgs, DeviceBuffer, DeviceInfo, DevicePtr,
    EmbedArgs, Epilogue, Event, GemmChoices, GemmPlugin, Gpu, KernelTimeline, KvDtype, Linear, LinearArgs, LinearInput,
    LinearShape, LinearSite, NvtxChoice, PinnedBuffer, PrefillArgs, Profiler, RopeAngles, RopeArgs, RowOps, SampleArgs,
    SampleOps, Tuned, UnfusedArgs, UnfusedAttention, UnfusedConfig, Weights, tune,
};
use strobe_model::program::{Buf, Node, OpKind, Rows};
use strobe_model::{LayerWeight, ModelConfig, WeightId};

use crate::clock::Clock;
use crate::cpu::{MemoryByPool, qkv_shape};
use crate::engine_config::EngineConfig;
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::quantization::{KvCacheType, Quantization};
use crate::recorder::{OpEvent, Recorder};
use crate::step::{StepInputs, StepLimits};
use buffers::{Buffers, FEW_BANNED};
use inputs::{Bounds, Layout, PackOptions, Packed, at};
use weights::DeviceWeights;

pub use weights::device_bytes;

/// A GPU as an engine is asked to use it.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    /// Number of the GPU.
    pub index: u32,
    /// Replay decode steps as graphs.
    pub graphs: bool,
    /// Wait after every op, so that a fault is found where it happens; graphs are off then. On where the environment has
    /// `CUDA_LAUNCH_BLOCKING=1`.
    pub blocking: bool,
    /// Whether windows will be recorded; without any, the profiling library is not even loaded.
    pub record: bool,
    /// Ranges for Nsight Systems.
    pub nvtx: NvtxChoice,
    /// Measured GEMM choices to start from.
    pub choices: Option<GemmChoices>,
}

impl CudaDevice {
    /// GPU `index` with graphs, nothing recorded.
    pub fn new(index: u32) -> CudaDevice {
        let blocking = std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| value == "1");
        CudaDevice { index, graphs: true, blocking, record: false, nvtx: NvtxChoice::Auto, choices: None }
    }
}

/// What starting on a GPU took and gave.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CudaFacts {
    /// The GPU.
    pub device: DeviceInfo,
    /// What kernels were compiled for.
    pub arch: String,
    /// What loading the kernels cost.
    pub kernels: CacheReport,
    /// Batch sizes that graphs were captured for.
    pub graph_buckets: Vec<usize>,
    /// Measured GEMM choices.
    pub gemm: GemmChoices,
    /// How many of them were measured now.
    pub gemm_measured: usize,
    /// Milliseconds of each part of the start.
    pub start_ms: Vec<(&'static str, f64)>,
}

/// Host memory of one step on its way.
struct Stage {
    packed: PinnedBuffer<u32>,
    banned: PinnedBuffer<u32>,
    tokens: PinnedBuffer<u32>,
    done: Event,
    sampled: usize,
    /// What ran, for errors.
    what: &'static str,
}

/// A model on a GPU.
pub struct CudaBackend {
    config: ModelConfig,
    nodes: Arc<[Node]>,
    limits: StepLimits,
    pack: PackOptions,
    rows: RowOps,
    linear: Linear,
    attention: Attention,
    unfused: Option<UnfusedAttention>,
    sample: SampleOps,
    weights: DeviceWeights,
    kv: DeviceBuffer,
    kv_layer: u64,
    kv_dtype: KvDtype,
    fp8: bool,
    buffers: Buffers,
    stages: [Stage; 2],
    /// Stage of the next launch, and of the oldest step that was not waited for.
    next: usize,
    oldest: usize,
    graphs: Vec<(usize, CapturedGraph)>,
    workspace_bytes: u64,
    graph_bytes: u64,
    blocking: bool,
    profiler: Profiler,
    facts: CudaFacts,
    // Last: everything above gives memory back through its context.
    gpu: Gpu,
}

/// How a backend is set up.
pub struct CudaBackendOptions<'a> {
    /// The GPU and how to use it.
    pub device: &'a CudaDevice,
    /// Limits of a step.
    pub limits: StepLimits,
    /// Share of free memory for the cache, or the blocks asked for.
    pub cache: crate::CacheSize,
    /// Told the bytes of weights done so far; answers whether to go on.
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
        let weights = DeviceWeights::load(&gpu, model, options.progress)?;
        lap("weights");

        let plugin = if build.gemm_plugin { GemmPlugin::Auto } else { GemmPlugin::Disable };
        let mut linear = Linear::new(&gpu, precision, plugin)?;
        let sites = sites(&config, limits, build.quantization == Quantization::Fp8);
        let tuned = tune(&gpu, &mut linear, &sites, options.device.choices.clone(), |_| {})?;
        lap("choosing GEMMs");

        let shape = qkv_shape(&config);
        let kv_dtype = if build.kv_cache == KvCacheType::Fp8 { KvDtype::Fp8 } else { KvDtype::Same };
        let block_tokens = build.cache_block_tokens();
        let before = gpu.memory()?.0;
        let attention = Attention::new(
            &gpu,
            AttentionConfig {
                precision,
                kv: kv_dtype,
                heads: shape.heads,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                tokens_per_block: block_tokens,
                max_spans: 2 * limits.requests,
            },
        )?;
        let unfused_config = UnfusedConfig {
            precision,
            kv: kv_dtype,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            tokens_per_block: block_tokens,
        };
        let unfused = if build.context_fmha { None } else { Some(UnfusedAttention::new(&gpu, unfused_config)?) };
        let sample = SampleOps::new(&gpu, limits.sampled)?;
        let workspace_bytes = before.saturating_sub(gpu.memory()?.0);
        let table = limits.positions.div_ceil(block_tokens);
        let words = Layout::most(limits, table);
        let buffers = Buffers::new(
            &config,
            limits,
            precision,
            build.quantization == Quantization::Fp8,
            build.context_fmha,
            words,
        )?;
        let stage = || -> Result<Stage, CudaError> {
            let (packed, tokens) = (PinnedBuffer::new(words)?, PinnedBuffer::new(limits.sampled)?);
            let banned = PinnedBuffer::new(FEW_BANNED)?;
            Ok(Stage { packed, banned, tokens, done: Event::new(false)?, sampled: 0, what: "nothing" })
        };
        let stages = [stage()?, stage()?];
        lap("buffers");

        let kv_bytes = if build.kv_cache == KvCacheType::Fp8 { 1 } else { build.dtype.bytes() };
        let block_bytes = 2 * shape.kv_heads * shape.head_dim * block_tokens * kv_bytes;
        let (free, total) = gpu.memory()?;
        let arithmetic = |blocks: u64, needed: u64| {
            format!(
                "{blocks} KV cache blocks of {} bytes = {:.2} GiB, {:.2} of {:.1} GiB free beside weights {:.2} GiB and activations {:.2} GiB",
                block_bytes * config.num_hidden_layers,
                gib(needed),
                gib(free),
                gib(total),
                gib(weights.bytes()),
                gib(buffers.bytes())
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
            stages,
            workspace_bytes,
            profiler,
            facts,
            gpu,
        };
        if options.device.graphs && !options.device.blocking {
            backend.capture_graphs()?;
        }
        lap("graphs");
        backend.facts.start_ms = times;
        Ok(backend)
    }

    /// What starting took and gave.
    pub fn facts(&self) -> &CudaFacts {
        &self.facts
    }

    /// Blocks of the cache.
    pub fn blocks(&self) -> usize {
        self.kv_layer as usize / self.block_bytes()
    }

    fn block_bytes(&self) -> usize {
        let shape = qkv_shape(&self.config);
        let element = match self.kv_dtype {
            KvDtype::Fp8 => 1,
            KvDtype::Same => self.linear.precision().bytes(),
        };
        2 * shape.kv_heads * shape.head_dim * self.pack.tokens_per_block * element
    }

    /// Things a user should know; taken once.
    pub fn notes(&mut self) -> Vec<String> {
        self.profiler.notes()
    }

    /// Make the GPU the calling thread's.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.gpu.bind()
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Bytes by purpose.
    pub fn memory(&self) -> MemoryByPool {
        MemoryByPool {
            weights_bytes: self.weights.bytes(),
            kv_cache_bytes: self.kv.bytes() as u64,
            activation_bytes: self.buffers.bytes(),
            workspace_bytes: self.workspace_bytes,
            graph_bytes: self.graph_bytes,
        }
    }

    /// Put a step on the GPU: inputs, forward pass, sampling, and the way back of its tokens. Returns before any of it
    /// has run.
    pub(crate) fn launch(
        &mut self,
        step: &StepInputs,
        trace: Option<(&mut Recorder, &Clock, u64)>,
    ) -> Result<(), CudaError> {
        self.launch_step(step, trace).map_err(|error| match &error {
            // Whatever is called after a fault fails with it: the step before is to blame, not this launch.
            CudaError::Driver { code, .. } if is_fault(code) => {
                fault(error, || self.stages[self.oldest].what.to_string())
            }
            _ => error,
        })
    }

    fn launch_step(&mut self, step: &StepInputs, trace: Option<(&mut Recorder, &Clock, u64)>) -> Result<(), CudaError> {
        let bucket = if inputs::is_decode(step) {
            self.graphs.iter().position(|(bucket, _)| *bucket >= step.tokens.len())
        } else {
            None
        };
        let padded = bucket.map(|index| self.graphs[index].0);
        let last_sampled = self.stages[1 - self.next].sampled;
        let (vocab, blocks, limits) = (self.config.vocab_size, self.blocks(), self.limits);
        let stage = &mut self.stages[self.next];
        let packed = inputs::pack(step, &self.pack, padded, &mut stage.packed);
        let bounds = Bounds { vocab, blocks, limits, last_sampled };
        debug_assert_eq!(inputs::check(&packed, &stage.packed, &self.pack, &bounds), Ok(()));
        self.gpu.set_tag(u32::MAX);
        self.gpu.copy_to_device(self.buffers.packed.ptr(), &stage.packed[..packed.words])?;
        if packed.draws.is_some() && !step.banned.is_empty() {
            let count = step.banned.len();
            if stage.banned.len() < count {
                stage.banned = PinnedBuffer::new(count.next_power_of_two())?;
            }
            if self.buffers.banned.bytes() < count * 4 {
                // No graph knows it, but the step before may still read it.
                self.gpu.synchronize()?;
                self.buffers.banned = DeviceBuffer::new(count.next_power_of_two() * 4, "forbidden tokens")?;
            }
            stage.banned[..count].copy_from_slice(&step.banned);
            self.gpu.copy_to_device(self.buffers.banned.ptr(), &stage.banned[..count])?;
        }
        if let Some((_, _, iteration)) = &trace {
            self.profiler.begin_iteration(*iteration);
        }
        let begun = trace.as_ref().map(|(_, clock, _)| clock.now());
        match bucket {
            Some(index) => {
                stage.what = "a decode step replayed as a graph (--cuda-launch-blocking finds the op)";
                let graph = &self.graphs[index].1;
                graph.launch(&self.gpu)?;
                self.profiler.graph_launched(&graph.nodes);
            }
            None => {
                stage.what = "a step launched op by op (--cuda-launch-blocking finds the op)";
                self.run_nodes(&packed)?;
            }
        }
        self.profiler.push(format_args!("_sample_async"));
        let sampled = self.run_sample(&packed);
        self.profiler.pop();
        sampled?;
        self.gpu.set_tag(u32::MAX);
        let stage = &mut self.stages[self.next];
        self.gpu.copy_to_host(&mut stage.tokens[..packed.sampled], self.buffers.tokens.ptr())?;
        stage.done.record(&self.gpu)?;
        stage.sampled = packed.sampled;
        self.next = 1 - self.next;
        if let (Some((recorder, clock, iteration)), Some(start)) = (trace, begun) {
            // What each op costs; when it ran on the GPU is the timeline's business.
            let (shape, end) = (step.shape(), clock.now());
            for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.rows(&shape) > 0) {
                let cost = node.cost(&self.config, &shape);
                recorder.op(OpEvent { node: index as u32, iteration, start, end, cost });
            }
        }
        Ok(())
    }

    /// Wait for the oldest step on its way and give its tokens.
    pub fn wait(&mut self) -> Result<&[u32], CudaError> {
        let stage = &self.stages[self.oldest];
        stage.done.wait().map_err(|error| fault(error, || stage.what.to_string()))?;
        self.oldest = 1 - self.oldest;
        Ok(&stage.tokens[..stage.sampled])
    }

    /// Logits of the last step's sampled rows, copied back.
    pub fn read_logits(&self, rows: usize) -> Result<Vec<f32>, CudaError> {
        self.gpu.synchronize()?;
        let mut logits = vec![0f32; rows * self.config.vocab_size];
        self.buffers.logits.read(0, &mut logits)?;
        Ok(logits)
    }

    /// A profile window opens.
    pub fn begin_window(&mut self, clock: &Clock) -> Result<(), CudaError> {
        self.profiler.begin_window(&self.gpu, &|| clock.now())
    }

    /// A profile window is over: what the GPU did in it.
    pub fn end_window(&mut self, clock: &Clock) -> Result<Option<KernelTimeline>, CudaError> {
        self.profiler.end_window(&self.gpu, &|| clock.now())
    }

    /// Ranges for Nsight Systems.
    pub fn profiler(&self) -> &Profiler {
        &self.profiler
    }

    fn run_sample(&self, packed: &Packed) -> Result<(), CudaError> {
        if packed.sampled == 0 {
            return Ok(());
        }
        self.gpu.set_tag(self.nodes.len() as u32 - 1);
        let (logits, vocab, rows) = (self.buffers.logits.ptr(), self.config.vocab_size, packed.sampled);
        let (base, out) = (self.buffers.packed.ptr(), self.buffers.tokens.ptr());
        match packed.draws {
            None => self.sample.argmax(&self.gpu, logits, vocab, rows, out)?,
            Some(draws) => {
                let (draws, banned) = (at(base, draws), self.buffers.banned.ptr());
                self.sample.sample(&self.gpu, &SampleArgs { logits, vocab, rows, draws, banned, out })?;
            }
        }
        self.settled("sample")
    }

    /// With `blocking`: wait, so that a fault is found at its op.
    fn settled(&self, op: &str) -> Result<(), CudaError> {
        if !self.blocking {
            return Ok(());
        }
        self.gpu.synchronize().map_err(|error| fault(error, || format!("op {op}")))
    }

    /// Launch every op of the forward pass, up to the logits. Everything is at a place that depends on counts only.
    fn run_nodes(&self, packed: &Packed) -> Result<(), CudaError> {
        let nodes = self.nodes.clone();
        let layout = packed.layout;
        let (m, sampled) = (layout.rows_padded(), layout.sampled_padded());
        let mut state = State { delta: false, norm: None, codes: false, activated: false };
        let mut index = 0;
        while index + 1 < nodes.len() {
            let node = &nodes[index];
            self.gpu.set_tag(index as u32);
            let took = self.run_node(&nodes, index, m, sampled, packed, &mut state)?;
            if self.blocking {
                let layer = node.layer.map_or(String::new(), |layer| format!(" of layer {layer}"));
                self.settled(&format!("{}{layer}", node.name))?;
            }
            index += took;
        }
        Ok(())
    }

    /// Run the op at `index` and those that its kernel folds in; returns how many.
    fn run_node(
        &self,
        nodes: &[Node],
        index: usize,
        m: usize,
        sampled: usize,
        packed: &Packed,
        state: &mut State,
    ) -> Result<usize, CudaError> {
        let (gpu, b, config) = (&self.gpu, &self.buffers, &self.config);
        let node = &nodes[index];
        let layer = usize::from(node.layer.unwrap_or(0));
        let shape = qkv_shape(config);
        let hidden = config.hidden_size;
        let eps = config.rms_norm_eps as f32;
        let base = b.packed.ptr();
        let layout = packed.layout;
        let kv = self.kv.ptr() + layer as u64 * self.kv_layer;
        let qkv_width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        let q_width = shape.heads * shape.head_dim;
        let window = config.window(layer).unwrap_or(0);
        match node.kind {
            OpKind::Embed { table } => {
                self.rows.embed(
                    gpu,
                    &EmbedArgs {
                        tokens: base,
                        from_sampled: at(base, layout.last_rows()),
                        last_tokens: b.tokens.ptr(),
                        table: self.weights.ptr(table),
                        hidden: b.hidden.ptr(),
                        rows: m,
                        width: hidden,
                    },
                )?;
            }
            OpKind::RmsNorm { weight } | OpKind::AddRmsNorm { weight } => {
                let w = self.weights.ptr(weight);
                let add = state.delta && matches!(node.kind, OpKind::AddRmsNorm { .. });
                let next = self.next_linear(nodes, index, packed);
                let route = next.map(|(shape, rows)| self.linear.route(&shape, rows));
                state.delta = false;
                state.codes = false;
                if !add && route.is_some_and(|route| route.folds_norm) {
                    state.norm = Some(w);
                    return Ok(1);
                }
                let (x, delta) = (b.hidden.ptr(), b.proj.ptr());
                match (&b.codes, route.is_some_and(|route| route.fp8_input)) {
                    (Some((codes, scales)), true) => {
                        let (codes, scales) = (codes.ptr(), scales.ptr());
                        state.codes = true;
                        if add {
                            self.rows.add_rms_norm_fp8(gpu, x, delta, w, eps, codes, scales, m, hidden)?;
                        } else {
                            self.rows.rms_norm_fp8(gpu, x, w, eps, codes, scales, m, hidden)?;
                        }
                    }
                    _ if add => self.rows.add_rms_norm(gpu, x, delta, w, eps, b.normed.ptr(), m, hidden)?,
                    _ => self.rows.rms_norm(gpu, x, w, eps, b.normed.ptr(), m, hidden)?,
                }
            }
            OpKind::Linear { x, weight, bias, out } => {
                let shape = self.shape_of(node, packed).unwrap_or_else(|| unreachable!("a linear op has a shape"));
                let rows = if x == Buf::Sampled { sampled } else { m };
                let route = self.linear.route(&shape, rows);
                let plain = match x {
                    Buf::Attn => b.attn.ptr(),
                    Buf::Act => b.act.ptr(),
                    Buf::Sampled if !packed.all_sampled => b.sampled.ptr(),
                    _ => b.normed.ptr(),
                };
                let input = match (&b.codes, state.norm.take()) {
                    (_, Some(weight)) => LinearInput::Norm { hidden: b.hidden.ptr(), weight, eps },
                    (Some((codes, scales)), None) if route.fp8_input => {
                        if !state.codes {
                            self.rows.quantize_rows(gpu, plain, codes.ptr(), scales.ptr(), rows, shape.k)?;
                        }
                        LinearInput::Fp8 { codes: codes.ptr(), scales: scales.ptr() }
                    }
                    _ => LinearInput::Plain(plain),
                };
                state.codes = false;
                let target = match (out, shape.epilogue) {
                    (_, Epilogue::AddResidual) => b.hidden.ptr(),
                    (Buf::Qkv, _) => b.qkv.ptr(),
                    (Buf::GateUp, _) if route.folds_silu => b.act.ptr(),
                    (Buf::GateUp, _) => b.gate_up.ptr(),
                    (Buf::Logits, _) => b.logits.ptr(),
                    _ => b.proj.ptr(),
                };
                self.linear.run(
                    gpu,
                    &LinearArgs {
                        shape,
                        input,
                        w: self.weights.ptr(weight),
                        w_scales: self.weights.scales(weight),
                        bias: bias.map_or(0, |id| self.weights.ptr(id)),
                        out: target,
                        m: rows,
                    },
                )?;
                state.delta = out == Buf::Proj && shape.epilogue != Epilogue::AddResidual;
                state.activated = out == Buf::GateUp && route.folds_silu;
            }
            OpKind::QkNorm { q, k } => {
                let (q, k) = (self.weights.ptr(q), self.weights.ptr(k));
                self.rows.qk_norm(gpu, b.qkv.ptr(), q, k, eps, m, shape.heads, shape.kv_heads, shape.head_dim)?;
            }
            OpKind::RopeKvWrite => {
                let next = nodes.get(index + 1).map(|node| node.kind);
                let alone = packed.prefill == 0 && packed.one_span_each;
                let fused = next == Some(OpKind::Attention { rows: Rows::All }) && alone;
                if fused && self.attention.fuses_rope() {
                    gpu.set_tag(index as u32 + 1);
                    self.decode_attention(packed, kv, window, true)?;
                    return Ok(2);
                }
                self.rows.rope_kv_write(
                    gpu,
                    &RopeArgs {
                        qkv: b.qkv.ptr(),
                        cos: b.cos.ptr(),
                        sin: b.sin.ptr(),
                        positions: at(base, layout.positions()),
                        slots: at(base, layout.slots()),
                        kv,
                        rows: m,
                        heads: shape.heads,
                        kv_heads: shape.kv_heads,
                        head_dim: shape.head_dim,
                        tokens_per_block: self.pack.tokens_per_block,
                        kv_dtype: self.kv_dtype,
                    },
                )?;
            }
            OpKind::Attention { .. } => {
                if packed.tiles > 0 {
                    self.attention.prefill(
                        gpu,
                        &PrefillArgs {
                            qkv: b.qkv.ptr(),
                            q_stride: qkv_width,
                            kv,
                            spans: at(base, layout.prefill_spans()),
                            tiles: at(base, layout.tiles()),
                            tile_count: packed.tiles,
                            block_tables: at(base, layout.tables()),
                            window,
                            out: b.attn.ptr(),
                            out_stride: q_width,
                        },
                    )?;
                }
                if packed.decode > 0 {
                    self.decode_attention(packed, kv, window, false)?;
                }
            }
            OpKind::AttnScores | OpKind::AttnSoftmax | OpKind::AttnValues => {
                let (Some(unfused), Some(scores)) = (&self.unfused, &b.scores) else { return Ok(1) };
                if packed.unfused == 0 {
                    return Ok(1);
                }
                let args = UnfusedArgs {
                    qkv: b.qkv.ptr(),
                    kv,
                    spans: at(base, layout.prefill_spans()),
                    span_count: packed.unfused,
                    max_q: packed.widest.0,
                    max_kv: packed.widest.1,
                    block_tables: at(base, layout.tables()),
                    window,
                    score_offsets: at(base, layout.score_offsets()),
                    scores: scores.ptr(),
                    out: b.attn.ptr(),
                };
                match node.kind {
                    OpKind::AttnScores => unfused.scores(gpu, &args)?,
                    OpKind::AttnSoftmax => unfused.softmax(gpu, &args)?,
                    _ => unfused.values(gpu, &args)?,
                }
            }
            OpKind::SiluMul => {
                let inter = config.intermediate_size;
                let next = self.next_linear(nodes, index, packed);
                let wants_codes = next.is_some_and(|(shape, rows)| self.linear.route(&shape, rows).fp8_input);
                if state.activated {
                    state.activated = false;
                    return Ok(1);
                }
                match (&b.codes, wants_codes) {
                    (Some((codes, scales)), true) => {
                        self.rows.silu_mul_fp8(gpu, b.gate_up.ptr(), codes.ptr(), scales.ptr(), m, inter)?;
                        state.codes = true;
                    }
                    _ => self.rows.silu_mul(gpu, b.gate_up.ptr(), b.act.ptr(), m, inter)?,
                }
            }
            OpKind::Gather => {
                if sampled > 0 && !packed.all_sampled {
                    let index = at(base, layout.sampled());
                    self.rows.gather_rows(gpu, b.normed.ptr(), index, b.sampled.ptr(), sampled, hidden)?;
                }
            }
            OpKind::Sample => {}
        }
        Ok(1)
    }

    fn decode_attention(&self, packed: &Packed, kv: DevicePtr, window: usize, rope: bool) -> Result<(), CudaError> {
        let (b, layout, base) = (&self.buffers, packed.layout, self.buffers.packed.ptr());
        let shape = qkv_shape(&self.config);
        let spans = layout.decode_padded();
        let args = DecodeArgs {
            qkv: b.qkv.ptr(),
            q_stride: (shape.heads + 2 * shape.kv_heads) * shape.head_dim,
            kv,
            spans: at(base, layout.decode_spans()),
            span_count: spans,
            splits: self.attention.splits_for(spans, self.limits.positions),
            block_tables: at(base, layout.tables()),
            window,
            out: b.attn.ptr(),
            out_stride: shape.heads * shape.head_dim,
        };
        if rope {
            self.attention.decode_rope(&self.gpu, &args, RopeAngles { cosines: b.cos.ptr(), sines: b.sin.ptr() })
        } else {
            self.attention.decode(&self.gpu, &args)
        }
    }

    /// The product that reads what the op at `index` writes, and its rows.
    fn next_linear(&self, nodes: &[Node], index: usize, packed: &Packed) -> Option<(LinearShape, usize)> {
        let mut next = nodes.get(index + 1)?;
        if next.kind == OpKind::Gather {
            // The rows that are gathered must be there; where all are taken, gathering does nothing.
            if !packed.all_sampled {
                return None;
            }
            next = nodes.get(index + 2)?;
        }
        let rows = match next.kind {
            OpKind::Linear { x: Buf::Sampled, .. } => packed.layout.sampled_padded(),
            _ => packed.layout.rows_padded(),
        };
        self.shape_of(next, packed).map(|shape| (shape, rows))
    }

    fn shape_of(&self, node: &Node, packed: &Packed) -> Option<LinearShape> {
        let OpKind::Linear { x, weight, bias, out } = node.kind else { return None };
        Some(linear_shape(&self.config, self.fp8, x, weight, bias.is_some(), out, packed.all_sampled))
    }

    /// One graph per batch size, largest first, so that smaller ones find memory pools that fit.
    fn capture_graphs(&mut self) -> Result<(), CudaError> {
        let before = self.gpu.memory()?.0;
        for &bucket in buckets(self.limits.requests.min(self.limits.tokens)).iter().rev() {
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
                .map_err(|error| fault(error, || format!("the first decode step of {bucket} rows")))?;
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

/// Choose kernels for every product of an engine by measurement, without loading it.
pub fn choose_gemms(index: u32, config: &EngineConfig) -> Result<Tuned, EngineError> {
    let build = &config.build;
    let gpu = Gpu::open(index)?;
    let plugin = if build.gemm_plugin { GemmPlugin::Auto } else { GemmPlugin::Disable };
    let mut linear = Linear::new(&gpu, weights::precision(build.dtype), plugin)?;
    let batch = build.max_batch_size.min(build.max_num_tokens);
    let limits =
        StepLimits { tokens: build.max_num_tokens, sampled: batch, requests: batch, positions: build.max_seq_len };
    Ok(tune(&gpu, &mut linear, &sites(&config.model, limits, build.quantization == Quantization::Fp8), None, |_| {})?)
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

/// What is known between the ops of a step.
struct State {
    /// A projection lies in its own buffer and still has to be added to the residual stream.
    delta: bool,
    /// The norm that the next product folds in.
    norm: Option<DevicePtr>,
    /// The next product's input is there as e4m3 codes.
    codes: bool,
    /// The product before has applied the activation.
    activated: bool,
}

fn linear_shape(
    config: &ModelConfig,
    fp8: bool,
    x: Buf,
    weight: WeightId,
    bias: bool,
    out: Buf,
    all_sampled: bool,
) -> LinearShape {
    let (n, k) = strobe_model::program::linear_shape(config, weight);
    let epilogue = match out {
        Buf::GateUp if !bias => Epilogue::SiluMul,
        Buf::Proj if !bias => Epilogue::AddResidual,
        Buf::Logits => Epilogue::StoreF32,
        _ => Epilogue::Store,
    };
    let weights = if fp8 && matches!(weight, WeightId::Layer(..)) { Weights::Fp8 } else { Weights::Same };
    let norm = x == Buf::Normed || (x == Buf::Sampled && all_sampled);
    LinearShape { n: n as usize, k: k as usize, epilogue, weights, bias, norm }
}

/// Every product of a model, for tuning.
fn sites(config: &ModelConfig, limits: StepLimits, fp8: bool) -> Vec<LinearSite> {
    let layer = |part| WeightId::Layer(0, part);
    let site = |x, weight, bias, out, all, max_rows| LinearSite {
        shape: linear_shape(config, fp8, x, weight, bias, out, all),
        max_rows,
    };
    let rows = limits.tokens;
    vec![
        site(Buf::Normed, layer(LayerWeight::Qkv), config.qkv_bias, Buf::Qkv, false, rows),
        site(Buf::Attn, layer(LayerWeight::O), config.o_bias, Buf::Proj, false, rows),
        site(Buf::Normed, layer(LayerWeight::GateUp), config.mlp_bias, Buf::GateUp, false, rows),
        site(Buf::Act, layer(LayerWeight::Down), config.mlp_bias, Buf::Proj, false, rows),
        site(Buf::Sampled, WeightId::LmHead, false, Buf::Logits, true, limits.sampled),
        site(Buf::Sampled, WeightId::LmHead, false, Buf::Logits, false, limits.sampled),
    ]
}

/// Whether the driver's error is a kernel's doing: it sticks to the context from then on.
fn is_fault(code: &str) -> bool {
    const FAULTS: [&str; 11] = [
        "ILLEGAL_ADDRESS",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "ILLEGAL_INSTRUCTION",
        "HARDWARE_STACK_ERROR",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "ASSERT",
        "ECC_UNCORRECTABLE",
        "CONTAINED",
    ];
    FAULTS.iter().any(|fault| code.strip_prefix("CUDA_ERROR_") == Some(fault))
}

/// A driver error that a kernel caused, with what was running.
fn fault(error: CudaError, op: impl FnOnce() -> String) -> CudaError {
    match error {
        CudaError::Driver { code, meaning, .. } => CudaError::Fault { op: op(), code, meaning },
        other => other,
    }
}
