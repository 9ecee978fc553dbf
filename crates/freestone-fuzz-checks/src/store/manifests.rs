//! Manifests of images.
//!
//! The input is the text of an image's manifest, and options. If bit 0 of the options is set, the text is
//! normalised first, so that each JSON key occurs once, as the reference parser in this file requires. The
//! check stores the manifest under the hash of its text, and opens the image.

use freestone::device::{Device as _, ExtentKind};
use freestone::store::format::manifest::{BYTES_MAX, Manifest};
use freestone::store::format::meta;
use freestone::store::format::name::Kind;
use freestone::store::image::{Config, Image};
use freestone::store::objects::{Objects as _, WriteCondition};
use freestone::store::store::Store;
use serde_json::Value;

use super::keys::{FORMAT, FixedDomain, MANIFEST};
use super::reference::{memory, soon};
use super::words::{name, number, text};

const SEGMENT_BYTES: u64 = 1 << 30;
const SIZE_MAX: u64 = 256 << 40;
const MAPS_MAX: usize = 8;
/// Number of pages in a segment.
const PAGES_MAX: u64 = SEGMENT_BYTES / 4096;
/// Maximum stored size of the chunks of one map, in bytes.
const STORED_MAX: u64 = 2048 * (512 * 1024 + 32 + 8 * (36 + 16));

fn map(value: &Value) -> Option<(u64, u64)> {
    name(value, "map")?;
    name(value, "hashes")?;
    let pages = number(value, "pages").filter(|pages| *pages <= PAGES_MAX)?;
    Some((pages, number(value, "stored").filter(|stored| *stored <= STORED_MAX)?))
}

/// Number of a segment, and for each of its maps the number of pages and the stored size in bytes.
type Segment = (u64, Vec<(u64, u64)>);

fn segment(value: &Value) -> Option<Segment> {
    let maps: Option<Vec<_>> = value.get("maps")?.as_array()?.iter().map(map).collect();
    let maps = maps.filter(|maps| (1..=MAPS_MAX).contains(&maps.len()))?;
    Some((number(value, "number")?, maps))
}

/// Reference parser: returns the size and the segments, or None if the manifest is invalid.
fn reference_manifest(value: &Value) -> Option<(u64, Vec<Segment>)> {
    number(value, "format").filter(|format| *format == FORMAT)?;
    number(value, "pushed")?;
    text(value, "source")?;
    if value.get("parent").is_some_and(|parent| !parent.is_null()) {
        name(value, "parent")?;
    }
    let size = number(value, "size").filter(|size| (1..=SIZE_MAX).contains(size) && size % 512 == 0)?;
    let segments: Option<Vec<_>> = value.get("segments")?.as_array()?.iter().map(segment).collect();
    let segments = segments?;
    let is_sorted = segments.windows(2).all(|two| two[0].0 < two[1].0);
    let is_within = segments.last().is_none_or(|last| last.0 < size.div_ceil(SEGMENT_BYTES));
    (is_sorted && is_within).then_some((size, segments))
}

/// Returns true if the JSON has a list instead of an object. The manifest parser may accept that form, but
/// the reference parser does not support it.
fn is_odd(value: &Value) -> bool {
    let all =
        |value: &Value, key: &str| value.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
    all(value, "segments")
        .iter()
        .any(|segment| segment.is_array() || all(segment, "maps").iter().any(Value::is_array))
}

/// Checks a manifest. Returns true if the manifest was accepted.
pub fn check(options: u8, input: &[u8]) -> bool {
    let FixedDomain { keys, domain, description } = FixedDomain::new(false);
    let mut input = input.to_vec();
    let value: Option<Value> = serde_json::from_slice(&input).ok().filter(|_| options & 1 != 0);
    if let Some(value) = &value {
        input = value.to_string().into_bytes();
    }
    let read = Manifest::parse(&input);
    let value = value.filter(|value| !is_odd(value));
    if let Some(value) = &value {
        match (&read, reference_manifest(value)) {
            (Ok(read), Some((size, segments))) => {
                assert_eq!(read.size, size);
                let sum =
                    |of: fn(&(u64, u64)) -> u64| segments.iter().flat_map(|(_, maps)| maps).map(of).sum();
                assert_eq!(read.held(), (sum(|map| map.0), sum(|map| map.1)));
                assert_eq!(read.depth(), segments.iter().map(|(_, maps)| maps.len()).max().unwrap_or(0));
                for (number, maps) in &segments {
                    assert_eq!(read.maps(*number as u32).len(), maps.len());
                }
            }
            (read, reference_manifest) => {
                assert_eq!(read.is_ok(), reference_manifest.is_some(), "{value}: {read:?}");
            }
        }
    }
    let (name, object) = meta::stored(&domain, Kind::Manifest, &input).expect("it is small");
    assert_eq!(name.0, keys.name(MANIFEST, &[&input]));
    let objects = memory(&[("freestone.json".into(), description)]);
    objects.put(&format!("manifests/{name}"), &object, WriteCondition::Always, soon()).expect("memory");
    let store = std::sync::Arc::new(Store::open(objects, None, soon()).expect("a store"));
    let from_store = store.manifest(&name, soon());
    assert_eq!(from_store.is_ok(), read.is_ok() && input.len() <= BYTES_MAX);
    let Ok(manifest) = from_store else { return false };
    assert_eq!(Manifest::parse(&manifest.bytes()).as_ref(), Ok(&manifest));
    let config = Config { timeout: std::time::Duration::from_millis(1), prefetch: false };
    let image = Image::open(store, None, name, config, soon()).expect("it was read before");
    assert_eq!(image.geometry().size, manifest.size);
    // A segment that is not listed is a hole. The maps of the listed segments do not exist in this store, so
    // their extents cannot be read.
    let numbers = manifest.segments.iter().map(|segment| u64::from(segment.number)).take(3);
    for number in numbers.chain([0, u64::from(manifest.segment_count()) - 1]) {
        let len = SEGMENT_BYTES.min(manifest.size - number * SEGMENT_BYTES);
        let mut rows = Vec::new();
        let covered = image.extents(number * SEGMENT_BYTES, len, &mut |row| {
            rows.push((row.len, row.kind));
            true
        });
        if manifest.maps(number as u32).is_empty() {
            assert_eq!((covered, rows), (Ok(len), vec![(len, ExtentKind::Hole)]));
        } else {
            assert!(covered.is_err() && rows.is_empty());
        }
    }
    true
}
