//! Balanced plans: the vectors of TensorRT-LLM's tests, and what must hold for any numbers.

use proptest::prelude::*;
use strobe_model::perfect_router::{Plan, method_named};
use strobe_model::{Balance, DType, PerfectRouter, PerfectRouterError, RoutingMethod};

/// Batch sizes that TensorRT-LLM plans in advance.
const COMMON_BATCHES: [usize; 22] =
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192];

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

fn flat(experts: usize, k: usize, ranks: usize, rank: usize) -> Balance {
    Balance { method: RoutingMethod::TopKSoftmax, experts, k, ranks, rank, plan: Plan::TensorRtLlm }
}

fn grouped(experts: usize, k: usize, groups: usize, topk_groups: usize, ranks: usize, rank: usize) -> Balance {
    let method = RoutingMethod::DeepSeekV3 { groups, topk_groups, scale: 2.5, renormalise: true };
    Balance { method, experts, k, ranks, rank, plan: Plan::TensorRtLlm }
}

fn even(experts: usize, k: usize, groups: usize, topk_groups: usize, ranks: usize, rank: usize) -> Balance {
    Balance { plan: Plan::Even, ..grouped(experts, k, groups, topk_groups, ranks, rank) }
}

fn router(balance: Balance, tokens: usize) -> PerfectRouter {
    PerfectRouter::new(balance, tokens).unwrap()
}

fn spread(loads: &[u64]) -> u64 {
    loads.iter().max().unwrap() - loads.iter().min().unwrap()
}

fn expert_loads(router: &PerfectRouter, tokens: usize) -> Vec<u64> {
    let mut loads = vec![0; router.balance().experts];
    router.experts(tokens).iter().for_each(|expert| loads[*expert as usize] += 1);
    loads
}

fn sorted(experts: &[u32]) -> Vec<u32> {
    let mut experts = experts.to_vec();
    experts.sort_unstable();
    experts
}

/// The model's own routing, given the synthetic logits in any type, chooses what was planned.
fn assert_routed_as_planned(router: &PerfectRouter, tokens: usize) {
    let Balance { method, experts, k, .. } = *router.balance();
    let methods: &[RoutingMethod] = match method {
        RoutingMethod::DeepSeekV3 { .. } => &[method],
        _ => &[
            RoutingMethod::SoftmaxTopK { renormalise: false },
            RoutingMethod::SoftmaxTopK { renormalise: true },
            RoutingMethod::TopKSoftmax,
        ],
    };
    let (mut chosen, mut weights) = (vec![0; k], vec![0.0; k]);
    for dtype in DTYPES {
        let logits = router.logits_as(tokens, dtype);
        for (token, planned) in router.experts(tokens).chunks_exact(k).enumerate() {
            for method in methods {
                method.route(&logits[token * experts..][..experts], None, &mut chosen, &mut weights);
                assert_eq!(sorted(&chosen), sorted(planned), "{} {dtype} token {token}", method.name());
            }
        }
    }
}

/// What holds for every plan; `limit` is the number of groups a token may use, of `per_group` experts each.
fn assert_valid(router: &PerfectRouter, tokens: usize, limit: Option<(usize, usize)>) {
    let Balance { experts, k, .. } = *router.balance();
    assert_eq!(router.experts(tokens).len(), tokens * k);
    for planned in router.experts(tokens).chunks_exact(k) {
        let mut distinct = sorted(planned);
        distinct.dedup();
        assert_eq!(distinct.len(), k, "{planned:?}");
        assert!(planned.iter().all(|expert| (*expert as usize) < experts));
        if let Some((active, per_group)) = limit {
            let mut groups: Vec<usize> = planned.iter().map(|expert| *expert as usize / per_group).collect();
            groups.sort_unstable();
            groups.dedup();
            assert!(groups.len() <= active, "{planned:?} uses the groups {groups:?}");
        }
    }
    assert_eq!(router.rank_loads(tokens).iter().sum::<u64>(), (tokens * k) as u64);
}

#[test]
fn flat_vectors() {
    let four = router(flat(8, 2, 4, 0), 32);
    assert_eq!(four.experts(4), [0, 2, 4, 6, 1, 3, 5, 7]);
    assert_eq!(four.rank_loads(4), [2, 2, 2, 2]);
    assert_eq!(four.experts(3), [0, 2, 4, 6, 1, 3]);
    assert_eq!(four.rank_loads(3), [2, 2, 1, 1]);
    assert_eq!(four.rank_loads(32), [16; 4]);
    assert_eq!(router(flat(8, 2, 4, 1), 4).experts(4), [2, 4, 6, 1, 3, 5, 7, 0]);
    assert_eq!(four.logits(1), [10.0, -10.0, 10.0, -10.0, -10.0, -10.0, -10.0, -10.0]);
}

#[test]
fn flat_is_balanced_over_the_grid() {
    for (experts, k) in [(8, 1), (8, 2), (8, 8), (32, 4), (64, 6), (128, 8), (256, 8)] {
        for ranks in [1, 2, 4, 8] {
            for rank in 0..ranks {
                let router = router(flat(experts, k, ranks, rank), 100);
                for tokens in [1, 3, 7, 16, 100] {
                    assert_valid(&router, tokens, None);
                    assert!(spread(&router.rank_loads(tokens)) <= 1);
                    assert!(spread(&expert_loads(&router, tokens)) <= 1);
                    assert_routed_as_planned(&router, tokens);
                }
            }
        }
    }
}

#[test]
fn flat_senders_never_meet() {
    for (experts, k, ranks) in [(8, 2, 4), (128, 8, 8), (64, 6, 16)] {
        let senders: Vec<PerfectRouter> = (0..ranks).map(|rank| router(flat(experts, k, ranks, rank), 33)).collect();
        for step in 0..33 * k {
            let mut targets: Vec<usize> =
                senders.iter().map(|sender| sender.balance().rank_of(sender.experts(33)[step])).collect();
            targets.sort_unstable();
            assert_eq!(targets, (0..ranks).collect::<Vec<_>>(), "step {step}");
        }
        assert_eq!(spread(&summed_over_senders(&senders, 33)), 0);
    }
}

fn summed_over_senders(senders: &[PerfectRouter], tokens: usize) -> Vec<u64> {
    let mut sums = vec![0; senders[0].balance().ranks];
    for sender in senders {
        sums.iter_mut().zip(sender.rank_loads(tokens)).for_each(|(sum, load)| *sum += load);
    }
    sums
}

#[test]
fn grouped_vector() {
    let router = router(grouped(8, 4, 4, 2, 2, 1), 8);
    assert_eq!(router.experts(1), [7, 0, 6, 1]);
    assert_eq!(router.logits(1), [3.0, 1.0, -10.0, -10.0, -10.0, -10.0, 2.0, 4.0]);
    assert_valid(&router, 8, Some((2, 2)));
    assert_routed_as_planned(&router, 8);
}

#[test]
fn grouped_is_balanced_where_a_token_reaches_every_rank() {
    for experts in [64, 256] {
        for ranks in [1, 2, 4] {
            for rank in 0..ranks {
                let router = router(grouped(experts, 8, 8, 4, ranks, rank), 100);
                for tokens in [1, 3, 7, 16, 100] {
                    assert_valid(&router, tokens, Some((4, experts / 8)));
                    assert_eq!(spread(&router.rank_loads(tokens)), 0, "{experts} experts, {ranks} ranks");
                    assert_routed_as_planned(&router, tokens);
                }
            }
        }
    }
}

/// A known limit of the plan: a token reaches four groups only, and every token of a sender wants the same ones first.
#[test]
fn grouped_loads_are_uneven_on_more_ranks_than_groups_in_use() {
    let senders = |ranks| (0..ranks).map(move |rank| router(grouped(256, 8, 8, 4, ranks, rank), 100));
    let eight: Vec<PerfectRouter> = senders(8).collect();
    assert_eq!(eight[0].rank_loads(100), [200, 200, 200, 200, 0, 0, 0, 0]);
    assert_eq!(spread(&summed_over_senders(&eight, 100)), 0);
    let sixteen = summed_over_senders(&senders(16).collect::<Vec<_>>(), 100);
    assert!(spread(&sixteen) >= 100, "{sixteen:?}");
}

#[test]
fn the_even_plan_is_as_even_as_the_group_limit_allows() {
    // Where a token reaches four of eight ranks, two of its experts share a rank.
    for (experts, ranks, most) in
        [(64, 1, 0), (64, 4, 0), (256, 1, 0), (256, 2, 0), (256, 4, 0), (256, 8, 2), (256, 16, 1), (256, 32, 1)]
    {
        for rank in 0..ranks {
            let router = router(even(experts, 8, 8, 4, ranks, rank), 100);
            assert_eq!(router.balance().rank_of(router.experts(1)[0]), rank, "senders begin with themselves");
            for tokens in 1..=100 {
                assert_valid(&router, tokens, Some((4, experts / 8)));
                assert!(
                    spread(&router.rank_loads(tokens)) <= most,
                    "{experts} experts, {ranks} ranks, {tokens} tokens"
                );
                assert!(spread(&expert_loads(&router, tokens)) <= 1, "{experts} experts, {tokens} tokens");
            }
            assert_routed_as_planned(&router, 100);
        }
    }
}

#[test]
fn a_small_batch_is_the_beginning_of_a_large_one() {
    for balance in
        [flat(128, 8, 4, 1), grouped(256, 8, 8, 4, 4, 3), grouped(12, 3, 4, 2, 6, 5), even(256, 8, 8, 4, 8, 3)]
    {
        let largest = router(balance, 8192);
        let mut grown = router(balance, 1);
        for tokens in COMMON_BATCHES {
            let own = router(balance, tokens);
            grown.extend_to(tokens);
            assert_eq!(own.experts(tokens), largest.experts(tokens), "{tokens} tokens");
            assert_eq!(own.logits(tokens), largest.logits(tokens), "{tokens} tokens");
            assert_eq!(grown.experts(tokens), own.experts(tokens), "{tokens} tokens");
        }
        assert_eq!(grown.tokens(), 8192);
    }
}

#[test]
fn impossible_requests_are_refused_by_name() {
    let refused = |balance| PerfectRouter::new(balance, 4).unwrap_err();
    assert_eq!(refused(flat(8, 2, 3, 0)), PerfectRouterError::Ranks { experts: 8, ranks: 3 });
    assert_eq!(refused(flat(8, 2, 0, 0)), PerfectRouterError::Ranks { experts: 8, ranks: 0 });
    assert_eq!(refused(flat(8, 2, 4, 4)), PerfectRouterError::Rank { rank: 4, ranks: 4 });
    assert!(refused(flat(8, 9, 4, 0)).to_string().contains("num_experts_per_tok"));
    assert!(refused(grouped(8, 2, 3, 1, 1, 0)).to_string().contains("n_group"));
    assert!(refused(grouped(8, 5, 4, 2, 1, 0)).to_string().contains("num_experts_per_tok"));
    let unknown = method_named("AdaptiveK", 1, 1).unwrap_err().to_string();
    assert!(unknown.contains("`AdaptiveK`"), "{unknown}");
    for name in RoutingMethod::NAMES {
        assert!(unknown.contains(name), "{unknown}");
        assert_eq!(method_named(name, 1, 1).unwrap().name(), name);
    }
}

proptest! {
    #[test]
    fn flat_holds_for_any_numbers(per_rank in 1usize..40, ranks in 1usize..20, k in 1usize..20, rank in 0usize..20, tokens in 1usize..300) {
        let experts = per_rank * ranks;
        let router = router(flat(experts, k.min(experts), ranks, rank % ranks), tokens);
        assert_valid(&router, tokens, None);
        prop_assert!(spread(&router.rank_loads(tokens)) <= 1);
        prop_assert!(spread(&expert_loads(&router, tokens)) <= 1);
        assert_routed_as_planned(&router, tokens);
    }

    #[test]
    fn grouped_keeps_the_limit_for_any_numbers(
        per_group in 1usize..9, groups in 1usize..10, active in 1usize..10, ranks in 1usize..12, k in 1usize..12, rank in 0usize..12, tokens in 1usize..40,
    ) {
        let experts = per_group * groups;
        let ranks = (1..=ranks).rev().find(|ranks| experts % ranks == 0).unwrap();
        let active = active.min(groups);
        let k = k.min(active * per_group);
        for balance in
            [grouped(experts, k, groups, active, ranks, rank % ranks), even(experts, k, groups, active, ranks, rank % ranks)]
        {
            let router = router(balance, tokens);
            assert_valid(&router, tokens, Some((active, per_group)));
            assert_routed_as_planned(&router, tokens);
            if balance.plan == Plan::Even {
                // Ranks that cut through groups pull the experts of a group apart.
                let aligned = groups % ranks == 0 || ranks % groups == 0;
                let (loads, ranks) = (expert_loads(&router, tokens), router.rank_loads(tokens));
                prop_assert!(spread(&loads) <= if aligned { 2 } else { 4 }, "{loads:?}");
                prop_assert!(!aligned || spread(&ranks) <= k as u64, "{ranks:?}");
            }
        }
    }
}
