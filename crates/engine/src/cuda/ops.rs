//! Which kernel runs which op of the forward pass.

use strobe_kernels_cuda::{
    CudaError, DecodeArgs, DeviceBuffer, DevicePtr, EmbedArgs, Epilogue, LinearArgs, LinearInput, LinearShape,
    LinearSite, Maxima, NormArgs, PrefillArgs, RopeAngles, RopeArgs, Route, SecondPass, UnfusedArgs, Weights,
};
use strobe_model::program::{
    Buf, Input, Node, OpKind, Output, Pass, ProgramOptions, Ran, Rows, after_experts_norm, program,
};
use strobe_model::{LayerWeight, ModelConfig, WeightId};

use crate::backend::qkv_shape;
use crate::step::StepLimits;

use super::CudaBackend;
use super::attention::value_dim;
use super::buffers::LatentBuffers;
use super::experts::Experts;
use super::inputs::{Packed, at};

impl CudaBackend {
    /// Launch every op of the forward pass, up to the logits. Everything is at a place that depends on counts only. Returns
    /// what the product of the logits keeps of each row's maximum. `launched` gets the ops that were launched and how: an op
    /// that others have folded in is not among them.
    ///
    /// # Safety
    /// As for [`strobe_kernels_cuda::Gpu::launch`], of everything that a step touches: its rows, keys and samples are within the
    /// limits that buffers, cache and tables were made for, and the numbers in its packed inputs lead nowhere else
    /// ([`super::inputs::check`]); inputs are on the device or on their way, and nobody changes them before the step has run.
    pub(super) unsafe fn run_nodes(
        &self,
        packed: &Packed,
        mut launched: Option<&mut Vec<(u32, Ran)>>,
    ) -> Result<Option<Maxima>, CudaError> {
        let nodes = self.nodes.clone();
        let layout = packed.layout;
        let (m, sampled) = (layout.rows_padded(), layout.sampled_padded());
        let mut state = State { delta: false, norm: None, codes: false, activated: false, ahead: None, maxima: None };
        let mut index = 0;
        while index + 1 < nodes.len() {
            let node = &nodes[index];
            self.gpu.set_tag(index as u32);
            // SAFETY: the caller's promise.
            let done = unsafe { self.run_node(&nodes, index, m, sampled, packed, &mut state)? };
            if self.blocking {
                let layer = node.layer.map_or(String::new(), |layer| format!(" of layer {layer}"));
                self.settled(&format!("{}{layer}", node.name))?;
            }
            let (took, ran) = match done {
                Done::Nothing => (1, None),
                Done::Ran(ran) => (1, Some(ran)),
                Done::RanNext(ran) => (2, Some(ran)),
            };
            index += took;
            if let (Some(launched), Some(ran)) = (&mut launched, ran) {
                launched.push((index as u32 - 1, ran));
            }
        }
        Ok(state.maxima)
    }

    /// Run the op at `index`, unless another has done it or will.
    ///
    /// # Safety
    /// As for [`CudaBackend::run_nodes`].
    #[expect(unsafe_op_in_unsafe_fn, reason = "nearly every line launches, each on the promise made to this function")]
    unsafe fn run_node(
        &self,
        nodes: &[Node],
        index: usize,
        m: usize,
        sampled: usize,
        packed: &Packed,
        state: &mut State,
    ) -> Result<Done, CudaError> {
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
        let out_width = shape.heads * value_dim(config);
        let window = config.window(layer).unwrap_or(0);
        let mut ran = Ran::default();
        match node.kind {
            OpKind::Embed { table } => {
                self.rows.embed(
                    gpu,
                    &EmbedArgs {
                        tokens: base,
                        from_sampled: at(base, layout.last_rows()),
                        last_tokens: b.tokens.ptr(),
                        table: self.weights.ptr(table)?,
                        hidden: b.hidden.ptr(),
                        rows: m,
                        width: hidden,
                    },
                )?;
            }
            OpKind::RmsNorm { weight } | OpKind::AddRmsNorm { weight } => {
                let w = self.weights.ptr(weight)?;
                let add = state.delta && matches!(node.kind, OpKind::AddRmsNorm { .. });
                let route = self.next_route(nodes, index, packed, state);
                state.delta = false;
                state.codes = false;
                if !add && route.is_some_and(|route| route.folds_norm) {
                    state.norm = Some(w);
                    return Ok(Done::Nothing);
                }
                let (out, scales) = match &b.codes {
                    Some((codes, scales)) if route.is_some_and(|route| route.fp8_input) => {
                        state.codes = true;
                        ran.output = Output::Codes;
                        (codes.ptr(), Some(scales.ptr()))
                    }
                    _ => (b.normed.ptr(), None),
                };
                if !add {
                    ran.input = Input::Settled;
                }
                let args = NormArgs {
                    hidden: b.hidden.ptr(),
                    delta: add.then(|| b.proj.ptr()),
                    weight: w,
                    eps,
                    out,
                    scales,
                    rows: m,
                    width: hidden,
                };
                self.rows.rms_norm(gpu, &args)?;
            }
            OpKind::Linear { x, weight, bias, out } => {
                let shape = self.shape_of(node, packed).unwrap_or_else(|| unreachable!("a linear op has a shape"));
                let rows = if x == Buf::Sampled { sampled } else { m };
                let ahead = state.ahead.take().filter(|(place, _)| *place == index);
                let route = ahead.map_or_else(|| self.linear.route(&shape, rows), |(_, route)| route);
                let latent = |part: fn(&LatentBuffers) -> &DeviceBuffer| {
                    let missing =
                        || CudaError::Unsupported(format!("{} in a model without latent attention", node.name));
                    b.latent.as_ref().map(|latent| part(latent).ptr()).ok_or_else(missing)
                };
                let plain = match x {
                    Buf::QLatentNormed => latent(|l| &l.q_normed)?,
                    Buf::PerHead => latent(|l| &l.per_head)?,
                    Buf::Attn => b.attn.ptr(),
                    Buf::Act => b.act.ptr(),
                    Buf::Sampled if !packed.all_sampled => b.sampled.ptr(),
                    _ => b.normed.ptr(),
                };
                let input = match (&b.codes, state.norm.take()) {
                    (_, Some(weight)) => {
                        ran.input = Input::Norm;
                        LinearInput::Norm { hidden: b.hidden.ptr(), weight, eps }
                    }
                    (Some((codes, scales)), None) if route.fp8_input => {
                        ran.input = if state.codes { Input::Codes } else { Input::Quantized };
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
                    (Buf::QLatent, _) => latent(|l| &l.q_latent)?,
                    (Buf::PerHead, _) => latent(|l| &l.per_head)?,
                    (Buf::KvLatent, _) => latent(|l| &l.kv_latent)?,
                    (Buf::GateUp, _) if route.folds_silu => b.act.ptr(),
                    (Buf::GateUp, _) => b.gate_up.ptr(),
                    (Buf::Logits, _) => b.logits.ptr(),
                    (Buf::RouterLogits, _) => self.experts()?.router_logits(),
                    _ => b.proj.ptr(),
                };
                self.linear.run_route(
                    gpu,
                    &LinearArgs {
                        shape,
                        input,
                        w: self.weights.ptr(weight)?,
                        w_scales: self.weights.scales(weight),
                        bias: self.weights.optional(bias)?,
                        out: target,
                        spared: if out == Buf::Logits { at(base, layout.logits_spared()) } else { 0 },
                        m: rows,
                    },
                    &route,
                )?;
                if out == Buf::Logits {
                    state.maxima = route.maxima;
                }
                state.delta = out == Buf::Proj && shape.epilogue != Epilogue::AddResidual;
                state.activated = out == Buf::GateUp && route.folds_silu;
                ran.output = match (shape.epilogue, route.maxima) {
                    (Epilogue::AddResidual, _) => Output::Residual,
                    (Epilogue::SiluMul, _) if route.folds_silu => Output::Activated,
                    (_, Some(maxima)) => Output::Maxima { tiles: maxima.tiles as u32, spared: packed.logits_spared },
                    _ => Output::Plain,
                };
                ran.pass = match route.second {
                    None => Pass::None,
                    Some(SecondPass::Bias) => Pass::Bias,
                    Some(SecondPass::Scale) => Pass::Scale,
                };
            }
            OpKind::QkNorm { q, k } => {
                let (q, k) = (self.weights.ptr(q)?, self.weights.ptr(k)?);
                self.rows.qk_norm(gpu, b.qkv.ptr(), q, k, eps, m, shape.heads, shape.kv_heads, shape.head_dim)?;
            }
            OpKind::RopeKvWrite | OpKind::LatentQueries { .. } if config.latent.is_some() => {
                ran.input = Input::LatentKeys;
                self.run_latent(node, m, packed, kv)?;
            }
            OpKind::RopeKvWrite => {
                let next = nodes.get(index + 1).map(|node| node.kind);
                let alone = packed.prefill == 0 && packed.one_span_each;
                if let Some(OpKind::Attention { rows: Rows::All, sinks }) = next
                    && alone
                    && self.attention.fuses_rope()
                {
                    gpu.set_tag(index as u32 + 1);
                    self.decode_attention(packed, kv, window, self.weights.optional(sinks)?, true)?;
                    return Ok(Done::RanNext(Ran { input: Input::Unrotated, ..ran }));
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
            OpKind::Attention { sinks, .. } => {
                let sinks = self.weights.optional(sinks)?;
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
                            sinks,
                            out: b.attn.ptr(),
                            out_stride: out_width,
                        },
                    )?;
                }
                if packed.decode > 0 {
                    self.decode_attention(packed, kv, window, sinks, false)?;
                }
            }
            OpKind::AttnScores | OpKind::AttnSoftmax { .. } | OpKind::AttnValues => {
                let (Some(unfused), Some(scores)) = (&self.unfused, &b.scores) else { return Ok(Done::Nothing) };
                if packed.unfused == 0 {
                    return Ok(Done::Nothing);
                }
                ran.output = if node.kind == OpKind::AttnValues { Output::Plain } else { Output::Visible };
                let sinks = match node.kind {
                    OpKind::AttnSoftmax { sinks } => self.weights.optional(sinks)?,
                    _ => 0,
                };
                let args = UnfusedArgs {
                    qkv: b.qkv.ptr(),
                    kv,
                    spans: at(base, layout.prefill_spans()),
                    span_count: packed.unfused,
                    max_q: packed.widest.0,
                    max_kv: packed.widest.1,
                    block_tables: at(base, layout.tables()),
                    window,
                    sinks,
                    score_offsets: at(base, layout.score_offsets()),
                    scores: scores.ptr(),
                    out: b.attn.ptr(),
                };
                match node.kind {
                    OpKind::AttnScores => unfused.scores(gpu, &args)?,
                    OpKind::AttnSoftmax { .. } => unfused.softmax(gpu, &args)?,
                    _ => unfused.values(gpu, &args)?,
                }
            }
            OpKind::SiluMul => {
                let inter = config.dense_width(layer);
                if state.activated {
                    state.activated = false;
                    return Ok(Done::Nothing);
                }
                let wants_codes = self.next_route(nodes, index, packed, state).is_some_and(|route| route.fp8_input);
                match (&b.codes, wants_codes) {
                    (Some((codes, scales)), true) => {
                        self.rows.silu_mul_fp8(gpu, b.gate_up.ptr(), codes.ptr(), scales.ptr(), m, inter)?;
                        state.codes = true;
                        ran.output = Output::Codes;
                    }
                    _ => self.rows.silu_mul(gpu, b.gate_up.ptr(), b.act.ptr(), m, inter)?,
                }
            }
            OpKind::Gather => {
                if sampled == 0 || packed.all_sampled {
                    return Ok(Done::Nothing);
                }
                let index = at(base, layout.sampled());
                self.rows.gather_rows(gpu, b.normed.ptr(), index, b.sampled.ptr(), sampled, hidden)?;
            }
            OpKind::Sample => return Ok(Done::Nothing),
            OpKind::Route { bias } => {
                let bias = self.weights.optional(bias)?;
                self.experts()?.route(gpu, layer, bias, at(base, layout.slots()), m)?;
            }
            OpKind::ExpertLinear { x, weight, bias, .. } => {
                let (w, bias) = (self.weights.ptr(weight)?, self.weights.optional(bias)?);
                match x {
                    Buf::Normed => {
                        let experts = self.experts()?;
                        ran.input = if experts.gathers(m) { Input::Gathered } else { Input::Plain };
                        ran.output = Output::Activated;
                        experts.gate_up(gpu, b.normed.ptr(), w, bias, b.act.ptr(), m)?;
                    }
                    _ => self.experts()?.down(gpu, b.act.ptr(), w, bias, m)?,
                }
            }
            // The product before has applied it.
            OpKind::ExpertSiluMul => return Ok(Done::Nothing),
            // What experts share was added to the residual stream by its own projection.
            OpKind::ExpertSum { .. } => {
                ran.output = Output::Residual;
                self.experts()?.sum(gpu, b.hidden.ptr(), m)?;
            }
            OpKind::LatentNorm { .. } | OpKind::LatentQueries { .. } | OpKind::LatentValues { .. } => {
                self.run_latent(node, m, packed, kv)?;
            }
        }
        Ok(Done::Ran(ran))
    }

    fn experts(&self) -> Result<&Experts, CudaError> {
        self.experts.as_ref().ok_or_else(|| CudaError::Unsupported("an op of experts in a model without".into()))
    }

    /// # Safety
    /// As for [`CudaBackend::run_nodes`].
    unsafe fn decode_attention(
        &self,
        packed: &Packed,
        kv: DevicePtr,
        window: usize,
        sinks: DevicePtr,
        rope: bool,
    ) -> Result<(), CudaError> {
        let (b, layout, base) = (&self.buffers, packed.layout, self.buffers.packed.ptr());
        let shape = qkv_shape(&self.config);
        let spans = layout.decode_padded();
        let most_keys = if window > 0 { window.min(self.limits.positions) } else { self.limits.positions };
        let args = DecodeArgs {
            qkv: b.qkv.ptr(),
            q_stride: (shape.heads + 2 * shape.kv_heads) * shape.head_dim,
            kv,
            spans: at(base, layout.decode_spans()),
            span_count: spans,
            splits: self.attention.splits_for(spans, most_keys),
            block_tables: at(base, layout.tables()),
            settled: packed.settled(),
            window,
            sinks,
            out: b.attn.ptr(),
            out_stride: shape.heads * value_dim(&self.config),
        };
        let angles = rope.then(|| RopeAngles { cosines: b.cos.ptr(), sines: b.sin.ptr() });
        // SAFETY: the caller's promise.
        unsafe { self.attention.decode(&self.gpu, &args, angles) }
    }

    /// How the product runs that reads what the op at `index` writes; the product itself need not ask again.
    fn next_route(&self, nodes: &[Node], index: usize, packed: &Packed, state: &mut State) -> Option<Route> {
        let mut place = index + 1;
        if nodes.get(place)?.kind == OpKind::Gather {
            // The rows that are gathered must be there; where all are taken, gathering does nothing.
            if !packed.all_sampled {
                return None;
            }
            place += 1;
        }
        let next = nodes.get(place)?;
        let rows = match next.kind {
            OpKind::Linear { x: Buf::Sampled, .. } => packed.layout.sampled_padded(),
            _ => packed.layout.rows_padded(),
        };
        let route = self.linear.route(&self.shape_of(next, packed)?, rows);
        state.ahead = Some((place, route));
        Some(route)
    }

    fn shape_of(&self, node: &Node, packed: &Packed) -> Option<LinearShape> {
        let OpKind::Linear { x, weight, bias, out } = node.kind else { return None };
        Some(linear_shape(&self.config, self.fp8, x, weight, bias.is_some(), out, packed.all_sampled))
    }
}

/// What became of an op.
enum Done {
    /// Nothing was launched: an op before has done it, one behind will, or there is nothing to do.
    Nothing,
    /// It was launched.
    Ran(Ran),
    /// The op behind it was launched and has done it too.
    RanNext(Ran),
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
    /// The route of the product at this place, where an op before it had to know.
    ahead: Option<(usize, Route)>,
    /// What the product of the logits keeps of each row's maximum.
    maxima: Option<Maxima>,
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
        Buf::Logits => Epilogue::Logits,
        Buf::RouterLogits => Epilogue::StoreF32,
        _ => Epilogue::Store,
    };
    let weights = if fp8 && matches!(weight, WeightId::Layer(..)) { Weights::Fp8 } else { Weights::Same };
    // Rows that more than one product wants are normed once for all.
    let latent = config.latent.is_some() && matches!(weight, WeightId::Layer(_, part) if reads_input_norm(part));
    let shared = latent || after_experts_norm(config, weight);
    let norm = (x == Buf::Normed && !shared) || (x == Buf::Sampled && all_sampled);
    LinearShape { n: n as usize, k: k as usize, epilogue, weights, bias, norm }
}

/// Whether a product of latent attention reads the norm before attention.
fn reads_input_norm(part: LayerWeight) -> bool {
    matches!(part, LayerWeight::QLatent | LayerWeight::Q | LayerWeight::KvLatent)
}

/// Every product of a model, for tuning.
pub(super) fn sites(config: &ModelConfig, limits: StepLimits, fp8: bool) -> Vec<LinearSite> {
    let mut sites: Vec<LinearSite> = Vec::new();
    for node in program(config, ProgramOptions { context_fmha: true, own_table: false, activated_multiple: None }) {
        let OpKind::Linear { x, weight, bias, out } = node.kind else { continue };
        let (max_rows, all_sampled): (_, &[bool]) = match x {
            Buf::Sampled => (limits.sampled, &[true, false]),
            _ => (limits.tokens, &[false]),
        };
        for all in all_sampled {
            let shape = linear_shape(config, fp8, x, weight, bias.is_some(), out, *all);
            if sites.iter().all(|site| site.shape != shape) {
                sites.push(LinearSite { shape, max_rows });
            }
        }
    }
    sites
}
