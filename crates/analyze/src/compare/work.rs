//! How much work two sides hold: what totals mean where steps are not known.

use std::collections::BTreeMap;

use serde::Serialize;

use super::normalize::base_name;
use super::verdict::whole;
use crate::Context;

/// The work of the two sides, where whole windows are compared; means of the repeats of a side.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Work {
    /// Kernels.
    pub kernels: [f64; 2],
    /// Floating-point operations, where they are known for nearly all of the time of both sides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flops: Option<[f64; 2]>,
    /// Bytes moved, where known likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<[f64; 2]>,
    /// How much of the work of A is in B, where every kernel comes by this factor more or less often: more or fewer steps of
    /// the same work. The times of the side with more are divided by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// How much longer the whole window of B is, as a share.
    pub total_change: f64,
}

/// Kernel counts that differ by no more than this are the same.
const SAME: f64 = 0.01;
/// Share of the kernels that may fall out of a common ratio.
const STRAY: f64 = 0.02;
/// Share of op time of which the amounts must be known, so that their sums say something.
const KNOWN: f64 = 0.8;

impl Work {
    /// Of the traces of two sides.
    pub(super) fn of(a: &[Context], b: &[Context]) -> Self {
        let [in_a, in_b] = [a, b].map(counts);
        let sum = |counts: &BTreeMap<String, f64>| counts.values().sum::<f64>();
        let kernels = [sum(&in_a), sum(&in_b)];
        let amounts = [a, b].map(amounts);
        let both = |of: fn(&Amounts) -> Option<f64>| Some([of(&amounts[0])?, of(&amounts[1])?]);
        Self {
            kernels,
            flops: both(|amounts| amounts.flops),
            bytes: both(|amounts| amounts.bytes),
            ratio: ratio(&in_a, &in_b, kernels),
            total_change: 0.0,
        }
    }

    /// Whether the sides hold as many kernels.
    pub fn is_same(&self) -> bool {
        let [a, b] = self.kernels;
        (a - b).abs() <= SAME * a.max(b)
    }

    /// What was compared, in words.
    pub(super) fn sentence(&self) -> String {
        let [a, b] = self.kernels;
        let mut text = match (self.is_same(), self.ratio) {
            (true, _) => format!("totals are compared: both hold {} kernels", whole(b)),
            (false, Some(ratio)) => format!(
                "times are per matched work: B holds {} of {} kernels, each {ratio:.2} times as often as A",
                whole(b),
                whole(a)
            ),
            (false, None) => format!("totals are compared: B holds {} of {} kernels", whole(b), whole(a)),
        };
        let factor = |amounts: Option<[f64; 2]>| amounts.filter(|[a, _]| *a > 0.0).map(|[a, b]| b / a);
        if let Some(flops) = factor(self.flops) {
            text += &format!(", {flops:.2} of the FLOPs");
        }
        if let Some(bytes) = factor(self.bytes) {
            text += &format!(", {bytes:.2} of the bytes");
        }
        text
    }
}

/// Kernels by bare name, per repeat.
fn counts(side: &[Context]) -> BTreeMap<String, f64> {
    let mut counts: BTreeMap<String, f64> = BTreeMap::new();
    for context in side {
        let ops = &context.trace.ops;
        let mut of_name = vec![0u32; context.trace.strings.len()];
        for op in (0..ops.len()).filter(|&op| !ops.kind[op].is_memory()) {
            if let Some(count) = of_name.get_mut(ops.name[op].0 as usize) {
                *count += 1;
            }
        }
        for (name, &count) in of_name.iter().enumerate().filter(|(_, count)| **count > 0) {
            let name = base_name(context.trace.text(strobe_trace::StrId(name as u32)));
            *counts.entry(name).or_default() += f64::from(count) / side.len() as f64;
        }
    }
    counts
}

/// The factor by which every kernel of one side comes more often in the other, where it is one and not 1.
fn ratio(a: &BTreeMap<String, f64>, b: &BTreeMap<String, f64>, kernels: [f64; 2]) -> Option<f64> {
    let [all_a, all_b] = kernels;
    if all_a <= 0.0 || all_b <= 0.0 || (all_a - all_b).abs() <= SAME * all_a.max(all_b) {
        return None;
    }
    // Looked at from the side with fewer, so that exchanging the sides changes nothing.
    let ((few, many), (fewer, more)) = if all_a < all_b { ((a, b), (all_a, all_b)) } else { ((b, a), (all_b, all_a)) };
    let times = more / fewer;
    let names: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let of = |side: &BTreeMap<String, f64>, name: &String| side.get(name).copied().unwrap_or(0.0);
    // What a side has in a cut-off step at its ends is not a different mix.
    let stray: f64 = names.iter().map(|name| ((of(many, name) - times * of(few, name)).abs() - 1.0).max(0.0)).sum();
    // A kernel that comes once per step tells steps from layers: where some come as often on both sides, the numbers of
    // steps are the same and the steps differ.
    let anchored = names.iter().filter(|name| of(a, name) >= 3.0 && of(a, name) == of(b, name)).count();
    (stray <= STRAY * more && anchored == 0).then_some(all_b / all_a)
}

struct Amounts {
    flops: Option<f64>,
    bytes: Option<f64>,
}

fn amounts(side: &[Context]) -> Amounts {
    let (mut flops, mut bytes) = (0.0, 0.0);
    let (mut with_flops, mut with_bytes, mut all) = (0i64, 0i64, 0i64);
    for context in side {
        let roofline = context.roofline();
        all = all.saturating_add(roofline.total_ns);
        for row in &roofline.rows {
            if let Some(of_row) = row.flops {
                flops += of_row;
                with_flops = with_flops.saturating_add(row.time_ns);
            }
            if let Some(of_row) = row.bytes {
                bytes += of_row;
                with_bytes = with_bytes.saturating_add(row.time_ns);
            }
        }
    }
    let known =
        |sum: f64, time: i64| (all > 0 && time as f64 >= KNOWN * all as f64).then_some(sum / side.len().max(1) as f64);
    Amounts { flops: known(flops, with_flops), bytes: known(bytes, with_bytes) }
}
