//! Other runtimes on the same dataset: PyTorch, through a small Python program that reports when each token was there.

pub(crate) mod report;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::json;
use strobe_engine::recorder::StepTimes;
use strobe_engine::{EngineConfig, IterationRecord, WeightsOrigin};
use strobe_model::{ModelConfig, RopeScaling};
use strobe_workload::RequestRecord;

use crate::bench::client::Job;
use crate::device::Device;
use crate::{interrupt, progress};

/// One program, in two files and a call.
const RUNNER: &str = concat!(include_str!("runner.py"), include_str!("graphs.py"), "\n\nmain()\n");

/// What runs the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Runtime {
    /// strobe's own engine
    #[default]
    Strobe,
    /// Hugging Face transformers: `generate` on one batch after another
    Pytorch,
    /// PyTorch at its best without a serving engine: a hand-written step in a CUDA graph, requests refilled as they end
    PytorchGraph,
}

impl Runtime {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Runtime::Strobe => "strobe",
            Runtime::Pytorch => "pytorch",
            Runtime::PytorchGraph => "pytorch-graph",
        }
    }
}

/// What another runtime is to do.
pub(crate) struct Task<'a> {
    pub runtime: Runtime,
    pub python: &'a Path,
    pub device: Device,
    pub config: &'a EngineConfig,
    pub jobs: &'a [Job],
    /// Most requests in a step.
    pub batch: usize,
    /// Most prompt tokens in a step of `pytorch-graph`.
    pub prefill_tokens: usize,
    /// Whether requests are sent one by one as others end, rather than all at the start.
    pub closed_loop: bool,
    pub warmup: usize,
    pub repeat: usize,
    pub threads: usize,
}

/// What the runner says of itself when the model is loaded.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Facts {
    pub torch: String,
    pub python: String,
    pub description: String,
    pub device_name: Option<String>,
    pub device_bytes: Option<u64>,
    pub threads: usize,
    pub load_seconds: f64,
    pub warmup_seconds: f64,
    pub weight_bytes: u64,
    /// Of a cache that is reserved at the start; 0 when it grows.
    pub kv_bytes: u64,
}

/// One run over the dataset.
#[derive(Default)]
pub(crate) struct Run {
    pub records: Vec<RequestRecord>,
    pub iterations: Vec<IterationRecord>,
    /// Most device memory that was allocated, where known.
    pub peak_bytes: Option<u64>,
}

#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Event {
    Ready(Facts),
    Run,
    Request {
        id: u64,
        first_scheduled_ns: u64,
        token_times_ns: Vec<u64>,
        output_ids: Vec<u32>,
    },
    /// Start, end, requests in their prompt, requests that generate, prompt tokens.
    Done {
        steps: Vec<(u64, u64, u32, u32, u32)>,
        peak_bytes: Option<u64>,
    },
    Error {
        message: String,
    },
}

/// Refuse a model that the runner would run as another one: it makes dense models, and leaves out what it does not know.
/// `longest` is the longest sequence that is asked for, prompt and output together.
pub(crate) fn check_model(runtime: Runtime, config: &EngineConfig, longest: usize) -> Result<()> {
    let random = matches!(config.weights, WeightsOrigin::Random { .. });
    if runtime == Runtime::Pytorch && !random {
        return Ok(()); // transformers reads the checkpoint's own configuration
    }
    let Some(lacking) = lacking(runtime, &config.model, longest) else { return Ok(()) };
    let remedy = match random {
        true => {
            "use --runtime strobe, a dense preset such as tinyllama-1.1b, or --runtime pytorch with a checkpoint directory"
        }
        false => "use --runtime pytorch, which loads it with transformers",
    };
    bail!("--runtime {} can't run {}: the runtime has no {lacking}; {remedy}", runtime.name(), config.model_name)
}

/// What a model has and the runner's own models have not.
fn lacking(runtime: Runtime, model: &ModelConfig, longest: usize) -> Option<String> {
    let known = match model.rope_scaling {
        RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => true,
        RopeScaling::Yarn { .. } | RopeScaling::Factors { .. } => false,
    };
    let parts = [
        ("experts", model.moe.is_some()),
        ("latent attention", model.latent.is_some()),
        ("attention sinks", model.attention_sinks),
        ("rotary scaling but linear and llama3", !known),
    ];
    if let Some((part, _)) = parts.iter().find(|(_, there)| *there) {
        return Some(part.to_string());
    }
    // A window that no request fills changes nothing.
    if let Some(window) = model.sliding_window.iter().flatten().min().filter(|window| **window < longest) {
        return Some(format!("sliding window, and requests of {longest} tokens pass the model's {window}"));
    }
    // The step written by hand has what the configuration says, a class of transformers what it is made with.
    let biases = model.qkv_bias == model.o_bias;
    let fits = match model.model_type.as_str() {
        "llama" => biases && !model.qk_norm,
        "qwen3" => biases && !model.mlp_bias && model.qk_norm,
        _ => false,
    };
    let strange = runtime == Runtime::Pytorch && !fits;
    strange.then(|| format!("random weights of type {} with these norms and biases", model.model_type))
}

/// How often an interrupt is looked for.
const TICK: Duration = Duration::from_millis(100);

/// Run the dataset; the runs come back in order.
pub(crate) fn execute(task: &Task<'_>) -> Result<(Facts, Vec<Run>)> {
    let python = task.python.display();
    let input = input(task)?;
    let mut child = Command::new(task.python)
        .args(["-c", RUNNER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run `{python}`; name a Python that has torch with --python PATH"))?;
    let (Some(mut stdin), Some(stdout), Some(mut stderr)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        bail!("`{python}` has no standard streams");
    };
    // Threads of their own, so that neither side waits for the other to make room in a pipe.
    let writer = std::thread::spawn(move || {
        let _ = stdin.write_all(input.as_bytes()); // a runner that has ended says why by itself
    });
    let complaints = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stderr.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let (sender, lines) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(|line| line.ok()) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let result = listen(task, &lines);
    if result.is_err() {
        let _ = child.kill(); // it may have ended by itself
    }
    let status = child.wait().with_context(|| format!("waiting for `{python}`"))?;
    let joined = (writer.join(), reader.join(), complaints.join());
    let said = joined.2.unwrap_or_default();
    match result? {
        Some(done) if status.success() => Ok(done),
        _ => {
            let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it did not say why");
            bail!("the runner of --runtime {} ended early ({status}): {}", task.runtime.name(), last.trim())
        }
    }
}

/// The runner's input: what to do, then the requests.
fn input(task: &Task<'_>) -> Result<String> {
    let (checkpoint, seed) = match task.config.weights {
        WeightsOrigin::Random { seed } => (None, seed),
        WeightsOrigin::Checkpoint => (Some(&task.config.model_name), 0),
    };
    if let Some(file) = checkpoint.filter(|path| Path::new(path).is_file()) {
        bail!(
            "{file} is a GGUF file, which --runtime {} can't read; name a Hugging Face directory",
            task.runtime.name()
        );
    }
    if let Some(dir) = checkpoint.filter(|dir| !Path::new(dir).is_dir()) {
        bail!(
            "the checkpoint {dir} is not here any more, and PyTorch can't read engine directories; name it with --model"
        );
    }
    let first = json!({
        "runtime": task.runtime.name(),
        "device": task.device.to_string(),
        "dtype": task.config.build.dtype.name(),
        "model": task.config.model,
        "checkpoint": checkpoint,
        // What random weights must come to, should a library leave out what it was asked for.
        "parameters": task.config.model.parameter_count(),
        "seed": seed,
        "batch": task.batch,
        "prefill_tokens": task.prefill_tokens,
        "warmup": task.warmup,
        "repeat": task.repeat,
        "threads": task.threads,
    });
    let mut text = format!("{first}\n");
    for (id, job) in task.jobs.iter().enumerate() {
        let line = json!({"id": id, "input_ids": job.prompt, "output_tokens": job.output_tokens});
        text.push_str(&format!("{line}\n"));
    }
    Ok(text)
}

/// Take events until the last run is done; `None` when the runner ended before that.
fn listen(task: &Task<'_>, lines: &mpsc::Receiver<String>) -> Result<Option<(Facts, Vec<Run>)>> {
    let mut facts = None;
    let mut runs: Vec<Run> = Vec::new();
    let mut finished = 0;
    let spinner = progress::spinner("loading torch and the model");
    while finished < task.repeat {
        let line = match lines.recv_timeout(TICK) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) if !interrupt::requested() => continue,
            Err(RecvTimeoutError::Timeout) => bail!(interrupt::Interrupted),
            Err(RecvTimeoutError::Disconnected) if interrupt::requested() => bail!(interrupt::Interrupted),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        };
        let shown = || line.chars().take(200).collect::<String>();
        let event: Event = serde_json::from_str(&line)
            .with_context(|| format!("the runner of --runtime {} said `{}`", task.runtime.name(), shown()))?;
        match event {
            Event::Error { message } => bail!("--runtime {}: {message}", task.runtime.name()),
            Event::Ready(said) => facts = Some(said),
            Event::Run => {
                spinner.set_message(format!("run {} of {}", runs.len() + 1, task.repeat));
                runs.push(Run::default());
            }
            Event::Request { id, first_scheduled_ns, token_times_ns, output_ids } => {
                let (Some(run), Some(job)) = (runs.last_mut(), task.jobs.get(id as usize)) else {
                    bail!("the runner answered a request that was not asked: {id}");
                };
                let sent = if task.closed_loop { first_scheduled_ns } else { 0 };
                run.records.push(RequestRecord {
                    id,
                    task_id: job.task_id,
                    num_input_tokens: job.prompt.len() as u32,
                    arrival_ns: sent,
                    sent_ns: sent,
                    queued_ns: sent,
                    first_scheduled_ns: Some(first_scheduled_ns),
                    token_times_ns,
                    output_ids,
                    finish_reason: "length".into(),
                    error: None,
                    iterations: None,
                    preemptions: 0,
                    reused_tokens: 0,
                });
            }
            Event::Done { steps, peak_bytes } => {
                let Some(run) = runs.last_mut() else { bail!("the runner ended a run that had not begun") };
                if run.records.len() != task.jobs.len() {
                    bail!("the runner answered {} of {} requests", run.records.len(), task.jobs.len());
                }
                run.peak_bytes = peak_bytes;
                run.iterations = steps.iter().enumerate().map(|(iter, step)| iteration(iter as u64, *step)).collect();
                finished += 1;
            }
        }
    }
    spinner.finish_and_clear();
    Ok(facts.map(|facts| (facts, runs)))
}

/// The record of a step that another runtime ran.
fn iteration(iter: u64, (start, end, context, generation, tokens): (u64, u64, u32, u32, u32)) -> IterationRecord {
    let times = StepTimes::forward_only(start, end);
    IterationRecord {
        iter,
        times,
        active: context + generation,
        context_requests: context,
        generation_requests: generation,
        context_tokens: tokens,
        new_tokens: context + generation,
        ..IterationRecord::default()
    }
}

#[cfg(test)]
mod tests {
    use strobe_model::preset;

    use super::*;

    fn preset_of(name: &str) -> ModelConfig {
        preset(name).unwrap().config()
    }

    #[test]
    fn dense_presets_run_and_all_others_are_told_apart() {
        for preset in strobe_model::presets() {
            let model = preset.config();
            for runtime in [Runtime::Pytorch, Runtime::PytorchGraph] {
                let dense = model.moe.is_none() && model.latent.is_none();
                let lacking = lacking(runtime, &model, 4096);
                assert_eq!(lacking.is_none(), dense, "{}: {lacking:?}", preset.name);
            }
        }
    }

    #[test]
    fn every_part_that_would_be_left_out_is_named() {
        let dense = || ModelConfig { moe: None, ..preset_of("gpt-oss-tiny") };
        let plain = || preset_of("micro");
        let yarn = dense().rope_scaling;
        let windows = vec![Some(64), None, None, None];
        for (model, part) in [
            (preset_of("gpt-oss-tiny"), "experts"),
            (ModelConfig { moe: None, ..preset_of("deepseek-tiny") }, "latent attention"),
            (dense(), "attention sinks"),
            (ModelConfig { rope_scaling: yarn, ..plain() }, "rotary scaling"),
            (ModelConfig { rope_scaling: RopeScaling::Factors { factors: vec![1.0; 16] }, ..plain() }, "rotary"),
            (ModelConfig { sliding_window: windows.clone(), ..plain() }, "65 tokens pass the model's 64"),
        ] {
            for runtime in [Runtime::Pytorch, Runtime::PytorchGraph] {
                let said = lacking(runtime, &model, 65).unwrap();
                assert!(said.contains(part), "{said}");
            }
        }
        let unfilled = ModelConfig { sliding_window: windows, ..plain() };
        assert_eq!(lacking(Runtime::PytorchGraph, &unfilled, 64), None);
    }

    #[test]
    fn classes_of_transformers_have_their_own_norms_and_biases() {
        let (llama, qwen3) = (preset_of("micro"), preset_of("qwen3-0.6b"));
        let of_type = |name: &str| ModelConfig { model_type: name.into(), ..llama.clone() };
        for (model, fits) in [
            (ModelConfig { qkv_bias: true, o_bias: true, mlp_bias: true, ..llama.clone() }, true),
            (ModelConfig { qkv_bias: true, ..llama.clone() }, false),
            (ModelConfig { qk_norm: true, ..llama.clone() }, false),
            (ModelConfig { qkv_bias: true, o_bias: true, ..qwen3.clone() }, true),
            (ModelConfig { mlp_bias: true, ..qwen3.clone() }, false),
            // Qwen2 has its biases whatever is said, Mistral a window.
            (of_type("qwen2"), false),
            (of_type("mistral"), false),
        ] {
            assert_eq!(lacking(Runtime::Pytorch, &model, 64).is_none(), fits, "{model:?}");
            assert_eq!(lacking(Runtime::PytorchGraph, &model, 64), None, "{model:?}");
        }
    }
}
