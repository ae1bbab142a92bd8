//! The explorer: one self-contained page with a zoomable timeline, an iteration strip and searchable tables.
//!
//! Whatever is passed in is plain data: times in nanoseconds, names, and text as it is to be shown. One [`Side`] makes
//! the page of a trace, two make a comparison. The file needs no network and runs in any browser of 2023 or later.
//!
//! The page offers `window.strobe` to tests: `ready` (a promise), `view()` (visible range), `selected()`, `matches()`,
//! `iteration()` and `redraw()`. Nothing else should rely on it.
//!
//! ```
//! use strobe_report::explorer::{Explorer, Side, Timeline, Track, TrackKind};
//!
//! let stream = Track {
//!     start: vec![0, 1_500],
//!     duration: vec![1_000, 2_000],
//!     name_ids: vec![0, 1],
//!     category_ids: vec![0, 0],
//!     ..Track::new("GPU 0", "stream 7", TrackKind::Ops)
//! };
//! let timeline = Timeline {
//!     tracks: vec![stream],
//!     strings: vec!["nvjet_sm90".into(), "flash_fprop".into()],
//!     categories: vec!["gemm".into()],
//! };
//! let side = Side { name: "run".into(), timeline: Some(timeline), ..Side::default() };
//! let page = Explorer { title: "A run".into(), sides: vec![side], ..Explorer::default() }.finish();
//! assert!(page.starts_with("<!doctype html>"));
//! ```

mod encode;

pub(crate) use encode::base64;

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use crate::escape::escape;
use crate::html::{self, Card, Link, put};
use crate::human;
use crate::svg::Svg;
use crate::svg::palette::{Color, by_name, dark, light, shared};
use crate::table;

const STYLE: &str = include_str!("explorer.css");
const SCRIPT: &[&str] = &[
    include_str!("js/format.js"),
    include_str!("js/data.js"),
    include_str!("js/table.js"),
    include_str!("js/lanes.js"),
    include_str!("js/timeline.js"),
    include_str!("js/iterations.js"),
    include_str!("js/page.js"),
];

/// The value of an index column where there is nothing to point to.
pub const NONE: u32 = u32::MAX;

/// A page. Everything is escaped.
#[derive(Clone, Debug, Default)]
pub struct Explorer {
    /// What is shown, e.g. the name of the trace.
    pub title: String,
    /// The line below the title: machine, producer, span.
    pub subtitle: String,
    /// The sentence that answers the question: the first line of the page.
    pub verdict: Option<String>,
    /// Ways to other pages of the same run.
    pub links: Vec<Link>,
    /// Key figures.
    pub cards: Vec<Card>,
    /// What was found, the most important first.
    pub findings: Vec<Finding>,
    /// Plots, e.g. budgets by kind of iteration.
    pub charts: Vec<Svg>,
    /// Time by category, the largest first.
    pub categories: Option<CategoryBars>,
    /// One trace, or the two that are compared.
    pub sides: Vec<Side>,
    /// Of a comparison: which iterations of the two sides belong together, by index. Where it says nothing, the page
    /// takes the one of the same kind at the same place among those of its kind.
    pub pairs: Vec<(u32, u32)>,
    /// The kernels; of a comparison the matched kernels of both sides.
    pub kernels: Option<Table>,
    /// All other tables, a tab each.
    pub reports: Vec<ReportTab>,
    /// Sentences to read with the figures: coverage, denominators, what was left out.
    pub notes: Vec<String>,
}

/// Something worth knowing.
#[derive(Clone, Debug, Default)]
pub struct Finding {
    /// How much it matters, e.g. `high`; may be empty.
    pub severity: String,
    /// What it is about, in plain words; may be empty.
    pub name: String,
    /// It in a sentence.
    pub title: String,
    /// More about it, and what to do; may be empty.
    pub detail: String,
    /// What it could bring at most, e.g. `up to 4.1 ms of 6.7 ms`; may be empty.
    pub gain: String,
}

/// Time by category.
#[derive(Clone, Debug, Default)]
pub struct CategoryBars {
    /// What the figures are and what their shares are of.
    pub note: String,
    /// One bar per category and side.
    pub rows: Vec<CategoryBar>,
}

/// The time of one category.
#[derive(Clone, Debug, PartialEq)]
pub struct CategoryBar {
    /// Its name, as in [`Timeline::categories`].
    pub name: String,
    /// One figure per side, e.g. `1.25 ms (61.0 %)` with its nanoseconds.
    pub values: Vec<table::Cell>,
}

/// One trace.
#[derive(Clone, Debug, Default)]
pub struct Side {
    /// What it is called, e.g. `A` or the name of the file.
    pub name: String,
    /// Its events.
    pub timeline: Option<Timeline>,
    /// Its iterations.
    pub iterations: Iterations,
}

/// The iterations of a trace.
#[derive(Clone, Debug, Default)]
pub struct Iterations {
    /// How they were found and what their wall is.
    pub note: String,
    /// The parts that a wall is split into, in the order drawn.
    pub part_names: Vec<String>,
    /// What else is known about each, e.g. `requests`, `tokens`.
    pub fact_names: Vec<String>,
    /// The iterations in order of time.
    pub cells: Vec<IterationCell>,
}

/// One iteration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IterationCell {
    /// What it is called, e.g. `#12`.
    pub label: String,
    /// What it worked on, e.g. `decode`; sets its color.
    pub kind: String,
    /// When it began, on the clock of the timeline.
    pub start: i64,
    /// When it ended: `end - start` is the wall that `parts` split.
    pub end: i64,
    /// Nanoseconds per part, in the order of [`Iterations::part_names`]; `None` where not known.
    pub parts: Vec<Option<i64>>,
    /// Text per fact, in the order of [`Iterations::fact_names`]; empty where not known.
    pub facts: Vec<String>,
}

/// The events of a trace. Times are nanoseconds on one clock and may be negative.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// The tracks from top to bottom; those of one group follow each other.
    pub tracks: Vec<Track>,
    /// Names and details of events.
    pub strings: Vec<String>,
    /// What events are colored by.
    pub categories: Vec<String>,
}

/// What a track shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrackKind {
    /// What ran on a device. Overlapping ops get lanes of their own; these tracks alone count as busy time.
    #[default]
    Ops,
    /// Calls of the host.
    Calls,
    /// Named spans of host time, nested as a flame graph.
    Ranges,
    /// A measured value over time.
    Counter,
}

/// One row of the timeline, by column and in any order. All columns but `start` may be empty; the others have one entry
/// per event.
#[derive(Clone, Debug, Default)]
pub struct Track {
    /// What it belongs to, e.g. `GPU 0`.
    pub group: String,
    /// Its name, e.g. `stream 7`.
    pub name: String,
    /// What it shows.
    pub kind: TrackKind,
    /// When each event begins, or when each sample was taken.
    pub start: Vec<i64>,
    /// How long each event lasts; below 0 counts as 0.
    pub duration: Vec<i64>,
    /// Index into [`Timeline::strings`], or [`NONE`].
    pub name_ids: Vec<u32>,
    /// Index into [`Timeline::categories`]. When empty, events are colored by name.
    pub category_ids: Vec<u16>,
    /// Index into [`Timeline::strings`] of more to say about an event, e.g. its launch shape, or [`NONE`].
    pub detail_ids: Vec<u32>,
    /// What joins ops and calls in the trace; 0 = nothing.
    pub correlations: Vec<i64>,
    /// The event that launched this one, counted through the events of all tracks in their order, or [`NONE`].
    pub links: Vec<u32>,
    /// Of a counter: the value of each sample; not finite where not known.
    pub values: Vec<f64>,
    /// Of a counter: what is counted, e.g. `%`.
    pub unit: String,
}

impl Track {
    /// A track without events.
    pub fn new(group: impl Into<String>, name: impl Into<String>, kind: TrackKind) -> Self {
        Self { group: group.into(), name: name.into(), kind, ..Self::default() }
    }

    fn duration_of(&self, index: usize) -> i64 {
        self.duration.get(index).map_or(0, |&duration| duration.max(0))
    }
}

/// A table whose rows can be looked up in the timeline.
#[derive(Clone, Debug)]
pub struct Table {
    /// The rows, as shown.
    pub table: table::Table,
    /// The columns that hold names of events: a click finds them in the timeline.
    pub event_names: Vec<usize>,
}

impl From<table::Table> for Table {
    fn from(table: table::Table) -> Self {
        Self { table, event_names: Vec::new() }
    }
}

/// The tables of one report.
#[derive(Clone, Debug, Default)]
pub struct ReportTab {
    /// Its short name, e.g. `api-sum`.
    pub name: String,
    /// What it shows.
    pub title: String,
    /// Sentences to read with the tables.
    pub notes: Vec<String>,
    /// Why it has nothing to show.
    pub absent: Option<String>,
    /// The tables, the main one first.
    pub tables: Vec<Table>,
}

impl Explorer {
    /// The whole page.
    pub fn finish(&self) -> String {
        let title = escape(&self.title);
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n\
             <title>{title}</title>\n<style>\n{}{}{STYLE}</style>\n</head>\n<body>\n",
            html::STYLE,
            theme(&self.colors())
        );
        page.push_str("<main>\n");
        self.overview(&mut page);
        self.panels(&mut page);
        put(
            &mut page,
            format_args!(
                "</main>\n<noscript><p>The timeline and the tables need JavaScript.</p></noscript>\n\
                 <script type=\"application/octet-stream\" id=\"data\">{}</script>\n<script>\n(() => {{\n'use strict';\n",
                encode::encode(self)
            ),
        );
        SCRIPT.iter().for_each(|part| page.push_str(part));
        page.push_str("})();\n</script>\n</body>\n</html>\n");
        page
    }

    fn has_iterations(&self) -> bool {
        self.sides.iter().any(|side| !side.iterations.cells.is_empty())
    }

    fn has_timeline(&self) -> bool {
        let tracks = self.sides.iter().filter_map(|side| side.timeline.as_ref());
        tracks.flat_map(|timeline| &timeline.tracks).any(|track| !track.start.is_empty())
    }

    /// One set of colors for the page: gemm is the same blue on both sides, in the timeline, in bars, in budgets and in plots.
    fn colors(&self) -> HashMap<&str, Color> {
        let timelines = self.sides.iter().filter_map(|side| side.timeline.as_ref());
        let events = timelines.flat_map(|timeline| &timeline.categories).map(String::as_str);
        let iterations = || self.sides.iter().map(|side| &side.iterations);
        let parts = iterations().flat_map(|iterations| &iterations.part_names).map(String::as_str);
        let kinds = iterations().flat_map(|iterations| &iterations.cells).map(|cell| cell.kind.as_str());
        let bars = self.categories.iter().flat_map(|bars| &bars.rows).map(|row| row.name.as_str());
        let plots = self.charts.iter().flat_map(Svg::names);
        let mut seen = HashSet::new();
        by_name(events.chain(parts).chain(bars).chain(plots).chain(kinds).filter(|name| seen.insert(*name)))
    }

    /// Ways to the parts of the page.
    fn sections(&self) -> String {
        let present = [
            ("overview", "Overview", true),
            ("time", "Time", !self.charts.is_empty() || self.categories.is_some()),
            ("findings", "Findings", !self.findings.is_empty()),
            ("iterations", "Iterations", self.has_iterations()),
            ("timeline", "Timeline", self.has_timeline()),
            ("kernels", "Kernels", self.kernels.is_some()),
            ("reports", "Reports", !self.reports.is_empty()),
            ("notes", "Notes", !self.notes.is_empty()),
        ];
        let links = present.iter().filter(|link| link.2);
        links.map(|(id, name, _)| format!("<a href=\"#{id}\">{name}</a>")).collect()
    }

    /// What the page shows without a script.
    fn overview(&self, page: &mut String) {
        page.push_str("<header id=\"overview\">");
        html::header(page, &self.title, self.verdict.as_deref().unwrap_or_default(), &self.subtitle, &self.links);
        put(
            page,
            format_args!(
                "</header>\n<nav class=\"bar\">{}<button type=\"button\" id=\"help-open\" title=\"Keys and mouse (?)\">Keys</button>\
                 <button type=\"button\" id=\"theme\" title=\"Light or dark\">Theme</button></nav>\n",
                self.sections()
            ),
        );
        if !self.charts.is_empty() || self.categories.is_some() {
            page.push_str("<section id=\"time\"><h2>Where the time went</h2>\n<div class=\"columns\">\n");
            if !self.charts.is_empty() {
                page.push_str("<div>");
                self.charts.iter().for_each(|svg| page.push_str(&html::figure(svg)));
                page.push_str("</div>\n");
            }
            if let Some(bars) = &self.categories {
                self.category_bars(bars, page);
            }
            page.push_str("</div></section>\n");
        }
        if !self.findings.is_empty() {
            page.push_str("<section id=\"findings\"><h2>Findings</h2>\n<ol class=\"findings\">\n");
            self.findings.iter().for_each(|finding| finding_html(page, finding));
            page.push_str("</ol></section>\n");
        }
        html::cards_html(page, &self.cards);
    }

    fn category_bars(&self, bars: &CategoryBars, page: &mut String) {
        put(page, format_args!("<div class=\"categories\"><p class=\"note\">{}</p>\n", escape(&bars.note)));
        let values = |row: &CategoryBar| row.values.iter().filter_map(|cell| cell.sort).fold(0.0, f64::max);
        let largest = bars.rows.iter().map(values).fold(0.0, f64::max);
        let colors = self.colors();
        for (index, row) in bars.rows.iter().enumerate() {
            if index == MOST_BARS {
                let more = human::count((bars.rows.len() - MOST_BARS) as u64);
                put(page, format_args!("<details class=\"more\"><summary>{more} more</summary>\n"));
            }
            let color = colors.get(row.name.as_str()).map(|color| color.variable()).unwrap_or_default();
            put(page, format_args!("<button type=\"button\" class=\"category\" data-find=\"{}\">", escape(&row.name)));
            put(page, format_args!("<span class=\"name\">{}</span><span class=\"bars\">", escape(&row.name)));
            for (cell, side) in row.values.iter().zip(0..) {
                let share = cell.sort.filter(|value| largest > 0.0 && value.is_finite()).map_or(0.0, |v| v / largest);
                put(
                    page,
                    format_args!(
                        "<span class=\"amount side{side}\">{}<i style=\"width:{:.2}%;background:var({color})\"></i>\
                         <b>{}</b></span>",
                        letter(row.values.len(), side),
                        share.clamp(0.0, 1.0) * 100.0,
                        escape(&cell.text)
                    ),
                );
            }
            page.push_str("</span></button>\n");
        }
        if bars.rows.len() > MOST_BARS {
            page.push_str("</details>\n");
        }
        page.push_str("</div>\n");
    }

    /// The places that the script fills.
    fn panels(&self, page: &mut String) {
        let panels = [
            ("iterations", "Iterations", self.has_iterations()),
            ("timeline", "Timeline", self.has_timeline()),
            ("kernels", if self.sides.len() > 1 { "Kernels compared" } else { "Kernels" }, self.kernels.is_some()),
            ("reports", "Reports", !self.reports.is_empty()),
        ];
        for (id, title, _) in panels.iter().filter(|panel| panel.2) {
            put(
                page,
                format_args!("<section id=\"{id}\"><h2>{title}</h2><p class=\"loading\">Loading …</p></section>\n"),
            );
        }
        if !self.notes.is_empty() {
            page.push_str("<section id=\"notes\"><h2>Notes</h2>\n<ul>\n");
            self.notes.iter().for_each(|note| put(page, format_args!("<li>{}</li>\n", html::with_code(note))));
            page.push_str("</ul></section>\n");
        }
    }
}

/// Bars beyond this many are folded away.
const MOST_BARS: usize = 12;

/// Which side of a comparison a bar is of: color says the category.
fn letter(sides: usize, side: usize) -> &'static str {
    match (sides, side) {
        (2, 0) => "<em>A</em>",
        (2, 1) => "<em>B</em>",
        _ => "",
    }
}

fn finding_html(page: &mut String, finding: &Finding) {
    page.push_str("<li><div class=\"what\">");
    if !finding.severity.is_empty() {
        let severity = escape(&finding.severity);
        put(page, format_args!("<span class=\"severity\" data-severity=\"{severity}\">{severity}</span>"));
    }
    let [first, second] = match finding.name.is_empty() {
        true => [finding.title.as_str(), ""],
        false => [finding.name.as_str(), finding.title.as_str()],
    };
    put(page, format_args!("<strong>{}</strong>", escape(first)));
    if !finding.gain.is_empty() {
        put(page, format_args!("<span class=\"gain\">{}</span>", escape(&finding.gain)));
    }
    page.push_str("</div>");
    for text in [second, &finding.detail] {
        if !text.is_empty() {
            put(page, format_args!("<p>{}</p>", html::with_code(text)));
        }
    }
    page.push_str("</li>\n");
}

/// The colors of plots for the whole page, and for the theme that a reader chose.
fn theme(colors: &HashMap<&str, Color>) -> String {
    let (light, dark, shared) = (light(), dark(), shared(colors));
    format!(
        ":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n\
         :root[data-theme=light],:root[data-theme=light] .strobe-chart{{{light}}}\n\
         :root[data-theme=dark],:root[data-theme=dark] .strobe-chart{{{dark}}}\n{shared}"
    )
}
