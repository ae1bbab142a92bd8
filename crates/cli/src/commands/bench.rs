//! `strobe bench`: throughput and latency of an engine.

mod moe_balance;

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Subcommand, ValueEnum};
use strobe_engine::engine_dir::LoadedModel;
use strobe_engine::window::{WINDOW_VARIABLES, Window, choose_spec, parse_windows};
use strobe_engine::{CacheSize, EngineOptions, KvCacheType, Policy, Quantization, SamplingParams};
use strobe_kernels_cpu::Cpu;
use strobe_workload::{Arrival, MetricOptions, PercentileRule, Sample, arrival_times_ns, metrics, read_dataset};

use crate::bench::client::Load;
use crate::bench::experts::{ExpertArgs, ExpertOptions};
use crate::bench::outcome::RepeatFigures;
use crate::bench::start::{Start, since_beginning_ms};
use crate::bench::write::{self, Files};
use crate::bench::{self, Spec, text};
use crate::build_args::{BuildArgs, Switch};
use crate::device::{self, Device, DeviceArgs, Needs};
use crate::machine::{self, MeasuredPeaks};
use crate::model_args::{CpuArgs, CudaArgs, ModelArgs, Target};
use crate::run_writer::{Problems, RunWriter};
use crate::runtime::{self, Runtime};
use crate::{output, run_dir};

const EXAMPLES: &str = "EXAMPLES:
  strobe bench throughput --engine-dir E --dataset d.jsonl
  strobe bench latency --engine-dir E --dataset d.jsonl --num-requests 8
  strobe bench kernels --op gemm,gemv --dtype bfloat16
  strobe bench moe-balance --model mixtral-small --dataset d.jsonl";

const THROUGHPUT_EXAMPLES: &str = "EXAMPLES:
  strobe bench throughput --engine-dir E --dataset d.jsonl
  strobe bench throughput --model tinyllama-1.1b --dataset d.jsonl --profile 10-20 --output-dir RUN
  strobe bench throughput --engine-dir E --dataset d.jsonl --request-rate 2 --arrival poisson --streaming
  strobe bench throughput --engine-dir E --dataset d.jsonl --measure-profiler-overhead
  strobe bench throughput --model tinyllama-1.1b --dataset d.jsonl --runtime pytorch-graph --max-batch-size 1024";

const LATENCY_EXAMPLES: &str = "EXAMPLES:
  strobe bench latency --engine-dir E --dataset d.jsonl --num-requests 8
  strobe bench latency --engine-dir E --dataset d.jsonl --num-requests 8 --concurrency 4 --streaming
  strobe bench latency --model tinyllama-1.1b --dataset d.jsonl --profile 10-20 --output-dir RUN";

const KERNEL_EXAMPLES: &str = "EXAMPLES:
  strobe bench kernels                                      every kernel with the shapes of tinyllama-1.1b
  strobe bench kernels --op gemm,gemv --dtype bfloat16 --threads 1
  strobe bench kernels --op attention --output-dir DIR      fused against naive attention, with a plot
  strobe bench kernels --shapes shapes.json --csv";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Subcommand)]
enum Mode {
    /// Measure throughput: all requests batched
    #[command(before_help = THROUGHPUT_EXAMPLES)]
    Throughput(Box<BenchArgs>),
    /// Measure latency: one request at a time
    #[command(before_help = LATENCY_EXAMPLES)]
    Latency(Box<BenchArgs>),
    /// Measure the speed-up of perfect expert balance in an MoE model
    #[command(before_help = moe_balance::EXAMPLES, mut_args(moe_balance::in_help))]
    MoeBalance(Box<moe_balance::Args>),
    /// Print the perfect router's token-to-expert plan
    MoePlan(Box<bench::plan::Args>),
    /// Measure single kernels: time, rate, % of roofline, correctness
    #[command(before_help = KERNEL_EXAMPLES)]
    Kernels(Box<bench::kernels::Args>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PolicyChoice {
    /// Admit only what can finish
    #[value(name = "guaranteed_no_evict", alias = "guaranteed-no-evict", alias = "GUARANTEED_NO_EVICT")]
    GuaranteedNoEvict,
    /// Admit what fits the next iteration; preempt and recompute when blocks run out
    #[value(name = "max_utilization", alias = "max-utilization", alias = "MAX_UTILIZATION")]
    MaxUtilization,
    /// Nothing new until the batch ends
    #[value(name = "static_batch", alias = "static-batch", alias = "STATIC_BATCH")]
    StaticBatch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PercentileChoice {
    /// Interpolated (Hyndman-Fan type 7)
    Linear,
    /// The value at index trunc(n*q), as trtllm-bench
    Nearest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ArrivalChoice {
    Poisson,
    Gamma,
    Constant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WeightsMemory {
    /// Copy where half of the memory stays free
    Auto,
    /// Copy into huge pages, after the warm-up
    Copy,
    /// Use the mapped file
    Map,
}

#[derive(clap::Args)]
struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Requests: JSONL of `strobe prepare-dataset` or `trtllm-bench`; - is standard input
    #[arg(long, value_name = "FILE")]
    dataset: PathBuf,
    /// Use the first N requests; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    num_requests: usize,

    /// Maximum requests in flight; -1 for no limit
    #[arg(long, value_name = "C", help_heading = "Load")]
    concurrency: Option<i64>,
    /// Report time to first token and per-token speed
    #[arg(long, help_heading = "Load")]
    streaming: bool,
    /// Warm-up requests before the measurement; warm-up rounds for PyTorch
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Load")]
    warmup: usize,
    /// Requests per second (open loop); without it all are sent at once
    #[arg(long, value_name = "R", help_heading = "Load")]
    request_rate: Option<f64>,
    /// How requests arrive at that rate [default: poisson]
    #[arg(long, value_enum, help_heading = "Load")]
    arrival: Option<ArrivalChoice>,
    /// Shape of gamma arrivals: below 1 bursty, above 1 regular
    #[arg(long, value_name = "B", help_heading = "Load")]
    burstiness: Option<f64>,
    /// Seed of arrivals and sampling
    #[arg(long, value_name = "S", default_value_t = 420, help_heading = "Load")]
    random_seed: u64,
    /// Repeat K times and report the spread; details are the last run's [default: 1]
    #[arg(long, value_name = "K", help_heading = "Load")]
    repeat: Option<usize>,

    /// 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0, help_heading = "Sampling")]
    temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 0, help_heading = "Sampling")]
    top_k: u32,
    /// Keep the smallest set of tokens with this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, help_heading = "Sampling")]
    top_p: f32,
    /// End-of-sequence token; -1 ignores it, so that every request produces what the dataset asks for
    #[arg(long, value_name = "ID", default_value_t = -1, help_heading = "Sampling")]
    eos_id: i64,
    /// Tokens that end a request
    #[arg(long, value_name = "ID,..", value_delimiter = ',', help_heading = "Sampling")]
    stop_ids: Vec<u32>,
    /// No end before this many tokens
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Sampling")]
    min_tokens: u32,

    /// Admission policy
    #[arg(long, value_enum, default_value = "guaranteed_no_evict", help_heading = "Engine")]
    scheduler_policy: PolicyChoice,
    /// Share of free memory for the KV cache [default: 0.9]
    #[arg(
        long,
        value_name = "F",
        conflicts_with = "kv_cache_blocks",
        visible_alias = "kv-cache-free-gpu-mem-fraction",
        help_heading = "Engine"
    )]
    kv_cache_free_mem_fraction: Option<f64>,
    /// Exactly this many KV cache blocks
    #[arg(long, value_name = "N", help_heading = "Engine")]
    kv_cache_blocks: Option<usize>,
    /// Reuse cached prefixes
    #[arg(long, value_enum, default_value = "disable", help_heading = "Engine")]
    kv_cache_reuse: Switch,
    /// Chunked prefill
    #[arg(long, value_enum, default_value = "enable", help_heading = "Engine")]
    chunked_context: Switch,
    /// Maximum requests per iteration [default: the engine's]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    max_batch_size: Option<usize>,
    /// Maximum tokens per iteration; not for --runtime pytorch [default: the engine's]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    max_num_tokens: Option<usize>,
    /// Keep an engine's weights in huge pages, or in the mapped file
    #[arg(long, value_enum, default_value = "auto", help_heading = "Engine")]
    weights_memory: WeightsMemory,
    /// Runtime: strobe, or PyTorch on the same requests as a baseline
    #[arg(long, value_enum, default_value = "strobe", help_heading = "Engine")]
    runtime: Runtime,
    /// The Python with torch and transformers for --runtime pytorch and pytorch-graph [default: python3]
    #[arg(long, value_name = "PATH", help_heading = "Engine")]
    python: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    cpu: CpuArgs,
    #[command(flatten)]
    cuda: CudaArgs,
    #[command(flatten)]
    build: BuildArgs,

    #[command(flatten)]
    experts: ExpertArgs,

    /// Record iterations: A-B, N, or a comma list; also STROBE_PROFILE_START_STOP or TLLM_PROFILE_START_STOP
    #[arg(long, value_name = "SPEC", help_heading = "Profiling", allow_hyphen_values = true)]
    profile: Option<String>,
    /// Also write a Chrome trace of the windows; also TLLM_TORCH_PROFILE_TRACE
    #[arg(long, value_name = "FILE.json", help_heading = "Profiling")]
    trace_out: Option<PathBuf>,
    /// Record every second iteration (on a GPU, alternate blocks of 16) and print the profiler's overhead
    #[arg(long, conflicts_with = "profile", help_heading = "Profiling")]
    measure_profiler_overhead: bool,

    /// Run directory to write: run.json, requests.jsonl, iterations.jsonl, trace.sqlite, report.json, report.html
    /// [default: none; with --profile a new one in runs/]
    #[arg(long, value_name = "RUN", help_heading = "Output")]
    output_dir: Option<PathBuf>,
    /// Replace an existing run directory; it is restored if nothing is recorded
    #[arg(long, help_heading = "Output")]
    overwrite: bool,
    /// Write the report as JSON, with trtllm-bench's keys
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report_json: Option<PathBuf>,
    /// Write every request as JSON, with trtllm-bench's keys
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    request_json: Option<PathBuf>,
    /// Write one JSON object per iteration
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    iteration_log: Option<PathBuf>,
    /// Print a line per iteration in the format of older TensorRT-LLM logs
    #[arg(long, conflicts_with = "json", help_heading = "Output")]
    log_iteration_data: bool,
    /// How percentiles are taken
    #[arg(long, value_enum, default_value = "linear", help_heading = "Output")]
    percentiles: PercentileChoice,
    /// Print report.json instead of the text report
    #[arg(long, help_heading = "Output")]
    json: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.mode {
        Mode::Throughput(args) => bench(*args, false),
        Mode::Latency(args) => bench(*args, true),
        Mode::MoeBalance(args) => moe_balance::run(*args),
        Mode::MoePlan(args) => bench::plan::run(*args),
        Mode::Kernels(args) => bench::kernels::run(*args),
    }
}

fn bench(args: BenchArgs, latency: bool) -> Result<()> {
    // Everything that can be wrong with the call is found before anything is loaded.
    let windows = windows(&args)?;
    let arrival = arrival(&args)?;
    let concurrency = concurrency(&args, latency)?;
    let params = sampling(&args)?;
    args.cuda.refuse_conflicts()?;
    if args.runtime != Runtime::Strobe {
        refuse_of_other_runtimes(&args, !windows.is_empty())?;
    } else if args.python.is_some() {
        bail!("--python is for --runtime pytorch and pytorch-graph");
    }
    let device = match args.runtime {
        Runtime::Strobe => args.build.device(&args.device)?,
        _ => args.device.resolve(Needs::Driver)?,
    };
    if args.repeat == Some(0) {
        bail!("--repeat must be at least 1");
    }
    if args.warmup > MOST_WARMUP {
        bail!("--warmup must be at most {MOST_WARMUP}, found {}", args.warmup);
    }
    let profiled = !windows.is_empty();
    let named = std::env::var_os(TRACE_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
    if named.is_some() && args.trace_out.is_none() && !profiled {
        output::warn(&format!("{TRACE_VARIABLE} is set but ignored: there is no window to record; add --profile A-B"));
    }
    let trace_out = args.trace_out.clone().or_else(|| named.filter(|_| profiled));
    if trace_out.is_some() && !profiled {
        let instead =
            if args.measure_profiler_overhead { "run it without --measure-profiler-overhead and " } else { "" };
        bail!("--trace-out needs a window to record; {instead}add --profile A-B");
    }
    let files = Files {
        report_json: args.report_json.clone(),
        request_json: args.request_json.clone(),
        iteration_log: args.iteration_log.clone(),
        trace_out,
    };
    // A profiled run is kept even if nobody said where: the trace is what was asked for.
    let output_dir = args.output_dir.clone().or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        profiled.then(|| PathBuf::from(format!("runs/bench-{}-{}", now.as_secs(), std::process::id())))
    });
    if let Some(dir) = &output_dir {
        run_dir::check_target(dir, args.overwrite)?;
    }
    files.check(output_dir.as_deref())?;
    let samples = samples(&args)?;
    if args.runtime != Runtime::Strobe {
        let in_words = describe_load(&arrival, concurrency, args.random_seed);
        return other_runtime(&args, latency, device, concurrency, samples, &files, output_dir, in_words);
    }
    let recorded = !windows.is_empty() || args.measure_profiler_overhead;
    let call = Call { arrival, concurrency, params, windows, recorded, latency };
    let ready = ready(&args, device, call, samples, ExpertArgs::options)?;
    let Ready { device, model, peaks, spec, start } = ready;
    let mut keep = RunWriter::new(output_dir.as_deref(), args.overwrite);
    let outcome = bench::execute(device, &model, peaks, &spec, Some(start), &mut keep)?;
    let report = outcome.report();
    // The report first: whatever happens to files, the answer is there.
    let mut problems = Problems::default();
    problems.keep(match args.json {
        true => output::try_print(&format!("{report:#}\n")),
        false => output::try_print(&text::report(&outcome, output::width())),
    });
    let (of_run, kept) =
        keep.finish(outcome.run.partial, |dir, problems| write::results(&outcome, &report, dir, problems));
    problems.extend(of_run);
    write::single_files(&outcome, &report, &files, model.tokenizer.as_ref(), &mut problems);
    if let Some(dir) = output_dir.as_ref().filter(|_| kept) {
        output::note(&format!("run directory: {}", dir.display()));
    }
    if let Some(failure) = &outcome.run.failure {
        problems.keep(Err(anyhow!("{failure}; the report covers what was done until then")));
    }
    match &outcome.metrics {
        Err(error) if !outcome.run.partial => drop(problems.keep(Err(anyhow!("the run gave no metrics: {error:#}")))),
        _ => {}
    }
    problems.into_result()
}

/// The requests to send.
fn samples(args: &BenchArgs) -> Result<Vec<Sample>> {
    let mut samples = read_dataset(&args.dataset)?;
    if args.num_requests > 0 {
        if args.num_requests > samples.len() {
            bail!(
                "--num-requests {} is more than the {} requests in {}; lower it or make a larger dataset",
                args.num_requests,
                samples.len(),
                args.dataset.display()
            );
        }
        samples.truncate(args.num_requests);
    }
    Ok(samples)
}

/// What the options of a call come to.
struct Call {
    arrival: Arrival,
    concurrency: usize,
    params: SamplingParams,
    windows: Vec<Window>,
    /// Whether some iterations are recorded, now or later.
    recorded: bool,
    latency: bool,
}

/// Everything a benchmark needs to start.
struct Ready {
    device: strobe_engine::device::Device,
    model: LoadedModel,
    peaks: Box<dyn FnOnce() -> Result<MeasuredPeaks>>,
    spec: Spec,
    start: Start,
}

/// Open the device and load the model; `experts` checks what was asked of its experts.
fn ready(
    args: &BenchArgs,
    device: Device,
    call: Call,
    samples: Vec<Sample>,
    experts: fn(&ExpertArgs, &LoadedModel) -> Result<ExpertOptions>,
) -> Result<Ready> {
    let Call { arrival, concurrency, params, windows, recorded, latency } = call;
    let mut target = match device {
        Device::Cpu => {
            args.cuda.refuse_on_cpu()?;
            Target::Cpu(args.cpu.open()?)
        }
        Device::Cuda(index) => {
            args.cpu.refuse_on_gpu()?;
            if args.weights_memory != WeightsMemory::Auto {
                bail!("--weights-memory is for the CPU; add --device cpu, or leave it out");
            }
            Target::Cuda(args.cuda.device(index, recorded))
        }
    };
    if args.model.model.is_some() && args.weights_memory != WeightsMemory::Auto {
        bail!("--weights-memory is for --engine-dir; what --model builds is in memory anyway");
    }
    let mut start = Start { device_ms: since_beginning_ms(), ..Start::default() };
    let overlap = args.cuda.overlap_scheduler.map_or(matches!(target, Target::Cuda(_)), Switch::on);
    let model = args.model.load(&mut target, &args.build, args.max_batch_size, args.max_num_tokens)?;
    start.model_ms = since_beginning_ms();
    let vocab = model.config.model.vocab_size;
    if let Some(id) = args.stop_ids.iter().find(|&&id| id as usize >= vocab) {
        bail!("--stop-ids: {id} is outside the vocabulary of {vocab}");
    }
    if args.eos_id >= vocab as i64 || args.eos_id < -1 {
        bail!("--eos-id: expected -1 or an id below {vocab}, found {}", args.eos_id);
    }
    let experts = experts(&args.experts, &model)?;
    let jobs = bench::jobs(&args.dataset, samples, vocab, model.tokenizer.as_ref())?;
    let peaks: Box<dyn FnOnce() -> Result<MeasuredPeaks>> = match &target {
        Target::Cpu(cpu) => {
            let (tier, threads) = (cpu.tier(), cpu.threads());
            Box::new(move || Ok(machine::peaks(&mut Cpu::new(tier, threads))))
        }
        // A GPU is measured before its memory is taken.
        Target::Cuda(device) => {
            let peaks = machine::gpu_peaks(device.index, &model.config.build)?;
            Box::new(|| Ok(peaks))
        }
    };
    let in_words = describe_load(&arrival, concurrency, args.random_seed);
    let spec = Spec {
        load: Load {
            arrivals_ns: arrival_times_ns(&arrival, jobs.len(), args.random_seed),
            open_loop: arrival != Arrival::AtOnce,
            concurrency,
            params,
            log_iterations: args.log_iteration_data,
            log_remark: if experts.perfect_router.is_some() { LOG_REMARK } else { "" },
        },
        jobs,
        engine: EngineOptions {
            policy: match args.scheduler_policy {
                PolicyChoice::GuaranteedNoEvict => Policy::GuaranteedNoEvict,
                PolicyChoice::MaxUtilization => Policy::MaxUtilization,
                PolicyChoice::StaticBatch => Policy::StaticBatch,
            },
            max_batch_size: args.max_batch_size,
            max_num_tokens: args.max_num_tokens,
            chunked_context: args.chunked_context.on(),
            cache: match (args.kv_cache_blocks, args.kv_cache_free_mem_fraction) {
                (Some(blocks), _) => CacheSize::Blocks(blocks),
                (None, fraction) => CacheSize::FreeFraction(fraction.unwrap_or(0.9)),
            },
            prefix_reuse: args.kv_cache_reuse.on(),
            probe_recorder: args.measure_profiler_overhead,
            overlap,
            eos_ids: u32::try_from(args.eos_id).into_iter().collect(),
            perfect_router: experts.perfect_router,
        },
        move_weights: moves_weights(&model, args.weights_memory),
        warmup: args.warmup,
        repeat: args.repeat.unwrap_or(1),
        windows,
        streaming: args.streaming || latency,
        rule: rule(args),
        dataset: Some(args.dataset.display().to_string()),
        command: command_line(),
        arrival: in_words,
        assumed_ranks: experts.ranks,
    };
    let device = match target {
        Target::Cpu(cpu) => cpu.into(),
        Target::Cuda(device) => device.into(),
    };
    Ok(Ready { device, model, peaks, spec, start })
}

/// Options that only mean something to strobe's own engine.
fn refuse_of_other_runtimes(args: &BenchArgs, profiled: bool) -> Result<()> {
    if args.runtime == Runtime::Pytorch && args.max_num_tokens.is_some() {
        bail!(
            "--max-num-tokens is for --runtime strobe and pytorch-graph; pytorch takes all prompts of a batch in one step: lower --max-batch-size instead"
        );
    }
    let given = [
        ("--profile (or one of its variables)", profiled || args.profile.is_some()),
        ("--trace-out", args.trace_out.is_some()),
        ("--measure-profiler-overhead", args.measure_profiler_overhead),
        ("--request-rate", args.request_rate.is_some()),
        ("--temperature", args.temperature != 0.0),
        ("--eos-id", args.eos_id != -1),
        ("--stop-ids", !args.stop_ids.is_empty()),
        ("--min-tokens", args.min_tokens != 0),
        ("--scheduler-policy", args.scheduler_policy != PolicyChoice::GuaranteedNoEvict),
        ("--kv-cache-free-mem-fraction", args.kv_cache_free_mem_fraction.is_some()),
        ("--kv-cache-blocks", args.kv_cache_blocks.is_some()),
        ("--kv-cache-reuse", args.kv_cache_reuse.on()),
        ("--chunked-context", !args.chunked_context.on()),
        ("--weights-memory", args.weights_memory != WeightsMemory::Auto),
        ("--log-iteration-data", args.log_iteration_data),
        ("--cuda-graph", args.cuda.cuda_graph.is_some()),
        ("--overlap-scheduler", args.cuda.overlap_scheduler.is_some()),
        ("--nvtx", args.cuda.nvtx.is_some()),
        ("--cuda-launch-blocking", args.cuda.cuda_launch_blocking),
        ("--max-seq-len", args.build.max_seq_len.is_some()),
        ("--tokens-per-block", args.build.tokens_per_block.is_some()),
        ("--gemm-plugin", args.build.gemm_plugin.is_some()),
        ("--context-fmha", args.build.context_fmha.is_some()),
        ("--paged-kv-cache", args.build.paged_kv_cache.is_some()),
    ];
    match given.iter().chain(&args.experts.given()).find(|(_, given)| *given) {
        Some((name, _)) => bail!("{name} is for --runtime strobe; {} does not have it", args.runtime.name()),
        None => Ok(()),
    }
}

/// Prompt tokens in a step of another runtime when nobody says: products are at full speed from there on.
const OTHERS_MAX_NUM_TOKENS: usize = 8192;

/// The same benchmark on PyTorch.
fn other_runtime(
    args: &BenchArgs,
    latency: bool,
    device: Device,
    concurrency: usize,
    samples: Vec<Sample>,
    files: &Files,
    output_dir: Option<PathBuf>,
    arrival: String,
) -> Result<()> {
    let prefill_tokens = args.max_num_tokens.unwrap_or(OTHERS_MAX_NUM_TOKENS);
    let gpu = match device {
        Device::Cpu => None,
        Device::Cuda(index) => {
            args.cpu.refuse_on_gpu()?;
            Some(device::listed(index)?)
        }
    };
    let model = args.model.describe(&args.build, args.max_batch_size, prefill_tokens, gpu.is_some())?;
    let (quantization, kv_cache) = (model.config.build.quantization, model.config.build.kv_cache);
    if quantization != Quantization::None {
        let (name, runtime) = (quantization.name(), args.runtime.name());
        bail!("--runtime {runtime} has no {name}; use an engine or options without it");
    }
    if kv_cache != KvCacheType::Auto {
        let (name, runtime) = (kv_cache.name(), args.runtime.name());
        bail!("--runtime {runtime} has no KV cache of type {name}; use an engine or options without it");
    }
    let batch = args.max_batch_size.unwrap_or(model.config.build.max_batch_size).min(concurrency).max(1);
    let jobs = bench::jobs(&args.dataset, samples, model.config.model.vocab_size, model.tokenizer.as_ref())?;
    let longest = jobs.iter().map(|job| job.prompt.len() + job.output_tokens as usize).max().unwrap_or(0);
    runtime::check_model(args.runtime, &model.config, longest)?;
    let threads = args.cpu.open()?.threads();
    let python = args.python.clone().unwrap_or_else(|| PathBuf::from("python3"));
    let (facts, mut runs) = runtime::execute(&runtime::Task {
        runtime: args.runtime,
        python: &python,
        device,
        config: &model.config,
        jobs: &jobs,
        batch,
        prefill_tokens,
        closed_loop: concurrency != usize::MAX,
        warmup: args.warmup,
        repeat: args.repeat.unwrap_or(1),
        threads,
    })?;
    let rule = rule(args);
    let options = MetricOptions { rule, world_size: 1, streaming: args.streaming || latency };
    let all = runs.iter().map(|run| metrics(&run.records, &options)).collect::<Result<Vec<_>, _>>()?;
    let repeats =
        all.iter().zip(&runs).map(|(metrics, run)| RepeatFigures::of(metrics, &[], &run.iterations)).collect();
    let (Some(metrics), Some(run)) = (all.into_iter().last(), runs.pop()) else { bail!("the runner ran nothing") };
    let outcome = runtime::report::Outcome {
        runtime: args.runtime,
        machine: machine::Machine::plain(facts.threads, gpu),
        facts,
        config: model.config,
        engine_dir: model.dir,
        metrics,
        run,
        repeats,
        rule,
        batch,
        prefill_tokens: (args.runtime == Runtime::PytorchGraph).then_some(prefill_tokens),
        dataset: args.dataset.display().to_string(),
        command: command_line(),
        arrival,
    };
    let report = outcome.report();
    let mut problems = Problems::default();
    problems.keep(match args.json {
        true => output::try_print(&format!("{report:#}\n")),
        false => output::try_print(&outcome.text(output::width())),
    });
    let mut keep = RunWriter::new(output_dir.as_deref(), args.overwrite);
    keep.begin(outcome.about());
    let (of_run, kept) = keep.finish(false, |dir, problems| outcome.write(&report, dir, problems));
    problems.extend(of_run);
    outcome.write_files(&report, files, model.tokenizer.as_ref(), &mut problems);
    if let Some(dir) = output_dir.as_ref().filter(|_| kept) {
        output::note(&format!("run directory: {}", dir.display()));
    }
    problems.into_result()
}

fn rule(args: &BenchArgs) -> PercentileRule {
    match args.percentiles {
        PercentileChoice::Linear => PercentileRule::Linear,
        PercentileChoice::Nearest => PercentileRule::Nearest,
    }
}

/// Behind every logged iteration of a run with the perfect router.
const LOG_REMARK: &str = " (perfect router: output is wrong by design)";

/// Where a Chrome trace goes, beside `--trace-out`.
const TRACE_VARIABLE: &str = "TLLM_TORCH_PROFILE_TRACE";

/// With it TensorRT-LLM records the pauses of Python's garbage collector.
const GC_VARIABLE: &str = "TLLM_PROFILE_RECORD_GC";

/// More random requests than anybody waits for.
const MOST_WARMUP: usize = 10_000;

/// The words of this call, for the record.
pub(crate) fn command_line() -> String {
    crate::shell::line(std::process::Command::new("strobe").args(crate::words()))
}

/// Whether mapped weights are to be moved to memory of their own.
fn moves_weights(model: &LoadedModel, memory: WeightsMemory) -> bool {
    let bytes = model.weights.total_bytes();
    let roomy = strobe_engine::memory::available().is_none_or(|available| available.bytes / 2 > bytes);
    memory == WeightsMemory::Copy || (memory == WeightsMemory::Auto && roomy)
}

fn windows(args: &BenchArgs) -> Result<Vec<Window>> {
    let (spec, ignored) = choose_spec(args.profile.as_deref(), |name| std::env::var(name).ok());
    let windows = parse_windows(spec.as_deref().unwrap_or_default()).with_context(|| {
        let variable = WINDOW_VARIABLES.into_iter().find(|name| std::env::var(name).ok() == spec);
        variable.filter(|_| args.profile.is_none()).unwrap_or("--profile")
    })?;
    if args.profile.is_some() && windows.is_empty() {
        bail!("--profile is empty; write A-B, N, or a comma list such as 100-150,200");
    }
    if !ignored.is_empty() {
        output::warn(&format!(
            "{} is set but ignored: a stronger setting names the profile window",
            ignored.join(", ")
        ));
    }
    if std::env::var(GC_VARIABLE).is_ok_and(|value| value == "1") {
        output::note(&format!(
            "note: {GC_VARIABLE}: strobe has no garbage collector and no GIL; every iteration records CPU waits, involuntary switches and major page faults instead, in `strobe.host` of iterations.jsonl and --iteration-log"
        ));
    }
    if args.measure_profiler_overhead && !windows.is_empty() {
        output::warn(
            "the profile window is ignored: --measure-profiler-overhead records iterations all over the run instead",
        );
        return Ok(Vec::new());
    }
    Ok(windows)
}

fn arrival(args: &BenchArgs) -> Result<Arrival> {
    let Some(rate) = args.request_rate else {
        if args.burstiness.is_some() || args.arrival.is_some() {
            bail!("--arrival and --burstiness need --request-rate R; without a rate all requests are sent at once");
        }
        return Ok(Arrival::AtOnce);
    };
    let name = match args.arrival.unwrap_or(ArrivalChoice::Poisson) {
        ArrivalChoice::Poisson => "poisson",
        ArrivalChoice::Gamma => "gamma",
        ArrivalChoice::Constant => "constant",
    };
    Ok(Arrival::parse(name, rate, args.burstiness)?)
}

fn concurrency(args: &BenchArgs, latency: bool) -> Result<usize> {
    match (args.concurrency, latency) {
        (None | Some(1), true) => Ok(1),
        (Some(other), true) => {
            bail!("--concurrency {other}: `bench latency` runs one request at a time; use `bench throughput`")
        }
        (None | Some(-1), false) => Ok(usize::MAX),
        (Some(c), false) => match usize::try_from(c).ok().filter(|&c| c > 0) {
            Some(c) => Ok(c),
            None => bail!("--concurrency must be at least 1, or -1 for no limit; found {c}"),
        },
    }
}

fn sampling(args: &BenchArgs) -> Result<SamplingParams> {
    if args.temperature == 0.0 && (args.top_k > 1 || args.top_p != 1.0) {
        bail!("--top-k and --top-p do nothing at temperature 0, which is greedy; add --temperature T");
    }
    if args.min_tokens > 0 && args.eos_id < 0 && args.stop_ids.is_empty() {
        bail!("--min-tokens does nothing where no token ends a request; add --eos-id or --stop-ids");
    }
    let params = SamplingParams {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.random_seed,
        max_tokens: u32::MAX,
        min_tokens: args.min_tokens,
        stop_ids: args.stop_ids.clone(),
        ignore_eos: args.eos_id < 0,
    };
    params.validate().context("sampling options")?;
    Ok(params)
}

fn describe_load(arrival: &Arrival, concurrency: usize, seed: u64) -> String {
    let limit = if concurrency == usize::MAX {
        "no concurrency limit".into()
    } else {
        format!("at most {concurrency} in flight")
    };
    match arrival {
        Arrival::AtOnce if concurrency == usize::MAX => "all at once, no concurrency limit".into(),
        Arrival::AtOnce => format!("closed loop, {limit}"),
        Arrival::Constant { rate } => format!("open loop, constant {rate} req/s, {limit}"),
        Arrival::Poisson { rate } => format!("open loop, Poisson {rate} req/s, seed {seed}, {limit}"),
        Arrival::Gamma { rate, burstiness } => {
            format!("open loop, gamma {rate} req/s with burstiness {burstiness}, seed {seed}, {limit}")
        }
        Arrival::OnOff { rate, on_s, off_s } => {
            format!("open loop, {rate} req/s on for {on_s} s and off for {off_s} s, seed {seed}, {limit}")
        }
        Arrival::Drift { rate, swing, period_s } => {
            format!("open loop, {rate} req/s swinging by {swing} in {period_s} s, seed {seed}, {limit}")
        }
    }
}
