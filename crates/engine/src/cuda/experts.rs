//! Mixtures of experts on a GPU: what their ops read and write, and which kernel runs which of them.

use strobe_kernels_cuda::{
    CudaError, DeviceBuffer, DevicePtr, ExpertActivation, ExpertArgs, ExpertProduct, ExpertRouting, Gpu, MoeOps,
    MoeShape, PinnedBuffer, Precision, RouteArgs,
};
use strobe_model::{ModelConfig, MoeConfig, PerfectRouter, RoutingMethod, SwigluClamp};

use crate::step::StepLimits;

/// The experts' kernels and buffers.
pub(super) struct Experts {
    ops: MoeOps,
    experts: usize,
    router_logits: DeviceBuffer,
    /// What the expert of each pair answers.
    out: DeviceBuffer,
    /// Tokens sent to each expert, `[layers][experts]`.
    counts: DeviceBuffer,
}

/// The kernels' name of a routing method.
pub(crate) fn routing(method: RoutingMethod) -> ExpertRouting {
    match method {
        RoutingMethod::SoftmaxTopK { renormalise: false } => ExpertRouting::SoftmaxTopK,
        // The divisor of the softmax over all experts cancels.
        RoutingMethod::SoftmaxTopK { renormalise: true } | RoutingMethod::TopKSoftmax => ExpertRouting::TopKSoftmax,
        RoutingMethod::DeepSeekV3 { groups, topk_groups, scale, renormalise } => {
            ExpertRouting::DeepSeekV3 { groups, topk_groups, scale, renormalise }
        }
    }
}

fn shape(config: &ModelConfig, moe: &MoeConfig) -> MoeShape {
    MoeShape {
        experts: moe.num_experts,
        per_token: moe.experts_per_token,
        routing: routing(moe.routing),
        hidden: config.hidden_size,
        inter: moe.intermediate_size,
        activation: match moe.clamp {
            None => ExpertActivation::Silu,
            Some(SwigluClamp { alpha, limit }) => ExpertActivation::Clamped { alpha, limit },
        },
    }
}

impl Experts {
    /// Everything for steps of `limits`, or `None` for a model without experts. Balanced logits are used from the start,
    /// where there are any.
    pub(super) fn new(
        gpu: &Gpu,
        config: &ModelConfig,
        limits: StepLimits,
        precision: Precision,
        perfect: Option<&PerfectRouter>,
    ) -> Result<Option<Experts>, CudaError> {
        let Some(moe) = &config.moe else { return Ok(None) };
        let (rows, experts) = (limits.tokens, moe.num_experts);
        let mut ops = MoeOps::new(gpu, precision, shape(config, moe), rows)?;
        if let Some(router) = perfect {
            ops.set_planned(router.logits(rows))?;
        }
        let pairs = rows * moe.experts_per_token;
        let counts = DeviceBuffer::new(config.num_hidden_layers * experts * 4, "loads of experts")?;
        // Layers without experts are never written.
        counts.fill(0)?;
        Ok(Some(Experts {
            ops,
            experts,
            router_logits: DeviceBuffer::new(rows * experts * 4, "logits of routers")?,
            out: DeviceBuffer::new(pairs * config.hidden_size * precision.bytes(), "answers of experts")?,
            counts,
        }))
    }

    /// Bytes on the device.
    pub(super) fn bytes(&self) -> u64 {
        self.ops.bytes() + (self.router_logits.bytes() + self.out.bytes() + self.counts.bytes()) as u64
    }

    /// Counts of a step.
    pub(super) fn count(&self) -> usize {
        self.counts.bytes() / 4
    }

    /// Where routers write.
    pub(super) fn router_logits(&self) -> DevicePtr {
        self.router_logits.ptr()
    }

    /// Use balanced logits, where there are any, or the router's own.
    pub(super) fn use_planned(&self, on: bool) -> Result<(), CudaError> {
        self.ops.use_planned(on)
    }

    /// Choose the experts of `tokens` rows; those with a negative slot are padding.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory is large enough for `tokens` rows, which are no more than the limits of a step.
    pub(super) unsafe fn route(
        &self,
        gpu: &Gpu,
        layer: usize,
        bias: DevicePtr,
        slots: DevicePtr,
        tokens: usize,
    ) -> Result<(), CudaError> {
        let counts = self.counts.ptr() + (layer * self.experts * 4) as u64;
        let args = RouteArgs { logits: self.router_logits.ptr(), bias, slots, tokens, counts };
        // SAFETY: the caller's promise; logits and counts were made for these limits.
        unsafe { self.ops.route(gpu, &args, self.ops.tiles_for(tokens)) }
    }

    /// Whether [`Experts::gate_up`] of so many rows copies each once for each of its experts first.
    pub(super) fn gathers(&self, tokens: usize) -> bool {
        self.ops.tiles_for(tokens).hopper
    }

    /// Gate, up and activation of every pair.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory is large enough for `tokens` rows, which are those of the route before.
    pub(super) unsafe fn gate_up(
        &self,
        gpu: &Gpu,
        x: DevicePtr,
        w: DevicePtr,
        bias: DevicePtr,
        act: DevicePtr,
        tokens: usize,
    ) -> Result<(), CudaError> {
        let args =
            ExpertArgs { product: ExpertProduct::GateUp, x, w, bias, out: act, gathered: self.out.ptr(), tokens };
        // SAFETY: the caller's promise; `out` was made for these limits, and the tiles follow from the tokens.
        unsafe { self.ops.experts(gpu, &args, self.ops.tiles_for(tokens)) }
    }

    /// What the expert of every pair answers.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory is large enough for `tokens` rows, which are those of the route before.
    pub(super) unsafe fn down(
        &self,
        gpu: &Gpu,
        act: DevicePtr,
        w: DevicePtr,
        bias: DevicePtr,
        tokens: usize,
    ) -> Result<(), CudaError> {
        let args =
            ExpertArgs { product: ExpertProduct::Down, x: act, w, bias, out: self.out.ptr(), gathered: 0, tokens };
        // SAFETY: the caller's promise; `out` was made for these limits, and the tiles follow from the tokens.
        unsafe { self.ops.experts(gpu, &args, self.ops.tiles_for(tokens)) }
    }

    /// Add what each token's experts answer to the residual stream.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory is large enough for `tokens` rows, which are those of the route before.
    pub(super) unsafe fn sum(&self, gpu: &Gpu, hidden: DevicePtr, tokens: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise; `out` was made for these limits.
        unsafe { self.ops.sum(gpu, self.out.ptr(), hidden, tokens) }
    }

    /// Write the counts of all layers into page-locked memory of the host.
    ///
    /// # Safety
    /// Nobody reads or writes `host`, which has room for [`Experts::count`] of them and no more, before the GPU is done.
    pub(super) unsafe fn copy_counts(&self, gpu: &Gpu, host: &PinnedBuffer<u32>) -> Result<(), CudaError> {
        // SAFETY: `counts` is as long; the rest is the caller's promise.
        unsafe { self.ops.copy_counts(gpu, self.counts.ptr(), host) }
    }
}
