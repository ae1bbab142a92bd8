//! How long a fresh process takes until its first token, phase by phase.

use std::sync::OnceLock;
use std::time::Instant;

use serde::Serialize;
use strobe_engine::EngineInfo;
use strobe_report::human;

static BEGAN: OnceLock<Instant> = OnceLock::new();

/// Milliseconds since the first call, which `main` makes.
pub(crate) fn since_beginning_ms() -> f64 {
    BEGAN.get_or_init(Instant::now).elapsed().as_secs_f64() * 1e3
}

/// How far a process had got when, in milliseconds since it began.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Start {
    /// Arguments checked and the device opened.
    pub device_ms: f64,
    /// The model mapped (from an engine directory) or built.
    pub model_ms: f64,
    /// The engine ready for requests.
    pub engine_ms: f64,
    /// The first token drawn, of the warm-up or of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_ms: Option<f64>,
}

impl Start {
    /// The first token was drawn at this time of the engine's clock.
    pub(crate) fn first_token_at(&mut self, info: &EngineInfo, time_ns: u64) {
        let ago_ms = info.clock.now().saturating_sub(time_ns) as f64 / 1e6;
        self.first_token_ms.get_or_insert(since_beginning_ms() - ago_ms);
    }
}

impl std::fmt::Display for Start {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let time = |ms: f64| human::ns(ms * 1e6);
        f.write_str(&self.first_token_ms.map_or(human::NOT_KNOWN.to_string(), time))?;
        let phases = [("device", self.device_ms), ("model", self.model_ms), ("engine", self.engine_ms)];
        let phases = phases.map(|(name, ms)| format!("{name} at {}", time(ms)));
        write!(f, "; {}", phases.join(", "))
    }
}
