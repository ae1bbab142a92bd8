//! Samples of GPU metrics: over the busy time, per iteration, per category.

use std::collections::BTreeMap;

use strobe_trace::{Counter, Trace};

use crate::context::Context;
use crate::intervals::Span;
use crate::launch::device_name;
use crate::sheet::{Column, Report, Role, Sheet, Unit, Value};
use strobe_stats::{Summary, mean};

/// A metric whose values can be trusted, clipped to the time in which its device had work.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric<'t> {
    /// What was measured, with the unit of `values`.
    pub name: &'t str,
    /// Index of the device, if it belongs to one.
    pub device: Option<u32>,
    /// When, in order.
    pub times: &'t [i64],
    /// What was read, in the unit that the name gives.
    pub values: Vec<f64>,
}

/// The metrics of a trace, and the names of those whose counters wrapped, whose values say nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics<'t> {
    /// Metrics with samples while their device had work.
    pub known: Vec<Metric<'t>>,
    /// Metrics whose counter overflowed.
    pub wrapped: Vec<&'t str>,
    /// Metrics whose samples all lie outside the time in which their device had work.
    pub outside: Vec<&'t str>,
}

/// Reads the metrics of a trace: clips them to the work of their device, brings clocks to the unit of their name, and
/// sets wrapped counters aside.
pub fn metrics(trace: &Trace) -> Metrics<'_> {
    let extents = extents(trace);
    let anywhere = extents.values().copied().reduce(|a, b| Span::new(a.start.min(b.start), a.end.max(b.end)));
    let mut found = Metrics::default();
    for counter in &trace.counters {
        // The counters of warps have 24 bits and overflow into the sign; then the other samples are not to be trusted
        // either.
        if counter.name.contains("[Avg") && counter.values.iter().any(|&value| value < 0.0) {
            found.wrapped.push(&counter.name);
            continue;
        }
        let extent = counter.device.map_or(anywhere, |device| extents.get(&device).copied());
        match extent.and_then(|extent| clipped(counter, extent)) {
            Some(metric) => found.known.push(metric),
            None => found.outside.push(&counter.name),
        }
    }
    found
}

fn clipped(counter: &Counter, extent: Span) -> Option<Metric<'_>> {
    let from = counter.times.partition_point(|&time| time < extent.start);
    let to = counter.times.partition_point(|&time| time <= extent.end);
    let (times, values) = (counter.times.get(from..to)?, counter.values.get(from..to)?);
    // nsys names clocks in MHz and writes Hz. No clock runs at a hundred thousand MHz.
    let in_hz = counter.name.contains("MHz") && values.iter().any(|&value| value > 1e5);
    let scale = if in_hz { 1e-6 } else { 1.0 };
    let values: Vec<f64> = values.iter().map(|value| value * scale).collect();
    (!values.is_empty()).then_some(Metric { name: &counter.name, device: counter.device, times, values })
}

/// From the first op to the end of the last, per device.
fn extents(trace: &Trace) -> BTreeMap<u32, Span> {
    let ops = &trace.ops;
    let mut extents: BTreeMap<u32, Span> = BTreeMap::new();
    for ((&device, &start), &end) in ops.device.iter().zip(&ops.start).zip(&ops.end) {
        let extent = extents.entry(device).or_insert(Span { start, end });
        *extent = Span { start: extent.start.min(start), end: extent.end.max(end) };
    }
    extents
}

impl Metric<'_> {
    /// The mean of the samples in a span; `None` when there are none.
    pub fn mean_in(&self, span: Span) -> Option<f64> {
        let from = self.times.partition_point(|&time| time < span.start);
        let to = self.times.partition_point(|&time| time < span.end);
        mean(self.values.get(from..to)?)
    }

    /// The middle of the distances between samples; `None` for fewer than two.
    pub fn period_ns(&self) -> Option<f64> {
        let distances = self.times.windows(2).map(|pair| pair[1].saturating_sub(pair[0]) as f64);
        Summary::of(distances).map(|summary| summary.median)
    }
}

/// The report `metrics`.
pub fn report(context: &Context) -> Report {
    let (name, title) = ("metrics", "GPU metrics");
    let trace = context.trace;
    if trace.counters.is_empty() {
        let why = match trace.meta.is_own() {
            true => "no GPU metrics were sampled: `strobe profile --gpu-metrics -- CMD` does that on a GPU",
            false => "the trace has no samples of metrics: record them with `nsys profile --gpu-metrics-devices=all`",
        };
        return Report::absent(name, title, why);
    }
    let metrics = metrics(trace);
    if metrics.known.is_empty() {
        let why = format!(
            "none of the {} metrics has samples that can be used: {} wrapped, {} were not sampled while a device had work",
            trace.counters.len(),
            metrics.wrapped.len(),
            metrics.outside.len()
        );
        return Report::absent(name, title, why);
    }
    // A metric that was 0 all the time fills columns and says nothing (vertex and pixel warps on a compute GPU).
    let varying: Vec<&Metric> = metrics.known.iter().filter(|m| m.values.iter().any(|&v| v != 0.0)).collect();
    let mut report = Report::new(name, title).sheet(over_busy_extent(context, &metrics.known));
    report.sheets.extend(per_iteration(context, &varying));
    report.sheets.extend(per_category(context, &varying));
    let period = metrics.known.iter().filter_map(Metric::period_ns).reduce(f64::min);
    if let Some(period) = period {
        report = report.note(format!(
            "One sample every {:.1} us; a sample stands for all that ran since the one before, so categories of ops shorter \
             than that are blurred.",
            period / 1e3
        ));
    }
    report = report.note("Samples before the first op of the device and after its last are left out.");
    if !metrics.wrapped.is_empty() {
        report = report.note(format!(
            "Not shown, because the counter overflowed and its values are unknown: {}.",
            metrics.wrapped.join(", ")
        ));
    }
    if !metrics.outside.is_empty() {
        report = report.note(format!("Not sampled while the device had work: {}.", metrics.outside.join(", ")));
    }
    report
}

fn over_busy_extent(context: &Context, metrics: &[Metric]) -> Sheet {
    let trace = context.trace;
    let mut columns = vec![Column::new("Device", Unit::Text), Column::new("Metric", Unit::Text)];
    columns.push(Column::new("Samples", Unit::Count));
    let figures = [("Min", Role::Lowest), ("Median", Role::Main), ("Mean", Role::Main), ("Max", Role::Highest)];
    columns.extend(figures.map(|(name, role)| Column::new(name, Unit::Number).role(role)));
    let mut sheet = Sheet::new("metrics", columns).title("From the first op of the device to the end of its last");
    for metric in metrics {
        let unseen = metric.device.map_or(context.unseen(), |device| context.unseen_on(device));
        let samples = metric.times.iter().zip(&metric.values);
        let seen = samples.filter(|(time, _)| unseen.covered(Span::new(**time, time.saturating_add(1))) == 0);
        let Some(summary) = Summary::of(seen.map(|(_, value)| *value)) else { continue };
        sheet.push([
            metric.device.map(|device| device_name(trace, device)).into(),
            metric.name.into(),
            summary.count.into(),
            summary.min.into(),
            summary.median.into(),
            summary.mean.into(),
            summary.max.into(),
        ]);
    }
    sheet
}

/// Means per iteration, over its time on the device.
fn per_iteration(context: &Context, metrics: &[&Metric]) -> Option<Sheet> {
    let iterations = &context.iterations.list;
    if iterations.is_empty() || metrics.is_empty() {
        return None;
    }
    let mut columns = vec![Column::new("Iteration", Unit::Id), Column::new("Label", Unit::Text)];
    columns.extend(metrics.iter().map(|metric| metric_column(context.trace, metrics, metric)));
    let mut sheet = Sheet::new("by_iteration", columns).title("Mean per iteration, over its time on the device");
    for iteration in iterations {
        let means = metrics.iter().map(|m| Value::from(iteration.device.and_then(|span| m.mean_in(span))));
        sheet.push([iteration.number.into(), iteration.label.as_str().into()].into_iter().chain(means));
    }
    Some(sheet)
}

/// Means over the samples that fall inside ops of a category.
fn per_category(context: &Context, metrics: &[&Metric]) -> Option<Sheet> {
    let categories = &context.categories.list;
    if categories.is_empty() || metrics.is_empty() {
        return None;
    }
    let mut sums = vec![vec![(0usize, 0.0f64); metrics.len()]; categories.len()];
    let mut known_samples: Vec<Inside> = Vec::new();
    for (column, metric) in metrics.iter().enumerate() {
        // The metrics of a device are sampled together: which ops ran is found once for all of them.
        let same = |inside: &&Inside| inside.device == metric.device && inside.times == metric.times;
        let inside = match known_samples.iter().find(same) {
            Some(inside) => inside,
            None => {
                known_samples.push(Inside::of(context, metric));
                &known_samples[known_samples.len() - 1]
            }
        };
        for &(sample, category) in &inside.categories {
            let (count, sum) = &mut sums[category as usize][column];
            *count += 1;
            *sum += metric.values[sample as usize];
        }
    }
    let mut columns = vec![Column::new("Category", Unit::Text), Column::new("Samples", Unit::Count)];
    columns.extend(metrics.iter().map(|metric| metric_column(context.trace, metrics, metric)));
    let mut sheet =
        Sheet::new("by_category", columns).title("Mean of the samples taken while an op of the category ran");
    let mut rows: Vec<_> = categories.iter().zip(sums).collect();
    let samples = |sums: &[(usize, f64)]| sums.iter().map(|(count, _)| *count).max().unwrap_or(0);
    rows.retain(|(_, sums)| samples(sums) > 0);
    rows.sort_by_key(|(_, sums)| std::cmp::Reverse(samples(sums)));
    for (category, sums) in rows {
        let means = sums.iter().map(|&(count, sum)| Value::from((count > 0).then(|| sum / count as f64)));
        sheet.push([category.name.as_str().into(), samples(&sums).into()].into_iter().chain(means));
    }
    Some(sheet)
}

/// Which categories ran when samples were taken.
struct Inside<'t> {
    device: Option<u32>,
    times: &'t [i64],
    /// Sample and category; a sample occurs once per category that ran.
    categories: Vec<(u32, u16)>,
}

impl<'t> Inside<'t> {
    fn of(context: &Context, metric: &Metric<'t>) -> Self {
        let ops = &context.trace.ops;
        // Per category how far samples are counted already: ops of a category may overlap, their samples count once.
        let mut done = vec![0usize; context.categories.list.len()];
        let mut categories = Vec::new();
        let mut from = 0;
        for op in 0..ops.len() {
            if metric.device.is_some_and(|device| device != ops.device[op]) {
                continue;
            }
            while metric.times.get(from).is_some_and(|&time| time < ops.start[op]) {
                from += 1;
            }
            let category = context.categories.of_op[op];
            let done = &mut done[category as usize];
            let mut sample = from.max(*done);
            while metric.times.get(sample).is_some_and(|&time| time < ops.end[op]) {
                categories.push((sample as u32, category));
                sample += 1;
            }
            *done = sample.max(*done);
        }
        Self { device: metric.device, times: metric.times, categories }
    }
}

/// The column of a metric; it names the device where several have the metric.
fn metric_column(trace: &Trace, metrics: &[&Metric], metric: &Metric) -> Column {
    let shared = metrics.iter().filter(|other| other.name == metric.name).count() > 1;
    match metric.device.filter(|_| shared) {
        Some(device) => Column::new(format!("{} (device {})", metric.name, device_name(trace, device)), Unit::Number),
        None => Column::new(metric.name, Unit::Number),
    }
}
