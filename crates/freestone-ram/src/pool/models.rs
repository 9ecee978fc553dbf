//! loom models of span states, and of compaction concurrent with readers and writers. The models
//! have two spans of two objects each.
#![expect(unsafe_code)]
// UNSAFETY: the objects of the models are in loom's `UnsafeCell`, which reports concurrent accesses.

use loom::cell::UnsafeCell;
use loom::thread;

use super::spans::{FreeOutcome, OwnedSpan, Spans, UnusedSpan};
use freestone_core::parking::Parking;
use freestone_core::slot::{Word, lock};
use freestone_core::sync::{Arc, AtomicU64, Mutex};

const OBJECTS: u32 = 2;
/// Class of all objects but one. A span that was moved to the other class must not be changed.
const CLASS: usize = 0;
const OTHER_CLASS: usize = 1;

/// A class with the current span of one CPU, as in the pool but without memory.
struct Model {
    spans: Spans,
    current: Mutex<Option<OwnedSpan>>,
    unused: Mutex<Vec<UnusedSpan>>,
    memory: [[UnsafeCell<u32>; OBJECTS as usize]; 2],
}

fn model() -> Arc<Model> {
    let memory = std::array::from_fn(|_| std::array::from_fn(|_| UnsafeCell::new(0)));
    Arc::new(Model {
        spans: Spans::new(2),
        current: Mutex::new(None),
        // SAFETY: all spans of a new model are unused.
        unused: Mutex::new([0, 1].map(|span| unsafe { UnusedSpan::new(span) }).into()),
        memory,
    })
}

impl Model {
    fn alloc(&self) -> (u32, usize) {
        let mut current = self.current.lock();
        let taken = loop {
            if let Some(span) = current.take() {
                if let Some(object) = self.spans.lowest_free(&span) {
                    self.spans.take(&span, object);
                    break (current.insert(span).number(), object);
                }
                self.give_up(span);
            }
            *current = Some(self.spans.own_fullest(CLASS).unwrap_or_else(|| {
                let span = self.unused.lock().pop().expect("three objects never need a third span");
                self.spans.adopt(span, CLASS, OBJECTS)
            }));
        };
        drop(current);
        // loom reports an error here if the last user of the object has not finished.
        self.memory[taken.0 as usize][taken.1].with_mut(|_| ());
        taken
    }

    fn free(&self, (span, object): (u32, usize)) {
        self.memory[span as usize][object].with_mut(|_| ());
        match self.spans.put(span, object, OBJECTS) {
            FreeOutcome::Done => {}
            FreeOutcome::Refile => {
                if let Some(span) = self.spans.refile(span, CLASS, OBJECTS) {
                    self.unused.lock().push(span);
                }
            }
            FreeOutcome::EmptyOwned => {
                let mut current = self.current.lock();
                let empty = |own: &mut OwnedSpan| own.number() == span && self.spans.used(own) == 0;
                if let Some(span) = current.take_if(empty) {
                    self.give_up(span);
                }
            }
        }
    }

    fn give_up(&self, span: OwnedSpan) {
        if let Some(span) = self.spans.disown(span, CLASS, OBJECTS) {
            self.unused.lock().push(span);
        }
    }

    /// Checks that all spans are unused again when no object is used.
    fn check_empty(&self) {
        if let Some(span) = self.current.lock().take() {
            self.give_up(span);
        }
        assert_eq!(self.spans.own_fullest(CLASS), None, "an empty span stays listed");
        assert_eq!(self.unused.lock().len(), 2, "a span is lost");
    }
}

fn check(body: fn(Arc<Model>)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || body(model()));
}

#[test]
fn span_alloc_and_free_race() {
    check(|model| {
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let object = model.alloc();
                model.free(object);
            })
        };
        let (a, b) = (model.alloc(), model.alloc());
        assert_ne!(a, b);
        model.free(a);
        model.free(b);
        other.join().unwrap();
        model.check_empty();
    });
}

/// Two threads free the two objects of a full span. Exactly one of them must remove the empty span.
#[test]
fn full_span_freed_by_two_threads() {
    check(|model| {
        let (a, b, c) = (model.alloc(), model.alloc(), model.alloc());
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.free(a))
        };
        model.free(b);
        other.join().unwrap();
        model.free(c);
        model.check_empty();
    });
}

/// A thread frees the last object while the owner gives up the span.
#[test]
fn last_free_races_with_disown() {
    check(|model| {
        let a = model.alloc();
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.free(a))
        };
        let span = model.current.lock().take();
        if let Some(span) = span {
            model.give_up(span);
        }
        other.join().unwrap();
        model.check_empty();
    });
}

/// A thread that is late to refile a span must not change a span that is in use again.
#[test]
fn late_refile_of_reused_span() {
    check(|model| {
        let (a, b, c) = (model.alloc(), model.alloc(), model.alloc());
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.free(a))
        };
        model.free(b);
        let d = model.alloc();
        other.join().unwrap();
        model.free(c);
        model.free(d);
        model.check_empty();
    });
}

/// A thread that is late to refile a span must not change a span that is in another class now.
#[test]
fn late_refile_of_span_in_other_class() {
    check(|model| {
        let (a, b, c) = (model.alloc(), model.alloc(), model.alloc());
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.free(a))
        };
        model.free(b);
        let span = model.unused.lock().pop();
        let number = span.map(|span| {
            let span = model.spans.adopt(span, OTHER_CLASS, OBJECTS);
            model.spans.take(&span, 0);
            let number = span.number();
            assert_eq!(model.spans.disown(span, OTHER_CLASS, OBJECTS), None);
            number
        });
        other.join().unwrap();
        if let Some(number) = number {
            let span = model.spans.own_fullest(OTHER_CLASS);
            let span = span.filter(|span| span.number() == number);
            let span = span.expect("the late freer refiled it in its old class");
            assert_eq!(model.spans.put(number, 0, OBJECTS), FreeOutcome::EmptyOwned);
            let span = model.spans.disown(span, OTHER_CLASS, OBJECTS).expect("it is empty");
            model.unused.lock().push(span);
        }
        model.free(c);
        model.check_empty();
    });
}

/// A disk with one slot, whose object compaction moves.
struct Disk {
    model: Arc<Model>,
    slot: AtomicU64,
    parking: Parking,
}

const OLD: u32 = 7;
const NEW: u32 = 9;

fn location((span, object): (u32, usize)) -> u64 {
    u64::from(span * OBJECTS) + object as u64
}

fn place(location: u64) -> (u32, usize) {
    ((location / u64::from(OBJECTS)) as u32, (location % u64::from(OBJECTS)) as usize)
}

impl Disk {
    fn read(&self, location: u64) -> u32 {
        let (span, object) = place(location);
        // SAFETY: loom reports a read that overlaps a write.
        self.model.memory[span as usize][object].with(|bytes| unsafe { *bytes })
    }

    fn write(&self, location: u64, value: u32) {
        let (span, object) = place(location);
        // SAFETY: loom reports an overlapping access.
        self.model.memory[span as usize][object].with_mut(|bytes| unsafe { *bytes = value });
    }

    /// Runs one round of compaction of the class, like `pool::compact`.
    fn compact(&self) {
        let (spans, model) = (&self.model.spans, &self.model);
        if let Some(span) = model.current.lock().take() {
            model.give_up(span);
        }
        let Some(source) = spans.own_emptiest(CLASS) else { return };
        let target = spans.own_fullest(CLASS);
        for object in (0..OBJECTS as usize).filter(|&object| spans.is_taken(&source, object)) {
            let Some(target) = &target else { break };
            let Some(free) = spans.lowest_free(target) else { break };
            spans.take(target, free);
            let (from, hole) = ((source.number(), object), (target.number(), free));
            let mut unused = hole;
            let guard = lock(&self.slot, &self.parking);
            if guard.word().object() == Some(location(from)) {
                self.write(location(hole), self.read(location(from)));
                guard.publish(Word::huge(location(hole)));
                unused = from;
            } else {
                drop(guard);
            }
            model.free(unused);
        }
        model.give_up(source);
        if let Some(target) = target {
            model.give_up(target);
        }
    }

    fn look(&self) {
        let guard = lock(&self.slot, &self.parking);
        if let Some(location) = guard.word().object() {
            let value = self.read(location);
            assert!(value == OLD || value == NEW, "a reader sees {value}");
        }
    }

    /// Overwrites the object of the slot in place.
    fn overwrite(&self) {
        let guard = lock(&self.slot, &self.parking);
        let word = guard.word();
        self.write(word.object().expect("only this thread changes what the slot holds"), NEW);
        guard.publish(word);
    }

    /// Stores a new object in the slot, if the model has free memory.
    fn write_elsewhere(&self) {
        let taken = {
            let mut current = self.model.current.lock();
            let own = current.take().or_else(|| self.model.spans.own_fullest(CLASS));
            let Some(span) = own else { return };
            let span = current.insert(span);
            let Some(object) = self.model.spans.lowest_free(span) else { return };
            self.model.spans.take(span, object);
            (span.number(), object)
        };
        self.write(location(taken), NEW);
        self.replace(Word::huge(location(taken)));
    }

    fn discard(&self) {
        self.replace(Word::EMPTY);
    }

    fn replace(&self, new: Word) {
        let guard = lock(&self.slot, &self.parking);
        let old = guard.word().object().expect("only this thread changes what the slot holds");
        guard.publish(new);
        self.model.free(place(old));
    }
}

fn move_against(change: Option<fn(&Disk)>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let model = model();
        // The first span contains the slot's object and a free place; the other contains an
        // unrelated object.
        let (hole, held, other) = (model.alloc(), model.alloc(), model.alloc());
        let disk = Arc::new(Disk { model, slot: AtomicU64::new(0), parking: Parking::default() });
        disk.write(location(held), OLD);
        lock(&disk.slot, &disk.parking).publish(Word::huge(location(held)));
        disk.model.free(hole);
        let run = |work: fn(&Disk)| {
            let disk = Arc::clone(&disk);
            thread::spawn(move || work(&disk))
        };
        let compactor = run(Disk::compact);
        let changer = change.map(run);
        disk.look();
        compactor.join().unwrap();
        if let Some(changer) = changer {
            changer.join().unwrap();
        }
        disk.look();
        let left = lock(&disk.slot, &disk.parking).word().object();
        if let Some(location) = left {
            disk.model.free(place(location));
        }
        disk.model.free(other);
        disk.model.check_empty();
    });
}

#[test]
fn object_move_races_with_read() {
    move_against(None);
}

#[test]
fn object_move_races_with_replace() {
    move_against(Some(Disk::write_elsewhere));
}

#[test]
fn object_move_races_with_overwrite() {
    move_against(Some(Disk::overwrite));
}

#[test]
fn object_move_races_with_discard() {
    move_against(Some(Disk::discard));
}
