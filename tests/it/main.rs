//! All integration tests, in one binary: one link, one place to look.

mod r#gen;
mod residency;
