//! A device at a socket.

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
use crate::vring::Around;

/// How long dropping an export waits for what is in flight.
pub const END_GRACE: Duration = Duration::from_secs(5);
/// How long a frontend waits for a place, before its connection is closed.
pub const PLACE_WAIT: Duration = Duration::from_secs(60);
/// How often it is looked whether there is one.
const PLACE_LOOK: Duration = Duration::from_millis(100);
/// Pause after a failed accept, which another one would most likely follow.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Frontends that wait for the one before.
const BACKLOG: i32 = 16;

/// A device cannot be exported at a path.
#[derive(Debug, Error)]
#[error("{path}: {source}")]
pub struct ListenError {
    /// Where.
    pub path: PathBuf,
    /// Why not.
    pub source: BindError,
}

/// How a device is exported.
#[derive(Debug, Clone)]
pub struct Options {
    /// Writes are refused, also where the device takes them.
    pub read_only: bool,
    /// Where requests that fail are counted.
    pub failures: Arc<Failures>,
    /// Bytes that may be held for requests; a request that finds none waits.
    pub budget: Arc<Budget>,
    /// Who does dear requests.
    pub workers: Workers,
    /// Before a queue's thread sleeps it looks for more requests for up to 32 us, where waits were that
    /// short of late; else it sleeps at once.
    pub look_out: bool,
    /// Who may connect to the socket that is made.
    pub access: Access,
    /// Of those who can, who may; `None`: all. Who is not on the list is closed as soon as accepted.
    pub allow: Option<AllowList>,
    /// Where those who may not are counted.
    pub denials: Arc<Denials>,
    /// The frontend takes a place in all of these; one that finds none waits for it, for up to
    /// [`PLACE_WAIT`].
    pub places: Vec<Arc<Places>>,
}

impl Options {
    /// As the device is, with the workers of the process.
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

/// A device that listens at a Unix socket. One frontend uses it at a time, with all its queues; the
/// next one is let in when what the one before had in flight is done. Dropping it is
/// [`end`](Self::end) with [`END_GRACE`].
pub struct Export {
    path: PathBuf,
    name: String,
    read_only: bool,
    shared: Arc<Shared>,
}

/// What the thread and its owner share. `state` is locked for a look or a change, or to wait for one.
struct Shared {
    state: Mutex<State>,
    /// A frontend has left or is let in again, or the thread has ended.
    changed: Condvar,
    /// Wakes the thread where it waits for a frontend.
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    /// What the next frontend gets; the thread takes it along when it ends.
    disk: Option<Arc<Disk>>,
    /// The thread has ended, and let go of the disk.
    ended: bool,
    /// Its socket, until it is to end.
    file: Option<SocketFile>,
    /// The frontend that is connected.
    guest: Option<Arc<Guest>>,
    /// While there are any, no frontend is let in.
    holds: usize,
    /// Who may be a frontend, where not all may.
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

    /// Waits for a change.
    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The same until `end`; `None` is after that.
    fn wait_until<'a>(&'a self, state: MutexGuard<'a, State>, end: Instant) -> Option<MutexGuard<'a, State>> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        Some(self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }

    /// The frontend sees the end of its connection although something is in flight; false.
    fn let_go(&self) -> bool {
        if let Some(guest) = &self.lock().guest {
            let _ = shutdown(&guest.socket, Shutdown::Both);
        }
        false
    }
}

impl Export {
    /// Exports `device` as `name` at the socket `path`, to which `options.access` lets others connect; one at which
    /// nobody accepts any more is replaced.
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
        let (theirs, label) = (Arc::clone(&shared), name.to_owned());
        let thread = std::thread::Builder::new().name("vhost-user".to_owned());
        let started = thread.spawn(move || {
            serve(&theirs, &socket, &label, &options);
            drop(socket);
            let disk = theirs.lock().disk.take();
            drop(disk);
            theirs.lock().ended = true;
            theirs.changed.notify_all();
        });
        started.map_err(other)?;
        tracing::info!(path = %path.display(), "{name}: vhost-user");
        Ok(Self { path: path.to_path_buf(), name: name.to_owned(), read_only, shared })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether frontends cannot write.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.lock().guest.is_some()
    }

    /// Who may connect from now on, `None`: whoever can. A frontend that is there stays.
    pub fn set_allow(&self, allow: Option<AllowList>) {
        self.shared.lock().allow = allow;
    }

    /// The list of who may connect, where there is one.
    pub fn allow(&self) -> Option<AllowList> {
        self.shared.lock().allow.clone()
    }

    /// Lets no frontend in until what it returns is dropped; one that is connected stays.
    pub fn hold(&self) -> Held<'_> {
        self.shared.lock().holds += 1;
        Held(self)
    }

    /// The device has another size: tells the frontend that is connected, if it can be told.
    pub fn resized(&self) {
        let guest = self.shared.lock().guest.clone();
        if let Some(guest) = guest {
            guest.tell_config_change();
        }
    }

    /// Gives the next frontend another device; for one that is connected nothing changes.
    pub fn replace(&self, device: Arc<dyn Device>, failures: Arc<Failures>) {
        let disk = Arc::new(Disk::new(&self.name, self.read_only, device, failures));
        let mut state = self.shared.lock();
        let old = if state.disk.is_some() { state.disk.replace(disk) } else { Some(disk) };
        drop(state);
        // It may wait for a disk: not under the lock.
        drop(old);
    }

    /// Removes the socket, and has the connection end once what is in flight is done.
    pub fn begin_to_end(&self) {
        let mut state = self.shared.lock();
        let file = state.file.take();
        if let Some(guest) = &state.guest {
            hear_no_more(guest);
        }
        drop(state);
        drop(file);
        self.shared.changed.notify_all();
        freestone_core::eventfd::wake(&self.shared.wake);
    }

    /// The same, and waits for that. False: it was not done after `grace`; the device is let go of
    /// when it is. A second call finds nothing to do.
    pub fn end(&self, grace: Duration) -> bool {
        let end = Instant::now() + grace;
        self.begin_to_end();
        let mut state = self.shared.lock();
        while !state.ended {
            let Some(changed) = self.shared.wait_until(state, end) else { return self.shared.let_go() };
            state = changed;
        }
        true
    }
}

/// Nothing of the frontend is listened to any more, so its connection ends. It sees the end only when
/// nothing of it is in flight: then its memory is its own again.
fn hear_no_more(guest: &Guest) {
    // Where the frontend has gone already, it has ended.
    let _ = shutdown(&guest.socket, Shutdown::Read);
}

/// No frontend is let in while this lives.
pub struct Held<'a>(&'a Export);

impl Held<'_> {
    /// Whether one was there before.
    pub fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// Ends the connection, with no answer to what it has in flight from now on: what a loss of power
    /// looks like. Whether there was one.
    pub fn cut(&self) -> bool {
        let guest = self.0.shared.lock().guest.clone();
        let Some(guest) = guest else { return false };
        guest.silent.store(true, Ordering::SeqCst);
        hear_no_more(&guest);
        true
    }

    /// Waits until it has ended. False: it has not until `end`, and is still in a call of the device.
    pub fn wait_gone(&self, end: Instant) -> bool {
        let shared = &self.0.shared;
        let mut state = shared.lock();
        while state.guest.is_some() {
            let Some(changed) = shared.wait_until(state, end) else { return shared.let_go() };
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

/// Accepts one frontend after the other.
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
                client_log!(warn, "{name}: vhost-user: no frontend can be accepted: {error}");
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
        let Some(_places) = places(shared, &options.places) else {
            client_log!(warn, "{name}: vhost-user: a frontend finds no place (max_clients) and is sent away");
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
            state.disk.clone().expect("it goes when this ends")
        };
        tracing::debug!("{name}: vhost-user: a frontend is there");
        Session::new(around(disk, guest, options)).run();
        shared.lock().guest = None;
        shared.changed.notify_all();
        tracing::debug!("{name}: vhost-user: the frontend has left");
    }
}

/// The places of a frontend; `None` where there is none in time, or the export ends.
fn places(shared: &Shared, all: &[Arc<Places>]) -> Option<Vec<Place>> {
    let end = Instant::now() + PLACE_WAIT;
    loop {
        if let Ok(taken) = Places::take_all(all) {
            return Some(taken);
        }
        let state = shared.lock();
        if state.is_ending() {
            return None;
        }
        let state = shared.wait_until(state, end.min(Instant::now() + PLACE_LOOK));
        if state.is_none() && Instant::now() >= end {
            return None;
        }
    }
}

/// What the queues of a frontend need.
fn around(disk: Arc<Disk>, guest: Arc<Guest>, options: &Options) -> Around {
    let Options { budget, workers, look_out, .. } = options;
    let (budget, workers, look_out) = (Arc::clone(budget), workers.clone(), *look_out);
    Around { disk, guest, budget, workers, look_out, inflight: None }
}

/// Serves the frontend at the other end of `socket` on this thread, until it leaves. For checks of very
/// many frontends, which have no time for a socket in a directory and a thread each.
#[doc(hidden)]
pub fn serve_here(device: Arc<dyn Device>, options: &Options, socket: OwnedFd) {
    let disk = Disk::new("disk", options.read_only, device, Arc::clone(&options.failures));
    let guest = Arc::new(Guest::new(socket));
    Session::new(around(Arc::new(disk), guest, options)).run();
}

impl Drop for Export {
    fn drop(&mut self) {
        // Who has told it to end has waited as long as it wanted.
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
