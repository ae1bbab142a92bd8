//! What a report says of a run beside its metrics: every fact once, for people and for programs.

use serde_json::{Map, Value, json};
use strobe_engine::cuda::CudaFacts;
use strobe_engine::device::DeviceFacts;
use strobe_kernels_cuda::{GpuLimits, GpuSummary, SeriesSummary, Throttling};
use strobe_report::human;

use super::host;
use super::outcome::{Outcome, host_json};

/// Rows of the text report, and what stands for them under `strobe` in `report.json`.
#[derive(Default)]
pub(super) struct Facts {
    /// Labels and what is said, in order.
    pub rows: Vec<(&'static str, String)>,
    /// The same as values.
    pub json: Map<String, Value>,
}

fn on_off(flag: bool) -> &'static str {
    if flag { "enable" } else { "disable" }
}

impl Facts {
    fn say(&mut self, label: &'static str, text: impl Into<String>) {
        self.rows.push((label, text.into()));
    }

    fn put(&mut self, key: &str, value: Value) {
        self.json.insert(key.to_string(), value);
    }

    /// Everything there is to say of a run's load, machine and memory.
    pub(super) fn of(outcome: &Outcome) -> Facts {
        let mut facts = Facts::default();
        facts.load_and_machine(outcome);
        facts.memory(outcome);
        facts
    }

    fn load_and_machine(&mut self, outcome: &Outcome) {
        let build = &outcome.config.build;
        self.put("command", json!(outcome.command));
        self.say("Weights:", format!("{}, {}", outcome.config.describe_origin(), build.describe_weights()));
        self.put("weights", json!(outcome.config.describe_origin()));
        self.say("CPU:", format!("{}, {} cores", outcome.machine.cpu, outcome.machine.cores));
        self.put("machine", json!(outcome.machine));
        match &outcome.info.device {
            DeviceFacts::Cpu { tier, threads } => {
                self.say("SIMD tier, threads:", format!("{}, {threads}", tier.name()));
            }
            DeviceFacts::Cuda(facts) => {
                self.rows.extend(gpu_rows(outcome, facts));
                self.put("cuda", json!(facts));
                self.put("overlap_scheduler", json!(outcome.info.overlap));
            }
        }
        if let Some(samples) = &outcome.samples {
            self.put("gpu_samples", json!(samples.summary()));
        }
        self.say(
            "Build:",
            format!(
                "gemm-plugin {}, context-fmha {}, paged-kv-cache {}, tokens-per-block {}",
                build.gemm_plugin_name(),
                on_off(build.context_fmha),
                on_off(build.paged_kv_cache),
                build.tokens_per_block
            ),
        );
        self.put("build_config", outcome.config.to_json()["build_config"].clone());
        self.say("Arrivals:", outcome.arrival.clone());
        self.put("arrival", json!(outcome.arrival));
        let peaks = &outcome.peaks;
        let (ops_per_s, of_type) = peaks.of_products(build);
        let measured = &peaks.flops_measured;
        self.say(
            "Peak FLOP/s (denominator of MFU):",
            format!("{} {of_type}, measured {measured}", human::flops_per_s(ops_per_s)),
        );
        let exceeded = outcome.utilization.iter().any(|row| row.mfu > 1.0);
        self.put(
            "mfu_denominator",
            json!({"ops_per_s": ops_per_s, "type": of_type, "measured": measured, "exceeded": exceeded}),
        );
        self.say(
            "Bandwidth (denominator of MBU):",
            format!("{} read, measured {}", human::bytes_per_s(peaks.read_bytes_per_s), peaks.bandwidth_measured),
        );
        self.put("peaks", json!(peaks));
        if let Some(host) = &outcome.run.host {
            self.say("Machine:", host::line(host));
            self.put("host", host_json(host));
        }
        if let Some(start) = &outcome.start {
            self.say("Start to first token:", start.to_string());
            self.put("start", json!(start));
        }
    }

    fn memory(&mut self, outcome: &Outcome) {
        let memory = &outcome.info.memory;
        let mut json = Map::new();
        let mut put = |key: &str, value: Value| json.insert(key.to_string(), value);
        let on_gpu = outcome.info.device.cuda().is_some();
        let resident = outcome.peak_resident();
        let label = if on_gpu { "Peak host memory (RSS):" } else { "Peak memory (RSS):" };
        self.say(label, resident.map_or(human::NOT_KNOWN.into(), human::bytes));
        put("peak_rss_bytes", json!(resident));
        let (peak, rest) = outcome.gpu_memory().unzip();
        if on_gpu || peak.is_some() {
            let all = |peak| format!("{}, all processes", human::bytes(peak));
            self.say("Peak GPU memory (NVML):", peak.map_or(human::NOT_KNOWN.into(), all));
        }
        put("gpu_peak_used_bytes", json!(peak));
        let kept = match (on_gpu, outcome.mapped) {
            (true, _) => "on the GPU",
            (false, true) => "mapped from the engine's file",
            (false, false) => "in memory",
        };
        self.say("  weights:", format!("{}, {kept}", human::bytes(memory.weights_bytes)));
        put("weights_bytes", json!(memory.weights_bytes));
        put("weights_mapped", json!(outcome.mapped));
        let blocks = outcome.peak_kv_blocks();
        let used = u64::from(blocks) * outcome.kv_block_bytes();
        self.say(
            "  KV cache:",
            format!(
                "{} used at most, {} reserved ({blocks} of {} blocks)",
                human::bytes(used),
                human::bytes(memory.kv_cache_bytes),
                outcome.info.limits.kv_blocks
            ),
        );
        put("kv_cache_reserved_bytes", json!(memory.kv_cache_bytes));
        put("kv_cache_peak_used_bytes", json!(used));
        self.say("  activations:", format!("{} reserved", human::bytes(memory.activation_bytes)));
        put("activations_reserved_bytes", json!(memory.activation_bytes));
        if memory.workspace_bytes + memory.graph_bytes > 0 {
            let (workspace, graphs) = (human::bytes(memory.workspace_bytes), human::bytes(memory.graph_bytes));
            self.say("  workspace, graphs:", format!("{workspace}, {graphs}"));
        }
        put("workspace_bytes", json!(memory.workspace_bytes));
        put("graphs_bytes", json!(memory.graph_bytes));
        if let Some(rest) = rest {
            self.say("  rest:", format!("{}: context, kernels, libraries, other processes", human::bytes(rest)));
        }
        put("gpu_outside_pools_bytes", json!(rest));
        self.put("memory", Value::Object(json));
    }
}

/// Growing numbers, runs of equal steps in short: `1, 2, 4, 8 to 128 by 8`.
fn sizes_in_words(sizes: &[usize]) -> String {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < sizes.len() {
        let step = sizes.get(at + 1).map_or(0, |next| next - sizes[at]);
        let mut end = at + 1;
        while end < sizes.len() && sizes[end] - sizes[end - 1] == step {
            end += 1;
        }
        if end - at > 3 {
            parts.push(format!("{} to {} by {step}", sizes[at], sizes[end - 1]));
            at = end;
        } else {
            parts.push(sizes[at].to_string());
            at += 1;
        }
    }
    parts.join(", ")
}

/// What is said of a GPU: itself, how steps were launched, and what it was seen to do.
fn gpu_rows(outcome: &Outcome, facts: &CudaFacts) -> Vec<(&'static str, String)> {
    let device = &facts.device;
    let graphs = match facts.graph_buckets.as_slice() {
        [] => "disable".into(),
        sizes => format!("enable, {} batch sizes: {}", sizes.len(), sizes_in_words(sizes)),
    };
    let (compiled, cached) = (facts.kernels.compiled, facts.kernels.cached);
    let mut rows = vec![
        (
            "GPU:",
            format!(
                "{}, {}, {} SMs, {}",
                device.name,
                facts.arch,
                device.multiprocessors,
                human::bytes(device.memory_bytes)
            ),
        ),
        ("CUDA graphs:", graphs),
        ("Overlap scheduler:", on_off(outcome.info.overlap).into()),
        ("Kernel files:", format!("{compiled} compiled now, {cached} from the cache")),
    ];
    let mut winners: Vec<(String, usize)> = Vec::new();
    for choice in &facts.gemm.choices {
        let name = choice.winner.family();
        match winners.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => winners.push((name.to_string(), 1)),
        }
    }
    let list: Vec<_> = winners.iter().map(|(name, count)| format!("{name} {count}")).collect();
    rows.push((
        "GEMM choices (shapes x batch sizes):",
        format!("{} ({} measured now)", list.join(", "), facts.gemm_measured),
    ));
    let start: Vec<_> = facts.start_ms.iter().map(|(name, ms)| format!("{name} {}", human::ns(ms * 1e6))).collect();
    rows.push(("Start:", start.join(", ")));
    if let Some(samples) = &outcome.samples {
        let summary = samples.summary();
        for series in &summary.series {
            rows.extend(nvml_row(series, &summary.limits));
        }
        rows.extend(throttling(&summary));
    }
    rows
}

/// A sampled series in a line. Memory is said with the pools it is made of.
fn nvml_row(series: &SeriesSummary, limits: &GpuLimits) -> Option<(&'static str, String)> {
    let limit = |limit: Option<f64>| limit.map_or(String::new(), |limit| format!(" of {}", human::number(limit)));
    let (label, limit) = match series.name {
        "GPU memory used" => return None,
        "Power" => ("GPU power (averages of a second):", limit(limits.power_w)),
        "SM clock" => ("GPU SM clock:", limit(limits.sm_clock_mhz)),
        "Memory clock" => ("GPU memory clock:", String::new()),
        "GPU utilisation" => ("GPU busy, by NVML:", String::new()),
        "Memory utilisation" => ("GPU memory busy, by NVML:", String::new()),
        "Temperature" => ("GPU temperature:", String::new()),
        other => (other, String::new()),
    };
    let unit = if series.unit == "C" { "°C" } else { series.unit };
    let [min, mean, peak] = [series.min, series.mean, series.peak].map(|value| format!("{value:.0}"));
    Some((label, format!("mean {mean}, {min} to {peak}{limit} {unit}")))
}

/// SM clocks within this share of the maximum are as good as it.
const SAME_CLOCK: f64 = 0.02;

/// Why clocks were held down, and whether it shows: a power cap is often named while clocks are still at their maximum.
fn throttling(summary: &GpuSummary) -> Option<(&'static str, String)> {
    let most = summary.limits.sm_clock_mhz.or_else(|| Some(summary.series("SM clock")?.peak));
    let below = |t: &Throttling| Some(1.0 - t.sm_clock_mhz? / most.filter(|mhz| *mhz > 0.0)?);
    let reasons = summary.throttled.iter().map(|t| {
        let clocks = match (below(t), t.sm_clock_mhz) {
            (Some(below), Some(mhz)) if below > SAME_CLOCK => {
                format!(" (SM clock {mhz:.0} MHz in them, {} below the maximum)", human::percent(below))
            }
            (Some(_), _) => " (SM clock at its maximum all the same)".to_string(),
            _ => String::new(),
        };
        format!("{} in {} of samples{clocks}", t.reason, human::percent(t.share))
    });
    let text = reasons.collect::<Vec<_>>().join(", ");
    let lowered = summary.throttled.iter().any(|t| below(t).is_none_or(|below| below > SAME_CLOCK));
    (!text.is_empty()).then_some((if lowered { "GPU THROTTLED:" } else { "GPU clock limits named:" }, text))
}

#[cfg(test)]
mod tests {
    use super::sizes_in_words;

    #[test]
    fn runs_of_sizes_are_short() {
        assert_eq!(sizes_in_words(&[1, 2, 4, 8, 16, 24, 32, 40, 72, 104, 136]), "1, 2, 4, 8 to 40 by 8, 72, 104, 136");
        assert_eq!(sizes_in_words(&[1, 2, 3, 4, 9]), "1 to 4 by 1, 9");
        assert_eq!(sizes_in_words(&[7]), "7");
        assert_eq!(sizes_in_words(&[]), "");
    }
}
