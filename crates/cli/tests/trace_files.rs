//! Files that are given to `strobe analyze`, `compare` and `convert`: reports of Nsight Systems, tables in Parquet, files of
//! different jobs, and names that a terminal would obey.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use common::traces::{KINETO, MIXED_GRAPH, MIXED_NODE, real};
use common::{Done, Sandbox, assert_names, finish};
use serde_json::Value;

/// An "export" is a copy of a real one; `BROKEN` makes it fail as nsys does. The call is kept.
const NSYS: &str = r#"#!/bin/sh
printf '%s\n' "$@" > "$0.called"
shift
while [ $# -gt 0 ]; do
  case "$1" in
    -o) output="$2"; shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
[ -z "$BROKEN" ] || { echo "Processing" >&2; echo "FATAL ERROR: the report is of a newer version" >&2; exit 3; }
cp "$TRACE" "$output"
"#;

fn with_nsys(sandbox: &Sandbox) {
    fs::create_dir_all(sandbox.path("tools")).unwrap();
    sandbox.write("tools/nsys", NSYS);
    fs::set_permissions(sandbox.path("tools/nsys"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir_all(sandbox.path("temporary")).unwrap();
    for name in ["r.nsys-rep", "old.qdrep"] {
        sandbox.write(name, "a report");
    }
}

fn run(sandbox: &Sandbox, path: &str, variables: &[(&str, &str)], words: &str) -> Done {
    let mut command = sandbox.command(words);
    command.env("PATH", path).env("TRACE", MIXED_NODE).env("TMPDIR", sandbox.path("temporary"));
    finish(command.envs(variables.iter().copied()))
}

#[test]
fn a_report_is_exported_by_an_installed_nsys() {
    let sandbox = Sandbox::new();
    with_nsys(&sandbox);
    let path = format!("{}:/usr/bin:/bin", sandbox.path("tools").display());
    let plain = sandbox.ok(&format!("analyze {MIXED_NODE} --report kern-sum,gaps --format csv")).stdout;
    for report in ["r.nsys-rep", "old.qdrep"] {
        let done = run(&sandbox, &path, &[], &format!("analyze {report} --report kern-sum,gaps --format csv"));
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        assert_eq!(done.stdout, plain);
        assert_names(&done.stderr, &["exporting ", report]);
        let called = sandbox.read("tools/nsys.called");
        let words: Vec<&str> = called.lines().collect();
        assert_eq!(words[..4], ["export", "--type=sqlite", "--force-overwrite=true", "-o"]);
        assert_eq!(words.last(), Some(&report));
        assert!(sandbox.names("temporary").is_empty(), "{:?}", sandbox.names("temporary"));
    }
    let done = run(&sandbox, &path, &[], "analyze r.nsys-rep --report summary --json");
    let document: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(document["sources"][0]["file"], "r.nsys-rep");
    let done = run(&sandbox, &path, &[], "compare r.nsys-rep old.qdrep");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let done = run(&sandbox, &path, &[], "convert r.nsys-rep -o out.json");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(sandbox.exists("out.json") && !sandbox.exists("r.sqlite"));
}

#[test]
fn without_nsys_or_with_one_that_fails_the_error_says_what_to_do() {
    let sandbox = Sandbox::new();
    with_nsys(&sandbox);
    let path = format!("{}:/usr/bin:/bin", sandbox.path("tools").display());
    let done = run(&sandbox, &path, &[("BROKEN", "1")], "analyze r.nsys-rep");
    assert_eq!((done.code, done.stdout.as_str()), (Some(2), ""), "{}", done.stderr);
    assert_names(&done.stderr, &["error: r.nsys-rep: ", "FATAL ERROR: the report is of a newer version"]);
    assert!(!done.stderr.contains("Processing") && sandbox.names("temporary").is_empty());
    if std::path::Path::new("/opt/nvidia").exists() || std::path::Path::new("/usr/local/cuda").exists() {
        eprintln!("skipped: this machine may have an nsys of its own");
        return;
    }
    let done = run(&sandbox, "/nowhere", &[], "analyze r.nsys-rep");
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert_names(&done.stderr, &["nsys was not found", "install", "nsys export --type sqlite r.nsys-rep", ".sqlite"]);
}

/// A report without the table of files, whose names and sizes are others.
fn figures(sandbox: &Sandbox, trace: &str, report: &str) -> Value {
    let done = sandbox.ok(&format!("analyze {trace} --report {report} --json"));
    let mut document: Value = serde_json::from_str(&done.stdout).unwrap();
    let mut report = document["reports"][0].take();
    if let Some(tables) = report["tables"].as_array_mut() {
        tables.retain(|table| table["name"] != "sources");
    }
    report
}

#[test]
fn tables_in_parquet_read_back_as_the_same_trace() {
    let sandbox = Sandbox::new();
    let reals = ["nsys/h200/node.sqlite", "kineto/hta/sampled_rank-0.json.gz", "truth/graph_row_stripped.sqlite"];
    let reals = reals.iter().filter_map(|name| real(name)).map(|path| path.display().to_string());
    let all = [MIXED_NODE, MIXED_GRAPH, KINETO].map(String::from).into_iter().chain(reals);
    for trace in all {
        sandbox.ok(&format!("convert {trace} -o t.parquetdir"));
        let reports = ["summary", "gaps", "iterations", "budget", "critical-path", "kern-sum", "nvtx-gpu-proj-sum"];
        for report in reports {
            let back = figures(&sandbox, "t.parquetdir", report);
            assert_eq!(back, figures(&sandbox, &trace, report), "{report} of {trace}");
        }
        sandbox.ok(&format!("compare {trace} t.parquetdir"));
        sandbox.ok("convert t.parquetdir -o again.sqlite");
        assert_eq!(figures(&sandbox, "again.sqlite", "kern-sum"), figures(&sandbox, &trace, "kern-sum"));
    }
    let done = sandbox.run("analyze t.parquetdir/ops.parquet");
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["a single table", "pass the directory with all tables: t.parquetdir"]);
    fs::write(sandbox.path("t.parquetdir/calls.parquet"), b"PAR1 cut").unwrap();
    let done = sandbox.run("analyze t.parquetdir");
    assert_eq!((done.code, done.stderr.lines().count()), (Some(2), 1), "{}", done.stderr);
    assert_names(&done.stderr, &["calls.parquet is damaged"]);
}

#[test]
fn files_of_different_jobs_are_not_merged_silently() {
    let sandbox = Sandbox::new();
    let trace = |rank: u32, base: u64| {
        format!(
            r#"{{"distributedInfo":{{"rank":{rank},"world_size":2}},"baseTimeNanoseconds":{base},"traceEvents":[
                {{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":2,"args":{{"device":0,"stream":7}}}}]}}"#
        )
    };
    sandbox.write("a.json", trace(0, 1_700_000_000_000_000_000));
    sandbox.write("b.json", trace(1, 1_800_000_000_000_000_000));
    let done = sandbox.run("analyze a.json b.json");
    assert_eq!((done.code, done.stdout.as_str()), (Some(2), ""));
    assert_names(
        &done.stderr,
        &["error: a.json and b.json are not ranks of one job", "`strobe compare a.json b.json`"],
    );
    sandbox.write("c.json", trace(1, 1_700_000_005_000_000_000));
    let done = sandbox.ok("analyze a.json c.json --report summary");
    assert_names(&done.stderr, &["may not be ranks of one job", "share no moment", "`strobe compare a.json c.json`"]);
}

#[test]
fn names_of_a_trace_do_not_command_the_terminal() {
    let sandbox = Sandbox::new();
    let name = r"evil\u001b[31mred\nnext\u202egnp\u0007\u009b2J";
    let event = |category: &str, pid: u32, at: u32, rest: &str| {
        format!(
            r#"{{"ph":"X","cat":"{category}","name":"{name}","pid":{pid},"tid":7,"ts":{at},"dur":500,"args":{{{rest}}}}}"#
        )
    };
    let events = [
        event("user_annotation", 5, 0, ""),
        event("cuda_runtime", 5, 1, r#""correlation":1"#),
        event("kernel", 0, 3, r#""correlation":1,"device":0,"stream":7"#),
        event("kernel", 0, 9_000, r#""correlation":2,"device":0,"stream":7"#),
        format!(r#"{{"ph":"M","name":"process_name","pid":5,"tid":0,"args":{{"name":"{name}"}}}}"#),
    ];
    let device = format!(r#"[{{"id":0,"name":"{name}"}}]"#);
    let file = "odd\u{1b}[2J\u{202e}.json";
    sandbox.write(file, format!(r#"{{"deviceProperties":{device},"traceEvents":[{}]}}"#, events.join(",")));
    let unfit =
        |text: &str| text.chars().find(|c| *c != '\n' && (c.is_control() || matches!(c, '\u{202a}'..='\u{202e}')));
    let run = |words: &[&str]| {
        let mut command = sandbox.command("");
        command.args(words);
        finish(&mut command)
    };
    let done = run(&["analyze", file, "--report", "all", "--top", "0"]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_names(&done.stdout, &[r"evil\x1b[31mred\nnext\u202egnp"]);
    for text in [&done.stdout, &done.stderr] {
        assert_eq!(unfit(text), None, "{text:?}");
    }
    // Programs get names as they are.
    let done = run(&["analyze", file, "--report", "kern-sum", "--json"]);
    let document: Value = serde_json::from_str(&done.stdout).unwrap();
    let exact = "evil\u{1b}[31mred\nnext\u{202e}gnp\u{7}\u{9b}2J";
    let rows = document["reports"][0]["tables"][0]["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["Name"] == exact), "{rows:?}");
    // Errors name files.
    let done = run(&["analyze", "missing\u{1b}[31m\n.json"]);
    assert_eq!((done.code, unfit(&done.stderr), done.stderr.lines().count()), (Some(2), None, 1), "{}", done.stderr);
    let done = run(&["analyze", file, file]);
    assert_eq!((done.code, unfit(&done.stderr)), (Some(2), None), "{}", done.stderr);
    assert_names(&done.stderr, &[r"odd\x1b[2J\u202e.json"]);
}
