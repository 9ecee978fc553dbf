//! TLS settings: the server's certificate and the authorities that it trusts, loaded from files.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone_core::sync::Mutex;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use thiserror::Error;

/// Which clients must use TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsMode {
    /// TLS is optional, except for exports that require it.
    Optional,
    /// TLS is required for all clients.
    Required,
}

/// TLS files in PEM format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, followed by intermediate certificates.
    pub cert: PathBuf,
    /// The server's private key.
    pub key: PathBuf,
    /// Authorities that sign client certificates. `None`: clients need no certificate.
    pub client_ca: Option<PathBuf>,
    /// Revocation lists of the client authorities. `None`: revocation is not checked.
    pub client_crl: Option<PathBuf>,
}

/// Errors from loading TLS files. `key` is the name of the option in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{key}={}: {why}", .path.display())]
pub struct TlsError {
    /// `tls_cert`, `tls_key`, `tls_client_ca` or `tls_client_crl`.
    pub key: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The reason, without a capital letter and a period.
    pub why: String,
}

/// The loaded certificates and keys.
#[derive(Clone)]
pub struct Credentials {
    config: Arc<ServerConfig>,
    verifies: bool,
}

impl Credentials {
    /// Loads the certificates and keys from `files`.
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let chain = certificates("tls_cert", &files.cert)?;
        let key = PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|why| file_error("tls_key", &files.key, &why.to_string()))?;
        let of_cert =
            |why: rustls::Error| file_error("tls_cert", &files.cert, &format!("with tls_key: {why}"));
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(of_cert)?;
        let builder = match &files.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for root in certificates("tls_client_ca", path)? {
                    roots.add(root).map_err(|why| file_error("tls_client_ca", path, &why.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let (verifier, key, path) = match &files.client_crl {
                    None => (verifier, "tls_client_ca", path),
                    Some(lists) => {
                        let verifier = verifier.with_crls(revocation_lists("tls_client_crl", lists)?);
                        (verifier.enforce_revocation_expiration(), "tls_client_crl", lists)
                    }
                };
                let verifier = verifier.build().map_err(|why| file_error(key, path, &why.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(of_cert)?;
        // `Sealer` and `Opener` process the records, and need the secrets.
        config.enable_secret_extraction = true;
        // Session resumption is disabled: a certificate may have been revoked since the first
        // session.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), verifies: files.client_ca.is_some() })
    }

    /// Returns the configuration for a new connection.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("verifies", &self.verifies).finish_non_exhaustive()
    }
}

/// The TLS settings of a server.
#[derive(Debug)]
pub struct Policy {
    /// Which clients must use TLS.
    pub mode: TlsMode,
    /// Locked only to read or replace the value.
    credentials: Mutex<Credentials>,
}

impl Policy {
    /// Creates the settings with the first credentials.
    pub fn new(mode: TlsMode, credentials: Credentials) -> Self {
        Self { mode, credentials: Mutex::new(credentials) }
    }

    /// Replaces the credentials for new connections.
    pub fn renew_credentials(&self, credentials: Credentials) {
        *self.credentials.lock() = credentials;
    }

    pub fn config(&self) -> Arc<ServerConfig> {
        self.credentials.lock().config()
    }
}

fn file_error(key: &'static str, path: &Path, why: &str) -> TlsError {
    TlsError { key, path: path.to_owned(), why: why.to_owned() }
}

fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    non_empty(key, path, all, "contains no certificate")
}

fn revocation_lists(
    key: &'static str,
    path: &Path,
) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    let all = CertificateRevocationListDer::pem_file_iter(path).and_then(Iterator::collect);
    non_empty(key, path, all, "contains no certificate revocation list")
}

/// Returns the entries of a file, or an error if there are none.
fn non_empty<T>(
    key: &'static str,
    path: &Path,
    all: Result<Vec<T>, pem::Error>,
    none: &str,
) -> Result<Vec<T>, TlsError> {
    let all = all.map_err(|why| file_error(key, path, &why.to_string()))?;
    if all.is_empty() { Err(file_error(key, path, none)) } else { Ok(all) }
}
