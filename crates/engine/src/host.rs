//! The machine's part in a measurement: what threads waited for while the engine wanted to compute.

mod parse;
mod sampler;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use strobe_kernels_cpu::Cpu;

use crate::clock::Clock;
use crate::iteration::IterationRecord;
use crate::recorder::current_thread;
pub use parse::{CpuTicks, Throttling, cpu_groups, cpu_ticks, run_delay_ns, throttling};
pub use sampler::{HostReading, HostSampler};

/// An iteration is disturbed when one of its threads waited for a CPU for more than this share of it. Waits come in two
/// kinds: of 80 decode steps of TinyLlama (61 ms, one thread, a neighbor on the other core from time to time), 16 waited below
/// 0.1 %, one 0.1 to 0.5 %, none 0.5 to 5 %, and 63 above. Any limit between tells them apart.
pub const DISTURBED_SHARE: f64 = 0.02;
/// And for longer than this, in nanoseconds: a thread that is woken up waits some microseconds on any machine.
pub const DISTURBED_LEAST_NS: u64 = 50_000;

/// A run is disturbed when its threads waited for a CPU for more than this share of it, in the mean. Below it a figure is off
/// by less than runs differ on a quiet machine.
pub const DISTURBED_RUN_WAIT: f64 = 0.03;
/// Or when the hypervisor took more than this share of the machine's CPU time. It is told for the whole machine and in
/// ticks of 10 ms, so less of it may not concern the run at all.
pub const DISTURBED_RUN_STEAL: f64 = 0.05;
/// Or when its control group was throttled for more than this share of it: a thread that is stopped stops all others.
pub const DISTURBED_RUN_THROTTLED: f64 = 0.01;

impl HostReading {
    /// Whether a thread waited for a CPU so long that the figure of the iteration is not the engine's alone; `None` where
    /// that is not known.
    pub fn disturbed(&self) -> Option<bool> {
        let waited = self.cpu_wait_max_ns?;
        Some(waited > DISTURBED_LEAST_NS && waited as f64 > DISTURBED_SHARE * self.wall_ns as f64)
    }
}

/// Whether each iteration was disturbed, as far as it is known. A reading speaks of all iterations it covers.
pub fn disturbed(iterations: &[IterationRecord]) -> Vec<Option<bool>> {
    let mut known = vec![None; iterations.len()];
    for (index, reading) in iterations.iter().enumerate().filter_map(|(index, record)| Some((index, record.host?))) {
        let first = (index + 1).saturating_sub(reading.covers.max(1) as usize);
        known[first..=index].fill(reading.disturbed());
    }
    known
}

/// What a reading of this thread and the workers of `cpu` costs, in nanoseconds, so many times one after the other: what
/// an iteration pays, since no more than one is taken per iteration. And the threads that were read, 0 where waits are not
/// told.
pub fn reading_costs_ns(cpu: &Cpu, readings: usize) -> (usize, Vec<u64>) {
    let own = Some(current_thread()).filter(|&id| id != 0);
    let threads: Vec<u32> = own.into_iter().chain(cpu.helper_ids().iter().copied()).collect();
    let mut sampler = HostSampler::open(&threads, Clock::start());
    let costs = sampler.costs_ns(readings);
    (sampler.threads(), costs)
}

/// Counters of the machine, the process and its threads at one moment.
#[derive(Debug)]
pub struct HostCounters {
    at: Instant,
    /// Waits of each thread that computes; `None` where they are not told.
    waits_ns: Option<Vec<u64>>,
    ticks: Option<CpuTicks>,
    throttling: Option<Throttling>,
    usage: Option<(u64, u64)>,
}

impl HostCounters {
    /// Read them now. `threads` are those that compute.
    pub fn read(threads: &[u32]) -> HostCounters {
        let wait = |id: &u32| run_delay_ns(&fs::read(format!("/proc/self/task/{id}/schedstat")).ok()?);
        let waits: Option<Vec<u64>> = threads.iter().map(wait).collect();
        let groups = fs::read_to_string("/proc/self/cgroup").map(|text| cpu_groups(&text)).unwrap_or_default();
        // One directory may have several names.
        let files: BTreeSet<PathBuf> =
            groups.iter().filter_map(|group| fs::canonicalize(format!("{group}/cpu.stat")).ok()).collect();
        let of_group = |file: &PathBuf| throttling(&fs::read_to_string(file).ok()?);
        let throttling = files.iter().filter_map(of_group).reduce(|all, one| Throttling {
            periods: all.periods.saturating_add(one.periods),
            ns: all.ns.saturating_add(one.ns),
        });
        HostCounters {
            at: Instant::now(),
            waits_ns: waits.filter(|waits| !waits.is_empty()),
            ticks: fs::read_to_string("/proc/stat").ok().and_then(|text| cpu_ticks(&text)),
            throttling,
            usage: sampler::switches_and_faults(),
        }
    }

    /// What happened from `self` to `after`, in which these iterations ran.
    pub fn until(&self, after: &HostCounters, iterations: &[IterationRecord]) -> HostReadings {
        let wall = after.at.saturating_duration_since(self.at).as_secs_f64();
        let waits = self.waits_ns.as_ref().zip(after.waits_ns.as_ref()).filter(|(a, b)| a.len() == b.len());
        let waits: Option<Vec<u64>> =
            waits.map(|(before, after)| before.iter().zip(after).map(|(a, b)| b.saturating_sub(*a)).collect());
        let steal = self.ticks.zip(after.ticks).and_then(|(before, after)| {
            let seconds = after.steal.saturating_sub(before.steal) as f64 / ticks_per_s()?;
            Some(seconds / (after.cpus as f64 * wall)).filter(|share| share.is_finite())
        });
        let throttled = self.throttling.zip(after.throttling).map(|(before, after)| Throttling {
            periods: after.periods.saturating_sub(before.periods),
            ns: after.ns.saturating_sub(before.ns),
        });
        let usage = self.usage.zip(after.usage);
        let mut found = HostReadings {
            wall_ms: 1e3 * wall,
            cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
            threads: after.waits_ns.as_ref().map(Vec::len),
            cpu_wait_sum_ms: waits.as_ref().map(|waits| waits.iter().map(|&ns| ns as f64 / 1e6).sum()),
            cpu_wait_max_ms: waits.as_ref().and_then(|waits| Some(*waits.iter().max()? as f64 / 1e6)),
            steal_share: steal,
            throttled_periods: throttled.map(|throttled| throttled.periods),
            throttled_ms: throttled.map(|throttled| throttled.ns as f64 / 1e6),
            involuntary_switches: usage.map(|(before, after)| after.0.saturating_sub(before.0)),
            major_faults: usage.map(|(before, after)| after.1.saturating_sub(before.1)),
            iterations_read: 0,
            iterations_disturbed: None,
        };
        found.count_disturbed(iterations);
        found
    }
}

/// Clock ticks of `/proc/stat` in a second.
fn ticks_per_s() -> Option<f64> {
    // SAFETY: sysconf has no preconditions.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    (ticks > 0).then_some(ticks as f64)
}

/// The machine's part in a run, from right before it to right after it. Absent is unknown, never zero.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostReadings {
    /// Wall time they cover.
    pub wall_ms: f64,
    /// Cores this process may use.
    pub cores: usize,
    /// Threads that compute, where their waits are told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Time those threads were ready and waited for a CPU, in all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_wait_sum_ms: Option<f64>,
    /// The same of the thread that waited longest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_wait_max_ms: Option<f64>,
    /// Time the hypervisor ran something else, as a share of the CPU time of the whole machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steal_share: Option<f64>,
    /// Periods in which the control group's quota was used up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttled_periods: Option<u64>,
    /// Time the control group stood still for that, summed over CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttled_ms: Option<f64>,
    /// Times a thread of the process was taken off its CPU while it still had work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub involuntary_switches: Option<u64>,
    /// Page faults that had to read a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major_faults: Option<u64>,
    /// Iterations of which it is known whether they were disturbed.
    pub iterations_read: usize,
    /// How many of those were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iterations_disturbed: Option<usize>,
}

impl HostReadings {
    /// Count anew which iterations of the run were disturbed: the last ones may become known late.
    pub fn count_disturbed(&mut self, iterations: &[IterationRecord]) {
        let known: Vec<bool> = disturbed(iterations).into_iter().flatten().collect();
        self.iterations_read = known.len();
        self.iterations_disturbed = (!known.is_empty()).then(|| known.iter().filter(|yes| **yes).count());
    }

    /// Mean share of the run that a thread waited for a CPU.
    pub fn cpu_wait_share(&self) -> Option<f64> {
        let threads = self.threads.filter(|threads| *threads > 0)?;
        Some(self.cpu_wait_sum_ms? / (threads as f64 * self.wall_ms)).filter(|share| share.is_finite())
    }

    /// Whether strobe has more threads than cores, so that they wait for each other whatever else the machine does.
    pub fn oversubscribed(&self) -> bool {
        self.threads.is_some_and(|threads| threads > self.cores)
    }

    /// Why figures of this run are not the engine's alone, in words; `None` when nothing is known against them. Threads
    /// that wait because strobe was given more of them than cores are its own making and no disturbance.
    pub fn disturbance(&self) -> Option<String> {
        let waited = self.cpu_wait_share().filter(|share| *share > DISTURBED_RUN_WAIT && !self.oversubscribed());
        let steal = self.steal_share.filter(|share| *share > DISTURBED_RUN_STEAL);
        let throttled = self.throttled_ms.filter(|ms| *ms > DISTURBED_RUN_THROTTLED * self.wall_ms);
        let reasons = [
            waited.map(|share| format!("its threads waited {:.1} % of the run for a CPU", 100.0 * share)),
            steal.map(|share| format!("the hypervisor took {:.1} % of CPU time (steal)", 100.0 * share)),
            throttled.map(|ms| format!("throttled by its cgroup for {:.1} s", ms / 1e3)),
        ];
        let reasons: Vec<String> = reasons.into_iter().flatten().collect();
        (!reasons.is_empty()).then(|| reasons.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet() -> HostReadings {
        HostReadings {
            wall_ms: 10_000.0,
            cores: 2,
            threads: Some(2),
            cpu_wait_sum_ms: Some(100.0),
            cpu_wait_max_ms: Some(80.0),
            steal_share: Some(0.01),
            throttled_periods: Some(0),
            throttled_ms: Some(0.0),
            ..HostReadings::default()
        }
    }

    #[test]
    fn a_quiet_run_is_not_disturbed_and_the_unknown_says_nothing() {
        assert_eq!(quiet().disturbance(), None);
        assert_eq!(quiet().cpu_wait_share(), Some(0.005));
        assert_eq!(HostReadings::default().disturbance(), None);
        assert_eq!(HostReadings { wall_ms: 1e4, ..HostReadings::default() }.cpu_wait_share(), None);
    }

    #[test]
    fn each_reason_is_said_in_words() {
        let waited = HostReadings { cpu_wait_sum_ms: Some(2460.0), ..quiet() };
        assert_eq!(waited.disturbance().as_deref(), Some("its threads waited 12.3 % of the run for a CPU"));
        let both = HostReadings { steal_share: Some(0.07), throttled_ms: Some(800.0), ..quiet() };
        let words = "the hypervisor took 7.0 % of CPU time (steal), throttled by its cgroup for 0.8 s";
        assert_eq!(both.disturbance().as_deref(), Some(words));
    }

    #[test]
    fn threads_beyond_the_cores_wait_for_each_other() {
        let many = HostReadings { threads: Some(4), cpu_wait_sum_ms: Some(20_000.0), ..quiet() };
        assert!(many.oversubscribed() && many.disturbance().is_none());
        let stolen = HostReadings { steal_share: Some(0.2), ..many };
        assert!(stolen.disturbance().is_some(), "steal is not its own making");
    }

    #[test]
    fn an_iteration_is_disturbed_by_a_long_and_large_wait() {
        let reading =
            |waited, wall_ns| HostReading { cpu_wait_max_ns: waited, wall_ns, covers: 1, ..HostReading::default() };
        assert_eq!(reading(None, 1).disturbed(), None);
        assert_eq!(reading(Some(40_000), 100_000).disturbed(), Some(false), "short");
        assert_eq!(reading(Some(60_000), 100_000_000).disturbed(), Some(false), "hardly anything of it");
        assert_eq!(reading(Some(60_000), 1_000_000).disturbed(), Some(true));
    }

    #[test]
    fn a_reading_speaks_of_all_it_covers() {
        let read = |covers, waited| {
            let host =
                HostReading { covers, cpu_wait_max_ns: Some(waited), wall_ns: 1_000_000, ..HostReading::default() };
            IterationRecord { host: Some(host), ..IterationRecord::default() }
        };
        let none = IterationRecord::default();
        let run = [none, none, read(2, 900_000), read(1, 0), none];
        assert_eq!(disturbed(&run), [None, Some(true), Some(true), Some(false), None]);
        assert_eq!(disturbed(&[read(9, 0)]), [Some(false)], "covers more than there is");
    }

    #[test]
    fn this_process_can_be_read() {
        let before = HostCounters::read(&[]);
        let found = before.until(&HostCounters::read(&[]), &[]);
        assert_eq!((found.threads, found.cpu_wait_sum_ms, found.iterations_disturbed), (None, None, None));
        assert!(found.cores > 0 && found.wall_ms >= 0.0);
        let text = serde_json::to_string(&found).unwrap_or_default();
        assert!(!text.contains("cpu_wait"), "what is not known is absent: {text}");
        assert_eq!(serde_json::from_str::<HostReadings>("{}").ok(), Some(HostReadings::default()));
    }
}
