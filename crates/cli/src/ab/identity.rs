//! What must be the same for a comparison to go on where an earlier call stopped: the sides as they were given, and the files
//! that they consist of.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde_json::{Map, Value, json};

use super::Plan;
use super::side::Side;
use crate::shell;

/// Of a directory of a model or an engine these files count.
const OF_MODELS: [&str; 4] = ["engine", "safetensors", "gguf", "bin"];

/// The identity of a comparison, taken before its first run.
pub(super) fn of(plan: &Plan) -> Value {
    let side = |side: &Side| match side {
        Side::Command(line) => json!({"command": line}),
        Side::Strobe(s) => json!({
            "binary": s.binary.display().to_string(), "model": s.model, "build": s.build, "bench": s.bench,
            "engine_dir": s.engine_dir.as_ref().map(|dir| dir.display().to_string()),
        }),
    };
    let files: BTreeMap<String, Value> = plan
        .sides
        .iter()
        .flat_map(files_of)
        .filter_map(|path| std::path::absolute(path).ok())
        .filter(|path| !std::path::absolute(&plan.dir).is_ok_and(|own| path.starts_with(own)))
        .filter_map(|path| Some((path.display().to_string(), stamp(&path)?)))
        .collect();
    json!({
        "a": side(&plan.sides[0]), "b": side(&plan.sides[1]), "mode": plan.mode, "metric": plan.metric,
        "profile": plan.profile, "files": files,
    })
}

/// What differs between the identity that a directory holds and that of this call, in words. What an older version did not
/// keep is taken to be the same.
pub(super) fn differences(kept: &Value, now: &Value) -> Vec<String> {
    let empty = Map::new();
    let kept = kept.as_object().unwrap_or(&empty);
    let mut found = Vec::new();
    for (name, whose) in [("a", "A's "), ("b", "B's "), ("", "")] {
        let at = |all: &Value| if name.is_empty() { all.clone() } else { all[name].clone() };
        let (was, is) = (at(&Value::Object(kept.clone())), at(now));
        let keys: std::collections::BTreeSet<&String> =
            was.as_object().into_iter().chain(is.as_object()).flat_map(Map::keys).collect();
        for key in keys.into_iter().filter(|key| !["a", "b", "files"].contains(&key.as_str())) {
            let (was, is) = (was.get(key), is.get(key));
            if was != is && (was.is_some() || !name.is_empty()) {
                found.push(format!("{whose}{} was {}, now {}", key.replace('_', " "), words(was), words(is)));
            }
        }
    }
    for (path, was) in kept.get("files").and_then(Value::as_object).into_iter().flatten() {
        match stamp(Path::new(path)) {
            None => found.push(format!("{path} is gone")),
            Some(is) if is != *was => found.push(format!("{path} has changed")),
            Some(_) => {}
        }
    }
    found
}

fn words(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "not given".to_owned(),
        Some(Value::String(text)) => format!("`{text}`"),
        Some(Value::Array(list)) => {
            format!("`{}`", list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "))
        }
        Some(other) => other.to_string(),
    }
}

/// Size and time of a file.
fn stamp(path: &Path) -> Option<Value> {
    let about = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    let modified = about.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(json!({"bytes": about.len(), "modified_ns": modified.as_nanos() as u64}))
}

/// Files that a side consists of: binaries, scripts, datasets, and those of models and engines.
fn files_of(side: &Side) -> Vec<PathBuf> {
    let given: Vec<PathBuf> = match side {
        Side::Command(line) => of_command(line),
        Side::Strobe(strobe) => {
            let words = strobe.build.iter().chain(&strobe.bench).chain(&strobe.model).map(PathBuf::from);
            words.chain(strobe.engine_dir.clone()).chain([strobe.binary.clone()]).collect()
        }
    };
    given.into_iter().flat_map(|path| if path.is_dir() { of_model(&path) } else { vec![path] }).collect()
}

/// The files that the words of a command name; those that it writes to do not count.
fn of_command(line: &str) -> Vec<PathBuf> {
    let Ok(words) = shell::words(line) else { return Vec::new() };
    let mut files = Vec::new();
    let mut written = false;
    for (place, word) in words.iter().enumerate() {
        let target = std::mem::replace(&mut written, word.ends_with('>'));
        if target || word.contains('>') || word.contains("{out}") {
            continue;
        }
        if word.contains(' ') {
            files.extend(of_command(word)); // sh -c '...'
            continue;
        }
        let word = word.trim_matches(|letter| ";&|()".contains(letter));
        let value = word.split_once('=').map_or(word, |(_, value)| value);
        files.push(PathBuf::from(value));
        if place == 0 && !word.contains('/') {
            let path = std::env::var_os("PATH").unwrap_or_default();
            files.extend(std::env::split_paths(&path).map(|folder| folder.join(word)).find(|file| file.is_file()));
        }
    }
    files
}

/// Configuration and weights in a directory of a model or an engine; of other directories none.
fn of_model(dir: &Path) -> Vec<PathBuf> {
    let config = dir.join("config.json");
    if !config.is_file() {
        return Vec::new();
    }
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let weights = entries.filter(|path| path.extension().is_some_and(|e| OF_MODELS.iter().any(|known| e == *known)));
    weights.chain([config]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_a_command_reads_count_and_those_it_writes_do_not() {
        let files = of_command("python3 x/run.py --config=c.yaml 'd e' {out} > log.txt 2>>err.txt; rm f");
        let named = |name: &str| files.iter().any(|file| file == Path::new(name));
        assert!(named("x/run.py") && named("c.yaml") && named("f"), "{files:?}");
        assert!(!named("log.txt") && !named("{out}") && !named("err.txt"), "{files:?}");
    }

    #[test]
    fn differences_are_named() {
        let kept = json!({"a": {"command": "x"}, "b": {"command": "y"}, "mode": "throughput", "metric": null});
        let now =
            json!({"a": {"command": "x"}, "b": {"command": "z"}, "mode": "latency", "metric": null, "profile": "3-5"});
        assert_eq!(
            differences(&kept, &now),
            ["B's command was `y`, now `z`", "mode was `throughput`, now `latency`"],
            "older versions kept no windows"
        );
        assert!(differences(&now, &now).is_empty());
    }
}
