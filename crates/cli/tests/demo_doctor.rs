//! The verbs a new user meets first: `demo`, `doctor`, `--help`, `--version`.

#[cfg(unix)]
#[path = "../../report/tests/browser/mod.rs"]
#[allow(dead_code)] // every test uses its own part of the browser
mod browser;
mod common;

use common::{Sandbox, assert_names, finish, num};
use serde_json::Value;

/// One demo at a time: it measures, and has less than a minute for it.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static DEMO: std::sync::Mutex<()> = std::sync::Mutex::new(());
    DEMO.lock().unwrap_or_else(|problem| problem.into_inner())
}

#[test]
fn the_demo_runs_the_whole_loop() {
    let _alone = alone();
    let sandbox = Sandbox::new();
    let done = sandbox.ok("demo --output-dir x");
    let headline = ["fused attention) is ", "No difference larger than", "Cannot tell: "];
    let verdict = done.stdout.lines().find(|line| headline.iter().any(|words| line.contains(words)));
    let verdict = verdict.unwrap_or_else(|| panic!("no verdict in\n{}", done.stdout));
    assert!(verdict.contains("output tok/s") && verdict.contains("interleaved pairs"), "{verdict}");
    assert_eq!(sandbox.names("."), ["x"]);
    for name in ["index.html", "compare.html", "dataset.jsonl", "ab.json", "engine-a", "engine-b"] {
        assert!(sandbox.exists(&format!("x/{name}")), "{name}");
    }
    // Both pages and the terminal say the same.
    let escaped = verdict.split(" (").next().unwrap_or_default();
    for page in ["x/index.html", "x/compare.html"] {
        assert_names(&sandbox.read(page), &["<html", "<svg", "fused attention", "unfused attention", escaped]);
    }
    #[cfg(unix)]
    look_at_the_pages(&sandbox, verdict);
    for (run, fused) in [("recorded-b", true), ("recorded-a", false)] {
        let report = sandbox.json(&format!("x/runs/{run}/report.json"));
        assert_eq!(report["strobe"]["build_config"]["plugin_config"]["context_fmha"], fused);
        assert!(num(&report, "/performance/system_output_throughput_tok_s") > 0.0);
        assert!(!report["strobe"]["profile"]["top_ops"].as_array().unwrap().is_empty());
    }
    assert_names(&sandbox.refused("demo --output-dir x"), &["`x` exists already", "--overwrite"]);

    // The same comparison as a line to type: `strobe ab` takes it and plans the same builds and runs.
    let line = done.stdout.lines().find_map(|line| line.strip_prefix("compare   strobe ")).expect("the line to type");
    let line = line.replace("--pairs 5..10 --budget 45s --", "--pairs 2 --budget 0.01s --output-dir typed --");
    let mut typed = sandbox.command("");
    typed.args(shlex(&line));
    let stopped = finish(&mut typed);
    assert_eq!(stopped.code, Some(2), "{}", stopped.stdout);
    assert_names(&stopped.stderr, &["fewer than 2 pairs ended (the time of --budget)"]);
    let plan = |dir: &str| sandbox.json(&format!("{dir}/ab.json"))["plan"].clone();
    let words = |side: &Value| {
        let mut all: Vec<String> = ["build", "bench"]
            .iter()
            .flat_map(|part| side[part].as_array().unwrap_or_else(|| panic!("no {part} in {side}")))
            .map(|word| word.as_str().unwrap().to_owned())
            .collect();
        // `strobe ab` gives limits of the batch to both.
        all.sort();
        all.dedup();
        all
    };
    for side in ["a", "b"] {
        assert_eq!(words(&plan("x")[side]), words(&plan("typed")[side]), "{side}");
    }
    assert_eq!(plan("x")["profile"], plan("typed")["profile"]);
}

/// Words of a line whose quotes are single.
fn shlex(line: &str) -> Vec<String> {
    let parts = line.split('\'').enumerate();
    parts
        .flat_map(|(at, part)| match at % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        })
        .collect()
}

/// Stopped after a pair: what is kept is said, and the result says that it is partial.
#[cfg(unix)]
#[test]
fn a_demo_that_is_stopped_says_what_it_kept() {
    use std::io::{BufRead, BufReader, Read};
    let _alone = alone();
    let sandbox = Sandbox::new();
    let mut command = sandbox.command("demo --output-dir x");
    let mut child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap().starts_with("pair 1")), "it ended too early");
    // SAFETY: the child was not waited for yet, so the number is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) }, 0);
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}\n{stderr}");
    assert_names(&stderr, &["interrupted; ", " runs are kept in x/runs; `strobe demo` starts anew"]);
    let kept: usize = stderr.split("interrupted; ").nth(1).and_then(|t| t.split(' ').next()).unwrap().parse().unwrap();
    assert!(kept >= 4 && kept == sandbox.names("x/runs").len(), "{kept}: {:?}", sandbox.names("x/runs"));
    assert_eq!(sandbox.json("x/ab.json")["state"], "partial");
}

/// Where pages cannot be written the answer is there all the same.
#[test]
fn a_demo_whose_pages_have_no_place_says_its_result() {
    let _alone = alone();
    let sandbox = Sandbox::new();
    let child = sandbox
        .command("demo --output-dir x")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let begin = std::time::Instant::now();
    while !sandbox.exists("x/runs") {
        assert!(begin.elapsed().as_secs() < 60, "the runs never began");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    for page in ["index.html", "compare.html"] {
        std::fs::create_dir(sandbox.path("x").join(page)).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{stdout}\n{stderr}");
    assert_names(&stdout, &["output tok/s", "interleaved pairs", "Spread: ", "runs      x/runs"]);
    assert!(!stdout.contains("pages     "), "there are none: {stdout}");
    assert_names(&stderr, &["x/index.html", "x/compare.html"]);
    assert_eq!(sandbox.json("x/ab.json")["state"], "complete");
}

/// Both pages in a real browser: the verdict first, a color per option whatever the number of pairs, links between all pages.
#[cfg(unix)]
fn look_at_the_pages(sandbox: &Sandbox, verdict: &str) {
    for (file, links) in [("index.html", 5), ("compare.html", 5)] {
        let name = format!("demo-{file}");
        let Some(mut page) = browser::Browser::open(&name, &sandbox.read(&format!("x/{file}")), "light") else {
            return;
        };
        page.looks_right(&name);
        assert_eq!(page.links_lead_to_files(&sandbox.path("x")), links, "{file}");
        assert_eq!(page.text("document.querySelector('h1').innerText").trim(), verdict.trim());
        page.silent();
        if file == "index.html" {
            let bars = "(svg => { const fills = what => [...new Set([...svg.querySelectorAll(what)].map(e => e.style.fill))].sort().join(); \
                        return [svg.querySelectorAll('rect.hit').length, fills('rect.hit') === fills('circle'), fills('rect.hit') === fills('.key')]; })\
                        (document.querySelector('section .wide svg'))";
            assert_eq!(page.eval(bars), serde_json::json!([2, true, true]));
        }
    }
}

#[test]
fn doctor_measures_the_machine() {
    let sandbox = Sandbox::new();
    let text = sandbox.ok("doctor").stdout;
    assert_names(
        &text,
        &["cpu", "simd tier", "memory bandwidth", "peak compute", "gpu", "libcuda", "libnvrtc", "kernel cache", "nsys"],
    );
    let document: Value = serde_json::from_str(&sandbox.ok("doctor --json").stdout).unwrap();
    for peak in ["flops_per_s", "read_bytes_per_s", "copy_bytes_per_s", "threads"] {
        assert!(num(&document, &format!("/peaks/{peak}")) > 0.0, "{peak}");
    }
    assert!(document["simd"]["available"].as_array().unwrap().contains(&Value::from("scalar")));
    assert!(document["gpus"].is_array() != document["no_gpu_because"].is_string(), "GPUs, or why there are none");
    assert!(num(&document, "/memory/total_bytes") > 0.0);
    for library in ["libcuda", "libnvrtc", "libcublasLt", "libcupti", "libnvtx3interop", "libnvidia-ml"] {
        let found = &document["cuda_libraries"][library];
        assert!(found["path"].is_string() != found["problem"].is_string(), "{library}: a path, or why there is none");
    }
    assert!(document["kernel_cache"]["directory"].is_string());
    // The first call has measured and remembered, the second says what it found.
    assert_names(&text, &["cached before", "iteration readings", "median of 1000 readings"]);
    assert!(num(&document, "/cached_peaks_before/flops_per_s") > 0.0);
    assert!(num(&document, "/host_reading/median_ns") > 0.0);
    assert_eq!(document["auto_device"] == "cuda:0", document["gpus"].is_array() && text.contains("cuda:0"));
}

#[test]
fn doctor_measures_single_peaks() {
    let sandbox = Sandbox::new();
    let document: Value =
        serde_json::from_str(&sandbox.ok("doctor --peaks int8,float32,bfloat16 --json").stdout).unwrap();
    assert_eq!(document["peaks"].as_object().unwrap().len(), 3);
    assert!(num(&document, "/peaks/int8_ops_per_s") > 0.0 && num(&document, "/peaks/flops_per_s") > 0.0);
    assert_names(&sandbox.ok("doctor --peaks float32 --threads 1").stdout, &["f32", "1 thread", "cached before"]);
}

/// The better of two readings stays in the cache, and what was there before is said.
#[test]
fn doctor_corrects_what_was_cached() {
    let sandbox = Sandbox::new();
    let cache = sandbox.path("cache");
    let doctor = |words: &str| {
        let done = finish(sandbox.command(words).env("XDG_CACHE_HOME", &cache));
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        done.stdout
    };
    let json = |text: String| -> Value { serde_json::from_str(&text).unwrap() };
    let first = json(doctor("doctor --peaks float32 --json"));
    assert_eq!(first["cached_before"], serde_json::json!({}), "nothing was cached");
    let cached = || json(sandbox.read("cache/strobe/peaks.json"));
    assert_eq!(cached()[0]["flops_per_s"], first["peaks"]["flops_per_s"]);
    let edit = |flops: f64| {
        let mut entries = cached();
        entries[0]["flops_per_s"] = serde_json::json!(flops);
        sandbox.write("cache/strobe/peaks.json", entries.to_string());
    };
    edit(1.0);
    let low = json(doctor("doctor --peaks float32 --json"));
    assert_eq!(num(&low, "/cached_before/flops_per_s"), 1.0);
    assert_eq!(cached()[0]["flops_per_s"], low["peaks"]["flops_per_s"], "a busy machine's reading does not last");
    edit(1e30);
    doctor("doctor --peaks float32");
    assert_eq!(num(&cached()[0], "/flops_per_s"), 1e30, "the better one is kept");
    let said = doctor("doctor --peaks");
    assert_names(&said, &["replaced", "copy (read + written)"]);
    assert!(num(&cached()[0], "/flops_per_s") < 1e20, "all of them, measured at length, replace what was wrong");
    assert_eq!(cached().as_array().map(Vec::len), Some(1));
}

#[test]
fn help_of_every_verb_starts_with_examples() {
    let sandbox = Sandbox::new();
    for verb in [
        "demo",
        "doctor",
        "prepare-dataset",
        "build",
        "bench",
        "bench throughput",
        "bench latency",
        "eval",
        "eval logits",
        "profile",
        "selftest",
    ] {
        let help = sandbox.ok(&format!("{verb} --help")).stdout;
        let mut lines = help.lines();
        assert_eq!(lines.next(), Some("EXAMPLES:"), "{verb}");
        let first_word = verb.split(' ').next().unwrap();
        assert_names(lines.next().unwrap(), &["strobe", first_word]);
        assert_names(&help, &["Usage: strobe", first_word]);
    }
    let top = sandbox.ok("--help").stdout;
    assert_names(
        &top,
        &["EXAMPLES:", "strobe demo", "Exit codes:", "prepare-dataset", "doctor", "build", "bench", "eval"],
    );
}

#[test]
fn version_and_bare_calls() {
    let sandbox = Sandbox::new();
    let version = sandbox.ok("--version").stdout;
    let plain = format!("strobe {}", env!("CARGO_PKG_VERSION"));
    // Behind it the commit, where there is a repository.
    assert!(version == format!("{plain}\n") || version.starts_with(&format!("{plain} (")), "{version}");
    for words in ["", "bench", "eval"] {
        let done = sandbox.run(words);
        assert_eq!(done.code, Some(2), "`strobe {words}` needs more words");
        assert_eq!(done.stdout, "");
        assert_names(&done.stderr, &["Usage: strobe"]);
    }
}
