//! Results of a run: a run directory, or what other benchmarks write. Told by content.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};
use strobe_analyze::compare::runs::{Metric, RunFacts, RunWork};

use crate::run_dir::RunDir;
use crate::run_facts::{KnownRun, known_run};

/// Reads what a run left at `path`. `metric` may name any figure of a result of another benchmark.
pub(crate) fn read(path: &Path, process: usize) -> Result<KnownRun> {
    if RunDir::is_at(path) {
        return known_run(path, process);
    }
    if path.is_dir() {
        bail!("{}: neither a run directory nor a result file", path.display());
    }
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read {}, where the result was to be", path.display()))?;
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let mut run = of_text(&text).with_context(|| format!("{}", path.display()))?;
    for facts in &mut run.runs {
        (facts.process, facts.name) = (process, name.clone());
    }
    Ok(run)
}

/// Whether less of a figure is better, by its name: times and latencies.
fn lower_is_better(name: &str) -> bool {
    let name = name.to_lowercase();
    let ends = ["_ms", "_s", "_ns", "_us", "seconds"].iter().any(|end| name.ends_with(end))
        && !name.contains("_per_")
        && !name.contains("tok_s")
        && !name.contains("req_s");
    ends || ["latency", "ttft", "tpot", "itl", "e2el", "duration", "elapsed", "time"]
        .iter()
        .any(|word| name.contains(word))
}

fn metric(name: &str, unit: &str, higher_is_better: bool, value: f64) -> Metric {
    Metric { name: name.to_owned(), unit: unit.to_owned(), higher_is_better, value }
}

/// A result as text: one JSON document, or a line each.
pub(crate) fn of_text(text: &str) -> Result<KnownRun> {
    let document = match serde_json::from_str::<Value>(text) {
        Ok(document) => document,
        Err(whole) => {
            // JSON Lines: llama-bench -o jsonl, or the last line of a log.
            let lines: Vec<Value> =
                text.lines().filter(|l| !l.trim().is_empty()).filter_map(|l| serde_json::from_str(l).ok()).collect();
            match lines.len() {
                0 => {
                    return Err(whole)
                        .context("not JSON; expected a result of strobe, trtllm-bench, vLLM bench or llama-bench");
                }
                1 => lines.into_iter().next().unwrap_or_default(),
                _ => Value::Array(lines),
            }
        }
    };
    let (source, metrics, work) = match &document {
        Value::Object(map) if map.get("performance").is_some_and(Value::is_object) => trtllm(map),
        Value::Array(rows) if rows.iter().any(|row| row.get("avg_ts").is_some()) => {
            ("llama-bench", llama_bench(rows), None)
        }
        Value::Object(map) if map.contains_key("avg_ts") => {
            ("llama-bench", llama_bench(std::slice::from_ref(&document)), None)
        }
        Value::Object(map) if VLLM.iter().any(|(key, ..)| map.contains_key(*key)) => vllm(map),
        _ => bail!("no result of strobe, trtllm-bench, vLLM bench or llama-bench (none of their keys is in it)"),
    };
    if metrics.is_empty() {
        bail!("a result of {source} without a figure");
    }
    Ok(KnownRun {
        metric: None,
        about: Value::Null,
        seconds: None,
        runs: vec![RunFacts { metrics, work, ..RunFacts::default() }],
    })
}

fn others(map: &Map<String, Value>, known: &mut Vec<Metric>) {
    for (name, value) in map {
        if let Some(value) = value.as_f64().filter(|_| !known.iter().any(|metric| metric.name == *name)) {
            known.push(metric(name, name, !lower_is_better(name), value));
        }
    }
}

/// trtllm-bench's `--report_json`.
fn trtllm(map: &Map<String, Value>) -> (&'static str, Vec<Metric>, Option<RunWork>) {
    let empty = Map::new();
    let section = |name: &str| map.get(name).and_then(Value::as_object).unwrap_or(&empty);
    let performance = section("performance");
    let number = |name: &str| performance.get(name).and_then(Value::as_f64);
    let mut metrics = Vec::new();
    let output = number("system_output_throughput_tok_s").or_else(|| number("output_throughput_tok_s"));
    metrics.extend(output.map(|value| metric("system_output_throughput_tok_s", "output tok/s", true, value)));
    others(performance, &mut metrics);
    others(section("streaming_metrics"), &mut metrics);
    let requests = section("request_info");
    let of = |name: &str| requests.get(name).and_then(Value::as_f64);
    let work = of("num_requests").map(|count| RunWork {
        requests: count as u64,
        input_tokens: count * of("avg_input_length").unwrap_or(0.0),
        output_tokens: count * of("avg_output_length").unwrap_or(0.0),
    });
    ("trtllm-bench", metrics, work)
}

/// What decides in a result of `vllm bench serve`, `throughput` or `latency`, the first that is there.
const VLLM: [(&str, &str, bool); 5] = [
    ("output_throughput", "output tok/s", true),
    ("tokens_per_second", "tok/s", true),
    ("request_throughput", "req/s", true),
    ("requests_per_second", "req/s", true),
    ("avg_latency", "s average latency", false),
];

fn vllm(map: &Map<String, Value>) -> (&'static str, Vec<Metric>, Option<RunWork>) {
    let known = |(key, unit, higher): &(&str, &str, bool)| Some(metric(key, unit, *higher, map.get(*key)?.as_f64()?));
    let mut metrics: Vec<Metric> = VLLM.iter().filter_map(known).collect();
    others(map, &mut metrics);
    let count = |name: &str| map.get(name).and_then(Value::as_f64);
    let work = count("completed").or_else(|| count("num_requests")).map(|requests| RunWork {
        requests: requests as u64,
        input_tokens: count("total_input_tokens").unwrap_or(0.0),
        output_tokens: count("total_output_tokens").unwrap_or(0.0),
    });
    ("vLLM bench", metrics, work)
}

/// llama-bench's rows: prompts, generation, or both at a depth.
fn llama_bench(rows: &[Value]) -> Vec<Metric> {
    let row = |row: &Value| {
        let count = |name: &str| row.get(name).and_then(Value::as_u64).filter(|n| *n > 0);
        let parts = [count("n_prompt").map(|n| format!("pp{n}")), count("n_gen").map(|n| format!("tg{n}"))];
        let depth = count("n_depth").map_or(String::new(), |n| format!(" @ d{n}"));
        let name = parts.into_iter().flatten().collect::<Vec<_>>().join("+");
        Some(metric(&format!("{name}{depth}"), &format!("tok/s {name}{depth}"), true, row.get("avg_ts")?.as_f64()?))
    };
    rows.iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(text: &str) -> (String, bool, f64) {
        let run = of_text(text).unwrap();
        let metric = &run.runs[0].metrics[0];
        (metric.name.clone(), metric.higher_is_better, metric.value)
    }

    #[test]
    fn results_of_others_are_told_by_content() {
        let trtllm = r#"{"performance": {"total_latency_ms": 10.0, "system_output_throughput_tok_s": 1234.5},
            "request_info": {"num_requests": 4, "avg_input_length": 8.0, "avg_output_length": 2.0}}"#;
        assert_eq!(first(trtllm), ("system_output_throughput_tok_s".into(), true, 1234.5));
        assert_eq!(of_text(trtllm).unwrap().runs[0].work.unwrap().input_tokens, 32.0);
        let serve = r#"{"duration": 3.1, "completed": 10, "request_throughput": 3.2, "output_throughput": 412.0, "mean_ttft_ms": 20.1}"#;
        assert_eq!(first(serve), ("output_throughput".into(), true, 412.0));
        let run = of_text(serve).unwrap();
        let ttft = run.runs[0].metrics.iter().find(|m| m.name == "mean_ttft_ms").unwrap();
        assert!(!ttft.higher_is_better);
        assert_eq!(first(r#"{"avg_latency": 0.5, "latencies": [0.5]}"#), ("avg_latency".into(), false, 0.5));
        assert_eq!(
            first(r#"{"elapsed_time": 9.0, "num_requests": 3, "requests_per_second": 3.5, "tokens_per_second": 99.0}"#)
                .0,
            "tokens_per_second"
        );
        let llama = r#"[{"n_prompt": 512, "n_gen": 0, "avg_ts": 97.2}, {"n_prompt": 0, "n_gen": 128, "avg_ts": 24.8}]"#;
        assert_eq!(first(llama), ("pp512".into(), true, 97.2));
        assert_eq!(of_text(llama).unwrap().runs[0].metrics[1].name, "tg128");
        let lines =
            "{\"n_prompt\": 0, \"n_gen\": 16, \"avg_ts\": 5.0}\n{\"n_prompt\": 8, \"n_gen\": 16, \"avg_ts\": 6.0}\n";
        assert_eq!(of_text(lines).unwrap().runs[0].metrics.len(), 2);
    }

    #[test]
    fn what_is_none_is_refused() {
        for text in ["", "hello", "{}", "[1, 2]", r#"{"a": 1}"#] {
            assert!(of_text(text).is_err(), "{text}");
        }
    }
}
