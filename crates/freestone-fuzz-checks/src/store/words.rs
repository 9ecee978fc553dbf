//! JSON objects with a keyed hash of their fields (seal): `freestone.json` and tags.
//!
//! The input is the text. Option 1 corrects the seal, if the fields that it covers exist, and normalises the
//! text. With option 2 a tag refers to the reference image, and the check pushes to the tag again. With
//! option 4 the tag is read under another name.

use std::ops::RangeInclusive;

use freestone::store::format::domain::{BYTES_MAX, DomainDescription};
use freestone::store::format::tag::{self, Tag};
use freestone::store::objects::{Objects as _, WriteCondition};
use freestone::store::store::Store;
use serde_json::Value;
use uuid::Uuid;

use super::keys::{FORMAT, FixedDomain, Hash, Keys, hex, secret, unhex};
use super::reference::{Reference, device, memory, push, soon};

/// Allowed grace period: an hour to a week.
const GRACE_SECONDS: RangeInclusive<u64> = 3600..=7 * 24 * 3600;

pub fn number(value: &Value, key: &str) -> Option<u64> {
    value.get(key)?.as_u64()
}

pub fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key)?.as_str()
}

pub fn name(value: &Value, key: &str) -> Option<Hash> {
    unhex(text(value, key)?)
}

/// Parses a UUID. Returns None unless the UUID has its canonical form.
fn id(value: &Value, key: &str) -> Option<Uuid> {
    let text = text(value, key)?;
    Uuid::parse_str(text).ok().filter(|id| id.to_string() == text.to_ascii_lowercase())
}

/// Returns true if the value has a valid form that the reference parser does not support.
fn is_odd(value: &Value, ids: &[&str], words: &[&str]) -> bool {
    ids.iter().any(|key| {
        text(value, key).is_some_and(|text| Uuid::parse_str(text).is_ok()) && id(value, key).is_none()
    }) || words.iter().any(|key| value.get(key).is_some_and(Value::is_object))
}

// ---- freestone.json -----------------------------------------------------------------------------

struct Description {
    numbers: [u64; 4],
    id: Uuid,
    salt: Hash,
}

fn reference_description(value: &Value) -> Option<Description> {
    let format = number(value, "format").filter(|format| *format == FORMAT)?;
    let grace = number(value, "grace_seconds").filter(|grace| GRACE_SECONDS.contains(grace))?;
    let keyed = ["store", "file"].iter().position(|key| text(value, "key") == Some(key))?;
    let encrypted = ["none", "aes-256-gcm"].iter().position(|key| text(value, "encryption") == Some(key))?;
    Some(Description {
        numbers: [format, grace, keyed as u64, encrypted as u64],
        id: id(value, "id")?,
        salt: name(value, "salt")?,
    })
}

impl Description {
    fn check(&self, value: &Value) -> String {
        let salt = text(value, "salt").unwrap_or_default();
        Keys::new(&self.salt, None).check(self.numbers, self.id.as_bytes(), salt)
    }
}

/// Checks a `freestone.json`. Returns true if the store was opened.
pub fn description(options: u8, input: &[u8]) -> bool {
    let mut input = input.to_vec();
    let mut value: Option<Value> = serde_json::from_slice(&input).ok();
    if options & 1 != 0
        && let Some(value) = &mut value
    {
        if let Some(described) = reference_description(value) {
            value["check"] = described.check(value).into();
        }
        // The normalised text contains each key once.
        input = value.to_string().into_bytes();
    }
    let written = DomainDescription::parse(&input);
    if let Ok(written) = &written {
        assert_eq!(DomainDescription::parse(&written.bytes()).as_ref(), Ok(written));
        let keyed = FixedDomain::new(true);
        if written.open(Some(&secret())).is_ok() {
            let own = DomainDescription::parse(&keyed.description);
            assert_eq!(own.as_ref(), Ok(written), "it cannot be created without the key file");
        }
    }
    let opened = written.ok().and_then(|written| written.open(None).ok());
    if options & 1 != 0
        && let Some(value) = value.filter(|value| !is_odd(value, &["id"], &["key", "encryption"]))
    {
        let described = reference_description(&value).filter(|described| {
            described.numbers[2] == 0 && text(&value, "check") == Some(&described.check(&value))
        });
        assert_eq!(opened.is_some(), described.is_some(), "{value}");
        if let (Some(opened), Some(described)) = (&opened, described) {
            let name = opened.naming.name(freestone::store::format::name::Kind::Page, &[b"a page"]);
            assert_eq!(name.0, Keys::new(&described.salt, None).name(3, &[b"a page"]));
            assert_eq!(opened.grace.as_secs(), described.numbers[1]);
            assert_eq!((opened.sealing.is_some(), opened.keyed), (described.numbers[3] == 1, false));
        }
    }
    let objects = memory(&[]);
    objects.put("freestone.json", &input, WriteCondition::Always, soon()).expect("memory");
    let store = Store::open(objects, None, soon());
    assert_eq!(store.is_ok(), opened.is_some() && input.len() as u64 <= BYTES_MAX);
    store.is_ok()
}

// ---- tags ---------------------------------------------------------------------------------------

const NAME: &str = "v1";

/// Returns the correct seal of a tag, or None if a sealed field is missing or invalid.
fn seal(keys: &Keys, value: &Value) -> Option<String> {
    let format = number(value, "format").filter(|format| *format == FORMAT)?;
    let numbers = [format, number(value, "generation")?, number(value, "pushed")?];
    Some(keys.seal(numbers, &name(value, "manifest")?, id(value, "push")?.as_bytes(), NAME))
}

/// Checks a tag. Returns true if the tag was accepted.
pub fn tag(reference: &Reference, options: u8, input: &[u8]) -> bool {
    let FixedDomain { keys, domain, .. } = &reference.domain;
    let mut input = input.to_vec();
    let mut value: Option<Value> = serde_json::from_slice(&input).ok();
    if options & 3 != 0
        && let Some(value) = &mut value
    {
        if options & 2 != 0 && value.is_object() {
            value["manifest"] = hex(&reference.image.0).into();
        }
        if let Some(seal) = seal(keys, value) {
            value["seal"] = seal.into();
        }
        input = value.to_string().into_bytes();
    }
    let called = if options & 4 != 0 { "v2" } else { NAME };
    let read = Tag::parse(domain, called, &input);
    if options & 3 != 0
        && let Some(value) = value.filter(|value| !is_odd(value, &["push"], &[]))
    {
        let expected = called == NAME
            && seal(keys, &value).is_some_and(|seal| {
                text(&value, "seal").is_some_and(|text| text.to_ascii_lowercase() == seal)
            });
        assert_eq!(read.is_ok(), expected, "{value}: {read:?}");
    }
    if let Ok(tag) = &read {
        assert_eq!(Tag::parse(domain, called, &tag.bytes()).as_ref(), Ok(tag));
    }
    let objects = memory(&reference.objects);
    objects.put(&format!("tags/{called}"), &input, WriteCondition::Always, soon()).expect("memory");
    let store = Store::open(objects, None, soon()).expect("a store");
    let from_store = store.tag(called, soon());
    assert_eq!(from_store.is_ok(), read.is_ok() && input.len() as u64 <= tag::BYTES_MAX);
    let Ok(Some(before)) = from_store else { return false };
    assert_eq!(Ok(&before.tag), read.as_ref());
    if before.tag.manifest == reference.image {
        // Push a device with other content, so the tag must be set again.
        let pushed = push(&store, &device(3), called);
        match before.tag.generation.checked_add(1) {
            Some(next) => {
                assert_eq!(pushed.expect("the push succeeds").generation, next);
                let after = store.tag(called, soon()).expect("it is there").expect("it is there");
                assert_eq!(after.tag.generation, next);
            }
            None => assert!(pushed.is_err(), "the generation would overflow"),
        }
    }
    true
}
