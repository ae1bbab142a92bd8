//! The iteration strip: one thin bar per iteration, coloured by kind.

use super::canvas::{Anchor, Canvas, WIDTH, text_width};
use super::palette::by_name;
use super::scale::Axis;
use super::{Svg, Unit};

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
    /// What sets its colour, e.g. `decode`.
    pub kind: String,
    /// What the tooltip adds, e.g. `8 gen reqs`; may be empty.
    pub note: String,
}

const HEIGHT: f64 = 110.0;
/// More bars than this are narrower than can be seen.
const MOST_BARS: usize = 700;

/// Draws the strip. Of more iterations than fit, each bar shows the largest of several neighbours, and says so.
pub fn strip(chart: &IterationStrip) -> Svg {
    let mut canvas = Canvas::new(&chart.title);
    let cells: Vec<&StripCell> = chart.cells.iter().filter(|c| c.value.is_finite() && c.value >= 0.0).collect();
    let Some(largest) = cells.iter().map(|c| c.value).reduce(f64::max) else {
        return canvas.nothing();
    };
    let mut kinds: Vec<&str> = cells.iter().map(|c| c.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let colours = by_name(kinds.iter().copied());
    let top = canvas.legend(kinds.iter().map(|kind| (*kind, colours[kind]))) + 4.0;

    let axis = Axis::new(0.0, largest, &chart.unit, 3);
    let left = axis.ticks.iter().map(|t| text_width(&t.1)).fold(0.0, f64::max) + 12.0;
    let y = |value: f64| top + HEIGHT * (1.0 - axis.place(value));
    for (value, label) in &axis.ticks {
        canvas.line(left, y(*value), WIDTH, y(*value), "grid");
        canvas.text(left - 6.0, y(*value) + 4.0, "muted", Anchor::End, label);
    }
    canvas.text(WIDTH, top - 6.0, "muted", Anchor::End, &axis.unit);

    let per_bar = cells.len().div_ceil(MOST_BARS);
    let bars: Vec<&[&StripCell]> = cells.chunks(per_bar).collect();
    let pitch = ((WIDTH - left) / bars.len() as f64).min(40.0);
    let gap = if pitch > 4.0 { 1.0 } else { 0.0 };
    let labels_every = (bars.len() as f64 * 60.0 / (WIDTH - left)).ceil().max(1.0) as usize;
    for (i, bar) in bars.iter().enumerate() {
        let Some(tallest) = bar.iter().max_by(|a, b| a.value.total_cmp(&b.value)) else {
            continue;
        };
        let x = left + pitch * i as f64;
        let height = (y(0.0) - y(tallest.value)).max(1.0);
        let tip = tooltip(tallest, &chart.unit, bar.len());
        canvas.rect(x, y(0.0) - height, pitch - gap, height, colours[tallest.kind.as_str()], &tip);
        if i % labels_every == 0 {
            let number = bar[0].iter.to_string();
            canvas.text(x + pitch / 2.0, y(0.0) + 15.0, "muted", Anchor::Middle, &number);
        }
    }
    canvas.line(left, y(0.0), WIDTH, y(0.0), "axis");
    let caption = match per_bar {
        1 => "iteration".to_owned(),
        n => format!("iteration; each bar is the largest of {n}"),
    };
    canvas.text((left + WIDTH) / 2.0, y(0.0) + 32.0, "", Anchor::Middle, &caption);
    canvas.finish(top + HEIGHT + 42.0)
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
