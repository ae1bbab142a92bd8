//! One file per verb.

pub(crate) mod ab;
pub(crate) mod analyze;
pub(crate) mod bench;
pub(crate) mod build;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod convert;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod man;
pub(crate) mod prepare_dataset;
pub(crate) mod profile;
pub(crate) mod selftest;
pub(crate) mod simulate;
