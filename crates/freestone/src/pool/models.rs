//! loom models of the states of spans: two objects a span, two spans.

use loom::cell::UnsafeCell;
use loom::thread;

use super::spans::{Freed, Spans};
use crate::sync::{Arc, Mutex};

const OBJECTS: u32 = 2;

/// A class with one CPU's current span, as in the pool but without its memory.
struct Model {
    spans: Spans,
    current: Mutex<Option<u32>>,
    unused: Mutex<Vec<u32>>,
    memory: [[UnsafeCell<u32>; OBJECTS as usize]; 2],
}

fn model() -> Arc<Model> {
    let memory = std::array::from_fn(|_| std::array::from_fn(|_| UnsafeCell::new(0)));
    Arc::new(Model {
        spans: Spans::new(1),
        current: Mutex::new(None),
        unused: Mutex::new(vec![0, 1]),
        memory,
    })
}

impl Model {
    fn alloc(&self) -> (u32, usize) {
        let mut current = self.current.lock();
        let taken = loop {
            if let Some(span) = *current {
                if let Some(object) = self.spans.lowest_free(span) {
                    self.spans.take(span, object);
                    break (span, object);
                }
                *current = None;
                self.give_up(span);
            }
            *current = Some(self.spans.own_fullest(0).unwrap_or_else(|| {
                let span = self.unused.lock().pop().expect("three objects never need a third span");
                self.spans.adopt(span, 0, OBJECTS);
                span
            }));
        };
        drop(current);
        // loom reports it if the last user of the place is not through.
        self.memory[taken.0 as usize][taken.1].with_mut(|_| ());
        taken
    }

    fn free(&self, (span, object): (u32, usize)) {
        self.memory[span as usize][object].with_mut(|_| ());
        match self.spans.put(span, object, OBJECTS) {
            Freed::Fine => {}
            Freed::Refile => {
                if self.spans.refile(span, 0, OBJECTS) {
                    self.unused.lock().push(span);
                }
            }
            Freed::EmptyOwned => {
                let mut current = self.current.lock();
                if *current == Some(span) && self.spans.used(span) == 0 {
                    *current = None;
                    self.give_up(span);
                }
            }
        }
    }

    fn give_up(&self, span: u32) {
        if self.spans.disown(span, 0, OBJECTS) {
            self.unused.lock().push(span);
        }
    }

    /// Nothing is in use: every span must have come back.
    fn check_empty(&self) {
        if let Some(span) = self.current.lock().take() {
            self.give_up(span);
        }
        assert_eq!(self.spans.own_fullest(0), None, "an empty span stays listed");
        assert_eq!(self.unused.lock().len(), 2, "a span is lost");
    }
}

fn check(body: fn(Arc<Model>)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || body(model()));
}

#[test]
fn two_threads_allocate_and_free() {
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

/// Both objects of a full span are freed at once: exactly one of the two takes the empty span away.
#[test]
fn two_threads_empty_a_full_span() {
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

/// A span is given up by its owner while its last object is freed by another.
#[test]
fn the_last_object_goes_while_the_owner_gives_up() {
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

/// A freer that was overtaken looks at a span which meanwhile serves again: it leaves it alone.
#[test]
fn a_late_refile_finds_the_span_in_use_again() {
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
