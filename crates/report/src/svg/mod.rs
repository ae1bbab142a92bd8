//! Plots as SVG: each function takes a plain description and returns a whole `<svg>` element.
//!
//! The element carries its own style, follows the viewer's light or dark preference, and shows exact values as
//! tooltips. Values that are not finite are left out, never drawn as zero.

mod bars;
mod canvas;
mod cdf;
mod grid;
mod heat;
mod lines;
pub(crate) mod palette;
mod scale;
mod stacked;
mod strip;

pub use bars::{BarChart, BarSeries, bars};
pub use cdf::{CdfChart, CdfSeries, cdf};
pub use grid::{Grid, grid};
pub use heat::{HeatMap, heat_map, heat_map_png};
pub use lines::{LineChart, LinePoint, LineSeries, lines};
pub use scale::Unit;
pub use stacked::{StackedChart, StackedRow, stacked};
pub use strip::{IterationStrip, StripCell, strip};

/// From this ratio on two things on one scale leave the smaller one too little to be read.
const FAR_APART: f64 = 3.0;

/// Whether amounts are too far apart for one scale.
fn apart(amounts: impl Iterator<Item = f64>) -> bool {
    let (low, high) = amounts
        .filter(|amount| *amount > 0.0)
        .fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), amount| (low.min(amount), high.max(amount)));
    high > FAR_APART * low
}

/// A finished plot, drawn for wide and for narrow places. Only this module makes them, so a page can take one without
/// escaping it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Svg {
    wide: String,
    narrow: String,
    names: Vec<String>,
}

impl Svg {
    /// Draws at both widths.
    fn drawn(draw: impl Fn(f64) -> canvas::Drawn) -> Self {
        let wide = draw(canvas::WIDE);
        Self { wide: wide.text, narrow: draw(canvas::NARROW).text, names: wide.names }
    }

    /// The text of the `<svg>` element: a valid file by itself.
    pub fn as_str(&self) -> &str {
        &self.wide
    }

    /// The same plot for places too narrow for its text.
    pub(crate) fn narrow(&self) -> &str {
        &self.narrow
    }

    /// Names whose color the whole page must agree on.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }
}

impl std::fmt::Display for Svg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.wide)
    }
}
