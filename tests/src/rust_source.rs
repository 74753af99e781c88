//! Just enough of Rust's syntax to read a source tree's rules off it: code without comments and texts, module
//! declarations, and the paths that a file names.

/// A declaration `mod name;`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// The module's name.
    pub name: String,
    /// From `#[path = ".."]`.
    pub path: Option<String>,
    /// Behind `#[cfg(test)]`.
    pub test: bool,
}

/// `text` with the contents of comments, texts and characters replaced by spaces. Lines stay where they are.
pub fn code_of(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = end_of_opaque(&chars, at);
        if end == at {
            out.push(chars[at]);
            at += 1;
            continue;
        }
        out.extend(chars[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
        at = end;
    }
    out
}

/// Where the comment, text or character that starts at `at` ends; `at` when none starts there.
fn end_of_opaque(chars: &[char], at: usize) -> usize {
    let is = |at: usize, c: char| chars.get(at) == Some(&c);
    let in_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    match chars[at] {
        '/' if is(at + 1, '/') => chars[at..].iter().position(|c| *c == '\n').map_or(chars.len(), |n| at + n),
        '/' if is(at + 1, '*') => {
            let (mut depth, mut here) = (0, at);
            while here < chars.len() {
                if is(here, '/') && is(here + 1, '*') {
                    depth += 1;
                    here += 2;
                } else if is(here, '*') && is(here + 1, '/') {
                    depth -= 1;
                    here += 2;
                    if depth == 0 {
                        return here;
                    }
                } else {
                    here += 1;
                }
            }
            chars.len()
        }
        '"' => end_of_text(chars, at + 1),
        'b' | 'c' if is(at + 1, '"') && !in_word => end_of_text(chars, at + 2),
        'r' | 'b' | 'c' if !in_word => {
            let start = if is(at, 'r') { at + 1 } else { at + 2 };
            if !is(start - 1, 'r') {
                return at;
            }
            let hashes = chars[start..].iter().take_while(|c| **c == '#').count();
            if !is(start + hashes, '"') {
                return at;
            }
            let close = |here: &usize| is(*here, '"') && (1..=hashes).all(|n| is(here + n, '#'));
            (start + hashes + 1..chars.len()).find(close).map_or(chars.len(), |end| end + hashes + 1)
        }
        // 'x' and '\n' are characters, 'x without a second quote is a lifetime.
        '\'' if is(at + 1, '\\') => (at + 3..chars.len()).find(|n| is(*n, '\'')).map_or(chars.len(), |n| n + 1),
        '\'' if is(at + 2, '\'') => at + 3,
        _ => at,
    }
}

fn end_of_text(chars: &[char], mut at: usize) -> usize {
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// `code` (of [`code_of`]) without what stands behind `#[cfg(test)]`: a block, or a declaration up to its semicolon.
pub fn without_tests(code: &str) -> String {
    let mut out = code.to_owned();
    while let Some(start) = out.find("#[cfg(test)]") {
        let mut depth = 0usize;
        let mut end = out.len();
        for (at, c) in out[start..].char_indices() {
            match c {
                '{' => depth += 1,
                '}' => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        end = start + at + 1;
                        break;
                    }
                }
                ';' if depth == 0 => {
                    end = start + at + 1;
                    break;
                }
                _ => {}
            }
        }
        let blank: String = out[start..end].chars().map(|c| if c == '\n' { '\n' } else { ' ' }).collect();
        out.replace_range(start..end, &blank);
    }
    out
}

/// The modules that a file declares in files of their own.
pub fn modules(text: &str) -> Vec<Module> {
    let code = code_of(text);
    let mut out = vec![];
    let (mut path, mut test) = (None, false);
    for (line, raw) in code.lines().zip(text.lines()) {
        let line = line.trim();
        if line.starts_with("#[path") {
            path = raw.split('"').nth(1).map(str::to_owned);
        } else if line.starts_with("#[cfg(test)]") {
            test = true;
        } else if !line.is_empty() && !line.starts_with("#[") {
            let words: Vec<&str> =
                line.split_whitespace().filter(|word| *word != "pub" && !word.starts_with("pub(")).collect();
            if let ["mod", name] = words.as_slice()
                && let Some(name) = name.strip_suffix(';')
            {
                let name = name.trim_start_matches("r#").to_owned();
                out.push(Module { name, path: path.clone(), test });
            }
            (path, test) = (None, false);
        }
    }
    out
}

/// Every path that `code` (of [`code_of`]) names, `use` groups written out, with the number of its line.
pub fn paths(code: &str) -> Vec<(usize, String)> {
    let mut out = vec![];
    let mut line = 1;
    let bytes = code.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'\n' {
            line += 1;
        }
        if !is_word(bytes[at]) || (at > 0 && (is_word(bytes[at - 1]) || bytes[at - 1] == b':')) {
            at += 1;
            continue;
        }
        let (end, found) = path_at(code, at, "");
        out.extend(found.into_iter().map(|path| (line, path)));
        line += code[at..end].matches('\n').count();
        at = end;
    }
    out
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 128
}

/// Reads the path or the group of paths at `at`; gives where it ends and every path in it, behind `prefix`.
fn path_at(code: &str, mut at: usize, prefix: &str) -> (usize, Vec<String>) {
    let bytes = code.as_bytes();
    let mut path = prefix.to_owned();
    loop {
        let end = at + bytes[at..].iter().take_while(|b| is_word(**b)).count();
        path.push_str(&code[at..end]);
        at = end;
        if !code[at..].starts_with("::") {
            return (at, vec![path]);
        }
        at += 2;
        path.push_str("::");
        match bytes.get(at) {
            Some(b'{') => break,
            Some(byte) if is_word(*byte) => {}
            _ => return (at, vec![path.trim_end_matches(':').to_owned()]),
        }
    }
    at += 1;
    let mut all = vec![];
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'}' => return (at + 1, all),
            byte if is_word(*byte) => {
                let (end, found) = path_at(code, at, &path);
                all.extend(found);
                at = end;
                // `as name`
                let rest = code[at..].trim_start();
                if rest.starts_with("as ") {
                    at += code[at..].find([',', '}', '\n']).unwrap_or(code.len() - at);
                }
            }
            _ => at += 1,
        }
    }
    (at, all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_texts_are_no_code() {
        let text = "a // b\n/* c /* d */ e */ f \"g\\\" h\" r#\"i\"j\"# b\"k\" 'l' '\\'' &'m n br\"o\" for p";
        let words: Vec<String> = code_of(text).split_whitespace().map(str::to_owned).collect();
        assert_eq!(words, ["a", "f", "&'m", "n", "for", "p"]);
        assert_eq!(code_of("x\n\"y\nz\"\n").lines().count(), 3);
    }

    #[test]
    fn test_code_is_left_out() {
        let code = "fn a() { b }\n#[cfg(test)]\nmod c {\n fn d() { e }\n}\nf\n#[cfg(test)]\nmod g;\nh";
        let words: Vec<String> = without_tests(code).split_whitespace().map(str::to_owned).collect();
        assert_eq!(words, ["fn", "a()", "{", "b", "}", "f", "h"]);
    }

    #[test]
    fn declared_modules() {
        let text =
            "pub mod a;\nmod b { }\n#[cfg(test)]\n#[path = \"c_tests.rs\"]\nmod c;\npub(crate) mod r#gen; // mod d;\n";
        let module =
            |name: &str, path: Option<&str>, test| Module { name: name.into(), path: path.map(Into::into), test };
        assert_eq!(
            modules(text),
            [module("a", None, false), module("c", Some("c_tests.rs"), true), module("gen", None, false)]
        );
    }

    #[test]
    fn groups_are_written_out() {
        let code = "use std::{\n net::{SocketAddr, TcpStream as T},\n time::Duration};\nfn f() { tokio::spawn(g::<u8>()); x.y }";
        let paths: Vec<(usize, String)> = paths(code).into_iter().filter(|(_, p)| p.contains("::")).collect();
        let want =
            [(1, "std::net::SocketAddr"), (1, "std::net::TcpStream"), (1, "std::time::Duration"), (4, "tokio::spawn")];
        assert_eq!(paths, want.map(|(line, path)| (line, path.to_owned())));
    }
}
