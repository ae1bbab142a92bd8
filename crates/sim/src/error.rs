//! What can be wrong with a simulation.

use strobe_scheduler::scheduler::Rejection;

/// A simulation that cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// An option has a value that makes no sense.
    #[error("{option}: {problem}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// A run directory that cannot be used, with what is wrong with it.
    #[error("{0}")]
    Run(String),
    /// A request can never run under the limits.
    #[error("request {id} can never run: {reason}")]
    Impossible {
        /// The request's number.
        id: u64,
        /// Why.
        reason: Rejection,
    },
    /// The virtual clock would pass the last nanosecond it can hold.
    #[error("the simulation passes 584 years of virtual time; use shorter times or more requests per second")]
    ClockOverflow,
    /// The scheduler has requests but plans nothing.
    #[error("the scheduler cannot go on with {waiting} requests in the queue; this is a defect of strobe")]
    Stuck {
        /// Requests in the queue.
        waiting: usize,
    },
    /// Somebody asked to stop, or a limit that was looked for is broken already.
    #[error("the simulation was stopped before its end")]
    Stopped,
    /// A sequence grew beyond what any model reads, such as a conversation of very many turns.
    #[error(
        "request {id} has {tokens} tokens, expected at most {most}; use shorter prompts and outputs, or fewer --turns"
    )]
    TooLong {
        /// The request's number.
        id: u64,
        /// Prompt and output tokens.
        tokens: u64,
        /// The most there can be.
        most: u64,
    },
    /// Results could not be written.
    #[error("cannot write the results: {0}")]
    Output(#[from] std::io::Error),
}
