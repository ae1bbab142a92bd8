//! Recorded arrivals: Azure's CSV, Mooncake's and LLMServingSim's JSONL, strobe's own `requests.jsonl`, any CSV.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use strobe_workload::Rng;

use crate::error::SimError;
use crate::lengths::LONGEST;
use crate::request::{Content, SimRequest};

/// A recording, ready to be replayed.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The requests in order of arrival; the first arrives at 0.
    pub requests: Vec<SimRequest>,
    /// The tick that stamps were rounded to, where they were spread over it.
    pub spread_over_ns: Option<u64>,
    /// What kind of file it was.
    pub format: &'static str,
}

/// How to replay.
#[derive(Clone, Copy, Debug)]
pub struct ReplayOptions {
    /// Requests per second are multiplied by this.
    pub rate_scale: f64,
    /// Whether stamps that were rounded to ticks are spread over them.
    pub jitter: bool,
    /// Seed of that.
    pub seed: u64,
}

struct Row {
    arrival_ns: f64,
    input: u32,
    output: u32,
    content: Content,
}

fn problem(path: &Path, line: usize, what: impl std::fmt::Display) -> SimError {
    let problem = format!("{} line {line}: {what}", path.display());
    SimError::Option { option: "--trace", problem }
}

/// Reads a recording; its kind is told from its content, and `.gz` is unpacked.
pub fn read(path: &Path, options: &ReplayOptions) -> Result<Recorded, SimError> {
    let whole = |what: String| SimError::Option { option: "--trace", problem: format!("{}: {what}", path.display()) };
    let bytes = std::fs::read(path).map_err(|e| whole(format!("cannot be read: {e}")))?;
    let mut text = String::new();
    if bytes.starts_with(&[0x1f, 0x8b]) {
        flate2::read::MultiGzDecoder::new(bytes.as_slice())
            .read_to_string(&mut text)
            .map_err(|e| whole(format!("cannot be unpacked: {e}")))?;
    } else {
        text = String::from_utf8(bytes).map_err(|_| whole("is not text; a trace is CSV or JSONL".into()))?;
    }
    let first = text.lines().find(|line| !line.trim().is_empty()).ok_or_else(|| whole("is empty".into()))?;
    let (rows, format) =
        if first.trim_start().starts_with('{') { json_rows(path, &text)? } else { csv_rows(path, &text)? };
    if rows.is_empty() {
        return Err(whole("holds no requests".into()));
    }
    finish(rows, format, options)
}

fn finish(mut rows: Vec<Row>, format: &'static str, options: &ReplayOptions) -> Result<Recorded, SimError> {
    let start = rows.first().map_or(0.0, |row| row.arrival_ns);
    rows.iter_mut().for_each(|row| row.arrival_ns -= start);
    let tick = if options.jitter { tick_ns(&rows) } else { None };
    if let Some(tick) = tick {
        let mut rng = Rng::new(options.seed, "jitter");
        rows.iter_mut().for_each(|row| row.arrival_ns += rng.uniform() * tick as f64);
        rows.sort_by(|a, b| a.arrival_ns.total_cmp(&b.arrival_ns));
    }
    let start = rows.first().map_or(0.0, |row| row.arrival_ns);
    let requests = rows.into_iter().enumerate().map(|(index, row)| SimRequest {
        id: index as u64,
        arrival_ns: ((row.arrival_ns - start) / options.rate_scale) as u64,
        input: row.input,
        output: row.output,
        content: row.content,
        priority: 1,
    });
    Ok(Recorded { requests: requests.collect(), spread_over_ns: tick, format })
}

/// The tick of stamps that were rounded: at least half of them repeat the one before, and every other gap is, to one per
/// cent of a tick, a multiple of the usual one.
fn tick_ns(rows: &[Row]) -> Option<u64> {
    let mut steps: Vec<f64> =
        rows.windows(2).map(|pair| pair[1].arrival_ns - pair[0].arrival_ns).filter(|gap| *gap > 0.0).collect();
    let repeats = rows.len().saturating_sub(1 + steps.len());
    if 2 * repeats < rows.len() {
        return None;
    }
    steps.sort_unstable_by(f64::total_cmp);
    let tick = *steps.get(steps.len() / 2)?;
    let off = |gap: f64| ((gap / tick).round().max(1.0) * tick - gap).abs();
    steps.iter().all(|gap| off(*gap) <= tick / 100.0).then_some(tick.round() as u64)
}

fn tokens(path: &Path, line: usize, name: &str, value: Option<f64>) -> Result<u32, SimError> {
    match value {
        Some(n) if n >= 1.0 && n <= f64::from(LONGEST) && n.fract() == 0.0 => Ok(n as u32),
        Some(n) if n > f64::from(LONGEST) => Err(problem(
            path,
            line,
            format!("{name} is {n}; expected at most {LONGEST}, because no model reads longer sequences"),
        )),
        Some(n) => Err(problem(path, line, format!("{name} is {n}; expected a whole number of at least 1"))),
        None => Err(problem(path, line, format!("{name} is missing or not a number"))),
    }
}

fn in_order(path: &Path, line: usize, rows: &[Row], arrival_ns: f64) -> Result<(), SimError> {
    if !arrival_ns.is_finite() || arrival_ns.abs() > 9e18 {
        return Err(problem(path, line, format!("the arrival time {arrival_ns} is out of range")));
    }
    match rows.last() {
        Some(last) if arrival_ns < last.arrival_ns => Err(problem(
            path,
            line,
            format!(
                "arrives {} s before the line above it; sort the trace by time",
                (last.arrival_ns - arrival_ns) / 1e9
            ),
        )),
        _ => Ok(()),
    }
}

fn json_rows(path: &Path, text: &str) -> Result<(Vec<Row>, &'static str), SimError> {
    let mut rows: Vec<Row> = Vec::new();
    let mut format = "";
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let number = index + 1;
        let value: Value =
            serde_json::from_str(line).map_err(|e| problem(path, number, format!("not a JSON object: {e}")))?;
        let get = |key: &str| value.get(key).and_then(Value::as_f64);
        let (kind, arrival_ns, input, output, block) = if value.get("token_times_ns").is_some() {
            let output = value.get("token_times_ns").and_then(Value::as_array).map(|times| times.len() as f64);
            (
                "strobe requests",
                get("arrival_ns"),
                ("num_input_tokens", get("num_input_tokens")),
                ("token_times_ns", output),
                0,
            )
        } else if value.get("arrival_time_ns").is_some() {
            (
                "LLMServingSim",
                get("arrival_time_ns"),
                ("input_toks", get("input_toks")),
                ("output_toks", get("output_toks")),
                16,
            )
        } else {
            let arrival = get("timestamp").map(|ms| ms * 1e6);
            ("Mooncake", arrival, ("input_length", get("input_length")), ("output_length", get("output_length")), 512)
        };
        if kind == "strobe requests" && output.1 == Some(0.0) {
            continue; // it failed or was refused in that run
        }
        let arrival_ns = arrival_ns.ok_or_else(|| {
            problem(path, number, "no arrival: expected `timestamp` (ms), `arrival_time_ns` or `arrival_ns`")
        })?;
        format = kind;
        let ids = value.get("hash_ids").and_then(Value::as_array);
        let content = match ids.map(|ids| ids.iter().filter_map(Value::as_u64).collect::<Arc<[u64]>>()) {
            Some(ids) if block > 0 && !ids.is_empty() => Content::Blocks { ids, size: block },
            _ => Content::Unique,
        };
        // A strobe record is written when a request ends, so its file is in that order.
        if kind != "strobe requests" {
            in_order(path, number, &rows, arrival_ns)?;
        }
        rows.push(Row {
            arrival_ns,
            input: tokens(path, number, input.0, input.1)?,
            output: tokens(path, number, output.0, output.1)?,
            content,
        });
    }
    if format == "strobe requests" {
        rows.sort_by(|a, b| a.arrival_ns.total_cmp(&b.arrival_ns));
    }
    Ok((rows, format))
}

fn csv_rows(path: &Path, text: &str) -> Result<(Vec<Row>, &'static str), SimError> {
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let (_, header) = lines.next().unwrap_or((0, ""));
    let names: Vec<String> = header.split(',').map(|name| name.trim().to_lowercase()).collect();
    let column = |wanted: &[&str]| names.iter().position(|name| wanted.contains(&name.as_str()));
    let arrival = [("timestamp", 0.0), ("arrival_s", 1e9), ("arrival_ms", 1e6), ("arrival_ns", 1.0), ("arrival", 1e9)];
    let arrival = arrival.iter().find_map(|(name, scale)| Some((column(&[name])?, *scale)));
    let input = column(&["contexttokens", "input_tokens", "input_length", "prompt_tokens", "input_toks"]);
    let output = column(&["generatedtokens", "output_tokens", "output_length", "output_toks"]);
    let (Some((arrival, scale)), Some(input), Some(output)) = (arrival, input, output) else {
        return Err(problem(
            path,
            1,
            "the header names no arrival and lengths; expected TIMESTAMP,ContextTokens,GeneratedTokens or arrival_s,input_tokens,output_tokens",
        ));
    };
    let azure = scale == 0.0;
    let mut rows: Vec<Row> = Vec::new();
    for (index, line) in lines {
        let number = index + 1;
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let field = |column: usize| fields.get(column).copied().unwrap_or("");
        let stamp = field(arrival);
        let arrival_ns = match stamp.parse::<f64>() {
            Ok(value) => Some(value * if azure { 1e9 } else { scale }),
            Err(_) if azure => date_ns(stamp),
            Err(_) => None,
        }
        .ok_or_else(|| problem(path, number, format!("`{stamp}` is not a time")))?;
        in_order(path, number, &rows, arrival_ns)?;
        rows.push(Row {
            arrival_ns,
            input: tokens(path, number, &names[input], field(input).parse().ok())?,
            output: tokens(path, number, &names[output], field(output).parse().ok())?,
            content: Content::Unique,
        });
    }
    Ok((rows, if azure { "Azure CSV" } else { "CSV" }))
}

/// Nanoseconds of `2023-11-16 18:15:46.6805900`, counted from the year 2000 so that a double holds them to 128 ns.
fn date_ns(text: &str) -> Option<f64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut parts = date.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let mut parts = time.trim_end_matches('Z').split(':');
    let (hour, minute) = (parts.next()?.parse::<f64>().ok()?, parts.next()?.parse::<f64>().ok()?);
    let second = parts.next()?.parse::<f64>().ok()?;
    if !(1970..3000).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Days since 2000 by counting years from March, so that the leap day comes last.
    let (shifted_year, shifted_month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * shifted_year + shifted_year / 4 - shifted_year / 100
        + shifted_year / 400
        + (153 * shifted_month + 2) / 5
        + day
        - 730_426;
    Some(days as f64 * 86_400e9 + (hour * 3600.0 + minute * 60.0 + second) * 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(jitter: bool) -> ReplayOptions {
        ReplayOptions { rate_scale: 2.0, jitter, seed: 1 }
    }

    fn read_text(name: &str, text: &str, jitter: bool) -> Result<Recorded, SimError> {
        let path = std::env::temp_dir().join(format!("strobe-replay-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let read = read(&path, &options(jitter));
        std::fs::remove_file(&path).unwrap();
        read
    }

    #[test]
    fn formats_are_told_apart_and_times_scaled() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,374,44\n2023-11-17 00:00:01.5000000,396,109\n";
        let found = read_text("azure", azure, true).unwrap();
        assert_eq!((found.format, found.requests[1].arrival_ns), ("Azure CSV", 1_000_000_000));
        assert_eq!((found.requests[1].input, found.requests[1].output), (396, 109));
        let mooncake = "{\"timestamp\":0,\"input_length\":600,\"output_length\":5,\"hash_ids\":[0,1]}\n".repeat(3)
            + "{\"timestamp\":3001,\"input_length\":600,\"output_length\":5,\"hash_ids\":[0,2]}\n";
        let raw = read_text("raw", &mooncake, false).unwrap();
        assert_eq!(raw.requests[2].arrival_ns, 0);
        let spread = read_text("spread", &mooncake, true).unwrap();
        assert_eq!((spread.format, spread.spread_over_ns), ("Mooncake", Some(3_001_000_000)));
        assert!(spread.requests[2].arrival_ns > 0 && spread.requests.is_sorted_by_key(|r| r.arrival_ns));
        let token = |r: &SimRequest, position| r.content.token(r.id, position);
        assert_eq!(token(&raw.requests[0], 511), token(&raw.requests[3], 511));
        assert_ne!(token(&raw.requests[0], 512), token(&raw.requests[3], 512));
        let csv = read_text("csv", "arrival_s,input_tokens,output_tokens\n0,1,2\n0.5,3,4\n", true).unwrap();
        assert_eq!(csv.requests[1].arrival_ns, 250_000_000);
    }

    #[test]
    fn bad_traces_are_named_with_their_line() {
        let cases = [
            ("order", "arrival_s,input_tokens,output_tokens\n5,1,1\n4,1,1\n", "line 3: arrives 1 s before"),
            ("zero", "arrival_s,input_tokens,output_tokens\n5,0,1\n", "line 2: input_tokens is 0"),
            ("header", "a,b\n1,2\n", "line 1: the header"),
            ("json", "{\"timestamp\":0,\n", "line 1: not a JSON object"),
            ("date", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: `yesterday`"),
            ("empty", "\n", "is empty"),
        ];
        for (name, text, expected) in cases {
            let error = read_text(name, text, true).unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
    }
}
