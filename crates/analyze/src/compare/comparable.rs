//! Whether two sides can be compared at all, and what to keep in mind.

use std::collections::{BTreeSet, HashMap};

use strobe_trace::{GraphMode, NONE, OpKind, StrId};

use super::align::{LeftOut, SIDES};
use super::normalize::base_name;
use super::samples::Side;
use crate::Context;
use crate::iterations::Method;

/// What [`judge`] found.
#[derive(Default)]
pub(super) struct Judged {
    /// Reasons that forbid a verdict.
    pub blockers: Vec<String>,
    /// Reasons to be careful.
    pub warnings: Vec<String>,
}

/// Below this share of op time in kernels whose name both sides know, a reader is warned.
const FEW_NAMES_SHARED: f64 = 0.5;

/// Below this share nothing connects the two sides: whatever the difference is, it explains nothing.
const NO_NAMES_SHARED: f64 = 0.05;

/// The same for the share of distinct names, of the side that has fewer.
const FEW_DISTINCT_NAMES: f64 = 0.1;

/// What one side is like, over all its traces.
struct Nature {
    ops: usize,
    has_iterations: bool,
    devices: usize,
    processes: usize,
    device_names: BTreeSet<String>,
    on_cpu: bool,
    profilers: BTreeSet<String>,
    graphs_hidden: bool,
    graphs_by_node: bool,
    /// Op time by bare kernel name.
    names: HashMap<String, f64>,
    partial: bool,
    lost: u64,
}

impl Nature {
    fn of(contexts: &[Context]) -> Self {
        let mut nature = Self {
            ops: 0,
            has_iterations: false,
            devices: 0,
            processes: 0,
            device_names: BTreeSet::new(),
            on_cpu: false,
            profilers: BTreeSet::new(),
            graphs_hidden: false,
            graphs_by_node: false,
            names: HashMap::new(),
            partial: false,
            lost: 0,
        };
        for context in contexts {
            nature.add(context);
        }
        nature
    }

    fn add(&mut self, context: &Context) {
        let trace = context.trace;
        let ops = &trace.ops;
        self.ops += ops.len();
        self.has_iterations |= !context.iterations.list.is_empty();
        let devices: BTreeSet<u32> = ops.device.iter().copied().collect();
        let processes: BTreeSet<u32> = ops.process.iter().copied().collect();
        self.devices = self.devices.max(devices.len());
        self.processes = self.processes.max(processes.len());
        for device in devices.iter().filter_map(|&d| trace.devices.get(d as usize)) {
            self.on_cpu |= device.is_cpu;
            if !device.name.is_empty() {
                self.device_names.insert(device.name.clone());
            }
        }
        let producer = trace.meta.producer.split(|c: char| c.is_ascii_digit()).next().unwrap_or_default().trim();
        if !producer.is_empty() {
            self.profilers.insert(producer.to_owned());
        }
        let launches_graphs: Vec<bool> = {
            let mut by_name: HashMap<_, bool> = HashMap::new();
            let names = trace.calls.name.iter();
            names
                .map(|&name| *by_name.entry(name).or_insert_with(|| trace.text(name).contains("GraphLaunch")))
                .collect()
        };
        let mut time_of_name = vec![0.0; trace.strings.len()];
        for op in 0..ops.len() {
            let launch = ops.launch[op];
            let replayed = launch != NONE && launches_graphs.get(launch as usize).copied().unwrap_or(false);
            match ops.kind[op] {
                OpKind::Graph => self.graphs_hidden = true,
                OpKind::Kernel => self.graphs_by_node |= replayed || ops.graph_node[op] != 0,
                _ => {}
            }
            if let Some(time) = time_of_name.get_mut(ops.name[op].0 as usize) {
                *time += ops.duration(op) as f64;
            }
        }
        self.graphs_hidden |= trace.meta.graph_mode == Some(GraphMode::Graph) && launches_graphs.contains(&true);
        for (name, ns) in time_of_name.into_iter().enumerate().filter(|&(_, ns)| ns > 0.0) {
            *self.names.entry(base_name(trace.text(StrId(name as u32)))).or_default() += ns;
        }
        self.partial |= trace.meta.partial;
        self.lost += trace.meta.sources.iter().map(|s| s.lost).sum::<u64>();
    }

    /// The share of its op time in names that the other side knows too.
    fn share_known_to(&self, other: &Nature) -> f64 {
        let total: f64 = self.names.values().sum();
        let known: f64 = self.names.iter().filter(|(name, _)| other.names.contains_key(*name)).map(|(_, ns)| ns).sum();
        if total > 0.0 { known / total } else { 1.0 }
    }
}

/// Looks at what the two sides are, before anything is aligned.
pub(super) fn judge(a: &[Context], b: &[Context]) -> Judged {
    let natures = [Nature::of(a), Nature::of(b)];
    let mut judged = Judged::default();
    let [of_a, of_b] = &natures;
    for (side, nature) in SIDES.iter().zip(&natures) {
        if nature.ops == 0 && !nature.has_iterations {
            judged.blockers.push(format!("{side} has no device activity"));
        }
        if nature.partial || nature.lost > 0 {
            let lost =
                if nature.lost > 0 { format!(", {} events could not be read", nature.lost) } else { String::new() };
            judged.warnings.push(format!("{side} is incomplete{lost}"));
        }
    }
    // Without ops on a side there is nothing to match; wall times of iterations can be compared all the same.
    if natures.iter().any(|nature| nature.ops == 0) {
        return judged;
    }
    let warn = |judged: &mut Judged, text: String| judged.warnings.push(text);
    for (hidden, open) in [(0, 1), (1, 0)] {
        let (with, without) = (&natures[hidden], &natures[open]);
        if with.graphs_hidden && !without.graphs_hidden {
            let (h, o) = (SIDES[hidden], SIDES[open]);
            match without.graphs_by_node {
                true => judged.blockers.push(format!(
                    "CUDA graphs were recorded differently: {h} as whole graphs, whose kernels are hidden, {o} node by node, \
                     which slows down what it records; record both with the same --cuda-graph-trace"
                )),
                false => warn(
                    &mut judged,
                    format!("{h} replays CUDA graphs whose kernels are hidden, {o} does not: compare times, not kernels"),
                ),
            }
        }
    }
    if of_a.graphs_hidden && of_b.graphs_hidden {
        let text = "kernels inside CUDA graphs are hidden on both sides (--cuda-graph-trace=node shows them)";
        warn(&mut judged, text.to_owned());
    }
    if of_a.on_cpu != of_b.on_cpu {
        warn(&mut judged, "one side ran on a CPU, the other on a GPU".to_owned());
    }
    let list = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(", ");
    let differ = |x: &BTreeSet<String>, y: &BTreeSet<String>| !x.is_empty() && !y.is_empty() && x != y;
    if differ(&of_a.device_names, &of_b.device_names) {
        let text = format!("different devices: A {}, B {}", list(&of_a.device_names), list(&of_b.device_names));
        warn(&mut judged, text);
    }
    if differ(&of_a.profilers, &of_b.profilers) {
        let (a, b) = (list(&of_a.profilers), list(&of_b.profilers));
        warn(&mut judged, format!("recorded by different profilers, which cost differently: A {a}, B {b}"));
    }
    if of_a.devices != of_b.devices {
        warn(&mut judged, format!("different numbers of devices: A {}, B {}", of_a.devices, of_b.devices));
    }
    if of_a.processes != of_b.processes {
        warn(&mut judged, format!("different numbers of ranks: A {}, B {}", of_a.processes, of_b.processes));
    }
    let shared = of_a.share_known_to(of_b).min(of_b.share_known_to(of_a));
    let common = of_a.names.keys().filter(|name| of_b.names.contains_key(*name)).count() as f64;
    let fewest = of_a.names.len().min(of_b.names.len()).max(1) as f64;
    // One GEMM in place of another may be nearly all of the time: then the small kernels around it are still the same.
    if shared < NO_NAMES_SHARED && common / fewest < FEW_DISTINCT_NAMES {
        judged.blockers.push(format!(
            "the sides have almost no kernel in common ({:.0} % of the op time): another model or engine, or hidden kernels",
            100.0 * shared
        ));
    } else if shared < FEW_NAMES_SHARED {
        let text = format!(
            "kernels known to both sides make up only {:.0} % of the op time: many kernels replaced, or another model, library or engine",
            100.0 * shared
        );
        warn(&mut judged, text);
    }
    judged
}

impl Judged {
    /// When no iterations can be aligned: says why whole windows are compared, and whether they may be.
    pub(super) fn windows_only(
        &mut self,
        contexts: [&[Context]; 2],
        sides: &[Side; 2],
        left_out: &[LeftOut],
        notes: &mut Vec<String>,
    ) {
        let found = [0, 1].map(|side| !sides[side].samples.is_empty());
        for (letter, side) in SIDES.iter().zip(contexts) {
            if let Some(without) = side.iter().find(|context| context.iterations.list.is_empty()) {
                notes.push(format!("{letter}: {}", without.iterations.why_none()));
            }
        }
        match found {
            [false, false] => notes.push("whole windows are compared".to_owned()),
            [true, true] => {
                let of = |side: char| {
                    let own = left_out.iter().filter(|l| l.side == side);
                    own.map(|l| format!("{} x {}", l.iterations, l.name)).collect::<Vec<_>>().join("; ")
                };
                self.blockers.push(format!(
                    "no iteration of A has its like in B: A has {}, B has {}",
                    of('A'),
                    of('B')
                ));
            }
            [in_a, _] => {
                let missing = SIDES[usize::from(in_a)];
                notes.push(format!("{missing} has no iterations: whole windows are compared"));
            }
        }
    }
}

/// Whether the program itself marked its iterations.
pub(super) fn has_markers(context: &Context) -> bool {
    matches!(context.iterations.method, Some(Method::Recorded | Method::Markers(_) | Method::RangeName(_)))
}
