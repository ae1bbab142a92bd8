//! Host ranges projected onto devices: a range holds the ops whose launching call lies wholly inside it on its thread.

use std::ops::Range;

use strobe_trace::{NONE, OpKind, RangeSource, Trace, range_flags};

/// A launching call with the ops it launched. An op of a CPU engine launches itself.
#[derive(Clone, Copy)]
pub(super) struct Launch {
    start: i64,
    end: i64,
    /// Its ops are `Launches::ops[first..first + count]`.
    first: u32,
    count: u32,
    first_op_start: i64,
    last_op_end: i64,
}

/// All launching calls of a trace, by thread.
pub(super) struct Launches {
    threads: Vec<ThreadLaunches>,
    ops: Vec<u32>,
    /// Ops that no call of the trace launched: they belong to no range.
    pub without_call: usize,
}

/// The launching calls of one thread in order of their start.
#[derive(Default)]
struct ThreadLaunches {
    launches: Vec<Launch>,
    /// Whether they end in the same order too, as calls that do not overlap do.
    ordered: bool,
    extremes: Extremes,
}

/// A range that holds launches.
pub(super) struct Projected {
    /// Index of the range.
    pub range: u32,
    /// First start of its ops.
    pub start: i64,
    /// Last end of its ops.
    pub end: i64,
    /// How many launches it holds.
    pub launches: u32,
    /// How many projected ranges enclose it.
    pub level: u32,
    /// How many projected ranges have it as the tightest that encloses them.
    pub children: u32,
    /// Where its launches stand among those of its thread. When these are not ordered by end, the slice also holds
    /// launches that end later than the range.
    slice: (u32, u32),
}

impl Projected {
    /// Launches that a look at all in it passes.
    pub(super) fn held(&self) -> usize {
        (self.slice.1 - self.slice.0) as usize
    }
}

/// Whether a range takes part in projections: ranges of the program, closed by the thread that opened them.
pub(super) fn takes_part(trace: &Trace, range: usize) -> bool {
    let own =
        !matches!(trace.ranges.source[range], RangeSource::GpuAnnotation | RangeSource::CpuOp | RangeSource::Python);
    own && trace.ranges.flags[range] & (range_flags::MARK | range_flags::CROSS_THREAD) == 0
}

impl Launches {
    pub(super) fn of(trace: &Trace) -> Self {
        let (ops, calls) = (&trace.ops, &trace.calls);
        let mut threads: Vec<ThreadLaunches> = trace.threads.iter().map(|_| ThreadLaunches::default()).collect();
        let mut without_call = 0;
        // Ops sorted by their call: counted, then put in place.
        let mut first = vec![0u32; calls.len() + 1];
        for op in 0..ops.len() {
            match ops.kind[op] {
                OpKind::Kernel | OpKind::Memcpy | OpKind::Memset if ops.launch[op] == NONE => without_call += 1,
                OpKind::Kernel | OpKind::Memcpy | OpKind::Memset => first[ops.launch[op] as usize + 1] += 1,
                OpKind::Graph | OpKind::CpuOp => {}
            }
        }
        for call in 0..calls.len() {
            first[call + 1] += first[call];
        }
        let mut sorted = vec![0u32; first[calls.len()] as usize];
        let mut next = first.clone();
        for op in 0..ops.len() {
            let launched = matches!(ops.kind[op], OpKind::Kernel | OpKind::Memcpy | OpKind::Memset);
            if launched && ops.launch[op] != NONE {
                let place = &mut next[ops.launch[op] as usize];
                sorted[*place as usize] = op as u32;
                *place += 1;
            }
        }
        drop(next);
        for call in (0..calls.len()).filter(|&call| first[call] < first[call + 1]) {
            let Some(thread) = threads.get_mut(calls.thread[call] as usize) else { continue };
            let mine = &sorted[first[call] as usize..first[call + 1] as usize];
            thread.launches.push(Launch {
                start: calls.start[call],
                end: calls.end[call],
                first: first[call],
                count: mine.len() as u32,
                first_op_start: mine.iter().map(|&op| ops.start[op as usize]).min().unwrap_or(i64::MAX),
                last_op_end: mine.iter().map(|&op| ops.end[op as usize]).max().unwrap_or(i64::MIN),
            });
        }
        for op in (0..ops.len()).filter(|&op| ops.kind[op] == OpKind::CpuOp) {
            let Some(thread) = threads.get_mut(ops.stream[op] as usize) else { continue };
            let (start, end) = (ops.start[op], ops.end[op]);
            let first = sorted.len() as u32;
            sorted.push(op as u32);
            thread.launches.push(Launch { start, end, first, count: 1, first_op_start: start, last_op_end: end });
        }
        for thread in &mut threads {
            if !thread.launches.is_sorted_by_key(|l| l.start) {
                thread.launches.sort_by_key(|l| l.start);
            }
            thread.ordered = thread.launches.is_sorted_by_key(|l| l.end);
            thread.extremes = Extremes::of(&thread.launches);
        }
        Self { threads, ops: sorted, without_call }
    }

    /// The ranges that hold launches, in the order of the trace.
    pub(super) fn project(&self, trace: &Trace) -> Vec<Projected> {
        let ranges = &trace.ranges;
        let mut projected: Vec<Projected> = Vec::new();
        let mut cursors = vec![0usize; self.threads.len()];
        let mut open: Vec<Vec<u32>> = vec![Vec::new(); self.threads.len()];
        for range in (0..ranges.len()).filter(|&range| takes_part(trace, range)) {
            let number = ranges.thread[range] as usize;
            let Some(thread) = self.threads.get(number) else { continue };
            let (start, end) = (ranges.start[range], ranges.end[range]);
            // Ranges come in order of start, so the first launch inside never moves back.
            let from = &mut cursors[number];
            while thread.launches.get(*from).is_some_and(|l| l.start < start) {
                *from += 1;
            }
            let slice = *from..thread.end_of_slice(*from, end);
            let Some((first, last, launches)) = thread.extent(slice.clone(), end) else { continue };
            let me = projected.len() as u32;
            let open = &mut open[number];
            while open.last().is_some_and(|&top| ranges.end[projected[top as usize].range as usize] < start) {
                open.pop();
            }
            // Those that are open end one before the other, the last one first: see below.
            let end_of = |other: u32| ranges.end[projected[other as usize].range as usize];
            let lasting = open.partition_point(|&other| end_of(other) >= end);
            let parent = lasting.checked_sub(1).map(|place| open[place]);
            let level = parent.map_or(0, |parent| {
                projected[parent as usize].children += 1;
                projected[parent as usize].level + 1
            });
            // One opened before that ends no later is never again the tightest around another.
            while open.last().is_some_and(|&top| ranges.end[projected[top as usize].range as usize] <= end) {
                open.pop();
            }
            open.push(me);
            projected.push(Projected {
                range: range as u32,
                start: first,
                end: last,
                launches,
                level,
                children: 0,
                slice: (slice.start as u32, slice.end as u32),
            });
        }
        projected
    }

    /// The ops of a projected range.
    pub(super) fn ops_of<'a>(&'a self, trace: &'a Trace, projected: &Projected) -> impl Iterator<Item = usize> + 'a {
        let range = projected.range as usize;
        let thread = &self.threads[trace.ranges.thread[range] as usize];
        let end = trace.ranges.end[range];
        let inside = thread.launches[projected.slice.0 as usize..projected.slice.1 as usize].iter();
        let ops = inside.filter(move |l| l.end <= end).flat_map(|l| &self.ops[l.first as usize..][..l.count as usize]);
        ops.map(|&op| op as usize)
    }
}

impl ThreadLaunches {
    /// Where the launches from `from` on stop being inside a range that ends at `end`.
    fn end_of_slice(&self, from: usize, end: i64) -> usize {
        let outside = |l: &Launch| if self.ordered { l.end > end } else { l.start > end };
        // Most ranges are short: doubling steps find their end sooner than halving the whole.
        let (mut low, mut step) = (from, 1);
        while self.launches.get(low + step - 1).is_some_and(|l| !outside(l)) {
            low += step;
            step *= 2;
        }
        let high = (low + step).min(self.launches.len());
        low + self.launches[low..high].partition_point(|l| !outside(l))
    }

    /// First op start, last op end and number of the launches in the slice that end by `end`.
    fn extent(&self, slice: Range<usize>, end: i64) -> Option<(i64, i64, u32)> {
        if self.ordered {
            let (first, last) = self.extremes.over(&self.launches, slice.clone())?;
            return Some((first, last, slice.len() as u32));
        }
        let inside = self.launches[slice].iter().filter(|l| l.end <= end);
        let start = (i64::MAX, i64::MIN, 0);
        let (first, last, count) =
            inside.fold(start, |(a, b, n), l| (a.min(l.first_op_start), b.max(l.last_op_end), n + 1));
        (count > 0).then_some((first, last, count))
    }
}

/// First start and last end over any slice of launches without looking at each: extremes of blocks, of two blocks, of
/// four, and so on.
#[derive(Default)]
struct Extremes(Vec<Vec<(i64, i64)>>);

const BLOCK: usize = 64;

fn both(a: (i64, i64), b: (i64, i64)) -> (i64, i64) {
    (a.0.min(b.0), a.1.max(b.1))
}

fn extremes_of(launches: &[Launch]) -> Option<(i64, i64)> {
    launches.iter().map(|l| (l.first_op_start, l.last_op_end)).reduce(both)
}

impl Extremes {
    fn of(launches: &[Launch]) -> Self {
        let mut levels: Vec<Vec<(i64, i64)>> = vec![launches.chunks_exact(BLOCK).filter_map(extremes_of).collect()];
        while let Some(last) = levels.last().filter(|last| last.len() > 1 << (levels.len() - 1)) {
            let step = 1 << (levels.len() - 1);
            levels.push(last.iter().zip(&last[step..]).map(|(&a, &b)| both(a, b)).collect());
        }
        Self(levels)
    }

    fn over(&self, launches: &[Launch], slice: Range<usize>) -> Option<(i64, i64)> {
        let (first_block, end_block) = (slice.start.div_ceil(BLOCK), slice.end / BLOCK);
        if first_block >= end_block {
            return extremes_of(&launches[slice]);
        }
        let level = (end_block - first_block).ilog2() as usize;
        let blocks = both(self.0[level][first_block], self.0[level][end_block - (1 << level)]);
        let edges = [slice.start..first_block * BLOCK, end_block * BLOCK..slice.end];
        Some(edges.into_iter().filter_map(|edge| extremes_of(&launches[edge])).fold(blocks, both))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn extremes_of_any_slice(
            times in prop::collection::vec((0i64..1000, 0i64..1000), 1..700),
            (a, b) in (0usize..700, 0usize..700),
        ) {
            let launch = |&(first_op_start, last_op_end): &(i64, i64)| Launch {
                start: 0, end: 0, first: 0, count: 0, first_op_start, last_op_end,
            };
            let launches: Vec<Launch> = times.iter().map(launch).collect();
            let (a, b) = (a.min(launches.len()), b.min(launches.len()));
            let slice = a.min(b)..a.max(b);
            prop_assert_eq!(Extremes::of(&launches).over(&launches, slice.clone()), extremes_of(&launches[slice]));
        }
    }
}
