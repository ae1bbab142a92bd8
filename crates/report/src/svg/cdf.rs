//! Cumulative distributions: what share of the values lies at or below x.

use super::canvas::{Anchor, Canvas, Drawn, last_label};
use super::palette::{Color, series};
use super::scale::Axis;
use super::{Svg, Unit};

/// A chart of cumulative distributions.
#[derive(Clone, Debug)]
pub struct CdfChart {
    /// What is shown.
    pub title: String,
    /// What the horizontal axis counts, e.g. `time to first token`.
    pub x_label: String,
    /// What the values are.
    pub unit: Unit,
    /// One curve per run.
    pub series: Vec<CdfSeries>,
}

/// One curve.
#[derive(Clone, Debug)]
pub struct CdfSeries {
    /// The run's name.
    pub name: String,
    /// The values, in any order.
    pub samples: Vec<f64>,
}

impl CdfSeries {
    /// A curve through these values.
    pub fn new(name: impl Into<String>, samples: impl IntoIterator<Item = f64>) -> Self {
        Self { name: name.into(), samples: samples.into_iter().collect() }
    }
}

const HEIGHT: f64 = 240.0;
const LEFT: f64 = 48.0;
const RIGHT_MARGIN: f64 = 14.0;
/// Finer steps than this cannot be seen, and would only make the file larger.
const MOST_POINTS: usize = 400;

/// Draws the distributions, with the 50th, 90th and 99th percentile marked.
pub fn cdf(chart: &CdfChart) -> Svg {
    Svg::drawn(|width| draw(chart, width))
}

fn draw(chart: &CdfChart, width: f64) -> Drawn {
    let mut canvas = Canvas::new(&chart.title, width);
    let curves: Vec<(&str, Color, Vec<f64>)> = chart
        .series
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let mut sorted: Vec<f64> = s.samples.iter().copied().filter(|v| v.is_finite()).collect();
            sorted.sort_by(f64::total_cmp);
            (s.name.as_str(), series(i), sorted)
        })
        .filter(|(_, _, sorted)| !sorted.is_empty())
        .collect();
    let values = || curves.iter().flat_map(|(_, _, sorted)| sorted.iter().copied());
    let (Some(low), Some(high)) = (values().reduce(f64::min), values().reduce(f64::max)) else {
        return canvas.nothing();
    };
    let legend: Vec<(&str, Color)> = curves.iter().map(|(name, color, _)| (*name, *color)).collect();
    let top = canvas.legend_of_several(&legend) + 6.0;
    // A narrow distribution far from 0 would be a vertical line on an axis from 0.
    let from = if low > 0.0 && low < high / 2.0 { 0.0 } else { low };
    let axis = Axis::new(from, high, &chart.unit, if canvas.is_narrow() { 4 } else { 8 });
    let right = width - last_label(&axis).max(RIGHT_MARGIN);
    let x = |value: f64| LEFT + (right - LEFT) * axis.place(value);
    let y = |share: f64| top + HEIGHT * (1.0 - share);

    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        canvas.line(LEFT, y(share), right, y(share), "grid");
        let label = format!("{:.0} %", share * 100.0);
        canvas.text(LEFT - 6.0, y(share) + 4.0, "muted", Anchor::End, &label);
    }
    for (value, label) in &axis.ticks {
        canvas.line(x(*value), y(0.0), x(*value), y(0.0) + 4.0, "axis");
        canvas.text(x(*value), y(0.0) + 17.0, "muted", Anchor::Middle, label);
    }
    canvas.line(LEFT, y(0.0), right, y(0.0), "axis");
    let label = match axis.unit.as_str() {
        "" => chart.x_label.clone(),
        unit => format!("{} ({unit})", chart.x_label),
    };
    canvas.text((LEFT + right) / 2.0, y(0.0) + 36.0, "", Anchor::Middle, &label);

    for (_, color, sorted) in &curves {
        canvas.curve(&steps(sorted, &x, &y), *color);
    }
    for (name, color, sorted) in &curves {
        for percent in [50, 90, 99] {
            let value = percentile(sorted, f64::from(percent) / 100.0);
            let tip = format!("{name} · p{percent}: {}", chart.unit.format(value));
            canvas.dot(x(value), y(f64::from(percent) / 100.0), *color, &tip);
        }
    }
    canvas.finish(top + HEIGHT + 46.0)
}

/// The corners of the step curve; every n-th step only where there are too many to see.
fn steps(sorted: &[f64], x: &impl Fn(f64) -> f64, y: &impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
    let count = sorted.len();
    let stride = count.div_ceil(MOST_POINTS);
    let mut points = Vec::new();
    let mut share = 0.0;
    for (i, &value) in sorted.iter().enumerate() {
        if (i + 1) % stride == 0 || i == 0 || i + 1 == count {
            points.push((x(value), y(share)));
            share = (i + 1) as f64 / count as f64;
            points.push((x(value), y(share)));
        }
    }
    points
}

/// The smallest value that at least this share of the values does not exceed: a point of the step curve. Statistics of
/// runs interpolate or take `trunc(n * q)`; their values may lie beside the curve.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let place = (share * sorted.len() as f64).ceil() as usize;
    let index = place.clamp(1, sorted.len()) - 1;
    sorted[index]
}
