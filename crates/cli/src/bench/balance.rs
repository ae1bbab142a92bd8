//! Learned against perfectly balanced routing, in turn on one engine: is the router the bottleneck?

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Result, bail};
use serde_json::{Value, json};
use strobe_analyze::compare::{self, CompareOptions, Comparison};
use strobe_analyze::sheet::Report;
use strobe_engine::device::Device;
use strobe_engine::engine_dir::LoadedModel;
use strobe_engine::window::Window;
use strobe_engine::{Engine, EngineConfig, EngineInfo};
use strobe_report::html::Card;
use strobe_report::human;
use strobe_report::table::{Cell, Table};
use strobe_stats::{mean, median, sample_std_dev, student_quantile};
use strobe_trace::{Trace, nsys};
use strobe_workload::{MetricOptions, metrics};

use super::client::{self, RunData};
use super::experts::{self, ExpertReport};
use super::outcome::RepeatFigures;
use super::{Spec, text};
use crate::explore::Headline;
use crate::machine::MeasuredPeaks;
use crate::run_writer::{Problems, RunWriter};
use crate::{explore, interrupt, recording, run_dir, sheets};

/// The answer in a result directory.
pub(crate) const ANSWER: &str = "balance.json";
/// What the two sides are called, in the order of every pair here.
const NAMES: [&str; 2] = ["learned", "perfect"];
/// What the tables of the recorded pair are for.
const RECORDED_PAIR: &str = "One recorded run of each side, for attribution only: gains are those of all pairs.";
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

/// One figure of both sides, over all pairs.
#[derive(Debug)]
struct Figure {
    name: &'static str,
    /// Geometric mean of each side: their ratio is the gain, exactly.
    means: [f64; 2],
    /// For readers of the JSON; their ratio is another number than the gain.
    medians: [f64; 2],
    gain: f64,
    interval: (f64, f64),
}

impl Figure {
    /// Relative gain of the second of each pair over the first, and its 95 % interval. Ratios are taken within a pair, so
    /// that what changes slowly on the machine changes both. Absent where a value is not positive or there is one pair.
    fn of(name: &'static str, pairs: &[[f64; 2]]) -> Option<Figure> {
        if pairs.iter().flatten().any(|value| !(value.is_finite() && *value > 0.0)) {
            return None;
        }
        let side = |side: usize| pairs.iter().map(|pair| pair[side]).collect::<Vec<f64>>();
        let log_mean = |values: &[f64]| mean(&values.iter().map(|value| value.ln()).collect::<Vec<_>>());
        let ratios: Vec<f64> = pairs.iter().map(|[learned, perfect]| (perfect / learned).ln()).collect();
        let deviation = sample_std_dev(&ratios)?;
        let half = student_quantile(0.975, (ratios.len() - 1) as f64) * deviation / (ratios.len() as f64).sqrt();
        let means = [log_mean(&side(0))?.exp(), log_mean(&side(1))?.exp()];
        let gain = means[1] / means[0] - 1.0;
        let end = |by: f64| (1.0 + gain) * by.exp() - 1.0;
        let medians = [median(&side(0))?, median(&side(1))?];
        Some(Figure { name, means, medians, gain, interval: (end(-half), end(half)) })
    }
}

/// The number that the threshold applies to.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Gap {
    /// Ranks that share the experts; 1 is the device that ran.
    ranks: usize,
    /// Both parts together.
    gain: f64,
    /// 95 % interval: that of the measured part, moved by the computed one.
    interval: (f64, f64),
    /// What the load of assumed ranks alone brings about, computed from the counts of the recorded runs; 0 on one device.
    computed: f64,
    /// What the kernels of one device gain.
    measured: f64,
}

impl Gap {
    fn of(figure: &Figure, ranks: usize, by_rank_load: Option<f64>) -> Gap {
        let (ranks, computed) = by_rank_load.filter(|_| ranks > 1).map_or((1, 0.0), |computed| (ranks, computed));
        let interval = (figure.interval.0 + computed, figure.interval.1 + computed);
        Gap { ranks, gain: figure.gain + computed, interval, computed, measured: figure.gain }
    }

    /// The answer in a sentence or two.
    fn in_words(&self, figure: &Figure, pairs: usize, threshold: f64) -> String {
        let interval = human::percent_interval(self.interval.0, self.interval.1);
        let evidence = format!(
            "{} vs {} output tok/s, geometric means of {pairs} interleaved pairs",
            human::number(figure.means[1]),
            human::number(figure.means[0])
        );
        let found = match self.ranks {
            1 => format!(
                "perfect routing changes output throughput by {} ({evidence}, 95 % CI {interval})",
                signed(self.gain)
            ),
            ranks => format!(
                "on {ranks} assumed ranks perfect routing changes output throughput by {}: {} computed from rank load alone, without communication or an interval, and {} measured on one device ({evidence}; 95 % CI of the sum by the measured part {interval})",
                signed(self.gain),
                signed(self.computed),
                signed(self.measured)
            ),
        };
        let limit = human::percent(threshold);
        match Verdict::of(self.interval, threshold) {
            Verdict::Significant => format!(
                "Significant: {found}. The CI lies above the threshold of {limit}: balance the router before tuning kernels."
            ),
            Verdict::NotSignificant => format!(
                "Not significant: {found}. The CI lies below the threshold of {limit}: tune kernels, not the router."
            ),
            Verdict::Undecided => format!(
                "Undecided: {found}. The CI contains the threshold of {limit}: raise --repeat, or add requests to the dataset."
            ),
        }
    }
}

/// A share with its sign.
fn signed(share: f64) -> String {
    let text = human::percent(share);
    if share > 0.0 && !text.starts_with("0.0") { format!("+{text}") } else { text }
}

/// One side of the comparison.
#[derive(Default)]
struct Side {
    figures: Vec<RepeatFigures>,
    recorded: RunData,
}

/// What was found.
pub(crate) struct Answer {
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
    traces: [Trace; 2],
    info: EngineInfo,
    config: EngineConfig,
    command: String,
    dataset: Option<String>,
    ranks: usize,
}

/// Run both sides in turn: `spec.repeat` pairs that are measured and one that is recorded.
pub(crate) fn execute(
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
        Figure::of(name, &pairs?)
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
    fn gap(&self) -> Option<Gap> {
        self.figures.first().map(|figure| Gap::of(figure, self.ranks, self.rank_gain()))
    }

    fn verdict(&self) -> Verdict {
        self.gap().map_or(Verdict::Undecided, |gap| Verdict::of(gap.interval, self.threshold))
    }

    /// How much longer than with even load a step would be on the assumed ranks, if every layer's experts take as long as
    /// on the fullest rank: the load's part alone, without any communication.
    fn rank_gain(&self) -> Option<f64> {
        let [learned, perfect] = self.experts.each_ref().map(|report| report.rank_slowdown);
        Some(self.share[1] * (learned? / perfect? - 1.0))
    }

    /// The layers by how much longer their experts took than in balance, worst first.
    fn layers(&self) -> Vec<(u32, [f64; 2])> {
        let perfect = |layer: &u32| self.layer_ns[1].get(layer).copied().unwrap_or(0.0);
        let mut rows: Vec<(u32, [f64; 2])> =
            self.layer_ns[0].iter().map(|(layer, ns)| (*layer, [*ns, perfect(layer)])).collect();
        rows.sort_by(|a, b| (b.1[0] - b.1[1]).total_cmp(&(a.1[0] - a.1[1])));
        rows
    }

    pub(crate) fn to_json(&self) -> Value {
        let figure = |f: &Figure| {
            json!({
                "figure": f.name, "unit": "tokens/s",
                "learned_geometric_mean": f.means[0], "perfect_geometric_mean": f.means[1],
                "learned_median": f.medians[0], "perfect_median": f.medians[1],
                "gain": f.gain, "interval_95": [f.interval.0, f.interval.1],
            })
        };
        let layer = |(layer, [learned, perfect]): &(u32, [f64; 2])| json!({"layer": layer, "learned_expert_ns": learned, "perfect_expert_ns": perfect});
        let answer = |gap: Gap| {
            json!({
                "ranks": gap.ranks, "gain": gap.gain, "interval_95": [gap.interval.0, gap.interval.1],
                "computed_from_rank_load": gap.computed, "measured_on_one_device": gap.measured,
            })
        };
        // The recorded pair says where time went; how much is gained, all pairs say.
        let mut recorded = json!(self.comparison);
        if let Some(recorded) = recorded.as_object_mut() {
            recorded.remove("verdict");
        }
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
            "answer": self.gap().map(answer),
            "figures": self.figures.iter().map(figure).collect::<Vec<_>>(),
            "experts_used_per_layer_and_iteration": {"learned": self.used[0], "perfect": self.used[1]},
            "experts_share_of_wall": {"learned": self.share[0], "perfect": self.share[1]},
            "layers": self.layers().iter().map(layer).collect::<Vec<_>>(),
            "learned": self.experts[0].to_json(),
            "perfect": self.experts[1].to_json(),
            "perfect_router": self.info.perfect_router.as_ref().map(experts::plan_json),
            "assumed_ranks": self.ranks,
            "gain_by_rank_load_alone": self.rank_gain(),
            "recorded_pair": recorded,
        })
    }

    pub(crate) fn text(&self, width: usize) -> String {
        let mut text = String::new();
        text::heading(&mut text, "IS THE ROUTER THE BOTTLENECK?");
        let _ = writeln!(text, "{}\n", sheets::wrap(&self.answer(), width).trim_end());
        let mut table = Table::new(["tokens/s, one device", "learned", "perfect", "gain", "95 % CI"]);
        for f in &self.figures {
            table.push([
                f.name.to_string(),
                human::number(f.means[0]),
                human::number(f.means[1]),
                signed(f.gain),
                human::percent_interval(f.interval.0, f.interval.1),
            ]);
        }
        text.push_str(&table.render(width));
        let how = format!(
            "Geometric means of {} interleaved pairs on one engine; gain = perfect / learned - 1, 95 % CI by Student's t over the log ratios of the pairs.",
            self.pairs
        );
        text.push_str(&sheets::wrap(&how, width));
        let _ = writeln!(text, "{} (the runs called perfect).\n", experts::WRONG);
        text::heading(&mut text, "WHICH LAYERS AND EXPERTS");
        text.push_str(&self.layer_table().render(width));
        let load = format!(
            "{RECORDED_PAIR} Experts used per layer and iteration: {:.2} learned, {:.2} perfect of {}. Experts' ops take {} of the wall time learned, {} perfect.",
            self.used[0],
            self.used[1],
            self.info.experts.map_or(0, |(_, experts)| experts),
            human::percent(self.share[0]),
            human::percent(self.share[1])
        );
        text.push_str(&sheets::wrap(&load, width));
        let _ = writeln!(text, "{}\n", sheets::wrap(&self.ranks_in_words(), width).trim_end());
        text::heading(&mut text, "KERNEL BY KERNEL");
        let mut report = self.attribution();
        report.sheets.truncate(3); // wall time, its parts, kernels; the page and the JSON have the rest
        text.push_str(&sheets::text(&report, width, 8));
        text
    }

    /// The answer in a sentence or two.
    fn answer(&self) -> String {
        match self.figures.first().zip(self.gap()) {
            Some((figure, gap)) => gap.in_words(figure, self.pairs, self.threshold),
            None => "No figures: the runs were too short; add requests to the dataset.".into(),
        }
    }

    /// The recorded pair as tables, without a verdict of its own: a single pair would set another number beside the gain.
    fn attribution(&self) -> Report {
        let mut report = self.comparison.report();
        report.title = format!("Where the time goes: A = {}, B = {}", NAMES[0], NAMES[1]);
        report.notes = vec![RECORDED_PAIR.to_owned()];
        report.notes.extend(self.comparison.warnings.iter().map(|warning| format!("Warning: {warning}.")));
        for sheet in &mut report.sheets {
            while let Some(place) = sheet.columns.iter().position(|column| column.name == "Outcome") {
                sheets::drop_column(sheet, place);
            }
        }
        report
    }

    /// The page of the recorded pair, with the answer of all pairs above it.
    fn page(&self) -> String {
        let mut cards: Vec<Card> = self
            .gap()
            .into_iter()
            .map(|gap| {
                let note = format!("95 % CI {}", human::percent_interval(gap.interval.0, gap.interval.1));
                let (label, note) = match gap.ranks {
                    1 => ("Gain on one device".to_owned(), note),
                    ranks => (
                        format!("Gain on {ranks} assumed ranks"),
                        format!(
                            "{note}: {} computed from rank load, {} measured",
                            signed(gap.computed),
                            signed(gap.measured)
                        ),
                    ),
                };
                Card::new(label, signed(gap.gain)).note(note)
            })
            .collect();
        cards.extend(self.figures.iter().map(|f| {
            let note = format!(
                "{} → {} tok/s, geometric means of {} pairs on one device, 95 % CI {}",
                human::number(f.means[0]),
                human::number(f.means[1]),
                self.pairs,
                human::percent_interval(f.interval.0, f.interval.1)
            );
            Card::new(f.name, signed(f.gain)).note(note)
        }));
        let headline = Headline { verdict: self.answer(), links: Vec::new(), cards, report: self.attribution() };
        let contexts = self.traces.each_ref().map(|trace| vec![recording::context(trace)]);
        explore::pair_page(&self.comparison, &contexts, headline)
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
        let Some(computed) = self.rank_gain() else {
            return "The gain is that of one device: how many experts a step reads, and how even their GEMMs are. --assume-ep N adds what N ranks that share the experts wait for each other.".into();
        };
        let ranks = |report: &ExpertReport| report.ranks_in_words().unwrap_or_default();
        format!(
            "Learned routing. {}. Perfect routing. {}. Computed from rank load alone, if every layer waits for its most loaded rank: {} on {} ranks.",
            ranks(&self.experts[0]),
            ranks(&self.experts[1]),
            signed(computed),
            self.ranks,
        )
    }

    /// Writes the answer, both heat maps, both traces and the page of their comparison; one that fails does not stop the others.
    pub(crate) fn write(&self, dir: &Path, problems: &mut Problems) {
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
        problems.keep(run_dir::write_whole(&file("compare.html"), self.page().as_bytes()));
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
        let figure = Figure::of("x", &[[100.0, 110.0], [200.0, 220.0], [50.0, 55.0]]).unwrap();
        assert!((figure.gain - 0.1).abs() < 1e-12);
        assert!((figure.interval.0 - 0.1).abs() < 1e-9 && (figure.interval.1 - 0.1).abs() < 1e-9);
        let wide = Figure::of("x", &[[100.0, 110.0], [100.0, 90.0], [100.0, 105.0]]).unwrap().interval;
        assert!(wide.0 < 0.0 && wide.1 > 0.1);
        assert!(Figure::of("x", &[[1.0, 2.0]]).is_none());
        assert!(Figure::of("x", &[[1.0, 2.0], [0.0, 2.0], [1.0, 2.0]]).is_none());
    }

    #[test]
    fn sides_and_gain_agree_in_sign() {
        // Medians 100 and 99 beside a mean ratio above 1: what is shown is one definition.
        let pairs = [[100.0, 99.0], [100.0, 99.0], [100.0, 99.0], [50.0, 60.0], [150.0, 150.0]];
        let figure = Figure::of("x", &pairs).unwrap();
        assert_eq!(figure.medians, [100.0, 99.0]);
        assert!(figure.gain > 0.0 && figure.means[1] > figure.means[0], "{figure:?}");
        assert_eq!(figure.gain, figure.means[1] / figure.means[0] - 1.0);
        assert!(figure.interval.0 < figure.gain && figure.gain < figure.interval.1);
    }

    #[test]
    fn assumed_ranks_decide_where_they_were_asked_for() {
        let figure = Figure::of("x", &[[100.0, 97.0], [101.0, 98.0], [100.0, 98.0]]).unwrap();
        let one = Gap::of(&figure, 1, None);
        assert_eq!((one.ranks, one.gain, one.computed), (1, figure.gain, 0.0));
        assert_eq!(one, Gap::of(&figure, 1, Some(0.6)), "one rank waits for nobody");
        let words = one.in_words(&figure, 3, 0.1);
        assert!(
            words.starts_with("Not significant: perfect routing changes output throughput by -2.7 % (97.7 vs 100"),
            "{words}"
        );
        let four = Gap::of(&figure, 4, Some(0.6));
        assert!((four.gain - (0.6 + figure.gain)).abs() < 1e-12 && four.measured == figure.gain);
        assert!((four.interval.0 - figure.interval.0 - 0.6).abs() < 1e-12);
        let words = four.in_words(&figure, 3, 0.1);
        let parts = [
            "Significant: on 4 assumed ranks",
            "+57.3 %",
            "+60.0 % computed from rank load alone",
            "-2.7 % measured on one device",
        ];
        assert!(parts.iter().all(|part| words.contains(part)), "{words}");
        assert!(four.in_words(&figure, 3, 0.58).starts_with("Undecided: "));
    }
}
