//! What can go wrong on the way to a GPU and on it.

use cudarc::driver::sys;

use crate::driver::{self, Status};

/// A failure of the GPU, of a CUDA library, or of a kernel.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// A library is not there.
    #[error("{library} was not found (looked for {names} on the loader's path and in {places}); {remedy}")]
    LibraryMissing {
        /// What it is called.
        library: &'static str,
        /// File names that were tried.
        names: String,
        /// Directories that were searched.
        places: String,
        /// What to do.
        remedy: String,
    },
    /// Files of a library are there, and none can be loaded.
    #[error("{library} can't be loaded: {problems}; {remedy}")]
    LibraryBroken {
        /// What it is called.
        library: &'static str,
        /// What the loader said of each file.
        problems: String,
        /// What to do.
        remedy: String,
    },
    /// A variable names a toolkit that is not there.
    #[error("{variable}={} is no directory; correct it, or unset it to search in the usual places", path.display())]
    NamedPath {
        /// The variable.
        variable: &'static str,
        /// What it names.
        path: std::path::PathBuf,
    },
    /// A library is there and too old.
    #[error("{library} {found} is too old, {needed} or newer is needed; {remedy}")]
    TooOld {
        /// What it is called.
        library: &'static str,
        /// Its version.
        found: String,
        /// The oldest that works.
        needed: String,
        /// What to do.
        remedy: &'static str,
    },
    /// There is a driver and no GPU.
    #[error("no CUDA device: {problem}; use --device cpu, or check `nvidia-smi`")]
    NoDevice {
        /// What the driver said.
        problem: String,
    },
    /// The GPU's architecture is not supported.
    #[error("{name} has compute capability {major}.{minor}; supported are {supported}; use --device cpu")]
    Architecture {
        /// The GPU.
        name: String,
        /// Its compute capability.
        major: i32,
        /// Its compute capability.
        minor: i32,
        /// The list of those that work.
        supported: String,
    },
    /// The driver refused a call.
    #[error("{action} failed: {code} ({meaning})")]
    Driver {
        /// What was tried.
        action: String,
        /// The driver's name of the error.
        code: String,
        /// The driver's words.
        meaning: String,
    },
    /// Not enough memory on the device.
    #[error("not enough GPU memory for {what}: {} needed, {} of {} free; {remedy}", gib(*needed), gib(*free), gib(*total))]
    OutOfMemory {
        /// For what.
        what: String,
        /// Bytes asked for.
        needed: u64,
        /// Bytes free.
        free: u64,
        /// Bytes in all.
        total: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// A kernel does not compile.
    #[error("kernel file {file} does not compile for {arch} (NVRTC {version}, options {options}):\n{log}")]
    Compile {
        /// The source.
        file: String,
        /// For which architecture.
        arch: String,
        /// NVRTC's version.
        version: String,
        /// Options given.
        options: String,
        /// NVRTC's words.
        log: String,
    },
    /// A kernel is not in its module.
    #[error("kernel {name} is not in {file}")]
    NoKernel {
        /// The kernel.
        name: String,
        /// The source.
        file: &'static str,
    },
    /// An op failed on the device: found when its step was waited for.
    #[error("{op} failed on the GPU: {code} ({meaning}); the device can't be used any more by this process")]
    Fault {
        /// `op NAME`, or the step that it was one of.
        op: String,
        /// The driver's name of the error.
        code: String,
        /// The driver's words.
        meaning: String,
    },
    /// A library other than the driver refused a call.
    #[error("{library}: {action} failed: {code}")]
    Library {
        /// Which one.
        library: &'static str,
        /// What was tried.
        action: String,
        /// Its status.
        code: String,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// Something this backend can't do, in plain words.
    #[error("{0}")]
    Unsupported(String),
}

impl CudaError {
    /// Whether it is a kernel's doing: it sticks to the context from then on.
    pub fn is_fault(&self) -> bool {
        const FAULTS: [&str; 11] = [
            "ILLEGAL_ADDRESS",
            "MISALIGNED_ADDRESS",
            "INVALID_ADDRESS_SPACE",
            "INVALID_PC",
            "ILLEGAL_INSTRUCTION",
            "HARDWARE_STACK_ERROR",
            "LAUNCH_FAILED",
            "LAUNCH_TIMEOUT",
            "ASSERT",
            "ECC_UNCORRECTABLE",
            "CONTAINED",
        ];
        match self {
            CudaError::Driver { code, .. } => {
                FAULTS.iter().any(|fault| code.strip_prefix("CUDA_ERROR_") == Some(fault))
            }
            CudaError::Fault { .. } => true,
            _ => false,
        }
    }

    /// The same, with what was running where a kernel caused it. Whatever is called after a fault fails with it, so this is
    /// for calls of any kind.
    pub fn during(self, op: impl FnOnce() -> String) -> CudaError {
        if self.is_fault() { self.while_waiting_for(op) } else { self }
    }

    /// The same, with what was waited for: whatever the driver finds then, that has caused.
    pub fn while_waiting_for(self, op: impl FnOnce() -> String) -> CudaError {
        match self {
            CudaError::Driver { code, meaning, .. } => CudaError::Fault { op: op(), code, meaning },
            other => other,
        }
    }
}

/// What to do when memory runs out beside a cache that took its share.
const MORE_ROOM: &str = "lower --kv-cache-free-gpu-mem-fraction, --max-batch-size or --max-num-tokens, or free the GPU";

/// Bytes as people compare them.
fn gib(bytes: u64) -> String {
    match bytes {
        0..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// Turn a driver status into a result; `action` says what was tried.
pub(crate) fn check(status: Status, action: impl FnOnce() -> String) -> Result<(), CudaError> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let (code, mut meaning) = describe(status);
    if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
        && let Ok((free, total)) = crate::memory::free_and_total()
    {
        let (free, total) = (gib(free), gib(total));
        meaning += &format!("; {free} of {total} free on the GPU, another process may hold the rest; {MORE_ROOM}");
    }
    Err(CudaError::Driver { action: action(), code, meaning })
}

/// The driver's name and words for a status.
pub(crate) fn describe(status: Status) -> (String, String) {
    let text = |get: unsafe fn(Status, *mut *const std::ffi::c_char) -> Status| {
        let mut pointer = std::ptr::null();
        // SAFETY: the driver answers with a static C string or leaves the pointer null.
        unsafe {
            if get(status, &mut pointer) != sys::CUresult::CUDA_SUCCESS || pointer.is_null() {
                return None;
            }
            Some(std::ffi::CStr::from_ptr(pointer).to_string_lossy().into_owned())
        }
    };
    let code = text(driver::cuGetErrorName).unwrap_or_else(|| format!("status {}", status.0));
    (code, text(driver::cuGetErrorString).unwrap_or_else(|| "no description".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(code: &str) -> CudaError {
        CudaError::Driver { action: "waiting for the GPU".into(), code: code.into(), meaning: "in its words".into() }
    }

    #[test]
    fn faults_say_what_ran_and_other_errors_stay_what_they_are() {
        let error = driver("CUDA_ERROR_ILLEGAL_ADDRESS").during(|| "op gate_up".into());
        let CudaError::Fault { op, code, meaning } = &error else { panic!("{error:?}") };
        assert_eq!([op, code, meaning], ["op gate_up", "CUDA_ERROR_ILLEGAL_ADDRESS", "in its words"]);
        // What is known already is not overwritten from farther out.
        let CudaError::Fault { op, .. } = error.during(|| "a step".into()) else { panic!("no fault any more") };
        assert_eq!(op, "op gate_up");

        let refused = driver("CUDA_ERROR_INVALID_VALUE").during(|| unreachable!());
        assert!(matches!(refused, CudaError::Driver { .. }), "{refused:?}");
        assert!(!CudaError::Interrupted.is_fault() && !CudaError::Unsupported("too wide".into()).is_fault());
        let waited = driver("CUDA_ERROR_UNKNOWN").while_waiting_for(|| "op gate_up".into());
        assert!(matches!(waited, CudaError::Fault { .. }), "{waited:?}");
    }
}
