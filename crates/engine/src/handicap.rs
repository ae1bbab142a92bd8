//! A known slowdown of every step on a CPU, to prove that comparisons find real differences. Only with the cargo feature
//! `handicap`, which no release has.

use std::ffi::OsStr;

use crate::clock::Clock;
use crate::error::EngineError;

/// The variable that says how much longer a forward pass takes, e.g. `5%`.
pub const VARIABLE: &str = "STROBE_HANDICAP";

/// The share that is asked for; `None` where the variable is not set or empty.
pub fn from_env() -> Result<Option<f64>, EngineError> {
    std::env::var_os(VARIABLE).map_or(Ok(None), |value| parse(&value))
}

/// `5%` is 0.05. A number without the sign could mean a fraction: it is refused.
fn parse(value: &OsStr) -> Result<Option<f64>, EngineError> {
    let text = value.to_string_lossy();
    if text.is_empty() {
        return Ok(None);
    }
    let number = text.strip_suffix('%').and_then(|number| number.trim_end().parse::<f64>().ok());
    match number {
        Some(number) if (0.0..=1000.0).contains(&number) => Ok(Some(number / 100.0)),
        _ => {
            let problem = format!("must be a percentage from 0% to 1000% (found `{text}`, expected e.g. 5%)");
            Err(EngineError::option(VARIABLE, problem))
        }
    }
}

/// Returns once `share` of the time since `start` has passed again. Spins: a sleep would let the core clock down.
pub(crate) fn spin(clock: &Clock, start: u64, share: f64) {
    let now = clock.now();
    let until = now + (now.saturating_sub(start) as f64 * share) as u64;
    while clock.now() < until {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages() {
        let parsed = |text: &str| parse(OsStr::new(text)).map_err(|error| error.to_string());
        assert_eq!(parsed("5%"), Ok(Some(0.05)));
        assert_eq!(parsed("12.5 %"), Ok(Some(0.125)));
        assert_eq!(parsed(""), Ok(None));
        for wrong in ["5", "0.05", "five", "-1%", "nan%", "1e9%", "%"] {
            let error = parsed(wrong).unwrap_err();
            assert!(error.contains("STROBE_HANDICAP must be") && error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn spinning_takes_the_share() {
        let clock = Clock::start();
        let start = clock.now();
        while clock.now() < start + 2_000_000 {}
        let forward = clock.now() - start;
        spin(&clock, start, 0.5);
        let whole = clock.now() - start;
        assert!(whole as f64 >= 1.5 * forward as f64 - 1e3, "{forward} {whole}");
    }
}
