//! `harness::fuzz::residency` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fuzz::residency(data));
