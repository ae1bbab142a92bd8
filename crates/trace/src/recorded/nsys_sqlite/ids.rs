//! Nsight Systems' 64-bit ids: bits 56-63 hardware, 48-55 virtual machine, 24-47 process, 0-23 thread.

use crate::recorded::MAX_ID;

/// The one virtual machine of a recording, as in nsys' own exports.
pub(super) const GLOBAL_VID: i64 = 1 << 48;

pub(super) fn global_pid(pid: u32) -> i64 {
    GLOBAL_VID | (i64::from(pid & MAX_ID) << 24)
}

pub(super) fn global_tid(pid: u32, tid: u32) -> i64 {
    global_pid(pid) | i64::from(tid & MAX_ID)
}

pub(super) fn tid_of(global: i64) -> u32 {
    (global & i64::from(MAX_ID)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From a real export: the main thread of process 912.
    #[test]
    fn a_real_export_uses_the_same_layout() {
        let real = 281_490_277_532_560_i64;
        let pid = ((real >> 24) & 0xFF_FFFF) as u32;
        assert_eq!(global_pid(pid), 281_490_277_531_648);
        assert_eq!(global_tid(pid, tid_of(real)), real);
    }
}
