//! Rotary tables against values printed by `LlamaRotaryEmbedding` of transformers 5.22.

use strobe_model::{ModelConfig, RopeScaling, preset};

fn config(head_dim: usize, theta: f64, scaling: RopeScaling) -> ModelConfig {
    ModelConfig { head_dim, rope_theta: theta, rope_scaling: scaling, ..preset("micro").unwrap().config() }
}

fn check(config: &ModelConfig, position: usize, cos: &[f32], sin: &[f32]) {
    let half = config.head_dim / 2;
    let (all_cos, all_sin) = config.rope_tables(position + 1);
    assert_eq!((all_cos.len(), all_sin.len()), ((position + 1) * half, (position + 1) * half));
    for (table, expected) in [(all_cos, cos), (all_sin, sin)] {
        for (i, expected) in expected.iter().enumerate() {
            let got = table[position * half + i];
            // One unit in the last place of a frequency moves the angle by position * 6e-8.
            let tolerance =
                2e-7 + position as f32 * 1.3e-7 * config.rope_theta.powf(-(2.0 * i as f64) / (2 * half) as f64) as f32;
            assert!((got - expected).abs() <= tolerance, "position {position}, pair {i}: {got} against {expected}");
        }
    }
}

#[test]
fn plain() {
    let plain = config(8, 10_000.0, RopeScaling::None);
    check(&plain, 0, &[1.0; 4], &[0.0; 4]);
    check(
        &plain,
        1,
        &[0.540_302_34, 0.995_004_2, 0.999_95, 0.999_999_5],
        &[0.841_470_96, 0.099_833_42, 0.009_999_833, 0.000_999_999_9],
    );
    check(
        &plain,
        8191,
        &[-0.646_390_5, -0.655_730_96, 0.973_987_6, -0.330_674_65],
        &[-0.763_006_8, 0.754_994_63, 0.226_601_54, 0.943_744_84],
    );
}

#[test]
fn linear_scaling() {
    check(
        &config(8, 10_000.0, RopeScaling::Linear { factor: 4.0 }),
        1000,
        &[0.240_988_3, 0.991_202_83, -0.801_143_6, 0.968_912_4],
        &[-0.970_528, -0.132_351_76, 0.598_472_1, 0.247_403_96],
    );
}

#[test]
fn llama3_scaling() {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let llama3 = config(16, 500_000.0, scaling);
    check(
        &llama3,
        1,
        &[0.540_302_34, 0.981_255_8, 0.999_292_97, 0.999_973_4, 0.999_999_9, 1.0, 1.0, 1.0],
        &[
            0.841_470_96,
            0.192_709_6,
            0.037_597_17,
            0.007_292_600_3,
            0.000_524_846,
            3.428_102_4e-5,
            6.647_87e-6,
            1.289_173_2e-6,
        ],
    );
    check(
        &llama3,
        8191,
        &[-0.646_390_5, 0.339_305_28, 0.988_023, -0.999_034, -0.401_702_67, 0.960_835_2, 0.998_517_8, 0.999_944_27],
        &[
            -0.763_006_8,
            -0.940_676_33,
            0.154_306_8,
            -0.043_944_024,
            -0.915_770_2,
            0.277_120_44,
            0.054_425_795,
            0.010_559_421,
        ],
    );
}
