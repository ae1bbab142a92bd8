//! What operators have to compute and move, from the dimensions of their inputs.

use std::sync::LazyLock;

use regex::Regex;
use serde::{Deserialize, Serialize};

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

/// One tensor that an operator was given.
#[derive(Clone, Debug, Default)]
struct Tensor {
    dims: Vec<u64>,
    bytes_per_element: Option<u64>,
    data_type: Option<DataType>,
}

impl Tensor {
    fn elements(&self) -> f64 {
        self.dims.iter().map(|&d| d as f64).product()
    }

    fn bytes(&self) -> Option<f64> {
        Some(self.elements() * self.bytes_per_element? as f64)
    }
}

/// What an operator does, as far as its inputs tell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Operator {
    /// All is known.
    Known(Amounts),
    /// Attention over sequences whose lengths stand elsewhere.
    Ragged(Ragged),
}

/// Attention over sequences of unequal lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ragged {
    queries: u64,
    heads: u64,
    key_heads: u64,
    head: u64,
    value_head: u64,
    bytes_per_element: Option<u64>,
    data_type: Option<DataType>,
}

/// What an operator computes and moves, from the dimensions and types of its inputs as JSON text. NVTX ranges of
/// PyTorch carry the dimensions in their name. `None` where that does not tell.
pub fn of_operator(name: &str, dims: &str, types: &str) -> Option<Amounts> {
    match operator(name, dims, types)? {
        Operator::Known(amounts) => Some(amounts),
        Operator::Ragged(_) => None,
    }
}

pub(super) fn operator(name: &str, dims: &str, types: &str) -> Option<Operator> {
    let (name, dims) = if dims.is_empty() { sizes_in_name(name)? } else { (name, dims) };
    // The namespace says who wrote an operator, not what it does.
    let short = name.rsplit("::").next().unwrap_or(name);
    let family = Family::of(name, short)?;
    let tensors = tensors(dims, types)?;
    match family {
        Family::Elementwise => elementwise(short, &tensors).map(Operator::Known),
        Family::Attention(layout) => attention(&tensors, layout),
        Family::Gemm(form) => gemm(&tensors, form).map(Operator::Known),
    }
}

/// `aten::mm, seq = 3, op_id = 7, sizes = [[8, 16], [16, 4]]` into name and sizes.
fn sizes_in_name(name: &str) -> Option<(&str, &str)> {
    let (operator, rest) = name.split_once(',')?;
    let list = &rest[rest.find("sizes = [")? + "sizes = ".len()..];
    let mut depth = 0;
    let end = list.find(|c| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        depth == 0
    })?;
    Some((operator.trim(), &list[..=end]))
}

enum Family {
    Gemm(GemmForm),
    Attention(Layout),
    Elementwise,
}

/// How a GEMM takes its inputs.
enum GemmForm {
    /// a, b.
    Plain,
    /// What is added, a, b.
    Added,
    /// a with any number of leading dimensions, b transposed, bias.
    Linear,
    /// As PyTorch's matmul: batches are broadcast.
    Matmul,
    /// By an engine's own kernel: perhaps the output, then a and b in either orientation.
    Custom,
}

/// The order of dimensions of queries, keys and values.
#[derive(Clone, Copy)]
enum Layout {
    HeadsFirst,
    TokensFirst,
    /// Tokens of all sequences in a row.
    Packed,
}

impl Family {
    fn of(name: &str, short: &str) -> Option<Self> {
        let torch = name.starts_with("aten::");
        Some(match short {
            "mm" | "bmm" | "_scaled_mm" | "_int_mm" if torch => Self::Gemm(GemmForm::Plain),
            "addmm" | "baddbmm" | "addmm_" | "baddbmm_" | "_addmm_activation" if torch => Self::Gemm(GemmForm::Added),
            "linear" if torch => Self::Gemm(GemmForm::Linear),
            "matmul" if torch => Self::Gemm(GemmForm::Matmul),
            "_flash_attention_forward" | "_efficient_attention_forward" if torch => {
                Self::Attention(Layout::TokensFirst)
            }
            _ if torch && short.contains("backward") => return None,
            _ if torch && (short.contains("scaled_dot_product") || short == "_cudnn_attention_forward") => {
                Self::Attention(Layout::HeadsFirst)
            }
            _ if torch => return is_elementwise(short).then_some(Self::Elementwise),
            _ if short.contains("bwd") || short.contains("backward") => return None,
            _ if short.contains("varlen") || short.contains("paged") || short.contains("batch_prefill") => {
                Self::Attention(Layout::Packed)
            }
            _ if short.contains("unified_attention") => Self::Attention(Layout::Packed),
            _ if short.contains("flash_attn") && short.contains("forward") => Self::Attention(Layout::TokensFirst),
            // Experts multiply a part of the rows each: the dimensions do not tell how many.
            _ if short.contains("moe") || short.contains("group") => return None,
            _ if short.contains("gemm") || short.contains("scaled_mm") || short == "linear" => {
                Self::Gemm(GemmForm::Custom)
            }
            _ => return None,
        })
    }
}

fn tensors(dims: &str, types: &str) -> Option<Vec<Tensor>> {
    let dims: Vec<serde_json::Value> = serde_json::from_str(dims).ok()?;
    let types: Vec<serde_json::Value> = serde_json::from_str(types).unwrap_or_default();
    let tensor = |(i, dims): (usize, &serde_json::Value)| {
        let dims = dims.as_array().and_then(|list| list.iter().map(serde_json::Value::as_u64).collect());
        let (bytes_per_element, data_type) = types.get(i).and_then(|t| t.as_str()).map_or((None, None), type_of);
        Tensor { dims: dims.unwrap_or_default(), bytes_per_element, data_type }
    };
    Some(dims.iter().enumerate().map(tensor).collect())
}

fn type_of(name: &str) -> (Option<u64>, Option<DataType>) {
    let name = name.rsplit("::").next().unwrap_or(name);
    match name {
        "double" | "Double" => (Some(8), Some(DataType::Fp64)),
        "float" | "Float" => (Some(4), Some(DataType::Fp32)),
        "BFloat16" => (Some(2), Some(DataType::Bf16)),
        "Half" => (Some(2), Some(DataType::Fp16)),
        "signed char" => (Some(1), Some(DataType::Int8)),
        "unsigned char" | "bool" => (Some(1), None),
        "short" | "short int" => (Some(2), None),
        "int" => (Some(4), None),
        "long" | "long int" => (Some(8), None),
        _ if name.starts_with("Float8") => (Some(1), Some(DataType::Fp8)),
        _ => (None, None),
    }
}

fn gemm(tensors: &[Tensor], form: GemmForm) -> Option<Amounts> {
    let at = |i: usize| tensors.get(i).filter(|t| !t.dims.is_empty());
    let ([batch, m, n, k], a, b, added) = match form {
        GemmForm::Plain => (product(at(0)?, at(1)?)?, at(0)?, at(1)?, None),
        GemmForm::Added => (product(at(1)?, at(2)?)?, at(1)?, at(2)?, at(0)),
        GemmForm::Linear => (linear(at(0)?, at(1)?)?, at(0)?, at(1)?, at(2)),
        GemmForm::Matmul => (matmul(at(0)?, at(1)?)?, at(0)?, at(1)?, None),
        GemmForm::Custom => custom(tensors)?,
    };
    let [fbatch, fm, fn_, fk] = [batch, m, n, k].map(|d| d as f64);
    let out = fbatch * fm * fn_;
    let out_bytes = match a.data_type {
        // Narrow inputs give 16-bit results as a rule.
        Some(DataType::Fp8 | DataType::Fp4) => Some(2),
        Some(DataType::Int8) => Some(4),
        _ => a.bytes_per_element,
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
        data_type: a.data_type,
        mask_not_known: false,
    })
}

/// Matrices, or equally many of them.
fn product(a: &Tensor, b: &Tensor) -> Option<[u64; 4]> {
    match (a.dims.as_slice(), b.dims.as_slice()) {
        (&[m, k], &[k2, n]) if k == k2 => Some([1, m, n, k]),
        (&[batch, m, k], &[batch2, k2, n]) if k == k2 && batch == batch2 => Some([batch, m, n, k]),
        _ => None,
    }
}

fn linear(a: &Tensor, b: &Tensor) -> Option<[u64; 4]> {
    let (&k, leading) = a.dims.split_last()?;
    match *b.dims.as_slice() {
        [n, k2] if k == k2 => Some([1, leading.iter().product(), n, k]),
        _ => None,
    }
}

fn matmul(a: &Tensor, b: &Tensor) -> Option<[u64; 4]> {
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

type Inputs<'t> = ([u64; 4], &'t Tensor, &'t Tensor, Option<&'t Tensor>);

fn custom(tensors: &[Tensor]) -> Option<Inputs<'_>> {
    let at = |i: usize| tensors.get(i).filter(|t| !t.dims.is_empty());
    let fits = |a: &Tensor, b: &Tensor| linear(a, b).or_else(|| matmul(a, b).filter(|_| b.dims.len() == 2));
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

fn attention(tensors: &[Tensor], layout: Layout) -> Option<Operator> {
    let [q, k, v] = [0, 1, 2].map(|i| tensors.get(i).filter(|t| !t.dims.is_empty()));
    let (q, k, v) = (q?, k?, v?);
    let order = |t: &Tensor| match (t.dims.as_slice(), layout) {
        (&[batch, heads, tokens, head], Layout::HeadsFirst) => Some([batch, heads, tokens, head]),
        (&[batch, tokens, heads, head], Layout::TokensFirst) => Some([batch, heads, tokens, head]),
        (&[tokens, heads, head], _) => Some([0, heads, tokens, head]),
        _ => None,
    };
    let [batch, heads, queries, head] = order(q)?;
    let ([_, key_heads, keys, _], [_, _, _, value_head]) = (order(k)?, order(v)?);
    if batch == 0 {
        let bytes_per_element = q.bytes_per_element;
        let data_type = q.data_type;
        return Some(Operator::Ragged(Ragged {
            queries,
            heads,
            key_heads,
            head,
            value_head,
            bytes_per_element,
            data_type,
        }));
    }
    let scores = [batch, heads, queries, keys].iter().map(|&d| d as f64).product::<f64>();
    let out = [batch, heads, queries, value_head].iter().map(|&d| d as f64).product::<f64>();
    let bytes = || Some(q.bytes()? + k.bytes()? + v.bytes()? + out * q.bytes_per_element? as f64);
    Some(Operator::Known(Amounts {
        flops: Some(2.0 * scores * (head + value_head) as f64),
        bytes: bytes(),
        shape: Shape::Attention { batch, heads, queries, keys, head },
        data_type: q.data_type,
        mask_not_known: queries > 1,
    }))
}

/// Lengths of the sequences of an iteration, summed: of the queries, of the keys, and of their products, for context
/// and generation requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sequences {
    context: [f64; 4],
    generation: [f64; 4],
}

static SEQUENCES: LazyLock<Regex> = LazyLock::new(|| {
    let part = r"\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)";
    Regex::new(&format!(r"context_\d+{part}_generation_\d+{part}")).expect("the pattern is part of the program")
});

impl Sequences {
    /// From the long form of vLLM's marker.
    pub(super) fn of_marker(label: &str) -> Option<Self> {
        let found = SEQUENCES.captures(label)?;
        let number = |i: usize| found.get(i)?.as_str().parse().ok();
        let four = |from: usize| Some([number(from)?, number(from + 1)?, number(from + 2)?, number(from + 3)?]);
        Some(Self { context: four(1)?, generation: four(5)? })
    }

    /// What attention over these sequences computes and moves. `None` when the tokens do not match.
    pub(super) fn attention(&self, of: &Ragged) -> Option<Amounts> {
        let [queries, keys, _, _] = [0, 1, 2, 3].map(|i| self.context[i] + self.generation[i]);
        if queries != of.queries as f64 {
            return None;
        }
        // Prompts are attended to causally: of the square of a prompt's own tokens only half is computed.
        let scores = self.context[3] - self.context[2] / 2.0 + self.generation[3];
        let head = (of.head + of.value_head) as f64;
        let moved = queries * of.heads as f64 * head + keys * of.key_heads as f64 * head;
        Some(Amounts {
            flops: Some(2.0 * scores * of.heads as f64 * head),
            bytes: of.bytes_per_element.map(|size| moved * size as f64),
            shape: Shape::Attention {
                batch: 0,
                heads: of.heads,
                queries: of.queries,
                keys: keys as u64,
                head: of.head,
            },
            data_type: of.data_type,
            mask_not_known: false,
        })
    }
}

/// Operators of PyTorch that read every element of their inputs and write every element of the result.
fn is_elementwise(short: &str) -> bool {
    const NAMES: [&str; 26] = [
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "abs",
        "exp",
        "log",
        "sin",
        "cos",
        "sqrt",
        "rsqrt",
        "pow",
        "tanh",
        "sigmoid",
        "relu",
        "silu",
        "gelu",
        "square",
        "reciprocal",
        "clamp",
        "bitwise_not",
        "copy",
        "clamp_min",
        "clamp_max",
        "erf",
    ];
    NAMES.contains(&short.strip_suffix('_').unwrap_or(short))
}

fn elementwise(short: &str, tensors: &[Tensor]) -> Option<Amounts> {
    let inputs: Vec<&Tensor> = tensors.iter().filter(|t| !t.dims.is_empty()).collect();
    let first = *inputs.first()?;
    let bytes = || {
        let read: Option<f64> = inputs.iter().map(|t| t.bytes()).sum();
        match short {
            "copy_" => read, // the first is what is written
            _ => {
                let largest = inputs.iter().map(|t| t.elements()).fold(0.0, f64::max);
                let size = inputs.iter().map(|t| t.bytes_per_element).max()??;
                Some(read? + largest * size as f64)
            }
        }
    };
    let elements = inputs.iter().map(|t| t.elements()).fold(0.0, f64::max);
    Some(Amounts {
        flops: None,
        bytes: Some(bytes()?),
        shape: Shape::Elements(elements as u64),
        data_type: first.data_type,
        mask_not_known: false,
    })
}

static DIMS_IN_NAME: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?:^|[^A-Za-z])M[=_]?(\d+)[_x, ]+N[=_]?(\d+)[_x, ]+K[=_]?(\d+)(?:[^0-9]|$)").expect("as above")
});

/// The largest side of a tile. Names give tiles far more often than dimensions, and a GEMM that fits a tile is no GEMM.
const LARGEST_TILE: u64 = 512;

/// What a GEMM computes, where its name carries m, n and k, e.g. `gemm_M32_N4096_K4096`. Tiles are not dimensions.
pub fn of_kernel_name(name: &str) -> Option<Amounts> {
    let found = DIMS_IN_NAME.captures(name)?;
    let before = &name[..found.get(1)?.start()];
    let tile = ["BLOCK", "TILE", "Tile", "SIZE"].iter().any(|word| before.contains(word));
    let number = |i: usize| found.get(i)?.as_str().parse::<u64>().ok();
    let (m, n, k) = (number(1)?, number(2)?, number(3)?);
    if tile || m.max(n).max(k) <= LARGEST_TILE {
        return None;
    }
    let data_type = data_type_of_kernel(name);
    let size = match data_type? {
        DataType::Fp64 => 8.0,
        DataType::Fp32 | DataType::Tf32 => 4.0,
        DataType::Bf16 | DataType::Fp16 => 2.0,
        DataType::Fp8 | DataType::Fp4 | DataType::Int8 => 0.0,
    };
    let [fm, fn_, fk] = [m, n, k].map(|d| d as f64);
    Some(Amounts {
        flops: Some(2.0 * fm * fn_ * fk),
        bytes: (size > 0.0).then_some((fm * fk + fk * fn_ + fm * fn_) * size),
        shape: Shape::Gemm { batch: 1, m, n, k },
        data_type,
        mask_not_known: false,
    })
}

/// The type of the inputs of a GEMM or attention kernel, where its name says it.
pub(crate) fn data_type_of_kernel(name: &str) -> Option<DataType> {
    const WORDS: [(&str, DataType); 15] = [
        // Products of strobe on a CPU; weights of 4 bits are multiplied as 8-bit integers.
        ("gemm_packed_int8", DataType::Int8),
        ("gemm_packed_int4", DataType::Int8),
        ("e4m3", DataType::Fp8),
        ("e5m2", DataType::Fp8),
        ("fp8", DataType::Fp8),
        ("tf32", DataType::Tf32),
        ("bf16", DataType::Bf16),
        ("bfloat16", DataType::Bf16),
        ("BFloat16", DataType::Bf16),
        ("fp16", DataType::Fp16),
        ("f16", DataType::Fp16),
        ("half", DataType::Fp16),
        ("i8", DataType::Int8),
        ("sgemm", DataType::Fp32),
        ("f32f32_f32", DataType::Fp32),
    ];
    let data_type = |name: &str| WORDS.iter().find(|(word, _)| name.contains(word)).map(|&(_, data_type)| data_type);
    // On this tier of strobe, named after what it adds, packed products and fused attention multiply bfloat16; others only
    // store it.
    match name.strip_suffix("_avx512bf16") {
        None => data_type(name),
        Some(stem) => {
            let multiplies = ["gemm_packed", "paged_attention"].iter().any(|kernel| stem.contains(kernel));
            data_type(stem).filter(|found| *found != DataType::Bf16 || multiplies)
        }
    }
}

/// Whether a kernel for fp32 inputs multiplies them on tensor cores as tf32. CUTLASS names the instruction, 16x8x8.
pub(super) fn rounds_to_tf32(kernel: &str) -> bool {
    ["tf32", "tensorop_s1688"].iter().any(|word| kernel.contains(word))
}

static FLASH: LazyLock<Regex> = LazyLock::new(|| {
    // flash_fwd_kernel<Flash_fwd_kernel_traits<...>, Is_dropout, Is_causal, ...>
    Regex::new(r"flash_fwd(?:_splitkv)?_kernel<.*_traits<.*>, ?(?:\(bool\))?(\w+), ?(?:\(bool\))?(\w+)")
        .expect("as above")
});

/// Whether an attention kernel masks causally, where its name says it.
pub(super) fn causal(kernel: &str) -> Option<bool> {
    let found = FLASH.captures(kernel)?;
    // The split kernel has no dropout: its causal flag comes first.
    let flag = if kernel.contains("flash_fwd_splitkv") { 1 } else { 2 };
    match found.get(flag)?.as_str() {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}
