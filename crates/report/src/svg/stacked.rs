//! Stacked horizontal bars: a whole split into its parts, row by row.

use std::collections::HashMap;

use super::canvas::{Anchor, Canvas, Drawn, text_width};
use super::palette::{Named, by_name};
use super::scale::Axis;
use super::{Svg, Unit, apart};
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
    /// Bars of one group share a scale. Groups of very different size get one each.
    pub group: String,
    /// Its parts by name, in the order drawn. Parts of one name have one color in all rows.
    pub parts: Vec<(String, f64)>,
}

impl StackedRow {
    /// A bar with these parts.
    pub fn new<N: Into<String>>(label: impl Into<String>, parts: impl IntoIterator<Item = (N, f64)>) -> Self {
        let parts = parts.into_iter().map(|(n, v)| (n.into(), v)).collect();
        Self { label: label.into(), group: String::new(), parts }
    }

    /// Puts it into a group, e.g. `decode`.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = group.into();
        self
    }

    /// The parts that can be drawn.
    fn drawn(&self) -> impl Iterator<Item = (&str, f64)> {
        let drawable = |v: f64| v.is_finite() && v > 0.0;
        self.parts.iter().filter(move |p| drawable(p.1)).map(|(n, v)| (n.as_str(), *v))
    }

    fn sum(&self) -> f64 {
        self.drawn().map(|p| p.1).sum()
    }

    /// The parts with those that are not named in `shown` as one, which comes last.
    fn folded<'a>(&'a self, shown: &[&str]) -> Vec<(&'a str, f64)> {
        let (kept, rest): (Vec<_>, Vec<_>) = self.drawn().partition(|(name, _)| shown.contains(name));
        let rest: f64 = rest.iter().map(|part| part.1).sum();
        kept.into_iter().chain((rest > 0.0).then_some((REST, rest))).collect()
    }
}

const BAR: f64 = 26.0;
const PITCH: f64 = 36.0;
/// Room for a label that stands above its bar.
const LABEL: f64 = 16.0;
/// Room below a scale.
const SCALE: f64 = 24.0;
const LONGEST_LABEL: usize = 26;
/// Of more parts the smallest are drawn as one.
const MOST_PARTS: usize = 12;
const REST: &str = "smaller parts";

/// Draws stacked bars.
pub fn stacked(chart: &StackedChart) -> Svg {
    Svg::drawn(|width| draw(chart, width))
}

fn draw(chart: &StackedChart, width: f64) -> Drawn {
    let groups = scales(chart);
    let own = if groups.len() > 1 { ", each kind on its own scale" } else { "" };
    let mut canvas = Canvas::new(&format!("{}{own}", chart.title), width);
    let shown = largest_parts(chart);
    let rows: HashMap<usize, Vec<(&str, f64)>> =
        chart.rows.iter().enumerate().map(|(index, row)| (index, row.folded(&shown))).collect();
    let mut names: Vec<&str> = shown.clone();
    if rows.values().flatten().any(|(name, _)| *name == REST) {
        names.push(REST);
    }
    if names.is_empty() {
        return canvas.nothing();
    }
    let colors = by_name(names.iter().copied());
    let legend: Vec<(&str, Named)> = names.iter().map(|name| (*name, Named::new(name, &colors))).collect();
    let mut top = canvas.named_legend(&legend) + 4.0;

    let above = if canvas.is_narrow() { LABEL } else { 0.0 };
    let longest = if canvas.is_narrow() { 48 } else { LONGEST_LABEL };
    let labels: Vec<String> = chart.rows.iter().map(|r| shorten(&r.label, longest)).collect();
    let totals: Vec<String> = chart.rows.iter().map(|r| chart.unit.format(r.sum())).collect();
    let widest = |texts: &[String]| texts.iter().map(|t| text_width(t)).fold(0.0, f64::max);
    let left = if canvas.is_narrow() { 2.0 } else { widest(&labels) + 10.0 };
    let right = canvas.width - widest(&totals) - 10.0;
    for members in &groups {
        let largest = members.iter().map(|&index| chart.rows[index].sum()).fold(0.0, f64::max);
        let bottom = top + (PITCH + above) * members.len() as f64;
        let wanted = if canvas.is_narrow() { 3 } else { 6 };
        let axis = match chart.normalize {
            true => Axis::new(0.0, 1.0, &Unit::Share, wanted.min(5)),
            false => Axis::new(0.0, largest, &chart.unit, wanted),
        };
        let x = |value: f64| left + (right - left) * axis.place(value);
        for (value, label) in &axis.ticks {
            canvas.line(x(*value), top, x(*value), bottom, "grid");
            let anchor = if canvas.is_narrow() && *value <= axis.low { Anchor::Start } else { Anchor::Middle };
            canvas.text(x(*value), bottom + 15.0, "muted", anchor, label);
        }
        let last_label = axis.ticks.last().map_or(0.0, |t| text_width(&t.1));
        let unit_x = right + last_label / 2.0 + 4.0;
        canvas.text(unit_x, bottom + 15.0, "muted", Anchor::Start, &axis.unit);

        for (place, &index) in members.iter().enumerate() {
            let row = &chart.rows[index];
            let y = top + (PITCH + above) * place as f64 + above + (PITCH - BAR) / 2.0;
            let text_y = y + BAR / 2.0 + 4.0;
            match canvas.is_narrow() {
                true => canvas.text(left, y - 5.0, "", Anchor::Start, &labels[index]),
                false => canvas.text(left - 8.0, text_y, "", Anchor::End, &labels[index]),
            }
            let sum = row.sum();
            let whole = if chart.normalize { sum } else { 1.0 };
            let mut before = 0.0;
            for &(name, value) in rows.get(&index).into_iter().flatten() {
                let (from, to) = (x(before / whole), x((before + value) / whole));
                before += value;
                let share = human::percent(value / sum);
                let amount = chart.unit.format(value);
                let tip = format!("{} · {name}: {amount} ({share})", row.label);
                // A hairline between neighbors, unless it would eat the part itself.
                let gap = if to - from > 3.0 { 1.0 } else { 0.0 };
                let color = Named::new(name, &colors);
                canvas.rect(from, y, to - from - gap, BAR, color, &tip);
                if to - from > text_width(&share) + 8.0 {
                    canvas.inside((from + to) / 2.0, text_y, color, &share);
                }
            }
            let end = if chart.normalize { right } else { x(sum) };
            let total_x = if sum > 0.0 { end } else { left };
            canvas.text(total_x + 8.0, text_y, "muted", Anchor::Start, &totals[index]);
        }
        top = bottom + SCALE + 6.0;
    }
    canvas.finish(top - 6.0)
}

/// The rows that share a scale, by their place: all, or those of each group where the groups are of very different size.
fn scales(chart: &StackedChart) -> Vec<Vec<usize>> {
    let mut groups: Vec<(&str, Vec<usize>)> = Vec::new();
    for (index, row) in chart.rows.iter().enumerate() {
        match groups.iter_mut().find(|(name, _)| *name == row.group) {
            Some((_, members)) => members.push(index),
            None => groups.push((&row.group, vec![index])),
        }
    }
    let largest = |members: &Vec<usize>| members.iter().map(|&index| chart.rows[index].sum()).fold(0.0, f64::max);
    match !chart.normalize && apart(groups.iter().map(|(_, members)| largest(members))) {
        true => groups.into_iter().map(|(_, members)| members).collect(),
        false => vec![(0..chart.rows.len()).collect()],
    }
}

/// The names of the parts that are drawn by themselves, in the order in which they come.
fn largest_parts(chart: &StackedChart) -> Vec<&str> {
    let mut sums: Vec<(&str, f64)> = Vec::new();
    for row in &chart.rows {
        // Shares, so that long rows do not hide what short ones are made of.
        let whole = row.sum();
        for (name, value) in row.drawn() {
            match sums.iter_mut().find(|(known, _)| *known == name) {
                Some((_, sum)) => *sum += value / whole,
                None => sums.push((name, value / whole)),
            }
        }
    }
    if sums.len() > MOST_PARTS {
        let mut sizes: Vec<f64> = sums.iter().map(|(_, sum)| *sum).collect();
        sizes.sort_by(|a, b| b.total_cmp(a));
        let least = sizes[MOST_PARTS - 2];
        sums.retain(|(_, sum)| *sum >= least);
        sums.truncate(MOST_PARTS - 1);
    }
    sums.into_iter().map(|(name, _)| name).collect()
}
