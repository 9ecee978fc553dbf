//! Prune: deletes objects that no tag needs and that are older than the grace period of the store.
//!
//! A prune keeps all objects that tagged images need. Images whose manifest is younger than the grace period
//! are kept too, because a push may be about to set a tag to one of them. If the store has no tag, nothing is
//! deleted, as the tags may be missing by mistake.
//!
//! Just before each deletion the prune checks the age of the object again, as a push may have rewritten the
//! object. Tags and manifests are read again after `ROOTS_AGE_MAX`. `timing` explains why a correct push
//! (`push`) never refers to a deleted object.

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::thread;
use crate::rt::time::{Duration, SystemTime, UNIX_EPOCH};
use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use freestone_core::mutants::{self, Mutant};
use freestone_core::sync::Mutex;

use crate::clock::Clock;
use crate::format::name::Name;
use crate::objects::{CallLimits, Fault, ListEntry};
use crate::parallel;
use crate::store::{CHUNKS, CLOCKS, Error, MANIFESTS, MAPS, Result, Store, TRACES};
use crate::timing::{DELETION_SETTLE_TIME, DELETION_TIME_MAX, ROOTS_AGE_MAX, is_old};

/// Maximum number of requests of a prune in flight.
const AT_ONCE: usize = 32;
/// Maximum number of attempts to delete an object.
const TRIES: u32 = 5;
/// Pause after the first attempt to delete an object. Pauses after later attempts grow linearly.
const TRY_PAUSE: Duration = Duration::from_millis(200);
/// Maximum number of attempts to read the roots (tags and manifests) within `ROOTS_AGE_MAX`.
const ROOTS_TRIES: u32 = 3;
/// Maximum number of old objects that one pass lists and then deletes, which limits memory use.
const LISTED_MAX: usize = 100_000;

/// Counters of a prune.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct PruneReport {
    /// Number of images that were kept.
    pub images: u64,
    /// Number of the images in [`PruneReport::images`] that no tag refers to, and that are younger than the
    /// grace period.
    pub untagged_images: u64,
    /// Number of objects that were listed.
    pub objects: u64,
    /// Total size of the objects in [`PruneReport::objects`], in bytes.
    pub bytes: u64,
    /// Number of objects that were deleted, or in a dry run would be deleted.
    pub deleted: u64,
    /// Total size of the objects in [`PruneReport::deleted`], in bytes.
    pub deleted_bytes: u64,
    /// Number of objects that no tag needs, but that were kept. Each object, or an untagged image that needs
    /// the object, is younger than the grace period.
    pub young: u64,
    /// Total size of the objects in [`PruneReport::young`], in bytes.
    pub young_bytes: u64,
    /// Earliest time at which a prune can delete an object of [`PruneReport::young`]: seconds since 1970 by
    /// the clock of the object store. `None` if nothing expires.
    pub next_expiry: Option<u64>,
}

impl PruneReport {
    /// Counts an object of `bytes` bytes that no tag needs and that is kept until `expiry`.
    fn keep_young(&mut self, bytes: u64, expiry: Option<SystemTime>) {
        self.young += 1;
        self.young_bytes += bytes;
        let expiry = expiry.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        // The time is rounded up, as an object must be older than the grace period.
        let expiry = expiry.map(|at| at.as_secs() + 1);
        self.next_expiry = self.next_expiry.into_iter().chain(expiry).min();
    }
}

/// Objects that must be kept, according to one reading of tags and manifests.
struct Roots {
    /// Names of the objects that images need, with true for objects that a tagged image needs.
    names: BTreeMap<Name, bool>,
    images: u64,
    untagged_images: u64,
    /// Host clock before the tags and manifests were read.
    read: Duration,
}

/// Reason of a prune to keep an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// A tagged image needs the object, or Freestone did not write it.
    Tagged,
    /// Only untagged images that are younger than the grace period need the object.
    Young,
    None,
}

/// State of one prune run.
struct Work<'a> {
    store: &'a Store,
    clock: Clock<'a>,
    dry: bool,
    /// Names of tags to treat as removed.
    without: &'a BTreeSet<String>,
    limits: CallLimits<'a>,
}

/// Deletes objects that no tag needs. If `dry` is true, the prune only counts them. `note` receives the
/// number of bytes listed so far.
///
/// # Errors
/// [`Error::NoTags`] if the store has no tag; errors of requests to the object store. If a tag, a tagged
/// image or one of its maps is missing or cannot be read, nothing is deleted.
pub fn prune(store: &Store, dry: bool, note: &dyn Fn(u64), limits: CallLimits<'_>) -> Result<PruneReport> {
    Work { store, clock: Clock::start(store, limits)?, dry, without: &BTreeSet::new(), limits }.run(note)
}

/// Counts the objects that a prune would delete if the tags `without` were removed. Deletes nothing.
pub fn preview(
    store: &Store,
    without: &BTreeSet<String>,
    note: &dyn Fn(u64),
    limits: CallLimits<'_>,
) -> Result<PruneReport> {
    Work { store, clock: Clock::start(store, limits)?, dry: true, without, limits }.run(note)
}

/// Reads all tags except `without`, and the images and maps that these tags need.
///
/// # Errors
/// The same as [`prune`], if a prune could not delete anything after the removal of `without`.
pub fn check_roots(store: &Store, without: &BTreeSet<String>, limits: CallLimits<'_>) -> Result<()> {
    let work = Work { store, clock: Clock::start(store, limits)?, dry: true, without, limits };
    work.roots().map(drop)
}

impl Work<'_> {
    fn run(&self, note: &dyn Fn(u64)) -> Result<PruneReport> {
        let mut roots = self.roots()?;
        let (images, untagged_images) = (roots.images, roots.untagged_images);
        let mut pruned = PruneReport { images, untagged_images, ..PruneReport::default() };
        let parts = (0..=u8::MAX).map(|part| format!("{CHUNKS}{part:02x}/"));
        // Manifests first, then maps, so an interrupted prune leaves no manifest without its parts.
        for prefix in [MANIFESTS, MAPS, TRACES, CLOCKS].map(str::to_owned).into_iter().chain(parts) {
            let mut passes = 0;
            // Each pass deletes at most LISTED_MAX objects; another pass lists the rest.
            loop {
                if roots.are_stale(self.store) {
                    roots = self.roots()?;
                }
                let (old, is_whole) = self.list(&prefix, &roots, &mut pruned)?;
                note(pruned.bytes);
                let deleted = self.delete(&old, &roots, &mut pruned)?;
                let is_passed_over = roots.are_stale(self.store) && !old.is_empty();
                if !is_passed_over && (is_whole || deleted == 0) {
                    break;
                }
                passes = if deleted == 0 { passes + 1 } else { 0 };
                if passes >= ROOTS_TRIES {
                    let url = self.store.url();
                    let why =
                        format!("{url}: {prefix} cannot be listed and deleted from in {ROOTS_AGE_MAX:?}");
                    return Err(Error::Local(why));
                }
            }
        }
        Ok(pruned)
    }

    /// Returns the objects under a key prefix that may be deleted, with false if the listing ended early
    /// because [`LISTED_MAX`] objects were found.
    fn list(&self, prefix: &str, roots: &Roots, pruned: &mut PruneReport) -> Result<(Vec<ListEntry>, bool)> {
        let (mut old, mut is_whole) = (Vec::new(), true);
        let before = *pruned;
        self.store.list(prefix, self.limits, &mut |is_again, listed| {
            if is_again {
                (old, is_whole, *pruned) = (Vec::new(), true, before);
            }
            let Some(listed) = listed else { return true };
            pruned.objects += 1;
            pruned.bytes += listed.bytes;
            let expiry = listed.modified.checked_add(self.store.domain().grace);
            match roots.need_of(&listed.key) {
                Need::Tagged => return true,
                Need::Young => {
                    // The parts of an image expire with its manifest, so only the manifest has an expiry
                    // time.
                    let is_image = listed.key.starts_with(MANIFESTS);
                    pruned.keep_young(listed.bytes, expiry.filter(|_| is_image));
                    return true;
                }
                Need::None => {}
            }
            if !self.is_old(listed.modified) {
                pruned.keep_young(listed.bytes, expiry);
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
        is_old(self.clock.min_age(modified), self.store.domain().grace)
    }

    /// Deletes the objects that are still old and unused. Returns the number of deleted objects, and adds
    /// them to `pruned`.
    fn delete(&self, old: &[ListEntry], roots: &Roots, pruned: &mut PruneReport) -> Result<u64> {
        let (deleted, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        // Keys of objects whose deletion may have come after a push rewrote them. The push of a rewritten
        // object must be repeated.
        let late = Mutex::new(Vec::new());
        let outcome = parallel::for_each(AT_ONCE, old.len(), |at| {
            match self.delete_one(&old[at].key, roots) {
                Ok(true) => {
                    deleted.fetch_add(1, Ordering::SeqCst);
                    bytes.fetch_add(old[at].bytes, Ordering::SeqCst);
                }
                Ok(false) => {}
                Err(Error::DeletedLate(key)) => {
                    late.lock().push(key.clone());
                    return Err(Error::DeletedLate(key));
                }
                Err(error) => return Err(error),
            }
            Ok(())
        });
        pruned.deleted += deleted.load(Ordering::SeqCst);
        pruned.deleted_bytes += bytes.load(Ordering::SeqCst);
        let late = late.into_inner();
        if !late.is_empty() {
            return Err(Error::DeletedLate(late.join(", ")));
        }
        outcome.map(|()| deleted.into_inner())
    }

    /// Deletes an object if it is still old. Returns true if the object was deleted. If the roots are stale,
    /// the object is left for the next pass.
    fn delete_one(&self, key: &str, roots: &Roots) -> Result<bool> {
        let (store, limits) = (self.store, self.limits);
        let mut tries = 0;
        loop {
            limits.check().map_err(|fault| Error::of(key, fault))?;
            let looked = store.uptime();
            let since_look = || store.uptime().saturating_sub(looked);
            if roots.are_stale(store) {
                return Ok(false);
            }
            let Some(head) = store.head(key, limits)? else { return Ok(false) };
            if !self.is_old(head.modified) {
                return Ok(false);
            }
            let left = DELETION_TIME_MAX.saturating_sub(since_look());
            if left.is_zero() {
                // The host was suspended or the store is slow, so the age is checked again.
                continue;
            }
            // The deletion is a single attempt, as each attempt needs its own check of the age.
            tries += 1;
            let deleted = store.delete_once(key, head.version.as_ref(), limits.at_most(left));
            // True if the deletion may affect a newer object: the store did not check the version, or may
            // still delete later.
            let is_unknown = match &deleted {
                Ok(is_checked) => !is_checked,
                Err(fault) => fault.is_retryable(),
            };
            if is_unknown && since_look() > DELETION_TIME_MAX + DELETION_SETTLE_TIME {
                return Err(Error::DeletedLate(key.to_owned()));
            }
            match deleted {
                Ok(_) => return Ok(true),
                Err(Fault::Condition) => return Ok(false),
                Err(fault) if fault.is_retryable() && tries < TRIES => thread::sleep(TRY_PAUSE * tries),
                Err(fault) => return Err(Error::of(key, fault)),
            }
        }
    }

    /// Reads the roots (tags and manifests). Repeats the read if it took so long that the roots are already
    /// stale.
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
        let (store, limits) = (self.store, self.limits);
        let read = store.uptime();
        // Manifests are listed before tags. So the image of a push that sets its tag in between is found by
        // its manifest or by the tag.
        let manifests = store.list_all(MANIFESTS, usize::MAX, limits)?;
        let young = manifests.iter().filter(|(_, modified)| !self.is_old(**modified));
        let mut images: BTreeSet<Name> = young.filter_map(|(key, _)| name_of(key)).collect();
        let forgotten = usize::from(mutants::on(Mutant::PruneForgetsTag));
        let tags = store.tag_names(limits)?.into_iter().filter(|tag| !self.without.contains(tag));
        let tags: Vec<String> = tags.skip(forgotten).collect();
        let tagged = Mutex::new(BTreeSet::new());
        parallel::for_each(AT_ONCE, tags.len(), |at| {
            if let Some(read) = store.tag(&tags[at], limits)? {
                tagged.lock().insert(read.tag.manifest);
            }
            Ok::<(), Error>(())
        })?;
        let tagged = tagged.into_inner();
        if tagged.is_empty() {
            return Err(Error::NoTags(store.url().to_owned()));
        }
        images.extend(&tagged);
        // Names of manifests and page hashes, and names of maps, each with true if a tagged image needs the
        // object.
        let found: Mutex<(BTreeMap<Name, bool>, BTreeMap<Name, bool>)> = Mutex::default();
        let all: Vec<Name> = images.iter().copied().collect();
        parallel::for_each(AT_ONCE, all.len(), |at| {
            let image = all[at];
            let is_tagged = tagged.contains(&image);
            let manifest = match store.manifest(&image, limits) {
                // Another prune deleted the untagged image meanwhile.
                Err(error) if !is_tagged && error.is_missing() => return Ok(()),
                manifest => manifest?,
            };
            let mut found = found.lock();
            let (names, maps) = &mut *found;
            *names.entry(image).or_default() |= is_tagged;
            for map in manifest.segments.iter().flat_map(|segment| &segment.maps) {
                *names.entry(map.hashes).or_default() |= is_tagged;
                *maps.entry(map.map).or_default() |= is_tagged;
            }
            Ok::<(), Error>(())
        })?;
        let (names, maps) = found.into_inner();
        let maps: Vec<(Name, bool)> = maps.into_iter().collect();
        let shared = Mutex::new(names);
        parallel::for_each(AT_ONCE, maps.len(), |at| {
            let (name, is_tagged) = maps[at];
            let map = match store.map(&name, limits) {
                // The manifest belongs to a push that was too slow and will set no tag.
                Err(error) if !is_tagged && error.is_missing() => return Ok(()),
                map => map?,
            };
            let mut names = shared.lock();
            for name in iter::once(name).chain(map.chunks().iter().map(|chunk| chunk.name)) {
                *names.entry(name).or_default() |= is_tagged;
            }
            Ok::<(), Error>(())
        })?;
        let names = shared.into_inner();
        let untagged_images = images.difference(&tagged).count() as u64;
        Ok(Roots { names, images: images.len() as u64, untagged_images, read })
    }
}

impl Roots {
    fn are_stale(&self, store: &Store) -> bool {
        store.uptime().saturating_sub(self.read) >= ROOTS_AGE_MAX
    }

    fn need_of(&self, key: &str) -> Need {
        let Some(name) = name_of(key) else {
            // The last part of a clock object's key is a UUID. Objects with other keys without a hash are not
            // from Freestone, and are kept.
            return if key.starts_with(CLOCKS) { Need::None } else { Need::Tagged };
        };
        match self.names.get(&name) {
            Some(true) => Need::Tagged,
            Some(false) => Need::Young,
            None => Need::None,
        }
    }
}

/// Returns the hash at the end of a key, or `None` if the key has no hash. The key of a trace ends with the
/// hash of its image.
fn name_of(key: &str) -> Option<Name> {
    key.rsplit('/').next()?.parse().ok()
}
