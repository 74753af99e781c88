//! The generated code in `proto/src/gen` is what the proto files say.
//!
//! `KVATLAS_REGENERATE=1 cargo test -p harness --test it gen` writes it anew.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Packages that only annotate: nothing of them is used on the wire.
const ANNOTATIONS: [&str; 4] = ["validate", "udpa.annotations", "xds.annotations.v3", "envoy.annotations"];

fn generate(out: &Path) -> BTreeMap<String, String> {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto/proto");
    let files = ["kvatlas/index/v1/index.proto", "envoy/service/ext_proc/v3/external_processor.proto"];
    let descriptors = protox::compile(files, [protos]).expect("the proto files compile");
    tonic_prost_build::configure()
        .out_dir(out)
        .include_file("mod.rs")
        .compile_fds(descriptors)
        .expect("code is generated");
    let mut made = BTreeMap::new();
    for entry in std::fs::read_dir(out).expect("output folder") {
        let path = entry.expect("entry").path();
        let name = path.file_name().and_then(|n| n.to_str()).expect("utf-8 name").to_string();
        let package = name.trim_end_matches(".rs");
        if ANNOTATIONS.contains(&package) {
            continue;
        }
        let mut text = std::fs::read_to_string(&path).expect("generated file");
        if name == "mod.rs" {
            text =
                format!("//! Generated from `proto/proto`; the test `gen` says how.\n{}", without_annotations(&text));
        }
        made.insert(name, text);
    }
    made
}

/// Drops the modules of annotation packages from the include file: innermost `pub mod x { include!(..) }` first, then
/// modules that became empty.
fn without_annotations(text: &str) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    for package in ANNOTATIONS {
        let include = format!("include!(\"{package}.rs\");");
        if let Some(at) = lines.iter().position(|l| l.trim() == include) {
            lines.drain(at - 1..=at + 1);
        }
    }
    loop {
        let empty = lines.windows(2).position(|w| w[0].trim_start().starts_with("pub mod") && w[1].trim() == "}");
        match empty {
            Some(at) => drop(lines.drain(at..=at + 1)),
            None => break,
        }
    }
    lines.join("\n") + "\n"
}

#[test]
fn generated_code_is_current() {
    let checked_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto/src/gen");
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("gen");
    let _ = std::fs::remove_dir_all(&out);
    std::fs::create_dir_all(&out).expect("a folder for generated code");
    let made = generate(&out);
    if std::env::var_os("KVATLAS_REGENERATE").is_some() {
        let _ = std::fs::remove_dir_all(&checked_in);
        std::fs::create_dir_all(&checked_in).expect("proto/src/gen");
        for (name, text) in &made {
            std::fs::write(checked_in.join(name), text).expect("generated file written");
        }
    }
    let mut there: Vec<String> = std::fs::read_dir(&checked_in)
        .expect("proto/src/gen")
        .map(|e| e.expect("entry").file_name().into_string().expect("utf-8 name"))
        .collect();
    there.sort();
    assert_eq!(there, made.keys().cloned().collect::<Vec<_>>(), "run with KVATLAS_REGENERATE=1");
    for (name, text) in &made {
        let is = std::fs::read_to_string(checked_in.join(name)).expect("checked-in file");
        assert!(is == *text, "proto/src/gen/{name} is not what the proto files say: run with KVATLAS_REGENERATE=1");
    }
}
