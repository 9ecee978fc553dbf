//! Power cuts at every point of the store's operations.
//!
//! # Fault model
//! * A sector of 512 bytes is written completely or not at all. Larger units are not atomic: of a
//!   request that did not complete, or that completed and was not flushed, any combination of
//!   sectors may be on disk, whatever the order of requests.
//! * A flush makes durable what completed before the flush was submitted, and only once the flush
//!   itself completes.
//! * A write with FUA is durable when it completes. It does not affect other writes.
//! * Durable sectors stay as they are, and so do sectors that were never written.
//!
//! # What every image must satisfy
//! * The image opens, and has everything that was reported durable (unless a merge may have removed
//!   it).
//! * The image has nothing that was not committed, nothing that was reported removed, and nothing
//!   at another position.
//! * Every exception has its copy.
//! * Work can continue: a new exception exists after the next open, and nothing else changed.
//! * If the snapshot was reported invalid, the image is invalid.
//!
//! If few sectors are uncertain, all combinations are tried; else both extremes and a seeded
//! selection.

use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use freestone::cow::store::Store;
use freestone::device::{Blocking, Device, Error, Flags};
use freestone_testkit::{Rng, effort};

use super::disk::{Cut, Disk, Event, Note, Recording, SECTOR};
use super::{CHUNK, open, preserve};

/// Images for each point, in a quick run and in the slow lane.
const IMAGES: [usize; 2] = [8, 20];
/// Work continues from one image in `GO_ON`.
const GO_ON: u64 = 4;
/// Maximum number of recoveries that are cut in turn, for one recording.
const NESTED_MAX: u64 = 200;
/// Chunk of the origin that is preserved after the cut.
const LATER: u64 = 999_999;

/// Position of every copy. Only one sector of each copy is written, to reduce the combinations.
type Places = HashMap<u64, u64>;

fn copy_of(old: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    Rng::new(old).fill(&mut bytes);
    bytes
}

/// Returns the bytes of a used disk, with an empty first sector.
fn used_disk(chunks: u64, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; (chunks * CHUNK) as usize];
    Rng::new(seed).fill(&mut bytes[SECTOR..]);
    bytes
}

// ---- operations of the store --------------------------------------------------------------------

/// Runs random operations on a store and records them.
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

    /// Preserves `count` chunks with up to `depth` copies in flight, committed in any order. Some
    /// places are not used.
    fn preserve(&mut self, store: &Arc<Store>, count: usize, depth: usize) {
        let (tx, rx) = mpsc::channel();
        let mut copying = Vec::new();
        let mut handed = 0;
        let mut begun = 0;
        while begun < count || !copying.is_empty() {
            if begun < count && copying.len() < depth && self.rng.chance(60) {
                // Some chunks are contiguous, for a merge.
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

    /// Merges at most `most` exceptions, as runs or parts of runs.
    fn merge(&mut self, store: &Arc<Store>, most: u64) {
        let mut merged = 0;
        while merged < most {
            let Some(run) = store.last_run().unwrap() else { return };
            let count = if self.rng.chance(50) { run.count } else { 1 + self.rng.below(run.count) };
            let chunks = run.old + run.count - count..run.old + run.count;
            // A merge writes the origin here.
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
    /// Exceptions at the start of the recording.
    before: &'a [(u64, u64)],
    rng: Rng,
    images: u64,
    nested: u64,
}

impl<'a> Check<'a> {
    fn new(places: &'a Places, before: &'a [(u64, u64)], seed: u64) -> Self {
        Self { places, before, rng: Rng::new(seed), images: 0, nested: 0 }
    }

    /// Cuts the recording at every event.
    fn all(&mut self, recording: &Recording) {
        let images = effort(IMAGES[0], IMAGES[1]);
        let mut cut = Cut::new(recording);
        loop {
            for image in cut.images(images, &mut self.rng) {
                self.image(&cut, image);
            }
            // A note that only permits more images needs no check of its own.
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

    /// Writes of the recovery can be cut again, with the same result.
    fn recovery(&mut self, recording: &Recording, found: &[(u64, u64)]) {
        let mut cut = Cut::new(recording);
        while cut.step().is_some() {
            for image in cut.images(8, &mut self.rng) {
                assert_eq!(open(Disk::new(image) as Arc<dyn Device>).1, found, "recovery that was cut");
                self.nested += 1;
            }
        }
    }

    /// New exceptions follow the old ones, and torn entries do not reappear.
    fn go_on(&mut self, disk: &Arc<Disk>, store: &Arc<Store>, found: &[(u64, u64)]) {
        let mut expected = found.to_vec();
        // One at a time: each fills a gap.
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

/// Few copies in flight, so all combinations of sectors are tried.
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

/// Many copies in flight: groups larger than a sector, which may be torn.
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

/// The area becomes full during the run, and the next area has old data.
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

/// A merge runs backwards through two areas to the end, with new exceptions during and after it.
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

/// The snapshot becomes invalid during commits.
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
