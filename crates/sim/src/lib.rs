//! The engine's own scheduler on a virtual clock.
//!
//! A [`source::Source`] gives requests, [`cluster::simulate`] routes them to [`server::Server`]s and moves the clock from
//! event to event, and a [`server::Sink`] takes what happens. A [`replica::Replica`] calls the scheduler that the engine
//! calls; only the duration of an iteration is modelled, by a [`cost::CostModel`]. Times are whole nanoseconds, every
//! random draw has a seed: the same call gives the same bytes.

pub mod analytic;
pub mod backlog;
pub mod calibrate;
pub mod capacity;
pub mod cluster;
pub mod collector;
pub mod cost;
pub mod dynamic;
pub mod error;
pub mod fit;
pub mod histogram;
pub mod lengths;
pub mod oracles;
pub mod profile;
pub mod replay;
pub mod replica;
pub mod request;
pub mod scenario;
pub mod selftest;
pub mod server;
pub mod source;
pub mod splitwise;
pub mod units;
pub mod validate;

pub use cluster::{ClusterConfig, ClusterStats, Routing, simulate};
pub use collector::{Collector, Slo, SloMetric};
pub use cost::{CostModel, Linear, StepLoad};
pub use error::SimError;
pub use replica::{Replica, ReplicaConfig};
pub use request::{Content, Job, SimRequest};
pub use scenario::{Load, Outcome, Policy, Scenario};
pub use server::{Server, Sink, StepRecord};
