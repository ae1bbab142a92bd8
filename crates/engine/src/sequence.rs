//! One sequence on any device, and the logits of its positions: what evaluations run on.

use crate::backend::Backend;
use crate::clock::Clock;
use crate::device::{Device, Ready, Setup};
use crate::engine::CacheSize;
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::step::{StepInputs, StepLimits};

/// A model that runs a single sequence.
pub(crate) struct Sequence {
    backend: Box<dyn Backend>,
    inputs: StepInputs,
    blocks: Vec<u32>,
    clock: Clock,
}

/// What a step gives.
pub(crate) struct Answer {
    /// The logits of the rows that were asked for, one after the other.
    pub(crate) logits: Vec<f32>,
    /// The most likely token after the last of them.
    pub(crate) token: u32,
}

impl Sequence {
    /// Room for a sequence of `positions`, in steps of up to `tokens`.
    pub(crate) fn new(
        device: Device,
        model: &LoadedModel,
        positions: usize,
        tokens: usize,
    ) -> Result<Sequence, EngineError> {
        let limits = StepLimits { tokens, sampled: tokens, requests: 1, positions };
        let block_tokens = model.config.build.cache_block_tokens();
        let blocks: Vec<u32> = (0..positions.div_ceil(block_tokens) as u32).collect();
        let cache = CacheSize::Blocks(blocks.len());
        let setup = Setup { limits, cache, perfect_router: None, progress: &mut |_| true };
        let Ready { mut backend, operands, .. } = device.open(model, setup)?;
        backend.attach()?;
        let mut inputs = StepInputs::new(limits, block_tokens, operands);
        inputs.keep_logits = true;
        Ok(Sequence { backend, inputs, blocks, clock: Clock::start() })
    }

    /// Run `tokens` at the positions from `start` on and give the logits of the rows from `first_row` on. `context` says
    /// whether they belong to the prompt.
    pub(crate) fn step(
        &mut self,
        tokens: &[u32],
        start: usize,
        first_row: usize,
        context: bool,
    ) -> Result<Answer, EngineError> {
        self.inputs.clear();
        self.inputs.push(tokens, start, &self.blocks, context);
        self.inputs.sampled.extend(first_row as u32..tokens.len() as u32);
        self.run()
    }

    /// Run the last token of a prompt, at position `start`, and the first one behind it in one step, as for a request that is
    /// computed again after a pause; gives the logits of both.
    pub(crate) fn resume(&mut self, tokens: [u32; 2], start: usize) -> Result<Answer, EngineError> {
        self.inputs.clear();
        self.inputs.push(&tokens[..1], start, &self.blocks, true);
        self.inputs.push(&tokens[1..], start + 1, &self.blocks, false);
        self.inputs.sampled.extend(0..2);
        self.run()
    }

    fn run(&mut self) -> Result<Answer, EngineError> {
        self.backend.launch(&mut self.inputs, &self.clock, None)?;
        self.backend.land(None)?;
        let token = self.backend.landed().tokens.last().copied().unwrap_or_default();
        Ok(Answer { logits: self.backend.logits()?, token })
    }
}
