//! `strobe eval`: the checks of results that anyone can run.

mod against;
mod perplexity;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use strobe_engine::{engine_dir::LoadedModel, eval};

use crate::build_args::BuildArgs;
use crate::device::{self, DeviceArgs};
use crate::model_args::{CpuArgs, ModelArgs, Target};
use crate::{output, run_dir};

const EXAMPLES: &str = "EXAMPLES:
  strobe eval logits --model ./tiny-llama --ids 5,9,17 --decode 16 --output logits.json
  strobe eval logits --model micro --ids 1,2,3 --dtype bfloat16 --output logits.json
  strobe eval logits --model micro --ids 1,2,3 --quantization int8 --against logits.json
  strobe eval perplexity --engine-dir engine --text book.txt";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Logits of every prompt position and of N greedy decode steps, as JSON
    #[command(before_help = EXAMPLES)]
    Logits(LogitsArgs),
    /// Perplexity of a text, and quantization loss
    #[command(before_help = perplexity::EXAMPLES)]
    Perplexity(perplexity::Args),
}

#[derive(clap::Args)]
struct LogitsArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt as token ids
    #[arg(long, value_name = "ID,..", value_delimiter = ',', required = true)]
    ids: Vec<u32>,
    /// Greedy decode steps after the prompt; step i feeds `greedy[i]` and yields `decode_logits[i]`
    #[arg(long, value_name = "N", default_value_t = 0)]
    decode: usize,
    /// Where to write {"logits", "greedy", "decode_logits"}; `-` is standard output
    #[arg(long, value_name = "FILE", required_unless_present = "against")]
    output: Option<PathBuf>,
    /// Compare the logits of the prompt with those of this file, written by `eval logits` or another implementation
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    #[command(flatten)]
    build: BuildArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    cpu: CpuArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.what {
        What::Logits(args) => logits(args),
        What::Perplexity(args) => perplexity::run(&args),
    }
}

fn open_device(device: &DeviceArgs, build: &BuildArgs, cpu: &CpuArgs) -> Result<Target> {
    Ok(match build.device(device)? {
        device::Device::Cpu => Target::Cpu(cpu.open()?),
        device::Device::Cuda(index) => {
            cpu.refuse_on_gpu()?;
            Target::Cuda(strobe_engine::cuda::CudaDevice::new(index))
        }
    })
}

fn logits(args: LogitsArgs) -> Result<()> {
    let to_stdout = args.output.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let file = args.output.as_ref().filter(|_| !to_stdout);
    if let Some(path) = file {
        run_dir::check_writable(path)?;
    }
    let expected = args.against.as_deref().map(against::Expected::read).transpose()?;
    let mut target = open_device(&args.device, &args.build, &args.cpu)?;
    let model: LoadedModel = args.model.load(&mut target, &args.build, None, None)?;
    let tier = target.describe();
    let result = eval::logits(target, &model, &args.ids, args.decode)?;
    let difference = expected.map(|expected| expected.compare(&result.logits)).transpose()?;
    let text = || serde_json::to_string(&result).context("the logits can't be written as JSON");
    if to_stdout {
        output::line(&text()?);
        difference.iter().for_each(|line| output::note(line));
        return Ok(());
    }
    if let Some(path) = file {
        run_dir::write_whole(path, text()?.as_bytes())?;
    }
    output::line(&format!(
        "{}logits of {} positions and {} decode steps of {} ({}, weights {}, {tier})",
        file.map_or(String::new(), |path| format!("{}: ", path.display())),
        result.logits.len(),
        result.decode_logits.len(),
        model.config.model_name,
        model.config.build.describe_weights(),
        model.config.describe_origin(),
    ));
    if let Some(difference) = difference {
        output::line(&difference);
    }
    Ok(())
}
