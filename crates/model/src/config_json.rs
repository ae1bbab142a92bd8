//! Reading `config.json` in the variants that real files have.

use std::path::Path;

use serde_json::{Map, Value};

use crate::checkpoint::Checkpoint;
use crate::config::{DType, ModelConfig, RopeScaling, SUPPORTED_ARCHITECTURES};
use crate::config_moe;
use crate::error::{ModelError, excerpt};
use crate::latent::LatentAttention;

/// A configuration, and whether the file said which dtype the weights have.
pub(crate) struct Parsed {
    pub(crate) config: ModelConfig,
    dtype_given: bool,
}

pub(crate) fn read_dir(dir: &Path) -> Result<ModelConfig, ModelError> {
    let path = dir.join("config.json");
    let bytes = std::fs::read(&path).map_err(ModelError::io("read", &path))?;
    let text = String::from_utf8(bytes).map_err(|e| ModelError::Json {
        path: path.clone(),
        line: 1 + e.as_bytes().iter().take(e.utf8_error().valid_up_to()).filter(|b| **b == b'\n').count(),
        problem: "not UTF-8 text; expected JSON".to_string(),
    })?;
    let Parsed { mut config, dtype_given } = parse(&text, &path)?;
    if !dtype_given && let Ok(checkpoint) = Checkpoint::open(dir) {
        let table = checkpoint.tensor("model.embed_tokens.weight");
        config.dtype = table.and_then(|t| DType::from_safetensors_name(t.dtype)).unwrap_or(config.dtype);
    }
    Ok(config)
}

pub(crate) fn parse(text: &str, origin: &Path) -> Result<Parsed, ModelError> {
    let value: Value = serde_json::from_str(text).map_err(|e| json_error(text, origin, &e))?;
    let Value::Object(map) = &value else {
        return Err(ModelError::Json {
            path: origin.to_path_buf(),
            line: 1,
            problem: format!("expected a JSON object, found {}", excerpt(&value.to_string())),
        });
    };
    let fields = Fields { map, origin, prefix: "" };
    let family = Family::of(&fields)?;
    refuse_unsupported(&fields, family)?;

    let heads = fields.required_size("num_attention_heads")?;
    let hidden_size = fields.required_size("hidden_size")?;
    let num_hidden_layers = fields.required_size("num_hidden_layers")?;
    let max_position_embeddings = fields.size("max_position_embeddings")?.unwrap_or(family.max_positions());
    let (rope_theta, rope_scaling) = rope(&fields, family, max_position_embeddings)?;
    let intermediate_size = fields.required_size("intermediate_size")?;
    let attention_bias = fields.flag("attention_bias")?.unwrap_or(family == Family::GptOss);
    let dtype = dtype(&fields)?;
    let latent = (family == Family::DeepseekV3).then(|| latent(&fields)).transpose()?;
    if latent.is_some() && attention_bias {
        return Err(fields.error("attention_bias", "is not supported with latent attention; expected false"));
    }
    let config = ModelConfig {
        architecture: family.architecture().to_string(),
        model_type: fields.text("model_type")?.unwrap_or(family.model_type()).to_string(),
        dtype: dtype.unwrap_or(DType::F32),
        vocab_size: fields.required_size("vocab_size")?,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads: heads,
        latent,
        num_key_value_heads: match map.get("num_key_value_heads") {
            _ if latent.is_some() => 1,
            None => family.key_value_heads().unwrap_or(heads),
            Some(_) => fields.size("num_key_value_heads")?.unwrap_or(heads), // null
        },
        head_dim: match latent {
            Some(latent) => latent.key_width(),
            None => head_dim(&fields, family, hidden_size, heads)?,
        },
        rms_norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6),
        max_position_embeddings,
        rope_theta,
        rope_scaling,
        qkv_bias: match family {
            Family::Llama | Family::Qwen3 | Family::Qwen3Moe | Family::GptOss => attention_bias,
            Family::Qwen2 => true,
            Family::Mistral | Family::Mixtral | Family::DeepseekV3 => false,
        },
        o_bias: !matches!(family, Family::Qwen2 | Family::Mistral | Family::Mixtral) && attention_bias,
        mlp_bias: family == Family::Llama && fields.flag("mlp_bias")?.unwrap_or(false),
        attention_sinks: family == Family::GptOss,
        qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
        // The class default of all families.
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        sliding_window: sliding_window(&fields, family, num_hidden_layers)?,
        // The number of layers is not validated yet.
        moe: config_moe::experts(&fields, family, num_hidden_layers.min(1 << 16), intermediate_size)?,
        bos_token_id: match map.get("bos_token_id") {
            None => family.token_ids().map(|(bos, _)| bos),
            Some(_) => fields.token_ids("bos_token_id")?.first().copied(),
        },
        eos_token_ids: match map.get("eos_token_id") {
            None => family.token_ids().map(|(_, eos)| eos).into_iter().collect(),
            Some(_) => fields.token_ids("eos_token_id")?,
        },
    };
    config.validate_from(origin)?;
    Ok(Parsed { config, dtype_given: dtype.is_some() })
}

/// The model families, in the order of [`SUPPORTED_ARCHITECTURES`], each with the defaults of its class in `transformers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Mixtral,
    Qwen3Moe,
    GptOss,
    DeepseekV3,
}

impl Family {
    /// Key and value heads where a configuration does not mention them; `None` is as many as there are heads.
    fn key_value_heads(self) -> Option<usize> {
        match self {
            Family::Llama | Family::DeepseekV3 => None,
            Family::Mistral | Family::Mixtral | Family::GptOss => Some(8),
            Family::Qwen2 | Family::Qwen3 => Some(32),
            Family::Qwen3Moe => Some(4),
        }
    }

    const ALL: [Family; 8] = [
        Family::Llama,
        Family::Mistral,
        Family::Qwen2,
        Family::Qwen3,
        Family::Mixtral,
        Family::Qwen3Moe,
        Family::GptOss,
        Family::DeepseekV3,
    ];

    /// By `architectures`; files without it are known by `model_type`.
    fn of(fields: &Fields<'_>) -> Result<Family, ModelError> {
        let names: Vec<&str> = match fields.get("architectures") {
            None => Vec::new(),
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
            Some(other) => return Err(fields.wrong("architectures", "a list of names", other)),
        };
        if names.is_empty()
            && let Some(model_type) = fields.text("model_type")?
            && let Some(family) = Family::ALL.into_iter().find(|f| f.model_type() == model_type)
        {
            return Ok(family);
        }
        Family::ALL.into_iter().find(|f| names.contains(&f.architecture())).ok_or_else(|| {
            ModelError::UnsupportedArchitecture {
                path: fields.origin.to_path_buf(),
                found: if names.is_empty() { "(none given)".to_string() } else { excerpt(&names.join(", ")) },
            }
        })
    }

    fn architecture(self) -> &'static str {
        SUPPORTED_ARCHITECTURES[self as usize]
    }

    fn model_type(self) -> &'static str {
        ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"][self as usize]
    }

    fn max_positions(self) -> usize {
        match self {
            Family::Llama => 2048,
            Family::DeepseekV3 => 4096,
            Family::Mistral | Family::Mixtral | Family::GptOss => 131_072,
            Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => 32_768,
        }
    }

    /// Begin and end of text where the file does not say.
    fn token_ids(self) -> Option<(u32, u32)> {
        matches!(self, Family::Llama | Family::Mistral | Family::Mixtral).then_some((1, 2))
    }
}

fn refuse_unsupported(fields: &Fields<'_>, family: Family) -> Result<(), ModelError> {
    if let Some(found) = fields.get("quantization_config") {
        let method = found.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed method");
        if family == Family::GptOss && method == "mxfp4" {
            return Ok(()); // read as floats
        }
        let problem = format!("quantized checkpoints ({}) are not supported; use the original one", excerpt(method));
        return Err(fields.error("quantization_config", problem));
    }
    match fields.text("hidden_act")? {
        None | Some("silu") => Ok(()),
        Some(other) => {
            let problem = format!("activation `{}` is not supported; supported: silu", excerpt(other));
            Err(fields.error("hidden_act", problem))
        }
    }
}

fn dtype(fields: &Fields<'_>) -> Result<Option<DType>, ModelError> {
    for field in ["dtype", "torch_dtype"] {
        match fields.text(field)? {
            None | Some("auto") => {}
            Some(name) => {
                let found = DType::from_name(name.strip_prefix("torch.").unwrap_or(name));
                let problem = || format!("`{}` is not supported; supported: float32, float16, bfloat16", excerpt(name));
                return found.map(Some).ok_or_else(|| fields.error(field, problem()));
            }
        }
    }
    Ok(None)
}

fn head_dim(fields: &Fields<'_>, family: Family, hidden_size: usize, heads: usize) -> Result<usize, ModelError> {
    match fields.size("head_dim")? {
        Some(given) => Ok(given),
        None if family == Family::Qwen3 => Ok(128),
        None if family == Family::GptOss => Ok(64),
        None if heads > 0 && hidden_size.is_multiple_of(heads) => Ok(hidden_size / heads),
        None => {
            let problem = format!(
                "is missing, and hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({heads})"
            );
            Err(fields.error("head_dim", problem))
        }
    }
}

/// Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
fn rope(fields: &Fields<'_>, family: Family, max_positions: usize) -> Result<(f64, RopeScaling), ModelError> {
    let theta = fields.number("rope_theta")?.unwrap_or(match family {
        Family::Mixtral => 1e6,
        Family::GptOss => 150_000.0,
        _ => 1e4,
    });
    full_rotation(fields)?;
    let parameters = fields.object("rope_parameters")?;
    let Some(rope) = parameters.or(fields.object("rope_scaling")?) else {
        return Ok((theta, RopeScaling::None));
    };
    full_rotation(&rope)?;
    let theta = rope.number("rope_theta")?.unwrap_or(theta);
    let kind_field = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match rope.text(kind_field)? {
        None if parameters.is_none() || rope.map.values().any(Value::is_object) => {
            return Err(rope.error("rope_type", "is missing; expected default, linear, llama3 or yarn"));
        }
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: rope.required_number("factor")? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: rope.required_number("factor")?,
            low_freq_factor: rope.required_number("low_freq_factor")?,
            high_freq_factor: rope.required_number("high_freq_factor")?,
            original_max_position_embeddings: rope.size("original_max_position_embeddings")?.unwrap_or(max_positions),
        },
        Some("yarn") => yarn(&rope, max_positions)?,
        Some(other) => {
            let problem = format!("`{}` is not supported; supported: default, linear, llama3, yarn", excerpt(other));
            return Err(rope.error(kind_field, problem));
        }
    };
    Ok((theta, scaling))
}

/// The shapes of latent attention, with the defaults of DeepSeek-V3.
fn latent(fields: &Fields<'_>) -> Result<LatentAttention, ModelError> {
    let size = |field: &str, default: usize| Ok::<_, ModelError>(fields.size(field)?.unwrap_or(default));
    let (nope, rotated) = (size("qk_nope_head_dim", 128)?, size("qk_rope_head_dim", 64)?);
    let parameters = fields.object("rope_parameters")?.or(fields.object("rope_scaling")?);
    let stretch = match parameters {
        None => 1.0,
        Some(rope) => match (rope.number("mscale_all_dim")?.unwrap_or(0.0), rope.number("factor")?) {
            (all, Some(factor)) if all != 0.0 && factor > 1.0 => 0.1 * all * factor.ln() + 1.0,
            _ => 1.0,
        },
    };
    Ok(LatentAttention {
        q_lora_rank: match fields.map.get("q_lora_rank") {
            None => Some(1536),
            Some(_) => fields.size("q_lora_rank")?,
        },
        kv_lora_rank: size("kv_lora_rank", 512)?,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: rotated,
        v_head_dim: size("v_head_dim", 128)?,
        rope_interleave: fields.flag("rope_interleave")?.unwrap_or(true),
        scale: (stretch * stretch / ((nope + rotated) as f64).sqrt()) as f32,
    })
}

fn yarn(rope: &Fields<'_>, max_positions: usize) -> Result<RopeScaling, ModelError> {
    let original = rope.size("original_max_position_embeddings")?.unwrap_or(max_positions);
    let factor = rope.number("factor")?.unwrap_or(max_positions as f64 / original as f64);
    let stretch = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let positive = |field: &str| rope.number(field).map(|number| number.filter(|n| *n != 0.0));
    let attention_factor = match (rope.number("attention_factor")?, positive("mscale")?, positive("mscale_all_dim")?) {
        (Some(given), ..) => given,
        (None, Some(mscale), Some(all)) => stretch(mscale) / stretch(all),
        _ => stretch(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: positive("beta_slow")?.unwrap_or(1.0),
        original_max_position_embeddings: original,
        truncate: rope.flag("truncate")?.unwrap_or(true),
        attention_factor: attention_factor as f32,
    })
}

fn full_rotation(fields: &Fields<'_>) -> Result<(), ModelError> {
    match fields.number("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => {
            let problem = format!("only full rotation (1.0) is supported, found {factor}");
            Err(fields.error("partial_rotary_factor", problem))
        }
        _ => Ok(()),
    }
}

fn sliding_window(fields: &Fields<'_>, family: Family, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    // All families that have windows but Mixtral default to this many positions.
    const DEFAULT_WINDOW: usize = 4096;
    let window = match fields.map.get("sliding_window") {
        None if family == Family::Mixtral => None,
        None if family == Family::GptOss => Some(128),
        None => Some(DEFAULT_WINDOW),
        Some(_) => fields.size("sliding_window")?,
    };
    // Before anything is made per layer: the number of layers is not validated yet.
    let layers = layers.min(1 << 16);
    match family {
        Family::Llama | Family::DeepseekV3 => Ok(Vec::new()),
        Family::Mistral | Family::Mixtral => Ok(window.map(|w| vec![Some(w); layers]).unwrap_or_default()),
        Family::GptOss => {
            let Some(window) = window else { return Ok(Vec::new()) };
            let slides = match fields.get("layer_types") {
                None => (0..layers).map(|layer| layer % 2 == 0).collect(),
                Some(_) => sliding_layers(fields, layers)?,
            };
            Ok(slides.into_iter().map(|slides| slides.then_some(window)).collect())
        }
        Family::Qwen3Moe => {
            let used = fields.flag("use_sliding_window")?.unwrap_or(false);
            Ok(window.filter(|_| used).map(|w| vec![Some(w); layers]).unwrap_or_default())
        }
        Family::Qwen2 | Family::Qwen3 => {
            if window.is_none() || !fields.flag("use_sliding_window")?.unwrap_or(false) {
                return Ok(Vec::new());
            }
            let slides = sliding_layers(fields, layers)?;
            if !slides.contains(&true) {
                return Ok(Vec::new());
            }
            Ok(slides.into_iter().map(|slides| if slides { window } else { None }).collect())
        }
    }
}

/// Which layers have a window: by `layer_types`, or else those from `max_window_layers` on.
fn sliding_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    const DEFAULT_FULL_LAYERS: usize = 28;
    let types = match fields.get("layer_types") {
        None => {
            let full = fields.whole("max_window_layers")?.unwrap_or(DEFAULT_FULL_LAYERS);
            return Ok((0..layers).map(|layer| layer >= full).collect());
        }
        Some(Value::Array(types)) => types,
        Some(other) => return Err(fields.wrong("layer_types", "a list of names", other)),
    };
    if types.len() != layers {
        let problem = format!("has {} entries, but there are {layers} layers", types.len());
        return Err(fields.error("layer_types", problem));
    }
    types
        .iter()
        .map(|kind| match kind.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(fields.wrong("layer_types", "full_attention or sliding_attention", kind)),
        })
        .collect()
}

/// Typed access to the members of an object, with errors that name the field.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    origin: &'a Path,
    /// What stands before a field's name in errors.
    prefix: &'static str,
}

impl<'a> Fields<'a> {
    /// A member that is there and not null.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub(crate) fn error(&self, field: &str, problem: impl Into<String>) -> ModelError {
        ModelError::config(self.origin, format!("{}{field}", self.prefix), problem)
    }

    pub(crate) fn wrong(&self, field: &str, expected: &str, found: &Value) -> ModelError {
        self.error(field, format!("expected {expected}, found {}", excerpt(&found.to_string())))
    }

    fn object(&self, field: &'static str) -> Result<Option<Fields<'a>>, ModelError> {
        let prefix = match field {
            "rope_parameters" => "rope_parameters.",
            _ => "rope_scaling.",
        };
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { map, origin: self.origin, prefix })),
            Some(other) => Err(self.wrong(field, "an object", other)),
        }
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, ModelError> {
        self.get(field).map(|value| value.as_str().ok_or_else(|| self.wrong(field, "a text", value))).transpose()
    }

    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, ModelError> {
        let wrong = |value| self.wrong(field, "true or false", value);
        self.get(field).map(|value| value.as_bool().ok_or_else(|| wrong(value))).transpose()
    }

    pub(crate) fn number(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.get(field).map(|value| value.as_f64().ok_or_else(|| self.wrong(field, "a number", value))).transpose()
    }

    pub(crate) fn required_number(&self, field: &str) -> Result<f64, ModelError> {
        self.number(field)?.ok_or_else(|| self.error(field, "is missing; expected a number"))
    }

    pub(crate) fn whole(&self, field: &str) -> Result<Option<usize>, ModelError> {
        let wrong = |value| self.wrong(field, "a whole number", value);
        self.get(field).map(|value| whole(value).ok_or_else(|| wrong(value))).transpose()
    }

    /// A whole number of at least one, and of no more than any size of a model can be.
    pub(crate) fn size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        const MOST: usize = 1 << 30;
        let wrong = |value| self.wrong(field, &format!("a whole number from 1 to {MOST}"), value);
        let size = |value| whole(value).filter(|n| (1..=MOST).contains(n));
        self.get(field).map(|value| size(value).ok_or_else(|| wrong(value))).transpose()
    }

    pub(crate) fn required_size(&self, field: &str) -> Result<usize, ModelError> {
        self.size(field)?.ok_or_else(|| self.error(field, "is missing; expected a whole number of at least 1"))
    }

    /// One id, a list of them, or none. Some files write -1 for none.
    fn token_ids(&self, field: &str) -> Result<Vec<u32>, ModelError> {
        let id = |value: &Value| -> Result<Option<u32>, ModelError> {
            match value.as_i64() {
                Some(-1) => Ok(None),
                Some(n) => u32::try_from(n).map(Some).map_err(|_| self.wrong(field, "a token id", value)),
                None => Err(self.wrong(field, "a token id or a list of them", value)),
            }
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().filter_map(|value| id(value).transpose()).collect(),
            Some(value) => Ok(id(value)?.into_iter().collect()),
        }
    }
}

/// Some writers give whole numbers as `4096.0`.
fn whole(value: &Value) -> Option<usize> {
    let from_float = || {
        let float = value.as_f64()?;
        ((0.0..=1e15).contains(&float) && float.fract() == 0.0).then_some(float as u64)
    };
    value.as_u64().or_else(from_float).and_then(|n| usize::try_from(n).ok())
}

/// Python writes NaN and infinities as bare words, which are not JSON: say so and name the field.
fn json_error(text: &str, origin: &Path, error: &serde_json::Error) -> ModelError {
    if let Some(bare) = find_bare_word(text) {
        let problem = format!("expected a number, found {} (line {})", bare.word, bare.line);
        return ModelError::config(origin, bare.field, problem);
    }
    ModelError::Json {
        path: origin.to_path_buf(),
        line: error.line(),
        problem: format!("not valid JSON: {}", excerpt(&error.to_string())),
    }
}

struct BareWord<'a> {
    field: String,
    word: &'a str,
    line: usize,
}

/// The first `NaN`, `Infinity` or `-Infinity` outside of quotes, with the last quoted text before it: its field.
fn find_bare_word(text: &str) -> Option<BareWord<'_>> {
    let mut line = 1;
    let mut field = "";
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if first == '"' {
            let quoted = quoted_length(rest);
            field = rest.get(1..quoted - 1).unwrap_or_default();
            line += rest[..quoted].matches('\n').count();
            rest = &rest[quoted..];
            continue;
        }
        if let Some(word) = ["NaN", "Infinity", "-Infinity"].into_iter().find(|word| rest.starts_with(word)) {
            return Some(BareWord { field: excerpt(field), word, line });
        }
        line += usize::from(first == '\n');
        rest = &rest[first.len_utf8()..];
    }
    None
}

/// Bytes of the quoted text at the start, quotes included (all of it where the end quote is missing).
fn quoted_length(text: &str) -> usize {
    let mut escaped = false;
    for (position, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return position + 1,
            _ => {}
        }
    }
    text.len()
}
