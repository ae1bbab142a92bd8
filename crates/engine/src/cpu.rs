//! The CPU backend: buffers, cache and weights of one model, and which kernel runs which op.

mod step;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use memmap2::MmapMut;
use strobe_kernels_cpu::{
    Activation, AttnBatch, Cpu, ExpertPairs, KvGeometry, KvLayer, KvType, Layout, Matrix, QuantKind, QuantRows,
    RopeTable,
};
use strobe_model::program::{Buf, Node, OpKind, ProgramOptions, Rows, after_experts_norm};
use strobe_model::{DType, LayerWeight, ModelConfig, MoeConfig, PerfectRouter, SwigluClamp, WeightId};

use crate::backend::qkv_shape;
use crate::cpu_sizes::{activated_width, feed_forwards, gate_up_width, unfused_score_bytes, widest_input, widest_step};
use crate::error::EngineError;
use crate::latent::{self, LatentState};
use crate::sampling::Sampler;
use crate::step::{StepInputs, StepLimits};
use crate::weights::{WeightStore, aligned_bytes};
use step::Stage;

/// A model on the CPU.
pub struct CpuBackend {
    cpu: Cpu,
    config: ModelConfig,
    nodes: Arc<[Node]>,
    weights: Arc<WeightStore>,
    geometry: KvGeometry,
    cache: Vec<MmapMut>,
    rope: RopeTable,
    hidden: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attn: Vec<f32>,
    proj: Vec<f32>,
    /// Gates and ups of products that leave the activation to the next op.
    gate_up: Vec<f32>,
    act: Vec<f32>,
    /// The input of the next product, in an engine of integer matrices: ops that make such an input write it here, other
    /// inputs are brought here by the product itself.
    codes: QuantRows,
    /// In place of `act` in such an engine. A product reads `codes` while it writes these.
    act_codes: QuantRows,
    experts: Option<ExpertState>,
    latent: Option<LatentState>,
    sampled: Vec<f32>,
    logits: Vec<f32>,
    tokens: Vec<u32>,
    /// What drawing workers write: each its own rows.
    drawn: Vec<AtomicU32>,
    samplers: Vec<Mutex<Sampler>>,
    /// Scores of the unfused attention; reserved lazily by the system, so it costs what it is used for.
    scores: Option<MmapMut>,
    score_offsets: Vec<usize>,
    sampled_rows: usize,
    dtype: DType,
    /// Whether matrices are integers.
    integers: bool,
    /// What steps have brought: of the next launch, and of the oldest step that has not landed.
    stages: [Stage; 2],
    next: usize,
    oldest: usize,
    #[cfg(feature = "handicap")]
    handicap: Option<f64>,
}

/// What a model of experts needs besides.
struct ExpertState {
    pairs: ExpertPairs,
    router_logits: Vec<f32>,
    /// The rows of all pairs: before the first product those of their tokens, after the second what the experts answer.
    rows: Vec<f32>,
    /// Tokens sent to each expert in the last step, `[layers][experts]`.
    counts: Vec<u32>,
    /// Experts with at least one token, `[layers]`.
    used: Vec<u32>,
    /// Balanced logits to be used instead of the router's, and whether they are.
    perfect: Option<(PerfectRouter, bool)>,
}

impl ExpertState {
    fn new(config: &ModelConfig, tokens: usize) -> Option<ExpertState> {
        let moe = config.moe.as_ref()?;
        Some(ExpertState {
            pairs: ExpertPairs::new(moe.num_experts, moe.experts_per_token, tokens),
            router_logits: vec![0.0; tokens * moe.num_experts],
            rows: vec![0.0; tokens * moe.experts_per_token * config.hidden_size],
            counts: vec![0; config.num_hidden_layers * moe.num_experts],
            used: vec![0; config.num_hidden_layers],
            perfect: None,
        })
    }

    /// Keep how many tokens each expert of a layer got.
    fn count(&mut self, layer: usize) {
        let experts = self.pairs.experts();
        let counts = &mut self.counts[layer * experts..(layer + 1) * experts];
        for (expert, count) in counts.iter_mut().enumerate() {
            *count = self.pairs.of_expert(expert).len() as u32;
        }
        self.used[layer] = counts.iter().filter(|count| **count > 0).count() as u32;
    }
}

/// How a backend is set up.
pub struct CpuBackendOptions {
    /// Limits of a step.
    pub limits: StepLimits,
    /// Tokens per cache block (a power of two).
    pub tokens_per_block: usize,
    /// Cache blocks.
    pub blocks: usize,
    /// Type of the weights.
    pub dtype: DType,
    /// Type of the cache.
    pub kv: KvType,
    /// How the list of ops was put together that will be run.
    pub program: ProgramOptions,
}

impl CpuBackend {
    /// Reserve everything that a step of `nodes` will need.
    pub fn new(
        mut cpu: Cpu,
        config: ModelConfig,
        nodes: Arc<[Node]>,
        weights: Arc<WeightStore>,
        options: &CpuBackendOptions,
    ) -> Result<CpuBackend, EngineError> {
        let limits = options.limits;
        let shape = qkv_shape(&config);
        let geometry = KvGeometry {
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            tokens_per_block: options.tokens_per_block,
            blocks: options.blocks,
            kind: options.kv,
        };
        let cache = (0..config.num_hidden_layers)
            .map(|_| aligned_bytes(geometry.bytes_per_layer()))
            .collect::<Result<Vec<_>, _>>()?;
        let (cos, sin) = config.rope_tables(limits.positions);
        let rows = |width: usize| vec![0f32; limits.tokens * width];
        let scores = if options.program.context_fmha {
            None
        } else {
            Some(aligned_bytes(unfused_score_bytes(&config, limits))?)
        };
        let integers = weights.matrix(WeightId::LmHead).is_some_and(|head| head.data.quant_kind().is_some());
        let (mut codes, mut act_codes) = (QuantRows::new(), QuantRows::new());
        if integers {
            codes.reserve(widest_step(&config, limits), widest_input(&config));
            for block in feed_forwards(&config) {
                act_codes.reserve(limits.tokens * block.per_token, block.width);
                if options.program.activates(block.width) {
                    cpu.reserve_activated(limits.tokens * block.per_token, block.width);
                }
            }
        }
        if !integers || config.moe.is_some() {
            let activated = feed_forwards(&config).map(|block| block.width).max().unwrap_or(0);
            let widest = if integers { config.hidden_size } else { widest_input(&config).max(activated) };
            cpu.reserve(widest_step(&config, limits), widest);
        }
        if let Some((rows, inputs)) = latent::largest_product(&config, limits.tokens).filter(|_| !integers) {
            cpu.reserve(rows, inputs);
        }
        cpu.reserve_attention(shape, limits.positions);
        let experts = ExpertState::new(&config, limits.tokens);
        let stage = || Stage::with_room(limits.sampled, experts.as_ref().map_or(0, |experts| experts.counts.len()));
        Ok(CpuBackend {
            stages: [stage(), stage()],
            next: 0,
            oldest: 0,
            #[cfg(feature = "handicap")]
            handicap: crate::handicap::from_env()?,
            rope: RopeTable { half: shape.head_dim / 2, cos, sin },
            hidden: rows(config.hidden_size),
            normed: rows(config.hidden_size),
            qkv: rows((shape.heads + 2 * shape.kv_heads) * shape.head_dim),
            attn: rows(shape.heads * shape.head_dim),
            proj: rows(config.hidden_size),
            gate_up: rows(gate_up_width(&config, options.program)),
            act: if integers { Vec::new() } else { rows(activated_width(&config)) },
            experts,
            latent: LatentState::new(&config, limits.tokens, integers),
            codes,
            act_codes,
            integers,
            sampled: vec![0f32; limits.sampled * config.hidden_size],
            logits: vec![0f32; limits.sampled * config.vocab_size],
            tokens: vec![0; limits.sampled],
            drawn: (0..limits.sampled).map(|_| AtomicU32::new(0)).collect(),
            samplers: (0..cpu.threads()).map(|_| Mutex::new(Sampler::new(config.vocab_size))).collect(),
            score_offsets: Vec::with_capacity(limits.requests),
            sampled_rows: 0,
            dtype: options.dtype,
            cpu,
            config,
            nodes,
            weights,
            geometry,
            cache,
            scores,
        })
    }

    /// Have balanced logits ready, and use them from the next step on instead of the router's.
    pub fn set_perfect_router(&mut self, router: PerfectRouter) {
        if let Some(experts) = &mut self.experts {
            experts.perfect = Some((router, true));
        }
    }

    /// Whether an op writes codes for the product that follows it, instead of floats.
    fn makes_codes(&self, node: &Node) -> bool {
        match node.kind {
            // Rows before experts go to the router, which is not quantised, and each to several experts.
            OpKind::RmsNorm { weight: WeightId::Layer(layer, LayerWeight::PostNorm) }
            | OpKind::AddRmsNorm { weight: WeightId::Layer(layer, LayerWeight::PostNorm) }
                if self.config.experts(usize::from(layer)).is_some() =>
            {
                false
            }
            // Of the final norm's rows only some go on to the head.
            OpKind::RmsNorm { weight } | OpKind::AddRmsNorm { weight } => {
                self.integers && weight != WeightId::FinalNorm
            }
            OpKind::SiluMul | OpKind::ExpertSiluMul => self.integers,
            _ => false,
        }
    }

    fn matrix(weights: &WeightStore, id: WeightId) -> Matrix<'_> {
        weights.matrix(id).expect("every weight of the program is checked when the engine is loaded")
    }

    fn vector(weights: &WeightStore, id: WeightId) -> &[f32] {
        weights.vector(id).expect("every weight of the program is checked when the engine is loaded")
    }
}

/// What experts make of gates and ups.
fn expert_activation(moe: &MoeConfig) -> Activation {
    match moe.clamp {
        None => Activation::Silu,
        Some(SwigluClamp { alpha, limit }) => Activation::ClampedSwiglu { alpha, limit },
    }
}

impl CpuBackend {
    /// Run one op on the step.
    fn run(&mut self, node: &Node, step: &StepInputs) {
        let shape = qkv_shape(&self.config);
        let m = step.tokens.len();
        let hidden = self.config.hidden_size;
        let eps = self.config.rms_norm_eps as f32;
        let weights = &*self.weights;
        let layer = usize::from(node.layer.unwrap_or(0));
        let window = self.config.window(layer);
        let q_width = shape.heads * shape.head_dim;
        let qkv = &mut self.qkv[..m * (q_width + 2 * shape.kv_heads * shape.head_dim)];
        let batch = |rows: Rows| AttnBatch {
            seqs: match rows {
                Rows::All => &step.seqs,
                Rows::Context => &step.seqs[..step.context_seqs],
                Rows::Generation => &step.seqs[step.context_seqs..],
            },
            block_tables: &step.block_tables,
        };
        let data = &mut self.cache[layer][..self.geometry.bytes_per_layer()];
        let mut kv = KvLayer { geometry: self.geometry, data };
        let scores = self.scores.as_mut().map(|s| bytemuck::cast_slice_mut::<u8, f32>(s)).unwrap_or_default();
        match node.kind {
            OpKind::Embed { table } => {
                self.cpu.embed(&step.tokens, Self::matrix(weights, table), &mut self.hidden[..m * hidden]);
            }
            OpKind::RmsNorm { weight } => {
                let (x, w) = (&self.hidden[..m * hidden], Self::vector(weights, weight));
                match self.makes_codes(node) {
                    true => self.cpu.rms_norm_quantized(x, w, eps, &mut self.codes),
                    false => self.cpu.rms_norm(x, w, eps, &mut self.normed[..m * hidden]),
                }
            }
            OpKind::AddRmsNorm { weight } => {
                let makes_codes = self.makes_codes(node);
                let (x, delta) = (&mut self.hidden[..m * hidden], &self.proj[..m * hidden]);
                let w = Self::vector(weights, weight);
                match makes_codes {
                    true => self.cpu.add_rms_norm_quantized(x, delta, w, eps, &mut self.codes),
                    false => self.cpu.add_rms_norm(x, delta, w, eps, &mut self.normed[..m * hidden]),
                }
            }
            OpKind::Linear { x, weight, bias, out } => {
                let matrix = Self::matrix(weights, weight);
                let bias = bias.map(|id| Self::vector(weights, id));
                let rows = if x == Buf::Sampled { step.sampled.len() } else { m };
                let made = matches!(x, Buf::Normed | Buf::Act)
                    && !(x == Buf::Normed && after_experts_norm(&self.config, weight));
                if out == Buf::Act {
                    let x = &self.normed[..rows * matrix.k];
                    if !self.integers {
                        let out = &mut self.act[..rows * matrix.n / 2];
                        return self.cpu.linear_activated(x, rows, matrix, bias, Activation::Silu, out);
                    }
                    if !made {
                        self.cpu.quantize_rows(x, matrix.k, &mut self.codes);
                    }
                    let (codes, out) = (&self.codes, &mut self.act_codes);
                    return self.cpu.linear_activated_quantized(codes, matrix, bias, Activation::Silu, out);
                }
                // Each head's values are read where its queries are written, so they step aside meanwhile.
                let values = match &mut self.latent {
                    Some(latent) if x == Buf::PerHead => std::mem::take(&mut latent.per_head),
                    _ => Vec::new(),
                };
                let (q_latent, q_normed, per_head, kv_latent) = match &mut self.latent {
                    Some(l) => (&mut l.q_latent[..], &l.q_normed[..], &mut l.per_head[..], &mut l.kv_latent[..]),
                    None => (&mut [][..], &[][..], &mut [][..], &mut [][..]),
                };
                let from = x;
                let x = match x {
                    Buf::QLatentNormed => q_normed,
                    Buf::PerHead => &values,
                    Buf::Attn => &self.attn,
                    Buf::Act => &self.act[..],
                    Buf::Sampled => &self.sampled,
                    _ => &self.normed,
                };
                let out = match out {
                    Buf::Qkv => &mut *qkv,
                    Buf::QLatent => q_latent,
                    Buf::PerHead => per_head,
                    Buf::KvLatent => kv_latent,
                    Buf::GateUp => &mut self.gate_up,
                    Buf::Logits => &mut self.logits,
                    Buf::RouterLogits => self.experts.as_mut().map_or(&mut [][..], |e| &mut e.router_logits),
                    _ => &mut self.proj,
                };
                let out = &mut out[..rows * matrix.n];
                if matrix.data.quant_kind().is_some() {
                    if !made {
                        self.cpu.quantize_rows(&x[..rows * matrix.k], matrix.k, &mut self.codes);
                    }
                    let codes = if from == Buf::Act { &self.act_codes } else { &self.codes };
                    self.cpu.linear_quantized(codes, matrix, bias, out);
                } else {
                    self.cpu.linear(&x[..rows * matrix.k], rows, matrix, bias, out);
                }
                if let (Buf::PerHead, Some(latent)) = (from, &mut self.latent) {
                    latent.per_head = values;
                }
            }
            OpKind::LatentNorm { weight } => {
                let Some(latent) = &mut self.latent else { return };
                latent.norm_queries(&mut self.cpu, m, Self::vector(weights, weight));
            }
            OpKind::LatentQueries { norm, weight } => {
                let Some(latent) = &mut self.latent else { return };
                let (norm, keys) = (Self::vector(weights, norm), Self::matrix(weights, weight));
                latent.queries_and_keys(&mut self.cpu, m, norm, keys, qkv);
            }
            OpKind::LatentValues { weight } => {
                let Some(latent) = &mut self.latent else { return };
                latent.values(&mut self.cpu, m, Self::matrix(weights, weight), &self.attn[..m * q_width]);
            }
            OpKind::QkNorm { q, k } => {
                self.cpu.qk_norm(qkv, shape, Self::vector(weights, q), Self::vector(weights, k), eps);
            }
            OpKind::RopeKvWrite => self.cpu.rope_kv_write(qkv, shape, &self.rope, &batch(Rows::All), &mut kv),
            OpKind::Attention { rows, sinks } => {
                let (sinks, out) = (sinks.map(|id| Self::vector(weights, id)), &mut self.attn[..m * q_width]);
                self.cpu.attention_with_sinks(qkv, shape, &batch(rows), &kv, window, sinks, out);
            }
            OpKind::AttnScores => {
                // The first of the three lays out the score matrix for all of them.
                self.score_offsets.clear();
                let mut offset = 0;
                for seq in &step.seqs[..step.context_seqs] {
                    self.score_offsets.push(offset);
                    offset += shape.heads * seq.q_len as usize * seq.kv_len as usize;
                }
                let offsets = &self.score_offsets;
                self.cpu.attn_scores(qkv, shape, &batch(Rows::Context), &kv, window, offsets, scores);
            }
            OpKind::AttnSoftmax { sinks } => {
                let (sinks, offsets) = (sinks.map(|id| Self::vector(weights, id)), &self.score_offsets);
                self.cpu.attn_softmax_with_sinks(shape, &batch(Rows::Context), window, sinks, offsets, scores);
            }
            OpKind::AttnValues => {
                let (offsets, out) = (&self.score_offsets, &mut self.attn[..m * q_width]);
                self.cpu.attn_values(shape, &batch(Rows::Context), &kv, offsets, scores, out);
            }
            OpKind::SiluMul => {
                let inter = self.config.dense_width(layer);
                let gate_up = &self.gate_up[..m * 2 * inter];
                match self.integers {
                    true => self.cpu.silu_mul_quantized(gate_up, inter, &mut self.act_codes),
                    false => self.cpu.silu_mul(gate_up, inter, &mut self.act[..m * inter]),
                }
            }
            OpKind::Route { bias } => {
                let (Some(state), Some(moe)) = (&mut self.experts, &self.config.moe) else { return };
                let experts = moe.num_experts;
                let (logits, bias) = match &state.perfect {
                    // A bias would undo the balance.
                    Some((router, true)) => (router.logits(m), None),
                    _ => (&state.router_logits[..], bias.map(|id| Self::vector(weights, id))),
                };
                self.cpu.route(&mut state.pairs, m, |token, chosen, weights| {
                    moe.routing.route(&logits[token * experts..(token + 1) * experts], bias, chosen, weights);
                });
                state.count(layer);
            }
            OpKind::ExpertLinear { x, weight, bias, out } => {
                let bias = bias.map(|id| Self::vector(weights, id));
                let (Some(state), Some(moe)) = (&mut self.experts, &self.config.moe) else { return };
                let (matrix, pairs) = (Self::matrix(weights, weight), &state.pairs);
                let rows = &mut state.rows[..pairs.len() * hidden];
                let cpu = &mut self.cpu;
                if x == Buf::Normed {
                    let x = &self.normed[..m * hidden];
                    match self.integers {
                        true => cpu.quantize_gathered_rows(x, hidden, pairs.tokens(), &mut self.codes),
                        false => cpu.gather_rows(x, hidden, pairs.tokens(), rows),
                    }
                }
                let activation = expert_activation(moe);
                match (out, self.integers) {
                    (Buf::ExpertAct, true) => {
                        let (x, out) = (&self.codes, &mut self.act_codes);
                        cpu.expert_linear_activated_quantized(x, pairs, matrix, bias, activation, out);
                    }
                    (Buf::ExpertAct, false) => {
                        let out = &mut self.act[..pairs.len() * matrix.n / 2];
                        cpu.expert_linear_activated(rows, pairs, matrix, bias, activation, out);
                    }
                    (Buf::ExpertGateUp, integers) => {
                        let out = &mut self.gate_up[..pairs.len() * matrix.n];
                        match integers {
                            true => cpu.expert_linear_quantized(&self.codes, pairs, matrix, bias, out),
                            false => cpu.expert_linear(rows, pairs, matrix, bias, out),
                        }
                    }
                    (_, true) => cpu.expert_linear_quantized(&self.act_codes, pairs, matrix, bias, rows),
                    (_, false) => {
                        cpu.expert_linear(&self.act[..pairs.len() * matrix.k], pairs, matrix, bias, rows);
                    }
                }
            }
            OpKind::ExpertSiluMul => {
                let (Some(state), Some(moe)) = (&self.experts, &self.config.moe) else { return };
                let (inter, pairs) = (moe.intermediate_size, state.pairs.len());
                let (gate_up, activation) = (&self.gate_up[..pairs * 2 * inter], expert_activation(moe));
                match self.integers {
                    true => self.cpu.activate_quantized(gate_up, inter, activation, &mut self.act_codes),
                    false => self.cpu.activate(gate_up, inter, activation, &mut self.act[..pairs * inter]),
                }
            }
            OpKind::ExpertSum { add } => {
                let Some(state) = &self.experts else { return };
                let x = &state.rows[..state.pairs.len() * hidden];
                self.cpu.expert_sum(x, &state.pairs, hidden, add, &mut self.proj[..m * hidden]);
            }
            OpKind::Gather => {
                self.sampled_rows = step.sampled.len();
                let out = &mut self.sampled[..self.sampled_rows * hidden];
                self.cpu.gather_rows(&self.normed[..m * hidden], hidden, &step.sampled, out);
            }
            OpKind::Sample => {
                let (rows, vocab) = (self.sampled_rows, self.config.vocab_size);
                let logits = &self.logits[..rows * vocab];
                if step.draws.iter().all(|(draw, banned)| draw.is_greedy() && banned.is_empty()) {
                    self.cpu.argmax_rows(logits, vocab, &mut self.tokens[..rows]);
                } else {
                    // Every worker has its own scratch and takes every n-th row.
                    let (samplers, drawn) = (&self.samplers, &self.drawn);
                    self.cpu.parallel_for(samplers.len(), &|worker| {
                        let mut sampler = samplers[worker].lock().unwrap_or_else(|e| e.into_inner());
                        for row in (worker..rows).step_by(samplers.len()) {
                            let (draw, banned) = &step.draws[row];
                            let logits = &logits[row * vocab..(row + 1) * vocab];
                            let token = sampler.draw(logits, draw, &step.banned[banned.clone()]);
                            drawn[row].store(token, Ordering::Relaxed);
                        }
                    });
                    for (token, drawn) in self.tokens[..rows].iter_mut().zip(drawn) {
                        *token = drawn.load(Ordering::Relaxed);
                    }
                }
            }
        }
    }

    /// Name of the implementation behind an op, for traces.
    pub fn kernel_name(&self, node: &Node) -> String {
        let tier = self.cpu.tier().name();
        let dtype = match self.dtype {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        };
        let kv = match self.geometry.kind {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Bf16 => "bf16",
            KvType::Int8 => "int8",
        };
        let codes = if self.makes_codes(node) { "_int8" } else { "" };
        match node.kind {
            OpKind::Linear { weight, .. }
            | OpKind::ExpertLinear { weight, .. }
            | OpKind::LatentQueries { weight, .. }
            | OpKind::LatentValues { weight } => {
                let matrix = Self::matrix(&self.weights, weight);
                let dtype = match matrix.data.quant_kind() {
                    Some(QuantKind::Int8) => "int8",
                    Some(QuantKind::Int4) => "int4",
                    None => dtype,
                };
                let layout = if matrix.layout == Layout::Packed { "packed" } else { "plain" };
                let grouped = if matches!(node.kind, OpKind::Linear { .. }) { "" } else { "grouped_" };
                let activated = match node.kind {
                    OpKind::Linear { out: Buf::Act, .. } | OpKind::ExpertLinear { out: Buf::ExpertAct, .. } => "_silu",
                    _ => "",
                };
                format!("{grouped}gemm_{layout}_{dtype}{activated}_{tier}")
            }
            OpKind::Embed { .. } => format!("embed_{dtype}"),
            OpKind::RmsNorm { .. } => format!("rms_norm{codes}_{tier}"),
            OpKind::AddRmsNorm { .. } => format!("add_rms_norm{codes}_{tier}"),
            OpKind::QkNorm { .. } => format!("qk_norm_{tier}"),
            OpKind::LatentNorm { .. } => format!("rms_norm_{tier}"),
            OpKind::RopeKvWrite => format!("rope_kv_write_{kv}_{tier}"),
            OpKind::Attention { .. } => format!("paged_attention_{kv}_{tier}"),
            OpKind::AttnScores => format!("unfused_scores_{kv}_{tier}"),
            OpKind::AttnSoftmax { .. } => format!("unfused_softmax_{tier}"),
            OpKind::AttnValues => format!("unfused_values_{kv}_{tier}"),
            OpKind::SiluMul | OpKind::ExpertSiluMul => format!("silu_mul{codes}_{tier}"),
            OpKind::Route { .. } => "moe_route".to_string(),
            OpKind::ExpertSum { .. } => format!("moe_sum_{tier}"),
            OpKind::Gather => "gather_rows".to_string(),
            OpKind::Sample => format!("sample_{tier}"),
        }
    }
}
