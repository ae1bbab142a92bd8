//! What kernels need to know of a step, packed into one buffer so that one copy brings it to the GPU.

use strobe_kernels_cpu::SeqSpan;
use strobe_kernels_cuda::{DevicePtr, Draw, score_elements};

use crate::step::{StepInputs, StepLimits};

/// Where the parts of a packed step lie, in words of 32 bits. It depends on counts only, never on content, so that a
/// captured graph finds everything at the same place every time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    rows: usize,
    sampled: usize,
    decode: usize,
    prefill: usize,
    tiles: usize,
}

/// Words of a [`SeqSpan`].
const SPAN: usize = size_of::<SeqSpan>() / 4;
/// Words of a [`Draw`].
const DRAW: usize = size_of::<Draw>() / 4;

impl Layout {
    /// A decode step padded to `rows` requests.
    pub fn decode(rows: usize) -> Layout {
        Layout { rows, sampled: rows, decode: rows, prefill: 0, tiles: 0 }
    }

    /// Rows, padding included.
    pub fn rows_padded(&self) -> usize {
        self.rows
    }

    /// Sampled rows, padding included.
    pub fn sampled_padded(&self) -> usize {
        self.sampled
    }

    /// Requests with one row, padding included.
    pub fn decode_padded(&self) -> usize {
        self.decode
    }

    pub fn last_rows(&self) -> usize {
        self.rows
    }

    pub fn positions(&self) -> usize {
        2 * self.rows
    }

    pub fn slots(&self) -> usize {
        3 * self.rows
    }

    pub fn sampled(&self) -> usize {
        4 * self.rows
    }

    pub fn decode_spans(&self) -> usize {
        // Spans and what follows are read 16 bytes at a time.
        (self.sampled() + self.sampled).next_multiple_of(4)
    }

    pub fn prefill_spans(&self) -> usize {
        self.decode_spans() + SPAN * self.decode
    }

    pub fn tiles(&self) -> usize {
        self.prefill_spans() + SPAN * self.prefill
    }

    /// Offsets of the unfused attention's score matrices, 64 bits each.
    pub fn score_offsets(&self) -> usize {
        (self.tiles() + 2 * self.tiles).next_multiple_of(2)
    }

    pub fn tables(&self) -> usize {
        self.score_offsets() + 2 * self.prefill
    }

    /// Words that a step of `limits` needs at most, with block tables of `table` entries.
    pub fn most(limits: StepLimits, table: usize) -> usize {
        let spans = 2 * limits.requests;
        let whole = Layout {
            rows: limits.tokens,
            sampled: limits.sampled,
            decode: spans,
            prefill: spans,
            tiles: limits.tokens + spans,
        };
        whole.tables() + spans * table + 2 + DRAW * limits.sampled
    }
}

/// A packed step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Packed {
    /// Where things are.
    pub layout: Layout,
    /// Words used.
    pub words: usize,
    /// Word of the first [`Draw`]; `None` when every row is greedy and free.
    pub draws: Option<usize>,
    /// Sampled rows, without padding.
    pub sampled: usize,
    /// Requests with one row.
    pub decode: usize,
    /// Requests with several rows (or, without fused attention, in their prompt).
    pub prefill: usize,
    /// Tiles of rows of those.
    pub tiles: usize,
    /// Most keys of a request with one row.
    pub longest: usize,
    /// Whether sampled row i is row i for all rows.
    pub all_sampled: bool,
    /// Bytes of all score matrices of unfused attention.
    pub score_elements: usize,
    /// Most rows and keys of one unfused request.
    pub widest: (usize, usize),
}

/// How to pack.
pub struct PackOptions {
    /// Tokens of a block.
    pub tokens_per_block: usize,
    /// Rows of a tile of fused prefill attention.
    pub tile_rows: usize,
    /// Fused attention for prompts.
    pub context_fmha: bool,
    /// Query heads, for the score matrices.
    pub heads: usize,
}

/// Whether a step is one that graphs are made for: every request has one row, and all are sampled.
pub fn is_decode(step: &StepInputs) -> bool {
    step.context_seqs == 0 && step.seqs.len() == step.tokens.len() && step.sampled.len() == step.tokens.len()
}

/// Pack `step` into `out`; a decode step is padded to `padded` rows where given.
pub fn pack(step: &StepInputs, options: &PackOptions, padded: Option<usize>, out: &mut [u32]) -> Packed {
    let unfused = |index: usize| !options.context_fmha && index < step.context_seqs;
    let one_row = |(index, seq): &(usize, &SeqSpan)| seq.q_len == 1 && !unfused(*index);
    let spans = || step.seqs.iter().enumerate();
    let decode = spans().filter(one_row).count();
    let prefill = step.seqs.len() - decode;
    let tiles_of = |seq: &SeqSpan| (seq.q_len as usize).div_ceil(options.tile_rows);
    let tiled = |(index, seq): &(usize, &SeqSpan)| !one_row(&(*index, *seq)) && !unfused(*index);
    let tiles: usize = spans().filter(tiled).map(|(_, seq)| tiles_of(seq)).sum();
    let rows = step.tokens.len();
    let layout = match padded {
        Some(bucket) => Layout::decode(bucket),
        None => Layout { rows, sampled: step.sampled.len(), decode, prefill, tiles },
    };
    let mut packed = Packed {
        layout,
        sampled: step.sampled.len(),
        decode,
        prefill,
        tiles,
        all_sampled: step.sampled.len() == rows && step.sampled.iter().enumerate().all(|(i, &row)| row as usize == i),
        ..Packed::default()
    };
    // Padding: a row that is written nowhere, of a request that attends to nothing.
    for row in rows..layout.rows {
        out[row] = 0;
        out[layout.last_rows() + row] = u32::MAX;
        out[layout.positions() + row] = 0;
        out[layout.slots() + row] = u32::MAX;
    }
    for row in step.sampled.len()..layout.sampled {
        out[layout.sampled() + row] = row as u32;
    }
    for row in decode..layout.decode {
        let at = layout.decode_spans() + SPAN * row;
        out[at..at + SPAN].copy_from_slice(&[row as u32, 1, 0, 0]);
    }
    out[..rows].copy_from_slice(&step.tokens);
    for (to, from) in out[layout.last_rows()..].iter_mut().zip(&step.from_last) {
        *to = *from as u32;
    }
    // A token that is still on its way has a stand-in outside the vocabulary here.
    for row in 0..rows {
        if out[layout.last_rows() + row] as i32 >= 0 {
            out[row] = 0;
        }
    }
    out[layout.sampled()..layout.sampled() + step.sampled.len()].copy_from_slice(&step.sampled);
    let (mut one, mut more, mut tile) = (layout.decode_spans(), layout.prefill_spans(), layout.tiles());
    for (index, seq) in spans() {
        let words = [seq.q_start, seq.q_len, seq.kv_len, seq.table_start];
        let first = (seq.kv_len - seq.q_len) as usize;
        for row in 0..seq.q_len as usize {
            let position = first + row;
            let block = step.block_tables[seq.table_start as usize + position / options.tokens_per_block] as usize;
            let slot = block * options.tokens_per_block + position % options.tokens_per_block;
            out[layout.positions() + seq.q_start as usize + row] = position as u32;
            out[layout.slots() + seq.q_start as usize + row] = slot as u32;
        }
        if one_row(&(index, seq)) {
            out[one..one + SPAN].copy_from_slice(&words);
            one += SPAN;
            packed.longest = packed.longest.max(seq.kv_len as usize);
            continue;
        }
        let number = (more - layout.prefill_spans()) / SPAN;
        out[more..more + SPAN].copy_from_slice(&words);
        more += SPAN;
        if unfused(index) {
            let at = layout.score_offsets() + 2 * number;
            let offset = packed.score_elements as u64;
            out[at..at + 2].copy_from_slice(&[offset as u32, (offset >> 32) as u32]);
            packed.score_elements += score_elements(options.heads, seq.q_len as usize, seq.kv_len as usize);
            packed.widest = (packed.widest.0.max(seq.q_len as usize), packed.widest.1.max(seq.kv_len as usize));
        } else {
            // The last tile sees the most keys: heavy ones first.
            for part in (0..tiles_of(seq)).rev() {
                out[tile..tile + 2].copy_from_slice(&[number as u32, part as u32]);
                tile += 2;
            }
        }
    }
    let tables = layout.tables();
    let end = tables + step.block_tables.len();
    out[tables..end].copy_from_slice(&step.block_tables);
    packed.words = end;
    let plain = step.draws.iter().all(|(draw, banned)| draw.is_greedy() && banned.is_empty());
    if !plain {
        let draws = end.next_multiple_of(2);
        for (index, (draw, banned)) in step.draws.iter().enumerate() {
            let draw = Draw {
                temperature: draw.temperature,
                top_k: draw.top_k,
                top_p: draw.top_p,
                seed: draw.seed,
                index: draw.index,
                banned_start: banned.start as u32,
                banned_len: banned.len() as u32,
            };
            draw_words(&draw, &mut out[draws + DRAW * index..][..DRAW]);
        }
        packed.draws = Some(draws);
        packed.words = draws + DRAW * step.draws.len();
    }
    packed
}

/// A [`Draw`] as the kernel finds it in memory.
fn draw_words(draw: &Draw, out: &mut [u32]) {
    let halves = |value: u64| [value as u32, (value >> 32) as u32];
    let ([s0, s1], [i0, i1]) = (halves(draw.seed), halves(draw.index));
    let words = [
        draw.temperature.to_bits(),
        draw.top_k,
        draw.top_p.to_bits(),
        0, // the seed starts on eight bytes
        s0,
        s1,
        i0,
        i1,
        draw.banned_start,
        draw.banned_len,
    ];
    out.copy_from_slice(&words);
}

/// Address of a word.
pub fn at(base: DevicePtr, word: usize) -> DevicePtr {
    base + 4 * word as u64
}
