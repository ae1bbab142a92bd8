//! Engine directories: what is built can be opened, and nothing else can.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{build, load, model_name, names_in, says, scratch};
use serde_json::{Value, json};
use strobe_engine::engine_dir::{CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, build as build_dir};
use strobe_engine::staged_dir::{StagedDir, check_target};
use strobe_engine::{BuildConfig, EngineError, KvCacheType, LoadedModel, ModelRef, Quantization, WeightsOrigin, eval};
use strobe_kernels_cpu::{Cpu, Elems, Layout, Tier};
use strobe_model::{DType, WeightId, weight_list};

fn cpu() -> Cpu {
    Cpu::new(Tier::detect(), 2)
}

fn try_build(name: &str, options: BuildConfig, dir: &Path, overwrite: bool) -> Result<u64, EngineError> {
    let model = ModelRef::open(&model_name(name), 7)?;
    let config = model.engine_config(options)?;
    let mut done = Vec::new();
    let summary = build_dir(&mut cpu(), &model, &config, dir, overwrite, &[], &mut |bytes| {
        done.push(bytes);
        true
    })?;
    assert!(done.is_sorted() && done.len() == summary.tensors, "progress only grows, tensor by tensor");
    assert_eq!(done.last(), Some(&summary.weight_bytes));
    Ok(summary.weight_bytes)
}

/// A directory that holds one engine, `e`.
fn with_engine(test: &str, options: BuildConfig) -> (PathBuf, PathBuf) {
    let parent = scratch(test);
    let dir = parent.join("e");
    try_build("llama", options, &dir, false).unwrap();
    (parent, dir)
}

fn bytes_of<'a>(elements: &Elems<'a>) -> &'a [u8] {
    match *elements {
        Elems::F32(values) => bytemuck::cast_slice(values),
        Elems::F16(values) => bytemuck::cast_slice(values),
        Elems::Bf16(values) => bytemuck::cast_slice(values),
        Elems::Int8(bytes) | Elems::Int4(bytes) => bytes,
    }
}

fn edit_config(dir: &Path, pointer: &str, value: Value) {
    let path = dir.join(CONFIG_FILE);
    let mut document: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    *document.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
    fs::write(&path, document.to_string()).unwrap();
}

// ---- Round trips --------------------------------------------------------------------------------------------------

#[test]
fn what_is_built_is_opened_in_every_type_and_layout() {
    let parent = scratch("round_trip");
    for name in ["llama", "llama-bias", "qwen3", "llama-sharded", "micro"] {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for gemm_plugin in [true, false] {
                let what = format!("{name}-{dtype}-{gemm_plugin}");
                let options = BuildConfig {
                    gemm_plugin,
                    paged_kv_cache: gemm_plugin,
                    context_fmha: !gemm_plugin,
                    ..build(dtype)
                };
                let dir = parent.join("not yet there").join(&what);
                let bytes = try_build(name, options.clone(), &dir, false).unwrap();
                let opened = LoadedModel::open(&dir).unwrap();
                let in_memory = load(name, options);
                assert_eq!(opened.config, in_memory.config, "{what}");
                assert_eq!(opened.weights.total_bytes(), bytes, "{what}");
                assert_eq!(opened.dir.as_deref(), Some(dir.as_path()));
                assert_eq!(opened.tokenizer.is_some(), in_memory.tokenizer.is_some(), "{what}");
                assert_eq!(opened.tokenizer.is_some(), names_in(&dir).contains(&TOKENIZER_FILE.to_string()), "{what}");
                for info in weight_list(&opened.config.model) {
                    if info.vector {
                        let (a, b) =
                            (opened.weights.vector(info.id).unwrap(), in_memory.weights.vector(info.id).unwrap());
                        common::assert_same_bits(a, b, &what);
                        continue;
                    }
                    let (a, b) = (opened.weights.matrix(info.id).unwrap(), in_memory.weights.matrix(info.id).unwrap());
                    assert_eq!((a.n, a.k, a.layout), (b.n, b.k, b.layout), "{what} {}", info.id.name());
                    assert_eq!(a.layout == Layout::Packed, gemm_plugin && info.id != strobe_model::WeightId::Embed);
                    assert!(bytes_of(&a.data) == bytes_of(&b.data), "{what} {}", info.id.name());
                }
            }
        }
    }
}

/// Integer matrices survive their file, with a table of their own where the head is tied; the build knows what rounding
/// took; and weights moved to memory are the same weights.
#[test]
fn integer_engines_are_opened_as_built_and_may_move_to_memory() {
    let parent = scratch("integers");
    let kinds = [(Quantization::Int8, 0.003, 0.02), (Quantization::Int4, 0.03, 0.15)];
    for name in ["llama", "llama3-rope-tied", "micro"] {
        for (quantization, least, most) in kinds {
            let what = format!("{name}-{}", quantization.name());
            let options = BuildConfig { quantization, ..build(DType::Bf16) };
            let dir = parent.join(&what);
            let model = ModelRef::open(&model_name(name), 7).unwrap();
            let config = model.engine_config(options.clone()).unwrap();
            let summary = build_dir(&mut cpu(), &model, &config, &dir, false, &[], &mut |_| true).unwrap();
            let layers = config.model.num_hidden_layers;
            assert_eq!(summary.errors.len(), 4 * layers + 1, "{what}: every matrix but the table");
            for (id, error) in &summary.errors {
                let least = if *id == WeightId::LmHead { 0.003 } else { least };
                assert!((least..most).contains(&error.relative()), "{what} {id}: {}", error.relative());
            }
            let opened = LoadedModel::open(&dir).unwrap();
            assert_eq!(opened.config, config, "{what}");
            let table = opened.weights.matrix(WeightId::Embed).unwrap();
            assert!(matches!(table.data, Elems::Bf16(_)) && table.layout == Layout::RowMajor, "{what}");
            let head = opened.weights.matrix(WeightId::LmHead).unwrap();
            assert!(matches!(head.data, Elems::Int8(_)), "{what}");

            let logits = |model: &LoadedModel| eval::logits(cpu(), model, &[3, 9, 27], 2).unwrap().decode_logits;
            let expected = logits(&load(name, options));
            assert_eq!(logits(&opened), expected, "{what}");
            assert!(opened.weights.is_mapped());
            opened.weights.move_to_memory(&mut cpu()).unwrap();
            assert!(!opened.weights.is_mapped());
            assert_eq!(opened.weights.total_bytes(), summary.weight_bytes, "{what}");
            assert_eq!(logits(&opened), expected, "{what}");
        }
    }
    // What the configuration says of the matrices must be what is in the file.
    let dir = parent.join("llama-int8");
    edit_config(&dir, "/pretrained_config/quantization/quant_algo", Value::Null);
    says(LoadedModel::open(&dir), &["rank0.engine", "U8", "BF16"]);
    edit_config(&dir, "/pretrained_config/quantization/quant_algo", json!("W4A8"));
    says(LoadedModel::open(&dir), &["rank0.engine", "shape"]);
}

#[test]
fn devices_refuse_what_they_lack_in_one_line() {
    let model = load("llama", build(DType::F32));
    for (change, pieces) in [
        (BuildConfig { quantization: Quantization::Fp8, ..build(DType::F32) }, ["--quantization fp8", "GPU"]),
        (BuildConfig { kv_cache: KvCacheType::Fp8, ..build(DType::F32) }, ["--kv-cache-dtype fp8", "GPU"]),
    ] {
        let model = common::rebuilt(&model, |b| *b = change.clone());
        says(eval::logits(cpu(), &model, &[3], 0), &pieces);
    }
    let int4 = BuildConfig { quantization: Quantization::Int4, ..build(DType::Bf16) };
    says(int4.check_gpu(), &["--quantization int4", "--device cpu"]);
    let cache = BuildConfig { kv_cache: KvCacheType::Int8, ..build(DType::Bf16) };
    says(cache.check_gpu(), &["--kv-cache-dtype int8", "CPU"]);
    let own = BuildConfig { kv_cache: KvCacheType::Float(DType::Bf16), ..build(DType::Bf16) };
    assert!(own.check_gpu().is_ok() && build(DType::F16).check_gpu().is_ok());
    let plain = BuildConfig { gemm_plugin: false, ..int4 };
    says(plain.validate(&model.config.model), &["--gemm-plugin", "int4"]);
}

#[test]
fn the_seed_of_random_weights_is_kept() {
    let dir = scratch("seed").join("e");
    let model = ModelRef::open("micro", 12345).unwrap();
    let config = model.engine_config(build(DType::F32)).unwrap();
    build_dir(&mut cpu(), &model, &config, &dir, false, &[], &mut |_| true).unwrap();
    assert_eq!(LoadedModel::open(&dir).unwrap().config.weights, WeightsOrigin::Random { seed: 12345 });
}

#[test]
fn models_are_found_or_refused_by_name() {
    says(ModelRef::open("no-such-model", 0), &["--model", "no-such-model", "micro", "tinyllama-1.1b"]);
    let (_, dir) = with_engine("as_model", build(DType::F32));
    says(ModelRef::open(&dir.display().to_string(), 0), &["--model", "engine directory", "--engine-dir"]);
    let model = ModelRef::open(&model_name("llama"), 0).unwrap();
    let refused = |change: fn(&mut BuildConfig), pieces: &[&str]| {
        let mut options = build(DType::F32);
        change(&mut options);
        says(model.engine_config(options), pieces);
    };
    refused(|b| b.max_seq_len = 129, &["--max-seq-len", "129", "128"]);
    refused(|b| b.max_batch_size = 0, &["--max-batch-size"]);
    refused(|b| b.tokens_per_block = 12, &["--tokens-per-block", "12", "power of two"]);
    refused(|b| b.max_num_tokens = 8, &["--max-num-tokens", "8", "16"]);
}

// ---- Directories that can't be opened -----------------------------------------------------------------------------

#[test]
fn missing_and_damaged_files_are_named() {
    let (parent, dir) = with_engine("damaged", build(DType::F32));
    says(LoadedModel::open(&parent.join("nowhere")), &["nowhere", CONFIG_FILE]);

    let weights = fs::read(dir.join(WEIGHTS_FILE)).unwrap();
    for keep in [0, 1, 7, 8, 100, weights.len() / 2, weights.len() - 1] {
        fs::write(dir.join(WEIGHTS_FILE), &weights[..keep]).unwrap();
        says(LoadedModel::open(&dir), &[WEIGHTS_FILE]);
    }
    let longer = [&weights[..], &[0; 4]].concat();
    fs::write(dir.join(WEIGHTS_FILE), longer).unwrap();
    says(LoadedModel::open(&dir), &[WEIGHTS_FILE]);
    fs::remove_file(dir.join(WEIGHTS_FILE)).unwrap();
    says(LoadedModel::open(&dir), &[WEIGHTS_FILE]);
    fs::write(dir.join(WEIGHTS_FILE), &weights).unwrap();
    LoadedModel::open(&dir).unwrap();

    let config = fs::read_to_string(dir.join(CONFIG_FILE)).unwrap();
    for keep in [0, 1, config.len() / 2, config.len() - 3] {
        fs::write(dir.join(CONFIG_FILE), &config[..keep]).unwrap();
        says(LoadedModel::open(&dir), &[CONFIG_FILE, "JSON", "strobe build"]);
    }
    fs::write(dir.join(CONFIG_FILE), [0xff, 0xfe, 0x00]).unwrap();
    says(LoadedModel::open(&dir), &[CONFIG_FILE]);
    fs::remove_file(dir.join(CONFIG_FILE)).unwrap();
    says(LoadedModel::open(&dir), &[CONFIG_FILE]);

    fs::write(dir.join(CONFIG_FILE), &config).unwrap();
    fs::write(dir.join(TOKENIZER_FILE), "{").unwrap();
    says(LoadedModel::open(&dir), &[TOKENIZER_FILE]);
}

#[test]
fn weights_of_another_kind_are_refused_by_tensor() {
    let weights_edited = |pointer: &str, value: Value, pieces: &[&str]| {
        let (_, dir) = with_engine("edited_weights", build(DType::F32));
        edit_config(&dir, pointer, value);
        says(LoadedModel::open(&dir), &[&[WEIGHTS_FILE], pieces].concat());
    };
    weights_edited("/pretrained_config/dtype", json!("bfloat16"), &["BF16", "F32"]);
    weights_edited("/pretrained_config/dtype", json!("float16"), &["F16", "F32"]);
    // Panels and plain rows often have the same size: the shape tells them apart.
    weights_edited("/build_config/plugin_config/gemm_plugin", json!("disable"), &["shape"]);
    weights_edited("/pretrained_config/intermediate_size", json!(32), &["shape", "32"]);
    weights_edited("/pretrained_config/vocab_size", json!(128), &["shape"]);
    // Tensors that the configuration knows nothing of.
    weights_edited("/pretrained_config/tie_word_embeddings", json!(true), &["embed", "no such tensor"]);
    let (_, dir) = with_engine("fewer_layers", build(DType::F32));
    edit_config(&dir, "/pretrained_config/num_hidden_layers", json!(1));
    edit_config(&dir, "/pretrained_config/sliding_window", json!([null]));
    says(LoadedModel::open(&dir), &[WEIGHTS_FILE, "layers.1", "no such tensor"]);

    let (_, plain) = with_engine("plain_weights", BuildConfig { gemm_plugin: false, ..build(DType::F32) });
    edit_config(&plain, "/build_config/plugin_config/gemm_plugin", json!("auto"));
    says(LoadedModel::open(&plain), &[WEIGHTS_FILE, "shape"]);

    // A file of another model altogether.
    let (parent, dir) = with_engine("foreign_weights", build(DType::F32));
    try_build("qwen2", build(DType::F32), &parent.join("other"), false).unwrap();
    fs::copy(parent.join("other").join(WEIGHTS_FILE), dir.join(WEIGHTS_FILE)).unwrap();
    says(LoadedModel::open(&dir), &[WEIGHTS_FILE]);
}

#[test]
fn edited_fields_are_named() {
    let cases: [(&str, Value, &[&str]); 16] = [
        ("/version", json!("0.0.9"), &["0.0.9", "strobe build"]),
        ("/version", json!("99.0.0"), &["99.0.0", "strobe build"]),
        ("/version", json!(null), &["version"]),
        ("/model_name", json!(3), &["model_name"]),
        ("/pretrained_config/dtype", json!("int8"), &["pretrained_config.dtype", "int8"]),
        ("/pretrained_config/hidden_act", json!("gelu"), &["hidden_act", "gelu"]),
        ("/pretrained_config/mapping/pp_size", json!(2), &["mapping.pp_size", "2"]),
        ("/pretrained_config/quantization/quant_algo", json!("W4A16_AWQ"), &["quant_algo", "W4A16_AWQ"]),
        ("/pretrained_config/num_hidden_layers", json!(0), &["num_hidden_layers"]),
        ("/pretrained_config/num_attention_heads", json!(3), &["num_attention_heads"]),
        ("/build_config/max_beam_width", json!(2), &["max_beam_width", "2"]),
        ("/build_config/max_seq_len", json!(100_000), &["build_config.max_seq_len", "100000"]),
        ("/build_config/max_batch_size", json!("8"), &["max_batch_size"]),
        ("/build_config/plugin_config/context_fmha", json!(1), &["context_fmha"]),
        ("/build_config/plugin_config/tokens_per_block", json!(24), &["plugin_config.tokens_per_block", "24"]),
        ("/build_config/weights/origin", json!("elsewhere"), &["weights.origin", "elsewhere"]),
    ];
    let (_, dir) = with_engine("edited", build(DType::F32));
    let original = fs::read(dir.join(CONFIG_FILE)).unwrap();
    for (pointer, value, pieces) in cases {
        fs::write(dir.join(CONFIG_FILE), &original).unwrap();
        edit_config(&dir, pointer, value);
        says(LoadedModel::open(&dir), pieces);
    }
    // A patch release is no other version.
    let (major_minor, _) = env!("CARGO_PKG_VERSION").rsplit_once('.').unwrap();
    fs::write(dir.join(CONFIG_FILE), &original).unwrap();
    edit_config(&dir, "/version", json!(format!("{major_minor}.999")));
    LoadedModel::open(&dir).unwrap();
}

// ---- Whole or not at all ------------------------------------------------------------------------------------------

#[test]
fn an_existing_directory_is_replaced_only_on_request_and_only_if_it_is_an_engine() {
    let (parent, dir) = with_engine("overwrite", build(DType::F32));
    let bf16 = || build(DType::Bf16);
    says(try_build("llama", bf16(), &dir, false), &["--output-dir", "exists already", "--overwrite"]);
    assert_eq!(LoadedModel::open(&dir).unwrap().config.build.dtype, DType::F32, "the old one is untouched");
    fs::write(dir.join("left over"), "x").unwrap();
    try_build("llama", bf16(), &dir, true).unwrap();
    assert_eq!(LoadedModel::open(&dir).unwrap().config.build.dtype, DType::Bf16);
    assert!(!names_in(&dir).contains(&"left over".to_string()), "replaced, not mixed");

    // Something else is never replaced.
    let other = parent.join("thesis");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("chapter"), "one").unwrap();
    fs::write(other.join(CONFIG_FILE), "{}").unwrap();
    for overwrite in [false, true] {
        says(try_build("llama", bf16(), &other, overwrite), &["--output-dir", "thesis"]);
    }
    says(try_build("llama", bf16(), &other, true), &["is no engine directory", WEIGHTS_FILE]);
    assert_eq!(fs::read_to_string(other.join("chapter")).unwrap(), "one");
    says(try_build("llama", bf16(), &other.join("chapter"), true), &["is a file"]);
    says(try_build("llama", bf16(), &other.join("chapter").join("e"), true), &["chapter"]);
    says(try_build("llama", bf16(), &parent.join(".."), true), &["--output-dir"]);

    // An empty one may be filled.
    fs::create_dir(parent.join("empty")).unwrap();
    try_build("llama", bf16(), &parent.join("empty"), false).unwrap();
    assert_eq!(names_in(&parent), ["e", "empty", "thesis"], "nothing partial stays behind");
}

#[test]
fn a_failed_build_leaves_nothing_and_touches_nothing() {
    let (parent, dir) = with_engine("failing", build(DType::F32));
    let before = fs::read(dir.join(WEIGHTS_FILE)).unwrap();
    let model = ModelRef::open(&model_name("llama"), 7).unwrap();
    let config = model.engine_config(build(DType::Bf16)).unwrap();
    for (target, overwrite) in [(dir.clone(), true), (parent.join("new"), false)] {
        let mut left = 3;
        let stopped = build_dir(&mut cpu(), &model, &config, &target, overwrite, &[], &mut |_| {
            left -= 1;
            left > 0 // stop in the middle of the weights
        });
        assert!(matches!(stopped, Err(EngineError::Interrupted)));
        assert_eq!(names_in(&parent), ["e"]);
    }
    assert_eq!(fs::read(dir.join(WEIGHTS_FILE)).unwrap(), before);
    LoadedModel::open(&dir).unwrap();
}

#[test]
fn a_staged_directory_appears_on_commit_only() {
    let parent = scratch("staged");
    let target = parent.join("deep").join("run");
    let marks = ["mark"];
    let staged = StagedDir::create(&target, false, &marks, "run directory").unwrap();
    fs::write(staged.path().join("mark"), "1").unwrap();
    assert!(!target.exists());
    drop(staged);
    assert_eq!(names_in(&parent), [""; 0], "dropped without a trace, its parents too");

    let staged = StagedDir::create(&target, false, &marks, "run directory").unwrap();
    fs::write(staged.path().join("mark"), "2").unwrap();
    staged.commit().unwrap();
    assert_eq!(fs::read_to_string(target.join("mark")).unwrap(), "2");

    // Replaced at once, with nothing of the old one left.
    fs::write(target.join("old"), "").unwrap();
    let staged = StagedDir::create(&target, true, &marks, "run directory").unwrap();
    fs::write(staged.path().join("mark"), "3").unwrap();
    assert_eq!(fs::read_to_string(target.join("mark")).unwrap(), "2", "the old one stays until the new one is whole");
    staged.commit().unwrap();
    assert_eq!(names_in(&target), ["mark"]);
    assert_eq!(names_in(&parent.join("deep")), ["run"]);

    // What somebody else put there in the meantime is not replaced.
    let contested = parent.join("deep").join("contested");
    let staged = StagedDir::create(&contested, false, &marks, "run directory").unwrap();
    fs::create_dir(&contested).unwrap();
    fs::write(contested.join("theirs"), "").unwrap();
    says(staged.commit(), &["move into place", "contested"]);
    assert_eq!(names_in(&contested), ["theirs"]);
    assert_eq!(names_in(&parent.join("deep")), ["contested", "run"]);

    // The same refusals are to be had before any work is done.
    says(check_target(&target, false, &marks, "run directory"), &["exists already"]);
    says(check_target(&contested, true, &marks, "run directory"), &["is no run directory", "mark"]);
    check_target(&target, true, &marks, "run directory").unwrap();
    check_target(&parent.join("fresh"), false, &marks, "run directory").unwrap();
}

#[test]
fn a_build_that_the_disk_cannot_hold_is_refused_before_it_starts() {
    let dir = scratch("too_large").join("engine");
    let model = ModelRef::open("deepseek-v3", 0).unwrap();
    let config = model.engine_config(build(DType::F32)).unwrap();
    let needed = strobe_engine::weights::engine_bytes(&config.model, &config.build);
    if strobe_engine::memory::free_disk(&dir).is_none_or(|free| free >= needed) {
        eprintln!("skipped: this disk could hold {needed} bytes");
        return;
    }
    let built = build_dir(&mut cpu(), &model, &config, &dir, false, &[], &mut |_| true);
    says(built, &["--output-dir", "deepseek-v3", "GiB needed", "GiB free"]);
    assert!(!dir.exists());
}
