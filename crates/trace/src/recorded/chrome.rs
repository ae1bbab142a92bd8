//! Chrome's trace event JSON, which Perfetto and `chrome://tracing` open.
//!
//! One track per thread holds its ranges and ops, nested; one track holds the iterations; a counter shows the
//! tokens of each iteration. What is not known (a layer, a byte count) is left out of an event's arguments.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::nesting::{Event, place};
use super::{Op, Range, Trace};
use crate::atomic::write_whole;
use crate::{Iteration, TraceError};

/// Writes the trace as one JSON object. Give it a buffered writer.
pub fn write(trace: &Trace, out: &mut dyn Write) -> Result<(), TraceError> {
    trace.validate()?;
    let mut events = Events { out, pid: trace.process.pid, first: true };
    events.out.write_all(b"{\"traceEvents\":[")?;
    let tracks = Tracks::new(trace);
    tracks.describe(trace, &mut events)?;
    for placed in &tracks.placed {
        let tid = tracks.tid(placed.thread, placed.lane);
        let (name, category, args) = match placed.event {
            Event::Range(i) => {
                let range = &trace.ranges[i];
                (range.name, range.kind.as_str(), range_args(range))
            }
            Event::Op(i) => {
                let op = &trace.ops[i];
                (op.name, trace.strings.get(op.category), op_args(trace, op))
            }
        };
        let name = trace.strings.get(name);
        events.slice(name, category, tid, placed.start, placed.end, args)?;
    }
    iterations(trace, tracks.iterations, &mut events)?;

    let meta = &trace.meta;
    let about = json!({
        "producer": meta.producer,
        "partial": meta.partial,
        "windows": meta.windows.iter().map(|w| json!({
            "first": w.first, "last": w.last,
            "state": match (w.complete, trace.iterations.iter().any(|i| i.window == w.index)) {
                (true, _) => "complete",
                (false, true) => "incomplete",
                (false, false) => "never reached",
            },
        })).collect::<Vec<_>>(),
        "sessionStartUtcNs": meta.session_start_utc_ns.to_string(),
        "extra": meta.extra,
    });
    write!(events.out, "\n],\"displayTimeUnit\":\"ns\",\"otherData\":{about}}}\n")?;
    Ok(())
}

/// Writes the trace to `path`, replacing what is there. The file appears whole or not at all.
pub fn write_file(trace: &Trace, path: &Path) -> Result<(), TraceError> {
    write_whole(path, |temporary| {
        let io = |action| move |source| TraceError::Io { action, path: path.to_owned(), source };
        let mut out = BufWriter::new(File::create(temporary).map_err(io("create"))?);
        write(trace, &mut out)?;
        let file = out.into_inner().map_err(|e| io("write")(e.into_error()))?;
        file.sync_all().map_err(io("write"))
    })
}

/// Which track every event is drawn on.
struct Tracks {
    placed: Vec<super::nesting::Placed>,
    /// Track numbers of lanes above 0, which no thread has.
    overlaps: HashMap<(u32, u32), u32>,
    /// The track of the iterations.
    iterations: u32,
}

impl Tracks {
    fn new(trace: &Trace) -> Self {
        let placed = place(trace);
        let used = placed.iter().map(|p| p.thread);
        let named = trace.threads.iter().map(|t| t.tid);
        let mut next = used.chain(named).max().unwrap_or(0) + 1;
        let iterations = next;
        let mut overlaps = HashMap::new();
        for p in placed.iter().filter(|p| p.lane > 0) {
            overlaps.entry((p.thread, p.lane)).or_insert_with(|| {
                next += 1;
                next
            });
        }
        Self { placed, overlaps, iterations }
    }

    fn tid(&self, thread: u32, lane: u32) -> u32 {
        self.overlaps.get(&(thread, lane)).copied().unwrap_or(thread)
    }

    /// Names and order of process and tracks: iterations first, then the threads as the trace lists them,
    /// each followed by its overlap lanes.
    fn describe(&self, trace: &Trace, events: &mut Events) -> Result<(), TraceError> {
        events.metadata("process_name", 0, json!({"name": trace.process.name}))?;
        if !trace.iterations.is_empty() {
            events.track(self.iterations, "iterations", 0)?;
        }
        let mut order = 1;
        for thread in &trace.threads {
            events.track(thread.tid, &thread.name, order)?;
            order += 1;
            let mut lanes: Vec<_> = self.overlaps.iter().collect();
            lanes.retain(|((owner, _), _)| *owner == thread.tid);
            lanes.sort();
            for ((_, lane), &tid) in lanes {
                let name = format!("{} (overlap {lane})", thread.name);
                events.track(tid, &name, order)?;
                order += 1;
            }
        }
        Ok(())
    }
}

fn range_args(range: &Range) -> Map<String, Value> {
    let mut args = Map::new();
    if let Some(iteration) = range.iteration {
        args.insert("iter".to_owned(), iteration.into());
    }
    args
}

fn op_args(trace: &Trace, op: &Op) -> Map<String, Value> {
    let mut args = Map::new();
    args.insert("iter".to_owned(), op.iteration.into());
    if let Some(layer) = op.layer {
        args.insert("layer".to_owned(), layer.into());
    }
    args.insert("kernel".to_owned(), trace.strings.get(op.kernel).into());
    for (name, size) in ["m", "n", "k"].into_iter().zip(op.shape) {
        if size > 0 {
            args.insert(name.to_owned(), size.into());
        }
    }
    let duration = op.duration();
    for (amount, name, rate) in [(op.bytes, "bytes", "GB/s"), (op.flops, "flops", "GFLOP/s")] {
        if amount > 0 {
            args.insert(name.to_owned(), amount.into());
            if duration > 0 {
                // Per nanosecond is giga per second.
                let per_ns = amount as f64 / duration as f64;
                args.insert(rate.to_owned(), ((per_ns * 1e3).round() / 1e3).into());
            }
        }
    }
    args
}

fn iterations(trace: &Trace, track: u32, events: &mut Events) -> Result<(), TraceError> {
    let mut sorted: Vec<&Iteration> = trace.iterations.iter().collect();
    sorted.sort_by_key(|i| i.start);
    for (n, it) in sorted.iter().enumerate() {
        let args = [
            ("iter", it.iter),
            ("context_requests", it.context_requests.into()),
            ("generation_requests", it.generation_requests.into()),
            ("context_tokens", it.context_tokens.into()),
            ("generation_tokens", it.generation_tokens.into()),
            ("window", it.window.into()),
        ];
        let args = args.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        let name = format!("iteration {} ({})", it.iter, it.kind());
        events.slice(&name, it.kind().as_str(), track, it.start, it.end, args)?;
        events.tokens(it.start, it.context_tokens, it.generation_tokens)?;
        // Between two windows nothing was recorded: the counter must not seem to go on.
        if sorted.get(n + 1).is_none_or(|next| next.window != it.window) {
            events.tokens(it.end, 0, 0)?;
        }
    }
    Ok(())
}

/// Writes events one by one, so that a large trace needs no second copy in memory.
struct Events<'a> {
    out: &'a mut dyn Write,
    pid: u32,
    first: bool,
}

impl Events<'_> {
    fn next(&mut self) -> Result<(), TraceError> {
        let separator: &[u8] = if self.first { b"\n" } else { b",\n" };
        self.first = false;
        Ok(self.out.write_all(separator)?)
    }

    fn slice(
        &mut self,
        name: &str,
        category: &str,
        tid: u32,
        start: i64,
        end: i64,
        args: Map<String, Value>,
    ) -> Result<(), TraceError> {
        self.next()?;
        let duration = end.saturating_sub(start);
        write!(
            self.out,
            "{{\"ph\":\"X\",\"pid\":{},\"tid\":{tid},\"ts\":{},\"dur\":{},\"cat\":{},\"name\":{},\"args\":{}}}",
            self.pid,
            Microseconds(start),
            Microseconds(duration),
            Value::from(category),
            Value::from(name),
            Value::from(args),
        )?;
        Ok(())
    }

    fn tokens(&mut self, at: i64, context: u32, generation: u32) -> Result<(), TraceError> {
        self.next()?;
        write!(
            self.out,
            "{{\"ph\":\"C\",\"pid\":{},\"ts\":{},\"name\":\"tokens per iteration\",\"args\":{{\"context\":{context},\"generation\":{generation}}}}}",
            self.pid,
            Microseconds(at),
        )?;
        Ok(())
    }

    fn track(&mut self, tid: u32, name: &str, order: u32) -> Result<(), TraceError> {
        self.metadata("thread_name", tid, json!({"name": name}))?;
        self.metadata("thread_sort_index", tid, json!({"sort_index": order}))
    }

    fn metadata(&mut self, what: &str, tid: u32, args: Value) -> Result<(), TraceError> {
        self.next()?;
        write!(self.out, "{{\"ph\":\"M\",\"pid\":{},\"tid\":{tid},\"name\":\"{what}\",\"args\":{args}}}", self.pid)?;
        Ok(())
    }
}

/// Nanoseconds printed as microseconds with all three decimals: a float would lose digits.
struct Microseconds(i64);

impl std::fmt::Display for Microseconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let ns = self.0.unsigned_abs();
        write!(f, "{sign}{}.{:03}", ns / 1000, ns % 1000)
    }
}
