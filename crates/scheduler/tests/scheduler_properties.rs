//! The scheduler under any sequence of arrivals, finishes, aborts and evictions.

use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use strobe_scheduler::block_pool::BlockPool;
use strobe_scheduler::scheduler::{Entry, Phase, Plan, Policy, Reason, Scheduler, SchedulerConfig};

#[derive(Clone, Debug)]
enum Event {
    /// A request of a family (equal families share prefixes) with a prompt and an output length.
    Arrive(u32, usize, usize),
    Abort(usize),
    Steps(usize),
}

#[derive(Clone, Debug)]
struct Setup {
    config: SchedulerConfig,
    blocks: usize,
    per_block: usize,
    reuse: bool,
}

fn setups() -> impl Strategy<Value = Setup> {
    (0usize..3, 1usize..9, 0usize..5, 0usize..3, any::<bool>(), any::<bool>(), 8usize..40).prop_map(
        |(policy, batch, extra, per_block, chunked, reuse, blocks)| {
            let per_block = [1, 4, 8][per_block];
            let max_num_tokens = (batch + extra * 7).max(per_block);
            Setup {
                config: SchedulerConfig {
                    policy: Policy::ALL[policy],
                    max_batch_size: batch,
                    max_num_tokens,
                    max_seq_len: 64,
                    chunked_context: chunked,
                    chunk_unit: per_block,
                    reuse_output: true,
                },
                blocks,
                per_block,
                reuse,
            }
        },
    )
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        3 => (0u32..3, 1usize..40, 1usize..24).prop_map(|(f, p, o)| Event::Arrive(f, p, o)),
        1 => (0usize..20).prop_map(Event::Abort),
        3 => (1usize..6).prop_map(Event::Steps),
    ];
    prop::collection::vec(event, 1..60)
}

struct World {
    scheduler: Scheduler,
    plan: Plan,
    setup: Setup,
    live: BTreeSet<u64>,
    done: usize,
    first_scheduled: Vec<u64>,
    submitted: usize,
    paused_since_start: bool,
}

impl World {
    fn new(setup: Setup) -> World {
        let pool = BlockPool::new(setup.blocks, setup.per_block, setup.reuse);
        let scheduler = Scheduler::new(setup.config, pool);
        World {
            scheduler,
            plan: Plan::default(),
            setup,
            live: BTreeSet::new(),
            done: 0,
            first_scheduled: Vec::new(),
            submitted: 0,
            paused_since_start: false,
        }
    }

    fn arrive(&mut self, id: u64, family: u32, prompt: usize, output: usize) {
        let prompt: Vec<u32> = (0..prompt as u32).map(|i| if i < 20 { family } else { family * 1000 + i }).collect();
        let entry = Entry::new(id, 0, prompt, output, self.setup.per_block, 64);
        if self.scheduler.submit(entry).is_ok() {
            self.live.insert(id);
            self.submitted += 1;
        }
    }

    fn step(&mut self) -> Result<bool, TestCaseError> {
        if self.scheduler.is_idle() {
            return Ok(false);
        }
        self.scheduler.plan(&mut self.plan);
        let again = {
            let mut plan = Plan::default();
            self.scheduler.plan(&mut plan);
            plan
        };
        prop_assert_eq!(&again.items, &self.plan.items, "planning is a pure function");
        let before: BTreeMap<u64, usize> = self.scheduler.running().iter().map(|e| (e.id, e.computed)).collect();
        self.scheduler.apply(&self.plan);
        self.scheduler.pool().verify().map_err(TestCaseError::fail)?;
        let config = *self.scheduler.config();
        prop_assert!(self.plan.tokens() <= config.max_num_tokens, "token budget");
        prop_assert!(self.scheduler.running().len() <= config.max_batch_size, "batch size");
        prop_assert!(!self.plan.items.is_empty() || !self.plan.pause.is_empty(), "progress");
        prop_assert!(
            config.policy == Policy::MaxUtilization || self.plan.pause.is_empty(),
            "only max_utilization pauses"
        );
        self.paused_since_start |= !self.plan.pause.is_empty();
        let items = self.plan.items.clone();
        let distinct: BTreeSet<_> = items.iter().map(|i| i.running).collect();
        prop_assert_eq!(distinct.len(), items.len(), "each request once");
        let phases: Vec<_> = items.iter().map(|i| i.phase == Phase::Generation).collect();
        prop_assert!(phases.is_sorted(), "context rows lead");
        prop_assert_eq!(items.iter().map(|i| i.len).sum::<usize>(), self.plan.tokens());
        for item in &items {
            let entry = &self.scheduler.running()[item.running];
            if !before.contains_key(&entry.id) && entry.pauses == 0 {
                self.first_scheduled.push(entry.id);
            }
            prop_assert_eq!(entry.computed, item.start);
            prop_assert_eq!(entry.blocks.len(), self.scheduler.pool().blocks_for(item.start + item.len));
            prop_assert_eq!(item.samples, item.start + item.len == entry.tokens.len());
            if item.phase == Phase::Context && !item.samples {
                prop_assert!(config.chunked_context, "chunks only when allowed");
                prop_assert_eq!(item.len % config.chunk_unit, 0, "chunks are whole blocks");
            }
            if item.phase == Phase::Generation {
                prop_assert_eq!(item.len, 1);
            }
        }
        // Every generating request of a no-evict policy advances in every step: generation comes first.
        if config.policy != Policy::MaxUtilization {
            let generating = self.scheduler.running().iter().filter(|e| e.phase == Phase::Generation).count();
            prop_assert_eq!(generating, self.plan.generation_requests);
        }
        let mut finished = Vec::new();
        for item in &items {
            self.scheduler.advance(item, item.samples.then_some(7));
            let entry = &self.scheduler.running()[item.running];
            if entry.generated() >= entry.max_new_tokens {
                finished.push(item.running);
            }
        }
        finished.sort_unstable();
        while let Some(index) = finished.pop() {
            let entry = self.scheduler.finish(index);
            prop_assert!(self.live.remove(&entry.id));
            prop_assert_eq!(entry.generated(), entry.max_new_tokens);
            self.done += 1;
        }
        self.scheduler.pool().verify().map_err(TestCaseError::fail)?;
        let mut held = BTreeMap::new();
        self.scheduler.running().iter().flat_map(|e| &e.blocks).for_each(|b| *held.entry(*b).or_insert(0) += 1);
        for block in 0..self.setup.blocks as u32 {
            prop_assert_eq!(self.scheduler.pool().references(block), held.get(&block).copied().unwrap_or(0));
        }
        Ok(true)
    }
}

/// Everything by which two schedulers can differ.
fn state(scheduler: &Scheduler) -> impl PartialEq + std::fmt::Debug {
    let entry = |e: &Entry| (e.id, e.computed, e.tokens.clone(), e.phase, e.blocks.len(), e.pauses, e.reused);
    let running: Vec<_> = scheduler.running().iter().map(entry).collect();
    let waiting: Vec<_> = scheduler.waiting().map(entry).collect();
    (running, waiting, scheduler.pool().free(), scheduler.pool().counters())
}

/// Take `steps` steps, several at once where the scheduler says so and `skip` is set.
fn take_steps(scheduler: &mut Scheduler, mut steps: usize, skip: bool) {
    let mut plan = Plan::default();
    while steps > 0 && !scheduler.is_idle() {
        scheduler.plan(&mut plan);
        let ahead = scheduler.steps_ahead(&plan).min(steps);
        if skip && ahead > 0 {
            scheduler.run_ahead(ahead, |_, _| 7);
            steps -= ahead;
        } else {
            scheduler.apply(&plan);
            plan.items.iter().for_each(|item| scheduler.advance(item, item.samples.then_some(7)));
            steps -= 1;
        }
        for index in (0..scheduler.running().len()).rev() {
            let entry = &scheduler.running()[index];
            if entry.generated() >= entry.max_new_tokens {
                scheduler.finish(index);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// Running ahead leaves exactly what single steps leave.
    #[test]
    fn steps_at_once_equal_single_steps(setup in setups(), reuse_output in any::<bool>(), events in events()) {
        let mut setup = setup;
        setup.config.reuse_output = reuse_output;
        let mut single = World::new(setup.clone());
        let mut ahead = World::new(setup);
        for (id, event) in events.into_iter().enumerate() {
            match event {
                Event::Arrive(family, prompt, output) => {
                    single.arrive(id as u64, family, prompt, output);
                    ahead.arrive(id as u64, family, prompt, output);
                }
                Event::Abort(_) => {}
                Event::Steps(steps) => {
                    take_steps(&mut single.scheduler, 3 * steps, false);
                    take_steps(&mut ahead.scheduler, 3 * steps, true);
                    prop_assert_eq!(state(&single.scheduler), state(&ahead.scheduler));
                }
            }
        }
        take_steps(&mut single.scheduler, 20_000, false);
        take_steps(&mut ahead.scheduler, 20_000, true);
        prop_assert!(single.scheduler.is_idle() && ahead.scheduler.is_idle());
        prop_assert_eq!(single.scheduler.pool().counters(), ahead.scheduler.pool().counters());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn budgets_blocks_and_order_hold(setup in setups(), events in events()) {
        let mut world = World::new(setup);
        let (mut next, mut aborted) = (0, 0);
        for event in events {
            match event {
                Event::Arrive(family, prompt, output) => {
                    world.arrive(next, family, prompt, output);
                    next += 1;
                }
                Event::Abort(index) => {
                    if let Some(&id) = world.live.iter().nth(index) {
                        prop_assert!(world.scheduler.abort(id).is_some());
                        prop_assert!(world.scheduler.abort(id).is_none(), "an abort happens once");
                        world.live.remove(&id);
                        aborted += 1;
                        world.scheduler.pool().verify().map_err(TestCaseError::fail)?;
                    }
                }
                Event::Steps(steps) => {
                    for _ in 0..steps {
                        world.step()?;
                    }
                }
            }
        }
        // Nobody starves: without new arrivals everything ends within a bounded number of steps.
        let mut steps = 0;
        while world.step()? {
            steps += 1;
            prop_assert!(steps < 20_000, "requests starve: {:?}", world.live);
        }
        prop_assert_eq!(world.done + aborted, world.submitted);
        prop_assert_eq!(world.scheduler.pool().free(), world.setup.blocks, "every block came back");
        // First come, first served: first scheduling follows arrival.
        prop_assert!(world.first_scheduled.is_sorted(), "{:?}", world.first_scheduled);
    }
}

fn scheduler(policy: Policy, blocks: usize) -> Scheduler {
    let config = SchedulerConfig {
        policy,
        max_batch_size: 4,
        max_num_tokens: 64,
        max_seq_len: 64,
        chunked_context: true,
        chunk_unit: 4,
        reuse_output: true,
    };
    Scheduler::new(config, BlockPool::new(blocks, 4, false))
}

fn reasons(scheduler: &Scheduler) -> Vec<(u64, &'static str)> {
    let mut plan = Plan::default();
    scheduler.plan(&mut plan);
    plan.decisions.iter().map(|d| (d.request, d.reason.name())).collect()
}

#[test]
fn every_deferral_has_its_reason() {
    let entry = |id, prompt: usize, output| Entry::new(id, 0, vec![1; prompt], output, 4, 64);
    let mut s = scheduler(Policy::GuaranteedNoEvict, 6);
    s.submit(entry(0, 8, 9)).unwrap(); // 4 blocks
    s.submit(entry(1, 8, 9)).unwrap(); // does not fit beside it
    assert_eq!(reasons(&s), [(0, "admitted"), (1, "deferred: kv capacity")]);

    let mut s = scheduler(Policy::GuaranteedNoEvict, 100);
    (0..6).for_each(|id| s.submit(entry(id, 4, 4)).unwrap());
    assert_eq!(reasons(&s)[4], (4, "deferred: batch full"));

    let mut s = scheduler(Policy::GuaranteedNoEvict, 100);
    (0..3).for_each(|id| s.submit(entry(id, 40, 4)).unwrap());
    assert_eq!(reasons(&s), [(0, "admitted"), (1, "admitted"), (1, "chunked"), (2, "deferred: token budget")]);

    let mut s = scheduler(Policy::StaticBatch, 100);
    s.submit(entry(0, 4, 4)).unwrap();
    let mut plan = Plan::default();
    s.plan(&mut plan);
    s.apply(&plan);
    s.submit(entry(1, 4, 4)).unwrap();
    assert!(reasons(&s).contains(&(1, "deferred: static batch running")));
}

#[test]
fn max_utilization_pauses_the_youngest_and_resumes_it() {
    let mut s = scheduler(Policy::MaxUtilization, 6);
    let entry = |id| Entry::new(id, 0, vec![1; 8], 12, 4, 64);
    s.submit(entry(0)).unwrap();
    s.submit(entry(1)).unwrap();
    let mut plan = Plan::default();
    let mut seen = Vec::new();
    let mut finished = Vec::new();
    for _ in 0..200 {
        if s.is_idle() {
            break;
        }
        s.plan(&mut plan);
        s.apply(&plan);
        seen.extend(plan.decisions.iter().filter(|d| !matches!(d.reason, Reason::KvCapacity { .. })).copied());
        let items = plan.items.clone();
        items.iter().for_each(|i| s.advance(i, i.samples.then_some(5)));
        for index in (0..s.running().len()).rev() {
            if s.running()[index].generated() == 12 {
                finished.push(s.finish(index).id);
            }
        }
    }
    assert_eq!(finished, [0, 1], "the older one is never held up");
    assert!(seen.iter().any(|d| d.request == 1 && d.reason.name() == "paused"));
    assert!(seen.iter().any(|d| d.request == 1 && matches!(d.reason, Reason::Resumed { recompute } if recompute > 8)));
}

#[test]
fn requests_that_can_never_run_are_refused_with_the_arithmetic() {
    let s = scheduler(Policy::GuaranteedNoEvict, 6);
    for (prompt, output, named) in [
        (0, 4, "empty"),
        (4, 0, "0 output tokens"),
        (60, 5, "65 tokens is longer than max_seq_len 64"),
        (20, 6, "7 blocks of 4 tokens needed, 6 in the cache"),
    ] {
        let text = s.check(prompt, output).unwrap_err().to_string();
        assert!(text.contains(named), "{text}");
    }
    assert!(s.check(20, 5).is_ok(), "the last token needs no place in the cache");
}
