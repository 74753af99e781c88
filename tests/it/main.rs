//! All integration tests, in one binary: one link, one place to look.

mod agent_fingerprints;
mod agent_memory;
mod agent_truth;
mod concurrency;
mod envoy_cases;
mod find;
mod r#gen;
mod in_step;
mod in_step_sender;
mod in_step_world;
mod index_app;
mod index_world;
mod parity;
mod picker_faces;
mod picker_index;
mod picker_stream;
mod picker_world;
mod recordings;
mod residency;
mod stock_replay;
mod stock_world;
mod tidy;
