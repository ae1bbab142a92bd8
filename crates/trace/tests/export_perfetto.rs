//! The Perfetto trace, read with a decoder of its own: every slice on its track with its times, slices nest, arrows join.

mod export_common;

use std::collections::{BTreeMap, HashMap};

use export_common::{any_trace, cpu, gpu, real_data, scratch};
use proptest::prelude::*;
use strobe_trace::export::{Format, write};
use strobe_trace::{OpKind, Trace, import, range_flags};

#[derive(Clone, Debug)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

/// The fields of a message by number, in order.
struct Message(BTreeMap<u64, Vec<Field>>);

impl Message {
    fn parse(mut bytes: &[u8]) -> Self {
        let mut fields: BTreeMap<u64, Vec<Field>> = BTreeMap::new();
        while !bytes.is_empty() {
            let tag = varint(&mut bytes);
            let field = match tag & 7 {
                0 => Field::Number(varint(&mut bytes)),
                1 => Field::Number(u64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
                2 => {
                    let length = varint(&mut bytes) as usize;
                    Field::Bytes(take(&mut bytes, length).to_vec())
                }
                other => panic!("wire type {other}"),
            };
            fields.entry(tag >> 3).or_default().push(field);
        }
        Self(fields)
    }

    fn all(&self, field: u64) -> impl Iterator<Item = &Field> {
        self.0.get(&field).into_iter().flatten()
    }

    fn numbers(&self, field: u64) -> Vec<u64> {
        let number = |field: &Field| match field {
            Field::Number(number) => *number,
            Field::Bytes(_) => panic!("not a number"),
        };
        self.all(field).map(number).collect()
    }

    fn number(&self, field: u64) -> Option<u64> {
        self.numbers(field).first().copied()
    }

    fn messages(&self, field: u64) -> Vec<Message> {
        let message = |field: &Field| match field {
            Field::Bytes(bytes) => Message::parse(bytes),
            Field::Number(_) => panic!("not a message"),
        };
        self.all(field).map(message).collect()
    }

    fn text(&self, field: u64) -> Option<String> {
        match self.all(field).next()? {
            Field::Bytes(bytes) => Some(String::from_utf8(bytes.clone()).unwrap()),
            Field::Number(_) => panic!("not text"),
        }
    }
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(count);
    *bytes = rest;
    taken
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = take(bytes, 1)[0];
        value |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            return value;
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Slice {
    track: u64,
    name: String,
    category: String,
    start: i64,
    end: i64,
    flows: Vec<u64>,
    ends_flow: bool,
    annotations: BTreeMap<String, String>,
}

#[derive(Default)]
struct Decoded {
    /// Name and parent by track.
    tracks: HashMap<u64, (String, u64)>,
    slices: Vec<Slice>,
    instants: Vec<(String, i64)>,
    samples: Vec<(u64, i64, f64)>,
    realtime: Option<u64>,
}

impl Decoded {
    fn slice(&self, name: &str) -> &Slice {
        self.slices.iter().find(|slice| slice.name == name).unwrap_or_else(|| panic!("no slice {name}"))
    }

    fn path(&self, track: u64) -> String {
        let (name, parent) = &self.tracks[&track];
        if *parent == 0 { name.clone() } else { format!("{} / {name}", self.path(*parent)) }
    }
}

/// Plays the packets as a viewer does: an end closes the innermost open slice of its track.
fn decode(bytes: &[u8]) -> Decoded {
    let mut decoded = Decoded::default();
    let mut interned: HashMap<(u64, u64), String> = HashMap::new();
    let mut events = Vec::new();
    for (order, packet) in Message::parse(bytes).messages(1).into_iter().enumerate() {
        assert_eq!(packet.number(10), Some(1), "one sequence");
        for snapshot in packet.messages(6) {
            let clocks = snapshot.messages(1);
            decoded.realtime = clocks.iter().find(|clock| clock.number(1) == Some(1)).and_then(|clock| clock.number(2));
        }
        for data in packet.messages(12) {
            assert_eq!(packet.number(13), Some(1));
            for table in [1, 2, 3, 29] {
                for entry in data.messages(table) {
                    interned.insert((table, entry.number(1).unwrap()), entry.text(2).unwrap());
                }
            }
        }
        for descriptor in packet.messages(60) {
            let nested = [(3, 6), (4, 5)];
            let nested =
                nested.iter().find_map(|&(kind, name)| descriptor.messages(kind).first().map(|m| m.text(name)));
            let name = nested.flatten().or_else(|| descriptor.text(2)).unwrap();
            let parent = descriptor.number(5).unwrap_or(0);
            assert!(parent == 0 || decoded.tracks.contains_key(&parent), "parents come first");
            assert!(decoded.tracks.insert(descriptor.number(1).unwrap(), (name, parent)).is_none());
        }
        if let Some(event) = packet.messages(11).pop() {
            events.push((packet.number(8).unwrap() as i64, order, event));
        }
    }
    events.sort_by_key(|&(time, order, _)| (time, order));
    let mut open: HashMap<u64, Vec<Slice>> = HashMap::new();
    for (time, _, event) in events {
        let track = event.number(11).unwrap();
        assert!(decoded.tracks.contains_key(&track));
        let name = || event.text(23).unwrap_or_else(|| interned[&(2, event.number(10).unwrap())].clone());
        match event.number(9).unwrap() {
            1 => {
                let annotation = |a: Message| {
                    let numbers = [3, 4].iter().find_map(|&f| a.number(f)).map(|n| (n as i64).to_string());
                    let text = a.text(6).or_else(|| a.number(17).map(|id| interned[&(29, id)].clone()));
                    (interned[&(3, a.number(1).unwrap())].clone(), numbers.or(text).unwrap())
                };
                open.entry(track).or_default().push(Slice {
                    track,
                    name: name(),
                    category: interned[&(1, event.number(3).unwrap())].clone(),
                    start: time,
                    end: i64::MIN,
                    flows: [event.numbers(47), event.numbers(48)].concat(),
                    ends_flow: event.number(48).is_some(),
                    annotations: event.messages(4).into_iter().map(annotation).collect(),
                });
            }
            2 => {
                let slice = open.get_mut(&track).and_then(Vec::pop).expect("an open slice");
                decoded.slices.push(Slice { end: time, ..slice });
            }
            3 => decoded.instants.push((name(), time)),
            4 => decoded.samples.push((track, time, f64::from_bits(event.number(44).unwrap()))),
            other => panic!("event of type {other}"),
        }
    }
    assert!(open.values().all(Vec::is_empty), "every slice is closed");
    decoded
}

fn export(trace: &Trace, name: &str) -> Decoded {
    let path = scratch(name);
    let written = write(trace, Format::from_path(&path).unwrap(), &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(written.bytes, bytes.len() as u64);
    let decoded = decode(&bytes);
    let events = decoded.slices.len() + decoded.instants.len() + decoded.samples.len();
    assert_eq!(written.events, events as u64);
    decoded
}

#[test]
fn a_gpu_trace_on_its_tracks() {
    let decoded = export(&gpu(), "gpu.perfetto-trace");
    let offset = 1_000; // the earliest event is at -1,000
    let step = decoded.slice("step 1\n");
    assert_eq!((step.start, step.end, step.category.as_str()), (0, 11_000, "annotation"));
    assert_eq!(decoded.path(step.track), "worker");
    let gemm = decoded.slice("void gemm<\"a\\b\">(float*)");
    assert_eq!((gemm.start - offset, gemm.end - offset, gemm.category.as_str()), (5_000, 8_100, "kernel"));
    assert_eq!(decoded.path(gemm.track), "GPU 0: NVIDIA H200 / stream 7");
    assert_eq!((gemm.annotations["grid x"].as_str(), gemm.annotations["graph node"].as_str()), ("4", "8589934592"));
    let reduce = decoded.slice("reduce");
    assert_eq!(decoded.path(reduce.track), "GPU 0: NVIDIA H200 / stream 7 / stream 7 (overlap 1)");
    // One chain of arrows from the launch through both kernels.
    let launch = decoded.slice("cudaGraphLaunch_v10000");
    assert_eq!((&launch.flows, &launch.flows), (&gemm.flows, &reduce.flows));
    assert_eq!((launch.ends_flow, gemm.ends_flow, reduce.ends_flow), (false, false, true));
    let copy = decoded.slice("[CUDA memcpy Host-to-Device]");
    assert_eq!((copy.annotations["bytes"].as_str(), copy.annotations["source memory"].as_str()), ("4096", "Pageable"));
    assert_eq!(decoded.slice("aten::mm").annotations["input dims"], "[[8, 2048], []]");
    assert_eq!(decoded.path(decoded.slice("loading").track), "worker / worker: start/end ranges");
    assert_eq!(decoded.instants, [("now".to_owned(), 1_100)]);
    let samples: Vec<_> = decoded.samples.iter().map(|&(track, at, v)| (decoded.path(track), at - offset, v)).collect();
    let metric = "GPU 0: NVIDIA H200 / SM Active".to_owned();
    let memory = "GPU 0: NVIDIA H200 / device memory allocated (bytes)".to_owned();
    assert_eq!(samples, [(metric.clone(), -100, 12.5), (memory, 0, 0.0), (metric, 100, 100.0)]);
    assert_eq!(decoded.realtime, Some(1_794_711_319_973_357_605));
}

#[test]
fn a_cpu_trace_has_ops_under_ranges_and_iterations() {
    let decoded = export(&cpu(), "cpu.pftrace");
    let op = decoded.slice("qkv_proj");
    assert_eq!(decoded.path(op.track), "engine \"loop\"");
    assert_eq!(
        (op.annotations["kernel"].as_str(), op.annotations["flops"].as_str()),
        ("gemm_packed_f32_avx512", "60000")
    );
    assert_eq!(decoded.path(decoded.slice("iteration 7 (decode)").track), "iterations");
    let tokens: Vec<f64> = decoded.samples.iter().map(|sample| sample.2).collect();
    assert_eq!(tokens, [0.0, 3.0, 0.0, 0.0]);
}

/// The spans of a trace by name, as they should come back.
fn expected(trace: &Trace) -> Vec<(String, i64, i64)> {
    let mark = |i: usize| trace.ranges.flags[i] & range_flags::MARK != 0;
    let ranges = (0..trace.ranges.len()).filter(|&i| !mark(i));
    let ranges = ranges.map(|i| (trace.ranges.name[i], trace.ranges.start[i], trace.ranges.end[i]));
    let calls = trace.calls.iter().map(|call| (call.name, call.start, call.end));
    let ops = trace.ops.iter().map(|op| (op.name, op.start, op.end));
    let all = ranges.chain(calls).chain(ops);
    let mut all: Vec<_> = all.map(|(name, start, end)| (trace.text(name).to_owned(), start, end)).collect();
    all.sort();
    all
}

fn found(decoded: &Decoded, offset: i64) -> Vec<(String, i64, i64)> {
    let slices = decoded.slices.iter().map(|s| (s.name.clone(), s.start - offset, s.end - offset));
    let mut slices: Vec<_> = slices.collect();
    slices.sort();
    slices
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_slice_comes_back_whole(trace in any_trace()) {
        let decoded = export(&trace, "any.pb");
        let samples = trace.counters.iter().flat_map(|c| &c.times).copied();
        let starts = trace.ops.start.iter().chain(&trace.calls.start).chain(&trace.ranges.start).copied();
        let offset = -starts.chain(samples).min().unwrap_or(0).min(0);
        prop_assert_eq!(found(&decoded, offset), expected(&trace));
        // Each op that was launched stands at the end of an arrow from its call.
        let ends = decoded.slices.iter().filter(|s| s.ends_flow).count();
        let launching: std::collections::HashSet<u32> = trace.ops.launch.iter().copied().collect();
        prop_assert_eq!(ends, launching.iter().filter(|&&call| call != strobe_trace::NONE).count());
    }
}

#[test]
fn real_traces_come_back_whole() {
    let Some(data) = real_data() else { return };
    for file in ["nsys/h200/node.sqlite", "nsys/nsys-ai/mfu_2gpu_before.sqlite", "kineto/tracelens/h100_qwen"] {
        let trace = import::read_files(&[data.join(file)], &mut |_| {}).unwrap();
        let decoded = export(&trace, &format!("{}.pftrace", file.replace('/', "-")));
        let everything = expected(&trace);
        let first = decoded.slices.iter().map(|s| s.start).min().unwrap();
        let offset = first - everything.iter().map(|span| span.1).min().unwrap();
        assert!(found(&decoded, offset) == everything, "{file}");
        let kernels = decoded.slices.iter().filter(|s| s.category == "kernel").count();
        assert_eq!(kernels, trace.ops.kind.iter().filter(|&&kind| kind == OpKind::Kernel).count());
    }
}
