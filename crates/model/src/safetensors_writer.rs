//! Writing safetensors files as a stream.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::config::DType;
use crate::error::ModelError;
use crate::safetensors_header::{MOST_HEADER_BYTES, PREFIX};

/// Tensors begin at multiples of this in the file where the format allows it: a cache line, and the widest vector.
const ALIGNMENT: u64 = 64;

/// Writes go to the file in pieces of this size.
const BUFFER_BYTES: usize = 1 << 20;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// Floats.
    Float(DType),
    /// Bytes with a meaning of their own.
    U8,
}

impl TensorType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            TensorType::Float(dtype) => dtype.bytes(),
            TensorType::U8 => 1,
        }
    }

    /// The format's name.
    pub fn safetensors_name(self) -> &'static str {
        match self {
            TensorType::Float(dtype) => dtype.safetensors_name(),
            TensorType::U8 => "U8",
        }
    }
}

impl From<DType> for TensorType {
    fn from(dtype: DType) -> TensorType {
        TensorType::Float(dtype)
    }
}

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Its name, unique in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: TensorType,
    /// Its dimensions, the slowest first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of the tensor, or `None` where that number does not fit.
    pub fn bytes(&self) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(self.dtype.bytes() as u64, |product, dim| product.checked_mul(u64::try_from(*dim).ok()?))
    }
}

/// Writes a file whose tensors are known in advance, their bytes arriving in the order of the specs.
///
/// **Placement.** The format allows no gaps between tensors, so alignment must come from their order. In the file,
/// tensors whose size is a multiple of 64 bytes come first, and all of them begin 64-byte aligned (the header is
/// padded with spaces, as the format provides). The others follow, those divisible by 32 first, then 16 and so on:
/// each begins at a multiple of the largest power of two in its own size, hence never across an element.
/// Among equals the order of the specs is kept. The caller writes in the order of the specs whatever the placement.
///
/// A writer dropped before [`SafeTensorsWriter::finish`] removes its file: a file appears whole or not at all.
#[derive(Debug)]
pub struct SafeTensorsWriter {
    path: PathBuf,
    file: File,
    /// Byte ranges in the file, in the order of the specs.
    places: Vec<(u64, u64)>,
    names: Vec<String>,
    /// The tensor being written, and how many of its bytes have arrived.
    current: usize,
    arrived: u64,
    buffer: Vec<u8>,
    finished: bool,
}

impl SafeTensorsWriter {
    /// Creates the file (an existing one is replaced) and writes its header.
    pub fn create(
        path: &Path,
        specs: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
    ) -> Result<SafeTensorsWriter, ModelError> {
        let plan = plan(specs, metadata).map_err(|problem| ModelError::safetensors(path, problem))?;
        let file = File::create(path).map_err(ModelError::io("create", path))?;
        let mut writer = SafeTensorsWriter {
            path: path.to_path_buf(),
            file,
            places: plan.places,
            names: specs.iter().map(|spec| spec.name.clone()).collect(),
            current: 0,
            arrived: 0,
            buffer: Vec::with_capacity(BUFFER_BYTES),
            finished: false,
        };
        writer.file.write_all(&plan.header).map_err(ModelError::io("write", path))?;
        writer.file.set_len(plan.file_bytes).map_err(ModelError::io("write", path))?;
        writer.enter_tensor()?;
        Ok(writer)
    }

    /// Takes the next bytes, in pieces of any size; a piece may end one tensor and begin the next.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), ModelError> {
        while !bytes.is_empty() {
            let Some((begin, end)) = self.places.get(self.current).copied() else {
                return Err(ModelError::safetensors(
                    &self.path,
                    format!("{} more bytes were written than the tensors take", bytes.len()),
                ));
            };
            let missing = end - begin - self.arrived;
            let room = BUFFER_BYTES - self.buffer.len();
            let take = bytes.len().min(room).min(usize::try_from(missing).unwrap_or(usize::MAX));
            let (now, later) = bytes.split_at(take);
            self.buffer.extend_from_slice(now);
            self.arrived += take as u64;
            bytes = later;
            if self.buffer.len() == BUFFER_BYTES {
                self.flush()?;
            }
            if self.arrived == end - begin {
                self.current += 1;
                self.enter_tensor()?;
            }
        }
        Ok(())
    }

    /// Checks that every promised byte arrived and waits until the file is on the disk.
    pub fn finish(mut self) -> Result<(), ModelError> {
        if let Some((begin, end)) = self.places.get(self.current) {
            return Err(ModelError::safetensors(
                &self.path,
                format!(
                    "tensor `{}` was promised {} bytes but {} were written",
                    self.names[self.current],
                    end - begin,
                    self.arrived
                ),
            ));
        }
        self.flush()?;
        self.file.sync_all().map_err(ModelError::io("write", &self.path))?;
        self.finished = true;
        Ok(())
    }

    /// Goes to the place of the current tensor, past those without any bytes.
    fn enter_tensor(&mut self) -> Result<(), ModelError> {
        self.arrived = 0;
        while self.places.get(self.current).is_some_and(|(begin, end)| begin == end) {
            self.current += 1;
        }
        let Some((begin, _)) = self.places.get(self.current).copied() else { return Ok(()) };
        let follows = self.current.checked_sub(1).is_some_and(|previous| self.places[previous].1 == begin);
        if !follows {
            self.flush()?;
            self.file.seek(SeekFrom::Start(begin)).map_err(ModelError::io("write", &self.path))?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), ModelError> {
        self.file.write_all(&self.buffer).map_err(ModelError::io("write", &self.path))?;
        self.buffer.clear();
        Ok(())
    }
}

impl Drop for SafeTensorsWriter {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing more can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

struct Plan {
    header: Vec<u8>,
    places: Vec<(u64, u64)>,
    file_bytes: u64,
}

fn plan(specs: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Plan, String> {
    let mut names = HashSet::new();
    let mut sizes = Vec::with_capacity(specs.len());
    for spec in specs {
        if spec.name == "__metadata__" || !names.insert(spec.name.as_str()) {
            return Err(format!("two tensors are called `{0}`, or `{0}` is a reserved name", spec.name));
        }
        let bytes =
            spec.bytes().ok_or_else(|| format!("tensor `{}` of shape {:?} is too large", spec.name, spec.shape))?;
        sizes.push(bytes);
    }

    let mut order: Vec<usize> = (0..specs.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(sizes[*i].trailing_zeros().min(ALIGNMENT.trailing_zeros())));
    let mut offsets = vec![(0u64, 0u64); specs.len()];
    let mut end = 0u64;
    for i in &order {
        let begin = end;
        end = begin.checked_add(sizes[*i]).ok_or("the tensors are too large for one file")?;
        offsets[*i] = (begin, end);
    }

    let mut members = Map::new();
    if !metadata.is_empty() {
        members.insert("__metadata__".to_string(), json!(metadata));
    }
    for i in &order {
        let (spec, (begin, end)) = (&specs[*i], offsets[*i]);
        members.insert(
            spec.name.clone(),
            json!({"dtype": spec.dtype.safetensors_name(), "shape": spec.shape, "data_offsets": [begin, end]}),
        );
    }
    let mut json = Value::Object(members).to_string().into_bytes();
    let data_start = (PREFIX + json.len() as u64).next_multiple_of(ALIGNMENT);
    if data_start - PREFIX > MOST_HEADER_BYTES {
        return Err(format!(
            "the header would have {} bytes, more than the {MOST_HEADER_BYTES} readers accept",
            json.len()
        ));
    }
    json.resize((data_start - PREFIX) as usize, b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);

    let file_bytes = data_start.checked_add(end).ok_or("the tensors are too large for one file")?;
    let places = offsets.into_iter().map(|(begin, end)| (begin + data_start, end + data_start)).collect();
    Ok(Plan { header, places, file_bytes })
}
