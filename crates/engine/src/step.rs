//! One step: the packed batch.

use std::ops::Range;

use strobe_kernels_cpu::SeqSpan;
use strobe_model::program::{Operands, SpanShape, StepShape};

use crate::sampling::Draw;
use crate::scheduler::{Entry, Item, PENDING, Phase};

/// Limits of a step; every buffer is made for them once.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Most packed tokens.
    pub tokens: usize,
    /// Most rows whose logits are computed.
    pub sampled: usize,
    /// Most requests.
    pub requests: usize,
    /// Most positions of one request.
    pub positions: usize,
}

/// Room for end tokens and stop ids that is made at once; a request with more makes a step allocate.
const BANNED_PER_REQUEST: usize = 16;

/// The packed batch of a step. Context rows come first.
pub struct StepInputs {
    /// Token of each packed row.
    pub tokens: Vec<u32>,
    /// Rows and cache of each request.
    pub seqs: Vec<SeqSpan>,
    /// How many of `seqs` are in their prompt.
    pub context_seqs: usize,
    /// Cache blocks of all requests, see [`SeqSpan::table_start`].
    pub block_tables: Vec<u32>,
    /// Packed rows whose logits are wanted.
    pub sampled: Vec<u32>,
    /// Whether the caller reads logits after the step; without it a backend may keep no more of them than tokens need.
    pub keep_logits: bool,
    /// How each sampled row's token is drawn, and which of `banned` it may not be; rows beyond the end are greedy.
    pub draws: Vec<(Draw, Range<usize>)>,
    /// Tokens that some rows may not draw.
    pub banned: Vec<u32>,
    /// The same requests, as far as cost is concerned.
    pub spans: Vec<SpanShape>,
    /// For each packed row: the sampled row of the step before that yields its token, where the host did not know it when
    /// the step was planned; -1 where `tokens` holds it.
    pub from_last: Vec<i32>,
    operands: Operands,
}

impl StepInputs {
    /// Empty inputs with room for `limits`.
    pub fn new(limits: StepLimits, tokens_per_block: usize, operands: Operands) -> StepInputs {
        let spans = 2 * limits.requests; // see `fill`
        StepInputs {
            tokens: Vec::with_capacity(limits.tokens),
            seqs: Vec::with_capacity(spans),
            context_seqs: 0,
            block_tables: Vec::with_capacity(spans * limits.positions.div_ceil(tokens_per_block)),
            sampled: Vec::with_capacity(limits.sampled),
            keep_logits: false,
            draws: Vec::with_capacity(limits.sampled),
            banned: Vec::with_capacity(BANNED_PER_REQUEST * limits.sampled),
            spans: Vec::with_capacity(spans),
            from_last: Vec::with_capacity(limits.tokens),
            operands,
        }
    }

    /// Inputs that hold nothing and have room for nothing.
    pub fn empty() -> StepInputs {
        let limits = StepLimits { tokens: 0, sampled: 0, requests: 0, positions: 0 };
        StepInputs::new(limits, 1, Operands::plain(0, 0, 0))
    }

    /// Forget the last step.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.seqs.clear();
        self.context_seqs = 0;
        self.block_tables.clear();
        self.sampled.clear();
        self.draws.clear();
        self.banned.clear();
        self.spans.clear();
        self.from_last.clear();
    }

    /// Add positions `start..start + tokens.len()` of a request that holds `blocks`; context rows must come first.
    pub fn push(&mut self, tokens: &[u32], start: usize, blocks: &[u32], context: bool) {
        let (q_start, q_len, kv_len) = (self.tokens.len(), tokens.len(), start + tokens.len());
        self.seqs.push(SeqSpan {
            q_start: q_start as u32,
            q_len: q_len as u32,
            kv_len: kv_len as u32,
            table_start: self.block_tables.len() as u32,
        });
        self.context_seqs += usize::from(context);
        self.tokens.extend_from_slice(tokens);
        self.from_last.resize(self.tokens.len(), -1);
        self.block_tables.extend_from_slice(blocks);
        self.spans.push(SpanShape { rows: q_len as u64, keys: kv_len as u64, context });
    }

    /// Fill from a plan's items.
    ///
    /// Output that is computed again after a pause goes in as a generation span of its own. Prompts and generation may
    /// run on different kernels, which differ in the last bit, and a request must get again what it got before.
    ///
    /// `last_row` says which sampled row of the step before gives the token that the request in a slot waits for.
    pub fn fill(&mut self, items: &[Item], running: &[Entry], last_row: impl Fn(u32) -> i32) {
        self.clear();
        let prompt_end = |item: &Item, entry: &Entry| match item.phase {
            Phase::Context => entry.prompt_len.clamp(item.start, item.start + item.len),
            Phase::Generation => item.start,
        };
        for item in items {
            let entry = &running[item.running];
            let end = prompt_end(item, entry);
            if item.start < end {
                self.push(&entry.tokens[item.start..end], item.start, &entry.blocks, true);
            }
            if item.samples {
                // Of an item that goes on below this is not yet the last row.
                self.sampled.push(self.tokens.len().saturating_sub(1) as u32);
            }
        }
        let mut sampled = 0;
        for item in items {
            let entry = &running[item.running];
            let (start, end) = (prompt_end(item, entry), item.start + item.len);
            if start < end {
                self.push(&entry.tokens[start..end], start, &entry.blocks, false);
                if self.tokens.last() == Some(&PENDING)
                    && let Some(last) = self.from_last.last_mut()
                {
                    *last = last_row(entry.slot);
                }
                if item.samples {
                    self.sampled[sampled] = self.tokens.len() as u32 - 1;
                }
            }
            sampled += usize::from(item.samples);
        }
    }

    /// How the next sampled row's token is drawn.
    pub fn push_draw(&mut self, draw: Draw, banned: &[u32]) {
        let start = self.banned.len();
        self.banned.extend_from_slice(banned);
        self.draws.push((draw, start..self.banned.len()));
    }

    /// What the cost of this step depends on.
    pub fn shape(&self) -> StepShape<'_> {
        StepShape {
            spans: &self.spans,
            tokens: self.tokens.len() as u64,
            sampled: self.sampled.len() as u64,
            operands: self.operands,
            experts_used: &[],
        }
    }

    /// The same without its requests, for whoever keeps it longer than these inputs.
    pub(crate) fn shape_alone(&self) -> StepShape<'static> {
        let StepShape { tokens, sampled, operands, .. } = self.shape();
        StepShape { spans: &[], tokens, sampled, operands, experts_used: &[] }
    }
}
