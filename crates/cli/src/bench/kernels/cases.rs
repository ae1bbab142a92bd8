//! What is measured: kernels with their shapes, from a preset or from a file.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use strobe_kernels_cpu::PANEL;
use strobe_model::{ModelConfig, preset, presets};

use crate::device::Device;

/// A kernel, or a family of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Op {
    /// GEMM of many rows: prefill and batched decode
    Gemm,
    /// GEMV: decode of one request
    Gemv,
    /// Gate and up projections with their activation, fused and unfused
    GateUp,
    /// Attention over the paged KV cache, prefill and decode, fused and naive
    Attention,
    /// Root-mean-square norm
    Norm,
    /// The same with a residual added first
    AddNorm,
    /// Rotary embedding and writing of the cache
    Rope,
    /// SiLU of the gate times up
    Silu,
    /// Most likely token
    Argmax,
}

impl Op {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::Gemm => "gemm",
            Op::Gemv => "gemv",
            Op::GateUp => "gate-up",
            Op::Attention => "attention",
            Op::Norm => "norm",
            Op::AddNorm => "add-norm",
            Op::Rope => "rope",
            Op::Silu => "silu",
            Op::Argmax => "argmax",
        }
    }

    /// What is measured on a device.
    pub(crate) fn of(device: Device) -> &'static [Op] {
        match device {
            Device::Cpu => <Op as clap::ValueEnum>::value_variants(),
            Device::Cuda(_) => &[Op::Gemm, Op::Gemv, Op::Attention],
        }
    }

    /// The types it comes in; none where it has neither weights nor a cache.
    fn types(self) -> &'static [Kind] {
        match self {
            Op::Gemm | Op::Gemv | Op::GateUp => &[Kind::Float32, Kind::Bfloat16, Kind::Float16, Kind::Int8, Kind::Int4],
            Op::Attention | Op::Rope => &[Kind::Float32, Kind::Bfloat16, Kind::Float16, Kind::Int8],
            Op::Norm | Op::AddNorm | Op::Silu | Op::Argmax => &[],
        }
    }
}

/// Type of the weights, or of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    #[serde(alias = "f32")]
    #[value(alias = "f32")]
    Float32,
    #[serde(alias = "bf16")]
    #[value(alias = "bf16")]
    Bfloat16,
    #[serde(alias = "f16")]
    #[value(alias = "f16")]
    Float16,
    /// With quantized activations; for a KV cache with a scale per position and head
    Int8,
    /// Weights only
    Int4,
}

impl Kind {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Float32 => "float32",
            Kind::Bfloat16 => "bfloat16",
            Kind::Float16 => "float16",
            Kind::Int8 => "int8",
            Kind::Int4 => "int4",
        }
    }

    /// What a device has; an op is measured with all of them when nobody says.
    pub(crate) fn of(device: Device) -> &'static [Kind] {
        let all = &[Kind::Float32, Kind::Bfloat16, Kind::Float16, Kind::Int8, Kind::Int4];
        if device == Device::Cpu { all } else { &all[..3] }
    }
}

/// The sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum Shape {
    /// `out[m][n] = x[m][k] . w[n][k]^T`.
    Product { m: usize, n: usize, k: usize },
    /// `sequences` of `kv_len` positions each, of which the last `q_len` ask.
    Attention { sequences: usize, q_len: usize, kv_len: usize, heads: usize, kv_heads: usize, head_dim: usize },
    /// Rows that are treated alone.
    Rows { rows: usize, width: usize },
}

/// One kernel with one shape.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Case {
    pub op: Op,
    /// What it is in a model, e.g. `qkv_proj`.
    pub kernel: String,
    /// Absent for ops that have no weights and no cache.
    pub dtype: Option<Kind>,
    pub shape: Shape,
}

impl Case {
    /// The shape in a few characters.
    pub(crate) fn shape_text(&self) -> String {
        match self.shape {
            Shape::Product { m, n, k } => format!("{m}x{n}x{k}"),
            Shape::Attention { sequences: 1, q_len, kv_len, .. } => format!("{q_len} at {kv_len}"),
            Shape::Attention { sequences, q_len, kv_len, .. } => format!("{sequences}x {q_len} at {kv_len}"),
            Shape::Rows { rows, width } => format!("{rows}x{width}"),
        }
    }

    /// In words, for messages.
    pub(crate) fn describe(&self) -> String {
        let dtype = self.dtype.map(|kind| format!(" {}", kind.name())).unwrap_or_default();
        format!("{} {} {}{dtype}", self.op.name(), self.kernel, self.shape_text())
    }
}

/// Rows of a prompt, and of a batch that decodes.
const PROMPT: usize = 512;
const BATCH: usize = 32;
/// Lengths at which fused attention is held against naive attention, and depths of decoding.
const PROMPTS: [usize; 5] = [128, 256, 512, 1024, 2048];
const DEPTHS: [usize; 3] = [128, 2048, 8192];

/// The kernels that `ops` names (all for none), with the shapes of a preset or of a file; those without a type of their
/// own in each of `kinds`.
pub(super) fn cases(device: Device, shapes: &str, ops: &[Op], kinds: &[Kind]) -> Result<Vec<Case>> {
    let supported = Op::of(device);
    if let Some(op) = ops.iter().find(|op| !supported.contains(op)) {
        let names: Vec<_> = supported.iter().map(|op| op.name()).collect();
        bail!("--op {} is not measured on {device}; there are {}", op.name(), names.join(", "));
    }
    let has = Kind::of(device);
    if let Some(kind) = kinds.iter().find(|kind| !has.contains(kind)) {
        bail!("--dtype {} is for the CPU; {device} has {}", kind.name(), names_of(has));
    }
    let ops = if ops.is_empty() { supported } else { ops };
    let kinds = if kinds.is_empty() { has } else { kinds };
    let path = Path::new(shapes);
    let entries = match preset(shapes) {
        Some(preset) => of_model(&preset.config()),
        None if path.is_file() => of_file(path)?,
        None => {
            let names: Vec<_> = presets().iter().map(|preset| preset.name).collect();
            bail!(
                "--shapes `{shapes}` is neither a file nor a preset; the presets are {}, and a file is a JSON or TOML list of shapes",
                names.join(", ")
            );
        }
    };
    let mut cases = Vec::new();
    for entry in entries.into_iter().filter(|entry| ops.contains(&entry.op)) {
        let kinds: Vec<Option<Kind>> = match entry.dtype {
            Some(kind) if !has.contains(&kind) => {
                bail!("--shapes `{shapes}`: {} is for the CPU; {device} has {}", kind.name(), names_of(has))
            }
            Some(kind) => vec![Some(kind)],
            None if entry.op.types().is_empty() => vec![None],
            None => kinds.iter().copied().filter(|kind| entry.op.types().contains(kind)).map(Some).collect(),
        };
        let kernel = entry.name.unwrap_or_else(|| entry.op.name().to_string());
        cases.extend(kinds.into_iter().map(|dtype| Case {
            op: entry.op,
            kernel: kernel.clone(),
            dtype,
            shape: entry.shape,
        }));
    }
    if cases.is_empty() {
        let names: Vec<_> = ops.iter().map(|op| op.name()).collect();
        bail!("--shapes `{shapes}` has nothing for --op {} in {}", names.join(","), names_of(kinds));
    }
    Ok(cases)
}

fn names_of(kinds: &[Kind]) -> String {
    kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

/// A case before its type is chosen.
struct Entry {
    op: Op,
    name: Option<String>,
    dtype: Option<Kind>,
    shape: Shape,
}

fn of_model(model: &ModelConfig) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut add = |op, name: &str, shape| entries.push(Entry { op, name: Some(name.to_string()), dtype: None, shape });
    let (heads, kv_heads, head_dim) = (model.num_attention_heads, model.num_key_value_heads, model.head_dim);
    let (hidden, inter) = (model.hidden_size, model.intermediate_size);
    let layer = [
        ("qkv_proj", (heads + 2 * kv_heads) * head_dim, hidden),
        ("o_proj", hidden, heads * head_dim),
        ("gate_up_proj", 2 * inter, hidden),
        ("down_proj", hidden, inter),
    ];
    // Of a prompt only the last row passes the head.
    for (name, n, k) in layer {
        add(Op::Gemm, name, Shape::Product { m: PROMPT, n, k });
    }
    let products = layer.into_iter().chain([("lm_head", model.vocab_size, hidden)]);
    for (op, m) in [(Op::Gemm, BATCH), (Op::Gemv, 1)] {
        for (name, n, k) in products.clone() {
            add(op, name, Shape::Product { m, n, k });
        }
    }
    if inter.is_multiple_of(PANEL) {
        for m in [PROMPT, BATCH, 1] {
            add(Op::GateUp, "gate_up_proj", Shape::Product { m, n: 2 * inter, k: hidden });
        }
    }
    let attention = |sequences, q_len, kv_len| Shape::Attention { sequences, q_len, kv_len, heads, kv_heads, head_dim };
    for length in PROMPTS {
        add(Op::Attention, "prefill", attention(1, length, length));
    }
    for depth in DEPTHS {
        add(Op::Attention, "decode", attention(1, 1, depth));
    }
    add(Op::Attention, "decode", attention(BATCH, 1, DEPTHS[0]));
    for rows in [1, BATCH, PROMPT] {
        add(Op::Norm, "rms_norm", Shape::Rows { rows, width: hidden });
        add(Op::AddNorm, "add_rms_norm", Shape::Rows { rows, width: hidden });
        add(Op::Silu, "silu_mul", Shape::Rows { rows, width: inter });
    }
    for (sequences, q_len) in [(BATCH, 1), (1, PROMPT)] {
        add(Op::Rope, "rope_kv_write", attention(sequences, q_len, PROMPT));
    }
    for rows in [1, BATCH] {
        add(Op::Argmax, "argmax", Shape::Rows { rows, width: model.vocab_size });
    }
    entries
}

/// One entry of a file. Unknown keys are errors, so that a misspelt one is not taken for its default.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    op: String,
    name: Option<String>,
    dtype: Option<Kind>,
    m: Option<usize>,
    n: Option<usize>,
    k: Option<usize>,
    sequences: Option<usize>,
    q_len: Option<usize>,
    kv_len: Option<usize>,
    heads: Option<usize>,
    kv_heads: Option<usize>,
    head_dim: Option<usize>,
    rows: Option<usize>,
    width: Option<usize>,
}

/// A TOML file has no list at its top.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TomlFile {
    kernel: Vec<FileEntry>,
}

fn of_file(path: &Path) -> Result<Vec<Entry>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read --shapes {shown}"))?;
    let entries: Vec<FileEntry> = if path.extension().is_some_and(|extension| extension == "toml") {
        let file: TomlFile = toml::from_str(&text)
            .with_context(|| format!("--shapes {shown} is not a TOML file of [[kernel]] tables"))?;
        file.kernel
    } else {
        serde_json::from_str(&text).with_context(|| format!("--shapes {shown} is not a JSON list of shapes"))?
    };
    if entries.is_empty() {
        bail!("--shapes {shown} lists no shapes");
    }
    let numbered = entries.into_iter().enumerate();
    numbered.map(|(i, entry)| entry.checked().with_context(|| format!("--shapes {shown}, shape {}", i + 1))).collect()
}

/// No dimension is larger, so that products of them stay far from overflow.
const MOST: usize = 1 << 20;

impl FileEntry {
    fn checked(self) -> Result<Entry> {
        let op = <Op as clap::ValueEnum>::from_str(&self.op, false).map_err(|_| {
            let all: Vec<_> = <Op as clap::ValueEnum>::value_variants().iter().map(|op| op.name()).collect();
            anyhow::anyhow!("there is no op `{}`; the ops are {}", self.op, all.join(", "))
        })?;
        let (need, used): (&[&str], &[&str]) = match op {
            Op::Gemm | Op::GateUp => (&["m", "n", "k"], &["m", "n", "k", "dtype"]),
            Op::Gemv => (&["n", "k"], &["m", "n", "k", "dtype"]),
            Op::Attention | Op::Rope => (
                &["q_len", "kv_len", "heads", "kv_heads", "head_dim"],
                &["sequences", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "dtype"],
            ),
            Op::Norm | Op::AddNorm | Op::Silu | Op::Argmax => (&["rows", "width"], &["rows", "width"]),
        };
        let given = [
            ("m", self.m),
            ("n", self.n),
            ("k", self.k),
            ("sequences", self.sequences),
            ("q_len", self.q_len),
            ("kv_len", self.kv_len),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("rows", self.rows),
            ("width", self.width),
        ];
        let name = op.name();
        for (key, value) in given {
            match value {
                None if need.contains(&key) => bail!("{name} needs `{key}`"),
                Some(_) if !used.contains(&key) => bail!("{name} has no `{key}`; it takes {}", used.join(", ")),
                Some(value) if value == 0 || value > MOST => bail!("`{key}` must be 1 to {MOST}, found {value}"),
                _ => {}
            }
        }
        if self.dtype.is_some() && !used.contains(&"dtype") {
            bail!("{name} has no `dtype`; it takes {}", used.join(", "));
        }
        if let Some(kind) = self.dtype.filter(|kind| !op.types().contains(kind)) {
            bail!("{name} has no {}; it takes {}", kind.name(), names_of(op.types()));
        }
        let one = |value: Option<usize>| value.unwrap_or(1);
        let shape = match op {
            Op::Gemm | Op::Gemv | Op::GateUp => Shape::Product { m: one(self.m), n: one(self.n), k: one(self.k) },
            Op::Attention | Op::Rope => Shape::Attention {
                sequences: one(self.sequences),
                q_len: one(self.q_len),
                kv_len: one(self.kv_len),
                heads: one(self.heads),
                kv_heads: one(self.kv_heads),
                head_dim: one(self.head_dim),
            },
            Op::Norm | Op::AddNorm | Op::Silu | Op::Argmax => {
                Shape::Rows { rows: one(self.rows), width: one(self.width) }
            }
        };
        match shape {
            Shape::Product { m, .. } if op == Op::Gemv && m != 1 => {
                bail!("gemv has one row; leave `m` out")
            }
            Shape::Product { n, .. } if op == Op::GateUp && !n.is_multiple_of(2 * PANEL) => {
                bail!(
                    "`n` of gate-up is the width of gate and up together: found {n}, expected a multiple of {}",
                    2 * PANEL
                )
            }
            Shape::Attention { q_len, kv_len, .. } if q_len > kv_len => {
                bail!("`q_len` {q_len} is more than `kv_len` {kv_len}: queries are the last of the positions")
            }
            Shape::Attention { heads, kv_heads, .. } if !heads.is_multiple_of(kv_heads) => {
                bail!("`heads` {heads} must be a multiple of `kv_heads` {kv_heads}")
            }
            Shape::Attention { head_dim, .. } if head_dim % 2 == 1 || head_dim > MOST_HEAD_DIM => {
                bail!("`head_dim` must be even and at most {MOST_HEAD_DIM}, found {head_dim}")
            }
            _ => Ok(Entry { op, name: self.name, dtype: self.dtype, shape }),
        }
    }
}

/// What kernels keep scratch for.
const MOST_HEAD_DIM: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_has_shapes_for_every_op() {
        for op in <Op as clap::ValueEnum>::value_variants() {
            let cases = cases(Device::Cpu, "tinyllama-1.1b", &[*op], &[]).unwrap();
            assert!(!cases.is_empty() && cases.iter().all(|case| case.op == *op), "{op:?}");
        }
        let head = Shape::Product { m: 1, n: 32_000, k: 2048 };
        let gemv = cases(Device::Cpu, "tinyllama-1.1b", &[Op::Gemv], &[Kind::Float32]).unwrap();
        assert_eq!(gemv.len(), 5);
        assert!(gemv.iter().any(|case| case.shape == head && case.kernel == "lm_head"));
    }
}
