//! The traces that a verb was given: files, run directories and patterns, read with a progress bar.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use strobe_analyze::categories::Rules;
use strobe_analyze::{Context, Options};
use strobe_trace::{NONE, Process, RangeRow, Thread, Trace, import};

use crate::nsys::Exported;
use crate::run_dir::{self, RunDir};
use crate::{interrupt, nsys, output, progress};

/// How traces are to be looked at.
#[derive(clap::Args, Default)]
pub(crate) struct ViewArgs {
    /// Ranges whose name matches this regular expression are the iterations
    #[arg(long, value_name = "REGEX")]
    iteration_range: Option<String>,
    /// What repeats N times is one iteration each; `strobe analyze TRACE --list-iterations` shows what does
    #[arg(long, value_name = "N", conflicts_with = "iteration_range")]
    iterations: Option<std::num::NonZeroUsize>,
    /// A TOML file with rules that put kernels into categories, tried before the built-in ones
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
}

impl ViewArgs {
    /// Checks the options.
    pub(crate) fn options(&self) -> Result<Options> {
        let iteration_range = match &self.iteration_range {
            Some(text) => Some(regex::Regex::new(text).map_err(|e| {
                let problem = e.to_string();
                let last = problem.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
                anyhow::anyhow!("--iteration-range `{text}` is not a regular expression: {last}")
            })?),
            None => None,
        };
        let rules = match &self.rules {
            Some(path) => {
                let text =
                    std::fs::read_to_string(path).with_context(|| format!("cannot read --rules {}", path.display()))?;
                Rules::with_user_file(&text, path)?
            }
            None => Rules::builtin(),
        };
        Ok(Options { rules, iteration_range, iterations: self.iterations.map(usize::from) })
    }
}

/// Reads files, or a run directory, as the ranks of one run.
pub(crate) fn read(paths: &[PathBuf]) -> Result<Trace> {
    let run = match paths {
        [dir] if RunDir::is_at(dir) => Some(RunDir::open(dir)?),
        _ => None,
    };
    let notices = run.as_ref().map_or(Ok(Vec::new()), RunDir::notices)?;
    if let Some(run) = &run
        && let Some(mut trace) = unprofiled_run(run)?
    {
        trace.meta.notices.splice(0..0, notices);
        return Ok(said(trace));
    }
    let exports = Exports::of(paths)?;
    let (mut bar, begin) = (None, Instant::now());
    let trace = import::read_files(&exports.paths, &mut |p: import::Progress<'_>| {
        if bar.is_some() || begin.elapsed() >= Duration::from_secs(1) {
            let bar = bar.get_or_insert_with(|| progress::bytes("reading", p.total_bytes));
            bar.set_position(p.done_bytes);
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let mut trace = trace?;
    exports.name_reports(&mut trace);
    trace.meta.notices.splice(0..0, notices);
    Ok(said(trace))
}

/// The files to read: exports in the place of reports that only nsys reads.
struct Exports {
    paths: Vec<PathBuf>,
    /// The exports, each with its report.
    made: Vec<(Exported, PathBuf)>,
    /// Until the exports are gone again the process ends by itself only.
    _hold: Option<interrupt::Hold>,
}

impl Exports {
    fn of(paths: &[PathBuf]) -> Result<Self> {
        let hold = paths.iter().any(|path| nsys::is_report(path)).then(interrupt::hold);
        let mut exports = Self { paths: Vec::new(), made: Vec::new(), _hold: hold };
        for path in paths {
            if !nsys::is_report(path) {
                exports.paths.push(path.clone());
                continue;
            }
            let exported = Exported::of(path)?;
            exports.paths.push(exported.database.clone());
            exports.made.push((exported, path.clone()));
        }
        Ok(exports)
    }

    /// Calls the sources what the user called them.
    fn name_reports(&self, trace: &mut Trace) {
        for source in &mut trace.meta.sources {
            if let Some((_, report)) = self.made.iter().find(|(exported, _)| exported.database == source.path) {
                source.path.clone_from(report);
            }
        }
    }
}

/// A trace, after what its reader has to know was said.
fn said(trace: Trace) -> Trace {
    trace.meta.notices.iter().for_each(|notice| output::warn(notice));
    trace
}

/// A trace with categories and iterations; an iteration range that matches nothing is an error.
pub(crate) fn context<'t>(trace: &'t Trace, options: &Options) -> Result<Context<'t>> {
    let context = Context::new(trace, options);
    if let Some(range) = &options.iteration_range
        && context.iterations.list.is_empty()
    {
        bail!("--iteration-range `{range}` matches no range of the trace; --list-iterations lists their names");
    }
    if let Some(count) = options.iterations
        && context.iterations.list.is_empty()
    {
        let counts: Vec<String> = context.iterations.candidates.iter().map(|c| c.count.to_string()).collect();
        let known = if counts.is_empty() {
            "nothing repeats in it".to_owned()
        } else {
            format!("what repeats comes {} times", counts.join(", "))
        };
        bail!(
            "--iterations {count}: nothing repeats {count} times in the trace; {known}; --list-iterations shows what"
        );
    }
    Ok(context)
}

/// The same for several traces.
pub(crate) fn contexts<'t>(traces: &'t [Trace], options: &Options) -> Result<Vec<Context<'t>>> {
    traces.iter().map(|trace| context(trace, options)).collect()
}

/// The files of a trace, for programs. Only names: where a file lay is nobody else's business.
pub(crate) fn sources(trace: &Trace) -> serde_json::Value {
    let source = |s: &strobe_trace::Source| {
        let name = s.path.file_name().map(|name| name.to_string_lossy().into_owned());
        serde_json::json!({
            "file": name, "format": s.format, "bytes": s.bytes, "events": s.events, "lost": s.lost, "rank": s.rank,
        })
    };
    trace.meta.sources.iter().map(source).collect()
}

/// The iterations of a run directory without recorded windows: enough to compare wall times.
fn unprofiled_run(run: &RunDir) -> Result<Option<Trace>> {
    if run.has_trace() || !run.file(run_dir::ITERATIONS).is_file() {
        return Ok(None);
    }
    iterations_trace(run).map(Some)
}

/// All iterations of a run directory, whatever was recorded of them; none where another runtime kept none.
pub(crate) fn iterations_of(path: &Path) -> Result<Trace> {
    let run = RunDir::open(path)?;
    run.notices()?.iter().for_each(|notice| output::warn(notice));
    if !run.file(run_dir::ITERATIONS).is_file() {
        return Ok(Trace::default());
    }
    iterations_trace(&run)
}

fn iterations_trace(run: &RunDir) -> Result<Trace> {
    let path = run.file(run_dir::ITERATIONS);
    let iterations = run.iterations()?;
    if iterations.is_empty() && run.is_partial() {
        bail!("{}: partial run without a whole iteration; run it again", run.path.display());
    }
    let mut trace = Trace::default();
    trace.processes.push(Process { name: "strobe".into(), ..Process::default() });
    trace.threads.push(Thread { name: "strobe-engine".into(), ..Thread::default() });
    for logged in iterations {
        for (kind, start, end) in logged.phases {
            let name = trace.strings.intern(kind.as_str());
            let iteration = u32::try_from(logged.iteration.iter).unwrap_or(NONE);
            trace.ranges.push(RangeRow { kind, iteration, ..RangeRow::new(name, 0, start, end) });
        }
        trace.iterations.push(logged.iteration);
    }
    trace.meta.producer = "strobe".into();
    trace.meta.sources.push(strobe_trace::Source {
        path: run.path.clone(),
        format: "strobe run directory without a profile".into(),
        bytes: std::fs::metadata(&path).map_or(0, |found| found.len()),
        events: trace.iterations.len() as u64,
        ..Default::default()
    });
    trace.meta.partial = run.is_partial();
    if !run.has_trace() {
        let why = if run.is_partial() { "the run left no trace" } else { "the run was not profiled" };
        trace.meta.notices.push(format!("{why}: only wall times are known; record ops with --profile A-B"));
    }
    trace.finish();
    Ok(trace)
}

/// The paths that an argument means: itself if it exists, else what matches it as a pattern (`*`, `?`).
pub(crate) fn expand(argument: &str) -> Result<Vec<PathBuf>> {
    let path = PathBuf::from(argument);
    if path.exists() {
        return Ok(vec![path]);
    }
    if !argument.contains(['*', '?']) {
        bail!("{argument} does not exist; pass a trace file or a run directory");
    }
    let mut found: Vec<PathBuf> = vec![if path.is_absolute() { PathBuf::from("/") } else { PathBuf::new() }];
    for part in path.components() {
        let std::path::Component::Normal(name) = part else {
            if !matches!(part, std::path::Component::RootDir) {
                found.iter_mut().for_each(|p| p.push(part));
            }
            continue;
        };
        let name = name.to_string_lossy();
        if !name.contains(['*', '?']) {
            found.iter_mut().for_each(|p| p.push(&*name));
            continue;
        }
        let mut next = Vec::new();
        for dir in &found {
            let here = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
            for entry in std::fs::read_dir(here).into_iter().flatten().flatten() {
                let entry_name = entry.file_name();
                if matches(&name, &entry_name.to_string_lossy()) {
                    next.push(dir.join(&entry_name));
                }
            }
        }
        found = next;
    }
    found.retain(|p| p.exists());
    found.sort();
    if found.is_empty() {
        bail!("nothing matches {argument}; pass a trace file or a run directory");
    }
    Ok(found)
}

/// Whether a name matches a pattern in which `*` stands for any text and `?` for any letter. Hidden files need a dot.
fn matches(pattern: &str, name: &str) -> bool {
    fn from(pattern: &[char], name: &[char]) -> bool {
        match pattern.split_first() {
            None => name.is_empty(),
            Some(('*', rest)) => (0..=name.len()).any(|skip| from(rest, &name[skip..])),
            Some(('?', rest)) => name.split_first().is_some_and(|(_, after)| from(rest, after)),
            Some((letter, rest)) => {
                name.split_first().is_some_and(|(first, after)| first == letter && from(rest, after))
            }
        }
    }
    let letters = |text: &str| text.chars().collect::<Vec<_>>();
    (pattern.starts_with('.') || !name.starts_with('.')) && from(&letters(pattern), &letters(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        assert!(matches("run-*", "run-12") && matches("*.sqlite", "a.sqlite") && matches("r?n", "run"));
        assert!(!matches("run-*", "ran-1") && !matches("*", ".hidden") && matches(".h*", ".hidden"));
        let dir = std::env::temp_dir().join(format!("strobe-patterns-{}", std::process::id()));
        for name in ["a1/x.json", "a2/x.json", "b/x.json"] {
            let path = dir.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let found = expand(&format!("{}/a*/x.json", dir.display())).unwrap();
        assert_eq!(found, [dir.join("a1/x.json"), dir.join("a2/x.json")]);
        assert!(expand(&format!("{}/c*", dir.display())).is_err());
        assert!(expand(&format!("{}/c", dir.display())).is_err());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
