//! Models of pages in a file that are supplied to the chain, concurrently with reads, writes and discards.
//! Also models of the record of changed pages when a snapshot is taken.

use super::{Fixture, NOTHING, Pin, SLOT, Snapshot, Swap, View, bounded, continue_requests, pages, pinned};
use crate::slot::Word;
use crate::slot::chain::{Chain, Dirty};
use crate::sync::Arc;
use loom::thread;

/// Object number of the page that is in the file. As in all these models, a page's content is its object
/// number.
const FILE: u64 = 5;

/// A device whose page is in a file until it is loaded.
struct Staged {
    fixture: Arc<Fixture>,
    /// Content that is read for an empty slot: the file's page, or NOTHING after loading.
    parent_content: Swap<u64>,
}

impl Staged {
    fn new() -> Arc<Self> {
        let fixture = Fixture::new();
        fixture.chain().begin_supply();
        Arc::new(Self { fixture, parent_content: Swap::new(Box::new(FILE)) })
    }

    /// Reads like [`Fixture::look`], with the file as parent.
    fn look(&self, pin: &Pin<'_>, view: &View<super::Family>) -> u64 {
        if view.run_of_parent(pin, SLOT, SLOT + 1) > 0 {
            return *self.parent_content.load(pin);
        }
        view.with_page(pin, SLOT, |found| match found {
            Some((_, guard)) => {
                assert_eq!(pages(guard.word()), 1, "an empty slot is taken for a page");
                self.fixture.family.show(&guard)
            }
            None => *self.parent_content.load(pin),
        })
    }

    fn read(&self) -> u64 {
        pinned(|pin| self.look(pin, self.fixture.device.view.load(pin)))
    }

    fn shows(&self, snapshot: &Snapshot) -> u64 {
        pinned(|pin| self.look(pin, &snapshot.view))
    }

    /// Discards the page. While the page may be in the file, the slot is set to a page of zeroes, because an
    /// empty slot would show the file's page.
    fn discard(&self) {
        self.fixture.change(|view| {
            let leaf = view.layer.leaf_or_new(SLOT).unwrap();
            let is_in_file = pinned(|pin| *self.parent_content.load(pin) == FILE);
            let new = if is_in_file { Word::same(NOTHING as u32) } else { Word::EMPTY };
            view.replace(&self.fixture.family, SLOT, leaf.lock(SLOT), new).unwrap();
        });
    }

    fn load(&self, chain: &Chain<super::Family>) {
        let new = self.fixture.family.store(FILE, &chain.origin());
        if !pinned(|pin| chain.supply(&self.fixture.family, pin, SLOT, new)).unwrap() {
            super::ChainFamily::free(&self.fixture.family, new);
        }
        // Each replacement waits for the pins of threads that saw the slot empty.
        self.parent_content.replace(Box::new(FILE));
        self.parent_content.replace(Box::new(NOTHING));
        if let Some(layer) = chain.end_supply() {
            self.fixture.family.retire(&layer);
        }
    }
}

fn spawn(staged: &Arc<Staged>, work: impl FnOnce(&Staged) + 'static) -> thread::JoinHandle<()> {
    let staged = Arc::clone(staged);
    thread::spawn(move || work(&staged))
}

/// While the page is loaded, reads find it in the file or in its slot.
#[test]
fn load_versus_reads() {
    bounded(3, || {
        let staged = Staged::new();
        let chain = staged.fixture.chain();
        let loader = spawn(&staged, move |staged| staged.load(&chain));
        assert_eq!(staged.read(), FILE);
        assert_eq!(staged.read(), FILE);
        loader.join().unwrap();
        assert_eq!(staged.read(), FILE);
        staged.fixture.check_layers(&[&staged.fixture.origin()]);
    });
}

/// A write is executed before or after the load. An older snapshot keeps the file's page in both cases.
#[test]
fn load_versus_a_first_write_with_a_snapshot() {
    bounded(2, || {
        let staged = Staged::new();
        let snapshot = staged.fixture.snapshot();
        let chain = staged.fixture.chain();
        let loader = spawn(&staged, move |staged| staged.load(&chain));
        staged.fixture.write(2);
        assert_eq!(staged.read(), 2);
        assert_eq!(staged.shows(&snapshot), FILE);
        loader.join().unwrap();
        assert_eq!((staged.read(), staged.shows(&snapshot)), (2, FILE));
        staged.fixture.check_layers(&[&staged.fixture.origin(), &snapshot.view.layer]);
    });
}

/// A discarded page does not reappear from the file.
#[test]
#[ignore = "slow lane"]
fn load_versus_a_discard() {
    bounded(3, || {
        let staged = Staged::new();
        let chain = staged.fixture.chain();
        let loader = spawn(&staged, move |staged| staged.load(&chain));
        staged.discard();
        assert_eq!(staged.read(), NOTHING);
        loader.join().unwrap();
        assert_eq!(staged.read(), NOTHING);
        staged.discard();
        assert_eq!(staged.read(), NOTHING);
        staged.fixture.check_layers(&[&staged.fixture.origin()]);
    });
}

/// A rewind while the page is loaded. The old layer is freed once, with the loaded page.
#[test]
fn load_versus_a_rewind() {
    bounded(2, || {
        let staged = Staged::new();
        let chain = staged.fixture.chain();
        let old = chain.origin();
        let loader = spawn(&staged, move |staged| staged.load(&chain));
        staged.fixture.rewind();
        loader.join().unwrap();
        assert_eq!(staged.fixture.read(), NOTHING);
        staged.fixture.check_layers(&[&staged.fixture.origin(), &old]);
    });
}

/// A write is either contained in the snapshot and in the record before it, or only in the record after the
/// snapshot.
#[test]
fn recorded_changes_match_snapshot() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let (before, after) = (Arc::new(Dirty::new()), Arc::new(Dirty::new()));
        assert!(fixture.chain().replace_dirty(Some(Arc::clone(&before))).is_none());
        let writer = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || fixture.rewrite(2))
        };
        let chain = fixture.device.chain.freeze();
        assert!(chain.replace_dirty(Some(Arc::clone(&after))).is_some());
        let snapshot = fixture.attach(&chain);
        continue_requests(chain.thaw());
        writer.join().unwrap();
        let recorded = (before.next(SLOT).is_some(), after.next(SLOT).is_some());
        match fixture.shows(&snapshot) {
            2 => assert_eq!(recorded, (true, false)),
            1 => assert_eq!(recorded, (false, true)),
            other => panic!("{other}"),
        }
        assert_eq!(fixture.read(), 2);
    });
}
