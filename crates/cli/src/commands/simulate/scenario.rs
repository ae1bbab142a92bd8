//! From options to a scenario.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use strobe_engine::Policy as EnginePolicy;
use strobe_scheduler::scheduler::SchedulerConfig;
use strobe_sim::calibrate::{EngineLimits, Fitted};
use strobe_sim::cluster::{Autoscale, Failure, Transfer};
use strobe_sim::dynamic::{DynamicConfig, TimeoutAction};
use strobe_sim::lengths::{LONGEST, LengthDist};
use strobe_sim::profile::OperatorTables;
use strobe_sim::replay::{self, ReplayOptions};
use strobe_sim::splitwise::PhaseTables;
use strobe_sim::units::parse_duration_ns;
use strobe_sim::{ClusterConfig, CostModel, Linear, Load, Policy, ReplicaConfig, Routing, Scenario, Slo};
use strobe_workload::{Arrival, Prompt, Sample, read_dataset};

use crate::build_args::Switch;

/// More blocks than any server has; a cache that shall not bind needs no more.
const MOST_BLOCKS: usize = 1 << 20;

/// Requests that are simulated in about an hour.
const MOST_REQUESTS: u64 = 1_000_000_000;

/// Each server has its own scheduler and cache.
pub(super) const MOST_SERVERS: usize = 4096;

/// Each client has a request in some queue.
const MOST_CLIENTS: u64 = 1 << 20;

/// Each place in a batch, each instance and each level has memory of its own.
const MOST_PLACES: usize = 1 << 20;

/// More than any step of a model takes.
const MOST_STEP_TOKENS: usize = 1 << 30;

/// Memory that the bookkeeping of all servers may take. Replications run side by side, each with its own.
const MOST_BYTES: u128 = 4 << 30;

/// Memory of a cache block, of a place in the batch, and of a token that is kept for reuse.
const BYTES_PER_BLOCK: u128 = 48;
const BYTES_PER_PLACE: u128 = 256;
const BYTES_PER_TOKEN: u128 = 4;

/// Decisions of an autoscaler are events of their own: very short intervals would take forever to simulate.
const SHORTEST_INTERVAL_NS: u64 = 1_000_000;

/// On and off times so much shorter than the time between two requests would be drawn without end.
const SHORTEST_PERIODS: f64 = 1e-6;

/// Longer times would pass the end of the virtual clock: 100 years.
const LONGEST_TIME_NS: f64 = 100.0 * 365.0 * 86_400e9;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum PolicyChoice {
    /// The engine's scheduler: requests join and leave in every iteration
    Inflight,
    /// Triton's dynamic batcher: a batch is formed once
    Dynamic,
    /// The engine's scheduler with fixed batches: nothing new until the batch has ended
    Static,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum AdmissionChoice {
    /// Admit only what can finish
    #[value(name = "guaranteed_no_evict", alias = "guaranteed-no-evict")]
    GuaranteedNoEvict,
    /// Admit what fits the next step; preempt and recompute when blocks run out
    #[value(name = "max_utilization", alias = "max-utilization")]
    MaxUtilization,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum TimeoutChoice {
    Reject,
    Delay,
}

#[derive(clap::Args, Clone)]
pub(super) struct ScenarioArgs {
    /// Requests per second
    #[arg(long, value_name = "R", help_heading = "Load")]
    pub rate: Option<f64>,
    /// poisson, constant, gamma, onoff:on=10s,off=50s, drift:swing=0.5,period=60s or at-once [default: poisson]
    #[arg(long, value_name = "PROCESS", conflicts_with = "concurrency", help_heading = "Load")]
    pub arrival: Option<String>,
    /// Shape of gamma arrivals: below 1 bursty, above 1 regular
    #[arg(long, value_name = "B", help_heading = "Load")]
    pub burstiness: Option<f64>,
    /// How many requests [default: 1000, or all of a trace or dataset; `capacity` lengthens runs until its answer is steady,
    /// beginning with 2000]
    #[arg(long, value_name = "N", help_heading = "Load")]
    pub num_requests: Option<u64>,
    /// Prompt length: N, normal:MEAN,STDEV, uniform:MIN,MAX, lognormal:MEAN,SIGMA, geometric:MEAN or empirical:FILE
    /// [default: 128]
    #[arg(long, value_name = "LENGTH", allow_hyphen_values = true, help_heading = "Load")]
    pub input_tokens: Option<String>,
    /// Output length, in the same ways [default: 128]
    #[arg(long, value_name = "LENGTH", allow_hyphen_values = true, help_heading = "Load")]
    pub output_tokens: Option<String>,
    /// Closed loop: this many clients, each sending when its last request has ended
    #[arg(long, value_name = "C", conflicts_with = "rate", help_heading = "Load")]
    pub concurrency: Option<u64>,
    /// Requests per conversation; each turn's prompt repeats the conversation so far
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["trace", "concurrency"], help_heading = "Load")]
    pub turns: u32,
    /// Mean time between an answer and the next turn or request
    #[arg(long, value_name = "TIME", default_value = "0", help_heading = "Load")]
    pub think_time: String,
    /// Tokens that all prompts of conversations begin with
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with_all = ["trace", "concurrency"], help_heading = "Load")]
    pub shared_prefix: u32,
    /// Replay arrivals and lengths: Azure CSV, Mooncake or LLMServingSim JSONL, requests.jsonl of a run, or a CSV with
    /// arrival_s,input_tokens,output_tokens; .gz too
    #[arg(long, value_name = "FILE", help_heading = "Load")]
    pub trace: Option<PathBuf>,
    /// Take the lengths of a benchmark's dataset, in its order; it has no arrival times, so --rate or --concurrency gives
    /// them. A file that has some is taken as a --trace
    #[arg(long, value_name = "FILE", conflicts_with = "trace", help_heading = "Load")]
    pub dataset: Option<PathBuf>,
    /// Multiply the rate of a trace [default: 1]
    #[arg(long, value_name = "F", help_heading = "Load")]
    pub rate_scale: Option<f64>,
    /// Leave stamps that were rounded to ticks as they are, instead of spreading them over their tick
    #[arg(long, help_heading = "Load")]
    pub no_jitter: bool,

    /// What serves the requests
    #[arg(long, value_enum, default_value = "inflight", help_heading = "Server")]
    pub policy: PolicyChoice,
    /// Maximum requests per iteration or batch [default: the cost file's engine's, else 256]
    #[arg(long, value_name = "N", help_heading = "Server")]
    pub max_batch_size: Option<usize>,
    /// Maximum tokens per iteration [default: the cost file's engine's, else 8192]
    #[arg(long, value_name = "N", help_heading = "Server")]
    pub max_num_tokens: Option<usize>,
    /// Longest sequence [default: no limit]
    #[arg(long, value_name = "N", help_heading = "Server")]
    pub max_seq_len: Option<usize>,
    /// Admission under --policy inflight [default: guaranteed_no_evict]
    #[arg(long, value_enum, help_heading = "Server")]
    pub scheduler_policy: Option<AdmissionChoice>,
    /// KV cache blocks of each server [default: the cost file's engine's, with --cost analytic what the GPUs have left, else
    /// enough for a full batch]
    #[arg(long, value_name = "N", help_heading = "Server")]
    pub kv_cache_blocks: Option<usize>,
    /// Tokens per KV cache block [default: the cost file's engine's, else 64]
    #[arg(long, value_name = "N", help_heading = "Server")]
    pub tokens_per_block: Option<usize>,
    /// Reuse cached prefixes
    #[arg(long, value_enum, default_value = "disable", help_heading = "Server")]
    pub kv_cache_reuse: Switch,
    /// Spread long prompts over several iterations
    #[arg(long, value_enum, default_value = "enable", help_heading = "Server")]
    pub chunked_context: Switch,

    /// How long the oldest request may wait for others
    #[arg(long, value_name = "TIME", help_heading = "Dynamic batcher")]
    pub max_queue_delay: Option<String>,
    /// Batch sizes worth sending at once
    #[arg(long, value_name = "N,..", value_delimiter = ',', help_heading = "Dynamic batcher")]
    pub preferred_batch_size: Vec<usize>,
    /// Batches that run at the same time
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Dynamic batcher")]
    pub instances: usize,
    /// Priority levels that requests are spread over
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Dynamic batcher")]
    pub priority_levels: u32,
    /// Refuse or delay requests that waited this long
    #[arg(long, value_name = "TIME", help_heading = "Dynamic batcher")]
    pub queue_timeout: Option<String>,
    /// What becomes of those
    #[arg(long, value_enum, default_value = "reject", requires = "queue_timeout", help_heading = "Dynamic batcher")]
    pub timeout_action: TimeoutChoice,
    /// Maximum waiting requests; refuses more on arrival; 0 is no limit
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Dynamic batcher")]
    pub max_queue_size: usize,

    /// Cost of an iteration: linear:base=2ms,per_request=10us,per_context_token=3us,per_kv_token=5ns, or a file that
    /// `strobe simulate calibrate` wrote. Published profiles: llmservingsim:DIR,layers=32 or
    /// splitwise:FILE,model=M,hardware=H,tp=N. From hardware limits: analytic, with --gpu and --model
    #[arg(long, value_name = "COST|FILE", help_heading = "Cost")]
    pub cost: Option<String>,
    /// With --cost analytic: h200, h100, a100, l40s, a6000, l4, rtx4090, t4, or a TOML file with ops_per_s, bytes_per_s and,
    /// where they matter, link_bytes_per_s and memory_bytes
    #[arg(long, value_name = "GPU|FILE", help_heading = "Cost")]
    pub gpu: Option<String>,
    /// With --cost analytic: a preset, or a directory with config.json
    #[arg(long, value_name = "PRESET|DIR", help_heading = "Cost")]
    pub model: Option<String>,
    /// With --cost analytic: type of weights and cache: bfloat16, float16, float32 or fp8 [default: bfloat16]
    #[arg(long, value_name = "TYPE", help_heading = "Cost")]
    pub dtype: Option<String>,
    /// With --cost analytic: GPUs that share every layer [default: 1]
    #[arg(long, value_name = "N", help_heading = "Cost")]
    pub tp: Option<u32>,
    /// With a cost file: let iterations vary as the measured ones did [default: enable]
    #[arg(long, value_enum, help_heading = "Cost")]
    pub cost_noise: Option<Switch>,

    /// How many servers
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Cluster")]
    pub replicas: usize,
    /// Speed of each server relative to the cost, the last one for all that follow
    #[arg(long, value_name = "F,..", value_delimiter = ',', help_heading = "Cluster")]
    pub speeds: Vec<f64>,
    /// round-robin, random, least-outstanding, power-of-D (such as power-of-2), shortest-tokens or prefix-affinity
    #[arg(long, value_name = "HOW", default_value = "round-robin", help_heading = "Cluster")]
    pub routing: String,
    /// The first N servers only prefill, the others only decode
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Cluster")]
    pub prefill_replicas: usize,
    /// What moving a request from a prompt server to another takes
    #[arg(
        long,
        value_name = "base=TIME,per_token=TIME",
        default_value = "base=0",
        requires = "prefill_replicas",
        help_heading = "Cluster"
    )]
    pub transfer: String,
    /// A server is away: SERVER@FROM-UNTIL, such as 2@10s-30s; can be repeated
    #[arg(long, value_name = "SPEC", help_heading = "Cluster")]
    pub fail: Vec<String>,
    /// Start with N servers and add more up to --replicas: min=N,target=REQUESTS,delay=TIME,interval=TIME
    #[arg(long, value_name = "SPEC", help_heading = "Cluster")]
    pub autoscale: Option<String>,

    /// A limit for goodput, such as ttft:p99:500ms; can be repeated
    #[arg(long, value_name = "SLO", help_heading = "Answer")]
    pub slo: Vec<String>,
    /// Leave the first N requests out of all latencies
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Answer")]
    pub warmup_requests: u64,
    /// Seed of arrivals, lengths, routing and random costs
    #[arg(long, value_name = "S", default_value_t = 420, help_heading = "Answer")]
    pub seed: u64,
    /// Exit with 0 also when the queue grows without bound
    #[arg(long, help_heading = "Answer")]
    pub allow_unstable: bool,
}

/// A scenario with what a report says about it.
pub(super) struct Built {
    pub scenario: Scenario,
    /// Whether the cache was sized for the batch, as nobody said how large it is.
    pub cache_follows_batch: bool,
    pub workload: String,
    pub server: String,
    pub cost: String,
}

impl ScenarioArgs {
    /// The scenario that the options describe.
    pub(super) fn build(&self) -> Result<Built> {
        self.check_sizes()?;
        let (input, output, said) = self.lengths()?;
        let (load, workload, longest) = self.load(&input, &output, &said)?;
        let num_requests = match (&load, &input, self.num_requests) {
            (_, _, Some(0)) => bail!("--num-requests: expected at least 1, found 0"),
            (Load::Replay(requests), _, count) => count.unwrap_or(u64::MAX).min(requests.len() as u64),
            (_, LengthDist::Listed(values), None) => values.len() as u64,
            (_, _, count) => count.unwrap_or(1000),
        };
        if self.warmup_requests >= num_requests {
            bail!("--warmup-requests: {} leaves none of {num_requests} requests to count", self.warmup_requests);
        }
        let cost = self.cost_model()?;
        let limits = self.limits(&cost);
        let policy = self.policy(longest, &limits)?;
        ScenarioArgs::check_memory(&policy, self.replicas)?;
        let scenario = Scenario {
            load,
            input,
            output,
            num_requests,
            policy,
            cost,
            speeds: self.server_speeds()?,
            cluster: self.cluster()?,
            slos: self.slo.iter().map(|text| Slo::parse(text)).collect::<Result<_, _>>()?,
            warm_up: self.warmup_requests,
            seed: self.seed,
        };
        if let (Policy::Engine(config), Load::Replay(requests)) = (&scenario.policy, &scenario.load) {
            requests.iter().try_for_each(|request| strobe_sim::Replica::check(config, request))?;
        }
        let server = self.describe_server(&scenario);
        Ok(Built {
            cache_follows_batch: limits.kv_blocks == 0,
            workload: format!("{num_requests} requests, {workload}"),
            server,
            cost: self.describe_cost(),
            scenario,
        })
    }

    /// Refuse what would take more memory or time than there is, before any of it is taken.
    fn check_sizes(&self) -> Result<()> {
        let most = |option: &str, found: u64, most: u64, why: &str| {
            if found > most {
                bail!("{option}: found {found}, expected at most {most}: {why}");
            }
            Ok(())
        };
        let requests = self.num_requests.unwrap_or(0);
        most("--num-requests", requests, MOST_REQUESTS, "a billion takes about an hour")?;
        most("--replicas", self.replicas as u64, MOST_SERVERS as u64, "each server has its own scheduler and cache")?;
        let clients = self.concurrency.unwrap_or(0);
        most("--concurrency", clients, MOST_CLIENTS, "each client has a request in memory")?;
        let longest = u64::from(LONGEST);
        most("--shared-prefix", u64::from(self.shared_prefix), longest, "no model reads a longer prompt")?;
        most("--turns", u64::from(self.turns), longest, "no model reads a conversation of more tokens than that")?;
        let per_block = self.tokens_per_block.unwrap_or(0) as u64;
        most("--tokens-per-block", per_block, longest, "no model reads a longer sequence than such a block holds")?;
        let tokens = self.max_num_tokens.unwrap_or(0) as u64;
        most("--max-num-tokens", tokens, MOST_STEP_TOKENS as u64, "no step of a model takes more")?;
        let places = "each has memory of its own";
        most("--max-batch-size", self.max_batch_size.unwrap_or(0) as u64, MOST_PLACES as u64, places)?;
        most("--instances", self.instances as u64, MOST_PLACES as u64, places)?;
        most("--priority-levels", u64::from(self.priority_levels), MOST_PLACES as u64, places)?;
        let blocks = self.kv_cache_blocks.unwrap_or(0) as u64;
        most("--kv-cache-blocks", blocks, u64::from(u32::MAX) / 4, "blocks are numbered in 32 bits")
    }

    /// Refuse servers whose bookkeeping does not fit in memory.
    pub(super) fn check_memory(policy: &Policy, servers: usize) -> Result<()> {
        let Policy::Engine(config) = policy else { return Ok(()) };
        let kept = if config.reuse { BYTES_PER_TOKEN * config.tokens_per_block as u128 } else { 0 };
        let blocks = config.kv_blocks as u128 * (BYTES_PER_BLOCK + kept);
        let batch = config.scheduler.max_batch_size as u128 * BYTES_PER_PLACE;
        let steps = config.tokens_per_block as u128 * BYTES_PER_TOKEN;
        let all = servers as u128 * (blocks + batch + steps);
        if all > MOST_BYTES {
            let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
            bail!(
                "--kv-cache-blocks: {} blocks of {} tokens on each of {} servers take {:.1} GiB to simulate, expected at most {:.0} GiB; pass fewer --kv-cache-blocks or servers, or a smaller --max-batch-size",
                config.kv_blocks,
                config.tokens_per_block,
                servers,
                gib(all),
                gib(MOST_BYTES)
            );
        }
        Ok(())
    }

    /// A file with arrival times: the trace, or a dataset that is one.
    pub(super) fn recording(&self) -> Option<&PathBuf> {
        self.trace.as_ref().or(self.dataset.as_ref().filter(|path| !is_dataset(path)))
    }

    /// Prompt and output lengths, and how a report calls them.
    fn lengths(&self) -> Result<(LengthDist, LengthDist, String)> {
        if let Some(path) = self.trace.as_ref().or(self.dataset.as_ref()) {
            let given = [("--input-tokens", &self.input_tokens), ("--output-tokens", &self.output_tokens)];
            if let Some((option, _)) = given.iter().find(|(_, given)| given.is_some()) {
                bail!("{option}: the lengths come from {}; leave it out", path.display());
            }
        }
        if let Some(path) = self.dataset.as_ref().filter(|path| is_dataset(path)) {
            let samples = read_dataset(path)?;
            let lengths = |of: &dyn Fn(&Sample) -> Option<u32>| -> Result<LengthDist> {
                let values = samples.iter().map(of).collect::<Option<Vec<u32>>>().filter(|values| !values.is_empty());
                let values = values.with_context(|| {
                    format!(
                        "--dataset: {} holds text, whose tokens are not known; make it with `strobe prepare-dataset`",
                        path.display()
                    )
                })?;
                Ok(LengthDist::Listed(values.into()))
            };
            if let Some((index, sample)) = samples.iter().enumerate().find(|(_, sample)| sample.output_tokens > LONGEST)
            {
                bail!(
                    "--dataset: {} sample {index}: output_tokens is {}, expected at most {LONGEST}: no model gives a longer output; shorten it",
                    path.display(),
                    sample.output_tokens
                );
            }
            let input = lengths(&|sample| match &sample.prompt {
                Prompt::Ids(ids) => u32::try_from(ids.len()).ok(),
                Prompt::Text(_) => None,
            })?;
            let output = lengths(&|sample| Some(sample.output_tokens))?;
            return Ok((input, output, format!("lengths of {}", path.display())));
        }
        let [input, output] = [&self.input_tokens, &self.output_tokens].map(|text| text.as_deref().unwrap_or("128"));
        let said = format!("{input} in, {output} out");
        Ok((length("--input-tokens", input)?, length("--output-tokens", output)?, said))
    }

    fn load(&self, input: &LengthDist, output: &LengthDist, lengths: &str) -> Result<(Load, String, usize)> {
        let think_ns = time("--think-time", &self.think_time)?;
        let longest = (input.nearly_longest() + output.nearly_longest()) as usize;
        if let Some(path) = self.recording() {
            let own = [
                ("--rate", self.rate.is_some()),
                ("--arrival", self.arrival.is_some()),
                ("--burstiness", self.burstiness.is_some()),
                ("--concurrency", self.concurrency.is_some()),
                ("--think-time", think_ns > 0.0),
            ];
            if let Some((option, _)) = own.iter().find(|(_, given)| *given) {
                bail!("{option}: {} has arrival times of its own; leave it out, or use --rate-scale", path.display());
            }
            let rate_scale = self.rate_scale.unwrap_or(1.0);
            if !(rate_scale > 0.0 && rate_scale.is_finite()) {
                bail!("--rate-scale: expected a number above 0, found {rate_scale}");
            }
            let options = ReplayOptions { rate_scale, jitter: !self.no_jitter, seed: self.seed };
            let recorded = replay::read(path, &options)?;
            let longest = recorded.requests.iter().map(|r| (r.input + r.output) as usize).max().unwrap_or(1);
            let spread = recorded
                .spread_over_ns
                .map(|tick| format!(", stamps spread over their ticks of {} s", tick as f64 / 1e9))
                .unwrap_or_default();
            let said = format!("{} of {}, rate x {rate_scale}{spread}", recorded.format, path.display());
            return Ok((Load::Replay(Arc::new(recorded.requests)), said, longest));
        }
        if self.rate_scale.is_some() || self.no_jitter {
            bail!("--rate-scale and --no-jitter: only a --trace has them; leave them out");
        }
        if let Some(clients) = self.concurrency {
            if clients == 0 {
                bail!("--concurrency: expected at least 1 client, found 0");
            }
            let said = format!("closed loop of {clients} clients, think time {}, {lengths}", self.think_time);
            return Ok((Load::Closed { clients, think_ns }, said, longest));
        }
        let name = self.arrival.as_deref().unwrap_or("poisson");
        let arrival = self.arrival_process(name)?;
        let rate = arrival.rate().map_or(String::new(), |rate| format!(" at {rate} per second"));
        if self.turns == 0 {
            bail!("--turns: expected at least 1, found 0");
        }
        if self.turns == 1 && self.shared_prefix == 0 {
            if think_ns > 0.0 {
                bail!("--think-time: only clients (--concurrency) and conversations (--turns) think; leave it out");
            }
            return Ok((Load::Open(arrival), format!("{name}{rate}, {lengths}"), longest));
        }
        let load = Load::Sessions { arrival, turns: self.turns, think_ns, shared: self.shared_prefix };
        let said = format!(
            "conversations of {} turns, {name}{rate}, think time {}, shared prefix {}, {lengths} per turn",
            self.turns, self.think_time, self.shared_prefix
        );
        let mean = f64::from(self.turns) * (input.mean() + output.mean()) + f64::from(self.shared_prefix);
        if mean > f64::from(LONGEST) {
            bail!(
                "--turns: a conversation of {} turns comes to {mean:.0} tokens, expected at most {LONGEST}: no model reads a longer one; give fewer --turns or shorter --input-tokens and --output-tokens",
                self.turns
            );
        }
        Ok((load, said, longest.saturating_mul(self.turns as usize).saturating_add(self.shared_prefix as usize)))
    }

    fn arrival_process(&self, name: &str) -> Result<Arrival> {
        if name == "at-once" {
            return Ok(Arrival::AtOnce);
        }
        let Some(rate) = self.rate else {
            bail!("--rate: how many requests per second? Give --rate R, or --concurrency C, or --trace FILE");
        };
        let (kind, terms) = name.split_once(':').unwrap_or((name, ""));
        let term = |wanted: &str| -> Result<f64> {
            let found = terms.split(',').filter_map(|t| t.split_once('=')).find(|(n, _)| n.trim() == wanted);
            let Some((_, value)) = found else {
                bail!("--arrival: {kind} needs {wanted}=..; write onoff:on=10s,off=50s or drift:swing=0.5,period=60s");
            };
            if wanted == "swing" {
                return value.parse().map_err(|_| anyhow::anyhow!("--arrival: swing `{value}` is not a number"));
            }
            Ok(time("--arrival", value)? / 1e9)
        };
        let arrival = match kind {
            "onoff" | "on-off" => Arrival::OnOff { rate, on_s: term("on")?, off_s: term("off")? },
            "drift" => Arrival::Drift { rate, swing: term("swing")?, period_s: term("period")? },
            _ => {
                // The benchmark calls its rate --request-rate and has fewer processes.
                return Arrival::parse(name, rate, self.burstiness).map_err(|problem| {
                    let text = problem.to_string().replace("--request-rate", "--rate");
                    anyhow::anyhow!(
                        "{}",
                        text.replace(
                            "use poisson, gamma or constant",
                            "use poisson, constant, gamma, onoff, drift or at-once"
                        )
                    )
                });
            }
        };
        arrival
            .validate()
            .map_err(|problem| anyhow::anyhow!("{}", problem.to_string().replace("--request-rate", "--rate")))?;
        if let Arrival::OnOff { rate, on_s, off_s } = arrival
            && rate * (on_s + off_s) < SHORTEST_PERIODS
        {
            bail!(
                "--arrival: on and off together take {} s, expected at least a millionth of the time between two requests, {} s; give longer ones",
                on_s + off_s,
                1.0 / rate
            );
        }
        Ok(arrival)
    }

    fn cost_model(&self) -> Result<CostModel> {
        const FORMS: &str = "linear:base=2ms,per_request=10us,per_context_token=3us,per_kv_token=5ns";
        let Some(cost) = &self.cost else {
            bail!("--cost: how long does an iteration take? Give {FORMS}, or a file of `strobe simulate calibrate`");
        };
        let path = Path::new(cost);
        let fitted = if path.is_file() { Some(Fitted::read(path)?) } else { None };
        if let (Some(fitted), Some(model)) = (&fitted, &self.model) {
            let own = fitted.engine.get("model_name").and_then(|name| name.as_str()).unwrap_or("another engine");
            bail!(
                "--model: {cost} was measured on {own} and prices that engine only; leave --model out, or calibrate on runs of {model}"
            );
        }
        let given = [
            ("--gpu", self.gpu.is_some()),
            ("--model", self.model.is_some()),
            ("--dtype", self.dtype.is_some()),
            ("--tp", self.tp.is_some()),
        ];
        if let Some((name, _)) = given.iter().find(|(_, given)| *given && cost != "analytic") {
            bail!("{name}: only --cost analytic asks for it; leave it out");
        }
        if let Some(fitted) = fitted {
            let noise = self.cost_noise.is_none_or(|switch| switch.on());
            return Ok(CostModel::Fitted { fitted: Arc::new(fitted), noise, scale: 1.0 });
        }
        if self.cost_noise.is_some() {
            bail!("--cost-noise: only a cost file knows how much iterations vary");
        }
        if cost == "analytic" {
            return self.analytic();
        }
        match cost.split_once(':') {
            Some(("linear", terms)) => Ok(CostModel::Linear(Linear::parse(terms)?)),
            Some(("splitwise", spec)) => Ok(CostModel::Phases(Arc::new(PhaseTables::parse(spec)?))),
            Some(("llmservingsim", spec)) => Ok(CostModel::Tables(Arc::new(OperatorTables::parse(spec)?))),
            _ => bail!("--cost: `{cost}` is neither a file nor {FORMS}"),
        }
    }

    /// The limits given, else those of the engine that was measured, else common ones.
    fn limits(&self, cost: &CostModel) -> EngineLimits {
        let measured = match cost {
            CostModel::Fitted { fitted, .. } => fitted.limits.clone(),
            _ => EngineLimits::default(),
        };
        let pick = |given: Option<usize>, measured: usize, common: usize| match (given, measured) {
            (Some(given), _) => given,
            (None, 0) => common,
            (None, measured) => measured,
        };
        let tokens_per_block = pick(self.tokens_per_block, measured.tokens_per_block, 64);
        let kv_blocks = match cost {
            CostModel::Analytic(analytic) => analytic.cache_blocks(tokens_per_block).min(MOST_BLOCKS),
            _ => measured.kv_blocks,
        };
        EngineLimits {
            max_batch_size: pick(self.max_batch_size, measured.max_batch_size, 256),
            max_num_tokens: pick(self.max_num_tokens, measured.max_num_tokens, 8192),
            tokens_per_block,
            kv_blocks: self.kv_cache_blocks.unwrap_or(kv_blocks),
        }
    }

    fn policy(&self, longest: usize, limits: &EngineLimits) -> Result<Policy> {
        for (option, value) in [
            ("--max-batch-size", limits.max_batch_size),
            ("--max-num-tokens", limits.max_num_tokens),
            ("--tokens-per-block", limits.tokens_per_block),
            ("--instances", self.instances),
            ("--priority-levels", self.priority_levels as usize),
            ("--kv-cache-blocks", self.kv_cache_blocks.unwrap_or(1)),
            ("--max-seq-len", self.max_seq_len.unwrap_or(1)),
        ] {
            if value == 0 {
                bail!("{option}: expected at least 1, found 0");
            }
        }
        if self.policy != PolicyChoice::Inflight && self.scheduler_policy.is_some() {
            bail!("--scheduler-policy: only --policy inflight has it; leave it out");
        }
        if self.policy == PolicyChoice::Dynamic {
            let only_engine = [
                ("--max-num-tokens", self.max_num_tokens.is_some()),
                ("--max-seq-len", self.max_seq_len.is_some()),
                ("--kv-cache-blocks", self.kv_cache_blocks.is_some()),
                ("--tokens-per-block", self.tokens_per_block.is_some()),
                ("--kv-cache-reuse", self.kv_cache_reuse.on()),
            ];
            if let Some((option, _)) = only_engine.iter().find(|(_, given)| *given) {
                bail!("{option}: the dynamic batcher has none; leave it out, or choose --policy inflight or static");
            }
            return self.dynamic(limits.max_batch_size);
        }
        let only_dynamic = [
            ("--max-queue-delay", self.max_queue_delay.is_some()),
            ("--preferred-batch-size", !self.preferred_batch_size.is_empty()),
            ("--queue-timeout", self.queue_timeout.is_some()),
            ("--max-queue-size", self.max_queue_size > 0),
            ("--instances", self.instances > 1),
            ("--priority-levels", self.priority_levels > 1),
        ];
        if let Some((option, _)) = only_dynamic.iter().find(|(_, given)| *given) {
            bail!("{option}: only --policy dynamic has it; leave it out, or choose that policy");
        }
        let policy = match (self.policy, self.scheduler_policy) {
            (PolicyChoice::Static, _) => EnginePolicy::StaticBatch,
            (_, Some(AdmissionChoice::MaxUtilization)) => EnginePolicy::MaxUtilization,
            _ => EnginePolicy::GuaranteedNoEvict,
        };
        let smallest = longest.div_ceil(limits.tokens_per_block);
        let most = (MOST_BYTES / (2 * BYTES_PER_BLOCK * self.replicas.max(1) as u128)) as usize;
        let kv_blocks = match limits.kv_blocks {
            0 => limits.max_batch_size.saturating_mul(smallest).clamp(smallest, MOST_BLOCKS.min(most).max(smallest)),
            blocks => blocks,
        };
        Ok(Policy::Engine(ReplicaConfig {
            scheduler: SchedulerConfig {
                policy,
                max_batch_size: limits.max_batch_size,
                max_num_tokens: limits.max_num_tokens,
                max_seq_len: self.max_seq_len.unwrap_or(usize::MAX / 4),
                chunked_context: self.chunked_context.on(),
                chunk_unit: limits.tokens_per_block,
                reuse_output: true,
            },
            kv_blocks,
            tokens_per_block: limits.tokens_per_block,
            reuse: self.kv_cache_reuse.on(),
            speed: 1.0,
            skip: true,
            prefill_only: false,
        }))
    }

    fn dynamic(&self, max_batch: usize) -> Result<Policy> {
        let mut preferred = self.preferred_batch_size.clone();
        preferred.sort_unstable();
        if let Some(bad) = preferred.iter().find(|&&size| size == 0 || size > max_batch) {
            bail!("--preferred-batch-size: {bad} is not from 1 to --max-batch-size {max_batch}");
        }
        if self.prefill_replicas > 0 {
            bail!("--prefill-replicas: prefill and decode can be split under --policy inflight only");
        }
        let action = match self.timeout_action {
            TimeoutChoice::Reject => TimeoutAction::Reject,
            TimeoutChoice::Delay => TimeoutAction::Delay,
        };
        let optional = |option: &str, text: &Option<String>| text.as_ref().map(|text| time(option, text)).transpose();
        Ok(Policy::Dynamic(DynamicConfig {
            max_batch,
            preferred,
            max_queue_delay_ns: optional("--max-queue-delay", &self.max_queue_delay)?.unwrap_or(0.0) as u64,
            instances: self.instances,
            priorities: self.priority_levels,
            timeout: optional("--queue-timeout", &self.queue_timeout)?.map(|ns| (ns as u64, action)),
            max_queue_size: self.max_queue_size,
            speed: 1.0,
        }))
    }

    fn server_speeds(&self) -> Result<Vec<f64>> {
        if self.replicas == 0 {
            bail!("--replicas: expected at least 1, found 0");
        }
        if let Some(bad) = self.speeds.iter().find(|s| !(**s > 0.0 && s.is_finite())) {
            bail!("--speeds: expected numbers above 0, found {bad}");
        }
        if self.speeds.len() > self.replicas {
            bail!("--speeds: {} speeds for {} servers; raise --replicas", self.speeds.len(), self.replicas);
        }
        let last = self.speeds.last().copied().unwrap_or(1.0);
        Ok((0..self.replicas).map(|i| self.speeds.get(i).copied().unwrap_or(last)).collect())
    }

    fn cluster(&self) -> Result<ClusterConfig> {
        let routing = match self.routing.as_str() {
            "round-robin" => Routing::RoundRobin,
            "random" => Routing::Random,
            "least-outstanding" => Routing::LeastOutstanding,
            "shortest-tokens" | "jsq" | "join-shortest-queue" => Routing::ShortestTokens,
            "prefix-affinity" => Routing::PrefixAffinity,
            other => match other.strip_prefix("power-of-").and_then(|d| d.parse().ok()).filter(|d| *d > 0) {
                Some(choices) => Routing::PowerOf(choices),
                None => bail!(
                    "--routing: no such way `{other}`; use round-robin, random, least-outstanding, power-of-2, shortest-tokens or prefix-affinity"
                ),
            },
        };
        if self.prefill_replicas >= self.replicas && self.prefill_replicas > 0 {
            bail!(
                "--prefill-replicas: {} of {} servers would leave none to generate; raise --replicas",
                self.prefill_replicas,
                self.replicas
            );
        }
        if self.prefill_replicas > 0 && self.autoscale.is_some() {
            bail!("--autoscale: not together with --prefill-replicas");
        }
        Ok(ClusterConfig {
            routing,
            prefill_servers: self.prefill_replicas,
            transfer: self.transfer()?,
            failures: self.fail.iter().map(|text| self.failure(text)).collect::<Result<_>>()?,
            autoscale: self.autoscale.as_ref().map(|text| self.autoscaling(text)).transpose()?,
            seed: self.seed,
        })
    }

    fn transfer(&self) -> Result<Transfer> {
        let mut transfer = Transfer { base_ns: 0.0, per_token_ns: 0.0 };
        for part in self.transfer.split(',') {
            match part.split_once('=') {
                Some(("base", value)) => transfer.base_ns = time("--transfer", value)?,
                Some(("per_token", value)) => transfer.per_token_ns = time("--transfer", value)?,
                _ => bail!("--transfer: `{part}` is neither base=TIME nor per_token=TIME"),
            }
        }
        Ok(transfer)
    }

    fn failure(&self, text: &str) -> Result<Failure> {
        let parsed = text.split_once('@').and_then(|(server, times)| {
            let (from, until) = times.split_once('-')?;
            Some((server.parse::<usize>().ok()?, parse_duration_ns(from).ok()?, parse_duration_ns(until).ok()?))
        });
        match parsed {
            Some((server, from, until)) if server < self.replicas && from < until && until <= LONGEST_TIME_NS => {
                Ok(Failure { server, at_ns: from as u64, until_ns: until as u64 })
            }
            Some((server, ..)) if server >= self.replicas => {
                bail!("--fail: there is no server {server}; they are numbered 0 to {}", self.replicas - 1)
            }
            _ => bail!("--fail: `{text}` is not SERVER@FROM-UNTIL with FROM before UNTIL, such as 2@10s-30s"),
        }
    }

    fn autoscaling(&self, text: &str) -> Result<Autoscale> {
        let mut scale = Autoscale { min: 1, target: 8.0, delay_ns: 30_000_000_000, interval_ns: 5_000_000_000 };
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("min", n)) => {
                    scale.min = n.parse().ok().filter(|n| (1..=self.replicas).contains(n)).ok_or_else(|| {
                        anyhow::anyhow!("--autoscale: min `{n}` is not from 1 to --replicas {}", self.replicas)
                    })?
                }
                Some(("target", n)) => {
                    scale.target = n.parse().ok().filter(|n: &f64| *n > 0.0 && n.is_finite()).ok_or_else(|| {
                        anyhow::anyhow!("--autoscale: target `{n}` is not a number of requests above 0")
                    })?
                }
                Some(("delay", value)) => scale.delay_ns = time("--autoscale", value)? as u64,
                Some(("interval", value)) => scale.interval_ns = time("--autoscale", value)? as u64,
                _ => bail!("--autoscale: `{part}` is none of min=N, target=REQUESTS, delay=TIME, interval=TIME"),
            }
        }
        if scale.interval_ns < SHORTEST_INTERVAL_NS {
            bail!("--autoscale: interval: expected at least 1ms: nobody decides more often");
        }
        Ok(scale)
    }

    fn describe_cost(&self) -> String {
        let cost = self.cost.clone().unwrap_or_default();
        match (&self.gpu, &self.model) {
            (Some(gpu), Some(model)) => {
                format!("{cost}, {model} in {} on {} {gpu}", self.analytic_dtype(), self.ranks())
            }
            _ => cost,
        }
    }

    fn describe_server(&self, scenario: &Scenario) -> String {
        let kind = match &scenario.policy {
            Policy::Engine(config) => format!(
                "{}, batch {}, {} tokens per iteration, {} blocks of {} tokens{}{}",
                config.scheduler.policy.name(),
                config.scheduler.max_batch_size,
                config.scheduler.max_num_tokens,
                config.kv_blocks,
                config.tokens_per_block,
                if config.reuse { ", prefixes reused" } else { "" },
                if config.scheduler.chunked_context { ", chunked prompts" } else { "" },
            ),
            Policy::Dynamic(config) => format!(
                "dynamic batcher, batch {}, preferred {:?}, delay {} us, {} instances",
                config.max_batch,
                config.preferred,
                config.max_queue_delay_ns / 1000,
                config.instances
            ),
        };
        match scenario.speeds.len() {
            1 => kind,
            n if scenario.cluster.prefill_servers > 0 => {
                format!("{n} servers, {} for prefill, {}: {kind}", scenario.cluster.prefill_servers, self.routing)
            }
            n => format!("{n} servers, {}: {kind}", self.routing),
        }
    }
}

/// Whether a file is a benchmark's dataset, which has no arrival times.
fn is_dataset(path: &Path) -> bool {
    let mut line = String::new();
    let read = std::fs::File::open(path).and_then(|file| BufReader::new(file).read_line(&mut line));
    let first: Option<serde_json::Value> = read.ok().and_then(|_| serde_json::from_str(&line).ok());
    first.is_some_and(|value| value.get("output_tokens").is_some())
}

/// A time in nanoseconds.
pub(super) fn time(option: &str, text: &str) -> Result<f64> {
    let ns = parse_duration_ns(text.trim()).map_err(|problem| anyhow::anyhow!("{option}: {problem}"))?;
    if ns > LONGEST_TIME_NS {
        bail!("{option}: `{text}` is longer than 100 years, expected a shorter time");
    }
    Ok(ns)
}

fn length(option: &'static str, text: &str) -> Result<LengthDist> {
    let Some(path) = text.strip_prefix("empirical:") else {
        return Ok(LengthDist::parse(option, text)?);
    };
    let content = std::fs::read_to_string(path).map_err(|e| anyhow::anyhow!("{option}: cannot read {path}: {e}"))?;
    let mut values = Vec::new();
    for (index, line) in content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match line.trim().parse::<u32>() {
            Ok(value) if (1..=LONGEST).contains(&value) => values.push(value),
            _ => bail!("{option}: {path} line {}: `{}` is not a length from 1 to {LONGEST}", index + 1, line.trim()),
        }
    }
    if values.is_empty() {
        bail!("{option}: {path} holds no lengths; write one per line");
    }
    Ok(LengthDist::Empirical(values))
}
