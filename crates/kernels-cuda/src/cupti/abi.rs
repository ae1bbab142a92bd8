//! What CUPTI's headers define, as far as it is used: numbers, and records of activities. Nothing else may stand here:
//! `crates/cupti-layouts` compiles this file beside bindings made from NVIDIA's headers and compares the two.
//!
//! Each struct is the part that all versions since CUDA 12.4 share: later ones only append. The sizes of whole records
//! differ, so records are stepped through by CUPTI and never by size.

use std::ffi::{c_char, c_int};

/// The version of the interface that came with CUDA 12.4.
pub(super) const OLDEST: u32 = 22;

pub(super) const SUCCESS: c_int = 0;
pub(super) const MULTIPLE_SUBSCRIBERS: c_int = 39;

pub(super) const DOMAIN_DRIVER: c_int = 1;
pub(super) const DOMAIN_RUNTIME: c_int = 2;
pub(super) const EXTERNAL_KIND_OWN: c_int = 3;
pub(super) const THREAD_ID_OF_SYSTEM: c_int = 1;
pub(super) const ATTRIBUTE_BUFFERS_ARE_ZERO: c_int = 5;

/// `CUPTI_ACTIVITY_KIND_*` of the records that are asked for.
pub(super) mod kind {
    pub(crate) const MEMCPY: u32 = 1;
    pub(crate) const MEMSET: u32 = 2;
    pub(crate) const DRIVER: u32 = 4;
    pub(crate) const RUNTIME: u32 = 5;
    pub(crate) const CONCURRENT_KERNEL: u32 = 10;
    pub(crate) const OVERHEAD: u32 = 17;
    pub(crate) const EXTERNAL_CORRELATION: u32 = 39;

    /// All of them.
    pub(crate) const ALL: [u32; 7] =
        [MEMCPY, MEMSET, DRIVER, RUNTIME, CONCURRENT_KERNEL, OVERHEAD, EXTERNAL_CORRELATION];
}

/// `CUpti_ActivityKernel9` and later.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub kind: u32,
    pub cache_config: u8,
    pub shared_memory_config: u8,
    pub registers: u16,
    pub partitioned_cache: [u32; 2],
    pub start: u64,
    pub end: u64,
    pub completed: u64,
    pub device: u32,
    pub context: u32,
    pub stream: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub static_shared: u32,
    pub dynamic_shared: u32,
    pub local_per_thread: u32,
    pub local_total: u32,
    pub correlation: u32,
    pub grid_id: i64,
    pub name: *const c_char,
    pub reserved: u64,
    pub queued: u64,
    pub submitted: u64,
    pub launch_type: [u8; 4],
    pub shared_executed: u32,
    pub graph_node: u64,
    pub shared_limit: u32,
    pub graph: u32,
}

/// `CUpti_ActivityMemcpy5` and later.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Memcpy {
    pub kind: u32,
    pub copy_kind: u8,
    pub src_kind: u8,
    pub dst_kind: u8,
    pub flags: u8,
    pub bytes: u64,
    pub start: u64,
    pub end: u64,
    pub device: u32,
    pub context: u32,
    pub stream: u32,
    pub correlation: u32,
    pub runtime_correlation: u32,
    pub pad: u32,
    pub reserved: u64,
    pub graph_node: u64,
    pub graph: u32,
}

/// `CUpti_ActivityMemset4` and later.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Memset {
    pub kind: u32,
    pub value: u32,
    pub bytes: u64,
    pub start: u64,
    pub end: u64,
    pub device: u32,
    pub context: u32,
    pub stream: u32,
    pub correlation: u32,
    pub flags: u16,
    pub memory_kind: u16,
    pub pad: u32,
    pub reserved: u64,
    pub graph_node: u64,
    pub graph: u32,
}

/// `CUpti_ActivityAPI`: a call of the driver or the runtime.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Api {
    pub kind: u32,
    pub function: u32,
    pub start: u64,
    pub end: u64,
    pub process: u32,
    pub thread: u32,
    pub correlation: u32,
    pub result: u32,
}

/// `CUpti_ActivityExternalCorrelation`: what was set when a call was made.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ExternalCorrelation {
    pub kind: u32,
    pub external_kind: u32,
    pub external: u64,
    pub correlation: u32,
}

/// `CUpti_ActivityOverhead2` and later; `object` is a process and a thread when `object_kind` says so.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Overhead {
    pub kind: u32,
    pub overhead_kind: u32,
    pub object_kind: u32,
    pub object: [u32; 3],
    pub start: u64,
    pub end: u64,
}

pub(super) const OBJECT_THREAD: u32 = 2;

/// `CUPTI_ACTIVITY_OVERHEAD_*`, as far as they are told apart.
pub(super) mod overhead {
    pub(crate) const BUFFER_FLUSH: u32 = 1 << 16;
    pub(crate) const INSTRUMENTATION: u32 = 2 << 16;
    pub(crate) const RESOURCE: u32 = 3 << 16;
    pub(crate) const MODULE_LOADING: u32 = 4 << 16;
    pub(crate) const FUNCTION_LOADING: u32 = 5 << 16;
    pub(crate) const COMMAND_BUFFER_FULL: u32 = 6 << 16;
    pub(crate) const BUFFER_REQUEST: u32 = 7 << 16;
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// Offsets printed by `offsetof` over the headers of CUDA 12.4, 12.9, 13.0, 13.1, 13.3 and 13.4: all the same.
    #[test]
    fn fields_stand_where_every_header_puts_them() {
        let kernel = [
            offset_of!(Kernel, registers),
            offset_of!(Kernel, start),
            offset_of!(Kernel, end),
            offset_of!(Kernel, device),
            offset_of!(Kernel, context),
            offset_of!(Kernel, stream),
            offset_of!(Kernel, grid),
            offset_of!(Kernel, block),
            offset_of!(Kernel, static_shared),
            offset_of!(Kernel, dynamic_shared),
            offset_of!(Kernel, correlation),
            offset_of!(Kernel, name),
            offset_of!(Kernel, graph_node),
            offset_of!(Kernel, graph),
        ];
        assert_eq!(kernel, [6, 16, 24, 40, 44, 48, 52, 64, 76, 80, 92, 104, 144, 156]);
        let memcpy = [
            offset_of!(Memcpy, copy_kind),
            offset_of!(Memcpy, dst_kind),
            offset_of!(Memcpy, bytes),
            offset_of!(Memcpy, start),
            offset_of!(Memcpy, end),
            offset_of!(Memcpy, device),
            offset_of!(Memcpy, stream),
            offset_of!(Memcpy, correlation),
            offset_of!(Memcpy, graph_node),
            offset_of!(Memcpy, graph),
        ];
        assert_eq!(memcpy, [4, 6, 8, 16, 24, 32, 40, 44, 64, 72]);
        let memset = [
            offset_of!(Memset, value),
            offset_of!(Memset, bytes),
            offset_of!(Memset, start),
            offset_of!(Memset, end),
            offset_of!(Memset, device),
            offset_of!(Memset, stream),
            offset_of!(Memset, correlation),
            offset_of!(Memset, memory_kind),
            offset_of!(Memset, graph_node),
            offset_of!(Memset, graph),
        ];
        assert_eq!(memset, [4, 8, 16, 24, 32, 40, 44, 50, 64, 72]);
        let api = [
            offset_of!(Api, function),
            offset_of!(Api, start),
            offset_of!(Api, end),
            offset_of!(Api, thread),
            offset_of!(Api, correlation),
            offset_of!(Api, result),
        ];
        assert_eq!(api, [4, 8, 16, 28, 32, 36]);
        let external = [offset_of!(ExternalCorrelation, external), offset_of!(ExternalCorrelation, correlation)];
        assert_eq!(external, [8, 16]);
        let overhead = [offset_of!(Overhead, object), offset_of!(Overhead, start), offset_of!(Overhead, end)];
        assert_eq!(overhead, [12, 24, 32]);
    }
}
