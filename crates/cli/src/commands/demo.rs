//! `strobe demo`: the whole loop on the embedded default. Two builds that differ in one option, one dataset, interleaved
//! runs in fresh processes (`strobe ab`), a recorded pair, and one sentence that says which is faster and why.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::json;
use strobe_analyze::Context;
use strobe_analyze::budget::{budget_by_kind, budgets};
use strobe_analyze::compare::runs::says_something;
use strobe_analyze::compare::{Comparison, MARGIN, Outcome};
use strobe_analyze::top_ops::{top_ops, top_ops_by_kind};
use strobe_engine::staged_dir;
use strobe_engine::{BuildConfig, KvCacheType, ModelRef, Quantization, engine_dir};
use strobe_report::html::{Card, Link, Page};
use strobe_report::human;
use strobe_report::svg::{self, BarChart, BarSeries, StackedChart, StackedRow, Unit};
use strobe_report::table::{Cell, Table};
use strobe_trace::Trace;
use strobe_workload::{Lengths, NormDist, RequestRecord, SyntheticSpec, synthetic, write_dataset};

use super::ab::{Concluded, Told, conclude};
use crate::ab::side::{Side, Strobe};
use crate::ab::{Listener, PLAN, Plan, RUNS, Stopped};
use crate::bench::outcome::OUTPUT_THROUGHPUT;
use crate::bench::{html, text};
use crate::machine;
use crate::model_args::CpuArgs;
use crate::run_dir::RunDir;
use crate::run_facts::KnownRun;
use crate::run_writer::Problems;
use crate::{explore, output, recording, run_dir, shell, trace_input};

const EXAMPLES: &str = "EXAMPLES:
  strobe demo
  strobe demo --output-dir /tmp/demo --overwrite";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// Where to write engines, dataset, run directories and the pages
    #[arg(long, value_name = "DIR", default_value = "strobe-demo")]
    output_dir: PathBuf,
    /// Replace an existing demo directory (one made by `strobe demo`); the default one is replaced anyway
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    cpu: CpuArgs,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

const MODEL: &str = "micro";
const BATCH: usize = 16;
const STEP_TOKENS: usize = 1024;
const MOST_TOKENS: usize = 2048;
const BENCH_OPTIONS: [&str; 3] = ["--streaming", "--warmup", "1"];
const DEVICE_OPTIONS: [&str; 2] = ["--device", "cpu"];
const REQUESTS: usize = 24;
const INPUT_TOKENS: f64 = 1024.0;
const OUTPUT_TOKENS: f64 = 64.0;
/// Pairs that count: the demo is to end within a minute.
const PAIRS: (usize, usize) = (5, 10);
const BUDGET: Duration = Duration::from_secs(45);
/// Covers the prompts of the first requests, steps that mix prompts and generation, and pure generation.
const WINDOW: &str = "2-60";
const PAGE: &str = "index.html";
/// The recorded iterations of both builds side by side, on a timeline.
const COMPARISON: &str = "compare.html";
const DATASET: &str = "dataset.jsonl";
/// What the two builds are called: B is the one with fused attention.
const NAMES: [&str; 2] = ["unfused attention", "fused attention"];

pub(crate) fn run(args: Args) -> Result<()> {
    let start = Instant::now();
    make_room(&args)?;
    let cpu = args.cpu.open()?;
    let mut told = Told { json: args.json, names: NAMES.map(str::to_owned) };
    let peaks = machine::peaks(&mut args.cpu.open()?);
    told.say(&format!(
        "machine   {}, {} threads, {}: {} f32, {} read",
        machine::cpu_name(),
        cpu.threads(),
        cpu.tier().name(),
        human::flops_per_s(peaks.flops_per_s),
        human::bytes_per_s(peaks.read_bytes_per_s)
    ));
    drop(cpu);
    std::fs::create_dir_all(args.output_dir.join(RUNS))
        .with_context(|| format!("cannot create {}", args.output_dir.display()))?;
    let dataset = args.output_dir.join(DATASET);
    make_dataset(&dataset)?;
    told.say(&format!(
        "dataset   strobe prepare-dataset --model {MODEL} --output {} token-norm-dist --num-requests {REQUESTS} --input-mean {INPUT_TOKENS} --input-stdev 0 --output-mean {OUTPUT_TOKENS} --output-stdev 0",
        dataset.display()
    ));
    let plan = plan(&args, &dataset)?;
    plan.write("running", &serde_json::Value::Null)?;
    told.say(&format!("compare   {}", ab_line(&args, &dataset)));
    let found = plan.execute(&mut told)?;
    if found.stopped == Stopped::Interrupted || found.known[0].len() < 2 {
        plan.write("partial", &serde_json::Value::Null)?;
    }
    if found.stopped == Stopped::Interrupted {
        let (kept, runs) = (plan.kept(), args.output_dir.join(RUNS));
        anyhow::bail!("interrupted; {kept} runs are kept in {}; `strobe demo` starts anew", runs.display());
    }
    if found.known[0].len() < 2 {
        let last = found.failures.last().map_or(String::new(), |last| format!("; the last failure: {last}"));
        anyhow::bail!("fewer than 2 pairs ended ({}){last}", found.stopped.in_words(plan.half_width));
    }
    let throughputs = found.known.each_ref().map(|side| throughputs(side));
    let recorded = found.recorded.clone();
    let done = conclude(&plan, found, NAMES.map(str::to_owned), 12, Some(Link::new("Overview of the demo", PAGE)))?;
    let sides = match &recorded {
        Some(paths) => [Recorded::read(0, &paths[0])?, Recorded::read(1, &paths[1])?],
        None => {
            anyhow::bail!("the recorded pair failed; run `strobe demo` again, or see {}", args.output_dir.display())
        }
    };
    let place = args.output_dir.join(PAGE);
    let mut links: Vec<Link> = done.page.iter().map(|_| Link::new("Both timelines side by side", COMPARISON)).collect();
    links.extend(recorded.iter().flatten().zip(NAMES).flat_map(|(run, name)| explore::pages_of_run(&place, name, run)));
    let page = page(&sides, &throughputs, &done, links);
    // The result first: whatever happens to files, it is there.
    let write = || {
        let mut problems = Problems::default();
        problems.keep(done.write(&plan));
        problems.keep(run_dir::write_whole(&place, page.as_bytes()));
        problems.into_result()
    };

    let seconds = start.elapsed().as_secs_f64();
    let dir = args.output_dir.display();
    let comparison = &done.comparison;
    if args.json {
        let faster = match comparison.verdict.outcome {
            Outcome::Faster => Some(NAMES[1]),
            Outcome::Slower => Some(NAMES[0]),
            _ => None,
        };
        let document = json!({
            "verdict": comparison.verdict.sentence, "outcome": comparison.verdict.outcome, "faster": faster,
            "ratio": comparison.verdict.time_change.map(|change| 1.0 / (1.0 + change)), "seconds": seconds,
            "output_tok_s": {NAMES[0]: throughputs[0], NAMES[1]: throughputs[1]},
            "by_category": comparison.by_category, "by_op": comparison.by_op,
            "output_dir": args.output_dir.display().to_string(),
        });
        output::line(&format!("{document:#}"));
        return write();
    }
    output::line("");
    output::print(&figures_table(comparison).render(output::width()));
    output::line("");
    for side in &sides {
        for kind in text::kinds(&side.trace) {
            let ops = top_ops_by_kind(&recording::context(&side.trace), kind);
            let table = text::ops_table(&ops, 5).title(format!("{}: top ops of {kind} iterations", side.name));
            output::print(&table.render(output::width()));
        }
        output::line("");
    }
    output::print(&delta_table(comparison).render(output::width()));
    output::line("");
    output::line(&comparison.verdict.sentence);
    comparison.verdict.evidence.iter().for_each(|line| output::line(line));
    let written = write();
    if written.is_ok() {
        output::line(&format!("\npages     {dir}/{PAGE}  {dir}/{COMPARISON}"));
    }
    output::line(&format!("runs      {dir}/{RUNS}\ntime      {seconds:.1} s"));
    written
}

/// The same comparison as a line to type.
fn ab_line(args: &Args, dataset: &Path) -> String {
    let mut line = Command::new("strobe");
    line.args(["ab", "--a", "--context-fmha disable", "--b", "--context-fmha enable", "--model", MODEL, "--dataset"]);
    line.arg(dataset).args(["--profile", WINDOW, "--pairs", &format!("{}..{}", PAIRS.0, PAIRS.1)]);
    line.args(["--budget", &format!("{}s", BUDGET.as_secs()), "--"]);
    line.args(build_options()).args(BENCH_OPTIONS).args(DEVICE_OPTIONS);
    if let Some(threads) = args.cpu.threads {
        line.args(["--threads", &threads.to_string()]);
    }
    shell::line(&line)
}

/// How the engines of both sides are built, beside the option that they differ in.
fn build_options() -> Vec<String> {
    let words = format!("--max-batch-size {BATCH} --max-num-tokens {STEP_TOKENS} --max-seq-len {MOST_TOKENS}");
    words.split(' ').map(str::to_owned).collect()
}

/// An earlier demo makes room for this one, and nothing else does.
fn make_room(args: &Args) -> Result<()> {
    let dir = &args.output_dir;
    let own = dir == Path::new("strobe-demo") && holds_only_a_demo(dir);
    staged_dir::check_target(dir, args.overwrite || own, &[PLAN, DATASET], "demo directory")?;
    match std::fs::remove_dir_all(dir) {
        Err(problem) if problem.kind() != std::io::ErrorKind::NotFound => {
            Err(problem).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Whether a directory holds what an earlier demo wrote, and nothing of the user's.
fn holds_only_a_demo(dir: &Path) -> bool {
    let own = [PAGE, COMPARISON, DATASET, PLAN, RUNS, "engine-a", "engine-b"];
    let Ok(entries) = std::fs::read_dir(dir) else { return false };
    entries.flatten().all(|entry| own.iter().any(|name| entry.file_name() == *name))
}

fn plan(args: &Args, dataset: &Path) -> Result<Plan> {
    let side = |fmha: &str| -> Result<Side> {
        let own = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<String>>();
        let mut bench = own(&BENCH_OPTIONS);
        bench.extend(["--dataset".to_owned(), dataset.display().to_string()]);
        if let Some(threads) = args.cpu.threads {
            bench.extend(["--threads".to_owned(), threads.to_string()]);
        }
        bench.extend(own(&DEVICE_OPTIONS));
        let build = [build_options(), own(&["--context-fmha", fmha]), own(&DEVICE_OPTIONS)].concat();
        let binary = std::env::current_exe()?;
        Ok(Side::Strobe(Strobe { binary, model: Some(MODEL.to_owned()), engine_dir: None, build, bench }))
    };
    Ok(Plan {
        sides: [side("disable")?, side("enable")?],
        mode: "throughput".to_owned(),
        profile: Some(WINDOW.to_owned()),
        pairs: PAIRS,
        budget: Some(BUDGET),
        half_width: MARGIN / 2.0,
        margin: MARGIN,
        metric: None,
        dir: args.output_dir.clone(),
        identity: OnceCell::new(),
    })
}

fn throughputs(side: &[KnownRun]) -> Vec<f64> {
    let metrics = side.iter().flat_map(|run| &run.runs).flat_map(|run| &run.metrics);
    metrics.filter(|metric| metric.name == OUTPUT_THROUGHPUT).map(|metric| metric.value).collect()
}

/// A run of the recorded pair.
struct Recorded {
    name: &'static str,
    trace: Trace,
    requests: Vec<RequestRecord>,
    about: serde_json::Value,
}

impl Recorded {
    fn read(side: usize, path: &Path) -> Result<Recorded> {
        let dir = RunDir::open(path)?;
        let trace = trace_input::read(&[path.to_owned()])?;
        Ok(Recorded { name: NAMES[side], trace, requests: dir.requests()?, about: dir.run })
    }
}

pub(crate) fn build(cpu: &mut strobe_kernels_cpu::Cpu, dir: &Path, fmha: bool) -> Result<()> {
    let model = ModelRef::open(MODEL, 0)?;
    let config = model.engine_config(BuildConfig {
        quantization: Quantization::None,
        kv_cache: KvCacheType::Auto,
        dtype: model.config.dtype,
        max_batch_size: BATCH,
        max_num_tokens: STEP_TOKENS,
        max_seq_len: MOST_TOKENS,
        tokens_per_block: 32,
        gemm_plugin: true,
        context_fmha: fmha,
        paged_kv_cache: true,
    })?;
    engine_dir::build(cpu, &model, &config, dir, false, &[], &mut crate::interrupt::watch(|_| ()))?;
    Ok(())
}

pub(crate) fn make_dataset(path: &Path) -> Result<()> {
    let config = strobe_model::preset(MODEL).context("the embedded preset is missing")?.config();
    let lengths = |mean: f64| Lengths::Normal(NormDist { mean, stdev: 0.0 });
    let samples = synthetic(&SyntheticSpec {
        num_requests: REQUESTS,
        input: lengths(INPUT_TOKENS),
        output: lengths(OUTPUT_TOKENS),
        vocab_size: config.vocab_size as u32,
        avoid_ids: config.eos_token_ids.iter().copied().chain(config.bos_token_id).collect(),
        seed: 420,
    })?;
    let mut bytes = Vec::new();
    write_dataset(&mut bytes, &samples).context("cannot write the dataset")?;
    run_dir::write_whole(path, &bytes)
}

fn figures_table(comparison: &Comparison) -> Table {
    let mut table = Table::new(["means over the pairs", NAMES[0], NAMES[1], "ratio of times", "99 % CI"]);
    for figure in comparison.runs.iter().flat_map(|runs| &runs.figures) {
        let ratio = |change: f64| format!("{:.2}x", 1.0 + change);
        let interval = figure.interval.filter(says_something);
        let interval =
            interval.map_or(human::NOT_KNOWN.to_owned(), |i| format!("{} to {}", ratio(i.low), ratio(i.high)));
        table.push([
            Cell::from(figure.name.as_str()),
            Cell::number(human::number(figure.a), figure.a),
            Cell::number(human::number(figure.b), figure.b),
            Cell::number(ratio(figure.time_change), 1.0 + figure.time_change),
            Cell::from(interval),
        ]);
    }
    table
}

fn delta_table(comparison: &Comparison) -> Table {
    let mut table = Table::new(["per recorded iteration", NAMES[0], NAMES[1], "difference"]);
    for delta in &comparison.by_category {
        table.push([
            Cell::from(delta.name.as_str()),
            Cell::number(human::ns(delta.a_ns_per_iter), delta.a_ns_per_iter),
            Cell::number(human::ns(delta.b_ns_per_iter), delta.b_ns_per_iter),
            Cell::number(signed(delta.delta_ns), delta.delta_ns),
        ]);
    }
    let difference = comparison.b_wall_ns - comparison.a_wall_ns;
    table.total([
        "wall".to_string(),
        human::ns(comparison.a_wall_ns),
        human::ns(comparison.b_wall_ns),
        signed(difference),
    ])
}

/// A time with its sign.
fn signed(ns: f64) -> String {
    format!("{}{}", if ns < 0.0 { "-" } else { "+" }, human::ns(ns.abs()))
}

/// One bar per option, and a dot per pair, so that the noise shows as well.
fn throughput_bars(throughputs: &[Vec<f64>; 2], means: Option<[f64; 2]>) -> svg::Svg {
    let series = throughputs.iter().zip(NAMES).enumerate().map(|(side, (runs, name))| BarSeries {
        name: name.to_owned(),
        values: vec![means.map(|means| means[side])],
        runs: vec![runs.clone()],
    });
    svg::bars(&BarChart {
        title: "Output tokens per second: means, and a dot for every pair".into(),
        unit: Unit::Plain("tok/s".into()),
        groups: vec!["output throughput".to_owned()],
        series: series.collect(),
    })
}

fn page(sides: &[Recorded; 2], throughputs: &[Vec<f64>; 2], done: &Concluded, links: Vec<Link>) -> String {
    let comparison = &done.comparison;
    let verdict = &comparison.verdict;
    let mut page = Page::new("strobe demo: fused attention on and off").verdict(&verdict.sentence);
    page = links.into_iter().fold(page, Page::link);
    let first = comparison.runs.as_ref().and_then(|runs| runs.figures.first());
    let about = |pointer: &str| sides[0].about.pointer(pointer).and_then(serde_json::Value::as_str).unwrap_or_default();
    page = page.subtitle(format!(
        "{MODEL}, seeded random weights, {REQUESTS} requests of {INPUT_TOKENS}/{OUTPUT_TOKENS} tokens, {} {}",
        about("/machine/cpu"),
        about("/machine/simd_tier")
    ));
    // Cards, table and verdict have one definition: geometric means over the pairs that count.
    if let Some(figure) = first {
        let note = format!("mean of {} pairs", figure.runs[0]);
        for (name, value) in NAMES.iter().zip([figure.a, figure.b]) {
            page = page.card(Card::new(*name, human::number(value)).unit(&figure.unit).note(note.clone()));
        }
        let interval = figure
            .interval
            .filter(says_something)
            .map_or(String::new(), |i| format!("99 % CI {:.2}x to {:.2}x", 1.0 / (1.0 + i.high), 1.0 / (1.0 + i.low)));
        page = page.card(
            Card::new("Throughput, enable over disable", format!("{:.2}x", 1.0 / (1.0 + figure.time_change)))
                .note(interval),
        );
    }
    let means = first.map(|figure| [figure.a, figure.b]);
    page = page.section("Throughput").svg(&throughput_bars(throughputs, means)).table(&figures_table(comparison));
    for line in &verdict.evidence {
        page = page.prose(line);
    }
    let requests: Vec<(&str, &[RequestRecord])> =
        sides.iter().map(|side| (side.name, side.requests.as_slice())).collect();
    page = html::latency_cdfs(&requests).iter().fold(page.section("Latency of the recorded pair"), Page::svg);
    let mut rows = Vec::new();
    let contexts: Vec<(&str, Context)> =
        sides.iter().map(|side| (side.name, recording::context(&side.trace))).collect();
    for (name, context) in &contexts {
        for kind in budget_by_kind(&budgets(context)) {
            let parts: Vec<_> = kind.parts.iter().map(|p| (p.part.to_string(), p.mean_ns)).collect();
            let of = text::kind_name(kind.kind);
            rows.push(StackedRow::new(format!("{of}, {name}"), parts).group(of));
        }
    }
    rows.sort_by(|x, y| x.label.cmp(&y.label));
    let chart = StackedChart { title: "Mean recorded iteration".into(), unit: Unit::Time, rows, normalize: false };
    page = page
        .section("Iteration budget of the recorded pair")
        .prose("Where the wall time of an iteration goes. The parts add up to the wall time.")
        .svg(&svg::stacked(&chart))
        .table(&delta_table(comparison));
    for (name, context) in &contexts {
        page = page.section(format!("Ops, {name}")).table(&text::ops_table(&top_ops(context), 30));
    }
    page.finish()
}
