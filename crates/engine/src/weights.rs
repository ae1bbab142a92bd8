//! Weights as the kernels want them: converted, laid out, and either in memory or mapped from an engine's file.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use memmap2::MmapMut;
use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use strobe_kernels_cpu::{Cpu, Elems, Layout, Matrix, PANEL, pack_panels, packed_len};
use strobe_model::{DType, ModelConfig, ModelError, SafeTensors, WeightId, WeightInfo, WeightSource, weight_list};

use crate::error::EngineError;

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

/// Layout of a weight in an engine: matrices follow the GEMM plugin, the embedding table is looked up by row.
pub fn layout_of(info: &WeightInfo, gemm_plugin: bool) -> Layout {
    if gemm_plugin && !info.vector && info.id != WeightId::Embed { Layout::Packed } else { Layout::RowMajor }
}

/// Type of a weight in an engine: vectors stay in f32.
pub fn dtype_of(info: &WeightInfo, dtype: DType) -> DType {
    if info.vector { DType::F32 } else { dtype }
}

/// Elements of a weight in its layout.
pub fn stored_len(info: &WeightInfo, layout: Layout) -> usize {
    match layout {
        Layout::Packed => packed_len(info.rows, info.cols),
        Layout::RowMajor => info.rows * info.cols,
    }
}

/// Shape of a weight in its layout, as an engine's file names it.
pub fn stored_shape(info: &WeightInfo, layout: Layout) -> Vec<usize> {
    match layout {
        Layout::Packed => vec![info.rows.div_ceil(PANEL), info.cols, PANEL],
        Layout::RowMajor if info.vector => vec![info.cols],
        Layout::RowMajor => vec![info.rows, info.cols],
    }
}

/// Bytes of all weights of a model in an engine.
pub fn engine_bytes(config: &ModelConfig, dtype: DType, gemm_plugin: bool) -> u64 {
    let bytes = |info: &WeightInfo| stored_len(info, layout_of(info, gemm_plugin)) * dtype_of(info, dtype).bytes();
    weight_list(config).iter().map(|info| bytes(info) as u64).sum()
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

/// Fill `out` with a weight in the given type and layout, on all threads of `cpu`.
pub fn fill(
    cpu: &mut Cpu,
    source: &WeightSource,
    info: &WeightInfo,
    dtype: DType,
    layout: Layout,
    out: &mut [u8],
) -> Result<(), EngineError> {
    match dtype {
        DType::F32 => fill_as::<f32>(cpu, source, info, layout, out),
        DType::F16 => fill_as::<f16>(cpu, source, info, layout, out),
        DType::Bf16 => fill_as::<bf16>(cpu, source, info, layout, out),
    }
}

fn fill_as<T: Element>(
    cpu: &mut Cpu,
    source: &WeightSource,
    info: &WeightInfo,
    layout: Layout,
    out: &mut [u8],
) -> Result<(), EngineError> {
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    let (rows, cols) = (info.rows, info.cols);
    // Whole panels per task in both layouts; each task owns its part of the output behind its own lock.
    let parts: Vec<Mutex<&mut [T]>> = out.chunks_mut(cols * PANEL).map(Mutex::new).collect();
    let failure: Mutex<Option<ModelError>> = Mutex::new(None);
    cpu.parallel_for(parts.len(), &|task| {
        let mut part = parts[task].lock().unwrap_or_else(|e| e.into_inner());
        let first = task * PANEL;
        let here = PANEL.min(rows - first);
        let fill_row = |row: usize, to: &mut [T]| {
            let mut values = vec![0f32; cols];
            match source.fill_row_f32(info, first + row, &mut values) {
                Ok(()) => T::convert(&values, to),
                Err(error) => *failure.lock().unwrap_or_else(|e| e.into_inner()) = Some(error),
            }
        };
        match layout {
            Layout::Packed => pack_panels(fill_row, here, cols, &mut part),
            Layout::RowMajor => part.chunks_mut(cols).enumerate().for_each(|(row, to)| fill_row(row, to)),
        }
    });
    match failure.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

enum Backing {
    Mapped(SafeTensors),
    Owned(HashMap<WeightId, MmapMut>),
    /// Made by whoever needs them: a GPU makes its own.
    Deferred(WeightSource),
}

/// What a weight is made of, for a device with memory of its own.
pub enum WeightData<'a> {
    /// Its bytes, in the type that [`dtype_of`] says.
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
    for row in 0..info.rows {
        source.fill_row_f32(info, row, &mut values)?;
        match dtype {
            DType::F32 => convert::<f32>(&values, row, out),
            DType::F16 => convert::<f16>(&values, row, out),
            DType::Bf16 => convert::<bf16>(&values, row, out),
        }
    }
    Ok(())
}

#[derive(Clone)]
struct Stored {
    name: String,
    info: WeightInfo,
    dtype: DType,
    layout: Layout,
}

/// All weights of a model, ready for the kernels.
pub struct WeightStore {
    stored: HashMap<WeightId, Stored>,
    backing: Backing,
}

impl WeightStore {
    fn stored(config: &ModelConfig, dtype: DType, gemm_plugin: bool) -> HashMap<WeightId, Stored> {
        let entry = |info: WeightInfo| {
            let (layout, dtype) = (layout_of(&info, gemm_plugin), dtype_of(&info, dtype));
            (info.id, Stored { name: info.id.name(), info, dtype, layout })
        };
        weight_list(config).into_iter().map(entry).collect()
    }

    /// Make all weights in memory. `progress` is told the bytes done so far and answers whether to go on.
    pub fn generate(
        cpu: &mut Cpu,
        config: &ModelConfig,
        source: &WeightSource,
        dtype: DType,
        gemm_plugin: bool,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<WeightStore, EngineError> {
        let stored = Self::stored(config, dtype, gemm_plugin);
        let mut buffers = HashMap::new();
        let mut done = 0;
        for info in weight_list(config) {
            let (layout, dtype) = (layout_of(&info, gemm_plugin), dtype_of(&info, dtype));
            let bytes = stored_len(&info, layout) * dtype.bytes();
            let mut buffer = aligned_bytes(bytes)?;
            fill(cpu, source, &info, dtype, layout, buffer.get_mut(..bytes).unwrap_or_default())?;
            done += bytes as u64;
            if !progress(done) {
                return Err(EngineError::Interrupted);
            }
            buffers.insert(info.id, buffer);
        }
        Ok(WeightStore { stored, backing: Backing::Owned(buffers) })
    }

    /// Leave making the weights to the device that needs them.
    pub fn deferred(config: &ModelConfig, source: WeightSource, dtype: DType, gemm_plugin: bool) -> WeightStore {
        WeightStore { stored: Self::stored(config, dtype, gemm_plugin), backing: Backing::Deferred(source) }
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
    pub fn map(
        file: SafeTensors,
        config: &ModelConfig,
        dtype: DType,
        gemm_plugin: bool,
    ) -> Result<WeightStore, EngineError> {
        let stored = Self::stored(config, dtype, gemm_plugin);
        let refuse = |name: &str, expected: String, found: String| EngineError::Field {
            path: file.path().to_path_buf(),
            field: name.to_string(),
            expected,
            found,
        };
        let known: HashSet<&str> = stored.values().map(|weight| weight.name.as_str()).collect();
        if let Some(extra) = file.names().find(|name| !known.contains(name)) {
            return Err(refuse(extra, "no such tensor, by the configuration".into(), "one".into()));
        }
        for weight in weight_list(config).iter().filter_map(|info| stored.get(&info.id)) {
            let field = |expected: String, found: String| refuse(&weight.name, expected, found);
            let want = weight.dtype.safetensors_name();
            let Some(view) = file.get(&weight.name) else {
                return Err(field(format!("a {want} tensor"), "nothing".into()));
            };
            if view.dtype != want {
                return Err(field(format!("dtype {want}"), view.dtype.to_string()));
            }
            // The shape also tells the layouts apart, which often have the same size.
            let shape = stored_shape(&weight.info, weight.layout);
            if view.shape != shape {
                return Err(field(format!("shape {shape:?}"), format!("{:?}", view.shape)));
            }
            if view.data.as_ptr().align_offset(weight.dtype.bytes()) != 0 {
                return Err(field(format!("alignment to {} bytes", weight.dtype.bytes()), "none".into()));
            }
        }
        Ok(WeightStore { stored, backing: Backing::Mapped(file) })
    }

    fn bytes(&self, weight: &Stored) -> &[u8] {
        match &self.backing {
            Backing::Mapped(file) => file.get(&weight.name).map_or(&[], |view| view.data),
            Backing::Owned(buffers) => {
                let len = stored_len(&weight.info, weight.layout) * weight.dtype.bytes();
                buffers.get(&weight.info.id).and_then(|b| b.get(..len)).unwrap_or(&[])
            }
            Backing::Deferred(_) => &[],
        }
    }

    /// A matrix; `None` when the model has no such weight.
    pub fn matrix(&self, id: WeightId) -> Option<Matrix<'_>> {
        let weight = self.stored.get(&id)?;
        let bytes = self.bytes(weight);
        let data = match weight.dtype {
            DType::F32 => Elems::F32(bytemuck::try_cast_slice(bytes).ok()?),
            DType::F16 => Elems::F16(bytemuck::try_cast_slice(bytes).ok()?),
            DType::Bf16 => Elems::Bf16(bytemuck::try_cast_slice(bytes).ok()?),
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
        matches!(self.backing, Backing::Mapped(_))
    }

    /// The same weights in memory of their own, in huge pages where the system has them: a generation step reads all
    /// of them, and where memory is fast the small pages of a file hold it back (58 instead of 47 GB/s on a Zen 4).
    pub fn copied(&self, cpu: &mut Cpu) -> Result<WeightStore, EngineError> {
        const PIECE: usize = 4 << 20;
        let mut buffers = HashMap::new();
        let mut stored = HashMap::new();
        for (id, weight) in &self.stored {
            let from = self.bytes(weight);
            let mut buffer = aligned_bytes(from.len())?;
            let pieces: Vec<Mutex<&mut [u8]>> =
                buffer.get_mut(..from.len()).unwrap_or_default().chunks_mut(PIECE).map(Mutex::new).collect();
            cpu.parallel_for(pieces.len(), &|task| {
                let mut to = pieces[task].lock().unwrap_or_else(|e| e.into_inner());
                let start = task * PIECE;
                let end = start + to.len();
                to.copy_from_slice(&from[start..end]);
            });
            drop(pieces);
            buffers.insert(*id, buffer);
            stored.insert(*id, weight.clone());
        }
        Ok(WeightStore { stored, backing: Backing::Owned(buffers) })
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
