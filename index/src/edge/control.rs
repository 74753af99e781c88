//! Asks of one engine's agent: one at a time, each with a deadline. A connection that failed is not used again, so an
//! answer that comes late cannot pass for another's.

use super::bundles::Bundles;
use super::inbox::{Event, Inbox, Question};
use super::zmtp::{Connection, Kind};
use proto::control::{MAX_BUNDLE_BYTES, Reply, Request, decode, encode};
use proto::proof::{Caller, Hello, Nonce, Secret};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

/// Deadline for one answer, the making of the connection included.
const DEADLINE: Duration = Duration::from_secs(2);
/// Longest answer taken: four payloads of the longest kind; 64 usual ones are below a megabyte.
pub const MOST_BYTES: usize = 64 << 20;
/// Asks that may wait: a snapshot or replay or both, an ack, a bundle.
pub const MOST_ASKS: usize = 8;
/// Pause after a connection failed.
const PAUSE: Duration = Duration::from_millis(200);

/// What the agent is to be asked.
#[derive(Debug)]
pub enum Job {
    /// The answer goes to the link, with this number.
    Ask {
        /// The link's number for it.
        id: u64,
        /// What.
        request: Request,
    },
    /// Of a stock engine: its events from this seq on.
    Events {
        /// The link's number for it.
        id: u64,
        /// The first seq.
        from: u64,
    },
    /// The answer is dropped.
    Ack(Request),
    /// A whole bundle, piece by piece, while nothing else is asked.
    Bundle(String),
}

/// How the agent is asked.
#[derive(Debug, Clone)]
pub enum Way {
    /// Not at all: the fleet entry has no control address.
    None,
    /// By connecting to its control socket, and proving the secret there where it is wanted.
    Socket(String, Option<Secret>),
    /// On the connection that it made.
    Dialled(mpsc::Sender<Question>),
}

/// A bundle that is arriving.
struct Arriving {
    digest: String,
    bytes: Vec<u8>,
}

/// Asks what comes through `jobs` until that closes.
pub async fn serve(
    stream: u64,
    name: String,
    way: Way,
    mut jobs: mpsc::Receiver<Job>,
    inbox: Inbox,
    bundles: Arc<Bundles>,
) {
    let mut connection: Option<Connection> = None;
    let mut arriving: Option<Arriving> = None;
    let (mut rest_until, mut why) = (Instant::now(), String::new());
    loop {
        let job = match &arriving {
            None => jobs.recv().await,
            Some(bundle) => match jobs.try_recv() {
                Ok(job) => Some(job),
                Err(mpsc::error::TryRecvError::Disconnected) => None,
                Err(mpsc::error::TryRecvError::Empty) => Some(Job::Bundle(bundle.digest.clone())),
            },
        };
        let Some(job) = job else { break };
        let (id, request) = match job {
            Job::Ask { id, request } => (Some(id), request),
            Job::Ack(request) => (None, request),
            // No agent has such a socket: see `stock`.
            Job::Events { .. } => continue,
            Job::Bundle(digest) => {
                let here = arriving.get_or_insert_with(|| Arriving { digest, bytes: Vec::new() });
                (None, Request::Bundle { digest: here.digest.clone(), offset: here.bytes.len() as u64 })
            }
        };
        let outcome = if Instant::now() < rest_until {
            Err(why.clone())
        } else {
            let asked = async {
                match &way {
                    Way::None => Err("the fleet entry has no control address".to_string()),
                    Way::Socket(endpoint, secret) => ask(&mut connection, endpoint, secret.as_ref(), &request).await,
                    Way::Dialled(asker) => ask_dialled(asker, &request).await,
                }
            };
            timeout(DEADLINE, asked).await.unwrap_or_else(|_| Err("no answer within 2 s".into()))
        };
        if let Err(reason) = &outcome
            && (connection.take().is_some() || Instant::now() >= rest_until)
        {
            tracing::debug!(engine = name, reason, ?request, "the agent did not answer");
            rest_until = Instant::now() + PAUSE;
            why.clone_from(reason);
        }
        if matches!(request, Request::Bundle { .. }) {
            arriving = arriving.take().and_then(|bundle| piece(bundle, outcome, stream, &name, &bundles));
        } else if let Some(id) = id {
            let event = match outcome {
                Ok(reply) => Event::Reply { stream, id, reply },
                Err(reason) => Event::Failed { stream, id, reason },
            };
            inbox.send(event, 0).await;
        }
    }
    bundles.unclaim(stream);
}

async fn ask(
    connection: &mut Option<Connection>,
    endpoint: &str,
    secret: Option<&Secret>,
    request: &Request,
) -> Result<Reply, String> {
    // Taken out while it is used: an ask that is cut short by its deadline leaves none behind.
    let mut one = match connection.take() {
        Some(one) => one,
        None => {
            let mut one = Connection::open(endpoint, Kind::Dealer, MOST_BYTES).await.map_err(|e| e.to_string())?;
            if let Some(secret) = secret {
                prove(&mut one, secret).await?;
            }
            one
        }
    };
    let reply = exchange(&mut one, request).await?;
    *connection = Some(one);
    Ok(reply)
}

/// Proves the secret to an agent and has it prove it, where the agent has one. One without a secret is asked all the
/// same: it is where the fleet list says, as its event stream is, which nothing proves either; so a secret can be given
/// to a fleet engine by engine.
async fn prove(connection: &mut Connection, secret: &Secret) -> Result<(), String> {
    let caller = Caller::new(Hello { engine: None, epoch: None, nonce: nonce()? }, false);
    let challenge = match exchange(connection, &Request::Hello(caller.hello().clone())).await? {
        Reply::Challenge(challenge) => challenge,
        // An agent of a version that has no secret.
        Reply::Refused { .. } => return Ok(()),
        _ => return Err("another answer than a challenge".into()),
    };
    let proof = caller.prove(Some(secret), &challenge).map_err(|e| e.to_string())?;
    match exchange(connection, &Request::Proof(proof)).await? {
        Reply::Welcome(welcome) => caller.trust(Some(secret), &challenge, &welcome).map_err(|e| e.to_string()),
        Reply::Refused { reason } => Err(reason),
        _ => Err("another answer than a welcome".into()),
    }
}

/// Random bytes of a connection, from the operating system.
///
/// # Errors
/// When the operating system has none.
pub fn nonce() -> Result<Nonce, String> {
    let mut bytes = Nonce::default();
    getrandom::fill(&mut bytes).map_err(|e| e.to_string())?;
    Ok(bytes)
}

async fn exchange(connection: &mut Connection, request: &Request) -> Result<Reply, String> {
    let bytes = encode(request).map_err(|e| e.to_string())?;
    connection.send(&[b"", &bytes]).await.map_err(|e| e.to_string())?;
    let frames = connection.receive().await.map_err(|e| e.to_string())?;
    let [empty, body] = frames.as_slice() else {
        return Err(format!("an answer of {} frames; it has 2", frames.len()));
    };
    if !empty.is_empty() {
        return Err("an answer whose first frame is not empty".into());
    }
    decode(body).map_err(|e| e.to_string())
}

async fn ask_dialled(asker: &mpsc::Sender<Question>, request: &Request) -> Result<Reply, String> {
    let gone = "the connection that the agent made is lost";
    let request = encode(request).map_err(|e| e.to_string())?;
    let (answer, answered) = oneshot::channel();
    asker.send(Question { request, answer }).await.map_err(|_| gone)?;
    decode(&answered.await.map_err(|_| gone)?).map_err(|e| e.to_string())
}

/// Takes one piece of a bundle. What is still arriving comes back.
fn piece(
    mut bundle: Arriving,
    outcome: Result<Reply, String>,
    stream: u64,
    name: &str,
    bundles: &Bundles,
) -> Option<Arriving> {
    let why = match outcome {
        Ok(Reply::Bundle { digest, total, offset, bytes }) => {
            let fits =
                digest == bundle.digest && offset == bundle.bytes.len() as u64 && total <= MAX_BUNDLE_BYTES as u64;
            let end = offset.saturating_add(bytes.len() as u64);
            if fits && end <= total && (!bytes.is_empty() || end == total) {
                bundle.bytes.extend_from_slice(&bytes);
                if end < total {
                    return Some(bundle);
                }
                if bundles.put(&bundle.digest, bundle.bytes) {
                    tracing::info!(engine = name, digest, bytes = total, "bundle fetched");
                } else {
                    tracing::error!(engine = name, digest, "the bundle is not what its digest says; it is not used");
                }
                return None;
            }
            "a piece that does not fit".to_string()
        }
        Ok(_) => "the agent has no bundle of that digest".into(),
        Err(reason) => reason,
    };
    tracing::warn!(engine = name, digest = bundle.digest, reason = why, "the bundle could not be fetched");
    bundles.unclaim(stream);
    None
}
