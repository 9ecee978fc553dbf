//! A device at a socket.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use freestone_core::budget::Budget;
use freestone_core::device::{Device, Failures};
use freestone_core::unix_socket::{BindError, SocketFile, bind_to};
use freestone_core::workers::Workers;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use thiserror::Error;

use crate::disk::Disk;
use crate::queue::Guest;
use crate::session::{Session, guest};
use crate::vring::Around;

/// How long dropping an export waits for what is in flight.
pub const END_GRACE: Duration = Duration::from_secs(5);
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
}

impl Default for Options {
    fn default() -> Self {
        Self {
            read_only: false,
            failures: Arc::default(),
            budget: Budget::new(freestone_core::budget::DEFAULT_BYTES),
            workers: Workers::process().clone(),
        }
    }
}

/// A device that listens at a Unix socket. One frontend uses it at a time, with all its queues; the
/// next one is accepted when what the one before had in flight is done. Dropping it is
/// [`end`](Self::end) with [`END_GRACE`].
pub struct Export {
    path: PathBuf,
    name: String,
    shared: Arc<Shared>,
    file: Option<SocketFile>,
    /// Tells when the thread has ended.
    ended: Option<Receiver<()>>,
}

/// What the thread and its owner share.
struct Shared {
    state: Mutex<State>,
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    ending: bool,
    /// The frontend that is connected.
    guest: Option<Arc<Guest>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Export {
    /// Exports `device` as `name` at the socket `path`, which is made with mode 0600; one at which
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
        let (socket, file) = bind_to(path, BACKLOG).map_err(fail)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let shared =
            Arc::new(Shared { state: Mutex::default(), wake: wake.map_err(|errno| other(errno.into()))? });
        let disk = Arc::new(Disk {
            name: name.to_owned(),
            read_only: options.read_only || device.geometry().read_only,
            device,
            failures: Arc::clone(&options.failures),
        });
        let (tell, ended) = channel();
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("vhost-user".to_owned());
        let started = thread.spawn(move || {
            serve(&theirs, &socket, &disk, &options);
            drop((socket, disk));
            // Nobody may wait for it any more.
            let _ = tell.send(());
        });
        started.map_err(other)?;
        tracing::info!(path = %path.display(), "{name}: vhost-user");
        Ok(Self {
            path: path.to_path_buf(),
            name: name.to_owned(),
            shared,
            file: Some(file),
            ended: Some(ended),
        })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.lock().guest.is_some()
    }

    /// Removes the socket and ends the connection, once what is in flight is done. False: it was
    /// not after `grace`; the device is let go of when it is. A second call finds nothing to do.
    pub fn end(&mut self, grace: Duration) -> bool {
        drop(self.file.take());
        {
            let mut state = self.shared.lock();
            state.ending = true;
            if let Some(guest) = &state.guest {
                let _ = shutdown(&guest.socket, Shutdown::Both);
            }
        }
        // It fails only where the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
        let Some(ended) = self.ended.take() else { return true };
        !matches!(ended.recv_timeout(grace), Err(RecvTimeoutError::Timeout))
    }
}

/// Accepts one frontend after the other.
fn serve(shared: &Shared, socket: &OwnedFd, disk: &Arc<Disk>, options: &Options) {
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        if shared.lock().ending {
            return;
        }
        let connection = match accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(connection) => connection,
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(error) => {
                tracing::warn!("{}: vhost-user: no frontend can be accepted: {error}", disk.name);
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        let guest = guest(connection);
        {
            let mut state = shared.lock();
            if state.ending {
                return;
            }
            state.guest = Some(Arc::clone(&guest));
        }
        tracing::debug!("{}: vhost-user: a frontend is there", disk.name);
        let around = Around {
            disk: Arc::clone(disk),
            guest,
            budget: Arc::clone(&options.budget),
            workers: options.workers.clone(),
        };
        Session::new(around).run();
        shared.lock().guest = None;
        tracing::debug!("{}: vhost-user: the frontend has left", disk.name);
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if !self.end(END_GRACE) {
            tracing::warn!("{}: vhost-user: requests are still in flight", self.name);
        }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?} at {})", self.name, self.path.display())
    }
}
