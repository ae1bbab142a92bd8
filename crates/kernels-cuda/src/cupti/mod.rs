//! The kernel timeline, recorded in-process through CUPTI's activity records.
//!
//! While a window is open CUPTI fills buffers and hands the full ones to a queue; they are decoded when the window is
//! closed. Outside of windows every kind of record is off and costs nothing.

mod abi;
mod demangle;
mod records;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::graph::GraphNode;
use crate::library::{self, Found, Lib};
use crate::timeline::{ClockMap, GraphLaunch, KernelTimeline, LeadIn, Ties};
use abi::{
    ATTRIBUTE_BUFFERS_ARE_ZERO, DOMAIN_DRIVER, DOMAIN_RUNTIME, EXTERNAL_KIND_OWN, MULTIPLE_SUBSCRIBERS, OLDEST,
    SUCCESS, THREAD_ID_OF_SYSTEM, kind,
};
use records::{Decoder, external_id};

type Status = c_int;

type OnBufferRequested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type OnBufferCompleted = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);
type OnCallback = extern "C" fn(*mut c_void, c_int, u32, *const c_void);

/// The functions of CUPTI that are called.
#[derive(Clone, Copy)]
struct Api {
    subscribe: unsafe extern "C" fn(*mut *mut c_void, OnCallback, *mut c_void) -> Status,
    unsubscribe: unsafe extern "C" fn(*mut c_void) -> Status,
    set_thread_id_type: unsafe extern "C" fn(c_int) -> Status,
    register_callbacks: unsafe extern "C" fn(OnBufferRequested, OnBufferCompleted) -> Status,
    set_attribute: unsafe extern "C" fn(c_int, *mut usize, *mut c_void) -> Status,
    enable: unsafe extern "C" fn(u32) -> Status,
    disable: unsafe extern "C" fn(u32) -> Status,
    flush_all: unsafe extern "C" fn(u32) -> Status,
    next_record: unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> Status,
    dropped: unsafe extern "C" fn(*mut c_void, u32, *mut usize) -> Status,
    push: unsafe extern "C" fn(c_int, u64) -> Status,
    pop: unsafe extern "C" fn(c_int, *mut u64) -> Status,
    timestamp: unsafe extern "C" fn(*mut u64) -> Status,
    callback_name: unsafe extern "C" fn(c_int, u32, *mut *const c_char) -> Status,
    result_string: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
}

impl Api {
    fn of(found: &Found) -> Result<Api, CudaError> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the fields above have the types of CUPTI's headers.
                unsafe { found.function($name) }?
            };
        }
        let version: unsafe extern "C" fn(*mut u32) -> Status = symbol!("cuptiGetVersion");
        let mut found_version = 0;
        // SAFETY: a local.
        unsafe { version(&mut found_version) };
        if found_version < OLDEST {
            // Its records are shorter than what is read of them.
            return Err(CudaError::TooOld {
                library: "libcupti",
                found: format!("with version {found_version} of its interface"),
                needed: format!("version {OLDEST} (CUDA 12.4)"),
                remedy: "install a newer one, and let STROBE_CUDA_PATH name it",
            });
        }
        Ok(Api {
            subscribe: symbol!("cuptiSubscribe"),
            unsubscribe: symbol!("cuptiUnsubscribe"),
            set_thread_id_type: symbol!("cuptiSetThreadIdType"),
            register_callbacks: symbol!("cuptiActivityRegisterCallbacks"),
            set_attribute: symbol!("cuptiActivitySetAttribute"),
            enable: symbol!("cuptiActivityEnable"),
            disable: symbol!("cuptiActivityDisable"),
            flush_all: symbol!("cuptiActivityFlushAll"),
            next_record: symbol!("cuptiActivityGetNextRecord"),
            dropped: symbol!("cuptiActivityGetNumDroppedRecords"),
            push: symbol!("cuptiActivityPushExternalCorrelationId"),
            pop: symbol!("cuptiActivityPopExternalCorrelationId"),
            timestamp: symbol!("cuptiGetTimestamp"),
            callback_name: symbol!("cuptiGetCallbackName"),
            result_string: symbol!("cuptiGetResultString"),
        })
    }

    fn check(&self, status: Status, action: &str) -> Result<(), CudaError> {
        if status == SUCCESS {
            return Ok(());
        }
        if status == MULTIPLE_SUBSCRIBERS {
            return Err(CudaError::Unsupported(ONE_CLIENT.into()));
        }
        let mut text = std::ptr::null();
        // SAFETY: CUPTI answers with a static C string or leaves the pointer null.
        let code = unsafe {
            (self.result_string)(status, &mut text);
            if text.is_null() { format!("error {status}") } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        Err(CudaError::Library { library: "libcupti", action: action.into(), code })
    }

    /// The same moment on CUPTI's clock and on the caller's: of several readings the one that took least.
    fn moment(&self, now: &dyn Fn() -> u64) -> (u64, u64) {
        let reading = || {
            let mut stamp = 0;
            let before = now();
            // SAFETY: a local.
            unsafe { (self.timestamp)(&mut stamp) };
            let after = now();
            (after - before, (stamp, before + (after - before) / 2))
        };
        let first = reading();
        (0..16).map(|_| reading()).fold(first, |best, next| if next.0 < best.0 { next } else { best }).1
    }
}

/// CUPTI's rule, as the user should hear it.
const ONE_CLIENT: &str = "another profiler (Nsight Systems, Nsight Compute or a debugger) holds the GPU's profiling interface, which takes one client at a time: strobe records no kernels itself in this run";

static API: OnceLock<Api> = OnceLock::new();

/// Words of one buffer: 8 MiB, more than 30,000 kernels.
const BUFFER_WORDS: usize = 1 << 20;
/// Buffers that are ready before the first window opens; CUPTI takes one per thread that calls CUDA and one for the GPU.
const READY_BUFFERS: usize = 4;
/// No more than this is held in memory; CUPTI drops what does not fit, and counts it.
const MOST_BUFFERS: usize = 512;

type Buffer = Box<[u64]>;

/// Buffers on their way between CUPTI and the recorder.
struct Buffers {
    /// All zero.
    free: Vec<Buffer>,
    /// With the number of valid bytes.
    full: Vec<(Buffer, usize)>,
    lent: usize,
}

static BUFFERS: Mutex<Buffers> = Mutex::new(Buffers { free: Vec::new(), full: Vec::new(), lent: 0 });

fn buffers() -> MutexGuard<'static, Buffers> {
    BUFFERS.lock().unwrap_or_else(|e| e.into_inner())
}

/// # Safety
/// CUPTI alone calls it, with places to write the answer to.
unsafe extern "C" fn on_buffer_requested(buffer: *mut *mut u8, size: *mut usize, records: *mut usize) {
    let mut all = buffers();
    let room = all.lent + all.full.len() < MOST_BUFFERS;
    let (pointer, bytes) = match all.free.pop().or_else(|| room.then(|| vec![0; BUFFER_WORDS].into_boxed_slice())) {
        Some(lent) => {
            all.lent += 1;
            (Box::into_raw(lent).cast::<u8>(), BUFFER_WORDS * 8)
        }
        None => (std::ptr::null_mut(), 0),
    };
    // SAFETY: by the caller's promise. Zero records means as many as fit.
    unsafe {
        *buffer = pointer;
        *size = bytes;
        *records = 0;
    }
}

/// # Safety
/// CUPTI alone calls it, once with each buffer that `on_buffer_requested` lent it.
unsafe extern "C" fn on_buffer_completed(
    _context: *mut c_void,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    valid: usize,
) {
    if buffer.is_null() {
        return;
    }
    let words = std::ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), BUFFER_WORDS);
    // SAFETY: by the caller's promise it is a box of so many words, and nobody else's any more.
    let buffer = unsafe { Box::from_raw(words) };
    let mut all = buffers();
    all.lent = all.lent.saturating_sub(1);
    match valid {
        0 => all.free.push(buffer),
        _ => all.full.push((buffer, valid.min(BUFFER_WORDS * 8))),
    }
}

/// A used buffer, all zero again.
fn cleared(mut buffer: Buffer, valid: usize) -> Buffer {
    buffer.iter_mut().take(valid.div_ceil(8)).for_each(|word| *word = 0);
    buffer
}

extern "C" fn on_callback(_data: *mut c_void, _domain: c_int, _function: u32, _info: *const c_void) {}

/// The iteration that launches belong to, and whether an external id is pushed. Only the thread that runs the steps
/// touches them; they are static because the GPU's hook is a plain function.
static ITERATION: AtomicU32 = AtomicU32::new(u32::MAX);
static PUSHED: AtomicBool = AtomicBool::new(false);

/// Launches of this thread belong to `tag` from here on.
fn set_external(tag: u32) {
    let Some(api) = API.get() else { return };
    clear_external(api);
    // SAFETY: the kind is one that CUPTI leaves to its clients.
    let status = unsafe { (api.push)(EXTERNAL_KIND_OWN, external_id(ITERATION.load(Ordering::Relaxed), tag)) };
    PUSHED.store(status == SUCCESS, Ordering::Relaxed);
}

fn clear_external(api: &Api) {
    if PUSHED.swap(false, Ordering::Relaxed) {
        let mut last = 0;
        // SAFETY: a local; one id was pushed.
        unsafe { (api.pop)(EXTERNAL_KIND_OWN, &mut last) };
    }
}

/// Records what the GPU does between [`Recorder::start`] and [`Recorder::stop`]. There can be one per process.
pub struct Recorder {
    api: Api,
    subscriber: *mut c_void,
    running: Option<Running>,
}

// SAFETY: the handle is only passed back to CUPTI, which allows any thread. External ids are the launching thread's: called on
// another, the window's ties are wrong and nothing else.
unsafe impl Send for Recorder {}

struct Running {
    began: (u64, u64),
    start_ns: u64,
    ties: Ties,
    /// Where the nodes of each known graph stand in memory: what tells graphs apart.
    graphs: Vec<*const GraphNode>,
    /// What is not wanted of it.
    lead_in: Option<LeadIn>,
}

// SAFETY: the pointers are compared and never followed.
unsafe impl Send for Running {}

impl Recorder {
    /// Load CUPTI and become its client. An error says why there can be no timeline; the run can go on without.
    pub fn open() -> Result<Recorder, CudaError> {
        let api = Api::of(library::open(Lib::Cupti)?)?;
        let mut subscriber = std::ptr::null_mut();
        // SAFETY: the callback is static and nothing is enabled for it.
        let status = unsafe { (api.subscribe)(&mut subscriber, on_callback, std::ptr::null_mut()) };
        api.check(status, "becoming the GPU's profiler")?;
        let recorder = Recorder { api, subscriber, running: None };
        // SAFETY: the callbacks are static.
        unsafe {
            api.check((api.set_thread_id_type)(THREAD_ID_OF_SYSTEM), "choosing how threads are numbered")?;
            let status = (api.register_callbacks)(on_buffer_requested, on_buffer_completed);
            api.check(status, "registering buffers")?;
            // Otherwise CUPTI clears each buffer on the thread that launches when it takes it, in the middle of a step.
            // A version that does not know this clears them, and nothing is lost but time.
            let (mut size, mut yes) = (1, 1u8);
            (api.set_attribute)(ATTRIBUTE_BUFFERS_ARE_ZERO, &mut size, (&raw mut yes).cast());
        }
        let _ = API.set(api);
        let mut all = buffers();
        while all.free.len() < READY_BUFFERS {
            // Written now, so that no step pays for the first touch of its pages.
            let mut buffer = vec![u64::MAX; BUFFER_WORDS].into_boxed_slice();
            buffer.fill(0);
            all.free.push(buffer);
        }
        Ok(recorder)
    }

    /// Begin to record. The caller has waited for the GPU; `now` is the clock that times are wanted on. To be called, as
    /// everything here, on the thread that launches.
    pub fn start(&mut self, gpu: &Gpu, now: &dyn Fn() -> u64) -> Result<(), CudaError> {
        let begun = Instant::now();
        // What an earlier, failed window left behind must not be in this one.
        let leftover = std::mem::take(&mut buffers().full);
        buffers().free.extend(leftover.into_iter().map(|(buffer, valid)| cleared(buffer, valid)));
        for kind in kind::ALL {
            // SAFETY: a kind that every supported version knows.
            let status = unsafe { (self.api.enable)(kind) };
            if let Err(error) = self.api.check(status, &format!("recording activities of kind {kind}")) {
                self.disable();
                return Err(error);
            }
        }
        ITERATION.store(u32::MAX, Ordering::Relaxed);
        gpu.on_tag(Some(set_external));
        // The first call makes CUPTI take a buffer: here, and not in the first step.
        if let Err(error) = gpu.synchronize() {
            gpu.on_tag(None);
            clear_external(&self.api);
            self.disable();
            return Err(error);
        }
        let began = self.api.moment(now);
        let start_ns = begun.elapsed().as_nanos() as u64;
        self.running = Some(Running { began, start_ns, ties: Ties::default(), graphs: Vec::new(), lead_in: None });
        Ok(())
    }

    /// Whether it records.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// The window begins only now, with the next iteration: what was launched since [`Recorder::start`] will be left out.
    /// The GPU may still be busy with it.
    pub fn skip_lead_in(&mut self, now: &dyn Fn() -> u64) {
        if let Some(running) = &mut self.running {
            let iteration = ITERATION.load(Ordering::Relaxed);
            running.lead_in = Some(LeadIn { iteration, end: i64::try_from(now()).unwrap_or(i64::MAX) });
        }
    }

    /// Launches belong to `iteration` from here on, and to no op until the next tag.
    pub fn begin_iteration(&self, iteration: u64) {
        if self.running.is_some() {
            ITERATION.store(u32::try_from(iteration).unwrap_or(u32::MAX), Ordering::Relaxed);
            set_external(u32::MAX);
        }
    }

    /// A graph with these nodes was launched right now.
    pub fn graph_launched(&mut self, nodes: &[GraphNode]) {
        let Some(Running { ties, graphs, .. }) = &mut self.running else { return };
        let known =
            graphs.iter().zip(&ties.graphs).position(|(&at, tags)| at == nodes.as_ptr() && tags.len() == nodes.len());
        let graph = known.unwrap_or_else(|| {
            graphs.push(nodes.as_ptr());
            ties.graphs.push(nodes.iter().map(|node| (node.tag != u32::MAX).then_some(node.tag)).collect());
            graphs.len() - 1
        });
        let iteration = ITERATION.load(Ordering::Relaxed);
        ties.launches.push(GraphLaunch { graph, iteration: (iteration != u32::MAX).then_some(iteration) });
    }

    /// End the window and decode it. The caller has waited for the GPU. Empty when nothing was started.
    pub fn stop(&mut self, gpu: &Gpu, now: &dyn Fn() -> u64) -> Result<KernelTimeline, CudaError> {
        let begun = Instant::now();
        gpu.on_tag(None);
        let Some(running) = self.running.take() else { return Ok(KernelTimeline::default()) };
        clear_external(&self.api);
        let ended = self.api.moment(now);
        self.disable();
        // SAFETY: no flags: only records that are complete, which all are once the GPU has been waited for.
        self.api.check(unsafe { (self.api.flush_all)(0) }, "fetching what was recorded")?;
        let full = std::mem::take(&mut buffers().full);
        let api = self.api;
        let call_name = |is_runtime: bool, function: u32| api.call_name(is_runtime, function);
        let mut decoder = Decoder::new(ClockMap::new(running.began, ended), running.ties, call_name);
        let mut bytes = 0;
        for (mut buffer, valid) in full {
            bytes += valid as u64;
            let mut record = std::ptr::null_mut();
            // SAFETY: CUPTI wrote the buffer, and steps through it; its records are whole.
            unsafe {
                while (self.api.next_record)(buffer.as_mut_ptr().cast(), valid, &mut record) == SUCCESS {
                    decoder.record(record);
                }
            }
            let mut all = buffers();
            if all.free.len() < READY_BUFFERS {
                all.free.push(cleared(buffer, valid));
            }
        }
        let mut dropped = 0;
        // SAFETY: a local; no context and stream 0 mean the one global queue.
        unsafe { (self.api.dropped)(std::ptr::null_mut(), 0, &mut dropped) };
        let mut timeline = decoder.finish();
        if let Some(lead_in) = running.lead_in {
            timeline.leave_out(lead_in);
        }
        timeline.dropped = dropped as u64;
        timeline.cost.bytes = bytes;
        timeline.cost.start_ns = running.start_ns;
        timeline.cost.stop_ns = begun.elapsed().as_nanos() as u64;
        Ok(timeline)
    }

    fn disable(&self) {
        for kind in kind::ALL {
            // SAFETY: as in `start`; disabling what is off does nothing.
            unsafe { (self.api.disable)(kind) };
        }
    }
}

impl Api {
    fn call_name(&self, is_runtime: bool, function: u32) -> String {
        let domain = if is_runtime { DOMAIN_RUNTIME } else { DOMAIN_DRIVER };
        let mut name = std::ptr::null();
        // SAFETY: CUPTI answers with a static C string or leaves the pointer null.
        unsafe {
            match (self.callback_name)(domain, function, &mut name) == SUCCESS && !name.is_null() {
                true => CStr::from_ptr(name).to_string_lossy().into_owned(),
                false => format!("{} call {function}", if is_runtime { "CUDA runtime" } else { "CUDA driver" }),
            }
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.running.take().is_some() {
            clear_external(&self.api);
            self.disable();
        }
        // SAFETY: subscribed by `open`, once.
        unsafe { (self.api.unsubscribe)(self.subscriber) };
    }
}
