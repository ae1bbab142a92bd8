//! Writes the elements of a plot, escaped.

use std::fmt::{Display, Write};

use super::palette::{Named, STYLE};
use super::scale::Axis;
use crate::escape::escape;
use crate::explorer::base64;
use crate::table::{shorten, wrap};

/// Width of a plot in a file and where a page has room; it scales to its place.
pub(super) const WIDE: f64 = 860.0;
/// Width of the same plot where a page has little room: on a phone, in a column.
pub(super) const NARROW: f64 = 400.0;

/// Where a text stands relative to its point.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// A plot being drawn. Elements appear in the order of the calls.
pub(super) struct Canvas {
    body: String,
    title: String,
    pub(super) width: f64,
    /// Baseline of the title's last line.
    below_title: f64,
    /// Names whose color the whole page must agree on.
    names: Vec<String>,
}

/// A finished plot at one width.
pub(super) struct Drawn {
    pub(super) text: String,
    pub(super) names: Vec<String>,
}

impl Canvas {
    /// A canvas with its title drawn in the top left corner, on as many lines as it needs.
    pub(super) fn new(title: &str, width: f64) -> Self {
        const LETTER: f64 = 8.6;
        let mut canvas =
            Self { body: String::new(), title: title.to_owned(), width, below_title: 16.0, names: Vec::new() };
        let letters = (width / LETTER) as usize;
        for (index, line) in wrap(title, letters).iter().enumerate() {
            canvas.below_title = 16.0 + 18.0 * index as f64;
            canvas.text(0.0, canvas.below_title, "title", Anchor::Start, &shorten(line, letters));
        }
        canvas
    }

    /// Whether there is little room.
    pub(super) fn is_narrow(&self) -> bool {
        self.width < WIDE
    }

    /// Baseline of the title's last line.
    pub(super) fn below_title(&self) -> f64 {
        self.below_title
    }

    pub(super) fn text(&mut self, x: f64, y: f64, class: &str, anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(text);
        self.put(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\" text-anchor=\"{anchor}\">{text}</text>"
        ));
    }

    /// Text in the middle of a mark of this color.
    pub(super) fn inside(&mut self, x: f64, y: f64, color: Named, text: &str) {
        let (ink, text) = (color.ink(), escape(text));
        self.put(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"inside\" style=\"fill:{ink}\" text-anchor=\"middle\">{text}</text>"
        ));
    }

    pub(super) fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64, class: &str) {
        self.put(format_args!("<path d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\" class=\"{class}\"/>"));
    }

    /// A filled rectangle with a tooltip.
    pub(super) fn rect(&mut self, x: f64, y: f64, w: f64, h: f64, fill: impl Display, tip: &str) {
        let tip = escape(tip);
        self.put(format_args!(
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{w:.2}\" height=\"{h:.2}\" class=\"hit\" style=\"fill:{fill}\"><title>{tip}</title></rect>"
        ));
    }

    /// A rectangle of a color that is the same on light and dark pages; the tooltip may be empty.
    pub(super) fn cell(&mut self, x: f64, y: f64, w: f64, h: f64, [red, green, blue]: [u8; 3], tip: &str) {
        let tip = if tip.is_empty() { String::new() } else { format!("<title>{}</title>", escape(tip)) };
        self.put(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" fill=\"#{red:02x}{green:02x}{blue:02x}\">{tip}</rect>"
        ));
    }

    /// A PNG picture, its pixels drawn as they are.
    pub(super) fn picture(&mut self, x: f64, y: f64, w: f64, h: f64, png: &[u8]) {
        let data = base64(png);
        self.put(format_args!(
            "<image x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" preserveAspectRatio=\"none\" style=\"image-rendering:pixelated\" href=\"data:image/png;base64,{data}\"/>"
        ));
    }

    /// A line through points.
    pub(super) fn curve(&mut self, points: &[(f64, f64)], color: impl Display) {
        let mut path = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let command = if i == 0 { 'M' } else { 'L' };
            // Writing to a string cannot fail.
            let _ = write!(path, "{command}{x:.1} {y:.1}");
        }
        self.put(format_args!("<path d=\"{path}\" class=\"curve\" style=\"stroke:{color}\"/>"));
    }

    /// A dot with a tooltip.
    pub(super) fn dot(&mut self, x: f64, y: f64, color: impl Display, tip: &str) {
        let tip = escape(tip);
        self.put(format_args!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" class=\"mark hit\" style=\"fill:{color}\"><title>{tip}</title></circle>"
        ));
    }

    /// Names with their colors below the title, in as many lines as they need. Returns where the plot begins.
    pub(super) fn legend<'a, C: Display>(&mut self, names: impl IntoIterator<Item = (&'a str, C)>) -> f64 {
        let (mut x, mut y) = (0.0, self.below_title + 20.0);
        let longest = ((self.width - 20.0) / text_width("x")) as usize;
        for (name, color) in names {
            let shown = shorten(name, longest);
            let width = 18.0 + text_width(&shown) + 18.0;
            if x > 0.0 && x + width - 18.0 > self.width {
                (x, y) = (0.0, y + 18.0);
            }
            self.put(format_args!(
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" rx=\"2\" class=\"key\" style=\"fill:{color}\"/>",
                y - 10.0
            ));
            self.text(x + 18.0, y, "", Anchor::Start, &shown);
            x += width;
        }
        y + 14.0
    }

    /// The same where there are several; a single one has the title to itself.
    pub(super) fn legend_of_several<C: Display>(&mut self, names: &[(&str, C)]) -> f64 {
        match names {
            [] | [_] => self.below_title + 14.0,
            names => self.legend(names.iter().map(|(name, color)| (*name, color))),
        }
    }

    /// The same for names that have one color on the whole page.
    pub(super) fn named_legend(&mut self, names: &[(&str, Named)]) -> f64 {
        self.names.extend(names.iter().map(|(name, _)| (*name).to_owned()));
        self.legend(names.iter().copied())
    }

    /// What stands in place of a plot without values.
    pub(super) fn nothing(mut self) -> Drawn {
        let y = self.below_title + 26.0;
        self.text(0.0, y, "muted", Anchor::Start, "no values");
        self.finish(y + 14.0)
    }

    pub(super) fn finish(self, height: f64) -> Drawn {
        let title = escape(&self.title);
        let (body, width) = (self.body, self.width);
        // On a page the wide plot's style holds for its narrow twin too.
        let style = if width < WIDE { String::new() } else { format!("<style>{}</style>\n", *STYLE) };
        let text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"strobe-chart\" viewBox=\"0 0 {width} {height:.0}\" width=\"{width}\" height=\"{height:.0}\" role=\"img\" aria-label=\"{title}\">\n{style}{body}</svg>\n"
        );
        Drawn { text, names: self.names }
    }

    fn put(&mut self, element: std::fmt::Arguments) {
        let _ = writeln!(self.body, "{element}");
    }
}

/// Room that the last label of a scale needs beyond the scale's end.
pub(super) fn last_label(axis: &Axis) -> f64 {
    axis.ticks.last().map_or(0.0, |(_, label)| text_width(label) / 2.0)
}

/// About how wide a text of the plot's font is.
pub(super) fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * 7.4
}
