//! A step on a CPU: the seam through which every op passes, and what becomes of the tokens.

use std::ops::Range;

use strobe_model::program::StepShape;

use crate::backend::{Backend, Landed, MemoryByPool, Trace};
use crate::clock::Clock;
use crate::cpu_sizes::expert_bytes;
use crate::device::DeviceFacts;
use crate::error::EngineError;
use crate::latent;
use crate::recorder::OpEvent;
use crate::step::StepInputs;

use super::CpuBackend;

/// What a step has brought, until it is asked for.
pub(super) struct Stage {
    tokens: Vec<u32>,
    expert_counts: Vec<u32>,
    /// The step has run, but nobody was told.
    under_way: bool,
}

impl Stage {
    pub(super) fn with_room(sampled: usize, expert_counts: usize) -> Stage {
        Stage {
            tokens: Vec::with_capacity(sampled),
            expert_counts: Vec::with_capacity(expert_counts),
            under_way: false,
        }
    }
}

impl CpuBackend {
    /// Put the tokens of the step before in, where the host does not know them yet: that step has run.
    fn fill_in_tokens(&self, step: &mut StepInputs) {
        let before = &self.stages[1 - self.next];
        if !before.under_way {
            return;
        }
        for (token, &row) in step.tokens.iter_mut().zip(&step.from_last) {
            if let Some(&known) = usize::try_from(row).ok().and_then(|row| before.tokens.get(row)) {
                *token = known;
            }
        }
    }

    /// Run `wanted` of the nodes in order. This is the seam: with a trace every op leaves its time and cost, without one
    /// nothing is read or stored.
    fn run_nodes(&mut self, wanted: Range<usize>, step: &StepInputs, clock: &Clock, trace: Option<&mut Trace<'_>>) {
        let shape = step.shape();
        let nodes = self.nodes.clone();
        let first = wanted.start;
        let wanted = nodes[wanted].iter().zip(first..).filter(|(node, _)| node.rows(&shape) > 0);
        match trace {
            None => wanted.for_each(|(node, _)| self.run(node, step)),
            Some(trace) => {
                for (node, index) in wanted {
                    let start = clock.now();
                    self.run(node, step);
                    let end = clock.now();
                    let cost = node.cost(&self.config, &StepShape { experts_used: self.experts_used(), ..shape });
                    let (node, iteration) = (index as u32, trace.iteration);
                    trace.recorder.op(OpEvent { node, iteration, start, end, cost });
                }
            }
        }
    }

    /// Experts that some token of the last step was sent to, layer by layer; empty for a model without.
    fn experts_used(&self) -> &[u32] {
        self.experts.as_ref().map_or(&[], |experts| &experts.used)
    }
}

impl Backend for CpuBackend {
    fn attach(&mut self) -> Result<Vec<u32>, EngineError> {
        Ok(self.cpu.helper_ids().to_vec())
    }

    fn launch(
        &mut self,
        step: &mut StepInputs,
        clock: &Clock,
        mut trace: Option<Trace<'_>>,
    ) -> Result<u64, EngineError> {
        self.fill_in_tokens(step);
        let (sample, end) = (self.nodes.len() - 1, self.nodes.len());
        #[cfg(feature = "handicap")]
        let began = clock.now();
        self.run_nodes(0..sample, step, clock, trace.as_mut());
        #[cfg(feature = "handicap")]
        if let Some(share) = self.handicap {
            crate::handicap::spin(clock, began, share);
        }
        let forwarded = clock.now();
        self.run_nodes(sample..end, step, clock, trace.as_mut());

        let stage = &mut self.stages[self.next];
        stage.tokens.clear();
        stage.tokens.extend_from_slice(&self.tokens[..step.sampled.len()]);
        if let Some(experts) = &self.experts {
            stage.expert_counts.clear();
            stage.expert_counts.extend_from_slice(&experts.counts);
        }
        stage.under_way = true;
        self.next = 1 - self.next;
        Ok(forwarded)
    }

    fn land(&mut self, _: Option<Trace<'_>>) -> Result<(), EngineError> {
        self.stages[self.oldest].under_way = false;
        self.oldest = 1 - self.oldest;
        Ok(())
    }

    fn landed(&self) -> Landed<'_> {
        let stage = &self.stages[1 - self.oldest];
        Landed { tokens: &stage.tokens, expert_counts: &stage.expert_counts }
    }

    fn logits(&self) -> Result<Vec<f32>, EngineError> {
        Ok(self.logits[..self.sampled_rows * self.config.vocab_size].to_vec())
    }

    fn use_perfect_router(&mut self, on: bool) -> Result<(), EngineError> {
        if let Some((_, used)) = self.experts.as_mut().and_then(|experts| experts.perfect.as_mut()) {
            *used = on;
        }
        Ok(())
    }

    fn memory(&self) -> MemoryByPool {
        let activations = [
            &self.hidden,
            &self.normed,
            &self.qkv,
            &self.attn,
            &self.proj,
            &self.gate_up,
            &self.act,
            &self.sampled,
            &self.logits,
        ];
        let tokens = self.normed.len() / self.config.hidden_size;
        let experts = self.config.moe.as_ref().map_or(0, |moe| expert_bytes(&self.config, moe, tokens));
        let latent = latent::bytes(&self.config, tokens, self.integers);
        let activation_bytes = activations.iter().map(|b| b.len() * 4).sum::<usize>()
            + experts
            + latent
            + self.codes.bytes()
            + self.act_codes.bytes()
            + self.scores.as_ref().map_or(0, |s| s.len());
        MemoryByPool {
            weights_bytes: self.weights.total_bytes(),
            kv_cache_bytes: (self.geometry.bytes_per_layer() * self.cache.len()) as u64,
            activation_bytes: activation_bytes as u64,
            ..MemoryByPool::default()
        }
    }

    fn facts(&self) -> DeviceFacts {
        DeviceFacts::Cpu { tier: self.cpu.tier(), threads: self.cpu.threads() }
    }
}
