//! `strobe eval` against what `transformers` computes for the fixtures.

mod common;

use common::{FIXTURES, Sandbox, assert_names, int, ints, num};
use serde_json::Value;

const CASES: [&str; 10] = [
    "llama",
    "llama3-rope-tied",
    "llama-bias",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "llama-bf16",
    "llama-f16",
    "llama-sharded",
];

fn golden(case: &str, file: &str) -> Value {
    let path = format!("{FIXTURES}/{case}/{file}");
    serde_json::from_str(&std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))).unwrap()
}

fn rows(value: &Value, key: &str) -> Vec<Vec<f64>> {
    let row = |row: &Value| row.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    value[key].as_array().unwrap().iter().map(row).collect()
}

/// Run the golden file's prompt through the binary.
fn evaluate(case: &str, golden: &Value, options: &str) -> Value {
    let sandbox = Sandbox::new();
    let ids: Vec<_> = ints(golden, "/prompt").iter().map(u64::to_string).collect();
    let model = format!("eval logits --model {FIXTURES}/{case} --ids {} --decode 16 --output l.json", ids.join(","));
    let done = sandbox.ok(&format!("{model} {options}"));
    assert_names(&done.stdout, &["l.json", "16 decode steps", "real (checkpoint)"]);
    assert_eq!(sandbox.names("."), ["l.json"]);
    sandbox.json("l.json")
}

/// Largest difference between two lists of rows, relative to the largest value.
fn difference(found: &[Vec<f64>], expected: &[Vec<f64>]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().flatten().fold(0.0, |m: f64, v| m.max(v.abs()));
    let pairs = found.iter().zip(expected).flat_map(|(f, e)| {
        assert_eq!(f.len(), e.len());
        f.iter().zip(e)
    });
    pairs.fold(0.0, |m: f64, (f, e)| m.max((f - e).abs())) / scale
}

/// Compare with the golden values; decode rows only as long as the greedy tokens agree, which they must while the two
/// best logits are further apart than the tolerance.
fn compare(case: &str, found: &Value, expected: &Value, tolerance: f64) {
    let (logits, decode) = (rows(expected, "logits"), rows(expected, "decode_logits"));
    let off = difference(&rows(found, "logits"), &logits);
    assert!(off < tolerance, "{case}: prompt logits differ by {off}");
    let (greedy, wanted) = (ints(found, "/greedy"), ints(expected, "/greedy"));
    assert_eq!(greedy.len(), 16);
    let deciding = logits.last().into_iter().chain(&decode);
    for (step, ((found_id, wanted_id), row)) in greedy.iter().zip(&wanted).zip(deciding).enumerate() {
        let mut sorted = row.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let scale = row.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
        if found_id != wanted_id {
            assert!(
                sorted[0] - sorted[1] < 2.0 * tolerance * scale,
                "{case}: step {step}: {found_id} is not {wanted_id}"
            );
            return;
        }
        let off = difference(&rows(found, "decode_logits")[step..=step], &decode[step..=step]);
        assert!(off < tolerance, "{case}: decode step {step} differs by {off}");
    }
}

#[test]
fn logits_are_those_of_transformers() {
    for case in CASES {
        let golden = golden(case, "golden.json");
        compare(case, &evaluate(case, &golden, "--dtype float32"), &golden, 1e-4);
    }
}

/// The golden values are float32 arithmetic on the same 16-bit weights; only the cache, kept in float16, is rounded.
#[test]
fn sixteen_bit_logits_are_close_to_those_of_transformers() {
    for case in CASES.iter().filter(|&&case| case != "llama") {
        let golden = golden(case, "golden.json");
        let found = evaluate(case, &golden, "--dtype auto");
        // CPUs with bfloat16 instructions round activations too, as `transformers` does in this type.
        compare(case, &found, &golden, if case.ends_with("f16") && !case.ends_with("bf16") { 2.5e-3 } else { 2.5e-2 });
        assert_ne!(found, evaluate(case, &golden, "--dtype float32"), "{case}: --dtype changed nothing");
    }
}

#[test]
fn strobe_in_sixteen_bits_is_as_close_to_transformers_as_exact_arithmetic_is() {
    for case in ["llama-bf16", "llama-f16"] {
        let (exact, native) = (golden(case, "golden.json"), golden(case, "golden_native.json"));
        let found = evaluate(case, &native, "--dtype auto");
        assert_eq!(ints(&found, "/greedy"), ints(&native, "/greedy"), "{case}");
        for key in ["logits", "decode_logits"] {
            let native = rows(&native, key);
            let (ours, theirs) = (difference(&rows(&found, key), &native), difference(&rows(&exact, key), &native));
            assert!(ours < 1.5 * theirs, "{case}: {key} are {ours} from native, exact ones {theirs}");
        }
    }
}

#[test]
fn build_options_do_not_change_the_logits() {
    let golden = golden("qwen3", "golden.json");
    for options in ["--gemm-plugin disable", "--context-fmha disable", "--paged-kv-cache disable", "--threads 1"] {
        compare(options, &evaluate("qwen3", &golden, &format!("--dtype float32 {options}")), &golden, 1e-4);
    }
}

#[test]
fn an_engine_directory_gives_the_same_logits() {
    let sandbox = Sandbox::new();
    sandbox.ok(&format!("build --model {FIXTURES}/qwen2 --output-dir e"));
    sandbox.ok("eval logits --engine-dir e --ids 5,9,17 --decode 4 --output engine.json");
    sandbox.ok(&format!("eval logits --model {FIXTURES}/qwen2 --ids 5,9,17 --decode 4 --output model.json"));
    assert_eq!(sandbox.read("engine.json"), sandbox.read("model.json"));
    assert!(!sandbox.exists("e/tokenizer.json"), "the fixture has none, and needs none");
}

#[test]
fn logits_are_held_against_a_file_of_others() {
    let sandbox = Sandbox::new();
    let ids = ints(&golden("llama", "golden.json"), "/prompt").iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    let golden = format!("{FIXTURES}/llama/golden.json");
    let against = |options: &str| {
        let words = format!("--ids {ids} --output l.json --against {golden} {options}");
        let said = sandbox.ok(&format!("eval logits --model {FIXTURES}/llama {words}")).stdout;
        let percent = said.split("relative RMS ").nth(1).unwrap().split(' ').next().unwrap().parse::<f64>().unwrap();
        assert!(said.contains("same best token at"), "{said}");
        percent
    };
    assert!(against("--dtype float32") < 0.01);
    let int8 = against("--quantization int8");
    assert!((0.1..5.0).contains(&int8) && against("--quantization int4") > int8, "{int8}");
    let other = sandbox.refused(&format!("eval logits --model micro --ids 1,2 --output m.json --against {golden}"));
    common::assert_names(&other, &["--against", "positions", "512"]);
    sandbox.write("bad.json", "{\"logits\": 3}");
    let bad = sandbox.refused("eval logits --model micro --ids 1,2 --output m.json --against bad.json");
    common::assert_names(&bad, &["--against", "bad.json", "logits"]);
}

#[test]
fn the_document_has_the_promised_shape() {
    let sandbox = Sandbox::new();
    let printed = sandbox.ok("eval logits --model micro --ids 1,2,3 --output -").stdout;
    let document: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(document.as_object().unwrap().keys().collect::<Vec<_>>(), ["logits", "greedy", "decode_logits"]);
    assert_eq!(rows(&document, "logits").iter().map(Vec::len).collect::<Vec<_>>(), [512; 3]);
    assert!(rows(&document, "decode_logits").is_empty() && ints(&document, "/greedy").is_empty());
    sandbox.write("l.json", "an older file");
    sandbox.ok("eval logits --model micro --ids 1,2,3 --output l.json");
    assert_eq!(sandbox.json("l.json"), document);
}

#[test]
fn perplexity_of_a_text_as_lines_and_as_json() {
    let sandbox = Sandbox::new();
    let golden = golden("trained", "golden.json");
    let command = format!("eval perplexity --model {FIXTURES}/trained --text {FIXTURES}/trained/text.txt");
    let windows = format!("--context {} --stride {}", golden["context"], golden["stride"]);
    let found: Value =
        serde_json::from_str(&sandbox.ok(&format!("{command} {windows} --dtype float32 --json")).stdout).unwrap();
    let expected = num(&golden, "/perplexity");
    let result = num(&found, "/results/0/perplexity");
    assert!((result / expected - 1.0).abs() < 1e-5, "{result} is not {expected}");
    assert_eq!(int(&found, "/tokens"), int(&golden, "/tokens"));
    let bits = expected.log2() * int(&found, "/tokens") as f64 / int(&found, "/bytes") as f64;
    assert!((num(&found, "/results/0/bits_per_byte") / bits - 1.0).abs() < 1e-5);

    sandbox.write("short.txt", "An engine directory is mapped into memory when a run starts.\n");
    let short = format!("eval perplexity --model {FIXTURES}/trained --text short.txt");
    let done = sandbox.ok(&short);
    assert_names(&done.stdout, &["perplexity", "bits per byte", "bfloat16", "short.txt, 61 bytes", "stride 256"]);
    let table = sandbox.ok(&format!("{short} --compare-quantization none,int8,int4"));
    assert_names(&table.stdout, &["against the first", "+0.00 %", "none", "int8", "int4"]);
    assert_eq!(sandbox.names("."), ["short.txt"]);
}

#[test]
fn perplexity_refuses_what_it_cannot_score() {
    let sandbox = Sandbox::new();
    sandbox.write("empty.txt", "");
    sandbox.write("bytes.txt", [b'a', 0xff]);
    sandbox.write("text.txt", "the engine");
    let refused = |words: &str| sandbox.refused(&format!("eval perplexity {words}"));
    let model = format!("--model {FIXTURES}/trained");
    assert_names(&refused(&format!("{model} --text empty.txt")), &["empty.txt", "is empty"]);
    assert_names(&refused(&format!("{model} --text bytes.txt")), &["bytes.txt", "UTF-8", "byte 1"]);
    assert_names(&refused(&format!("{model} --text gone.txt")), &["gone.txt"]);
    assert_names(&refused(&format!("--model {FIXTURES}/qwen2 --text text.txt")), &["qwen2", "no tokenizer"]);
    assert_names(&refused(&format!("{model} --text text.txt --context 100000")), &["--context", "512"]);
    assert_names(&refused(&format!("{model} --text text.txt --context 8 --stride 8")), &["--stride", "7"]);
}

#[test]
fn a_gguf_file_is_a_model() {
    let sandbox = Sandbox::new();
    let gguf = |name: &str| format!("{FIXTURES}/gguf/{name}.gguf");
    let logits = |model: &str| {
        let options = "--ids 5,9,17,30 --decode 4 --output l.json";
        sandbox.ok(&format!("eval logits --model {model} {options}"));
        sandbox.json("l.json")
    };
    assert_eq!(logits(&gguf("qwen3")), logits(&format!("{FIXTURES}/qwen3")));
    let built = sandbox.ok(&format!("build --model {} --output-dir e --device cpu", gguf("llama3-rope-tied")));
    assert_names(&built.stdout, &["tokenizer", "`t5`", "token ids only"]);
    let bytes = std::fs::read(gguf("qwen3")).unwrap();
    sandbox.write("cut.gguf", &bytes[..bytes.len() / 2]);
    assert_names(&sandbox.refused("build --model cut.gguf --output-dir f"), &["cut.gguf", "truncated", "again"]);
}
