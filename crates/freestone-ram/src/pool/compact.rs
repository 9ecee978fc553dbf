//! Compaction: moves objects of sparse spans into free places of fuller ones, concurrently with
//! requests.

use super::class::{CLASS, CLASSES};
use super::spans::OwnedSpan;
use super::{BackRef, NewObject, Place, Pool, pages_to_hold};
use freestone_core::PAGE_BYTES;
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::slot::SlotGuard;
use freestone_core::sync::Ordering;

pub trait Owners {
    /// Calls `work` with the slot of `owner` locked. Does nothing if the slot's table was dropped.
    fn with_slot(&self, owner: BackRef, work: &mut dyn FnMut(SlotGuard<'_>));
}

impl Pool {
    /// Compacts every class into as few pages as possible, and returns the number of pages
    /// released to the system. If another compaction is running, returns 0 at once, as the kernel does.
    /// Compaction needs no free memory in the pool.
    ///
    /// `watch` receives the bytes of the spans visited and of all spans; compaction ends when
    /// `watch` returns false.
    pub fn compact(&self, owners: &dyn Owners, watch: &mut dyn FnMut(u64, u64) -> bool) -> u64 {
        self.compact_classes(0..CLASSES, owners, watch)
    }

    /// Compacts one class only, as a bounded piece of work; returns the same as
    /// [`compact`](Self::compact).
    pub fn compact_one(&self, class: usize, owners: &dyn Owners) -> u64 {
        self.compact_classes(class..class + 1, owners, &mut |_, _| true)
    }

    fn compact_classes(
        &self,
        classes: std::ops::Range<usize>,
        owners: &dyn Owners,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> u64 {
        let Some(_one) = self.compacting.try_lock() else { return 0 };
        let before = self.pages();
        // Relaxed: the count is used for progress, and to limit the rounds.
        let spans = |class: usize| self.population[class].load(Ordering::Relaxed);
        let span_bytes = |class: usize| u64::from(CLASS[class].pages) * PAGE_BYTES as u64;
        let all = classes.clone().map(|class| u64::from(spans(class)) * span_bytes(class)).sum();
        let mut done = 0;
        for class in classes.rev() {
            let mut go_on = true;
            let rounds = spans(class);
            self.compact_class(class, rounds, owners, &mut |rounds| {
                go_on = watch((done + u64::from(rounds) * span_bytes(class)).min(all), all);
                go_on
            });
            done += u64::from(rounds) * span_bytes(class);
            if !go_on {
                break;
            }
        }
        self.release_empties();
        before.saturating_sub(self.pages())
    }

    fn compact_class(
        &self,
        class: usize,
        rounds: u32,
        owners: &dyn Owners,
        go_on: &mut dyn FnMut(u32) -> bool,
    ) {
        self.list_currents(class);
        // Owned spans that can be neither emptied nor filled further.
        let mut settled = Vec::new();
        let mut target = None;
        // Requests fill and empty spans meanwhile, so limit the rounds to the present number of
        // spans.
        let mut whole = true;
        for round in 0..rounds {
            whole = go_on(round);
            if !whole {
                break;
            }
            let Some(source) = self.spans.own_emptiest(class) else { break };
            let room = self.empty_span(&source, class, &mut target, &mut settled, owners);
            if self.spans.used(&source) == 0 {
                self.release_span(source, class);
            } else {
                settled.push(source);
            }
            if !room {
                break;
            }
        }
        for span in settled.into_iter().chain(target) {
            if whole {
                self.pack_span(&span, class, owners);
            }
            self.release_span(span, class);
        }
    }

    /// Moves the objects of an owned span into free resident places of other spans. Returns false
    /// if no such place is left.
    fn empty_span(
        &self,
        source: &OwnedSpan,
        class: usize,
        target: &mut Option<OwnedSpan>,
        settled: &mut Vec<OwnedSpan>,
        owners: &dyn Owners,
    ) -> bool {
        for object in self.objects_of(source, class) {
            let (to, hole) = loop {
                let Some(span) = target.take().or_else(|| self.spans.own_fullest(class)) else {
                    return false;
                };
                if let Some(hole) = self.resident_hole(&span, class, CLASS[class].objects as usize) {
                    break (&*target.insert(span), hole);
                }
                settled.push(span);
            };
            self.move_object(class, (source, object), (to, hole), owners);
        }
        true
    }

    /// Iterates over the objects of a span that are in use at this moment, in ascending order.
    fn objects_of(&self, span: &OwnedSpan, class: usize) -> impl DoubleEndedIterator<Item = usize> {
        (0..CLASS[class].objects as usize).filter(move |&object| self.spans.is_taken(span, object))
    }

    /// Moves the last objects of an owned span into its first free places, and returns the pages
    /// behind the remaining objects to the system.
    fn pack_span(&self, span: &OwnedSpan, class: usize, owners: &dyn Owners) {
        for object in self.objects_of(span, class).rev() {
            let Some(hole) = self.resident_hole(span, class, object) else { break };
            self.move_object(class, (span, object), (span, hole), owners);
        }
        let last = self.objects_of(span, class).next_back();
        self.trim(span, last.map_or(0, |object| pages_to_hold(&CLASS[class], object)));
    }

    /// Moves an object if its slot still holds it. An object that no slot holds is about to be
    /// published or freed by another thread, and stays.
    fn move_object(
        &self,
        class: usize,
        (source, object): (&OwnedSpan, usize),
        (target, hole): (&OwnedSpan, usize),
        owners: &dyn Owners,
    ) {
        let owner = self.backrefs.get(source, object);
        let from = Place { span: source.number(), object, class }.location();
        let mut taken = self.take(target, hole, class, owner);
        let NewObject(place) = taken;
        let mut unused = place.location();
        owners.with_slot(owner, &mut |guard| {
            let word = guard.word();
            if word.object() == Some(from) {
                self.fill(&mut taken, self.object(&guard));
                guard.publish(word.moved_to(place.location()));
                kill_points::pass(KillPoint::ObjectMoved);
                unused = from;
            }
        });
        self.free(unused);
    }
}
