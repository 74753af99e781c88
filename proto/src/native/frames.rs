//! The frames of a stock engine's messages, live and replayed.
//!
//! Live: `[topic, seq, payload]`. Replayed, after the delimiter of a DEALER socket: `[seq, payload]` (vLLM up to 0.25)
//! or `[topic, seq, payload]` (from 0.26). A replay ends with a seq of eight 0xFF bytes and an empty payload. In every
//! layout the seq is the last frame but one and the payload the last, so nothing else is looked at.

/// Most frames in a message: delimiter, topic, seq, payload, with room for what a proxy puts before them.
pub const MAX_FRAMES: usize = 8;

/// One message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// A batch of events.
    Batch {
        /// Number of the batch in the engine's life, from 0. A lower one than before is another life.
        seq: u64,
        /// What [`EventBatch::decode`](super::dialect::EventBatch::decode) reads.
        payload: &'a [u8],
    },
    /// The replay is complete. A replay without it was cut short.
    End,
}

/// Why frames are no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadFrames {
    /// Fewer than two, or more than [`MAX_FRAMES`].
    #[error("a message of {0} frames; expected [topic, seq, payload]: is another kind of publisher on this socket?")]
    Count(usize),
    /// The last frame but one is no seq.
    #[error("the frame before the payload has {0} bytes, a seq has 8: is another kind of publisher on this socket?")]
    Seq(usize),
    /// The seq that marks the end of a replay came with a payload.
    #[error("the end marker of a replay came with a payload of {0} bytes")]
    End(usize),
}

/// Reads the frames of one message.
///
/// # Errors
/// When they are not of any layout above; count it for this engine and go on.
pub fn read<F: AsRef<[u8]>>(frames: &[F]) -> Result<Message<'_>, BadFrames> {
    let (payload, seq) = match frames {
        [.., seq, payload] if frames.len() <= MAX_FRAMES => (payload.as_ref(), seq.as_ref()),
        _ => return Err(BadFrames::Count(frames.len())),
    };
    let seq = crate::event::read_seq(seq).ok_or(BadFrames::Seq(seq.len()))?;
    match (seq, payload.len()) {
        (u64::MAX, 0) => Ok(Message::End),
        (u64::MAX, bytes) => Err(BadFrames::End(bytes)),
        _ => Ok(Message::Batch { seq, payload }),
    }
}

/// What is sent to a replay socket after the empty delimiter: `from` and everything after it.
pub fn replay_request(from: u64) -> [u8; 8] {
    from.to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: &[u8] = b"";
    const TOPIC: &[u8] = b"kv-events";
    const SEQ: &[u8] = &[0, 0, 0, 0, 0, 0, 1, 2];
    const END: &[u8] = &[0xff; 8];

    #[test]
    fn every_layout() {
        let batch = Ok(Message::Batch { seq: 258, payload: b"p" });
        assert_eq!(read(&[TOPIC, SEQ, b"p"]), batch);
        assert_eq!(read(&[SEQ, b"p"]), batch);
        assert_eq!(read(&[NONE, SEQ, b"p"]), batch);
        assert_eq!(read(&[NONE, TOPIC, SEQ, b"p"]), batch);
        assert_eq!(read(&[NONE, END, NONE]), Ok(Message::End));
        assert_eq!(read(&[NONE, NONE, END, NONE]), Ok(Message::End));
    }

    #[test]
    fn other_publishers_are_told_apart() {
        assert_eq!(read::<&[u8]>(&[]), Err(BadFrames::Count(0)));
        assert_eq!(read(&[b"p"]), Err(BadFrames::Count(1)));
        assert_eq!(read(&[b""; 9]), Err(BadFrames::Count(9)));
        assert_eq!(read(&[TOPIC, b"p"]), Err(BadFrames::Seq(9)));
        assert_eq!(read(&[END, b"p"]), Err(BadFrames::End(1)));
    }
}
