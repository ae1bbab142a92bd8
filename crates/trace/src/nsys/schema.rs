//! The tables of a written file, and names of the numbers in them.

use crate::{CallKind, OpKind, RangeSource};

/// The version of the `STROBE_*` tables that is written. Version 1 (CPU engine only) is read too.
pub(super) const FORMAT_VERSION: &str = "2";

/// How Nsight Systems words the kinds of copies, by CUPTI's number.
pub(super) const COPY_LABELS: [&str; 14] = [
    "Unknown",
    "Host-to-Device",
    "Device-to-Host",
    "Host-to-Array",
    "Array-to-Host",
    "Array-to-Array",
    "Array-to-Device",
    "Device-to-Array",
    "Device-to-Device",
    "Host-to-Host",
    "Peer-to-Peer",
    "Unified Host-to-Device",
    "Unified Device-to-Host",
    "Unified Device-to-Device",
];

/// `STROBE_GPU_OP.detail`: the op has no detail, though its row in nsys' table looks as if it had.
pub(super) const NO_DETAIL: i64 = 1;

/// `STROBE_GPU_OP.detail`: the kernel has no short name.
pub(super) const NO_SHORT_NAME: i64 = 2;

/// Names of kinds in `STROBE_*` tables.
const OP_KINDS: [(OpKind, &str); 5] = [
    (OpKind::Kernel, "kernel"),
    (OpKind::Memcpy, "memcpy"),
    (OpKind::Memset, "memset"),
    (OpKind::Graph, "graph"),
    (OpKind::CpuOp, "cpu_op"),
];

const CALL_KINDS: [(CallKind, &str); 3] =
    [(CallKind::Gpu, "gpu"), (CallKind::OsRuntime, "os_runtime"), (CallKind::Profiler, "profiler")];

const RANGE_SOURCES: [(RangeSource, &str); 7] = [
    (RangeSource::PushPop, "push_pop"),
    (RangeSource::StartEnd, "start_end"),
    (RangeSource::Annotation, "annotation"),
    (RangeSource::GpuAnnotation, "gpu_annotation"),
    (RangeSource::CpuOp, "cpu_op"),
    (RangeSource::Python, "python"),
    (RangeSource::Other, "other"),
];

fn named<T: Copy>(table: &[(T, &str)], name: &str) -> Option<T> {
    table.iter().find(|(_, n)| *n == name).map(|(value, _)| *value)
}

pub(super) fn op_kind(name: &str) -> Option<OpKind> {
    named(&OP_KINDS, name)
}

pub(super) fn call_kind(name: &str) -> Option<CallKind> {
    named(&CALL_KINDS, name)
}

pub(super) fn range_source(name: &str) -> Option<RangeSource> {
    named(&RANGE_SOURCES, name)
}

/// Keys of `STROBE_META`.
pub(super) mod key {
    pub(in super::super) const FORMAT_VERSION: &str = "FORMAT_VERSION";
    pub(in super::super) const PRODUCER: &str = "PRODUCER";
    pub(in super::super) const PARTIAL: &str = "PARTIAL";
    pub(in super::super) const PEAK_FLOPS: &str = "PEAK_FLOPS_PER_S";
    pub(in super::super) const PEAK_BYTES: &str = "PEAK_BYTES_PER_S";
    pub(in super::super) const PEAK_NOTE: &str = "PEAK_NOTE";
    /// Prefix of the keys of `Meta::extra`.
    pub(in super::super) const EXTRA: &str = "EXTRA:";
    /// Prefix of the keys of `Meta::notices`.
    pub(in super::super) const NOTICE: &str = "NOTICE:";
}
