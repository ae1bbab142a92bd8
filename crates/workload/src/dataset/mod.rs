//! Datasets: the prompts of a benchmark and how many tokens each shall answer with.

mod error;
mod field;
mod read;
mod real;
mod synthetic;

use std::io::{self, Write};
use std::path::Path;

pub use error::DatasetError;
pub use read::read_dataset;
pub use real::{RealOutput, RealSample, read_prompt_lines, read_real_dataset};
pub use synthetic::{Lengths, NormDist, SyntheticSpec, UnifDist, synthetic};

/// What a request starts from.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Token ids, used as they are.
    Ids(Vec<u32>),
    /// Text that the model's tokenizer has yet to see.
    Text(String),
}

/// One line of a dataset.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The line's own number, by which its request can be found again in the results.
    pub task_id: i64,
    /// The prompt.
    pub prompt: Prompt,
    /// How many tokens to generate.
    pub output_tokens: u32,
}

/// Writes the samples as JSONL, one compact object per line, byte for byte as trtllm-bench does:
/// `{"task_id":0,"input_ids":[863,22056,31],"output_tokens":128}`.
pub fn write_dataset(out: &mut dyn Write, samples: &[Sample]) -> io::Result<()> {
    for sample in samples {
        write!(out, "{{\"task_id\":{},", sample.task_id)?;
        match &sample.prompt {
            Prompt::Ids(ids) => {
                out.write_all(b"\"input_ids\":[")?;
                for (i, id) in ids.iter().enumerate() {
                    let separator = if i == 0 { "" } else { "," };
                    write!(out, "{separator}{id}")?;
                }
                out.write_all(b"]")?;
            }
            Prompt::Text(text) => {
                out.write_all(b"\"prompt\":")?;
                serde_json::to_writer(&mut *out, text)?;
            }
        }
        writeln!(out, ",\"output_tokens\":{}}}", sample.output_tokens)?;
    }
    Ok(())
}

/// Checks that every token id of the samples read from `path` is below `vocab_size`. Text prompts have no ids to check.
pub fn check_ids(path: &Path, samples: &[Sample], vocab_size: u32) -> Result<(), DatasetError> {
    for (sample, entry) in samples.iter().enumerate() {
        let Prompt::Ids(ids) = &entry.prompt else {
            continue;
        };
        if let Some(position) = ids.iter().position(|&id| id >= vocab_size) {
            return Err(DatasetError::IdOutOfRange {
                place: read::place_of_sample(path, sample),
                path: path.to_path_buf(),
                task_id: entry.task_id,
                position,
                id: ids[position],
                vocab_size,
            });
        }
    }
    Ok(())
}
