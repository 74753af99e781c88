//! From a request to the engine's own token ids, and from those to fingerprints.
//!
//! A [`Renderer`] belongs to one bundle, that is to one model as one engine loaded it. It is pure, `Send + Sync`, and
//! meant to be shared; rendering runs off the async threads. Two things are for the caller, at the edge: set the
//! environment variable `FASTOKENS_BPE_THREADS=1` before the first renderer is loaded (the tokenizer otherwise spins up
//! its own threads for long texts, which costs milliseconds on a busy machine), and call [`Renderer::warm`] once on
//! every thread that will render (the first text of a thread costs 5 to 400 ms of table building).

use crate::bundle::Bundle;
use crate::chat::Chat;
use crate::json::Json;
use crate::normalise::GAP;
use crate::request::{Kind, Request};
use crate::tokens::Tokenizer;
use proto::block::{self, Fingerprint, Namespace};
use std::borrow::Cow;

/// Local time at the picker, for templates that print the date. Picker and engine must share the time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Now {
    /// Seconds since the Unix epoch.
    pub unix_s: i64,
    /// The zone's offset from UTC at that instant, in seconds, east positive.
    pub offset_s: i32,
}

/// Token ids of the (first) prompt of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The ids that are certain, from the start of the prompt. All of them when `rest` is `None`.
    pub tokens: Vec<u32>,
    /// Length of the whole prompt in tokens: exact when `rest` is `None`, else an estimate.
    pub length: usize,
    /// Why the ids end early.
    pub rest: Option<NotExact>,
}

impl Prompt {
    fn whole(tokens: Vec<u32>) -> Prompt {
        Prompt { length: tokens.len(), tokens, rest: None }
    }

    /// Whether `tokens` is the whole prompt.
    pub fn exact(&self) -> bool {
        self.rest.is_none()
    }
}

/// Why ids cannot be known. The request is routed all the same, by what is known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{label}: {detail}")]
pub struct NotExact {
    /// One short word for metrics: `no_template`, `template`, `tokenizer`, `multimodal`, `model`, `number`, `suffix`.
    pub label: &'static str,
    /// For a person.
    pub detail: String,
}

/// What came of a request instead of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoPrompt {
    /// The engine will refuse this request (400), in its own words: route it by load and let it.
    #[error("the engine will refuse it: {0}")]
    Refused(String),
    /// Nothing of the prompt can be known.
    #[error(transparent)]
    NotExact(#[from] NotExact),
}

/// Turns requests for one model into token ids.
#[derive(Debug)]
pub struct Renderer {
    models: Vec<String>,
    max_model_len: u64,
    /// Absent only where text is never exact.
    tokenizer: Option<Tokenizer>,
    chat: Result<Chat, NotExact>,
    /// Whether the engine cuts a long prompt at its start.
    cut_left: bool,
    /// Why text of this model is never exact.
    fault: Option<NotExact>,
}

impl Renderer {
    /// Compiles template and tokenizer. Takes 0.1 to 2 s and 80 to 300 MB for today's vocabularies.
    ///
    /// # Errors
    /// [`NotExact`] when the tokenizer cannot be loaded: requests of that model are routed by load. A template that
    /// cannot be used is no error here: completions stay exact, chats answer [`NoPrompt::NotExact`].
    pub fn load(bundle: &Bundle) -> Result<Renderer, NotExact> {
        let tokenizer = match Tokenizer::load(&bundle.tokenizer) {
            Ok(tokenizer) => Some(tokenizer),
            Err(_) if bundle.not_exact.is_some() => None,
            Err(fault) => return Err(fault),
        };
        Ok(Renderer {
            models: bundle.models.clone(),
            max_model_len: bundle.max_model_len,
            tokenizer,
            chat: Chat::load(bundle),
            cut_left: bundle.truncation_side.as_deref() != Some("right"),
            fault: bundle.not_exact.clone().map(|detail| NotExact { label: "model", detail }),
        })
    }

    /// Served names; the first is the base model of the namespace.
    pub fn models(&self) -> &[String] {
        &self.models
    }

    /// Why chats of this model are not exact, when they are not: for the log at start.
    pub fn chat_fault(&self) -> Option<&NotExact> {
        self.fault.as_ref().or(self.chat.as_ref().err())
    }

    /// Builds the tokenizer's tables for the current thread.
    pub fn warm(&self) {
        if let Some(tokenizer) = &self.tokenizer {
            tokenizer.warm();
        }
    }

    /// The ids of the request's (first) prompt.
    ///
    /// # Errors
    /// [`NoPrompt`]: the engine will refuse the request, or nothing of it can be known.
    pub fn tokens(&self, request: &Request<'_>, now: Now) -> Result<Prompt, NoPrompt> {
        let cut = Cut::of(request, self)?;
        let body = &request.body;
        let given = match request.kind {
            Kind::Chat => reused_ids(body)?,
            _ => completion(body)?,
        };
        let text = match given {
            Given::Ids(ids) => return cut.ids(ids).map(Prompt::whole),
            Given::Text(text) => Cow::Borrowed(text),
            Given::Nothing => Cow::Owned(self.text(request, now)?),
        };
        let tokenizer = match (&self.fault, &self.tokenizer) {
            (None, Some(tokenizer)) => tokenizer,
            (Some(fault), _) => return Err(fault.clone().into()),
            (None, None) => return Err(NotExact { label: "tokenizer", detail: "no tokenizer".into() }.into()),
        };
        let add_special = match body.given("add_special_tokens") {
            Some(Json::Bool(value)) => *value,
            Some(_) => return Err(NoPrompt::Refused("add_special_tokens must be true or false".into())),
            None => request.kind == Kind::Completions,
        };
        if let Some((before, _)) = text.split_once(GAP).filter(|_| request.kind == Kind::Chat) {
            // No truncation is followed here: the whole length is not known, so neither is what is cut.
            let rest = NotExact {
                label: "multimodal",
                detail: "images, sounds or videos: only the text before them is known".into(),
            };
            if cut.keep.is_some() {
                return Err(rest.into());
            }
            let mut tokens = tokenizer.encode(before, add_special)?;
            tokens.truncate(tokenizer.settled(&tokens));
            let length = tokenizer.encode(&text.replace(GAP, ""), add_special)?.len();
            return Ok(Prompt { tokens, length, rest: Some(rest) });
        }
        cut.text(&text, add_special, tokenizer).map(Prompt::whole)
    }

    /// The text of a chat as the engine renders it. Images and the like are marked.
    ///
    /// # Errors
    /// [`NoPrompt`].
    fn text(&self, request: &Request<'_>, now: Now) -> Result<String, NoPrompt> {
        if let Some(fault) = self.chat_fault() {
            return Err(fault.clone().into());
        }
        match &self.chat {
            Ok(chat) => chat.render(&request.body, now),
            Err(fault) => Err(fault.clone().into()),
        }
    }

    /// The text of a chat as the engine renders it, for people and tests.
    ///
    /// # Errors
    /// [`NoPrompt`]; a completion has no template.
    pub fn rendered(&self, request: &Request<'_>, now: Now) -> Result<String, NoPrompt> {
        match request.kind {
            Kind::Chat => self.text(request, now),
            _ => Err(NoPrompt::Refused("no chat".into())),
        }
    }
}

/// Where the ids come from.
enum Given<'b> {
    Ids(Vec<u32>),
    Text(&'b str),
    Nothing,
}

fn ids(list: &[Json<'_>], field: &'static str) -> Result<Vec<u32>, NoPrompt> {
    let id = |item: &Json<'_>| match item {
        Json::Int(id) => u32::try_from(*id).ok(),
        _ => None,
    };
    let ids: Option<Vec<u32>> = list.iter().map(id).collect();
    ids.filter(|ids| !ids.is_empty()).ok_or_else(|| NoPrompt::Refused(format!("{field} is no list of token ids")))
}

/// Ids that a prefill stage passes on for reuse: the engine takes them instead of the messages.
fn reused_ids<'b>(body: &'b Json<'_>) -> Result<Given<'b>, NoPrompt> {
    match body.get("kv_transfer_params").and_then(|params| params.given("prompt_token_ids")) {
        None => Ok(Given::Nothing),
        Some(_) if body.get("echo").is_some_and(Json::truthy) => Ok(Given::Nothing),
        Some(Json::List(list)) => ids(list, "kv_transfer_params.prompt_token_ids").map(Given::Ids),
        Some(_) => Err(NoPrompt::Refused("kv_transfer_params.prompt_token_ids must be a list".into())),
    }
}

fn completion<'b>(body: &'b Json<'_>) -> Result<Given<'b>, NoPrompt> {
    let not_exact = |label, detail: &str| Err(NotExact { label, detail: detail.into() }.into());
    if body.given("prompt_embeds").is_some() {
        return not_exact("multimodal", "the prompt is given as embeddings");
    }
    if body.given("suffix").is_some() {
        return not_exact("suffix", "fill-in-the-middle prompts are not rendered here");
    }
    match body.get("prompt") {
        Some(Json::Str(text)) if !text.is_empty() => Ok(Given::Text(text)),
        Some(Json::List(list)) => match list.first() {
            Some(Json::Str(text)) => Ok(Given::Text(text)),
            Some(Json::List(first)) => ids(first, "prompt").map(Given::Ids),
            Some(Json::Int(_)) => ids(list, "prompt").map(Given::Ids),
            _ => Err(NoPrompt::Refused("prompt must be a string, token ids, or a list of those".into())),
        },
        _ => Err(NoPrompt::Refused("prompt must be a string, token ids, or a list of those".into())),
    }
}

/// Truncation and the limit on length, as `TokenizeParams` has them.
struct Cut {
    /// Most tokens to keep.
    keep: Option<usize>,
    /// From the start of the prompt (true) or from its end, when the request says so.
    side: Option<bool>,
    left: bool,
    max: usize,
}

impl Cut {
    fn of(request: &Request<'_>, renderer: &Renderer) -> Result<Cut, NoPrompt> {
        let refused = |why: &str| Err(NoPrompt::Refused(why.into()));
        let max = usize::try_from(renderer.max_model_len).unwrap_or(usize::MAX);
        let out = usize::try_from(request.max_tokens.unwrap_or(0)).unwrap_or(usize::MAX);
        if out > max {
            return refused("max_tokens is greater than the model's length");
        }
        let keep = match request.body.given("truncate_prompt_tokens") {
            None => None,
            Some(Json::Int(-1)) => Some(if out == 0 { max } else { max - 1 }),
            Some(Json::Int(keep)) => match usize::try_from(*keep) {
                Ok(keep) if keep <= max => Some(keep),
                _ => return refused("truncate_prompt_tokens is out of range"),
            },
            Some(_) => return refused("truncate_prompt_tokens must be an integer"),
        };
        let side = match request.body.given("truncation_side").map(Json::as_str) {
            None => None,
            Some(Some("left")) => Some(true),
            Some(Some("right")) => Some(false),
            Some(_) => return refused("truncation_side must be left or right"),
        };
        Ok(Cut { keep, side, left: side.unwrap_or(renderer.cut_left), max })
    }

    fn slice(&self, mut ids: Vec<u32>, keep: usize) -> Vec<u32> {
        if ids.len() > keep {
            if self.left {
                ids.drain(..ids.len() - keep);
            } else {
                ids.truncate(keep);
            }
        }
        ids
    }

    /// Ids given by the request.
    fn ids(&self, ids: Vec<u32>) -> Result<Vec<u32>, NoPrompt> {
        let ids = match self.keep {
            Some(keep) => self.slice(ids, keep),
            None => ids,
        };
        if ids.len() > self.max {
            return Err(NoPrompt::Refused(format!(
                "{} tokens are more than the model's length, {}",
                ids.len(),
                self.max
            )));
        }
        Ok(ids)
    }

    fn text(&self, text: &str, add_special: bool, tokenizer: &Tokenizer) -> Result<Vec<u32>, NoPrompt> {
        let added = if add_special { tokenizer.added() } else { 0 };
        match (self.keep, self.side) {
            // Without a side of its own the tokenizer itself cuts: before it adds its special tokens.
            (Some(keep), None) if added > 0 => {
                let ids = tokenizer.encode(text, false)?;
                let Some(keep) = keep.checked_sub(added) else {
                    return Err(NotExact {
                        label: "tokenizer",
                        detail: "truncated to less than the special tokens".into(),
                    }
                    .into());
                };
                self.ids(tokenizer.post_process(self.slice(ids, keep)))
            }
            // The engine cuts such text by characters first, by a number that only it knows; never below one a token.
            (Some(_), Some(_)) if text.chars().count() > self.max => {
                Err(NotExact { label: "tokenizer", detail: "a text longer than the model, truncated".into() }.into())
            }
            _ => self.ids(tokenizer.encode(text, add_special)?),
        }
    }
}

/// Names of a prompt's blocks in one namespace and block size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprints {
    /// `fp(-1)`.
    pub root: Fingerprint,
    /// One for each full block of the certain ids.
    pub blocks: Vec<Fingerprint>,
}

/// Names the full blocks of a prompt. A fleet with several block sizes or look-aheads calls it once for each.
pub fn fingerprints(
    tokens: &[u32],
    namespace: Namespace<'_>,
    seed: u64,
    (block_size, ahead): (usize, usize),
) -> Fingerprints {
    let root = block::root(namespace, seed);
    Fingerprints { root, blocks: block::chain_ahead(root, block_size, ahead, tokens) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Limits;
    use serde_json::json;

    const TOKENIZER: &str = include_str!("../../tests/golden/tokenizer/tokenizer.json");
    const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";

    /// The demo's tokenizer, made to begin with a BOS token.
    fn bundle(template: Option<&str>) -> Bundle {
        let mut tokenizer: serde_json::Value = serde_json::from_str(TOKENIZER).expect("JSON");
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
        });
        Bundle::from_texts(&tokenizer.to_string(), "{}", template, vec!["m".into()], 100).expect("a bundle")
    }

    fn run(bundle: &Bundle, kind: Kind, body: serde_json::Value) -> Result<Prompt, NoPrompt> {
        let body = body.to_string();
        let request = Request::parse(kind, body.as_bytes(), Limits::default()).expect("a body");
        Renderer::load(bundle).expect("a renderer").tokens(&request, Now::default())
    }

    // Ids of transformers 5.19 for the same tokenizer: truncation=True, max_length=4, truncation_side=...
    #[test]
    fn truncation_keeps_the_bos_token() {
        let mut bundle = bundle(None);
        let mut ids = |side: &str, fields: serde_json::Value| {
            bundle.truncation_side = Some(side.into());
            let mut body = json!({"prompt": "one two three four five"});
            body.as_object_mut().expect("an object").extend(fields.as_object().cloned().unwrap_or_default());
            run(&bundle, Kind::Completions, body).map(|prompt| prompt.tokens)
        };
        let cut = json!({"truncate_prompt_tokens": 4});
        let bare = json!({"truncate_prompt_tokens": 4, "add_special_tokens": false});
        assert_eq!(ids("left", json!({})), Ok(vec![0, 565, 1069, 1719, 290, 1853, 290, 75, 376]));
        assert_eq!(ids("left", cut.clone()), Ok(vec![0, 290, 75, 376]));
        assert_eq!(ids("right", cut), Ok(vec![0, 565, 1069, 1719]));
        assert_eq!(ids("left", bare.clone()), Ok(vec![1853, 290, 75, 376]));
        assert_eq!(ids("right", bare), Ok(vec![565, 1069, 1719, 290]));
        // A side in the request: the whole is tokenized, then cut.
        assert_eq!(
            ids("right", json!({"truncate_prompt_tokens": 3, "truncation_side": "left"})),
            Ok(vec![290, 75, 376])
        );
    }

    #[test]
    fn before_an_image_the_text_is_known() {
        let bundle = bundle(Some(TEMPLATE));
        let text = |content: serde_json::Value| json!({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]});
        let whole = run(&bundle, Kind::Chat, text("What is this?".into())).expect("a prompt");
        let parts =
            json!([{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]);
        let prompt = run(&bundle, Kind::Chat, text(parts)).expect("a prompt");
        assert!(whole.exact() && !prompt.exact());
        assert_eq!(prompt.rest.as_ref().map(|rest| rest.label), Some("multimodal"));
        // Up to the second <|im_start|>: what follows it may merge with the placeholder.
        assert_eq!(prompt.tokens.iter().filter(|id| **id == 1).count(), 2);
        assert_eq!(prompt.tokens.last(), Some(&1));
        assert!(whole.tokens.starts_with(&prompt.tokens));
        assert_eq!(prompt.length, whole.length);
    }

    #[test]
    fn without_a_template_only_completions_are_exact() {
        let none = bundle(None);
        let chat = json!({"messages": [{"role": "user", "content": "x"}]});
        assert!(matches!(
            run(&none, Kind::Chat, chat.clone()),
            Err(NoPrompt::NotExact(NotExact { label: "no_template", .. }))
        ));
        assert!(run(&none, Kind::Completions, json!({"prompt": "x"})).is_ok());
        let bad = bundle(Some("{{ messages | wordcount }}"));
        assert!(matches!(run(&bad, Kind::Chat, chat), Err(NoPrompt::NotExact(NotExact { label: "template", .. }))));
    }

    #[test]
    fn a_model_that_is_never_exact_still_takes_ids() {
        let (not_exact, tokenizer) = (Some("a Mistral tokenizer".into()), json!({}));
        let bundle = Bundle { not_exact, tokenizer, ..bundle(Some(TEMPLATE)) };
        assert_eq!(run(&bundle, Kind::Completions, json!({"prompt": [1, 2]})).map(|p| p.tokens), Ok(vec![1, 2]));
        let text = run(&bundle, Kind::Completions, json!({"prompt": "x"}));
        assert!(matches!(text, Err(NoPrompt::NotExact(NotExact { label: "model", .. }))));
    }

    #[test]
    fn some_models_do_not_use_their_template() {
        let harmony = Bundle { model_type: "gpt_oss".into(), ..bundle(Some(TEMPLATE)) };
        let chat = run(&harmony, Kind::Chat, json!({"messages": [{"role": "user", "content": "x"}]}));
        assert!(matches!(chat, Err(NoPrompt::NotExact(NotExact { label: "model", .. }))));
        assert!(run(&harmony, Kind::Completions, json!({"prompt": "x"})).is_ok());
    }

    #[test]
    fn too_long_is_refused() {
        let long = run(&bundle(None), Kind::Completions, json!({"prompt": vec![1; 101]}));
        assert!(matches!(long, Err(NoPrompt::Refused(_))));
    }

    #[test]
    fn a_tokenizer_of_another_kind_is_refused() {
        let mut bundle = bundle(None);
        bundle.tokenizer =
            json!({"version": "1.0", "added_tokens": [], "model": {"type": "Unigram", "vocab": [], "unk_id": 0}});
        assert!(matches!(Renderer::load(&bundle), Err(NotExact { label: "tokenizer", .. })));
    }

    #[test]
    fn fingerprints_follow_the_namespace() {
        let tokens: Vec<u32> = (0..40).collect();
        let name = |salt| fingerprints(&tokens, Namespace { model: "m", adapter: "", salt }, 7, (16, 0));
        assert_eq!(name("").blocks, block::chain(name("").root, 16, &tokens));
        assert_eq!(name("").blocks.len(), 2);
        assert!(name("").blocks[0] != name("s").blocks[0]);
    }
}
