//! Texts of `/proc` and of control groups that say what a process had to wait for. Pure, and hard to surprise: what does
//! not read as expected is not known.

/// Nanoseconds that a thread was ready to run and waited for a CPU: the second number of its `schedstat`.
pub fn run_delay_ns(schedstat: &[u8]) -> Option<u64> {
    let mut numbers = std::str::from_utf8(schedstat).ok()?.split_ascii_whitespace();
    numbers.next()?.parse::<u64>().ok()?;
    numbers.next()?.parse().ok()
}

/// What `/proc/stat` says of all CPUs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTicks {
    /// Time in which the hypervisor ran something else, in clock ticks.
    pub steal: u64,
    /// CPUs that are listed.
    pub cpus: u64,
}

/// Steal time from `/proc/stat`; `None` from a kernel that does not tell it.
pub fn cpu_ticks(stat: &str) -> Option<CpuTicks> {
    let mut lines = stat.lines();
    let mut all = lines.next()?.split_ascii_whitespace();
    if all.next()? != "cpu" {
        return None;
    }
    // user nice system idle iowait irq softirq steal
    let steal = all.nth(7)?.parse().ok()?;
    let is_cpu = |line: &&str| {
        let number = line.strip_prefix("cpu").and_then(|rest| rest.split(' ').next());
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    let cpus = lines.take_while(is_cpu).count() as u64;
    (cpus > 0).then_some(CpuTicks { steal, cpus })
}

/// How a control group held its threads back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttling {
    /// Periods in which its quota was used up.
    pub periods: u64,
    /// Time it stood still for that, summed over CPUs.
    pub ns: u64,
}

/// Throttling from a group's `cpu.stat`, of version 2 (`throttled_usec`) or 1 (`throttled_time`, in nanoseconds). `None`
/// for a group without a CPU controller.
pub fn throttling(cpu_stat: &str) -> Option<Throttling> {
    let field = |name: &str| {
        let mut pairs = cpu_stat.lines().filter_map(|line| line.split_once(' '));
        pairs.find(|(key, _)| *key == name)?.1.trim().parse::<u64>().ok()
    };
    let ns = field("throttled_usec").and_then(|us| us.checked_mul(1000)).or_else(|| field("throttled_time"))?;
    Some(Throttling { periods: field("nr_throttled")?, ns })
}

/// Directories whose `cpu.stat` may speak of this process, by `/proc/self/cgroup`: of its group and of all groups above it.
/// Inside a container the path may be the host's; the mount's root is then its own group.
pub fn cpu_groups(cgroup: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (controllers, path) in cgroup.lines().filter_map(|line| line.split_once(':')?.1.split_once(':')) {
        let roots: &[&str] = match controllers {
            "" => &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
            _ if controllers.split(',').any(|name| name == "cpu") => {
                &["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"]
            }
            _ => continue,
        };
        // A path that leaves its root is of no group that this process can see.
        let path = if path.starts_with('/') && !path.split('/').any(|part| part == "..") { path } else { "/" };
        for root in roots {
            for group in std::path::Path::new(path).ancestors() {
                let group = group.to_string_lossy();
                found.push(format!("{root}{}", group.trim_end_matches('/')));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_number_of_schedstat_is_the_wait() {
        assert_eq!(run_delay_ns(b"112567 4200 17\n"), Some(4200));
        assert_eq!(run_delay_ns(b"0 0 1"), Some(0));
        for bad in
            [&b""[..], b"\n", b"17", b"17 x 3", b"x 17 3", b"-1 -1 -1", b"1 99999999999999999999999 1", b"\xff 1"]
        {
            assert_eq!(run_delay_ns(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn steal_is_the_eighth_field_and_cpus_are_counted() {
        let stat = "cpu  55670 0 6351 78597 188 0 15 160 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\ncpu1 1 2 3 4 5 6 7 8 9 10\nintr 5\ncpu9 1\n";
        assert_eq!(cpu_ticks(stat), Some(CpuTicks { steal: 160, cpus: 2 }));
        assert_eq!(cpu_ticks("cpu  1 2 3 4 5 6 7\ncpu0 1 2 3 4 5 6 7\n"), None, "a kernel before 2.6.11");
        for bad in ["", "cpu", "intr 1 2 3 4 5 6 7 8", "cpu 1 2 3 4 5 6 7 x\ncpu0 1\n", "cpu 1 2 3 4 5 6 7 8\ncpux 1\n"]
        {
            assert_eq!(cpu_ticks(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn throttling_is_read_from_both_versions() {
        let v2 = "usage_usec 9\nuser_usec 8\nnr_periods 40\nnr_throttled 3\nthrottled_usec 800000\n";
        assert_eq!(throttling(v2), Some(Throttling { periods: 3, ns: 800_000_000 }));
        let v1 = "nr_periods 40\nnr_throttled 3\nthrottled_time 800000000\n";
        assert_eq!(throttling(v1), throttling(v2));
        for bad in
            ["", "usage_usec 9\n", "nr_throttled 3\n", "nr_throttled x\nthrottled_time 5\n", "throttled_usec 5\n"]
        {
            assert_eq!(throttling(bad), None, "{bad:?}");
        }
        let huge = "nr_throttled 1\nthrottled_usec 18446744073709551615\n";
        assert_eq!(throttling(huge), None, "more than can be nanoseconds");
    }

    #[test]
    fn groups_are_found_in_both_versions_up_to_the_root() {
        let groups = cpu_groups("9:name=systemd:/x\n2:cpuacct,cpu:/a/b\n1:cpuset:/c\n0::/d\n");
        assert!(groups.contains(&"/sys/fs/cgroup/cpu/a/b".to_string()), "{groups:?}");
        assert!(groups.contains(&"/sys/fs/cgroup/cpu".to_string()), "{groups:?}");
        assert!(groups.contains(&"/sys/fs/cgroup/d".to_string()), "{groups:?}");
        assert!(!groups.iter().any(|group| group.ends_with("/c") || group.ends_with("/x")), "{groups:?}");
        assert_eq!(cpu_groups("0::/../../etc\n"), ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]);
        assert!(cpu_groups("nonsense\n::\n:::\n").iter().all(|group| group.starts_with("/sys/fs/cgroup")));
    }
}
