//! The tables of a trace file against those of real Nsight Systems exports.

#[allow(dead_code)] // shared with tests that use all of it
mod common;

use std::collections::BTreeMap;
use std::path::Path;

use rusqlite::{Connection, OpenFlags};
use strobe_trace::recorded::nsys_sqlite;

/// Column names and types of every table.
fn schema(path: &Path) -> BTreeMap<String, Vec<(String, String)>> {
    let database = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    let mut names = database.prepare("SELECT name FROM sqlite_master WHERE type = 'table'").unwrap();
    let names: Vec<String> = names.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    let columns = |name: &str| -> Vec<(String, String)> {
        let mut query = database.prepare(&format!("SELECT name, type FROM pragma_table_info('{name}')")).unwrap();
        query.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap().map(Result::unwrap).collect()
    };
    names.iter().map(|name| (name.clone(), columns(name))).collect()
}

#[test]
fn tables_have_the_columns_of_real_exports() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        eprintln!("skipped: STROBE_TEST_DATA is not set, so there are no real exports to compare with");
        return;
    };
    let path = common::scratch("schema.sqlite");
    nsys_sqlite::write(&common::small(), &path).unwrap();
    let ours = schema(&path);
    let mut compared = 0;
    for entry in std::fs::read_dir(Path::new(&data).join("traces/nsys/h200")).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|e| e == "sqlite") {
            let theirs = schema(&file);
            for (table, columns) in ours.iter().filter(|(table, _)| !table.starts_with("STROBE_")) {
                if let Some(real) = theirs.get(table) {
                    assert_eq!(columns, real, "{table} in {}", file.display());
                    compared += 1;
                }
            }
            assert!(theirs.contains_key("NVTX_EVENTS") && ours.contains_key("NVTX_EVENTS"));
        }
    }
    assert!(compared >= 6, "only {compared} tables were there to compare");
}
