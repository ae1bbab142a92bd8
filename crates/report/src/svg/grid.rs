//! A grid of numbers: one cell for each combination of two quantities, the darker the larger.

use super::canvas::{Anchor, Canvas, Drawn, text_width};
use super::palette::ink_on;
use super::{Svg, Unit};
use crate::table::shorten;

/// A value for every row and column, each with a name.
#[derive(Clone, Debug)]
pub struct Grid {
    /// What is shown.
    pub title: String,
    /// What a row is, e.g. `max-batch-size`.
    pub row_label: String,
    /// What a column is, e.g. `rate`.
    pub column_label: String,
    /// The name of each row.
    pub rows: Vec<String>,
    /// The name of each column.
    pub columns: Vec<String>,
    /// What the values are.
    pub unit: Unit,
    /// The values, row by row. A value that is not finite is left blank.
    pub values: Vec<Vec<f64>>,
}

/// Narrower cells show their value as a tooltip only.
const READABLE: f64 = 44.0;

/// The color of a share of the largest value, on both light and dark pages.
fn color(share: f64) -> [u8; 3] {
    const NONE: [f64; 3] = [239.0, 243.0, 247.0];
    const MOST: [f64; 3] = [8.0, 81.0, 156.0];
    [0, 1, 2].map(|i| (NONE[i] + (MOST[i] - NONE[i]) * share.clamp(0.0, 1.0)).round() as u8)
}

/// Draws the grid.
pub fn grid(chart: &Grid) -> Svg {
    Svg::drawn(|width| draw(chart, width))
}

fn draw(chart: &Grid, full: f64) -> Drawn {
    let mut canvas = Canvas::new(&chart.title, full);
    let most = chart.values.iter().flatten().copied().filter(|v| v.is_finite()).reduce(f64::max);
    let (Some(most), false, false) = (most, chart.rows.is_empty(), chart.columns.is_empty()) else {
        return canvas.nothing();
    };
    let top = canvas.below_title() + 36.0;
    // Names of rows take a third at most.
    let longest = (full / 3.0 / text_width("x")) as usize;
    let left = chart.rows.iter().map(|name| text_width(&shorten(name, longest))).fold(0.0, f64::max) + 14.0;
    let width = ((full - left) / chart.columns.len() as f64).min(160.0);
    let height = (360.0 / chart.rows.len() as f64).clamp(6.0, 34.0);
    for (row, name) in chart.rows.iter().enumerate() {
        let y = top + height * row as f64;
        if height >= 12.0 || row % 2 == 0 {
            canvas.text(left - 6.0, y + height / 2.0 + 4.0, "muted", Anchor::End, &shorten(name, longest));
        }
        for (column, of) in chart.columns.iter().enumerate() {
            let Some(value) = chart.values.get(row).and_then(|v| v.get(column)).filter(|v| v.is_finite()) else {
                continue;
            };
            let x = left + width * column as f64;
            let said = chart.unit.format(*value);
            let tip = format!("{} {name} · {} {of}: {said}", chart.row_label, chart.column_label);
            let share = if most > 0.0 { value / most } else { 0.0 };
            canvas.cell(x, y, width - 1.0, height - 1.0, color(share), &tip);
            if width >= READABLE && height >= 14.0 {
                let class = if ink_on(color(share)) == "#fff" { "on-dark" } else { "on-light" };
                canvas.text(x + width / 2.0, y + height / 2.0 + 4.0, class, Anchor::Middle, &said);
            }
        }
    }
    let floor = top + height * chart.rows.len() as f64;
    let widest = chart.columns.iter().map(|name| text_width(name)).fold(0.0, f64::max);
    let every = ((widest + 10.0) / width).ceil().max(1.0) as usize;
    for (column, name) in chart.columns.iter().enumerate().step_by(every) {
        canvas.text(left + width * (column as f64 + 0.5), floor + 14.0, "muted", Anchor::Middle, name);
    }
    let middle = left + width * chart.columns.len() as f64 / 2.0;
    canvas.text(middle, floor + 32.0, "", Anchor::Middle, &chart.column_label);
    canvas.text(0.0, top - 10.0, "", Anchor::Start, &chart.row_label);
    canvas.finish(floor + 42.0)
}
