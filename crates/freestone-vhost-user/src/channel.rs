//! The socket: whole messages with their file descriptors in, replies out.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, send, sendmsg,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{Header, MAX_BODY_BYTES, MAX_FDS, REPLY, VERSION, VERSION_MASK, backend_message};

/// A message of the frontend.
#[derive(Debug)]
pub struct Message {
    /// What is asked.
    pub request: u32,
    /// Version and flags.
    pub flags: u32,
    /// What is behind the header.
    pub body: Vec<u8>,
    /// What came with it; closed with the message, where nobody takes them out.
    pub fds: Vec<OwnedFd>,
}

/// Why no message came.
#[derive(Debug, PartialEq, Eq)]
pub enum Gone {
    /// The frontend, or the server, has closed the connection.
    Closed,
    /// What came is no message.
    Garbage(&'static str),
}

/// Waits for a message.
pub fn receive(socket: BorrowedFd<'_>) -> Result<Message, Gone> {
    let mut fds = Vec::new();
    let mut header = [0; size_of::<Header>()];
    fill(socket, &mut header, &mut fds)?;
    let header = Header::read_from_bytes(&header).map_err(|_| Gone::Garbage("a header"))?;
    if header.flags & VERSION_MASK != VERSION {
        return Err(Gone::Garbage("another version of the protocol"));
    }
    let size = header.size as usize;
    if size > MAX_BODY_BYTES {
        return Err(Gone::Garbage("a message of such a size"));
    }
    let mut body = vec![0; size];
    fill(socket, &mut body, &mut fds)?;
    Ok(Message { request: header.request, flags: header.flags, body, fds })
}

fn fill(socket: BorrowedFd<'_>, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<(), Gone> {
    let mut at = 0;
    while at < buf.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let into = &mut [IoSliceMut::new(&mut buf[at..])];
            recvmsg(socket, into, &mut control, RecvFlags::CMSG_CLOEXEC)
        });
        let bytes = received.map_or(0, |received| received.bytes);
        if bytes == 0 {
            return Err(Gone::Closed);
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if fds.len() > MAX_FDS {
            return Err(Gone::Garbage("more file descriptors than a message has"));
        }
        at += bytes;
    }
    Ok(())
}

/// Answers a message, with a file where the answer has one.
pub fn reply(
    socket: BorrowedFd<'_>,
    request: u32,
    body: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> Result<(), Gone> {
    let header = Header { request, flags: VERSION | REPLY, size: body.len() as u32 };
    let out = [header.as_bytes(), body].concat();
    let files = file.map(|file| [file]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(files) = &files {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    let mut at = 0;
    while at < out.len() {
        let part = [IoSlice::new(&out[at..])];
        let sent: Result<usize, Errno> =
            retry_on_intr(|| sendmsg(socket, &part, &mut control, SendFlags::NOSIGNAL));
        at += sent.map_err(|_| Gone::Closed)?;
        // It goes with the first byte.
        control.clear();
    }
    Ok(())
}

/// Tells the frontend that the configuration space has changed. One that does not read is not waited
/// for: it finds that out when it looks.
pub fn tell_config_change(socket: BorrowedFd<'_>) {
    let header = Header { request: backend_message::CONFIG_CHANGE, flags: VERSION, size: 0 };
    let _ = send(socket, header.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}
