//! The driver's functions, each found in the library that strobe opened when it is first called. One that an old driver lacks
//! answers that a newer one is needed.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::library::{self, Lib};

/// What the driver's functions return. A newer driver may return numbers that no header has yet, so it is no enumeration here.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) u32);

impl PartialEq<sys::CUresult> for Status {
    fn eq(&self, other: &sys::CUresult) -> bool {
        self.0 == *other as u32
    }
}

const MISSING: Status = Status(sys::CUresult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER as u32);

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {$(
        /// # Safety
        /// As NVIDIA documents it.
        #[allow(non_snake_case)]
        pub(crate) unsafe fn $name($($argument: $type),*) -> Status {
            type Function = unsafe extern "C" fn($($type),*) -> Status;
            static FUNCTION: OnceLock<Option<Function>> = OnceLock::new();
            let function = FUNCTION.get_or_init(|| {
                // SAFETY: the type is that of NVIDIA's headers.
                unsafe { library::open(Lib::Driver).ok()?.symbol(stringify!($name)) }
            });
            match function {
                // SAFETY: the caller's promise.
                Some(function) => unsafe { function($($argument),*) },
                None => MISSING,
            }
        }
    )*};
}

functions! {
    fn cuCtxSetCurrent(context: sys::CUcontext);
    fn cuCtxSynchronize();
    fn cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice);
    fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: sys::CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: sys::CUevent);
    fn cuEventQuery(event: sys::CUevent);
    fn cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    fn cuEventSynchronize(event: sys::CUevent);
    fn cuFuncSetAttribute(function: sys::CUfunction, attribute: sys::CUfunction_attribute, value: c_int);
    fn cuGetErrorName(error: Status, text: *mut *const c_char);
    fn cuGetErrorString(error: Status, text: *mut *const c_char);
    fn cuGraphDestroy(graph: sys::CUgraph);
    fn cuGraphExecDestroy(exec: sys::CUgraphExec);
    fn cuGraphGetNodes(graph: sys::CUgraph, nodes: *mut sys::CUgraphNode, num_nodes: *mut usize);
    fn cuGraphInstantiateWithFlags(exec: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong);
    fn cuGraphLaunch(exec: sys::CUgraphExec, stream: sys::CUstream);
    fn cuGraphUpload(exec: sys::CUgraphExec, stream: sys::CUstream);
    fn cuInit(flags: c_uint);
    fn cuLaunchKernelEx(
        config: *const sys::CUlaunchConfig,
        function: sys::CUfunction,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    fn cuMemAlloc_v2(address: *mut sys::CUdeviceptr, bytes: usize);
    fn cuMemFreeHost(address: *mut c_void);
    fn cuMemFree_v2(address: sys::CUdeviceptr);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemcpyDtoDAsync_v2(to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize);
    fn cuMemcpyHtoDAsync_v2(to: sys::CUdeviceptr, from: *const c_void, bytes: usize, stream: sys::CUstream);
    fn cuMemcpyHtoD_v2(to: sys::CUdeviceptr, from: *const c_void, bytes: usize);
    fn cuMemsetD8_v2(to: sys::CUdeviceptr, byte: c_uchar, n: usize);
    fn cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    fn cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
    fn cuModuleUnload(module: sys::CUmodule);
    fn cuProfilerStart();
    fn cuProfilerStop();
    fn cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode);
    fn cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
    fn cuStreamDestroy_v2(stream: sys::CUstream);
    fn cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
    fn cuStreamGetCaptureInfo_v3(
        stream: sys::CUstream,
        capture_status: *mut sys::CUstreamCaptureStatus,
        id: *mut u64,
        graph: *mut sys::CUgraph,
        dependencies: *mut *const sys::CUgraphNode,
        edge_data: *mut *const sys::CUgraphEdgeData,
        num_dependencies: *mut usize,
    );
    fn cuStreamSynchronize(stream: sys::CUstream);
    fn cuTensorMapEncodeTiled(
        tensor_map: *mut sys::CUtensorMap,
        tensor_data_type: sys::CUtensorMapDataType,
        tensor_rank: u32,
        global_address: *mut c_void,
        global_dim: *const u64,
        global_strides: *const u64,
        box_dim: *const u32,
        element_strides: *const u32,
        interleave: sys::CUtensorMapInterleave,
        swizzle: sys::CUtensorMapSwizzle,
        l2_promotion: sys::CUtensorMapL2promotion,
        oob_fill: sys::CUtensorMapFloatOOBfill,
    );
}
