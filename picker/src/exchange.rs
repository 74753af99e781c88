//! One ext_proc stream, that is one HTTP request, as a state machine. No wire types, no waiting.
//!
//! [`Exchange::take`] is given each message of Envoy and says what to do: wait, send replies, decide, or fail the
//! stream. After [`Step::Decide`] the caller works out a verdict and hands it to [`Exchange::decided`].
//!
//! What Envoy does in each body mode, and what follows from it:
//! * *full duplex*: the body comes without waiting; the headers' reply is held until the body's end, then goes out
//!   first, then the body again in pieces, `end_of_stream` once, nothing after it. With trailers no piece has
//!   `end_of_stream` and the trailers' reply is the end.
//! * *buffered*: the headers are answered at once, empty; headers and choice go out in the reply to the body.
//! * all others: the body cannot decide (it comes later, or never), so the headers do.
//!
//! A stream that ends with OK before its answer makes Envoy send the request on with an *empty* body; so every way out
//! of here is a whole answer, an immediate response, or [`Step::Fail`].

use crate::refusal::Refusal;
use crate::subset::Subset;
use bytes::{Bytes, BytesMut};

/// The header, and the metadata key in namespace `envoy.lb`, that names the engine.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The metadata key of the subset hint; as a header of a client it is dropped.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// Which data-parallel rank of an engine is meant.
pub const RANK: &str = "x-data-parallel-rank";
/// The request's id: upstream it is the picker's own.
pub const REQUEST_ID: &str = "x-request-id";
/// Where the client's own id goes upstream.
pub const CLIENT_REQUEST_ID: &str = "x-client-request-id";
/// What a client may say about its own importance or destination, in the names of all gateways: dropped.
pub const CONTROL: [&str; 12] = [
    SUBSET,
    "x-gateway-destination-endpoint-served",
    "x-gateway-inference-objective",
    "x-gateway-inference-fairness-id",
    "x-gateway-model-name-rewrite",
    "x-llm-d-inference-objective",
    "x-llm-d-inference-fairness-id",
    "x-llm-d-model-name-rewrite",
    "x-llm-d-slo-ttft-ms",
    "x-llm-d-slo-tpot-ms",
    "x-slo-ttft-ms",
    "x-slo-tpot-ms",
];
/// Largest piece of a body sent back: below the 64 KiB that proxies take in one gRPC message, with room for framing.
pub const PIECE_BYTES: usize = 62_000;
/// Longest request id of a client that is kept, in bytes; longer ones are forgotten.
pub const MAX_CLIENT_ID_BYTES: usize = 256;

/// How Envoy sends a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BodyMode {
    /// `FULL_DUPLEX_STREAMED`. Taken where Envoy does not say.
    #[default]
    Duplex,
    /// `BUFFERED`.
    Buffered,
    /// Any other: nothing can be decided by the body.
    Blind,
}

/// A header, its name in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Name.
    pub name: String,
    /// Value.
    pub value: Bytes,
}

/// A message from Envoy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The request's headers, always first.
    RequestHeaders {
        /// The headers, with `:path` and `:method`.
        headers: Vec<Header>,
        /// No body follows.
        end_of_stream: bool,
        /// Mode of the request's body.
        request_mode: BodyMode,
        /// Mode of the response's body.
        response_mode: BodyMode,
        /// Where the gateway allows it to go.
        subset: Option<Subset>,
    },
    /// A piece of the request's body, or all of it.
    RequestBody {
        /// The bytes.
        bytes: Bytes,
        /// The last one.
        end_of_stream: bool,
    },
    /// The request's trailers: its end.
    RequestTrailers,
    /// The response's headers.
    ResponseHeaders,
    /// A piece of the response's body.
    ResponseBody {
        /// The bytes.
        bytes: Bytes,
        /// The last one.
        end_of_stream: bool,
    },
    /// The response's trailers.
    ResponseTrailers,
}

/// A message to Envoy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// To the request's headers; with the choice, unless that comes later.
    RequestHeaders(Option<Choice>),
    /// To the whole body, unchanged; with the choice in buffered mode.
    RequestBody(Option<Choice>),
    /// The request's body, in full duplex.
    RequestPiece {
        /// The bytes.
        bytes: Bytes,
        /// The last one.
        end_of_stream: bool,
    },
    /// To the request's trailers.
    RequestTrailers,
    /// To the response's headers.
    ResponseHeaders,
    /// To a piece of the response's body, unchanged.
    ResponseBody,
    /// The response's body, in full duplex.
    ResponsePiece {
        /// The bytes.
        bytes: Bytes,
        /// The last one.
        end_of_stream: bool,
    },
    /// To the response's trailers.
    ResponseTrailers,
    /// Instead of anything else: the client is answered at once.
    Immediate(Refusal),
}

/// Where a request goes and what changes of its headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// `ip:port`, for the metadata; the header of the same value is in `set`.
    pub destination: String,
    /// Headers set, replacing what was there.
    pub set: Vec<(&'static str, String)>,
    /// Headers removed.
    pub remove: Vec<&'static str>,
}

/// What is known when it is time to decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// `:path`.
    pub path: String,
    /// All headers as they came, for scorers.
    pub headers: Vec<Header>,
    /// The client's own request id.
    pub client_id: Option<String>,
    /// The whole body; `None` when there is none, or none that could be waited for.
    pub body: Option<Bytes>,
    /// Where it may go.
    pub subset: Option<Subset>,
}

/// What was decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It goes to an engine.
    Go {
        /// `ip:port`.
        destination: String,
        /// The data-parallel rank to ask for, where an address has several.
        rank: Option<u32>,
        /// The request's id from here on: a UUID v4 of the picker.
        request_id: String,
    },
    /// It goes nowhere.
    Refuse(Refusal),
}

/// What to do after a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing yet.
    Wait,
    /// Send these.
    Send(Vec<Reply>),
    /// Decide, and tell [`Exchange::decided`].
    Decide(Box<Ask>),
    /// End the stream with an error status of this text.
    Fail(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nothing has come.
    Start,
    /// The body is being collected.
    Body,
    /// A verdict is awaited; what is owed once it is there.
    Deciding(Owed),
    /// The request was answered whole: only the response, if anything, follows.
    Answered,
    /// An immediate response was sent: nothing more is said.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owed {
    /// A reply to the headers and nothing else.
    Headers,
    /// Headers, then the body in pieces; trailers too when they ended it.
    Pieces { trailers: bool },
    /// A reply to the buffered body.
    Body,
}

/// The state of one stream.
#[derive(Debug)]
pub struct Exchange {
    phase: Phase,
    request_mode: BodyMode,
    response_mode: BodyMode,
    body_limit: usize,
    pieces: Vec<Bytes>,
    collected: usize,
    body: Bytes,
    ask: Option<Box<Ask>>,
    client_id: Option<String>,
}

impl Exchange {
    /// A stream that has just begun. Bodies longer than `body_limit` bytes are answered 413.
    pub fn new(body_limit: usize) -> Exchange {
        Exchange {
            phase: Phase::Start,
            request_mode: BodyMode::Duplex,
            response_mode: BodyMode::Duplex,
            body_limit,
            pieces: Vec::new(),
            collected: 0,
            body: Bytes::new(),
            ask: None,
            client_id: None,
        }
    }

    /// Whether the stream may end here: nothing was asked yet, or all was answered.
    pub fn complete(&self) -> bool {
        matches!(self.phase, Phase::Start | Phase::Answered | Phase::Closed)
    }

    /// Bytes of body held.
    pub fn held_bytes(&self) -> usize {
        self.collected
    }

    /// Takes one message.
    pub fn take(&mut self, part: Part) -> Step {
        match part {
            _ if self.phase == Phase::Closed => Step::Wait,
            Part::RequestHeaders { headers, end_of_stream, request_mode, response_mode, subset } => {
                if self.phase != Phase::Start {
                    return Step::Fail("the request's headers came twice");
                }
                self.request_mode = request_mode;
                self.response_mode = response_mode;
                self.headers(headers, end_of_stream, subset)
            }
            _ if self.phase == Phase::Start && !self.is_response(&part) => {
                Step::Fail("the first message has no request headers; set request_header_mode to SEND")
            }
            Part::RequestBody { bytes, end_of_stream } => self.request_body(bytes, end_of_stream),
            Part::RequestTrailers => match self.phase {
                Phase::Body if self.request_mode == BodyMode::Duplex => self.decide(Owed::Pieces { trailers: true }),
                Phase::Body => Step::Send(vec![Reply::RequestTrailers]),
                // In the modes that are answered at their headers, and after a buffered body.
                Phase::Answered if self.request_mode != BodyMode::Duplex => Step::Send(vec![Reply::RequestTrailers]),
                _ => Step::Wait,
            },
            Part::ResponseHeaders => Step::Send(vec![Reply::ResponseHeaders]),
            Part::ResponseBody { bytes, end_of_stream } => Step::Send(match self.response_mode {
                BodyMode::Duplex => in_pieces(&bytes, end_of_stream)
                    .map(|(bytes, end_of_stream)| Reply::ResponsePiece { bytes, end_of_stream })
                    .collect(),
                _ => vec![Reply::ResponseBody],
            }),
            Part::ResponseTrailers => Step::Send(vec![Reply::ResponseTrailers]),
        }
    }

    fn is_response(&self, part: &Part) -> bool {
        matches!(part, Part::ResponseHeaders | Part::ResponseBody { .. } | Part::ResponseTrailers)
    }

    fn headers(&mut self, headers: Vec<Header>, end_of_stream: bool, subset: Option<Subset>) -> Step {
        let text = |name: &str| {
            let header = headers.iter().find(|h| h.name == name)?;
            std::str::from_utf8(&header.value).ok().map(str::to_owned)
        };
        let id = text(REQUEST_ID).or_else(|| text(CLIENT_REQUEST_ID));
        self.client_id = id.filter(|id| !id.is_empty() && id.len() <= MAX_CLIENT_ID_BYTES);
        let path = text(":path").unwrap_or_default();
        let announced = text("content-length").and_then(|length| length.parse::<usize>().ok());
        self.ask = Some(Box::new(Ask { path, headers, client_id: self.client_id.clone(), body: None, subset }));
        if end_of_stream || self.request_mode == BodyMode::Blind {
            return self.decide(Owed::Headers);
        }
        if announced.is_some_and(|length| length > self.body_limit) {
            return self.refuse(Refusal::too_large(self.body_limit));
        }
        self.phase = Phase::Body;
        match self.request_mode {
            BodyMode::Buffered => Step::Send(vec![Reply::RequestHeaders(None)]),
            _ => Step::Wait,
        }
    }

    fn request_body(&mut self, bytes: Bytes, end_of_stream: bool) -> Step {
        match self.phase {
            Phase::Body => {}
            // The modes that were answered at their headers and get pieces all the same.
            Phase::Answered if self.request_mode == BodyMode::Blind => {
                return Step::Send(vec![Reply::RequestBody(None)]);
            }
            // A second end of the body, as some proxies send for long ones.
            _ => return Step::Wait,
        }
        self.collected += bytes.len();
        if self.collected > self.body_limit {
            return self.refuse(Refusal::too_large(self.body_limit));
        }
        if !bytes.is_empty() {
            self.pieces.push(bytes);
        }
        match self.request_mode {
            // There is one message for the whole body, whatever it says of its end.
            BodyMode::Buffered => self.decide(Owed::Body),
            _ if end_of_stream => self.decide(Owed::Pieces { trailers: false }),
            _ => Step::Wait,
        }
    }

    fn decide(&mut self, owed: Owed) -> Step {
        let Some(mut ask) = self.ask.take() else { return Step::Fail("asked twice") };
        self.phase = Phase::Deciding(owed);
        self.body = match self.pieces.as_mut_slice() {
            [] => Bytes::new(),
            [one] => std::mem::take(one),
            many => {
                let mut whole = BytesMut::with_capacity(self.collected);
                many.iter().for_each(|piece| whole.extend_from_slice(piece));
                whole.freeze()
            }
        };
        self.pieces = Vec::new();
        ask.body = (owed != Owed::Headers).then(|| self.body.clone());
        Step::Decide(ask)
    }

    fn refuse(&mut self, refusal: Refusal) -> Step {
        self.phase = Phase::Closed;
        self.pieces = Vec::new();
        self.body = Bytes::new();
        self.collected = 0;
        Step::Send(vec![Reply::Immediate(refusal)])
    }

    /// Ends the stream with an immediate response, whatever was going on: for a picker that is full or stopping.
    /// `None` when the request was already answered.
    pub fn abandon(&mut self, refusal: Refusal) -> Option<Reply> {
        if matches!(self.phase, Phase::Answered | Phase::Closed) {
            return None;
        }
        match self.refuse(refusal) {
            Step::Send(mut replies) => replies.pop(),
            _ => None,
        }
    }

    /// The replies that a verdict becomes, in the order in which they must be sent.
    pub fn decided(&mut self, verdict: Verdict) -> Vec<Reply> {
        let Phase::Deciding(owed) = self.phase else { return Vec::new() };
        let choice = match verdict {
            Verdict::Refuse(refusal) => match self.refuse(refusal) {
                Step::Send(replies) => return replies,
                _ => return Vec::new(),
            },
            Verdict::Go { destination, rank, request_id } => self.choice(destination, rank, request_id),
        };
        self.phase = Phase::Answered;
        self.collected = 0;
        let body = std::mem::take(&mut self.body);
        match owed {
            Owed::Headers => vec![Reply::RequestHeaders(Some(choice))],
            Owed::Body => vec![Reply::RequestBody(Some(choice))],
            Owed::Pieces { trailers } => {
                let mut replies = vec![Reply::RequestHeaders(Some(choice))];
                if !(trailers && body.is_empty()) {
                    let pieces = in_pieces(&body, !trailers);
                    replies.extend(pieces.map(|(bytes, end_of_stream)| Reply::RequestPiece { bytes, end_of_stream }));
                }
                if trailers {
                    replies.push(Reply::RequestTrailers);
                }
                replies
            }
        }
    }

    fn choice(&self, destination: String, rank: Option<u32>, request_id: String) -> Choice {
        let mut set = vec![(DESTINATION, destination.clone()), (REQUEST_ID, request_id)];
        let mut remove = CONTROL.to_vec();
        match rank {
            Some(rank) => set.push((RANK, rank.to_string())),
            None => remove.push(RANK),
        }
        if let Some(id) = &self.client_id {
            set.push((CLIENT_REQUEST_ID, id.clone()));
        }
        Choice { destination, set, remove }
    }
}

/// A body in pieces that proxies take, the last marked `end`; an empty one is one empty piece.
fn in_pieces(body: &Bytes, end: bool) -> impl Iterator<Item = (Bytes, bool)> {
    let count = body.len().div_ceil(PIECE_BYTES).max(1);
    (0..count).map(move |i| {
        let piece = body.slice(i * PIECE_BYTES..body.len().min((i + 1) * PIECE_BYTES));
        (piece, end && i + 1 == count)
    })
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
