//! Reference parser of the server's side of an NBD handshake.

use freestone_nbd_proto::{TransmissionFlags, option};

const FLAGS: u16 = TransmissionFlags::HAS_FLAGS.bits();
/// Maximum length of one reply to an option, in bytes.
const REPLY_MAX: usize = 64 << 10;
/// Maximum number of replies to one option.
const REPLIES_MAX: usize = 256;
const PAYLOAD_MAX: u32 = 32 << 20;

/// Result of a valid handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    pub size: u64,
    pub flags: u16,
    /// Smallest request in bytes.
    pub minimum: u32,
    /// Largest request in bytes.
    pub maximum: u32,
    pub structured: bool,
    pub context: Option<u32>,
    /// Handshake flags that the client must send.
    pub client_flags: u32,
    /// Options that the client must send, in this order.
    pub options: Vec<u32>,
    /// Length of the server's side of the handshake in bytes.
    pub len: usize,
}

impl Facts {
    pub fn has(&self, flag: TransmissionFlags) -> bool {
        self.flags & flag.bits() != 0
    }

    /// Returns the block size of the device, in bytes.
    pub fn block(&self) -> u32 {
        self.minimum.max(512)
    }
}

struct Bytes<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Bytes<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let bytes = self.all.get(self.at..)?.get(..len)?;
        self.at += len;
        Some(bytes)
    }

    fn number(&mut self, len: usize) -> Option<u64> {
        Some(number(self.take(len)?))
    }

    /// Parses a reply to `option`. Returns the type and the data of the reply, or None if it is invalid.
    fn reply(&mut self, option: u32) -> Option<(u32, &'a [u8])> {
        let is_one = self.number(8)? == 0x0003_e889_0455_65a9;
        let is_of = self.number(4)? == u64::from(option);
        let (kind, len) = (self.number(4)? as u32, self.number(4)? as usize);
        if !is_one || !is_of || len > REPLY_MAX { None } else { Some((kind, self.take(len)?)) }
    }
}

pub fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

const ACK: u32 = 1;
const INFO: u32 = 3;
const META_CONTEXT: u32 = 4;
const UNSUP: u32 = (1 << 31) + 1;
const SHUTDOWN: u32 = (1 << 31) + 7;

/// Parses the server's side of a handshake. Returns None if the client must refuse the handshake.
pub fn read(server: &[u8]) -> Option<Facts> {
    let mut bytes = Bytes { all: server, at: 0 };
    if bytes.take(8)? != b"NBDMAGIC" || bytes.take(8)? != b"IHAVEOPT" {
        return None;
    }
    let offered = bytes.number(2)? as u32 & 3;
    let mut options = Vec::new();
    let (mut structured, mut context, mut info) = (false, None, None);
    if offered & 1 != 0 {
        options.push(option::STRUCTURED_REPLY);
        structured = match bytes.reply(option::STRUCTURED_REPLY)? {
            (ACK, []) => true,
            (SHUTDOWN, _) => return None,
            (kind, _) if kind >> 31 == 1 => false,
            _ => return None,
        };
        if structured {
            options.push(option::SET_META_CONTEXT);
            context = context_of(&mut bytes)?;
        }
        options.push(option::GO);
        info = go(&mut bytes)?;
    }
    if info.is_none() {
        options.push(option::EXPORT_NAME);
        let (size, flags) = (bytes.number(8)?, bytes.number(2)? as u16);
        if offered & 3 != 3 {
            bytes.take(124)?;
        }
        info = Some((size, flags, (1, 4096, PAYLOAD_MAX)));
    }
    let (size, flags, blocks) = info?;
    let (minimum, maximum) = checked(size, flags, blocks)?;
    let len = bytes.at;
    Some(Facts { size, flags, minimum, maximum, structured, context, client_flags: offered, options, len })
}

/// Parses the reply to `SET_META_CONTEXT`. Returns None if the client must refuse the reply. Otherwise
/// returns the context ID, or `Some(None)` if the server does not support the context.
#[expect(clippy::option_option, reason = "refused, not supported, or the identifier")]
fn context_of(bytes: &mut Bytes<'_>) -> Option<Option<u32>> {
    let mut chosen = None;
    for _ in 0..REPLIES_MAX {
        match bytes.reply(option::SET_META_CONTEXT)? {
            (ACK, _) => return Some(chosen),
            (META_CONTEXT, data) if chosen.is_none() && data.get(4..) == Some(b"base:allocation") => {
                chosen = Some(number(&data[..4]) as u32);
            }
            (kind, _) if kind >> 31 == 1 => return Some(None),
            _ => return None,
        }
    }
    None
}

type ExportInfo = (u64, u16, (u32, u32, u32));

/// Parses the reply to GO. Returns None if the client must refuse the reply. Otherwise returns the
/// information about the export, or `Some(None)` if the server does not support the option.
#[expect(clippy::option_option, reason = "refused, not supported, or the information")]
fn go(bytes: &mut Bytes<'_>) -> Option<Option<ExportInfo>> {
    let (mut export, mut blocks) = (None, (1, 4096, PAYLOAD_MAX));
    for _ in 0..REPLIES_MAX {
        match bytes.reply(option::GO)? {
            (ACK, _) => return export.map(|(size, flags)| Some((size, flags, blocks))),
            (INFO, data) => match (number(data.get(..2)?), &data[2..]) {
                (0, rest) if rest.len() == 10 => {
                    export = Some((number(&rest[..8]), number(&rest[8..]) as u16));
                }
                (3, rest) if rest.len() == 12 => {
                    let word = |at: usize| number(&rest[at..at + 4]) as u32;
                    blocks = (word(0), word(4), word(8));
                }
                (0 | 3, _) => return None,
                _ => {}
            },
            (UNSUP, _) => return Some(None),
            _ => return None,
        }
    }
    None
}

/// Returns the smallest and the largest request in bytes, or None if the values are invalid for a device.
fn checked(size: u64, flags: u16, (minimum, preferred, maximum): (u32, u32, u32)) -> Option<(u32, u32)> {
    let is_size = size > 0 && size <= i64::MAX as u64 - 4096 && flags & FLAGS != 0;
    let is_minimum = minimum.is_power_of_two() && minimum <= 4096 && size.is_multiple_of(minimum.into());
    let is_preferred = preferred.is_power_of_two() && preferred >= minimum;
    let is_maximum = maximum >= minimum && (maximum == u32::MAX || maximum % minimum.max(1) == 0);
    if !is_size || !is_minimum || !is_preferred || !is_maximum {
        return None;
    }
    let block = minimum.max(512);
    let maximum = maximum.min(PAYLOAD_MAX) / block * block;
    (maximum > 0).then_some((minimum, maximum))
}
