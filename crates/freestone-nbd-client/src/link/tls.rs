//! TLS over a connection, with rustls and ring. The server's certificate is always verified, and
//! there is no fallback to plain text.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::event::PollFlags;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use crate::config::TlsFiles;
use crate::error::{LinkError, SetupError};
use crate::link::socket::{receive, send};
use crate::link::wake::Deadline;
use crate::uri::{ServerAddress, Uri};

/// Maximum number of bytes that are encrypted but not sent.
const UNSENT_MAX_BYTES: usize = 256 << 10;
/// Expected name in the certificate of a server behind a Unix socket, unless `hostname` is set.
const LOCAL_NAME: &str = "localhost";

pub struct TlsSettings {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl TlsSettings {
    /// Loads the certificate and key files.
    pub fn load(uri: &Uri, files: &TlsFiles) -> Result<Self, SetupError> {
        let roots = match &files.ca {
            Some(path) => roots_of(path)?,
            None => roots_of_system()?,
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls_error = |error: rustls::Error| SetupError::Tls(error.to_string());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(tls_error)?
            .with_root_certificates(roots);
        let config = match (&files.cert, &files.key) {
            (Some(cert), Some(key)) => {
                let chain = certificates("tls_cert", cert)?;
                let private = PrivateKeyDer::from_pem_file(key)
                    .map_err(|why| certificate("tls_key", key, &why.to_string()))?;
                config
                    .with_client_auth_cert(chain, private)
                    .map_err(|why| certificate("tls_cert", cert, &format!("with tls_key: {why}")))?
            }
            _ => config.with_no_client_auth(),
        };
        let name = match (&files.hostname, &uri.address) {
            (Some(name), _) => name,
            (None, ServerAddress::Tcp { host, .. }) => host,
            (None, ServerAddress::Unix(_)) => LOCAL_NAME,
        };
        let server = ServerName::try_from(name.to_owned())
            .map_err(|_| SetupError::Tls(format!("{name:?} is not a valid server name")))?;
        Ok(Self { config: Arc::new(config), server })
    }
}

fn certificate(key: &'static str, path: &Path, why: &str) -> SetupError {
    SetupError::Certificate { key, path: path.to_owned(), why: why.to_owned() }
}

fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, SetupError> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let all: Vec<_> = all.map_err(|why| certificate(key, path, &why.to_string()))?;
    if all.is_empty() { Err(certificate(key, path, "contains no certificate")) } else { Ok(all) }
}

fn roots_of(path: &Path) -> Result<RootCertStore, SetupError> {
    let mut roots = RootCertStore::empty();
    for root in certificates("tls_ca", path)? {
        roots.add(root).map_err(|why| certificate("tls_ca", path, &why.to_string()))?;
    }
    Ok(roots)
}

fn roots_of_system() -> Result<RootCertStore, SetupError> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    // Certificates that cannot be parsed are skipped.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err(SetupError::Tls("the system has no trusted certificates; set tls_ca=FILE".into()));
    }
    Ok(roots)
}

pub struct TlsStream(ClientConnection);

impl TlsStream {
    pub fn begin(settings: &TlsSettings) -> Result<Self, LinkError> {
        let connection = ClientConnection::new(Arc::clone(&settings.config), settings.server.clone());
        let mut connection = connection.map_err(|error| LinkError::Tls(error.to_string()))?;
        connection.set_buffer_limit(Some(UNSENT_MAX_BYTES));
        Ok(Self(connection))
    }

    /// Performs the TLS handshake.
    ///
    /// # Errors
    /// The server's certificate is not valid, or the deadline has passed.
    pub fn handshake(&mut self, socket: BorrowedFd<'_>, deadline: Deadline<'_>) -> Result<(), LinkError> {
        while self.0.is_handshaking() || self.0.wants_write() {
            if self.0.wants_write() {
                if !self.flush(socket)? {
                    deadline.wait(socket, PollFlags::OUT)?;
                }
                continue;
            }
            match self.0.read_tls(&mut RawSocket(socket)) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(_) => {
                    if let Err(error) = self.0.process_new_packets() {
                        // Sends the TLS alert without waiting.
                        let _ = self.flush(socket);
                        return Err(LinkError::Tls(error.to_string()));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    deadline.wait(socket, PollFlags::IN)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends encrypted data. Returns true if all of it was sent.
    fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while self.0.wants_write() {
            match self.0.write_tls(&mut RawSocket(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// See [`Link::recv`](crate::link::Link::recv).
    pub fn recv(&mut self, socket: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match self.0.reader().read(buf) {
                Ok(n) => return Ok(Some(n)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            match self.0.read_tls(&mut RawSocket(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
            self.0.process_new_packets().map_err(|error| io::Error::other(format!("TLS: {error}")))?;
        }
    }

    /// See [`Link::send`](crate::link::Link::send).
    pub fn send(&mut self, socket: BorrowedFd<'_>, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut taken = 0;
        for part in parts {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let n = self.0.writer().write(rest)?;
                if n == 0 && !self.flush(socket)? {
                    return Ok(taken);
                }
                (rest, taken) = (&rest[n..], taken + n);
            }
        }
        self.flush(socket)?;
        Ok(taken)
    }

    /// See [`Link::has_unsent`](crate::link::Link::has_unsent).
    pub fn has_unsent(&self) -> bool {
        self.0.wants_write()
    }
}

struct RawSocket<'a>(BorrowedFd<'a>);

impl Read for RawSocket<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        receive(self.0, buf)?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }
}

impl Write for RawSocket<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match send(self.0, &[IoSlice::new(buf)])? {
            0 if !buf.is_empty() => Err(io::ErrorKind::WouldBlock.into()),
            n => Ok(n),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
