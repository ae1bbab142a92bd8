//! One sequence on any device, and the logits of its positions: what evaluations run on.

use strobe_model::program::{Node, program};

use crate::cpu::{CpuBackend, CpuBackendOptions};
use crate::cuda::{CudaBackend, CudaBackendOptions};
use crate::device::{Device, Runner};
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::step::{Backend, StepInputs, StepLimits, execute};

/// A model that runs a single sequence.
pub(crate) struct Sequence<'a> {
    runner: Runner,
    model: &'a LoadedModel,
    nodes: Vec<Node>,
    inputs: StepInputs,
    blocks: Vec<u32>,
}

/// What a step gives.
pub(crate) struct Answer {
    /// The logits of the rows that were asked for, one after the other.
    pub(crate) logits: Vec<f32>,
    /// The most likely token after the last of them.
    pub(crate) token: u32,
}

impl<'a> Sequence<'a> {
    /// Room for a sequence of `positions`, in steps of up to `tokens`.
    pub(crate) fn new(
        device: Device,
        model: &'a LoadedModel,
        positions: usize,
        tokens: usize,
    ) -> Result<Sequence<'a>, EngineError> {
        let build = &model.config.build;
        let config = &model.config.model;
        let limits = StepLimits { tokens, sampled: tokens, requests: 1, positions };
        let block_tokens = build.cache_block_tokens();
        let blocks: Vec<u32> = (0..positions.div_ceil(block_tokens) as u32).collect();
        let program_options = build.program_options(device.cpu_tier());
        let nodes = program(config, program_options);
        let (runner, operands) = match device {
            Device::Cpu(cpu) => {
                build.check_cpu()?;
                let options = CpuBackendOptions {
                    limits,
                    tokens_per_block: block_tokens,
                    blocks: blocks.len(),
                    dtype: build.dtype,
                    kv: build.cpu_kv_type(cpu.tier())?,
                    program: program_options,
                };
                let backend = CpuBackend::new(cpu, config.clone(), model.weights.clone(), &options)?;
                (Runner::Cpu(Box::new(backend)), build.cpu_operands())
            }
            Device::Cuda(device) => {
                let cache = crate::CacheSize::Blocks(blocks.len());
                let setup = CudaBackendOptions {
                    device: &device,
                    limits,
                    cache,
                    perfect_router: None,
                    progress: &mut |_| true,
                };
                let backend = CudaBackend::new(model, nodes.clone().into(), setup)?;
                (Runner::Cuda(Box::new(backend)), build.gpu_operands(config))
            }
        };
        let mut inputs = StepInputs::new(limits, block_tokens, operands);
        inputs.keep_logits = true;
        Ok(Sequence { runner, model, nodes, inputs, blocks })
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
        let inputs = &self.inputs;
        match &mut self.runner {
            Runner::Cpu(backend) => {
                execute(backend.as_mut(), &self.model.config.model, &self.nodes, 0, inputs, None);
                let token = backend.tokens().last().copied().unwrap_or_default();
                Ok(Answer { logits: backend.logits().to_vec(), token })
            }
            Runner::Cuda(backend) => {
                backend.launch(inputs, None)?;
                let token = backend.wait()?.last().copied().unwrap_or_default();
                Ok(Answer { logits: backend.read_logits(inputs.sampled.len())?, token })
            }
        }
    }
}
