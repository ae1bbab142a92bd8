//! Grouped bars: one group per thing measured, one bar per run.

use super::canvas::{Anchor, Canvas, Drawn, text_width};
use super::palette::series;
use super::scale::Axis;
use super::{Svg, Unit};
use crate::human::{self, NOT_KNOWN};
use crate::table::shorten;

/// A bar chart. All values share one unit and an axis that starts at 0.
#[derive(Clone, Debug)]
pub struct BarChart {
    /// What is shown.
    pub title: String,
    /// What the values are.
    pub unit: Unit,
    /// The name of each group of bars.
    pub groups: Vec<String>,
    /// The options compared.
    pub series: Vec<BarSeries>,
}

/// One option: a bar of its color in every group.
#[derive(Clone, Debug, Default)]
pub struct BarSeries {
    /// The option's name.
    pub name: String,
    /// One value per group; `None` where it is not known.
    pub values: Vec<Option<f64>>,
    /// Per group the single runs that the value stands for, drawn as dots on its bar; may be empty.
    pub runs: Vec<Vec<f64>>,
}

impl BarSeries {
    /// An option whose values are all known.
    pub fn new(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Self {
        Self { name: name.into(), values: values.into_iter().map(Some).collect(), runs: Vec::new() }
    }
}

const HEIGHT: f64 = 220.0;

/// Draws a bar chart.
pub fn bars(chart: &BarChart) -> Svg {
    Svg::drawn(|width| draw(chart, width))
}

fn draw(chart: &BarChart, width: f64) -> Drawn {
    let mut canvas = Canvas::new(&chart.title, width);
    let known = |v: &Option<f64>| v.filter(|v| v.is_finite());
    let runs = |s: &BarSeries| s.runs.iter().flatten().copied().filter(|v| v.is_finite()).collect::<Vec<f64>>();
    let all = || chart.series.iter().flat_map(|s| s.values.iter().filter_map(known).chain(runs(s)));
    let largest = all().reduce(f64::max);
    let lowest = all().reduce(f64::min);
    let (Some(largest), Some(lowest), false) = (largest, lowest, chart.groups.is_empty()) else {
        return canvas.nothing();
    };
    let names = chart.series.iter().enumerate();
    let top = canvas.legend(names.map(|(i, s)| (s.name.as_str(), series(i)))) + 14.0;
    let axis = Axis::new(lowest.min(0.0), largest.max(0.0), &chart.unit, 5);
    let widest = axis.ticks.iter().map(|t| text_width(&t.1)).fold(0.0, f64::max);
    let left = widest + 12.0;
    let y = |value: f64| top + HEIGHT * (1.0 - axis.place(value));
    for (value, label) in &axis.ticks {
        canvas.line(left, y(*value), width, y(*value), "grid");
        canvas.text(left - 6.0, y(*value) + 4.0, "muted", Anchor::End, label);
    }
    canvas.text(width, top - 8.0, "muted", Anchor::End, &axis.unit);

    let group_width = (width - left) / chart.groups.len() as f64;
    let bar_width = (group_width * 0.8 / chart.series.len() as f64).min(90.0);
    for (g, group) in chart.groups.iter().enumerate() {
        let centre = left + group_width * (g as f64 + 0.5);
        let first = centre - bar_width * chart.series.len() as f64 / 2.0;
        for (s, run) in chart.series.iter().enumerate() {
            let x = first + bar_width * s as f64;
            let value = run.values.get(g).and_then(known);
            let label = value.map_or(NOT_KNOWN.to_owned(), |v| chart.unit.format(v));
            let own_runs = run.runs.get(g).map_or(&[][..], Vec::as_slice);
            if let Some(value) = value {
                let (from, to) = (y(value.max(0.0)), y(value.min(0.0)));
                let tip = format!("{} · {group}: {label}", run.name);
                canvas.rect(x + 1.0, from, bar_width - 2.0, to - from, series(s), &tip);
            }
            // Side by side in their order, so that equal ones do not hide each other.
            for (number, value) in own_runs.iter().enumerate().filter(|(_, value)| value.is_finite()) {
                let at = x + bar_width * (number as f64 + 1.0) / (own_runs.len() as f64 + 1.0);
                let tip = format!("{} · run {}: {}", run.name, number + 1, chart.unit.format(*value));
                canvas.dot(at, y(*value), series(s), &tip);
            }
            // The axis names a plain unit already, and the shorter text fits narrower bars.
            let label = match (&chart.unit, value) {
                (Unit::Plain(_), Some(value)) => human::number(value),
                _ => label,
            };
            if text_width(&label) * 0.92 <= bar_width {
                let highest =
                    own_runs.iter().copied().filter(|v| v.is_finite()).fold(value.unwrap_or(0.0).max(0.0), f64::max);
                let above = y(highest) - if own_runs.is_empty() { 4.0 } else { 9.0 };
                canvas.text(x + bar_width / 2.0, above, "muted", Anchor::Middle, &label);
            }
        }
        let fits = (group_width / text_width("x")) as usize;
        canvas.text(centre, top + HEIGHT + 18.0, "", Anchor::Middle, &shorten(group, fits));
    }
    canvas.line(left, y(0.0), width, y(0.0), "axis");
    canvas.finish(top + HEIGHT + 28.0)
}
