//! What threads did on CPUs: switches between threads, and samples with the functions they were in.

use std::collections::{BTreeSet, HashMap};

use super::ids::process_of;
use super::pages::Row;
use super::part::{Keys, NameKey, Names};
use crate::system::{Left, Switch, on_cpu};
use crate::{CpuSample, NONE, OnCpu, StrId};

/// What the tables hold; threads have numbers of their own, since those of other programs are here too.
#[derive(Default)]
pub(super) struct Switches {
    threads: Keys<i64>,
    switches: Vec<Switch>,
    samples: Vec<Sample>,
    frames: Vec<Frames>,
}

struct Sample {
    id: i64,
    time: i64,
    thread: u32,
}

/// Of the functions that a sample was in, inside each other: the innermost with a name, and the file of the innermost.
#[derive(Clone, Copy)]
struct Frames {
    id: i64,
    /// Depth and name.
    named: Option<(i64, i64)>,
    /// Depth and name.
    module: (i64, i64),
}

impl Frames {
    fn merge(&mut self, other: Self) {
        self.named = [self.named, other.named].into_iter().flatten().min_by_key(|(depth, _)| *depth);
        if other.module.0 < self.module.0 {
            self.module = other.module;
        }
    }
}

impl Switches {
    pub(super) fn switch(&mut self, row: &Row, time: i64) {
        let left = (row.int(2) == Some(0)).then(|| why(row.int(4), row.int(5)));
        let thread = self.threads.number(row.int(3).unwrap_or(0));
        self.switches.push(Switch { time, thread, cpu: row.int(1).unwrap_or(0) as u32, left });
    }

    pub(super) fn sample(&mut self, row: &Row, time: i64) {
        let thread = self.threads.number(row.int(2).unwrap_or(0));
        self.samples.push(Sample { id: row.int(1).unwrap_or(0), time, thread });
    }

    pub(super) fn frame(&mut self, row: &Row) {
        let (Some(id), Some(symbol)) = (row.int(0), row.int(2)) else { return };
        let depth = row.int(1).unwrap_or(0);
        let is_named = row.int(4).unwrap_or(0) == 0 && row.int(5).unwrap_or(0) == 0;
        let frame = Frames {
            id,
            named: is_named.then_some((depth, symbol)),
            module: row.int(3).map_or((i64::MAX, 0), |module| (depth, module)),
        };
        match self.frames.last_mut().filter(|last| last.id == id) {
            Some(last) => last.merge(frame),
            None => self.frames.push(frame),
        }
    }

    /// Takes over what another piece of the tables holds.
    pub(super) fn absorb(&mut self, mut other: Self) {
        let threads: Vec<u32> = other.threads.keys.iter().map(|&key| self.threads.number(key)).collect();
        other.switches.iter_mut().for_each(|switch| switch.thread = threads[switch.thread as usize]);
        other.samples.iter_mut().for_each(|sample| sample.thread = threads[sample.thread as usize]);
        self.switches.append(&mut other.switches);
        self.samples.append(&mut other.samples);
        self.frames.append(&mut other.frames);
    }

    /// The times on CPUs, the samples, and how many switches have no partner. `known` are the processes that the trace
    /// has anyway: their threads are numbered by `number`, those of other programs are [`NONE`], and their samples are
    /// left out.
    pub(super) fn finish(
        self,
        known: &BTreeSet<i64>,
        names: &mut Names,
        mut number: impl FnMut(i64) -> u32,
    ) -> (Vec<OnCpu>, Vec<CpuSample>, u64) {
        let mut thread = |key: i64| if known.contains(&process_of(key)) { number(key) } else { NONE };
        let threads: Vec<u32> = self.threads.keys.iter().map(|&key| thread(key)).collect();
        let (mut times, lone) = on_cpu(self.switches);
        times.iter_mut().for_each(|on| on.thread = threads[on.thread as usize]);

        let mut frames: HashMap<i64, Frames> = HashMap::new();
        for frame in self.frames {
            frames.entry(frame.id).and_modify(|known| known.merge(frame)).or_insert(frame);
        }
        let mut modules: HashMap<i64, StrId> = HashMap::new();
        let mut samples = Vec::with_capacity(self.samples.len());
        for sample in self.samples {
            let thread = threads[sample.thread as usize];
            if thread == NONE {
                continue;
            }
            let frames = frames.get(&sample.id);
            let function = frames.and_then(|frames| frames.named).map_or(StrId::NONE, |(_, name)| names.id(name));
            let module = frames.map(|frames| frames.module).filter(|(depth, _)| *depth != i64::MAX);
            let module = module.map_or(StrId::NONE, |(_, name)| {
                *modules.entry(name).or_insert_with(|| names.number(NameKey::File(name)))
            });
            samples.push(CpuSample { time: sample.time, thread, function, module });
        }
        (times, samples, lone)
    }
}

/// Why a thread lost its CPU: by its state (`ENUM_SAMPLING_THREAD_STATE`), else by what blocked it
/// (`ENUM_SCHEDULING_THREAD_BLOCK`). Many exports say neither.
fn why(state: Option<i64>, block: Option<i64>) -> Left {
    const PREEMPTED: [i64; 6] = [42, 43, 44, 45, 49, 51];
    match (state, block) {
        (_, Some(block)) if PREEMPTED.contains(&block) => Left::Ready,
        (Some(1), _) => Left::Ready,
        (Some(5), _) => Left::Ended,
        (Some(2 | 3 | 4 | 7 | 8), _) | (_, Some(2..=52)) => Left::Waiting,
        _ => Left::Unknown,
    }
}

/// The state that stands for a reason in a written file.
pub(super) fn state_of(left: Left) -> i64 {
    match left {
        Left::Unknown => 0,
        Left::Ready => 1,
        Left::Waiting => 7,
        Left::Ended => 5,
    }
}
