//! Logits against those of another run or another implementation.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Logits of the same prompt from elsewhere.
pub(super) struct Expected {
    path: PathBuf,
    logits: Vec<Vec<f32>>,
}

impl Expected {
    /// Read them from JSON with `logits`, a list of numbers per position.
    pub(super) fn read(path: &Path) -> Result<Expected> {
        #[derive(serde::Deserialize)]
        struct File {
            logits: Vec<Vec<f32>>,
        }
        let shown = path.display();
        let bytes = std::fs::read(path).with_context(|| format!("cannot read --against {shown}"))?;
        let file: File = serde_json::from_slice(&bytes)
            .with_context(|| format!("--against {shown} is not JSON with `logits`, a list of numbers per position"))?;
        Ok(Expected { path: path.to_path_buf(), logits: file.logits })
    }

    /// How far `found` is from these, in one line.
    pub(super) fn compare(&self, found: &[Vec<f32>]) -> Result<String> {
        let shown = self.path.display();
        let shape = |rows: &[Vec<f32>]| (rows.len(), rows.first().map_or(0, Vec::len));
        let uneven = |rows: &[Vec<f32>]| rows.iter().any(|row| row.len() != shape(rows).1);
        if shape(found) != shape(&self.logits) || uneven(&self.logits) {
            let ((positions, vocab), (rows, width)) = (shape(found), shape(&self.logits));
            bail!(
                "--against {shown} holds {rows} positions of {width} logits, not {positions} of {vocab}; compare the same --ids and model"
            );
        }
        let largest = |row: &[f32]| row.iter().fold(0f32, |most, v| most.max(v.abs()));
        let best = |row: &[f32]| row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(token, _)| token);
        let (mut lost, mut all, mut worst, mut same) = (0f64, 0f64, 0f32, 0);
        for (found, expected) in found.iter().zip(&self.logits) {
            let differences: Vec<f32> = found.iter().zip(expected).map(|(f, e)| f - e).collect();
            lost += differences.iter().map(|d| f64::from(*d).powi(2)).sum::<f64>();
            all += expected.iter().map(|e| f64::from(*e).powi(2)).sum::<f64>();
            worst = worst.max(largest(&differences) / largest(expected).max(f32::MIN_POSITIVE));
            same += usize::from(best(found) == best(expected));
        }
        let rms = (lost / all.max(f64::MIN_POSITIVE)).sqrt();
        Ok(format!(
            "against {shown}: relative RMS {:.4} %, largest difference {:.4} % of a position's largest logit, same best token at {same} of {} positions",
            100.0 * rms,
            100.0 * worst,
            found.len()
        ))
    }
}
