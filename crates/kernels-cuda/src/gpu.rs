//! One GPU: its context, its one compute stream, its kernels.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, OnceLock};

use bytemuck::{NoUninit, Pod};
use cudarc::driver::sys;

use crate::compile::{Arch, CacheReport, load_modules};
use crate::context::Context;
use crate::driver::{self, Status};
use crate::error::{CudaError, check, describe};
use crate::library::{self, Lib};
use crate::memory::{DevicePtr, PinnedBuffer, free_and_total};
use crate::module::Function;

/// What a GPU is.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct DeviceInfo {
    /// Number that `--device cuda:N` takes.
    pub index: u32,
    /// Marketing name.
    pub name: String,
    /// Compute capability.
    pub compute_capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of L2 cache.
    pub l2_bytes: u64,
    /// Most shared memory of one block.
    pub shared_bytes_per_block: u32,
    /// Highest clock of the multiprocessors.
    pub clock_khz: u32,
    /// PCI address, as NVML names it.
    pub pci_bus_id: String,
    /// Tells this GPU from all others, as `nvidia-smi -L` prints it (of a part of a GPU with another beginning).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// CUDA version of the driver, as 13000 for 13.0.
    pub driver_cuda: i32,
}

/// Oldest CUDA version of a driver that works: 12.4 brought everything that is called here.
const OLDEST_DRIVER: i32 = 12_040;

/// Initialise the driver and list its GPUs.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    library::open(Lib::Driver)?;
    library::check_named_path()?;
    // SAFETY: the library is open; init may be called repeatedly.
    let status = unsafe { driver::cuInit(0) };
    if status != sys::CUresult::CUDA_SUCCESS {
        let (code, meaning) = describe(status);
        return Err(CudaError::NoDevice { problem: format!("{code} ({meaning})") });
    }
    let (mut version, mut count) = (0, 0);
    // SAFETY: locals.
    check(unsafe { driver::cuDriverGetVersion(&mut version) }, || "asking for the driver's version".into())?;
    if version < OLDEST_DRIVER {
        let text = |v: i32| format!("for CUDA {}.{}", v / 1000, v % 1000 / 10);
        return Err(CudaError::TooOld {
            library: "NVIDIA's driver",
            found: text(version),
            needed: text(OLDEST_DRIVER),
            remedy: "update the driver, or use --device cpu",
        });
    }
    // SAFETY: a local.
    check(unsafe { driver::cuDeviceGetCount(&mut count) }, || "counting GPUs".into())?;
    (0..count).map(|index| device_info(index, version)).collect()
}

fn device_info(index: i32, driver_cuda: i32) -> Result<DeviceInfo, CudaError> {
    use sys::CUdevice_attribute as A;
    let mut device = 0;
    // SAFETY: a local; the index is below the count.
    check(unsafe { driver::cuDeviceGet(&mut device, index) }, || format!("opening GPU {index}"))?;
    let attribute = |which: A| {
        let mut value = 0;
        // SAFETY: a local.
        check(unsafe { driver::cuDeviceGetAttribute(&mut value, which, device) }, || format!("reading {which:?}"))?;
        Ok::<i32, CudaError>(value)
    };
    let mut name = [0; 128];
    // SAFETY: the length is the buffer's.
    check(unsafe { driver::cuDeviceGetName(name.as_mut_ptr(), 128, device) }, || "reading a GPU's name".into())?;
    let mut bus = [0; 32];
    // SAFETY: the length is the buffer's.
    check(unsafe { driver::cuDeviceGetPCIBusId(bus.as_mut_ptr(), 32, device) }, || "reading a PCI address".into())?;
    let mut memory = 0;
    // SAFETY: a local.
    check(unsafe { driver::cuDeviceTotalMem_v2(&mut memory, device) }, || "reading a GPU's memory".into())?;
    let text = |bytes: &[std::ffi::c_char]| {
        bytes.iter().take_while(|b| **b != 0).map(|b| *b as u8 as char).collect::<String>()
    };
    Ok(DeviceInfo {
        index: index as u32,
        name: text(&name),
        compute_capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        memory_bytes: memory as u64,
        l2_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
        shared_bytes_per_block: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        clock_khz: attribute(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? as u32,
        pci_bus_id: text(&bus),
        uuid: uuid(device),
        driver_cuda,
    })
}

fn uuid(device: sys::CUdevice) -> Option<String> {
    type Ask = unsafe extern "C" fn(*mut [u8; 16], sys::CUdevice) -> Status;
    // SAFETY: the type is that of the function in NVIDIA's headers.
    let ask: Ask = unsafe { library::open(Lib::Driver).ok()?.symbol("cuDeviceGetUuid_v2")? };
    let mut bytes = [0; 16];
    // SAFETY: a local of the size that is written.
    let known = unsafe { ask(&mut bytes, device) } == sys::CUresult::CUDA_SUCCESS;
    known.then(|| in_words(&bytes))
}

/// `GPU-` and sixteen bytes in groups of 4, 2, 2, 2 and 6.
fn in_words(uuid: &[u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in uuid.iter().enumerate() {
        let dash = if matches!(at, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
        text.push_str(&format!("{dash}{byte:02x}"));
    }
    text
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: (u32, u32, u32),
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// May begin before the launch before it ends (the kernel waits by itself); ignored below sm_90.
    pub overlap: bool,
    /// Neighbouring blocks that run together and read each other's shared memory; ignored below sm_90.
    pub cluster: u32,
}

impl Launch {
    /// Blocks in one dimension.
    pub fn grid(blocks: usize, block: u32) -> Launch {
        Launch { grid: (blocks as u32, 1, 1), block, shared: 0, overlap: false, cluster: 1 }
    }

    /// With dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Launch {
        Launch { shared: bytes as u32, ..self }
    }

    /// See [`Launch::overlap`].
    pub fn overlapping(self) -> Launch {
        Launch { overlap: true, ..self }
    }

    /// See [`Launch::cluster`]; the grid must be a multiple of it.
    pub fn clustered(self, blocks: u32) -> Launch {
        Launch { cluster: blocks, ..self }
    }
}

/// The residual stream may have one in so many bytes of L2.
const RESIDUAL_SHARE: usize = 3;

/// A GPU in use. One thread at a time runs steps on it; [`Gpu::bind`] makes it that thread's.
pub struct Gpu {
    info: DeviceInfo,
    arch: Arch,
    context: Arc<Context>,
    cache: CacheReport,
    shared_limits: RefCell<HashMap<usize, u32>>,
    tag: Cell<u32>,
    tags: RefCell<Option<Vec<u32>>>,
    on_tag: Cell<Option<fn(u32)>>,
}

impl Gpu {
    /// Open GPU `index`: its context, one stream, and all kernels, compiled or taken from the cache.
    pub fn open(index: u32) -> Result<Gpu, CudaError> {
        Gpu::open_while(index, &|| true)
    }

    /// The same; `go_on` is asked before each file of kernels is loaded or, which takes long, compiled.
    pub fn open_while(index: u32, go_on: &(dyn Fn() -> bool + Sync)) -> Result<Gpu, CudaError> {
        let all = devices()?;
        let info = all.get(index as usize).cloned().ok_or_else(|| CudaError::NoDevice {
            problem: format!("there is no GPU {index}, the driver lists {}", all.len()),
        })?;
        let arch = Arch::of(&info)?;
        let mut context = Context::open(index)?;
        let cache = load_modules(&mut context.modules, arch, info.driver_cuda, go_on)?;
        let context = Arc::new(context);
        context.bind()?;
        Ok(Gpu {
            info,
            arch,
            context,
            cache,
            shared_limits: RefCell::default(),
            tag: Cell::new(u32::MAX),
            tags: RefCell::new(None),
            on_tag: Cell::new(None),
        })
    }

    /// Make this GPU the calling thread's: the one on which it takes memory.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.context.bind()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What kernels were compiled for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// What loading the kernels cost.
    pub fn cache(&self) -> &CacheReport {
        &self.cache
    }

    /// The compute stream, for libraries.
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.context.stream
    }

    /// Free and total bytes.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        free_and_total()
    }

    /// Whether L2 is to keep a residual stream of so many rows while other data pass: only where it leaves room for them.
    pub(crate) fn keeps_residual(&self, rows: usize, width: usize) -> bool {
        rows * width * size_of::<f32>() <= self.info.l2_bytes as usize / RESIDUAL_SHARE
    }

    /// A kernel by name.
    pub fn function(&self, file: &'static str, name: &'static str) -> Result<Function, CudaError> {
        let missing = || CudaError::NoKernel { name: name.to_string(), file };
        let module = *self.context.modules.get(file).ok_or_else(missing)?;
        let text = CString::new(name).map_err(|_| missing())?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module lives as long as the context, and the name ends in a zero.
        let status = unsafe { driver::cuModuleGetFunction(&mut raw, module, text.as_ptr()) };
        if status != sys::CUresult::CUDA_SUCCESS {
            return Err(missing());
        }
        Ok(Function { raw, name })
    }

    /// Launch on the compute stream. `args` are pointers to the kernel's arguments, see [`crate::kernel_args`]. Ops do this for
    /// their callers, who promise the same:
    ///
    /// # Safety
    /// - The kernel (the op) was found on this GPU, and `args` are its arguments: as many, of their types.
    /// - Until it has run, and in a graph until the graph has run for the last time, all memory that it reads or writes is
    ///   allocated and as large as it takes for granted. That follows from addresses and sizes among the arguments, and from
    ///   indices in memory that it reads: tokens, positions, slots, block tables, spans.
    /// - Meanwhile the host neither writes what of its own memory the kernel reads, nor reads or writes what it writes.
    pub unsafe fn launch(&self, function: Function, shape: Launch, args: &mut [*mut c_void]) -> Result<(), CudaError> {
        // Static shared memory counts too, and only the driver knows how much of it there is.
        if shape.shared > 32 * 1024 {
            self.raise_shared_limit(function, shape.shared)?;
        }
        // SAFETY: plain data, valid as zeroes; the fields that count are set below.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        if shape.overlap && self.arch.number() >= 90 {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if shape.cluster > 1 && self.arch.number() >= 90 {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: shape.cluster, y: 1, z: 1 };
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid.0,
            gridDimY: shape.grid.1,
            gridDimZ: shape.grid.2,
            blockDimX: shape.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared,
            hStream: self.stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        // SAFETY: the stream lives as long as `self`; function, arguments and memory are the caller's promise.
        let status =
            unsafe { driver::cuLaunchKernelEx(&config, function.raw, args.as_mut_ptr(), std::ptr::null_mut()) };
        check(status, || format!("launching {} {:?}", function.name, shape))?;
        self.note_launch()
    }

    fn raise_shared_limit(&self, function: Function, bytes: u32) -> Result<(), CudaError> {
        let mut limits = self.shared_limits.borrow_mut();
        let limit = limits.entry(function.raw as usize).or_insert(0);
        if *limit < bytes {
            let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a kernel of this GPU, by the promise made to `launch`, which alone calls this.
            check(unsafe { driver::cuFuncSetAttribute(function.raw, which, bytes as i32) }, || {
                format!("giving {} {bytes} bytes of shared memory", function.name)
            })?;
            *limit = bytes;
        }
        Ok(())
    }

    /// Copy the first `count` elements of `from`, in stream order.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: there are `count` elements' bytes at `to`, and until the copy has run both stay allocated and
    /// nobody writes `from`.
    pub unsafe fn copy_to_device<T: Pod>(
        &self,
        to: DevicePtr,
        from: &PinnedBuffer<T>,
        count: usize,
    ) -> Result<(), CudaError> {
        let bytes = size_of_val(&from[..count]);
        // SAFETY: the source is in bounds, as the slice above has checked; the rest is the caller's promise.
        let status = unsafe { driver::cuMemcpyHtoDAsync_v2(to, from.address().cast(), bytes, self.stream()) };
        check(status, || format!("copying {bytes} bytes to the GPU"))?;
        self.note_launch()
    }

    /// Fill `to` from the device, in stream order.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: there are as many bytes at `from`, and until the copy has run both stay allocated and nobody
    /// reads or writes `to`.
    pub unsafe fn copy_to_host<T: Pod>(&self, to: &mut PinnedBuffer<T>, from: DevicePtr) -> Result<(), CudaError> {
        let bytes = size_of_val(&to[..]);
        // SAFETY: the length is the target's; the rest is the caller's promise.
        let status = unsafe { driver::cuMemcpyDtoHAsync_v2(to.address().cast(), from, bytes, self.stream()) };
        check(status, || format!("copying {bytes} bytes from the GPU"))?;
        self.note_launch()
    }

    /// Wait for the compute stream.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as `self`.
        check(unsafe { driver::cuStreamSynchronize(self.stream()) }, || "waiting for the GPU".into())
    }

    /// What the launches from here on belong to: the index of an op. In a profile window the recorder hears of it too.
    pub fn set_tag(&self, tag: u32) {
        self.tag.set(tag);
        if let Some(hook) = self.on_tag.get() {
            hook(tag);
        }
    }

    /// Call `hook` with every tag, until `None` is set; how the recorder ties launches to ops outside graphs.
    pub(crate) fn on_tag(&self, hook: Option<fn(u32)>) {
        self.on_tag.set(hook);
    }

    pub(crate) fn begin_tagging(&self) {
        *self.tags.borrow_mut() = Some(Vec::new());
    }

    pub(crate) fn end_tagging(&self) -> Vec<u32> {
        self.tags.borrow_mut().take().unwrap_or_default()
    }

    /// During a capture: give the graph nodes that appeared since the last call the current tag. Libraries that launch
    /// by themselves are followed by a call of this.
    pub(crate) fn note_launch(&self) -> Result<(), CudaError> {
        let mut tags = self.tags.borrow_mut();
        let Some(tags) = tags.as_mut() else { return Ok(()) };
        let (mut state, mut graph, mut count) =
            (sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, std::ptr::null_mut(), 0);
        use std::ptr::null_mut as no;
        // SAFETY: locals; what is not wanted is null.
        unsafe {
            check(
                driver::cuStreamGetCaptureInfo_v3(self.stream(), &mut state, no(), &mut graph, no(), no(), no()),
                || "asking for a capture's graph".into(),
            )?;
            if graph.is_null() {
                return Ok(());
            }
            check(driver::cuGraphGetNodes(graph, no(), &mut count), || "counting a graph's nodes".into())?;
        }
        tags.resize(count.max(tags.len()), self.tag.get());
        Ok(())
    }
}

/// A point in the compute stream, with the time it was passed.
pub struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: a handle that the driver allows on any thread; it belongs to one owner, who may be on any.
unsafe impl Send for Event {}

impl Event {
    /// Of the calling thread's GPU. `timed` events can be subtracted; others are cheaper.
    pub fn new(timed: bool) -> Result<Event, CudaError> {
        let context = Context::current(|| "making an event".into())?;
        let mut raw = std::ptr::null_mut();
        let flags =
            if timed { sys::CUevent_flags::CU_EVENT_DEFAULT } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING };
        // SAFETY: a local; the context is the thread's.
        check(unsafe { driver::cuEventCreate(&mut raw, flags as u32) }, || "making an event".into())?;
        Ok(Event { raw, context })
    }

    /// Put it into the stream. The driver refuses that of another GPU.
    pub fn record(&self, gpu: &Gpu) -> Result<(), CudaError> {
        // SAFETY: both live as long as their contexts, which `self` and `gpu` hold.
        check(unsafe { driver::cuEventRecord(self.raw, gpu.stream()) }, || "recording an event".into())
    }

    /// Wait until the stream has passed it.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: it lives as long as its context, which it holds.
        check(unsafe { driver::cuEventSynchronize(self.raw) }, || "waiting for the GPU".into())
    }

    /// Whether the stream has passed it.
    pub fn passed(&self) -> Result<bool, CudaError> {
        // SAFETY: as in `wait`.
        match unsafe { driver::cuEventQuery(self.raw) } {
            status if status == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => check(status, || "asking the GPU".into()).map(|()| true),
        }
    }

    /// Milliseconds from `earlier` to this; both must have passed.
    pub fn since(&self, earlier: &Event) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: as in `wait`, and the rest is a local; the driver refuses events that are not timed or have not passed.
        let status = unsafe { elapsed_time()?(&mut milliseconds, earlier.raw, self.raw) };
        check(status, || "reading an event's time".into())?;
        Ok(milliseconds)
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> Status;

/// How the time between events is asked for: drivers before CUDA 12.8 have only the older function.
fn elapsed_time() -> Result<ElapsedTime, CudaError> {
    static KNOWN: OnceLock<ElapsedTime> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return Ok(*known);
    }
    let driver = library::open(Lib::Driver)?;
    // SAFETY: both have this type in NVIDIA's headers.
    let newer: Option<ElapsedTime> = unsafe { driver.symbol("cuEventElapsedTime_v2") };
    // SAFETY: as above.
    let function = newer.map_or_else(|| unsafe { driver.function("cuEventElapsedTime") }, Ok)?;
    Ok(*KNOWN.get_or_init(|| function))
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new` in a context that is still there, destroyed once.
        let _ = self.context.within(|| unsafe { driver::cuEventDestroy_v2(self.raw) });
    }
}

/// Pointers to a kernel's arguments, in order: `gpu.launch(f, shape, kernel_args![a, b])`. Arguments are variables and fields, never
/// values that are gone when the kernel is launched, and have no padding: the same call launches the same bytes.
#[macro_export]
macro_rules! kernel_args {
    ($($argument:expr),* $(,)?) => {
        &mut [$($crate::pointer_to_argument(&raw const $argument)),*]
    };
}

/// For [`kernel_args`].
#[doc(hidden)]
pub fn pointer_to_argument<T: NoUninit>(argument: *const T) -> *mut c_void {
    argument.cast_mut().cast()
}
