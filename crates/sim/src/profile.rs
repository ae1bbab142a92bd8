//! Iteration times from operator tables as LLMServingSim publishes them.
//!
//! `layers * (attention + the layer's dense ops) + embedding + final norm + head + sampler`, each read off a table and
//! interpolated linearly; on several ranks two ring all-reduces per layer. The mean context stands for the contexts of all
//! generating requests, without a correction for their skew.

use std::collections::BTreeMap;
use std::path::Path;

use crate::cost::StepLoad;
use crate::error::SimError;
use crate::units::parse_duration_ns;

/// Times by one number.
pub(crate) type Table = BTreeMap<u64, f64>;
/// Attention by prompt tokens, their cached tokens, generating requests and their mean context.
type Attention = BTreeMap<u64, BTreeMap<u64, BTreeMap<u64, Table>>>;

/// Dense ops that every layer runs once; the norm runs twice.
const LAYER_OPS: [&str; 8] =
    ["qkv_proj", "qk_norm", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj", "layernorm"];

/// Operator tables of one model on one device.
#[derive(Clone, Debug)]
pub struct OperatorTables {
    dense: BTreeMap<String, Table>,
    per_sequence: BTreeMap<String, Table>,
    attention: Attention,
    layers: f64,
    ranks: f64,
    /// Bytes of one token's activations.
    hidden_bytes: f64,
    link_latency_us: f64,
    link_bytes_per_us: f64,
}

fn bad(problem: String) -> SimError {
    SimError::Option { option: "--cost", problem }
}

fn rows(dir: &Path, name: &str, columns: usize) -> Result<Vec<(String, Vec<f64>)>, SimError> {
    let path = dir.join(name);
    let text = std::fs::read_to_string(&path).map_err(|e| bad(format!("cannot read {}: {e}", path.display())))?;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate().skip(1).filter(|(_, line)| !line.trim().is_empty()) {
        let (first, rest) = line.split_once(',').unwrap_or((line, ""));
        let numbers: Option<Vec<f64>> =
            rest.split(',').map(|n| n.trim().parse().ok().filter(|n: &f64| *n >= 0.0)).collect();
        match numbers {
            Some(numbers) if numbers.len() + 1 == columns => found.push((first.to_string(), numbers)),
            _ => {
                return Err(bad(format!(
                    "{} line {}: expected {columns} columns of numbers",
                    path.display(),
                    index + 1
                )));
            }
        }
    }
    Ok(found)
}

impl OperatorTables {
    /// Reads `DIR,layers=32[,tp=2,hidden=5120,link_latency=20us,link_gb_s=16]`, where DIR holds `dense.csv`,
    /// `per_sequence.csv` and `attention.csv`.
    pub fn parse(text: &str) -> Result<OperatorTables, SimError> {
        let mut parts = text.split(',');
        let dir = Path::new(parts.next().unwrap_or(""));
        let mut tables = OperatorTables {
            dense: BTreeMap::new(),
            per_sequence: BTreeMap::new(),
            attention: BTreeMap::new(),
            layers: 0.0,
            ranks: 1.0,
            hidden_bytes: 0.0,
            link_latency_us: 0.0,
            link_bytes_per_us: f64::INFINITY,
        };
        for part in parts {
            let (name, value) = part.split_once('=').ok_or_else(|| bad(format!("`{part}` is not NAME=VALUE")))?;
            let number = || value.parse::<f64>().ok().filter(|n| *n > 0.0 && n.is_finite());
            let positive = || number().ok_or_else(|| bad(format!("{name}: `{value}` is not a number above 0")));
            match name {
                "layers" => tables.layers = positive()?,
                "tp" => tables.ranks = positive()?,
                "hidden" => tables.hidden_bytes = 2.0 * positive()?,
                "link_latency" => tables.link_latency_us = parse_duration_ns(value).map_err(bad)? / 1e3,
                "link_gb_s" => tables.link_bytes_per_us = 1e3 * positive()?,
                other => {
                    return Err(bad(format!(
                        "no such setting `{other}`; use layers, tp, hidden, link_latency, link_gb_s"
                    )));
                }
            }
        }
        if tables.layers == 0.0 {
            return Err(bad("how many layers does the model have? Write llmservingsim:DIR,layers=32".into()));
        }
        if tables.ranks > 1.0 && tables.hidden_bytes == 0.0 {
            return Err(bad("tp needs hidden=N, the model's hidden size, for the all-reduces".into()));
        }
        for (layer, numbers) in rows(dir, "dense.csv", 3)? {
            tables.dense.entry(layer).or_default().insert(numbers[0] as u64, numbers[1]);
        }
        for (layer, numbers) in rows(dir, "per_sequence.csv", 3)? {
            tables.per_sequence.entry(layer).or_default().insert(numbers[0] as u64, numbers[1]);
        }
        for (chunk, numbers) in rows(dir, "attention.csv", 5)? {
            let chunk = chunk.parse::<u64>().map_err(|_| bad(format!("attention.csv: `{chunk}` is not a number")))?;
            let slice = tables.attention.entry(chunk).or_default().entry(numbers[0] as u64).or_default();
            slice.entry(numbers[1] as u64).or_default().insert(numbers[2] as u64, numbers[3]);
        }
        // A table that is missing would be priced 0.
        let needed = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "layernorm"];
        if let Some(missing) = needed.iter().find(|op| !tables.dense.contains_key(**op)) {
            return Err(bad(format!("{} has no {missing}", dir.join("dense.csv").display())));
        }
        if !tables.per_sequence.contains_key("lm_head") || tables.attention.is_empty() {
            return Err(bad(format!("{} has no lm_head or no attention", dir.display())));
        }
        Ok(tables)
    }

    /// The cost of an iteration, in nanoseconds.
    pub fn ns(&self, load: &StepLoad) -> f64 {
        let tokens = load.context_tokens as f64 + f64::from(load.decode_requests);
        let dense = |op: &str| self.dense.get(op).map_or(0.0, |table| along(table, tokens, |t| *t));
        let sequences = load.requests() as f64;
        let per_sequence = |op: &str| self.per_sequence.get(op).map_or(0.0, |table| along(table, sequences, |t| *t));
        let layer: f64 = LAYER_OPS.iter().map(|op| dense(op)).sum::<f64>() + dense("layernorm");
        let once = dense("embedding") + dense("final_layernorm") + per_sequence("lm_head") + per_sequence("sampler");
        let all_reduce = if self.ranks > 1.0 {
            let share = tokens * self.hidden_bytes / self.ranks / self.link_bytes_per_us;
            2.0 * (self.ranks - 1.0) * (self.link_latency_us + share)
        } else {
            0.0
        };
        (self.layers * (layer + self.attention_us(load) + 2.0 * all_reduce) + once) * 1e3
    }

    fn attention_us(&self, load: &StepLoad) -> f64 {
        let decodes = f64::from(load.decode_requests);
        let context = if decodes > 0.0 { load.decode_kv as f64 / decodes } else { 0.0 };
        along(&self.attention, load.context_tokens as f64, |by_cached| {
            along(by_cached, load.context_kv as f64, |by_decodes| {
                along(by_decodes, decodes, |by_context| along(by_context, context, |t| *t))
            })
        })
    }
}

/// Linear between the nearest points; beyond the last two, along the line through them, but never below the last.
pub(crate) fn along<T>(points: &BTreeMap<u64, T>, at: f64, mut value: impl FnMut(&T) -> f64) -> f64 {
    let below = points.range(..=(at.max(0.0) as u64)).next_back();
    let above = points.range((at.max(0.0).ceil() as u64)..).next();
    match (below, above) {
        (Some((x, point)), Some((y, _))) if x == y => value(point),
        (Some((x, low)), Some((y, high))) => {
            let share = (at - *x as f64) / (*y - *x) as f64;
            (1.0 - share) * value(low) + share * value(high)
        }
        (None, Some((_, first))) => value(first),
        (Some((x, last)), None) => {
            let end = value(last);
            match points.range(..x).next_back() {
                Some((before, point)) => end + ((end - value(point)) / (x - before) as f64 * (at - *x as f64)).max(0.0),
                None => end,
            }
        }
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_interpolated_and_continued() {
        let table: Table = [(1, 10.0), (3, 20.0), (5, 40.0)].into();
        for (at, expected) in [(0.0, 10.0), (1.0, 10.0), (2.0, 15.0), (3.0, 20.0), (4.5, 35.0), (7.0, 60.0)] {
            assert_eq!(along(&table, at, |t| *t), expected, "{at}");
        }
        assert!(OperatorTables::parse("nowhere").unwrap_err().to_string().contains("layers"));
        assert!(OperatorTables::parse("nowhere,layers=2").unwrap_err().to_string().contains("nowhere"));
        assert!(OperatorTables::parse("nowhere,layers=2,tp=2").unwrap_err().to_string().contains("hidden"));
    }
}
