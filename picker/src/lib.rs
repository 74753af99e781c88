//! The picker: answers where each request goes.

pub mod bundle;
pub mod json;
pub mod prompt;
pub mod request;
