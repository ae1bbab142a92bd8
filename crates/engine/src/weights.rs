//! Weights as the kernels want them: converted, laid out, and either in memory or mapped from an engine's file.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use memmap2::MmapMut;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use strobe_kernels_cpu::{
    Cpu, Elems, Layout, Matrix, PANEL, QuantKind, pack_panels, packed_bytes, packed_len, packed_shape,
};
use strobe_model::checksum::{self, BLOCK, BlockHash};
use strobe_model::{
    DType, LayerWeight, ModelConfig, ModelError, SafeTensors, TensorSpec, TensorType, WeightId, WeightInfo,
    WeightSource, embedding_table, weight_list,
};

use crate::engine_config::BuildConfig;
use crate::error::EngineError;
use crate::quantization::Quantization;

/// Zeroed, page-aligned memory with huge pages where the system has them.
pub fn aligned_bytes(len: usize) -> Result<MmapMut, EngineError> {
    let map = MmapMut::map_anon(len.max(1)).map_err(|source| EngineError::Memory {
        what: "a buffer".into(),
        arithmetic: format!("the system refused {len} bytes ({source})"),
        remedy: "use a smaller model, batch or cache".into(),
    })?;
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage); // only a hint
    Ok(map)
}

/// Type of a weight's elements in an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightType {
    /// Floats.
    Float(DType),
    /// Integers with scales, always packed.
    Quantized(QuantKind),
}

/// How an engine keeps a weight.
#[derive(Clone, Debug)]
pub struct StoredWeight {
    /// The weight.
    pub info: WeightInfo,
    /// Type of its elements.
    pub kind: WeightType,
    /// Their order.
    pub layout: Layout,
    name: String,
}

impl StoredWeight {
    /// Vectors stay in f32; the embedding table, which is looked up by row, in the engine's type, and so do routers, which
    /// are small and choose between experts by small differences; the head keeps 8 bits also where the layers have 4,
    /// because every logit feels its error.
    fn new(info: WeightInfo, build: &BuildConfig) -> StoredWeight {
        let matrix = !info.vector && info.id != WeightId::Embed;
        let router = matches!(info.id, WeightId::Layer(_, LayerWeight::Router));
        let layout = if build.gemm_plugin && matrix { Layout::Packed } else { Layout::RowMajor };
        let kind = match build.quantization {
            _ if info.vector => WeightType::Float(DType::F32),
            _ if router => WeightType::Float(build.dtype),
            Quantization::Int4 if matches!(info.id, WeightId::Layer(..)) => WeightType::Quantized(QuantKind::Int4),
            Quantization::Int8 | Quantization::Int4 if matrix => WeightType::Quantized(QuantKind::Int8),
            _ => WeightType::Float(build.dtype),
        };
        StoredWeight { name: info.id.name(), info, kind, layout }
    }

    /// Bytes, padding included.
    pub fn bytes(&self) -> usize {
        self.info.experts * self.bytes_of_one()
    }

    /// Bytes of one of the weights that lie one after the other.
    fn bytes_of_one(&self) -> usize {
        let WeightInfo { rows, cols, .. } = self.info;
        match (self.kind, self.layout) {
            (WeightType::Quantized(kind), _) => packed_bytes(kind, rows, cols),
            (WeightType::Float(dtype), Layout::Packed) => packed_len(rows, cols) * dtype.bytes(),
            (WeightType::Float(dtype), Layout::RowMajor) => rows * cols * dtype.bytes(),
        }
    }

    /// The tensor of an engine's file that holds it.
    pub fn tensor(&self) -> TensorSpec {
        let WeightInfo { experts, rows, cols, vector, .. } = self.info;
        let (dtype, mut shape) = match (self.kind, self.layout) {
            (WeightType::Quantized(kind), _) => (TensorType::U8, packed_shape(kind, rows, cols).to_vec()),
            (WeightType::Float(dtype), Layout::Packed) => (dtype.into(), vec![rows.div_ceil(PANEL), cols, PANEL]),
            (WeightType::Float(dtype), Layout::RowMajor) if vector => (dtype.into(), vec![cols]),
            (WeightType::Float(dtype), Layout::RowMajor) => (dtype.into(), vec![rows, cols]),
        };
        if experts > 1 {
            shape.insert(0, experts);
        }
        TensorSpec { name: self.name.clone(), dtype, shape }
    }

    /// Bytes that its start must be a multiple of.
    fn alignment(&self) -> usize {
        match self.kind {
            WeightType::Float(dtype) => dtype.bytes(),
            WeightType::Quantized(_) => 1,
        }
    }
}

/// Every weight of a model as an engine keeps it, in the order a forward pass uses them.
pub fn stored_weights(config: &ModelConfig, build: &BuildConfig) -> Vec<StoredWeight> {
    let own_table = config.tie_word_embeddings && build.program_options(None).own_table;
    let table = own_table.then(|| embedding_table(config));
    table.into_iter().chain(weight_list(config)).map(|info| StoredWeight::new(info, build)).collect()
}

/// Bytes of all weights of a model in an engine.
pub fn engine_bytes(config: &ModelConfig, build: &BuildConfig) -> u64 {
    stored_weights(config, build).iter().map(|weight| weight.bytes() as u64).sum()
}

/// Element types that weights are stored in.
trait Element: bytemuck::Pod + Default + Send + Sync {
    fn convert(from: &[f32], to: &mut [Self]);
}

impl Element for f32 {
    fn convert(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Element for f16 {
    fn convert(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }
}

impl Element for bf16 {
    fn convert(from: &[f32], to: &mut [bf16]) {
        to.convert_from_f32_slice(from);
    }
}

/// Fill `out` with a weight, on all threads of `cpu`.
pub fn fill(cpu: &mut Cpu, source: &WeightSource, weight: &StoredWeight, out: &mut [u8]) -> Result<(), EngineError> {
    let layout = weight.layout;
    for (expert, out) in out.chunks_mut(weight.bytes_of_one().max(1)).enumerate() {
        let rows = SourceRows::new(source, &weight.info, expert);
        match weight.kind {
            WeightType::Float(DType::F32) => fill_as::<f32>(cpu, &rows, layout, out),
            WeightType::Float(DType::F16) => fill_as::<f16>(cpu, &rows, layout, out),
            WeightType::Float(DType::Bf16) => fill_as::<bf16>(cpu, &rows, layout, out),
            WeightType::Quantized(kind) => {
                cpu.quantize(kind, |row, to| rows.fill(row, to), weight.info.rows, weight.info.cols, out);
            }
        }
        rows.end()?;
    }
    Ok(())
}

/// Rows of a weight, or of that of one expert, read by many threads; the first failure is kept for the end.
struct SourceRows<'a> {
    source: &'a WeightSource,
    info: &'a WeightInfo,
    /// The weight's first row among those of all experts.
    first: usize,
    failure: Mutex<Option<ModelError>>,
}

impl<'a> SourceRows<'a> {
    fn new(source: &'a WeightSource, info: &'a WeightInfo, expert: usize) -> SourceRows<'a> {
        SourceRows { source, info, first: expert * info.rows, failure: Mutex::new(None) }
    }

    fn fill(&self, row: usize, to: &mut [f32]) {
        if let Err(error) = self.source.fill_row_f32(self.info, self.first + row, to) {
            self.failure.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(error);
        }
    }

    fn end(self) -> Result<(), EngineError> {
        match self.failure.into_inner().unwrap_or_else(|e| e.into_inner()) {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }
}

fn fill_as<T: Element>(cpu: &mut Cpu, source: &SourceRows<'_>, layout: Layout, out: &mut [u8]) {
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    let (rows, cols) = (source.info.rows, source.info.cols);
    // Whole panels per task in both layouts; each task owns its part of the output behind its own lock.
    let parts: Vec<Mutex<&mut [T]>> = out.chunks_mut(cols * PANEL).map(Mutex::new).collect();
    cpu.parallel_for(parts.len(), &|task| {
        let mut part = parts[task].lock().unwrap_or_else(|e| e.into_inner());
        let first = task * PANEL;
        let here = PANEL.min(rows - first);
        let fill_row = |row: usize, to: &mut [T]| {
            let mut values = vec![0f32; cols];
            source.fill(first + row, &mut values);
            T::convert(&values, to);
        };
        match layout {
            Layout::Packed => pack_panels(fill_row, here, cols, &mut part),
            Layout::RowMajor => part.chunks_mut(cols).enumerate().for_each(|(row, to)| fill_row(row, to)),
        }
    });
}

/// What rounding a weight to few bits took from it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WeightError {
    /// Sum of the squares of what was lost.
    pub lost: f64,
    /// Sum of the squares of all elements.
    pub all: f64,
}

impl WeightError {
    /// Root mean square of the error over that of the weight; 0 for a weight of zeroes.
    pub fn relative(&self) -> f64 {
        if self.all == 0.0 { 0.0 } else { (self.lost / self.all).sqrt() }
    }
}

impl std::ops::AddAssign for WeightError {
    fn add_assign(&mut self, other: WeightError) {
        self.lost += other.lost;
        self.all += other.all;
    }
}

/// Compare a quantised weight with what it was made of; `None` for one that is not quantised.
pub fn error_of(
    cpu: &mut Cpu,
    source: &WeightSource,
    weight: &StoredWeight,
    bytes: &[u8],
) -> Result<Option<WeightError>, EngineError> {
    let WeightType::Quantized(kind) = weight.kind else { return Ok(None) };
    let mut total = WeightError::default();
    for (expert, bytes) in bytes.chunks(weight.bytes_of_one().max(1)).enumerate() {
        let data = match kind {
            QuantKind::Int8 => Elems::Int8(bytes),
            QuantKind::Int4 => Elems::Int4(bytes),
        };
        let source = SourceRows::new(source, &weight.info, expert);
        total += error_of_one(cpu, &source, data);
        source.end()?;
    }
    Ok(Some(total))
}

fn error_of_one(cpu: &mut Cpu, source: &SourceRows<'_>, data: Elems<'_>) -> WeightError {
    let (n, k) = (source.info.rows, source.info.cols);
    let matrix = Matrix { data, n, k, layout: Layout::Packed };
    // One sum per panel, added up in order: the figure is the same with any number of threads.
    let sums: Vec<Mutex<WeightError>> = (0..n.div_ceil(PANEL)).map(|_| Mutex::default()).collect();
    cpu.parallel_for(sums.len(), &|panel| {
        let mut sum = WeightError::default();
        let mut values = vec![0f32; k];
        for row in panel * PANEL..n.min((panel + 1) * PANEL) {
            source.fill(row, &mut values);
            for (column, &value) in values.iter().enumerate() {
                let lost = f64::from(value) - f64::from(matrix.get(row, column));
                sum += WeightError { lost: lost * lost, all: f64::from(value).powi(2) };
            }
        }
        *sums[panel].lock().unwrap_or_else(|e| e.into_inner()) = sum;
    });
    let mut total = WeightError::default();
    sums.into_iter().for_each(|sum| total += sum.into_inner().unwrap_or_else(|e| e.into_inner()));
    total
}

/// A tensor whose bytes are not those that were built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Its name.
    pub tensor: String,
    /// Checksum of what is there.
    pub found: u64,
    /// Checksum of what was built.
    pub expected: u64,
}

/// What checksums say of an engine's weights.
#[derive(Clone, Debug, Default)]
pub struct WeightCheck {
    /// Tensors that are as they were built.
    pub intact: usize,
    /// Tensors without a checksum.
    pub unchecked: usize,
    /// Tensors that are not as they were built, by name.
    pub damaged: Vec<Damage>,
    /// Bytes of all tensors with a checksum.
    pub bytes: u64,
}

impl WeightCheck {
    /// Compares the hashes of every weight's blocks.
    fn of<'a>(
        weights: impl Iterator<Item = (&'a StoredWeight, &'a [u64])>,
        checksums: &HashMap<String, u64>,
    ) -> WeightCheck {
        let mut check = WeightCheck::default();
        for (weight, blocks) in weights {
            let Some(&expected) = checksums.get(&weight.name) else {
                check.unchecked += 1;
                continue;
            };
            check.bytes += weight.bytes() as u64;
            match checksum::combine(blocks.iter().copied()) {
                found if found == expected => check.intact += 1,
                found => check.damaged.push(Damage { tensor: weight.name.clone(), found, expected }),
            }
        }
        check.damaged.sort_by(|a, b| a.tensor.cmp(&b.tensor));
        check
    }

    /// An error where something is damaged.
    fn into_result(self, path: &Path) -> Result<(), EngineError> {
        let others = self.damaged.len().saturating_sub(1);
        match self.damaged.into_iter().next() {
            Some(first) => Err(EngineError::Damaged { path: path.to_path_buf(), first, others }),
            None => Ok(()),
        }
    }
}

/// Copies a block and hashes the copy, while it is in a cache.
fn copy_and_hash(from: &[u8], to: &mut [u8]) -> u64 {
    const STEP: usize = 16 << 10;
    let mut hash = BlockHash::default();
    for (from, to) in from.chunks(STEP).zip(to.chunks_mut(STEP)) {
        let to = &mut to[..from.len()];
        to.copy_from_slice(from);
        hash.update(to);
    }
    hash.finish()
}

fn block_hashes(cpu: &mut Cpu, bytes: &[u8]) -> Vec<u64> {
    let blocks: Vec<(&[u8], AtomicU64)> = bytes.chunks(BLOCK).map(|block| (block, AtomicU64::new(0))).collect();
    cpu.parallel_for(blocks.len(), &|task| {
        let (block, hash) = &blocks[task];
        hash.store(checksum::block_hash(block), Ordering::Relaxed);
    });
    blocks.into_iter().map(|(_, hash)| hash.into_inner()).collect()
}

/// The checksum of a weight's bytes, on all threads of `cpu`.
pub fn checksum_of(cpu: &mut Cpu, bytes: &[u8]) -> u64 {
    checksum::combine(block_hashes(cpu, bytes))
}

enum Backing {
    Mapped {
        file: SafeTensors,
        /// The same in memory, once it is there.
        moved: OnceLock<Moved>,
        /// Checksum of every tensor when it was built; none in engines of before there were any.
        checksums: HashMap<String, u64>,
    },
    Owned(HashMap<WeightId, MmapMut>),
    /// Made by whoever needs them: a GPU makes its own.
    Deferred(WeightSource),
}

/// Weights that were moved from a file to memory.
struct Moved {
    memory: MmapMut,
    places: HashMap<WeightId, Range<usize>>,
}

/// What a weight is made of, for a device with memory of its own.
pub enum WeightData<'a> {
    /// Its bytes, in the type that the engine keeps it in.
    Bytes {
        /// All of it.
        bytes: &'a [u8],
        /// How its elements are ordered.
        layout: Layout,
    },
    /// Not made yet.
    Source(&'a WeightSource),
}

/// Fill `out` with a weight, row-major, in type `dtype`, on this thread.
pub fn fill_rows(source: &WeightSource, info: &WeightInfo, dtype: DType, out: &mut [u8]) -> Result<(), EngineError> {
    fn convert<T: Element>(values: &[f32], row: usize, out: &mut [u8]) {
        let out: &mut [T] = bytemuck::cast_slice_mut(out);
        T::convert(values, &mut out[row * values.len()..(row + 1) * values.len()]);
    }
    let mut values = vec![0f32; info.cols];
    for row in 0..info.experts * info.rows {
        source.fill_row_f32(info, row, &mut values)?;
        match dtype {
            DType::F32 => convert::<f32>(&values, row, out),
            DType::F16 => convert::<f16>(&values, row, out),
            DType::Bf16 => convert::<bf16>(&values, row, out),
        }
    }
    Ok(())
}

/// All weights of a model, ready for the kernels.
pub struct WeightStore {
    stored: HashMap<WeightId, StoredWeight>,
    backing: Backing,
}

impl WeightStore {
    fn by_id(weights: Vec<StoredWeight>) -> HashMap<WeightId, StoredWeight> {
        weights.into_iter().map(|weight| (weight.info.id, weight)).collect()
    }

    /// Make all weights in memory. `progress` is told the bytes done so far and answers whether to go on.
    pub fn generate(
        cpu: &mut Cpu,
        config: &ModelConfig,
        source: &WeightSource,
        build: &BuildConfig,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<WeightStore, EngineError> {
        let weights = stored_weights(config, build);
        let mut buffers = HashMap::new();
        let mut done = 0;
        for weight in &weights {
            let bytes = weight.bytes();
            let mut buffer = aligned_bytes(bytes)?;
            fill(cpu, source, weight, buffer.get_mut(..bytes).unwrap_or_default())?;
            done += bytes as u64;
            if !progress(done) {
                return Err(EngineError::Interrupted);
            }
            buffers.insert(weight.info.id, buffer);
        }
        Ok(WeightStore { stored: Self::by_id(weights), backing: Backing::Owned(buffers) })
    }

    /// Leave making the weights to the device that needs them.
    pub fn deferred(config: &ModelConfig, source: WeightSource, build: &BuildConfig) -> WeightStore {
        WeightStore { stored: Self::by_id(stored_weights(config, build)), backing: Backing::Deferred(source) }
    }

    /// What a weight is made of; `None` when the model has no such weight.
    pub fn data(&self, id: WeightId) -> Option<WeightData<'_>> {
        let weight = self.stored.get(&id)?;
        Some(match &self.backing {
            Backing::Deferred(source) => WeightData::Source(source),
            _ => WeightData::Bytes { bytes: self.bytes(weight), layout: weight.layout },
        })
    }

    /// Take the weights from an engine's file, checking that each one is what the configuration says.
    pub fn map(file: SafeTensors, config: &ModelConfig, build: &BuildConfig) -> Result<WeightStore, EngineError> {
        let weights = stored_weights(config, build);
        let refuse = |name: &str, expected: String, found: String| EngineError::Field {
            path: file.path().to_path_buf(),
            field: name.to_string(),
            expected,
            found,
        };
        let known: HashSet<&str> = weights.iter().map(|weight| weight.name.as_str()).collect();
        if let Some(extra) = file.names().find(|name| !known.contains(name)) {
            return Err(refuse(extra, "no such tensor, by the configuration".into(), "one".into()));
        }
        for weight in &weights {
            let field = |expected: String, found: String| refuse(&weight.name, expected, found);
            let TensorSpec { dtype, shape, .. } = weight.tensor();
            let want = dtype.safetensors_name();
            let Some(view) = file.get(&weight.name) else {
                return Err(field(format!("a {want} tensor"), "nothing".into()));
            };
            if view.dtype != want {
                return Err(field(format!("dtype {want}"), view.dtype.to_string()));
            }
            // The shape also tells the layouts apart, which often have the same size.
            if view.shape != shape {
                return Err(field(format!("shape {shape:?}"), format!("{:?}", view.shape)));
            }
            if view.data.as_ptr().align_offset(weight.alignment()) != 0 {
                return Err(field(format!("alignment to {} bytes", weight.alignment()), "none".into()));
            }
        }
        Ok(WeightStore {
            stored: Self::by_id(weights),
            backing: Backing::Mapped { file, moved: OnceLock::new(), checksums: HashMap::new() },
        })
    }

    /// The same with the checksums of the build, to find damage by.
    pub fn with_checksums(mut self, expected: HashMap<String, u64>) -> WeightStore {
        if let Backing::Mapped { checksums, .. } = &mut self.backing {
            *checksums = expected;
        }
        self
    }

    fn bytes(&self, weight: &StoredWeight) -> &[u8] {
        match &self.backing {
            Backing::Mapped { file, moved, .. } => match moved.get() {
                Some(moved) => {
                    moved.places.get(&weight.info.id).and_then(|place| moved.memory.get(place.clone())).unwrap_or(&[])
                }
                None => file.get(&weight.name).map_or(&[], |view| view.data),
            },
            Backing::Owned(buffers) => {
                buffers.get(&weight.info.id).and_then(|b| b.get(..weight.bytes())).unwrap_or(&[])
            }
            Backing::Deferred(_) => &[],
        }
    }

    /// A matrix, or those of all experts one after the other; `None` when the model has no such weight.
    pub fn matrix(&self, id: WeightId) -> Option<Matrix<'_>> {
        let weight = self.stored.get(&id)?;
        let bytes = self.bytes(weight);
        let data = match weight.kind {
            WeightType::Float(DType::F32) => Elems::F32(bytemuck::try_cast_slice(bytes).ok()?),
            WeightType::Float(DType::F16) => Elems::F16(bytemuck::try_cast_slice(bytes).ok()?),
            WeightType::Float(DType::Bf16) => Elems::Bf16(bytemuck::try_cast_slice(bytes).ok()?),
            WeightType::Quantized(QuantKind::Int8) => Elems::Int8(bytes),
            WeightType::Quantized(QuantKind::Int4) => Elems::Int4(bytes),
        };
        Some(Matrix { data, n: weight.info.rows, k: weight.info.cols, layout: weight.layout })
    }

    /// A norm's scale or a bias.
    pub fn vector(&self, id: WeightId) -> Option<&[f32]> {
        let weight = self.stored.get(&id).filter(|w| w.info.vector)?;
        bytemuck::try_cast_slice(self.bytes(weight)).ok()
    }

    /// Bytes of all weights.
    pub fn total_bytes(&self) -> u64 {
        self.stored.values().map(|w| self.bytes(w).len() as u64).sum()
    }

    /// Whether the weights are pages of a file.
    pub fn is_mapped(&self) -> bool {
        matches!(&self.backing, Backing::Mapped { moved, .. } if moved.get().is_none())
    }

    /// Move mapped weights to memory of their own, in huge pages where the system has them: a generation step reads all of
    /// them, and the small pages of a file hold it back where memory is fast. May be called while an engine runs: a step
    /// finds a weight either here or there, with the same bytes. Every byte is copied, so that its checksum costs little:
    /// damaged weights are an error, and stay where they are.
    pub fn move_to_memory(&self, cpu: &mut Cpu) -> Result<(), EngineError> {
        const CACHE_LINE: usize = 64;
        let Backing::Mapped { file, moved, checksums } = &self.backing else { return Ok(()) };
        if moved.get().is_some() {
            return Ok(());
        }
        let room = |weight: &StoredWeight| weight.bytes().next_multiple_of(CACHE_LINE);
        let mut memory = aligned_bytes(self.stored.values().map(room).sum())?;
        let mut places = HashMap::new();
        let (mut pieces, mut blocks) = (Vec::new(), Vec::new());
        let (mut rest, mut start): (&mut [u8], _) = (&mut memory, 0);
        for (id, weight) in &self.stored {
            let from = self.bytes(weight);
            let (here, after) = std::mem::take(&mut rest).split_at_mut(room(weight));
            rest = after;
            places.insert(*id, start..start + from.len());
            start += here.len();
            let first = pieces.len();
            pieces.extend(from.chunks(BLOCK).zip(here.chunks_mut(BLOCK)).map(|(from, to)| (from, Mutex::new((to, 0)))));
            blocks.push((weight, first..pieces.len()));
        }
        let check = !checksums.is_empty();
        cpu.parallel_for(pieces.len(), &|task| {
            let (from, to) = &pieces[task];
            let (to, hash) = &mut *to.lock().unwrap_or_else(|e| e.into_inner());
            match check {
                true => *hash = copy_and_hash(from, to),
                false => to[..from.len()].copy_from_slice(from),
            }
        });
        let hashes: Vec<u64> =
            pieces.into_iter().map(|(_, to)| to.into_inner().unwrap_or_else(|e| e.into_inner()).1).collect();
        let found = blocks.into_iter().map(|(weight, range)| (weight, hashes.get(range).unwrap_or_default()));
        WeightCheck::of(found, checksums).into_result(file.path())?;
        // Should another thread have been faster, its copy is as good.
        let _ = moved.set(Moved { memory, places });
        file.advise_unused();
        Ok(())
    }

    /// Compares every mapped weight with its checksum; `None` for weights that are not of a file.
    pub fn check(&self, cpu: &mut Cpu) -> Option<WeightCheck> {
        let Backing::Mapped { file, checksums, .. } = &self.backing else { return None };
        let mut weights: Vec<_> = self.stored.values().collect();
        weights.sort_by(|a, b| a.name.cmp(&b.name));
        let data = |weight: &StoredWeight| file.get(&weight.name).map_or(&[][..], |view| view.data);
        let hashes: Vec<Vec<u64>> = weights.iter().map(|weight| block_hashes(cpu, data(weight))).collect();
        Some(WeightCheck::of(weights.into_iter().zip(hashes.iter().map(Vec::as_slice)), checksums))
    }

    /// The file of mapped weights.
    pub fn file(&self) -> Option<&Path> {
        match &self.backing {
            Backing::Mapped { file, .. } => Some(file.path()),
            _ => None,
        }
    }

    /// Read every page of a mapped file once, so that a run does not start on a cold one.
    pub fn warm(&self, cpu: &mut Cpu) {
        if !self.is_mapped() {
            return;
        }
        let parts: Vec<&[u8]> = self.stored.values().flat_map(|w| self.bytes(w).chunks(8 << 20)).collect();
        cpu.parallel_for(parts.len(), &|task| {
            let touched = parts[task].iter().step_by(4096).fold(0u8, |sum, b| sum ^ b);
            std::hint::black_box(touched);
        });
    }
}
