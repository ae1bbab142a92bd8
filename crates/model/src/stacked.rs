//! Experts that lie in one tensor for all of them, as GPT-OSS checkpoints have them: transposed floats, or MXFP4 blocks.
//!
//! Gate and up projections are there in turns. `gate_up_proj` is `[experts][inputs][2 * width]`, its bias
//! `[experts][2 * width]`; `gate_up_proj_blocks` is `[experts][2 * width][inputs / 32][16]`, two values of 4 bits per byte,
//! the lower half first, with a power of two for each block in `gate_up_proj_scales`. `down_proj` likewise.

use crate::checkpoint::Checkpoint;
use crate::config::DType;
use crate::safetensors::TensorView;

/// Values of a block that share a scale.
const BLOCK: usize = 32;
/// The magnitudes of 4-bit floats (e2m1); the fourth bit is the sign.
const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// One expert's projection within such tensors.
pub(crate) struct StackedPart {
    /// Name of the tensor without any ending.
    tensor: String,
    expert: usize,
    bias: bool,
    /// Its rows are every `step`th from `first`.
    first: usize,
    step: usize,
}

impl StackedPart {
    /// Understands a name such as `model.layers.0.mlp.experts.3.up_proj.weight`.
    pub(crate) fn parse(name: &str) -> Option<StackedPart> {
        let (module, rest) = name.split_once(".experts.")?;
        let mut words = rest.split('.');
        let (expert, projection, kind) = (words.next()?.parse().ok()?, words.next()?, words.next()?);
        let (own, first, step) = match projection {
            "gate_proj" => ("gate_up_proj", 0, 2),
            "up_proj" => ("gate_up_proj", 1, 2),
            "down_proj" => ("down_proj", 0, 1),
            _ => return None,
        };
        Some(StackedPart { tensor: format!("{module}.experts.{own}"), expert, bias: kind == "bias", first, step })
    }

    fn name(&self, ending: &str) -> String {
        format!("{}{ending}", self.tensor)
    }

    /// Which tensor is missing or wrong, and how, for a part of `rows` rows of `cols` elements among `experts`.
    pub(crate) fn check(
        &self,
        checkpoint: &Checkpoint,
        dtype: DType,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<(), (String, String)> {
        let expect = |name: String, shape: Vec<usize>, types: &[&str]| match checkpoint.tensor(&name) {
            None => {
                let problem = format!("is missing; the checkpoint has {}", checkpoint.summary());
                Err((name, problem))
            }
            Some(view) if view.shape != shape => {
                let problem = format!("shape is {:?}, but config.json asks for {shape:?}", view.shape);
                Err((name, problem))
            }
            Some(view) if !types.contains(&view.dtype) => {
                let problem = format!("dtype is {}, expected {}", view.dtype, types.join(" or "));
                Err((name, problem))
            }
            Some(_) => Ok(()),
        };
        let (all, own) = (self.step * rows, dtype.safetensors_name());
        if self.bias {
            return expect(self.name("_bias"), vec![experts, all], &[own, "F32"]);
        }
        if checkpoint.tensor(&self.name("_blocks")).is_none() {
            return expect(self.name(""), vec![experts, cols, all], &[own]);
        }
        if !cols.is_multiple_of(BLOCK) {
            return Err((self.name("_blocks"), format!("needs inputs in multiples of {BLOCK}, found {cols}")));
        }
        expect(self.name("_blocks"), vec![experts, all, cols / BLOCK, BLOCK / 2], &["U8"])?;
        expect(self.name("_scales"), vec![experts, all, cols / BLOCK], &["U8"])
    }

    /// Row `row` of the part, or all elements of a bias.
    pub(crate) fn fill(&self, checkpoint: &Checkpoint, row: usize, out: &mut [f32]) -> Result<(), (String, String)> {
        let tensor = |ending: &str| {
            let name = self.name(ending);
            checkpoint.tensor(&name).ok_or_else(|| (name, "is missing".to_string()))
        };
        let outside = |ending: &str| (self.name(ending), format!("has no row {row} of expert {}", self.expert));
        let place = self.first + self.step * row;
        if self.bias {
            let view = tensor("_bias")?;
            let all = view.shape.last().copied().unwrap_or(0);
            for (i, out) in out.iter_mut().enumerate() {
                *out = float(view, self.expert * all + self.first + self.step * i).ok_or_else(|| outside("_bias"))?;
            }
            return Ok(());
        }
        let Ok(blocks) = tensor("_blocks") else {
            let view = tensor("")?;
            let all = view.shape.last().copied().unwrap_or(0);
            for (i, out) in out.iter_mut().enumerate() {
                *out = float(view, (self.expert * view.shape[1] + i) * all + place).ok_or_else(|| outside(""))?;
            }
            return Ok(());
        };
        let scales = tensor("_scales")?;
        let all = blocks.shape.get(1).copied().unwrap_or(0);
        let first = (self.expert * all + place) * out.len() / BLOCK;
        for (i, out) in out.chunks_mut(BLOCK).enumerate() {
            let at = (first + i) * BLOCK / 2;
            let codes = blocks.data.get(at..at + BLOCK / 2).ok_or_else(|| outside("_blocks"))?;
            let scale = scales.data.get(first + i).ok_or_else(|| outside("_scales"))?;
            decode_block(codes, *scale, out);
        }
        Ok(())
    }
}

/// One block of 32 values: e2m1 codes times `2^(scale - 127)`.
fn decode_block(codes: &[u8], scale: u8, out: &mut [f32]) {
    let scale = (f32::from(scale) - 127.0).exp2();
    let value = |code: u8| {
        let magnitude = FP4[usize::from(code & 7)];
        if code & 8 == 0 { magnitude * scale } else { -magnitude * scale }
    };
    for (pair, byte) in out.chunks_mut(2).zip(codes) {
        for (out, code) in pair.iter_mut().zip([byte & 15, byte >> 4]) {
            *out = value(code);
        }
    }
}

/// One element of a tensor of floats.
fn float(view: TensorView<'_>, index: usize) -> Option<f32> {
    let dtype = DType::from_safetensors_name(view.dtype)?;
    let bytes = view.data.get(index * dtype.bytes()..(index + 1) * dtype.bytes())?;
    Some(match dtype {
        DType::F32 => f32::from_le_bytes(bytes.try_into().ok()?),
        DType::F16 => half::f16::from_le_bytes(bytes.try_into().ok()?).to_f32(),
        DType::Bf16 => half::bf16::from_le_bytes(bytes.try_into().ok()?).to_f32(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_decode_to_powers_of_two_times_small_floats() {
        let mut out = [0.0; 32];
        let mut codes = [0u8; 16];
        (codes[0], codes[1], codes[15]) = (0x71, 0x9F, 0x20);
        decode_block(&codes, 128, &mut out);
        assert_eq!(out[..4], [1.0, 12.0, -12.0, -1.0]);
        assert_eq!(out[30..], [0.0, 2.0]);
        decode_block(&codes, 120, &mut out);
        assert_eq!(out[1], 6.0 / 128.0);
    }

    #[test]
    fn names_say_which_rows_are_meant() {
        let part = StackedPart::parse("model.layers.4.mlp.experts.17.up_proj.bias").unwrap();
        assert_eq!((part.tensor.as_str(), part.expert), ("model.layers.4.mlp.experts.gate_up_proj", 17));
        assert_eq!((part.bias, part.first, part.step), (true, 1, 2));
        assert!(StackedPart::parse("model.layers.4.mlp.up_proj.weight").is_none());
        assert!(StackedPart::parse("model.layers.4.mlp.experts.x.up_proj.weight").is_none());
    }
}
