//! Memory on the device, and host memory that it can copy from without a detour.

use cudarc::driver::sys;

use crate::error::{CudaError, check};

/// An address on the device; what kernels take.
pub type DevicePtr = sys::CUdeviceptr;

/// Bytes on the device, given back when dropped. The context must outlive it: the primary context does, until the
/// process ends.
#[derive(Debug)]
pub struct DeviceBuffer {
    pointer: DevicePtr,
    bytes: usize,
}

impl DeviceBuffer {
    /// Take `bytes` (at least one) for `what`, which errors name.
    pub fn new(bytes: usize, what: &str) -> Result<DeviceBuffer, CudaError> {
        let mut pointer = 0;
        // SAFETY: plain allocation into a local.
        let status = unsafe { sys::cuMemAlloc_v2(&mut pointer, bytes.max(1)) };
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
        Ok(DeviceBuffer { pointer, bytes })
    }

    /// Where it starts.
    pub fn ptr(&self) -> DevicePtr {
        self.pointer
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copy `data` to byte `offset`; returns when it is there.
    pub fn write<T: Copy>(&self, offset: usize, data: &[T]) -> Result<(), CudaError> {
        let bytes = size_of_val(data);
        assert!(offset + bytes <= self.bytes, "a write of {bytes} bytes at {offset} into {} bytes", self.bytes);
        // SAFETY: both ranges are in bounds, and the call returns only when the host memory has been read.
        let status = unsafe { sys::cuMemcpyHtoD_v2(self.pointer + offset as u64, data.as_ptr().cast(), bytes) };
        check(status, || format!("copying {bytes} bytes to the GPU"))?;
        // The call may return while the last bytes are still on their way, and our stream does not wait for them.
        // SAFETY: no arguments.
        check(unsafe { sys::cuCtxSynchronize() }, || "waiting for a copy".into())
    }

    /// Copy from byte `offset` into `data`; waits for all work before it on the default stream only, so synchronise
    /// the stream that wrote it first.
    pub fn read<T: Copy>(&self, offset: usize, data: &mut [T]) -> Result<(), CudaError> {
        let bytes = size_of_val(data);
        assert!(offset + bytes <= self.bytes, "a read of {bytes} bytes at {offset} from {} bytes", self.bytes);
        // SAFETY: both ranges are in bounds; `T` is plain data by convention of the callers.
        let status = unsafe { sys::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), self.pointer + offset as u64, bytes) };
        check(status, || format!("copying {bytes} bytes from the GPU"))
    }

    /// Set every byte; returns when it is done.
    pub fn fill(&self, byte: u8) -> Result<(), CudaError> {
        // SAFETY: the range is the whole buffer.
        check(unsafe { sys::cuMemsetD8_v2(self.pointer, byte, self.bytes) }, || "filling a buffer".into())?;
        // SAFETY: no arguments; a memset is asynchronous on the host's side.
        check(unsafe { sys::cuCtxSynchronize() }, || "waiting for a fill".into())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once. A failure means that the context is gone, and with it the memory.
        let _ = unsafe { sys::cuMemFree_v2(self.pointer) };
    }
}

/// Free and total bytes of the current device.
pub(crate) fn free_and_total() -> Result<(u64, u64), CudaError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: two locals.
    check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, || "asking for free memory".into())?;
    Ok((free as u64, total as u64))
}

/// Page-locked host memory for `len` elements, for asynchronous copies.
pub struct PinnedBuffer<T: Copy> {
    pointer: *mut T,
    len: usize,
}

// SAFETY: it owns its memory like a Box.
unsafe impl<T: Copy + Send> Send for PinnedBuffer<T> {}

impl<T: Copy + Default> PinnedBuffer<T> {
    /// Zeroed (by `T::default()`).
    pub fn new(len: usize) -> Result<PinnedBuffer<T>, CudaError> {
        let mut pointer = std::ptr::null_mut();
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: plain allocation into a local.
        let status = unsafe { sys::cuMemHostAlloc(&mut pointer, bytes, 0) };
        check(status, || format!("page-locking {bytes} bytes of host memory"))?;
        let buffer = PinnedBuffer { pointer: pointer.cast::<T>(), len };
        for i in 0..len {
            // SAFETY: in bounds of the fresh allocation.
            unsafe { buffer.pointer.add(i).write(T::default()) };
        }
        Ok(buffer)
    }
}

impl<T: Copy> std::ops::Deref for PinnedBuffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: initialised by `new`.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }
}

impl<T: Copy> std::ops::DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: initialised by `new`, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T: Copy> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.pointer.cast()) };
    }
}
