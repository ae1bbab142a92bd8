//! Datasets, arrival processes, request records and metric definitions.
//!
//! This crate is arithmetic on plain values. It knows nothing of engines, tokenizers, devices or
//! terminals: a dataset comes in as a file, a run comes in as [`RequestRecord`]s on one monotonic
//! clock, and what goes out are numbers ([`Metrics`]) and strings ([`trtllm_text()`]).
//!
//! trtllm-bench is TensorRT-LLM's benchmark, whose dataset lines, report rows and JSON keys strobe reads and writes.

pub mod arrival;
pub mod dataset;
pub mod json_lines;
pub mod metrics;
pub mod record;
pub mod strobe_text;
pub mod trtllm_json;
pub mod trtllm_text;

pub use arrival::{Arrival, ArrivalError, Arrivals, arrival_times_ns};
pub use dataset::{
    DatasetError, Lengths, NormDist, Prompt, RealOutput, RealSample, Sample, SyntheticSpec, UnifDist, check_ids,
    read_dataset, read_prompt_lines, read_real_dataset, synthetic, write_dataset,
};
pub use json_lines::{JsonLines, json_lines};
pub use metrics::{ClientLag, LittleCheck, MetricError, MetricOptions, Metrics, Phase, Phases, SteadyWindow, metrics};
pub use record::{Outcome, RequestRecord};
pub use strobe_stats::{Distribution, Interval, PercentileRule, Rng};
pub use strobe_text::strobe_text;
pub use trtllm_json::{
    EngineInfo, MachineInfo, ReportContext, WorldInfo, trtllm_report, trtllm_requests, trtllm_requests_with_text,
};
pub use trtllm_text::trtllm_text;
