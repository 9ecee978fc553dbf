//! The server's side of the holder: starts the process, and hands families over.
//!
//! A thread starts another holder when the process has ended, and has the files of removed families closed.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotConnected, NotFound};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use freestone::ram::{Family, WeakFamily};
use freestone::sync::Mutex;
use freestone_spec::family::FamilyHolder;
use freestone_spec::refusal::{Errno, Refusal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use tracing::{error, warn};
use uuid::Uuid;

use super::messages::{FILES, Kind, Message, check_peer, in_order, receive, send};

/// Name of the holder's socket in the state directory.
const SOCKET: &str = "holder";
/// Longest wait for an answer of the holder.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Interval in which the thread looks for removed families, and retries to start a holder.
const CHECK_EVERY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Program and arguments of a holder. Its socket is its standard input, and the path of the socket its last
/// argument.
pub type HolderProgram = Vec<OsString>;

/// A family that the holder has, with its files.
pub type HeldFiles = (Uuid, [OwnedFd; FILES]);

/// The holder of a server's families. All methods answer within seconds.
pub struct RemoteHolder {
    program: HolderProgram,
    /// The state directory.
    state: PathBuf,
    /// Families of a killed server.
    found: Mutex<Vec<HeldFiles>>,
    /// Locked during a request. No other lock is taken meanwhile.
    connection: Mutex<Connection>,
}

struct Connection {
    /// Socket to the holder; `None` while there is no holder.
    socket: Option<OwnedFd>,
    /// The process, if this server has started it.
    child: Option<Child>,
    /// Families that this server has created or adopted.
    families: Vec<(Uuid, WeakFamily)>,
    /// True once families are no longer held: the server shuts down.
    is_ended: bool,
}

/// A connection to a holder.
struct Found {
    socket: OwnedFd,
    families: Vec<HeldFiles>,
    /// Process id of the holder. The socket's peer is the process that created it, the server that started the holder.
    pid: u32,
}

impl RemoteHolder {
    /// Connects to the holder of the state directory, or starts one.
    ///
    /// # Errors
    /// Fails if there is no holder, and none can be started.
    pub fn start(state: &Path, program: HolderProgram) -> io::Result<Arc<Self>> {
        let connection = Connection { socket: None, child: None, families: Vec::new(), is_ended: false };
        let holder = Arc::new(Self {
            program,
            state: state.to_owned(),
            found: Mutex::default(),
            connection: Mutex::new(connection),
        });
        *holder.found.lock() = holder.reconnect(&mut holder.connection.lock())?;
        let weak = Arc::downgrade(&holder);
        thread::Builder::new().name("holder".into()).spawn(move || watch(&weak))?;
        Ok(holder)
    }

    /// Returns the families that the holder had when this server started. Later calls return none.
    pub fn take_found(&self) -> Vec<HeldFiles> {
        std::mem::take(&mut *self.found.lock())
    }

    /// Records that a family which the holder has was adopted.
    pub fn adopt(&self, id: Uuid, family: &Family) {
        self.connection.lock().families.push((id, family.downgrade()));
    }

    /// Has the files of a family closed that no device needs.
    pub fn release(&self, id: Uuid) {
        if let Err(why) = self.connection.lock().request(Kind::Release(id), None) {
            warn!("cannot free the memory of removed devices: {why}");
        }
    }

    /// Has the files of all families closed that this server has created or adopted: the server shuts down. A
    /// holder that has no others ends.
    pub fn end(&self) {
        let mut connection = self.connection.lock();
        connection.is_ended = true;
        let families = std::mem::take(&mut connection.families);
        let released = families.iter().try_for_each(|(id, _)| connection.request(Kind::Release(*id), None));
        if let Err(why) = released {
            error!("the memory of the devices may remain in the process that holds it: {why}");
        }
        connection.socket = None;
    }

    /// Connects to the holder of the state directory, or starts one, and has it hold all families. Returns the
    /// families that it had.
    fn reconnect(&self, connection: &mut Connection) -> io::Result<Vec<HeldFiles>> {
        connection.socket = None;
        if let Some(child) = &mut connection.child
            && child.try_wait().is_ok_and(|status| status.is_some())
        {
            connection.child = None;
        }
        let Found { socket, families, .. } = match connect_to(&self.state) {
            // There is none, or it is ending.
            Err(error)
                if matches!(error.kind(), NotFound | ConnectionRefused | ConnectionReset | BrokenPipe) =>
            {
                connection.child = Some(self.spawn()?);
                connect_to(&self.state)?
            }
            result => result?,
        };
        connection.socket = Some(socket);
        for (id, family) in connection.families.clone() {
            if let Some(family) = family.upgrade() {
                connection.hold(id, &family)?;
            }
        }
        Ok(families)
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
        // In a process group of its own, so that Ctrl-C does not end it with the server. Without the server's
        // output, whose readers wait for its end.
        command.args(args).arg(self.state.join(SOCKET)).arg0("freestone").process_group(0).current_dir("/");
        command.env_clear().stdin(socket).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn()
    }

    /// Starts another holder if the process has ended, and has the files of removed families closed. Returns the
    /// error of a failed start.
    fn check(&self) -> io::Result<()> {
        let mut connection = self.connection.lock();
        if connection.is_ended {
            return Ok(());
        }
        if connection.has_hung_up() {
            self.reconnect(&mut connection)?;
            warn!("another process holds the memory of the devices now, because the former one had ended");
        }
        while let Some(index) = connection.families.iter().position(|(_, family)| !family.exists()) {
            let (id, _) = connection.families[index];
            connection.request(Kind::Release(id), None)?;
            connection.families.swap_remove(index);
        }
        Ok(())
    }

    /// Returns a descriptor for waiting until the holder ends.
    fn watched(&self) -> Option<OwnedFd> {
        self.connection.lock().socket.as_ref()?.try_clone().ok()
    }
}

impl FamilyHolder for RemoteHolder {
    fn hold(&self, family: &Family) -> Result<(), Refusal> {
        let id = Uuid::new_v4();
        let mut connection = self.connection.lock();
        let connected =
            if connection.has_hung_up() { self.reconnect(&mut connection).map(drop) } else { Ok(()) };
        connected.and_then(|()| connection.hold(id, family)).map_err(|why| refused(&why))?;
        connection.families.push((id, family.downgrade()));
        Ok(())
    }
}

impl Connection {
    fn has_hung_up(&self) -> bool {
        let Some(socket) = &self.socket else { return true };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut polled = [PollFd::new(socket, PollFlags::empty())];
        poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
    }

    fn hold(&mut self, id: Uuid, family: &Family) -> io::Result<()> {
        let Some(files) = family.files() else { return Ok(()) };
        self.request(Kind::Hold(id), Some(&in_order(files)))
    }

    /// Sends a request and waits for its answer. Closes the connection if there is none: a late one would be
    /// taken for the answer of the next request.
    fn request(&mut self, kind: Kind, files: Option<&[BorrowedFd<'_>; FILES]>) -> io::Result<()> {
        let socket = self.socket.as_ref().ok_or(NotConnected)?;
        let answer = send(socket, kind, files).and_then(|()| receive(socket));
        match answer.map(|message| message.map(|message| message.kind)) {
            Ok(Some(Kind::Done(_))) => Ok(()),
            Ok(Some(Kind::Failed(errno))) => Err(errno.into()),
            answer => {
                self.socket = None;
                Err(answer.err().unwrap_or(rustix::io::Errno::CONNRESET).into())
            }
        }
    }
}

fn refused(why: &io::Error) -> Refusal {
    Refusal::failed(Errno::of_file(why), format!("its memory cannot be held for the next server: {why}"))
}

/// Returns the process id of the holder of a state directory, or `None` if no process holds families for it.
pub(super) fn pid_of_holder(state: &Path) -> Option<u32> {
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
            Message { kind: Kind::Family(id), files: Some(files) } => families.push((id, files)),
            Message { kind: Kind::Done(pid), .. } => return Ok(Found { socket, families, pid }),
            Message { kind: Kind::Failed(errno), .. } => return Err(errno.into()),
            _ => return Err(rustix::io::Errno::PROTO.into()),
        }
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Checks the holder as soon as it ends, and every second, until the server has dropped it.
fn watch(holder: &Weak<RemoteHolder>) {
    let mut last_error = String::new();
    loop {
        let Some(socket) = holder.upgrade().map(|holder| holder.watched()) else { return };
        match &socket {
            Some(socket) => drop(poll(&mut [PollFd::new(socket, PollFlags::empty())], Some(&CHECK_EVERY))),
            None => thread::sleep(Duration::from_secs(1)),
        }
        let Some(holder) = holder.upgrade() else { return };
        match holder.check() {
            Ok(()) => last_error.clear(),
            Err(why) => {
                let why = why.to_string();
                if why != last_error {
                    error!("the content of RAM disks is lost if the server is killed now: {why}");
                    last_error = why;
                }
            }
        }
    }
}
