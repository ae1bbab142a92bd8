//! Nsight Systems: where it is, and what has to be done with what it writes.

use std::fmt::Write as _;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{interrupt, output};

/// How often a waiting call looks up. The process that is measured runs meanwhile: seldom is better.
const TICK: Duration = Duration::from_millis(20);

/// What to do where there is no nsys.
pub(crate) const REMEDY: &str = "get it from https://developer.nvidia.com/nsight-systems/get-started (package nsight-systems-cli \
of NVIDIA's repositories) or name it with --nsys PATH; without it, `strobe bench ... --profile A-B` records kernels too";

/// Where nsys is looked for, in words.
pub(crate) const PLACES: &str =
    "PATH, /opt/nvidia/nsight-systems*, /usr/local/cuda*/bin and the copy in /opt/nvidia/nsight-compute";

/// An nsys that can be run.
pub(crate) struct Nsys {
    /// The program.
    pub path: PathBuf,
    /// Makes reports of raw recordings; a complete Nsight Systems does that by itself.
    importer: Option<PathBuf>,
}

/// The nsys that the user named, or the first one found.
pub(crate) fn find(named: Option<&Path>) -> Result<Nsys> {
    let path = match named {
        // Without a slash it would be looked for on the PATH.
        Some(path) if is_program(path) => Path::new(".").join(path),
        Some(path) if path.is_file() => {
            let path = path.display();
            bail!("--nsys {path} may not be executed; allow it with `chmod +x`, or name another nsys")
        }
        Some(path) if path.exists() => bail!("--nsys {} is not a file; name the program itself", path.display()),
        Some(path) => bail!("--nsys {} does not exist", path.display()),
        None => search().with_context(|| format!("nsys was not found on {PLACES}; {REMEDY}"))?,
    };
    let importer = importer_beside(&path);
    Ok(Nsys { path, importer })
}

/// The first nsys on the PATH, else the newest one where installers put it.
pub(crate) fn search() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|p| p.join("nsys")).find(|p| is_program(p));
    on_path.or_else(|| {
        let versions = folders("/opt/nvidia", "nsight-systems").into_iter().flat_map(|dir| folders(dir, ""));
        let systems = versions.flat_map(|v| [v.join("target-linux-x64/nsys"), v.join("bin/nsys")]);
        let toolkits = folders("/usr/local", "cuda").into_iter().map(|dir| dir.join("bin/nsys"));
        let compute = folders("/opt/nvidia/nsight-compute", "").into_iter();
        let bundled = compute.map(|dir| dir.join("host/target-linux-x64/nsys"));
        systems.chain(toolkits).chain(bundled).find(|p| is_program(p))
    })
}

/// Whether this is a file that somebody may execute.
fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// Folders of `root` whose name starts with `start`, the newest version first.
fn folders(root: impl AsRef<Path>, start: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten().map(|e| e.path()).filter(|p| p.is_dir());
    let mut found: Vec<_> =
        entries.filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(start))).collect();
    let version = |path: &PathBuf| -> Vec<u64> {
        let name = path.to_string_lossy().into_owned();
        name.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
    };
    found.sort_by_key(|path| std::cmp::Reverse((version(path), path.clone())));
    found
}

/// The program that turns raw recordings into reports lies in a folder beside that of nsys.
fn importer_beside(nsys: &Path) -> Option<PathBuf> {
    let real = nsys.canonicalize().ok()?;
    let around = real.parent()?.parent()?;
    folders(around, "").into_iter().map(|dir| dir.join("QdstrmImporter")).find(|p| p.is_file())
}

/// What nsys is asked for.
pub(crate) struct Recording<'a> {
    /// Reports are written to this name with endings of nsys' own.
    pub output: &'a Path,
    /// Record between `cuProfilerStart` and `cuProfilerStop`, a report each time; otherwise the whole run.
    pub windows: bool,
    /// `node` or `graph`.
    pub graph_trace: &'a str,
    /// Sample the GPU's counters.
    pub gpu_metrics: bool,
    /// Record who holds Python's interpreter lock, and who waits for it.
    pub gil: bool,
}

/// A report or raw recording, as it was before the run: what changes is the run's.
type Seen = Vec<(PathBuf, Option<std::time::SystemTime>, u64)>;

impl Nsys {
    /// `nsys profile` around `command`.
    pub(crate) fn call(&self, recording: &Recording<'_>, command: &Command) -> Command {
        let mut call = Command::new(&self.path);
        call.args(self.arguments(recording)).arg(command.get_program()).args(command.get_args());
        call.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        call
    }

    /// Arguments of `nsys profile` up to the command.
    fn arguments(&self, recording: &Recording<'_>) -> Vec<String> {
        let traced = if recording.gil { "cuda,nvtx,osrt,python-gil" } else { "cuda,nvtx,osrt" };
        let mut words: Vec<String> = ["profile", "-t", traced, "--sample=none", "--cpuctxsw=none"]
            .into_iter()
            .chain(["--cuda-memory-usage=true"])
            .map(String::from)
            .collect();
        words.push(format!("--cuda-graph-trace={}", recording.graph_trace));
        if recording.windows {
            words.extend(["-c", "cudaProfilerApi", "--capture-range-end=repeat"].map(String::from));
        }
        if recording.gpu_metrics {
            words.push("--gpu-metrics-devices=all".into());
        }
        words.extend(["--force-overwrite=true".into(), "-o".into(), recording.output.display().to_string()]);
        words
    }

    /// Make a `call` that writes to `output`, with the terminal passed through. Gives the exit status, which is the
    /// command's or, where nsys failed, its own, and the reports, one per window.
    pub(crate) fn profile(&self, mut call: Command, output: &Path) -> Result<(std::process::ExitStatus, Vec<PathBuf>)> {
        let before = recordings(output);
        let status = finished(&mut call).with_context(|| format!("cannot run {}", self.path.display()))?;
        let changed: Vec<PathBuf> =
            recordings(output).into_iter().filter(|now| !before.contains(now)).map(|(path, ..)| path).collect();
        let mut reports = Vec::new();
        for path in &changed {
            if path.extension().is_none_or(|e| e != "qdstrm") {
                reports.push(path.clone());
            } else if !changed.contains(&path.with_extension("nsys-rep")) {
                // nsys leaves the raw recording behind when it could not make the report of it.
                reports.push(self.import(path)?);
            }
        }
        Ok((status, reports))
    }

    /// Make a report of a raw recording.
    fn import(&self, raw: &Path) -> Result<PathBuf> {
        let report = raw.with_extension("nsys-rep");
        let Some(importer) = &self.importer else {
            bail!(
                "nsys wrote {} but no report, and there is no QdstrmImporter beside {}; {REMEDY}",
                raw.display(),
                self.path.display()
            );
        };
        let mut path = importer.parent().unwrap_or(Path::new(".")).as_os_str().to_owned();
        if let Some(set) = std::env::var_os("LD_LIBRARY_PATH").filter(|v| !v.is_empty()) {
            path.push(":");
            path.push(set);
        }
        let mut command = Command::new(importer);
        command.arg("-i").arg(raw).arg("-o").arg(&report).env("LD_LIBRARY_PATH", path);
        if report.exists() {
            std::fs::remove_file(&report).with_context(|| format!("cannot replace {}", report.display()))?;
        }
        quietly(&mut command, "making a report of a raw recording")?;
        if !report.is_file() {
            bail!("{} ended without writing {}", importer.display(), report.display());
        }
        Ok(report)
    }

    /// The call that exports a report to SQLite.
    fn export_call(&self, report: &Path, database: &Path) -> Command {
        let mut command = Command::new(&self.path);
        command.args(["export", "--type=sqlite", "--force-overwrite=true", "-o"]).arg(database).arg(report);
        command
    }

    /// Export a report to SQLite, beside it.
    pub(crate) fn export(&self, report: &Path) -> Result<PathBuf> {
        let database = report.with_extension("sqlite");
        quietly(&mut self.export_call(report, &database), "exporting SQLite")?;
        if !database.is_file() {
            bail!("`{} export` ended without writing {}", self.path.display(), database.display());
        }
        Ok(database)
    }
}

/// Whether a file is a report that only nsys reads. One that is an export under such a name is none.
pub(crate) fn is_report(path: &Path) -> bool {
    let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
    let named = ending.is_some_and(|ending| ending == "nsys-rep" || ending == "qdrep");
    let is_export = || {
        let mut head = Vec::new();
        let read = std::fs::File::open(path).and_then(|file| file.take(16).read_to_end(&mut head));
        read.is_ok() && head.starts_with(b"SQLite format 3")
    };
    named && path.is_file() && !is_export()
}

/// The SQLite export of a report, which goes when it is dropped.
pub(crate) struct Exported {
    /// The file.
    pub database: PathBuf,
    directory: PathBuf,
}

impl Exported {
    /// Exports with the first nsys found, to a directory of its own.
    pub(crate) fn of(report: &Path) -> Result<Self> {
        let shown = report.display();
        let Some(path) = search() else {
            bail!(
                "{shown} is an Nsight Systems report, which only nsys reads, and nsys was not found on {PLACES}; install \
                 Nsight Systems (package nsight-systems-cli), or run `nsys export --type sqlite {shown}` where it is \
                 installed and pass the .sqlite file"
            );
        };
        let nsys = Nsys { path, importer: None };
        let directory = make_directory().context("cannot make a directory for the export")?;
        let name = Path::new(report.file_stem().unwrap_or_default()).with_extension("sqlite");
        let exported = Self { database: directory.join(name), directory };
        output::note(&format!("exporting {shown} with {}", nsys.path.display()));
        exported.export(&nsys, report)?;
        Ok(exported)
    }

    fn export(&self, nsys: &Nsys, report: &Path) -> Result<()> {
        let said = self.directory.join("said");
        let file = std::fs::File::create(&said).with_context(|| format!("cannot write {}", said.display()))?;
        let mut call = nsys.export_call(report, &self.database);
        call.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let mut child = call.spawn().with_context(|| format!("cannot run {}", nsys.path.display()))?;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if interrupt::requested() {
                // It may have ended by itself meanwhile; then there is nothing to end.
                let _ = child.kill();
                let _ = child.wait();
                return Err(interrupt::Interrupted.into());
            }
            std::thread::sleep(TICK);
        };
        if status.success() && self.database.is_file() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&std::fs::read(&said).unwrap_or_default()).into_owned();
        let last = said.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("it said nothing");
        let ended = if status.success() { "wrote no file".to_owned() } else { format!("ended with {status}") };
        bail!("{}: `{} export` {ended}: {last}", report.display(), nsys.path.display());
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        // Litter in a directory for temporary files is no reason to fail.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Makes a directory that nobody else can read or has made before.
fn make_directory() -> std::io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let make = |number: u32| {
        let path = std::env::temp_dir().join(format!("strobe-nsys-{}-{number}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&path).map(|()| path)
    };
    let mut number = 0;
    loop {
        match make(number) {
            Err(problem) if problem.kind() == std::io::ErrorKind::AlreadyExists && number < 1000 => number += 1,
            made => return made,
        }
    }
}

/// Run to the end, which comes earlier when the user wants to stop: nsys ends the command then and makes its report, which takes
/// as long as it takes.
fn finished(call: &mut Command) -> std::io::Result<std::process::ExitStatus> {
    interrupt::hold_to_the_end();
    let mut child = call.spawn()?;
    let mut told = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if interrupt::requested() && !told {
            told = true;
            if !interrupt::is_known_to_children() {
                // SAFETY: the process is our own child and has not been waited for.
                unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
            }
        }
        std::thread::sleep(TICK);
    }
}

/// Run to the end; what it said matters only if it failed.
fn quietly(command: &mut Command, action: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command.output().with_context(|| format!("cannot run {program}"))?;
    if done.status.success() {
        return Ok(());
    }
    let mut said = String::from_utf8_lossy(&done.stderr).trim().to_string();
    let _ = write!(said, " {}", String::from_utf8_lossy(&done.stdout).trim());
    // The importer links against elfutils, which minimal installations leave out.
    let remedy = match said.split(['/', ' ', ':']).find(|word| word.starts_with("libdw") || word.starts_with("libelf"))
    {
        Some(library) => {
            format!("; install {library} (package libdw1 on Debian and Ubuntu, elfutils-libs on Fedora and RHEL)")
        }
        None => String::new(),
    };
    let shown: String = said.chars().take(600).collect();
    bail!("{action} failed: {program} ended with {}: {}{remedy}", done.status, shown.trim());
}

/// Reports and raw recordings of this name.
fn recordings(name: &Path) -> Seen {
    let described = files(name, &[".nsys-rep", ".qdstrm"]).into_iter().map(|path| {
        let facts = std::fs::metadata(&path).ok();
        (path, facts.as_ref().and_then(|m| m.modified().ok()), facts.map_or(0, |m| m.len()))
    });
    described.collect()
}

/// Files NAME, NAME.1, NAME.2 and so on with these endings, in the order of their windows.
fn files(name: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let stem = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let folder = name.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let number = |path: &Path| -> Option<u64> {
        let file = path.file_name()?.to_string_lossy().into_owned();
        let rest = file.strip_prefix(&stem)?;
        let middle = endings.iter().find_map(|ending| rest.strip_suffix(ending))?;
        if middle.is_empty() { Some(0) } else { middle.strip_prefix('.')?.parse().ok() }
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| name.with_file_name(e.file_name()));
    let mut found: Vec<_> = entries.filter_map(|path| Some((number(&path)?, path))).collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

/// A file that a recording of this name could replace.
pub(crate) fn existing(name: &Path) -> Option<PathBuf> {
    files(name, &[".nsys-rep", ".qdstrm", ".sqlite"]).into_iter().next()
}
