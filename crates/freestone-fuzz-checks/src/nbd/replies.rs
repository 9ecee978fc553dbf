//! What a server says, taken apart; whatever is not well formed panics.

use super::requests::Headers;

/// Big-endian numbers and bytes from the front.
pub struct Heard<'a>(pub &'a [u8]);

impl<'a> Heard<'a> {
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        assert!(n <= self.0.len(), "{n} bytes are announced, {} are there", self.0.len());
        let (bytes, rest) = self.0.split_at(n);
        self.0 = rest;
        bytes
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        self.bytes(N).try_into().expect("so many bytes")
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

/// What a request was answered.
#[derive(Debug, Default)]
pub struct Answer<'a> {
    /// The error of its final reply; 0 is none. `None`: no final reply came.
    pub outcome: Option<u32>,
    /// Data, with its place on the device.
    pub data: Vec<(u64, &'a [u8])>,
    /// Zeroes: where, and how many.
    pub holes: Vec<(u64, u32)>,
    /// Lengths and flags by context.
    pub status: Vec<(u32, Vec<(u64, u64)>)>,
}

impl Answer<'_> {
    /// Nothing but an outcome came.
    pub fn is_plain(&self) -> bool {
        self.data.is_empty() && self.holes.is_empty() && self.status.is_empty()
    }
}

/// The answers of a session, by cookie. Cookies count up from 0; `asked` gives a request's offset,
/// and its length where its simple reply carries data.
pub fn answers<'a>(
    heard: &'a [u8],
    count: usize,
    headers: Headers,
    asked: &dyn Fn(usize) -> (u64, Option<usize>),
) -> Vec<Answer<'a>> {
    let mut answers: Vec<_> = (0..count).map(|_| Answer::default()).collect();
    let mut heard = Heard(heard);
    while !heard.0.is_empty() {
        match heard.u32() {
            0x6744_6698 => {
                assert!(headers != Headers::Extended, "a simple reply among extended ones");
                let error = heard.u32();
                let index = heard.u64() as usize;
                let answer = open(&mut answers, index);
                answer.outcome = Some(error);
                if let (offset, Some(len)) = asked(index) {
                    assert!(headers == Headers::Simple, "a simple reply to a read among structured ones");
                    if error == 0 {
                        answer.data.push((offset, heard.bytes(len)));
                    }
                }
            }
            0x668e_33ef => {
                assert!(headers == Headers::Structured, "a structured reply that nobody asked for");
                let (flags, kind, index, len) = (heard.u16(), heard.u16(), heard.u64(), heard.u32());
                let answer = open(&mut answers, index as usize);
                chunk(answer, kind, Heard(heard.bytes(len as usize)), flags, false);
            }
            0x6e8a_278c => {
                assert!(headers == Headers::Extended, "an extended reply that nobody asked for");
                let (flags, kind, index) = (heard.u16(), heard.u16(), heard.u64() as usize);
                let (offset, len) = (heard.u64(), heard.u64());
                let answer = open(&mut answers, index);
                assert_eq!(offset, asked(index).0, "the reply to {index} has another offset");
                chunk(answer, kind, Heard(heard.bytes(len as usize)), flags, true);
            }
            magic => panic!("a reply begins with {magic:#x}"),
        }
    }
    answers
}

fn open<'a, 'b>(answers: &'b mut [Answer<'a>], index: usize) -> &'b mut Answer<'a> {
    let count = answers.len();
    let answer = answers.get_mut(index);
    let answer = answer.unwrap_or_else(|| panic!("an answer to request {index} of {count}"));
    assert!(answer.outcome.is_none(), "request {index} is answered again");
    answer
}

fn chunk<'a>(answer: &mut Answer<'a>, kind: u16, mut payload: Heard<'a>, flags: u16, extended: bool) {
    assert!(flags <= 1, "flags {flags:#x}");
    let done = flags == 1;
    if done {
        answer.outcome = Some(0);
    }
    match kind {
        0 => assert!(done && payload.0.is_empty(), "a chunk of nothing that ends nothing"),
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
            assert!(error != 0 && done, "an error that is none, or does not end the reply");
            assert_eq!(payload.0.len(), usize::from(len));
            let text = std::str::from_utf8(payload.0).expect("a message is text");
            assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
            answer.outcome = Some(error);
        }
        kind => panic!("a chunk of type {kind:#x}"),
    }
}
