//! A pool of workers for regions that take microseconds: helpers spin, then sleep; nothing is allocated per call.
//!
//! One region runs at a time. Its tasks are claimed from a shared cursor, so a worker that is late (or not scheduled
//! at all) delays nobody: the region ends when all tasks are done and every helper that entered has left.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a worker polls before it sleeps: longer than the gaps between the ops of one step.
const SPIN: Duration = Duration::from_micros(50);
/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 64;

/// `state` holds the region's number in the upper half, and below it: is it open, and how many helpers are inside.
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;
const REGION: u64 = 1 << 32;

thread_local! {
    /// Set while this thread runs a task: a region started there runs in place.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

type Task = dyn Fn(usize, usize) + Sync;

/// What the open region runs.
struct Region {
    task: *const Task,
    tasks: usize,
}

#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    state: Padded<AtomicU64>,
    cursor: Padded<AtomicUsize>,
    /// Written by the owner while no region is open; read by helpers that entered the open one.
    region: UnsafeCell<Region>,
    stop: AtomicBool,
    /// Helpers that sleep, or are about to, and the way to wake them.
    sleepers: AtomicUsize,
    wake: Condvar,
    /// Whether the owner sleeps, or is about to, and the way to wake it.
    owner_sleeps: AtomicBool,
    empty: Condvar,
    /// Whoever goes to sleep looks once more under this lock, and whoever wakes others takes it first.
    sleep: Mutex<()>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The system's numbers of the helpers.
    helper_ids: OnceLock<Vec<u32>>,
}

// SAFETY: `region` is the one field that is not `Sync`; the protocol of `state` orders its accesses.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `region` is only followed while the closure behind it is borrowed by `Pool::run`.
unsafe impl Send for Shared {}

/// The workers. The thread that calls [`Pool::run`] is worker 0.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

impl Pool {
    pub(crate) fn new(threads: usize) -> Pool {
        fn nothing(_task: usize, _worker: usize) {}
        let shared = Arc::new(Shared {
            state: Padded(AtomicU64::new(0)),
            cursor: Padded(AtomicUsize::new(0)),
            region: UnsafeCell::new(Region { task: &nothing, tasks: 0 }),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            wake: Condvar::new(),
            owner_sleeps: AtomicBool::new(false),
            empty: Condvar::new(),
            sleep: Mutex::new(()),
            panic: Mutex::new(None),
            helper_ids: OnceLock::new(),
        });
        let (say, hear) = mpsc::channel();
        let helpers = (1..threads)
            .map_while(|worker| {
                let (shared, say) = (Arc::clone(&shared), say.clone());
                let builder = thread::Builder::new().name(format!("strobe-worker-{worker}"));
                // A machine that refuses a thread still runs everything, on fewer workers.
                let life = move || {
                    // Nobody hears it when the pool could not be made, and then nobody needs it.
                    let _ = say.send(thread_id());
                    drop(say);
                    shared.help(worker);
                };
                builder.spawn(life).ok()
            })
            .collect();
        drop(say);
        let helper_ids = hear.iter().flatten().collect();
        shared.helper_ids.get_or_init(|| helper_ids);
        Pool { shared, helpers }
    }

    /// The system's numbers of the helpers, as far as it numbers threads.
    pub(crate) fn helper_ids(&self) -> &[u32] {
        self.shared.helper_ids.get().map_or(&[], Vec::as_slice)
    }

    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `task(i, worker)` for each `i` in `0..tasks`; no two calls at a time share a worker number.
    pub(crate) fn run(&mut self, tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        if tasks <= 1 || self.helpers.is_empty() || IN_TASK.get() {
            for i in 0..tasks {
                task(i, 0);
            }
            return;
        }
        let shared = &*self.shared;
        let region = Region {
            // SAFETY: only the lifetime is erased; this call does not return before all helpers have left.
            task: unsafe { std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + '_), *const Task>(task) },
            tasks,
        };
        // SAFETY: no region is open and no helper inside (`&mut self`, and the wait below).
        unsafe { *shared.region.get() = region };
        shared.cursor.0.store(0, Ordering::Relaxed);
        let number = shared.state.0.load(Ordering::Relaxed) & !(REGION - 1);
        shared.state.0.store(number.wrapping_add(REGION) | OPEN, Ordering::SeqCst);
        shared.wake_sleepers();

        // SAFETY: the region was written above.
        unsafe { shared.work(0) };

        shared.state.0.fetch_and(!OPEN, Ordering::AcqRel);
        shared.wait_until_empty();
        if let Some(panic) = lock(&shared.panic).take() {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake_sleepers();
        for helper in self.helpers.drain(..) {
            // A helper catches the panics of its tasks, so there is nothing to report here.
            let _ = helper.join();
        }
    }
}

impl Shared {
    /// Claims tasks until none is left. The first panic is kept and ends the region early.
    ///
    /// # Safety
    /// The caller owns the open region or has entered it.
    unsafe fn work(&self, worker: usize) {
        // SAFETY: nobody writes `region` while it is open or a helper is inside.
        let region = unsafe { &*self.region.get() };
        // SAFETY: `Pool::run` keeps the closure borrowed until all helpers have left.
        let task = unsafe { &*region.task };
        let outer = IN_TASK.replace(true);
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let i = self.cursor.0.fetch_add(1, Ordering::Relaxed);
                if i >= region.tasks {
                    break;
                }
                task(i, worker);
            }
        }));
        IN_TASK.set(outer);
        if let Err(panic) = result {
            self.cursor.0.store(region.tasks, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(panic);
        }
    }

    /// A helper's life: wait for a region, enter it if it is still open, work, leave.
    fn help(&self, worker: usize) {
        let mut seen = 0;
        while let Some(state) = self.next_region(seen) {
            seen = state & !(REGION - 1);
            if self.enter(seen) {
                // SAFETY: just entered.
                unsafe { self.work(worker) };
                self.leave();
            }
        }
    }

    /// Waits for a region other than `seen`; `None` when the pool ends.
    fn next_region(&self, seen: u64) -> Option<u64> {
        let is_new = |state: u64| state & OPEN != 0 && state & !(REGION - 1) != seen;
        let mut state = 0;
        let is_ready = || {
            state = self.state.0.load(Ordering::Acquire);
            is_new(state) || self.stop.load(Ordering::Relaxed)
        };
        if poll(is_ready) && is_new(state) {
            return Some(state);
        }
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            let state = self.state.0.load(Ordering::SeqCst);
            if self.stop.load(Ordering::SeqCst) {
                break None;
            }
            if is_new(state) {
                break Some(state);
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        found
    }

    fn enter(&self, number: u64) -> bool {
        let add_one = |state: u64| (state & OPEN != 0 && state & !(REGION - 1) == number).then_some(state + 1);
        self.state.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, add_one).is_ok()
    }

    fn leave(&self) {
        let state = self.state.0.fetch_sub(1, Ordering::SeqCst) - 1;
        if state & INSIDE == 0 && self.owner_sleeps.load(Ordering::SeqCst) {
            let _guard = lock(&self.sleep);
            self.empty.notify_one();
        }
    }

    fn wake_sleepers(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&self.sleep);
            self.wake.notify_all();
        }
    }

    /// Waits until the last helper has left.
    fn wait_until_empty(&self) {
        let is_empty = || self.state.0.load(Ordering::SeqCst) & INSIDE == 0;
        if poll(is_empty) {
            return;
        }
        let mut guard = lock(&self.sleep);
        self.owner_sleeps.store(true, Ordering::SeqCst);
        while !is_empty() {
            guard = self.empty.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.owner_sleeps.store(false, Ordering::SeqCst);
    }
}

/// Asks again and again for a while; whether the answer was yes.
fn poll(mut is_ready: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + SPIN;
    loop {
        for _ in 0..POLLS_PER_CLOCK {
            if is_ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if Instant::now() >= deadline {
            return false;
        }
    }
}

/// The system's number of this thread.
fn thread_id() -> Option<u32> {
    #[cfg(all(target_os = "linux", not(miri)))]
    // SAFETY: gettid has no preconditions.
    return u32::try_from(unsafe { libc::gettid() }).ok();
    #[cfg(not(all(target_os = "linux", not(miri))))]
    None
}

/// The data behind these locks stays whole even if a holder panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 5] {
            let mut pool = Pool::new(threads);
            for tasks in [0, 1, 2, 7, 100] {
                for _ in 0..50 {
                    let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                    pool.run(tasks, &|i, worker| {
                        assert!(worker < threads);
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn helpers_are_known_by_their_numbers() {
        let pool = Pool::new(4);
        let mut ids = pool.helper_ids().to_vec();
        assert!(ids.iter().all(|id| std::path::Path::new(&format!("/proc/self/task/{id}")).exists()), "{ids:?}");
        ids.extend(thread_id());
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 4);
    }

    #[test]
    fn helpers_wake_up_again_after_they_fell_asleep() {
        let mut pool = Pool::new(3);
        for _ in 0..20 {
            let sum = AtomicUsize::new(0);
            pool.run(10, &|i, _| {
                thread::sleep(Duration::from_micros(100));
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 45);
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_panic_comes_out_and_the_pool_lives_on() {
        let mut pool = Pool::new(3);
        for bad in [0, 5, 19] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, &|i, _| {
                    if i == bad {
                        resume_unwind(Box::new("task failed"));
                    }
                });
            }));
            assert_eq!(result.unwrap_err().downcast_ref::<&str>(), Some(&"task failed"));
            let done = AtomicUsize::new(0);
            pool.run(20, &|_, _| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 20);
        }
    }

    #[test]
    fn a_region_inside_a_task_runs_in_place() {
        let mut pool = Pool::new(2);
        let done = AtomicUsize::new(0);
        pool.run(4, &|_, _| {
            Pool::new(2).run(5, &|_, worker| {
                assert_eq!(worker, 0);
                done.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(done.into_inner(), 20);
    }
}
