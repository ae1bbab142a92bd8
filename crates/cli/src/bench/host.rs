//! The machine's part in a run, in words.

use strobe_engine::HostReadings;
use strobe_report::human;

/// What the machine did during a run, in one line. What is not known is left out, except the wait: that it is not known is
/// worth knowing.
pub(crate) fn line(host: &HostReadings) -> String {
    let count = |count: Option<u64>, one: &str, many: &str| {
        count.map(|count| format!("{} {}", human::count(count), if count == 1 { one } else { many }))
    };
    let waited = match host.cpu_wait_share() {
        Some(share) => {
            let own = match host.threads.filter(|_| host.oversubscribed()) {
                Some(threads) => format!(" ({threads} threads on {} cores wait for each other)", host.cores),
                None => String::new(),
            };
            format!("waited for a CPU {} of thread time{own}", human::percent(share))
        }
        None => "CPU wait not known".to_string(),
    };
    let disturbed =
        host.iterations_disturbed.map(|count| format!("{count} of {} iterations disturbed", host.iterations_read));
    let throttled = host.throttled_ms.filter(|ms| *ms > 0.0).map(|ms| {
        let periods = host.throttled_periods.map_or(String::new(), |periods| format!(" in {periods} periods"));
        format!("throttled by its cgroup for {}{periods}", human::ns(ms * 1e6))
    });
    let parts = [
        Some(waited),
        disturbed,
        host.steal_share.map(|share| format!("steal {}", human::percent(share))),
        throttled,
        count(host.involuntary_switches, "involuntary switch", "involuntary switches"),
        count(host.major_faults, "major fault", "major faults"),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// A warning for a run whose figures are not the engine's alone.
pub(crate) fn warning(host: &HostReadings) -> Option<String> {
    let reason = host.disturbance()?;
    Some(format!("DISTURBED RUN: {reason}; figures include that, repeat the run on a quiet machine"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_is_known() {
        let known = HostReadings {
            wall_ms: 1000.0,
            cores: 2,
            threads: Some(2),
            cpu_wait_sum_ms: Some(6.0),
            steal_share: Some(0.011),
            throttled_ms: Some(0.0),
            involuntary_switches: Some(40),
            major_faults: Some(0),
            iterations_read: 66,
            iterations_disturbed: Some(12),
            ..HostReadings::default()
        };
        assert_eq!(
            line(&known),
            "waited for a CPU 0.3 % of thread time, 12 of 66 iterations disturbed, steal 1.1 %, 40 involuntary switches, 0 major faults"
        );
        assert_eq!(warning(&known), None);
        assert_eq!(line(&HostReadings::default()), "CPU wait not known");
        let many = HostReadings { threads: Some(4), cpu_wait_sum_ms: Some(2000.0), ..known.clone() };
        assert!(
            line(&many)
                .starts_with("waited for a CPU 50.0 % of thread time (4 threads on 2 cores wait for each other)")
        );
        assert_eq!(warning(&many), None);
        let busy = HostReadings { cpu_wait_sum_ms: Some(246.0), throttled_ms: Some(800.0), ..known };
        assert!(line(&busy).contains("throttled by its cgroup for 800 ms"), "{}", line(&busy));
        let words = warning(&busy).unwrap_or_default();
        assert!(
            words.starts_with("DISTURBED RUN: its threads waited 12.3 % of the run for a CPU, throttled"),
            "{words}"
        );
    }
}
