//! The YAML file of `--extra_llm_api_options` (`--config`), as options of `strobe bench`.
//!
//! Such files are nested maps of plain values; that much of YAML is read. A setting that strobe cannot follow is an error.

use std::path::Path;

/// What a file says, in strobe's options.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Settings {
    /// Options with their values, the name without hyphens in front; a flag has no value.
    pub options: Vec<(&'static str, Option<String>)>,
    /// What was left out and why.
    pub notes: Vec<String>,
}

/// Reads a file of settings.
pub(super) fn read(path: &Path) -> Result<Settings, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    parse(&text).map_err(|(line, what)| format!("{}, line {line}: {what}", path.display()))
}

/// What becomes of a setting.
#[derive(Clone, Copy)]
enum Fate {
    /// The option of this name, with the value as it is.
    Is(&'static str),
    /// The same in lower case.
    Lower(&'static str),
    /// On is `enable`.
    Switch(&'static str),
    /// On is `disable`.
    Inverse(&'static str),
    /// On is the flag.
    Flag(&'static str),
    /// Without effect here.
    LeftOut(&'static str),
    /// Left out where it has one of these values, refused otherwise.
    Only(&'static [&'static str], &'static str),
    /// Cannot be had.
    Refused(&'static str),
}

use Fate::{Flag, Inverse, Is, LeftOut, Lower, Only, Refused, Switch};

const ONE_DEVICE: &str = "strobe runs on one device";
const OFF: [&str; 5] = ["false", "null", "~", "none", ""];
const OWN_KERNELS: &str = "strobe chooses kernels by shape";
const OWN_SIZES: &str = "strobe captures the batch sizes that occur";

/// Settings by their path. A name that ends in `.` covers all below it.
const FATES: &[(&str, Fate)] = &[
    ("max_batch_size", Is("max-batch-size")),
    ("max_num_tokens", Is("max-num-tokens")),
    ("max_seq_len", Is("max-seq-len")),
    ("dtype", Is("dtype")),
    ("enable_chunked_prefill", Switch("chunked-context")),
    ("disable_overlap_scheduler", Inverse("overlap-scheduler")),
    ("print_iter_log", Flag("log-iteration-data")),
    ("use_cuda_graph", Switch("cuda-graph")),
    ("cuda_graph_config", Only(&[""], "pass --cuda-graph enable or disable")),
    ("cuda_graph_config.", LeftOut(OWN_SIZES)),
    ("cuda_graph_padding_enabled", LeftOut(OWN_SIZES)),
    ("cuda_graph_batch_sizes", LeftOut(OWN_SIZES)),
    ("kv_cache_config.enable_block_reuse", Switch("kv-cache-reuse")),
    ("kv_cache_config.free_gpu_memory_fraction", Is("kv-cache-free-mem-fraction")),
    ("kv_cache_config.tokens_per_block", Is("tokens-per-block")),
    ("kv_cache_config.dtype", Lower("kv-cache-dtype")),
    ("kv_cache_config.max_tokens", Refused("pass --kv-cache-blocks N: tokens / tokens per block")),
    ("kv_cache_dtype", Lower("kv-cache-dtype")),
    ("scheduler_config.capacity_scheduler_policy", Lower("scheduler-policy")),
    ("quant_config.quant_algo", Lower("quantization")),
    ("quant_config.kv_cache_quant_algo", Lower("kv-cache-dtype")),
    ("tensor_parallel_size", Only(&["1"], ONE_DEVICE)),
    ("pipeline_parallel_size", Only(&["1"], ONE_DEVICE)),
    ("context_parallel_size", Only(&["1"], ONE_DEVICE)),
    ("moe_expert_parallel_size", Only(&["1", "-1"], ONE_DEVICE)),
    ("moe_tensor_parallel_size", Only(&["1", "-1"], ONE_DEVICE)),
    ("enable_attention_dp", Only(&OFF, ONE_DEVICE)),
    ("speculative_config", Only(&OFF, "strobe has no speculative decoding")),
    ("speculative_config.", Refused("strobe has no speculative decoding")),
    ("lora_config", Only(&OFF, "strobe has no LoRA")),
    ("lora_config.", Refused("strobe has no LoRA")),
    ("max_beam_width", Only(&["1"], "strobe has no beam search")),
    ("backend", LeftOut("strobe runs its own engine")),
    ("attn_backend", LeftOut(OWN_KERNELS)),
    ("moe_backend", LeftOut(OWN_KERNELS)),
    ("moe_config.", LeftOut(OWN_KERNELS)),
    ("allreduce_strategy", LeftOut(ONE_DEVICE)),
    ("torch_compile_config", LeftOut("strobe compiles nothing at run time but its kernels")),
    ("torch_compile_config.", LeftOut("strobe compiles nothing at run time but its kernels")),
    ("enable_iter_perf_stats", LeftOut("--output-dir keeps every iteration")),
    ("enable_iter_req_stats", LeftOut("--output-dir keeps every request")),
    ("return_perf_metrics", LeftOut("--output-dir keeps every request")),
    ("perf_metrics_max_requests", LeftOut("--output-dir keeps every request")),
    ("iter_stats_max_iterations", LeftOut("--output-dir keeps every iteration")),
    ("stream_interval", LeftOut("strobe streams each token")),
    ("sampler_type", LeftOut("strobe has one")),
    ("enable_trtllm_sampler", LeftOut("strobe has one")),
    ("num_postprocess_workers", LeftOut("strobe has none")),
    ("guided_decoding_backend", LeftOut("benchmarks have no grammar")),
    ("trust_remote_code", LeftOut("strobe runs no code of a model")),
    ("enable_autotuner", LeftOut(OWN_KERNELS)),
];

/// The settings of a text, or the number of the line that cannot be had, and why.
pub(super) fn parse(text: &str) -> Result<Settings, (usize, String)> {
    let mut settings = Settings::default();
    for (line, path, value) in values(text)? {
        let fate = FATES.iter().find(|(name, _)| *name == path).or_else(|| {
            FATES.iter().find(|(name, _)| name.strip_suffix('.').is_some_and(|parent| is_below(&path, parent)))
        });
        let Some((_, fate)) = fate else {
            return Err((line, format!("{path} is not known; remove it, or pass the option that it stands for")));
        };
        let refuse = |why: &str| Err((line, format!("{path}: {value}: {why}")));
        let on = || match value.to_lowercase().as_str() {
            "true" | "yes" | "on" => Ok(true),
            "false" | "no" | "off" => Ok(false),
            _ => Err((line, format!("{path}: found {value}, expected true or false"))),
        };
        let switch = |on: bool| Some(if on { "enable" } else { "disable" }.to_owned());
        match *fate {
            // A graph configuration of null turns graphs off; what it holds says only for which sizes.
            Only(_, _) if path == "cuda_graph_config" && value == "null" => {
                settings.options.push(("cuda-graph", switch(false)));
            }
            Is(_) | Lower(_) if OFF.contains(&value.to_lowercase().as_str()) => {}
            Is(option) => settings.options.push((option, Some(value))),
            Lower(option) => settings.options.push((option, Some(value.to_lowercase()))),
            Switch(option) => settings.options.push((option, switch(on()?))),
            Inverse(option) => settings.options.push((option, switch(!on()?))),
            Flag(option) => {
                if on()? {
                    settings.options.push((option, None));
                }
            }
            LeftOut(why) => settings.notes.push(format!("note: {path} left out: {why}")),
            Only(values, why) => {
                if !values.contains(&value.to_lowercase().as_str()) {
                    return refuse(why);
                }
            }
            Refused(why) => return refuse(why),
        }
    }
    Ok(settings)
}

fn is_below(path: &str, parent: &str) -> bool {
    path.strip_prefix(parent).is_some_and(|rest| rest.starts_with('.'))
}

/// A leaf of nested maps: line, keys joined by dots, value.
type Leaf = (usize, String, String);

/// The leaves of nested maps, or the line that is none and why. An empty map is a leaf without a value; of a list only that it
/// is there counts, because no setting with a counterpart is one.
fn values(text: &str) -> Result<Vec<Leaf>, (usize, String)> {
    const EXPECTED: &str = "expected `key: value`; pass what it sets as options of strobe bench";
    let mut leaves: Vec<Leaf> = Vec::new();
    // Open maps: indentation of their keys, and their path.
    let mut open: Vec<(usize, String)> = Vec::new();
    let mut parent: Option<(usize, String)> = None;
    for (number, raw) in text.lines().enumerate() {
        let number = number + 1;
        let line = without_comment(raw).trim_end();
        let words = line.trim_start();
        if words.is_empty() || line == "---" || line == "..." {
            continue;
        }
        let indent = line.len() - words.len();
        if words.starts_with("- ") || words == "-" {
            if leaves.is_empty() && parent.is_none() {
                return Err((number, EXPECTED.into()));
            }
            continue;
        }
        let Some((key, value)) = words.split_once(':').filter(|(_, v)| v.is_empty() || v.starts_with([' ', '\t']))
        else {
            return Err((number, EXPECTED.into()));
        };
        match parent.take() {
            Some((above, path)) if indent > above => open.push((indent, path)),
            _ => open.retain(|(own, _)| *own <= indent),
        }
        let prefix = open.iter().rev().find(|(own, _)| *own <= indent && *own > 0).map(|(_, path)| path.as_str());
        let prefix = if indent == 0 { None } else { prefix };
        if indent > 0 && prefix.is_none() {
            return Err((number, EXPECTED.into()));
        }
        let key = unquoted(key.trim());
        let path = prefix.map_or_else(|| key.to_owned(), |prefix| format!("{prefix}.{key}"));
        let value = unquoted(value.trim());
        if let Some(inside) = value.strip_prefix('{').and_then(|value| value.strip_suffix('}')) {
            leaves.push((number, path.clone(), String::new()));
            for pair in inside.split(',').filter(|pair| !pair.trim().is_empty()) {
                let (key, value) = pair.split_once(':').ok_or_else(|| (number, EXPECTED.to_owned()))?;
                leaves.push((number, format!("{path}.{}", unquoted(key.trim())), unquoted(value.trim()).into()));
            }
        } else {
            if value.is_empty() {
                parent = Some((indent, path.clone()));
            }
            leaves.push((number, path, value.to_owned()));
        }
    }
    // A key with keys of its own is no leaf.
    let paths: Vec<String> = leaves.iter().map(|(_, path, _)| path.clone()).collect();
    leaves.retain(|(_, path, value)| !value.is_empty() || !paths.iter().any(|other| is_below(other, path)));
    Ok(leaves)
}

fn unquoted(text: &str) -> &str {
    let inside = |quote: char| text.strip_prefix(quote).and_then(|text| text.strip_suffix(quote));
    inside('"').or_else(|| inside('\'')).unwrap_or(text)
}

/// A line up to a `#` that begins it or follows a blank, outside quotes.
fn without_comment(line: &str) -> &str {
    let (mut quote, mut before) = (None, ' ');
    for (place, letter) in line.char_indices() {
        match (quote, letter) {
            (None, '#') if before.is_whitespace() => return &line[..place],
            (None, '"' | '\'') => quote = Some(letter),
            (Some(open), letter) if open == letter => quote = None,
            _ => {}
        }
        before = letter;
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Vec<String> {
        let settings = parse(text).unwrap_or_else(|(line, what)| panic!("line {line}: {what}"));
        let word =
            |(name, value): (&str, Option<String>)| value.map_or(name.to_owned(), |value| format!("{name}={value}"));
        settings.options.into_iter().map(word).collect()
    }

    #[test]
    fn settings_become_options() {
        let text = "# tuned for throughput\nbackend: pytorch\nprint_iter_log: true\nkv_cache_config:\n  dtype: \"FP8\" # smaller\n  \
                    free_gpu_memory_fraction: 0.85\n  enable_block_reuse: false\ncuda_graph_config:\n  enable_padding: true\n  \
                    batch_sizes:\n  - 1\n  - 2\ndisable_overlap_scheduler: false\nmax_seq_len: null\nmoe_config:\n    backend: CUTLASS\n\
                    scheduler_config:\n  capacity_scheduler_policy: MAX_UTILIZATION\ntensor_parallel_size: 1\n";
        assert_eq!(
            options(text),
            [
                "log-iteration-data",
                "kv-cache-dtype=fp8",
                "kv-cache-free-mem-fraction=0.85",
                "kv-cache-reuse=disable",
                "overlap-scheduler=enable",
                "scheduler-policy=max_utilization"
            ]
        );
        assert_eq!(parse(text).unwrap().notes.len(), 4, "{:?}", parse(text).unwrap().notes);
    }

    #[test]
    fn graphs_are_off_where_their_configuration_is_null() {
        assert_eq!(options("cuda_graph_config: null"), ["cuda-graph=disable"]);
        assert!(options("cuda_graph_config: {}\n").is_empty());
        assert!(options("cuda_graph_config: {enable_padding: true}\n").is_empty());
    }

    #[test]
    fn what_cannot_be_followed_is_refused_with_its_line() {
        for (text, line, said) in [
            ("max_batch_size: 4\ntensor_parallel_size: 8\n", 2, "one device"),
            ("speculative_config:\n  decoding_type: MTP\n", 2, "speculative"),
            ("\n\nno_such_setting: 1\n", 3, "no_such_setting is not known"),
            ("enable_chunked_prefill: maybe\n", 1, "expected true or false"),
            ("just text\n", 1, "key: value"),
            ("- a\n", 1, "key: value"),
            ("  max_batch_size: 4\n", 1, "key: value"),
        ] {
            let (at, what) = parse(text).unwrap_err();
            assert!(at == line && what.contains(said), "{text:?}: line {at}: {what}");
        }
        assert_eq!(parse("").unwrap(), Settings::default());
    }
}
