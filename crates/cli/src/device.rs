//! Where to run: the CPU or an NVIDIA GPU.

use std::str::FromStr;

use anyhow::Result;
use strobe_kernels_cuda::library::{self, Lib};
use strobe_kernels_cuda::{Arch, CudaError, DeviceInfo, devices, kernels_at_hand};

use crate::output;

/// What `--device` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The first GPU if it can be used, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number.
    Cuda(u32),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        let unknown = || format!("there is no device `{text}`; write cpu, cuda, cuda:N (N counts from 0) or auto");
        match text.split_once(':') {
            None => match text {
                "auto" => Ok(DeviceChoice::Auto),
                "cpu" => Ok(DeviceChoice::Cpu),
                "cuda" => Ok(DeviceChoice::Cuda(0)),
                _ => Err(unknown()),
            },
            // `parse` alone would take a sign.
            Some(("cuda", number)) if number.bytes().all(|b| b.is_ascii_digit()) => {
                number.parse().map(DeviceChoice::Cuda).map_err(|_| unknown())
            }
            Some(_) => Err(unknown()),
        }
    }
}

/// The `--device` option.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub(crate) struct DeviceArgs {
    /// Where to run: cpu, cuda, cuda:N, or auto: the first GPU if it can be used, else the CPU [default: auto]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
}

impl DeviceArgs {
    /// The device; a machine that never had a GPU is told so only if it was asked.
    pub(crate) fn resolve(&self, needs: Needs) -> Result<Device> {
        self.device.unwrap_or(DeviceChoice::Auto).resolve(self.device.is_some(), needs)
    }
}

/// Where a run takes place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// On the CPU.
    Cpu,
    /// On the GPU of this number.
    Cuda(u32),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl DeviceChoice {
    /// Find the device. A GPU that was asked for and can't be used is an error; with `auto` the reason is a note, left
    /// out where there is no driver and the user did not ask.
    pub(crate) fn resolve(self, asked: bool, needs: Needs) -> Result<Device> {
        match self {
            DeviceChoice::Cpu => Ok(Device::Cpu),
            DeviceChoice::Cuda(index) => {
                match needs {
                    Needs::Driver => listed(index)?,
                    Needs::Engine { .. } => usable(index)?,
                };
                Ok(Device::Cuda(index))
            }
            DeviceChoice::Auto => match first_gpu(needs) {
                Ok(()) => Ok(Device::Cuda(0)),
                // What was named on purpose must not end in a run on the CPU.
                Err(wrong @ CudaError::NamedPath { .. }) => Err(wrong.into()),
                Err(reason) => {
                    let no_driver = matches!(reason, CudaError::LibraryMissing { library: "libcuda", .. });
                    if asked || !no_driver {
                        output::note(&format!("note: using the CPU: {reason}"));
                    }
                    Ok(Device::Cpu)
                }
            },
        }
    }
}

/// What a run needs of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// The driver: another program runs there, with kernels of its own.
    Driver,
    /// strobe's kernels.
    Engine {
        /// And cuBLASLt.
        cublaslt: bool,
    },
}

impl Needs {
    /// An engine with default options.
    pub(crate) const ENGINE: Needs = Needs::Engine { cublaslt: true };
}

/// GPU `index`, if the driver has it.
pub(crate) fn listed(index: u32) -> Result<DeviceInfo, CudaError> {
    let all = devices()?;
    let listed = all.len();
    all.into_iter()
        .nth(index as usize)
        .ok_or_else(|| CudaError::NoDevice { problem: format!("there is no GPU {index}, the driver lists {listed}") })
}

/// GPU `index`, if the driver has it and kernels are compiled for its architecture.
pub(crate) fn usable(index: u32) -> Result<DeviceInfo, CudaError> {
    let info = listed(index)?;
    Arch::of(&info)?;
    Ok(info)
}

/// Whether `auto` would take the first GPU: it and the libraries that a run needs besides the driver are there.
pub(crate) fn first_gpu(needs: Needs) -> Result<(), CudaError> {
    let Needs::Engine { cublaslt } = needs else { return listed(0).map(drop) };
    kernels_at_hand(Arch::of(&usable(0)?)?)?;
    if cublaslt {
        library::open(Lib::CublasLt)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read() {
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        assert_eq!("cpu".parse(), Ok(DeviceChoice::Cpu));
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("cuda:7".parse(), Ok(DeviceChoice::Cuda(7)));
        for bad in ["", "tpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:99999999999", "cpu:0", "gpu:0"] {
            let problem = bad.parse::<DeviceChoice>().unwrap_err();
            assert!(problem.contains(&format!("`{bad}`")) && problem.contains("cuda:N"), "{problem}");
        }
    }

    #[test]
    fn the_cpu_is_always_there() {
        assert_eq!(DeviceChoice::Cpu.resolve(true, Needs::ENGINE).unwrap(), Device::Cpu);
        assert!(DeviceChoice::Auto.resolve(false, Needs::ENGINE).is_ok());
    }
}
