//! HTTP listener with one thread per connection and a limit on the number of connections.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};
use freestone_core::client_log;
use freestone_core::descriptor_reserve::DescriptorReserve;
use tracing::{debug, warn};

use super::connection::{self, Client, Response};
use super::request::{Refusal, Request};

/// Maximum number of open connections of a listener. Further clients get status 503.
const CONNECTIONS_MAX: usize = 16;
/// Pause after a failed accept, so that the loop does not spin on a persistent error.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The content served at one address.
pub trait Site: Send + Sync + 'static {
    /// Name of the option that enables the site, without dashes. The threads of the site have the same name.
    const NAME: &'static str;
    /// Path of the first page, which is appended to the URL of the site.
    const PATH: &'static str;
    /// Header lines of all responses of the site, each with its line end.
    const HEADERS: &'static str;

    /// Returns the response to a request.
    ///
    /// # Errors
    /// The reason why the request gets an error response.
    fn respond(&self, request: &Request, client: &Client<'_>) -> Result<Response, Refusal>;
}

/// A running HTTP listener. Dropping the listener stops its thread.
pub struct HttpServer {
    listener: Arc<TcpListener>,
    url: String,
    ending: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared<S> {
    site: S,
    check_host: bool,
    ending: Arc<AtomicBool>,
    open: AtomicUsize,
}

/// An open connection, which counts towards [`CONNECTIONS_MAX`] until this value is dropped.
struct ConnectionSlot<S>(Arc<Shared<S>>);

impl<S> Drop for ConnectionSlot<S> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl HttpServer {
    /// Listens at the address `at` and serves `site` there.
    ///
    /// # Errors
    /// The address is not available, or the listener's thread cannot be started.
    pub fn start<S: Site>(at: SocketAddr, site: S) -> Result<Self> {
        let listener = TcpListener::bind(at).with_context(|| format!("--{}: {at}", S::NAME))?;
        let listener = Arc::new(listener);
        let at = listener
            .local_addr()
            .with_context(|| format!("--{}: cannot get the address of the socket", S::NAME))?;
        let url = format!("http://{at}{}", S::PATH);
        let check_host = is_of_this_machine(at.ip());
        if !check_host {
            warn!("{url}: every client that reaches the port can read it");
        }
        let ending = Arc::<AtomicBool>::default();
        let shared = Shared { site, check_host, ending: Arc::clone(&ending), open: AtomicUsize::new(0) };
        let acceptor = thread::Builder::new().name(S::NAME.into()).spawn({
            let (listener, shared) = (Arc::clone(&listener), Arc::new(shared));
            move || accept_all(&listener, &shared)
        });
        let acceptor = acceptor.with_context(|| format!("cannot start the thread for --{}", S::NAME))?;
        Ok(Self { listener, url, ending, acceptor: Some(acceptor) })
    }

    /// Returns the URL of the first page of the site.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        // Wakes the thread in accept(), which fails after the shutdown.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn accept_all<S: Site>(listener: &TcpListener, shared: &Arc<Shared<S>>) {
    loop {
        let accepted = listener.accept();
        if shared.ending.load(Ordering::SeqCst) {
            return;
        }
        match accepted {
            Ok((stream, _)) if DescriptorReserve::CLIENTS.includes(&stream) => reject::<S>(&stream),
            Ok((stream, _)) => start(stream, shared),
            // The client disconnected before it was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                client_log!(warn, "{}: cannot accept a connection: {error}", S::NAME);
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn start<S: Site>(stream: TcpStream, shared: &Arc<Shared<S>>) {
    let open = shared.open.fetch_add(1, Ordering::SeqCst);
    let slot = ConnectionSlot(Arc::clone(shared));
    if open >= CONNECTIONS_MAX {
        reject::<S>(&stream);
        return;
    }
    let started = thread::Builder::new().name(format!("{}-client", S::NAME)).spawn(move || {
        let shared = &slot.0;
        let served =
            connection::serve(&stream, &shared.ending, shared.check_host, S::HEADERS, |request, client| {
                // A panic here must not end the server and its disks.
                let response = catch_unwind(AssertUnwindSafe(|| shared.site.respond(request, client)));
                response.map_err(|_| Refusal::Broken)?
            });
        if let Err(error) = served {
            debug!("{}: a connection ended: {error}", S::NAME);
        }
    });
    if let Err(error) = started {
        client_log!(warn, "{}: cannot start a thread for a connection: {error}", S::NAME);
    }
}

/// Sends an error response with status 503, without blocking.
fn reject<S: Site>(mut stream: &TcpStream) {
    let status = Refusal::Busy.status();
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Length: 0\r\nRetry-After: 1\r\n{}Connection: close\r\n\r\n",
        S::HEADERS
    );
    if stream.set_nonblocking(true).is_ok() {
        // Closing a socket with unread bytes resets the connection, and the client could lose the response.
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(response.as_bytes());
    }
}

/// Returns true if only this machine can reach the address, which is then a loopback address.
pub fn is_of_this_machine(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}
