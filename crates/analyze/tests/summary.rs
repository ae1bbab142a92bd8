//! What the summary calls devices and how it words an incomplete trace.

use std::path::Path;

use strobe_analyze::summary::{device_name, summary};
use strobe_analyze::{Context, Options};
use strobe_trace::{Trace, kineto};

fn read(json: &str) -> Trace {
    kineto::read(json.as_bytes(), Path::new("made.json"), &mut |_| {}).unwrap()
}

const KERNEL: &str = r#"{"ph":"X","cat":"kernel","name":"k","pid":"LABEL0","tid":7,"ts":5,"dur":3}"#;

#[test]
fn devices_of_several_ranks_in_one_file_are_told_apart() {
    let kernel = |label: &str| KERNEL.replace("LABEL", label);
    let root = |more: &str| format!(r#"{{{more}"traceEvents": [{}]}}"#, kernel(""));
    let rank = |rank: u32| root(&format!(r#""distributedInfo": {{"rank": {rank}}}, "#));
    for (json, expected) in [
        (rank(4) + &rank(2), &["rank 4, GPU 0", "rank 2, GPU 0"][..]),
        (root("") + &root(""), &["rank 0, GPU 0", "rank 1, GPU 0"]),
        (format!("[{}, {}]", kernel("[TP00] "), kernel("[TP01] ")), &["rank 0, GPU 0", "rank 1, GPU 0"]),
        (rank(4), &["GPU 0"]),
    ] {
        let trace = read(&json);
        let context = Context::new(&trace, &Options::default());
        let names: Vec<_> = (0..trace.devices.len() as u32).map(|device| device_name(&context, device)).collect();
        assert_eq!(names, expected, "{json}");
    }
}

#[test]
fn only_a_run_of_strobe_is_called_interrupted() {
    let mut trace = read(&format!(r#"{{"traceEvents": [{KERNEL}, {{"ph":"X","#));
    let says = |trace: &Trace, words: &str| {
        let report = summary(&Context::new(trace, &Options::default()));
        report.notes.iter().any(|note| note.contains(words))
    };
    assert!(says(&trace, "The file is cut or damaged") && !says(&trace, "interrupted"));
    trace.meta.producer = "strobe 0.1.0".to_owned();
    assert!(says(&trace, "The run was interrupted"));
}
