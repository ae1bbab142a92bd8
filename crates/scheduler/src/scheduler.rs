//! Which tokens run next.
//!
//! [`Scheduler::plan`] is a pure function of plain state: no device, clock, tokenizer or file. The engine and the
//! simulator call the same code. The life of a step is `plan` (read only), `apply` (admit, pause, take blocks), the
//! forward pass, then `advance` and `finish` for what it produced.
//!
//! Order inside a step: generating requests first (one token each), then prompts already begun, then the queue,
//! first come first served. Nobody overtakes: when the head of the queue does not fit, the rest waits too.

use std::collections::VecDeque;

use crate::block_pool::{BlockId, BlockPool, ContentId, ROOT};

/// Number of a request, unique within an engine.
pub type RequestId = u64;

/// How requests are admitted and what happens when cache blocks run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Admit only what can finish: blocks for prompt and all its output are set aside.
    GuaranteedNoEvict,
    /// Admit what fits the next step; pause and later recompute the last started when blocks run out.
    MaxUtilization,
    /// Nothing new until the whole batch has finished.
    StaticBatch,
}

impl Policy {
    /// All policies.
    pub const ALL: [Policy; 3] = [Policy::GuaranteedNoEvict, Policy::MaxUtilization, Policy::StaticBatch];

    /// Name as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Policy::GuaranteedNoEvict => "guaranteed_no_evict",
            Policy::MaxUtilization => "max_utilization",
            Policy::StaticBatch => "static_batch",
        }
    }
}

/// Limits of a scheduler.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerConfig {
    /// Admission policy.
    pub policy: Policy,
    /// Most requests in one step.
    pub max_batch_size: usize,
    /// Most tokens in one step.
    pub max_num_tokens: usize,
    /// Longest sequence, prompt and output together.
    pub max_seq_len: usize,
    /// Whether a prompt may be spread over several steps.
    pub chunked_context: bool,
    /// All chunks but the last of a prompt are multiples of this (the block size).
    pub chunk_unit: usize,
    /// Whether blocks of produced tokens are reused as prefixes too. Prompts must then run on the kernels that produce,
    /// or a reused block would differ in the last bit from a computed one.
    pub reuse_output: bool,
}

/// What a request is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its prompt (or, after a pause, prompt and earlier output) is being computed.
    Context,
    /// It produces one token per step.
    Generation,
}

/// A request as the scheduler sees it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its number.
    pub id: RequestId,
    /// Where the engine keeps the rest of it.
    pub slot: u32,
    /// Prompt and output so far.
    pub tokens: Vec<u32>,
    /// Length of the prompt.
    pub prompt_len: usize,
    /// Most tokens it may produce.
    pub max_new_tokens: usize,
    /// Positions whose keys and values are in the cache.
    pub computed: usize,
    /// What it is doing.
    pub phase: Phase,
    /// Blocks it holds, in order of position.
    pub blocks: Vec<BlockId>,
    /// Prompt tokens taken from the cache when it was first admitted.
    pub reused: usize,
    /// How often it was paused.
    pub pauses: u32,
    /// Positions whose keys and values were computed elsewhere and come with it; a pause loses them.
    pub imported: usize,
    /// Tokens at the end of `tokens` that a device has drawn and the host has not seen yet.
    pending: usize,
    /// Positions registered for reuse, and the content they end in.
    registered: (usize, ContentId),
}

/// Stands in [`Entry::tokens`] for a token that is not known yet.
pub const PENDING: u32 = u32::MAX;

impl Entry {
    /// A new request. All the memory it will ever need is reserved here: `prompt` is moved only where it has no room for
    /// the output behind it and one token more.
    pub fn new(
        id: RequestId,
        slot: u32,
        prompt: Vec<u32>,
        max_new_tokens: usize,
        tokens_per_block: usize,
        reserve: usize,
    ) -> Entry {
        let (prompt_len, mut tokens) = (prompt.len(), prompt);
        let longest = (prompt_len + max_new_tokens).min(reserve.max(prompt_len));
        tokens.reserve_exact(longest + 1 - prompt_len);
        Entry {
            id,
            slot,
            tokens,
            prompt_len,
            max_new_tokens,
            computed: 0,
            phase: Phase::Context,
            blocks: Vec::with_capacity(longest.div_ceil(tokens_per_block.max(1)) + 1),
            reused: 0,
            pauses: 0,
            imported: 0,
            pending: 0,
            registered: (0, ROOT),
        }
    }

    /// Tokens produced so far.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    fn settle(&mut self, token: u32) {
        if let Some(place) = self.tokens.len().checked_sub(self.pending)
            && self.pending > 0
        {
            self.tokens[place] = token;
            self.pending -= 1;
        }
    }

    /// Most positions its cache will ever hold: the last produced token is never fed back.
    pub fn most_positions(&self) -> usize {
        (self.prompt_len + self.max_new_tokens).saturating_sub(1)
    }
}

/// Why the scheduler did what it did with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Admitted: so many blocks will be needed, so many were free.
    Admitted {
        /// Blocks set aside; under max_utilization those of the next step and one in hand per running request.
        needed: u32,
        /// Blocks free before.
        free: u32,
        /// Prompt tokens found in the cache.
        reused_tokens: u32,
    },
    /// Admitted again after a pause.
    Resumed {
        /// Tokens to compute again.
        recompute: u32,
    },
    /// Only part of the prompt runs in this step.
    Chunked {
        /// Positions done after this step.
        done: u32,
        /// Positions in all.
        of: u32,
    },
    /// Waits: the batch is full.
    BatchFull,
    /// Waits: the step's token budget is used up.
    TokenBudget,
    /// Waits: not enough cache blocks.
    KvCapacity {
        /// Blocks needed.
        needed: u32,
        /// Blocks that can be given.
        free: u32,
    },
    /// Waits: a static batch is running.
    StaticBatchRunning,
    /// Paused: its blocks are needed by an older request.
    Paused {
        /// Blocks given back.
        freed: u32,
    },
}

impl Reason {
    /// Short name for logs.
    pub fn name(&self) -> &'static str {
        match self {
            Reason::Admitted { .. } => "admitted",
            Reason::Resumed { .. } => "resumed",
            Reason::Chunked { .. } => "chunked",
            Reason::BatchFull => "deferred: batch full",
            Reason::TokenBudget => "deferred: token budget",
            Reason::KvCapacity { .. } => "deferred: kv capacity",
            Reason::StaticBatchRunning => "deferred: static batch running",
            Reason::Paused { .. } => "paused",
        }
    }
}

/// One recorded decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The request it is about.
    pub request: RequestId,
    /// What and why.
    pub reason: Reason,
}

/// Part of a step: positions `start..start + len` of one running request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index among the running requests once the plan is applied.
    pub running: usize,
    /// First position computed.
    pub start: usize,
    /// Number of positions.
    pub len: usize,
    /// Prompt or generation.
    pub phase: Phase,
    /// Whether the last row yields a token.
    pub samples: bool,
}

/// What one step will do. Reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Running requests (by index before the plan) that are paused, last started first.
    pub pause: Vec<usize>,
    /// How many requests leave the head of the queue.
    pub admit: usize,
    /// The batch: prompts first, then generation.
    pub items: Vec<Item>,
    /// Requests in their prompt.
    pub context_requests: usize,
    /// Requests that generate.
    pub generation_requests: usize,
    /// Prompt tokens.
    pub context_tokens: usize,
    /// Why.
    pub decisions: Vec<Decision>,
}

impl Plan {
    /// Tokens in the step.
    pub fn tokens(&self) -> usize {
        self.context_tokens + self.generation_requests
    }

    /// Rows whose logits are needed.
    pub fn sampled(&self) -> usize {
        self.items.iter().filter(|i| i.samples).count()
    }

    fn clear(&mut self) {
        self.pause.clear();
        self.admit = 0;
        self.items.clear();
        (self.context_requests, self.generation_requests, self.context_tokens) = (0, 0, 0);
        self.decisions.clear();
    }

    fn note(&mut self, request: RequestId, reason: Reason) {
        self.decisions.push(Decision { request, reason });
    }
}

/// Why a request can never run; said when it is submitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// There is nothing to compute.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// Nothing may be produced.
    #[error("0 output tokens were asked for; ask for at least one")]
    NoOutput,
    /// The model has no such token.
    #[error("the prompt holds token {token}, but the vocabulary has {vocab} entries; use the model's own tokenizer")]
    UnknownToken {
        /// The first such token.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Longer than the engine was built for.
    #[error(
        "prompt of {prompt} + output of {output} = {} tokens is longer than max_seq_len {limit}; shorten it or build with a larger --max-seq-len",
        prompt + output
    )]
    TooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Output tokens asked for.
        output: usize,
        /// The engine's limit.
        limit: usize,
    },
    /// The cache cannot hold it even alone.
    #[error(
        "the KV cache is too small for this request alone: {needed} blocks of {tokens_per_block} tokens needed, {total} in the cache; raise --kv-cache-blocks"
    )]
    CacheTooSmall {
        /// Blocks needed.
        needed: usize,
        /// Blocks there are.
        total: usize,
        /// Tokens per block.
        tokens_per_block: usize,
    },
    /// Without chunking a prompt must fit one step.
    #[error(
        "{prompt} tokens have to be computed in one step (the prompt; under max_utilization also the output, again after a pause), but max_num_tokens is {limit} and chunked context is disabled; enable it or raise --max-num-tokens"
    )]
    PromptExceedsStep {
        /// Tokens to compute in one go.
        prompt: usize,
        /// Tokens per step.
        limit: usize,
    },
}

/// Whether a request of this shape can ever run under `config` with a cache of `total` blocks.
pub fn check_request(
    config: &SchedulerConfig,
    total: usize,
    tokens_per_block: usize,
    prompt: usize,
    output: usize,
) -> Result<(), Rejection> {
    if prompt == 0 {
        return Err(Rejection::EmptyPrompt);
    }
    if output == 0 {
        return Err(Rejection::NoOutput);
    }
    let limit = config.max_seq_len;
    if prompt + output > limit {
        return Err(Rejection::TooLong { prompt, output, limit });
    }
    let needed = (prompt + output - 1).div_ceil(tokens_per_block);
    if needed > total {
        return Err(Rejection::CacheTooSmall { needed, total, tokens_per_block });
    }
    // A paused request computes prompt and earlier output again, in one go when it can't be chunked.
    let longest = if config.policy == Policy::MaxUtilization { prompt + output - 1 } else { prompt };
    if !config.chunked_context && longest > config.max_num_tokens {
        return Err(Rejection::PromptExceedsStep { prompt: longest, limit: config.max_num_tokens });
    }
    Ok(())
}

/// Queue, running batch and block pool.
pub struct Scheduler {
    config: SchedulerConfig,
    waiting: VecDeque<Entry>,
    running: Vec<Entry>,
    pool: BlockPool,
}

impl Scheduler {
    /// An empty scheduler over `pool`. A batch can't be larger than a step, and a chunk can't either: the limits
    /// are tightened accordingly.
    pub fn new(mut config: SchedulerConfig, pool: BlockPool) -> Scheduler {
        config.max_num_tokens = config.max_num_tokens.max(1);
        config.max_batch_size = config.max_batch_size.clamp(1, config.max_num_tokens);
        config.chunk_unit = config.chunk_unit.clamp(1, config.max_num_tokens);
        Scheduler { config, waiting: VecDeque::new(), running: Vec::with_capacity(config.max_batch_size), pool }
    }

    /// The limits in force.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The block pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Start counting again (after a warm-up).
    pub fn reset_counters(&mut self) {
        self.pool.reset();
    }

    /// Requests in the batch, in order of admission.
    pub fn running(&self) -> &[Entry] {
        &self.running
    }

    /// Requests in the queue.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Entry> {
        self.waiting.iter()
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Whether a request of this shape can ever run here.
    pub fn check(&self, prompt: usize, output: usize) -> Result<(), Rejection> {
        check_request(&self.config, self.pool.total(), self.pool.tokens_per_block(), prompt, output)
    }

    /// Put a request at the end of the queue.
    pub fn submit(&mut self, entry: Entry) -> Result<(), Rejection> {
        self.check(entry.prompt_len, entry.max_new_tokens)?;
        // Room for everything that may be paused back into the queue: steps must not allocate.
        self.waiting.reserve(self.running.len() + 1);
        self.waiting.push_back(entry);
        Ok(())
    }

    /// Blocks that must stay free so that everything running can finish.
    fn set_aside(&self) -> usize {
        self.running.iter().map(|e| self.pool.blocks_for(e.most_positions()).saturating_sub(e.blocks.len())).sum()
    }

    /// Decide the next step. Reads only; `plan` is overwritten.
    pub fn plan(&self, plan: &mut Plan) {
        plan.clear();
        let evicting = self.config.policy == Policy::MaxUtilization;
        let mut budget = self.config.max_num_tokens;
        let mut free = self.pool.free();
        let mut kept = self.running.len();

        // Generation first, oldest first. Under MaxUtilization the youngest give way when blocks run out.
        let mut index = 0;
        while index < kept {
            let entry = &self.running[index];
            if entry.phase == Phase::Generation && budget > 0 {
                let needed = self.pool.blocks_for(entry.computed + 1).saturating_sub(entry.blocks.len());
                while evicting && needed > free && kept > index + 1 {
                    kept -= 1;
                    free += self.pause(plan, kept);
                }
                if needed > free {
                    // Only possible when evicting: this one is the youngest left and has to go itself.
                    kept = index;
                    free += self.pause(plan, index);
                    break;
                }
                free -= needed;
                budget -= 1;
                plan.generation_requests += 1;
                let (start, phase) = (entry.computed, Phase::Generation);
                plan.items.push(Item { running: index, start, len: 1, phase, samples: true });
            }
            index += 1;
        }

        // Prompts already begun, oldest first.
        let mut blocked = false;
        let mut index = 0;
        while index < kept {
            let entry = &self.running[index];
            if entry.phase == Phase::Context {
                let len = self.chunk(entry.tokens.len() - entry.computed, budget);
                let needed = self.pool.blocks_for(entry.computed + len).saturating_sub(entry.blocks.len());
                while evicting && needed > free && kept > index + 1 {
                    kept -= 1;
                    let victim = &self.running[kept];
                    if victim.phase == Phase::Generation {
                        // It was planned above: take it out again.
                        plan.items.retain(|i| i.running != kept);
                        plan.generation_requests -= 1;
                        budget += 1;
                        free += self.pool.blocks_for(victim.computed + 1).saturating_sub(victim.blocks.len());
                    }
                    free += self.pause(plan, kept);
                }
                if len == 0 || needed > free {
                    let reason = if len == 0 {
                        Reason::TokenBudget
                    } else {
                        Reason::KvCapacity { needed: needed as u32, free: free as u32 }
                    };
                    plan.note(entry.id, reason);
                    blocked = true;
                    break;
                }
                free -= needed;
                budget -= len;
                self.add_context(plan, index, entry.id, entry.computed, len, entry.tokens.len());
            }
            index += 1;
        }

        if !blocked && plan.pause.is_empty() {
            self.plan_admissions(plan, budget, free);
        }
        // Context rows lead in the packed input, each group in order of admission.
        plan.items.sort_unstable_by_key(|i| (i.phase == Phase::Generation, i.running));
    }

    fn plan_admissions(&self, plan: &mut Plan, mut budget: usize, mut free: usize) {
        if self.config.policy == Policy::StaticBatch && !self.running.is_empty() {
            if let Some(head) = self.waiting.front() {
                plan.note(head.id, Reason::StaticBatchRunning);
            }
            return;
        }
        let evicting = self.config.policy == Policy::MaxUtilization;
        // Blocks of this step were subtracted from `free` already; what running requests need later still has to
        // be set aside when they must never be paused.
        let mut set_aside = if evicting {
            0
        } else {
            let planned_now = self.pool.free() - free;
            self.set_aside().saturating_sub(planned_now)
        };
        for entry in &self.waiting {
            let running = self.running.len() + plan.admit;
            if running >= self.config.max_batch_size {
                plan.note(entry.id, Reason::BatchFull);
                break;
            }
            let found = self.pool.match_prefix(self.reusable(entry));
            let reused = (found.blocks * self.pool.tokens_per_block()).max(entry.imported);
            let len = self.chunk(entry.tokens.len() - reused, budget);
            if len == 0 {
                plan.note(entry.id, Reason::TokenBudget);
                break;
            }
            let now = self.pool.blocks_for(reused + len) - found.blocks + found.of_those_free;
            let all = self.pool.blocks_for(entry.most_positions()) - found.blocks + found.of_those_free;
            // Keep one block per running request in hand when admitting optimistically: admitting into the last
            // blocks would only pause the newcomer in the next step.
            let needed = if evicting { now + running } else { all };
            let available = free.saturating_sub(set_aside);
            let alone = running == 0;
            if needed > available && !(evicting && alone && now <= available) {
                plan.note(entry.id, Reason::KvCapacity { needed: needed as u32, free: available as u32 });
                break;
            }
            let reason = if entry.pauses > 0 {
                Reason::Resumed { recompute: (entry.tokens.len() - reused) as u32 }
            } else {
                Reason::Admitted { needed: needed as u32, free: available as u32, reused_tokens: reused as u32 }
            };
            plan.note(entry.id, reason);
            plan.admit += 1;
            free -= now;
            set_aside += if evicting { 0 } else { all - now };
            budget -= len;
            self.add_context(plan, running, entry.id, reused, len, entry.tokens.len());
        }
    }

    /// The tokens of a waiting request that may be looked up in the cache.
    fn reusable<'a>(&self, entry: &'a Entry) -> &'a [u32] {
        if self.config.reuse_output { &entry.tokens } else { &entry.tokens[..entry.prompt_len] }
    }

    fn add_context(&self, plan: &mut Plan, running: usize, id: RequestId, start: usize, len: usize, total: usize) {
        let samples = start + len == total;
        if !samples {
            plan.note(id, Reason::Chunked { done: (start + len) as u32, of: total as u32 });
        }
        plan.items.push(Item { running, start, len, phase: Phase::Context, samples });
        plan.context_requests += 1;
        plan.context_tokens += len;
    }

    /// Tokens of a prompt with `remaining` left that fit `budget`.
    fn chunk(&self, remaining: usize, budget: usize) -> usize {
        if remaining <= budget {
            remaining
        } else if self.config.chunked_context {
            budget / self.config.chunk_unit * self.config.chunk_unit
        } else {
            0
        }
    }

    fn pause(&self, plan: &mut Plan, index: usize) -> usize {
        let entry = &self.running[index];
        plan.pause.push(index);
        plan.note(entry.id, Reason::Paused { freed: entry.blocks.len() as u32 });
        // Shared blocks are not freed by one holder letting go.
        entry.blocks.iter().filter(|&&b| self.pool.references(b) == 1).count()
    }

    /// Carry out a plan: pause, admit, and take the blocks that the step writes to.
    pub fn apply(&mut self, plan: &Plan) {
        for &index in &plan.pause {
            // Indices come in falling order and end with the youngest kept request's successor.
            let mut entry = self.running.remove(index);
            self.pool.release_all(&mut entry.blocks);
            (entry.computed, entry.imported) = (0, 0);
            entry.phase = Phase::Context;
            entry.pauses += 1;
            entry.registered = (0, ROOT);
            self.waiting.push_front(entry);
        }
        for _ in 0..plan.admit {
            let Some(mut entry) = self.waiting.pop_front() else { break };
            let reusable = if self.config.reuse_output { entry.tokens.len() } else { entry.prompt_len };
            let content = self.pool.take_prefix(&entry.tokens[..reusable], &mut entry.blocks);
            let reused = entry.blocks.len() * self.pool.tokens_per_block();
            entry.computed = reused.max(entry.imported);
            if entry.pauses == 0 {
                entry.reused = reused;
            }
            entry.registered = (reused, content);
            self.running.push(entry);
        }
        for item in &plan.items {
            let entry = &mut self.running[item.running];
            let needed = self.pool.blocks_for(item.start + item.len);
            while entry.blocks.len() < needed {
                let block = self.pool.allocate().expect("the plan counted this block as free");
                entry.blocks.push(block);
            }
        }
    }

    /// After the forward pass: `item`'s positions are in the cache, and `token` came out if it sampled.
    pub fn advance(&mut self, item: &Item, token: Option<u32>) {
        self.begin(item);
        if let Some(token) = token {
            self.settle_running(item.running, token);
        }
    }

    /// The step with `item` is on its way: for whatever is planned next its positions are in the cache, because a device
    /// runs steps in order. If it samples, its token is pending until [`Scheduler::settle`].
    pub fn begin(&mut self, item: &Item) {
        let entry = &mut self.running[item.running];
        entry.computed = item.start + item.len;
        if item.samples {
            entry.tokens.push(PENDING);
            entry.pending += 1;
            entry.phase = Phase::Generation;
        }
        self.register(item.running);
    }

    /// The oldest pending token of request `id` is `token`. `near` is where it stood in the batch at the launch; since
    /// then it can only have moved to the front. A request that has left the batch needs no token.
    pub fn settle(&mut self, id: RequestId, near: usize, token: u32) {
        let first = near.min(self.running.len().wrapping_sub(1));
        if let Some(index) =
            (0..self.running.len().min(first.saturating_add(1))).rev().find(|&i| self.running[i].id == id)
        {
            self.settle_running(index, token);
        } else if let Some(paused) = self.waiting.iter_mut().find(|entry| entry.id == id && entry.pending > 0) {
            paused.settle(token);
        }
    }

    fn settle_running(&mut self, index: usize, token: u32) {
        self.running[index].settle(token);
        self.register(index);
    }

    /// Offer full blocks whose tokens are known for reuse.
    fn register(&mut self, index: usize) {
        if !self.pool.reuse_enabled() {
            return;
        }
        let entry = &mut self.running[index];
        let per_block = self.pool.tokens_per_block();
        let (mut done, mut content) = entry.registered;
        let known = entry.computed.min(entry.tokens.len() - entry.pending);
        let end = if self.config.reuse_output { known } else { known.min(entry.prompt_len) };
        while done + per_block <= end {
            let block = entry.blocks[done / per_block];
            content = self.pool.register(block, content, &entry.tokens[done..done + per_block]);
            done += per_block;
        }
        entry.registered = (done, content);
    }

    /// How many steps in a row `plan`, just made, stays the same but for positions, if nothing arrives meanwhile: up to
    /// and including the step in which a request produces its last token. 0 when it is not a pure generation step.
    pub fn steps_ahead(&self, plan: &Plan) -> usize {
        let generates = !self.running.is_empty() && plan.generation_requests == self.running.len();
        if !generates || plan.context_requests > 0 || !plan.pause.is_empty() {
            return 0;
        }
        let left = |e: &Entry| e.max_new_tokens.saturating_sub(e.generated()).max(1);
        let most = self.running.iter().map(left).min().unwrap_or(1);
        // What is registered, or taken from what is registered, may change which prefix the head of the queue finds.
        if self.pool.reuse_enabled() {
            let blocked_for_good =
                plan.decisions.iter().all(|d| matches!(d.reason, Reason::BatchFull | Reason::StaticBatchRunning));
            if self.config.reuse_output || !blocked_for_good {
                return 1;
            }
        }
        if self.config.policy != Policy::MaxUtilization {
            return most; // every block was set aside
        }
        let fits = |steps: usize| {
            let needed = |e: &Entry| self.pool.blocks_for(e.computed + steps).saturating_sub(e.blocks.len());
            self.running.iter().map(needed).sum::<usize>() <= self.pool.free()
        };
        if fits(most) {
            return most;
        }
        let (mut fit, mut no_fit) = (1, most);
        while no_fit - fit > 1 {
            let middle = fit + (no_fit - fit) / 2;
            if fits(middle) { fit = middle } else { no_fit = middle }
        }
        fit
    }

    /// Carry out the same generation step `steps` times at once: what `plan`, `apply` and `advance` would do, for at most
    /// as many steps as [`Scheduler::steps_ahead`] said. `token` gives the token of a request at a position.
    pub fn run_ahead(&mut self, steps: usize, mut token: impl FnMut(&Entry, usize) -> u32) {
        for index in 0..self.running.len() {
            let entry = &mut self.running[index];
            let needed = self.pool.blocks_for(entry.computed + steps);
            while entry.blocks.len() < needed {
                let block = self.pool.allocate().expect("the blocks of steps ahead were counted");
                entry.blocks.push(block);
            }
            for _ in 0..steps {
                let next = token(entry, entry.tokens.len());
                entry.tokens.push(next);
            }
            entry.computed += steps;
            self.register(index);
        }
    }

    /// Take a request out of the batch. Later requests move up by one.
    pub fn finish(&mut self, running: usize) -> Entry {
        let mut entry = self.running.remove(running);
        self.pool.release_all(&mut entry.blocks);
        entry
    }

    /// Take a request out wherever it is.
    pub fn abort(&mut self, id: RequestId) -> Option<Entry> {
        if let Some(index) = self.running.iter().position(|e| e.id == id) {
            return Some(self.finish(index));
        }
        let index = self.waiting.iter().position(|e| e.id == id)?;
        self.waiting.remove(index)
    }
}
