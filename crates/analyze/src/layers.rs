//! The model's ops and layers: what each took on the device, whether it was launched alone or inside a graph.

use std::collections::{BTreeMap, BTreeSet};

use strobe_trace::{NONE, StrId, Work};

use crate::context::Context;
use crate::sheet::{Column, Report, Sheet, Unit, Value};

/// What belongs together took this.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Share {
    /// Kernels, copies and fills; on a CPU executions of ops.
    pub instances: u64,
    /// Of those, how many a graph launched.
    pub in_graphs: u64,
    /// Sum of their durations.
    pub total_ns: i64,
    /// Floating-point operations; 0 = none or not known.
    pub flops: u64,
    /// Bytes moved at least; 0 = not known.
    pub bytes: u64,
    iterations: BTreeSet<u32>,
}

impl Share {
    /// Iterations that it was part of.
    pub fn iterations(&self) -> usize {
        self.iterations.len()
    }

    fn add(&mut self, ns: i64, work: &Work, in_graph: bool, iteration: u32) {
        self.instances += 1;
        self.in_graphs += u64::from(in_graph);
        self.total_ns = self.total_ns.saturating_add(ns);
        self.flops = self.flops.saturating_add(work.flops);
        self.bytes = self.bytes.saturating_add(work.bytes);
        if iteration != NONE {
            self.iterations.insert(iteration);
        }
    }

    fn per_second(&self, amount: u64) -> Value {
        match amount > 0 && self.total_ns > 0 {
            true => (amount as f64 / (self.total_ns as f64 * 1e-9)).into(),
            false => Value::Unknown,
        }
    }

    fn per_iteration(&self) -> Value {
        match self.iterations.len() {
            0 => Value::Unknown,
            count => (self.total_ns as f64 / count as f64).into(),
        }
    }
}

/// Device time by op of the model and by layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layers {
    /// By name and category of the op, longest first.
    pub ops: Vec<((String, String), Share)>,
    /// By layer; `None` = ops outside of layers.
    pub layers: BTreeMap<Option<u32>, Share>,
    /// Device time of everything, tied to the model or not.
    pub total_ns: i64,
    /// Device time of what is tied to an op of the model.
    pub tied_ns: i64,
}

/// Sums up device time by op of the model and by layer.
pub fn layers(context: &Context) -> Layers {
    let trace = context.trace;
    let mut found = Layers::default();
    let mut ops: BTreeMap<(StrId, StrId), Share> = BTreeMap::new();
    for op in 0..trace.ops.len() {
        let ns = context.own_ns(op);
        found.total_ns = found.total_ns.saturating_add(ns);
        let Some(work) = trace.work_of(op) else { continue };
        found.tied_ns = found.tied_ns.saturating_add(ns);
        let (in_graph, iteration) = (trace.ops.graph_node[op] != 0, context.iterations.of_op[op]);
        ops.entry((work.op, work.category)).or_default().add(ns, work, in_graph, iteration);
        found.layers.entry(work.layer).or_default().add(ns, work, in_graph, iteration);
    }
    let text = |id: StrId| trace.text(id).to_owned();
    found.ops = ops.into_iter().map(|((op, category), share)| ((text(op), text(category)), share)).collect();
    found.ops.sort_by_key(|(_, share)| std::cmp::Reverse(share.total_ns));
    found
}

/// The report `layers`.
pub fn report(context: &Context) -> Report {
    let (name, title) = ("layers", "Ops and layers of the model");
    let found = layers(context);
    if found.ops.is_empty() {
        let why = "the trace does not say which op of a model its kernels belong to: strobe's own recordings do";
        return Report::absent(name, title, why);
    }
    let measures = || {
        [
            Column::new("Total", Unit::Ns),
            Column::new("Share", Unit::Share),
            Column::new("Per iteration", Unit::Ns),
            Column::new("Instances", Unit::Count),
            Column::new("In graphs", Unit::Count),
            Column::new("FLOP/s", Unit::FlopsPerS),
            Column::new("Bytes/s", Unit::BytesPerS),
        ]
    };
    let values = |share: &Share| -> [Value; 7] {
        let part = match found.tied_ns {
            0 => Value::Unknown,
            tied => (share.total_ns as f64 / tied as f64).into(),
        };
        [
            share.total_ns.into(),
            part,
            share.per_iteration(),
            share.instances.into(),
            share.in_graphs.into(),
            share.per_second(share.flops),
            share.per_second(share.bytes),
        ]
    };
    let names = [Column::new("Op", Unit::Text), Column::new("Category", Unit::Text)];
    let mut ops = Sheet::new("ops", names.into_iter().chain(measures())).title("By op");
    for ((op, category), share) in &found.ops {
        ops.push([op.clone().into(), category.clone().into()].into_iter().chain(values(share)));
    }
    let names = [Column::new("Layer", Unit::Text)];
    let mut layers = Sheet::new("layers", names.into_iter().chain(measures())).title("By layer");
    for (layer, share) in &found.layers {
        let label = layer.map_or_else(|| "outside of layers".to_owned(), |layer| layer.to_string());
        layers.push([label.into()].into_iter().chain(values(share)));
    }
    let mut report = Report::new(name, title).sheet(ops).sheet(layers);
    report.notes.extend(context.own_time_note());
    let untied = found.total_ns.saturating_sub(found.tied_ns);
    match untied > 0 {
        true => report.note(format!(
            "Shares are of the {:.1} % of device time that is tied to the model; the rest is copies and the like.",
            100.0 * found.tied_ns as f64 / found.total_ns as f64
        )),
        false => report,
    }
}

#[cfg(test)]
mod tests {
    use strobe_trace::{Distinct, OpKind, OpRow, Trace};

    use super::*;
    use crate::Options;

    #[test]
    fn ops_inside_graphs_count_for_their_layer() {
        let mut trace = Trace::default();
        let [kernel, qkv, norm, gemm, norms] =
            ["kernel", "qkv_proj", "norm", "gemm", "norms"].map(|text| trace.strings.intern(text));
        let mut works = Distinct::default();
        let mut row = |op, category, layer, start: i64, length: i64, flops, graph_node| {
            let work = works.number(Work { op, category, layer, shape: [0; 3], bytes: 0, flops });
            OpRow { work, graph_node, ..OpRow::new(OpKind::Kernel, kernel, start, start + length) }
        };
        let rows = [
            row(qkv, gemm, Some(0), 0, 30, 3000, 7),
            row(qkv, gemm, Some(1), 40, 50, 3000, 8),
            row(norm, norms, None, 100, 20, 0, 0),
            OpRow::new(OpKind::Memcpy, kernel, 200, 300),
        ];
        rows.into_iter().for_each(|row| trace.ops.push(row));
        trace.works = works.into_values();
        trace.finish();
        let options = Options::default();
        let context = Context::new(&trace, &options);
        let found = layers(&context);
        assert_eq!((found.total_ns, found.tied_ns), (200, 100));
        let ops: Vec<_> =
            found.ops.iter().map(|((op, _), s)| (op.as_str(), s.instances, s.in_graphs, s.total_ns)).collect();
        assert_eq!(ops, [("qkv_proj", 2, 2, 80), ("norm", 1, 0, 20)]);
        let layers: Vec<_> = found.layers.iter().map(|(layer, s)| (*layer, s.total_ns, s.flops)).collect();
        assert_eq!(layers, [(None, 20, 0), (Some(0), 30, 3000), (Some(1), 50, 3000)]);
        let report = report(&context);
        assert_eq!(report.sheets.iter().map(|s| s.rows.len()).collect::<Vec<_>>(), [2, 3]);
        assert!(report.notes.iter().any(|note| note.contains("50.0 %")), "{:?}", report.notes);
        let empty = Trace::default();
        assert!(super::report(&Context::new(&empty, &options)).not_applicable.is_some());
    }
}
