//! Reads in the step loop what its threads waited for, through descriptors that stay open: nothing is allocated.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::parse;
use crate::clock::Clock;

/// What the machine did to the threads of an iteration, or of several that one reading covers. Absent is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostReading {
    /// Longest time that one thread was ready and waited for a CPU: the least wall time that was lost.
    pub cpu_wait_max_ns: Option<u64>,
    /// The same, summed over the threads.
    pub cpu_wait_sum_ns: Option<u64>,
    /// Times a thread of the process was taken off its CPU while it still had work.
    pub involuntary_switches: Option<u64>,
    /// Page faults that had to read a disk.
    pub major_faults: Option<u64>,
    /// Iterations it covers: the one it stands in, and those right before it that have no reading.
    pub covers: u32,
    /// Wall time of those iterations.
    pub wall_ns: u64,
}

/// A reading may cost this share of the time: it is taken when so many times its own length has passed since the last.
const LEAST_APART: u64 = 1000;
/// The same inside a window, where recording costs something too and each iteration is looked at alone.
const LEAST_APART_IN_WINDOW: u64 = 100;
/// Readings whose median is taken as what one costs.
const COST_READINGS: usize = 15;

/// A thread's `schedstat`.
struct Thread {
    schedstat: File,
    waited_ns: u64,
}

impl Thread {
    fn open(id: u32) -> Option<Thread> {
        let schedstat = File::open(format!("/proc/self/task/{id}/schedstat")).ok()?;
        let waited_ns = read_wait(&schedstat)?;
        Some(Thread { schedstat, waited_ns })
    }
}

fn read_wait(schedstat: &File) -> Option<u64> {
    let mut text = [0u8; 96];
    let read = schedstat.read_at(&mut text, 0).ok()?;
    parse::run_delay_ns(text.get(..read)?)
}

/// Involuntary context switches and major page faults of this process.
pub(super) fn switches_and_faults() -> Option<(u64, u64)> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one `rusage`, and a struct of zeroes is a valid one.
    let usage = unsafe { (libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) == 0).then(|| usage.assume_init())? };
    Some((u64::try_from(usage.ru_nivcsw).ok()?, u64::try_from(usage.ru_majflt).ok()?))
}

/// Takes a reading per iteration, or less often where that would cost too much.
pub struct HostSampler {
    /// Empty where the system does not tell what each of the threads waits.
    threads: Vec<Thread>,
    usage: Option<(u64, u64)>,
    clock: Clock,
    cost_ns: u64,
    last_ns: u64,
    covers: u32,
    wall_ns: u64,
}

impl HostSampler {
    /// For these threads of this process. Measures what a reading takes.
    pub fn open(threads: &[u32], clock: Clock) -> HostSampler {
        let threads: Option<Vec<Thread>> = threads.iter().map(|&id| Thread::open(id)).collect();
        let mut sampler = HostSampler {
            // One thread that can't be read could be the one that waits.
            threads: threads.unwrap_or_default(),
            usage: switches_and_faults(),
            clock,
            cost_ns: 0,
            last_ns: 0,
            covers: 0,
            wall_ns: 0,
        };
        let mut costs = sampler.costs_ns(COST_READINGS);
        costs.sort_unstable();
        sampler.cost_ns = costs.get(costs.len() / 2).copied().unwrap_or(0).max(1);
        sampler.restart();
        sampler
    }

    /// What each of so many readings took, in nanoseconds.
    pub fn costs_ns(&mut self, readings: usize) -> Vec<u64> {
        let timed = |_| {
            let before = self.clock.now();
            self.take();
            self.clock.now() - before
        };
        (0..readings).map(timed).collect()
    }

    /// Threads that are read; 0 where the system does not tell.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Begin anew: what was until now belongs to no iteration.
    pub(crate) fn restart(&mut self) {
        self.take();
        self.last_ns = self.clock.now();
        (self.covers, self.wall_ns) = (0, 0);
    }

    /// The same after the engine was idle, unless that would be a reading too many.
    pub(crate) fn restart_after_idling(&mut self) {
        if self.is_due(LEAST_APART) {
            self.restart();
        }
    }

    fn is_due(&self, apart: u64) -> bool {
        self.clock.now().saturating_sub(self.last_ns) >= self.cost_ns.saturating_mul(apart)
    }

    /// An iteration ends that took so long.
    pub(crate) fn iteration(&mut self, wall_ns: u64, in_window: bool) -> Option<HostReading> {
        self.covers = self.covers.saturating_add(1);
        self.wall_ns = self.wall_ns.saturating_add(wall_ns);
        if !self.is_due(if in_window { LEAST_APART_IN_WINDOW } else { LEAST_APART }) {
            return None;
        }
        let reading = HostReading { covers: self.covers, wall_ns: self.wall_ns, ..self.take() };
        self.last_ns = self.clock.now();
        (self.covers, self.wall_ns) = (0, 0);
        Some(reading)
    }

    /// What has come up since the last time.
    fn take(&mut self) -> HostReading {
        let (mut max, mut sum) = (0, 0u64);
        let mut known = !self.threads.is_empty();
        for thread in &mut self.threads {
            let Some(now) = read_wait(&thread.schedstat) else {
                known = false;
                break;
            };
            let waited = now.saturating_sub(std::mem::replace(&mut thread.waited_ns, now));
            max = waited.max(max);
            sum = sum.saturating_add(waited);
        }
        if !known {
            // A thread that is gone does not come back.
            self.threads.clear();
        }
        let usage = switches_and_faults();
        let since = usage.zip(std::mem::replace(&mut self.usage, usage));
        HostReading {
            cpu_wait_max_ns: known.then_some(max),
            cpu_wait_sum_ns: known.then_some(sum),
            involuntary_switches: since.map(|(now, before)| now.0.saturating_sub(before.0)),
            major_faults: since.map(|(now, before)| now.1.saturating_sub(before.1)),
            ..HostReading::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_covers_what_had_none() {
        let mut sampler = HostSampler::open(&[], Clock::start());
        sampler.cost_ns = u64::MAX / LEAST_APART;
        assert_eq!(sampler.iteration(100, false), None);
        assert_eq!(sampler.iteration(200, true), None);
        sampler.cost_ns = 0;
        let found = sampler.iteration(300, false).unwrap_or_default();
        assert_eq!((found.covers, found.wall_ns), (3, 600));
        assert_eq!((found.cpu_wait_max_ns, found.cpu_wait_sum_ns), (None, None), "no threads, so nothing is known");
        assert_eq!(sampler.iteration(7, false).map(|reading| (reading.covers, reading.wall_ns)), Some((1, 7)));
        sampler.cost_ns = u64::MAX / LEAST_APART;
        assert_eq!(sampler.iteration(1, false), None);
        sampler.restart();
        sampler.cost_ns = 0;
        assert_eq!(sampler.iteration(5, false).map(|reading| reading.covers), Some(1), "what was before is forgotten");
    }

    #[test]
    fn threads_that_are_not_there_leave_the_wait_unknown() {
        let mut sampler = HostSampler::open(&[u32::MAX], Clock::start());
        assert_eq!(sampler.threads(), 0);
        sampler.cost_ns = 0;
        assert_eq!(sampler.iteration(1, false).and_then(|reading| reading.cpu_wait_max_ns), None);
    }
}
