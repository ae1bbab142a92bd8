//! Which family every op belongs to: rules kept as data, applied once per distinct name.

use strobe_trace::Trace;

/// The rules by which ops are put into categories.
#[derive(Clone, Debug, Default)]
pub struct Rules {}

/// The category of every op of a trace.
#[derive(Clone, Debug, Default)]
pub struct Categories {
    /// The categories that occur.
    pub list: Vec<Category>,
    /// Per op its index into `list`.
    pub of_op: Vec<u16>,
}

/// A family of ops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Category {
    /// Its name, e.g. `gemm`, `attention`, `norm`; `unclassified` for ops that no rule knows.
    pub name: String,
    /// What its time counts as in a budget.
    pub class: Class,
}

/// What the time of a category counts as in a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Arithmetic.
    Compute,
    /// Talking to other devices.
    Communication,
    /// Copies and fills.
    Memory,
}

impl Categories {
    /// Classifies every op of a trace.
    pub fn of(trace: &Trace, rules: &Rules) -> Self {
        let _ = (trace, rules);
        todo!("helper I")
    }

    /// The category of op `index`.
    pub fn of_op(&self, index: usize) -> &Category {
        &self.list[self.of_op[index] as usize]
    }
}
