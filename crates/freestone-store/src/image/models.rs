//! loom models: each thing is fetched once for all who wait, each waiter is answered once, and no thread sleeps
//! while there is something to do.

use freestone_core::device;

use super::fetches::{Failed, Fetches, Source, Waiter};
use super::queue::Queue;
use crate::rt::sync::{Arc, Mutex};
use crate::rt::thread;
use crate::rt::time::Duration;

type Answer = Result<u8, device::Error>;

/// Counts, and who waits until they are so high.
struct Counts<T> {
    state: Mutex<T>,
    changed: loom::sync::Condvar,
}

impl<T> Counts<T> {
    fn new(state: T) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(state), changed: loom::sync::Condvar::new() })
    }

    fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let changed = change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
        changed
    }

    fn wait(&self, until: impl Fn(&T) -> bool) {
        let mut state = self.state.lock().unwrap();
        while !until(&state) {
            state = self.changed.wait(state).unwrap();
        }
    }
}

/// What the source has seen.
#[derive(Default)]
struct Seen {
    /// Who has asked, as far as the source has to know.
    asked: usize,
    /// Answers by waiter.
    answers: [Vec<Answer>; 3],
    /// How often each key was fetched, and how often at one time.
    fetched: [usize; 3],
    running: [bool; 3],
}

impl Seen {
    fn answered(&self) -> usize {
        self.answers.iter().map(Vec::len).sum()
    }
}

/// A store that answers as a model has it.
struct Store {
    seen: Arc<Counts<Seen>>,
    answer: fn(&Counts<Seen>, u8) -> Result<u8, Failed>,
}

impl Source for Store {
    type Key = u8;
    type Got = u8;

    fn fetch(&self, key: u8, _: bool, _: &mut Vec<u8>) -> Result<u8, Failed> {
        let at = usize::from(key);
        self.seen.change(|seen| {
            seen.fetched[at] += 1;
            assert!(!std::mem::replace(&mut seen.running[at], true), "it is fetched already");
        });
        let answer = (self.answer)(&self.seen, key);
        self.seen.change(|seen| seen.running[at] = false);
        answer
    }

    fn timeout(&self) -> Duration {
        // Who waits has waited for as long.
        Duration::ZERO
    }
}

/// A waiter with its number.
struct Told(Arc<Counts<Seen>>, usize);

impl Waiter<u8> for Told {
    fn came(self, got: u8) {
        self.0.change(|seen| seen.answers[self.1].push(Ok(got)));
    }

    fn failed(self, error: device::Error) {
        self.0.change(|seen| seen.answers[self.1].push(Err(error)));
    }
}

struct Model {
    fetches: Arc<Fetches<Store, Told>>,
    seen: Arc<Counts<Seen>>,
}

impl Model {
    fn new(answer: fn(&Counts<Seen>, u8) -> Result<u8, Failed>) -> Self {
        let seen = Counts::new(Seen::default());
        let source = Arc::new(Store { seen: Arc::clone(&seen), answer });
        Self { fetches: Arc::new(Fetches::new(source)), seen }
    }

    fn want(&self, key: u8, waiter: usize) {
        self.fetches.want(key, Told(Arc::clone(&self.seen), waiter));
        self.seen.change(|seen| seen.asked += 1);
    }

    /// Somebody else does something.
    fn beside(&self, act: impl FnOnce(&Self) + 'static) -> thread::JoinHandle<()> {
        let other = Self { fetches: Arc::clone(&self.fetches), seen: Arc::clone(&self.seen) };
        thread::spawn(move || act(&other))
    }

    /// Until so many answers came, which are all.
    fn answers(&self, count: usize) -> [Vec<Answer>; 3] {
        self.seen.wait(|seen| seen.answered() >= count);
        self.fetches.close();
        self.seen.change(|seen| {
            assert_eq!(seen.answered(), count, "each is answered once");
            seen.answers.clone()
        })
    }
}

/// Every interleaving with at most so many preemptions; with more it takes minutes.
fn bounded(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

fn comes(_: &Counts<Seen>, key: u8) -> Result<u8, Failed> {
    Ok(key + 10)
}

#[test]
fn what_two_wait_for_is_fetched_once() {
    bounded(2, || {
        // It comes when both have asked.
        let model = Model::new(|seen, key| {
            seen.wait(|seen| seen.asked == 2);
            comes(seen, key)
        });
        let other = model.beside(|model| model.want(1, 1));
        model.want(1, 0);
        let answers = model.answers(2);
        assert_eq!(answers, [vec![Ok(11)], vec![Ok(11)], Vec::new()]);
        model.seen.wait(|seen| seen.fetched == [0, 1, 0]);
        other.join().unwrap();
    });
}

#[test]
fn who_wants_while_it_comes_is_answered() {
    bounded(2, || {
        let model = Model::new(comes);
        let other = model.beside(|model| model.want(1, 1));
        model.want(1, 0);
        assert_eq!(model.answers(2), [vec![Ok(11)], vec![Ok(11)], Vec::new()]);
        other.join().unwrap();
    });
}

#[test]
fn who_wants_while_it_is_closed_is_answered_once() {
    bounded(2, || {
        let model = Model::new(comes);
        let closes = model.beside(|model| model.fetches.close());
        model.want(1, 0);
        model.want(2, 1);
        closes.join().unwrap();
        for (answers, got) in model.answers(2).iter().zip([11, 12]) {
            assert!(
                matches!(answers[..], [answer] if answer == Ok(got) || answer == Err(device::Error::Gone))
            );
        }
    });
}

#[test]
fn what_is_waited_for_does_not_wait_for_what_may_be_wanted() {
    bounded(2, || {
        // What may be wanted comes when what is wanted has come.
        let model = Model::new(|seen, key| {
            if key != 0 {
                seen.wait(|seen| seen.answered() > 0);
            }
            comes(seen, key)
        });
        model.fetches.ahead([1, 2]);
        model.want(0, 0);
        assert_eq!(model.answers(1)[0], [Ok(10)]);
    });
}

#[test]
fn what_is_fetched_ahead_and_then_wanted_is_fetched_once() {
    bounded(2, || {
        let model = Model::new(|seen, key| {
            seen.wait(|seen| seen.asked == 1);
            comes(seen, key)
        });
        model.fetches.ahead([1]);
        model.want(1, 0);
        assert_eq!(model.answers(1)[0], [Ok(11)]);
        model.seen.wait(|seen| seen.fetched == [0, 1, 0]);
    });
}

#[test]
#[ignore = "slow lane"]
fn who_wants_while_threads_end_is_answered() {
    bounded(2, || {
        let model = Model::new(comes);
        model.want(1, 0);
        let time = model.beside(|model| model.fetches.time_passes());
        model.want(2, 1);
        assert_eq!(model.answers(2), [vec![Ok(11)], vec![Ok(12)], Vec::new()]);
        time.join().unwrap();
    });
}

#[test]
#[ignore = "slow lane"]
fn who_waits_for_a_store_that_hangs_is_answered_once() {
    bounded(2, || {
        let model = Model::new(|_, _| Err(Failed { error: device::Error::Media, is_hanging: true }));
        let other = model.beside(|model| model.want(2, 2));
        model.want(1, 0);
        model.want(2, 1);
        let failed = || vec![Err(device::Error::Media)];
        assert_eq!(model.answers(3), [failed(), failed(), failed()]);
        other.join().unwrap();
    });
}

// ---- the readers' queue -------------------------------------------------------------------------

type Done = Arc<Counts<usize>>;

fn queue() -> Queue<Done> {
    Queue::new("model", 2, |done: Done| done.change(|done| *done += 1))
}

#[test]
fn what_two_push_is_done_once() {
    bounded(2, || {
        let (queue, done) = (Arc::new(queue()), Counts::new(0));
        let (of_other, count) = (Arc::clone(&queue), Arc::clone(&done));
        let other = thread::spawn(move || of_other.push(count).is_ok());
        assert!(queue.push(Arc::clone(&done)).is_ok());
        done.wait(|done| *done == 2);
        assert!(other.join().unwrap());
    });
}

#[test]
fn what_is_pushed_while_threads_end_is_done() {
    bounded(2, || {
        let (queue, done) = (Arc::new(queue()), Counts::new(0));
        assert!(queue.push(Arc::clone(&done)).is_ok());
        let of_other = Arc::clone(&queue);
        let time = thread::spawn(move || of_other.time_passes());
        assert!(queue.push(Arc::clone(&done)).is_ok());
        done.wait(|done| *done == 2);
        time.join().unwrap();
    });
}

#[test]
fn what_was_pushed_is_done_although_the_queue_goes() {
    bounded(2, || {
        let (queue, done) = (queue(), Counts::new(0));
        assert!(queue.push(Arc::clone(&done)).is_ok());
        assert!(queue.push(Arc::clone(&done)).is_ok());
        drop(queue);
        done.wait(|done| *done == 2);
    });
}
