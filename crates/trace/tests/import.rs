//! Formats are told by content, and several files become ranks of one run.

use std::io::Write;
use std::path::PathBuf;

use strobe_trace::Trace;
use strobe_trace::import::read_files;

#[test]
fn two_ranks_of_a_real_run() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA").map(PathBuf::from) else {
        println!("skipped: STROBE_TEST_DATA is not set");
        return;
    };
    let file = |rank: u32| data.join(format!("traces/kineto/hta/sampled_rank-{rank}.json.gz"));
    let mut last = (0, 0);
    let both = read_files(&[file(0), file(1)], &mut |p| {
        assert!(p.done_bytes >= last.0 && p.done_bytes <= p.total_bytes);
        last = (p.done_bytes, p.total_bytes);
    })
    .unwrap();
    assert_eq!(last.0, last.1);
    let alone = [0, 1].map(|rank| read_files(&[file(rank)], &mut |_| {}).unwrap());
    assert_eq!(both.ops.len(), alone[0].ops.len() + alone[1].ops.len());
    assert_eq!(both.ops_without_launch(), 0);
    assert_eq!(both.processes.iter().map(|p| p.rank).collect::<Vec<_>>(), [Some(0), Some(1)]);
    assert_eq!(both.devices.iter().map(|d| (d.ordinal, d.source)).collect::<Vec<_>>(), [(0, 0), (1, 1)]);
    for (rank, alone) in alone.iter().enumerate() {
        let names = |trace: &strobe_trace::Trace, process: Option<u32>| {
            let ops = (0..trace.ops.len()).filter(|&i| process.is_none_or(|p| trace.ops.process[i] == p));
            ops.map(|i| (trace.ops.start[i], trace.op_name(i).to_string())).collect::<Vec<_>>()
        };
        let (mut merged, mut single) = (names(&both, Some(rank as u32)), names(alone, None));
        merged.sort();
        single.sort();
        assert_eq!(merged, single);
    }
    let error = read_files(&[file(0), file(0)], &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("given twice"), "{error}");
}

/// A directory of its own for a test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("strobe-import-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn kernel(name: &str, start: u32) -> String {
    format!(r#"{{"ph":"X","cat":"kernel","name":"{name}","pid":0,"tid":7,"ts":{start},"dur":1,"args":{{"device":0}}}}"#)
}

/// A trace with one kernel, whose clock starts at `base`.
fn trace_json(name: &str, start: u32, base: i64) -> String {
    format!(r#"{{"traceEvents": [{}], "baseTimeNanoseconds": {base}}}"#, kernel(name, start))
}

#[test]
fn the_content_tells_the_format() {
    let folder = Folder::new("content");
    let json = trace_json("k", 1, 5);
    let (first, second) = json.split_at(60);
    for (name, bytes) in [
        ("plain.sqlite", json.clone().into_bytes()),
        ("packed.json", gzip(json.as_bytes())),
        ("two-members.txt", [gzip(first.as_bytes()), gzip(second.as_bytes())].concat()),
        ("mark", [b"\xef\xbb\xbf \n", json.as_bytes()].concat()),
    ] {
        let trace = read_files(&[folder.write(name, &bytes)], &mut |_| {}).unwrap();
        assert_eq!((trace.ops.len(), trace.meta.session_start_utc_ns), (1, Some(5)), "{name}");
        assert_eq!(trace.meta.sources[0].bytes, json.len() as u64 + if name == "mark" { 5 } else { 0 });
    }
}

#[test]
fn what_is_not_read_is_named_with_a_remedy() {
    let folder = Folder::new("other");
    for (name, bytes, expected) in [
        ("empty.json", &b""[..], "an empty file"),
        ("blank.json", b" \n ", "blank"),
        ("a.nsys-rep", b"\x01\x02\x03", "nsys export --type sqlite"),
        ("a.qdstrm", b"\x01\x02\x03", "raw Nsight Systems stream"),
        ("a.json.zst", b"\x28\xb5\x2f\xfd\x00", "zstd -d"),
        ("a.zip", b"PK\x03\x04\x00", "unzip"),
        ("a.parquet", b"PAR1\x00", "Parquet"),
        ("notes.txt", b"hello", "text that is not JSON"),
        ("noise.bin", b"\x01\x02\x03", "unknown binary format"),
        ("report.json", b"{\"a\": 1}", "JSON without trace events"),
        ("cut.json.gz", b"\x1f\x8b\x08", "damaged from its start"),
        ("cut.sqlite", b"SQLite format 3\0", "cut.sqlite"),
    ] {
        let error = read_files(&[folder.write(name, bytes)], &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(name), "{name}: {error}");
    }
    for (name, bytes, expected) in [
        ("text.gz", gzip(b"hello"), "gzipped, inside text that is not JSON"),
        ("database.gz", gzip(b"SQLite format 3\0"), "gunzip"),
        ("twice.gz", gzip(&gzip(b"{}")), "gzipped twice"),
    ] {
        let error = read_files(&[folder.write(name, &bytes)], &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
    }
    let missing = read_files(&[folder.0.join("missing.json")], &mut |_| {}).unwrap_err().to_string();
    assert!(missing.contains("cannot open") && missing.contains("missing.json"), "{missing}");
    assert!(read_files(&[], &mut |_| {}).is_err());
}

#[test]
fn a_cut_gzip_file_keeps_what_it_holds() {
    let folder = Folder::new("cut");
    let events: Vec<String> = (0..20_000).map(|i| kernel(&format!("kernel number {}", i * 7919 % 1000), i)).collect();
    let packed = gzip(format!("{{\"traceEvents\": [{}]}}", events.join(",\n")).as_bytes());
    let half = folder.write("half.json.gz", &packed[..packed.len() / 2]);
    let trace = read_files(&[half], &mut |_| {}).unwrap();
    assert!((5_000..15_000).contains(&trace.ops.len()), "{}", trace.ops.len());
    assert!(trace.meta.partial);
    assert!(trace.meta.notices[0].starts_with("the compressed data is damaged after"), "{:?}", trace.meta.notices);
    assert!(trace.meta.notices[1].contains("1 event lost"), "{:?}", trace.meta.notices);
    // A wrong checksum behind data that was all there costs nothing.
    let mut wrong = packed.clone();
    let checksum = wrong.len() - 8;
    wrong[checksum] ^= 1;
    let trace = read_files(&[folder.write("wrong.json.gz", &wrong)], &mut |_| {}).unwrap();
    assert_eq!((trace.ops.len(), trace.meta.partial), (20_000, false));
    assert_eq!(trace.meta.notices[0], "the checksum of the compressed data is wrong; all events were read");
    // Bytes behind the end of the compressed data change nothing.
    let tail = folder.write("tail.json.gz", &[&packed[..], b"garbage"].concat());
    assert_eq!(read_files(&[tail], &mut |_| {}).unwrap().ops.len(), 20_000);
}

#[test]
fn a_directory_stands_for_its_traces_in_order_of_number() {
    let folder = Folder::new("directory");
    for rank in [10, 2, 1] {
        folder.write(&format!("rank-{rank}.json"), trace_json(&format!("k{rank}"), 1, 1_000 * rank).as_bytes());
    }
    folder.write("summary.json", b"{\"total\": 3}");
    folder.write("notes.txt", b"hello");
    let trace = read_files(std::slice::from_ref(&folder.0), &mut |_| {}).unwrap();
    let names: Vec<&str> = (0..trace.ops.len()).map(|op| trace.op_name(op)).collect();
    assert_eq!(names, ["k1", "k2", "k10"]);
    assert_eq!(trace.ops.start, [1_000, 2_000, 10_000], "aligned to the first file's clock");
    assert_eq!(trace.processes.iter().map(|p| p.rank).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
    assert_eq!(trace.meta.sources.len(), 3);
    let empty = Folder::new("empty");
    let error = read_files(std::slice::from_ref(&empty.0), &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("directory without traces"), "{error}");
}

#[test]
fn clocks_that_cannot_be_aligned_are_said_to_be() {
    let folder = Folder::new("clocks");
    let known = folder.write("a.json", trace_json("a", 1, 1_000).as_bytes());
    let unknown = folder.write("b.json", format!("[{}]", kernel("b", 1)).as_bytes());
    let trace = read_files(&[known, unknown], &mut |_| {}).unwrap();
    assert_eq!(trace.ops.start, [1_000, 1_000]);
    assert_eq!(trace.meta.session_start_utc_ns, None);
    assert!(trace.meta.notices.iter().any(|n| n.contains("not aligned")), "{:?}", trace.meta.notices);
}

#[test]
fn an_nsys_export_and_a_profiler_trace_together() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA").map(PathBuf::from) else {
        println!("skipped: STROBE_TEST_DATA is not set");
        return;
    };
    let files = ["nsys/h200/node.sqlite", "kineto/h200/kineto_graph.json.gz"].map(|f| data.join("traces").join(f));
    let mut done = 0;
    let both = read_files(&files, &mut |p| {
        assert!(p.done_bytes <= p.total_bytes);
        done = done.max(p.done_bytes);
    })
    .unwrap();
    assert_eq!(done, files.iter().map(|file| std::fs::metadata(file).unwrap().len()).sum::<u64>());
    for file in files {
        let alone = read_files(&[file], &mut |_| {}).unwrap();
        let source = both.meta.sources.iter().position(|s| s.path == alone.meta.sources[0].path).unwrap();
        let of_source = |op: &usize| usize::from(both.devices[both.ops.device[*op] as usize].source) == source;
        let ops: Vec<usize> = (0..both.ops.len()).filter(of_source).collect();
        assert_eq!(ops.len(), alone.ops.len());
        let total = |trace: &Trace, ops: &[usize]| ops.iter().map(|&op| trace.ops.duration(op)).sum::<i64>();
        assert_eq!(total(&both, &ops), total(&alone, &(0..alone.ops.len()).collect::<Vec<_>>()));
        for (here, there) in ops.iter().zip(0..alone.ops.len()) {
            assert_eq!(both.op_name(*here), alone.op_name(there));
            assert_eq!(
                both.launch_of(*here).map(|c| both.text(c.name)),
                alone.launch_of(there).map(|c| alone.text(c.name))
            );
            assert_eq!(both.detail_of(*here).is_some(), alone.detail_of(there).is_some());
        }
    }
}

#[test]
fn files_of_different_jobs_are_refused_or_doubted() {
    let folder = Folder::new("jobs");
    let about = |rank: u32, of: u32, at: u64| {
        let (kernel, base) = (kernel("k", 1), 1_700_000_000_000_000_000 + at * 1_000_000_000);
        format!(
            r#"{{"distributedInfo":{{"rank":{rank},"world_size":{of}}},"baseTimeNanoseconds":{base},"traceEvents":[{kernel}]}}"#
        )
    };
    let file = |name: &str, rank, of, at| folder.write(name, about(rank, of, at).as_bytes());
    let first = file("a.json", 0, 2, 0);
    let problem = |other: PathBuf| read_files(&[first.clone(), other], &mut |_| {}).unwrap_err().to_string();
    let said = problem(file("b.json", 0, 2, 0));
    assert!(said.contains("rank 0") && said.contains("strobe compare") && said.contains("b.json"), "{said}");
    let said = problem(file("c.json", 1, 4, 0));
    assert!(said.contains("of 2 ranks, the other of 4"), "{said}");
    let said = problem(file("d.json", 1, 2, 3 * 86_400 + 1));
    assert!(said.contains("3 days lie between them"), "{said}");
    let doubts = |other: PathBuf| read_files(&[first.clone(), other], &mut |_| {}).unwrap().meta.notices.join("\n");
    let said = doubts(file("e.json", 1, 2, 5));
    assert!(said.contains("share no moment") && said.contains("strobe compare a.json e.json"), "{said}");
    let said = doubts(file("f.json", 1, 2, 0));
    assert!(!said.contains("may not be ranks"), "{said}");
    let nameless = |name: &str| folder.write(name, format!("[{},{}]", kernel("k", 1), kernel("k", 9)).as_bytes());
    let said = read_files(&[nameless("g.json"), nameless("h.json")], &mut |_| {}).unwrap().meta.notices.join("\n");
    assert!(said.contains("they hold the same events"), "{said}");
}

#[test]
fn real_ranks_are_not_doubted_and_real_strangers_are() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA").map(|data| PathBuf::from(data).join("traces")) else {
        println!("skipped: STROBE_TEST_DATA is not set");
        return;
    };
    let read = |files: [&str; 2]| read_files(&files.map(|file| data.join(file)), &mut |_| {});
    for ranks in [
        ["truth/ranks_0.json.gz", "truth/ranks_1.json.gz"],
        ["kineto/hta/sampled_rank-0.json.gz", "kineto/hta/sampled_rank-1.json.gz"],
    ] {
        let trace = read(ranks).unwrap();
        assert!(!trace.meta.notices.join("\n").contains("may not be ranks"), "{:?}", trace.meta.notices);
        let found: Vec<_> = trace.processes.iter().filter_map(|process| process.rank).collect();
        assert_eq!(found, [0, 1]);
    }
    let said = read(["kineto/hta/trace_diff_control.json.gz", "kineto/hta/trace_diff_test.json.gz"]);
    assert!(said.unwrap_err().to_string().contains("not ranks of one job"));
    let said = read(["nsys/h200/gpum.sqlite", "nsys/nsys-ai/h100_2gpu_1s.sqlite"]);
    let said = said.map_or_else(|error| error.to_string(), |trace| trace.meta.notices.join("\n"));
    assert!(said.contains("ranks of one job") && said.contains("strobe compare"), "{said}");
}
