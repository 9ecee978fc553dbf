//! Option negotiation: TLS first if requested, then structured replies, `base:allocation` and the
//! export. Reads no byte more than needed, so that data received before TLS cannot be mistaken for
//! data received through it.

use std::io::IoSlice;

use freestone_nbd_proto::{
    BASE_ALLOCATION, EXPORT_NAME_PADDING_BYTES, ExportNameReply, HandshakeFlags, INIT_MAGIC, InfoBlockSize,
    InfoExport, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader, OptionReply, info, option, reply,
};
use rustix::event::PollFlags;
use zerocopy::{FromBytes, IntoBytes as _};

use crate::error::LinkError;
use crate::link::Link;
use crate::link::export_info::{BlockSizes, ExportInfo};
use crate::link::tls::TlsSettings;
use crate::link::wake::Deadline;

/// Longest data of an option reply, in bytes.
const MAX_REPLY_BYTES: usize = 64 << 10;
/// Maximum number of replies to one option.
const MAX_REPLIES: usize = 256;
/// Maximum length of server text in messages, in characters.
const MAX_TEXT_CHARS: usize = 200;
/// Second magic number of an oldstyle server (before 2011).
const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;

/// Negotiates until the export is chosen. Returns the link and the properties of the export.
pub fn negotiate(
    link: Link,
    export: &str,
    tls: Option<&TlsSettings>,
    deadline: Deadline<'_>,
) -> Result<(Link, ExportInfo), LinkError> {
    let mut negotiation = Negotiation { link, deadline, export };
    let no_padding = negotiation.exchange_greetings(tls.is_some())?;
    let Some(no_padding) = no_padding else {
        // A server without fixed newstyle knows no option except EXPORT_NAME.
        let export_info = negotiation.choose_export_by_name(true, false, None)?;
        return Ok((negotiation.link, export_info));
    };
    if let Some(settings) = tls {
        negotiation.send_option(option::STARTTLS, &[])?;
        match negotiation.expect_single_reply(option::STARTTLS)? {
            Ok(()) => negotiation.link.start_tls(settings, deadline)?,
            Err(why) => return Err(LinkError::Refused(format!("it does not support TLS: {why}"))),
        }
    }
    negotiation.send_option(option::STRUCTURED_REPLY, &[])?;
    let structured = negotiation.expect_single_reply(option::STRUCTURED_REPLY)?.is_ok();
    let context = if structured { negotiation.negotiate_context()? } else { None };
    let export_info = match negotiation.choose_export(structured, context)? {
        Some(export_info) => export_info,
        None => negotiation.choose_export_by_name(!no_padding, structured, context)?,
    };
    Ok((negotiation.link, export_info))
}

struct Negotiation<'a> {
    link: Link,
    deadline: Deadline<'a>,
    export: &'a str,
}

struct Refusal {
    kind: u32,
    text: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            reply::ERR_UNSUP => "the option is not supported",
            reply::ERR_POLICY => "not allowed",
            reply::ERR_INVALID => "the option is invalid",
            reply::ERR_TLS_REQD => "only with TLS: use a URI with nbds://",
            reply::ERR_UNKNOWN => "the export does not exist",
            reply::ERR_SHUTDOWN => "it is shutting down",
            reply::ERR_BLOCK_SIZE_REQD => "it requires negotiation of block sizes",
            reply::ERR_TOO_BIG => "the option was too long",
            _ => "an unknown error",
        };
        f.write_str(kind)?;
        if self.text.is_empty() { Ok(()) } else { write!(f, " ({:?})", self.text) }
    }
}

impl Negotiation<'_> {
    /// Exchanges greetings. Returns `None` if the server is not fixed newstyle, otherwise true if
    /// the server supports `NO_ZEROES`.
    fn exchange_greetings(&mut self, tls: bool) -> Result<Option<bool>, LinkError> {
        if u64::from_be_bytes(self.read_array()?) != INIT_MAGIC {
            return Err(LinkError::Protocol("its greeting is not that of an NBD server"));
        }
        match u64::from_be_bytes(self.read_array()?) {
            OPTION_MAGIC => {}
            OLDSTYLE_MAGIC => {
                return Err(LinkError::Unusable("the server is oldstyle, which has no export names".into()));
            }
            _ => return Err(LinkError::Protocol("the second magic number is wrong")),
        }
        let offered = HandshakeFlags::from_bits_truncate(u16::from_be_bytes(self.read_array()?));
        self.send(&u32::from(offered.bits()).to_be_bytes())?;
        if offered.contains(HandshakeFlags::FIXED_NEWSTYLE) {
            return Ok(Some(offered.contains(HandshakeFlags::NO_ZEROES)));
        }
        if tls {
            return Err(LinkError::Refused("it does not support TLS".into()));
        }
        Ok(None)
    }

    /// Negotiates `base:allocation`. Returns the context id, or `None` if the server does not
    /// support it.
    fn negotiate_context(&mut self) -> Result<Option<u32>, LinkError> {
        let mut data = string(self.export);
        data.extend(1_u32.to_be_bytes());
        data.extend(string(BASE_ALLOCATION));
        self.send_option(option::SET_META_CONTEXT, &data)?;
        let mut chosen = None;
        for _ in 0..MAX_REPLIES {
            let (kind, data) = self.read_reply(option::SET_META_CONTEXT)?;
            match kind {
                reply::ACK => return Ok(chosen),
                reply::META_CONTEXT => {
                    let (id, name) = data.split_at_checked(4).ok_or(MALFORMED)?;
                    if name != BASE_ALLOCATION.as_bytes() || chosen.is_some() {
                        return Err(LinkError::Protocol("it chose a context that was not requested"));
                    }
                    chosen = id.try_into().ok().map(u32::from_be_bytes);
                }
                kind if kind >> 31 != 0 => return Ok(None),
                _ => return Err(UNEXPECTED),
            }
        }
        Err(ENDLESS)
    }

    /// Chooses the export with `GO`. Returns `None` if the server does not support this option.
    fn choose_export(
        &mut self,
        structured: bool,
        context: Option<u32>,
    ) -> Result<Option<ExportInfo>, LinkError> {
        let mut data = string(self.export);
        data.extend(1_u16.to_be_bytes());
        data.extend(info::BLOCK_SIZE.to_be_bytes());
        self.send_option(option::GO, &data)?;
        let (mut export, mut blocks) = (None, None);
        for _ in 0..MAX_REPLIES {
            let (kind, data) = self.read_reply(option::GO)?;
            match kind {
                reply::ACK => {
                    let Some((size, flags)) = export else {
                        return Err(LinkError::Protocol("it did not send the size of the export"));
                    };
                    return ExportInfo::validate(size, flags, blocks, structured, context).map(Some);
                }
                reply::INFO => {
                    let kind = data.get(..2).and_then(|kind| kind.try_into().ok()).ok_or(MALFORMED)?;
                    match u16::from_be_bytes(kind) {
                        info::EXPORT => {
                            let reported = InfoExport::read_from_bytes(&data).map_err(|_| MALFORMED)?;
                            export = Some((reported.size.get(), reported.flags.get()));
                        }
                        info::BLOCK_SIZE => {
                            let reported = InfoBlockSize::read_from_bytes(&data).map_err(|_| MALFORMED)?;
                            let (minimum, preferred) = (reported.minimum.get(), reported.preferred.get());
                            blocks = Some(BlockSizes { minimum, preferred, maximum: reported.maximum.get() });
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

    /// Chooses the export with `EXPORT_NAME`. The server closes the connection if the export does
    /// not exist.
    fn choose_export_by_name(
        &mut self,
        padded: bool,
        structured: bool,
        context: Option<u32>,
    ) -> Result<ExportInfo, LinkError> {
        self.send_option(option::EXPORT_NAME, self.export.as_bytes())?;
        let reported: [u8; size_of::<ExportNameReply>()] = match self.read_array() {
            Err(LinkError::Closed) => {
                return Err(LinkError::Refused("it closed the connection; the export may not exist".into()));
            }
            reported => reported?,
        };
        let reported = ExportNameReply::read_from_bytes(&reported).map_err(|_| MALFORMED)?;
        if padded {
            self.read_array::<EXPORT_NAME_PADDING_BYTES>()?;
        }
        ExportInfo::validate(reported.size.get(), reported.flags.get(), None, structured, context)
    }

    /// Reads the reply to an option that has exactly one reply.
    fn expect_single_reply(&mut self, option: u32) -> Result<Result<(), Refusal>, LinkError> {
        match self.read_reply(option)? {
            (reply::ACK, data) if data.is_empty() => Ok(Ok(())),
            (reply::ERR_SHUTDOWN, _) => Err(LinkError::ShuttingDown),
            (kind, data) if kind >> 31 != 0 => Ok(Err(Refusal { kind, text: text(&data) })),
            _ => Err(UNEXPECTED),
        }
    }

    fn send_option(&mut self, option: u32, data: &[u8]) -> Result<(), LinkError> {
        let header = OptionHeader {
            magic: OPTION_MAGIC.into(),
            option: option.into(),
            len: (data.len() as u32).into(),
        };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(data);
        self.send(&bytes)
    }

    fn read_reply(&mut self, option: u32) -> Result<(u32, Vec<u8>), LinkError> {
        let header: [u8; size_of::<OptionReply>()] = self.read_array()?;
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
        self.read_exact(&mut data)?;
        Ok((header.kind.get(), data))
    }

    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], LinkError> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn read_exact(&mut self, mut out: &mut [u8]) -> Result<(), LinkError> {
        while !out.is_empty() {
            match self.link.recv(out)? {
                Some(0) => return Err(LinkError::Closed),
                Some(n) => out = &mut out[n..],
                None => self.deadline.wait(self.link.socket(), PollFlags::IN)?,
            }
        }
        Ok(())
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), LinkError> {
        while !bytes.is_empty() || self.link.has_unsent() {
            let n = self.link.send(&[IoSlice::new(bytes)])?;
            bytes = &bytes[n..];
            if n == 0 && (!bytes.is_empty() || self.link.has_unsent()) {
                self.deadline.wait(self.link.socket(), PollFlags::OUT)?;
            }
        }
        Ok(())
    }
}

const MALFORMED: LinkError = LinkError::Protocol("a reply to an option has the wrong length");
const UNEXPECTED: LinkError = LinkError::Protocol("a reply does not match the option");
const ENDLESS: LinkError = LinkError::Protocol("the replies to an option do not end");

/// Encodes a string with its length, as in option data. The URI parser has checked the length.
fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// Converts text of the server for error messages: drops control characters and limits the length.
pub fn text(data: &[u8]) -> String {
    String::from_utf8_lossy(data).chars().filter(|c| !c.is_control()).take(MAX_TEXT_CHARS).collect()
}
