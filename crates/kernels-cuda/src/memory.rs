//! Memory on the device, and host memory that it can copy from without a detour.

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit, Pod};
use cudarc::driver::sys;

use crate::context::Context;
use crate::driver;
use crate::error::{CudaError, check};

/// An address on the device; what kernels take. It is a number: what may be done with it is up to whoever launches, see
/// [`crate::Gpu::launch`].
pub type DevicePtr = sys::CUdeviceptr;

/// Bytes on the device, given back when dropped; their GPU's context lives as long.
#[derive(Debug)]
pub struct DeviceBuffer {
    pointer: DevicePtr,
    bytes: usize,
    context: Arc<Context>,
}

impl DeviceBuffer {
    /// Take `bytes` (at least one) of the calling thread's GPU for `what`, which errors name.
    pub fn new(bytes: usize, what: &str) -> Result<DeviceBuffer, CudaError> {
        let context = Context::current(|| format!("allocating {bytes} bytes for {what}"))?;
        let mut pointer = 0;
        // SAFETY: a local; the context is the thread's.
        let status = unsafe { driver::cuMemAlloc_v2(&mut pointer, bytes.max(1)) };
        if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = free_and_total()?;
            return Err(CudaError::OutOfMemory {
                what: what.to_string(),
                needed: bytes as u64,
                free,
                total,
                remedy: "use a smaller model or cache, lower --max-batch-size or --max-num-tokens, or free the GPU",
            });
        }
        check(status, || format!("allocating {bytes} bytes for {what}"))?;
        Ok(DeviceBuffer { pointer, bytes, context })
    }

    /// Where it starts.
    pub fn ptr(&self) -> DevicePtr {
        self.pointer
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of `bytes` bytes from `offset`, which must be inside.
    fn range(&self, offset: usize, bytes: usize) -> DevicePtr {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{bytes} bytes at {offset} of {} bytes", self.bytes);
        self.pointer + offset as u64
    }

    /// Copy `data` to byte `offset`; returns when it is there.
    ///
    /// # Panics
    /// Where it does not fit.
    pub fn write<T: NoUninit>(&self, offset: usize, data: &[T]) -> Result<(), CudaError> {
        let bytes = size_of_val(data);
        let to = self.range(offset, bytes);
        self.context.within(|| {
            // SAFETY: the target is in bounds, every byte of the source is initialised, and the call returns only when the
            // host memory has been read.
            let status = unsafe { driver::cuMemcpyHtoD_v2(to, data.as_ptr().cast(), bytes) };
            check(status, || format!("copying {bytes} bytes to the GPU"))?;
            // The call may return while the last bytes are still on their way, and our stream does not wait for them.
            // SAFETY: no arguments.
            check(unsafe { driver::cuCtxSynchronize() }, || "waiting for a copy".into())
        })
    }

    /// Copy from byte `offset` into `data`; waits for all work before it on the default stream only, so synchronise
    /// the stream that wrote it first.
    ///
    /// # Panics
    /// Where there are not as many bytes.
    pub fn read<T: AnyBitPattern>(&self, offset: usize, data: &mut [T]) -> Result<(), CudaError> {
        let bytes = size_of_val(data);
        let from = self.range(offset, bytes);
        self.context.within(|| {
            // SAFETY: the source is in bounds, any bytes make a `T`, and the call returns only when they are there.
            let status = unsafe { driver::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), from, bytes) };
            check(status, || format!("copying {bytes} bytes from the GPU"))
        })
    }

    /// Set every byte; returns when it is done.
    pub fn fill(&self, byte: u8) -> Result<(), CudaError> {
        self.context.within(|| {
            // SAFETY: the range is the whole buffer.
            check(unsafe { driver::cuMemsetD8_v2(self.pointer, byte, self.bytes) }, || "filling a buffer".into())?;
            // SAFETY: no arguments; a memset is asynchronous on the host's side.
            check(unsafe { driver::cuCtxSynchronize() }, || "waiting for a fill".into())
        })
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` in a context that is still there, freed once. The driver waits for kernels that run.
        let _ = self.context.within(|| unsafe { driver::cuMemFree_v2(self.pointer) });
    }
}

/// Free and total bytes of the current device.
pub(crate) fn free_and_total() -> Result<(u64, u64), CudaError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: two locals.
    check(unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) }, || "asking for free memory".into())?;
    Ok((free as u64, total as u64))
}

/// Page-locked host memory for `len` elements, for asynchronous copies and for kernels that read and write it in place. What is
/// launched with its address may not overlap with the host's use of it, see [`crate::Gpu::launch`].
pub struct PinnedBuffer<T: Pod> {
    pointer: *mut T,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: it owns its memory like a Box.
unsafe impl<T: Pod + Send> Send for PinnedBuffer<T> {}

impl<T: Pod> PinnedBuffer<T> {
    /// Zeroed.
    pub fn new(len: usize) -> Result<PinnedBuffer<T>, CudaError> {
        // The driver gives whole pages.
        const { assert!(align_of::<T>() <= 4096) };
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let Some(bytes) = bytes else {
            return Err(CudaError::Unsupported(format!("page-locked memory for {len} elements")));
        };
        let action = || format!("page-locking {bytes} bytes of host memory");
        let context = Context::current(action)?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: a local; the context is the thread's.
        check(unsafe { driver::cuMemHostAlloc(&mut pointer, bytes.max(1), 0) }, action)?;
        // SAFETY: so many bytes were just allocated, and nobody else knows of them.
        unsafe { pointer.cast::<u8>().write_bytes(0, bytes) };
        Ok(PinnedBuffer { pointer: pointer.cast::<T>(), len, context })
    }

    /// Where it starts, for kernels and copies.
    pub fn ptr(&self) -> DevicePtr {
        self.pointer as DevicePtr
    }

    pub(crate) fn address(&self) -> *mut T {
        self.pointer
    }
}

impl<T: Pod> std::ops::Deref for PinnedBuffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: zeroed by `new`, and any bytes make a `T`. That no kernel writes it meanwhile is the promise of whoever
        // launched one.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }
}

impl<T: Pod> std::ops::DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and borrowed mutably; no kernel reads it meanwhile either.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T: Pod> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` in a context that is still there, freed once.
        let _ = self.context.within(|| unsafe { driver::cuMemFreeHost(self.pointer.cast()) });
    }
}
