//! The server as a whole: its settings (`plan`), the order of its start and end (`running`), and [`Server`] for
//! programs that embed one (`builder`). No room of the crate uses this one.

mod builder;
#[doc(hidden)]
pub mod plan;
#[doc(hidden)]
pub mod running;

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use anyhow::Context as _;
use freestone_control::protocol::RpcError;
use freestone_core::sync::Mutex;
use freestone_core::work_queue::OwnedQueue;
use freestone_nbd::ExportInfo;
use thiserror::Error;

pub use self::builder::ServerBuilder;
use self::plan::Plan;
use self::running::{FlushResult, Running};
use crate::usage::Usage;

/// A running server. [`Server::builder`] starts one.
///
/// The server uses threads of its own, and all methods may be called from any thread. A program may run several servers,
/// with different addresses and state directories.
///
/// [`shutdown`](Self::shutdown) ends the server in order. Dropping the server does the same, but the dropping thread may
/// wait for a hung disk, and errors are only logged.
///
/// The state of the process is the program's own:
///
/// * A signal ends the process at once, as usual. The program handles SIGTERM by [`shutdown`](Self::shutdown).
/// * A write beyond `RLIMIT_FSIZE` ends the process unless SIGXFSZ has a handler.
/// * Each client needs a descriptor, so the limit of open files limits the clients.
/// * If an export is mounted on this machine, the threads need the state `PR_SET_IO_FLUSHER`, or the kernel may wait for
///   memory that only a write to the export frees. Threads inherit it from the thread that starts the server.
pub struct Server {
    running: Running,
    /// Threads for the shutdown, started in advance: flush, then close.
    shutdown_threads: [OwnedQueue; 2],
    /// Requests of clients to shut down.
    requests: Mutex<Receiver<()>>,
}

/// Errors of a server. Messages name keys and options as `freestone serve` does.
#[derive(Debug, Error)]
pub enum ServerError {
    /// A specification, an address or a combination of settings is invalid. Nothing was started.
    #[error("{0}")]
    Invalid(String),
    /// A device, address or directory cannot be used. The server has ended.
    #[error("{0}")]
    Start(String),
    /// Devices could not be saved, flushed or closed in time. The log names them. Their last writes may be lost.
    #[error("{0} devices could not be saved, flushed or closed")]
    Incomplete(usize),
}

impl From<anyhow::Error> for ServerError {
    fn from(error: anyhow::Error) -> Self {
        let is_invalid =
            error.is::<Usage>() || error.downcast_ref::<RpcError>().is_some_and(RpcError::is_usage);
        let message = format!("{error:#}");
        if is_invalid { Self::Invalid(message) } else { Self::Start(message) }
    }
}

impl Server {
    /// Returns a builder for a server without devices and addresses.
    pub fn builder() -> ServerBuilder {
        ServerBuilder::default()
    }

    fn start(plan: Plan) -> anyhow::Result<Self> {
        let standby = |name| OwnedQueue::started(name).context("cannot start the threads of the shutdown");
        let shutdown_threads = [standby("shutdown")?, standby("close")?];
        let running = Running::start(plan, |_| {}, Arc::new(|_| {}))?;
        let (request, requests) = mpsc::channel();
        // A failed send is ignored: the server has ended.
        let _ = running.service.end.set(Box::new(move || _ = request.send(())));
        Ok(Self { running, shutdown_threads, requests: Mutex::new(requests) })
    }

    /// Returns the NBD addresses of the server, as `unix:PATH` or `tcp:HOST:PORT` with the chosen port instead of 0.
    pub fn nbd_addresses(&self) -> Vec<String> {
        self.running.service.exports.nbd.addresses().iter().map(ToString::to_string).collect()
    }

    /// Returns the NBD URIs at which a device is exported. The list is empty if the device does not exist or is
    /// withheld.
    pub fn uris(&self, device: &str) -> Vec<String> {
        self.running.service.exports.nbd.exports_named(device).iter().map(ExportInfo::uri).collect()
    }

    /// Returns the URL of the metrics, or `None` without metrics.
    pub fn metrics_url(&self) -> Option<&str> {
        self.running.service.metrics_url.get().map(String::as_str)
    }

    /// Returns the URL of the web page, or `None` without one.
    pub fn page_url(&self) -> Option<&str> {
        self.running.service.http_url.get().map(String::as_str)
    }

    /// Waits until a client requests the shutdown over the control socket (`freestone shutdown`). The caller then calls
    /// [`shutdown`](Self::shutdown). Never returns without a control socket.
    pub fn wait_for_shutdown_request(&self) {
        // The sender exists as long as the service, so the receiver does not fail.
        let _ = self.requests.lock().recv();
    }

    /// Ends the server: cancels jobs, ends exports (requests in flight have 5 s), saves devices with `keep=yes` (at most
    /// [`save_timeout`](ServerBuilder::save_timeout)), flushes all devices (at most 60 s), and closes them. Afterwards
    /// another server can use the state directory and the addresses.
    ///
    /// # Errors
    /// [`ServerError::Incomplete`] if devices could not be saved, flushed or closed in time.
    pub fn shutdown(self) -> Result<(), ServerError> {
        let Self { mut running, shutdown_threads: [flush_thread, close_thread], requests: _ } = self;
        let flush_result = running.shutdown(&flush_thread, || ());
        let flushed = flush_result.recv().unwrap_or(FlushResult { failed: 1, end: Instant::now() });
        running.remove_paths();
        let unclosed_count = running.close(&close_thread, || (), flushed.end);
        let unclosed =
            unclosed_count.recv_timeout(flushed.end.saturating_duration_since(Instant::now())).unwrap_or(1);
        match flushed.failed + unclosed {
            0 => Ok(()),
            devices => Err(ServerError::Incomplete(devices)),
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("nbd", &self.nbd_addresses()).finish_non_exhaustive()
    }
}
