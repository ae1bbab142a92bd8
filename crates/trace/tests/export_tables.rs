//! CSV and Parquet: the same tables, every value as in the trace, nothing lost and nothing made up.

mod export_common;
mod parquet_reader;

use std::path::Path;

use export_common::{any_trace, cpu, gpu, real_data, scratch};
use parquet_reader::{Cell, Columns};
use proptest::prelude::*;
use strobe_trace::export::{Format, write};
use strobe_trace::{Counter, OpKind, Trace, import};

/// Parses CSV text. Quoted fields are text, empty ones without quotes are null.
fn parse_csv(text: &str) -> Vec<Vec<Cell>> {
    let (mut rows, mut row, mut chars) = (Vec::new(), Vec::new(), text.chars().peekable());
    while chars.peek().is_some() {
        let mut field = None;
        if chars.next_if_eq(&'"').is_some() {
            let mut quoted = String::new();
            loop {
                match chars.next().expect("a closing quote") {
                    '"' if chars.next_if_eq(&'"').is_some() => quoted.push('"'),
                    '"' => break,
                    other => quoted.push(other),
                }
            }
            field = Some(quoted);
        } else {
            while let Some(c) = chars.next_if(|&c| c != ',' && c != '\n') {
                field.get_or_insert_with(String::new).push(c);
            }
        }
        row.push(field);
        if chars.next() == Some('\n') {
            rows.push(std::mem::take(&mut row));
        }
    }
    rows
}

/// Writes all tables in both formats, checks that they are equal, and gives them by name.
fn export(trace: &Trace, name: &str) -> Vec<(String, Columns)> {
    let (csv, parquet) = (scratch(&format!("{name}-csv")), scratch(&format!("{name}-parquet")));
    let as_csv = write(trace, Format::Csv, &csv).unwrap();
    let as_parquet = write(trace, Format::Parquet, &parquet).unwrap();
    assert_eq!(as_csv.events, as_parquet.events);
    let samples: usize = trace.counters.iter().map(|c| c.times.len()).sum();
    let rows = trace.ops.len() + trace.calls.len() + trace.ranges.len() + trace.iterations.len();
    assert_eq!(as_csv.events as usize, rows + samples + trace.allocations.len());
    let mut tables = Vec::new();
    for (csv, parquet) in as_csv.files.iter().zip(&as_parquet.files) {
        assert_eq!(csv.file_stem(), parquet.file_stem());
        let columns = parquet_reader::read(&std::fs::read(parquet).unwrap());
        let rows = parse_csv(&std::fs::read_to_string(csv).unwrap());
        let head: Vec<String> = rows[0].iter().map(|cell| cell.clone().unwrap()).collect();
        assert_eq!(head, columns.names);
        for (column, values) in columns.values.iter().enumerate() {
            let same = rows[1..].iter().map(|row| &row[column]).eq(values);
            assert!(same, "{} of {}", columns.names[column], csv.display());
        }
        tables.push((csv.file_stem().unwrap().to_str().unwrap().to_owned(), columns));
    }
    tables
}

fn column<'a>(tables: &'a [(String, Columns)], table: &str, name: &str) -> &'a [Cell] {
    let columns = &tables.iter().find(|(found, _)| found == table).unwrap().1;
    &columns.values[columns.names.iter().position(|found| found == name).unwrap()]
}

fn texts(cells: &[Cell]) -> Vec<&str> {
    cells.iter().map(|cell| cell.as_deref().unwrap_or("(null)")).collect()
}

#[test]
fn names_are_resolved_and_what_is_unknown_is_null() {
    let tables = export(&gpu(), "gpu");
    let ops = |name| texts(column(&tables, "ops", name));
    assert_eq!(ops("name"), ["[CUDA memcpy Host-to-Device]", "void gemm<\"a\\b\">(float*)", "reduce"]);
    assert_eq!(ops("bytes"), ["4096", "(null)", "(null)"]);
    assert_eq!(ops("grid_x"), ["(null)", "4", "4"]);
    assert_eq!(ops("source_memory"), ["Pageable", "(null)", "(null)"]);
    assert_eq!(ops("graph_node"), ["(null)", "8589934592", "(null)"]);
    assert_eq!(ops("launch_name"), ["cudaMemcpyAsync_v3020", "cudaGraphLaunch_v10000", "cudaGraphLaunch_v10000"]);
    assert_eq!(ops("iteration"), ["(null)"; 3]);
    assert_eq!(texts(column(&tables, "calls", "start_ns")), ["-500", "3000", "9100"]);
    assert_eq!(texts(column(&tables, "ranges", "name")), ["step 1\n", "now", "aten::mm", "loading"]);
    assert_eq!(texts(column(&tables, "ranges", "mark")), ["false", "true", "false", "false"]);
    assert_eq!(texts(column(&tables, "counters", "value")), ["12.5", "(null)", "100"]);
    assert_eq!(texts(column(&tables, "allocations", "address")), [(u64::MAX - 1).to_string()]);
    assert_eq!(texts(column(&tables, "devices", "clock_hz")), ["(null)"]);
    let meta = texts(column(&tables, "meta", "value"));
    assert!(meta.contains(&"in.sqlite") && meta.contains(&"micro.gguf"), "{meta:?}");
    assert!(meta.iter().all(|value| !value.contains("secret")));

    let tables = export(&cpu(), "cpu");
    assert_eq!(texts(column(&tables, "ops", "flops")), ["(null)", "60000"]);
    assert_eq!(texts(column(&tables, "ops", "op")), ["norm", "qkv_proj"]);
    assert_eq!(texts(column(&tables, "iterations", "kind")), ["decode"]);
    assert_eq!(texts(column(&tables, "expert_loads", "expert")), ["5"]);
}

#[test]
fn many_rows_take_several_groups_and_pages() {
    let rows = (1 << 20) + 300_000;
    let counters = vec![
        Counter::default(),
        Counter {
            name: "a".to_owned(),
            device: None,
            times: (0..rows).collect(),
            values: (0..rows).map(|i| if i % 3 == 0 { f64::NAN } else { (i % 1000) as f64 }).collect(),
        },
        Counter { name: "b".to_owned(), device: None, times: vec![-1], values: vec![0.5] },
    ];
    let trace = Trace { counters, ..Trace::default() };
    let path = scratch("many");
    write(&trace, Format::Parquet, &path).unwrap();
    let columns = parquet_reader::read(&std::fs::read(path.join("counters.parquet")).unwrap());
    assert_eq!(columns.row_groups, 2);
    let number = |cell: &Cell| cell.as_ref().map(|text| text.parse::<f64>().unwrap());
    let expected = (0..rows).map(|i| (i % 3 != 0).then_some((i % 1000) as f64)).chain([Some(0.5)]);
    assert!(columns.values[3].iter().map(number).eq(expected));
    let expected = (0..rows).chain([-1]).map(|i| Some(i.to_string()));
    assert!(columns.values[2].iter().cloned().eq(expected));
    assert_eq!(columns.values[0].last(), Some(&Some("b".to_owned())));
}

#[test]
fn one_file_holds_the_ops() {
    for (format, name) in [(Format::Csv, "ops-only.csv"), (Format::Parquet, "ops-only.parquet")] {
        let path = scratch(name);
        assert_eq!(Format::from_path(&path).unwrap(), format);
        let written = write(&gpu(), format, &path).unwrap();
        assert_eq!((written.files.as_slice(), written.events), (std::slice::from_ref(&path), 3));
        assert!(path.is_file());
    }
    assert_eq!(Format::from_path(Path::new("x.parquetdir")).unwrap(), Format::Parquet);
    let error = Format::from_path(Path::new("somewhere")).unwrap_err().to_string();
    assert!(error.contains(".parquet") && error.contains("chrome"), "{error}");
}

#[test]
fn every_format_has_a_name_and_an_ending() {
    for format in Format::ALL {
        assert_eq!(Format::from_name(format.as_str()), Some(format));
    }
    let path = scratch("gpu.sqlite");
    let mut trace = gpu();
    trace.counters.clear(); // one of the samples is not a number, which SQLite does not know
    let written = write(&trace, Format::from_path(&path).unwrap(), &path).unwrap();
    assert_eq!((written.bytes, written.events), (std::fs::metadata(&path).unwrap().len(), 11));
    let back = import::read_files(&[path], &mut |_| {}).unwrap();
    assert_eq!(back.ops.start, trace.ops.start);
}

#[test]
fn a_directory_is_replaced_only_if_it_is_an_export() {
    let path = scratch("replaced");
    write(&gpu(), Format::Csv, &path).unwrap();
    let before = std::fs::read(path.join("ops.csv")).unwrap();
    write(&cpu(), Format::Csv, &path).unwrap();
    assert_ne!(std::fs::read(path.join("ops.csv")).unwrap(), before);
    std::fs::write(path.join("thesis.txt"), "years of work").unwrap();
    let error = write(&gpu(), Format::Csv, &path).unwrap_err().to_string();
    assert!(error.contains("thesis.txt"), "{error}");
    assert!(path.join("thesis.txt").exists());
    let file = scratch("a-file");
    std::fs::write(&file, "x").unwrap();
    assert!(write(&gpu(), Format::Parquet, &file).is_err());
    let litter = std::fs::read_dir(path.parent().unwrap()).unwrap();
    let litter: Vec<_> =
        litter.map(|e| e.unwrap().file_name()).filter(|n| n.to_str().unwrap().starts_with(".repl")).collect();
    assert!(litter.is_empty(), "{litter:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn every_value_comes_back(trace in any_trace()) {
        let tables = export(&trace, "any");
        let ops = |name| column(&tables, "ops", name);
        let ints = |values: &[i64]| values.iter().map(|v| Some(v.to_string())).collect::<Vec<_>>();
        prop_assert_eq!(ops("start_ns"), ints(&trace.ops.start));
        prop_assert_eq!(ops("end_ns"), ints(&trace.ops.end));
        let names: Vec<Cell> = trace.ops.name.iter().map(|&id| Some(trace.text(id).to_owned())).collect();
        prop_assert_eq!(ops("name"), names);
        prop_assert_eq!(column(&tables, "ranges", "end_ns"), ints(&trace.ranges.end));
        prop_assert_eq!(column(&tables, "calls", "correlation").iter().flatten().count(),
            trace.calls.correlation.iter().filter(|&&c| c != 0).count());
    }
}

#[test]
fn real_traces_keep_counts_and_sums() {
    let Some(data) = real_data() else { return };
    let files = [
        "nsys/h200/gpum.sqlite",
        "nsys/h200/node.sqlite",
        "kineto/h200/kineto_graph.json.gz",
        "nsys/nsys-ai/mfu_2gpu_before.sqlite",
    ];
    for file in files {
        let trace = import::read_files(&[data.join(file)], &mut |_| {}).unwrap();
        let tables = export(&trace, &file.replace('/', "-"));
        let (kinds, durations) = (column(&tables, "ops", "kind"), column(&tables, "ops", "duration_ns"));
        for (kind, name) in [(OpKind::Kernel, "kernel"), (OpKind::Memcpy, "memcpy"), (OpKind::Graph, "graph")] {
            let rows = || (0..trace.ops.len()).filter(|&i| trace.ops.kind[i] == kind);
            let expected: i64 = rows().map(|i| trace.ops.duration(i)).sum();
            let of_kind = kinds.iter().zip(durations).filter(|(found, _)| found.as_deref() == Some(name));
            let found: Vec<i64> = of_kind.map(|(_, ns)| ns.as_ref().unwrap().parse().unwrap()).collect();
            assert_eq!((found.len(), found.iter().sum::<i64>()), (rows().count(), expected), "{name} of {file}");
        }
        let unlaunched = column(&tables, "ops", "launch_start_ns").iter().filter(|cell| cell.is_none()).count();
        assert_eq!(unlaunched, trace.ops_without_launch());
    }
}
