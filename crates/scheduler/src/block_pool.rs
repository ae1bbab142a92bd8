//! The pool of KV-cache blocks.
//!
//! - Allocate, free and reuse are O(1); the free list is threaded through the blocks themselves.
//! - A block has a reference count; it is on the free list exactly when the count is 0.
//! - A full block can be registered for prefix reuse. It stays findable after it is freed, until the pool hands it
//!   out again; the free list is in order of release, so the least recently used content goes first.
//! - A lookup never trusts a hash: token ids and the identity of the parent block are compared.
//! - Nothing is allocated after construction.

use std::collections::HashMap;

/// Index of a block in the pool and in the cache buffers.
pub type BlockId = u32;

const NONE: u32 = u32::MAX;

/// Identity of registered content: which tokens, after which parent. Never reused.
pub type ContentId = u64;

/// Parent of the first block of every sequence.
pub const ROOT: ContentId = 0;

#[derive(Clone, Copy, Debug)]
struct Block {
    references: u32,
    previous: u32,
    next: u32,
    /// Registered content, or `None`: `(key in the index, identity, parent's identity)`.
    content: Option<(u64, ContentId, ContentId)>,
}

/// Counters since the pool was made or last reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Blocks handed out, new and reused.
    pub allocated_total: u64,
    /// Blocks handed out with fresh content.
    pub allocated_new: u64,
    /// Blocks handed out because their content matched.
    pub reused: u64,
    /// Full prompt blocks that had to be computed although reuse was on.
    pub missed: u64,
}

/// Fixed set of cache blocks with reference counts and prefix reuse.
pub struct BlockPool {
    tokens_per_block: usize,
    blocks: Vec<Block>,
    /// Token ids of registered blocks, `tokens_per_block` each.
    tokens: Vec<u32>,
    index: HashMap<u64, BlockId>,
    free_head: u32,
    free_tail: u32,
    free: usize,
    next_content: ContentId,
    counters: PoolCounters,
    reuse: bool,
}

impl BlockPool {
    /// A pool of `blocks` blocks of `tokens_per_block` tokens; `reuse` turns prefix reuse on.
    pub fn new(blocks: usize, tokens_per_block: usize, reuse: bool) -> BlockPool {
        let count = blocks as u32;
        let links = (0..count).map(|i| Block {
            references: 0,
            previous: if i == 0 { NONE } else { i - 1 },
            next: if i + 1 == count { NONE } else { i + 1 },
            content: None,
        });
        BlockPool {
            tokens_per_block,
            blocks: links.collect(),
            tokens: if reuse { vec![0; blocks * tokens_per_block] } else { Vec::new() },
            // Twice the room: a map that is at most half full clears its tombstones in place and never grows.
            index: HashMap::with_capacity(if reuse { 2 * blocks } else { 0 }),
            free_head: if count == 0 { NONE } else { 0 },
            free_tail: if count == 0 { NONE } else { count - 1 },
            free: blocks,
            next_content: ROOT + 1,
            counters: PoolCounters::default(),
            reuse,
        }
    }

    /// Blocks in all.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks nobody refers to (their content may still be reusable).
    pub fn free(&self) -> usize {
        self.free
    }

    /// Blocks somebody refers to.
    pub fn used(&self) -> usize {
        self.blocks.len() - self.free
    }

    /// Tokens that fit one block.
    pub fn tokens_per_block(&self) -> usize {
        self.tokens_per_block
    }

    /// Whether prefixes are reused.
    pub fn reuse_enabled(&self) -> bool {
        self.reuse
    }

    /// Counters since construction or the last reset.
    pub fn counters(&self) -> PoolCounters {
        self.counters
    }

    /// Start counting again, and forget reusable content (after a warm-up).
    pub fn reset(&mut self) {
        self.counters = PoolCounters::default();
        self.index.clear();
        self.blocks.iter_mut().for_each(|b| b.content = None);
    }

    /// References to `block`; 0 for a block out of range.
    pub fn references(&self, block: BlockId) -> u32 {
        self.blocks.get(block as usize).map_or(0, |b| b.references)
    }

    /// Blocks needed for `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.tokens_per_block)
    }

    fn unlink(&mut self, id: BlockId) {
        let Block { previous, next, .. } = self.blocks[id as usize];
        match previous {
            NONE => self.free_head = next,
            p => self.blocks[p as usize].next = next,
        }
        match next {
            NONE => self.free_tail = previous,
            n => self.blocks[n as usize].previous = previous,
        }
        self.free -= 1;
    }

    /// Hand out the block that was released longest ago. Its old content is forgotten.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let id = self.free_head;
        if id == NONE {
            return None;
        }
        self.unlink(id);
        let block = &mut self.blocks[id as usize];
        debug_assert_eq!(block.references, 0, "a block on the free list has no references");
        block.references = 1;
        if let Some((key, ..)) = block.content.take()
            && self.index.get(&key) == Some(&id)
        {
            self.index.remove(&key);
        }
        self.counters.allocated_total += 1;
        self.counters.allocated_new += 1;
        Some(id)
    }

    /// Drop one reference; the last one puts the block at the end of the free list.
    pub fn release(&mut self, id: BlockId) {
        let tail = self.free_tail;
        let block = &mut self.blocks[id as usize];
        assert!(block.references > 0, "block {id} released more often than it was taken");
        block.references -= 1;
        if block.references > 0 {
            return;
        }
        block.previous = tail;
        block.next = NONE;
        match tail {
            NONE => self.free_head = id,
            t => self.blocks[t as usize].next = id,
        }
        self.free_tail = id;
        self.free += 1;
    }

    /// Release a request's blocks, last one first, so that prefixes outlive their continuations.
    pub fn release_all(&mut self, blocks: &mut Vec<BlockId>) {
        while let Some(id) = blocks.pop() {
            self.release(id);
        }
    }

    fn key(parent: ContentId, tokens: &[u32]) -> u64 {
        // FNV-1a over parent and ids, then a final mix. Collisions cost a comparison, never a wrong answer.
        let mut hash = 0xcbf2_9ce4_8422_2325u64 ^ parent.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for &token in tokens {
            hash = (hash ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        hash ^ (hash >> 29)
    }

    fn find(&self, parent: ContentId, tokens: &[u32]) -> Option<(BlockId, ContentId)> {
        let id = *self.index.get(&Self::key(parent, tokens))?;
        let (_, identity, held_parent) = self.blocks[id as usize].content?;
        let start = id as usize * self.tokens_per_block;
        let held = self.tokens.get(start..start + self.tokens_per_block)?;
        (held_parent == parent && held == tokens).then_some((id, identity))
    }

    /// How much of `tokens` is already in the cache: full blocks, and how many of those are on the free list. The
    /// last token is never counted, because its logits have to be computed.
    pub fn match_prefix(&self, tokens: &[u32]) -> PrefixMatch {
        let mut found = PrefixMatch::default();
        self.walk_prefix(tokens, |pool, id| {
            found.blocks += 1;
            found.of_those_free += usize::from(pool.blocks[id as usize].references == 0);
        });
        found
    }

    fn walk_prefix(&self, tokens: &[u32], mut visit: impl FnMut(&Self, BlockId)) -> ContentId {
        let mut parent = ROOT;
        if self.reuse {
            let usable = tokens.len().saturating_sub(1) / self.tokens_per_block;
            for block in tokens.chunks_exact(self.tokens_per_block).take(usable) {
                let Some((id, identity)) = self.find(parent, block) else { break };
                visit(self, id);
                parent = identity;
            }
        }
        parent
    }

    /// Take the blocks that [`BlockPool::match_prefix`] found into `blocks`. Returns the identity of the last one,
    /// after which the next block is registered.
    pub fn take_prefix(&mut self, tokens: &[u32], blocks: &mut Vec<BlockId>) -> ContentId {
        let first = blocks.len();
        let parent = self.walk_prefix(tokens, |_, id| blocks.push(id));
        for &id in &blocks[first..] {
            if self.blocks[id as usize].references == 0 {
                self.unlink(id);
            }
            self.blocks[id as usize].references += 1;
            self.counters.allocated_total += 1;
            self.counters.reused += 1;
        }
        if self.reuse {
            let usable = tokens.len().saturating_sub(1) / self.tokens_per_block;
            self.counters.missed += (usable - (blocks.len() - first)) as u64;
        }
        parent
    }

    /// Make a full, computed block findable. Returns the identity under which its continuation is registered; when
    /// the same content is registered already, that one's.
    pub fn register(&mut self, id: BlockId, parent: ContentId, tokens: &[u32]) -> ContentId {
        if !self.reuse || tokens.len() != self.tokens_per_block {
            return parent;
        }
        if let Some((_, identity)) = self.find(parent, tokens) {
            return identity;
        }
        let identity = self.next_content;
        self.next_content += 1;
        let key = Self::key(parent, tokens);
        if self.index.contains_key(&key) {
            return identity; // another content with the same hash: keep the older one, this one is not findable
        }
        let start = id as usize * self.tokens_per_block;
        self.tokens[start..start + self.tokens_per_block].copy_from_slice(tokens);
        self.blocks[id as usize].content = Some((key, identity, parent));
        self.index.insert(key, id);
        identity
    }

    /// Check every invariant; for tests.
    pub fn verify(&self) -> Result<(), String> {
        let mut seen = vec![false; self.blocks.len()];
        let (mut id, mut previous, mut count) = (self.free_head, NONE, 0);
        while id != NONE {
            let block = &self.blocks[id as usize];
            if seen[id as usize] {
                return Err(format!("block {id} is on the free list twice"));
            }
            if block.references != 0 {
                return Err(format!("block {id} is free with {} references", block.references));
            }
            if block.previous != previous {
                return Err(format!("block {id} has a broken back link"));
            }
            seen[id as usize] = true;
            count += 1;
            previous = id;
            id = block.next;
        }
        if previous != self.free_tail || count != self.free {
            return Err(format!("free list has {count} blocks, counter says {}", self.free));
        }
        match self.blocks.iter().zip(&seen).position(|(b, free)| b.references == 0 && !free) {
            Some(leaked) => Err(format!("block {leaked} leaked: no reference and not on the free list")),
            None => Ok(()),
        }
    }
}

/// What [`BlockPool::match_prefix`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Blocks that match.
    pub blocks: usize,
    /// How many of them nobody refers to at the moment.
    pub of_those_free: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn allocates_all_then_none() {
        let mut pool = BlockPool::new(3, 4, false);
        let mut taken: Vec<_> = (0..3).map(|_| pool.allocate().unwrap()).collect();
        assert_eq!(pool.allocate(), None);
        pool.release_all(&mut taken);
        assert_eq!(pool.free(), 3);
        pool.verify().unwrap();
    }

    #[test]
    fn reuses_full_blocks_of_the_same_prefix_only() {
        let mut pool = BlockPool::new(8, 4, true);
        let tokens: Vec<u32> = (0..10).collect();
        let mut mine: Vec<_> = (0..3).map(|_| pool.allocate().unwrap()).collect();
        let first = pool.register(mine[0], ROOT, &tokens[0..4]);
        pool.register(mine[1], first, &tokens[4..8]);
        assert_eq!(pool.match_prefix(&tokens), PrefixMatch { blocks: 2, of_those_free: 0 });
        pool.release_all(&mut mine);
        assert_eq!(pool.match_prefix(&tokens), PrefixMatch { blocks: 2, of_those_free: 2 });
        // The last token is always computed: 8 tokens reuse one block, not two.
        assert_eq!(pool.match_prefix(&tokens[..8]).blocks, 1);
        // The same second block behind another first block is another content.
        let other = [9, 9, 9, 9, 4, 5, 6, 7, 8];
        assert_eq!(pool.match_prefix(&other).blocks, 0);
        let mut again = Vec::new();
        pool.take_prefix(&tokens, &mut again);
        assert_eq!((again.len(), pool.used()), (2, 2));
        assert_eq!(pool.counters().reused, 2);
        pool.release_all(&mut again);
        pool.verify().unwrap();
    }

    #[test]
    fn allocation_evicts_the_oldest_content() {
        let mut pool = BlockPool::new(2, 2, true);
        let a = pool.allocate().unwrap();
        pool.register(a, ROOT, &[1, 2]);
        pool.release(a);
        let b = pool.allocate().unwrap();
        assert_ne!(a, b, "the never-used block comes first");
        pool.register(b, ROOT, &[3, 4]);
        pool.release(b);
        assert_eq!(pool.allocate(), Some(a));
        assert_eq!(pool.match_prefix(&[1, 2, 0]).blocks, 0);
        assert_eq!(pool.match_prefix(&[3, 4, 0]).blocks, 1);
    }

    proptest! {
        /// Requests with overlapping prefixes come, share, and go in any order: nothing leaks or is freed twice.
        #[test]
        fn never_leaks(ops in prop::collection::vec((0u8..3, 0u32..4, 1usize..20), 1..120)) {
            let mut pool = BlockPool::new(16, 4, true);
            let mut live: Vec<Vec<BlockId>> = Vec::new();
            for (op, family, length) in ops {
                match op {
                    0 | 1 => {
                        let tokens: Vec<u32> = (0..length as u32).map(|i| i / 6 * family).collect();
                        let found = pool.match_prefix(&tokens);
                        let need = pool.blocks_for(tokens.len());
                        if need - found.blocks + found.of_those_free <= pool.free() {
                            let mut blocks = Vec::new();
                            let mut parent = pool.take_prefix(&tokens, &mut blocks);
                            prop_assert_eq!(blocks.len(), found.blocks);
                            while blocks.len() < need {
                                let id = pool.allocate().expect("counted as free");
                                let start = blocks.len() * 4;
                                blocks.push(id);
                                if let Some(full) = tokens.get(start..start + 4) {
                                    parent = pool.register(id, parent, full);
                                }
                            }
                            live.push(blocks);
                        }
                    }
                    _ if !live.is_empty() => {
                        let mut blocks = live.swap_remove(length % live.len());
                        pool.release_all(&mut blocks);
                    }
                    _ => {}
                }
                pool.verify().map_err(TestCaseError::fail)?;
                for id in 0..16 {
                    let holders = live.iter().flatten().filter(|&&b| b == id).count();
                    prop_assert_eq!(pool.references(id) as usize, holders);
                }
            }
        }
    }
}
