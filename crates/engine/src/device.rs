//! Where an engine runs: the one place that knows which devices there are.

use std::sync::Arc;

use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::PerfectRouter;
use strobe_model::program::{Node, Operands, program};

use crate::backend::Backend;
use crate::cpu::{CpuBackend, CpuBackendOptions};
use crate::cpu_sizes::cache_blocks;
use crate::cuda::{CudaBackend, CudaBackendOptions, CudaDevice, CudaFacts};
use crate::engine::{CacheSize, GPU_PROBE_BLOCK};
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::step::StepLimits;

/// A device that an engine is to run on.
pub enum Device {
    /// These kernels and workers.
    Cpu(Cpu),
    /// A GPU.
    Cuda(CudaDevice),
}

impl Device {
    /// The instruction set, of a CPU.
    pub(crate) fn cpu_tier(&self) -> Option<Tier> {
        match self {
            Device::Cpu(cpu) => Some(cpu.tier()),
            Device::Cuda(_) => None,
        }
    }

    /// What of `asked` can be told before the model is there: the cache of a CPU, after checking that it fits the memory of
    /// this machine. On a GPU it is cut from what is left once everything else has its place.
    pub(crate) fn cache_size(
        &self,
        model: &LoadedModel,
        limits: StepLimits,
        asked: CacheSize,
    ) -> Result<CacheSize, EngineError> {
        match self {
            Device::Cpu(cpu) => {
                model.config.build.check_cpu()?;
                Ok(CacheSize::Blocks(cache_blocks(model, asked, limits, cpu.tier())?))
            }
            Device::Cuda(_) => Ok(asked),
        }
    }

    /// Make a model ready to run on this device. Everything its steps will need is reserved here.
    pub(crate) fn open(self, model: &LoadedModel, setup: Setup<'_>) -> Result<Ready, EngineError> {
        let (build, config) = (&model.config.build, &model.config.model);
        let Setup { limits, cache, perfect_router, progress } = setup;
        let program_options = build.program_options(self.cpu_tier());
        let nodes: Arc<[Node]> = program(config, program_options).into();
        match self {
            Device::Cpu(cpu) => {
                build.check_cpu()?;
                let blocks = match cache {
                    CacheSize::Blocks(blocks) => blocks,
                    CacheSize::FreeFraction(_) => cache_blocks(model, cache, limits, cpu.tier())?,
                };
                let options = CpuBackendOptions {
                    limits,
                    tokens_per_block: build.cache_block_tokens(),
                    blocks,
                    dtype: build.dtype,
                    kv: build.cpu_kv_type(cpu.tier())?,
                    program: program_options,
                };
                let mut backend = CpuBackend::new(cpu, config.clone(), nodes.clone(), model.weights.clone(), &options)?;
                if let Some(router) = perfect_router {
                    backend.set_perfect_router(router);
                }
                let kernels = nodes.iter().map(|node| backend.kernel_name(node)).collect();
                let (backend, operands) = (Box::new(backend), build.cpu_operands());
                Ok(Ready { backend, nodes, kernels, operands, blocks })
            }
            Device::Cuda(device) => {
                let options = CudaBackendOptions {
                    device: &device,
                    limits,
                    cache,
                    perfect_router: perfect_router.as_ref(),
                    progress,
                };
                let backend = CudaBackend::new(model, nodes.clone(), options)?;
                let kernels = nodes.iter().map(|node| node.name.to_string()).collect();
                let (blocks, operands) = (backend.blocks(), build.gpu_operands(config));
                Ok(Ready { backend: Box::new(backend), nodes, kernels, operands, blocks })
            }
        }
    }
}

/// What a model on a device is to be ready for.
pub(crate) struct Setup<'a> {
    /// Limits of a step.
    pub limits: StepLimits,
    /// Size of the cache.
    pub cache: CacheSize,
    /// Balanced logits for every step, to be used instead of the routers' from the start.
    pub perfect_router: Option<PerfectRouter>,
    /// Told the bytes of weights that a GPU has got so far; answers whether to go on.
    pub progress: &'a mut dyn FnMut(u64) -> bool,
}

/// A model that is ready to run.
pub(crate) struct Ready {
    pub backend: Box<dyn Backend>,
    /// The model's ops, and the implementation behind each.
    pub nodes: Arc<[Node]>,
    pub kernels: Arc<[String]>,
    /// How what they read and write is stored.
    pub operands: Operands,
    /// Blocks of the cache.
    pub blocks: usize,
}

impl From<Cpu> for Device {
    fn from(cpu: Cpu) -> Device {
        Device::Cpu(cpu)
    }
}

impl From<CudaDevice> for Device {
    fn from(device: CudaDevice) -> Device {
        Device::Cuda(device)
    }
}

/// Facts about the device of a started engine.
#[derive(Clone, Debug)]
pub enum DeviceFacts {
    /// A CPU.
    Cpu {
        /// Instruction set in use.
        tier: Tier,
        /// Worker threads.
        threads: usize,
    },
    /// A GPU.
    Cuda(Box<CudaFacts>),
}

impl DeviceFacts {
    /// The GPU, where it is one.
    pub fn cuda(&self) -> Option<&CudaFacts> {
        match self {
            DeviceFacts::Cpu { .. } => None,
            DeviceFacts::Cuda(facts) => Some(facts),
        }
    }

    /// Iterations that recording is on or off for in turn while its cost is measured.
    pub(crate) fn probe_block(&self) -> u64 {
        match self {
            DeviceFacts::Cpu { .. } => 1,
            DeviceFacts::Cuda(_) => GPU_PROBE_BLOCK,
        }
    }

    /// One phrase for reports.
    pub fn describe(&self) -> String {
        match self {
            DeviceFacts::Cpu { tier, threads } => format!("CPU, {} on {threads} threads", tier.name()),
            DeviceFacts::Cuda(facts) => format!("{}, {}", facts.device.name, facts.arch),
        }
    }
}
