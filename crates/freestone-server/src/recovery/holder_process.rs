//! The holder: a process that keeps descriptors of the families of a server.
//!
//! The process serves one connection at a time, of its own user. The process ends when a connection ends and no
//! family is held, or when its socket has gone from its path, for example with the state directory.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::Duration;

use freestone_control::socket::SocketPath;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use uuid::Uuid;

use super::messages::{Kind, Message, check_peer, receive, send};

/// Interval of checks whether the socket is still at its path.
const CHECK_EVERY: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };

/// Pause after an accept that failed because descriptors or memory were short.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Files of the held families, by the id that the server has chosen.
type Families = HashMap<Uuid, Vec<OwnedFd>>;

/// Holds families for servers that connect to `listener`, whose socket is at `path`. Returns when no server
/// needs the process any more.
///
/// # Errors
/// Fails if the socket cannot be used.
pub fn hold(listener: &OwnedFd, path: &Path) -> io::Result<()> {
    let own = SocketPath::adopt(path)?;
    let mut families = Families::new();
    loop {
        let ready = rustix::io::retry_on_intr(|| {
            poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&CHECK_EVERY))
        })?;
        if !own.is_there() {
            return Ok(());
        }
        if ready == 0 {
            continue;
        }
        let client = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(client) => client,
            // The client has left.
            Err(Errno::CONNABORTED | Errno::INTR) => continue,
            // The client can be accepted once descriptors are free.
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS) => {
                thread::sleep(ACCEPT_PAUSE);
                continue;
            }
            Err(errno) => return Err(errno.into()),
        };
        if check_peer(&client).is_err() {
            continue;
        }
        serve(&client, &mut families);
        if families.is_empty() {
            return Ok(());
        }
    }
}

/// Answers the requests of a server, until the connection ends or fails.
fn serve(client: &OwnedFd, families: &mut Families) {
    let done = Kind::Done(std::process::id());
    loop {
        let answer = match receive(client) {
            Ok(Some(Message { kind: Kind::List, .. })) => {
                list(client, families).map_or_else(Kind::Failed, |()| done)
            }
            Ok(Some(Message { kind: Kind::Hold(id), files: Some(files) })) => {
                families.insert(id, files);
                done
            }
            Ok(Some(Message { kind: Kind::Release(id), .. })) => {
                families.remove(&id);
                done
            }
            Ok(Some(_)) => Kind::Failed(Errno::PROTO),
            Err(errno @ (Errno::PROTO | Errno::MFILE)) => Kind::Failed(errno),
            Ok(None) | Err(_) => return,
        };
        if send(client, answer, None).is_err() {
            return;
        }
    }
}

fn list(client: &OwnedFd, families: &Families) -> Result<(), Errno> {
    families.iter().try_for_each(|(id, files)| {
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        send(client, Kind::Family(*id), Some(&files))
    })
}
