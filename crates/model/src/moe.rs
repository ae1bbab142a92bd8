//! The mixture of experts that takes the place of the feed-forward block in some layers.

use serde::{Deserialize, Serialize};

use crate::router_skew::RouterSkew;
use crate::routing::RoutingMethod;

/// Experts of a model: how many there are, how wide they are and how a token chooses among them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeConfig {
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Experts that each token is sent to.
    pub experts_per_token: usize,
    /// Width of one expert.
    pub intermediate_size: usize,
    /// How the router's logits become experts and weights.
    pub routing: RoutingMethod,
    /// Layers that have a dense feed-forward block instead, in order.
    #[serde(default)]
    pub dense_layers: Vec<usize>,
    /// Width of a block that every token passes besides its experts; 0 where there is none.
    #[serde(default)]
    pub shared_intermediate_size: usize,
    /// Whether the checkpoint has a bias for each expert beside its logit.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub router_bias: bool,
    /// Whether the projections of experts have biases.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub expert_bias: bool,
    /// GPT-OSS' activation in place of SiLU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamp: Option<SwigluClamp>,
    /// How a router of random weights prefers some experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_skew: Option<RouterSkew>,
}

/// `min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clamp(up, -limit, limit) + 1)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwigluClamp {
    /// Steepness of the sigmoid.
    pub alpha: f32,
    /// Bound of both inputs.
    pub limit: f32,
}

impl MoeConfig {
    /// Experts in every layer, without biases.
    pub(crate) fn plain(
        num_experts: usize,
        experts_per_token: usize,
        intermediate_size: usize,
        routing: RoutingMethod,
    ) -> MoeConfig {
        MoeConfig {
            num_experts,
            experts_per_token,
            intermediate_size,
            routing,
            dense_layers: Vec::new(),
            shared_intermediate_size: 0,
            router_bias: false,
            expert_bias: false,
            clamp: None,
            router_skew: None,
        }
    }

    /// Whether a layer has experts.
    pub fn in_layer(&self, layer: usize) -> bool {
        self.dense_layers.binary_search(&layer).is_err()
    }

    /// Whether each expert has a bias beside its logit.
    pub fn has_router_bias(&self) -> bool {
        self.router_bias || self.router_skew.is_some()
    }

    /// The field and the problem of the first number that does not fit.
    pub(crate) fn first_problem(&self, layers: usize) -> Result<(), (&'static str, String)> {
        let sizes =
            [("num_experts", self.num_experts, 1 << 12), ("moe_intermediate_size", self.intermediate_size, 1 << 20)];
        for (field, value, most) in sizes {
            if value == 0 || value > most {
                return Err((field, format!("must be between 1 and {most}, found {value}")));
            }
        }
        self.routing.check(self.num_experts, self.experts_per_token)?;
        if let Some(skew) = &self.router_skew {
            skew.first_problem(self.num_experts, layers)?;
        }
        if let Some(SwigluClamp { alpha, limit }) = self.clamp
            && !(alpha.is_finite() && limit > 0.0 && limit.is_finite())
        {
            return Err(("swiglu_limit", format!("must be finite and above 0, found {limit} and alpha {alpha}")));
        }
        if !self.dense_layers.is_sorted_by(|a, b| a < b) || self.dense_layers.last().is_some_and(|l| *l >= layers) {
            let problem = format!("must be layers below {layers} in order, found {:?}", self.dense_layers);
            return Err(("dense_layers", problem));
        }
        Ok(())
    }
}
