//! `strobe simulate calibrate`.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::json;
use strobe_report::table::Table;
use strobe_sim::calibrate::{self, Fitted};

use super::NotSo;
use crate::{output, run_dir};

const EXAMPLES: &str = "EXAMPLES:
  strobe bench throughput --engine-dir E --dataset d.jsonl --request-rate 2 --output-dir RUN
  strobe simulate calibrate RUN -o cost.json
  strobe simulate --cost cost.json --rate 3";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(super) struct Args {
    /// Run directories of one engine on one machine
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Cost file to write
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Maximum median error of any kind of iteration, in %; above it nothing is written and the exit code is 1
    #[arg(long, value_name = "PERCENT", default_value_t = 15.0)]
    max_error: f64,
    /// Print the fit as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    run_dir::check_output(&args.output, &args.runs)?;
    let runs = args.runs.iter().map(|path| run_dir::read_calibration(path)).collect::<Result<Vec<_>>>()?;
    let fitted = calibrate::fit(&runs.iter().collect::<Vec<_>>(), env!("CARGO_PKG_VERSION"))?;
    let worst = fitted.regions.iter().map(|r| r.median_error * 100.0).fold(0.0, f64::max);
    let refused = worst > args.max_error || args.max_error.is_nan();
    if args.json {
        output::line(&format!("{:#}", json!(fitted)));
    } else {
        output::print(&text(&fitted));
    }
    if refused {
        let text = format!(
            "the fit is off by {worst:.1} % in the median for one kind of iterations, more than --max-error {} %: nothing was written; add runs at more loads, or raise --max-error",
            args.max_error
        );
        return Err(NotSo(text).into());
    }
    run_dir::write_whole(&args.output, format!("{:#}\n", json!(fitted)).as_bytes())?;
    if !args.json {
        output::line(&format!("wrote {}", args.output.display()));
    }
    Ok(())
}

fn text(fitted: &Fitted) -> String {
    let mut table = Table::new(["iterations", "count", "median error", "p90 error", "noise"]).left(0);
    let mut forms = String::new();
    for region in &fitted.regions {
        let kind = json!(region.region).as_str().unwrap_or("").to_string();
        let terms = region.device.terms.iter().zip(&region.host.terms).map(|((feature, device), (_, host))| {
            let name = json!(feature);
            let name = name.as_str().map_or_else(|| name.to_string().replace(['{', '}', '"'], ""), str::to_string);
            format!("{:.4} x {name}", device + host)
        });
        forms.push_str(&format!("{kind}, in ns: {}\n", terms.collect::<Vec<_>>().join(" + ").replace("+ -", "- ")));
        table.push([
            kind,
            region.samples.to_string(),
            format!("{:.2} %", region.median_error * 100.0),
            format!("{:.2} %", region.p90_error * 100.0),
            format!("{:.2} %", region.residual * 100.0),
        ]);
    }
    let c = &fitted.covers;
    format!(
        "{}errors are those of iterations left out of the fit (5 folds)\n{forms}covers {} to {} generating requests, {} to {} KV tokens, {} to {} prompt tokens per iteration\n",
        table.render(output::width()),
        c.decode_requests.0,
        c.decode_requests.1,
        c.decode_kv.0,
        c.decode_kv.1,
        c.context_tokens.0,
        c.context_tokens.1
    )
}
