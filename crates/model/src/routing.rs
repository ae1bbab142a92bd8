//! How a mixture-of-experts layer chooses the experts of a token from the logits of its gate.
//!
//! One function per method, one token at a time, in f32: this is what the models compute and what every faster kernel
//! is held against. Nothing here allocates.

use serde::{Deserialize, Serialize};

/// The most groups a group-limited method can have: what is chosen fits one word.
pub const MAX_GROUPS: usize = 64;

/// How the experts of a token and their weights follow from its logits.
///
/// Where scores are equal the expert with the lower index wins, whatever the method.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method")]
pub enum RoutingMethod {
    /// Softmax over all experts, then the best k (Qwen3-MoE).
    SoftmaxTopK {
        /// Whether the k weights are divided by their sum.
        renormalise: bool,
    },
    /// The best k logits, then softmax over these (Mixtral, GPT-OSS).
    TopKSoftmax,
    /// Sigmoid scores; the best groups of experts by the sum of their two best biased scores, then the best k experts of
    /// these groups. The bias takes part in the choice only, not in the weights (DeepSeek-V3).
    DeepSeekV3 {
        /// Equal groups the experts are divided into.
        groups: usize,
        /// Groups a token's experts may come from.
        topk_groups: usize,
        /// What every weight is multiplied by at the end.
        scale: f32,
        /// Whether the k weights are divided by their sum.
        renormalise: bool,
    },
}

impl RoutingMethod {
    /// The names [`RoutingMethod::name`] can give.
    pub const NAMES: [&str; 4] = ["Default", "RenormalizeNaive", "Renormalize", "DeepSeekV3"];

    /// TensorRT-LLM's name of the method.
    pub fn name(&self) -> &'static str {
        match self {
            RoutingMethod::SoftmaxTopK { renormalise: false } => "Default",
            RoutingMethod::SoftmaxTopK { renormalise: true } => "RenormalizeNaive",
            RoutingMethod::TopKSoftmax => "Renormalize",
            RoutingMethod::DeepSeekV3 { .. } => "DeepSeekV3",
        }
    }

    /// Whether `k` of `experts` experts can be chosen this way; otherwise the field of `config.json` at fault and what
    /// is wrong with it.
    pub fn check(&self, experts: usize, k: usize) -> Result<(), (&'static str, String)> {
        if k == 0 || k > experts {
            return Err(("num_experts_per_tok", format!("must be between 1 and the {experts} experts, found {k}")));
        }
        let RoutingMethod::DeepSeekV3 { groups, topk_groups, scale, .. } = *self else { return Ok(()) };
        if groups == 0 || groups > MAX_GROUPS || !experts.is_multiple_of(groups) {
            let problem = format!("must divide the {experts} experts and be at most {MAX_GROUPS}, found {groups}");
            return Err(("n_group", problem));
        }
        if topk_groups == 0 || topk_groups > groups {
            return Err(("topk_group", format!("must be between 1 and the {groups} groups, found {topk_groups}")));
        }
        let reachable = topk_groups * (experts / groups);
        if k > reachable {
            let problem = format!("must be at most the {reachable} experts of {topk_groups} groups, found {k}");
            return Err(("num_experts_per_tok", problem));
        }
        if !scale.is_finite() {
            return Err(("routed_scaling_factor", format!("must be a finite number, found {scale}")));
        }
        Ok(())
    }

    /// Chooses `experts.len()` distinct experts for one token, best first, and their weights.
    ///
    /// `bias` has one number per expert: DeepSeek-V3's correction of the choice, for the other methods an addition to
    /// the logits. The method must have passed [`RoutingMethod::check`] for these lengths.
    pub fn route(&self, logits: &[f32], bias: Option<&[f32]>, experts: &mut [u32], weights: &mut [f32]) {
        debug_assert!(experts.len() == weights.len() && bias.is_none_or(|bias| bias.len() == logits.len()));
        debug_assert_eq!(self.check(logits.len(), experts.len()), Ok(()));
        match *self {
            RoutingMethod::SoftmaxTopK { renormalise: false } => softmax_top_k(logits, bias, experts, weights),
            // The divisor of the softmax over all experts cancels, which leaves the softmax over the chosen ones.
            RoutingMethod::SoftmaxTopK { renormalise: true } | RoutingMethod::TopKSoftmax => {
                top_k_softmax(logits, bias, experts, weights)
            }
            RoutingMethod::DeepSeekV3 { groups, topk_groups, scale, renormalise } => {
                deepseek_v3(logits, bias, groups, topk_groups, experts, weights);
                let divisor = if renormalise { weights.iter().sum::<f32>() + 1e-20 } else { 1.0 };
                weights.iter_mut().for_each(|weight| *weight = *weight / divisor * scale);
            }
        }
    }
}

fn softmax_top_k(logits: &[f32], bias: Option<&[f32]>, experts: &mut [u32], weights: &mut [f32]) {
    let logit = |e: usize| logits[e] + bias.map_or(0.0, |bias| bias[e]);
    top_k(0..logits.len(), logit, experts, weights);
    let best = weights[0];
    let sum: f32 = (0..logits.len()).map(|e| (logit(e) - best).exp()).sum();
    weights.iter_mut().for_each(|weight| *weight = (*weight - best).exp() / sum);
}

fn top_k_softmax(logits: &[f32], bias: Option<&[f32]>, experts: &mut [u32], weights: &mut [f32]) {
    let logit = |e: usize| logits[e] + bias.map_or(0.0, |bias| bias[e]);
    top_k(0..logits.len(), logit, experts, weights);
    let best = weights[0];
    weights.iter_mut().for_each(|weight| *weight = (*weight - best).exp());
    let sum: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|weight| *weight /= sum);
}

/// The experts, and their scores without the bias as weights.
fn deepseek_v3(
    logits: &[f32],
    bias: Option<&[f32]>,
    groups: usize,
    topk_groups: usize,
    experts: &mut [u32],
    weights: &mut [f32],
) {
    let score = |e: usize| 1.0 / (1.0 + (-logits[e]).exp());
    let biased = |e: usize| score(e) + bias.map_or(0.0, |bias| bias[e]);
    let per = logits.len() / groups;
    let group_score = |group: usize| {
        let mut best = [f32::NEG_INFINITY; 2];
        for value in (group * per..(group + 1) * per).map(biased) {
            if value > best[0] {
                best = [value, best[0]];
            } else if value > best[1] {
                best[1] = value;
            }
        }
        best[0] + if per > 1 { best[1] } else { 0.0 }
    };
    let (mut chosen, mut scores) = ([0u32; MAX_GROUPS], [0.0; MAX_GROUPS]);
    top_k(0..groups, group_score, &mut chosen[..topk_groups], &mut scores[..topk_groups]);
    let allowed = chosen[..topk_groups].iter().fold(0u64, |mask, group| mask | 1 << group);
    let candidates = (0..groups).filter(|group| allowed >> group & 1 == 1).flat_map(|g| g * per..(g + 1) * per);
    top_k(candidates, biased, experts, weights);
    for (expert, weight) in experts.iter().zip(weights) {
        *weight = score(*expert as usize);
    }
}

/// The best of `candidates` (in rising order, at least as many as wanted) by `score`, best first, ties to the lower
/// index, with their scores.
fn top_k(candidates: impl Iterator<Item = usize>, score: impl Fn(usize) -> f32, best: &mut [u32], scores: &mut [f32]) {
    let mut found = 0;
    for candidate in candidates {
        let value = score(candidate);
        let mut place = found;
        while place > 0 && value > scores[place - 1] {
            place -= 1;
        }
        if place == best.len() {
            continue;
        }
        found = (found + 1).min(best.len());
        best[place..found].rotate_right(1);
        scores[place..found].rotate_right(1);
        best[place] = candidate as u32;
        scores[place] = value;
    }
}
