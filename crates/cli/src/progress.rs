//! Progress on a terminal; silent elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::mpsc;
use std::time::Duration;

use crate::output;

/// A bar over bytes.
pub fn bytes(label: &str, total: u64) -> ProgressBar {
    let template = "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}";
    bar(label, total, template)
}

/// A bar over tokens.
pub fn tokens(label: &str, total: u64) -> ProgressBar {
    bar(label, total, "{msg} [{bar:30}] {pos}/{len} tokens {per_sec} eta {eta}")
}

/// A bar over requests, with whatever the message says beside it.
pub fn requests(total: u64) -> ProgressBar {
    bar("", total, "[{bar:30}] {pos}/{len} requests {msg}")
}

/// A bar over kernels that are measured.
pub fn kernels(total: u64) -> ProgressBar {
    bar("", total, "[{bar:30}] {pos}/{len} {msg}")
}

/// Something of unknown length.
pub fn spinner(label: &str) -> ProgressBar {
    let bar = bar(label, 0, "{spinner} {msg} {elapsed}");
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// A spinner that appears when something has taken a second, and goes when it is dropped.
pub struct Waiting {
    done: Option<mpsc::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Waiting {
    /// Starts to wait.
    pub fn new(label: &'static str) -> Self {
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

fn bar(label: &str, total: u64, template: &str) -> ProgressBar {
    let target =
        if output::interactive() { ProgressDrawTarget::stderr_with_hz(8) } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(label.to_string());
    bar
}
