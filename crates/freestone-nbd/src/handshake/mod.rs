//! The fixed newstyle handshake of a connection, option by option.
//!
//! A [`Handshake`] owns the connection's buffers until the client has chosen an export. Then it passes them to
//! the session, with the [`Negotiation`]. Only the connection's thread uses a handshake.

mod options;
mod starttls;

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::device::Device;
use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::link::Link;
use crate::proto::{
    Greeting, HandshakeFlags, INIT_MAGIC, MAX_STRING_BYTES, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader,
    OptionReply, option, reply,
};
use crate::shared::ServerShared;
use crate::shared::export::Export;
use crate::shared::template::EndCallback;
use crate::stream::input::{Input, RECEIVE_BUFFER_BYTES, ReceiveResult};
use crate::stream::receive::{Timeouts, WaitError};
use crate::stream::replies::Replies;
use crate::wire::contexts::Contexts;
use crate::wire::headers::Headers;

/// Longest option data that is parsed, in bytes.
pub const MAX_OPTION_BYTES: usize = 64 << 10;
/// Longest option data that is skipped and answered with an error, in bytes. A longer option ends the
/// connection.
pub const MAX_SKIPPED_OPTION_BYTES: usize = 16 << 20;
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

/// The result of a handshake, with which a session begins.
pub struct Negotiation {
    pub export: Arc<Export>,
    /// The export's device. For a template, the device created for this connection.
    pub device: Arc<dyn Device>,
    pub headers: Headers,
    /// The metadata contexts that block status reports; empty if replies have no chunks.
    pub contexts: Contexts,
}

/// The chosen export and the device for the connection.
type ChosenExport = (Arc<Export>, Arc<dyn Device>);
/// An error reply: type and message.
type Refusal = (u32, Cow<'static, str>);

pub struct Handshake<'a> {
    shared: &'a ServerShared,
    link: &'a Link,
    /// Set when a template creates a device. Called at the end of the connection.
    on_end: &'a mut EndCallback,
    input: Input,
    replies: Replies,
    timeouts: Timeouts,
    /// Number of bytes received without TLS.
    clear_bytes: usize,
    no_zeroes: bool,
    headers: Headers,
    /// The export name of the last `SET_META_CONTEXT`, and the contexts selected for that name.
    selected: Option<(String, Contexts)>,
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
}

impl Handshake<'_> {
    fn send_reply(&mut self, option: u32, kind: u32, parts: &[&[u8]]) -> Result<(), HandshakeError> {
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

    fn refuse(&mut self, option: u32, (kind, text): Refusal) -> Result<(), HandshakeError> {
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

    fn skip_data(&mut self, mut len: usize) -> Result<(), HandshakeError> {
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
