//! What every kind of server has in common, and who listens to it.

use strobe_scheduler::block_pool::PoolCounters;
use strobe_scheduler::scheduler::Decision;

use crate::cost::StepLoad;
use crate::error::SimError;
use crate::request::{Job, SimRequest};

/// Time of an event that never comes.
pub const NEVER: u64 = u64::MAX;

/// One simulated iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepRecord {
    /// The server it ran on.
    pub server: u32,
    /// Its number on that server.
    pub iter: u64,
    /// When it began.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// What it had to do.
    pub load: StepLoad,
    /// Requests in the batch.
    pub active: u32,
    /// Requests in the queue after admission.
    pub queued: u32,
    /// Requests admitted for the first time.
    pub new_active: u32,
    /// Time those spent in the queue, in all.
    pub new_active_queue_ns: u64,
    /// Requests that ended.
    pub completed: u32,
    /// Requests paused.
    pub paused: u32,
    /// Tokens produced.
    pub new_tokens: u32,
    /// Tokens computed a second time after a pause.
    pub recomputed_tokens: u32,
    /// Cache blocks in use; 0 where the server has none.
    pub kv_used: u32,
    /// Cache blocks in all; 0 where the server has none.
    pub kv_total: u32,
    /// Block counters since the start.
    pub pool: PoolCounters,
}

/// Takes what a simulation finds, as it happens.
pub trait Sink {
    /// Whether the stamp of every token is wanted in [`Job::token_times_ns`].
    fn keeps_token_times(&self) -> bool;
    /// `weight` tokens came `gap_ns` after the ones before them.
    fn gap(&mut self, gap_ns: u64, weight: u64);
    /// An iteration ended.
    fn iteration(&mut self, step: &StepRecord, decisions: &[Decision]) -> Result<(), SimError>;
    /// A request ended or was refused.
    fn request(&mut self, job: Job) -> Result<(), SimError>;
    /// Whether the simulation shall end now. Asked now and then.
    fn stop(&self) -> bool {
        false
    }
}

/// Something that serves requests on the virtual clock.
pub trait Server {
    /// A request arrives at `now_ns`. It is handed back when it can't be taken.
    fn offer(&mut self, job: Job, now_ns: u64) -> Result<(), SimError>;
    /// When something happens next; [`NEVER`] when nothing does without a new request.
    fn next_event_ns(&self) -> u64;
    /// Go on until just before `limit_ns`, or until requests ended, which are put into `ended`.
    fn run(&mut self, limit_ns: u64, ended: &mut Vec<Job>, sink: &mut dyn Sink) -> Result<(), SimError>;
    /// Requests it has.
    fn outstanding(&self) -> usize;
    /// Tokens it still has to compute or produce.
    fn outstanding_tokens(&self) -> u64;
    /// Prompt tokens of `request` that its prefix cache holds.
    fn cached_prefix(&self, request: &SimRequest) -> usize;
    /// It fails: everything it has is put into `lost`, and its cache is empty afterwards.
    fn fail(&mut self, lost: &mut Vec<Job>);
    /// Requests in its queue.
    fn queued(&self) -> usize;
}
