//! Advice: ordered findings, each with evidence and the most that acting on it could bring.
//!
//! A rule is an entry of `rules/advice.toml` (words and limits) and one function that looks for evidence. It is silent
//! where it does not apply. Gains are upper bounds on what exists in the trace; they overlap and are never summed.

mod device;
mod facts;
mod host;
mod idle;
mod recording;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::Context;
use crate::overlap::{DeviceOverlap, seen_overlaps};
use crate::sheet::{Column, Report, Sheet, Unit, Value};
use facts::Facts;

/// Something worth doing, or worth knowing before reading the rest.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The rule that found it.
    pub id: &'static str,
    /// What it is about.
    pub title: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What was found, with numbers.
    pub sentence: String,
    /// The most that acting on it could bring; `None` where it brings no time by itself.
    pub gain: Option<Gain>,
    /// The rows it rests on.
    pub evidence: Sheet,
    /// What to do.
    pub remedy: &'static str,
}

/// An upper bound of the time that can be saved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// The time.
    pub ns: i64,
    /// The time it is a part of.
    pub of_ns: i64,
    /// What that is.
    pub of: String,
}

impl Gain {
    /// A part of a whole, never more than the whole.
    fn new(ns: i64, of_ns: i64, of: impl Into<String>) -> Self {
        Self { ns: ns.clamp(0, of_ns.max(0)), of_ns, of: of.into() }
    }

    /// The time as a share of what it is a part of.
    pub fn share(&self) -> f64 {
        if self.of_ns > 0 { self.ns as f64 / self.of_ns as f64 } else { 0.0 }
    }
}

/// How much a finding matters, by the share of time it could bring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A fifth of the time or more.
    High,
    /// A twentieth or more.
    Medium,
    /// Less.
    Low,
    /// No time by itself, but to be known.
    Note,
}

impl Severity {
    fn of(gain: Option<&Gain>) -> Self {
        match gain.map(Gain::share) {
            Some(share) if share >= 0.2 => Severity::High,
            Some(share) if share >= 0.05 => Severity::Medium,
            Some(_) => Severity::Low,
            None => Severity::Note,
        }
    }

    /// Its name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Severity::High => "high",
            Severity::Medium => "medium",
            Severity::Low => "low",
            Severity::Note => "note",
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    rule: Vec<Rule>,
}

/// The words and limits of a rule.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    id: String,
    title: String,
    remedy: String,
    /// The same for a program without PyTorch.
    remedy_without_torch: Option<String>,
    /// The same for an engine on the CPU.
    remedy_on_cpu: Option<String>,
    /// The same for a program that calls HIP.
    remedy_on_hip: Option<String>,
    limits: BTreeMap<String, f64>,
    /// The classes of `causes.toml` that it is about.
    #[serde(default)]
    causes: Vec<String>,
    /// What they are together.
    about: Option<String>,
    /// Those of which only long waits count.
    #[serde(default)]
    long_causes: Vec<String>,
    /// Where its evidence is worth nothing once threads waited for a CPU.
    #[serde(default)]
    needs_quiet: Quiet,
}

/// Whether a rule rests on times that grow when threads wait for a CPU.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Quiet {
    #[default]
    No,
    /// On times of ops, which wait only where they run on the CPU.
    OnCpu,
    /// On times of the host.
    Always,
}

impl Rule {
    fn limit(&self, name: &str) -> f64 {
        let limit = self.limits.get(name);
        *limit.unwrap_or_else(|| panic!("rule {} of the built-in table has no limit {name}", self.id))
    }

    /// What to do, for the program that was recorded.
    fn remedy_for(&self, facts: &Facts) -> &str {
        let special = match (facts.on_cpu(), facts.calls_hip, facts.uses_torch) {
            (true, ..) => self.remedy_on_cpu.as_ref(),
            (_, true, _) if self.remedy_on_hip.is_some() => self.remedy_on_hip.as_ref(),
            (.., false) => self.remedy_without_torch.as_ref(),
            _ => None,
        };
        special.unwrap_or(&self.remedy)
    }

    fn limit_us(&self, name: &str) -> i64 {
        (self.limit(name) * 1e3) as i64
    }
}

static RULES: LazyLock<Vec<Rule>> = LazyLock::new(|| {
    let table: Table = toml::from_str(include_str!("rules/advice.toml")).expect("the table is part of the program");
    table.rule
});

/// What the function of a rule found.
struct Draft {
    sentence: String,
    gain: Option<Gain>,
    evidence: Sheet,
}

type Find = fn(&Facts, &Rule) -> Option<Draft>;

/// The rule that says so when threads waited for a CPU.
const WAITED: &str = "waited-for-cpu";

const FUNCTIONS: [(&str, Find); 31] = [
    ("launch-bound", host::launch_bound),
    ("data-loading", idle::idle_in),
    ("host-work", idle::idle_in),
    ("long-calls", idle::idle_in),
    ("thread-waits", idle::idle_in),
    ("no-cpu", idle::idle_in),
    ("garbage-collection", idle::idle_in),
    ("gil", idle::idle_in),
    ("unexplained-idle", idle::idle_in),
    ("late-start", host::late_start),
    ("sync-per-step", host::sync_per_step),
    ("pageable-copies", host::pageable_copies),
    ("slow-start", host::slow_start),
    ("between-iterations", host::between_iterations),
    ("queue-full", host::queue_full),
    ("copies-dominate", device::copies_dominate),
    ("unified-memory", device::unified_memory),
    ("exposed-communication", device::exposed_communication),
    ("imbalance", device::imbalance),
    ("tiny-kernels", device::tiny_kernels),
    ("gemm-below-roofline", device::gemm_below_roofline),
    ("few-rows", device::few_rows),
    ("fp32-gemm", device::fp32_gemm),
    ("unfused-attention", device::unfused_attention),
    ("attention-share", device::attention_share),
    ("elementwise-share", device::elementwise_share),
    ("graph-rows-hide-kernels", recording::graph_rows_hide_kernels),
    ("node-trace-inflates", recording::node_trace_inflates),
    ("profiler-overhead", recording::profiler_overhead),
    ("low-clock", recording::low_clock),
    (WAITED, recording::waited_for_cpu),
];

/// What a trace gives reason to say, the largest possible gain first.
pub fn findings(context: &Context) -> Vec<Finding> {
    if context.trace.ops.is_empty() {
        return Vec::new();
    }
    let facts = Facts::of(context);
    let rule_of = |id: &str| RULES.iter().find(|rule| rule.id == id);
    let noisy = rule_of(WAITED).is_some_and(|rule| recording::waited_for_cpu(&facts, rule).is_some());
    let found = FUNCTIONS.iter().filter_map(|(id, find)| {
        let rule = rule_of(id)?;
        let withheld = match rule.needs_quiet {
            Quiet::No => false,
            Quiet::OnCpu => noisy && facts.on_cpu(),
            Quiet::Always => noisy,
        };
        if withheld {
            return None;
        }
        let Draft { sentence, gain, evidence } = find(&facts, rule)?;
        let severity = Severity::of(gain.as_ref());
        Some(Finding { id, title: &rule.title, severity, sentence, gain, evidence, remedy: rule.remedy_for(&facts) })
    });
    let mut found: Vec<Finding> = found.collect();
    let share = |finding: &Finding| finding.gain.as_ref().map_or(-1.0, Gain::share);
    found.sort_by(|a, b| share(b).total_cmp(&share(a)));
    found
}

/// The findings as tables: an overview, then the evidence of each.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Advice: what could be gained, and on what evidence";
    if context.trace.ops.is_empty() {
        return Report::absent("advice", TITLE, "the trace holds nothing that ran on a device");
    }
    let findings = findings(context);
    let mut report = Report::new("advice", TITLE);
    if findings.is_empty() {
        return report.note(nothing_found(context));
    }
    let columns = [
        Column::new("Severity", Unit::Text),
        Column::new("Rule", Unit::Text),
        Column::new("Gain at most", Unit::Ns),
        Column::new("Share", Unit::Share),
        Column::new("Of", Unit::Text),
        Column::new("Finding", Unit::Text),
        Column::new("What to do", Unit::Text),
    ];
    let mut overview = Sheet::new("findings", columns);
    for finding in &findings {
        overview.push([
            finding.severity.as_str().into(),
            finding.id.into(),
            finding.gain.as_ref().map(|g| g.ns).into(),
            finding.gain.as_ref().map(Gain::share).into(),
            finding.gain.as_ref().map_or(Value::Unknown, |g| format!("{} {}", ns_text(g.of_ns), g.of).into()),
            finding.sentence.as_str().into(),
            finding.remedy.into(),
        ]);
    }
    report = report.sheet(overview);
    for finding in findings {
        report = report.sheet(finding.evidence);
    }
    report.note("gains are upper bounds, each taken alone; they overlap, so they are not to be added up")
}

/// What to say where no rule speaks.
pub fn nothing_found(context: &Context) -> String {
    let devices = seen_overlaps(context, |op| Some(context.categories.of_op(op).class));
    let sum = |of: fn(&DeviceOverlap) -> i64| devices.iter().map(of).fold(0, i64::saturating_add);
    let (span, busy) = (sum(|device| device.span), sum(|device| device.busy));
    let idle = span.saturating_sub(busy);
    if idle as f64 > NOTABLY_IDLE * span as f64 {
        let share = percent(idle, span);
        return format!(
            "no rule explains the idle time ({share} of the span): `--report gaps` lists what the host did"
        );
    }
    "no rule found anything: the devices are busy with compute".to_owned()
}

/// Devices that idle for a larger share of their span are not simply busy.
const NOTABLY_IDLE: f64 = 0.1;

/// A time as people read it.
fn ns_text(ns: i64) -> String {
    let ns = ns as f64;
    let (value, unit) = match ns.abs() {
        n if n < 999.5 => return format!("{ns:.0} ns"),
        n if n < 999.5e3 => (ns / 1e3, "µs"),
        n if n < 999.5e6 => (ns / 1e6, "ms"),
        _ => (ns / 1e9, "s"),
    };
    let decimals = match value.abs() {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

/// A part of a whole in per cent.
fn percent(part: i64, whole: i64) -> String {
    if whole > 0 { format!("{:.1} %", 100.0 * part as f64 / whole as f64) } else { "n/a".to_owned() }
}

/// A whole number with thousands separators.
fn count(number: usize) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().filter_map(|g| std::str::from_utf8(g).ok()).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_has_a_function_and_every_function_a_rule() {
        let mut rules: Vec<&str> = RULES.iter().map(|r| r.id.as_str()).collect();
        let mut functions: Vec<&str> = FUNCTIONS.iter().map(|f| f.0).collect();
        rules.sort();
        functions.sort();
        assert_eq!(rules, functions);
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            (ns_text(950), ns_text(4_312), ns_text(6_700_000)),
            ("950 ns".into(), "4.31 µs".into(), "6.70 ms".into())
        );
        assert_eq!((count(7), count(1_234_567)), ("7".into(), "1,234,567".into()));
        assert_eq!((percent(1, 8), percent(1, 0)), ("12.5 %".into(), "n/a".into()));
    }

    #[test]
    fn a_gain_is_never_more_than_the_whole() {
        assert_eq!(Gain::new(20, 10, "").share(), 1.0);
        assert_eq!(Gain::new(-5, 0, "").share(), 0.0);
    }
}
