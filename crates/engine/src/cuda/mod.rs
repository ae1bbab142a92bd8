//! The CUDA backend: one model on a GPU, its steps and their way back.

mod attention;
mod buffers;
mod experts;
mod inputs;
mod ops;
mod start;
mod step;
mod weights;

use std::sync::Arc;

use strobe_kernels_cuda::{
    CacheReport, CapturedGraph, CudaError, DeviceBuffer, DeviceInfo, Event, GemmChoices, Gpu, KvDtype, Linear, Maxima,
    NvtxChoice, PinnedBuffer, Profiler, RowOps, SampleArgs, SampleOps, UnfusedAttention,
};
use strobe_model::ModelConfig;
use strobe_model::program::{Input, Node, Output, Ran, StepShape};

use crate::clock::Clock;
use crate::recorder::{OpEvent, Recorder};
use crate::step::{StepInputs, StepLimits};
use attention::{AttentionOps, cache_width};
use buffers::Buffers;
use experts::Experts;
use inputs::{Bounds, PackOptions, Packed, at};
use weights::DeviceWeights;

pub(crate) use experts::routing as expert_routing;
pub use start::{CudaBackendOptions, buckets, choose_gemms};
pub use weights::device_bytes;

/// Inputs of a step beyond this are left to the copy engine.
const MOST_COPIED_WORDS: usize = 1 << 16;

/// A GPU as an engine is asked to use it.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    /// Number of the GPU.
    pub index: u32,
    /// Replay decode steps as graphs.
    pub graphs: bool,
    /// Wait after every op, so that a fault is found where it happens; graphs are off then. On where the environment has
    /// `CUDA_LAUNCH_BLOCKING=1`.
    pub blocking: bool,
    /// Whether windows will be recorded; without any, the profiling library is not even loaded.
    pub record: bool,
    /// Ranges for Nsight Systems.
    pub nvtx: NvtxChoice,
    /// Measured GEMM choices to start from.
    pub choices: Option<GemmChoices>,
    /// Measure those that are missing; otherwise the likeliest kernels run.
    pub measure: bool,
}

impl CudaDevice {
    /// GPU `index` with graphs, nothing recorded.
    pub fn new(index: u32) -> CudaDevice {
        let blocking = std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| value == "1");
        CudaDevice {
            index,
            graphs: true,
            blocking,
            record: false,
            nvtx: NvtxChoice::Auto,
            choices: None,
            measure: true,
        }
    }

    /// Whether decode steps are replayed as graphs: nothing in a graph can be waited for.
    pub fn replays_graphs(&self) -> bool {
        self.graphs && !self.blocking
    }

    /// What a user should know of how the GPU will be used.
    fn note(&self) -> Option<String> {
        let lost = self.graphs && !self.replays_graphs();
        let why = "launches block (--cuda-launch-blocking, or CUDA_LAUNCH_BLOCKING=1)";
        lost.then(|| format!("CUDA graphs are off, because {why}; decode steps are launched op by op and take longer"))
    }
}

/// What starting on a GPU took and gave.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CudaFacts {
    /// The GPU.
    pub device: DeviceInfo,
    /// What kernels were compiled for.
    pub arch: String,
    /// What loading the kernels cost.
    pub kernels: CacheReport,
    /// Batch sizes that graphs were captured for.
    pub graph_buckets: Vec<usize>,
    /// Measured GEMM choices.
    pub gemm: GemmChoices,
    /// How many of them were measured now.
    pub gemm_measured: usize,
    /// Milliseconds of each part of the start.
    pub start_ms: Vec<(&'static str, f64)>,
}

/// Host memory of one step on its way.
struct Stage {
    packed: PinnedBuffer<u32>,
    banned: PinnedBuffer<u32>,
    tokens: PinnedBuffer<u32>,
    /// Tokens sent to each expert.
    expert_counts: PinnedBuffer<u32>,
    done: Event,
    sampled: usize,
    /// What ran, for errors.
    what: &'static str,
    /// Of a recorded step, what its costs depend on beside the experts that its tokens were sent to.
    recorded: Option<StepShape<'static>>,
    /// Experts that some of its tokens were sent to, layer by layer.
    experts_used: Vec<u32>,
}

/// The graph of a decode step.
struct DecodeGraph {
    /// Its rows: smaller batches are padded.
    rows: usize,
    graph: CapturedGraph,
    /// What its last product keeps of each row's maximum.
    maxima: Option<Maxima>,
    /// The ops in it, and how each ran.
    launched: Vec<(u32, Ran)>,
}

/// A model on a GPU.
pub struct CudaBackend {
    config: ModelConfig,
    nodes: Arc<[Node]>,
    limits: StepLimits,
    pack: PackOptions,
    rows: RowOps,
    linear: Linear,
    attention: AttentionOps,
    unfused: Option<UnfusedAttention>,
    sample: SampleOps,
    weights: DeviceWeights,
    kv: DeviceBuffer,
    kv_layer: u64,
    kv_dtype: KvDtype,
    fp8: bool,
    buffers: Buffers,
    experts: Option<Experts>,
    stages: [Stage; 2],
    /// Stage of the next launch, and of the oldest step that was not waited for.
    next: usize,
    oldest: usize,
    graphs: Vec<DecodeGraph>,
    workspace_bytes: u64,
    graph_bytes: u64,
    blocking: bool,
    profiler: Profiler,
    notes: Vec<String>,
    facts: CudaFacts,
    // Last: everything above gives memory back through its context.
    gpu: Gpu,
}

impl CudaBackend {
    /// Blocks of the cache.
    pub fn blocks(&self) -> usize {
        self.kv_layer as usize / self.block_bytes()
    }

    fn block_bytes(&self) -> usize {
        let element = match self.kv_dtype {
            KvDtype::Fp8 => 1,
            KvDtype::Same => self.linear.precision().bytes(),
        };
        cache_width(&self.config) * self.pack.tokens_per_block * element
    }

    fn launch_step(&mut self, step: &StepInputs, trace: Option<(&mut Recorder, &Clock, u64)>) -> Result<(), CudaError> {
        let bucket = if inputs::is_decode(step) {
            self.graphs.iter().position(|graph| graph.rows >= step.tokens.len())
        } else {
            None
        };
        let padded = bucket.map(|index| self.graphs[index].rows);
        let last_sampled = self.stages[1 - self.next].sampled;
        let (vocab, blocks, limits) = (self.config.vocab_size, self.blocks(), self.limits);
        let stage = &mut self.stages[self.next];
        let packed = inputs::pack(step, &self.pack, padded, &mut stage.packed);
        let bounds = Bounds { vocab, blocks, limits, last_sampled };
        debug_assert_eq!(inputs::check(&packed, &stage.packed, &self.pack, &bounds), Ok(()));
        self.gpu.set_tag(u32::MAX);
        let (words, to) = (packed.words.next_multiple_of(4), self.buffers.packed.ptr());
        // SAFETY: both sides have room for the largest step of these limits. The stage is the host's until this step is
        // launched, and again when it was waited for.
        unsafe {
            if words > MOST_COPIED_WORDS {
                self.gpu.copy_to_device(to, &stage.packed, words)?;
            } else {
                self.rows.copy_inputs(&self.gpu, &stage.packed, words, to)?;
            }
        }
        if packed.draws.is_some() && !step.banned.is_empty() {
            let count = step.banned.len();
            if stage.banned.len() < count {
                stage.banned = PinnedBuffer::new(count.next_power_of_two())?;
            }
            if self.buffers.banned.bytes() < count * 4 {
                // No graph knows it, but the step before may still read it.
                self.gpu.synchronize()?;
                self.buffers.banned = DeviceBuffer::new(count.next_power_of_two() * 4, "forbidden tokens")?;
            }
            stage.banned[..count].copy_from_slice(&step.banned);
            // SAFETY: as above, and both sides were just made large enough.
            unsafe { self.gpu.copy_to_device(self.buffers.banned.ptr(), &stage.banned, count)? };
        }
        let begun = trace.as_ref().map(|(_, clock, _)| clock.now());
        let mut launched = Vec::new();
        let maxima = match bucket {
            Some(index) => {
                stage.what = "a decode step replayed as a graph (--cuda-launch-blocking finds the op)";
                let decode = &self.graphs[index];
                // SAFETY: as below, with the rows that the graph was captured for; what it works on lives as long as `self`.
                unsafe { decode.graph.launch(&self.gpu) }?;
                self.profiler.graph_launched(&decode.graph.nodes);
                if begun.is_some() {
                    launched.extend_from_slice(&decode.launched);
                }
                decode.maxima
            }
            None => {
                stage.what = "a step launched op by op (--cuda-launch-blocking finds the op)";
                // SAFETY: the scheduler planned the step within `limits`, for which everything was made, and `pack` wrote what `check`
                // lets pass. The inputs are on their way and stay as they are until the step was waited for.
                unsafe { self.run_nodes(&packed, begun.is_some().then_some(&mut launched)) }?
            }
        };
        // Drawn tokens need all logits.
        let maxima = maxima.filter(|_| packed.draws.is_none());
        self.profiler.push(format_args!("_sample_async"));
        let sampled = self.run_sample(&packed, maxima);
        self.profiler.pop();
        let sampled = sampled?;
        self.gpu.set_tag(u32::MAX);
        if let Some(experts) = &self.experts {
            // SAFETY: the stage was made for so many counts, and is the host's again when this step was waited for.
            unsafe { experts.copy_counts(&self.gpu, &self.stages[self.next].expert_counts)? };
        }
        let stage = &mut self.stages[self.next];
        stage.done.record(&self.gpu)?;
        stage.sampled = packed.sampled;
        self.next = 1 - self.next;
        if let (Some((recorder, clock, iteration)), Some(start)) = (trace, begun) {
            // What each op costs; when it ran on the GPU is the timeline's business.
            let (shape, end) = (step.shape(), clock.now());
            launched.push((self.nodes.len() as u32 - 1, sampled));
            for (node, mut ran) in launched {
                let op = &self.nodes[node as usize];
                if op.rows(&shape) == 0 {
                    continue;
                }
                // A graph finds in its inputs whether logits are wanted.
                if let Output::Maxima { spared, .. } = &mut ran.output {
                    *spared = packed.logits_spared;
                }
                let cost = op.cost(&self.config, &shape, ran);
                recorder.op(OpEvent { node, iteration, start, end, ran, cost });
            }
        }
        Ok(())
    }

    /// `maxima` are what the last product has kept of each row's maximum.
    fn run_sample(&self, packed: &Packed, maxima: Option<Maxima>) -> Result<Ran, CudaError> {
        let mut ran = Ran::default();
        if packed.sampled == 0 {
            return Ok(ran);
        }
        self.gpu.set_tag(self.nodes.len() as u32 - 1);
        let (logits, vocab, rows) = (self.buffers.logits.ptr(), self.config.vocab_size, packed.sampled);
        let (base, out) = (self.buffers.packed.ptr(), self.buffers.tokens.ptr());
        // Kernels write page-locked memory of the host as if it were their own: no copy waits for its turn.
        let host = self.stages[self.next].tokens.ptr();
        match packed.draws {
            None => match maxima {
                Some(maxima) => {
                    ran.input = Input::Maxima(maxima.tiles as u32);
                    // SAFETY: there is room for the samples of the largest step, and the stage is the host's again when this step was
                    // waited for.
                    unsafe { self.sample.argmax_tiles(&self.gpu, maxima, rows, out, host) }?
                }
                // SAFETY: there is room for the samples of the largest step, and the stage is the host's again when this step was
                // waited for.
                None => unsafe { self.sample.argmax(&self.gpu, logits, vocab, rows, out, host) }?,
            },
            Some(draws) => {
                let (draws, banned) = (at(base, draws), self.buffers.banned.ptr());
                // SAFETY: there is room for the samples of the largest step, and the stage is the host's again when this step was
                // waited for.
                unsafe {
                    self.sample.sample(&self.gpu, &SampleArgs { logits, vocab, rows, draws, banned, out, host })
                }?;
            }
        }
        self.settled("sample")?;
        Ok(ran)
    }

    /// With `blocking`: wait, so that a fault is found at its op.
    fn settled(&self, op: &str) -> Result<(), CudaError> {
        if !self.blocking {
            return Ok(());
        }
        self.gpu.synchronize().map_err(|error| error.while_waiting_for(|| format!("op {op}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_that_block_leave_no_graphs_and_say_so() {
        let device = |graphs, blocking| CudaDevice { graphs, blocking, ..CudaDevice::new(0) };
        for (device, replays, told) in [
            (device(true, false), true, false),
            (device(true, true), false, true),
            (device(false, true), false, false),
            (device(false, false), false, false),
        ] {
            assert_eq!((device.replays_graphs(), device.note().is_some()), (replays, told), "{device:?}");
        }
        let note = device(true, true).note().unwrap();
        for part in ["graphs are off", "launches block", "--cuda-launch-blocking", "CUDA_LAUNCH_BLOCKING=1"] {
            assert!(note.contains(part), "{note}");
        }
    }
}
