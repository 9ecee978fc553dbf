//! An NBD client with many requests on their way. Every number is written out here: nothing is
//! shared with the server.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use freestone_testkit::Rng;
use rustix::event::{PollFd, PollFlags, poll};

use super::said::{Broken, DISC, Offers, READ, Reply};

/// Bits of an export's flags.
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
/// No error text, extents or data of one chunk are longer.
const CHUNK_MAX_BYTES: usize = 33 << 20;

struct Pending {
    command: u16,
    offset: u64,
    data: Vec<u8>,
    covered: usize,
    error: u32,
    extents: Vec<(u32, bool)>,
}

/// A connection in its transmission phase.
pub struct Wire {
    stream: UnixStream,
    out: Vec<u8>,
    received: Vec<u8>,
    taken: usize,
    pending: HashMap<u64, Pending>,
    next_cookie: u64,
    structured: bool,
    /// What was offered when the export was chosen.
    pub offers: Offers,
}

/// The magic numbers, and our flags; the stream is in its option phase then.
pub fn greet(stream: &mut UnixStream, no_zeroes: bool) -> Result<(), Broken> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
        return Err(Broken::Wrong(format!("greeting {greeting:x?}")));
    }
    let flags: u32 = if no_zeroes { 3 } else { 1 };
    stream.write_all(&flags.to_be_bytes())?;
    Ok(())
}

/// An option with its data.
pub fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_vec();
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The data of `INFO` and `GO`.
pub fn go_data(name: &str) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend([0, 0]);
    data
}

/// A request's header.
pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().expect("four bytes"))
}

fn long(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().expect("eight bytes"))
}

/// The replies to one option, up to `ACK`.
fn replies(stream: &mut UnixStream, option: u32) -> Result<Vec<(u32, Vec<u8>)>, Broken> {
    let mut all = Vec::new();
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header)?;
        let (kind, len) = (word(&header[12..]), word(&header[16..]) as usize);
        if long(&header) != OPTION_REPLY_MAGIC || word(&header[8..]) != option || len > CHUNK_MAX_BYTES {
            return Err(Broken::Wrong(format!("reply to option {option}: {header:x?}")));
        }
        let mut data = vec![0; len];
        stream.read_exact(&mut data)?;
        match kind {
            1 => return Ok(all),
            _ if kind & ERR_BIT != 0 => {
                return Err(Broken::Refused(kind, String::from_utf8_lossy(&data).into_owned()));
            }
            _ => all.push((kind, data)),
        }
    }
}

impl Wire {
    /// Chooses an export, in one of the ways that there are.
    pub fn connect(path: &Path, name: &str, rng: &mut Rng) -> Result<Self, Broken> {
        Self::over(UnixStream::connect(path)?, name, rng)
    }

    /// Chooses an export on a connection that was just made.
    pub fn over(mut stream: UnixStream, name: &str, rng: &mut Rng) -> Result<Self, Broken> {
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
                return Err(Broken::Wrong(format!("GO is answered without the export: {all:x?}")));
            };
            (long(&data[2..]), u16::from_be_bytes([data[10], data[11]]))
        } else {
            stream.write_all(&option(1, name.as_bytes()))?;
            let mut reply = vec![0; if no_zeroes { 10 } else { 134 }];
            stream.read_exact(&mut reply)?;
            (long(&reply), u16::from_be_bytes([reply[8], reply[9]]))
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
            offers: Offers {
                size,
                writable: flags & READ_ONLY == 0,
                zeroes: flags & SEND_WRITE_ZEROES != 0,
                trims: flags & SEND_TRIM != 0,
                contexts,
                ..Offers::default()
            },
        })
    }

    /// How many requests have no answer yet.
    pub fn on_the_way(&self) -> usize {
        self.pending.len()
    }

    /// The cookie of the request that is sent next.
    pub fn next(&self) -> u64 {
        self.next_cookie
    }

    /// Sends a request as far as that goes without waiting; its cookie.
    pub fn send(
        &mut self,
        flags: u16,
        command: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> Result<u64, Broken> {
        let cookie = self.next_cookie;
        self.next_cookie = self.next_cookie.wrapping_add(0x1_0001);
        self.out.extend(request(flags, command, cookie, offset, len));
        self.out.extend(data);
        // More is refused.
        let room = if command == READ && len as usize <= CHUNK_MAX_BYTES { len as usize } else { 0 };
        let pending =
            Pending { command, offset, data: vec![0xa5; room], covered: 0, error: 0, extents: Vec::new() };
        self.pending.insert(cookie, pending);
        self.push()?;
        Ok(cookie)
    }

    /// The end of the conversation, as it should be.
    pub fn leave(mut self) -> Result<(), Broken> {
        self.out.extend(request(0, DISC, 0, 0, 0));
        while !self.out.is_empty() {
            self.wait()?;
            self.push()?;
        }
        Ok(())
    }

    /// The next answer, whichever request's it is.
    pub fn reply(&mut self) -> Result<Reply, Broken> {
        loop {
            if let Some(reply) = self.parse()? {
                return Ok(reply);
            }
            self.wait()?;
            self.push()?;
            self.pull()?;
        }
    }

    fn wait(&self) -> Result<(), Broken> {
        let mut wanted = PollFlags::IN;
        if !self.out.is_empty() {
            wanted |= PollFlags::OUT;
        }
        match poll(&mut [PollFd::new(&self.stream, wanted)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Broken::Ended(error.to_string())),
        }
    }

    fn push(&mut self) -> Result<(), Broken> {
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

    fn pull(&mut self) -> Result<(), Broken> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Broken::Ended("the server closed it".into())),
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

    /// Takes one reply out of what was received, if there is a whole one.
    fn parse(&mut self) -> Result<Option<Reply>, Broken> {
        loop {
            let bytes = &self.received[self.taken..];
            if bytes.len() < 16 {
                break;
            }
            let magic = word(bytes);
            let done = match magic {
                SIMPLE_MAGIC => {
                    let (error, cookie) = (word(&bytes[4..]), long(&bytes[8..]));
                    let Some(pending) = self.pending.get_mut(&cookie) else {
                        return Err(Broken::Wrong(format!("an answer to nothing: {:x?}", &bytes[..16])));
                    };
                    if self.structured && pending.command == READ {
                        return Err(Broken::Wrong(
                            "a simple reply to a read where structured ones were agreed".into(),
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
                    let len = word(&bytes[16..]) as usize;
                    if len > CHUNK_MAX_BYTES {
                        return Err(Broken::Wrong(format!("a chunk of {len} bytes")));
                    }
                    if bytes.len() < 20 + len {
                        break;
                    }
                    let (cookie, last) = (long(&bytes[8..]), bytes[5] & 1 != 0);
                    let kind = u16::from_be_bytes([bytes[6], bytes[7]]);
                    let Some(pending) = self.pending.get_mut(&cookie) else {
                        return Err(Broken::Wrong(format!("a chunk for nothing: {:x?}", &bytes[..20])));
                    };
                    pending.chunk(kind, &bytes[20..20 + len]).map_err(Broken::Wrong)?;
                    self.taken += 20 + len;
                    last.then_some(cookie)
                }
                _ => return Err(Broken::Wrong(format!("not a reply: {:x?}", &bytes[..16]))),
            };
            if let Some(cookie) = done {
                self.tidy();
                let pending = self.pending.remove(&cookie).expect("it was there");
                if pending.error == 0 && pending.covered != pending.data.len() {
                    let (got, all) = (pending.covered, pending.data.len());
                    return Err(Broken::Wrong(format!("a read of {all} bytes was answered with {got}")));
                }
                let Pending { error, data, extents, .. } = pending;
                return Ok(Some(Reply { cookie, error, data, extents }));
            }
        }
        self.tidy();
        Ok(None)
    }

    fn tidy(&mut self) {
        self.received.drain(..self.taken);
        self.taken = 0;
    }
}

trait CopyIf {
    fn copy_from_slice_if(&mut self, from: &[u8]);
}

impl CopyIf for Vec<u8> {
    /// Nothing came with an error.
    fn copy_from_slice_if(&mut self, from: &[u8]) {
        if !from.is_empty() {
            self.copy_from_slice(from);
        }
    }
}

impl Pending {
    fn place(&mut self, offset: u64, len: usize) -> Result<&mut [u8], String> {
        let at = offset.checked_sub(self.offset).map(|at| at as usize);
        let all = self.data.len();
        self.covered += len;
        at.and_then(|at| self.data.get_mut(at..at + len))
            .ok_or_else(|| format!("a chunk of {len} bytes at {offset} for a read of {all}"))
    }

    fn chunk(&mut self, kind: u16, body: &[u8]) -> Result<(), String> {
        match (kind, body.len()) {
            (0, 0) => {}
            (1, 9..) => self.place(long(body), body.len() - 8)?.copy_from_slice(&body[8..]),
            (2, 12) => self.place(long(body), word(&body[8..]) as usize)?.fill(0),
            (5, 12..) => {
                let extents = body[4..].chunks_exact(8);
                self.extents.extend(extents.map(|e| (word(e), word(&e[4..]) & HOLE_OR_ZERO != 0)));
            }
            (0x8001 | 0x8002, 6..) => self.error = word(body),
            _ => return Err(format!("a chunk of kind {kind:#x} with {} bytes", body.len())),
        }
        Ok(())
    }
}
