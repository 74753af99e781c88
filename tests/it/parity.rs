//! The picker's token ids against those of vLLM itself.
//!
//! `tests/golden/parity/expected` holds what vLLM 0.32.0 made of every body there (`make.py` beside it), with the
//! demo's own template and with three that show all that a template can see.

use anyhow::{Context, Result, bail, ensure};
use picker::bundle::{Bundle, ContentFormat};
use picker::json::Json;
use picker::prompt::{NoPrompt, Now, Renderer};
use picker::request::{Kind, Limits, Request};
use std::path::{Path, PathBuf};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(path)
}

fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(golden(path)).with_context(|| path.to_owned())
}

fn bundle(template: Option<&str>) -> Result<Bundle> {
    let config = read("tokenizer/tokenizer_config.json")?;
    let models = vec!["tiny".to_owned()];
    Ok(Bundle::from_texts(&read("tokenizer/tokenizer.json")?, &config, template, models, 8192)?)
}

/// A body exactly as it is written, and its name.
fn case(line: &str) -> Result<(&str, &str)> {
    let start = line.find("\"body\":").context("no body")? + "\"body\":".len();
    let body = line[start..].trim().strip_suffix('}').context("no end")?;
    let id = line.split('"').nth(3).context("no id")?;
    Ok((id, body))
}

struct Expected {
    ok: bool,
    text: Option<String>,
    ids: Vec<u32>,
}

fn expected(line: &str, id: &str) -> Result<Expected> {
    let json = picker::json::parse(line, 8)?;
    ensure!(json.get("id").and_then(Json::as_str) == Some(id), "the files are out of step at {id}: run make.py");
    let ids = match json.get("ids") {
        Some(Json::List(ids)) => ids,
        _ => &Vec::new(),
    };
    Ok(Expected {
        ok: json.get("status").and_then(Json::as_str) == Some("ok"),
        text: json.get("text").and_then(Json::as_str).map(str::to_owned),
        ids: ids.iter().filter_map(|id| if let Json::Int(id) = id { u32::try_from(*id).ok() } else { None }).collect(),
    })
}

/// How the cases of one template came out.
#[derive(Debug, Default)]
struct Outcome {
    /// Equal to vLLM.
    equal: usize,
    /// vLLM refuses them.
    refused: usize,
}

/// Runs all bodies; any difference is an error that shows both sides.
fn compare(name: &str, renderer: &Renderer) -> Result<Outcome> {
    let (bodies, expected_lines) = (read("parity/bodies.jsonl")?, read(&format!("parity/expected/{name}.jsonl"))?);
    let with_ids = name == "chatml";
    let mut lines = expected_lines.lines();
    let mut outcome = Outcome::default();
    for line in bodies.lines() {
        let (id, body) = case(line)?;
        let kind = if body.contains("\"messages\"") { Kind::Chat } else { Kind::Completions };
        if kind != Kind::Chat && !with_ids {
            continue;
        }
        let expected = expected(lines.next().context("too few lines")?, id)?;
        if !expected.ok {
            // The engine answers 400, wherever it goes: what the picker thinks of it does no harm, if it does not fall over.
            let _ =
                Request::parse(kind, body.as_bytes(), Limits::default()).map(|r| renderer.tokens(&r, Now::default()));
            outcome.refused += 1;
            continue;
        }
        let request = Request::parse(kind, body.as_bytes(), Limits::default()).with_context(|| id.to_owned())?;
        match renderer.tokens(&request, Now::default()) {
            Err(NoPrompt::NotExact(why)) => bail!("{name} {id}: not exact: {why}"),
            Err(NoPrompt::Refused(why)) => bail!("{name} {id}: vLLM takes it, the picker does not: {why}"),
            Ok(prompt) => {
                if kind == Kind::Chat && expected.text.is_some() {
                    let text = renderer.rendered(&request, Now::default()).ok();
                    ensure!(text == expected.text, "{name} {id}:\n have {text:?}\n want {:?}", expected.text);
                }
                ensure!(prompt.exact() && prompt.length == prompt.tokens.len(), "{name} {id}: not exact");
                if with_ids {
                    ensure!(
                        prompt.tokens == expected.ids,
                        "{name} {id}:\n have {:?}\n want {:?}",
                        prompt.tokens,
                        expected.ids
                    );
                }
                outcome.equal += 1;
            }
        }
    }
    Ok(outcome)
}

#[test]
fn the_demo_model_gets_vllms_ids() -> Result<()> {
    let renderer = Renderer::load(&bundle(None)?)?;
    ensure!(renderer.chat_fault().is_none(), "{:?}", renderer.chat_fault());
    let outcome = compare("chatml", &renderer)?;
    ensure!(outcome.equal == 151 && outcome.refused == 26, "{outcome:?}");
    Ok(())
}

#[test]
fn templates_see_what_they_see_in_vllm() -> Result<()> {
    for (name, format, equal) in [
        ("raw_string", ContentFormat::String, 143),
        ("raw_openai", ContentFormat::Openai, 142),
        ("many_features", ContentFormat::String, 142),
    ] {
        let source = read(&format!("parity/templates/{name}.jinja"))?;
        ensure!(picker::detect::content_format(&source) == format, "{name}: content format");
        let renderer = Renderer::load(&bundle(Some(&source))?)?;
        ensure!(renderer.chat_fault().is_none(), "{name}: {:?}", renderer.chat_fault());
        let outcome = compare(name, &renderer)?;
        ensure!(outcome.equal == equal, "{name}: {outcome:?}");
    }
    Ok(())
}
