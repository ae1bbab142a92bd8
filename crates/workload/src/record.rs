//! What is kept of one request: the stamps from which every latency is computed.

use serde::{Deserialize, Serialize};

/// One request's life, in nanoseconds of one monotonic clock (the engine's, which starts before the run).
///
/// The stamps in order: intended arrival `a`, sent `s`, queued in the engine `q`, first scheduled
/// `d`, token times `t1..tn` (stamped in the engine at the end of the step that made the token).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestRecord {
    /// The request's number in this run.
    pub id: u64,
    /// The `task_id` of its dataset line.
    pub task_id: i64,
    /// Prompt length in tokens.
    pub num_input_tokens: u32,
    /// Intended arrival, `a`: latencies count from here. In closed-loop and at-once runs `a = s`.
    pub arrival_ns: u64,
    /// When the client sent it, `s`. `s - a` is the client's lag.
    pub sent_ns: u64,
    /// When the engine's queue took it, `q`.
    pub queued_ns: u64,
    /// When a step first held it, `d`; absent if none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_scheduled_ns: Option<u64>,
    /// `t1..tn`, one stamp per output token.
    pub token_times_ns: Vec<u64>,
    /// The output token ids: as many as there are stamps, or none when ids were not kept.
    pub output_ids: Vec<u32>,
    /// `length`, `stop`, `eos`, `aborted` or `error`.
    pub finish_reason: String,
    /// What went wrong, for a failed request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The first and the last iteration that held this request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iterations: Option<(u64, u64)>,
    /// How often it was paused to be recomputed.
    #[serde(default)]
    pub preemptions: u32,
    /// Prompt tokens taken from the prefix cache.
    #[serde(default)]
    pub reused_tokens: u32,
}

/// How a request ended, as far as the metrics are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Finished with at least one token: part of every latency.
    Completed,
    /// Finished without any token: it has no first-token or end stamp.
    WithoutTokens,
    /// Stopped by the client or by the end of the run.
    Aborted,
    /// Failed.
    Failed,
}

impl RequestRecord {
    /// How this request ended.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match (self.finish_reason.as_str(), &self.error) {
            ("aborted", _) => Outcome::Aborted,
            ("length" | "stop" | "eos", None) if self.token_times_ns.is_empty() => Outcome::WithoutTokens,
            ("length" | "stop" | "eos", None) => Outcome::Completed,
            _ => Outcome::Failed,
        }
    }

    /// Output tokens made, `n`.
    #[must_use]
    pub fn num_output_tokens(&self) -> usize {
        self.token_times_ns.len()
    }

    /// The first token's stamp, `t1`.
    #[must_use]
    pub fn first_token_ns(&self) -> Option<u64> {
        self.token_times_ns.first().copied()
    }

    /// The last token's stamp, `tn`.
    #[must_use]
    pub fn last_token_ns(&self) -> Option<u64> {
        self.token_times_ns.last().copied()
    }

    /// Says what contradicts itself in this record, if anything does.
    pub(crate) fn contradiction(&self) -> Option<String> {
        let tokens = &self.token_times_ns;
        if let Some(i) = tokens.windows(2).position(|w| w[1] < w[0]) {
            return Some(format!("token_times_ns[{}] is earlier than token_times_ns[{i}]", i + 1));
        }
        if !self.output_ids.is_empty() && self.output_ids.len() != tokens.len() {
            return Some(format!("{} output_ids but {} token_times_ns", self.output_ids.len(), tokens.len()));
        }
        let first_token = self.first_token_ns();
        let order = [
            ("arrival_ns", Some(self.arrival_ns), "the first token", first_token),
            ("sent_ns", Some(self.sent_ns), "the first token", first_token),
            ("queued_ns", Some(self.queued_ns), "first_scheduled_ns", self.first_scheduled_ns),
            ("first_scheduled_ns", self.first_scheduled_ns, "the first token", first_token),
        ];
        order.into_iter().find_map(|(before, b, after, a)| {
            let (b, a) = (b?, a?);
            (b > a).then(|| format!("{before} {b} is later than {after} {a}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(reason: &str, error: Option<&str>, tokens: &[u64]) -> RequestRecord {
        RequestRecord {
            id: 1,
            task_id: 1,
            num_input_tokens: 4,
            arrival_ns: 0,
            sent_ns: 1,
            queued_ns: 2,
            first_scheduled_ns: Some(3),
            token_times_ns: tokens.to_vec(),
            output_ids: vec![],
            finish_reason: reason.to_string(),
            error: error.map(str::to_string),
            iterations: None,
            preemptions: 0,
            reused_tokens: 0,
        }
    }

    #[test]
    fn outcomes() {
        assert_eq!(record("length", None, &[5]).outcome(), Outcome::Completed);
        assert_eq!(record("stop", None, &[]).outcome(), Outcome::WithoutTokens);
        assert_eq!(record("aborted", None, &[5]).outcome(), Outcome::Aborted);
        assert_eq!(record("error", Some("x"), &[5]).outcome(), Outcome::Failed);
        assert_eq!(record("length", Some("x"), &[5]).outcome(), Outcome::Failed);
    }

    #[test]
    fn contradictions_are_named() {
        assert_eq!(record("length", None, &[5, 5, 9]).contradiction(), None);
        let backwards = record("length", None, &[5, 9, 8]).contradiction();
        assert!(backwards.unwrap().contains("token_times_ns[2]"));
        let early = record("length", None, &[2]).contradiction();
        assert!(early.unwrap().contains("first_scheduled_ns 3 is later"));
        let mut ids = record("length", None, &[5]);
        ids.output_ids = vec![1, 2];
        assert!(ids.contradiction().unwrap().contains("2 output_ids"));
    }

    #[test]
    fn unknown_stamps_are_absent_from_json_and_come_back() {
        let mut unscheduled = record("error", Some("no room"), &[]);
        unscheduled.first_scheduled_ns = None;
        let text = serde_json::to_string(&unscheduled).unwrap();
        assert!(!text.contains("first_scheduled_ns") && !text.contains("iterations"));
        assert_eq!(serde_json::from_str::<RequestRecord>(&text).unwrap(), unscheduled);
    }
}
