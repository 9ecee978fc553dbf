//! TLS certificates for tests, generated on demand.

use std::fs;
use std::path::PathBuf;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

/// Purpose of a certificate, which sets its extended key usage and validity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// A server authenticates itself.
    Server,
    /// A client authenticates itself.
    Client,
    /// A client authenticates itself, but the certificate has expired.
    ExpiredClient,
}

/// A certificate authority and the directory of its files, which have the names that qemu and
/// nbdkit expect.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Creates the directory, and an authority whose certificate is `ca-cert.pem` in that
    /// directory.
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

    /// Signs a certificate for the common name `file` and the host `host`. Writes `FILE-cert.pem`
    /// and `FILE-key.pem`, where FILE is `file`.
    pub fn sign(&self, file: &str, host: &str, usage: Usage) {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, file);
        params.extended_key_usages = vec![match usage {
            Usage::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Usage::Client | Usage::ExpiredClient => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.serial_number = Some(serial(file));
        if usage == Usage::ExpiredClient {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.file(&format!("{file}-cert.pem")), cert.pem()).unwrap();
        fs::write(self.file(&format!("{file}-key.pem")), key.serialize_pem()).unwrap();
    }

    /// Writes a revocation list to the file `name`. The list revokes the certificates of `files`.
    /// The list is valid until January 1 of the year `until`.
    pub fn revoke(&self, name: &str, files: &[&str], until: i32) {
        let revoked = |file: &&str| RevokedCertParams {
            serial_number: serial(file),
            revocation_time: date_time_ymd(2001, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2001, 1, 1),
            next_update: date_time_ymd(until, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: files.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        fs::write(self.file(name), list.signed_by(&self.issuer).unwrap().pem().unwrap()).unwrap();
    }

    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    /// Returns the path of the file `name` in the authority's directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

fn serial(file: &str) -> SerialNumber {
    SerialNumber::from_slice(file.as_bytes())
}
