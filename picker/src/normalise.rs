//! The conversation as the template sees it: what vLLM 0.32 makes of the messages and tools of a chat body.
//!
//! The request is not checked as the engine checks it. Only what changes the text is followed; a body that the engine
//! will refuse may come out as a prompt here, and is then routed by a prompt that nobody computes.

use crate::bundle::ContentFormat;
use crate::json::{self, Json};
use crate::prompt::{NoPrompt, NotExact};
use minijinja::value::Value;

/// Deepest nesting in a tool call's arguments, as for bodies.
const ARGUMENTS_DEPTH: usize = 128;
/// Stands where an image or a sound begins; the text before it is certain. Private-use characters: no template strips
/// them. A user who writes it shortens the known prefix of the own prompt, nothing else.
pub const GAP: &str = "\u{f8f0}kvatlas gap\u{f8f1}";
/// System text that starts so loses its first line (vLLM 0.32).
const BILLING: &str = "x-anthropic-billing-header";

/// Content of one message.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// One string.
    Text(String),
    /// Parts, each an object.
    Parts(Vec<Vec<(String, Value)>>),
}

impl Content {
    fn value(self) -> Value {
        match self {
            Content::Text(text) => Value::from(text),
            Content::Parts(parts) => parts.into_iter().map(Value::from_pairs).collect(),
        }
    }

    /// All text parts joined by newlines, as the merge of system messages does.
    fn joined(self) -> String {
        match self {
            Content::Text(text) => text,
            Content::Parts(parts) => {
                let text = |part: &Vec<(String, Value)>| {
                    part.iter().find(|(name, _)| name == "text").map(|(_, v)| v.to_string())
                };
                parts.iter().filter_map(text).collect::<Vec<_>>().join("\n")
            }
        }
    }
}

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Its role.
    pub role: String,
    /// Its content.
    pub content: Content,
    /// Other fields, in order.
    pub rest: Vec<(&'static str, Value)>,
}

impl Message {
    /// The object that the template gets.
    pub fn value(self) -> Value {
        let head = [("role", Value::from(self.role)), ("content", self.content.value())];
        Value::from_pairs(head.into_iter().chain(self.rest))
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T, NoPrompt> {
    Err(NoPrompt::Refused(why.into()))
}

/// JSON as a template value.
///
/// # Errors
/// For integers beyond 128 bits.
pub fn value(json: &Json<'_>) -> Result<Value, NotExact> {
    Ok(match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Int(value) => i64::try_from(*value).map_or_else(|_| Value::from(*value), Value::from),
        Json::Big(_) => return Err(NotExact { label: "number", detail: "an integer beyond 128 bits".into() }),
        Json::Float(value) => Value::from(*value),
        Json::Str(text) => Value::from(&**text),
        Json::List(items) => Value::from(items.iter().map(value).collect::<Result<Vec<_>, _>>()?),
        Json::Object(members) => {
            let pairs: Result<Vec<_>, NotExact> =
                members.iter().map(|(name, member)| Ok((&**name, value(member)?))).collect();
            Value::from_pairs(pairs?)
        }
    })
}

/// The messages of a body.
///
/// # Errors
/// When the engine will refuse them.
pub fn messages(body: &Json<'_>, format: ContentFormat) -> Result<Vec<Message>, NoPrompt> {
    let Some(Json::List(list)) = body.get("messages") else { return refused("messages must be a list") };
    list.iter().map(|one| message(one, format)).collect()
}

fn message(message: &Json<'_>, format: ContentFormat) -> Result<Message, NoPrompt> {
    let Some(role) = message.get("role").and_then(Json::as_str) else { return refused("a message has no role") };
    let parts = match message.get("content") {
        None => Vec::new(),
        Some(Json::Null) if role == "assistant" || role == "function" => Vec::new(),
        Some(text @ Json::Str(_)) => vec![text],
        Some(Json::List(parts)) => parts.iter().collect(),
        Some(_) => return refused("content must be a string or a list of parts"),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        if let Some(part) = one_part(part, role)? {
            texts.push(part);
        }
    }
    let mut content = match format {
        ContentFormat::Openai => Content::Parts(texts.into_iter().map(Part::object).collect()),
        ContentFormat::String | ContentFormat::Auto => {
            // Placeholders of media are put before the text of their message.
            let gap = texts.iter().any(|part| matches!(part, Part::Media));
            // Python drops empty ones: no newline stands for them.
            let texts: Vec<String> = texts.into_iter().filter_map(Part::text).filter(|text| !text.is_empty()).collect();
            Content::Text(if gap { format!("{GAP}{}", texts.join("\n")) } else { texts.join("\n") })
        }
    };
    let mut rest = Vec::new();
    if role == "assistant" {
        if let Some(calls) = message.given("tool_calls") {
            let Json::List(calls) = calls else { return refused("tool_calls must be a list") };
            if !calls.is_empty() {
                rest.push(("tool_calls", Value::from(calls.iter().map(tool_call).collect::<Result<Vec<_>, _>>()?)));
            }
        }
        let reasoning = message.given("reasoning").or_else(|| message.given("reasoning_content"));
        if let Some(reasoning) = reasoning.and_then(Json::as_str) {
            rest.push(("reasoning", Value::from(reasoning)));
            rest.push(("reasoning_content", Value::from(reasoning)));
        }
    } else if role == "tool" {
        if let Some(id) = message.get("tool_call_id") {
            rest.push(("tool_call_id", value(id)?));
        }
        let only_text =
            |part: &Vec<(String, Value)>| part.first().is_some_and(|(_, kind)| kind.as_str() == Some("text"));
        if matches!(&content, Content::Parts(parts) if parts.iter().all(only_text)) {
            content = Content::Text(content.joined());
        }
    }
    for field in ["name", "task"] {
        if let Some(text) = message.get(field).and_then(Json::as_str) {
            rest.push((field, Value::from(text)));
        }
    }
    if role == "developer" {
        // Checked by another type than the tools of the request: nothing is added, nothing dropped.
        rest.push(("tools", message.get("tools").map_or(Ok(Value::from(())), developer_tools)?));
    }
    Ok(Message { role: role.to_owned(), content, rest })
}

enum Part {
    /// A text, and the fields of its part that vLLM does not know: they reach the template.
    Text(String, Vec<(String, Value)>),
    Reference(String),
    Media,
}

impl Part {
    fn object(self) -> Vec<(String, Value)> {
        let pair = |kind: &str, name: &str, text: String| {
            vec![("type".into(), Value::from(kind)), (name.into(), Value::from(text))]
        };
        match self {
            Part::Text(text, extras) => {
                let mut out = pair("text", "text", text);
                out.extend(extras);
                out
            }
            Part::Reference(name) => pair("tool_reference", "name", name),
            Part::Media => pair("text", "text", GAP.to_owned()),
        }
    }

    fn text(self) -> Option<String> {
        match self {
            Part::Text(text, _) | Part::Reference(text) => Some(text),
            Part::Media => None,
        }
    }
}

/// Fields of content parts that vLLM's types name; all others reach the template.
const KNOWN: &[&str] = &[
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];
/// Types of content parts that are no text, or fields that say so when the type is absent.
const MEDIA: &[&str] = &[
    "image_url",
    "image_pil",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "prompt_embeds",
    "audio_url",
    "input_audio",
    "video_url",
    "input_image",
];

fn one_part(part: &Json<'_>, role: &str) -> Result<Option<Part>, NoPrompt> {
    let (kind, text) = match part {
        Json::Str(text) => ("text", Some(&**text)),
        Json::Object(_) => {
            let kind = match part.get("type") {
                Some(Json::Str(kind)) => &**kind,
                None | Some(Json::Null) if MEDIA.iter().any(|name| part.get(name).is_some()) => "image_url",
                _ => return refused("a content part has no type"),
            };
            let text = match kind {
                "text" | "refusal" | "thinking" => part.get(kind),
                "tool_reference" => part.get("name"),
                kind if MEDIA.contains(&kind) => return Ok(Some(Part::Media)),
                _ => return refused(format!("unsupported content part {kind:?}")),
            };
            match text {
                Some(Json::Str(text)) => (kind, Some(&**text)),
                None | Some(Json::Null) => (kind, None),
                Some(_) => return refused("the text of a content part is no string"),
            }
        }
        _ => return refused("a content part is neither a string nor an object"),
    };
    let Some(text) = text else { return Ok(None) };
    if kind == "tool_reference" {
        return Ok(Some(Part::Reference(text.to_owned())));
    }
    let extras = match part {
        Json::Object(members) => members
            .iter()
            .filter(|(name, _)| !KNOWN.contains(&&**name))
            .map(|(name, member)| Ok((name.to_string(), value(member)?)))
            .collect::<Result<_, NotExact>>()?,
        _ => Vec::new(),
    };
    if role == "system" && kind == "text" && text.starts_with(BILLING) {
        let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
        return Ok((!rest.is_empty()).then(|| Part::Text(rest.to_owned(), extras)));
    }
    Ok(Some(Part::Text(text.to_owned(), extras)))
}

fn tool_call(call: &Json<'_>) -> Result<Value, NoPrompt> {
    let (Some(function @ Json::Object(_)), Some("function")) =
        (call.get("function"), call.get("type").and_then(Json::as_str))
    else {
        return refused("only tool calls of type function are supported");
    };
    let empty = || Value::from_pairs(Vec::<(&str, Value)>::new());
    let arguments = match function.get("arguments") {
        Some(Json::Str(text)) if text.is_empty() => empty(),
        Some(Json::Str(text)) => match json::parse(text, ARGUMENTS_DEPTH) {
            Ok(object @ Json::Object(_)) => value(&object)?,
            Err(fault) if fault.message.contains("too deep") => {
                return Err(NotExact { label: "number", detail: "tool arguments nested too deep".into() }.into());
            }
            Err(fault) if fault.message.contains("surrogate") => {
                return refused("tool arguments with half a surrogate pair");
            }
            _ => empty(),
        },
        _ => return refused("the arguments of a tool call must be a string"),
    };
    let Some(name) = function.get("name").and_then(Json::as_str) else { return refused("a tool call has no name") };
    let Some(id) = call.get("id").and_then(Json::as_str) else { return refused("a tool call has no id") };
    let function = with_extras([("arguments", arguments), ("name", Value::from(name))].into(), function)?;
    let out = vec![("id", Value::from(id)), ("function", function), ("type", Value::from("function"))];
    Ok(with_extras(out, call)?)
}

/// An object of the fields known to the engine in its own order, and then all others as they came.
fn with_extras(known: Vec<(&str, Value)>, whole: &Json<'_>) -> Result<Value, NotExact> {
    let mut out = known;
    if let Json::Object(members) = whole {
        let count = out.len();
        for (name, member) in members {
            if !out[..count].iter().any(|(known, _)| known == name) {
                out.push((name, value(member)?));
            }
        }
    }
    Ok(Value::from_pairs(out))
}

fn developer_tools(tools: &Json<'_>) -> Result<Value, NoPrompt> {
    let Json::List(list) = tools else {
        return if *tools == Json::Null { Ok(Value::from(())) } else { refused("tools must be a list") };
    };
    let one = |tool: &Json<'_>| -> Result<Value, NoPrompt> {
        let Some(function) = tool.get("function") else { return refused("a tool has no function") };
        let mut known = Vec::new();
        for field in ["name", "description", "parameters", "strict"] {
            if let Some(member) = function.get(field) {
                known.push((field, value(member)?));
            }
        }
        let function = with_extras(known, function)?;
        Ok(with_extras(vec![("function", function), ("type", Value::from("function"))], tool)?)
    };
    Ok(Value::from(list.iter().map(one).collect::<Result<Vec<_>, _>>()?))
}

/// Developer messages for templates that do not know them: they become system messages, and all system messages become
/// one, at the front.
pub fn without_developer(messages: Vec<Message>) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    let mut systems = 0;
    let mut moved = false;
    for (place, mut message) in messages.into_iter().enumerate() {
        if message.role == "developer" {
            message.role = "system".into();
            message.rest.retain(|(name, _)| *name != "tools");
        }
        if message.role == "system" {
            moved |= place > 0 || systems > 0;
            systems += 1;
        }
        out.push(message);
    }
    if !moved {
        return out;
    }
    let (systems, rest): (Vec<Message>, Vec<Message>) = out.into_iter().partition(|message| message.role == "system");
    let texts: Vec<String> = systems.into_iter().map(|m| m.content.joined()).filter(|text| !text.is_empty()).collect();
    let first = Message { role: "system".into(), content: Content::Text(texts.join("\n\n")), rest: Vec::new() };
    std::iter::once(first).chain(rest).collect()
}

/// The tools of a body, with fields in the order of vLLM's models and what they do not know dropped. `None` when the
/// template gets none.
///
/// # Errors
/// When the engine will refuse them.
pub fn tools(body: &Json<'_>, exclude_when_none: bool) -> Result<Option<Value>, NoPrompt> {
    let list = match body.given("tools") {
        None => return Ok(None),
        Some(Json::List(list)) => list,
        Some(_) => return refused("tools must be a list"),
    };
    if list.is_empty() {
        return refused("tools must not be empty");
    }
    let tools = list.iter().map(tool).collect::<Result<Vec<_>, _>>()?;
    if exclude_when_none && body.get("tool_choice").and_then(Json::as_str) == Some("none") {
        return Ok(None);
    }
    Ok(Some(Value::from(tools)))
}

fn tool(tool: &Json<'_>) -> Result<Value, NoPrompt> {
    let Some(function @ Json::Object(_)) = tool.get("function") else { return refused("a tool has no function") };
    let Some(name) = function.get("name").and_then(Json::as_str) else { return refused("a tool has no name") };
    if tool.get("type").is_some_and(|kind| kind.as_str() != Some("function")) {
        return refused("only tools of type function are supported");
    }
    let or_null = |field: &str| function.get(field).map_or(Ok(Value::from(())), value);
    let mut members = vec![
        ("name", Value::from(name)),
        ("description", or_null("description")?),
        ("parameters", or_null("parameters")?),
    ];
    if let Some(strict) = function.given("strict") {
        members.push(("strict", value(strict)?));
    }
    let defer = tool.given("defer_loading");
    if let Some(defer) = function.given("defer_loading").or(defer) {
        members.push(("defer_loading", value(defer)?));
    }
    let mut out = vec![("type", Value::from("function")), ("function", Value::from_pairs(members))];
    if let Some(defer) = defer {
        out.push(("defer_loading", value(defer)?));
    }
    Ok(Value::from_pairs(out))
}
