//! Reference parser of a frontend's messages: finds the expected result of each message.

use super::files::Kind;
use super::wire::{
    ADD_MEM_REG, ALWAYS, CONFIG_WCE, DISCARD_AND_ZEROES, FLUSH, GET_CONFIG, GET_FEATURES, GET_INFLIGHT_FD,
    GET_MAX_MEM_SLOTS, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_VRING_BASE, HEADER_BYTES, NEED_REPLY,
    PROTOCOL, REM_MEM_REG, REPLY_ACK, RESET_DEVICE, RESET_OWNER, RO, SET_BACKEND_REQ_FD, SET_CONFIG,
    SET_FEATURES, SET_INFLIGHT_FD, SET_MEM_TABLE, SET_OWNER, SET_PROTOCOL_FEATURES, SET_VRING_ADDR,
    SET_VRING_BASE, SET_VRING_CALL, SET_VRING_ENABLE, SET_VRING_ERR, SET_VRING_KICK, SET_VRING_NUM, ZONED,
};

const QUEUES: u32 = 64;
/// Maximum number of descriptors of a queue.
const MAX_QUEUE: u32 = 1024;
const REGIONS: u64 = 128;
/// Size of the configuration space in bytes.
const CONFIG_BYTES: u64 = 256;
/// Maximum length of the body of a message, in bytes.
const MAX_BODY: usize = 1024;
const MAX_FILES: usize = 8;

#[derive(Debug)]
pub struct Message {
    pub request: u32,
    pub flags: u32,
    pub body: Vec<u8>,
    pub files: Vec<Kind>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Done,
    Refused,
    /// Done or refused: the result depends on the content of the memory and on the system.
    Either,
    /// A reply with this number.
    Number(u64),
    /// A reply with the available ring index of this queue.
    Base(u32),
    /// A reply with this header, and with this number of configuration bytes.
    Config(Vec<u8>, usize),
    /// A reply of this length in bytes, with the file of the inflight area.
    Area(usize),
}

/// State of a session on which the expected results depend.
pub struct Reference {
    offered: u64,
    /// True if `REPLY_ACK` was negotiated.
    pub acks: bool,
    /// True after `SET_VRING_ADDR`: later messages may start a queue, which can fail.
    may_begin: bool,
}

/// Parses all messages up to the first invalid one. Each entry of `files` was sent with the byte at its
/// offset in `bytes`.
pub fn messages(mut bytes: &[u8], files: &[(usize, Vec<Kind>)]) -> Vec<Message> {
    let mut messages = Vec::new();
    let mut at = 0;
    while bytes.len() >= HEADER_BYTES {
        let (request, flags, size) = (number(bytes, 0), number(bytes, 4), number(bytes, 8) as usize);
        let end = HEADER_BYTES + size;
        if flags & 3 != 1 || size > MAX_BODY || bytes.len() < end {
            break;
        }
        let mine = files.iter().filter(|(place, _)| (at..at + end).contains(place));
        let files: Vec<Kind> = mine.flat_map(|(_, kinds)| kinds.iter().copied()).collect();
        if files.len() > MAX_FILES {
            break;
        }
        messages.push(Message { request, flags, body: bytes[HEADER_BYTES..end].to_vec(), files });
        (bytes, at) = (&bytes[end..], at + end);
    }
    messages
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn short(bytes: &[u8], at: usize) -> u32 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]]).into()
}

impl Reference {
    pub fn new(read_only: bool, zoned: bool) -> Self {
        let mut offered = ALWAYS;
        offered |= if zoned { ZONED } else { FLUSH | CONFIG_WCE };
        offered |= if read_only { RO } else { 0 };
        offered |= if read_only || zoned { 0 } else { DISCARD_AND_ZEROES };
        Self { offered, acks: false, may_begin: false }
    }

    pub fn verdict(&mut self, message: &Message) -> Verdict {
        let Message { request, body, files, .. } = message;
        let done_or_either = if self.may_begin { Verdict::Either } else { Verdict::Done };
        let sized = |bytes: usize| body.len() == bytes;
        // True if the body is a valid queue number and another number.
        let queue = sized(8) && number(body, 0) < QUEUES;
        let done_if = |done: bool| if done { Verdict::Done } else { Verdict::Refused };
        let either_if = |possible: bool| if possible { Verdict::Either } else { Verdict::Refused };
        match *request {
            GET_FEATURES => Verdict::Number(self.offered),
            GET_PROTOCOL_FEATURES => Verdict::Number(PROTOCOL),
            GET_QUEUE_NUM => Verdict::Number(QUEUES.into()),
            GET_MAX_MEM_SLOTS => Verdict::Number(REGIONS),
            SET_OWNER | RESET_OWNER | RESET_DEVICE => Verdict::Done,
            SET_FEATURES if sized(8) && long(body, 0) & !self.offered == 0 => done_or_either,
            SET_PROTOCOL_FEATURES => {
                let good = sized(8) && long(body, 0) & !PROTOCOL == 0;
                if good {
                    self.acks = long(body, 0) & REPLY_ACK != 0;
                }
                done_if(good)
            }
            SET_VRING_NUM if queue => {
                let size = number(body, 4);
                if size.is_power_of_two() && size <= MAX_QUEUE { done_or_either } else { Verdict::Refused }
            }
            SET_VRING_BASE if queue && number(body, 4) <= 0xffff => done_or_either,
            SET_VRING_ENABLE if queue => done_or_either,
            SET_VRING_ADDR if sized(40) && number(body, 0) < QUEUES => {
                self.may_begin = true;
                Verdict::Either
            }
            GET_VRING_BASE if queue => Verdict::Base(number(body, 0)),
            SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR if sized(8) => {
                let value = long(body, 0);
                let (queue, none) = ((value & 0xff) < QUEUES.into(), value & 256 != 0);
                let event = matches!(files.last(), Some(Kind::Kick | Kind::Call | Kind::Err));
                match *request {
                    SET_VRING_KICK if queue && !none && event => done_or_either,
                    SET_VRING_KICK => Verdict::Refused,
                    _ => done_if(queue && (none || event)),
                }
            }
            SET_BACKEND_REQ_FD => done_if(!files.is_empty()),
            GET_CONFIG if body.len() >= 12 => {
                let (from, size) = (u64::from(number(body, 0)), u64::from(number(body, 4)));
                let size = if from + size <= CONFIG_BYTES { size } else { 0 };
                let mut head = body[..12].to_vec();
                head[4..8].copy_from_slice(&(size as u32).to_ne_bytes());
                Verdict::Config(head, size as usize)
            }
            SET_CONFIG if body.len() >= 12 => {
                let (from, size) = (u64::from(number(body, 0)), u64::from(number(body, 4)));
                done_if(from + size <= CONFIG_BYTES && body.len() as u64 == 12 + size)
            }
            GET_INFLIGHT_FD if sized(20) || sized(24) => {
                if queues_of(body).is_some() {
                    Verdict::Area(body.len())
                } else {
                    Verdict::Refused
                }
            }
            SET_INFLIGHT_FD if sized(20) || sized(24) => {
                let needed = queues_of(body);
                either_if(!files.is_empty() && needed.is_some_and(|needed| needed <= long(body, 0)))
            }
            SET_MEM_TABLE if body.len() >= 8 => {
                let count = number(body, 0) as usize;
                either_if(count == files.len() && body.len() >= 8 + 32 * count)
            }
            ADD_MEM_REG => either_if(sized(40) && !files.is_empty()),
            REM_MEM_REG => either_if(sized(40)),
            _ => Verdict::Refused,
        }
    }
}

/// Returns the size in bytes of the inflight area for the queues of a message, or None if the queues are
/// invalid.
fn queues_of(body: &[u8]) -> Option<u64> {
    let (queues, size) = (short(body, 16), short(body, 18));
    let possible = (1..=QUEUES).contains(&queues) && (1..=MAX_QUEUE).contains(&size);
    possible.then(|| u64::from(queues) * (16 + u64::from(size) * 16).next_multiple_of(64))
}

impl Message {
    /// Returns true if the message requests an acknowledgement with `NEED_REPLY`.
    pub fn wants_answer(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }
}
