//! `strobe profile` around a stand-in for nsys: what it is called with, what is made of what it leaves.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use common::traces::{MIXED_NODE, real};
use common::{Done, Sandbox, assert_names, finish};

/// Writes one argument per line to `calls`, runs the command, and leaves a report per window that the variable `WINDOWS`
/// counts; an "export" is a copy of a real one. `RAW` makes it leave raw recordings as Nsight Compute's copy does.
const NSYS: &str = r#"#!/bin/sh
printf '%s\n' "$@" > "$0.$1"
verb="$1"; shift
output=""
while [ $# -gt 0 ]; do
  case "$1" in
    -o) output="$2"; shift 2 ;;
    -t|-c) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
if [ "$verb" = export ]; then
  [ -f "$1" ] || { echo "no report $1" >&2; exit 1; }
  cp "$TRACE" "$output"
  exit 0
fi
"$@"
code=$?
ending=nsys-rep
[ -z "$RAW" ] || ending=qdstrm
if [ -n "$WINDOWS" ]; then
  for window in $(seq "$WINDOWS"); do echo report > "$output.$window.$ending"; done
elif [ -z "$NOTHING" ]; then
  echo report > "$output.$ending"
fi
exit $code
"#;

/// A sandbox with a stand-in at `host/target-linux-x64/nsys`, as Nsight Compute lays it out.
fn with_nsys() -> Sandbox {
    let sandbox = Sandbox::new();
    fs::create_dir_all(sandbox.path("host/target-linux-x64")).unwrap();
    program(&sandbox, "host/target-linux-x64/nsys", NSYS);
    sandbox
}

fn program(sandbox: &Sandbox, name: &str, text: &str) {
    sandbox.write(name, text);
    fs::set_permissions(sandbox.path(name), fs::Permissions::from_mode(0o755)).unwrap();
}

/// `strobe profile` with the stand-in first on the PATH.
fn command(sandbox: &Sandbox, variables: &[(&str, &str)], words: &str) -> Command {
    let mut command = sandbox.command(words);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", sandbox.path("host/target-linux-x64").display()));
    command.env("TRACE", MIXED_NODE).envs(variables.iter().copied());
    command
}

fn run(sandbox: &Sandbox, variables: &[(&str, &str)], words: &str) -> Done {
    finish(&mut command(sandbox, variables, words))
}

/// What the stand-in was called with.
fn called(sandbox: &Sandbox, verb: &str) -> Vec<String> {
    sandbox.read(&format!("host/target-linux-x64/nsys.{verb}")).lines().map(String::from).collect()
}

#[test]
fn a_whole_run_is_recorded_exported_and_analysed() {
    let sandbox = with_nsys();
    let done = run(&sandbox, &[], "profile -o r -- echo hello there");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let expected = [
        "profile",
        "-t",
        "cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-memory-usage=true",
        "--cuda-graph-trace=node",
        "--force-overwrite=true",
        "-o",
        "r",
        "echo",
        "hello",
        "there",
    ];
    assert_eq!(called(&sandbox, "profile"), expected);
    assert_eq!(
        called(&sandbox, "export"),
        ["export", "--type=sqlite", "--force-overwrite=true", "-o", "r.sqlite", "r.nsys-rep"]
    );
    assert!(done.stdout.starts_with("hello there\n"), "{}", done.stdout);
    let alone = finish(&mut sandbox.command("analyze r.sqlite"));
    assert_eq!(done.stdout.strip_prefix("hello there\n"), Some(alone.stdout.as_str()));
    assert_names(&done.stderr, &["running: ", "nsys profile -t cuda,nvtx,osrt", "r.nsys-rep", "r.sqlite"]);
}

#[test]
fn options_reach_nsys() {
    let sandbox = with_nsys();
    let done = run(&sandbox, &[], "profile -o r.nsys-rep --gpu-metrics --cuda-graph-trace graph -- true");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let words = called(&sandbox, "profile");
    assert!(words.contains(&"--gpu-metrics-devices=all".into()) && words.contains(&"--cuda-graph-trace=graph".into()));
    assert!(sandbox.exists("r.nsys-rep") && sandbox.exists("r.sqlite"));
}

#[test]
fn the_interpreter_lock_and_the_collector_are_asked_for() {
    let sandbox = with_nsys();
    sandbox.write("show.sh", "echo collections $TLLM_PROFILE_RECORD_GC.");
    let done = run(&sandbox, &[], "profile -o r --gil --gc -- sh show.sh");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_eq!(called(&sandbox, "profile")[..3], ["profile", "-t", "cuda,nvtx,osrt,python-gil"]);
    assert_names(&done.stdout, &["collections 1.\n"]);
    assert_names(&done.stderr, &["running: ", "TLLM_PROFILE_RECORD_GC=1", "-t cuda,nvtx,osrt,python-gil"]);
    // Nothing of it without being asked.
    let plain = run(&sandbox, &[], "profile -o r --overwrite -- sh show.sh");
    assert_names(&plain.stdout, &["collections .\n"]);
    assert_eq!(called(&sandbox, "profile")[2], "cuda,nvtx,osrt");
}

#[test]
fn windows_of_other_programs_go_by_variable() {
    let sandbox = with_nsys();
    sandbox.write("r.7.nsys-rep", "of an earlier run");
    let words = "profile --windows 3-5,9 -o r --overwrite -- sh show.sh";
    sandbox.write("show.sh", "echo window $TLLM_PROFILE_START_STOP");
    let done = run(&sandbox, &[("WINDOWS", "2")], words);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let words = called(&sandbox, "profile");
    let at = words.iter().position(|word| word == "-c").expect("a capture range");
    assert_eq!(words[at..at + 3], ["-c", "cudaProfilerApi", "--capture-range-end=repeat"]);
    assert_names(&done.stdout, &["window 3-5,9\n", "window 1 of 2: r.1.sqlite", "window 2 of 2: r.2.sqlite"]);
    assert!(!done.stdout.contains("r.7") && !sandbox.exists("r.7.sqlite"), "{}", done.stdout);
}

#[test]
fn windows_of_strobe_go_by_option() {
    let sandbox = with_nsys();
    sandbox.dataset("d.jsonl", &[(5, 3), (9, 2)]);
    let words = "profile --windows 0-1 -o r -- strobe bench throughput --model micro --dataset d.jsonl --warmup 0 \
                 --device cpu --output-dir run";
    let done = run(&sandbox, &[("WINDOWS", "1")], words);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let words = called(&sandbox, "profile");
    assert_eq!(words[words.len() - 2..], ["--profile", "0-1"]);
    assert!(sandbox.exists("run/trace.sqlite"), "strobe was told its window");
    for (words, parts) in [
        ("profile --windows 1-2 -- strobe", ["--windows", "`strobe` takes no windows"]),
        ("profile --windows 1-2 -- strobe demo", ["`strobe demo` takes no windows", "`strobe bench throughput`"]),
        ("profile --windows 1-2 -- strobe bench", ["--windows", "`strobe bench` takes no windows"]),
        ("profile --windows 1-2 -- strobe bench kernels", ["--windows", "`strobe bench kernels` takes no windows"]),
        (
            "profile --windows 1-2 -- strobe bench moe-plan --experts 8",
            ["`strobe bench moe-plan`", "`strobe bench latency`"],
        ),
        ("profile --windows 1-2 -- strobe bench moe-balance", ["--windows", "`strobe bench moe-balance` takes no"]),
        (
            "profile --windows 1-2 -- strobe bench latency --runtime pytorch",
            ["--windows", "--runtime pytorch takes no"],
        ),
        (
            "profile --windows 1-2 -- strobe bench latency --runtime=pytorch",
            ["--windows", "--runtime pytorch takes no"],
        ),
        (
            "profile --windows 1-2 -- strobe bench throughput --measure-profiler-overhead",
            ["--windows", "--measure-profiler-overhead"],
        ),
        ("profile --windows 1-2 -- strobe bench latency --profile 3", ["--profile already", "--windows"]),
        ("profile --windows 2-1 -- true", ["--windows", "2-1"]),
        ("profile --windows , -- true", ["--windows", "A-B"]),
    ] {
        assert_names(&sandbox.refused_command(&mut command(&sandbox, &[], words)), &parts);
    }
}

#[test]
fn strobe_commands_without_windows_are_recorded_whole() {
    let sandbox = with_nsys();
    let done = run(&sandbox, &[], "profile -o r -- strobe bench moe-plan --experts 8 --top-k 2");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_eq!(called(&sandbox, "profile")[11..], ["bench", "moe-plan", "--experts", "8", "--top-k", "2"]);
}

#[test]
fn the_printed_call_can_be_repeated() {
    let sandbox = with_nsys();
    let script = "echo \"[$TLLM_PROFILE_START_STOP] it's $1\"";
    let mut first = command(&sandbox, &[("WINDOWS", "1")], "profile --windows 3-5,9 -o r --overwrite --");
    let done = finish(first.args(["sh", "-c", script, "sh", "a  b"]));
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(done.stdout.starts_with("[3-5,9] it's a  b\n"), "{}", done.stdout);
    let arguments = called(&sandbox, "profile");

    let printed = done.stderr.lines().find_map(|line| line.strip_prefix("running: ")).expect("the call");
    assert!(printed.starts_with("TLLM_PROFILE_START_STOP=3-5,9 "), "{printed}");
    let mut again = Command::new("sh");
    again.arg("-c").arg(printed).current_dir(sandbox.path("")).env_remove("TLLM_PROFILE_START_STOP");
    let again = finish(&mut again);
    assert_eq!((again.code, again.stdout.as_str()), (Some(0), "[3-5,9] it's a  b\n"), "{}", again.stderr);
    assert_eq!(called(&sandbox, "profile"), arguments);
}

#[test]
fn a_real_trace_of_a_whole_run() {
    let Some(trace) = real("nsys/h200/node.sqlite") else { return };
    let sandbox = with_nsys();
    let done = run(&sandbox, &[("TRACE", trace.to_str().unwrap())], "profile -o r -- true");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_names(&done.stdout, &["H200", "iteration"]);
}

#[test]
fn failures_of_the_command_are_reported() {
    let sandbox = with_nsys();
    sandbox.write("fail.sh", "exit 7");
    let done = run(&sandbox, &[], "profile -o r -- sh fail.sh");
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert_names(&done.stderr, &["error: nsys or the command ended with exit code 7", "recorded until then"]);
    assert!(!done.stdout.is_empty(), "what was recorded is analysed");
    let done = run(&sandbox, &[("NOTHING", "1")], "profile -o s -- sh fail.sh");
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["no report s.nsys-rep", "nsys or the command ended with exit code 7", "above"]);
    let done = run(&sandbox, &[("NOTHING", "1")], "profile --windows 900 -o s -- true");
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["no report s.nsys-rep", "never reached a window", "cudaProfilerStart"]);
}

#[test]
fn failures_of_nsys_are_not_put_on_the_command() {
    let sandbox = Sandbox::new();
    program(&sandbox, "nsys", "#!/bin/sh\necho \"unrecognised option '--cuda-graph-trace=node'\" >&2\nexit 1\n");
    let done = sandbox.run("profile --nsys nsys -- true");
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["unrecognised option", "error: nsys made no report runs/profile-"]);
    assert_names(&done.stderr, &["nsys or the command ended with exit code 1", "above"]);
    assert!(!sandbox.exists("runs"), "an empty directory stayed behind");
}

#[test]
fn reports_without_a_name_go_to_runs() {
    let sandbox = with_nsys();
    for program in ["nowhere", "host", "text"] {
        sandbox.write("text", "not a program");
        sandbox.refused_command(&mut command(&sandbox, &[], &format!("profile --nsys {program} -- true")));
    }
    program(&sandbox, "nsys", "#!/no/such/interpreter\n");
    let done = run(&sandbox, &[], "profile --nsys nsys -- true");
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["cannot run ./nsys"]);
    assert!(!sandbox.exists("runs"), "an empty directory stayed behind");

    let done = run(&sandbox, &[], "profile -- true");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let left = fs::read_dir(sandbox.path("runs")).unwrap().count();
    assert_eq!(left, 2, "a report and its export");
    let done = run(&sandbox, &[("NOTHING", "1")], "profile -- true");
    assert_eq!(done.code, Some(2));
    assert_eq!(fs::read_dir(sandbox.path("runs")).unwrap().count(), left);

    let sandbox = with_nsys();
    sandbox.write("runs", "a file");
    assert_names(&sandbox.refused_command(&mut command(&sandbox, &[], "profile -- true")), &["cannot write runs/"]);
}

#[test]
fn raw_recordings_are_imported() {
    let sandbox = with_nsys();
    let done = run(&sandbox, &[("RAW", "1")], "profile -o r -- true");
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["r.qdstrm", "no QdstrmImporter", "developer.nvidia.com/nsight-systems"]);

    fs::create_dir(sandbox.path("host/linux-desktop-glibc_2_11_3-x64")).unwrap();
    let importer = "host/linux-desktop-glibc_2_11_3-x64/QdstrmImporter";
    let text = "#!/bin/sh\n[ \"$1 $3\" = '-i -o' ] || exit 9\ncase \"$LD_LIBRARY_PATH\" in */linux-desktop*) cp $2 $4;; esac\n";
    program(&sandbox, importer, text);
    let done = run(&sandbox, &[("RAW", "1"), ("WINDOWS", "2")], "profile -o w --windows 1-2 -- true");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(sandbox.exists("w.1.sqlite") && sandbox.exists("w.2.sqlite"));

    let missing = "error while loading shared libraries: libdw.so.1: cannot open shared object file";
    program(&sandbox, importer, &format!("#!/bin/sh\necho QdstrmImporter: {missing} >&2\nexit 127\n"));
    let done = run(&sandbox, &[("RAW", "1")], "profile -o x -- true");
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["libdw.so.1", "libdw1", "elfutils"]);
}

#[test]
fn an_interrupt_before_any_report_is_not_an_error() {
    let sandbox = with_nsys();
    let text = "#!/bin/sh\n[ \"$1\" = profile ] || exit 0\nkill -INT $PPID\nexit 1\n";
    program(&sandbox, "host/target-linux-x64/nsys", text);
    let done = run(&sandbox, &[], "profile -o r -- true");
    assert_eq!(done.code, Some(130), "{}", done.stderr);
}

#[test]
fn bad_calls() {
    let sandbox = with_nsys();
    sandbox.write("old.nsys-rep", "");
    sandbox.write("other.sqlite", "");
    sandbox.write("window.1.sqlite", "keep");
    sandbox.write("raw.2.qdstrm", "keep");
    sandbox.write("text", "not a program");
    for (words, parts) in [
        ("profile -o old -- true", vec!["old", "already", "--overwrite"]),
        ("profile -o old.nsys-rep -- true", vec!["old", "already"]),
        ("profile -o other -- true", vec!["other", "already"]),
        ("profile -o window --windows 1-2,4-5 -- true", vec!["window already (window.1.sqlite)", "--overwrite"]),
        ("profile -o raw --windows 1-2,4-5 -- true", vec!["raw already (raw.2.qdstrm)", "--overwrite"]),
        ("profile -o no/where -- true", vec!["no/where.sqlite"]),
        ("profile -o a%p -- true", vec!["a%p", "%"]),
        ("profile", vec!["CMD"]),
        ("profile -o r true", vec!["true", "--help"]),
        ("profile --nsys nowhere -- true", vec!["--nsys nowhere does not exist"]),
        ("profile --nsys host -- true", vec!["--nsys host is not a file"]),
        ("profile --nsys text -- true", vec!["--nsys text may not be executed", "chmod +x"]),
        ("profile --cuda-graph-trace all -- true", vec!["--cuda-graph-trace", "node"]),
    ] {
        assert_names(&sandbox.refused_command(&mut command(&sandbox, &[], words)), &parts);
    }
    let done = run(&sandbox, &[], "profile -o old --overwrite -- true");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let words = "profile -o window --overwrite --windows 1-2,4-5 -- true";
    let done = run(&sandbox, &[("WINDOWS", "2")], words);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(fs::read(sandbox.path("window.1.sqlite")).unwrap() != b"keep", "--overwrite replaces it");
}

#[test]
fn no_nsys() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command("profile -o r -- true");
    command.env("PATH", "");
    if finish(sandbox.command("doctor --json").env("PATH", "")).stdout.contains("\"nsys\": null") {
        let message = sandbox.refused_command(&mut command);
        assert_names(
            &message,
            &["nsys was not found", "PATH", "/opt/nvidia", "developer.nvidia.com", "--nsys", "--profile A-B"],
        );
    } else {
        eprintln!("skipped: this machine has nsys");
    }
}
