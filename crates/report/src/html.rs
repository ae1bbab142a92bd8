//! One self-contained page: no network, no external fonts, light and dark.

use std::fmt::Write;

use crate::escape::escape;
use crate::svg::Svg;
use crate::svg::palette::{by_name, shared};
use crate::table::{Align, Table};

pub(crate) const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// A key figure at the top of a page.
#[derive(Clone, Debug, Default)]
pub struct Card {
    label: String,
    value: String,
    unit: String,
    note: String,
}

impl Card {
    /// A figure with its label.
    pub fn new(label: impl Into<String>, value: impl Into<String>) -> Self {
        Self { label: label.into(), value: value.into(), ..Self::default() }
    }

    /// Sets the unit that follows the value.
    pub fn unit(mut self, unit: impl Into<String>) -> Self {
        self.unit = unit.into();
        self
    }

    /// The figure in a few words, for a sentence: `Span 51.2 ms`.
    pub fn in_words(&self) -> String {
        let space = if self.unit.is_empty() { "" } else { " " };
        format!("{} {}{space}{}", self.label, self.value, self.unit)
    }

    /// Sets a small line below: the denominator, the baseline.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }
}

/// A way to another page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    label: String,
    href: String,
}

impl Link {
    /// A link that shows `label`; `href` is an address relative to the page, so that a folder of pages can be moved.
    pub fn new(label: impl Into<String>, href: impl Into<String>) -> Self {
        Self { label: label.into(), href: href.into() }
    }
}

/// Builds a page from top to bottom: the answer, what it is about, the first section with its picture, the key figures, the
/// other sections. Everything but a [`Svg`] is escaped.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    subtitle: String,
    verdict: String,
    links: Vec<Link>,
    cards: Vec<Card>,
    /// Names whose color all plots agree on.
    names: Vec<String>,
    sections: Vec<Section>,
}

#[derive(Clone, Debug)]
struct Section {
    title: String,
    body: String,
}

impl Page {
    /// A page with this title and nothing on it.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            subtitle: String::new(),
            verdict: String::new(),
            links: Vec::new(),
            cards: Vec::new(),
            names: Vec::new(),
            sections: Vec::new(),
        }
    }

    /// Sets the line below the title: machine, model, date.
    pub fn subtitle(mut self, subtitle: impl Into<String>) -> Self {
        self.subtitle = subtitle.into();
        self
    }

    /// Sets the answer: the first line of the page.
    pub fn verdict(mut self, sentence: impl Into<String>) -> Self {
        self.verdict = sentence.into();
        self
    }

    /// Adds a link to another page.
    pub fn link(mut self, link: Link) -> Self {
        self.links.push(link);
        self
    }

    /// Adds a key figure.
    pub fn card(mut self, card: Card) -> Self {
        self.cards.push(card);
        self
    }

    /// Begins a section; what follows belongs to it.
    pub fn section(mut self, title: impl Into<String>) -> Self {
        self.sections.push(Section { title: title.into(), body: String::new() });
        self
    }

    /// Adds text: paragraphs separated by empty lines, `code` between backticks.
    pub fn prose(self, text: &str) -> Self {
        let mut html = String::new();
        for paragraph in text.split("\n\n").filter(|p| !p.trim().is_empty()) {
            put(&mut html, format_args!("<p>{}</p>\n", with_code(paragraph.trim())));
        }
        self.add(&html)
    }

    /// Adds a plot.
    pub fn svg(mut self, svg: &Svg) -> Self {
        self.names.extend(svg.names().map(str::to_owned));
        self.add(&figure(svg))
    }

    /// Adds a plot, folded away under a summary.
    pub fn folded_svg(mut self, summary: &str, svg: &Svg) -> Self {
        self.names.extend(svg.names().map(str::to_owned));
        self.add(&format!("<details><summary>{}</summary>{}</details>\n", escape(summary), figure(svg)))
    }

    /// Adds a table that sorts by a click on a header.
    pub fn table(self, table: &Table) -> Self {
        self.add(&table_html(table))
    }

    /// Adds text as it is, folded away under a summary: raw configuration, logs.
    pub fn details(self, summary: &str, raw: &str) -> Self {
        self.add(&format!("<details><summary>{}</summary><pre>{}</pre></details>\n", escape(summary), escape(raw)))
    }

    /// The whole page.
    pub fn finish(self) -> String {
        let title = escape(&self.title);
        let colors = shared(&by_name(self.names.iter().map(String::as_str)));
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n\
             <title>{title}</title>\n<style>\n{STYLE}{colors}</style>\n</head>\n<body class=\"page\">\n<main>\n<header>"
        );
        header(&mut page, &self.title, &self.verdict, &self.subtitle, &self.links);
        page.push_str("</header>\n");
        let mut sections = self.sections.iter();
        sections.by_ref().take(1).for_each(|section| section_html(&mut page, section));
        cards_html(&mut page, &self.cards);
        sections.for_each(|section| section_html(&mut page, section));
        put(&mut page, format_args!("</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"));
        page
    }

    /// Content before the first section goes into one without a title.
    fn add(mut self, html: &str) -> Self {
        if self.sections.is_empty() {
            self = self.section("");
        }
        if let Some(section) = self.sections.last_mut() {
            section.body.push_str(html);
        }
        self
    }
}

/// Text as markup, `code` between backticks.
pub(crate) fn with_code(text: &str) -> String {
    let pieces = text.split('`').enumerate().map(|(i, piece)| match i % 2 {
        0 => escape(piece).into_owned(),
        _ => format!("<code>{}</code>", escape(piece)),
    });
    pieces.collect()
}

/// The first lines of a page: the answer where there is one, then what it is the answer for, then the ways to other pages.
pub(crate) fn header(page: &mut String, title: &str, verdict: &str, subtitle: &str, links: &[Link]) {
    let (title, verdict, subtitle) = (escape(title), escape(verdict), escape(subtitle));
    match verdict.is_empty() {
        true => put(page, format_args!("<h1>{title}</h1>\n<p class=\"subtitle\">{subtitle}</p>\n")),
        false => put(
            page,
            format_args!("<h1 class=\"verdict\">{verdict}</h1>\n<p class=\"subtitle\"><b>{title}</b> {subtitle}</p>\n"),
        ),
    }
    if !links.is_empty() {
        page.push_str("<nav class=\"links\">");
        for Link { label, href } in links {
            put(page, format_args!("<a href=\"{}\">{}</a>", escape(href), escape(label)));
        }
        page.push_str("</nav>\n");
    }
}

/// A plot for wide and for narrow places; the style sheet shows one.
pub(crate) fn figure(svg: &Svg) -> String {
    format!("<figure><div class=\"wide\">{svg}</div><div class=\"narrow\">{}</div></figure>\n", svg.narrow())
}

fn section_html(page: &mut String, section: &Section) {
    page.push_str("<section>\n");
    if !section.title.is_empty() {
        put(page, format_args!("<h2>{}</h2>\n", escape(&section.title)));
    }
    put(page, format_args!("{}</section>\n", section.body));
}

pub(crate) fn cards_html(page: &mut String, cards: &[Card]) {
    if !cards.is_empty() {
        page.push_str("<div class=\"cards\">\n");
        cards.iter().for_each(|card| card_html(page, card));
        page.push_str("</div>\n");
    }
}

fn card_html(page: &mut String, card: &Card) {
    put(page, format_args!("<div class=\"card\"><div class=\"label\">{}</div>", escape(&card.label)));
    put(page, format_args!("<div class=\"value\">{}", escape(&card.value)));
    if !card.unit.is_empty() {
        put(page, format_args!(" <span class=\"unit\">{}</span>", escape(&card.unit)));
    }
    page.push_str("</div>");
    if !card.note.is_empty() {
        put(page, format_args!("<div class=\"note\">{}</div>", escape(&card.note)));
    }
    page.push_str("</div>\n");
}

/// Tables with at most this many columns fit a phone.
const FEW_COLUMNS: usize = 3;

fn table_html(table: &Table) -> String {
    let class = |column: usize| match table.align.get(column) {
        Some(Align::Left) => "",
        _ => " class=\"n\"",
    };
    // Where there is no room for many columns, a row becomes a block of names and values.
    let many = table.headers.len() > FEW_COLUMNS;
    let mut html = String::from(if many {
        "<div class=\"scroll\"><table class=\"many\">"
    } else {
        "<div class=\"scroll\"><table>"
    });
    if let Some(title) = &table.title {
        put(&mut html, format_args!("<caption>{}</caption>", escape(title)));
    }
    html.push_str("<thead><tr>");
    for (column, header) in table.headers.iter().enumerate() {
        // A button, so that the keyboard reaches it.
        put(
            &mut html,
            format_args!("<th{} scope=\"col\"><button type=\"button\">{}</button></th>", class(column), escape(header)),
        );
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    let row_html = |html: &mut String, row: &crate::table::Row| {
        html.push_str("<tr>");
        for (column, cell) in row.cells.iter().enumerate() {
            put(html, format_args!("<td{}", class(column)));
            if let Some(header) = table.headers.get(column).filter(|_| many && column > 0) {
                put(html, format_args!(" data-l=\"{}\"", escape(header)));
            }
            if let Some(value) = cell.sort {
                put(html, format_args!(" data-v=\"{value}\""));
            }
            put(html, format_args!(">{}</td>", escape(&cell.text)));
        }
        html.push_str("</tr>\n");
    };
    table.rows.iter().filter(|r| !r.total).for_each(|r| row_html(&mut html, r));
    html.push_str("</tbody>\n");
    if table.rows.iter().any(|r| r.total) {
        html.push_str("<tfoot>\n");
        table.rows.iter().filter(|r| r.total).for_each(|r| row_html(&mut html, r));
        html.push_str("</tfoot>\n");
    }
    html.push_str("</table></div>\n");
    html
}

pub(crate) fn put(html: &mut String, text: std::fmt::Arguments) {
    // Writing to a string cannot fail.
    let _ = html.write_fmt(text);
}
