//! Analyses of [`strobe_trace::recorded`]: on their way out, replaced by those over columns.

mod attribute;
mod budget;
mod compare;
mod ops;

pub use budget::{IterationBudget, KindBudget, Part, PartSummary, budget_by_kind, budgets};
pub use compare::{Comparison, KindWeight, OpDelta, compare, compare_ops};
pub use ops::{Bound, OpSummary, Roofline, top_ops, top_ops_by_kind};
