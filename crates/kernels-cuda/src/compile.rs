//! From `.cu` text to machine code for one architecture, with a cache on disk.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use cudarc::{driver::sys, nvrtc::sys as nvrtc};

use crate::code_cache::CodeCache;
use crate::driver;
use crate::error::{CudaError, check};
use crate::gpu::DeviceInfo;
use crate::library;
use crate::module::{KernelSource, PRELUDE, SOURCES};

/// An architecture that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch(u32);

/// Every architecture that is supported.
pub const SUPPORTED_ARCHS: [Arch; 4] = [Arch(80), Arch(86), Arch(89), Arch(90)];

impl Arch {
    /// The architecture of a device. A newer minor version runs the code of an older one.
    pub fn of(info: &DeviceInfo) -> Result<Arch, CudaError> {
        let (major, minor) = info.compute_capability;
        let fits = |arch: &&Arch| (arch.0 / 10) as i32 == major && (arch.0 % 10) as i32 <= minor;
        SUPPORTED_ARCHS.iter().rev().find(fits).copied().ok_or_else(|| CudaError::Architecture {
            name: info.name.clone(),
            major,
            minor,
            supported: SUPPORTED_ARCHS.map(|a| a.name()).join(", "),
        })
    }

    /// 90 for sm_90a.
    pub fn number(self) -> u32 {
        self.0
    }

    /// As the compiler names it; Hopper's own instructions need the `a`.
    pub fn name(self) -> String {
        format!("sm_{}{}", self.0, if self.0 == 90 { "a" } else { "" })
    }
}

/// What loading the kernels cost.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct CacheReport {
    /// Where machine code is kept; absent where there is no place for it.
    pub directory: Option<PathBuf>,
    /// Files compiled by this process.
    pub compiled: usize,
    /// Files found in the cache.
    pub cached: usize,
    /// Wall time of compiling and loading.
    pub milliseconds: f64,
    /// The same of earlier loads in this process that compiled something: to measure a GPU it is opened before the engine
    /// opens it.
    pub earlier_milliseconds: f64,
    /// Why what was compiled is not in the cache, where it is not: every start compiles it again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_kept: Option<String>,
}

/// Files that were compiled by this process, and the milliseconds of the loads that did.
static COMPILED: Mutex<(usize, f64)> = Mutex::new((0, 0.0));

/// What the compiler's functions return. A newer one may return numbers that no header has yet, so it is no enumeration here.
type Status = u32;
const SUCCESS: Status = nvrtc::nvrtcResult::NVRTC_SUCCESS as Status;

library::functions! {
    /// What is called of NVRTC.
    Functions of Nvrtc {
        version: fn(*mut c_int, *mut c_int) -> Status = "nvrtcVersion";
        create_program: fn(
            *mut nvrtc::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        ) -> Status = "nvrtcCreateProgram";
        compile_program: fn(nvrtc::nvrtcProgram, c_int, *const *const c_char) -> Status
            = "nvrtcCompileProgram";
        destroy_program: fn(*mut nvrtc::nvrtcProgram) -> Status = "nvrtcDestroyProgram";
        get_cubin_size: fn(nvrtc::nvrtcProgram, *mut usize) -> Status = "nvrtcGetCUBINSize";
        get_cubin: fn(nvrtc::nvrtcProgram, *mut c_char) -> Status = "nvrtcGetCUBIN";
        get_program_log_size: fn(nvrtc::nvrtcProgram, *mut usize) -> Status = "nvrtcGetProgramLogSize";
        get_program_log: fn(nvrtc::nvrtcProgram, *mut c_char) -> Status = "nvrtcGetProgramLog";
    }
}

/// NVRTC's version.
pub fn nvrtc_version() -> Result<(i32, i32), CudaError> {
    let api = Functions::get()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: locals.
    check_nvrtc(unsafe { (api.version)(&mut major, &mut minor) }, "asking for its version")?;
    Ok((major, minor))
}

fn check_nvrtc(status: Status, action: &str) -> Result<(), CudaError> {
    if status == SUCCESS {
        return Ok(());
    }
    let code = library::status_name(library::open(library::Lib::Nvrtc)?, "nvrtcGetErrorString", status);
    Err(CudaError::Library { library: "libnvrtc", action: action.into(), code })
}

fn options(arch: Arch) -> Vec<String> {
    vec![
        format!("--gpu-architecture={}", arch.name()),
        "--std=c++17".into(),
        "-default-device".into(),
        "-lineinfo".into(),
        "--diag-suppress=177".into(), // the prelude offers more than each file uses
        format!("-DSTROBE_ARCH={}", arch.0),
    ]
}

/// Compile one kernel file to machine code; needs NVRTC and no GPU.
pub fn compile_cubin(source: &KernelSource, arch: Arch) -> Result<Vec<u8>, CudaError> {
    let (api, version) = (Functions::get()?, nvrtc_version()?);
    let text = format!("{PRELUDE}\n#line 1 \"{}\"\n{}", source.file, source.text);
    let as_c = |text: &str| CString::new(text).map_err(|_| CudaError::Unsupported("a zero byte in a kernel".into()));
    let (text, name) = (as_c(&text)?, as_c(source.file)?);
    let options = options(arch);
    let given = options.iter().map(|o| as_c(o)).collect::<Result<Vec<_>, _>>()?;
    let pointers: Vec<*const c_char> = given.iter().map(|o| o.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    // SAFETY: C strings that outlive the calls; buffers of the sizes that the library names.
    unsafe {
        let null = std::ptr::null;
        let made = (api.create_program)(&mut program, text.as_ptr(), name.as_ptr(), 0, null(), null());
        check_nvrtc(made, "making a program")?;
        let compiled = (api.compile_program)(program, pointers.len() as i32, pointers.as_ptr());
        let result = if compiled == SUCCESS {
            read_cubin(api, program)
        } else {
            Err(CudaError::Compile {
                file: source.file.to_string(),
                arch: arch.name(),
                version: format!("{}.{}", version.0, version.1),
                options: options.join(" "),
                log: read_log(api, program),
            })
        };
        (api.destroy_program)(&mut program);
        result
    }
}

/// # Safety
/// `program` must be live and compiled.
unsafe fn read_cubin(api: &Functions, program: nvrtc::nvrtcProgram) -> Result<Vec<u8>, CudaError> {
    let mut size = 0;
    // SAFETY: the buffer has the size that the library names.
    unsafe {
        check_nvrtc((api.get_cubin_size)(program, &mut size), "asking for the size of machine code")?;
        let mut cubin = vec![0u8; size];
        check_nvrtc((api.get_cubin)(program, cubin.as_mut_ptr().cast()), "reading machine code")?;
        Ok(cubin)
    }
}

/// # Safety
/// `program` must be live.
unsafe fn read_log(api: &Functions, program: nvrtc::nvrtcProgram) -> String {
    let mut size = 0;
    // SAFETY: the buffer has the size that the library names.
    unsafe {
        if (api.get_program_log_size)(program, &mut size) != SUCCESS {
            return "no log".into();
        }
        let mut log = vec![0u8; size];
        if (api.get_program_log)(program, log.as_mut_ptr().cast()) != SUCCESS {
            return "no log".into();
        }
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_string()
    }
}

/// Where machine code is kept: under `$STROBE_CACHE_DIR`, else in the user's cache directory.
pub fn kernel_cache_dir() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let dir = from("STROBE_CACHE_DIR")
        .or_else(|| Some(from("XDG_CACHE_HOME")?.join("strobe")))
        .or_else(|| Some(from("HOME")?.join(".cache/strobe")))?;
    Some(dir.join("kernels"))
}

/// The same, made if need be; else why it can't be used.
fn cache_dir() -> Result<PathBuf, String> {
    let dir = kernel_cache_dir().ok_or("none of STROBE_CACHE_DIR, XDG_CACHE_HOME and HOME is set")?;
    match std::fs::create_dir_all(&dir) {
        Ok(()) => Ok(dir),
        Err(problem) => Err(format!("{}: {problem}", dir.display())),
    }
}

/// Where the machine code of `source` is kept.
fn cache_of<'a>(source: &KernelSource, arch: Arch, dir: &'a Path) -> CodeCache<'a> {
    let name = format!("{}-{}", source.file.trim_end_matches(".cu"), arch.name());
    CodeCache::new(dir, &name, &[PRELUDE, source.text, &options(arch).join(" ")])
}

/// The kernel files of an architecture.
fn sources_of(arch: Arch) -> Vec<&'static KernelSource> {
    SOURCES.iter().filter(|s| s.min_arch <= arch.0).collect()
}

/// The newest major version of a compiler whose code is sure to run on the driver.
fn newest_code() -> i32 {
    library::driver_major().unwrap_or(i32::MAX)
}

/// Whether kernels can be had: there is a compiler, or the cache holds all of them.
pub fn kernels_at_hand(arch: Arch) -> Result<(), CudaError> {
    let Err(missing) = library::open(library::Lib::Nvrtc) else { return Ok(()) };
    let has = |dir: &Path, source: &KernelSource| cache_of(source, arch, dir).find_any(newest_code()).is_some();
    let kept = |dir: PathBuf| sources_of(arch).iter().all(|source| has(&dir, source));
    if kernel_cache_dir().is_some_and(kept) { Ok(()) } else { Err(missing) }
}

/// Where machine code comes from.
#[derive(Debug)]
pub enum Origin {
    /// The cache.
    Cache,
    /// The compiler, and the cache has it now unless there is none.
    Compiler,
    /// The compiler, and the cache could not take it, for this reason.
    CompilerOnly(String),
}

/// Machine code of `source`, from the cache in `dir` when it is there.
pub fn cubin(source: &KernelSource, arch: Arch, dir: Option<&Path>) -> Result<(Vec<u8>, Origin), CudaError> {
    let compiler = nvrtc_version().ok().map(|(major, minor)| format!("{major}.{minor}"));
    let cache = dir.map(|dir| cache_of(source, arch, dir));
    let found = cache.as_ref().and_then(|cache| match &compiler {
        Some(compiler) => cache.find(compiler),
        None => cache.find_any(newest_code()),
    });
    if let Some(code) = found {
        return Ok((code, Origin::Cache));
    }
    let code = compile_cubin(source, arch)?;
    let kept = match (cache, compiler) {
        (Some(cache), Some(compiler)) => cache.keep(&compiler, &code),
        _ => Ok(()),
    };
    let origin = match (kept, dir) {
        (Err(problem), Some(dir)) => Origin::CompilerOnly(format!("{}: {problem}", dir.display())),
        _ => Origin::Compiler,
    };
    Ok((code, origin))
}

/// Why machine code may not load: what a newer compiler made need not run on an older driver.
fn newer_than(driver_cuda: i32) -> String {
    match nvrtc_version() {
        Ok((major, minor)) if major > driver_cuda / 1000 => format!(
            " (NVRTC {major}.{minor} is newer than the driver, which is for CUDA {}.{}: update the driver, or `{}`)",
            driver_cuda / 1000,
            driver_cuda % 1000 / 10,
            library::pip_install("nvidia-cuda-nvrtc", Some(driver_cuda / 1000))
        ),
        _ => String::new(),
    }
}

/// Load every kernel file into the current context, compiling in parallel what the cache does not hold. `modules` gets what was
/// loaded, also where a file could not be.
pub(crate) fn load_modules(
    modules: &mut HashMap<&'static str, sys::CUmodule>,
    arch: Arch,
    driver_cuda: i32,
    go_on: &(dyn Fn() -> bool + Sync),
) -> Result<CacheReport, CudaError> {
    let begin = Instant::now();
    let (directory, mut not_kept) = match cache_dir() {
        Ok(directory) => (Some(directory), None),
        Err(problem) => (None, Some(problem)),
    };
    let wanted = sources_of(arch);
    let next = Mutex::new(0);
    let results = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(wanted.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = {
                        let mut next = next.lock().unwrap_or_else(|e| e.into_inner());
                        *next += 1;
                        *next - 1
                    };
                    let Some(source) = wanted.get(index) else { return };
                    let result = match go_on() {
                        true => cubin(source, arch, directory.as_deref()),
                        false => Err(CudaError::Interrupted),
                    };
                    results.lock().unwrap_or_else(|e| e.into_inner()).push((source.file, result));
                }
            });
        }
    });
    let (mut compiled, mut cached) = (0, 0);
    for (file, result) in results.into_inner().unwrap_or_else(|e| e.into_inner()) {
        let (bytes, origin) = result?;
        match origin {
            Origin::Cache => cached += 1,
            Origin::Compiler => compiled += 1,
            Origin::CompilerOnly(problem) => {
                compiled += 1;
                not_kept = Some(problem);
            }
        }
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is whole machine code, as it was compiled, or with the fingerprint that this user's cache gave it; the
        // context is current.
        check(unsafe { driver::cuModuleLoadData(&mut module, bytes.as_ptr().cast()) }, || {
            format!("loading {file}{}", newer_than(driver_cuda))
        })?;
        modules.insert(file, module);
    }
    let milliseconds = begin.elapsed().as_secs_f64() * 1e3;
    let mut before = COMPILED.lock().unwrap_or_else(|e| e.into_inner());
    let earlier_milliseconds = before.1;
    if compiled > 0 {
        *before = (before.0 + compiled, before.1 + milliseconds);
    }
    let total = compiled + cached;
    let compiled = before.0.min(total);
    let cached = total - compiled;
    Ok(CacheReport { directory, compiled, cached, milliseconds, earlier_milliseconds, not_kept })
}
