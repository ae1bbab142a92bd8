//! Iteration times without a machine: operations and bytes over what a GPU can do, by efficiency curves.

use crate::cost::StepLoad;

/// What a GPU can do at best.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// Its name.
    pub name: &'static str,
    /// Dense 16-bit operations per second.
    pub ops_per_s: f64,
    /// Bytes per second from memory.
    pub bytes_per_s: f64,
    /// Bytes per second to another GPU.
    pub link_bytes_per_s: f64,
    /// Bytes of memory; 0 where it is not known.
    pub memory_bytes: f64,
}

/// Data sheet figures: dense bfloat16 peak, memory bandwidth, link bandwidth in one direction, memory.
pub const GPUS: [Gpu; 8] = [
    Gpu { name: "h200", ops_per_s: 989e12, bytes_per_s: 4.8e12, link_bytes_per_s: 450e9, memory_bytes: 141e9 },
    Gpu { name: "h100", ops_per_s: 989e12, bytes_per_s: 3.35e12, link_bytes_per_s: 450e9, memory_bytes: 80e9 },
    Gpu { name: "a100", ops_per_s: 312e12, bytes_per_s: 2.039e12, link_bytes_per_s: 300e9, memory_bytes: 80e9 },
    Gpu { name: "l40s", ops_per_s: 362e12, bytes_per_s: 864e9, link_bytes_per_s: 32e9, memory_bytes: 48e9 },
    Gpu { name: "a6000", ops_per_s: 154.8e12, bytes_per_s: 768e9, link_bytes_per_s: 56e9, memory_bytes: 48e9 },
    Gpu { name: "l4", ops_per_s: 121e12, bytes_per_s: 300e9, link_bytes_per_s: 32e9, memory_bytes: 24e9 },
    Gpu { name: "rtx4090", ops_per_s: 165.2e12, bytes_per_s: 1008e9, link_bytes_per_s: 32e9, memory_bytes: 24e9 },
    Gpu { name: "t4", ops_per_s: 65e12, bytes_per_s: 320e9, link_bytes_per_s: 16e9, memory_bytes: 16e9 },
];

/// A model on a GPU, as far as an iteration's time depends on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Analytic {
    /// Operations per second of one GPU in the weights' type.
    pub ops_per_s: f64,
    /// Bytes per second of one GPU.
    pub bytes_per_s: f64,
    /// Bytes per second between GPUs.
    pub link_bytes_per_s: f64,
    /// GPUs that share every layer.
    pub ranks: f64,
    /// Bytes of all weights.
    pub weight_bytes: f64,
    /// Those of routed experts among them.
    pub expert_bytes: f64,
    /// Routed experts of a layer; 0 for a dense model.
    pub experts: f64,
    /// Experts that each token is sent to.
    pub experts_per_token: f64,
    /// Weights that one token meets.
    pub active_weights: f64,
    /// Bytes of keys and values of one token.
    pub kv_bytes: f64,
    /// Bytes of memory that are left for the cache; 0 where that is not known.
    pub cache_bytes: f64,
    /// Operations for one query and one key, over all layers and heads.
    pub ops_per_pair: f64,
    /// Layers.
    pub layers: f64,
    /// Bytes of one token's activations.
    pub hidden_bytes: f64,
}

/// Share of the peak that large products reach.
const BEST_COMPUTE: f64 = 0.7;
/// Tokens at which products reach half of that.
const HALF_COMPUTE_TOKENS: f64 = 48.0;
/// Share of the bandwidth that streaming weights and keys reaches.
const BEST_MEMORY: f64 = 0.8;
/// Host and launch time of an iteration, and of each layer.
const ITERATION_NS: f64 = 300e3;
const LAYER_NS: f64 = 4e3;
/// Latency of an all-reduce step.
const LINK_NS: f64 = 8e3;

impl Analytic {
    /// Cache blocks that fit; 0 where that is not known.
    pub fn cache_blocks(&self, tokens_per_block: usize) -> usize {
        (self.cache_bytes / (self.kv_bytes * tokens_per_block as f64)) as usize
    }

    /// Bytes of weights that an iteration reads: of the experts, as many as tokens that choose at random hit.
    fn weights_read(&self, tokens: f64) -> f64 {
        let missed = if self.experts > 0.0 { (1.0 - self.experts_per_token / self.experts).powf(tokens) } else { 0.0 };
        self.weight_bytes - self.expert_bytes * missed
    }

    /// The cost of an iteration, in nanoseconds: the longer of computing and moving, for products and attention apart.
    pub fn ns(&self, load: &StepLoad) -> f64 {
        let tokens = load.context_tokens as f64 + f64::from(load.decode_requests);
        let efficiency = BEST_COMPUTE * tokens / (tokens + HALF_COMPUTE_TOKENS);
        let ops = |ops: f64| ops / (self.ranks * self.ops_per_s * efficiency.max(1e-3)) * 1e9;
        let bytes = |bytes: f64| bytes / (self.ranks * self.bytes_per_s * BEST_MEMORY) * 1e9;
        let products = ops(2.0 * self.active_weights * tokens).max(bytes(self.weights_read(tokens)));
        let pairs = load.context_pairs as f64 + load.decode_kv as f64;
        let keys = load.kv_tokens() as f64 + load.context_tokens as f64;
        let attention = ops(self.ops_per_pair * pairs).max(bytes(self.kv_bytes * (keys + tokens)));
        let all_reduce = if self.ranks > 1.0 {
            // Few bytes go in a tree, many in a ring: the latency of the one and the transfers of the other.
            let share = tokens * self.hidden_bytes / self.ranks / self.link_bytes_per_s * 1e9;
            2.0 * self.layers * (LINK_NS * self.ranks.log2() + 2.0 * (self.ranks - 1.0) * share)
        } else {
            0.0
        };
        products + attention + all_reduce + ITERATION_NS + LAYER_NS * self.layers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_batches_stream_weights_and_large_ones_compute() {
        let gpu = GPUS[0];
        let model = Analytic {
            ops_per_s: gpu.ops_per_s,
            bytes_per_s: gpu.bytes_per_s,
            link_bytes_per_s: gpu.link_bytes_per_s,
            ranks: 1.0,
            weight_bytes: 16e9,
            expert_bytes: 0.0,
            experts: 0.0,
            experts_per_token: 0.0,
            active_weights: 8e9,
            kv_bytes: 131_072.0,
            cache_bytes: 131_072.0 * 1000.0,
            ops_per_pair: 4.0 * 32.0 * 4096.0,
            layers: 32.0,
            hidden_bytes: 8192.0,
        };
        let mut one = StepLoad::default();
        one.add_decode(1000);
        let floor = 16e9 / 4.8e12 * 1e9;
        assert!(model.ns(&one) > floor && model.ns(&one) < 2.0 * floor, "{}", model.ns(&one));
        let mut prompt = StepLoad::default();
        prompt.add_context(0, 8192);
        let peak = 2.0 * 8e9 * 8192.0 / 989e12 * 1e9;
        assert!(model.ns(&prompt) > peak && model.ns(&prompt) < 2.0 * peak, "{}", model.ns(&prompt));
        assert_eq!(model.cache_blocks(64), 15);
        // One token meets 2 of 8 experts, many meet all.
        let experts = Analytic { expert_bytes: 12e9, experts: 8.0, experts_per_token: 2.0, ..model };
        assert_eq!(experts.weights_read(1.0), 4e9 + 12e9 / 4.0);
        assert!(experts.weights_read(64.0) > 15.99e9 && experts.ns(&one) < model.ns(&one));
        let two = Analytic { ranks: 2.0, ..model };
        assert!(two.ns(&prompt) < model.ns(&prompt));
    }
}
