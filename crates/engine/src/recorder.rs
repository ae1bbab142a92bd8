//! What is recorded of the iterations inside a profile window.

use crate::window::Window;
use strobe_kernels_cuda::{DeviceInfo, KernelTimeline};
use strobe_model::program::{Cost, Ran};

/// Times of one iteration, in nanoseconds of the engine's clock. The phases touch: each begins where the one before
/// it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// The loop pass begins; new requests are fetched.
    pub start: u64,
    /// They are in the queue; scheduling starts.
    pub fetched: u64,
    /// The batch is decided; its cache blocks are taken.
    pub planned: u64,
    /// It holds its blocks; inputs are prepared.
    pub scheduled: u64,
    /// Inputs are ready; the forward pass starts.
    pub prepared: u64,
    /// Logits are there; sampling starts.
    pub forwarded: u64,
    /// Tokens are chosen; requests are updated and answered.
    pub sampled: u64,
    /// The pass is over.
    pub end: u64,
}

impl StepTimes {
    /// Of a step of which only the start and the end are known: all of it is the forward pass.
    pub fn forward_only(start: u64, end: u64) -> StepTimes {
        let (fetched, planned, scheduled, prepared) = (start, start, start, start);
        StepTimes { start, fetched, planned, scheduled, prepared, forwarded: end, sampled: end, end }
    }
}

/// One executed op. On a GPU its times say when the host issued it; when it ran is in [`Recording::gpu`].
#[derive(Clone, Copy, Debug)]
pub struct OpEvent {
    /// Index in the program.
    pub node: u32,
    /// Iteration it belongs to.
    pub iteration: u64,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// How it ran.
    pub ran: Ran,
    /// What it had to do.
    pub cost: Cost,
}

/// One recorded iteration.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepEvent {
    /// Its number.
    pub iteration: u64,
    /// Its phases.
    pub times: StepTimes,
    /// Requests in their prompt.
    pub context_requests: u32,
    /// Requests that generate.
    pub generation_requests: u32,
    /// Prompt tokens.
    pub context_tokens: u32,
    /// Generation tokens.
    pub generation_tokens: u32,
    /// Longest time that one of its threads was ready and waited for a CPU, where that is known of it alone.
    pub cpu_wait_ns: Option<u64>,
}

/// Everything recorded in one window.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Position among the windows asked for.
    pub index: usize,
    /// What was asked for.
    pub window: Window,
    /// Whether the last iteration of the window was reached.
    pub complete: bool,
    /// The thread that ran the loop and dispatched every op.
    pub thread: u32,
    /// Iterations, in order.
    pub steps: Vec<StepEvent>,
    /// Ops, in order.
    pub ops: Vec<OpEvent>,
    /// What the GPU did, where one computed and its recorder could be had.
    pub gpu: Option<GpuRecording>,
}

/// What a GPU did in a window, on the engine's clock.
#[derive(Clone, Debug)]
pub struct GpuRecording {
    /// Which one.
    pub device: DeviceInfo,
    /// Its kernels, copies and the calls that launched them; nodes are those of the program.
    pub timeline: KernelTimeline,
}

/// Decides for each iteration whether it is recorded, and keeps what is. Outside windows nothing is stored, and no
/// clock is read for an op.
pub(crate) struct Recorder {
    windows: Vec<Window>,
    next: usize,
    current: Option<Recording>,
    nodes: usize,
    /// Record alternate blocks of this many iterations to measure what that costs; their events are thrown away.
    probe: Option<u64>,
    /// Emptied recording of a probe, so that a block begins without allocating.
    spare: Option<Recording>,
}

/// Iterations whose events are allocated at once when a window opens; longer windows grow as they go.
const RESERVED_STEPS: usize = 256;

impl Recorder {
    /// With `probe`, every second block of that many iterations is recorded, and no window.
    pub(crate) fn new(windows: Vec<Window>, nodes: usize, probe: Option<u64>) -> Recorder {
        Recorder { windows, next: 0, current: None, nodes, probe, spare: None }
    }

    /// The window that `iteration` is the first of, unless it is open already.
    fn opening(&self, iteration: u64) -> Option<Window> {
        if self.current.is_some() {
            return None;
        }
        match self.probe {
            Some(length) => {
                let first = iteration - iteration % length;
                (first / length % 2 == 1).then_some(Window { first: iteration, last: first + length - 1 })
            }
            None => self.windows.get(self.next).copied().filter(|window| iteration >= window.first),
        }
    }

    /// Whether `iteration` is the first of a window that is not open yet.
    pub(crate) fn opens(&self, iteration: u64) -> bool {
        self.opening(iteration).is_some()
    }

    /// Whether a window opens right after `iteration`. Not where steps with and without recording are compared: nothing of
    /// the one kind may fall on the other.
    pub(crate) fn opens_after(&self, iteration: u64) -> bool {
        self.probe.is_none() && self.opens(iteration + 1)
    }

    /// Whether `iteration` is the last of the open window.
    pub(crate) fn closes(&self, iteration: u64) -> bool {
        self.current.as_ref().is_some_and(|recording| iteration >= recording.window.last)
    }

    /// Whether `iteration` is recorded. Opens its window when it is the first one inside.
    pub(crate) fn begin(&mut self, iteration: u64) -> bool {
        if let Some(window) = self.opening(iteration) {
            self.open(self.next, window);
            self.next += 1;
        }
        self.current.is_some()
    }

    fn open(&mut self, index: usize, window: Window) {
        if let Some(spare) = self.spare.take() {
            self.current = Some(Recording { index, window, ..spare });
            return;
        }
        let steps = usize::try_from(window.last - window.first).unwrap_or(usize::MAX).min(RESERVED_STEPS - 1) + 1;
        self.current = Some(Recording {
            index,
            window,
            complete: false,
            thread: current_thread(),
            steps: Vec::with_capacity(steps),
            ops: Vec::with_capacity(steps * self.nodes),
            gpu: None,
        });
    }

    pub(crate) fn op(&mut self, event: OpEvent) {
        if let Some(recording) = &mut self.current {
            recording.ops.push(event);
        }
    }

    /// What ops of an iteration cost, where it is known only after they ran: `cost` is asked for each of them.
    pub(crate) fn correct(&mut self, iteration: u64, cost: impl Fn(&OpEvent) -> Option<Cost>) {
        let Some(recording) = &mut self.current else { return };
        for event in recording.ops.iter_mut().rev().skip_while(|event| event.iteration > iteration) {
            if event.iteration < iteration {
                return;
            }
            if let Some(cost) = cost(event) {
                event.cost = cost;
            }
        }
    }

    /// Close the iteration; returns the recording when its window is complete.
    pub(crate) fn end(&mut self, step: StepEvent) -> Option<Recording> {
        let recording = self.current.as_mut()?;
        recording.steps.push(step);
        if step.iteration < recording.window.last {
            return None;
        }
        recording.complete = true;
        self.current.take()
    }

    /// Whether recordings are only made to see what that costs.
    pub(crate) fn is_probe(&self) -> bool {
        self.probe.is_some()
    }

    /// Take back the recording of a probe, which nobody wants.
    pub(crate) fn discard(&mut self, mut recording: Recording) {
        recording.steps.clear();
        recording.ops.clear();
        recording.complete = false;
        recording.gpu = None;
        self.spare = Some(recording);
    }

    /// The program ends: hand out a window that was cut short, and name those never reached.
    pub(crate) fn finish(&mut self) -> (Option<Recording>, Vec<Window>) {
        let cut = self.current.take().filter(|_| self.probe.is_none());
        (cut, self.windows.get(self.next..).unwrap_or_default().to_vec())
    }
}

/// The system's number of this thread; 0 where it is not known.
pub(crate) fn current_thread() -> u32 {
    #[cfg(target_os = "linux")]
    // SAFETY: gettid has no preconditions.
    return u32::try_from(unsafe { libc::gettid() }).unwrap_or(0);
    #[cfg(not(target_os = "linux"))]
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_announced_one_iteration_ahead_but_not_when_its_cost_is_measured() {
        let windows = vec![Window { first: 3, last: 4 }, Window { first: 8, last: 9 }];
        let mut recorder = Recorder::new(windows, 1, None);
        let mut announced = Vec::new();
        for iteration in 0..12 {
            if recorder.opens_after(iteration) && !recorder.opens(iteration) {
                announced.push(iteration);
            }
            if recorder.begin(iteration) {
                recorder.end(StepEvent { iteration, ..StepEvent::default() });
            }
        }
        assert_eq!(announced, [2, 7]);
        let probe = Recorder::new(Vec::new(), 1, Some(4));
        assert!((0..16).any(|iteration| probe.opens(iteration)));
        assert!(!(0..16).any(|iteration| probe.opens_after(iteration)));
    }
}
