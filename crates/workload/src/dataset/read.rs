//! Reads trtllm-bench's datasets: JSONL, and the older form that is one JSON document.

use std::path::Path;

use serde_json::{Map, Value};

use super::field::{Place, STANDARD_INPUT, describe, lines, read_bytes};
use super::{DatasetError, Prompt, Sample};

/// Reads a dataset.
///
/// JSONL: one object per line with `task_id`, `output_tokens` and one of `input_ids`, its alias
/// `logits`, or `prompt` (ids win). Blank lines and unknown keys are passed over.
///
/// The older form is one document, `{"metadata":{..},"samples":[{"input_ids","output_len",..}]}`.
/// Its `task_id` names a LoRA adapter, so samples are numbered by their place instead.
pub fn read_dataset(path: &Path) -> Result<Vec<Sample>, DatasetError> {
    let bytes = read_bytes(path)?;
    let samples = match single_document(path, &bytes)? {
        Some(document) => document_samples(path, &document)?,
        None => lines(path, &bytes)
            .map(|line| {
                let (number, text) = line?;
                let place = Place::line(path, number);
                let value: Value = serde_json::from_str(text).map_err(|e| place.json(&e))?;
                line_sample(&place, place.object(&value)?)
            })
            .collect::<Result<_, _>>()?,
    };
    if samples.is_empty() {
        return Err(DatasetError::Empty { path: path.to_path_buf() });
    }
    Ok(samples)
}

/// Where the sample with this index stands in the file. Only errors ask, so the file is looked at again instead of
/// keeping a line number for every sample.
pub(super) fn place_of_sample(path: &Path, index: usize) -> String {
    let whole = || format!("sample {index}");
    if path.as_os_str() == STANDARD_INPUT {
        return whole();
    }
    let Ok(bytes) = read_bytes(path) else { return whole() };
    if !matches!(single_document(path, &bytes), Ok(None)) {
        return whole();
    }
    match lines(path, &bytes).nth(index) {
        Some(Ok((number, _))) => format!("line {number}"),
        _ => whole(),
    }
}

/// The whole file as one document, if that is what it is: an object with `samples`.
fn single_document(path: &Path, bytes: &[u8]) -> Result<Option<Value>, DatasetError> {
    let Some(Ok((_, first_line))) = lines(path, bytes).next() else {
        return Ok(None);
    };
    match serde_json::from_str::<Value>(first_line) {
        Ok(value) if value.get("samples").is_none() => return Ok(None),
        // A document on one line, or the opening of one spread over several.
        Ok(_) | Err(_) => {}
    }
    match serde_json::from_slice::<Value>(bytes) {
        Ok(value) if value.get("samples").is_some() => Ok(Some(value)),
        Ok(_) => Ok(None),
        Err(error) if mentions_samples(bytes) => Err(DatasetError::Json {
            path: path.to_path_buf(),
            place: format!("line {}", error.line().max(1)),
            detail: format!("{error} (read as one document with \"samples\")"),
        }),
        Err(_) => Ok(None),
    }
}

/// Whether a file that is not valid JSON was meant as a single document.
fn mentions_samples(bytes: &[u8]) -> bool {
    const KEY: &[u8] = b"\"samples\"";
    bytes.windows(KEY.len()).any(|window| window == KEY)
}

fn line_sample(place: &Place, object: &Map<String, Value>) -> Result<Sample, DatasetError> {
    let task_id = place.integer(object, "task_id", i64::MIN, i64::MAX, "an integer")?;
    Ok(Sample { task_id, prompt: prompt(place, object)?, output_tokens: token_count(place, object, "output_tokens")? })
}

fn document_samples(path: &Path, document: &Value) -> Result<Vec<Sample>, DatasetError> {
    let whole = Place { path, place: "the document".to_string() };
    let samples = match document.get("samples") {
        Some(Value::Array(samples)) => samples,
        other => {
            let found = other.map_or("no such field".to_string(), describe);
            return Err(whole.field("samples", "a list of objects", found));
        }
    };
    samples
        .iter()
        .enumerate()
        .map(|(index, value)| {
            let place = Place { path, place: format!("samples[{index}]") };
            let object = place.object(value)?;
            let prompt = prompt(&place, object)?;
            check_stated_length(&place, object, &prompt)?;
            Ok(Sample { task_id: index as i64, prompt, output_tokens: token_count(&place, object, "output_len")? })
        })
        .collect()
}

/// `input_len` repeats what the ids already say; a file where they differ was damaged.
fn check_stated_length(place: &Place, object: &Map<String, Value>, prompt: &Prompt) -> Result<(), DatasetError> {
    match (object.get("input_len"), prompt) {
        (Some(stated), Prompt::Ids(ids)) if stated.as_u64() != Some(ids.len() as u64) => {
            let expected = format!("{}, the length of input_ids", ids.len());
            Err(place.field("input_len", expected, describe(stated)))
        }
        _ => Ok(()),
    }
}

fn token_count(place: &Place, object: &Map<String, Value>, field: &str) -> Result<u32, DatasetError> {
    const EXPECTED: &str = "an integer from 1 to 4294967295";
    let count = place.integer(object, field, 1, i64::from(u32::MAX), EXPECTED)?;
    u32::try_from(count).map_err(|_| place.field(field, EXPECTED, count.to_string()))
}

fn prompt(place: &Place, object: &Map<String, Value>) -> Result<Prompt, DatasetError> {
    // As in trtllm-bench, a null field is one that is not there.
    let given = |field: &'static str| {
        let value = object.get(field).filter(|value| !value.is_null())?;
        Some((field, value))
    };
    if let Some((field, value)) = given("input_ids").or_else(|| given("logits")) {
        return token_ids(place, field, value).map(Prompt::Ids);
    }
    match given("prompt") {
        Some((field, value)) => place.text(value, field).map(Prompt::Text),
        None => Err(place.field("input_ids", "a list of token ids (or a text in \"prompt\")", "neither")),
    }
}

fn token_ids(place: &Place, field: &str, value: &Value) -> Result<Vec<u32>, DatasetError> {
    let items = match value {
        Value::Array(items) if !items.is_empty() => items,
        other => {
            let expected = "a list of at least one token id";
            return Err(place.field(field, expected, describe(other)));
        }
    };
    items
        .iter()
        .enumerate()
        .map(|(i, item)| {
            let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| {
                let expected = "a token id, an integer from 0 to 4294967295";
                place.field(format!("{field}[{i}]"), expected, describe(item))
            })
        })
        .collect()
}
