//! A picker with everything around it fake, for the tests of the picker.

use anyhow::{Context, Result, bail};
use harness::edge::fake_envoy::FakeEnvoy;
use harness::edge::http;
use picker::app::{Handle, start};
use picker::bundle::Bundle;
use picker::config::from_text;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// The deployment's seed.
pub const SEED: u64 = 0x6b76_6174_6c61;
/// Three engines; nothing listens there, and nothing needs to.
pub const FLEET: &str = "fleet:\n- {name: a, address: '10.0.0.1:8000'}\n- {name: b, address: '10.0.0.2:8000'}\n- {name: c, address: '10.0.0.3:8000'}\n";
/// A bound on waiting for what must come. Not a goal.
const LIMIT: Duration = Duration::from_secs(60);

/// A picker and a connection to it.
pub struct World {
    /// The picker.
    pub picker: Handle,
    /// Envoy.
    pub envoy: FakeEnvoy,
}

/// Starts a picker on free ports; `more` are further lines of its configuration.
pub async fn world(more: &str) -> Result<World> {
    // Time limits of production would make slow machines look like faults.
    let text = format!(
        "ext_proc: 127.0.0.1:0\nhealth: 127.0.0.1:0\nhttp: 127.0.0.1:0\nseed: {SEED}\nrender_threads: 2\n{more}\n"
    );
    let text = if more.contains("deadline:") { text } else { text + "deadline: {base_ms: 20000, max_ms: 20000}\n" };
    let (config, _) = from_text(&text, Path::new("."))?;
    let picker = start(config).await?;
    let envoy = FakeEnvoy::connect(picker.ext_proc).await?;
    Ok(World { picker, envoy })
}

/// The bundle of the repository's tokenizer, for a model named `tiny`.
pub fn bundle() -> Result<Vec<u8>> {
    let read = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tokenizer").join(name);
        std::fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let template = read("chat_template.jinja")?;
    let texts = (read("tokenizer.json")?, read("tokenizer_config.json")?);
    Ok(Bundle::from_texts(&texts.0, &texts.1, Some(&template), vec!["tiny".into()], 8192)?.to_bytes()?)
}

/// A completion of token ids, which needs no tokenizer to be understood.
pub fn completion(tokens: std::ops::Range<u32>) -> Value {
    json!({"model": "tiny", "prompt": tokens.collect::<Vec<u32>>(), "max_tokens": 1})
}

/// Waits until something is so.
pub async fn until(what: &str, mut is: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is().await? {
        if start.elapsed() > LIMIT {
            bail!("waited {} s for: {what}", LIMIT.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

impl World {
    /// A decision, by the client's or the picker's id.
    pub async fn decision(&self, id: &str) -> Result<Value> {
        http::get(self.picker.http, &format!("/v1/decisions/{id}")).await
    }

    /// Waits until the index is followed, with so many models loaded.
    pub async fn followed(&self, models: usize) -> Result<()> {
        until("the index is followed and tokenizers are loaded", async || {
            let ready = http::get(self.picker.http, "/readyz").await?;
            Ok(ready["index"] == "followed" && ready["models"].as_array().is_some_and(|m| m.len() == models))
        })
        .await
    }
}
