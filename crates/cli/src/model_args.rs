//! Which CPU to use and which model to run.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use strobe_engine::engine_dir::{LoadedModel, WEIGHTS_FILE};
use strobe_engine::{EngineConfig, ModelRef, weights};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::Tokenizer;

use crate::build_args::BuildArgs;
use crate::{machine, progress};

/// How many threads work.
#[derive(Args, Clone, Debug, Default)]
pub struct CpuArgs {
    /// Worker threads [default: the cores this process may use]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<usize>,
}

impl CpuArgs {
    /// Kernels and workers; `STROBE_CPU` forces an instruction set.
    pub fn open(&self) -> Result<Cpu> {
        let tier = Tier::from_env()?;
        let most = 4 * machine::cores().max(64);
        let threads = self.threads.unwrap_or_else(machine::cores);
        if threads == 0 || threads > most {
            bail!("--threads must be between 1 and {most}, found {threads}");
        }
        Ok(Cpu::new(tier, threads))
    }
}

/// An engine directory, or a model built in memory.
#[derive(Args, Clone, Debug, Default)]
pub struct ModelArgs {
    /// Engine directory made by `strobe build`
    #[arg(long, value_name = "DIR")]
    pub engine_dir: Option<PathBuf>,
    /// Preset or Hugging Face directory, built in memory
    #[arg(long, value_name = "PRESET|DIR")]
    pub model: Option<String>,
}

impl ModelArgs {
    /// Map or build the model.
    pub fn load(
        &self,
        cpu: &mut Cpu,
        build: &BuildArgs,
        batch: Option<usize>,
        tokens: Option<usize>,
    ) -> Result<LoadedModel> {
        match (&self.engine_dir, &self.model) {
            (Some(dir), None) => {
                build.refuse_with_engine_dir()?;
                if !dir.join(WEIGHTS_FILE).exists() {
                    let dir = dir.display();
                    bail!(
                        "--engine-dir `{dir}` is not an engine directory (it has no {WEIGHTS_FILE}); make one with `strobe build --output-dir {dir}`, or name a model with --model"
                    );
                }
                Ok(LoadedModel::open(dir)?)
            }
            (None, Some(name)) => {
                let model = ModelRef::open(name, build.seed())?;
                build.refuse_seed_of_checkpoint(&model)?;
                let config = model.engine_config(build.config(&model, batch, tokens))?;
                in_memory(cpu, model, config)
            }
            (Some(_), Some(_)) => bail!("give --engine-dir or --model, not both"),
            (None, None) => bail!("give --engine-dir DIR (made by `strobe build`) or --model PRESET|DIR"),
        }
    }
}

/// What a model is, without its weights.
pub struct DescribedModel {
    pub config: EngineConfig,
    pub tokenizer: Option<Tokenizer>,
    /// The engine directory it was read from.
    pub dir: Option<PathBuf>,
}

impl ModelArgs {
    /// What the model is, for runtimes that load the weights by themselves.
    pub fn describe(&self, build: &BuildArgs, batch: usize, tokens: usize) -> Result<DescribedModel> {
        let (None, Some(name)) = (&self.engine_dir, &self.model) else {
            // Mapping an engine's weights costs nothing; a call that names neither or both is refused there.
            let loaded = self.load(&mut Cpu::new(Tier::Scalar, 1), build, Some(batch), Some(tokens))?;
            return Ok(DescribedModel { config: loaded.config, tokenizer: loaded.tokenizer, dir: loaded.dir });
        };
        let model = ModelRef::open(name, build.seed())?;
        build.refuse_seed_of_checkpoint(&model)?;
        let config = model.engine_config(build.config(&model, Some(batch), Some(tokens)))?;
        Ok(DescribedModel { config, tokenizer: model.tokenizer, dir: None })
    }
}

/// Build in memory with a progress bar.
pub fn in_memory(cpu: &mut Cpu, model: ModelRef, config: EngineConfig) -> Result<LoadedModel> {
    let total = weights::engine_bytes(&config.model, config.build.dtype, config.build.gemm_plugin);
    let bar = progress::bytes("building in memory", total);
    let loaded =
        LoadedModel::in_memory(cpu, model, config, &mut crate::interrupt::watch(|done| bar.set_position(done)));
    bar.finish_and_clear();
    Ok(loaded?)
}
