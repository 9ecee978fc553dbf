//! Power cuts at every point of the exception store's operations.
//!
//! # Fault model
//! * A sector of 512 bytes is written completely or not at all. Larger units are not atomic. If a
//!   request did not complete, or completed without a flush, any combination of its sectors may be
//!   on disk. The order of requests does not matter.
//! * A flush makes the writes durable that completed before the flush was submitted, once the flush
//!   itself completes.
//! * A write with FUA is durable when it completes, and does not affect other writes.
//! * Durable sectors do not change without another write, and neither do sectors that were never
//!   written.
//!
//! # What every image must satisfy
//! * The image opens, and has every exception that was reported durable, unless a merge may have
//!   removed the exception.
//! * The image has no exception that was not committed, that was reported removed, or that is at
//!   another position.
//! * The copy of every exception is on the disk.
//! * Work can continue: a new exception is still present after the next open, and nothing else has
//!   changed.
//! * If the snapshot was reported invalid, the image is invalid.
//!
//! If few sectors are uncertain, all their combinations are tried. Otherwise both extremes and a
//! random selection are tried, which depends on the seed.

use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use freestone_core::device::{Blocking, Device, Error, Flags};
use freestone_cow::cow::store::Store;
use freestone_testkit::{Rng, effort};

use super::disk::{Cut, Disk, Event, Note, Recording, SECTOR};
use super::{CHUNK, open, preserve};

/// Maximum number of images that are checked for each point of a recording: in a quick run, and in
/// the slow lane.
const IMAGES: [usize; 2] = [8, 20];
/// After opening an image, work continues from one image in `GO_ON`, chosen at random.
const GO_ON: u64 = 4;
/// Maximum number of recoveries, per recording, during which the power is cut again.
const NESTED_MAX: u64 = 200;
/// Number of the first origin chunk that is preserved after the cut. Chunks of the recording have
/// lower numbers.
const LATER: u64 = 999_999;

/// Chunk number on the COW device of each copy, by origin chunk. Only one sector of each copy is
/// written, to reduce the combinations.
type Places = HashMap<u64, u64>;

fn copy_of(old: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    Rng::new(old).fill(&mut bytes);
    bytes
}

/// Returns the bytes of a used disk whose first sector is zero, so that a new store can be created.
fn used_disk(chunks: u64, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; (chunks * CHUNK) as usize];
    Rng::new(seed).fill(&mut bytes[SECTOR..]);
    bytes
}

// ---- operations of the store --------------------------------------------------------------------

/// Runs random operations on an exception store and records them.
struct Session {
    disk: Arc<Disk>,
    rng: Rng,
    places: Places,
    next: u64,
}

impl Session {
    fn new(chunks: u64, seed: u64) -> Self {
        let disk = Disk::new(used_disk(chunks, seed));
        Self { disk, rng: Rng::new(seed), places: Places::new(), next: 0 }
    }

    /// Preserves `count` origin chunks with up to `depth` copies in flight, committed in any order.
    /// Some allocated places remain unused.
    fn preserve(&mut self, store: &Arc<Store>, count: usize, depth: usize) {
        let (tx, rx) = mpsc::channel();
        let mut copying = Vec::new();
        let mut handed = 0;
        let mut begun = 0;
        while begun < count || !copying.is_empty() {
            if begun < count && copying.len() < depth && self.rng.chance(60) {
                // Some chunks are contiguous, so that a merge finds runs.
                self.next += 1 + if self.rng.chance(30) { self.rng.below(3) } else { 0 };
                let place = store.allocate().expect("there is room");
                begun += 1;
                if self.rng.chance(5) {
                    continue;
                }
                self.places.insert(self.next, place.chunk());
                self.disk.write_at(place.byte(), &copy_of(self.next), Flags::empty()).unwrap();
                copying.push((self.next, place));
            } else if !copying.is_empty() {
                let (old, place) = copying.swap_remove(self.rng.below(copying.len() as u64) as usize);
                self.disk.note(Note::Handed(old));
                let (disk, tx) = (Arc::clone(&self.disk), tx.clone());
                handed += 1;
                store.commit(place, old, Ok(()), move |outcome| {
                    disk.note(if outcome.is_ok() { Note::Durable(old) } else { Note::Invalid });
                    tx.send(outcome).unwrap();
                });
            }
        }
        for _ in 0..handed {
            rx.recv_timeout(super::SOON).expect("every copy is answered").expect("the store is valid");
        }
    }

    /// Merges whole runs or parts of runs from the end of the list, until at least `most`
    /// exceptions or all of them are merged.
    fn merge(&mut self, store: &Arc<Store>, most: u64) {
        let mut merged = 0;
        while merged < most {
            let Some(run) = store.last_run().unwrap() else { return };
            let count = if self.rng.chance(50) { run.count } else { 1 + self.rng.below(run.count) };
            let chunks = run.old + run.count - count..run.old + run.count;
            // A real merge writes the origin at this point.
            chunks.clone().for_each(|old| self.disk.note(Note::Merged(old)));
            store.commit_merge(&run, count).unwrap();
            chunks.for_each(|old| self.disk.note(Note::Removed(old)));
            merged += count;
        }
    }
}

// ---- checks of images ---------------------------------------------------------------------------

struct Check<'a> {
    places: &'a Places,
    /// Exceptions at the start of the recording, as origin chunk and chunk of the COW device.
    before: &'a [(u64, u64)],
    rng: Rng,
    images: u64,
    nested: u64,
}

impl<'a> Check<'a> {
    fn new(places: &'a Places, before: &'a [(u64, u64)], seed: u64) -> Self {
        Self { places, before, rng: Rng::new(seed), images: 0, nested: 0 }
    }

    /// Cuts the power after every event of the recording and checks the images.
    fn all(&mut self, recording: &Recording) {
        let images = effort(IMAGES[0], IMAGES[1]);
        let mut cut = Cut::new(recording);
        loop {
            for image in cut.images(images, &mut self.rng) {
                self.image(&cut, image);
            }
            // A note that only permits more images needs no cut of its own.
            let allows = |event: &Option<Event>| {
                matches!(event, Some(Event::Note(Note::Handed(_) | Note::Merged(_) | Note::Lost)))
            };
            let mut event = cut.step();
            while allows(&event) {
                event = cut.step();
            }
            if event.is_none() {
                break;
            }
        }
        println!("{} events, {} images, {} of a recovery", recording.log.len(), self.images, self.nested);
    }

    fn image(&mut self, cut: &Cut<'_>, image: Vec<u8>) {
        self.images += 1;
        let again = (self.nested < NESTED_MAX).then(|| image.clone());
        let disk = Disk::new(image);
        let (store, found) = open(Arc::clone(&disk) as Arc<dyn Device>);
        let noted = |note| cut.notes.contains(&note);
        assert!(store.is_valid() || noted(Note::Lost), "the snapshot was never given up");
        assert!(!(store.is_valid() && noted(Note::Invalid)), "the snapshot was reported invalid");
        if !store.is_valid() {
            return assert!(found.is_empty());
        }
        let there: BTreeMap<u64, u64> = found.iter().copied().collect();
        for (&old, &new) in &there {
            assert_eq!(self.places.get(&old), Some(&new), "chunk {old} is at {new}");
            assert!(!noted(Note::Removed(old)), "chunk {old} was removed");
            let before = self.before.contains(&(old, new));
            assert!(before || noted(Note::Handed(old)), "chunk {old} was not handed in");
            assert!(disk.holds(new * CHUNK, &copy_of(old)), "the copy of chunk {old} is not there");
        }
        let durable = |note: &Note| if let Note::Durable(old) = note { Some(*old) } else { None };
        let must = cut.notes.iter().filter_map(durable).chain(self.before.iter().map(|&(old, _)| old));
        for old in must {
            assert!(there.contains_key(&old) || noted(Note::Merged(old)), "chunk {old} is lost");
        }
        if let Some(image) = again {
            self.recovery(&disk.recording(image), &found);
        }
        if self.rng.below(GO_ON) == 0 {
            self.go_on(&disk, &store, &found);
        }
    }

    /// Cuts the power again during the writes of a recovery. Opening must find the same exceptions.
    fn recovery(&mut self, recording: &Recording, found: &[(u64, u64)]) {
        let mut cut = Cut::new(recording);
        while cut.step().is_some() {
            for image in cut.images(8, &mut self.rng) {
                assert_eq!(open(Disk::new(image) as Arc<dyn Device>).1, found, "recovery that was cut");
                self.nested += 1;
            }
        }
    }

    /// Adds exceptions after the cut. Old exceptions stay, and torn entries do not reappear.
    fn go_on(&mut self, disk: &Arc<Disk>, store: &Arc<Store>, found: &[(u64, u64)]) {
        let mut expected = found.to_vec();
        // Commits exceptions one at a time, because each one fills a part of the gap before torn
        // entries.
        for old in LATER..LATER + 1 + self.rng.below(40) {
            let new = preserve(store, old);
            assert!(!expected.iter().any(|&(_, other)| other == new), "chunk {new} is used twice");
            expected.push((old, new));
            if old == LATER {
                assert_eq!(open(Disk::new(disk.bytes()) as Arc<dyn Device>).1, expected);
            }
        }
        assert_eq!(open(Disk::new(disk.bytes()) as Arc<dyn Device>).1, expected);
    }
}

// ---- tests --------------------------------------------------------------------------------------

#[test]
fn creating_a_store_can_be_cut() {
    let base = used_disk(128, 1);
    let disk = Disk::new(base.clone());
    drop(open(Arc::clone(&disk) as Arc<dyn Device>));
    Check::new(&Places::new(), &[], 1).all(&disk.recording(base));
}

/// Only few copies are in flight, so all combinations of sectors are tried.
#[test]
fn commits_can_be_cut() {
    for seed in 0..effort(1, 4) {
        let mut session = Session::new(128, seed);
        let (store, _) = open(Arc::clone(&session.disk) as Arc<dyn Device>);
        let base = session.disk.start();
        session.preserve(&store, 24, 4);
        let recording = session.disk.recording(base);
        Check::new(&session.places, &[], seed).all(&recording);
    }
}

/// Many copies are in flight, so groups of entries are larger than a sector and may be torn.
#[test]
fn large_groups_can_be_cut() {
    for seed in 10..10 + effort(1, 3) {
        let mut session = Session::new(200, seed);
        let (store, _) = open(Arc::clone(&session.disk) as Arc<dyn Device>);
        let base = session.disk.start();
        session.preserve(&store, 120, 80);
        let recording = session.disk.recording(base);
        Check::new(&session.places, &[], seed).all(&recording);
    }
}

/// An area becomes full during the run, and the next area contains old data.
#[test]
fn filling_an_area_can_be_cut() {
    for seed in 20..20 + effort(1, 3) {
        let mut session = Session::new(360, seed);
        let (store, _) = open(Arc::clone(&session.disk) as Arc<dyn Device>);
        session.preserve(&store, 250, 250);
        drop(store);
        let (store, before) = open(Arc::clone(&session.disk) as Arc<dyn Device>);
        let base = session.disk.start();
        session.preserve(&store, 40, 6);
        assert!(store.usage().metadata > 2 * 8, "the area did not fill up");
        let recording = session.disk.recording(base);
        Check::new(&session.places, &before, seed).all(&recording);
    }
}

/// A merge runs backwards through two areas until the list is empty. New exceptions are added
/// during the merge and after it.
#[test]
fn merge_can_be_cut() {
    for seed in 30..30 + effort(1, 2) {
        let mut session = Session::new(400, seed);
        let (store, _) = open(Arc::clone(&session.disk) as Arc<dyn Device>);
        session.preserve(&store, 310, 100);
        drop(store);
        let (store, before) = open(Arc::clone(&session.disk) as Arc<dyn Device>);
        let base = session.disk.start();
        session.merge(&store, 30);
        session.preserve(&store, 12, 4);
        session.merge(&store, 60);
        session.merge(&store, u64::MAX);
        let usage = store.usage();
        assert_eq!((usage.allocated, usage.metadata), (16, 16), "everything is merged");
        session.preserve(&store, 12, 4);
        let recording = session.disk.recording(base);
        Check::new(&session.places, &before, seed).all(&recording);
    }
}

/// The snapshot becomes invalid while commits are in flight.
#[test]
fn invalidation_can_be_cut() {
    for seed in 40..40 + effort(2, 10) {
        let mut session = Session::new(128, seed);
        let (store, _) = open(Arc::clone(&session.disk) as Arc<dyn Device>);
        session.preserve(&store, 10, 4);
        drop(store);
        let (store, before) = open(Arc::clone(&session.disk) as Arc<dyn Device>);
        let base = session.disk.start();
        session.preserve(&store, 6, 3);
        let places: Vec<_> = (0..4).map(|_| store.allocate().unwrap()).collect();
        let answered = Arc::new(Mutex::new(0));
        session.disk.note(Note::Lost);
        for place in places {
            session.next += 1;
            session.disk.note(Note::Handed(session.next));
            session.places.insert(session.next, place.chunk());
            session.disk.write_at(place.byte(), &copy_of(session.next), Flags::empty()).unwrap();
            let copied = if session.rng.chance(30) { Err(Error::Media) } else { Ok(()) };
            let (disk, answered, old) = (Arc::clone(&session.disk), Arc::clone(&answered), session.next);
            store.commit(place, session.next, copied, move |outcome| {
                disk.note(if outcome.is_ok() { Note::Durable(old) } else { Note::Invalid });
                *answered.lock().unwrap() += 1;
            });
        }
        let disk = Arc::clone(&session.disk);
        store.invalidate(move || disk.note(Note::Invalid));
        drop(store);
        assert_eq!(*answered.lock().unwrap(), 4);
        let recording = session.disk.recording(base);
        Check::new(&session.places, &before, seed).all(&recording);
    }
}
