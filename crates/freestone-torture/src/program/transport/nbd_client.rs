//! An NBD client with many requests in flight. Shares the encoding with the other clients of tests, and nothing with the
//! server.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use freestone_testkit::Rng;
use freestone_testkit::nbd::wire::{
    GO, SET_META_CONTEXT, STRUCTURED_REPLY, context_data, info_data, request_header,
};
use freestone_testkit::nbd::wire::{READ_ONLY, SEND_TRIM, SEND_WRITE_ZEROES};
use freestone_testkit::nbd::{self, CHUNK_BYTES_MAX, Chunk, OptionReply, handshake};
use rustix::event::{PollFd, PollFlags, poll};

use super::protocol::{ConnectionError, DISC, Properties, READ, Reply};

const HOLE_OR_ZERO: u64 = 2;

struct Pending {
    command: u16,
    offset: u64,
    data: Vec<u8>,
    covered: usize,
    error: u32,
    extents: Vec<(u32, bool)>,
}

/// An NBD connection in the transmission phase.
pub struct NbdClient {
    stream: UnixStream,
    out: Vec<u8>,
    received: Vec<u8>,
    taken: usize,
    pending: HashMap<u64, Pending>,
    next_cookie: u64,
    structured: bool,
    /// Properties of the export when the connection chose it.
    pub properties: Properties,
}

/// Sends an option that the server must accept. Returns the replies before `ACK`.
fn negotiate(stream: &mut UnixStream, option: u32, data: &[u8]) -> Result<Vec<OptionReply>, ConnectionError> {
    let mut replies = handshake::negotiate(stream, option, data)?;
    match replies.pop() {
        Some(last) if last.is_error() => {
            Err(ConnectionError::Refused(last.kind, String::from_utf8_lossy(&last.data).into_owned()))
        }
        _ => Ok(replies),
    }
}

impl NbdClient {
    /// Connects and chooses the export `name`, in one of the ways that the protocol allows.
    pub fn connect(path: &Path, name: &str, rng: &mut Rng) -> Result<Self, ConnectionError> {
        Self::over(UnixStream::connect(path)?, name, rng)
    }

    /// Chooses the export `name` on a new connection.
    pub fn over(mut stream: UnixStream, name: &str, rng: &mut Rng) -> Result<Self, ConnectionError> {
        let no_zeroes = rng.chance(70);
        handshake::greet(&mut stream, if no_zeroes { 3 } else { 1 })?;
        let (mut structured, mut contexts) = (false, false);
        if rng.chance(60) {
            negotiate(&mut stream, STRUCTURED_REPLY, &[])?;
            structured = true;
            if rng.chance(60) {
                let query = context_data(name, &["base:allocation"]);
                contexts = !negotiate(&mut stream, SET_META_CONTEXT, &query)?.is_empty();
            }
        }
        let (size, flags) = if contexts || rng.chance(70) {
            nbd::export_info(&negotiate(&mut stream, GO, &info_data(name, &[]))?)?
        } else {
            handshake::export_name(&mut stream, name, no_zeroes)?
        };
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            out: Vec::new(),
            received: Vec::new(),
            taken: 0,
            pending: HashMap::new(),
            next_cookie: rng.word(),
            structured,
            properties: Properties {
                size,
                writable: flags & READ_ONLY == 0,
                zeroes: flags & SEND_WRITE_ZEROES != 0,
                trims: flags & SEND_TRIM != 0,
                contexts,
                ..Properties::default()
            },
        })
    }

    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    pub fn next(&self) -> u64 {
        self.next_cookie
    }

    /// Sends a request, as much of it as the socket accepts now. Returns the cookie of the request.
    pub fn send(
        &mut self,
        flags: u16,
        command: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> Result<u64, ConnectionError> {
        let cookie = self.next_cookie;
        self.next_cookie = self.next_cookie.wrapping_add(0x1_0001);
        self.out.extend(request_header(flags, command, cookie, offset, len));
        self.out.extend(data);
        // Allocate no memory for a longer read: the server refuses it.
        let room = if command == READ && len as usize <= CHUNK_BYTES_MAX { len as usize } else { 0 };
        let pending =
            Pending { command, offset, data: vec![0xa5; room], covered: 0, error: 0, extents: Vec::new() };
        self.pending.insert(cookie, pending);
        self.push()?;
        Ok(cookie)
    }

    /// Ends the connection in an orderly way, with a `DISC` request.
    pub fn leave(mut self) -> Result<(), ConnectionError> {
        self.out.extend(request_header(0, DISC, 0, 0, 0));
        while !self.out.is_empty() {
            self.wait()?;
            self.push()?;
        }
        Ok(())
    }

    pub fn reply(&mut self) -> Result<Reply, ConnectionError> {
        loop {
            if let Some(reply) = self.parse()? {
                return Ok(reply);
            }
            self.wait()?;
            self.push()?;
            self.pull()?;
        }
    }

    fn wait(&self) -> Result<(), ConnectionError> {
        let mut wanted = PollFlags::IN;
        if !self.out.is_empty() {
            wanted |= PollFlags::OUT;
        }
        match poll(&mut [PollFd::new(&self.stream, wanted)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ConnectionError::Ended(error.to_string())),
        }
    }

    fn push(&mut self) -> Result<(), ConnectionError> {
        while !self.out.is_empty() {
            match self.stream.write(&self.out) {
                Ok(sent) => {
                    self.out.drain(..sent);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn pull(&mut self) -> Result<(), ConnectionError> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(ConnectionError::Ended("the server closed the connection".into())),
                Ok(got) => {
                    self.received.extend(&buffer[..got]);
                    if got < buffer.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Parses one reply from the received bytes. Returns `None` if they do not contain a whole one.
    fn parse(&mut self) -> Result<Option<Reply>, ConnectionError> {
        loop {
            let bytes = &self.received[self.taken..];
            let Some((nbd::Reply { chunk, .. }, len)) = nbd::Reply::parse(bytes)? else { break };
            let (cookie, ends) = (chunk.cookie(), chunk.ends());
            let wrong = |why: &str| Err(ConnectionError::Protocol(format!("{why}: {:x?}", &bytes[..16])));
            let Some(pending) = self.pending.get_mut(&cookie) else {
                return wrong("a reply with an unknown cookie");
            };
            self.taken += len;
            match chunk {
                Chunk::Simple { .. } if self.structured && pending.command == READ => {
                    return wrong("a simple reply to a read although structured replies were negotiated");
                }
                Chunk::Simple { error: 0, .. } => {
                    let all = pending.data.len();
                    let Some(data) = bytes.get(len..len + all) else {
                        self.taken -= len;
                        break;
                    };
                    pending.data.copy_from_slice(data);
                    pending.covered = all;
                    self.taken += all;
                }
                Chunk::Simple { error, .. } => pending.error = error,
                _ if !self.structured => return wrong("a chunk although simple replies were negotiated"),
                chunk => pending.chunk(chunk).map_err(ConnectionError::Protocol)?,
            }
            if ends {
                self.discard_parsed();
                let pending = self.pending.remove(&cookie).expect("it was there");
                if pending.error == 0 && pending.covered != pending.data.len() {
                    let (got, all) = (pending.covered, pending.data.len());
                    return Err(ConnectionError::Protocol(format!(
                        "a read of {all} bytes returned {got} bytes"
                    )));
                }
                let Pending { error, data, extents, .. } = pending;
                return Ok(Some(Reply { cookie, error, data, extents }));
            }
        }
        self.discard_parsed();
        Ok(None)
    }

    fn discard_parsed(&mut self) {
        self.received.drain(..self.taken);
        self.taken = 0;
    }
}

impl Pending {
    fn data_at(&mut self, offset: u64, len: usize) -> Result<&mut [u8], String> {
        let at = offset.checked_sub(self.offset).map(|at| at as usize);
        let all = self.data.len();
        self.covered += len;
        at.and_then(|at| self.data.get_mut(at..at + len))
            .ok_or_else(|| format!("a chunk of {len} bytes at {offset} for a read of {all}"))
    }

    fn chunk(&mut self, chunk: Chunk) -> Result<(), String> {
        match chunk {
            Chunk::None { .. } | Chunk::Simple { .. } => {}
            Chunk::Data { offset, data, .. } => self.data_at(offset, data.len())?.copy_from_slice(&data),
            Chunk::Hole { offset, len, .. } => self.data_at(offset, len as usize)?.fill(0),
            Chunk::Status { extents, .. } => {
                self.extents
                    .extend(extents.iter().map(|(len, flags)| (*len as u32, flags & HOLE_OR_ZERO != 0)));
            }
            Chunk::Error { error, .. } => self.error = error,
        }
        Ok(())
    }
}
