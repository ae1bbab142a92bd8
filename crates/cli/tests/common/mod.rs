//! What the end-to-end tests share: a sandbox to run the real binary in, and readers of what it wrote.

#![allow(dead_code)] // every test file uses its own part of this

pub(crate) mod hollow;
pub(crate) mod trace;
pub(crate) mod traces;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

/// Tiny models with what `transformers` computes for them.
pub(crate) const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/fixtures");

/// Variables by which a developer's shell could change what a test sees.
const VARIABLES: [&str; 13] = [
    "ENABLE_PERFECT_ROUTER",
    "STROBE_CPU",
    "STROBE_PROFILE_START_STOP",
    "TLLM_PROFILE_START_STOP",
    "TLLM_GPTM_PROFILE_START_STOP",
    "TLLM_GPTS_PROFILE_START_STOP",
    "TLLM_TORCH_PROFILE_TRACE",
    "TLLM_PROFILE_RECORD_GC",
    "STROBE_NVTX_DEBUG",
    "TLLM_NVTX_DEBUG",
    "TLLM_LLMAPI_ENABLE_NVTX",
    "COLUMNS",
    "RUST_BACKTRACE",
];

/// What a call of the binary left: exit code and output.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A directory of one test's own, removed at its end. Commands run inside it, so that names in them are short.
pub(crate) struct Sandbox {
    root: PathBuf,
}

impl Sandbox {
    pub(crate) fn new() -> Sandbox {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{number}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Sandbox { root }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    pub(crate) fn exists(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    pub(crate) fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        fs::write(self.path(name), text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub(crate) fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// One value per line; every line must be valid JSON.
    pub(crate) fn json_lines(&self, name: &str) -> Vec<Value> {
        let text = self.read(name);
        text.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{name}: {e}: {l}"))).collect()
    }

    /// A copy of a fixture's files that a test may damage.
    pub(crate) fn copy_model(&self, fixture: &str, name: &str) {
        fs::create_dir(self.path(name)).unwrap();
        for entry in fs::read_dir(Path::new(FIXTURES).join(fixture)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), self.path(name).join(entry.file_name())).unwrap();
        }
    }

    /// Replace a text in a file; it must be there.
    pub(crate) fn edit(&self, name: &str, from: &str, to: &str) {
        let text = self.read(name);
        assert!(text.contains(from), "{name} has no `{from}`");
        self.write(name, text.replacen(from, to, 1));
    }

    /// A dataset of prompts and output lengths, in tokens, with ids that `micro` has.
    pub(crate) fn dataset(&self, name: &str, lengths: &[(usize, usize)]) {
        let line = |(task, &(input, output)): (usize, &(usize, usize))| {
            let ids: Vec<_> = (0..input).map(|i| (3 + (task * 131 + i * 17) % 500).to_string()).collect();
            format!("{{\"task_id\":{task},\"input_ids\":[{}],\"output_tokens\":{output}}}\n", ids.join(","))
        };
        self.write(name, lengths.iter().enumerate().map(line).collect::<String>());
    }

    /// The binary with `words` as arguments. Measured peaks are kept for all tests: measuring takes a second.
    pub(crate) fn command(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_strobe"));
        command.current_dir(&self.root).stdin(Stdio::null()).args(words.split_whitespace());
        command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
        VARIABLES.iter().for_each(|name| {
            command.env_remove(name);
        });
        command
    }

    /// `words` with files of at most so many blocks of 512 or 1024 bytes, as if the disk were full then. Output to a pipe has no
    /// limit.
    pub(crate) fn with_small_files(&self, blocks: u32, words: &str) -> Command {
        let plain = self.command(words);
        let mut command = Command::new("sh");
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
        command.args(["-c", &script]).arg(plain.get_program()).args(plain.get_args()).stdin(Stdio::null());
        command.current_dir(&self.root);
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    pub(crate) fn run(&self, words: &str) -> Done {
        finish(&mut self.command(words))
    }

    /// Run what must work.
    pub(crate) fn ok(&self, words: &str) -> Done {
        self.ok_with(&[], words)
    }

    /// Run what must work, with variables set.
    pub(crate) fn ok_with(&self, variables: &[(&str, &str)], words: &str) -> Done {
        let done = finish(self.command(words).envs(variables.iter().copied()));
        assert_eq!(done.code, Some(0), "strobe {words}\n{}\n{}", done.stdout, done.stderr);
        done
    }

    /// Run what must be refused: exit code 2, one line that starts with `error: `, nothing on standard output, and
    /// not a byte of the sandbox changed. Gives that line.
    pub(crate) fn refused(&self, words: &str) -> String {
        self.refused_command(&mut self.command(words))
    }

    /// The same, with variables set.
    pub(crate) fn refused_with(&self, variables: &[(&str, &str)], words: &str) -> String {
        self.refused_command(self.command(words).envs(variables.iter().copied()))
    }

    /// The same for a command that words can't express.
    pub(crate) fn refused_command(&self, command: &mut Command) -> String {
        let before = self.contents();
        let done = finish(command);
        assert_eq!(done.code, Some(2), "{command:?}\n{}\n{}", done.stdout, done.stderr);
        assert_eq!(done.stdout, "", "{command:?}");
        let lines: Vec<_> = done.stderr.lines().collect();
        let [line] = lines[..] else { panic!("{command:?}: expected one line, found {lines:#?}") };
        assert!(line.starts_with("error: "), "{line}");
        let after = self.contents();
        let names = |files: &BTreeMap<PathBuf, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&before), names(&after), "{command:?} left something behind");
        assert!(before == after, "{command:?} changed a file");
        line.to_string()
    }

    /// Everything in the sandbox: directories with no bytes, files with theirs.
    fn contents(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    found.insert(path.clone(), Vec::new());
                    folders.push(path);
                } else {
                    found.insert(path.clone(), fs::read(&path).unwrap());
                }
            }
        }
        found
    }

    /// Names in a directory of the sandbox, sorted.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root); // a leftover is swept with the target directory
    }
}

/// Run to the end.
pub(crate) fn finish(command: &mut Command) -> Done {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    Done { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
}

/// Assert that a message names everything it must.
#[track_caller]
pub(crate) fn assert_names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not named in: {message}");
    }
}

/// A whole number at a JSON pointer.
#[track_caller]
pub(crate) fn int(value: &Value, pointer: &str) -> u64 {
    let found = value.pointer(pointer);
    found.and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer}: expected a whole number, found {found:?}"))
}

/// A number at a JSON pointer.
#[track_caller]
pub(crate) fn num(value: &Value, pointer: &str) -> f64 {
    let found = value.pointer(pointer);
    found.and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer}: expected a number, found {found:?}"))
}

/// A list of whole numbers at a JSON pointer.
#[track_caller]
pub(crate) fn ints(value: &Value, pointer: &str) -> Vec<u64> {
    let list = value.pointer(pointer).and_then(Value::as_array).unwrap_or_else(|| panic!("{pointer}: expected a list"));
    list.iter().map(|v| v.as_u64().unwrap()).collect()
}

/// Assert that two numbers agree to rounding.
#[track_caller]
pub(crate) fn assert_close(found: f64, expected: f64, what: &str) {
    let scale = expected.abs().max(1e-12);
    assert!((found - expected).abs() / scale < 1e-9, "{what}: {found} is not {expected}");
}

/// The output tokens of every request of a run, in the order they were sent.
pub(crate) fn outputs(requests: &[Value]) -> Vec<Vec<u64>> {
    requests.iter().map(|r| ints(r, "/output_ids")).collect()
}
