//! Puts the parts of a scan together: names, threads, processes and devices get their numbers in the trace.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use super::database::Database;
use super::ids::{machine_of, pid_of, process_of, tid_of};
use super::part::{DeviceKey, EVENT_TABLES, Faults, NameKey, Part, Series, SeriesKey, renumber};
use super::schema::{self, key};
use super::strobe::{CPU_DEVICE, Own};
use crate::model::repeated_calls;
use crate::{
    Counter, Device, Flow, GraphMode, NONE, OpDetail, Process, Source, StrId, Thread, Trace, TraceError, range_flags,
};

/// The trace that these events make.
pub(super) fn trace(database: &Database, path: &Path, own: Own, events: Part) -> Result<Trace, TraceError> {
    let mut merge = Merge { database, trace: Trace::default(), own, faults: Faults::default() };
    merge.run(events)?;
    merge.about(path)?;
    let repeated = merge.trace.finish_counting();
    if !merge.own.side.own {
        merge.trace.meta.notices.extend(repeated_calls(repeated));
    }
    Ok(merge.trace)
}

struct Merge<'d> {
    database: &'d Database,
    trace: Trace,
    own: Own,
    faults: Faults,
}

/// Machine and GPU.
type GpuKey = (i64, i64);

/// What the numbers of the file became.
struct Numbers {
    processes: HashMap<i64, u32>,
    threads: HashMap<i64, u32>,
    devices: HashMap<DeviceKey, u32>,
    gpus: HashMap<GpuKey, u32>,
}

impl Merge<'_> {
    fn run(&mut self, events: Part) -> Result<(), TraceError> {
        let mut part = events;
        // Ops of a CPU engine run on threads, which are numbered with all others; the names of works come with them.
        let cpu_ops = part.ops.len();
        let own_threads = std::mem::take(&mut self.own.cpu.threads.keys);
        let mut works = std::mem::take(&mut self.own.works);
        let mut own_names = Vec::new();
        let own_threads: Vec<u32> = own_threads.iter().map(|&key| part.threads.number(key)).collect();
        part.absorb(std::mem::take(&mut self.own.cpu), &mut own_names);
        part.ops.stream[cpu_ops..].iter_mut().for_each(|thread| *thread = own_threads[*thread as usize]);

        let mut known: BTreeSet<i64> = part.processes.keys.iter().copied().collect();
        known.extend(part.threads.keys.iter().map(|&thread| process_of(thread)));
        known.extend(self.own.processes.iter().map(|(id, _)| *id));
        let switches = std::mem::take(&mut part.switches);
        let (mut on_cpu, mut cpu_samples, lone) =
            switches.finish(&known, &mut part.names, |thread| part.threads.number(thread));
        part.faults.lone_switches = lone;

        let names = self.names(&part)?;
        let name = |local: &mut StrId| *local = names.get(local.0 as usize).copied().unwrap_or(StrId::NONE);
        let numbers = self.number(&part, &names)?;
        let domain_names: HashMap<(i64, i64), StrId> =
            part.domain_names.iter().map(|&(key, name)| (key, names[name.0 as usize])).collect();
        self.trace.meta.graph_mode = self.graph_mode()?.or(match (part.has_graphs, part.has_graph_nodes) {
            (true, _) => Some(GraphMode::Graph),
            (_, true) => Some(GraphMode::Node),
            _ => None,
        });
        self.faults.add(&part.faults);
        let threads: Vec<u32> = part.threads.keys.iter().map(|key| numbers.threads[key]).collect();
        let processes: Vec<u32> = part.processes.keys.iter().map(|key| numbers.processes[key]).collect();
        let devices: Vec<u32> = part.devices.keys.iter().map(|key| numbers.devices[key]).collect();
        let domains = part.domains.keys.iter().map(|key| domain_names.get(key).copied().unwrap_or(StrId::NONE));
        let domains: Vec<StrId> = domains.collect();

        part.ops.name.iter_mut().for_each(name);
        renumber(&mut part.ops.device, &devices);
        renumber(&mut part.ops.process, &processes);
        let streams = &mut part.ops.stream[cpu_ops..];
        renumber(streams, &threads);
        part.calls.name.iter_mut().for_each(name);
        renumber(&mut part.calls.thread, &threads);
        let ranges = &mut part.ranges;
        let texts = [&mut ranges.name, &mut ranges.dims, &mut ranges.types, &mut ranges.values, &mut ranges.strides];
        for column in texts {
            column.iter_mut().for_each(name);
        }
        renumber(&mut part.ranges.thread, &threads);
        let named = part.ranges.domain.iter_mut().filter(|domain| domain.is_some());
        named.for_each(|domain| *domain = domains[domain.0 as usize]);
        if !self.own.side.own {
            let open = part.ranges.end.iter_mut().zip(&part.ranges.flags);
            let open = open.filter(|(_, flags)| *flags & range_flags::UNCLOSED != 0);
            open.for_each(|(end, _)| *end = part.last_nvtx.max(*end));
        }
        for allocation in &mut part.allocations {
            allocation.process = processes[allocation.process as usize];
            allocation.device = allocation.device.map(|device| devices[device as usize]);
            name(&mut allocation.name);
        }
        part.graph_nodes.iter_mut().for_each(|node| node.thread = threads[node.thread as usize]);
        let strings = &self.trace.strings;
        // Columns of names may not be empty: a name without letters stands for none.
        let told = |local: &mut StrId| {
            name(local);
            if local.is_some() && strings.get(*local).is_empty() {
                *local = StrId::NONE;
            }
        };
        let known = on_cpu.iter_mut().filter(|on| on.thread != NONE);
        known.for_each(|on| on.thread = threads[on.thread as usize]);
        for sample in &mut cpu_samples {
            sample.thread = threads[sample.thread as usize];
            told(&mut sample.function);
            told(&mut sample.module);
        }
        for fault in &mut part.page_faults {
            fault.process = processes[fault.process as usize];
            fault.device = fault.device.map(|device| devices[device as usize]);
            told(&mut fault.function);
        }
        let flows = std::mem::take(&mut self.own.flows);
        let thread = |id: i64| numbers.threads.get(&id).copied();
        let flow = |(start, end, from, to)| Some(Flow { start, end, from: thread(from)?, to: thread(to)? });
        self.trace.flows = flows.into_iter().filter_map(flow).collect();
        let mut details = part.details.into_values();
        for detail in &mut details {
            if let OpDetail::Kernel(kernel) = detail {
                name(&mut kernel.short_name);
            }
        }
        for work in &mut works {
            for text in [&mut work.op, &mut work.category] {
                *text = own_names.get(text.0 as usize).copied().unwrap_or(StrId::NONE);
                name(text);
            }
        }
        self.trace.ops = part.ops;
        self.trace.calls = part.calls;
        self.trace.ranges = part.ranges;
        self.trace.allocations = part.allocations;
        self.trace.graph_nodes = part.graph_nodes;
        self.trace.on_cpu = on_cpu;
        self.trace.cpu_samples = cpu_samples;
        self.trace.page_faults = part.page_faults;
        self.trace.details = details;
        self.trace.works = works;
        self.trace.iterations = std::mem::take(&mut self.own.iterations);
        self.trace.expert_loads = std::mem::take(&mut self.own.expert_loads);
        self.counters(part.series, &numbers)?;
        self.check_counts()
    }

    /// Whether a file of strobe's still has what was written.
    fn check_counts(&self) -> Result<(), TraceError> {
        let (ops, calls, ranges) = (self.trace.ops.len(), self.trace.calls.len(), self.trace.ranges.len());
        for (name, found) in [(key::OPS, ops), (key::CALLS, calls), (key::RANGES, ranges)] {
            let written = self.own.facts.get(name);
            if let Some(written) = written.filter(|written| **written != found.to_string()) {
                return Err(self.database.corrupt(name, format!("{written} were written, {found} are there")));
            }
        }
        Ok(())
    }

    /// The strings that rows refer to, and only those: `StringIds` also holds what nobody should see.
    fn names(&mut self, part: &Part) -> Result<Vec<StrId>, TraceError> {
        let keys = part.names.new.iter();
        let mut texts: HashMap<i64, Option<String>> = keys
            .clone()
            .filter_map(|key| match key {
                NameKey::Id(id) | NameKey::File(id) => Some((*id, None)),
                _ => None,
            })
            .collect();
        let mut repeated = 0;
        self.database.scan("StringIds", &["id", "value"], |row| {
            match row.int(0).and_then(|id| texts.get_mut(&id)) {
                Some(Some(_)) => repeated += 1,
                Some(text) => *text = row.text(1).map(|text| text.into_owned()),
                None => {}
            }
        })?;
        self.faults.repeated_names = repeated;
        self.faults.unknown_names = texts.values().filter(|text| text.is_none()).count() as u64;
        let labels = self.copy_labels()?;
        let strings = &mut self.trace.strings;
        let known = |id: &i64| texts.get(id).and_then(|text| text.as_deref()).unwrap_or("[unknown]");
        let text_of = |key: &NameKey| match key {
            NameKey::Id(id) => strings.intern(known(id)),
            NameKey::File(id) => strings.intern(file_name(known(id))),
            NameKey::Text(text) => strings.intern(&String::from_utf8_lossy(text)),
            NameKey::Fixed(text) => strings.intern(text),
            NameKey::Copy(kind) => strings.intern(&copy_name(&labels, *kind)),
        };
        Ok(keys.map(text_of).collect())
    }

    /// How this version of nsys words the kinds of copies.
    fn copy_labels(&self) -> Result<HashMap<i64, String>, TraceError> {
        let mut labels: HashMap<i64, String> =
            schema::COPY_LABELS.iter().enumerate().map(|(kind, label)| (kind as i64, (*label).to_owned())).collect();
        self.database.scan("ENUM_CUDA_MEMCPY_OPER", &["id", "label"], |row| {
            if let (Some(kind), Some(label)) = (row.int(0), row.text(1)) {
                labels.insert(kind, label.into_owned());
            }
        })?;
        Ok(labels)
    }

    /// Numbers processes, threads and devices: as strobe's tables say, else in the order of their ids.
    fn number(&mut self, part: &Part, names: &[StrId]) -> Result<Numbers, TraceError> {
        let threads: BTreeSet<i64> = part.threads.keys.iter().copied().collect();
        let mut processes: BTreeSet<i64> = part.processes.keys.iter().copied().collect();
        processes.extend(threads.iter().map(|&thread| process_of(thread)));

        let mut numbers = Numbers {
            processes: HashMap::new(),
            threads: HashMap::new(),
            devices: HashMap::new(),
            gpus: HashMap::new(),
        };
        for (id, process) in std::mem::take(&mut self.own.processes) {
            numbers.processes.insert(id, self.trace.processes.len() as u32);
            self.trace.processes.push(process);
        }
        let process_names = self.process_names()?;
        for id in processes {
            if let Entry::Vacant(number) = numbers.processes.entry(id) {
                number.insert(self.trace.processes.len() as u32);
                let name = process_names.get(&id).cloned().unwrap_or_default();
                self.trace.processes.push(Process { pid: pid_of(id), name, rank: None, source: 0 });
            }
        }
        let thread_names = self.thread_names(&threads, part, names)?;
        for (id, mut thread) in std::mem::take(&mut self.own.threads) {
            thread.process = numbers.processes.get(&process_of(id)).copied().unwrap_or(0);
            numbers.threads.insert(id, self.trace.threads.len() as u32);
            self.trace.threads.push(thread);
        }
        for id in threads {
            if let Entry::Vacant(number) = numbers.threads.entry(id) {
                number.insert(self.trace.threads.len() as u32);
                let process = numbers.processes[&process_of(id)];
                let name = thread_names.get(&id).cloned().unwrap_or_default();
                self.trace.threads.push(Thread { process, tid: tid_of(id), name });
            }
        }
        self.number_devices(part, &mut numbers)?;
        Ok(numbers)
    }

    fn number_devices(&mut self, part: &Part, numbers: &mut Numbers) -> Result<(), TraceError> {
        let mut given = HashMap::new();
        for (id, device) in std::mem::take(&mut self.own.devices) {
            given.insert(id, self.trace.devices.len() as u32);
            self.trace.devices.push(device);
        }
        let gpu_of = self.gpu_ids()?;
        let keys: BTreeSet<DeviceKey> = part.devices.keys.iter().copied().collect();
        let gpu = |&(process, device): &DeviceKey| {
            (machine_of(process), gpu_of.get(&(pid_of(process), device)).copied().unwrap_or(device))
        };
        let sampled = part.series.keys().map(|key| series_gpu(*key));
        let unknown = keys.iter().filter(|(_, device)| !given.contains_key(device)).map(gpu);
        let gpus: BTreeSet<GpuKey> =
            if given.is_empty() { unknown.chain(sampled).collect() } else { unknown.collect() };
        let known = self.known_gpus()?;
        for key in gpus {
            numbers.gpus.insert(key, self.trace.devices.len() as u32);
            let (_, id) = key;
            let device = if id == CPU_DEVICE {
                Device { name: "CPU".to_owned(), is_cpu: true, ..Device::default() }
            } else {
                let alike = || known.iter().find(|((_, other), _)| *other == id).map(|(_, device)| device);
                let device = known.get(&key).or_else(alike).cloned().unwrap_or_default();
                Device { ordinal: id as u32, ..device }
            };
            self.trace.devices.push(device);
        }
        for key in &keys {
            let number = given.get(&key.1).copied().unwrap_or_else(|| numbers.gpus[&gpu(key)]);
            numbers.devices.insert(*key, number);
        }
        // Counters of strobe's own files name their device by its number.
        numbers.gpus.extend(given.into_iter().map(|(id, number)| ((OWN, id), number)));
        Ok(())
    }

    /// Which GPU a process means by a device number: visible devices may be a selection, or reordered.
    fn gpu_ids(&self) -> Result<HashMap<(i64, i64), i64>, TraceError> {
        let mut gpus = HashMap::new();
        self.database.scan("TARGET_INFO_CUDA_DEVICE", &["pid", "cudaId", "gpuId"], |row| {
            if let (Some(pid), Some(cuda), Some(gpu)) = (row.int(0), row.int(1), row.int(2)) {
                gpus.insert((pid_of(pid << 24), cuda), gpu);
            }
        })?;
        Ok(gpus)
    }

    fn known_gpus(&self) -> Result<BTreeMap<GpuKey, Device>, TraceError> {
        let columns = [
            "vmId",
            "id",
            "name",
            "totalMemory",
            "memoryBandwidth",
            "clockRate",
            "smCount",
            "computeMajor",
            "computeMinor",
        ];
        let mut gpus = BTreeMap::new();
        self.database.scan("TARGET_INFO_GPU", &columns, |row| {
            let machine = row.int(0).map_or(1, machine_of);
            // Columns of older versions are zero where nothing is known.
            let positive = |cell| row.int(cell).filter(|value| *value > 0);
            let device = Device {
                name: row.text(2).unwrap_or_default().into_owned(),
                memory_bytes: positive(3).map(|bytes| bytes as u64),
                bytes_per_s: positive(4).map(|rate| rate as f64),
                clock_hz: positive(5).map(|rate| rate as f64),
                multiprocessors: positive(6).map(|count| count as u32),
                compute_capability: positive(7)
                    .zip(row.int(8).filter(|minor| *minor >= 0))
                    .map(|(major, minor)| (major as u32, minor as u32)),
                ..Device::default()
            };
            gpus.insert((machine, row.int(1).unwrap_or(0)), device);
        })?;
        Ok(gpus)
    }

    fn process_names(&self) -> Result<HashMap<i64, String>, TraceError> {
        let mut names = HashMap::new();
        self.database.scan("PROCESSES", &["globalPid", "name"], |row| {
            if let (Some(process), Some(name)) = (row.int(0), row.text(1)) {
                names.insert(process_of(process), program_name(&name).to_owned());
            }
        })?;
        Ok(names)
    }

    /// Names of those threads that have events: the one with the highest priority, else what NVTX says.
    fn thread_names(
        &self,
        threads: &BTreeSet<i64>,
        part: &Part,
        names: &[StrId],
    ) -> Result<HashMap<i64, String>, TraceError> {
        let mut best: HashMap<i64, (i64, i64)> = HashMap::new();
        self.database.scan("ThreadNames", &["globalTid", "nameId", "priority"], |row| {
            let (Some(thread), Some(name)) = (row.int(0), row.int(1)) else { return };
            let priority = row.int(2).unwrap_or(i64::MIN);
            if threads.contains(&thread) && best.get(&thread).is_none_or(|(other, _)| *other < priority) {
                best.insert(thread, (priority, name));
            }
        })?;
        let mut texts: HashMap<i64, String> = HashMap::new();
        let wanted: BTreeSet<i64> = best.values().map(|(_, name)| *name).collect();
        if !wanted.is_empty() {
            self.database.scan("StringIds", &["id", "value"], |row| {
                if let Some(id) = row.int(0).filter(|id| wanted.contains(id)) {
                    texts.insert(id, row.text(1).unwrap_or_default().into_owned());
                }
            })?;
        }
        let from_nvtx = part.thread_names.iter();
        let from_nvtx = from_nvtx.map(|(thread, name)| (*thread, self.trace.strings.get(names[name.0 as usize])));
        let mut named: HashMap<i64, String> = from_nvtx.map(|(thread, name)| (thread, name.to_owned())).collect();
        named.extend(best.into_iter().filter_map(|(thread, (_, name))| Some((thread, texts.get(&name)?.clone()))));
        Ok(named)
    }

    fn counters(&mut self, series: BTreeMap<SeriesKey, Series>, numbers: &Numbers) -> Result<(), TraceError> {
        let mut names: HashMap<SeriesKey, String> = HashMap::new();
        self.database.scan("TARGET_INFO_GPU_METRICS", &["typeId", "metricId", "metricName"], |row| {
            if let (Some(kind), Some(metric), Some(name)) = (row.int(0), row.int(1), row.text(2)) {
                names.insert((kind, metric), name.into_owned());
            }
        })?;
        for (key, (times, values)) in series {
            let device = match self.own.counters.get(&key) {
                Some(device) => device.map(|id| (OWN, id)),
                None => Some(series_gpu(key)),
            };
            let mut order: Vec<u32> = (0..times.len() as u32).collect();
            order.sort_by_key(|&index| times[index as usize]); // stable
            self.trace.counters.push(Counter {
                name: names.get(&key).cloned().unwrap_or_else(|| format!("metric {}", key.1)),
                device: device.and_then(|key| numbers.gpus.get(&key).copied()),
                times: order.iter().map(|&index| times[index as usize]).collect(),
                values: order.iter().map(|&index| values[index as usize]).collect(),
            });
        }
        Ok(())
    }

    /// Of what was set for the capture, only how graphs are recorded is read.
    fn graph_mode(&self) -> Result<Option<GraphMode>, TraceError> {
        let mut mode = None;
        self.database.scan("META_DATA_CAPTURE", &["name", "value"], |row| {
            if row.raw(0).is_some_and(|name| name.ends_with(b"CUDA_GRAPH_TRACE_OPTIONS:MODE")) {
                mode = match row.text(1).unwrap_or_default().to_ascii_lowercase().as_str() {
                    "graph" => Some(GraphMode::Graph),
                    "node" => Some(GraphMode::Node),
                    _ => mode,
                };
            }
        })?;
        Ok(mode)
    }

    /// What is known about the trace as a whole.
    fn about(&mut self, path: &Path) -> Result<(), TraceError> {
        let mut start = None;
        self.database.scan("TARGET_INFO_SESSION_START_TIME", &["utcEpochNs"], |row| start = start.or(row.int(0)))?;
        let mut capture = None;
        self.database.scan("ANALYSIS_DETAILS", &["duration"], |row| capture = capture.or(row.int(0)))?;
        let mut versions: HashMap<String, String> = HashMap::new();
        for table in ["META_DATA_EXPORT", "EXPORT_META_DATA"] {
            self.database.scan(table, &["name", "value"], |row| {
                let name = row.text(0).unwrap_or_default();
                if matches!(&*name, "EXPORT_PRODUCT_VERSION" | "EXPORT_SCHEMA_VERSION") {
                    versions.insert(name.into_owned(), row.text(1).unwrap_or_default().into_owned());
                }
            })?;
        }
        let version = |name: &str| versions.get(name).map_or("of unknown version", String::as_str);
        let events = self.trace.ops.len() + self.trace.calls.len() + self.trace.ranges.len();
        let events = events
            + self.trace.allocations.len()
            + self.trace.graph_nodes.len()
            + self.trace.on_cpu.len()
            + self.trace.cpu_samples.len()
            + self.trace.page_faults.len()
            + self.trace.counters.iter().map(|c| c.times.len()).sum::<usize>();
        let source = Source {
            path: path.to_owned(),
            format: match self.own.side.own {
                true => "strobe trace (Nsight Systems SQLite)".to_owned(),
                false => format!("Nsight Systems SQLite, schema {}", version("EXPORT_SCHEMA_VERSION")),
            },
            bytes: u64::from(self.database.header.pages) * self.database.header.page_size as u64,
            events: events as u64,
            lost: self.faults.absurd + self.faults.no_time,
            rank: None,
        };
        let own = &mut self.own;
        let meta = &mut self.trace.meta;
        meta.session_start_utc_ns = start;
        meta.windows = std::mem::take(&mut own.windows);
        if own.side.own {
            meta.producer = own.facts.get(key::PRODUCER).cloned().unwrap_or_default();
            meta.partial = own.facts.get(key::PARTIAL).is_some_and(|value| value == "1");
            meta.peaks = own.peaks();
            meta.extra = own.facts_under(key::EXTRA).map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            meta.notices = own.facts_under(key::NOTICE).map(|(_, notice)| notice.to_owned()).collect();
        } else {
            meta.producer = format!("Nsight Systems {}", version("EXPORT_PRODUCT_VERSION"));
            let capture = capture.map(|ns| ("capture_ns".to_owned(), ns.to_string()));
            meta.extra.extend(capture);
        }
        // Several files that became one keep their numbers: processes and devices refer to them.
        meta.sources = match own.sources.len() {
            0 | 1 => vec![Source { rank: own.sources.first().and_then(|s| s.rank), ..source }],
            _ => own.sources.drain(..).map(|s| Source { path: path.to_owned(), ..s }).collect(),
        };
        self.notices()
    }

    fn notices(&mut self) -> Result<(), TraceError> {
        let mut dropped = 0_u64;
        self.database.scan("DIAGNOSTIC_EVENT", &["severity", "text"], |row| {
            const WARNING: i64 = 2;
            const ERROR: i64 = 3;
            let text = row.text(1).unwrap_or_default().to_ascii_lowercase();
            let lost = ["dropped", "were lost", "discarded", "overflow"].iter().any(|word| text.contains(word));
            dropped += u64::from(lost && matches!(row.int(0), Some(WARNING | ERROR)));
        })?;
        let unread_metrics = !self.database.has("GPU_METRICS") && self.database.has_column("GENERIC_EVENTS", "data");
        let notices = &mut self.trace.meta.notices;
        let faults = &self.faults;
        let mut tell = |count: u64, text: String| {
            if count > 0 {
                notices.push(text);
            }
        };
        for fault in self.database.faults(&EVENT_TABLES) {
            tell(1, fault);
        }
        tell(
            faults.repeated_names,
            format!("{} of StringIds left out: their id stands for another text already", rows(faults.repeated_names)),
        );
        tell(faults.unknown_names, format!("{} not in StringIds: shown as [unknown]", ids(faults.unknown_names)));
        tell(dropped, format!("the profiler says {} that it lost data", times(dropped)));
        tell(
            faults.absurd,
            format!("{} left out: more than 10 years away from the start of the session", rows(faults.absurd)),
        );
        tell(faults.no_time, format!("{} left out: without a time or a value", rows(faults.no_time)));
        tell(faults.backward, format!("{} kept with no length: they end before they start", rows(faults.backward)));
        tell(
            faults.untimed_graphs,
            format!("{} of graph launches left out: they have no time on a device", rows(faults.untimed_graphs)),
        );
        tell(
            faults.lone_switches,
            format!("{} of threads between CPUs without the other half: taken as running", rows(faults.lone_switches)),
        );
        tell(
            u64::from(self.database.lost_log),
            "the file's write-ahead log (-wal) is not beside it: rows that only the log held are missing".to_owned(),
        );
        tell(
            u64::from(unread_metrics),
            "generic events (in older exports also GPU metrics) are in the file but not read".to_owned(),
        );
        tell(
            u64::from(self.trace.ops.is_empty()),
            "the file has no GPU rows: no kernel, copy, fill or graph was recorded".to_owned(),
        );
        Ok(())
    }
}

/// In place of a machine: the number is that of `STROBE_DEVICE`.
const OWN: i64 = i64::MIN;

fn rows(count: u64) -> String {
    if count == 1 { "1 row".to_owned() } else { format!("{count} rows") }
}

fn ids(count: u64) -> String {
    if count == 1 { "1 id of a name is".to_owned() } else { format!("{count} ids of names are") }
}

fn times(count: u64) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

/// The GPU that samples belong to: the lowest byte of their type.
fn series_gpu((kind, _): SeriesKey) -> GpuKey {
    (machine_of(kind), kind & 0xFF)
}

fn copy_name(labels: &HashMap<i64, String>, kind: i64) -> String {
    format!("[CUDA memcpy {}]", labels.get(&kind).map_or("Unknown", String::as_str))
}

/// The program without its directory and arguments: those may hold secrets.
fn program_name(text: &str) -> &str {
    file_name(text.split_whitespace().next().unwrap_or(""))
}

/// A path without its directory, which may name somebody.
fn file_name(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or("")
}
