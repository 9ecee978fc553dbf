//! `serve --single`: serves one client that is already connected, at standard input or through a socket of
//! the service manager.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;
use std::{io, thread};

use anyhow::{Context as _, Result, bail};
use freestone_nbd::Address;
use freestone_server::service::Service;
use freestone_server::usage::Usage;
use rustix::fs::{FileType, OFlags, Stat, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::{Shutdown, SocketType, getpeername, shutdown, sockopt};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use tracing::warn;

use crate::serve::events::Event;
use crate::serve::supervisor;

/// Longest wait for the client to read the last replies from the pipe.
const PIPE_GRACE: Duration = Duration::from_secs(5);
/// Size of the buffer for copies between a pipe and the socket, in bytes: the default capacity of a pipe.
const PIPE_BYTES: usize = 64 << 10;
/// Lowest descriptor number after the standard streams (0 to 2).
const FIRST_FREE: i32 = 3;

/// The connected client of `--single`.
pub struct Client {
    socket: OwnedFd,
    /// Receives a message once all replies are written to the pipe. `None` for a client at a socket.
    drained: Option<Receiver<()>>,
}

/// Takes over the connection of the client from standard input or the service manager. Afterwards no output
/// or log line can reach the client.
pub fn take() -> Result<Client> {
    let mut handed = supervisor::take_descriptors()?.sockets;
    match handed.len() {
        0 => take_standard_streams(),
        1 => Client::of_socket(handed.remove(0), "LISTEN_FDS"),
        count => bail!("--single: LISTEN_FDS={count}: must be 1"),
    }
}

fn take_standard_streams() -> Result<Client> {
    let input = fcntl_dupfd_cloexec(rustix::stdio::stdin(), FIRST_FREE);
    let input = input.context("--single: standard input is closed")?;
    let is = fstat(&input).context("--single: standard input")?;
    let output = fcntl_dupfd_cloexec(rustix::stdio::stdout(), FIRST_FREE).ok();
    let output = output.and_then(|output| Some((fstat(&output).ok()?, output)));
    let kind = |stat: &Stat| FileType::from_raw_mode(stat.st_mode);
    let client = match (kind(&is), output) {
        (FileType::Socket, output) => {
            drop(output);
            detach_from(&[is])?;
            Client::of_socket(input, "standard input")?
        }
        (FileType::Fifo, Some((to, output))) if matches!(kind(&to), FileType::Fifo | FileType::Socket) => {
            detach_from(&[is, to])?;
            Client::of_pipes(input, output).context("--single: standard input and output")?
        }
        (kind, _) => {
            let is = match kind {
                FileType::Fifo => "a pipe, but standard output is not",
                FileType::RegularFile => "a file",
                FileType::CharacterDevice => "a terminal or another device",
                _ => "something else",
            };
            let must = "must be a connected socket, or a pipe if standard output is a pipe as well";
            return Err(Usage(format!("--single: standard input is {is}: {must}")).into());
        }
    };
    Ok(client)
}

/// Redirects standard streams that lead to the client to /dev/null. With inetd, standard error leads to the
/// client as well.
fn detach_from(clients: &[Stat]) -> Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
    let set = || {
        let is_client = |stat: Stat| clients.iter().any(|client| is_same_file(client, &stat));
        dup2_stdin(&null)?;
        if fstat(rustix::stdio::stdout()).is_ok_and(is_client) {
            dup2_stdout(&null)?;
        }
        if fstat(rustix::stdio::stderr()).is_ok_and(is_client) {
            dup2_stderr(&null)?;
        }
        Ok::<_, rustix::io::Errno>(())
    };
    set().context("--single: standard input and output cannot be taken over")
}

fn is_same_file(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

/// Makes a file blocking. The parent process may have set `O_NONBLOCK`.
fn make_blocking(file: impl AsFd) -> io::Result<()> {
    let flags = fcntl_getfl(&file)?;
    Ok(fcntl_setfl(&file, flags - OFlags::NONBLOCK)?)
}

impl Client {
    fn of_socket(socket: OwnedFd, which: &str) -> Result<Self> {
        let is_stream = sockopt::socket_type(&socket).is_ok_and(|is| is == SocketType::STREAM);
        if !is_stream || getpeername(&socket).is_err() {
            let listens = sockopt::socket_acceptconn(&socket).unwrap_or(false);
            let is = if listens {
                "a listening socket; serve it without --single"
            } else {
                "not a stream connection"
            };
            return Err(Usage(format!("--single: {which} is {is}")).into());
        }
        make_blocking(&socket).with_context(|| format!("--single: {which}"))?;
        Ok(Self { socket, drained: None })
    }

    /// Returns a client at pipes. The server needs a socket, so two threads copy between the pipes and a
    /// socket pair.
    fn of_pipes(input: OwnedFd, output: OwnedFd) -> Result<Self> {
        make_blocking(&input)?;
        make_blocking(&output)?;
        let (ours, theirs) = UnixStream::pair()?;
        let back = theirs.try_clone()?;
        let copy_input = move || {
            copy(&mut File::from(input), &mut &theirs);
            let _ = shutdown(&theirs, Shutdown::Write);
        };
        let (drained, at_end) = mpsc::channel();
        let copy_output = move || {
            copy(&mut &back, &mut File::from(output));
            // A client that no longer reads replies counts as disconnected.
            let _ = shutdown(&back, Shutdown::Both);
            let _ = drained.send(());
        };
        thread::Builder::new().name("stdin".into()).spawn(copy_input)?;
        thread::Builder::new().name("stdout".into()).spawn(copy_output)?;
        Ok(Self { socket: ours.into(), drained: Some(at_end) })
    }

    /// Serves the client on a thread of its own, and sends [`Event::Left`] when it has disconnected.
    pub fn serve(self, service: &Arc<Service>, events: Sender<Event>) -> Result<()> {
        let Self { socket, drained } = self;
        let service = Arc::clone(service);
        let serve = move || {
            service.exports.nbd.serve_socket(&Address::Stdin, socket);
            if drained.is_some_and(|drained| drained.recv_timeout(PIPE_GRACE).is_err()) {
                warn!("the client does not read its last replies");
            }
            drop(service);
            // The main thread receives events until the server has ended, so the send does not fail.
            let _ = events.send(Event::Left);
        };
        let thread = thread::Builder::new().name("nbd-stdin".into()).spawn(serve);
        thread.map(drop).context("--single: cannot start the thread of the connection")
    }
}

/// Copies until the end of the input, or until an error.
fn copy(from: &mut impl io::Read, to: &mut impl io::Write) {
    let mut bytes = vec![0; PIPE_BYTES];
    loop {
        match from.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return,
            Ok(count) => {
                if to.write_all(&bytes[..count]).is_err() {
                    return;
                }
            }
        }
    }
}
