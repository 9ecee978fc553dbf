//! What a server shows of itself and whom it trusts, out of files.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use thiserror::Error;

/// Whom TLS is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsMode {
    /// Who asks for it, and who wants an export that needs it.
    On,
    /// Everybody.
    Require,
}

/// Files in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate of the server, first, and those between it and the authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authorities, one of which has to stand behind a client's certificate; none: clients need
    /// none.
    pub client_ca: Option<PathBuf>,
    /// Lists of certificates that those have revoked; none: nothing is asked for.
    pub client_crl: Option<PathBuf>,
}

/// Why files cannot be used. The key is the option's, as a file has it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{key}={}: {why}", .path.display())]
pub struct TlsError {
    /// `tls_cert`, `tls_key`, `tls_client_ca` or `tls_client_crl`.
    pub key: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Half a sentence.
    pub why: String,
}

/// What was in the files.
#[derive(Clone)]
pub struct Credentials {
    config: Arc<ServerConfig>,
    verifies: bool,
}

impl Credentials {
    /// Reads the files.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let chain = certificates("tls_cert", &files.cert)?;
        let key = PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|why| wrong("tls_key", &files.key, &why.to_string()))?;
        let of_cert = |why: rustls::Error| wrong("tls_cert", &files.cert, &format!("with tls_key: {why}"));
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(of_cert)?;
        let builder = match &files.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for root in certificates("tls_client_ca", path)? {
                    roots.add(root).map_err(|why| wrong("tls_client_ca", path, &why.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let (verifier, key, path) = match &files.client_crl {
                    None => (verifier, "tls_client_ca", path),
                    Some(lists) => {
                        let verifier = verifier.with_crls(revoked("tls_client_crl", lists)?);
                        (verifier.enforce_revocation_expiration(), "tls_client_crl", lists)
                    }
                };
                let verifier = verifier.build().map_err(|why| wrong(key, path, &why.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(of_cert)?;
        // The records are ours.
        config.enable_secret_extraction = true;
        // Who was trusted once is not for that trusted again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), verifies: files.client_ca.is_some() })
    }

    /// For a connection.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("verifies", &self.verifies).finish_non_exhaustive()
    }
}

/// The TLS of a server.
#[derive(Debug)]
pub struct Policy {
    /// Whom it is for.
    pub mode: TlsMode,
    /// Locked to read or replace the value only.
    credentials: Mutex<Credentials>,
}

impl Policy {
    /// With these to begin with.
    pub fn new(mode: TlsMode, credentials: Credentials) -> Self {
        Self { mode, credentials: Mutex::new(credentials) }
    }

    /// What connections are shown from now on.
    pub fn renew(&self, credentials: Credentials) {
        *self.credentials.lock().unwrap_or_else(PoisonError::into_inner) = credentials;
    }

    /// What a connection is shown.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.credentials.lock().unwrap_or_else(PoisonError::into_inner).config()
    }
}

fn wrong(key: &'static str, path: &Path, why: &str) -> TlsError {
    TlsError { key, path: path.to_owned(), why: why.to_owned() }
}

fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    some(key, path, all, "has no certificate in it")
}

fn revoked(key: &'static str, path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    let all = CertificateRevocationListDer::pem_file_iter(path).and_then(Iterator::collect);
    some(key, path, all, "has no list of revoked certificates in it")
}

/// What a file has, unless that is nothing.
fn some<T>(
    key: &'static str,
    path: &Path,
    all: Result<Vec<T>, pem::Error>,
    none: &str,
) -> Result<Vec<T>, TlsError> {
    let all = all.map_err(|why| wrong(key, path, &why.to_string()))?;
    if all.is_empty() { Err(wrong(key, path, none)) } else { Ok(all) }
}
