//! What devices can do at most.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;
use serde::{Deserialize, Serialize};
use strobe_trace::{Device, Trace};

use super::DataType;

/// What a device can do at most.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DevicePeaks {
    /// The device.
    pub device: String,
    /// Memory bandwidth in bytes per second, where known.
    pub bytes_per_s: Option<f64>,
    /// Where the bandwidth is from.
    pub bandwidth_from: &'static str,
    /// Dense floating-point operations per second by type of the inputs, where known.
    pub by_type: BTreeMap<DataType, f64>,
    /// The same whatever the type, where it was measured.
    pub measured: Option<f64>,
    /// The same of products of 8-bit integers, where they were measured apart.
    pub measured_int8: Option<f64>,
    /// The same of products of bfloat16, where they were measured apart.
    pub measured_bf16: Option<f64>,
    /// Bytes of the last cache before memory, where known.
    pub cache_bytes: Option<f64>,
}

impl DevicePeaks {
    /// Those of a host that computed, which a trace of PyTorch does not tell.
    pub(super) fn of_host(trace: &Trace) -> Self {
        of_device(trace, &Device { name: "the CPU".to_owned(), is_cpu: true, ..Device::default() })
    }

    /// Floating-point operations per second for inputs of a type, where known.
    pub fn flops_per_s(&self, data_type: Option<DataType>) -> Option<f64> {
        let apart = match data_type {
            Some(DataType::Int8) => self.measured_int8,
            Some(DataType::Bf16) => self.measured_bf16,
            _ => None,
        };
        apart.or(self.measured).or_else(|| self.by_type.get(&data_type?).copied())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    gpu: Vec<Gpu>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Gpu {
    name: String,
    #[serde(default)]
    memory_gib: u64,
    gb_per_s: Option<f64>,
    cache_mib: Option<f64>,
    #[serde(default)]
    tflops: BTreeMap<DataType, f64>,
}

static GPUS: LazyLock<Vec<(Regex, Gpu)>> = LazyLock::new(|| {
    let table: Table = toml::from_str(include_str!("../rules/gpus.toml")).expect("the table is part of the program");
    let compiled = table.gpu.into_iter().map(|gpu| (Regex::new(&gpu.name).expect("so is this pattern"), gpu));
    compiled.collect()
});

/// What a device can do: as measured or recorded in the trace, else by its name.
pub fn of_device(trace: &Trace, device: &Device) -> DevicePeaks {
    let usable = |value: f64| (value.is_finite() && value > 0.0).then_some(value);
    let mut peaks = DevicePeaks { device: device.name.clone(), ..DevicePeaks::default() };
    let gib = device.memory_bytes.map_or(0, |bytes| bytes >> 30);
    if let Some((_, gpu)) = GPUS.iter().find(|(name, gpu)| name.is_match(&device.name) && gib >= gpu.memory_gib) {
        peaks.bytes_per_s = gpu.gb_per_s.map(|gb| gb * 1e9);
        peaks.bandwidth_from = if gpu.gb_per_s.is_some() { "by name" } else { "" };
        peaks.cache_bytes = gpu.cache_mib.map(|mib| mib * 1_048_576.0);
        peaks.by_type = gpu.tflops.iter().map(|(&data_type, tflops)| (data_type, tflops * 1e12)).collect();
    }
    if let Some(recorded) = device.bytes_per_s.and_then(usable) {
        peaks.bytes_per_s = Some(recorded);
        peaks.bandwidth_from = "from the trace";
    }
    if let Some(measured) = &trace.meta.peaks
        && let Some((flops, bytes)) = usable(measured.flops_per_s).zip(usable(measured.bytes_per_s))
    {
        peaks.measured = Some(flops);
        peaks.measured_int8 = measured.int8_ops_per_s.and_then(usable);
        peaks.measured_bf16 = measured.bf16_flops_per_s.and_then(usable);
        peaks.bytes_per_s = Some(bytes);
        peaks.bandwidth_from = "measured";
    }
    peaks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16(name: &str, gib: u64) -> Option<(f64, f64)> {
        let device =
            Device { name: name.to_owned(), memory_bytes: (gib > 0).then_some(gib << 30), ..Device::default() };
        let peaks = of_device(&Trace::default(), &device);
        Some((peaks.bytes_per_s? / 1e9, peaks.flops_per_s(Some(DataType::Fp16))? / 1e12))
    }

    #[test]
    fn devices_are_known_by_the_names_that_drivers_give_them() {
        assert_eq!(bf16("NVIDIA H200", 0), Some((4800.0, 989.4)));
        assert_eq!(bf16("NVIDIA H100 80GB HBM3", 79), Some((3352.0, 989.4)));
        assert_eq!(bf16("NVIDIA H100 PCIe", 79), Some((2039.0, 756.0)));
        assert_eq!(bf16("NVIDIA H100 NVL", 93), None, "not taken for the faster module");
        assert_eq!(bf16("NVIDIA GH200 480GB", 95), Some((4000.0, 989.4)));
        assert_eq!(bf16("NVIDIA B300 SXM6 AC", 0), Some((7700.0, 2250.0)));
        assert_eq!(bf16("NVIDIA H800", 79), Some((3352.0, 989.4)));
        assert_eq!(bf16("NVIDIA H20", 95), Some((4000.0, 148.0)));
        assert_eq!(bf16("NVIDIA A100-SXM4-80GB", 79), Some((2039.0, 312.0)));
        assert_eq!(bf16("NVIDIA A100 80GB PCIe", 79), Some((1935.0, 312.0)));
        assert_eq!(bf16("NVIDIA A100-PG509-200", 39), Some((1555.0, 312.0)));
        assert_eq!(bf16("Tesla V100-SXM2-32GB", 31), Some((900.0, 125.0)));
        assert_eq!(bf16("NVIDIA GB200", 0), Some((8000.0, 2500.0)));
        assert_eq!(bf16("NVIDIA B200", 0), Some((7700.0, 2250.0)));
        assert_eq!(bf16("NVIDIA L40S", 0), Some((864.0, 362.0)));
        assert_eq!(bf16("NVIDIA L4", 0), Some((300.0, 121.0)));
        assert_eq!(bf16("Tesla T4", 0), Some((320.0, 65.0)));
        assert_eq!(bf16("NVIDIA A10", 0), Some((600.0, 125.0)));
        assert_eq!(bf16("NVIDIA GeForce RTX 4090", 0), Some((1008.0, 165.2)));
        assert_eq!(bf16("AMD Instinct MI300X", 191), Some((5300.0, 1307.4)));
        assert_eq!(bf16("AMD Instinct MI250X / MI250", 63), Some((1638.0, 191.5)));
        assert_eq!(bf16("", 191), None);
        assert_eq!(bf16("NVIDIA T400", 0), None);
    }

    #[test]
    fn the_trace_knows_better_than_the_table() {
        let device = Device { name: "NVIDIA H200".to_owned(), bytes_per_s: Some(4.8143e12), ..Device::default() };
        assert_eq!(of_device(&Trace::default(), &device).bytes_per_s, Some(4.8143e12));
    }
}
