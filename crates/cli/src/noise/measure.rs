//! Measures A/A runs: equal runs in fresh processes, one after the other.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use strobe_analyze::compare::runs::{RunFacts, of_one_state, spreads_of};
use strobe_report::human;
use strobe_report::table::Table;
use strobe_stats::{mean, student_quantile};

use super::{Noise, key, remember};
use crate::ab::process;
use crate::ab::side::Strobe;
use crate::commands::demo;
use crate::run_facts::{KnownRun, known_run};
use crate::{interrupt, output};

/// What to run how often.
pub(crate) struct Task {
    pub engine_dir: Option<PathBuf>,
    pub dataset: Option<PathBuf>,
    pub runs: usize,
    /// Further options of `strobe bench`.
    pub options: Vec<String>,
    pub json: bool,
}

/// The fewest runs from which a spread is known.
pub(crate) const FEWEST: usize = 3;

/// A directory that goes when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch> {
        let path = std::env::temp_dir().join(format!("strobe-noise-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs, remembers the spread, and prints it.
pub(crate) fn run(task: &Task) -> Result<()> {
    let scratch = Scratch::new()?;
    let (engine, dataset) = match (&task.engine_dir, &task.dataset) {
        (Some(engine), Some(dataset)) => (engine.clone(), dataset.clone()),
        (None, None) => embedded(&scratch.0)?,
        _ => bail!("--noise takes --engine-dir and --dataset together, or neither for the embedded default"),
    };
    let words = task.options.clone();
    let common = Strobe {
        binary: std::env::current_exe()?,
        model: None,
        engine_dir: Some(engine.clone()),
        build: Vec::new(),
        bench: vec!["--dataset".into(), dataset.display().to_string()],
    };
    let strobe = Strobe::of("--noise", words, common.binary.clone(), &common)?;
    let say = |text: String| if task.json { output::note(&text) } else { output::line(&text) };
    let mut known = Vec::new();
    // The first run warms the machine up.
    for number in 0..=task.runs {
        let out = scratch.0.join(format!("run-{number}"));
        process::run(&mut strobe.run_command(&engine, "throughput", &out, None), None)?.ok_or_error("a run")?;
        if interrupt::requested() {
            bail!(interrupt::Interrupted);
        }
        let run = known_run(&out, number)?;
        let value = run.runs.first().and_then(|run| run.metrics.first());
        let value = value.map_or(String::new(), |m| format!("{} {}", human::number(m.value), m.unit));
        let busy = run
            .runs
            .iter()
            .find_map(|run| run.disturbed.as_ref())
            .map_or(String::new(), |disturbance| format!("   disturbed: {}", disturbance.reason));
        say(match number {
            0 => "run 0     warm-up, does not count".to_owned(),
            _ => format!("run {number:<5} {value}{busy}"),
        });
        if number > 0 {
            known.push(run);
        }
    }
    let noise = of_runs(&known, crate::commands::bench::command_line())?;
    remember(&noise)?;
    if task.json {
        output::line(&format!("{:#}", to_json(&noise, task.runs)));
        return Ok(());
    }
    output::line("");
    output::print(&table(&noise).render(output::width()));
    let set_aside = task.runs - noise.runs;
    if set_aside > 0 {
        output::line(&format!(
            "{set_aside} of {} runs do not count: the machine was busy, or in another state than in most.",
            task.runs
        ));
    }
    output::line(&format!(
        "Stored for {}, {}, runs of about {}: `strobe compare` uses it where a side has a single run.",
        noise.machine,
        noise.model,
        human::ns(noise.seconds * 1e9)
    ));
    Ok(())
}

/// The engine and the dataset of the demo.
fn embedded(scratch: &Path) -> Result<(PathBuf, PathBuf)> {
    let (engine, dataset) = (scratch.join("engine"), scratch.join("dataset.jsonl"));
    demo::build(&mut crate::model_args::CpuArgs::default().open()?, &engine, true)?;
    demo::make_dataset(&dataset)?;
    Ok((engine, dataset))
}

/// The spread of runs; those that the machine disturbed, or that met it in another state than most, do not count.
fn of_runs(known: &[KnownRun], command: String) -> Result<Noise> {
    let Some((machine, model)) = known.first().and_then(|run| key(&run.about)) else {
        bail!("the runs do not say on what they ran");
    };
    let quiet: Vec<&KnownRun> = known.iter().filter(|run| run.runs.iter().all(|r| r.disturbed.is_none())).collect();
    if quiet.len() < FEWEST.max(known.len() / 2) {
        let why = known
            .iter()
            .flat_map(|run| &run.runs)
            .find_map(|run| Some(run.disturbed.as_ref()?.reason.clone()))
            .unwrap_or_default();
        bail!(
            "the machine was busy: {} of {} runs were disturbed ({why}); nothing was stored, measure again when it is quiet",
            known.len() - quiet.len(),
            known.len()
        );
    }
    let all: Vec<RunFacts> = quiet.iter().flat_map(|run| run.runs.clone()).collect();
    // Runs are compared within one state of the machine: the spread has to be that of one.
    let facts: Vec<RunFacts> = of_one_state(&all).into_iter().cloned().collect();
    if facts.len() < FEWEST.max(known.len() / 2) {
        bail!(
            "the machine changed its speed: at most {} of {} runs met it in one state (memory bandwidth around them); nothing was \
             stored, measure again",
            facts.len(),
            known.len()
        );
    }
    let seconds: Vec<f64> = quiet.iter().filter_map(|run| run.seconds).collect();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Ok(Noise {
        machine,
        model,
        seconds: mean(&seconds).context("the runs took no time")?,
        runs: facts.len(),
        measured_at: now.as_secs(),
        command,
        spreads: spreads_of(&facts),
    })
}

/// What two single runs must differ by to be told apart.
fn told_apart(noise: &Noise, sd: f64) -> f64 {
    (student_quantile(0.995, (noise.runs - 1) as f64) * std::f64::consts::SQRT_2 * sd).exp_m1()
}

fn table(noise: &Noise) -> Table {
    let mut table =
        Table::new(["A/A runs", "spread (standard deviation)", "smallest difference called between two single runs"]);
    for (name, spread) in &noise.spreads {
        let name = if name.contains('(') { name.clone() } else { format!("{name} iterations") };
        table.push([name, human::percent(spread.sd), human::percent(told_apart(noise, spread.sd))]);
    }
    table.title(format!("Spread of {} equal runs", noise.runs))
}

fn to_json(noise: &Noise, asked: usize) -> Value {
    json!({"noise": noise, "runs_asked": asked, "runs_disturbed": asked - noise.runs})
}
