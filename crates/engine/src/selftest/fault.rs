//! A kernel that faults must end in an error that names it. The device can't be used afterwards, so it is tried in a
//! process of its own.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use strobe_kernels_cuda::{CudaError, DevicePtr, Gpu, Launch, kernel_args};

use super::{Outcome, Rig};

const KERNEL: &str = "selftest_write_out_of_bounds";

/// Option of `strobe selftest` that makes it call [`provoke`].
pub const PROVOKE: &str = "--provoke-fault";

/// Far longer than starting takes: a process that hangs fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// Fault on GPU `index`; the error says so.
pub fn provoke(index: u32) -> Result<(), CudaError> {
    let gpu = Gpu::open(index)?;
    let function = gpu.function("selftest.cu", KERNEL)?;
    // No allocation starts this low.
    let nowhere: DevicePtr = 4096;
    // SAFETY: nothing lies there, on the GPU or in the host's memory, so nothing is written: the GPU refuses.
    unsafe { gpu.launch(function, Launch::grid(1, 32).overlapping(), kernel_args![nowhere]) }?;
    gpu.synchronize().map_err(|error| match error {
        CudaError::Driver { code, meaning, .. } => CudaError::Fault { op: format!("op {KERNEL}"), code, meaning },
        other => other,
    })
}

pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let begin = Instant::now();
    let (status, text) = match provoke_elsewhere(rig.gpu.info().index) {
        Ok(ended) => ended,
        Err(problem) => (None, problem.to_string()),
    };
    let named = text.contains(&format!("op {KERNEL} failed on the GPU"));
    let problem = match status {
        None => Some(format!("the process that faults did not end by itself: {text}")),
        Some(0) => Some("a fault went unnoticed".to_string()),
        Some(_) if !named || text.contains("panicked") => Some(format!("the fault was reported as: {text}")),
        Some(_) => None,
    };
    Ok(vec![Outcome {
        op: "fault".into(),
        case: format!("a write out of bounds, reported in {:.1} s", begin.elapsed().as_secs_f64()),
        dtype: "-".into(),
        error: 0.0,
        tolerance: 0.0,
        problem,
    }])
}

/// Exit status (none if it had to be stopped) and standard error of a process that faults.
fn provoke_elsewhere(index: u32) -> std::io::Result<(Option<i32>, String)> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["selftest", "--device", &format!("cuda:{index}"), PROVOKE])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait()?.is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let ended = child.try_wait()?.is_some();
    if !ended {
        child.kill()?;
    }
    // What it says is a line or two, which the pipe holds while it runs.
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stderr).trim().to_string();
    Ok((if ended { output.status.code() } else { None }, text))
}
