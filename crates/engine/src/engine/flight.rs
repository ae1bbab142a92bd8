//! Steps on their way: launched, their tokens not taken yet.

use std::collections::VecDeque;

use strobe_model::program::{SpanShape, StepShape};

use crate::iteration::IterationRecord;
use crate::recorder::StepTimes;
use crate::scheduler::{Decision, Entry, RequestId};
use crate::step::StepInputs;

use super::{FinishEvent, TokenEvent};

/// A sampled row of a step on its way.
pub(super) struct FlightRow {
    pub(super) request: RequestId,
    pub(super) slot: u32,
    /// Where the request stood in the batch.
    pub(super) near: usize,
    /// Tokens it had before this one.
    pub(super) generated: usize,
}

/// A step that was launched, and what it brings when it lands.
pub(super) struct Flight {
    pub(super) record: IterationRecord,
    pub(super) rows: Vec<FlightRow>,
    /// Requests that left the batch with this step, for it gives them their last token; by slot.
    pub(super) left: Vec<Entry>,
    pub(super) decisions: Vec<Decision>,
    /// What its work depends on.
    shape: StepShape<'static>,
    spans: Vec<SpanShape>,
    /// What is to be handed over, and whether somebody waits for it.
    pub(super) tokens: Vec<TokenEvent>,
    pub(super) finished: Vec<FinishEvent>,
    pub(super) wakes: bool,
}

impl Flight {
    fn with_room(batch: usize) -> Flight {
        let empty = StepInputs::empty();
        Flight {
            record: IterationRecord::default(),
            rows: Vec::with_capacity(batch),
            left: Vec::with_capacity(batch),
            decisions: Vec::with_capacity(5 * batch + 4),
            shape: empty.shape_alone(),
            spans: Vec::with_capacity(2 * batch), // see `StepInputs::fill`
            tokens: Vec::with_capacity(batch),
            finished: Vec::with_capacity(batch),
            wakes: false,
        }
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.left.clear();
        self.decisions.clear();
        self.tokens.clear();
        self.finished.clear();
        self.wakes = false;
    }

    /// What the step's work depends on.
    pub(super) fn shape<'a>(&'a self, experts_used: &'a [u32]) -> StepShape<'a> {
        StepShape { spans: &self.spans, experts_used, ..self.shape }
    }
}

/// The steps on their way, oldest first.
pub(super) struct Flights {
    on_way: VecDeque<Flight>,
    /// Used ones, to be filled again.
    spare: Vec<Flight>,
    batch: usize,
    /// Host phases of the current pass, and when the last iteration was over.
    pass: StepTimes,
    last_end: u64,
}

impl Flights {
    /// Steps of up to `batch` requests, of which `most` may be on their way.
    pub(super) fn new(batch: usize, most: usize) -> Flights {
        Flights {
            on_way: VecDeque::with_capacity(most),
            spare: (0..most).map(|_| Flight::with_room(batch)).collect(),
            batch,
            pass: StepTimes::default(),
            last_end: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.on_way.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.on_way.is_empty()
    }

    /// A step was launched in a pass that began at `record.times.start`: a flight for it, to be given to
    /// [`Flights::push`].
    pub(super) fn take_off(&mut self, record: IterationRecord, inputs: &mut StepInputs) -> Flight {
        if self.is_empty() {
            self.last_end = record.times.start;
        }
        self.pass = record.times;
        let mut flight = self.spare.pop().unwrap_or_else(|| Flight::with_room(self.batch));
        flight.record = record;
        flight.shape = inputs.shape_alone();
        std::mem::swap(&mut flight.spans, &mut inputs.spans);
        flight
    }

    pub(super) fn push(&mut self, flight: Flight) {
        self.on_way.push_back(flight);
    }

    /// The oldest step on its way, which the engine begins to wait for `now`.
    ///
    /// One that was launched before the last landing shares the time until then with the step that landed. What comes after
    /// belongs to it, and what the host did in it was done for the next one.
    pub(super) fn next_to_land(&mut self, now: u64) -> Option<Flight> {
        let mut flight = self.on_way.pop_front()?;
        let times = &mut flight.record.times;
        if self.last_end > times.start {
            let launched = self.pass.start >= self.last_end;
            let pass = if launched { self.pass } else { StepTimes::default() };
            let or_start = |time: u64| time.max(self.last_end);
            *times = StepTimes {
                start: self.last_end,
                fetched: or_start(pass.fetched),
                planned: or_start(pass.planned),
                scheduled: or_start(pass.scheduled),
                prepared: or_start(pass.prepared),
                forwarded: if launched { or_start(pass.forwarded) } else { now },
                ..StepTimes::default()
            };
        }
        Some(flight)
    }

    /// A step has landed and was handed over.
    pub(super) fn landed(&mut self, mut flight: Flight) {
        self.last_end = flight.record.times.end;
        flight.clear();
        self.spare.push(flight);
    }

    /// A request that has left the batch with a step on its way.
    pub(super) fn left_with(&self, request: RequestId) -> Option<&Entry> {
        self.on_way.iter().flat_map(|flight| &flight.left).find(|entry| entry.id == request)
    }
}
