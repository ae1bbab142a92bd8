//! Stacked horizontal bars: a whole split into its parts, row by row.

use super::canvas::{Anchor, Canvas, WIDTH, text_width};
use super::palette::by_name;
use super::scale::Axis;
use super::{Svg, Unit};
use crate::human;
use crate::table::shorten;

/// A chart of wholes and their parts.
#[derive(Clone, Debug)]
pub struct StackedChart {
    /// What is shown.
    pub title: String,
    /// What the values are.
    pub unit: Unit,
    /// One bar each.
    pub rows: Vec<StackedRow>,
    /// Draws every bar at full width, for comparing shares instead of amounts.
    pub normalize: bool,
}

/// One bar.
#[derive(Clone, Debug)]
pub struct StackedRow {
    /// What the bar stands for.
    pub label: String,
    /// Its parts by name, in the order drawn. Parts of one name have one colour in all rows.
    pub parts: Vec<(String, f64)>,
}

impl StackedRow {
    /// A bar with these parts.
    pub fn new<N: Into<String>>(label: impl Into<String>, parts: impl IntoIterator<Item = (N, f64)>) -> Self {
        Self { label: label.into(), parts: parts.into_iter().map(|(n, v)| (n.into(), v)).collect() }
    }

    /// The parts that can be drawn.
    fn drawn(&self) -> impl Iterator<Item = (&str, f64)> {
        let drawable = |v: f64| v.is_finite() && v > 0.0;
        self.parts.iter().filter(move |p| drawable(p.1)).map(|(n, v)| (n.as_str(), *v))
    }

    fn sum(&self) -> f64 {
        self.drawn().map(|p| p.1).sum()
    }
}

const BAR: f64 = 26.0;
const PITCH: f64 = 36.0;
const LONGEST_LABEL: usize = 26;

/// Draws stacked bars.
pub fn stacked(chart: &StackedChart) -> Svg {
    let mut canvas = Canvas::new(&chart.title);
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in chart.rows.iter().flat_map(StackedRow::drawn) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let largest = chart.rows.iter().map(StackedRow::sum).fold(0.0, f64::max);
    if names.is_empty() {
        return canvas.nothing();
    }
    let colours = by_name(names.iter().copied());
    let top = canvas.legend(names.iter().map(|name| (*name, colours[name]))) + 4.0;

    let labels: Vec<String> = chart.rows.iter().map(|r| shorten(&r.label, LONGEST_LABEL)).collect();
    let totals: Vec<String> = chart.rows.iter().map(|r| chart.unit.format(r.sum())).collect();
    let widest = |texts: &[String]| texts.iter().map(|t| text_width(t)).fold(0.0, f64::max);
    let left = widest(&labels) + 10.0;
    let right = WIDTH - widest(&totals) - 10.0;
    let bottom = top + PITCH * chart.rows.len() as f64;
    let axis = match chart.normalize {
        true => Axis::new(0.0, 1.0, &Unit::Share, 5),
        false => Axis::new(0.0, largest, &chart.unit, 6),
    };
    let x = |value: f64| left + (right - left) * axis.place(value);
    for (value, label) in &axis.ticks {
        canvas.line(x(*value), top, x(*value), bottom, "grid");
        canvas.text(x(*value), bottom + 15.0, "muted", Anchor::Middle, label);
    }
    let last_label = axis.ticks.last().map_or(0.0, |t| text_width(&t.1));
    let unit_x = right + last_label / 2.0 + 4.0;
    canvas.text(unit_x, bottom + 15.0, "muted", Anchor::Start, &axis.unit);

    for (i, row) in chart.rows.iter().enumerate() {
        let y = top + PITCH * i as f64 + (PITCH - BAR) / 2.0;
        let text_y = y + BAR / 2.0 + 4.0;
        canvas.text(left - 8.0, text_y, "", Anchor::End, &labels[i]);
        let sum = row.sum();
        let whole = if chart.normalize { sum } else { 1.0 };
        let mut before = 0.0;
        for (name, value) in row.drawn() {
            let (from, to) = (x(before / whole), x((before + value) / whole));
            before += value;
            let share = human::percent(value / sum);
            let amount = chart.unit.format(value);
            let tip = format!("{} · {name}: {amount} ({share})", row.label);
            // A hairline between neighbours, unless it would eat the part itself.
            let gap = if to - from > 3.0 { 1.0 } else { 0.0 };
            canvas.rect(from, y, to - from - gap, BAR, colours[name], &tip);
            if to - from > text_width(&share) + 8.0 {
                canvas.text((from + to) / 2.0, text_y, "inside", Anchor::Middle, &share);
            }
        }
        let end = if chart.normalize { right } else { x(sum) };
        let total_x = if sum > 0.0 { end } else { left };
        canvas.text(total_x + 8.0, text_y, "muted", Anchor::Start, &totals[i]);
    }
    canvas.finish(bottom + 24.0)
}
