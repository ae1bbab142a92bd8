//! Ctrl-C and SIGTERM: the first one asks the running work to stop and keep what it has, the second one ends the process. Work
//! that has nothing to keep, and never looks, is ended a moment later.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

static REQUESTS: AtomicUsize = AtomicUsize::new(0);

/// Whether the first signal came from the terminal, which sends it to every process in the foreground.
static FROM_TERMINAL: AtomicBool = AtomicBool::new(false);

/// Pieces of work that must come to their own end: see [`hold`].
static HOLDS: AtomicUsize = AtomicUsize::new(0);

/// How long work may go on after the first signal if nobody holds the process.
const PATIENCE_US: libc::suseconds_t = 700_000;

/// How often it is looked again while somebody does.
const AGAIN_US: libc::suseconds_t = 100_000;

/// Returned by work that was stopped before it had anything to show.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted before there was anything to keep; nothing was written")
    }
}

impl std::error::Error for Interrupted {}

/// While it lives, the process ends by itself only: it writes what it has, or waits for another process that does.
pub(crate) struct Hold(());

impl Drop for Hold {
    fn drop(&mut self) {
        HOLDS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Take the time that is needed after a signal.
#[must_use]
pub(crate) fn hold() -> Hold {
    HOLDS.fetch_add(1, Ordering::SeqCst);
    Hold(())
}

/// The same up to the end of the process: from here on there is something to keep.
pub(crate) fn hold_to_the_end() {
    std::mem::forget(hold());
}

extern "C" fn on_signal(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if REQUESTS.fetch_add(1, Ordering::SeqCst) > 0 {
        // SAFETY: _exit is async-signal-safe.
        unsafe { libc::_exit(130) }
    }
    // SAFETY: the kernel passes a valid structure to a handler that was installed with SA_SIGINFO.
    let from_terminal = unsafe { info.as_ref() }.is_some_and(|info| info.si_code == libc::SI_KERNEL);
    FROM_TERMINAL.store(from_terminal, Ordering::SeqCst);
    wake_in(PATIENCE_US);
}

extern "C" fn on_alarm(_: libc::c_int) {
    if HOLDS.load(Ordering::SeqCst) > 0 {
        return wake_in(AGAIN_US);
    }
    let said = "error: interrupted before there was anything to keep\n";
    // SAFETY: write and _exit are async-signal-safe; the text lives as long as the process.
    unsafe {
        libc::write(libc::STDERR_FILENO, said.as_ptr().cast(), said.len());
        libc::_exit(130)
    }
}

/// Ask for SIGALRM.
fn wake_in(microseconds: libc::suseconds_t) {
    let never = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let timer = libc::itimerval { it_interval: never, it_value: libc::timeval { tv_sec: 0, tv_usec: microseconds } };
    // SAFETY: a plain system call with a structure of our own; no old value is asked for.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) };
}

/// Take over SIGINT and SIGTERM. A file that reaches the limit on file sizes is a write error like any other, not the end of
/// the process.
pub(crate) fn install() {
    // SAFETY: a signal is ignored; no handler runs.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let handler = on_signal as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: zeroes are a valid `sigaction` with an empty mask. The handler only touches atomics and calls setitimer and
        // _exit, which are allowed in a signal handler.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
    // SAFETY: the handler only touches an atomic and calls setitimer, write and _exit.
    unsafe { libc::signal(libc::SIGALRM, on_alarm as *const () as libc::sighandler_t) };
}

/// A progress function for long work that goes on until the user wants to stop.
pub(crate) fn watch(mut progress: impl FnMut(u64)) -> impl FnMut(u64) -> bool {
    move |done| {
        progress(done);
        !requested()
    }
}

/// Whether the user wants to stop.
pub(crate) fn requested() -> bool {
    REQUESTS.load(Ordering::SeqCst) > 0
}

/// Whether a process that was started knows by itself that it shall stop: the terminal told it too.
pub(crate) fn is_known_to_children() -> bool {
    FROM_TERMINAL.load(Ordering::SeqCst)
}
