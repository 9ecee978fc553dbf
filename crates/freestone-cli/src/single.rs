//! `serve --single`: the one client that was there before the server, at its standard input or as
//! a connection of the service manager's.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use freestone_nbd::Address;
use rustix::fs::{FileType, OFlags, Stat, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::{Shutdown, SocketType, getpeername, shutdown, sockopt};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use tracing::warn;

use crate::error::Usage;
use crate::service::Service;
use crate::started_by;
use crate::until::Event;

/// How long the last answers may take on their way into a pipe.
const PIPE_GRACE: Duration = Duration::from_secs(5);
/// What goes through a pipe at once, in bytes: as much as a pipe has unless somebody made it larger.
const PIPE_BYTES: usize = 64 << 10;
/// Not one of the three that programs expect.
const FIRST_FREE: i32 = 3;

/// The client.
pub struct Client {
    socket: OwnedFd,
    /// Where it is at pipes: hears that all answers are out.
    drained: Option<Receiver<()>>,
}

/// Takes the client over. From here on nothing that is printed or logged reaches it.
pub fn take() -> Result<Client> {
    let mut handed = started_by::sockets()?;
    match handed.len() {
        0 => of_standard(),
        1 => Client::of_socket(handed.remove(0), "LISTEN_FDS"),
        count => bail!("--single: LISTEN_FDS={count}: it serves one connection"),
    }
}

fn of_standard() -> Result<Client> {
    let input = fcntl_dupfd_cloexec(rustix::stdio::stdin(), FIRST_FREE);
    let input = input.context("--single: standard input is closed")?;
    let is = fstat(&input).context("--single: standard input")?;
    let output = fcntl_dupfd_cloexec(rustix::stdio::stdout(), FIRST_FREE).ok();
    let output = output.and_then(|output| Some((fstat(&output).ok()?, output)));
    let kind = |stat: &Stat| FileType::from_raw_mode(stat.st_mode);
    let client = match (kind(&is), output) {
        (FileType::Socket, output) => {
            drop(output);
            nobodys(&[is])?;
            Client::of_socket(input, "standard input")?
        }
        (FileType::Fifo, Some((to, output))) if matches!(kind(&to), FileType::Fifo | FileType::Socket) => {
            nobodys(&[is, to])?;
            Client::of_pipes(input, output).context("--single: standard input and output")?
        }
        (kind, _) => {
            let is = match kind {
                FileType::Fifo => "a pipe, and standard output is none",
                FileType::RegularFile => "a file",
                FileType::CharacterDevice => "a terminal or another device",
                _ => "something else",
            };
            let must = "it must be a connected socket, or a pipe beside one at standard output";
            return Err(Usage(format!("--single: standard input is {is}: {must}")).into());
        }
    };
    Ok(client)
}

/// Lets nothing that is printed or logged reach the client; inetd has it at standard error, too.
fn nobodys(clients: &[Stat]) -> Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
    let set = || {
        let is_client = |stat: Stat| clients.iter().any(|client| same(client, &stat));
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

fn same(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

/// Who gave it may have set it otherwise.
fn block(file: impl AsFd) -> io::Result<()> {
    let flags = fcntl_getfl(&file)?;
    Ok(fcntl_setfl(&file, flags - OFlags::NONBLOCK)?)
}

impl Client {
    fn of_socket(socket: OwnedFd, which: &str) -> Result<Self> {
        let is_stream = sockopt::socket_type(&socket).is_ok_and(|is| is == SocketType::STREAM);
        if !is_stream || getpeername(&socket).is_err() {
            let listens = sockopt::socket_acceptconn(&socket).unwrap_or(false);
            let is =
                if listens { "a socket that listens; serve it without --single" } else { "no connection" };
            return Err(Usage(format!("--single: {which} is {is}")).into());
        }
        block(&socket).with_context(|| format!("--single: {which}"))?;
        Ok(Self { socket, drained: None })
    }

    /// The server wants a socket: what comes and goes is passed on.
    fn of_pipes(input: OwnedFd, output: OwnedFd) -> Result<Self> {
        block(&input)?;
        block(&output)?;
        let (ours, theirs) = UnixStream::pair()?;
        let back = theirs.try_clone()?;
        let come = move || {
            pass_on(&mut File::from(input), &mut &theirs);
            let _ = shutdown(&theirs, Shutdown::Write);
        };
        let (drained, at_end) = mpsc::channel();
        let go = move || {
            pass_on(&mut &back, &mut File::from(output));
            // Who does not listen any more is as good as gone.
            let _ = shutdown(&back, Shutdown::Both);
            let _ = drained.send(());
        };
        thread::Builder::new().name("stdin".into()).spawn(come)?;
        thread::Builder::new().name("stdout".into()).spawn(go)?;
        Ok(Self { socket: ours.into(), drained: Some(at_end) })
    }

    /// Serves it, in the background; `events` hears when it has left.
    pub fn serve(self, service: &Arc<Service>, events: Sender<Event>) -> Result<()> {
        let Self { socket, drained } = self;
        let service = Arc::clone(service);
        let serve = move || {
            service.exports.nbd.serve_here(&Address::Stdin, socket);
            if drained.is_some_and(|drained| drained.recv_timeout(PIPE_GRACE).is_err()) {
                warn!("the client does not read its last answers");
            }
            drop(service);
            // The main thread is there until the server has ended.
            let _ = events.send(Event::Left);
        };
        let thread = thread::Builder::new().name("nbd-stdin".into()).spawn(serve);
        thread.map(drop).context("--single: cannot start the thread of the connection")
    }
}

/// Passes on what comes until its end, or until nobody takes it.
fn pass_on(from: &mut impl io::Read, to: &mut impl io::Write) {
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
