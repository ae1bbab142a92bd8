//! `strobe build`: checkpoint or preset to engine directory.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::json;
use strobe_engine::weights::{self, WeightError};
use strobe_engine::{ModelRef, engine_dir, staged_dir};
use strobe_model::WeightId;
use strobe_report::human;
use strobe_report::table::Table;

use crate::build_args::BuildArgs;
use crate::device::{Device, DeviceArgs, DeviceChoice};
use crate::model_args::{CpuArgs, warn_of_changes};
use crate::{output, progress};

const EXAMPLES: &str = "EXAMPLES:
  strobe build --model micro --output-dir engine
  strobe build --model ./TinyLlama-1.1B --output-dir engine --dtype float32
  strobe build --model tinyllama-1.1b --output-dir small --quantization int8
  strobe build --model llama-3.2-1b-Q4_K_M.gguf --output-dir engine
  strobe build --model tinyllama-1.1b --output-dir plain --gemm-plugin disable --context-fmha disable
  strobe build --list-presets";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// List presets with parameters and bytes
    #[arg(long)]
    list_presets: bool,
    /// Preset, Hugging Face directory with config.json and *.safetensors, or GGUF file
    #[arg(long, value_name = "PRESET|DIR|FILE", required_unless_present = "list_presets")]
    model: Option<String>,
    /// Engine directory to write
    #[arg(long, value_name = "DIR", required_unless_present = "list_presets")]
    output_dir: Option<PathBuf>,
    /// Maximum requests per iteration [default: 64; 2048 for a GPU]
    #[arg(long, value_name = "N")]
    max_batch_size: Option<usize>,
    /// Maximum tokens per iteration [default: 2048; 8192 for a GPU]
    #[arg(long, value_name = "N")]
    max_num_tokens: Option<usize>,
    #[command(flatten)]
    build: BuildArgs,
    /// Choose GEMM kernels for this GPU by measurement and store the choices: cuda, cuda:N; auto does it where a usable
    /// GPU is, cpu never [default: auto]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
    #[command(flatten)]
    cpu: CpuArgs,
    /// Replace an existing engine directory
    #[arg(long)]
    overwrite: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    if args.list_presets {
        list_presets(args.json);
        return Ok(());
    }
    let (Some(name), Some(dir)) = (&args.model, &args.output_dir) else {
        bail!("give --model and --output-dir, or --list-presets");
    };
    let start = Instant::now();
    staged_dir::check_target(
        dir,
        args.overwrite,
        &[engine_dir::CONFIG_FILE, engine_dir::WEIGHTS_FILE],
        "engine directory",
    )?;
    let mut model = ModelRef::open(name, args.build.seed())?;
    args.build.refuse_seed_of_checkpoint(&model)?;
    args.build.skew_routers(&mut model)?;
    let device = args.build.device(&DeviceArgs { device: args.device })?;
    let on_gpu = matches!(device, Device::Cuda(_));
    let build = args.build.config(&model, args.max_batch_size, args.max_num_tokens, on_gpu);
    let config = model.engine_config(build)?;
    warn_of_changes(&model, &config);
    if on_gpu {
        config.build.check_gpu()?;
    }
    let mut cpu = args.cpu.open()?;
    let tuned = match device {
        Device::Cpu => None,
        Device::Cuda(index) => {
            let spinner = progress::spinner("choosing GEMM kernels by measurement");
            let tuned = strobe_engine::cuda::choose_gemms(index, &config, || !crate::interrupt::requested());
            spinner.finish_and_clear();
            Some(tuned?)
        }
    };
    let choices = tuned.as_ref().map(|t| serde_json::to_string_pretty(&t.choices)).transpose()?.unwrap_or_default();
    let extra: Vec<(&str, &str)> =
        tuned.iter().map(|_| (strobe_kernels_cuda::CHOICES_FILE, choices.as_str())).collect();
    let total = weights::engine_bytes(&config.model, &config.build);
    let bar = progress::bytes("building", total);
    let done = engine_dir::build(
        &mut cpu,
        &model,
        &config,
        dir,
        args.overwrite,
        &extra,
        &mut crate::interrupt::watch(|done| bar.set_position(done)),
    );
    bar.finish_and_clear();
    let done = done?;
    let seconds = start.elapsed().as_secs_f64();

    let b = &config.build;
    let errors = KindError::all(&done.errors);
    if args.json {
        let file = dir.join(engine_dir::CONFIG_FILE);
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let written: serde_json::Value =
            serde_json::from_str(&text).with_context(|| format!("{} is damaged", file.display()))?;
        let summary = json!({
            "engine_dir": dir.display().to_string(), "config": written, "weight_bytes": done.weight_bytes,
            "tensors": done.tensors, "weight_errors": errors, "seconds": seconds, "simd_tier": cpu.tier().name(), "threads": cpu.threads(),
        });
        output::line(&format!("{summary:#}"));
        return Ok(());
    }
    let on = |flag: bool| if flag { "enable" } else { "disable" };
    let mut facts = Vec::new();
    let mut row = |key: &'static str, value: String| facts.push((key, value));
    row("engine", dir.display().to_string());
    row("model", format!("{} ({}, {} layers)", name, config.model.architecture, config.model.num_hidden_layers));
    row("parameters", human::count(config.model.parameter_count()));
    row("weights", format!("{}, {}", config.describe_origin(), b.describe_weights()));
    let layout = if b.gemm_plugin { "packed in panels of 32 outputs" } else { "row major, as in the checkpoint" };
    row("layout", format!("{layout} (--gemm-plugin {})", b.gemm_plugin_name()));
    row("attention", format!("--context-fmha {}", on(b.context_fmha)));
    let cache = if b.paged_kv_cache {
        format!("paged, {} tokens per block", b.tokens_per_block)
    } else {
        "contiguous per request".into()
    };
    let kind = if on_gpu { b.gpu_kv_cache_name() } else { b.cpu_kv_cache_name(cpu.tier()) };
    row(
        "kv cache",
        format!("{cache}, {kind}, {} per token", human::bytes(b.kv_bytes_per_token(&config.model, on_gpu))),
    );
    row(
        "limits",
        format!("batch {}, {} tokens per step, sequences of {}", b.max_batch_size, b.max_num_tokens, b.max_seq_len),
    );
    row(
        "tokenizer",
        match (&model.tokenizer, &model.tokenizer_problem) {
            (Some(_), _) => "yes".into(),
            (None, Some(problem)) => format!("none: {problem}; token ids only"),
            (None, None) => "none in the model directory; token ids only".into(),
        },
    );
    if let Some(tuned) = &tuned {
        row("gemm choices", format!("{} measured, in {}", tuned.measured, strobe_kernels_cuda::CHOICES_FILE));
    }
    for error in &errors {
        row("error", error.to_string());
    }
    row("written", format!("{} in {} tensors", human::bytes(done.weight_bytes), done.tensors));
    row("time", format!("{seconds:.2} s on {} threads, {}", cpu.threads(), cpu.tier().name()));
    output::facts(&facts);
    output::line(&format!("next: strobe bench throughput --engine-dir {} --dataset FILE", dir.display()));
    Ok(())
}

/// What rounding took from the weights of one kind.
#[derive(serde::Serialize)]
struct KindError {
    weight: &'static str,
    /// Root mean square of the error over that of the weights, all layers together.
    relative_rms: f64,
    /// The layer that lost most, and how much.
    #[serde(skip_serializing_if = "Option::is_none")]
    worst_layer: Option<(u16, f64)>,
}

impl KindError {
    /// One for each kind, in the order of the weights.
    fn all(errors: &[(WeightId, WeightError)]) -> Vec<KindError> {
        let kind = |id: &WeightId| match id {
            WeightId::Layer(layer, weight) => (weight.name(), Some(*layer)),
            _ => ("lm_head", None),
        };
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in errors.iter().map(|(id, _)| kind(id)) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let of_kind = |name: &'static str| {
            let mut sum = WeightError::default();
            let mut worst_layer: Option<(u16, f64)> = None;
            for (id, error) in errors.iter().filter(|(id, _)| kind(id).0 == name) {
                sum += *error;
                let layer = kind(id).1.map(|layer| (layer, error.relative()));
                worst_layer = worst_layer.into_iter().chain(layer).max_by(|a, b| a.1.total_cmp(&b.1));
            }
            KindError { weight: name, relative_rms: sum.relative(), worst_layer }
        };
        names.into_iter().map(of_kind).collect()
    }
}

impl std::fmt::Display for KindError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {:.3} % (relative RMS)", self.weight, 100.0 * self.relative_rms)?;
        match self.worst_layer {
            Some((layer, worst)) => write!(f, ", worst in layer {layer}: {:.3} %", 100.0 * worst),
            None => Ok(()),
        }
    }
}

fn list_presets(as_json: bool) {
    let presets = strobe_model::presets();
    if as_json {
        let list: Vec<_> = presets
            .iter()
            .map(|p| {
                let config = p.config();
                json!({
                    "name": p.name, "summary": p.summary, "parameters": config.parameter_count(),
                    "dtype": config.dtype.name(), "bytes": config.parameter_count() * config.dtype.bytes() as u64,
                    "kv_bytes_per_token": config.kv_bytes_per_token(config.dtype),
                    "config": config,
                })
            })
            .collect();
        output::line(&format!("{:#}", json!(list)));
        return;
    }
    let mut table = Table::new([
        "preset",
        "parameters",
        "dtype",
        "bytes",
        "kv/token",
        "layers",
        "hidden",
        "heads/kv",
        "vocab",
        "what",
    ])
    .left(9)
    .flexible(9);
    for preset in presets {
        let c = preset.config();
        table.push([
            preset.name.to_string(),
            c.parameter_count().to_string(),
            c.dtype.name().to_string(),
            human::bytes(c.parameter_count() * c.dtype.bytes() as u64),
            human::bytes(c.kv_bytes_per_token(c.dtype)),
            c.num_hidden_layers.to_string(),
            c.hidden_size.to_string(),
            format!("{}/{}", c.num_attention_heads, c.num_key_value_heads),
            c.vocab_size.to_string(),
            preset.summary.to_string(),
        ]);
    }
    output::print(&table.render(output::width().max(120)));
    output::line("All presets have seeded random weights of the true shapes; bytes are for the dtype shown.");
}
