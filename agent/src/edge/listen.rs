//! Listening on TCP or a Unix socket, with a bound on how many peers there are.

use crate::address::Address;
use std::cell::Cell;
use std::io::Result;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// Most connections of one socket at a time. Each costs a task and one message: two index replicas and a few people
/// with tools are what is expected.
pub const MAX_PEERS: usize = 64;
/// How long a peer may take to greet.
pub const GREETING: Duration = Duration::from_secs(5);
/// How long a peer may take nothing of what is written to it before it is dropped.
pub const STALL: Duration = Duration::from_secs(300);

/// A socket that is bound, before its runtime runs.
#[derive(Debug)]
pub enum Bound {
    /// TCP.
    Tcp(std::net::TcpListener),
    /// A Unix socket.
    Ipc(std::os::unix::net::UnixListener),
}

/// Either kind of stream.
pub trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Stream for S {}

/// Binds; says where, since port 0 is any.
///
/// # Errors
/// When the address is taken or cannot be resolved.
pub fn bind(address: &Address) -> Result<(Bound, Address)> {
    match address {
        Address::Tcp { host, port } => {
            let listener = std::net::TcpListener::bind((host.as_str(), *port))?;
            listener.set_nonblocking(true)?;
            let port = listener.local_addr()?.port();
            Ok((Bound::Tcp(listener), Address::Tcp { host: host.clone(), port }))
        }
        Address::Ipc(path) => {
            // A socket file of an earlier life stays behind: only that is removed, never another kind of file.
            use std::os::unix::fs::FileTypeExt;
            if std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
                && std::os::unix::net::UnixStream::connect(path).is_err()
            {
                std::fs::remove_file(path)?;
            }
            let listener = std::os::unix::net::UnixListener::bind(path)?;
            listener.set_nonblocking(true)?;
            Ok((Bound::Ipc(listener), address.clone()))
        }
    }
}

/// A count of peers that goes down when a peer's place is dropped.
struct Place(Rc<Cell<usize>>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Accepts for good; each peer is served by a task of its own, at most [`MAX_PEERS`] at a time.
pub async fn accept<F>(bound: Bound, serve: impl Fn(Box<dyn Stream>) -> F) -> Result<()>
where
    F: Future<Output = Result<()>> + 'static,
{
    enum Listener {
        Tcp(tokio::net::TcpListener),
        Ipc(tokio::net::UnixListener),
    }
    let listener = match bound {
        Bound::Tcp(listener) => Listener::Tcp(tokio::net::TcpListener::from_std(listener)?),
        Bound::Ipc(listener) => Listener::Ipc(tokio::net::UnixListener::from_std(listener)?),
    };
    let count = Rc::new(Cell::new(0));
    loop {
        let accepted: Result<Box<dyn Stream>> = match &listener {
            Listener::Tcp(listener) => listener.accept().await.map(|(stream, _)| {
                let _ = stream.set_nodelay(true); // a message goes out when it is written, or a little later
                Box::new(stream) as Box<dyn Stream>
            }),
            Listener::Ipc(listener) => listener.accept().await.map(|(stream, _)| Box::new(stream) as Box<dyn Stream>),
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                // Out of descriptors, or a peer that left in between: go on, but do not spin.
                tracing::debug!(%error, "a reader could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if count.get() >= MAX_PEERS {
            tracing::debug!("more than {MAX_PEERS} readers: one was turned away");
            continue;
        }
        count.set(count.get() + 1);
        let (place, served) = (Place(count.clone()), serve(stream));
        tokio::task::spawn_local(async move {
            if let Err(error) = served.await {
                tracing::debug!(%error, "a reader left");
            }
            drop(place);
        });
    }
}
