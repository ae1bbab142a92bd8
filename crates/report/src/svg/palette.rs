//! Colors, one set for light and one for dark: distinguishable with color-blind eyes (after Okabe and Ito). Each has a contrast of
//! at least 3:1 to what it is drawn on, and a text color that reads best on it.

use std::collections::HashMap;
use std::sync::LazyLock;

/// A set of colors.
struct Theme {
    /// Text, quiet text, grid lines, and what marks are drawn on.
    words: [&'static str; 4],
    /// What marks are filled with: one per slot.
    marks: [&'static str; MARKS],
    idle: &'static str,
    unknown: &'static str,
}

const MARKS: usize = 27;

#[rustfmt::skip]
const LIGHT: Theme = Theme {
    words: ["#1c2733", "#5d6b7a", "#dfe5ec", "#ffffff"],
    marks: [
        "#0072b2", "#d55e00", "#008f68", "#b8558f", "#a87400", "#2b8cc4", "#857a00",
        "#117733", "#882255", "#5b4ba8", "#7a5c3e", "#2f7f8c", "#a8444f",
        "#5f7fb0", "#a07f52", "#9a73b5", // causes of waiting
        "#a23b72", "#4b5fc4", "#5f8a1f", // kinds of iteration
        "#1f3a5f", "#d6336c", // the two sides of a comparison
        "#8c6d62", "#55808a", "#84845a", // more waiting, and what is too small for a color of its own
        "#3d5a80", "#94618e", "#5f8a4e", // more names
    ],
    idle: "#68727e",
    unknown: "#8a8a8a",
};

#[rustfmt::skip]
const DARK: Theme = Theme {
    words: ["#e6ebf0", "#9aa7b4", "#33404d", "#19222c"],
    marks: [
        "#4aa8e0", "#ff8a3d", "#2fc79a", "#e09bc4", "#f2b632", "#9fd8f7", "#d6c94a",
        "#4fae6e", "#c9659a", "#9d8ff0", "#b8936b", "#6cc0cf", "#d98a9e",
        "#7f9fd0", "#d1b37a", "#b08fcb",
        "#e070d0", "#6f86f0", "#a9c45c",
        "#d5dde8", "#ff6f9f",
        "#c9a79b", "#93b8bd", "#b5b57c",
        "#8fb3e0", "#c48ad8", "#a5d68a",
    ],
    idle: "#8b95a0",
    unknown: "#7a7a7a",
};

impl Theme {
    /// Every mark with the suffix of its variables.
    fn marks(&self) -> impl Iterator<Item = (String, &'static str)> {
        let slots = self.marks.iter().enumerate().map(|(slot, hex)| (format!("c{slot}"), *hex));
        slots.chain([("idle".to_owned(), self.idle), ("unknown".to_owned(), self.unknown)])
    }

    /// The theme as CSS variables: `--c0` is a fill, `--on-c0` the text on it.
    fn variables(&self) -> String {
        let [ink, muted, grid, paper] = self.words;
        let mut css = format!("--ink:{ink};--muted:{muted};--grid:{grid};--paper:{paper};");
        for (name, hex) in self.marks() {
            css.push_str(&format!("--{name}:{hex};--on-{name}:{};", ink_on(channels(hex))));
        }
        css
    }
}

/// Black or white, whichever reads better on a color: the better one has a contrast of at least 4.5:1 to any.
pub(super) fn ink_on(color: [u8; 3]) -> &'static str {
    if contrast(color, [0; 3]) >= contrast(color, [255; 3]) { "#000" } else { "#fff" }
}

/// The contrast of two colors as WCAG 2 defines it: 1 to 21.
fn contrast(a: [u8; 3], b: [u8; 3]) -> f64 {
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

fn luminance(color: [u8; 3]) -> f64 {
    let [red, green, blue] = color.map(|value| f64::from(value) / 255.0).map(|value| match value <= 0.03928 {
        true => value / 12.92,
        false => ((value + 0.055) / 1.055).powf(2.4),
    });
    0.2126 * red + 0.7152 * green + 0.0722 * blue
}

/// The channels of `#rrggbb`.
fn channels(hex: &str) -> [u8; 3] {
    [1, 3, 5].map(|at| hex.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok()).unwrap_or(0))
}

/// The colors on a light page, as CSS variables.
pub(crate) fn light() -> String {
    LIGHT.variables()
}

/// The colors on a dark page, as CSS variables.
pub(crate) fn dark() -> String {
    DARK.variables()
}

/// The CSS that every plot carries. Rules are confined to `.strobe-chart`, so several plots share a page.
pub(super) static STYLE: LazyLock<String> = LazyLock::new(|| {
    format!(
        "\n.strobe-chart{{{}font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:12px}}\n\
         @media (prefers-color-scheme:dark){{.strobe-chart{{{}}}}}\n{RULES}",
        light(),
        dark()
    )
});

const RULES: &str = "\
.strobe-chart text{fill:var(--ink)}
.strobe-chart .title{font-size:14px;font-weight:600}
.strobe-chart .muted{fill:var(--muted);font-size:11px}
.strobe-chart .inside{font-size:11px;font-weight:600;pointer-events:none}
.strobe-chart .on-light{fill:#000;pointer-events:none}
.strobe-chart .on-dark{fill:#fff;pointer-events:none}
.strobe-chart .grid{stroke:var(--grid);stroke-width:1;fill:none}
.strobe-chart .axis{stroke:var(--muted);stroke-width:1;fill:none}
.strobe-chart .mark{stroke:var(--paper);stroke-width:1}
.strobe-chart .curve{fill:none;stroke-width:2;stroke-linejoin:round}
.strobe-chart .hit:hover{opacity:.75}
";

/// A color of the palette, as a CSS value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Color {
    Slot(usize),
    Idle,
    Unknown,
}

impl Color {
    /// The CSS variable that holds it.
    pub(crate) fn variable(self) -> String {
        format!("--{}", self.name())
    }

    fn name(self) -> String {
        match self {
            Color::Slot(slot) => format!("c{slot}"),
            Color::Idle => "idle".to_owned(),
            Color::Unknown => "unknown".to_owned(),
        }
    }
}

impl std::fmt::Display for Color {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "var({})", self.variable())
    }
}

/// The color of a name: what the page says for all its plots, or this plot's own where there is no page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    hash: u32,
    own: Color,
}

impl Named {
    pub(super) fn new(name: &str, colors: &HashMap<&str, Color>) -> Self {
        Self { hash: hash(name), own: colors.get(name).copied().unwrap_or(Color::Unknown) }
    }

    /// The color of text on it.
    pub(super) fn ink(self) -> String {
        format!("var(--on-n{:08x},var(--on-{}))", self.hash, self.own.name())
    }
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "var(--n{:08x},{})", self.hash, self.own)
    }
}

/// The CSS by which all plots of a page give a name the same color.
pub(crate) fn shared(colors: &HashMap<&str, Color>) -> String {
    let mut rules: Vec<String> = colors
        .iter()
        .map(|(name, color)| {
            let (hash, color) = (hash(name), color.name());
            format!("--n{hash:08x}:var(--{color});--on-n{hash:08x}:var(--on-{color});")
        })
        .collect();
    rules.sort_unstable();
    if rules.is_empty() { String::new() } else { format!(".strobe-chart{{{}}}\n", rules.concat()) }
}

/// Slots that names without a fixed color may get.
const FREE: [usize; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 24, 25, 26];

/// Names that always have the same color, in every plot of every report.
const KNOWN: &[(&str, usize)] = &[
    ("gemm", 0),
    ("attention", 1),
    ("norm", 2),
    ("rope", 3),
    ("activation", 4),
    ("sampling", 5),
    ("embedding", 6),
    ("gather", 7),
    ("softmax", 8),
    ("schedule", 9),
    ("prepare", 10),
    ("respond", 11),
    ("sample", 12),
    ("prefill", 16),
    ("decode", 17),
    ("mixed", 18),
    ("waited for a CPU", 21),
    ("between iterations", 22),
    ("smaller parts", 23),
];

/// The color of a series that stands for a run: by its place, so that neighbors differ most. The first two are those of the
/// sides of a comparison, which no category has.
pub(super) fn series(index: usize) -> Color {
    const ORDER: [usize; 8] = [19, 20, 2, 9, 4, 5, 8, 10];
    Color::Slot(ORDER[index % ORDER.len()])
}

/// The colors of these names within one plot or page. Known names have fixed ones, others one that depends on the
/// name alone, unless another name has it already and one is still free.
pub(crate) fn by_name<'a>(names: impl IntoIterator<Item = &'a str>) -> HashMap<&'a str, Color> {
    let mut colors = HashMap::new();
    let mut others = Vec::new();
    for name in names {
        let known = KNOWN.iter().find(|(n, _)| *n == name);
        match (name, known) {
            ("unknown" | "unclassified", _) => drop(colors.insert(name, Color::Unknown)),
            (_, None) if waits(name).is_some() => drop(waits(name).map(|gray| colors.insert(name, gray))),
            (_, Some(&(_, slot))) => drop(colors.insert(name, Color::Slot(slot))),
            (_, None) => others.push(name),
        }
    }
    for name in others {
        if colors.contains_key(name) {
            continue;
        }
        let wanted = hash(name) as usize % FREE.len();
        let free = (FREE.iter().cycle().skip(wanted).take(FREE.len()).copied())
            .find(|slot| !colors.values().any(|c| *c == Color::Slot(*slot)));
        colors.insert(name, Color::Slot(free.unwrap_or(FREE[wanted])));
    }
    colors
}

/// The quiet color of a name that says that nothing ran: one per cause.
fn waits(name: &str) -> Option<Color> {
    match name {
        _ if name.contains("idle") && name.contains("launch") => Some(Color::Slot(13)),
        _ if name.contains("idle") && name.contains("host") => Some(Color::Slot(14)),
        _ if name.starts_with("sync") => Some(Color::Slot(15)),
        _ if name.contains("idle") => Some(Color::Idle),
        _ => None,
    }
}

/// FNV-1a: the standard library's hash differs between versions, and colors should not.
fn hash(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |h, byte| (h ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colors_are_stable_and_distinct_within_a_plot() {
        let names = ["gemm", "idle", "quantize", "reduce", "gemm", "moe", "copy", "decode", "prefill", "mixed"];
        let colors = by_name(names);
        assert_eq!(colors["gemm"], Color::Slot(0));
        assert_eq!(colors["idle"], Color::Idle);
        assert_eq!(by_name(["quantize"])["quantize"], by_name(["quantize", "idle"])["quantize"]);
        let distinct: std::collections::HashSet<_> = colors.values().collect();
        assert_eq!(distinct.len(), colors.len());
        assert!(colors.values().all(|color| *color != series(0) && *color != series(1)));
    }

    #[test]
    fn more_names_than_colors_still_get_one() {
        let names: Vec<String> = (0..40).map(|i| format!("name {i}")).collect();
        assert_eq!(by_name(names.iter().map(String::as_str)).len(), 40);
    }

    #[test]
    fn every_color_is_legible() {
        for theme in [LIGHT, DARK] {
            let [ink, muted, _, paper] = theme.words.map(channels);
            assert!(contrast(ink, paper) >= 4.5 && contrast(muted, paper) >= 4.5);
            let mut seen = std::collections::HashSet::new();
            for (name, hex) in theme.marks() {
                let color = channels(hex);
                assert!(contrast(color, paper) >= 3.0, "{name} {hex}: {:.2}", contrast(color, paper));
                let words = if ink_on(color) == "#000" { [0; 3] } else { [255; 3] };
                assert!(contrast(color, words) >= 4.5, "{name} {hex}: {:.2}", contrast(color, words));
                assert!(seen.insert(hex), "{name} {hex} is there twice");
            }
        }
        assert!((contrast([255; 3], [0; 3]) - 21.0).abs() < 1e-9);
    }
}
