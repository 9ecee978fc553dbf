//! Sends and receives vhost-user messages, as a frontend.

use std::io::{self, IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::wire::{self, HEADER_BYTES};

/// Size in bytes of the configuration space that is read.
const CONFIG_BYTES: usize = 96;
/// Flags in the header of a reply: protocol version 1 and the reply bit.
const ANSWER_FLAGS: u32 = 5;

/// A connected vhost-user frontend, which can also send invalid messages.
#[derive(Debug)]
pub struct Frontend {
    /// The connection to the server.
    pub socket: UnixStream,
}

/// The configuration space of a virtio-blk device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    bytes: [u8; CONFIG_BYTES],
}

impl Config {
    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().expect("four bytes"))
    }

    /// Returns the capacity in sectors of 512 bytes.
    pub fn capacity(&self) -> u64 {
        u64::from_le_bytes(self.bytes[..8].try_into().expect("eight bytes"))
    }

    /// Returns the logical block size in bytes.
    pub fn block(&self) -> u32 {
        self.word(20)
    }

    pub fn queues(&self) -> u16 {
        u16::from_le_bytes([self.bytes[34], self.bytes[35]])
    }
}

/// Returns the error for a violation of the protocol by the server.
pub(super) fn protocol_error(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl Frontend {
    /// Connects to the socket at `path`. Each reply must arrive within `patience`.
    ///
    /// # Errors
    /// Fails if the connection cannot be opened.
    pub fn connect(path: &Path, patience: Duration) -> io::Result<Self> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(patience))?;
        Ok(Self { socket })
    }

    /// Sends a message with a body and descriptors.
    ///
    /// # Errors
    /// Fails if the connection has ended.
    ///
    /// # Panics
    /// Panics if `files` has more than eight descriptors.
    pub fn send(&self, request: u32, flags: u32, body: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(files)), "at most eight");
        }
        let message = wire::message(request, flags, body);
        sendmsg(&self.socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Receives the reply to the message `request`. Returns the body, and a descriptor if one is
    /// attached.
    ///
    /// # Errors
    /// Fails if the connection has ended, the reply is late, or another message arrives.
    pub fn receive_reply(&mut self, request: u32) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut header)];
        let got = recvmsg(&self.socket, into, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        let mut files: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights);
            }
        }
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.socket.read_exact(&mut header[got..])?;
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("four bytes"));
        if (word(0), word(4)) != (request, ANSWER_FLAGS) {
            return Err(protocol_error(format!("message {request} is answered with {header:x?}")));
        }
        let mut body = vec![0; word(8) as usize];
        self.socket.read_exact(&mut body)?;
        Ok((body, files.pop()))
    }

    /// Sends a message without a body whose reply is a 64-bit number, and returns the number.
    ///
    /// # Errors
    /// See [`receive_reply`](Self::receive_reply).
    pub fn number(&mut self, request: u32) -> io::Result<u64> {
        self.send(request, 0, &[], &[])?;
        let (body, _) = self.receive_reply(request)?;
        let body = body.try_into().map_err(|body| protocol_error(format!("{body:x?} is no number")))?;
        Ok(u64::from_ne_bytes(body))
    }

    /// Sends a message that has no reply of its own and requests an acknowledgement. Returns true
    /// if the server reports success.
    ///
    /// # Errors
    /// See [`receive_reply`](Self::receive_reply).
    pub fn send_checked(&mut self, request: u32, body: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<bool> {
        self.send(request, wire::NEED_REPLY, body, files)?;
        let (body, _) = self.receive_reply(request)?;
        Ok(body == [0; 8])
    }

    /// Sends a message that the server must acknowledge.
    ///
    /// # Errors
    /// Fails as [`receive_reply`](Self::receive_reply) does, or if the server refuses the message.
    pub fn send_acknowledged(
        &mut self,
        request: u32,
        body: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        if self.send_checked(request, body, files)? {
            Ok(())
        } else {
            Err(protocol_error(format!("message {request} is refused")))
        }
    }

    /// Reads the configuration space of the device.
    ///
    /// # Errors
    /// See [`receive_reply`](Self::receive_reply).
    pub fn config(&mut self) -> io::Result<Config> {
        let part = wire::u32s(&[0, CONFIG_BYTES as u32, 0]);
        self.send(wire::GET_CONFIG, 0, &[&part[..], &[0; CONFIG_BYTES]].concat(), &[])?;
        let (body, _) = self.receive_reply(wire::GET_CONFIG)?;
        let bytes = body.get(part.len()..).and_then(|bytes| bytes.try_into().ok());
        Ok(Config {
            bytes: bytes.ok_or_else(|| protocol_error(format!("{} bytes of configuration", body.len())))?,
        })
    }

    /// Requests an inflight region (a log of requests in flight). Returns its description and its
    /// file descriptor.
    ///
    /// # Errors
    /// See [`receive_reply`](Self::receive_reply).
    pub fn inflight(&mut self, queues: u16, size: u16) -> io::Result<(Vec<u8>, OwnedFd)> {
        let sizes = [queues.to_ne_bytes(), size.to_ne_bytes(), [0; 2], [0; 2]].concat();
        self.send(wire::GET_INFLIGHT_FD, 0, &[wire::u64s(&[0, 0]), sizes].concat(), &[])?;
        let (area, file) = self.receive_reply(wire::GET_INFLIGHT_FD)?;
        Ok((area, file.ok_or_else(|| protocol_error("memory for what is in flight comes without a file"))?))
    }
}
