//! `strobe compare`: what differs between two runs or traces, and why.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::json;
use strobe_analyze::compare::{self, CompareOptions, Outcome, RunFigure, WholeRuns};
use strobe_report::human;
use strobe_stats::Spread;
use strobe_trace::Trace;

use crate::bench::outcome::{OUTPUT_THROUGHPUT, spreads};
use crate::run_dir::{self, RunDir};
use crate::trace_input::{self, ViewArgs};
use crate::{explore, output, progress, sheets};

const EXAMPLES: &str = "EXAMPLES:
  strobe compare run-a run-b                                two run directories
  strobe compare before.sqlite after.sqlite --html d.html   two Nsight Systems exports, as a page
  strobe compare 'base-*' 'new-*' --fail-on-regression 5%   repeats of each side, as a gate in CI";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// The first side: a trace, a run directory, or a quoted pattern such as 'runs/a-*' that matches repeats
    #[arg(value_name = "A")]
    a: String,
    /// The second side
    #[arg(value_name = "B")]
    b: String,
    /// Exit with 1 when B is significantly slower than A by more than this
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    fail_on_regression: Option<f64>,
    #[command(flatten)]
    view: ViewArgs,
    /// Rows shown of each table, 0 for all
    #[arg(long, value_name = "N", default_value_t = 15)]
    top: usize,
    /// Print the comparison as JSON
    #[arg(long)]
    json: bool,
    /// Also write it as one page that can be mailed
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// `5%`, `5 %` or `5`. A bare number below 1 could mean a fraction or a share of a per cent: it is refused.
pub fn percent(text: &str) -> Result<f64, String> {
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
pub struct Regression(String);

impl std::fmt::Display for Regression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "regression: {}", self.0)
    }
}

impl std::error::Error for Regression {}

/// One side: every repeat as a trace of its own.
fn read_side(paths: &[PathBuf]) -> Result<Vec<Trace>> {
    paths.iter().map(|path| trace_input::read(std::slice::from_ref(path))).collect()
}

pub fn run(args: Args) -> Result<()> {
    let paths = [trace_input::expand(&args.a)?, trace_input::expand(&args.b)?];
    if let Some(path) = &args.html {
        run_dir::check_output(path, &paths.concat())?;
    }
    let options = args.view.options()?;
    let runs = whole_runs(&paths)?;
    let (a, b) = (read_side(&paths[0])?, read_side(&paths[1])?);
    let spinner = progress::Waiting::new("comparing");
    let contexts = [trace_input::contexts(&a, &options)?, trace_input::contexts(&b, &options)?];
    let names = side_names(&args.a, &args.b);
    let comparison = compare::compare(&contexts[0], &contexts[1], &CompareOptions { names, rows: args.top, runs });
    if let Some(path) = &args.html {
        let page = explore::comparison_page(&comparison, &contexts);
        run_dir::write_whole(path, page.as_bytes())?;
    }
    drop(spinner);
    let regression = args.fail_on_regression.map(|threshold| comparison.regression(threshold));
    if args.json {
        let document = json!({
            "strobe": env!("CARGO_PKG_VERSION"),
            "a": a.iter().map(trace_input::sources).collect::<Vec<_>>(),
            "b": b.iter().map(trace_input::sources).collect::<Vec<_>>(),
            "comparison": comparison,
            "regression": regression.as_ref().map(|found| json!({"threshold": args.fail_on_regression, "found": found})),
        });
        output::line(&format!("{document:#}"));
    } else {
        output::print(&sheets::text(&comparison.report(), output::width(), args.top));
        if let Some(path) = &args.html {
            output::line(&format!("\npage      {}", path.display()));
        }
    }
    for group in args.fail_on_regression.map_or(Vec::new(), |threshold| comparison.without_interval(threshold)) {
        let why = group.no_interval.as_deref().unwrap_or("too few iterations");
        output::warn(&format!("the gate does not judge {}: no interval, {why}; add repeats", group.name));
    }
    match (args.fail_on_regression, regression.flatten()) {
        (Some(_), _) if comparison.verdict.outcome == Outcome::NotComparable => {
            bail!("the gate cannot be judged: {}", comparison.verdict.reasons.join("; "))
        }
        (Some(threshold), Some(found)) => bail!(Regression(format!(
            "{} is {} slower (more than {} allowed)",
            found.group,
            human::percent(found.change),
            human::percent(threshold)
        ))),
        _ => Ok(()),
    }
}

/// The figures of all finished runs of both sides, where every path is a run directory.
fn whole_runs(sides: &[Vec<PathBuf>; 2]) -> Result<Option<WholeRuns>> {
    let mut all = [Vec::new(), Vec::new()];
    for (paths, figures) in sides.iter().zip(&mut all) {
        for path in paths {
            if !RunDir::is_at(path) {
                return Ok(None);
            }
            let run = RunDir::open(path)?;
            if run.repeats.is_empty() && !run.is_partial() {
                return Ok(None);
            }
            figures.extend(run.repeats);
        }
    }
    let [a, b] = &all;
    // A run that was cut short has none.
    if a.is_empty() || b.is_empty() {
        return Ok(None);
    }
    let counts = [a.len(), b.len()];
    let of_b = spreads(b);
    let figure = |(name, a): (&str, Spread)| {
        let (_, b) = of_b.iter().find(|(other, _)| *other == name)?;
        Some(RunFigure {
            name: name.to_owned(),
            a: a.median,
            b: b.median,
            a_range: [a.min, a.max],
            b_range: [b.min, b.max],
            counts: [a.count, b.count],
        })
    };
    let figures: Vec<RunFigure> = spreads(a).into_iter().filter_map(figure).collect();
    let sentence = figures.iter().find(|figure| figure.name == OUTPUT_THROUGHPUT).and_then(in_words);
    Ok(Some(WholeRuns { counts, figures, sentence }))
}

/// How a figure differs over whole runs.
fn in_words(figure: &RunFigure) -> Option<String> {
    let (name, unit) = figure.name.trim_end_matches(')').split_once(" (")?;
    let [a, b] = figure.counts;
    let mut of = if a.max(b) > 1 { format!("medians of {a} and {b} runs") } else { "one run of each".to_owned() };
    if let Some(apart) = figure.are_apart() {
        let from = |[low, high]: [f64; 2]| format!("{} to {}", human::number(low), human::number(high));
        let how = if apart { "do not meet" } else { "overlap" };
        of += &format!(", which {how}: {} and {}", from(figure.a_range), from(figure.b_range));
    }
    let (change, before, after) = (100.0 * figure.change()?, human::number(figure.a), human::number(figure.b));
    Some(format!("{name} of whole runs: {before} -> {after} {unit}, {change:+.1} % ({of})."))
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
    fn shares_and_names() {
        assert_eq!(percent("5%"), Ok(0.05));
        assert_eq!(percent("5"), Ok(0.05));
        assert_eq!(percent("0.5 %"), Ok(0.005));
        assert!(
            percent("0.05").is_err() && percent("five").is_err() && percent("-1%").is_err() && percent("nan").is_err()
        );
        assert_eq!(side_names("x/a.json", "y/b.json"), ["a.json", "b.json"]);
        assert_eq!(side_names("x/run", "y/run"), ["x/run", "y/run"]);
    }
}
