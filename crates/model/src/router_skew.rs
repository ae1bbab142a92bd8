//! Uneven routers for random weights: biases under which tokens reach experts as a given distribution says.
//!
//! The logits of a random router are as good as independent normal numbers, so every expert gets its equal share.
//! Trained routers are not so kind. A bias per expert, found by trying it on such logits, gives the shares wanted.

use serde::{Deserialize, Serialize};

use crate::moe::MoeConfig;
use crate::random::RandomTensor;
use crate::weights::STD;

/// How a random router prefers some experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterSkew {
    /// What was asked for: `zipf:1.2`, or the name of a file.
    pub asked: String,
    /// One list of biases for all layers, each of which gives them to its experts in an order of its own; or one list for
    /// each layer, as it is.
    pub biases: Vec<Vec<f32>>,
}

/// Tokens that a bias is tried on, and how often it is corrected.
const TRIAL_TOKENS: usize = 2048;
const CORRECTIONS: usize = 120;

impl RouterSkew {
    /// `zipf:S`: the shares of experts fall like `1 / rank^S`. Otherwise a file with a JSON list of what each expert got
    /// (tokens or shares), or a list of such lists, one for each layer.
    pub fn parse(asked: &str, moe: &MoeConfig, hidden_size: usize, layers: usize) -> Result<RouterSkew, String> {
        let shares = match asked.strip_prefix("zipf:") {
            Some(exponent) => {
                let exponent: f64 = exponent.parse().unwrap_or(f64::NAN);
                if !(0.0..=20.0).contains(&exponent) {
                    return Err(format!("`{asked}`: the exponent must be a number from 0 to 20"));
                }
                vec![(1..=moe.num_experts).map(|rank| (rank as f64).powf(-exponent)).collect()]
            }
            None => read_file(asked, moe, layers)?,
        };
        let biases = shares.iter().map(|shares| biases(shares, moe, hidden_size)).collect();
        Ok(RouterSkew { asked: asked.to_string(), biases })
    }

    /// The field and the problem of a skew that does not fit a model.
    pub(crate) fn first_problem(&self, experts: usize, layers: usize) -> Result<(), (&'static str, String)> {
        let lists = self.biases.len();
        if lists != 1 && lists != layers {
            return Err(("router_skew", format!("must have 1 or {layers} lists, found {lists}")));
        }
        match self.biases.iter().find(|list| list.len() != experts || list.iter().any(|bias| !bias.is_finite())) {
            None => Ok(()),
            Some(list) => Err(("router_skew", format!("must hold {experts} finite numbers, found {list:?}"))),
        }
    }

    /// The biases of a layer, and whether they are given to its experts in an order of its own.
    pub(crate) fn of_layer(&self, layer: usize) -> (&[f32], bool) {
        let shared = self.biases.len() == 1;
        (self.biases.get(if shared { 0 } else { layer }).map_or(&[], Vec::as_slice), shared)
    }
}

fn read_file(path: &str, moe: &MoeConfig, layers: usize) -> Result<Vec<Vec<f64>>, String> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Lists {
        One(Vec<f64>),
        PerLayer(Vec<Vec<f64>>),
    }
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("`{path}` is neither zipf:S nor a file that can be read ({error})"))?;
    let lists = match serde_json::from_str(&text) {
        Ok(Lists::One(list)) => vec![list],
        Ok(Lists::PerLayer(lists)) => lists,
        Err(_) => return Err(format!("{path}: expected a JSON list of numbers, or a list of such lists")),
    };
    if lists.len() != 1 && lists.len() != layers {
        return Err(format!("{path}: expected one list, or one for each of {layers} layers, found {}", lists.len()));
    }
    for list in &lists {
        let usable = list.iter().all(|share| *share >= 0.0 && share.is_finite());
        if list.len() != moe.num_experts || !usable || list.iter().sum::<f64>() <= 0.0 {
            return Err(format!(
                "{path}: expected {} numbers of at least 0, not all of them 0, found {} of them",
                moe.num_experts,
                list.len()
            ));
        }
    }
    Ok(lists)
}

/// How often each expert is to be among a token's: in proportion to the shares, but never more than always.
fn inclusions(shares: &[f64], per_token: usize) -> Vec<f64> {
    let mut wanted = vec![0.0; shares.len()];
    loop {
        let always = wanted.iter().filter(|w| **w >= 1.0).count();
        let open: f64 = shares.iter().zip(&wanted).filter(|(_, w)| **w < 1.0).map(|(share, _)| share).sum();
        let mut capped = false;
        for (share, wanted) in shares.iter().zip(&mut wanted).filter(|(_, w)| **w < 1.0) {
            *wanted = if open > 0.0 { share / open * per_token.saturating_sub(always) as f64 } else { 0.0 };
            capped |= *wanted >= 1.0;
            *wanted = wanted.min(1.0);
        }
        if !capped {
            return wanted;
        }
    }
}

/// Biases under which the model's own routing of normal logits includes experts as often as the shares say.
fn biases(shares: &[f64], moe: &MoeConfig, hidden_size: usize) -> Vec<f32> {
    let experts = shares.len();
    let wanted = inclusions(shares, moe.experts_per_token);
    // A normalised row times weights of this deviation.
    let deviation = STD * (hidden_size as f32).sqrt();
    let mut logits = vec![0.0; TRIAL_TOKENS * experts];
    RandomTensor::new(0, "router_skew").fill_normal(0, deviation, &mut logits);
    let mut bias = vec![0.0f32; experts];
    let (mut chosen, mut weights) = (vec![0; moe.experts_per_token], vec![0.0; moe.experts_per_token]);
    for correction in 0..CORRECTIONS {
        let mut found = vec![0u32; experts];
        for logits in logits.chunks(experts) {
            moe.routing.route(logits, Some(&bias), &mut chosen, &mut weights);
            chosen.iter().for_each(|expert| found[*expert as usize] += 1);
        }
        // Half a token stands for none, on both sides: what is wanted never goes to an infinite bias.
        let logarithm = |often: f64| often.max(0.5 / TRIAL_TOKENS as f64).ln();
        let step = 0.5 * deviation * (1.0 - correction as f32 / CORRECTIONS as f32);
        for ((bias, wanted), found) in bias.iter_mut().zip(&wanted).zip(found) {
            *bias += step * (logarithm(*wanted) - logarithm(f64::from(found) / TRIAL_TOKENS as f64)) as f32;
        }
    }
    bias
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::RoutingMethod;

    fn moe(experts: usize, per_token: usize, routing: RoutingMethod) -> MoeConfig {
        let preset = crate::presets::preset("moe-tiny").unwrap().config().moe.unwrap();
        MoeConfig { num_experts: experts, experts_per_token: per_token, routing, ..preset }
    }

    #[test]
    fn tokens_reach_experts_as_the_distribution_says() {
        let deepseek = RoutingMethod::DeepSeekV3 { groups: 4, topk_groups: 2, scale: 2.5, renormalise: true };
        for (experts, per_token, routing, tolerance) in [
            (8, 2, RoutingMethod::TopKSoftmax, 0.02),
            (32, 4, RoutingMethod::SoftmaxTopK { renormalise: false }, 0.03),
            (16, 3, deepseek, 0.06),
        ] {
            let moe = moe(experts, per_token, routing);
            let skew = RouterSkew::parse("zipf:1.2", &moe, 512, 4).unwrap();
            let wanted = inclusions(&(1..=experts).map(|r| (r as f64).powf(-1.2)).collect::<Vec<_>>(), per_token);
            // Logits that the biases were not made with.
            let tokens = 20_000;
            let mut logits = vec![0.0; tokens * experts];
            RandomTensor::new(9, "other").fill_normal(0, STD * 512f32.sqrt(), &mut logits);
            let mut found = vec![0; experts];
            for logits in logits.chunks(experts) {
                let (mut chosen, mut weights) = (vec![0; per_token], vec![0.0; per_token]);
                moe.routing.route(logits, Some(&skew.biases[0]), &mut chosen, &mut weights);
                chosen.iter().for_each(|e| found[*e as usize] += 1);
            }
            for (expert, (wanted, found)) in wanted.iter().zip(found).enumerate() {
                let off = (f64::from(found) / tokens as f64 - wanted).abs();
                assert!(off < tolerance, "{routing:?} expert {expert}: {found} of {tokens}, wanted {wanted}");
            }
        }
    }

    #[test]
    fn an_expert_takes_each_token_once_at_most() {
        assert_eq!(inclusions(&[1.0, 1.0], 1), [0.5, 0.5]);
        assert_eq!(inclusions(&[8.0, 1.0, 1.0], 2), [1.0, 0.5, 0.5]);
        assert_eq!(inclusions(&[1.0, 0.0, 0.0], 1), [1.0, 0.0, 0.0]);
        assert_eq!(inclusions(&[100.0, 10.0, 1.0], 3), [1.0, 1.0, 1.0]);
    }

    #[test]
    fn what_cannot_be_a_distribution_is_refused() {
        let moe = moe(4, 2, RoutingMethod::TopKSoftmax);
        let dir = std::env::temp_dir().join(format!("strobe-skew-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("counts.json");
        let parse = |text: &str| {
            std::fs::write(&file, text).unwrap();
            RouterSkew::parse(file.to_str().unwrap(), &moe, 32, 2)
        };
        assert_eq!(parse("[5, 1, 1, 1]").unwrap().biases.len(), 1);
        assert_eq!(parse("[[5, 1, 1, 0], [1, 1, 1, 1]]").unwrap().biases.len(), 2);
        for text in ["", "{}", "[1, 2]", "[0, 0, 0, 0]", "[1, 1, 1, -1]", "[[1, 1, 1, 1], [1], [1]]"] {
            let problem = parse(text).unwrap_err();
            assert!(problem.contains("counts.json"), "{problem}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
        for asked in ["zipf:", "zipf:-1", "zipf:NaN", "nowhere.json"] {
            let problem = RouterSkew::parse(asked, &moe, 32, 2).unwrap_err();
            assert!(problem.contains(asked), "{problem}");
        }
    }
}
