//! Links between pages of one run: relative, so that a folder of pages can be moved or mailed, and opened from a disk.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use strobe_report::html::Link;

use crate::run_dir::{self, RunDir};

/// The address of a file as seen from a page; `None` where either place does not exist.
fn relative(page: &Path, target: &Path) -> Option<String> {
    let folder = page.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (folder, target) = (folder.canonicalize().ok()?, target.canonicalize().ok()?);
    let (from, to): (Vec<Component>, Vec<Component>) = (folder.components().collect(), target.components().collect());
    let same = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n("..".to_owned(), from.len() - same);
    let down = to.iter().skip(same).map(|part| encoded(part.as_os_str()));
    Some(up.chain(down).collect::<Vec<_>>().join("/"))
}

/// A name as part of an address: everything but letters, digits and a few marks as `%` and its bytes.
fn encoded(name: &OsStr) -> String {
    let letter = |byte: &u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(*byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    name.as_bytes().iter().map(letter).collect()
}

/// A link to a file, where there is one. A page does not link to itself.
fn to_file(page: &Path, label: &str, target: &Path) -> Option<Link> {
    let is_itself = page.canonicalize().is_ok_and(|page| target.canonicalize().is_ok_and(|target| page == target));
    let href = relative(page, target).filter(|_| target.is_file() && !is_itself)?;
    Some(Link::new(label, href))
}

/// Links from a page to the pages of a run directory; none for anything else.
pub(crate) fn pages_of_run(page: &Path, side: &str, run: &Path) -> Vec<Link> {
    if !RunDir::is_at(run) {
        return Vec::new();
    }
    let label = |what: &str| if side.is_empty() { what.to_owned() } else { format!("{what} of {side}") };
    let pages = [("Report", run_dir::REPORT_HTML), ("Trace", run_dir::TRACE_HTML)];
    pages.iter().filter_map(|(what, name)| to_file(page, &label(what), &run.join(name))).collect()
}

/// Links from the page of a comparison to the pages of the runs that it shows: the first of each side.
pub(crate) fn run_links(page: &Path, sides: &[Vec<std::path::PathBuf>; 2]) -> Vec<Link> {
    let first = sides.iter().zip(["A", "B"]).filter_map(|(paths, side)| Some((side, paths.first()?)));
    first.flat_map(|(side, run)| pages_of_run(page, side, run)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_relative_and_encoded() {
        let folder = std::env::temp_dir().join(format!("strobe-links-{}", std::process::id()));
        let run = folder.join("runs/a b#1");
        std::fs::create_dir_all(&run).unwrap();
        std::fs::write(run.join("report.html"), "").unwrap();
        std::fs::create_dir_all(folder.join("pages")).unwrap();
        let target = run.join("report.html");
        let from = |page: &str| relative(&folder.join(page), &target);
        assert_eq!(from("x.html").as_deref(), Some("runs/a%20b%231/report.html"));
        assert_eq!(from("pages/x.html").as_deref(), Some("../runs/a%20b%231/report.html"));
        assert_eq!(from("runs/a b#1/x.html").as_deref(), Some("report.html"));
        assert_eq!(from("nowhere/x.html"), None);
        assert_eq!(to_file(&target, "itself", &target), None);
        assert_eq!(to_file(&folder.join("x.html"), "missing", &run.join("trace.html")), None);
        assert!(pages_of_run(&folder.join("x.html"), "A", &run).is_empty(), "no run directory");
        std::fs::write(run.join("run.json"), "{}").unwrap();
        let link = Link::new("Report of A", "runs/a%20b%231/report.html");
        assert_eq!(pages_of_run(&folder.join("x.html"), "A", &run), [link]);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
