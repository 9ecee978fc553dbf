//! A client that sends requests and waits for their replies. All its checks panic, so it is for tests.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};

use super::handshake::{self, OptionReply, export_info};
use super::replies::{Chunk, Reply};
use super::wire::{
    ACK, BLOCK_STATUS, DISC, GO, Headers, META_CONTEXT, PAYLOAD_LEN, READ, SET_META_CONTEXT, WRITE,
    context_data, info_data,
};

/// Block status of one context: the identifier of the context, and the length and flags of each extent.
type Context = (u32, Vec<(u64, u64)>);

pub trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

pub struct Client {
    pub stream: Box<dyn Stream>,
    pub headers: Headers,
    next_cookie: u64,
    /// Offsets of requests with extended headers, by cookie. Each reply must repeat the offset of its request.
    offsets: HashMap<u64, u64>,
}

impl Client {
    /// Returns a client on a new connection.
    pub fn over(stream: impl Stream + 'static) -> Self {
        let stream = Box::new(stream);
        Self { stream, headers: Headers::Simple, next_cookie: 1, offsets: HashMap::new() }
    }

    /// Returns true if the replies of the server consist of chunks.
    pub fn has_chunks(&self) -> bool {
        self.headers != Headers::Simple
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Checks that the server closes the connection without sending data.
    pub fn assert_closed(&mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => assert_eq!(rest, [0_u8; 0], "the server sent more"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
    }

    pub fn greet(&mut self, flags: u32) {
        handshake::greet(&mut self.stream, flags).unwrap();
    }

    pub fn option_reply(&mut self, option: u32) -> OptionReply {
        handshake::option_reply(&mut self.stream, option).unwrap()
    }

    /// Receives the replies to an option, up to the last one, which is ACK or an error.
    pub fn option_replies(&mut self, option: u32) -> Vec<OptionReply> {
        handshake::option_replies(&mut self.stream, option).unwrap()
    }

    pub fn option(&mut self, kind: u32, data: &[u8]) -> Vec<OptionReply> {
        handshake::negotiate(&mut self.stream, kind, data).unwrap()
    }

    /// Sends an option and returns the type of the server's last reply.
    pub fn outcome(&mut self, kind: u32, data: &[u8]) -> u32 {
        self.option(kind, data).last().unwrap().kind
    }

    /// Negotiates the type of headers.
    pub fn agree(&mut self, headers: Headers) {
        if let Some(option) = headers.option() {
            assert_eq!(self.outcome(option, &[]), ACK);
            self.headers = headers;
        }
    }

    /// Selects metadata contexts of an export. Returns the identifiers and names that the server confirms.
    pub fn set_contexts(&mut self, name: &str, queries: &[&str]) -> Vec<(u32, String)> {
        let mut replies = self.option(SET_META_CONTEXT, &context_data(name, queries));
        assert_eq!(replies.pop().unwrap().kind, ACK);
        let parse = |reply: OptionReply| {
            assert_eq!(reply.kind, META_CONTEXT);
            let (id, name) = reply.data.split_at(4);
            (u32::from_be_bytes(id.try_into().unwrap()), String::from_utf8(name.to_vec()).unwrap())
        };
        replies.into_iter().map(parse).collect()
    }

    pub fn set_context(&mut self, name: &str) {
        let contexts = self.set_contexts(name, &["base:allocation"]);
        assert_eq!(contexts.len(), 1, "{contexts:?}");
    }

    /// Chooses an export with `NBD_OPT_GO`. Returns the size in bytes and the transmission flags.
    pub fn go(&mut self, name: &str) -> (u64, u16) {
        let replies = self.option(GO, &info_data(name, &[]));
        assert_eq!(replies.last().unwrap().kind, ACK, "{replies:?}");
        export_info(&replies).unwrap()
    }

    pub fn cookie(&mut self) -> u64 {
        self.next_cookie += 1;
        self.next_cookie
    }

    /// Encodes a request header with the negotiated layout.
    pub fn header(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
        if self.headers == Headers::Extended {
            self.offsets.insert(cookie, offset);
        }
        self.headers.request(flags, command, cookie, offset, len)
    }

    pub fn ask(&mut self, flags: u16, command: u16, offset: u64, len: u64) -> u64 {
        let cookie = self.cookie();
        let header = self.header(flags, command, cookie, offset, len);
        self.send(&header);
        cookie
    }

    /// Sends a request with a payload, and with the flag of extended headers that announces the payload.
    fn ask_with(&mut self, flags: u16, command: u16, offset: u64, payload: &[u8]) -> u64 {
        let cookie = self.cookie();
        let flags = if self.headers == Headers::Extended { flags | PAYLOAD_LEN } else { flags };
        let mut bytes = self.header(flags, command, cookie, offset, payload.len() as u64);
        bytes.extend(payload);
        self.send(&bytes);
        cookie
    }

    /// Runs a request without data in its reply. Returns the error number of the reply; 0 means success.
    pub fn run(&mut self, flags: u16, command: u16, offset: u64, len: u64) -> u32 {
        let cookie = self.ask(flags, command, offset, len);
        self.plain_reply(cookie)
    }

    pub fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        let cookie = self.ask_with(flags, WRITE, offset, data);
        self.plain_reply(cookie)
    }

    pub fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        let cookie = self.ask(0, READ, offset, len.into());
        let mut wanted = HashMap::from([(cookie, (offset, len.into()))]);
        let mut got = self.read_replies(&mut wanted);
        got.remove(&cookie).unwrap()
    }

    pub fn disconnect(mut self) {
        self.ask(0, DISC, 0, 0);
        self.assert_closed();
    }

    pub fn chunk(&mut self) -> Chunk {
        let reply = Reply::receive(&mut self.stream).unwrap();
        assert_eq!(reply.offset.is_some(), self.headers == Headers::Extended, "{reply:?}");
        if let (Some(offset), Some(asked)) = (reply.offset, self.offsets.get(&reply.chunk.cookie())) {
            assert_eq!(*asked, offset, "the reply is to another offset");
        }
        reply.chunk
    }

    pub fn plain_reply(&mut self, wanted: u64) -> u32 {
        match self.chunk() {
            Chunk::Simple { cookie, error } | Chunk::Error { cookie, error, .. } => {
                assert_eq!(cookie, wanted);
                error
            }
            Chunk::None { cookie } if self.headers == Headers::Extended => {
                assert_eq!(cookie, wanted);
                0
            }
            other => panic!("{other:?}"),
        }
    }

    /// Receives the replies to the reads in `wanted`, and returns data or error number by cookie. Checks that the chunks
    /// cover each read exactly.
    pub fn read_replies(
        &mut self,
        wanted: &mut HashMap<u64, (u64, u64)>,
    ) -> HashMap<u64, Result<Vec<u8>, u32>> {
        let mut parts: HashMap<u64, Vec<(u64, Vec<u8>)>> = HashMap::new();
        let mut results = HashMap::new();
        while !wanted.is_empty() {
            let chunk = self.chunk();
            let cookie = chunk.cookie();
            let (offset, len) = wanted[&cookie];
            let ends = chunk.ends();
            let mut error = None;
            match chunk {
                Chunk::Simple { error: 0, .. } => {
                    assert!(!self.has_chunks(), "a simple reply to a read");
                    let data = self.bytes(len as usize);
                    parts.entry(cookie).or_default().push((offset, data));
                }
                Chunk::Simple { error: errno, .. } => {
                    assert!(!self.has_chunks(), "a simple reply to a read");
                    error = Some(errno);
                }
                Chunk::Error { error: errno, .. } => error = Some(errno),
                Chunk::Data { offset, data, .. } => parts.entry(cookie).or_default().push((offset, data)),
                Chunk::Hole { offset, len, .. } => {
                    assert!(len > 0);
                    parts.entry(cookie).or_default().push((offset, vec![0; len as usize]));
                }
                Chunk::None { .. } => {}
                status @ Chunk::Status { .. } => panic!("{status:?}"),
            }
            if !ends {
                continue;
            }
            wanted.remove(&cookie);
            let result = if let Some(error) = error {
                Err(error)
            } else {
                let mut parts = parts.remove(&cookie).unwrap();
                parts.sort_by_key(|(at, _)| *at);
                let mut all = Vec::new();
                for (at, data) in parts {
                    assert_eq!(at, offset + all.len() as u64, "chunks overlap or leave a gap");
                    all.extend(data);
                }
                assert_eq!(all.len() as u64, len);
                Ok(all)
            };
            results.insert(cookie, result);
        }
        results
    }

    /// Returns the length and flags of the extents of `base:allocation`, the only selected context.
    pub fn status(&mut self, flags: u16, offset: u64, len: u64) -> Result<Vec<(u64, u64)>, u32> {
        let mut contexts = self.statuses(flags, offset, len)?;
        assert_eq!(contexts.len(), 1, "{contexts:?}");
        assert_eq!(contexts[0].0, 1);
        Ok(contexts.remove(0).1)
    }

    /// Queries the block status. Returns each context's identifier and extents, in the order of the chunks.
    pub fn statuses(&mut self, flags: u16, offset: u64, len: u64) -> Result<Vec<Context>, u32> {
        let cookie = self.ask(flags, BLOCK_STATUS, offset, len);
        self.status_reply(cookie)
    }

    /// Queries the block status of only the contexts with these identifiers.
    pub fn status_of(&mut self, offset: u64, len: u64, ids: &[u32]) -> Result<Vec<Context>, u32> {
        let mut payload = len.to_be_bytes().to_vec();
        payload.extend(ids.iter().flat_map(|id| id.to_be_bytes()));
        self.status_with(0, offset, &payload)
    }

    /// Sends a block status request with this payload, valid or not. Returns the block status.
    pub fn status_with(&mut self, flags: u16, offset: u64, payload: &[u8]) -> Result<Vec<Context>, u32> {
        let cookie = self.ask_with(flags, BLOCK_STATUS, offset, payload);
        self.status_reply(cookie)
    }

    fn status_reply(&mut self, wanted: u64) -> Result<Vec<Context>, u32> {
        let mut contexts = Vec::new();
        loop {
            let chunk = self.chunk();
            assert_eq!(chunk.cookie(), wanted);
            match chunk {
                Chunk::Status { done, context, extents, .. } => {
                    contexts.push((context, extents));
                    if done {
                        return Ok(contexts);
                    }
                }
                Chunk::Error { error, .. } | Chunk::Simple { error, .. } => return Err(error),
                other => panic!("{other:?}"),
            }
        }
    }
}
