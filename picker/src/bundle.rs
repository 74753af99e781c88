//! The bundle: what a picker must know of a model to make the engine's own token ids.
//!
//! The agent writes it once, from the *loaded* tokenizer (which is not always the one in `tokenizer.json`:
//! transformers may rebuild it by model type), and the index hands it on. One JSON object, UTF-8:
//!
//! ```json
//! {
//!   "format": 1,
//!   "engine_version": "0.32.0",
//!   "model_type": "qwen3",
//!   "models": ["served-name", "second-served-name"],
//!   "max_model_len": 32768,
//!   "tokenizer": "<AutoTokenizer.from_pretrained(..)._tokenizer.to_str()>",
//!   "special_tokens": {"bos_token": "<s>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<x>"]},
//!   "chat_template": "{% for message in messages %}...",
//!   "chat_templates": {"default": "...", "tool_use": "..."},
//!   "content_format": "string",
//!   "default_chat_template_kwargs": {"enable_thinking": false},
//!   "exclude_tools_when_tool_choice_none": false,
//!   "truncation_side": "left",
//!   "not_exact": null
//! }
//! ```
//!
//! | field | required | what |
//! |---|---|---|
//! | `format` | yes | 1; a reader refuses others |
//! | `engine_version` | no | vLLM's version, for people |
//! | `model_type` | no | `hf_config.model_type` |
//! | `models` | yes | served names, the first is the base model of the namespace |
//! | `max_model_len` | yes | tokens |
//! | `tokenizer` | yes | the backend tokenizer as JSON: a *string* holding it, or the object itself |
//! | `special_tokens` | no | `tokenizer.special_tokens_map`: a string or a list of strings each; unset ones absent |
//! | `chat_template` | no | the one template that is used when the request has no tools (`--chat-template`, else the processor's, else the tokenizer's default, else vLLM's fallback); null or absent: chats are not exact |
//! | `chat_templates` | no | only where the choice depends on tools: `"tool_use"` is taken when the request has tools |
//! | `content_format` | no | `"string"`, `"openai"`, or `"auto"` (the picker detects it): `--chat-template-content-format` |
//! | `default_chat_template_kwargs` | no | `--default-chat-template-kwargs` |
//! | `exclude_tools_when_tool_choice_none` | no | the flag of that name |
//! | `truncation_side` | no | `tokenizer.truncation_side`, "left" when absent |
//! | `not_exact` | no | a reason why no prompt of this model can be reproduced (`tokenizer_args_from_config(model_config)[0]` is neither "hf" nor "kimi_audio", slow tokenizer); `tokenizer` may then be `{}`; completions of token ids stay exact |
//!
//! Unknown fields are ignored, so that later agents may add some. The digest is that of the bytes as sent.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The only format written and read.
pub const FORMAT: u32 = 1;

/// How message content reaches the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContentFormat {
    /// Detected from the template, as vLLM does.
    #[default]
    Auto,
    /// A string; text parts are joined with a newline.
    String,
    /// A list of parts.
    Openai,
}

/// A special token, or several under one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Special {
    /// Its text.
    One(String),
    /// Texts.
    Many(Vec<String>),
}

/// What is known of one model. See the module for the JSON shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bundle {
    /// [`FORMAT`].
    pub format: u32,
    /// vLLM's version.
    #[serde(default)]
    pub engine_version: String,
    /// The model type of the configuration.
    #[serde(default)]
    pub model_type: String,
    /// Served names, the first is the base model of the namespace.
    pub models: Vec<String>,
    /// Longest sequence, in tokens.
    pub max_model_len: u64,
    /// The backend tokenizer: a string that holds JSON, or the object.
    pub tokenizer: serde_json::Value,
    /// Special tokens by their names.
    #[serde(default)]
    pub special_tokens: BTreeMap<String, Special>,
    /// The template.
    #[serde(default)]
    pub chat_template: Option<String>,
    /// Templates by name.
    #[serde(default)]
    pub chat_templates: BTreeMap<String, String>,
    /// Content format.
    #[serde(default)]
    pub content_format: ContentFormat,
    /// Template variables that the server sets below those of the request.
    #[serde(default)]
    pub default_chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
    /// Whether `tool_choice: none` hides the tools from the template.
    #[serde(default)]
    pub exclude_tools_when_tool_choice_none: bool,
    /// "left" or "right".
    #[serde(default)]
    pub truncation_side: Option<String>,
    /// Why nothing of this model can be exact.
    #[serde(default)]
    pub not_exact: Option<String>,
}

/// Why a bundle is refused.
#[derive(Debug, thiserror::Error)]
pub enum BadBundle {
    /// Not JSON of that shape.
    #[error("the bundle is not readable: {0}")]
    Json(#[from] serde_json::Error),
    /// A format of another time.
    #[error("the bundle has format {0}, this picker reads {FORMAT}: update the older of agent and picker")]
    Format(u32),
    /// No served name.
    #[error("the bundle names no model")]
    NoModel,
}

impl Bundle {
    /// Reads a bundle.
    ///
    /// # Errors
    /// [`BadBundle`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Bundle, BadBundle> {
        let bundle: Bundle = serde_json::from_slice(bytes)?;
        if bundle.format != FORMAT {
            return Err(BadBundle::Format(bundle.format));
        }
        if bundle.models.is_empty() {
            return Err(BadBundle::NoModel);
        }
        Ok(bundle)
    }

    /// A bundle from the texts of a model folder, for native engines and for tests: `tokenizer.json`,
    /// `tokenizer_config.json`, and `chat_template.jinja` where there is one (it comes first).
    ///
    /// It is right only where the engine uses `tokenizer.json` as it stands: check it with probe texts against the
    /// engine's `/tokenize` before trusting it.
    ///
    /// # Errors
    /// When a text is not JSON.
    pub fn from_texts(
        tokenizer: &str,
        config: &str,
        template: Option<&str>,
        models: Vec<String>,
        max_model_len: u64,
    ) -> Result<Bundle, BadBundle> {
        let config: serde_json::Value = serde_json::from_str(config)?;
        let mut chat_templates = BTreeMap::new();
        let mut chat_template = template.map(str::to_owned);
        match &config["chat_template"] {
            serde_json::Value::String(text) => {
                chat_template.get_or_insert_with(|| text.clone());
            }
            serde_json::Value::Array(named) => {
                for one in named {
                    if let (Some(name), Some(text)) = (one["name"].as_str(), one["template"].as_str()) {
                        chat_templates.insert(name.to_owned(), text.to_owned());
                    }
                }
            }
            _ => {}
        }
        let mut special_tokens = BTreeMap::new();
        let content = |one: &serde_json::Value| one.as_str().or_else(|| one["content"].as_str()).map(str::to_owned);
        for name in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
            if let Some(text) = content(&config[name]) {
                special_tokens.insert(name.to_owned(), Special::One(text));
            }
        }
        if let Some(list) = config["additional_special_tokens"].as_array() {
            let texts = list.iter().filter_map(content).collect();
            special_tokens.insert("additional_special_tokens".to_owned(), Special::Many(texts));
        }
        Ok(Bundle {
            format: FORMAT,
            engine_version: String::new(),
            model_type: String::new(),
            models,
            max_model_len,
            tokenizer: serde_json::from_str(tokenizer)?,
            special_tokens,
            chat_template,
            chat_templates,
            content_format: ContentFormat::Auto,
            default_chat_template_kwargs: serde_json::Map::new(),
            exclude_tools_when_tool_choice_none: false,
            truncation_side: None,
            not_exact: None,
        })
    }

    /// The bytes that [`Bundle::from_bytes`] reads.
    ///
    /// # Errors
    /// None for this type; the codec's error is passed on all the same.
    pub fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(self)
    }
}

/// The name of a bundle: XXH3-128 of its bytes, 32 hexadecimal digits.
pub fn digest(bytes: &[u8]) -> String {
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"{"format": 1, "models": ["m"], "max_model_len": 8, "tokenizer": "{}", "later": 1,
        "special_tokens": {"bos_token": "<s>", "additional_special_tokens": ["<x>"]}, "chat_template": null}"#;

    #[test]
    fn only_four_fields_are_required() -> Result<(), BadBundle> {
        let bundle = Bundle::from_bytes(SMALL.as_bytes())?;
        assert_eq!(bundle.special_tokens["bos_token"], Special::One("<s>".into()));
        assert_eq!((bundle.content_format, bundle.chat_template.clone()), (ContentFormat::Auto, None));
        assert_eq!(Bundle::from_bytes(&bundle.to_bytes()?)?, bundle);
        Ok(())
    }

    #[test]
    fn other_formats_are_refused() {
        let other = SMALL.replace("\"format\": 1", "\"format\": 2");
        assert!(matches!(Bundle::from_bytes(other.as_bytes()), Err(BadBundle::Format(2))));
        let none = SMALL.replace("[\"m\"]", "[]");
        assert!(matches!(Bundle::from_bytes(none.as_bytes()), Err(BadBundle::NoModel)));
        assert!(matches!(Bundle::from_bytes(b"{"), Err(BadBundle::Json(_))));
    }

    #[test]
    fn the_digest_is_that_of_the_bytes() {
        // xxhash.xxh3_128_hexdigest(b"abc")
        assert_eq!(digest(b"abc"), "06b05ab6733a618578af5f94892f3950");
    }

    #[test]
    fn a_model_folder_becomes_a_bundle() -> Result<(), BadBundle> {
        let config = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null,
            "chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#;
        let bundle = Bundle::from_texts("{}", config, None, vec!["m".into()], 4)?;
        assert_eq!(bundle.chat_templates["tool_use"], "t");
        assert_eq!(bundle.special_tokens.len(), 2);
        assert_eq!(
            Bundle::from_texts("{}", config, Some("j"), vec!["m".into()], 4)?.chat_template.as_deref(),
            Some("j")
        );
        Ok(())
    }
}
