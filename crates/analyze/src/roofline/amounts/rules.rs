//! Which operator does what: `rules/operators.toml`, read once.

use std::collections::HashMap;
use std::sync::LazyLock;

use regex::bytes::{Regex, RegexBuilder};
use serde::Deserialize;

/// How much of the work inside an operator is its own: one of a higher rank counts beside those of a lower rank inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Copies and fills, of which any operator may need some.
    Helper,
    /// All that memory limits.
    Usual,
    /// Products, convolutions, attention.
    Main,
}

/// How the amounts of an operator follow from its inputs.
#[derive(Debug, Deserialize)]
#[serde(tag = "form", rename_all = "snake_case")]
pub(super) enum Form {
    Gemm { inputs: GemmForm },
    Conv(ConvPlaces),
    ConvGrad { of: Gradient },
    Attention(AttentionPlaces),
    Elementwise(Elementwise),
    Moves(Moves),
    Pool(PoolPlaces),
    Reduce(Reduce),
    Gather(Gather),
    EmbeddingGrad,
    Scatter(Scatter),
    Rows { values: usize, rows: usize },
    Sort,
    Lists(Moves),
    Cat,
    Glu,
    Gated { flops: f64 },
    FusedNorm(FusedNorm),
    Rotary,
    Store,
    Quantize,
    Nothing,
}

/// How a product of matrices takes its inputs.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum GemmForm {
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

/// Where the values of a convolution stand.
#[derive(Debug, Deserialize)]
pub(super) struct ConvPlaces {
    pub(super) bias: Option<usize>,
    pub(super) stride: usize,
    pub(super) padding: usize,
    pub(super) dilation: Option<usize>,
    pub(super) transposed: Option<usize>,
    #[serde(default)]
    pub(super) always_transposed: bool,
    pub(super) output_padding: Option<usize>,
    pub(super) groups: Option<usize>,
}

/// Which gradients of a convolution an operator computes, and the order of its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Gradient {
    Both,
    Old,
    Input,
    Weight,
}

/// Where queries and the mask stand.
#[derive(Debug, Deserialize)]
pub(super) struct AttentionPlaces {
    pub(super) layout: Layout,
    #[serde(default)]
    pub(super) first: usize,
    #[serde(default)]
    pub(super) backward: bool,
    pub(super) causal: Option<usize>,
    pub(super) mask_type: Option<usize>,
}

/// The order of dimensions of queries, keys and values.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Layout {
    HeadsFirst,
    TokensFirst,
    /// Tokens of all sequences in a row.
    Packed,
}

#[derive(Debug, Deserialize)]
pub(super) struct Elementwise {
    pub(super) tensors: usize,
    #[serde(default)]
    pub(super) flops: f64,
    #[serde(default)]
    pub(super) result: ResultType,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ResultType {
    #[default]
    Same,
    Bool,
    Float,
}

#[derive(Debug, Deserialize)]
pub(super) struct Moves {
    #[serde(default)]
    pub(super) read: Vec<usize>,
    #[serde(default)]
    pub(super) write: Vec<usize>,
    #[serde(default)]
    pub(super) mask: Vec<usize>,
    #[serde(default)]
    pub(super) flops: f64,
    /// The input whose elements are counted.
    #[serde(default)]
    pub(super) of: usize,
    /// The flag that makes a 16-bit result one of 32 bits.
    pub(super) widens: Option<usize>,
}

#[derive(Debug, Deserialize)]
pub(super) struct PoolPlaces {
    pub(super) kernel: Option<usize>,
    #[serde(default)]
    pub(super) stride: usize,
    #[serde(default)]
    pub(super) padding: usize,
    pub(super) dilation: Option<usize>,
    #[serde(default)]
    pub(super) ceil: usize,
    /// Where the sides of the output stand.
    pub(super) output: Option<usize>,
    #[serde(default)]
    pub(super) indices: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct Reduce {
    #[serde(default)]
    pub(super) flops: f64,
    #[serde(default)]
    pub(super) indices: bool,
    #[serde(default = "one")]
    pub(super) results: usize,
    #[serde(default = "one")]
    pub(super) dims: usize,
}

fn one() -> usize {
    1
}

#[derive(Debug, Deserialize)]
pub(super) struct Gather {
    pub(super) from: usize,
    pub(super) index: usize,
    pub(super) by: GatherBy,
    pub(super) dim: Option<usize>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum GatherBy {
    Rows,
    Elements,
    Lists,
}

#[derive(Debug, Deserialize)]
pub(super) struct Scatter {
    pub(super) index: usize,
    pub(super) source: usize,
    #[serde(default)]
    pub(super) adds: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct FusedNorm {
    #[serde(default)]
    pub(super) adds: bool,
    pub(super) flops: f64,
}

#[derive(Deserialize)]
struct Table {
    fewer_operations: String,
    torch: Vec<Torch>,
    other: Vec<Other>,
    range: Vec<Range>,
}

#[derive(Deserialize)]
struct Range {
    name: String,
    category: String,
}

#[derive(Deserialize)]
struct Torch {
    category: String,
    names: Vec<String>,
    #[serde(flatten)]
    form: Form,
}

#[derive(Deserialize)]
struct Other {
    category: String,
    name: String,
    #[serde(flatten)]
    form: Form,
}

struct Compiled {
    rules: Vec<(String, Form)>,
    torch: HashMap<String, usize>,
    other: Vec<(Regex, usize)>,
    ranges: Vec<(Regex, String)>,
    fewer_operations: Regex,
}

/// Patterns are matched byte by byte: they are ASCII, and small tables are made faster.
fn compiled(pattern: &str) -> Regex {
    RegexBuilder::new(pattern).unicode(false).build().expect("the patterns are tested")
}

static TABLE: LazyLock<Compiled> = LazyLock::new(|| {
    let table: Table = toml::from_str(include_str!("../../rules/operators.toml")).expect("part of the program");
    let mut known = Compiled {
        rules: Vec::new(),
        torch: HashMap::new(),
        other: Vec::new(),
        ranges: Vec::new(),
        fewer_operations: compiled(&table.fewer_operations),
    };
    for Torch { category, names, form } in table.torch {
        let place = known.rules.len();
        known.rules.push((category, form));
        known.torch.extend(names.into_iter().map(|name| (name, place)));
    }
    for Other { category, name, form } in table.other {
        known.other.push((compiled(&name), known.rules.len()));
        known.rules.push((category, form));
    }
    let ranges = table.range.into_iter();
    known.ranges = ranges.map(|r| (compiled(&r.name), r.category)).collect();
    known
});

/// What is known of an operator.
pub(super) struct Rule {
    pub(super) category: &'static str,
    pub(super) form: &'static Form,
    pub(super) rank: Rank,
    /// Whether the result takes the place of the first input.
    pub(super) in_place: bool,
}

pub(super) fn find(name: &str) -> Option<Rule> {
    let table = &*TABLE;
    let (place, in_place) = match name.strip_prefix("aten::") {
        Some(short) => match table.torch.get(short) {
            Some(&place) => (place, short.ends_with('_')),
            None => (*table.torch.get(short.strip_suffix('_')?)?, true),
        },
        None => (table.other.iter().find(|(pattern, _)| pattern.is_match(name.as_bytes()))?.1, false),
    };
    let (category, form) = table.rules.get(place)?;
    let rank = match form {
        Form::Gemm { .. } | Form::Conv(_) | Form::ConvGrad { .. } | Form::Attention(_) => Rank::Main,
        Form::Moves(_) | Form::Cat if category == "copy" => Rank::Helper,
        _ => Rank::Usual,
    };
    Some(Rule { category, form, rank, in_place })
}

/// The family of an operator; `None` for those that only arrange tensors, and for unknown ones.
pub(crate) fn category_of_operator(name: &str) -> Option<&'static str> {
    find(name).map(|rule| rule.category)
}

/// Whether a kernel's algorithm needs fewer operations than are counted.
pub(in super::super) fn needs_fewer_operations(kernel: &str) -> bool {
    TABLE.fewer_operations.is_match(kernel.as_bytes())
}

/// What everything inside a range of this name counts as on the host, where a rule says it.
pub(crate) fn category_of_range(name: &str) -> Option<&'static str> {
    let table = &*TABLE;
    table.ranges.iter().find(|(pattern, _)| pattern.is_match(name.as_bytes())).map(|(_, category)| category.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        let text = include_str!("../../rules/operators.toml");
        let table: Table = toml::from_str(text).unwrap();
        let mut names: Vec<&String> = table.torch.iter().flat_map(|entry| &entry.names).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all, "an operator stands in two entries");
        assert_eq!(category_of_operator("aten::mm"), Some("gemm"));
        assert_eq!(category_of_operator("aten::relu_"), Some("activation"));
        assert_eq!(category_of_operator("aten::view"), None);
    }
}
