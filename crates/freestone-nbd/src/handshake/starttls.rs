//! TLS in the NBD handshake: `OPT_STARTTLS`, and options refused before it.

use rustix::net::RecvFlags;

use crate::handshake::{Handshake, HandshakeError};
use crate::proto::{option, reply};
use crate::stream::input::ReceiveResult;
use crate::stream::tls::settings::TlsMode;
use crate::stream::tls::start::{StartError, TlsConnection, start};
use crate::wire::headers::Headers;

impl From<StartError> for HandshakeError {
    fn from(why: StartError) -> Self {
        match why {
            StartError::Disconnected => Self::Disconnected,
            StartError::TimedOut => Self::TimedOut,
            StartError::Refused(why) => Self::Tls(why),
        }
    }
}

impl Handshake<'_> {
    /// Returns true if the client must start TLS first.
    pub(super) fn needs_tls(&self) -> bool {
        !self.input.is_secure()
            && self.shared.tls.get().is_some_and(|policy| policy.mode == TlsMode::Required)
    }

    /// Refuses an option because the client must start TLS first.
    pub(super) fn refuse_without_tls(&mut self, kind: u32, len: usize) -> Result<(), HandshakeError> {
        // `OPT_EXPORT_NAME` has no error reply.
        if kind == option::EXPORT_NAME {
            return Err(HandshakeError::Violation("an export was chosen without TLS"));
        }
        if len > self.shared.limits.clamped_handshake_bytes() {
            return Err(HandshakeError::Violation("too long an option before TLS"));
        }
        self.skip_data(len)?;
        self.refuse(kind, (reply::ERR_TLS_REQD, "this server requires TLS (nbds://)".into()))
    }

    pub(super) fn start_tls(&mut self, len: usize) -> Result<(), HandshakeError> {
        if len > self.shared.limits.clamped_handshake_bytes() {
            return Err(HandshakeError::Violation("OPT_STARTTLS with too much data"));
        }
        let refusal = if len > 0 {
            self.skip_data(len)?;
            Some((reply::ERR_INVALID, "this option has no data"))
        } else if self.input.is_secure() {
            Some((reply::ERR_INVALID, "TLS was started already"))
        } else if self.shared.tls.get().is_none() {
            Some((reply::ERR_POLICY, "this server has no TLS"))
        } else {
            None
        };
        if let Some((kind, text)) = refusal {
            return self.refuse(option::STARTTLS, (kind, text.into()));
        }
        let Some(policy) = self.shared.tls.get() else { return Ok(()) };
        // A correct client waits for the reply. Plaintext that an attacker injected behind the option must
        // not count as data of the TLS session.
        if !self.input.data().is_empty() {
            return Err(HandshakeError::Violation("plaintext behind OPT_STARTTLS"));
        }
        let socket = self.link.socket();
        self.send_reply(option::STARTTLS, reply::ACK, &[])?;
        self.replies.send(socket)?;
        let TlsConnection { opener, sealer, early, names } = {
            let most = self.shared.limits.clamped_handshake_bytes();
            start(policy.config(), socket, self.timeouts, most)?
        };
        tracing::debug!(peer = %self.link.peer(), ?names, "TLS");
        self.input.start_tls(opener, &early);
        self.replies.start_tls(sealer);
        self.link.set_certificate_names(names);
        // An attacker may have negotiated the headers and contexts before TLS.
        self.headers = Headers::Simple;
        self.selected = None;
        Ok(())
    }

    /// Receives at most once, and decrypts, until `n` bytes are available. Called repeatedly by
    /// [`receive_at_least`](Self::receive_at_least).
    pub(super) fn receive_sealed_at_least(&mut self, n: usize) -> Result<(), HandshakeError> {
        let socket = self.link.socket();
        if !self.input.has_sealed() {
            self.timeouts.wait(socket)?;
            match self.input.receive_sealed(socket, RecvFlags::DONTWAIT, usize::MAX).0 {
                ReceiveResult::Data => {}
                ReceiveResult::WouldBlock => return Ok(()),
                ReceiveResult::Ended => return Err(HandshakeError::Disconnected),
            }
        }
        self.input.open(n).map_err(|_| HandshakeError::Disconnected)
    }
}
