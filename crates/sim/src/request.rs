//! A request on its way through the simulation.

use std::sync::Arc;

use strobe_workload::RequestRecord;

/// Which tokens a prompt consists of, as far as prefixes can be shared.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Like no other.
    Unique,
    /// The first `shared` tokens are those of every request, the rest those of `stream`: a later turn of a conversation
    /// begins with all that was said before.
    Stream {
        /// The conversation.
        stream: u64,
        /// Tokens that all conversations begin with.
        shared: u32,
    },
    /// One number per block of `size` tokens; equal numbers are equal blocks.
    Blocks {
        /// The numbers.
        ids: Arc<[u64]>,
        /// Tokens per number.
        size: u32,
    },
}

impl Content {
    /// The token of request `id` at `position`.
    pub fn token(&self, id: u64, position: usize) -> u32 {
        let (stream, position) = match self {
            Content::Unique => (id.wrapping_mul(2) | 1, position as u64),
            Content::Stream { shared, .. } if position < *shared as usize => (0, position as u64),
            Content::Stream { stream, .. } => (stream.wrapping_mul(2).wrapping_add(2), position as u64),
            Content::Blocks { ids, size } => match ids.get(position / (*size).max(1) as usize) {
                Some(&block) => (block.wrapping_mul(2), 0),
                None => (id.wrapping_mul(2) | 1, position as u64),
            },
        };
        let mixed = (stream ^ position.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        (mixed >> 33) as u32
    }
}

/// What a source asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct SimRequest {
    /// Its number in this run.
    pub id: u64,
    /// Intended arrival.
    pub arrival_ns: u64,
    /// Prompt tokens, at least 1.
    pub input: u32,
    /// Output tokens, at least 1.
    pub output: u32,
    /// What the prompt consists of.
    pub content: Content,
    /// Priority level, 1 is served first; only the dynamic batcher looks at it.
    pub priority: u32,
}

/// A request with all that has happened to it.
#[derive(Clone, Debug)]
pub struct Job {
    /// The request.
    pub request: SimRequest,
    /// When the server that has it now took it.
    pub queued_ns: u64,
    /// When an iteration first held it.
    pub first_scheduled_ns: Option<u64>,
    /// When its first token came.
    pub first_token_ns: u64,
    /// When its latest token came.
    pub last_token_ns: u64,
    /// Tokens so far.
    pub produced: u32,
    /// The stamps of all tokens, where they are kept.
    pub token_times_ns: Vec<u64>,
    /// First and last iteration that held it.
    pub iterations: Option<(u64, u64)>,
    /// How often it was paused or lost its server.
    pub preemptions: u32,
    /// Prompt tokens found in the prefix cache.
    pub reused: u32,
    /// Tokens whose keys and values came with it from another server.
    pub imported: u32,
    /// The server that has it.
    pub server: u32,
    /// Why it was refused.
    pub refused: Option<&'static str>,
}

impl Job {
    /// A request that has just arrived.
    pub fn new(request: SimRequest) -> Job {
        Job {
            queued_ns: request.arrival_ns,
            request,
            first_scheduled_ns: None,
            first_token_ns: 0,
            last_token_ns: 0,
            produced: 0,
            token_times_ns: Vec::new(),
            iterations: None,
            preemptions: 0,
            reused: 0,
            imported: 0,
            server: 0,
            refused: None,
        }
    }

    /// Tokens still to come.
    pub fn left(&self) -> u32 {
        self.request.output - self.produced
    }

    /// Iteration `iteration`, begun at `start_ns`, holds it.
    pub fn held_by(&mut self, iteration: u64, start_ns: u64) {
        self.first_scheduled_ns.get_or_insert(start_ns);
        let first = self.iterations.map_or(iteration, |(first, _)| first);
        self.iterations = Some((first, iteration));
    }

    /// A token came; the gap since the one before, if there was one.
    pub fn token(&mut self, now_ns: u64, keep: bool) -> Option<u64> {
        let gap = (self.produced > 0).then(|| now_ns - self.last_token_ns);
        if self.produced == 0 {
            self.first_token_ns = now_ns;
        }
        self.last_token_ns = now_ns;
        self.produced += 1;
        if keep {
            self.token_times_ns.push(now_ns);
        }
        gap
    }

    /// The record of a benchmark for it. Its stamps are there only where they were kept.
    pub fn into_record(self) -> RequestRecord {
        let failed = self.refused.is_some();
        RequestRecord {
            id: self.request.id,
            task_id: self.request.id as i64,
            num_input_tokens: self.request.input,
            arrival_ns: self.request.arrival_ns,
            sent_ns: self.request.arrival_ns,
            queued_ns: self.request.arrival_ns,
            first_scheduled_ns: self.first_scheduled_ns,
            token_times_ns: self.token_times_ns,
            output_ids: Vec::new(),
            finish_reason: if failed { "error" } else { "length" }.into(),
            error: self.refused.map(str::to_string),
            iterations: self.iterations,
            preemptions: self.preemptions,
            reused_tokens: self.reused,
        }
    }
}
