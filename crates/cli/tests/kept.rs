//! No run is lost: whatever ends a run, what was recorded is there, and it can be read.

mod common;

use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{Sandbox, assert_names, finish, int};
use serde_json::Value;

/// Two requests that end soon, and others that would take minutes.
fn with_long_run() -> Sandbox {
    let sandbox = Sandbox::new();
    let mut lengths = vec![(8, 1900); 60];
    lengths[..2].fill((8, 3));
    sandbox.dataset("long.jsonl", &lengths);
    sandbox.dataset("d.jsonl", &[(20, 8), (10, 12), (30, 5)]);
    sandbox
}

const LONG: &str = "bench throughput --model micro --dataset long.jsonl --warmup 0";
const SHORT: &str = "bench throughput --model micro --dataset d.jsonl --warmup 0";

/// Wait until a condition holds.
#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what} never came");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn lines(sandbox: &Sandbox, name: &str) -> usize {
    std::fs::read(sandbox.path(name)).map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count())
}

/// Start `words`, wait for records of iterations and requests in `run`, and kill the process.
fn killed(sandbox: &Sandbox, words: &str) {
    let mut child = sandbox.command(words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("a record", || {
        let runs = std::fs::read_to_string(sandbox.path("run/run.json")).is_ok_and(|text| text.contains("\"running\""));
        runs && lines(sandbox, "run/iterations.jsonl") > 3 && lines(sandbox, "run/requests.jsonl") > 1
    });
    child.kill().unwrap();
    child.wait().unwrap();
}

fn whole(sandbox: &Sandbox, dir: &str, requests: usize) {
    let run = sandbox.json(&format!("{dir}/run.json"));
    assert_eq!((&run["state"], &run["partial"]), (&Value::from("complete"), &Value::from(false)));
    assert_eq!(sandbox.json_lines(&format!("{dir}/requests.jsonl")).len(), requests);
}

#[test]
fn a_killed_run_is_there_and_is_read() {
    let sandbox = with_long_run();
    killed(&sandbox, &format!("{LONG} --output-dir run"));
    assert_eq!(sandbox.names("run"), ["iterations.jsonl", "requests.jsonl", "run.json"]);
    assert_eq!(sandbox.names("."), ["d.jsonl", "long.jsonl", "run"]);
    let partial = ["warning: run: partial run (state running, process gone): ", " iterations, 2 finished requests"];
    let done = sandbox.ok("analyze run");
    assert_names(&done.stderr, &partial);
    assert_names(&done.stdout, &["partial"]);
    let done = sandbox.ok("compare run run");
    assert_names(&done.stderr, &partial);
    let done = sandbox.ok("simulate explain run");
    assert_names(&done.stderr, &partial);
    assert_names(&done.stdout, &["request"]);
    let done = sandbox.run("simulate calibrate run -o cost.json --max-error 1000");
    assert_names(&done.stderr, &partial);

    // It is replaced on request only, and what it was is gone only when there is another.
    assert_names(&sandbox.refused(&format!("{SHORT} --output-dir run")), &["`run` exists already", "--overwrite"]);
    let message = sandbox.refused(&format!("{SHORT} --output-dir run --overwrite --kv-cache-blocks 0"));
    assert_names(&message, &["--kv-cache-blocks"]);
    sandbox.ok(&format!("{SHORT} --output-dir run --overwrite"));
    whole(&sandbox, "run", 3);
    assert!(sandbox.names(".").iter().all(|name| !name.starts_with('.')), "{:?}", sandbox.names("."));
}

#[test]
fn a_run_killed_while_it_replaces_another_leaves_nothing_for_long() {
    let sandbox = with_long_run();
    sandbox.ok(&format!("{SHORT} --output-dir run"));
    killed(&sandbox, &format!("{LONG} --output-dir run --overwrite"));
    assert_eq!(sandbox.names(".").iter().filter(|name| name.starts_with(".run.old-")).count(), 1);
    sandbox.ok(&format!("{SHORT} --output-dir run --overwrite"));
    whole(&sandbox, "run", 3);
    assert_eq!(sandbox.names("."), ["d.jsonl", "long.jsonl", "run"]);
}

#[test]
fn finished_repeats_survive_a_kill() {
    let sandbox = with_long_run();
    let words = format!("{SHORT} --output-dir run --repeat 100000");
    let mut child = sandbox.command(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("a repeat", || lines(&sandbox, "run/repeats.jsonl") >= 3);
    child.kill().unwrap();
    child.wait().unwrap();
    let repeats = lines(&sandbox, "run/repeats.jsonl");
    assert!(repeats >= 3);
    // The logs are those of the repeat that ran.
    let first = sandbox.json_lines("run/repeats.jsonl").swap_remove(0);
    assert!(first["output_throughput_tok_s"].as_f64().unwrap() > 0.0);
    std::fs::remove_dir_all(sandbox.path("run")).unwrap();

    sandbox.ok(&format!("{SHORT} --output-dir run --repeat 3"));
    assert_eq!(lines(&sandbox, "run/repeats.jsonl"), 3);
    whole(&sandbox, "run", 3);
    let iterations = sandbox.json_lines("run/iterations.jsonl");
    assert!(iterations.iter().enumerate().all(|(at, line)| int(line, "/iter") == at as u64), "of one repeat");
}

#[test]
fn whole_runs_of_killed_sides_are_compared_by_their_repeats() {
    let sandbox = with_long_run();
    sandbox.ok(&format!("{SHORT} --output-dir a --repeat 3"));
    sandbox.ok(&format!("{SHORT} --output-dir b --repeat 3"));
    std::fs::remove_file(sandbox.path("b/report.json")).unwrap();
    sandbox.edit("b/run.json", "\"complete\"", "\"running\"");
    let done = sandbox.ok("compare a b");
    assert_names(&done.stdout, &["means of 3 runs"]);
    assert_names(&done.stderr, &["b: partial run (state running, process gone)", "3 finished requests"]);
}

#[test]
fn a_cut_last_line_is_dropped_and_said() {
    let sandbox = with_long_run();
    sandbox.ok(&format!("{SHORT} --output-dir run"));
    sandbox.edit("run/run.json", "\"complete\"", "\"running\"");
    let (log, requests) = (sandbox.read("run/iterations.jsonl"), sandbox.read("run/requests.jsonl"));
    sandbox.write("run/iterations.jsonl", &log[..log.len() - 40]);
    sandbox.write("run/requests.jsonl", &requests[..requests.len() - 40]);
    let left = log.lines().count() - 1;
    let done = sandbox.ok("analyze run");
    assert_names(
        &done.stderr,
        &[
            &format!("{left} iterations, 2 finished requests"),
            "run/iterations.jsonl: last line cut off",
            "run/requests.jsonl: last line cut off",
        ],
    );
    sandbox.ok("compare run run");
    sandbox.ok("simulate explain run");

    // Any other line that is damaged is an error, also the last one where it has its end.
    let mut damaged: Vec<&str> = log.lines().collect();
    damaged[2] = &damaged[2][..30];
    sandbox.write("run/iterations.jsonl", damaged.join("\n"));
    for words in ["analyze run", "compare run run", "simulate explain run"] {
        assert_names(&sandbox.refused(words), &["run/iterations.jsonl, line 3"]);
    }
    assert_names(&sandbox.refused("simulate calibrate run -o c.json"), &["iterations.jsonl line 3"]);
    sandbox.write("run/iterations.jsonl", format!("{}{{}}\n", log));
    assert_names(&sandbox.refused("analyze run"), &[&format!("line {}", left + 2)]);
}

#[test]
fn a_full_disk_costs_files_but_not_the_report() {
    let sandbox = with_long_run();
    sandbox.ok(SHORT); // so that the machine's peaks are known: they are written to a file too
    let words = format!("{SHORT} --output-dir run --report-json r.json --iteration-log i.jsonl --request-json q.json");
    let done = finish(&mut sandbox.with_small_files(10, &words));
    assert_eq!(done.code, Some(2), "{}\n{}", done.stdout, done.stderr);
    assert_names(&done.stdout, &["Total Output Throughput", "Number of Sequences:  3"]);
    let reasons = ["run/iterations.jsonl", "run/report.html", "i.jsonl", "File too large", "run directory: run"];
    assert_names(&done.stderr, &reasons);
    // What could be kept is kept, and nothing else.
    assert_eq!(sandbox.json("run/run.json")["state"], "partial");
    assert_eq!(sandbox.json_lines("run/requests.jsonl").len(), 3);
    assert!(lines(&sandbox, "run/iterations.jsonl") > 0);
    assert_eq!(sandbox.json("q.json").as_array().map(Vec::len), Some(3));
    assert!(!sandbox.exists("i.jsonl"));
    assert!(sandbox.names("run").iter().chain(&sandbox.names(".")).all(|name| !name.starts_with('.')));
    let done = sandbox.ok("analyze run");
    assert_names(&done.stderr, &["run: partial run (state partial)", "3 finished requests", "last line cut off"]);

    // Without room for anything: no directory, and the old one stays.
    let done =
        finish(&mut sandbox.with_small_files(0, &format!("{SHORT} --output-dir none --trace-out t.json --profile 1")));
    assert_eq!(done.code, Some(2), "{}\n{}", done.stdout, done.stderr);
    assert_names(&done.stdout, &["Output Throughput"]);
    assert_names(&done.stderr, &["the run was not kept", "t.json"]);
    assert!(!sandbox.exists("none") && !sandbox.exists("t.json"));
    let before = sandbox.read("run/requests.jsonl");
    let done = finish(&mut sandbox.with_small_files(0, &format!("{SHORT} --output-dir run --overwrite")));
    assert_eq!(done.code, Some(2), "{}\n{}", done.stdout, done.stderr);
    assert_names(&done.stderr, &["the run was not kept"]);
    assert_eq!(sandbox.read("run/requests.jsonl"), before);
    assert!(sandbox.names(".").iter().all(|name| !name.starts_with('.')));
}

#[test]
fn other_benchmarks_report_on_a_full_disk_too() {
    let sandbox = with_long_run();
    let words = "bench moe-balance --model moe-tiny --dataset d.jsonl --repeat 2 --device cpu";
    sandbox.ok(words); // so that the machine's peaks are known
    let done = finish(&mut sandbox.with_small_files(0, &format!("{words} --output-dir balance")));
    assert_eq!(done.code, Some(2), "{}\n{}", done.stdout, done.stderr);
    assert_names(&done.stdout, &["Output throughput"]);
    assert_names(&done.stderr, &["balance.json", "balance.txt", "compare.html", "nothing could be kept"]);
    let done = finish(&mut sandbox.with_small_files(16, &format!("{words} --output-dir balance")));
    assert_eq!(done.code, Some(2), "{}\n{}", done.stdout, done.stderr);
    assert_names(&done.stderr, &["compare.html", "results: balance"]);
    assert!(sandbox.exists("balance/balance.txt"));
    assert!(sandbox.names(".").iter().all(|name| !name.starts_with('.')));

    let words = "bench kernels --op norm --repeat 5 --output-dir kernels";
    let done = finish(&mut sandbox.with_small_files(0, words));
    assert_eq!(done.code, Some(2), "{}\n{}", done.stdout, done.stderr);
    assert!(!done.stdout.is_empty() && !sandbox.exists("kernels"));
}

#[test]
fn answers_come_before_files_that_do_not_fit() {
    let sandbox = with_long_run();
    sandbox.ok(&format!("{SHORT} --output-dir a --repeat 2"));
    sandbox.ok(&format!("{SHORT} --output-dir b --repeat 2"));
    let cost =
        "--rate 40 --num-requests 500 --input-tokens 60 --output-tokens 20 --cost linear:base=2ms,per_request=10us";
    for (words, said, file) in [
        ("compare a b --html page.html".to_owned(), "output tok/s", "page.html"),
        ("analyze a --html page.html".to_owned(), "iterations", "page.html"),
        (format!("simulate {cost} --output-dir dir"), "TTFT", "iterations.jsonl"),
        (format!("simulate sweep --vary rate=10,20,30,40,50,60 {cost} --output-csv points.csv"), "rate,", "points.csv"),
    ] {
        let done = finish(&mut sandbox.with_small_files(2, &words));
        assert_eq!(done.code, Some(2), "{words}\n{}\n{}", done.stdout, done.stderr);
        assert!(done.stdout.to_lowercase().contains(&said.to_lowercase()), "{words}\n{}", done.stdout);
        assert_names(&done.stderr, &[file, "File too large"]);
    }
    assert_eq!(sandbox.names("."), ["a", "b", "d.jsonl", "long.jsonl"]);
}

#[test]
fn a_directory_that_goes_while_the_run_goes_on_costs_files_but_not_the_report() {
    let sandbox = with_long_run();
    std::fs::create_dir(sandbox.path("folder")).unwrap();
    sandbox.dataset("some.jsonl", &[(8, 400), (8, 400)]);
    let words = "bench throughput --model micro --dataset some.jsonl --warmup 0 --request-rate 0.7 --arrival constant \
                 --output-dir folder/run --report-json folder/r.json";
    let child = sandbox.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the run directory", || sandbox.exists("folder/run/run.json"));
    std::fs::remove_dir_all(sandbox.path("folder")).unwrap();
    let output = child.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{stdout}\n{stderr}");
    assert_names(&stdout, &["Output Throughput"]);
    assert_names(&stderr, &["folder/run/report.json", "folder/r.json", "No such file or directory"]);
}

#[test]
fn of_two_runs_into_one_directory_one_gets_it_and_both_report() {
    let sandbox = with_long_run();
    // The second request arrives when both have long begun.
    sandbox.dataset("some.jsonl", &[(8, 20), (8, 20)]);
    let words = "bench throughput --model micro --dataset some.jsonl --warmup 0 --request-rate 0.4 --arrival constant \
                 --output-dir run";
    let start = || sandbox.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let children = [start(), start()];
    let done = children.map(|child| child.wait_with_output().unwrap());
    let mut codes = done.each_ref().map(|output| output.status.code());
    codes.sort();
    let said = done.each_ref().map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
    assert_eq!(codes, [Some(0), Some(2)], "{said:#?}");
    let loser = done.iter().position(|output| output.status.code() == Some(2)).unwrap();
    if said[loser].contains("the run was not kept") {
        assert_names(&String::from_utf8_lossy(&done[loser].stdout), &["Output Throughput"]);
    } // else it was so late that it was refused before it began
    whole(&sandbox, "run", 2);

    // A run that goes on is not replaced.
    std::fs::remove_dir_all(sandbox.path("run")).unwrap();
    let mut child = sandbox
        .command(&format!("{LONG} --output-dir run"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("a record", || lines(&sandbox, "run/iterations.jsonl") > 0);
    let second = sandbox.run(&format!("{SHORT} --output-dir run --overwrite"));
    assert_eq!(second.code, Some(2));
    assert_names(&second.stderr, &["`run` is being written by another run"]);
    assert_names(&sandbox.ok("analyze run").stderr, &["partial run (state running, process alive)"]);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn an_empty_directory_is_filled_and_a_run_without_records_leaves_none() {
    let sandbox = with_long_run();
    std::fs::create_dir(sandbox.path("empty")).unwrap();
    sandbox.ok(&format!("{SHORT} --output-dir empty"));
    whole(&sandbox, "empty", 3);
    let message = sandbox.refused(&format!("{SHORT} --output-dir new/run --kv-cache-blocks 0"));
    assert_names(&message, &["--kv-cache-blocks"]);
    assert!(!sandbox.exists("new"));
}

// Engines

#[test]
fn what_a_killed_build_left_is_removed_by_the_next() {
    let sandbox = Sandbox::new();
    // Long enough to be killed: hundreds of megabytes.
    let words = "build --model tinyllama-1.1b --dtype bfloat16 --output-dir e";
    let mut child = sandbox.command(words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let leftovers = || sandbox.names(".").into_iter().filter(|name| name.starts_with(".e.partial-")).count();
    wait_until("the staging directory", || leftovers() == 1);
    // While it is written, nobody takes it for a leftover.
    sandbox.ok("build --model micro --output-dir e");
    assert_eq!(leftovers(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(leftovers(), 1);
    sandbox.write(".e.partial-notes", "mine");
    sandbox.ok("build --model micro --output-dir e --overwrite");
    assert_eq!(sandbox.names("."), [".e.partial-notes", "e"]);
}

#[test]
fn what_a_killed_write_left_is_removed_by_the_next() {
    let sandbox = with_long_run();
    sandbox.write(".r.json.partial-1", "{");
    sandbox.write(".r.json.partial-x", "mine");
    sandbox.ok(&format!("{SHORT} --report-json r.json"));
    assert_eq!(sandbox.names("."), [".r.json.partial-x", "d.jsonl", "long.jsonl", "r.json"]);
}

/// Overwrite some bytes of an engine's weights; gives the name of the tensor they belong to.
fn damage(sandbox: &Sandbox, engine: &str) -> String {
    let path = sandbox.path(&format!("{engine}/rank0.engine"));
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let document: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = bytes.len() / 2;
    let holds = |value: &Value| {
        let ends = value["data_offsets"].as_array()?;
        let place = (at - 8 - header) as u64;
        Some(ends[0].as_u64()? <= place && place < ends[1].as_u64()?)
    };
    let tensors = document.as_object().unwrap();
    let (name, _) = tensors.iter().find(|(_, value)| holds(value) == Some(true)).unwrap();
    bytes[at..at + 64].iter_mut().for_each(|byte| *byte ^= 0x5a);
    std::fs::write(path, bytes).unwrap();
    name.clone()
}

#[test]
fn a_damaged_engine_is_noticed() {
    let sandbox = with_long_run();
    sandbox.ok("build --model micro --output-dir e");
    let bench = "bench throughput --engine-dir e --dataset d.jsonl --warmup 1 --weights-memory";
    sandbox.ok(&format!("{bench} copy"));
    let done = sandbox.ok("doctor --engine e");
    assert_names(&done.stdout, &["intact, 0 damaged"]);
    let name = damage(&sandbox, "e");
    let message = sandbox.refused(&format!("{bench} copy --output-dir run"));
    assert_names(&message, &["e/rank0.engine", &format!("tensor `{name}`"), "damaged", "strobe build"]);
    let done = sandbox.run("doctor --engine e");
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert_names(&done.stderr, &["e/rank0.engine", &format!("`{name}`"), "damaged"]);
    let json: Value = serde_json::from_str(&sandbox.run("doctor --engine e --json").stdout).unwrap();
    assert_eq!(json["damaged"], serde_json::json!([name]));
    // Mapped weights are not read before they are needed.
    sandbox.ok(&format!("{bench} map"));
}

#[test]
fn engines_without_checksums_and_what_is_no_engine() {
    let sandbox = with_long_run();
    sandbox.ok("build --model micro --output-dir e");
    let mut config = sandbox.json("e/config.json");
    assert!(config.as_object_mut().unwrap().remove("checksums").is_some());
    sandbox.write("e/config.json", config.to_string());
    damage(&sandbox, "e");
    sandbox.ok("bench throughput --engine-dir e --dataset d.jsonl --weights-memory copy");
    assert_names(&sandbox.ok("doctor --engine e").stdout, &["unchecked", "rebuild"]);
    assert_names(&sandbox.refused("doctor --engine nowhere"), &["nowhere/config.json"]);
}

#[test]
fn a_cut_engine_is_refused() {
    let sandbox = with_long_run();
    sandbox.ok("build --model micro --output-dir e");
    let whole = std::fs::read(sandbox.path("e/rank0.engine")).unwrap();
    for length in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        sandbox.write("e/rank0.engine", &whole[..length]);
        let message = sandbox.refused("bench throughput --engine-dir e --dataset d.jsonl");
        assert_names(&message, &["e/rank0.engine"]);
        let done = sandbox.run("doctor --engine e");
        assert_eq!(done.code, Some(1), "{length} bytes: {}", done.stderr);
        assert_names(&done.stderr, &["e/rank0.engine"]);
    }
    sandbox.write("e/rank0.engine", [whole.as_slice(), &[0; 64]].concat());
    assert_names(&sandbox.refused("bench throughput --engine-dir e --dataset d.jsonl"), &["e/rank0.engine"]);
}
