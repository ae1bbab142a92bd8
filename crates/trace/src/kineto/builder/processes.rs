//! Which process an op belongs to: a file gives a kernel the number of its device.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::{Builder, FoundProcess};
use crate::intern::FastHash;
use crate::{CallKind, Process, Trace};

/// By group and correlation, the process that made the call; `None`: several did.
type Launchers = HashMap<(u32, i64), Option<u32>, FastHash>;

/// By group and correlation, the calls of several processes.
type Clashes = HashMap<(u32, i64), Calls, FastHash>;

/// The processes that use each device, in the order in which that was found.
struct Owners {
    of_device: Vec<Vec<u32>>,
    known: HashSet<(u32, u32), FastHash>,
}

impl Owners {
    fn of(devices: usize) -> Self {
        Self { of_device: vec![Vec::new(); devices], known: HashSet::default() }
    }

    fn add(&mut self, device: u32, process: u32) {
        if self.known.insert((device, process)) {
            self.of_device[device as usize].push(process);
        }
    }

    fn has_none(&self, device: u32) -> bool {
        self.of_device[device as usize].is_empty()
    }

    fn first(&self, device: u32) -> Option<u32> {
        self.of_device[device as usize].first().copied()
    }
}

/// Calls of one correlation: when they began, and the process.
#[derive(Default)]
struct Calls {
    by_start: Vec<(i64, u32)>,
    by_process: Vec<(u32, i64)>,
}

/// The place of the last of `count` starts in order that is not after `start`; if all are, of the first.
fn nearest(count: usize, start_of: impl Fn(usize) -> i64, start: i64) -> Option<usize> {
    let place = |bound: i64| {
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            if start_of(middle) <= bound { low = middle + 1 } else { high = middle }
        }
        low
    };
    match place(start) {
        0 if count == 0 => None,
        0 => Some(place(start_of(0)) - 1),
        after => Some(after - 1),
    }
}

impl Calls {
    fn sort(&mut self) {
        self.by_start.sort_by_key(|&(start, _)| start);
        self.by_process = self.by_start.iter().map(|&(start, process)| (process, start)).collect();
        self.by_process.sort();
    }

    /// The process of the call that started last, not after `start`; if all did later, of the first.
    fn last_before(&self, start: i64) -> Option<u32> {
        let place = nearest(self.by_start.len(), |place| self.by_start[place].0, start)?;
        Some(self.by_start[place].1)
    }

    /// The same among the calls of the processes that use a device.
    fn of_owners(&self, device: u32, owners: &Owners, start: i64) -> Option<u32> {
        const FEW: usize = 8;
        let of_device = &owners.of_device[device as usize];
        if of_device.len() <= FEW {
            let each = of_device.iter().filter_map(|&process| {
                let first = self.by_process.partition_point(|&(other, _)| other < process);
                let until = self.by_process.partition_point(|&(other, _)| other <= process);
                let own = &self.by_process[first..until];
                Some((own[nearest(own.len(), |place| own[place].1, start)?].1, process))
            });
            let key = |&(call, _): &(i64, u32)| match call <= start {
                true => (true, call),
                false => (false, call.saturating_neg()),
            };
            return each.max_by_key(key).map(|(_, process)| process);
        }
        // Where many processes share a device, a call of one of them is near.
        let owned = |&&(_, process): &&(i64, u32)| owners.known.contains(&(device, process));
        let after = self.by_start.partition_point(|&(call, _)| call <= start);
        let (before, behind) = self.by_start.split_at(after);
        let found = before.iter().rev().find(owned).or_else(|| behind.iter().find(owned));
        found.map(|&(_, process)| process)
    }
}

impl Builder {
    /// The profiler writes some host events to process 0 or -1: they are those of the one real process. Gives the new
    /// index of every process.
    pub(super) fn merge_nameless_processes(&mut self) -> Vec<u32> {
        let found = &self.processes;
        let real = |index: usize| !found[index].numbered || self.trace.processes[index].pid > 0;
        // Per group its one real process; `None`: it has several.
        let mut only_real: HashMap<u32, Option<usize>, FastHash> = HashMap::default();
        for index in (0..found.len()).filter(|&index| real(index)) {
            only_real.entry(found[index].group).and_modify(|only| *only = None).or_insert(Some(index));
        }
        let target = |index: usize| match real(index) {
            true => index,
            false => only_real.get(&found[index].group).copied().flatten().unwrap_or(index),
        };
        let targets: Vec<usize> = (0..found.len()).map(target).collect();
        let mut new_index = vec![0u32; found.len()];
        let mut kept = 0;
        for index in 0..found.len() {
            if targets[index] == index {
                new_index[index] = kept;
                kept += 1;
            }
        }
        let renumbered: Vec<u32> = targets.iter().map(|&target| new_index[target]).collect();
        let mut index = 0..;
        self.trace.processes.retain(|_| index.next().is_some_and(|i: usize| targets[i] == i));
        let mut index = 0..;
        self.processes.retain(|_| index.next().is_some_and(|i: usize| targets[i] == i));
        renumbered
    }

    /// Gives every op the process that launched it. A kernel's own process id is that of its device.
    pub(super) fn assign_processes(&mut self, renumbered: &[u32]) {
        let new = |old: u32| renumbered.get(old as usize).copied().unwrap_or(0);
        self.trace.allocations.iter_mut().for_each(|a| a.process = new(a.process));
        for (index, thread) in self.trace.threads.iter_mut().enumerate() {
            if !self.gpu_threads.contains_key(&(index as u32)) {
                thread.process = new(thread.process);
            }
        }
        let groups = self.groups.len();
        let mut callers: Vec<Vec<u32>> = vec![Vec::new(); groups];
        let mut calls_of = vec![false; self.trace.processes.len()];
        for (&thread, &kind) in self.trace.calls.thread.iter().zip(&self.trace.calls.kind) {
            if kind == CallKind::Gpu {
                calls_of[self.trace.threads[thread as usize].process as usize] = true;
            }
        }
        for (process, found) in (0u32..).zip(&self.processes) {
            if calls_of[process as usize] {
                callers[found.group as usize].push(process);
            }
        }
        let mut first_member: Vec<Option<u32>> = vec![None; groups];
        for (process, found) in (0u32..).zip(&self.processes) {
            first_member[found.group as usize].get_or_insert(process);
        }
        // Without calls the host process is still known when there is only one.
        for (group, callers) in callers.iter_mut().enumerate() {
            if callers.is_empty() {
                callers.extend(first_member[group]);
            }
            if callers.is_empty() {
                self.trace.processes.push(Process::default());
                self.processes.push(FoundProcess { group: group as u32, numbered: true, key: Vec::new() });
                callers.push((self.trace.processes.len() - 1) as u32);
            }
        }
        let launchers = self.launchers(&callers);
        let clashes = self.clashes(&launchers);
        // The processes that surely used each device.
        let mut owners = Owners::of(self.trace.devices.len());
        for (&device, &process) in &self.users {
            owners.add(device, new(process));
        }
        let users = &self.users;
        let launcher = |op: usize, trace: &Trace| {
            if let Some(&process) = users.get(&trace.ops.device[op]) {
                return Some(new(process));
            }
            let (group, correlation) = (trace.ops.process[op], trace.ops.correlation[op]);
            match &callers[group as usize][..] {
                [only] => Some(*only),
                _ => launchers.get(&(group, correlation)).copied().flatten(),
            }
        };
        for op in 0..self.trace.ops.len() {
            if let Some(process) = launcher(op, &self.trace) {
                owners.add(self.trace.ops.device[op], process);
            }
        }
        self.vote_for_owners(&clashes, &mut owners);
        for op in 0..self.trace.ops.len() {
            let ops = &self.trace.ops;
            let (group, start, device) = (ops.process[op], ops.start[op], ops.device[op]);
            let process = launcher(op, &self.trace).or_else(|| {
                let calls = clashes.get(&(group, ops.correlation[op]))?;
                let owned = calls.of_owners(device, &owners, start);
                owned.or_else(|| calls.last_before(start))
            });
            let process = process.or(owners.first(device));
            self.trace.ops.process[op] = process.unwrap_or(callers[group as usize][0]);
        }
        for (&thread, &(group, device)) in &self.gpu_threads {
            let process = owners.first(device).unwrap_or(callers[group as usize][0]);
            self.trace.threads[thread as usize].process = process;
        }
        for (process, found) in self.trace.processes.iter_mut().zip(&self.processes) {
            process.rank = self.groups[found.group as usize].rank;
        }
    }

    /// The process of each correlation in groups where several processes made calls; `None` where two used the same.
    fn launchers(&self, callers: &[Vec<u32>]) -> Launchers {
        let mut launchers = Launchers::default();
        if callers.iter().all(|of_group| of_group.len() == 1) {
            return launchers;
        }
        let calls = &self.trace.calls;
        for ((&thread, &correlation), &kind) in calls.thread.iter().zip(&calls.correlation).zip(&calls.kind) {
            if kind != CallKind::Gpu || correlation == 0 {
                continue;
            }
            let process = self.trace.threads[thread as usize].process;
            let group = self.processes[process as usize].group;
            let known = launchers.entry((group, correlation)).or_insert(Some(process));
            *known = known.filter(|&known| known == process);
        }
        launchers
    }

    /// The calls of every correlation that several processes of a group used: when, and by which process.
    fn clashes(&self, launchers: &Launchers) -> Clashes {
        let mut clashes = Clashes::default();
        if launchers.values().all(Option::is_some) {
            return clashes;
        }
        for call in self.trace.calls.iter().filter(|call| call.kind == CallKind::Gpu) {
            let process = self.trace.threads[call.thread as usize].process;
            let key = (self.processes[process as usize].group, call.correlation);
            if launchers.get(&key) == Some(&None) {
                clashes.entry(key).or_default().by_start.push((call.start, process));
            }
        }
        clashes.values_mut().for_each(Calls::sort);
        clashes
    }

    /// Finds an owner for devices of which every op could be of several processes: the one whose calls most often were
    /// the last before the ops. A process gets a second device only when every process has one.
    fn vote_for_owners(&self, clashes: &Clashes, owners: &mut Owners) {
        let ops = &self.trace.ops;
        let mut votes: BTreeMap<(u32, u32), usize> = BTreeMap::new();
        for op in (0..ops.len()).filter(|_| !clashes.is_empty()) {
            let calls = clashes.get(&(ops.process[op], ops.correlation[op]));
            if owners.has_none(ops.device[op])
                && let Some(process) = calls.and_then(|calls| calls.last_before(ops.start[op]))
            {
                *votes.entry((ops.device[op], process)).or_default() += 1;
            }
        }
        let devices: BTreeSet<u32> = votes.keys().map(|&(device, _)| device).collect();
        let mut ordered: Vec<_> = votes.into_iter().collect();
        ordered.sort_by_key(|&(pair, count)| (std::cmp::Reverse(count), pair));
        let mut taken: HashSet<u32, FastHash> = owners.of_device.iter().flatten().copied().collect();
        for &((device, process), _) in &ordered {
            if owners.has_none(device) && taken.insert(process) {
                owners.add(device, process);
            }
        }
        // The process that is left over for a device may have got no vote.
        let processes = clashes.values().flat_map(|calls| calls.by_process.iter().map(|&(process, _)| process));
        let left_over = processes.filter(|process| !taken.contains(process));
        let mut left_over: BTreeSet<(u32, u32)> =
            left_over.map(|process| (self.processes[process as usize].group, process)).collect();
        for &device in &devices {
            let group = self.device_groups[device as usize];
            if owners.has_none(device)
                && let Some(&pair) = left_over.range((group, 0)..=(group, u32::MAX)).next()
            {
                left_over.remove(&pair);
                owners.add(device, pair.1);
            }
        }
        for ((device, process), _) in ordered {
            if owners.has_none(device) {
                owners.add(device, process);
            }
        }
    }
}
