//! Objects with a header and compressed parts: chunks, metadata objects, traces.
//!
//! The input is the object, or, for a trace with option 1, its content. Options: 1: correct the magic number and the
//! hashes, as far as the lengths allow; 2: use the encrypted domain, and with 1 encrypt the parts; 4: read it under
//! another name; 8 and 16: memory limit of a metadata object; 32: read it through a store.

use std::sync::Arc;
use std::time::Duration;

use freestone::store::format::chunk::{self, HEAD_BYTES_MAX, Head};
use freestone::store::format::meta;
use freestone::store::format::name::{Kind, Name};
use freestone::store::objects::{CallLimits, Objects as _, WriteCondition};
use freestone::store::store::Store;

use super::keys::{CHUNK, FixedDomain, Hash, Keys, MAP, TRACE, UNIT};
use super::reference::{memory, soon};

const HEADER: usize = 32;
const ENTRY: usize = 36;
const UNIT_BYTES: usize = 64 << 10;
const CHUNK_BYTES: usize = 512 << 10;

fn word(bytes: &[u8], at: usize) -> usize {
    bytes[at..at + 4].try_into().map_or(0, u32::from_le_bytes) as usize
}

/// Decompresses a part that is not encrypted. Returns None if the content does not have `len` bytes.
fn unpacked(stored: &[u8], len: usize) -> Option<Vec<u8>> {
    if stored.len() == len {
        return Some(stored.to_vec());
    }
    let mut content = vec![0; len];
    (zstd_safe::decompress(&mut content[..], stored) == Ok(len)).then_some(content)
}

/// Returns the object with the given parts encrypted.
fn seal(domain: &FixedDomain, name: Hash, object: &[u8], parts: &[std::ops::Range<usize>]) -> Vec<u8> {
    let sealing = domain.domain.sealing.as_ref().expect("it is encrypted");
    let key = sealing.key(&Name(name)).expect("a key");
    let nonce = object[16..28].try_into().expect("twelve bytes");
    let mut sealed = object[..parts.first().map_or(object.len(), |part| part.start)].to_vec();
    sealed[12] = 1;
    for (number, part) in (0..).zip(parts) {
        let mut bytes = object[part.clone()].to_vec();
        key.seal(nonce, number, &mut bytes).expect("it can be encrypted");
        sealed.extend(bytes);
    }
    sealed
}

// ---- chunks -------------------------------------------------------------------------------------

/// Returns the uncompressed length of a chunk and the byte ranges of its units according to its header, or
/// None if the header is invalid.
fn units(object: &[u8]) -> Option<(usize, Vec<std::ops::Range<usize>>)> {
    let len = Some(word(object, 8)).filter(|len| (4096..=CHUNK_BYTES).contains(len) && len % 4096 == 0)?;
    let count = len.div_ceil(UNIT_BYTES);
    let mut at = HEADER + count * ENTRY;
    object.get(..at)?;
    let units = (0..count).map(|number| {
        let start = at;
        at += word(object, HEADER + number * ENTRY);
        start..at
    });
    Some((len, units.collect()))
}

fn hashes(object: &[u8], count: usize) -> Vec<u8> {
    object[HEADER..HEADER + count * ENTRY].chunks(ENTRY).flat_map(|entry| &entry[4..]).copied().collect()
}

fn name(keys: &Keys, object: &[u8], count: usize) -> Hash {
    keys.name(CHUNK, &[&object[8..12], &hashes(object, count)])
}

/// Returns the pages of each unit, or None for a unit that does not match its hash.
fn pages(keys: &Keys, object: &[u8], len: usize, places: &[std::ops::Range<usize>]) -> Vec<Option<Vec<u8>>> {
    let hashes = hashes(object, places.len());
    let unit = |(number, place): (usize, &std::ops::Range<usize>)| {
        let want = UNIT_BYTES.min(len - number * UNIT_BYTES);
        let pages = unpacked(object.get(place.clone())?, want)?;
        (keys.name(UNIT, &[&pages]) == hashes[number * 32..number * 32 + 32]).then_some(pages)
    };
    places.iter().enumerate().map(unit).collect()
}

/// Checks a chunk object. Returns true if all its pages were accepted.
pub fn chunk(options: u8, input: &[u8]) -> bool {
    let mut object = input.to_vec();
    object.resize(object.len().max(HEADER), 0);
    let is_corrected = options & 1 != 0;
    let fixed = FixedDomain::new(options & 2 != 0);
    let keys = &fixed.keys;
    if is_corrected {
        object[..8].copy_from_slice(b"FSTCHUNK");
        object[12..16].fill(0);
        object[28..32].fill(0);
        if let Some((len, places)) = units(&object) {
            for (number, place) in places.iter().enumerate() {
                let want = UNIT_BYTES.min(len - number * UNIT_BYTES);
                if let Some(pages) = object.get(place.clone()).and_then(|stored| unpacked(stored, want)) {
                    let at = HEADER + number * ENTRY + 4;
                    object[at..at + 32].copy_from_slice(&keys.name(UNIT, &[&pages]));
                }
            }
        }
    }
    let found = units(&object);
    let mut object_name = found.as_ref().map_or([7; 32], |(_, places)| name(keys, &object, places.len()));
    let is_sound = object[..8] == *b"FSTCHUNK" && object[12..16] == [0; 4] && object[28..32] == [0; 4];
    let fits = |places: &[std::ops::Range<usize>]| {
        places.iter().all(|place| (1..=UNIT_BYTES).contains(&place.len()))
    };
    let found = found.filter(|(_, places)| is_sound && fits(places) && options & 4 == 0);
    // Expected content of each unit. The list is empty if the header must be refused.
    let mut expected: Vec<Option<Vec<u8>>> = Vec::new();
    let mut is_whole = false;
    let mut plain_places = Vec::new();
    if let Some((len, places)) = &found {
        expected = pages(keys, &object, *len, places);
        is_whole = places.last().is_some_and(|last| last.end == object.len());
        plain_places.clone_from(places);
    }
    if options & 2 != 0 {
        if is_corrected && is_whole {
            object = seal(&fixed, object_name, &object, &plain_places);
            for number in 0..plain_places.len() {
                let at = HEADER + number * ENTRY;
                let stored = (word(&object, at) + 16) as u32;
                object[at..at + 4].copy_from_slice(&stored.to_le_bytes());
            }
        } else {
            // An encrypted domain refuses parts that are not encrypted.
            expected.clear();
        }
    }
    if options & 4 != 0 {
        object_name[31] ^= 1;
    }
    let whole: Option<Vec<u8>> = expected.iter().cloned().collect::<Option<Vec<_>>>().map(|all| all.concat());
    let whole = whole.filter(|pages| is_whole && !pages.is_empty());
    let object_name = Name(object_name);
    assert_eq!(chunk::pages(&fixed.domain, &object_name, &object).ok(), whole);
    let head = Head::parse(&fixed.domain, &object_name, &object[..object.len().min(HEAD_BYTES_MAX)]);
    assert_eq!(head.is_ok(), !expected.is_empty());
    if let Ok(head) = head {
        assert_eq!(head.place(expected.len()), None);
        for (number, expected) in expected.iter().enumerate() {
            let place = head.place(number).expect("it has so many");
            let stored = object.get(place.start as usize..place.end as usize);
            let unit = stored.and_then(|stored| head.unit(&fixed.domain, number, stored).ok());
            assert_eq!(&unit, expected, "unit {number}");
        }
    }
    if options & 32 != 0 && options & 2 == 0 {
        chunk_of_store(&fixed, &object_name, &object, &expected, whole.as_ref());
    }
    whole.is_some()
}

/// Timeout for a store that returns a damaged object.
const TRIES: Duration = Duration::from_millis(1);

fn chunk_of_store(
    fixed: &FixedDomain,
    object_name: &Name,
    object: &[u8],
    units: &[Option<Vec<u8>>],
    whole: Option<&Vec<u8>>,
) {
    let objects = memory(&[("freestone.json".into(), fixed.description.clone())]);
    let key = freestone::store::store::chunk_key(object_name);
    objects.put(&key, object, WriteCondition::Always, soon()).expect("memory");
    let store = Store::open(objects, None, soon()).expect("a store");
    // Reads of valid objects have a long timeout, because the machine may be slow.
    let until = |good: bool| if good { soon() } else { CallLimits::within(TRIES) };
    assert_eq!(store.chunk(object_name, until(whole.is_some())).ok().as_ref(), whole);
    for number in 0..=units.len() {
        let expected = match units.get(number) {
            Some(unit) => unit.clone(),
            None if units.is_empty() => None,
            None => Some(Vec::new()),
        };
        assert_eq!(
            store.unit(object_name, number, until(expected.is_some())).ok(),
            expected,
            "unit {number}"
        );
    }
}

// ---- descriptions -------------------------------------------------------------------------------

/// Returns the unpacked content of a metadata object, or None if the object is invalid or has more than
/// `most` bytes. The caller checks the hash.
fn content(object: &[u8], most: usize) -> Option<Vec<u8>> {
    let is_sound = object[..8] == *b"FSTMETA1" && object[12..16] == [0; 4] && object[28..32] == [0; 4];
    let len = Some(word(object, 8)).filter(|len| is_sound && *len <= most)?;
    unpacked(&object[HEADER..], len)
}

/// Checks a metadata object with arbitrary content. Returns true if the object was accepted.
pub fn description(options: u8, input: &[u8]) -> bool {
    let mut object = input.to_vec();
    object.resize(object.len().max(HEADER), 0);
    let fixed = FixedDomain::new(options & 2 != 0);
    let most = [100, 4096, 140_000, 4 << 20][usize::from(options >> 3 & 3)];
    if options & 1 != 0 {
        object[..8].copy_from_slice(b"FSTMETA1");
        object[12..16].fill(0);
        object[28..32].fill(0);
    }
    let mut content = content(&object, most);
    let mut object_name = content.as_ref().map_or([7; 32], |content| fixed.keys.name(MAP, &[content]));
    if options & 2 != 0 {
        if options & 1 != 0 {
            let all = HEADER..object.len();
            object = seal(&fixed, object_name, &object, &[all]);
        } else {
            content = None;
        }
    }
    if options & 4 != 0 {
        object_name[0] ^= 0x80;
        content = None;
    }
    let read = meta::content(&fixed.domain, Kind::Map, &Name(object_name), &object, most);
    assert_eq!(read.ok(), content);
    if let Some(content) = &content {
        let (name, stored) = meta::stored(&fixed.domain, Kind::Map, content).expect("it is small");
        assert_eq!(name.0, object_name);
        assert_eq!(meta::content(&fixed.domain, Kind::Map, &name, &stored, most).as_ref(), Ok(content));
    }
    content.is_some()
}

// ---- traces -------------------------------------------------------------------------------------

const IMAGE: Name = Name([0x33; 32]);
const TRACE_BYTES_MAX: usize = (1 + 65_536) * 32;

/// Checks the trace of an image. Returns true if the trace was accepted.
pub fn trace(options: u8, input: &[u8]) -> bool {
    let fixed = FixedDomain::new(false);
    let mut object = input.to_vec();
    if options & 1 != 0 {
        // The content is the name of this image, or of another image, and then the names of the chunks.
        let image = if options & 4 != 0 { [0x34; 32] } else { IMAGE.0 };
        let content = [&image[..], input].concat();
        let header = [&b"FSTMETA1"[..], &(content.len() as u32).to_le_bytes(), &[0; 20]].concat();
        object = [&fixed.keys.name(TRACE, &[&content])[..], &header, &content].concat();
    }
    let expected =
        object.split_first_chunk::<32>().filter(|(_, rest)| rest.len() >= HEADER).and_then(|(name, rest)| {
            let content = content(rest, TRACE_BYTES_MAX)?;
            let (names, rest) = content.as_chunks::<32>();
            let is_sound = fixed.keys.name(TRACE, &[&content]) == *name && rest.is_empty();
            let (of, names) = names.split_first()?;
            (is_sound && *of == IMAGE.0).then(|| names.iter().copied().map(Name).collect::<Vec<_>>())
        });
    let objects = memory(&[("freestone.json".into(), fixed.description)]);
    objects.put(&format!("traces/{IMAGE}"), &object, WriteCondition::Always, soon()).expect("memory");
    let store = Arc::new(Store::open(objects, None, soon()).expect("a store"));
    let read = store.trace(&IMAGE, soon());
    assert_eq!(read.ok(), expected);
    expected.is_some()
}
