//! Mixtures of experts: routing of every method, the order of pairs, and the experts' products with even, skewed and
//! empty loads, in every shape of tiles.

use strobe_kernels_cuda::{
    CudaError, ExpertActivation, ExpertArgs, ExpertProduct, ExpertRouting, ExpertTiles, MoeOps, MoeShape, Precision,
    RouteArgs,
};
use strobe_model::RoutingMethod;

use super::{Outcome, Rig};
use crate::cuda::expert_routing;

const DEEPSEEK: RoutingMethod = RoutingMethod::DeepSeekV3 { groups: 8, topk_groups: 4, scale: 2.5, renormalise: true };

/// Method, experts, experts of a token.
const ROUTERS: [(RoutingMethod, usize, usize); 13] = [
    (RoutingMethod::TopKSoftmax, 8, 2),
    (RoutingMethod::TopKSoftmax, 32, 4),
    (RoutingMethod::TopKSoftmax, 128, 4),
    (RoutingMethod::TopKSoftmax, 1, 1),
    (RoutingMethod::TopKSoftmax, 7, 7),
    (RoutingMethod::SoftmaxTopK { renormalise: true }, 128, 8),
    (RoutingMethod::SoftmaxTopK { renormalise: false }, 60, 4),
    (RoutingMethod::SoftmaxTopK { renormalise: false }, 100, 40),
    (DEEPSEEK, 256, 8),
    (RoutingMethod::DeepSeekV3 { groups: 1, topk_groups: 1, scale: 1.0, renormalise: true }, 64, 6),
    (RoutingMethod::DeepSeekV3 { groups: 4, topk_groups: 2, scale: 16.0, renormalise: false }, 16, 4),
    (RoutingMethod::DeepSeekV3 { groups: 64, topk_groups: 9, scale: 1.0, renormalise: true }, 64, 5),
    (RoutingMethod::DeepSeekV3 { groups: 40, topk_groups: 5, scale: 1.0, renormalise: true }, 1000, 33),
];

/// Every method, then every type.
pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let mut outcomes = Vec::new();
    for (index, (method, experts, k)) in ROUTERS.into_iter().enumerate() {
        let some = [(5, 16), (17, 90), (500, 1500)].map(|(low, high)| rig.random.between(low, high));
        for tokens in [1, 3].into_iter().chain(some) {
            route(rig, method, (experts, k, tokens), index % 2 == 1, &mut outcomes)?;
        }
    }
    route(rig, RoutingMethod::TopKSoftmax, (8, 2, 9000), true, &mut outcomes)?;
    for precision in Precision::ALL {
        for round in 0..9 {
            let (load, name) = LOADS[round % LOADS.len()];
            let random = &mut rig.random;
            let (hidden, inter) = match round {
                0..6 => (8 * random.between(1, 30), 8 * random.between(1, 20)),
                _ => (random.between(1, 200), random.between(1, 130)),
            };
            let (experts, k) = if name == "one expert" { (1, 1) } else { (random.between(3, 9), random.between(1, 3)) };
            let tokens = if round % 2 == 0 { random.between(1, 40) } else { random.between(150, 420) };
            let shape = MoeShape {
                experts,
                per_token: k,
                routing: ExpertRouting::TopKSoftmax,
                hidden,
                inter,
                activation: match round % 2 {
                    0 => ExpertActivation::Silu,
                    _ => ExpertActivation::Clamped { alpha: 1.702, limit: 1.5 },
                },
            };
            products(rig, precision, shape, tokens, (load, name), &mut outcomes)?;
        }
    }
    Ok(outcomes)
}

/// The experts that the reference chooses, their weights, and the place of every pair among those sorted by expert.
struct Expected {
    chosen: Vec<u32>,
    weights: Vec<f32>,
    places: Vec<u32>,
    counts: Vec<u32>,
}

/// Rows where `padding` says so go nowhere.
fn expected(
    method: RoutingMethod,
    logits: &[f32],
    bias: Option<&[f32]>,
    (experts, k): (usize, usize),
    padding: impl Fn(usize) -> bool,
) -> Expected {
    let tokens = logits.len() / experts;
    let mut found = Expected {
        chosen: vec![u32::MAX; tokens * k],
        weights: vec![0.0; tokens * k],
        places: vec![0; tokens * k],
        counts: vec![0; experts],
    };
    for token in (0..tokens).filter(|token| !padding(*token)) {
        let own = token * k..(token + 1) * k;
        let row = &logits[token * experts..(token + 1) * experts];
        method.route(row, bias, &mut found.chosen[own.clone()], &mut found.weights[own]);
    }
    let mut place = 0;
    for expert in 0..experts as u32 {
        for (pair, _) in found.chosen.iter().enumerate().filter(|(_, chosen)| **chosen == expert) {
            found.places[pair] = place;
            found.counts[expert as usize] += 1;
            place += 1;
        }
    }
    found
}

fn route(
    rig: &mut Rig,
    method: RoutingMethod,
    (experts, k, tokens): (usize, usize, usize),
    with_bias: bool,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    // Numbers of few digits: scores that are equal are so to the last bit, and there are many of them.
    let random = &mut rig.random;
    let mut numbers = |count: usize, scale: f32| -> Vec<f32> {
        (0..count).map(|_| (random.normal() * 16.0).round() * scale / 16.0).collect()
    };
    let (logits, planned, bias) =
        (numbers(tokens * experts, 2.0), numbers(tokens * experts, 1.0), numbers(experts, 0.5));
    let bias = with_bias.then_some(&bias[..]);
    let slots: Vec<i32> = (0..tokens).map(|_| if rig.random.below(8) == 0 { -1 } else { 5 }).collect();
    let shape = MoeShape {
        experts,
        per_token: k,
        routing: expert_routing(method),
        hidden: 8,
        inter: 8,
        activation: ExpertActivation::Silu,
    };
    let mut ops = MoeOps::new(rig.gpu, Precision::Bf16, shape, tokens)?;
    let (logits_device, slots_device) = (rig.upload(&logits)?, rig.upload(&slots)?);
    let bias_device = bias.map(|bias| rig.upload(bias)).transpose()?;
    let args = RouteArgs {
        logits: logits_device.ptr(),
        bias: bias_device.as_ref().map_or(0, |bias| bias.ptr()),
        slots: slots_device.ptr(),
        tokens,
        counts: 0,
    };
    let text = format!("{}, {k} of {experts}, {tokens} tokens{}", method.name(), if with_bias { ", bias" } else { "" });
    let mut compare = |ops: &MoeOps, slots, expected: &Expected, name: &str| -> Result<(), CudaError> {
        let counts = rig.output(experts, 4)?;
        // SAFETY: operands and results were made for these tokens, and live until the result was read.
        unsafe { ops.route(rig.gpu, &RouteArgs { counts: counts.ptr(), slots, ..args }, ops.tiles_for(tokens)) }?;
        let found = ops.chosen(rig.gpu, tokens)?;
        outcomes.push(Outcome::exact((name, "experts"), &text, &found.experts, &expected.chosen));
        outcomes.push(Outcome::compared((name, "weights"), &text, &found.weights, &expected.weights, 2e-6));
        outcomes.push(Outcome::exact((name, "loads"), &text, &counts.read_u32(rig.gpu)?, &expected.counts));
        let real = |places: &[u32]| -> Vec<u32> {
            places.iter().zip(&expected.chosen).filter(|(_, e)| **e != u32::MAX).map(|(p, _)| *p).collect()
        };
        outcomes.push(Outcome::exact((name, "places"), &text, &real(&found.places), &real(&expected.places)));
        Ok(())
    };
    let whole = expected(method, &logits, bias, (experts, k), |_| false);
    compare(&ops, 0, &whole, "route")?;
    let padded = expected(method, &logits, bias, (experts, k), |token| slots[token] < 0);
    compare(&ops, slots_device.ptr(), &padded, "route, padded")?;
    // Balanced logits take the router's place, without its bias, until they are switched off.
    ops.set_planned(&planned)?;
    compare(&ops, 0, &expected(method, &planned, None, (experts, k), |_| false), "route, planned")?;
    ops.use_planned(false)?;
    compare(&ops, 0, &whole, "route, planned off")
}

/// Which experts a token prefers.
type Load = fn(usize, usize) -> usize;

const LOADS: [(Load, &str); 4] = [
    (|token, experts| token * 7919 % experts, "even"),
    // Most to one, the last ones empty.
    (|token, experts| if token % 11 == 0 { token % experts.div_ceil(2) } else { 1 }, "skewed"),
    (|_, experts| experts - 1, "all to the last"),
    (|_, _| 0, "one expert"),
];

fn products(
    rig: &mut Rig,
    precision: Precision,
    shape: MoeShape,
    tokens: usize,
    (load, name): (Load, &str),
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let MoeShape { experts, per_token: k, hidden, inter, .. } = shape;
    let (pairs, method) = (tokens * k, RoutingMethod::TopKSoftmax);
    let mut logits = vec![0.0f32; tokens * experts];
    for (token, row) in logits.chunks_mut(experts).enumerate() {
        // The preferred expert first, those after it next.
        let first = load(token, experts);
        for slot in 0..k {
            row[(first + slot) % experts] = 3.0 - slot as f32;
        }
    }
    let routed = expected(method, &logits, None, (experts, k), |_| false);
    let scale = 1.0 / (hidden as f32).sqrt();
    let mut x = rig.random.normals(tokens * hidden, 1.0);
    let mut up = rig.random.normals(experts * 2 * inter * hidden, 2.0 * scale);
    let mut act = rig.random.normals(pairs * inter, 1.0);
    let mut down = rig.random.normals(experts * hidden * inter, 1.0);
    let (up_bias, down_bias) =
        (rig.random.normals(experts * 2 * inter, 0.5), rig.random.normals(experts * hidden, 0.5));
    let mut answers = rig.random.normals(pairs * hidden, 1.0);
    let mut residual = rig.random.normals(tokens * hidden, 1.0);
    let (x_device, up_device) = (rig.upload_rounded(&mut x, precision)?, rig.upload_rounded(&mut up, precision)?);
    let (act_device, down_device) =
        (rig.upload_rounded(&mut act, precision)?, rig.upload_rounded(&mut down, precision)?);
    let answers_device = rig.upload_rounded(&mut answers, precision)?;
    let (up_bias_device, down_bias_device) = (rig.upload(&up_bias)?, rig.upload(&down_bias)?);
    let logits_device = rig.upload(&logits)?;

    let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    let (mut acted, mut answered) = (vec![0f32; pairs * inter], vec![0f32; pairs * hidden]);
    let (mut acted_plain, mut answered_plain) = (acted.clone(), answered.clone());
    for pair in 0..pairs {
        let (expert, place, token) = (routed.chosen[pair] as usize, routed.places[pair] as usize, pair / k);
        let row = &x[token * hidden..][..hidden];
        for column in 0..inter {
            let at = |part: usize| expert * 2 * inter + part * inter + column;
            let [gate, value] = [0, 1].map(|part| dot(row, &up[at(part) * hidden..][..hidden]));
            acted_plain[place * inter + column] = activate(shape.activation, gate, value) as f32;
            let [gate_bias, value_bias] = [0, 1].map(|part| f64::from(up_bias[at(part)]));
            acted[place * inter + column] = activate(shape.activation, gate + gate_bias, value + value_bias) as f32;
        }
        for column in 0..hidden {
            let at = expert * hidden + column;
            let sum = dot(&act[place * inter..][..inter], &down[at * inter..][..inter]);
            answered_plain[place * hidden + column] = sum as f32;
            answered[place * hidden + column] = (sum + f64::from(down_bias[at])) as f32;
        }
    }
    let ops = MoeOps::new(rig.gpu, precision, shape, tokens)?;
    let (dtype, tolerance) = match precision {
        Precision::F32 => ("f32", 5e-5),
        Precision::F16 => ("f16", 6e-4),
        Precision::Bf16 => ("bf16", 4e-3),
    };
    // Pair by pair is for few of them.
    let fits = |tiles: &ExpertTiles| *tiles != ExpertTiles::PAIRS || pairs < 256;
    let all: Vec<ExpertTiles> = ops.tile_shapes().filter(fits).collect();
    let (counts, gathered) = (rig.output(experts, 4)?, rig.output_of(pairs * hidden, precision)?);
    for tiles in all {
        let route = RouteArgs { logits: logits_device.ptr(), bias: 0, slots: 0, tokens, counts: counts.ptr() };
        // SAFETY: operands and results were made for these tokens, and live until the result was read.
        unsafe { ops.route(rig.gpu, &route, tiles) }?;
        let text = format!(
            "{name}, {}tiles of {}, {tokens} tokens to {k} of {experts}, {hidden} x {inter}, {:?}",
            if tiles.hopper { "Hopper's " } else { "" },
            tiles.rows,
            shape.activation
        );
        for biased in [false, true] {
            let bias = |device: u64| if biased { device } else { 0 };
            let with = if biased { " + bias" } else { "" };
            let out = rig.output_of(pairs * inter, precision)?;
            let args = ExpertArgs {
                product: ExpertProduct::GateUp,
                x: x_device.ptr(),
                w: up_device.ptr(),
                bias: bias(up_bias_device.ptr()),
                out: out.ptr(),
                gathered: gathered.ptr(),
                tokens,
            };
            // SAFETY: operands and results were made for these tokens, and live until the result was read.
            unsafe { ops.experts(rig.gpu, &args, tiles) }?;
            let expected = if biased { &acted } else { &acted_plain };
            let op = format!("experts gate and up{with}");
            outcomes.push(Outcome::compared((&op, dtype), &text, &out.read(rig.gpu, precision)?, expected, tolerance));
            let out = rig.output_of(pairs * hidden, precision)?;
            let args = ExpertArgs {
                product: ExpertProduct::Down,
                x: act_device.ptr(),
                w: down_device.ptr(),
                bias: bias(down_bias_device.ptr()),
                out: out.ptr(),
                gathered: 0,
                tokens,
            };
            // SAFETY: operands and results were made for these tokens, and live until the result was read.
            unsafe { ops.experts(rig.gpu, &args, tiles) }?;
            let expected = if biased { &answered } else { &answered_plain };
            let op = format!("experts down{with}");
            outcomes.push(Outcome::compared((&op, dtype), &text, &out.read(rig.gpu, precision)?, expected, tolerance));
        }
    }
    let hidden_device = rig.in_place(&mut residual, Precision::F32)?;
    // SAFETY: operands and results were made for these tokens, and live until the result was read.
    unsafe { ops.sum(rig.gpu, answers_device.ptr(), hidden_device.ptr(), tokens) }?;
    for pair in 0..pairs {
        let (place, token, weight) = (routed.places[pair] as usize, pair / k, routed.weights[pair]);
        for column in 0..hidden {
            residual[token * hidden + column] += weight * answers[place * hidden + column];
        }
    }
    let text = format!("{tokens} tokens of {k} experts, {hidden} wide");
    let found = hidden_device.read(rig.gpu, Precision::F32)?;
    outcomes.push(Outcome::compared(("experts sum", dtype), text, &found, &residual, 1e-5));
    Ok(())
}

fn activate(activation: ExpertActivation, gate: f64, up: f64) -> f64 {
    match activation {
        ExpertActivation::Silu => gate / (1.0 + (-gate).exp()) * up,
        ExpertActivation::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let gate = gate.min(limit);
            gate / (1.0 + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1.0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_sorted_by_expert_and_then_by_token() {
        let logits = [9.0, 0.0, 1.0, 0.0, 1.0, 9.0, 9.0, 1.0, 0.0];
        let found = expected(RoutingMethod::TopKSoftmax, &logits, None, (3, 2), |token| token == 1);
        assert_eq!(found.chosen, [0, 2, u32::MAX, u32::MAX, 0, 1]);
        assert_eq!(found.counts, [2, 1, 1]);
        assert_eq!([found.places[0], found.places[1], found.places[4], found.places[5]], [0, 3, 1, 2]);
    }

    #[test]
    fn every_method_can_choose_so_many() {
        for (method, experts, k) in ROUTERS {
            assert_eq!(method.check(experts, k), Ok(()), "{method:?}");
        }
    }
}
