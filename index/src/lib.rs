//! The index of kvatlas: a precise prefix tree of what every engine's KV cache holds.
//!
//! * [`shared`]: the concurrent core, one writer and readers that never wait.

pub mod find;
mod sets;
pub mod shared;
mod table;
