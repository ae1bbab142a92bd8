//! The work of one process in the order of its launches.

use strobe_trace::{NONE, OpKind, StrId, Trace};

/// What one call launched: a kernel, or a graph with all of its kernels; or a kernel without a recorded launch.
#[derive(Clone, Copy)]
pub(in super::super) struct Unit {
    /// When it was launched; when it began where launches are not known.
    pub at: i64,
    /// Its first op.
    pub op: u32,
    /// The call, or [`NONE`].
    pub call: u32,
    /// Kernels in it.
    pub kernels: u32,
    /// Whether it is a graph.
    pub graph: bool,
    /// Whether the kernels in it were not recorded.
    pub hidden: bool,
    /// The kernels in it as a number that does not depend on their order: those of a graph may run side by side.
    pub what: u64,
}

/// The work of one process.
#[derive(Default)]
pub(super) struct Work {
    pub units: Vec<Unit>,
    /// Per kernel its unit, in the order of launches.
    pub kernels: Vec<(u32, u32)>,
    /// Whether units stand at their launches.
    pub launched: bool,
}

impl Work {
    pub(super) fn by_process(trace: &Trace, graph_call: &[bool]) -> Vec<Self> {
        let ops = &trace.ops;
        let mut all: Vec<Vec<(i64, u32, u32)>> = vec![Vec::new(); trace.processes.len()];
        for op in (0..ops.len()).filter(|&op| !ops.kind[op].is_memory()) {
            if let Some(own) = all.get_mut(ops.process[op] as usize) {
                own.push((ops.start[op], ops.launch[op], op as u32));
            }
        }
        all.into_iter()
            .map(|mut own| {
                let launches = own.iter().filter(|(_, call, _)| *call != NONE).count();
                let launched = 2 * launches >= own.len() && launches > 0;
                if launched {
                    own.retain(|(_, call, _)| *call != NONE);
                    own.iter_mut().for_each(|(at, call, _)| *at = trace.calls.start[*call as usize]);
                    own.sort_by_key(|&(at, call, _)| (at, call));
                }
                let mut work = Self { launched, ..Self::default() };
                for (at, call, op) in own {
                    let call = if launched { call } else { NONE };
                    match work.units.last_mut().filter(|unit| call != NONE && unit.call == call) {
                        Some(unit) => {
                            unit.kernels += 1;
                            unit.what = unit.what.wrapping_add(mixed(ops.name[op as usize]));
                        }
                        None => {
                            let replayed = graph_call.get(call as usize).copied().unwrap_or(false);
                            let graph = replayed || ops.kind[op as usize] == OpKind::Graph;
                            let what = mixed(ops.name[op as usize]);
                            let hidden = ops.kind[op as usize] == OpKind::Graph;
                            work.units.push(Unit { at, op, call, kernels: 1, graph, hidden, what });
                        }
                    }
                    work.kernels.push((op, work.units.len() as u32 - 1));
                }
                work
            })
            .collect()
    }
}

/// A name as a number whose sums tell which names are in them.
pub(in super::super) fn mixed(name: StrId) -> u64 {
    let mut mixed = u64::from(name.0).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^= mixed >> 32;
    mixed.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// Per call of the trace whether its name is of some kind.
pub(super) fn calls_by_name(trace: &Trace, of: impl Fn(&str) -> bool) -> Vec<bool> {
    let mut known: Vec<Option<bool>> = vec![None; trace.strings.len()];
    let names = trace.calls.name.iter();
    names
        .map(|&name| {
            known.get_mut(name.0 as usize).is_some_and(|known| *known.get_or_insert_with(|| of(trace.text(name))))
        })
        .collect()
}
