//! From a model to an engine: in a directory, or in memory.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};
use strobe_kernels_cpu::{Cpu, PANEL};
use strobe_model::{
    Checkpoint, Gguf, GgufModel, ModelConfig, SafeTensors, SafeTensorsWriter, Tokenizer, WeightId, WeightSource,
    checksum, preset, unknown_model,
};

use crate::engine_config::{BuildConfig, EngineConfig, WeightsOrigin};
use crate::error::EngineError;
use crate::memory;
use crate::staged_dir::StagedDir;
use crate::weights::{self, StoredWeight, WeightError, WeightStore};

/// Name of the weights' file; one per rank.
pub const WEIGHTS_FILE: &str = "rank0.engine";
/// Name of the configuration's file.
pub const CONFIG_FILE: &str = "config.json";
/// What TensorRT-LLM's `convert_checkpoint.py` writes.
const CONVERTED_CHECKPOINT: &str = "rank0.safetensors";
/// Where the configuration keeps the checksums of the tensors.
const CHECKSUMS: &str = "checksums";
/// Name of the tokenizer's file.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Name of the file with the tokenizer's special tokens.
const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// A model as named by a user: a preset, a Hugging Face directory or a GGUF file.
pub struct ModelRef {
    /// Preset name, directory or file.
    pub name: String,
    /// Its configuration.
    pub config: ModelConfig,
    /// Where its weights come from.
    pub source: WeightSource,
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<Tokenizer>,
    /// Why it has none, where there is more to say than that there is none.
    pub tokenizer_problem: Option<String>,
}

impl ModelRef {
    /// Resolve `name`; `seed` is used by presets. Every tensor of a checkpoint is checked against its configuration.
    pub fn open(name: &str, seed: u64) -> Result<ModelRef, EngineError> {
        if let Some(preset) = preset(name) {
            return Ok(ModelRef {
                name: name.to_string(),
                config: preset.config(),
                source: WeightSource::Random { seed },
                tokenizer: Some(preset.tokenizer()),
                tokenizer_problem: None,
            });
        }
        let dir = Path::new(name);
        if Gguf::is_gguf(dir) || (dir.is_file() && dir.extension().is_some_and(|e| e == "gguf")) {
            return ModelRef::open_gguf(name);
        }
        if !dir.is_dir() {
            return Err(EngineError::option("--model", unknown_model(name)));
        }
        if dir.join(WEIGHTS_FILE).exists() {
            let problem = format!(
                "`{name}` is an engine directory, not a model; pass it as --engine-dir, or build from the Hugging Face directory it was made from"
            );
            return Err(EngineError::option("--model", problem));
        }
        if dir.join(CONVERTED_CHECKPOINT).exists() {
            let problem = format!(
                "`{name}` is a checkpoint converted for TensorRT-LLM ({CONVERTED_CHECKPOINT}); pass the Hugging Face directory it was made from"
            );
            return Err(EngineError::option("--model", problem));
        }
        let config = ModelConfig::from_dir(dir)?;
        let source = WeightSource::Checkpoint(Checkpoint::open(dir)?);
        source.check(&config)?;
        let tokenizer = Tokenizer::from_dir(dir)?;
        Ok(ModelRef { name: name.to_string(), config, source, tokenizer, tokenizer_problem: None })
    }

    fn open_gguf(name: &str) -> Result<ModelRef, EngineError> {
        let model = GgufModel::open(Path::new(name))?;
        let config = model.config().clone();
        let (tokenizer, tokenizer_problem) = match model.tokenizer()? {
            Ok(tokenizer) => (Some(tokenizer), None),
            Err(reason) => (None, Some(reason)),
        };
        let source = WeightSource::Gguf(Box::new(model));
        source.check(&config)?;
        Ok(ModelRef { name: name.to_string(), config, source, tokenizer, tokenizer_problem })
    }

    /// The engine configuration that `build` of this model gives.
    pub fn engine_config(&self, build: BuildConfig) -> Result<EngineConfig, EngineError> {
        build.validate(&self.config)?;
        let weights = match self.source {
            WeightSource::Random { seed } => WeightsOrigin::Random { seed },
            WeightSource::Checkpoint(_) | WeightSource::Gguf(_) => WeightsOrigin::Checkpoint,
        };
        Ok(EngineConfig { model_name: self.name.clone(), model: self.config.clone(), build, weights })
    }
}

/// What a build did.
#[derive(Clone, Debug)]
pub struct BuildSummary {
    /// Bytes of weights written.
    pub weight_bytes: u64,
    /// Tensors written.
    pub tensors: usize,
    /// What rounding took from each quantised weight.
    pub errors: Vec<(WeightId, WeightError)>,
}

/// Build an engine directory, with further files (name and text) beside its own. `progress` is told the weight bytes done so far and answers whether to go on. The
/// directory appears whole or not at all; an existing one is only replaced with `overwrite`, and only if it is an engine.
pub fn build(
    cpu: &mut Cpu,
    model: &ModelRef,
    config: &EngineConfig,
    dir: &Path,
    overwrite: bool,
    extra_files: &[(&str, &str)],
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<BuildSummary, EngineError> {
    let (needed, free) = (weights::engine_bytes(&config.model, &config.build), memory::free_disk(dir));
    if let Some(free) = free.filter(|free| needed > *free) {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let problem = format!(
            "{} cannot hold the weights of {}: {:.1} GiB needed, {:.1} GiB free; use another disk, a smaller model or fewer bits",
            dir.display(),
            config.model_name,
            gib(needed),
            gib(free)
        );
        return Err(EngineError::option("--output-dir", problem));
    }
    let staged = StagedDir::create(dir, overwrite, &[CONFIG_FILE, WEIGHTS_FILE], "engine directory")?;
    let weights = weights::stored_weights(&config.model, &config.build);
    let specs: Vec<_> = weights.iter().map(StoredWeight::tensor).collect();
    let metadata = BTreeMap::from([
        ("format".to_string(), "strobe".to_string()),
        ("packed".to_string(), format!("[ceil(n/{PANEL})][k][{PANEL}]")),
    ]);
    let mut writer = SafeTensorsWriter::create(&staged.path().join(WEIGHTS_FILE), &specs, &metadata)?;
    let mut done = 0;
    let mut errors = Vec::new();
    let mut checksums = Map::new();
    for weight in &weights {
        let bytes = weight.bytes();
        let mut buffer = weights::aligned_bytes(bytes)?;
        let buffer = buffer.get_mut(..bytes).unwrap_or_default();
        weights::fill(cpu, &model.source, weight, buffer)?;
        let error = weights::error_of(cpu, &model.source, weight, buffer)?;
        errors.extend(error.map(|error| (weight.info.id, error)));
        checksums.insert(weight.tensor().name, json!(format!("{:016x}", weights::checksum_of(cpu, buffer))));
        writer.write(buffer)?;
        done += bytes as u64;
        if !progress(done) {
            return Err(EngineError::Interrupted);
        }
    }
    writer.finish()?;
    if let Some(tokenizer) = &model.tokenizer {
        write(&staged.path().join(TOKENIZER_FILE), tokenizer.to_json()?.as_bytes())?;
    }
    // It names the tokens that begin and end a text.
    let names = staged.path().join(TOKENIZER_CONFIG_FILE);
    match (&model.source, &model.tokenizer) {
        (WeightSource::Checkpoint(checkpoint), _) => {
            let from = checkpoint.dir().join(TOKENIZER_CONFIG_FILE);
            if from.is_file() {
                fs::copy(&from, &names).map_err(|source| EngineError::Io { action: "copy", path: from, source })?;
            }
        }
        (WeightSource::Gguf(_), Some(tokenizer)) => write(&names, tokenizer.config_json().as_bytes())?,
        _ => {}
    }
    for (name, text) in extra_files {
        write(&staged.path().join(name), text.as_bytes())?;
    }
    let mut document = config.to_json();
    document[CHECKSUMS] = json!({
        "algorithm": checksum::ALGORITHM,
        "block_bytes": checksum::BLOCK,
        "tensors": checksums,
    });
    let text = format!("{document:#}\n");
    write(&staged.path().join(CONFIG_FILE), text.as_bytes())?;
    staged.commit()?;
    Ok(BuildSummary { weight_bytes: done, tensors: weights.len(), errors })
}

/// The checksums of an engine's tensors, from the text of its configuration. Engines of before there were any, and of versions
/// that make them in another way, have none that can be compared.
fn read_checksums(text: &str, path: &Path) -> Result<HashMap<String, u64>, EngineError> {
    let document: Value = serde_json::from_str(text).unwrap_or_default(); // that it is JSON was found out before
    let Some(found) = document.get(CHECKSUMS) else { return Ok(HashMap::new()) };
    if found["algorithm"] != checksum::ALGORITHM || found["block_bytes"] != checksum::BLOCK {
        return Ok(HashMap::new());
    }
    let tensors = found["tensors"].as_object().into_iter().flatten();
    let read = |(name, value): (&String, &Value)| {
        let number = value.as_str().and_then(|text| u64::from_str_radix(text, 16).ok());
        let number = number.ok_or_else(|| EngineError::Field {
            path: path.to_path_buf(),
            field: format!("{CHECKSUMS}.tensors.{name}"),
            expected: "16 hexadecimal digits".into(),
            found: value.to_string(),
        })?;
        Ok((name.clone(), number))
    };
    tensors.map(read).collect()
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), EngineError> {
    fs::write(path, bytes).map_err(|source| EngineError::Io { action: "write", path: path.to_path_buf(), source })
}

/// A model that is ready to run.
pub struct LoadedModel {
    /// What it is and how it was built.
    pub config: EngineConfig,
    /// Its weights.
    pub weights: Arc<WeightStore>,
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<Tokenizer>,
    /// The directory it came from; `None` when it was built in memory.
    pub dir: Option<PathBuf>,
}

impl LoadedModel {
    /// Map an engine directory.
    pub fn open(dir: &Path) -> Result<LoadedModel, EngineError> {
        let path = dir.join(CONFIG_FILE);
        let text = fs::read_to_string(&path).map_err(|source| EngineError::Io {
            action: "read the engine's configuration",
            path: path.clone(),
            source,
        })?;
        let config = EngineConfig::from_json(&text, &path)?;
        let file = SafeTensors::open(&dir.join(WEIGHTS_FILE))?;
        let weights = WeightStore::map(file, &config.model, &config.build)?;
        let weights = weights.with_checksums(read_checksums(&text, &path)?);
        let tokenizer = Tokenizer::from_dir(dir)?;
        Ok(LoadedModel { config, weights: Arc::new(weights), tokenizer, dir: Some(dir.to_path_buf()) })
    }

    /// A model whose weights are made by the device that runs it.
    pub fn deferred(model: ModelRef, config: EngineConfig) -> LoadedModel {
        let weights = WeightStore::deferred(&config.model, model.source, &config.build);
        LoadedModel { config, weights: Arc::new(weights), tokenizer: model.tokenizer, dir: None }
    }

    /// Build in memory, after checking that it fits.
    pub fn in_memory(
        cpu: &mut Cpu,
        model: ModelRef,
        config: EngineConfig,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<LoadedModel, EngineError> {
        let build = &config.build;
        let needed = weights::engine_bytes(&config.model, build);
        if let Some(available) = memory::available().filter(|a| a.bytes < needed) {
            return Err(EngineError::Memory {
                what: format!("the weights of {} in {}", config.model_name, build.dtype),
                arithmetic: format!(
                    "{:.1} GiB needed, {:.1} GiB available",
                    needed as f64 / (1u64 << 30) as f64,
                    available.bytes as f64 / (1u64 << 30) as f64
                ),
                remedy: "use a smaller model or --dtype bfloat16, or build an engine directory and map it".into(),
            });
        }
        let weights = WeightStore::generate(cpu, &config.model, &model.source, build, progress)?;
        Ok(LoadedModel { config, weights: Arc::new(weights), tokenizer: model.tokenizer, dir: None })
    }
}
