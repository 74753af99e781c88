//! The house rules, checked over the source tree: where what may stand, and who may import whom.
//!
//! Each rule takes files and gives complaints; [`the_tree_is_tidy`] runs them on the repository, and each has a test
//! that shows that it can fail.

use harness::rust_source::{code_of, modules, paths, without_tests};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A file of the repository, by its path from the root.
struct File {
    path: String,
    text: String,
}

type Rule = fn(&[File]) -> Vec<String>;

const RULES: [Rule; 9] =
    [pure_roots, worldly_crates, wire_types, imports, anyhow_places, rust_files, reachable, wording, root_entries];

const CRATES: [&str; 5] = ["proto", "agent", "index", "picker", "tests"];
const MAX_LINES: usize = 500;
/// Files beyond edge/ that may name generated types, each with its reason.
const WIRE: [(&str, &str); 0] = [];
/// Files and folders beyond edge/ that may use atomics, each with its reason.
const ATOMICS: [(&str, &str); 6] = [
    ("index/src/shared.rs", "the one place of concurrency of the index"),
    ("index/src/shared/", "its parts"),
    ("index/src/table/segment.rs", "the slots that its readers look at while its writer changes them"),
    ("agent/src/ring.rs", "the one hand-over from the engine's thread to ours"),
    ("agent/src/engine", "gauges that the engine's thread writes and ours reads"),
    ("agent/src/feed.rs", "reads and writes those gauges on our side"),
];

impl File {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs") && !self.path.contains("/src/gen/")
    }

    /// The crate and the path below its src/, for files of a crate's library and programs.
    fn in_src(&self) -> Option<(&str, &str)> {
        let (name, rest) = self.path.split_once("/src/")?;
        (self.is_rust() && CRATES.contains(&name)).then_some((name, rest))
    }

    fn product_code(&self) -> String {
        if self.path.ends_with("_tests.rs") || self.path.ends_with("/tests.rs") {
            return String::new();
        }
        without_tests(&code_of(&self.text))
    }

    /// Complaints about every path in product code that `wrong` finds a reason against.
    fn against(&self, wrong: impl Fn(&str) -> Option<&'static str>) -> Vec<String> {
        let found = paths(&self.product_code());
        let complain = |(line, path): (usize, String)| Some(format!("{}:{line}: {path}: {}", self.path, wrong(&path)?));
        found.into_iter().filter_map(complain).collect()
    }
}

/// Is `path` the path `prefix` or below it?
fn below(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

fn in_edge(rest: &str) -> bool {
    rest.starts_with("edge/") || rest == "edge.rs"
}

fn in_app(rest: &str) -> bool {
    rest == "app.rs" || rest.starts_with("app/") || rest == "main.rs" || rest.starts_with("bin/")
}

/// The settings, read once: from the environment, files, and what the machine has.
fn in_config(rest: &str) -> bool {
    rest == "config.rs" || rest.starts_with("config/")
}

fn in_python(name: &str, rest: &str) -> bool {
    name == "agent" && (rest == "py.rs" || rest.starts_with("py/"))
}

/// Code at the root of src/ is pure: no async, socket, clock, environment, thread, randomness.
fn pure_roots(files: &[File]) -> Vec<String> {
    const WORLD: [(&str, &str); 14] = [
        ("std::env", "only config.rs reads the environment"),
        ("std::time::Instant", "time is passed in"),
        ("std::time::SystemTime", "time is passed in"),
        ("std::thread", "threads are made in edge/"),
        ("std::process", "processes are started in edge/"),
        ("std::fs", "files are read in edge/ and config.rs"),
        ("std::io::stdin", "input is read in edge/"),
        ("std::sync::atomic", "concurrency has its few places, named in ATOMICS"),
        ("std::os", "what touches the world is in edge/"),
        ("tokio", "async is in edge/"),
        ("tokio_stream", "async is in edge/"),
        ("futures", "async is in edge/"),
        ("rand", "seeds are passed in"),
        ("rustix", "what touches the world is in edge/"),
    ];
    // Addresses are plain values; everything else of std::net is a socket or looks a name up.
    const ADDRESSES: [&str; 6] = ["SocketAddr", "SocketAddrV4", "SocketAddrV6", "IpAddr", "Ipv4Addr", "Ipv6Addr"];
    let mut out = vec![];
    for file in files {
        let Some((name, rest)) = file.in_src() else { continue };
        if in_edge(rest) || in_app(rest) || in_python(name, rest) {
            continue;
        }
        let atomics = ATOMICS.iter().any(|(place, _)| file.path.starts_with(place));
        let config = in_config(rest);
        out.extend(file.against(|path| {
            if below(path, "std::net") {
                let address = path.split("::").nth(2).is_some_and(|item| ADDRESSES.contains(&item));
                return (!address).then_some("sockets are in edge/");
            }
            let asked = ["std::env", "std::fs", "std::thread::available_parallelism"];
            if (config && asked.iter().any(|asked| below(path, asked))) || (atomics && below(path, "std::sync::atomic"))
            {
                return None;
            }
            match path {
                "async" | "await" => Some("async is in edge/"),
                _ => WORLD.iter().find(|(world, _)| below(path, world)).map(|(_, why)| *why),
            }
        }));
    }
    out
}

/// Crates that speak to the world stand in edge/ and app.rs only, Python in agent/src/py.rs only.
fn worldly_crates(files: &[File]) -> Vec<String> {
    const EDGE: [&str; 6] = ["zeromq", "axum", "tonic", "tonic_health", "hyper", "hyper_util"];
    let mut out = vec![];
    for file in files {
        let Some((name, rest)) = file.in_src() else { continue };
        let edge = in_edge(rest) || in_app(rest);
        out.extend(file.against(|path| {
            if below(path, "pyo3") && !in_python(name, rest) {
                return Some("only agent/src/py.rs sees Python");
            }
            let worldly = EDGE.iter().any(|name| below(path, name));
            (worldly && !edge).then_some("sockets and servers are in edge/ and app.rs")
        }));
    }
    out
}

/// Generated types stop at the edge.
fn wire_types(files: &[File]) -> Vec<String> {
    let mut out = vec![];
    for file in files {
        let Some((name, rest)) = file.in_src() else { continue };
        if in_edge(rest) || WIRE.iter().any(|(path, _)| *path == file.path) {
            continue;
        }
        let mine = name == "proto";
        out.extend(file.against(|path| {
            let wire = below(path, "proto::wire") || (mine && below(path, "crate::wire"));
            wire.then_some("generated types stop at edge/")
        }));
    }
    out
}

/// Agent, index and picker meet in proto; the picker may use the index as a library, never the reverse.
fn imports(files: &[File]) -> Vec<String> {
    let forbidden = |name: &str| -> &[&str] {
        match name {
            "proto" => &["agent", "index", "picker", "harness"],
            "agent" => &["index", "picker", "harness"],
            "index" => &["agent", "picker", "harness"],
            "picker" => &["agent", "harness"],
            _ => &[],
        }
    };
    let mut out = vec![];
    for file in files {
        if let Some((name, _)) = file.in_src() {
            let wrong = |path: &str| {
                let crates = forbidden(name);
                path.contains("::") && crates.iter().any(|other| below(path, other))
            };
            out.extend(file.against(|path| wrong(path).then_some("this crate may not know that one")));
        }
        if let Some(name) = file.path.strip_suffix("/Cargo.toml") {
            for (number, line) in file.text.lines().enumerate() {
                let key = line.split(['.', '=', ' ']).next().unwrap_or_default();
                if forbidden(name).contains(&key) {
                    out.push(format!("{}:{}: {key}: this crate may not know that one", file.path, number + 1));
                }
            }
        }
    }
    out
}

/// anyhow is for programs and tests; libraries have errors of their own.
fn anyhow_places(files: &[File]) -> Vec<String> {
    let mut out = vec![];
    for file in files {
        let Some((name, rest)) = file.in_src() else { continue };
        if name != "tests" && !in_app(rest) && !in_config(rest) {
            out.extend(file.against(|path| below(path, "anyhow").then_some("a library's errors are its own types")));
        }
    }
    out
}

/// Every Rust file says what it is, has one subject, a name from the field, and a length that can be read.
fn rust_files(files: &[File]) -> Vec<String> {
    const EMPTY_NAMES: [&str; 8] = ["util", "utils", "common", "helper", "helpers", "manager", "misc", "shared_utils"];
    let mut out = vec![];
    for file in files.iter().filter(|file| file.is_rust()) {
        let path = &file.path;
        if !file.text.starts_with("//!") {
            out.push(format!("{path}: does not open with //!, what it is about"));
        }
        let lines = file.text.lines().count();
        if lines > MAX_LINES {
            out.push(format!("{path}: {lines} lines: split it by subject, {MAX_LINES} are enough"));
        }
        for part in path.trim_end_matches(".rs").split('/') {
            if EMPTY_NAMES.contains(&part) {
                out.push(format!("{path}: {part} says nothing: take the name of its subject"));
            }
        }
        if code_of(&file.text).contains("#[ignore") {
            out.push(format!("{path}: an ignored test is no test"));
        }
    }
    out
}

/// Every Rust file is reached from the root of a crate.
fn reachable(files: &[File]) -> Vec<String> {
    let by_path: BTreeMap<&str, &File> = files.iter().map(|file| (file.path.as_str(), file)).collect();
    let mut todo: Vec<(String, bool)> = vec![];
    for file in files {
        let Some(folder) = file.path.strip_suffix("Cargo.toml") else { continue };
        let named = file.text.lines().filter_map(|line| line.trim().strip_prefix("path = \"")?.strip_suffix('"'));
        let usual = ["src/lib.rs", "src/main.rs", "build.rs"];
        todo.extend(usual.into_iter().chain(named).map(|path| (format!("{folder}{path}"), true)));
        for place in ["src/bin/", "benches/", "examples/"] {
            let place = format!("{folder}{place}");
            let roots = by_path.keys().filter(|path| {
                let rest = path.strip_prefix(place.as_str());
                rest.is_some_and(|rest| rest.ends_with(".rs") && (!rest.contains('/') || rest.ends_with("/main.rs")))
            });
            todo.extend(roots.map(|path| ((*path).to_owned(), true)));
        }
    }
    let mut seen = BTreeSet::new();
    while let Some((path, root)) = todo.pop() {
        let Some(file) = by_path.get(path.as_str()) else { continue };
        if !seen.insert(path.clone()) {
            continue;
        }
        let (folder, stem) = path.trim_end_matches(".rs").rsplit_once('/').unwrap_or(("", ""));
        let inside = if root || stem == "mod" { folder.to_owned() } else { format!("{folder}/{stem}") };
        for module in modules(&file.text) {
            match module.path {
                Some(path) => todo.push((format!("{folder}/{path}"), path.ends_with("mod.rs"))),
                None => {
                    todo.push((format!("{inside}/{}.rs", module.name), false));
                    todo.push((format!("{inside}/{}/mod.rs", module.name), false));
                }
            }
        }
    }
    let unreached = files.iter().filter(|file| file.is_rust() && !seen.contains(&file.path));
    unreached.map(|file| format!("{}: no mod line leads to it: it is never compiled", file.path)).collect()
}

/// No promises in comments, no path of somebody's machine.
fn wording(files: &[File]) -> Vec<String> {
    // Written apart, so that this file does not complain about itself.
    let words = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
    ];
    let homes = ["/home/", "/root/", "/work/", "/Users/"];
    let mut out = vec![];
    for file in files {
        let taken_over =
            ["proto/proto/envoy/", "proto/proto/udpa/", "proto/proto/validate/", "proto/proto/xds/", "tests/golden/"];
        if taken_over.iter().any(|place| file.path.starts_with(place)) || file.path.contains("/src/gen/") {
            continue;
        }
        let this = file.path == "tests/it/tidy.rs";
        for (number, line) in file.text.lines().enumerate() {
            let at = format!("{}:{}", file.path, number + 1);
            for word in words {
                let found = line.match_indices(word).any(|(start, _)| {
                    let whole = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
                    let ends = word.ends_with('(') || whole(line[start + word.len()..].chars().next());
                    whole(line[..start].chars().next_back()) && ends
                });
                if found {
                    out.push(format!("{at}: {word}: do it, or say what is absent on purpose"));
                }
            }
            for home in homes.iter().filter(|_| !this) {
                let starts =
                    |start: usize| !line[..start].ends_with(|c: char| c.is_alphanumeric() || "._-}~:/*".contains(c));
                if line.match_indices(home).any(|(start, _)| starts(start)) {
                    out.push(format!("{at}: a path below {home} is a path of one machine"));
                }
            }
        }
    }
    out
}

/// What is visible at the root of the repository.
fn root_entries(files: &[File]) -> Vec<String> {
    const ENTRIES: [&str; 12] = [
        "Cargo.toml",
        "Cargo.lock",
        "pyproject.toml",
        "agent",
        "index",
        "picker",
        "python",
        "proto",
        "tests",
        "deploy",
        "README.md",
        "LICENSE",
    ];
    let tops: BTreeSet<&str> = files.iter().map(|file| file.path.split('/').next().unwrap_or_default()).collect();
    let strange =
        tops.into_iter().filter(|top| !ENTRIES.contains(top) && !top.starts_with('.') && *top != "rust-toolchain.toml");
    strange.map(|top| format!("{top}: not one of the names at the root of the repository")).collect()
}

/// Reads the tree: text files, without what builds and tools leave behind.
fn read(root: &Path, folder: &str, out: &mut Vec<File>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let left_behind = ["target", ".git", "__pycache__", ".venv", "node_modules", ".pytest_cache", ".ruff_cache"];
        if left_behind.contains(&name.as_str()) {
            continue; // `.git` is a file where git made another work tree
        }
        if entry.file_type()?.is_dir() {
            read(root, &path, out)?;
        } else {
            // What is not text has no lines to judge, but has a place.
            let text = String::from_utf8(std::fs::read(entry.path())?).unwrap_or_default();
            out.push(File { path, text });
        }
    }
    Ok(())
}

#[test]
fn the_tree_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the harness is in the repository");
    let mut files = vec![];
    read(root, "", &mut files).expect("a readable tree");
    assert!(files.iter().filter(|file| file.is_rust()).count() > 50, "this is not the whole tree");
    let mut complaints: Vec<String> = RULES.iter().flat_map(|rule| rule(&files)).collect();
    complaints.sort();
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

/// How many complaints `rule` has about each of these (path, text), each a tree of its own.
fn complaints<const N: usize>(rule: Rule, files: [(&str, &str); N]) -> [usize; N] {
    files.map(|(path, text)| rule(&[File { path: path.to_owned(), text: text.to_owned() }]).len())
}

#[test]
fn purity_can_be_broken() {
    let bad = [
        ("index/src/find.rs", "use std::{sync::Arc, time::{Duration, Instant}};"),
        ("index/src/find.rs", "fn f() { std::env::var(x) }"),
        ("picker/src/pool.rs", "async fn f() {}"),
        ("picker/src/pool.rs", "use tokio::sync::mpsc;"),
        ("agent/src/slots.rs", "use std::net::{TcpStream, SocketAddr};"),
        ("agent/src/slots.rs", "use std::sync::atomic::AtomicU64;"),
        ("agent/src/config.rs", "use std::time::SystemTime;"),
        ("tests/src/plan.rs", "fn f() { std::fs::read(x) }"),
    ];
    assert_eq!(complaints(pure_roots, bad), [1; 8]);
    let good = [
        ("index/src/find.rs", "use std::time::Duration; // std::env\nconst A: &str = \"std::thread\";"),
        ("index/src/find.rs", "#[cfg(test)]\nmod tests { use std::thread; }"),
        ("index/src/shared/pins.rs", "use std::sync::atomic::AtomicU64;"),
        ("index/src/edge/http.rs", "async fn f() { std::thread::yield_now() }"),
        ("index/src/app.rs", "use tokio::net::TcpListener;"),
        ("index/src/config.rs", "use std::env;"),
        ("index/src/plan.rs", "use std::net::SocketAddr; fn f(x: env) { strand::y() }"),
    ];
    assert_eq!(complaints(pure_roots, good), [0; 7]);
}

#[test]
fn places_of_crates_can_be_broken() {
    let bad = [
        ("agent/src/slots.rs", "use pyo3::prelude::*;"),
        ("index/src/app.rs", "use pyo3::prelude::*;"),
        ("index/src/link.rs", "use axum::Router;"),
        ("picker/src/exchange.rs", "fn f() -> tonic::Status {}"),
        ("agent/src/feed.rs", "use zeromq::PubSocket;"),
    ];
    assert_eq!(complaints(worldly_crates, bad), [1; 5]);
    assert_eq!(complaints(worldly_crates, [("agent/src/py.rs", "use pyo3::prelude::*;")]), [0]);
    assert_eq!(complaints(wire_types, [("picker/src/exchange.rs", "use proto::wire::x;")]), [1]);
    assert_eq!(complaints(wire_types, [("picker/src/edge/ext_proc.rs", "use proto::wire::x;")]), [0]);
    assert_eq!(complaints(anyhow_places, [("index/src/link.rs", "fn f() -> anyhow::Result<()> {}")]), [1]);
    assert_eq!(complaints(anyhow_places, [("index/src/main.rs", "fn f() -> anyhow::Result<()> {}")]), [0]);
    let bad = [
        ("index/src/find.rs", "use picker::pool;"),
        ("index/src/edge/grpc.rs", "use agent::x;"),
        ("picker/Cargo.toml", "[dependencies]\nagent.workspace = true"),
        ("proto/Cargo.toml", "[dependencies]\nindex = { path = \"../index\" }"),
    ];
    assert_eq!(complaints(imports, bad), [1; 4]);
    let good = [
        ("picker/src/edge/lookup.rs", "use index::app;"),
        ("index/src/find.rs", "fn f(agent: u8) -> u8 { agent }"),
        ("picker/Cargo.toml", "index.workspace = true"),
    ];
    assert_eq!(complaints(imports, good), [0; 3]);
}

#[test]
fn rules_of_files_can_be_broken() {
    let long = format!("//! x\n{}", "\n".repeat(MAX_LINES));
    let bad = [
        ("index/src/find.rs", "use x;"),
        ("index/src/find.rs", &long),
        ("index/src/edge/utils.rs", "//! x"),
        ("index/src/helpers/x.rs", "//! x"),
        ("tests/it/x.rs", "//! x\n#[ignore]\n#[test]\nfn f() {}"),
    ];
    assert_eq!(complaints(rust_files, bad), [1; 5]);
    assert_eq!(complaints(rust_files, [("index/src/find.rs", "//! x\n// #[ignore]")]), [0]);
    assert_eq!(complaints(root_entries, [("scripts/run.sh", ""), ("notes.md", ""), (".ci/run", "")]), [1, 1, 0]);
    let word = concat!("// TO", "DO later");
    let good = ("a.rs", "see https://host/home/x and target/work/x, unTODOne");
    let bad = [("a.rs", word), ("a.md", concat!("XX", "X")), ("a.py", concat!("open('/ro", "ot/x')")), good];
    assert_eq!(complaints(wording, bad), [1, 1, 1, 0]);
}

#[test]
fn files_that_nothing_leads_to_are_found() {
    let tree = |extra: &str| {
        let all = [
            ("index/Cargo.toml", "[[test]]\npath = \"it/main.rs\""),
            ("index/src/lib.rs", "mod a;\n#[cfg(test)]\n#[path = \"a_tests.rs\"]\nmod t;"),
            ("index/src/a.rs", "mod b;"),
            ("index/src/a/b.rs", ""),
            ("index/src/a_tests.rs", ""),
            ("index/src/bin/x.rs", ""),
            ("index/it/main.rs", "mod y;"),
            ("index/it/y.rs", ""),
            (extra, ""),
        ];
        reachable(&all.map(|(path, text)| File { path: path.to_owned(), text: text.to_owned() }))
    };
    assert_eq!(tree("x.py"), [""; 0]);
    for lost in ["index/src/c.rs", "index/src/b.rs", "index/src/a/b/c.rs", "index/it/z.rs", "picker/src/lib.rs"] {
        assert_eq!(tree(lost).len(), 1, "{lost}");
    }
}
