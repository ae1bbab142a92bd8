//! CUPTI's activity records, decoded.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};

use super::abi::{Api, ExternalCorrelation, Kernel, Memcpy, Memset, OBJECT_THREAD, Overhead, kind, overhead};
use crate::timeline::{Activity, ActivityKind, ApiCall, ClockMap, KernelTimeline, Ties};

/// What launches of an op carry as their external id: the iteration above, the op below; `u32::MAX` stands for none.
pub(super) fn external_id(iteration: u32, tag: u32) -> u64 {
    u64::from(iteration) << 32 | u64::from(tag)
}

fn known(value: u32) -> Option<u32> {
    (value != u32::MAX).then_some(value)
}

/// Turns records into a timeline. `call_name` is asked once for each function: (is of the runtime, its number).
pub(super) struct Decoder<F> {
    pub timeline: KernelTimeline,
    pub ties: Ties,
    map: ClockMap,
    call_name: F,
    kernels: HashMap<*const c_char, u32>,
    functions: HashMap<(bool, u32), u32>,
    overheads: HashMap<u32, u32>,
}

impl<F: Fn(bool, u32) -> String> Decoder<F> {
    pub(super) fn new(map: ClockMap, ties: Ties, call_name: F) -> Self {
        Decoder {
            timeline: KernelTimeline::default(),
            ties,
            map,
            call_name,
            kernels: HashMap::new(),
            functions: HashMap::new(),
            overheads: HashMap::new(),
        }
    }

    /// Decode one record.
    ///
    /// # Safety
    /// `record` must point to a whole activity record of CUPTI 12.4 or later, and the names it points to must be live.
    pub(super) unsafe fn record(&mut self, record: *const u8) {
        self.timeline.cost.records += 1;
        // SAFETY: by the caller's promise. Every record begins with its kind and has at least the fields of its kind's struct.
        unsafe {
            match record.cast::<u32>().read() {
                kind::CONCURRENT_KERNEL => self.kernel(record.cast::<Kernel>().read()),
                kind::MEMCPY => self.copy(record.cast::<Memcpy>().read()),
                kind::MEMSET => self.fill(record.cast::<Memset>().read()),
                kind::DRIVER => self.call(record.cast::<Api>().read(), false),
                kind::RUNTIME => self.call(record.cast::<Api>().read(), true),
                kind::EXTERNAL_CORRELATION => self.tag(record.cast::<ExternalCorrelation>().read()),
                kind::OVERHEAD => self.overhead(record.cast::<Overhead>().read()),
                _ => {}
            }
        }
    }

    /// # Safety
    /// See [`Decoder::record`].
    unsafe fn kernel(&mut self, k: Kernel) {
        let names = &mut self.timeline.names;
        let name = *self.kernels.entry(k.name).or_insert_with(|| {
            let text = match k.name.is_null() {
                true => "unnamed kernel".to_string(),
                // SAFETY: by the caller's promise; CUPTI shares one text among the records of a kernel.
                false => super::demangle::demangle(unsafe { CStr::from_ptr(k.name) }),
            };
            names.push(text);
            names.len() as u32 - 1
        });
        let what = ActivityKind::Kernel {
            name,
            grid: k.grid,
            block: k.block,
            registers: u32::from(k.registers),
            static_shared: k.static_shared,
            dynamic_shared: k.dynamic_shared,
        };
        let place = Place { device: k.device, context: k.context, stream: k.stream, correlation: k.correlation };
        self.activity(what, (k.start, k.end), place, (k.graph, k.graph_node));
    }

    fn copy(&mut self, c: Memcpy) {
        let what =
            ActivityKind::Copy { bytes: c.bytes, copy_kind: c.copy_kind, src_kind: c.src_kind, dst_kind: c.dst_kind };
        let place = Place { device: c.device, context: c.context, stream: c.stream, correlation: c.correlation };
        self.activity(what, (c.start, c.end), place, (c.graph, c.graph_node));
    }

    fn fill(&mut self, f: Memset) {
        let what = ActivityKind::Fill { bytes: f.bytes, value: f.value, mem_kind: f.memory_kind as u8 };
        let place = Place { device: f.device, context: f.context, stream: f.stream, correlation: f.correlation };
        self.activity(what, (f.start, f.end), place, (f.graph, f.graph_node));
    }

    fn activity(&mut self, what: ActivityKind, times: (u64, u64), place: Place, graph: (u32, u64)) {
        // CUPTI writes zeroes where it could not get device memory for the times.
        if times.0 == 0 || times.1 == 0 {
            self.timeline.untimed += 1;
            return;
        }
        self.timeline.activities.push(Activity {
            start: self.map.map(times.0),
            end: self.map.map(times.1),
            what,
            device: place.device,
            context: place.context,
            stream: place.stream,
            correlation: place.correlation,
            graph: graph.0,
            graph_node: graph.1,
            node: None,
            iteration: None,
        });
    }

    fn call(&mut self, c: Api, is_runtime: bool) {
        if self.map.is_before(c.end) {
            return;
        }
        let name = match self.functions.get(&(is_runtime, c.function)) {
            Some(&name) => name,
            None => {
                let text = (self.call_name)(is_runtime, c.function);
                let name = self.timeline.names.len() as u32;
                if ["cuGraphLaunch", "cudaGraphLaunch"].iter().any(|launch| text.starts_with(launch)) {
                    self.ties.launch_names.push(name);
                }
                self.timeline.names.push(text);
                self.functions.insert((is_runtime, c.function), name);
                name
            }
        };
        self.timeline.calls.push(ApiCall {
            start: self.map.map(c.start),
            end: self.map.map(c.end),
            name,
            thread: c.thread,
            correlation: c.correlation,
            result: c.result as i32,
            recorder: false,
        });
    }

    fn tag(&mut self, e: ExternalCorrelation) {
        let (iteration, node) = ((e.external >> 32) as u32, e.external as u32);
        self.ties.calls.insert(e.correlation, (known(node), known(iteration)));
    }

    fn overhead(&mut self, o: Overhead) {
        if self.map.is_before(o.end) {
            return;
        }
        let (text, is_own) = match o.overhead_kind {
            overhead::BUFFER_FLUSH => ("CUPTI: flushing buffers", true),
            overhead::INSTRUMENTATION => ("CUPTI: instrumenting code", true),
            overhead::RESOURCE => ("CUPTI: taking resources", true),
            overhead::MODULE_LOADING => ("loading a module", false),
            overhead::FUNCTION_LOADING => ("loading a function", false),
            overhead::COMMAND_BUFFER_FULL => ("waiting for room in the command buffer", false),
            overhead::BUFFER_REQUEST => ("CUPTI: asking for a buffer", true),
            _ => return,
        };
        let names = &mut self.timeline.names;
        let name = *self.overheads.entry(o.overhead_kind).or_insert_with(|| {
            names.push(text.to_string());
            names.len() as u32 - 1
        });
        let (start, end) = (self.map.map(o.start), self.map.map(o.end));
        if is_own {
            self.timeline.cost.inside_ns += u64::try_from(end - start).unwrap_or(0);
        }
        let thread = if o.object_kind == OBJECT_THREAD { o.object[1] } else { 0 };
        self.timeline.calls.push(ApiCall { start, end, name, thread, correlation: 0, result: 0, recorder: true });
    }

    /// Everything is read: tie it together.
    pub(super) fn finish(mut self) -> KernelTimeline {
        self.timeline.tie(&self.ties);
        self.timeline
    }
}

struct Place {
    device: u32,
    context: u32,
    stream: u32,
    correlation: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One record of `size` bytes with values written at offsets.
    struct Bytes(Vec<u64>);

    impl Bytes {
        fn new(kind: u32, size: usize) -> Bytes {
            Bytes(vec![0; size / 8]).u32(0, kind)
        }

        fn put(mut self, offset: usize, bytes: &[u8]) -> Bytes {
            for (place, &byte) in (offset..).zip(bytes) {
                let word = &mut self.0[place / 8];
                *word |= u64::from(byte) << (place % 8 * 8);
            }
            self
        }

        fn u8(self, offset: usize, value: u8) -> Bytes {
            self.put(offset, &[value])
        }

        fn u16(self, offset: usize, value: u16) -> Bytes {
            self.put(offset, &value.to_ne_bytes())
        }

        fn u32(self, offset: usize, value: u32) -> Bytes {
            self.put(offset, &value.to_ne_bytes())
        }

        fn u64(self, offset: usize, value: u64) -> Bytes {
            self.put(offset, &value.to_ne_bytes())
        }
    }

    /// A kernel as CUDA 13.0 writes it.
    fn kernel(name: &'static CStr, start: u64, correlation: u32, graph: u32, node: u64) -> Bytes {
        Bytes::new(kind::CONCURRENT_KERNEL, 216)
            .u16(6, 40)
            .u64(16, start)
            .u64(24, start + 1000)
            .u32(40, 1)
            .u32(44, 2)
            .u32(48, 13)
            .u32(52, 7)
            .u32(56, 8)
            .u32(60, 9)
            .u32(64, 128)
            .u32(68, 2)
            .u32(72, 1)
            .u32(76, 512)
            .u32(80, 65_536)
            .u32(92, correlation)
            .u64(104, name.as_ptr() as u64)
            .u64(144, node)
            .u32(156, graph)
    }

    fn call(kind: u32, function: u32, start: u64, correlation: u32) -> Bytes {
        Bytes::new(kind, 40).u32(4, function).u64(8, start).u64(16, start + 4000).u32(28, 77).u32(32, correlation)
    }

    fn external(iteration: u32, tag: u32, correlation: u32) -> Bytes {
        Bytes::new(kind::EXTERNAL_CORRELATION, 24).u32(4, 3).u64(8, external_id(iteration, tag)).u32(16, correlation)
    }

    #[test]
    fn a_buffer_becomes_a_timeline() {
        let map = ClockMap::new((1_000_000, 0), (2_000_000, 1_000_000));
        let ties = Ties {
            graphs: vec![vec![Some(5), Some(6)]],
            launches: vec![crate::timeline::GraphLaunch { graph: 0, iteration: Some(12) }],
            ..Ties::default()
        };
        let mut decoder = Decoder::new(map, ties, |is_runtime, function| match (is_runtime, function) {
            (false, 514) => "cuGraphLaunch".into(),
            (true, 1) => "cudaLaunchKernel_v7000".into(),
            _ => "cuLaunchKernelEx".into(),
        });
        let records = [
            kernel(c"add_rms_norm_bf16", 1_010_000, 31, 0, 0),
            external(11, 3, 31),
            call(kind::DRIVER, 652, 1_001_000, 31),
            external(12, u32::MAX, 32),
            call(kind::DRIVER, 514, 1_020_000, 32),
            kernel(c"silu_mul_bf16", 1_031_000, 32, 4, 1002),
            kernel(c"add_rms_norm_bf16", 1_030_000, 32, 4, 1001),
            call(kind::RUNTIME, 1, 1_040_000, 33),
            Bytes::new(kind::MEMCPY, 96)
                .u8(4, 2)
                .u8(5, 2)
                .u8(6, 1)
                .u64(8, 256)
                .u64(16, 1_050_000)
                .u64(24, 1_051_000)
                .u32(40, 13)
                .u32(44, 34),
            Bytes::new(kind::MEMSET, 88).u32(4, 255).u64(8, 64).u64(16, 1_060_000).u64(24, 1_061_000).u16(50, 2),
            kernel(c"untimed", 0, 35, 0, 0),
            Bytes::new(kind::OVERHEAD, 56)
                .u32(4, overhead::BUFFER_FLUSH)
                .u32(8, OBJECT_THREAD)
                .u32(16, 78)
                .u64(24, 1_070_000)
                .u64(32, 1_070_500),
            Bytes::new(9999, 24),
        ];
        let count = records.len() as u64;
        for record in &records {
            // SAFETY: laid out as CUPTI does, names are static.
            unsafe { decoder.record(record.0.as_ptr().cast()) };
        }
        let timeline = decoder.finish();
        assert_eq!(timeline.cost.records, count);
        assert_eq!(timeline.untimed, 1);
        let names: Vec<&str> = timeline.names.iter().map(String::as_str).collect();
        let expected = [
            "add_rms_norm_bf16",
            "cuLaunchKernelEx",
            "cuGraphLaunch",
            "silu_mul_bf16",
            "cudaLaunchKernel_v7000",
            "untimed",
            "CUPTI: flushing buffers",
        ];
        assert_eq!(names, expected);
        let [eager, first, second, copy, fill] = timeline.activities[..] else {
            panic!("{:?}", timeline.activities);
        };
        assert_eq!((eager.start, eager.end), (10_000, 11_000));
        assert_eq!((eager.device, eager.context, eager.stream, eager.correlation), (1, 2, 13, 31));
        assert_eq!((eager.node, eager.iteration), (Some(3), Some(11)));
        let what = ActivityKind::Kernel {
            name: 0,
            grid: [7, 8, 9],
            block: [128, 2, 1],
            registers: 40,
            static_shared: 512,
            dynamic_shared: 65_536,
        };
        assert_eq!(eager.what, what);
        assert_eq!((first.node, first.iteration, first.graph, first.graph_node), (Some(5), Some(12), 4, 1001));
        assert_eq!((second.node, second.start), (Some(6), 31_000));
        assert_eq!(copy.what, ActivityKind::Copy { bytes: 256, copy_kind: 2, src_kind: 2, dst_kind: 1 });
        assert_eq!(fill.what, ActivityKind::Fill { bytes: 64, value: 255, mem_kind: 2 });
        let calls: Vec<_> = timeline.calls.iter().map(|c| (c.start, c.thread, c.correlation, c.recorder)).collect();
        let expected =
            [(1_000, 77, 31, false), (20_000, 77, 32, false), (40_000, 77, 33, false), (70_000, 78, 0, true)];
        assert_eq!(calls, expected);
        assert_eq!(timeline.cost.inside_ns, 500);
    }
}
