//! Plots and pages are well-formed, self-contained, and safe whatever the labels and values are.

use strobe_report::html::{Card, Link, Page};
use strobe_report::svg::{
    self, BarChart, BarSeries, CdfChart, CdfSeries, IterationStrip, StackedChart, StackedRow, StripCell, Svg, Unit,
};
use strobe_report::table::{Cell, Table};

const HOSTILE: &str = "<script>alert('x')</script>\" onload=\"y & \u{1}";

/// Checks that tags nest and attributes are quoted, and returns the tags in their order.
fn tags(markup: &str) -> Vec<String> {
    const VOID: [&str; 1] = ["meta"];
    let (mut open, mut seen): (Vec<&str>, Vec<String>) = (Vec::new(), Vec::new());
    let mut rest = markup;
    while let Some(begin) = rest.find('<') {
        // The text of style and script elements is not markup.
        if let Some(raw) = open.last().filter(|t| ["style", "script"].contains(*t)) {
            let close = format!("</{raw}>");
            let end = rest.find(&close).expect("raw text ends");
            rest = &rest[end + close.len()..];
            open.pop();
            continue;
        }
        let end = begin + rest[begin..].find('>').expect("a tag ends");
        let tag = &rest[begin + 1..end];
        rest = &rest[end + 1..];
        assert!(!tag.contains('<'), "unescaped < in {tag}");
        assert_eq!(tag.matches('"').count() % 2, 0, "unbalanced quotes in {tag}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "{name} closes something else");
            continue;
        }
        let name = tag.split([' ', '/']).next().unwrap();
        seen.push(name.to_owned());
        if !tag.ends_with('/') && !tag.starts_with('!') && !VOID.contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "left open: {open:?}");
    seen
}

fn check(svg: &Svg) -> Vec<String> {
    let text = svg.as_str();
    let seen = tags(text);
    assert_eq!(seen[0], "svg");
    assert!(!text.contains("NaN") && !text.contains("inf\""), "{text}");
    assert!(!text.contains("<script>") && !text.contains('\u{1}'), "{text}");
    seen
}

fn count(seen: &[String], tag: &str) -> usize {
    seen.iter().filter(|t| *t == tag).count()
}

fn bar_chart(values: Vec<Option<f64>>) -> Svg {
    svg::bars(&BarChart {
        title: HOSTILE.into(),
        unit: Unit::Plain(HOSTILE.into()),
        groups: vec![HOSTILE.into(), "b".into()],
        series: vec![BarSeries { name: HOSTILE.into(), values, runs: Vec::new() }],
    })
}

#[test]
fn bars_draw_what_is_known() {
    // One legend entry and one bar each.
    assert_eq!(count(&check(&bar_chart(vec![Some(1.0), Some(-2.0)])), "rect"), 3);
    let partial = bar_chart(vec![Some(1.0), Some(f64::NAN)]);
    assert_eq!(count(&check(&partial), "rect"), 2);
    assert!(partial.as_str().contains(">n/a<"));
    assert!(bar_chart(vec![None]).as_str().contains("no values"));
}

#[test]
fn runs_are_dots_on_their_option() {
    let series = |name: &str, runs: &[f64]| BarSeries { runs: vec![runs.to_vec()], ..BarSeries::new(name, [2.0]) };
    let plot = svg::bars(&BarChart {
        title: "t".into(),
        unit: Unit::Plain("tok/s".into()),
        groups: vec!["g".into()],
        series: vec![series("a", &[1.0, 3.0]), series("b", &[2.0, f64::NAN, 5.0])],
    });
    let seen = check(&plot);
    assert_eq!((count(&seen, "rect"), count(&seen, "circle")), (4, 4));
}

#[test]
fn kinds_far_apart_have_scales_of_their_own() {
    let strip = |slow: f64| {
        let cell = |iter: u64| {
            let kind = if iter < 4 { "prefill" } else { "decode" };
            StripCell { iter, value: if iter < 4 { slow } else { 1e6 }, kind: kind.into(), note: String::new() }
        };
        svg::strip(&IterationStrip { title: "t".into(), unit: Unit::Time, cells: (0..20).map(cell).collect() })
    };
    let bars = |slow: f64| {
        let rows = [("prefill", slow), ("decode", 1e6)]
            .map(|(kind, ns)| StackedRow::new(kind, [("gemm", ns / 2.0), ("idle", ns / 2.0)]).group(kind));
        svg::stacked(&StackedChart { title: "t".into(), unit: Unit::Time, rows: rows.to_vec(), normalize: false })
    };
    let own = "each kind on its own scale";
    for plot in [strip(40e6), bars(40e6)] {
        check(&plot);
        assert!(plot.as_str().contains(own), "{plot}");
    }
    for plot in [strip(2e6), bars(2e6)] {
        assert!(!plot.as_str().contains(own), "{plot}");
    }
    // The part of the faster kind is as wide as that of the slower one.
    let widths = |plot: &Svg| -> Vec<f64> {
        let parts = plot.as_str().split("<rect ").filter(|part| part.contains("· gemm"));
        let width = |part: &str| part.split("width=\"").nth(1)?.split('"').next()?.parse().ok();
        parts.filter_map(width).collect()
    };
    let widths = widths(&bars(40e6));
    assert!((widths[0] / widths[1] - 1.0).abs() < 0.3, "{widths:?}");
}

#[test]
fn a_bar_has_a_dozen_parts_at_most() {
    let parts = (0..30).map(|part| (format!("part {part}"), f64::from(part + 1)));
    let rows = vec![StackedRow::new("a", parts.clone()), StackedRow::new("b", parts)];
    let plot = svg::stacked(&StackedChart { title: "t".into(), unit: Unit::Time, rows, normalize: false });
    assert_eq!(count(&check(&plot), "rect"), 12 + 2 * 12);
    assert!(plot.as_str().contains("part 29") && plot.as_str().contains("smaller parts"));
    assert!(!plot.as_str().contains("part 3:"));
}

#[test]
fn cdf_marks_percentiles() {
    let chart = |samples: Vec<f64>| {
        svg::cdf(&CdfChart {
            title: "t".into(),
            x_label: HOSTILE.into(),
            unit: Unit::Time,
            series: vec![CdfSeries::new(HOSTILE, samples)],
        })
    };
    let plot = chart((1..=100).rev().map(|i| f64::from(i) * 1e6).collect());
    assert_eq!(count(&check(&plot), "circle"), 3);
    for tip in ["p50: 50.0 ms", "p90: 90.0 ms", "p99: 99.0 ms"] {
        assert!(plot.as_str().contains(tip), "{tip}");
    }
    check(&chart(vec![5.0, f64::INFINITY]));
    // A large run does not make a large file.
    let large = chart((0..200_000).map(f64::from).collect());
    assert!(large.as_str().len() < 30_000, "{}", large.as_str().len());
    assert!(check(&chart(vec![f64::NAN])).len() < 10);
}

#[test]
fn stacked_bars_carry_amount_and_share() {
    for normalize in [false, true] {
        let plot = svg::stacked(&StackedChart {
            title: HOSTILE.into(),
            unit: Unit::Time,
            rows: vec![
                StackedRow::new("a", [("gemm", 3e6), ("idle", 1e6), ("norm", 0.0)]),
                StackedRow::new(HOSTILE, [(HOSTILE, 2e6), ("bad", f64::NAN)]),
                StackedRow::new("empty", Vec::<(String, f64)>::new()),
            ],
            normalize,
        });
        // Three names in the legend, three parts drawn.
        assert_eq!(count(&check(&plot), "rect"), 6);
        assert!(plot.as_str().contains("a · gemm: 3.00 ms (75.0 %)"));
    }
}

#[test]
fn a_long_strip_is_thinned_and_says_so() {
    let plot = |n: u64| {
        svg::strip(&IterationStrip {
            title: "t".into(),
            unit: Unit::Time,
            cells: (0..n)
                .map(|iter| StripCell { iter, value: iter as f64, kind: "decode".into(), note: HOSTILE.into() })
                .collect(),
        })
    };
    assert_eq!(count(&check(&plot(20)), "rect"), 21);
    let long = plot(5_000);
    assert!(count(&check(&long), "rect") <= 701);
    assert!(long.as_str().contains("each bar is the largest of 8"));
    assert!(long.as_str().contains("iteration 4999"));
    assert!(plot(0).as_str().contains("no values"));
}

#[test]
fn a_heat_map_shows_every_cell_or_a_picture_of_them() {
    let map = |rows: usize, columns: usize| svg::HeatMap {
        title: HOSTILE.into(),
        row_label: HOSTILE.into(),
        column_label: "expert".into(),
        value_label: "load".into(),
        rows: (0..rows).map(|row| row + 3).collect(),
        values: (0..rows).map(|row| (0..columns).map(|column| (row * column) as f64).collect()).collect(),
    };
    let mut small = map(2, 4);
    small.values[0][1] = f64::NAN;
    let plot = svg::heat_map(&small);
    // Sixty steps of the scale, and seven values.
    assert_eq!(count(&check(&plot), "rect"), 60 + 7);
    assert!(plot.as_str().contains("expert 3: 3.00 (load)"));
    let large = svg::heat_map(&map(61, 256));
    assert_eq!(count(&check(&large), "rect"), 60);
    assert_eq!(count(&check(&large), "image"), 1);
    assert!(svg::heat_map(&map(0, 0)).as_str().contains("no values"));
    for (rows, columns) in [(0, 0), (1, 1), (8, 8), (61, 256), (2000, 2)] {
        assert!(svg::heat_map_png(&map(rows, columns)).starts_with(b"\x89PNG"));
    }
}

#[test]
fn a_grid_shows_every_known_value() {
    let map = |rows: usize, columns: usize| svg::Grid {
        title: HOSTILE.into(),
        row_label: HOSTILE.into(),
        column_label: "rate".into(),
        rows: (0..rows).map(|row| format!("{HOSTILE}{row}")).collect(),
        columns: (0..columns).map(|column| column.to_string()).collect(),
        unit: Unit::Plain("req/s".into()),
        values: (0..rows).map(|row| (0..columns).map(|column| (row * column) as f64).collect()).collect(),
    };
    let mut small = map(2, 4);
    small.values[0][1] = f64::NAN;
    small.values[1].pop();
    let plot = svg::grid(&small);
    assert_eq!(count(&check(&plot), "rect"), 6);
    assert!(plot.as_str().contains("rate 2: 2.00 req/s"));
    assert_eq!(count(&check(&svg::grid(&map(80, 100))), "rect"), 8000);
    assert!(svg::grid(&map(0, 3)).as_str().contains("no values"));
}

#[test]
fn all_plots_of_a_page_give_a_name_one_color() {
    // By themselves these two would have the same color, and make way in different order.
    let plot = |names: [&str; 2]| {
        let rows = vec![StackedRow::new("a", names.map(|name| (name, 1.0)))];
        svg::stacked(&StackedChart { title: "t".into(), unit: Unit::Time, rows, normalize: false })
    };
    let page = Page::new("t").svg(&plot(["moe", "copy"])).svg(&plot(["copy", "moe"])).finish();
    let fills = |name: &str| -> Vec<String> {
        let marks = page.split("<rect ").filter(|part| part.contains(&format!("· {name}:")));
        marks.filter_map(|part| Some(part.split("fill:var(").nth(1)?.split(',').next()?.to_owned())).collect()
    };
    let [moe, copy] = ["moe", "copy"].map(fills);
    assert_eq!(moe.len(), 4, "two plots, wide and narrow");
    assert!(moe.iter().all(|fill| *fill == moe[0]) && copy.iter().all(|fill| *fill == copy[0]) && moe[0] != copy[0]);
    let of_page = |variable: &str| {
        let rule = page.split(&format!("{variable}:")).nth(1).unwrap_or_else(|| panic!("{variable} is not set"));
        rule.split(';').next().unwrap().to_owned()
    };
    assert_ne!(of_page(&moe[0]), of_page(&copy[0]));
}

#[test]
fn the_answer_is_the_first_line_and_links_are_escaped() {
    let page = Page::new("title").subtitle("what").verdict("the answer").link(Link::new(HOSTILE, HOSTILE));
    let page = page.card(Card::new("label", "value")).section("s").prose("p").finish();
    let body = page.split("<body").nth(1).unwrap();
    let place = |text: &str| body.find(text).unwrap_or_else(|| panic!("{text}"));
    assert!(place("the answer") < place("title") && place("title") < place("what"), "{body}");
    assert!(place("<section>") < place("value"), "a picture before figures");
    tags(&page);
    assert!(!page.contains("alert('x')"));
    assert!(Page::new("title").finish().contains("<h1>title</h1>"));
}

#[test]
fn a_page_is_whole_safe_and_needs_no_network() {
    let table = Table::new([HOSTILE, "n"])
        .title(HOSTILE)
        .row([Cell::from(HOSTILE), Cell::number("1.5 ms", 1.5e6)])
        .total(["sum", ""]);
    let page = Page::new(HOSTILE)
        .subtitle(HOSTILE)
        .verdict(HOSTILE)
        .card(Card::new(HOSTILE, HOSTILE).unit(HOSTILE).note(HOSTILE))
        .prose("before any section")
        .section(HOSTILE)
        .prose(&format!("first `code`\n\n{HOSTILE}"))
        .svg(&bar_chart(vec![Some(1.0)]))
        .table(&table)
        .details(HOSTILE, HOSTILE)
        .finish();
    let seen = tags(&page);
    assert_eq!((count(&seen, "section"), count(&seen, "p")), (2, 4));
    assert_eq!((count(&seen, "tfoot"), count(&seen, "svg")), (1, 2), "each plot for wide and for narrow places");
    assert!(page.contains("<p>first <code>code</code></p>"));
    assert!(page.contains("data-v=\"1500000\""));
    assert!(!page.contains("alert('x')"), "escaped everywhere");
    assert!(!page.contains("src="), "nothing is loaded");
    assert_eq!(page.matches("http").count(), 3, "the SVG namespace and the policy header only");
}
