//! `strobe demo`: the whole loop on the embedded default. Two builds that differ in one option, one dataset, two
//! benchmarks with a profile window, and one sentence that says which is faster and why.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;
use strobe_analyze::budget::{budget_by_kind, budgets};
use strobe_analyze::compare::{CompareOptions, Comparison, compare};
use strobe_analyze::top_ops::{top_ops, top_ops_by_kind};
use strobe_engine::engine_dir::{self, LoadedModel};
use strobe_engine::staged_dir::StagedDir;
use strobe_engine::window::Window;
use strobe_engine::{BuildConfig, EngineOptions, KvCacheType, ModelRef, Quantization, SamplingParams};
use strobe_report::html::{Card, Page};
use strobe_report::human;
use strobe_report::svg::{self, BarChart, BarSeries, StackedChart, StackedRow, Unit};
use strobe_report::table::{Cell, Table};
use strobe_stats::median;
use strobe_workload::{Lengths, NormDist, PercentileRule, SyntheticSpec, read_dataset, synthetic, write_dataset};

use crate::bench::client::Load;
use crate::bench::outcome::{OUTPUT_THROUGHPUT, Outcome};
use crate::bench::{self, Spec, html, text, write};
use crate::machine::{self, MeasuredPeaks};
use crate::model_args::CpuArgs;
use crate::run_writer::RunWriter;
use crate::{explore, interrupt, output, recording, run_dir};

const EXAMPLES: &str = "EXAMPLES:
  strobe demo
  strobe demo --output-dir /tmp/demo --overwrite";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Where to write engines, dataset, run directories and the page
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
const REQUESTS: usize = 24;
const INPUT_TOKENS: f64 = 1024.0;
const OUTPUT_TOKENS: f64 = 64.0;
/// Each build is measured this often, taking turns, so that a busy moment of the machine hits both.
const ROUNDS: usize = 5;
/// Covers the prompts of the first requests, steps that mix prompts and generation, and pure generation.
const WINDOW: Window = Window { first: 2, last: 60 };
const PAGE: &str = "index.html";
/// The recorded iterations of both builds side by side, on a timeline.
const COMPARISON: &str = "compare.html";
const DATASET: &str = "dataset.jsonl";

/// One of the two builds.
struct Side {
    name: &'static str,
    engine: &'static str,
    run: &'static str,
    fmha: bool,
    throughputs: Vec<f64>,
    last: Option<Outcome>,
}

pub fn run(args: Args) -> Result<()> {
    let start = Instant::now();
    // The demo may always replace its own earlier output, but nothing else.
    let own = args.output_dir == Path::new("strobe-demo") && holds_only_a_demo(&args.output_dir);
    let staged = StagedDir::create(&args.output_dir, args.overwrite || own, &[PAGE, DATASET], "demo directory")?;
    let mut cpu = args.cpu.open()?;
    let say = |text: String| if args.json { output::note(&text) } else { output::line(&text) };
    let peaks = machine::peaks(&mut cpu);
    say(format!(
        "machine   {}, {} threads, {}: {} f32, {} read",
        machine::cpu_name(),
        cpu.threads(),
        cpu.tier().name(),
        human::flops_per_s(peaks.flops_per_s),
        human::bytes_per_s(peaks.read_bytes_per_s)
    ));
    let mut sides = [
        Side {
            name: "fmha enable",
            engine: "engine-fmha-enable",
            run: "run-fmha-enable",
            fmha: true,
            throughputs: vec![],
            last: None,
        },
        Side {
            name: "fmha disable",
            engine: "engine-fmha-disable",
            run: "run-fmha-disable",
            fmha: false,
            throughputs: vec![],
            last: None,
        },
    ];
    for side in &sides {
        build(&mut cpu, &staged.path().join(side.engine), side.fmha)?;
        let switch = if side.fmha { "enable" } else { "disable" };
        say(format!(
            "build     strobe build --model {MODEL} --max-batch-size {BATCH} --max-num-tokens {STEP_TOKENS} --context-fmha {switch} --output-dir {}",
            side.engine
        ));
    }
    let dataset = staged.path().join(DATASET);
    make_dataset(&dataset)?;
    say(format!(
        "dataset   strobe prepare-dataset --model {MODEL} --output {DATASET} token-norm-dist --num-requests {REQUESTS} --input-mean {INPUT_TOKENS} --output-mean {OUTPUT_TOKENS}"
    ));
    for round in 0..ROUNDS {
        for side in &mut sides {
            if interrupt::requested() {
                anyhow::bail!(interrupt::Interrupted);
            }
            let outcome = measure(&args, &staged.path().join(side.engine), &dataset, &peaks, side)?;
            if outcome.run.partial {
                anyhow::bail!(interrupt::Interrupted);
            }
            let metrics = outcome.metrics.as_ref().map_err(|e| anyhow::anyhow!("{e:#}"))?;
            let throughput = metrics.output_throughput_tok_s;
            say(format!("bench     round {} of {ROUNDS}, {:<13} {throughput:>9.1} output tok/s", round + 1, side.name));
            side.throughputs.push(throughput);
            side.last = Some(outcome);
        }
    }
    let [a, b] = &mut sides;
    let (Some(a_last), Some(b_last)) = (&mut a.last, &mut b.last) else {
        anyhow::bail!(interrupt::Interrupted);
    };
    // What was written beside will stand at its final place.
    a_last.engine_dir = Some(args.output_dir.join(a.engine));
    b_last.engine_dir = Some(args.output_dir.join(b.engine));
    for (outcome, name) in [(&mut *a_last, a.run), (&mut *b_last, b.run)] {
        outcome.dataset = Some(args.output_dir.join(DATASET).display().to_string());
        let run = StagedDir::create(&staged.path().join(name), false, &run_dir::MARKS, "run directory")?;
        write::run_directory(outcome, &outcome.report(), run)?;
    }
    let (a, b) = (&sides[0], &sides[1]);
    let verdict = verdict(a, b)?;
    let page = page(a, b, &verdict);
    run_dir::write_whole(&staged.path().join(PAGE), page.as_bytes())?;
    let traces: Vec<_> = [a, b].iter().filter_map(|side| side.last.as_ref()?.trace.as_ref()).collect();
    if let [of_a, of_b] = traces[..] {
        let contexts = [vec![recording::context(of_a)], vec![recording::context(of_b)]];
        let page = explore::comparison_page(&verdict.comparison, &contexts);
        run_dir::write_whole(&staged.path().join(COMPARISON), page.as_bytes())?;
    }
    staged.commit()?;

    let seconds = start.elapsed().as_secs_f64();
    let dir = args.output_dir.display();
    if args.json {
        let document = json!({
            "verdict": verdict.sentence, "faster": verdict.faster, "ratio": verdict.ratio, "seconds": seconds,
            "output_tok_s": {a.name: a.throughputs, b.name: b.throughputs},
            "by_category": verdict.comparison.by_category, "by_op": verdict.comparison.by_op,
            "output_dir": args.output_dir.display().to_string(),
        });
        output::line(&format!("{document:#}"));
        return Ok(());
    }
    output::line("");
    output::print(&side_by_side(a, b).render(output::width()));
    output::line("");
    for side in [a, b] {
        if let Some(trace) = side.last.as_ref().and_then(|o| o.trace.as_ref()) {
            for kind in text::kinds(trace) {
                let ops = top_ops_by_kind(&recording::context(trace), kind);
                let table = text::ops_table(&ops, 5).title(format!("{}: top ops of {kind} iterations", side.name));
                output::print(&table.render(output::width()));
            }
            output::line("");
        }
    }
    output::print(&delta_table(&verdict.comparison, a, b).render(output::width()));
    output::line("");
    output::line(&verdict.sentence);
    output::line(&format!(
        "\npages     {dir}/{PAGE}  {dir}/{COMPARISON}\nruns      {dir}/{}  {dir}/{}\ntime      {seconds:.1} s",
        a.run, b.run
    ));
    Ok(())
}

/// Whether a directory holds what an earlier demo wrote, and nothing of the user's.
fn holds_only_a_demo(dir: &Path) -> bool {
    let own =
        [PAGE, COMPARISON, DATASET, "engine-fmha-enable", "engine-fmha-disable", "run-fmha-enable", "run-fmha-disable"];
    let Ok(entries) = std::fs::read_dir(dir) else { return false };
    entries.flatten().all(|entry| own.iter().any(|name| entry.file_name() == *name))
}

pub fn build(cpu: &mut strobe_kernels_cpu::Cpu, dir: &Path, fmha: bool) -> Result<()> {
    let model = ModelRef::open(MODEL, 0)?;
    let config = model.engine_config(BuildConfig {
        quantization: Quantization::None,
        kv_cache: KvCacheType::Auto,
        dtype: model.config.dtype,
        max_batch_size: BATCH,
        max_num_tokens: STEP_TOKENS,
        max_seq_len: 2048,
        tokens_per_block: 32,
        gemm_plugin: true,
        context_fmha: fmha,
        paged_kv_cache: true,
    })?;
    engine_dir::build(cpu, &model, &config, dir, false, &[], &mut crate::interrupt::watch(|_| ()))?;
    Ok(())
}

pub fn make_dataset(path: &Path) -> Result<()> {
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

fn measure(args: &Args, engine: &Path, dataset: &Path, peaks: &MeasuredPeaks, side: &Side) -> Result<Outcome> {
    let model = LoadedModel::open(engine)?;
    let jobs = bench::jobs(dataset, read_dataset(dataset)?, model.config.model.vocab_size, model.tokenizer.as_ref())?;
    let spec = Spec {
        load: Load {
            arrivals_ns: vec![0; jobs.len()],
            open_loop: false,
            concurrency: usize::MAX,
            params: SamplingParams { ignore_eos: true, max_tokens: u32::MAX, ..SamplingParams::default() },
            log_iterations: false,
            log_remark: "",
        },
        jobs,
        engine: EngineOptions::default(),
        move_weights: false,
        warmup: 1,
        repeat: 1,
        windows: vec![WINDOW],
        streaming: true,
        rule: PercentileRule::Linear,
        dataset: None,
        command: format!(
            "strobe bench throughput --engine-dir {} --dataset {DATASET} --streaming --warmup 1 --profile {WINDOW}",
            side.engine
        ),
        arrival: "all at once, no concurrency limit".into(),
        assumed_ranks: 1,
    };
    bench::execute(args.cpu.open()?.into(), &model, || Ok(peaks.clone()), &spec, None, &mut RunWriter::default())
}

struct Verdict {
    sentence: String,
    faster: Option<&'static str>,
    ratio: f64,
    comparison: Comparison,
}

fn verdict(a: &Side, b: &Side) -> Result<Verdict> {
    let trace =
        |side: &Side| side.last.as_ref().and_then(|o| o.trace.clone()).context("the profile window was not recorded");
    let (of_a, of_b) = (trace(a)?, trace(b)?);
    let options = CompareOptions { names: [a.name.into(), b.name.into()], ..CompareOptions::default() };
    let comparison = compare(&[recording::context(&of_a)], &[recording::context(&of_b)], &options);
    let middle = |side: &Side| median(&side.throughputs).unwrap_or(f64::NAN);
    let (fast, slow) = if middle(a) >= middle(b) { (a, b) } else { (b, a) };
    let ratio = middle(fast) / middle(slow);
    // The two sides of a round ran one after the other. If the builds were equal, all five rounds would agree on a
    // winner by chance in one case of sixteen.
    let agreed = fast.throughputs.iter().zip(&slow.throughputs).all(|(f, s)| f > s);
    let figures =
        format!("{:.0} against {:.0} output tok/s, medians of {ROUNDS} interleaved runs", middle(fast), middle(slow));
    if !agreed {
        let sentence = format!(
            "No difference beyond the noise of this machine: the rounds do not agree on whether {} or {} is faster ({figures}).",
            fast.name, slow.name
        );
        return Ok(Verdict { sentence, faster: None, ratio, comparison });
    }
    let sign = if std::ptr::eq(fast, a) { 1.0 } else { -1.0 };
    let saved = sign * (comparison.b_wall_ns - comparison.a_wall_ns);
    let mut parts: Vec<_> = comparison.by_category.iter().map(|d| (d.name.clone(), sign * d.delta_ns)).collect();
    parts.sort_by(|x, y| y.1.total_cmp(&x.1));
    let main = parts.first().cloned().unwrap_or_default();
    let ops = |is_a: bool| {
        let mut ops: Vec<_> = comparison
            .by_op
            .iter()
            .filter(|d| d.category == main.0)
            .map(|d| (d.name.clone(), if is_a { d.a_ns_per_iter } else { d.b_ns_per_iter }))
            .filter(|(_, ns)| *ns > 0.0)
            .collect();
        ops.sort_by(|x, y| y.1.total_cmp(&x.1));
        ops.iter().map(|(name, ns)| format!("{name} {}", human::ns(*ns))).collect::<Vec<_>>().join(" + ")
    };
    if saved <= 0.0 {
        let sentence = format!(
            "{} is {ratio:.2}x faster than {} ({figures}), but the iterations recorded in the last round do not show it: the difference comes from elsewhere in the run, or that round was disturbed.",
            fast.name, slow.name
        );
        return Ok(Verdict { sentence, faster: Some(fast.name), ratio, comparison });
    }
    let rest = saved - main.1;
    let (fast_ops, slow_ops) = (ops(std::ptr::eq(fast, a)), ops(std::ptr::eq(slow, a)));
    let sentence = format!(
        "{} is {ratio:.2}x faster than {} ({figures}). A recorded iteration takes {} less: {} accounts for {} of it ({fast_ops} instead of {slow_ops}), everything else for {}{}.",
        fast.name,
        slow.name,
        human::ns(saved),
        main.0,
        human::ns(main.1),
        if rest < 0.0 { "-" } else { "" },
        human::ns(rest.abs()),
    );
    Ok(Verdict { sentence, faster: Some(fast.name), ratio, comparison })
}

fn side_by_side(a: &Side, b: &Side) -> Table {
    let mut table = Table::new(["", a.name, b.name, "ratio"]);
    let mut row = |label: &str, of: &dyn Fn(&Outcome) -> Option<f64>, digits: usize| {
        let value = |side: &Side| side.last.as_ref().and_then(of);
        let (x, y) = (value(a), value(b));
        let show = |v: Option<f64>| v.map_or(human::NOT_KNOWN.into(), |v| Cell::number(format!("{v:.digits$}"), v));
        let ratio = x.zip(y).filter(|(_, y)| *y != 0.0).map(|(x, y)| x / y);
        let ratio = ratio.map_or(human::NOT_KNOWN.into(), |r| Cell::number(format!("{r:.2}x"), r));
        table.push([Cell::from(label), show(x), show(y), ratio]);
    };
    let m = |of: &'static dyn Fn(&strobe_workload::Metrics) -> Option<f64>| {
        move |o: &Outcome| o.metrics.as_ref().ok().and_then(of)
    };
    row("Request throughput (req/sec)", &m(&|m| Some(m.request_throughput_req_s)), 3);
    row(OUTPUT_THROUGHPUT, &m(&|m| Some(m.output_throughput_tok_s)), 1);
    row("Total token throughput (tokens/sec)", &m(&|m| Some(m.total_throughput_tok_s)), 1);
    row("Total latency (ms)", &m(&|m| Some(m.total_latency_ms)), 1);
    row("Average request latency (ms)", &m(&|m| Some(m.e2e_ms.average)), 1);
    row("TTFT p50 (ms)", &m(&|m| Some(m.ttft_ms.p50)), 1);
    row("TTFT p99 (ms)", &m(&|m| Some(m.ttft_ms.p99)), 1);
    row("Inter-token gap p50 (ms)", &m(&|m| m.itl_ms.as_ref().map(|d| d.p50)), 3);
    row("Inter-token gap p99 (ms)", &m(&|m| m.itl_ms.as_ref().map(|d| d.p99)), 3);
    for kind in ["prefill", "mixed", "decode"] {
        let mfu = move |o: &Outcome| o.utilization.iter().find(|u| u.kind == kind).map(|u| 100.0 * u.mfu);
        row(&format!("MFU, {kind} iterations (% of peak)"), &mfu, 1);
    }
    row("Peak memory (MiB RSS)", &|o| o.peak_resident().map(|b| b as f64 / (1 << 20) as f64), 1);
    table
}

fn delta_table(comparison: &Comparison, a: &Side, b: &Side) -> Table {
    let mut table = Table::new(["per recorded iteration", a.name, b.name, "difference"]);
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

/// One bar per round, so that the noise shows as well.
fn throughput_bars(a: &Side, b: &Side) -> svg::Svg {
    let rounds = (0..ROUNDS).map(|round| BarSeries {
        name: format!("round {}", round + 1),
        values: [a, b].iter().map(|side| side.throughputs.get(round).copied()).collect(),
    });
    svg::bars(&BarChart {
        title: "Output tokens per second".into(),
        unit: Unit::Plain("tok/s".into()),
        groups: vec![a.name.into(), b.name.into()],
        series: rounds.collect(),
    })
}

fn page(a: &Side, b: &Side, verdict: &Verdict) -> String {
    let runs: Vec<_> = [a, b].iter().filter_map(|s| Some((s.name, s.last.as_ref()?))).collect();
    let mut page = Page::new("strobe demo: fused attention on and off").verdict(&verdict.sentence);
    if let Some((_, outcome)) = runs.first() {
        page = page.subtitle(format!(
            "{MODEL}, weights {}, {REQUESTS} requests of {INPUT_TOKENS}/{OUTPUT_TOKENS} tokens, {} ({})",
            outcome.config.describe_origin(),
            outcome.info.device.describe(),
            outcome.machine.cpu
        ));
    }
    for (name, outcome) in &runs {
        if let Ok(m) = &outcome.metrics {
            let note = format!("TTFT p50 {:.1} ms, last of {ROUNDS} runs", m.ttft_ms.p50);
            page = page
                .card(Card::new(*name, format!("{:.0}", m.output_throughput_tok_s)).unit("output tok/s").note(note));
        }
    }
    page = page.card(
        Card::new("Ratio of medians", format!("{:.2}x", verdict.ratio)).note(format!("{ROUNDS} interleaved runs each")),
    );
    page = page.section("Throughput").svg(&throughput_bars(a, b)).table(&side_by_side(a, b));
    page = page.section("Latency").svg(&html::latency_cdf(&runs));
    let mut rows = Vec::new();
    for (name, outcome) in &runs {
        let Some(trace) = &outcome.trace else { continue };
        for kind in budget_by_kind(&budgets(&recording::context(trace))) {
            let parts: Vec<_> = kind.parts.iter().map(|p| (p.part.to_string(), p.mean_ns)).collect();
            rows.push(StackedRow::new(format!("{}, {name}", text::kind_name(kind.kind)), parts));
        }
    }
    rows.sort_by(|x, y| x.label.cmp(&y.label));
    let chart = StackedChart { title: "Mean recorded iteration".into(), unit: Unit::Time, rows, normalize: false };
    page = page
        .section("Iteration budget")
        .prose("Where the wall time of an iteration goes. The parts add up to the wall time.")
        .svg(&svg::stacked(&chart))
        .table(&delta_table(&verdict.comparison, a, b));
    for (name, outcome) in &runs {
        if let Some(trace) = &outcome.trace {
            page =
                page.section(format!("Ops, {name}")).table(&text::ops_table(&top_ops(&recording::context(trace)), 30));
        }
    }
    page.finish()
}
