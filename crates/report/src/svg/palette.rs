//! Colours: told apart with colour-blind eyes (Okabe-Ito, extended), one set for light and one for dark.

use std::collections::HashMap;

macro_rules! light {
    () => {
        "--ink:#1c2733;--muted:#5d6b7a;--grid:#dfe5ec;--paper:#ffffff;\
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#e69f00;--c5:#56b4e9;--c6:#a6961b;\
--c7:#117733;--c8:#882255;--c9:#5b4ba8;--c10:#7a5c3e;--c11:#3d7f8c;--c12:#a3566b;\
--c13:#8693a1;--c14:#a7b1bc;--c15:#c3a79b;--idle:#b4bdc8;--unknown:#dde2e8;"
    };
}

macro_rules! dark {
    () => {
        "--ink:#e6ebf0;--muted:#9aa7b4;--grid:#33404d;--paper:#19222c;\
--c0:#4aa8e0;--c1:#ff8a3d;--c2:#2fc79a;--c3:#e09bc4;--c4:#f2b632;--c5:#9fd8f7;--c6:#d6c94a;\
--c7:#4fae6e;--c8:#c9659a;--c9:#9d8ff0;--c10:#b8936b;--c11:#6cc0cf;--c12:#d98a9e;\
--c13:#8492a0;--c14:#5f6c79;--c15:#8d7468;--idle:#66727f;--unknown:#3d4854;"
    };
}

/// The colours on a light page, as CSS variables.
pub(crate) const LIGHT: &str = light!();

/// The colours on a dark page, as CSS variables.
pub(crate) const DARK: &str = dark!();

/// The CSS that every plot carries. Rules are confined to `.strobe-chart`, so several plots share a page.
pub(super) const STYLE: &str = concat!(
    "\n.strobe-chart{",
    light!(),
    "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:12px}\n\
@media (prefers-color-scheme:dark){.strobe-chart{",
    dark!(),
    "}}\n\
.strobe-chart text{fill:var(--ink)}
.strobe-chart .title{font-size:14px;font-weight:600}
.strobe-chart .muted{fill:var(--muted);font-size:11px}
.strobe-chart .inside{fill:#fff;font-size:11px;font-weight:600;pointer-events:none;paint-order:stroke;stroke:rgba(0,0,0,.45);stroke-width:2px}
.strobe-chart .on-light{fill:#1c2733;pointer-events:none}
.strobe-chart .on-dark{fill:#fff;pointer-events:none}
.strobe-chart .grid{stroke:var(--grid);stroke-width:1;fill:none}
.strobe-chart .axis{stroke:var(--muted);stroke-width:1;fill:none}
.strobe-chart .mark{stroke:var(--paper);stroke-width:1}
.strobe-chart .curve{fill:none;stroke-width:2;stroke-linejoin:round}
.strobe-chart .hit:hover{opacity:.75}
"
);

/// A colour of the palette, as a CSS value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Colour {
    Slot(usize),
    Idle,
    Unknown,
}

impl Colour {
    /// The CSS variable that holds it.
    pub(crate) fn variable(self) -> String {
        match self {
            Colour::Slot(slot) => format!("--c{slot}"),
            Colour::Idle => "--idle".to_owned(),
            Colour::Unknown => "--unknown".to_owned(),
        }
    }
}

impl std::fmt::Display for Colour {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "var({})", self.variable())
    }
}

const SLOTS: usize = 13;

/// Names that always have the same colour, in every plot of every report.
const KNOWN: &[(&str, usize)] = &[
    ("gemm", 0),
    ("decode", 0),
    ("attention", 1),
    ("prefill", 1),
    ("norm", 2),
    ("rope", 3),
    ("activation", 4),
    ("mixed", 4),
    ("sampling", 5),
    ("embedding", 6),
    ("gather", 7),
    ("softmax", 8),
    ("schedule", 9),
    ("prepare", 10),
    ("respond", 11),
    ("sample", 12),
];

/// The colour of a series that stands for a run: by its place, so that neighbours differ most.
pub(super) fn series(index: usize) -> Colour {
    const ORDER: [usize; 8] = [0, 1, 2, 9, 4, 8, 5, 10];
    Colour::Slot(ORDER[index % ORDER.len()])
}

/// The colours of these names within one plot. Known names have fixed ones, others one that depends on the
/// name alone, unless another name of the plot has it already and one is still free.
pub(crate) fn by_name<'a>(names: impl IntoIterator<Item = &'a str>) -> HashMap<&'a str, Colour> {
    let mut colours = HashMap::new();
    let mut others = Vec::new();
    for name in names {
        let known = KNOWN.iter().find(|(n, _)| *n == name);
        match (name, known) {
            ("unknown" | "unclassified", _) => drop(colours.insert(name, Colour::Unknown)),
            (_, None) if waits(name).is_some() => drop(waits(name).map(|grey| colours.insert(name, grey))),
            (_, Some(&(_, slot))) => drop(colours.insert(name, Colour::Slot(slot))),
            (_, None) => others.push(name),
        }
    }
    for name in others {
        if colours.contains_key(name) {
            continue;
        }
        let wanted = hash(name) as usize % SLOTS;
        let free = (0..SLOTS)
            .map(|step| (wanted + step) % SLOTS)
            .find(|slot| !colours.values().any(|c| *c == Colour::Slot(*slot)));
        colours.insert(name, Colour::Slot(free.unwrap_or(wanted)));
    }
    colours
}

/// The grey of a name that says that nothing ran: one per cause.
fn waits(name: &str) -> Option<Colour> {
    match name {
        _ if name.contains("idle") && name.contains("launch") => Some(Colour::Slot(13)),
        _ if name.contains("idle") && name.contains("host") => Some(Colour::Slot(14)),
        _ if name.starts_with("sync") => Some(Colour::Slot(15)),
        _ if name.contains("idle") => Some(Colour::Idle),
        _ => None,
    }
}

/// FNV-1a: the standard library's hash differs between versions, and colours should not.
fn hash(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |h, byte| (h ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_stable_and_distinct_within_a_plot() {
        let names = ["gemm", "idle", "quantize", "reduce", "gemm", "moe", "copy"];
        let colours = by_name(names);
        assert_eq!(colours["gemm"], Colour::Slot(0));
        assert_eq!(colours["idle"], Colour::Idle);
        assert_eq!(by_name(["quantize"])["quantize"], by_name(["quantize", "idle"])["quantize"]);
        let distinct: std::collections::HashSet<_> = colours.values().collect();
        assert_eq!(distinct.len(), colours.len());
    }

    #[test]
    fn more_names_than_colours_still_get_one() {
        let names: Vec<String> = (0..40).map(|i| format!("name {i}")).collect();
        assert_eq!(by_name(names.iter().map(String::as_str)).len(), 40);
    }
}
