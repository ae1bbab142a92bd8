//! Matrix products by cuBLASLt: descriptors made once per shape, algorithms that a tuner can list, time and name.
//!
//! The library thinks in columns. A row-major `out[m][n] = x[m][k] . w[n][k]^T` is its column-major
//! `D[n x m] = op(A)[n x k] . B[k x m]` with `A` = the weights (transposed, leading dimension k), `B` = the input.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_void};

use cudarc::cublaslt::sys::{self, cublasStatus_t as S};

use crate::dtype::Precision;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::library;
use crate::memory::{DeviceBuffer, DevicePtr};

/// Element type of both operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LtInput {
    /// Both of this type. 32 bits are multiplied as 32 bits, never as TF32.
    Same(Precision),
    /// e4m3 with a scale for each row of the input and each row of the weights, applied by the library. Hopper only.
    Fp8RowScales,
    /// e4m3, the product of the bare codes: whoever asks applies the scales.
    Fp8Codes,
}

/// A product up to its number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LtShape {
    /// Columns of the output.
    pub n: usize,
    /// Columns of the input.
    pub k: usize,
    /// What is multiplied.
    pub input: LtInput,
    /// What is written.
    pub output: Precision,
    /// Add to the output instead of overwriting it.
    pub accumulate: bool,
}

/// Operands of one product.
#[derive(Clone, Copy, Debug)]
pub struct LtArgs {
    /// `[m][k]`.
    pub x: DevicePtr,
    /// `[m]`, read for [`LtInput::Fp8RowScales`].
    pub x_scales: DevicePtr,
    /// `[n][k]`.
    pub w: DevicePtr,
    /// `[n]`, read for [`LtInput::Fp8RowScales`].
    pub w_scales: DevicePtr,
    /// `[m][n]`.
    pub out: DevicePtr,
    /// Rows.
    pub m: usize,
}

/// An algorithm, opaque but for its bytes. Only good for the library version and GPU that named it; where another is asked for,
/// such as one that a file made up, [`Lt`] runs the library's favourite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LtAlgo([u64; 8]);

impl From<LtAlgo> for String {
    fn from(algo: LtAlgo) -> String {
        algo.hex()
    }
}

impl TryFrom<String> for LtAlgo {
    type Error = String;
    fn try_from(text: String) -> Result<LtAlgo, String> {
        LtAlgo::from_hex(&text).ok_or_else(|| format!("{text:?} is not an algorithm of 64 bytes"))
    }
}

impl LtAlgo {
    /// Its 64 bytes.
    pub fn hex(&self) -> String {
        self.0.iter().flat_map(|word| word.to_le_bytes()).map(|byte| format!("{byte:02x}")).collect()
    }

    /// From [`LtAlgo::hex`].
    pub fn from_hex(text: &str) -> Option<LtAlgo> {
        if text.len() != 128 || !text.is_ascii() {
            return None;
        }
        let mut words = [0u64; 8];
        for (word, digits) in words.iter_mut().zip(text.as_bytes().chunks(16)) {
            let digits = std::str::from_utf8(digits).ok()?;
            *word = u64::from_str_radix(digits, 16).ok()?.swap_bytes();
        }
        Some(LtAlgo(words))
    }

    fn raw(self) -> sys::cublasLtMatmulAlgo_t {
        sys::cublasLtMatmulAlgo_t { data: self.0 }
    }
}

/// Every pointer must be a multiple of this; the algorithms are chosen for it.
const ALIGNMENT: u32 = 16;

library::functions! {
    /// What is called of cuBLASLt.
    Functions of CublasLt {
        create: fn(*mut sys::cublasLtHandle_t) -> Status = "cublasLtCreate";
        destroy: fn(sys::cublasLtHandle_t) -> Status = "cublasLtDestroy";
        get_version: fn() -> usize = "cublasLtGetVersion";
        matmul: fn(
            sys::cublasLtHandle_t, sys::cublasLtMatmulDesc_t, *const c_void,
            *const c_void, sys::cublasLtMatrixLayout_t, *const c_void, sys::cublasLtMatrixLayout_t, *const c_void,
            *const c_void, sys::cublasLtMatrixLayout_t, *mut c_void, sys::cublasLtMatrixLayout_t,
            *const sys::cublasLtMatmulAlgo_t, *mut c_void, usize, sys::cudaStream_t
        ) -> Status = "cublasLtMatmul";
        matmul_algo_check: fn(
            sys::cublasLtHandle_t, sys::cublasLtMatmulDesc_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t,
            sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, *const sys::cublasLtMatmulAlgo_t,
            *mut Heuristic
        ) -> Status = "cublasLtMatmulAlgoCheck";
        matmul_algo_get_heuristic: fn(
            sys::cublasLtHandle_t, sys::cublasLtMatmulDesc_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t,
            sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatmulPreference_t, c_int,
            *mut Heuristic, *mut c_int
        ) -> Status = "cublasLtMatmulAlgoGetHeuristic";
        matmul_desc_create: fn(*mut sys::cublasLtMatmulDesc_t, sys::cublasComputeType_t, sys::cudaDataType_t)
            -> Status = "cublasLtMatmulDescCreate";
        matmul_desc_destroy: fn(sys::cublasLtMatmulDesc_t) -> Status = "cublasLtMatmulDescDestroy";
        matmul_desc_set_attribute: fn(
            sys::cublasLtMatmulDesc_t, sys::cublasLtMatmulDescAttributes_t, *const c_void, usize
        ) -> Status = "cublasLtMatmulDescSetAttribute";
        matmul_preference_create: fn(*mut sys::cublasLtMatmulPreference_t) -> Status
            = "cublasLtMatmulPreferenceCreate";
        matmul_preference_destroy: fn(sys::cublasLtMatmulPreference_t) -> Status
            = "cublasLtMatmulPreferenceDestroy";
        matmul_preference_set_attribute: fn(
            sys::cublasLtMatmulPreference_t, sys::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize
        ) -> Status = "cublasLtMatmulPreferenceSetAttribute";
        matrix_layout_create: fn(*mut sys::cublasLtMatrixLayout_t, sys::cudaDataType, u64, u64, i64)
            -> Status = "cublasLtMatrixLayoutCreate";
        matrix_layout_destroy: fn(sys::cublasLtMatrixLayout_t) -> Status = "cublasLtMatrixLayoutDestroy";
        matrix_layout_set_attribute: fn(
            sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayoutAttribute_t, *const c_void, usize
        ) -> Status = "cublasLtMatrixLayoutSetAttribute";
    }
}

/// A shape, its rows, and the algorithm that was tuned for it.
type Wanted = (LtShape, usize, Option<LtAlgo>);

/// A library handle with its workspace. Made by the thread that runs steps, used by one thread at a time.
pub struct Lt {
    api: &'static Functions,
    handle: sys::cublasLtHandle_t,
    workspace: DeviceBuffer,
    version: usize,
    hopper: bool,
    fp8: bool,
    products: RefCell<HashMap<LtShape, Product>>,
    /// What the library has named so far. Nothing else is handed back to it: it trusts the bytes.
    named: RefCell<HashSet<LtAlgo>>,
    /// What really runs.
    resolved: RefCell<HashMap<Wanted, LtAlgo>>,
}

// SAFETY: handle and descriptors are not bound to a thread, and their owner uses them from one at a time.
unsafe impl Send for Lt {}

impl Lt {
    /// Open the library and take its workspace.
    pub fn new(gpu: &Gpu) -> Result<Lt, CudaError> {
        let api = Functions::get()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a local.
        check(unsafe { (api.create)(&mut handle) }, || "making a handle".into())?;
        // SAFETY: no arguments.
        let version = unsafe { (api.get_version)() };
        let arch = gpu.arch().number();
        let workspace = DeviceBuffer::new(if arch >= 90 { 64 << 20 } else { 32 << 20 }, "cuBLASLt's workspace")?;
        // Scales per row came with 12.9 and exist on Hopper only.
        let hopper = arch == 90 && version >= 120_900;
        let (products, named, resolved) = Default::default();
        Ok(Lt { api, handle, workspace, version, hopper, fp8: arch >= 89, products, named, resolved })
    }

    /// The library's version, as 130001 for 13.0.1.
    pub fn version(&self) -> usize {
        self.version
    }

    /// Bytes of its workspace.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
    }

    /// Whether a shape can be tried at all; [`Lt::algorithms`] may still find nothing for it.
    pub fn supports(&self, shape: &LtShape) -> bool {
        let aligned = shape.k.is_multiple_of(16) && shape.n.is_multiple_of(16);
        match shape.input {
            LtInput::Same(precision) => shape.output == precision || shape.output == Precision::F32,
            LtInput::Fp8RowScales => self.hopper && aligned,
            LtInput::Fp8Codes => self.fp8 && aligned,
        }
    }

    /// Up to `most` algorithms for `m` rows, the library's favourite first; empty when it has none.
    pub fn algorithms(&self, shape: &LtShape, m: usize, most: usize) -> Result<Vec<LtAlgo>, CudaError> {
        if !self.supports(shape) {
            return Ok(Vec::new());
        }
        let mut products = self.products.borrow_mut();
        let product = match products.entry(*shape) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Product::new(self.api, shape)?),
        };
        product.set_rows(m)?;
        // The heuristic looks at whether scales are there, never at what they point to.
        let somewhere = self.workspace.ptr();
        product.set_scales(somewhere, somewhere)?;
        let found = self.heuristic(product, most)?;
        self.named.borrow_mut().extend(&found);
        Ok(found)
    }

    /// Whether the library names this algorithm among the first `most` for `m` rows.
    pub(crate) fn names(&self, shape: &LtShape, m: usize, most: usize, algo: &LtAlgo) -> bool {
        self.named.borrow().contains(algo) || self.algorithms(shape, m, most).is_ok_and(|found| found.contains(algo))
    }

    fn heuristic(&self, product: &Product, most: usize) -> Result<Vec<LtAlgo>, CudaError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        let api = self.api;
        let mut preference = std::ptr::null_mut();
        // SAFETY: a local.
        check(unsafe { (api.matmul_preference_create)(&mut preference) }, || "making a preference".into())?;
        let workspace = self.workspace.bytes();
        // Partial sums stay in 32 bits: sums in the output's type would lose what the accumulator kept.
        let reductions = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let mut found = vec![Heuristic::default(); most];
        let mut count = 0;
        // SAFETY: live handles; attributes of the sizes that the library documents; room for `most` results.
        let status = unsafe {
            let set = |which, value: *const c_void, bytes| {
                (api.matmul_preference_set_attribute)(preference, which, value, bytes)
            };
            let mut status = set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace).cast(), 8);
            let small = [
                (P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &ALIGNMENT),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &ALIGNMENT),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &ALIGNMENT),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &ALIGNMENT),
            ];
            for (which, value) in small {
                if status == SUCCESS {
                    status = set(which, (&raw const *value).cast(), 4);
                }
            }
            if status == SUCCESS {
                let Product { operation, a, b, d, .. } = *product;
                let (most, results) = (most as i32, found.as_mut_ptr());
                status = (api.matmul_algo_get_heuristic)(
                    self.handle,
                    operation,
                    a,
                    b,
                    d,
                    d,
                    preference,
                    most,
                    results,
                    &mut count,
                );
            }
            let _ = (api.matmul_preference_destroy)(preference);
            status
        };
        if [S::CUBLAS_STATUS_NOT_SUPPORTED, S::CUBLAS_STATUS_INVALID_VALUE].iter().any(|none| *none as Status == status)
        {
            return Ok(Vec::new());
        }
        check(status, || "asking for algorithms".into())?;
        let good = |r: &&Heuristic| r.state == SUCCESS && r.workspace <= workspace;
        Ok(found.iter().take(count as usize).filter(good).map(|r| LtAlgo(r.algo)).collect())
    }

    /// Whether [`Lt::run`] could multiply so many rows.
    pub fn has_algorithm(&self, shape: &LtShape, m: usize) -> bool {
        self.resolve(shape, m.max(1), None).is_ok()
    }

    /// Multiply. `algo` was tuned for about as many rows; where it does not fit this many, or none is given, the
    /// library's favourite runs.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `shape` and `args` name and starts on multiples of 16 bytes.
    pub unsafe fn run(&self, gpu: &Gpu, shape: &LtShape, args: &LtArgs, algo: Option<LtAlgo>) -> Result<(), CudaError> {
        if args.m == 0 {
            return Ok(());
        }
        let algo = self.resolve(shape, args.m, algo)?.raw();
        let mut products = self.products.borrow_mut();
        let Some(product) = products.get_mut(shape) else { return Err(refused(shape, args.m)) };
        product.set_rows(args.m)?;
        product.set_scales(args.w_scales, args.x_scales)?;
        let (alpha, beta) = (1.0f32, if shape.accumulate { 1.0f32 } else { 0.0 });
        // SAFETY: handles live as long as `self`, the algorithm is the library's own, and the scalars are read before the call
        // returns; memory of the sizes that `shape` and `m` name is the caller's promise.
        let status = unsafe {
            (self.api.matmul)(
                self.handle,
                product.operation,
                (&raw const alpha).cast(),
                args.w as *const c_void,
                product.a,
                args.x as *const c_void,
                product.b,
                (&raw const beta).cast(),
                args.out as *const c_void,
                product.d,
                args.out as *mut c_void,
                product.d,
                &algo,
                self.workspace.ptr() as *mut c_void,
                self.workspace.bytes(),
                gpu.stream().cast(),
            )
        };
        check(status, || format!("multiplying {} x {} x {} ({shape:?})", args.m, shape.n, shape.k))?;
        gpu.note_launch()
    }

    fn resolve(&self, shape: &LtShape, m: usize, wanted: Option<LtAlgo>) -> Result<LtAlgo, CudaError> {
        if let Some(algo) = self.resolved.borrow().get(&(*shape, m, wanted)) {
            return Ok(*algo);
        }
        let favourite = self.algorithms(shape, m, 1)?.first().copied();
        let fits = |algo: LtAlgo| {
            self.named.borrow().get(&algo)?;
            let products = self.products.borrow();
            let product = products.get(shape)?;
            let mut result = Heuristic::default();
            // SAFETY: live handles with the rows set by `algorithms`; locals.
            let status = unsafe {
                let Product { operation, a, b, d, .. } = *product;
                (self.api.matmul_algo_check)(self.handle, operation, a, b, d, d, &algo.raw(), &mut result)
            };
            (status == SUCCESS && result.workspace <= self.workspace.bytes()).then_some(algo)
        };
        let algo = wanted.and_then(fits).or(favourite).ok_or_else(|| refused(shape, m))?;
        self.resolved.borrow_mut().insert((*shape, m, wanted), algo);
        Ok(algo)
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once; nobody is left to hear of a failure.
        let _ = unsafe { (self.api.destroy)(self.handle) };
    }
}

fn refused(shape: &LtShape, m: usize) -> CudaError {
    CudaError::Unsupported(format!("cuBLASLt has no algorithm for {m} rows of {shape:?}"))
}

/// What the library's functions return. A newer one may return numbers that no header has yet, so it is no enumeration here.
type Status = u32;
const SUCCESS: Status = S::CUBLAS_STATUS_SUCCESS as Status;

/// What the library says of an algorithm, laid out as `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Heuristic {
    algo: [u64; 8],
    workspace: usize,
    state: Status,
    _waves: f32,
    _reserved: [c_int; 4],
}

fn check(status: Status, action: impl FnOnce() -> String) -> Result<(), CudaError> {
    if status == SUCCESS {
        return Ok(());
    }
    let code = library::status_name(library::open(library::Lib::CublasLt)?, "cublasLtGetStatusName", status);
    Err(CudaError::Library { library: "libcublasLt", action: action(), code })
}

fn data_type(precision: Precision) -> sys::cudaDataType {
    match precision {
        Precision::F32 => sys::cudaDataType_t::CUDA_R_32F,
        Precision::F16 => sys::cudaDataType_t::CUDA_R_16F,
        Precision::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
    }
}

/// Descriptors of one shape. Rows and scale pointers change from call to call, the rest stays.
struct Product {
    api: &'static Functions,
    operation: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    d: sys::cublasLtMatrixLayout_t,
    rows: usize,
    row_scales: bool,
}

impl Product {
    fn new(api: &'static Functions, shape: &LtShape) -> Result<Product, CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as D;
        let (input, fp8) = match shape.input {
            LtInput::Same(precision) => (data_type(precision), false),
            LtInput::Fp8RowScales | LtInput::Fp8Codes => (sys::cudaDataType_t::CUDA_R_8F_E4M3, true),
        };
        use std::ptr::null_mut as none;
        let row_scales = shape.input == LtInput::Fp8RowScales;
        // Dropped, and its handles with it, when a call below fails.
        let mut product = Product { api, operation: none(), a: none(), b: none(), d: none(), rows: 1, row_scales };
        let (n, k) = (shape.n as u64, shape.k as u64);
        let scalar = sys::cudaDataType_t::CUDA_R_32F;
        // SAFETY: locals.
        unsafe {
            let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            check((api.matmul_desc_create)(&mut product.operation, compute, scalar), || "describing".into())?;
            let layouts = [
                (&mut product.a, input, k, n, k),
                (&mut product.b, input, k, 1, k),
                (&mut product.d, data_type(shape.output), n, 1, n),
            ];
            for (layout, kind, rows, columns, leading) in layouts {
                let status = (api.matrix_layout_create)(layout, kind, rows, columns, leading as i64);
                check(status, || format!("describing a matrix of {shape:?}"))?;
            }
        }
        product.set(D::CUBLASLT_MATMUL_DESC_TRANSA, &1i32)?;
        if fp8 {
            // Sums in the tensor core's own precision, as every engine runs these products.
            product.set(D::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1i8)?;
        }
        if row_scales {
            let mode = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as u32;
            product.set(D::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode)?;
            product.set(D::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode)?;
        }
        Ok(product)
    }

    fn set<T>(&self, which: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CudaError> {
        // SAFETY: the descriptor is live; callers give a value of the attribute's type.
        let status = unsafe {
            (self.api.matmul_desc_set_attribute)(self.operation, which, (&raw const *value).cast(), size_of::<T>())
        };
        check(status, || format!("setting {which:?}"))
    }

    fn set_rows(&mut self, m: usize) -> Result<(), CudaError> {
        if self.rows == m {
            return Ok(());
        }
        let columns = sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS;
        let m64 = m as u64;
        for layout in [self.b, self.d] {
            // SAFETY: live layouts; the attribute is 64 bits wide.
            let status = unsafe { (self.api.matrix_layout_set_attribute)(layout, columns, (&raw const m64).cast(), 8) };
            check(status, || format!("setting {m} rows"))?;
        }
        self.rows = m;
        Ok(())
    }

    fn set_scales(&self, a: DevicePtr, b: DevicePtr) -> Result<(), CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as D;
        if self.row_scales {
            self.set(D::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a)?;
            self.set(D::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b)?;
        }
        Ok(())
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once; those that were never made are null.
        unsafe {
            for layout in [self.a, self.b, self.d].into_iter().filter(|l| !l.is_null()) {
                let _ = (self.api.matrix_layout_destroy)(layout);
            }
            if !self.operation.is_null() {
                let _ = (self.api.matmul_desc_destroy)(self.operation);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_survives_its_text() {
        let algo = LtAlgo([1, 2, 3, 0xfedc_ba98_7654_3210, 5, 6, 7, u64::MAX]);
        let text = algo.hex();
        assert_eq!(text.len(), 128);
        assert!(text.starts_with("0100000000000000"));
        assert_eq!(LtAlgo::from_hex(&text), Some(algo));
    }

    #[test]
    fn text_that_is_no_algorithm_is_refused() {
        let good = LtAlgo([0; 8]).hex();
        assert_eq!(LtAlgo::from_hex(&good[1..]), None);
        assert_eq!(LtAlgo::from_hex(&format!("g{}", &good[1..])), None);
        assert_eq!(LtAlgo::from_hex(&"é".repeat(64)), None);
    }

    #[test]
    fn heuristics_have_the_layout_of_the_library() {
        use std::mem::offset_of;
        type Theirs = sys::cublasLtMatmulHeuristicResult_t;
        let ours = [offset_of!(Heuristic, workspace), offset_of!(Heuristic, state), size_of::<Heuristic>()];
        let theirs = [offset_of!(Theirs, workspaceSize), offset_of!(Theirs, state), size_of::<Theirs>()];
        assert_eq!((ours, align_of::<Heuristic>()), (theirs, align_of::<Theirs>()));
        assert_eq!(size_of::<Status>(), size_of::<S>());
    }

    #[test]
    fn products_of_every_kind_can_be_described() {
        let Ok(api) = Functions::get() else {
            eprintln!("skipped: there is no libcublasLt here");
            return;
        };
        let same = Precision::ALL.map(LtInput::Same);
        for input in same.into_iter().chain([LtInput::Fp8RowScales, LtInput::Fp8Codes]) {
            for output in Precision::ALL {
                let mut product =
                    Product::new(api, &LtShape { n: 48, k: 64, input, output, accumulate: false }).unwrap();
                product.set_rows(7).unwrap();
                product.set_scales(256, 512).unwrap();
            }
        }
    }
}
