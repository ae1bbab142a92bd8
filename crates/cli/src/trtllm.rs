//! Command lines of TensorRT-LLM's tools, translated: behind `strobe`, through a link of the tool's name to the binary, or as
//! single options among strobe's own. An option with a counterpart is renamed, one without effect here is left out with a
//! note, and what strobe cannot do is answered by the line to type.

mod llm_api;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

use crate::shell;

/// A command line in strobe's words.
#[derive(Debug, PartialEq)]
pub(crate) struct Translated {
    /// The words, the program's name first.
    pub words: Vec<OsString>,
    /// What was left out and why; the line that ran where another tool's was typed.
    pub notes: Vec<String>,
}

/// What becomes of an option.
#[derive(Clone, Copy)]
enum Fate {
    /// The same under another name.
    Renamed(&'static str),
    /// Words that its value stands for, or why there are none.
    Value(fn(&str) -> Result<Vec<String>, String>),
    /// A flag that stands for these words.
    Flag(&'static [&'static str]),
    /// Has no effect here: left out with its value.
    LeftOut(&'static str),
    /// A flag that has no effect here.
    FlagLeftOut(&'static str),
    /// On or off under another name; on where no value follows.
    Switch(&'static str),
    /// Left out where it has one of these values, refused otherwise.
    Only(&'static [&'static str], &'static str),
    /// Cannot be had: what to do instead.
    Refused(&'static str),
}

use Fate::{Flag, FlagLeftOut, LeftOut, Only, Refused, Renamed, Switch, Value};

type Fates = &'static [(&'static str, Fate)];

const ONE_DEVICE: &str = "strobe runs on one device";
const NO_COUNTERPART: &str = "has no counterpart in strobe";
const LOGGING: &str = "strobe prints its report and warnings only";

/// Options of `trtllm-bench throughput` and `latency`.
const BENCH: Fates = &[
    ("backend", Value(backend)),
    ("workspace", LeftOut("strobe keeps nothing between runs; --output-dir keeps a run")),
    ("log-level", LeftOut(LOGGING)),
    ("revision", LeftOut("strobe reads local files")),
    ("tp", Only(&["1"], ONE_DEVICE)),
    ("pp", Only(&["1"], ONE_DEVICE)),
    ("ep", Only(&["1"], ONE_DEVICE)),
    ("cp", Only(&["1"], ONE_DEVICE)),
    ("cluster-size", Only(&["1"], ONE_DEVICE)),
    ("beam-width", Only(&["1"], "strobe has no beam search")),
    ("target-input-len", LeftOut("the lengths of the dataset count")),
    ("target-output-len", LeftOut("the lengths of the dataset count")),
    ("max-input-len", LeftOut("--max-seq-len limits prompt and output together")),
    ("enable-chunked-context", Flag(&["--chunked-context", "enable"])),
    ("disable-chunked-context", Flag(&["--chunked-context", "disable"])),
    ("max-beam-width", Only(&["1"], "strobe has no beam search")),
    ("output-json", Refused("pass --request-json FILE: every request with its output")),
    ("no-skip-tokenizer-init", FlagLeftOut("token ids and texts are both taken")),
];

/// Options of `trtllm-build`.
const BUILD: Fates = &[
    ("checkpoint-dir", Renamed("--model")),
    ("model-dir", Renamed("--model")),
    ("model-path", Renamed("--model")),
    ("gemm-plugin", Value(gemm_plugin)),
    ("kv-cache-type", Value(kv_cache_type)),
    ("quantization", Value(|value| Ok(vec!["--quantization".into(), value.to_lowercase()]))),
    ("gpt-attention-plugin", Only(&PLUGIN_ON, "pass --context-fmha disable for unfused attention")),
    ("bert-attention-plugin", LeftOut(NO_COUNTERPART)),
    ("remove-input-padding", Only(&["enable"], "strobe never pads")),
    ("use-paged-context-fmha", LeftOut("fused attention always reads the paged cache")),
    ("use-fp8-context-fmha", Only(&["disable"], "strobe has no FP8 attention for prefill")),
    ("use-fused-mlp", LeftOut("gate and up projections are always one GEMM")),
    ("low-latency-gemm-plugin", LeftOut("strobe chooses kernels by shape")),
    ("gemm-swiglu-plugin", LeftOut("strobe chooses kernels by shape")),
    ("multiple-profiles", LeftOut("strobe chooses kernels by shape")),
    ("moe-plugin", LeftOut(NO_COUNTERPART)),
    ("nccl-plugin", LeftOut(ONE_DEVICE)),
    ("reduce-fusion", LeftOut(ONE_DEVICE)),
    ("user-buffer", LeftOut(ONE_DEVICE)),
    ("gemm-allreduce-plugin", LeftOut(ONE_DEVICE)),
    ("norm-quant-fusion", LeftOut(NO_COUNTERPART)),
    ("lora-plugin", Only(&["disable"], "strobe has no LoRA")),
    ("max-beam-width", Only(&["1"], "strobe has no beam search")),
    ("max-input-len", LeftOut("--max-seq-len limits prompt and output together")),
    ("opt-num-tokens", LeftOut("strobe chooses kernels by shape")),
    ("opt-batch-size", LeftOut("strobe chooses kernels by shape")),
    ("tp-size", Only(&["1"], ONE_DEVICE)),
    ("pp-size", Only(&["1"], ONE_DEVICE)),
    ("workers", LeftOut("strobe builds with all threads")),
    ("workspace", LeftOut("strobe keeps nothing between runs")),
    ("revision", LeftOut("strobe reads local files")),
    ("logits-dtype", LeftOut("logits are always float32")),
    ("strongly-typed", FlagLeftOut("types are always as the checkpoint has them")),
    ("profiling-verbosity", LeftOut("windows record every op by name")),
    ("log-level", LeftOut(LOGGING)),
];

/// Options of `prepare_dataset.py`.
const DATASET: Fates = &[
    ("task-id", Only(&["-1"], "strobe has no LoRA")),
    ("rand-task-id", Refused("strobe has no LoRA: leave it out")),
    ("lora-dir", Refused("strobe has no LoRA: leave it out")),
    ("dataset-name", Renamed("--file")),
    ("dataset-prompt-key", Renamed("--prompt-key")),
    ("dataset-input-key", Renamed("--prompt-key")),
    ("dataset-output-key", Renamed("--output-key")),
    ("dataset-split", LeftOut("the file is read whole")),
    ("dataset-config-name", LeftOut("the file is read whole")),
    ("workspace", LeftOut("strobe keeps nothing between runs")),
    ("revision", LeftOut("strobe reads local files")),
    ("log-level", LeftOut(LOGGING)),
    ("trust-remote-code", FlagLeftOut("strobe runs no code of a model")),
];

/// Options of `gptManagerBenchmark`.
const MANAGER: Fates = &[
    ("decoder-engine-dir", Renamed("--engine-dir")),
    ("type", Value(batching)),
    ("api", LeftOut("strobe has one")),
    ("request-rate", Value(|rate| Ok(if rate == "-1" { vec![] } else { vec!["--request-rate".into(), rate.into()] }))),
    ("max-num-samples", Renamed("--num-requests")),
    ("warm-up", Renamed("--warmup")),
    ("enable-kv-cache-reuse", Switch("--kv-cache-reuse")),
    ("enable-chunked-context", Switch("--chunked-context")),
    ("output-csv", Refused("pass --report-json FILE, or --output-dir RUN for everything")),
    ("static-emulated-batch-size", Refused("pass --scheduler-policy static_batch --max-batch-size N")),
    ("beam-width", Only(&["1"], "strobe has no beam search")),
    ("wait-sleep", LeftOut("strobe does not poll")),
    ("log-level", LeftOut(LOGGING)),
];

const PLUGIN_ON: [&str; 5] = ["auto", "enable", "float16", "bfloat16", "float32"];

fn backend(value: &str) -> Result<Vec<String>, String> {
    match value.to_lowercase().as_str() {
        "pytorch" | "tensorrt" | "trt" | "cpp" | "_autodeploy" | "strobe" => Ok(Vec::new()),
        _ => Err("found an unknown backend, expected pytorch or tensorrt; leave it out".into()),
    }
}

fn gemm_plugin(value: &str) -> Result<Vec<String>, String> {
    let own = match value.to_lowercase().as_str() {
        "auto" | "enable" | "float16" | "bfloat16" | "float32" => "auto",
        "disable" | "none" => "disable",
        "fp8" => return Err("expected auto or disable; for FP8 weights pass --quantization fp8".into()),
        _ => return Err("expected auto or disable".into()),
    };
    Ok(vec!["--gemm-plugin".into(), own.into()])
}

fn kv_cache_type(value: &str) -> Result<Vec<String>, String> {
    let own = match value.to_lowercase().as_str() {
        "paged" => "enable",
        "continuous" => "disable",
        _ => return Err("expected paged or continuous".into()),
    };
    Ok(vec!["--paged-kv-cache".into(), own.into()])
}

fn batching(value: &str) -> Result<Vec<String>, String> {
    match value.to_uppercase().as_str() {
        "IFB" | "UIFB" | "INFLIGHT" | "INFLIGHT_BATCHING" => Ok(Vec::new()),
        "V1" | "STATIC" => Ok(vec!["--scheduler-policy".into(), "static_batch".into()]),
        _ => Err("expected IFB or V1".into()),
    }
}

fn switch(value: &str) -> Option<&'static str> {
    match value.to_lowercase().as_str() {
        "true" | "1" => Some("enable"),
        "false" | "0" => Some("disable"),
        _ => None,
    }
}

/// Whose command line it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    Bench,
    Build,
    PrepareDataset,
    ConvertCheckpoint,
    ManagerBenchmark,
    Run,
    Serve,
}

impl Tool {
    /// By the name of its program.
    fn named(program: &OsStr) -> Option<Tool> {
        match Path::new(program).file_name()?.to_str()? {
            "trtllm-bench" => Some(Tool::Bench),
            "trtllm-build" => Some(Tool::Build),
            "prepare_dataset.py" => Some(Tool::PrepareDataset),
            "convert_checkpoint.py" => Some(Tool::ConvertCheckpoint),
            "gptManagerBenchmark" => Some(Tool::ManagerBenchmark),
            "trtllm-run" | "run.py" => Some(Tool::Run),
            "trtllm-serve" => Some(Tool::Serve),
            _ => None,
        }
    }
}

/// Translates what was typed; `command` says which options of strobe take no value, and what its verbs are called.
pub(crate) fn translate(typed: Vec<OsString>, command: &clap::Command) -> Result<Translated, String> {
    let mut words = typed.into_iter();
    let program = words.next().unwrap_or_else(|| "strobe".into());
    let mut words: Vec<OsString> = words.collect();
    let mut tool = Tool::named(&program);
    if tool.is_none() {
        let python =
            words.first().and_then(|word| word.to_str()).is_some_and(|word| word == "python" || word == "python3");
        let place = usize::from(python);
        tool = words.get(place).and_then(|word| Tool::named(word));
        if tool.is_some() {
            words.drain(..=place);
        }
    }
    let flags = flags_of(command);
    let leading = words.first().is_some_and(|word| is_option(word)) && !asks_for_help(&words[0]);
    let (before, rest) = if tool.is_none() && leading { split_at_verb(words, &flags) } else { (Vec::new(), words) };
    let verb = rest.first().and_then(|word| word.to_str()).unwrap_or_default();
    if tool.is_none() && ["throughput", "latency"].contains(&verb) {
        tool = Some(Tool::Bench);
    }
    let mut notes = Vec::new();
    let words = match tool {
        Some(tool) => {
            let words = foreign(tool, [before, rest].concat(), &flags, &mut notes)?;
            let line = shell::line(Command::new("strobe").args(&words));
            notes.insert(0, format!("note: running `{line}`"));
            words
        }
        None => own(before, rest, &mut notes)?,
    };
    Ok(Translated { words: std::iter::once("strobe".into()).chain(words).collect(), notes })
}

/// strobe's own verbs, with options before the verb and single options of TensorRT-LLM.
fn own(before: Vec<OsString>, rest: Vec<OsString>, notes: &mut Vec<String>) -> Result<Vec<OsString>, String> {
    let named = |place: usize| rest.get(place).and_then(|word| word.to_str()).unwrap_or_default();
    let fates = match (named(0), named(1)) {
        ("bench", "throughput" | "latency") => BENCH,
        ("build", _) => BUILD,
        ("prepare-dataset" | "prepare_dataset", _) => DATASET,
        _ => &[],
    };
    let bench = fates.len() == BENCH.len() && named(0) == "bench";
    let mut words = with_options(rest, before);
    if bench {
        choose_model(&mut words, false, notes)?;
        settings_of_file(&mut words, notes)?;
    }
    apply(fates, words, notes)
}

/// Another tool's command line, without the name of the tool.
fn foreign(
    tool: Tool,
    words: Vec<OsString>,
    flags: &HashSet<String>,
    notes: &mut Vec<String>,
) -> Result<Vec<OsString>, String> {
    match tool {
        Tool::Bench => {
            let (before, mut rest) = split_at_verb(long_names(words), flags);
            let verb = if rest.is_empty() { OsString::new() } else { rest.remove(0) };
            let words = [before, rest].concat();
            match verb.to_str().unwrap_or_default() {
                verb @ ("throughput" | "latency") => {
                    let mut words = words;
                    choose_model(&mut words, true, notes)?;
                    settings_of_file(&mut words, notes)?;
                    Ok(hyphens([vec!["bench".into(), verb.into()], apply(BENCH, words, notes)?].concat()))
                }
                "build" => engine_of_bench(words, notes),
                "prepare-dataset" | "prepare_dataset" => dataset(words, notes),
                _ if words.iter().any(|word| asks_for_help(word)) => Ok(vec!["bench".into(), "--help".into()]),
                _ => Err("trtllm-bench: expected throughput, latency, build or prepare-dataset; type strobe bench throughput --help".into()),
            }
        }
        Tool::Build => {
            notes.extend(checkpoint_hint(&words));
            Ok(hyphens([vec!["build".into()], apply(BUILD, words, notes)?].concat()))
        }
        Tool::PrepareDataset => dataset(words, notes),
        Tool::ManagerBenchmark => manager(words, notes),
        Tool::ConvertCheckpoint => Err(convert_checkpoint(words)),
        Tool::Run => Err(run(words)),
        Tool::Serve => Err(serve(&words)),
    }
}

fn dataset(words: Vec<OsString>, notes: &mut Vec<String>) -> Result<Vec<OsString>, String> {
    let mut words = words;
    choose_model(&mut words, false, notes)?;
    let mut words = apply(DATASET, words, notes)?;
    if let Some(kind) = words.iter_mut().find(|word| *word == "dataset") {
        *kind = "real-dataset".into();
    }
    Ok(hyphens([vec!["prepare-dataset".into()], words].concat()))
}

/// `trtllm-bench build`, which puts the engine below its workspace.
fn engine_of_bench(mut words: Vec<OsString>, notes: &mut Vec<String>) -> Result<Vec<OsString>, String> {
    // It chooses limits by the dataset.
    for chooses in ["dataset", "target-input-len", "target-output-len"] {
        if let Some(value) = take(&mut words, chooses) {
            let value = value.to_string_lossy().into_owned();
            notes.push(format!("note: --{chooses} {value} left out: limits are those of the model, or --max-seq-len"));
        }
    }
    let named = |words: &[OsString], name: &str| words.iter().any(|w| long_name(w).is_some_and(|(own, _)| own == name));
    let workspace = take(&mut words, "workspace").unwrap_or_else(|| "/tmp".into());
    let model = take(&mut words, "model");
    let read = take(&mut words, "model-path").or_else(|| model.clone());
    if let (false, Some(name)) = (named(&words, "output-dir"), model.as_ref().or(read.as_ref())) {
        // Where trtllm-bench puts it.
        let name = name.to_string_lossy().trim_start_matches(['.', '/']).to_owned();
        let place = Path::new(&workspace).join(name).join("tp_1_pp_1");
        words.extend(["--output-dir".into(), place.into_os_string()]);
    }
    if let Some(read) = read {
        words.splice(0..0, ["--model".into(), read]);
    }
    Ok(hyphens([vec!["build".into()], apply(BUILD, words, notes)?].concat()))
}

/// Puts the settings of a YAML file in the place of the option that names it; they win, as they do in TensorRT-LLM.
fn settings_of_file(words: &mut Vec<OsString>, notes: &mut Vec<String>) -> Result<(), String> {
    for option in ["extra-llm-api-options", "config"] {
        let Some(file) = take(words, option) else { continue };
        let settings = llm_api::read(Path::new(&file)).map_err(|why| format!("--{option}: {why}"))?;
        let mut options = Vec::new();
        for (name, value) in settings.options {
            if let (Some(value), Some(given)) = (&value, take(words, name)) {
                let given = given.to_string_lossy();
                notes.push(format!("note: --{name} {given} left out: {} says {value}", file.to_string_lossy()));
            }
            options.push(format!("--{name}").into());
            options.extend(value.map(OsString::from));
        }
        notes.extend(settings.notes);
        let all = std::mem::take(words);
        *words = with_options(all, options);
    }
    Ok(())
}

/// Options spelled as strobe's help spells them, up to `--`.
fn hyphens(mut words: Vec<OsString>) -> Vec<OsString> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    for word in &mut words[..end] {
        if let Some((name, value)) = long_name(word).filter(|_| word.to_string_lossy().contains('_')) {
            *word = value.map_or_else(|| format!("--{name}"), |value| format!("--{name}={value}")).into();
        }
    }
    words
}

/// The model that would be converted is what `trtllm-build` takes.
fn convert_checkpoint(mut words: Vec<OsString>) -> String {
    let mut line = Command::new("trtllm-build");
    line.arg("--checkpoint_dir").arg(take(&mut words, "model-dir").unwrap_or_else(|| "DIR".into()));
    if let Some(dtype) = take(&mut words, "dtype") {
        line.arg("--dtype").arg(dtype);
    }
    if let Some(bits) = take(&mut words, "weight-only-precision") {
        line.arg("--quantization").arg(bits);
    }
    let line = shell::line(line.args(["--output_dir", "ENGINE"]));
    let ranks = ["tp-size", "pp-size"].into_iter().find_map(|name| take(&mut words, name).filter(|n| n != "1"));
    let ranks = ranks.map_or(String::new(), |n| format!("; {ONE_DEVICE} (found {} ranks)", n.to_string_lossy()));
    format!(
        "convert_checkpoint.py: no conversion is needed{ranks}: skip this step and build from the model itself, `{line}`"
    )
}

/// What to say of a checkpoint that is none: the conversion before it was skipped, or answered.
fn checkpoint_hint(words: &[OsString]) -> Option<String> {
    let mut words = words.to_vec();
    let given = take(&mut words, "checkpoint-dir")?;
    let dir = Path::new(&given);
    let what = match (dir.exists(), dir.join(strobe_engine::engine_dir::WEIGHTS_FILE).exists()) {
        (true, true) => "is an engine directory",
        (false, _) if strobe_model::preset(&given.to_string_lossy()).is_none() => "does not exist",
        _ => return None,
    };
    let mut line = Command::new("trtllm-build");
    line.args(["--checkpoint_dir", "MODEL"]).args(&words);
    Some(format!(
        "note: {} {what}; a converted checkpoint is not needed, build from the Hugging Face directory: `{}`",
        given.to_string_lossy(),
        shell::line(&line)
    ))
}

/// `gptManagerBenchmark` reads neither engine nor dataset from elsewhere: what is missing is put into the line to type.
fn manager(words: Vec<OsString>, notes: &mut Vec<String>) -> Result<Vec<OsString>, String> {
    let mut made = hyphens([vec!["bench".into(), "throughput".into()], apply(MANAGER, words, notes)?].concat());
    let has = |names: &[&str]| {
        made.iter().any(|word| long_name(word).is_some_and(|(name, _)| names.contains(&name.as_str())))
    };
    let help = made.iter().any(|word| asks_for_help(word));
    let (engine, dataset) = (has(&["engine-dir", "model"]), has(&["dataset"]));
    if help || (engine && dataset) {
        return Ok(made);
    }
    let mut missing = Vec::new();
    for (there, option, value) in [(engine, "--engine-dir", "ENGINE"), (dataset, "--dataset", "dataset.jsonl")] {
        if !there {
            made.extend([option.into(), value.into()]);
            missing.push(option);
        }
    }
    let line = shell::line(Command::new("strobe").args(&made));
    Err(format!("gptManagerBenchmark: {} missing; type `{line}`", missing.join(" and ")))
}

fn run(mut words: Vec<OsString>) -> String {
    let mut or = |name: &str, otherwise: &str| take(&mut words, name).unwrap_or_else(|| otherwise.into());
    let engine = or("engine-dir", "ENGINE");
    let (prompts, tokens) = (or("prompts-file", "PROMPTS.txt"), or("max-output-len", "128"));
    let report = or("report-json", "report.json");
    let mut lengths = tokens;
    lengths.push(",0");
    let (mut dataset, mut bench) = (Command::new("strobe"), Command::new("strobe"));
    dataset.args(["prepare-dataset", "--output", "prompts.jsonl", "--model"]).arg(&engine);
    dataset.args(["real-dataset", "--output-len-dist"]).arg(lengths).arg("--file").arg(prompts);
    bench.args(["bench", "throughput", "--dataset", "prompts.jsonl", "--engine-dir"]).arg(engine);
    bench.arg("--report-json").arg(report);
    format!(
        "trtllm-run: strobe measures, and prints no text yet; to run these prompts type `{} && {}`",
        shell::line(&dataset),
        shell::line(&bench)
    )
}

fn serve(words: &[OsString]) -> String {
    let mut names = words.iter().filter(|word| !is_option(word) && *word != "serve");
    let model = names.next().cloned().unwrap_or_else(|| "MODEL".into());
    let mut bench = Command::new("strobe");
    bench.args(["bench", "throughput", "--streaming", "--dataset", "FILE", "--request-rate", "RATE", "--model"]);
    bench.arg(model);
    format!(
        "trtllm-serve: strobe has no server yet; to measure requests that arrive at a rate type `{}`",
        shell::line(&bench)
    )
}

/// Which of a model's names counts: the engine directory where `engine_wins`, then the local path, then the name.
fn choose_model(words: &mut Vec<OsString>, engine_wins: bool, notes: &mut Vec<String>) -> Result<(), String> {
    let path = take(words, "model-path");
    if path.is_none() && !engine_wins {
        return Ok(());
    }
    let engine = if engine_wins { take(words, "engine-dir") } else { None };
    let name = take(words, "model");
    let (option, value) = match (engine, path, &name) {
        (Some(engine), ..) => ("--engine-dir", Some(engine)),
        (None, Some(path), _) => ("--model", Some(path)),
        (None, None, Some(name)) => ("--model", Some(name.clone())),
        (None, None, None) => ("--model", None),
    };
    let Some(value) = value else { return Ok(()) };
    if let Some(name) = name.filter(|name| *name != value) {
        notes.push(format!(
            "note: --model {} left out: {option} {} says what runs",
            name.to_string_lossy(),
            value.to_string_lossy()
        ));
    }
    let all = std::mem::take(words);
    *words = with_options(all, vec![option.into(), value]);
    Ok(())
}

/// Takes an option with its value out of the words.
fn take(words: &mut Vec<OsString>, name: &str) -> Option<OsString> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let place = words[..end].iter().position(|word| long_name(word).is_some_and(|(own, _)| own == name))?;
    if let Some((_, value)) = words[place].to_str().and_then(|word| word.split_once('=')) {
        let value = value.into();
        words.remove(place);
        return Some(value);
    }
    // An option without its value stays, for the parser to refuse.
    words.get(place + 1).filter(|next| long_name(next).is_none())?;
    words.remove(place);
    Some(words.remove(place))
}

/// The name of a long option with hyphens, and the value behind `=`.
fn long_name(word: &OsStr) -> Option<(String, Option<&str>)> {
    let text = word.to_str()?.strip_prefix("--").filter(|name| !name.is_empty())?;
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    Some((name.replace('_', "-"), value))
}

/// trtllm-bench's short options as long ones.
fn long_names(words: Vec<OsString>) -> Vec<OsString> {
    let long = |word: OsString| match word.to_str() {
        Some("-m") => "--model".into(),
        Some("-w") => "--workspace".into(),
        _ => word,
    };
    words.into_iter().map(long).collect()
}

fn is_option(word: &OsStr) -> bool {
    word.to_str().is_some_and(|word| word.starts_with('-') && word.len() > 1)
}

fn asks_for_help(word: &OsStr) -> bool {
    ["-h", "--help", "-V", "--version"].iter().any(|help| word == *help)
}

/// Options at the end of the words, but before `--`.
fn with_options(mut words: Vec<OsString>, options: Vec<OsString>) -> Vec<OsString> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    words.splice(end..end, options);
    words
}

/// Options before the first word that is none, and the rest.
fn split_at_verb(mut words: Vec<OsString>, flags: &HashSet<String>) -> (Vec<OsString>, Vec<OsString>) {
    let mut place = 0;
    while let Some(word) = words.get(place) {
        if !is_option(word) {
            break;
        }
        let value_follows = match long_name(word) {
            Some((name, value)) => value.is_none() && !flags.contains(&name),
            None => true,
        };
        place += 1 + usize::from(value_follows);
    }
    let rest = words.split_off(place.min(words.len()));
    (words, rest)
}

/// The names of all options that take no value.
fn flags_of(command: &clap::Command) -> HashSet<String> {
    let own = command.get_arguments().filter(|arg| !arg.get_action().takes_values());
    let own = own.filter_map(|arg| arg.get_long().map(str::to_owned)).chain(["help".to_owned()]);
    own.chain(command.get_subcommands().flat_map(flags_of)).collect()
}

/// Does to each option what its fate is; other words stay.
fn apply(fates: Fates, words: Vec<OsString>, notes: &mut Vec<String>) -> Result<Vec<OsString>, String> {
    let mut made = Vec::new();
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        if word == "--" {
            made.push(word);
            made.extend(words);
            break;
        }
        let known = long_name(&word)
            .and_then(|(name, _)| fates.iter().find(|(known, _)| *known == name).map(|(_, fate)| (name, *fate)));
        let Some((name, fate)) = known else {
            made.push(word);
            continue;
        };
        let inline = long_name(&word).and_then(|(_, value)| value.map(OsString::from));
        let mut value = || {
            let value = inline.clone().or_else(|| words.next_if(|next| long_name(next).is_none()));
            value.ok_or_else(|| format!("--{name}: a value is missing"))
        };
        match fate {
            Renamed(own) => made.extend([own.into(), value()?]),
            Flag(own) => made.extend(own.iter().map(OsString::from)),
            Switch(own) => {
                let value =
                    inline.clone().or_else(|| words.next_if(|next| next.to_str().is_some_and(|n| switch(n).is_some())));
                let value = value.unwrap_or_else(|| "true".into()).to_string_lossy().into_owned();
                let on = switch(&value).ok_or_else(|| format!("--{name} {value}: expected true or false"))?;
                made.extend([own.into(), on.into()]);
            }
            FlagLeftOut(why) => notes.push(format!("note: --{name} left out: {why}")),
            LeftOut(why) => {
                notes.push(format!("note: --{name} {} left out: {why}", value()?.to_string_lossy()));
            }
            Only(values, why) => {
                let value = value()?.to_string_lossy().into_owned();
                if !values.contains(&value.as_str()) {
                    return Err(format!("--{name} {value}: {why}; leave it out"));
                }
                notes.push(format!("note: --{name} {value} left out: it is always so"));
            }
            Value(own) => {
                let value = value()?.to_string_lossy().into_owned();
                let own = own(&value).map_err(|why| format!("--{name} {value}: {why}"))?;
                if own.is_empty() {
                    notes.push(format!("note: --{name} {value} left out: {}", why_nothing(&name)));
                }
                made.extend(own.into_iter().map(OsString::from));
            }
            Refused(instead) => return Err(format!("--{name}: {instead}")),
        }
    }
    Ok(made)
}

/// Why an option whose value is fine comes to nothing.
fn why_nothing(name: &str) -> &'static str {
    match name {
        "backend" => "strobe runs its own engine; PyTorch on the same requests is --runtime pytorch-graph",
        "type" => "continuous batching is the default",
        _ => "it is the default",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn said(line: &str) -> Result<(String, Vec<String>), String> {
        let words = crate::shell::words(line).unwrap().into_iter().map(OsString::from).collect();
        let made = translate(words, &crate::Cli::command())?;
        let line = made.words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        Ok((line, made.notes))
    }

    fn line(line: &str) -> String {
        said(line).unwrap().0
    }

    #[test]
    fn own_lines_stay_as_they_are() {
        for same in [
            "strobe",
            "strobe --help",
            "strobe -V",
            "strobe bench throughput --engine-dir E --dataset d.jsonl --profile 5-8 --json",
            "strobe ab --a '--gemm-plugin auto' -- --dtype bfloat16 --backend x",
            "strobe profile --windows 1-2 -- trtllm-bench --model M throughput --backend pytorch",
            "strobe build --list-presets",
        ] {
            assert_eq!(line(same), same.replace('\'', ""), "{same}");
            assert!(said(same).unwrap().1.is_empty(), "{same}");
        }
    }

    #[test]
    fn options_before_the_verb_go_behind_it() {
        assert_eq!(
            line("strobe --engine-dir E --json bench throughput --dataset d"),
            "strobe bench throughput --dataset d --engine-dir E --json"
        );
        assert_eq!(
            line("strobe --model X throughput --dataset d --streaming"),
            "strobe bench throughput --dataset d --streaming --model X"
        );
        assert_eq!(line("strobe --windows 3 profile -- CMD"), "strobe profile --windows 3 -- CMD");
    }

    #[test]
    fn the_engine_says_what_runs_then_the_path_then_the_name() {
        let (made, notes) = said(
            "trtllm-bench -m org/M --model_path P throughput --dataset F --engine_dir E --backend pytorch --warmup 0",
        )
        .unwrap();
        assert_eq!(made, "strobe bench throughput --dataset F --warmup 0 --engine-dir E");
        assert_eq!(notes.len(), 3, "{notes:?}");
        assert!(notes[0].contains("strobe bench throughput --dataset F --warmup 0 --engine-dir E"), "{notes:?}");
        assert_eq!(
            line("strobe trtllm-bench --model org/M --model_path=P latency --dataset F"),
            "strobe bench latency --dataset F --model P"
        );
        assert_eq!(
            line("strobe bench throughput --model_path P --dataset F"),
            "strobe bench throughput --dataset F --model P"
        );
    }

    #[test]
    fn lines_are_shown_in_words_of_one_style() {
        assert_eq!(
            line(
                "gptManagerBenchmark --engine_dir E --dataset d --enable_kv_cache_reuse --request_rate 50 --enable_chunked_context=false"
            ),
            "strobe bench throughput --engine-dir E --dataset d --kv-cache-reuse enable --request-rate 50 --chunked-context disable"
        );
        assert_eq!(
            line(
                "trtllm-bench --model M --workspace=/w build --dataset d --tp_size 1 --quantization FP8 --max_seq_len 128"
            ),
            "strobe build --model M --quantization fp8 --max-seq-len 128 --output-dir /w/M/tp_1_pp_1"
        );
        assert_eq!(line("trtllm-bench --help"), "strobe bench --help");
        assert!(said("trtllm-serve serve M --host h").unwrap_err().contains("--model M"));
        let (_, notes) = said("trtllm-build --checkpoint_dir C --output_dir E --max_beam_width 1").unwrap();
        assert!(notes.iter().any(|note| note.contains("--max-beam-width 1 left out")), "{notes:?}");
    }

    #[test]
    fn what_cannot_be_had_says_what_to_do() {
        for (typed, said_in_answer) in [
            ("trtllm-bench --model M throughput --dataset F --tp 2", "--tp 2: strobe runs on one device; leave it out"),
            ("trtllm-bench --model M throughput --extra_llm_api_options y.yaml", "cannot read y.yaml"),
            ("trtllm-bench --model M throughput --max_beam_width 4", "no beam search"),
            (
                "convert_checkpoint.py --model_dir M --output_dir C --tp_size 2",
                "one device (found 2 ranks): skip this step and build from the model itself, `trtllm-build --checkpoint_dir M",
            ),
            (
                "trtllm-build --checkpoint_dir C --gemm_plugin fp8",
                "--gemm-plugin fp8: expected auto or disable; for FP8 weights pass --quantization fp8",
            ),
            ("trtllm-bench --model M throughput --backend", "--backend: a value is missing"),
            ("trtllm-bench --model M", "expected throughput, latency, build or prepare-dataset"),
            (
                "python3 examples/convert_checkpoint.py --model_dir M --output_dir C --dtype float16",
                "no conversion is needed: skip this step and build from the model itself, \
                 `trtllm-build --checkpoint_dir M --dtype float16 --output_dir ENGINE`",
            ),
            (
                "gptManagerBenchmark --log_iteration_data",
                "type `strobe bench throughput --log-iteration-data --engine-dir ENGINE --dataset dataset.jsonl`",
            ),
        ] {
            let error = said(typed).unwrap_err();
            assert!(error.contains(said_in_answer), "{typed}: {error}");
        }
    }
}
