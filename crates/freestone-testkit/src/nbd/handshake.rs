//! The client's side of the handshake. A violation of the protocol is an error of the kind `InvalidData`.
//!
//! The functions send to any stream, so TLS is up to the caller: [`starttls`] on the socket, then all else on a stream
//! over that socket.

use std::io::{Read, Result, Write};

use super::wire::{ACK, CLIENT_FLAGS, EXPORT_NAME, INFO, OPTION_REPLY_MAGIC, STARTTLS, option};
use super::{CHUNK_BYTES_MAX, invalid, u16_at, u32_at, u64_at};

/// Type bit of replies that refuse an option.
const ERROR_BIT: u32 = 1 << 31;

/// A reply of the server to an option, which can have several replies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionReply {
    pub kind: u32,
    pub data: Vec<u8>,
}

impl OptionReply {
    /// Returns true if the server refuses the option.
    pub fn is_error(&self) -> bool {
        self.kind & ERROR_BIT != 0
    }
}

/// Receives the greeting. The server must support the fixed newstyle handshake without padding.
fn receive_greeting(stream: &mut impl Read) -> Result<()> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if greeting == *b"NBDMAGICIHAVEOPT\0\x03" {
        Ok(())
    } else {
        Err(invalid(format!("greeting {greeting:x?}")))
    }
}

/// Receives the greeting and sends the client flags. Options follow.
pub fn greet(stream: &mut (impl Read + Write), flags: u32) -> Result<()> {
    receive_greeting(stream)?;
    stream.write_all(&flags.to_be_bytes())
}

/// Receives one reply to an option.
pub fn option_reply(stream: &mut impl Read, option: u32) -> Result<OptionReply> {
    let mut header = [0; 20];
    stream.read_exact(&mut header)?;
    let (kind, len) = (u32_at(&header[12..]), u32_at(&header[16..]) as usize);
    let is_valid = u64_at(&header) == OPTION_REPLY_MAGIC
        && u32_at(&header[8..]) == option
        && len <= if kind == ACK { 0 } else { CHUNK_BYTES_MAX };
    if !is_valid {
        return Err(invalid(format!("reply to option {option}: {header:x?}")));
    }
    let mut data = vec![0; len];
    stream.read_exact(&mut data)?;
    Ok(OptionReply { kind, data })
}

/// Receives the replies to an option, up to the last one, which is ACK or an error.
pub fn option_replies(stream: &mut impl Read, option: u32) -> Result<Vec<OptionReply>> {
    let mut replies = Vec::new();
    loop {
        let reply = option_reply(stream, option)?;
        let is_last = reply.kind == ACK || reply.is_error();
        replies.push(reply);
        if is_last {
            return Ok(replies);
        }
    }
}

/// Sends an option and receives its replies.
pub fn negotiate(stream: &mut (impl Read + Write), kind: u32, data: &[u8]) -> Result<Vec<OptionReply>> {
    stream.write_all(&option(kind, data))?;
    option_replies(stream, kind)
}

/// Sends `STARTTLS`. The caller's TLS handshake follows.
pub fn starttls(stream: &mut (impl Read + Write)) -> Result<()> {
    match &negotiate(stream, STARTTLS, &[])?[..] {
        [reply] if reply.kind == ACK => Ok(()),
        replies => Err(invalid(format!("the server does not accept TLS: {replies:?}"))),
    }
}

/// Returns the size in bytes and the transmission flags of an export from the replies to `INFO` or `GO`.
pub fn export_info(replies: &[OptionReply]) -> Result<(u64, u16)> {
    let info = replies.iter().find(|reply| reply.kind == INFO && reply.data.starts_with(&[0, 0]));
    match info {
        Some(OptionReply { data, .. }) if data.len() == 12 => Ok((u64_at(&data[2..]), u16_at(&data[10..]))),
        _ => Err(invalid(format!("the replies have no export information: {replies:x?}"))),
    }
}

/// Selects an export with `EXPORT_NAME`. Returns the size in bytes and the transmission flags.
pub fn export_name(stream: &mut (impl Read + Write), name: &str, no_zeroes: bool) -> Result<(u64, u16)> {
    stream.write_all(&option(EXPORT_NAME, name.as_bytes()))?;
    receive_export(stream, no_zeroes)
}

fn receive_export(stream: &mut impl Read, no_zeroes: bool) -> Result<(u64, u16)> {
    let mut export = [0; 134];
    stream.read_exact(&mut export[..if no_zeroes { 10 } else { 134 }])?;
    Ok((u64_at(&export), u16_at(&export[8..])))
}

/// Runs the whole handshake with `EXPORT_NAME`, as the oldest clients do, and with a single write. Returns the size in
/// bytes and the transmission flags.
pub fn enter(stream: &mut (impl Read + Write), name: &str) -> Result<(u64, u16)> {
    receive_greeting(stream)?;
    stream.write_all(&[&CLIENT_FLAGS.to_be_bytes()[..], &option(EXPORT_NAME, name.as_bytes())].concat())?;
    receive_export(stream, true)
}
