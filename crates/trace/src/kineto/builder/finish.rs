//! What is left to do when all events are read.

use std::collections::HashMap;
use std::path::Path;

use super::Builder;
use super::words::{grouped, small, split_label};
use crate::model::repeated_calls;
use crate::{GraphMode, OpKind, RangeSource, Source, Trace};

impl Builder {
    /// The finished trace.
    pub(in super::super) fn finish(mut self, path: &Path, bytes: u64, lost: u64) -> Trace {
        self.number_ranks();
        self.place_allocations();
        self.describe_devices();
        let of_old = self.merge_nameless_processes();
        self.assign_processes(&of_old);
        for (counter, (group, pid)) in self.trace.counters.iter_mut().zip(&self.counter_owners) {
            counter.device =
                small(split_label(pid).1).and_then(|ordinal| self.devices.get(&(*group, ordinal)).copied());
            if counter.times.windows(2).any(|pair| pair[0] > pair[1]) {
                let mut samples: Vec<_> = counter.times.drain(..).zip(counter.values.drain(..)).collect();
                samples.sort_by_key(|&(time, _)| time);
                (counter.times, counter.values) = samples.into_iter().unzip();
            }
        }
        let mut trace = self.trace;
        trace.details = self.details.into_values();
        // Without a base the times of the PyTorch profiler are those of the system clock: nothing else is as large.
        let since_1970 = trace.extent().is_some_and(|(earliest, _)| earliest > 1_000_000_000_000_000_000);
        trace.meta.session_start_utc_ns = self.first_base.or(since_1970.then_some(0));
        let is_pytorch = !trace.ops.is_empty()
            || !trace.calls.is_empty()
            || trace.ranges.source.iter().any(|&source| source != RangeSource::Other);
        let format = if is_pytorch { "PyTorch profiler (Kineto) JSON" } else { "Chrome trace JSON" };
        trace.meta.producer = if is_pytorch { "PyTorch profiler".into() } else { String::new() };
        let rank = match &self.groups[..] {
            [only] => only.rank,
            _ => None,
        };
        let source = Source { path: path.to_path_buf(), format: format.into(), bytes, events: self.events, lost, rank };
        trace.meta.sources = vec![source];
        if self.unread > 0 {
            let notice = format!("{} asynchronous or unpaired events were not read", grouped(self.unread));
            trace.meta.notices.push(notice);
        }
        if self.roots > 1 {
            let notice = format!("the file holds {} traces one behind the other, read as ranks of one run", self.roots);
            trace.meta.notices.push(notice);
        }
        let repeated = trace.finish_counting();
        trace.meta.notices.extend(repeated_calls(repeated));
        if trace.ops.is_empty() {
            trace.meta.notices.push("the trace holds no GPU events, only what the host did".into());
        }
        let unlaunched = trace.ops_without_launch();
        if unlaunched > 0 {
            let (unlaunched, all) = (grouped(unlaunched as u64), grouped(trace.ops.len() as u64));
            trace.meta.notices.push(format!("{unlaunched} of {all} GPU ops have no launch call in the file"));
        }
        let replayed = |&launch: &u32| {
            let call = trace.calls.name.get(launch as usize);
            call.is_some_and(|&name| trace.text(name).contains("GraphLaunch"))
        };
        if trace.ops.kind.contains(&OpKind::Graph) {
            trace.meta.graph_mode = Some(GraphMode::Graph);
        } else if trace.ops.launch.iter().any(replayed) {
            trace.meta.graph_mode = Some(GraphMode::Node);
        }
        trace.ops.shrink_to_fit();
        trace.calls.shrink_to_fit();
        trace.ranges.shrink_to_fit();
        trace
    }

    /// PyTorch counts devices its own way in memory events: by the number of visible ones, where kernels on AMD carry
    /// that of the agent.
    fn place_allocations(&mut self) {
        // Per group its one device; `None`: it has several.
        let mut only: HashMap<u32, Option<u32>> = HashMap::new();
        for (device, &group) in (0u32..).zip(&self.device_groups) {
            only.entry(group).and_modify(|only| *only = None).or_insert(Some(device));
        }
        for (mut allocation, group, ordinal) in std::mem::take(&mut self.pending_allocations) {
            let known = self.devices.get(&(group, ordinal)).copied();
            let known = known.or_else(|| only.get(&group).copied().flatten());
            let device = known.unwrap_or_else(|| {
                let device = self.device(group, ordinal);
                only.entry(group).and_modify(|only| *only = None).or_insert(Some(device));
                device
            });
            allocation.device = Some(device);
            self.trace.allocations.push(allocation);
        }
    }

    fn describe_devices(&mut self) {
        let number = |value: &serde_json::Value, key: &str| value.get(key).and_then(serde_json::Value::as_u64);
        // Those of a root stand together, roots in ascending order of their first groups.
        let properties = &self.properties;
        let mut by_id: HashMap<(u32, u64), usize> = HashMap::new();
        for (place, (first, device)) in properties.iter().enumerate() {
            if let Some(id) = number(device, "id") {
                by_id.entry((*first, id)).or_insert(place);
            }
        }
        for (index, device) in self.trace.devices.iter_mut().enumerate() {
            // Properties belong to all groups of their root, which is where they were found or a later one.
            let Some(&group) = self.device_groups.get(index) else { continue };
            let until = properties.partition_point(|(first, _)| *first <= group);
            let nearest = until.checked_sub(1).and_then(|last| properties.get(last)).map_or(0, |(first, _)| *first);
            let from = properties.partition_point(|(first, _)| *first < nearest);
            let of_root = &properties[from..until];
            let exact = by_id.get(&(nearest, u64::from(device.ordinal))).and_then(|&place| properties.get(place));
            let all_alike = |key: &str| of_root.windows(2).all(|pair| pair[0].1.get(key) == pair[1].1.get(key));
            let any =
                || of_root.first().filter(|_| all_alike("name") && all_alike("numSms") && all_alike("totalGlobalMem"));
            let Some((_, properties)) = exact.or_else(any) else { continue };
            device.name = properties.get("name").and_then(serde_json::Value::as_str).unwrap_or("").to_string();
            device.memory_bytes = number(properties, "totalGlobalMem");
            let real = |key: &str| properties.get(key).and_then(serde_json::Value::as_f64);
            (device.bytes_per_s, device.clock_hz) = (real("memoryBandwidth"), real("clockRate"));
            device.multiprocessors = number(properties, "numSms").and_then(|n| u32::try_from(n).ok());
            let (major, minor) = (number(properties, "computeMajor"), number(properties, "computeMinor"));
            device.compute_capability = major.zip(minor).map(|(major, minor)| (major as u32, minor as u32));
        }
    }
}
