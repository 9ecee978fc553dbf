//! The fixed newstyle handshake of a connection, option by option.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::bytes::Bytes;
use freestone_core::client_log;
use freestone_core::device::{Device, Geometry};
use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::contexts::Contexts;
use crate::export::{Export, JoinError};
use crate::flight::MAX_IN_FLIGHT_BYTES;
use crate::headers::Headers;
use crate::input::{Input, RECEIVE_BUFFER_BYTES, ReceiveResult};
use crate::link::Link;
use crate::proto::{
    EXPORT_NAME_PADDING_BYTES, ExportNameReply, Greeting, HandshakeFlags, INIT_MAGIC, InfoBlockSize,
    InfoExport, MAX_PAYLOAD_BYTES, MAX_STRING_BYTES, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader,
    OptionReply, TransmissionFlags, info, option, reply,
};
use crate::receive::{Timeouts, WaitError};
use crate::replies::Replies;
use crate::session::Negotiation;
use crate::shared::ServerShared;
use crate::template::{DeviceInfo, EndCallback};

/// Longest option data that is parsed, in bytes.
pub const MAX_OPTION_BYTES: usize = 64 << 10;
/// Longest option data that is skipped and answered with an error, in bytes. A longer option ends the
/// connection.
pub const MAX_SKIPPED_OPTION_BYTES: usize = 16 << 20;
/// Smallest preferred block size offered to clients, in bytes.
const PREFERRED_BLOCK_BYTES: u32 = 4096;
/// Time between the end of the wait for a full client limit and the handshake deadline. An error reply can be
/// sent in this time.
const REPLY_TIME: Duration = Duration::from_secs(1);
const OPTION_HEADER_BYTES: usize = size_of::<OptionHeader>();

const _: () = {
    assert!(MAX_OPTION_BYTES <= RECEIVE_BUFFER_BYTES);
    assert!(MAX_STRING_BYTES <= MAX_OPTION_BYTES);
};

/// Why a handshake ended without an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeError {
    /// The client closed the connection or aborted.
    Disconnected,
    /// The client exceeded a timeout.
    TimedOut,
    /// The client violated the protocol.
    Violation(&'static str),
    /// The TLS handshake failed, with the reason.
    Tls(String),
    /// No device was available, with the reason. The option, `OPT_EXPORT_NAME`, has no error reply.
    NoDevice(String),
}

impl From<WaitError> for HandshakeError {
    fn from(why: WaitError) -> Self {
        match why {
            WaitError::TimedOut => Self::TimedOut,
            WaitError::Disconnected => Self::Disconnected,
        }
    }
}

impl From<rustix::io::Errno> for HandshakeError {
    fn from(errno: rustix::io::Errno) -> Self {
        // WOULDBLOCK: the socket's send timeout expired.
        if errno == rustix::io::Errno::WOULDBLOCK { Self::TimedOut } else { Self::Disconnected }
    }
}

/// The chosen export and the device for the connection.
type ChosenExport = (Arc<Export>, Arc<dyn Device>);
/// An error reply: type and message.
type Refusal = (u32, Cow<'static, str>);

/// Maps the reason for a refused export to an error reply.
impl From<JoinError> for Refusal {
    fn from(error: JoinError) -> Self {
        match error {
            JoinError::Unknown => (reply::ERR_UNKNOWN, "no such export here".into()),
            JoinError::ShuttingDown => (reply::ERR_SHUTDOWN, "the server is shutting down".into()),
            JoinError::TlsRequired => (reply::ERR_TLS_REQD, "this export requires TLS (nbds://)".into()),
            JoinError::ClientLimit(most) => (reply::ERR_POLICY, limit_message(most).into()),
            JoinError::Failed(text) => (reply::ERR_POLICY, text.into()),
        }
    }
}

pub struct Handshake<'a> {
    pub(crate) shared: &'a ServerShared,
    pub(crate) link: &'a Link,
    /// Set when a template creates a device. Called at the end of the connection.
    on_end: &'a mut EndCallback,
    pub(crate) input: Input,
    pub(crate) replies: Replies,
    pub(crate) timeouts: Timeouts,
    /// Number of bytes received without TLS.
    clear_bytes: usize,
    no_zeroes: bool,
    pub(crate) headers: Headers,
    /// The export name of the last `SET_META_CONTEXT`, and the contexts selected for that name.
    pub(crate) selected: Option<(String, Contexts)>,
}

/// Longest handshake time used, so that adding it to the current time cannot overflow.
const HANDSHAKE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

impl<'a> Handshake<'a> {
    /// Creates the handshake of a new connection. The deadline counts from this call.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(shared: &'a ServerShared, link: &'a Link, on_end: &'a mut EndCallback) -> io::Result<Self> {
        let limits = &shared.limits;
        Ok(Self {
            shared,
            link,
            on_end,
            input: Input::new()?,
            replies: Replies::new()?,
            timeouts: Timeouts {
                idle: limits.handshake_idle_timeout,
                deadline: Instant::now() + limits.handshake_timeout.min(HANDSHAKE_MAX),
            },
            clear_bytes: 0,
            no_zeroes: false,
            headers: Headers::Simple,
            selected: None,
        })
    }

    /// Negotiates until the client has chosen an export. Also returns the buffers; the input may hold data
    /// that was not consumed.
    pub fn run(mut self) -> Result<(Negotiation, Input, Replies), HandshakeError> {
        // The idle timeout also applies to a client that does not read.
        let socket = self.link.socket();
        set_socket_timeout(socket, Timeout::Send, Some(self.timeouts.idle))
            .map_err(|_| HandshakeError::Disconnected)?;
        let chosen = self.negotiate();
        if matches!(chosen, Err(HandshakeError::Violation(_) | HandshakeError::NoDevice(_))) {
            // Sends the replies to earlier options. The connection ends in any case, so errors are ignored.
            let _ = self.replies.send(socket);
        }
        if chosen.is_err() {
            self.replies.send_close(socket);
        }
        let (export, device) = chosen?;
        self.replies.send(socket)?;
        set_socket_timeout(socket, Timeout::Send, None).map_err(|_| HandshakeError::Disconnected)?;
        // `choose_export` has dropped contexts that were selected under another export name. Block status
        // needs replies in chunks.
        let contexts =
            self.selected.filter(|_| self.headers.have_chunks()).map_or(Contexts::empty(), |(_, set)| set);
        let negotiated = Negotiation { export, device, headers: self.headers, contexts };
        Ok((negotiated, self.input, self.replies))
    }

    /// Handles options until one chooses an export.
    fn negotiate(&mut self) -> Result<ChosenExport, HandshakeError> {
        self.send_greeting()?;
        loop {
            if let Some(chosen) = self.next_option()? {
                return Ok(chosen);
            }
        }
    }

    fn send_greeting(&mut self) -> Result<(), HandshakeError> {
        let offered = HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES;
        self.replies.put(&Greeting {
            init: INIT_MAGIC.into(),
            magic: OPTION_MAGIC.into(),
            flags: offered.bits().into(),
        });
        let flags = u32::from_be_bytes(self.take_array::<4>()?);
        let known = u16::try_from(flags).ok().and_then(HandshakeFlags::from_bits);
        let flags = known.ok_or(HandshakeError::Violation("client flags that were not offered"))?;
        self.no_zeroes = flags.contains(HandshakeFlags::NO_ZEROES);
        Ok(())
    }

    /// Handles one option. Returns the export and its device if the option chose one.
    fn next_option(&mut self) -> Result<Option<ChosenExport>, HandshakeError> {
        let header = self.take_array::<OPTION_HEADER_BYTES>()?;
        let header = OptionHeader::read_from_bytes(&header).map_err(|_| HandshakeError::Disconnected)?;
        if header.magic.get() != OPTION_MAGIC {
            return Err(HandshakeError::Violation("an option without its magic number"));
        }
        let (kind, len) = (header.option.get(), header.len.get() as usize);
        if kind == option::STARTTLS {
            return self.start_tls(len).map(|()| None);
        }
        if kind != option::ABORT && self.needs_tls() {
            return self.refuse_without_tls(kind, len).map(|()| None);
        }
        if kind == option::EXPORT_NAME {
            return self.handle_export_name(len).map(Some);
        }
        if len > MAX_OPTION_BYTES {
            if len > MAX_SKIPPED_OPTION_BYTES {
                return Err(HandshakeError::Violation("an option of more than 16 MiB"));
            }
            self.skip_data(len)?;
            self.refuse(kind, (reply::ERR_TOO_BIG, "the option's data is too long".into()))?;
            return Ok(None);
        }
        self.receive_at_least(len)?;
        let data = self.input.data()[..len].to_vec();
        self.input.consume(len);
        let outcome = match kind {
            option::ABORT => {
                self.send_reply(kind, reply::ACK, &[])?;
                // The client may be gone already, because it need not wait for this reply.
                let _ = self.replies.send(self.link.socket());
                return Err(HandshakeError::Disconnected);
            }
            option::LIST => self.handle_list(&data)?,
            option::INFO | option::GO => match self.handle_info(kind, &data)? {
                Ok(Some(chosen)) => {
                    self.send_reply(kind, reply::ACK, &[])?;
                    return Ok(Some(chosen));
                }
                Ok(None) => Ok(()),
                Err(refusal) => Err(refusal),
            },
            option::STRUCTURED_REPLY | option::EXTENDED_HEADERS if !data.is_empty() => {
                Err((reply::ERR_INVALID, "this option has no data".into()))
            }
            option::STRUCTURED_REPLY if self.headers == Headers::Extended => {
                Err((reply::ERR_EXT_HEADER_REQD, "extended headers were negotiated".into()))
            }
            option::STRUCTURED_REPLY => {
                self.headers = Headers::Structured;
                Ok(())
            }
            option::EXTENDED_HEADERS => {
                self.headers = Headers::Extended;
                Ok(())
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.handle_meta_context(kind, &data)?,
            _ => Err((reply::ERR_UNSUP, "the option is not supported".into())),
        };
        match outcome {
            Ok(()) => self.send_reply(kind, reply::ACK, &[])?,
            Err(refusal) => self.refuse(kind, refusal)?,
        }
        Ok(None)
    }

    /// Chooses an export: counts the connection as its user, and creates a template's device.
    fn choose_export(&mut self, name: &str) -> Result<ChosenExport, JoinError> {
        let reserve = REPLY_TIME.min(self.shared.limits.handshake_timeout / 4);
        let until = self.timeouts.deadline.checked_sub(reserve).unwrap_or(self.timeouts.deadline);
        let export = self.shared.join_export(self.link, name, until)?;
        match export.open() {
            Ok((device, on_end)) => {
                *self.on_end = on_end;
                if let Some(ttl) = export.template().and_then(|template| template.ttl) {
                    self.shared.expire_after(self.link, ttl);
                }
                self.selected.take_if(|(selected, _)| selected != name);
                Ok((export, device))
            }
            Err(text) => {
                client_log!(warn, export = %export.name, text, "no device could be made for a client");
                self.shared.leave_export(self.link);
                Err(JoinError::Failed(truncate_message(text)))
            }
        }
    }

    fn handle_export_name(&mut self, len: usize) -> Result<ChosenExport, HandshakeError> {
        if self.headers == Headers::Extended {
            return Err(HandshakeError::Violation("OPT_EXPORT_NAME after extended headers were negotiated"));
        }
        if len > MAX_STRING_BYTES {
            return Err(HandshakeError::Violation("an export name of more than 4096 bytes"));
        }
        self.receive_at_least(len)?;
        let name = std::str::from_utf8(&self.input.data()[..len])
            .map_err(|_| HandshakeError::Violation("an export name that is not UTF-8"))?
            .to_owned();
        self.input.consume(len);
        let (export, device) = self.choose_export(&name).map_err(|error| match error {
            JoinError::ClientLimit(most) => HandshakeError::NoDevice(limit_message(most)),
            JoinError::Failed(text) => HandshakeError::NoDevice(text),
            JoinError::TlsRequired => {
                HandshakeError::Violation("an export that requires TLS was chosen without TLS")
            }
            JoinError::Unknown | JoinError::ShuttingDown => {
                HandshakeError::Violation("an unknown export name")
            }
        })?;
        let geometry = Bytes::user_geometry(device.geometry());
        let flags = export.flags(&geometry, self.headers.have_chunks()).bits();
        let room = size_of::<ExportNameReply>() + EXPORT_NAME_PADDING_BYTES;
        self.replies.reserve(self.link.socket(), room)?;
        self.replies.put(&ExportNameReply { size: geometry.size.into(), flags: flags.into() });
        if !self.no_zeroes {
            self.replies.put(&[0_u8; EXPORT_NAME_PADDING_BYTES]);
        }
        Ok((export, device))
    }

    fn handle_list(&mut self, data: &[u8]) -> Result<Result<(), Refusal>, HandshakeError> {
        if !data.is_empty() {
            return Ok(Err((reply::ERR_INVALID, "this option has no data".into())));
        }
        for export in self.shared.visible_exports(self.link) {
            let len = (export.name.len() as u32).to_be_bytes();
            let parts: [&[u8]; 3] = [&len, export.name.as_bytes(), export.description.as_bytes()];
            self.send_reply(option::LIST, reply::SERVER, &parts)?;
        }
        Ok(Ok(()))
    }

    /// Handles `OPT_INFO` and `OPT_GO`. Returns the export and its device for `OPT_GO`, and None for
    /// `OPT_INFO`.
    fn handle_info(
        &mut self,
        kind: u32,
        data: &[u8],
    ) -> Result<Result<Option<ChosenExport>, Refusal>, HandshakeError> {
        let mut fields = Fields(data);
        let parsed = (|| {
            let name = fields.string()?;
            let count = fields.u16()?;
            let wanted = (0..count).map(|_| fields.u16()).collect::<Option<Vec<_>>>()?;
            fields.0.is_empty().then_some((name, wanted))
        })();
        let Some((name, wanted)) = parsed else {
            return Ok(Err((reply::ERR_INVALID, "the option's data is malformed".into())));
        };
        let found = if kind == option::GO {
            self.choose_export(name).map(|chosen| (Arc::clone(&chosen.0), chosen.1.geometry(), Some(chosen)))
        } else {
            self.query_export(name).map(|(export, device_info)| (export, device_info.geometry, None))
        };
        let (export, geometry, chosen) = match found {
            Ok((export, geometry, chosen)) => (export, Bytes::user_geometry(geometry), chosen),
            Err(error) => return Ok(Err(error.into())),
        };
        let mut flags = export.flags(&geometry, self.headers.have_chunks());
        let has_contexts = self.selected.as_ref().is_some_and(|(of, set)| of == name && !set.is_empty());
        flags.set(TransmissionFlags::BLOCK_STATUS_PAYLOAD, self.headers == Headers::Extended && has_contexts);
        let flags = flags.bits();
        let fact = InfoExport { kind: info::EXPORT.into(), size: geometry.size.into(), flags: flags.into() };
        self.send_reply(kind, reply::INFO, &[fact.as_bytes()])?;
        let (preferred, maximum) = block_sizes(&geometry);
        let sizes = InfoBlockSize {
            kind: info::BLOCK_SIZE.into(),
            minimum: geometry.logical_block.into(),
            preferred: preferred.into(),
            maximum: maximum.into(),
        };
        // Sent even if the client did not request the block sizes, because the server refuses requests that
        // are not multiples of the minimum.
        self.send_reply(kind, reply::INFO, &[sizes.as_bytes()])?;
        if wanted.contains(&info::NAME) {
            self.send_reply(kind, reply::INFO, &[&info::NAME.to_be_bytes(), export.name.as_bytes()])?;
        }
        if wanted.contains(&info::DESCRIPTION) && !export.description.is_empty() {
            let parts: [&[u8]; 2] = [&info::DESCRIPTION.to_be_bytes(), export.description.as_bytes()];
            self.send_reply(kind, reply::INFO, &parts)?;
        }
        Ok(Ok(chosen))
    }

    /// Looks up an export for a client that queries properties without choosing the export.
    fn query_export(&self, name: &str) -> Result<(Arc<Export>, DeviceInfo), JoinError> {
        let export = self.shared.find(self.link, name)?;
        let device_info = export.device_info().map_err(|text| JoinError::Failed(truncate_message(text)))?;
        Ok((export, device_info))
    }

    fn handle_meta_context(&mut self, kind: u32, data: &[u8]) -> Result<Result<(), Refusal>, HandshakeError> {
        let list = kind == option::LIST_META_CONTEXT;
        if !list {
            // Each SET_META_CONTEXT replaces the selection, even if it fails.
            self.selected = None;
        }
        if !self.headers.have_chunks() {
            let text = "structured replies or extended headers must be negotiated first";
            return Ok(Err((reply::ERR_INVALID, text.into())));
        }
        let mut fields = Fields(data);
        let parsed = (|| {
            let name = fields.string()?;
            let count = fields.u32()?;
            let mut queried = if list && count == 0 { Contexts::all() } else { Contexts::empty() };
            for _ in 0..count {
                queried |= Contexts::matching(fields.string()?, list);
            }
            fields.0.is_empty().then_some((name, queried))
        })();
        let Some((name, queried)) = parsed else {
            return Ok(Err((reply::ERR_INVALID, "the option's data is malformed".into())));
        };
        let device_info = match self.query_export(name) {
            Ok((_, device_info)) => device_info,
            Err(error) => return Ok(Err(error.into())),
        };
        let offered = queried & Contexts::offered(device_info.changes);
        for (context, id) in offered.names_and_ids() {
            let id = if list { 0 } else { id };
            self.send_reply(kind, reply::META_CONTEXT, &[&id.to_be_bytes(), context.as_bytes()])?;
        }
        if !list {
            self.selected = Some((name.to_owned(), offered));
        }
        Ok(Ok(()))
    }
}

impl Handshake<'_> {
    pub(crate) fn send_reply(
        &mut self,
        option: u32,
        kind: u32,
        parts: &[&[u8]],
    ) -> Result<(), HandshakeError> {
        // A client that reads slowly never exceeds the send timeout, so the deadline is checked too.
        if self.timeouts.deadline <= Instant::now() {
            return Err(HandshakeError::TimedOut);
        }
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.replies.reserve(self.link.socket(), size_of::<OptionReply>() + len)?;
        self.put(&OptionReply {
            magic: OPTION_REPLY_MAGIC.into(),
            option: option.into(),
            kind: kind.into(),
            len: (len as u32).into(),
        });
        for part in parts {
            self.replies.put(*part);
        }
        Ok(())
    }

    fn put<T: IntoBytes + Immutable>(&mut self, part: &T) {
        self.replies.put(part);
    }

    pub(crate) fn refuse(&mut self, option: u32, (kind, text): Refusal) -> Result<(), HandshakeError> {
        tracing::debug!(peer = %self.link.peer(), option, %text, "option refused");
        self.send_reply(option, kind, &[text.as_bytes()])
    }

    fn take_array<const N: usize>(&mut self) -> Result<[u8; N], HandshakeError> {
        self.receive_at_least(N)?;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.input.data()[..N]);
        self.input.consume(N);
        Ok(bytes)
    }

    pub(crate) fn skip_data(&mut self, mut len: usize) -> Result<(), HandshakeError> {
        while len > 0 {
            self.receive_at_least(1)?;
            let n = len.min(self.input.data().len());
            self.input.consume(n);
            len -= n;
        }
        Ok(())
    }

    /// Sends the pending replies and receives until at least `n` bytes are available.
    fn receive_at_least(&mut self, n: usize) -> Result<(), HandshakeError> {
        while self.input.data().len() < n {
            self.replies.send(self.link.socket())?;
            if self.input.is_secure() {
                self.receive_sealed_at_least(n)?;
                continue;
            }
            let most = self.shared.limits.clamped_handshake_bytes();
            let limit = if self.needs_tls() { most - self.clear_bytes } else { usize::MAX };
            if limit == 0 {
                return Err(HandshakeError::Violation("too many bytes before TLS"));
            }
            let socket = self.link.socket();
            self.timeouts.wait(socket)?;
            match self.input.receive(socket, RecvFlags::DONTWAIT, n, limit) {
                (ReceiveResult::Data, n) => self.clear_bytes = self.clear_bytes.saturating_add(n),
                (ReceiveResult::WouldBlock, _) => {}
                (ReceiveResult::Ended, _) => return Err(HandshakeError::Disconnected),
            }
        }
        Ok(())
    }
}

/// Returns the preferred and maximum request size in bytes. The preferred size is a power of two and at most
/// the maximum. If the device's limit is below that of the protocol, larger requests are still served.
fn block_sizes(geometry: &Geometry) -> (u32, u32) {
    let most = max_payload(geometry);
    let maximum = if geometry.max_request == 0 { most } else { geometry.max_request.min(most) };
    let preferred = geometry.physical_block.max(geometry.io_min).max(PREFERRED_BLOCK_BYTES);
    let preferred = preferred.checked_next_power_of_two().unwrap_or(MAX_PAYLOAD_BYTES);
    let most = 1 << maximum.max(1).ilog2();
    (preferred.min(most), maximum)
}

/// Returns the largest payload of a write in bytes. A write to a zoned device is executed as a whole, so all
/// of it must fit in [`MAX_IN_FLIGHT_BYTES`].
pub fn max_payload(geometry: &Geometry) -> u32 {
    if geometry.zones.is_none() { MAX_PAYLOAD_BYTES } else { MAX_IN_FLIGHT_BYTES as u32 }
}

/// Returns the error message for an export whose client limit is reached.
fn limit_message(most: u64) -> String {
    format!("client limit reached: {most} (max_clients)")
}

/// Truncates a message to [`MAX_STRING_BYTES`], the longest string that the protocol allows.
fn truncate_message(mut text: String) -> String {
    let end = (0..=MAX_STRING_BYTES.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    text.truncate(end.unwrap_or(0));
    text
}

/// Option data that is not parsed yet. Each method removes and returns the first field, or returns None if
/// the data is too short or a string is invalid.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes(2)?.try_into().ok().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes(4)?.try_into().ok().map(u32::from_be_bytes)
    }

    fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()? as usize;
        if len > MAX_STRING_BYTES {
            return None;
        }
        std::str::from_utf8(self.bytes(len)?).ok()
    }
}
