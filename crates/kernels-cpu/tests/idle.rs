//! Workers without work take no processor time. A process of its own: other tests would be counted too.

use std::time::Duration;

use strobe_kernels_cpu::{Cpu, Tier};

#[test]
#[cfg(target_os = "linux")]
fn idle_workers_sleep() {
    let mut cpu = Cpu::new(Tier::detect(), 4);
    for _ in 0..100 {
        cpu.parallel_for(16, &|_| std::hint::black_box(()));
    }
    std::thread::sleep(Duration::from_millis(100));
    let before = processor_time();
    std::thread::sleep(Duration::from_secs(1));
    let used = processor_time() - before;
    // Three helpers that kept polling would take up to three seconds.
    assert!(used < Duration::from_millis(100), "four idle workers used {used:?} of processor time in one second");
}

/// Processor time of all threads so far.
#[cfg(target_os = "linux")]
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists, and the pointer is to a timespec.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "the process has a clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
