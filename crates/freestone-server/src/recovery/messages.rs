//! Messages between a server and the holder of its families, over a `SOCK_SEQPACKET` Unix socket.
//!
//! A request has 18 bytes: the version of the protocol, the code of the request, and the id of a family. The
//! holder answers each request with one message, and `List` with one for each family before it. A server of
//! another version must understand an older holder: messages are only added.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use freestone::ram::FamilyFiles;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use uuid::Uuid;

const VERSION: u8 = 1;
const BYTES: usize = 18;
/// Numbers of files of a family, without and with a backing device.
pub const FILES: RangeInclusive<usize> = 4..=5;
/// Maximum number of files of a message.
const FILES_MAX: usize = *FILES.end();

/// A message with the files of the family that it names, if it has any.
pub struct Message {
    pub kind: Kind,
    pub files: Option<Vec<OwnedFd>>,
}

/// Kind of a message, with its family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Asks for all families.
    List,
    /// Asks to hold the family whose files are in the message.
    Hold(Uuid),
    /// Asks to close the files of a family.
    Release(Uuid),
    /// A family, with its files.
    Family(Uuid),
    /// The request is done, by the process with this id.
    Done(u32),
    /// The request failed with this error.
    Failed(Errno),
}

impl Kind {
    fn encode(self) -> [u8; BYTES] {
        let (code, id) = match self {
            Self::List => (1, Uuid::nil()),
            Self::Hold(id) => (2, id),
            Self::Release(id) => (3, id),
            Self::Family(id) => (4, id),
            Self::Done(pid) => (5, Uuid::from_u128(pid.into())),
            Self::Failed(errno) => (6, Uuid::from_u128(errno.raw_os_error().unsigned_abs().into())),
        };
        let mut bytes = [VERSION; BYTES];
        bytes[1] = code;
        bytes[2..].copy_from_slice(id.as_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let [VERSION, code, id @ ..] = bytes else { return None };
        let id = Uuid::from_slice(id).ok()?;
        Some(match code {
            1 => Self::List,
            2 => Self::Hold(id),
            3 => Self::Release(id),
            4 => Self::Family(id),
            5 => Self::Done(u32::try_from(id.as_u128()).ok()?),
            6 => Self::Failed(Errno::from_raw_os_error(i32::try_from(id.as_u128()).ok()?)),
            _ => return None,
        })
    }
}

/// Sends a message, with the files of a family if it has any.
pub fn send(socket: impl AsFd, kind: Kind, files: Option<&[BorrowedFd<'_>]>) -> Result<(), Errno> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    if let Some(files) = files {
        // The room is sized for them.
        let _ = ancillary.push(SendAncillaryMessage::ScmRights(files));
    }
    let bytes = kind.encode();
    rustix::io::retry_on_intr(|| {
        sendmsg(&socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)
    })
    .map(drop)
}

/// Receives a message. Returns `None` if the other side has closed the connection.
///
/// # Errors
/// `MFILE` if this process has no descriptors left for the files; `PROTO` for an unknown message.
pub fn receive(socket: impl AsFd) -> Result<Option<Message>, Errno> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut room);
    let mut bytes = [0; BYTES + 1];
    let received = rustix::io::retry_on_intr(|| {
        let buffer = &mut [IoSliceMut::new(&mut bytes)];
        recvmsg(&socket, buffer, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let mut files = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(all) = message {
            files.extend(all);
        }
    }
    let kind = Kind::decode(&bytes[..received.bytes]).ok_or(Errno::PROTO)?;
    let has_files = matches!(kind, Kind::Hold(_) | Kind::Family(_));
    let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
    if has_files && (is_cut || !FILES.contains(&files.len())) {
        return Err(Errno::MFILE);
    }
    let files = has_files.then_some(files);
    Ok(Some(Message { kind, files }))
}

/// Returns the files of a family in the order of a message.
pub fn in_order<F>(files: FamilyFiles<F>) -> Vec<F> {
    let FamilyFiles { family, roots, nodes, pool, backing } = files;
    [family, roots, nodes, pool].into_iter().chain(backing).collect()
}

/// Returns the files of a message as those of a family; `None` if there are too few.
pub fn of_family(files: Vec<OwnedFd>) -> Option<FamilyFiles<OwnedFd>> {
    let mut files = files.into_iter();
    let [family, roots, nodes, pool] = [files.next()?, files.next()?, files.next()?, files.next()?];
    Some(FamilyFiles { family, roots, nodes, pool, backing: files.next() })
}

/// Checks that the process at the other end of a socket has this process's user.
pub fn check_peer(socket: impl AsFd) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(socket)?;
    if peer.uid == rustix::process::geteuid() {
        return Ok(());
    }
    Err(io::Error::other(format!("process {} has another user", peer.pid)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_received_as_sent() {
        let (one, other) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let id = Uuid::new_v4();
        for kind in [Kind::List, Kind::Release(id), Kind::Done(7), Kind::Failed(Errno::MFILE)] {
            send(&one, kind, None).unwrap();
            let message = receive(&other).unwrap().unwrap();
            assert!(message.kind == kind && message.files.is_none());
        }
        let files = [one.as_fd(); 5];
        for count in FILES {
            send(&one, Kind::Hold(id), Some(&files[..count])).unwrap();
            let received = receive(&other).unwrap().unwrap().files.unwrap();
            assert_eq!(of_family(received).unwrap().backing.is_some(), count == 5);
        }
        // Messages without the files that their kind has, ones of another version, and a long one.
        for files in [None, Some(&files[..3])] {
            send(&one, Kind::Family(id), files).unwrap();
            assert_eq!(receive(&other).err(), Some(Errno::MFILE));
        }
        for bytes in [&[2; BYTES][..], &[VERSION; 3], &[VERSION; BYTES + 7]] {
            rustix::net::send(&one, bytes, SendFlags::empty()).unwrap();
            assert_eq!(receive(&other).err(), Some(Errno::PROTO));
        }
        drop(one);
        assert!(receive(&other).unwrap().is_none());
    }
}
