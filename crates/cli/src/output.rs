//! The one place that writes to the terminal.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use strobe_report::terminal;

/// Print to standard output. A reader that has gone away (`| head`) is no error; a full disk is, and ends the program:
/// a result that is cut off must not look whole.
pub(crate) fn print(text: &str) {
    if let Err(problem) = try_print(text) {
        error(&format!("{problem:#}"));
        std::process::exit(2);
    }
}

/// The same, where the program has something to do after a failure.
pub(crate) fn try_print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    // A file or a program gets what it asked for, to the letter.
    let text = if out.is_terminal() { terminal::escaped_lines(text) } else { Cow::Borrowed(text) };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(problem) if problem.kind() != io::ErrorKind::BrokenPipe => {
            Err(anyhow::anyhow!("cannot write to standard output: {problem}"))
        }
        _ => Ok(()),
    }
}

/// Print a line to standard output.
pub(crate) fn line(text: &str) {
    print(&format!("{text}\n"));
}

/// Print names and values, values aligned.
pub(crate) fn facts(facts: &[(&str, String)]) {
    let widest = facts.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    facts.iter().for_each(|(name, value)| line(&format!("{name:<widest$}  {value}")));
}

/// Say something beside the result, on standard error.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", terminal::escaped_lines(text));
}

/// A warning, on standard error.
pub(crate) fn warn(text: &str) {
    note(&format!("warning: {}", terminal::escaped(text)));
}

/// The one line that says why a call failed.
pub(crate) fn error(text: &str) {
    let joined = text.lines().map(str::trim_end).collect::<Vec<_>>().join(" ");
    if text.contains("Usage:") { note(text) } else { note(&format!("error: {}", terminal::escaped(&joined))) }
}

/// Whether a person watches standard error.
pub(crate) fn interactive() -> bool {
    io::stderr().is_terminal()
}

/// Width to lay tables out for: that of the terminal, `COLUMNS` if set, else 100.
pub(crate) fn width() -> usize {
    let set = std::env::var("COLUMNS").ok().and_then(|c| c.parse().ok());
    set.or_else(terminal_width).filter(|&c: &usize| c >= 40).unwrap_or(100)
}

fn terminal_width() -> Option<usize> {
    // SAFETY: `winsize` is plain data that the call fills; zeroes are valid for it.
    let (code, size) = unsafe {
        let mut size: libc::winsize = std::mem::zeroed();
        (libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size), size)
    };
    (code == 0 && size.ws_col > 0).then_some(usize::from(size.ws_col))
}
