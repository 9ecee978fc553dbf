//! Domains. A domain is an image store with one key for the names of its objects. An encrypted store has a
//! second key for their content. Equal content of two images is stored once within a domain, and never shared
//! with other domains.
//!
//! `freestone.json` describes the domain. In an open domain the key derives from that file, so all readers of
//! the store know the key. With a key file, whoever controls the store does not know the key, and can neither
//! test for known content nor forge a tag. If the store is encrypted as well, only lengths and times of
//! objects are visible.

use crate::rt::time::Duration;
use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::name::{Kind, Name, Naming, hex};
use super::seal::Sealing;
use super::{JsonError, VERSION, read};

/// Path (object key) of the object that describes the domain.
pub const KEY: &str = "freestone.json";
/// Maximum size of `freestone.json` in bytes.
pub const BYTES_MAX: u64 = 4096;
/// Default grace period: the minimum age at which a prune deletes an unused object.
pub const GRACE: Duration = Duration::from_secs(24 * 3600);
/// Shortest and longest allowed grace period: one hour and one week.
pub const GRACE_RANGE: (Duration, Duration) = (Duration::from_secs(3600), Duration::from_secs(7 * 24 * 3600));

const OPEN: &str = "freestone 2026 object storage: key of an open domain";
const KEYED: &str = "freestone 2026 object storage: key of a domain with a key file";
const NAMES: &str = "freestone 2026 object storage: names";
const CONTENT: &str = "freestone 2026 object storage: encryption";

/// Secret key from a key file.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Parses the text of a key file: 64 hexadecimal digits. Returns `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        hex(text.trim()).map(Self)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Content of `freestone.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainDescription {
    format: u32,
    id: Uuid,
    grace_seconds: u64,
    salt: String,
    key: KeyIn,
    encryption: Encryption,
    check: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum KeyIn {
    Store,
    File,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Encryption {
    #[serde(rename = "none")]
    Not,
    #[serde(rename = "aes-256-gcm")]
    Aes256Gcm,
}

/// An open domain with its keys.
#[derive(Clone)]
pub struct Domain {
    /// Random ID of the domain, which never changes.
    pub id: Uuid,
    /// Grace period: minimum age at which a prune deletes an unused object.
    pub grace: Duration,
    /// Keys of the keyed hashes that are the names of objects.
    pub naming: Naming,
    /// Key that encrypts objects; `None` if the domain is not encrypted.
    pub sealing: Option<Sealing>,
    /// True if the domain has a key file, so forged tags are detected.
    pub keyed: bool,
}

/// Reason why a domain cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    /// The store was created with a key file, but none was given.
    #[error("its names are keyed: say key=FILE")]
    KeyNeeded,
    /// The key file belongs to another store, or `freestone.json` was changed.
    #[error("the key file is not the one that it was made with, or its freestone.json was changed")]
    KeyWrong,
    /// A key file was given, but the store was created without one.
    #[error("it was made without a key file; leave key out, or begin another store")]
    KeyUnused,
    /// Encryption was requested for a store that was created without encryption.
    #[error("it was made without encryption; begin another store for that")]
    NotEncrypted,
    /// The store has this format version, which this program does not support.
    #[error("it has format {0}, and this program knows format {VERSION}")]
    Other(u32),
    /// `freestone.json` is damaged. The text is the reason.
    #[error("its {KEY} is damaged: {0}")]
    Damaged(String),
}

impl Domain {
    /// Creates a domain and its description. Without a secret the domain is open and not encrypted, even if
    /// `encrypted` is set.
    pub fn new(secret: Option<&Secret>, encrypted: bool, grace: Duration) -> (Self, DomainDescription) {
        let mut salt = [0; 32];
        for (half, id) in salt.chunks_mut(16).zip([crate::rt::unique_id(), crate::rt::unique_id()]) {
            half.copy_from_slice(id.as_bytes());
        }
        let encrypted = encrypted && secret.is_some();
        let mut written = DomainDescription {
            format: VERSION,
            id: crate::rt::unique_id(),
            grace_seconds: grace.as_secs(),
            salt: Name(salt).to_string(),
            key: if secret.is_some() { KeyIn::File } else { KeyIn::Store },
            encryption: if encrypted { Encryption::Aes256Gcm } else { Encryption::Not },
            check: String::new(),
        };
        let domain = written.domain(&salt, secret);
        written.check = written.compute_check(&domain);
        (domain, written)
    }
}

impl DomainDescription {
    /// Parses the content of `freestone.json`, without a check of its keyed hash.
    pub fn parse(bytes: &[u8]) -> Result<Self, DomainError> {
        read(bytes).map_err(|why| match why {
            JsonError::Other(format) => DomainError::Other(format),
            JsonError::Wrong(why) => DomainError::Damaged(why),
        })
    }

    /// Encodes the content of `freestone.json`.
    pub fn bytes(&self) -> Vec<u8> {
        // Serialization cannot fail, as all values are numbers and strings.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text.into_bytes()
    }

    /// Derives the keys of the domain from the salt and the secret, and verifies the keyed hash of the
    /// description.
    pub fn open(&self, secret: Option<&Secret>) -> Result<Domain, DomainError> {
        let salt =
            hex(&self.salt).ok_or_else(|| DomainError::Damaged("salt: 64 hexadecimal digits".into()))?;
        match (self.key, secret) {
            (KeyIn::File, None) => return Err(DomainError::KeyNeeded),
            (KeyIn::Store, Some(_)) => return Err(DomainError::KeyUnused),
            _ => {}
        }
        let grace = Duration::from_secs(self.grace_seconds);
        if grace < GRACE_RANGE.0 || grace > GRACE_RANGE.1 {
            return Err(DomainError::Damaged("grace_seconds: from 3600 (an hour) to 604800 (a week)".into()));
        }
        let domain = self.domain(&salt, secret);
        if self.compute_check(&domain) != self.check {
            return Err(match secret {
                Some(_) => DomainError::KeyWrong,
                None => DomainError::Damaged("check does not fit salt".into()),
            });
        }
        Ok(domain)
    }

    /// Computes a keyed hash of all fields except `check`. Without the key nobody can change these fields
    /// unnoticed, for example to turn off encryption.
    fn compute_check(&self, domain: &Domain) -> String {
        let Self { format, id, grace_seconds, salt, key, encryption, check: _ } = self;
        let (key, encryption) = (*key == KeyIn::File, *encryption == Encryption::Aes256Gcm);
        let numbers = [u64::from(*format), *grace_seconds, u64::from(key), u64::from(encryption)];
        let numbers = numbers.map(u64::to_le_bytes);
        let parts: [&[u8]; 3] = [id.as_bytes(), numbers.as_flattened(), salt.as_bytes()];
        domain.naming.name(Kind::Check, &parts).to_string()
    }

    fn domain(&self, salt: &[u8; 32], secret: Option<&Secret>) -> Domain {
        let root = match secret {
            None => blake3::derive_key(OPEN, salt),
            Some(Secret(secret)) => blake3::derive_key(KEYED, &[*salt, *secret].concat()),
        };
        let sealing = Sealing(blake3::derive_key(CONTENT, &root));
        Domain {
            id: self.id,
            grace: Duration::from_secs(self.grace_seconds),
            naming: Naming::new(&blake3::derive_key(NAMES, &root)),
            sealing: (self.encryption == Encryption::Aes256Gcm).then_some(sealing),
            keyed: secret.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(digit: &str) -> Secret {
        Secret::parse(&format!("{}\n", digit.repeat(64))).unwrap()
    }

    #[test]
    fn open_domain_needs_only_its_description() {
        let (domain, written) = Domain::new(None, true, GRACE);
        assert!(domain.sealing.is_none() && !domain.keyed);
        let read = DomainDescription::parse(&written.bytes()).unwrap();
        assert_eq!(read, written);
        let again = read.open(None).unwrap();
        let name = |domain: &Domain| domain.naming.name(Kind::Page, &[b"x"]);
        assert_eq!(name(&again), name(&domain));
        assert_eq!(read.open(Some(&secret("a"))).err(), Some(DomainError::KeyUnused));
        assert_ne!(name(&Domain::new(None, false, GRACE).0), name(&domain));
    }

    #[test]
    fn keyed_domain_requires_its_key() {
        let (domain, written) = Domain::new(Some(&secret("a")), true, GRACE);
        assert!(domain.sealing.is_some() && domain.keyed);
        assert!(written.open(Some(&secret("a"))).unwrap().sealing.is_some());
        assert_eq!(written.open(None).err(), Some(DomainError::KeyNeeded));
        assert_eq!(written.open(Some(&secret("b"))).err(), Some(DomainError::KeyWrong));
        let text = String::from_utf8(written.bytes()).unwrap();
        assert!(!text.contains(&"a".repeat(20)), "{text}");
        // Without the key nobody can turn off encryption or change the grace period.
        for (from, to) in [("aes-256-gcm", "none"), ("\"grace_seconds\": 86400", "\"grace_seconds\": 3600")] {
            let changed = text.replace(from, to);
            assert_ne!(changed, text);
            let refused =
                DomainDescription::parse(changed.as_bytes()).unwrap().open(Some(&secret("a"))).err();
            assert_eq!(refused, Some(DomainError::KeyWrong), "{to}");
        }
        assert_eq!(format!("{:?}", secret("a")), "Secret");
        assert_eq!(Secret::parse("abc"), None);
    }

    #[test]
    fn invalid_domain_description_is_refused() {
        let (_, written) = Domain::new(None, false, GRACE);
        let text = String::from_utf8(written.bytes()).unwrap();
        for other in [1, 3] {
            let text = text.replace("\"format\": 2", &format!("\"format\": {other}"));
            assert_eq!(DomainDescription::parse(text.as_bytes()), Err(DomainError::Other(other)));
        }
        for (from, to) in
            [("\"salt\": \"", "\"salt\": \"0"), ("\"grace_seconds\": ", "\"grace_seconds\": 99999")]
        {
            let text = text.replace(from, to);
            let refused = DomainDescription::parse(text.as_bytes()).unwrap().open(None).err();
            assert!(matches!(refused, Some(DomainError::Damaged(_))), "{text}");
        }
        for seconds in [0, 3599, 604_801] {
            let (_, written) = Domain::new(None, false, Duration::from_secs(seconds));
            assert!(matches!(written.open(None), Err(DomainError::Damaged(_))), "{seconds}");
        }
        for cut in 0..text.trim_end().len() {
            assert!(DomainDescription::parse(&text.as_bytes()[..cut]).is_err(), "{cut}");
        }
    }
}
