//! Linear layers: one call for the engine, and behind it the kernel that was fastest for the shape.
//!
//! `out[m][n] = x[m][k] . w[n][k]^T`. Which kernel runs is a plan per (shape, rows), made by [`crate::tune`]. A kernel
//! may fold in the norm before the product or the activation after it; [`Linear::route`] tells the caller what is left
//! for it to run.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::dtype::Precision;
use crate::error::CudaError;
use crate::gemm::{GemmArgs, GemmEpilogue, GemmInput, GemmVariant, OwnGemm, Scales};
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::lt::{Lt, LtAlgo, LtArgs, LtInput, LtShape};
use crate::memory::{DeviceBuffer, DevicePtr};
use crate::module::Function;
use crate::rows::RowOps;
use crate::sample::Maxima;
use crate::skinny::{Skinny, SkinnyArgs, SkinnyInput, SkinnyOutput};
use crate::tune::{BUCKETS, GemmChoice, bucket_index};

/// Whether cuBLASLt may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmPlugin {
    /// The fastest of cuBLASLt and strobe's own kernels.
    Auto,
    /// Strobe's own kernels only; the library is not even opened.
    Disable,
}

impl GemmPlugin {
    /// As `--gemm-plugin` takes it.
    pub fn name(self) -> &'static str {
        match self {
            GemmPlugin::Auto => "auto",
            GemmPlugin::Disable => "disable",
        }
    }
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Epilogue {
    /// Stored in the activations' type, with a bias where there is one.
    Store,
    /// Stored as f32.
    StoreF32,
    /// Stored as f32, for a search of each row's maximum, which a kernel may prepare.
    Logits,
    /// Added to the f32 residual stream.
    AddResidual,
    /// The weights are gate rows, then up rows; `silu(gate) * up` is stored in the activations' type, n / 2 wide.
    SiluMul,
}

/// Type of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// The activations' type.
    Same,
    /// e4m3 with one f32 scale per output row.
    Fp8,
}

/// A linear layer up to its rows: what is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinearShape {
    /// Rows of the weights.
    pub n: usize,
    /// Columns of the weights.
    pub k: usize,
    /// What becomes of the product.
    pub epilogue: Epilogue,
    /// Type of the weights.
    pub weights: Weights,
    /// Whether a bias is added; only with [`Epilogue::Store`].
    pub bias: bool,
    /// Whether the input is the norm of the residual stream, which a kernel may fold in.
    pub norm: bool,
}

/// The input of a product. Which form is wanted is told by [`Linear::route`].
#[derive(Clone, Copy, Debug)]
pub enum LinearInput {
    /// `[m][k]` in the activations' type.
    Plain(DevicePtr),
    /// The residual stream (f32), to be normed by the kernel itself.
    Norm {
        /// `[m][k]`, f32.
        hidden: DevicePtr,
        /// `[k]`, f32.
        weight: DevicePtr,
        /// Added to the mean square.
        eps: f32,
    },
    /// e4m3 codes with one f32 scale per row.
    Fp8 {
        /// `[m][k]`.
        codes: DevicePtr,
        /// `[m]`.
        scales: DevicePtr,
    },
}

/// Operands of one product.
#[derive(Clone, Copy, Debug)]
pub struct LinearArgs {
    /// The layer.
    pub shape: LinearShape,
    /// Its input.
    pub input: LinearInput,
    /// `[n][k]`.
    pub w: DevicePtr,
    /// `[n]`; read with [`Weights::Fp8`].
    pub w_scales: DevicePtr,
    /// `[n]`, f32; read where the shape has a bias.
    pub bias: DevicePtr,
    /// Where it goes: `[m][n]`, or `[m][n / 2]` where [`Route::folds_silu`].
    pub out: DevicePtr,
    /// u32, or null: where it is not 0 when the kernel runs, nobody reads `out` if there are [`Route::maxima`].
    pub spared: DevicePtr,
    /// Rows.
    pub m: usize,
}

impl LinearArgs {
    /// Sizes without operands: enough to ask what could run them.
    fn unbound(shape: LinearShape, m: usize) -> LinearArgs {
        LinearArgs { shape, input: LinearInput::Plain(0), w: 0, w_scales: 0, bias: 0, out: 0, spared: 0, m }
    }
}

/// The kernel that runs a product, and what it does besides multiplying; the rest is the caller's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route {
    kernel: Candidate,
    /// It norms the residual stream itself: give it [`LinearInput::Norm`].
    pub folds_norm: bool,
    /// It wants [`LinearInput::Fp8`].
    pub fp8_input: bool,
    /// It applies the activation itself. Where it does not, `out` gets gate and up, `[m][n]`, and the caller runs
    /// [`RowOps::silu_mul`]. Always false for shapes that have no activation.
    pub folds_silu: bool,
    /// It keeps the maxima of its tiles, of which the caller may take each row's, instead of looking through all of
    /// [`Epilogue::Logits`].
    pub maxima: Option<Maxima>,
    /// The kernel that [`Linear::run`] launches behind it.
    pub second: Option<SecondPass>,
}

/// What a kernel behind a product does with its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecondPass {
    /// Adds the bias in place.
    Bias,
    /// Brings f32 sums to scale: reads them from scratch, and writes the output.
    Scale,
}

/// A kernel that can run a shape.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kernel", rename_all = "snake_case")]
pub enum Candidate {
    /// cuBLASLt.
    CublasLt {
        /// The library's favourite where none is named.
        algorithm: Option<LtAlgo>,
    },
    /// cuBLASLt on bare e4m3 codes, then a kernel that applies the scales: where it can't apply them itself, which is
    /// everywhere but on Hopper.
    CublasLtScaled {
        /// The library's favourite where none is named.
        algorithm: Option<LtAlgo>,
    },
    /// Strobe's own tensor-core kernels.
    Own {
        /// The likeliest where none is named.
        variant: Option<GemmVariant>,
    },
    /// Strobe's own kernels for few rows. They take e4m3 weights with plain activations.
    Skinny {
        /// The norm in front is done by the kernel itself.
        folds_norm: bool,
    },
}

impl Candidate {
    /// Whose kernel it is, for tables.
    pub fn family(&self) -> &'static str {
        match self {
            Candidate::CublasLt { .. } => "cuBLASLt",
            Candidate::CublasLtScaled { .. } => "cuBLASLt + scale",
            Candidate::Own { .. } => "own tensor-core",
            Candidate::Skinny { .. } => "own skinny",
        }
    }
}

/// Sums of bare codes wait here for their scales, so many rows at a time as fit.
const SCRATCH: usize = 64 << 20;

/// Every way to multiply.
pub struct Linear {
    precision: Precision,
    plugin: GemmPlugin,
    lt: Option<Lt>,
    own: OwnGemm,
    skinny: Skinny,
    rows: RowOps,
    scale_store: Function,
    scale_store_f32: Function,
    scale_add: Function,
    scratch: Option<DeviceBuffer>,
    maxima: Option<DeviceBuffer>,
    plan: HashMap<LinearShape, Vec<Option<Candidate>>>,
}

impl Linear {
    /// With cuBLASLt where it can be opened, without it elsewhere.
    pub fn with_what_is_there(gpu: &Gpu, precision: Precision) -> Result<Linear, CudaError> {
        match Linear::new(gpu, precision, GemmPlugin::Auto) {
            Err(CudaError::LibraryMissing { .. } | CudaError::LibraryBroken { .. }) => {
                Linear::new(gpu, precision, GemmPlugin::Disable)
            }
            other => other,
        }
    }

    /// Open what `plugin` allows; call it on the thread that runs steps.
    pub fn new(gpu: &Gpu, precision: Precision, plugin: GemmPlugin) -> Result<Linear, CudaError> {
        let lt = match plugin {
            GemmPlugin::Auto => Some(Lt::new(gpu)?),
            GemmPlugin::Disable => None,
        };
        let typed = match precision {
            Precision::F32 => "scale_store_f32",
            Precision::F16 => "scale_store_f16",
            Precision::Bf16 => "scale_store_bf16",
        };
        Ok(Linear {
            precision,
            plugin,
            lt,
            own: OwnGemm::new(gpu)?,
            skinny: Skinny::new(gpu)?,
            rows: RowOps::new(gpu, precision)?,
            scale_store: gpu.function("linear.cu", typed)?,
            scale_store_f32: gpu.function("linear.cu", "scale_store_f32")?,
            scale_add: gpu.function("linear.cu", "scale_add")?,
            scratch: None,
            maxima: None,
            plan: HashMap::new(),
        })
    }

    /// Type of activations.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// What was allowed.
    pub fn plugin(&self) -> GemmPlugin {
        self.plugin
    }

    /// cuBLASLt's version, where it is in use.
    pub fn cublaslt_version(&self) -> Option<usize> {
        self.lt.as_ref().map(Lt::version)
    }

    pub(crate) fn row_ops(&self) -> &RowOps {
        &self.rows
    }

    /// Bytes of memory that it has taken beside operands: cuBLASLt's workspace, maxima of tiles, sums to be scaled.
    pub fn workspace_bytes(&self) -> u64 {
        let own = [&self.scratch, &self.maxima].into_iter().flatten().map(DeviceBuffer::bytes).sum::<usize>();
        (own + self.lt.as_ref().map_or(0, Lt::workspace_bytes)) as u64
    }

    /// Take the memory for maxima of tiles: of products of up to `m` rows and `n` columns.
    pub fn reserve_maxima(&mut self, m: usize, n: usize) -> Result<(), CudaError> {
        let bytes = m * n.div_ceil(NARROWEST_TILE) * 8;
        self.maxima = Some(DeviceBuffer::new(bytes, "maxima of logits")?);
        Ok(())
    }

    /// Where a kernel keeps the maxima of its tiles, if it does and there is room.
    fn maxima_of(&self, shape: &LinearShape, m: usize, variant: Option<GemmVariant>) -> Option<Maxima> {
        if shape.epilogue != Epilogue::Logits {
            return None;
        }
        let args = self.gemm_args(&LinearArgs::unbound(*shape, m), 0, 0);
        let tiles = self.own.keeps_maxima(&args, variant.unwrap_or_else(|| self.own.choose(&args)))?;
        let kept = self.maxima.as_ref().filter(|buffer| buffer.bytes() >= m * tiles * 8)?;
        Some(Maxima { kept: kept.ptr(), tiles })
    }

    /// Run these winners from now on. What is not among them runs as it would without a plan.
    pub(crate) fn set_plan(&mut self, winners: impl Iterator<Item = (LinearShape, usize, Candidate)>) {
        for (shape, bucket, winner) in winners {
            let buckets = self.plan.entry(shape).or_insert_with(|| vec![None; BUCKETS.len()]);
            buckets[bucket_index(bucket)] = Some(winner);
        }
    }

    /// The kernel that runs `m` rows: the planned one, or that of the nearest bucket below, or the likeliest.
    fn kernel(&self, shape: &LinearShape, m: usize) -> Candidate {
        let planned = self.plan.get(shape).and_then(|buckets| {
            let index = bucket_index(m);
            let below = || buckets[..index].iter().rev().find_map(|candidate| *candidate);
            // Kernels for few rows are no guess for more.
            buckets[index].or_else(|| below().filter(|kernel| !matches!(kernel, Candidate::Skinny { .. })))
        });
        planned.unwrap_or_else(|| self.likeliest(shape, m))
    }

    fn likeliest(&self, shape: &LinearShape, m: usize) -> Candidate {
        let few = Candidate::Skinny { folds_norm: false };
        match &self.lt {
            _ if m <= LIKELY_FEW && self.fits_skinny(shape, m, false) => few,
            Some(lt) if lt.has_algorithm(&self.lt_shape(shape, false), m) => Candidate::CublasLt { algorithm: None },
            _ => Candidate::Own { variant: None },
        }
    }

    /// Which kernel runs this shape and these rows, and what the caller has to run around it. The answer holds for
    /// [`Linear::run_route`], so that a product is looked up once.
    pub fn route(&self, shape: &LinearShape, m: usize) -> Route {
        self.route_of(shape, m, &self.kernel(shape, m))
    }

    /// [`Linear::route`] of a kernel that need not be the planned one.
    pub fn route_of(&self, shape: &LinearShape, m: usize, candidate: &Candidate) -> Route {
        let (fp8_input, silu) = (shape.weights == Weights::Fp8, shape.epilogue == Epilogue::SiluMul);
        let bare =
            Route { kernel: *candidate, folds_norm: false, fp8_input, folds_silu: false, maxima: None, second: None };
        match candidate {
            Candidate::CublasLt { .. } => Route { second: shape.bias.then_some(SecondPass::Bias), ..bare },
            Candidate::CublasLtScaled { .. } => Route { second: Some(SecondPass::Scale), ..bare },
            Candidate::Own { variant } => {
                Route { folds_silu: silu, maxima: self.maxima_of(shape, m, *variant), ..bare }
            }
            Candidate::Skinny { folds_norm } => {
                Route { folds_norm: *folds_norm, fp8_input: false, folds_silu: silu, ..bare }
            }
        }
    }

    /// Multiply. Input and output must be as [`Linear::route`] says for this shape and these rows.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` name.
    pub unsafe fn run(&self, gpu: &Gpu, args: &LinearArgs) -> Result<(), CudaError> {
        // SAFETY: the caller's promise, with the route of this shape and these rows.
        unsafe { self.run_route(gpu, args, &self.route(&args.shape, args.m)) }
    }

    /// What can run `rows` rows of a shape, with names; those that are likely to win come early.
    pub fn candidates(&self, shape: &LinearShape, rows: usize) -> Result<Vec<(Candidate, String)>, CudaError> {
        let mut found: Vec<(Candidate, String)> = Vec::new();
        if shape.norm && self.fits_skinny(shape, rows, true) {
            found.push((Candidate::Skinny { folds_norm: true }, "skinny with norm".into()));
        }
        if self.fits_skinny(shape, rows, false) {
            found.push((Candidate::Skinny { folds_norm: false }, "skinny".into()));
        }
        if let Some(lt) = &self.lt {
            let whole = lt.algorithms(&self.lt_shape(shape, false), rows, ALGORITHMS)?;
            for (i, algorithm) in whole.iter().enumerate() {
                found.push((Candidate::CublasLt { algorithm: Some(*algorithm) }, format!("cublaslt {i}")));
            }
            if shape.weights == Weights::Fp8 && whole.is_empty() {
                let bare = lt.algorithms(&self.lt_shape(shape, true), rows, ALGORITHMS)?;
                for (i, algorithm) in bare.iter().enumerate() {
                    let candidate = Candidate::CublasLtScaled { algorithm: Some(*algorithm) };
                    found.push((candidate, format!("cublaslt {i} + scale")));
                }
            }
        }
        let args = self.gemm_args(&LinearArgs::unbound(*shape, rows), 0, 0);
        let (mut hopper, mut others) = (Vec::new(), Vec::new());
        for variant in self.own.variants(&args) {
            if variant.hopper { hopper.push(variant) } else { others.push(variant) }
        }
        hopper.sort_by(|a, b| self.own.cycles(&args, *a).total_cmp(&self.own.cycles(&args, *b)));
        hopper.truncate(VARIANTS);
        for variant in hopper.into_iter().chain(others) {
            found.push((Candidate::Own { variant: Some(variant) }, format!("own {variant}")));
        }
        Ok(found)
    }

    /// Whether the winner of a choice can run `rows` rows: what is read from a file may come from a version with other kernels,
    /// and name algorithms of cuBLASLt that the library does not.
    pub(crate) fn can_run(&self, choice: &GemmChoice, rows: usize) -> bool {
        let shape = &choice.shape;
        let named = |bare_codes, algorithm: Option<LtAlgo>| {
            let shape = self.lt_shape(shape, bare_codes);
            let of = |lt: &Lt| algorithm.is_none_or(|algo| lt.names(&shape, choice.rows.max(1), ALGORITHMS, &algo));
            self.lt.as_ref().is_some_and(of)
        };
        match choice.winner {
            Candidate::CublasLt { algorithm } => named(false, algorithm),
            Candidate::CublasLtScaled { algorithm } => shape.weights == Weights::Fp8 && named(true, algorithm),
            Candidate::Own { variant } => {
                let able = self.own.variants(&self.gemm_args(&LinearArgs::unbound(*shape, rows), 0, 0));
                variant.map_or(!able.is_empty(), |variant| able.contains(&variant))
            }
            Candidate::Skinny { folds_norm } => self.fits_skinny(shape, rows, folds_norm),
        }
    }

    /// Take the memory that a candidate needs besides its operands.
    pub fn reserve(&mut self, candidate: &Candidate) -> Result<(), CudaError> {
        if matches!(candidate, Candidate::CublasLtScaled { .. }) && self.scratch.is_none() {
            self.scratch = Some(DeviceBuffer::new(SCRATCH, "e4m3 GEMM sums")?);
        }
        Ok(())
    }

    /// Multiply as `route` says, which is [`Linear::route`]'s answer for this shape and these rows, or
    /// [`Linear::route_of`]'s for one of [`Linear::candidates`]; memory that one needs must be reserved.
    ///
    /// Before a shape is captured into a graph it must have run once outside of one: libraries load code at first use.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` name, and `route` is an answer for this shape and these rows.
    pub unsafe fn run_route(&self, gpu: &Gpu, args: &LinearArgs, route: &Route) -> Result<(), CudaError> {
        if args.m == 0 {
            return Ok(());
        }
        if args.shape.bias && args.shape.epilogue != Epilogue::Store {
            return Err(CudaError::Unsupported(format!("a bias with {:?}", args.shape.epilogue)));
        }
        // SAFETY: the caller's promise.
        unsafe {
            match route.kernel {
                Candidate::CublasLt { algorithm } => self.run_lt(gpu, args, algorithm),
                Candidate::CublasLtScaled { algorithm } => self.run_lt_scaled(gpu, args, algorithm),
                Candidate::Own { variant } => self.run_own(gpu, args, variant, route.maxima),
                Candidate::Skinny { .. } => self.run_skinny(gpu, args),
            }
        }
    }

    fn fits_skinny(&self, shape: &LinearShape, m: usize, norm: bool) -> bool {
        let input = if norm { SkinnyInput::Norm { hidden: 0, weight: 0, eps: 0.0 } } else { SkinnyInput::Plain(0) };
        m <= self.skinny.max_m()
            && self.skinny.supports(&skinny_args(&LinearArgs::unbound(*shape, m), input), self.precision)
    }

    /// # Safety
    /// As for [`Linear::run_route`].
    unsafe fn run_skinny(&self, gpu: &Gpu, args: &LinearArgs) -> Result<(), CudaError> {
        let input = match args.input {
            LinearInput::Plain(x) => SkinnyInput::Plain(x),
            LinearInput::Norm { hidden, weight, eps } => SkinnyInput::Norm { hidden, weight, eps },
            LinearInput::Fp8 { .. } => return Err(missing(args)),
        };
        // SAFETY: the caller's promise.
        unsafe { self.skinny.run(gpu, &skinny_args(args, input), self.precision) }
    }

    fn lt_shape(&self, shape: &LinearShape, bare_codes: bool) -> LtShape {
        let input = match (shape.weights, bare_codes) {
            (Weights::Same, _) => LtInput::Same(self.precision),
            (Weights::Fp8, false) => LtInput::Fp8RowScales,
            (Weights::Fp8, true) => LtInput::Fp8Codes,
        };
        let output = match shape.epilogue {
            _ if bare_codes => Precision::F32,
            Epilogue::Store | Epilogue::SiluMul => self.precision,
            Epilogue::StoreF32 | Epilogue::Logits | Epilogue::AddResidual => Precision::F32,
        };
        let accumulate = shape.epilogue == Epilogue::AddResidual && !bare_codes;
        LtShape { n: shape.n, k: shape.k, input, output, accumulate }
    }

    /// # Safety
    /// As for [`Linear::run_route`].
    unsafe fn run_own(
        &self,
        gpu: &Gpu,
        args: &LinearArgs,
        variant: Option<GemmVariant>,
        maxima: Option<Maxima>,
    ) -> Result<(), CudaError> {
        let (x, x_scales) = input_pointers(args)?;
        let maxima = maxima.map(|maxima| maxima.kept);
        let spared = maxima.and((args.spared != 0).then_some(args.spared));
        let args = GemmArgs { maxima, spared, ..self.gemm_args(args, x, x_scales) };
        // SAFETY: the caller's promise; `maxima` have room for these rows, as the route says.
        unsafe { self.own.run_variant(gpu, &args, variant.unwrap_or_else(|| self.own.choose(&args))) }
    }

    fn gemm_args(&self, args: &LinearArgs, x: DevicePtr, x_scales: DevicePtr) -> GemmArgs {
        let LinearShape { n, k, epilogue, weights, bias, .. } = args.shape;
        let per_row = |pointer| Scales { pointer, per_row: true };
        GemmArgs {
            precision: self.precision,
            input: match weights {
                Weights::Same => GemmInput::Same,
                Weights::Fp8 => GemmInput::Fp8 { x_scales: per_row(x_scales), w_scales: per_row(args.w_scales) },
            },
            x,
            w: args.w,
            out: args.out,
            epilogue: match epilogue {
                Epilogue::Store => GemmEpilogue::Store,
                Epilogue::StoreF32 | Epilogue::Logits => GemmEpilogue::StoreF32,
                Epilogue::AddResidual => GemmEpilogue::AddResidual,
                Epilogue::SiluMul => GemmEpilogue::SiluMul,
            },
            bias: bias.then_some(args.bias),
            maxima: None,
            spared: None,
            m: args.m,
            n,
            k,
        }
    }

    /// # Safety
    /// As for [`Linear::run_route`].
    unsafe fn run_lt(&self, gpu: &Gpu, args: &LinearArgs, algorithm: Option<LtAlgo>) -> Result<(), CudaError> {
        let lt = self.lt.as_ref().ok_or_else(|| missing(args))?;
        let (x, x_scales) = input_pointers(args)?;
        let LinearArgs { shape, w, w_scales, out, bias, m, .. } = *args;
        // SAFETY: the caller's promise.
        unsafe {
            lt.run(gpu, &self.lt_shape(&shape, false), &LtArgs { x, x_scales, w, w_scales, out, m }, algorithm)?;
            if shape.bias {
                self.rows.add_bias(gpu, out, bias, m, shape.n)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Linear::run_route`].
    unsafe fn run_lt_scaled(&self, gpu: &Gpu, args: &LinearArgs, algorithm: Option<LtAlgo>) -> Result<(), CudaError> {
        let (Some(lt), Some(scratch)) = (&self.lt, &self.scratch) else { return Err(missing(args)) };
        let LinearInput::Fp8 { codes, scales } = args.input else { return Err(missing(args)) };
        let LinearArgs { shape, w, w_scales, m, .. } = *args;
        let (n, bias) = (shape.n, if shape.bias { args.bias } else { 0 });
        let (kernel, element) = match shape.epilogue {
            Epilogue::Store | Epilogue::SiluMul => (self.scale_store, self.precision.bytes()),
            Epilogue::StoreF32 | Epilogue::Logits => (self.scale_store_f32, 4),
            Epilogue::AddResidual => (self.scale_add, 4),
        };
        let at_once = (scratch.bytes() / (n * 4)).min(MOST_GRID_ROWS);
        if at_once == 0 {
            return Err(CudaError::Unsupported(format!("a linear layer of {n} outputs")));
        }
        for start in (0..m).step_by(at_once) {
            let rows = at_once.min(m - start);
            let x = codes + (start * shape.k) as u64;
            let product = LtArgs { x, x_scales: 0, w, w_scales: 0, out: scratch.ptr(), m: rows };
            // SAFETY: the caller's promise, and so many rows fit into `scratch`.
            unsafe { lt.run(gpu, &self.lt_shape(&shape, true), &product, algorithm) }?;
            let (sums, x_scales) = (scratch.ptr(), scales + (start * 4) as u64);
            let (out, columns) = (args.out + (start * n * element) as u64, n as u32);
            let grid = (n.div_ceil(4 * SCALE_THREADS) as u32, rows as u32, 1);
            let launch = Launch { grid, ..Launch::grid(1, SCALE_THREADS as u32) }.overlapping();
            // SAFETY: the sums of so many rows were just made, and `out` has place for them by the caller's promise.
            unsafe { gpu.launch(kernel, launch, kernel_args![sums, x_scales, w_scales, bias, out, columns]) }?;
        }
        Ok(())
    }
}

fn skinny_args(args: &LinearArgs, input: SkinnyInput) -> SkinnyArgs {
    let LinearShape { n, k, epilogue, weights, bias, .. } = args.shape;
    SkinnyArgs {
        input,
        w: args.w,
        w_scales: (weights == Weights::Fp8).then_some(args.w_scales),
        bias: bias.then_some(args.bias),
        out: match epilogue {
            Epilogue::Store => SkinnyOutput::Store(args.out),
            Epilogue::StoreF32 | Epilogue::Logits => SkinnyOutput::StoreF32(args.out),
            Epilogue::AddResidual => SkinnyOutput::AddResidual(args.out),
            Epilogue::SiluMul => SkinnyOutput::SiluMul(args.out),
        },
        m: args.m,
        n,
        k,
    }
}

/// Without a plan, up to so many rows go to the kernels for few.
const LIKELY_FEW: usize = 16;
/// Algorithms of cuBLASLt that are tried.
const ALGORITHMS: usize = 16;
/// Own variants for Hopper that are tried, of up to fifty: those that arithmetic favours.
const VARIANTS: usize = 18;
/// Columns of the narrowest tile whose maxima are kept.
const NARROWEST_TILE: usize = 128;
/// Blocks in a grid's second dimension.
const MOST_GRID_ROWS: usize = 65_535;
/// Threads of a block that scales.
const SCALE_THREADS: usize = 256;

/// The input and its scales, in the form that goes with the weights.
fn input_pointers(args: &LinearArgs) -> Result<(DevicePtr, DevicePtr), CudaError> {
    match (args.input, args.shape.weights) {
        (LinearInput::Plain(x), Weights::Same) => Ok((x, 0)),
        (LinearInput::Fp8 { codes, scales }, Weights::Fp8) => Ok((codes, scales)),
        _ => Err(missing(args)),
    }
}

fn missing(args: &LinearArgs) -> CudaError {
    CudaError::Unsupported(format!("no kernel for {} rows of {:?} from {:?}", args.m, args.shape, args.input))
}
