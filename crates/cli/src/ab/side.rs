//! One side of an interleaved comparison: how to build it, and how to run it once.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use clap::{Args as _, Command as ClapCommand};

use crate::build_args::BuildArgs;
use crate::shell;

/// How one side runs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Side {
    /// strobe, perhaps another binary than this one.
    Strobe(Strobe),
    /// Any command; `{out}` stands for where its result goes.
    Command(String),
}

/// A run of `strobe bench`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Strobe {
    /// The binary.
    pub binary: PathBuf,
    /// What to build before the first run, if anything.
    pub model: Option<String>,
    /// The engine to run, where it is there already.
    pub engine_dir: Option<PathBuf>,
    /// Options that decide how an engine is built.
    pub build: Vec<String>,
    /// Options of every run.
    pub bench: Vec<String>,
}

/// Options that both verbs have: a build must know them, and a run must not exceed them.
const OF_BOTH: [&str; 3] = ["max-batch-size", "max-num-tokens", "device"];

/// Options that `ab` itself gives to every run.
const ITS_OWN: [&str; 8] =
    ["output-dir", "overwrite", "profile", "json", "repeat", "report-json", "request-json", "iteration-log"];

/// The names of the options that decide how an engine is built, and whether each takes a value.
fn build_options() -> Vec<(String, bool)> {
    let command = BuildArgs::augment_args(ClapCommand::new("build"));
    let names = |arg: &clap::Arg| {
        let takes = arg.get_action().takes_values();
        let aliases = arg.get_all_aliases().unwrap_or_default().into_iter().map(str::to_owned);
        arg.get_long().map(str::to_owned).into_iter().chain(aliases).map(|name| (name, takes)).collect::<Vec<_>>()
    };
    command.get_arguments().flat_map(names).collect()
}

impl Strobe {
    /// Sorts the words of a side into options of the build and of the run. `option` is what they were given to, for errors.
    pub(crate) fn of(option: &str, words: Vec<String>, binary: PathBuf, common: &Strobe) -> Result<Strobe> {
        let of_build = build_options();
        let mut side = Strobe { binary, ..common.clone() };
        let mut words = words.into_iter().peekable();
        while let Some(word) = words.next() {
            let Some(long) = word.strip_prefix("--") else {
                bail!("{option}: expected options such as --gemm-plugin auto, found `{word}`");
            };
            let (name, mut value) = match long.split_once('=') {
                Some((name, value)) => (name.replace('_', "-"), Some(value.to_owned())),
                None => (long.replace('_', "-"), None),
            };
            if ITS_OWN.contains(&name.as_str()) {
                bail!("{option}: --{name} is given by `strobe ab` itself; leave it out");
            }
            let build = of_build.iter().find(|(known, _)| *known == name);
            let takes = build.is_none_or(|(_, takes)| *takes);
            if value.is_none() && takes {
                value = words.next_if(|next| !next.starts_with("--"));
            }
            match (name.as_str(), &value) {
                ("engine-dir", Some(dir)) => (side.engine_dir, side.model) = (Some(dir.into()), None),
                ("model", Some(model)) => (side.model, side.engine_dir) = (Some(model.clone()), None),
                ("engine-dir" | "model", None) => bail!("{option}: --{name} needs a value"),
                _ => {
                    let given = std::iter::once(format!("--{name}")).chain(value);
                    let given: Vec<String> = given.collect();
                    if build.is_some() || OF_BOTH.contains(&name.as_str()) {
                        side.build.extend(given.iter().cloned());
                    }
                    if build.is_none() {
                        side.bench.extend(given);
                    }
                }
            }
        }
        if let (Some(dir), Some(given)) = (
            &side.engine_dir,
            side.build.iter().find(|w| of_build.iter().any(|(n, _)| w.strip_prefix("--") == Some(n))),
        ) {
            bail!(
                "{option}: {given} is decided when an engine is built, and --engine-dir {} is built already; give --model instead",
                dir.display()
            );
        }
        if side.bench.windows(2).any(|pair| pair == ["--dataset", "-"]) {
            bail!("--dataset -: every run reads the dataset anew; save it to a file and pass that");
        }
        if side.engine_dir.is_none() && side.model.is_none() {
            bail!("give --model PRESET|DIR|FILE or --engine-dir DIR, or --a-cmd and --b-cmd");
        }
        Ok(side)
    }

    /// The command that builds its engine into `dir`.
    pub(crate) fn build_command(&self, dir: &Path) -> Option<Command> {
        let model = self.model.as_ref()?;
        let mut command = Command::new(&self.binary);
        command.args(["build", "--model", model]).args(&self.build).arg("--output-dir").arg(dir).arg("--overwrite");
        Some(command)
    }

    /// Whether two sides have the same engine.
    pub(crate) fn same_engine(&self, other: &Strobe) -> bool {
        self.binary == other.binary
            && self.model == other.model
            && self.engine_dir == other.engine_dir
            && self.build == other.build
    }

    /// The command that runs it once.
    pub(crate) fn run_command(&self, engine: &Path, mode: &str, out: &Path, profile: Option<&str>) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(["bench", mode, "--engine-dir"]).arg(engine).args(&self.bench).arg("--output-dir").arg(out);
        if let Some(profile) = profile {
            command.args(["--profile", profile]);
        }
        // A window is recorded where `ab` says so, and nowhere else.
        for name in strobe_engine::window::WINDOW_VARIABLES {
            command.env_remove(name);
        }
        command
    }
}

impl Side {
    /// What a reader tells it by.
    pub(crate) fn describe(&self) -> String {
        match self {
            Side::Command(line) => line.clone(),
            Side::Strobe(strobe) => {
                let mut words: Vec<String> = Vec::new();
                let own = std::env::current_exe().ok();
                if own.as_deref() != Some(&strobe.binary) {
                    words.push(strobe.binary.display().to_string());
                }
                words.extend(strobe.model.clone());
                words.extend(strobe.engine_dir.as_ref().map(|dir| dir.display().to_string()));
                let both = strobe.build.iter().chain(strobe.bench.iter().filter(|word| !strobe.build.contains(word)));
                words.extend(both.cloned());
                words.join(" ")
            }
        }
    }
}

/// A command as a person would type it: this binary by its name.
pub(crate) fn own_words(command: &Command) -> String {
    let own = std::env::current_exe().is_ok_and(|own| command.get_program() == own);
    let mut named = Command::new(if own { "strobe".as_ref() } else { command.get_program() });
    named.args(command.get_args());
    shell::line(&named)
}

/// The command of a line with `{out}` replaced.
pub(crate) fn shell_command(line: &str, out: &Path) -> Command {
    let mut quoted = Command::new("x");
    quoted.arg(out);
    let out = shell::line(&quoted);
    let mut command = Command::new("sh");
    command.args(["-c", &line.replace("{out}", out.strip_prefix("x ").unwrap_or(&out))]);
    command
}

/// Names for the sides: what is in the words of one and not of the other.
pub(crate) fn names(a: &Side, b: &Side) -> [String; 2] {
    let of = |side: &Side| match side {
        Side::Command(line) => shell::words(line).unwrap_or_else(|_| vec![line.clone()]),
        Side::Strobe(_) => side.describe().split(' ').map(str::to_owned).collect(),
    };
    let (words_a, words_b) = (of(a), of(b));
    // Words that stand at the same place of both say nothing; an option's name stays with its value.
    let own = |own: &[String], other: &[String]| {
        let mut kept: Vec<&str> = Vec::new();
        for (place, word) in own.iter().enumerate() {
            if other.contains(word) {
                continue;
            }
            if let Some(name) = place
                .checked_sub(1)
                .and_then(|at| own.get(at))
                .filter(|name| name.starts_with("--") && other.contains(name))
            {
                kept.push(name.trim_start_matches("--"));
            }
            kept.push(word.trim_start_matches("--"));
        }
        kept.join(" ")
    };
    let (name_a, name_b) = (own(&words_a, &words_b), own(&words_b, &words_a));
    if name_a == name_b {
        return ["A".to_owned(), "B".to_owned()];
    }
    // Of paths the last part is enough, where it tells the sides apart.
    let short = |name: &str| {
        let last = |word: &str| word.rsplit('/').find(|part| !part.is_empty()).unwrap_or(word).to_owned();
        name.split(' ').map(last).collect::<Vec<_>>().join(" ")
    };
    let (name_a, name_b) = match (short(&name_a), short(&name_b)) {
        (a, b) if a != b => (a, b),
        _ => (name_a, name_b),
    };
    let or_default = |name: String| if name.is_empty() { "default".to_owned() } else { name };
    [or_default(name_a), or_default(name_b)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common() -> Strobe {
        Strobe {
            binary: "strobe".into(),
            model: Some("micro".into()),
            engine_dir: None,
            build: Vec::new(),
            bench: vec!["--dataset".into(), "d.jsonl".into()],
        }
    }

    fn side(words: &str) -> Result<Strobe> {
        Strobe::of("--a", shell::words(words).unwrap(), "strobe".into(), &common())
    }

    #[test]
    fn options_go_where_they_belong() {
        let found = side("--gemm-plugin disable --dtype=bfloat16 --max-batch-size 8 --kv-cache-reuse enable").unwrap();
        assert_eq!(found.build, ["--gemm-plugin", "disable", "--dtype", "bfloat16", "--max-batch-size", "8"]);
        assert_eq!(found.bench[2..], ["--max-batch-size", "8", "--kv-cache-reuse", "enable"]);
        let other = side("--engine-dir e").unwrap();
        assert_eq!((other.engine_dir, other.model), (Some("e".into()), None));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(side("--engine-dir e --gemm-plugin auto").unwrap_err().to_string().contains("--gemm-plugin"));
        assert!(side("--output-dir x").unwrap_err().to_string().contains("--output-dir"));
        assert!(side("fast").unwrap_err().to_string().contains("`fast`"));
        assert!(side("--model").is_err());
    }

    #[test]
    fn sides_are_named_by_what_differs() {
        let of = |words: &str| Side::Strobe(side(words).unwrap());
        let named = names(&of("--gemm-plugin auto --dtype float32"), &of("--gemm-plugin disable --dtype float32"));
        assert_eq!(named, ["gemm-plugin auto", "gemm-plugin disable"]);
        assert_eq!(names(&of(""), &of("--threads 1")), ["default", "threads 1"]);
        assert_eq!(names(&of(""), &of("")), ["A", "B"]);
        assert_eq!(names(&of("--engine-dir x/e1"), &of("--engine-dir x/e2")), ["e1", "e2"]);
        assert_eq!(names(&of("--engine-dir x/e"), &of("--engine-dir y/e")), ["x/e", "y/e"]);
        let command = |line: &str| Side::Command(line.to_owned());
        assert_eq!(names(&command("run --fast {out}"), &command("run --slow {out}")), ["fast", "slow"]);
    }

    #[test]
    fn a_path_with_blanks_stays_one_word() {
        let command = shell_command("printf %s {out}", Path::new("a b"));
        let mut command = command;
        assert_eq!(command.output().unwrap().stdout, b"a b");
    }
}
