//! Terminal tables, SVG plots and self-contained HTML pages.
//!
//! Nothing here knows where numbers came from: callers pass labels and values, and get text back. Whatever a
//! caller passes is escaped.
//!
//! ```
//! use strobe_report::{html::{Card, Page}, human, svg::{self, StackedChart, StackedRow, Unit}, table::{Cell, Table}};
//!
//! let table = Table::new(["op", "time", "share"])
//!     .row([Cell::from("qkv_proj"), Cell::number(human::ns(1.5e6), 1.5e6), Cell::number(human::percent(0.6), 0.6)]);
//! println!("{}", table.render(80));
//!
//! let chart = svg::stacked(&StackedChart {
//!     title: "Iteration budget".into(),
//!     unit: Unit::Time,
//!     rows: vec![StackedRow::new("decode", [("gemm", 1.5e6), ("idle", 1.0e6)])],
//!     normalize: false,
//! });
//! let page = Page::new("Run").card(Card::new("throughput", "1,234").unit("tok/s"))
//!     .section("Budget").prose("Where the wall clock went.").svg(&chart).table(&table).finish();
//! assert!(page.starts_with("<!doctype html>"));
//! ```

mod escape;
pub mod explorer;
pub mod html;
pub mod human;
mod png;
pub mod svg;
pub mod table;
pub mod terminal;
