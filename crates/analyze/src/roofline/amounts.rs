//! What operators have to compute and move, from the dimensions of their inputs.

mod attention;
mod convolution;
mod inputs;
mod memory;
mod names;
mod products;
mod rules;

use serde::{Deserialize, Serialize};

use attention::Ragged;
pub(super) use attention::{Sequences, causal};
use inputs::{Arguments, sizes_in_name};
pub(crate) use names::data_type_of_kernel;
pub use names::of_kernel_name;
pub(super) use names::{element_bytes_of_kernel, rounds_to_tf32};
pub use rules::Rank;
pub(super) use rules::needs_fewer_operations;
use rules::{Form, Gradient, Rule};
pub(crate) use rules::{category_of_operator, category_of_range};

/// What one execution of an operator computes and moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Amounts {
    /// Floating-point operations; a multiply and an add are two. `None` for operators that only move data.
    pub flops: Option<f64>,
    /// Bytes of inputs and outputs, each once; `None` where the types are not known.
    pub bytes: Option<f64>,
    /// The shape.
    pub shape: Shape,
    /// The type of the inputs, where known.
    pub data_type: Option<DataType>,
    /// Whether a causal mask, which halves the work, would not show in the dimensions.
    pub mask_not_known: bool,
    /// Elements read and written of lists of tensors, whose type only the kernel's name tells; 0 for others.
    pub untyped_elements: f64,
    /// Whether it multiplies matrices, as the peaks of types are stated for.
    pub is_product: bool,
}

impl Amounts {
    /// What only moves data, or computes so little that memory limits it.
    fn moved(flops: f64, bytes: Option<f64>, elements: f64, data_type: Option<DataType>) -> Self {
        Self {
            flops: (flops > 0.0).then_some(flops),
            bytes,
            shape: Shape::Elements(elements as u64),
            data_type,
            mask_not_known: false,
            untyped_elements: 0.0,
            is_product: false,
        }
    }
}

/// The shape of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Shape {
    /// Matrices of m x k and k x n are multiplied.
    Gemm {
        /// How many of them.
        batch: u64,
        /// Rows of the result.
        m: u64,
        /// Columns of the result.
        n: u64,
        /// The length summed over.
        k: u64,
    },
    /// Attention.
    Attention {
        /// Sequences; 0 when they have unequal lengths and the lengths below are sums.
        batch: u64,
        /// Heads of the queries.
        heads: u64,
        /// Queries of a sequence.
        queries: u64,
        /// Keys of a sequence.
        keys: u64,
        /// Length of a head.
        head: u64,
    },
    /// A convolution. Dimensions that it does not have are 0.
    Convolution {
        /// Images.
        batch: u64,
        /// Channels of the input.
        inputs: u64,
        /// Channels of the output.
        outputs: u64,
        /// Height, width and so on of the output.
        size: [u64; 3],
        /// The same of the window.
        kernel: [u64; 3],
        /// Groups of channels that do not mix.
        groups: u64,
    },
    /// So many elements, each on its own.
    Elements(u64),
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Shape::Gemm { m: 0, n: 0, k: 0, .. } => Ok(()), // an op whose work is known and has no such shape
            Shape::Gemm { batch: 0 | 1, m, n: 0, k: 0 } => write!(f, "{m}"),
            Shape::Gemm { batch: 0 | 1, m, n, k: 0 } => write!(f, "{m}x{n}"),
            // Keys of attention, which grow from step to step.
            Shape::Gemm { batch: 0 | 1, m, n: 0, k } => write!(f, "{m}x*x{k}"),
            Shape::Gemm { batch: 0 | 1, m, n, k } => write!(f, "{m}x{n}x{k}"),
            Shape::Gemm { batch, m, n, k } => write!(f, "{batch} of {m}x{n}x{k}"),
            Shape::Attention { batch: 0, heads, queries, keys, head } => {
                write!(f, "{queries} queries, {keys} keys in all, {heads} heads of {head}")
            }
            Shape::Attention { batch, heads, queries, keys, head } => {
                write!(f, "{batch} of {queries} queries, {keys} keys, {heads} heads of {head}")
            }
            Shape::Convolution { batch, inputs, outputs, size, kernel, groups } => {
                let sides = |sides: [u64; 3]| {
                    let sides: Vec<String> = sides.iter().filter(|&&n| n > 0).map(u64::to_string).collect();
                    sides.join("x")
                };
                write!(f, "{batch} of {inputs} to {outputs} channels, {}, kernel {}", sides(size), sides(kernel))?;
                if groups > 1 { write!(f, ", {groups} groups") } else { Ok(()) }
            }
            Shape::Elements(elements) => write!(f, "{elements} elements"),
        }
    }
}

/// A type of numbers, as peaks of hardware are stated by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataType {
    /// 64-bit float.
    Fp64,
    /// 32-bit float.
    Fp32,
    /// 32-bit float multiplied with 10 bits of mantissa.
    Tf32,
    /// 16-bit brain float.
    Bf16,
    /// 16-bit float.
    Fp16,
    /// 8-bit float.
    Fp8,
    /// 4-bit float.
    Fp4,
    /// 8-bit integer.
    Int8,
}

impl DataType {
    /// Its name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            DataType::Fp64 => "fp64",
            DataType::Fp32 => "fp32",
            DataType::Tf32 => "tf32",
            DataType::Bf16 => "bf16",
            DataType::Fp16 => "fp16",
            DataType::Fp8 => "fp8",
            DataType::Fp4 => "fp4",
            DataType::Int8 => "int8",
        }
    }
}

/// What a profiler recorded of an operator's inputs, as JSON text; empty where it did not.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inputs<'a> {
    /// The operator, e.g. `aten::mm`. NVTX ranges of PyTorch carry the dimensions in their name.
    pub name: &'a str,
    /// Dimensions, e.g. `[[8, 16], [16, 4]]`.
    pub dims: &'a str,
    /// Types, e.g. `["float", "float"]`.
    pub types: &'a str,
    /// Values of inputs that are no tensors (`Concrete Inputs`), e.g. `["", "[1]", "True"]`.
    pub values: &'a str,
    /// Strides, where one is 0.
    pub strides: &'a str,
    /// Dimensions of the inputs of the operator around it.
    pub around: &'a str,
    /// Dimensions of the first input of an operator behind it that may take its result.
    pub behind: &'a str,
}

/// What an operator does, as far as its inputs tell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Operator {
    /// All is known.
    Known(Amounts, Rank),
    /// Attention over sequences whose lengths stand elsewhere.
    Ragged(Ragged),
    /// It depends on the dimensions of the result, which the inputs do not tell.
    NeedsResult,
}

impl Operator {
    /// How much of the work inside it is its own.
    pub(super) fn rank(&self) -> Rank {
        match self {
            Operator::Known(_, rank) => *rank,
            Operator::Ragged(_) | Operator::NeedsResult => Rank::Main,
        }
    }
}

/// What an operator computes and moves, from the dimensions and types of its inputs as JSON text. `None` where these do
/// not tell.
pub fn of_operator(name: &str, dims: &str, types: &str) -> Option<Amounts> {
    of_inputs(&Inputs { name, dims, types, ..Inputs::default() })
}

/// The same from all that a profiler recorded.
pub fn of_inputs(inputs: &Inputs) -> Option<Amounts> {
    match operator(inputs)? {
        Operator::Known(amounts, _) => Some(amounts),
        Operator::Ragged(_) | Operator::NeedsResult => None,
    }
}

pub(super) fn operator(inputs: &Inputs) -> Option<Operator> {
    let (name, dims) = if inputs.dims.is_empty() { sizes_in_name(inputs.name)? } else { (inputs.name, inputs.dims) };
    let Rule { form, rank, in_place, .. } = rules::find(name)?;
    let arguments = Arguments::read(dims, inputs)?;
    let known = |amounts: Option<Amounts>| amounts.map(|amounts| Operator::Known(amounts, rank));
    match form {
        Form::Gemm { inputs } => known(products::gemm(&arguments, *inputs)),
        Form::Conv(places) => convolution::forward(&arguments, places, rank),
        Form::ConvGrad { of } => known(convolution::gradient(&arguments, *of)),
        Form::Attention(places) => attention::attention(&arguments, places, rank),
        Form::Pool(places) => memory::pool(&arguments, places, rank),
        Form::Nothing => None,
        form => known(memory::amounts(&arguments, form, in_place)),
    }
}

/// Whether operators of this name have inputs that only the operator around them tells.
pub(super) fn wants_around(name: &str) -> bool {
    let form = || rules::find(name).map(|rule| rule.form);
    // Traces may have many names that are no operators.
    name.starts_with("aten::") && matches!(form(), Some(Form::ConvGrad { of: Gradient::Input | Gradient::Weight }))
}
