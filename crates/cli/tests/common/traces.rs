//! Traces to analyse: the ones in the repository, and those of the folder that `STROBE_TEST_DATA` names.

use std::path::{Path, PathBuf};

/// An Nsight Systems export with threads, graphs recorded node by node, several domains, marks and unclosed ranges.
pub(crate) const MIXED_NODE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../analyze/tests/data/nsys/mixed_node.sqlite");
/// The same program with graphs recorded whole.
pub(crate) const MIXED_GRAPH: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../analyze/tests/data/nsys/mixed_graph.sqlite");
/// A PyTorch profiler trace with graph replays.
pub(crate) const KINETO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/kineto_graph.json.gz");

/// A file of the data folder; `None`, with a word about it, where there is none.
pub(crate) fn real(name: &str) -> Option<PathBuf> {
    let Some(folder) = std::env::var_os("STROBE_TEST_DATA") else {
        eprintln!("skipped: STROBE_TEST_DATA is not set");
        return None;
    };
    Some(Path::new(&folder).join("traces").join(name))
}

/// Every trace in the repository and in the data folder.
pub(crate) fn all() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = [MIXED_NODE, MIXED_GRAPH, KINETO].map(PathBuf::from).to_vec();
    let mut folders: Vec<PathBuf> = real("").into_iter().collect();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.to_string_lossy();
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".sqlite") || name.ends_with(".json.gz") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}
