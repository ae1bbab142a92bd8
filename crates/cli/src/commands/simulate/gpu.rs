//! `--cost analytic`: a model on a GPU that is not there.

use std::path::Path;

use anyhow::{Context, Result, bail};
use strobe_sim::CostModel;
use strobe_sim::analytic::{Analytic, GPUS, Gpu};

use super::scenario::ScenarioArgs;

/// Share of a GPU's memory that weights and cache may take; the rest is for activations and the runtime.
const USABLE_MEMORY: f64 = 0.9;

impl ScenarioArgs {
    pub(super) fn analytic_dtype(&self) -> &str {
        self.dtype.as_deref().unwrap_or("bfloat16")
    }

    pub(super) fn ranks(&self) -> u32 {
        self.tp.unwrap_or(1)
    }

    pub(super) fn analytic(&self) -> Result<CostModel> {
        let names = || GPUS.map(|gpu| gpu.name).join(", ");
        let (Some(gpu_name), Some(model)) = (&self.gpu, &self.model) else {
            bail!("--cost analytic: on which GPU, with which model? Give --gpu ({}) and --model PRESET", names());
        };
        let gpu = match GPUS.iter().find(|known| known.name == gpu_name.as_str()) {
            Some(known) => *known,
            None => gpu_file(gpu_name)
                .with_context(|| format!("--gpu: `{gpu_name}` is none of {} and no such file", names()))?,
        };
        let config = match strobe_model::preset(model) {
            Some(preset) => preset.config(),
            None => strobe_model::ModelConfig::from_dir(Path::new(model))
                .with_context(|| format!("--model: `{model}` is neither a preset nor a directory with config.json"))?,
        };
        // 8-bit operations run at twice the 16-bit rate, 32-bit ones (as TF32) at half of it.
        let (bytes, faster) = match self.analytic_dtype() {
            "bfloat16" | "float16" => (2.0, 1.0),
            "fp8" => (1.0, 2.0),
            "float32" => (4.0, 0.5),
            other => bail!("--dtype: no such type `{other}`; use bfloat16, float16, float32 or fp8"),
        };
        if self.ranks() == 0 {
            bail!("--tp: expected at least 1, found 0");
        }
        let (layers, ranks) = (config.num_hidden_layers as f64, f64::from(self.ranks()));
        let weight_bytes = config.parameter_count() as f64 * bytes;
        let memory = gpu.memory_bytes * ranks * USABLE_MEMORY;
        if gpu.memory_bytes > 0.0 && weight_bytes >= memory {
            bail!(
                "--gpu: the weights of {model} take {:.1} GB in {}, of {:.1} GB that {} x {gpu_name} have for them; raise --tp, or choose a smaller --dtype",
                weight_bytes / 1e9,
                self.analytic_dtype(),
                memory / 1e9,
                self.ranks()
            );
        }
        // A latent row is key and value at once.
        let kv_parts = if config.latent.is_some() { 2.0 } else { 1.0 };
        let (experts, experts_per_token) =
            config.moe.as_ref().map_or((0, 0), |moe| (moe.num_experts, moe.experts_per_token));
        Ok(CostModel::Analytic(Analytic {
            ops_per_s: gpu.ops_per_s * faster,
            bytes_per_s: gpu.bytes_per_s,
            link_bytes_per_s: gpu.link_bytes_per_s,
            ranks,
            weight_bytes,
            expert_bytes: config.routed_expert_parameters() as f64 * bytes,
            experts: experts as f64,
            experts_per_token: experts_per_token as f64,
            active_weights: config.active_parameters_per_token() as f64,
            kv_bytes: config.kv_bytes_per_token(strobe_model::DType::F16) as f64 / 2.0 * bytes / kv_parts,
            cache_bytes: (memory - weight_bytes).max(0.0),
            ops_per_pair: 4.0 * layers * (config.num_attention_heads * config.head_dim) as f64,
            layers,
            hidden_bytes: config.hidden_size as f64 * bytes.max(2.0),
        }))
    }
}

/// A GPU of one's own.
fn gpu_file(path: &str) -> Result<Gpu> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        ops_per_s: f64,
        bytes_per_s: f64,
        link_bytes_per_s: Option<f64>,
        memory_bytes: Option<f64>,
    }
    let text = std::fs::read_to_string(path)?;
    let file: File = toml::from_str(&text).map_err(|e| anyhow::anyhow!("{}", e.message()))?;
    let (link, memory) = (file.link_bytes_per_s.unwrap_or(32e9), file.memory_bytes.unwrap_or(f64::MAX));
    if ![file.ops_per_s, file.bytes_per_s, link, memory].iter().all(|v| *v > 0.0 && v.is_finite()) {
        bail!("every value must be a number above 0");
    }
    Ok(Gpu {
        name: "file",
        ops_per_s: file.ops_per_s,
        bytes_per_s: file.bytes_per_s,
        link_bytes_per_s: link,
        memory_bytes: file.memory_bytes.unwrap_or(0.0),
    })
}
