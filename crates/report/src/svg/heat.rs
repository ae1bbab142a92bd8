//! A heat map: one cell per row and column, colored by how far its value is from an even share.

use super::Svg;
use super::canvas::{Anchor, Canvas, Drawn, text_width};
use crate::png::{self, Picture};

/// A table of values around 1: below is blue, 1 is white, above is red.
#[derive(Clone, Debug)]
pub struct HeatMap {
    /// What is shown.
    pub title: String,
    /// What a row is, e.g. `layer`.
    pub row_label: String,
    /// What a column is, e.g. `expert`.
    pub column_label: String,
    /// What a value is, e.g. `load over mean load`.
    pub value_label: String,
    /// The number of each row.
    pub rows: Vec<usize>,
    /// The values, row by row, all rows equally long. A value that is not finite is left blank.
    pub values: Vec<Vec<f64>>,
}

/// Beyond this many cells the SVG holds a picture of them, without tooltips.
const MOST_CELLS: usize = 4096;
const SCALE_STEPS: usize = 60;

impl HeatMap {
    fn columns(&self) -> usize {
        self.values.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The value that has the strongest red: the largest one, and at least 2.
    fn hottest(&self) -> f64 {
        self.values.iter().flatten().copied().filter(|value| value.is_finite()).fold(2.0, f64::max)
    }
}

/// The color of a value on a scale up to `hottest`.
fn color(value: f64, hottest: f64) -> [u8; 3] {
    const COLD: [f64; 3] = [33.0, 102.0, 172.0];
    const EVEN: [f64; 3] = [247.0, 247.0, 247.0];
    const HOT: [f64; 3] = [178.0, 24.0, 43.0];
    // Twice the mean is as far from even as half of it.
    let (end, part) = match value <= 1.0 {
        true => (COLD, 1.0 - value.max(0.0)),
        false => (HOT, (value.ln() / hottest.ln()).min(1.0)),
    };
    [0, 1, 2].map(|i| (EVEN[i] + (end[i] - EVEN[i]) * part).round() as u8)
}

/// Draws the map.
pub fn heat_map(chart: &HeatMap) -> Svg {
    Svg::drawn(|width| draw(chart, width))
}

fn draw(chart: &HeatMap, full: f64) -> Drawn {
    let mut canvas = Canvas::new(&chart.title, full);
    let (rows, columns) = (chart.values.len(), chart.columns());
    if rows == 0 || columns == 0 {
        return canvas.nothing();
    }
    let hottest = chart.hottest();
    let top = scale(&mut canvas, chart, hottest);
    let left = chart.rows.iter().map(|row| text_width(&row.to_string())).fold(0.0, f64::max) + 26.0;
    let width = (full - left) / columns as f64;
    let height = (360.0 / rows as f64).clamp(5.0, 22.0);
    let y = |row: usize| top + height * row as f64;
    if rows * columns <= MOST_CELLS {
        let gap = if width > 6.0 { 1.0 } else { 0.0 };
        for (row, values) in chart.values.iter().enumerate() {
            for (column, value) in values.iter().enumerate().filter(|(_, value)| value.is_finite()) {
                let number = chart.rows.get(row).copied().unwrap_or(row);
                let tip = format!(
                    "{} {number} · {} {column}: {value:.2} ({})",
                    chart.row_label, chart.column_label, chart.value_label
                );
                let x = left + width * column as f64;
                canvas.cell(x, y(row), width - gap, height - gap, color(*value, hottest), &tip);
            }
        }
    } else {
        let mut picture = Picture::new(columns, rows, [255; 3]);
        draw_cells(&mut picture, chart, 1, (0, 0));
        canvas.picture(left, top, full - left, height * rows as f64, &png::encode(&picture));
    }
    let every = (14.0 / height).ceil().max(1.0) as usize;
    for (row, number) in chart.rows.iter().enumerate().step_by(every) {
        canvas.text(left - 6.0, y(row) + height / 2.0 + 4.0, "muted", Anchor::End, &number.to_string());
    }
    let every = (text_width(&columns.to_string()) * 1.6 / width).ceil().max(1.0) as usize;
    for column in (0..columns).step_by(every) {
        let x = left + width * (column as f64 + 0.5);
        canvas.text(x, y(rows) + 14.0, "muted", Anchor::Middle, &column.to_string());
    }
    canvas.text((left + full) / 2.0, y(rows) + 32.0, "", Anchor::Middle, &chart.column_label);
    canvas.text(0.0, top - 6.0, "", Anchor::Start, &chart.row_label);
    canvas.finish(y(rows) + 42.0)
}

/// The color scale below the title; returns where the plot begins.
fn scale(canvas: &mut Canvas, chart: &HeatMap, hottest: f64) -> f64 {
    let (width, top) = (canvas.width * 0.28, canvas.below_title() + 12.0);
    let left = canvas.width - width;
    let value_at = |part: f64| if part <= 0.5 { 2.0 * part } else { hottest.powf(2.0 * part - 1.0) };
    for step in 0..SCALE_STEPS {
        let (x, w) = (left + width * step as f64 / SCALE_STEPS as f64, width / SCALE_STEPS as f64 + 0.3);
        canvas.cell(x, top, w, 10.0, color(value_at((step as f64 + 0.5) / SCALE_STEPS as f64), hottest), "");
    }
    for (part, label) in [(0.0, "0".to_string()), (0.5, "1".to_string()), (1.0, format!("{hottest:.1}"))] {
        let anchor = [Anchor::Start, Anchor::Middle, Anchor::End][(part * 2.0) as usize];
        canvas.text(left + width * part, top + 22.0, "muted", anchor, &label);
    }
    canvas.text(left - 8.0, top + 9.0, "muted", Anchor::End, &chart.value_label);
    top + 48.0
}

fn draw_cells(picture: &mut Picture, chart: &HeatMap, size: usize, at: (usize, usize)) {
    let hottest = chart.hottest();
    for (row, values) in chart.values.iter().enumerate() {
        for (column, value) in values.iter().enumerate().filter(|(_, value)| value.is_finite()) {
            let place = (at.0 + column * size, at.1 + row * size);
            picture.fill(place, (size, size), color(*value, hottest));
        }
    }
}

/// The map as a PNG file: cells with the numbers of rows and columns, and the scale with the values at its ends and of an
/// even share.
pub fn heat_map_png(chart: &HeatMap) -> Vec<u8> {
    const INK: [u8; 3] = [28, 39, 51];
    const GLYPH: usize = 2;
    let (rows, columns) = (chart.values.len(), chart.columns());
    let size = (1024 / columns.max(1)).clamp(3, 24).min((1024 / rows.max(1)).clamp(3, 24));
    let text = |text: &str| png::text_width(text, GLYPH);
    let widest = chart.rows.iter().map(|row| text(&row.to_string())).max().unwrap_or(0);
    let (left, top) = (widest + 8, 32);
    let (width, height) = ((left + columns * size + 8).max(200), top + rows * size + 20);
    let mut picture = Picture::new(width, height, [255; 3]);
    let hottest = chart.hottest();
    let steps = 120;
    for step in 0..steps {
        let part = (step as f64 + 0.5) / steps as f64;
        let value = if part <= 0.5 { 2.0 * part } else { hottest.powf(2.0 * part - 1.0) };
        picture.fill((left + step, 4), (1, 8), color(value, hottest));
    }
    let end = format!("{hottest:.1}");
    for (x, label) in [(left, "0"), (left + steps / 2, "1"), (left + steps, end.as_str())] {
        picture.text((x.saturating_sub(text(label) / 2).max(left), 15), label, GLYPH, INK);
    }
    draw_cells(&mut picture, chart, size, (left, top));
    for (row, number) in chart.rows.iter().enumerate().step_by(12usize.div_ceil(size)) {
        let label = number.to_string();
        let y = top + row * size + size.saturating_sub(png::GLYPH_HEIGHT * GLYPH) / 2;
        picture.text((left - 4 - text(&label), y), &label, GLYPH, INK);
    }
    for column in (0..columns).step_by((text(&columns.to_string()) + 6).div_ceil(size)) {
        picture.text((left + column * size, top + rows * size + 4), &column.to_string(), GLYPH, INK);
    }
    png::encode(&picture)
}
