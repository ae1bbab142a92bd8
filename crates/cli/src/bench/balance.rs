//! Learned against perfectly balanced routing, in turn on one engine: is the router the bottleneck?

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Result, bail};
use serde_json::{Value, json};
use strobe_analyze::compare::{self, CompareOptions, Comparison};
use strobe_engine::device::Device;
use strobe_engine::engine_dir::LoadedModel;
use strobe_engine::window::Window;
use strobe_engine::{Engine, EngineConfig, EngineInfo};
use strobe_report::human;
use strobe_report::table::{Cell, Table};
use strobe_stats::{mean, median, sample_std_dev, student_quantile};
use strobe_trace::{Trace, nsys};
use strobe_workload::{MetricOptions, metrics};

use super::client::{self, RunData};
use super::experts::{self, ExpertReport};
use super::outcome::RepeatFigures;
use super::{Spec, text};
use crate::machine::MeasuredPeaks;
use crate::run_writer::{Problems, RunWriter};
use crate::{explore, interrupt, recording, run_dir, sheets};

/// The answer in a result directory.
pub const ANSWER: &str = "balance.json";
/// What the two sides are called, in the order of every pair here.
const NAMES: [&str; 2] = ["learned", "perfect"];
/// Iterations that are recorded of each side, from the first on.
const RECORDED: usize = 64;

/// Whether the gain is above the threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Significant,
    NotSignificant,
    Undecided,
}

impl Verdict {
    fn of(interval: (f64, f64), threshold: f64) -> Verdict {
        match interval {
            (low, _) if low > threshold => Verdict::Significant,
            (_, high) if high <= threshold => Verdict::NotSignificant,
            _ => Verdict::Undecided,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Verdict::Significant => "significant",
            Verdict::NotSignificant => "not significant",
            Verdict::Undecided => "undecided",
        }
    }
}

/// One figure of both sides.
struct Figure {
    name: &'static str,
    medians: [f64; 2],
    gain: f64,
    interval: (f64, f64),
}

/// Relative gain of the second of each pair over the first, and its 95 % interval. Ratios are taken within a pair, so that
/// what changes slowly on the machine changes both.
fn gain(pairs: &[[f64; 2]]) -> Option<(f64, (f64, f64))> {
    let ratios: Vec<f64> = pairs.iter().map(|[learned, perfect]| (perfect / learned).ln()).collect();
    let (centre, deviation) = (mean(&ratios)?, sample_std_dev(&ratios)?);
    let half = student_quantile(0.975, (ratios.len() - 1) as f64) * deviation / (ratios.len() as f64).sqrt();
    let gain = |log: f64| log.exp() - 1.0;
    Some((gain(centre), (gain(centre - half), gain(centre + half))))
}

/// One side of the comparison.
#[derive(Default)]
struct Side {
    figures: Vec<RepeatFigures>,
    recorded: RunData,
}

/// What was found.
pub struct Answer {
    threshold: f64,
    pairs: usize,
    figures: Vec<Figure>,
    experts: [ExpertReport; 2],
    /// Experts used by a layer in an iteration, on average.
    used: [f64; 2],
    /// Time of the experts' ops in each layer, per recorded iteration.
    layer_ns: [BTreeMap<u32, f64>; 2],
    /// Share of the recorded wall time that the experts' ops take.
    share: [f64; 2],
    comparison: Comparison,
    page: String,
    traces: [Trace; 2],
    info: EngineInfo,
    config: EngineConfig,
    command: String,
    dataset: Option<String>,
    ranks: usize,
}

/// Run both sides in turn: `spec.repeat` pairs that are measured and one that is recorded.
pub fn execute(
    device: Device,
    model: &LoadedModel,
    peaks: impl FnOnce() -> Result<MeasuredPeaks>,
    spec: &Spec,
    threshold: f64,
) -> Result<Answer> {
    let engine = super::open(device, model, spec)?;
    let info = engine.info().clone();
    if info.perfect_router.is_none() {
        bail!("the engine has no balanced logits to compare with");
    }
    super::warm(&engine, model, spec)?;
    let peaks = peaks()?;
    let mut sides = [Side::default(), Side::default()];
    for pair in 0..spec.repeat {
        // Who goes first changes, so that neither always runs on the warmer machine.
        for side in [pair % 2, 1 - pair % 2] {
            let run = run_side(&engine, spec, side, Vec::new())?;
            let options = MetricOptions { rule: spec.rule, world_size: 1, streaming: false };
            let figures = RepeatFigures::of(&metrics(&run.records, &options)?, &[], &run.iterations);
            sides[side].figures.push(RepeatFigures { host: run.host.clone(), ..figures });
            sides[side].recorded = run;
        }
    }
    for (side, data) in sides.iter_mut().enumerate() {
        let iterations = data.recorded.iterations.len().min(RECORDED);
        let window = Window { first: 0, last: iterations.saturating_sub(1) as u64 };
        data.recorded = run_side(&engine, spec, side, vec![window])?;
    }
    let (_, failure) = engine.end();
    if let Some(failure) = failure {
        bail!(failure);
    }
    let layers = experts::layers_of(&info);
    let trace_of = |side: usize| {
        let run = &sides[side].recorded;
        // Only the second side's output is wrong.
        let info = EngineInfo { perfect_router: info.perfect_router.filter(|_| side == 1), ..info.clone() };
        recording::to_trace(
            &run.recordings,
            &recording::TraceContext {
                info: &info,
                unreached: &[],
                partial: false,
                peaks: Some(&peaks),
                model: &model.config.model_name,
                layer_ranges: false,
                samples: None,
                experts: experts::counts(&info, run, &layers, spec.assumed_ranks).map(|c| (c, &run.iterations[..])),
            },
        )
    };
    let traces = [trace_of(0), trace_of(1)];
    let contexts = [vec![recording::context(&traces[0])], vec![recording::context(&traces[1])]];
    let names = NAMES.map(str::to_string);
    let comparison =
        compare::compare(&contexts[0], &contexts[1], &CompareOptions { names, rows: 15, ..CompareOptions::default() });
    let page = explore::comparison_page(&comparison, &contexts);
    let counted = |side: usize| {
        let run = &sides[side].recorded;
        experts::counts(&info, run, &layers, spec.assumed_ranks)
    };
    let Some((learned, perfect)) = counted(0).zip(counted(1)) else {
        bail!("the engine did not count the tokens of every expert and iteration");
    };
    let used = [&learned, &perfect].map(|counts| {
        let rows = counts.counts.chunks(counts.experts).filter(|row| row.iter().any(|count| *count > 0));
        let used: Vec<f64> = rows.map(|row| row.iter().filter(|count| **count > 0).count() as f64).collect();
        mean(&used).unwrap_or(0.0)
    });
    let time = [expert_time(&traces[0]), expert_time(&traces[1])];
    let [(layer_ns, share), (perfect_ns, perfect_share)] = time;
    Ok(Answer {
        threshold,
        pairs: spec.repeat,
        figures: figures(&sides),
        experts: [ExpertReport::of_counts(&learned), ExpertReport::of_counts(&perfect)],
        used,
        layer_ns: [layer_ns, perfect_ns],
        share: [share, perfect_share],
        comparison,
        page,
        traces,
        info,
        config: model.config.clone(),
        command: spec.command.clone(),
        dataset: spec.dataset.clone(),
        ranks: spec.assumed_ranks,
    })
}

fn run_side(engine: &Engine, spec: &Spec, side: usize, windows: Vec<Window>) -> Result<RunData> {
    engine.use_perfect_router(side == 1);
    let run = client::run(engine, &spec.jobs, &spec.load, windows, &mut RunWriter::default())?;
    if interrupt::requested() {
        bail!(interrupt::Interrupted);
    }
    if run.partial {
        bail!("the engine stopped in a run with {} routing; run `strobe bench throughput` to see why", NAMES[side]);
    }
    Ok(run)
}

fn figures(sides: &[Side; 2]) -> Vec<Figure> {
    let [learned, perfect] = sides.each_ref().map(|side| &side.figures);
    let figure = |name: &'static str, value: fn(&RepeatFigures) -> Option<f64>| {
        let pairs: Option<Vec<[f64; 2]>> =
            learned.iter().zip(perfect).map(|(learned, perfect)| Some([value(learned)?, value(perfect)?])).collect();
        let pairs = pairs?;
        let (gain, interval) = gain(&pairs)?;
        let side = |side: usize| median(&pairs.iter().map(|pair| pair[side]).collect::<Vec<_>>());
        Some(Figure { name, medians: [side(0)?, side(1)?], gain, interval })
    };
    let all = [
        figure("Output throughput", |f| Some(f.output_throughput_tok_s)),
        figure("Prefill iterations", |f| f.prefill_tok_s),
        figure("Decode at full batch", |f| f.full_batch_decode_tok_s),
    ];
    all.into_iter().flatten().collect()
}

/// Time of the experts' ops by layer, per recorded iteration, and their share of the wall time.
fn expert_time(trace: &Trace) -> (BTreeMap<u32, f64>, f64) {
    let mut layers: BTreeMap<u32, f64> = BTreeMap::new();
    let iterations = trace.iterations.len().max(1) as f64;
    for index in 0..trace.ops.len() {
        let Some(work) = trace.work_of(index) else { continue };
        let (Some(layer), true) = (work.layer, trace.text(work.op).starts_with("expert")) else { continue };
        let op = trace.ops.get(index);
        *layers.entry(layer).or_default() += (op.end - op.start) as f64 / iterations;
    }
    let wall: i64 = trace.iterations.iter().map(|iteration| iteration.wall_ns()).sum();
    let total: f64 = layers.values().sum();
    (layers, total * iterations / wall.max(1) as f64)
}

impl Answer {
    fn verdict(&self) -> Verdict {
        self.figures.first().map_or(Verdict::Undecided, |figure| Verdict::of(figure.interval, self.threshold))
    }

    /// How much longer than with even load a step would be on the assumed ranks, if every layer's experts take as long as
    /// on the fullest rank: the load's part alone, without any communication.
    fn rank_gain(&self) -> Option<f64> {
        let [learned, perfect] = self.experts.each_ref().map(|report| report.rank_slowdown);
        Some(self.share[1] * (learned? / perfect? - 1.0))
    }

    /// How much of the gap on the assumed ranks their load explains; the rest is what the kernels of one device gain.
    fn rank_share(&self) -> Option<f64> {
        let by_ranks = self.rank_gain()?.max(0.0);
        let by_kernels = self.figures.first().map_or(0.0, |figure| figure.gain.max(0.0));
        (by_ranks + by_kernels > 0.0).then(|| by_ranks / (by_ranks + by_kernels))
    }

    /// The layers by how much longer their experts took than in balance, worst first.
    fn layers(&self) -> Vec<(u32, [f64; 2])> {
        let perfect = |layer: &u32| self.layer_ns[1].get(layer).copied().unwrap_or(0.0);
        let mut rows: Vec<(u32, [f64; 2])> =
            self.layer_ns[0].iter().map(|(layer, ns)| (*layer, [*ns, perfect(layer)])).collect();
        rows.sort_by(|a, b| (b.1[0] - b.1[1]).total_cmp(&(a.1[0] - a.1[1])));
        rows
    }

    pub fn to_json(&self) -> Value {
        let figure = |f: &Figure| {
            json!({
                "figure": f.name, "unit": "tokens/s", "learned_median": f.medians[0], "perfect_median": f.medians[1],
                "gain": f.gain, "interval_95": [f.interval.0, f.interval.1],
            })
        };
        let layer = |(layer, [learned, perfect]): &(u32, [f64; 2])| json!({"layer": layer, "learned_expert_ns": learned, "perfect_expert_ns": perfect});
        json!({
            "strobe": env!("CARGO_PKG_VERSION"),
            "command": self.command,
            "model": self.config.model_name,
            "weights": self.config.describe_origin(),
            "dataset": self.dataset,
            "device": self.info.device.describe(),
            "pairs": self.pairs,
            "threshold": self.threshold,
            "verdict": self.verdict().name(),
            "figures": self.figures.iter().map(figure).collect::<Vec<_>>(),
            "experts_used_per_layer_and_iteration": {"learned": self.used[0], "perfect": self.used[1]},
            "experts_share_of_wall": {"learned": self.share[0], "perfect": self.share[1]},
            "layers": self.layers().iter().map(layer).collect::<Vec<_>>(),
            "learned": self.experts[0].to_json(),
            "perfect": self.experts[1].to_json(),
            "perfect_router": self.info.perfect_router.as_ref().map(experts::plan_json),
            "assumed_ranks": self.ranks,
            "gain_by_rank_load_alone": self.rank_gain(),
            "rank_load_share_of_gap": self.rank_share(),
            "comparison": self.comparison,
        })
    }

    pub fn text(&self, width: usize) -> String {
        let mut text = String::new();
        text::heading(&mut text, "IS THE ROUTER THE BOTTLENECK?");
        let _ = writeln!(text, "{}\n", sheets::wrap(&self.answer(), width).trim_end());
        let mut table = Table::new(["tokens/s", "learned", "perfect", "gain", "95 % interval"]);
        let signed = |share: f64| format!("{:+.1} %", 100.0 * share);
        for f in &self.figures {
            table.push([
                f.name.to_string(),
                human::number(f.medians[0]),
                human::number(f.medians[1]),
                signed(f.gain),
                format!("{} to {}", signed(f.interval.0), signed(f.interval.1)),
            ]);
        }
        text.push_str(&table.render(width));
        let _ = writeln!(
            text,
            "{} pairs of runs, learned and perfect in turn on one engine; medians, gain as the mean of ratios within pairs.",
            self.pairs
        );
        let _ = writeln!(text, "{} (the runs called perfect).\n", experts::WRONG);
        text::heading(&mut text, "WHICH LAYERS AND EXPERTS");
        text.push_str(&self.layer_table().render(width));
        let _ = writeln!(
            text,
            "Experts used by a layer in an iteration: {:.2} learned, {:.2} perfect of {}. Experts' ops take {} of the wall time learned, {} perfect.",
            self.used[0],
            self.used[1],
            self.info.experts.map_or(0, |(_, experts)| experts),
            human::percent(self.share[0]),
            human::percent(self.share[1])
        );
        let _ = writeln!(text, "{}\n", sheets::wrap(&self.ranks_in_words(), width).trim_end());
        text::heading(&mut text, "KERNEL BY KERNEL");
        let mut report = self.comparison.report();
        report.sheets.truncate(3); // wall time, its parts, kernels; the page and the JSON have the rest
        text.push_str(&sheets::text(&report, width, 8));
        text
    }

    /// The answer in a sentence or two.
    fn answer(&self) -> String {
        let Some(f) = self.figures.first() else { return "No figures: the runs were too short.".into() };
        let threshold = human::percent(self.threshold);
        let found = format!(
            "Perfect routing changes throughput by {:+.1} % (95 % interval {:+.1} % to {:+.1} %)",
            100.0 * f.gain,
            100.0 * f.interval.0,
            100.0 * f.interval.1
        );
        match self.verdict() {
            Verdict::Significant => {
                format!(
                    "{found}, above {threshold}: routing imbalance is significant. Look at the router, not at the kernels."
                )
            }
            Verdict::NotSignificant => {
                format!(
                    "{found}, not above {threshold}: routing imbalance is not significant here. Look at the kernels, not at the router."
                )
            }
            Verdict::Undecided => {
                format!(
                    "{found}: undecided, {threshold} lies within the interval. Add --repeat, or requests to the dataset."
                )
            }
        }
    }

    fn layer_table(&self) -> Table {
        let mut table = Table::new([
            "layer",
            "experts, learned",
            "perfect",
            "difference",
            "max/mean",
            "per iteration",
            "fullest",
            "its share",
            "hot",
            "dead",
        ]);
        for (layer, [learned, perfect]) in self.layers().into_iter().take(20) {
            let Some(load) = self.experts[0].loads.iter().find(|load| load.layer == layer as usize) else { continue };
            let fullest = load.fullest();
            let pairs: u64 = load.tokens_per_expert.iter().sum();
            let share = load.tokens_per_expert.get(fullest).copied().unwrap_or(0) as f64 / pairs.max(1) as f64;
            let difference = learned - perfect;
            let sign = if difference < 0.0 { "-" } else { "+" };
            table.push([
                Cell::from(layer.to_string()),
                Cell::number(human::ns(learned), learned),
                Cell::number(human::ns(perfect), perfect),
                Cell::number(format!("{sign}{}", human::ns(difference.abs())), difference),
                Cell::from(format!("{:.2}", load.imbalance)),
                Cell::from(format!("{:.2}", load.step_imbalance)),
                Cell::from(fullest.to_string()),
                Cell::from(human::percent(share)),
                Cell::from(load.hot.len().to_string()),
                Cell::from(load.dead.len().to_string()),
            ]);
        }
        table
    }

    /// What the load of expert-parallel ranks alone would cost.
    fn ranks_in_words(&self) -> String {
        let Some(predicted) = self.rank_gain() else {
            return "All of the difference comes from one device: how many experts a step touches, and how even their products are. --assume-ep N says what N GPUs that share the experts would wait for each other.".into();
        };
        let ranks = |report: &ExpertReport| report.ranks_in_words().unwrap_or_default();
        format!(
            "Learned routing. {}. Perfect routing. {}. If every layer waits for its fullest rank, balance brings about {} on {} GPUs by the load of ranks alone: {} of the gap, and what kernels gain on one device is the rest.",
            ranks(&self.experts[0]),
            ranks(&self.experts[1]),
            human::percent(predicted),
            self.ranks,
            human::percent(self.rank_share().unwrap_or(0.0)),
        )
    }

    /// Writes the answer, both heat maps, both traces and the page of their comparison; one that fails does not stop the others.
    pub fn write(&self, dir: &Path, problems: &mut Problems) {
        let file = |name: &str| dir.join(name);
        problems.keep(run_dir::write_whole(&file(ANSWER), format!("{:#}\n", self.to_json()).as_bytes()));
        problems.keep(run_dir::write_whole(&file("balance.txt"), self.text(110).as_bytes()));
        for (name, (trace, report)) in NAMES.iter().zip(self.traces.iter().zip(&self.experts)) {
            problems.keep(nsys::write(trace, &file(&format!("{name}.sqlite"))).map_err(Into::into));
            for (ending, content) in report.plots() {
                let plot = file(&format!("{name}-{}.{ending}", experts::HEAT_MAP));
                problems.keep(run_dir::write_whole(&plot, &content));
            }
        }
        problems.keep(run_dir::write_whole(&file("compare.html"), self.page.as_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_decides() {
        assert_eq!(Verdict::of((0.12, 0.2), 0.1), Verdict::Significant);
        assert_eq!(Verdict::of((-0.02, 0.08), 0.1), Verdict::NotSignificant);
        assert_eq!(Verdict::of((0.05, 0.15), 0.1), Verdict::Undecided);
    }

    #[test]
    fn gain_is_taken_within_pairs() {
        // The machine gets twice as fast between pairs, which is no gain.
        let (gain_of, interval) = gain(&[[100.0, 110.0], [200.0, 220.0], [50.0, 55.0]]).unwrap();
        assert!((gain_of - 0.1).abs() < 1e-12);
        assert!((interval.0 - 0.1).abs() < 1e-9 && (interval.1 - 0.1).abs() < 1e-9);
        let (_, wide) = gain(&[[100.0, 110.0], [100.0, 90.0], [100.0, 105.0]]).unwrap();
        assert!(wide.0 < 0.0 && wide.1 > 0.1);
        assert!(gain(&[[1.0, 2.0]]).is_none());
    }
}
