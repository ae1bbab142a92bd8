//! A binary with the feature `handicap` takes the share longer that it is told, and says so.
#![cfg(feature = "handicap")]

mod common;

use common::{Sandbox, assert_names};

const BENCH: &str = "bench throughput --model micro --dataset d.jsonl --device cpu --warmup 1 --repeat 3";

#[test]
fn steps_take_the_share_longer() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 60), (7, 60), (65, 60), (20, 60)]);
    let plain = sandbox.ok(&format!("{BENCH} --output-dir plain"));
    assert!(!plain.stderr.contains("STROBE_HANDICAP"), "{}", plain.stderr);
    let slow = sandbox.ok_with(&[("STROBE_HANDICAP", "200%")], &format!("{BENCH} --output-dir slow"));
    let warnings = slow.stderr.lines().filter(|line| line.contains("STROBE_HANDICAP"));
    let warnings: Vec<&str> = warnings.collect();
    assert_eq!(warnings.len(), 1, "{}", slow.stderr);
    assert_names(warnings[0], &["warning: ", "200.0 % longer"]);
    // The time is inside the steps' measured time: the forward pass of most steps takes three times as long.
    let forward = |run: &str| {
        let report = sandbox.json(&format!("{run}/report.json"));
        let repeats = report["strobe"]["repeats"].as_array().unwrap().clone();
        repeats.iter().map(|repeat| repeat["output_throughput_tok_s"].as_f64().unwrap()).fold(0.0, f64::max)
    };
    let (plain, slow) = (forward("plain"), forward("slow"));
    assert!(slow < 0.7 * plain, "{plain} {slow} tokens/s");
}

#[test]
fn what_is_no_percentage_is_refused() {
    let sandbox = Sandbox::new();
    for wrong in ["5", "much", "-5%"] {
        let error = sandbox.refused_with(&[("STROBE_HANDICAP", wrong)], "doctor");
        assert_names(&error, &["STROBE_HANDICAP must be a percentage", wrong]);
    }
}
