//! CUDA libraries that compute nothing (`hollow_gpu/*.c`), compiled by the compiler that Rust links with.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compile `source` under `root/directory`, which goes on the loader's path, as a library with these names.
pub(crate) fn library(root: &Path, directory: &str, source: &str, names: [&str; 2], options: &[&str]) -> PathBuf {
    let directory = root.join(directory);
    std::fs::create_dir_all(&directory).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hollow_gpu").join(source);
    let file = directory.join(names[0]);
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O2", "-w", "-pthread", "-o"]).arg(&file).arg(source).args(options);
    assert!(cc.status().expect("Rust links with cc").success(), "{cc:?}");
    // One file, so that whoever opens it by either name gets the same copy.
    std::os::unix::fs::symlink(names[0], directory.join(names[1])).unwrap();
    directory
}
