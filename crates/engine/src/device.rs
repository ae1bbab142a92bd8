//! Where an engine runs.

use strobe_kernels_cpu::{Cpu, Tier};
use strobe_kernels_cuda::CudaError;

use crate::cpu::{CpuBackend, MemoryByPool};
use crate::cuda::{CudaBackend, CudaDevice, CudaFacts};

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

    /// One phrase for reports.
    pub fn describe(&self) -> String {
        match self {
            DeviceFacts::Cpu { tier, threads } => format!("CPU, {} on {threads} threads", tier.name()),
            DeviceFacts::Cuda(facts) => format!("{}, {}", facts.device.name, facts.arch),
        }
    }
}

/// A model on its device.
pub(crate) enum Runner {
    Cpu(Box<CpuBackend>),
    Cuda(Box<CudaBackend>),
}

impl Runner {
    pub fn memory(&self) -> MemoryByPool {
        match self {
            Runner::Cpu(backend) => backend.memory(),
            Runner::Cuda(backend) => backend.memory(),
        }
    }

    /// Tokens sent to each expert in the last step, `[layers][experts]`; empty where it is not known.
    pub fn expert_counts(&self) -> &[u32] {
        match self {
            Runner::Cpu(backend) => backend.expert_counts(),
            // It is known when the step lands.
            Runner::Cuda(_) => &[],
        }
    }

    /// Use balanced logits, where they were made ready, or the router's own.
    pub fn use_perfect_router(&mut self, on: bool) -> Result<(), CudaError> {
        match self {
            Runner::Cpu(backend) => {
                backend.use_perfect_router(on);
                Ok(())
            }
            Runner::Cuda(backend) => backend.use_perfect_router(on),
        }
    }

    /// Experts that some token of the last step was sent to, layer by layer.
    pub fn experts_used(&self) -> &[u32] {
        match self {
            Runner::Cpu(backend) => crate::step::Backend::experts_used(&**backend),
            Runner::Cuda(_) => &[],
        }
    }
}
