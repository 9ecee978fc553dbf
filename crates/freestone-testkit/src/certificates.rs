//! Certificates for TLS, made on the spot.

use std::fs;
use std::path::PathBuf;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

/// Whom a certificate is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// A server.
    Server,
    /// A client.
    Client,
    /// A client, and it was valid once.
    ClientOnce,
}

/// Somebody whom others trust, and what was signed: files in a directory, with the names for which
/// qemu and nbdkit look.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// With `ca-cert.pem` in this directory, which is made.
    pub fn new(dir: PathBuf) -> Self {
        fs::create_dir(&dir).unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, "authority");
        let key = KeyPair::generate().unwrap();
        fs::write(dir.join("ca-cert.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { dir, issuer: Issuer::new(params, key) }
    }

    /// Writes `FILE-cert.pem` and `FILE-key.pem`, for the common name `FILE` and this host.
    pub fn sign(&self, file: &str, host: &str, usage: Usage) {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, file);
        params.extended_key_usages = vec![match usage {
            Usage::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Usage::Client | Usage::ClientOnce => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        if usage == Usage::ClientOnce {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.file(&format!("{file}-cert.pem")), cert.pem()).unwrap();
        fs::write(self.file(&format!("{file}-key.pem")), key.serialize_pem()).unwrap();
    }

    /// Where all of them are.
    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    /// The path of one.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}
