//! Envoy's side of ext_proc, message by message, for tests that need what a real Envoy does rarely or never.

use anyhow::{Context, Result, bail, ensure};
use picker::edge::wire::{NAMESPACE, REASON, SUBSET_NAMESPACE};
use picker::exchange::{DESTINATION, SUBSET};
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};
use proto::wire::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use proto::wire::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use proto::wire::envoy::service::ext_proc::v3 as ext;
use proto::wire::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

/// Longest wait for one message of the picker. Not a goal: a test that waits so long has failed.
const LIMIT: Duration = Duration::from_secs(30);

/// How the subset hint is written.
#[derive(Debug, Clone)]
pub enum Hint {
    /// A list of strings.
    List(Vec<&'static str>),
    /// One string.
    Text(&'static str),
}

/// The request's headers, as Envoy sends them first.
pub fn headers(
    list: &[(&str, &str)],
    end_of_stream: bool,
    mode: BodySendMode,
    hint: Option<Hint>,
) -> ext::ProcessingRequest {
    let values = list.iter().map(|(key, value)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..Default::default()
    });
    let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
    let hint = hint.map(|hint| match hint {
        Hint::Text(one) => text(one),
        Hint::List(many) => {
            Value { kind: Some(Kind::ListValue(ListValue { values: many.into_iter().map(text).collect() })) }
        }
    });
    let metadata = hint.map(|hint| Metadata {
        filter_metadata: HashMap::from([(
            SUBSET_NAMESPACE.to_owned(),
            Struct { fields: BTreeMap::from([(SUBSET.to_owned(), hint)]) },
        )]),
        ..Default::default()
    });
    ext::ProcessingRequest {
        request: Some(ext::processing_request::Request::RequestHeaders(ext::HttpHeaders {
            headers: Some(HeaderMap { headers: values.collect() }),
            end_of_stream,
            ..Default::default()
        })),
        metadata_context: metadata,
        protocol_config: Some(ext::ProtocolConfiguration { request_body_mode: mode as i32, ..Default::default() }),
        ..Default::default()
    }
}

/// The headers of a POST.
pub fn post(path: &str, id: &str) -> ext::ProcessingRequest {
    let list = [(":method", "POST"), (":path", path), ("x-request-id", id)];
    headers(&list, false, BodySendMode::FullDuplexStreamed, None)
}

/// A piece of the request's body.
pub fn body(bytes: &[u8], end_of_stream: bool) -> ext::ProcessingRequest {
    let body = ext::HttpBody { body: bytes.to_vec(), end_of_stream, ..Default::default() };
    ext::ProcessingRequest { request: Some(ext::processing_request::Request::RequestBody(body)), ..Default::default() }
}

/// The request's trailers.
pub fn trailers() -> ext::ProcessingRequest {
    ext::ProcessingRequest {
        request: Some(ext::processing_request::Request::RequestTrailers(ext::HttpTrailers::default())),
        ..Default::default()
    }
}

/// What an immediate response says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Immediate {
    /// HTTP status.
    pub status: i32,
    /// `x-kvatlas-reason`.
    pub reason: String,
    /// `error.code` of the JSON body.
    pub code: String,
}

/// Everything that the picker said of one request, as Envoy would act on it.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// The destination by the header.
    pub header: Option<String>,
    /// The destination by the metadata.
    pub metadata: Option<String>,
    /// Headers set.
    pub set: BTreeMap<String, String>,
    /// Headers removed.
    pub removed: Vec<String>,
    /// The body that goes upstream, in full duplex.
    pub body: Vec<u8>,
    /// Sizes of its pieces.
    pub pieces: Vec<usize>,
    /// Whether its end was said.
    pub ended: bool,
    /// Whether the trailers were answered.
    pub trailers: bool,
    /// Replies to buffered bodies.
    pub plain_bodies: usize,
    /// Replies to headers, in order: whether each had a choice.
    pub headers: Vec<bool>,
    /// The client's answer, when the picker gave it.
    pub immediate: Option<Immediate>,
}

impl Answer {
    /// The destination, when header and metadata are there and equal.
    ///
    /// # Errors
    /// When they are not.
    pub fn destination(&self) -> Result<&str> {
        let header = self.header.as_deref().with_context(|| format!("no destination header: {self:?}"))?;
        ensure!(self.metadata.as_deref() == Some(header), "header and metadata differ: {self:?}");
        Ok(header)
    }

    fn choice(&mut self, response: Option<ext::CommonResponse>, metadata: Option<Struct>) -> Result<bool> {
        let mutation = response.and_then(|common| common.header_mutation);
        let chosen = mutation.is_some();
        for option in mutation.iter().flat_map(|m| &m.set_headers) {
            let header = option.header.as_ref().context("a header without a header")?;
            self.set.insert(header.key.clone(), String::from_utf8(header.raw_value.clone())?);
        }
        self.removed.extend(mutation.into_iter().flat_map(|m| m.remove_headers));
        self.header = self.set.get(DESTINATION).cloned();
        if let Some(metadata) = metadata
            && let Some(Value { kind: Some(Kind::StructValue(inner)) }) = metadata.fields.get(NAMESPACE)
            && let Some(Value { kind: Some(Kind::StringValue(text)) }) = inner.fields.get(DESTINATION)
        {
            self.metadata = Some(text.clone());
        }
        Ok(chosen)
    }

    /// Takes one message; says whether the request is answered whole. What a real Envoy answers with 500 is an error.
    fn take(&mut self, message: ext::ProcessingResponse) -> Result<bool> {
        use ext::processing_response::Response;
        ensure!(self.immediate.is_none() && !self.ended, "a message after the end: {message:?}");
        match message.response.context("an empty message")? {
            Response::RequestHeaders(reply) => {
                let chosen = self.choice(reply.response, message.dynamic_metadata)?;
                self.headers.push(chosen);
                Ok(false)
            }
            Response::RequestBody(reply) => {
                let common = reply.response.context("a body reply without a response")?;
                match common.body_mutation.clone().and_then(|m| m.mutation) {
                    Some(ext::body_mutation::Mutation::StreamedResponse(piece)) => {
                        ensure!(!self.headers.is_empty(), "a body before the headers: Envoy answers 500");
                        self.pieces.push(piece.body.len());
                        self.body.extend(piece.body);
                        self.ended = piece.end_of_stream;
                        Ok(self.ended)
                    }
                    Some(other) => bail!("a body mutation that is not streamed: {other:?}"),
                    None => {
                        self.choice(Some(common), message.dynamic_metadata)?;
                        self.plain_bodies += 1;
                        Ok(true)
                    }
                }
            }
            Response::RequestTrailers(_) => {
                self.trailers = true;
                Ok(true)
            }
            Response::ImmediateResponse(reply) => {
                let headers = reply.headers.map(|h| h.set_headers).unwrap_or_default();
                let reason = headers.into_iter().filter_map(|h| h.header).find(|h| h.key == REASON);
                let body: serde_json::Value = serde_json::from_slice(&reply.body)?;
                self.immediate = Some(Immediate {
                    status: reply.status.context("no status")?.code,
                    reason: String::from_utf8(reason.context("no reason header")?.raw_value)?,
                    code: body["error"]["code"].as_str().context("no code")?.to_owned(),
                });
                Ok(true)
            }
            other => bail!("a reply to what was never sent: {other:?}"),
        }
    }
}

/// One stream.
pub struct Talk {
    sender: mpsc::Sender<ext::ProcessingRequest>,
    replies: Streaming<ext::ProcessingResponse>,
    /// What was said so far.
    pub answer: Answer,
}

/// A connection to a picker.
#[derive(Clone)]
pub struct FakeEnvoy {
    client: ExternalProcessorClient<Channel>,
}

impl FakeEnvoy {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens there.
    pub async fn connect(address: SocketAddr) -> Result<FakeEnvoy> {
        let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
        Ok(FakeEnvoy { client: ExternalProcessorClient::new(channel) })
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// When the picker refuses it.
    pub async fn open(&self) -> Result<Talk> {
        let (sender, messages) = mpsc::channel(1024);
        let replies = self.client.clone().process(ReceiverStream::new(messages)).await?.into_inner();
        Ok(Talk { sender, replies, answer: Answer::default() })
    }

    /// One request: everything is sent, then the answer is read to its end.
    ///
    /// # Errors
    /// When a reply is one that Envoy would answer with 500, or the stream ends early.
    pub async fn request(&self, messages: Vec<ext::ProcessingRequest>) -> Result<Answer> {
        let headers_only = messages.len() == 1;
        let mut talk = self.open().await?;
        for message in messages {
            talk.send(message).await?;
        }
        while !talk.step().await? {
            if headers_only {
                break;
            }
        }
        let answer = talk.answer.clone();
        talk.close().await?;
        Ok(answer)
    }

    /// A POST of a JSON body in one piece.
    ///
    /// # Errors
    /// As [`FakeEnvoy::request`].
    pub async fn json(&self, path: &str, id: &str, json: &serde_json::Value) -> Result<Answer> {
        self.request(vec![post(path, id), body(json.to_string().as_bytes(), true)]).await
    }
}

impl Talk {
    /// Sends one message.
    ///
    /// # Errors
    /// When the stream is gone.
    pub async fn send(&mut self, message: ext::ProcessingRequest) -> Result<()> {
        self.sender.send(message).await.context("the stream is gone")
    }

    /// Takes one reply; says whether the request is answered whole.
    ///
    /// # Errors
    /// When the stream ends, or the reply is one that Envoy would answer with 500.
    pub async fn step(&mut self) -> Result<bool> {
        let message = tokio::time::timeout(LIMIT, self.replies.message()).await.context("no reply")??;
        self.answer.take(message.context("the stream ended before the answer: Envoy would send an empty body")?)
    }

    /// How the stream ends, when nothing more is sent: with OK, or with a status.
    ///
    /// # Errors
    /// When there is another reply, or no end.
    pub async fn close(self) -> Result<Option<tonic::Status>> {
        drop(self.sender);
        let mut replies = self.replies;
        match tokio::time::timeout(LIMIT, replies.message()).await.context("no end")? {
            Ok(None) => Ok(None),
            Ok(Some(more)) => bail!("a reply after the whole answer: {more:?}"),
            Err(status) => Ok(Some(status)),
        }
    }
}
