//! `strobe analyze`: where the time of a trace went.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::json;
use strobe_analyze::iterations;
use strobe_analyze::reports::{self, Entry};
use strobe_analyze::sheet::Report;
use strobe_report::html::Link;
use strobe_report::human;

use crate::sheets::Format;
use crate::trace_input::{self, ViewArgs};
use crate::{explore, output, progress, run_dir, sheets};

const EXAMPLES: &str = "EXAMPLES:
  strobe analyze report.sqlite                       an Nsight Systems export (nsys export --type sqlite)
  strobe analyze trace.json.gz --html trace.html     a PyTorch profiler trace, as one HTML file
  strobe analyze RUN --report budget,gaps            a run directory of strobe bench --profile
  strobe analyze rank*.json.gz                       several ranks of one run
  strobe analyze report.sqlite --report kern-sum --format csv
                                                     as nsys stats -r cuda_gpu_kern_sum -f csv";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES, after_help = reports_help())]
pub(crate) struct Args {
    /// Trace files (Nsight Systems SQLite or report, PyTorch profiler JSON, strobe), a run directory or one of tables in
    /// Parquet; several are ranks of one job
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Reports to print, `all` for every one; see the list below
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    report: Vec<String>,
    /// How to print them
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// The same as --format json
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// Also write all reports and a timeline as one self-contained HTML file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Rows shown of each table, 0 for all
    #[arg(long, value_name = "N", default_value_t = DEFAULT_TOP)]
    top: usize,
    /// List what the iterations may be (ranges, graphs, kernels that repeat, with counts) and what to type to choose
    #[arg(long, conflicts_with_all = ["report", "html"])]
    list_iterations: bool,
    #[command(flatten)]
    view: ViewArgs,
}

/// Rows shown of each table when nobody says.
const DEFAULT_TOP: usize = 12;

/// What is printed when no report was asked for: the first screen.
const FIRST_SCREEN: [&str; 5] = ["summary", "budget", "categories", "kern-sum", "advice"];

fn reports_help() -> String {
    let widest = reports::ALL.iter().map(|entry| entry.name.len()).max().unwrap_or(0);
    let lines = reports::ALL.iter().map(|entry| format!("  {:<widest$}  {}\n", entry.name, entry.question));
    format!("REPORTS (default: {}):\n{}", FIRST_SCREEN.join(","), lines.collect::<String>())
}

fn chosen(names: &[String]) -> Result<Vec<&'static Entry>> {
    if names.is_empty() {
        return Ok(FIRST_SCREEN.iter().filter_map(|name| reports::find(name)).collect());
    }
    let mut entries: Vec<&'static Entry> = Vec::new();
    for name in names.iter().map(|name| name.trim()).filter(|name| !name.is_empty()) {
        if name == "all" {
            entries.extend(reports::ALL);
            continue;
        }
        match reports::find(name) {
            Some(entry) => entries.push(entry),
            None => {
                let known: Vec<_> = reports::ALL.iter().map(|entry| entry.name).collect();
                bail!("there is no report `{name}`; there are {}, and `all`", known.join(", "));
            }
        }
    }
    Ok(entries)
}

/// The first screen has the findings and the mean iteration; what stands behind them are reports of their own.
fn without_evidence(report: &mut Report) {
    let more = match report.name {
        "advice" => "The figures behind each finding: --report advice.",
        "budget" => "Medians, spread and the worst iterations: --report budget.",
        _ => return,
    };
    if report.sheets.len() > 1 {
        report.sheets.truncate(1);
        report.notes.push(more.to_owned());
    }
}

/// Links from a page to those of the run directory that it shows.
fn page_links(page: &Path, traces: &[PathBuf]) -> Vec<Link> {
    match traces {
        [run] => explore::pages_of_run(page, "the run", run),
        _ => Vec::new(),
    }
}

/// Print what `strobe analyze PATH` prints.
pub(crate) fn first_screen(path: &Path) -> Result<()> {
    run(Args {
        traces: vec![path.to_owned()],
        report: Vec::new(),
        format: Format::Table,
        json: false,
        html: None,
        top: DEFAULT_TOP,
        list_iterations: false,
        view: ViewArgs::default(),
    })
}

pub(crate) fn run(args: Args) -> Result<()> {
    let entries = chosen(&args.report)?;
    let options = args.view.options()?;
    if let Some(path) = &args.html {
        run_dir::check_output(path, &args.traces)?;
    }
    let trace = trace_input::read(&args.traces)?;
    let spinner = progress::Waiting::new("analysing");
    let context = trace_input::context(&trace, &options)?;
    // Where the host computes there are no kernels, but operators.
    let host = args.report.is_empty() && context.computes_on_host();
    let for_host = |entry: &'static Entry| match entry.name {
        "kern-sum" if host => reports::find("operators").unwrap_or(entry),
        _ => entry,
    };
    let entries: Vec<&'static Entry> = entries.into_iter().map(for_host).collect();
    let mut reports = match args.list_iterations {
        true => vec![iterations::candidates_report(&context)],
        false => reports::run_all(&entries, &context),
    };
    drop(spinner);
    let format = if args.json { Format::Json } else { args.format };
    // The reports first: whatever happens to the page, they are there.
    match format {
        Format::Table => {
            if args.report.is_empty() {
                reports.iter_mut().for_each(without_evidence);
            }
            let origin = trace.extent().map_or(0, |(start, _)| start);
            let relative = reports.into_iter().map(|report| sheets::relative_to(report, origin));
            let texts: Vec<_> = relative.map(|r| sheets::text(&r, output::width(), args.top)).collect();
            output::print(&texts.join("\n"));
        }
        Format::Csv => {
            output::print(&sheets::csv(&reports));
            let absent = reports.iter().filter_map(|r| Some((r.name, r.not_applicable.as_ref()?)));
            absent.for_each(|(name, why)| output::warn(&format!("{name}: {why}")));
        }
        Format::Json => {
            let document = json!({
                "strobe": env!("CARGO_PKG_VERSION"),
                "sources": trace_input::sources(&trace),
                "iterations": context.iterations.summary(),
                "reports": reports.iter().map(sheets::json).collect::<Vec<_>>(),
            });
            output::line(&format!("{document:#}"));
        }
    }
    if let Some(path) = &args.html {
        let page = explore::trace_page(&context, page_links(path, &args.traces));
        run_dir::write_whole(path, page.as_bytes())?;
        if format == Format::Table {
            output::line(&format!("\npage      {} ({})", path.display(), human::bytes(page.len() as u64)));
        }
    }
    Ok(())
}
