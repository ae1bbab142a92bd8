//! Progress: a bar on a terminal, elsewhere a line every few seconds.

use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use strobe_report::human;

use crate::output;

/// How often a line is printed where no terminal shows a bar.
const PLAIN_EVERY: Duration = Duration::from_secs(5);

/// How far something has come.
pub(crate) struct Bar {
    bar: ProgressBar,
    unit: Unit,
    /// When the last line was printed, where there is no terminal.
    printed: Option<Mutex<Instant>>,
}

#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Named(&'static str),
}

/// A bar over bytes.
pub(crate) fn bytes(label: &str, total: u64) -> Bar {
    Bar::new(label, total, Unit::Bytes, "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}")
}

/// A bar over tokens.
pub(crate) fn tokens(label: &str, total: u64) -> Bar {
    Bar::new(label, total, Unit::Named("tokens"), "{msg} [{bar:30}] {pos}/{len} tokens {per_sec} eta {eta}")
}

/// A bar over the tokens of a benchmark, with whatever the message says beside it.
pub(crate) fn generated(total: u64) -> Bar {
    Bar::new("", total, Unit::Named("tokens"), "[{bar:30}] {pos}/{len} tokens, {msg}")
}

/// A bar over kernels that are measured.
pub(crate) fn kernels(total: u64) -> Bar {
    Bar::new("", total, Unit::Named(""), "[{bar:30}] {pos}/{len} {msg}")
}

/// Something of unknown length.
pub(crate) fn spinner(label: &str) -> Bar {
    let bar = Bar::new(label, 0, Unit::Named(""), "{spinner} {msg} {elapsed}");
    bar.bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

impl Bar {
    fn new(label: &str, total: u64, unit: Unit, template: &str) -> Bar {
        let shown = output::interactive();
        let target = if shown { ProgressDrawTarget::stderr_with_hz(8) } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(label.to_string());
        Bar { bar, unit, printed: (!shown).then(|| Mutex::new(Instant::now())) }
    }

    /// So much is done.
    pub(crate) fn set_position(&self, done: u64) {
        self.bar.set_position(done);
        self.print_if_due();
    }

    /// So much more is done.
    pub(crate) fn inc(&self, more: u64) {
        self.bar.inc(more);
        self.print_if_due();
    }

    /// What to say beside it.
    pub(crate) fn set_message(&self, message: impl Into<String>) {
        self.bar.set_message(message.into());
    }

    /// It is over; nothing of it stays on the terminal.
    pub(crate) fn finish_and_clear(&self) {
        self.bar.finish_and_clear();
    }

    fn print_if_due(&self) {
        if let Some(line) = self.line_due(Instant::now()) {
            output::note(&line);
        }
    }

    /// The line to print now, where there is no terminal and the last one is long ago.
    fn line_due(&self, now: Instant) -> Option<String> {
        let mut printed = self.printed.as_ref()?.lock().ok()?;
        if now.saturating_duration_since(*printed) < PLAIN_EVERY {
            return None;
        }
        *printed = now;
        let (done, total) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let far = match self.unit {
            Unit::Bytes => format!("{}/{}", human::bytes(done), human::bytes(total)),
            Unit::Named("") => format!("{done}/{total}"),
            Unit::Named(unit) => format!("{done}/{total} {unit}"),
        };
        let words = [self.bar.message(), far];
        let words: Vec<&str> = words.iter().map(String::as_str).filter(|word| !word.is_empty()).collect();
        Some(match self.unit {
            // The message of a benchmark follows its tokens.
            Unit::Named("tokens") => words.iter().rev().copied().collect::<Vec<_>>().join(", "),
            _ => words.join(" "),
        })
    }
}

/// A spinner that appears when something has taken a second, and goes when it is dropped.
pub(crate) struct Waiting {
    done: Option<mpsc::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Waiting {
    /// Starts to wait.
    pub(crate) fn new(label: &'static str) -> Self {
        if !output::interactive() {
            return Self { done: None, thread: None };
        }
        let (done, waiting) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            if waiting.recv_timeout(Duration::from_secs(1)) == Err(mpsc::RecvTimeoutError::Timeout) {
                let spinner = spinner(label);
                let _ = waiting.recv(); // ends when the sender is dropped
                spinner.finish_and_clear();
            }
        });
        Self { done: Some(done), thread: Some(thread) }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        drop(self.done.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_terminal_a_line_is_printed_every_few_seconds() {
        let start = Instant::now();
        let plain = |bar: Bar| Bar { printed: Some(Mutex::new(start)), ..bar };
        let bar = plain(generated(8192));
        bar.bar.set_position(1234);
        bar.set_message("512.0 tok/s, 12/64 requests");
        assert_eq!(bar.line_due(start + PLAIN_EVERY / 2), None);
        let line = bar.line_due(start + PLAIN_EVERY);
        assert_eq!(line.as_deref(), Some("1234/8192 tokens, 512.0 tok/s, 12/64 requests"));
        assert_eq!(bar.line_due(start + PLAIN_EVERY), None, "once is enough");
        assert!(bar.line_due(start + 2 * PLAIN_EVERY).is_some());
        let bar = plain(bytes("building", 4 << 30));
        bar.bar.set_position(1 << 30);
        assert_eq!(bar.line_due(start + PLAIN_EVERY).as_deref(), Some("building 1.00 GiB/4.00 GiB"));
    }
}
