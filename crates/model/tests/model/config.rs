use std::path::Path;

use serde_json::{Value, json};
use strobe_model::{
    DType, ModelConfig, ModelError, RopeScaling, RoutingMethod, SwigluClamp, WeightId, presets, weight_list,
};

use crate::support::{CASES, MOE_CASES, copy_of, fixture, says};

/// A complete configuration; `changes` replaces members, null removes them.
fn with(changes: Value) -> Result<ModelConfig, ModelError> {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rope_theta": 500000.0,
    });
    for (field, value) in changes.as_object().unwrap() {
        if value.is_null() {
            config.as_object_mut().unwrap().remove(field);
        } else {
            config[field] = value.clone();
        }
    }
    from_text(&config.to_string())
}

fn from_text(text: &str) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(text, Path::new("somewhere/config.json"))
}

#[test]
fn experts_are_read_and_refused_by_name() {
    let read = |case: &str| ModelConfig::from_dir(&fixture(case)).unwrap();
    let mixtral = read("mixtral");
    let moe = mixtral.moe.as_ref().unwrap();
    assert_eq!((moe.num_experts, moe.experts_per_token, moe.intermediate_size), (6, 2, 24));
    assert_eq!((moe.routing, mixtral.window(0)), (RoutingMethod::TopKSoftmax, Some(24)));
    let qwen = read("qwen3-moe");
    let moe = qwen.moe.as_ref().unwrap();
    assert_eq!((moe.intermediate_size, moe.routing), (20, RoutingMethod::SoftmaxTopK { renormalise: false }));
    assert_eq!(moe.dense_layers, [0, 1, 2]);
    assert!(qwen.experts(2).is_none() && qwen.experts(3).is_some() && qwen.qk_norm);
    // One expert in five answers for three of them.
    let all: u64 = weight_list(&qwen).iter().filter(|w| w.experts > 1).map(|w| w.elements()).sum();
    let dense: u64 = weight_list(&qwen)
        .iter()
        .filter(|w| w.experts == 1 && !w.vector && w.id != WeightId::Embed)
        .map(|w| w.elements())
        .sum();
    assert_eq!(qwen.active_parameters_per_token(), dense + all / 5 * 3);

    let gpt = read("gpt-oss");
    let moe = gpt.moe.as_ref().unwrap();
    assert_eq!((moe.num_experts, moe.experts_per_token, moe.router_bias, moe.expert_bias), (5, 2, true, true));
    assert_eq!(moe.clamp, Some(SwigluClamp { alpha: 1.702, limit: 0.7 }));
    assert_eq!(gpt.sliding_window, [Some(14), None, Some(14)]);
    assert!(gpt.attention_sinks && gpt.qkv_bias && gpt.o_bias);
    assert!(matches!(gpt.rope_scaling, RopeScaling::Yarn { factor: 4.0, truncate: false, .. }));

    let deepseek = read("deepseek-v3");
    let (moe, latent) = (deepseek.moe.as_ref().unwrap(), deepseek.latent.unwrap());
    assert_eq!((moe.dense_layers.as_slice(), moe.shared_intermediate_size, moe.router_bias), (&[0][..], 32, true));
    assert_eq!((latent.q_lora_rank, latent.key_width(), latent.query_width()), (Some(20), 20, 18));
    assert_eq!((deepseek.head_dim, deepseek.num_key_value_heads, deepseek.attention_width()), (20, 1, 56));
    assert_eq!(read("deepseek-v3-plain").latent.unwrap().q_lora_rank, None);
    let text = std::fs::read_to_string(fixture("deepseek-v3").join("config.json")).unwrap();
    let with = |from: &str, to: &str| from_text(&text.replace(from, to));
    says(with("\"n_group\": 4", "\"n_group\": 3"), &["n_group", "8", "3"]);
    says(with("\"kv_lora_rank\": 12", "\"kv_lora_rank\": 11"), &["kv_lora_rank", "even"]);
    says(with("\"attention_bias\": false", "\"attention_bias\": true"), &["attention_bias"]);

    let text = std::fs::read_to_string(fixture("qwen3-moe").join("config.json")).unwrap();
    let with = |from: &str, to: &str| from_text(&text.replace(from, to));
    says(with("\"num_experts_per_tok\": 3", "\"num_experts_per_tok\": 9"), &["num_experts_per_tok", "5", "9"]);
    says(with("\"num_local_experts\": 5", "\"num_local_experts\": \"x\""), &["num_local_experts"]);
    says(with("\"moe_intermediate_size\": 20", "\"moe_intermediate_size\": 0"), &["moe_intermediate_size"]);
    says(with("[\n    1\n  ]", "[-1]"), &["mlp_only_layers", "-1"]);
    says(with("\"decoder_sparse_step\": 2", "\"decoder_sparse_step\": 0"), &["decoder_sparse_step"]);
    assert!(with("\"decoder_sparse_step\": 2", "\"decoder_sparse_step\": 9").unwrap().moe.is_none());
}

#[test]
fn every_fixture_is_read() {
    for case in CASES {
        let config = ModelConfig::from_dir(&fixture(case)).unwrap_or_else(|e| panic!("{case}: {e}"));
        assert_eq!((config.vocab_size, config.hidden_size, config.num_hidden_layers), (64, 32, 2));
        assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (Some(1), &[2][..]));
        assert_eq!(config.qk_norm, case == "qwen3");
        assert_eq!(config.qkv_bias, case == "llama-bias" || case.starts_with("qwen2"));
        assert_eq!(config.o_bias, case == "llama-bias");
        assert_eq!(config.mlp_bias, case == "llama-bias");
        assert_eq!(config.tie_word_embeddings, case.starts_with("qwen2") || case.ends_with("tied"));
        let windows = match case {
            "mistral-window" => vec![Some(8); 2],
            "qwen2-window" => vec![None, Some(6)],
            _ => vec![],
        };
        assert_eq!(config.sliding_window, windows, "{case}");
    }
    let scaled = ModelConfig::from_dir(&fixture("llama3-rope-tied")).unwrap();
    assert_eq!(scaled.rope_theta, 5000.0);
    assert_eq!(
        scaled.rope_scaling,
        RopeScaling::Llama3 {
            factor: 4.0,
            low_freq_factor: 0.5,
            high_freq_factor: 2.0,
            original_max_position_embeddings: 16
        }
    );
    assert_eq!(ModelConfig::from_dir(&fixture("qwen3")).unwrap().head_dim, 12);
    assert_eq!(ModelConfig::from_dir(&fixture("llama-f16")).unwrap().dtype, DType::F16);
}

#[test]
fn the_older_spelling_means_the_same() {
    let config = with(json!({"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192 }}))
    .unwrap();
    assert_eq!((config.dtype, config.rope_theta), (DType::Bf16, 500_000.0));
    assert!(matches!(config.rope_scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
    let linear = with(json!({"rope_scaling": {"type": "linear", "factor": 2}})).unwrap();
    assert_eq!(linear.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    for none in [json!(null), json!({"type": "default"}), json!({"rope_type": "default"})] {
        assert_eq!(with(json!({"rope_scaling": none})).unwrap().rope_scaling, RopeScaling::None);
    }
    let newer = with(json!({"rope_theta": null, "torch_dtype": null, "dtype": "float16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}))
    .unwrap();
    assert_eq!((newer.dtype, newer.rope_theta), (DType::F16, 12345.0));
}

#[test]
fn what_is_missing_has_the_default_of_its_class() {
    let bare = with(json!({"num_key_value_heads": null, "torch_dtype": null, "rms_norm_eps": null,
        "max_position_embeddings": null, "rope_theta": null, "architectures": null}))
    .unwrap();
    assert_eq!((bare.num_key_value_heads, bare.head_dim, bare.dtype), (8, 8, DType::F32));
    assert_eq!((bare.rms_norm_eps, bare.max_position_embeddings, bare.rope_theta), (1e-6, 2048, 10_000.0));
    assert_eq!((bare.bos_token_id, bare.eos_token_ids), (Some(1), vec![2]));
    assert_eq!(bare.architecture, "LlamaForCausalLM");
    let qwen = with(json!({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})).unwrap();
    assert_eq!((qwen.head_dim, qwen.bos_token_id, qwen.eos_token_ids), (128, None, vec![]));
    assert!(qwen.qk_norm && !qwen.qkv_bias && qwen.sliding_window.is_empty());
}

#[test]
fn the_dtype_is_taken_from_the_weights_where_the_config_has_none() {
    let dir = copy_of("llama-f16", "no-dtype");
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("dtype");
    std::fs::write(&path, config.to_string()).unwrap();
    assert_eq!(ModelConfig::from_dir(&dir).unwrap().dtype, DType::F16);
}

#[test]
fn end_tokens_are_a_number_a_list_or_nothing() {
    assert_eq!(with(json!({"eos_token_id": 7})).unwrap().eos_token_ids, [7]);
    assert_eq!(with(json!({"eos_token_id": [128001, 128009]})).unwrap().eos_token_ids, [128001, 128009]);
    assert_eq!(with(json!({"eos_token_id": -1})).unwrap().eos_token_ids, Vec::<u32>::new());
    let null = r#""eos_token_id": null, "vocab_size""#;
    let text = serde_json::to_string(&json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1}))
    .unwrap();
    let config = from_text(&text.replace("\"vocab_size\"", null)).unwrap();
    assert_eq!(config.eos_token_ids, Vec::<u32>::new());
    says(with(json!({"eos_token_id": "two"})), &["config.json", "`eos_token_id`", "\"two\""]);
}

#[test]
fn windows_follow_the_rules_of_each_family() {
    let mistral = |window: &str| {
        let text = format!(
            r#"{{"architectures":["MistralForCausalLM"],"vocab_size":9,"hidden_size":8,"intermediate_size":8,
            "num_hidden_layers":3,"num_attention_heads":1,"num_key_value_heads":1{window}}}"#
        );
        from_text(&text).map(|config| config.sliding_window)
    };
    assert_eq!(mistral("").unwrap(), vec![Some(4096); 3]);
    assert_eq!(mistral(r#","sliding_window":null"#).unwrap(), vec![]);
    assert_eq!(mistral(r#","sliding_window":5"#).unwrap(), vec![Some(5); 3]);
    says(mistral(r#","sliding_window":0"#), &["`sliding_window`", "from 1 to", "found 0"]);

    let qwen = |changes: Value| {
        let mut all = json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16});
        all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        with(all).map(|config| config.sliding_window)
    };
    assert_eq!(qwen(json!({})).unwrap(), vec![]);
    assert_eq!(qwen(json!({"use_sliding_window": true})).unwrap(), vec![]);
    assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 2})).unwrap(), vec![None, None, Some(16)]);
    assert_eq!(
        qwen(json!({"use_sliding_window": true,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}))
        .unwrap(),
        vec![Some(16), None, Some(16)]
    );
    says(
        qwen(json!({"use_sliding_window": true, "layer_types": ["full_attention"]})),
        &["`layer_types`", "1 entries", "3 layers"],
    );
    says(
        qwen(json!({"use_sliding_window": true,
            "layer_types": ["linear_attention", "full_attention", "full_attention"]})),
        &["`layer_types`", "linear_attention"],
    );
}

#[test]
fn what_cannot_be_run_is_refused_by_name() {
    let all = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"];
    let mut pieces = vec!["somewhere/config.json", "`GPT2LMHeadModel`"];
    pieces.extend(all);
    says(with(json!({"architectures": ["GPT2LMHeadModel"]})), &pieces);
    says(with(json!({"architectures": null, "model_type": "mamba"})), &["none given", "LlamaForCausalLM"]);
    says(with(json!({"architectures": "LlamaForCausalLM"})), &["`architectures`", "a list"]);
    for kind in ["dynamic", "longrope"] {
        says(
            with(json!({"rope_scaling": {"rope_type": kind, "factor": 4.0}})),
            &["`rope_scaling.rope_type`", kind, "supported: default, linear, llama3"],
        );
    }
    says(with(json!({"rope_scaling": {"factor": 4.0}})), &["`rope_scaling.rope_type`", "missing"]);
    says(with(json!({"rope_scaling": {"type": "linear"}})), &["`rope_scaling.factor`", "missing"]);
    says(with(json!({"partial_rotary_factor": 0.5})), &["`partial_rotary_factor`", "0.5"]);
    says(
        with(json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}})),
        &["`rope_parameters.partial_rotary_factor`", "0.25"],
    );
    says(with(json!({"quantization_config": {"quant_method": "awq"}})), &["`quantization_config`", "awq"]);
    says(with(json!({"hidden_act": "gelu"})), &["`hidden_act`", "gelu", "silu"]);
    says(with(json!({"torch_dtype": "float64"})), &["`torch_dtype`", "float64", "bfloat16"]);
}

#[test]
fn bad_numbers_name_their_field() {
    for field in ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"] {
        let name = format!("`{field}`");
        for bad in [json!(0), json!(-4), json!(1.5), json!("8"), json!(1e300), json!(u64::MAX), json!(true)] {
            says(with(json!({field: bad})), &["config.json", &name]);
        }
        says(with(json!({field: null})), &[&name, "missing"]);
    }
    says(with(json!({"num_key_value_heads": 3})), &["`num_key_value_heads`", "must divide", "8", "3"]);
    says(with(json!({"head_dim": 7})), &["`head_dim`", "even", "7"]);
    says(with(json!({"hidden_size": 65})), &["`head_dim`", "65", "8"]);
    says(with(json!({"rms_norm_eps": -1e-5})), &["`rms_norm_eps`"]);
    says(with(json!({"rms_norm_eps": 0})), &["`rms_norm_eps`"]);
    says(with(json!({"rope_theta": 0})), &["`rope_theta`"]);
    says(with(json!({"max_position_embeddings": 0})), &["`max_position_embeddings`"]);
    says(with(json!({"tie_word_embeddings": "yes"})), &["`tie_word_embeddings`", "true or false"]);
    says(
        with(json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
            "high_freq_factor": 1.0}})),
        &["`rope_scaling.high_freq_factor`", "low_freq_factor (4)"],
    );
    assert_eq!(with(json!({"hidden_size": 64.0})).unwrap().hidden_size, 64);
}

#[test]
fn bare_nan_and_infinity_are_named_with_field_and_line() {
    let text = "{\n  \"architectures\": [\"NaN \\\" Model\"],\n  \"rms_norm_eps\": NaN\n}";
    says(from_text(text), &["config.json", "`rms_norm_eps`", "NaN", "line 3"]);
    says(from_text("{\"rope_theta\": -Infinity}"), &["`rope_theta`", "-Infinity", "line 1"]);
    says(from_text("{\"a\": 1,\n \"hidden_size\": Infinity}"), &["`hidden_size`", "line 2"]);
}

#[test]
fn what_is_not_json_says_where() {
    says(from_text(""), &["config.json", "line 1", "JSON"]);
    says(from_text("{\n\"a\": 1,,\n}"), &["line 2"]);
    says(from_text("[1, 2]"), &["object", "[1,2]"]);
    says(from_text("{\"a\": \"unterminated"), &["JSON"]);
    says(from_text(&"[".repeat(100_000)), &["JSON"]);
    says(ModelConfig::from_dir(Path::new("no/such/dir")), &["no/such/dir/config.json", "cannot read"]);
}

#[test]
fn a_configuration_survives_its_own_serialisation() {
    for case in CASES.into_iter().chain(MOE_CASES) {
        let config = ModelConfig::from_dir(&fixture(case)).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ModelConfig>(&text).unwrap(), config);
    }
    for preset in presets() {
        let config = preset.config();
        config.validate().unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ModelConfig>(&text).unwrap(), config);
    }
    let mut config = presets()[0].config();
    config.rope_theta = f64::NAN;
    says(config.validate(), &["`rope_theta`", "NaN"]);
    config = presets()[0].config();
    config.architecture = "Other".to_string();
    says(config.validate(), &["`Other`", "LlamaForCausalLM"]);
}
