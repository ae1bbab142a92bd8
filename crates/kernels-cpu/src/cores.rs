//! How many workers are worth having.

/// Physical cores that this process may run on, and no more than it is granted time for. Two threads of one core share its
/// vector units and gain nothing on kernels that keep them busy, but contend where they wait for each other.
pub fn physical_cores() -> usize {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    match distinct_cores() {
        0 => threads,
        cores => cores.min(threads),
    }
}

/// Cores behind the processors of this process's affinity mask; 0 when they cannot be told.
#[cfg(target_os = "linux")]
fn distinct_cores() -> usize {
    // SAFETY: a mask of zeroes is an empty one, and the kernel writes no more than its size.
    let mask = unsafe {
        let mut mask: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut mask) != 0 {
            return 0;
        }
        mask
    };
    let siblings = |cpu: usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        // Without a topology, each processor is a core.
        std::fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string())
    };
    let mut cores: Vec<String> = (0..libc::CPU_SETSIZE as usize)
        // SAFETY: below the size of the mask.
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &mask) })
        .map(siblings)
        .collect();
    cores.sort_unstable();
    cores.dedup();
    cores.len()
}

#[cfg(not(target_os = "linux"))]
fn distinct_cores() -> usize {
    0
}

#[cfg(test)]
mod tests {
    #[test]
    fn there_is_a_core_and_no_more_than_threads() {
        let cores = super::physical_cores();
        assert!(cores >= 1 && cores <= std::thread::available_parallelism().map_or(1, |n| n.get()));
    }
}
