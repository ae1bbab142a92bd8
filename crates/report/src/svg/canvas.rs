//! Writes the elements of a plot, escaped.

use std::fmt::Write;

use super::Svg;
use super::palette::{Colour, STYLE};
use crate::escape::escape;
use crate::explorer::base64;

/// Width of every plot; it scales to the page.
pub(super) const WIDTH: f64 = 860.0;

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
}

impl Canvas {
    /// A canvas with its title drawn in the top left corner.
    pub(super) fn new(title: &str) -> Self {
        let mut canvas = Self { body: String::new(), title: title.to_owned() };
        canvas.text(0.0, 16.0, "title", Anchor::Start, title);
        canvas
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

    pub(super) fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64, class: &str) {
        self.put(format_args!("<path d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\" class=\"{class}\"/>"));
    }

    /// A filled rectangle with a tooltip.
    pub(super) fn rect(&mut self, x: f64, y: f64, w: f64, h: f64, fill: Colour, tip: &str) {
        let tip = escape(tip);
        self.put(format_args!(
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{w:.2}\" height=\"{h:.2}\" class=\"hit\" style=\"fill:{fill}\"><title>{tip}</title></rect>"
        ));
    }

    /// A rectangle of a colour that is the same on light and dark pages; the tooltip may be empty.
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
    pub(super) fn curve(&mut self, points: &[(f64, f64)], colour: Colour) {
        let mut path = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let command = if i == 0 { 'M' } else { 'L' };
            // Writing to a string cannot fail.
            let _ = write!(path, "{command}{x:.1} {y:.1}");
        }
        self.put(format_args!("<path d=\"{path}\" class=\"curve\" style=\"stroke:{colour}\"/>"));
    }

    /// A dot with a tooltip.
    pub(super) fn dot(&mut self, x: f64, y: f64, colour: Colour, tip: &str) {
        let tip = escape(tip);
        self.put(format_args!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" class=\"mark hit\" style=\"fill:{colour}\"><title>{tip}</title></circle>"
        ));
    }

    /// Names with their colours below the title, in as many lines as they need. Returns where the plot begins.
    pub(super) fn legend<'a>(&mut self, names: impl IntoIterator<Item = (&'a str, Colour)>) -> f64 {
        let (mut x, mut y) = (0.0, 36.0);
        for (name, colour) in names {
            let width = 18.0 + text_width(name) + 18.0;
            if x > 0.0 && x + width > WIDTH {
                (x, y) = (0.0, y + 18.0);
            }
            self.put(format_args!(
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" rx=\"2\" style=\"fill:{colour}\"/>",
                y - 10.0
            ));
            self.text(x + 18.0, y, "", Anchor::Start, name);
            x += width;
        }
        y + 14.0
    }

    /// What stands in place of a plot without values.
    pub(super) fn nothing(mut self) -> Svg {
        self.text(0.0, 42.0, "muted", Anchor::Start, "no values");
        self.finish(56.0)
    }

    pub(super) fn finish(self, height: f64) -> Svg {
        let title = escape(&self.title);
        let body = self.body;
        Svg(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"strobe-chart\" viewBox=\"0 0 {WIDTH} {height:.0}\" width=\"{WIDTH}\" height=\"{height:.0}\" role=\"img\" aria-label=\"{title}\">\n<style>{STYLE}</style>\n{body}</svg>\n"
        ))
    }

    fn put(&mut self, element: std::fmt::Arguments) {
        let _ = writeln!(self.body, "{element}");
    }
}

/// About how wide a text of the plot's font is.
pub(super) fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * 6.9
}
