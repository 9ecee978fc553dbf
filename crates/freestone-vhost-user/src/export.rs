//! The public handle of a device exported at a Unix socket.

use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use freestone_core::allow::{AllowList, Denials, socket_peer};
use freestone_core::budget::Budget;
use freestone_core::client_log;
use freestone_core::concurrency_limit::{ConcurrencyLimit, Permit};
use freestone_core::descriptor_reserve::DescriptorReserve;
use freestone_core::device::{Device, Disk, Failures};
use freestone_core::exports::{ExportState, Life, LifeState};
use freestone_core::unix_socket::{Access, BindError, SocketFile, bind_to};
use freestone_core::workers::Workers;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use thiserror::Error;

use crate::frontend::FrontendState;
use crate::session::Session;
use crate::vring::ConnectionConfig;

/// Longest time for which dropping an export waits for requests in flight.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// Longest time for which a frontend waits for a place in a client limit before its connection is closed.
pub const PLACE_WAIT: Duration = Duration::from_secs(60);
/// Poll interval while a frontend waits for a place in a client limit.
const PLACE_POLL: Duration = Duration::from_millis(100);
/// Pause after a failed accept, because the next accept would most likely fail too.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Backlog of the socket: maximum number of frontends that wait for the current one to leave.
const BACKLOG: i32 = 16;

/// An error from listening at a socket path.
#[derive(Debug, Error)]
#[error("{path}: {source}")]
pub struct ListenError {
    /// Path of the socket.
    pub path: PathBuf,
    /// Reason why the socket cannot be bound.
    pub source: BindError,
}

/// Options of an export.
#[derive(Debug, Clone)]
pub struct Options {
    /// True if writes are refused even if the device accepts them.
    pub read_only: bool,
    /// Counters of failed requests.
    pub failures: Arc<Failures>,
    /// Memory budget for bytes in flight. A request that exceeds the budget waits.
    pub budget: Arc<Budget>,
    /// Threads that run expensive requests.
    pub workers: Workers,
    /// True if a queue's thread polls the ring for up to 32 us before it sleeps, provided that recent waits
    /// were that short.
    pub busy_poll: bool,
    /// Mode, user and group of the new socket.
    pub access: Access,
    /// Peers allowed to use the export; `None` allows all. Other connections are closed immediately
    /// after accept.
    pub allow: Option<AllowList>,
    /// Counter of connections that allow lists have denied.
    pub denials: Arc<Denials>,
    /// Client limits. A frontend takes a place in each, and waits up to [`PLACE_WAIT`] for it.
    pub places: Vec<Arc<ConcurrencyLimit>>,
}

impl Options {
    /// Returns the default options, with the workers of the process.
    pub fn new(budget: Arc<Budget>) -> Self {
        let workers = Workers::process().clone();
        Self {
            read_only: false,
            failures: Arc::default(),
            budget,
            workers,
            busy_poll: true,
            access: Access::default(),
            allow: None,
            denials: Arc::default(),
            places: Vec::new(),
        }
    }
}

/// A device exported at a Unix socket. It serves one frontend at a time, with all its queues. The
/// next frontend is served when all requests of the previous one are done. Dropping the export
/// calls [`shutdown`](Self::shutdown) with [`SHUTDOWN_GRACE`].
pub struct Export {
    path: PathBuf,
    shared: Arc<Shared>,
    /// Wakes the export's thread while it waits for a frontend.
    wake: Arc<OwnedFd>,
}

/// State shared by the export and its thread. While it is held, no new frontend is served.
type Shared = Life<State>;

/// The state of a vhost-user socket.
struct State {
    /// The socket file; `None` once the export is ending.
    file: Option<SocketFile>,
    frontend: Option<Arc<FrontendState>>,
    /// Peers allowed to connect; `None` allows all.
    allow: Option<AllowList>,
}

impl ExportState for State {}

impl Export {
    /// Exports `device` as `name` at the socket `path`. `options.access` sets the socket's permissions. A
    /// stale socket, at which no process accepts connections, is replaced.
    pub fn new(
        path: &Path,
        name: &str,
        device: Arc<dyn Device>,
        options: Options,
    ) -> Result<Self, ListenError> {
        let fail = |source| ListenError { path: path.to_path_buf(), source };
        let other = |error: std::io::Error| fail(error.into());
        let (socket, file) = bind_to(path, BACKLOG, &options.access).map_err(fail)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|errno| other(errno.into()))?);
        let disk = Disk::new(name, options.read_only, device, Arc::clone(&options.failures));
        let state = State { file: Some(file), frontend: None, allow: options.allow.clone() };
        let shared = Arc::new(Shared::new(disk, state));
        let (thread_shared, thread_wake) = (Arc::clone(&shared), Arc::clone(&wake));
        let thread = std::thread::Builder::new().name("vhost-user".to_owned());
        let started = thread.spawn(move || {
            serve(&thread_shared, &socket, &thread_wake, &options);
            drop(socket);
            thread_shared.finish();
        });
        started.map_err(other)?;
        tracing::info!(path = %path.display(), "{name}: vhost-user");
        Ok(Self { path: path.to_path_buf(), shared, wake })
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name of the exported device.
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// Returns true if the export refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.shared.is_read_only()
    }

    /// Returns true if a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.lock().own.frontend.is_some()
    }

    /// Returns true if the connected driver may have cached content, because one of its queues has run since
    /// it connected or since the last device reset.
    pub fn has_driver(&self) -> bool {
        self.shared
            .lock()
            .own
            .frontend
            .as_ref()
            .is_some_and(|frontend| frontend.has_driver.load(Ordering::SeqCst))
    }

    /// Sets the peers allowed to connect from now on; `None` allows all. A connected frontend stays
    /// connected.
    pub fn set_allow_list(&self, allow: Option<AllowList>) {
        self.shared.lock().own.allow = allow;
    }

    /// Returns the peers allowed to connect, or `None` if all peers are.
    pub fn allow_list(&self) -> Option<AllowList> {
        self.shared.lock().own.allow.clone()
    }

    /// Holds new frontends until the returned guard is dropped. A connected frontend stays connected.
    pub fn hold(&self) -> FrontendHold<'_> {
        self.shared.update(|state| state.holds += 1);
        FrontendHold(self)
    }

    /// Notifies the connected frontend that the size of the device has changed, if the frontend supports the
    /// message.
    pub fn notify_resize(&self) {
        let frontend = self.shared.lock().own.frontend.clone();
        if let Some(frontend) = frontend {
            frontend.notify_config_change();
        }
    }

    /// Replaces the device for the next frontend. A connected frontend keeps the old device.
    pub fn replace(&self, device: Arc<dyn Device>, failures: Arc<Failures>) {
        self.shared.replace(device, failures);
    }

    /// Starts to end the export: removes the socket, and ends the connection when its requests in
    /// flight are done.
    pub fn begin_shutdown(&self) {
        let file = self.shared.update(|state| {
            state.ending = true;
            if let Some(frontend) = &state.own.frontend {
                stop_reading(frontend);
            }
            state.own.file.take()
        });
        drop(file);
        freestone_core::eventfd::wake(&self.wake);
    }

    /// Ends the export and waits until its requests in flight are done. If that takes longer than `grace`,
    /// closes the connection and returns false. The export's thread then releases the device when the
    /// requests are done. Further calls only wait.
    pub fn shutdown(&self, grace: Duration) -> bool {
        let end = Instant::now() + grace;
        self.begin_shutdown();
        wait_or_close(&self.shared, end, |state| state.ended)
    }
}

/// Stops reading from the frontend, so that its session ends. The frontend sees the end of the connection
/// only when none of its requests is in flight, so that it can reuse its memory.
fn stop_reading(frontend: &FrontendState) {
    // An error means that the frontend has already left.
    let _ = shutdown(&frontend.socket, Shutdown::Read);
}

/// Waits until the state meets a condition. If it does not by `end`, closes the connection although requests are in
/// flight, and returns false.
fn wait_or_close(shared: &Shared, end: Instant, condition: impl Fn(&LifeState<State>) -> bool) -> bool {
    let is_met = shared.wait_until(end, condition);
    if !is_met && let Some(frontend) = &shared.lock().own.frontend {
        let _ = shutdown(&frontend.socket, Shutdown::Both);
    }
    is_met
}

/// A guard that keeps an export from serving new frontends until it is dropped.
pub struct FrontendHold<'a>(&'a Export);

impl FrontendHold<'_> {
    /// Returns true if a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// Ends the connection without completing its requests in flight, like a loss of power. Returns
    /// false if no frontend is connected.
    pub fn disconnect(&self) -> bool {
        let frontend = self.0.shared.lock().own.frontend.clone();
        let Some(frontend) = frontend else { return false };
        frontend.stopped_publishing.store(true, Ordering::SeqCst);
        stop_reading(&frontend);
        true
    }

    /// Waits until the connection has ended. If the device still has requests in flight at `end`, closes the
    /// connection and returns false.
    pub fn wait_disconnected(&self, end: Instant) -> bool {
        wait_or_close(&self.0.shared, end, |state| state.own.frontend.is_none())
    }
}

impl Drop for FrontendHold<'_> {
    fn drop(&mut self) {
        self.0.shared.update(|state| state.holds -= 1);
    }
}

fn serve(shared: &Shared, socket: &OwnedFd, wake: &OwnedFd, options: &Options) {
    let name = shared.name();
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        if shared.lock().ending {
            return;
        }
        let accepted = match accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(connection) if DescriptorReserve::CLIENTS.includes(&connection) => Err(Errno::MFILE),
            accepted => accepted,
        };
        let connection = match accepted {
            Ok(connection) => connection,
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(error) => {
                client_log!(warn, "{name}: vhost-user: accept failed: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        let allow = shared.lock().own.allow.clone();
        if allow.is_some_and(|allow| !allow.allows(connection.as_fd())) {
            let peer = socket_peer(connection.as_fd());
            let peer = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string());
            options.denials.add(&format_args!("{name}: vhost-user"), &peer);
            continue;
        }
        let frontend = Arc::new(FrontendState::new(connection));
        let Some(_places) = take_places(shared, &options.places) else {
            client_log!(
                warn,
                "{name}: vhost-user: the limit max_clients is reached: a frontend was disconnected"
            );
            continue;
        };
        let disk = {
            let mut state = shared.lock();
            while state.holds > 0 && !state.ending {
                state = shared.wait(state);
            }
            if state.ending {
                return;
            }
            state.own.frontend = Some(Arc::clone(&frontend));
            state.disk.clone().expect("this thread removes the disk at the end")
        };
        tracing::debug!("{name}: vhost-user: frontend connected");
        Session::new(connection_config(disk, frontend, options)).run();
        shared.update(|state| state.own.frontend = None);
        tracing::debug!("{name}: vhost-user: frontend disconnected");
    }
}

/// Takes a place in each client limit. Returns `None` after [`PLACE_WAIT`], or if the export ends.
fn take_places(shared: &Shared, all: &[Arc<ConcurrencyLimit>]) -> Option<Vec<Permit>> {
    let end = Instant::now() + PLACE_WAIT;
    loop {
        if let Ok(taken) = ConcurrencyLimit::acquire_all(all) {
            return Some(taken);
        }
        let until = end.min(Instant::now() + PLACE_POLL);
        if shared.wait_until(until, |state| state.ending) || Instant::now() >= end {
            return None;
        }
    }
}

fn connection_config(disk: Arc<Disk>, frontend: Arc<FrontendState>, options: &Options) -> ConnectionConfig {
    let Options { budget, workers, busy_poll, .. } = options;
    let (budget, workers, busy_poll) = (Arc::clone(budget), workers.clone(), *busy_poll);
    ConnectionConfig { disk, frontend, budget, workers, busy_poll, inflight: None }
}

/// Serves the frontend at the other end of `socket` on this thread until it leaves. Intended for
/// fuzzing, which has no time for a socket file and a thread per frontend.
#[doc(hidden)]
pub fn serve_socket(device: Arc<dyn Device>, options: &Options, socket: OwnedFd) {
    let disk = Disk::new("disk", options.read_only, device, Arc::clone(&options.failures));
    let frontend = Arc::new(FrontendState::new(socket));
    Session::new(connection_config(Arc::new(disk), frontend, options)).run();
}

impl Drop for Export {
    fn drop(&mut self) {
        // After `begin_shutdown` the caller has already waited as long as it wanted to.
        let is_ending = self.shared.lock().ending;
        if !is_ending && !self.shutdown(SHUTDOWN_GRACE) {
            tracing::warn!("{}: vhost-user: requests are still in flight", self.name());
        }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?} at {})", self.name(), self.path.display())
    }
}
