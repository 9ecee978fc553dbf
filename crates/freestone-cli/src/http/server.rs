//! The listener: a thread for each of a few connections.

use freestone_core::client_log;
use freestone_core::descriptor_reserve::Reserve;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tracing::{debug, warn};

use super::address::is_of_this_machine;
use super::connection::{self, Answer, Client};
use super::request::{Refusal, Request};

/// Connections at one time; one more is told to come later.
const CONNECTIONS_MAX: usize = 16;
/// Pause after a connection could not be accepted, so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What is at an address.
pub trait Site: Send + Sync + 'static {
    /// The option that asks for it, without its dashes; its threads are named after it.
    const NAME: &'static str;
    /// Where it begins.
    const PATH: &'static str;
    /// Header lines that all answers have, each with its end.
    const HEADERS: &'static str;

    /// The answer to a request.
    ///
    /// # Errors
    /// There is none but a status.
    fn answer(&self, request: &Request, client: &Client<'_>) -> Result<Answer, Refusal>;
}

/// It listens until this is dropped.
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

/// A connection's place.
struct Place<S>(Arc<Shared<S>>);

impl<S> Drop for Place<S> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl HttpServer {
    /// Listens.
    ///
    /// # Errors
    /// The address is not to be had, or there is no thread.
    pub fn start<S: Site>(at: SocketAddr, site: S) -> Result<Self> {
        let listener = TcpListener::bind(at).with_context(|| format!("--{}: {at}", S::NAME))?;
        let listener = Arc::new(listener);
        let at = listener.local_addr().with_context(|| format!("--{}: the address is not known", S::NAME))?;
        let url = format!("http://{at}{}", S::PATH);
        let check_host = is_of_this_machine(at.ip());
        if !check_host {
            warn!("{url}: is told to whoever reaches the port");
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

    /// Where it is.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        // Wakes accept(), which then fails.
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
            Ok((stream, _)) if Reserve::OF_CLIENTS.includes(&stream) => turn_away::<S>(&stream),
            Ok((stream, _)) => start(stream, shared),
            // The client left before it was its turn.
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
    let place = Place(Arc::clone(shared));
    if open >= CONNECTIONS_MAX {
        turn_away::<S>(&stream);
        return;
    }
    let started = thread::Builder::new().name(format!("{}-client", S::NAME)).spawn(move || {
        let shared = &place.0;
        let told =
            connection::serve(&stream, &shared.ending, shared.check_host, S::HEADERS, |request, client| {
                // A defect here must not take the disks of everybody with it.
                let answer = catch_unwind(AssertUnwindSafe(|| shared.site.answer(request, client)));
                answer.map_err(|_| Refusal::Broken)?
            });
        if let Err(error) = told {
            debug!("{}: a connection ended: {error}", S::NAME);
        }
    });
    if let Err(error) = started {
        client_log!(warn, "{}: cannot start a thread for a connection: {error}", S::NAME);
    }
}

/// Says so as far as that does not wait.
fn turn_away<S: Site>(mut stream: &TcpStream) {
    let status = Refusal::Busy.status();
    let said = format!(
        "HTTP/1.1 {status}\r\nContent-Length: 0\r\nRetry-After: 1\r\n{}Connection: close\r\n\r\n",
        S::HEADERS
    );
    if stream.set_nonblocking(true).is_ok() {
        // What it has asked is read, or the end of the connection would overtake the answer.
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(said.as_bytes());
    }
}
