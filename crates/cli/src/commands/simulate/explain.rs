//! `strobe simulate explain`: from a slow request to the iterations that made it slow. Runs that were measured can be
//! explained as well as simulated ones.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use strobe_report::table::Table;
use strobe_workload::RequestRecord;

use crate::output;
use crate::run_dir::{self, RunDir};

const EXAMPLES: &str = "EXAMPLES:
  strobe simulate explain RUN --slowest 3
  strobe simulate explain RUN --request 812 --json";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(super) struct Args {
    /// Run directory of `strobe simulate` or `strobe bench`
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Explain this request
    #[arg(long, value_name = "ID", conflicts_with = "slowest")]
    request: Option<u64>,
    /// Explain the K requests with the largest E2E
    #[arg(long, value_name = "K", default_value_t = 1)]
    slowest: usize,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

/// What is known of an iteration, as far as it matters to others.
struct Step {
    iter: u64,
    start_ns: u64,
    end_ns: u64,
    replica: u64,
    context_requests: u64,
    context_tokens: u64,
    generating: u64,
    queued: u64,
    decisions: Vec<(u64, String)>,
}

fn step(line: &str) -> Option<Step> {
    let record: Value = serde_json::from_str(line).ok()?;
    let logged = run_dir::logged_iteration(line)?.iteration;
    let decisions = record["strobe"]["decisions"].as_array().map(Vec::as_slice).unwrap_or_default();
    Some(Step {
        iter: logged.iter,
        start_ns: u64::try_from(logged.start).ok()?,
        end_ns: u64::try_from(logged.end).ok()?,
        replica: record["strobe"]["replica"].as_u64().unwrap_or(0),
        context_requests: u64::from(logged.context_requests),
        context_tokens: u64::from(logged.context_tokens),
        generating: u64::from(logged.generation_requests),
        queued: record["numQueuedRequests"].as_u64().unwrap_or(0),
        decisions: decisions
            .iter()
            .filter_map(|d| Some((d["request"].as_u64()?, d["decision"].as_str()?.to_string())))
            .collect(),
    })
}

pub(super) fn run(args: &Args) -> Result<()> {
    let run = RunDir::open(&args.run)?;
    let is_simulated = run.run.get("simulated").is_some();
    let records = run.requests()?;
    let read = |line: &str| step(line).context("not an iteration record of strobe");
    let steps = run.lines(run_dir::ITERATIONS, read)?.records;
    run.notices()?.iter().for_each(|notice| output::warn(notice));
    let chosen: Vec<&RequestRecord> = match args.request {
        Some(id) => match records.iter().find(|r| r.id == id) {
            Some(record) => vec![record],
            None => bail!("--request: {} holds no request {id}", args.run.display()),
        },
        None => {
            let mut by_time: Vec<&RequestRecord> = records.iter().filter(|r| r.last_token_ns().is_some()).collect();
            by_time.sort_by_key(|r| std::cmp::Reverse((r.last_token_ns().unwrap_or(0) - r.arrival_ns, r.id)));
            by_time.truncate(args.slowest.max(1));
            by_time
        }
    };
    let seen_with = if is_simulated {
        SeenWith::Timeline(format!("strobe analyze {} --html timeline.html", args.run.display()))
    } else {
        SeenWith::Profile
    };
    let lives: Vec<Life> = chosen.into_iter().map(|record| life(record, &steps, &seen_with)).collect();
    if args.json {
        output::line(&format!("{:#}", json!(lives.iter().map(Life::to_json).collect::<Vec<_>>())));
    } else {
        lives.iter().for_each(|life| output::print(&life.text()));
    }
    Ok(())
}

/// How to look at iterations of this run more closely.
enum SeenWith {
    /// Run the benchmark again and record them.
    Profile,
    /// This command shows those of the first server; a simulation has nothing else to record.
    Timeline(String),
}

/// What happened to a request.
struct Life<'a> {
    seen_with: &'a SeenWith,
    /// The server that had it.
    home: u64,
    record: &'a RequestRecord,
    /// Iterations that ran while it waited to be scheduled.
    waited: Vec<&'a Step>,
    /// Iterations that held it.
    ran: Vec<&'a Step>,
    /// What the scheduler said of it: iteration, decision.
    said: Vec<(u64, &'a str)>,
}

fn ms(from: u64, to: u64) -> f64 {
    (to as f64 - from as f64) / 1e6
}

fn life<'a>(record: &'a RequestRecord, steps: &'a [Step], seen_with: &'a SeenWith) -> Life<'a> {
    let (first, last) = record.iterations.unwrap_or((u64::MAX, 0));
    // Iteration numbers are those of one server; the one that began when the request was first scheduled names it.
    let home = steps
        .iter()
        .find(|s| s.iter == first && Some(s.start_ns) == record.first_scheduled_ns)
        .or(steps.iter().find(|s| s.iter == first))
        .map_or(0, |s| s.replica);
    let own = || steps.iter().filter(|s| s.replica == home);
    let scheduled = record.first_scheduled_ns.unwrap_or(u64::MAX);
    Life {
        seen_with,
        home,
        record,
        waited: own().filter(|s| s.end_ns > record.queued_ns && s.start_ns < scheduled).collect(),
        ran: own().filter(|s| (first..=last).contains(&s.iter)).collect(),
        said: own()
            .flat_map(|s| s.decisions.iter().filter(|d| d.0 == record.id).map(|d| (s.iter, d.1.as_str())))
            .collect(),
    }
}

impl Life<'_> {
    /// The iterations to profile to see the slowest part of it: those of its largest gap, the wait included.
    fn window(&self) -> Option<(u64, u64)> {
        let slowest = self.ran.iter().max_by_key(|s| (s.end_ns - s.start_ns, std::cmp::Reverse(s.iter)))?;
        Some((slowest.iter.saturating_sub(1), slowest.iter + 2))
    }

    fn parts(&self) -> Vec<(&'static str, f64)> {
        let r = self.record;
        let (Some(scheduled), Some(first), Some(last)) = (r.first_scheduled_ns, r.first_token_ns(), r.last_token_ns())
        else {
            return Vec::new();
        };
        vec![
            ("client lag s - a", ms(r.arrival_ns, r.sent_ns)),
            ("on its way q - s", ms(r.sent_ns, r.queued_ns)),
            ("queue d - q", ms(r.queued_ns, scheduled)),
            ("prompt t1 - d", ms(scheduled, first)),
            ("generation tn - t1", ms(first, last)),
        ]
    }

    fn text(&self) -> String {
        let r = self.record;
        let total = r.last_token_ns().map_or(0.0, |last| ms(r.arrival_ns, last));
        let mut text = format!(
            "request {}: {} prompt tokens, {} output tokens, {total:.3} ms, {} preemptions, {} prompt tokens from the cache\n",
            r.id,
            r.num_input_tokens,
            r.num_output_tokens(),
            r.preemptions,
            r.reused_tokens
        );
        for (name, value) in self.parts() {
            text.push_str(&format!("  {name:<20}{value:>12.3} ms  {:>5.1} %\n", value / total.max(1e-9) * 100.0));
        }
        let range = |steps: &[&Step]| match (steps.first(), steps.last()) {
            (Some(first), Some(last)) => format!("iterations {} to {}", first.iter, last.iter),
            _ => "no iteration".into(),
        };
        text.push_str(&format!("  waited for {}, ran in {}\n", range(&self.waited), range(&self.ran)));
        for (iter, decision) in squeeze(&self.said) {
            text.push_str(&format!("  {iter:<24}{decision}\n"));
        }
        let mut table =
            Table::new(["iteration", "at ms", "takes ms", "prompts", "prompt tokens", "generating", "queued"]);
        let mut slow: Vec<&&Step> = self.waited.iter().chain(&self.ran).collect();
        slow.sort_by_key(|s| (std::cmp::Reverse(s.end_ns - s.start_ns), s.iter));
        slow.dedup_by_key(|s| s.iter);
        for s in slow.into_iter().take(8) {
            table.push([
                s.iter.to_string(),
                format!("{:.3}", ms(r.arrival_ns, s.start_ns)),
                format!("{:.3}", ms(s.start_ns, s.end_ns)),
                s.context_requests.to_string(),
                s.context_tokens.to_string(),
                s.generating.to_string(),
                s.queued.to_string(),
            ]);
        }
        text.push_str("  its longest iterations:\n");
        text.push_str(&table.render(output::width()));
        if let Some(advice) = self.advice() {
            text.push_str(&format!("to see the slowest of them: {advice}\n"));
        }
        text.push('\n');
        text
    }

    fn advice(&self) -> Option<String> {
        let (first, last) = self.window()?;
        match self.seen_with {
            SeenWith::Profile => Some(format!("run the benchmark again with --profile {first}-{last}")),
            SeenWith::Timeline(_) if self.home > 0 => None, // the trace has the first server only
            SeenWith::Timeline(command) => Some(format!("{command}, iterations {first} to {last}")),
        }
    }

    fn to_json(&self) -> Value {
        let steps = |steps: &[&Step]| steps.first().zip(steps.last()).map(|(a, b)| [a.iter, b.iter]);
        let parts: serde_json::Map<_, _> = self.parts().into_iter().map(|(n, v)| (n.to_string(), json!(v))).collect();
        json!({
            "request": self.record.id,
            "record": self.record,
            "parts_ms": parts,
            "waited_for": steps(&self.waited),
            "ran_in": steps(&self.ran),
            "decisions": self.said.iter().map(|(iter, d)| json!({"iter": iter, "decision": d})).collect::<Vec<_>>(),
            "slowest_iterations": self.window().map(|(a, b)| format!("{a}-{b}")),
            "advice": self.advice(),
        })
    }
}

/// Runs of the same decision as one line each.
fn squeeze(said: &[(u64, &str)]) -> Vec<(String, String)> {
    let mut runs: Vec<(u64, u64, &str)> = Vec::new();
    for &(iter, decision) in said {
        match runs.last_mut() {
            Some((_, last, same)) if *same == decision => *last = iter,
            _ => runs.push((iter, iter, decision)),
        }
    }
    let name = |first: u64, last: u64| {
        if first == last { format!("iteration {first}") } else { format!("iterations {first} to {last}") }
    };
    runs.into_iter().map(|(first, last, decision)| (name(first, last), decision.to_string())).collect()
}
