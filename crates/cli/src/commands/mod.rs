//! One file per verb.

pub mod bench;
pub mod build;
pub mod demo;
pub mod doctor;
pub mod eval;
pub mod prepare_dataset;
