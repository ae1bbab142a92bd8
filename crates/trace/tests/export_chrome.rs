//! The Chrome trace: valid JSON in Kineto's dialect, exact times, slices that nest on every track.

mod export_common;

use std::collections::BTreeMap;
use std::io::Read;

use export_common::{any_trace, cpu, gpu, real_data, scratch};
use proptest::prelude::*;
use serde_json::{Value, json};
use strobe_trace::export::{Format, write};
use strobe_trace::{Device, KernelDetail, OpDetail, StrId, Trace, import, range_flags};

fn export(trace: &Trace, name: &str) -> (String, Value) {
    let path = scratch(name);
    let written = write(trace, Format::ChromeJson, &path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!((written.files, written.bytes), (vec![path], text.len() as u64));
    let root: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let is_event = |e: &&Value| ["X", "i", "C"].iter().any(|ph| e["ph"] == **ph);
    let events = root["traceEvents"].as_array().unwrap().iter().filter(is_event).count();
    assert_eq!(written.events, events as u64);
    (text, root)
}

fn ns(value: &Value) -> i64 {
    (value.as_f64().unwrap() * 1e3).round() as i64
}

#[test]
fn a_gpu_trace_in_the_dialect_of_kineto() {
    let (text, root) = export(&gpu(), "gpu.json");
    assert!(text.contains("\"ts\":-0.500,\"dur\":1.000"), "{text}");
    assert!(!text.contains("secret") && text.contains("micro.gguf"));
    assert_eq!(root["baseTimeNanoseconds"], 1_794_711_319_973_357_605_i64);
    assert_eq!(root["distributedInfo"]["rank"], 3);
    let properties = json!({"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000_u64, "computeMajor": 9,
        "computeMinor": 0, "numSms": 132, "memoryBandwidth": 4_814_300_000_000_u64});
    assert_eq!(root["deviceProperties"], json!([properties]));

    let events = root["traceEvents"].as_array().unwrap();
    let find = |name: &str| events.iter().find(|e| e["name"] == name).unwrap();
    let kernel = find("void gemm<\"a\\b\">(float*)");
    let args = json!({"device": 0, "context": 1, "stream": 7, "correlation": 9, "registers per thread": 64,
        "shared memory": 1040, "static shared memory": 16, "grid": [4, 2, 1], "block": [128, 1, 1],
        "graph node id": 1_u64 << 33});
    assert_eq!(
        (&kernel["cat"], &kernel["pid"], &kernel["tid"], &kernel["args"]),
        (&"kernel".into(), &0.into(), &7.into(), &args)
    );
    // The kernel that overlaps it is still on stream 7, but on another track.
    let overlapping = find("reduce");
    assert_eq!((&overlapping["pid"], &overlapping["args"]["stream"]), (&0.into(), &7.into()));
    assert_ne!(overlapping["tid"], 7);
    let copy = find("Memcpy HtoD (Pageable -> Device)");
    assert_eq!((&copy["args"]["bytes"], &copy["args"]["memory bandwidth (GB/s)"]), (&4096.into(), &4.096.into()));
    assert_eq!(copy["args"]["recorded name"], "[CUDA memcpy Host-to-Device]");
    let launch = find("cudaGraphLaunch");
    assert_eq!((&launch["cat"], &launch["pid"], &launch["tid"]), (&"cuda_runtime".into(), &4242.into(), &4243.into()));
    assert_eq!(launch["args"], json!({"correlation": 9, "recorded name": "cudaGraphLaunch_v10000"}));
    assert_eq!(find("poll")["cat"], "os_runtime");
    let inputs = json!({
        "Input Dims": [[8, 2048], []],
        "Input type": "not JSON",
        "Concrete Inputs": ["", "True"],
        "Input Strides": [[0, 1], []],
    });
    assert_eq!(find("aten::mm")["args"], inputs);
    assert_eq!((&find("now")["ph"], &find("step 1\n")["cat"]), (&"i".into(), &"user_annotation".into()));
    let loading = find("loading");
    assert_eq!(loading["args"]["domain"], "NCCL");
    assert_ne!(loading["tid"], 4243);
    let (of_kernel, of_range) = (&overlapping["tid"], &loading["tid"]);
    assert_eq!(root["strobe"], json!({"lanes": [[4242, of_range, 4243], [0, of_kernel, 7]], "users": [[0, 4242]]}));
    // The value that is not a number is not written as one.
    let counters: Vec<_> = events.iter().filter(|e| e["ph"] == "C").map(|e| &e["args"]["value"]).collect();
    assert_eq!(counters, [&json!(12.5), &json!(100)]);
    let memory = &find("[memory]")["args"];
    assert_eq!(
        (&memory["Addr"], &memory["Bytes"], &memory["Device Id"]),
        (&(u64::MAX - 1).into(), &(-4096).into(), &0.into())
    );
    assert!(memory.get("Total Reserved").is_none());
    // One chain of arrows from the graph launch through both kernels, one for the copy.
    let phases: String = events.iter().filter(|e| e["cat"] == "ac2g").filter_map(|e| e["ph"].as_str()).collect();
    assert_eq!(phases, "ssftf");
}

#[test]
fn a_cpu_trace_has_its_ops_on_the_thread_under_the_ranges() {
    let (_, root) = export(&cpu(), "cpu.json");
    let events = root["traceEvents"].as_array().unwrap();
    let find = |name: &str| events.iter().find(|e| e["name"] == name).unwrap();
    let op = find("qkv_proj");
    assert_eq!((&op["pid"], &op["tid"]), (&10.into(), &11.into()));
    let args = json!({"kernel": "gemm_packed_f32_avx512", "op": "qkv_proj", "category": "gemm", "layer": 2, "m": 3,
        "n": 96, "bytes": 4000, "flops": 60_000, "iter": 7, "GB/s": 2, "GFLOP/s": 30});
    assert_eq!(op["args"], args);
    assert!(find("norm")["args"].get("flops").is_none());
    assert_eq!(find("iteration 7 (decode)")["args"]["generation_tokens"], 3);
    let tokens: Vec<_> =
        events.iter().filter(|e| e["ph"] == "C").map(|e| (ns(&e["ts"]), &e["args"]["generation"])).collect();
    assert_eq!(tokens, [(-500, &json!(3)), (5_500, &json!(0))]);
    assert_eq!(root["otherData"]["windows"], json!([{"first": 7, "last": 9, "complete": false}]));
}

#[test]
fn compressed_it_is_the_same_text() {
    let (plain, _) = export(&gpu(), "same.json");
    let path = scratch("same.json.gz");
    let written = write(&gpu(), Format::from_path(&path).unwrap(), &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(written.bytes, bytes.len() as u64);
    let mut text = String::new();
    flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut text).unwrap();
    assert_eq!(text, plain);
}

#[test]
fn a_file_that_cannot_be_made_is_an_error() {
    let missing = scratch("nowhere").join("trace.json");
    let error = write(&gpu(), Format::ChromeJson, &missing).unwrap_err();
    assert!(error.to_string().starts_with("cannot create"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn slices_nest_on_every_track_and_none_is_lost(trace in any_trace()) {
        let (_, root) = export(&trace, "nest.json");
        let slices: Vec<_> = root["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").map(|e| {
            ((e["pid"].as_i64().unwrap(), e["tid"].as_i64().unwrap()), ns(&e["ts"]), ns(&e["ts"]) + ns(&e["dur"]))
        }).collect();
        prop_assert_eq!(slices.len(), trace.ops.len() + trace.ranges.len() + trace.calls.len());
        for (i, a) in slices.iter().enumerate() {
            for b in slices.iter().skip(i + 1).filter(|b| b.0 == a.0) {
                let apart = b.1 >= a.2 || a.1 >= b.2;
                let inside = (a.1 <= b.1 && b.2 <= a.2) || (b.1 <= a.1 && a.2 <= b.2);
                prop_assert!(apart || inside, "{:?} and {:?}", a, b);
            }
        }
    }
}

/// Everything that the round trip keeps, with names in place of numbers, each table in an order of its own.
fn contents(trace: &Trace) -> BTreeMap<&'static str, Vec<String>> {
    let text = |id: StrId| if id.is_some() { trace.text(id) } else { "-" };
    let thread = |index: u32| {
        let thread = &trace.threads[index as usize];
        (trace.processes[thread.process as usize].pid, thread.tid)
    };
    let device = |index: u32| trace.devices[index as usize].ordinal;
    let mut tables: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
    for (index, op) in trace.ops.iter().enumerate() {
        let place = (device(op.device), op.stream, op.context, trace.processes[op.process as usize].pid);
        let launch = trace.launch_of(index).map(|call| (call.start, text(call.name)));
        let detail = trace.detail_of(index).map(|detail| match *detail {
            OpDetail::Kernel(kernel) => {
                format!("{:?}", KernelDetail { short_name: StrId::NONE, ..kernel })
            }
            ref other => format!("{other:?}"),
        });
        let what = (op.kind, text(op.name), op.correlation, op.graph_node, op.bytes);
        let row = format!("{:?} {:?} {:?} {:?} {:?}", (op.start, op.end), what, place, launch, detail);
        tables.entry("ops").or_default().push(row);
    }
    for call in trace.calls.iter() {
        let what = (call.kind, text(call.name), call.correlation, call.result);
        let row = format!("{:?} {:?} {:?}", (call.start, call.end), what, thread(call.thread));
        tables.entry("calls").or_default().push(row);
    }
    for range in trace.ranges.iter() {
        let what = (range.source, text(range.name), text(range.domain), range.kind, range.iteration);
        let flags = range.flags & range_flags::MARK;
        let inputs = [range.dims, range.types, range.values, range.strides].map(text);
        let row = format!("{:?} {:?} {:?} {flags} {:?}", (range.start, range.end), what, inputs, thread(range.thread));
        tables.entry("ranges").or_default().push(row);
    }
    for counter in trace.counters.iter().filter(|counter| !counter.name.starts_with("tokens per iteration")) {
        let samples = counter.times.iter().zip(&counter.values).filter(|(_, value)| value.is_finite());
        let of = counter.device.map(device);
        let rows = samples.map(|(time, value)| format!("{} {of:?} {time} {value}", counter.name));
        tables.entry("counters").or_default().extend(rows);
    }
    for a in &trace.allocations {
        let what = (a.time, a.device.map(device), a.address, a.bytes, a.mem_kind, text(a.name));
        let row = format!("{what:?} {:?} {:?}", a.total_allocated, a.total_reserved);
        tables.entry("allocations").or_default().push(row);
    }
    tables.insert("iterations", trace.iterations.iter().map(|iteration| format!("{iteration:?}")).collect());
    let used = |index: usize| trace.ops.device.iter().any(|&device| device as usize == index);
    let devices = trace.devices.iter().enumerate().filter(|&(index, _)| used(index));
    let devices = devices.map(|(_, device)| format!("{:?}", Device { source: 0, ..device.clone() }));
    tables.insert("devices", devices.collect());
    tables.insert("session start", vec![format!("{:?}", trace.meta.session_start_utc_ns)]);
    tables.values_mut().for_each(|rows| rows.sort());
    tables
}

fn assert_round_trip(trace: &Trace, name: &str) {
    let path = scratch(&name.replace('/', "-"));
    write(trace, Format::ChromeJson, &path).unwrap();
    let back = import::read_files(std::slice::from_ref(&path), &mut |_| {}).unwrap();
    let (before, after) = (contents(trace), contents(&back));
    for (table, rows) in &before {
        let found = after.get(table).cloned().unwrap_or_default();
        let differing = rows.iter().zip(&found).find(|(a, b)| a != b);
        assert!(differing.is_none(), "{table} of {name}: {differing:#?}");
        assert_eq!(rows.len(), found.len(), "{table} of {name}");
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn what_is_written_is_read_back() {
    let mut trace = gpu();
    // What is no JSON comes back in quotes.
    trace.ranges.types.fill(StrId::NONE);
    assert_round_trip(&trace, "gpu-back.json");
    let back = scratch("cpu-back.json");
    write(&cpu(), Format::ChromeJson, &back).unwrap();
    let back = import::read_files(&[back], &mut |_| {}).unwrap();
    assert_eq!(back.iterations, cpu().iterations);
}

#[test]
fn real_traces_come_back_with_every_number() {
    let Some(data) = real_data() else { return };
    let files = [
        "nsys/h200/rep_sdpa.sqlite",
        "nsys/h200/node.sqlite",
        "nsys/h200/gpum.sqlite",
        "nsys/nsys-ai/mfu_2gpu_before.sqlite",
        "nsys/nsys-ai/h100_2gpu_1s.sqlite",
        "kineto/h200/kineto_graph.json.gz",
        "kineto/tracelens/sglang_decode",
        "kineto/tracelens/vllm_decode_full/graph_execution.json.gz",
        "kineto/tracelens/h100_qwen",
        "kineto/hta/trace_diff_test.json.gz",
        "kineto/hta/ns_resolution_rank-0.json.gz",
    ];
    for file in files {
        let trace = import::read_files(&[data.join(file)], &mut |_| {}).unwrap();
        assert_round_trip(&trace, &format!("{file}.back.json"));
    }
}
