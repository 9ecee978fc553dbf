//! An NBD client with many requests in flight. The constants of the protocol are defined here
//! again, so that no error is shared with the server.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use freestone_testkit::Rng;
use rustix::event::{PollFd, PollFlags, poll};

use super::protocol::{ConnectionError, DISC, Properties, READ, Reply};

/// Transmission flags of an export.
const READ_ONLY: u16 = 1 << 1;
const SEND_TRIM: u16 = 1 << 5;
const SEND_WRITE_ZEROES: u16 = 1 << 6;

const HOLE_OR_ZERO: u32 = 2;
const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
const ERR_BIT: u32 = 1 << 31;
/// Maximum length in bytes of the error text, the extents or the data of one chunk.
const CHUNK_MAX_BYTES: usize = 33 << 20;

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

/// Receives the greeting and sends the client flags. The option phase follows.
pub fn greet(stream: &mut UnixStream, no_zeroes: bool) -> Result<(), ConnectionError> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
        return Err(ConnectionError::Protocol(format!("greeting {greeting:x?}")));
    }
    let flags: u32 = if no_zeroes { 3 } else { 1 };
    stream.write_all(&flags.to_be_bytes())?;
    Ok(())
}

pub fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_vec();
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Encodes the data of the options `INFO` and `GO` for the export `name`.
pub fn go_data(name: &str) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend([0, 0]);
    data
}

pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

fn u32_at(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().expect("eight bytes"))
}

/// Reads the replies to one option, up to `ACK`. Returns the type and the data of each.
fn replies(stream: &mut UnixStream, option: u32) -> Result<Vec<(u32, Vec<u8>)>, ConnectionError> {
    let mut all = Vec::new();
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header)?;
        let (kind, len) = (u32_at(&header[12..]), u32_at(&header[16..]) as usize);
        if u64_at(&header) != OPTION_REPLY_MAGIC || u32_at(&header[8..]) != option || len > CHUNK_MAX_BYTES {
            return Err(ConnectionError::Protocol(format!("reply to option {option}: {header:x?}")));
        }
        let mut data = vec![0; len];
        stream.read_exact(&mut data)?;
        match kind {
            1 => return Ok(all),
            _ if kind & ERR_BIT != 0 => {
                return Err(ConnectionError::Refused(kind, String::from_utf8_lossy(&data).into_owned()));
            }
            _ => all.push((kind, data)),
        }
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
        greet(&mut stream, no_zeroes)?;
        let (mut structured, mut contexts) = (false, false);
        if rng.chance(60) {
            stream.write_all(&option(8, &[]))?;
            replies(&mut stream, 8)?;
            structured = true;
            if rng.chance(60) {
                let query = b"base:allocation";
                let mut data = (name.len() as u32).to_be_bytes().to_vec();
                data.extend(name.as_bytes());
                data.extend(1_u32.to_be_bytes());
                data.extend((query.len() as u32).to_be_bytes());
                data.extend(query);
                stream.write_all(&option(10, &data))?;
                contexts = !replies(&mut stream, 10)?.is_empty();
            }
        }
        let (size, flags) = if contexts || rng.chance(70) {
            stream.write_all(&option(7, &go_data(name)))?;
            let all = replies(&mut stream, 7)?;
            let export =
                all.iter().find(|(kind, data)| *kind == 3 && data.len() == 12 && data[..2] == [0, 0]);
            let Some((_, data)) = export else {
                return Err(ConnectionError::Protocol(format!(
                    "the reply to GO has no export information: {all:x?}"
                )));
            };
            (u64_at(&data[2..]), u16::from_be_bytes([data[10], data[11]]))
        } else {
            stream.write_all(&option(1, name.as_bytes()))?;
            let mut reply = vec![0; if no_zeroes { 10 } else { 134 }];
            stream.read_exact(&mut reply)?;
            (u64_at(&reply), u16::from_be_bytes([reply[8], reply[9]]))
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
        self.out.extend(request(flags, command, cookie, offset, len));
        self.out.extend(data);
        // Allocate no memory for a longer read: the server refuses it.
        let room = if command == READ && len as usize <= CHUNK_MAX_BYTES { len as usize } else { 0 };
        let pending =
            Pending { command, offset, data: vec![0xa5; room], covered: 0, error: 0, extents: Vec::new() };
        self.pending.insert(cookie, pending);
        self.push()?;
        Ok(cookie)
    }

    /// Ends the connection in an orderly way, with a `DISC` request.
    pub fn leave(mut self) -> Result<(), ConnectionError> {
        self.out.extend(request(0, DISC, 0, 0, 0));
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
            if bytes.len() < 16 {
                break;
            }
            let magic = u32_at(bytes);
            let done = match magic {
                SIMPLE_MAGIC => {
                    let (error, cookie) = (u32_at(&bytes[4..]), u64_at(&bytes[8..]));
                    let Some(pending) = self.pending.get_mut(&cookie) else {
                        return Err(ConnectionError::Protocol(format!(
                            "a reply with an unknown cookie: {:x?}",
                            &bytes[..16]
                        )));
                    };
                    if self.structured && pending.command == READ {
                        return Err(ConnectionError::Protocol(
                            "a simple reply to a read although structured replies were negotiated".into(),
                        ));
                    }
                    let len = if error == 0 { pending.data.len() } else { 0 };
                    if bytes.len() < 16 + len {
                        break;
                    }
                    pending.data.copy_from_slice_if(&bytes[16..16 + len]);
                    pending.covered = pending.data.len();
                    pending.error = error;
                    self.taken += 16 + len;
                    Some(cookie)
                }
                CHUNK_MAGIC if self.structured => {
                    if bytes.len() < 20 {
                        break;
                    }
                    let len = u32_at(&bytes[16..]) as usize;
                    if len > CHUNK_MAX_BYTES {
                        return Err(ConnectionError::Protocol(format!("a chunk of {len} bytes")));
                    }
                    if bytes.len() < 20 + len {
                        break;
                    }
                    let (cookie, last) = (u64_at(&bytes[8..]), bytes[5] & 1 != 0);
                    let kind = u16::from_be_bytes([bytes[6], bytes[7]]);
                    let Some(pending) = self.pending.get_mut(&cookie) else {
                        return Err(ConnectionError::Protocol(format!(
                            "a chunk with an unknown cookie: {:x?}",
                            &bytes[..20]
                        )));
                    };
                    pending.chunk(kind, &bytes[20..20 + len]).map_err(ConnectionError::Protocol)?;
                    self.taken += 20 + len;
                    last.then_some(cookie)
                }
                _ => return Err(ConnectionError::Protocol(format!("not a reply: {:x?}", &bytes[..16]))),
            };
            if let Some(cookie) = done {
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

trait CopyIf {
    fn copy_from_slice_if(&mut self, from: &[u8]);
}

impl CopyIf for Vec<u8> {
    /// Copies `from`, unless it is empty, as in a reply with an error.
    fn copy_from_slice_if(&mut self, from: &[u8]) {
        if !from.is_empty() {
            self.copy_from_slice(from);
        }
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

    fn chunk(&mut self, kind: u16, body: &[u8]) -> Result<(), String> {
        match (kind, body.len()) {
            (0, 0) => {}
            (1, 9..) => self.data_at(u64_at(body), body.len() - 8)?.copy_from_slice(&body[8..]),
            (2, 12) => self.data_at(u64_at(body), u32_at(&body[8..]) as usize)?.fill(0),
            (5, 12..) => {
                let extents = body[4..].chunks_exact(8);
                self.extents.extend(extents.map(|e| (u32_at(e), u32_at(&e[4..]) & HOLE_OR_ZERO != 0)));
            }
            (0x8001 | 0x8002, 6..) => self.error = u32_at(body),
            _ => return Err(format!("a chunk of kind {kind:#x} with {} bytes", body.len())),
        }
        Ok(())
    }
}
