//! Products of matrices.

use super::inputs::{Argument, Arguments};
use super::rules::GemmForm;
use super::{Amounts, DataType, Shape};

pub(super) fn gemm(arguments: &Arguments, form: GemmForm) -> Option<Amounts> {
    let at = |i: usize| arguments.at(i).filter(|t| !t.dims.is_empty());
    let ([batch, m, n, k], a, b, added) = match form {
        GemmForm::Plain => (product(at(0)?, at(1)?)?, at(0)?, at(1)?, None),
        GemmForm::Added => (product(at(1)?, at(2)?)?, at(1)?, at(2)?, at(0)),
        GemmForm::Linear => (linear(at(0)?, at(1)?)?, at(0)?, at(1)?, at(2)),
        GemmForm::Matmul => (matmul(at(0)?, at(1)?)?, at(0)?, at(1)?, None),
        GemmForm::Custom => custom(arguments)?,
    };
    let [fbatch, fm, fn_, fk] = [batch, m, n, k].map(|d| d as f64);
    let out = fbatch * fm * fn_;
    let out_bytes = match a.data_type() {
        // Narrow inputs give 16-bit results as a rule.
        Some(DataType::Fp8 | DataType::Fp4) => Some(2),
        Some(DataType::Int8) => Some(4),
        _ => a.bytes_per_element(),
    };
    let bias = match added {
        Some(bias) => bias.bytes(),
        None => Some(0.0),
    };
    let bytes = || Some(a.bytes()? + b.bytes()? + out * out_bytes? as f64 + bias?);
    Some(Amounts {
        flops: Some(2.0 * out * fk + if added.is_some() { out } else { 0.0 }),
        bytes: bytes(),
        shape: Shape::Gemm { batch, m, n, k },
        data_type: a.data_type(),
        mask_not_known: false,
        untyped_elements: 0.0,
        is_product: true,
    })
}

/// Matrices, or equally many of them.
fn product(a: &Argument, b: &Argument) -> Option<[u64; 4]> {
    match (a.dims.as_slice(), b.dims.as_slice()) {
        (&[m, k], &[k2, n]) if k == k2 => Some([1, m, n, k]),
        (&[batch, m, k], &[batch2, k2, n]) if k == k2 && batch == batch2 => Some([batch, m, n, k]),
        (&[m, k], &[k2]) if k == k2 => Some([1, m, 1, k]),
        (&[k], &[k2]) if k == k2 => Some([1, 1, 1, k]),
        _ => None,
    }
}

fn linear(a: &Argument, b: &Argument) -> Option<[u64; 4]> {
    let (&k, leading) = a.dims.split_last()?;
    match *b.dims.as_slice() {
        [n, k2] if k == k2 => Some([1, leading.iter().product(), n, k]),
        _ => None,
    }
}

fn matmul(a: &Argument, b: &Argument) -> Option<[u64; 4]> {
    let (&k, rows) = a.dims.split_last()?;
    match *b.dims.as_slice() {
        [k2] if k == k2 => return Some([1, rows.iter().product(), 1, k]),
        [k2, n] if k == k2 => return Some([1, rows.iter().product(), n, k]),
        _ => {}
    }
    let (&m, batch_a) = rows.split_last().unwrap_or((&1, &[]));
    let (&n, rest) = b.dims.split_last()?;
    let (&k2, batch_b) = rest.split_last()?;
    if k != k2 {
        return None;
    }
    let places = batch_a.len().max(batch_b.len());
    let from_end = |dims: &[u64], place: usize| dims.len().checked_sub(place).map_or(1, |i| dims[i]);
    let batch = (1..=places).map(|place| from_end(batch_a, place).max(from_end(batch_b, place))).product();
    Some([batch, m, n, k])
}

type Pair<'t> = ([u64; 4], &'t Argument, &'t Argument, Option<&'t Argument>);

fn custom(arguments: &Arguments) -> Option<Pair<'_>> {
    let at = |i: usize| arguments.at(i).filter(|t| !t.dims.is_empty());
    let fits = |a: &Argument, b: &Argument| linear(a, b).or_else(|| matmul(a, b).filter(|_| b.dims.len() == 2));
    if let (Some(out), Some(a), Some(b)) = (at(0), at(1), at(2)) {
        // With the output first, all three fit together. A bias in third place has one dimension.
        if let Some([batch, m, n, k]) = fits(a, b).filter(|_| b.dims.len() == 2)
            && out.dims.last() == Some(&n)
            && out.elements() == (m * n) as f64
        {
            return Some(([batch, m, n, k], a, b, None));
        }
    }
    let (a, b) = (at(0)?, at(1)?);
    let bias = |n: u64| at(2).filter(|t| t.dims == [n]);
    let shape = fits(a, b)?;
    Some((shape, a, b, bias(shape[2])))
}
