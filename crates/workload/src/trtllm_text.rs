//! trtllm-bench's text report: its sections, rows, order, labels and columns.
//!
//! Trailing spaces in some headings and tabs in the first section are trtllm-bench's: parsers written
//! for it match them.

use std::fmt::Write;

use crate::metrics::Metrics;
use crate::trtllm_json::{EngineInfo, MachineInfo, ReportContext};
use strobe_stats::Distribution;

const RULE: &str = "===========================================================";
/// What stands where a number is not known.
const UNKNOWN: &str = "N/A";

/// The text report. `percentile_note` names the percentile rule on a line of its own at the end;
/// an empty note leaves that line out. The caller prints.
#[must_use]
pub fn trtllm_text(m: &Metrics, ctx: &ReportContext, percentile_note: &str) -> String {
    let mut text = String::new();
    engine(&mut text, &ctx.engine);
    machine(&mut text, ctx.machine.as_ref());
    requests(&mut text, m);
    world(&mut text, m, ctx);
    performance(&mut text, m);
    dataset(&mut text, m, ctx);
    if !percentile_note.is_empty() {
        line(&mut text, format_args!("Percentiles: {percentile_note}"));
    }
    text
}

fn line(text: &mut String, content: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{content}");
}

pub(crate) fn heading(text: &mut String, title: &str) {
    line(text, format_args!("{RULE}\n= {title}\n{RULE}"));
}

fn engine(text: &mut String, e: &EngineInfo) {
    heading(text, "ENGINE DETAILS");
    let mut row = |label: &str, tabs: &str, value: &str| {
        line(text, format_args!("{label}:{tabs}{value}"));
    };
    row("Model", "\t\t\t", &e.model);
    if let Some(path) = &e.model_path {
        row("Model Path", "\t\t", path);
    }
    if let Some(dir) = &e.engine_dir {
        row("Engine Directory", "\t", dir);
    }
    row("Strobe Version", "\t\t", &e.version);
    row("Dtype", "\t\t\t", &e.dtype);
    row("KV Cache Dtype", "\t\t", e.kv_cache_dtype.as_deref().unwrap_or("None"));
    row("Quantization", "\t\t", e.quantization.as_deref().unwrap_or("None"));
    if let Some(length) = e.max_input_length {
        row("Max Input Length", "\t", &length.to_string());
    }
    if let Some(length) = e.max_sequence_length {
        row("Max Sequence Length", "\t", &length.to_string());
    }
    text.push('\n');
}

fn machine(text: &mut String, machine: Option<&MachineInfo>) {
    heading(text, "MACHINE DETAILS ");
    let quantity = |value: Option<f64>, unit: &str| value.map_or(UNKNOWN.to_string(), |v| format!("{v:.2} {unit}"));
    match machine {
        Some(m) => {
            let memory = quantity(m.memory_total_gib, "GiB");
            let clock = quantity(m.clocks_mem_ghz, "GHz");
            line(text, format_args!("{}, memory {memory}, {clock}", m.name));
        }
        None => line(text, format_args!("No machine info available")),
    }
    text.push('\n');
}

fn requests(text: &mut String, m: &Metrics) {
    heading(text, "REQUEST DETAILS ");
    let mut row = |label: &str, value: String| line(text, format_args!("{label:<32}{value}"));
    row("Number of requests:", m.num_requests.to_string());
    row("Number of concurrent requests:", format!("{:.4}", m.avg_concurrent_requests));
    row("Average Input Length (tokens):", format!("{:.4}", m.isl_tokens.average));
    row("Average Output Length (tokens):", format!("{:.4}", m.osl_tokens.average));
}

fn world(text: &mut String, m: &Metrics, ctx: &ReportContext) {
    heading(text, "WORLD + RUNTIME INFORMATION ");
    let w = &ctx.world;
    let mut row = |label: &str, value: String| line(text, format_args!("{label:<24}{value}"));
    row("TP Size:", w.tp_size.to_string());
    row("PP Size:", w.pp_size.to_string());
    row("EP Size:", w.ep_size.to_string());
    row("Max Runtime Batch Size:", w.max_batch_size.to_string());
    row("Max Runtime Tokens:", w.max_num_tokens.map_or(UNKNOWN.to_string(), |tokens| tokens.to_string()));
    row("Scheduling Policy:", w.scheduling_policy.clone());
    let share = w.kv_cache_percentage.map(|share| format!("{:.2}%", share * 100.0));
    row("KV Memory Percentage:", share.unwrap_or_else(|| UNKNOWN.to_string()));
    let rate = m.issue_rate_req_s.map(|rate| exponent(rate, 4).to_uppercase());
    row("Issue Rate (req/sec):", rate.unwrap_or_else(|| UNKNOWN.to_string()));
    text.push('\n');
}

fn performance(text: &mut String, m: &Metrics) {
    heading(text, "PERFORMANCE OVERVIEW ");
    let mut row = |label: &str, value: Option<f64>| {
        line(text, format_args!("{label:<50}{}", fixed(value)));
    };
    row("Request Throughput (req/sec):", Some(m.request_throughput_req_s));
    row("Total Output Throughput (tokens/sec):", Some(m.output_throughput_tok_s));
    row("Total Token Throughput (tokens/sec):", Some(m.total_throughput_tok_s));
    row("Total Latency (ms):", Some(m.total_latency_ms));
    row("Average request latency (ms):", Some(m.e2e_ms.average));
    row("Per User Output Throughput [w/ ctx] (tps/user):", Some(m.output_throughput_per_user_tok_s));
    row("Per GPU Output Throughput (tps/gpu):", Some(m.output_throughput_per_gpu_tok_s));
    if m.streaming {
        let (tpot, gtps) = (m.tpot_ms.as_ref(), m.gtps_tok_s.as_ref());
        row("Average time-to-first-token [TTFT] (ms):", Some(m.ttft_ms.average));
        row("Average time-per-output-token [TPOT] (ms):", tpot.map(|d| d.average));
        row("Per User Output Speed (tps/user):", gtps.map(|d| d.average));
        let title = "Per-Request Time-per-Output-Token [TPOT] Breakdown (ms)";
        breakdown(text, title, "TPOT", &STREAMING_ORDER, tpot);
        let title = "Per-Request Time-to-First-Token [TTFT] Breakdown (ms) ";
        breakdown(text, title, "TTFT", &STREAMING_ORDER, Some(&m.ttft_ms));
        let title = "Per-Request Generation Throughput [GTPS] Breakdown (tps/user)";
        breakdown(text, title, "GTPS", &STREAMING_ORDER, gtps);
    }
    let title = "Request Latency Breakdown (ms) -----------------------";
    breakdown(text, title, "Latency", &LATENCY_ORDER, Some(&m.e2e_ms));
}

/// A row of a breakdown: its label and the number it shows.
type Row = (&'static str, fn(&Distribution) -> f64);

const MINIMUM: Row = ("MINIMUM", |d| d.minimum);
const MAXIMUM: Row = ("MAXIMUM", |d| d.maximum);
const AVERAGE: Row = ("AVERAGE", |d| d.average);
const P50: Row = ("P50", |d| d.p50);
const P90: Row = ("P90", |d| d.p90);
const P95: Row = ("P95", |d| d.p95);
const P99: Row = ("P99", |d| d.p99);
const STREAMING_ORDER: [Row; 7] = [MINIMUM, MAXIMUM, AVERAGE, P50, P90, P95, P99];
const LATENCY_ORDER: [Row; 7] = [P50, P90, P95, P99, MINIMUM, MAXIMUM, AVERAGE];

fn breakdown(text: &mut String, title: &str, tag: &str, rows: &[Row; 7], distribution: Option<&Distribution>) {
    line(text, format_args!("\n-- {title}\n"));
    for (label, value) in rows {
        let value = fixed(distribution.map(value));
        line(text, format_args!("[{tag}] {label:<7}: {value}"));
    }
}

fn dataset(text: &mut String, m: &Metrics, ctx: &ReportContext) {
    text.push('\n');
    heading(text, "DATASET DETAILS");
    let path = ctx.dataset_path.as_deref().unwrap_or("None");
    line(text, format_args!("Dataset Path:         {path}"));
    line(text, format_args!("Number of Sequences:  {}", m.num_requests));
    line(
        text,
        format_args!(
            "\n-- Percentiles statistics ---------------------------------\n\n        Input              Output           Seq. Length\n{}",
            "-".repeat(RULE.len())
        ),
    );
    let short = [("MIN", MINIMUM.1), ("MAX", MAXIMUM.1), ("AVG", AVERAGE.1), P50, P90, P95, P99];
    for (label, value) in short {
        let [isl, osl, seq] = [&m.isl_tokens, &m.osl_tokens, &m.seq_len_tokens].map(|d| table_number(value(d)));
        line(text, format_args!("{label}:  {isl}          {osl}          {seq}"));
    }
    line(text, format_args!("{RULE}"));
}

/// `%.4f`.
fn fixed(value: Option<f64>) -> String {
    value.map_or(UNKNOWN.to_string(), |v| format!("{v:.4}"))
}

/// `%9.4f`, or `%9.2e` from 100000.
fn table_number(value: f64) -> String {
    if value >= 100_000.0 { format!("{:>9}", exponent(value, 2)) } else { format!("{value:9.4}") }
}

/// C's `%.{digits}e`: a sign and at least two digits in the exponent, where Rust has neither.
fn exponent(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$e}");
    match text.split_once('e') {
        Some((mantissa, power)) => {
            let (sign, power) = match power.strip_prefix('-') {
                Some(power) => ('-', power),
                None => ('+', power),
            };
            format!("{mantissa}e{sign}{power:0>2}")
        }
        // Infinite or not a number: there is no exponent to mend.
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponents_are_written_as_in_c() {
        assert_eq!(exponent(123.45, 4), "1.2345e+02");
        assert_eq!(exponent(0.00012345, 4), "1.2345e-04");
        assert_eq!(exponent(7.6753e14, 4), "7.6753e+14");
        assert_eq!(exponent(1e-120, 2), "1.00e-120");
        assert_eq!(exponent(9.99999, 2), "1.00e+01");
        assert_eq!(exponent(0.0, 4), "0.0000e+00");
        assert_eq!(exponent(f64::INFINITY, 4), "inf");
    }

    #[test]
    fn table_numbers_fit_nine_columns() {
        assert_eq!(table_number(128.0), " 128.0000");
        assert_eq!(table_number(99_999.0), "99999.0000");
        assert_eq!(table_number(100_000.0), " 1.00e+05");
    }
}
