//! A domain: a store with one key for its names, and for its content where that is encrypted. What is
//! the same in two images of a domain is stored once; nothing is shared with other domains.
//!
//! `freestone.json` describes it. In an open domain the key follows from what is written there: who may
//! read the store knows it. With a key file it does not, so whoever holds the store can neither tell
//! whether some content is in it nor make a tag, and, where it is encrypted, sees lengths and times only.

use crate::rt::time::Duration;
use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::name::{Kind, Name, Naming, hex};
use super::seal::Sealing;
use super::{Unread, VERSION, read};

/// The object that describes it.
pub const KEY: &str = "freestone.json";
/// Most bytes of that.
pub const BYTES_MAX: u64 = 4096;
/// How long what nobody refers to is kept, where nothing else was said.
pub const GRACE: Duration = Duration::from_secs(24 * 3600);
/// The shortest such time, and the longest.
pub const GRACE_RANGE: (Duration, Duration) = (Duration::from_secs(3600), Duration::from_secs(7 * 24 * 3600));

const OPEN: &str = "freestone 2026 object storage: key of an open domain";
const KEYED: &str = "freestone 2026 object storage: key of a domain with a key file";
const NAMES: &str = "freestone 2026 object storage: names";
const CONTENT: &str = "freestone 2026 object storage: encryption";

/// What a key file holds.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// From the text of a key file: 64 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        hex(text.trim()).map(Self)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// What `freestone.json` holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
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

/// A domain with its keys.
#[derive(Clone)]
pub struct Domain {
    /// By which it is told from others.
    pub id: Uuid,
    /// What nobody refers to may be deleted when it is older.
    pub grace: Duration,
    /// For names.
    pub naming: Naming,
    /// For content.
    pub sealing: Option<Sealing>,
    /// A key file is needed, so tags can be told from forged ones.
    pub keyed: bool,
}

/// Why a store cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It needs a key.
    #[error("its names are keyed: say key=FILE")]
    KeyNeeded,
    /// Another one.
    #[error("the key file is not the one that it was made with, or its freestone.json was changed")]
    KeyWrong,
    /// It has none.
    #[error("it was made without a key file; leave key out, or begin another store")]
    KeyUnused,
    /// Asked for in a store that was begun without.
    #[error("it was made without encryption; begin another store for that")]
    NotEncrypted,
    /// Of another version than this program's.
    #[error("it has format {0}, and this program knows format {VERSION}")]
    Other(u32),
    /// No description of a store.
    #[error("its {KEY} is damaged: {0}")]
    Damaged(String),
}

impl Domain {
    /// A new one, and what is to be written. Without a secret it is open, and not encrypted.
    pub fn new(secret: Option<&Secret>, encrypted: bool, grace: Duration) -> (Self, Written) {
        let mut salt = [0; 32];
        for (half, id) in salt.chunks_mut(16).zip([crate::rt::unique_id(), crate::rt::unique_id()]) {
            half.copy_from_slice(id.as_bytes());
        }
        let encrypted = encrypted && secret.is_some();
        let mut written = Written {
            format: VERSION,
            id: crate::rt::unique_id(),
            grace_seconds: grace.as_secs(),
            salt: Name(salt).to_string(),
            key: if secret.is_some() { KeyIn::File } else { KeyIn::Store },
            encryption: if encrypted { Encryption::Aes256Gcm } else { Encryption::Not },
            check: String::new(),
        };
        let domain = written.domain(&salt, secret);
        written.check = written.checked(&domain);
        (domain, written)
    }
}

impl Written {
    /// From the bytes of the object.
    pub fn parse(bytes: &[u8]) -> Result<Self, Refused> {
        read(bytes).map_err(|why| match why {
            Unread::Other(format) => Refused::Other(format),
            Unread::Wrong(why) => Refused::Damaged(why),
        })
    }

    /// As it is written.
    pub fn bytes(&self) -> Vec<u8> {
        // Its values are numbers and text.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text.into_bytes()
    }

    /// The domain, with its keys.
    pub fn open(&self, secret: Option<&Secret>) -> Result<Domain, Refused> {
        let salt = hex(&self.salt).ok_or_else(|| Refused::Damaged("salt: 64 hexadecimal digits".into()))?;
        match (self.key, secret) {
            (KeyIn::File, None) => return Err(Refused::KeyNeeded),
            (KeyIn::Store, Some(_)) => return Err(Refused::KeyUnused),
            _ => {}
        }
        let grace = Duration::from_secs(self.grace_seconds);
        if grace < GRACE_RANGE.0 || grace > GRACE_RANGE.1 {
            return Err(Refused::Damaged("grace_seconds: from 3600 (an hour) to 604800 (a week)".into()));
        }
        let domain = self.domain(&salt, secret);
        if self.checked(&domain) != self.check {
            return Err(match secret {
                Some(_) => Refused::KeyWrong,
                None => Refused::Damaged("check does not fit salt".into()),
            });
        }
        Ok(domain)
    }

    /// Of all that is written, with the key: who has it not can change none of it, the encryption least.
    fn checked(&self, domain: &Domain) -> String {
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
    fn an_open_domain_is_opened_by_what_is_written() {
        let (domain, written) = Domain::new(None, true, GRACE);
        assert!(domain.sealing.is_none() && !domain.keyed);
        let read = Written::parse(&written.bytes()).unwrap();
        assert_eq!(read, written);
        let again = read.open(None).unwrap();
        let name = |domain: &Domain| domain.naming.name(Kind::Page, &[b"x"]);
        assert_eq!(name(&again), name(&domain));
        assert_eq!(read.open(Some(&secret("a"))).err(), Some(Refused::KeyUnused));
        assert_ne!(name(&Domain::new(None, false, GRACE).0), name(&domain));
    }

    #[test]
    fn a_keyed_domain_wants_its_key() {
        let (domain, written) = Domain::new(Some(&secret("a")), true, GRACE);
        assert!(domain.sealing.is_some() && domain.keyed);
        assert!(written.open(Some(&secret("a"))).unwrap().sealing.is_some());
        assert_eq!(written.open(None).err(), Some(Refused::KeyNeeded));
        assert_eq!(written.open(Some(&secret("b"))).err(), Some(Refused::KeyWrong));
        let text = String::from_utf8(written.bytes()).unwrap();
        assert!(!text.contains(&"a".repeat(20)), "{text}");
        // Nobody takes the encryption away, or the time that things are kept.
        for (from, to) in [("aes-256-gcm", "none"), ("\"grace_seconds\": 86400", "\"grace_seconds\": 3600")] {
            let changed = text.replace(from, to);
            assert_ne!(changed, text);
            let refused = Written::parse(changed.as_bytes()).unwrap().open(Some(&secret("a"))).err();
            assert_eq!(refused, Some(Refused::KeyWrong), "{to}");
        }
        assert_eq!(format!("{:?}", secret("a")), "Secret");
        assert_eq!(Secret::parse("abc"), None);
    }

    #[test]
    fn what_is_no_description_is_refused() {
        let (_, written) = Domain::new(None, false, GRACE);
        let text = String::from_utf8(written.bytes()).unwrap();
        for other in [1, 3] {
            let text = text.replace("\"format\": 2", &format!("\"format\": {other}"));
            assert_eq!(Written::parse(text.as_bytes()), Err(Refused::Other(other)));
        }
        for (from, to) in
            [("\"salt\": \"", "\"salt\": \"0"), ("\"grace_seconds\": ", "\"grace_seconds\": 99999")]
        {
            let text = text.replace(from, to);
            let refused = Written::parse(text.as_bytes()).unwrap().open(None).err();
            assert!(matches!(refused, Some(Refused::Damaged(_))), "{text}");
        }
        for seconds in [0, 3599, 604_801] {
            let (_, written) = Domain::new(None, false, Duration::from_secs(seconds));
            assert!(matches!(written.open(None), Err(Refused::Damaged(_))), "{seconds}");
        }
        for cut in 0..text.trim_end().len() {
            assert!(Written::parse(&text.as_bytes()[..cut]).is_err(), "{cut}");
        }
    }
}
