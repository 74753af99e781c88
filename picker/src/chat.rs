//! A chat body to the text that the engine tokenizes.

use crate::bundle::{Bundle, ContentFormat, Special};
use crate::detect;
use crate::json::{self, Json};
use crate::normalise::{self, Content, Message, value};
use crate::prompt::{NoPrompt, NotExact, Now};
use crate::python::is_space;
use crate::template::{Template, Unrendered};
use minijinja::value::{Value, ValueKind};

/// What transformers puts behind the last message to find where it ends.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// Arguments of `apply_chat_template` that are no template variables.
const ARGUMENTS: &[&str] = &[
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// Model types whose chats vLLM renders by code of its own, whatever template they bring.
const OWN_RENDERERS: &[&str] = &["gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling"];

/// The templates of one model, and how its server fills them.
#[derive(Debug)]
pub struct Chat {
    plain: Variant,
    /// For requests with tools, where the tokenizer has a template of its own for them.
    tool_use: Option<Variant>,
    special_tokens: Vec<(String, Value)>,
    defaults: Vec<(String, Value)>,
    exclude_tools: bool,
}

#[derive(Debug)]
struct Variant {
    template: Template,
    format: ContentFormat,
    knows_developer: bool,
}

impl Variant {
    fn load(source: &str, format: ContentFormat) -> Result<Variant, NotExact> {
        let format = match format {
            ContentFormat::Auto => detect::content_format(source),
            given => given,
        };
        let knows_developer = source.contains("\"developer\"") || source.contains("'developer'");
        Ok(Variant { template: Template::compile(source)?, format, knows_developer })
    }
}

impl Chat {
    /// Compiles the templates of a bundle.
    ///
    /// # Errors
    /// Why chats of this model cannot be exact.
    pub fn load(bundle: &Bundle) -> Result<Chat, NotExact> {
        if OWN_RENDERERS.contains(&bundle.model_type.as_str()) {
            let detail = format!("vLLM renders chats of {} by its own code, not by a template", bundle.model_type);
            return Err(NotExact { label: "model", detail });
        }
        let default = bundle.chat_template.as_ref().or_else(|| bundle.chat_templates.get("default"));
        let Some(default) = default else {
            return Err(NotExact { label: "no_template", detail: "the bundle has no chat template".into() });
        };
        let tool_use = bundle.chat_templates.get("tool_use").filter(|source| *source != default);
        let special = |special: &Special| match special {
            Special::One(text) => Value::from(text.as_str()),
            Special::Many(texts) => texts.iter().map(|text| Value::from(text.as_str())).collect(),
        };
        Ok(Chat {
            plain: Variant::load(default, bundle.content_format)?,
            tool_use: tool_use.map(|source| Variant::load(source, bundle.content_format)).transpose()?,
            special_tokens: bundle.special_tokens.iter().map(|(name, one)| (name.clone(), special(one))).collect(),
            defaults: bundle
                .default_chat_template_kwargs
                .iter()
                .map(|(name, given)| Ok((name.clone(), from_serde(given)?)))
                .collect::<Result<_, NotExact>>()?,
            exclude_tools: bundle.exclude_tools_when_tool_choice_none,
        })
    }

    /// The text.
    ///
    /// # Errors
    /// [`NoPrompt`].
    pub fn render(&self, body: &Json<'_>, now: Now) -> Result<String, NoPrompt> {
        let refused = |why: &str| Err(NoPrompt::Refused(why.into()));
        let flag = |name: &str, default: bool| match body.get(name) {
            None => Ok(default),
            Some(Json::Bool(value)) => Ok(*value),
            Some(_) => Err(NoPrompt::Refused(format!("{name} must be true or false"))),
        };
        let generate = flag("add_generation_prompt", true)?;
        let go_on = flag("continue_final_message", false)?;
        if generate && go_on {
            return refused("continue_final_message needs add_generation_prompt false");
        }
        if body.given("chat_template").is_some() {
            return Err(
                NotExact { label: "template", detail: "the request brings its own chat template".into() }.into()
            );
        }
        let mut variables = self.variables(body)?;
        let tools = take(&mut variables, "tools");
        let documents = take(&mut variables, "documents");
        if ![&tools, &documents].into_iter().flatten().all(iterates_over_objects) {
            return refused("tools and documents must be lists of objects");
        }
        // transformers makes a list of what it is given; None where absent: defined, unlike other variables.
        let tools = tools
            .map_or(Value::from(()), |tools| if tools.is_true() { tools } else { Value::from(Vec::<Value>::new()) });
        let documents = documents.unwrap_or_else(|| Value::from(()));
        let variant = match &self.tool_use {
            Some(variant) if !tools.is_none() => variant,
            _ => &self.plain,
        };
        let mut messages = normalise::messages(body, variant.format)?;
        if !variant.knows_developer && messages.iter().any(|message| message.role == "developer") {
            messages = normalise::without_developer(messages);
        }
        let last = if go_on { Some(mark_last(&mut messages, variant.template.source())?) } else { None };

        variables.retain(|(name, _)| !ARGUMENTS.contains(&name.as_str()));
        let mut context: Vec<(String, Value)> = self.special_tokens.clone();
        context.retain(|(name, _)| !variables.iter().any(|(other, _)| other == name));
        if variables.iter().any(|(name, _)| name == "messages") {
            return refused("chat_template_kwargs may not set messages");
        }
        context.append(&mut variables);
        context.push(("messages".into(), messages.into_iter().map(Message::value).collect()));
        context.push(("tools".into(), tools));
        context.push(("documents".into(), documents));
        context.push(("add_generation_prompt".into(), Value::from(generate)));
        let text = variant.template.render(context, now).map_err(|e| match e {
            Unrendered::Refused(why) => NoPrompt::Refused(why),
            Unrendered::NotExact(why) => NoPrompt::NotExact(why),
        })?;
        match last {
            Some(last) => cut_last(text, &last),
            None => Ok(text),
        }
    }

    /// Template variables from defaults, `chat_template_kwargs` and the request's own fields, each above the one
    /// before. Null and "auto" count as not given.
    fn variables(&self, body: &Json<'_>) -> Result<Vec<(String, Value)>, NoPrompt> {
        let mut out: Vec<(String, Value)> = self.defaults.clone();
        let mut set = |name: &str, value: Value| match out.iter_mut().find(|(other, _)| other == name) {
            Some((_, old)) => *old = value,
            None => out.push((name.to_owned(), value)),
        };
        if let Some(tools) = normalise::tools(body, self.exclude_tools)? {
            set("tools", tools);
        }
        let given = |value: &Json<'_>| *value != Json::Null && value.as_str() != Some("auto");
        let mut user_thinks = false;
        match body.given("chat_template_kwargs") {
            None => {}
            Some(Json::Object(members)) => {
                for (name, member) in members {
                    if name == "chat_template" || name == "tokenize" || name == "conversation" {
                        if given(member) {
                            return Err(NoPrompt::Refused(format!("chat_template_kwargs may not set {name}")));
                        }
                        continue;
                    }
                    user_thinks |= name == "enable_thinking";
                    if given(member) {
                        set(name, value(member)?);
                    }
                }
            }
            Some(_) => return Err(NoPrompt::Refused("chat_template_kwargs must be an object".into())),
        }
        match body.given("documents") {
            None => {}
            Some(Json::List(list)) if list.iter().all(|one| matches!(one, Json::Object(_))) => {
                set("documents", Value::from(list.iter().map(value).collect::<Result<Vec<_>, _>>()?));
            }
            Some(_) => return Err(NoPrompt::Refused("documents must be a list of objects".into())),
        }
        match body.given("reasoning_effort") {
            None => {}
            Some(Json::Str(effort)) => {
                set("reasoning_effort", Value::from(&**effort));
                if !user_thinks {
                    set("enable_thinking", Value::from(effort != "none"));
                }
            }
            Some(_) => return Err(NoPrompt::Refused("reasoning_effort must be a string".into())),
        }
        Ok(out)
    }
}

/// What Python's loop over tools or documents takes: objects only, or nothing.
fn iterates_over_objects(list: &Value) -> bool {
    match list.kind() {
        ValueKind::Seq => list.try_iter().is_ok_and(|mut items| items.all(|item| item.kind() == ValueKind::Map)),
        ValueKind::Map | ValueKind::String => !list.is_true(),
        _ => false,
    }
}

fn from_serde(given: &serde_json::Value) -> Result<Value, NotExact> {
    let text = given.to_string();
    let json = json::parse(&text, 128)
        .map_err(|e| NotExact { label: "template", detail: format!("default_chat_template_kwargs: {e}") })?;
    value(&json)
}

fn take(variables: &mut Vec<(String, Value)>, name: &str) -> Option<Value> {
    let place = variables.iter().position(|(other, _)| other == name)?;
    Some(variables.swap_remove(place).1)
}

/// Puts the tag behind the last message's text, and gives that text.
fn mark_last(messages: &mut [Message], source: &str) -> Result<String, NoPrompt> {
    let refused = |why: &str| Err(NoPrompt::Refused(why.into()));
    if !source.contains("content") {
        return refused("the chat template does not use content, so no message can be continued");
    }
    let Some(last) = messages.last_mut() else { return refused("there is no message to continue") };
    match &mut last.content {
        Content::Text(text) => {
            let before = text.clone();
            text.push_str(TAG);
            Ok(before)
        }
        Content::Parts(parts) => {
            let text = parts.iter_mut().rev().flatten().find(|(name, _)| name == "text");
            let Some((_, text)) = text else { return refused("the last message has no text to continue") };
            let before = text.to_string();
            *text = Value::from(format!("{before}{TAG}"));
            Ok(before)
        }
    }
}

fn cut_last(mut text: String, last: &str) -> Result<String, NoPrompt> {
    let bare = TAG.trim_end();
    let last = last.trim_matches(is_space);
    let Some(place) = text.rfind(bare).filter(|_| text.contains(last)) else {
        return Err(NoPrompt::Refused("the chat template drops the message to continue".into()));
    };
    let whole = text[place..].starts_with(TAG);
    text.truncate(place);
    if !whole {
        text.truncate(text.trim_end_matches(is_space).len());
    }
    Ok(text)
}
