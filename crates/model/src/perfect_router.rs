//! The perfect router: logits that send tokens to experts in balance, whatever the model would have wanted.
//!
//! Put in place of a gate's output they show what a run would gain if load were even; what the model then says is wrong
//! by design. The plan for methods that choose freely is that of TensorRT-LLM's `ENABLE_PERFECT_ROUTER`; for the group
//! limit of DeepSeek-V3 there are two, see [`Plan`]. The plan of a token depends on its place in the batch and not on
//! the size of the batch, so the table of the largest batch serves every smaller one.

mod beam;
mod even;

use crate::config::DType;
use crate::routing::RoutingMethod;

/// Logit of a chosen expert in a flat plan.
const CHOSEN: f32 = 10.0;
/// Logit of every other expert.
const LEFT_OUT: f32 = -10.0;

/// Why there is no balanced plan.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum PerfectRouterError {
    /// Experts cannot be shared evenly by the ranks.
    #[error(
        "perfect router: {experts} experts cannot be divided among {ranks} expert-parallel ranks; use a divisor of {experts}"
    )]
    Ranks {
        /// Experts of a layer.
        experts: usize,
        /// Ranks asked for.
        ranks: usize,
    },
    /// The sending rank is not one of the ranks.
    #[error("perfect router: expert-parallel rank {rank} is outside 0..{ranks}")]
    Rank {
        /// The rank asked for.
        rank: usize,
        /// How many there are.
        ranks: usize,
    },
    /// The routing method itself cannot work with these numbers.
    #[error("perfect router: `{field}` {problem}")]
    Shape {
        /// The field of `config.json` at fault.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// There is no plan for the method.
    #[error(
        "perfect router: routing method `{method}` is not supported; supported: {}",
        RoutingMethod::NAMES.join(", ")
    )]
    Method {
        /// The method asked for.
        method: String,
    },
}

/// How experts are planned under a group limit. Without one there is only one plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Plan {
    /// Ranks and experts as even as the limit allows, for every number of tokens.
    #[default]
    Even,
    /// TensorRT-LLM's plan: a beam search for each token alone. With some numbers it leaves ranks or experts without work.
    TensorRtLlm,
}

/// What a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// How the model chooses experts.
    pub method: RoutingMethod,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token.
    pub k: usize,
    /// Expert-parallel ranks; rank `r` holds the `r`-th part of the experts.
    pub ranks: usize,
    /// The rank whose tokens are routed. Ranks begin with different targets, so that none is hit by all at once.
    pub rank: usize,
    /// The plan under a group limit.
    pub plan: Plan,
}

/// The routing method of TensorRT-LLM's `name`, as far as a plan needs to know it. `groups` and `topk_groups` count
/// for `DeepSeekV3` only.
pub fn method_named(name: &str, groups: usize, topk_groups: usize) -> Result<RoutingMethod, PerfectRouterError> {
    match name {
        "Default" => Ok(RoutingMethod::SoftmaxTopK { renormalise: false }),
        "RenormalizeNaive" => Ok(RoutingMethod::SoftmaxTopK { renormalise: true }),
        "Renormalize" => Ok(RoutingMethod::TopKSoftmax),
        "DeepSeekV3" => Ok(RoutingMethod::DeepSeekV3 { groups, topk_groups, scale: 1.0, renormalise: true }),
        other => Err(PerfectRouterError::Method { method: other.to_string() }),
    }
}

impl Balance {
    fn check(&self) -> Result<(), PerfectRouterError> {
        let Balance { experts, ranks, rank, .. } = *self;
        if ranks == 0 || !experts.is_multiple_of(ranks) {
            return Err(PerfectRouterError::Ranks { experts, ranks });
        }
        if rank >= ranks {
            return Err(PerfectRouterError::Rank { rank, ranks });
        }
        self.method.check(experts, self.k).map_err(|(field, problem)| PerfectRouterError::Shape { field, problem })
    }

    /// The rank that holds `expert`.
    pub fn rank_of(&self, expert: u32) -> usize {
        expert as usize / (self.experts / self.ranks)
    }

    /// The `k` experts of the token at place `token`, in the order of their slots.
    fn flat(&self, token: usize) -> impl Iterator<Item = u32> {
        let Balance { experts, k, ranks, rank, .. } = *self;
        let per_rank = experts / ranks;
        (0..k).map(move |slot| {
            let step = token * k + slot + rank;
            ((step % ranks) * per_rank + step / ranks % per_rank) as u32
        })
    }

    /// The logit of the chosen expert in `slot`.
    fn chosen(&self, slot: usize) -> f32 {
        match self.method {
            RoutingMethod::SoftmaxTopK { .. } | RoutingMethod::TopKSoftmax => CHOSEN,
            // From 4 down to 1, so that slots keep their order.
            RoutingMethod::DeepSeekV3 { .. } => 4.0 - 3.0 * slot as f32 / (self.k - 1).max(1) as f32,
        }
    }
}

/// A table of planned experts and the logits that make a model's own routing choose them.
///
/// The logits go through the routing method without any bias: a correction bias would undo the balance.
#[derive(Clone, Debug)]
pub struct PerfectRouter {
    balance: Balance,
    tokens: usize,
    planned: Vec<u32>,
    logits: Vec<f32>,
    /// Where the even plan under a group limit has got to.
    even: Option<even::Planner>,
}

impl PerfectRouter {
    /// Plans for batches of up to `tokens` tokens, or says why it cannot.
    pub fn new(balance: Balance, tokens: usize) -> Result<PerfectRouter, PerfectRouterError> {
        balance.check()?;
        let mut router = PerfectRouter { balance, tokens: 0, planned: Vec::new(), logits: Vec::new(), even: None };
        router.extend_to(tokens);
        Ok(router)
    }

    /// Plans for larger batches. This allocates, so it belongs outside a step.
    pub fn extend_to(&mut self, tokens: usize) {
        let balance = self.balance;
        if tokens <= self.tokens {
            return;
        }
        self.planned.reserve_exact((tokens - self.tokens) * balance.k);
        match balance.method {
            RoutingMethod::SoftmaxTopK { .. } | RoutingMethod::TopKSoftmax => {
                self.planned.extend((self.tokens..tokens).flat_map(|token| balance.flat(token)));
            }
            RoutingMethod::DeepSeekV3 { groups, topk_groups, .. } => match balance.plan {
                Plan::Even => {
                    let planner = self.even.get_or_insert_with(|| even::Planner::new(&balance, groups, topk_groups));
                    (self.tokens..tokens).for_each(|_| planner.plan(&balance, &mut self.planned));
                }
                Plan::TensorRtLlm => {
                    let planner = beam::Planner::new(&balance, groups, topk_groups);
                    for token in self.tokens..tokens {
                        match token.checked_sub(planner.period()) {
                            Some(same) => self.planned.extend_from_within(same * balance.k..(same + 1) * balance.k),
                            None => planner.plan(token, &mut self.planned),
                        }
                    }
                }
            },
        }
        self.logits.resize(tokens * balance.experts, LEFT_OUT);
        for token in self.tokens..tokens {
            let row = &mut self.logits[token * balance.experts..][..balance.experts];
            for (slot, expert) in self.planned[token * balance.k..][..balance.k].iter().enumerate() {
                row[*expert as usize] = balance.chosen(slot);
            }
        }
        self.tokens = tokens;
    }

    /// What the plan was made for.
    pub fn balance(&self) -> &Balance {
        &self.balance
    }

    /// Tokens of the largest batch there is a plan for.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The planned experts of a batch, `[tokens][k]`.
    pub fn experts(&self, tokens: usize) -> &[u32] {
        &self.planned[..tokens * self.balance.k]
    }

    /// The logits of a batch, `[tokens][experts]`.
    pub fn logits(&self, tokens: usize) -> &[f32] {
        &self.logits[..tokens * self.balance.experts]
    }

    /// [`PerfectRouter::logits`] rounded to `dtype`. Rounding never changes which experts are chosen.
    pub fn logits_as(&self, tokens: usize, dtype: DType) -> Vec<f32> {
        let round = |value: &f32| match dtype {
            DType::F32 => *value,
            DType::F16 => half::f16::from_f32(*value).to_f32(),
            DType::Bf16 => half::bf16::from_f32(*value).to_f32(),
        };
        self.logits(tokens).iter().map(round).collect()
    }

    /// Token-expert pairs that each rank receives from a batch of this sender.
    pub fn rank_loads(&self, tokens: usize) -> Vec<u64> {
        let mut loads = vec![0; self.balance.ranks];
        self.experts(tokens).iter().for_each(|expert| loads[self.balance.rank_of(*expert)] += 1);
        loads
    }
}
