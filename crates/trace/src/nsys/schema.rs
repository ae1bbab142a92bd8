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

fn name_of<T: PartialEq>(table: &[(T, &'static str)], value: T) -> &'static str {
    table.iter().find(|(v, _)| *v == value).map_or("", |(_, name)| name)
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

pub(super) fn op_kind_name(kind: OpKind) -> &'static str {
    name_of(&OP_KINDS, kind)
}

pub(super) fn call_kind_name(kind: CallKind) -> &'static str {
    name_of(&CALL_KINDS, kind)
}

pub(super) fn range_source_name(source: RangeSource) -> &'static str {
    name_of(&RANGE_SOURCES, source)
}

/// Nsight Systems' tables (schema 3.20.3; the overhead table appeared in 3.24.0), with its columns in its order. As there,
/// a table is only made when it has rows.
pub(super) const NSYS_TABLES: [(&str, &str); 27] = [
    ("StringIds", "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL"),
    ("TARGET_INFO_SESSION_START_TIME", "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT"),
    (
        "ANALYSIS_DETAILS",
        "globalVid INTEGER NOT NULL, duration INTEGER NOT NULL, startTime INTEGER NOT NULL, stopTime INTEGER
         NOT NULL",
    ),
    ("PROCESSES", "globalPid INTEGER, pid INTEGER, name TEXT"),
    ("ThreadNames", "nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER"),
    ("META_DATA_CAPTURE", "name TEXT NOT NULL, value TEXT"),
    ("META_DATA_EXPORT", "name TEXT NOT NULL, value TEXT"),
    (
        "TARGET_INFO_GPU",
        "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, isDiscrete INTEGER,
         l2CacheSize INTEGER, totalMemory INTEGER, memoryBandwidth INTEGER, clockRate INTEGER, smCount
         INTEGER, pwGpuId INTEGER, uuid TEXT, luid INTEGER, chipName TEXT, cuDevice INTEGER, ctxswDevPath
         TEXT, ctrlDevPath TEXT, revision INTEGER, nodeMask INTEGER, constantMemory INTEGER, maxIPC INTEGER,
         maxRegistersPerBlock INTEGER, maxShmemPerBlock INTEGER, maxShmemPerBlockOptin INTEGER, maxShmemPerSm
         INTEGER, maxRegistersPerSm INTEGER, threadsPerWarp INTEGER, asyncEngines INTEGER, maxWarpsPerSm
         INTEGER, maxBlocksPerSm INTEGER, maxThreadsPerBlock INTEGER, maxBlockDimX INTEGER, maxBlockDimY
         INTEGER, maxBlockDimZ INTEGER, maxGridDimX INTEGER, maxGridDimY INTEGER, maxGridDimZ INTEGER,
         computeMajor INTEGER, computeMinor INTEGER, smMajor INTEGER, smMinor INTEGER",
    ),
    ("TARGET_INFO_CUDA_DEVICE", "gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL"),
    (
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
         greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
         demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER,
         cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT
         NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT
         NULL, staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL,
         localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL,
         sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER",
    ),
    (
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
         greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes
         INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER, dstKind
         INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER,
         migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER, copyCount INTEGER",
    ),
    (
        "CUPTI_ACTIVITY_KIND_MEMSET",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
         greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value
         INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER, memKind INTEGER",
    ),
    (
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
         greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphId
         INTEGER NOT NULL, graphExecId INTEGER NOT NULL",
    ),
    (
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
         correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER",
    ),
    (
        "OSRT_API",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, nameId
         INTEGER NOT NULL, returnValue INTEGER NOT NULL, nestingLevel INTEGER, callchainId INTEGER NOT NULL",
    ),
    (
        "PROFILER_OVERHEAD",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER, nameId INTEGER NOT NULL,
         returnValue INTEGER NOT NULL",
    ),
    (
        "CUPTI_ACTIVITY_KIND_OVERHEAD",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
         correlationId INTEGER, nameId INTEGER, overheadType INTEGER NOT NULL",
    ),
    (
        "NVTX_EVENTS",
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,
         color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER,
         uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER,
         floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT",
    ),
    (
        "GPU_METRICS",
        "rawTimestamp INTEGER NOT NULL, timestamp INTEGER NOT NULL, typeId INTEGER NOT NULL, metricId INTEGER
         NOT NULL, value INTEGER NOT NULL",
    ),
    (
        "TARGET_INFO_GPU_METRICS",
        "typeId INTEGER NOT NULL, sourceId INTEGER NOT NULL, typeName TEXT NOT NULL, metricId INTEGER NOT
         NULL, metricName TEXT NOT NULL",
    ),
    (
        "CUDA_UM_CPU_PAGE_FAULT_EVENTS",
        "start INTEGER NOT NULL, globalPid INTEGER NOT NULL, address INTEGER NOT NULL, originalFaultPc INTEGER,
         CpuInstruction INTEGER NOT NULL, module INTEGER NOT NULL, unresolvedFaultPc INTEGER",
    ),
    (
        "CUDA_UM_GPU_PAGE_FAULT_EVENTS",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, globalPid INTEGER NOT NULL, deviceId INTEGER NOT NULL,
         address INTEGER NOT NULL, numberOfPageFaults INTEGER NOT NULL, faultAccessType INTEGER NOT NULL",
    ),
    (
        "SCHED_EVENTS",
        "start INTEGER NOT NULL, cpu INTEGER NOT NULL, isSchedIn INTEGER NOT NULL, globalTid INTEGER, threadState
         INTEGER, threadBlock INTEGER",
    ),
    (
        "COMPOSITE_EVENTS",
        "id INTEGER NOT NULL PRIMARY KEY, start INTEGER NOT NULL, cpu INTEGER, threadState INTEGER, globalTid INTEGER,
         cpuCycles INTEGER NOT NULL",
    ),
    (
        "SAMPLING_CALLCHAINS",
        "id INTEGER NOT NULL, symbol INTEGER NOT NULL, module INTEGER NOT NULL, kernelMode INTEGER, thumbCode INTEGER,
         unresolved INTEGER, specialEntry INTEGER, originalIP INTEGER, unwindMethod INTEGER, stackDepth INTEGER NOT
         NULL, PRIMARY KEY (id, stackDepth)",
    ),
    (
        "CUDA_GPU_MEMORY_USAGE_EVENTS",
        "start INTEGER NOT NULL, globalPid INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT
         NULL, address INTEGER NOT NULL, pc INTEGER NOT NULL, bytes INTEGER NOT NULL, memKind INTEGER NOT
         NULL, memoryOperationType INTEGER NOT NULL, name TEXT, correlationId INTEGER, streamId INTEGER,
         localMemoryPoolAddress INTEGER, localMemoryPoolReleaseThreshold INTEGER, localMemoryPoolSize
         INTEGER, localMemoryPoolUtilizedSize INTEGER, importedMemoryPoolAddress INTEGER,
         importedMemoryPoolProcessId INTEGER",
    ),
    (
        "CUDA_GRAPH_NODE_EVENTS",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, nameId
         INTEGER NOT NULL, graphNodeId INTEGER NOT NULL, originalGraphNodeId INTEGER",
    ),
];

/// Number, name and label.
pub(super) type EnumRow = (i64, &'static str, &'static str);

/// Nsight Systems' tables of names, which its reports join: those rows that a written file can refer to.
pub(super) const ENUM_TABLES: [(&str, &[EnumRow]); 6] = [
    (
        "ENUM_NSYS_EVENT_TYPE",
        &[
            (33, "NvtxCategory", "NvtxCategory"),
            (34, "NvtxMark", "NvtxMark"),
            (39, "NvtxThread", "NvtxThread"),
            (59, "NvtxPushPopRange", "NvtxPushPopRange"),
            (60, "NvtxStartEndRange", "NvtxStartEndRange"),
            (70, "NvtxtPushPopRange", "NvtxtPushPopRange"),
            (71, "NvtxtStartEndRange", "NvtxtStartEndRange"),
            (75, "NvtxDomainCreate", "NvtxDomainCreate"),
            (76, "NvtxDomainDestroy", "NvtxDomainDestroy"),
        ],
    ),
    (
        "ENUM_NSYS_EVENT_CLASS",
        &[
            (0, "TRACE_PROCESS_EVENT_CUDA_RUNTIME", "CUDA runtime"),
            (1, "TRACE_PROCESS_EVENT_CUDA_DRIVER", "CUDA driver"),
            (27, "TRACE_PROCESS_EVENT_OS_RUNTIME", "OSRT runtime"),
            (77, "TRACE_PROCESS_EVENT_CUDA_GRAPH_NODE_CREATION", "CUDA graph node creation"),
        ],
    ),
    (
        "ENUM_CUDA_MEMCPY_OPER",
        &[
            (0, "CUDA_MEMCPY_KIND_UNKNOWN", "Unknown"),
            (1, "CUDA_MEMCPY_KIND_HTOD", "Host-to-Device"),
            (2, "CUDA_MEMCPY_KIND_DTOH", "Device-to-Host"),
            (3, "CUDA_MEMCPY_KIND_HTOA", "Host-to-Array"),
            (4, "CUDA_MEMCPY_KIND_ATOH", "Array-to-Host"),
            (5, "CUDA_MEMCPY_KIND_ATOA", "Array-to-Array"),
            (6, "CUDA_MEMCPY_KIND_ATOD", "Array-to-Device"),
            (7, "CUDA_MEMCPY_KIND_DTOA", "Device-to-Array"),
            (8, "CUDA_MEMCPY_KIND_DTOD", "Device-to-Device"),
            (9, "CUDA_MEMCPY_KIND_HTOH", "Host-to-Host"),
            (10, "CUDA_MEMCPY_KIND_PTOP", "Peer-to-Peer"),
            (11, "CUDA_MEMCPY_KIND_UVM_HTOD", "Unified Host-to-Device"),
            (12, "CUDA_MEMCPY_KIND_UVM_DTOH", "Unified Device-to-Host"),
            (13, "CUDA_MEMCPY_KIND_UVM_DTOD", "Unified Device-to-Device"),
        ],
    ),
    (
        "ENUM_CUDA_MEM_KIND",
        &[
            (0, "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE", "Pageable"),
            (1, "CUDA_MEMOPR_MEMORY_KIND_PINNED", "Pinned"),
            (2, "CUDA_MEMOPR_MEMORY_KIND_DEVICE", "Device"),
            (3, "CUDA_MEMOPR_MEMORY_KIND_ARRAY", "Array"),
            (4, "CUDA_MEMOPR_MEMORY_KIND_MANAGED", "Managed"),
            (5, "CUDA_MEMOPR_MEMORY_KIND_DEVICE_STATIC", "Device Static"),
            (6, "CUDA_MEMOPR_MEMORY_KIND_MANAGED_STATIC", "Managed Static"),
            (7, "CUDA_MEMOPR_MEMORY_KIND_UNKNOWN", "Unknown"),
        ],
    ),
    (
        "ENUM_CUDA_DEV_MEM_EVENT_OPER",
        &[
            (0, "CUDA_DEV_MEM_EVENT_OPR_ALLOCATION", "Allocation"),
            (1, "CUDA_DEV_MEM_EVENT_OPR_DEALLOCATION", "Deallocation"),
        ],
    ),
    (
        "ENUM_CUDA_KERNEL_LAUNCH_TYPE",
        &[
            (0, "CUDA_KERNEL_LAUNCH_TYPE_UNKNOWN", "Unknown"),
            (1, "CUDA_KERNEL_LAUNCH_TYPE_REGULAR", "Regular"),
            (2, "CUDA_KERNEL_LAUNCH_TYPE_COOPERATIVE_SINGLE_DEVICE", "Coop Single Device"),
            (3, "CUDA_KERNEL_LAUNCH_TYPE_COOPERATIVE_MULTI_DEVICE", "Coop Multi Device"),
        ],
    ),
];

/// strobe's tables, of which reader and writer take all columns in this order. `eventId` is a row number (`rowid`) of the table
/// that the event stands in.
pub(super) const STROBE_TABLES: [(&str, &str); 15] = [
    ("STROBE_META", "name TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL"),
    // Ops of a CPU engine; their events are rows of NVTX_EVENTS. Without nameId nothing is known of what the op means.
    (
        "STROBE_OP",
        "eventId INTEGER NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER NOT NULL,
         kernelId INTEGER NOT NULL, deviceId INTEGER NOT NULL, iter INTEGER, nameId INTEGER, categoryId INTEGER,
         layer INTEGER, m INTEGER, n INTEGER, k INTEGER, bytes INTEGER, flops INTEGER",
    ),
    // What nsys' tables cannot say of an op on a GPU.
    (
        "STROBE_GPU_OP",
        "kind TEXT NOT NULL, eventId INTEGER NOT NULL, nameId INTEGER, detail INTEGER, iter INTEGER, opId INTEGER,
         categoryId INTEGER, layer INTEGER, m INTEGER, n INTEGER, k INTEGER, bytes INTEGER, flops INTEGER",
    ),
    (
        "STROBE_RANGE",
        "eventId INTEGER NOT NULL, kind TEXT NOT NULL, iter INTEGER, source TEXT, flags INTEGER, end INTEGER,
         dimsId INTEGER, typesId INTEGER, valuesId INTEGER, stridesId INTEGER",
    ),
    (
        "STROBE_CALL",
        "kind TEXT NOT NULL, eventId INTEGER NOT NULL, correlationId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    ),
    (
        "STROBE_ALLOCATION",
        "eventId INTEGER NOT NULL, deviceId INTEGER, memKind INTEGER, totalAllocated INTEGER, totalReserved INTEGER",
    ),
    ("STROBE_FLOW", "start INTEGER NOT NULL, end INTEGER NOT NULL, fromTid INTEGER NOT NULL, toTid INTEGER NOT NULL"),
    ("STROBE_COUNTER", "typeId INTEGER NOT NULL, metricId INTEGER NOT NULL, deviceId INTEGER"),
    (
        "STROBE_ITERATION",
        "iter INTEGER NOT NULL, kind TEXT NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL,
         contextRequests INTEGER NOT NULL, generationRequests INTEGER NOT NULL, contextTokens INTEGER NOT NULL,
         generationTokens INTEGER NOT NULL, window INTEGER NOT NULL, cpuWait INTEGER",
    ),
    (
        "STROBE_EXPERT_LOAD",
        "iter INTEGER NOT NULL, layer INTEGER NOT NULL, expert INTEGER NOT NULL, tokens INTEGER NOT NULL",
    ),
    (
        "STROBE_WINDOW",
        "windowIndex INTEGER NOT NULL, firstIter INTEGER NOT NULL, lastIter INTEGER NOT NULL, complete INTEGER NOT NULL",
    ),
    (
        "STROBE_DEVICE",
        "deviceId INTEGER NOT NULL, ordinal INTEGER NOT NULL, source INTEGER NOT NULL, name TEXT NOT NULL,
         isCpu INTEGER NOT NULL, memoryBytes INTEGER, bytesPerS REAL, multiprocessors INTEGER, clockHz REAL,
         computeMajor INTEGER, computeMinor INTEGER",
    ),
    (
        "STROBE_PROCESS",
        "globalPid INTEGER NOT NULL, pid INTEGER NOT NULL, name TEXT NOT NULL, rank INTEGER, source INTEGER NOT NULL",
    ),
    ("STROBE_THREAD", "globalTid INTEGER NOT NULL, tid INTEGER NOT NULL, name TEXT NOT NULL"),
    (
        "STROBE_SOURCE",
        "format TEXT NOT NULL, bytes INTEGER NOT NULL, events INTEGER NOT NULL, lost INTEGER NOT NULL, rank INTEGER",
    ),
];

/// The columns of one of strobe's tables.
pub(super) fn columns(table: &str) -> Vec<&'static str> {
    let body = STROBE_TABLES.iter().find(|(name, _)| *name == table).map_or("", |(_, body)| body);
    body.split(',').filter_map(|column| column.split_whitespace().next()).collect()
}

/// Keys of `STROBE_META`.
pub(super) mod key {
    pub(in super::super) const FORMAT_VERSION: &str = "FORMAT_VERSION";
    pub(in super::super) const PRODUCER: &str = "PRODUCER";
    pub(in super::super) const PARTIAL: &str = "PARTIAL";
    /// How many ops, calls and ranges were written, so that a loss shows.
    pub(in super::super) const OPS: &str = "OPS";
    pub(in super::super) const CALLS: &str = "CALLS";
    pub(in super::super) const RANGES: &str = "RANGES";
    pub(in super::super) const PEAK_FLOPS: &str = "PEAK_FLOPS_PER_S";
    pub(in super::super) const PEAK_INT8: &str = "PEAK_INT8_OPS_PER_S";
    pub(in super::super) const PEAK_BF16: &str = "PEAK_BF16_FLOPS_PER_S";
    pub(in super::super) const PEAK_BYTES: &str = "PEAK_BYTES_PER_S";
    pub(in super::super) const PEAK_NOTE: &str = "PEAK_NOTE";
    /// Prefix of the keys of `Meta::extra`.
    pub(in super::super) const EXTRA: &str = "EXTRA:";
    /// Prefix of the keys of `Meta::notices`.
    pub(in super::super) const NOTICE: &str = "NOTICE:";
}
