//! Pages that lie in a file until they are supplied to the chain, beside those who read, write and
//! discard them; and what changes is noted at the moment of a snapshot.

use super::{NOTHING, Pin, SLOT, Snapshot, Swap, View, World, bounded, carry_on, pages, pinned};
use crate::slot::Word;
use crate::slot::chain::{Chain, Dirty};
use crate::sync::Arc;
use loom::thread;

/// The object that has the page of the file; it shows its own number.
const FILE: u64 = 5;

/// A device of which the page lies in a file.
struct Staged {
    world: Arc<World>,
    /// What an empty slot shows: the file's page, or nothing when all is loaded.
    here: Swap<u64>,
}

impl Staged {
    fn new() -> Arc<Self> {
        let world = World::new();
        world.chain().begin_supply();
        Arc::new(Self { world, here: Swap::new(Box::new(FILE)) })
    }

    /// As [`World::look`], to the file.
    fn look(&self, pin: &Pin<'_>, view: &View<super::Family>) -> u64 {
        if view.run_of_parent(pin, SLOT, SLOT + 1) > 0 {
            return *self.here.load(pin);
        }
        view.with_page(pin, SLOT, |found| match found {
            Some((_, guard)) => {
                assert_eq!(pages(guard.word()), 1, "an empty slot is taken for a page");
                self.world.family.show(&guard)
            }
            None => *self.here.load(pin),
        })
    }

    fn read(&self) -> u64 {
        pinned(|pin| self.look(pin, self.world.device.view.load(pin)))
    }

    fn shows(&self, snapshot: &Snapshot) -> u64 {
        pinned(|pin| self.look(pin, &snapshot.view))
    }

    /// As long as the page may be in the file what is emptied is covered.
    fn discard(&self) {
        self.world.change(|view| {
            let leaf = view.layer.leaf_or_new(SLOT).unwrap();
            let is_here = pinned(|pin| *self.here.load(pin) == FILE);
            let new = if is_here { Word::same(NOTHING as u32) } else { Word::EMPTY };
            view.replace(&self.world.family, SLOT, leaf.lock(SLOT), new).unwrap();
        });
    }

    /// All that the loader does.
    fn load(&self, chain: &Chain<super::Family>) {
        let new = self.world.family.store(FILE, &chain.origin());
        if !pinned(|pin| chain.supply(&self.world.family, pin, SLOT, new)).unwrap() {
            super::Kin::free(&self.world.family, new);
        }
        // Waits for those who have seen the slot empty before.
        self.here.replace(Box::new(FILE));
        self.here.replace(Box::new(NOTHING));
        if let Some(layer) = chain.end_supply() {
            self.world.family.retire(&layer);
        }
    }
}

fn spawn(staged: &Arc<Staged>, work: impl FnOnce(&Staged) + 'static) -> thread::JoinHandle<()> {
    let staged = Arc::clone(staged);
    thread::spawn(move || work(&staged))
}

/// Who reads while the page goes from the file into its slot sees it in one of both.
#[test]
fn load_versus_reads() {
    bounded(3, || {
        let staged = Staged::new();
        let chain = staged.world.chain();
        let loader = spawn(&staged, move |staged| staged.load(&chain));
        assert_eq!(staged.read(), FILE);
        assert_eq!(staged.read(), FILE);
        loader.join().unwrap();
        assert_eq!(staged.read(), FILE);
        staged.world.holds(&[&staged.world.origin()]);
    });
}

/// A writer wins, or comes after; a snapshot from before keeps the file's page either way.
#[test]
fn load_versus_a_first_write_with_a_snapshot() {
    bounded(2, || {
        let staged = Staged::new();
        let snapshot = staged.world.snapshot();
        let chain = staged.world.chain();
        let loader = spawn(&staged, move |staged| staged.load(&chain));
        staged.world.write(2);
        assert_eq!(staged.read(), 2);
        assert_eq!(staged.shows(&snapshot), FILE);
        loader.join().unwrap();
        assert_eq!((staged.read(), staged.shows(&snapshot)), (2, FILE));
        staged.world.holds(&[&staged.world.origin(), &snapshot.view.layer]);
    });
}

/// What was discarded does not come back from the file.
#[test]
#[ignore = "slow lane"]
fn load_versus_a_discard() {
    bounded(3, || {
        let staged = Staged::new();
        let chain = staged.world.chain();
        let loader = spawn(&staged, move |staged| staged.load(&chain));
        staged.discard();
        assert_eq!(staged.read(), NOTHING);
        loader.join().unwrap();
        assert_eq!(staged.read(), NOTHING);
        staged.discard();
        assert_eq!(staged.read(), NOTHING);
        staged.world.holds(&[&staged.world.origin()]);
    });
}

/// The device is rewound while its page is loaded: the old layer is freed once, with what came.
#[test]
fn load_versus_a_rewind() {
    bounded(2, || {
        let staged = Staged::new();
        let chain = staged.world.chain();
        let old = chain.origin();
        let loader = spawn(&staged, move |staged| staged.load(&chain));
        staged.world.rewind();
        loader.join().unwrap();
        assert_eq!(staged.world.read(), NOTHING);
        staged.world.holds(&[&staged.world.origin(), &old]);
    });
}

/// A write is in the snapshot, and noted before its moment; or it is neither.
#[test]
fn what_is_noted_is_of_the_snapshots_moment() {
    bounded(3, || {
        let world = World::written(1);
        let (before, after) = (Arc::new(Dirty::new()), Arc::new(Dirty::new()));
        assert!(world.chain().note_changes(Some(Arc::clone(&before))).is_none());
        let writer = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.rewrite(2))
        };
        let chain = world.device.chain.freeze();
        assert!(chain.note_changes(Some(Arc::clone(&after))).is_some());
        let snapshot = world.attach(&chain);
        carry_on(chain.thaw());
        writer.join().unwrap();
        let noted = (before.next(SLOT).is_some(), after.next(SLOT).is_some());
        match world.shows(&snapshot) {
            2 => assert_eq!(noted, (true, false)),
            1 => assert_eq!(noted, (false, true)),
            other => panic!("{other}"),
        }
        assert_eq!(world.read(), 2);
    });
}
