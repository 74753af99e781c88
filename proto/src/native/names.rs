//! From what an event says of a block to what our fingerprint is hashed from, or the reason why there is none.
//!
//! A block whose inputs are not known for certain gets no name: it is counted, and neither it nor what follows it is
//! ever credited. A guessed name could match another prompt.

use super::dialect::{Adapter, Key};
use crate::block::{self, Extra, Fingerprint, Namespace};
use crate::residency::Link;

/// Why a block gets no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nameless {
    /// The adapter is told by number only.
    Adapter,
    /// Its keys beyond tokens cannot be turned into a salt and multimodal items for certain.
    Keys,
}

/// What a block holds beyond its tokens, taken apart.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Beyond<'a> {
    /// The request's salt, "" for none. Only the first block of a prompt has one.
    pub salt: &'a str,
    /// Multimodal items.
    pub items: Vec<Extra<'a>>,
}

/// Takes the keys of one block apart. `first`: the block starts its prompt.
///
/// The engine's order is adapter, items, salt, prompt embeddings. A bare text that is not the adapter's name is the
/// salt when it is the only one, the last key, and in a first block; vLLM 0.17 and 0.18 also write bare multimodal
/// identifiers, without the offset that our fingerprint needs, so any other bare text leaves the block nameless.
///
/// # Errors
/// When the keys leave a doubt.
pub fn beyond<'a>(keys: &'a [Key], adapter: &Adapter, first: bool) -> Result<Beyond<'a>, Nameless> {
    let mut out = Beyond::default();
    for (at, key) in keys.iter().enumerate() {
        match (key, adapter) {
            (Key::Text(text) | Key::Adapter(text), Adapter::Named(name)) if at == 0 && text == name => {}
            (Key::Item(identifier, offset), _) => out.items.push(Extra { identifier, offset: *offset }),
            (Key::Text(salt) | Key::Salt(salt), _) if first && at + 1 == keys.len() => out.salt = salt,
            _ => return Err(Nameless::Keys),
        }
    }
    Ok(out)
}

/// The fingerprint of the first block of a prompt, and the root that it follows.
///
/// # Errors
/// When the adapter or the keys leave a doubt.
pub fn first(
    model: &str,
    seed: u64,
    adapter: &Adapter,
    tokens: &[u32],
    keys: &[Key],
) -> Result<(Link, Fingerprint), Nameless> {
    let name = match adapter {
        Adapter::None => "",
        Adapter::Named(name) => name,
        Adapter::Unnamed => return Err(Nameless::Adapter),
    };
    let beyond = beyond(keys, adapter, true)?;
    let root = block::root(Namespace { model, adapter: name, salt: beyond.salt }, seed);
    Ok((Link::Root(root), block::next(root, tokens, &beyond.items)))
}

/// The fingerprint of a block that follows `parent`. The namespace is in the parent's fingerprint already.
///
/// # Errors
/// When the keys leave a doubt.
pub fn later(parent: Fingerprint, adapter: &Adapter, tokens: &[u32], keys: &[Key]) -> Result<Fingerprint, Nameless> {
    Ok(block::next(parent, tokens, &beyond(keys, adapter, false)?.items))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Key {
        Key::Text(text.to_owned())
    }

    #[test]
    fn keys_are_taken_apart_in_the_engines_order() {
        let adapter = Adapter::Named("ad".to_owned());
        let item = Key::Item("img".to_owned(), -3);
        let keys = [text("ad"), item.clone(), text("salt")];
        let want = Beyond { salt: "salt", items: vec![Extra { identifier: "img", offset: -3 }] };
        assert_eq!(beyond(&keys, &adapter, true), Ok(want));
        // The adapter's name is no salt, and a salt that equals it is.
        assert_eq!(beyond(&[text("ad")], &adapter, true).map(|b| b.salt.len()), Ok(0));
        assert_eq!(beyond(&[text("ad"), text("ad")], &adapter, true).map(|b| b.salt), Ok("ad"));
        assert_eq!(
            beyond(&[Key::Adapter("ad".to_owned()), Key::Salt("s".to_owned())], &adapter, true).map(|b| b.salt),
            Ok("s")
        );
    }

    #[test]
    fn what_leaves_a_doubt_is_nameless() {
        let none = Adapter::None;
        let nameless = |keys: &[Key], first| assert_eq!(beyond(keys, &none, first), Err(Nameless::Keys), "{keys:?}");
        nameless(&[text("img")], false);
        nameless(&[text("img"), text("salt")], true);
        nameless(&[text("salt"), Key::Item("img".to_owned(), 0)], true);
        nameless(&[Key::Opaque], true);
        nameless(&[Key::Adapter("ad".to_owned())], true);
        nameless(&[Key::Salt("s".to_owned())], false);
        assert_eq!(first("m", 1, &Adapter::Unnamed, &[1], &[]), Err(Nameless::Adapter));
    }

    #[test]
    fn names_are_those_that_the_picker_computes() {
        let root = block::root(Namespace { model: "m", adapter: "ad", salt: "s" }, 9);
        let want = block::chain(root, 2, &[1, 2, 3, 4]);
        let adapter = Adapter::Named("ad".to_owned());
        let (link, one) = first("m", 9, &adapter, &[1, 2], &[text("ad"), text("s")]).expect("no doubt");
        let two = later(one, &adapter, &[3, 4], &[text("ad")]).expect("no doubt");
        assert_eq!((link, vec![one, two]), (Link::Root(root), want));
    }
}
