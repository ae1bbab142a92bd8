//! `strobe compare`: what differs between two runs or traces, and why.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use serde_json::{Map, Value, json};
use strobe_analyze::Context;
use strobe_analyze::compare::{self, BETWEEN_RUNS, CompareOptions, Comparison, Runs};
use strobe_analyze::iterations::Found;
use strobe_trace::{IterationKind, Trace};

use crate::gate::{GateArgs, percent};
use crate::run_dir::{self, RunDir};
use crate::run_facts::{KnownRun, known_run, metric_named, metric_names};
use crate::sheets::Format;
use crate::trace_input::{self, ViewArgs};
use crate::{explore, noise, output, progress, sheets, shell};

const EXAMPLES: &str = "EXAMPLES:
  strobe compare run-a run-b                                two run directories, profiled or not
  strobe compare before.sqlite after.sqlite --html d.html   two Nsight Systems exports, as one HTML file
  strobe compare 'base-*' 'new-*' --fail-on-regression 5%   repeats of each side, as a gate in CI

Exit codes: 0 done or passed, 1 a proven regression beyond the limit, 2 bad input or not comparable, 3 the gate cannot tell.
How a verdict is reached: docs/verdicts.md.";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// The first side: a trace, a run directory, or a quoted pattern such as 'runs/a-*' that matches repeats
    #[arg(value_name = "A")]
    a: String,
    /// The second side
    #[arg(value_name = "B")]
    b: String,
    #[command(flatten)]
    gate: GateArgs,
    /// How much two runs of the same thing may differ, for traces of other tools with one trace a side [default: 3%]
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    between_run: Option<f64>,
    /// The figure of whole runs that decides [default: output throughput; request latency where requests arrive at a rate]
    #[arg(long, value_name = "NAME")]
    metric: Option<String>,
    #[command(flatten)]
    view: ViewArgs,
    /// Rows shown of each table, 0 for all
    #[arg(long, value_name = "N", default_value_t = 15)]
    top: usize,
    /// How to print it
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// The same as --format json
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// Also write it as one self-contained HTML file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// The name of a figure as reports have it.
pub(crate) fn metric(name: Option<&str>) -> Result<Option<&'static str>> {
    let Some(name) = name else { return Ok(None) };
    match metric_named(name) {
        Some(known) => Ok(Some(known)),
        None => anyhow::bail!("--metric: no figure is called `{name}`; use one of: {}", metric_names()),
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    let paths = [trace_input::expand(&args.a)?, trace_input::expand(&args.b)?];
    if let Some(path) = &args.html {
        run_dir::check_output(path, &paths.concat())?;
    }
    let options = args.view.options()?;
    let metric = metric(args.metric.as_deref())?;
    let known = known_runs(&paths)?;
    if known.is_none() && metric.is_some() {
        anyhow::bail!("--metric: traces have no figures of whole runs; give run directories, or leave it out");
    }
    if known.is_some() && args.between_run.is_some() {
        anyhow::bail!(
            "--between-run is for traces of which nothing else is known; for run directories the spread comes from repeats or `strobe doctor --noise`: leave it out"
        );
    }
    let spinner = progress::Waiting::new("reading");
    let traces = read_sides(&paths)?;
    drop(spinner);
    let spinner = progress::Waiting::new("comparing");
    let contexts = [trace_input::contexts(&traces[0], &options)?, trace_input::contexts(&traces[1], &options)?];
    let warnings = known.as_ref().and_then(|known| out_of_reach(known, &contexts)).into_iter().collect();
    let options = CompareOptions {
        names: side_names(&args.a, &args.b),
        rows: args.top,
        runs: known.map(|known| runs_of(known, metric, false)),
        between_runs: args.between_run.unwrap_or(BETWEEN_RUNS),
        margin: args.gate.margin(),
        warnings,
    };
    let comparison = compare::compare(&contexts[0], &contexts[1], &options);
    drop(spinner);
    let format = if args.json { Format::Json } else { args.format };
    // The report first: whatever happens to the page, the answer is there.
    match format {
        Format::Json => {
            let document = json!({
                "strobe": env!("CARGO_PKG_VERSION"),
                "a": traces[0].iter().map(trace_input::sources).collect::<Vec<_>>(),
                "b": traces[1].iter().map(trace_input::sources).collect::<Vec<_>>(),
                "outcome": comparison.verdict.outcome,
                "comparison": comparison,
                "gate": args.gate.to_json(&comparison.verdict),
            });
            output::line(&format!("{document:#}"));
        }
        Format::Csv => {
            output::print(&sheets::csv(&[comparison.report()]));
            output::note(&comparison.verdict.sentence);
        }
        Format::Table => show(&comparison, args.top),
    }
    if let Some(path) = &args.html {
        let page = explore::comparison_page(&comparison, &contexts, explore::run_links(path, &paths));
        run_dir::write_whole(path, page.as_bytes())?;
        if format == Format::Table {
            output::line(&format!("\npage      {}", path.display()));
        }
    }
    let inspect = match &args.html {
        Some(page) => page.display().to_string(),
        None => shell::line(Command::new("strobe").args(["compare", &args.a, &args.b, "--html", "diff.html"])),
    };
    args.gate.judge(&comparison.verdict, &inspect)
}

/// Prints a comparison for people.
pub(crate) fn show(comparison: &Comparison, top: usize) {
    output::print(&sheets::text(&comparison.report(), output::width(), top));
}

/// Reads every repeat of both sides as a trace of its own. Where some are run directories with recorded windows and some
/// without, the iterations of all are read instead: like is compared with like.
pub(crate) fn read_sides(sides: &[Vec<PathBuf>; 2]) -> Result<[Vec<Trace>; 2]> {
    let all = || sides.iter().flatten();
    let mixed = all().all(|path| RunDir::is_at(path)) && {
        let profiled = all().filter(|path| path.join(run_dir::TRACE).is_file()).count();
        profiled > 0 && profiled < all().count()
    };
    // Without recorded windows on either side iterations are all there is: nothing has to be said of that.
    let plain = all().all(|path| RunDir::is_at(path) && !path.join(run_dir::TRACE).is_file());
    let read = |path: &PathBuf| match mixed || plain {
        true => trace_input::iterations_of(path),
        false => trace_input::read(std::slice::from_ref(path)),
    };
    let side = |paths: &Vec<PathBuf>| paths.iter().map(read).collect::<Result<Vec<_>>>();
    Ok([side(&sides[0])?, side(&sides[1])?])
}

/// What is known of whole runs, where every path is a run directory.
pub(crate) fn known_runs(sides: &[Vec<PathBuf>; 2]) -> Result<Option<[Vec<KnownRun>; 2]>> {
    if !sides.iter().flatten().all(|path| RunDir::is_at(path)) {
        return Ok(None);
    }
    let side = |paths: &Vec<PathBuf>| {
        paths.iter().enumerate().map(|(process, path)| known_run(path, process)).collect::<Result<Vec<_>>>()
    };
    Ok(Some([side(&sides[0])?, side(&sides[1])?]))
}

/// The runs of both sides with what equal runs are known to differ by.
pub(crate) fn runs_of(known: [Vec<KnownRun>; 2], metric: Option<&str>, paired: bool) -> Runs {
    let stored = noise::known_for(&known).filter(|_| !paired);
    let decides = metric.or_else(|| known.iter().flatten().find_map(|run| run.metric)).map(str::to_owned);
    let remedy = remedy(&known);
    let sides = known.map(|side| side.into_iter().flat_map(|run| run.runs).collect());
    Runs { sides, paired, stored, metric: decides, remedy, ..Runs::default() }
}

/// The line to type where the spread between runs is not known.
fn remedy(known: &[Vec<KnownRun>; 2]) -> String {
    let first = known.iter().flatten().next();
    let text = |name: &str| first.and_then(|run| run.about.get(name)).and_then(Value::as_str);
    let measured = match (text("engine_dir"), text("dataset")) {
        (Some(engine), Some(dataset)) => {
            format!("`strobe doctor --noise --engine-dir {engine} --dataset {dataset}` measures it")
        }
        _ => "`strobe doctor --noise --engine-dir E --dataset D` measures it".to_owned(),
    };
    format!("{measured}, and `strobe ab` runs both sides until the interval is narrow")
}

/// Options that act on prompts alone: of a build, and of a run.
const PROMPTS_ONLY: [&str; 3] = ["context_fmha", "chunked_context", "kv_cache_reuse"];

/// Of those of a run, what they are where nobody says.
const RUN_DEFAULTS: [(&str, &str); 2] = [("chunked_context", "enable"), ("kv_cache_reuse", "disable")];

/// The options of a run by name: how its engine was built, and with which words it was started.
fn options_of(about: &Value) -> Map<String, Value> {
    let build = about.pointer("/engine/build_config").and_then(Value::as_object);
    let mut options = build.and_then(|build| build.get("plugin_config")?.as_object().cloned()).unwrap_or_default();
    let plain = build.into_iter().flatten().filter(|(name, _)| *name != "plugin_config");
    options.extend(plain.map(|(name, value)| (name.clone(), value.clone())));
    let words = about.get("command").and_then(Value::as_str).and_then(|line| shell::words(line).ok());
    let Some(words) = words else { return options };
    for (name, usual) in RUN_DEFAULTS {
        let given = words.iter().enumerate().rev().find_map(|(place, word)| {
            let long = word.strip_prefix("--")?.replace('-', "_");
            match long.split_once('=') {
                Some((given, value)) => (given == name).then(|| value.to_owned()),
                None => (long == name).then(|| words.get(place + 1).cloned())?,
            }
        });
        options.insert(name.to_owned(), given.unwrap_or_else(|| usual.to_owned()).into());
    }
    options
}

/// What to say where the sides differ in options that cannot act in the recorded iterations.
pub(crate) fn out_of_reach(known: &[Vec<KnownRun>; 2], contexts: &[Vec<Context>; 2]) -> Option<String> {
    let [a, b] = [options_of(&known[0].first()?.about), options_of(&known[1].first()?.about)];
    let differing: Vec<&str> =
        PROMPTS_ONLY.into_iter().filter(|name| a.get(*name).zip(b.get(*name)).is_some_and(|(a, b)| a != b)).collect();
    let decode = |found: &Found| found.kind == Some(IterationKind::Decode);
    let all: Vec<&Found> = contexts.iter().flatten().flat_map(|context| &context.iterations.list).collect();
    let recorded = contexts.iter().flatten().any(|context| !context.trace.ops.is_empty());
    if differing.is_empty() || all.is_empty() || !recorded || !all.into_iter().all(decode) {
        return None;
    }
    let (act, it) = if differing.len() == 1 { ("acts", "it") } else { ("act", "them") };
    Some(format!(
        "the sides differ in {}, which {act} on prompts only; the recorded iterations are decode steps and cannot show {it}: \
         record the first iterations (--profile 0-20)",
        differing.join(" and ")
    ))
}

/// What to call the sides: the last part of each path, or the whole where these are the same.
fn side_names(a: &str, b: &str) -> [String; 2] {
    let last = |path: &str| Path::new(path).file_name().map_or(path.to_owned(), |n| n.to_string_lossy().into_owned());
    if last(a) == last(b) { [a.to_owned(), b.to_owned()] } else { [last(a), last(b)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_run_are_those_of_its_build_and_of_its_command() {
        let of = |command: &str| {
            options_of(
                &json!({"command": command, "engine": {"build_config": {"plugin_config": {"context_fmha": true}}}}),
            )
        };
        let plain = of("strobe bench throughput --engine-dir E");
        assert_eq!(plain["context_fmha"], true);
        assert_eq!((&plain["chunked_context"], &plain["kv_cache_reuse"]), (&json!("enable"), &json!("disable")));
        let given = of("strobe bench throughput --kv_cache_reuse enable --chunked-context=disable");
        assert_eq!((&given["chunked_context"], &given["kv_cache_reuse"]), (&json!("disable"), &json!("enable")));
    }

    #[test]
    fn sides_have_different_names() {
        assert_eq!(side_names("x/a.json", "y/b.json"), ["a.json", "b.json"]);
        assert_eq!(side_names("x/run", "y/run"), ["x/run", "y/run"]);
    }
}
