//! Parses the replies of an NBD server. A malformed reply causes a panic.

use freestone_testkit::nbd::wire::{CHUNK_MAGIC, EXTENDED_CHUNK_MAGIC, Headers, SIMPLE_REPLY_MAGIC};

/// Reader of big-endian numbers and bytes. Panics at the end of the input.
pub struct ReplyReader<'a>(pub &'a [u8]);

impl<'a> ReplyReader<'a> {
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        assert!(n <= self.0.len(), "{n} bytes are announced, {} are left", self.0.len());
        let (bytes, rest) = self.0.split_at(n);
        self.0 = rest;
        bytes
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        self.bytes(N).try_into().expect("N bytes")
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.array())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.array())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.array())
    }
}

/// Complete reply to one request.
#[derive(Debug, Default)]
pub struct Answer<'a> {
    /// Error number of the final reply; 0 is success. None if there was no final reply.
    pub outcome: Option<u32>,
    /// Chunks of data, each with its offset on the device.
    pub data: Vec<(u64, &'a [u8])>,
    /// Chunks of zeroes: offset on the device and length in bytes.
    pub holes: Vec<(u64, u32)>,
    /// Block status for each context ID: lengths in bytes and flags of the extents.
    pub status: Vec<(u32, Vec<(u64, u64)>)>,
}

impl Answer<'_> {
    /// Returns true if the reply has an outcome but no data, zeroes or block status.
    pub fn is_plain(&self) -> bool {
        self.data.is_empty() && self.holes.is_empty() && self.status.is_empty()
    }
}

/// Parses the replies of a session to `count` requests, whose cookies are 0, 1, …. Returns the reply to each
/// request. `range_of` returns the offset of a request, and its length if its simple reply carries data.
pub fn answers<'a>(
    reader: &'a [u8],
    count: usize,
    headers: Headers,
    range_of: &dyn Fn(usize) -> (u64, Option<usize>),
) -> Vec<Answer<'a>> {
    let mut answers: Vec<_> = (0..count).map(|_| Answer::default()).collect();
    let mut reader = ReplyReader(reader);
    while !reader.0.is_empty() {
        match reader.u32() {
            SIMPLE_REPLY_MAGIC => {
                assert!(
                    headers != Headers::Extended,
                    "a simple reply after extended headers were negotiated"
                );
                let error = reader.u32();
                let index = reader.u64() as usize;
                let answer = open_reply(&mut answers, index);
                answer.outcome = Some(error);
                if let (offset, Some(len)) = range_of(index) {
                    assert!(
                        headers == Headers::Simple,
                        "a simple reply to a read after structured replies were negotiated"
                    );
                    if error == 0 {
                        answer.data.push((offset, reader.bytes(len)));
                    }
                }
            }
            CHUNK_MAGIC => {
                assert!(headers == Headers::Structured, "a structured reply that was not negotiated");
                let (flags, kind, index, len) = (reader.u16(), reader.u16(), reader.u64(), reader.u32());
                let answer = open_reply(&mut answers, index as usize);
                chunk(answer, kind, ReplyReader(reader.bytes(len as usize)), flags, false);
            }
            EXTENDED_CHUNK_MAGIC => {
                assert!(headers == Headers::Extended, "an extended reply that was not negotiated");
                let (flags, kind, index) = (reader.u16(), reader.u16(), reader.u64() as usize);
                let (offset, len) = (reader.u64(), reader.u64());
                let answer = open_reply(&mut answers, index);
                assert_eq!(offset, range_of(index).0, "the reply to {index} has another offset");
                chunk(answer, kind, ReplyReader(reader.bytes(len as usize)), flags, true);
            }
            magic => panic!("a reply begins with {magic:#x}"),
        }
    }
    answers
}

fn open_reply<'a, 'b>(answers: &'b mut [Answer<'a>], index: usize) -> &'b mut Answer<'a> {
    let count = answers.len();
    let answer = answers.get_mut(index);
    let answer = answer.unwrap_or_else(|| panic!("a reply to request {index} of {count}"));
    assert!(answer.outcome.is_none(), "request {index} has a second reply");
    answer
}

fn chunk<'a>(answer: &mut Answer<'a>, kind: u16, mut payload: ReplyReader<'a>, flags: u16, extended: bool) {
    assert!(flags <= 1, "flags {flags:#x}");
    let done = flags == 1;
    if done {
        answer.outcome = Some(0);
    }
    match kind {
        0 => assert!(done && payload.0.is_empty(), "an empty chunk that is not the last one"),
        1 => {
            let offset = payload.u64();
            assert!(!payload.0.is_empty(), "a chunk of no data");
            answer.data.push((offset, payload.0));
        }
        2 => {
            let (offset, len) = (payload.u64(), payload.u32());
            assert!(payload.0.is_empty() && len > 0, "a hole of nothing");
            answer.holes.push((offset, len));
        }
        5 => {
            assert!(!extended, "short extents among extended replies");
            let context = payload.u32();
            assert!(!payload.0.is_empty() && payload.0.len().is_multiple_of(8), "descriptors");
            let count = payload.0.len() / 8;
            let mut row = || (payload.u32().into(), payload.u32().into());
            answer.status.push((context, (0..count).map(|_| row()).collect()));
        }
        6 => {
            assert!(extended, "long extents among structured replies");
            let (context, count) = (payload.u32(), payload.u32());
            assert!(count > 0 && payload.0.len() == count as usize * 16, "{count} descriptors");
            answer.status.push((context, (0..count).map(|_| (payload.u64(), payload.u64())).collect()));
        }
        0x8001 => {
            let error = payload.u32();
            let len = payload.u16();
            assert!(error != 0 && done, "an error chunk without an error, or that is not the last one");
            assert_eq!(payload.0.len(), usize::from(len));
            let text = std::str::from_utf8(payload.0).expect("a message is text");
            assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
            answer.outcome = Some(error);
        }
        kind => panic!("a chunk of type {kind:#x}"),
    }
}
