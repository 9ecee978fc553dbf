//! Stored objects of an image that the given reads need, with their sizes in the object store.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use freestone::store::format::domain;
use freestone::store::format::map::PageLocation;
use freestone::store::format::name::Name;
use freestone::store::format::{PAGE, SEGMENT_BYTES};
use freestone::store::store::{MANIFESTS, MAPS, Store, TAGS, TRACES};

use super::replay::Read;
use super::test_image::{TAG, deadline, pushed_image};

/// Number of stored objects, and their total size in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Objects {
    pub count: u64,
    pub bytes: u64,
}

impl Objects {
    fn of(sizes: impl IntoIterator<Item = u64>) -> Self {
        let add = |all: Self, bytes| Self { count: all.count + 1, bytes: all.bytes + bytes };
        sizes.into_iter().fold(Self::default(), add)
    }
}

/// Stored objects that a host requests to read an image, and their stored sizes in bytes.
#[derive(Debug, Clone)]
pub struct RequestedObjects {
    /// Chunks that are read: stored size in bytes, by name.
    pub read: BTreeMap<Name, u64>,
    pub chunks: Objects,
    pub maps: Objects,
    pub domain: u64,
    pub tag: u64,
    pub manifest: u64,
    /// Stored size of the trace in bytes; 0 if the image has no trace.
    pub trace: u64,
}

impl RequestedObjects {
    /// Collects the stored objects that `reads` need from the image to which the tag refers.
    pub fn of(store: &Store, reads: &[Read]) -> Result<Self> {
        let image = pushed_image(store)?;
        let manifest = store.manifest(&image, deadline())?;
        let (mut read, mut maps) = (BTreeMap::new(), Vec::new());
        for (segment, pages) in pages(reads) {
            // The page maps of a segment are searched from the newest to the oldest.
            let mut of_segment = Vec::new();
            for map in manifest.maps(segment).iter().rev() {
                of_segment.push(store.map(&map.map, deadline())?);
                maps.push(bytes(store, &format!("{MAPS}{}", map.map))?);
            }
            for page in pages {
                let places = of_segment.iter().map(|map| (map, map.place(page)));
                let first = places.into_iter().find(|(_, place)| !matches!(place, PageLocation::Below));
                if let Some((map, PageLocation::In { chunk, .. })) = first {
                    let chunk = map.chunks()[chunk];
                    read.insert(chunk.name, u64::from(chunk.stored));
                }
            }
        }
        ensure!(!read.is_empty(), "the reads cover only zeroes");
        Ok(Self {
            chunks: Objects::of(read.values().copied()),
            read,
            maps: Objects::of(maps),
            domain: bytes(store, domain::KEY)?,
            tag: bytes(store, &format!("{TAGS}{TAG}"))?,
            manifest: bytes(store, &format!("{MANIFESTS}{image}"))?,
            trace: bytes(store, &format!("{TRACES}{image}")).unwrap_or(0),
        })
    }
}

fn bytes(store: &Store, key: &str) -> Result<u64> {
    Ok(store.head(key, deadline())?.with_context(|| format!("{key} does not exist"))?.bytes)
}

/// Returns the numbers of the pages that are read, by segment.
fn pages(reads: &[Read]) -> BTreeMap<u32, BTreeSet<usize>> {
    let mut pages: BTreeMap<u32, BTreeSet<usize>> = BTreeMap::new();
    for Read { offset, len, .. } in reads {
        let end = (offset + *len as u64).div_ceil(PAGE as u64);
        for page in offset / PAGE as u64..end {
            let of_segment = SEGMENT_BYTES / PAGE as u64;
            pages.entry((page / of_segment) as u32).or_default().insert((page % of_segment) as usize);
        }
    }
    pages
}
