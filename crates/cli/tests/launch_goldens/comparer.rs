//! Mistakes of a host, as they show in a log: each is found and told.

use super::compare::{Intended, compare};
use super::golden::Golden;
use super::log::Log;

/// A start with a GEMM that is timed, a graph and two steps.
const LOG: &str = "\
alloc b0 4096
alloc b1 4096
alloc b2 512
alloc h0 256
htod b0 64 data=00000000000000aa
event e0 timed
event e1 timed
record e0
launch skinny8_bf16 132x1x1 256 0 | { b0 b1 16 2048 }
record e1
wait e1
elapsed e0 e1
event e2 plain
launch skinny8_bf16 132x1x1 256 0 | { b0 b1 16 2048 }
capture
launch rms_norm_bf16 16x1x1 256 0 overlap | b0 b2 b1 16 2048
launch skinny8_bf16 132x1x1 256 98304 overlap | { b1 b0+128 16 2048 }
launch skinny8_bf16 132x1x1 256 98304 overlap | { b0 b1 16 5632 }
captured g0 3
instantiate g0
upload g0
sync stream
launch copy_inputs 1x1x1 128 0 | h0 b2 16 data=00000000000000bb
launch rms_norm_bf16 40x1x1 256 0 overlap | b0 b2 b1 40 2048
launch gemm_128x128_bf16 132x1x1 384 229376 overlap cluster 2 | { b1 2048 } { b0 5632 } 40
launch argmax_tiles 1x1x1 256 0 overlap | b1 8 1 b2 h0+64
record e2
launch copy_inputs 1x1x1 128 0 | h0 b2 16 data=00000000000000cc
replay g0
record e2
wait e2
";

fn golden(text: &str) -> Golden {
    let steps = ["step 0: 1 prefill of 40 tokens".to_string(), "step 1: 4 decode".to_string()];
    let keep = |name: &str| !name.starts_with("choice") && name != "step 1: 4 decode";
    Golden::of(&Log::read(text), "strobe", Vec::new(), &steps, keep)
}

fn report(from: &str, to: &str) -> Option<String> {
    assert_eq!(LOG.matches(from).count(), 1, "{from}");
    // Through the file, as goldens are.
    let old = Golden::read(&golden(LOG).write("a command")).unwrap();
    compare(&old, &golden(&LOG.replace(from, to)), Vec::new())
}

#[track_caller]
fn told(from: &str, to: &str, parts: &[&str]) {
    let report = report(from, to).unwrap_or_else(|| panic!("not noticed: {to}"));
    for part in parts {
        assert!(report.contains(part), "`{part}` is not in\n{report}");
    }
}

#[test]
fn equal_logs_are_equal() {
    assert_eq!(report("sync stream", "sync stream"), None);
}

#[test]
fn memory_may_be_taken_in_any_order() {
    // Other numbers for the same buffers, in every line.
    let moved = LOG.replace("b0", "b9").replace("b1 4096", "b5 4096").replace("b1", "b5").replace("g0", "g7");
    assert!(compare(&golden(LOG), &golden(&moved), Vec::new()).is_none());
}

#[test]
fn a_swapped_argument() {
    let parts = ["graph 1, event 2 of 5", "address 1 of 3", "expected b1 (4096 bytes), found b3 (512 bytes)"];
    told("256 0 overlap | b0 b2 b1 16", "256 0 overlap | b2 b0 b1 16", &parts);
}

#[test]
fn a_stride_and_an_offset() {
    told("{ b0 b1 16 5632 }", "{ b0 b1 16 2048 }", &["event 4 of 5", "word 5 of the arguments: 5632 became 2048"]);
    told("b0+128 16", "b0+256 16", &["address 2 of 2: offset 128 became 256"]);
}

#[test]
fn a_missing_launch_and_a_new_one() {
    let line = "launch rms_norm_bf16 40x1x1 256 0 overlap | b0 b2 b1 40 2048\n";
    told(
        line,
        "",
        &["step 0: 1 prefill of 40 tokens, event 2 of 5", "another event", "1 events later: as many are missing"],
    );
    let twice = format!("{line}launch silu_mul_bf16 40x1x1 256 0 overlap | b0 b1\n");
    told(line, &twice, &["event 3 of 5", "1 events later: as many are new", "+ silu_mul_bf16: 1 launches"]);
}

#[test]
fn another_kernel_grid_attribute_or_shared_memory() {
    told("argmax_tiles 1x1x1", "argmax_f32 1x1x1", &["event 4 of 5", "another event", "argmax_f32: 1 launches"]);
    told("gemm_128x128_bf16 132x", "gemm_128x128_bf16 131x", &["132x1x1 became 131x1x1"]);
    told("overlap cluster 2", "overlap cluster 4", &["2 became 4"]);
    told("384 229376 overlap", "384 229376", &["words became"]);
    told("384 229376", "384 229392", &["229376 became 229392"]);
}

#[test]
fn buffers_that_became_one_or_changed_their_size() {
    told(
        "h0 b2 16 data=00000000000000bb",
        "h0 b1 16 data=00000000000000bb",
        &["expected b3 (512 bytes)", "found b2 (4096"],
    );
    told("alloc b2 512", "alloc b2 1024", &["b3 (512 bytes) became b3 (1024 bytes): another size"]);
}

#[test]
fn other_inputs_and_other_waits() {
    told("data=00000000000000cc", "data=00000000000000cd", &["step 1: 4 decode", "events with hash", "no text"]);
    told("data=00000000000000aa", "data=00000000000000ab", &["load, event 1 of 1", "data=00000000000000aa became"]);
    told("record e2\nwait e2\n", "wait e2\nrecord e2\n", &["step 1: 4 decode", "too: end"]);
}

#[test]
fn another_choice() {
    told(
        "record e1\n",
        "launch silu_mul_bf16 9x1x1 256 0 | b0 b1\nrecord e1\n",
        &["choice of GEMMs, part 1", "silu_mul"],
    );
}

#[test]
fn what_is_intended_is_no_difference() {
    let list = "\
# A comment
case :: step 0* :: launch rms_norm_bf16 40x1x1 * :: - :: the GEMM folds the norm in
case :: step 1* :: hash :: hash :: other inputs
";
    let list = Intended::read(list).unwrap();
    let line = "launch rms_norm_bf16 40x1x1 256 0 overlap | b0 b2 b1 40 2048\n";
    let now = golden(&LOG.replace(line, "").replace("data=00000000000000cc", "data=00000000000000cd"));
    assert_eq!(compare(&golden(LOG), &now, list.iter().collect()), None);
    let report = compare(&golden(LOG), &golden(LOG), list.iter().collect()).unwrap();
    assert!(
        report.contains("intended.txt lists what is not different: step 0* :: the GEMM folds the norm in"),
        "{report}"
    );
    assert!(Intended::read("case :: section :: old :: new").unwrap_err().contains("reason"));
}
