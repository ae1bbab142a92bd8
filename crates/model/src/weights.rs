//! What an engine loads: every weight of a model, in execution order, and the checkpoint tensors it is made of.
//!
//! The mapping is data. Fused weights (q, k, v; gate, up) are the rows of their parts, one part after the other.

pub use crate::source::WeightSource;

use crate::config::ModelConfig;

/// A weight as engines see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightId {
    /// The token embedding table (absent where the head is tied: then [`WeightId::LmHead`] is the table).
    Embed,
    /// The norm before the output head.
    FinalNorm,
    /// The output head.
    LmHead,
    /// A weight of one decoder layer.
    Layer(u16, LayerWeight),
}

/// The weights of a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerWeight {
    /// The norm before attention.
    InputNorm,
    /// Query, key and value projections, rows in this order.
    Qkv,
    /// Their biases.
    QkvBias,
    /// The norm of each query head.
    QNorm,
    /// The norm of each key head.
    KNorm,
    /// The projection to the queries' latent vector.
    QLatent,
    /// Its norm.
    QLatentNorm,
    /// The projection to the queries of all heads.
    Q,
    /// The projection to the latent vector of keys and values, and the rotated part of keys.
    KvLatent,
    /// The norm of that vector.
    KvLatentNorm,
    /// From each head's queries to the latent space.
    LatentKeys,
    /// From the latent space to each head's values.
    LatentValues,
    /// The sink of each query head.
    Sinks,
    /// The output projection of attention.
    O,
    /// Its bias.
    OBias,
    /// The norm before the feed-forward block.
    PostNorm,
    /// Gate and up projections, rows in this order.
    GateUp,
    /// Their biases.
    GateUpBias,
    /// The down projection.
    Down,
    /// Its bias.
    DownBias,
    /// The product that gives each expert's logit.
    Router,
    /// What is added to them.
    RouterBias,
    /// Gate and up projections of all experts.
    ExpertGateUp,
    /// Their biases, expert by expert.
    ExpertGateUpBias,
    /// Down projections of all experts.
    ExpertDown,
    /// Their biases, expert by expert.
    ExpertDownBias,
}

impl LayerWeight {
    /// The engine's name within a layer, e.g. `qkv.weight`.
    pub fn name(self) -> &'static str {
        match self {
            LayerWeight::InputNorm => "input_norm.weight",
            LayerWeight::Qkv => "qkv.weight",
            LayerWeight::QkvBias => "qkv.bias",
            LayerWeight::QNorm => "q_norm.weight",
            LayerWeight::KNorm => "k_norm.weight",
            LayerWeight::QLatent => "q_latent.weight",
            LayerWeight::QLatentNorm => "q_latent_norm.weight",
            LayerWeight::Q => "q.weight",
            LayerWeight::KvLatent => "kv_latent.weight",
            LayerWeight::KvLatentNorm => "kv_latent_norm.weight",
            LayerWeight::LatentKeys => "latent_keys.weight",
            LayerWeight::LatentValues => "latent_values.weight",
            LayerWeight::Sinks => "sinks",
            LayerWeight::O => "o.weight",
            LayerWeight::OBias => "o.bias",
            LayerWeight::PostNorm => "post_norm.weight",
            LayerWeight::GateUp => "gate_up.weight",
            LayerWeight::GateUpBias => "gate_up.bias",
            LayerWeight::Down => "down.weight",
            LayerWeight::DownBias => "down.bias",
            LayerWeight::Router => "router.weight",
            LayerWeight::RouterBias => "router.bias",
            LayerWeight::ExpertGateUp => "experts.gate_up.weight",
            LayerWeight::ExpertDown => "experts.down.weight",
            LayerWeight::ExpertGateUpBias => "experts.gate_up.bias",
            LayerWeight::ExpertDownBias => "experts.down.bias",
        }
    }
}

impl WeightId {
    /// The engine's name: `embed`, `final_norm`, `lm_head`, `layers.3.qkv.weight`, ...
    pub fn name(&self) -> String {
        match self {
            WeightId::Embed => "embed".to_string(),
            WeightId::FinalNorm => "final_norm".to_string(),
            WeightId::LmHead => "lm_head".to_string(),
            WeightId::Layer(layer, weight) => format!("layers.{layer}.{}", weight.name()),
        }
    }
}

impl std::fmt::Display for WeightId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

/// What a weight is filled with when a model is made of random numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum RandomInit {
    /// Every element is this value.
    Constant(f32),
    /// A bell around zero with this standard deviation.
    Normal {
        /// The standard deviation.
        std: f32,
    },
    /// These values, each once.
    Values {
        /// The values.
        values: Vec<f32>,
        /// Whether their order follows from the seed.
        shuffled: bool,
    },
}

/// One weight: its shape and where its rows come from.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightInfo {
    /// Which weight this is.
    pub id: WeightId,
    /// How many weights of this shape lie one after the other: one for each expert, else 1.
    pub experts: usize,
    /// Output features (n); 1 for vectors.
    pub rows: usize,
    /// Input features (k); the length of a vector.
    pub cols: usize,
    /// A norm or a bias: engines always keep it in f32.
    pub vector: bool,
    /// The checkpoint tensors it consists of, in order, expert by expert: name and number of rows (of elements, for a
    /// vector).
    pub parts: Vec<(String, usize)>,
    /// What it holds in a model of random numbers.
    pub init: RandomInit,
}

impl WeightInfo {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.experts as u64 * self.rows as u64 * self.cols as u64
    }
}

/// Every weight of a model, in the order a forward pass uses them.
///
/// With a tied head, [`WeightId::LmHead`] has the embedding's tensor as its part and [`WeightId::Embed`] is absent.
pub fn weight_list(config: &ModelConfig) -> Vec<WeightInfo> {
    let mut list = List { config, infos: Vec::new() };
    if !config.tie_word_embeddings {
        list.infos.push(embedding_table(config));
    }
    for layer in 0..config.num_hidden_layers {
        list.layer(layer);
    }
    list.norm(WeightId::FinalNorm, "model.norm.weight".to_string(), config.hidden_size);
    let head = if config.tie_word_embeddings { TABLE } else { "lm_head.weight" };
    list.matrix(WeightId::LmHead, vec![(head.to_string(), config.vocab_size)], config.hidden_size, STD);
    list.infos
}

/// The embedding table as a weight of its own, also where [`weight_list`] leaves it to a tied head.
pub fn embedding_table(config: &ModelConfig) -> WeightInfo {
    let mut list = List { config, infos: Vec::new() };
    list.matrix(WeightId::Embed, vec![(TABLE.to_string(), config.vocab_size)], config.hidden_size, STD);
    list.infos.remove(0)
}

const TABLE: &str = "model.embed_tokens.weight";

/// The usual initialisation of this model family.
pub(crate) const STD: f32 = 0.02;

struct List<'a> {
    config: &'a ModelConfig,
    infos: Vec<WeightInfo>,
}

impl List<'_> {
    fn layer(&mut self, layer: usize) {
        let c = self.config;
        let hidden = c.hidden_size;
        let q = c.num_attention_heads * c.head_dim;
        let kv = c.num_key_value_heads * c.head_dim;
        let inter = c.intermediate_size;
        // Projections back into the residual stream are smaller, so that its variance does not grow with depth.
        let residual_std = STD / (2.0 * c.num_hidden_layers as f32).sqrt();
        let id = |weight| WeightId::Layer(layer as u16, weight);
        let tensor = |module: &str, kind: &str| format!("model.layers.{layer}.{module}.{kind}");
        let qkv = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
        let gate_up = [("mlp.gate_proj", inter), ("mlp.up_proj", inter)];
        let o = [("self_attn.o_proj", hidden)];
        let down = [("mlp.down_proj", hidden)];
        let parts = |modules: &[(&str, usize)], kind: &str| -> Vec<(String, usize)> {
            modules.iter().map(|(module, rows)| (tensor(module, kind), *rows)).collect()
        };

        self.norm(id(LayerWeight::InputNorm), tensor("input_layernorm", "weight"), hidden);
        if let Some(latent) = &c.latent {
            let (heads, kv) = (c.num_attention_heads, latent.kv_lora_rank);
            let queries = heads * latent.query_width();
            match latent.q_lora_rank {
                None => self.matrix(id(LayerWeight::Q), parts(&[("self_attn.q_proj", queries)], "weight"), hidden, STD),
                Some(rank) => {
                    let (down, up) = ([("self_attn.q_a_proj", rank)], [("self_attn.q_b_proj", queries)]);
                    self.matrix(id(LayerWeight::QLatent), parts(&down, "weight"), hidden, STD);
                    self.norm(id(LayerWeight::QLatentNorm), tensor("self_attn.q_a_layernorm", "weight"), rank);
                    self.matrix(id(LayerWeight::Q), parts(&up, "weight"), rank, STD);
                }
            }
            let kv_a = [("self_attn.kv_a_proj_with_mqa", latent.key_width())];
            self.matrix(id(LayerWeight::KvLatent), parts(&kv_a, "weight"), hidden, STD);
            self.norm(id(LayerWeight::KvLatentNorm), tensor("self_attn.kv_a_layernorm", "weight"), kv);
            let of_heads = |part: &str, rows: usize| -> Vec<(String, usize)> {
                (0..heads).map(|h| (tensor(&format!("self_attn.kv_b_proj.{h}.{part}"), "weight"), rows)).collect()
            };
            let (nope, v) = (latent.qk_nope_head_dim, latent.v_head_dim);
            self.experts(id(LayerWeight::LatentKeys), heads, of_heads("keys", kv), nope, STD);
            self.experts(id(LayerWeight::LatentValues), heads, of_heads("values", v), kv, STD);
        } else {
            self.matrix(id(LayerWeight::Qkv), parts(&qkv, "weight"), hidden, STD);
        }
        if c.qkv_bias {
            self.bias(id(LayerWeight::QkvBias), parts(&qkv, "bias"));
        }
        if c.qk_norm {
            self.norm(id(LayerWeight::QNorm), tensor("self_attn.q_norm", "weight"), c.head_dim);
            self.norm(id(LayerWeight::KNorm), tensor("self_attn.k_norm", "weight"), c.head_dim);
        }
        if c.attention_sinks {
            self.bias(
                id(LayerWeight::Sinks),
                vec![(format!("model.layers.{layer}.self_attn.sinks"), c.num_attention_heads)],
            );
        }
        self.matrix(id(LayerWeight::O), parts(&o, "weight"), c.attention_width(), residual_std);
        if c.o_bias {
            self.bias(id(LayerWeight::OBias), parts(&o, "bias"));
        }
        self.norm(id(LayerWeight::PostNorm), tensor("post_attention_layernorm", "weight"), hidden);
        if let Some(moe) = c.experts(layer) {
            let names = ExpertNames::of(c);
            let router = [(format!("{}.{}", names.module, names.router), moe.num_experts)];
            let router = |kind: &str| router.iter().map(|(module, rows)| (tensor(module, kind), *rows)).collect();
            self.matrix(id(LayerWeight::Router), router("weight"), hidden, STD);
            if moe.has_router_bias() {
                self.bias(id(LayerWeight::RouterBias), router(names.router_bias));
                if let (Some(skew), Some(bias)) = (&moe.router_skew, self.infos.last_mut()) {
                    let (values, shuffled) = skew.of_layer(layer);
                    bias.init = RandomInit::Values { values: values.to_vec(), shuffled };
                }
            }
            let expert = |projections: &[(&str, usize)], kind: &str| -> Vec<(String, usize)> {
                (0..moe.num_experts)
                    .flat_map(|e| projections.iter().map(move |(name, rows)| (e, *name, *rows)))
                    .map(|(e, name, rows)| (tensor(&format!("{}.experts.{e}.{name}", names.module), kind), rows))
                    .collect()
            };
            let (count, width) = (moe.num_experts, moe.intermediate_size);
            let (gate_up, down) = ([(names.gate, width), (names.up, width)], [(names.down, hidden)]);
            self.experts(id(LayerWeight::ExpertGateUp), count, expert(&gate_up, "weight"), hidden, STD);
            self.experts(id(LayerWeight::ExpertDown), count, expert(&down, "weight"), width, residual_std);
            if moe.expert_bias {
                self.bias(id(LayerWeight::ExpertGateUpBias), expert(&gate_up, "bias"));
                self.bias(id(LayerWeight::ExpertDownBias), expert(&down, "bias"));
            }
            let shared = moe.shared_intermediate_size;
            if shared > 0 {
                let gate_up = [("mlp.shared_experts.gate_proj", shared), ("mlp.shared_experts.up_proj", shared)];
                let down = [("mlp.shared_experts.down_proj", hidden)];
                self.matrix(id(LayerWeight::GateUp), parts(&gate_up, "weight"), hidden, STD);
                self.matrix(id(LayerWeight::Down), parts(&down, "weight"), shared, residual_std);
            }
            return;
        }
        self.matrix(id(LayerWeight::GateUp), parts(&gate_up, "weight"), hidden, STD);
        if c.mlp_bias {
            self.bias(id(LayerWeight::GateUpBias), parts(&gate_up, "bias"));
        }
        self.matrix(id(LayerWeight::Down), parts(&down, "weight"), inter, residual_std);
        if c.mlp_bias {
            self.bias(id(LayerWeight::DownBias), parts(&down, "bias"));
        }
    }

    fn matrix(&mut self, id: WeightId, parts: Vec<(String, usize)>, cols: usize, std: f32) {
        self.experts(id, 1, parts, cols, std);
    }

    fn experts(&mut self, id: WeightId, experts: usize, parts: Vec<(String, usize)>, cols: usize, std: f32) {
        let rows = parts.iter().map(|(_, rows)| rows).sum::<usize>() / experts;
        let init = RandomInit::Normal { std };
        self.infos.push(WeightInfo { id, experts, rows, cols, vector: false, parts, init });
    }

    fn bias(&mut self, id: WeightId, parts: Vec<(String, usize)>) {
        let cols = parts.iter().map(|(_, elements)| elements).sum();
        self.infos.push(WeightInfo {
            id,
            experts: 1,
            rows: 1,
            cols,
            vector: true,
            parts,
            init: RandomInit::Normal { std: STD },
        });
    }

    fn norm(&mut self, id: WeightId, tensor: String, cols: usize) {
        let parts = vec![(tensor, cols)];
        self.infos.push(WeightInfo {
            id,
            experts: 1,
            rows: 1,
            cols,
            vector: true,
            parts,
            init: RandomInit::Constant(1.0),
        });
    }
}

/// What the parts of experts are called in a family's checkpoints.
struct ExpertNames {
    module: &'static str,
    router: &'static str,
    router_bias: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
}

impl ExpertNames {
    fn of(config: &ModelConfig) -> ExpertNames {
        match config.model_type.as_str() {
            "mixtral" => ExpertNames {
                module: "block_sparse_moe",
                router: "gate",
                router_bias: "bias",
                gate: "w1",
                up: "w3",
                down: "w2",
            },
            other => ExpertNames {
                module: "mlp",
                router: if other == "gpt_oss" { "router" } else { "gate" },
                router_bias: if other == "deepseek_v3" { "e_score_correction_bias" } else { "bias" },
                gate: "gate_proj",
                up: "up_proj",
                down: "down_proj",
            },
        }
    }
}
