//! What a level is worth as the level of steps.

use super::super::roles::Role;
use super::anchors::{Anchor, Kind};
use super::{ENOUGH, LAYERS_WORTH, Level, Repeats};

/// Fewest kernels that may be a step alone.
const FEWEST_OF_ONE: usize = 30;

impl Repeats {
    /// A level of anchors that come `count` times, and what speaks for it as the level of steps.
    pub(super) fn level(&self, count: usize, reference: usize, members: Vec<usize>) -> Level {
        let own = || members.iter().map(|&member| &self.anchors[member]);
        let of_kind = |kind: Kind| own().filter(move |anchor| anchor.kind == kind);
        let mut said: Vec<String> = Vec::new();
        let mut score = 0.0;
        let mut roles: Vec<&'static Role> = Vec::new();
        for role in own().filter_map(|anchor| anchor.role) {
            if !roles.iter().any(|known| std::ptr::eq(*known, role)) {
                roles.push(role);
            }
        }
        roles.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        // A final norm comes once a step too: what layers have speaks against a step where nothing speaks for one.
        let for_step = roles.iter().any(|role| role.weight >= 2.0);
        for role in &roles {
            score += if for_step { role.weight.max(0.0) } else { role.weight };
            if role.weight > 0.0 {
                said.push(role.name.clone());
            }
        }
        let graphs = of_kind(Kind::Graph).next().is_some();
        if graphs {
            score += 3.0;
            said.push("a CUDA graph".to_owned());
        }
        let (read_back, sync) = (of_kind(Kind::ReadBack).next(), of_kind(Kind::Sync).next());
        if read_back.is_some() || sync.is_some() {
            score += 2.0;
            said.push(match read_back {
                Some(_) => "a copy to the host".to_owned(),
                None => sync.map(|anchor| anchor.name.clone()).unwrap_or_default(),
            });
        }
        if let Some(pass) = of_kind(Kind::Pass).next() {
            score += 2.0;
            said.push(pass.name.clone());
        }
        if of_kind(Kind::Input).next().is_some() {
            score += 1.0;
            said.push("a copy of inputs".to_owned());
        }
        let range = of_kind(Kind::Range)
            .filter(|anchor| anchor.role.is_none_or(|role| role.weight > 0.0))
            .max_by(|a, b| a.weight().total_cmp(&b.weight()));
        if let Some(range) = range.filter(|range| range.role.is_none()) {
            score += 2.0;
            said.push(format!("range `{}`", range.name));
        }
        if of_kind(Kind::Operator).any(|anchor| anchor.role.is_none()) {
            score += 0.5;
        }
        // A single run of layers may be a piece of something; several have something between them.
        if let Some(layers) = of_kind(Kind::Layers).next() {
            score += if count > 1 { 3.0 } else { 1.0 };
            said.push(layers.name.clone());
        }
        let kernels = of_kind(Kind::Kernel).filter(|anchor| anchor.places.len() == count).count();
        if kernels > 0 {
            score += kernels.min(3) as f64;
            said.push(if kernels == 1 { "a kernel".to_owned() } else { format!("{kernels} kernels") });
        }
        // Waits of the host and a rhythm are no steps without something on the device that comes as often.
        if kernels == 0 && !graphs && range.is_none() && !roles.iter().any(|role| role.weight > 0.0) {
            score = 0.0;
        }
        // Layers have copies, waits and kernels of their own as well: more has to speak for a step.
        let evident = graphs || range.is_some() || read_back.is_some() || own().any(Anchor::is_reason);
        // A run of layers and a graph, once each, may be a prefill and a decode step.
        let two = count == 1 && graphs && of_kind(Kind::Layers).next().is_some();
        if !evident {
            score = score.min(ENOUGH - 1.0 - LAYERS_WORTH);
        }
        // A single pass, or two, need a reason beside what happens to be there once or twice.
        let named = own().any(Anchor::is_reason);
        let reason = named || graphs || (count > 1 && range.is_some());
        if count <= 2 && !reason || two || count == 1 && self.kernels() < FEWEST_OF_ONE {
            score = 0.0;
        }
        let range = range.or_else(|| {
            own().find(|anchor| anchor.role.is_some_and(|role| role.weight > 0.0) && anchor.kind == Kind::Operator)
        });
        Level {
            count,
            score,
            evidence: said.join(", "),
            range: range.map(|anchor| anchor.name.clone()),
            graphs,
            inside: false,
            kernels,
            members,
            reference,
        }
    }
}
