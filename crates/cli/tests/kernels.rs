//! `strobe bench kernels` as its users call it: every op in every type, every form of output, and bad input.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use common::{Sandbox, assert_names, num};
use serde_json::Value;
use strobe_kernels_cpu::Tier;

/// Odd sizes of every op.
const SHAPES: &str = r#"[
    {"op": "gemm", "m": 5, "n": 33, "k": 70, "name": "odd"},
    {"op": "gemv", "n": 65, "k": 35},
    {"op": "gate-up", "m": 5, "n": 192, "k": 70},
    {"op": "attention", "q_len": 7, "kv_len": 7, "heads": 4, "kv_heads": 2, "head_dim": 16},
    {"op": "attention", "q_len": 1, "kv_len": 40, "heads": 6, "kv_heads": 2, "head_dim": 24, "sequences": 3},
    {"op": "attention", "q_len": 3, "kv_len": 40, "heads": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"},
    {"op": "rope", "q_len": 3, "kv_len": 9, "heads": 2, "kv_heads": 1, "head_dim": 16, "dtype": "bf16"},
    {"op": "norm", "rows": 3, "width": 50},
    {"op": "add-norm", "rows": 3, "width": 50},
    {"op": "silu", "rows": 2, "width": 37},
    {"op": "argmax", "rows": 2, "width": 101}
]"#;

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("{key} of {value}"))
}

#[test]
fn every_op_is_timed_checked_and_held_against_the_roofline() {
    let sandbox = Sandbox::new();
    sandbox.write("s.json", SHAPES);
    let done = sandbox.ok("bench kernels --shapes s.json --repeat 5 --threads 2 --json --output-dir out");
    let result: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(result, sandbox.json("out/kernels.json"));
    assert_eq!(result["passes"], true);
    assert_eq!(result["device"], "cpu");
    assert!(result["command"].as_str().unwrap().contains("bench kernels --shapes s.json"));
    assert_eq!(result["machine"]["threads"], 2);
    let kernels = result["kernels"].as_array().unwrap();
    // Products in five types, attention in four unless one is named, the others in one.
    let activates = Tier::from_env().unwrap().activated_multiple().is_some();
    assert_eq!(kernels.len(), 5 + 5 + if activates { 5 } else { 0 } + 4 + 4 + 1 + 1 + 4);
    for kernel in kernels {
        assert_eq!(kernel["passes"], true, "{kernel}");
        assert!(number(kernel, "error") <= number(kernel, "tolerance"), "{kernel}");
        assert!(number(kernel, "bytes") > 0.0 && number(kernel, "roofline_share") > 0.0, "{kernel}");
        let time = &kernel["time_s"];
        assert!(number(time, "runs") >= 5.0, "{time}");
        assert!(number(time, "min") <= number(time, "median") && number(time, "median") <= number(time, "max"));
        let both_ways = kernel["op"] == "attention" || kernel["op"] == "gate-up";
        assert_eq!(kernel["fused_speedup"].is_number(), both_ways, "{kernel}");
    }
    let of = |op: &str, dtype: &str| kernels.iter().find(|k| k["op"] == op && k["dtype"] == dtype).unwrap();
    assert_eq!(of("gemm", "int4")["flops"], 2.0 * 5.0 * 33.0 * 70.0);
    assert_eq!(of("gemm", "float32")["kernel"], "odd");
    assert_eq!(of("gemv", "int8")["shape"]["m"], 1);
    // 7 queries see 1 to 7 keys.
    assert_eq!(of("attention", "float16")["flops"], 4.0 * 28.0 * 64.0);

    assert_eq!(sandbox.names("out"), ["attention.svg", "kernels.csv", "kernels.json", "roofline.svg"]);
    let csv = sandbox.read("out/kernels.csv");
    assert_eq!(csv.lines().count(), 1 + kernels.len());
    assert_names(csv.lines().next().unwrap(), &["op,kernel,shape,type,time (ns)", "of roofline", "verdict"]);
    for plot in ["attention.svg", "roofline.svg"] {
        assert_names(&sandbox.read(&format!("out/{plot}")), &["<svg", "bfloat16", "</svg>"]);
    }
}

#[test]
fn a_table_for_people_and_csv_for_programs() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "s.toml",
        "[[kernel]]\nop = \"attention\"\nq_len = 4\nkv_len = 4\nheads = 2\nkv_heads = 1\nhead_dim = 16\n\n\
         [[kernel]]\nop = \"gemm\"\nm = 2\nn = 32\nk = 32\ndtype = \"float16\"\n",
    );
    let done = sandbox.ok_with(&[("COLUMNS", "100")], "bench kernels --shapes s.toml --dtype float32 --repeat 5");
    assert_names(&done.stdout, &["roofline", "2x32x32", "float16", "Attention: fused vs unfused", "Peaks were read"]);
    assert!(done.stdout.lines().all(|line| line.chars().count() <= 100), "{}", done.stdout);
    let csv = sandbox.ok("bench kernels --shapes s.toml --op gemm --repeat 5 --csv").stdout;
    assert_eq!(csv.lines().count(), 2, "{csv}");
    assert!(csv.lines().nth(1).unwrap().starts_with("gemm,gemm,2x32x32,float16,"), "{csv}");
}

#[test]
fn gates_and_ups_are_measured_where_a_product_activates_them() {
    let sandbox = Sandbox::new();
    sandbox.write("s.json", r#"[{"op": "gate-up", "m": 2, "n": 64, "k": 9, "dtype": "int8"}]"#);
    if Tier::from_env().unwrap().activated_multiple().is_some() {
        let text = sandbox.ok("bench kernels --shapes s.json --repeat 5").stdout;
        assert_names(&text, &["gate-up", "2x64x9", "Gate and up projections", "pass"]);
    }
    let message = sandbox.refused_with(&[("STROBE_CPU", "scalar")], "bench kernels --shapes s.json");
    assert_names(&message, &["gate-up", "scalar"]);
    sandbox.write("s.json", r#"[{"op": "gate-up", "m": 2, "n": 96, "k": 9}]"#);
    assert_names(&sandbox.refused("bench kernels --shapes s.json"), &["gate-up", "`n`", "64", "96"]);
}

#[test]
fn products_are_timed_on_one_thread_as_well() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "s.json",
        r#"[{"op": "gemm", "m": 3, "n": 40, "k": 64, "dtype": "int8"}, {"op": "silu", "rows": 1, "width": 8}]"#,
    );
    let scaled = sandbox.ok("bench kernels --shapes s.json --repeat 5 --threads 2 --scaling --json").stdout;
    let result: Value = serde_json::from_str(&scaled).unwrap();
    let kernels = result["kernels"].as_array().unwrap();
    assert!(num(&kernels[0], "/scaling") > 0.0 && num(&kernels[0], "/one_thread_time_s/median") > 0.0);
    assert!(kernels[1]["scaling"].is_null());
    let refused = sandbox.refused("bench kernels --shapes s.json --threads 1 --scaling");
    assert_names(&refused, &["--scaling", "--threads"]);
    assert_names(
        &sandbox.refused("bench kernels --shapes s.json --op silu --threads 2 --scaling"),
        &["--scaling", "gemm"],
    );
}

#[test]
fn torch_stands_beside_where_it_is_there() {
    let sandbox = Sandbox::new();
    sandbox.write("s.json", r#"[{"op": "gemv", "n": 32, "k": 32}, {"op": "norm", "rows": 1, "width": 8}]"#);
    let script = "#!/bin/sh\nread setup\necho '{\"torch\": \"9.9\"}'\nwhile read case; do case $case in *norm*) \
                  echo '{\"skip\": \"no such op\"}';; *) echo '{\"times\": [0.25, 0.5, 0.125]}';; esac; done\n";
    sandbox.write("python", script);
    fs::set_permissions(sandbox.path("python"), fs::Permissions::from_mode(0o755)).unwrap();
    let call = "bench kernels --shapes s.json --dtype float32 --repeat 5 --json --versus torch --python ./python";
    let result: Value = serde_json::from_str(&sandbox.ok(call).stdout).unwrap();
    assert_eq!(result["kernels"][0]["torch_time_s"]["median"], 0.25);
    assert!(number(&result["kernels"][0], "torch_over_strobe") > 1.0);
    assert_eq!(result["kernels"][1]["torch_time_s"], Value::Null);
    assert_names(&result["notes"].to_string(), &["torch is 9.9 of ./python", "torch: no such op."]);

    let without = call.replace("./python", "./nothing").replace(" --json", "");
    assert_names(&sandbox.ok(&without).stdout, &["torch was not timed", "./nothing", "--python PATH"]);
    sandbox.write("python", "#!/bin/sh\nread setup\necho '{\"error\": \"no module named torch\"}'\n");
    let without = sandbox.ok(&call.replace(" --json", "")).stdout;
    assert_names(&without, &["torch was not timed: no module named torch"]);
}

#[test]
fn bad_input_is_one_clear_error() {
    let sandbox = Sandbox::new();
    let gemm = |rest: &str| format!("[{{\"op\": \"gemm\", \"m\": 1, \"n\": 8{rest}}}]");
    let attention = |rest: &str| format!("[{{\"op\": \"attention\", \"q_len\": 4, \"heads\": 4, {rest}}}]");
    for (text, names) in [
        ("", &["s.json", "JSON list"][..]),
        ("{}", &["s.json", "JSON list"]),
        ("[]", &["lists no shapes"]),
        (r#"[{"op": "conv"}]"#, &["shape 1", "`conv`", "gemm"]),
        (r#"[{"op": "norm", "rows": 1, "width": 2}, {"op": "norm", "rows": 1}]"#, &["shape 2", "`width`"]),
        (r#"[{"op": "norm", "rows": 1, "width": 2, "dtype": "int8"}]"#, &["norm has no `dtype`"]),
        (&gemm(""), &["gemm needs `k`"]),
        (&gemm(", \"k\": 0"), &["`k` must be 1 to"]),
        (&gemm(", \"k\": 99999999999"), &["`k` must be 1 to"]),
        (&gemm(", \"k\": -1"), &["s.json"]),
        (&gemm(", \"k\": 8, \"rows\": 8"), &["gemm has no `rows`", "m, n, k"]),
        (&gemm(", \"k\": 8, \"colour\": 8"), &["colour"]),
        (&gemm(", \"k\": 8, \"dtype\": \"fp5\""), &["fp5"]),
        (r#"[{"op": "gemv", "m": 2, "n": 8, "k": 8}]"#, &["one row"]),
        (r#"[{"op": "gemm", "m": 1, "n": 1048576, "k": 1048576}]"#, &["memory", "smaller shape"]),
        (&attention(r#""kv_len": 3, "kv_heads": 2, "head_dim": 8"#), &["`q_len` 4", "`kv_len` 3"]),
        (&attention(r#""kv_len": 4, "kv_heads": 3, "head_dim": 8"#), &["multiple of `kv_heads`"]),
        (&attention(r#""kv_len": 4, "kv_heads": 2, "head_dim": 7"#), &["`head_dim`", "even"]),
        (&attention(r#""kv_len": 4, "kv_heads": 2, "head_dim": 8, "dtype": "int4""#), &["attention has no int4"]),
    ] {
        sandbox.write("s.json", text);
        assert_names(&sandbox.refused("bench kernels --shapes s.json"), names);
    }
    sandbox.write("s.toml", "kernel = 3");
    assert_names(&sandbox.refused("bench kernels --shapes s.toml"), &["s.toml", "[[kernel]]"]);
    assert_names(&sandbox.refused("bench kernels --shapes nothing"), &["`nothing`", "tinyllama-1.1b", "JSON"]);
    assert_names(&sandbox.refused("bench kernels --op conv"), &["conv", "gemm"]);
    assert_names(&sandbox.refused("bench kernels --op norm --shapes s.json --repeat 4"), &["--repeat", "5"]);
    assert_names(&sandbox.refused("bench kernels --threads 0"), &["--threads"]);
    assert_names(&sandbox.refused("bench kernels --python x"), &["--versus"]);
    sandbox.write("s.json", r#"[{"op": "norm", "rows": 1, "width": 8}]"#);
    assert_names(&sandbox.refused("bench kernels --shapes s.json --op gemm"), &["nothing for --op gemm"]);
    fs::create_dir(sandbox.path("mine")).unwrap();
    sandbox.write("mine/kept", "");
    assert_names(&sandbox.refused("bench kernels --shapes s.json --output-dir mine"), &["mine"]);
}

#[test]
fn without_a_gpu_it_says_what_is_missing() {
    if strobe_kernels_cuda::devices().is_ok() {
        eprintln!("skipped: this machine has a GPU");
        return;
    }
    let message = Sandbox::new().refused("bench kernels --device cuda");
    assert!(message.contains("libcuda") || message.contains("no CUDA device"), "{message}");
}
