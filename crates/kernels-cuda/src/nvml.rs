//! Memory, power, clocks and utilisation of a GPU while something runs on it, through NVML.

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::CudaError;
use crate::library::{self, Found, Lib};

type Status = c_int;
type Device = *mut c_void;
type ReadUint = unsafe extern "C" fn(Device, *mut c_uint) -> Status;
type ReadNumbered = unsafe extern "C" fn(Device, c_int, *mut c_uint) -> Status;

const SUCCESS: Status = 0;
const CLOCK_SM: c_int = 1;
const CLOCK_MEMORY: c_int = 2;
const SENSOR_GPU: c_int = 0;

/// Why NVML says that clocks are held down, and whether that is throttling: an idle GPU and clocks that somebody set
/// are not.
const REASONS: [(u64, &str); 8] = [
    (0x004, "power cap"),
    (0x008, "hardware slowdown"),
    (0x010, "sync boost"),
    (0x020, "thermal slowdown (software)"),
    (0x040, "thermal slowdown (hardware)"),
    (0x080, "power brake"),
    (0x200, "board limit"),
    (0x400, "reliability limit"),
];

const SM_CLOCK: &str = "SM clock";

/// What is sampled, in the order of [`GpuSamples::series`].
const SERIES: [(&str, &str); 7] = [
    ("GPU memory used", "bytes"),
    ("Power", "W"),
    (SM_CLOCK, "MHz"),
    ("Memory clock", "MHz"),
    ("GPU utilisation", "%"),
    ("Memory utilisation", "%"),
    ("Temperature", "C"),
];

/// What was measured, at the same times for every series.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuSamples {
    /// When, on the clock that the sampler was given.
    pub times: Vec<u64>,
    /// What the GPU can report; others are not here.
    pub series: Vec<GpuSeries>,
    /// Bits of NVML's reasons for lowered clocks.
    pub reasons: Vec<u64>,
    /// What the GPU is allowed, where it says.
    pub limits: GpuLimits,
}

/// What a GPU is allowed; what it does not say is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct GpuLimits {
    /// Highest SM clock in MHz.
    pub sm_clock_mhz: Option<f64>,
    /// Power limit in force, in W.
    pub power_w: Option<f64>,
}

/// One measured thing.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuSeries {
    /// What.
    pub name: &'static str,
    /// In what.
    pub unit: &'static str,
    /// One value per time; NaN where the GPU did not answer.
    pub values: Vec<f64>,
}

/// Samples in a few numbers.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct GpuSummary {
    /// How many samples it is made of.
    pub samples: usize,
    /// Mean and extremes of each series.
    pub series: Vec<SeriesSummary>,
    /// Why clocks were held down, and in which share of the samples; empty = never.
    pub throttled: Vec<Throttling>,
    /// What the GPU is allowed.
    pub limits: GpuLimits,
}

/// Mean and extremes of a series.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct SeriesSummary {
    /// What.
    pub name: &'static str,
    /// In what.
    pub unit: &'static str,
    /// Lowest value.
    pub min: f64,
    /// Mean of the samples.
    pub mean: f64,
    /// Highest value.
    pub peak: f64,
}

/// A reason for lowered clocks.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Throttling {
    /// NVML's reason in words.
    pub reason: &'static str,
    /// Share of the samples that had it, 0 to 1.
    pub share: f64,
    /// Mean SM clock in these samples, in MHz.
    pub sm_clock_mhz: Option<f64>,
}

impl GpuSummary {
    /// Mean and extremes of the series with this name.
    pub fn series(&self, name: &str) -> Option<&SeriesSummary> {
        self.series.iter().find(|series| series.name == name)
    }
}

impl GpuSamples {
    /// Mean, extremes and throttling.
    pub fn summary(&self) -> GpuSummary {
        let of_series = |series: &GpuSeries| {
            let values = series.values.iter().copied().filter(|v| v.is_finite());
            let count = values.clone().count();
            (count > 0).then(|| SeriesSummary {
                name: series.name,
                unit: series.unit,
                min: values.clone().fold(f64::INFINITY, f64::min),
                mean: values.clone().sum::<f64>() / count as f64,
                peak: values.fold(f64::NEG_INFINITY, f64::max),
            })
        };
        let clocks = self.series.iter().find(|series| series.name == SM_CLOCK).map_or(&[][..], |s| &s.values);
        let of_reason = |(bit, reason): (u64, &'static str)| {
            let hit = self.reasons.iter().filter(|reasons| *reasons & bit != 0).count();
            let then = self.reasons.iter().zip(clocks).filter(|(reasons, mhz)| *reasons & bit != 0 && mhz.is_finite());
            let (count, sum) = then.fold((0, 0.0), |(count, sum), (_, mhz)| (count + 1, sum + mhz));
            (hit > 0).then(|| Throttling {
                reason,
                share: hit as f64 / self.reasons.len() as f64,
                sm_clock_mhz: (count > 0).then(|| sum / f64::from(count)),
            })
        };
        GpuSummary {
            samples: self.times.len(),
            series: self.series.iter().filter_map(of_series).collect(),
            throttled: REASONS.into_iter().filter_map(of_reason).collect(),
            limits: self.limits,
        }
    }
}

/// Samples a GPU on a thread of its own until it is stopped.
pub struct NvmlSampler {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<GpuSamples>>,
}

impl NvmlSampler {
    /// Ten times a second.
    pub const PERIOD: Duration = Duration::from_millis(100);

    /// Begin to sample the GPU at this PCI address, see [`crate::DeviceInfo::pci_bus_id`]. `now` is the clock that
    /// samples are stamped with.
    pub fn start(pci_bus_id: &str, now: impl Fn() -> u64 + Send + 'static) -> Result<NvmlSampler, CudaError> {
        let gpu = Nvml::open(pci_bus_id)?;
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopped = stop.clone();
        let work = move || {
            let mut samples = Samples::default();
            let mut next = Instant::now();
            loop {
                samples.push(now(), gpu.read());
                next += Self::PERIOD;
                let wait = next.saturating_duration_since(Instant::now());
                let guard = stopped.0.lock().unwrap_or_else(|e| e.into_inner());
                let waited = stopped.1.wait_timeout_while(guard, wait, |stopped| !*stopped);
                if *waited.unwrap_or_else(|e| e.into_inner()).0 {
                    return GpuSamples { limits: gpu.limits(), ..samples.finish() };
                }
            }
        };
        let thread = std::thread::Builder::new().name("strobe-nvml".into()).spawn(work).map_err(|error| {
            CudaError::Unsupported(format!("the thread that samples the GPU could not be started ({error})"))
        })?;
        Ok(NvmlSampler { stop, thread: Some(thread) })
    }

    /// End and take the samples.
    pub fn stop(mut self) -> GpuSamples {
        self.end().unwrap_or_default()
    }

    fn end(&mut self) -> Option<GpuSamples> {
        *self.stop.0.lock().unwrap_or_else(|e| e.into_inner()) = true;
        self.stop.1.notify_one();
        self.thread.take()?.join().ok()
    }
}

impl Drop for NvmlSampler {
    fn drop(&mut self) {
        self.end();
    }
}

/// One reading: values in the order of [`SERIES`], and the reasons for lowered clocks.
struct Reading {
    values: [Option<f64>; SERIES.len()],
    reasons: u64,
}

#[derive(Default)]
struct Samples {
    times: Vec<u64>,
    values: [Vec<f64>; SERIES.len()],
    reasons: Vec<u64>,
}

impl Samples {
    fn push(&mut self, time: u64, reading: Reading) {
        self.times.push(time);
        self.reasons.push(reading.reasons);
        for (series, value) in self.values.iter_mut().zip(reading.values) {
            series.push(value.unwrap_or(f64::NAN));
        }
    }

    fn finish(self) -> GpuSamples {
        let all = SERIES.into_iter().zip(self.values);
        let series = all
            .filter(|(_, values)| values.iter().any(|v| v.is_finite()))
            .map(|((name, unit), values)| GpuSeries { name, unit, values });
        GpuSamples { times: self.times, series: series.collect(), reasons: self.reasons, limits: GpuLimits::default() }
    }
}

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// NVML's handle of one GPU. What an old driver lacks is `None`.
struct Nvml {
    device: Device,
    shutdown: Option<unsafe extern "C" fn() -> Status>,
    memory: Option<unsafe extern "C" fn(Device, *mut Memory) -> Status>,
    power: Option<ReadUint>,
    clock: Option<ReadNumbered>,
    utilization: Option<unsafe extern "C" fn(Device, *mut Utilization) -> Status>,
    temperature: Option<ReadNumbered>,
    most_clock: Option<ReadNumbered>,
    power_limit: Option<ReadUint>,
    reasons: Option<unsafe extern "C" fn(Device, *mut c_ulonglong) -> Status>,
}

// SAFETY: NVML is thread-safe.
unsafe impl Send for Nvml {}

impl Nvml {
    fn open(pci_bus_id: &str) -> Result<Nvml, CudaError> {
        let found = library::open(Lib::Nvml)?;
        type Init = unsafe extern "C" fn() -> Status;
        type ByAddress = unsafe extern "C" fn(*const c_char, *mut Device) -> Status;
        let missing = |name: &str| CudaError::Library {
            library: "libnvidia-ml",
            action: format!("finding {name}"),
            code: format!("it is not in {}", found.path.display()),
        };
        let address = CString::new(pci_bus_id).unwrap_or_default();
        let mut device = std::ptr::null_mut();
        // SAFETY: the types are those of NVML's header; the address ends in a zero.
        unsafe {
            let init: Init = found.symbol("nvmlInit_v2").ok_or_else(|| missing("nvmlInit_v2"))?;
            let by_address: ByAddress = found
                .symbol("nvmlDeviceGetHandleByPciBusId_v2")
                .ok_or_else(|| missing("nvmlDeviceGetHandleByPciBusId_v2"))?;
            checked(found, init(), || "starting NVML".into())?;
            checked(found, by_address(address.as_ptr(), &mut device), || format!("finding GPU {pci_bus_id}"))?;
            Ok(Nvml {
                device,
                shutdown: found.symbol("nvmlShutdown"),
                memory: found.symbol("nvmlDeviceGetMemoryInfo"),
                power: found.symbol("nvmlDeviceGetPowerUsage"),
                clock: found.symbol("nvmlDeviceGetClockInfo"),
                utilization: found.symbol("nvmlDeviceGetUtilizationRates"),
                temperature: found.symbol("nvmlDeviceGetTemperature"),
                most_clock: found.symbol("nvmlDeviceGetMaxClockInfo"),
                power_limit: found.symbol("nvmlDeviceGetEnforcedPowerLimit"),
                reasons: found
                    .symbol("nvmlDeviceGetCurrentClocksEventReasons")
                    .or_else(|| found.symbol("nvmlDeviceGetCurrentClocksThrottleReasons")),
            })
        }
    }

    fn limits(&self) -> GpuLimits {
        let (mut mhz, mut milliwatts) = (0, 0);
        // SAFETY: the handle is live, the rest are locals.
        let (clock, power) = unsafe {
            (
                self.most_clock.is_some_and(|read| read(self.device, CLOCK_SM, &mut mhz) == SUCCESS),
                self.power_limit.is_some_and(|read| read(self.device, &mut milliwatts) == SUCCESS),
            )
        };
        GpuLimits {
            sm_clock_mhz: clock.then_some(f64::from(mhz)),
            power_w: power.then_some(f64::from(milliwatts) / 1e3),
        }
    }

    fn read(&self) -> Reading {
        let ok = |status: Status| status == SUCCESS;
        let (mut memory, mut utilization, mut reasons) = (Memory::default(), Utilization::default(), 0);
        // SAFETY: the handle is live, the rest are locals.
        unsafe {
            let numbered = |read: Option<ReadNumbered>, number: c_int| {
                let mut value = 0;
                read.is_some_and(|read| ok(read(self.device, number, &mut value))).then_some(f64::from(value))
            };
            let mut milliwatts = 0;
            let power = self.power.is_some_and(|read| ok(read(self.device, &mut milliwatts)));
            let has_memory = self.memory.is_some_and(|read| ok(read(self.device, &mut memory)));
            let has_utilization = self.utilization.is_some_and(|read| ok(read(self.device, &mut utilization)));
            if !self.reasons.is_some_and(|read| ok(read(self.device, &mut reasons))) {
                reasons = 0;
            }
            Reading {
                values: [
                    has_memory.then_some(memory.used as f64),
                    power.then_some(f64::from(milliwatts) / 1e3),
                    numbered(self.clock, CLOCK_SM),
                    numbered(self.clock, CLOCK_MEMORY),
                    has_utilization.then_some(f64::from(utilization.gpu)),
                    has_utilization.then_some(f64::from(utilization.memory)),
                    numbered(self.temperature, SENSOR_GPU),
                ],
                reasons,
            }
        }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        if let Some(shutdown) = self.shutdown {
            // SAFETY: undoes the init of `open`; NVML counts them.
            unsafe { shutdown() };
        }
    }
}

fn checked(found: &Found, status: Status, action: impl FnOnce() -> String) -> Result<(), CudaError> {
    if status == SUCCESS {
        return Ok(());
    }
    let code = library::status_name(found, "nvmlErrorString", status as u32);
    Err(CudaError::Library { library: "libnvidia-ml", action: action(), code })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_become_means_peaks_and_reasons() {
        let mut samples = Samples::default();
        let reading = |power: Option<f64>, clock: f64, reasons| {
            let values = [Some(1e9), power, Some(clock), None, None, None, None];
            Reading { values, reasons }
        };
        samples.push(10, reading(Some(100.0), 1980.0, 0x1));
        samples.push(20, reading(None, 1500.0, 0x4 | 0x2));
        samples.push(30, reading(Some(300.0), 1980.0, 0x4 | 0x20));
        samples.push(40, reading(Some(200.0), 1980.0, 0));
        let samples = samples.finish();
        assert_eq!(samples.times, [10, 20, 30, 40]);
        let summary = samples.summary();
        assert_eq!(summary.samples, 4);
        let found: Vec<_> = summary.series.iter().map(|s| (s.name, s.min, s.mean, s.peak)).collect();
        let expected =
            [("GPU memory used", 1e9, 1e9, 1e9), ("Power", 100.0, 200.0, 300.0), ("SM clock", 1500.0, 1860.0, 1980.0)];
        assert_eq!(found, expected, "what the GPU never answered is not there");
        let expected = [("power cap", 0.5, Some(1740.0)), ("thermal slowdown (software)", 0.25, Some(1980.0))];
        let found: Vec<_> = summary.throttled.iter().map(|t| (t.reason, t.share, t.sm_clock_mhz)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_machine_without_a_gpu_gets_an_error_and_no_thread() {
        match NvmlSampler::start("0000:00:00.0", || 0) {
            Err(error) => assert!(error.to_string().contains("libnvidia-ml"), "{error}"),
            Ok(_) => panic!("no GPU has this address"),
        }
    }
}
