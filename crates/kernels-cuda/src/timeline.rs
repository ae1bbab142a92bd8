//! What a GPU did in a profile window, and which op each part of it belongs to.

use std::collections::HashMap;
use std::fmt;

/// Everything recorded between the start and the stop of a window. Times are nanoseconds of the clock that the recorder
/// was given.
#[derive(Clone, Debug, Default)]
pub struct KernelTimeline {
    /// Names of kernels and calls, by number.
    pub names: Vec<String>,
    /// Kernels, copies and fills, by start.
    pub activities: Vec<Activity>,
    /// Calls of the driver and the runtime, and what the recorder itself took, by start.
    pub calls: Vec<ApiCall>,
    /// Records that were lost, as CUPTI counts them.
    pub dropped: u64,
    /// Activities that were left out because their times are missing.
    pub untimed: u64,
    /// Activities of graphs that could not be tied to a node.
    pub unmapped: u64,
    /// What recording took.
    pub cost: RecorderCost,
}

/// One thing that ran on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activity {
    /// When it began.
    pub start: i64,
    /// When it ended.
    pub end: i64,
    /// What it was.
    pub what: ActivityKind,
    /// Number of the GPU.
    pub device: u32,
    /// Number of the context.
    pub context: u32,
    /// Number of the stream.
    pub stream: u32,
    /// What joins it to the call that launched it.
    pub correlation: u32,
    /// The graph it ran in; 0 = none.
    pub graph: u32,
    /// The graph's node that it is; 0 = none.
    pub graph_node: u64,
    /// The op it belongs to, see [`crate::Gpu::set_tag`].
    pub node: Option<u32>,
    /// The iteration that launched it.
    pub iteration: Option<u32>,
}

impl Activity {
    /// Whether a graph launched it.
    pub fn in_graph(&self) -> bool {
        self.graph != 0 || self.graph_node != 0
    }
}

/// What an activity was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivityKind {
    /// A kernel.
    Kernel {
        /// Index into [`KernelTimeline::names`].
        name: u32,
        /// Blocks.
        grid: [u32; 3],
        /// Threads of a block.
        block: [u32; 3],
        /// Registers of a thread.
        registers: u32,
        /// Bytes of static shared memory of a block.
        static_shared: u32,
        /// Bytes of dynamic shared memory of a block.
        dynamic_shared: u32,
    },
    /// A copy; kinds are CUPTI's numbers.
    Copy {
        /// How much.
        bytes: u64,
        /// 1 host to device, 2 device to host, 8 device to device, ...
        copy_kind: u8,
        /// Kind of the source memory.
        src_kind: u8,
        /// Kind of the destination memory.
        dst_kind: u8,
    },
    /// A fill.
    Fill {
        /// How much.
        bytes: u64,
        /// With what.
        value: u32,
        /// Kind of the memory.
        mem_kind: u8,
    },
}

/// One call of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiCall {
    /// When it began.
    pub start: i64,
    /// When it returned.
    pub end: i64,
    /// Index into [`KernelTimeline::names`].
    pub name: u32,
    /// The system's number of the thread.
    pub thread: u32,
    /// What joins it to the activities it launched.
    pub correlation: u32,
    /// What it returned.
    pub result: i32,
    /// Whether it is time that the recorder took for itself.
    pub recorder: bool,
}

/// What recording a window took, outside of the steps themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RecorderCost {
    /// Nanoseconds to switch it on.
    pub start_ns: u64,
    /// Nanoseconds to switch it off, fetch what is left and decode everything.
    pub stop_ns: u64,
    /// Nanoseconds of the steps, the lead-in among them, that CUPTI reports as its own.
    pub inside_ns: u64,
    /// Records.
    pub records: u64,
    /// Bytes of records.
    pub bytes: u64,
}

impl fmt::Display for RecorderCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns as f64 / 1e6;
        write!(
            f,
            "on {:.2} ms, off and decoding {:.2} ms, CUPTI's own overhead in between {:.2} ms; {} records, {:.2} MB",
            ms(self.start_ns),
            ms(self.stop_ns),
            ms(self.inside_ns),
            self.records,
            self.bytes as f64 / 1e6
        )
    }
}

/// What one launch of a graph was: which graph, for which iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GraphLaunch {
    /// Index into the list of graphs.
    pub graph: usize,
    pub iteration: Option<u32>,
}

/// How activities are tied to ops and iterations.
#[derive(Debug, Default)]
pub(crate) struct Ties {
    /// Outside graphs: op and iteration that were set when the call with this correlation was made.
    pub calls: HashMap<u32, (Option<u32>, Option<u32>)>,
    /// The op of each node, for each distinct graph.
    pub graphs: Vec<Vec<Option<u32>>>,
    /// Launches of graphs in the order they were made.
    pub launches: Vec<GraphLaunch>,
    /// Names of the calls that launch graphs, as indices into the timeline's names.
    pub launch_names: Vec<u32>,
}

/// An iteration that was recorded ahead of a window: CUPTI prepares the nodes of a graph at its first replay, which
/// delays that one, and none inside the window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeadIn {
    /// Its number.
    pub iteration: u32,
    /// When everything of it had been launched, on the clock of the timeline.
    pub end: i64,
}

impl KernelTimeline {
    /// Leave out the lead-in: by iteration, because the GPU may have been busy with it until long after its end. What could
    /// not be tied to an iteration belongs to the lead-in if it ran before everything that is known to be in the window.
    pub(crate) fn leave_out(&mut self, lead_in: LeadIn) {
        let is_inside =
            |activity: &Activity| activity.iteration.is_some_and(|iteration| iteration != lead_in.iteration);
        let first = self.activities.iter().filter(|a| is_inside(a)).map(|a| a.start).min();
        let opened = lead_in.end.max(first.unwrap_or(i64::MIN));
        self.activities.retain(|a| is_inside(a) || a.iteration.is_none() && a.start >= opened);
        self.calls.retain(|call| call.end >= lead_in.end);
    }

    /// Sort, and give every activity its op and iteration.
    ///
    /// Inside graphs the order decides: the launches of a graph form one chain, so the activities of all launches follow
    /// each other in stream order. Correlation ids are only the fallback, because CUPTI before 13.1 reports wrong ones
    /// for graphs in every window but the first.
    pub(crate) fn tie(&mut self, ties: &Ties) {
        self.activities.sort_by_key(|a| (a.start, a.graph_node));
        self.calls.sort_by_key(|c| (c.start, std::cmp::Reverse(c.end)));
        for activity in self.activities.iter_mut().filter(|a| !a.in_graph()) {
            if let Some(&(node, iteration)) = ties.calls.get(&activity.correlation) {
                (activity.node, activity.iteration) = (node, iteration);
            }
        }
        // A runtime call contains the driver's call with the same correlation: one launch.
        let mut calls: Vec<u32> =
            self.calls.iter().filter(|c| ties.launch_names.contains(&c.name)).map(|c| c.correlation).collect();
        calls.dedup();
        let calls = Some(calls).filter(|calls| calls.len() == ties.launches.len());
        let in_graphs: Vec<usize> =
            self.activities.iter().enumerate().filter(|(_, a)| a.in_graph()).map(|(index, _)| index).collect();
        if !self.tie_by_order(ties, &in_graphs, calls.as_deref()) {
            self.tie_by_correlation(ties, &in_graphs, calls.as_deref());
        }
    }

    fn tie_by_order(&mut self, ties: &Ties, in_graphs: &[usize], calls: Option<&[u32]>) -> bool {
        let sizes = ties.launches.iter().map(|launch| ties.graphs.get(launch.graph).map_or(0, Vec::len));
        if sizes.clone().sum::<usize>() != in_graphs.len() {
            return false;
        }
        let mut rest = in_graphs;
        let mut chunks = Vec::with_capacity(ties.launches.len());
        for size in sizes {
            let Some((chunk, after)) = rest.split_at_checked(size) else { return false };
            let mut graphs = chunk.iter().map(|&index| self.activities[index].graph);
            let first = graphs.next();
            if graphs.any(|graph| Some(graph) != first) {
                return false;
            }
            chunks.push(chunk);
            rest = after;
        }
        for (number, (launch, chunk)) in ties.launches.iter().zip(chunks).enumerate() {
            for (&index, &node) in chunk.iter().zip(&ties.graphs[launch.graph]) {
                let activity = &mut self.activities[index];
                (activity.node, activity.iteration) = (node, launch.iteration);
                if let Some(&correlation) = calls.and_then(|calls| calls.get(number)) {
                    activity.correlation = correlation;
                }
            }
        }
        true
    }

    fn tie_by_correlation(&mut self, ties: &Ties, in_graphs: &[usize], calls: Option<&[u32]>) {
        let mut groups: HashMap<u32, Vec<usize>> = HashMap::new();
        for &index in in_graphs {
            groups.entry(self.activities[index].correlation).or_default().push(index);
        }
        // A launch that was recorded whole says which node id stands at which place, for those that were not.
        let mut places: HashMap<(usize, u64), usize> = HashMap::new();
        let launches = calls.unwrap_or_default().iter().zip(&ties.launches);
        let launches: Vec<_> = launches.filter_map(|(call, launch)| Some((groups.get(call)?, launch))).collect();
        let whole = |group: &[usize], launch: &GraphLaunch| {
            ties.graphs.get(launch.graph).is_some_and(|nodes| nodes.len() == group.len())
        };
        for (group, launch) in launches.iter().filter(|(group, launch)| whole(group, launch)) {
            for (place, &index) in group.iter().enumerate() {
                places.insert((launch.graph, self.activities[index].graph_node), place);
            }
        }
        let mut tied = 0;
        for (group, launch) in launches {
            let is_whole = whole(group, launch);
            for (order, &index) in group.iter().enumerate() {
                let activity = &mut self.activities[index];
                activity.iteration = launch.iteration;
                let place = match is_whole {
                    true => Some(order),
                    false => places.get(&(launch.graph, activity.graph_node)).copied(),
                };
                if let Some(node) = place.and_then(|place| ties.graphs.get(launch.graph)?.get(place)) {
                    activity.node = *node;
                    tied += 1;
                }
            }
        }
        self.unmapped = (in_graphs.len() - tied) as u64;
    }
}

/// From one clock to another, by two moments seen on both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClockMap {
    from: (u64, u64),
    to: (u64, u64),
}

impl ClockMap {
    /// Each moment is (source clock, target clock).
    pub(crate) fn new(first: (u64, u64), last: (u64, u64)) -> ClockMap {
        ClockMap { from: (first.0, last.0), to: (first.1, last.1) }
    }

    /// Whether a time of the source clock lies before the first moment.
    pub(crate) fn is_before(&self, time: u64) -> bool {
        time < self.from.0
    }

    /// A time of the source clock on the target clock.
    pub(crate) fn map(&self, time: u64) -> i64 {
        let since = time.wrapping_sub(self.from.0) as i64;
        let lengths = (self.from.1.saturating_sub(self.from.0), self.to.1.saturating_sub(self.to.0));
        // The clocks differ by parts per million: only that part is computed in floating point.
        let drift = match lengths {
            (0, _) | (_, 0) => 0.0,
            (from, to) => since as f64 * ((to as f64 - from as f64) / from as f64),
        };
        (self.to.0 as i64).wrapping_add(since).saturating_add(drift.round() as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activity(start: i64, graph: u32, correlation: u32) -> Activity {
        Activity {
            start,
            end: start + 5,
            what: ActivityKind::Fill { bytes: 1, value: 0, mem_kind: 2 },
            device: 0,
            context: 1,
            stream: 7,
            correlation,
            graph,
            graph_node: 0,
            node: None,
            iteration: None,
        }
    }

    fn call(start: i64, name: u32, correlation: u32) -> ApiCall {
        ApiCall { start, end: start + 1, name, thread: 1, correlation, result: 0, recorder: false }
    }

    const GRAPH_LAUNCH: u32 = 9;

    /// Two graphs, of three and two nodes.
    fn ties(launches: &[usize]) -> Ties {
        Ties {
            calls: HashMap::from([(50, (Some(4), Some(1)))]),
            graphs: vec![vec![Some(10), Some(11), None], vec![Some(20), Some(21)]],
            launches: launches
                .iter()
                .enumerate()
                .map(|(i, &graph)| GraphLaunch { graph, iteration: Some(i as u32) })
                .collect(),
            launch_names: vec![GRAPH_LAUNCH],
        }
    }

    fn nodes(timeline: &KernelTimeline) -> Vec<(Option<u32>, Option<u32>)> {
        timeline.activities.iter().map(|a| (a.node, a.iteration)).collect()
    }

    #[test]
    fn order_ties_graphs_whatever_their_correlation_says() {
        let mut timeline = KernelTimeline {
            // The second launch carries the first one's id, as some CUPTI versions report it.
            activities: [(40, 2, 60), (0, 0, 50), (10, 1, 60), (20, 1, 60), (30, 1, 60), (50, 2, 60)]
                .map(|(start, graph, correlation)| activity(start, graph, correlation))
                .into(),
            calls: vec![call(2, GRAPH_LAUNCH, 70), call(1, GRAPH_LAUNCH, 60), call(0, 0, 50)],
            ..KernelTimeline::default()
        };
        timeline.tie(&ties(&[0, 1]));
        let first = Some(0);
        let expected = [
            (Some(4), Some(1)),
            (Some(10), first),
            (Some(11), first),
            (None, first),
            (Some(20), Some(1)),
            (Some(21), Some(1)),
        ];
        assert_eq!(nodes(&timeline), expected);
        assert_eq!(timeline.activities.last().map(|a| a.correlation), Some(70));
        assert_eq!(timeline.unmapped, 0);
    }

    #[test]
    fn a_lost_record_costs_only_itself() {
        let with_node = |start, correlation, graph_node| Activity { graph_node, ..activity(start, 1, correlation) };
        let mut timeline = KernelTimeline {
            // The middle one of the first launch is missing; the second launch is whole.
            activities: vec![
                with_node(10, 60, 101),
                with_node(30, 60, 103),
                with_node(40, 70, 101),
                with_node(50, 70, 102),
                with_node(60, 70, 103),
                with_node(70, 80, 199),
            ],
            calls: vec![call(1, GRAPH_LAUNCH, 60), call(2, GRAPH_LAUNCH, 70), call(3, GRAPH_LAUNCH, 80)],
            ..KernelTimeline::default()
        };
        timeline.tie(&ties(&[0, 0, 1]));
        let (a, b, c) = (Some(0), Some(1), Some(2));
        let expected = [(Some(10), a), (None, a), (Some(10), b), (Some(11), b), (None, b), (None, c)];
        assert_eq!(nodes(&timeline), expected);
        assert_eq!(timeline.unmapped, 1);
    }

    #[test]
    fn a_lead_in_is_left_out_even_where_the_gpu_ran_it_inside_the_window() {
        let of = |start, iteration| Activity { iteration, ..activity(start, 0, 1) };
        let mut timeline = KernelTimeline {
            activities: vec![
                of(10, Some(4)),
                of(20, None),
                of(40, Some(4)),
                of(45, None),
                of(50, Some(5)),
                of(60, None),
            ],
            calls: vec![call(5, 0, 1), call(35, 0, 2)],
            ..KernelTimeline::default()
        };
        timeline.leave_out(LeadIn { iteration: 4, end: 30 });
        assert_eq!(timeline.activities.iter().map(|a| a.start).collect::<Vec<_>>(), [50, 60]);
        assert_eq!(timeline.calls.iter().map(|c| c.start).collect::<Vec<_>>(), [35]);
    }

    #[test]
    fn clocks_that_drift_meet_at_both_ends() {
        let map = ClockMap::new((1_000_000, 500), (2_000_000, 1_000_600));
        assert_eq!(map.map(1_000_000), 500);
        assert_eq!(map.map(2_000_000), 1_000_600);
        assert_eq!(map.map(1_500_000), 500_550);
        assert_eq!(map.map(999_990), 490, "before the window");
        assert_eq!(ClockMap::new((5, 100), (5, 100)).map(7), 102, "an empty window");
    }
}
