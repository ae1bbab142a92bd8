//! How much equal runs differ on this machine: measured by `strobe doctor --noise`, remembered, and used where a side of a
//! comparison has a single run. Keyed by machine, model and length of the run: one number for all workloads would be wrong
//! for most.

pub(crate) mod measure;

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strobe_analyze::compare::runs::StoredSpread;
use strobe_stats::LogSpread;

use crate::machine;
use crate::run_facts::KnownRun;

/// The spread of equal runs of one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Noise {
    /// The machine, its threads and instruction set, or its GPU.
    pub machine: String,
    /// The model.
    pub model: String,
    /// How long a run took, in seconds: the mean.
    pub seconds: f64,
    /// How many runs count.
    pub runs: usize,
    /// When, in seconds since 1970.
    pub measured_at: u64,
    /// The words that measured it.
    pub command: String,
    /// Of each figure, and of each kind of iteration by its name.
    pub spreads: BTreeMap<String, LogSpread>,
}

/// What was measured is taken for runs that are at most this many times as long as those, or as short. Longer runs average
/// more, so it is too careful for them; shorter ones differ more.
const AS_LONG: f64 = 4.0;
const AS_SHORT: f64 = 0.6;

/// What a run says of the machine and the model that it ran on.
pub(crate) fn key(about: &Value) -> Option<(String, String)> {
    let machine = about.get("machine")?;
    let text = |value: &Value, name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
    let model = text(about.get("engine")?, "model_name")?;
    let name = match machine.get("gpu").and_then(|gpu| text(gpu, "name")) {
        Some(gpu) => gpu,
        None => {
            let count = |name: &str| machine.get(name).and_then(Value::as_u64);
            let threads = count("threads").map_or(String::new(), |threads| format!(", {threads} threads"));
            let cores = count("cores").map_or(String::new(), |cores| format!(" of {cores} cores"));
            let tier = text(machine, "simd_tier").map_or(String::new(), |tier| format!(", {tier}"));
            format!("{}{threads}{cores}{tier}", text(machine, "cpu")?)
        }
    };
    Some((name, model))
}

fn file() -> Option<std::path::PathBuf> {
    machine::cache_file("noise.json")
}

fn all() -> Vec<Noise> {
    let text = file().and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
    // One by one: an entry that another version wrote is no reason to forget the rest.
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap_or_default();
    entries.into_iter().filter_map(|entry| serde_json::from_value(entry).ok()).collect()
}

/// Remembers what was measured, in place of what was known of runs of about that length.
pub(crate) fn remember(noise: &Noise) -> Result<()> {
    let path = file().context("neither XDG_CACHE_HOME nor HOME names a place for the cache; set one")?;
    let mut all = all();
    let same = |known: &Noise| {
        known.machine == noise.machine
            && known.model == noise.model
            && (noise.seconds / known.seconds).ln().abs() < AS_SHORT.ln().abs()
    };
    all.retain(|known| !same(known));
    all.push(noise.clone());
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    crate::run_dir::write_whole(&path, format!("{}\n", serde_json::to_string_pretty(&all)?).as_bytes())
}

/// What is known of equal runs of the workload of both sides; none where machines or models differ, or nobody measured.
pub(crate) fn known_for(sides: &[Vec<KnownRun>; 2]) -> Option<StoredSpread> {
    let mut runs = sides.iter().flatten();
    let first = key(&runs.next()?.about)?;
    if !runs.all(|run| key(&run.about).as_ref() == Some(&first)) {
        return None;
    }
    let seconds: Vec<f64> = sides.iter().flatten().filter_map(|run| run.seconds).collect();
    // The shortest run differs most.
    let shortest = seconds.into_iter().reduce(f64::min)?;
    let noise = best_match(all(), &first, shortest)?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
    Some(StoredSpread { runs: noise.runs, age: age(now.saturating_sub(noise.measured_at)), spreads: noise.spreads })
}

fn best_match(all: Vec<Noise>, (machine, model): &(String, String), seconds: f64) -> Option<Noise> {
    let fits = |noise: &Noise| {
        let times = seconds / noise.seconds;
        noise.machine == *machine && noise.model == *model && (AS_SHORT..=AS_LONG).contains(&times)
    };
    let distance = |noise: &Noise| (seconds / noise.seconds).ln().abs();
    all.into_iter().filter(fits).min_by(|x, y| distance(x).total_cmp(&distance(y)))
}

/// How long ago, in words.
pub(crate) fn age(seconds: u64) -> String {
    match seconds {
        0..120 => "just now".to_owned(),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(model: &str, seconds: f64) -> Noise {
        Noise {
            machine: "cpu".into(),
            model: model.into(),
            seconds,
            runs: 10,
            measured_at: 0,
            command: String::new(),
            spreads: BTreeMap::new(),
        }
    }

    #[test]
    fn a_spread_is_that_of_the_model_and_of_runs_about_as_long() {
        let all = || vec![noise("m", 2.0), noise("m", 30.0), noise("other", 2.1)];
        let wanted = ("cpu".to_owned(), "m".to_owned());
        let found = |seconds: f64| best_match(all(), &wanted, seconds).map(|noise| noise.seconds);
        assert_eq!(found(2.2), Some(2.0));
        assert_eq!(found(7.9), Some(2.0));
        assert_eq!(found(25.0), Some(30.0));
        assert_eq!(found(1.0), None, "shorter runs differ more than those that were measured");
        assert_eq!(found(500.0), None);
        assert_eq!(best_match(all(), &("gpu".to_owned(), "m".to_owned()), 2.0), None);
    }

    #[test]
    fn a_run_says_what_it_ran_on() {
        let about = serde_json::json!({
            "machine": {"cpu": "X", "threads": 2, "cores": 4, "simd_tier": "avx2"}, "engine": {"model_name": "m"}
        });
        assert_eq!(key(&about), Some(("X, 2 threads of 4 cores, avx2".to_owned(), "m".to_owned())));
        assert_eq!(key(&serde_json::json!({})), None);
        assert_eq!(
            (age(30), age(600), age(90_000), age(400_000)),
            ("just now".into(), "10 min ago".into(), "25 h ago".into(), "4 days ago".into())
        );
    }
}
