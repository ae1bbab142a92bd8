//! Which process an op belongs to: a file gives a kernel the number of its device.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Builder, FoundProcess};
use crate::intern::FastHash;
use crate::{CallKind, Process, Trace};

/// By group and correlation, the process that made the call; `None`: several did.
type Launchers = HashMap<(u16, i64), Option<u16>, FastHash>;

/// By group and correlation, when calls began and which process made them.
type Clashes = HashMap<(u16, i64), Vec<(i64, u16)>, FastHash>;

impl Builder {
    /// The profiler writes some host events to process 0 or -1: they are those of the one real process. Gives the new
    /// index of every process.
    pub(super) fn merge_nameless_processes(&mut self) -> Vec<u16> {
        let found = &self.processes;
        let real = |index: usize| !found[index].numbered || self.trace.processes[index].pid > 0;
        let target = |index: usize| {
            if real(index) {
                return index;
            }
            let mut others = (0..found.len()).filter(|&i| found[i].group == found[index].group && real(i));
            others.next().filter(|_| others.next().is_none()).unwrap_or(index)
        };
        let targets: Vec<usize> = (0..found.len()).map(target).collect();
        let mut new_index = vec![0u16; found.len()];
        let mut kept = 0;
        for index in 0..found.len() {
            if targets[index] == index {
                new_index[index] = kept;
                kept += 1;
            }
        }
        let renumbered: Vec<u16> = targets.iter().map(|&target| new_index[target]).collect();
        let mut index = 0..;
        self.trace.processes.retain(|_| index.next().is_some_and(|i: usize| targets[i] == i));
        let mut index = 0..;
        self.processes.retain(|_| index.next().is_some_and(|i: usize| targets[i] == i));
        renumbered
    }

    /// Gives every op the process that launched it. A kernel's own process id is that of its device.
    pub(super) fn assign_processes(&mut self, renumbered: &[u16]) {
        let new = |old: u16| renumbered.get(usize::from(old)).copied().unwrap_or(0);
        self.trace.allocations.iter_mut().for_each(|a| a.process = new(a.process));
        for (index, thread) in self.trace.threads.iter_mut().enumerate() {
            if !self.gpu_threads.contains_key(&(index as u32)) {
                thread.process = new(thread.process);
            }
        }
        let groups = self.groups.len();
        let mut callers: Vec<Vec<u16>> = vec![Vec::new(); groups];
        let mut calls_of = vec![false; self.trace.processes.len()];
        for (&thread, &kind) in self.trace.calls.thread.iter().zip(&self.trace.calls.kind) {
            if kind == CallKind::Gpu {
                calls_of[usize::from(self.trace.threads[thread as usize].process)] = true;
            }
        }
        for (process, found) in (0u16..).zip(&self.processes) {
            if calls_of[usize::from(process)] {
                callers[usize::from(found.group)].push(process);
            }
        }
        // Without calls the host process is still known when there is only one.
        for (group, callers) in callers.iter_mut().enumerate() {
            if callers.is_empty() {
                let members = (0u16..).zip(&self.processes).filter(|(_, found)| usize::from(found.group) == group);
                callers.extend(members.map(|(process, _)| process).take(1));
            }
            if callers.is_empty() {
                self.trace.processes.push(Process::default());
                self.processes.push(FoundProcess { group: group as u16, numbered: true, key: Vec::new() });
                callers.push((self.trace.processes.len() - 1) as u16);
            }
        }
        let launchers = self.launchers(&callers);
        let clashes = self.clashes(&launchers);
        // The processes that surely used each device.
        let mut owners: Vec<Vec<u16>> = vec![Vec::new(); self.trace.devices.len()];
        for (&device, &process) in &self.users {
            owners[usize::from(device)].push(new(process));
        }
        let users = &self.users;
        let launcher = |op: usize, trace: &Trace| {
            if let Some(&process) = users.get(&trace.ops.device[op]) {
                return Some(new(process));
            }
            let (group, correlation) = (trace.ops.process[op], trace.ops.correlation[op]);
            match &callers[usize::from(group)][..] {
                [only] => Some(*only),
                _ => launchers.get(&(group, correlation)).copied().flatten(),
            }
        };
        for op in 0..self.trace.ops.len() {
            let owners = &mut owners[usize::from(self.trace.ops.device[op])];
            if let Some(process) = launcher(op, &self.trace)
                && !owners.contains(&process)
            {
                owners.push(process);
            }
        }
        self.vote_for_owners(&clashes, &mut owners);
        for op in 0..self.trace.ops.len() {
            let ops = &self.trace.ops;
            let (group, start, owners) = (ops.process[op], ops.start[op], &owners[usize::from(ops.device[op])]);
            let process = launcher(op, &self.trace).or_else(|| {
                let calls = clashes.get(&(group, ops.correlation[op]))?;
                let owned = calls.iter().filter(|(_, process)| owners.contains(process));
                last_before(owned, start).or_else(|| last_before(calls, start))
            });
            let process = process.or(owners.first().copied());
            self.trace.ops.process[op] = process.unwrap_or(callers[usize::from(group)][0]);
        }
        for (&thread, &(group, device)) in &self.gpu_threads {
            let process = owners[usize::from(device)].first().copied().unwrap_or(callers[usize::from(group)][0]);
            self.trace.threads[thread as usize].process = process;
        }
        for (process, found) in self.trace.processes.iter_mut().zip(&self.processes) {
            process.rank = self.groups[usize::from(found.group)].rank;
        }
    }

    /// The process of each correlation in groups where several processes made calls; `None` where two used the same.
    fn launchers(&self, callers: &[Vec<u16>]) -> Launchers {
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
            let group = self.processes[usize::from(process)].group;
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
            let key = (self.processes[usize::from(process)].group, call.correlation);
            if launchers.get(&key) == Some(&None) {
                clashes.entry(key).or_default().push((call.start, process));
            }
        }
        clashes
    }

    /// Finds an owner for devices of which every op could be of several processes: the one whose calls most often were
    /// the last before the ops. A process gets a second device only when every process has one.
    fn vote_for_owners(&self, clashes: &Clashes, owners: &mut [Vec<u16>]) {
        let ops = &self.trace.ops;
        let mut votes: BTreeMap<(u16, u16), usize> = BTreeMap::new();
        for op in (0..ops.len()).filter(|_| !clashes.is_empty()) {
            let calls = clashes.get(&(ops.process[op], ops.correlation[op]));
            if owners[usize::from(ops.device[op])].is_empty()
                && let Some(process) = calls.and_then(|calls| last_before(calls, ops.start[op]))
            {
                *votes.entry((ops.device[op], process)).or_default() += 1;
            }
        }
        // The process that is left over for a device may have got no vote.
        let processes: BTreeSet<u16> = clashes.values().flatten().map(|&(_, process)| process).collect();
        let devices: BTreeSet<u16> = votes.keys().map(|&(device, _)| device).collect();
        for (&device, &process) in devices.iter().flat_map(|device| processes.iter().map(move |p| (device, p))) {
            if self.device_groups[usize::from(device)] == self.processes[usize::from(process)].group {
                votes.entry((device, process)).or_default();
            }
        }
        let mut ordered: Vec<_> = votes.into_iter().collect();
        ordered.sort_by_key(|&(pair, count)| (std::cmp::Reverse(count), pair));
        let mut taken: BTreeSet<u16> = owners.iter().flatten().copied().collect();
        for &((device, process), _) in &ordered {
            if owners[usize::from(device)].is_empty() && taken.insert(process) {
                owners[usize::from(device)].push(process);
            }
        }
        for ((device, process), _) in ordered {
            if owners[usize::from(device)].is_empty() {
                owners[usize::from(device)].push(process);
            }
        }
    }
}

/// The process of the call that started last, not after `start`; if all did later, of the first.
fn last_before<'c>(calls: impl IntoIterator<Item = &'c (i64, u16)>, start: i64) -> Option<u16> {
    let key = |&&(call, _): &&(i64, u16)| if call <= start { (true, call) } else { (false, call.saturating_neg()) };
    calls.into_iter().max_by_key(key).map(|&(_, process)| process)
}
