//! What is said to the engines: chats with long system prompts, and documents that are asked about again and again.
//!
//! The words mean nothing; lengths, and which prompts begin alike, are what matters. Everything follows from numbers,
//! so two runs say the same.

use crate::seeded::Seeded;

/// Words of one to three tokens each in the demo's vocabulary.
const WORDS: [&str; 40] = [
    "the", "order", "of", "a", "customer", "is", "shipped", "when", "payment", "has", "arrived", "and", "every",
    "item", "in", "stock", "was", "packed", "for", "delivery", "to", "that", "address", "with", "return", "value",
    "method", "object", "name", "call", "import", "module", "class", "function", "string", "number", "list", "garden",
    "spade", "clay",
];

/// `count` words that begin with what only this `seed` has.
pub fn words(seed: u64, count: usize) -> String {
    let mut dice = Seeded::new(seed);
    let mut text = format!("Text {seed}:");
    for _ in 0..count {
        text.push(' ');
        text.push_str(WORDS[dice.below(WORDS.len())]);
    }
    text.push('.');
    text
}

/// Who spoke a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// The person.
    User,
    /// The engine.
    Assistant,
}

impl Role {
    /// As the API writes it.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One conversation so far.
#[derive(Debug, Clone)]
pub struct Chat {
    /// What was said, in order.
    pub messages: Vec<(Role, String)>,
    /// `name.rank` of the engine that served the last turn.
    pub holder: Option<String>,
    seed: u64,
    turns: u64,
}

impl Chat {
    /// A conversation under a system prompt of about 300 tokens. Chats of one `system` begin alike, those of one
    /// `seed` are equal.
    pub fn new(system: u64, seed: u64) -> Chat {
        Chat { messages: vec![(Role::System, words(system, 220))], holder: None, seed, turns: 0 }
    }

    /// The person says something of about 50 tokens: more than a block, so that every turn adds one.
    pub fn ask(&mut self) {
        self.turns += 1;
        self.messages.push((Role::User, words(self.seed.wrapping_mul(1000) + self.turns, 36)));
    }

    /// The engine answered.
    pub fn hear(&mut self, text: String, engine: Option<String>) {
        self.messages.push((Role::Assistant, text));
        self.holder = engine;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_say_the_same_and_two_seeds_do_not() {
        assert_eq!(words(7, 50), words(7, 50));
        assert_ne!(words(7, 50), words(8, 50));
    }

    #[test]
    fn chats_of_one_system_begin_alike() {
        let (mut one, mut other) = (Chat::new(1, 10), Chat::new(1, 11));
        one.ask();
        other.ask();
        assert_eq!(one.messages[0], other.messages[0]);
        assert_ne!(one.messages[1], other.messages[1]);
    }
}
