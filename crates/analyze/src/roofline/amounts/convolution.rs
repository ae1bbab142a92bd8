//! Convolutions and their gradients.

use super::inputs::{Argument, Arguments, elements};
use super::rules::{ConvPlaces, Gradient, Rank};
use super::{Amounts, Operator, Shape};

/// Sides of images or windows: all dimensions behind the first two.
fn sides(dims: &[u64]) -> &[u64] {
    dims.get(2..).unwrap_or(&[])
}

fn three(sides: &[u64]) -> [u64; 3] {
    [0, 1, 2].map(|i| sides.get(i).copied().unwrap_or(0))
}

/// The input's dimensions, with a batch of one where there is none.
fn with_batch(input: &[u64], weight: &[u64]) -> Option<Vec<u64>> {
    match weight.len() {
        rank if rank < 3 => None,
        rank if input.len() == rank => Some(input.to_vec()),
        rank if input.len() + 1 == rank => Some([&[1], input].concat()),
        _ => None,
    }
}

fn amounts(input: &Argument, inputs: u64, out: &[u64], kernel: &[u64], groups: u64, flops: f64) -> Amounts {
    Amounts {
        flops: Some(flops),
        bytes: None,
        shape: Shape::Convolution {
            batch: out.first().copied().unwrap_or(0),
            inputs,
            outputs: out.get(1).copied().unwrap_or(0),
            size: three(sides(out)),
            kernel: three(kernel),
            groups,
        },
        data_type: input.data_type(),
        mask_not_known: false,
        untyped_elements: 0.0,
        is_product: true,
    }
}

pub(super) fn forward(arguments: &Arguments, places: &ConvPlaces, rank: Rank) -> Option<Operator> {
    let (input, weight) = (arguments.tensor(0)?, arguments.tensor(1)?);
    let dims = with_batch(&input.dims, &weight.dims)?;
    let kernel = sides(&weight.dims);
    let (&[batch, inputs], &[first, second]) = (dims.get(..2)?, weight.dims.get(..2)?) else { return None };
    if inputs == 0 || first == 0 || second == 0 {
        return None;
    }
    let flag = places.transposed.and_then(|place| arguments.flag(place));
    // Without the flag: weights of a convolution have a share of the input's channels in second place.
    let seems_transposed = places.transposed.is_some() && !inputs.is_multiple_of(second) && first == inputs;
    let transposed = places.always_transposed || flag.unwrap_or(seems_transposed);
    let number =
        |place: Option<usize>| place.and_then(|place| arguments.number(place)).and_then(|n| u64::try_from(n).ok());
    let (groups, outputs) = match transposed {
        false if inputs.is_multiple_of(second) => (inputs / second, first),
        true if first == inputs => {
            let groups = number(places.groups).unwrap_or(1).max(1);
            (groups, second.saturating_mul(groups))
        }
        _ => return None,
    };
    let size = match result_sides(arguments, places, sides(&dims), kernel, transposed) {
        Some(size) => size,
        None => {
            let seen = arguments.behind.as_deref();
            let Some(seen) = seen else { return Some(Operator::NeedsResult) };
            // With padding within the window the result is no larger than this.
            let fits = |(&out, (&side, &window)): (&u64, (&u64, &u64))| {
                out > 0 && (transposed || out < side.saturating_add(window))
            };
            let matches = seen.len() == dims.len()
                && seen.get(..2) == Some(&[batch, outputs])
                && sides(seen).iter().zip(sides(&dims).iter().zip(kernel)).all(fits);
            if !matches {
                return Some(Operator::NeedsResult);
            }
            sides(seen).to_vec()
        }
    };
    let out = [&[batch, outputs], size.as_slice()].concat();
    // Each place of the output, or of the input of a transposed one, meets the window over the channels of its group.
    let places_met = if transposed { elements(&dims) } else { elements(&out) };
    let bias = places.bias.and_then(|place| arguments.tensor(place));
    let biased = if bias.is_some() { elements(&out) } else { 0.0 };
    let flops = 2.0 * places_met * second as f64 * elements(kernel) + biased;
    let bytes = || {
        let written = elements(&out) * input.bytes_per_element()? as f64;
        Some(input.bytes()? + weight.bytes()? + bias.map_or(Some(0.0), Argument::bytes)? + written)
    };
    let amounts = Amounts { bytes: bytes(), ..amounts(input, inputs, &out, kernel, groups, flops) };
    Some(Operator::Known(amounts, rank))
}

/// Sides of the result, where stride, padding and dilation are recorded.
fn result_sides(
    arguments: &Arguments,
    places: &ConvPlaces,
    input: &[u64],
    kernel: &[u64],
    transposed: bool,
) -> Option<Vec<u64>> {
    let list = |place: usize| arguments.numbers(place);
    let stride = list(places.stride)?;
    let dilation = match places.dilation {
        Some(place) => list(place)?,
        None => vec![1],
    };
    let word = arguments.word(places.padding);
    if word == Some("same") {
        return Some(input.to_vec());
    }
    let padding = if word == Some("valid") { vec![0] } else { list(places.padding)? };
    let more = match places.output_padding {
        Some(place) if transposed => list(place)?,
        _ => vec![0],
    };
    let at = |list: &[i64], i: usize| list.get(i).or(list.first()).map(|&n| i128::from(n));
    let side = |(i, (&side, &window)): (usize, (&u64, &u64))| {
        let (stride, dilation) = (at(&stride, i)?, at(&dilation, i)?);
        let (padding, more) = (at(&padding, i)?, at(&more, i)?);
        if stride < 1 || dilation < 1 || padding < 0 || more < 0 {
            return None;
        }
        let reach = dilation.checked_mul(i128::from(window) - 1)?;
        let result = match transposed {
            true => (i128::from(side) - 1).checked_mul(stride)? - 2 * padding + reach + more + 1,
            false => (i128::from(side) + 2 * padding - reach - 1).checked_div(stride)?.checked_add(1)?,
        };
        u64::try_from(result).ok().filter(|&side| side > 0)
    };
    input.iter().zip(kernel).enumerate().map(side).collect()
}

pub(super) fn gradient(arguments: &Arguments, of: Gradient) -> Option<Amounts> {
    // Before PyTorch 1.11 each gradient has an operator of its own, given the sizes of its result; the operator around
    // both has all tensors.
    let sizes = || {
        let recorded = arguments.numbers(0).and_then(|list| list.iter().map(|&n| u64::try_from(n).ok()).collect());
        recorded.filter(|dims: &Vec<u64>| !dims.is_empty())
    };
    let around = |place: usize| arguments.around.get(place).filter(|dims| dims.len() > 2).cloned();
    let dims = |place: usize| arguments.tensor(place).map(|t| t.dims.clone());
    let (gradient, input, weight) = match of {
        Gradient::Both => (arguments.tensor(0)?, dims(1)?, dims(2)?),
        Gradient::Old => (arguments.tensor(1)?, dims(0)?, dims(2)?),
        Gradient::Input => {
            let weight = dims(2)?;
            (arguments.tensor(1)?, sizes().or_else(|| around(0)).unwrap_or_default(), weight)
        }
        Gradient::Weight => (arguments.tensor(1)?, dims(2)?, sizes().or_else(|| around(2))?),
    };
    let kernel = sides(&weight);
    let &[first, second] = weight.get(..2)? else { return None };
    let out = with_batch(&gradient.dims, &weight)?;
    let outputs = *out.get(1)?;
    let transposed = match of {
        Gradient::Both => arguments.flag(7).unwrap_or(first != outputs),
        _ => first != outputs,
    };
    let inputs = with_batch(&input, &weight).and_then(|dims| dims.get(1).copied()).unwrap_or(0);
    let fits = if transposed {
        first == inputs
    } else {
        first == outputs && (inputs == 0 || inputs.is_multiple_of(second.max(1)))
    };
    if !fits || second == 0 {
        return None;
    }
    let places_met = if transposed { elements(&input) } else { elements(&out) };
    let each = 2.0 * places_met * second as f64 * elements(kernel);
    let mask = match of {
        Gradient::Input => vec![true, false, false],
        Gradient::Weight => vec![false, true, false],
        Gradient::Both | Gradient::Old => {
            let bias = arguments.is_list(3) && !arguments.numbers(3).unwrap_or_default().is_empty();
            arguments.flags(10).filter(|mask| mask.len() == 3).unwrap_or_else(|| vec![true, true, bias])
        }
    };
    let wanted = |i: usize| mask.get(i).copied().unwrap_or(false);
    let [of_input, of_weight, of_bias] = [wanted(0), wanted(1), wanted(2)];
    let count = f64::from(u8::from(of_input)) + f64::from(u8::from(of_weight));
    let bias_flops = if of_bias { elements(&out) } else { 0.0 };
    // For the input: weights and gradient are read. For the weights: input and gradient.
    let known = !(of_input && input.is_empty());
    let moved = elements(&gradient.dims)
        + count * elements(&input)
        + count * elements(&weight)
        + if of_bias { outputs as f64 } else { 0.0 };
    let bytes = gradient.bytes_per_element().filter(|_| known).map(|size| moved * size as f64);
    let groups = if transposed { 1 } else { inputs.max(second) / second };
    let flops = count * each + bias_flops;
    Some(Amounts { bytes, ..amounts(gradient, inputs, &out, kernel, groups, flops) })
}
