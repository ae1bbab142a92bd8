//! `strobe ab`: two builds, binaries or commands, interleaved in fresh processes until the answer is clear.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::{Value, json};
use strobe_analyze::compare::runs::WholeRuns;
use strobe_analyze::compare::runs::says_something;
use strobe_analyze::compare::{self, BETWEEN_RUNS, CompareOptions, Comparison, Runs, Verdict};
use strobe_report::html::Link;
use strobe_report::human;

use crate::ab::side::{self, Side, Strobe};
use crate::ab::{Found, Listener, PLAN, Plan, Stopped};
use crate::commands::compare::{metric, out_of_reach, read_sides, show};
use crate::gate::{GateArgs, percent};
use crate::run_dir::RunDir;
use crate::run_facts::KnownRun;
use crate::run_writer::Problems;
use crate::{explore, output, run_dir, shell, trace_input};

const EXAMPLES: &str = "EXAMPLES:
  strobe ab --a '--gemm-plugin auto' --b '--gemm-plugin disable' --model tinyllama-1.1b --dataset d.jsonl
  strobe ab --a '--engine-dir E1' --b '--engine-dir E2' --dataset d.jsonl --profile 10-20
  strobe ab --a-bin old/strobe --b-bin new/strobe --engine-dir E --dataset d.jsonl --fail-on-regression 5%
  strobe ab --a-cmd './serve-bench --old -o {out}' --b-cmd './serve-bench --new -o {out}' --metric mean_ttft_ms

Order A B B A, fresh processes, the first pair is warm-up. It stops when the 99 % interval is narrow enough (--half-width), never
because a difference looks significant. How a verdict is reached: docs/verdicts.md.";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// Options of A: of `strobe build` (then --model is built with them) and of `strobe bench`
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true, conflicts_with = "a_cmd")]
    a: Option<String>,
    /// Options of B
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true, conflicts_with = "b_cmd")]
    b: Option<String>,
    /// Binary of A [default: this one]
    #[arg(long, value_name = "PATH", conflicts_with = "a_cmd")]
    a_bin: Option<PathBuf>,
    /// Binary of B
    #[arg(long, value_name = "PATH", conflicts_with = "b_cmd")]
    b_bin: Option<PathBuf>,
    /// Any command as A; it writes a run directory or a JSON of trtllm-bench, vLLM bench or llama-bench to {out}, or to stdout
    #[arg(long, value_name = "CMD", requires = "b_cmd")]
    a_cmd: Option<String>,
    /// Any command as B
    #[arg(long, value_name = "CMD", requires = "a_cmd")]
    b_cmd: Option<String>,
    /// Preset, Hugging Face directory or GGUF file of both sides; built once per set of build options
    #[arg(long, value_name = "PRESET|DIR|FILE", conflicts_with_all = ["engine_dir", "a_cmd"])]
    model: Option<String>,
    /// Engine of both sides
    #[arg(long, value_name = "DIR", conflicts_with = "a_cmd")]
    engine_dir: Option<PathBuf>,
    /// Requests of both sides
    #[arg(long, value_name = "FILE", conflicts_with = "a_cmd", required_unless_present = "a_cmd")]
    dataset: Option<PathBuf>,
    /// Use the first N requests
    #[arg(long, value_name = "N", conflicts_with = "a_cmd")]
    num_requests: Option<usize>,
    /// Run one request at a time (strobe bench latency)
    #[arg(long, conflicts_with = "a_cmd")]
    latency: bool,
    /// Record these iterations in one more pair at the end, which does not count: it explains the difference
    #[arg(long, value_name = "SPEC", conflicts_with = "a_cmd")]
    profile: Option<String>,
    /// Fewest and most pairs that count
    #[arg(long, value_name = "MIN..MAX", value_parser = pairs, default_value = "5..30")]
    pairs: (usize, usize),
    /// Begin no pair that would end later than this, e.g. 90s, 10m, 1h
    #[arg(long, value_name = "TIME", value_parser = duration)]
    budget: Option<Duration>,
    /// Stop when half the width of the interval is at most this [default: half of what matters: 2.5%, or half the gate's limit]
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    half_width: Option<f64>,
    /// The figure that decides [default: output throughput; request latency where requests arrive at a rate]
    #[arg(long, value_name = "NAME")]
    metric: Option<String>,
    #[command(flatten)]
    gate: GateArgs,
    /// Where all runs, ab.json and compare.html are kept; called again it goes on where it stopped [default: a new one in runs/]
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Start anew in an existing directory of a comparison
    #[arg(long)]
    overwrite: bool,
    /// Rows shown of each table, 0 for all
    #[arg(long, value_name = "N", default_value_t = 15)]
    top: usize,
    /// Print the comparison as JSON
    #[arg(long)]
    json: bool,
    /// Further options of `strobe bench` for both sides
    #[arg(last = true, value_name = "OPTIONS")]
    common: Vec<String>,
}

/// `5..30`, or `10` for exactly ten.
fn pairs(text: &str) -> Result<(usize, usize), String> {
    let number =
        |part: &str| part.trim().parse::<usize>().map_err(|_| format!("`{text}` is no range of pairs; write 5..30"));
    let (least, most) = match text.split_once("..") {
        Some((least, most)) => (number(least)?, number(most.trim_start_matches('='))?),
        None => (number(text)?, number(text)?),
    };
    if least < 2 || most < least || most > 1000 {
        return Err(format!("`{text}`: at least 2 pairs, at most 1000, the fewest first"));
    }
    Ok((least, most))
}

/// `90s`, `10m`, `1.5h`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is no time; write 90s, 10m or 1h");
    let text = text.trim();
    let (number, scale) = match text.char_indices().next_back() {
        Some((at, 's')) => (&text[..at], 1.0),
        Some((at, 'm')) => (&text[..at], 60.0),
        Some((at, 'h')) => (&text[..at], 3600.0),
        _ => return Err(wrong()),
    };
    let seconds = number.trim().parse::<f64>().map_err(|_| wrong())? * scale;
    if seconds > 0.0 && seconds < 1e7 { Ok(Duration::from_secs_f64(seconds)) } else { Err(wrong()) }
}

impl Args {
    fn sides(&self) -> Result<[Side; 2]> {
        if let (Some(a), Some(b)) = (&self.a_cmd, &self.b_cmd) {
            if !self.common.is_empty() {
                bail!("options behind -- are for strobe's own sides; put them into --a-cmd and --b-cmd");
            }
            return Ok([Side::Command(a.clone()), Side::Command(b.clone())]);
        }
        let own = std::env::current_exe()?;
        let mut common = Strobe {
            binary: own.clone(),
            model: self.model.clone(),
            engine_dir: self.engine_dir.clone(),
            build: Vec::new(),
            bench: Vec::new(),
        };
        if let Some(dataset) = &self.dataset {
            common.bench.extend(["--dataset".to_owned(), dataset.display().to_string()]);
        }
        if let Some(requests) = self.num_requests {
            common.bench.extend(["--num-requests".to_owned(), requests.to_string()]);
        }
        let side = |option: &str, words: &Option<String>, binary: &Option<PathBuf>| -> Result<Side> {
            let words =
                shell::words(words.as_deref().unwrap_or_default()).map_err(|e| anyhow::anyhow!("{option}: {e}"))?;
            let words = self.common.iter().cloned().chain(words).collect();
            let binary = match binary {
                Some(path) if !path.is_file() => bail!("{option}-bin: {} does not exist", path.display()),
                Some(path) => path.clone(),
                None => own.clone(),
            };
            Ok(Side::Strobe(Strobe::of(option, words, binary, &common)?))
        };
        Ok([side("--a", &self.a, &self.a_bin)?, side("--b", &self.b, &self.b_bin)?])
    }
}

/// Prints pairs as they end.
pub(crate) struct Told {
    /// Stdout is for JSON.
    pub json: bool,
    /// What the sides are called.
    pub names: [String; 2],
}

impl Listener for Told {
    fn pair(&mut self, number: usize, known: &[Vec<KnownRun>; 2], so_far: Option<&WholeRuns>) {
        if number == 0 {
            return self.say("pair 0    warm-up, does not count");
        }
        let value = |side: &[KnownRun]| {
            let metric = side.last()?.runs.first()?.metrics.first()?;
            Some((human::number(metric.value), metric.unit.clone()))
        };
        let Some(((a, unit), (b, _))) = value(&known[0]).zip(value(&known[1])) else { return };
        let [name_a, name_b] = &self.names;
        let so_far = so_far
            .and_then(|found| found.figures.first())
            .and_then(|figure| Some((figure.time_change, figure.interval?)));
        let so_far = so_far.map_or(String::new(), |(change, interval)| {
            let sure = match says_something(&interval) {
                true => format!("{:+.1} to {:+.1}", 100.0 * interval.low, 100.0 * interval.high),
                false => format!("interval not known with n={} pairs", known[0].len()),
            };
            format!("   so far B {:+.1} % time ({sure})", 100.0 * change)
        });
        self.say(&format!("pair {number:<4} {name_a} {a}, {name_b} {b} {unit}{so_far}"));
    }

    fn say(&mut self, text: &str) {
        if self.json { output::note(text) } else { output::line(text) }
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    let sides = args.sides()?;
    let named = match &args.a_cmd {
        // Other benchmarks have figures of their own.
        Some(_) => args.metric.clone(),
        None => metric(args.metric.as_deref())?.map(str::to_owned),
    };
    let margin = args.gate.margin();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let dir = args
        .output_dir
        .clone()
        .unwrap_or_else(|| PathBuf::from(format!("runs/ab-{}-{}", now.as_secs(), std::process::id())));
    let plan = Plan {
        sides,
        mode: if args.latency { "latency" } else { "throughput" }.to_owned(),
        profile: args.profile.clone(),
        pairs: args.pairs,
        budget: args.budget,
        half_width: args.half_width.unwrap_or(margin / 2.0).max(1e-4),
        margin,
        metric: named,
        dir,
        identity: OnceCell::new(),
    };
    let names = side::names(&plan.sides[0], &plan.sides[1]);
    let resumes = plan.open(args.overwrite)?;
    let mut told = Told { json: args.json, names: names.clone() };
    for (letter, side) in ["A", "B"].iter().zip(&plan.sides) {
        told.say(&format!("{letter}         {}", side.describe()));
    }
    if resumes {
        told.say(&format!("resume    {}", plan.dir.display()));
    }
    let found = plan.execute(&mut told)?;
    if found.known[0].len() < 2 {
        return too_few(&args, &plan, &found);
    }
    let done = conclude(&plan, found, names, args.top, None)?;
    // The report first: whatever happens to files, the answer is there.
    if args.json {
        output::line(&format!("{:#}", done.to_json(&args.gate)));
    } else {
        output::line("");
        show(&done.comparison, args.top);
    }
    let written = done.write(&plan);
    let page = done.page.as_ref().filter(|_| written.is_ok()).map(|(path, _)| path);
    if !args.json {
        page.iter().for_each(|path| output::line(&format!("\npage      {}", path.display())));
        output::line(&format!("runs      {}", plan.dir.display()));
    }
    if done.stopped == Stopped::Interrupted {
        output::note(&goes_on(&plan, args.output_dir.is_some()));
    }
    written?;
    if done.stopped == Stopped::Interrupted {
        return Ok(()); // main turns it into 130
    }
    let inspect = page.cloned().unwrap_or_else(|| plan.dir.join(PLAN)).display().to_string();
    args.gate.judge(&done.comparison.verdict, &inspect)
}

/// Fewer than two pairs have no spread: what there is instead of a verdict.
fn too_few(args: &Args, plan: &Plan, found: &Found) -> Result<()> {
    plan.write("partial", &Value::Null)?;
    if found.stopped == Stopped::Interrupted {
        bail!(goes_on(plan, args.output_dir.is_some()));
    }
    let pairs = found.known[0].len();
    let stopped = found.stopped.in_words(plan.half_width);
    let why = match (found.failures.last(), found.stopped) {
        (Some(last), Stopped::Failures) => format!("{stopped}; the last: {last}"),
        _ => format!("fewer than 2 pairs ended ({stopped}); give it more --budget"),
    };
    // A side that never ran is a wrong call; a gate that was asked too early cannot tell.
    if args.gate.fail_on_regression.is_none() || (found.stopped == Stopped::Failures && pairs == 0) {
        bail!(why);
    }
    let verdict = Verdict { sentence: format!("Cannot tell: {why}."), reasons: vec![why], ..Verdict::default() };
    if args.json {
        let document = json!({
            "strobe": env!("CARGO_PKG_VERSION"), "outcome": verdict.outcome, "pairs": pairs, "stopped": stopped,
            "failures": found.failures, "reasons": verdict.reasons, "gate": args.gate.to_json(&verdict),
            "output_dir": plan.dir.display().to_string(),
        });
        output::line(&format!("{document:#}"));
    } else {
        output::line(&format!("\n{}\nruns      {}", verdict.sentence, plan.dir.display()));
    }
    args.gate.judge(&verdict, &plan.dir.join(PLAN).display().to_string())
}

/// What an interrupted comparison kept, and the line that goes on with it.
fn goes_on(plan: &Plan, named: bool) -> String {
    let mut words: Vec<OsString> = crate::words().iter().filter(|word| *word != "--overwrite").cloned().collect();
    if !named {
        let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
        words.splice(end..end, ["--output-dir".into(), plan.dir.clone().into_os_string()]);
    }
    let line = shell::line(Command::new("strobe").args(words));
    format!("interrupted; {} runs are kept in {}; `{line}` goes on from there", plan.kept(), plan.dir.display())
}

/// A comparison that has come to its end.
pub(crate) struct Concluded {
    pub comparison: Comparison,
    /// The page, and where it goes.
    pub page: Option<(PathBuf, String)>,
    pub stopped: Stopped,
    pairs: usize,
    failures: Vec<String>,
    dir: PathBuf,
    stopped_in_words: String,
}

impl Concluded {
    fn to_json(&self, gate: &GateArgs) -> Value {
        json!({
            "strobe": env!("CARGO_PKG_VERSION"),
            "outcome": self.comparison.verdict.outcome,
            "pairs": self.pairs,
            "stopped": self.stopped_in_words,
            "failures": self.failures,
            "comparison": self.comparison,
            "gate": gate.to_json(&self.comparison.verdict),
            "page": self.page.as_ref().map(|(path, _)| path.display().to_string()),
            "output_dir": self.dir.display().to_string(),
        })
    }

    /// Writes the page, and what became of it.
    pub(crate) fn write(&self, plan: &Plan) -> Result<()> {
        let mut problems = Problems::default();
        if let Some((path, page)) = &self.page {
            problems.keep(run_dir::write_whole(path, page.as_bytes()));
        }
        let state = if self.stopped == Stopped::Interrupted { "partial" } else { "complete" };
        let outcome = json!({
            "verdict": self.comparison.verdict, "runs": self.comparison.runs, "pairs": self.pairs,
            "stopped": self.stopped_in_words, "failures": self.failures,
        });
        problems.keep(plan.write(state, &outcome));
        problems.into_result()
    }
}

/// Verdict, explanation and page of what ran. `overview` leads from that page to one that stands above it.
pub(crate) fn conclude(
    plan: &Plan,
    found: Found,
    names: [String; 2],
    rows: usize,
    overview: Option<Link>,
) -> Result<Concluded> {
    let Found { known, paths, recorded, stopped, failures, resumed } = found;
    let pairs = known[0].len();
    let stopped_in_words = stopped.in_words(plan.half_width);
    // The recorded pair explains; without one, the iterations of all runs do, as far as they are known.
    let explained: [Vec<PathBuf>; 2] = match recorded {
        Some([a, b]) => [vec![a], vec![b]],
        None => paths.map(|side| side.into_iter().filter(|path| RunDir::is_at(path)).collect()),
    };
    let traces = read_sides(&explained)?;
    let options = strobe_analyze::Options::default();
    let contexts = [trace_input::contexts(&traces[0], &options)?, trace_input::contexts(&traces[1], &options)?];
    let counted = format!(
        "{pairs} pairs counted, order A B B A, fresh processes, after one pair of warm-up{}; stopped by: {stopped_in_words}",
        if resumed > 0 { format!(", {resumed} of them from an earlier call") } else { String::new() }
    );
    let mut warnings = Vec::new();
    if !failures.is_empty() {
        warnings.push(format!(
            "{} runs failed and their pairs do not count, the first: {}",
            failures.len(),
            failures[0]
        ));
    }
    warnings.extend(out_of_reach(&known, &contexts));
    let comparison = compare::compare(
        &contexts[0],
        &contexts[1],
        &CompareOptions {
            names,
            rows,
            runs: Some(Runs { notes: vec![counted], ..plan.runs(known) }),
            between_runs: BETWEEN_RUNS,
            margin: plan.margin,
            warnings,
        },
    );
    let page = contexts.iter().all(|side| !side.is_empty()).then(|| {
        let path = plan.dir.join("compare.html");
        let mut links = explore::run_links(&path, &explained);
        links.extend(overview);
        let page = explore::comparison_page(&comparison, &contexts, links);
        (path, page)
    });
    Ok(Concluded { comparison, page, stopped, pairs, failures, dir: plan.dir.clone(), stopped_in_words })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_times() {
        assert_eq!((pairs("5..30"), pairs("7")), (Ok((5, 30)), Ok((7, 7))));
        assert!(pairs("1..3").is_err() && pairs("5..3").is_err() && pairs("many").is_err());
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1.5h"), Ok(Duration::from_secs(5400)));
        assert!(
            duration("10").is_err() && duration("-1s").is_err() && duration("").is_err() && duration("ms").is_err()
        );
    }
}
