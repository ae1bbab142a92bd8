//! GGUF files against the checkpoints they were made from, and damaged ones.

use std::path::{Path, PathBuf};

use serde_json::Value;
use strobe_model::{Checkpoint, Gguf, GgufModel, ModelConfig, ModelError, RopeScaling, WeightSource, weight_list};

use crate::support::{Random, fixture, says, scratch};

/// Files with exactly the weights of a fixture.
const SAME: [&str; 4] = ["llama-bias", "qwen3", "qwen2", "llama3-rope-tied"];

fn path(name: &str) -> PathBuf {
    fixture("gguf").join(format!("{name}.gguf"))
}

fn open_and_check(path: &Path) -> Result<WeightSource, ModelError> {
    let model = GgufModel::open(path)?;
    let config = model.config().clone();
    let source = WeightSource::Gguf(Box::new(model));
    source.check(&config).map(|()| source)
}

/// All values of a model, weight by weight.
fn values(source: &WeightSource, config: &ModelConfig) -> Vec<Vec<f32>> {
    let weight = |info: &strobe_model::WeightInfo| {
        let mut all = vec![0.0; info.rows * info.cols];
        for (row, out) in all.chunks_mut(info.cols).enumerate() {
            source.fill_row_f32(info, row, out).unwrap();
        }
        all
    };
    weight_list(config).iter().map(weight).collect()
}

fn checkpoint_values(case: &str) -> Vec<Vec<f32>> {
    let config = ModelConfig::from_dir(&fixture(case)).unwrap();
    values(&WeightSource::Checkpoint(Checkpoint::open(&fixture(case)).unwrap()), &config)
}

#[test]
fn weights_and_configuration_are_those_of_the_checkpoint() {
    for case in SAME {
        assert!(Gguf::is_gguf(&path(case)));
        let source = open_and_check(&path(case)).unwrap();
        let found = GgufModel::open(&path(case)).unwrap().config().clone();
        let expected = ModelConfig::from_dir(&fixture(case)).unwrap();
        let same_numbers = ModelConfig {
            rope_scaling: expected.rope_scaling.clone(),
            bos_token_id: expected.bos_token_id,
            eos_token_ids: expected.eos_token_ids.clone(),
            ..found.clone()
        };
        assert_eq!(same_numbers, expected, "{case}");
        assert!(values(&source, &found) == checkpoint_values(case), "{case}: weights differ");

        let (cos, sin) = found.rope_tables(64);
        let (expected_cos, expected_sin) = expected.rope_tables(64);
        for (found, expected) in cos.iter().chain(&sin).zip(expected_cos.iter().chain(&expected_sin)) {
            assert!((found - expected).abs() < 2e-5, "{case}: {found} is not {expected}");
        }
        assert_eq!(matches!(found.rope_scaling, RopeScaling::Factors { .. }), case == "llama3-rope-tied");
    }
}

#[test]
fn quantised_weights_are_near_the_checkpoint() {
    let source = open_and_check(&path("llama-q8_0")).unwrap();
    let config = GgufModel::open(&path("llama-q8_0")).unwrap().config().clone();
    for (found, expected) in values(&source, &config).iter().zip(checkpoint_values("llama")) {
        let largest = expected.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        let off = found.iter().zip(&expected).fold(0.0f32, |most, (f, e)| most.max((f - e).abs()));
        assert!(off <= largest / 200.0, "off by {off} of {largest}");
    }
}

#[test]
fn tokenizers_give_the_ids_of_their_origins() {
    let text = std::fs::read_to_string(fixture("gguf").join("tokens.json")).unwrap();
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    for case in ["llama-bias", "qwen3"] {
        let tokenizer = GgufModel::open(&path(case)).unwrap().tokenizer().unwrap().unwrap();
        for entry in &entries {
            let text = entry["text"].as_str().unwrap();
            let expected: Vec<u32> = serde_json::from_value(entry[case].clone()).unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), expected, "{case}: {text:?}");
        }
        assert_eq!(tokenizer.decode(&tokenizer.encode("the engine runs").unwrap()).unwrap(), "the engine runs");
    }
    let spm = GgufModel::open(&path("llama-bias")).unwrap().tokenizer().unwrap().unwrap();
    assert_eq!(spm.encode_with_special_tokens("the").unwrap()[0], 1);
    assert_eq!((spm.bos_id(), spm.eos_id()), (Some(1), Some(2)));
    let without = GgufModel::open(&path("qwen2")).unwrap().tokenizer().unwrap().unwrap_err();
    assert!(without.contains("has none"), "{without}");
    let unknown = GgufModel::open(&path("llama3-rope-tied")).unwrap().tokenizer().unwrap().unwrap_err();
    assert!(unknown.contains("`t5`"), "{unknown}");
}

/// A file whose bytes were changed, under a name of its own.
fn changed(case: &str, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = std::fs::read(path(case)).unwrap();
    change(&mut bytes);
    let file = scratch(name).join("changed.gguf");
    std::fs::write(&file, bytes).unwrap();
    file
}

/// Where a text ends in a file.
fn after(bytes: &[u8], text: &str) -> usize {
    bytes.windows(text.len()).position(|w| w == text.as_bytes()).unwrap() + text.len()
}

#[test]
fn types_that_cannot_be_read_are_refused_by_name() {
    let unreadable = [
        (3u32, "Q4_1"),
        (6, "Q5_0"),
        (7, "Q5_1"),
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (13, "Q5_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (20, "IQ4_NL"),
        (23, "IQ4_XS"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (39, "MXFP4"),
        (40, "NVFP4"),
        (77, "type number 77"),
    ];
    for (number, name) in unreadable {
        let file = changed("qwen3", "gguf-types", |bytes| {
            let at = after(bytes, "blk.1.ffn_up.weight") + 4 + 16;
            assert_eq!(bytes[at..at + 4], 30u32.to_le_bytes(), "BF16");
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        });
        says(open_and_check(&file), &["blk.1.ffn_up.weight", name, "F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K"]);
    }
}

#[test]
fn what_is_not_supported_is_named() {
    let swap = |name: &str, from: &'static str, to: &'static str| {
        assert_eq!(from.len(), to.len());
        changed("qwen3", name, |bytes| {
            let end = after(bytes, from);
            bytes[end - to.len()..end].copy_from_slice(to.as_bytes());
        })
    };
    says(open_and_check(&swap("gguf-arch", "qwen3", "gemma")), &["general.architecture", "`gemma`", "llama, qwen2"]);
    says(
        open_and_check(&swap("gguf-name", "blk.1.ffn_up.weight", "blk.1.ffn_xx.weight")),
        &["blk.1.ffn_up", "missing"],
    );
    says(
        open_and_check(&swap("gguf-key", "qwen3.block_count", "qwen3.block_xxxxx")),
        &["qwen3.block_count", "missing"],
    );
    let version = |name: &str, version: [u8; 4]| changed("qwen3", name, |bytes| bytes[4..8].copy_from_slice(&version));
    says(open_and_check(&version("gguf-v1", [1, 0, 0, 0])), &["version 1"]);
    says(open_and_check(&version("gguf-be", [0, 0, 0, 3])), &["big-endian"]);
    says(open_and_check(&changed("qwen3", "gguf-magic", |bytes| bytes[0] = b'X')), &["not a GGUF file"]);
    // A tensor that the model would leave out.
    let extra = changed("qwen3", "gguf-extra", |bytes| {
        let end = after(bytes, "output.weight");
        bytes[end - 6..end].copy_from_slice(b"xxxxxx");
    });
    says(open_and_check(&extra), &["output.xxxxxx", "not supported"]);
}

#[test]
fn damage_is_one_clear_error_and_allocates_nothing() {
    let whole = std::fs::read(path("llama-bias")).unwrap();
    let file = scratch("gguf-cut").join("cut.gguf");
    for length in (0..whole.len() - 64).step_by(97) {
        std::fs::write(&file, &whole[..length]).unwrap();
        says(open_and_check(&file), &["cut.gguf"]);
    }
    // The numbers of tensors and of fields, and the length of the first key.
    for at in [8, 16, 24] {
        for huge in [u64::MAX, u64::MAX / 8, 1 << 40] {
            let file = changed("llama-bias", "gguf-huge", |bytes| {
                bytes[at..at + 8].copy_from_slice(&huge.to_le_bytes());
            });
            assert!(open_and_check(&file).is_err(), "{huge} at {at}");
        }
    }
    let list = changed("llama-bias", "gguf-list", |bytes| {
        let at = after(bytes, "tokenizer.ggml.tokens") + 8;
        bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    });
    says(open_and_check(&list), &["tokenizer.ggml.tokens", "truncated"]);
}

/// Whatever a file holds, reading it ends, in a model or in an error of one line.
#[test]
fn noise_in_the_header_never_panics() {
    let whole = std::fs::read(path("llama-bias")).unwrap();
    let file = scratch("gguf-noise").join("noise.gguf");
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..600 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random.below(4) {
            let at = 4 + random.below(6000);
            bytes[at] = random.next() as u8;
        }
        std::fs::write(&file, &bytes).unwrap();
        match open_and_check(&file) {
            Ok(WeightSource::Gguf(model)) => {
                let _ = model.tokenizer();
                let source = WeightSource::Gguf(model);
                let WeightSource::Gguf(model) = &source else { unreachable!() };
                let config = model.config().clone();
                values(&source, &config);
            }
            Ok(_) => unreachable!(),
            Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        }
    }
}
