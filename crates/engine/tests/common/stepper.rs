//! Single steps by hand: any mix of spans, logits of every row.

use strobe_engine::LoadedModel;
use strobe_engine::backend::Backend;
use strobe_engine::clock::Clock;
use strobe_engine::cpu::{CpuBackend, CpuBackendOptions};
use strobe_engine::step::{StepInputs, StepLimits};
use strobe_kernels_cpu::{Cpu, KvType};
use strobe_model::program::program;

/// Positions `start..start + tokens.len()` of a sequence that holds `blocks`.
pub(crate) struct Span<'a> {
    pub tokens: &'a [u32],
    pub start: usize,
    pub blocks: &'a [u32],
    pub context: bool,
}

/// A backend without a scheduler.
pub(crate) struct Stepper {
    backend: CpuBackend,
    inputs: StepInputs,
    vocab: usize,
}

impl Stepper {
    /// Room for steps of `tokens` rows over `blocks` cache blocks. The cache is of type `cache`, whatever the weights.
    pub(crate) fn new(cpu: Cpu, model: &LoadedModel, cache: KvType, tokens: usize, blocks: usize) -> Stepper {
        let build = &model.config.build;
        let limits = StepLimits { tokens, sampled: tokens, requests: tokens, positions: build.max_seq_len };
        let options = CpuBackendOptions {
            limits,
            tokens_per_block: build.cache_block_tokens(),
            blocks,
            dtype: build.dtype,
            kv: cache,
            program: build.program_options(Some(cpu.tier())),
        };
        let config = model.config.model.clone();
        let nodes = program(&config, options.program).into();
        Stepper {
            inputs: StepInputs::new(limits, options.tokens_per_block, build.cpu_operands()),
            vocab: config.vocab_size,
            backend: CpuBackend::new(cpu, config, nodes, model.weights.clone(), &options).unwrap(),
        }
    }

    /// Run one step; context spans must come first. Returns the logits of each row of each span.
    pub(crate) fn step(&mut self, spans: &[Span<'_>]) -> Vec<Vec<Vec<f32>>> {
        self.inputs.clear();
        for span in spans {
            self.inputs.push(span.tokens, span.start, span.blocks, span.context);
        }
        self.inputs.sampled.extend(0..self.inputs.tokens.len() as u32);
        self.backend.launch(&mut self.inputs, &Clock::start(), None).unwrap();
        self.backend.land(None).unwrap();
        let logits = self.backend.logits().unwrap();
        let mut rows = logits.chunks(self.vocab).map(<[f32]>::to_vec);
        spans.iter().map(|span| rows.by_ref().take(span.tokens.len()).collect()).collect()
    }
}
