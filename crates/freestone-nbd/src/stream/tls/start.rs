//! The TLS handshake, and the initial state of both halves of the connection.

use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use freestone_core::mapped_buffer::MappedBuffer;
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
use crate::stream::receive::{Timeouts, WaitError, receive_into};

const _: () = assert!(MAX_HANDSHAKE_BYTES <= SEALED_BUFFER_BYTES);

/// A connection after the TLS handshake.
pub struct TlsConnection {
    pub opener: Opener,
    pub sealer: Sealer,
    /// Data that arrived directly behind the handshake, already decrypted.
    pub early: Vec<u8>,
    /// The names in the client's certificate; empty if the client sent none.
    pub names: Vec<String>,
}

/// Why TLS did not start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartError {
    Disconnected,
    TimedOut,
    /// The client or the server rejected the handshake, with the reason.
    Refused(String),
}

impl From<WaitError> for StartError {
    fn from(end: WaitError) -> Self {
        match end {
            WaitError::TimedOut => Self::TimedOut,
            WaitError::Disconnected => Self::Disconnected,
        }
    }
}

impl From<Errno> for StartError {
    fn from(errno: Errno) -> Self {
        // WOULDBLOCK: the socket's send timeout expired.
        if errno == Errno::WOULDBLOCK { Self::TimedOut } else { Self::Disconnected }
    }
}

impl From<Error> for StartError {
    fn from(error: Error) -> Self {
        Self::Refused(error.to_string())
    }
}

enum HandshakeStep {
    Continue,
    Receive,
    Done,
    Failed(Error),
}

/// Performs the TLS handshake after the reply to `OPT_STARTTLS`. The client may send at most `most` bytes
/// before it is authenticated.
pub fn start(
    config: Arc<ServerConfig>,
    socket: BorrowedFd<'_>,
    timeouts: Timeouts,
    most: usize,
) -> Result<TlsConnection, StartError> {
    let mut connection = UnbufferedServerConnection::new(config)?;
    let mut buf = MappedBuffer::new(SEALED_BUFFER_BYTES, 0).map_err(|_| StartError::Disconnected)?;
    let (mut at, mut end, mut total) = (0, 0, 0);
    let (mut out, mut early) = (Vec::new(), Vec::new());
    loop {
        let UnbufferedStatus { discard, state } = connection.process_tls_records(&mut buf[at..end]);
        let next = match state {
            Ok(ConnectionState::EncodeTlsData(data)) => {
                encode(data, &mut out)?;
                HandshakeStep::Continue
            }
            Ok(ConnectionState::TransmitTlsData(transmit)) => {
                send_all(socket, &out)?;
                out.clear();
                transmit.done();
                HandshakeStep::Continue
            }
            Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                while let Some(record) = traffic.next_record() {
                    early.extend_from_slice(record?.payload);
                }
                HandshakeStep::Continue
            }
            Ok(ConnectionState::BlockedHandshake) => HandshakeStep::Receive,
            Ok(ConnectionState::WriteTraffic(_)) => HandshakeStep::Done,
            Ok(_) => return Err(StartError::Disconnected),
            Err(error) => HandshakeStep::Failed(error),
        };
        at += discard;
        match next {
            HandshakeStep::Continue => {}
            HandshakeStep::Done => break,
            HandshakeStep::Failed(error) => {
                // A second call returns the alert for the client. Further calls would parse the same bytes
                // again.
                let UnbufferedStatus { state, .. } = connection.process_tls_records(&mut buf[at..end]);
                if let Ok(ConnectionState::EncodeTlsData(data)) = state {
                    encode(data, &mut out)?;
                    // Does not wait for the client to receive the alert.
                    let _ = send(socket, &out, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
                }
                return Err(error.into());
            }
            HandshakeStep::Receive => {
                buf.copy_within(at..end, 0);
                (at, end) = (0, end - at);
                if total == most {
                    return Err(StartError::Refused(format!("its handshake is longer than {most} bytes")));
                }
                timeouts.wait(socket)?;
                let stop = end + (most - total);
                match receive_into(socket, RecvFlags::DONTWAIT, &mut buf[end..stop]) {
                    Ok(0) => return Err(StartError::Disconnected),
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
    Ok(TlsConnection {
        opener: Opener::new(Rc::clone(&keys), decrypter, rx.0, buf, at..end),
        sealer: Sealer::new(keys, encrypter, tx.0),
        early,
        names: names.unwrap_or_default(),
    })
}

fn encode<Data>(mut data: EncodeTlsData<'_, Data>, out: &mut Vec<u8>) -> Result<(), StartError> {
    let at = out.len();
    loop {
        match data.encode(&mut out[at..]) {
            Ok(n) => {
                out.truncate(at + n);
                return Ok(());
            }
            Err(EncodeError::InsufficientSize(wanted)) => out.resize(at + wanted.required_size, 0),
            Err(error) => return Err(StartError::Refused(error.to_string())),
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
