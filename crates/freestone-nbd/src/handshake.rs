//! The handshake of a connection: fixed newstyle, option by option.

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
use crate::export::{EnterError, Export};
use crate::flight::MAX_IN_FLIGHT_BYTES;
use crate::headers::Headers;
use crate::input::{Input, RECEIVE_BUFFER_BYTES, Received};
use crate::link::Link;
use crate::proto::{
    EXPORT_NAME_PADDING_BYTES, ExportNameReply, Greeting, HandshakeFlags, INIT_MAGIC, InfoBlockSize,
    InfoExport, MAX_PAYLOAD_BYTES, MAX_STRING_BYTES, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader,
    OptionReply, TransmissionFlags, info, option, reply,
};
use crate::receive::{Impatient, Patience};
use crate::replies::Replies;
use crate::session::Negotiated;
use crate::shared::ServerShared;
use crate::template::{Facts, OnEnd};

/// Longest data of an option that is looked at, in bytes.
pub const MAX_OPTION_BYTES: usize = 64 << 10;
/// Longest data of an option that is skipped, with an error as the answer, in bytes; beyond, the
/// connection ends.
pub const MAX_SKIPPED_OPTION_BYTES: usize = 16 << 20;
/// Smallest preferred block that is offered, in bytes.
const PREFERRED_BLOCK_BYTES: u32 = 4096;
/// What is left of a handshake in which no place came free, to say so.
const ANSWER_TIME: Duration = Duration::from_secs(1);
const OPTION_HEADER_BYTES: usize = size_of::<OptionHeader>();

const _: () = {
    assert!(MAX_OPTION_BYTES <= RECEIVE_BUFFER_BYTES);
    assert!(MAX_STRING_BYTES <= MAX_OPTION_BYTES);
};

/// How a handshake ended without an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The client left, or said that it would.
    Left,
    /// The client took too long.
    TimedOut,
    /// The client broke the protocol.
    Violation(&'static str),
    /// One side does not want the other's TLS; why.
    Tls(String),
    /// No device could be made, and the option has no error reply; why.
    NoDevice(String),
}

impl From<Impatient> for End {
    fn from(why: Impatient) -> Self {
        match why {
            Impatient::TimedOut => Self::TimedOut,
            Impatient::Left => Self::Left,
        }
    }
}

impl From<rustix::io::Errno> for End {
    fn from(errno: rustix::io::Errno) -> Self {
        // The send timeout of the handshake.
        if errno == rustix::io::Errno::WOULDBLOCK { Self::TimedOut } else { Self::Left }
    }
}

/// An export and the device that the connection gets.
type Chosen = (Arc<Export>, Arc<dyn Device>);
/// An error reply: its type and a text for people.
type Refusal = (u32, Cow<'static, str>);

/// The refusal of an export.
impl From<EnterError> for Refusal {
    fn from(error: EnterError) -> Self {
        match error {
            EnterError::Unknown => (reply::ERR_UNKNOWN, "no such export here".into()),
            EnterError::ShuttingDown => (reply::ERR_SHUTDOWN, "the server is shutting down".into()),
            EnterError::OnlyByTls => (reply::ERR_TLS_REQD, "this export is for TLS only, nbds://".into()),
            EnterError::Full(most) => (reply::ERR_POLICY, full(most).into()),
            EnterError::Failed(text) => (reply::ERR_POLICY, text.into()),
        }
    }
}

/// A connection in its handshake.
pub struct Handshake<'a> {
    pub(crate) shared: &'a ServerShared,
    pub(crate) link: &'a Link,
    /// What is called when the connection has ended, from when its device was made.
    on_end: &'a mut OnEnd,
    pub(crate) input: Input,
    pub(crate) replies: Replies,
    pub(crate) patience: Patience,
    /// Bytes that were received in clear.
    clear_bytes: usize,
    no_zeroes: bool,
    pub(crate) headers: Headers,
    /// The export name for which contexts were selected, and these.
    pub(crate) selected: Option<(String, Contexts)>,
}

/// Longest time that a handshake may be given; a sum with the clock never overflows.
const HANDSHAKE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

impl<'a> Handshake<'a> {
    /// A handshake that begins now.
    ///
    /// # Errors
    /// No memory is left.
    pub fn new(shared: &'a ServerShared, link: &'a Link, on_end: &'a mut OnEnd) -> io::Result<Self> {
        let limits = &shared.limits;
        Ok(Self {
            shared,
            link,
            on_end,
            input: Input::new()?,
            replies: Replies::new()?,
            patience: Patience {
                silence: limits.handshake_silence,
                deadline: Instant::now() + limits.handshake_total.min(HANDSHAKE_MAX),
            },
            clear_bytes: 0,
            no_zeroes: false,
            headers: Headers::Simple,
            selected: None,
        })
    }

    /// Negotiates until the client has chosen an export; hands over the buffers with what is in
    /// them.
    pub fn run(mut self) -> Result<(Negotiated, Input, Replies), End> {
        // A client that reads no replies is given as long as one that sends nothing.
        let socket = self.link.socket();
        set_socket_timeout(socket, Timeout::Send, Some(self.patience.silence)).map_err(|_| End::Left)?;
        let chosen = self.negotiate();
        if matches!(chosen, Err(End::Violation(_) | End::NoDevice(_))) {
            // Replies to the options before it are still sent. The client may be gone, which is no
            // matter here.
            let _ = self.replies.send(socket);
        }
        if chosen.is_err() {
            self.replies.say_goodbye(socket);
        }
        let (export, device) = chosen?;
        self.replies.send(socket)?;
        set_socket_timeout(socket, Timeout::Send, None).map_err(|_| End::Left)?;
        // Contexts count only for the export for which they were selected, by whatever of its
        // names.
        let contexts =
            self.selected.filter(|_| self.headers.have_chunks()).map_or(Contexts::empty(), |(_, set)| set);
        let negotiated = Negotiated { export, device, headers: self.headers, contexts };
        Ok((negotiated, self.input, self.replies))
    }

    /// Answers option by option, until one chooses an export.
    fn negotiate(&mut self) -> Result<Chosen, End> {
        self.greet()?;
        loop {
            if let Some(chosen) = self.next_option()? {
                return Ok(chosen);
            }
        }
    }

    fn greet(&mut self) -> Result<(), End> {
        let offered = HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES;
        self.replies.put(&Greeting {
            init: INIT_MAGIC.into(),
            magic: OPTION_MAGIC.into(),
            flags: offered.bits().into(),
        });
        let flags = u32::from_be_bytes(self.take::<4>()?);
        let known = u16::try_from(flags).ok().and_then(HandshakeFlags::from_bits);
        let flags = known.ok_or(End::Violation("client flags that were not offered"))?;
        self.no_zeroes = flags.contains(HandshakeFlags::NO_ZEROES);
        Ok(())
    }

    /// Answers one option. The export and its device, once one was chosen.
    fn next_option(&mut self) -> Result<Option<Chosen>, End> {
        let header = self.take::<OPTION_HEADER_BYTES>()?;
        let header = OptionHeader::read_from_bytes(&header).map_err(|_| End::Left)?;
        if header.magic.get() != OPTION_MAGIC {
            return Err(End::Violation("an option without its magic number"));
        }
        let (kind, len) = (header.option.get(), header.len.get() as usize);
        if kind == option::STARTTLS {
            return self.start_tls(len).map(|()| None);
        }
        if kind != option::ABORT && self.needs_tls() {
            return self.refuse_in_clear(kind, len).map(|()| None);
        }
        if kind == option::EXPORT_NAME {
            return self.export_name(len).map(Some);
        }
        if len > MAX_OPTION_BYTES {
            if len > MAX_SKIPPED_OPTION_BYTES {
                return Err(End::Violation("an option of more than 16 MiB"));
            }
            self.skip(len)?;
            self.refuse(kind, (reply::ERR_TOO_BIG, "the option's data is too long".into()))?;
            return Ok(None);
        }
        self.need(len)?;
        let data = self.input.data()[..len].to_vec();
        self.input.consume(len);
        let outcome = match kind {
            option::ABORT => {
                self.answer(kind, reply::ACK, &[])?;
                // The client may be gone already, and need not wait for this.
                let _ = self.replies.send(self.link.socket());
                return Err(End::Left);
            }
            option::LIST => self.list(&data)?,
            option::INFO | option::GO => match self.info(kind, &data)? {
                Ok(Some(chosen)) => {
                    self.answer(kind, reply::ACK, &[])?;
                    return Ok(Some(chosen));
                }
                Ok(None) => Ok(()),
                Err(refusal) => Err(refusal),
            },
            option::STRUCTURED_REPLY | option::EXTENDED_HEADERS if !data.is_empty() => {
                Err((reply::ERR_INVALID, "this option has no data".into()))
            }
            option::STRUCTURED_REPLY if self.headers == Headers::Extended => {
                Err((reply::ERR_EXT_HEADER_REQD, "extended headers were agreed on".into()))
            }
            option::STRUCTURED_REPLY => {
                self.headers = Headers::Structured;
                Ok(())
            }
            option::EXTENDED_HEADERS => {
                self.headers = Headers::Extended;
                Ok(())
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta_context(kind, &data)?,
            _ => Err((reply::ERR_UNSUP, "the option is not supported".into())),
        };
        match outcome {
            Ok(()) => self.answer(kind, reply::ACK, &[])?,
            Err(refusal) => self.refuse(kind, refusal)?,
        }
        Ok(None)
    }

    /// Chooses an export: from now on the connection counts as its user, and a template's device is
    /// made.
    fn choose(&mut self, name: &str) -> Result<Chosen, EnterError> {
        let answer = ANSWER_TIME.min(self.shared.limits.handshake_total / 4);
        let until = self.patience.deadline.checked_sub(answer).unwrap_or(self.patience.deadline);
        let export = self.shared.enter(self.link, name, until)?;
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
                self.shared.withdraw(self.link);
                Err(EnterError::Failed(sentence(text)))
            }
        }
    }

    fn export_name(&mut self, len: usize) -> Result<Chosen, End> {
        if self.headers == Headers::Extended {
            return Err(End::Violation("the export without GO, after extended headers were agreed on"));
        }
        if len > MAX_STRING_BYTES {
            return Err(End::Violation("an export name of more than 4096 bytes"));
        }
        self.need(len)?;
        let name = std::str::from_utf8(&self.input.data()[..len])
            .map_err(|_| End::Violation("an export name that is not UTF-8"))?
            .to_owned();
        self.input.consume(len);
        let (export, device) = self.choose(&name).map_err(|error| match error {
            EnterError::Full(most) => End::NoDevice(full(most)),
            EnterError::Failed(text) => End::NoDevice(text),
            EnterError::OnlyByTls => End::Violation("an export that is for TLS was chosen without"),
            EnterError::Unknown | EnterError::ShuttingDown => End::Violation("an unknown export name"),
        })?;
        let geometry = Bytes::told(device.geometry());
        let flags = export.flags(&geometry, self.headers.have_chunks()).bits();
        let room = size_of::<ExportNameReply>() + EXPORT_NAME_PADDING_BYTES;
        self.replies.reserve(self.link.socket(), room)?;
        self.replies.put(&ExportNameReply { size: geometry.size.into(), flags: flags.into() });
        if !self.no_zeroes {
            self.replies.put(&[0_u8; EXPORT_NAME_PADDING_BYTES]);
        }
        Ok((export, device))
    }

    fn list(&mut self, data: &[u8]) -> Result<Result<(), Refusal>, End> {
        if !data.is_empty() {
            return Ok(Err((reply::ERR_INVALID, "this option has no data".into())));
        }
        for export in self.shared.seen_by(self.link) {
            let len = (export.name.len() as u32).to_be_bytes();
            let parts: [&[u8]; 3] = [&len, export.name.as_bytes(), export.description.as_bytes()];
            self.answer(option::LIST, reply::SERVER, &parts)?;
        }
        Ok(Ok(()))
    }

    /// `OPT_INFO` and `OPT_GO`; the export and its device for the latter.
    fn info(&mut self, kind: u32, data: &[u8]) -> Result<Result<Option<Chosen>, Refusal>, End> {
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
            self.choose(name).map(|chosen| (Arc::clone(&chosen.0), chosen.1.geometry(), Some(chosen)))
        } else {
            self.look(name).map(|(export, facts)| (export, facts.geometry, None))
        };
        let (export, geometry, chosen) = match found {
            Ok((export, geometry, chosen)) => (export, Bytes::told(geometry), chosen),
            Err(error) => return Ok(Err(error.into())),
        };
        let mut flags = export.flags(&geometry, self.headers.have_chunks());
        let has_contexts = self.selected.as_ref().is_some_and(|(of, set)| of == name && !set.is_empty());
        flags.set(TransmissionFlags::BLOCK_STATUS_PAYLOAD, self.headers == Headers::Extended && has_contexts);
        let flags = flags.bits();
        let fact = InfoExport { kind: info::EXPORT.into(), size: geometry.size.into(), flags: flags.into() };
        self.answer(kind, reply::INFO, &[fact.as_bytes()])?;
        let (preferred, maximum) = block_sizes(&geometry);
        let sizes = InfoBlockSize {
            kind: info::BLOCK_SIZE.into(),
            minimum: geometry.logical_block.into(),
            preferred: preferred.into(),
            maximum: maximum.into(),
        };
        // Sent also to clients that did not ask for it: what is not a multiple of the minimum is
        // refused.
        self.answer(kind, reply::INFO, &[sizes.as_bytes()])?;
        if wanted.contains(&info::NAME) {
            self.answer(kind, reply::INFO, &[&info::NAME.to_be_bytes(), export.name.as_bytes()])?;
        }
        if wanted.contains(&info::DESCRIPTION) && !export.description.is_empty() {
            let parts: [&[u8]; 2] = [&info::DESCRIPTION.to_be_bytes(), export.description.as_bytes()];
            self.answer(kind, reply::INFO, &parts)?;
        }
        Ok(Ok(chosen))
    }

    /// Looks up an export for a client that asks about it without choosing it.
    fn look(&self, name: &str) -> Result<(Arc<Export>, Facts), EnterError> {
        let export = self.shared.find(self.link, name)?;
        let facts = export.facts().map_err(|text| EnterError::Failed(sentence(text)))?;
        Ok((export, facts))
    }

    fn meta_context(&mut self, kind: u32, data: &[u8]) -> Result<Result<(), Refusal>, End> {
        let list = kind == option::LIST_META_CONTEXT;
        if !list {
            // Each SET_META_CONTEXT replaces the selection, also one that fails.
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
            let mut asked = if list && count == 0 { Contexts::all() } else { Contexts::empty() };
            for _ in 0..count {
                asked |= Contexts::asked(fields.string()?, list);
            }
            fields.0.is_empty().then_some((name, asked))
        })();
        let Some((name, asked)) = parsed else {
            return Ok(Err((reply::ERR_INVALID, "the option's data is malformed".into())));
        };
        let facts = match self.look(name) {
            Ok((_, facts)) => facts,
            Err(error) => return Ok(Err(error.into())),
        };
        let told = asked & Contexts::offered(facts.changes);
        for (context, id) in told.named() {
            let id = if list { 0 } else { id };
            self.answer(kind, reply::META_CONTEXT, &[&id.to_be_bytes(), context.as_bytes()])?;
        }
        if !list {
            self.selected = Some((name.to_owned(), told));
        }
        Ok(Ok(()))
    }
}

/// Sending and receiving.
impl Handshake<'_> {
    pub(crate) fn answer(&mut self, option: u32, kind: u32, parts: &[&[u8]]) -> Result<(), End> {
        // The send timeout alone would not end a handshake with a client that reads slowly.
        if self.patience.deadline <= Instant::now() {
            return Err(End::TimedOut);
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

    pub(crate) fn refuse(&mut self, option: u32, (kind, text): Refusal) -> Result<(), End> {
        tracing::debug!(peer = %self.link.peer(), option, %text, "option refused");
        self.answer(option, kind, &[text.as_bytes()])
    }

    /// Takes exactly `N` bytes.
    fn take<const N: usize>(&mut self) -> Result<[u8; N], End> {
        self.need(N)?;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.input.data()[..N]);
        self.input.consume(N);
        Ok(bytes)
    }

    /// Throws `len` bytes away.
    pub(crate) fn skip(&mut self, mut len: usize) -> Result<(), End> {
        while len > 0 {
            self.need(1)?;
            let n = len.min(self.input.data().len());
            self.input.consume(n);
            len -= n;
        }
        Ok(())
    }

    /// Sends what is ready and receives until at least `n` bytes are there.
    fn need(&mut self, n: usize) -> Result<(), End> {
        while self.input.data().len() < n {
            self.replies.send(self.link.socket())?;
            if self.input.is_secure() {
                self.need_sealed(n)?;
                continue;
            }
            let most = self.shared.limits.most_handshake_bytes();
            let limit = if self.needs_tls() { most - self.clear_bytes } else { usize::MAX };
            if limit == 0 {
                return Err(End::Violation("more bytes without TLS than it may send"));
            }
            let socket = self.link.socket();
            self.patience.wait(socket)?;
            match self.input.receive(socket, RecvFlags::DONTWAIT, n, limit) {
                (Received::Data, n) => self.clear_bytes = self.clear_bytes.saturating_add(n),
                (Received::WouldBlock, _) => {}
                (Received::End, _) => return Err(End::Left),
            }
        }
        Ok(())
    }
}

/// Preferred and maximum size of a request in bytes. The first is a power of two and at most the
/// second, which is a multiple of the logical block. Where the device wants smaller requests than
/// the protocol allows, a larger one is served all the same.
fn block_sizes(geometry: &Geometry) -> (u32, u32) {
    let most = max_payload(geometry);
    let maximum = if geometry.max_request == 0 { most } else { geometry.max_request.min(most) };
    let preferred = geometry.physical_block.max(geometry.io_min).max(PREFERRED_BLOCK_BYTES);
    let preferred = preferred.checked_next_power_of_two().unwrap_or(MAX_PAYLOAD_BYTES);
    let most = 1 << maximum.max(1).ilog2();
    (preferred.min(most), maximum)
}

/// Most data of a write. To a zone it is written all or not at all, so it must be in memory first.
pub fn max_payload(geometry: &Geometry) -> u32 {
    if geometry.zones.is_none() { MAX_PAYLOAD_BYTES } else { MAX_IN_FLIGHT_BYTES as u32 }
}

/// Why a client gets no place.
fn full(most: u64) -> String {
    format!("as many clients are connected as may be, {most} (max_clients)")
}

/// At most as much of a text as the protocol's strings may hold.
fn sentence(mut text: String) -> String {
    let end = (0..=MAX_STRING_BYTES.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    text.truncate(end.unwrap_or(0));
    text
}

/// Fields of an option's data, taken from the front; `None` is the end of the data, or a string
/// that breaks the rules.
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
