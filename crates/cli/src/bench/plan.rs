//! `strobe bench moe-plan`: where the perfect router would send tokens, without any model.

use anyhow::Result;
use serde_json::json;
use strobe_model::perfect_router::method_named;
use strobe_model::{Balance, PerfectRouter};
use strobe_report::table::Table;

use super::experts::PlanChoice;
use crate::output;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Routing method by TensorRT-LLM's name: Default, RenormalizeNaive, Renormalize or DeepSeekV3
    #[arg(long, default_value = "Renormalize")]
    method: String,
    /// Tokens that each rank sends
    #[arg(long, value_name = "T", default_value_t = 64)]
    tokens: usize,
    /// Experts of a layer
    #[arg(long, value_name = "E")]
    experts: usize,
    /// Experts of a token
    #[arg(long, value_name = "K")]
    top_k: usize,
    /// Expert-parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1)]
    ep: usize,
    /// Groups of experts (DeepSeekV3)
    #[arg(long, value_name = "G", default_value_t = 1)]
    n_group: usize,
    /// Groups that a token may use (DeepSeekV3)
    #[arg(long, value_name = "G", default_value_t = 1)]
    topk_group: usize,
    /// The plan under a group limit
    #[arg(long, value_enum, default_value = "even")]
    plan: PlanChoice,
    /// Print JSON, with the experts of every token
    #[arg(long)]
    json: bool,
}

/// More tokens than any step has.
const MOST_TOKENS: usize = 1 << 16;

pub(crate) fn run(args: Args) -> Result<()> {
    let Args { tokens, experts, top_k, ep, .. } = args;
    anyhow::ensure!(tokens <= MOST_TOKENS, "--tokens must be at most {MOST_TOKENS}, found {tokens}");
    anyhow::ensure!(experts <= 1 << 12, "--experts must be at most {}, found {experts}", 1 << 12);
    let method = method_named(&args.method, args.n_group, args.topk_group)?;
    let sender = |rank: usize| {
        let balance = Balance { method, experts, k: top_k, ranks: ep, rank, plan: args.plan.into() };
        PerfectRouter::new(balance, tokens)
    };
    let senders = (0..ep.max(1)).map(sender).collect::<Result<Vec<_>, _>>()?;
    let spread = |loads: &[u64]| loads.iter().max().unwrap_or(&0) - loads.iter().min().unwrap_or(&0);
    let expert_loads = |router: &PerfectRouter| {
        let mut loads = vec![0u64; experts];
        router.experts(tokens).iter().for_each(|expert| loads[*expert as usize] += 1);
        loads
    };
    let mut sums = vec![0; ep];
    for router in &senders {
        sums.iter_mut().zip(router.rank_loads(tokens)).for_each(|(sum, load)| *sum += load);
    }
    if args.json {
        let of = |router: &PerfectRouter| {
            json!({
                "rank": router.balance().rank,
                "loads_of_ranks": router.rank_loads(tokens),
                "loads_of_experts": expert_loads(router),
                "experts_of_tokens": router.experts(tokens).chunks(top_k).collect::<Vec<_>>(),
            })
        };
        let senders: Vec<_> = senders.iter().map(of).collect();
        output::line(&format!("{:#}", json!({"method": method.name(), "senders": senders, "sum": sums})));
        return Ok(());
    }
    let words = |loads: &[u64]| loads.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
    let mut table = Table::new(["sender", "pairs sent to each rank", "spread", "spread over experts"]);
    for router in &senders {
        let loads = router.rank_loads(tokens);
        table.push([
            router.balance().rank.to_string(),
            words(&loads),
            spread(&loads).to_string(),
            spread(&expert_loads(router)).to_string(),
        ]);
    }
    table = table.total(["all", &words(&sums), &spread(&sums).to_string(), ""].map(str::to_string));
    output::print(&table.render(output::width()));
    Ok(())
}
