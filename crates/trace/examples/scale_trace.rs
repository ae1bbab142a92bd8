//! Makes a large trace out of a real one, for benchmarks: the same events again and again, one copy behind the other.
//!
//!     cargo run --release -p strobe-trace --example scale_trace -- IN OUT SIZE_MB
//!
//! IN is a PyTorch profiler trace (`.json` or `.json.gz`). OUT is plain JSON of at least SIZE_MB * 1,000,000 bytes:
//! every copy has later times and other correlation, external and flow ids, so that nothing joins across copies.
//!
//! IN may also be an SQLite export of Nsight Systems: OUT is then one, with the same tables and longer.

use std::error::Error;
use std::io::{BufWriter, Read, Write};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [input, output, megabytes] = &arguments[..] else { return Err("usage: scale_trace IN OUT SIZE_MB".into()) };
    let wanted: u64 = megabytes.parse::<u64>()? * 1_000_000;
    let mut text = std::fs::read(input)?;
    if text.starts_with(b"SQLite format 3\0") {
        let copies = scale_sqlite(input, output, wanted)?;
        println!("{copies} copies of every event");
        return Ok(());
    }
    if text.starts_with(&[0x1f, 0x8b]) {
        let packed = std::mem::take(&mut text);
        flate2::read::MultiGzDecoder::new(&packed[..]).read_to_end(&mut text)?;
    }
    let trace = Template::parse(&text)?;
    let mut out = BufWriter::with_capacity(1 << 20, std::fs::File::create(output)?);
    let copies = trace.write(&mut out, wanted)?;
    out.flush()?;
    println!("{copies} copies of {} events", trace.events.len());
    Ok(())
}

/// Repeats the events of an export. Tables grow side by side, as they do when the profiler writes them.
fn scale_sqlite(input: &str, output: &str, wanted: u64) -> Result<i64, Box<dyn Error>> {
    const TABLES: [&str; 11] = [
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "CUPTI_ACTIVITY_KIND_MEMSET",
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        "CUPTI_ACTIVITY_KIND_OVERHEAD",
        "PROFILER_OVERHEAD",
        "OSRT_API",
        "NVTX_EVENTS",
        "GPU_METRICS",
    ];
    let source = rusqlite::Connection::open(input)?;
    // A new file, because the source may be read-only.
    let _ = std::fs::remove_file(output);
    source.execute("VACUUM INTO ?1", [output])?;
    let mut database = rusqlite::Connection::open(output)?;
    database.execute_batch("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -200000;")?;
    let (mut first, mut last, mut ids) = (i64::MAX, i64::MIN, 0);
    let mut tables = Vec::new();
    for table in TABLES {
        let mut statement = database.prepare("SELECT name FROM pragma_table_info(?1)")?;
        let columns: Vec<String> = statement.query_map([table], |row| row.get(0))?.collect::<Result<_, _>>()?;
        let has = |name: &str| columns.iter().any(|column| column == name);
        let Some(begin) = ["start", "timestamp"].into_iter().find(|name| has(name)) else { continue };
        let end = if has("end") { "end" } else { begin };
        let id = if has("correlationId") { "correlationId" } else { "0" };
        let query =
            format!("SELECT min({begin}), max(max({begin}, ifnull({end}, {begin}))), max({id}), count(*) FROM {table}");
        type Facts = (Option<i64>, Option<i64>, Option<i64>, i64);
        let (low, high, id, rows): Facts =
            database.query_row(&query, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?;
        first = first.min(low.unwrap_or(first));
        last = last.max(high.unwrap_or(last));
        ids = ids.max(id.unwrap_or(0) + 1);
        tables.push((table, columns, rows));
    }
    let period = last - first + 1_000_000; // a millisecond between copies
    let transaction = database.transaction()?;
    let mut copy = 1;
    let page_bytes: i64 = transaction.query_row("PRAGMA page_size", [], |row| row.get(0))?;
    loop {
        let pages: i64 = transaction.query_row("PRAGMA page_count", [], |row| row.get(0))?;
        if (pages * page_bytes) as u64 >= wanted {
            break;
        }
        for (table, columns, rows) in &tables {
            let shifted = columns.iter().map(|column| match column.as_str() {
                "start" | "end" | "timestamp" | "rawTimestamp" => format!("{column} + {}", copy * period),
                "correlationId" => format!("CASE {column} WHEN 0 THEN 0 ELSE {column} + {} END", copy * ids),
                _ => column.clone(),
            });
            let shifted: Vec<String> = shifted.collect();
            let insert =
                format!("INSERT INTO {table} SELECT {} FROM {table} WHERE rowid <= {rows}", shifted.join(", "));
            transaction.execute(&insert, [])?;
        }
        copy += 1;
    }
    transaction.commit()?;
    Ok(copy)
}

/// A trace cut at the numbers that differ between copies.
struct Template<'t> {
    head: &'t [u8],
    events: Vec<Vec<Piece<'t>>>,
    tail: &'t [u8],
    /// How far one copy lies behind the one before, in ns.
    period: i128,
    /// One more than the largest id.
    ids: i128,
    /// How many numbered profiler steps there are.
    steps: i128,
}

enum Piece<'t> {
    Text(&'t [u8]),
    /// Nanoseconds; `true`: written with a fraction.
    Time(i128, bool),
    Id(i128),
    Step(i128),
    /// The event describes a process or thread: once is enough.
    Once,
}

impl<'t> Template<'t> {
    fn parse(text: &'t [u8]) -> Result<Self, Box<dyn Error>> {
        let key = b"\"traceEvents\"";
        let found = text.windows(key.len()).position(|window| window == key).ok_or("no traceEvents in the input")?;
        let open = found + text[found..].iter().position(|&b| b == b'[').ok_or("traceEvents is not an array")?;
        let mut at = open + 1;
        let mut events = Vec::new();
        loop {
            match text.get(at) {
                Some(b'{') => {
                    let end = end_of_object(text, at).ok_or("the input is cut short")?;
                    events.push(pieces(&text[at..end]));
                    at = end;
                }
                Some(b']') => break,
                Some(_) => at += 1,
                None => return Err("the input is cut short".into()),
            }
        }
        let all = || events.iter().flatten();
        let times = || all().filter_map(|piece| if let Piece::Time(ns, _) = piece { Some(*ns) } else { None });
        let (first, last) = (times().min().ok_or("no event has a time")?, times().max().unwrap_or(0));
        let ids = all().filter_map(|piece| if let Piece::Id(id) = piece { Some(*id) } else { None });
        let steps = all().filter(|piece| matches!(piece, Piece::Step(_))).count() as i128;
        let period = ((last - first) / 1_000 + 1_000) * 1_000; // a millisecond between copies, in whole us
        let ids = ids.max().unwrap_or(0) + 1;
        Ok(Self { head: &text[..=open], tail: &text[at..], period, ids, steps, events })
    }

    fn write(&self, out: &mut impl Write, wanted: u64) -> std::io::Result<u64> {
        let mut written = (self.head.len() + self.tail.len()) as u64;
        out.write_all(self.head)?;
        let mut copy = 0;
        let mut line = Vec::new();
        while copy == 0 || written < wanted {
            for event in &self.events {
                if copy > 0 && event.iter().any(|piece| matches!(piece, Piece::Once)) {
                    continue;
                }
                line.clear();
                line.extend_from_slice(if written > (self.head.len() + self.tail.len()) as u64 {
                    b",\n"
                } else {
                    b"\n"
                });
                for piece in event {
                    match piece {
                        Piece::Text(text) => line.extend_from_slice(text),
                        Piece::Time(ns, fraction) => {
                            let ns = ns + i128::from(copy) * self.period;
                            write!(line, "{}", ns / 1000)?;
                            if *fraction {
                                write!(line, ".{:03}", ns % 1000)?;
                            }
                        }
                        Piece::Id(id) => write!(line, "{}", id + i128::from(copy) * self.ids)?,
                        Piece::Step(step) => write!(line, "{}", step + i128::from(copy) * self.steps)?,
                        Piece::Once => {}
                    }
                }
                out.write_all(&line)?;
                written += line.len() as u64;
            }
            copy += 1;
        }
        out.write_all(self.tail)?;
        Ok(copy)
    }
}

/// Where the object that starts at `at` ends.
fn end_of_object(text: &[u8], at: usize) -> Option<usize> {
    let (mut depth, mut in_string, mut escaped) = (0, false, false);
    for (index, &byte) in text.iter().enumerate().skip(at) {
        if in_string {
            in_string = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(index + 1);
        }
    }
    None
}

/// Cuts an event at its times and ids.
fn pieces(event: &[u8]) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let (mut kept, mut at) = (0, 0);
    while at < event.len() {
        let Some(quote) = event[at..].iter().position(|&b| b == b'"').map(|distance| at + distance) else { break };
        let Some(close) = end_of_string(event, quote) else { break };
        let string = &event[quote + 1..close];
        at = close + 1;
        let step = string.strip_prefix(b"ProfilerStep#").and_then(number);
        if let Some((step, digits)) = step {
            let start = quote + 1 + b"ProfilerStep#".len();
            pieces.extend([Piece::Text(&event[kept..start]), Piece::Step(step)]);
            kept = start + digits;
            continue;
        }
        let colon = event[at..].iter().take_while(|&&b| b <= b' ' || b == b':').count();
        if !event[at..at + colon].contains(&b':') {
            continue;
        }
        let value = &event[at + colon..];
        match string {
            b"ph" if value.starts_with(b"\"M\"") => pieces.push(Piece::Once),
            b"ts" | b"correlation" | b"External id" | b"external id" | b"id" => {
                let Some((whole, mut length)) = number(value) else { continue };
                let piece = if string == b"ts" {
                    let fraction = value[length..].strip_prefix(b".").unwrap_or(b"");
                    let digits = fraction.iter().take_while(|b| b.is_ascii_digit()).count();
                    let nanos = (0..3).fold(0, |sum, place| {
                        sum * 10 + i128::from(fraction[..digits].get(place).map_or(0, |digit| digit - b'0'))
                    });
                    length += if digits > 0 { digits + 1 } else { 0 };
                    Piece::Time(whole * 1000 + nanos, digits > 0)
                } else {
                    Piece::Id(whole)
                };
                pieces.extend([Piece::Text(&event[kept..at + colon]), piece]);
                kept = at + colon + length;
                at = kept;
            }
            _ => {}
        }
    }
    pieces.push(Piece::Text(&event[kept..]));
    pieces
}

fn end_of_string(text: &[u8], quote: usize) -> Option<usize> {
    let mut at = quote + 1;
    loop {
        match text.get(at)? {
            b'"' => return Some(at),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// The whole number at the start of `text` and how many digits it has.
fn number(text: &[u8]) -> Option<(i128, usize)> {
    let digits = text.iter().take_while(|b| b.is_ascii_digit()).count();
    let number = std::str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    Some((number, digits))
}
