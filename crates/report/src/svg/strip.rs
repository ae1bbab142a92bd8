//! The iteration strip: one thin bar per iteration, colored by kind.

use super::canvas::{Anchor, Canvas, Drawn, text_width};
use super::palette::{Named, by_name};
use super::scale::Axis;
use super::{Svg, Unit, apart};
use crate::table::wrap;

/// A strip of iterations in their order.
#[derive(Clone, Debug)]
pub struct IterationStrip {
    /// What is shown.
    pub title: String,
    /// What the values are.
    pub unit: Unit,
    /// The iterations.
    pub cells: Vec<StripCell>,
}

/// One iteration.
#[derive(Clone, Debug)]
pub struct StripCell {
    /// Its number.
    pub iter: u64,
    /// What sets its height, e.g. its wall time.
    pub value: f64,
    /// What sets its color, e.g. `decode`.
    pub kind: String,
    /// What the tooltip adds, e.g. `8 decode requests`; may be empty.
    pub note: String,
}

/// Height of the only strip, and of one of several.
const HEIGHT: f64 = 110.0;
const LANE: f64 = 76.0;
/// Bars narrower than this cannot be seen.
const NARROWEST: f64 = 1.2;

/// Draws the strip. Kinds of very different size get a strip each, on its own scale. Of more iterations than fit, each bar
/// shows the largest of several neighbors; one that takes many times as long as the others is cut. Both are said.
pub fn strip(chart: &IterationStrip) -> Svg {
    Svg::drawn(|width| draw(chart, width))
}

fn draw(chart: &IterationStrip, width: f64) -> Drawn {
    let cells: Vec<&StripCell> = chart.cells.iter().filter(|c| c.value.is_finite() && c.value >= 0.0).collect();
    let mut kinds: Vec<&str> = cells.iter().map(|c| c.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let of_kind = |kind: &str| cells.iter().filter(|c| c.kind == kind).map(|c| c.value).collect::<Vec<f64>>();
    let split = kinds.len() > 1 && apart(kinds.iter().map(|kind| middle_of(of_kind(kind))));
    let own = if split { ", each kind on its own scale" } else { "" };
    let mut canvas = Canvas::new(&format!("{}{own}", chart.title), width);
    if cells.is_empty() {
        return canvas.nothing();
    }
    let colors = by_name(kinds.iter().copied());
    let legend: Vec<(&str, Named)> = kinds.iter().map(|kind| (*kind, Named::new(kind, &colors))).collect();
    let mut top = canvas.named_legend(&legend) + 4.0;

    // Strips stand below each other, an iteration at the same place in each.
    let lanes: Vec<Option<&str>> = if split { kinds.iter().map(|kind| Some(*kind)).collect() } else { vec![None] };
    let height = if split { LANE } else { HEIGHT };
    let axes: Vec<Axis> = lanes
        .iter()
        .map(|lane| {
            let values = lane.map_or_else(|| cells.iter().map(|c| c.value).collect(), of_kind);
            Axis::new(0.0, top_of(values), &chart.unit, if split { 2 } else { 3 })
        })
        .collect();
    let ticks = axes.iter().flat_map(|axis| &axis.ticks);
    let left = ticks.map(|t| text_width(&t.1)).fold(0.0, f64::max) + 12.0;
    let right = canvas.width;
    let per_bar = cells.len().div_ceil(((right - left) / NARROWEST) as usize);
    let bars: Vec<&[&StripCell]> = cells.chunks(per_bar.max(1)).collect();
    let pitch = ((right - left) / bars.len() as f64).min(40.0);
    let gap = if pitch > 4.0 { 1.0 } else { 0.0 };
    let mut cut = false;
    for (lane, axis) in lanes.iter().zip(&axes) {
        let y = |value: f64| top + height * (1.0 - axis.place(value));
        for (value, label) in &axis.ticks {
            canvas.line(left, y(*value), right, y(*value), "grid");
            canvas.text(left - 6.0, y(*value) + 4.0, "muted", Anchor::End, label);
        }
        let unit = lane.map_or_else(|| axis.unit.clone(), |kind| format!("{kind}, {}", axis.unit));
        canvas.text(right, top - 6.0, "muted", Anchor::End, &unit);
        for (i, bar) in bars.iter().enumerate() {
            let inside = bar.iter().filter(|cell| lane.is_none_or(|kind| cell.kind == kind));
            let Some(tallest) = inside.clone().max_by(|a, b| a.value.total_cmp(&b.value)) else {
                continue;
            };
            let x = left + pitch * i as f64;
            let tall = (y(0.0) - y(tallest.value)).max(1.0);
            let tip = tooltip(tallest, &chart.unit, inside.count());
            let color = Named::new(&tallest.kind, &colors);
            canvas.rect(x, y(0.0) - tall, pitch - gap, tall, color, &tip);
            if tallest.value > axis.high {
                cut = true;
                let (from, to) = (x, x + (pitch - gap).max(1.0));
                canvas.line(from, top - 2.0, to, top - 2.0, "axis");
            }
        }
        canvas.line(left, y(0.0), right, y(0.0), "axis");
        top += height + 20.0;
    }
    let floor = top - 20.0;
    let labels_every = (bars.len() as f64 * 60.0 / (right - left)).ceil().max(1.0) as usize;
    for (i, bar) in bars.iter().enumerate().step_by(labels_every) {
        let number = bar.first().map_or_else(String::new, |cell| cell.iter.to_string());
        let x = left + pitch * (i as f64 + 0.5);
        if x + text_width(&number) / 2.0 <= right {
            canvas.text(x, floor + 15.0, "muted", Anchor::Middle, &number);
        }
    }
    let thinned = if per_bar > 1 { format!("; each bar is the largest of {per_bar}") } else { String::new() };
    let cut = if cut { "; bars under a line are cut" } else { "" };
    let caption = wrap(&format!("iteration{thinned}{cut}"), (right / text_width("x")) as usize);
    let mut y = floor + 14.0;
    for line in &caption {
        y += 18.0;
        canvas.text(right / 2.0, y, "", Anchor::Middle, line);
    }
    canvas.finish(y + 10.0)
}

/// What a scale must reach: all values, but for those many times larger than most.
fn top_of(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values.get(((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1)));
    let [middle, high, largest] = [0.5, 0.9, 1.0].map(|share| at(share).copied().unwrap_or(0.0));
    largest.min((4.0 * middle).max(1.2 * high))
}

/// What most of them are near: one slow one must not hide that another kind is faster.
fn middle_of(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn tooltip(cell: &StripCell, unit: &Unit, among: usize) -> String {
    let mut tip = format!("iteration {} · {}: {}", cell.iter, cell.kind, unit.format(cell.value));
    if !cell.note.is_empty() {
        tip = format!("{tip} · {}", cell.note);
    }
    if among > 1 {
        tip = format!("{tip} (largest of {among})");
    }
    tip
}
