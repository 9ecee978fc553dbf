//! A prune: what no tag refers to any more is deleted, when it is older than the grace of the store.
//!
//! Kept is what tags refer to, and what manifests do that are younger than the grace: a push may be about
//! to set a tag to one. All times are the store's. Whatever is to be deleted is looked at once more just
//! before, as a push may have written it again; and tags and manifests are read anew where that was ten
//! minutes ago. So a push that keeps to its part (`push`) never refers to something that is deleted.

use crate::rt::sync::Mutex;
use crate::rt::sync::PoisonError;
use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::thread;
use crate::rt::time::{Duration, Instant, SystemTime};
use std::collections::BTreeSet;

use freestone_core::mutants::{self, Mutant};

use crate::format::manifest::Manifest;
use crate::format::name::Name;
use crate::objects::{Fault, Listed, Until};
use crate::parallel;
use crate::push::{LOOK_TO_DELETE, ROOTS_AGE_MAX};
use crate::store::{CHUNKS, CLOCKS, Error, MANIFESTS, MAPS, Result, Store, TRACES};

/// Requests under way at once.
const AT_ONCE: usize = 32;
/// How often a deletion is tried, and the pause before another try, longer each time.
const TRIES: u32 = 5;
const TRY_PAUSE: Duration = Duration::from_millis(200);
/// Names that are listed before some of them are deleted.
const LISTED_MAX: usize = 100_000;

/// What a prune did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Pruned {
    /// Images that are kept.
    pub images: u64,
    /// Objects that were looked at.
    pub objects: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Objects that were deleted, or would be.
    pub deleted: u64,
    /// Bytes of these.
    pub deleted_bytes: u64,
    /// Objects that nothing refers to and that are too young.
    pub young: u64,
}

/// What is referred to.
struct Roots {
    names: BTreeSet<Name>,
    images: u64,
    read: Instant,
}

/// Deletes what nothing refers to. With `dry` it only counts. `note` is told how many bytes of
/// objects were looked at.
///
/// # Errors
/// What the store answers. Where a tag or a young manifest cannot be read nothing is deleted.
pub fn prune(store: &Store, dry: bool, note: &dyn Fn(u64), until: Until<'_>) -> Result<Pruned> {
    let store_began = store.now(until)?;
    // Taken afterwards: rather a bit too young than too old.
    let begun = Instant::now();
    let now = || store_began + begun.elapsed();
    let mut roots = Roots::read(store, now(), until)?;
    let mut pruned = Pruned { images: roots.images, ..Pruned::default() };
    let parts = (0..=u8::MAX).map(|part| format!("{CHUNKS}{part:02x}/"));
    // Manifests last: while one is there what it refers to should be, too.
    for prefix in parts.chain([MAPS, TRACES, CLOCKS, MANIFESTS].map(str::to_owned)) {
        // What is listed may be more than there is memory for: then the rest is next.
        loop {
            if roots.read.elapsed() >= ROOTS_AGE_MAX {
                roots = Roots::read(store, now(), until)?;
            }
            let (old, is_whole) = list(store, &prefix, dry, &roots, now(), &mut pruned, until)?;
            note(pruned.bytes);
            let outcome = delete(store, &old, &roots, &now, &mut pruned, until)?;
            let is_passed_over = roots.read.elapsed() >= ROOTS_AGE_MAX;
            if !is_passed_over && (is_whole || outcome == 0) {
                break;
            }
        }
    }
    Ok(pruned)
}

/// What lies under a prefix and may go.
fn list(
    store: &Store,
    prefix: &str,
    dry: bool,
    roots: &Roots,
    now: SystemTime,
    pruned: &mut Pruned,
    until: Until<'_>,
) -> Result<(Vec<Listed>, bool)> {
    let (mut old, mut is_whole) = (Vec::new(), true);
    let before = *pruned;
    store.list(prefix, until, &mut |is_again, listed| {
        if is_again {
            (old, is_whole, *pruned) = (Vec::new(), true, before);
        }
        let Some(listed) = listed else { return true };
        pruned.objects += 1;
        pruned.bytes += listed.bytes;
        if roots.has(&listed.key) {
            return true;
        }
        if !is_old(now, listed.modified, store.domain().grace) {
            pruned.young += 1;
        } else if dry {
            pruned.deleted += 1;
            pruned.deleted_bytes += listed.bytes;
        } else {
            old.push(listed);
            is_whole = old.len() < LISTED_MAX;
        }
        is_whole
    })?;
    Ok((old, is_whole))
}

fn is_old(now: SystemTime, modified: SystemTime, grace: Duration) -> bool {
    now.duration_since(modified).is_ok_and(|age| age > grace)
}

/// Deletes what still is as old as when it was listed, and counts it.
fn delete(
    store: &Store,
    old: &[Listed],
    roots: &Roots,
    now: &(dyn Fn() -> SystemTime + Sync),
    pruned: &mut Pruned,
    until: Until<'_>,
) -> Result<u64> {
    let (deleted, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    let outcome = parallel::for_each(AT_ONCE, old.len(), |at| {
        let Listed { key, bytes: len, .. } = &old[at];
        until.check().map_err(|fault| Error::of(key, fault))?;
        // What the roots say is too old: what is left is for the next look.
        if roots.read.elapsed() >= ROOTS_AGE_MAX {
            return Ok(());
        }
        for tries in 1.. {
            let Some(head) = store.head(key, until)? else { return Ok(()) };
            if !is_old(now(), head.modified, store.domain().grace) {
                return Ok(());
            }
            // One try at a time: the look comes first each time.
            match store.delete_once(key, until.at_most(LOOK_TO_DELETE)) {
                Err(Error::Object { fault, .. }) if fault.may_pass() && tries < TRIES => {
                    thread::sleep(TRY_PAUSE * tries);
                }
                deleted => {
                    deleted?;
                    break;
                }
            }
        }
        deleted.fetch_add(1, Ordering::SeqCst);
        bytes.fetch_add(*len, Ordering::SeqCst);
        Ok::<(), Error>(())
    });
    pruned.deleted += deleted.load(Ordering::SeqCst);
    pruned.deleted_bytes += bytes.load(Ordering::SeqCst);
    outcome.map(|()| deleted.into_inner())
}

impl Roots {
    fn read(store: &Store, now: SystemTime, until: Until<'_>) -> Result<Self> {
        let read = Instant::now();
        let mut images = BTreeSet::new();
        // First the young ones: a push that sets its tag between the two looks is found by one of them.
        store.list(MANIFESTS, until, &mut |is_again, listed| {
            if is_again {
                images.clear();
            }
            let Some(listed) = listed else { return true };
            if !is_old(now, listed.modified, store.domain().grace)
                && let Some(name) = name_of(&listed.key)
            {
                images.insert(name);
            }
            true
        })?;
        let young = images.clone();
        let forgotten = usize::from(mutants::on(Mutant::PruneForgetsTag));
        for tag in store.tag_names(until)?.into_iter().skip(forgotten) {
            if let Some(read) = store.tag(&tag, until)? {
                images.insert(read.tag.manifest);
            }
        }
        let mut all: Vec<Manifest> = Vec::new();
        let mut names: BTreeSet<Name> = BTreeSet::new();
        for image in &images {
            match store.manifest(image, until) {
                Ok(manifest) => all.push(manifest),
                // Another prune deleted it; no tag says so.
                Err(Error::Object { fault: Fault::NotFound, .. }) if young.contains(image) => continue,
                Err(error) => return Err(error),
            }
            names.insert(*image);
        }
        let maps: BTreeSet<Name> = all
            .iter()
            .flat_map(|manifest| manifest.segments.iter().flat_map(|segment| &segment.maps))
            .inspect(|map| {
                names.insert(map.hashes);
            })
            .map(|map| map.map)
            .collect();
        let maps: Vec<Name> = maps.into_iter().collect();
        let shared = Mutex::new(names);
        parallel::for_each(AT_ONCE, maps.len(), |at| {
            let map = store.map(&maps[at], until)?;
            let mut names = shared.lock().unwrap_or_else(PoisonError::into_inner);
            names.insert(maps[at]);
            names.extend(map.chunks().iter().map(|chunk| chunk.name));
            Ok::<(), Error>(())
        })?;
        let names = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        if read.elapsed() >= ROOTS_AGE_MAX {
            let why = format!("{}: what is referred to cannot be read in {ROOTS_AGE_MAX:?}", store.url());
            return Err(Error::Local(why));
        }
        Ok(Self { names, images: images.len() as u64, read })
    }

    fn has(&self, key: &str) -> bool {
        // What is not named so was not written by us.
        name_of(key).map_or(!key.starts_with(CLOCKS), |name| self.names.contains(&name))
    }
}

/// The name at the end of a key. A trace is called like its image.
fn name_of(key: &str) -> Option<Name> {
    key.rsplit('/').next()?.parse().ok()
}
