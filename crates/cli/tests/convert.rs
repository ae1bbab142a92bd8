//! `strobe convert`: every format, and that nothing is lost on the way there and back.

mod common;

use std::fs;

use common::traces::{KINETO, MIXED_GRAPH, MIXED_NODE};
use common::{Sandbox, assert_names, int};
use serde_json::Value;

fn report(sandbox: &Sandbox, trace: &str, name: &str) -> String {
    sandbox.ok(&format!("analyze {trace} --report {name} --format csv")).stdout
}

#[test]
fn a_round_trip_keeps_every_number() {
    let sandbox = Sandbox::new();
    for trace in [MIXED_NODE, MIXED_GRAPH, KINETO] {
        let before = report(&sandbox, trace, "kern-sum");
        assert!(before.lines().count() > 5);
        for name in ["out.sqlite", "out.json", "out.json.gz"] {
            sandbox.ok(&format!("convert {trace} -o {name}"));
            assert_eq!(report(&sandbox, name, "kern-sum"), before, "{trace} as {name}");
        }
        for summary in ["api-sum", "mem-time-sum", "mem-size-sum", "gpu-sum", "nvtx-sum", "osrt-sum"] {
            let there = report(&sandbox, "out.sqlite", summary);
            assert_eq!(there, report(&sandbox, trace, summary), "{summary} of {trace} as SQLite");
        }
    }
}

#[test]
fn the_format_is_known_by_the_name_or_told() {
    let sandbox = Sandbox::new();
    let convert = |words: &str| -> Value {
        let done = sandbox.ok(&format!("convert {MIXED_NODE} --json {words}"));
        serde_json::from_str(&done.stdout).unwrap()
    };
    for (name, format) in [
        ("a.json", "chrome"),
        ("a.json.gz", "chrome"),
        ("a.perfetto-trace", "perfetto"),
        ("a.sqlite", "nsys"),
        ("a.csv", "csv"),
        ("a.parquet", "parquet"),
    ] {
        let written = convert(&format!("-o {name}"));
        assert_eq!(written["format"], format, "{name}");
        assert!(int(&written, "/events") > 100 && int(&written, "/bytes") > 1000, "{written}");
        assert!(sandbox.exists(name), "{name}");
        let told = convert(&format!("-o other-{format} --to {format}"));
        assert_eq!(told["format"], format);
        // One file of CSV or Parquet holds the device's ops, a folder all tables.
        assert!(int(&told, "/events") >= int(&written, "/events"), "{name}");
    }
    assert_eq!(fs::read(sandbox.path("a.json.gz")).unwrap()[..2], [0x1f, 0x8b]);
    assert!(fs::read(sandbox.path("a.sqlite")).unwrap().starts_with(b"SQLite format 3\0"));
    let parquet: Vec<_> = sandbox.names("other-parquet");
    assert!(parquet.len() > 3 && parquet.iter().all(|name| name.ends_with(".parquet")), "{parquet:?}");
    for name in &parquet {
        assert!(fs::read(sandbox.path("other-parquet").join(name)).unwrap().starts_with(b"PAR1"));
    }
    let text = sandbox.ok(&format!("convert {MIXED_NODE} -o b.json")).stdout;
    assert_names(&text, &["b.json: ", " events, ", "in one file as chrome"]);
}

#[test]
fn ranks_become_one_trace() {
    let sandbox = Sandbox::new();
    fs::copy(KINETO, sandbox.path("rank0.json.gz")).unwrap();
    fs::copy(KINETO, sandbox.path("rank1.json.gz")).unwrap();
    sandbox.ok("convert rank0.json.gz rank1.json.gz -o all.sqlite");
    let both = report(&sandbox, "rank0.json.gz rank1.json.gz", "kern-sum");
    assert_eq!(report(&sandbox, "all.sqlite", "kern-sum"), both);
}

#[test]
fn an_old_output_is_replaced_whole() {
    let sandbox = Sandbox::new();
    for name in ["x.json", "x.sqlite", "x.perfetto-trace"] {
        sandbox.ok(&format!("convert {MIXED_NODE} -o fresh-{name}"));
        sandbox.write(name, "old ".repeat(2_000_000));
        sandbox.ok(&format!("convert {MIXED_NODE} -o {name}"));
        let (fresh, found) = (fs::read(sandbox.path(&format!("fresh-{name}"))), fs::read(sandbox.path(name)));
        assert!(fresh.unwrap() == found.unwrap(), "{name}");
    }
    assert!(
        sandbox.names(".").iter().all(|name| name.ends_with("json") || name.contains("x.")),
        "{:?}",
        sandbox.names(".")
    );
}

#[test]
fn what_cannot_be_written_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.write("keep.json", "kept");
    assert_names(&sandbox.refused(&format!("convert {MIXED_NODE} -o a.tar")), &["a.tar", "perfetto", "nsys"]);
    assert_names(&sandbox.refused(&format!("convert {MIXED_NODE} -o a --to tar")), &["tar", "chrome", "parquet"]);
    for name in ["no/where.json", "no/where.sqlite", "no/where.perfetto-trace"] {
        assert_names(&sandbox.refused(&format!("convert {MIXED_NODE} -o {name}")), &[name]);
    }
    assert_names(&sandbox.refused("convert none.sqlite -o keep.json"), &["none.sqlite"]);
    assert_names(&sandbox.refused("convert keep.json -o other.json"), &["keep.json"]);
    sandbox.refused(&format!("convert {MIXED_NODE}"));
}
