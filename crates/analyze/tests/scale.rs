//! Time and memory grow with a trace, not with its square: many processes, devices, and ranges that nest deep.
//!
//! Sizes are those of CI, where debug builds share a machine: a quadratic place takes minutes with them.

use std::time::{Duration, Instant};

use strobe_analyze::compare::{CompareOptions, compare};
use strobe_analyze::reports::ALL;
use strobe_analyze::{Context, Options};
use strobe_trace::{
    CallKind, CallRow, Device, OpKind, OpRow, Process, RangeRow, RangeSource, StrId, Thread, Trace, TraceError, export,
};

/// What all reports of such a trace may take together. They take a second or two.
const MOST: Duration = Duration::from_secs(60);

struct Maker(Trace);

impl Maker {
    fn new() -> Self {
        Self(Trace::default())
    }

    fn process(&mut self) -> u32 {
        let process = self.0.processes.len() as u32;
        self.0.processes.push(Process { pid: 1_000 + i64::from(process), ..Process::default() });
        self.0.threads.push(Thread { process, tid: 1_000 + i64::from(process), ..Thread::default() });
        process
    }

    fn name(&mut self, text: &str) -> StrId {
        self.0.strings.intern(text)
    }

    /// A kernel with its launch, on the thread of a process.
    fn launch(&mut self, process: u32, device: u32, at: i64, correlation: i64) {
        let (call, kernel) = (self.name("cudaLaunchKernel"), self.name("gemm"));
        let (thread, kind) = (process, CallKind::Gpu);
        self.0.calls.push(CallRow { start: at, end: at + 300, name: call, thread, correlation, kind, result: 0 });
        let op = OpRow::new(OpKind::Kernel, kernel, at + 500, at + 900);
        self.0.ops.push(OpRow { process, device, correlation, stream: 7, ..op });
    }

    fn devices(&mut self, count: u32) {
        self.0.devices = (0..count).map(|ordinal| Device { ordinal, ..Device::default() }).collect();
    }

    fn done(mut self) -> Trace {
        self.0.finish();
        self.0
    }
}

/// So many processes on `devices` devices, with a few launches and an operator each.
fn processes(count: usize, devices: u32) -> Trace {
    let mut maker = Maker::new();
    maker.devices(devices);
    let operator = maker.name("aten::mm");
    let step = maker.name("step");
    for number in 0..count as i64 {
        let (process, at) = (maker.process(), number * 2_000);
        let range = |source, name| RangeRow { source, ..RangeRow::new(name, process, at, at + 1_900) };
        maker.0.ranges.push(range(RangeSource::Annotation, step));
        maker.0.ranges.push(range(RangeSource::CpuOp, operator));
        maker.launch(process, process % devices, at, 1 + number % 5);
        maker.launch(process, process % devices, at + 1_000, 11);
    }
    maker.done()
}

/// So many ranges one inside the other, each with a launch. Of different names, of one name, or operators with shapes.
fn nested(count: usize, named: impl Fn(&mut Maker, usize) -> (StrId, RangeSource)) -> Trace {
    let mut maker = Maker::new();
    maker.devices(1);
    let process = maker.process();
    let (dims, types) = (maker.name("[[4, 4], [4, 4]]"), maker.name("[\"float\", \"float\"]"));
    for number in 0..count {
        let (at, end) = (number as i64 * 1_000, (2 * count - number) as i64 * 1_000);
        let (name, source) = named(&mut maker, number);
        maker.0.ranges.push(RangeRow { source, dims, types, ..RangeRow::new(name, process, at, end) });
        maker.launch(process, 0, at + 50, number as i64 + 1);
    }
    maker.done()
}

/// So many ranges that overlap as stairs do.
fn stairs(count: usize) -> Trace {
    let mut maker = Maker::new();
    maker.devices(1);
    let process = maker.process();
    let name = maker.name("request");
    for number in 0..count as i64 {
        let (at, source) = (number * 1_000, RangeSource::StartEnd);
        let end = at + 1_000 * count as i64;
        maker.0.ranges.push(RangeRow { source, ..RangeRow::new(name, process, at, end) });
        maker.launch(process, 0, at + 50, number + 1);
    }
    maker.done()
}

fn all() -> Vec<(&'static str, Trace)> {
    let by_number = |maker: &mut Maker, number: usize| (maker.name(&format!("range {number}")), RangeSource::PushPop);
    let of_one_name = |maker: &mut Maker, _| (maker.name("forward"), RangeSource::PushPop);
    let operators = |maker: &mut Maker, _| (maker.name("aten::mm"), RangeSource::CpuOp);
    vec![
        ("processes on one device", processes(30_000, 1)),
        ("processes with a device each", processes(20_000, 20_000)),
        ("nested ranges", nested(25_000, by_number)),
        ("nested ranges of one name", nested(25_000, of_one_name)),
        ("nested operators", nested(25_000, operators)),
        ("stairs", stairs(25_000)),
    ]
}

#[test]
fn every_report_of_many_processes_and_of_deep_ranges() {
    for (name, trace) in all() {
        let begin = Instant::now();
        let context = Context::new(&trace, &Options::default());
        for entry in ALL {
            let of_report = Instant::now();
            entry.run(&context);
            let took = of_report.elapsed();
            assert!(begin.elapsed() < MOST, "{name}: {} took {took:?}", entry.name);
        }
        println!("{name}: {:?}", begin.elapsed());
    }
}

#[test]
fn comparisons_and_exports_of_them() -> Result<(), TraceError> {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("scale");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).map_err(TraceError::Stream)?;
    for (name, trace) in all() {
        let begin = Instant::now();
        let context = || vec![Context::new(&trace, &Options::default())];
        compare(&context(), &context(), &CompareOptions::default());
        assert!(begin.elapsed() < MOST, "{name}: comparing took {:?}", begin.elapsed());
        for format in export::Format::ALL {
            let begin = Instant::now();
            export::write(&trace, format, &folder.join(format.as_str()))?;
            assert!(begin.elapsed() < MOST, "{name}: {} took {:?}", format.as_str(), begin.elapsed());
        }
    }
    Ok(())
}
