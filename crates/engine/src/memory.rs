//! Memory of this machine and process, as Linux tells it.

use std::fs;

/// What a process may still use, and what limits it.
#[derive(Clone, Copy, Debug)]
pub struct Available {
    /// Bytes that can be taken without swapping.
    pub bytes: u64,
    /// Whether a control group sets the limit rather than the machine.
    pub limited_by_cgroup: bool,
}

fn field_kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Memory that can still be taken; `None` where it can't be found out.
pub fn available() -> Option<Available> {
    let machine = field_kib(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    let group = read("memory.max").zip(read("memory.current")).map(|(max, used)| max.saturating_sub(used));
    Some(match group {
        Some(bytes) if bytes < machine => Available { bytes, limited_by_cgroup: true },
        _ => Available { bytes: machine, limited_by_cgroup: false },
    })
}

/// Memory of the machine.
pub fn total() -> Option<u64> {
    field_kib(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

/// Resident memory of this process: now and at its highest.
pub fn resident() -> Option<(u64, u64)> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    Some((field_kib(&status, "VmRSS:")?, field_kib(&status, "VmHWM:")?))
}

/// Resident memory from the content of `/proc/self/statm`. The step loop reads that file on every iteration, so this
/// does not allocate.
pub fn resident_from_statm(text: &[u8]) -> Option<u64> {
    let pages = std::str::from_utf8(text).ok()?.split(' ').nth(1)?.parse::<u64>().ok()?;
    Some(pages * page_size())
}

fn page_size() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_process_uses_memory() {
        let (now, peak) = super::resident().unwrap();
        assert!(now > 0 && peak >= now / 2);
        let statm = std::fs::read("/proc/self/statm").unwrap();
        assert!(super::resident_from_statm(&statm).unwrap() > 0);
        assert!(super::available().unwrap().bytes <= super::total().unwrap());
    }
}
