//! Two sides in fresh processes, interleaved (A B, B A, A B, ...), until the interval of their ratio is narrow enough. The
//! first pair warms the machine up and does not count. It stops by the width of the interval, never because a difference
//! looks significant: looking again and again would find one where there is none.

mod identity;
pub(crate) mod process;
pub(crate) mod results;
pub(crate) mod side;

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use strobe_analyze::compare::runs::{Evidence, Quantity, Runs, WholeRuns};

use crate::commands::compare::runs_of;
use crate::run_facts::KnownRun;
use crate::{interrupt, run_dir};
use side::{Side, shell_command};

/// What was asked for and what became of it, in the directory of a comparison.
pub(crate) const PLAN: &str = "ab.json";
/// Where its runs are.
pub(crate) const RUNS: &str = "runs";

/// Everything that decides an interleaved comparison.
pub(crate) struct Plan {
    pub sides: [Side; 2],
    /// `throughput` or `latency`.
    pub mode: String,
    /// Iterations to record in one more pair at the end, which does not count.
    pub profile: Option<String>,
    /// The fewest pairs and the most.
    pub pairs: (usize, usize),
    /// No pair begins that would end later than this.
    pub budget: Option<Duration>,
    /// Half the width at which the interval is narrow enough, as a share.
    pub half_width: f64,
    /// The difference that matters, as a share.
    pub margin: f64,
    /// The figure that decides.
    pub metric: Option<String>,
    /// Where everything is kept.
    pub dir: PathBuf,
    /// What must be the same for another call to go on: see [`identity`].
    pub identity: OnceCell<Value>,
}

/// Why it stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The interval is narrow enough.
    Narrow,
    /// As many pairs as were allowed.
    Pairs,
    /// The time is up.
    Budget,
    /// Ctrl-C.
    Interrupted,
    /// Runs that do not work.
    Failures,
}

impl Stopped {
    pub(crate) fn in_words(self, half_width: f64) -> String {
        match self {
            Stopped::Narrow => format!("the interval is narrower than ±{:.1} %", 100.0 * half_width),
            Stopped::Pairs => "the last pair allowed by --pairs".to_owned(),
            Stopped::Budget => "the time of --budget".to_owned(),
            Stopped::Interrupted => "interrupted".to_owned(),
            Stopped::Failures => format!("{MOST_FAILURES} pairs in a row failed"),
        }
    }
}

/// The runs that count, and the recorded pair.
pub(crate) struct Found {
    pub known: [Vec<KnownRun>; 2],
    /// Where the runs that count are, in the order of `known`.
    pub paths: [Vec<PathBuf>; 2],
    /// The recorded pair, where one was asked for.
    pub recorded: Option<[PathBuf; 2]>,
    pub stopped: Stopped,
    /// Runs that failed, with the reason.
    pub failures: Vec<String>,
    /// Pairs that an earlier call had left.
    pub resumed: usize,
}

/// More failures than this in a row end the comparison.
const MOST_FAILURES: usize = 3;

/// What is told while it goes on.
pub(crate) trait Listener {
    /// A pair has ended: its number (0 warms up), what counts so far.
    fn pair(&mut self, number: usize, known: &[Vec<KnownRun>; 2], so_far: Option<&WholeRuns>);
    /// Something to say.
    fn say(&mut self, text: &str);
}

impl Plan {
    fn identity(&self) -> &Value {
        self.identity.get_or_init(|| identity::of(self))
    }

    /// Creates the directory, or goes on in one that an earlier call left.
    pub(crate) fn open(&self, overwrite: bool) -> Result<bool> {
        let file = self.dir.join(PLAN);
        let known = match std::fs::read(&file) {
            Ok(text) => {
                Some(serde_json::from_slice::<Value>(&text).with_context(|| format!("{} is damaged", file.display()))?)
            }
            Err(_) => None,
        };
        if let Some(known) = &known
            && !overwrite
        {
            let kept = known.get("plan").cloned().unwrap_or_default();
            let changed = identity::differences(&kept, &identity::of(self));
            if changed.is_empty() {
                // As it was at the beginning: what runs have written since is no part of the sides.
                let _ = self.identity.set(kept);
                return Ok(true);
            }
            bail!(
                "--output-dir: `{}` holds another comparison: {}; --overwrite starts anew, another directory keeps both",
                self.dir.display(),
                changed.join("; ")
            );
        }
        let empty = std::fs::read_dir(&self.dir).map_or(true, |mut entries| entries.next().is_none());
        if known.is_none() && !empty {
            bail!(
                "--output-dir: `{}` exists and holds no comparison (no {PLAN}); name another directory",
                self.dir.display()
            );
        }
        if !empty {
            std::fs::remove_dir_all(&self.dir).with_context(|| format!("cannot remove {}", self.dir.display()))?;
        }
        std::fs::create_dir_all(self.dir.join(RUNS))
            .with_context(|| format!("cannot create {}", self.dir.display()))?;
        self.write("running", &Value::Null)?;
        Ok(false)
    }

    /// Writes what became of it.
    pub(crate) fn write(&self, state: &str, outcome: &Value) -> Result<()> {
        let text = json!({
            "strobe": env!("CARGO_PKG_VERSION"), "state": state, "command": crate::commands::bench::command_line(),
            "plan": self.identity(), "outcome": outcome,
        });
        run_dir::write_whole(&self.dir.join(PLAN), format!("{text:#}\n").as_bytes())
    }

    /// The engines of the sides; what has to be built is built, once where both are the same.
    fn engines(&self, listener: &mut dyn Listener) -> Result<[PathBuf; 2]> {
        let mut engines: Vec<PathBuf> = Vec::new();
        for (index, side) in self.sides.iter().enumerate() {
            let Side::Strobe(strobe) = side else {
                engines.push(PathBuf::new());
                continue;
            };
            if let (1, [Side::Strobe(a), Side::Strobe(b)]) = (index, &self.sides)
                && a.same_engine(b)
            {
                engines.push(engines[0].clone());
                continue;
            }
            let dir = self.dir.join(["engine-a", "engine-b"][index]);
            let Some(mut command) = strobe.build_command(&dir) else {
                engines.push(strobe.engine_dir.clone().unwrap_or_default());
                continue;
            };
            if !dir.join(strobe_engine::engine_dir::CONFIG_FILE).is_file() {
                listener.say(&format!("build     {}", side::own_words(&command)));
                process::run(&mut command, None)?.ok_or_error("build")?;
            }
            engines.push(dir);
        }
        match <[PathBuf; 2]>::try_from(engines) {
            Ok(engines) => Ok(engines),
            Err(_) => bail!("a comparison has two sides"),
        }
    }

    fn path(&self, pair: usize, side: usize) -> PathBuf {
        self.dir.join(RUNS).join(format!("{pair:03}-{}", ["a", "b"][side]))
    }

    /// Runs one side once. A result that an earlier call left is taken as it is.
    fn run_side(
        &self,
        engines: &[PathBuf; 2],
        side: usize,
        out: &Path,
        profile: Option<&str>,
    ) -> Result<Option<String>> {
        if results::read(out, 0).is_ok_and(|known| known.runs.iter().all(|run| !run.metrics.is_empty())) {
            return Ok(None);
        }
        // What a killed or failed run left is in the way.
        let removed = if out.is_dir() { std::fs::remove_dir_all(out) } else { std::fs::remove_file(out) };
        drop(removed);
        let (mut command, to_file) = match &self.sides[side] {
            Side::Strobe(strobe) => (strobe.run_command(&engines[side], &self.mode, out, profile), None),
            Side::Command(line) if line.contains("{out}") => (shell_command(line, out), None),
            Side::Command(line) => (shell_command(line, out), Some(out)),
        };
        let done = process::run(&mut command, to_file)?;
        if interrupt::requested() {
            bail!(interrupt::Interrupted);
        }
        if let Some(problem) = done.problem() {
            return Ok(Some(format!("{}: {problem}", ["A", "B"][side])));
        }
        Ok(results::read(out, 0).err().map(|problem| format!("{}: {problem:#}", ["A", "B"][side])))
    }

    /// Runs pairs until it is told to stop.
    pub(crate) fn execute(&self, listener: &mut dyn Listener) -> Result<Found> {
        let begin = Instant::now();
        let engines = self.engines(listener)?;
        interrupt::hold_to_the_end();
        let mut known: [Vec<KnownRun>; 2] = [Vec::new(), Vec::new()];
        let mut paths: [Vec<PathBuf>; 2] = [Vec::new(), Vec::new()];
        let (mut failures, mut failed_in_a_row, mut resumed) = (Vec::new(), 0, 0);
        let mut longest = Duration::ZERO;
        let mut number = 0;
        let stopped = loop {
            let out = [self.path(number, 0), self.path(number, 1)];
            let pair_begin = Instant::now();
            let there = out.iter().all(|path| path.exists());
            let mut problem = None;
            // Neither side always runs on the warmer machine.
            for side in [number % 2, 1 - number % 2] {
                match self.run_side(&engines, side, &out[side], None) {
                    Ok(None) => {}
                    Ok(Some(failure)) => {
                        problem = Some(failure);
                        break;
                    }
                    Err(error) if error.is::<interrupt::Interrupted>() => break,
                    Err(error) => {
                        problem = Some(format!("{}: {error:#}", ["A", "B"][side]));
                        break;
                    }
                }
            }
            if interrupt::requested() {
                break Stopped::Interrupted;
            }
            longest = longest.max(pair_begin.elapsed());
            match problem {
                Some(failure) => {
                    failed_in_a_row += 1;
                    listener.say(&format!("pair {number} failed: {failure}"));
                    failures.push(failure);
                    if failed_in_a_row >= MOST_FAILURES {
                        break Stopped::Failures;
                    }
                }
                None => {
                    failed_in_a_row = 0;
                    if number == 0 {
                        // A figure that results do not have is known now, not after the last run.
                        self.judge(&[vec![results::read(&out[0], 0)?], vec![results::read(&out[1], 0)?]])?;
                    } else {
                        resumed += usize::from(there);
                        for side in 0..2 {
                            known[side].push(results::read(&out[side], known[side].len())?);
                            paths[side].push(out[side].clone());
                        }
                    }
                    let judged = (known[0].len() > 1).then(|| self.judge(&known)).transpose()?;
                    listener.pair(number, &known, judged.as_ref());
                    let pairs = known[0].len();
                    let narrow = judged.as_ref().and_then(|j| j.figures.first()).is_some_and(|f| self.is_narrow(f));
                    if pairs >= self.pairs.0 && narrow {
                        break Stopped::Narrow;
                    }
                    if pairs >= self.pairs.1 {
                        break Stopped::Pairs;
                    }
                }
            }
            number += 1;
            // The recorded pair at the end takes its time too.
            let ahead = longest * if self.profile.is_some() { 2 } else { 1 };
            if self.budget.is_some_and(|budget| begin.elapsed() + ahead > budget) {
                break Stopped::Budget;
            }
        };
        let ended = !matches!(stopped, Stopped::Interrupted | Stopped::Failures);
        let (recorded, stopped) = match self.profile.as_ref().filter(|_| ended) {
            None => (None, stopped),
            Some(profile) => match self.record(&engines, profile, listener) {
                Ok(recorded) => (recorded, stopped),
                Err(error) if error.is::<interrupt::Interrupted>() => (None, Stopped::Interrupted),
                Err(error) => {
                    listener.say(&format!("the recorded pair failed: {error:#}"));
                    (None, stopped)
                }
            },
        };
        Ok(Found { known, paths, recorded, stopped, failures, resumed })
    }

    /// One more pair with recorded iterations, to explain what the others show.
    fn record(
        &self,
        engines: &[PathBuf; 2],
        profile: &str,
        listener: &mut dyn Listener,
    ) -> Result<Option<[PathBuf; 2]>> {
        let out = ["a", "b"].map(|side| self.dir.join(RUNS).join(format!("recorded-{side}")));
        for side in 0..2 {
            if let Some(failure) = self.run_side(engines, side, &out[side], Some(profile))? {
                listener.say(&format!("the recorded pair failed: {failure}"));
                return Ok(None);
            }
        }
        Ok(Some(out))
    }

    /// How many runs are kept, those too that do not count.
    pub(crate) fn kept(&self) -> usize {
        let there = |path: &PathBuf| results::read(path, 0).is_ok();
        let entries = std::fs::read_dir(self.dir.join(RUNS)).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(there).count()
    }

    /// The pairs as a comparison takes them.
    pub(crate) fn runs(&self, known: [Vec<KnownRun>; 2]) -> Runs {
        Runs { resolution: self.half_width, ..runs_of(known, self.metric.as_deref(), true) }
    }

    /// What pairs say so far.
    pub(crate) fn judge(&self, known: &[Vec<KnownRun>; 2]) -> Result<WholeRuns> {
        let shared = known.each_ref().map(|side| side.iter().map(KnownRun::shallow).collect());
        let judged = self.runs(shared).judge(self.margin);
        if judged.figures.is_empty() {
            bail!("the results of the sides have no figure in common");
        }
        if let Some(metric) = &self.metric
            && judged.figures.first().is_some_and(|figure| figure.name != *metric)
        {
            let names: Vec<&str> = judged.figures.iter().map(|figure| figure.name.as_str()).collect();
            bail!("--metric: not every result has a figure `{metric}`; they have: {}", names.join(", "));
        }
        Ok(judged)
    }

    fn is_narrow(&self, figure: &Quantity) -> bool {
        let confidence = Evidence::Pairs.confidence();
        figure.estimate.is_some_and(|estimate| estimate.half_width(confidence).exp_m1() <= self.half_width)
    }
}

impl KnownRun {
    /// The same without the description of its run.
    fn shallow(&self) -> KnownRun {
        KnownRun { runs: self.runs.clone(), metric: self.metric, about: Value::Null, seconds: self.seconds }
    }
}
