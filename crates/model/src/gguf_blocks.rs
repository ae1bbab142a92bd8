//! The element types of GGUF files, and how their blocks become f32.
//!
//! Every decoder multiplies and rounds in the order of the reference (`gguf.quants.dequantize`), so values are equal to
//! the last bit.

use half::f16;

/// Turns whole blocks into as many values as they hold.
type Decode = fn(&[u8], &mut [f32]);

/// One element type of the format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockType {
    pub(crate) name: &'static str,
    /// Elements of a block; 1 for plain numbers.
    pub(crate) elements: usize,
    /// Bytes of a block.
    pub(crate) bytes: usize,
    /// `None`: the type can't be read.
    pub(crate) decode: Option<Decode>,
}

/// The types that can be read, for the refusal of others.
pub(crate) const READABLE: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K";

const fn readable(name: &'static str, elements: usize, bytes: usize, decode: Decode) -> BlockType {
    BlockType { name, elements, bytes, decode: Some(decode) }
}

/// A type that is only known by name: its data is never looked at, so its size does not matter.
const fn known(name: &'static str) -> BlockType {
    BlockType { name, elements: 1, bytes: 0, decode: None }
}

/// The type with this number; `None` for numbers that were never given out, or after this was written.
pub(crate) fn by_number(number: u32) -> Option<BlockType> {
    Some(match number {
        0 => readable("F32", 1, 4, f32_values),
        1 => readable("F16", 1, 2, f16_values),
        2 => readable("Q4_0", 32, 18, q4_0),
        3 => known("Q4_1"),
        4 => known("Q4_2"),
        5 => known("Q4_3"),
        6 => known("Q5_0"),
        7 => known("Q5_1"),
        8 => readable("Q8_0", 32, 34, q8_0),
        9 => known("Q8_1"),
        10 => known("Q2_K"),
        11 => known("Q3_K"),
        12 => readable("Q4_K", 256, 144, q4_k),
        13 => known("Q5_K"),
        14 => readable("Q6_K", 256, 210, q6_k),
        15 => known("Q8_K"),
        16 => known("IQ2_XXS"),
        17 => known("IQ2_XS"),
        18 => known("IQ3_XXS"),
        19 => known("IQ1_S"),
        20 => known("IQ4_NL"),
        21 => known("IQ3_S"),
        22 => known("IQ2_S"),
        23 => known("IQ4_XS"),
        24 => known("I8"),
        25 => known("I16"),
        26 => known("I32"),
        27 => known("I64"),
        28 => known("F64"),
        29 => known("IQ1_M"),
        30 => readable("BF16", 1, 2, bf16_values),
        31 => known("Q4_0_4_4"),
        32 => known("Q4_0_4_8"),
        33 => known("Q4_0_8_8"),
        34 => known("TQ1_0"),
        35 => known("TQ2_0"),
        36 => known("IQ4_NL_4_4"),
        37 => known("IQ4_NL_4_8"),
        38 => known("IQ4_NL_8_8"),
        39 => known("MXFP4"),
        40 => known("NVFP4"),
        41 => known("Q1_0"),
        _ => return None,
    })
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn f32_values(bytes: &[u8], out: &mut [f32]) {
    for (value, raw) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_le_bytes(*raw);
    }
}

fn f16_values(bytes: &[u8], out: &mut [f32]) {
    crate::source::halves_to_f32(bytes, out);
}

fn bf16_values(bytes: &[u8], out: &mut [f32]) {
    for (value, raw) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes(*raw)) << 16);
    }
}

/// A scale, then 32 signed bytes.
fn q8_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.as_chunks::<34>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        let scale = half_at(block, 0);
        for (value, quant) in out.iter_mut().zip(&block[2..]) {
            *value = f32::from(*quant as i8) * scale;
        }
    }
}

/// A scale, then 16 bytes: low nibbles are the first 16 elements, high ones the others, all shifted by 8.
fn q4_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.as_chunks::<18>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        let scale = half_at(block, 0);
        for (i, byte) in block[2..].iter().enumerate() {
            out[i] = f32::from((byte & 15) as i8 - 8) * scale;
            out[i + 16] = f32::from((byte >> 4) as i8 - 8) * scale;
        }
    }
}

/// Two halves (scale of scales, scale of minima), 12 bytes of 6-bit scales and minima, then 128 bytes of nibbles: 32 bytes
/// hold the low nibbles of one sub-block of 32 and the high ones of the next.
fn q4_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.as_chunks::<144>().0.iter().zip(out.as_chunks_mut::<256>().0) {
        let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
        let packed = &block[4..16];
        for (sub, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale_bits, minimum_bits) = if sub < 4 {
                (packed[sub] & 63, packed[sub + 4] & 63)
            } else {
                let shared = packed[sub + 4];
                ((shared & 15) | (packed[sub - 4] >> 6) << 4, (shared >> 4) | (packed[sub] >> 6) << 4)
            };
            let (scale, minimum) = (scale * f32::from(scale_bits), minimum * f32::from(minimum_bits));
            let quants = &block[16 + sub / 2 * 32..][..32];
            for (value, byte) in out.iter_mut().zip(quants) {
                let quant = if sub % 2 == 0 { byte & 15 } else { byte >> 4 };
                *value = scale * f32::from(quant) - minimum;
            }
        }
    }
}

/// 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales (one per 16 elements), and the scale of scales.
fn q6_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.as_chunks::<210>().0.iter().zip(out.as_chunks_mut::<256>().0) {
        let scale = half_at(block, 208);
        let scales = &block[192..208];
        for (half, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let low = &block[half * 64..][..64];
            let high = &block[128 + half * 32..][..32];
            for (i, value) in out.iter_mut().enumerate() {
                // A quarter of 32 elements takes one nibble of half of the low bytes and one pair of bits of the high ones.
                let quarter = i / 32;
                let nibble = low[quarter % 2 * 32 + i % 32] >> (quarter / 2 * 4) & 15;
                let pair = high[i % 32] >> (quarter * 2) & 3;
                let quant = (nibble | pair << 4) as i8 - 32;
                *value = scale * f32::from(scales[half * 8 + i / 16] as i8) * f32::from(quant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::gguf::Gguf;

    #[test]
    fn every_readable_type_equals_the_reference_to_the_last_bit() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/gguf/blocks.gguf");
        let file = Gguf::open(&path).unwrap();
        for name in READABLE.split(", ") {
            let tensor = file.tensor(name).unwrap();
            let expected = file.tensor(&format!("{name}.expected")).unwrap();
            assert_eq!((tensor.kind.name, expected.kind.name), (name, "F32"));
            assert_eq!(tensor.shape, expected.shape);
            let mut found = vec![f32::NAN; expected.data.len() / 4];
            tensor.kind.decode.unwrap()(tensor.data, &mut found);
            for (at, (found, raw)) in found.iter().zip(expected.data.as_chunks().0).enumerate() {
                assert_eq!(found.to_bits(), u32::from_le_bytes(*raw), "{name} element {at}");
            }
        }
    }

    #[test]
    fn types_without_a_decoder_are_not_called_readable() {
        let readable: Vec<&str> =
            (0..64).filter_map(by_number).filter(|t| t.decode.is_some()).map(|t| t.name).collect();
        let mut named: Vec<&str> = READABLE.split(", ").collect();
        named.sort_by_key(|name| readable.iter().position(|r| r == name));
        assert_eq!(named, readable);
    }
}
