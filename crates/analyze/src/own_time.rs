//! Kernels that start before the one ahead of them on their stream has ended.
//!
//! With programmatic dependent launch a kernel is put on the device early and waits there. Its length then holds this
//! wait, and lengths add up to more than the time that passed. What counts as its own time begins where everything ahead
//! of it on its stream has ended.

use std::collections::HashMap;

use strobe_trace::{OpKind, Trace};

/// Traces that keep whole microseconds show neighbours overlapping by one when they do not.
const ROUNDING_NS: i64 = 1000;

/// The own time of every op; `None` when nothing overlaps on its stream, where it is the length.
pub(crate) fn own_times(trace: &Trace) -> Option<Vec<i64>> {
    let ops = &trace.ops;
    let mut last_ends: HashMap<(u32, u32, u32, u32), i64> = HashMap::new();
    let mut own: Option<Vec<i64>> = None;
    for op in (0..ops.len()).filter(|&op| ops.kind[op] == OpKind::Kernel) {
        let stream = (ops.process[op], ops.device[op], ops.context[op], ops.stream[op]);
        let (start, end) = (ops.start[op], ops.end[op]);
        let last_end = last_ends.entry(stream).or_insert(i64::MIN);
        if last_end.saturating_sub(start) > ROUNDING_NS {
            let own = own.get_or_insert_with(|| (0..ops.len()).map(|op| ops.duration(op)).collect());
            own[op] = end.saturating_sub(*last_end).max(0);
        }
        *last_end = end.max(*last_end);
    }
    own
}

#[cfg(test)]
mod tests {
    use strobe_trace::OpRow;

    use super::*;

    #[test]
    fn a_kernel_that_waits_on_the_device_counts_from_the_end_of_the_one_before() {
        let mut trace = Trace::default();
        let name = trace.strings.intern("kernel");
        let mut row = |start, end, stream| {
            trace.ops.push(OpRow { stream, ..OpRow::new(OpKind::Kernel, name, start, end) });
        };
        row(0, 10_000, 7);
        row(1_000, 16_000, 7);
        row(2_000, 17_000, 7);
        row(3_000, 9_000, 8); // another stream really runs at the same time
        row(20_000, 21_000, 7);
        row(20_500, 23_000, 7); // as near as rounding
        trace.finish();
        assert_eq!(own_times(&trace), Some(vec![10_000, 6_000, 1_000, 6_000, 1_000, 2_500]));
        let mut apart = Trace::default();
        let name = apart.strings.intern("kernel");
        apart.ops.push(OpRow::new(OpKind::Kernel, name, 0, 5));
        apart.ops.push(OpRow::new(OpKind::Kernel, name, 4, 9));
        apart.finish();
        assert_eq!(own_times(&apart), None);
    }
}
