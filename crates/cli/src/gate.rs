//! Gates: exit codes that follow from a verdict, the same in every verb that compares.

use anyhow::{Result, anyhow};
use serde_json::{Value, json};
use strobe_analyze::compare::runs::says_something;
use strobe_analyze::compare::{Gate, MARGIN, Outcome, Verdict};
use strobe_report::human;

#[derive(clap::Args)]
pub(crate) struct GateArgs {
    /// Exit with 1 when B is proven slower by more than this (the whole interval), with 3 when that cannot be told
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub fail_on_regression: Option<f64>,
    /// Exit code where the gate cannot tell: pass is 0, fail is 1 [default: 3]
    #[arg(long, value_enum, value_name = "AS", requires = "fail_on_regression")]
    pub inconclusive: Option<Inconclusive>,
}

/// What a gate makes of "cannot tell".
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Inconclusive {
    /// As if nothing had got slower
    Pass,
    /// As if it had got slower
    Fail,
}

/// `5%`, `5 %` or `5`. A bare number below 1 could mean a fraction or a share of a per cent: it is refused.
pub(crate) fn percent(text: &str) -> Result<f64, String> {
    let (number, least) = match text.trim().strip_suffix('%') {
        Some(number) => (number.trim(), 0.0),
        None => (text.trim(), 1.0),
    };
    let value: f64 = number.parse().map_err(|_| format!("`{text}` is not a percentage; write 5%"))?;
    if (least..1000.0).contains(&value) {
        Ok(value / 100.0)
    } else {
        Err(format!("write `{text}` as a percentage, e.g. 5%"))
    }
}

/// The gate failed: B is slower.
#[derive(Debug)]
pub(crate) struct Regression(String);

/// The gate was asked and cannot tell.
#[derive(Debug)]
pub(crate) struct CannotTell(String);

impl std::fmt::Display for Regression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FAIL: {}", self.0)
    }
}

impl std::fmt::Display for CannotTell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CANNOT TELL: {}", self.0)
    }
}

impl std::error::Error for Regression {}
impl std::error::Error for CannotTell {}

impl GateArgs {
    /// The difference that matters: the gate's limit where there is one.
    pub(crate) fn margin(&self) -> f64 {
        self.fail_on_regression.unwrap_or(MARGIN)
    }

    /// What the gate says, for JSON; null where none was asked for.
    pub(crate) fn to_json(&self, verdict: &Verdict) -> Value {
        self.fail_on_regression.map_or(Value::Null, |limit| json!({"limit": limit, "result": verdict.gate(limit)}))
    }

    /// The exit code as an error. Without a gate only things that are not comparable end with one. `inspect` is the command
    /// that shows more of a regression.
    pub(crate) fn judge(&self, verdict: &Verdict, inspect: &str) -> Result<()> {
        if verdict.outcome == Outcome::NotComparable {
            let what = if self.fail_on_regression.is_some() {
                "the gate cannot be judged, not comparable"
            } else {
                "not comparable"
            };
            return Err(anyhow!("{what}: {}", verdict.reasons.join("; ")));
        }
        let Some(limit) = self.fail_on_regression else { return Ok(()) };
        let interval = verdict.interval.filter(says_something).map_or(String::new(), |i| {
            let ci = verdict.confidence.map_or(String::new(), |c| format!("{:.0} % CI ", 100.0 * c));
            format!(" ({ci}{:+.1} to {:+.1} % time, limit {})", 100.0 * i.low, 100.0 * i.high, human::percent(limit))
        });
        match (verdict.gate(limit), self.inconclusive) {
            (Gate::Failed, _) => {
                let cause = verdict.explanation.as_ref().map_or(String::new(), |cause| format!(" {cause}"));
                Err(anyhow!(Regression(format!(
                    "B is slower by more than {}{interval}.{cause} Inspect: {inspect}",
                    human::percent(limit)
                ))))
            }
            (Gate::CannotTell, None) => Err(anyhow!(CannotTell(format!(
                "whether B is slower by more than {}{interval}; --inconclusive pass|fail decides such cases",
                human::percent(limit)
            )))),
            (Gate::CannotTell, Some(Inconclusive::Fail)) => Err(anyhow!(Regression(format!(
                "not told whether B is slower by more than {}{interval}, which --inconclusive fail takes for slower",
                human::percent(limit)
            )))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strobe_stats::Range;

    #[test]
    fn shares() {
        assert_eq!(percent("5%"), Ok(0.05));
        assert_eq!(percent("5"), Ok(0.05));
        assert_eq!(percent("0.5 %"), Ok(0.005));
        assert!(
            percent("0.05").is_err() && percent("five").is_err() && percent("-1%").is_err() && percent("nan").is_err()
        );
    }

    #[test]
    fn exit_codes_follow_from_the_interval() {
        let code = |outcome, low: f64, high: f64, inconclusive| {
            let verdict = Verdict { outcome, interval: Some(Range { low, high }), ..Verdict::default() };
            let gate = GateArgs { fail_on_regression: Some(0.05), inconclusive };
            match gate.judge(&verdict, "strobe compare A B") {
                Ok(()) => 0,
                Err(error) if error.is::<Regression>() => 1,
                Err(error) if error.is::<CannotTell>() => 3,
                Err(_) => 2,
            }
        };
        assert_eq!(code(Outcome::Slower, 0.06, 0.2, None), 1);
        assert_eq!(code(Outcome::Slower, 0.01, 0.2, None), 3, "slower, but by more than the limit?");
        assert_eq!(code(Outcome::Slower, 0.01, 0.04, None), 0);
        assert_eq!(code(Outcome::Faster, -0.2, -0.1, None), 0);
        assert_eq!(code(Outcome::NoDifference, -0.04, 0.04, None), 0);
        assert_eq!(code(Outcome::CannotTell, -0.2, 0.2, None), 3);
        assert_eq!(
            code(Outcome::CannotTell, -0.2, 0.04, None),
            0,
            "whatever it is, it is no regression beyond the limit"
        );
        assert_eq!(code(Outcome::CannotTell, -0.2, 0.2, Some(Inconclusive::Pass)), 0);
        assert_eq!(code(Outcome::CannotTell, -0.2, 0.2, Some(Inconclusive::Fail)), 1);
        assert_eq!(code(Outcome::NotComparable, 0.0, 0.0, Some(Inconclusive::Pass)), 2);
        let verdict = Verdict { outcome: Outcome::CannotTell, ..Verdict::default() };
        assert!(GateArgs { fail_on_regression: None, inconclusive: None }.judge(&verdict, "").is_ok());
    }
}
