//! What memory limits: element by element, norms, softmax, pooling, reductions, copies, gathers, losses, optimizers.

use super::inputs::{Argument, Arguments, Class, Element, elements};
use super::rules::{
    Elementwise, Form, FusedNorm, Gather, GatherBy, Moves, PoolPlaces, Rank, Reduce, ResultType, Scatter,
};
use super::{Amounts, Operator};

/// Bytes of an index.
const INDEX: f64 = 8.0;

pub(super) fn amounts(arguments: &Arguments, form: &Form, in_place: bool) -> Option<Amounts> {
    match form {
        Form::Elementwise(rule) => elementwise(arguments, rule, in_place),
        Form::Moves(rule) => moves(arguments, rule),
        Form::Reduce(rule) => reduce(arguments, rule),
        Form::Gather(rule) => gather(arguments, rule),
        Form::Scatter(rule) => scatter(arguments, rule),
        Form::Lists(rule) => lists(arguments, rule),
        Form::EmbeddingGrad => embedding_gradient(arguments),
        Form::Rows { values, rows } => rows_of(arguments, *values, *rows),
        Form::Sort => sort(arguments),
        Form::Cat => {
            let elements = arguments.at(0)?.listed();
            (elements > 0.0).then(|| untyped(0.0, 2.0 * elements, elements))
        }
        Form::Glu => {
            let input = arguments.tensor(0)?;
            Some(of(input, 1.5 * input.elements(), 3.0 * input.elements() / 2.0))
        }
        Form::Gated { flops } => gated(arguments, *flops),
        Form::FusedNorm(rule) => fused_norm(arguments, rule),
        Form::Rotary => rotary(arguments),
        Form::Store => store(arguments),
        Form::Quantize => quantize(arguments),
        Form::Gemm { .. }
        | Form::Conv(_)
        | Form::ConvGrad { .. }
        | Form::Attention(_)
        | Form::Pool(_)
        | Form::Nothing => None,
    }
}

/// So many elements of the type of `tensor` are moved.
fn of(tensor: &Argument, moved: f64, flops: f64) -> Amounts {
    let bytes = tensor.bytes_per_element().map(|size| moved * size as f64);
    Amounts::moved(flops, bytes, tensor.elements(), tensor.data_type())
}

/// Lists of tensors are recorded without their type.
fn untyped(flops: f64, moved: f64, elements: f64) -> Amounts {
    Amounts { untyped_elements: moved, ..Amounts::moved(flops, None, elements, None) }
}

/// The common shape of tensors that are broadcast against each other.
fn broadcast<'a>(tensors: impl Iterator<Item = &'a Argument>) -> Option<Vec<u64>> {
    let mut result: Vec<u64> = Vec::new();
    for tensor in tensors {
        if tensor.dims.len() > result.len() {
            let missing = tensor.dims.len() - result.len();
            result.splice(0..0, std::iter::repeat_n(1, missing));
        }
        for (out, &side) in result.iter_mut().rev().zip(tensor.dims.iter().rev()) {
            match (*out, side) {
                (1, side) => *out = side,
                (_, 1) => {}
                (a, b) if a == b => {}
                _ => return None,
            }
        }
    }
    Some(result)
}

fn elementwise(arguments: &Arguments, rule: &Elementwise, in_place: bool) -> Option<Amounts> {
    let inputs = || arguments.list.iter().take(rule.tensors).filter(|input| input.is_tensor());
    // where(condition) alone asks for places, whose number is not recorded.
    if inputs().next().is_none() || arguments.list.len() < rule.tensors.min(2) {
        return None;
    }
    let first = arguments.tensor(0);
    let promoted = arguments.result_type(0..rule.tensors);
    let (dims, result) = match first.filter(|_| in_place) {
        Some(target) => (target.dims.clone(), target.element),
        None => {
            let result = match rule.result {
                ResultType::Same => promoted,
                ResultType::Float => promoted.map(Element::as_float),
                ResultType::Bool => Some(Element { bytes: 1, class: Class::Bool, data_type: None }),
            };
            (broadcast(inputs())?, result)
        }
    };
    let written = elements(&dims);
    let read: Option<f64> = inputs().map(Argument::bytes).sum();
    let bytes = read.zip(result).map(|(read, result)| read + written * result.bytes as f64);
    Some(Amounts::moved(rule.flops * written, bytes, written, promoted.and_then(|element| element.data_type)))
}

fn moves(arguments: &Arguments, rule: &Moves) -> Option<Amounts> {
    let counted = arguments.tensor(rule.of)?;
    let widened = rule.widens.is_some_and(|flag| arguments.flag(flag) == Some(true));
    let of = |places: &[usize], bytes: &dyn Fn(&Argument) -> Option<f64>| -> Option<f64> {
        places.iter().filter_map(|&place| arguments.tensor(place)).map(bytes).sum()
    };
    let written = |tensor: &Argument| if widened { Some(tensor.elements() * 4.0) } else { tensor.written() };
    let masks = of(&rule.mask, &|tensor| Some(tensor.elements()))?;
    let bytes =
        of(&rule.read, &Argument::bytes).zip(of(&rule.write, &written)).map(|(read, write)| read + write + masks);
    let elements = counted.elements();
    Some(Amounts::moved(rule.flops * elements, bytes, elements, counted.data_type()))
}

pub(super) fn pool(arguments: &Arguments, places: &PoolPlaces, rank: Rank) -> Option<Operator> {
    let input = arguments.tensor(0).filter(|t| t.dims.len() > 2)?;
    let kernel = places.kernel.and_then(|place| arguments.numbers(place)).filter(|kernel| !kernel.is_empty());
    let sides = places.output.and_then(|place| arguments.numbers(place)).filter(|sides| !sides.is_empty());
    let ndim = sides.as_ref().or(kernel.as_ref()).map(Vec::len);
    let sized = match (&sides, &kernel) {
        (Some(sides), _) => sides.iter().map(|&side| u64::try_from(side).ok()).collect(),
        (None, Some(kernel)) => pooled_sides(arguments, places, input, kernel),
        _ => None,
    };
    let dims = match sized.zip(ndim).and_then(|(sides, n)| Some((sides, input.dims.len().checked_sub(n)?))) {
        Some((sides, lead)) => [input.dims.get(..lead)?, sides.as_slice()].concat(),
        None => {
            // What comes behind has the same images and channels.
            let seen = arguments
                .behind
                .as_ref()
                .filter(|seen| seen.len() == input.dims.len() && seen.get(..2) == input.dims.get(..2));
            let Some(seen) = seen else { return Some(Operator::NeedsResult) };
            seen.clone()
        }
    };
    let out = elements(&dims);
    // Every element of the input goes into some output; windows that overlap read it again, from a cache.
    let window = kernel.map(|kernel| kernel.iter().map(|&n| n as f64).product::<f64>());
    let flops = window.map_or(input.elements().max(out), |window| window * out);
    let moved = |size: f64| input.elements() * size + out * (size + if places.indices { INDEX } else { 0.0 });
    let bytes = input.bytes_per_element().map(|size| moved(size as f64));
    Some(Operator::Known(Amounts::moved(flops, bytes, input.elements(), input.data_type()), rank))
}

fn pooled_sides(arguments: &Arguments, places: &PoolPlaces, input: &Argument, kernel: &[i64]) -> Option<Vec<u64>> {
    let at = |list: &[i64], i: usize| list.get(i).or(list.first()).map(|&n| i128::from(n));
    let stride = arguments.numbers(places.stride).filter(|stride| !stride.is_empty());
    let stride = stride.unwrap_or_else(|| kernel.to_vec());
    let padding = arguments.numbers(places.padding).unwrap_or_else(|| vec![0]);
    let dilation = places.dilation.and_then(|place| arguments.numbers(place)).unwrap_or_else(|| vec![1]);
    let ceil = arguments.flag(places.ceil).unwrap_or(false);
    let lead = input.dims.len().checked_sub(kernel.len())?;
    let sides = input.dims.get(lead..)?.iter().enumerate().map(|(i, &side)| {
        let (stride, padding) = (at(&stride, i)?, at(&padding, i)?);
        if stride < 1 || padding < 0 {
            return None;
        }
        let reach = at(&dilation, i)?.checked_mul(at(kernel, i)? - 1)?;
        let room = i128::from(side) + 2 * padding - reach - 1;
        let mut steps = room.checked_div(stride)?;
        // A window that begins inside the input or its padding on the left counts, one that begins behind does not.
        if ceil && room.checked_rem(stride)? > 0 && (steps + 1).checked_mul(stride)? < i128::from(side) + padding {
            steps += 1;
        }
        u64::try_from(steps.checked_add(1)?).ok().filter(|&side| side > 0)
    });
    sides.collect()
}

fn reduce(arguments: &Arguments, rule: &Reduce) -> Option<Amounts> {
    let input = arguments.tensor(0)?;
    if arguments.tensor(1).is_some_and(|other| !other.dims.is_empty()) {
        // max(a, b) is the greater of each pair.
        let pairs = Elementwise { tensors: 2, flops: 1.0, result: ResultType::Same };
        return elementwise(arguments, &pairs, false);
    }
    let whole = arguments.list.len() <= rule.dims
        || (!arguments.is_list(rule.dims) && arguments.list.len() == 2 && !rule.indices)
        || arguments.numbers(rule.dims).is_some_and(|dims| dims.is_empty());
    let out = match arguments.numbers(rule.dims) {
        _ if whole => Some(1.0),
        Some(dims) => {
            let rank = input.dims.len() as i64;
            let reduced: Vec<i64> = dims.iter().map(|&dim| if dim < 0 { dim + rank } else { dim }).collect();
            let left = input.dims.iter().enumerate().filter(|(i, _)| !reduced.contains(&(*i as i64)));
            Some(left.map(|(_, &side)| side as f64).product::<f64>())
        }
        // Which dimensions is not recorded: the result is small as a rule.
        None => None,
    };
    let size = input.element.map(|element| match element.class {
        Class::Bool | Class::Int if !rule.indices => INDEX,
        _ => element.bytes as f64,
    });
    let indices = if rule.indices && (rule.results == 0 || !whole) { INDEX } else { 0.0 };
    let results = rule.results as f64;
    let written = size.map(|size| out.unwrap_or(0.0) * (size * results + indices));
    let bytes = input.bytes().zip(written).map(|(read, written)| read + written);
    Some(Amounts::moved(rule.flops * input.elements(), bytes, input.elements(), input.data_type()))
}

fn sort(arguments: &Arguments) -> Option<Amounts> {
    let input = arguments.tensor(0)?;
    let size = input.bytes_per_element().map(|size| size as f64);
    // topk(input, k, dim, ...); sort(input, dim, descending) keeps all.
    let chosen = match (arguments.list.len() > 3, arguments.number(1)) {
        (true, Some(k)) => {
            let dim = arguments.number(2).unwrap_or(-1);
            let dim = if dim < 0 { dim + input.dims.len() as i64 } else { dim };
            let side = usize::try_from(dim).ok().and_then(|dim| input.dims.get(dim)).copied().unwrap_or(1);
            input.elements() / side.max(1) as f64 * k.max(0) as f64
        }
        (true, None) => return None,
        _ => input.elements(),
    };
    let bytes = input.bytes().zip(size).map(|(read, size)| read + chosen * (size + INDEX));
    Some(Amounts::moved(0.0, bytes, input.elements(), input.data_type()))
}

fn gather(arguments: &Arguments, rule: &Gather) -> Option<Amounts> {
    let from = arguments.tensor(rule.from)?;
    let index = arguments.at(rule.index)?;
    let read = index.bytes().unwrap_or(index.elements() * INDEX);
    let (chosen, index_bytes) = match rule.by {
        GatherBy::Elements => (index.elements(), read),
        GatherBy::Rows => {
            let dim = match rule.dim {
                None => 0,
                Some(place) => usize::try_from(arguments.number(place)?).ok()?,
            };
            let side = *from.dims.get(dim).filter(|&&side| side > 0)?;
            (from.elements() / side as f64 * index.elements(), read)
        }
        GatherBy::Lists => {
            // A mask as large as the tensor chooses as many as it says, which is not recorded.
            if index.list.is_empty() || index.list.contains(&from.dims) {
                return None;
            }
            let given = || index.list.iter().filter(|dims| !dims.is_empty());
            let places: Option<f64> = given().map(|dims| elements(dims)).max_by(f64::total_cmp);
            let indexed: f64 = index
                .list
                .iter()
                .zip(&from.dims)
                .filter(|(dims, _)| !dims.is_empty())
                .map(|(_, &d)| d as f64)
                .product();
            let places = places.filter(|_| indexed > 0.0)?;
            (from.elements() / indexed * places, INDEX * given().map(|dims| elements(dims)).sum::<f64>())
        }
    };
    let size = from.bytes_per_element().map(|size| size as f64);
    // What is chosen twice is read once at best: no more than there is.
    let bytes = size.map(|size| (chosen.min(from.elements()) + chosen) * size + index_bytes);
    Some(Amounts::moved(0.0, bytes, chosen, from.data_type()))
}

fn index_bytes(index: &Argument) -> f64 {
    index.bytes_per_element().map_or(INDEX, |size| size as f64)
}

fn scatter(arguments: &Arguments, rule: &Scatter) -> Option<Amounts> {
    let target = arguments.tensor(0)?;
    let index = arguments.at(rule.index)?;
    let indices = index.elements().max(index.listed());
    let source = arguments.tensor(rule.source);
    // A number instead of a tensor is written to each place.
    let put = source.map_or(index.elements(), Argument::elements);
    let adds = rule.adds || arguments.flag(rule.source + 1) == Some(true);
    let moved = put + if adds { put } else { 0.0 } + if source.is_some() { put } else { 0.0 };
    let size = target.bytes_per_element().map(|size| size as f64);
    let bytes = size.map(|size| moved * size + indices * index_bytes(index));
    Some(Amounts::moved(if adds { put } else { 0.0 }, bytes, put, target.data_type()))
}

fn embedding_gradient(arguments: &Arguments) -> Option<Amounts> {
    let (gradient, index) = (arguments.tensor(0)?, arguments.tensor(1)?);
    let rows = arguments.number(2).and_then(|rows| u64::try_from(rows).ok());
    let width = gradient.dims.last().copied().unwrap_or(1) as f64;
    // Every row is written, those without a gradient as zeros.
    let size = gradient.bytes_per_element().map(|size| size as f64);
    let read = gradient.bytes().zip(index.bytes()).map(|(gradient, index)| gradient + index);
    let bytes = read.zip(size).zip(rows).map(|((read, size), rows)| read + rows as f64 * width * size);
    Some(Amounts::moved(gradient.elements(), bytes, gradient.elements(), gradient.data_type()))
}

/// One element of each row is chosen by an index.
fn rows_of(arguments: &Arguments, values: usize, rows: usize) -> Option<Amounts> {
    let (values, rows) = (arguments.tensor(values)?, arguments.tensor(rows)?);
    let chosen = rows.elements();
    let size = values.bytes_per_element().map(|size| size as f64);
    Some(Amounts::moved(chosen, size.map(|size| chosen * (size + INDEX)), chosen, values.data_type()))
}

fn lists(arguments: &Arguments, rule: &Moves) -> Option<Amounts> {
    let listed = |places: &[usize]| -> f64 {
        places.iter().filter_map(|&place| arguments.at(place)).map(Argument::listed).sum()
    };
    let elements = arguments.at(rule.of)?.listed();
    (elements > 0.0).then(|| untyped(rule.flops * elements, listed(&rule.read) + listed(&rule.write), elements))
}

/// Gates and values beside each other; the result may be given first.
fn gated(arguments: &Arguments, flops: f64) -> Option<Amounts> {
    let mut tensors = arguments.tensors();
    let first = tensors.next()?;
    let (input, out) = match tensors.next() {
        Some(input) if 2.0 * first.elements() == input.elements() => (input, first.elements()),
        Some(_) => return None,
        None => (first, first.elements() / 2.0),
    };
    Some(of(input, input.elements() + out, flops * out))
}

/// Norms of engines: the result may be given or not, a sum with a residual may come first.
fn fused_norm(arguments: &Arguments, rule: &FusedNorm) -> Option<Amounts> {
    let input = arguments.tensors().max_by(|a, b| a.elements().total_cmp(&b.elements()))?;
    let elements = input.elements();
    let full = arguments.tensors().filter(|t| t.elements() == elements).count();
    let others: Option<f64> = arguments.tensors().filter(|t| t.elements() < elements).map(Argument::bytes).sum();
    // Input and residual are read, result and sum are written, into the same places where no others are given.
    let moved = match (rule.adds, full) {
        (true, 2..=4) => 4.0,
        (false, 1..=2) => 2.0,
        _ => return None,
    };
    let size = input.bytes_per_element().map(|size| size as f64);
    let bytes = others.zip(size).map(|(others, size)| others + moved * elements * size);
    Some(Amounts::moved(rule.flops * elements, bytes, elements, input.data_type()))
}

/// Queries and keys are turned where they are, by a table that has a row per position.
fn rotary(arguments: &Arguments) -> Option<Amounts> {
    let positions = arguments.tensors().next().filter(|t| t.element.is_some_and(|e| e.class == Class::Int))?;
    let tokens = positions.elements();
    let turned = || arguments.tensors().skip(1).take(2).filter(|t| t.dims.first().is_some_and(|&d| d as f64 == tokens));
    let table = arguments.tensors().skip(1).filter(|t| t.dims.len() == 2).last()?;
    let elements: f64 = turned().map(Argument::elements).sum();
    let moved: Option<f64> = turned().map(|t| Some(2.0 * t.bytes()?)).sum();
    let (&[rows, width], true) = (table.dims.as_slice(), elements > 0.0) else { return None };
    let looked_up = (rows as f64).min(tokens) * width as f64;
    let bytes = || Some(moved? + positions.bytes()? + looked_up * table.bytes_per_element()? as f64);
    let data_type = arguments.tensors().nth(1).and_then(Argument::data_type);
    Some(Amounts::moved(3.0 * elements, bytes(), elements, data_type))
}

/// Keys and values of new tokens go into a cache.
fn store(arguments: &Arguments) -> Option<Amounts> {
    let mut tensors = arguments.tensors();
    let (keys, values, cache) = (tensors.next()?, tensors.next()?, tensors.next()?);
    if cache.elements() < keys.elements() {
        return None;
    }
    let slots = arguments.tensors().filter(|t| t.dims.len() == 1 && t.element.is_some_and(|e| e.class == Class::Int));
    let slots: Option<f64> = slots.take(1).map(Argument::bytes).sum();
    let elements = keys.elements() + values.elements();
    let bytes = || Some(keys.bytes()? + values.bytes()? + elements * cache.bytes_per_element()? as f64 + slots?);
    Some(Amounts::moved(0.0, bytes(), elements, keys.data_type()))
}

/// Each tensor once, where input and result are both given: as many elements, in fewer bytes.
fn quantize(arguments: &Arguments) -> Option<Amounts> {
    let narrow = |t: &&Argument| t.bytes_per_element() == Some(1);
    let result = arguments.tensors().find(narrow)?;
    let input = arguments.tensors().find(|t| !narrow(t) && t.elements() == result.elements())?;
    let bytes: Option<f64> = arguments.tensors().map(Argument::bytes).sum();
    Some(Amounts::moved(2.0 * input.elements(), bytes, input.elements(), input.data_type()))
}
