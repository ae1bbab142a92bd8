//! `strobe analyze` as its users call it: every report of every trace, in every format, and what it says of bad input.

mod common;

use std::fs;
use std::io::Read;
use std::process::Stdio;

use common::traces::{self, KINETO, MIXED_GRAPH, MIXED_NODE};
use common::{Sandbox, assert_names, finish};
use serde_json::Value;

/// Our names of Nsight Systems' summaries, and theirs.
const SUMMARIES: [(&str, &str); 9] = [
    ("kern-sum", "cuda_gpu_kern_sum"),
    ("api-sum", "cuda_api_sum"),
    ("mem-time-sum", "cuda_gpu_mem_time_sum"),
    ("mem-size-sum", "cuda_gpu_mem_size_sum"),
    ("gpu-sum", "cuda_gpu_sum"),
    ("nvtx-sum", "nvtx_sum"),
    ("nvtx-gpu-proj-sum", "nvtx_gpu_proj_sum"),
    ("nvtx-kern-sum", "nvtx_kern_sum"),
    ("osrt-sum", "osrt_sum"),
];
/// All other reports.
const OWN: [&str; 16] = [
    "summary",
    "advice",
    "iterations",
    "budget",
    "categories",
    "layers",
    "experts",
    "gaps",
    "roofline",
    "operators",
    "critical-path",
    "overlap",
    "ranks",
    "launch",
    "memory",
    "metrics",
];

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Fields of a line of CSV.
fn fields(line: &str) -> Vec<String> {
    let (mut fields, mut quoted) = (vec![String::new()], false);
    for letter in line.chars() {
        match letter {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            _ => fields.last_mut().unwrap().push(letter),
        }
    }
    fields
}

#[test]
fn the_first_screen_answers_where_the_time_went() {
    let sandbox = Sandbox::new();
    for trace in [MIXED_NODE, MIXED_GRAPH, KINETO] {
        let done = sandbox.ok(&format!("analyze {trace}"));
        let titles = ["Summary\n═══", "Where the wall time of an iteration went\n═══", "Device time by category\n═══"];
        assert_names(&done.stdout, &titles);
        assert_names(&done.stdout, &["Kernels by name\n═══", "Advice", "% of", "found by", "The rules know"]);
    }
    let hidden = sandbox.ok(&format!("analyze {MIXED_GRAPH}")).stdout;
    assert_names(&hidden, &["--cuda-graph-trace=node"]);
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    let sandbox = Sandbox::new();
    for trace in traces::all() {
        for width in ["80", "100", "160"] {
            let done = sandbox.ok_with(&[("COLUMNS", width)], &format!("analyze {} --report all", trace.display()));
            let limit: usize = width.parse().unwrap();
            let long = done.stdout.lines().find(|line| line.chars().count() > limit);
            assert_eq!(long, None, "{} at {width} columns", trace.display());
        }
    }
}

#[test]
fn every_report_of_every_trace_has_rows_or_says_why_not() {
    let sandbox = Sandbox::new();
    for trace in traces::all() {
        let document = json(&sandbox.ok(&format!("analyze {} --report all --format json", trace.display())).stdout);
        let reports = document["reports"].as_array().unwrap();
        let names: Vec<_> = reports.iter().map(|r| r["report"].as_str().unwrap()).collect();
        assert_eq!(names.len(), OWN.len() + SUMMARIES.len());
        assert!(OWN.iter().chain(SUMMARIES.iter().map(|(name, _)| name)).all(|name| names.contains(name)));
        for report in reports {
            let rows = report["tables"].as_array().unwrap().iter().any(|t| !t["rows"].as_array().unwrap().is_empty());
            let why = report["not_applicable"].as_str().is_some_and(|why| !why.is_empty());
            let said = report["report"] == "advice" && !report["notes"].as_array().unwrap().is_empty();
            assert!(rows != why || said, "{}, {}: rows {rows}, why {why}", trace.display(), report["report"]);
        }
    }
}

#[test]
fn csv_equals_what_nsys_prints() {
    let sandbox = Sandbox::new();
    let mut checked = 0;
    let mut folders = vec![("mixed_node", MIXED_NODE.into()), ("mixed_graph", MIXED_GRAPH.into())];
    for name in ["rep_sdpa", "node", "gpum"] {
        folders.extend(traces::real(&format!("nsys/h200/{name}.sqlite")).map(|path| (name, path)));
    }
    for (name, trace) in &folders {
        for (ours, theirs) in SUMMARIES {
            let Ok(golden) = fs::read_to_string(trace.with_file_name(format!("{name}_{theirs}.csv"))) else { continue };
            for report in [ours, theirs] {
                let done = sandbox.ok(&format!("analyze {} --report {report} --format csv", trace.display()));
                assert_eq!(done.stdout, golden, "{name}, {report}");
            }
            checked += 1;
        }
    }
    assert!(checked >= 18, "{checked} goldens were found");
}

#[test]
fn json_and_csv_hold_the_same_numbers() {
    let sandbox = Sandbox::new();
    let same = |value: &Value, field: &str, what: &str| match value {
        Value::Null => assert_eq!(field, "", "{what}"),
        Value::String(text) => assert_eq!(field, text, "{what}"),
        number => {
            let (a, b) = (number.as_f64().unwrap(), field.parse::<f64>().unwrap());
            assert!((a - b).abs() <= a.abs() * 1e-12, "{what}: {a}, {b}");
        }
    };
    for report in ["iterations", "categories", "launch"] {
        let words = format!("analyze {KINETO} --report {report} --format");
        let csv = sandbox.ok(&format!("{words} csv")).stdout;
        let document = json(&sandbox.ok(&format!("{words} json")).stdout);
        let tables = document["reports"][0]["tables"].as_array().unwrap().clone();
        let blocks: Vec<_> = csv.split("\n\n").collect();
        assert_eq!(blocks.len(), tables.len(), "{report}");
        for (block, table) in blocks.iter().zip(&tables) {
            let rows = table["rows"].as_array().unwrap();
            assert_eq!(block.trim_end().lines().count(), rows.len() + 1, "{report}, {}", table["name"]);
            let headers = fields(block.lines().next().unwrap());
            for (line, row) in block.lines().skip(1).zip(rows) {
                let fields = fields(line);
                assert_eq!((fields.len(), headers.len()), (row.as_object().unwrap().len(), fields.len()));
                for (header, field) in headers.iter().zip(&fields) {
                    // CSV names the unit in the header where the name does not.
                    let plain = header.rsplit_once(" (").map_or(header.as_str(), |(name, _)| name);
                    let value = row.get(header).or(row.get(plain)).unwrap_or_else(|| panic!("no {header} in {row}"));
                    same(value, field, header);
                }
            }
        }
    }
    // Nsight Systems' own: totals in ns.
    let csv = sandbox.ok(&format!("analyze {MIXED_NODE} --report kern-sum --format csv")).stdout;
    let document = json(&sandbox.ok(&format!("analyze {MIXED_NODE} --report kern-sum --json")).stdout);
    let rows = document["reports"][0]["tables"][0]["rows"].as_array().unwrap();
    assert_eq!(csv.lines().count(), rows.len() + 1);
    for (line, row) in csv.lines().skip(1).zip(rows) {
        let fields = fields(line);
        assert_eq!(fields[1], row["Total Time (ns)"].to_string());
        assert_eq!(fields[2], row["Instances"].to_string());
        assert_eq!(fields.last().unwrap(), row["Name"].as_str().unwrap());
    }
}

#[test]
fn sources_are_named_without_their_folders() {
    let sandbox = Sandbox::new();
    let document = json(&sandbox.ok(&format!("analyze {MIXED_NODE} --json")).stdout);
    assert_eq!(document["sources"][0]["file"], "mixed_node.sqlite");
    assert!(!document.to_string().contains(env!("CARGO_MANIFEST_DIR")));
}

#[test]
fn iterations_can_be_named() {
    let sandbox = Sandbox::new();
    let layers = sandbox.ok(&format!("analyze {MIXED_NODE} --report iterations --iteration-range ^layer")).stdout;
    assert_names(&layers, &["layer 0", "found by ranges that match `^layer`"]);
    let line = sandbox.refused(&format!("analyze {MIXED_NODE} --iteration-range nothing-like-this"));
    assert_names(&line, &["--iteration-range", "nothing-like-this", "--list-iterations"]);
    let line = sandbox.refused(&format!("analyze {MIXED_NODE} --iteration-range (("));
    assert_names(&line, &["--iteration-range", "((", "not a regular expression", "unclosed group"]);
}

#[test]
fn rules_of_the_user_come_first() {
    let sandbox = Sandbox::new();
    sandbox.write("mine.toml", "[[rule]]\ncategory = \"sums\"\nclass = \"compute\"\nname = 'reduce_kernel'\n");
    let done = sandbox.run(&format!("analyze {MIXED_NODE} --report categories --rules mine.toml"));
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_names(&done.stdout, &["\nsums "]);
    for (text, said) in [
        ("[[rule]\n", "mine.toml"),
        ("[[rule]]\ncategory = \"sums\"\nclass = \"compute\"\nname = '(('\n", "(("),
        ("[[rule]]\ncategory = \"sums\"\nclass = \"no such\"\nname = 'x'\n", "no such"),
        ("rules = 3\n", "mine.toml"),
    ] {
        sandbox.write("mine.toml", text);
        let line = sandbox.refused(&format!("analyze {MIXED_NODE} --rules mine.toml"));
        assert_names(&line, &["mine.toml", said]);
    }
    assert_names(&sandbox.refused(&format!("analyze {MIXED_NODE} --rules none.toml")), &["--rules", "none.toml"]);
}

#[test]
fn several_files_are_ranks_of_one_run() {
    let sandbox = Sandbox::new();
    let events = |words: &str| {
        let document = json(&sandbox.ok(&format!("analyze {words} --report kern-sum --json")).stdout);
        let rows = document["reports"][0]["tables"][0]["rows"].as_array().unwrap().clone();
        rows.iter().map(|row| row["Instances"].as_u64().unwrap()).sum::<u64>()
    };
    fs::copy(KINETO, sandbox.path("a.json.gz")).unwrap();
    fs::copy(KINETO, sandbox.path("b.json.gz")).unwrap();
    assert_eq!(events("a.json.gz b.json.gz"), 2 * events("a.json.gz"));
    assert_eq!(events("a.json.gz"), 2777);
}

const BENCH: &str = "bench throughput --model micro --dataset d.jsonl --warmup 1 --max-batch-size 3";

#[test]
fn run_directories_are_traces() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 9), (7, 12), (65, 4), (20, 10)]);
    sandbox.ok(&format!("{BENCH} --output-dir profiled --profile 2-6"));
    sandbox.ok(&format!("{BENCH} --output-dir plain"));
    let screen = sandbox.ok("analyze profiled").stdout;
    assert_names(&screen, &["Summary", "5 iterations", "gemm"]);
    let budget = json(&sandbox.ok("analyze profiled --report budget,roofline --json").stdout);
    assert!(budget["reports"].as_array().unwrap().iter().all(|r| r["not_applicable"].is_null()), "{budget:#}");

    let done = sandbox.ok("analyze plain");
    assert_names(&done.stderr, &["not profiled", "--profile"]);
    let iterations = json(&sandbox.ok("analyze plain --report iterations --json").stdout);
    let rows = iterations["reports"][0]["tables"][0]["rows"].as_array().unwrap().len();
    assert_eq!(rows, sandbox.json_lines("plain/iterations.jsonl").len());
    // It was not recorded by anything, least of all by Nsight Systems.
    let all = sandbox.ok("analyze plain --report all").stdout;
    assert!(!all.contains("nsys profile"), "{all}");
    sandbox.write("plain/iterations.jsonl", "{}\n");
    assert_names(&sandbox.refused("analyze plain"), &["iterations.jsonl, line 1"]);
}

/// What lies between two windows was not recorded and is nobody's.
#[test]
fn time_between_windows_is_not_idle() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 30), (7, 32), (65, 24), (20, 30)]);
    sandbox.ok(&format!("{BENCH} --output-dir run --profile 2-3,30-32"));
    let summary = json(&sandbox.ok("analyze run --report summary --json").stdout);
    let tables = summary["reports"][0]["tables"].as_array().unwrap();
    let devices = tables.iter().find(|table| table["name"] == "devices").unwrap();
    let span = devices["rows"][0]["span"].as_i64().unwrap();
    let recorded = sandbox.json_lines("run/iterations.jsonl").into_iter().filter(|i| i["strobe"]["profiled"] == true);
    let walls: f64 = recorded.map(|i| i["iterLatencyMS"].as_f64().unwrap()).sum();
    // Between iterations of one window there is a little time too.
    assert!(span as f64 <= 1.2e6 * walls, "{span} ns between the first and last op of windows of {walls} ms");
    assert_names(&sandbox.ok("analyze run --report summary").stdout, &["lie between recorded windows"]);
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("folder")).unwrap();
    sandbox.write("empty.sqlite", "");
    sandbox.write("notes.txt", "Dear diary,\n");
    sandbox.write("noise.bin", [0x80_u8, 0x01, 0xfe, 0x00, 0x13].repeat(100));
    sandbox.write("a.nsys-rep", [b"NVIDIA\0\0".as_slice(), &[7; 400]].concat());
    sandbox.write("empty.json", "{}");
    let whole = fs::read(MIXED_NODE).unwrap();
    sandbox.write("cut.sqlite", &whole[..5000]);
    sandbox.write("cut.json.gz", &fs::read(KINETO).unwrap()[..12]);
    for (name, said) in [
        ("none.sqlite", "none.sqlite"),
        ("folder", "directory without traces"),
        ("empty.sqlite", "empty file"),
        ("notes.txt", "notes.txt"),
        ("noise.bin", "noise.bin"),
        ("a.nsys-rep", "a.nsys-rep"),
        ("empty.json", "empty.json"),
        ("cut.sqlite", "cut.sqlite"),
        ("cut.json.gz", "cut.json.gz"),
    ] {
        assert_names(&sandbox.refused(&format!("analyze {name}")), &[name, said]);
    }
    let line = sandbox.refused(&format!("analyze {MIXED_NODE} --report kern-sun"));
    assert_names(&line, &["kern-sun", "kern-sum", "critical-path", "all"]);
    assert_names(&sandbox.refused(&format!("analyze {MIXED_NODE} --html folder")), &["folder", "directory"]);
    assert_names(&sandbox.refused(&format!("analyze {MIXED_NODE} --html no/where.html")), &["no/where.html"]);
    sandbox.refused("analyze");
}

#[test]
fn truncated_traces_give_what_they_hold_and_say_so() {
    let sandbox = Sandbox::new();
    sandbox.write("cut.json.gz", &fs::read(KINETO).unwrap()[..60_000]);
    let done = sandbox.ok("analyze cut.json.gz --report summary");
    assert_names(&done.stderr, &["warning: "]);
    assert_names(&done.stdout, &["cut.json.gz", "lost"]);
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&format!("analyze {KINETO} --report all --top 0"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut some = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn top_limits_the_rows() {
    let sandbox = Sandbox::new();
    let rows = |top: usize| {
        let text = sandbox.ok(&format!("analyze {MIXED_NODE} --report kern-sum --top {top}")).stdout;
        (text.lines().filter(|line| line.contains(" % ")).count(), text.contains("--top 0 shows all"))
    };
    assert_eq!((rows(3), rows(0)), ((3, true), (11, false)));
}

/// Every place of an export in which a name, a secret or captured output may stand.
fn with_secrets(sandbox: &Sandbox, name: &str) {
    fs::copy(MIXED_NODE, sandbox.path(name)).unwrap();
    let mut permissions = fs::metadata(sandbox.path(name)).unwrap().permissions();
    #[expect(clippy::permissions_set_readonly_false)]
    permissions.set_readonly(false);
    fs::set_permissions(sandbox.path(name), permissions).unwrap();
    let database = rusqlite::Connection::open(sandbox.path(name)).unwrap();
    database
        .execute_batch(
            "CREATE TABLE IF NOT EXISTS META_DATA_CAPTURE (name TEXT, value TEXT);
             CREATE TABLE IF NOT EXISTS META_DATA_EXPORT (name TEXT, value TEXT);
             CREATE TABLE IF NOT EXISTS TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
             CREATE TABLE IF NOT EXISTS ProcessStreams (globalPid INTEGER, filenameId INTEGER, contentId INTEGER);
             INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', 'TOKEN=S3CRET-env'),
                 ('PROCESS_0:COMMAND', 'python S3CRET-command --key x'), ('PROCESS_0:WORKING_DIRECTORY', '/home/S3CRET-folder');
             INSERT INTO META_DATA_EXPORT (name, value) VALUES ('EXPORT_HOST', 'S3CRET-host'), ('EXPORT_USER', 'S3CRET-user');
             INSERT INTO TARGET_INFO_SYSTEM_ENV (name, value) VALUES ('Hostname', 'S3CRET-system');
             INSERT INTO StringIds VALUES (900001, 'PATH=S3CRET-string'), (900002, 'S3CRET-stdout'), (900003, '/S3CRET-file');
             INSERT INTO ProcessStreams VALUES (1, 900003, 900002);",
        )
        .unwrap();
}

#[test]
fn secrets_in_an_export_go_nowhere() {
    let sandbox = Sandbox::new();
    with_secrets(&sandbox, "secret.sqlite");
    let mut outputs: Vec<(String, Vec<u8>)> = Vec::new();
    for words in [
        "analyze secret.sqlite --report all --top 0 --html page.html",
        "analyze secret.sqlite --report all --format csv",
        "analyze secret.sqlite --report all --json",
        "compare secret.sqlite secret.sqlite --html compared.html",
        "compare secret.sqlite secret.sqlite --json",
        "convert secret.sqlite -o out.json",
        "convert secret.sqlite -o out.perfetto-trace",
        "convert secret.sqlite -o out.sqlite",
        "convert secret.sqlite -o tables-csv --to csv",
        "convert secret.sqlite -o tables-parquet --to parquet",
    ] {
        let done = finish(&mut sandbox.command(words));
        assert_eq!(done.code, Some(0), "{words}: {}", done.stderr);
        outputs.push((words.to_owned(), (done.stdout + &done.stderr).into_bytes()));
    }
    let mut folders = vec![sandbox.path(".")];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if !path.ends_with("secret.sqlite") {
                outputs.push((path.display().to_string(), fs::read(&path).unwrap()));
            }
        }
    }
    assert!(outputs.len() > 20, "{}", outputs.len());
    for (what, bytes) in outputs {
        assert!(!bytes.windows(7).any(|w| w == b"S3CRET-"), "{what} gives a secret away");
    }
}
