//! TLS in the handshake of a connection: `OPT_STARTTLS`, and what is refused before it.

use rustix::net::RecvFlags;

use crate::handshake::{End, Handshake};
use crate::headers::Headers;
use crate::input::Received;
use crate::proto::{option, reply};
use crate::tls::settings::TlsMode;
use crate::tls::start::{NotStarted, Started, start};

impl From<NotStarted> for End {
    fn from(why: NotStarted) -> Self {
        match why {
            NotStarted::Left => Self::Left,
            NotStarted::TimedOut => Self::TimedOut,
            NotStarted::Refused(why) => Self::Tls(why),
        }
    }
}

impl Handshake<'_> {
    /// Whether the client has to start TLS before anything else.
    pub(crate) fn needs_tls(&self) -> bool {
        !self.input.is_secure() && self.shared.tls.get().is_some_and(|policy| policy.mode == TlsMode::Require)
    }

    /// Answers an option that is not for clear.
    pub(crate) fn refuse_in_clear(&mut self, kind: u32, len: usize) -> Result<(), End> {
        // There is no answer to it but an export.
        if kind == option::EXPORT_NAME {
            return Err(End::Violation("an export was chosen without TLS"));
        }
        if len > self.shared.limits.most_handshake_bytes() {
            return Err(End::Violation("a longer option without TLS than it may send"));
        }
        self.skip(len)?;
        self.refuse(kind, (reply::ERR_TLS_REQD, "this server is for TLS only, nbds://".into()))
    }

    /// `OPT_STARTTLS`.
    pub(crate) fn start_tls(&mut self, len: usize) -> Result<(), End> {
        if len > self.shared.limits.most_handshake_bytes() {
            return Err(End::Violation("OPT_STARTTLS with more data than it may send"));
        }
        let refusal = if len > 0 {
            self.skip(len)?;
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
        // A client waits for the answer. Whoever did not would have us take for the client's what
        // anybody on the way can have put there.
        if !self.input.data().is_empty() {
            return Err(End::Violation("bytes in clear behind OPT_STARTTLS"));
        }
        let socket = self.link.socket();
        self.answer(option::STARTTLS, reply::ACK, &[])?;
        self.replies.send(socket)?;
        let Started { opener, sealer, early, names } = {
            let most = self.shared.limits.most_handshake_bytes();
            start(policy.config(), socket, self.patience, most)?
        };
        tracing::debug!(peer = %self.link.peer(), ?names, "TLS");
        self.input.secure(opener, &early);
        self.replies.secure(sealer);
        self.link.secure(names);
        // Whoever was in between may have negotiated that.
        self.headers = Headers::Simple;
        self.selected = None;
        Ok(())
    }

    /// As [`need`](Self::need), one receive at most.
    pub(crate) fn need_sealed(&mut self, n: usize) -> Result<(), End> {
        let socket = self.link.socket();
        if !self.input.has_sealed() {
            self.patience.wait(socket)?;
            match self.input.receive_sealed(socket, RecvFlags::DONTWAIT, usize::MAX).0 {
                Received::Data => {}
                Received::WouldBlock => return Ok(()),
                Received::End => return Err(End::Left),
            }
        }
        self.input.open(n).map_err(|_| End::Left)
    }
}
