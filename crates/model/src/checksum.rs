//! A checksum of many bytes, fast enough to be taken while they are copied.
//!
//! It finds damage, not forgery. Bytes are taken in blocks, so that threads can share the work: every block has a hash, and
//! the hashes in order are hashed again. In a block eight lanes take a word of 64 bits in turn; a step of a lane (exclusive
//! or, multiplication by an odd number, rotation) has an inverse, so a change of one word always changes the result.

/// Bytes of a block.
pub const BLOCK: usize = 4 << 20;

/// The name by which an engine says how its checksums were made.
pub const ALGORITHM: &str = "strobe64";

const LANES: usize = 8;
/// Bytes that all lanes take in one step.
const STRIDE: usize = LANES * 8;
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
const OTHER_ODD: u64 = 0xc2b2_ae3d_27d4_eb4f;

/// The hash of a block that arrives in pieces.
#[derive(Clone, Debug)]
pub struct BlockHash {
    lanes: [u64; LANES],
    bytes: u64,
}

impl Default for BlockHash {
    fn default() -> BlockHash {
        BlockHash { lanes: std::array::from_fn(|lane| OTHER_ODD.wrapping_mul(lane as u64 + 1)), bytes: 0 }
    }
}

fn step(lane: u64, word: u64) -> u64 {
    (lane ^ word).wrapping_mul(ODD).rotate_left(29)
}

impl BlockHash {
    /// Takes the next piece. Every piece but the last must have a multiple of 64 bytes.
    pub fn update(&mut self, piece: &[u8]) {
        debug_assert!(self.bytes.is_multiple_of(STRIDE as u64), "only the last piece may be odd");
        let (rows, rest) = piece.as_chunks::<STRIDE>();
        let mut lanes = self.lanes;
        for row in rows {
            let (words, _) = row.as_chunks::<8>();
            for (lane, word) in lanes.iter_mut().zip(words) {
                *lane = step(*lane, u64::from_le_bytes(*word));
            }
        }
        if !rest.is_empty() {
            let mut last = [0; STRIDE];
            last[..rest.len()].copy_from_slice(rest);
            let (words, _) = last.as_chunks::<8>();
            for (lane, word) in lanes.iter_mut().zip(words) {
                *lane = step(*lane, u64::from_le_bytes(*word));
            }
        }
        self.lanes = lanes;
        self.bytes += piece.len() as u64;
    }

    /// The hash. The number of bytes is part of it, so zeroes at the end count.
    pub fn finish(&self) -> u64 {
        let folded = self.lanes.iter().fold(self.bytes.wrapping_mul(ODD), |sum, lane| step(sum, *lane));
        let mixed = (folded ^ (folded >> 32)).wrapping_mul(OTHER_ODD);
        mixed ^ (mixed >> 29)
    }
}

/// The hash of one block.
pub fn block_hash(block: &[u8]) -> u64 {
    let mut hash = BlockHash::default();
    hash.update(block);
    hash.finish()
}

/// The checksum of bytes whose blocks, in order, have these hashes.
pub fn combine(blocks: impl IntoIterator<Item = u64>) -> u64 {
    blocks.into_iter().fold(OTHER_ODD, step)
}

/// The checksum of bytes that are all there.
pub fn checksum(bytes: &[u8]) -> u64 {
    combine(bytes.chunks(BLOCK).map(block_hash))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_counts_in_any_number_of_pieces() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let whole = checksum(&bytes);
        for at in [0, 1, 63, 64, 500, 959, 960, 999] {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                assert_ne!(checksum(&damaged), whole, "byte {at}, bit {bit}");
            }
        }
        for (a, b) in [(0, 64), (7, 71), (8, 16), (3, 960)] {
            let mut swapped = bytes.clone();
            swapped.swap(a, b);
            assert_eq!(checksum(&swapped) == whole, bytes[a] == bytes[b], "bytes {a} and {b} swapped");
            // The same bit in two words of one lane.
            let mut twice = bytes.clone();
            twice[a] ^= 0x80;
            twice[b] ^= 0x80;
            assert_ne!(checksum(&twice), whole);
        }
        assert_ne!(checksum(&bytes[..999]), whole);
        assert_ne!(checksum(&[bytes.as_slice(), &[0]].concat()), whole);
        assert_ne!(checksum(&[0; 64]), checksum(&[0; 128]));
        let mut pieces = BlockHash::default();
        bytes.chunks(128).for_each(|piece| pieces.update(piece));
        assert_eq!(combine([pieces.finish()]), whole);
    }

    /// Engines on disk have these values.
    #[test]
    fn values_stay_what_they_are() {
        let bytes: Vec<u8> = (0..=255).cycle().take(BLOCK + 100).collect();
        assert_eq!(checksum(&[]), OTHER_ODD);
        assert_eq!([checksum(b"strobe"), checksum(&bytes)], [0x8613_7926_fa08_6fed, 0xcde1_ad7b_b805_4063]);
    }
}
