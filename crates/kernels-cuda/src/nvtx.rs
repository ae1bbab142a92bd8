//! NVTX ranges, for people who look at a run in Nsight Systems.

use std::ffi::{CString, c_char, c_int};
use std::fmt;

use crate::error::CudaError;
use crate::library::{self, Lib};

/// Ranges of the calling thread, in NVTX's default domain.
#[derive(Clone, Copy)]
pub struct Nvtx {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
}

impl Nvtx {
    /// Load the library. Without a tool that listens, ranges cost next to nothing and go nowhere.
    pub fn open() -> Result<Nvtx, CudaError> {
        let found = library::open(Lib::Nvtx)?;
        let missing = |name: &str| CudaError::Library {
            library: "libnvtx3interop",
            action: format!("finding {name}"),
            code: format!("it is not in {}", found.path.display()),
        };
        // SAFETY: the fields have the types of NVTX's headers.
        unsafe {
            Ok(Nvtx {
                push: found.symbol("nvtxRangePushA").ok_or_else(|| missing("nvtxRangePushA"))?,
                pop: found.symbol("nvtxRangePop").ok_or_else(|| missing("nvtxRangePop"))?,
            })
        }
    }

    /// Begin a range inside the one that is open.
    pub fn push(&self, name: fmt::Arguments<'_>) {
        let name = CString::new(name.to_string()).unwrap_or_default();
        // SAFETY: the name ends in a zero; NVTX copies it.
        unsafe { (self.push)(name.as_ptr()) };
    }

    /// End the range that was begun last.
    pub fn pop(&self) {
        // SAFETY: NVTX answers a pop without a push with an error code.
        unsafe { (self.pop)() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_harmless_without_a_listener() {
        match Nvtx::open() {
            Err(error) => eprintln!("skipped: {error}"),
            Ok(nvtx) => {
                nvtx.push(format_args!("[Executor] _forward_step {}: {} ctx reqs, {} gen reqs", 1, 2, 3));
                nvtx.pop();
                nvtx.pop();
            }
        }
    }
}
