//! The tensors of a Hugging Face model directory, in one file or many.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{ModelError, excerpt};
use crate::safetensors::{SafeTensors, TensorView};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All tensors of a model directory, memory-mapped.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<SafeTensors>,
    /// Which file a tensor is in.
    file_of: HashMap<String, usize>,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names, or else the only
    /// `*.safetensors` there is.
    pub fn open(dir: &Path) -> Result<Checkpoint, ModelError> {
        if !dir.is_dir() {
            let problem = "not a directory; expected a model directory with config.json and *.safetensors";
            return Err(ModelError::checkpoint(dir, problem));
        }
        let single = dir.join(SINGLE);
        let index = dir.join(INDEX);
        let checkpoint = if single.exists() {
            Checkpoint::from_file(dir, &single)?
        } else if index.exists() {
            Checkpoint::from_index(dir, &index)?
        } else {
            Checkpoint::from_file(dir, &only_file(dir)?)?
        };
        checkpoint.files.iter().for_each(SafeTensors::advise_sequential);
        Ok(checkpoint)
    }

    /// A tensor by its name in the checkpoint.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.files.get(*self.file_of.get(name)?)?.get(name)
    }

    /// Size of all files.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(SafeTensors::file_bytes).sum()
    }

    /// The model directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The names of all tensors, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.file_of.keys().map(String::as_str)
    }

    /// What is in it, for the error that something is not.
    pub(crate) fn summary(&self) -> String {
        let first = self.names().min().unwrap_or("none");
        format!("{} tensors in {} file(s), such as `{}`", self.file_of.len(), self.files.len(), excerpt(first))
    }

    fn from_file(dir: &Path, path: &Path) -> Result<Checkpoint, ModelError> {
        let file = SafeTensors::open(path)?;
        let file_of = file.names().map(|name| (name.to_string(), 0)).collect();
        Ok(Checkpoint { dir: dir.to_path_buf(), files: vec![file], file_of })
    }

    fn from_index(dir: &Path, index_path: &Path) -> Result<Checkpoint, ModelError> {
        let index = read_index(index_path)?;
        let mut checkpoint = Checkpoint { dir: dir.to_path_buf(), files: Vec::new(), file_of: HashMap::new() };
        let mut shards: HashMap<&str, usize> = HashMap::new();
        for (tensor, shard) in &index.weight_map {
            let position = match shards.get(shard.as_str()) {
                Some(position) => *position,
                None => {
                    checkpoint.files.push(open_shard(dir, index_path, shard)?);
                    shards.insert(shard, checkpoint.files.len() - 1);
                    checkpoint.files.len() - 1
                }
            };
            if checkpoint.files[position].get(tensor).is_none() {
                return Err(ModelError::Tensor {
                    path: dir.join(shard),
                    tensor: tensor.clone(),
                    problem: format!("{INDEX} says it is in this file, but it is not; download both again"),
                });
            }
            checkpoint.file_of.insert(tensor.clone(), position);
        }
        Ok(checkpoint)
    }
}

/// The part of an index that matters.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn read_index(path: &Path) -> Result<Index, ModelError> {
    let bytes = std::fs::read(path).map_err(ModelError::io("read", path))?;
    serde_json::from_slice(&bytes).map_err(|e| ModelError::Json {
        path: path.to_path_buf(),
        line: e.line(),
        problem: format!("not a safetensors index with a `weight_map`: {}", excerpt(&e.to_string())),
    })
}

fn open_shard(dir: &Path, index: &Path, shard: &str) -> Result<SafeTensors, ModelError> {
    // An index is data from elsewhere: it may name files beside it and no others.
    if Path::new(shard).file_name() != Some(shard.as_ref()) {
        let problem = format!("`weight_map` names the file `{}`, which is not in this directory", excerpt(shard));
        return Err(ModelError::checkpoint(index, problem));
    }
    let path = dir.join(shard);
    if !path.exists() {
        let problem = format!("shard `{shard}`, named in {INDEX}, is missing; download it into this directory");
        return Err(ModelError::checkpoint(dir, problem));
    }
    SafeTensors::open(&path)
}

fn only_file(dir: &Path) -> Result<PathBuf, ModelError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(ModelError::io("read", dir))? {
        let path = entry.map_err(ModelError::io("read", dir))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            found.push(path);
        }
    }
    found.sort();
    match &found[..] {
        [] => Err(ModelError::checkpoint(
            dir,
            "no *.safetensors in it; other checkpoint formats must first be converted (save_pretrained in transformers)",
        )),
        [path] => Ok(path.clone()),
        many => Err(ModelError::checkpoint(
            dir,
            format!(
                "{} *.safetensors but no {INDEX} that says which tensors are where; download it as well",
                many.len()
            ),
        )),
    }
}
