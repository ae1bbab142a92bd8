//! Reading and writing safetensors files.
//!
//! The reader is strobe's own for its error texts: whatever is wrong with a file is found when it is opened and said
//! in one line. The writer is strobe's own because it streams, and places tensors where a memory map can use them
//! (see [`SafeTensorsWriter`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

pub use crate::safetensors_writer::{SafeTensorsWriter, TensorSpec, TensorType};

use crate::error::ModelError;
use crate::safetensors_header::{self as header, Header, PREFIX};

/// One safetensors file, memory-mapped and completely checked.
///
/// The file must not be cut short while it is mapped: the operating system would stop the program at the next access.
#[derive(Debug)]
pub struct SafeTensors {
    path: PathBuf,
    map: Mmap,
    header: Header,
    /// Where the data section begins in the file.
    data_start: usize,
}

/// A tensor inside a mapped file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorView<'a> {
    /// The format's name of the element type: `F32`, `BF16`, `F16`, ...
    pub dtype: &'a str,
    /// Its dimensions, the slowest first.
    pub shape: &'a [usize],
    /// Its elements, little-endian.
    pub data: &'a [u8],
}

impl SafeTensors {
    /// Maps a file and checks all of its header: lengths, offsets, shapes and types, overlaps and holes.
    pub fn open(path: &Path) -> Result<SafeTensors, ModelError> {
        let file = File::open(path).map_err(ModelError::io("open", path))?;
        let found = file.metadata().map_err(ModelError::io("read", path))?;
        if !found.is_file() {
            return Err(ModelError::safetensors(path, "not a regular file; expected a safetensors file"));
        }
        // SAFETY: the map is read-only and private to this value. That nobody shortens the file meanwhile is a
        // documented condition; content that changes only changes numbers, for the header is parsed once.
        let map = unsafe { Mmap::map(&file) }.map_err(ModelError::io("map", path))?;
        let (header, data_start) = read_header(&map).map_err(|problem| ModelError::safetensors(path, problem))?;
        Ok(SafeTensors { path: path.to_path_buf(), map, header, data_start })
    }

    /// A tensor by name.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let (_, entry) = self.header.entries.get(*self.header.index.get(name)?)?;
        let data = self.map.get(self.data_start..)?.get(entry.begin..entry.end)?;
        Some(TensorView { dtype: &entry.dtype, shape: &entry.shape, data })
    }

    /// The names of all tensors, in the order of the header.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.entries.iter().map(|(name, _)| name.as_str())
    }

    /// The free-form texts stored with the tensors.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size.
    pub fn file_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Tells the system that the file will be read from front to back once, as a conversion does.
    ///
    /// Advice only: where the system does not take it, reading is merely slower.
    pub fn advise_sequential(&self) {
        #[cfg(unix)]
        let _ = self.map.advise(memmap2::Advice::Sequential);
    }

    /// Tells the system that the file's pages are not needed for now; they can be read again all the same.
    pub fn advise_unused(&self) {
        // SAFETY: the map is a read-only one of a file, so that dropped pages come back with the file's content.
        #[cfg(unix)]
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }

    /// Tells the system that all of the file will be needed soon, so that it reads ahead while the caller goes on.
    pub fn advise_will_need(&self) {
        #[cfg(unix)]
        let _ = self.map.advise(memmap2::Advice::WillNeed);
    }
}

fn read_header(file: &[u8]) -> Result<(Header, usize), String> {
    let file_bytes = file.len() as u64;
    let header_bytes = header::header_bytes(file, file_bytes)?;
    let data_start = PREFIX + header_bytes;
    let (head, data) = file
        .split_at_checked(data_start as usize)
        .ok_or_else(|| format!("truncated: the header ends at {data_start} but the file at {file_bytes}"))?;
    let json = head.get(PREFIX as usize..).unwrap_or_default();
    let header = header::parse(json, data_start, data.len() as u64)?;
    Ok((header, data_start as usize))
}
