//! Curves through points: a quantity against another, with intervals where they are known.

use super::canvas::{Anchor, Canvas, Drawn, last_label, text_width};
use super::palette::series;
use super::scale::Axis;
use super::{Svg, Unit};

/// A chart of curves.
#[derive(Clone, Debug)]
pub struct LineChart {
    /// What is shown.
    pub title: String,
    /// What the horizontal axis counts.
    pub x_label: String,
    /// What its values are.
    pub x_unit: Unit,
    /// What the values of the vertical axis are.
    pub unit: Unit,
    /// The curves.
    pub series: Vec<LineSeries>,
}

/// One curve.
#[derive(Clone, Debug)]
pub struct LineSeries {
    /// Its name.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<LinePoint>,
}

/// A point of a curve.
#[derive(Clone, Copy, Debug)]
pub struct LinePoint {
    /// Where it is.
    pub x: f64,
    /// Its value.
    pub y: f64,
    /// Where the value lies, low and high.
    pub interval: Option<(f64, f64)>,
}

impl LinePoint {
    fn is_finite(&self) -> bool {
        self.x.is_finite() && self.y.is_finite()
    }
}

const HEIGHT: f64 = 240.0;
const RIGHT_MARGIN: f64 = 14.0;

/// Draws the curves, with a bar for each interval.
pub fn lines(chart: &LineChart) -> Svg {
    Svg::drawn(|width| draw(chart, width))
}

fn draw(chart: &LineChart, width: f64) -> Drawn {
    let mut canvas = Canvas::new(&chart.title, width);
    let points = || chart.series.iter().flat_map(|s| &s.points).filter(|p| p.is_finite());
    let x_range = (points().map(|p| p.x).reduce(f64::min), points().map(|p| p.x).reduce(f64::max));
    let y_most =
        points().map(|p| p.interval.map_or(p.y, |(_, high)| high.max(p.y))).filter(|y| y.is_finite()).reduce(f64::max);
    let ((Some(x_low), Some(x_high)), Some(y_high)) = (x_range, y_most) else {
        return canvas.nothing();
    };
    let names: Vec<_> = chart.series.iter().enumerate().map(|(i, s)| (s.name.as_str(), series(i))).collect();
    let top = canvas.legend_of_several(&names) + 6.0;
    let x_axis = Axis::new(
        if x_low > 0.0 && x_low < x_high / 2.0 { 0.0 } else { x_low },
        x_high,
        &chart.x_unit,
        if canvas.is_narrow() { 4 } else { 8 },
    );
    let y_axis = Axis::new(0.0, y_high, &chart.unit, 5);
    let label_of = |label: &str| format!("{label} {}", y_axis.unit).trim_end().to_owned();
    let left = y_axis.ticks.iter().map(|(_, label)| text_width(&label_of(label))).fold(0.0, f64::max) + 8.0;
    let right = width - last_label(&x_axis).max(RIGHT_MARGIN);
    let x = |value: f64| left + (right - left) * x_axis.place(value);
    let y = |value: f64| top + HEIGHT * (1.0 - y_axis.place(value));
    for (value, label) in &y_axis.ticks {
        canvas.line(left, y(*value), right, y(*value), "grid");
        canvas.text(left - 6.0, y(*value) + 4.0, "muted", Anchor::End, &label_of(label));
    }
    let floor = top + HEIGHT;
    for (value, label) in &x_axis.ticks {
        canvas.line(x(*value), floor, x(*value), floor + 4.0, "axis");
        canvas.text(x(*value), floor + 17.0, "muted", Anchor::Middle, label);
    }
    canvas.line(left, floor, right, floor, "axis");
    let label = match x_axis.unit.as_str() {
        "" => chart.x_label.clone(),
        unit => format!("{} ({unit})", chart.x_label),
    };
    canvas.text((left + right) / 2.0, floor + 36.0, "", Anchor::Middle, &label);
    for (index, curve) in chart.series.iter().enumerate() {
        let color = series(index);
        let known: Vec<_> = curve.points.iter().filter(|p| p.is_finite()).collect();
        let corners: Vec<(f64, f64)> = known.iter().map(|p| (x(p.x), y(p.y))).collect();
        canvas.curve(&corners, color);
        for LinePoint { x: at, y: value, interval } in known {
            let mut tip = format!("{} · {}: {}", curve.name, chart.x_unit.format(*at), chart.unit.format(*value));
            if let Some((low, high)) = interval.filter(|(low, high)| low.is_finite() && high.is_finite()) {
                canvas.curve(&[(x(*at), y(low.max(0.0))), (x(*at), y(high))], color);
                tip.push_str(&format!(" ({} to {})", chart.unit.format(low), chart.unit.format(high)));
            }
            canvas.dot(x(*at), y(*value), color, &tip);
        }
    }
    canvas.finish(floor + 46.0)
}
