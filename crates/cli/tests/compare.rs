//! `strobe compare` as its users call it: in a terminal, in a script, as a gate in CI.

mod common;

use common::traces::{KINETO, MIXED_GRAPH, MIXED_NODE, real};
use common::{Done, Sandbox, assert_names};
use serde_json::Value;

fn json(done: &Done) -> Value {
    serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {}", done.stdout))
}

/// The parts that explain a difference add up to it, in every group of iterations.
#[track_caller]
fn assert_parts_add_up(document: &Value) {
    let groups = document["comparison"]["groups"].as_array().unwrap();
    assert!(!groups.is_empty(), "{document:#}");
    for group in groups {
        let parts = group["parts"].as_array().unwrap();
        let sum: f64 = parts.iter().map(|part| part["delta_ns"].as_f64().unwrap()).sum();
        let whole = group["delta_ns"].as_f64().unwrap();
        let scale = group["a_wall_ns"].as_f64().unwrap();
        assert!((sum - whole).abs() <= scale * 1e-9, "{}: parts {sum}, difference {whole}", group["name"]);
    }
}

#[test]
fn a_trace_does_not_differ_from_itself() {
    let sandbox = Sandbox::new();
    for trace in [MIXED_NODE, KINETO] {
        let done = sandbox.ok(&format!("compare {trace} {trace} --fail-on-regression 0%"));
        assert!(done.stdout.starts_with("no difference"), "{}", done.stdout);
        let document = json(&sandbox.ok(&format!("compare {trace} {trace} --json")));
        assert_parts_add_up(&document);
        let groups = document["comparison"]["groups"].as_array().unwrap();
        assert!(groups.iter().all(|group| group["delta_ns"] == 0.0), "{groups:#?}");
    }
}

#[test]
fn what_was_recorded_differently_cannot_be_judged() {
    let sandbox = Sandbox::new();
    let words = format!("compare {MIXED_NODE} {MIXED_GRAPH}");
    let done = sandbox.run(&words);
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(done.stdout.starts_with("not comparable"));
    let done = sandbox.run(&format!("{words} --fail-on-regression 5%"));
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert_names(&done.stderr, &["error: the gate cannot be judged, not comparable", "--cuda-graph-trace"]);
}

/// A copy of a trace whose every time is multiplied, so that it is slower by a known factor.
fn slowed(sandbox: &Sandbox, from: &str, to: &str, factor: f64) {
    std::fs::copy(sandbox.path(from), sandbox.path(to)).unwrap();
    let database = rusqlite::Connection::open(sandbox.path(to)).unwrap();
    let tables: Vec<String> = {
        let mut statement = database.prepare("SELECT name FROM sqlite_master WHERE type = 'table'").unwrap();
        let names = statement.query_map([], |row| row.get(0)).unwrap();
        names.map(Result::unwrap).collect()
    };
    for table in tables {
        for column in ["start", "end"] {
            // Tables without such a column are passed over.
            let _ = database
                .execute(&format!("UPDATE \"{table}\" SET \"{column}\" = CAST(`{column}` * {factor} AS INTEGER)"), []);
        }
    }
}

#[test]
fn the_gate_tells_slower_from_faster() {
    let sandbox = Sandbox::new();
    sandbox.ok(&format!("convert {KINETO} -o base-1.sqlite"));
    for (name, factor) in [("base-2.sqlite", 1.0), ("slow-1.sqlite", 1.5), ("slow-2.sqlite", 1.5)] {
        slowed(&sandbox, "base-1.sqlite", name, factor);
    }
    let document = json(&sandbox.ok("compare base-1.sqlite slow-1.sqlite --json"));
    assert_parts_add_up(&document);
    let group = &document["comparison"]["groups"][0];
    let (a, b) = (group["a_wall_ns"].as_f64().unwrap(), group["b_wall_ns"].as_f64().unwrap());
    assert!((b / a - 1.5).abs() < 1e-3, "{a} -> {b}");

    let done = sandbox.run("compare base-*.sqlite slow-*.sqlite --fail-on-regression 5% --html page.html");
    assert_eq!(done.code, Some(1), "{}\n{}", done.stdout, done.stderr);
    assert!(done.stdout.starts_with("slower: "), "{}", done.stdout);
    assert_names(&done.stderr, &["FAIL: B is slower by more than 5.0 %", "limit 5.0 %"]);
    assert!(sandbox.read("page.html").contains("</html>"));
    let document = json(&sandbox.run("compare base-*.sqlite slow-*.sqlite --fail-on-regression 5% --json"));
    assert_eq!(document["gate"]["result"], "failed");
    assert_eq!(document["a"].as_array().unwrap().len(), 2);

    let done = sandbox.ok("compare slow-*.sqlite base-*.sqlite --fail-on-regression 5%");
    assert!(done.stdout.starts_with("faster: "), "{}", done.stdout);
}

#[test]
fn wrong_calls_are_refused() {
    let sandbox = Sandbox::new();
    assert_names(&sandbox.refused(&format!("compare {MIXED_NODE} none.sqlite")), &["none.sqlite"]);
    assert_names(&sandbox.refused(&format!("compare none-* {MIXED_NODE}")), &["nothing matches none-*"]);
    assert_names(&sandbox.refused(&format!("compare {MIXED_NODE} {MIXED_NODE} --fail-on-regression much")), &["much"]);
    assert_names(&sandbox.refused(&format!("compare {MIXED_NODE} {MIXED_NODE} --html no/p.html")), &["no/p.html"]);
    sandbox.refused(&format!("compare {MIXED_NODE}"));
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    let sandbox = Sandbox::new();
    for width in ["80", "100", "160"] {
        for (a, b) in [(MIXED_NODE, MIXED_GRAPH), (KINETO, MIXED_NODE), (KINETO, KINETO)] {
            let words = format!("compare {a} {b}");
            let text = common::finish(sandbox.command(&words).env("COLUMNS", width)).stdout;
            assert!(!text.is_empty());
            let long = text.lines().find(|line| line.chars().count() > width.parse().unwrap());
            assert_eq!(long, None, "{a} {b} at {width} columns");
        }
    }
}

#[test]
fn run_directories_are_compared_profiled_or_not() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 9), (7, 12), (65, 4), (20, 10)]);
    let bench = "bench throughput --model micro --dataset d.jsonl --warmup 1 --max-batch-size 3 --output-dir";
    sandbox.ok(&format!("{bench} a --profile 2-8"));
    sandbox.ok(&format!("{bench} b --profile 2-8"));
    sandbox.ok(&format!("{bench} plain-a"));
    sandbox.ok(&format!("{bench} plain-b"));
    let document = json(&sandbox.ok("compare a b --json"));
    assert_parts_add_up(&document);
    let done = sandbox.ok("compare plain-a plain-b");
    assert_names(&done.stdout, &["Wall A", "Wall B", "decode", "Whole runs", "Output throughput"]);
    assert!(!done.stdout.starts_with("not comparable"));
    // Of one side with a profile and one without, the iterations of both are compared.
    assert_parts_add_up(&json(&sandbox.ok("compare a plain-b --json")));
    assert_parts_add_up(&json(&sandbox.ok("compare plain-a plain-b --json")));
}

#[test]
fn the_first_screen_of_a_real_pair_has_the_answer() {
    let (Some(a), Some(b)) = (real("nsys/nsys-ai/mfu_2gpu_before.sqlite"), real("nsys/nsys-ai/mfu_2gpu_after.sqlite"))
    else {
        return;
    };
    let sandbox = Sandbox::new();
    let words = format!("compare {} {}", a.display(), b.display());
    let done = sandbox.ok(&words);
    let screen: String = done.stdout.lines().take(40).map(|line| format!("{line}\n")).collect();
    assert!(screen.starts_with("slower: A = mfu_2gpu_before.sqlite, B = mfu_2gpu_after.sqlite"), "{screen}");
    assert_names(
        &screen,
        // Windows of less than a step: the work that both hold is compared.
        &["B holds 3,587 of 4,010", "per matched work", "host-bound idle", "1793.5 -> 1793.5", "-29.4 %"],
    );
    // Golden: kernels only, summed over both devices.
    assert_names(&done.stdout, &["510 ms   455 ms", "25.4 ms  33.7 ms", "63.3 ms   110 ms"]);
    let document = json(&sandbox.ok(&format!("{words} --json")));
    assert_parts_add_up(&document);
    assert_eq!(document["comparison"]["verdict"]["outcome"], "slower");
}

#[test]
fn kernels_that_replaced_others_are_named() {
    let (Some(a), Some(b)) =
        (real("kineto/hta/trace_diff_control.json.gz"), real("kineto/hta/trace_diff_test.json.gz"))
    else {
        return;
    };
    let sandbox = Sandbox::new();
    let text = sandbox.ok(&format!("compare {} {}", a.display(), b.display())).stdout;
    assert_names(&text, &["Kernels only in A", "Kernels only in B"]);
}

#[test]
fn whole_runs_stand_beside_their_iterations() {
    let sandbox = Sandbox::new();
    sandbox.ok(
        "prepare-dataset --model micro --output d.jsonl token-norm-dist --num-requests 4 --input-mean 8 --output-mean 4",
    );
    for (name, more) in [("a", "--repeat 3"), ("b", "--profile 0-2")] {
        sandbox
            .ok(&format!("bench throughput --model micro --dataset d.jsonl --device cpu {more} --output-dir {name}"));
    }
    let runs = &json(&sandbox.ok("compare a b --json"))["comparison"]["runs"];
    assert_eq!(runs["counts"], serde_json::json!([3, 1]));
    let figure = |name: &str| {
        let figures = runs["figures"].as_array().unwrap();
        figures.iter().find(|figure| figure["name"] == name).unwrap_or_else(|| panic!("{name} in {runs:#}")).clone()
    };
    let report = |run: &str| -> Value { serde_json::from_str(&sandbox.read(&format!("{run}/report.json"))).unwrap() };
    let speed = figure("Output throughput (tokens/sec)");
    let repeats = report("a")["strobe"]["repeats"].as_array().unwrap().clone();
    let product: f64 = repeats.iter().map(|r| r["output_throughput_tok_s"].as_f64().unwrap().ln()).sum();
    let mean = (product / 3.0).exp();
    assert!((speed["a"].as_f64().unwrap() / mean - 1.0).abs() < 1e-9, "the geometric mean, whose ratio is the change");
    let own = report("b")["strobe"]["repeats"][0]["output_throughput_tok_s"].as_f64().unwrap();
    assert!((speed["b"].as_f64().unwrap() / own - 1.0).abs() < 1e-9);
    let change = speed["a"].as_f64().unwrap() / speed["b"].as_f64().unwrap() - 1.0;
    assert!((speed["time_change"].as_f64().unwrap() - change).abs() < 1e-9);
    assert!(!repeats[0]["cells"].as_array().unwrap().is_empty(), "iterations by batch, of every repeat");
    let same = json(&sandbox.ok("compare a a --html page.html --json"));
    assert_eq!(same["comparison"]["verdict"]["time_change"], 0.0);
    assert!(!["faster", "slower"].contains(&same["outcome"].as_str().unwrap()));
    assert_names(&sandbox.read("page.html"), &["output tok/s"]);
    // A trace alone knows nothing of them.
    assert_eq!(json(&sandbox.ok("compare a b/trace.sqlite --json"))["comparison"]["runs"], Value::Null);
    sandbox.write("b/report.json", "{");
    assert_names(&sandbox.refused("compare a b"), &["b/report.json", "damaged"]);
}
