//! What happened to a stock engine's events, by reason: a silent miss is the fault that this exists to exclude.

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident),* $(,)?) => {
        /// What happened, by reason. Counted in blocks where not said otherwise.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl Counters {
            /// Name and count of each, for metrics.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Copies stored under a name.
    stored,
    /// Copies removed.
    removed,
    /// Events that emptied the cache.
    cleared,
    /// Removals of blocks that are not known: announced before this stream was followed, or counted once too few.
    unknown_removed,
    /// Blocks parked because their parent is not known.
    parked,
    /// Parked blocks that were named when their parent was.
    unparked,
    /// Blocks without a name: adapter told by number only.
    unnamed_adapter,
    /// Blocks without a name: keys that leave a doubt.
    unnamed_keys,
    /// Blocks without a name: another engine hash has the same tokens, so something is hidden in this one.
    hidden,
    /// Blocks without a name because what they follow has none.
    unnamed_parent,
    /// Blocks announced again that were not counted as copies.
    repeated,
    /// Events: the tokens do not fit the hashes, so positions are unknown; with no hash, size 0 or no tokens.
    unplaced,
    /// Events: of another size than the group's blocks.
    other_size,
    /// Events: of groups that do not feed the set.
    other_group,
    /// Events: of groups whose kind is not told.
    unknown_group,
    /// Copies stored below the GPU: in host memory or storage.
    lower_stored,
    /// Copies removed there.
    lower_removed,
    /// Copies there that are not believed in any more, since removals are never announced.
    expired,
    /// Blocks announced below the GPU by their hash alone, which is not known.
    unresolved,
    /// Events: on another machine.
    other_machine,
    /// Events: in a medium that is not known.
    unknown_medium,
    /// Events: a hash twice in one event, or one that follows itself.
    circular,
    /// Events: a known hash with other tokens or another parent.
    contradicted,
    /// Events: keys that do not fit the hashes or cannot be read.
    bad_keys,
    /// Blocks refused at [`Limits::blocks`](super::engine::Limits::blocks), and parked blocks left without a name at [`Limits::parked_tokens`](super::engine::Limits::parked_tokens).
    over_limit,
    /// Events of an unknown type.
    unknown_event,
    /// Events that could not be read.
    unreadable_event,
}
