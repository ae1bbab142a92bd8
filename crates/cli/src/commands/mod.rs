//! One file per verb.

pub mod ab;
pub mod analyze;
pub mod bench;
pub mod build;
pub mod compare;
pub mod completions;
pub mod convert;
pub mod demo;
pub mod doctor;
pub mod eval;
pub mod man;
pub mod prepare_dataset;
pub mod profile;
pub mod selftest;
pub mod simulate;
