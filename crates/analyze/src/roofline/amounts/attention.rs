//! Attention.

use std::sync::LazyLock;

use regex::Regex;

use super::inputs::{Argument, Arguments};
use super::rules::{AttentionPlaces, Layout, Rank};
use super::{Amounts, DataType, Operator, Shape};

/// Attention over sequences of unequal lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct Ragged {
    queries: u64,
    heads: u64,
    key_heads: u64,
    head: u64,
    value_head: u64,
    bytes_per_element: Option<u64>,
    data_type: Option<DataType>,
}

/// Which keys a query sees.
#[derive(Clone, Copy, PartialEq)]
enum Mask {
    NotKnown,
    All,
    /// Query `i` sees keys up to `i`.
    Causal,
    /// The last query sees all keys, each before it one less.
    CausalFromEnd,
}

impl Mask {
    fn of(arguments: &Arguments, places: &AttentionPlaces) -> Self {
        let causal = match places.layout {
            Layout::HeadsFirst => Mask::Causal,
            Layout::TokensFirst | Layout::Packed => Mask::CausalFromEnd,
        };
        let flag = places.causal.and_then(|place| arguments.flag(place));
        let number = places.mask_type.and_then(|place| arguments.number(place));
        match (flag, number) {
            (Some(true), _) => causal,
            (Some(false), _) | (None, Some(0)) => Mask::All,
            (None, Some(1)) => Mask::Causal,
            (None, Some(2)) => Mask::CausalFromEnd,
            _ => Mask::NotKnown,
        }
    }

    /// How many pairs of a query and a key are computed.
    fn scores(self, queries: f64, keys: f64) -> f64 {
        let triangle = |side: f64| side * side / 2.0;
        match self {
            Mask::NotKnown | Mask::All => queries * keys,
            Mask::Causal if queries > keys => triangle(keys) + (queries - keys) * keys,
            Mask::Causal => triangle(queries),
            Mask::CausalFromEnd if queries > keys => triangle(keys),
            Mask::CausalFromEnd => queries * keys - triangle(queries),
        }
    }
}

pub(super) fn attention(arguments: &Arguments, places: &AttentionPlaces, rank: Rank) -> Option<Operator> {
    let tensor = |i: usize| arguments.at(places.first + i).filter(|t| !t.dims.is_empty());
    let (q, k, v) = (tensor(0)?, tensor(1)?, tensor(2)?);
    let order = |t: &Argument| match (t.dims.as_slice(), places.layout) {
        (&[batch, heads, tokens, head], Layout::HeadsFirst) => Some([batch, heads, tokens, head]),
        (&[batch, tokens, heads, head], Layout::TokensFirst) => Some([batch, heads, tokens, head]),
        (&[tokens, heads, head], _) => Some([0, heads, tokens, head]),
        _ => None,
    };
    let [batch, heads, queries, head] = order(q)?;
    let ([_, key_heads, keys, _], [_, _, _, value_head]) = (order(k)?, order(v)?);
    // Where sequences start, as 32-bit integers: one entry of the batch holds several sequences then.
    let packed = arguments.list.iter().skip(places.first + 3).any(|t| t.is_starts_of_sequences());
    if batch == 0 || packed {
        if places.backward {
            return None;
        }
        return Some(Operator::Ragged(Ragged {
            queries: queries.saturating_mul(batch.max(1)),
            heads,
            key_heads,
            head,
            value_head,
            bytes_per_element: q.bytes_per_element(),
            data_type: q.data_type(),
        }));
    }
    let mask = Mask::of(arguments, places);
    let groups = batch as f64 * heads as f64;
    let scores = groups * mask.scores(queries as f64, keys as f64);
    let out = groups * queries as f64 * value_head as f64;
    // Forward: scores, and values weighted by them. Backward: scores again, and the gradients of scores, values, queries
    // and keys.
    let per_score = match places.backward {
        false => 2.0 * (head as f64 + value_head as f64),
        true => 6.0 * head as f64 + 4.0 * value_head as f64,
    };
    let bytes = || Some(q.bytes()? + k.bytes()? + v.bytes()? + out * q.bytes_per_element()? as f64);
    let amounts = Amounts {
        flops: Some(scores * per_score),
        // Backward: each of them and its gradient.
        bytes: bytes().map(|bytes| if places.backward { 2.0 * bytes } else { bytes }),
        shape: Shape::Attention { batch, heads, queries, keys, head },
        data_type: q.data_type(),
        mask_not_known: mask == Mask::NotKnown && queries > 1,
        untyped_elements: 0.0,
        is_product: true,
    };
    Some(Operator::Known(amounts, rank))
}

/// Lengths of the sequences of an iteration, summed: of the queries, of the keys, and of their products, for context
/// and generation requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct Sequences {
    context: [f64; 4],
    generation: [f64; 4],
}

static SEQUENCES: LazyLock<Regex> = LazyLock::new(|| {
    let part = r"\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)";
    Regex::new(&format!(r"context_\d+{part}_generation_\d+{part}")).expect("the pattern is part of the program")
});

impl Sequences {
    /// From the long form of vLLM's marker.
    pub(in super::super) fn of_marker(label: &str) -> Option<Self> {
        let found = SEQUENCES.captures(label)?;
        let number = |i: usize| found.get(i)?.as_str().parse().ok();
        let four = |from: usize| Some([number(from)?, number(from + 1)?, number(from + 2)?, number(from + 3)?]);
        Some(Self { context: four(1)?, generation: four(5)? })
    }

    /// What attention over these sequences computes and moves. `None` when the tokens do not match.
    pub(in super::super) fn attention(&self, of: &Ragged) -> Option<Amounts> {
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
            untyped_elements: 0.0,
            is_product: true,
        })
    }
}

static FLASH: LazyLock<Regex> = LazyLock::new(|| {
    // flash_fwd_kernel<Flash_fwd_kernel_traits<...>, Is_dropout, Is_causal, ...>
    Regex::new(r"flash_fwd(?:_splitkv)?_kernel<.*_traits<.*>, ?(?:\(bool\))?(\w+), ?(?:\(bool\))?(\w+)")
        .expect("the pattern is part of the program")
});

/// Whether an attention kernel masks causally, where its name says it.
pub(in super::super) fn causal(kernel: &str) -> Option<bool> {
    let found = FLASH.captures(kernel)?;
    // The split kernel has no dropout: its causal flag comes first.
    let flag = if kernel.contains("flash_fwd_splitkv") { 1 } else { 2 };
    match found.get(flag)?.as_str() {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}
