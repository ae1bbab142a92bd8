//! Every plot and table on one page: `cargo run -p strobe-report --example gallery > gallery.html`.

use strobe_report::html::{Card, Page};
use strobe_report::human;
use strobe_report::svg::{
    self, BarChart, BarSeries, CdfChart, CdfSeries, IterationStrip, StackedChart, StackedRow, StripCell, Unit,
};
use strobe_report::table::{Cell, Table};

fn main() {
    let throughput = svg::bars(&BarChart {
        title: "Throughput".into(),
        unit: Unit::Plain("tok/s".into()),
        groups: vec!["output".into(), "input".into(), "total".into()],
        series: vec![
            BarSeries::new("context-fmha enable", [1834.2, 3621.0, 5455.2]),
            BarSeries {
                name: "context-fmha disable".into(),
                values: vec![Some(1490.7), Some(2943.9), None],
                ..BarSeries::default()
            },
        ],
    });
    // Two skewed distributions, without a random number generator.
    let latencies = |shift: f64, n: u32| {
        (0..n).map(move |i| {
            let u = (f64::from(i) + 0.5) / f64::from(n);
            (shift + 4.0 * -(1.0 - u).ln()) * 1e6
        })
    };
    let latency = svg::cdf(&CdfChart {
        title: "Request latency".into(),
        x_label: "end-to-end latency".into(),
        unit: Unit::Time,
        series: vec![
            CdfSeries::new("context-fmha enable", latencies(6.0, 64)),
            CdfSeries::new("context-fmha disable", latencies(9.0, 5000)),
        ],
    });
    let budget = |label: &str, scale: f64, attention: f64| {
        let parts = [
            ("schedule", 0.02),
            ("prepare", 0.05),
            ("activation", 0.09),
            ("attention", attention),
            ("embedding", 0.01),
            ("gather", 0.01),
            ("gemm", 1.6),
            ("norm", 0.12),
            ("rope", 0.07),
            ("sampling", 0.06),
            ("sample", 0.02),
            ("respond", 0.03),
            ("idle", 0.21),
            ("unknown", 0.04),
        ];
        StackedRow::new(label, parts.map(|(name, ms)| (name, ms * scale * 1e6)))
    };
    let rows = vec![
        budget("enable · prefill", 4.0, 0.3),
        budget("enable · decode", 1.0, 0.2),
        budget("disable · prefill", 4.0, 0.9),
        budget("disable · decode", 1.0, 0.4),
    ];
    let stacked = |title: &str, normalize| {
        svg::stacked(&StackedChart { title: title.into(), unit: Unit::Time, rows: rows.clone(), normalize })
    };
    let strip = svg::strip(&IterationStrip {
        title: "Iterations".into(),
        unit: Unit::Time,
        cells: (100..151)
            .map(|iter| StripCell {
                iter,
                value: if iter % 17 == 2 { 9.1e6 } else { 2.3e6 + (iter % 5) as f64 * 1e5 },
                kind: if iter % 17 == 2 { "mixed" } else { "decode" }.into(),
                note: "8 decode requests".into(),
            })
            .collect(),
    });
    let mut ops = Table::new(["op", "kernel", "calls", "total", "share of op time", "roofline"]).left(1);
    for (name, kernel, calls, ns, share, roofline) in [
        ("gate_up_proj", "gemm_packed_f32_avx512", 1122, 812e6, 0.41, Some(0.83)),
        ("qkv_proj", "gemm_packed_f32_avx512", 1122, 403e6, 0.21, Some(0.79)),
        ("attention", "fmha_paged_f32_avx512", 1122, 213e6, 0.11, Some(0.44)),
        ("norm", "rms_norm_f32_avx512", 2295, 36e6, 0.02, None),
    ] {
        ops.push([
            Cell::from(name),
            Cell::from(kernel),
            Cell::number(human::count(calls), calls as f64),
            Cell::number(human::ns(ns), ns),
            Cell::number(human::percent(share), share),
            roofline.map_or(Cell::from(human::NOT_KNOWN), |r| Cell::number(human::percent(r), r)),
        ]);
    }
    let page = Page::new("strobe: context-fmha enable against disable")
        .subtitle("micro preset, random weights · 2 threads, AVX-512 · 64 requests of 128/128 tokens")
        .verdict("context-fmha enable is 23.0 % faster (1,834 against 1,491 tok/s); attention accounts for 81 % of the difference.")
        .card(Card::new("Output throughput", "1,834").unit("tok/s").note("+23.0 % over disable"))
        .card(Card::new("Time to first token, p50", "12.4").unit("ms"))
        .card(Card::new("Time per output token, p50", "2.31").unit("ms"))
        .card(Card::new("MFU", "61.2").unit("%").note("of 148 GFLOP/s measured"))
        .section("Throughput")
        .svg(&throughput)
        .section("Latency")
        .prose("Share of requests that took at most this long. Dots mark `p50`, `p90` and `p99`.")
        .svg(&latency)
        .section("Where an iteration goes")
        .prose("Means per iteration of its kind: the parts add up to the wall time.")
        .svg(&stacked("Mean iteration", false))
        .svg(&stacked("Mean iteration, shares of wall time", true))
        .svg(&strip)
        .section("Top ops")
        .table(&ops.total(["all", "", "5,661", "1.46 s", "75.0 %", ""]))
        .details("Configuration", "{\n  \"context_fmha\": true,\n  \"max_batch_size\": 64\n}")
        .finish();
    println!("{page}");
}
