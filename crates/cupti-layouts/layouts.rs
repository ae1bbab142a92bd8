//! The recorder's view of CUPTI (`kernels-cuda/src/cupti/abi.rs`) against bindings made from NVIDIA's headers: the same numbers,
//! and every field at the same place with the same size.
#![cfg(test)]

#[allow(dead_code)]
#[path = "../kernels-cuda/src/cupti/abi.rs"]
mod abi;

use std::mem::{offset_of, size_of};

use abi::{Api, ExternalCorrelation, Kernel, Memcpy, Memset, Overhead, kind, overhead};
use cudarc::cupti::sys;

/// Size of the field that `get` reads; never called.
fn size_of_field<S, F>(_: fn(&S) -> F) -> usize {
    size_of::<F>()
}

/// Every field of ours that is named stands where the fields of the bindings stand that it is made of, and is as long as they
/// are together. All fields of ours must be named, and ours must not be longer than the record.
macro_rules! same {
    ($ours:ident is $theirs:ident { $($field:ident: $first:ident $(.. $rest:ident)*),* $(,)? }) => {{
        // Does not compile where a field of ours is left out.
        let _ = |record: $ours| { let $ours { $($field: _),* } = record; };
        let name = concat!(stringify!($ours), " and ", stringify!($theirs), ": ");
        let mut ours = Vec::new();
        let mut theirs = Vec::new();
        $({
            ours.push((stringify!($field), offset_of!($ours, $field), size_of_field(|record: &$ours| record.$field)));
            let bytes = size_of_field(|record: &sys::$theirs| record.$first)
                $(+ size_of_field(|record: &sys::$theirs| record.$rest))*;
            theirs.push((stringify!($field), offset_of!(sys::$theirs, $first), bytes));
        })*
        assert_eq!(ours, theirs, "{name}");
        assert!(size_of::<$ours>() <= size_of::<sys::$theirs>(), "{name} ours is longer");
    }};
}

macro_rules! kernel {
    ($($theirs:ident),*) => {$(
        same!(Kernel is $theirs {
            kind: kind,
            cache_config: cacheConfig,
            shared_memory_config: sharedMemoryConfig,
            registers: registersPerThread,
            partitioned_cache: partitionedGlobalCacheRequested .. partitionedGlobalCacheExecuted,
            start: start,
            end: end,
            completed: completed,
            device: deviceId,
            context: contextId,
            stream: streamId,
            grid: gridX .. gridY .. gridZ,
            block: blockX .. blockY .. blockZ,
            static_shared: staticSharedMemory,
            dynamic_shared: dynamicSharedMemory,
            local_per_thread: localMemoryPerThread,
            local_total: localMemoryTotal,
            correlation: correlationId,
            grid_id: gridId,
            name: name,
            reserved: reserved0,
            queued: queued,
            submitted: submitted,
            launch_type:
                launchType .. isSharedMemoryCarveoutRequested .. sharedMemoryCarveoutRequested .. padding,
            shared_executed: sharedMemoryExecuted,
            graph_node: graphNodeId,
            shared_limit: shmemLimitConfig,
            graph: graphId,
        });
    )*};
}

macro_rules! memcpy {
    ($($theirs:ident),*) => {$(
        same!(Memcpy is $theirs {
            kind: kind,
            copy_kind: copyKind,
            src_kind: srcKind,
            dst_kind: dstKind,
            flags: flags,
            bytes: bytes,
            start: start,
            end: end,
            device: deviceId,
            context: contextId,
            stream: streamId,
            correlation: correlationId,
            runtime_correlation: runtimeCorrelationId,
            pad: pad,
            reserved: reserved0,
            graph_node: graphNodeId,
            graph: graphId,
        });
    )*};
}

macro_rules! memset {
    ($($theirs:ident),*) => {$(
        same!(Memset is $theirs {
            kind: kind,
            value: value,
            bytes: bytes,
            start: start,
            end: end,
            device: deviceId,
            context: contextId,
            stream: streamId,
            correlation: correlationId,
            flags: flags,
            memory_kind: memoryKind,
            pad: pad,
            reserved: reserved0,
            graph_node: graphNodeId,
            graph: graphId,
        });
    )*};
}

macro_rules! overhead {
    ($($theirs:ident),*) => {$(
        same!(Overhead is $theirs {
            kind: kind,
            overhead_kind: overheadKind,
            object_kind: objectKind,
            object: objectId,
            start: start,
            end: end,
        });
    )*};
}

#[test]
fn records_of_the_oldest_version_and_of_this_one_have_our_fields() {
    kernel!(CUpti_ActivityKernel9);
    memcpy!(CUpti_ActivityMemcpy5);
    memset!(CUpti_ActivityMemset4);
    overhead!(CUpti_ActivityOverhead2, CUpti_ActivityOverhead3);
    #[cfg(feature = "newest")]
    {
        kernel!(CUpti_ActivityKernel10, CUpti_ActivityKernel11, CUpti_ActivityKernel12, CUpti_ActivityKernel13);
        memcpy!(CUpti_ActivityMemcpy6, CUpti_ActivityMemcpy7);
        memset!(CUpti_ActivityMemset5);
    }
    same!(Api is CUpti_ActivityAPI {
        kind: kind,
        function: cbid,
        start: start,
        end: end,
        process: processId,
        thread: threadId,
        correlation: correlationId,
        result: returnValue,
    });
    same!(ExternalCorrelation is CUpti_ActivityExternalCorrelation {
        kind: kind,
        external_kind: externalKind,
        external: externalId,
        correlation: correlationId,
    });
    let thread = offset_of!(sys::CUpti_ActivityObjectKindId__bindgen_ty_1, threadId);
    assert_eq!(thread, size_of::<u32>(), "the second word of an object is its thread");
}

#[test]
fn numbers_are_those_of_the_headers() {
    use sys::CUpti_ActivityKind as K;
    use sys::CUpti_ActivityOverheadKind as O;
    let kinds = [
        (kind::MEMCPY, K::CUPTI_ACTIVITY_KIND_MEMCPY),
        (kind::MEMSET, K::CUPTI_ACTIVITY_KIND_MEMSET),
        (kind::DRIVER, K::CUPTI_ACTIVITY_KIND_DRIVER),
        (kind::RUNTIME, K::CUPTI_ACTIVITY_KIND_RUNTIME),
        (kind::CONCURRENT_KERNEL, K::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL),
        (kind::OVERHEAD, K::CUPTI_ACTIVITY_KIND_OVERHEAD),
        (kind::EXTERNAL_CORRELATION, K::CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION),
    ];
    assert_eq!(kinds.map(|(ours, _)| ours), kinds.map(|(_, theirs)| theirs as u32));
    assert_eq!(kinds.len(), kind::ALL.len());
    let overheads = [
        (overhead::BUFFER_FLUSH, O::CUPTI_ACTIVITY_OVERHEAD_CUPTI_BUFFER_FLUSH),
        (overhead::INSTRUMENTATION, O::CUPTI_ACTIVITY_OVERHEAD_CUPTI_INSTRUMENTATION),
        (overhead::RESOURCE, O::CUPTI_ACTIVITY_OVERHEAD_CUPTI_RESOURCE),
        (overhead::MODULE_LOADING, O::CUPTI_ACTIVITY_OVERHEAD_RUNTIME_TRIGGERED_MODULE_LOADING),
        (overhead::FUNCTION_LOADING, O::CUPTI_ACTIVITY_OVERHEAD_LAZY_FUNCTION_LOADING),
        (overhead::COMMAND_BUFFER_FULL, O::CUPTI_ACTIVITY_OVERHEAD_COMMAND_BUFFER_FULL),
    ];
    assert_eq!(overheads.map(|(ours, _)| ours), overheads.map(|(_, theirs)| theirs as u32));
    #[cfg(feature = "newest")]
    assert_eq!(overhead::BUFFER_REQUEST, O::CUPTI_ACTIVITY_OVERHEAD_ACTIVITY_BUFFER_REQUEST as u32);
    assert_eq!(abi::OBJECT_THREAD, sys::CUpti_ActivityObjectKind::CUPTI_ACTIVITY_OBJECT_THREAD as u32);
    let others = [
        (abi::SUCCESS, sys::CUptiResult::CUPTI_SUCCESS as i32),
        (abi::MULTIPLE_SUBSCRIBERS, sys::CUptiResult::CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED as i32),
        (abi::DOMAIN_DRIVER, sys::CUpti_CallbackDomain::CUPTI_CB_DOMAIN_DRIVER_API as i32),
        (abi::DOMAIN_RUNTIME, sys::CUpti_CallbackDomain::CUPTI_CB_DOMAIN_RUNTIME_API as i32),
        (abi::EXTERNAL_KIND_OWN, sys::CUpti_ExternalCorrelationKind::CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0 as i32),
        (abi::THREAD_ID_OF_SYSTEM, sys::CUpti_ActivityThreadIdType::CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM as i32),
        (
            abi::ATTRIBUTE_BUFFERS_ARE_ZERO,
            sys::CUpti_ActivityAttribute::CUPTI_ACTIVITY_ATTR_ZEROED_OUT_ACTIVITY_BUFFER as i32,
        ),
    ];
    assert_eq!(others.map(|(ours, _)| ours), others.map(|(_, theirs)| theirs));
    #[cfg(feature = "oldest")]
    assert_eq!(abi::OLDEST, sys::CUPTI_API_VERSION);
}
