//! The listener for metrics: a thread for each of a few connections.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tracing::{debug, warn};

use super::address::is_of_this_machine;
use super::args::MetricsOf;
use super::http::{self, Answer};
use super::request::Refusal;
use super::{scrape, text};
use crate::service::Service;

/// Connections at one time; one more is told to come later.
const CONNECTIONS_MAX: usize = 16;
/// Pause after a connection could not be accepted, so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// It listens until this is dropped.
pub struct MetricsServer {
    listener: Arc<TcpListener>,
    at: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    /// Not held: no client keeps devices alive.
    service: Weak<Service>,
    forks: usize,
    check_host: bool,
    ending: AtomicBool,
    open: AtomicUsize,
    /// One text at a time.
    writing: Mutex<()>,
}

/// A connection's place.
struct Place(Arc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl MetricsServer {
    /// Listens.
    ///
    /// # Errors
    /// The address is not to be had, or there is no thread.
    pub fn start(asked: &MetricsOf, service: &Arc<Service>) -> Result<Self> {
        let listener = TcpListener::bind(asked.at).with_context(|| format!("--metrics: {}", asked.at))?;
        let listener = Arc::new(listener);
        let at = listener.local_addr().context("--metrics: the address is not known")?;
        let check_host = is_of_this_machine(at.ip());
        if !check_host {
            warn!("{}: metrics are told to whoever reaches the port", url(at));
        }
        let shared = Arc::new(Shared {
            service: Arc::downgrade(service),
            forks: asked.forks,
            check_host,
            ending: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            writing: Mutex::default(),
        });
        let acceptor = thread::Builder::new().name("metrics".into()).spawn({
            let (listener, shared) = (Arc::clone(&listener), Arc::clone(&shared));
            move || accept_all(&listener, &shared)
        });
        let acceptor = acceptor.context("cannot start the thread for metrics")?;
        Ok(Self { listener, at, shared, acceptor: Some(acceptor) })
    }

    /// Where metrics are.
    pub fn url(&self) -> String {
        url(self.at)
    }
}

fn url(at: SocketAddr) -> String {
    format!("http://{at}/metrics")
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        // Wakes accept(), which then fails.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn accept_all(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let accepted = listener.accept();
        if shared.ending.load(Ordering::SeqCst) {
            return;
        }
        match accepted {
            Ok((stream, _)) => start(stream, shared),
            // The client left before it was its turn.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                warn!("metrics: cannot accept a connection: {error}");
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn start(stream: TcpStream, shared: &Arc<Shared>) {
    let open = shared.open.fetch_add(1, Ordering::SeqCst);
    let place = Place(Arc::clone(shared));
    if open >= CONNECTIONS_MAX {
        turn_away(&stream);
        return;
    }
    let started = thread::Builder::new().name("metrics-client".into()).spawn(move || {
        let shared = &place.0;
        let told = http::serve(&stream, shared.check_host, |path| shared.answer(path));
        if let Err(error) = told {
            debug!("metrics: a connection ended: {error}");
        }
    });
    if let Err(error) = started {
        warn!("metrics: cannot start a thread for a connection: {error}");
    }
}

/// Says so as far as that does not wait.
fn turn_away(mut stream: &TcpStream) {
    let status = Refusal::Busy.status();
    let said =
        format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n");
    if stream.set_nonblocking(true).is_ok() {
        // What it has asked is read, or the end of the connection would overtake the answer.
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(said.as_bytes());
    }
}

impl Shared {
    fn answer(&self, path: &str) -> Result<Answer, Refusal> {
        match path {
            "/metrics" => {}
            "/" => {
                let body = "freestone: metrics are at /metrics\n".to_owned();
                return Ok(Answer { content_type: "text/plain; charset=utf-8", body });
            }
            _ => return Err(Refusal::NotFound),
        }
        let service = self.service.upgrade().ok_or(Refusal::Busy)?;
        // Nothing in there can be half done.
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // A defect here must not take the disks of everybody with it.
        let body = catch_unwind(AssertUnwindSafe(|| text::text(scrape::scrape(&service, self.forks))));
        Ok(Answer { content_type: CONTENT_TYPE, body: body.map_err(|_| Refusal::Broken)? })
    }
}
