//! `strobe prepare-dataset`: requests to benchmark with.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use serde_json::json;
use strobe_engine::engine_dir::{CONFIG_FILE, WEIGHTS_FILE};
use strobe_model::{Gguf, GgufModel, ModelConfig, Tokenizer, preset, unknown_model};
use strobe_workload::{
    Lengths, NormDist, Prompt, RealOutput, Sample, SyntheticSpec, UnifDist, read_prompt_lines, read_real_dataset,
    synthetic, write_dataset,
};

use crate::{output, run_dir};

const EXAMPLES: &str = "EXAMPLES:
  strobe prepare-dataset --model tinyllama-1.1b --output d.jsonl \\
      token-norm-dist --num-requests 64 --input-mean 128 --input-stdev 0 --output-mean 128 --output-stdev 0
  strobe prepare-dataset --tokenizer ./model --stdout \\
      token-unif-dist --num-requests 10 --input-min 16 --input-max 64 --output-min 8 --output-max 32
  strobe prepare-dataset --model micro --output d.jsonl real-dataset --file chats.jsonl --prompt-key question --output-key answer
  strobe prepare-dataset --model micro --output d.jsonl real-dataset --file prompts.txt --output-len-dist 128,0";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// Preset, Hugging Face directory, GGUF file or engine directory whose vocabulary is used
    #[arg(long, value_name = "PRESET|DIR|FILE", global = true)]
    model: Option<String>,
    /// tokenizer.json, a directory that holds one, or a preset
    #[arg(long, value_name = "FILE|DIR", global = true, conflicts_with = "model")]
    tokenizer: Option<PathBuf>,
    /// File to write
    #[arg(long, value_name = "FILE", global = true)]
    output: Option<PathBuf>,
    /// Write to standard output
    #[arg(long, global = true, conflicts_with = "output")]
    stdout: bool,
    /// Seed of lengths and token ids
    #[arg(long, value_name = "S", default_value_t = 420, global = true)]
    random_seed: u64,
    /// Print a summary as JSON (with --output)
    #[arg(long, conflicts_with = "stdout", global = true)]
    json: bool,
    #[command(subcommand)]
    kind: Kind,
}

#[derive(Subcommand)]
enum Kind {
    /// Lengths from normal distributions, input and output drawn independently
    TokenNormDist {
        #[arg(long, value_name = "N")]
        num_requests: usize,
        #[arg(long, value_name = "TOKENS")]
        input_mean: f64,
        #[arg(long, value_name = "TOKENS", default_value_t = 0.0)]
        input_stdev: f64,
        #[arg(long, value_name = "TOKENS")]
        output_mean: f64,
        #[arg(long, value_name = "TOKENS", default_value_t = 0.0)]
        output_stdev: f64,
    },
    /// Lengths from uniform distributions, both ends included
    TokenUnifDist {
        #[arg(long, value_name = "N")]
        num_requests: usize,
        #[arg(long, value_name = "TOKENS")]
        input_min: u32,
        #[arg(long, value_name = "TOKENS")]
        input_max: u32,
        #[arg(long, value_name = "TOKENS")]
        output_min: u32,
        #[arg(long, value_name = "TOKENS")]
        output_max: u32,
    },
    /// Prompts from a local file, tokenized here
    RealDataset {
        /// JSONL with one object per line, or text with one prompt per line; - is standard input
        #[arg(long, value_name = "FILE")]
        file: PathBuf,
        /// Field that holds the prompt; without it every line is a prompt
        #[arg(long, value_name = "KEY")]
        prompt_key: Option<String>,
        /// Field that holds a reference answer (its tokens are counted) or a number of tokens
        #[arg(long, value_name = "KEY", requires = "prompt_key")]
        output_key: Option<String>,
        /// Draw output lengths from a normal distribution instead
        #[arg(long, value_name = "MEAN,STDEV", conflicts_with = "output_key")]
        output_len_dist: Option<String>,
        /// Use at most this many lines; 0 is all
        #[arg(long, value_name = "N")]
        num_requests: Option<usize>,
    },
}

/// Ids to draw from and, for real text, how to make them.
struct Vocabulary {
    size: u32,
    avoid: Vec<u32>,
    tokenizer: Option<Tokenizer>,
    name: String,
}

pub(crate) fn run(args: Args) -> Result<()> {
    // These options may stand before or after the kind of dataset, so clap can't require them.
    if args.model.is_none() && args.tokenizer.is_none() {
        bail!("give --model PRESET|DIR|FILE or --tokenizer FILE|DIR: token ids are drawn from its vocabulary");
    }
    if args.output.is_none() && !args.stdout {
        bail!("give --output FILE or --stdout");
    }
    let vocabulary = vocabulary(&args)?;
    let samples = match &args.kind {
        Kind::TokenNormDist { num_requests, input_mean, input_stdev, output_mean, output_stdev } => {
            let normal = |mean: f64, stdev: f64| Lengths::Normal(NormDist { mean, stdev });
            let (input, output) = (normal(*input_mean, *input_stdev), normal(*output_mean, *output_stdev));
            make(&vocabulary, *num_requests, input, output, args.random_seed)?
        }
        Kind::TokenUnifDist { num_requests, input_min, input_max, output_min, output_max } => {
            let uniform = |min: u32, max: u32| Lengths::Uniform(UnifDist { min, max });
            let (input, output) = (uniform(*input_min, *input_max), uniform(*output_min, *output_max));
            make(&vocabulary, *num_requests, input, output, args.random_seed)?
        }
        Kind::RealDataset { file, prompt_key, output_key, output_len_dist, num_requests } => {
            let dist = output_len_dist.as_deref().map(parse_dist).transpose()?;
            real(
                &vocabulary,
                file,
                prompt_key.as_deref(),
                output_key.as_deref(),
                dist,
                *num_requests,
                args.random_seed,
            )?
        }
    };
    let mut bytes = Vec::new();
    write_dataset(&mut bytes, &samples).context("cannot write the dataset")?;
    let Some(path) = &args.output else {
        output::print(&String::from_utf8_lossy(&bytes));
        return Ok(());
    };
    run_dir::write_whole(path, &bytes)?;
    let inputs: usize = samples.iter().map(input_len).sum();
    let outputs: u64 = samples.iter().map(|s| u64::from(s.output_tokens)).sum();
    let n = samples.len() as f64;
    if args.json {
        let summary = json!({
            "path": path.display().to_string(), "num_requests": samples.len(), "avg_input_tokens": inputs as f64 / n,
            "avg_output_tokens": outputs as f64 / n, "vocabulary": vocabulary.name, "vocab_size": vocabulary.size,
            "random_seed": args.random_seed,
        });
        output::line(&format!("{summary:#}"));
    } else {
        output::line(&format!(
            "{}: {} requests, {:.1} input and {:.1} output tokens on average ({} of {} ids, seed {})",
            path.display(),
            samples.len(),
            inputs as f64 / n,
            outputs as f64 / n,
            vocabulary.name,
            vocabulary.size,
            args.random_seed,
        ));
    }
    Ok(())
}

fn input_len(sample: &Sample) -> usize {
    match &sample.prompt {
        Prompt::Ids(ids) => ids.len(),
        Prompt::Text(_) => 0,
    }
}

fn make(
    vocabulary: &Vocabulary,
    num_requests: usize,
    input: Lengths,
    output: Lengths,
    seed: u64,
) -> Result<Vec<Sample>> {
    let avoid_ids = vocabulary.avoid.clone();
    Ok(synthetic(&SyntheticSpec { num_requests, input, output, vocab_size: vocabulary.size, avoid_ids, seed })?)
}

fn real(
    vocabulary: &Vocabulary,
    file: &Path,
    prompt_key: Option<&str>,
    output_key: Option<&str>,
    dist: Option<NormDist>,
    limit: Option<usize>,
    seed: u64,
) -> Result<Vec<Sample>> {
    let Some(tokenizer) = &vocabulary.tokenizer else {
        bail!("{} has no tokenizer.json, which real text needs; pass --tokenizer FILE", vocabulary.name);
    };
    if output_key.is_none() && dist.is_none() {
        bail!("say how long the answers are: --output-key KEY or --output-len-dist MEAN,STDEV");
    }
    let mut lines = match prompt_key {
        Some(key) => read_real_dataset(file, key, output_key)?,
        None => read_prompt_lines(file)?,
    };
    lines.truncate(limit.filter(|&n| n > 0).unwrap_or(usize::MAX)); // 0 is all, as in `bench`
    let drawn = match dist {
        Some(dist) => {
            let (input, output) = (Lengths::Uniform(UnifDist { min: 1, max: 1 }), Lengths::Normal(dist));
            make(vocabulary, lines.len(), input, output, seed)?.iter().map(|s| s.output_tokens).collect()
        }
        None => Vec::new(),
    };
    let sample = |(index, line): (usize, &strobe_workload::RealSample)| -> Result<Sample> {
        let place = || format!("{} line {}", file.display(), line.line);
        let ids = tokenizer.encode(&line.prompt)?;
        if ids.is_empty() {
            let field = prompt_key.map_or(String::new(), |key| format!(" field `{key}`:"));
            bail!("{}:{field} the prompt has no tokens; remove the line", place());
        }
        let output_tokens = match &line.output {
            Some(RealOutput::Tokens(tokens)) => *tokens,
            Some(RealOutput::Text(text)) => (tokenizer.encode(text)?.len() as u32).max(1),
            None => drawn.get(index).copied().unwrap_or(1),
        };
        Ok(Sample { task_id: index as i64, prompt: Prompt::Ids(ids), output_tokens })
    };
    lines.iter().enumerate().map(sample).collect()
}

fn parse_dist(text: &str) -> Result<NormDist> {
    let parsed = text.split_once(',').and_then(|(m, s)| Some((m.trim().parse().ok()?, s.trim().parse().ok()?)));
    let Some((mean, stdev)) = parsed else {
        bail!("--output-len-dist: expected MEAN,STDEV such as 128,16, found `{text}`");
    };
    if !(mean >= 1.0 && f64::is_finite(mean) && stdev >= 0.0 && f64::is_finite(stdev)) {
        bail!("--output-len-dist: expected a mean of at least 1 and a stdev of at least 0, found `{text}`");
    }
    Ok(NormDist { mean, stdev })
}

fn vocabulary(args: &Args) -> Result<Vocabulary> {
    if let Some(path) = &args.tokenizer {
        let tokenizer = if path.is_dir() {
            Tokenizer::from_dir(path)?.with_context(|| format!("{} holds no tokenizer.json", path.display()))?
        } else if let Some(preset) = path.to_str().and_then(preset) {
            preset.tokenizer()
        } else if !path.exists() {
            bail!("--tokenizer: {}", unknown_model(&path.to_string_lossy()))
        } else {
            Tokenizer::from_file(path)?
        };
        let avoid = tokenizer.eos_id().into_iter().chain(tokenizer.bos_id()).collect();
        let size = tokenizer.vocab_size() as u32;
        return Ok(Vocabulary { size, avoid, tokenizer: Some(tokenizer), name: path.display().to_string() });
    }
    let name = args.model.clone().unwrap_or_default();
    let (config, tokenizer) = if let Some(preset) = preset(&name) {
        (preset.config(), Some(preset.tokenizer()))
    } else if Gguf::is_gguf(Path::new(&name)) {
        let model = GgufModel::open(Path::new(&name))?;
        (model.config().clone(), model.tokenizer()?.ok())
    } else {
        let dir = Path::new(&name);
        if !dir.is_dir() {
            bail!("--model: {}", unknown_model(&name));
        }
        let config = if dir.join(WEIGHTS_FILE).exists() {
            let path = dir.join(CONFIG_FILE);
            let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            strobe_engine::EngineConfig::from_json(&text, &path)?.model
        } else {
            ModelConfig::from_dir(dir)?
        };
        (config, Tokenizer::from_dir(dir)?)
    };
    let avoid = config.eos_token_ids.iter().copied().chain(config.bos_token_id).collect();
    Ok(Vocabulary { size: config.vocab_size as u32, avoid, tokenizer, name })
}
