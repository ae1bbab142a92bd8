//! The Chrome trace: valid JSON, exact times, slices that nest on every track.

mod common;

use proptest::prelude::*;
use serde_json::Value;
use strobe_trace::recorded::{Trace, chrome};

fn export(trace: &Trace) -> (String, Vec<Value>) {
    let mut out = Vec::new();
    chrome::write(trace, &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let root: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(root["displayTimeUnit"], "ns");
    (text, root["traceEvents"].as_array().unwrap().clone())
}

fn ns(value: &Value) -> i64 {
    (value.as_f64().unwrap() * 1e3).round() as i64
}

#[test]
fn events_of_a_small_trace() {
    let (text, events) = export(&common::small());
    // Times as exact decimal text.
    assert!(text.contains("\"ts\":-0.500,\"dur\":1.400"), "{text}");
    assert!(text.contains("\"ts\":1.000,\"dur\":4.001"), "{text}");

    let find = |name: &str| events.iter().find(|e| e["name"] == name).unwrap();
    let gemm = find("qkv_proj");
    assert_eq!((&gemm["ph"], &gemm["cat"]), (&"X".into(), &"gemm".into()));
    assert_eq!(
        gemm["args"].to_string(),
        r#"{"iter":7,"layer":2,"kernel":"gemm_packed_f32_avx512","m":3,"n":96,"bytes":4000,"GB/s":2.0,"flops":60000,"GFLOP/s":30.0}"#
    );
    // What is not known is absent.
    assert!(find("norm")["args"].get("flops").is_none());
    assert_eq!(find("thread_name")["args"]["name"], "iterations");
    assert_eq!(find("iteration 7 (decode)")["args"]["generation_tokens"], 3);
    let counters: Vec<_> = events.iter().filter(|e| e["ph"] == "C").collect();
    assert_eq!(counters.len(), 2);
    assert_eq!(counters[0]["args"]["generation"], 3);
    assert_eq!((ns(&counters[1]["ts"]), &counters[1]["args"]["generation"]), (5_500, &0.into()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn slices_nest_on_every_track(mut trace in common::any_trace()) {
        trace.iterations.clear(); // generated ones overlap each other, real ones do not
        let (_, events) = export(&trace);
        let slices: Vec<(i64, i64, i64)> = events.iter().filter(|e| e["ph"] == "X")
            .map(|e| (e["tid"].as_i64().unwrap(), ns(&e["ts"]), ns(&e["ts"]) + ns(&e["dur"]))).collect();
        prop_assert_eq!(slices.len(), trace.ops.len() + trace.ranges.len());
        for (i, a) in slices.iter().enumerate() {
            for b in slices.iter().skip(i + 1).filter(|b| b.0 == a.0) {
                let apart = b.1 >= a.2 || a.1 >= b.2;
                let inside = (a.1 <= b.1 && b.2 <= a.2) || (b.1 <= a.1 && a.2 <= b.2);
                prop_assert!(apart || inside, "{:?} and {:?}", a, b);
            }
        }
    }
}

#[test]
fn the_file_appears_whole() {
    let path = common::scratch("trace.json");
    chrome::write_file(&common::small(), &path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(serde_json::from_str::<Value>(&text).is_ok());
    let missing = common::scratch("nowhere/trace.json");
    assert!(chrome::write_file(&common::small(), &missing).is_err());
}
