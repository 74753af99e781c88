//! Envoy's side: one gRPC stream for each HTTP request.

use super::router::{Placed, Router};
use super::wire;
use crate::exchange::{Exchange, Part, Reply, Step};
use crate::refusal::Refusal;
use proto::wire::envoy::service::ext_proc::v3 as ext;
use proto::wire::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// Replies that wait for one slow stream: with pieces of 62,000 bytes, 1 MB. The decision is made by then, so waiting
/// costs nobody else.
const REPLIES: usize = 16;
/// Streams on one connection. Envoy opens one for each request and keeps it as long as the answer takes.
const MAX_STREAMS: u32 = 1 << 16;
/// What one stream and one connection may send ahead: bodies of 1 MiB come without waiting for us.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// A connection whose other side is gone is noticed within this and a bit.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// An unanswered request that sends nothing for so long is failed: above Envoy's own five minutes.
const IDLE: Duration = Duration::from_secs(330);
/// Above the longest body, for headers and framing.
const MESSAGE_ROOM: usize = 1 << 20;

/// How far a stop has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stopping {
    /// Not at all.
    No,
    /// No new streams; those that are answered end, the others may finish.
    Draining,
    /// Whatever is not answered is failed.
    Now,
}

struct Service {
    router: Arc<Router>,
    stopping: watch::Receiver<Stopping>,
}

/// Serves on a listener until told to drain, and then until all streams have ended.
///
/// # Errors
/// Those of the socket.
pub async fn serve(
    listener: TcpListener,
    router: Arc<Router>,
    mut stopping: watch::Receiver<Stopping>,
) -> Result<(), tonic::transport::Error> {
    let limit = router.config.body_limit + MESSAGE_ROOM;
    let service = Service { router, stopping: stopping.clone() };
    let service = ExternalProcessorServer::new(service).max_decoding_message_size(limit);
    Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .add_service(service)
        .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), async move {
            // The sender is gone: the picker is, too.
            let _ = stopping.wait_for(|now| *now >= Stopping::Draining).await;
        })
        .await
}

/// Serves gRPC health on a listener of its own, as Envoy's health checks ask for.
pub async fn serve_health(
    listener: TcpListener,
    mut stopping: watch::Receiver<Stopping>,
) -> tonic_health::server::HealthReporter {
    let (reporter, service) = tonic_health::server::health_reporter();
    reporter.set_serving::<ExternalProcessorServer<Service>>().await;
    tokio::spawn(async move {
        let served = Server::builder().add_service(service).serve_with_incoming_shutdown(
            TcpIncoming::from(listener),
            async move {
                let _ = stopping.wait_for(|now| *now == Stopping::Now).await;
            },
        );
        if let Err(error) = served.await {
            tracing::error!(%error, "gRPC health ended");
        }
    });
    reporter
}

/// From now on health says that nothing is served.
pub async fn unhealthy(reporter: &tonic_health::server::HealthReporter) {
    reporter.set_service_status("", tonic_health::ServingStatus::NotServing).await;
    reporter.set_not_serving::<ExternalProcessorServer<Service>>().await;
}

#[tonic::async_trait]
impl ExternalProcessor for Service {
    type ProcessStream = ReceiverStream<Result<ext::ProcessingResponse, Status>>;

    async fn process(
        &self,
        request: Request<Streaming<ext::ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let (replies, stream) = mpsc::channel(REPLIES);
        let flow = Flow {
            exchange: Exchange::new(self.router.config.body_limit),
            held: Held { router: Arc::clone(&self.router), bytes: 0 },
            router: Arc::clone(&self.router),
            replies,
        };
        tokio::spawn(flow.run(request.into_inner(), self.stopping.clone()));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Bytes taken from the common budget; given back when dropped.
struct Held {
    router: Arc<Router>,
    bytes: usize,
}

impl Held {
    fn more(&mut self, bytes: usize) -> bool {
        let got = self.router.hold(bytes);
        if got {
            self.bytes += bytes;
        }
        got
    }

    fn shrink_to(&mut self, bytes: usize) {
        if self.bytes > bytes {
            self.router.let_go(self.bytes - bytes);
            self.bytes = bytes;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// Nobody listens on the other side any more.
struct Gone;

struct Flow {
    router: Arc<Router>,
    exchange: Exchange,
    held: Held,
    replies: mpsc::Sender<Result<ext::ProcessingResponse, Status>>,
}

impl Flow {
    async fn run(mut self, mut messages: Streaming<ext::ProcessingRequest>, mut stopping: watch::Receiver<Stopping>) {
        self.router.metrics.streams().inc();
        let router = Arc::clone(&self.router);
        loop {
            let limit = if self.exchange.complete() { Stopping::Draining } else { Stopping::Now };
            let message = tokio::select! {
                message = messages.message() => Some(message),
                // What is borrowed from the channel must not live across the next wait.
                () = async { drop(stopping.wait_for(|now| *now >= limit).await) } => None,
                () = tokio::time::sleep(IDLE), if !self.exchange.complete() => {
                    Some(Err(Status::deadline_exceeded("nothing came for too long")))
                }
            };
            let Some(message) = message else {
                self.stop().await;
                break;
            };
            match message {
                Ok(Some(message)) => {
                    let Some(part) = wire::part(message) else { continue };
                    if self.take(part).await.is_err() {
                        break;
                    }
                }
                // The usual ends: Envoy closes, or resets, after an answered request and when a client leaves. An end
                // before the answer must not look like one: Envoy would send the request on with an empty body.
                Ok(None) | Err(_) if self.exchange.complete() => break,
                Ok(None) | Err(_) => {
                    self.fail(Status::cancelled("the stream ended before its request did")).await;
                    break;
                }
            }
        }
        router.metrics.streams().dec();
    }

    async fn take(&mut self, part: Part) -> Result<(), Gone> {
        if let Part::RequestBody { bytes, .. } = &part
            && !self.held.more(bytes.len())
        {
            if let Some(reply) = self.exchange.abandon(Refusal::shed()) {
                self.router.metrics.refused("shed");
                self.held.shrink_to(0);
                return self.send(reply).await;
            }
            return Ok(());
        }
        let step = self.exchange.take(part);
        self.held.shrink_to(self.exchange.held_bytes());
        match step {
            Step::Wait => Ok(()),
            Step::Send(replies) => {
                if let Some(Reply::Immediate(refusal)) = replies.first() {
                    self.router.metrics.refused(refusal.code);
                }
                self.send_all(replies, None).await
            }
            Step::Fail(why) => {
                tracing::warn!(why, "a stream is not as it should be");
                self.fail(Status::invalid_argument(why)).await;
                Err(Gone)
            }
            Step::Decide(ask) => {
                let decided = tokio::select! {
                    decided = self.router.decide(*ask) => decided,
                    // The client left: what was begun is dropped, and with it any placement.
                    () = self.replies.closed() => return Err(Gone),
                };
                let replies = self.exchange.decided(decided.verdict);
                let sent = self.send_all(replies, decided.placed).await;
                self.held.shrink_to(self.exchange.held_bytes());
                sent
            }
        }
    }

    /// Sends in order. A placement is kept when all is handed over, and taken back when it is not.
    async fn send_all(&self, replies: Vec<Reply>, placed: Option<Placed>) -> Result<(), Gone> {
        for reply in replies {
            self.send(reply).await?;
        }
        if let Some(placed) = placed {
            placed.keep();
        }
        Ok(())
    }

    async fn send(&self, reply: Reply) -> Result<(), Gone> {
        self.replies.send(Ok(wire::response(reply))).await.map_err(|_| Gone)
    }

    async fn fail(&self, status: Status) {
        // Nobody is there to be told: the better.
        let _ = self.replies.send(Err(status)).await;
    }

    async fn stop(&mut self) {
        if let Some(reply) = self.exchange.abandon(Refusal::stopping()) {
            self.router.metrics.refused("stopping");
            if self.send(reply).await.is_ok() {
                return;
            }
        }
        if !self.exchange.complete() {
            self.fail(Status::unavailable("the picker is stopping")).await;
        }
    }
}
