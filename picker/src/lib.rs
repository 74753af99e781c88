//! The picker: answers where each request goes.

pub mod bundle;
pub mod chat;
pub mod detect;
pub mod json;
pub mod normalise;
pub mod prompt;
pub mod python;
pub mod request;
pub mod template;
pub mod tokens;
