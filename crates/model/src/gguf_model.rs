//! A model in a GGUF file: its configuration from the file's fields, its weights under the names of `transformers`.

use std::collections::HashMap;
use std::path::Path;

use crate::config::{DType, ModelConfig, RopeScaling};
use crate::error::{ModelError, excerpt};
use crate::gguf::{Gguf, GgufTensor};
use crate::gguf_blocks::READABLE;
use crate::weights::{WeightInfo, weight_list};

const SUPPORTED: [(&str, &str); 3] =
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")];

/// Divisors of the rotary frequencies, where a model has them.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// A GGUF file that holds a whole model this crate can describe.
#[derive(Debug)]
pub struct GgufModel {
    file: Gguf,
    config: ModelConfig,
}

impl GgufModel {
    /// Opens a file and reads its configuration. Which tensors it has is checked by
    /// [`crate::WeightSource::check`], as with other sources.
    pub fn open(path: &Path) -> Result<GgufModel, ModelError> {
        let file = Gguf::open(path)?;
        let config = Fields::new(&file)?.config()?;
        config.validate_from(path)?;
        Ok(GgufModel { file, config })
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The quantized type that most elements of the matrices have, with its bits per element; none where most are plain
    /// numbers.
    pub fn quantization(&self) -> Option<(&'static str, f64)> {
        let mut elements: HashMap<&'static str, (u64, f64)> = HashMap::new();
        for tensor in matrices(&self.file) {
            let bits = 8.0 * tensor.kind.bytes as f64 / tensor.kind.elements.max(1) as f64;
            let (count, _) = elements.entry(tensor.kind.name).or_insert((0, bits));
            *count = count.saturating_add(size(&tensor));
        }
        let (name, (_, bits)) = elements.into_iter().max_by_key(|(name, (count, _))| (*count, *name))?;
        DType::from_safetensors_name(name).is_none().then_some((name, bits))
    }

    /// The file.
    pub fn file(&self) -> &Gguf {
        &self.file
    }

    /// Checks that a weight's part is there with its shape, in a type that can be read.
    pub(crate) fn check_part(&self, info: &WeightInfo, name: &str, rows: usize) -> Result<(), ModelError> {
        let own = own_name(name);
        let tensor = self.tensor(&own)?;
        let expected = if info.vector { vec![rows] } else { vec![rows, info.cols] };
        if tensor.kind.decode.is_none() {
            let problem = format!(
                "its type {} is not supported; supported: {READABLE}; get or make the model in one of these",
                tensor.kind.name
            );
            return Err(self.error(&own, problem));
        }
        if tensor.shape != expected {
            let problem = format!("shape is {:?}, but the file's fields ask for {expected:?}", tensor.shape);
            return Err(self.error(&own, problem));
        }
        Ok(())
    }

    /// Refuses tensors that the model, as this crate knows it, would leave out: it would compute something else.
    pub(crate) fn check_nothing_is_left_out(&self) -> Result<(), ModelError> {
        let parts = weight_list(&self.config).into_iter().flat_map(|info| info.parts);
        let used: std::collections::HashSet<String> = parts.map(|(name, _)| own_name(&name)).collect();
        let mut extra: Vec<&str> =
            self.file.tensor_names().filter(|name| !used.contains(*name) && *name != ROPE_FACTORS).collect();
        extra.sort_unstable();
        match extra.first() {
            None => Ok(()),
            Some(name) => Err(self.error(
                name,
                format!(
                    "no part of a {} model as strobe knows it; this variant is not supported",
                    self.config.model_type
                ),
            )),
        }
    }

    /// Row `row` of a weight's part, `out.len()` elements wide.
    pub(crate) fn fill_part(
        &self,
        info: &WeightInfo,
        name: &str,
        row: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let own = own_name(name);
        let rotated = self.config.model_type == "llama" && (own.contains(".attn_q.") || own.contains(".attn_k."));
        if info.vector {
            self.fill_row(&own, 0, out)?;
            if rotated {
                let stored = out.to_vec();
                for (element, value) in out.iter_mut().enumerate() {
                    *value = stored.get(self.interleaved(element)).copied().unwrap_or_default();
                }
            }
            return Ok(());
        }
        self.fill_row(&own, if rotated { self.interleaved(row) } else { row }, out)
    }

    /// Where llama files keep a row of the q and k projections: a head's first and second half, which are rotated
    /// against each other, lie there in turns.
    fn interleaved(&self, row: usize) -> usize {
        let width = self.config.head_dim;
        let (head, within) = (row / width, row % width);
        let (part, pair) = (within / (width / 2), within % (width / 2));
        head * width + 2 * pair + part
    }

    fn fill_row(&self, own: &str, row: usize, out: &mut [f32]) -> Result<(), ModelError> {
        let tensor = self.tensor(own)?;
        let width = out.len() / tensor.kind.elements * tensor.kind.bytes;
        let bytes = row.checked_mul(width).and_then(|begin| tensor.data.get(begin..begin.checked_add(width)?));
        match (bytes, tensor.kind.decode) {
            (Some(bytes), Some(decode)) => {
                decode(bytes, out);
                Ok(())
            }
            _ => Err(self.error(own, format!("has no readable row {row} of {} elements", out.len()))),
        }
    }

    fn tensor(&self, own: &str) -> Result<GgufTensor<'_>, ModelError> {
        self.file.tensor(own).ok_or_else(|| {
            let count = self.file.tensor_names().count();
            self.error(own, format!("is missing; the file has {count} tensors"))
        })
    }

    fn error(&self, tensor: &str, problem: String) -> ModelError {
        ModelError::Tensor { path: self.file.path().to_path_buf(), tensor: excerpt(tensor), problem }
    }
}

/// The name in GGUF files of a tensor that has this name in `transformers`.
fn own_name(name: &str) -> String {
    const MODULES: [(&str, &str); 11] = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    match name {
        "model.embed_tokens.weight" => "token_embd.weight".to_string(),
        "model.norm.weight" => "output_norm.weight".to_string(),
        "lm_head.weight" => "output.weight".to_string(),
        _ => {
            let renamed = || {
                let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
                let (module, kind) = rest.rsplit_once('.')?;
                let (_, own) = MODULES.iter().find(|(theirs, _)| *theirs == module)?;
                Some(format!("blk.{layer}.{own}.{kind}"))
            };
            renamed().unwrap_or_else(|| name.to_string())
        }
    }
}

/// The fields of one architecture.
struct Fields<'a> {
    file: &'a Gguf,
    family: &'static str,
    architecture: &'static str,
}

impl<'a> Fields<'a> {
    fn new(file: &'a Gguf) -> Result<Fields<'a>, ModelError> {
        const FIELD: &str = "general.architecture";
        if let Some(parts) = file.whole("split.count")?.filter(|parts| *parts > 1) {
            let problem = format!("this is one of {parts} parts; merge them first (llama-gguf-split --merge)");
            return Err(ModelError::config(file.path(), "split.count", problem));
        }
        let found = file.text(FIELD)?.unwrap_or("(none given)");
        let Some((family, architecture)) = SUPPORTED.into_iter().find(|(family, _)| *family == found) else {
            let names = SUPPORTED.map(|(family, _)| family).join(", ");
            let problem = format!("`{}` is not supported; supported in GGUF files: {names}", excerpt(found));
            return Err(ModelError::config(file.path(), FIELD, problem));
        };
        Ok(Fields { file, family, architecture })
    }

    fn config(&self) -> Result<ModelConfig, ModelError> {
        let file = self.file;
        self.refuse("expert_count", |count| count > 0, "MoE models are not supported")?;
        self.refuse("attention.sliding_window", |window| window > 0, "attention windows are not imported")?;
        let heads = self.required("attention.head_count")?;
        let hidden_size = self.required("embedding_length")?;
        let head_dim = match self.whole("attention.key_length")? {
            Some(width) => width,
            None if heads > 0 => hidden_size / heads,
            None => 0,
        };
        for other in ["attention.value_length", "rope.dimension_count"] {
            let problem = format!("only the width of a head ({head_dim}) is supported");
            self.refuse(other, |width| width != head_dim, &problem)?;
        }
        let table = file.tensor("token_embd.weight").map(|table| table.shape);
        let present = |tensor: &str| file.tensor(tensor).is_some();
        let ends = ["eos", "eot", "eom"].map(|end| file.whole(&format!("tokenizer.ggml.{end}_token_id")));
        let mut eos_token_ids = Vec::new();
        for id in ends {
            eos_token_ids.extend(id?.and_then(|id| u32::try_from(id).ok()).filter(|id| !eos_token_ids.contains(id)));
        }
        Ok(ModelConfig {
            architecture: self.architecture.to_string(),
            model_type: self.family.to_string(),
            dtype: majority_type(file),
            vocab_size: match table {
                Some([rows, _]) => *rows,
                _ => self.required("vocab_size")?,
            },
            hidden_size,
            intermediate_size: self.required("feed_forward_length")?,
            num_hidden_layers: self.required("block_count")?,
            num_attention_heads: heads,
            num_key_value_heads: self.whole("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            rms_norm_eps: self.required_number("attention.layer_norm_rms_epsilon")?,
            max_position_embeddings: self.required("context_length")?,
            rope_theta: self.number("rope.freq_base")?.unwrap_or(10_000.0),
            rope_scaling: self.rope_scaling(head_dim)?,
            qkv_bias: present("blk.0.attn_q.bias"),
            o_bias: present("blk.0.attn_output.bias"),
            mlp_bias: present("blk.0.ffn_gate.bias"),
            attention_sinks: false,
            latent: None,
            qk_norm: self.family == "qwen3",
            tie_word_embeddings: !present("output.weight"),
            sliding_window: Vec::new(),
            moe: None,
            bos_token_id: file.whole("tokenizer.ggml.bos_token_id")?.and_then(|id| u32::try_from(id).ok()),
            eos_token_ids,
        })
    }

    fn rope_scaling(&self, head_dim: usize) -> Result<RopeScaling, ModelError> {
        let file = self.file;
        let kind = file.text(&self.key("rope.scaling.type"))?;
        let factor = match self.number("rope.scaling.factor")? {
            None => self.number("rope.scale_linear")?,
            given => given,
        };
        let factor = factor.filter(|factor| *factor != 1.0);
        let scaling = match (kind, factor) {
            (None | Some("none"), None) | (Some("linear"), None) => RopeScaling::None,
            (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
            (Some("none"), Some(_)) => RopeScaling::None,
            (Some(other), _) => {
                let problem = format!("`{}` is not supported; supported: none, linear", excerpt(other));
                return Err(ModelError::config(file.path(), self.key("rope.scaling.type"), problem));
            }
        };
        let Some(tensor) = file.tensor(ROPE_FACTORS) else { return Ok(scaling) };
        let wrong = |problem: String| ModelError::Tensor {
            path: file.path().to_path_buf(),
            tensor: ROPE_FACTORS.to_string(),
            problem,
        };
        if scaling != RopeScaling::None {
            return Err(wrong("comes together with another rotary scaling; only one is supported".to_string()));
        }
        let expected = head_dim / 2;
        if tensor.kind.name != "F32" || tensor.shape != [expected] {
            let problem =
                format!("expected {expected} numbers of type F32, found {} {:?}", tensor.kind.name, tensor.shape);
            return Err(wrong(problem));
        }
        let factors = tensor.data.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        Ok(RopeScaling::Factors { factors })
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.family)
    }

    fn whole(&self, name: &str) -> Result<Option<usize>, ModelError> {
        self.file.whole(&self.key(name))
    }

    fn number(&self, name: &str) -> Result<Option<f64>, ModelError> {
        self.file.number(&self.key(name))
    }

    fn required(&self, name: &str) -> Result<usize, ModelError> {
        self.whole(name)?.ok_or_else(|| self.missing(name, "a whole number"))
    }

    fn required_number(&self, name: &str) -> Result<f64, ModelError> {
        self.number(name)?.ok_or_else(|| self.missing(name, "a number"))
    }

    fn missing(&self, name: &str, expected: &str) -> ModelError {
        ModelError::config(self.file.path(), self.key(name), format!("is missing; expected {expected}"))
    }

    /// Refuses a field whose value asks for something this crate does not do.
    fn refuse(&self, name: &str, wrong: impl Fn(usize) -> bool, why: &str) -> Result<(), ModelError> {
        match self.whole(name)?.filter(|value| wrong(*value)) {
            None => Ok(()),
            Some(found) => Err(ModelError::config(self.file.path(), self.key(name), format!("{why}, found {found}"))),
        }
    }
}

fn matrices(file: &Gguf) -> impl Iterator<Item = GgufTensor<'_>> {
    file.tensor_names().filter_map(|name| file.tensor(name)).filter(|tensor| tensor.shape.len() > 1)
}

/// Elements of a tensor.
fn size(tensor: &GgufTensor<'_>) -> u64 {
    tensor.shape.iter().fold(1u64, |product, size| product.saturating_mul(*size as u64))
}

/// The type an engine gets when nobody says: that of most elements of the matrices. What was quantised has scales in f16,
/// so f16 keeps nearly all of it.
fn majority_type(file: &Gguf) -> DType {
    let mut elements = [(DType::F16, 0u64), (DType::Bf16, 0), (DType::F32, 0)];
    for tensor in matrices(file) {
        let dtype = DType::from_safetensors_name(tensor.kind.name).unwrap_or(DType::F16);
        let count = size(&tensor);
        for (_, total) in elements.iter_mut().filter(|(own, _)| *own == dtype) {
            *total = total.saturating_add(count);
        }
    }
    elements.into_iter().max_by_key(|(_, count)| *count).map_or(DType::F16, |(dtype, _)| dtype)
}
