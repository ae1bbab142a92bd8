//! What happens to threads and memory behind a program's back, where it was recorded: which thread had a CPU and what it
//! was in, pages of unified memory that were not where they were needed, and which thread works on behalf of which.

use serde::Serialize;

use crate::StrId;

/// A time in which a thread had a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnCpu {
    /// When it got the CPU.
    pub start: i64,
    /// When it lost it.
    pub end: i64,
    /// Index into [`crate::Trace::threads`].
    pub thread: u32,
    /// The CPU's number.
    pub cpu: u32,
    /// Why it lost it.
    pub left: Left,
}

/// Why a thread lost its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Left {
    /// Not recorded.
    #[default]
    Unknown,
    /// It could have gone on: another thread was given the CPU.
    Ready,
    /// It waits for something: a lock, a device, a timer.
    Waiting,
    /// It ended.
    Ended,
}

/// What a thread was in at one moment in which it had a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuSample {
    /// When.
    pub time: i64,
    /// Index into [`crate::Trace::threads`].
    pub thread: u32,
    /// The innermost function whose name is known, or `StrId::NONE`.
    pub function: StrId,
    /// The library or program that the innermost function is in, without its directory, or `StrId::NONE`.
    pub module: StrId,
}

/// An access to unified memory that was not where it was needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// When it began.
    pub start: i64,
    /// When it was served; `start` where that was not recorded.
    pub end: i64,
    /// Index into [`crate::Trace::processes`].
    pub process: u32,
    /// Index into [`crate::Trace::devices`] of the device that needed it; `None` for a CPU.
    pub device: Option<u32>,
    /// The address.
    pub address: u64,
    /// Faults on the same page that are counted as one.
    pub count: u32,
    /// CUPTI's kind of access: 1 read, 2 write, 3 atomic, 4 prefetch; 0 not recorded.
    pub access: u8,
    /// The function on a CPU that needed it, or `StrId::NONE`.
    pub function: StrId,
}

/// One thread works for another: autograd's backward of what the other has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    /// When the other computed it.
    pub start: i64,
    /// When the work for it began.
    pub end: i64,
    /// Index into [`crate::Trace::threads`] of the thread that is worked for.
    pub from: u32,
    /// Index into [`crate::Trace::threads`] of the thread that works.
    pub to: u32,
}

/// A thread got or lost a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Switch {
    pub(crate) time: i64,
    pub(crate) thread: u32,
    pub(crate) cpu: u32,
    /// Why it lost it; `None`: it got it.
    pub(crate) left: Option<Left>,
}

/// The times in which threads had a CPU, by thread and time, and the number of switches without a partner.
///
/// Only a time between two known ones is a time without a CPU. So what a thread did before its first switch and after its
/// last is open, and where a switch is missing the thread is taken to have gone on.
pub(crate) fn on_cpu(mut switches: Vec<Switch>) -> (Vec<OnCpu>, u64) {
    switches.sort_by_key(|switch| (switch.thread, switch.time)); // stable: the file's order at one moment
    let (first, last) = switches
        .iter()
        .fold((i64::MAX, i64::MIN), |(first, last), switch| (first.min(switch.time), last.max(switch.time)));
    let mut found: Vec<OnCpu> = Vec::with_capacity(switches.len() / 2 + 1);
    let mut unpaired = 0;
    for of_thread in switches.chunk_by(|a, b| a.thread == b.thread) {
        let mut since: Option<Switch> = None;
        let mut seen = false;
        for &switch in of_thread {
            let Switch { time, thread, cpu, left } = switch;
            match (left, since) {
                (None, None) => since = Some(switch),
                // It got a CPU twice: how it lost the first is missing.
                (None, Some(begun)) => {
                    unpaired += 1;
                    found.push(OnCpu { start: begun.time, end: time, thread, cpu: begun.cpu, left: Left::Unknown });
                    since = Some(switch);
                }
                (Some(left), Some(begun)) => {
                    found.push(OnCpu { start: begun.time, end: time, thread, cpu: begun.cpu, left });
                    since = None;
                }
                // It had it when the recording began.
                (Some(left), None) if !seen => found.push(OnCpu { start: first, end: time, thread, cpu, left }),
                // It lost it twice: how it got it is missing.
                (Some(left), None) => {
                    unpaired += 1;
                    if let Some(before) = found.last_mut() {
                        (before.end, before.left) = (time, left);
                    }
                }
            }
            seen = true;
        }
        if let Some(Switch { time, thread, cpu, .. }) = since {
            found.push(OnCpu { start: time, end: last, thread, cpu, left: Left::Unknown });
        }
    }
    (found, unpaired)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(time: i64, thread: u32, left: Option<Left>) -> Switch {
        Switch { time, thread, cpu: 3, left }
    }

    fn spans(switches: &[Switch]) -> (Vec<(u32, i64, i64, Left)>, u64) {
        let (found, unpaired) = on_cpu(switches.to_vec());
        (found.iter().map(|on| (on.thread, on.start, on.end, on.left)).collect(), unpaired)
    }

    #[test]
    fn switches_become_times_on_a_cpu() {
        let ready = Some(Left::Ready);
        let switches = [
            switch(50, 1, None),
            switch(10, 0, None),
            switch(20, 0, ready),
            switch(30, 0, None),
            switch(40, 1, Some(Left::Waiting)),
        ];
        let expected = vec![
            (0, 10, 20, Left::Ready),
            (0, 30, 50, Left::Unknown),
            (1, 10, 40, Left::Waiting), // it had it from the beginning
            (1, 50, 50, Left::Unknown),
        ];
        assert_eq!(spans(&switches), (expected, 0));
        assert_eq!(spans(&[]), (Vec::new(), 0));
    }

    #[test]
    fn a_missing_switch_makes_no_time_without_a_cpu() {
        let (got, lost) = (None, Some(Left::Waiting));
        let twice_got = [switch(0, 0, got), switch(10, 0, got), switch(20, 0, lost)];
        assert_eq!(spans(&twice_got), (vec![(0, 0, 10, Left::Unknown), (0, 10, 20, Left::Waiting)], 1));
        let twice_lost = [switch(0, 0, got), switch(10, 0, lost), switch(20, 0, lost)];
        assert_eq!(spans(&twice_lost), (vec![(0, 0, 20, Left::Waiting)], 1));
    }
}
