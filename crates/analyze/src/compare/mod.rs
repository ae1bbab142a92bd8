//! Two sides (each one trace or several repeats): what is different, and what it cost.

mod align;
mod bootstrap;
mod kernels;
mod normalize;
