//! Chat templates: Jinja as transformers runs it, on minijinja.
//!
//! Settings and overrides are those with which 15 templates gave transformers' text on thousands of bodies. What
//! minijinja lacks (some filters and string methods) is an error at load or at render time, never another text.

use crate::prompt::{NotExact, Now};
use crate::python::{self, Dumps};
use chrono::{DateTime, FixedOffset};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};

/// Most steps of one rendering: a chat of 200 messages takes about 30,000, so this is some 60,000 messages, and about
/// half a second.
const FUEL: u64 = 10_000_000;
/// Name of the variable that carries the time into `strftime_now`; a request cannot set it, see [`Template::render`].
const NOW: &str = "kvatlas now";

/// One compiled template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
}

/// Why nothing was rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unrendered {
    /// The template refused the conversation, or would have failed in Python too.
    Refused(String),
    /// minijinja cannot do what the template asks for.
    NotExact(NotExact),
}

impl Template {
    /// Compiles a template and looks for what minijinja does not have.
    ///
    /// # Errors
    /// A reason why prompts of this template cannot be exact.
    pub fn compile(source: &str) -> Result<Template, NotExact> {
        let fault = |detail: String| NotExact { label: "template", detail };
        // Jinja reads all line ends as \n. {% generation %} only marks text for training.
        let source = generation_as_if(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let mut environment = environment().map_err(|e| fault(format!("{e:#}")))?;
        environment.add_template_owned("chat", source.clone()).map_err(|e| fault(format!("{e:#}")))?;
        if let Some(missing) = crate::detect::missing(&source, &environment) {
            return Err(fault(missing));
        }
        Ok(Template { environment, source })
    }

    /// The source as compiled.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders with these variables. `now` is what `strftime_now` prints.
    ///
    /// # Errors
    /// [`Unrendered`].
    pub fn render(&self, mut variables: Vec<(String, Value)>, now: Now) -> Result<String, Unrendered> {
        variables.retain(|(name, _)| name != NOW);
        variables.push((NOW.into(), Value::from(vec![Value::from(now.unix_s), Value::from(now.offset_s)])));
        let context = Value::from_pairs(variables);
        let template = self.environment.get_template("chat").map_err(|e| classify(&e))?;
        template.render(context).map_err(|e| classify(&e))
    }
}

fn classify(error: &Error) -> Unrendered {
    match error.kind() {
        ErrorKind::UnknownFilter
        | ErrorKind::UnknownFunction
        | ErrorKind::UnknownMethod
        | ErrorKind::UnknownTest
        | ErrorKind::OutOfFuel
        | ErrorKind::SyntaxError
        | ErrorKind::TemplateNotFound => {
            Unrendered::NotExact(NotExact { label: "template", detail: format!("{error}") })
        }
        _ => Unrendered::Refused(error.detail().map_or_else(|| error.to_string(), str::to_owned)),
    }
}

/// `{% generation %}` and `{% endgeneration %}` as an `if` that is always true, keeping their - and + marks.
fn generation_as_if(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else { break };
        let (tag, after) = tag.split_at(end + 2);
        let inner = &tag[2..tag.len() - 2];
        match inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(false).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_formatter(print);
    env.set_unknown_method_callback(method);
    env.add_filter("tojson", tojson);
    env.add_filter("trim", |value: &Value, chars: Option<String>| strip(&text(value), chars.as_deref(), true, true));
    env.add_filter(
        "string",
        |value: &Value| if value.kind() == ValueKind::String { value.clone() } else { Value::from(text(value)) },
    );
    env.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Undefined
        )
    });
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
    });
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, text(message)))
    });
    env.add_function("strftime_now", strftime_now);
    Ok(env)
}

fn text(value: &Value) -> String {
    let mut out = String::new();
    python::str_into(value, &mut out);
    out
}

fn print(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&text(value)),
    }
    .map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot write"))
}

fn strip(text: &str, chars: Option<&str>, left: bool, right: bool) -> String {
    let is = |c: char| chars.map_or_else(|| python::is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(is) } else { text };
    let text = if right { text.trim_end_matches(is) } else { text };
    text.to_owned()
}

/// Methods of strings, lists and maps that Python has and minijinja's core does not.
fn method(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(this) = value.as_str() {
        let one = || -> Result<Option<String>, Error> {
            match args {
                [] => Ok(None),
                [value] if value.is_none() => Ok(None),
                [value] if value.kind() == ValueKind::String => Ok(Some(text(value))),
                _ => Err(Error::new(ErrorKind::InvalidOperation, format!("bad arguments of {method}"))),
            }
        };
        match method {
            "strip" => return Ok(Value::from(strip(this, one()?.as_deref(), true, true))),
            "lstrip" => return Ok(Value::from(strip(this, one()?.as_deref(), true, false))),
            "rstrip" => return Ok(Value::from(strip(this, one()?.as_deref(), false, true))),
            "split" if one().is_ok_and(|separator| separator.is_none()) => {
                return Ok(this.split(python::is_space).filter(|word| !word.is_empty()).map(Value::from).collect());
            }
            "removeprefix" | "removesuffix" => {
                let Some(part) = one()? else {
                    return Err(Error::new(ErrorKind::MissingArgument, format!("{method} takes one argument")));
                };
                let rest = if method == "removeprefix" { this.strip_prefix(&*part) } else { this.strip_suffix(&*part) };
                return Ok(Value::from(rest.unwrap_or(this)));
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let argument = |place: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match args.get(place) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = match argument(1, "indent")? {
        Some(value) if value.kind() == ValueKind::String => Some(text(&value)),
        // More than any template asks for, and not enough to fill memory.
        Some(value) => Some(" ".repeat(value.as_usize().unwrap_or(0).min(64))),
        None => None,
    };
    let separators: Vec<Value> = match argument(2, "separators")? {
        Some(value) => value.try_iter()?.collect(),
        None => Vec::new(),
    };
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    let separator = |place: usize| separators.get(place).map(text);
    let options = Dumps { ensure_ascii, indent, item_separator: separator(0), key_separator: separator(1), sort_keys };
    python::dumps(value, &options).map(Value::from)
}

fn strftime_now(state: &mut State<'_, '_>, format: String) -> Result<String, Error> {
    let fault = || Error::new(ErrorKind::UnknownFunction, format!("strftime_now cannot do {format:?}"));
    let now = state.lookup(NOW).ok_or_else(fault)?;
    let part = |place| now.get_item_by_index(place).ok().and_then(|value| value.as_i64());
    let offset = part(1).and_then(|offset| FixedOffset::east_opt(i32::try_from(offset).ok()?));
    let utc = part(0).and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    let local = utc.ok_or_else(fault)?.with_timezone(&offset.ok_or_else(fault)?);
    let mut out = String::new();
    // An unknown letter makes Display fail; to_string would panic.
    std::fmt::write(&mut out, format_args!("{}", local.format(&format))).map_err(|_| fault())?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::{self, Json};
    use crate::normalise::value;

    const VARIABLES: &str = r#"{"x": {"k<": "é\"\\\u2028", "n": {"e": [], "o": {}, "f": 1e-7, "i": 100000000000000000000,
        "b": true, "z": null}}, "f": 0.1, "s": "\u001c\u3000 a b\u001f\n", "s2": "banana"}"#;

    fn render(source: &str, now: Now) -> Result<String, Unrendered> {
        let Ok(Json::Object(members)) = json::parse(VARIABLES, 9) else { panic!("bad variables") };
        let variables = members.iter().filter_map(|(name, json)| Some((name.to_string(), value(json).ok()?))).collect();
        Template::compile(source).map_err(Unrendered::NotExact)?.render(variables, now)
    }

    // Second values: transformers.utils.chat_template_utils._compile_jinja_template(source).render(**variables),
    // transformers 5.19, Jinja2 3.1.6.
    #[test]
    fn text_as_transformers_renders_it() {
        for (source, text) in [
            (
                "{{ x | tojson }}",
                "{\"k<\": \"é\\\"\\\\\u{2028}\", \"n\": {\"e\": [], \"o\": {}, \"f\": 1e-07, \"i\": 100000000000000000000, \"b\": true, \"z\": null}}",
            ),
            (
                "{{ x | tojson(indent=2) }}",
                "{\n  \"k<\": \"é\\\"\\\\\u{2028}\",\n  \"n\": {\n    \"e\": [],\n    \"o\": {},\n    \"f\": 1e-07,\n    \"i\": 100000000000000000000,\n    \"b\": true,\n    \"z\": null\n  }\n}",
            ),
            (
                "{{ x | tojson(ensure_ascii=true) }}",
                "{\"k<\": \"\\u00e9\\\"\\\\\\u2028\", \"n\": {\"e\": [], \"o\": {}, \"f\": 1e-07, \"i\": 100000000000000000000, \"b\": true, \"z\": null}}",
            ),
            (
                "{{ x | tojson(separators=(',', ':'), sort_keys=true) }}",
                "{\"k<\":\"é\\\"\\\\\u{2028}\",\"n\":{\"b\":true,\"e\":[],\"f\":1e-07,\"i\":100000000000000000000,\"o\":{},\"z\":null}}",
            ),
            (
                "{{ x }}",
                "{'k<': 'é\"\\\\\\u2028', 'n': {'e': [], 'o': {}, 'f': 1e-07, 'i': 100000000000000000000, 'b': True, 'z': None}}",
            ),
            (
                "{{ f }} {{ [f, 'it\\'s', none, true] }} {{ {'a': (1,)} }}",
                "0.1 [0.1, \"it's\", None, True] {'a': (1,)}",
            ),
            (
                "{{ s.strip() | tojson }}{{ s | trim | tojson }}{{ s.lstrip() | tojson }}{{ s.rstrip() | tojson }}{{ s.split() }}",
                "\"a b\"\"a b\"\"a b\\u001f\\n\"\"\\u001c\u{3000} a b\"['a', 'b']",
            ),
            (
                "{{ 'xxaxx'.strip('x') }}{{ 'prefix-a'.removeprefix('prefix-') }}{{ 'a.txt'.removesuffix('.txt') }}{{ 'a,b,c'.split(',', 1) }}",
                "aaa['a', 'b,c']",
            ),
            (
                "{{ none is iterable }} {{ 'a' is iterable }} {{ {} is sequence }} {{ 'a' is sequence }} {{ 3 is iterable }}",
                "False True True True False",
            ),
            ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
            ("{%- generation -%} x {%- endgeneration %}y", "xy"),
            ("line\r\nend\r\n", "line\nend"),
            ("{{ 'é' | tojson }}{{ '</script>&\\u007f' | tojson }}", "\"é\"\"</script>&\u{7f}\""),
            (
                "{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% if loop.last %}.{% endif %}{% endfor %}",
                "13.",
            ),
            (
                "{{ {'b': 1, 'a': 2} | dictsort }} {{ {'b': 1, 'a': 2} | items | list }}",
                "[('a', 2), ('b', 1)] [('b', 1), ('a', 2)]",
            ),
            ("{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 'a' in 'abc' }}{{ 'x' ~ 1 ~ none ~ 1.0 }}", "abab[1, 2]Truex1None1.0"),
            ("{{ undefined_thing }}|{{ undefined_thing is defined }}|{{ undefined_thing or 'd' }}", "|False|d"),
            (
                "{{ 'a\\nb' | indent(2) }}|{{ [1,2,3] | batch(2) | list }}|{{ x | length }}|{{ x.keys() | list }}|{{ x.get('zz', 'no') }}",
                "a\n  b|[[1, 2], [3]]|2|['k<', 'n']|no",
            ),
            (
                "{{ 'a' if false }}|{{ ['a','b'] | map('upper') | list }}|{{ [{'a':1},{'a':2}] | selectattr('a','gt',1) | list }}",
                "|['A', 'B']|[{'a': 2}]",
            ),
            (
                "{{ s2 | replace('a', 'b', 1) }}{{ s2.replace('a','') }}{{ s2.find('n') }}{{ s2.count('a') }}{{ s2.upper() }}{{ s2.startswith(('b','c')) }}",
                "bbnanabnn23BANANATrue",
            ),
            (
                "{% macro m(a, b='z') %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(1, b=2) }}{{ m('q') | length }}",
                "[1z][12]4",
            ),
            (
                "{{ ' x ' | trim | upper }}{{ 'a\tb' | tojson }}{{ '\u{85}\u{1c}' | tojson }}{{ x | items | first }}{{ x | list }}",
                "X\"a\\tb\"\"\u{85}\\u001c\"('k<', 'é\"\\\\\\u2028')['k<', 'n']",
            ),
        ] {
            assert_eq!(render(source, Now::default()).as_deref(), Ok(text), "{source}");
        }
    }

    #[test]
    fn dates_are_those_of_the_zone_that_is_passed_in() {
        let now = Now { unix_s: 1_796_081_405, offset_s: 3600 };
        for (format, text) in [
            ("%d %b %Y", "01 Dec 2026"),
            ("%A, %B %-d", "Tuesday, December 1"),
            ("%H:%M:%S %p %I %j %y", "00:30:05 AM 12 335 26"),
        ] {
            let source = format!("{{{{ strftime_now('{format}') }}}}");
            assert_eq!(render(&source, now).as_deref(), Ok(text));
        }
        assert!(matches!(render("{{ strftime_now('%Q') }}", now), Err(Unrendered::NotExact(_))));
    }

    #[test]
    fn a_template_may_refuse() {
        let refused = render("{% if not x.y %}{{ raise_exception('no y in x') }}{% endif %}", Now::default());
        assert_eq!(refused, Err(Unrendered::Refused("no y in x".into())));
    }

    #[test]
    fn what_cannot_be_exact_says_so() {
        for source in [
            "{{ s | wordcount }}",
            "{{ x is strange }}",
            "{{ s.zfill(3) }}",
            "{% broken %}",
            "{{ nothing_of_that_name() }}",
        ] {
            assert!(matches!(render(source, Now::default()), Err(Unrendered::NotExact(_))), "{source}");
        }
    }

    #[test]
    fn rendering_has_fuel() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a * b }}{% endfor %}{% endfor %}";
        assert!(matches!(render(endless, Now::default()), Err(Unrendered::NotExact(_))));
    }
}
