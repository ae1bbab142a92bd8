//! The engine's clock: nanoseconds since it was made, never going back, with its place in calendar time.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A monotonic clock with a known origin.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    utc_ns: u64,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Clock {
        let utc = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clock { origin: Instant::now(), utc_ns: utc.as_nanos() as u64 }
    }

    /// Nanoseconds since the start.
    pub fn now(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    /// Calendar time of the start, nanoseconds since 1970 (UTC).
    pub fn utc_ns(&self) -> u64 {
        self.utc_ns
    }
}
