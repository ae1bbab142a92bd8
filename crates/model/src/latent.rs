//! Multi-head latent attention (DeepSeek): keys and values of a token are one short vector that all heads share.
//!
//! The cache holds that vector (`kv_lora_rank` wide) and one rotated key part, as one key head and one value head; queries
//! are brought into the same space, and what attention gives is brought back, by a small product per head. So the
//! ordinary attention op runs over heads of `kv_lora_rank + qk_rope_head_dim`.
//!
//! A key lies as `[first of each rotated pair | first half of the latent | second of each pair | second half]`: the
//! rotation turns element i against element i + half, and by nothing where the latent is.

use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::source::copy_row;

/// The shapes of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatentAttention {
    /// Width of the queries' own latent vector; `None` where queries are projected at once.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent vector that keys and values share.
    pub kv_lora_rank: usize,
    /// Part of a query head that is not rotated.
    pub qk_nope_head_dim: usize,
    /// Part that is.
    pub qk_rope_head_dim: usize,
    /// Width of a head's values.
    pub v_head_dim: usize,
    /// Whether pairs of rotated elements lie side by side in the projections.
    pub rope_interleave: bool,
    /// What scores are multiplied by.
    pub scale: f32,
}

impl LatentAttention {
    /// Width of a key in the cache.
    pub fn key_width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Width of a head's query as it is projected.
    pub fn query_width(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// What queries are multiplied by, so that attention, which divides by the root of the key's width, gives `scale`.
    pub fn query_factor(&self) -> f32 {
        self.scale * (self.key_width() as f32).sqrt()
    }

    /// Puts a latent vector and a part to be rotated into the order of keys.
    pub fn arrange(&self, latent: &[f32], rotated: &[f32], factor: f32, key: &mut [f32]) {
        let (pairs, half) = (rotated.len() / 2, latent.len() / 2);
        let (first, second) = key.split_at_mut(pairs + half);
        for i in 0..pairs {
            let (a, b) = if self.rope_interleave { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
            first[i] = rotated[a] * factor;
            second[i] = rotated[b] * factor;
        }
        let scaled = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, from)| *to = from * factor);
        scaled(&mut first[pairs..], &latent[..half]);
        scaled(&mut second[pairs..], &latent[half..]);
    }

    /// The field and the problem of the first number that does not fit.
    pub(crate) fn first_problem(&self) -> Result<(), (&'static str, String)> {
        let sizes = [
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ];
        for (field, value) in sizes {
            if value == 0 || value > 1 << 18 {
                return Err((field, format!("must be between 1 and {}, found {value}", 1 << 18)));
            }
        }
        for (field, value) in [sizes[1], sizes[3]] {
            if !value.is_multiple_of(2) {
                return Err((field, format!("must be even, found {value}")));
            }
        }
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return Err(("scale", format!("must be a number above 0, found {}", self.scale)));
        }
        Ok(())
    }
}

/// One head's part of `kv_b_proj`, which is `[heads][qk_nope_head_dim + v_head_dim][kv_lora_rank]`.
pub(crate) struct LatentPart {
    tensor: String,
    head: usize,
    /// The keys' part, transposed; otherwise the values' part.
    keys: bool,
}

impl LatentPart {
    /// Understands `model.layers.0.self_attn.kv_b_proj.3.keys.weight`.
    pub(crate) fn parse(name: &str) -> Option<LatentPart> {
        let (module, rest) = name.split_once(".kv_b_proj.")?;
        let mut words = rest.split('.');
        let (head, part) = (words.next()?.parse().ok()?, words.next()?);
        let keys = match part {
            "keys" => true,
            "values" => false,
            _ => return None,
        };
        Some(LatentPart { tensor: format!("{module}.kv_b_proj.weight"), head, keys })
    }

    /// The tensor it is a part of.
    pub(crate) fn tensor(&self) -> &str {
        &self.tensor
    }

    /// Row `row` of this head's part, of which all `heads` have `rows`.
    pub(crate) fn fill(
        &self,
        checkpoint: &Checkpoint,
        heads: usize,
        rows: usize,
        row: usize,
        out: &mut [f32],
    ) -> Result<(), String> {
        let view = checkpoint.tensor(&self.tensor).ok_or("is missing")?;
        let [all, width] = *view.shape else { return Err(format!("shape is {:?}, expected a matrix", view.shape)) };
        let first = self.head * (all / heads);
        if !self.keys {
            return copy_row(view, first + all / heads - rows + row, out);
        }
        let mut values = vec![0.0; width];
        for (i, out) in out.iter_mut().enumerate() {
            copy_row(view, first + i, &mut values)?;
            *out = *values.get(row).ok_or_else(|| format!("has no column {row}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_queries_get_one_order_in_which_pairs_are_half_a_key_apart() {
        let latent = [1.0, 2.0, 3.0, 4.0];
        let mut shapes = LatentAttention {
            q_lora_rank: None,
            kv_lora_rank: 4,
            qk_nope_head_dim: 2,
            qk_rope_head_dim: 4,
            v_head_dim: 2,
            rope_interleave: true,
            scale: 0.5,
        };
        let mut key = [0.0; 8];
        shapes.arrange(&latent, &[10.0, 11.0, 12.0, 13.0], 2.0, &mut key);
        assert_eq!(key, [20.0, 24.0, 2.0, 4.0, 22.0, 26.0, 6.0, 8.0]);
        shapes.rope_interleave = false;
        shapes.arrange(&latent, &[10.0, 11.0, 12.0, 13.0], 1.0, &mut key);
        assert_eq!(key, [10.0, 11.0, 1.0, 2.0, 12.0, 13.0, 3.0, 4.0]);
    }
}
