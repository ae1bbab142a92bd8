//! Reads a local file of real prompts, JSONL or one prompt a line, to be tokenized by the caller.

use std::path::Path;

use serde_json::Value;

use super::DatasetError;
use super::field::{Place, describe, lines, read_bytes};

/// One prompt of a real dataset.
#[derive(Clone, Debug, PartialEq)]
pub struct RealSample {
    /// The prompt's text.
    pub prompt: String,
    /// What says how long the answer shall be; none when no output key was asked for.
    pub output: Option<RealOutput>,
    /// The line it stood on, from 1.
    pub line: usize,
}

/// What a real dataset says about an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum RealOutput {
    /// A reference answer: its token count is the output length.
    Text(String),
    /// The output length itself.
    Tokens(u32),
}

/// Reads a text file with one prompt a line; blank lines are left out.
pub fn read_prompt_lines(path: &Path) -> Result<Vec<RealSample>, DatasetError> {
    let bytes = read_bytes(path)?;
    let sample = |line: Result<(usize, &str), DatasetError>| {
        line.map(|(line, text)| RealSample { prompt: text.to_owned(), output: None, line })
    };
    let samples = lines(path, &bytes).map(sample).collect::<Result<Vec<_>, DatasetError>>()?;
    if samples.is_empty() {
        return Err(DatasetError::Empty { path: path.to_path_buf() });
    }
    Ok(samples)
}

/// Reads the prompts under `prompt_key`, and the answers (or their lengths) under `output_key`.
pub fn read_real_dataset(
    path: &Path,
    prompt_key: &str,
    output_key: Option<&str>,
) -> Result<Vec<RealSample>, DatasetError> {
    let bytes = read_bytes(path)?;
    let samples = lines(path, &bytes)
        .map(|line| {
            let (line, text) = line?;
            let place = Place::line(path, line);
            let value: Value = serde_json::from_str(text).map_err(|e| place.json(&e))?;
            let object = place.object(&value)?;
            let get = |key: &str| {
                object.get(key).ok_or_else(|| {
                    let keys: Vec<String> = object.keys().map(|k| k.escape_debug().to_string()).collect();
                    let found = format!("no such field (the line has: {})", keys.join(", "));
                    place.field(key, "a field of that name", found)
                })
            };
            let prompt = place.text(get(prompt_key)?, prompt_key)?;
            let output = match output_key {
                Some(key) => Some(output(&place, key, get(key)?)?),
                None => None,
            };
            Ok(RealSample { prompt, output, line })
        })
        .collect::<Result<Vec<_>, DatasetError>>()?;
    if samples.is_empty() {
        return Err(DatasetError::Empty { path: path.to_path_buf() });
    }
    Ok(samples)
}

fn output(place: &Place, key: &str, value: &Value) -> Result<RealOutput, DatasetError> {
    const EXPECTED: &str = "a reference answer (text) or a token count of at least 1";
    let tokens = value.as_u64().and_then(|n| u32::try_from(n).ok());
    match (value, tokens) {
        (Value::String(text), _) if !text.is_empty() => Ok(RealOutput::Text(text.clone())),
        (Value::Number(_), Some(tokens)) if tokens > 0 => Ok(RealOutput::Tokens(tokens)),
        _ => Err(place.field(key, EXPECTED, describe(value))),
    }
}
