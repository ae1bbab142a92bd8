//! Several servers behind a router, and the loop that moves the virtual clock.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use strobe_workload::Rng;

use crate::error::SimError;
use crate::lengths::LONGEST;
use crate::request::{Job, SimRequest};
use crate::server::{NEVER, Server, Sink};
use crate::source::Source;

/// How a request finds its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// One after the other.
    RoundRobin,
    /// Any, each as likely.
    Random,
    /// The one with the fewest requests.
    LeastOutstanding,
    /// The one with the fewest requests among this many different ones drawn at random.
    PowerOf(u32),
    /// The one with the fewest tokens left to compute or produce.
    ShortestTokens,
    /// The one whose cache holds most of the prompt, unless it has many more requests than another.
    PrefixAffinity,
}

/// A server is away for some time; what it had starts again elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which server.
    pub server: usize,
    /// When it fails.
    pub at_ns: u64,
    /// When it is back.
    pub until_ns: u64,
}

/// What moving a request's keys and values to another server takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// Every time.
    pub base_ns: f64,
    /// For every token.
    pub per_token_ns: f64,
}

/// Servers are added and taken away by how many requests each has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Autoscale {
    /// Servers that are always there.
    pub min: usize,
    /// One is added above this many requests per server, one is taken away below half of it.
    pub target: f64,
    /// Time from the decision to the first request.
    pub delay_ns: u64,
    /// Time between decisions.
    pub interval_ns: u64,
}

/// How the servers work together.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// How requests find a server.
    pub routing: Routing,
    /// The first so many servers only compute prompts; what that takes is in `transfer`. 0 is no such split.
    pub prefill_servers: usize,
    /// What moving a request from a prompt server to another takes.
    pub transfer: Transfer,
    /// When servers are away.
    pub failures: Vec<Failure>,
    /// Whether servers come and go with the load.
    pub autoscale: Option<Autoscale>,
    /// Seed of random routing.
    pub seed: u64,
}

impl Default for ClusterConfig {
    fn default() -> ClusterConfig {
        ClusterConfig {
            routing: Routing::RoundRobin,
            prefill_servers: 0,
            transfer: Transfer { base_ns: 0.0, per_token_ns: 0.0 },
            failures: Vec::new(),
            autoscale: None,
            seed: 0,
        }
    }
}

impl ClusterConfig {
    /// Whether `count` servers can work together like this.
    fn check(&self, count: usize) -> Result<(), SimError> {
        let bad = |option, problem| Err(SimError::Option { option, problem });
        if count == 0 {
            return bad("--replicas", "expected at least 1, found 0".into());
        }
        if self.prefill_servers >= count {
            let found = self.prefill_servers;
            return bad("--prefill-replicas", format!("{found} of {count} servers would leave none to generate"));
        }
        match self.failures.iter().find(|failure| failure.server >= count) {
            Some(failure) => bad("--fail", format!("there is no server {} among {count}", failure.server)),
            None => Ok(()),
        }
    }
}

/// What happened to the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ClusterStats {
    /// When the last event happened.
    pub end_ns: u64,
    /// Servers times the time they were there.
    pub server_ns: f64,
    /// Most servers at once.
    pub most_servers: usize,
    /// Requests that lost their server and started again.
    pub restarted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Control {
    Fail(usize),
    Recover(usize),
    Transferred(usize),
    Scale,
    ScaledUp(usize),
}

struct Cluster<'a> {
    config: &'a ClusterConfig,
    servers: Vec<Box<dyn Server>>,
    /// When each server has its next event.
    times: Vec<u64>,
    /// Whether each server takes requests: it is wanted and does not fail.
    up: Vec<bool>,
    /// Whether each server belongs to the cluster now; only autoscaling changes that.
    wanted: Vec<bool>,
    /// Failures of each server that are not over.
    failing: Vec<u32>,
    controls: BinaryHeap<Reverse<(u64, Control)>>,
    /// Requests on their way between servers.
    moving: Vec<Option<Job>>,
    num_moving: usize,
    /// Requests that find no server.
    parked: Vec<Job>,
    /// Requests routed so far by round robin, in the only or first pool and in that behind the prompt servers.
    routed: [usize; 2],
    rng: Rng,
    starting: usize,
    stats: ClusterStats,
    up_since_ns: Vec<u64>,
}

/// Run until every request of `source` has ended. `servers` are numbered in order.
pub fn simulate(
    servers: Vec<Box<dyn Server>>,
    config: &ClusterConfig,
    source: &mut dyn Source,
    sink: &mut dyn Sink,
) -> Result<ClusterStats, SimError> {
    let count = servers.len();
    config.check(count)?;
    let first_up = config.autoscale.map_or(count, |scale| scale.min.clamp(1, count));
    let mut cluster = Cluster {
        config,
        times: vec![NEVER; count],
        up: (0..count).map(|i| i < first_up).collect(),
        wanted: (0..count).map(|i| i < first_up).collect(),
        failing: vec![0; count],
        servers,
        controls: BinaryHeap::new(),
        moving: Vec::new(),
        num_moving: 0,
        parked: Vec::new(),
        routed: [0; 2],
        rng: Rng::new(config.seed, "routing"),
        starting: 0,
        stats: ClusterStats { most_servers: first_up, ..ClusterStats::default() },
        up_since_ns: vec![0; count],
    };
    for failure in &config.failures {
        cluster.controls.push(Reverse((failure.at_ns, Control::Fail(failure.server))));
        cluster.controls.push(Reverse((failure.until_ns, Control::Recover(failure.server))));
    }
    if let Some(scale) = config.autoscale {
        cluster.controls.push(Reverse((scale.interval_ns, Control::Scale)));
    }
    cluster.run(source, sink)?;
    Ok(cluster.stats)
}

impl Cluster<'_> {
    fn run(&mut self, source: &mut dyn Source, sink: &mut dyn Sink) -> Result<(), SimError> {
        // Where an end leads to arrivals, servers must not run ahead of each other.
        let coupled = source.reacts() || self.config.prefill_servers > 0;
        let mut ended = Vec::new();
        let mut now = 0;
        for round in 0u64.. {
            if round.is_multiple_of(256) && sink.stop() {
                return Err(SimError::Stopped);
            }
            let arrival = match source.next_arrival_ns() {
                Some(time) if time >= NEVER / 2 => return Err(SimError::ClockOverflow),
                time => time.unwrap_or(NEVER),
            };
            let control = self.controls.peek().map_or(NEVER, |c| c.0.0);
            let (server, time) = earliest(&self.times);
            if arrival == NEVER && time == NEVER && self.num_moving == 0 && self.parked.is_empty() {
                break;
            }
            // What arrives at an instant is there before anything is planned at that instant.
            if control <= arrival && control <= time && control != NEVER {
                now = now.max(control);
                self.control(now)?;
            } else if arrival <= time && arrival != NEVER {
                now = now.max(arrival);
                let Some(request) = source.take() else { break };
                let (tokens, most) = (u64::from(request.input) + u64::from(request.output), 2 * u64::from(LONGEST));
                if tokens > most {
                    return Err(SimError::TooLong { id: request.id, tokens, most });
                }
                self.route(Job::new(request), now)?;
            } else if time == NEVER {
                // Only requests without a server are left, and none comes back.
                for mut job in std::mem::take(&mut self.parked) {
                    job.refused = Some("no server is left");
                    sink.request(job)?;
                }
            } else {
                let mut limit = arrival.min(control);
                if coupled {
                    limit = limit.min(earliest_but(&self.times, server).max(time.saturating_add(1)));
                }
                self.servers[server].run(limit, &mut ended, sink)?;
                self.times[server] = self.servers[server].next_event_ns();
                for job in ended.drain(..) {
                    // A job that was refused has no last token; it ended when that was found out.
                    now = now.max(if job.refused.is_some() { time } else { job.last_token_ns });
                    if job.refused.is_none() && job.left() > 0 {
                        self.move_on(job)?;
                    } else {
                        source.ended(&job, now);
                        sink.request(job)?;
                    }
                }
            }
        }
        self.stats.end_ns = now;
        for server in 0..self.servers.len() {
            if self.up[server] {
                self.stats.server_ns += (now - self.up_since_ns[server].min(now)) as f64;
            }
        }
        Ok(())
    }

    /// The prompt was computed on one server; the rest happens on another, after the way there.
    fn move_on(&mut self, mut job: Job) -> Result<(), SimError> {
        let transfer = &self.config.transfer;
        let tokens = job.request.input + job.produced - 1;
        let takes_ns = (transfer.base_ns + transfer.per_token_ns * f64::from(tokens)).round();
        let arrival = job.last_token_ns.saturating_add(takes_ns as u64);
        if arrival >= NEVER / 2 {
            return Err(SimError::ClockOverflow);
        }
        job.imported = tokens;
        let place = self.moving.iter().position(Option::is_none).unwrap_or_else(|| {
            self.moving.push(None);
            self.moving.len() - 1
        });
        self.moving[place] = Some(job);
        self.num_moving += 1;
        self.controls.push(Reverse((arrival, Control::Transferred(place))));
        Ok(())
    }

    fn control(&mut self, now: u64) -> Result<(), SimError> {
        let Some(Reverse((_, control))) = self.controls.pop() else { return Ok(()) };
        match control {
            Control::Fail(server) => {
                self.failing[server] += 1;
                if self.failing[server] > 1 {
                    return Ok(()); // it is away already
                }
                let mut lost = Vec::new();
                self.servers[server].fail(&mut lost);
                self.times[server] = self.servers[server].next_event_ns();
                self.set_up(server, false, now);
                self.stats.restarted += lost.len() as u64;
                lost.into_iter().try_for_each(|job| self.route(job, now))?;
            }
            Control::Recover(server) => {
                self.failing[server] = self.failing[server].saturating_sub(1);
                self.bring_up(server, now)?;
            }
            Control::ScaledUp(server) => {
                self.starting -= 1;
                self.wanted[server] = true;
                self.bring_up(server, now)?;
            }
            Control::Transferred(place) => {
                self.num_moving -= 1;
                if let Some(job) = self.moving.get_mut(place).and_then(Option::take) {
                    self.route(job, now)?;
                }
            }
            Control::Scale => self.scale(now),
        }
        Ok(())
    }

    fn set_up(&mut self, server: usize, up: bool, now: u64) {
        if self.up[server] && !up {
            self.stats.server_ns += (now - self.up_since_ns[server]) as f64;
        } else if up && !self.up[server] {
            self.up_since_ns[server] = now;
        }
        self.up[server] = up;
        self.stats.most_servers = self.stats.most_servers.max(self.up.iter().filter(|up| **up).count());
    }

    /// The server takes requests from now on, if it is wanted and no failure of it is left.
    fn bring_up(&mut self, server: usize, now: u64) -> Result<(), SimError> {
        if !self.wanted[server] || self.failing[server] > 0 {
            return Ok(());
        }
        self.set_up(server, true, now);
        let parked = std::mem::take(&mut self.parked);
        parked.into_iter().try_for_each(|job| self.route(job, now))
    }

    fn scale(&mut self, now: u64) {
        let Some(scale) = self.config.autoscale else { return };
        let up: Vec<usize> = (0..self.servers.len()).filter(|&i| self.up[i]).collect();
        let outstanding: usize = up.iter().map(|&i| self.servers[i].outstanding()).sum();
        let per_server = (outstanding + self.parked.len()) as f64 / up.len().max(1) as f64;
        let is_free = |i: &usize| !self.wanted[*i] && self.failing[*i] == 0 && self.times[*i] == NEVER;
        let free = (0..self.servers.len()).find(is_free);
        if per_server > scale.target && self.starting == 0 {
            if let Some(server) = free {
                self.starting += 1;
                self.controls.push(Reverse((now.saturating_add(scale.delay_ns), Control::ScaledUp(server))));
            }
        } else if per_server < scale.target / 2.0
            && up.len() > scale.min
            && let Some(&last) = up.last()
        {
            self.wanted[last] = false;
            self.set_up(last, false, now); // it finishes what it has
        }
        self.controls.push(Reverse((now.saturating_add(scale.interval_ns), Control::Scale)));
    }

    fn route(&mut self, mut job: Job, now: u64) -> Result<(), SimError> {
        let prefill = self.config.prefill_servers;
        let (pool, servers) = match prefill {
            0 => (0, 0..self.servers.len()),
            n if job.imported == 0 && job.produced == 0 => (0, 0..n),
            n => (1, n..self.servers.len()),
        };
        let up: Vec<usize> = servers.filter(|&i| self.up[i]).collect();
        let Some(server) = self.choose(pool, &up, &job.request) else {
            self.parked.push(job);
            return Ok(());
        };
        job.server = server as u32;
        self.servers[server].offer(job, now)?;
        self.times[server] = self.servers[server].next_event_ns();
        Ok(())
    }

    fn choose(&mut self, pool: usize, up: &[usize], request: &SimRequest) -> Option<usize> {
        let fewest = |among: &[usize], servers: &[Box<dyn Server>]| {
            among.iter().copied().min_by_key(|&i| servers[i].outstanding())
        };
        if up.len() <= 1 {
            return up.first().copied();
        }
        match self.config.routing {
            Routing::RoundRobin => {
                let before = self.routed[pool];
                self.routed[pool] = before.wrapping_add(1);
                up.get(before % up.len()).copied()
            }
            Routing::Random => up.get(self.rng.below(up.len() as u64) as usize).copied(),
            Routing::LeastOutstanding => fewest(up, &self.servers),
            Routing::PowerOf(choices) => {
                let mut drawn = up.to_vec();
                let choices = (choices as usize).min(drawn.len());
                for place in 0..choices {
                    let other = place + self.rng.below((drawn.len() - place) as u64) as usize;
                    drawn.swap(place, other);
                }
                fewest(&drawn[..choices], &self.servers)
            }
            Routing::ShortestTokens => up.iter().copied().min_by_key(|&i| self.servers[i].outstanding_tokens()),
            Routing::PrefixAffinity => {
                let least = up.iter().map(|&i| self.servers[i].outstanding()).min().unwrap_or(0);
                // A warm cache is worth a queue that is a little longer, not any queue.
                let near = up.iter().copied().filter(|&i| self.servers[i].outstanding() <= 2 * least + 4);
                near.max_by_key(|&i| {
                    (self.servers[i].cached_prefix(request), Reverse(self.servers[i].outstanding()), Reverse(i))
                })
            }
        }
    }
}

fn earliest(times: &[u64]) -> (usize, u64) {
    let mut found = (0, NEVER);
    for (index, &time) in times.iter().enumerate() {
        if time < found.1 {
            found = (index, time);
        }
    }
    found
}

fn earliest_but(times: &[u64], not: usize) -> u64 {
    times.iter().enumerate().filter(|(i, _)| *i != not).map(|(_, t)| *t).min().unwrap_or(NEVER)
}
