//! Where weight values come from: a checkpoint, a GGUF file, or seeded random numbers.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::checkpoint::Checkpoint;
use crate::config::{DType, ModelConfig};
use crate::error::ModelError;
use crate::gguf_model::GgufModel;
use crate::latent::LatentPart;
use crate::random::RandomTensor;
use crate::safetensors::TensorView;
use crate::stacked::StackedPart;
use crate::weights::{RandomInit, WeightInfo, weight_list};

/// Row access to weights, as f32, from a checkpoint, a GGUF file or seeded random numbers.
///
/// The same row has the same values whatever the order of calls, the number of threads or the target dtype.
#[derive(Debug)]
pub enum WeightSource {
    /// The tensors of a Hugging Face directory.
    Checkpoint(Checkpoint),
    /// A GGUF file, dequantised row by row.
    Gguf(Box<GgufModel>),
    /// A counter-based generator: real shapes, no training.
    Random {
        /// Models with equal seeds are equal.
        seed: u64,
    },
}

impl WeightSource {
    /// Checks that every weight of the model is present with the shape and dtype its configuration asks for.
    pub fn check(&self, config: &ModelConfig) -> Result<(), ModelError> {
        config.validate()?;
        for info in weight_list(config) {
            for (name, part_rows) in &info.parts {
                match self {
                    WeightSource::Checkpoint(checkpoint) => check_tensor(checkpoint, config, &info, name, *part_rows)?,
                    WeightSource::Gguf(model) => model.check_part(&info, name, *part_rows)?,
                    WeightSource::Random { .. } => {}
                }
            }
        }
        match self {
            WeightSource::Gguf(model) => model.check_nothing_is_left_out(),
            _ => Ok(()),
        }
    }

    /// Writes row `row` of a weight (row 0 for a vector; counted through all experts) into `out`, which has `info.cols`
    /// elements.
    pub fn fill_row_f32(&self, info: &WeightInfo, row: usize, out: &mut [f32]) -> Result<(), ModelError> {
        if row >= info.experts * info.rows || out.len() != info.cols {
            return Err(ModelError::WeightAccess {
                weight: info.id.name(),
                problem: format!(
                    "row {row} into {} elements was asked for, but it has {} rows of {}",
                    out.len(),
                    info.experts * info.rows,
                    info.cols
                ),
            });
        }
        if info.vector {
            let mut rest = out;
            for (name, elements) in &info.parts {
                let (part, tail) = split_part(info, rest, *elements)?;
                self.fill_part(info, name, 0, part)?;
                rest = tail;
            }
            return Ok(());
        }
        let parts_per_expert = info.parts.len() / info.experts;
        let (expert, mut row_in_part) = (row / info.rows, row % info.rows);
        for (name, part_rows) in info.parts.iter().skip(expert * parts_per_expert).take(parts_per_expert) {
            if row_in_part < *part_rows {
                return self.fill_part(info, name, row_in_part, out);
            }
            row_in_part -= part_rows;
        }
        Err(ModelError::WeightAccess {
            weight: info.id.name(),
            problem: format!("its parts have fewer than the {} rows it claims", info.rows),
        })
    }

    /// Whether the values are random numbers rather than trained weights.
    pub fn is_random(&self) -> bool {
        matches!(self, WeightSource::Random { .. })
    }

    /// One phrase for reports: where the weights come from.
    pub fn describe(&self) -> String {
        match self {
            WeightSource::Checkpoint(checkpoint) => format!("checkpoint {}", checkpoint.dir().display()),
            WeightSource::Gguf(model) => format!("GGUF file {}", model.file().path().display()),
            WeightSource::Random { seed } => format!("random weights (seed {seed})"),
        }
    }

    /// Row `row` of one tensor, `out.len()` elements wide.
    fn fill_part(&self, info: &WeightInfo, tensor: &str, row: usize, out: &mut [f32]) -> Result<(), ModelError> {
        match (self, &info.init) {
            (WeightSource::Checkpoint(checkpoint), _) => {
                let Some(view) = checkpoint.tensor(tensor) else {
                    if let Some(part) = LatentPart::parse(tensor) {
                        let filled = part.fill(checkpoint, info.experts, info.rows, row, out);
                        return filled.map_err(|problem| tensor_error(checkpoint, part.tensor(), problem));
                    }
                    let part = StackedPart::parse(tensor).ok_or_else(|| missing(checkpoint, tensor))?;
                    let filled = part.fill(checkpoint, row, out);
                    return filled.map_err(|(name, problem)| tensor_error(checkpoint, &name, problem));
                };
                copy_row(view, row, out).map_err(|problem| tensor_error(checkpoint, tensor, problem))
            }
            (WeightSource::Gguf(model), _) => model.fill_part(info, tensor, row, out),
            (WeightSource::Random { .. }, RandomInit::Constant(value)) => {
                out.fill(*value);
                Ok(())
            }
            (WeightSource::Random { seed }, RandomInit::Values { values, shuffled }) => {
                let order = RandomTensor::new(*seed, tensor);
                for (index, out) in out.iter_mut().enumerate() {
                    let from = if *shuffled { order.permuted(index, values.len()) } else { index };
                    *out = values.get(from).copied().unwrap_or_default();
                }
                Ok(())
            }
            (WeightSource::Random { seed }, RandomInit::Normal { std }) => {
                // Keyed by the checkpoint's names: fusing or splitting matrices does not change their values.
                RandomTensor::new(*seed, tensor).fill_normal(row as u64 * out.len() as u64, *std, out);
                Ok(())
            }
        }
    }
}

fn split_part<'a>(
    info: &WeightInfo,
    out: &'a mut [f32],
    elements: usize,
) -> Result<(&'a mut [f32], &'a mut [f32]), ModelError> {
    let available = out.len();
    out.split_at_mut_checked(elements).ok_or_else(|| ModelError::WeightAccess {
        weight: info.id.name(),
        problem: format!("a part of {elements} elements does not fit in the {available} left"),
    })
}

fn check_tensor(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    info: &WeightInfo,
    name: &str,
    part_rows: usize,
) -> Result<(), ModelError> {
    let Some(view) = checkpoint.tensor(name) else {
        if let (Some(part), Some(latent)) = (LatentPart::parse(name), config.latent) {
            let rows = info.experts * (latent.qk_nope_head_dim + latent.v_head_dim);
            let whole = WeightInfo { vector: false, cols: latent.kv_lora_rank, ..info.clone() };
            return match checkpoint.tensor(part.tensor()) {
                None => Err(missing(checkpoint, part.tensor())),
                Some(_) => check_tensor(checkpoint, config, &whole, part.tensor(), rows),
            };
        }
        let experts = config.moe.as_ref().filter(|_| config.model_type == "gpt_oss").map(|moe| moe.num_experts);
        let (Some(experts), Some(part)) = (experts, StackedPart::parse(name)) else {
            return Err(missing(checkpoint, name));
        };
        let checked = part.check(checkpoint, config.dtype, experts, part_rows, info.cols);
        return checked.map_err(|(name, problem)| tensor_error(checkpoint, &name, problem));
    };
    let expected = if info.vector { vec![part_rows] } else { vec![part_rows, info.cols] };
    if view.shape != expected {
        return Err(tensor_error(
            checkpoint,
            name,
            format!(
                "shape is {:?}, but config.json asks for {expected:?}; do both belong to the same model?",
                view.shape
            ),
        ));
    }
    let Some(found) = DType::from_safetensors_name(view.dtype) else {
        let problem = format!("dtype {} is not supported; expected F32, F16 or BF16", view.dtype);
        return Err(tensor_error(checkpoint, name, problem));
    };
    // Norms and biases are often kept in f32 beside 16-bit matrices, and engines keep them so.
    let accepted = found == config.dtype || (info.vector && found == DType::F32);
    if !accepted {
        return Err(tensor_error(
            checkpoint,
            name,
            format!(
                "dtype is {}, but config.json says {}; set its `torch_dtype` to \"{}\" if the file is right",
                view.dtype, config.dtype, found
            ),
        ));
    }
    Ok(())
}

fn tensor_error(checkpoint: &Checkpoint, tensor: &str, problem: String) -> ModelError {
    ModelError::Tensor { path: checkpoint.dir().to_path_buf(), tensor: tensor.to_string(), problem }
}

fn missing(checkpoint: &Checkpoint, tensor: &str) -> ModelError {
    let problem = if tensor == "lm_head.weight" {
        "is missing, but config.json has tie_word_embeddings = false; set it to true if the model shares its embedding table"
            .to_string()
    } else {
        format!("is missing; the checkpoint has {}", checkpoint.summary())
    };
    tensor_error(checkpoint, tensor, problem)
}

pub(crate) fn copy_row(view: TensorView<'_>, row: usize, out: &mut [f32]) -> Result<(), String> {
    let Some(dtype) = DType::from_safetensors_name(view.dtype) else {
        return Err(format!("dtype {} is not supported; expected F32, F16 or BF16", view.dtype));
    };
    let width = out.len() * dtype.bytes();
    let bytes = row
        .checked_mul(width)
        .and_then(|begin| view.data.get(begin..begin.checked_add(width)?))
        .ok_or_else(|| format!("has no row {row} of {} elements; its shape is {:?}", out.len(), view.shape))?;
    match dtype {
        DType::F32 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_le_bytes(*raw);
            }
        }
        DType::Bf16 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*raw)) << 16);
            }
        }
        DType::F16 => halves_to_f32(bytes, out),
    }
    Ok(())
}

/// f16 has no cheap bit trick: use the hardware's conversion where the bytes happen to be aligned, as they nearly always are.
pub(crate) fn halves_to_f32(bytes: &[u8], out: &mut [f32]) {
    if cfg!(target_endian = "little")
        && let Ok(values) = bytemuck::try_cast_slice::<u8, f16>(bytes)
    {
        values.convert_to_f32_slice(out);
        return;
    }
    for (value, raw) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = f16::from_le_bytes(*raw).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn rows_of_every_dtype_are_converted_exactly_aligned_or_not() {
        let numbers = [0.5f32, -1.5, 3.0e-5, 65504.0, -0.0, f32::INFINITY];
        for shift in 0..3 {
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let mut data = vec![0u8; shift];
                for n in numbers {
                    match dtype {
                        DType::F32 => data.extend(n.to_le_bytes()),
                        DType::F16 => data.extend(f16::from_f32(n).to_le_bytes()),
                        DType::Bf16 => data.extend(bf16::from_f32(n).to_le_bytes()),
                    }
                }
                let view = TensorView { dtype: dtype.safetensors_name(), shape: &[2, 3], data: &data[shift..] };
                for row in 0..2 {
                    let mut out = [0.0f32; 3];
                    copy_row(view, row, &mut out).unwrap();
                    for (got, n) in out.iter().zip(&numbers[row * 3..]) {
                        let expected = match dtype {
                            DType::F32 => *n,
                            DType::F16 => f16::from_f32(*n).to_f32(),
                            DType::Bf16 => bf16::from_f32(*n).to_f32(),
                        };
                        assert_eq!(got.to_bits(), expected.to_bits());
                    }
                }
                assert!(copy_row(view, 2, &mut [0.0; 3]).unwrap_err().contains("row 2"));
            }
        }
    }
}
