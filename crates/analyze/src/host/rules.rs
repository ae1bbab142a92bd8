//! What the name of a range or call says about why a device waits: rules as data (`rules/causes.toml`).

use std::sync::LazyLock;

use regex::bytes::{Regex, RegexBuilder};
use serde::Deserialize;
use strobe_trace::{CallKind, StrId, Trace};

use super::names::plain;

/// A class of causes: one of those that follow from times alone, or one of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class(u8);

impl Class {
    /// The call had returned and the op had not begun.
    pub const LAUNCH_LATENCY: Class = Class(0);
    /// The op had been called before the device went idle.
    pub const QUEUED: Class = Class(1);
    /// Nothing recorded tells.
    pub const UNKNOWN: Class = Class(2);
    /// Work of the host inside a range that the rules do not know.
    pub const HOST_CODE: Class = Class(3);
    /// The short time between two calls of a thread, in which nothing is recorded.
    pub const BETWEEN_CALLS: Class = Class(4);
    /// A call of CUDA or HIP that the rules do not know.
    pub const OTHER_CALL: Class = Class(5);
    /// A function of the operating system that the rules do not know.
    pub const SYSTEM_CALL: Class = Class(6);
    /// The profiler's own work.
    pub const PROFILER: Class = Class(7);
    /// The thread could go on and had no CPU.
    pub const WAITS_FOR_CPU: Class = Class(8);
    /// The thread had no CPU, and nothing recorded tells why.
    pub const SWITCHED_OUT: Class = Class(9);
    /// The host works on pages of unified memory, which are moved to it one by one.
    pub const UNIFIED_MEMORY: Class = Class(10);
    const FIRST_RULE: u8 = 11;
    /// No rule speaks for a name.
    pub(super) const NONE: Class = Class(u8::MAX);

    /// Its name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Class::LAUNCH_LATENCY => "launch latency",
            Class::QUEUED => "queued",
            Class::UNKNOWN | Class::NONE => "unknown",
            Class::HOST_CODE => "host code",
            Class::BETWEEN_CALLS => "between calls",
            Class::OTHER_CALL => "other call",
            Class::SYSTEM_CALL => "system call",
            Class::PROFILER => "profiler",
            Class::WAITS_FOR_CPU => "waiting for a CPU",
            Class::SWITCHED_OUT => "switched out",
            Class::UNIFIED_MEMORY => "unified memory",
            rule => rule.rule().map_or("unknown", |rule| &rule.name),
        }
    }

    fn rule(self) -> Option<&'static Rule> {
        RULES.get(usize::from(self.0.checked_sub(Self::FIRST_RULE)?))
    }

    /// A thread waits for Python's interpreter lock.
    pub(crate) fn gil_wait() -> Class {
        static FOUND: LazyLock<Class> = LazyLock::new(|| Class::named("waiting for the GIL").unwrap_or(Class::NONE));
        *FOUND
    }

    /// A thread holds Python's interpreter lock.
    pub(crate) fn gil_held() -> Class {
        static FOUND: LazyLock<Class> = LazyLock::new(|| Class::named("holding the GIL").unwrap_or(Class::NONE));
        *FOUND
    }

    /// A thread collects garbage.
    pub(crate) fn garbage_collection() -> Class {
        static FOUND: LazyLock<Class> = LazyLock::new(|| Class::named("garbage collection").unwrap_or(Class::NONE));
        *FOUND
    }

    /// The class that the table calls so.
    fn named(name: &str) -> Option<Class> {
        RULES.iter().position(|rule| rule.name == name).map(|place| Class(Self::FIRST_RULE + place as u8))
    }

    pub(super) fn is_over(self) -> bool {
        self.rule().is_some_and(|rule| rule.over)
    }

    pub(super) fn waits(self) -> bool {
        self.rule().is_some_and(|rule| rule.waits)
    }

    /// Whether it is a call that returns when the device has come to some point.
    pub(super) fn is_device_wait(self) -> bool {
        self.as_str() == "wait for the device"
    }

    pub(super) fn is_ignored(self) -> bool {
        self.rule().is_some_and(|rule| rule.ignore)
    }

    /// Whether a range of this class speaks for all that happens inside it.
    pub(super) fn speaks(self) -> bool {
        self.rule().is_some_and(|rule| !rule.waits && !rule.ignore)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    cause: Vec<Text>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: String,
    range: Option<String>,
    frame: Option<String>,
    domain: Option<String>,
    call: Option<String>,
    os: Option<String>,
    not: Option<String>,
    #[serde(default)]
    over: bool,
    #[serde(default)]
    waits: bool,
    #[serde(default)]
    ignore: bool,
}

struct Rule {
    name: String,
    range: Option<Regex>,
    frame: Option<Regex>,
    domain: Option<Regex>,
    call: Option<Regex>,
    os: Option<Regex>,
    not: Option<Regex>,
    over: bool,
    waits: bool,
    ignore: bool,
}

/// Patterns are matched byte by byte: they are ASCII, and small tables are made faster.
static RULES: LazyLock<Vec<Rule>> = LazyLock::new(|| {
    let file: File = toml::from_str(include_str!("../rules/causes.toml")).expect("the table is part of the program");
    let compiled = |pattern: Option<String>, any_case: bool| {
        pattern.map(|pattern| {
            let regex = RegexBuilder::new(&pattern).case_insensitive(any_case).unicode(false).build();
            regex.expect("the table is part of the program")
        })
    };
    let rules = file.cause.into_iter().map(|text| Rule {
        range: compiled(text.range, true),
        frame: compiled(text.frame, true),
        domain: compiled(text.domain, true),
        call: compiled(text.call, false),
        os: compiled(text.os, false),
        not: compiled(text.not, true),
        name: text.name,
        over: text.over,
        waits: text.waits,
        ignore: text.ignore,
    });
    rules.collect()
});

/// The first rule that matches and is not taken back.
fn find(text: &str, matches: impl Fn(&Rule) -> bool) -> Class {
    let taken_back = |rule: &Rule| rule.not.as_ref().is_some_and(|not| not.is_match(text.as_bytes()));
    let place = RULES.iter().position(|rule| matches(rule) && !taken_back(rule));
    place.and_then(|place| u8::try_from(place).ok()).map_or(Class::NONE, |place| Class(Class::FIRST_RULE + place))
}

fn is_match(pattern: &Option<Regex>, text: &str) -> bool {
    pattern.as_ref().is_some_and(|regex| regex.is_match(text.as_bytes()))
}

/// The class of a range of this name, which is plain.
fn of_range_name(name: &str) -> Class {
    match name.rsplit_once(".py: ") {
        Some((_, function)) => find(name, |rule| is_match(&rule.range, function) || is_match(&rule.frame, name)),
        None => find(name, |rule| is_match(&rule.range, name)),
    }
}

/// The classes of the names of a trace, found once per distinct name.
pub(super) struct Classes {
    ranges: Vec<Option<Class>>,
    calls: Vec<Option<Class>>,
    functions: Vec<Option<Class>>,
    domains: Vec<Option<Class>>,
}

fn known(cache: &mut [Option<Class>], name: StrId, find: impl FnOnce() -> Class) -> Class {
    match cache.get_mut(name.0 as usize) {
        Some(slot) => *slot.get_or_insert_with(find),
        None => Class::NONE, // no name
    }
}

impl Classes {
    pub(super) fn new(trace: &Trace) -> Self {
        let empty = || vec![None; trace.strings.len()];
        Self { ranges: empty(), calls: empty(), functions: empty(), domains: empty() }
    }

    /// The class of a range, or [`Class::NONE`].
    pub(super) fn of_range(&mut self, trace: &Trace, range: usize) -> Class {
        let name = trace.ranges.name[range];
        let by_name = known(&mut self.ranges, name, || of_range_name(&plain(trace.text(name))));
        let domain = trace.ranges.domain[range];
        if by_name != Class::NONE || domain == StrId::NONE {
            return by_name;
        }
        let text = trace.text(domain);
        known(&mut self.domains, domain, || find(text, |rule| is_match(&rule.domain, text)))
    }

    /// The class of a call.
    pub(super) fn of_call(&mut self, trace: &Trace, call: usize) -> Class {
        let name = trace.calls.name[call];
        let (cache, pattern, other): (_, fn(&Rule) -> &Option<Regex>, _) = match trace.calls.kind[call] {
            CallKind::Gpu => (&mut self.calls, |rule| &rule.call, Class::OTHER_CALL),
            CallKind::OsRuntime => (&mut self.functions, |rule| &rule.os, Class::SYSTEM_CALL),
            CallKind::Profiler => return Class::PROFILER,
        };
        let class = known(cache, name, || {
            let text = plain(trace.text(name));
            find(&text, |rule| is_match(pattern(rule), &text))
        });
        match class {
            Class::NONE => other,
            class => class,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_classes() {
        let range = |name: &str| match of_range_name(&plain(name)) {
            Class::NONE => None,
            class => Some(class.as_str()),
        };
        for (name, class) in [
            ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Some("data loading")),
            ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", Some("data loading")),
            (
                "/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py(701): __next__",
                Some("data loading"),
            ),
            ("load_batch", Some("data loading")),
            ("data_loading", Some("data loading")),
            ("fetch_next_batch", Some("data loading")),
            ("load_step_3", None),
            ("decode_step 3", Some("iteration")),
            ("decode_batch", None),
            ("get_batch_size", None),
            ("decode_jpeg", Some("data loading")),
            ("[_TrainingEpochLoop].train_dataloader_next", Some("data loading")),
            ("get_next_batch_to_run", Some("scheduling")),
            ("tokenize_batch", Some("tokenizing")),
            ("detokenize", Some("tokenizing")),
            ("save_checkpoint", Some("checkpoint")),
            ("torch/utils/checkpoint.py(451): checkpoint", None),
            ("CheckpointFunction", None),
            ("Python GC", Some("garbage collection")),
            ("GC: generation 2", Some("garbage collection")),
            ("gc.collect", Some("garbage collection")),
            ("Waiting for GIL", Some("waiting for the GIL")),
            ("Holding GIL", Some("holding the GIL")),
            ("ProfilerStep#12", Some("iteration")),
            ("iteration 3: 0 ctx reqs, 8 gen reqs", Some("iteration")),
            ("step[DECODE bs=32]", Some("iteration")),
            ("<built-in method run_backward of torch._C._EngineBase object at 0x7f>", Some("waiting for a thread")),
            ("threading.py(324): wait", Some("waiting for a thread")),
            ("<built-in method acquire of _thread.lock object at 0x7f2>", Some("waiting for a thread")),
            ("_schedule", Some("scheduling")),
            ("sglang/srt/managers/scheduler.py(812): run_batch", None),
            ("sglang/srt/managers/scheduler.py(700): get_next_batch_to_run", Some("scheduling")),
            ("torch/nn/modules/module.py(1520): _call_impl", Some("frame")),
            ("torch/optim/lr_scheduler.py(70): step", None),
            ("aten::embedding", None),
            ("aten::_local_scalar_dense", None),
            ("## forward ##", None),
            ("nn.Module: LlamaAttention_3", None),
            ("Optimizer.step#SGD.step", None),
        ] {
            assert_eq!(range(name), class, "{name}");
        }
        let call = |name: &str| find(&plain(name), |rule| is_match(&rule.call, &plain(name))).as_str();
        for (name, class) in [
            ("cudaMalloc_v3020", "allocation"),
            ("hipFree", "free"),
            ("cuMemAlloc_v2", "allocation"),
            ("cudaStreamSynchronize", "wait for the device"),
            ("cudaEventQuery", "wait for the device"),
            ("cudaStreamCreateWithFlags", "stream, event or graph made"),
            ("cuModuleLoadData", "module loading"),
            ("cudaMemcpyAsync", "copy call"),
            ("cudaLaunchKernel_v7000", "launch call"),
            ("cudaGraphLaunch_v10000", "launch call"),
            ("cudaGraphInstantiate", "stream, event or graph made"),
        ] {
            assert_eq!(call(name), class, "{name}");
        }
        let os = |name: &str| find(name, |rule| is_match(&rule.os, name)).as_str();
        for (name, class) in [
            ("sem_wait", "waiting for a thread"),
            ("pthread_cond_timedwait", "waiting for a thread"),
            ("epoll_wait", "waiting for events or a socket"),
            ("pread64", "file I/O"),
            ("read", "file I/O"),
            ("mmap64", "host memory"),
            ("nanosleep", "sleep"),
        ] {
            assert_eq!(os(name), class, "{name}");
        }
        assert_eq!(Class::named("data loading").map(Class::as_str), Some("data loading"));
    }
}
