//! Reads of an image whose stored objects were changed.
//!
//! | byte | content |
//! |---|---|
//! | options | 1: with a cache, and then with that cache over the unchanged store; 2: with prefetch of the trace |
//! | for each change, 6 bytes | object; kind of change; offset, 2 bytes; length or value, 2 bytes |

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use freestone::device::{Blocking as _, Error};
use freestone::store::cache::{BYTES_MIN, Cache};
use freestone::store::format::PAGE;
use freestone::store::format::map::PageLocation;
use freestone::store::format::name::Name;
use freestone::store::image::{Config, Image};
use freestone::store::objects::{CallLimits, Objects};
use freestone::store::store::{Store, chunk_key};

use super::reference::{Object, PAGES, Reference, memory, soon};

/// Maximum number of object changes in an input.
const MOST: usize = 16;
/// Timeout of a read that may need damaged objects, which are retried until the timeout.
const TRIES: Duration = Duration::from_millis(3);
const LONG: Duration = Duration::from_secs(60);
/// Size of a read in bytes.
const READ: usize = 48 * PAGE;

fn change(objects: &mut [Object], [object, how, low, high, value, more]: [u8; 6]) {
    let count = objects.len();
    let other = objects[usize::from(value) % count].1.clone();
    let bytes = &mut objects[usize::from(object) % count].1;
    let wide = usize::from(high) << 8 | usize::from(low);
    // Numbers below 512 are offsets in the header of the object. Larger numbers are spread over the whole
    // object.
    let at = if wide < 512 { wide } else { wide * 31 }.min(bytes.len().saturating_sub(1));
    let len = (usize::from(more) + 1).min(bytes.len() - at);
    match how % 10 {
        _ if bytes.is_empty() => {}
        0 => bytes[at] ^= 1 << (value % 8),
        1 => bytes[at] = value,
        2 => bytes.truncate(at),
        3 => bytes.clear(),
        4 => *bytes = other,
        5 => drop(bytes.splice(at..at, std::iter::repeat_n(value, len))),
        6 => bytes[at..at + len].fill(value),
        7 => drop(bytes.drain(at..at + len)),
        8 => {
            let from = at.min(other.len());
            let len = len.min(other.len() - from);
            bytes[at..at + len].copy_from_slice(&other[from..from + len]);
        }
        _ => {
            let number = [0, 1, 0x7fff_ffff, u32::MAX, 4096, 65_536, 524_288][usize::from(value) % 7];
            let number = u32::to_le_bytes(number.wrapping_add(u32::from(more % 3)).wrapping_sub(1));
            let end = bytes.len().min(at + 4);
            bytes[at..end].copy_from_slice(&number[..end - at]);
        }
    }
}

/// Returns the key of the chunk that contains each page, or None for pages of zeroes.
fn chunks(reference: &Reference) -> Vec<Option<String>> {
    let store = Store::open(memory(&reference.objects), None, soon()).expect("a store");
    let manifest = store.manifest(&reference.image, soon()).expect("an image");
    let maps: Vec<_> =
        manifest.maps(0).iter().rev().map(|of| store.map(&of.map, soon()).expect("a map")).collect();
    let chunk = |page: usize| {
        maps.iter().find_map(|map| match map.place(page) {
            PageLocation::Below => None,
            PageLocation::Zero => Some(None),
            PageLocation::In { chunk, .. } => Some(Some(chunk_key(&map.chunks()[chunk].name))),
        })
    };
    (0..PAGES).map(|page| chunk(page).flatten()).collect()
}

struct Read<'a> {
    reference: &'a Reference,
    chunks: Vec<Option<String>>,
    changed: BTreeSet<&'a str>,
    cache: Option<Arc<Cache>>,
    prefetch: bool,
}

impl Read<'_> {
    /// Opens the image with the timeout `within`. Later reads have the timeout `time`.
    fn open(
        &self,
        objects: &Arc<impl Objects + 'static>,
        within: Duration,
        time: Duration,
    ) -> Result<Image, String> {
        let objects = Arc::clone(objects) as Arc<dyn Objects>;
        let description = &self.reference.domain.description;
        let store = Arc::new(Store::open_known(objects, description, None).expect("a store"));
        let config = Config { timeout: time, prefetch: self.prefetch };
        let (name, until): (Name, _) = (self.reference.image, CallLimits::within(within));
        Image::open(store, self.cache.clone(), name, config, until).map_err(|error| error.to_string())
    }

    /// Returns true if all objects that a read of these pages needs are unchanged.
    fn is_sound(&self, pages: std::ops::Range<usize>) -> bool {
        let describes = |key: &str| key.starts_with("maps/") || key.starts_with("manifests/");
        !self.changed.iter().any(|key| describes(key))
            && !self.chunks[pages].iter().flatten().any(|key| self.changed.contains(key.as_str()))
    }

    /// Reads the whole image, and asserts that all data is correct. Returns the number of failed reads.
    fn all(&self, objects: &Arc<impl Objects + 'static>) -> usize {
        let image = match self.open(objects, TRIES, TRIES) {
            Ok(image) => image,
            Err(why) if self.is_sound(0..0) => {
                self.open(objects, LONG, TRIES).unwrap_or_else(|_| panic!("{why}"))
            }
            Err(_) => return PAGES,
        };
        let mut failed = 0;
        for (number, expected) in self.reference.content.chunks(READ).enumerate() {
            let first = number * READ / PAGE;
            let pages = first..first + expected.len() / PAGE;
            let mut data = vec![0xa5; expected.len()];
            let mut outcome = image.read_at((first * PAGE) as u64, &mut data);
            if outcome.is_err() && self.is_sound(pages.clone()) {
                // Retry with a long timeout, because the machine may be slow.
                let image = self.open(objects, LONG, LONG).expect("the objects are unchanged");
                outcome = image.read_at((first * PAGE) as u64, &mut data);
                assert_eq!(outcome, Ok(()), "the objects of pages {pages:?} are unchanged");
            }
            match outcome {
                Ok(()) => assert!(data == expected, "pages {pages:?} have other data"),
                Err(error) => {
                    assert_eq!(error, Error::Media);
                    failed += 1;
                }
            }
        }
        failed
    }
}

/// Checks an image over changed objects. Returns true if all reads succeeded.
pub fn check(reference: &Reference, options: u8, input: &[u8]) -> bool {
    let mut objects = reference.objects.clone();
    for how in input.as_chunks().0.iter().copied().take(MOST) {
        change(&mut objects, how);
    }
    let changed = objects.iter().zip(&reference.objects).filter(|(now, before)| now.1 != before.1);
    let changed = changed.map(|(_, (key, _))| key.as_str()).collect();
    // An object that a change has emptied is removed, so that missing objects are tested too.
    objects.retain(|(_, bytes)| !bytes.is_empty());
    let directory = (options & 1 != 0).then(|| {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        directory.expect("a directory for the cache")
    });
    let cache =
        directory.as_ref().map(|directory| Cache::open(directory.path(), BYTES_MIN).expect("a cache"));
    let prefetch = options & 2 != 0;
    let mut read = Read { reference, chunks: chunks(reference), changed, cache, prefetch };
    let failed = read.all(&memory(&objects));
    if read.cache.is_some() {
        // The cache must not contain damaged data, so all reads with unchanged objects must succeed.
        read.changed.clear();
        assert_eq!(read.all(&memory(&reference.objects)), 0);
    }
    failed == 0
}
