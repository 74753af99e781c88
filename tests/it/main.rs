//! All integration tests, in one binary: one link, one place to look.

mod concurrency;
mod find;
mod r#gen;
mod parity;
mod recordings;
mod residency;
mod tidy;
