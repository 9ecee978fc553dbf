//! The handshake of TLS, and what the two halves of the connection begin with.

use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use freestone_core::mapped::Mapped;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, send};
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use rustls::{Error, ExtractedSecrets, ServerConfig};

use super::keys::Keys;
use super::names::names_of;
use super::opener::{Opener, SEALED_BUFFER_BYTES};
use super::sealer::Sealer;
use crate::limits::MAX_HANDSHAKE_BYTES;
use crate::receive::{Impatient, Patience, receive_into};

const _: () = assert!(MAX_HANDSHAKE_BYTES <= SEALED_BUFFER_BYTES);

/// A connection by TLS.
pub struct Started {
    /// Opens what the client sends.
    pub opener: Opener,
    /// Seals what it is sent.
    pub sealer: Sealer,
    /// What the client sent right behind its handshake; already opened.
    pub early: Vec<u8>,
    /// The names in its certificate, where it has shown one.
    pub names: Vec<String>,
}

/// Why there is no TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotStarted {
    /// The client left.
    Left,
    /// It took too long.
    TimedOut,
    /// One side does not want the other; why.
    Refused(String),
}

impl From<Impatient> for NotStarted {
    fn from(end: Impatient) -> Self {
        match end {
            Impatient::TimedOut => Self::TimedOut,
            Impatient::Left => Self::Left,
        }
    }
}

impl From<Errno> for NotStarted {
    fn from(errno: Errno) -> Self {
        // The send timeout of the handshake.
        if errno == Errno::WOULDBLOCK { Self::TimedOut } else { Self::Left }
    }
}

impl From<Error> for NotStarted {
    fn from(error: Error) -> Self {
        Self::Refused(error.to_string())
    }
}

/// What the state of a handshake asks for.
enum Next {
    Go,
    Receive,
    Done,
    Failed(Error),
}

/// Shakes hands with a client that was told that it may, and that may send at most so many bytes
/// before it is known; a chain of certificates is a tenth of what is usual.
pub fn start(
    config: Arc<ServerConfig>,
    socket: BorrowedFd<'_>,
    patience: Patience,
    most: usize,
) -> Result<Started, NotStarted> {
    let mut connection = UnbufferedServerConnection::new(config)?;
    let mut buf = Mapped::new(SEALED_BUFFER_BYTES, 0).map_err(|_| NotStarted::Left)?;
    let (mut at, mut end, mut total) = (0, 0, 0);
    let (mut out, mut early) = (Vec::new(), Vec::new());
    loop {
        let UnbufferedStatus { discard, state } = connection.process_tls_records(&mut buf[at..end]);
        let next = match state {
            Ok(ConnectionState::EncodeTlsData(data)) => {
                encode(data, &mut out)?;
                Next::Go
            }
            Ok(ConnectionState::TransmitTlsData(transmit)) => {
                send_all(socket, &out)?;
                out.clear();
                transmit.done();
                Next::Go
            }
            Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                while let Some(record) = traffic.next_record() {
                    early.extend_from_slice(record?.payload);
                }
                Next::Go
            }
            Ok(ConnectionState::BlockedHandshake) => Next::Receive,
            Ok(ConnectionState::WriteTraffic(_)) => Next::Done,
            Ok(_) => return Err(NotStarted::Left),
            Err(error) => Next::Failed(error),
        };
        at += discard;
        match next {
            Next::Go => {}
            Next::Done => break,
            Next::Failed(error) => {
                // Asked once more it has what the client is told; more often it would look at the same
                // bytes again.
                let UnbufferedStatus { state, .. } = connection.process_tls_records(&mut buf[at..end]);
                if let Ok(ConnectionState::EncodeTlsData(data)) = state {
                    encode(data, &mut out)?;
                    // That the client hears it is not waited for.
                    let _ = send(socket, &out, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
                }
                return Err(error.into());
            }
            Next::Receive => {
                buf.copy_within(at..end, 0);
                (at, end) = (0, end - at);
                if total == most {
                    return Err(NotStarted::Refused(format!("its handshake has more than {most} bytes")));
                }
                patience.wait(socket)?;
                let stop = end + (most - total);
                match receive_into(socket, RecvFlags::DONTWAIT, &mut buf[end..stop]) {
                    Ok(0) => return Err(NotStarted::Left),
                    Ok(n) => (end, total) = (end + n, total + n),
                    Err(Errno::WOULDBLOCK) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
    }
    let names = connection.peer_certificates().and_then(|chain| chain.first()).map(names_of);
    let (secrets, kernel) = connection.dangerous_into_kernel_connection()?;
    let keys = Rc::new(Keys::new(kernel));
    let ExtractedSecrets { tx, rx } = secrets;
    let (encrypter, decrypter) = (keys.encrypter(tx.1)?, keys.decrypter(rx.1)?);
    Ok(Started {
        opener: Opener::new(Rc::clone(&keys), decrypter, rx.0, buf, at..end),
        sealer: Sealer::new(keys, encrypter, tx.0),
        early,
        names: names.unwrap_or_default(),
    })
}

fn encode<Data>(mut data: EncodeTlsData<'_, Data>, out: &mut Vec<u8>) -> Result<(), NotStarted> {
    let at = out.len();
    loop {
        match data.encode(&mut out[at..]) {
            Ok(n) => {
                out.truncate(at + n);
                return Ok(());
            }
            Err(EncodeError::InsufficientSize(wanted)) => out.resize(at + wanted.required_size, 0),
            Err(error) => return Err(NotStarted::Refused(error.to_string())),
        }
    }
}

fn send_all(socket: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let n = rustix::io::retry_on_intr(|| send(socket, bytes, SendFlags::NOSIGNAL))?;
        bytes = &bytes[n..];
    }
    Ok(())
}
