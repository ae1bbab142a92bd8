//! Profile windows: which iterations are recorded.
//!
//! Grammar: `span ("," span)*` with `span = N | A "-" B`, inclusive, counted in real forward steps. Blanks around
//! numbers are fine, spans may come in any order and may touch; everything else is refused before anything runs.

use std::fmt;

/// One inclusive span of iterations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First recorded iteration.
    pub first: u64,
    /// Last recorded iteration.
    pub last: u64,
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { write!(f, "{}", self.first) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}

/// Why a window specification was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// An item is not `N` or `A-B`.
    #[error("profile window `{spec}`: span `{span}` {problem}; write A-B, N, or a comma list such as 100-150,200")]
    Malformed {
        /// The whole specification.
        spec: String,
        /// The offending span.
        span: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Two spans share an iteration.
    #[error("profile window `{spec}`: spans `{first}` and `{second}` overlap; each iteration may be in one span only")]
    Overlap {
        /// The whole specification.
        spec: String,
        /// The earlier span.
        first: Window,
        /// The span that overlaps it.
        second: Window,
    },
}

/// Parse a specification into sorted, disjoint windows. Empty means no window.
pub fn parse_windows(spec: &str) -> Result<Vec<Window>, WindowError> {
    if spec.trim().is_empty() {
        return Ok(Vec::new());
    }
    let mut windows = spec.split(',').map(|span| parse_span(spec, span)).collect::<Result<Vec<_>, _>>()?;
    windows.sort_by_key(|w| w.first);
    for pair in windows.windows(2) {
        if let [first, second] = *pair
            && second.first <= first.last
        {
            return Err(WindowError::Overlap { spec: spec.to_string(), first, second });
        }
    }
    Ok(windows)
}

fn parse_span(spec: &str, span: &str) -> Result<Window, WindowError> {
    let malformed = |problem| WindowError::Malformed { spec: spec.to_string(), span: span.trim().to_string(), problem };
    let number = |text: &str| -> Result<u64, WindowError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(malformed("has an end missing"));
        }
        if text.starts_with('+') {
            return Err(malformed("has a sign"));
        }
        if !text.bytes().all(|b| b.is_ascii_digit()) {
            return Err(malformed("is not a number"));
        }
        // Trace files hold signed numbers.
        text.parse().ok().filter(|&n| n <= i64::MAX as u64).ok_or_else(|| malformed("is too large"))
    };
    if span.trim().is_empty() {
        return Err(malformed("is empty"));
    }
    let mut ends = span.split('-');
    let (first, last) = match (ends.next(), ends.next(), ends.next()) {
        (Some(_), Some(_), Some(_)) => return Err(malformed("has a second dash")),
        (Some(first), Some(last), None) => (number(first)?, number(last)?),
        _ => {
            let only = number(span)?;
            (only, only)
        }
    };
    if last < first {
        return Err(malformed("is reversed"));
    }
    Ok(Window { first, last })
}

/// Environment variables that set windows, strongest first.
pub const WINDOW_VARIABLES: [&str; 4] = [
    "STROBE_PROFILE_START_STOP",
    "TLLM_PROFILE_START_STOP",
    "TLLM_GPTM_PROFILE_START_STOP",
    "TLLM_GPTS_PROFILE_START_STOP",
];

/// The specification to use: the command line's, else the first non-empty variable. The second part names the
/// sources that were set as well and are ignored.
pub fn choose_spec(flag: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> (Option<String>, Vec<String>) {
    let mut chosen = flag.map(str::to_string);
    let mut ignored = Vec::new();
    for name in WINDOW_VARIABLES {
        if let Some(value) = variable(name).filter(|v| !v.trim().is_empty()) {
            if chosen.is_none() {
                chosen = Some(value);
            } else {
                ignored.push(name.to_string());
            }
        }
    }
    (chosen, ignored)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(spec: &str) -> Vec<(u64, u64)> {
        parse_windows(spec).unwrap().iter().map(|w| (w.first, w.last)).collect()
    }

    #[test]
    fn accepts_the_grammar() {
        assert_eq!(spans("1"), [(1, 1)]);
        assert_eq!(spans("1,2,3"), [(1, 1), (2, 2), (3, 3)]);
        assert_eq!(spans("1-4,7-8"), [(1, 4), (7, 8)]);
        assert_eq!(spans("10-15, 2 ,1"), [(1, 1), (2, 2), (10, 15)]);
        assert_eq!(spans(" 1 - 4 ,5-8"), [(1, 4), (5, 8)]);
        assert_eq!(spans(""), []);
        assert_eq!(spans("  "), []);
        assert_eq!(spans("0-0"), [(0, 0)]);
    }

    #[test]
    fn refuses_everything_else_and_names_the_span() {
        for (spec, named) in [
            ("1,,10-15", "is empty"),
            ("1,", "is empty"),
            ("8-3", "`8-3` is reversed"),
            ("5-", "`5-` has an end missing"),
            ("-5", "`-5` has an end missing"),
            ("+5", "`+5` has a sign"),
            ("1-4-7", "`1-4-7` has a second dash"),
            ("a", "`a` is not a number"),
            ("1-x", "`1-x` is not a number"),
            ("99999999999999999999", "is too large"),
            ("1-4,4-8", "`1-4` and `4-8` overlap"),
            ("3,3", "`3` and `3` overlap"),
            ("1-5,3-8", "`1-5` and `3-8` overlap"),
            ("5-9,1-100", "`1-100` and `5-9` overlap"),
        ] {
            let text = parse_windows(spec).unwrap_err().to_string();
            assert!(text.contains(named), "{spec}: {text}");
        }
    }

    #[test]
    fn the_flag_wins_then_the_variables_in_order() {
        let set = |name: &str| match name {
            "TLLM_PROFILE_START_STOP" => Some("5".to_string()),
            "TLLM_GPTM_PROFILE_START_STOP" => Some("7".to_string()),
            "STROBE_PROFILE_START_STOP" => Some(String::new()),
            _ => None,
        };
        assert_eq!(choose_spec(None, set), (Some("5".into()), vec!["TLLM_GPTM_PROFILE_START_STOP".into()]));
        let (spec, ignored) = choose_spec(Some("1-2"), set);
        assert_eq!(spec.as_deref(), Some("1-2"));
        assert_eq!(ignored.len(), 2);
        assert_eq!(choose_spec(None, |_| None), (None, vec![]));
    }
}
