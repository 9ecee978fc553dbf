//! Relations to the process that started the server: notifications and sockets of a service manager, the
//! pidfile, and the exit with the parent process.
#![expect(unsafe_code)]
// UNSAFETY: takes over sockets of the service manager, which are passed as descriptor numbers.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;
use std::{env, fs, io, thread};

use anyhow::{Context as _, Result, bail};
use freestone_server::recovery::{self, DescriptorStore};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr};
use rustix::pipe::PipeFlags;
use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getppid, kill_process, pidfd_open, set_parent_process_death_signal,
};
use sd_notify::NotifyState;
use tracing::warn;

use crate::pidfd;

/// Environment variables of the service manager, which child processes must not inherit.
pub const VARIABLES: [&str; 5] = ["NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE"];

/// Longest wait until the service manager has stored descriptors.
const STORE_TIMEOUT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Longest wait to send a message to a service manager that does not read its socket.
const NOTIFY_TIMEOUT: Duration = Duration::from_millis(250);

/// The socket for messages to the service manager, and the manager's address. `None` without a service
/// manager.
static MANAGER: LazyLock<io::Result<Option<(UnixDatagram, SocketAddr)>>> = LazyLock::new(|| {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(NOTIFY_TIMEOUT))?;
    Ok(Some((socket, SocketAddr::from_pathname(path)?)))
});

/// Opens the socket for messages to the service manager at the start, because all descriptors may be in use
/// later.
pub fn open_manager() {
    LazyLock::force(&MANAGER);
}

/// Sends states to the service manager, if there is one, as `sd_notify(3)` describes.
fn notify(states: &[NotifyState<'_>]) {
    let text = states.iter().fold(String::new(), |text, state| text + &state.to_string() + "\n");
    let sent = match &*MANAGER {
        Ok(None) => return,
        Ok(Some((socket, address))) => socket.send_to_addr(text.as_bytes(), address).err(),
        Err(error) => Some(io::Error::new(error.kind(), error.to_string())),
    };
    if let Some(error) = sent {
        warn!("cannot notify the service manager: {error}");
    }
}

/// Reports that the server is ready, and the number of devices as its status.
pub fn notify_ready(devices: usize) {
    let plural = if devices == 1 { "" } else { "s" };
    notify(&[NotifyState::Ready, NotifyState::Status(&format!("{devices} device{plural}"))]);
}

/// Reports that the configuration is being reloaded. The caller must call [`notify_ready`] afterwards.
pub fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => warn!("cannot notify the service manager: {error}"),
    }
}

/// Reports that the server is stopping, with the current step as its status.
pub fn notify_stopping(step: &str) {
    notify(&[NotifyState::Stopping, NotifyState::Status(step)]);
}

/// Reports that the server is stopping, and extends the timeout of the manager to `time` from now.
pub fn notify_stopping_within(step: &str, time: Duration) {
    let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    notify(&[NotifyState::Stopping, NotifyState::Status(step), NotifyState::ExtendTimeoutUsec(micros)]);
}

/// Descriptors of the service manager.
#[derive(Default)]
pub struct Descriptors {
    /// Listening sockets.
    pub sockets: Vec<OwnedFd>,
    /// Files that a killed server has stored, by name.
    pub stored: Vec<(String, OwnedFd)>,
}

/// Takes over the descriptors of the service manager (`sd_listen_fds(3)`). Must be called only once, because the
/// result owns the descriptors.
pub fn take_descriptors() -> Result<Descriptors> {
    let all = sd_notify::listen_fds().context("LISTEN_FDS, the sockets of the service manager")?;
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').chain(std::iter::repeat("")).map(str::to_owned);
    let mut taken = Descriptors::default();
    for (descriptor, name) in all.zip(names) {
        // SAFETY: the manager has opened the descriptor for this process, and no other code in it uses it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        if recovery::is_family_file(&name) {
            taken.stored.push((name, descriptor));
        } else {
            taken.sockets.push(descriptor);
        }
    }
    Ok(taken)
}

/// Returns the number of descriptors that the service manager stores for this service (`FileDescriptorStoreMax=`),
/// or `None` if it stores none. systemd reports the number since version 254.
pub fn max_stored() -> Option<usize> {
    env::var("FDSTORE").ok()?.parse().ok().filter(|max| *max > 0 && env::var_os("NOTIFY_SOCKET").is_some())
}

/// The service manager's store of descriptors.
pub struct ManagerStore;

impl DescriptorStore for ManagerStore {
    fn store(&self, descriptors: &[(String, BorrowedFd<'_>)]) -> io::Result<()> {
        for (name, descriptor) in descriptors {
            // A file is always readable, so the manager must not poll it.
            let states = [NotifyState::Custom("FDSTORE=1"), NotifyState::Custom("FDPOLL=0")];
            send_with(&states, name, Some(*descriptor))?;
        }
        // The manager has handled all earlier messages when it closes the pipe of this one.
        let (waits, passed) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        send_message("BARRIER=1\n", Some(passed.as_fd()))?;
        drop(passed);
        let closed = poll(&mut [PollFd::new(&waits, PollFlags::empty())], Some(&STORE_TIMEOUT))?;
        if closed > 0 { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    fn remove(&self, names: &[String]) -> io::Result<()> {
        names.iter().try_for_each(|name| send_with(&[NotifyState::Custom("FDSTOREREMOVE=1")], name, None))
    }
}

fn send_with(states: &[NotifyState<'_>], name: &str, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let text = states.iter().fold(format!("FDNAME={name}\n"), |text, state| text + &state.to_string() + "\n");
    send_message(&text, descriptor)
}

/// Sends a message, with a descriptor if there is one, to the service manager.
fn send_message(text: &str, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let Ok(Some((socket, address))) = &*MANAGER else { return Err(io::ErrorKind::NotConnected.into()) };
    let address = SocketAddrUnix::new(address.as_pathname().ok_or(io::ErrorKind::Unsupported)?)?;
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    let descriptors = descriptor.as_slice();
    if !descriptors.is_empty() {
        // The room is sized for it.
        let _ = ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let text = [IoSlice::new(text.as_bytes())];
    sendmsg_addr(socket, &address, &text, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Guard of the pidfile. Dropping it removes the file.
pub struct Pidfile(PathBuf);

impl Pidfile {
    /// Writes the pidfile, and replaces an existing file.
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
        // Another server may have replaced the file, which must then remain.
        if fs::read_to_string(&self.0).is_ok_and(|text| text.trim() == ours) {
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// Returns the process ID of the current parent process.
pub fn parent() -> Option<Pid> {
    getppid()
}

/// Sends SIGTERM to this process when the parent process ends. If the kernel has no descriptor for the parent, the
/// signal is sent when the thread that started this process ends.
pub fn end_with_parent(parent: Option<Pid>) -> Result<()> {
    let handle = parent.and_then(|parent| pidfd_open(parent, PidfdFlags::empty()).ok());
    if handle.is_none() {
        set_parent_process_death_signal(Some(Signal::TERM)).context("--exit-with-parent")?;
    }
    // The parent may have ended before the request, which then has no effect. Its number may belong to another process.
    if getppid() != parent {
        bail!("--exit-with-parent: the parent has ended already");
    }
    if let Some(handle) = handle {
        let wait = move || {
            if pidfd::wait(&handle, None).is_ok() {
                // A process may always send a signal to itself.
                let _ = kill_process(getpid(), Signal::TERM);
            }
        };
        let thread = thread::Builder::new().name("parent".into()).spawn(wait);
        thread.context("--exit-with-parent: cannot start a thread")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pidfile_drop_removes_only_own_file() {
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
