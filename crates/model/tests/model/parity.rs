//! The whole description of a model (configuration, weights, rotary tables) against logits of `transformers`,
//! through the plainest forward pass that can be written: one token after the other, everything in f64.

use std::collections::HashMap;

use serde::Deserialize;
use strobe_model::{
    Checkpoint, LayerWeight, ModelConfig, MoeConfig, RopeScaling, RoutingMethod, WeightId, WeightSource, weight_list,
};

use crate::support::{CASES, MOE_CASES, fixture};

#[derive(Deserialize)]
struct Golden {
    prompt: Vec<u32>,
    logits: Vec<Vec<f64>>,
    greedy: Vec<u32>,
    decode_logits: Vec<Vec<f64>>,
}

struct Matrix {
    cols: usize,
    data: Vec<f64>,
}

struct Model {
    config: ModelConfig,
    weights: HashMap<WeightId, Matrix>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Per layer, the keys and values of each position.
    cache: Vec<Vec<(Vec<f64>, Vec<f64>)>>,
}

impl Model {
    fn load(case: &str) -> Model {
        Model::load_as(case, |_| ())
    }

    /// The same weights under a changed configuration.
    fn load_as(case: &str, change: impl Fn(&mut ModelConfig)) -> Model {
        let mut config = ModelConfig::from_dir(&fixture(case)).unwrap();
        change(&mut config);
        let source = WeightSource::Checkpoint(Checkpoint::open(&fixture(case)).unwrap());
        let mut weights = HashMap::new();
        for info in weight_list(&config) {
            let mut row = vec![0.0f32; info.cols];
            let mut data = Vec::new();
            for r in 0..info.experts * info.rows {
                source.fill_row_f32(&info, r, &mut row).unwrap();
                data.extend(row.iter().map(|v| f64::from(*v)));
            }
            weights.insert(info.id, Matrix { cols: info.cols, data });
        }
        let (cos, sin) = config.rope_tables(64);
        let cache = vec![Vec::new(); config.num_hidden_layers];
        Model { config, weights, cos, sin, cache }
    }

    fn row(&self, id: WeightId, row: usize) -> &[f64] {
        let matrix = &self.weights[&id];
        &matrix.data[row * matrix.cols..][..matrix.cols]
    }

    fn linear(&self, x: &[f64], weight: WeightId, bias: Option<WeightId>) -> Vec<f64> {
        let rows = self.weights[&weight].data.chunks(x.len());
        let mut out: Vec<f64> = rows.map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
        if let Some(bias) = bias.and_then(|id| self.weights.get(&id)) {
            out.iter_mut().zip(&bias.data).for_each(|(o, b)| *o += b);
        }
        out
    }

    fn norm(&self, x: &[f64], weight: WeightId) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + self.config.rms_norm_eps).sqrt();
        x.iter().zip(self.row(weight, 0)).map(|(v, w)| v * scale * w).collect()
    }

    /// Normalises (where the model does) and rotates one head.
    fn prepare_head(&self, head: &[f64], norm: WeightId, position: usize) -> Vec<f64> {
        let head = if self.config.qk_norm { self.norm(head, norm) } else { head.to_vec() };
        let half = head.len() / 2;
        let table = |t: &[f32], i: usize| f64::from(t[position * half + i % half]);
        (0..head.len())
            .map(|i| {
                let turned = if i < half { -head[i + half] } else { head[i - half] };
                head[i] * table(&self.cos, i) + turned * table(&self.sin, i)
            })
            .collect()
    }

    fn attention(&mut self, layer: usize, x: &[f64], position: usize) -> Vec<f64> {
        let id = |weight| WeightId::Layer(layer as u16, weight);
        let (heads, kv_heads, d) =
            (self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim);
        let qkv = self.linear(x, id(LayerWeight::Qkv), Some(id(LayerWeight::QkvBias)));
        let head = |i: usize| &qkv[i * d..][..d];
        let keys: Vec<f64> = (heads..heads + kv_heads)
            .flat_map(|i| self.prepare_head(head(i), id(LayerWeight::KNorm), position))
            .collect();
        self.cache[layer].push((keys, qkv[(heads + kv_heads) * d..].to_vec()));
        let first = self.config.window(layer).map_or(0, |window| (position + 1).saturating_sub(window));
        let visible = &self.cache[layer][first..];
        let mut out = Vec::new();
        for h in 0..heads {
            let q = self.prepare_head(head(h), id(LayerWeight::QNorm), position);
            let at = h / (heads / kv_heads) * d;
            let scores: Vec<f64> = visible
                .iter()
                .map(|(k, _)| (q.iter().zip(&k[at..]).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt()).exp())
                .collect();
            let sum: f64 = scores.iter().sum();
            out.extend((0..d).map(|i| visible.iter().zip(&scores).map(|((_, v), s)| s * v[at + i]).sum::<f64>() / sum));
        }
        self.linear(&out, id(LayerWeight::O), Some(id(LayerWeight::OBias)))
    }

    /// The whole softmax, then the best experts one by one: nothing that the crate's own routing does.
    fn experts(&self, layer: usize, moe: &MoeConfig, x: &[f64]) -> Vec<f64> {
        let id = |weight| WeightId::Layer(layer as u16, weight);
        let scores: Vec<f64> = self.linear(x, id(LayerWeight::Router), None).iter().map(|logit| logit.exp()).collect();
        let mut best: Vec<usize> = (0..moe.num_experts).collect();
        best.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        best.truncate(moe.experts_per_token);
        let divisor: f64 = match moe.routing {
            RoutingMethod::SoftmaxTopK { renormalise: false } => scores.iter().sum(),
            _ => best.iter().map(|e| scores[*e]).sum(),
        };
        let (width, hidden) = (moe.intermediate_size, x.len());
        let product = |weight, first: usize, rows: usize, x: &[f64]| -> Vec<f64> {
            (first..first + rows).map(|r| self.row(id(weight), r).iter().zip(x).map(|(w, x)| w * x).sum()).collect()
        };
        let mut sum = vec![0.0; hidden];
        for expert in best {
            let gate_up = product(LayerWeight::ExpertGateUp, expert * 2 * width, 2 * width, x);
            let (gate, up) = gate_up.split_at(width);
            let act: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let answer = product(LayerWeight::ExpertDown, expert * hidden, hidden, &act);
            sum.iter_mut().zip(answer).for_each(|(sum, a)| *sum += scores[expert] / divisor * a);
        }
        sum
    }

    fn mlp(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        if let Some(moe) = self.config.experts(layer) {
            return self.experts(layer, moe, x);
        }
        let id = |weight| WeightId::Layer(layer as u16, weight);
        let gate_up = self.linear(x, id(LayerWeight::GateUp), Some(id(LayerWeight::GateUpBias)));
        let (gate, up) = gate_up.split_at(self.config.intermediate_size);
        let act: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        self.linear(&act, id(LayerWeight::Down), Some(id(LayerWeight::DownBias)))
    }

    /// Logits after one more token.
    fn step(&mut self, token: u32) -> Vec<f64> {
        let position = self.cache[0].len();
        let table = if self.config.tie_word_embeddings { WeightId::LmHead } else { WeightId::Embed };
        let mut hidden = self.row(table, token as usize).to_vec();
        let add = |hidden: &mut Vec<f64>, delta: Vec<f64>| hidden.iter_mut().zip(delta).for_each(|(h, d)| *h += d);
        for layer in 0..self.config.num_hidden_layers {
            let normed = self.norm(&hidden, WeightId::Layer(layer as u16, LayerWeight::InputNorm));
            let delta = self.attention(layer, &normed, position);
            add(&mut hidden, delta);
            let normed = self.norm(&hidden, WeightId::Layer(layer as u16, LayerWeight::PostNorm));
            add(&mut hidden, self.mlp(layer, &normed));
        }
        let normed = self.norm(&hidden, WeightId::FinalNorm);
        self.linear(&normed, WeightId::LmHead, None)
    }
}

/// Largest difference relative to the largest logit of the row.
fn difference(got: &[f64], expected: &[f64]) -> f64 {
    let scale = expected.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    got.iter().zip(expected).fold(0.0f64, |m, (g, e)| m.max((g - e).abs())) / scale
}

fn golden(case: &str, file: &str) -> Golden {
    serde_json::from_slice(&std::fs::read(fixture(case).join(file)).unwrap()).unwrap()
}

impl Golden {
    /// Each token fed and the logits it was answered with.
    fn steps(&self) -> Vec<(u32, &[f64])> {
        let tokens = self.prompt.iter().chain(&self.greedy).copied();
        let rows = self.logits.iter().chain(&self.decode_logits).map(Vec::as_slice);
        tokens.zip(rows).collect()
    }
}

fn worst_difference(mut model: Model, golden: &Golden) -> f64 {
    golden.steps().into_iter().map(|(token, row)| difference(&model.step(token), row)).fold(0.0, f64::max)
}

#[test]
fn logits_equal_those_of_transformers() {
    for case in CASES.into_iter().chain(MOE_CASES) {
        let golden = golden(case, "golden.json");
        assert_eq!(golden.steps().len(), golden.prompt.len() + 16);
        let worst = worst_difference(Model::load(case), &golden);
        assert!(worst < 1e-5, "{case}: {worst:e}");
    }
}

/// The fixtures would show a mistake: without its feature, each answers something else.
#[test]
fn each_feature_changes_the_logits() {
    type Change = fn(&mut ModelConfig);
    let changes: [(&str, Change); 10] = [
        ("qwen3-moe", |c| c.moe.iter_mut().for_each(|m| m.routing = RoutingMethod::TopKSoftmax)),
        ("mixtral", |c| c.moe.iter_mut().for_each(|m| m.experts_per_token = 1)),
        ("llama3-rope-tied", |c| c.rope_scaling = RopeScaling::None),
        ("llama-bias", |c| c.qkv_bias = false),
        ("llama-bias", |c| c.o_bias = false),
        ("llama-bias", |c| c.mlp_bias = false),
        ("mistral-window", |c| c.sliding_window = vec![]),
        ("qwen2-window", |c| c.sliding_window = vec![Some(6); 2]),
        ("qwen3", |c| c.qk_norm = false),
        ("qwen3", |c| c.rope_theta = 1e4),
    ];
    for (case, change) in changes {
        let worst = worst_difference(Model::load_as(case, change), &golden(case, "golden.json"));
        assert!(worst > 1e-3, "{case}: {worst:e}");
    }
}

/// `transformers` rounds every intermediate result to 16 bits, which moves its logits away from its own float32 answer
/// (by up to 3e-2 in bfloat16 and 5e-3 in float16 here). Exact arithmetic must be as near to it as that answer is.
#[test]
fn logits_computed_in_sixteen_bits_are_as_near_as_their_rounding_allows() {
    for case in ["llama-bf16", "llama-f16"] {
        let (native, float32) = (golden(case, "golden_native.json"), golden(case, "golden.json"));
        assert_eq!(native.greedy, float32.greedy, "{case}: the texts must be the same to be compared");
        let mut model = Model::load(case);
        for ((token, rounded), (_, exact)) in native.steps().into_iter().zip(float32.steps()) {
            let ours = difference(&model.step(token), rounded);
            assert!(ours <= difference(exact, rounded) + 1e-5, "{case}: {ours:e}");
        }
    }
}
