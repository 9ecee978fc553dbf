//! A prune: what no tag refers to any more is deleted, when it is older than the grace of the store.
//!
//! Kept is what tags refer to, and what manifests do that are younger than the grace: a push may be about
//! to set a tag to one. Without any tag nothing is deleted, as the tags may be missing by mistake. Objects
//! are looked at once more just before they are deleted, as a push may have written them again; tags and
//! manifests are read anew after `ROOTS_AGE_MAX`. So a push that keeps to its part (`push`) never refers to
//! an object that is deleted: `timing` says why.

use crate::rt::sync::Mutex;
use crate::rt::sync::PoisonError;
use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::thread;
use crate::rt::time::{Duration, SystemTime};
use std::collections::{BTreeMap, BTreeSet};

use freestone_core::mutants::{self, Mutant};

use crate::format::name::Name;
use crate::objects::{Fault, Listed, Until};
use crate::parallel;
use crate::store::{CHUNKS, CLOCKS, Error, MANIFESTS, MAPS, Result, Store, TRACES};
use crate::timing::{Clock, DELETE_SETTLES, LOOK_TO_DELETE, ROOTS_AGE_MAX, is_old};

/// Requests under way at once.
const AT_ONCE: usize = 32;
/// How often a deletion is tried, and the pause before another try, longer each time.
const TRIES: u32 = 5;
const TRY_PAUSE: Duration = Duration::from_millis(200);
/// How often roots are read that take longer than they may be used.
const ROOTS_TRIES: u32 = 3;
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
    /// Clock of this host before they were read.
    read: Duration,
}

/// One prune.
struct Work<'a> {
    store: &'a Store,
    clock: Clock<'a>,
    dry: bool,
    until: Until<'a>,
}

/// Deletes what nothing refers to. With `dry` it only counts. `note` is told how many bytes of
/// objects were looked at.
///
/// # Errors
/// [`Error::NoTags`], and what the store answers. If a tag, a tagged image or one of its maps is missing or
/// cannot be read, nothing is deleted.
pub fn prune(store: &Store, dry: bool, note: &dyn Fn(u64), until: Until<'_>) -> Result<Pruned> {
    let work = Work { store, clock: Clock::start(store, until)?, dry, until };
    let mut roots = work.roots()?;
    let mut pruned = Pruned { images: roots.images, ..Pruned::default() };
    let parts = (0..=u8::MAX).map(|part| format!("{CHUNKS}{part:02x}/"));
    // Manifests first, then maps: a prune that is ended early leaves no image without its parts.
    for prefix in [MANIFESTS, MAPS, TRACES, CLOCKS].map(str::to_owned).into_iter().chain(parts) {
        let mut passes = 0;
        // What is listed may be more than there is memory for: then the rest is next.
        loop {
            if roots.are_stale(store) {
                roots = work.roots()?;
            }
            let (old, is_whole) = work.list(&prefix, &roots, &mut pruned)?;
            note(pruned.bytes);
            let deleted = work.delete(&old, &roots, &mut pruned)?;
            let is_passed_over = roots.are_stale(store) && !old.is_empty();
            if !is_passed_over && (is_whole || deleted == 0) {
                break;
            }
            passes = if deleted == 0 { passes + 1 } else { 0 };
            if passes >= ROOTS_TRIES {
                let url = store.url();
                let why = format!("{url}: {prefix} cannot be listed and deleted from in {ROOTS_AGE_MAX:?}");
                return Err(Error::Local(why));
            }
        }
    }
    Ok(pruned)
}

impl Work<'_> {
    /// What lies under a prefix and may go.
    fn list(&self, prefix: &str, roots: &Roots, pruned: &mut Pruned) -> Result<(Vec<Listed>, bool)> {
        let (mut old, mut is_whole) = (Vec::new(), true);
        let before = *pruned;
        self.store.list(prefix, self.until, &mut |is_again, listed| {
            if is_again {
                (old, is_whole, *pruned) = (Vec::new(), true, before);
            }
            let Some(listed) = listed else { return true };
            pruned.objects += 1;
            pruned.bytes += listed.bytes;
            if roots.has(&listed.key) {
                return true;
            }
            if !self.is_old(listed.modified) {
                pruned.young += 1;
            } else if self.dry {
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

    fn is_old(&self, modified: SystemTime) -> bool {
        is_old(self.clock.age_at_least(modified), self.store.domain().grace)
    }

    /// Deletes what still is as old as when it was listed, and counts it.
    fn delete(&self, old: &[Listed], roots: &Roots, pruned: &mut Pruned) -> Result<u64> {
        let (deleted, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        // All that were deleted too late: their pushes have to be repeated.
        let late = Mutex::new(Vec::new());
        let outcome = parallel::for_each(AT_ONCE, old.len(), |at| {
            match self.delete_one(&old[at].key, roots) {
                Ok(true) => {
                    deleted.fetch_add(1, Ordering::SeqCst);
                    bytes.fetch_add(old[at].bytes, Ordering::SeqCst);
                }
                Ok(false) => {}
                Err(Error::DeletedLate(key)) => {
                    late.lock().unwrap_or_else(PoisonError::into_inner).push(key.clone());
                    return Err(Error::DeletedLate(key));
                }
                Err(error) => return Err(error),
            }
            Ok(())
        });
        pruned.deleted += deleted.load(Ordering::SeqCst);
        pruned.deleted_bytes += bytes.load(Ordering::SeqCst);
        let late = late.into_inner().unwrap_or_else(PoisonError::into_inner);
        if !late.is_empty() {
            return Err(Error::DeletedLate(late.join(", ")));
        }
        outcome.map(|()| deleted.into_inner())
    }

    /// Returns true if the object was deleted. One that the roots are too stale for is for the next listing.
    fn delete_one(&self, key: &str, roots: &Roots) -> Result<bool> {
        let (store, until) = (self.store, self.until);
        let mut tries = 0;
        loop {
            until.check().map_err(|fault| Error::of(key, fault))?;
            let looked = store.uptime();
            let since_look = || store.uptime().saturating_sub(looked);
            if roots.are_stale(store) {
                return Ok(false);
            }
            let Some(head) = store.head(key, until)? else { return Ok(false) };
            if !self.is_old(head.modified) {
                return Ok(false);
            }
            let left = LOOK_TO_DELETE.saturating_sub(since_look());
            if left.is_zero() {
                // This host slept, or the store is slow.
                continue;
            }
            // One try at a time: the look comes first each time.
            tries += 1;
            let deleted = store.delete_once(key, head.version.as_ref(), until.at_most(left));
            // The store did not check the version, or may still carry out the deletion.
            let is_unknown = match &deleted {
                Ok(is_checked) => !is_checked,
                Err(fault) => fault.may_pass(),
            };
            if is_unknown && since_look() > LOOK_TO_DELETE + DELETE_SETTLES {
                return Err(Error::DeletedLate(key.to_owned()));
            }
            match deleted {
                Ok(_) => return Ok(true),
                Err(Fault::Condition) => return Ok(false),
                Err(fault) if fault.may_pass() && tries < TRIES => thread::sleep(TRY_PAUSE * tries),
                Err(fault) => return Err(Error::of(key, fault)),
            }
        }
    }

    /// Reads what is referred to, in a time that leaves some to use it.
    fn roots(&self) -> Result<Roots> {
        for _ in 0..ROOTS_TRIES {
            let roots = self.read_roots()?;
            if !roots.are_stale(self.store) {
                return Ok(roots);
            }
        }
        let url = self.store.url();
        let why = format!("{url}: what is referred to cannot be read in {ROOTS_AGE_MAX:?}");
        Err(Error::Local(why))
    }

    fn read_roots(&self) -> Result<Roots> {
        let (store, until) = (self.store, self.until);
        let read = store.uptime();
        // First the young ones: a push that sets its tag between the two looks is found by one of them.
        let manifests = store.list_all(MANIFESTS, usize::MAX, until)?;
        let young = manifests.iter().filter(|(_, modified)| !self.is_old(**modified));
        let mut images: BTreeSet<Name> = young.filter_map(|(key, _)| name_of(key)).collect();
        let forgotten = usize::from(mutants::on(Mutant::PruneForgetsTag));
        let tags: Vec<String> = store.tag_names(until)?.into_iter().skip(forgotten).collect();
        let tagged = Mutex::new(BTreeSet::new());
        parallel::for_each(AT_ONCE, tags.len(), |at| {
            if let Some(read) = store.tag(&tags[at], until)? {
                tagged.lock().unwrap_or_else(PoisonError::into_inner).insert(read.tag.manifest);
            }
            Ok::<(), Error>(())
        })?;
        let tagged = tagged.into_inner().unwrap_or_else(PoisonError::into_inner);
        if tagged.is_empty() {
            return Err(Error::NoTags(store.url().to_owned()));
        }
        images.extend(&tagged);
        // Names, and whether a tag refers to each map.
        let found: Mutex<(BTreeSet<Name>, BTreeMap<Name, bool>)> = Mutex::default();
        let all: Vec<Name> = images.iter().copied().collect();
        parallel::for_each(AT_ONCE, all.len(), |at| {
            let image = all[at];
            let is_tagged = tagged.contains(&image);
            let manifest = match store.manifest(&image, until) {
                // Another prune deleted it; no tag says so.
                Err(error) if !is_tagged && error.is_missing() => return Ok(()),
                manifest => manifest?,
            };
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            let (names, maps) = &mut *found;
            names.insert(image);
            for map in manifest.segments.iter().flat_map(|segment| &segment.maps) {
                names.insert(map.hashes);
                *maps.entry(map.map).or_default() |= is_tagged;
            }
            Ok::<(), Error>(())
        })?;
        let (names, maps) = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let maps: Vec<(Name, bool)> = maps.into_iter().collect();
        let shared = Mutex::new(names);
        parallel::for_each(AT_ONCE, maps.len(), |at| {
            let (name, is_tagged) = maps[at];
            let map = match store.map(&name, until) {
                // A push that took too long left its manifest, and will set no tag to it.
                Err(error) if !is_tagged && error.is_missing() => return Ok(()),
                map => map?,
            };
            let mut names = shared.lock().unwrap_or_else(PoisonError::into_inner);
            names.insert(name);
            names.extend(map.chunks().iter().map(|chunk| chunk.name));
            Ok::<(), Error>(())
        })?;
        let names = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Roots { names, images: images.len() as u64, read })
    }
}

impl Roots {
    fn are_stale(&self, store: &Store) -> bool {
        store.uptime().saturating_sub(self.read) >= ROOTS_AGE_MAX
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
