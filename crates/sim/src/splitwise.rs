//! Iteration times from the table that splitwise-sim publishes: prompt and token times of static batches.
//!
//! Prompts are priced by their tokens together, generation by its requests, each the median of the table's rows,
//! interpolated linearly. An iteration with both is priced as a prompt of all its tokens, and never below its generation
//! alone. The table varies one factor at a time, so the length of the context has no price of its own.

use std::collections::BTreeMap;
use std::path::Path;

use strobe_stats::{PercentileRule, percentile, sorted};

use crate::cost::StepLoad;
use crate::error::SimError;
use crate::profile::{Table, along};

/// Times of one model on one kind of hardware.
#[derive(Clone, Debug)]
pub struct PhaseTables {
    /// Milliseconds by prompt tokens.
    prompts: Table,
    /// Milliseconds by generating requests.
    generation: Table,
}

fn bad(problem: String) -> SimError {
    SimError::Option { option: "--cost", problem }
}

/// A row whose end-to-end time is further than this factor from the sum of its parts contradicts itself.
const CONTRADICTION: f64 = 1.5;

struct Row {
    model: String,
    hardware: String,
    ranks: u64,
    prompt_tokens: u64,
    batch: u64,
    output: f64,
    prompt_ms: f64,
    token_ms: f64,
    e2e_ms: Option<f64>,
}

impl Row {
    fn is_consistent(&self) -> bool {
        let sum = self.prompt_ms + (self.output - 1.0).max(0.0) * self.token_ms;
        self.e2e_ms.is_none_or(|e2e| e2e < CONTRADICTION * sum && sum < CONTRADICTION * e2e)
    }
}

fn read(path: &Path) -> Result<Vec<Row>, SimError> {
    let text = std::fs::read_to_string(path).map_err(|e| bad(format!("cannot read {}: {e}", path.display())))?;
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let names: Vec<&str> = lines.next().map_or(Vec::new(), |(_, header)| header.split(',').map(str::trim).collect());
    let place = |name: &str| names.iter().position(|found| *found == name);
    let needed = |name: &str| {
        place(name).ok_or_else(|| bad(format!("{} has no column {name}; splitwise's tables have it", path.display())))
    };
    let (model, hardware, ranks) = (needed("model")?, needed("hardware")?, needed("tensor_parallel")?);
    let (prompt, batch, output) = (needed("prompt_size")?, needed("batch_size")?, needed("token_size")?);
    let (prompt_time, token_time, e2e) = (needed("prompt_time")?, needed("token_time")?, place("e2e_time"));
    let mut rows = Vec::new();
    for (index, line) in lines {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let text = |column: usize| fields.get(column).copied().unwrap_or("");
        let number = |column: usize| {
            text(column).parse::<f64>().ok().filter(|n| *n > 0.0 && *n < 1e15).ok_or_else(|| {
                bad(format!(
                    "{} line {}: {} is `{}`; expected a number above 0",
                    path.display(),
                    index + 1,
                    names[column],
                    text(column)
                ))
            })
        };
        rows.push(Row {
            model: text(model).to_string(),
            hardware: text(hardware).to_string(),
            ranks: number(ranks)? as u64,
            prompt_tokens: number(prompt)? as u64,
            batch: number(batch)? as u64,
            output: number(output)?,
            prompt_ms: number(prompt_time)?,
            token_ms: number(token_time)?,
            e2e_ms: e2e.map(number).transpose()?,
        });
    }
    Ok(rows)
}

fn medians(values: BTreeMap<u64, Vec<f64>>) -> Table {
    let middle = |times: &[f64]| percentile(&sorted(times), 0.5, PercentileRule::Nearest);
    values.into_iter().filter_map(|(at, times)| Some((at, middle(&times)?))).collect()
}

impl PhaseTables {
    /// Reads `FILE,model=llama2-70b,hardware=h100-80gb,tp=8`.
    pub fn parse(text: &str) -> Result<PhaseTables, SimError> {
        let mut parts = text.split(',');
        let path = Path::new(parts.next().unwrap_or(""));
        let (mut model, mut hardware, mut ranks) = ("", "", 0);
        for part in parts {
            match part.split_once('=') {
                Some(("model", value)) => model = value,
                Some(("hardware", value)) => hardware = value,
                Some(("tp", value)) => {
                    ranks = value.parse().map_err(|_| bad(format!("tp: `{value}` is not a whole number")))?;
                }
                _ => return Err(bad(format!("`{part}` is none of model=NAME, hardware=NAME, tp=N"))),
            }
        }
        let rows = read(path)?;
        let own: Vec<&Row> =
            rows.iter().filter(|r| r.model == model && r.hardware == hardware && r.ranks == ranks).collect();
        if own.is_empty() {
            let mut known: Vec<String> =
                rows.iter().map(|r| format!("model={},hardware={},tp={}", r.model, r.hardware, r.ranks)).collect();
            known.sort_unstable();
            known.dedup();
            return Err(bad(format!(
                "{} has no such rows; write splitwise:FILE, and one of {}",
                path.display(),
                known.join(" ")
            )));
        }
        let (mut prompts, mut generation) = (BTreeMap::<u64, Vec<f64>>::new(), BTreeMap::<u64, Vec<f64>>::new());
        for row in own.iter().filter(|row| row.is_consistent()) {
            prompts.entry(row.prompt_tokens * row.batch).or_default().push(row.prompt_ms);
            generation.entry(row.batch).or_default().push(row.token_ms);
        }
        if prompts.is_empty() {
            return Err(bad(format!("{}: every such row contradicts its own end-to-end time", path.display())));
        }
        Ok(PhaseTables { prompts: medians(prompts), generation: medians(generation) })
    }

    /// The cost of an iteration, in nanoseconds.
    pub fn ns(&self, load: &StepLoad) -> f64 {
        let decodes = f64::from(load.decode_requests);
        let generation = if decodes > 0.0 { along(&self.generation, decodes, |t| *t) } else { 0.0 };
        let prompts = if load.context_tokens > 0 {
            along(&self.prompts, load.context_tokens as f64 + decodes, |t| *t)
        } else {
            0.0
        };
        generation.max(prompts) * 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,prompt_time,token_time,e2e_time,tensor_parallel\n";

    fn parse(name: &str, rows: &str, choice: &str) -> Result<PhaseTables, SimError> {
        let path = std::env::temp_dir().join(format!("strobe-splitwise-{}-{name}.csv", std::process::id()));
        std::fs::write(&path, rows).unwrap();
        let read = PhaseTables::parse(&format!("{}{choice}", path.display()));
        std::fs::remove_file(&path).unwrap();
        read
    }

    #[test]
    fn times_are_medians_and_contradictions_are_dropped() {
        let rows = format!(
            "{HEADER}m,g,512,1,11,0,0,50,10,150,2\nm,g,512,1,11,0,0,52,12,172,2\nm,g,512,1,11,0,0,90,11,200,2\n\
             m,g,512,4,11,0,0,170,20,370,2\nm,g,512,8,11,0,0,1,20,99999,2\nm,other,512,1,11,0,0,7,7,77,2\n"
        );
        let tables = parse("good", &rows, ",model=m,hardware=g,tp=2").unwrap();
        let load = |prompt: u64, decodes: u32| {
            let mut load = StepLoad::default();
            if prompt > 0 {
                load.add_context(0, prompt);
            }
            (0..decodes).for_each(|_| load.add_decode(100));
            load
        };
        // 4 * 512 tokens take 170 ms; the row of batch 8 contradicts itself.
        for (prompt, decodes, ms) in
            [(512, 0, 52.0), (2048, 0, 170.0), (1280, 0, 111.0), (0, 1, 11.0), (0, 4, 20.0), (1276, 4, 111.0)]
        {
            assert_eq!(tables.ns(&load(prompt, decodes)), ms * 1e6, "{prompt} {decodes}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let rows = format!("{HEADER}m,g,512,1,11,0,0,50,10,150,2\n");
        for (name, rows, choice, expected) in [
            ("rows", rows.as_str(), ",model=m,hardware=g,tp=4", "model=m,hardware=g,tp=2"),
            ("tp", rows.as_str(), ",tp=x", "tp: `x`"),
            ("word", rows.as_str(), ",speed=1", "speed=1"),
            ("column", "model,hardware\nm,g\n", ",model=m", "no column tensor_parallel"),
            (
                "number",
                "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time\nm,g,1,0,1,1,1,1\n",
                ",model=m",
                "line 2: prompt_size is `0`",
            ),
        ] {
            let said = parse(name, rows, choice).unwrap_err().to_string();
            assert!(said.contains(expected), "{name}: {said}");
        }
    }
}
