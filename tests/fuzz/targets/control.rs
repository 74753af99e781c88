//! `harness::fuzz::control_message` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fuzz::control_message(data));
