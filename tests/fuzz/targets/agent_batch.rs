//! `harness::fuzz::agent_batch` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fuzz::agent_batch(data));
