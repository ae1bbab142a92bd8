//! What strobe asks of a GPU's driver, compared with what it asked before: every launch with its arguments, every copy, graph
//! and wait. No GPU is needed: the driver writes down and computes nothing (`hollow_gpu/recorder.c`). See
//! docs/design/launch-goldens.md; `STROBE_RECORD_GOLDENS=1 cargo test -p strobe-cli --test launch_goldens` records again.

#[path = "launch_goldens/cases.rs"]
mod cases;
mod common;
#[path = "launch_goldens/compare.rs"]
mod compare;
#[path = "launch_goldens/comparer.rs"]
mod comparer;
#[path = "launch_goldens/golden.rs"]
mod golden;
#[path = "launch_goldens/log.rs"]
mod log;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use cases::{CASES, Case};
use common::hollow::library;
use common::{Sandbox, finish, int};
use compare::{Intended, compare};
use golden::Golden;
use log::Log;

const COMMAND: &str = "STROBE_RECORD_GOLDENS=1 cargo test -p strobe-cli --test launch_goldens";
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/launches");
const ARGUMENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels-cuda/tests/kernel_arguments.txt");
/// Kernels that the cases launch between them, at least.
const KERNELS: usize = 120;

/// Directories for the loader's path, and one for caches with measured peaks in it, so that measuring is no part of a case.
struct Setup {
    driver: PathBuf,
    compiler: PathBuf,
    cublaslt: PathBuf,
    cache: PathBuf,
}

fn setup() -> &'static Setup {
    static SETUP: OnceLock<Setup> = OnceLock::new();
    SETUP.get_or_init(|| {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("launch-goldens-{}", std::process::id()));
        let cache = root.join("cache");
        std::fs::create_dir_all(cache.join("strobe")).unwrap();
        let peak = |kind: &str| {
            serde_json::json!({
                "key": format!("Hollow GPU, {kind}"), "flops_per_s": 1e15, "read_bytes_per_s": 4e12, "copy_bytes_per_s": 4e12,
                "measured_at": 0, "flops_of": "nothing", "bandwidth_measured": "once, cached", "flops_measured": "once, cached",
            })
        };
        let peaks = ["f32", "f16", "bf16", "e4m3"].map(peak);
        std::fs::write(cache.join("strobe/peaks.json"), Value::from(peaks.to_vec()).to_string()).unwrap();
        Setup {
            driver: library(&root, "driver", "recorder.c", ["libcuda.so.1", "libcuda.so"], &[]),
            compiler: library(&root, "compiler", "compiler.c", ["libnvrtc.so.13", "libnvrtc.so"], &[]),
            cublaslt: library(&root, "cublaslt", "cublaslt.c", ["libcublasLt.so.13", "libcublasLt.so"], &[]),
            cache,
        }
    })
}

/// One run of a case: the log, and what there is to say of steps and choices.
struct Run {
    text: String,
    log: Log,
    steps: Vec<String>,
    choices: Vec<String>,
}

fn run(case: &Case) -> Run {
    let setup = setup();
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", case.requests);
    if let Some(words) = case.build() {
        sandbox.ok(&words);
    }
    let words = format!("{} --dataset d.jsonl --iteration-log steps.jsonl --json", case.words());
    let mut command = sandbox.command(&words);
    command.env("LD_LIBRARY_PATH", std::env::join_paths([&setup.driver, &setup.compiler, &setup.cublaslt]).unwrap());
    command.env("XDG_CACHE_HOME", if case.measures_peaks() { sandbox.path("cache") } else { setup.cache.clone() });
    command.env("HOLLOW_LOG", sandbox.path("log.txt")).env("HOLLOW_ARGUMENTS", ARGUMENTS);
    command.env_remove("STROBE_CACHE_DIR").env_remove("STROBE_CUDA_PATH").env_remove("CUDA_LAUNCH_BLOCKING");
    command.envs(case.variables.iter().copied());
    let done = finish(&mut command);
    assert_eq!(done.code, Some(0), "strobe {words}\n{}", done.stderr);
    let report: Value = serde_json::from_str(&done.stdout).unwrap();
    let text = sandbox.read("log.txt");
    Run {
        log: Log::read(&text),
        text,
        steps: sandbox.json_lines("steps.jsonl").iter().enumerate().map(|(number, step)| name(number, step)).collect(),
        choices: choices(&report),
    }
}

/// What a step was made of.
fn name(number: usize, step: &Value) -> String {
    let batch = "/inflightBatchingStats";
    let count = |name: &str| int(step, &format!("{batch}/{name}"));
    let (prefill, tokens, decode) = (count("numContextRequests"), count("numCtxTokens"), count("numGenRequests"));
    let answers = int(step, "/strobe/numNewTokens");
    let chunk = if answers < prefill + decode { ", not all answer" } else { "" };
    match (prefill, decode) {
        (0, _) => format!("step {number}: {decode} decode{chunk}"),
        (_, 0) => format!("step {number}: {prefill} prefill of {tokens} tokens{chunk}"),
        _ => format!("step {number}: {prefill} prefill of {tokens} tokens and {decode} decode{chunk}"),
    }
}

/// Which kernel multiplies what, one line each.
fn choices(report: &Value) -> Vec<String> {
    let list = report.pointer("/strobe/cuda/gemm/choices").and_then(Value::as_array).cloned().unwrap_or_default();
    let line = |choice: &Value| {
        let shape = &choice["shape"];
        let flag = |name: &str| if shape[name] == true { format!(" {name}") } else { String::new() };
        format!(
            "{}x{} {} {}{}{} rows {}: {}",
            shape["n"],
            shape["k"],
            shape["epilogue"].as_str().unwrap(),
            shape["weights"].as_str().unwrap(),
            flag("bias"),
            flag("norm"),
            choice["rows"],
            choice["candidates"][0]["kernel"].as_str().unwrap()
        )
    };
    list.iter().map(line).collect()
}

/// Of which sections the text is kept: one of each kind of step, the smallest and the largest graph.
fn kept(run: &Run) -> BTreeSet<String> {
    let sections: Vec<String> = run.log.sections(&run.steps).into_iter().map(|(name, _)| name).collect();
    let first = |wanted: &dyn Fn(&str) -> bool| sections.iter().find(|name| wanted(name)).cloned();
    let (prefill, decode) = (|name: &str| name.contains(" prefill "), |name: &str| name.contains(" decode"));
    let graphs = sections.iter().filter(|name| name.starts_with("graph "));
    let last_graph = graphs.clone().next_back().cloned();
    [
        first(&|name| prefill(name) && !decode(name) && !name.ends_with("not all answer")),
        first(&|name| prefill(name) && decode(name) && !name.ends_with("not all answer")),
        first(&|name| prefill(name) && name.ends_with("not all answer")),
        first(&|name| name.starts_with("step ") && !prefill(name)),
        graphs.clone().next().cloned(),
        last_graph,
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn golden_of(case: &Case, run: &Run) -> Golden {
    let keep = kept(run);
    Golden::of(&run.log, &case.call(), run.choices.clone(), &run.steps, |name| keep.contains(name))
}

/// Run a case and compare it, or record it.
fn check(name: &str) {
    let case = CASES.iter().find(|case| case.name == name).expect("the list of cases has it");
    let found = run(case);
    let now = golden_of(case, &found);
    let path = Path::new(FOLDER).join(format!("{name}.txt"));
    if let Some(folder) = std::env::var_os("STROBE_LAUNCH_LOGS") {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(Path::new(&folder).join(format!("{name}.log")), &found.text).unwrap();
    }
    if std::env::var_os("STROBE_RECORD_GOLDENS").is_some() {
        // What is not the same twice can't be compared.
        let again = golden_of(case, &run(case));
        if let Some(report) = compare(&now, &again, Vec::new()) {
            panic!("{name}: two runs are different\n{report}");
        }
        std::fs::create_dir_all(FOLDER).unwrap();
        std::fs::write(path, now.write(COMMAND)).unwrap();
        return;
    }
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|e| panic!("{}: {e}; record it with `{COMMAND}`", path.display()));
    let old =
        Golden::read(&text).unwrap_or_else(|| panic!("{} is damaged; record it with `{COMMAND}`", path.display()));
    let list = std::fs::read_to_string(Path::new(FOLDER).join("intended.txt")).unwrap_or_default();
    let list = Intended::read(&list).unwrap_or_else(|problem| panic!("intended.txt: {problem}"));
    let intended = list.iter().filter(|one| one.case == "*" || one.case == name).collect();
    if let Some(report) = compare(&old, &now, intended) {
        panic!(
            "{name}: launches differ from {}\n{report}Whole logs to compare: STROBE_LAUNCH_LOGS=DIR cargo test -p strobe-cli --test launch_goldens {name}, \
             on this tree and on the one before. Where the difference is wanted, list it in intended.txt, or record with `{COMMAND} {name}`.",
            path.display()
        );
    }
}

/// Reads goldens, so that it needs no run.
#[test]
fn cases_cover_the_kernels() {
    if std::env::var_os("STROBE_RECORD_GOLDENS").is_some() {
        eprintln!("skipped: goldens are being written");
        return;
    }
    let mut kernels = BTreeSet::new();
    for case in CASES {
        let text = std::fs::read_to_string(Path::new(FOLDER).join(format!("{}.txt", case.name))).unwrap();
        kernels.extend(Golden::read(&text).unwrap().kernels.into_keys().filter(|name| name != "cublasLtMatmul"));
    }
    eprintln!("{} cases launch {} kernels", CASES.len(), kernels.len());
    assert!(kernels.len() >= KERNELS, "{} kernels: {kernels:?}", kernels.len());
}

/// The driver ends a process that asks for what would be nonsense on a GPU.
#[test]
fn the_driver_notices_what_no_gpu_could_do() {
    let sandbox = Sandbox::new();
    let program = sandbox.path("misuse");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hollow_gpu/misuse.c");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-w", "-pthread", "-o"]).arg(&program).arg(source);
    assert!(cc.status().expect("Rust links with cc").success(), "{cc:?}");
    let run = |mistake: &str| finish(Command::new(&program).arg(mistake).env("HOLLOW_ARGUMENTS", ARGUMENTS));
    let good = run("none");
    assert_eq!((good.code, good.stderr.as_str()), (Some(0), ""));
    for (mistake, words) in [
        ("stale address", "gather_rows_f32: an address in b2, 4096 bytes, which was given back"),
        (
            "beyond the end",
            "gather_rows_f32: an address outside of every buffer: 1 bytes at 4096 behind the beginning of b1",
        ),
        ("too much shared memory", "gather_rows_f32: 60000 bytes of shared memory, allowed are 0"),
        ("uneven clusters", "2 blocks in clusters of 3"),
        ("no blocks", "no GPU takes a grid of 0 x 1 x 1"),
        ("long copy", "cuMemcpyHtoD: an address outside of every buffer: 256 bytes at 4000"),
        ("freed twice", "where no buffer begins"),
        ("node not counted", "was not counted (note_launch)"),
        ("wait in a capture", "cuStreamSynchronize while a graph is captured"),
        ("memory in a capture", "cuMemAlloc while a graph is captured"),
        ("stale address in a graph", "cuGraphLaunch of g0: a node has an address in b2, which was given back"),
        ("graph given back", "cuGraphLaunch of a graph that was given back"),
        ("inputs beyond the end", "copy_inputs: 272 bytes are not all page-locked memory"),
        ("host writes early", "copy_inputs: the host has changed 256 bytes of page-locked memory"),
        ("tokens beyond the end", "argmax_tiles: 20 tokens do not fit"),
    ] {
        let done = run(mistake);
        assert_eq!(done.code, None, "{mistake} was not noticed: {done:?}");
        common::assert_names(&done.stderr, &[words]);
    }
}
