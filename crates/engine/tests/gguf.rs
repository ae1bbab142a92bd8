//! A GGUF file runs as the checkpoint it was made from.

mod common;

use common::{assert_same_bits, build, fixture, load, model_name, scratch};
use strobe_engine::{BuildConfig, LoadedModel, ModelRef, Quantization, engine_dir, eval};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;

fn logits(model: &LoadedModel, prompt: &[u32]) -> Vec<Vec<f32>> {
    let found = eval::logits(Cpu::new(Tier::detect(), 2), model, prompt, 4).unwrap();
    found.logits.into_iter().chain(found.decode_logits).collect()
}

fn gguf(case: &str) -> String {
    fixture("gguf").join(format!("{case}.gguf")).display().to_string()
}

#[test]
fn logits_equal_those_of_the_checkpoint() {
    let prompt: Vec<u32> = (0..20).map(|i| 3 + i * 7 % 60).collect();
    for (case, dtype) in [("llama-bias", DType::F16), ("qwen2", DType::F16), ("qwen3", DType::Bf16)] {
        let options = [
            build(dtype),
            build(DType::F32),
            BuildConfig { quantization: Quantization::Int8, ..build(dtype) },
            BuildConfig { quantization: Quantization::Int4, ..build(dtype) },
        ];
        for options in options {
            let found = logits(&load(&gguf(case), options.clone()), &prompt);
            let expected = logits(&load(&model_name(case), options), &prompt);
            for (found, expected) in found.iter().zip(&expected) {
                assert_same_bits(found, expected, case);
            }
        }
    }
    // Factors instead of the rule they came from: the frequencies' last bits differ.
    let found = logits(&load(&gguf("llama3-rope-tied"), build(DType::F32)), &prompt);
    let expected = logits(&load(&model_name("llama3-rope-tied"), build(DType::F32)), &prompt);
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < 1e-3, "{found} is not {expected}");
    }
}

#[test]
fn an_engine_directory_keeps_the_tokenizer_and_the_scaling() {
    for case in ["llama-bias", "llama3-rope-tied"] {
        let model = ModelRef::open(&gguf(case), 0).unwrap();
        let config = model.engine_config(build(DType::F16)).unwrap();
        let dir = scratch(&format!("gguf-{case}")).join("engine");
        let mut cpu = Cpu::new(Tier::detect(), 2);
        engine_dir::build(&mut cpu, &model, &config, &dir, false, &[], &mut |_| true).unwrap();
        let loaded = LoadedModel::open(&dir).unwrap();
        assert_eq!(loaded.config.model, model.config, "{case}");
        let ends = |t: &Option<strobe_model::Tokenizer>| t.as_ref().map(|t| (t.bos_id(), t.eos_id()));
        assert_eq!(ends(&loaded.tokenizer), ends(&model.tokenizer), "{case}");
        assert_eq!(loaded.tokenizer.is_some(), model.tokenizer_problem.is_none(), "{case}");
    }
}
