//! `strobe convert`: a trace in another format.

use std::path::PathBuf;

use anyhow::{Context, Result};
use strobe_report::human;
use strobe_trace::export::{self, Format};

use crate::{output, progress, run_dir, trace_input};

const EXAMPLES: &str = "EXAMPLES:
  strobe convert report.sqlite -o report.perfetto-trace     Nsight Systems export, to open in Perfetto
  strobe convert trace.json.gz -o trace.sqlite              PyTorch profiler trace, for nsys' tools
  strobe convert RUN -o tables --to parquet                 one file per table, for DuckDB, Polars or Spark
  strobe convert rank0.json rank1.json -o all.json.gz       several ranks as one trace";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// Trace files (Nsight Systems SQLite or report, PyTorch profiler JSON, strobe), a run directory or one of tables in
    /// Parquet; several are ranks of one job
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Where to write: .json, .json.gz, .perfetto-trace, .csv, .parquet or .sqlite; a directory with --to csv or parquet
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Format, where the name does not tell: chrome, perfetto, csv, parquet, nsys
    #[arg(long, value_name = "FORMAT")]
    to: Option<String>,
    /// Print what was written as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let format = match &args.to {
        Some(name) => Format::from_name(name).with_context(|| {
            let known: Vec<_> = Format::ALL.iter().map(|format| format.as_str()).collect();
            format!("there is no format `{name}`; there are {}", known.join(", "))
        })?,
        None => Format::from_path(&args.output)?,
    };
    run_dir::check_not_input(&args.output, &args.traces)?;
    let trace = trace_input::read(&args.traces)?;
    let spinner = progress::Waiting::new("writing");
    let written = export::write(&trace, format, &args.output);
    drop(spinner);
    let written = written?;
    if args.json {
        let files: Vec<_> = written.files.iter().map(|f| f.display().to_string()).collect();
        let document = serde_json::json!({"format": format.as_str(), "files": files, "bytes": written.bytes, "events": written.events});
        output::line(&format!("{document:#}"));
        return Ok(());
    }
    output::line(&format!(
        "{}: {} events, {} in {} as {}",
        args.output.display(),
        human::count(written.events),
        human::bytes(written.bytes),
        if written.files.len() == 1 { "one file".to_owned() } else { format!("{} files", written.files.len()) },
        format.as_str()
    ));
    Ok(())
}
