//! Made-up traces for the tests of the explorer.

use strobe_report::explorer::{
    CategoryBar, CategoryBars, Explorer, Finding, IterationCell, Iterations, NONE, ReportTab, Side, Table, Timeline,
    Track, TrackKind,
};
use strobe_report::html::{Card, Link};
use strobe_report::svg::{self, StackedChart, StackedRow, Unit};
use strobe_report::{human, table};

/// How many kernels the kernel table of [`one_trace`] lists.
pub(crate) const KERNELS: usize = 60;
/// How many iterations [`one_trace`] has.
pub(crate) const ITERATIONS: usize = 40;
/// A name that would run if it were taken for markup or script.
pub(crate) const HOSTILE: &str =
    "</script><script>window.hacked=1</script><img src=x onerror=\"window.hacked=1\"> ${window.hacked=1} ' \" & \\";

const PARTS: [&str; 7] =
    ["gemm", "attention", "norm", "elementwise", "launch-bound idle", "host-bound idle", "unknown"];
const KERNELS_PER_ITERATION: usize = 120;

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn kernel_name(kernel: usize) -> String {
    match kernel % 4 {
        0 => format!("nvjet_sm90_{}", kernel / 4),
        1 => format!("void flash::flash_fwd_kernel<Traits<{kernel}, 128, 64>, true>(Flash_fwd_params)"),
        2 => format!("void vectorized_layer_norm_kernel<float, {kernel}>(int, float const*)"),
        _ => format!("void at::native::vectorized_elementwise_kernel<4, at::native::silu_{kernel}>(int)"),
    }
}

/// One iteration after the other: host ranges and launches, and the kernels they start. `stretch` slows kernels down.
fn side(name: &str, stretch: u64, seed: u64) -> Side {
    let mut random = Random(seed);
    let mut strings: Vec<String> = (0..KERNELS).map(kernel_name).collect();
    let mut text = |t: &str| {
        strings.push(t.to_owned());
        strings.len() as u32 - 1
    };
    let (launch, forward, schedule, layer) =
        (text("cudaLaunchKernel"), text("forward_step"), text("schedule"), text("layer"));
    let shape = text("grid 132 × 1 × 1, block 384 × 1 × 1, 168 registers per thread");
    let copy = text("[CUDA memcpy Host-to-Device]");
    let mut ops = Track::new("GPU 0: NVIDIA H200", "stream 7", TrackKind::Ops);
    let mut copies = Track::new("GPU 0: NVIDIA H200", "stream 13 (copies)", TrackKind::Ops);
    let mut metric = Track { unit: "%".into(), ..Track::new("GPU 0: NVIDIA H200", "SM active", TrackKind::Counter) };
    let mut ranges = Track::new("python3 (4242)", "main thread", TrackKind::Ranges);
    let mut calls = Track::new("python3 (4242)", "CUDA calls", TrackKind::Calls);
    let mut cells = Vec::new();
    let push = |track: &mut Track, start: i64, duration: i64, name: u32, category: u16| {
        track.start.push(start);
        track.duration.push(duration);
        track.name_ids.push(name);
        track.category_ids.push(category);
    };
    let mut now: i64 = -5_000_000; // times may be negative
    for iteration in 0..ITERATIONS {
        let begin = now;
        let prefill = iteration % 16 == 0;
        let mut parts = [0i64; PARTS.len()];
        push(&mut ranges, begin, 40_000, schedule, 5);
        now += 50_000;
        let forward_at = now;
        let mut device = now + 8_000;
        push(&mut copies, device, 12_000, copy, 4);
        copies.correlations.push(0);
        copies.links.push(NONE);
        copies.detail_ids.push(NONE);
        for op in 0..KERNELS_PER_ITERATION {
            let kernel = (op * 7 + iteration) % KERNELS;
            let call = 3_000 + random.below(1_500) as i64;
            push(&mut calls, now, call, launch, 6);
            let start = device.max(now + call + 1_200);
            parts[4] += start - device.min(start);
            let length = (1_500 + random.below(9_000) * if prefill { 6 } else { 1 })
                * if kernel.is_multiple_of(4) { stretch } else { 10 }
                / 10;
            push(&mut ops, start, length as i64, kernel as u32, (kernel % 4) as u16);
            let correlation = (iteration * KERNELS_PER_ITERATION + op) as i64 + 1;
            ops.correlations.push(correlation);
            calls.correlations.push(correlation);
            ops.detail_ids.push(if kernel.is_multiple_of(4) { shape } else { NONE });
            ops.links.push(calls.start.len() as u32 - 1);
            parts[kernel % 4] += length as i64;
            if op % 30 == 0 {
                push(&mut ranges, now, 30 * 3_000, layer, 5);
            }
            now += call;
            device = start + length as i64;
        }
        push(&mut ranges, forward_at, now - forward_at, forward, 5);
        let end = now.max(device) + if iteration == 1 { 9_000_000 } else { 30_000 };
        now = end;
        parts[5] = end - begin - parts.iter().sum::<i64>();
        let known = parts.map(Some);
        cells.push(IterationCell {
            label: format!("#{iteration}"),
            kind: if prefill { "prefill" } else { "decode" }.into(),
            start: begin,
            end,
            parts: known.to_vec(),
            facts: vec![if prefill { "1" } else { "16" }.into(), if prefill { "2,048" } else { "16" }.into()],
        });
    }
    for sample in 0..((now + 5_000_000) / 50_000) {
        metric.start.push(-5_000_000 + sample * 50_000);
        metric.values.push((sample % 40) as f64 * 2.0 + random.below(20) as f64);
    }
    // Calls come after the three tracks above, ranges after the calls.
    let before = (ops.start.len() + copies.start.len() + metric.start.len()) as u32;
    ops.links.iter_mut().for_each(|link| *link += before);
    let categories = ["gemm", "attention", "norm", "elementwise", "memcpy", "range", "call"].map(str::to_owned);
    Side {
        name: name.into(),
        timeline: Some(Timeline {
            tracks: vec![ops, copies, metric, calls, ranges],
            strings,
            categories: categories.to_vec(),
        }),
        iterations: Iterations {
            note: "Found by markers of the engine. The wall runs from one marker to the next.".into(),
            part_names: PARTS.map(str::to_owned).to_vec(),
            fact_names: vec!["requests".into(), "tokens".into()],
            cells,
        },
    }
}

/// Events and summed time of the ops with this name.
pub(crate) fn ops_named(page: &Explorer, name: &str) -> (u64, i64) {
    let timeline = page.sides[0].timeline.as_ref().unwrap();
    let ops = &timeline.tracks[0];
    let matching = (0..ops.start.len()).filter(|&i| timeline.strings[ops.name_ids[i] as usize] == name);
    matching.fold((0, 0), |(count, time), i| (count + 1, time + ops.duration[i]))
}

/// Ops on the device, their summed time, and the time in which at least one ran.
pub(crate) fn device_time(page: &Explorer) -> (u64, i64, i64) {
    let tracks = &page.sides[0].timeline.as_ref().unwrap().tracks;
    let ops = tracks.iter().filter(|track| track.kind == TrackKind::Ops);
    let mut spans: Vec<(i64, i64)> = ops
        .flat_map(|track| track.start.iter().zip(&track.duration))
        .map(|(&start, &ns)| (start, start + ns))
        .collect();
    spans.sort_unstable();
    let (mut busy, mut until) = (0, i64::MIN);
    for &(start, end) in &spans {
        busy += (end - start.max(until)).max(0);
        until = until.max(end);
    }
    (spans.len() as u64, spans.iter().map(|span| span.1 - span.0).sum(), busy)
}

/// The cells of a row of the kernel table.
pub(crate) fn kernel_row(kernel: usize) -> Vec<String> {
    let calls = (ITERATIONS * KERNELS_PER_ITERATION / KERNELS) as u64;
    // The number of calls is that of the trace; what else the row says is made up.
    vec![kernel_name(kernel), human::count(calls + kernel as u64 * 7 % 5), human::ns(1e6 / (kernel + 1) as f64)]
}

fn kernel_table(extra: &[&str]) -> Table {
    let headers = ["kernel", "calls", "total"].into_iter().chain(extra.iter().copied());
    let mut rows = table::Table::new(headers).title("Kernels by total time");
    for kernel in 0..KERNELS {
        let [name, calls, total] = kernel_row(kernel).try_into().unwrap();
        let calls_value = calls.replace(',', "").parse().unwrap();
        let mut cells = vec![
            name.into(),
            table::Cell::number(calls, calls_value),
            table::Cell::number(total, 1e6 / (kernel + 1) as f64),
        ];
        for (at, _) in extra.iter().enumerate() {
            let change = (kernel as f64 - 20.0) * (at + 1) as f64 * 100.0;
            cells.push(table::Cell::number(format!("{change:+.0} ns"), change));
        }
        rows.push(cells);
    }
    Table { table: rows.total(["all kernels", "4,800", "4.68 ms"]), event_names: vec![0] }
}

fn bars(sides: usize) -> CategoryBars {
    let rows =
        ["gemm", "attention", "norm", "elementwise", "memcpy"].iter().enumerate().map(|(at, name)| CategoryBar {
            name: (*name).into(),
            values: (0..sides)
                .map(|side| {
                    let ns = 9e6 / (at + 1) as f64 * (1.0 + 0.2 * side as f64);
                    table::Cell::number(format!("{} ({})", human::ns(ns), human::percent(ns / 2.2e7)), ns)
                })
                .collect(),
        });
    CategoryBars {
        note: "Time on the device by category; shares are of the summed time of all ops.".into(),
        rows: rows.collect(),
    }
}

fn budgets(names: &[&str]) -> svg::Svg {
    let rows = names.iter().zip(1..).map(|(name, at)| {
        StackedRow::new(*name, PARTS.iter().zip(1..).map(|(part, size)| (*part, 1e5 * f64::from(at) / f64::from(size))))
    });
    svg::stacked(&StackedChart {
        title: "Median iteration".into(),
        unit: Unit::Time,
        rows: rows.collect(),
        normalize: false,
    })
}

/// A page of one trace.
pub(crate) fn one_trace() -> Explorer {
    let mut calls = table::Table::new(["call", "time", "count"]).title("CUDA API summary");
    for call in 0..130 {
        calls.push([
            format!("cudaCall{call}").into(),
            table::Cell::number(human::ns(1e6 / f64::from(call + 1)), 1e6 / f64::from(call + 1)),
            table::Cell::number("n/a", f64::NAN),
        ]);
    }
    Explorer {
        title: "qwen3_decode.sqlite".into(),
        links: Vec::new(),
        subtitle: "Nsight Systems 2025.3.2 · NVIDIA H200 · 40 iterations by markers · 51.2 ms".into(),
        verdict: Some("Decode is host-bound: 38.6 % of the wall is idle behind launches.".into()),
        cards: vec![
            Card::new("GPU busy", "61.4 %").note("of 51.2 ms wall, union over streams"),
            Card::new("decode iteration", "1.21").unit("ms").note("median of 37, ±0.04 ms"),
            Card::new("kernels per iteration", "120"),
            Card::new("launch delay", "5.3").unit("µs").note("median, call to start"),
        ],
        findings: vec![
            Finding {
                severity: "high".into(),
                name: "The device waits for launches".into(),
                title: "Decode is host-bound: 38.6 % of the wall is idle behind launches of 3.7 µs.".into(),
                detail: "CUDA graphs launch all kernels of a step at once.".into(),
                gain: "up to 0.47 ms of 1.21 ms per step".into(),
            },
            Finding {
                title: "Iteration 1 took 9.1 ms longer than its kind.".into(),
                detail: "Module loading.".into(),
                ..Finding::default()
            },
        ],
        charts: vec![budgets(&["decode", "prefill"])],
        categories: Some(bars(1)),
        sides: vec![side("trace", 10, 7)],
        pairs: Vec::new(),
        kernels: Some(kernel_table(&[])),
        reports: vec![
            ReportTab {
                name: "api-sum".into(),
                title: "Calls of the host by total time".into(),
                notes: vec!["Time % is of the listed rows.".into()],
                absent: None,
                tables: vec![calls.into()],
            },
            ReportTab {
                name: "mem-time-sum".into(),
                title: "Memory operations by time".into(),
                absent: Some("no memory copies in the trace".into()),
                ..ReportTab::default()
            },
        ],
        notes: vec![
            "99.8 % of GPU time is attributed to an iteration.".into(),
            "10 of 4,840 ops have no launch row.".into(),
        ],
    }
}

/// A page of two traces.
pub(crate) fn comparison() -> Explorer {
    let kernels = kernel_table(&["difference", "95 % low", "95 % high"]);
    Explorer {
        title: "before → after".into(),
        subtitle: "40 iterations each, aligned by kind".into(),
        verdict: Some("B is 12.3 % slower per decode iteration (1.21 → 1.36 ms): gemm +0.11 ms.".into()),
        cards: vec![Card::new("decode iteration", "+12.3").unit("%").note("95 %: +11.0 to +13.4 %, of A's median")],
        charts: vec![budgets(&["before", "after"])],
        categories: Some(bars(2)),
        sides: vec![side("before", 10, 7), side("after", 14, 11)],
        pairs: (0..30).map(|i| (i, if i == 2 { 4 } else { i })).collect(),
        kernels: Some(kernels),
        ..one_trace()
    }
}

/// A page on which every text is [`HOSTILE`].
pub(crate) fn hostile() -> Explorer {
    let text = || HOSTILE.to_owned();
    let mut page = one_trace();
    (page.title, page.subtitle, page.verdict) = (text(), text(), Some(text()));
    page.cards = vec![Card::new(text(), text()).unit(text()).note(text())];
    page.findings = vec![Finding { severity: text(), name: text(), title: text(), detail: text(), gain: text() }];
    page.links = vec![Link::new(text(), text())];
    page.notes = vec![text()];
    let bar = CategoryBar { name: text(), values: vec![table::Cell::number(text(), 1.0)] };
    page.categories = Some(CategoryBars { note: text(), rows: vec![bar] });
    let rows = table::Table::new([text(), text()]).title(text()).row([text(), text()]).total([text(), text()]);
    page.kernels = Some(Table { table: rows.clone(), event_names: vec![0, 1] });
    page.reports = vec![ReportTab {
        name: text(),
        title: text(),
        notes: vec![text()],
        absent: Some(text()),
        tables: vec![rows.into()],
    }];
    let side = &mut page.sides[0];
    side.name = text();
    side.iterations.note = text();
    for names in [&mut side.iterations.part_names, &mut side.iterations.fact_names] {
        names.iter_mut().for_each(|name| *name = text());
    }
    for cell in &mut side.iterations.cells {
        (cell.label, cell.kind) = (text(), text());
        cell.facts.iter_mut().for_each(|fact| *fact = text());
    }
    let timeline = side.timeline.as_mut().unwrap();
    timeline.strings.iter_mut().chain(&mut timeline.categories).for_each(|string| *string = text());
    for track in &mut timeline.tracks {
        (track.group, track.name, track.unit) = (text(), text(), text());
    }
    page
}

/// A million events: eight streams, launches, nested ranges, and 100,000 iterations.
pub(crate) fn million() -> Explorer {
    let mut random = Random(1);
    let categories: Vec<String> =
        ["gemm", "attention", "norm", "activation", "comm", "call", "range"].map(str::to_owned).to_vec();
    let strings: Vec<String> = (0..2_000).map(|i| format!("void kernel_{i}<float, {i}>(float*)")).collect();
    let mut tracks = Vec::new();
    const EACH: u32 = 56_250;
    for gpu in 0..2u32 {
        for stream in 0..4u32 {
            let mut track = Track::new(format!("GPU {gpu}"), format!("stream {}", 7 + stream), TrackKind::Ops);
            let mut now = i64::from(stream) * 1_000;
            for event in 0..EACH {
                let length = 500 + random.below(20_000) as i64;
                track.start.push(now);
                track.duration.push(length);
                track.name_ids.push(random.below(2_000) as u32);
                track.category_ids.push(random.below(5) as u16);
                track.correlations.push(i64::from(event) + 1);
                track.links.push(8 * EACH + (gpu * 4 + stream) * EACH + event);
                now += length + random.below(9_000) as i64;
            }
            tracks.push(track);
        }
    }
    for thread in 0..8u32 {
        let mut track = Track::new("host", format!("thread {thread}"), TrackKind::Calls);
        for event in 0..EACH {
            track.start.push(i64::from(event) * 15_000);
            track.duration.push(3_000 + random.below(2_000) as i64);
            track.name_ids.push(random.below(20) as u32);
            track.category_ids.push(5);
        }
        tracks.push(track);
    }
    let mut ranges = Track::new("host", "ranges", TrackKind::Ranges);
    for outer in 0..25_000i64 {
        for (depth, length) in [33_000i64, 30_000, 20_000, 9_000].into_iter().enumerate() {
            ranges.start.push(outer * 33_750 + depth as i64 * 500);
            ranges.duration.push(length);
            ranges.name_ids.push(100 + depth as u32);
        }
    }
    tracks.push(ranges);
    let cells = (0..100_000i64).map(|i| IterationCell {
        label: format!("#{i}"),
        kind: if i % 50 == 0 { "prefill" } else { "decode" }.into(),
        start: i * 8_437,
        end: i * 8_437 + 8_000 + (i * 37) % 400,
        parts: vec![Some(5_000), Some(3_000 + (i * 37) % 400)],
        facts: Vec::new(),
    });
    let iterations =
        Iterations { part_names: vec!["gemm".into(), "idle".into()], cells: cells.collect(), ..Iterations::default() };
    let timeline = Timeline { tracks, strings, categories };
    Explorer {
        title: "A million events".into(),
        sides: vec![Side { name: "big".into(), timeline: Some(timeline), iterations }],
        ..Explorer::default()
    }
}
