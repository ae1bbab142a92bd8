//! Traces and comparisons as self-contained HTML files.

mod links;
mod timeline;

use strobe_analyze::budget::{self, IterationBudget, Part};
use strobe_analyze::compare::{Comparison, KernelChange, Outcome};
use strobe_analyze::sheet::{Report, Sheet, Unit};
use strobe_analyze::summary::{device_name, device_times};
use strobe_analyze::{Context, advice, categories, reports};
use strobe_report::explorer::{
    CategoryBar, CategoryBars, Explorer, Finding, IterationCell, Iterations, ReportTab, Side, Table,
};
use strobe_report::html::{Card, Link};
use strobe_report::human;
use strobe_report::svg::{self, StackedChart, StackedRow, Svg};
use strobe_report::table::{self, Cell};

use crate::bench::outcome::OUTPUT_THROUGHPUT;
use crate::sheets;

pub(crate) use links::{pages_of_run, run_links};

/// The page of one trace. Its first line is the gravest finding.
pub(crate) fn trace_page(context: &Context, links: Vec<Link>) -> String {
    let drawn = timeline::draw(context);
    let budgets = budget::budgets(context);
    let origin = context.trace.extent().map_or(0, |(start, _)| start);
    let all = reports::run_all(&reports::ALL.iter().collect::<Vec<_>>(), context).into_iter();
    let all: Vec<Report> = all.map(|report| sheets::relative_to(report, origin)).collect();
    let kernels = all.iter().find(|report| report.name == "kern-sum").and_then(|report| report.sheets.first());
    let summary = all.iter().find(|report| report.name == "summary");
    let (found, cards) = (advice::findings(context), cards(context, &budgets));
    let notes = context.trace.meta.notices.iter().chain(summary.into_iter().flat_map(|report| &report.notes));
    Explorer {
        title: title(context),
        subtitle: subtitle(context),
        verdict: Some(headline(context, &found, &cards)),
        links,
        cards,
        findings: found.into_iter().map(shown_finding).collect(),
        charts: budget_chart(&[("", &budgets)]).into_iter().collect(),
        categories: category_bars(&[context]),
        sides: vec![Side {
            name: title(context),
            timeline: Some(drawn.timeline),
            iterations: iterations(context, &budgets),
        }],
        pairs: Vec::new(),
        kernels: kernels.map(event_table),
        reports: all.iter().filter(|report| report.name != "kern-sum").map(tab).collect(),
        notes: notes.cloned().chain(drawn.left_out).collect(),
    }
    .finish()
}

/// The answer of a trace's page: what matters most, or how busy the device was where no rule found anything.
fn headline(context: &Context, found: &[advice::Finding], cards: &[Card]) -> String {
    match found.first() {
        Some(finding) => {
            let severity = human::capitalized(finding.severity.as_str());
            format!("{severity}: {}. {}.", finding.title, human::capitalized(&finding.sentence))
        }
        None => {
            let figures: Vec<String> = cards.iter().take(2).map(Card::in_words).collect();
            let figures = if figures.is_empty() { String::new() } else { format!(" {}.", figures.join("; ")) };
            format!("{}.{figures}", human::capitalized(&advice::nothing_found(context)))
        }
    }
}

/// What a page of two sides says first.
pub(crate) struct Headline {
    pub verdict: String,
    pub links: Vec<Link>,
    pub cards: Vec<Card>,
    /// The tables of the comparison.
    pub report: Report,
}

/// Returns the page of a comparison. The timelines are those of the first repeat of each side.
pub(crate) fn comparison_page(comparison: &Comparison, contexts: &[Vec<Context>; 2], links: Vec<Link>) -> String {
    let headline = Headline {
        verdict: comparison.verdict.sentence.clone(),
        links,
        cards: comparison_cards(comparison),
        report: comparison.report(),
    };
    pair_page(comparison, contexts, headline)
}

/// Returns the page of two sides whose answer does not come from their traces alone: verdict and cards are the caller's,
/// so that figures of the traces are not mixed with those of other runs.
pub(crate) fn pair_page(comparison: &Comparison, contexts: &[Vec<Context>; 2], headline: Headline) -> String {
    let shown: Vec<(&str, &String, &Context)> = ["A", "B"]
        .into_iter()
        .zip(comparison.names.iter().zip(contexts))
        .filter_map(|(letter, (name, side))| Some((letter, name, side.first()?)))
        .collect();
    let verdict = &comparison.verdict;
    let mut notes: Vec<String> =
        verdict.evidence.iter().chain(&comparison.warnings).chain(&comparison.notes).cloned().collect();
    let mut sides = Vec::new();
    let mut budgets = Vec::new();
    for (letter, name, context) in &shown {
        let drawn = timeline::draw(context);
        let split = budget::budgets(context);
        notes.extend(drawn.left_out.map(|text| format!("{letter}: {text}")));
        let iterations = iterations(context, &split);
        sides.push(Side { name: format!("{letter}: {name}"), timeline: Some(drawn.timeline), iterations });
        budgets.push((*letter, split));
    }
    let budgets: Vec<(&str, &[IterationBudget])> = budgets.iter().map(|(side, b)| (*side, b.as_slice())).collect();
    let contexts: Vec<&Context> = shown.iter().map(|(_, _, context)| *context).collect();
    Explorer {
        title: format!("{} vs {}", comparison.names[0], comparison.names[1]),
        subtitle: shown
            .iter()
            .map(|(letter, name, context)| format!("{letter} = {name} ({})", subtitle(context)))
            .collect::<Vec<_>>()
            .join(", "),
        verdict: Some(headline.verdict),
        links: headline.links,
        cards: headline.cards,
        findings: Vec::new(),
        charts: budget_chart(&budgets).into_iter().collect(),
        categories: category_bars(&contexts),
        pairs: pairs(comparison, &contexts),
        sides,
        kernels: Some(Table { table: kernel_changes(comparison), event_names: vec![1, 2] }),
        reports: vec![tab(&headline.report)],
        notes,
    }
    .finish()
}

fn title(context: &Context) -> String {
    let names = context.trace.meta.sources.iter().map(|source| {
        source.path.file_name().map_or_else(|| "trace".to_owned(), |name| name.to_string_lossy().into_owned())
    });
    let names: Vec<String> = names.collect();
    match names.as_slice() {
        [] => {
            context.trace.meta.extra.get("model").map_or("strobe trace".to_owned(), |model| format!("strobe: {model}"))
        }
        [one] => one.clone(),
        [first, .., last] => format!("{first} … {last} ({} ranks)", names.len()),
    }
}

fn subtitle(context: &Context) -> String {
    let trace = context.trace;
    let mut parts = vec![trace.meta.producer.clone()];
    parts.extend(trace.meta.extra.get("model").cloned());
    let devices: Vec<_> = device_times(context).iter().map(|t| device_name(context, t.device)).collect();
    match devices.as_slice() {
        [] => parts.push("no device ops".to_owned()),
        few if few.len() <= 2 => parts.push(few.join(", ")),
        few => parts.push(format!("{} and {} more", few[0], few.len() - 1)),
    }
    parts.retain(|part| !part.is_empty());
    parts.join(", ")
}

fn cards(context: &Context, budgets: &[IterationBudget]) -> Vec<Card> {
    let mut cards = Vec::new();
    let times = device_times(context);
    let (span, busy): (i64, i64) = times.iter().fold((0, 0), |(s, b), t| (s + t.span_ns, b + t.busy_ns()));
    if span > 0 {
        let longest = times.iter().map(|t| t.span_ns).max().unwrap_or(0);
        cards.push(Card::new("Span", human::ns(longest as f64)).note("first start to last end on a device"));
        let note = format!("union of ops over the span, {} device(s)", times.len());
        cards.push(Card::new("Device busy", human::percent(busy as f64 / span as f64)).note(note));
    }
    for kind in budget::budget_by_kind(budgets) {
        let name = kind.kind.map_or("Iteration".to_owned(), |kind| format!("{kind} iteration"));
        let idle: f64 = kind.parts.iter().filter(|p| p.part.is_idle()).map(|p| p.share_of_wall).sum();
        let note = format!("median of {}, {} of the wall idle", kind.iterations, human::percent(idle));
        cards.push(Card::new(human::capitalized(&name), human::ns(kind.wall_ns.median)).note(note));
    }
    let kernels = times.iter().map(|t| t.counts[0] + t.counts[4]).sum::<u64>();
    cards.push(Card::new("Kernels", human::count(kernels)).note("in the whole trace"));
    let total: i64 = categories::category_times(context).iter().map(|c| c.time_ns).sum();
    if let Some(top) = categories::category_times(context).first().filter(|_| total > 0) {
        let note = format!("{} of the op time, the most of all categories", human::ns(top.time_ns as f64));
        let name = context.categories.list.get(top.category).map_or("", |c| c.name.as_str());
        cards.push(Card::new(human::capitalized(name), human::percent(top.time_ns as f64 / total as f64)).note(note));
    }
    cards
}

/// The figures of whole runs that a comparison's page begins with.
const ON_CARDS: [&str; 2] = [OUTPUT_THROUGHPUT, "Average request latency (ms)"];

fn comparison_cards(comparison: &Comparison) -> Vec<Card> {
    let verdict = match comparison.verdict.outcome {
        Outcome::Faster => "B is faster",
        Outcome::Slower => "B is slower",
        other => other.as_str(),
    };
    let mut cards = vec![
        Card::new("Verdict", human::capitalized(verdict))
            .note(format!("A = {}, B = {}", comparison.names[0], comparison.names[1])),
    ];
    let signed = |change: Option<f64>| {
        change.map_or(human::NOT_KNOWN.to_owned(), |change| {
            format!("{}{}", if change > 0.0 { "+" } else { "" }, human::percent(change))
        })
    };
    if let Some(runs) = &comparison.runs {
        let [a, b] = runs.counts;
        for figure in runs.figures.iter().filter(|figure| ON_CARDS.contains(&figure.name.as_str())) {
            let note = format!("{} → {}, means of {a} and {b} runs", human::number(figure.a), human::number(figure.b));
            cards.push(Card::new(&figure.name, signed((figure.a > 0.0).then(|| figure.b / figure.a - 1.0))).note(note));
        }
    }
    for group in comparison.groups.iter().take(5) {
        let change = signed(group.change);
        let interval =
            group.interval_ns.map_or(String::new(), |i| format!(", 95 % CI {}", human::ns_interval(i.low, i.high)));
        let note = format!("{} → {}{interval}", human::ns(group.a_wall_ns), human::ns(group.b_wall_ns));
        cards.push(Card::new(&group.name, change).note(note));
    }
    if let Some(group) = comparison.groups.first() {
        let note = format!("{}, A → B", group.name);
        let value = format!("{} → {}", human::number(group.a_kernels), human::number(group.b_kernels));
        cards.push(Card::new("Kernels per iteration", value).note(note));
    }
    cards
}

fn shown_finding(finding: advice::Finding) -> Finding {
    Finding {
        severity: finding.severity.as_str().to_owned(),
        name: finding.title.to_owned(),
        title: format!("{}.", human::capitalized(&finding.sentence)),
        detail: finding.remedy.to_owned(),
        gain: finding.gain.as_ref().map_or(String::new(), gain_in_words),
    }
}

fn gain_in_words(gain: &advice::Gain) -> String {
    format!("up to {} of {} {}", human::ns(gain.ns as f64), human::ns(gain.of_ns as f64), gain.of)
}

/// The mean iteration of each kind, split; one row per kind and side.
fn budget_chart(sides: &[(&str, &[IterationBudget])]) -> Option<Svg> {
    let mut rows = Vec::new();
    for (side, budgets) in sides {
        for kind in budget::budget_by_kind(budgets) {
            let name = kind.kind.map_or("iteration".to_owned(), |kind| kind.to_string());
            let label =
                if side.is_empty() { format!("{name} ({})", kind.iterations) } else { format!("{name}, {side}") };
            let parts = kind.parts.iter().map(|p| (p.part.to_string(), p.mean_ns));
            rows.push(StackedRow::new(label, parts).group(name));
        }
    }
    rows.sort_by(|a, b| a.label.cmp(&b.label));
    let title = "Mean iteration, by what its wall time goes to".into();
    (!rows.is_empty()).then(|| svg::stacked(&StackedChart { title, unit: svg::Unit::Time, rows, normalize: false }))
}

fn category_bars(contexts: &[&Context]) -> Option<CategoryBars> {
    let mut rows: Vec<CategoryBar> = Vec::new();
    for (side, context) in contexts.iter().enumerate() {
        let times = categories::category_times(context);
        let total: i64 = times.iter().map(|c| c.time_ns).sum();
        for time in times {
            let Some(category) = context.categories.list.get(time.category) else { continue };
            let place = rows.iter().position(|row| row.name == category.name).unwrap_or_else(|| {
                let values = vec![Cell::number("0 ns", 0.0); contexts.len()];
                rows.push(CategoryBar { name: category.name.clone(), values });
                rows.len() - 1
            });
            let share = human::percent(time.time_ns as f64 / total.max(1) as f64);
            rows[place].values[side] =
                Cell::number(format!("{} ({share})", human::ns(time.time_ns as f64)), time.time_ns as f64);
        }
    }
    let note = "Sum of op durations by category; shares are of that sum.".to_owned();
    (!rows.is_empty()).then_some(CategoryBars { note, rows })
}

/// Every iteration with its budget. Several devices count together: the parts are their means.
fn iterations(context: &Context, budgets: &[IterationBudget]) -> Iterations {
    let mut parts: Vec<&Part> = budgets.iter().flat_map(|b| &b.parts).map(|(part, _)| part).collect();
    parts.sort_unstable();
    parts.dedup();
    let mut cells: Vec<IterationCell> = Vec::new();
    let mut at = 0;
    let mut sorted: Vec<&IterationBudget> = budgets.iter().collect();
    sorted.sort_by_key(|b| (b.iteration, b.device));
    while let Some(first) = sorted.get(at) {
        let same: Vec<_> = sorted[at..].iter().take_while(|b| b.iteration == first.iteration).collect();
        at += same.len();
        let Some(found) = context.iterations.list.get(first.iteration) else { continue };
        let devices = same.len() as i64;
        // The window drawn is that of the first device; with several devices the parts are means over them, scaled to it.
        let (start, end) = (first.window.start, first.window.end);
        let of = |part: &Part| -> Option<i64> {
            let times: Vec<i64> =
                same.iter().flat_map(|b| b.parts.iter().filter(|p| p.0 == *part)).map(|p| p.1).collect();
            (!times.is_empty()).then(|| if devices == 1 { times[0] } else { times.iter().sum::<i64>() / devices })
        };
        let known = |value: Option<u32>| value.map_or(String::new(), |v| human::count(u64::from(v)));
        let launches = same.len().to_string();
        cells.push(IterationCell {
            label: format!("#{}", found.number),
            kind: found.kind.map_or("iteration".to_owned(), |kind| kind.to_string()),
            start,
            end,
            parts: parts.iter().map(|part| of(part)).collect(),
            facts: vec![
                found.label.clone(),
                known(found.context_requests),
                known(found.generation_requests),
                known(found.context_tokens),
                known(found.generation_tokens),
                launches,
            ],
        });
    }
    let method = context.iterations.method.as_ref().map_or(String::new(), |m| format!("Found {m}. "));
    Iterations {
        note: format!("{method}The parts of an iteration add up to its wall time."),
        part_names: parts.iter().map(|part| part.to_string()).collect(),
        fact_names: ["marker", "prefill requests", "decode requests", "prefill tokens", "decode tokens", "devices"]
            .map(str::to_owned)
            .to_vec(),
        cells,
    }
}

/// Iterations that were compared one by one, as indices into those drawn.
fn pairs(comparison: &Comparison, contexts: &[&Context]) -> Vec<(u32, u32)> {
    let [a, b] = contexts else { return Vec::new() };
    let place = |context: &Context, number: u64| {
        context.iterations.list.iter().position(|i| i.number == number).map(|index| index as u32)
    };
    let pairs = comparison.groups.iter().flat_map(|group| &group.pairs);
    pairs.filter_map(|pair| Some((place(a, pair.a_number?)?, place(b, pair.b_number?)?))).collect()
}

/// All kernels of all groups, side by side.
fn kernel_changes(comparison: &Comparison) -> table::Table {
    let headers = [
        "iterations",
        "A",
        "B",
        "category",
        "matched by",
        "A runs",
        "B runs",
        "A time",
        "B time",
        "difference",
        "95 % CI",
    ];
    let mut table = table::Table::new(headers).left(1).left(2).left(3).left(4);
    for group in &comparison.groups {
        for change in &group.kernels {
            table.push(kernel_row(&group.name, change));
        }
    }
    table
}

fn kernel_row(group: &str, change: &KernelChange) -> Vec<Cell> {
    let names = |names: &[String]| Cell::from(names.join(" + "));
    let number = |value: f64| Cell::number(human::number(value), value);
    let time = |value: f64, unit| sheets::cell(&value.into(), unit);
    let interval = change.interval_ns.map_or(Cell::from(human::NOT_KNOWN), |interval| {
        Cell::number(human::ns_interval(interval.low, interval.high), interval.low)
    });
    vec![
        Cell::from(group),
        names(&change.a),
        names(&change.b),
        Cell::from(change.category.as_str()),
        Cell::from(change.matched_by.as_str()),
        number(change.a_count),
        number(change.b_count),
        time(change.a_ns, Unit::Ns),
        time(change.b_ns, Unit::Ns),
        time(change.delta_ns, Unit::NsChange),
        interval,
    ]
}

/// A sheet whose names can be found in the timeline.
fn event_table(sheet: &Sheet) -> Table {
    let sheet = sheets::without_zeros(sheet);
    let names = sheet.columns.iter().enumerate().filter(|(_, column)| column.unit == Unit::Text).map(|(i, _)| i);
    Table { event_names: names.collect(), table: sheets::page_table(&sheet) }
}

fn tab(report: &Report) -> ReportTab {
    ReportTab {
        name: plain_name(report.name),
        title: report.title.clone(),
        notes: report.notes.clone(),
        absent: report.not_applicable.clone(),
        tables: report.sheets.iter().filter(|sheet| !sheet.rows.is_empty()).map(event_table).collect(),
    }
}

/// What a report is called where nobody has to type it.
fn plain_name(report: &str) -> String {
    let known = [
        ("launch", "Launches"),
        ("metrics", "GPU metrics"),
        ("api-sum", "CUDA calls"),
        ("mem-time-sum", "Copies by time"),
        ("mem-size-sum", "Copies by size"),
        ("gpu-sum", "All device work"),
        ("nvtx-sum", "Ranges"),
        ("nvtx-gpu-proj-sum", "Ranges on the device"),
        ("nvtx-kern-sum", "Kernels by range"),
        ("osrt-sum", "System calls"),
        ("compare", "Comparison"),
    ];
    let name = known.iter().find(|(name, _)| *name == report);
    name.map_or_else(|| human::capitalized(&report.replace('-', " ")), |(_, plain)| (*plain).to_owned())
}
