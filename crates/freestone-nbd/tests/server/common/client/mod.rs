//! A raw client that encodes every number itself and shares no code with the server.

mod replies;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use freestone_nbd::Address;

use super::Headers;

pub use self::replies::Chunk;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const DF: u16 = 4;
pub const REQ_ONE: u16 = 8;
pub const FAST_ZERO: u16 = 16;
pub const PAYLOAD_LEN: u16 = 32;

pub const ACK: u32 = 1;
pub const SERVER: u32 = 2;
pub const INFO: u32 = 3;
pub const META_CONTEXT: u32 = 4;
pub const ERR_UNSUP: u32 = 0x8000_0001;
pub const ERR_POLICY: u32 = 0x8000_0002;
pub const ERR_INVALID: u32 = 0x8000_0003;
pub const ERR_UNKNOWN: u32 = 0x8000_0006;
pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
pub const ERR_TOO_BIG: u32 = 0x8000_0009;
pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;

pub trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

pub struct Client {
    pub stream: Box<dyn Stream>,
    /// True if the server sends structured replies, which consist of chunks.
    pub structured: bool,
    /// True if requests and replies have extended headers.
    pub extended: bool,
    next_cookie: u64,
    /// Offsets of requests with extended headers, by cookie. Each reply must repeat the offset of its
    /// request.
    offsets: HashMap<u64, u64>,
}

/// A reply of the server to an option, which can have several replies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionReply {
    pub kind: u32,
    pub data: Vec<u8>,
}

/// Encodes a compact request header.
pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// Encodes an extended request header.
pub fn long_request(flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = 0x21e4_1c71_u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    for number in [cookie, offset, len] {
        bytes.extend(number.to_be_bytes());
    }
    bytes
}

/// Encodes an option with its data.
pub fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

pub fn info_data(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((wanted.len() as u16).to_be_bytes());
    data.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

pub fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend((query.len() as u32).to_be_bytes());
        data.extend(query.as_bytes());
    }
    data
}

impl Client {
    pub fn connect(address: &Address) -> Self {
        let patience = Some(Duration::from_secs(30));
        let stream: Box<dyn Stream> = match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).unwrap();
                stream.set_read_timeout(patience).unwrap();
                Box::new(stream)
            }
            Address::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).unwrap();
                stream.set_read_timeout(patience).unwrap();
                Box::new(stream)
            }
            Address::Stdin => unreachable!("no connects at stdin"),
        };
        Self::over(stream)
    }

    pub fn over(stream: Box<dyn Stream>) -> Self {
        Self { stream, structured: false, extended: false, next_cookie: 1, offsets: HashMap::new() }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes(2).try_into().unwrap())
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes(8).try_into().unwrap())
    }

    /// Checks that the server closes the connection without sending data.
    pub fn assert_closed(&mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => assert_eq!(rest, [0_u8; 0], "the server sent more"),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
            }
        }
    }

    pub fn greet(&mut self, flags: u32) {
        assert_eq!(self.bytes(8), b"NBDMAGIC");
        assert_eq!(self.bytes(8), b"IHAVEOPT");
        assert_eq!(self.u16(), 3);
        self.send(&flags.to_be_bytes());
    }

    pub fn option_reply(&mut self, option: u32) -> OptionReply {
        assert_eq!(self.u64(), 0x0003_e889_0455_65a9);
        assert_eq!(self.u32(), option);
        let kind = self.u32();
        let len = self.u32() as usize;
        OptionReply { kind, data: self.bytes(len) }
    }

    /// Receives the replies to an option, up to the last one, which is ACK or an error.
    pub fn option_replies(&mut self, option: u32) -> Vec<OptionReply> {
        let mut replies = Vec::new();
        loop {
            let reply = self.option_reply(option);
            let last = reply.kind == ACK || reply.kind >= 1 << 31;
            if reply.kind == ACK {
                assert!(reply.data.is_empty());
            }
            replies.push(reply);
            if last {
                return replies;
            }
        }
    }

    pub fn option(&mut self, kind: u32, data: &[u8]) -> Vec<OptionReply> {
        self.send(&option(kind, data));
        self.option_replies(kind)
    }

    /// Sends an option and returns the type of the server's last reply.
    pub fn outcome(&mut self, kind: u32, data: &[u8]) -> u32 {
        self.option(kind, data).last().unwrap().kind
    }

    pub fn structured(&mut self) {
        assert_eq!(self.outcome(8, &[]), ACK);
        self.structured = true;
    }

    pub fn extended(&mut self) {
        assert_eq!(self.outcome(11, &[]), ACK);
        (self.structured, self.extended) = (true, true);
    }

    pub fn agree(&mut self, headers: Headers) {
        match headers {
            Headers::Simple => {}
            Headers::Structured => self.structured(),
            Headers::Extended => self.extended(),
        }
    }

    /// Selects metadata contexts of an export. Returns the identifiers and names that the server confirms.
    pub fn set_contexts(&mut self, name: &str, queries: &[&str]) -> Vec<(u32, String)> {
        let mut replies = self.option(10, &context_data(name, queries));
        assert_eq!(replies.pop().unwrap().kind, ACK);
        let parse = |reply: OptionReply| {
            assert_eq!(reply.kind, META_CONTEXT);
            let (id, name) = reply.data.split_at(4);
            (u32::from_be_bytes(id.try_into().unwrap()), String::from_utf8(name.to_vec()).unwrap())
        };
        replies.into_iter().map(parse).collect()
    }

    pub fn set_context(&mut self, name: &str) {
        let replies = self.option(10, &context_data(name, &["base:allocation"]));
        assert_eq!(replies.len(), 2, "{replies:?}");
        assert_eq!(replies[0].kind, META_CONTEXT);
    }

    /// Chooses an export with `NBD_OPT_GO`. Returns the size in bytes and the transmission flags.
    pub fn go(&mut self, name: &str) -> (u64, u16) {
        let replies = self.option(7, &info_data(name, &[]));
        assert_eq!(replies.last().unwrap().kind, ACK, "{replies:?}");
        export_info(&replies)
    }

    pub fn cookie(&mut self) -> u64 {
        self.next_cookie += 1;
        self.next_cookie
    }

    /// Encodes a request header with the negotiated layout.
    pub fn header(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
        if !self.extended {
            return request(flags, command, cookie, offset, u32::try_from(len).unwrap());
        }
        self.offsets.insert(cookie, offset);
        long_request(flags, command, cookie, offset, len)
    }

    pub fn ask(&mut self, flags: u16, command: u16, offset: u64, len: u32) -> u64 {
        self.ask_long(flags, command, offset, len.into())
    }

    pub fn ask_long(&mut self, flags: u16, command: u16, offset: u64, len: u64) -> u64 {
        let cookie = self.cookie();
        let header = self.header(flags, command, cookie, offset, len);
        self.send(&header);
        cookie
    }

    /// Runs a request like [`run`](Self::run), with extended headers.
    pub fn run_long(&mut self, flags: u16, command: u16, offset: u64, len: u64) -> u32 {
        let cookie = self.ask_long(flags, command, offset, len);
        self.plain_reply(cookie)
    }

    /// Runs a request without data in its reply. Returns the error number of the reply; 0 means success.
    pub fn run(&mut self, flags: u16, command: u16, offset: u64, len: u32) -> u32 {
        let cookie = self.ask(flags, command, offset, len);
        self.plain_reply(cookie)
    }

    pub fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        let cookie = self.cookie();
        let flags = if self.extended { flags | PAYLOAD_LEN } else { flags };
        let mut bytes = self.header(flags, WRITE, cookie, offset, data.len() as u64);
        bytes.extend(data);
        self.send(&bytes);
        self.plain_reply(cookie)
    }

    pub fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        let cookie = self.ask(0, READ, offset, len);
        let mut wanted = HashMap::from([(cookie, (offset, len))]);
        let mut got = self.read_replies(&mut wanted);
        got.remove(&cookie).unwrap()
    }

    pub fn disconnect(mut self) {
        self.ask(0, DISC, 0, 0);
        self.assert_closed();
    }
}

/// Returns the size in bytes and the transmission flags of an export from the replies to INFO or GO.
pub fn export_info(replies: &[OptionReply]) -> (u64, u16) {
    let reply = replies.iter().find(|reply| reply.kind == INFO && reply.data[..2] == [0, 0]).unwrap();
    assert_eq!(reply.data.len(), 12);
    let size = u64::from_be_bytes(reply.data[2..10].try_into().unwrap());
    (size, u16::from_be_bytes(reply.data[10..].try_into().unwrap()))
}
