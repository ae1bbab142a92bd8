//! What measures: numbers of iterations, their records, and the windows in which every op is recorded.

use std::fs::File;
use std::os::unix::fs::FileExt;

use strobe_model::ModelConfig;
use strobe_model::program::{StepShape, StepWork, step_work};

use crate::backend::Trace;
use crate::host::HostSampler;
use crate::iteration::IterationRecord;
use crate::memory;
use crate::recorder::{Recorder, Recording, StepEvent};
use crate::window::Window;

use super::flight::Flight;

/// Steps as they are counted, timed and weighed.
pub(super) struct Measure {
    config: ModelConfig,
    pub(super) recorder: Recorder,
    /// Whether the device was told of a window.
    pub(super) window_open: bool,
    probe: Option<u64>,
    /// Whether iterations are kept: not while the engine warms up.
    pub(super) on: bool,
    pub(super) next_iteration: u64,
    statm: Option<File>,
    /// There is one as soon as the loop runs.
    pub(super) host: Option<HostSampler>,
    /// Experts of each layer that some token of the step that lands was sent to.
    experts_used: Vec<u32>,
}

impl Measure {
    /// With `probe`, every second block of that many iterations is recorded, to measure the overhead.
    pub(super) fn new(config: ModelConfig, probe: Option<u64>) -> Measure {
        Measure {
            recorder: Recorder::new(Vec::new(), 0, None),
            window_open: false,
            probe,
            on: false,
            next_iteration: 0,
            statm: File::open("/proc/self/statm").ok(),
            host: None,
            experts_used: Vec::with_capacity(config.num_hidden_layers),
            config,
        }
    }

    /// Count from 0 and record `windows` of a program of `nodes`.
    pub(super) fn restart(&mut self, windows: Vec<Window>, nodes: usize) {
        self.recorder = Recorder::new(windows, nodes, self.probe);
        self.on = true;
        self.next_iteration = 0;
        self.restart_host();
    }

    /// The next reading of the host speaks of what comes from here on.
    pub(super) fn restart_host(&mut self) {
        if let Some(host) = &mut self.host {
            host.restart();
        }
    }

    /// The number of the step that is planned, and whether its ops are recorded.
    pub(super) fn begin(&mut self) -> (u64, bool) {
        let iteration = self.next_iteration;
        self.next_iteration += 1;
        (iteration, self.on && self.recorder.begin(iteration))
    }

    /// Where the ops of an iteration leave their costs.
    pub(super) fn trace(&mut self, iteration: u64, profiled: bool) -> Option<Trace<'_>> {
        profiled.then_some(Trace { recorder: &mut self.recorder, iteration })
    }

    /// The work of a step, as far as it is known when it is launched: which experts it needed is known when it lands.
    pub(super) fn work(&self, shape: &StepShape<'_>) -> StepWork {
        if self.config.moe.is_some() { StepWork::default() } else { step_work(&self.config, shape) }
    }

    pub(super) fn resident_bytes(&self) -> Option<u64> {
        let mut text = [0u8; 128];
        let read = self.statm.as_ref()?.read_at(&mut text, 0).ok()?;
        memory::resident_from_statm(text.get(..read)?)
    }

    /// The step has run: read what its threads waited for, and weigh it where that depends on the tokens each expert got.
    pub(super) fn weigh(&mut self, flight: &mut Flight, expert_counts: &[u32]) {
        let record = &mut flight.record;
        let wall = record.times.sampled.saturating_sub(record.times.start);
        record.host = self.host.as_mut().and_then(|host| host.iteration(wall, record.profiled));
        if let Some(moe) = &self.config.moe {
            let used = |counts: &[u32]| counts.iter().filter(|count| **count > 0).count() as u32;
            self.experts_used.clear();
            self.experts_used.extend(expert_counts.chunks(moe.num_experts).map(used));
            flight.record.work = step_work(&self.config, &flight.shape(&self.experts_used));
        }
    }

    /// The iteration is over; gives the recording when it was the last of a window.
    pub(super) fn end(&mut self, record: &IterationRecord) -> Option<Recording> {
        if !record.profiled {
            return None;
        }
        self.recorder.end(StepEvent {
            iteration: record.iter,
            times: record.times,
            context_requests: record.context_requests,
            generation_requests: record.generation_requests,
            context_tokens: record.context_tokens,
            generation_tokens: record.generation_requests,
            cpu_wait_ns: record.host.filter(|host| host.covers == 1).and_then(|host| host.cpu_wait_max_ns),
        })
    }

    /// The recording, unless it was only made to measure the overhead.
    pub(super) fn wanted(&mut self, recording: Recording) -> Option<Recording> {
        if !self.recorder.is_probe() {
            return Some(recording);
        }
        self.recorder.discard(recording);
        None
    }
}
