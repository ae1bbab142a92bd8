//! Names of ranges that engines put around their forward steps.

use std::sync::OnceLock;

use regex::{Captures, Regex};
use strobe_trace::IterationKind;

/// What the name of a marker says.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Marker {
    pub number: Option<u64>,
    pub kind: Option<IterationKind>,
    pub context_requests: Option<u32>,
    pub generation_requests: Option<u32>,
    pub context_tokens: Option<u32>,
    pub generation_tokens: Option<u32>,
}

impl Marker {
    /// Takes what is unknown here from another marker of the same step, unless the two disagree about its kind.
    pub(super) fn fill_in(&mut self, other: &Marker) {
        self.number = self.number.or(other.number);
        if self.kind.is_some() && other.kind.is_some() && self.kind != other.kind {
            return;
        }
        self.kind = self.kind.or(other.kind);
        self.context_requests = self.context_requests.or(other.context_requests);
        self.generation_requests = self.generation_requests.or(other.generation_requests);
        self.context_tokens = self.context_tokens.or(other.context_tokens);
        self.generation_tokens = self.generation_tokens.or(other.generation_tokens);
    }
}

/// A way of writing markers, the most informative first: where two mark the same step the first is believed.
pub(super) struct Family {
    pub name: &'static str,
    pattern: &'static str,
    read: fn(&Captures) -> Marker,
}

pub(super) static FAMILIES: [Family; 7] = [
    Family {
        name: "vLLM execute_<tokens>_context_<n>(..)_generation_<n>(..)",
        pattern: r"^execute_\d+_context_(\d+)\((?:sq)?(\d*)[^)]*\)_generation_(\d+)\((?:sq)?(\d*)[^)]*\)",
        read: requests_and_tokens,
    },
    Family {
        name: "vLLM execute_context_<n>(<tokens>)_generation_<n>(<tokens>)",
        pattern: r"^execute_context_(\d+)\((?:sq)?(\d*)[^)]*\)_generation_(\d+)\((?:sq)?(\d*)[^)]*\)",
        read: requests_and_tokens,
    },
    Family {
        name: "<N>: <X> ctx reqs, <Y> gen reqs",
        pattern: r"(?:^|\b|_)(?:forward_step|iteration|iter|step)[ _#]*(\d+): *(\d+) ctx reqs?, *(\d+) gen reqs?",
        read: |c| {
            with_kind(Marker {
                number: number(c, 1),
                context_requests: count(c, 2),
                generation_requests: count(c, 3),
                ..Marker::default()
            })
        },
    },
    Family {
        name: "SGLang step[<MODE> bs=<n> toks=<n>]",
        pattern: r"^step\[(\w+)(?: bs=(\d+))?(?: toks=(\d+))?[^\]]*\]",
        read: sglang,
    },
    Family {
        name: "vLLM execute_new_<n>_cached_<n>",
        pattern: r"^execute_new_(\d+)_cached_(\d+)",
        read: new_and_cached,
    },
    Family {
        name: "iteration <N>",
        pattern: r"(?i)^(?:iteration|iter|step|(?:train|training|decode|prefill|forward|engine)[ _]step)[ _#:=]*(\d+)$",
        read: |c| Marker { number: number(c, 1), ..Marker::default() },
    },
    Family {
        name: "ProfilerStep#<N>",
        pattern: r"^ProfilerStep#(\d+)",
        read: |c| Marker { number: number(c, 1), ..Marker::default() },
    },
];

/// The index of the family that a profiler writes, not an engine.
pub(super) const PROFILER_STEP: usize = FAMILIES.len() - 1;

fn number(captures: &Captures, group: usize) -> Option<u64> {
    captures.get(group)?.as_str().parse().ok()
}

fn count(captures: &Captures, group: usize) -> Option<u32> {
    captures.get(group)?.as_str().parse().ok()
}

/// Prefill, decode or both, where both numbers of requests are known and not both zero.
fn with_kind(mut marker: Marker) -> Marker {
    marker.kind = match (marker.context_requests, marker.generation_requests) {
        (Some(0), Some(0)) => None,
        (Some(_), Some(0)) => Some(IterationKind::Prefill),
        (Some(0), Some(_)) => Some(IterationKind::Decode),
        (Some(_), Some(_)) => Some(IterationKind::Mixed),
        _ => None,
    };
    marker
}

fn requests_and_tokens(c: &Captures) -> Marker {
    with_kind(Marker {
        context_requests: count(c, 1),
        context_tokens: count(c, 2),
        generation_requests: count(c, 3),
        generation_tokens: count(c, 4),
        ..Marker::default()
    })
}

fn sglang(c: &Captures) -> Marker {
    let (batch, tokens) = (count(c, 2), count(c, 3));
    let mode = c.get(1).map_or("", |m| m.as_str());
    match mode {
        "EXTEND" | "PREFILL" => Marker {
            kind: Some(IterationKind::Prefill),
            context_requests: batch,
            context_tokens: tokens,
            generation_requests: Some(0),
            generation_tokens: Some(0),
            ..Marker::default()
        },
        "DECODE" => Marker {
            kind: Some(IterationKind::Decode),
            context_requests: Some(0),
            context_tokens: Some(0),
            generation_requests: batch,
            // Without speculation, which has modes of its own, every request of a decode step gets one token.
            generation_tokens: tokens.or(batch),
            ..Marker::default()
        },
        "MIXED" => Marker { kind: Some(IterationKind::Mixed), ..Marker::default() },
        "TARGET_VERIFY" => Marker {
            kind: Some(IterationKind::Decode),
            generation_requests: batch,
            generation_tokens: tokens,
            ..Marker::default()
        },
        _ => Marker::default(),
    }
}

/// New requests are in their context phase; cached ones may be in either, as long prompts come in pieces.
fn new_and_cached(c: &Captures) -> Marker {
    match (count(c, 1), count(c, 2)) {
        (Some(new), Some(0)) if new > 0 => {
            with_kind(Marker { context_requests: Some(new), generation_requests: Some(0), ..Marker::default() })
        }
        _ => Marker::default(),
    }
}

/// What a name says as a marker: the index of its family and what is in it.
pub(super) fn parse(name: &str) -> Option<(usize, Marker)> {
    static PATTERNS: OnceLock<Vec<Regex>> = OnceLock::new();
    let patterns = PATTERNS
        .get_or_init(|| FAMILIES.iter().map(|f| Regex::new(f.pattern).expect("the patterns are tested")).collect());
    let found = patterns.iter().zip(&FAMILIES).enumerate();
    found.into_iter().find_map(|(index, (pattern, family))| Some((index, (family.read)(&pattern.captures(name)?))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str) -> Marker {
        parse(name).unwrap_or_else(|| panic!("{name} is a marker")).1
    }

    fn requests(name: &str) -> ([Option<u32>; 4], Option<IterationKind>) {
        let m = read(name);
        ([m.context_requests, m.context_tokens, m.generation_requests, m.generation_tokens], m.kind)
    }

    #[test]
    fn every_known_form_is_read() {
        use IterationKind::{Decode, Mixed, Prefill};
        let trt = read("[Executor] _forward_step 17: 2 ctx reqs, 3 gen reqs");
        assert_eq!(
            (trt.number, trt.context_requests, trt.generation_requests, trt.kind),
            (Some(17), Some(2), Some(3), Some(Mixed))
        );
        let own = read("iteration 0: 8 ctx reqs, 0 gen reqs");
        assert_eq!((own.number, own.kind), (Some(0), Some(Prefill)));
        assert_eq!(
            requests("execute_context_1(512)_generation_3(3)"),
            ([Some(1), Some(512), Some(3), Some(3)], Some(Mixed))
        );
        assert_eq!(
            requests("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)"),
            ([Some(0), Some(0), Some(32), Some(32)], Some(Decode))
        );
        // What stands in the brackets changes from version to version: the first number is that of tokens.
        assert_eq!(
            requests("execute_context_1(888_788544)_generation_0(0)"),
            ([Some(1), Some(888), Some(0), Some(0)], Some(Prefill))
        );
        assert_eq!(
            requests("execute_context_0()_generation_2(chunked)"),
            ([Some(0), None, Some(2), None], Some(Decode))
        );
        assert_eq!(
            requests("step[EXTEND bs=15 toks=15360]"),
            ([Some(15), Some(15360), Some(0), Some(0)], Some(Prefill))
        );
        assert_eq!(requests("step[DECODE bs=32]"), ([Some(0), Some(0), Some(32), Some(32)], Some(Decode)));
        assert_eq!(read("step[MIXED bs=4 toks=9]").kind, Some(Mixed));
        assert_eq!(read("ProfilerStep#1009").number, Some(1009));
        assert_eq!(read("iteration 7").number, Some(7));
        assert_eq!(read("execute_new_2_cached_0").kind, Some(Prefill));
        assert_eq!(read("execute_new_0_cached_5").kind, None);
        for other in
            ["capture_32_FULL", "## forward ##", "aten::mm", "iteration", "step by step 3 times", "execute_model"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
