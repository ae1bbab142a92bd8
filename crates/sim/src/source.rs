//! Where requests come from.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use strobe_workload::{Arrivals, Rng};

use crate::lengths::LengthDist;
use crate::request::{Content, Job, SimRequest};

/// Gives requests in order of their arrival.
pub trait Source {
    /// When the next request known so far arrives.
    fn next_arrival_ns(&mut self) -> Option<u64>;
    /// That request.
    fn take(&mut self) -> Option<SimRequest>;
    /// A request ended: what waits for that may arrive now.
    fn ended(&mut self, job: &Job, now_ns: u64);
    /// Whether arrivals depend on when requests end.
    fn reacts(&self) -> bool;
}

/// Prompt and output lengths, each with a random stream of its own.
#[derive(Clone, Debug)]
pub struct Lengths {
    input: LengthDist,
    output: LengthDist,
    input_rng: Rng,
    output_rng: Rng,
    drawn: u64,
}

impl Lengths {
    /// Lengths drawn from two distributions.
    pub fn new(input: LengthDist, output: LengthDist, seed: u64) -> Lengths {
        let (input_rng, output_rng) = (Rng::new(seed, "input lengths"), Rng::new(seed, "output lengths"));
        Lengths { input, output, input_rng, output_rng, drawn: 0 }
    }

    fn draw(&mut self) -> (u32, u32) {
        let number = self.drawn;
        self.drawn += 1;
        (self.input.draw(number, &mut self.input_rng), self.output.draw(number, &mut self.output_rng))
    }
}

/// A fixed number of requests that arrive whatever becomes of them.
pub struct OpenLoop {
    arrivals: Arrivals,
    lengths: Lengths,
    count: u64,
    next: Option<u64>,
    given: u64,
    priorities: Option<(u32, Rng)>,
}

impl OpenLoop {
    /// `count` requests.
    pub fn new(mut arrivals: Arrivals, lengths: Lengths, count: u64) -> OpenLoop {
        let next = if count > 0 { arrivals.next() } else { None };
        OpenLoop { arrivals, lengths, count, next, given: 0, priorities: None }
    }

    /// Spread the requests evenly over `levels` priority levels.
    pub fn with_priorities(mut self, levels: u32, seed: u64) -> OpenLoop {
        self.priorities = (levels > 1).then(|| (levels, Rng::new(seed, "priorities")));
        self
    }
}

impl Source for OpenLoop {
    fn next_arrival_ns(&mut self) -> Option<u64> {
        self.next
    }

    fn take(&mut self) -> Option<SimRequest> {
        let arrival_ns = self.next?;
        let id = self.given;
        self.given += 1;
        self.next = if self.given < self.count { self.arrivals.next() } else { None };
        let (input, output) = self.lengths.draw();
        let priority = self.priorities.as_mut().map_or(1, |(levels, rng)| 1 + rng.below(u64::from(*levels)) as u32);
        Some(SimRequest { id, arrival_ns, input, output, content: Content::Unique, priority })
    }

    fn ended(&mut self, _: &Job, _: u64) {}

    fn reacts(&self) -> bool {
        false
    }
}

/// A fixed number of clients, each of which sends its next request when the one before has ended.
pub struct ClosedLoop {
    lengths: Lengths,
    count: u64,
    given: u64,
    due: BinaryHeap<Reverse<u64>>,
    think: Think,
}

/// Exponential think times of a mean; 0 is none.
#[derive(Clone, Debug)]
pub struct Think {
    mean_ns: f64,
    rng: Rng,
}

impl Think {
    /// Think times of this mean.
    pub fn new(mean_ns: f64, seed: u64) -> Think {
        Think { mean_ns, rng: Rng::new(seed, "think times") }
    }

    fn draw(&mut self) -> u64 {
        if self.mean_ns > 0.0 { (self.mean_ns * self.rng.exponential()) as u64 } else { 0 }
    }
}

impl ClosedLoop {
    /// `clients` clients that send `count` requests in all.
    pub fn new(clients: u64, lengths: Lengths, think: Think, count: u64) -> ClosedLoop {
        let due = (0..clients.min(count)).map(|_| Reverse(0)).collect();
        ClosedLoop { lengths, count, given: 0, due, think }
    }
}

impl Source for ClosedLoop {
    fn next_arrival_ns(&mut self) -> Option<u64> {
        if self.given < self.count { self.due.peek().map(|due| due.0) } else { None }
    }

    fn take(&mut self) -> Option<SimRequest> {
        let arrival_ns = self.next_arrival_ns()?;
        self.due.pop();
        let id = self.given;
        self.given += 1;
        let (input, output) = self.lengths.draw();
        Some(SimRequest { id, arrival_ns, input, output, content: Content::Unique, priority: 1 })
    }

    fn ended(&mut self, _: &Job, now_ns: u64) {
        self.due.push(Reverse(now_ns.saturating_add(self.think.draw())));
    }

    fn reacts(&self) -> bool {
        true
    }
}

/// Requests that were recorded or prepared, in order of arrival.
pub struct Replay {
    requests: std::vec::IntoIter<SimRequest>,
}

impl Replay {
    /// Replays `requests`, which are in order of arrival.
    pub fn new(requests: Vec<SimRequest>) -> Replay {
        Replay { requests: requests.into_iter() }
    }
}

impl Source for Replay {
    fn next_arrival_ns(&mut self) -> Option<u64> {
        self.requests.as_slice().first().map(|request| request.arrival_ns)
    }

    fn take(&mut self) -> Option<SimRequest> {
        self.requests.next()
    }

    fn ended(&mut self, _: &Job, _: u64) {}

    fn reacts(&self) -> bool {
        false
    }
}

/// What is known of a conversation between two turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    due_ns: u64,
    session: u64,
    turn: u32,
    history: u32,
}

/// Conversations: each turn's prompt is all that was said before and something new, and comes a think time after the
/// answer. Conversations begin at the times of an arrival process.
pub struct Sessions {
    arrivals: Arrivals,
    lengths: Lengths,
    think: Think,
    turns: u32,
    shared: u32,
    count: u64,
    given: u64,
    next_session: u64,
    next_start_ns: u64,
    due: BinaryHeap<Reverse<Turn>>,
    /// The turn of each request under way.
    live: std::collections::HashMap<u64, Turn>,
}

impl Sessions {
    /// `count` requests of conversations of `turns` turns that all begin with the same `shared` tokens.
    pub fn new(
        mut arrivals: Arrivals,
        lengths: Lengths,
        think: Think,
        turns: u32,
        shared: u32,
        count: u64,
    ) -> Sessions {
        let next_start_ns = arrivals.next().unwrap_or(0);
        Sessions {
            arrivals,
            lengths,
            think,
            turns,
            shared,
            count,
            given: 0,
            next_session: 0,
            next_start_ns,
            due: BinaryHeap::new(),
            live: std::collections::HashMap::new(),
        }
    }
}

impl Source for Sessions {
    fn next_arrival_ns(&mut self) -> Option<u64> {
        if self.given >= self.count {
            return None;
        }
        let later = self.due.peek().map_or(u64::MAX, |turn| turn.0.due_ns);
        Some(later.min(self.next_start_ns))
    }

    fn take(&mut self) -> Option<SimRequest> {
        let arrival_ns = self.next_arrival_ns()?;
        let turn = match self.due.peek() {
            Some(turn) if turn.0.due_ns <= self.next_start_ns => self.due.pop()?.0,
            _ => {
                let session = self.next_session;
                self.next_session += 1;
                self.next_start_ns = self.arrivals.next().unwrap_or(u64::MAX);
                Turn { due_ns: arrival_ns, session, turn: 0, history: self.shared }
            }
        };
        let id = self.given;
        self.given += 1;
        let (new, output) = self.lengths.draw();
        let input = turn.history.saturating_add(new);
        self.live.insert(id, Turn { history: input.saturating_add(output), ..turn });
        let content = Content::Stream { stream: turn.session, shared: self.shared };
        Some(SimRequest { id, arrival_ns, input, output, content, priority: 1 })
    }

    fn ended(&mut self, job: &Job, now_ns: u64) {
        let Some(turn) = self.live.remove(&job.request.id) else { return };
        if turn.turn + 1 < self.turns && job.refused.is_none() {
            let due_ns = now_ns.saturating_add(self.think.draw());
            self.due.push(Reverse(Turn { due_ns, turn: turn.turn + 1, ..turn }));
        }
    }

    fn reacts(&self) -> bool {
        true
    }
}
