//! Rotary tables, rounded step by step as `transformers` rounds them.

use crate::config::{ModelConfig, RopeScaling};

/// Cosines and sines, each `[positions][head_dim / 2]`.
pub(crate) fn tables(config: &ModelConfig, positions: usize) -> (Vec<f32>, Vec<f32>) {
    let frequencies = inverse_frequencies(config);
    let stretch = match config.rope_scaling {
        RopeScaling::Yarn { attention_factor, .. } => attention_factor,
        _ => 1.0,
    };
    let mut cos = Vec::with_capacity(positions * frequencies.len());
    let mut sin = Vec::with_capacity(positions * frequencies.len());
    for position in 0..positions {
        for frequency in &frequencies {
            // The angle is an f32 product (that is what models were trained with); its sine and cosine are then exact.
            let angle = f64::from(position as f32 * frequency);
            cos.push(angle.cos() as f32 * stretch);
            sin.push(angle.sin() as f32 * stretch);
        }
        // The rest of a key of latent attention stays as it is.
        cos.resize((position + 1) * (config.head_dim / 2), 1.0);
        sin.resize((position + 1) * (config.head_dim / 2), 0.0);
    }
    (cos, sin)
}

/// Elements of a head that are rotated.
fn rotated(config: &ModelConfig) -> usize {
    config.latent.map_or(config.head_dim, |latent| latent.qk_rope_head_dim)
}

fn inverse_frequencies(config: &ModelConfig) -> Vec<f32> {
    let base = f64::from(config.rope_theta as f32);
    (0..rotated(config) / 2)
        .map(|i| {
            let exponent = (2 * i) as f32 / rotated(config) as f32;
            let plain = 1.0 / base.powf(f64::from(exponent)) as f32;
            scaled(plain, config, i)
        })
        .collect()
}

fn scaled(frequency: f32, config: &ModelConfig, pair: usize) -> f32 {
    match config.rope_scaling {
        RopeScaling::None => frequency,
        RopeScaling::Factors { ref factors } => frequency / factors.get(pair).copied().unwrap_or(1.0),
        RopeScaling::Linear { factor } => frequency / factor as f32,
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position_embeddings, truncate, .. } => {
            let width = rotated(config) as f64;
            // The pair of elements that turns so often within the original context.
            let pair_of = |turns: f64| {
                let length = original_max_position_embeddings as f64 / (turns * 2.0 * std::f64::consts::PI);
                width * length.ln() / (2.0 * config.rope_theta.ln())
            };
            let (low, high) = (pair_of(beta_fast), pair_of(beta_slow));
            let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
            let (low, mut high) = (low.max(0.0), high.min(width - 1.0));
            if low == high {
                high += 0.001;
            }
            let kept = 1.0 - ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            frequency / factor as f32 * (1.0 - kept) + frequency * kept
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: original,
        } => {
            let (factor, low, high) = (factor as f32, low_freq_factor as f32, high_freq_factor as f32);
            let original = original as f32;
            let wavelength = 2.0 * std::f32::consts::PI / frequency;
            if wavelength > original / low {
                frequency / factor
            } else if wavelength < original / high {
                frequency
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}
