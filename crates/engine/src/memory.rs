//! Memory of this machine and process, as Linux tells it.

use std::fs;
use std::path::Path;

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
    Some(match cgroup_available() {
        Some(bytes) if bytes < machine => Available { bytes, limited_by_cgroup: true },
        _ => Available { bytes: machine, limited_by_cgroup: false },
    })
}

/// What the control groups of this process leave: the least over its group and all groups above it, of both versions.
fn cgroup_available() -> Option<u64> {
    const V1: [&str; 4] = ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_cache"];
    const V2: [&str; 4] = ["memory.max", "memory.current", "memory.stat", "file"];
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut least = None;
    for (controllers, path) in groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':')) {
        let (roots, [limit, used, stat, cache]): (&[&str], _) = match controllers {
            "" => (&["/sys/fs/cgroup", "/sys/fs/cgroup/unified"], V2),
            _ if controllers.split(',').any(|c| c == "memory") => (&["/sys/fs/cgroup/memory"], V1),
            _ => continue,
        };
        // Inside a container the path may be the host's; the mount's root is then our own group.
        for (root, group) in roots.iter().flat_map(|root| Path::new(path).ancestors().map(move |group| (root, group))) {
            let dir = Path::new(root).join(group.strip_prefix("/").unwrap_or(group));
            let read = |name: &str| fs::read_to_string(dir.join(name)).ok();
            let left = || left_in_group(&read(limit)?, &read(used)?, &read(stat)?, cache);
            least = least.into_iter().chain(left()).min();
        }
    }
    least
}

/// Limit less use, where pages of files (which the system takes back when it needs to) do not count as used.
fn left_in_group(limit: &str, used: &str, stat: &str, cache_field: &str) -> Option<u64> {
    let limit: u64 = limit.trim().parse().ok()?; // "max" is no limit
    let used: u64 = used.trim().parse().ok()?;
    let cache = stat.lines().filter_map(|line| line.split_once(' ')).find(|(name, _)| *name == cache_field);
    let cache: u64 = cache.and_then(|(_, bytes)| bytes.trim().parse().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

/// Bytes that can still be written where `path`, or the first directory above it that exists, lies; none where nothing can be
/// written at all, which the first write says better than a number.
pub fn free_disk(path: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::path::absolute(path).ok()?;
    let existing = path.ancestors().find(|path| path.exists())?;
    let name = std::ffi::CString::new(existing.as_os_str().as_bytes()).ok()?;
    let mut facts = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the name ends with a zero byte, and a struct of zeroes is a valid one.
    let facts = unsafe { (libc::statvfs(name.as_ptr(), facts.as_mut_ptr()) == 0).then(|| facts.assume_init())? };
    let holds_files = facts.f_flag & libc::ST_RDONLY == 0 && facts.f_blocks > 0;
    holds_files.then_some(facts.f_bavail as u64 * facts.f_frsize as u64)
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
    fn file_pages_do_not_count_as_used() {
        let stat = "anon 100\nfile 700\nfile_mapped 5\n";
        assert_eq!(super::left_in_group("1000\n", "900\n", stat, "file"), Some(800));
        assert_eq!(super::left_in_group("max\n", "900\n", stat, "file"), None);
        assert_eq!(super::left_in_group("50", "900", "", "total_cache"), Some(0));
    }

    #[test]
    fn this_process_uses_memory() {
        let (now, peak) = super::resident().unwrap();
        assert!(now > 0 && peak >= now / 2);
        let statm = std::fs::read("/proc/self/statm").unwrap();
        assert!(super::resident_from_statm(&statm).unwrap() > 0);
        assert!(super::available().unwrap().bytes <= super::total().unwrap());
    }
}
