//! An even plan under a group limit: every slot takes the expert that needs it most.

use super::Balance;

/// Loads so far, by which the next token is planned.
#[derive(Clone, Debug)]
pub(super) struct Planner {
    /// Groups a token may use.
    active_limit: usize,
    per_group: usize,
    rank_loads: Vec<u64>,
    group_loads: Vec<u64>,
    expert_loads: Vec<u64>,
}

impl Planner {
    pub(super) fn new(balance: &Balance, groups: usize, topk_groups: usize) -> Planner {
        Planner {
            active_limit: topk_groups,
            per_group: balance.experts / groups,
            rank_loads: vec![0; balance.ranks],
            group_loads: vec![0; groups],
            expert_loads: vec![0; balance.experts],
        }
    }

    /// Appends the experts of the next token.
    pub(super) fn plan(&mut self, balance: &Balance, planned: &mut Vec<u32>) {
        let first = planned.len();
        let mut active = 0u64;
        for _ in 0..balance.k {
            let may_open = (active.count_ones() as usize) < self.active_limit;
            let need = |expert: &u32| {
                let (rank, group) = (balance.rank_of(*expert), *expert as usize / self.per_group);
                // The sending rank itself comes first, so that senders begin with different targets.
                let turn = (rank + balance.ranks - balance.rank) % balance.ranks;
                let (rank_load, group_load) = (self.rank_loads[rank], self.group_loads[group]);
                (rank_load, self.expert_loads[*expert as usize], group_load, turn, *expert)
            };
            let expert = (0..balance.experts as u32)
                .filter(|expert| may_open || active >> (*expert as usize / self.per_group) & 1 == 1)
                .filter(|expert| !planned[first..].contains(expert))
                .min_by_key(need)
                .expect("groups in use and those that may be opened hold at least k experts");
            let group = expert as usize / self.per_group;
            active |= 1 << group;
            self.rank_loads[balance.rank_of(expert)] += 1;
            self.group_loads[group] += 1;
            self.expert_loads[expert as usize] += 1;
            planned.push(expert);
        }
    }
}
