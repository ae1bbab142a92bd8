//! `strobe eval perplexity`: how well a model predicts a text, and what quantisation costs.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use strobe_engine::LoadedModel;
use strobe_engine::perplexity::{Score, Windows, perplexity};
use strobe_report::human;
use strobe_report::table::Table;

use super::open_device;
use crate::build_args::{BuildArgs, QuantizationChoice};
use crate::device::DeviceArgs;
use crate::model_args::{CpuArgs, ModelArgs, Target};
use crate::{output, progress};

pub(super) const EXAMPLES: &str = "EXAMPLES:
  strobe eval perplexity --engine-dir engine --text book.txt
  strobe eval perplexity --model ./TinyLlama-1.1B --text book.txt --context 2048 --stride 1024 --json
  strobe eval perplexity --model ./TinyLlama-1.1B --dtype float32 --text book.txt --compare-quantization none,int8,int4";

/// Tokens of a window when nobody says, if the model can take as many.
const DEFAULT_CONTEXT: usize = 512;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to predict, UTF-8
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Maximum tokens per window [default: 512, at most the maximum sequence length]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Tokens that every window after the first scores; each is predicted from at least CONTEXT - STRIDE tokens [default: half
    /// of the context]
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    /// Build the model with each of these and print the perplexities and their ratios to the first
    #[arg(long, value_name = "KIND,..", value_delimiter = ',', value_enum, conflicts_with_all = ["engine_dir", "quantization"])]
    compare_quantization: Vec<QuantizationChoice>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    build: BuildArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    cpu: CpuArgs,
}

/// One model's result.
struct Scored {
    model: String,
    weights: String,
    dtype: &'static str,
    quantization: &'static str,
    device: String,
    windows: Windows,
    score: Score,
    seconds: f64,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let text = read_text(&args.text)?;
    let variants: Vec<BuildArgs> = match &args.compare_quantization[..] {
        [] => vec![args.build.clone()],
        kinds => kinds.iter().map(|kind| BuildArgs { quantization: Some(*kind), ..args.build.clone() }).collect(),
    };
    // All on one device: a difference must be that of the quantisation.
    let decisive = variants.iter().find(|build| build.needs_cpu()).unwrap_or(&args.build);
    let one = |build| score(args, build, open_device(&args.device, decisive, &args.cpu)?, &text);
    let scored = variants.iter().map(one).collect::<Result<Vec<Scored>>>()?;
    let Some(first) = scored.first() else { return Ok(()) };
    if args.json {
        output::line(&format!("{:#}", document(args, &text, first, &scored)));
    } else if args.compare_quantization.is_empty() {
        print_facts(args, &text, first);
    } else {
        print_table(args, &text, first, &scored);
    }
    Ok(())
}

fn read_text(path: &std::path::Path) -> Result<String> {
    let shown = path.display();
    let bytes = std::fs::read(path).with_context(|| format!("cannot read --text {shown}"))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        anyhow::anyhow!("--text {shown} is not UTF-8 after byte {}; convert it first", e.utf8_error().valid_up_to())
    })?;
    if text.is_empty() {
        bail!("--text {shown} is empty; there is nothing to predict");
    }
    Ok(text)
}

fn score(args: &Args, build: &BuildArgs, mut target: Target, text: &str) -> Result<Scored> {
    let model: LoadedModel = args.model.load(&mut target, build, None, None)?;
    let Some(tokenizer) = &model.tokenizer else {
        bail!(
            "{} has no tokenizer, so a text can't be scored; put its tokenizer.json into the model directory and build again",
            model.config.model_name
        );
    };
    let ids = tokenizer.encode_with_special_tokens(text)?;
    let context = args.context.unwrap_or(DEFAULT_CONTEXT.min(model.config.build.max_seq_len));
    let windows = Windows { context, stride: args.stride.unwrap_or((context / 2).max(1)) };
    let device = target.describe();
    let bar = progress::tokens("scoring", ids.len().saturating_sub(1) as u64);
    let start = Instant::now();
    let score = perplexity(target, &model, &ids, windows, &mut crate::interrupt::watch(|done| bar.set_position(done)));
    bar.finish_and_clear();
    Ok(Scored {
        model: model.config.model_name.clone(),
        weights: model.config.weights.describe(),
        dtype: model.config.build.dtype.name(),
        quantization: model.config.build.quantization.name(),
        device,
        windows,
        score: score?,
        seconds: start.elapsed().as_secs_f64(),
    })
}

fn document(args: &Args, text: &str, first: &Scored, scored: &[Scored]) -> Value {
    let result = |one: &Scored| {
        json!({
            "dtype": one.dtype,
            "quantization": one.quantization,
            "perplexity": one.score.perplexity(),
            "ratio": ratio(one, first),
            "bits_per_byte": one.score.bits_per_byte(text.len()),
            "seconds": one.seconds,
            "tokens_per_second": rate(one),
        })
    };
    json!({
        "model": first.model,
        "weights": first.weights,
        "device": first.device,
        "text": args.text.display().to_string(),
        "bytes": text.len(),
        "tokens": first.score.tokens,
        "context": first.windows.context,
        "stride": first.windows.stride,
        "windows": first.score.windows,
        "results": scored.iter().map(result).collect::<Vec<_>>(),
    })
}

fn ratio(one: &Scored, first: &Scored) -> f64 {
    one.score.perplexity() / first.score.perplexity()
}

fn rate(one: &Scored) -> f64 {
    one.score.tokens as f64 / one.seconds
}

/// What holds for every variant.
fn common_facts(args: &Args, text: &str, one: &Scored) -> Vec<(&'static str, String)> {
    let Windows { context, stride } = one.windows;
    vec![
        ("model", format!("{}, weights {}", one.model, one.weights)),
        ("text", format!("{}, {} bytes", args.text.display(), text.len())),
        ("tokens", format!("{} in {} windows of {context}, stride {stride}", one.score.tokens, one.score.windows)),
        ("device", one.device.clone()),
    ]
}

fn print_facts(args: &Args, text: &str, one: &Scored) {
    let mut facts = common_facts(args, text, one);
    let quantization = if one.quantization == "none" { String::new() } else { format!(", {}", one.quantization) };
    facts.extend([
        ("type", format!("{}{quantization}", one.dtype)),
        ("perplexity", format!("{:.4}", one.score.perplexity())),
        ("bits per byte", format!("{:.4}", one.score.bits_per_byte(text.len()))),
        ("time", format!("{:.2} s, {} tokens/s", one.seconds, human::number(rate(one)))),
    ]);
    output::facts(&facts);
}

fn print_table(args: &Args, text: &str, first: &Scored, scored: &[Scored]) {
    output::facts(&common_facts(args, text, first));
    let headers = ["quantization", "dtype", "perplexity", "against the first", "bits per byte", "tokens/s"];
    let mut table = Table::new(headers).left(1);
    for one in scored {
        table.push([
            one.quantization.to_string(),
            one.dtype.to_string(),
            format!("{:.4}", one.score.perplexity()),
            format!("{:+.2} %", 100.0 * (ratio(one, first) - 1.0)),
            format!("{:.4}", one.score.bits_per_byte(text.len())),
            human::number(rate(one)),
        ]);
    }
    output::print(&table.render(output::width()));
}
