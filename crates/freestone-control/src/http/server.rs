//! HTTP listener with one thread per connection and a limit on the number of connections.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result};
use freestone_core::client_log;
use freestone_core::descriptor_reserve::DescriptorReserve;
use tracing::{debug, warn};

use super::connection::{self, Client, Response};
use super::request::{Refusal, Request};
use crate::connections::Connections;

/// Maximum number of open connections of a listener. Further clients get status 503.
const CONNECTIONS_MAX: usize = 16;

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
    connections: Arc<Connections>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared<S> {
    site: S,
    check_host: bool,
    connections: Arc<Connections>,
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
        let connections = Connections::new(CONNECTIONS_MAX);
        let shared = Shared { site, check_host, connections: Arc::clone(&connections) };
        let acceptor = thread::Builder::new().name(S::NAME.into()).spawn({
            let (listener, shared) = (Arc::clone(&listener), Arc::new(shared));
            move || accept_all(&listener, &shared)
        });
        let acceptor = acceptor.with_context(|| format!("cannot start the thread for --{}", S::NAME))?;
        Ok(Self { listener, url, connections, acceptor: Some(acceptor) })
    }

    /// Returns the URL of the first page of the site.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.connections.close(&*self.listener);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn accept_all<S: Site>(listener: &TcpListener, shared: &Arc<Shared<S>>) {
    let accept = || listener.accept().map(|(stream, _)| stream);
    shared.connections.accept_all(
        accept,
        |stream| start(stream, shared),
        |error| client_log!(warn, "{}: cannot accept a connection: {error}", S::NAME),
    );
}

fn start<S: Site>(stream: TcpStream, shared: &Arc<Shared<S>>) {
    let (shared, stream) = (Arc::clone(shared), Arc::new(stream));
    let slot = shared.connections.add(Arc::clone(&stream) as _, false);
    let slot = slot.filter(|_| !DescriptorReserve::CLIENTS.includes(&stream));
    let Some(slot) = slot else { return reject::<S>(&stream) };
    let started = thread::Builder::new().name(format!("{}-client", S::NAME)).spawn(move || {
        let served = connection::serve(&stream, &slot, shared.check_host, S::HEADERS, |request, client| {
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
