//! Everything a simulation is told, in one value that can be run again with another rate or seed.

use std::sync::Arc;

use strobe_workload::{Arrival, Arrivals, MetricOptions, Metrics, PercentileRule, Rng, metrics};

use crate::cluster::{ClusterConfig, ClusterStats, simulate};
use crate::collector::{Answer, Collector, EXACT_TOKENS, Slo};
use crate::cost::CostModel;
use crate::dynamic::{DynamicConfig, DynamicServer};
use crate::error::SimError;
use crate::lengths::LengthDist;
use crate::replica::{Replica, ReplicaConfig};
use crate::request::SimRequest;
use crate::server::{Server, Sink};
use crate::source::{ClosedLoop, Lengths, OpenLoop, Replay, Sessions, Source, Think};

/// When requests come.
#[derive(Clone, Debug)]
pub enum Load {
    /// By an arrival process.
    Open(Arrival),
    /// From so many clients, each after its last answer and a think time of this mean.
    Closed {
        /// Clients.
        clients: u64,
        /// Mean think time.
        think_ns: f64,
    },
    /// In conversations that begin by an arrival process.
    Sessions {
        /// When conversations begin.
        arrival: Arrival,
        /// Requests per conversation.
        turns: u32,
        /// Mean think time.
        think_ns: f64,
        /// Tokens that all prompts begin with.
        shared: u32,
    },
    /// As recorded.
    Replay(Arc<Vec<SimRequest>>),
}

/// What kind of server.
#[derive(Clone, Debug)]
pub enum Policy {
    /// The engine's scheduler.
    Engine(ReplicaConfig),
    /// Triton's dynamic batcher.
    Dynamic(DynamicConfig),
}

/// A simulation to be run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// When requests come.
    pub load: Load,
    /// Prompt lengths, where the load has none of its own.
    pub input: LengthDist,
    /// Output lengths, where the load has none of its own.
    pub output: LengthDist,
    /// How many requests.
    pub num_requests: u64,
    /// What serves them.
    pub policy: Policy,
    /// How long iterations take.
    pub cost: CostModel,
    /// How fast each server is, relative to the cost; one entry per server.
    pub speeds: Vec<f64>,
    /// How servers work together.
    pub cluster: ClusterConfig,
    /// Limits a good request meets.
    pub slos: Vec<Slo>,
    /// Requests that are simulated but not counted in latencies.
    pub warm_up: u64,
    /// Seed of everything random.
    pub seed: u64,
}

/// What came out.
pub struct Outcome {
    /// The numbers.
    pub answer: Answer,
    /// The benchmark's metrics, where all records were kept.
    pub metrics: Option<Metrics>,
    /// What happened to the cluster.
    pub cluster: ClusterStats,
    /// Whether the run was stopped before its end, and the numbers are those of the requests that had ended.
    pub partial: bool,
}

impl Scenario {
    fn source(&self) -> Box<dyn Source> {
        let lengths = Lengths::new(self.input.clone(), self.output.clone(), self.seed);
        let (seed, count) = (self.seed, self.num_requests);
        match &self.load {
            Load::Open(arrival) => {
                let levels = if let Policy::Dynamic(dynamic) = &self.policy { dynamic.priorities } else { 1 };
                Box::new(OpenLoop::new(Arrivals::new(*arrival, seed), lengths, count).with_priorities(levels, seed))
            }
            Load::Closed { clients, think_ns } => {
                Box::new(ClosedLoop::new(*clients, lengths, Think::new(*think_ns, seed), count))
            }
            Load::Sessions { arrival, turns, think_ns, shared } => {
                let think = Think::new(*think_ns, seed);
                Box::new(Sessions::new(Arrivals::new(*arrival, seed), lengths, think, *turns, *shared, count))
            }
            Load::Replay(requests) => {
                let first = usize::try_from(count).unwrap_or(usize::MAX).min(requests.len());
                Box::new(Replay::new(requests[..first].to_vec()))
            }
        }
    }

    fn servers(&self) -> Vec<Box<dyn Server>> {
        let prefill = self.cluster.prefill_servers;
        let server = |(index, &speed): (usize, &f64)| -> Box<dyn Server> {
            let (number, cost) = (index as u32, self.cost.clone());
            match &self.policy {
                Policy::Engine(config) => {
                    let config = ReplicaConfig { speed, prefill_only: index < prefill, ..*config };
                    Box::new(Replica::new(number, config, cost, self.seed))
                }
                Policy::Dynamic(config) => {
                    let config = DynamicConfig { speed, ..config.clone() };
                    Box::new(DynamicServer::new(number, config, cost, self.seed))
                }
            }
        };
        self.speeds.iter().enumerate().map(server).collect()
    }

    /// The same with other draws, as replication `number`; 0 is the scenario itself. Costs that were measured on several
    /// runs are as much faster or slower as one of those was; two neighbours differ in opposite ways, so that the mean
    /// over replications stays where it was.
    pub fn replication(&self, number: u64) -> Scenario {
        let mut other = self.clone();
        if number > 0 {
            let seed = |number: u64| self.seed.wrapping_add(number * 7919);
            (other.seed, other.cluster.seed) = (seed(number), seed(number));
            if let CostModel::Fitted { fitted, scale, .. } = &mut other.cost {
                let pair = Rng::new(seed(number.div_ceil(2)), "speed of a run").normal().clamp(-3.0, 3.0);
                let sign = if number.is_multiple_of(2) { -1.0 } else { 1.0 };
                *scale = (1.0 + sign * pair * fitted.run_spread).max(0.1);
            }
        }
        other
    }

    /// Whether a queue could grow without bound: requests come whatever becomes of those before them.
    pub fn is_open(&self) -> bool {
        match &self.load {
            Load::Open(arrival) | Load::Sessions { arrival, .. } => *arrival != Arrival::AtOnce,
            Load::Closed { .. } => false,
            Load::Replay(requests) => {
                let last = requests.get((self.num_requests as usize).wrapping_sub(1)).or(requests.last());
                last.is_some_and(|last| last.arrival_ns > 0)
            }
        }
    }

    /// The same with another number of requests, of which at least a tenth is not counted in latencies.
    pub fn of_length(&self, num_requests: u64) -> Scenario {
        let warm_up = self.warm_up.max(num_requests / 10).min(num_requests.saturating_sub(1));
        Scenario { num_requests, warm_up, ..self.clone() }
    }

    /// Whether so few tokens are expected that all records can be kept.
    pub fn keeps_records(&self) -> bool {
        let tokens = match &self.load {
            Load::Replay(requests) => {
                requests.iter().take(self.num_requests as usize).map(|r| u64::from(r.output)).sum()
            }
            _ => (self.output.mean() * self.num_requests as f64) as u64,
        };
        tokens <= EXACT_TOKENS && self.warm_up == 0
    }

    /// Run it into any sink.
    pub fn run_into(&self, sink: &mut dyn Sink) -> Result<ClusterStats, SimError> {
        simulate(self.servers(), &self.cluster, self.source().as_mut(), sink)
    }

    /// Run it. Writers that the collector has get every record. A run that its collector stops is partial, or where a limit
    /// broke [`SimError::Stopped`].
    pub fn run(&self, mut collector: Collector<'_>) -> Result<Outcome, SimError> {
        self.run_collecting(&mut collector)
    }

    /// The same with a collector that can be asked afterwards.
    pub fn run_collecting(&self, collector: &mut Collector<'_>) -> Result<Outcome, SimError> {
        collector.expected = match &self.load {
            Load::Replay(requests) => self.num_requests.min(requests.len() as u64),
            _ => self.num_requests,
        };
        collector.slos.clone_from(&self.slos);
        collector.warm_up = self.warm_up;
        if let CostModel::Fitted { fitted, .. } = &self.cost {
            collector.covers = Some(fitted.covers);
        }
        let (cluster, partial) = match self.run_into(collector) {
            Ok(cluster) => (cluster, false),
            Err(SimError::Stopped) if !collector.is_broken() => {
                let end_ns = collector.last_end_ns();
                let server_ns = self.speeds.len() as f64 * end_ns as f64;
                let most_servers = self.speeds.len();
                (ClusterStats { end_ns, server_ns, most_servers, ..ClusterStats::default() }, true)
            }
            Err(error) => return Err(error),
        };
        let options =
            MetricOptions { rule: PercentileRule::Linear, world_size: self.speeds.len().max(1), streaming: true };
        let exact = if collector.keep_records { metrics(&collector.records, &options).ok() } else { None };
        let answer = collector.answer(cluster.server_ns, self.is_open(), exact.as_ref());
        Ok(Outcome { answer, metrics: exact, cluster, partial })
    }
}
