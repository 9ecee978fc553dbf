//! The public handle of a device exported at a Unix socket.

use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use freestone_core::allow::{AllowList, Denials, peer_of};
use freestone_core::budget::Budget;
use freestone_core::client_log;
use freestone_core::descriptor_reserve::Reserve;
use freestone_core::device::{Device, Disk, Failures};
use freestone_core::places::{Place, Places};
use freestone_core::unix_socket::{Access, BindError, SocketFile, bind_to};
use freestone_core::workers::Workers;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use thiserror::Error;

use crate::guest::Guest;
use crate::session::Session;
use crate::vring::ConnectionConfig;

/// How long dropping an export waits for requests in flight.
pub const END_GRACE: Duration = Duration::from_secs(5);
/// How long a frontend may wait for a free client place before its connection is closed.
pub const PLACE_WAIT: Duration = Duration::from_secs(60);
/// Poll interval while a frontend waits for a place.
const PLACE_POLL: Duration = Duration::from_millis(100);
/// Pause after a failed accept, because the next one would most likely fail too.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Backlog of the socket: frontends that wait for the current one to leave.
const BACKLOG: i32 = 16;

/// An error from listening at a socket path.
#[derive(Debug, Error)]
#[error("{path}: {source}")]
pub struct ListenError {
    /// Path of the socket.
    pub path: PathBuf,
    /// Error of the bind.
    pub source: BindError,
}

/// Options of an export.
#[derive(Debug, Clone)]
pub struct Options {
    /// Refuses writes even if the device accepts them.
    pub read_only: bool,
    /// Counters of failed requests.
    pub failures: Arc<Failures>,
    /// Limit of bytes in flight. A request that exceeds the limit waits.
    pub budget: Arc<Budget>,
    /// Threads that run expensive requests.
    pub workers: Workers,
    /// Polls the ring for up to 32 us before a queue's thread sleeps, if recent waits were that
    /// short.
    pub look_out: bool,
    /// Permissions of the new socket.
    pub access: Access,
    /// Peers allowed to use the export; `None` allows all. Other connections are closed immediately
    /// after accept.
    pub allow: Option<AllowList>,
    /// Counter of denied connections.
    pub denials: Arc<Denials>,
    /// Limits on clients. A frontend takes a place in each, and waits up to [`PLACE_WAIT`] for it.
    pub places: Vec<Arc<Places>>,
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
            look_out: true,
            access: Access::default(),
            allow: None,
            denials: Arc::default(),
            places: Vec::new(),
        }
    }
}

/// A device exported at a Unix socket. It serves one frontend at a time, with all its queues. The
/// next frontend is served when all requests of the previous one are done. Dropping the export
/// calls [`end`](Self::end) with [`END_GRACE`].
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
    /// Wakes the thread while it waits for a frontend.
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    /// The device for the next frontend. The thread removes it at the end.
    disk: Option<Arc<Disk>>,
    /// The thread has ended and released the disk.
    ended: bool,
    /// The socket file; `None` once the export is ending.
    file: Option<SocketFile>,
    guest: Option<Arc<Guest>>,
    /// Number of holds. While it is not zero, no new frontend is served.
    holds: usize,
    /// Peers allowed to connect; `None` allows all.
    allow: Option<AllowList>,
}

impl State {
    fn is_ending(&self) -> bool {
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

    /// Waits for a change until `end`. Returns `None` after that.
    fn wait_until<'a>(&'a self, state: MutexGuard<'a, State>, end: Instant) -> Option<MutexGuard<'a, State>> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        Some(self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Closes the connection although requests are in flight. Returns false.
    fn force_close(&self) -> bool {
        if let Some(guest) = &self.lock().guest {
            let _ = shutdown(&guest.socket, Shutdown::Both);
        }
        false
    }
}

impl Export {
    /// Exports `device` as `name` at the socket `path`. `options.access` sets the socket's
    /// permissions. A stale socket, which no process accepts at, is replaced.
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

    /// Returns true if frontends cannot write.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns true if a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.lock().guest.is_some()
    }

    /// Returns true if the connected driver may have cached content, because one of its queues has
    /// run since it connected or since the last device reset.
    pub fn is_driven(&self) -> bool {
        self.shared.lock().guest.as_ref().is_some_and(|guest| guest.driven.load(Ordering::SeqCst))
    }

    /// Sets the peers allowed to connect from now on; `None` allows all. A connected frontend
    /// stays.
    pub fn set_allow(&self, allow: Option<AllowList>) {
        self.shared.lock().allow = allow;
    }

    /// Returns the peers allowed to connect, or `None` if all are.
    pub fn allow(&self) -> Option<AllowList> {
        self.shared.lock().allow.clone()
    }

    /// Holds new frontends until the returned guard is dropped. A connected frontend stays.
    pub fn hold(&self) -> Held<'_> {
        self.shared.lock().holds += 1;
        Held(self)
    }

    /// Notifies the connected frontend that the device's size has changed, if it supports the
    /// message.
    pub fn resized(&self) {
        let guest = self.shared.lock().guest.clone();
        if let Some(guest) = guest {
            guest.notify_config_change();
        }
    }

    /// Replaces the device for the next frontend. A connected frontend keeps the old device.
    pub fn replace(&self, device: Arc<dyn Device>, failures: Arc<Failures>) {
        let disk = Arc::new(Disk::new(&self.name, self.read_only, device, failures));
        let mut state = self.shared.lock();
        let old = if state.disk.is_some() { state.disk.replace(disk) } else { Some(disk) };
        drop(state);
        // Dropping may wait for a disk, so not under the lock.
        drop(old);
    }

    /// Starts to end the export: removes the socket, and ends the connection when its requests in
    /// flight are done.
    pub fn begin_to_end(&self) {
        let mut state = self.shared.lock();
        let file = state.file.take();
        if let Some(guest) = &state.guest {
            stop_reading(guest);
        }
        drop(state);
        drop(file);
        self.shared.changed.notify_all();
        freestone_core::eventfd::wake(&self.shared.wake);
    }

    /// Ends the export and waits until its requests in flight are done. If that takes longer than
    /// `grace`, closes the connection and returns false. The thread then releases the device when the
    /// requests are done. Further calls only wait.
    pub fn end(&self, grace: Duration) -> bool {
        let end = Instant::now() + grace;
        self.begin_to_end();
        let mut state = self.shared.lock();
        while !state.ended {
            let Some(changed) = self.shared.wait_until(state, end) else { return self.shared.force_close() };
            state = changed;
        }
        true
    }
}

/// Stops reading from the frontend, so that its session ends. The frontend sees the end of the
/// connection only when none of its requests is in flight; it may then reuse its memory.
fn stop_reading(guest: &Guest) {
    // An error means that the frontend has already left.
    let _ = shutdown(&guest.socket, Shutdown::Read);
}

/// A guard that keeps an export from serving new frontends while it lives.
pub struct Held<'a>(&'a Export);

impl Held<'_> {
    /// Returns true if a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// Ends the connection without completing its requests in flight, like a loss of power. Returns
    /// false if no frontend is connected.
    pub fn cut(&self) -> bool {
        let guest = self.0.shared.lock().guest.clone();
        let Some(guest) = guest else { return false };
        guest.silent.store(true, Ordering::SeqCst);
        stop_reading(&guest);
        true
    }

    /// Waits until the connection has ended. If the device still has requests at `end`, closes the
    /// connection and returns false.
    pub fn wait_gone(&self, end: Instant) -> bool {
        let shared = &self.0.shared;
        let mut state = shared.lock();
        while state.guest.is_some() {
            let Some(changed) = shared.wait_until(state, end) else { return shared.force_close() };
            state = changed;
        }
        true
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.shared.lock().holds -= 1;
        self.0.shared.changed.notify_all();
    }
}

fn serve(shared: &Shared, socket: &OwnedFd, name: &str, options: &Options) {
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        if shared.lock().is_ending() {
            return;
        }
        let accepted = match accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(connection) if Reserve::OF_CLIENTS.includes(&connection) => Err(Errno::MFILE),
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
        if allow.is_some_and(|allow| !allow.lets_in(connection.as_fd())) {
            let peer = peer_of(connection.as_fd());
            let peer = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string());
            options.denials.add(&format_args!("{name}: vhost-user"), &peer);
            continue;
        }
        let guest = Arc::new(Guest::new(connection));
        let Some(_places) = take_places(shared, &options.places) else {
            client_log!(
                warn,
                "{name}: vhost-user: the limit max_clients is reached: a frontend was disconnected"
            );
            continue;
        };
        let disk = {
            let mut state = shared.lock();
            while state.holds > 0 && !state.is_ending() {
                state = shared.wait(state);
            }
            if state.is_ending() {
                return;
            }
            state.guest = Some(Arc::clone(&guest));
            state.disk.clone().expect("this thread removes the disk at the end")
        };
        tracing::debug!("{name}: vhost-user: frontend connected");
        Session::new(connection_config(disk, guest, options)).run();
        shared.lock().guest = None;
        shared.changed.notify_all();
        tracing::debug!("{name}: vhost-user: frontend disconnected");
    }
}

/// Takes a frontend's places. Returns `None` after a timeout or if the export ends.
fn take_places(shared: &Shared, all: &[Arc<Places>]) -> Option<Vec<Place>> {
    let end = Instant::now() + PLACE_WAIT;
    loop {
        if let Ok(taken) = Places::take_all(all) {
            return Some(taken);
        }
        let state = shared.lock();
        if state.is_ending() {
            return None;
        }
        let state = shared.wait_until(state, end.min(Instant::now() + PLACE_POLL));
        if state.is_none() && Instant::now() >= end {
            return None;
        }
    }
}

fn connection_config(disk: Arc<Disk>, guest: Arc<Guest>, options: &Options) -> ConnectionConfig {
    let Options { budget, workers, look_out, .. } = options;
    let (budget, workers, look_out) = (Arc::clone(budget), workers.clone(), *look_out);
    ConnectionConfig { disk, guest, budget, workers, look_out, inflight: None }
}

/// Serves the frontend at the other end of `socket` on this thread until it leaves. Intended for
/// fuzzing, which has no time for a socket file and a thread per frontend.
#[doc(hidden)]
pub fn serve_here(device: Arc<dyn Device>, options: &Options, socket: OwnedFd) {
    let disk = Disk::new("disk", options.read_only, device, Arc::clone(&options.failures));
    let guest = Arc::new(Guest::new(socket));
    Session::new(connection_config(Arc::new(disk), guest, options)).run();
}

impl Drop for Export {
    fn drop(&mut self) {
        // After `begin_to_end` the caller has already waited as long as it wanted.
        let is_ending = self.shared.lock().is_ending();
        if !is_ending && !self.end(END_GRACE) {
            tracing::warn!("{}: vhost-user: requests are still in flight", self.name);
        }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?} at {})", self.name, self.path.display())
    }
}
