//! Logits of a prompt and of greedy decode steps: the parity check against other implementations.

use serde::Serialize;
use strobe_model::program::{ProgramOptions, program};

use crate::cpu::{CpuBackend, CpuBackendOptions};
use crate::cuda::{CudaBackend, CudaBackendOptions, CudaDevice};
use crate::device::Device;
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::step::{Backend, ElementBytes, StepInputs, StepLimits, execute};

/// What the parity check writes.
#[derive(Clone, Debug, Serialize)]
pub struct EvalLogits {
    /// One row of logits per prompt position.
    pub logits: Vec<Vec<f32>>,
    /// The greedy continuation.
    pub greedy: Vec<u32>,
    /// Logits of each decode step: row i is what follows `greedy[i]`.
    pub decode_logits: Vec<Vec<f32>>,
}

/// Run `ids` and then `decode` greedy steps.
///
/// `greedy[0]` follows the prompt's last logits; decode step i feeds `greedy[i]` and yields `decode_logits[i]`.
pub fn logits(
    device: impl Into<Device>,
    model: &LoadedModel,
    ids: &[u32],
    decode: usize,
) -> Result<EvalLogits, EngineError> {
    let build = &model.config.build;
    let config = &model.config.model;
    if ids.is_empty() {
        return Err(EngineError::option("--ids", "is empty; give at least one token id"));
    }
    if let Some(bad) = ids.iter().find(|&&id| id as usize >= config.vocab_size) {
        let problem = format!("holds {bad}, but the vocabulary has {} entries", config.vocab_size);
        return Err(EngineError::option("--ids", problem));
    }
    let total = ids.len().saturating_add(decode);
    if total > config.max_position_embeddings {
        let problem = format!("+ --decode is {total} tokens, beyond the model's {}", config.max_position_embeddings);
        return Err(EngineError::option("--ids", problem));
    }
    let limits = StepLimits { tokens: ids.len(), sampled: ids.len(), requests: 1, positions: total };
    let block_tokens = build.cache_block_tokens();
    let blocks: Vec<u32> = (0..total.div_ceil(block_tokens) as u32).collect();
    let cpu = match device.into() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(device) => return cuda_logits(&device, model, ids, decode, limits, &blocks),
    };
    build.check_cpu()?;
    let options = CpuBackendOptions {
        limits,
        tokens_per_block: block_tokens,
        blocks: blocks.len(),
        dtype: build.dtype,
        kv: build.cpu_kv_type()?,
        context_fmha: build.context_fmha,
    };
    let mut backend = CpuBackend::new(cpu, config.clone(), model.weights.clone(), &options)?;
    let nodes = program(config, ProgramOptions { context_fmha: build.context_fmha });
    let mut inputs = StepInputs::new(limits, block_tokens, ElementBytes::cpu(build.weight_bytes(), build.kv_bytes()));

    inputs.push(ids, 0, &blocks, true);
    inputs.sampled.extend(0..ids.len() as u32);
    execute(&mut backend, config, &nodes, 0, &inputs, None);
    let rows =
        |backend: &CpuBackend| backend.logits().chunks(config.vocab_size).map(<[f32]>::to_vec).collect::<Vec<_>>();
    let mut result = EvalLogits { logits: rows(&backend), greedy: Vec::new(), decode_logits: Vec::new() };
    for step in 0..decode {
        let token = backend.tokens().last().copied().unwrap_or_default();
        result.greedy.push(token);
        inputs.clear();
        inputs.push(&[token], ids.len() + step, &blocks, false);
        inputs.sampled.push(0);
        execute(&mut backend, config, &nodes, 0, &inputs, None);
        result.decode_logits.extend(rows(&backend));
    }
    Ok(result)
}

fn cuda_logits(
    device: &CudaDevice,
    model: &LoadedModel,
    ids: &[u32],
    decode: usize,
    limits: StepLimits,
    blocks: &[u32],
) -> Result<EvalLogits, EngineError> {
    let (build, vocab) = (&model.config.build, model.config.model.vocab_size);
    let nodes = program(&model.config.model, ProgramOptions { context_fmha: build.context_fmha });
    let setup =
        CudaBackendOptions { device, limits, cache: crate::CacheSize::Blocks(blocks.len()), progress: &mut |_| true };
    let mut backend = CudaBackend::new(model, nodes.into(), setup)?;
    let bytes = ElementBytes { weight: build.weight_bytes(), kv: build.kv_bytes(), activation: build.dtype.bytes() };
    let mut inputs = StepInputs::new(limits, build.cache_block_tokens(), bytes);
    inputs.push(ids, 0, blocks, true);
    inputs.sampled.extend(0..ids.len() as u32);
    backend.launch(&inputs, None)?;
    let mut token = backend.wait()?.last().copied().unwrap_or_default();
    let rows = |logits: Vec<f32>| logits.chunks(vocab).map(<[f32]>::to_vec).collect::<Vec<_>>();
    let logits = rows(backend.read_logits(ids.len())?);
    let mut result = EvalLogits { logits, greedy: Vec::new(), decode_logits: Vec::new() };
    for step in 0..decode {
        result.greedy.push(token);
        inputs.clear();
        inputs.push(&[token], ids.len() + step, blocks, false);
        inputs.sampled.push(0);
        backend.launch(&inputs, None)?;
        token = backend.wait()?.last().copied().unwrap_or_default();
        result.decode_logits.extend(rows(backend.read_logits(1)?));
    }
    Ok(result)
}
