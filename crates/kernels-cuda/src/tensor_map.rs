//! Matrices as Hopper's copy engine is told of them.

use std::cell::RefCell;
use std::collections::HashMap;

use bytemuck::NoUninit;
use cudarc::driver::sys;

use crate::driver;
use crate::error::{CudaError, check};
use crate::memory::DevicePtr;

/// A matrix as the copy engine is told of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MapKey {
    pub pointer: DevicePtr,
    pub rows: usize,
    pub columns: usize,
    pub element: MapElement,
    pub box_rows: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum MapElement {
    Bf16,
    F16,
    Fp8,
    F32,
}

impl MapElement {
    fn bytes(self) -> usize {
        match self {
            MapElement::Bf16 | MapElement::F16 => 2,
            MapElement::Fp8 => 1,
            MapElement::F32 => 4,
        }
    }

    fn raw(self) -> sys::CUtensorMapDataType {
        use sys::CUtensorMapDataType_enum as D;
        match self {
            MapElement::Bf16 => D::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            MapElement::F16 => D::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            MapElement::Fp8 => D::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            MapElement::F32 => D::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        }
    }
}

/// Buffers keep their addresses and steps come in few sizes; past this many maps those of passing sizes are let go.
const MAPS_KEPT: usize = 8192;

/// Rows that one warp writes at once; no operand comes in boxes this low.
pub(crate) const OUT_BOX_ROWS: u32 = 16;

/// A matrix as the copy engine reads of it: an argument of kernels.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap(sys::CUtensorMap);

// SAFETY: words and nothing else, as is asserted right below.
unsafe impl NoUninit for TensorMap {}
const _: () = assert!(size_of::<TensorMap>() == size_of::<[u64; 16]>());

/// The maps made so far.
#[derive(Default)]
pub(crate) struct TensorMaps(RefCell<HashMap<MapKey, TensorMap>>);

impl TensorMaps {
    /// The copy engine's view of a matrix: operands in boxes of 128 bytes of k, outputs in boxes of 32 columns.
    pub(crate) fn get(&self, key: MapKey) -> Result<TensorMap, CudaError> {
        let mut maps = self.0.borrow_mut();
        if let Some(map) = maps.get(&key) {
            return Ok(*map);
        }
        let output = key.box_rows == OUT_BOX_ROWS;
        let bytes = key.element.bytes();
        let box_columns = if output { 32 } else { 128 / bytes as u32 };
        let swizzle = if box_columns as usize * bytes == 64 {
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_64B
        } else {
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B
        };
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let size = [key.columns as u64, key.rows as u64];
        let stride = [(key.columns * bytes) as u64];
        let (shape, step) = ([box_columns, key.box_rows], [1u32, 1]);
        // SAFETY: arrays of the rank given; the address is only written down.
        let status = unsafe {
            driver::cuTensorMapEncodeTiled(
                &mut map,
                key.element.raw(),
                2,
                key.pointer as *mut std::ffi::c_void,
                size.as_ptr(),
                stride.as_ptr(),
                shape.as_ptr(),
                step.as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(status, || format!("describing a matrix of {} x {} to the copy engine", key.rows, key.columns))?;
        if maps.len() >= MAPS_KEPT {
            maps.clear();
        }
        let map = TensorMap(map);
        maps.insert(key, map);
        Ok(map)
    }
}
