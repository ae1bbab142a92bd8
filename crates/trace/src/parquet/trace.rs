//! From the tables to a [`Trace`].

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::table::{Parsed, Table, parse};
use super::{Damage, foreign};
use crate::export::tables::{copy_kind_of, left_of, memory_kind_of, names, op_kind_of, range_source_of};
use crate::{
    Allocation, CallKind, CallRow, Counter, CpuSample, Device, Distinct, ExpertLoad, Flow, GraphMode, GraphNode,
    Interner, Iteration, KernelDetail, NONE, OnCpu, OpDetail, OpKind, OpRow, PageFault, Peaks, Process, RangeKind,
    RangeRow, Source, StrId, Thread, Trace, TraceError, Window, Work, range_flags,
};

/// The tables by which an export is told.
const MARKS: [&str; 2] = ["ops.parquet", "meta.parquet"];

/// Whether a directory holds tables in Parquet; which ones shows when they are read.
pub(crate) fn is_export(directory: &Path) -> bool {
    MARKS.iter().any(|name| directory.join(name).is_file())
}

/// Reads all tables of a directory. `progress` is told the bytes done.
pub(crate) fn read(directory: &Path, progress: &mut dyn FnMut(u64)) -> Result<Trace, TraceError> {
    let mut tables = HashMap::new();
    let mut texts = Interner::new();
    let mut bytes = 0;
    let [usual, rare] = names();
    let optional = rare.iter().map(|&name| (name, true));
    for (name, is_optional) in usual.iter().map(|&name| (name, false)).chain(optional) {
        let path = directory.join(format!("{name}.parquet"));
        if is_optional && !path.is_file() {
            continue;
        }
        let file =
            std::fs::read(&path).map_err(|source| TraceError::Io { action: "read", path: path.clone(), source })?;
        match parse(&file, &mut texts) {
            Ok(Parsed::Table(table)) => tables.insert(name, table),
            Ok(Parsed::Foreign) => return Err(foreign(directory)),
            Err(damage) => return Err(damaged(&path, damage)),
        };
        bytes += file.len() as u64;
        progress(bytes);
    }
    let mut reader = Reader { directory, tables, texts, trace: Trace::default(), strings: HashMap::new(), bytes };
    reader.fill()?;
    let mut trace = reader.trace;
    trace.finish();
    Ok(trace)
}

fn damaged(path: &Path, Damage(problem): Damage) -> TraceError {
    let path = path.to_owned();
    TraceError::Corrupt { path, place: "its Parquet data".into(), problem: problem.into() }
}

struct Reader<'d> {
    directory: &'d Path,
    tables: HashMap<&'static str, Table>,
    texts: Interner,
    trace: Trace,
    /// Texts that are strings of the trace already.
    strings: HashMap<StrId, StrId>,
    bytes: u64,
}

/// A table with its name, for messages.
struct Named {
    path: PathBuf,
    table: Table,
}

impl Named {
    fn damaged<T>(&self, found: Result<T, Damage>) -> Result<T, TraceError> {
        found.map_err(|damage| damaged(&self.path, damage))
    }

    fn ints(&self, column: &str) -> Result<impl Fn(usize) -> Option<i64> + use<'_>, TraceError> {
        self.damaged(self.table.ints(column))
    }

    fn texts(&self, column: &str) -> Result<impl Fn(usize) -> Option<StrId> + use<'_>, TraceError> {
        self.damaged(self.table.texts(column))
    }

    fn floats(&self, column: &str) -> Result<impl Fn(usize) -> Option<f64> + use<'_>, TraceError> {
        self.damaged(self.table.floats(column))
    }

    fn flags(&self, column: &str) -> Result<impl Fn(usize) -> bool + use<'_>, TraceError> {
        self.damaged(self.table.flags(column))
    }

    fn invalid(&self, row: usize, problem: &str) -> TraceError {
        let (path, place) = (self.path.clone(), format!("row {}", row + 1));
        TraceError::Corrupt { path, place, problem: problem.to_owned() }
    }

    /// A number that must be there.
    fn needed(&self, row: usize, value: Option<i64>) -> Result<i64, TraceError> {
        value.ok_or_else(|| self.invalid(row, "a value is missing"))
    }

    /// An index that must be below a count.
    fn index(&self, row: usize, value: Option<i64>, below: usize) -> Result<u32, TraceError> {
        let index = value.and_then(|value| u32::try_from(value).ok()).filter(|&index| (index as usize) < below);
        index.ok_or_else(|| self.invalid(row, "it refers to what is not there"))
    }
}

/// A number that fits 32 bits; what does not is as if it were not there.
fn small(value: Option<i64>) -> Option<u32> {
    value.and_then(|value| u32::try_from(value).ok())
}

impl Reader<'_> {
    fn take(&mut self, name: &'static str) -> Result<Named, TraceError> {
        let path = self.directory.join(format!("{name}.parquet"));
        match self.tables.remove(name) {
            Some(table) => Ok(Named { path, table }),
            None => Err(damaged(&path, Damage("it is missing"))),
        }
    }

    /// A text as a string of the trace.
    fn string(&mut self, text: Option<StrId>) -> StrId {
        let Some(text) = text else { return StrId::NONE };
        match self.strings.get(&text) {
            Some(&known) => known,
            None => {
                let id = self.trace.strings.intern(self.texts.get(text));
                self.strings.insert(text, id);
                id
            }
        }
    }

    fn text(&self, text: Option<StrId>) -> &str {
        text.map_or("", |text| self.texts.get(text))
    }

    fn fill(&mut self) -> Result<(), TraceError> {
        self.meta()?;
        let devices = self.lists()?;
        self.ops(&devices)?;
        self.calls()?;
        self.ranges()?;
        self.engine_loop()?;
        self.counters(&devices)?;
        self.allocations(&devices)?;
        self.graph_nodes()?;
        self.on_cpu()?;
        self.cpu_samples()?;
        self.page_faults(&devices)?;
        self.flows()
    }

    fn meta(&mut self) -> Result<(), TraceError> {
        let table = self.take("meta")?;
        let (keys, values) = (table.texts("key")?, table.texts("value")?);
        let mut sources: Vec<Source> = Vec::new();
        let mut notices: Vec<(usize, String)> = Vec::new();
        let mut peaks: HashMap<String, String> = HashMap::new();
        for row in 0..table.table.rows {
            let (key, value) = (self.text(keys(row)).to_owned(), self.text(values(row)).to_owned());
            let (family, rest) = key.split_once('.').unwrap_or((&key, ""));
            let meta = &mut self.trace.meta;
            match family {
                "producer" => meta.producer = value,
                "session_start_utc_ns" => meta.session_start_utc_ns = value.parse().ok(),
                "partial" => meta.partial = value == "true",
                "graph_mode" => {
                    meta.graph_mode = match &value[..] {
                        "node" => Some(GraphMode::Node),
                        "graph" => Some(GraphMode::Graph),
                        _ => None,
                    }
                }
                "extra" => drop(meta.extra.insert(rest.to_owned(), value)),
                "notice" => notices.push((rest.parse().unwrap_or(usize::MAX), value)),
                "peaks" => drop(peaks.insert(rest.to_owned(), value)),
                "window" => meta.windows.extend(window(rest, &value)),
                "source" => {
                    let Some((number, what)) = rest.split_once('.') else { continue };
                    // Sources come in their order.
                    let number: usize = number.parse().unwrap_or(usize::MAX);
                    if number == sources.len() {
                        sources.push(Source { path: self.directory.to_owned(), ..Source::default() });
                    }
                    let Some(source) = sources.get_mut(number) else { continue };
                    match what {
                        "format" => source.format = value,
                        "bytes" => source.bytes = value.parse().unwrap_or(0),
                        "events" => source.events = value.parse().unwrap_or(0),
                        "lost" => source.lost = value.parse().unwrap_or(0),
                        "rank" => source.rank = value.parse().ok(),
                        _ => {}
                    }
                }
                _ => {}
            }
        }
        notices.sort_by_key(|(number, _)| *number);
        let meta = &mut self.trace.meta;
        meta.notices = notices.into_iter().map(|(_, notice)| notice).collect();
        let number = |name: &str| peaks.get(name).and_then(|value| value.parse().ok());
        if let Some((flops_per_s, bytes_per_s)) = number("flops_per_s").zip(number("bytes_per_s")) {
            meta.peaks = Some(Peaks {
                flops_per_s,
                int8_ops_per_s: number("int8_ops_per_s"),
                bf16_flops_per_s: number("bf16_flops_per_s"),
                bytes_per_s,
                note: peaks.get("note").cloned().unwrap_or_default(),
            });
        }
        // Several files that became one keep their numbers: processes and devices refer to them.
        if sources.len() < 2 {
            let first = sources.pop().unwrap_or_default();
            let events = self.event_rows();
            let (path, format) = (self.directory.to_owned(), "strobe tables (Parquet)".to_owned());
            sources = vec![Source { path, format, bytes: self.bytes, events, ..first }];
        }
        self.trace.meta.sources = sources;
        Ok(())
    }

    fn event_rows(&self) -> u64 {
        crate::export::EVENT_TABLES.iter().filter_map(|name| Some(self.tables.get(name)?.rows as u64)).sum()
    }

    /// Devices, processes and threads. Gives the index of each device number; a CPU and a GPU may share one.
    fn lists(&mut self) -> Result<HashMap<(i64, bool), u32>, TraceError> {
        let table = self.take("devices")?;
        let (numbers, ordinals, sources) = (table.ints("device")?, table.ints("ordinal")?, table.ints("source")?);
        let (names, cpus, memory) = (table.texts("name")?, table.flags("is_cpu")?, table.ints("memory_bytes")?);
        let (rates, counts, clocks) =
            (table.floats("bytes_per_s")?, table.ints("multiprocessors")?, table.floats("clock_hz")?);
        let (major, minor) = (table.ints("compute_major")?, table.ints("compute_minor")?);
        let mut devices = HashMap::new();
        for row in 0..table.table.rows {
            let number = table.needed(row, numbers(row))?;
            devices.insert((number, cpus(row)), row as u32);
            let device = Device {
                ordinal: small(ordinals(row)).unwrap_or(0),
                source: small(sources(row)).and_then(|source| u16::try_from(source).ok()).unwrap_or(0),
                name: self.text(names(row)).to_owned(),
                is_cpu: cpus(row),
                memory_bytes: memory(row).map(|bytes| bytes as u64),
                bytes_per_s: rates(row),
                multiprocessors: small(counts(row)),
                clock_hz: clocks(row),
                compute_capability: small(major(row)).zip(small(minor(row))),
            };
            self.trace.devices.push(device);
        }
        let table = self.take("processes")?;
        let (pids, names) = (table.ints("pid")?, table.texts("name")?);
        let (ranks, sources) = (table.ints("rank")?, table.ints("source")?);
        for row in 0..table.table.rows {
            let process = Process {
                pid: table.needed(row, pids(row))?,
                name: self.text(names(row)).to_owned(),
                rank: small(ranks(row)),
                source: small(sources(row)).and_then(|source| u16::try_from(source).ok()).unwrap_or(0),
            };
            self.trace.processes.push(process);
        }
        let table = self.take("threads")?;
        let (tids, names, processes) = (table.ints("tid")?, table.texts("name")?, table.ints("process")?);
        for row in 0..table.table.rows {
            let thread = Thread {
                process: table.index(row, processes(row), self.trace.processes.len())?,
                tid: table.needed(row, tids(row))?,
                name: self.text(names(row)).to_owned(),
            };
            self.trace.threads.push(thread);
        }
        Ok(devices)
    }

    fn ops(&mut self, devices: &HashMap<(i64, bool), u32>) -> Result<(), TraceError> {
        let table = self.take("ops")?;
        let (starts, ends) = (table.ints("start_ns")?, table.ints("end_ns")?);
        let (kinds, names, short_names) = (table.texts("kind")?, table.texts("name")?, table.texts("short_name")?);
        let (numbers, streams, contexts) = (table.ints("device")?, table.ints("stream")?, table.ints("context")?);
        let (processes, correlations) = (table.ints("process")?, table.ints("correlation")?);
        let (graph_nodes, bytes, iterations) =
            (table.ints("graph_node")?, table.ints("bytes")?, table.ints("iteration")?);
        let details = Details::of(&table)?;
        let works = Works::of(&table)?;
        let mut distinct_details = Distinct::default();
        let mut distinct_works = Distinct::default();
        for row in 0..table.table.rows {
            let kind = op_kind_of(self.text(kinds(row))).ok_or_else(|| table.invalid(row, "an op of unknown kind"))?;
            let number = table.needed(row, numbers(row))?;
            let is_cpu = kind == OpKind::CpuOp;
            let device = devices.get(&(number, is_cpu)).or_else(|| devices.get(&(number, !is_cpu))).copied();
            let short_name = self.string(short_names(row));
            let detail = details.detail(self, row, kind, short_name);
            let work = works.work(self, row);
            let op = OpRow {
                start: table.needed(row, starts(row))?,
                end: table.needed(row, ends(row))?,
                name: self.string(names(row)),
                kind,
                device: table.index(row, device.map(i64::from), self.trace.devices.len())?,
                stream: small(streams(row)).unwrap_or(0),
                context: small(contexts(row)).unwrap_or(0),
                process: table.index(row, processes(row), self.trace.processes.len())?,
                correlation: correlations(row).unwrap_or(0),
                launch: NONE,
                graph_node: graph_nodes(row).unwrap_or(0) as u64,
                bytes: bytes(row).unwrap_or(0) as u64,
                detail: detail.map_or(NONE, |detail| distinct_details.number(detail)),
                work: work.map_or(NONE, |work| distinct_works.number(work)),
                iteration: small(iterations(row)).unwrap_or(NONE),
            };
            self.trace.ops.push(op);
        }
        self.trace.details = distinct_details.into_values();
        self.trace.works = distinct_works.into_values();
        Ok(())
    }

    fn calls(&mut self) -> Result<(), TraceError> {
        let table = self.take("calls")?;
        let (starts, ends, kinds) = (table.ints("start_ns")?, table.ints("end_ns")?, table.texts("kind")?);
        let (names, threads) = (table.texts("name")?, table.ints("thread")?);
        let (correlations, results) = (table.ints("correlation")?, table.ints("result")?);
        for row in 0..table.table.rows {
            let kind = match self.text(kinds(row)) {
                "gpu" => CallKind::Gpu,
                "os_runtime" => CallKind::OsRuntime,
                "profiler" => CallKind::Profiler,
                _ => return Err(table.invalid(row, "a call of unknown kind")),
            };
            let call = CallRow {
                start: table.needed(row, starts(row))?,
                end: table.needed(row, ends(row))?,
                name: self.string(names(row)),
                thread: table.index(row, threads(row), self.trace.threads.len())?,
                correlation: correlations(row).unwrap_or(0),
                kind,
                result: results(row).and_then(|result| i32::try_from(result).ok()).unwrap_or(0),
            };
            self.trace.calls.push(call);
        }
        Ok(())
    }

    fn ranges(&mut self) -> Result<(), TraceError> {
        let table = self.take("ranges")?;
        let (starts, ends, sources) = (table.ints("start_ns")?, table.ints("end_ns")?, table.texts("source")?);
        let (names, domains, phases) = (table.texts("name")?, table.texts("domain")?, table.texts("phase")?);
        let (threads, iterations) = (table.ints("thread")?, table.ints("iteration")?);
        let (unclosed, crossing, marks) =
            (table.flags("unclosed")?, table.flags("cross_thread")?, table.flags("mark")?);
        let (dims, types) = (table.texts("input_dims")?, table.texts("input_types")?);
        let (values, strides) = (table.texts("concrete_inputs")?, table.texts("input_strides")?);
        for row in 0..table.table.rows {
            let source = range_source_of(self.text(sources(row)));
            let flags = [
                (unclosed(row), range_flags::UNCLOSED),
                (crossing(row), range_flags::CROSS_THREAD),
                (marks(row), range_flags::MARK),
            ];
            let range = RangeRow {
                start: table.needed(row, starts(row))?,
                end: table.needed(row, ends(row))?,
                name: self.string(names(row)),
                thread: table.index(row, threads(row), self.trace.threads.len())?,
                domain: self.string(domains(row)),
                source: source.ok_or_else(|| table.invalid(row, "a range of unknown source"))?,
                kind: RangeKind::from_name(self.text(phases(row))).unwrap_or(RangeKind::Other),
                flags: flags.into_iter().filter(|(set, _)| *set).map(|(_, bit)| bit).sum(),
                iteration: small(iterations(row)).unwrap_or(NONE),
                dims: self.string(dims(row)),
                types: self.string(types(row)),
                values: self.string(values(row)),
                strides: self.string(strides(row)),
            };
            self.trace.ranges.push(range);
        }
        Ok(())
    }

    fn engine_loop(&mut self) -> Result<(), TraceError> {
        let table = self.take("iterations")?;
        let (numbers, starts, ends) = (table.ints("iteration")?, table.ints("start_ns")?, table.ints("end_ns")?);
        let (contexts, generations) = (table.ints("context_requests")?, table.ints("generation_requests")?);
        let (prompts, tokens) = (table.ints("context_tokens")?, table.ints("generation_tokens")?);
        let (windows, waits) = (table.ints("window")?, table.ints("cpu_wait_ns")?);
        for row in 0..table.table.rows {
            let count = |value: Option<i64>| small(value).unwrap_or(0);
            let iteration = Iteration {
                iter: numbers(row).unwrap_or(0) as u64,
                start: table.needed(row, starts(row))?,
                end: table.needed(row, ends(row))?,
                context_requests: count(contexts(row)),
                generation_requests: count(generations(row)),
                context_tokens: count(prompts(row)),
                generation_tokens: count(tokens(row)),
                window: count(windows(row)),
                cpu_wait: waits(row),
            };
            self.trace.iterations.push(iteration);
        }
        let table = self.take("expert_loads")?;
        let (numbers, layers) = (table.ints("iteration")?, table.ints("layer")?);
        let (experts, tokens) = (table.ints("expert")?, table.ints("tokens")?);
        let load = |row: usize| ExpertLoad {
            iter: numbers(row).unwrap_or(0) as u64,
            layer: small(layers(row)).unwrap_or(0),
            expert: small(experts(row)).unwrap_or(0),
            tokens: small(tokens(row)).unwrap_or(0),
        };
        self.trace.expert_loads = (0..table.table.rows).map(load).collect();
        Ok(())
    }

    fn counters(&mut self, devices: &HashMap<(i64, bool), u32>) -> Result<(), TraceError> {
        let table = self.take("counters")?;
        let (names, numbers) = (table.texts("name")?, table.ints("device")?);
        let (times, values) = (table.ints("time_ns")?, table.floats("value")?);
        let mut last = None;
        for row in 0..table.table.rows {
            let time = table.needed(row, times(row))?;
            let series = (names(row), numbers(row));
            let goes_on = last == Some(series)
                && self.trace.counters.last().is_some_and(|counter| counter.times.last() <= Some(&time));
            if !goes_on {
                let name = self.text(series.0).to_owned();
                let device = self.device(&table, row, series.1, devices)?;
                self.trace.counters.push(Counter { name, device, ..Counter::default() });
                last = Some(series);
            }
            if let Some(counter) = self.trace.counters.last_mut() {
                counter.times.push(time);
                counter.values.push(values(row).unwrap_or(f64::NAN));
            }
        }
        Ok(())
    }

    /// The index of a device by its number; `None` where there is no number.
    fn device(
        &self,
        table: &Named,
        row: usize,
        number: Option<i64>,
        devices: &HashMap<(i64, bool), u32>,
    ) -> Result<Option<u32>, TraceError> {
        let Some(number) = number else { return Ok(None) };
        let found = devices.get(&(number, false)).or_else(|| devices.get(&(number, true)));
        table.index(row, found.map(|&found| found.into()), self.trace.devices.len()).map(Some)
    }

    fn allocations(&mut self, devices: &HashMap<(i64, bool), u32>) -> Result<(), TraceError> {
        let table = self.take("allocations")?;
        let (times, numbers, processes) = (table.ints("time_ns")?, table.ints("device")?, table.ints("process")?);
        let (addresses, bytes, kinds) = (table.ints("address")?, table.ints("bytes")?, table.texts("memory")?);
        let (names, allocated, reserved) =
            (table.texts("name")?, table.ints("total_allocated")?, table.ints("total_reserved")?);
        for row in 0..table.table.rows {
            let allocation = Allocation {
                time: table.needed(row, times(row))?,
                device: self.device(&table, row, numbers(row), devices)?,
                process: table.index(row, processes(row), self.trace.processes.len())?,
                address: addresses(row).unwrap_or(0) as u64,
                bytes: bytes(row).unwrap_or(0),
                mem_kind: memory_kind_of(self.text(kinds(row))),
                name: self.string(names(row)),
                total_allocated: allocated(row).map(|bytes| bytes as u64),
                total_reserved: reserved(row).map(|bytes| bytes as u64),
            };
            self.trace.allocations.push(allocation);
        }
        Ok(())
    }

    fn graph_nodes(&mut self) -> Result<(), TraceError> {
        let table = self.take("graph_nodes")?;
        let (nodes, originals) = (table.ints("graph_node")?, table.ints("original")?);
        let (starts, ends, threads) = (table.ints("start_ns")?, table.ints("end_ns")?, table.ints("thread")?);
        for row in 0..table.table.rows {
            let node = GraphNode {
                node: nodes(row).unwrap_or(0) as u64,
                original: originals(row).unwrap_or(0) as u64,
                start: table.needed(row, starts(row))?,
                end: table.needed(row, ends(row))?,
                thread: table.index(row, threads(row), self.trace.threads.len())?,
            };
            self.trace.graph_nodes.push(node);
        }
        Ok(())
    }

    /// A table that only some exports have.
    fn take_rare(&mut self, name: &'static str) -> Option<Named> {
        let path = self.directory.join(format!("{name}.parquet"));
        self.tables.remove(name).map(|table| Named { path, table })
    }

    fn on_cpu(&mut self) -> Result<(), TraceError> {
        let Some(table) = self.take_rare("on_cpu") else { return Ok(()) };
        let (starts, ends, threads) = (table.ints("start_ns")?, table.ints("end_ns")?, table.ints("thread")?);
        let (cpus, left) = (table.ints("cpu")?, table.texts("left")?);
        for row in 0..table.table.rows {
            let thread = match threads(row) {
                None => NONE,
                thread => table.index(row, thread, self.trace.threads.len())?,
            };
            let on = OnCpu {
                start: table.needed(row, starts(row))?,
                end: table.needed(row, ends(row))?,
                thread,
                cpu: small(cpus(row)).unwrap_or(0),
                left: left_of(self.text(left(row))),
            };
            self.trace.on_cpu.push(on);
        }
        Ok(())
    }

    fn cpu_samples(&mut self) -> Result<(), TraceError> {
        let Some(table) = self.take_rare("cpu_samples") else { return Ok(()) };
        let (times, threads) = (table.ints("time_ns")?, table.ints("thread")?);
        let (functions, modules) = (table.texts("function")?, table.texts("module")?);
        for row in 0..table.table.rows {
            let sample = CpuSample {
                time: table.needed(row, times(row))?,
                thread: table.index(row, threads(row), self.trace.threads.len())?,
                function: self.string(functions(row)),
                module: self.string(modules(row)),
            };
            self.trace.cpu_samples.push(sample);
        }
        Ok(())
    }

    fn page_faults(&mut self, devices: &HashMap<(i64, bool), u32>) -> Result<(), TraceError> {
        let Some(table) = self.take_rare("page_faults") else { return Ok(()) };
        let (starts, ends, processes) = (table.ints("start_ns")?, table.ints("end_ns")?, table.ints("process")?);
        let (numbers, addresses) = (table.ints("device")?, table.ints("address")?);
        let (counts, accesses, functions) = (table.ints("count")?, table.ints("access")?, table.texts("function")?);
        for row in 0..table.table.rows {
            let fault = PageFault {
                start: table.needed(row, starts(row))?,
                end: table.needed(row, ends(row))?,
                process: table.index(row, processes(row), self.trace.processes.len())?,
                device: self.device(&table, row, numbers(row), devices)?,
                address: addresses(row).unwrap_or(0) as u64,
                count: small(counts(row)).unwrap_or(1),
                access: small(accesses(row)).and_then(|access| u8::try_from(access).ok()).unwrap_or(0),
                function: self.string(functions(row)),
            };
            self.trace.page_faults.push(fault);
        }
        Ok(())
    }

    fn flows(&mut self) -> Result<(), TraceError> {
        let Some(table) = self.take_rare("flows") else { return Ok(()) };
        let (starts, ends) = (table.ints("start_ns")?, table.ints("end_ns")?);
        let (from, to) = (table.ints("from_thread")?, table.ints("to_thread")?);
        for row in 0..table.table.rows {
            let threads = self.trace.threads.len();
            let flow = Flow {
                start: table.needed(row, starts(row))?,
                end: table.needed(row, ends(row))?,
                from: table.index(row, from(row), threads)?,
                to: table.index(row, to(row), threads)?,
            };
            self.trace.flows.push(flow);
        }
        Ok(())
    }
}

type Ints<'t> = Box<dyn Fn(usize) -> Option<i64> + 't>;
type Texts<'t> = Box<dyn Fn(usize) -> Option<StrId> + 't>;

/// The columns of what an op did, by kind.
struct Details<'t> {
    sizes: [Ints<'t>; 9],
    copy: [Texts<'t>; 3],
    numbers: [Ints<'t>; 7],
}

impl<'t> Details<'t> {
    fn of(table: &'t Named) -> Result<Self, TraceError> {
        let ints = |name: &str| -> Result<Ints<'t>, TraceError> { Ok(Box::new(table.ints(name)?)) };
        let texts = |name: &str| -> Result<Texts<'t>, TraceError> { Ok(Box::new(table.texts(name)?)) };
        Ok(Self {
            sizes: [
                ints("grid_x")?,
                ints("grid_y")?,
                ints("grid_z")?,
                ints("block_x")?,
                ints("block_y")?,
                ints("block_z")?,
                ints("registers")?,
                ints("static_shared_bytes")?,
                ints("dynamic_shared_bytes")?,
            ],
            copy: [texts("copy_kind")?, texts("source_memory")?, texts("destination_memory")?],
            numbers: [
                ints("copy_kind_number")?,
                ints("source_device")?,
                ints("destination_device")?,
                ints("fill_value")?,
                ints("graph")?,
                ints("graph_exec")?,
                ints("migration_cause")?,
            ],
        })
    }

    fn detail(&self, reader: &Reader, row: usize, kind: OpKind, short_name: StrId) -> Option<OpDetail> {
        let memory = |place: usize| memory_kind_of(reader.text(self.copy[place](row)));
        let number = |place: usize| small(self.numbers[place](row));
        match kind {
            OpKind::Kernel | OpKind::CpuOp => {
                // Every launch that was recorded says how much shared memory it took.
                self.sizes[8](row)?;
                let [gx, gy, gz, bx, by, bz, registers, static_shared, dynamic_shared] =
                    std::array::from_fn(|size| small(self.sizes[size](row)).unwrap_or(0));
                let (grid, block) = ([gx, gy, gz], [bx, by, bz]);
                Some(OpDetail::Kernel(KernelDetail {
                    short_name,
                    grid,
                    block,
                    registers,
                    static_shared,
                    dynamic_shared,
                }))
            }
            OpKind::Memcpy => {
                let said = copy_kind_of(reader.text(self.copy[0](row)));
                let copy_kind = number(0).and_then(|kind| u8::try_from(kind).ok()).or(said)?;
                let (src_kind, dst_kind, src_device, dst_device) = (memory(1), memory(2), number(1), number(2));
                let cause = number(6).and_then(|cause| u8::try_from(cause).ok()).unwrap_or(0);
                Some(OpDetail::Memcpy { copy_kind, src_kind, dst_kind, src_device, dst_device, cause })
            }
            OpKind::Memset => Some(OpDetail::Memset { value: number(3)?, mem_kind: memory(2) }),
            OpKind::Graph => Some(OpDetail::Graph { graph: number(4)?, exec: number(5).unwrap_or(0) }),
        }
    }
}

/// The columns of what an op means in the model.
struct Works<'t> {
    op: Texts<'t>,
    category: Texts<'t>,
    numbers: [Ints<'t>; 6],
}

impl<'t> Works<'t> {
    fn of(table: &'t Named) -> Result<Self, TraceError> {
        let ints = |name: &str| -> Result<Ints<'t>, TraceError> { Ok(Box::new(table.ints(name)?)) };
        Ok(Self {
            op: Box::new(table.texts("op")?),
            category: Box::new(table.texts("category")?),
            numbers: [ints("layer")?, ints("m")?, ints("n")?, ints("k")?, ints("work_bytes")?, ints("flops")?],
        })
    }

    fn work(&self, reader: &mut Reader, row: usize) -> Option<Work> {
        let op = (self.op)(row)?;
        let amount = |place: usize| self.numbers[place](row).unwrap_or(0) as u64;
        Some(Work {
            op: reader.string(Some(op)),
            category: reader.string((self.category)(row)),
            layer: small(self.numbers[0](row)),
            shape: [amount(1), amount(2), amount(3)],
            bytes: amount(4),
            flops: amount(5),
        })
    }
}

/// A profile window, as `FIRST-LAST complete`.
fn window(index: &str, value: &str) -> Option<Window> {
    let (range, state) = value.split_once(' ')?;
    let (first, last) = range.split_once('-')?;
    Some(Window {
        index: index.parse().ok()?,
        first: first.parse().ok()?,
        last: last.parse().ok()?,
        complete: state == "complete",
    })
}
