//! The comparison as tables.

use super::names::{telling, unlike};
use super::runs::{Quantity, WholeRuns, says_something};
use super::verdict::{Outcome, Scale, group_sentence};
use super::{Basis, BurstPair, Comparison, GroupComparison, Interval, KernelChange};
use crate::sheet::{Column, Report, Role, Sheet, Unit, Value};

/// Kinds of iteration that are told in a sentence each.
const SENTENCES: usize = 3;

fn quantity_columns(first: &str) -> Vec<Column> {
    vec![
        Column::new(first, Unit::Text),
        Column::new("A", Unit::Number),
        Column::new("B", Unit::Number),
        Column::new("Time B to A", Unit::ShareChange),
        Column::new("CI", Unit::ShareInterval),
        Column::new("Outcome", Unit::Text),
    ]
}

fn quantity_row(quantity: &Quantity) -> [Value; 6] {
    [
        quantity.name.as_str().into(),
        quantity.a.into(),
        quantity.b.into(),
        quantity.time_change.into(),
        interval(quantity.interval.filter(says_something)),
        quantity.outcome.as_str().into(),
    ]
}

fn runs_in_words([a, b]: [usize; 2]) -> String {
    match (a, b) {
        (1, 1) => "one run a side".to_owned(),
        (a, b) => format!("geometric means of {a} and {b} runs"),
    }
}

fn run_figures(runs: &WholeRuns) -> Sheet {
    let title = format!("Whole runs: {}; rates count as the time that they stand for", runs_in_words(runs.counts));
    let mut sheet = Sheet::new("runs", quantity_columns("Whole runs")).title(title);
    runs.figures.iter().for_each(|figure| sheet.push(quantity_row(figure)));
    sheet
}

fn run_kinds(runs: &WholeRuns) -> Sheet {
    let mut columns = quantity_columns("Kind of iteration");
    columns.insert(1, Column::new("Share of time", Unit::Share));
    let title = "Iterations of the runs by kind: typical time of one in ms (lower quartile, over the batches that all runs had)";
    let mut sheet = Sheet::new("run_kinds", columns).title(title);
    for kind in &runs.kinds {
        let mut row = quantity_row(kind).to_vec();
        row.insert(1, kind.share.into());
        sheet.push(row);
    }
    sheet
}

impl Comparison {
    /// The first screen: the answer, the kinds of iteration, the parts of the difference, the kernels behind them.
    pub fn report(&self) -> Report {
        let [a, b] = &self.names;
        let mut report = Report::new("compare", format!("{}: A = {a}, B = {b}", self.verdict.outcome.as_str()));
        report.notes.push(self.verdict.sentence.clone());
        report.notes.extend(self.verdict.evidence.iter().cloned());
        report.notes.extend(self.warnings.iter().map(|w| format!("Warning: {w}.")));
        // Where whole runs are known and no op was recorded, their table says it all.
        let recorded = self.groups.iter().any(|g| g.a_kernels + g.b_kernels > 0.0);
        if self.verdict.outcome != Outcome::NotComparable && (recorded || self.runs.is_none()) {
            let mut groups: Vec<&GroupComparison> = self.groups.iter().collect();
            let time = |g: &GroupComparison| g.weight * (g.a_wall_ns + g.b_wall_ns);
            groups.sort_by(|x, y| time(y).total_cmp(&time(x)));
            report.notes.extend(groups.iter().take(SENTENCES).map(|g| group_sentence(g, self.basis)));
            if groups.len() > SENTENCES {
                report.notes.push(format!("{} more kinds of iteration in the table.", groups.len() - SENTENCES));
            }
        }
        report.sheets.extend(self.runs.as_ref().map(run_figures));
        report.sheets.extend(self.runs.as_ref().filter(|runs| !runs.kinds.is_empty()).map(run_kinds));
        report.sheets.push(self.kinds());
        report.sheets.push(self.parts());
        let kernels = |keep: fn(&KernelChange) -> bool| self.kernels(keep);
        let sheets = [
            (kernels(KernelChange::is_replacement), "replaced", "Replaced kernels"),
            (
                kernels(|k| k.count_changed() && !k.a.is_empty() && !k.b.is_empty()),
                "counts",
                "Kernels that run more or less often",
            ),
            (kernels(|k| k.b.is_empty()), "only_a", "Kernels only in A"),
            (kernels(|k| k.a.is_empty()), "only_b", "Kernels only in B"),
            (kernels(|k| k.delta_ns != 0.0), "kernels", "Kernels by change of time"),
        ];
        for (rows, name, title) in sheets {
            report = self.kernel_sheet(report, rows, name, title);
        }
        report.sheets.extend(self.pairs());
        report.sheets.extend(self.windows());
        report.sheets.extend(self.bursts());
        self.closing_notes(report)
    }

    fn kinds(&self) -> Sheet {
        let columns = [
            Column::new("Iterations", Unit::Text),
            Column::new("A", Unit::Count),
            Column::new("B", Unit::Count),
            Column::new("Wall A", Unit::Ns),
            Column::new("Wall B", Unit::Ns),
            Column::new("Change", Unit::NsChange),
            Column::new("of A", Unit::ShareChange),
            Column::new("95 % CI", Unit::NsInterval),
            Column::new("Kernels A", Unit::Number).role(Role::Kernels),
            Column::new("Kernels B", Unit::Number),
            Column::new("Launches A", Unit::Number).role(Role::Launches),
            Column::new("Launches B", Unit::Number),
            Column::new("Outcome", Unit::Text),
        ];
        let mut sheet = Sheet::new("kinds", columns).title("Mean wall time per iteration and device");
        for group in &self.groups {
            sheet.push([
                group.name.as_str().into(),
                group.a_iterations.into(),
                group.b_iterations.into(),
                group.a_wall_ns.into(),
                group.b_wall_ns.into(),
                group.delta_ns.into(),
                group.change.into(),
                interval(group.interval_ns),
                group.a_kernels.into(),
                group.b_kernels.into(),
                group.a_launches.into(),
                group.b_launches.into(),
                group.outcome.as_str().into(),
            ]);
        }
        sheet
    }

    fn parts(&self) -> Sheet {
        let columns = [
            Column::new("Iterations", Unit::Text),
            Column::new("Part", Unit::Text),
            Column::new("A", Unit::Ns),
            Column::new("B", Unit::Ns),
            Column::new("Change", Unit::NsChange),
            Column::new("of wall A", Unit::ShareChange),
            Column::new("95 % CI", Unit::NsInterval),
        ];
        let title = "Parts of the wall time; their changes add up to the change of the wall time of their iterations";
        let mut sheet = Sheet::new("parts", columns).title(title);
        for group in &self.groups {
            let share = |ns: f64| (group.a_wall_ns > 0.0).then(|| ns / group.a_wall_ns);
            for part in &group.parts {
                sheet.push([
                    group.name.as_str().into(),
                    part.part.as_str().into(),
                    part.a_ns.into(),
                    part.b_ns.into(),
                    part.delta_ns.into(),
                    share(part.delta_ns).into(),
                    interval(part.interval_ns),
                ]);
            }
        }
        if let [group] = self.groups.as_slice() {
            sheet.total = Some(vec![
                group.name.as_str().into(),
                "wall".into(),
                group.a_wall_ns.into(),
                group.b_wall_ns.into(),
                group.delta_ns.into(),
                group.change.into(),
                interval(group.interval_ns),
            ]);
        }
        sheet
    }

    /// The kernels of every group for which `keep` holds, largest change first.
    fn kernels(&self, keep: fn(&KernelChange) -> bool) -> Vec<(&GroupComparison, &KernelChange)> {
        let of_group = |g| move |k| (g, k);
        let mut rows: Vec<(&GroupComparison, &KernelChange)> =
            self.groups.iter().flat_map(|g| g.kernels.iter().filter(|k| keep(k)).map(of_group(g))).collect();
        rows.sort_by(|x, y| y.1.delta_ns.abs().total_cmp(&x.1.delta_ns.abs()));
        rows
    }

    fn kernel_sheet(
        &self,
        mut report: Report,
        rows: Vec<(&GroupComparison, &KernelChange)>,
        name: &str,
        title: &str,
    ) -> Report {
        if rows.is_empty() {
            return report;
        }
        let columns = [
            Column::new("Iterations", Unit::Text),
            Column::new("Category", Unit::Text),
            Column::new("Kernel A", Unit::Text),
            Column::new("Kernel B", Unit::Text),
            Column::new("Matched by", Unit::Text).role(Role::How),
            Column::new("Runs A", Unit::Number),
            Column::new("Runs B", Unit::Number),
            Column::new("Time A", Unit::Ns),
            Column::new("Time B", Unit::Ns),
            Column::new("Change", Unit::NsChange),
            Column::new("95 % CI", Unit::NsInterval),
        ];
        let mut sheet = Sheet::new(name, columns).title(title);
        for (group, kernel) in rows.iter().take(self.rows) {
            let [a, b] = names(kernel);
            sheet.push([
                group.name.as_str().into(),
                kernel.category.as_str().into(),
                a,
                b,
                kernel.matched_by.as_str().into(),
                kernel.a_count.into(),
                kernel.b_count.into(),
                kernel.a_ns.into(),
                kernel.b_ns.into(),
                kernel.delta_ns.into(),
                interval(kernel.interval_ns),
            ]);
        }
        let more = rows.len().saturating_sub(self.rows);
        report.sheets.push(sheet);
        if more > 0 {
            report = report.note(format!("{more} more rows of \"{title}\" are in the JSON."));
        }
        report
    }

    fn pairs(&self) -> Option<Sheet> {
        if self.basis == Basis::WholeWindow {
            return None;
        }
        let columns = [
            Column::new("Iterations", Unit::Text),
            Column::new("Number A", Unit::Count),
            Column::new("Number B", Unit::Count),
            Column::new("Wall A", Unit::Ns),
            Column::new("Wall B", Unit::Ns),
            Column::new("Change", Unit::NsChange),
            Column::new("of A", Unit::ShareChange),
            Column::new("Excluded", Unit::Text),
        ];
        let mut sheet = Sheet::new("pairs", columns).title("Iterations one by one");
        for group in &self.groups {
            let shown = group.pairs.iter().enumerate();
            for (_, pair) in shown.filter(|(place, pair)| *place < self.rows || pair.set_aside.is_some()) {
                let change = pair.a_wall_ns.zip(pair.b_wall_ns).map(|(a, b)| b - a);
                let share = change.zip(pair.a_wall_ns).filter(|(_, a)| *a > 0.0).map(|(change, a)| change / a);
                sheet.push([
                    group.name.as_str().into(),
                    pair.a_number.into(),
                    pair.b_number.into(),
                    pair.a_wall_ns.into(),
                    pair.b_wall_ns.into(),
                    change.into(),
                    share.into(),
                    pair.set_aside.clone().unwrap_or_default().into(),
                ]);
            }
        }
        Some(sheet)
    }

    fn windows(&self) -> Option<Sheet> {
        let [a, b] = self.windows.as_ref()?;
        let columns = [
            Column::new("Whole window", Unit::Text),
            Column::new("A", Unit::Ns),
            Column::new("B", Unit::Ns),
            Column::new("Change", Unit::NsChange),
        ];
        let mut sheet = Sheet::new("window", columns).title(
            "Whole windows, kernels only, summed over devices (not aligned: the windows may hold different work)",
        );
        let rows = [
            ("compute", a.compute_ns, b.compute_ns),
            ("exposed communication", a.exposed_communication_ns, b.exposed_communication_ns),
            ("idle (no kernel runs)", a.idle_ns, b.idle_ns),
            ("  of that copying memory", a.idle_copying_ns, b.idle_copying_ns),
        ];
        for (name, of_a, of_b) in rows {
            sheet.push([name.into(), of_a.into(), of_b.into(), (of_b - of_a).into()]);
        }
        sheet.total = Some(vec!["span".into(), a.span_ns.into(), b.span_ns.into(), (b.span_ns - a.span_ns).into()]);
        Some(sheet)
    }

    fn bursts(&self) -> Option<Sheet> {
        if self.bursts.is_empty() {
            return None;
        }
        let columns = [
            Column::new("Burst", Unit::Count),
            Column::new("Wall A", Unit::Ns),
            Column::new("Wall B", Unit::Ns),
            Column::new("of A", Unit::ShareChange),
            Column::new("Kernels A", Unit::Count).role(Role::Kernels),
            Column::new("Kernels B", Unit::Count),
            Column::new("Kernel time A", Unit::Ns),
            Column::new("Kernel time B", Unit::Ns),
        ];
        let title = "Work between pauses of the first device longer than 2 ms, in order (compare the kernels: it may be different work)";
        let mut sheet = Sheet::new("bursts", columns).title(title);
        for (place, pair) in self.bursts.iter().enumerate().take(self.rows) {
            sheet.push([
                place.into(),
                pair.a.wall_ns.into(),
                pair.b.wall_ns.into(),
                pair.change().into(),
                pair.a.kernels.into(),
                pair.b.kernels.into(),
                pair.a.kernel_ns.into(),
                pair.b.kernel_ns.into(),
            ]);
        }
        Some(sheet)
    }

    fn closing_notes(&self, mut report: Report) -> Report {
        if !self.left_out.is_empty() {
            let rows: Vec<String> =
                self.left_out.iter().map(|l| format!("{} x {} ({})", l.iterations, l.name, l.side)).collect();
            report = report.note(format!("Left out, without a counterpart on the other side: {}.", rows.join("; ")));
        }
        let aside: usize = self.groups.iter().flat_map(|g| &g.pairs).filter(|p| p.set_aside.is_some()).count();
        if aside > 0 {
            let text = "far longer than their like; they are listed one by one and do not count in the means";
            report = report.note(format!("{aside} iterations (or pairs) are {text}."));
        }
        let without: Vec<(&str, &str)> =
            self.groups.iter().filter_map(|g| Some((g.name.as_str(), g.no_interval.as_deref()?))).collect();
        match without.as_slice() {
            [(_, first), rest @ ..]
                if without.len() == self.groups.len() && rest.iter().all(|(_, why)| why == first) =>
            {
                report = report.note(format!("Iterations: {first}."));
            }
            some => report.notes.extend(some.iter().map(|(name, why)| format!("{name}: {why}."))),
        }
        let first = self.bursts.first().and_then(|pair| Some((pair, pair.change()?)));
        let about_as_much =
            |pair: &BurstPair| pair.a.kernels.min(pair.b.kernels) * 2 >= pair.a.kernels.max(pair.b.kernels);
        if let Some((pair, change)) = first.filter(|(pair, _)| about_as_much(pair)) {
            let unit = Scale::of(pair.a.wall_ns.max(pair.b.wall_ns) as f64);
            report = report.note(format!(
                "Without markers, work up to the first pause of 2 ms (some tools' iteration 0): {} -> {} ({:+.1} %), {} -> {} kernels{}.",
                unit.number(pair.a.wall_ns as f64),
                unit.with_unit(pair.b.wall_ns as f64),
                100.0 * change,
                pair.a.kernels,
                pair.b.kernels,
                if pair.a.kernels == pair.b.kernels { "" } else { ": not the same work" },
            ));
        }
        report.notes.extend(self.notes.iter().map(|n| format!("{n}.")));
        report
    }
}

fn interval(interval: Option<Interval>) -> Value {
    interval.map_or(Value::Unknown, |i| Value::Interval(i.low, i.high))
}

/// What to call the kernels of both sides, uncut: who knows the width shortens them, as a pair.
fn names(kernel: &KernelChange) -> [Value; 2] {
    let op = kernel.op.as_deref().map(|op| format!("{op}: ")).unwrap_or_default();
    let shown = unlike(&kernel.a, &kernel.b);
    let names = telling(shown[0].unwrap_or_default(), shown[1].unwrap_or_default());
    [(0, &kernel.a), (1, &kernel.b)].map(|(side, all)| {
        if all.is_empty() {
            return Value::Unknown;
        }
        let more = if all.len() > 1 { format!(" and {} more", all.len() - 1) } else { String::new() };
        format!("{op}{}{more}", names[side]).into()
    })
}
