//! The Parquet tables that strobe writes, read back: the same trace; foreign and damaged files get one error.

mod export_common;

use std::path::{Path, PathBuf};

use export_common::{any_trace, cpu, gpu, real_data, scratch};
use proptest::prelude::*;
use strobe_trace::export::{Format, write};
use strobe_trace::{OpDetail, Trace, TraceError, import};

fn read(path: &Path) -> Result<Trace, TraceError> {
    import::read_files(&[path.to_owned()], &mut |_| {})
}

/// Writes a trace and reads it back.
fn there_and_back(trace: &Trace, name: &str) -> Trace {
    let path = scratch(&format!("{name}.parquetdir"));
    write(trace, Format::Parquet, &path).unwrap();
    read(&path).unwrap()
}

/// Compares what the tables hold: texts by their letters, numbers of details and works by what they mean.
#[track_caller]
fn assert_same(back: &Trace, trace: &Trace, name: &str) {
    let text = |trace: &Trace, id| trace.text(id).to_owned();
    let memory = |kind: u8| if kind == 7 { 255 } else { kind };
    let detail = |trace: &Trace, op: usize| match trace.detail_of(op).copied() {
        Some(OpDetail::Kernel(mut kernel)) => {
            let short = text(trace, kernel.short_name);
            kernel.short_name = strobe_trace::StrId::NONE;
            (short, Some(OpDetail::Kernel(kernel)))
        }
        Some(OpDetail::Memcpy { copy_kind, src_kind, dst_kind, src_device, dst_device, cause }) => {
            let (src_kind, dst_kind) = (memory(src_kind), memory(dst_kind));
            (String::new(), Some(OpDetail::Memcpy { copy_kind, src_kind, dst_kind, src_device, dst_device, cause }))
        }
        Some(OpDetail::Memset { value, mem_kind }) => {
            (String::new(), Some(OpDetail::Memset { value, mem_kind: memory(mem_kind) }))
        }
        other => (String::new(), other),
    };
    assert_eq!(back.ops.len(), trace.ops.len(), "{name}");
    for op in 0..trace.ops.len() {
        let (a, b) = (back.ops.get(op), trace.ops.get(op));
        let same = |row: strobe_trace::OpRow| strobe_trace::OpRow {
            name: strobe_trace::StrId::NONE,
            detail: 0,
            work: 0,
            bytes: if row.kind.is_memory() { row.bytes } else { 0 },
            ..row
        };
        assert_eq!(same(a), same(b), "{name}: op {op}");
        assert_eq!(text(back, a.name), text(trace, b.name), "{name}: op {op}");
        assert_eq!(detail(back, op), detail(trace, op), "{name}: op {op}");
        let work = |trace: &Trace| {
            trace.work_of(op).map(|w| (text(trace, w.op), text(trace, w.category), w.layer, w.shape, w.bytes, w.flops))
        };
        assert_eq!(work(back), work(trace), "{name}: op {op}");
    }
    assert_eq!(back.calls.start, trace.calls.start, "{name}");
    assert_eq!((&back.calls.end, &back.calls.thread), (&trace.calls.end, &trace.calls.thread), "{name}");
    assert_eq!(
        (&back.calls.correlation, &back.calls.result),
        (&trace.calls.correlation, &trace.calls.result),
        "{name}"
    );
    assert_eq!(back.calls.kind, trace.calls.kind, "{name}");
    assert_eq!((&back.ranges.start, &back.ranges.end), (&trace.ranges.start, &trace.ranges.end), "{name}");
    assert_eq!((&back.ranges.thread, &back.ranges.flags), (&trace.ranges.thread, &trace.ranges.flags), "{name}");
    assert_eq!((&back.ranges.source, &back.ranges.kind), (&trace.ranges.source, &trace.ranges.kind), "{name}");
    assert_eq!(back.ranges.iteration, trace.ranges.iteration, "{name}");
    for range in 0..trace.ranges.len() {
        let texts = |trace: &Trace| {
            let row = trace.ranges.get(range);
            [row.name, row.domain, row.dims, row.types].map(|id| text(trace, id))
        };
        assert_eq!(texts(back), texts(trace), "{name}: range {range}");
    }
    assert_eq!((&back.iterations, &back.expert_loads), (&trace.iterations, &trace.expert_loads), "{name}");
    assert_eq!((&back.processes, &back.threads), (&trace.processes, &trace.threads), "{name}");
    assert_eq!(back.graph_nodes, trace.graph_nodes, "{name}");
    assert_eq!(back.meta.graph_mode, trace.meta.graph_mode, "{name}");
    assert_eq!((&back.meta.windows, &back.meta.peaks), (&trace.meta.windows, &trace.meta.peaks), "{name}");
    assert_eq!((&back.meta.notices, back.meta.partial), (&trace.meta.notices, trace.meta.partial), "{name}");
    assert_eq!(back.meta.session_start_utc_ns, trace.meta.session_start_utc_ns, "{name}");
    assert_eq!(back.meta.producer, trace.meta.producer, "{name}");
    let samples = |trace: &Trace| {
        let of = |c: &strobe_trace::Counter| {
            let values = c.values.iter().map(|v| if v.is_finite() { v.to_bits() } else { 0 }).collect::<Vec<_>>();
            (c.name.clone(), c.device, c.times.clone(), values)
        };
        trace.counters.iter().filter(|c| !c.times.is_empty()).map(of).collect::<Vec<_>>()
    };
    assert_eq!(samples(back), samples(trace), "{name}");
    let allocations = |trace: &Trace| {
        let of = |a: &strobe_trace::Allocation| {
            let name = text(trace, a.name);
            (a.time, a.device, a.process, a.address, a.bytes, memory(a.mem_kind), name, a.total_allocated)
        };
        trace.allocations.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(allocations(back), allocations(trace), "{name}");
}

#[test]
fn every_table_comes_back() {
    for (name, trace) in [("back-gpu", gpu()), ("back-cpu", cpu())] {
        let mut trace = trace;
        // Values that hold a directory are written without it.
        trace.meta.extra.clear();
        trace.finish();
        assert_same(&there_and_back(&trace, name), &trace, name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_trace_comes_back(trace in any_trace()) {
        let mut trace = trace;
        trace.finish();
        let back = there_and_back(&trace, "back-any");
        prop_assert_eq!(&back.ops.start, &trace.ops.start);
        prop_assert_eq!(&back.ops.launch, &trace.ops.launch);
        prop_assert_eq!(&back.calls.correlation, &trace.calls.correlation);
        prop_assert_eq!(&back.ranges.end, &trace.ranges.end);
    }
}

#[test]
fn real_traces_come_back() {
    let Some(data) = real_data() else { return };
    let files = [
        "nsys/h200/gpum.sqlite",
        "nsys/h200/node.sqlite",
        "kineto/h200/kineto_graph.json.gz",
        "kineto/hta/sampled_rank-0.json.gz",
        "nsys/nsys-ai/mfu_2gpu_before.sqlite",
        "truth/graph_row_stripped.sqlite",
    ];
    for file in files {
        let trace = read(&data.join(file)).unwrap();
        let back = there_and_back(&trace, &file.replace('/', "-"));
        assert_same(&back, &trace, file);
    }
}

fn written(name: &str) -> PathBuf {
    let path = scratch(&format!("{name}.parquetdir"));
    write(&gpu(), Format::Parquet, &path).unwrap();
    path
}

#[test]
fn foreign_incomplete_and_single_tables_are_refused() {
    let error = |path: &Path| read(path).unwrap_err().to_string();
    let path = written("incomplete");
    std::fs::remove_file(path.join("threads.parquet")).unwrap();
    assert!(error(&path).contains("threads.parquet"), "{}", error(&path));

    let path = written("single");
    let said = error(&path.join("ops.parquet"));
    assert!(said.contains("a single table") && said.contains("single.parquetdir"), "{said}");

    let path = written("foreign");
    let file = path.join("ops.parquet");
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.windows(14).rposition(|window| window == b"strobe version").unwrap();
    bytes[at..at + 6].copy_from_slice(b"parque");
    std::fs::write(&file, bytes).unwrap();
    let said = error(&path);
    assert!(said.contains("strobe did not write") && said.contains("nsys export --type sqlite"), "{said}");

    let path = scratch("nsys-tables");
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("StringIds.parquet"), b"PAR1PAR1").unwrap();
    assert!(error(&path).contains("strobe did not write"), "{}", error(&path));
}

#[test]
fn damage_is_an_error_and_never_a_panic() {
    let path = written("damaged");
    for name in ["ops.parquet", "meta.parquet", "ranges.parquet", "counters.parquet"] {
        let file = path.join(name);
        let whole = std::fs::read(&file).unwrap();
        for length in (0..whole.len()).step_by(29) {
            std::fs::write(&file, &whole[..length]).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains(name) && error.lines().count() == 1, "{error}");
        }
        // A flipped bit may only change a value: then the trace is another one.
        for at in (0..whole.len()).step_by(5) {
            {
                let bit = at % 8;
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                std::fs::write(&file, &bytes).unwrap();
                let _ = read(&path);
            }
        }
        std::fs::write(&file, &whole).unwrap();
    }
    assert!(read(&path).is_ok());
}
