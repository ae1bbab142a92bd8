//! Logits of a prompt and of greedy decode steps: the parity check against other implementations.

use serde::Serialize;

use crate::device::Device;
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::sequence::Sequence;

/// What the parity check writes.
#[derive(Clone, Debug, Serialize)]
pub struct EvalLogits {
    /// One row of logits per prompt position.
    pub logits: Vec<Vec<f32>>,
    /// The greedy continuation.
    pub greedy: Vec<u32>,
    /// Logits of each decode step: row i is what follows `greedy[i]`.
    pub decode_logits: Vec<Vec<f32>>,
}

/// Run `ids` and then `decode` greedy steps.
///
/// `greedy[0]` follows the prompt's last logits; decode step i feeds `greedy[i]` and yields `decode_logits[i]`.
pub fn logits(
    device: impl Into<Device>,
    model: &LoadedModel,
    ids: &[u32],
    decode: usize,
) -> Result<EvalLogits, EngineError> {
    let config = &model.config.model;
    if ids.is_empty() {
        return Err(EngineError::option("--ids", "is empty; give at least one token id"));
    }
    if let Some(bad) = ids.iter().find(|&&id| id as usize >= config.vocab_size) {
        let problem = format!("holds {bad}, but the vocabulary has {} entries", config.vocab_size);
        return Err(EngineError::option("--ids", problem));
    }
    let total = ids.len().saturating_add(decode);
    if total > config.max_position_embeddings {
        let problem = format!("+ --decode is {total} tokens, beyond the model's {}", config.max_position_embeddings);
        return Err(EngineError::option("--ids", problem));
    }
    let rows = |logits: Vec<f32>| logits.chunks(config.vocab_size).map(<[f32]>::to_vec).collect::<Vec<_>>();
    let mut sequence = Sequence::new(device.into(), model, total, ids.len())?;
    let mut answer = sequence.step(ids, 0, 0, true)?;
    let mut result = EvalLogits { logits: rows(answer.logits), greedy: Vec::new(), decode_logits: Vec::new() };
    for step in 0..decode {
        result.greedy.push(answer.token);
        answer = sequence.step(&[answer.token], ids.len() + step, 0, false)?;
        result.decode_logits.extend(rows(std::mem::take(&mut answer.logits)));
    }
    Ok(result)
}

/// The last two rows of [`logits`] of `ids`, made as for a request that is computed again after a pause at its first token:
/// the last row of the prompt and the row of that token in one step. `before` leaves other keys in the cache.
pub(crate) fn resumed_logits(
    device: impl Into<Device>,
    model: &LoadedModel,
    before: &[u32],
    ids: &[u32],
) -> Result<Vec<Vec<f32>>, EngineError> {
    let [prompt @ .., last, first] = ids else {
        return Err(EngineError::option("--ids", "holds fewer than two tokens"));
    };
    let longest = before.len().max(ids.len());
    let mut sequence = Sequence::new(device.into(), model, longest, longest)?;
    for earlier in [before, prompt] {
        if !earlier.is_empty() {
            sequence.step(earlier, 0, earlier.len() - 1, true)?;
        }
    }
    let answer = sequence.resume([*last, *first], prompt.len())?;
    Ok(answer.logits.chunks(model.config.model.vocab_size).map(<[f32]>::to_vec).collect())
}
