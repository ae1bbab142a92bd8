//! An engine's `config.json`: what was built, and with which options.
//!
//! Field names follow TensorRT-LLM's engine directories where they exist there. Reading is strict: a value that
//! this version can't run is refused by the path of its field.

use std::path::Path;

use serde_json::{Value, json};
use strobe_kernels_cpu::Tier;
use strobe_model::program::ProgramOptions;
use strobe_model::{DType, ModelConfig, ModelError};

use crate::error::EngineError;
use crate::quantization::{KvCacheType, Quantization};

/// Version written into engines; major and minor must match to load one.
pub const ENGINE_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Options of `strobe build`.
#[derive(Clone, Debug, PartialEq)]
pub struct BuildConfig {
    /// Type of the weights.
    pub dtype: DType,
    /// Most requests in a step.
    pub max_batch_size: usize,
    /// Most tokens in a step.
    pub max_num_tokens: usize,
    /// Longest sequence.
    pub max_seq_len: usize,
    /// Tokens per cache block; also the unit of context chunks.
    pub tokens_per_block: usize,
    /// Packed and tuned GEMM (`auto`), or the plain blocked one (`disable`).
    pub gemm_plugin: bool,
    /// Fused attention in context, or three ops through memory.
    pub context_fmha: bool,
    /// Paged cache, or one contiguous piece per request.
    pub paged_kv_cache: bool,
    /// How matrices are kept and multiplied.
    pub quantization: Quantization,
    /// Type of the cache.
    pub kv_cache: KvCacheType,
}

/// Where an engine's weights come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightsOrigin {
    /// Seeded random numbers in the true shapes.
    Random {
        /// The seed.
        seed: u64,
    },
    /// A checkpoint.
    Checkpoint,
}

impl WeightsOrigin {
    /// For reports.
    pub fn describe(&self) -> String {
        match self {
            WeightsOrigin::Random { seed } => format!("random (seed {seed})"),
            WeightsOrigin::Checkpoint => "real (checkpoint)".to_string(),
        }
    }
}

/// All of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Preset name or checkpoint directory it was built from.
    pub model_name: String,
    /// The model.
    pub model: ModelConfig,
    /// The options.
    pub build: BuildConfig,
    /// Where the weights came from.
    pub weights: WeightsOrigin,
}

impl BuildConfig {
    /// The defaults for `model`, for a CPU: its own type, nothing quantized, fused and paged.
    pub fn for_model(model: &ModelConfig) -> BuildConfig {
        BuildConfig {
            dtype: model.dtype,
            max_batch_size: 64,
            max_num_tokens: 2048,
            // Models made for 128 k tokens would reserve tables nobody uses.
            max_seq_len: model.max_position_embeddings.min(4096),
            tokens_per_block: 32,
            gemm_plugin: true,
            context_fmha: true,
            paged_kv_cache: true,
            quantization: Quantization::None,
            kv_cache: KvCacheType::Auto,
        }
    }

    /// Check the options against the model and each other.
    pub fn validate(&self, model: &ModelConfig) -> Result<(), EngineError> {
        let positive = |option: &str, value: usize, most: usize| {
            if (1..=most).contains(&value) {
                Ok(())
            } else {
                Err(EngineError::option(option, format!("must be between 1 and {most}, found {value}")))
            }
        };
        positive("--max-batch-size", self.max_batch_size, u16::MAX as usize)?; // blocks of a launch in one direction
        positive("--max-num-tokens", self.max_num_tokens, 1 << 20)?;
        positive("--max-seq-len", self.max_seq_len, 1 << 22)?;
        positive("--tokens-per-block", self.tokens_per_block, 1 << 12)?;
        if !self.tokens_per_block.is_power_of_two() {
            let problem = format!("must be a power of two, found {}", self.tokens_per_block);
            return Err(EngineError::option("--tokens-per-block", problem));
        }
        if self.max_num_tokens < self.tokens_per_block.min(self.max_seq_len) {
            let problem = format!(
                "{} is below --tokens-per-block {}, so no chunk of a prompt would fit a step; raise it",
                self.max_num_tokens, self.tokens_per_block
            );
            return Err(EngineError::option("--max-num-tokens", problem));
        }
        if self.quantization.is_integer() && !self.gemm_plugin {
            let problem =
                format!("disable does not support --quantization {}; leave one of them out", self.quantization.name());
            return Err(EngineError::option("--gemm-plugin", problem));
        }
        if self.max_seq_len > model.max_position_embeddings {
            let problem = format!(
                "{} is beyond the model's max_position_embeddings {}; lower it",
                self.max_seq_len, model.max_position_embeddings
            );
            return Err(EngineError::option("--max-seq-len", problem));
        }
        self.check_types(model)
    }

    /// Tokens per block of the cache as it is laid out: a contiguous cache is one block per request.
    pub fn cache_block_tokens(&self) -> usize {
        if self.paged_kv_cache { self.tokens_per_block } else { self.max_seq_len.next_power_of_two() }
    }

    /// How the model's list is put together for a CPU of this tier, or for a GPU, which folds ops step by step.
    pub fn program_options(&self, cpu: Option<Tier>) -> ProgramOptions {
        ProgramOptions {
            context_fmha: self.context_fmha,
            own_table: self.quantization.is_integer(),
            // Only tuned products have it.
            activated_multiple: cpu.and_then(Tier::activated_multiple).filter(|_| self.gemm_plugin),
        }
    }

    /// Name of the GEMM option's value.
    pub fn gemm_plugin_name(&self) -> &'static str {
        if self.gemm_plugin { "auto" } else { "disable" }
    }
}

impl EngineConfig {
    /// Where the weights come from, for reports.
    pub fn describe_origin(&self) -> String {
        let skew = self.model.moe.as_ref().and_then(|moe| moe.router_skew.as_ref());
        let skew = skew.map(|skew| format!(", routers skewed by {}", skew.asked)).unwrap_or_default();
        format!("{}{skew}", self.weights.describe())
    }

    /// The document.
    pub fn to_json(&self) -> Value {
        let mut pretrained = serde_json::to_value(&self.model).unwrap_or_default();
        pretrained["dtype"] = json!(self.build.dtype.name());
        pretrained["logits_dtype"] = json!("float32");
        pretrained["hidden_act"] = json!("silu");
        pretrained["position_embedding_type"] = json!("rope_gpt_neox");
        pretrained["mapping"] = json!({"world_size": 1, "tp_size": 1, "pp_size": 1});
        pretrained["kv_dtype"] = json!(self.build.kv_cache.name());
        pretrained["quantization"] = json!({
            "quant_algo": self.build.quantization.algorithm(),
            "kv_cache_quant_algo": self.build.kv_cache.algorithm(),
        });
        let weights = match &self.weights {
            WeightsOrigin::Random { seed } => json!({"origin": "random", "seed": seed}),
            WeightsOrigin::Checkpoint => json!({"origin": "checkpoint"}),
        };
        let build = &self.build;
        json!({
            "version": ENGINE_VERSION,
            "model_name": self.model_name,
            "pretrained_config": pretrained,
            "build_config": {
                "max_seq_len": build.max_seq_len,
                "max_batch_size": build.max_batch_size,
                "max_beam_width": 1,
                "max_num_tokens": build.max_num_tokens,
                "kv_cache_type": if build.paged_kv_cache { "PAGED" } else { "CONTINUOUS" },
                "checkpoint_dtype": self.model.dtype.name(),
                "weights": weights,
                "plugin_config": {
                    "gemm_plugin": build.gemm_plugin_name(),
                    "context_fmha": build.context_fmha,
                    "paged_kv_cache": build.paged_kv_cache,
                    "tokens_per_block": build.tokens_per_block,
                },
            },
        })
    }

    /// Read the document; `path` is named in errors.
    pub fn from_json(text: &str, path: &Path) -> Result<EngineConfig, EngineError> {
        let document: Value = serde_json::from_str(text).map_err(|error| EngineError::Field {
            path: path.to_path_buf(),
            field: "(whole file)".into(),
            expected: "JSON".into(),
            found: format!("an error: {error}"),
        })?;
        let reader = Reader { document: &document, path };
        let version = reader.text("version")?;
        let minor = |v: &str| v.split('.').take(2).map(str::to_string).collect::<Vec<_>>();
        if minor(&version) != minor(ENGINE_VERSION) {
            return Err(EngineError::Version {
                path: path.to_path_buf(),
                found: version,
                expected: ENGINE_VERSION.to_string(),
            });
        }
        for (field, only) in [
            ("pretrained_config.mapping.world_size", json!(1)),
            ("pretrained_config.mapping.tp_size", json!(1)),
            ("pretrained_config.mapping.pp_size", json!(1)),
            ("pretrained_config.hidden_act", json!("silu")),
            ("pretrained_config.logits_dtype", json!("float32")),
            ("pretrained_config.position_embedding_type", json!("rope_gpt_neox")),
            ("build_config.max_beam_width", json!(1)),
        ] {
            let found = reader.value(field)?;
            if *found != only {
                return Err(reader.refuse(field, &only.to_string(), found));
            }
        }
        let dtype = |field: &str| -> Result<DType, EngineError> {
            let name = reader.text(field)?;
            let found = Value::String(name.clone());
            DType::from_name(&name).ok_or_else(|| reader.refuse(field, "float32, float16 or bfloat16", &found))
        };
        let mut pretrained = reader.value("pretrained_config")?.clone();
        let build_dtype = dtype("pretrained_config.dtype")?;
        pretrained["dtype"] = json!(dtype("build_config.checkpoint_dtype")?.name());
        let model: ModelConfig = serde_json::from_value(pretrained).map_err(|error| EngineError::Field {
            path: path.to_path_buf(),
            field: "pretrained_config".into(),
            expected: "a model configuration".into(),
            found: error.to_string(),
        })?;
        let refused = |field: String, problem: String| EngineError::Field {
            path: path.to_path_buf(),
            field,
            expected: "a value that fits the others".into(),
            found: problem,
        };
        model.validate().map_err(|error| match error {
            ModelError::Config { field, problem, .. } => refused(format!("pretrained_config.{field}"), problem),
            other => other.into(),
        })?;
        let plugin = "build_config.plugin_config";
        let gemm = reader.choice(&format!("{plugin}.gemm_plugin"), &["auto", "disable"])?;
        let kind = reader.choice("build_config.kv_cache_type", &["PAGED", "CONTINUOUS"])?;
        let build = BuildConfig {
            dtype: build_dtype,
            max_batch_size: reader.size("build_config.max_batch_size")?,
            max_num_tokens: reader.size("build_config.max_num_tokens")?,
            max_seq_len: reader.size("build_config.max_seq_len")?,
            tokens_per_block: reader.size(&format!("{plugin}.tokens_per_block"))?,
            gemm_plugin: gemm == "auto",
            context_fmha: reader.flag(&format!("{plugin}.context_fmha"))?,
            paged_kv_cache: reader.flag(&format!("{plugin}.paged_kv_cache"))?,
            quantization: reader.algorithm(
                "pretrained_config.quantization.quant_algo",
                Quantization::ALL.map(|q| (q, q.algorithm())).to_vec(),
            )?,
            kv_cache: reader.kv_cache()?,
        };
        if build.paged_kv_cache != (kind == "PAGED") {
            let expected = if build.paged_kv_cache { "PAGED" } else { "CONTINUOUS" };
            return Err(reader.refuse("build_config.kv_cache_type", expected, &json!(kind)));
        }
        build.validate(&model).map_err(|error| match error {
            EngineError::Option { option, problem } => {
                // Some name the value as well.
                let words = option.split(' ').collect::<Vec<_>>();
                let (name, value) = (words[0].trim_start_matches('-').replace('-', "_"), &words[1..]);
                let field = match name.as_str() {
                    "quantization" => "pretrained_config.quantization.quant_algo".to_string(),
                    "kv_cache_dtype" => "pretrained_config.kv_dtype".to_string(),
                    "tokens_per_block" | "gemm_plugin" => format!("{plugin}.{name}"),
                    _ => format!("build_config.{name}"),
                };
                refused(field, value.iter().copied().chain([problem.as_str()]).collect::<Vec<_>>().join(" "))
            }
            other => other,
        })?;
        let weights = match reader.choice("build_config.weights.origin", &["random", "checkpoint"])?.as_str() {
            "random" => WeightsOrigin::Random { seed: reader.size("build_config.weights.seed")? as u64 },
            _ => WeightsOrigin::Checkpoint,
        };
        Ok(EngineConfig { model_name: reader.text("model_name")?, model, build, weights })
    }
}

/// Fields by path, with errors that name them.
struct Reader<'a> {
    document: &'a Value,
    path: &'a Path,
}

impl Reader<'_> {
    fn value(&self, field: &str) -> Result<&Value, EngineError> {
        let found = field.split('.').try_fold(self.document, |value, key| value.get(key));
        found.ok_or_else(|| EngineError::Field {
            path: self.path.to_path_buf(),
            field: field.to_string(),
            expected: "a value".into(),
            found: "nothing".into(),
        })
    }

    fn refuse(&self, field: &str, expected: &str, found: &Value) -> EngineError {
        EngineError::Field {
            path: self.path.to_path_buf(),
            field: field.to_string(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    fn text(&self, field: &str) -> Result<String, EngineError> {
        let value = self.value(field)?;
        value.as_str().map(str::to_string).ok_or_else(|| self.refuse(field, "a text", value))
    }

    fn size(&self, field: &str) -> Result<usize, EngineError> {
        let value = self.value(field)?;
        let number = value.as_u64().and_then(|v| usize::try_from(v).ok());
        number.ok_or_else(|| self.refuse(field, "a whole number of at least 0", value))
    }

    fn flag(&self, field: &str) -> Result<bool, EngineError> {
        let value = self.value(field)?;
        value.as_bool().ok_or_else(|| self.refuse(field, "true or false", value))
    }

    /// What the name of an algorithm stands for.
    fn algorithm<T>(&self, field: &str, known: Vec<(T, Option<&'static str>)>) -> Result<T, EngineError> {
        let value = self.value(field)?;
        let names: Vec<String> = known.iter().map(|(_, name)| json!(name).to_string()).collect();
        let found = known.into_iter().find(|(_, name)| json!(name) == *value);
        found.map(|(kind, _)| kind).ok_or_else(|| self.refuse(field, &names.join(" or "), value))
    }

    /// Type of the cache. Engines of before it could be chosen do not name it.
    fn kv_cache(&self) -> Result<KvCacheType, EngineError> {
        let (algorithm, name) = ("pretrained_config.quantization.kv_cache_quant_algo", "pretrained_config.kv_dtype");
        let quantized = KvCacheType::ALL.into_iter().filter(|kind| kind.algorithm().is_some());
        let known = quantized.map(|kind| (Some(kind), kind.algorithm())).chain([(None, None)]);
        if let Some(kind) = self.algorithm(algorithm, known.collect())? {
            return Ok(kind);
        }
        let Ok(value) = self.value(name) else { return Ok(KvCacheType::Auto) };
        let plain: Vec<_> = KvCacheType::ALL.into_iter().filter(|kind| kind.algorithm().is_none()).collect();
        let names: Vec<_> = plain.iter().map(|kind| kind.name()).collect();
        let found = plain.into_iter().find(|kind| *value == kind.name());
        found.ok_or_else(|| self.refuse(name, &names.join(" or "), value))
    }

    fn choice(&self, field: &str, choices: &[&str]) -> Result<String, EngineError> {
        let value = self.value(field)?;
        let found = value.as_str().filter(|v| choices.contains(v));
        found.map(str::to_string).ok_or_else(|| self.refuse(field, &choices.join(" or "), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micro() -> EngineConfig {
        let model = strobe_model::preset("micro").unwrap().config();
        EngineConfig {
            model_name: "micro".into(),
            build: BuildConfig {
                dtype: DType::F32,
                max_batch_size: 8,
                max_num_tokens: 256,
                max_seq_len: 512,
                tokens_per_block: 32,
                gemm_plugin: true,
                context_fmha: false,
                paged_kv_cache: true,
                quantization: Quantization::Int8,
                kv_cache: KvCacheType::Int8,
            },
            model,
            weights: WeightsOrigin::Random { seed: 3 },
        }
    }

    fn read(document: &Value) -> Result<EngineConfig, String> {
        EngineConfig::from_json(&document.to_string(), Path::new("config.json")).map_err(|e| e.to_string())
    }

    #[test]
    fn survives_a_round_trip() {
        assert_eq!(read(&micro().to_json()).unwrap(), micro());
    }

    #[test]
    fn types_of_matrices_and_cache_survive_and_old_engines_have_the_usual_ones() {
        for quantization in Quantization::ALL {
            for kv_cache in KvCacheType::ALL {
                let mut config = micro();
                (config.build.quantization, config.build.kv_cache) = (quantization, kv_cache);
                let runs = config.build.check_cpu().is_ok() || config.build.check_gpu().is_ok();
                match read(&config.to_json()) {
                    Ok(found) => assert!(runs && found == config, "{quantization:?} {kv_cache:?}"),
                    Err(problem) => {
                        let (a, b) = (quantization.name(), kv_cache.name());
                        assert!(!runs, "{a} {b}: {problem}");
                        let named =
                            ["pretrained_config.kv_dtype", a, b, "no device"].map(|part| problem.contains(part));
                        assert_eq!(named, [true; 4], "{problem}");
                    }
                }
            }
        }
        let mut config = micro();
        config.build.kv_cache = KvCacheType::Auto;
        let mut document = config.to_json();
        document["pretrained_config"].as_object_mut().unwrap().remove("kv_dtype");
        assert_eq!(read(&document).unwrap(), config);
        document["pretrained_config"]["kv_dtype"] = json!("int3");
        let problem = read(&document).unwrap_err();
        assert!(problem.contains("kv_dtype") && problem.contains("float16"), "{problem}");
    }

    #[test]
    fn no_engine_is_of_types_that_no_device_has_kernels_for() {
        let (matrices, cache) = ((Quantization::Fp8, KvCacheType::Auto), (Quantization::None, KvCacheType::Fp8));
        for (preset, (quantization, kv_cache), refused) in [
            ("micro", matrices, None),
            ("micro", cache, None),
            ("moe-tiny", matrices, Some(["--quantization fp8", "experts", "quantization.quant_algo"])),
            ("moe-tiny", cache, None),
            ("gpt-oss-tiny", matrices, Some(["--quantization fp8", "experts", "quantization.quant_algo"])),
            ("gpt-oss-tiny", cache, None),
            ("deepseek-tiny", matrices, Some(["--quantization fp8", "experts", "quantization.quant_algo"])),
            ("deepseek-tiny", cache, Some(["--kv-cache-dtype fp8", "latent", "pretrained_config.kv_dtype"])),
        ] {
            let model = strobe_model::preset(preset).unwrap().config();
            let build = BuildConfig { quantization, kv_cache, ..micro().build };
            let config = EngineConfig { model, build, ..micro() };
            let (built, found) = (config.build.validate(&config.model), read(&config.to_json()));
            let Some([option, why, field]) = refused else {
                assert!(built.is_ok() && found.is_ok(), "{preset}: {built:?} {found:?}");
                continue;
            };
            let (built, found) = (built.unwrap_err().to_string(), found.unwrap_err());
            assert!([option, why, "; use"].iter().all(|part| built.contains(part)), "{preset}: {built}");
            assert!([field, why, "fp8"].iter().all(|part| found.contains(part)), "{preset}: {found}");
        }
    }

    #[test]
    fn names_the_field_that_it_cannot_run() {
        let changes: [(&str, Value, &str); 12] = [
            ("/version", json!("99.1.0"), "99.1.0"),
            ("/version", json!(1), "`version`"),
            ("/pretrained_config/mapping/tp_size", json!(2), "mapping.tp_size"),
            ("/pretrained_config/quantization/quant_algo", json!("NVFP4"), "quantization.quant_algo"),
            ("/pretrained_config/dtype", json!("int4"), "pretrained_config.dtype"),
            ("/pretrained_config/head_dim", json!("x"), "pretrained_config"),
            ("/build_config/max_beam_width", json!(4), "max_beam_width"),
            ("/build_config/plugin_config/gemm_plugin", json!("fp8"), "gemm_plugin"),
            ("/build_config/plugin_config/context_fmha", json!("yes"), "context_fmha"),
            ("/build_config/kv_cache_type", json!("CONTINUOUS"), "kv_cache_type"),
            ("/build_config/max_num_tokens", json!(-1), "max_num_tokens"),
            ("/build_config/plugin_config/tokens_per_block", json!(33), "plugin_config.tokens_per_block"),
        ];
        for (pointer, value, named) in changes {
            let mut document = micro().to_json();
            *document.pointer_mut(pointer).unwrap() = value;
            let error = read(&document).unwrap_err();
            assert!(error.contains(named), "{pointer}: {error}");
        }
        assert!(read(&json!({})).unwrap_err().contains("version"));
        assert!(EngineConfig::from_json("{", Path::new("c.json")).is_err());
    }
}
