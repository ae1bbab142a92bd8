//! A balanced plan under a group limit: a beam search over the groups of each slot, then an expert in each group.

use super::Balance;

/// States kept after each slot.
const BEAM: usize = 32;

/// Plans the experts of one token at a time, each on its own.
pub(super) struct Planner {
    k: usize,
    ranks: usize,
    rank: usize,
    /// Groups a token may use.
    active_limit: usize,
    /// Experts of each group.
    per_group: usize,
    /// For each rank, the groups that have experts on it.
    groups_on_rank: Vec<Vec<usize>>,
    /// For each rank and group, the group's experts on that rank.
    experts_on_rank: Vec<Vec<Vec<u32>>>,
    period: usize,
}

#[derive(Clone)]
struct State {
    /// The group of each slot so far.
    groups: Vec<usize>,
    /// Experts taken from each group.
    counts: Vec<usize>,
    /// Groups in use, in the order they came into use.
    active: Vec<usize>,
    mismatches: usize,
    preferences: usize,
}

impl State {
    /// Smaller is better: wanted ranks, then even groups, then early candidates, then many groups.
    fn key(&self) -> (usize, usize, usize, std::cmp::Reverse<usize>) {
        let largest = self.counts.iter().copied().max().unwrap_or(0);
        (self.mismatches, largest, self.preferences, std::cmp::Reverse(self.active.len()))
    }
}

impl Planner {
    pub(super) fn new(balance: &Balance, groups: usize, topk_groups: usize) -> Planner {
        let Balance { experts, k, ranks, rank, .. } = *balance;
        let per_group = experts / groups;
        let experts_on_rank: Vec<Vec<Vec<u32>>> = (0..ranks)
            .map(|rank| {
                let mut by_group = vec![Vec::new(); groups];
                for expert in (0..experts as u32).filter(|expert| balance.rank_of(*expert) == rank) {
                    by_group[expert as usize / per_group].push(expert);
                }
                by_group
            })
            .collect();
        let groups_on_rank: Vec<Vec<usize>> = experts_on_rank
            .iter()
            .map(|by_group| (0..groups).filter(|group| !by_group[*group].is_empty()).collect())
            .collect();
        // A token's place enters through its wanted ranks and through rotations of these lists.
        let lists = groups_on_rank.iter().map(Vec::len).chain(experts_on_rank.iter().flatten().map(Vec::len));
        let period = lists.filter(|length| *length > 0).fold(lcm(ranks, per_group), lcm);
        Planner {
            k,
            ranks,
            rank,
            active_limit: topk_groups.min(k).min(groups),
            per_group,
            groups_on_rank,
            experts_on_rank,
            period,
        }
    }

    /// Tokens this far apart have the same plan.
    pub(super) fn period(&self) -> usize {
        self.period
    }

    /// Appends the experts of the token at place `token`, in the order of their slots.
    pub(super) fn plan(&self, token: usize, planned: &mut Vec<u32>) {
        let first = planned.len();
        let groups = self.choose_groups(token);
        for (slot, group) in groups.into_iter().enumerate() {
            let rotation = token + self.rank + slot;
            let taken = &planned[first..];
            let here = &self.experts_on_rank[self.wanted_rank(token, slot)][group];
            let first_expert = (group * self.per_group) as u32;
            let anywhere: Vec<u32> = (first_expert..first_expert + self.per_group as u32).collect();
            let expert = rotated(here, rotation)
                .chain(rotated(&anywhere, rotation))
                .find(|expert| !taken.contains(expert))
                .expect("a group is never chosen more often than it has experts");
            planned.push(expert);
        }
    }

    fn wanted_rank(&self, token: usize, slot: usize) -> usize {
        (token * self.k + slot + self.rank) % self.ranks
    }

    fn choose_groups(&self, token: usize) -> Vec<usize> {
        let groups = self.experts_on_rank[0].len();
        let start =
            State { groups: Vec::new(), counts: vec![0; groups], active: Vec::new(), mismatches: 0, preferences: 0 };
        let mut beam = vec![start];
        for slot in 0..self.k {
            let on_rank = &self.groups_on_rank[self.wanted_rank(token, slot)];
            let mut next = Vec::new();
            for state in &beam {
                let preferred = rotated(on_rank, token + self.rank + slot);
                let others = state.active.iter().copied().filter(|group| !on_rank.contains(group));
                let mut candidates: Vec<usize> = preferred
                    .chain(others)
                    .filter(|group| state.counts[*group] < self.per_group)
                    .filter(|group| state.counts[*group] > 0 || state.active.len() < self.active_limit)
                    .collect();
                if candidates.is_empty() {
                    // Every group in use is full, so there are fewer of them than allowed.
                    candidates.extend((0..groups).filter(|group| state.counts[*group] == 0));
                }
                next.extend(candidates.iter().enumerate().map(|(preference, group)| {
                    let mut after = state.clone();
                    after.groups.push(*group);
                    if state.counts[*group] == 0 {
                        after.active.push(*group);
                    }
                    after.counts[*group] += 1;
                    after.mismatches += usize::from(!on_rank.contains(group));
                    after.preferences += preference;
                    after
                }));
            }
            next.sort_by_key(State::key);
            next.truncate(BEAM);
            beam = next;
        }
        beam.swap_remove(0).groups
    }
}

/// The elements of `list` once around, beginning `by` places later.
fn rotated<T: Copy>(list: &[T], by: usize) -> impl Iterator<Item = T> {
    let start = by % list.len().max(1);
    list[start..].iter().chain(&list[..start]).copied()
}

fn lcm(a: usize, b: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}
