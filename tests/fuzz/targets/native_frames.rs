//! `harness::fuzz::native_frames` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fuzz::native_frames(data));
