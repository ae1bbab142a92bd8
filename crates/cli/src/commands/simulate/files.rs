//! A simulated run's directory: the files of a benchmark's, written while the simulation goes on.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;
use strobe_engine::recorder::StepTimes;
use strobe_engine::{IterationLimits, IterationRecord, KeysRead};
use strobe_sim::collector::{Intervals, RequestWriter, StepWriter};
use strobe_sim::{Collector, Outcome, Policy, StepRecord};
use strobe_trace::{Device, Iteration, Meta, OpKind, OpRow, Process, RangeKind, RangeRow, Thread, Trace, nsys};
use strobe_workload::{EngineInfo, ReportContext, WorldInfo, trtllm_report};

use super::scenario::Built;
use super::{answer, page};
use crate::{iteration_json, run_dir};

/// A trace of more iterations is larger than anyone reads; the log has them all.
const MOST_TRACED: usize = 100_000;

/// The open files.
pub(super) struct Writers<'a> {
    dir: PathBuf,
    built: &'a Built,
    limits: IterationLimits,
    requests: RefCell<BufWriter<File>>,
    iterations: RefCell<BufWriter<File>>,
    /// Iterations of the first server, for the trace.
    traced: RefCell<Vec<StepRecord>>,
    dropped: RefCell<u64>,
    /// Why a log could not be written: the simulation goes on without it.
    problem: RefCell<Option<anyhow::Error>>,
}

impl<'a> Writers<'a> {
    /// Open the files in `dir`.
    pub(super) fn create(dir: &Path, built: &'a Built) -> Result<Writers<'a>> {
        let create = |name: &str| -> Result<_> {
            let path = dir.join(name);
            Ok(RefCell::new(BufWriter::new(
                File::create(&path).with_context(|| format!("cannot write {}", path.display()))?,
            )))
        };
        Ok(Writers {
            dir: dir.to_path_buf(),
            built,
            limits: limits(built),
            requests: create(run_dir::REQUESTS)?,
            iterations: create(run_dir::ITERATIONS)?,
            traced: RefCell::default(),
            dropped: RefCell::default(),
            problem: RefCell::default(),
        })
    }

    /// Writes a line of one of the logs, until that fails for the first time.
    fn write_line(&self, name: &str, file: &RefCell<BufWriter<File>>, value: &impl Serialize) {
        let mut problem = self.problem.borrow_mut();
        if problem.is_none() {
            let mut file = file.borrow_mut();
            let written = serde_json::to_writer(&mut *file, value).map_err(io::Error::from);
            if let Err(error) = written.and_then(|()| file.write_all(b"\n")) {
                *problem =
                    Some(anyhow::Error::from(error).context(format!("cannot write {name} of the run directory")));
            }
        }
    }

    /// Writes every request record.
    pub(super) fn requests(&self) -> RequestWriter<'_> {
        Box::new(|record| {
            self.write_line(run_dir::REQUESTS, &self.requests, record);
            Ok(())
        })
    }

    /// Writes every iteration.
    pub(super) fn steps(&self) -> StepWriter<'_> {
        Box::new(|step, decisions| {
            let mut line = iteration_json::to_json(&iteration_record(step), &self.limits, decisions);
            if let Some(strobe) = line["strobe"].as_object_mut() {
                // Simulated work has no known operations, and says which server it is of.
                strobe.shift_remove("flops");
                strobe.shift_remove("bytes");
                strobe.insert("replica".into(), json!(step.server));
            }
            self.write_line(run_dir::ITERATIONS, &self.iterations, &line);
            if step.server == 0 {
                let mut traced = self.traced.borrow_mut();
                if traced.len() < MOST_TRACED {
                    traced.push(*step);
                } else {
                    *self.dropped.borrow_mut() += 1;
                }
            }
            Ok(())
        })
    }

    /// Write what is known at the end.
    pub(super) fn finish(
        &self,
        outcome: &Outcome,
        collector: &Collector<'_>,
        intervals: Option<&Intervals>,
    ) -> Result<()> {
        if let Some(problem) = self.problem.borrow_mut().take() {
            return Err(problem);
        }
        let flush = |file: &RefCell<BufWriter<File>>| -> io::Result<()> { file.borrow_mut().flush() };
        flush(&self.requests).and_then(|()| flush(&self.iterations)).context("cannot write the run directory")?;
        let file = |name: &str| self.dir.join(name);
        let run = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "command": std::env::args().skip(1).collect::<Vec<_>>().join(" "),
            "started_utc_ns": 0,
            "partial": outcome.partial,
            "simulated": super::heading(self.built),
            "arrival": self.built.workload,
            "ranks": 1,
        });
        run_dir::write_whole(&file(run_dir::RUN), format!("{run:#}\n").as_bytes())?;
        nsys::write(&self.trace(), &file(run_dir::TRACE))?;
        let report = self.report(outcome, intervals);
        let html = page::page(self.built, outcome, intervals, collector, &self.traced.borrow(), &report);
        run_dir::write_whole(&file(run_dir::REPORT_HTML), html.as_bytes())?;
        run_dir::write_whole(&file(run_dir::REPORT_JSON), format!("{report:#}\n").as_bytes())?;
        Ok(())
    }

    /// The benchmark's report with the simulation's answer in it; the answer alone where records were too many to keep.
    fn report(&self, outcome: &Outcome, intervals: Option<&Intervals>) -> serde_json::Value {
        let mut report = answer::report(self.built, outcome, intervals);
        if let (Some(metrics), Some(own)) = (&outcome.metrics, report.as_object_mut()) {
            let context = ReportContext {
                engine: EngineInfo {
                    model: "simulated".into(),
                    backend: "strobe simulate".into(),
                    ..EngineInfo::default()
                },
                world: WorldInfo {
                    tp_size: 1,
                    pp_size: 1,
                    ep_size: 1,
                    max_batch_size: self.limits.runtime.0,
                    max_num_tokens: Some(self.limits.runtime.1),
                    scheduling_policy: self.limits.policy.name().into(),
                    kv_cache_percentage: None,
                },
                ..ReportContext::default()
            };
            if let serde_json::Value::Object(anchor) = trtllm_report(metrics, &context) {
                own.extend(anchor);
            }
        }
        report
    }

    fn trace(&self) -> Trace {
        let mut trace = Trace {
            devices: vec![Device { name: "simulated server 0".into(), is_cpu: true, ..Device::default() }],
            processes: vec![Process { pid: 1, name: "strobe simulate".into(), ..Process::default() }],
            threads: vec![Thread { process: 0, tid: 1, name: "server 0".into() }],
            ..Trace::default()
        };
        for step in self.traced.borrow().iter() {
            let (context, decode) = (step.load.context_requests, step.load.decode_requests);
            let (start, end) = (step.start_ns as i64, step.end_ns as i64);
            let number = u32::try_from(step.iter).unwrap_or(strobe_trace::NONE);
            trace.iterations.push(Iteration {
                iter: step.iter,
                start,
                end,
                context_requests: context,
                generation_requests: decode,
                context_tokens: step.load.context_tokens.min(u64::from(u32::MAX)) as u32,
                generation_tokens: decode,
                window: 0,
                cpu_wait: None,
            });
            let name = trace.strings.intern(match (context, decode) {
                (0, _) => "simulated decode",
                (_, 0) => "simulated prefill",
                _ => "simulated mixed",
            });
            trace.ops.push(OpRow { iteration: number, ..OpRow::new(OpKind::CpuOp, name, start, end) });
            let range = format!("[Executor] _forward_step {}: {context} ctx reqs, {decode} gen reqs", step.iter);
            let range = trace.strings.intern(&range);
            let kind = RangeKind::ForwardStep;
            trace.ranges.push(RangeRow { kind, iteration: number, ..RangeRow::new(range, 0, start, end) });
        }
        let mut notices = vec!["simulated: durations come from a cost model, nothing was executed".to_string()];
        if self.built.scenario.speeds.len() > 1 {
            notices.push("only server 0 is in this trace".into());
        }
        if *self.dropped.borrow() > 0 {
            notices.push(format!("{} later iterations are not in this trace", self.dropped.borrow()));
        }
        let producer = format!("strobe {}", env!("CARGO_PKG_VERSION"));
        trace.meta = Meta { notices, producer, ..Meta::default() };
        trace.finish();
        trace
    }
}

fn limits(built: &Built) -> IterationLimits {
    let (batch, tokens, blocks, per_block, policy, reuse) = match &built.scenario.policy {
        Policy::Engine(config) => (
            config.scheduler.max_batch_size,
            config.scheduler.max_num_tokens,
            config.kv_blocks,
            config.tokens_per_block,
            config.scheduler.policy,
            config.reuse,
        ),
        Policy::Dynamic(config) => (config.max_batch, 0, 0, 0, strobe_engine::Policy::StaticBatch, false),
    };
    IterationLimits {
        built: (batch, tokens),
        runtime: (batch, tokens),
        kv_blocks: blocks,
        tokens_per_block: per_block,
        policy,
        reuse,
        overlap: false,
        utc_ns: 0,
    }
}

/// The engine's own record of an iteration, all of whose time is in the forward pass.
fn iteration_record(step: &StepRecord) -> IterationRecord {
    let (start, end) = (step.start_ns, step.end_ns);
    IterationRecord {
        iter: step.iter,
        times: StepTimes::forward_only(start, end),
        active: step.active,
        queued: step.queued,
        new_active: step.new_active,
        new_active_queue_ns: step.new_active_queue_ns,
        completed: step.completed,
        paused: step.paused,
        context_requests: step.load.context_requests,
        generation_requests: step.load.decode_requests,
        context_tokens: step.load.context_tokens.min(u64::from(u32::MAX)) as u32,
        recomputed_tokens: step.recomputed_tokens,
        new_tokens: step.new_tokens,
        kv_used: step.kv_used,
        kv_free: step.kv_total - step.kv_used.min(step.kv_total),
        pool: step.pool,
        keys: KeysRead {
            context_cached: step.load.context_kv,
            context_pairs: step.load.context_pairs,
            generation: step.load.decode_kv,
        },
        ..IterationRecord::default()
    }
}
