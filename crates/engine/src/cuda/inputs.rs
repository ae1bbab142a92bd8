//! What kernels need to know of a step, packed into one buffer so that one copy brings it to the GPU.

use strobe_kernels_cpu::SeqSpan;
use strobe_kernels_cuda::{DevicePtr, Draw, score_elements};

use crate::step::{StepInputs, StepLimits};

/// Where the parts of a packed step lie, in words of 32 bits. It depends on counts only, never on content, so that a
/// captured graph finds everything at the same place every time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Layout {
    rows: usize,
    sampled: usize,
    decode: usize,
    prefill: usize,
    tiles: usize,
}

/// Words of a [`SeqSpan`].
const SPAN: usize = size_of::<SeqSpan>() / 4;
/// Words of a [`Draw`].
const DRAW: usize = Draw::WORDS;

impl Layout {
    /// A decode step padded to `rows` requests.
    pub(super) fn decode(rows: usize) -> Layout {
        Layout { rows, sampled: rows, decode: rows, prefill: 0, tiles: 0 }
    }

    /// Rows, padding included.
    pub(super) fn rows_padded(&self) -> usize {
        self.rows
    }

    /// Sampled rows, padding included.
    pub(super) fn sampled_padded(&self) -> usize {
        self.sampled
    }

    /// Requests with one row, padding included.
    pub(super) fn decode_padded(&self) -> usize {
        self.decode
    }

    pub(super) fn last_rows(&self) -> usize {
        self.rows
    }

    pub(super) fn positions(&self) -> usize {
        2 * self.rows
    }

    pub(super) fn slots(&self) -> usize {
        3 * self.rows
    }

    pub(super) fn sampled(&self) -> usize {
        4 * self.rows
    }

    /// One word: not 0 where nobody reads logits, only their maxima.
    pub(super) fn logits_spared(&self) -> usize {
        self.sampled() + self.sampled
    }

    pub(super) fn decode_spans(&self) -> usize {
        // Spans and what follows are read 16 bytes at a time.
        (self.logits_spared() + 1).next_multiple_of(4)
    }

    pub(super) fn prefill_spans(&self) -> usize {
        self.decode_spans() + SPAN * self.decode
    }

    pub(super) fn tiles(&self) -> usize {
        self.prefill_spans() + SPAN * self.prefill
    }

    /// Offsets of the unfused attention's score matrices, 64 bits each.
    pub(super) fn score_offsets(&self) -> usize {
        (self.tiles() + 2 * self.tiles).next_multiple_of(2)
    }

    pub(super) fn tables(&self) -> usize {
        self.score_offsets() + 2 * self.prefill
    }

    /// Words that a step of `limits` needs at most, with block tables of `table` entries.
    pub(super) fn most(limits: StepLimits, table: usize) -> usize {
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
pub(super) struct Packed {
    /// Where things are.
    pub layout: Layout,
    /// Words used.
    pub words: usize,
    /// Word of the first [`Draw`]; `None` when every row is greedy and free.
    pub draws: Option<usize>,
    /// Whether nobody reads logits, only their maxima.
    pub logits_spared: bool,
    /// Sampled rows, without padding.
    pub sampled: usize,
    /// Requests with one row.
    pub decode: usize,
    /// Requests with several rows (or, without fused attention, in their prompt).
    pub prefill: usize,
    /// How many of those, the first ones, are left to unfused attention.
    pub unfused: usize,
    /// Tiles of rows of the others.
    pub tiles: usize,
    /// Whether no request has two spans, so that every key but a row's own was in the cache before the step.
    pub one_span_each: bool,
    /// Most keys of a request with one row.
    pub longest: usize,
    /// Whether sampled row i is row i for all rows.
    pub all_sampled: bool,
    /// Bytes of all score matrices of unfused attention.
    pub score_elements: usize,
    /// Most rows and keys of one unfused request.
    pub widest: (usize, usize),
}

impl Packed {
    /// Whether attention of single rows may read the keys before a row's own while the launch before it runs. A request that
    /// is computed again may have a row of its prompt and a row of its output in one step, and the second reads what the
    /// step itself writes. Fused attention of prompts has waited for that; nothing else between the two has.
    pub(super) fn settled(&self) -> bool {
        self.one_span_each || self.tiles > 0
    }
}

/// How to pack.
pub(super) struct PackOptions {
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
pub(super) fn is_decode(step: &StepInputs) -> bool {
    step.context_seqs == 0 && step.seqs.len() == step.tokens.len() && step.sampled.len() == step.tokens.len()
}

/// Pack `step` into `out`; a decode step is padded to `padded` rows where given.
pub(super) fn pack(step: &StepInputs, options: &PackOptions, padded: Option<usize>, out: &mut [u32]) -> Packed {
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
        unfused: if options.context_fmha { 0 } else { step.context_seqs },
        tiles,
        one_span_each: step.context_seqs == 0,
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
    packed.logits_spared = plain && !step.keep_logits;
    out[layout.logits_spared()] = u32::from(packed.logits_spared);
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
            out[draws + DRAW * index..][..DRAW].copy_from_slice(&draw.words());
        }
        packed.draws = Some(draws);
        packed.words = draws + DRAW * step.draws.len();
    }
    packed
}

/// Address of a word.
pub(super) fn at(base: DevicePtr, word: usize) -> DevicePtr {
    base + 4 * word as u64
}

/// What the numbers of a packed step may reach.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Blocks of the cache.
    pub blocks: usize,
    /// Limits of a step.
    pub limits: StepLimits,
    /// Rows that the step before has sampled.
    pub last_sampled: usize,
}

/// Follow every number in a packed step the way kernels do: one that leads out of its buffer is named. A kernel that
/// follows it takes the whole process down.
pub(super) fn check(packed: &Packed, words: &[u32], options: &PackOptions, bounds: &Bounds) -> Result<(), String> {
    let layout = packed.layout;
    let within = |what: &str, found: usize, end: usize| {
        if found < end { Ok(()) } else { Err(format!("{what} {found} of {end}")) }
    };
    let word = |at: usize| words[at] as usize;
    within("word", packed.words, words.len() + 1)?;
    within("row", layout.rows, bounds.limits.tokens + 1)?;
    within("sampled row", layout.sampled, bounds.limits.sampled + 1)?;
    for row in 0..layout.rows {
        match words[layout.last_rows() + row] as i32 {
            ..0 => within("token", word(row), bounds.vocab)?,
            last => within("row of the step before", last as usize, bounds.last_sampled)?,
        }
        within("position", word(layout.positions() + row), bounds.limits.positions)?;
        if words[layout.slots() + row] as i32 >= 0 {
            within("slot", word(layout.slots() + row), bounds.blocks * options.tokens_per_block)?;
        }
    }
    for row in 0..layout.sampled {
        within("row to sample", word(layout.sampled() + row), layout.rows)?;
    }
    let spans = |first: usize, count: usize| (0..count).map(move |index| first + SPAN * index);
    for at in spans(layout.decode_spans(), layout.decode).chain(spans(layout.prefill_spans(), packed.prefill)) {
        let (start, rows, keys, table) = (word(at), word(at + 1), word(at + 2), word(at + 3));
        within("last row of a span", start + rows, layout.rows + 1)?;
        within("keys", keys, bounds.limits.positions + 1)?;
        for entry in 0..keys.div_ceil(options.tokens_per_block) {
            within("table entry", layout.tables() + table + entry, packed.words)?;
            within("block", word(layout.tables() + table + entry), bounds.blocks)?;
        }
    }
    for tile in 0..packed.tiles {
        let (span, part) = (word(layout.tiles() + 2 * tile), word(layout.tiles() + 2 * tile + 1));
        within("tile's span", span, packed.prefill)?;
        let rows = word(layout.prefill_spans() + SPAN * span + 1);
        within("tile", part * options.tile_rows, rows)?;
    }
    let most = score_elements(options.heads, bounds.limits.tokens, bounds.limits.positions);
    within("score", packed.score_elements, most + 1)?;
    for span in 0..packed.unfused {
        let at = layout.score_offsets() + 2 * span;
        within("first score", word(at) | word(at + 1) << 32, packed.score_elements)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::block_pool::BlockPool;
    use crate::cuda::buckets;
    use crate::sampling::Draw as HostDraw;
    use crate::scheduler::{Entry, Plan, Policy, Scheduler, SchedulerConfig};
    use crate::selftest::Random;
    use strobe_model::program::Operands;

    #[test]
    fn parts_lie_apart_and_where_kernels_can_read_them() {
        for rows in [1, 2, 3, 5, 96] {
            for (sampled, decode, prefill, tiles) in [(rows, rows, 0, 0), (1, 0, 1, 1), (0, 1, 2, 7), (3, 3, 3, 4)] {
                let layout = Layout { rows, sampled, decode, prefill, tiles };
                let parts = [
                    (0, rows, 1),
                    (layout.last_rows(), rows, 1),
                    (layout.positions(), rows, 1),
                    (layout.slots(), rows, 1),
                    (layout.sampled(), sampled, 1),
                    (layout.logits_spared(), 1, 1),
                    (layout.decode_spans(), SPAN * decode, 4),
                    (layout.prefill_spans(), SPAN * prefill, 4),
                    (layout.tiles(), 2 * tiles, 2),
                    (layout.score_offsets(), 2 * prefill, 2),
                    (layout.tables(), 0, 1),
                ];
                for (index, &(start, words, alignment)) in parts.iter().enumerate() {
                    assert!(start.is_multiple_of(alignment), "part {index} of {layout:?}");
                    assert!(
                        parts.get(index + 1).is_none_or(|next| start + words <= next.0),
                        "part {index} of {layout:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn padding_reads_and_writes_nothing() {
        let options = PackOptions { tokens_per_block: 16, tile_rows: 64, context_fmha: true, heads: 8 };
        let limits = StepLimits { tokens: 8, sampled: 8, requests: 8, positions: 64 };
        let bounds = Bounds { vocab: 100, blocks: 4, limits, last_sampled: 0 };
        let mut step = StepInputs::empty();
        step.push(&[7], 20, &[3, 1], false);
        step.sampled.push(0);
        let mut words = vec![u32::MAX; Layout::most(limits, 4)];
        let packed = pack(&step, &options, Some(4), &mut words);
        assert_eq!(check(&packed, &words, &options, &bounds), Ok(()));
        let layout = packed.layout;
        assert_eq!((layout.rows_padded(), layout.decode_padded(), packed.decode), (4, 4, 1));
        assert_eq!(words[layout.slots()..][..4], [16 + 4, u32::MAX, u32::MAX, u32::MAX]);
        assert_eq!(words[layout.decode_spans() + SPAN..][..SPAN], [1, 1, 0, 0]);
    }

    #[test]
    fn keys_that_the_step_itself_writes_are_not_settled() {
        let limits = StepLimits { tokens: 8, sampled: 8, requests: 8, positions: 64 };
        let settled = |step: &StepInputs, context_fmha: bool| {
            let options = PackOptions { tokens_per_block: 16, tile_rows: 64, context_fmha, heads: 8 };
            pack(step, &options, None, &mut vec![0; Layout::most(limits, 4)]).settled()
        };
        // A request that goes on: its keys are of earlier steps.
        let mut decode = StepInputs::empty();
        decode.push(&[7], 20, &[3, 1], false);
        assert!(settled(&decode, true) && settled(&decode, false));
        // One that is computed again, a row of its prompt and a row of its output: the second reads what the first writes.
        let mut again = StepInputs::empty();
        again.push(&[5], 0, &[3], true);
        again.push(&[7], 1, &[3], false);
        assert!(!settled(&again, true) && !settled(&again, false));
        // With several rows of a prompt fused attention has waited; unfused attention has not.
        let mut long = StepInputs::empty();
        long.push(&[5, 6], 0, &[3], true);
        long.push(&[7], 2, &[3], false);
        assert!(settled(&long, true) && !settled(&long, false));
    }

    #[test]
    fn logits_are_spared_where_nobody_reads_them() {
        let options = PackOptions { tokens_per_block: 16, tile_rows: 64, context_fmha: true, heads: 8 };
        let limits = StepLimits { tokens: 8, sampled: 8, requests: 8, positions: 64 };
        let spared = |keep_logits: bool, draw: Option<HostDraw>, banned: usize| {
            let mut step = StepInputs::empty();
            step.push(&[7], 20, &[3, 1], false);
            step.sampled.push(0);
            step.keep_logits = keep_logits;
            step.banned.resize(banned, 9);
            step.draws.extend(draw.map(|draw| (draw, 0..banned)));
            let mut words = vec![u32::MAX; Layout::most(limits, 4)];
            let packed = pack(&step, &options, Some(4), &mut words);
            assert_eq!(words[packed.layout.logits_spared()], u32::from(packed.logits_spared));
            packed.logits_spared
        };
        let greedy = HostDraw { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 1, index: 0 };
        let warm = HostDraw { temperature: 0.7, ..greedy };
        assert!(spared(false, None, 0) && spared(false, Some(greedy), 0));
        assert!(!spared(true, None, 0) && !spared(true, Some(greedy), 0));
        assert!(!spared(false, Some(warm), 0) && !spared(false, Some(greedy), 1));
    }

    #[test]
    fn numbers_that_lead_astray_are_found() {
        let options = PackOptions { tokens_per_block: 16, tile_rows: 64, context_fmha: true, heads: 8 };
        let limits = StepLimits { tokens: 8, sampled: 8, requests: 8, positions: 64 };
        let bounds = Bounds { vocab: 100, blocks: 4, limits, last_sampled: 1 };
        let judge = |change: &dyn Fn(&mut StepInputs)| {
            let mut step = StepInputs::empty();
            step.push(&[7, 8], 20, &[3, 1], true);
            change(&mut step);
            let mut words = vec![0; Layout::most(limits, 4)];
            let packed = pack(&step, &options, None, &mut words);
            check(&packed, &words, &options, &bounds)
        };
        assert_eq!(judge(&|_| {}), Ok(()));
        assert!(judge(&|step| step.tokens[1] = crate::scheduler::PENDING).unwrap_err().contains("token"));
        assert!(judge(&|step| step.from_last[0] = 1).unwrap_err().contains("step before"));
        assert!(judge(&|step| step.block_tables[0] = 4).unwrap_err().contains("block"));
        assert!(judge(&|step| step.sampled.push(2)).unwrap_err().contains("row to sample"));
    }

    /// Requests of all lengths come, run out of blocks and end, with a step on its way while the next is planned: every
    /// number that a kernel would follow must be good.
    fn traffic(seed: u64, policy: Policy, reuse: bool, context_fmha: bool) -> (usize, usize) {
        const BLOCKS: usize = 30;
        const VOCAB: usize = 50;
        let (batch, tokens, tokens_per_block, positions) = (8, 96, 16, BLOCKS * 16);
        let limits = StepLimits { tokens, sampled: batch, requests: batch, positions };
        let config = SchedulerConfig {
            policy,
            max_batch_size: batch,
            max_num_tokens: tokens,
            max_seq_len: positions,
            chunked_context: true,
            chunk_unit: tokens_per_block,
            reuse_output: context_fmha,
        };
        let options = PackOptions { tokens_per_block, tile_rows: 32, context_fmha, heads: 8 };
        let mut random = Random::new(seed);
        let mut scheduler = Scheduler::new(config, BlockPool::new(BLOCKS, tokens_per_block, reuse));
        let bytes = Operands::plain(2, 2, 2);
        let mut inputs = StepInputs::new(limits, tokens_per_block, bytes);
        let mut words = vec![u32::MAX; Layout::most(limits, positions.div_ceil(tokens_per_block))];
        let (mut plan, mut last_rows) = (Plan::default(), HashMap::new());
        // Requests that the step on its way has sampled, and where they stood.
        let mut flying: Vec<(u64, usize)> = Vec::new();
        let (mut submitted, mut steps, mut both) = (0u64, 0, 0);
        while submitted < 60 || !scheduler.is_idle() {
            if submitted < 60 && random.below(2) == 0 {
                let length = random.pick(&[1, 2, 15, 16, 17, 40, 97, 150, 260]);
                let prompt = if random.below(3) == 0 { vec![1; length] } else { random.tokens(length, VOCAB) };
                let output = random.pick(&[1, 2, 7, 30, 90]);
                let slot = submitted as u32;
                let entry = Entry::new(submitted, slot, prompt, output, tokens_per_block, positions);
                scheduler.submit(entry).unwrap();
                submitted += 1;
            }
            scheduler.plan(&mut plan);
            scheduler.apply(&plan);
            let last_row = |slot: u32| last_rows.get(&slot).copied().unwrap_or(-1);
            inputs.fill(&plan.items, scheduler.running(), last_row);
            for _ in 0..inputs.sampled.len() {
                let draw = HostDraw { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 1, index: 0 };
                inputs.push_draw(draw, &[3, 4]);
            }
            if !plan.items.is_empty() {
                let fits = |bucket: &usize| *bucket >= inputs.tokens.len();
                let padded = if is_decode(&inputs) { buckets(batch).into_iter().find(fits) } else { None };
                words.fill(u32::MAX);
                let packed = pack(&inputs, &options, padded, &mut words);
                let bounds = Bounds { vocab: VOCAB, blocks: BLOCKS, limits, last_sampled: flying.len() };
                assert_eq!(check(&packed, &words, &options, &bounds), Ok(()), "{packed:?}");
                steps += 1;
                both += usize::from(packed.unfused > 0 && packed.prefill > packed.unfused);
            }
            let before = std::mem::take(&mut flying);
            for item in &plan.items {
                let entry = &scheduler.running()[item.running];
                if item.samples {
                    last_rows.insert(entry.slot, flying.len() as i32);
                    flying.push((entry.id, item.running));
                }
                scheduler.begin(item);
            }
            for (id, near) in before {
                scheduler.settle(id, near, random.below(VOCAB) as u32);
            }
            let ends = |entry: &Entry| entry.generated() >= entry.max_new_tokens || random.below(200) == 0;
            let mut ends: Vec<bool> = scheduler.running().iter().map(ends).collect();
            while let Some(end) = ends.pop() {
                if end {
                    scheduler.finish(ends.len());
                }
            }
        }
        (steps, both)
    }

    #[test]
    fn every_step_of_a_busy_engine_stays_inside_its_buffers() {
        let mut recomputed_beside_prompts = 0;
        for seed in 0..4 {
            for policy in [Policy::MaxUtilization, Policy::GuaranteedNoEvict] {
                for (reuse, context_fmha) in [(false, true), (true, true), (false, false), (true, false)] {
                    let (steps, both) = traffic(seed, policy, reuse, context_fmha);
                    assert!(steps > 60, "{steps}");
                    recomputed_beside_prompts += both;
                }
            }
        }
        assert!(recomputed_beside_prompts > 0, "no step had both kinds of spans with several rows");
    }
}
