//! Times the import of a trace and prints what was read as JSON, for benchmarks.
//!
//!     cargo run --release -p strobe-trace --example read_trace -- FILE...

use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files: Vec<_> = std::env::args_os().skip(1).map(std::path::PathBuf::from).collect();
    let begun = Instant::now();
    let trace = strobe_trace::import::read_files(&files, &mut |_| {})?;
    let seconds = begun.elapsed().as_secs_f64();
    let bytes: u64 = trace.meta.sources.iter().map(|source| source.bytes).sum();
    let events: u64 = trace.meta.sources.iter().map(|source| source.events).sum();
    let (ops, calls, ranges) = (trace.ops.len(), trace.calls.len(), trace.ranges.len());
    println!(
        "{{\"seconds\": {seconds:.3}, \"bytes\": {bytes}, \"mb_per_s\": {:.0}, \"events\": {events}, \"ops\": {ops}, \
         \"calls\": {calls}, \"ranges\": {ranges}, \"strings\": {}}}",
        bytes as f64 / 1e6 / seconds,
        trace.strings.len()
    );
    for notice in &trace.meta.notices {
        eprintln!("{notice}");
    }
    Ok(())
}
