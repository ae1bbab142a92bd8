//! `strobe simulate selftest`.

use anyhow::Result;
use serde_json::json;
use strobe_report::table::Table;
use strobe_sim::selftest;

use super::{NotSo, threads};
use crate::{output, progress};

const EXAMPLES: &str = "EXAMPLES:
  strobe simulate selftest
  strobe simulate selftest --replications 60 --requests 20000 --seed 7 --json";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(super) struct Args {
    /// Independent replications of each check, at least 30
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(30..=10_000))]
    replications: u64,
    /// Requests counted in each replication, after its warm-up
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    requests: u64,
    /// Seed
    #[arg(long, value_name = "S", default_value_t = 420)]
    seed: u64,
    /// Print the checks as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let bar = progress::kernels(selftest::num_cases() as u64);
    bar.set_message("models");
    let report = selftest::run(args.replications as usize, args.requests, args.seed, threads(), &|| bar.inc(1))?;
    bar.finish_and_clear();
    if args.json {
        output::line(&format!("{:#}", json!(report)));
    } else {
        let mut table =
            Table::new(["model: quantity", "theory", "simulated", "standard error", "band", "z", ""]).left(0);
        for check in &report.checks {
            let band = if check.band > 0.0 { format!("{:.1} %", check.band * 100.0) } else { String::new() };
            table.push([
                check.name.clone(),
                format!("{:.6}", check.expected),
                format!("{:.6}", check.measured),
                format!("{:.6}", check.standard_error),
                band,
                format!("{:+.2}", check.z),
                if check.passed { "ok" } else { "FAILED" }.into(),
            ]);
        }
        output::print(&table.render(output::width()));
        output::line(&format!(
            "{} checks of {} replications with {} requests each; |z| must stay below 3.5; {} are above 2, and chance allows {}",
            report.checks.len(),
            report.replications,
            report.requests,
            report.above_two.0,
            report.above_two.1
        ));
    }
    if report.passed { Ok(()) } else { Err(NotSo("the simulator disagrees with queueing theory".into()).into()) }
}
