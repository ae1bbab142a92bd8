//! Nsight Systems' 64-bit ids: bits 56-63 hardware, 48-55 virtual machine, 24-47 process, 0-23 thread.

use std::collections::HashSet;

/// The largest process or thread id that a global id can hold.
pub(super) const MAX_ID: i64 = 0xFF_FFFF;

/// The one virtual machine of a written trace, as in nsys' own exports.
pub(super) const GLOBAL_VID: i64 = 1 << 48;

/// The process part of a global id, hardware and virtual machine included.
pub(super) fn process_of(global: i64) -> i64 {
    global & !MAX_ID
}

/// Hardware and virtual machine of a global id.
pub(super) fn machine_of(global: i64) -> i64 {
    global >> 48
}

pub(super) fn pid_of(global: i64) -> i64 {
    (global >> 24) & MAX_ID
}

pub(super) fn tid_of(global: i64) -> i64 {
    global & MAX_ID
}

/// The global id of a process of a written trace.
pub(super) fn global_pid(pid: i64) -> i64 {
    GLOBAL_VID | ((pid & MAX_ID) << 24)
}

/// Numbers that fit into a global id, each given once.
#[derive(Default)]
pub(super) struct Numbers {
    taken: HashSet<i64>,
    /// All below are taken.
    next: i64,
}

impl Numbers {
    /// The wanted number if it fits and nobody has it, else the lowest that nobody has.
    pub(super) fn free(&mut self, wanted: i64) -> i64 {
        if (0..=MAX_ID).contains(&wanted) && self.taken.insert(wanted) {
            return wanted;
        }
        while !self.taken.insert(self.next) {
            self.next += 1;
        }
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From a real export: a thread of process 912.
    #[test]
    fn a_real_export_uses_the_same_layout() {
        let real = 281_490_277_532_560_i64;
        assert_eq!((pid_of(real), tid_of(real)), (912, 912));
        assert_eq!(process_of(real), 281_490_277_531_648);
        assert_eq!(global_pid(912), 281_490_277_531_648);
        assert_eq!(machine_of(real), 1);
    }

    /// Hardware ids of 128 and more make the number negative.
    #[test]
    fn negative_ids_keep_their_parts_apart() {
        let global = (0x81_02_i64 << 48) | (7 << 24) | 9;
        assert_eq!((pid_of(global), tid_of(global)), (7, 9));
        assert_ne!(machine_of(global), machine_of(global_pid(7)));
        assert_ne!(process_of(global), global_pid(7));
    }
}
