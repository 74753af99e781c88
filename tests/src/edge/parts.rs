//! Starting the real parts: engines, index, picker, Envoy.

use crate::config::Places;
use crate::edge::http;
use crate::edge::process::Process;
use crate::envoy::retarget;
use crate::plan::{EnginePorts, MODEL, Plan, SEED, local};
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// Tokens a block: what vLLM on CPU takes are multiples of 32.
pub const BLOCK_SIZE: u32 = 32;
/// Blocks of an engine's pool: so few that a busy minute evicts.
pub const POOL_BLOCKS: u32 = 192;
/// An engine imports a gigabyte of Python thrice; on busy cores that has taken four minutes.
const ENGINE_LIMIT: Duration = Duration::from_secs(900);
/// The other parts are there in a second or two.
const PART_LIMIT: Duration = Duration::from_secs(60);

/// One vLLM engine with the agent in it. Not yet ready: see [`engine_ready`].
///
/// # Errors
/// When it cannot be started.
pub fn engine(places: &Places, ports: &EnginePorts) -> Result<Process> {
    let mut command = Command::new(places.python());
    command.args(["-m", "vllm.entrypoints.cli.main", "serve"]).arg(places.model());
    command.args(["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", &ports.http.to_string()]);
    command.args(["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "16"]);
    command.args(["--block-size", &BLOCK_SIZE.to_string(), "--num-gpu-blocks-override", &POOL_BLOCKS.to_string()]);
    // So that the client can be told what was taken from cache, and under which id.
    command.args(["--enable-prompt-tokens-details", "--enable-request-id-headers"]);
    command
        .env("VLLM_CPU_KVCACHE_SPACE", "1")
        // Two engines on two cores: one thread each, bound to none.
        .env("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        .env("OMP_NUM_THREADS", "1")
        // Its processes talk over this address; by default it is the machine's own.
        .env("VLLM_HOST_IP", "127.0.0.1")
        .env("HF_HUB_OFFLINE", "1")
        .env("VLLM_NO_USAGE_STATS", "1")
        .env_remove("PYTHONHASHSEED")
        .env("KVATLAS_ENGINE", &ports.name)
        .env("KVATLAS_SEED", SEED.to_string())
        .env("KVATLAS_BIND", format!("tcp://{}", local(ports.events)))
        .env("KVATLAS_CONTROL", format!("tcp://{}", local(ports.control)));
    Process::start(
        &format!("engine {}", ports.name),
        &mut command,
        &places.logs().join(format!("engine-{}.log", ports.name)),
    )
}

/// Waits until the engine answers.
///
/// # Errors
/// When it ends or takes too long; with the end of its log.
pub async fn engine_ready(process: &mut Process, ports: &EnginePorts) -> Result<()> {
    let took = process.ready(ENGINE_LIMIT, async || http::is_ok(local(ports.http), "/health").await).await?;
    eprintln!("[ ok ] engine {} on {}: {:.1} s", ports.name, local(ports.http), took.as_secs_f64());
    Ok(())
}

/// The index, ready to answer.
///
/// # Errors
/// When it ends or takes too long; with the end of its log.
pub async fn index(places: &Places, plan: &Plan) -> Result<Process> {
    program(places, "index", &plan.index_config(), plan.index_http).await
}

/// The picker, ready to answer.
///
/// # Errors
/// When it ends or takes too long; with the end of its log.
pub async fn picker(places: &Places, plan: &Plan) -> Result<Process> {
    program(places, "picker", &plan.picker_config(), plan.picker_http).await
}

/// `kvatlas-<name>` with this configuration, ready to answer on its HTTP port.
///
/// # Errors
/// When it ends or takes too long; with the end of its log.
pub async fn program(places: &Places, name: &str, config: &Value, http_port: u16) -> Result<Process> {
    let file = write(places, &format!("{name}.yaml"), &config.to_string())?;
    let mut command = Command::new(places.programs.join(format!("kvatlas-{name}")));
    command.arg("--config").arg(file);
    // The file is all that counts, whatever this shell has set.
    for name in ["KVATLAS_LOG", "EPP_LOG_LEVEL", "KVATLAS_SEED"] {
        command.env_remove(name);
    }
    let mut process = Process::start(name, &mut command, &places.logs().join(format!("{name}.log")))?;
    process.ready(PART_LIMIT, async || http::is_ok(local(http_port), "/healthz").await).await?;
    Ok(process)
}

/// Envoy with the configuration that ships, ready to answer.
///
/// # Errors
/// When it ends or takes too long; with the end of its log.
pub async fn envoy(places: &Places, plan: &Plan) -> Result<Process> {
    let shipped = places.root.join("deploy/envoy/envoy.yaml");
    let yaml = std::fs::read_to_string(&shipped).with_context(|| shipped.display().to_string())?;
    let file = write(places, "envoy.json", &retarget(&yaml, &plan.envoy())?)?;
    let mut command = Command::new(places.e2e.join("venv/bin/envoy"));
    command.args(["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning", "--config-path"]).arg(file);
    let mut process = Process::start("envoy", &mut command, &places.logs().join("envoy.log"))?;
    process.ready(PART_LIMIT, async || http::is_ok(local(plan.envoy_admin), "/ready").await).await?;
    Ok(process)
}

fn write(places: &Places, name: &str, text: &str) -> Result<PathBuf> {
    let folder = places.e2e.join("run");
    std::fs::create_dir_all(&folder)?;
    let file = folder.join(name);
    std::fs::write(&file, text).with_context(|| format!("{} cannot be written", file.display()))?;
    Ok(file)
}
