//! Ctrl-C: the run stops cleanly, and what was recorded is kept and marked partial.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::trace::TraceFile;
use common::{Done, Sandbox, assert_names, int, ints};

/// Start `words` (which print a line per iteration), send `signal` once `iterations` of them are out, and wait.
fn interrupted(sandbox: &Sandbox, words: &str, iterations: usize, signal: libc::c_int) -> Done {
    const PATIENCE: Duration = Duration::from_secs(60);
    let mut child = sandbox.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    while text.matches("Iteration Counter").count() < iterations {
        assert!(stdout.read_line(&mut text).unwrap() > 0, "it ended too early:\n{text}");
    }
    // SAFETY: the child was not waited for yet, so the number is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, signal) }, 0);
    let sent = Instant::now();
    let reader = std::thread::spawn(move || {
        stdout.read_to_string(&mut text).unwrap();
        text
    });
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if sent.elapsed() > PATIENCE => {
                child.kill().unwrap();
                panic!("it did not stop within {PATIENCE:?}");
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    Done { code: status.code(), stdout: reader.join().unwrap(), stderr }
}

const BENCH: &str = "bench throughput --model micro --dataset d.jsonl --warmup 0 --log-iteration-data --output-dir run";

#[test]
fn a_run_that_is_interrupted_keeps_what_it_has() {
    let sandbox = Sandbox::new();
    // The first requests end early; the others would take minutes.
    let mut lengths = vec![(8, 1900); 60];
    lengths[..4].fill((8, 3));
    sandbox.dataset("d.jsonl", &lengths);
    let words = format!("{BENCH} --profile 2-4,10-1000000,2000000 --trace-out t.json --iteration-log log.jsonl");
    let done = interrupted(&sandbox, &words, 20, libc::SIGINT);
    assert_eq!(done.code, Some(130), "{}", done.stderr);
    assert_names(&done.stdout, &["PARTIAL RUN", "10-1000000 (incomplete)"]);
    assert_names(&done.stderr, &["window 2000000", "never reached", "run directory: run"]);
    let files =
        ["iterations.jsonl", "report.html", "report.json", "requests.jsonl", "run.json", "trace.html", "trace.sqlite"];
    assert_eq!(sandbox.names("run"), files);
    let beside = ["d.jsonl", "log.jsonl", "run", "t-window-0-rank-0.json", "t-window-1-rank-0.json"];
    assert_eq!(sandbox.names("."), beside);

    assert_eq!(sandbox.json("run/run.json")["partial"], true);
    let report = sandbox.json("run/report.json");
    assert_eq!(report["strobe"]["partial"], true);
    assert_eq!(int(&report, "/strobe/metrics/num_requests"), 4, "those that ended");
    assert_eq!(int(&report, "/strobe/metrics/num_aborted"), 56);

    let requests = sandbox.json_lines("run/requests.jsonl");
    assert_eq!(requests.len(), 60);
    assert!(requests[..4].iter().all(|r| r["finish_reason"] == "length"));
    assert!(requests[4..].iter().all(|r| r["finish_reason"] == "aborted"));
    let iterations = sandbox.json_lines("run/iterations.jsonl");
    assert!(iterations.len() >= 20 && iterations.len() < 1900, "{}", iterations.len());
    assert_eq!(iterations, sandbox.json_lines("log.jsonl"));
    let made: u64 = iterations.iter().map(|i| int(i, "/strobe/numNewTokens")).sum();
    let kept: usize = requests.iter().map(|r| ints(r, "/output_ids").len()).sum();
    assert_eq!(made as usize, kept, "a token was made but not kept");

    let trace = TraceFile::read(&sandbox.path("run/trace.sqlite"));
    assert!(trace.partial);
    assert_eq!(trace.windows, [(2, 4, true), (10, 1_000_000, false), (2_000_000, 2_000_000, false)]);
    let recorded: Vec<_> = (2..=4).chain(10..iterations.len() as u64).collect();
    assert_eq!(trace.iterations, recorded);
    for file in ["t-window-0-rank-0.json", "t-window-1-rank-0.json"] {
        assert_eq!(sandbox.json(file)["otherData"]["partial"], true);
    }
}

#[test]
fn waiting_for_the_next_arrival_is_interrupted_too() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(4, 5), (4, 5)]);
    // The first one arrives at once, the second one after a quarter of an hour.
    let words = format!("{BENCH} --request-rate 0.001 --arrival constant");
    let done = interrupted(&sandbox, &words, 5, libc::SIGTERM);
    assert_eq!(done.code, Some(130), "{}", done.stderr);
    assert_eq!(sandbox.json("run/run.json")["partial"], true);
    let requests = sandbox.json_lines("run/requests.jsonl");
    assert_eq!(requests.len(), 1, "the second one was never sent");
    assert_eq!(requests[0]["finish_reason"], "length");
}

#[test]
fn a_validation_that_is_interrupted_says_so() {
    let sandbox = Sandbox::new();
    sandbox.ok("build --model micro --output-dir E");
    let words = "simulate validate --engine-dir E --turns 2 --seconds 0.1 --output-dir out";
    let mut child = sandbox.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("running all at once") {
        assert!(stderr.read_line(&mut text).unwrap() > 0, "it ended too early:\n{text}");
    }
    // SAFETY: the child was not waited for yet, so the number is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) }, 0);
    stderr.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    assert!(!text.contains("run 1 of"), "{text}");
}

#[test]
fn a_run_that_is_stopped_before_its_first_record_is_interrupted_and_no_failure() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(1900, 40); 8]);
    let words = "bench throughput --model micro --dataset d.jsonl --warmup 2 --repeat 3 --json --output-dir run";
    let mut child = sandbox.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    while !sandbox.exists("run/run.json") && begin.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: the child was not waited for yet, so the number is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) }, 0);
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
    assert!(!said.contains("nothing could be kept"), "{said}");
}
