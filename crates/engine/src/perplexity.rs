//! How well a model predicts a text: every token but the first, scored in windows that overlap.

use crate::device::Device;
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::sequence::Sequence;

/// Tokens of a step: enough for efficient products, and few enough that a large vocabulary's logits fit.
const STEP_TOKENS: usize = 256;

/// How a text longer than the context is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Most tokens of a window.
    pub context: usize,
    /// New tokens that every window after the first scores; the rest of it is what they are predicted from.
    pub stride: usize,
}

/// The score of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// The sum of their negative log likelihoods.
    pub nats: f64,
    /// Windows that were run.
    pub windows: usize,
}

impl Score {
    /// The perplexity per token.
    pub fn perplexity(&self) -> f64 {
        (self.nats / self.tokens as f64).exp()
    }

    /// Bits that the model needs per byte of a text of `bytes`.
    pub fn bits_per_byte(&self, bytes: usize) -> f64 {
        self.nats / std::f64::consts::LN_2 / bytes as f64
    }
}

impl Windows {
    fn check(self, model: &LoadedModel) -> Result<(), EngineError> {
        let most = model.config.build.max_seq_len;
        if !(2..=most).contains(&self.context) {
            let problem = format!("must be between 2 and the longest sequence {most}, found {}", self.context);
            return Err(EngineError::option("--context", problem));
        }
        if !(1..self.context).contains(&self.stride) {
            let problem = format!(
                "must be between 1 and {}, so that every token has one before it; found {}",
                self.context - 1,
                self.stride
            );
            return Err(EngineError::option("--stride", problem));
        }
        Ok(())
    }
}

/// Scores `ids`. `progress` is told the tokens scored so far and answers whether to go on.
pub fn perplexity(
    device: impl Into<Device>,
    model: &LoadedModel,
    ids: &[u32],
    windows: Windows,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Score, EngineError> {
    windows.check(model)?;
    let vocab = model.config.model.vocab_size;
    if ids.len() < 2 {
        let problem = format!("gives {} token(s); at least two are needed to predict one", ids.len());
        return Err(EngineError::option("--text", problem));
    }
    if let Some(bad) = ids.iter().find(|id| **id as usize >= vocab) {
        let problem =
            format!("gives token {bad}, but the model's vocabulary has {vocab} entries; is it its tokenizer?");
        return Err(EngineError::option("--text", problem));
    }
    let longest = windows.context.min(ids.len());
    let mut sequence = Sequence::new(device.into(), model, longest, STEP_TOKENS.min(longest))?;
    let mut score = Score { tokens: 0, nats: 0.0, windows: 0 };
    // Tokens before this one are scored, or are the first.
    let mut next = 1;
    while next < ids.len() {
        let end = if next == 1 { longest } else { (next + windows.stride).min(ids.len()) };
        let begin = end.saturating_sub(windows.context);
        let window = ids.get(begin..end).unwrap_or_default();
        let mut done = 0;
        for step in window.chunks(STEP_TOKENS) {
            // The row of a token predicts the one after it; the last of the window predicts nothing that is known here.
            let first_row = (next - begin - 1).saturating_sub(done).min(step.len() - 1);
            let rows = sequence.step(step, done, first_row, true)?.logits;
            for (row, logits) in rows.chunks_exact(vocab).enumerate() {
                let target = done + first_row + row + 1;
                if let Some(token) = window.get(target).filter(|_| begin + target >= next) {
                    score.nats += negative_log_likelihood(logits, *token);
                    score.tokens += 1;
                }
            }
            done += step.len();
        }
        next = end;
        score.windows += 1;
        if !progress(score.tokens as u64) {
            return Err(EngineError::Interrupted);
        }
    }
    if !score.nats.is_finite() {
        return Err(EngineError::option("--model", "its logits are not finite, so the text has no perplexity"));
    }
    Ok(score)
}

/// In f64: the sum over a large vocabulary must not lose what quantisation is measured by.
fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    let chosen = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    sum.ln() - (f64::from(chosen) - largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likelihood_of_equal_logits_is_one_in_as_many() {
        assert!((negative_log_likelihood(&[3.0; 8], 5) - 8f64.ln()).abs() < 1e-12);
        assert!((negative_log_likelihood(&[1000.0, 0.0], 0)).abs() < 1e-12);
        assert!((negative_log_likelihood(&[1000.0, 0.0], 1) - 1000.0).abs() < 1e-9);
    }
}
