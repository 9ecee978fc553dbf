//! Independent implementation of the object names and keys of the store format.

use freestone::store::format::domain::{Domain, DomainDescription, Secret};
use serde_json::json;

pub const CHUNK: u8 = 1;
pub const UNIT: u8 = 2;
pub const MAP: u8 = 4;
pub const MANIFEST: u8 = 6;
pub const TRACE: u8 = 7;
const TAG: u8 = 8;
const CHECK: u8 = 9;

/// Content of the key file of a keyed domain.
const SECRET: [u8; 32] = [0x5a; 32];
const ID: &str = "6b1d4c5e-92c7-4c39-9d3a-5f0b7f2a8e11";

/// Version of the store format.
pub const FORMAT: u64 = 2;

pub type Hash = [u8; 32];

/// Key of the keyed hashes that are the object names of a domain.
pub struct Keys(Hash);

impl Keys {
    /// Derives the key from the salt in `freestone.json`, and from the content of the key file if there is
    /// one.
    pub fn new(salt: &Hash, secret: Option<&Hash>) -> Self {
        let root = match secret {
            None => blake3::derive_key("freestone 2026 object storage: key of an open domain", salt),
            Some(secret) => {
                let parts = [*salt, *secret].concat();
                blake3::derive_key("freestone 2026 object storage: key of a domain with a key file", &parts)
            }
        };
        Self(blake3::derive_key("freestone 2026 object storage: names", &root))
    }

    pub fn name(&self, kind: u8, parts: &[&[u8]]) -> Hash {
        let of_kind = blake3::keyed_hash(&self.0, &[kind]);
        *blake3::keyed_hash(of_kind.as_bytes(), &parts.concat()).as_bytes()
    }

    /// Returns the correct value of the `check` field of `freestone.json`.
    pub fn check(&self, numbers: [u64; 4], id: &[u8], salt: &str) -> String {
        let numbers = numbers.map(u64::to_le_bytes);
        hex(&self.name(CHECK, &[id, numbers.as_flattened(), salt.as_bytes()]))
    }

    /// Returns the correct value of the `seal` field of a tag.
    pub fn seal(&self, numbers: [u64; 3], manifest: &Hash, push: &[u8], name: &str) -> String {
        let numbers = numbers.map(u64::to_le_bytes);
        hex(&self.name(TAG, &[numbers.as_flattened(), manifest, push, name.as_bytes()]))
    }
}

pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Parses 64 hexadecimal digits. Returns None for any other text.
pub fn unhex(text: &str) -> Option<Hash> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
    let digits = digits.filter(|digits| digits.len() == 64)?;
    let bytes: Vec<u8> = digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect();
    bytes.try_into().ok()
}

/// A fixed domain, either without a key or with a key and encryption. The domain is the same in each run.
pub struct FixedDomain {
    pub keys: Keys,
    pub domain: Domain,
    pub description: Vec<u8>,
}

impl FixedDomain {
    pub fn new(keyed: bool) -> Self {
        let salt = [if keyed { 0x17 } else { 0x71 }; 32];
        let keys = Keys::new(&salt, keyed.then_some(&SECRET));
        let (numbers, salt) = ([FORMAT, 86400, u64::from(keyed), u64::from(keyed)], hex(&salt));
        let id = uuid::Uuid::parse_str(ID).expect("an identifier");
        let description = json!({
            "format": FORMAT,
            "id": ID,
            "grace_seconds": 86400,
            "salt": salt,
            "key": if keyed { "file" } else { "store" },
            "encryption": if keyed { "aes-256-gcm" } else { "none" },
            "check": keys.check(numbers, id.as_bytes(), &salt),
        });
        let description = description.to_string().into_bytes();
        let written = DomainDescription::parse(&description).expect("a description");
        let domain = written.open(keyed.then(secret).as_ref()).expect("it fits its key");
        Self { keys, domain, description }
    }
}

/// Returns the secret from the key file of the keyed domain.
pub fn secret() -> Secret {
    Secret::parse(&hex(&SECRET)).expect("64 digits")
}
