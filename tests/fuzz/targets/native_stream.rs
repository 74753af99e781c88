//! `harness::fuzz::native_stream` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fuzz::native_stream(data));
