//! A process of this program as the holder. The process outlives the server that has started it, and listens at a
//! socket in the state directory.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotConnected, NotFound};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use uuid::Uuid;

use super::holder::{HeldFiles, Holder};
use super::messages::{Kind, Message, check_peer, of_family, receive, send};

/// Name of the holder's socket in the state directory.
const SOCKET: &str = "holder";
/// Longest wait for an answer of the holder.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Program and arguments of a holder. Its socket is its standard input, and the path of the socket its last
/// argument.
pub type HolderProgram = Vec<OsString>;

/// The holder of a state directory.
pub struct HolderProcess {
    program: HolderProgram,
    /// The state directory.
    state: PathBuf,
    /// Socket to the process; `None` while there is no process.
    socket: Option<OwnedFd>,
    /// The process, if this server has started it.
    child: Option<Child>,
}

/// A connection to a holder.
struct Found {
    socket: OwnedFd,
    families: Vec<HeldFiles>,
    /// Process id of the holder. The socket's peer is the process that created it, the server that started the holder.
    pid: u32,
}

impl HolderProcess {
    pub fn new(state: &Path, program: HolderProgram) -> Self {
        Self { program, state: state.to_owned(), socket: None, child: None }
    }

    /// Starts a holder, with a socket that replaces the one of a holder that has ended.
    fn spawn(&self) -> io::Result<Child> {
        let (path, _dir) = short_path(&self.state)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != NotFound => return Err(error),
            _ => {}
        }
        let socket = new_socket()?;
        bind(&socket, &SocketAddrUnix::new(&path)?)?;
        listen(&socket, 1)?;
        let [program, args @ ..] = &self.program[..] else { return Err(NotFound.into()) };
        let mut command = Command::new(program);
        // The process has a group of its own, so that Ctrl-C does not end it with the server. The server's output
        // stays with the server, because readers wait for its end.
        command.args(args).arg(self.state.join(SOCKET)).arg0("freestone").process_group(0).current_dir("/");
        command.env_clear().stdin(socket).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn()
    }

    /// Sends a request and waits for its answer. Closes the connection if there is none: a late one would be
    /// taken for the answer of the next request.
    fn request(&mut self, kind: Kind, files: Option<&[BorrowedFd<'_>]>) -> io::Result<()> {
        let socket = self.socket.as_ref().ok_or(NotConnected)?;
        let answer = send(socket, kind, files).and_then(|()| receive(socket));
        match answer.map(|message| message.map(|message| message.kind)) {
            Ok(Some(Kind::Done(_))) => Ok(()),
            Ok(Some(Kind::Failed(errno))) => Err(errno.into()),
            answer => {
                self.socket = None;
                Err(answer.err().unwrap_or(Errno::CONNRESET).into())
            }
        }
    }
}

impl Holder for HolderProcess {
    fn connect(&mut self) -> io::Result<Vec<HeldFiles>> {
        self.socket = None;
        if let Some(child) = &mut self.child
            && child.try_wait().is_ok_and(|status| status.is_some())
        {
            self.child = None;
        }
        let Found { socket, families, .. } = match connect_to(&self.state) {
            // No process listens, or the process is ending.
            Err(error)
                if matches!(error.kind(), NotFound | ConnectionRefused | ConnectionReset | BrokenPipe) =>
            {
                self.child = Some(self.spawn()?);
                connect_to(&self.state)?
            }
            result => result?,
        };
        self.socket = Some(socket);
        Ok(families)
    }

    fn has_ended(&self) -> bool {
        let Some(socket) = &self.socket else { return true };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut polled = [PollFd::new(socket, PollFlags::empty())];
        poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
    }

    fn watched(&self) -> Option<OwnedFd> {
        self.socket.as_ref()?.try_clone().ok()
    }

    fn hold(&mut self, id: Uuid, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.request(Kind::Hold(id), Some(files))
    }

    fn release(&mut self, id: Uuid) -> io::Result<()> {
        self.request(Kind::Release(id), None)
    }

    fn stored_names(&self, _id: Uuid) -> Option<Vec<String>> {
        // The successor connects to the process at its socket.
        None
    }

    fn leave(&mut self) {
        // A process that holds nothing ends then.
        self.socket = None;
    }
}

/// Returns the process id of the holder of a state directory, or `None` if no process holds families for it.
pub(crate) fn pid_of_holder(state: &Path) -> Option<u32> {
    let Found { families, pid, .. } = connect_to(state).ok()?;
    (!families.is_empty()).then_some(pid)
}

/// Returns a path of the holder's socket that is short enough for any state directory, and the open directory.
fn short_path(state: &Path) -> io::Result<(PathBuf, File)> {
    let dir = File::open(state)?;
    Ok((PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", dir.as_fd().as_raw_fd())), dir))
}

/// Connects to the holder of a state directory.
fn connect_to(state: &Path) -> io::Result<Found> {
    let (path, _dir) = short_path(state)?;
    let socket = new_socket()?;
    for timeout in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, timeout, Some(ANSWER_MAX))?;
    }
    connect(&socket, &SocketAddrUnix::new(&path)?)?;
    check_peer(&socket)?;
    send(&socket, Kind::List, None)?;
    let mut families = Vec::new();
    loop {
        match receive(&socket)?.ok_or(ConnectionReset)? {
            Message { kind: Kind::Family(id), files: Some(files) } => {
                families.push((id, of_family(files).ok_or(Errno::PROTO)?));
            }
            Message { kind: Kind::Done(pid), .. } => return Ok(Found { socket, families, pid }),
            Message { kind: Kind::Failed(errno), .. } => return Err(errno.into()),
            _ => return Err(Errno::PROTO.into()),
        }
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}
