//! Which CPU to use and which model to run.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use strobe_engine::cuda::CudaDevice;
use strobe_engine::device::Device;
use strobe_engine::engine_dir::{CONFIG_FILE, LoadedModel, WEIGHTS_FILE};
use strobe_engine::{EngineConfig, ModelRef, Quantization, weights};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_kernels_cuda::{GemmChoices, NvtxChoice};
use strobe_model::{Tokenizer, WeightSource};

use crate::build_args::{BuildArgs, Switch};
use crate::{machine, output, progress};

/// How many threads work.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct CpuArgs {
    /// Worker threads [default: the physical cores this process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

impl CpuArgs {
    /// Kernels and workers; `STROBE_CPU` forces an instruction set.
    pub(crate) fn open(&self) -> Result<Cpu> {
        let tier = Tier::from_env()?;
        let most = 4 * machine::cores().max(64);
        let threads = self.threads.unwrap_or_else(strobe_kernels_cpu::physical_cores);
        if threads == 0 || threads > most {
            bail!("--threads must be between 1 and {most}, found {threads}");
        }
        Ok(Cpu::new(tier, threads))
    }

    /// Refuse what means nothing to a GPU.
    pub(crate) fn refuse_on_gpu(&self) -> Result<()> {
        match self.threads {
            Some(_) => bail!("--threads is for the CPU; add --device cpu, or leave it out"),
            None => Ok(()),
        }
    }
}

/// Where to run, opened.
pub enum Target {
    /// On these workers.
    Cpu(Cpu),
    /// On a GPU.
    Cuda(CudaDevice),
}

impl Target {
    /// Instruction set or GPU, in a word.
    pub fn describe(&self) -> String {
        match self {
            Target::Cpu(cpu) => cpu.tier().name().to_string(),
            Target::Cuda(cuda) => format!("cuda:{}", cuda.index),
        }
    }
}

impl From<Target> for Device {
    fn from(target: Target) -> Device {
        match target {
            Target::Cpu(cpu) => cpu.into(),
            Target::Cuda(cuda) => cuda.into(),
        }
    }
}

/// How a GPU is used.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "GPU")]
pub(crate) struct CudaArgs {
    /// Replay decode steps as CUDA graphs, one per batch size [default: enable, unless launches block]
    #[arg(long, value_enum)]
    pub cuda_graph: Option<Switch>,
    /// Plan and launch a step before the tokens of the one before are known to the host [default: enable]
    #[arg(long, value_enum)]
    pub overlap_scheduler: Option<Switch>,
    /// Ranges for Nsight Systems: when it is attached, always or never [default: auto]
    #[arg(long, value_enum)]
    pub nvtx: Option<NvtxArg>,
    /// Wait after every op, so that an error names the op that caused it; CUDA graphs are off then; also
    /// CUDA_LAUNCH_BLOCKING=1
    #[arg(long)]
    pub cuda_launch_blocking: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum NvtxArg {
    Auto,
    Enable,
    Disable,
}

impl CudaArgs {
    /// The GPU as asked for; `record` says whether any window will be recorded.
    pub(crate) fn device(&self, index: u32, record: bool) -> CudaDevice {
        let plain = CudaDevice::new(index);
        CudaDevice {
            graphs: self.cuda_graph.is_none_or(Switch::on),
            blocking: self.cuda_launch_blocking || plain.blocking,
            record,
            nvtx: match self.nvtx.unwrap_or(NvtxArg::Auto) {
                NvtxArg::Auto => NvtxChoice::Auto,
                NvtxArg::Enable => NvtxChoice::Enable,
                NvtxArg::Disable => NvtxChoice::Disable,
            },
            ..plain
        }
    }

    /// Refuse options that exclude each other.
    pub(crate) fn refuse_conflicts(&self) -> Result<()> {
        if self.cuda_graph == Some(Switch::Enable) && self.cuda_launch_blocking {
            bail!(
                "--cuda-graph enable and --cuda-launch-blocking exclude each other: no op of a graph can be waited for; leave one of them out"
            );
        }
        Ok(())
    }

    /// Refuse what only a GPU can do.
    pub(crate) fn refuse_on_cpu(&self) -> Result<()> {
        let set = [
            ("--cuda-graph", self.cuda_graph == Some(Switch::Enable)),
            ("--overlap-scheduler", self.overlap_scheduler == Some(Switch::Enable)),
            ("--nvtx", self.nvtx.is_some_and(|nvtx| nvtx != NvtxArg::Disable)),
            ("--cuda-launch-blocking", self.cuda_launch_blocking),
        ];
        if let Some((name, _)) = set.iter().find(|(_, set)| *set) {
            bail!("{name} needs a GPU; add --device cuda, or leave it out");
        }
        Ok(())
    }
}

/// An engine directory, or a model built in memory.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ModelArgs {
    /// Engine directory made by `strobe build`
    #[arg(long, value_name = "DIR")]
    pub engine_dir: Option<PathBuf>,
    /// Preset, Hugging Face directory or GGUF file, built in memory
    #[arg(long, value_name = "PRESET|DIR|FILE")]
    pub model: Option<String>,
}

impl ModelArgs {
    /// Map or build the model. What a GPU runs is made on the GPU.
    pub(crate) fn load(
        &self,
        target: &mut Target,
        build: &BuildArgs,
        batch: Option<usize>,
        tokens: Option<usize>,
    ) -> Result<LoadedModel> {
        match (&self.engine_dir, &self.model) {
            (Some(dir), None) => {
                build.refuse_with_engine_dir()?;
                refuse_no_engine(dir)?;
                let loaded = LoadedModel::open(dir)?;
                if let Target::Cuda(device) = target {
                    device.choices = read_choices(dir);
                }
                Ok(loaded)
            }
            (None, Some(name)) => {
                let mut model = ModelRef::open(name, build.seed())?;
                build.refuse_seed_of_checkpoint(&model)?;
                build.skew_routers(&mut model)?;
                let on_gpu = matches!(target, Target::Cuda(_));
                let config = model.engine_config(build.config(&model, batch, tokens, on_gpu))?;
                warn_of_changes(&model, &config);
                match target {
                    Target::Cpu(cpu) => in_memory(cpu, model, config),
                    Target::Cuda(_) => Ok(LoadedModel::deferred(model, config)),
                }
            }
            (Some(_), Some(_)) => bail!("give --engine-dir or --model, not both"),
            (None, None) => bail!("give --engine-dir DIR (made by `strobe build`) or --model PRESET|DIR|FILE"),
        }
    }
}

/// Refuses what is no engine directory, and says what to do with what it is instead.
fn refuse_no_engine(dir: &Path) -> Result<()> {
    let has = |name: &str| dir.join(name).exists();
    let name = dir.display();
    if has(WEIGHTS_FILE) {
        return Ok(());
    }
    if !dir.is_dir() {
        bail!(
            "--engine-dir `{name}`: no such directory; make it with `strobe build --model MODEL --output-dir {name}`"
        );
    }
    if has(CONFIG_FILE) {
        bail!(
            "--engine-dir `{name}` is a model directory, no engine: run it with --model {name}, or build an engine with `strobe build --model {name} --output-dir ENGINE`"
        );
    }
    bail!("--engine-dir `{name}` is no engine directory (it has no {WEIGHTS_FILE}); pass one that `strobe build` wrote")
}

/// Says what of a model's files an engine does not keep.
pub(crate) fn warn_of_changes(model: &ModelRef, config: &EngineConfig) {
    let build = &config.build;
    if let WeightSource::Gguf(file) = &model.source
        && let Some((held, bits)) = file.quantization()
        && build.quantization == Quantization::None
    {
        let keeps = if bits < 6.0 { "int4" } else { "int8" };
        output::warn(&format!(
            "{}: {held} matrices ({bits:.1} bits per weight) become {} in the engine; --quantization {keeps} keeps them small",
            model.name, build.dtype
        ));
    }
    let ids = model.tokenizer.as_ref().map_or(0, Tokenizer::vocab_size);
    if ids > config.model.vocab_size {
        output::warn(&format!(
            "{}: the tokenizer has {ids} ids, the model {}: strobe refuses text with ids from {} on",
            model.name, config.model.vocab_size, config.model.vocab_size
        ));
    }
}

/// What a model is, without its weights.
pub(crate) struct DescribedModel {
    pub config: EngineConfig,
    pub tokenizer: Option<Tokenizer>,
    /// The engine directory it was read from.
    pub dir: Option<PathBuf>,
}

impl ModelArgs {
    /// What the model is, for runtimes that load the weights by themselves.
    pub(crate) fn describe(
        &self,
        build: &BuildArgs,
        batch: Option<usize>,
        tokens: usize,
        on_gpu: bool,
    ) -> Result<DescribedModel> {
        let (None, Some(name)) = (&self.engine_dir, &self.model) else {
            // Mapping an engine's weights costs nothing; a call that names neither or both is refused there.
            let loaded = self.load(&mut Target::Cpu(Cpu::new(Tier::Scalar, 1)), build, None, None)?;
            return Ok(DescribedModel { config: loaded.config, tokenizer: loaded.tokenizer, dir: loaded.dir });
        };
        let mut model = ModelRef::open(name, build.seed())?;
        build.refuse_seed_of_checkpoint(&model)?;
        build.skew_routers(&mut model)?;
        let tokens = tokens.max(batch.unwrap_or(0));
        let config = model.engine_config(build.config(&model, batch, Some(tokens), on_gpu))?;
        Ok(DescribedModel { config, tokenizer: model.tokenizer, dir: None })
    }
}

/// GEMM choices that a build has measured; a file that can't be read costs a new measurement, and a word.
fn read_choices(dir: &std::path::Path) -> Option<GemmChoices> {
    let path = dir.join(strobe_kernels_cuda::CHOICES_FILE);
    if !path.exists() {
        return None;
    }
    match GemmChoices::read(&path) {
        Ok(choices) => Some(choices),
        Err(problem) => {
            output::warn(&format!("{}: {problem}; GEMMs are measured again", path.display()));
            None
        }
    }
}

/// Build in memory with a progress bar.
pub(crate) fn in_memory(cpu: &mut Cpu, model: ModelRef, config: EngineConfig) -> Result<LoadedModel> {
    let total = weights::engine_bytes(&config.model, &config.build);
    let bar = progress::bytes("building in memory", total);
    let loaded =
        LoadedModel::in_memory(cpu, model, config, &mut crate::interrupt::watch(|done| bar.set_position(done)));
    bar.finish_and_clear();
    Ok(loaded?)
}
