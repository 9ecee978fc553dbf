//! Replies to requests: chunks, data, and block status.

use std::collections::HashMap;

use super::{BLOCK_STATUS, Client, PAYLOAD_LEN};

/// Block status of one context: the identifier of the context, and the length and flags of each extent.
pub type Context = (u32, Vec<(u32, u32)>);

/// Block status of one context in a reply with extended headers, which has 64-bit lengths and flags.
pub type LongContext = (u32, Vec<(u64, u64)>);

/// A chunk of a structured reply, or a simple reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    Simple { cookie: u64, error: u32 },
    None { cookie: u64 },
    Data { cookie: u64, done: bool, offset: u64, data: Vec<u8> },
    Hole { cookie: u64, done: bool, offset: u64, len: u32 },
    Status { cookie: u64, done: bool, context: u32, extents: Vec<(u32, u32)> },
    LongStatus { cookie: u64, done: bool, context: u32, extents: Vec<(u64, u64)> },
    Error { cookie: u64, error: u32, text: String },
}

impl Chunk {
    pub fn cookie(&self) -> u64 {
        match self {
            Self::Simple { cookie, .. }
            | Self::None { cookie }
            | Self::Data { cookie, .. }
            | Self::Hole { cookie, .. }
            | Self::Status { cookie, .. }
            | Self::LongStatus { cookie, .. }
            | Self::Error { cookie, .. } => *cookie,
        }
    }

    pub fn ends(&self) -> bool {
        !matches!(
            self,
            Self::Data { done: false, .. }
                | Self::Hole { done: false, .. }
                | Self::Status { done: false, .. }
                | Self::LongStatus { done: false, .. }
        )
    }
}

impl Client {
    pub fn chunk(&mut self) -> Chunk {
        match self.u32() {
            0x6744_6698 => {
                assert!(!self.extended);
                let error = self.u32();
                Chunk::Simple { error, cookie: self.u64() }
            }
            0x668e_33ef => {
                assert!(!self.extended);
                let (flags, kind, cookie) = (self.u16(), self.u16(), self.u64());
                let len = self.u32() as usize;
                self.payload(flags, kind, cookie, len)
            }
            0x6e8a_278c => {
                assert!(self.extended);
                let (flags, kind, cookie, offset) = (self.u16(), self.u16(), self.u64(), self.u64());
                let len = self.u64() as usize;
                if let Some(asked) = self.offsets.get(&cookie) {
                    assert_eq!(*asked, offset, "the reply is to another offset");
                }
                self.payload(flags, kind, cookie, len)
            }
            magic => panic!("no reply: {magic:#x}"),
        }
    }

    fn payload(&mut self, flags: u16, kind: u16, cookie: u64, len: usize) -> Chunk {
        assert!(flags <= 1);
        let done = flags == 1;
        match kind {
            0 => {
                assert!(done && len == 0);
                Chunk::None { cookie }
            }
            1 => {
                assert!(len >= 9);
                let offset = self.u64();
                Chunk::Data { cookie, done, offset, data: self.bytes(len - 8) }
            }
            2 => {
                assert_eq!(len, 12);
                Chunk::Hole { cookie, done, offset: self.u64(), len: self.u32() }
            }
            5 => {
                assert!(!self.extended && len >= 12 && (len - 4).is_multiple_of(8));
                let context = self.u32();
                let extents = (0..(len - 4) / 8).map(|_| (self.u32(), self.u32())).collect();
                Chunk::Status { cookie, done, context, extents }
            }
            6 => {
                assert!(self.extended);
                let (context, count) = (self.u32(), self.u32());
                assert!(count > 0 && len == 8 + 16 * count as usize);
                let extents = (0..count).map(|_| (self.u64(), self.u64())).collect();
                Chunk::LongStatus { cookie, done, context, extents }
            }
            0x8001 => {
                assert!(done);
                let error = self.u32();
                let text_len = self.u16() as usize;
                assert_eq!(text_len + 6, len);
                let text = String::from_utf8(self.bytes(text_len)).unwrap();
                Chunk::Error { cookie, error, text }
            }
            kind => panic!("chunk of kind {kind}"),
        }
    }

    pub fn plain_reply(&mut self, wanted: u64) -> u32 {
        match self.chunk() {
            Chunk::Simple { cookie, error } | Chunk::Error { cookie, error, .. } => {
                assert_eq!(cookie, wanted);
                error
            }
            Chunk::None { cookie } if self.extended => {
                assert_eq!(cookie, wanted);
                0
            }
            other => panic!("{other:?}"),
        }
    }

    /// Receives the replies to the reads in `wanted`, and returns data or error number by cookie. Checks that
    /// the chunks cover each read exactly.
    pub fn read_replies(
        &mut self,
        wanted: &mut HashMap<u64, (u64, u32)>,
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
                    assert!(!self.structured, "a simple reply to a read");
                    let data = self.bytes(len as usize);
                    parts.entry(cookie).or_default().push((offset, data));
                }
                Chunk::Simple { error: errno, .. } => {
                    assert!(!self.structured, "a simple reply to a read");
                    error = Some(errno);
                }
                Chunk::Error { error: errno, .. } => error = Some(errno),
                Chunk::Data { offset, data, .. } => parts.entry(cookie).or_default().push((offset, data)),
                Chunk::Hole { offset, len, .. } => {
                    assert!(len > 0);
                    parts.entry(cookie).or_default().push((offset, vec![0; len as usize]));
                }
                Chunk::None { .. } => {}
                status @ (Chunk::Status { .. } | Chunk::LongStatus { .. }) => panic!("{status:?}"),
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
                assert_eq!(all.len(), len as usize);
                Ok(all)
            };
            results.insert(cookie, result);
        }
        results
    }

    /// Returns the length and flags of the extents of `base:allocation`, the only selected context.
    pub fn status(&mut self, flags: u16, offset: u64, len: u32) -> Result<Vec<(u32, u32)>, u32> {
        let mut contexts = self.statuses(flags, offset, len)?;
        assert_eq!(contexts.len(), 1, "{contexts:?}");
        assert_eq!(contexts[0].0, 1);
        Ok(contexts.remove(0).1)
    }

    /// Queries the block status. Returns each context's identifier and extents, in the order of the chunks.
    pub fn statuses(&mut self, flags: u16, offset: u64, len: u32) -> Result<Vec<Context>, u32> {
        let wanted = self.ask(flags, BLOCK_STATUS, offset, len);
        let mut contexts = Vec::new();
        loop {
            match self.chunk() {
                Chunk::Status { cookie, done, context, extents } => {
                    assert_eq!(cookie, wanted);
                    contexts.push((context, extents));
                    if done {
                        return Ok(contexts);
                    }
                }
                Chunk::Error { cookie, error, .. } | Chunk::Simple { cookie, error } => {
                    assert_eq!(cookie, wanted);
                    return Err(error);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Queries the block status like [`statuses`](Self::statuses), with extended headers.
    pub fn long_statuses(&mut self, flags: u16, offset: u64, len: u64) -> Result<Vec<LongContext>, u32> {
        let wanted = self.ask_long(flags, BLOCK_STATUS, offset, len);
        self.long_status_reply(wanted)
    }

    /// Queries the block status of only the contexts with these identifiers.
    pub fn status_of(&mut self, offset: u64, len: u64, ids: &[u32]) -> Result<Vec<LongContext>, u32> {
        let mut payload = len.to_be_bytes().to_vec();
        payload.extend(ids.iter().flat_map(|id| id.to_be_bytes()));
        self.status_with(0, offset, &payload)
    }

    /// Sends a block status request with this payload, valid or not. Returns the block status.
    pub fn status_with(&mut self, flags: u16, offset: u64, payload: &[u8]) -> Result<Vec<LongContext>, u32> {
        let cookie = self.cookie();
        let flags = flags | PAYLOAD_LEN;
        let mut bytes = self.header(flags, BLOCK_STATUS, cookie, offset, payload.len() as u64);
        bytes.extend(payload);
        self.send(&bytes);
        self.long_status_reply(cookie)
    }

    fn long_status_reply(&mut self, wanted: u64) -> Result<Vec<LongContext>, u32> {
        let mut contexts = Vec::new();
        loop {
            match self.chunk() {
                Chunk::LongStatus { cookie, done, context, extents } => {
                    assert_eq!(cookie, wanted);
                    contexts.push((context, extents));
                    if done {
                        return Ok(contexts);
                    }
                }
                Chunk::Error { cookie, error, .. } => {
                    assert_eq!(cookie, wanted);
                    return Err(error);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
