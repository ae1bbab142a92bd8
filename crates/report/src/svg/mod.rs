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

/// A finished plot. Only this module makes them, so a page can take one without escaping it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Svg(String);

impl Svg {
    /// The text of the `<svg>` element: a valid file by itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for Svg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
