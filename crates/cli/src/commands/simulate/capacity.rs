//! `strobe simulate capacity`.

use anyhow::{Result, bail};
use serde_json::json;
use strobe_sim::{Scenario, Slo, capacity};

use super::scenario::ScenarioArgs;
use super::{NotSo, heading, threads};
use crate::{output, progress};

const EXAMPLES: &str = "EXAMPLES:
  strobe simulate capacity --slo ttft:p99:500ms --slo tpot:p99:50ms --cost cost.json --input-tokens 512 --output-tokens 128
  strobe simulate capacity --find replicas --rate 200 --slo e2e:p99:5s --cost cost.json --max-replicas 32";

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Find {
    /// The largest rate
    Rate,
    /// The fewest servers for --rate
    Replicas,
}

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    scenario: ScenarioArgs,
    /// What to look for [default: replicas when --rate is given, else the rate]
    #[arg(long, value_enum, help_heading = "Search")]
    find: Option<Find>,
    /// Most servers to try
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Search")]
    max_replicas: usize,
    /// Independent replications; the interval comes from their spread
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=1000), help_heading = "Search")]
    replications: u64,
    /// Print the answer as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,
}

fn name(slo: &Slo) -> String {
    let metric = json!(slo.metric);
    let at = slo.quantile.map_or("mean".to_string(), |q| format!("p{}", q * 100.0));
    format!("{} {at}", metric.as_str().unwrap_or(""))
}

pub fn run(args: &Args) -> Result<()> {
    if args.scenario.slo.is_empty() {
        bail!("--slo: which limits must be met? Give at least one, such as --slo ttft:p99:500ms");
    }
    let find = args.find.unwrap_or(if args.scenario.rate.is_some() { Find::Replicas } else { Find::Rate });
    if find == Find::Replicas && args.scenario.rate.is_none() {
        bail!("--rate: which rate shall the servers take? Give --rate, or --find rate");
    }
    let mut options = args.scenario.clone();
    options.rate = options.rate.or(Some(1.0));
    options.num_requests = options.num_requests.or(Some(5_000));
    if options.warmup_requests == 0 {
        options.warmup_requests = options.num_requests.unwrap_or(0) / 10;
    }
    let built = options.build()?;
    let scenario = &built.scenario;
    if capacity::at_rate(scenario, 1.0).is_none() {
        bail!("--arrival: a capacity search needs a rate; closed loops, traces and at-once have none");
    }
    let _waiting = progress::Waiting::new("simulating");
    if let Some(no) = capacity::unmeetable(scenario)? {
        let best: Vec<String> = no
            .best_ms
            .iter()
            .map(|(slo, best)| format!("{} of {} ms: the best possible is {best:.3} ms", name(slo), slo.limit_ms))
            .collect();
        return Err(NotSo(format!("no rate meets {}, on a server that has nothing else to do", best.join("; "))).into());
    }
    match find {
        Find::Rate => largest(args, &built, scenario),
        Find::Replicas => {
            let found =
                capacity::fewest_servers(scenario, args.max_replicas.max(1), args.replications as usize, threads())?;
            let Some(servers) = found else {
                let text = format!(
                    "{} servers do not meet the limits at this rate; raise --max-replicas, or look at --find rate",
                    args.max_replicas
                );
                return Err(NotSo(text).into());
            };
            if args.json {
                output::line(&format!("{:#}", json!({"simulation": heading(&built), "replicas": servers})));
            } else {
                output::line(&format!("{servers} servers meet every limit in all {} replications", args.replications));
            }
            Ok(())
        }
    }
}

fn largest(args: &Args, built: &super::scenario::Built, scenario: &Scenario) -> Result<()> {
    let found = capacity::largest(scenario, args.replications as usize, threads())?;
    if args.json {
        output::line(&format!("{:#}", json!({"simulation": heading(built), "capacity": found})));
        return Ok(());
    }
    let (low, high) = found.interval_req_s;
    output::line(&format!(
        "{:.3} requests/s meet every limit ({low:.3} to {high:.3} with 95 % confidence, {} replications)",
        found.rate_req_s, args.replications
    ));
    for (slo, value) in &found.values_ms {
        output::line(&format!("  {:<12} {value:>12.3} ms of {} ms", name(slo), slo.limit_ms));
    }
    output::line(&format!(
        "  binding: {}; at this rate {:.1} % busy, {:.1} requests per iteration",
        json!(found.binds).as_str().unwrap_or(""),
        found.at_capacity.batch.utilization * 100.0,
        found.at_capacity.batch.time_mean_requests
    ));
    Ok(())
}
