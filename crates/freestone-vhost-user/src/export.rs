//! The public handle of a device exported at a Unix socket.

use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use freestone_core::allow::{AllowList, Denials, socket_peer};
use freestone_core::budget::Budget;
use freestone_core::client_log;
use freestone_core::concurrency_limit::{ConcurrencyLimit, Permit};
use freestone_core::descriptor_reserve::DescriptorReserve;
use freestone_core::device::{Device, Disk, Failures};
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
    name: String,
    read_only: bool,
    shared: Arc<Shared>,
}

/// State shared by the export and its thread. `state` is locked only for short accesses and for
/// condition waits.
struct Shared {
    state: Mutex<State>,
    /// Signaled when a frontend leaves, a hold ends, or the thread ends.
    changed: Condvar,
    /// Wakes the export's thread while it waits for a frontend.
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    /// The device for the next frontend. The export's thread removes it at the end.
    disk: Option<Arc<Disk>>,
    /// True once the export's thread has ended and released the disk.
    ended: bool,
    /// The socket file; `None` once the export is ending.
    file: Option<SocketFile>,
    frontend: Option<Arc<FrontendState>>,
    /// Number of holds. While it is not zero, no new frontend is served.
    holds: usize,
    /// Peers allowed to connect; `None` allows all.
    allow: Option<AllowList>,
}

impl State {
    fn is_shutting_down(&self) -> bool {
        self.file.is_none()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change of the state, at most until `end`. Returns `None` if `end` has passed.
    fn wait_until<'a>(&'a self, state: MutexGuard<'a, State>, end: Instant) -> Option<MutexGuard<'a, State>> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        Some(self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Closes the connection although requests are in flight. Returns false, the result of a timeout.
    fn force_close(&self) -> bool {
        if let Some(frontend) = &self.lock().frontend {
            let _ = shutdown(&frontend.socket, Shutdown::Both);
        }
        false
    }
}

impl Export {
    /// Exports `device` as `name` at the socket `path`. `options.access` sets the socket's permissions. A
    /// stale socket, at which no process accepts connections, is replaced.
    ///
    /// # Errors
    /// See [`ListenError`].
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
        let disk = Disk::new(name, options.read_only, device, Arc::clone(&options.failures));
        let read_only = disk.read_only;
        let allow = options.allow.clone();
        let state = State { disk: Some(Arc::new(disk)), file: Some(file), allow, ..State::default() };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            wake: wake.map_err(|errno| other(errno.into()))?,
        });
        let (thread_shared, label) = (Arc::clone(&shared), name.to_owned());
        let thread = std::thread::Builder::new().name("vhost-user".to_owned());
        let started = thread.spawn(move || {
            serve(&thread_shared, &socket, &label, &options);
            drop(socket);
            let disk = thread_shared.lock().disk.take();
            drop(disk);
            thread_shared.lock().ended = true;
            thread_shared.changed.notify_all();
        });
        started.map_err(other)?;
        tracing::info!(path = %path.display(), "{name}: vhost-user");
        Ok(Self { path: path.to_path_buf(), name: name.to_owned(), read_only, shared })
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name of the exported device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns true if the export refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns true if a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.lock().frontend.is_some()
    }

    /// Returns true if the connected driver may have cached content, because one of its queues has run since
    /// it connected or since the last device reset.
    pub fn has_driver(&self) -> bool {
        self.shared
            .lock()
            .frontend
            .as_ref()
            .is_some_and(|frontend| frontend.has_driver.load(Ordering::SeqCst))
    }

    /// Sets the peers allowed to connect from now on; `None` allows all. A connected frontend stays
    /// connected.
    pub fn set_allow_list(&self, allow: Option<AllowList>) {
        self.shared.lock().allow = allow;
    }

    /// Returns the peers allowed to connect, or `None` if all peers are.
    pub fn allow_list(&self) -> Option<AllowList> {
        self.shared.lock().allow.clone()
    }

    /// Holds new frontends until the returned guard is dropped. A connected frontend stays connected.
    pub fn hold(&self) -> FrontendHold<'_> {
        self.shared.lock().holds += 1;
        FrontendHold(self)
    }

    /// Notifies the connected frontend that the size of the device has changed, if the frontend supports the
    /// message.
    pub fn notify_resize(&self) {
        let frontend = self.shared.lock().frontend.clone();
        if let Some(frontend) = frontend {
            frontend.notify_config_change();
        }
    }

    /// Replaces the device for the next frontend. A connected frontend keeps the old device.
    pub fn replace(&self, device: Arc<dyn Device>, failures: Arc<Failures>) {
        let disk = Arc::new(Disk::new(&self.name, self.read_only, device, failures));
        let mut state = self.shared.lock();
        let old = if state.disk.is_some() { state.disk.replace(disk) } else { Some(disk) };
        drop(state);
        // Dropping the old disk may wait for I/O, so the lock is not held.
        drop(old);
    }

    /// Starts to end the export: removes the socket, and ends the connection when its requests in
    /// flight are done.
    pub fn begin_shutdown(&self) {
        let mut state = self.shared.lock();
        let file = state.file.take();
        if let Some(frontend) = &state.frontend {
            stop_reading(frontend);
        }
        drop(state);
        drop(file);
        self.shared.changed.notify_all();
        freestone_core::eventfd::wake(&self.shared.wake);
    }

    /// Ends the export and waits until its requests in flight are done. If that takes longer than `grace`,
    /// closes the connection and returns false. The export's thread then releases the device when the
    /// requests are done. Further calls only wait.
    pub fn shutdown(&self, grace: Duration) -> bool {
        let end = Instant::now() + grace;
        self.begin_shutdown();
        let mut state = self.shared.lock();
        while !state.ended {
            let Some(changed) = self.shared.wait_until(state, end) else { return self.shared.force_close() };
            state = changed;
        }
        true
    }
}

/// Stops reading from the frontend, so that its session ends. The frontend sees the end of the connection
/// only when none of its requests is in flight, so that it can reuse its memory.
fn stop_reading(frontend: &FrontendState) {
    // An error means that the frontend has already left.
    let _ = shutdown(&frontend.socket, Shutdown::Read);
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
        let frontend = self.0.shared.lock().frontend.clone();
        let Some(frontend) = frontend else { return false };
        frontend.stopped_publishing.store(true, Ordering::SeqCst);
        stop_reading(&frontend);
        true
    }

    /// Waits until the connection has ended. If the device still has requests in flight at `end`, closes the
    /// connection and returns false.
    pub fn wait_disconnected(&self, end: Instant) -> bool {
        let shared = &self.0.shared;
        let mut state = shared.lock();
        while state.frontend.is_some() {
            let Some(changed) = shared.wait_until(state, end) else { return shared.force_close() };
            state = changed;
        }
        true
    }
}

impl Drop for FrontendHold<'_> {
    fn drop(&mut self) {
        self.0.shared.lock().holds -= 1;
        self.0.shared.changed.notify_all();
    }
}

fn serve(shared: &Shared, socket: &OwnedFd, name: &str, options: &Options) {
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        if shared.lock().is_shutting_down() {
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
        let allow = shared.lock().allow.clone();
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
            while state.holds > 0 && !state.is_shutting_down() {
                state = shared.wait(state);
            }
            if state.is_shutting_down() {
                return;
            }
            state.frontend = Some(Arc::clone(&frontend));
            state.disk.clone().expect("this thread removes the disk at the end")
        };
        tracing::debug!("{name}: vhost-user: frontend connected");
        Session::new(connection_config(disk, frontend, options)).run();
        shared.lock().frontend = None;
        shared.changed.notify_all();
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
        let state = shared.lock();
        if state.is_shutting_down() {
            return None;
        }
        let state = shared.wait_until(state, end.min(Instant::now() + PLACE_POLL));
        if state.is_none() && Instant::now() >= end {
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
        let is_shutting_down = self.shared.lock().is_shutting_down();
        if !is_shutting_down && !self.shutdown(SHUTDOWN_GRACE) {
            tracing::warn!("{}: vhost-user: requests are still in flight", self.name);
        }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?} at {})", self.name, self.path.display())
    }
}
