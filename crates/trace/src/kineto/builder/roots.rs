//! The end of a root: times that can't be, names that came late, and the clock that it is on.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use super::{Builder, Root, Row};
use crate::{RangeRow, range_flags};

/// No trace is as long as this: what lies further from the other events has a broken time.
const TEN_YEARS_NS: i64 = 10 * 366 * 86_400 * 1_000_000_000;

impl Builder {
    /// Ends a root: what was read since the last one belongs together.
    pub(in super::super) fn end_root(&mut self) {
        let mut root = std::mem::take(&mut self.root);
        let plausible = self.plausible_times(&root);
        self.leave_out_absurd(&mut root, &plausible);
        for row in std::mem::take(&mut root.open).into_values().flatten() {
            if !plausible.contains(&row.start()) {
                self.absurd += 1;
                continue;
            }
            let row = match row {
                Row::Range(row) => {
                    Row::Range(RangeRow { end: root.last_time, flags: row.flags | range_flags::UNCLOSED, ..row })
                }
                mut other => {
                    *other.end() = root.last_time;
                    other
                }
            };
            self.push(row);
        }
        // Merged ranks are numbered by their labels: `TP01` may occur once per `DP`.
        let groups = &mut self.groups[root.first_group as usize..];
        let mut labels: Vec<Vec<u8>> = groups.iter().map(|group| group.label.clone()).collect();
        labels.retain(|label| !label.is_empty());
        labels.sort();
        for group in groups {
            group.rank = match labels.binary_search(&group.label) {
                Ok(place) => Some(place as u32),
                Err(_) => root.rank,
            };
        }
        let of_root = self.trace.processes.iter_mut().zip(&self.processes).skip(root.first_process);
        for (process, found) in of_root {
            if let Some(name) = root.process_names.get(&found.key) {
                process.name = name.clone();
            }
        }
        for (device, process) in &root.users {
            let device = self.devices.get(&(root.first_group, *device));
            if let Some((&device, &process)) = device.zip(root.processes.get(process)) {
                self.users.insert(device, process);
            }
        }
        let recorded = |(key, _): &(&Vec<u8>, &u32)| !root.lanes.contains_key(*key);
        for (key, thread) in root.threads.iter().chain(&root.streams).filter(recorded) {
            if let Some(name) = root.thread_names.get(key) {
                self.trace.threads[*thread as usize].name = name.clone();
            }
        }
        self.roots += u32::from(!root.groups.is_empty());
        let flows = std::mem::take(&mut root.autograd).flows().into_iter();
        self.trace.flows.extend(flows.filter(|flow| plausible.contains(&flow.start) && plausible.contains(&flow.end)));
        match (self.first_base, root.base) {
            (None, base) => self.first_base = base,
            (Some(first), Some(base)) => self.shift(&root, base.saturating_sub(first)),
            _ => {}
        }
        self.root = Root {
            first_group: self.groups.len() as u32,
            first_process: self.processes.len(),
            first_pending: self.pending_allocations.len(),
            first_flow: self.trace.flows.len(),
            before: self.counts(),
            ..Root::default()
        };
    }

    /// The times within ten years of the root's events: of their median, which a few broken ones do not move.
    fn plausible_times(&self, root: &Root) -> RangeInclusive<i64> {
        const SAMPLES: usize = 1024;
        let [ops, calls, ranges, ..] = root.before;
        let trace = &self.trace;
        let starts = [&trace.ops.start[ops..], &trace.calls.start[calls..], &trace.ranges.start[ranges..]];
        let step = starts.iter().map(|starts| starts.len()).sum::<usize>() / SAMPLES + 1;
        let mut sample: Vec<i64> = starts.into_iter().flatten().copied().step_by(step).collect();
        if sample.is_empty() {
            return i64::MIN..=i64::MAX;
        }
        let middle = sample.len() / 2;
        let median = *sample.select_nth_unstable(middle).1;
        median.saturating_sub(TEN_YEARS_NS)..=median.saturating_add(TEN_YEARS_NS)
    }

    /// Removes the root's events that lie outside of `plausible`.
    fn leave_out_absurd(&mut self, root: &mut Root, plausible: &RangeInclusive<i64>) {
        let [ops, calls, ranges, allocations, counters] = root.before;
        let kept = |before: usize, starts: &[i64], ends: &[i64]| {
            let fits =
                |row: usize| row < before || (plausible.contains(&starts[row]) && plausible.contains(&ends[row]));
            let all_fit = (before..starts.len()).all(fits);
            (!all_fit).then(|| (0..starts.len() as u32).filter(|&row| fits(row as usize)).collect::<Vec<u32>>())
        };
        let trace = &mut self.trace;
        if let Some(kept) = kept(ops, &trace.ops.start, &trace.ops.end) {
            self.absurd += (trace.ops.len() - kept.len()) as u64;
            trace.ops.reorder(&kept);
        }
        if let Some(kept) = kept(calls, &trace.calls.start, &trace.calls.end) {
            self.absurd += (trace.calls.len() - kept.len()) as u64;
            trace.calls.reorder(&kept);
        }
        if let Some(kept) = kept(ranges, &trace.ranges.start, &trace.ranges.end) {
            self.absurd += (trace.ranges.len() - kept.len()) as u64;
            trace.ranges.reorder(&kept);
        }
        let of_root = trace.allocations.split_off(allocations);
        let on_devices = self.pending_allocations.split_off(root.first_pending);
        self.absurd += (of_root.len() + on_devices.len()) as u64;
        trace.allocations.extend(of_root.into_iter().filter(|allocation| plausible.contains(&allocation.time)));
        self.pending_allocations.extend(on_devices.into_iter().filter(|(a, ..)| plausible.contains(&a.time)));
        let kept = trace.allocations.len() - allocations + self.pending_allocations.len() - root.first_pending;
        self.absurd -= kept as u64;
        for counter in &mut trace.counters[counters..] {
            if !counter.times.iter().all(|time| plausible.contains(time)) {
                let before = counter.times.len();
                let samples = counter.times.drain(..).zip(counter.values.drain(..));
                (counter.times, counter.values) = samples.filter(|(time, _)| plausible.contains(time)).collect();
                self.absurd += (before - counter.times.len()) as u64;
            }
        }
        if !plausible.contains(&root.last_time) {
            let ends = [&trace.ops.end[ops..], &trace.calls.end[calls..], &trace.ranges.end[ranges..]];
            root.last_time = ends.into_iter().flatten().copied().max().unwrap_or(root.last_time);
        }
    }

    /// Roots one behind the other are ranks: as they say if all of them do, each another one, else by their order.
    pub(super) fn number_ranks(&mut self) {
        let known: BTreeSet<u32> = self.groups.iter().filter_map(|group| group.rank).collect();
        if self.roots > 1 && known.len() < self.groups.len() {
            (0..).zip(&mut self.groups).for_each(|(place, group)| group.rank = Some(place));
        }
    }

    fn counts(&self) -> [usize; 5] {
        let trace = &self.trace;
        let allocations = trace.allocations.len();
        [trace.ops.len(), trace.calls.len(), trace.ranges.len(), allocations, trace.counters.len()]
    }

    /// Moves what belongs to `root` to the clock of the first one.
    fn shift(&mut self, root: &Root, by: i64) {
        if by == 0 {
            return;
        }
        let [ops, calls, ranges, allocations, counters] = root.before;
        let trace = &mut self.trace;
        let columns = [
            &mut trace.ops.start[ops..],
            &mut trace.ops.end[ops..],
            &mut trace.calls.start[calls..],
            &mut trace.calls.end[calls..],
            &mut trace.ranges.start[ranges..],
            &mut trace.ranges.end[ranges..],
        ];
        columns.into_iter().flatten().for_each(|time| *time = time.saturating_add(by));
        trace.allocations[allocations..].iter_mut().for_each(|a| a.time = a.time.saturating_add(by));
        let times = trace.counters[counters..].iter_mut().flat_map(|counter| &mut counter.times);
        times.for_each(|time| *time = time.saturating_add(by));
        for flow in &mut trace.flows[root.first_flow..] {
            (flow.start, flow.end) = (flow.start.saturating_add(by), flow.end.saturating_add(by));
        }
        let pending = &mut self.pending_allocations[root.first_pending..];
        pending.iter_mut().for_each(|(a, _, _)| a.time = a.time.saturating_add(by));
    }
}
