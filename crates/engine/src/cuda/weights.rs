//! A model's weights in the GPU's memory.

use std::collections::HashMap;

use strobe_kernels_cpu::Layout;
use strobe_kernels_cuda::{CudaError, DeviceBuffer, DevicePtr, Gpu, Precision, WeightOps};
use strobe_model::program::{Node, OpKind};
use strobe_model::random::RandomTensor;
use strobe_model::weights::RandomInit;
use strobe_model::{DType, WeightId, WeightInfo, WeightSource, weight_list};

use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::quantization::Quantization;
use crate::weights::WeightData;

/// The kernels' name of a type.
pub(super) fn precision(dtype: DType) -> Precision {
    match dtype {
        DType::F32 => Precision::F32,
        DType::F16 => Precision::F16,
        DType::Bf16 => Precision::Bf16,
    }
}

/// One weight.
struct DeviceWeight {
    data: DeviceBuffer,
    /// Of each output row, where the weight is e4m3.
    scales: Option<DeviceBuffer>,
}

/// All weights of a model, row-major.
pub(super) struct DeviceWeights {
    weights: HashMap<WeightId, DeviceWeight>,
    bytes: u64,
}

/// Whether a weight is kept as e4m3 in an FP8 engine: the projections of the layers. Embedding and head stay as they are,
/// as everywhere: they are few, and the logits feel every bit.
pub(super) fn is_fp8(info: &WeightInfo, fp8: bool) -> bool {
    fp8 && !info.vector && matches!(info.id, WeightId::Layer(..))
}

/// Bytes that the weights of `model` take on the device.
pub fn device_bytes(model: &LoadedModel) -> u64 {
    let build = &model.config.build;
    let bytes = |info: &WeightInfo| match info {
        info if info.vector => info.elements() * 4,
        info if is_fp8(info, build.quantization == Quantization::Fp8) => info.elements() + info.rows as u64 * 4,
        info => info.elements() * build.dtype.bytes() as u64,
    };
    weight_list(&model.config.model).iter().map(bytes).sum()
}

impl DeviceWeights {
    /// Generate or copy every weight. `progress` is told the bytes done so far and answers whether to go on.
    pub(super) fn load(
        gpu: &Gpu,
        model: &LoadedModel,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<DeviceWeights, EngineError> {
        let build = &model.config.build;
        let list = weight_list(&model.config.model);
        let matrices = precision(build.dtype);
        let ops = WeightOps::new(gpu, matrices)?;
        // What has to be unpacked or quantised goes through here first.
        let staged = |info: &WeightInfo| {
            let packed = matches!(model.weights.data(info.id), Some(WeightData::Bytes { layout: Layout::Packed, .. }));
            packed || is_fp8(info, build.quantization == Quantization::Fp8)
        };
        let padded = |info: &WeightInfo| packed_bytes(info, matrices);
        let largest = list.iter().filter(|info| staged(info)).map(padded).max().unwrap_or(0);
        let stages =
            [DeviceBuffer::new(largest, "weights on their way")?, DeviceBuffer::new(largest, "weights on their way")?];
        let mut all = DeviceWeights { weights: HashMap::new(), bytes: 0 };
        for info in &list {
            let weight = load_one(gpu, &ops, model, info, matrices, &stages)?;
            all.bytes += (weight.data.bytes() + weight.scales.as_ref().map_or(0, DeviceBuffer::bytes)) as u64;
            all.weights.insert(info.id, weight);
            if !progress(all.bytes) {
                return Err(EngineError::Interrupted);
            }
        }
        gpu.synchronize()?;
        Ok(all)
    }

    /// Refuses a program that reads weights which are not here, or their scales.
    pub(super) fn check(&self, nodes: &[Node], fp8: bool) -> Result<(), EngineError> {
        for node in nodes {
            for id in node.kind.weights() {
                self.ptr(id)?;
            }
            if let OpKind::Linear { weight: id @ WeightId::Layer(..), .. } = node.kind
                && fp8
                && self.scales(id) == 0
            {
                return Err(CudaError::Unsupported(format!("{} without scales in an FP8 engine", id.name())).into());
            }
        }
        Ok(())
    }

    /// Where a weight starts.
    pub(super) fn ptr(&self, id: WeightId) -> Result<DevicePtr, CudaError> {
        let missing = || CudaError::Unsupported(format!("a program that reads {}, which the model lacks", id.name()));
        self.weights.get(&id).map(|weight| weight.data.ptr()).ok_or_else(missing)
    }

    /// Where a weight starts, 0 where an op has none.
    pub(super) fn optional(&self, id: Option<WeightId>) -> Result<DevicePtr, CudaError> {
        id.map_or(Ok(0), |id| self.ptr(id))
    }

    /// Where its scales start; 0 where it has none.
    pub(super) fn scales(&self, id: WeightId) -> DevicePtr {
        self.weights.get(&id).and_then(|weight| weight.scales.as_ref()).map_or(0, DeviceBuffer::ptr)
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Bytes of a weight, or of that of one expert, in panels.
fn packed_bytes(info: &WeightInfo, precision: Precision) -> usize {
    info.rows.next_multiple_of(strobe_kernels_cpu::PANEL) * info.cols * precision.bytes()
}

fn load_one(
    gpu: &Gpu,
    ops: &WeightOps,
    model: &LoadedModel,
    info: &WeightInfo,
    matrices: Precision,
    stages: &[DeviceBuffer; 2],
) -> Result<DeviceWeight, EngineError> {
    let fp8 = is_fp8(info, model.config.build.quantization == Quantization::Fp8);
    let kind = if info.vector { Precision::F32 } else { matrices };
    let elements = info.experts * info.rows * info.cols;
    let name = info.id.name();
    let data = DeviceBuffer::new(if fp8 { elements } else { elements * kind.bytes() }, &name)?;
    // Where the row-major weight is put together: right where it stays, unless it is quantised from there.
    let plain = if fp8 { &stages[0] } else { &data };
    let stored = model.weights.data(info.id);
    if let Some(WeightData::Bytes { bytes, layout }) = stored {
        let expected = match layout {
            Layout::RowMajor => elements * kind.bytes(),
            Layout::Packed => info.experts * packed_bytes(info, matrices),
        };
        if bytes.len() != expected {
            return Err(EngineError::Stopped(format!("{name} has {} bytes (expected {expected})", bytes.len())));
        }
    }
    match stored {
        Some(WeightData::Bytes { bytes, layout: Layout::RowMajor }) => plain.write(0, bytes)?,
        Some(WeightData::Bytes { bytes, layout: Layout::Packed }) => {
            let (one, bytes_of_one) = (packed_bytes(info, matrices), info.rows * info.cols * matrices.bytes());
            for (expert, bytes) in bytes.chunks(one.max(1)).enumerate() {
                if expert > 0 {
                    gpu.synchronize()?;
                }
                stages[1].write(0, bytes)?;
                let to = plain.ptr() + (expert * bytes_of_one) as u64;
                // SAFETY: the weight and its stage have room for these rows and columns, and are waited for before either is used again.
                unsafe { ops.unpack_panels(gpu, stages[1].ptr(), to, info.rows, info.cols) }?;
            }
        }
        Some(WeightData::Source(WeightSource::Random { seed })) if !matches!(info.init, RandomInit::Values { .. }) => {
            let mut at = plain.ptr();
            for (tensor, rows) in &info.parts {
                let count = if info.vector { *rows as u64 } else { *rows as u64 * info.cols as u64 };
                match &info.init {
                    RandomInit::Normal { std } => {
                        let key = RandomTensor::new(*seed, tensor).key();
                        // SAFETY: the weight and its stage have room for these rows and columns, and are waited for before either is used again.
                        unsafe { ops.random_normal(gpu, at, kind, key, 0, count, *std) }?;
                    }
                    // SAFETY: the weight and its stage have room for these rows and columns, and are waited for before either is used again.
                    RandomInit::Constant(value) => unsafe { ops.fill_f32(gpu, at, *value, count) }?,
                    RandomInit::Values { .. } => {}
                }
                at += count * kind.bytes() as u64;
            }
        }
        Some(WeightData::Source(source)) => {
            let dtype = if info.vector { DType::F32 } else { model.config.build.dtype };
            let mut bytes = vec![0u8; elements * dtype.bytes()];
            crate::weights::fill_rows(source, info, dtype, &mut bytes)?;
            plain.write(0, &bytes)?;
        }
        None => return Err(EngineError::Stopped(format!("the model has no weight {name}"))),
    }
    let scales = match fp8 {
        true => {
            let scales = DeviceBuffer::new(info.rows * 4, &name)?;
            // SAFETY: the weight and its stage have room for these rows and columns, and are waited for before either is used again.
            unsafe { ops.quantize_weight(gpu, plain.ptr(), data.ptr(), scales.ptr(), info.rows, info.cols) }?;
            Some(scales)
        }
        false => None,
    };
    // The stages are used again by the next weight, and host copies do not wait for kernels.
    gpu.synchronize()?;
    Ok(DeviceWeight { data, scales })
}
