//! One event of a Chrome trace, field by field, as it stands in the buffer.

use super::json::{Cursor, Stop, unquoted};

/// What an event is, by its category.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Kernel,
    Memcpy,
    Memset,
    /// A whole graph, as strobe writes it.
    Graph,
    /// A call of CUDA, HIP or the like.
    Call,
    /// A call of the operating system, as strobe writes it.
    OsCall,
    /// What the profiler itself took.
    Overhead,
    CpuOp,
    Annotation,
    GpuAnnotation,
    Python,
    /// The device's side of a synchronisation: its call is in the trace too.
    Sync,
    /// Arrows and the profiler's own spans.
    Ignored,
    /// An iteration of an engine, as strobe writes it.
    Iteration,
    /// Anything else.
    Other,
}

impl Class {
    pub(super) fn of(category: &[u8]) -> Self {
        match category {
            b"cpu_op" | b"Operator" => Class::CpuOp,
            b"python_function" | b"Python" | b"PythonFunction" => Class::Python,
            b"kernel" | b"Kernel" | b"concurrent_kernel" | b"ConcurrentKernel" | b"mtia_ccp_events" | b"hpu_op" => {
                Class::Kernel
            }
            b"cuda_runtime" | b"cuda_driver" | b"Runtime" => Class::Call,
            b"ac2g" | b"async_cpu_to_gpu" | b"fwdbwd" | b"Trace" | b"external_correlation" => Class::Ignored,
            b"gpu_memcpy" | b"Memcpy" => Class::Memcpy,
            b"gpu_memset" | b"Memset" => Class::Memset,
            b"user_annotation" | b"UserAnnotation" => Class::Annotation,
            b"gpu_user_annotation" => Class::GpuAnnotation,
            b"overhead" | b"Overhead" => Class::Overhead,
            b"gpu_graph" => Class::Graph,
            b"os_runtime" => Class::OsCall,
            b"strobe_iteration" => Class::Iteration,
            b"cuda_sync" | b"cuda_event" => Class::Sync,
            // cuda_, hip_, xpu_, mtia_, privateuse1_, glow_: every backend of the profiler names its calls like this.
            _ if category.ends_with(b"_runtime") || category.ends_with(b"_driver") => Class::Call,
            _ => Class::Other,
        }
    }

    pub(super) fn is_gpu_op(self) -> bool {
        matches!(self, Class::Kernel | Class::Memcpy | Class::Memset | Class::Graph)
    }

    /// Whether the arguments hold anything that the model keeps.
    fn has_arguments(self) -> bool {
        !matches!(self, Class::Python | Class::Ignored | Class::Sync)
    }
}

/// The fields of an event: JSON text, strings without quotes but still escaped. Empty = not there.
#[derive(Clone, Copy, Default)]
pub(super) struct Event<'a> {
    pub(super) phase: &'a [u8],
    pub(super) category: &'a [u8],
    pub(super) name: &'a [u8],
    pub(super) pid: &'a [u8],
    pub(super) tid: &'a [u8],
    pub(super) ts: &'a [u8],
    pub(super) dur: &'a [u8],
    /// Of an arrow.
    pub(super) id: &'a [u8],
    /// All of the arguments.
    pub(super) args: &'a [u8],
    pub(super) known: Args<'a>,
}

/// The arguments that the model keeps.
#[derive(Clone, Copy, Default)]
pub(super) struct Args<'a> {
    pub(super) correlation: &'a [u8],
    pub(super) device: &'a [u8],
    pub(super) stream: &'a [u8],
    pub(super) context: &'a [u8],
    pub(super) bytes: &'a [u8],
    pub(super) grid: &'a [u8],
    pub(super) block: &'a [u8],
    pub(super) registers: &'a [u8],
    pub(super) shared: &'a [u8],
    pub(super) graph_node: &'a [u8],
    pub(super) kind: &'a [u8],
    pub(super) from_device: &'a [u8],
    pub(super) to_device: &'a [u8],
    pub(super) dims: &'a [u8],
    pub(super) types: &'a [u8],
    /// Of inputs that are no tensors.
    pub(super) values: &'a [u8],
    pub(super) strides: &'a [u8],
    /// What an event was called before strobe gave it the profiler's wording.
    pub(super) recorded_name: &'a [u8],
    /// How a range was made, as strobe writes it.
    pub(super) recorded_source: &'a [u8],
    pub(super) domain: &'a [u8],
    pub(super) phase: &'a [u8],
    pub(super) iteration: &'a [u8],
    pub(super) result: &'a [u8],
    pub(super) static_shared: &'a [u8],
    pub(super) graph: &'a [u8],
    pub(super) graph_exec: &'a [u8],
    pub(super) value: &'a [u8],
    /// What joins an operator and its backward pass.
    pub(super) sequence: &'a [u8],
    /// Of an operator of a backward pass the thread of the forward pass, as PyTorch numbers threads; else 0.
    pub(super) forward_thread: &'a [u8],
}

impl<'a> Event<'a> {
    /// Takes the object that starts at the cursor.
    pub(super) fn parse(cursor: &mut Cursor<'a>) -> Result<Self, Stop> {
        let mut event = Event::default();
        let mut arguments_read = true;
        cursor.object(|cursor, key| {
            match key {
                b"ph" => event.phase = unquoted(cursor.value()?),
                b"cat" => event.category = unquoted(cursor.value()?),
                b"name" => event.name = unquoted(cursor.value()?),
                b"pid" => event.pid = unquoted(cursor.value()?),
                b"tid" => event.tid = unquoted(cursor.value()?),
                b"ts" => event.ts = unquoted(cursor.value()?),
                b"dur" => event.dur = unquoted(cursor.value()?),
                b"id" => event.id = unquoted(cursor.value()?),
                b"args" if cursor.next()? == b'{' => {
                    let start = cursor.at;
                    let category_known = !event.category.is_empty();
                    if category_known && Class::of(event.category).has_arguments() {
                        event.known.parse(cursor)?;
                    } else {
                        cursor.value()?;
                        arguments_read = category_known;
                    }
                    event.args = &cursor.bytes[start..cursor.at];
                }
                _ => drop(cursor.value()?),
            }
            Ok(())
        })?;
        if !arguments_read {
            event.known.parse(&mut Cursor::new(event.args))?;
        }
        Ok(event)
    }
}

impl<'a> Args<'a> {
    fn parse(&mut self, cursor: &mut Cursor<'a>) -> Result<(), Stop> {
        cursor.object(|cursor, key| {
            let value = cursor.value()?;
            let field = match key {
                b"correlation" => &mut self.correlation,
                b"device" => &mut self.device,
                b"stream" => &mut self.stream,
                b"context" => &mut self.context,
                b"bytes" => &mut self.bytes,
                b"grid" => &mut self.grid,
                b"block" => &mut self.block,
                b"registers per thread" => &mut self.registers,
                b"shared memory" => &mut self.shared,
                b"graph node id" => &mut self.graph_node,
                b"kind" => &mut self.kind,
                b"fromDevice" => &mut self.from_device,
                b"toDevice" => &mut self.to_device,
                b"Input Dims" | b"Input dims" => &mut self.dims,
                b"Input type" | b"Input Type" => &mut self.types,
                b"Concrete Inputs" => &mut self.values,
                b"Input Strides" => &mut self.strides,
                b"recorded name" => &mut self.recorded_name,
                b"recorded source" => &mut self.recorded_source,
                b"domain" => &mut self.domain,
                b"phase" => &mut self.phase,
                b"iter" => &mut self.iteration,
                b"result" => &mut self.result,
                b"static shared memory" => &mut self.static_shared,
                b"graph id" => &mut self.graph,
                b"graph exec id" => &mut self.graph_exec,
                b"value" => &mut self.value,
                b"Sequence number" => &mut self.sequence,
                b"Fwd thread id" => &mut self.forward_thread,
                _ => return Ok(()),
            };
            *field = unquoted(value);
            Ok(())
        })
    }
}
