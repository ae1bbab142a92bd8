//! Reading traces of any known format, told by content, and putting several files of one run together.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Chain, Cursor, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use flate2::read::MultiGzDecoder;

use crate::{GraphMode, NONE, OpDetail, StrId, Trace, TraceError, kineto, nsys, parquet, ranks};

/// How far reading has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The file that is being read.
    pub file: &'a Path,
    /// Bytes of all files that are done, as they are on disk.
    pub done_bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
}

/// Reads one trace, or several files as the ranks of one run. A directory stands for the traces in it.
pub fn read_files(paths: &[PathBuf], on_progress: &mut dyn FnMut(Progress)) -> Result<Trace, TraceError> {
    let mut files = Vec::new();
    for path in paths {
        // A directory of tables is one trace.
        if path.is_dir() && !parquet::is_export(path) {
            files.extend(traces_in(path)?)
        } else {
            files.push(path.clone())
        }
    }
    let mut seen = BTreeSet::new();
    for path in &files {
        let canonical = path.canonicalize().map_err(|source| io_error("open", path, source))?;
        if !seen.insert(canonical) {
            return Err(not_a_trace(path, "given twice", "name every file of a run once"));
        }
    }
    let size = |path: &PathBuf| match path.is_dir() {
        true => size_of_tables(path),
        false => std::fs::metadata(path).map_or(0, |metadata| metadata.len()),
    };
    let total_bytes = files.iter().map(size).sum();
    let mut before = 0;
    let mut traces = Vec::new();
    for file in &files {
        let size = size(file);
        let trace = read_file(file, size, &mut |done| {
            on_progress(Progress { file, done_bytes: before + done.min(size), total_bytes });
        })?;
        before += size;
        traces.push(trace);
    }
    let doubts = ranks::doubts(&traces)?;
    let mut merged = merge(traces)?;
    merged.meta.notices.extend(doubts);
    Ok(merged)
}

/// What a file is, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Sqlite,
    Json,
    Gzip,
    /// A table of a trace, or of anything else.
    Parquet,
    /// Something that strobe does not read: what it is and what to do.
    Other(&'static str, &'static str),
}

fn sniff(head: &[u8], path: &Path) -> Format {
    const FORMATS: &str = "strobe reads Nsight Systems SQLite exports, PyTorch profiler (Kineto) and Chrome JSON \
                           (also gzipped), and its own traces";
    const EXPORT: &str = "export it first: nsys export --type sqlite FILE";
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
    match head {
        [] => Format::Other("an empty file", FORMATS),
        [0x1f, 0x8b, ..] => Format::Gzip,
        _ if head.starts_with(b"SQLite format 3\0") => Format::Sqlite,
        _ if matches!(text.first(), Some(b'{' | b'[')) => Format::Json,
        _ if extension == "nsys-rep" || extension == "qdrep" => Format::Other("an Nsight Systems report", EXPORT),
        _ if extension == "qdstrm" => {
            Format::Other("a raw Nsight Systems stream", "import it in Nsight Systems, then nsys export --type sqlite")
        }
        _ if extension == "ncu-rep" => {
            Format::Other("an Nsight Compute report, which describes single kernels and has no timeline", FORMATS)
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Format::Other("compressed with zstd", "decompress it first: zstd -d FILE"),
        [b'P', b'K', 3, 4, ..] => Format::Other("a ZIP archive", "unpack it first: unzip FILE"),
        [b'B', b'Z', b'h', ..] => Format::Other("compressed with bzip2", "decompress it first: bunzip2 FILE"),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Format::Other("compressed with xz", "decompress it first: unxz FILE"),
        [b'P', b'A', b'R', b'1', ..] => Format::Parquet,
        [0x89, b'H', b'D', b'F', ..] => Format::Other("an HDF5 file", EXPORT),
        [0x0a, ..] if extension.contains("perfetto") || extension.contains("pftrace") => {
            Format::Other("a Perfetto protobuf trace", "export the trace as JSON")
        }
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            Format::Other("text in UTF-16", "convert it first: iconv -f UTF-16 -t UTF-8 FILE")
        }
        _ if text.is_empty() => Format::Other("blank", FORMATS),
        _ if head.iter().all(|&b| b >= b' ' || b.is_ascii_whitespace()) => {
            Format::Other("text that is not JSON", FORMATS)
        }
        _ => Format::Other("of an unknown binary format", FORMATS),
    }
}

/// A reader with the bytes that were taken from its start put back.
type Whole<R> = Chain<Cursor<Vec<u8>>, R>;

/// Looks at the first bytes of a reader.
fn peek<R: Read>(mut reader: R) -> std::io::Result<(Vec<u8>, Whole<R>)> {
    let mut head = Vec::new();
    let outcome = reader.by_ref().take(4096).read_to_end(&mut head);
    // What is damaged behind its first bytes is for the format's own reader to judge.
    if head.is_empty() {
        outcome?;
    }
    Ok((head.clone(), Cursor::new(head).chain(reader)))
}

/// Counts the bytes that go through.
struct Counted<R> {
    inner: R,
    count: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.count.set(self.count.get() + count as u64);
        Ok(count)
    }
}

/// Reads one file; `progress` is told how many of its `size` bytes are done.
fn read_file(path: &Path, size: u64, progress: &mut dyn FnMut(u64)) -> Result<Trace, TraceError> {
    if path.is_dir() {
        return parquet::read(path, progress);
    }
    let file = File::open(path).map_err(|source| io_error("open", path, source))?;
    let count = Rc::new(Cell::new(0));
    let counted = Counted { inner: file, count: Rc::clone(&count) };
    let (head, reader) = peek(counted).map_err(|source| io_error("read", path, source))?;
    match sniff(&head, path) {
        // It counts in units of its own, which become a share of the file.
        Format::Sqlite => nsys::read(path, &mut |done, total| {
            progress((u128::from(size) * u128::from(done) / u128::from(total.max(1))).min(u128::from(size)) as u64);
        }),
        Format::Json => kineto::read(reader, path, &mut |_| progress(count.get())),
        Format::Gzip => {
            let unreadable = "compressed with gzip, but damaged from its start";
            let (head, reader) = peek(MultiGzDecoder::new(std::io::BufReader::with_capacity(64 << 10, reader)))
                .map_err(|_| not_a_trace(path, unreadable, "copy or record the trace again"))?;
            match sniff(&head, path) {
                Format::Json => kineto::read(reader, path, &mut |_| progress(count.get())),
                Format::Sqlite => {
                    Err(not_a_trace(path, "a gzipped SQLite database", "decompress it first: gunzip FILE"))
                }
                Format::Parquet => Err(parquet::single(path)),
                Format::Gzip => Err(not_a_trace(path, "gzipped twice", "decompress it once: gunzip FILE")),
                Format::Other(found, advice) => Err(not_a_trace(path, &format!("gzipped, inside {found}"), advice)),
            }
        }
        Format::Parquet => Err(parquet::single(path)),
        Format::Other(found, advice) => Err(not_a_trace(path, found, advice)),
    }
}

/// Bytes of all files in a directory.
fn size_of_tables(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// The traces that a directory stands for: those of a strobe run, or every file in it that is one, in order of name.
fn traces_in(directory: &Path) -> Result<Vec<PathBuf>, TraceError> {
    let entries = std::fs::read_dir(directory).map_err(|source| io_error("list", directory, source))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort_by_cached_key(|path| natural_key(path));
    let is_of_run = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name == "trace.sqlite" || (name.starts_with("trace.rank") && name.ends_with(".sqlite"))
    };
    if files.iter().any(is_of_run) {
        files.retain(is_of_run);
        return Ok(files);
    }
    let holds_tables = files.iter().any(|path| path.extension().is_some_and(|extension| extension == "parquet"));
    files.retain(|path| {
        let head = File::open(path).and_then(|file| peek(file).map(|(head, _)| head)).unwrap_or_default();
        match sniff(&head, path) {
            Format::Gzip => {
                let inside = peek(MultiGzDecoder::new(&head[..])).map(|(head, _)| head).unwrap_or_default();
                sniff(&inside, path) == Format::Json
            }
            Format::Sqlite => true,
            // A folder of traces may also hold reports in JSON: events are told by their phase.
            Format::Json => head.windows(4).any(|window| window == b"\"ph\"") || names_events(path),
            Format::Parquet | Format::Other(..) => false,
        }
    });
    if files.is_empty() && holds_tables {
        return Err(parquet::foreign(directory));
    }
    if files.is_empty() {
        return Err(not_a_trace(directory, "a directory without traces", "name the trace files themselves"));
    }
    Ok(files)
}

/// Whether a JSON file has trace events behind a long head.
fn names_events(path: &Path) -> bool {
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| file.take(1 << 20).read_to_end(&mut head));
    read.is_ok() && head.windows(13).any(|window| window == b"\"traceEvents\"")
}

/// Orders `rank-2` before `rank-10`: digits count as numbers.
fn natural_key(path: &Path) -> Vec<(u128, String)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut key = Vec::new();
    let mut rest = &name[..];
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number = rest[..digits].parse().unwrap_or(0);
        let text = &rest[digits..];
        let until = text.find(|c: char| c.is_ascii_digit()).unwrap_or(text.len());
        key.push((number, text[..until].to_string()));
        rest = &text[until..];
    }
    key
}

/// Puts the traces of several ranks into one. Their clocks are aligned where every one of them names its time 0.
pub fn merge(traces: Vec<Trace>) -> Result<Trace, TraceError> {
    let several = traces.len() > 1;
    let starts: Vec<Option<i64>> = traces.iter().map(|trace| trace.meta.session_start_utc_ns).collect();
    let aligned = starts.iter().all(Option::is_some);
    let ranks = ranks_of(&traces);
    let mut all = traces.into_iter().zip(ranks);
    let Some((mut merged, first_rank)) = all.next() else {
        return Err(not_a_trace(Path::new("-"), "nothing", "name at least one trace file"));
    };
    if !several {
        return Ok(merged);
    }
    name_notices(&mut merged);
    set_rank(&mut merged, first_rank);
    let mut modes = BTreeSet::from([merged.meta.graph_mode.map(|mode| mode == GraphMode::Node)]);
    for (mut next, rank) in all {
        name_notices(&mut next);
        set_rank(&mut next, rank);
        modes.insert(next.meta.graph_mode.map(|mode| mode == GraphMode::Node));
        let shift = match (aligned, merged.meta.session_start_utc_ns, next.meta.session_start_utc_ns) {
            (true, Some(first), Some(start)) => start.saturating_sub(first),
            _ => 0,
        };
        append(&mut merged, next, shift)?;
    }
    if !aligned {
        merged.meta.session_start_utc_ns = None;
        merged.meta.notices.push("the clocks of the files are not aligned: not every file says when it began".into());
    }
    if modes.len() > 1 {
        let notice = "the files record CUDA graphs in different ways: do not compare their ranks";
        merged.meta.notices.push(notice.into());
    }
    merged.finish();
    Ok(merged)
}

/// The rank of each trace: as the files say if they say it of all, each once; else by their order.
fn ranks_of(traces: &[Trace]) -> Vec<Option<u32>> {
    // A trace that holds several ranks itself keeps them.
    let own = |trace: &Trace| {
        let ranks: BTreeSet<u32> = trace.processes.iter().filter_map(|process| process.rank).collect();
        ranks.into_iter().collect::<Vec<_>>()
    };
    let owned: Vec<Vec<u32>> = traces.iter().map(own).collect();
    let distinct: BTreeSet<u32> = owned.iter().flatten().copied().collect();
    let complete = owned.iter().all(|ranks| !ranks.is_empty());
    if complete && distinct.len() == owned.iter().map(Vec::len).sum::<usize>() {
        return vec![None; traces.len()];
    }
    (0..traces.len() as u32).map(Some).collect()
}

fn set_rank(trace: &mut Trace, rank: Option<u32>) {
    let Some(rank) = rank else { return };
    trace.processes.iter_mut().for_each(|process| process.rank = Some(rank));
    trace.meta.sources.iter_mut().for_each(|source| source.rank = Some(rank));
}

/// Says in every notice which file it is about.
fn name_notices(trace: &mut Trace) {
    let Some(name) = trace.meta.sources.first().and_then(|source| source.path.file_name()) else { return };
    let name = name.to_string_lossy();
    trace.meta.notices.iter_mut().for_each(|notice| *notice = format!("{name}: {notice}"));
}

/// Moves everything of `next` behind what `merged` has, its times moved by `shift`.
fn append(merged: &mut Trace, mut next: Trace, shift: i64) -> Result<(), TraceError> {
    let too_many = |place: &str| TraceError::Invalid { place: place.into(), problem: "there are too many".into() };
    let small = |count: usize, place: &str| u16::try_from(count).map_err(|_| too_many(place));
    let large =
        |count: usize, place: &str| u32::try_from(count).ok().filter(|&n| n != NONE).ok_or_else(|| too_many(place));
    let devices = large(merged.devices.len(), "devices")?;
    let processes = large(merged.processes.len(), "processes")?;
    let sources = small(merged.meta.sources.len(), "files")?;
    large(merged.devices.len() + next.devices.len(), "devices")?;
    large(merged.processes.len() + next.processes.len(), "processes")?;
    large(merged.ops.len() + next.ops.len(), "ops")?;
    large(merged.calls.len() + next.calls.len(), "calls")?;
    large(merged.ranges.len() + next.ranges.len(), "ranges")?;
    let threads = large(merged.threads.len(), "threads")?;
    let details = large(merged.details.len(), "details")?;
    let works = large(merged.works.len(), "works")?;

    let numbers: Vec<StrId> = next.strings.iter().map(|(_, text)| merged.strings.intern(text)).collect();
    let renamed = |id: &mut StrId| *id = numbers.get(id.0 as usize).copied().unwrap_or(StrId::NONE);
    let moved = |index: &mut u32, by: u32| *index = if *index == NONE { NONE } else { index.saturating_add(by) };

    let times = [
        &mut next.ops.start,
        &mut next.ops.end,
        &mut next.calls.start,
        &mut next.calls.end,
        &mut next.ranges.start,
        &mut next.ranges.end,
    ];
    if shift != 0 {
        times.into_iter().flatten().for_each(|time| *time = time.saturating_add(shift));
        next.counters.iter_mut().flat_map(|c| &mut c.times).for_each(|time| *time = time.saturating_add(shift));
        next.allocations.iter_mut().for_each(|a| a.time = a.time.saturating_add(shift));
        for node in &mut next.graph_nodes {
            (node.start, node.end) = (node.start.saturating_add(shift), node.end.saturating_add(shift));
        }
        for on in &mut next.on_cpu {
            (on.start, on.end) = (on.start.saturating_add(shift), on.end.saturating_add(shift));
        }
        next.cpu_samples.iter_mut().for_each(|sample| sample.time = sample.time.saturating_add(shift));
        for fault in &mut next.page_faults {
            (fault.start, fault.end) = (fault.start.saturating_add(shift), fault.end.saturating_add(shift));
        }
        for flow in &mut next.flows {
            (flow.start, flow.end) = (flow.start.saturating_add(shift), flow.end.saturating_add(shift));
        }
        for iteration in &mut next.iterations {
            (iteration.start, iteration.end) =
                (iteration.start.saturating_add(shift), iteration.end.saturating_add(shift));
        }
    }

    next.ops.name.iter_mut().for_each(renamed);
    next.ops.device.iter_mut().for_each(|device| *device = device.saturating_add(devices));
    next.ops.process.iter_mut().for_each(|process| *process = process.saturating_add(processes));
    next.ops.detail.iter_mut().for_each(|detail| moved(detail, details));
    next.ops.work.iter_mut().for_each(|work| moved(work, works));
    next.calls.name.iter_mut().for_each(renamed);
    next.calls.thread.iter_mut().for_each(|thread| moved(thread, threads));
    let ranges = &mut next.ranges;
    let texts = [&mut ranges.name, &mut ranges.domain, &mut ranges.dims, &mut ranges.types];
    let texts = texts.into_iter().chain([&mut ranges.values, &mut ranges.strides]);
    texts.flatten().for_each(renamed);
    next.ranges.thread.iter_mut().for_each(|thread| moved(thread, threads));
    for detail in &mut next.details {
        if let OpDetail::Kernel(kernel) = detail {
            renamed(&mut kernel.short_name);
        }
    }
    for work in &mut next.works {
        renamed(&mut work.op);
        renamed(&mut work.category);
    }
    for counter in &mut next.counters {
        counter.device = counter.device.map(|device| device.saturating_add(devices));
    }
    for allocation in &mut next.allocations {
        allocation.device = allocation.device.map(|device| device.saturating_add(devices));
        allocation.process = allocation.process.saturating_add(processes);
        renamed(&mut allocation.name);
    }
    next.graph_nodes.iter_mut().for_each(|node| moved(&mut node.thread, threads));
    next.on_cpu.iter_mut().for_each(|on| moved(&mut on.thread, threads));
    for sample in &mut next.cpu_samples {
        moved(&mut sample.thread, threads);
        renamed(&mut sample.function);
        renamed(&mut sample.module);
    }
    for fault in &mut next.page_faults {
        fault.process = fault.process.saturating_add(processes);
        fault.device = fault.device.map(|device| device.saturating_add(devices));
        renamed(&mut fault.function);
    }
    for flow in &mut next.flows {
        moved(&mut flow.from, threads);
        moved(&mut flow.to, threads);
    }
    next.devices.iter_mut().for_each(|device| device.source = device.source.saturating_add(sources));
    next.processes.iter_mut().for_each(|process| process.source = process.source.saturating_add(sources));
    next.threads.iter_mut().for_each(|thread| thread.process = thread.process.saturating_add(processes));

    merged.ops.append(&mut next.ops);
    merged.calls.append(&mut next.calls);
    merged.ranges.append(&mut next.ranges);
    merged.details.append(&mut next.details);
    merged.works.append(&mut next.works);
    merged.counters.append(&mut next.counters);
    merged.allocations.append(&mut next.allocations);
    merged.graph_nodes.append(&mut next.graph_nodes);
    merged.on_cpu.append(&mut next.on_cpu);
    merged.cpu_samples.append(&mut next.cpu_samples);
    merged.page_faults.append(&mut next.page_faults);
    merged.flows.append(&mut next.flows);
    merged.iterations.append(&mut next.iterations);
    merged.expert_loads.append(&mut next.expert_loads);
    merged.devices.append(&mut next.devices);
    merged.processes.append(&mut next.processes);
    merged.threads.append(&mut next.threads);
    merged.meta.sources.append(&mut next.meta.sources);
    merged.meta.notices.append(&mut next.meta.notices);
    merged.meta.partial |= next.meta.partial;
    merged.meta.peaks = merged.meta.peaks.take().or(next.meta.peaks);
    // Hidden kernels of one rank are hidden kernels of the run.
    merged.meta.graph_mode = match (merged.meta.graph_mode, next.meta.graph_mode) {
        (Some(GraphMode::Graph), _) | (_, Some(GraphMode::Graph)) => Some(GraphMode::Graph),
        (first, second) => first.or(second),
    };
    if merged.meta.producer != next.meta.producer && !next.meta.producer.is_empty() {
        merged.meta.producer = match &merged.meta.producer[..] {
            "" => next.meta.producer,
            first if first.split(", ").any(|known| known == next.meta.producer) => first.to_string(),
            first => format!("{first}, {}", next.meta.producer),
        };
    }
    for (key, value) in next.meta.extra {
        merged.meta.extra.entry(key).or_insert(value);
    }
    Ok(())
}

fn not_a_trace(path: &Path, found: &str, advice: &str) -> TraceError {
    TraceError::NotATrace { path: path.to_path_buf(), found: found.into(), advice: advice.into() }
}

fn io_error(action: &'static str, path: &Path, source: std::io::Error) -> TraceError {
    TraceError::Io { action, path: path.to_path_buf(), source }
}
