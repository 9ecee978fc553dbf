//! Who has started a server, and what that is told: a service manager how far it is, others its
//! process number in a file; and a parent whose end is the server's.
#![expect(unsafe_code)]
// UNSAFETY: takes the sockets over that the manager has opened, which come as numbers.

use std::env;
use std::fs;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use sd_notify::NotifyState;
use tracing::warn;

/// What the manager says to us, and not to our children.
pub const VARIABLES: [&str; 4] = ["NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// How long a message waits for a manager that does not read its socket.
const NOTIFY_TIMEOUT: Duration = Duration::from_millis(250);

/// The socket for messages to the service manager, and the manager's address.
static MANAGER: LazyLock<io::Result<Option<(UnixDatagram, SocketAddr)>>> = LazyLock::new(|| {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(NOTIFY_TIMEOUT))?;
    Ok(Some((socket, SocketAddr::from_pathname(path)?)))
});

/// Opens the socket for messages to the service manager: at the end descriptors may have run out.
pub fn open_manager() {
    LazyLock::force(&MANAGER);
}

/// Sends states to the service manager, if there is one, as `sd_notify(3)` describes.
fn tell(states: &[NotifyState<'_>]) {
    let text = states.iter().fold(String::new(), |text, state| text + &state.to_string() + "\n");
    let sent = match &*MANAGER {
        Ok(None) => return,
        Ok(Some((socket, address))) => socket.send_to_addr(text.as_bytes(), address).err(),
        Err(error) => Some(io::Error::new(error.kind(), error.to_string())),
    };
    if let Some(error) = sent {
        warn!("the service manager cannot be told: {error}");
    }
}

/// All devices are there.
pub fn ready(devices: usize) {
    let plural = if devices == 1 { "" } else { "s" };
    tell(&[NotifyState::Ready, NotifyState::Status(&format!("{devices} device{plural}"))]);
}

/// Its file is read again; [`ready`] follows.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => warn!("the service manager cannot be told: {error}"),
    }
}

/// It ends, and is at this.
pub fn ending(at: &str) {
    tell(&[NotifyState::Stopping, NotifyState::Status(at)]);
}

/// The same, and it may take so long from now on.
pub fn ending_within(at: &str, time: Duration) {
    let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    tell(&[NotifyState::Stopping, NotifyState::Status(at), NotifyState::ExtendTimeoutUsec(micros)]);
}

/// The sockets that the service manager listens at for us (`sd_listen_fds(3)`). To be called once.
pub fn sockets() -> Result<Vec<OwnedFd>> {
    let sockets = sd_notify::listen_fds().context("LISTEN_FDS, the sockets of the service manager")?;
    // SAFETY: the manager has opened them for this process, and nothing else in it knows their
    // numbers.
    Ok(sockets.map(|socket| unsafe { OwnedFd::from_raw_fd(socket) }).collect())
}

/// The process number in a file, which goes with the server.
pub struct Pidfile(PathBuf);

impl Pidfile {
    /// Writes it, over one that is there.
    pub fn write(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).context("--pidfile: no path")?;
        fs::write(&path, format!("{}\n", getpid().as_raw_nonzero()))
            .with_context(|| format!("{}: cannot write the pidfile", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        let ours = getpid().as_raw_nonzero().to_string();
        // Another server may have written its own since.
        if fs::read_to_string(&self.0).is_ok_and(|text| text.trim() == ours) {
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// The process that has started us, as of now.
pub fn parent() -> Option<Pid> {
    getppid()
}

/// Ends this server, as SIGTERM does, when the process that has started it ends.
pub fn end_with(parent: Option<Pid>) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("--exit-with-parent")?;
    // It may have ended before that was said.
    if getppid() != parent {
        bail!("--exit-with-parent: the parent has ended already");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pidfile_goes_with_its_server_and_not_with_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        let written = Pidfile::write(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        fs::write(&path, "1\n").unwrap();
        drop(written);
        assert!(path.exists());
        drop(Pidfile::write(&path).unwrap());
        assert!(!path.exists());
        assert!(Pidfile::write(&dir.path().join("no/pid")).is_err());
    }
}
