//! Shared by the integration tests: small records and throw-away files.

// Each test binary uses its own part of this.
#![allow(dead_code)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, process};

use strobe_workload::RequestRecord;

pub(crate) const MS: u64 = 1_000_000;

/// A completed request; all times in milliseconds.
pub(crate) fn record(id: u64, inputs: u32, arrival: u64, scheduled: u64, tokens: &[u64]) -> RequestRecord {
    RequestRecord {
        id,
        task_id: id as i64,
        num_input_tokens: inputs,
        arrival_ns: arrival * MS,
        sent_ns: arrival * MS,
        queued_ns: arrival * MS,
        first_scheduled_ns: Some(scheduled * MS),
        token_times_ns: tokens.iter().map(|t| t * MS).collect(),
        output_ids: tokens.iter().map(|&t| t as u32).collect(),
        finish_reason: "length".to_string(),
        error: None,
        iterations: None,
        preemptions: 0,
        reused_tokens: 0,
    }
}

/// Three requests small enough to compute every number by hand.
pub(crate) fn three_requests() -> Vec<RequestRecord> {
    vec![record(0, 4, 0, 0, &[10, 20, 30]), record(1, 6, 0, 10, &[20, 40]), record(2, 2, 10, 20, &[30, 35, 40, 50])]
}

/// A file that goes away with the value.
pub(crate) struct TempFile(pub PathBuf);

impl TempFile {
    pub(crate) fn new(content: &[u8]) -> TempFile {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dataset-{}-{number}.jsonl", process::id());
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::write(&path, content).unwrap();
        TempFile(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
