//! Routing against cases worked out by hand and against what the routers of `transformers` chose.

use serde::Deserialize;
use strobe_model::RoutingMethod;

fn route(method: RoutingMethod, k: usize, logits: &[f32], bias: Option<&[f32]>) -> (Vec<u32>, Vec<f32>) {
    method.check(logits.len(), k).unwrap();
    let (mut experts, mut weights) = (vec![0; k], vec![0.0; k]);
    method.route(logits, bias, &mut experts, &mut weights);
    (experts, weights)
}

fn assert_close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{got} against {expected}");
    }
}

const DEEPSEEK: RoutingMethod = RoutingMethod::DeepSeekV3 { groups: 2, topk_groups: 1, scale: 2.5, renormalise: true };

#[test]
fn softmax_over_all_keeps_the_share_of_those_left_out() {
    // Powers of two: the shares are 4, 2, 1 and 1 of 8.
    let logits = [1.0, 4.0, 1.0, 2.0].map(f32::ln);
    let (experts, weights) = route(RoutingMethod::SoftmaxTopK { renormalise: false }, 2, &logits, None);
    assert_eq!(experts, [1, 3]);
    assert_close(&weights, &[0.5, 0.25]);
    let (experts, weights) = route(RoutingMethod::SoftmaxTopK { renormalise: true }, 2, &logits, None);
    assert_eq!(experts, [1, 3]);
    assert_close(&weights, &[2.0 / 3.0, 1.0 / 3.0]);
}

#[test]
fn a_gate_bias_changes_choice_and_weights() {
    let logits = [1.0, 4.0, 1.0, 2.0].map(f32::ln);
    let bias = [8.0, 1.0, 1.0, 1.0].map(f32::ln);
    let (experts, weights) = route(RoutingMethod::TopKSoftmax, 2, &logits, Some(&bias));
    assert_eq!(experts, [0, 1]);
    assert_close(&weights, &[2.0 / 3.0, 1.0 / 3.0]);
}

#[test]
fn deepseek_chooses_the_group_by_its_two_best_and_weighs_without_the_bias() {
    // Sigmoids 0.75 and 0.5 against 0.8 and 0.2: the first group wins although the best expert is in the second.
    let logits = [3.0f32.ln(), 0.0, 4.0f32.ln(), 0.25f32.ln()];
    let (experts, weights) = route(DEEPSEEK, 2, &logits, None);
    assert_eq!(experts, [0, 1]);
    assert_close(&weights, &[2.5 * 0.6, 2.5 * 0.4]);
    let (experts, weights) = route(DEEPSEEK, 2, &logits, Some(&[0.0, 0.0, 0.0, 0.7]));
    assert_eq!(experts, [3, 2], "the bias chooses");
    assert_close(&weights, &[2.5 * 0.2, 2.5 * 0.8]);
    let plain = RoutingMethod::DeepSeekV3 { groups: 2, topk_groups: 1, scale: 1.0, renormalise: false };
    assert_close(&route(plain, 2, &logits, None).1, &[0.75, 0.5]);
}

#[test]
fn equal_scores_go_to_the_lower_index() {
    for k in 1..=6 {
        let expected: Vec<u32> = (0..k).collect();
        for method in [RoutingMethod::SoftmaxTopK { renormalise: false }, RoutingMethod::TopKSoftmax] {
            let (experts, weights) = route(method, k as usize, &[0.5; 6], None);
            assert_eq!(experts, expected, "{}", method.name());
            assert!(weights.iter().all(|weight| *weight == weights[0]));
        }
    }
    assert_eq!(route(DEEPSEEK, 3, &[0.5; 6], None).0, [0, 1, 2]);
}

#[test]
fn hopeless_logits_still_give_distinct_experts() {
    for logits in [[f32::NAN; 8], [f32::NEG_INFINITY; 8], [f32::MAX; 8], [f32::INFINITY; 8]] {
        for method in [RoutingMethod::SoftmaxTopK { renormalise: true }, RoutingMethod::TopKSoftmax, DEEPSEEK] {
            let mut experts = route(method, 3, &logits, None).0;
            experts.sort_unstable();
            experts.dedup();
            assert_eq!(experts.len(), 3, "{} {logits:?}", method.name());
        }
    }
}

#[test]
fn impossible_shapes_are_named_by_their_field() {
    let deepseek =
        |groups, topk_groups| RoutingMethod::DeepSeekV3 { groups, topk_groups, scale: 1.0, renormalise: true };
    for (method, experts, k, field) in [
        (RoutingMethod::TopKSoftmax, 8, 0, "num_experts_per_tok"),
        (RoutingMethod::TopKSoftmax, 8, 9, "num_experts_per_tok"),
        (deepseek(3, 1), 8, 2, "n_group"),
        (deepseek(0, 0), 8, 2, "n_group"),
        (deepseek(128, 1), 256, 2, "n_group"),
        (deepseek(4, 5), 8, 2, "topk_group"),
        (deepseek(4, 1), 8, 3, "num_experts_per_tok"),
        (
            RoutingMethod::DeepSeekV3 { groups: 1, topk_groups: 1, scale: f32::NAN, renormalise: true },
            8,
            2,
            "routed_scaling_factor",
        ),
    ] {
        assert_eq!(method.check(experts, k).unwrap_err().0, field, "{method:?}");
    }
}

#[derive(Deserialize)]
struct Golden {
    router: String,
    method: RoutingMethod,
    bias: Option<Vec<f32>>,
    tokens: Vec<GoldenToken>,
}

#[derive(Deserialize)]
struct GoldenToken {
    logits: Vec<f32>,
    experts: Vec<u32>,
    weights: Vec<f32>,
}

#[test]
fn transformers_routers_agree() {
    let golden: Vec<Golden> = serde_json::from_str(include_str!("fixtures/routing.json")).unwrap();
    let mut names: Vec<&str> = golden.iter().map(|case| case.method.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), RoutingMethod::NAMES.len(), "every method has a case");
    for case in &golden {
        for token in &case.tokens {
            let (experts, weights) = route(case.method, token.experts.len(), &token.logits, case.bias.as_deref());
            // Some of these routers leave the order open.
            let in_order = |experts: &[u32], weights: &[f32]| {
                let mut pairs: Vec<(u32, f32)> = experts.iter().copied().zip(weights.iter().copied()).collect();
                pairs.sort_unstable_by_key(|pair| pair.0);
                pairs.into_iter().unzip::<u32, f32, Vec<_>, Vec<_>>()
            };
            let (experts, weights) = in_order(&experts, &weights);
            let (wanted, expected) = in_order(&token.experts, &token.weights);
            assert_eq!(experts, wanted, "{}", case.router);
            assert_close(&weights, &expected);
        }
    }
}
