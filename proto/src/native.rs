//! The event dialects of stock engines.
