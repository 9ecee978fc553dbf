//! The socket of a connection: receives whole messages with their file descriptors, and sends
//! replies.

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

#[derive(Debug)]
pub struct Message {
    /// Message number, one of [`message`](crate::wire::message).
    pub request: u32,
    pub flags: u32,
    pub body: Vec<u8>,
    /// Received file descriptors. Descriptors not taken out are closed with the message.
    pub fds: Vec<OwnedFd>,
}

/// The reason why a message was not received or sent.
#[derive(Debug, PartialEq, Eq)]
pub enum ConnectionError {
    /// The frontend or the server closed the connection.
    Closed,
    /// The received bytes are not a valid message.
    Invalid(&'static str),
}

/// Waits for a message, and receives it with its file descriptors.
pub fn receive(socket: BorrowedFd<'_>) -> Result<Message, ConnectionError> {
    let mut fds = Vec::new();
    let mut header = [0; size_of::<Header>()];
    fill(socket, &mut header, &mut fds)?;
    let header =
        Header::read_from_bytes(&header).map_err(|_| ConnectionError::Invalid("an invalid header"))?;
    if header.flags & VERSION_MASK != VERSION {
        return Err(ConnectionError::Invalid("an unsupported protocol version"));
    }
    let size = header.size as usize;
    if size > MAX_BODY_BYTES {
        return Err(ConnectionError::Invalid("a message that is too large"));
    }
    let mut body = vec![0; size];
    fill(socket, &mut body, &mut fds)?;
    Ok(Message { request: header.request, flags: header.flags, body, fds })
}

fn fill(socket: BorrowedFd<'_>, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<(), ConnectionError> {
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
            return Err(ConnectionError::Closed);
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if fds.len() > MAX_FDS {
            return Err(ConnectionError::Invalid("too many file descriptors"));
        }
        at += bytes;
    }
    Ok(())
}

/// Sends the reply to message `request`, with an optional file.
pub fn reply(
    socket: BorrowedFd<'_>,
    request: u32,
    body: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> Result<(), ConnectionError> {
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
        at += sent.map_err(|_| ConnectionError::Closed)?;
        // The file descriptor travels with the first byte.
        control.clear();
    }
    Ok(())
}

/// Notifies the frontend that the configuration space has changed. Does not wait for a frontend
/// that does not read; such a frontend sees the change when it next reads the configuration.
pub fn notify_config_change(socket: BorrowedFd<'_>) {
    let header = Header { request: backend_message::CONFIG_CHANGE, flags: VERSION, size: 0 };
    let _ = send(socket, header.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}
