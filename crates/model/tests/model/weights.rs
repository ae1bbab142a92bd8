use std::collections::HashSet;

use strobe_model::{
    Checkpoint, DType, LayerWeight, ModelConfig, RandomInit, WeightId, WeightSource, preset, presets, weight_list,
};

use crate::support::{CASES, MOE_CASES, copy_of, fixture, says};

#[test]
fn parameter_counts_are_those_of_the_published_models() {
    let known = [
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
    ];
    for (name, parameters) in known {
        assert_eq!(preset(name).unwrap().config().parameter_count(), parameters, "{name}");
    }
    let micro = preset("micro").unwrap().config();
    assert!((1_000_000..3_000_000).contains(&micro.parameter_count()));
    assert!(preset("no-such-model").is_none());
}

#[test]
fn active_parameters_leave_out_lookups_norms_and_biases() {
    let tiny = preset("tinyllama-1.1b").unwrap().config();
    let (embedding, norms) = (32_000 * 2048, 45 * 2048);
    assert_eq!(tiny.active_parameters_per_token(), tiny.parameter_count() - embedding - norms);
    let qwen = preset("qwen3-0.6b").unwrap().config();
    let norms = 57 * 1024 + 28 * 2 * 128;
    assert_eq!(qwen.active_parameters_per_token(), qwen.parameter_count() - norms);
}

#[test]
fn kv_bytes_count_keys_and_values_of_all_layers() {
    let tiny = preset("tinyllama-1.1b").unwrap().config();
    assert_eq!(tiny.kv_bytes_per_token(DType::F16), 2 * 22 * 4 * 64 * 2);
    assert_eq!(tiny.kv_bytes_per_token(DType::F32), 2 * tiny.kv_bytes_per_token(DType::Bf16));
}

#[test]
fn the_list_names_each_weight_once_and_its_parts_fill_it() {
    for config in presets().iter().map(|p| p.config()).chain(CASES.map(|c| ModelConfig::from_dir(&fixture(c)).unwrap()))
    {
        let list = weight_list(&config);
        let names: HashSet<String> = list.iter().map(|info| info.id.name()).collect();
        assert_eq!(names.len(), list.len());
        let has_embed = list.iter().any(|info| info.id == WeightId::Embed);
        assert_eq!(has_embed, !config.tie_word_embeddings);
        assert_eq!(list.last().unwrap().id, WeightId::LmHead);
        for info in &list {
            let sum: usize = info.parts.iter().map(|(_, n)| n).sum();
            assert_eq!(sum, if info.vector { info.cols } else { info.experts * info.rows }, "{}", info.id);
            assert!(!info.vector || info.rows == 1);
        }
    }
    assert_eq!(WeightId::Layer(3, LayerWeight::Qkv).name(), "layers.3.qkv.weight");
    assert_eq!(WeightId::Layer(0, LayerWeight::GateUpBias).to_string(), "layers.0.gate_up.bias");
    assert_eq!(WeightId::Embed.name(), "embed");
}

#[test]
fn every_fixture_has_what_its_config_asks_for_and_uses_all_of_it() {
    for case in CASES.into_iter().chain(MOE_CASES) {
        let config = ModelConfig::from_dir(&fixture(case)).unwrap();
        let checkpoint = Checkpoint::open(&fixture(case)).unwrap();
        let stored = checkpoint.names().count();
        let source = WeightSource::Checkpoint(checkpoint);
        source.check(&config).unwrap_or_else(|e| panic!("{case}: {e}"));
        let used: usize = weight_list(&config).iter().map(|info| info.parts.len()).sum();
        assert_eq!(used, stored, "{case}");
        assert!(!source.is_random());
        assert!(source.describe().contains(case));
    }
}

#[test]
fn experts_in_blocks_are_checked_and_read() {
    let dir = copy_of("gpt-oss-mxfp4", "mxfp4");
    let open = || (ModelConfig::from_dir(&dir).unwrap(), WeightSource::Checkpoint(Checkpoint::open(&dir).unwrap()));
    let (config, source) = open();
    source.check(&config).unwrap();
    for info in weight_list(&config).iter().filter(|info| info.experts > 1) {
        let mut row = vec![f32::NAN; info.cols];
        source.fill_row_f32(info, info.experts * info.rows - 1, &mut row).unwrap();
        assert!(row.iter().any(|v| *v != 0.0) && row.iter().all(|v| v.is_finite()), "{}", info.id);
        says(source.fill_row_f32(info, info.experts * info.rows, &mut row), &["row"]);
    }
    let edit = |from: &str, to: &str| {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
    };
    edit("\"num_local_experts\": 5", "\"num_local_experts\": 6");
    let (config, source) = open();
    says(source.check(&config), &["mlp.router.weight", "[5, 32]", "[6, 32]"]);
    edit("\"num_local_experts\": 6", "\"num_local_experts\": 5");
    edit("\"intermediate_size\": 32", "\"intermediate_size\": 64");
    let (config, source) = open();
    says(source.check(&config), &["experts.gate_up_proj_blocks", "[5, 128, 1, 16]"]);
}

#[test]
fn fused_rows_are_the_rows_of_their_parts() {
    let config = ModelConfig::from_dir(&fixture("llama-bias")).unwrap();
    let stored = Checkpoint::open(&fixture("llama-bias")).unwrap();
    let source = WeightSource::Checkpoint(Checkpoint::open(&fixture("llama-bias")).unwrap());
    let f16_row = |name: &str, row: usize, cols: usize| -> Vec<f32> {
        let bytes = &stored.tensor(name).unwrap().data[row * cols * 2..][..cols * 2];
        bytes.chunks(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    };
    let list = weight_list(&config);
    let find = |weight| list.iter().find(|info| info.id == WeightId::Layer(1, weight)).unwrap();
    let qkv = find(LayerWeight::Qkv);
    for row in [0, 31, 32, 63, 64, 95] {
        let (name, local) = (["q_proj", "k_proj", "v_proj"][row / 32], row % 32);
        let mut out = vec![0.0; qkv.cols];
        source.fill_row_f32(qkv, row, &mut out).unwrap();
        assert_eq!(out, f16_row(&format!("model.layers.1.self_attn.{name}.weight"), local, 32));
    }
    let bias = find(LayerWeight::GateUpBias);
    let mut out = vec![0.0; bias.cols];
    source.fill_row_f32(bias, 0, &mut out).unwrap();
    let expected = ["gate", "up"].map(|m| f16_row(&format!("model.layers.1.mlp.{m}_proj.bias"), 0, 24)).concat();
    assert_eq!(out, expected);
    says(source.fill_row_f32(qkv, 96, &mut [0.0; 32]), &["layers.1.qkv.weight", "row 96", "96 rows of 32"]);
    says(source.fill_row_f32(qkv, 0, &mut [0.0; 31]), &["31 elements"]);
}

#[test]
fn a_checkpoint_that_does_not_fit_is_named_tensor_by_tensor() {
    let source = WeightSource::Checkpoint(Checkpoint::open(&fixture("llama")).unwrap());
    let config = ModelConfig::from_dir(&fixture("llama")).unwrap();
    let check = |change: &dyn Fn(&mut ModelConfig)| {
        let mut changed = config.clone();
        change(&mut changed);
        source.check(&changed)
    };
    says(
        check(&|c| c.intermediate_size = 48),
        &["llama", "`model.layers.0.mlp.gate_proj.weight`", "[24, 32]", "[48, 32]"],
    );
    says(check(&|c| c.dtype = DType::Bf16), &["`model.embed_tokens.weight`", "F32", "bfloat16", "torch_dtype"]);
    says(check(&|c| c.num_hidden_layers = 3), &["`model.layers.2.input_layernorm.weight`", "missing", "21 tensors"]);
    says(check(&|c| c.qkv_bias = true), &["`model.layers.0.self_attn.q_proj.bias`", "missing"]);
    check(&|c| c.tie_word_embeddings = true).expect("a head that is not needed does no harm");

    let tied = WeightSource::Checkpoint(Checkpoint::open(&fixture("qwen2")).unwrap());
    let mut config = ModelConfig::from_dir(&fixture("qwen2")).unwrap();
    config.tie_word_embeddings = false;
    says(tied.check(&config), &["`lm_head.weight`", "tie_word_embeddings", "set it to true"]);
}

#[test]
fn an_element_type_that_is_no_float_is_refused() {
    let dir = copy_of("llama", "integer-weights");
    let path = dir.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let text = b"\"F32\"";
    let at = bytes.windows(text.len()).position(|w| w == text).unwrap();
    let mut changed = bytes.clone();
    changed[at..at + text.len()].copy_from_slice(b"\"I32\"");
    std::fs::write(&path, changed).unwrap();
    let source = WeightSource::Checkpoint(Checkpoint::open(&dir).unwrap());
    says(source.check(&ModelConfig::from_dir(&dir).unwrap()), &["tensor `", "I32", "BF16"]);
}

#[test]
fn random_weights_are_the_same_fused_or_not_and_sized_as_asked() {
    let config = preset("llama-110m").unwrap().config();
    let source = WeightSource::Random { seed: 42 };
    source.check(&config).unwrap();
    assert!(source.is_random() && source.describe().contains("seed 42"));
    let list = weight_list(&config);
    let row = |info: &strobe_model::WeightInfo, row| {
        let mut out = vec![f32::NAN; info.cols];
        source.fill_row_f32(info, row, &mut out).unwrap();
        out
    };
    let find = |weight| list.iter().find(|info| info.id == WeightId::Layer(5, weight)).unwrap();
    let qkv = find(LayerWeight::Qkv);
    let mut k_alone = qkv.clone();
    k_alone.parts = vec![qkv.parts[1].clone()];
    k_alone.rows = qkv.parts[1].1;
    assert_eq!(row(qkv, 768 + 3), row(&k_alone, 3));
    assert_ne!(row(qkv, 3), row(qkv, 768 + 3));
    assert!(row(find(LayerWeight::InputNorm), 0).iter().all(|v| *v == 1.0));

    let std = |info| {
        let values: Vec<f32> = (0..64).flat_map(|r| row(info, r)).collect();
        (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
    };
    let residual = 0.02 / 24f64.sqrt();
    for (weight, expected) in [(LayerWeight::GateUp, 0.02), (LayerWeight::O, residual), (LayerWeight::Down, residual)] {
        let info = find(weight);
        assert!((std(info) / expected - 1.0).abs() < 0.02, "{weight:?}: {}", std(info));
        assert!(matches!(info.init, RandomInit::Normal { std } if (f64::from(std) / expected - 1.0).abs() < 1e-6));
    }
}

#[test]
fn random_weights_never_change() {
    // Engines built by one version must be comparable with those of the next: these values are part of the format.
    let config = preset("micro").unwrap().config();
    let info = &weight_list(&config)[0];
    let mut out = vec![0.0; info.cols];
    WeightSource::Random { seed: 0 }.fill_row_f32(info, 1, &mut out).unwrap();
    assert_eq!(out[..4], GOLDEN_ROW);
}

const GOLDEN_ROW: [f32; 4] = [0.03709997, 0.022774396, 0.011177352, 0.023961587];
