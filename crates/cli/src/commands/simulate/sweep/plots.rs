//! What a sweep found, drawn.

use strobe_report::html::Page;
use strobe_report::human;
use strobe_report::svg::{CdfChart, CdfSeries, Grid, LineChart, LinePoint, LineSeries, Svg, Unit, cdf, grid, lines};
use strobe_sim::capacity::interval;
use strobe_sim::collector::{Answer, Summary};

use super::{Axis, LATENCIES, Point, latency};

/// Latencies of a queue that grows without bound only say how long the run was.
fn is_stable(point: &Point) -> bool {
    point.answers.iter().all(|answer| answer.stable != Some(false))
}

/// More curves in one plot cannot be distinguished.
const MOST_CURVES: usize = 8;

/// More maps say less.
const MOST_MAPS: usize = 12;

type Value = fn(&Answer) -> Option<f64>;
type Samples = fn(&Point) -> &[f64];

/// A plot with the name of its file.
pub(super) struct Plot {
    pub name: String,
    section: String,
    pub svg: Svg,
}

/// All plots, in the order of the page.
pub(super) struct Plots<'a> {
    axes: &'a [Axis],
    points: &'a [Point],
    has_limits: bool,
    /// The axis that runs from left to right: the first one that is numbers.
    across: usize,
}

impl<'a> Plots<'a> {
    pub(super) fn new(axes: &'a [Axis], points: &'a [Point], has_limits: bool) -> Plots<'a> {
        let is_numbers = |axis: &Axis| axis.values.iter().all(|v| v.parse::<f64>().is_ok());
        Plots { axes, points, has_limits, across: axes.iter().position(is_numbers).unwrap_or(0) }
    }

    /// What a point's other options are, without the axes left out.
    fn name(&self, point: &Point, without: &[usize]) -> String {
        let others = point.chosen.iter().zip(self.axes).enumerate().filter(|(i, _)| !without.contains(i));
        let said: Vec<String> = others.map(|(_, (value, axis))| format!("{} {value}", axis.option)).collect();
        said.join(", ")
    }

    fn against(&self, title: &str, unit: Unit, points: &[&Point], value: &dyn Fn(&Answer) -> Option<f64>) -> Svg {
        let mut series: Vec<LineSeries> = Vec::new();
        for point in points {
            let values: Vec<f64> = point.answers.iter().filter_map(value).collect();
            let x = point.chosen.get(self.across).and_then(|x| x.parse::<f64>().ok());
            let (Some(x), false) = (x, values.is_empty()) else { continue };
            let (mean, bounds) = interval(&values);
            let name = self.name(point, &[self.across]);
            let index = series.iter().position(|s| s.name == name).unwrap_or_else(|| {
                series.push(LineSeries { name, points: Vec::new() });
                series.len() - 1
            });
            let interval = (values.len() > 1).then_some(bounds);
            series[index].points.push(LinePoint { x, y: mean, interval });
        }
        let all = series.len();
        let drawn = all.min(MOST_CURVES);
        let some = if drawn < all { format!(", {drawn} of {all} curves") } else { String::new() };
        let series = (0..drawn).map(|i| series[i * all / drawn].clone()).collect();
        lines(&LineChart {
            title: format!("{title}{some}"),
            x_label: self.axes[self.across].option.clone(),
            x_unit: Unit::Plain(String::new()),
            unit,
            series,
        })
    }

    /// Goodput over the first axis and another one, a map for each combination of the rest.
    fn goodput_maps(&self) -> Vec<Plot> {
        let down = (0..self.axes.len()).find(|axis| *axis != self.across);
        let without: Vec<usize> = [Some(self.across), down].into_iter().flatten().collect();
        let mut rests: Vec<String> = self.points.iter().map(|point| self.name(point, &without)).collect();
        rests.dedup();
        rests.sort_unstable();
        rests.dedup();
        let values_of = |axis: Option<usize>| axis.map_or(vec![String::new()], |axis| self.axes[axis].values.clone());
        let (rows, columns) = (values_of(down), values_of(Some(self.across)));
        let map = |(number, rest): (usize, &String)| {
            let mut values = vec![vec![f64::NAN; columns.len()]; rows.len()];
            for point in self.points.iter().filter(|point| self.name(point, &without) == *rest) {
                let row = down.map_or(Some(0), |axis| rows.iter().position(|v| *v == point.chosen[axis]));
                let column = columns.iter().position(|v| *v == point.chosen[self.across]);
                let (Some(row), Some(column)) = (row, column) else { continue };
                let goodput: Vec<f64> = point.answers.iter().map(|a| a.goodput.requests_per_s).collect();
                values[row][column] = interval(&goodput).0;
            }
            let what = if self.has_limits { "meet every limit" } else { "completed, as there are no limits" };
            let rest = if rest.is_empty() { String::new() } else { format!("; {rest}") };
            Plot {
                name: if number == 0 { "goodput".into() } else { format!("goodput-{}", number + 1) },
                section: "Goodput".into(),
                svg: grid(&Grid {
                    title: format!("Goodput: requests per second that {what}{rest}"),
                    row_label: down.map_or(String::new(), |axis| self.axes[axis].option.clone()),
                    column_label: self.axes[self.across].option.clone(),
                    rows: rows.clone(),
                    columns: columns.clone(),
                    unit: Unit::Plain(String::new()),
                    values,
                }),
            }
        };
        rests.iter().take(MOST_MAPS).enumerate().map(map).collect()
    }

    fn distributions(&self, title: String, points: &[&Point], samples: fn(&Point) -> &[f64]) -> Svg {
        let drawn = points.len().min(MOST_CURVES);
        let some = if drawn < points.len() { format!(", {drawn} of {} points", points.len()) } else { String::new() };
        let curve = |i: usize| {
            let point = points[i * points.len() / drawn];
            CdfSeries::new(self.name(point, &[]), samples(point).iter().map(|ms| ms * 1e6))
        };
        cdf(&CdfChart {
            title: format!("{title}{some}"),
            x_label: "time since arrival".into(),
            unit: Unit::Time,
            series: (0..drawn).map(curve).collect(),
        })
    }

    /// The answer in a line: the point that serves most.
    pub(super) fn headline(&self) -> String {
        let mean = |point: &Point| {
            interval(&point.answers.iter().map(|answer| answer.goodput.requests_per_s).collect::<Vec<_>>()).0
        };
        let stable: Vec<&Point> = self.points.iter().filter(|point| is_stable(point)).collect();
        let unstable = self.points.len() - stable.len();
        let Some(best) = stable.into_iter().max_by(|a, b| mean(a).total_cmp(&mean(b))) else {
            return "The queue grows without bound at every point: more arrives than is served.".to_owned();
        };
        let what = if self.has_limits { "requests within every limit" } else { "requests" };
        let among = match unstable {
            0 => format!("{} points", self.points.len()),
            n => format!("{} points, of which {n} are unstable", self.points.len()),
        };
        let p99: Vec<f64> = best.answers.iter().filter_map(|answer| Some(answer.e2e_ms?.p99)).collect();
        let p99 = strobe_stats::mean(&p99).map_or(String::new(), |ms| format!(", p99 latency {}", human::ns(ms * 1e6)));
        format!("Most {what}: {} per second at {}{p99} ({among}).", human::number(mean(best)), self.name(best, &[]))
    }

    pub(super) fn all(&self) -> Vec<Plot> {
        let every: Vec<&Point> = self.points.iter().collect();
        let stable: Vec<&Point> = self.points.iter().filter(|point| is_stable(point)).collect();
        let left_out = match every.len() - stable.len() {
            0 => String::new(),
            n => format!(" ({n} unstable points are left out)"),
        };
        let mut plots = self.goodput_maps();
        for name in LATENCIES {
            for (at, pick) in [("p50", (|s| s.p50) as fn(&Summary) -> f64), ("p99", |s| s.p99)] {
                let section = in_words(name).to_owned();
                let title = format!("{section}, {at}{left_out}");
                let svg = self.against(&title, Unit::Time, &stable, &|a| latency(a, name).map(|s| pick(s) * 1e6));
                plots.push(Plot { name: format!("{name}-{at}"), section, svg });
            }
        }
        let distributions: [(&str, &str, Samples); 2] = [
            ("ttft-cdf", "Share of requests with their first token within a time", |p| &p.ttft_ms),
            ("e2e-cdf", "Share of requests done within a time", |p| &p.e2e_ms),
        ];
        for (name, title, samples) in distributions {
            let svg = self.distributions(format!("{title}{left_out}"), &stable, samples);
            plots.push(Plot { name: name.into(), section: "Distributions".into(), svg });
        }
        let per_s = || Unit::Plain("req/s".into());
        let rates: [(&str, &str, Unit, Value); 3] = [
            ("throughput", "Requests per second", per_s(), |a| Some(a.throughput.requests_per_s)),
            ("goodput-curve", "Goodput", per_s(), |a| Some(a.goodput.requests_per_s)),
            ("batch", "Requests per iteration", Unit::Plain(String::new()), |a| Some(a.batch.mean_requests)),
        ];
        for (name, title, unit, value) in rates {
            let svg = self.against(title, unit, &every, &value);
            plots.push(Plot { name: name.into(), section: "Rates".into(), svg });
        }
        plots
    }
}

/// What a latency is, for people.
fn in_words(latency: &str) -> &'static str {
    match latency {
        "queue" => "Time in the queue",
        "ttft" => "Time to first token (TTFT)",
        "tpot" => "Time per output token (TPOT)",
        "itl" => "Time between tokens (ITL)",
        _ => "Request latency (E2E)",
    }
}

/// The plots as one page.
pub(super) fn page(plots: &[Plot], headline: &str) -> String {
    let mut page =
        Page::new("Simulated sweep").verdict(headline).subtitle(std::env::args().skip(1).collect::<Vec<_>>().join(" "));
    let mut section = "";
    for plot in plots {
        if plot.section != section {
            section = &plot.section;
            page = page.section(section);
        }
        page = page.svg(&plot.svg);
    }
    page.finish()
}
