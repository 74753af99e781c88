//! `harness::fuzz::zmtp_wire` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fuzz::zmtp_wire(data));
