//! Ctrl-C: the first one asks the running work to stop and keep what it has, the second one ends the process.

use std::sync::atomic::{AtomicUsize, Ordering};

static REQUESTS: AtomicUsize = AtomicUsize::new(0);

/// Returned by work that was stopped before it had anything to show.
#[derive(Debug)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted before there was anything to keep; nothing was written")
    }
}

impl std::error::Error for Interrupted {}

extern "C" fn on_signal(_: libc::c_int) {
    if REQUESTS.fetch_add(1, Ordering::SeqCst) > 0 {
        // SAFETY: _exit is async-signal-safe.
        unsafe { libc::_exit(130) }
    }
}

/// Take over SIGINT and SIGTERM. A file that reaches the limit on file sizes is a write error like any other, not the end of
/// the process.
pub fn install() {
    // SAFETY: a signal is ignored; no handler runs.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only touches an atomic and calls _exit; both are allowed in a signal handler.
        unsafe { libc::signal(signal, on_signal as *const () as libc::sighandler_t) };
    }
}

/// A progress function for long work that goes on until the user wants to stop.
pub fn watch(mut progress: impl FnMut(u64)) -> impl FnMut(u64) -> bool {
    move |done| {
        progress(done);
        !requested()
    }
}

/// Whether the user wants to stop.
pub fn requested() -> bool {
    REQUESTS.load(Ordering::SeqCst) > 0
}
