//! Where tokens went in a model of experts: options, figures and plots of a run.

use std::fmt::Write;

use anyhow::{Result, bail};
use clap::ValueEnum;
use serde_json::{Value, json};
use strobe_analyze::experts::{ExpertCounts, LayerLoad, NOTE, sheet};
use strobe_engine::engine_dir::LoadedModel;
use strobe_engine::{EngineInfo, PerfectRouterOptions};
use strobe_model::Balance;
use strobe_model::perfect_router::Plan;
use strobe_report::html::Page;
use strobe_report::svg::{HeatMap, heat_map, heat_map_png};

use super::client::RunData;
use super::outcome::Outcome;
use super::text;
use crate::sheets;

/// The variable TensorRT-LLM knows the perfect router by.
const VARIABLE: &str = "ENABLE_PERFECT_ROUTER";

/// What everything made with the perfect router says.
pub(crate) const WRONG: &str = "PERFECT ROUTER: tokens are sent to experts in balance, whatever the model's router says; the output is wrong by design";

/// The figures as a plot, beside the report.
pub(crate) const HEAT_MAP: &str = "experts";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlanChoice {
    /// Ranks and experts as even as the model's routing allows
    Even,
    /// TensorRT-LLM's plan, which differs for DeepSeek-V3 only
    TensorrtLlm,
}

impl From<PlanChoice> for Plan {
    fn from(choice: PlanChoice) -> Plan {
        match choice {
            PlanChoice::Even => Plan::Even,
            PlanChoice::TensorrtLlm => Plan::TensorRtLlm,
        }
    }
}

#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Experts")]
pub(crate) struct ExpertArgs {
    /// Send tokens to experts in perfect balance and discard what the router says, which makes the output wrong by design;
    /// also ENABLE_PERFECT_ROUTER=1
    #[arg(long, value_enum, value_name = "PLAN", num_args = 0..=1, default_missing_value = "even", require_equals = true)]
    perfect_router: Option<PlanChoice>,
    /// Say what the load of each of N GPUs would be if they shared the experts (expert parallelism)
    #[arg(long, value_name = "N")]
    assume_ep: Option<usize>,
}

/// What was asked for, in terms of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertOptions {
    pub perfect_router: Option<PerfectRouterOptions>,
    pub ranks: usize,
}

impl ExpertArgs {
    /// The options that were given, for runtimes that have none of them.
    pub(crate) fn given(&self) -> [(&'static str, bool); 2] {
        [("--perfect-router", self.plan().is_some()), ("--assume-ep", self.assume_ep.is_some())]
    }

    fn plan(&self) -> Option<Plan> {
        let asked = || std::env::var(VARIABLE).is_ok_and(|value| value == "1");
        self.perfect_router.map(Plan::from).or_else(|| asked().then_some(Plan::Even))
    }

    /// Checks the options against the model.
    pub(crate) fn options(&self, model: &LoadedModel) -> Result<ExpertOptions> {
        let ranks = self.assume_ep.unwrap_or(1);
        let given = self.given().into_iter().find(|(_, given)| *given);
        match (&model.config.model.moe, given) {
            (None, Some((option, _))) => {
                let from = if self.perfect_router.is_none() { format!(" (or {VARIABLE}=1)") } else { String::new() };
                let hint = if option == "--perfect-router" { from } else { String::new() };
                bail!("{option}{hint} needs an MoE model; {} has no experts", model.config.model_name)
            }
            (Some(moe), _) if ranks == 0 || !moe.num_experts.is_multiple_of(ranks) => {
                bail!("--assume-ep must divide the {} experts of a layer, found {ranks}", moe.num_experts)
            }
            _ => {}
        }
        Ok(ExpertOptions { perfect_router: self.plan().map(|plan| PerfectRouterOptions { ranks, plan }), ranks })
    }

    /// The same with balanced logits made ready, whether they were asked for or not.
    pub(crate) fn balanced(&self, model: &LoadedModel) -> Result<ExpertOptions> {
        if model.config.model.moe.is_none() {
            bail!("moe-balance needs an MoE model; {} has no experts", model.config.model_name);
        }
        let options = self.options(model)?;
        let plan = self.plan().unwrap_or_default();
        Ok(ExpertOptions { perfect_router: Some(PerfectRouterOptions { ranks: options.ranks, plan }), ..options })
    }
}

/// The layers of a model, for [`ExpertCounts`].
pub(crate) fn layers_of(info: &EngineInfo) -> Vec<usize> {
    (0..info.experts.map_or(0, |(layers, _)| layers)).collect()
}

/// The counts of a run; `None` for a model without experts or a device that does not count.
pub(crate) fn counts<'a>(
    info: &EngineInfo,
    run: &'a RunData,
    layers: &'a [usize],
    ranks: usize,
) -> Option<ExpertCounts<'a>> {
    let (_, experts) = info.experts?;
    let known = !run.iterations.is_empty() && run.expert_counts.len() == run.iterations.len() * info.expert_counts();
    known.then_some(ExpertCounts { counts: &run.expert_counts, layers, experts, ranks })
}

/// The loads of an iteration, for its line of `iterations.jsonl`.
pub(crate) fn iteration_json(counts: &ExpertCounts<'_>, iteration: usize) -> Value {
    let layer = |load: &LayerLoad| {
        let mut value = json!({
            "layer": load.layer,
            "tokensPerExpert": load.tokens_per_expert,
            "imbalance": load.imbalance,
            "entropy": load.entropy,
            "deadExperts": load.dead.len(),
            "hotExperts": load.hot.len(),
        });
        if !load.tokens_per_rank.is_empty() {
            value["tokensPerRank"] = json!(load.tokens_per_rank);
        }
        value
    };
    counts.iteration(iteration).layer_loads().iter().map(layer).collect()
}

/// What the balanced plan does to ranks, for every result made with it: the plan of TensorRT-LLM is not even everywhere.
pub(crate) fn plan_json(balance: &Balance) -> Value {
    json!({
        "output": WRONG,
        "method": balance.method.name(),
        "plan": plan_name(balance.plan),
        "experts": balance.experts,
        "experts_per_token": balance.k,
        "ranks": balance.ranks,
        "rank": balance.rank,
    })
}

/// The plan's name on the command line.
fn plan_name(plan: Plan) -> &'static str {
    match plan {
        Plan::Even => "even",
        Plan::TensorRtLlm => "tensorrt-llm",
    }
}

/// Figures of a whole run.
pub(crate) struct ExpertReport {
    pub loads: Vec<LayerLoad>,
    ranks: usize,
    /// See [`ExpertCounts::rank_slowdown`].
    pub rank_slowdown: Option<f64>,
}

impl ExpertReport {
    pub(crate) fn of(outcome: &Outcome) -> Option<ExpertReport> {
        let layers = layers_of(&outcome.info);
        let counts = counts(&outcome.info, &outcome.run, &layers, outcome.assumed_ranks)?;
        Some(ExpertReport::of_counts(&counts)).filter(|report| !report.loads.is_empty())
    }

    pub(crate) fn of_counts(counts: &ExpertCounts<'_>) -> ExpertReport {
        ExpertReport { loads: counts.layer_loads(), ranks: counts.ranks, rank_slowdown: counts.rank_slowdown() }
    }

    pub(crate) fn to_json(&self) -> Value {
        let mut value = json!({"layers": self.loads});
        if self.ranks > 1 {
            value["assumed_ranks"] = json!(self.ranks);
            value["rank_max_over_mean_per_iteration"] = json!(self.rank_slowdown);
            value["rank_loads"] = json!(self.rank_loads());
        }
        value
    }

    /// Pairs of each rank over all layers.
    pub(crate) fn rank_loads(&self) -> Vec<u64> {
        let mut sums = vec![0; self.ranks];
        for load in &self.loads {
            sums.iter_mut().zip(&load.tokens_per_rank).for_each(|(sum, tokens)| *sum += tokens);
        }
        sums
    }

    /// Ranks in words, where they were assumed.
    pub(crate) fn ranks_in_words(&self) -> Option<String> {
        let loads = self.rank_loads();
        let spread = loads.iter().max()? - loads.iter().min()?;
        let slowdown = self.rank_slowdown?;
        let loads: Vec<String> = loads.iter().map(u64::to_string).collect();
        Some(format!(
            "Ranks if {} GPUs shared the experts: loads {} (spread {spread}); the most loaded rank of an iteration has {slowdown:.3} times the mean",
            self.ranks,
            loads.join(" "),
        ))
    }

    pub(crate) fn text(&self, text: &mut String, width: usize) {
        text::heading(text, "EXPERT LOAD");
        text.push_str(&sheets::table(&sheet(&self.loads), MOST_LAYERS).render(width));
        text.push_str(&sheets::wrap(NOTE, width));
        text.push('\n');
        if let Some(ranks) = self.ranks_in_words() {
            let _ = writeln!(text, "{ranks}");
        }
    }

    fn heat_map(&self) -> HeatMap {
        let row = |load: &LayerLoad| {
            let mean = load.tokens_per_expert.iter().sum::<u64>() as f64 / load.tokens_per_expert.len() as f64;
            load.tokens_per_expert.iter().map(|tokens| *tokens as f64 / mean).collect()
        };
        HeatMap {
            title: "Expert load over the whole run".into(),
            row_label: "layer".into(),
            column_label: "expert".into(),
            value_label: "load over mean load".into(),
            rows: self.loads.iter().map(|load| load.layer).collect(),
            values: self.loads.iter().map(row).collect(),
        }
    }

    /// The heat map as files: ending and content.
    pub(crate) fn plots(&self) -> [(&'static str, Vec<u8>); 2] {
        let map = self.heat_map();
        [("svg", heat_map(&map).as_str().as_bytes().to_vec()), ("png", heat_map_png(&map))]
    }

    pub(crate) fn page(&self, page: Page) -> Page {
        let mut page = page.section("Experts").svg(&heat_map(&self.heat_map())).prose(NOTE);
        if let Some(ranks) = self.ranks_in_words() {
            page = page.prose(&ranks);
        }
        page.table(&sheets::page_table(&sheet(&self.loads)))
    }
}

/// Rows of the table on a terminal; report.json has all.
const MOST_LAYERS: usize = 40;
