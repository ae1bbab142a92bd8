//! `strobe simulate capacity`.

use anyhow::{Result, bail};
use serde_json::json;
use strobe_report::human;
use strobe_sim::capacity::{Capacity, Found, Resource, Search, Seen, Tried, rate_of};
use strobe_sim::scenario::Policy;
use strobe_sim::{Load, Scenario};

use super::scenario::{Built, MOST_SERVERS, ScenarioArgs};
use super::{NotSo, heading, or_interrupted, threads};
use crate::{interrupt, output, progress};

const EXAMPLES: &str = "EXAMPLES:
  strobe simulate capacity --slo ttft:p99:500ms --slo tpot:p99:50ms --cost cost.json --input-tokens 512 --output-tokens 128
  strobe simulate capacity --trace trace.csv --slo e2e:p99:5s --cost cost.json
  strobe simulate capacity --find replicas --rate 200 --slo e2e:p99:5s --cost cost.json --max-replicas 32";

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Find {
    /// The largest rate, or the largest --rate-scale of a trace
    Rate,
    /// The fewest servers for --rate, or for a trace as it is
    Replicas,
}

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    scenario: ScenarioArgs,
    /// What to look for [default: replicas when --rate or --rate-scale is given, else the rate]
    #[arg(long, value_enum, help_heading = "Search")]
    find: Option<Find>,
    /// Most servers to try
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Search")]
    max_replicas: usize,
    /// Seeds whose largest rates are compared; the interval comes from their spread
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=1000), help_heading = "Search")]
    replications: u64,
    /// Fresh long runs in which the answer must hold
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1000), help_heading = "Search")]
    runs: u64,
    /// Print the answer as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,
}

impl Args {
    fn is_recording(&self) -> bool {
        self.scenario.recording().is_some()
    }

    fn find(&self) -> Find {
        let has_rate = self.scenario.rate.is_some() || self.scenario.rate_scale.is_some();
        self.find.unwrap_or(if has_rate { Find::Replicas } else { Find::Rate })
    }

    fn check(&self) -> Result<()> {
        if self.scenario.slo.is_empty() {
            bail!("--slo is required: no limit to meet was given; pass at least one, such as --slo ttft:p99:500ms");
        }
        if !(1..=MOST_SERVERS).contains(&self.max_replicas) {
            bail!("--max-replicas: found {}, expected 1 to {MOST_SERVERS}", self.max_replicas);
        }
        if self.scenario.allow_unstable {
            bail!("--allow-unstable: a capacity is a rate at which queues stay bounded; leave it out");
        }
        match self.find() {
            Find::Replicas if self.scenario.rate.is_none() && !self.is_recording() => {
                bail!(
                    "--rate is required by --find replicas; pass the rate that the servers shall take, or --find rate"
                )
            }
            Find::Rate if self.scenario.rate_scale.is_some() => {
                bail!("--rate-scale: --find rate looks for it; leave it out, or pass --find replicas")
            }
            _ => Ok(()),
        }
    }

    /// The scenario; a rate that is looked for begins anywhere.
    fn build(&self) -> Result<Built> {
        let mut options = self.scenario.clone();
        if !self.is_recording() && options.concurrency.is_none() {
            options.rate = options.rate.or(Some(1.0));
        }
        let mut built = options.build()?;
        let scenario = &mut built.scenario;
        if self.is_recording() && scenario.warm_up == 0 {
            scenario.warm_up = scenario.num_requests / 10;
        }
        if rate_of(scenario).is_none() {
            bail!(
                "--arrival: a capacity search needs a rate; closed loops, at-once and traces of one instant have none"
            );
        }
        if self.find() == Find::Replicas {
            ScenarioArgs::check_memory(&built.scenario.policy, self.max_replicas)?;
        }
        Ok(built)
    }

    fn search(&self, built: &Built) -> Search {
        let usual = Search::default();
        // Many requests were asked for: they are a length that the answer must hold for.
        let longest = usual.longest.max(self.scenario.num_requests.unwrap_or(0));
        Search {
            replications: self.replications as usize,
            runs: self.runs as usize,
            shortest: self.scenario.num_requests.unwrap_or(usual.shortest).clamp(200, longest),
            longest,
            threads: threads(),
            cache_follows_batch: built.cache_follows_batch,
            stop: Some(interrupt::requested),
        }
    }
}

/// What arrives at the load's rate.
fn unit(scenario: &Scenario) -> &'static str {
    if matches!(scenario.load, Load::Sessions { .. }) { "conversations/s" } else { "requests/s" }
}

pub(super) fn run(args: &Args) -> Result<()> {
    args.check()?;
    let built = args.build()?;
    let scenario = &built.scenario;
    let search = args.search(&built);
    let _waiting = progress::Waiting::new("simulating");
    let idle = or_interrupted(search.idle(scenario))?;
    if let Some(limit) = idle.iter().find(|limit| limit.value_ms.is_none()) {
        let metric = limit.slo.metric.name();
        bail!("--slo {}: no request of this load has a {metric}, as outputs have one token; leave it out", limit.slo);
    }
    let missed: Vec<_> = idle.iter().filter(|limit| !limit.met).collect();
    if !missed.is_empty() {
        let best: Vec<String> = missed
            .iter()
            .map(|limit| {
                let (name, limit_ms, best) = (limit.slo.name(), limit.slo.limit_ms, limit.value_ms.unwrap_or(0.0));
                format!("{name} of {limit_ms} ms: the best possible is {best:.3} ms")
            })
            .collect();
        return Err(NotSo(format!("no rate meets {}, on a server that has nothing else to do", best.join("; "))).into());
    }
    match args.find() {
        Find::Rate => largest(args, &built, &search),
        Find::Replicas => fewest(args, &built, &search),
    }
}

fn fewest(args: &Args, built: &Built, search: &Search) -> Result<()> {
    let Some(found) = or_interrupted(search.fewest_servers(&built.scenario, args.max_replicas))? else {
        let text = format!(
            "{} servers do not meet the limits at this rate; raise --max-replicas, or look at --find rate",
            args.max_replicas
        );
        return Err(NotSo(text).into());
    };
    if args.json {
        // `replicas` is the number itself, as scripts want it.
        let mut report = json!({"simulation": heading(built)});
        if let (Some(report), serde_json::Value::Object(found)) = (report.as_object_mut(), json!(found)) {
            report.extend(found);
        }
        output::line(&format!("{report:#}"));
        return Ok(());
    }
    let prompts = match found.prefill_replicas {
        0 => String::new(),
        n => format!(", {n} of them for prefill,"),
    };
    output::line(&format!("{} servers{prompts} meet every limit {}", found.replicas, in_runs(&found.tried)));
    output::print(&values(&found.values_ms));
    Ok(())
}

fn in_runs(tried: &Tried) -> String {
    format!("in {} of {} runs with new seeds, {} requests each", tried.held, tried.runs, human::count(tried.requests))
}

fn values(seen: &[Seen]) -> String {
    let line = |seen: &Seen| {
        format!(
            "  {:<10} {:>12.3} ms of {} ms (median of the runs; highest {:.3} ms)\n",
            seen.slo.name(),
            seen.median_ms,
            seen.slo.limit_ms,
            seen.highest_ms
        )
    };
    seen.iter().map(line).collect()
}

fn largest(args: &Args, built: &Built, search: &Search) -> Result<()> {
    let unit = unit(&built.scenario);
    match or_interrupted(search.largest(&built.scenario))? {
        Found::Rate(found) if args.json => {
            output::line(&format!("{:#}", json!({"simulation": heading(built), "capacity": found})));
        }
        Found::Rate(found) => output::print(&text(&found, &built.scenario)),
        Found::Unlimited(tried) if args.json => {
            let report = json!({"simulation": heading(built), "capacity": null, "unlimited_up_to_req_s": tried});
            output::line(&format!("{report:#}"));
        }
        Found::Unlimited(tried) => {
            output::line(&format!("no limit binds: all hold at any rate up to {tried} {unit}; pass tighter ones"));
        }
        Found::Never(no) => {
            let best: Vec<String> = no
                .best_ms
                .iter()
                .map(|(slo, best)| format!("{} {best:.3} ms of {} ms", slo.name(), slo.limit_ms))
                .collect();
            let text = format!("no rate meets every limit in long runs; an idle server reaches {}", best.join("; "));
            return Err(NotSo(text).into());
        }
    }
    Ok(())
}

/// Why the rate is not larger.
fn binding(found: &Capacity, policy: &Policy) -> String {
    let what = match &found.binds.slo {
        Some(slo) => format!("above this rate {} of {} ms breaks first", slo.name(), slo.limit_ms),
        None => "saturation (a queue that grows, or requests refused)".into(),
    };
    let why = match (found.binds.resource, policy) {
        (Resource::Kv, Policy::Engine(engine)) => format!("because of --kv-cache-blocks {}", engine.kv_blocks),
        (Resource::Batch, Policy::Engine(engine)) => {
            format!("because of --max-batch-size {}", engine.scheduler.max_batch_size)
        }
        (Resource::Batch, Policy::Dynamic(dynamic)) => format!("because of --max-batch-size {}", dynamic.max_batch),
        (Resource::Tokens, Policy::Engine(engine)) => {
            format!("because of --max-num-tokens {}", engine.scheduler.max_num_tokens)
        }
        // Dynamic batching has neither a cache nor a limit of tokens.
        (Resource::Compute, _) | (_, Policy::Dynamic(_)) => "because iterations take too long".into(),
    };
    format!("{what}, {why}")
}

fn text(found: &Capacity, scenario: &Scenario) -> String {
    let unit = unit(scenario);
    let rate = found.rate_req_s;
    let own = match found.rate_scale {
        Some(scale) => format!("--rate-scale {scale}, {rate:.3} {unit} on average, meets every limit"),
        None if unit == "requests/s" => format!("{rate} {unit} meet every limit"),
        None => format!("{rate} {unit}, {:.3} requests/s, meet every limit", found.requests_per_s),
    };
    let mut text = if found.only_one_run {
        let above = if found.tried_above.held > 0 { "hold too" } else { "do not" };
        format!("{own}; nothing is drawn at random, so that all runs are the same; at 5 % more they {above}\n")
    } else {
        let above = &found.tried_above;
        let rates = &found.replications_req_s;
        let (low, high) = rates.iter().fold((f64::MAX, 0f64), |(low, high), rate| (low.min(*rate), high.max(*rate)));
        let lower = if rate < low { "; the answer is lower, because other seeds hold it too" } else { "" };
        format!(
            "{own} {}; at 5 % more in {} of {}\n  {} seeds alone {low:.1} to {high:.1} {unit}{lower}\n",
            in_runs(&found.tried),
            above.held,
            above.runs,
            rates.len()
        )
    };
    text.push_str(&values(&found.values_ms));
    let batch = &found.at_capacity.batch;
    text.push_str(&format!(
        "  binding: {}; at the answer servers are {:.1} % busy, {:.1} requests per iteration\n",
        binding(found, &scenario.policy),
        batch.utilization * 100.0,
        batch.time_mean_requests
    ));
    for other in &found.what_if {
        let rate = format!("{} {unit}", human::number(other.rate_req_s));
        text.push_str(&format!("  with {:<28} {rate} ({:+.1} %)\n", other.options, 100.0 * other.change));
    }
    text
}
