//! The socket: whole messages with their file descriptors in, replies out.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{Header, MAX_BODY_BYTES, MAX_FDS, REPLY, VERSION, VERSION_MASK};

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

/// Answers a message.
pub fn reply(socket: BorrowedFd<'_>, request: u32, body: &[u8]) -> Result<(), Gone> {
    let header = Header { request, flags: VERSION | REPLY, size: body.len() as u32 };
    let mut out = Vec::with_capacity(size_of::<Header>() + body.len());
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(body);
    let mut at = 0;
    while at < out.len() {
        let sent: Result<usize, Errno> = retry_on_intr(|| send(socket, &out[at..], SendFlags::NOSIGNAL));
        at += sent.map_err(|_| Gone::Closed)?;
    }
    Ok(())
}
