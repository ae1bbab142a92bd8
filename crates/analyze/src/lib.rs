//! Pure functions from a trace to tables: iteration budget, op summary, roofline, comparison.
//!
//! | question | function |
//! |---|---|
//! | Where did the wall clock of each iteration go? | [`budgets`], then [`budget_by_kind`] |
//! | Which ops take the time, and how far are they from the hardware's limit? | [`top_ops`], [`top_ops_by_kind`] |
//! | What explains the difference between two recordings? | [`compare`], [`compare_ops`] |
//!
//! Two rules hold everywhere: parts add up to their whole, and what is not known is absent or called
//! unknown, never zero.

mod attribute;
mod budget;
mod compare;
mod ops;
mod stats;

pub use budget::{IterationBudget, KindBudget, Part, PartSummary, budget_by_kind, budgets};
pub use compare::{Comparison, KindWeight, OpDelta, compare, compare_ops};
pub use ops::{Bound, OpSummary, Roofline, top_ops, top_ops_by_kind};
pub use stats::Summary;
