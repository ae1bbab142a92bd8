//! A GPU's context, and who keeps it: everything that has memory or handles in it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use cudarc::driver::sys;

use crate::driver;
use crate::error::{CudaError, check};

/// The primary context of a device, with the compute stream and the kernels in it. Buffers, events and graphs hold it, so that
/// none of them outlives it and frees what by then is somebody else's.
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    pub(crate) stream: sys::CUstream,
    pub(crate) modules: HashMap<&'static str, sys::CUmodule>,
}

// SAFETY: handles that the driver allows on any thread; what is not a handle is never changed once it is shared.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

thread_local! {
    /// What `cuCtxSetCurrent` was last told on this thread.
    static CURRENT: RefCell<Weak<Context>> = const { RefCell::new(Weak::new()) };
}

impl Context {
    /// Retain the context of GPU `index`, make it the thread's, and make a stream in it.
    pub(crate) fn open(index: u32) -> Result<Context, CudaError> {
        let (mut device, mut raw) = (0, std::ptr::null_mut());
        // SAFETY: a local; the driver checks the index.
        check(unsafe { driver::cuDeviceGet(&mut device, index as i32) }, || format!("opening GPU {index}"))?;
        // SAFETY: a local, and a device that was found right before.
        check(unsafe { driver::cuDevicePrimaryCtxRetain(&mut raw, device) }, || {
            format!("making a context on GPU {index}")
        })?;
        // From here on dropping it gives back what it has.
        let mut context = Context { device, raw, stream: std::ptr::null_mut(), modules: HashMap::new() };
        context.make_current()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a field of our own; the context is current.
        check(unsafe { driver::cuStreamCreate(&mut context.stream, flags) }, || "making a stream".into())?;
        Ok(context)
    }

    fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: retained until this is dropped.
        check(unsafe { driver::cuCtxSetCurrent(self.raw) }, || "binding the context".into())
    }

    /// Make it the calling thread's, where memory is taken from then on.
    pub(crate) fn bind(self: &Arc<Context>) -> Result<(), CudaError> {
        self.make_current()?;
        CURRENT.set(Arc::downgrade(self));
        Ok(())
    }

    /// That of the calling thread; `action` is what it is wanted for.
    pub(crate) fn current(action: impl FnOnce() -> String) -> Result<Arc<Context>, CudaError> {
        CURRENT.with_borrow(Weak::upgrade).ok_or_else(|| CudaError::Driver {
            action: action(),
            code: "CUDA_ERROR_INVALID_CONTEXT".into(),
            meaning: "this thread has bound no GPU".into(),
        })
    }

    /// Do `work` with it as the thread's context, whichever that is otherwise.
    pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        // A thread that is ending has none to go back to.
        let other = CURRENT.try_with(|current| current.borrow().clone()).unwrap_or_default();
        if std::ptr::eq(other.as_ptr(), self) {
            return work();
        }
        // Where this fails `work` fails too, and says more.
        let _ = self.make_current();
        let result = work();
        let back = other.upgrade().map_or(std::ptr::null_mut(), |other| other.raw);
        // SAFETY: null, or a context that its holders keep.
        let _ = unsafe { driver::cuCtxSetCurrent(back) };
        result
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Failures at this point have nobody left to tell. The thread may be another one than that which ran steps.
        self.within(|| {
            // SAFETY: retained, made and loaded for this context, and given back once: everybody who had it is gone.
            unsafe {
                if !self.stream.is_null() {
                    let _ = driver::cuStreamSynchronize(self.stream);
                }
                // A library may keep the context alive. Kernels of the next `Gpu` there start later, 7 % of a step of a
                // millisecond in all, when they are loaded beside these.
                for module in self.modules.values() {
                    let _ = driver::cuModuleUnload(*module);
                }
                if !self.stream.is_null() {
                    let _ = driver::cuStreamDestroy_v2(self.stream);
                }
            }
        });
        // SAFETY: retained by `open`.
        let _ = unsafe { driver::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
