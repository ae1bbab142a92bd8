//! Which family every op belongs to: rules kept as data, applied once per distinct name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use regex::bytes::{RegexSet, RegexSetBuilder};
use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};
use strobe_trace::{NONE, OpKind, StrId, Trace};

use crate::attribution::{Attribution, innermost_ranges};
use crate::context::Context;
use crate::host_compute::{self, is_host_only};
use crate::sheet::{Column, Report, Sheet, Unit, Value};

/// The category of ops that no rule knows.
pub const UNCLASSIFIED: &str = "unclassified";

const BUILTIN: &str = include_str!("rules/kernels.toml");

/// The automata of many long alternatives need more room than the default of 10 MB.
const REGEX_BYTES: usize = 64 << 20;

/// The rules by which ops are put into categories. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Rules {
    compiled: Arc<Compiled>,
}

impl Default for Rules {
    fn default() -> Self {
        Self::builtin()
    }
}

/// Why a file of rules cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// It is not TOML of the expected form.
    #[error("{path}: {problem}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong and where.
        problem: String,
    },
    /// One rule is wrong.
    #[error("{path}, line {line}, rule {rule} (category `{category}`): {problem}")]
    Rule {
        /// The file.
        path: PathBuf,
        /// The line of the rule's category.
        line: usize,
        /// Its place in the file, counted from 1.
        rule: usize,
        /// Its category.
        category: String,
        /// What is wrong.
        problem: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    #[serde(default)]
    rule: Vec<RuleText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    category: toml::Spanned<String>,
    #[serde(default)]
    class: Class,
    name: Option<String>,
    range: Option<String>,
    vendor: Option<Vendor>,
    #[serde(default)]
    tags: Vec<String>,
}

/// Who made the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Vendor {
    Nvidia,
    Amd,
}

#[derive(Debug)]
struct Rule {
    category: String,
    class: Class,
    name: Option<String>,
    range: Option<Regex>,
    vendor: Option<Vendor>,
    tags: Vec<String>,
}

#[derive(Debug)]
struct Compiled {
    rules: Vec<Rule>,
    /// Pattern `i` is the name of rule `i`; of rules without one it matches everything.
    names: RegexSet,
}

impl Rules {
    /// The rules that come with strobe.
    pub fn builtin() -> Self {
        static SHARED: OnceLock<Rules> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let rules = parse(BUILTIN, Path::new("kernels.toml"), Names::Checked);
                let rules = rules.expect("the built-in rules are tested");
                // They are ASCII, which makes small tables: they are made at every start.
                Self::compile(rules, false).expect("the built-in rules are tested")
            })
            .clone()
    }

    /// The built-in rules behind those of a user's file, whose text this is.
    pub fn with_user_file(text: &str, path: &Path) -> Result<Self, RulesError> {
        let mut rules = parse(text, path, Names::Unchecked)?;
        rules.extend(parse(BUILTIN, Path::new("kernels.toml"), Names::Checked)?);
        Self::compile(rules, true).map_err(|problem| RulesError::Syntax { path: path.to_owned(), problem })
    }

    fn compile(rules: Vec<Rule>, unicode: bool) -> Result<Self, String> {
        let patterns = rules.iter().map(|r| r.name.as_deref().unwrap_or(""));
        let names = RegexSetBuilder::new(patterns)
            .case_insensitive(true)
            .unicode(unicode)
            .size_limit(REGEX_BYTES)
            .dfa_size_limit(REGEX_BYTES)
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self { compiled: Arc::new(Compiled { rules, names }) })
    }
}

/// Whether the patterns of names are known to be right.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Names {
    Checked,
    Unchecked,
}

fn parse(text: &str, path: &Path, names: Names) -> Result<Vec<Rule>, RulesError> {
    let file: RuleFile = toml::from_str(text)
        .map_err(|error| RulesError::Syntax { path: path.to_owned(), problem: error.to_string().trim().to_owned() })?;
    let mut classes: BTreeMap<String, Class> = BTreeMap::new();
    let mut rules = Vec::new();
    for (index, rule) in file.rule.into_iter().enumerate() {
        let start = rule.category.span().start;
        let category = rule.category.into_inner();
        let wrong = |problem: String| RulesError::Rule {
            path: path.to_owned(),
            line: 1 + text.bytes().take(start).filter(|&b| b == b'\n').count(),
            rule: index + 1,
            category: category.clone(),
            problem,
        };
        if category.trim().is_empty() {
            return Err(wrong("the category is empty".into()));
        }
        if rule.name.is_none() && rule.range.is_none() {
            return Err(wrong("it needs `name` or `range`".into()));
        }
        let class = *classes.entry(category.clone()).or_insert(rule.class);
        if class != rule.class {
            return Err(wrong(format!("its class is {}, but {class} in an earlier rule", rule.class)));
        }
        let build = |pattern: &str| {
            RegexBuilder::new(pattern).case_insensitive(true).build().map_err(|error| wrong(error.to_string()))
        };
        if let Some(name) = rule.name.as_ref().filter(|_| names == Names::Unchecked) {
            build(name)?;
        }
        let range = rule.range.as_deref().map(build).transpose()?;
        rules.push(Rule { category, class, name: rule.name, range, vendor: rule.vendor, tags: rule.tags });
    }
    Ok(rules)
}

/// The category of every op of a trace.
#[derive(Clone, Debug, Default)]
pub struct Categories {
    /// The categories that occur.
    pub list: Vec<Category>,
    /// Per op its index into `list`.
    pub of_op: Vec<u16>,
    /// What else fused kernels do, by name; only names whose rule has tags.
    pub tags: BTreeMap<StrId, Vec<String>>,
}

/// A family of ops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Category {
    /// Its name, e.g. `gemm`, `attention`, `norm`; [`UNCLASSIFIED`] for ops that no rule knows.
    pub name: String,
    /// What its time counts as in a budget.
    pub class: Class,
}

/// What the time of a category counts as in a budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Arithmetic.
    #[default]
    Compute,
    /// Talking to other devices.
    Communication,
    /// Copies and fills.
    Memory,
}

impl std::fmt::Display for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Class::Compute => "compute",
            Class::Communication => "communication",
            Class::Memory => "memory",
        })
    }
}

/// Collects the categories that occur.
struct Builder<'r> {
    rules: &'r [Rule],
    list: Vec<Category>,
}

impl Builder<'_> {
    fn index(&mut self, name: &str, class: Class) -> u16 {
        let known = self.list.iter().position(|c| c.name == name);
        let index = known.unwrap_or_else(|| {
            self.list.push(Category { name: name.to_owned(), class });
            self.list.len() - 1
        });
        // A trace may invent any number of categories; those beyond the width of the column share the last one.
        u16::try_from(index).unwrap_or(u16::MAX)
    }

    fn of_rule(&mut self, rule: usize) -> u16 {
        let rules = self.rules;
        self.index(&rules[rule].category, rules[rule].class)
    }

    /// The class of a category that an engine recorded: what the rules say of a category of that name.
    fn recorded(&mut self, name: &str) -> u16 {
        let class = match name {
            "memcpy" | "memset" => Class::Memory,
            _ => self.rules.iter().find(|r| r.category == name).map_or(Class::Compute, |r| r.class),
        };
        self.index(name, class)
    }
}

impl Categories {
    /// Classifies every op of a trace. What the engine itself recorded wins; then rules with a range; then rules by
    /// name, each distinct name being looked at once.
    pub fn of(trace: &Trace, rules: &Rules) -> Self {
        let rules = &*rules.compiled;
        let vendor = vendor_of(trace);
        let applies = |rule: usize| vendor.is_none() || rules.rules[rule].vendor.is_none_or(|v| Some(v) == vendor);
        let mut builder = Builder { rules: &rules.rules, list: Vec::new() };
        let ranged = RangedRules::of(trace, &rules.rules);

        const NOT_YET: u16 = u16::MAX;
        let works: Vec<u16> = trace.works.iter().map(|w| builder.recorded(trace.text(w.category))).collect();
        let mut by_name: Vec<u16> = vec![NOT_YET; trace.strings.len()];
        let mut names_matched: BTreeMap<StrId, Vec<usize>> = BTreeMap::new();
        let mut by_range: BTreeMap<(u16, StrId), Option<u16>> = BTreeMap::new();
        let mut tags = BTreeMap::new();
        let mut kinds = [NOT_YET; 3];
        let mut of_op = Vec::with_capacity(trace.ops.len());
        for op in 0..trace.ops.len() {
            if let Some(&category) = works.get(trace.ops.work[op] as usize) {
                of_op.push(category);
                continue;
            }
            let (slot, label, class) = match trace.ops.kind[op] {
                OpKind::Memcpy => (0, "memcpy", Class::Memory),
                OpKind::Memset => (1, "memset", Class::Memory),
                OpKind::Graph => (2, "graph", Class::Compute),
                OpKind::Kernel | OpKind::CpuOp => {
                    let name = trace.ops.name[op];
                    let matched = |names_matched: &mut BTreeMap<StrId, Vec<usize>>| -> Vec<usize> {
                        let text = without_parameters(trace.text(name));
                        let matches = || rules.names.matches(text.as_bytes()).into_iter().filter(|&r| applies(r));
                        names_matched.entry(name).or_insert_with(|| matches().collect()).clone()
                    };
                    let by_ancestor = ranged.as_ref().and_then(|ranged| {
                        let near = ranged.nearest_of_op(op)?;
                        *by_range.entry((near, name)).or_insert_with(|| {
                            let rule = ranged.rule(near, &matched(&mut names_matched))?;
                            Some(builder.of_rule(rule))
                        })
                    });
                    if let Some(category) = by_ancestor {
                        of_op.push(category);
                        continue;
                    }
                    let known = by_name.get(name.0 as usize).copied().unwrap_or(NOT_YET);
                    if known != NOT_YET {
                        of_op.push(known);
                        continue;
                    }
                    let matched = matched(&mut names_matched);
                    let rule = matched.into_iter().find(|&r| rules.rules[r].range.is_none());
                    let category = match rule {
                        Some(rule) => {
                            if !rules.rules[rule].tags.is_empty() {
                                tags.insert(name, rules.rules[rule].tags.clone());
                            }
                            builder.of_rule(rule)
                        }
                        None => builder.index(UNCLASSIFIED, Class::Compute),
                    };
                    if let Some(known) = by_name.get_mut(name.0 as usize) {
                        *known = category;
                    }
                    of_op.push(category);
                    continue;
                }
            };
            if kinds[slot] == NOT_YET {
                kinds[slot] = builder.index(label, class);
            }
            of_op.push(kinds[slot]);
        }
        Self { list: builder.list, of_op, tags }
    }

    /// The category of op `index`.
    pub fn of_op(&self, index: usize) -> &Category {
        &self.list[self.of_op[index] as usize]
    }
}

/// Which rules with a range hold where.
struct RangedRules<'r> {
    rules: &'r [Rule],
    attribution: Attribution,
    /// Per range the set that holds for it and the ranges around it, as an index into `sets`; [`NONE`] = no rule.
    set_of_range: Vec<u32>,
    /// Distinct lists of rules, those of the innermost range first.
    sets: Vec<Vec<usize>>,
}

impl<'r> RangedRules<'r> {
    /// `None` when no range of the trace has a name that a rule asks for.
    fn of(trace: &Trace, rules: &'r [Rule]) -> Option<Self> {
        let asked: Vec<usize> = (0..rules.len()).filter(|&r| rules[r].range.is_some()).collect();
        if asked.is_empty() || trace.ranges.is_empty() {
            return None;
        }
        let matching = |name: StrId| -> Vec<usize> {
            let text = trace.text(name);
            let holds = |&r: &usize| rules[r].range.as_ref().is_some_and(|range| range.is_match(text));
            asked.iter().copied().filter(holds).collect()
        };
        let mut of_name: Vec<Option<Vec<usize>>> = vec![None; trace.strings.len()];
        let mut any = false;
        for &name in &trace.ranges.name {
            if let Some(slot @ None) = of_name.get_mut(name.0 as usize) {
                let rules = matching(name);
                any |= !rules.is_empty();
                *slot = Some(rules);
            }
        }
        if !any {
            return None;
        }
        let attribution = innermost_ranges(trace);
        let mut numbers: BTreeMap<Vec<usize>, u32> = BTreeMap::new();
        let mut sets: Vec<Vec<usize>> = Vec::new();
        let mut set_of_range = vec![NONE; trace.ranges.len()];
        // Parents stand before their children, so that their sets are known.
        for (range, &name) in trace.ranges.name.iter().enumerate() {
            let parent = attribution.parent[range];
            let inherited = if parent == NONE { NONE } else { set_of_range[parent as usize] };
            let own = of_name.get(name.0 as usize).and_then(Option::as_ref).filter(|own| !own.is_empty());
            set_of_range[range] = match own {
                None => inherited,
                Some(own) => {
                    let mut all = own.clone();
                    let outer = sets.get(inherited as usize).into_iter().flatten().copied();
                    all.extend(outer.filter(|r| !own.contains(r)));
                    *numbers.entry(all).or_insert_with_key(|all| {
                        sets.push(all.clone());
                        sets.len() as u32 - 1
                    })
                }
            };
        }
        Some(Self { rules, attribution, set_of_range, sets })
    }

    /// The set of rules that hold around the launch of an op.
    fn nearest_of_op(&self, op: usize) -> Option<u16> {
        let range = self.attribution.innermost[op];
        let set = *self.set_of_range.get(range as usize)?;
        u16::try_from(set).ok()
    }

    /// The first rule of a set that also agrees with the name, given the rules whose name pattern matches.
    fn rule(&self, set: u16, name_matches: &[usize]) -> Option<usize> {
        let rules = self.sets.get(set as usize)?;
        rules.iter().copied().find(|r| self.rules[*r].name.is_none() || name_matches.contains(r))
    }
}

/// A function's name without the list of its parameters, whose types say nothing of what it does.
fn without_parameters(name: &str) -> &str {
    let name = name.trim_end();
    if !name.ends_with(')') {
        return name;
    }
    let mut depth = 0usize;
    for (at, byte) in name.bytes().enumerate().rev() {
        match byte {
            b')' => depth += 1,
            b'(' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return if at == 0 { name } else { &name[..at] };
        }
    }
    name
}

/// The vendor of the devices, by their names or by the calls that launch on them.
fn vendor_of(trace: &Trace) -> Option<Vendor> {
    let by_device = trace.devices.iter().filter(|d| !d.is_cpu).find_map(|device| {
        let name = device.name.to_ascii_lowercase();
        let has = |words: &[&str]| words.iter().any(|w| name.contains(w));
        if has(&["nvidia", "tesla", "geforce", "quadro", "a100", "h100", "v100"]) {
            Some(Vendor::Nvidia)
        } else if has(&["amd", "instinct", "radeon", "mi300", "mi250", "gfx9"]) {
            Some(Vendor::Amd)
        } else {
            None
        }
    });
    let by_calls = || {
        let names = trace.calls.name.iter().take(10_000).map(|&name| trace.text(name));
        names.into_iter().find_map(|name| match name {
            _ if name.starts_with("hip") => Some(Vendor::Amd),
            _ if name.starts_with("cuda") || name.starts_with("cu") => Some(Vendor::Nvidia),
            _ => None,
        })
    };
    by_device.or_else(by_calls)
}

/// The time of one category.
#[derive(Clone, Debug, PartialEq)]
pub struct CategoryTime {
    /// Index into [`Categories::list`].
    pub category: usize,
    /// Sum of the lengths of its ops.
    pub time_ns: i64,
    /// How many ops.
    pub ops: usize,
    /// How many distinct names.
    pub names: usize,
    /// The name with the most time.
    pub top: StrId,
}

/// The time of every category, the longest first. Sums, not unions: ops that overlap on different streams count each.
pub fn category_times(context: &Context) -> Vec<CategoryTime> {
    let (trace, categories) = (context.trace, &context.categories);
    let mut times = vec![0i64; categories.list.len()];
    let mut counts = vec![0usize; categories.list.len()];
    for op in 0..trace.ops.len() {
        let category = categories.of_op[op] as usize;
        times[category] = times[category].saturating_add(context.own_ns(op));
        counts[category] += 1;
    }
    let mut names = vec![0usize; categories.list.len()];
    let mut top = vec![(-1i64, StrId::NONE); categories.list.len()];
    for ((category, name), (time, _)) in times_by_name(context) {
        names[category] += 1;
        if time > top[category].0 {
            top[category] = (time, name);
        }
    }
    let mut all: Vec<CategoryTime> = (0..categories.list.len())
        .map(|c| CategoryTime { category: c, time_ns: times[c], ops: counts[c], names: names[c], top: top[c].1 })
        .collect();
    all.sort_by(|a, b| {
        b.time_ns.cmp(&a.time_ns).then_with(|| categories.list[a.category].name.cmp(&categories.list[b.category].name))
    });
    all
}

/// Time and ops per category and name, in a stable order.
fn times_by_name(context: &Context) -> Vec<((usize, StrId), (i64, usize))> {
    let (trace, categories) = (context.trace, &context.categories);
    // Most names have one category: a dense table takes them, the few others go to the map.
    let mut first: Vec<(u16, i64, usize)> = vec![(u16::MAX, 0, 0); trace.strings.len()];
    let mut others: BTreeMap<(usize, StrId), (i64, usize)> = BTreeMap::new();
    for op in 0..trace.ops.len() {
        let (name, category) = (trace.ops.name[op], categories.of_op[op]);
        let time = context.own_ns(op);
        match first.get_mut(name.0 as usize) {
            Some(slot) if slot.0 == category || slot.2 == 0 => {
                *slot = (category, slot.1.saturating_add(time), slot.2 + 1);
            }
            _ => {
                let slot = others.entry((category as usize, name)).or_default();
                *slot = (slot.0.saturating_add(time), slot.1 + 1);
            }
        }
    }
    for (name, (category, time, count)) in first.into_iter().enumerate().filter(|(_, slot)| slot.2 > 0) {
        others.insert((category as usize, StrId(name as u32)), (time, count));
    }
    others.into_iter().collect()
}

/// How many names the tables of unclassified and fused kernels show.
const NAMES_SHOWN: usize = 20;

/// The same where the host computes: own time of operators by family.
fn host_report(context: &Context) -> Report {
    let own = host_compute::own_times(context);
    let times = host_compute::Families::of(context).times(context.trace, &own);
    let total: i64 = times.iter().map(|(_, ns, _)| *ns).fold(0, i64::saturating_add);
    let columns = [
        Column::new("category", Unit::Text),
        Column::new("time", Unit::Ns),
        Column::new("share of op time", Unit::Share),
        Column::new("ops", Unit::Count),
    ];
    let mut sheet = Sheet::new("categories", columns);
    for (name, ns, count) in times {
        let share = if total > 0 { Value::from(ns as f64 / total as f64) } else { Value::Unknown };
        sheet.push([name.into(), ns.into(), share, count.into()]);
    }
    Report::new("categories", "Host time by category of operator")
        .sheet(sheet)
        .note("time of operators without those inside them; all inside data loading and the optimizer counts as that")
}

/// Time by category, with what the rules do not know.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Device time by category";
    let (trace, categories) = (context.trace, &context.categories);
    if is_host_only(trace) {
        return host_report(context);
    }
    if trace.ops.is_empty() {
        return Report::absent("categories", TITLE, "the trace has no device ops");
    }
    let times = category_times(context);
    let total: i64 = times.iter().map(|t| t.time_ns).fold(0, i64::saturating_add);
    let share = |ns: i64| if total > 0 { Value::from(ns as f64 / total as f64) } else { Value::Unknown };
    let columns = [
        Column::new("category", Unit::Text),
        Column::new("class", Unit::Text),
        Column::new("time", Unit::Ns),
        Column::new("share of op time", Unit::Share),
        Column::new("ops", Unit::Count),
        Column::new("names", Unit::Count),
        Column::new("top name", Unit::Text),
    ];
    let mut sheet = Sheet::new("categories", columns);
    for time in &times {
        let category = &categories.list[time.category];
        sheet.push([
            category.name.as_str().into(),
            category.class.to_string().into(),
            time.time_ns.into(),
            share(time.time_ns),
            time.ops.into(),
            time.names.into(),
            trace.text(time.top).into(),
        ]);
    }
    let all_ops: Value = trace.ops.len().into();
    sheet.total = Some(vec!["all".into(), "".into(), total.into(), share(total), all_ops, Value::Unknown, "".into()]);

    let unclassified: Vec<usize> =
        (0..categories.list.len()).filter(|&c| categories.list[c].name == UNCLASSIFIED).collect();
    let mut unknown: Vec<(StrId, i64, usize)> = times_by_name(context)
        .into_iter()
        .filter(|((category, _), _)| unclassified.contains(category))
        .map(|((_, name), (time, count))| (name, time, count))
        .collect();
    unknown.sort_by_key(|&(name, time, _)| (std::cmp::Reverse(time), name));
    let unknown_time: i64 = unknown.iter().map(|u| u.1).fold(0, i64::saturating_add);
    let mut report = Report::new("categories", TITLE).sheet(sheet);
    if total > 0 {
        let covered = 100.0 * (1.0 - unknown_time as f64 / total as f64);
        report = report.note(format!("The rules know {covered:.1} % of the op time (sum of op lengths)."));
    }
    let columns = || {
        [
            Column::new("name", Unit::Text),
            Column::new("time", Unit::Ns),
            Column::new("share of op time", Unit::Share),
            Column::new("ops", Unit::Count),
        ]
    };
    let mut sheet = Sheet::new("unclassified", columns()).title("Largest unclassified names");
    for &(name, time, count) in unknown.iter().take(NAMES_SHOWN) {
        sheet.push([trace.text(name).into(), time.into(), share(time), count.into()]);
    }
    if unknown.is_empty() {
        report = report.note("No name is unclassified.");
    } else if unknown.len() > NAMES_SHOWN {
        report = report.note(format!("{} of {} unclassified names are listed.", NAMES_SHOWN, unknown.len()));
    }
    report = report.sheet(sheet);
    if !categories.tags.is_empty() {
        report = report.sheet(fused_sheet(context, share));
    }
    report.notes.extend(context.own_time_note());
    if trace.ops.kind.contains(&OpKind::Graph) {
        report = report.note(
            "`graph` is time inside CUDA graphs whose kernels were not recorded; capture with --cuda-graph-trace=node to see them.",
        );
    }
    report
}

fn fused_sheet(context: &Context, share: impl Fn(i64) -> Value) -> Sheet {
    let categories = &context.categories;
    let columns = [
        Column::new("name", Unit::Text),
        Column::new("category", Unit::Text),
        Column::new("name also says", Unit::Text),
        Column::new("time", Unit::Ns),
        Column::new("share of op time", Unit::Share),
        Column::new("ops", Unit::Count),
    ];
    let mut sheet = Sheet::new("fused", columns).title("Fused kernels");
    let mut rows: Vec<((usize, StrId), (i64, usize))> =
        times_by_name(context).into_iter().filter(|((_, name), _)| categories.tags.contains_key(name)).collect();
    rows.sort_by_key(|&((_, name), (time, _))| (std::cmp::Reverse(time), name));
    for ((category, name), (time, count)) in rows.into_iter().take(NAMES_SHOWN) {
        let tags = categories.tags.get(&name).map(|tags| tags.join(", ")).unwrap_or_default();
        sheet.push([
            context.trace.text(name).into(),
            categories.list[category].name.as_str().into(),
            tags.into(),
            time.into(),
            share(time),
            count.into(),
        ]);
    }
    sheet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_left_out() {
        assert_eq!(without_parameters("void f<a(b)>(int, char (*)(int))"), "void f<a(b)>");
        assert_eq!(without_parameters("void (anonymous namespace)::f<2>(x)"), "void (anonymous namespace)::f<2>");
        for whole in ["nvjet_tst", "(a)", "f<(int)4>", "unbalanced)", ""] {
            assert_eq!(without_parameters(whole), whole);
        }
    }
}
