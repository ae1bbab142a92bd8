//! Finding CUDA's libraries: on the loader's path, or in the places where toolkits and Python packages put them.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::CudaError;

/// A library that is opened at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lib {
    /// `libcuda`, part of the driver.
    Driver,
    /// The run-time compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// The profiling interface.
    Cupti,
    /// Ranges for Nsight Systems.
    Nvtx,
    /// Clocks, power and utilisation.
    Nvml,
}

impl Lib {
    /// All of them.
    pub const ALL: [Lib; 6] = [Lib::Driver, Lib::Nvrtc, Lib::CublasLt, Lib::Cupti, Lib::Nvtx, Lib::Nvml];

    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self {
            Lib::Driver => "libcuda",
            Lib::Nvrtc => "libnvrtc",
            Lib::CublasLt => "libcublasLt",
            Lib::Cupti => "libcupti",
            Lib::Nvtx => "libnvtx3interop",
            Lib::Nvml => "libnvidia-ml",
        }
    }

    /// File names, the preferred one first.
    fn files(self) -> &'static [&'static str] {
        match self {
            Lib::Driver => &["libcuda.so.1", "libcuda.so"],
            Lib::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Lib::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Lib::Cupti => &["libcupti.so.13", "libcupti.so.12", "libcupti.so"],
            Lib::Nvtx => &["libnvtx3interop.so.1", "libnvtx3interop.so", "libnvToolsExt.so.1"],
            Lib::Nvml => &["libnvidia-ml.so.1", "libnvidia-ml.so"],
        }
    }

    /// What to do where it is missing, with a driver for this version of CUDA.
    fn remedy(self, driver: Option<i32>) -> String {
        let toolkit = |package| {
            format!("install it with `{}` or the CUDA toolkit, and set CUDA_HOME", pip_install(package, driver))
        };
        match self {
            Lib::Nvml => "it comes with NVIDIA's driver".into(),
            Lib::Driver => {
                "install NVIDIA's driver (for CUDA 12.4 or newer; 580 or newer for CUDA 13); all but selftest also runs with --device cpu"
                    .into()
            }
            Lib::Nvrtc => toolkit("nvidia-cuda-nvrtc"),
            Lib::CublasLt => toolkit("nvidia-cublas"),
            Lib::Cupti => toolkit("nvidia-cuda-cupti"),
            Lib::Nvtx => {
                format!("install it with `{}`, or run without NVTX ranges", pip_install("nvidia-nvtx", driver))
            }
        }
    }
}

/// The call that installs one of NVIDIA's Python packages for a driver of CUDA 12 or later. Up to CUDA 12 a package's name
/// ends in the version; from 13 on there is one for all.
pub(crate) fn pip_install(package: &str, driver: Option<i32>) -> String {
    match driver {
        Some(major @ ..=12) => format!("pip install {package}-cu{major}"),
        Some(major) => format!("pip install '{package}=={major}.*'"),
        None => format!("pip install {package}"),
    }
}

/// A library as it was found.
pub struct Found {
    lib: Lib,
    /// Full path, or the bare name when the loader found it.
    pub path: PathBuf,
    library: libloading::os::unix::Library,
}

impl Found {
    /// A symbol of it.
    ///
    /// # Safety
    /// `T` must be the function pointer type of the symbol.
    pub unsafe fn symbol<T: Copy>(&self, name: &str) -> Option<T> {
        // SAFETY: by the caller's promise; the library is never closed.
        unsafe { self.library.get::<T>(name.as_bytes()).ok().map(|s| *s) }
    }

    /// The same where it has to be there.
    ///
    /// # Safety
    /// See [`Found::symbol`].
    pub(crate) unsafe fn function<T: Copy>(&self, name: &str) -> Result<T, CudaError> {
        // SAFETY: by the caller's promise.
        unsafe { self.symbol(name) }.ok_or_else(|| CudaError::Library {
            library: self.lib.name(),
            action: format!("finding {name}"),
            code: format!("it is not in {}", self.file().display()),
        })
    }
}

impl Found {
    /// The file itself, also where the loader found it by its bare name.
    pub fn file(&self) -> PathBuf {
        if self.path.is_absolute() {
            return self.path.clone();
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let name = self.path.to_string_lossy();
        // Mapped under the name of the file that a link such as `libcuda.so.1` leads to.
        let stem = name.split(".so").next().unwrap_or(&name);
        let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
        let own =
            |path: &&Path| path.file_name().is_some_and(|f| f.to_string_lossy().starts_with(&format!("{stem}.so")));
        mapped.into_iter().find(own).map_or_else(|| self.path.clone(), Path::to_owned)
    }
}

/// Functions of a library as one struct. They are those of the file that was opened, whatever else is on the loader's path,
/// and one that is missing is an error.
macro_rules! functions {
    ($(#[$meta:meta])* $name:ident of $lib:ident { $($field:ident: fn($($argument:ty),*) -> $result:ty = $symbol:literal;)* }) => {
        $(#[$meta])*
        struct $name {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $name {
            fn get() -> Result<&'static $name, $crate::error::CudaError> {
                static FUNCTIONS: std::sync::OnceLock<$name> = std::sync::OnceLock::new();
                if let Some(known) = FUNCTIONS.get() {
                    return Ok(known);
                }
                let found = $crate::library::open($crate::library::Lib::$lib)?;
                // SAFETY: the types are those of NVIDIA's headers.
                let functions = unsafe { $name { $($field: found.function($symbol)?,)* } };
                Ok(FUNCTIONS.get_or_init(|| functions))
            }
        }
    };
}
pub(crate) use functions;

/// The library's own name of a status, as its function `namer` tells it.
pub(crate) fn status_name(found: &Found, namer: &str, status: u32) -> String {
    type Name = unsafe extern "C" fn(u32) -> *const c_char;
    // SAFETY: NVIDIA's functions that name a status have this type, and answer any number with a static text or null.
    let text = unsafe {
        let name: Option<Name> = found.symbol(namer);
        name.map(|name| name(status)).filter(|text| !text.is_null()).map(|text| CStr::from_ptr(text))
    };
    text.map_or_else(|| format!("status {status}"), |text| text.to_string_lossy().into_owned())
}

/// The version of a library, in words; `None` where it can't be asked or is not there.
pub fn version(lib: Lib) -> Option<String> {
    let found = open(lib).ok()?;
    // SAFETY: each type is that of the function in NVIDIA's headers; pointers are to locals that outlive the calls.
    unsafe {
        let by_pointer = |name: &str| -> Option<i32> {
            let ask: unsafe extern "C" fn(*mut i32) -> i32 = found.symbol(name)?;
            let mut version = 0;
            (ask(&mut version) == 0).then_some(version)
        };
        match lib {
            Lib::Driver => by_pointer("cuDriverGetVersion").map(|v| format!("CUDA {}.{}", v / 1000, v % 1000 / 10)),
            Lib::Nvrtc => crate::compile::nvrtc_version().ok().map(|(major, minor)| format!("{major}.{minor}")),
            Lib::CublasLt => {
                let ask: unsafe extern "C" fn() -> usize = found.symbol("cublasLtGetVersion")?;
                let v = ask();
                Some(format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100))
            }
            Lib::Cupti => {
                // Without a driver its every call recurses until the stack is used up.
                open(Lib::Driver).ok()?;
                by_pointer("cuptiGetVersion").map(|v| match v {
                    ..10_000 => format!("API version {v}"), // it counted up from 1 until CUDA 12.9
                    _ => format!("{}.{}", v / 10_000, v / 100 % 100),
                })
            }
            Lib::Nvtx => None,
            Lib::Nvml => {
                let start: unsafe extern "C" fn() -> i32 = found.symbol("nvmlInit_v2")?;
                let stop: unsafe extern "C" fn() -> i32 = found.symbol("nvmlShutdown")?;
                let ask: unsafe extern "C" fn(*mut u8, u32) -> i32 = found.symbol("nvmlSystemGetDriverVersion")?;
                let mut text = [0u8; 80];
                if start() != 0 {
                    return None;
                }
                let known = ask(text.as_mut_ptr(), text.len() as u32) == 0;
                stop();
                let end = text.iter().position(|b| *b == 0)?;
                known.then(|| format!("driver {}", String::from_utf8_lossy(&text[..end])))
            }
        }
    }
}

/// Names a CUDA toolkit, or an unpacked wheel of one of its libraries, whose libraries are to be used.
pub const CUDA_PATH_VARIABLE: &str = "STROBE_CUDA_PATH";

/// What that variable names.
fn named_path() -> Option<PathBuf> {
    std::env::var_os(CUDA_PATH_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// Refuses a path that is not there: what was named must not be passed over in silence.
pub(crate) fn check_named_path() -> Result<(), CudaError> {
    match named_path().filter(|path| !path.is_dir()) {
        Some(path) => Err(CudaError::NamedPath { variable: CUDA_PATH_VARIABLE, path }),
        None => Ok(()),
    }
}

/// Variables that name a CUDA toolkit.
const TOOLKIT_VARIABLES: [&str; 3] = [CUDA_PATH_VARIABLE, "CUDA_HOME", "CUDA_PATH"];

/// Open `lib` once for the whole process. Symbols become global, so that libraries which open it by its bare name find
/// the same copy.
pub fn open(lib: Lib) -> Result<&'static Found, CudaError> {
    static OPENED: [OnceLock<Result<Found, Vec<String>>>; Lib::ALL.len()] = [const { OnceLock::new() }; Lib::ALL.len()];
    let opened = OPENED[lib as usize].get_or_init(|| search(lib)).as_ref();
    let remedy = || lib.remedy(if lib == Lib::Driver { None } else { driver_major() });
    opened.map_err(|broken| match broken.is_empty() {
        true => CudaError::LibraryMissing {
            library: lib.name(),
            names: lib.files().join(", "),
            places: searched(),
            remedy: remedy(),
        },
        false => CudaError::LibraryBroken { library: lib.name(), problems: broken.join("; "), remedy: remedy() },
    })
}

/// Where is searched, in words, with the directories that were named and are not there.
pub fn searched() -> String {
    let places = places().into_iter().map(|place| place.display().to_string());
    let named = TOOLKIT_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    let gone = named
        .filter(|(_, value)| !value.is_empty() && !Path::new(value).is_dir())
        .map(|(name, value)| format!("{name}={}, which is no directory", value.to_string_lossy()));
    places.chain(gone).collect::<Vec<_>>().join(", ")
}

/// Files that are there and can't be loaded are named with the reason where none can.
fn search(lib: Lib) -> Result<Found, Vec<String>> {
    let named = named_path();
    let driver_major = || if lib == Lib::Driver { None } else { driver_major() };
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    // SAFETY: opening a library runs its code. Whoever sets the loader's path or names a directory vouches for the libraries in it,
    // as for those of any program; strobe searches nowhere else but where CUDA and Python install theirs.
    let try_open = |path: &Path| unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) };
    let mut broken = Vec::new();
    let mut try_open = |path: &Path| {
        if lib == Lib::Nvrtc {
            // NVRTC opens its other half by its bare name, which a directory off the loader's path does not answer.
            builtins_beside(path).iter().filter_map(|half| try_open(half).ok()).for_each(std::mem::forget);
        }
        let opened = try_open(path);
        if let Err(problem) = &opened {
            let problem = why(problem);
            // Names that the loader does not find are nothing to tell; a library that it misses for one that it found is.
            let absent = problem.starts_with(&*path.to_string_lossy()) && problem.contains("No such file");
            if path.is_absolute() || !absent {
                broken.push(problem);
            }
        }
        opened.ok()
    };
    let bare = lib.files().iter().map(PathBuf::from);
    let full = places().into_iter().flat_map(|place| lib.files().iter().map(move |file| place.join(file)));
    // A directory that the user named goes before the loader's path.
    let (first, rest): (Vec<_>, Vec<_>) =
        full.filter(|path| path.exists()).partition(|path| named.as_ref().is_some_and(|dir| path.starts_with(dir)));
    let mut others: Vec<PathBuf> = bare.chain(rest).collect();
    if driver_major().is_some_and(|major| major < 13) {
        // What is made for CUDA 13 need not run on a driver before it, so it is the last resort.
        others.sort_by_key(|path| path.to_string_lossy().ends_with(".so.13"));
    }
    let found =
        first.into_iter().chain(others).find_map(|path| try_open(&path).map(|library| Found { lib, path, library }));
    found.ok_or(broken)
}

/// The version of CUDA that the driver is for, 12 or 13; `None` without a driver.
pub(crate) fn driver_major() -> Option<i32> {
    // SAFETY: the type is that of the function in NVIDIA's headers.
    let ask: unsafe extern "C" fn(*mut i32) -> i32 = unsafe { open(Lib::Driver).ok()?.symbol("cuDriverGetVersion")? };
    let mut version = 0;
    // SAFETY: a local.
    (unsafe { ask(&mut version) } == 0).then_some(version / 1000)
}

/// What the loader said.
fn why(problem: &libloading::Error) -> String {
    use std::error::Error;
    problem.source().map_or_else(|| problem.to_string(), |source| source.to_string())
}

/// The files of NVRTC's other half in the directory of `path`.
fn builtins_beside(path: &Path) -> Vec<PathBuf> {
    let directory = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let files = directory.and_then(|dir| std::fs::read_dir(dir).ok()).into_iter().flatten().flatten();
    files
        .map(|file| file.path())
        .filter(|file| file.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnvrtc-builtins.so")))
        .collect()
}

/// Directories that are searched besides the loader's path; only those that exist.
pub fn places() -> Vec<PathBuf> {
    let mut places = Vec::new();
    let mut toolkits: Vec<PathBuf> = TOOLKIT_VARIABLES.iter().filter_map(std::env::var_os).map(PathBuf::from).collect();
    let mut installed: Vec<PathBuf> = std::fs::read_dir("/usr/local")
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("cuda")))
        .collect();
    installed.sort();
    toolkits.append(&mut installed);
    for toolkit in toolkits {
        places.push(toolkit.join("lib64"));
        places.push(toolkit.join("lib"));
        places.push(toolkit.join("extras/CUPTI/lib64"));
        places.push(toolkit.join("targets/x86_64-linux/lib"));
    }
    places.push(PathBuf::from("/usr/lib/x86_64-linux-gnu"));
    for site in python_packages() {
        for package in ["cu13", "cuda_nvrtc", "cublas", "cuda_cupti", "nvtx"] {
            places.push(site.join("nvidia").join(package).join("lib"));
        }
    }
    places.retain(|p| p.is_dir());
    places
}

/// `site-packages` of an active virtual environment and of the system's Pythons.
fn python_packages() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    // A virtual environment's python on PATH, even when it was not activated.
    let path = std::env::var_os("PATH").unwrap_or_default();
    roots.extend(
        std::env::split_paths(&path).filter(|p| p.ends_with("bin")).filter_map(|p| Some(p.parent()?.to_owned())),
    );
    let versions = |root: &PathBuf| {
        let entries = std::fs::read_dir(root.join("lib")).into_iter().flatten().flatten().map(|e| e.path());
        entries
            .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")))
            .collect::<Vec<_>>()
    };
    let mut found: Vec<PathBuf> = Vec::new();
    for python in roots.iter().flat_map(versions) {
        for kind in ["site-packages", "dist-packages"] {
            let site = python.join(kind);
            if site.is_dir() && !found.contains(&site) {
                found.push(site);
            }
        }
    }
    found
}
