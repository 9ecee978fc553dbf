//! Verbs that take long: how far they are, who ends them, and what came of those in the background.
//!
//! A verb in the foreground ends early when its client goes away, one in the background does not.
//! Both end when somebody [cancels](Jobs::cancel) them, and when the server ends. Whoever does the
//! work asks [`Job::at`] between its pieces. In the background so many run at one time, on threads
//! of their own; more wait until one of these has ended, and are not looked at before.

mod past;
mod task;
#[cfg(test)]
mod tests;
mod turns;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::control::caller::Caller;
use crate::control::protocol::Fault;
use past::{Ended, Past};
use task::Task;
pub use task::{Kind, RUNNING, Shown, WAITING, Which};
pub use turns::{Asked, Outcome};
use turns::{THREADS_MAX, Turns, WAITING_MAX, Waiting};

thread_local! {
    static BACKGROUND: RefCell<Option<Background>> = const { RefCell::new(None) };
}

/// How a verb is left that was cancelled while it waited for its turn.
const NOT_BEGUN: &str = "it had not begun";
/// Why.
const ASKED: &str = "that was asked for";
const SERVER_ENDS: &str = "the server is ending";

/// What is running, and what has ended in the background.
#[derive(Default)]
pub struct Jobs(Arc<Shared>);

/// One lock, held for a look or a change.
#[derive(Default)]
struct Shared {
    table: Mutex<Table>,
    /// A verb has ended.
    ended: Condvar,
    /// The server ends.
    ending: AtomicBool,
}

#[derive(Default)]
struct Table {
    last: u64,
    running: BTreeMap<u64, Arc<Task>>,
    turns: Turns,
    past: Ended,
}

/// A running verb, until this is dropped; one in the background until its thread is done with it.
pub struct Job {
    shared: Arc<Shared>,
    task: Arc<Task>,
    caller: Caller,
}

/// Who is told how far some work is, and says when to end.
pub trait Watched: Sync {
    /// Whether to end. Once true, it stays true.
    fn is_over(&self) -> bool;
    /// How far it is, in bytes; `total` is 0 where it is not known yet.
    fn note(&self, done: u64, total: u64);
}

/// What this thread runs in the background.
struct Background {
    /// Who waits for its beginning, until that is told.
    tell: Option<mpsc::Sender<Outcome>>,
    /// Known from the beginning where it waited for its turn.
    number: Option<u64>,
}

/// How far a verb is: `{"verb": "delta save", "done_bytes": 4096, "total_bytes": 8192, "job": 1}`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub verb: String,
    pub done_bytes: u64,
    /// 0 where it is not known yet.
    pub total_bytes: u64,
    pub job: u64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        // Nothing in here can be half done.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a verb in the background, on this thread.
    fn run(&self, background: Background, tag: Option<String>, run: Box<dyn FnOnce() -> Outcome + Send>) {
        Caller::tag_next(tag);
        BACKGROUND.set(Some(background));
        // As on the thread of a connection.
        let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(broken()));
        let Some(Background { tell, number }) = BACKGROUND.take() else { return };
        let task = number.and_then(|number| self.lock().running.get(&number).cloned());
        // Remembered is what its client was told to have begun, or to wait.
        let (refused, past) = match (&tell, &task) {
            (None, Some(task)) => {
                if let Err(fault) = &outcome
                    && !fault.is(Errno::ECANCELED)
                {
                    tracing::warn!("{}", fault.message);
                }
                (None, Some(Past::new(Arc::clone(task), outcome)))
            }
            _ => (Some(outcome), None),
        };
        let mut table = self.lock();
        if let Some(task) = task {
            table.running.remove(&task.number);
        }
        if let Some(past) = past {
            table.past.add(past);
        }
        drop(table);
        if let (Some(tell), Some(outcome)) = (tell, refused) {
            // Who has gone away meanwhile does not hear it.
            let _ = tell.send(outcome);
        }
    }

    /// The next one that waits for its turn; from now on it runs. There is none: this thread ends.
    fn next(&self) -> Option<Waiting> {
        let mut table = self.lock();
        let next = table.turns.next();
        match &next {
            Some(next) => drop(table.running.insert(next.task.number, Arc::clone(&next.task))),
            None => self.ended.notify_all(),
        }
        next
    }
}

impl Table {
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// These do not wait for their turn any more: they are cancelled.
    fn cancel_waiting(&mut self, which: &Which, why: &str) -> Vec<Shown> {
        let cancelled = |task: Arc<Task>| {
            let fault = task.cancelled(why, NOT_BEGUN);
            let past = Past::new(task, Err(fault));
            let shown = past.show();
            self.past.add(past);
            shown
        };
        self.turns.remove(which).into_iter().map(cancelled).collect()
    }
}

fn broken() -> Fault {
    Fault::internal("a verb in the background failed inside the server; see its log")
}

impl Jobs {
    /// Begins a verb on a device; in the background the client is told.
    pub fn begin(&self, name: &str, verb: &'static str, kind: Kind) -> Result<Job, Fault> {
        let job = self.begin_on(&[name], verb, kind)?;
        job.tell(json!({}));
        Ok(job)
    }

    /// Begins a verb on a device, while others are needed, too. The client of one in the background
    /// waits until it is [told](Job::tell), or until the verb has ended.
    pub fn begin_on(&self, names: &[&str], verb: &'static str, kind: Kind) -> Result<Job, Fault> {
        let caller = Caller::current();
        let number = BACKGROUND.with_borrow(|background| background.as_ref().map(|it| it.number));
        let mut table = self.0.lock();
        let busy = |name: &&str| {
            let other = table.running.values().find(|task| task.kind.alone && task.is_on(name))?;
            Some(Fault::failed(Errno::EBUSY, format!("{name}: {} is running there", other.verb)))
        };
        if let Some(fault) = names.iter().filter(|_| kind.alone).find_map(busy) {
            return Err(fault);
        }
        // Since its turn came.
        let early = number.flatten().and_then(|number| table.running.get(&number));
        if let Some(task) = early.filter(|task| task.cancelled.load(SeqCst)) {
            return Err(task.cancelled(ASKED, NOT_BEGUN));
        }
        let known = number.flatten().unwrap_or_else(|| table.number());
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let task = Task::new(known, names, verb.to_owned(), caller.tag().map(str::to_owned));
        let task = Arc::new(Task { kind, background: number.is_some(), ..task });
        table.running.insert(task.number, Arc::clone(&task));
        drop(table);
        BACKGROUND.with_borrow_mut(|background| {
            if let Some(background) = background {
                background.number = Some(task.number);
            }
        });
        Ok(Job { shared: Arc::clone(&self.0), task, caller })
    }

    /// Runs a verb in the background, as soon as it is its turn. Returns when it has begun, was
    /// refused, or waits.
    pub fn run(&self, asked: Asked) -> Outcome {
        let mut table = self.0.lock();
        if !table.turns.begin() {
            return self.wait(table, asked);
        }
        drop(table);
        let Asked { verb, tag, run, .. } = asked;
        let shared = Arc::clone(&self.0);
        let (tell, told) = mpsc::channel();
        let started = thread::Builder::new().name("job".into()).spawn(move || {
            shared.run(Background { tell: Some(tell), number: None }, tag, run);
            while let Some(Waiting { task, run, .. }) = shared.next() {
                shared.run(Background { tell: None, number: Some(task.number) }, task.tag.clone(), run);
            }
        });
        if let Err(e) = started {
            // Who began to wait meanwhile waits for the other threads.
            self.0.lock().turns.give_up();
            self.0.ended.notify_all();
            return Err(Fault::failed(Errno::ENOMEM, format!("{verb}: no thread for it: {e}")));
        }
        told.recv().unwrap_or_else(|_| Err(broken()))
    }

    /// Has it wait for its turn.
    fn wait(&self, mut table: MutexGuard<'_, Table>, asked: Asked) -> Outcome {
        let Asked { name, verb, tag, bytes, run } = asked;
        if !table.turns.has_room_for(bytes) {
            let why = format!(
                "{name}: {verb}: {THREADS_MAX} verbs run in the background, and as many as may \
                 ({WAITING_MAX}, and 16M of requests) wait for their turn"
            );
            return Err(Fault::failed(Errno::EBUSY, why));
        }
        let task = Arc::new(Task::new(table.number(), vec![name], verb, tag));
        // Looked at under the lock: what waits when it is set is cancelled, and nothing comes later.
        if self.0.ending.load(SeqCst) {
            return Err(task.cancelled(SERVER_ENDS, NOT_BEGUN));
        }
        table.turns.wait(Waiting { task: Arc::clone(&task), bytes, run });
        drop(table);
        task.told(json!({ "state": WAITING }))
    }

    /// What runs on a device.
    pub fn show(&self, name: &str) -> Option<Progress> {
        let table = self.0.lock();
        let task = table.running.values().find(|task| task.is_on(name))?;
        let Shown { job, verb, done_bytes, total_bytes, .. } = task.show(RUNNING);
        Some(Progress { verb, done_bytes, total_bytes, job })
    }

    /// All of these, in the order of their numbers.
    pub fn all(&self, which: &Which) -> Vec<Shown> {
        let table = self.0.lock();
        let running = table.running.values().filter(|task| which.is(task)).map(|task| task.show(RUNNING));
        let waiting = table.turns.waiting().filter(|task| which.is(task)).map(|task| task.show(WAITING));
        let mut all: Vec<_> = table.past.show(which).chain(running).chain(waiting).collect();
        all.sort_unstable_by_key(|shown| shown.job);
        all
    }

    /// Has these end early; those of them that can. Those that wait for their turn have ended then.
    pub fn cancel(&self, which: &Which) -> Result<Vec<Shown>, Fault> {
        let mut table = self.0.lock();
        let mut whole = None;
        let mut told = Vec::new();
        for task in table.running.values().filter(|task| which.is(task)) {
            if task.kind.cancels {
                task.cancelled.store(true, SeqCst);
                told.push(task.show(RUNNING));
            } else {
                whole = Some(Arc::clone(task));
            }
        }
        told.extend(table.cancel_waiting(which, ASKED));
        told.sort_unstable_by_key(|shown| shown.job);
        match whole {
            Some(task) if told.is_empty() => {
                let why = format!("{}: {} cannot be taken back; it goes on", task.names[0], task.verb);
                Err(Fault::failed(Errno::EOPNOTSUPP, why))
            }
            _ => Ok(told),
        }
    }

    /// From now on all end early.
    pub fn end_all(&self) {
        self.0.ending.store(true, SeqCst);
        let waited = self.0.lock().cancel_waiting(&Which::default(), SERVER_ENDS).len();
        if waited > 0 {
            tracing::info!("{waited} verbs that waited for their turn were cancelled, because {SERVER_ENDS}");
        }
    }

    /// Waits until none runs in the background any more, or so long.
    pub fn wait_ended(&self, grace: Duration) {
        let runs = |table: &mut Table| !table.turns.is_idle();
        drop(self.0.ended.wait_timeout_while(self.0.lock(), grace, runs));
    }
}

impl Job {
    /// In the background the client is answered that it has begun: with its number, and with what
    /// else it `says`.
    pub fn tell(&self, says: Value) {
        let tell = BACKGROUND.with_borrow_mut(|background| background.as_mut()?.tell.take());
        if let Some(tell) = tell {
            // Who has gone away meanwhile does not hear it.
            let _ = tell.send(self.task.told(says));
        }
    }

    /// How far it is. False: it is to end. Costs a system call.
    pub fn at(&self, done: u64, total: u64) -> bool {
        self.note(done, total);
        !self.is_over()
    }

    /// How far it is.
    pub fn note(&self, done: u64, total: u64) {
        self.task.done_bytes.store(done, SeqCst);
        self.task.total_bytes.store(total, SeqCst);
    }

    /// Whether to end. Once true, it stays true.
    pub fn is_over(&self) -> bool {
        self.task.kind.cancels && self.why_over().is_some()
    }

    /// Whether somebody cancelled it, as opposed to its client's or the server's end.
    pub fn is_cancelled(&self) -> bool {
        self.task.cancelled.load(SeqCst)
    }

    fn why_over(&self) -> Option<&'static str> {
        if self.shared.ending.load(SeqCst) {
            return Some(SERVER_ENDS);
        }
        if self.task.cancelled.load(SeqCst) {
            return Some(ASKED);
        }
        (!self.task.background && self.caller.is_gone()).then_some("the client went away")
    }

    /// What is answered then, to a client that is gone as well; `after` says how things are left.
    pub fn cancelled(&self, after: &str) -> Fault {
        let why = self.why_over().unwrap_or(ASKED);
        tracing::info!("{}: {}: cancelled, {why}", self.task.names[0], self.task.verb);
        self.task.cancelled(why, after)
    }
}

impl Watched for Job {
    fn is_over(&self) -> bool {
        self.is_over()
    }

    fn note(&self, done: u64, total: u64) {
        self.note(done, total);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.task.background {
            self.shared.lock().running.remove(&self.task.number);
        }
    }
}
