//! What a template's syntax tree tells: whether it takes content as a list of parts, and what it calls that does not
//! exist here.
//!
//! The content format follows vLLM's own detection (`renderers/hf.py`): "openai" when the template loops over a
//! message's content, found through assignments, loops over messages, and macros that are given the content.

use crate::bundle::ContentFormat;
use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Stmt};
use minijinja::machinery::parse;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind};
use std::collections::BTreeSet;

/// Methods of values that [`crate::template`] has.
const METHODS: &[&str] = &[
    "upper",
    "lower",
    "islower",
    "isupper",
    "isspace",
    "isdigit",
    "isnumeric",
    "isalnum",
    "isalpha",
    "isascii",
    "strip",
    "lstrip",
    "rstrip",
    "replace",
    "title",
    "split",
    "splitlines",
    "capitalize",
    "count",
    "find",
    "format",
    "rfind",
    "startswith",
    "endswith",
    "join",
    "keys",
    "values",
    "items",
    "get",
    "removeprefix",
    "removesuffix",
    "cycle",
    "changed",
];

/// The parts of a syntax tree that matter here, flat.
#[derive(Default)]
struct Found<'t, 's> {
    assigns: Vec<(&'t Expr<'s>, &'t Expr<'s>)>,
    /// Loops with the macro that each is in, by its place in `macros`.
    loops: Vec<(&'t ForLoop<'s>, Option<usize>)>,
    macros: Vec<&'t Macro<'s>>,
    calls: Vec<&'t Call<'s>>,
    filters: BTreeSet<&'s str>,
    tests: BTreeSet<&'s str>,
    inside: Option<usize>,
}

impl<'t, 's> Found<'t, 's> {
    fn stmts(&mut self, list: &'t [Stmt<'s>]) {
        for one in list {
            self.stmt(one);
        }
    }

    fn stmt(&mut self, stmt: &'t Stmt<'s>) {
        match stmt {
            Stmt::Template(x) => self.stmts(&x.children),
            Stmt::EmitExpr(x) => self.expr(&x.expr),
            Stmt::ForLoop(x) => {
                self.loops.push((x, self.inside));
                self.expr(&x.iter);
                self.option(x.filter_expr.as_ref());
                self.stmts(&x.body);
                self.stmts(&x.else_body);
            }
            Stmt::IfCond(x) => {
                self.expr(&x.expr);
                self.stmts(&x.true_body);
                self.stmts(&x.false_body);
            }
            Stmt::WithBlock(x) => {
                for (_, value) in &x.assignments {
                    self.expr(value);
                }
                self.stmts(&x.body);
            }
            Stmt::Set(x) => {
                self.assigns.push((&x.target, &x.expr));
                self.expr(&x.expr);
            }
            Stmt::SetBlock(x) => {
                self.option(x.filter.as_ref());
                self.stmts(&x.body);
            }
            Stmt::AutoEscape(x) => self.stmts(&x.body),
            Stmt::FilterBlock(x) => {
                self.expr(&x.filter);
                self.stmts(&x.body);
            }
            Stmt::Macro(x) => self.declaration(x),
            Stmt::CallBlock(x) => {
                self.call(&x.call);
                self.stmts(&x.macro_decl.body);
            }
            Stmt::Do(x) => self.call(&x.call),
            _ => {}
        }
    }

    fn declaration(&mut self, x: &'t Macro<'s>) {
        let outer = self.inside.replace(self.macros.len());
        self.macros.push(x);
        for default in &x.defaults {
            self.expr(default);
        }
        self.stmts(&x.body);
        self.inside = outer;
    }

    fn option(&mut self, expr: Option<&'t Expr<'s>>) {
        if let Some(expr) = expr {
            self.expr(expr);
        }
    }

    fn args(&mut self, args: &'t [CallArg<'s>]) {
        for arg in args {
            match arg {
                CallArg::Pos(x) | CallArg::Kwarg(_, x) | CallArg::PosSplat(x) | CallArg::KwargSplat(x) => self.expr(x),
            }
        }
    }

    fn call(&mut self, x: &'t Call<'s>) {
        self.calls.push(x);
        self.expr(&x.expr);
        self.args(&x.args);
    }

    fn expr(&mut self, expr: &'t Expr<'s>) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(x) => {
                self.expr(&x.expr);
                for part in [&x.start, &x.stop, &x.step] {
                    self.option(part.as_ref());
                }
            }
            Expr::UnaryOp(x) => self.expr(&x.expr),
            Expr::BinOp(x) => {
                self.expr(&x.left);
                self.expr(&x.right);
            }
            Expr::Compare(x) => {
                self.expr(&x.expr);
                for op in &x.ops {
                    self.expr(&op.expr);
                }
            }
            Expr::IfExpr(x) => {
                self.expr(&x.test_expr);
                self.expr(&x.true_expr);
                self.option(x.false_expr.as_ref());
            }
            Expr::Filter(x) => {
                self.filters.insert(x.name);
                self.option(x.expr.as_ref());
                self.args(&x.args);
            }
            Expr::Test(x) => {
                self.tests.insert(x.name);
                self.expr(&x.expr);
                self.args(&x.args);
            }
            Expr::GetAttr(x) => self.expr(&x.expr),
            Expr::GetItem(x) => {
                self.expr(&x.expr);
                self.expr(&x.subscript_expr);
            }
            Expr::Call(x) => self.call(x),
            Expr::List(x) => x.items.iter().for_each(|item| self.expr(item)),
            Expr::Tuple(x) => x.items.iter().for_each(|item| self.expr(item)),
            Expr::Map(x) => x.keys.iter().chain(&x.values).for_each(|item| self.expr(item)),
        }
    }
}

fn variable<'s>(expr: &Expr<'s>) -> Option<&'s str> {
    match expr {
        Expr::Var(x) => Some(x.id),
        _ => None,
    }
}

/// The variable itself, or (with a key) its member, also behind filters, tests and slices.
fn accesses(expr: &Expr<'_>, name: &str, key: Option<&str>) -> bool {
    match expr {
        Expr::Filter(x) => x.expr.as_ref().is_some_and(|inner| accesses(inner, name, key)),
        Expr::Test(x) => accesses(&x.expr, name, key),
        Expr::Slice(x) => accesses(&x.expr, name, key),
        Expr::Var(x) => key.is_none() && x.id == name,
        Expr::GetAttr(x) => key == Some(x.name) && variable(&x.expr) == Some(name),
        Expr::GetItem(x) => {
            let constant = matches!(&x.subscript_expr, Expr::Const(c) if c.value.as_str() == key);
            key.is_some() && constant && variable(&x.expr) == Some(name)
        }
        _ => false,
    }
}

/// The format that vLLM would find for this template. A template that does not parse counts as "string".
pub fn content_format(source: &str) -> ContentFormat {
    let Ok(tree) = parse(source, "chat", SyntaxConfig::default()) else { return ContentFormat::String };
    let mut found = Found::default();
    found.stmt(&tree);
    if loops_over_content(&found) { ContentFormat::Openai } else { ContentFormat::String }
}

fn loops_over_content(found: &Found<'_, '_>) -> bool {
    // Names that hold the messages, through assignments.
    let mut lists = vec!["messages"];
    let mut next = 0;
    while next < lists.len() {
        for (target, value) in &found.assigns {
            if let Some(target) = variable(target)
                && accesses(value, lists[next], None)
                && !lists.contains(&target)
            {
                lists.push(target);
            }
        }
        next += 1;
    }
    let messages: Vec<&str> = found
        .loops
        .iter()
        .filter(|(one, _)| lists.iter().any(|list| accesses(&one.iter, list, None)))
        .filter_map(|(one, _)| variable(&one.target))
        .collect();
    let is_content = |expr: &Expr<'_>| messages.iter().any(|message| accesses(expr, message, Some("content")));

    // Parameters of macros that are given a message's content.
    let mut given: Vec<BTreeSet<&str>> = vec![BTreeSet::new(); found.macros.len()];
    for (declared, given) in found.macros.iter().zip(&mut given) {
        let names: Vec<&str> = declared.args.iter().filter_map(variable).collect();
        for call in found.calls.iter().filter(|call| variable(&call.expr) == Some(declared.name)) {
            let mut place = 0;
            for arg in &call.args {
                match arg {
                    CallArg::Pos(value) => {
                        if let Some(name) = names.get(place).filter(|_| is_content(value)) {
                            given.insert(name);
                        }
                        place += 1;
                    }
                    CallArg::Kwarg(name, value) if names.contains(name) && is_content(value) => {
                        given.insert(name);
                    }
                    _ => {}
                }
            }
        }
    }
    found.loops.iter().any(|(one, inside)| {
        let over = variable(&one.iter);
        is_content(&one.iter)
            || match inside {
                Some(place) => over.is_some_and(|over| given[*place].contains(over)),
                None => over == Some("content"),
            }
    })
}

/// What the template uses that [`crate::template`] does not have, in words; `None` when nothing is known to miss.
pub fn missing(source: &str, environment: &Environment<'_>) -> Option<String> {
    let tree = parse(source, "chat", SyntaxConfig::default()).ok()?;
    let mut found = Found::default();
    found.stmt(&tree);
    let mut state = environment.empty_state();
    for name in &found.filters {
        if state.apply_filter(name, &[]).is_err_and(|e| e.kind() == ErrorKind::UnknownFilter) {
            return Some(format!("the chat template uses the filter {name:?}, which is not known here"));
        }
    }
    for name in &found.tests {
        if state.perform_test(name, &[]).is_err_and(|e| e.kind() == ErrorKind::UnknownTest) {
            return Some(format!("the chat template uses the test {name:?}, which is not known here"));
        }
    }
    found.calls.iter().find_map(|call| match &call.expr {
        Expr::GetAttr(x) if !METHODS.contains(&x.name) => {
            Some(format!("the chat template calls the method {:?}, which is not known here", x.name))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected values: vllm.renderers.hf._detect_content_format(template, default="string"), vLLM 0.32.0.
    #[test]
    fn content_formats_as_vllm_finds_them() {
        for (openai, source) in [
            (false, "{% for m in messages %}{{ m.content }}{% endfor %}"),
            (true, "{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}"),
            (true, "{% for m in messages %}{% for c in m.content | list %}{{ c }}{% endfor %}{% endfor %}"),
            (true, "{% set x = messages[1:] %}{% for m in x %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"),
            (
                true,
                "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
            ),
            (
                false,
                "{% macro f(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.role) }}{% endfor %}",
            ),
            (
                true,
                "{% macro f(b) %}{% for c in b %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
            ),
            (
                true,
                "{% macro f(a, b) %}{% for c in b %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(1, b=m.content) }}{% endfor %}",
            ),
            (false, "{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}"),
        ] {
            assert_eq!(content_format(source) == ContentFormat::Openai, openai, "{source}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let environment = Environment::new();
        let missing = |source| missing(source, &environment).unwrap_or_default();
        assert_eq!(missing("{{ x | upper }}{{ y is defined }}{{ z.strip() }}"), "");
        assert!(missing("{% if no %}{{ x | wordcount }}{% endif %}").contains("wordcount"));
        assert!(missing("{{ x is strange }}").contains("strange"));
        assert!(missing("{{ x.zfill(3) }}").contains("zfill"));
    }
}
