//! Whose an event is: groups, devices, processes, threads.

use super::super::event::Event;
use super::super::number::integer;
use super::words::{small, split_label, text, trailing_number};
use super::{Builder, FoundProcess, Group};
use crate::{Device, Process, Thread};

impl Builder {
    /// The group of a process, and what its id is within the group. Merged files of several ranks write the rank into
    /// the process id: `[TP00-DP01] 251`.
    pub(super) fn group<'e>(&mut self, pid: &'e [u8]) -> (u32, &'e [u8]) {
        let (label, pid) = split_label(pid);
        if label.is_empty()
            && let Some(&group) = self.root.groups.get(label)
        {
            return (group, pid);
        }
        let group = *self.root.groups.entry(label.to_vec()).or_insert_with(|| {
            self.groups.push(Group { label: label.to_vec(), rank: None });
            (self.groups.len() - 1) as u32
        });
        (group, pid)
    }

    pub(super) fn device(&mut self, group: u32, ordinal: u32) -> u32 {
        *self.devices.entry((group, ordinal)).or_insert_with(|| {
            self.trace.devices.push(Device { ordinal, ..Device::default() });
            self.device_groups.push(group);
            (self.trace.devices.len() - 1) as u32
        })
    }

    fn process(&mut self, pid: &[u8]) -> u32 {
        if let Some(&process) = self.root.processes.get(pid) {
            return process;
        }
        let (group, number) = self.group(pid);
        let index = self.trace.processes.len();
        let parsed = integer(number);
        let name = if parsed.is_none() { text(number) } else { String::new() };
        // A process that the file only names gets a number that no real one has.
        let pid_number = parsed.unwrap_or(-2 - index as i64);
        self.trace.processes.push(Process { pid: pid_number, name, ..Process::default() });
        self.processes.push(FoundProcess { group, numbered: parsed.is_some(), key: pid.to_vec() });
        self.root.processes.insert(pid.to_vec(), index as u32);
        index as u32
    }

    #[inline]
    pub(super) fn thread(&mut self, pid: &[u8], tid: &[u8]) -> u32 {
        let (last_pid, last_tid, last) = &self.root.last_thread;
        if last_tid == tid && last_pid == pid && !self.root.threads.is_empty() {
            return *last;
        }
        let key = [pid, b"\0", tid].concat();
        let thread = match self.root.threads.get(&key) {
            Some(&thread) => thread,
            None => {
                let process = self.process(pid);
                let thread = match self.root.lanes.get(&key).cloned() {
                    Some(recorded) if recorded != tid => self.thread(pid, &recorded),
                    _ => self.new_thread(process, tid),
                };
                self.root.threads.insert(key, thread);
                thread
            }
        };
        self.root.last_thread = (pid.to_vec(), tid.to_vec(), thread);
        thread
    }

    fn new_thread(&mut self, process: u32, tid: &[u8]) -> u32 {
        let number = integer(tid);
        let name = if number.is_none() { text(tid) } else { String::new() };
        let tid = number.or(trailing_number(tid).map(i64::from)).unwrap_or(0);
        self.trace.threads.push(Thread { process, tid, name });
        (self.trace.threads.len() - 1) as u32
    }

    /// The stand-in for a stream on which an annotation was projected.
    pub(super) fn stream_thread(&mut self, event: &Event) -> u32 {
        let mut key = [event.pid, b"\0", event.tid].concat();
        let stream = self.root.lanes.get(&key).cloned().unwrap_or_else(|| event.tid.to_vec());
        key = [event.pid, b"\0", &stream].concat();
        if let Some(&thread) = self.root.streams.get(&key) {
            return thread;
        }
        let (group, pid) = self.group(event.pid);
        let ordinal = small(event.known.device).or_else(|| small(pid)).unwrap_or(0);
        let device = self.device(group, ordinal);
        let thread = self.new_thread(0, &stream);
        self.gpu_threads.insert(thread, (group, device));
        self.root.streams.insert(key, thread);
        thread
    }

    /// Takes over what strobe writes about its own tracks.
    pub(super) fn strobes_tracks(&mut self, value: &[u8]) {
        #[derive(serde::Deserialize)]
        struct Tracks {
            #[serde(default)]
            lanes: Vec<(i64, i64, i64)>,
            #[serde(default)]
            users: Vec<(u32, i64)>,
        }
        let Ok(tracks) = serde_json::from_slice::<Tracks>(value) else { return };
        for (pid, tid, recorded) in tracks.lanes {
            self.root.lanes.insert(format!("{pid}\0{tid}").into_bytes(), recorded.to_string().into_bytes());
        }
        self.root.users.extend(tracks.users.into_iter().map(|(device, pid)| (device, pid.to_string().into_bytes())));
    }
}
