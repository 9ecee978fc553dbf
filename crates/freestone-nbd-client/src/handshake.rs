//! The handshake: TLS first where that is asked for, then chunks, the context of holes, the export.
//! It reads no byte more than it needs, so that nothing which came before TLS is taken for what
//! came in it.

use std::io::IoSlice;

use freestone_nbd_proto::{
    BASE_ALLOCATION, EXPORT_NAME_PADDING_BYTES, ExportNameReply, HandshakeFlags, INIT_MAGIC, InfoBlockSize,
    InfoExport, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader, OptionReply, info, option, reply,
};
use rustix::event::PollFlags;
use zerocopy::{FromBytes, IntoBytes as _};

use crate::error::LinkError;
use crate::facts::{BlockSizes, Facts};
use crate::link::Link;
use crate::tls::TlsSettings;
use crate::wake::Patience;

/// Longest data of a reply to an option, in bytes.
const MAX_REPLY_BYTES: usize = 64 << 10;
/// Most replies to one option.
const MAX_REPLIES: usize = 256;
/// How much of a server's text is shown, in characters.
const MAX_TEXT_CHARS: usize = 200;
/// Second eight bytes of a server of before 2011.
const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;

/// Talks until the export is chosen.
///
/// # Errors
/// See [`LinkError`].
pub fn shake_hands(
    link: Link,
    export: &str,
    tls: Option<&TlsSettings>,
    patience: Patience<'_>,
) -> Result<(Link, Facts), LinkError> {
    let mut talk = Talk { link, patience, export };
    let no_padding = talk.greet(tls.is_some())?;
    let Some(no_padding) = no_padding else {
        // Without numbered options there is one way only.
        let facts = talk.export_name(true, false, None)?;
        return Ok((talk.link, facts));
    };
    if let Some(settings) = tls {
        talk.ask(option::STARTTLS, &[])?;
        match talk.last_reply(option::STARTTLS)? {
            Ok(()) => talk.link.start_tls(settings, patience)?,
            Err(why) => return Err(LinkError::Refused(format!("it has no TLS: {why}"))),
        }
    }
    talk.ask(option::STRUCTURED_REPLY, &[])?;
    let structured = talk.last_reply(option::STRUCTURED_REPLY)?.is_ok();
    let context = if structured { talk.context()? } else { None };
    let facts = match talk.go(structured, context)? {
        Some(facts) => facts,
        None => talk.export_name(!no_padding, structured, context)?,
    };
    Ok((talk.link, facts))
}

/// A handshake.
struct Talk<'a> {
    link: Link,
    patience: Patience<'a>,
    export: &'a str,
}

/// A refusal: which one, and the server's words.
struct Refusal {
    kind: u32,
    text: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            reply::ERR_UNSUP => "the option is not known there",
            reply::ERR_POLICY => "not allowed",
            reply::ERR_INVALID => "the option was not understood",
            reply::ERR_TLS_REQD => "only with TLS: the URI is nbds://",
            reply::ERR_UNKNOWN => "there is no such export",
            reply::ERR_SHUTDOWN => "it is shutting down",
            reply::ERR_BLOCK_SIZE_REQD => "only with block sizes",
            reply::ERR_TOO_BIG => "the option was too long",
            _ => "an error that is not known here",
        };
        f.write_str(kind)?;
        if self.text.is_empty() { Ok(()) } else { write!(f, " ({:?})", self.text) }
    }
}

impl Talk<'_> {
    /// The greeting. `None`: the server has no numbered options. Else whether padding is left out.
    fn greet(&mut self, tls: bool) -> Result<Option<bool>, LinkError> {
        if u64::from_be_bytes(self.bytes()?) != INIT_MAGIC {
            return Err(LinkError::Protocol("it does not begin as an NBD server does"));
        }
        match u64::from_be_bytes(self.bytes()?) {
            OPTION_MAGIC => {}
            OLDSTYLE_MAGIC => {
                return Err(LinkError::Unfit("the server is of the old style, which has no names".into()));
            }
            _ => return Err(LinkError::Protocol("the second magic number is wrong")),
        }
        let offered = HandshakeFlags::from_bits_truncate(u16::from_be_bytes(self.bytes()?));
        self.send(&u32::from(offered.bits()).to_be_bytes())?;
        if offered.contains(HandshakeFlags::FIXED_NEWSTYLE) {
            return Ok(Some(offered.contains(HandshakeFlags::NO_ZEROES)));
        }
        if tls {
            return Err(LinkError::Refused("it has no TLS".into()));
        }
        Ok(None)
    }

    /// Chooses `base:allocation`; `None` where the server has it not.
    fn context(&mut self) -> Result<Option<u32>, LinkError> {
        let mut data = string(self.export);
        data.extend(1_u32.to_be_bytes());
        data.extend(string(BASE_ALLOCATION));
        self.ask(option::SET_META_CONTEXT, &data)?;
        let mut chosen = None;
        for _ in 0..MAX_REPLIES {
            let (kind, data) = self.reply(option::SET_META_CONTEXT)?;
            match kind {
                reply::ACK => return Ok(chosen),
                reply::META_CONTEXT => {
                    let (id, name) = data.split_at_checked(4).ok_or(MALFORMED)?;
                    if name != BASE_ALLOCATION.as_bytes() || chosen.is_some() {
                        return Err(LinkError::Protocol("it chose a context that was not asked for"));
                    }
                    chosen = id.try_into().ok().map(u32::from_be_bytes);
                }
                kind if kind >> 31 != 0 => return Ok(None),
                _ => return Err(UNEXPECTED),
            }
        }
        Err(ENDLESS)
    }

    /// Chooses the export. `None`: the server does not know this option.
    fn go(&mut self, structured: bool, context: Option<u32>) -> Result<Option<Facts>, LinkError> {
        let mut data = string(self.export);
        data.extend(1_u16.to_be_bytes());
        data.extend(info::BLOCK_SIZE.to_be_bytes());
        self.ask(option::GO, &data)?;
        let (mut export, mut blocks) = (None, None);
        for _ in 0..MAX_REPLIES {
            let (kind, data) = self.reply(option::GO)?;
            match kind {
                reply::ACK => {
                    let Some((size, flags)) = export else {
                        return Err(LinkError::Protocol("it does not say how large the export is"));
                    };
                    return Facts::checked(size, flags, blocks, structured, context).map(Some);
                }
                reply::INFO => {
                    let kind = data.get(..2).and_then(|kind| kind.try_into().ok()).ok_or(MALFORMED)?;
                    match u16::from_be_bytes(kind) {
                        info::EXPORT => {
                            let told = InfoExport::read_from_bytes(&data).map_err(|_| MALFORMED)?;
                            export = Some((told.size.get(), told.flags.get()));
                        }
                        info::BLOCK_SIZE => {
                            let told = InfoBlockSize::read_from_bytes(&data).map_err(|_| MALFORMED)?;
                            let (minimum, preferred) = (told.minimum.get(), told.preferred.get());
                            blocks = Some(BlockSizes { minimum, preferred, maximum: told.maximum.get() });
                        }
                        _ => {}
                    }
                }
                reply::ERR_UNSUP => return Ok(None),
                reply::ERR_SHUTDOWN => return Err(LinkError::ShuttingDown),
                kind if kind >> 31 != 0 => {
                    return Err(LinkError::Refused(Refusal { kind, text: text(&data) }.to_string()));
                }
                _ => return Err(UNEXPECTED),
            }
        }
        Err(ENDLESS)
    }

    /// Chooses the export as the oldest clients do: where there is none, the server hangs up.
    fn export_name(
        &mut self,
        padded: bool,
        structured: bool,
        context: Option<u32>,
    ) -> Result<Facts, LinkError> {
        self.ask(option::EXPORT_NAME, self.export.as_bytes())?;
        let told: [u8; size_of::<ExportNameReply>()] = match self.bytes() {
            Err(LinkError::Closed) => {
                return Err(LinkError::Refused("it closed the connection; there is no such export?".into()));
            }
            told => told?,
        };
        let told = ExportNameReply::read_from_bytes(&told).map_err(|_| MALFORMED)?;
        if padded {
            self.bytes::<EXPORT_NAME_PADDING_BYTES>()?;
        }
        Facts::checked(told.size.get(), told.flags.get(), None, structured, context)
    }

    /// The one reply of an option that has no other.
    fn last_reply(&mut self, option: u32) -> Result<Result<(), Refusal>, LinkError> {
        match self.reply(option)? {
            (reply::ACK, data) if data.is_empty() => Ok(Ok(())),
            (reply::ERR_SHUTDOWN, _) => Err(LinkError::ShuttingDown),
            (kind, data) if kind >> 31 != 0 => Ok(Err(Refusal { kind, text: text(&data) })),
            _ => Err(UNEXPECTED),
        }
    }

    fn ask(&mut self, option: u32, data: &[u8]) -> Result<(), LinkError> {
        let header = OptionHeader {
            magic: OPTION_MAGIC.into(),
            option: option.into(),
            len: (data.len() as u32).into(),
        };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(data);
        self.send(&bytes)
    }

    fn reply(&mut self, option: u32) -> Result<(u32, Vec<u8>), LinkError> {
        let header: [u8; size_of::<OptionReply>()] = self.bytes()?;
        let header = OptionReply::read_from_bytes(&header).map_err(|_| MALFORMED)?;
        if header.magic.get() != OPTION_REPLY_MAGIC {
            return Err(LinkError::Protocol("the magic number of a reply is wrong"));
        }
        if header.option.get() != option {
            return Err(UNEXPECTED);
        }
        let len = header.len.get() as usize;
        if len > MAX_REPLY_BYTES {
            return Err(LinkError::Protocol("a reply to an option is longer than 64 KiB"));
        }
        let mut data = vec![0; len];
        self.fill(&mut data)?;
        Ok((header.kind.get(), data))
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], LinkError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, mut out: &mut [u8]) -> Result<(), LinkError> {
        while !out.is_empty() {
            match self.link.recv(out)? {
                Some(0) => return Err(LinkError::Closed),
                Some(n) => out = &mut out[n..],
                None => self.patience.wait(self.link.socket(), PollFlags::IN)?,
            }
        }
        Ok(())
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), LinkError> {
        while !bytes.is_empty() || self.link.has_unsent() {
            let n = self.link.send(&[IoSlice::new(bytes)])?;
            bytes = &bytes[n..];
            if n == 0 && (!bytes.is_empty() || self.link.has_unsent()) {
                self.patience.wait(self.link.socket(), PollFlags::OUT)?;
            }
        }
        Ok(())
    }
}

const MALFORMED: LinkError = LinkError::Protocol("a reply to an option has the wrong length");
const UNEXPECTED: LinkError = LinkError::Protocol("a reply does not belong to what was asked");
const ENDLESS: LinkError = LinkError::Protocol("the replies to an option do not end");

/// A string of the protocol, which is short enough: the URI was checked.
fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// A server's words, as far as they can be shown.
pub fn text(data: &[u8]) -> String {
    String::from_utf8_lossy(data).chars().filter(|c| !c.is_control()).take(MAX_TEXT_CHARS).collect()
}
