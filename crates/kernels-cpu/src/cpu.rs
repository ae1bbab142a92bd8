//! The device: a tier, its workers and their scratch memory.

use crate::buffer::AlignedBuf;
use crate::matrix::{PANEL, pack_panel, packed_len};
use crate::pool::Pool;
use crate::quant::{QuantKind, packed_bytes, panel_bytes, quantize_panel};
use crate::quant_rows::QuantRows;
use crate::runs::RunTasks;
use crate::tier::Tier;

/// A CPU to run ops on. The calling thread is worker 0; the helpers spin for a short while after each op, then
/// sleep.
pub struct Cpu {
    pub(crate) tier: Tier,
    pub(crate) pool: Pool,
    /// Activations of one GEMM, repacked; shared by the workers.
    pub(crate) packed_rows: AlignedBuf<f32>,
    /// Activations of `linear` with a quantised weight.
    pub(crate) quant_rows: QuantRows,
    /// Private scratch of each worker.
    pub(crate) worker_scratch: Vec<AlignedBuf<f32>>,
    /// The tasks of the product that runs.
    pub(crate) run_tasks: RunTasks,
    /// What workers have summed up of parts of one attention block.
    pub(crate) partial_sums: AlignedBuf<f32>,
}

/// Enough for the attention tiles of heads up to 256 wide and for expanded weight panels, so that growing is rare.
const WORKER_SCRATCH: usize = 160 * 1024;

impl Cpu {
    /// A device of `threads` workers (at least one), `threads - 1` of which are spawned.
    ///
    /// # Panics
    /// When this machine lacks the tier.
    pub fn new(tier: Tier, threads: usize) -> Cpu {
        assert!(tier.is_available(), "this machine lacks the CPU tier {}", tier.name());
        let pool = Pool::new(threads.max(1));
        let worker_scratch = (0..pool.threads()).map(|_| AlignedBuf::zeroed(WORKER_SCRATCH)).collect();
        let (packed_rows, partial_sums) = (AlignedBuf::zeroed(0), AlignedBuf::zeroed(0));
        let (quant_rows, run_tasks) = (QuantRows::new(), RunTasks::new());
        Cpu { tier, pool, packed_rows, quant_rows, worker_scratch, run_tasks, partial_sums }
    }

    /// The tier in use.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Workers, the calling thread included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The system's numbers of the workers that are threads of their own: all but the calling one. Empty where the system
    /// does not number threads.
    pub fn helper_ids(&self) -> &[u32] {
        self.pool.helper_ids()
    }

    /// Allocates the scratch for ops of up to `max_rows` rows and `max_k` inputs now, so that they never allocate.
    pub fn reserve(&mut self, max_rows: usize, max_k: usize) {
        let rounded = crate::linear_pairs::rounded_rows_len(max_rows, max_k);
        self.reserve_packed_rows(crate::linear::packed_rows_len(max_rows, max_k).max(rounded));
    }

    pub(crate) fn reserve_packed_rows(&mut self, len: usize) {
        if self.packed_rows.len() < len {
            self.packed_rows = AlignedBuf::zeroed(len);
        }
    }

    pub(crate) fn reserve_partial_sums(&mut self, len: usize) {
        if self.partial_sums.len() < len {
            self.partial_sums = AlignedBuf::zeroed(len);
        }
    }

    pub(crate) fn reserve_worker_scratch(&mut self, len: usize) {
        for scratch in &mut self.worker_scratch {
            if scratch.len() < len {
                *scratch = AlignedBuf::zeroed(len);
            }
        }
    }

    /// Runs `f(0)` to `f(tasks - 1)`, each once, on all workers. A call from inside a task runs in place. A panic
    /// in a task comes out here once all workers have stopped.
    pub fn parallel_for(&mut self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        self.pool.run(tasks, &|task, _worker| f(task));
    }

    /// [`crate::pack_panels`] on all workers.
    ///
    /// # Panics
    /// When `dst` is not [`packed_len`] long.
    pub fn pack<T: Copy + Default + Send>(
        &mut self,
        src_row: impl Fn(usize, &mut [T]) + Sync,
        n: usize,
        k: usize,
        dst: &mut [T],
    ) {
        assert_eq!(dst.len(), packed_len(n, k), "elements of a packed weight with n = {n}, k = {k}");
        let out = SharedMut::new(dst);
        self.pool.run(n.div_ceil(PANEL), &|panel, _| {
            // SAFETY: panels are disjoint.
            let dst = unsafe { out.slice(panel * PANEL * k, PANEL * k) };
            pack_panel(&src_row, n, k, panel, &mut Vec::new(), dst);
        });
    }

    /// [`crate::quantize_panel`] for all panels, on all workers: `src_row(row, values)` fills the `k` values of one row.
    ///
    /// # Panics
    /// When `dst` is not [`packed_bytes`] long.
    pub fn quantize(
        &mut self,
        kind: QuantKind,
        src_row: impl Fn(usize, &mut [f32]) + Sync,
        n: usize,
        k: usize,
        dst: &mut [u8],
    ) {
        assert_eq!(dst.len(), packed_bytes(kind, n, k), "bytes of a quantized weight with n = {n}, k = {k}");
        let (out, bytes) = (SharedMut::new(dst), panel_bytes(kind, k));
        self.pool.run(n.div_ceil(PANEL), &|panel, _| {
            // SAFETY: panels are disjoint.
            let dst = unsafe { out.slice(panel * bytes, bytes) };
            quantize_panel(kind, &src_row, n, k, panel, &mut Vec::new(), dst);
        });
    }
}

/// A mutable slice of which the workers write disjoint parts.
pub(crate) struct SharedMut<T> {
    start: *mut T,
    len: usize,
}

impl<T> Clone for SharedMut<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedMut<T> {}

// SAFETY: handing out parts is unsafe, and whoever does it promises that they are disjoint.
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        SharedMut { start: slice.as_mut_ptr(), len: slice.len() }
    }

    /// # Safety
    /// No other live reference may cover these elements, and the slice that this was made from must still be
    /// borrowed.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice<'s>(&self, offset: usize, len: usize) -> &'s mut [T] {
        assert!(offset <= self.len && len <= self.len - offset, "part {offset}+{len} of a slice of {}", self.len);
        // SAFETY: in range, and unique by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(offset), len) }
    }

    pub(crate) fn ptr(&self) -> *mut T {
        self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_device_may_move_to_another_thread() {
        let mut cpu = Cpu::new(Tier::detect(), 2);
        let moved = std::thread::spawn(move || {
            let done = AtomicUsize::new(0);
            cpu.parallel_for(100, &|_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            done.into_inner()
        });
        assert_eq!(moved.join().unwrap(), 100);
    }
}
