//! What the engine asks of a GPU, step by step.

use std::fmt;

use strobe_kernels_cuda::CudaError;
use strobe_model::program::{OpKind, StepShape};

use crate::backend::{Backend, DeviceRecorder, Landed, MemoryByPool, Trace, WindowEdge};
use crate::clock::Clock;
use crate::device::DeviceFacts;
use crate::error::EngineError;
use crate::recorder::GpuRecording;
use crate::step::StepInputs;

use super::CudaBackend;
use super::experts::Experts;

impl CudaBackend {
    /// A GPU says only now which experts the tokens of the step that landed were sent to: take what no token needed out of
    /// what its ops cost.
    fn correct_costs(&mut self, trace: Trace<'_>) {
        let stage = &mut self.stages[1 - self.oldest];
        let (Some(recorded), Some(moe)) = (stage.recorded.take(), &self.config.moe) else { return };
        stage.experts_used.clear();
        let counts = stage.expert_counts.chunks(moe.num_experts);
        stage.experts_used.extend(counts.map(|layer| layer.iter().filter(|count| **count > 0).count() as u32));
        let known = StepShape { experts_used: &stage.experts_used, ..recorded };
        let (nodes, config) = (&self.nodes, &self.config);
        trace.recorder.correct(trace.iteration, |node| {
            let node = nodes.get(node as usize)?;
            matches!(node.kind, OpKind::ExpertLinear { .. }).then(|| node.cost(config, &known))
        });
    }
}

impl Backend for CudaBackend {
    fn attach(&mut self) -> Result<Vec<u32>, EngineError> {
        self.gpu.bind()?;
        Ok(Vec::new())
    }

    /// Puts a step on the GPU: inputs, forward pass, sampling, and the device-to-host copy of its tokens. Returns before any of it
    /// has run.
    fn launch(&mut self, step: &mut StepInputs, clock: &Clock, trace: Option<Trace<'_>>) -> Result<u64, EngineError> {
        self.stages[self.next].recorded = trace.as_ref().map(|_| step.shape_alone());
        if let Some(trace) = &trace {
            self.profiler.begin_iteration(trace.iteration);
        }
        let trace = trace.map(|trace| (trace.recorder, clock, trace.iteration));
        // The step before is to blame, not this launch.
        let launched = self.launch_step(step, trace);
        launched.map_err(|error| error.during(|| self.stages[self.oldest].what.to_string()))?;
        Ok(clock.now())
    }

    fn land(&mut self, trace: Option<Trace<'_>>) -> Result<(), EngineError> {
        let stage = &self.stages[self.oldest];
        stage.done.wait().map_err(|error| error.while_waiting_for(|| stage.what.to_string()))?;
        self.oldest = 1 - self.oldest;
        if let Some(trace) = trace {
            self.correct_costs(trace);
        }
        Ok(())
    }

    fn landed(&self) -> Landed<'_> {
        let stage = &self.stages[1 - self.oldest];
        Landed { tokens: &stage.tokens[..stage.sampled], expert_counts: &stage.expert_counts }
    }

    fn logits(&self) -> Result<Vec<f32>, EngineError> {
        self.gpu.synchronize()?;
        let mut logits = vec![0f32; self.landed().tokens.len() * self.config.vocab_size];
        self.buffers.logits.read(0, &mut logits)?;
        Ok(logits)
    }

    fn use_perfect_router(&mut self, on: bool) -> Result<(), EngineError> {
        Ok(self.experts.as_ref().map_or(Ok(()), |experts| experts.use_planned(on))?)
    }

    fn memory(&self) -> MemoryByPool {
        MemoryByPool {
            weights_bytes: self.weights.bytes(),
            kv_cache_bytes: self.kv.bytes() as u64,
            activation_bytes: self.buffers.bytes() + self.experts.as_ref().map_or(0, Experts::bytes),
            workspace_bytes: self.workspace_bytes,
            graph_bytes: self.graph_bytes,
        }
    }

    fn facts(&self) -> DeviceFacts {
        DeviceFacts::Cuda(Box::new(self.facts.clone()))
    }

    fn notes(&mut self) -> Vec<String> {
        self.notes.drain(..).chain(self.profiler.notes()).collect()
    }

    fn window(&mut self, edge: WindowEdge, clock: &Clock) -> Result<Option<GpuRecording>, EngineError> {
        let (gpu, profiler, now) = (&self.gpu, &mut self.profiler, || clock.now());
        let timeline: Result<_, CudaError> = match edge {
            WindowEdge::LeadIn(iteration) => profiler.lead_in(gpu, iteration, &now).map(|()| None),
            WindowEdge::Cancel => profiler.cancel_lead_in(gpu, &now).map(|()| None),
            WindowEdge::Open => profiler.begin_window(gpu, &now).map(|()| None),
            WindowEdge::Close => profiler.end_window(gpu, &now),
        };
        let device = &self.facts.device;
        Ok(timeline?.map(|timeline| GpuRecording { device: device.clone(), timeline }))
    }

    fn recorder(&self) -> DeviceRecorder {
        match (self.profiler.records(), self.profiler.is_leading_in()) {
            (false, _) => DeviceRecorder::Absent,
            (true, false) => DeviceRecorder::Off,
            (true, true) => DeviceRecorder::On,
        }
    }

    fn push_range(&self, name: fmt::Arguments<'_>) {
        self.profiler.push(name);
    }

    fn pop_range(&self) {
        self.profiler.pop();
    }
}
