//! Verbs that take long: how far they are, who ends them, and what came of those in the background.
//!
//! A verb in the foreground ends early when its client goes away, one in the background does not.
//! Both end when somebody [cancels](Jobs::cancel) them, and when the server ends. Whoever does the
//! work asks [`Job::at`] between its pieces.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use crate::control::caller::Caller;
use crate::control::protocol::Fault;

/// Verbs that run in the background at one time.
const BACKGROUND_MAX: usize = 64;
/// Verbs of the background whose end is remembered.
const PAST_MAX: usize = 256;
/// A longer result is forgotten.
const RESULT_BYTES_MAX: usize = 64 << 10;

thread_local! {
    static BACKGROUND: RefCell<Option<Background>> = const { RefCell::new(None) };
}

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
    past: VecDeque<Past>,
}

/// How a verb runs.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// No other such verb runs on the device.
    pub alone: bool,
    /// It can end early.
    pub cancels: bool,
}

impl Kind {
    /// Alone, and it can be cancelled.
    pub const ALONE: Self = Self { alone: true, cancels: true };
    /// Beside others.
    pub const BESIDE: Self = Self { alone: false, cancels: true };
    /// Alone, to its end.
    pub const WHOLE: Self = Self { alone: true, cancels: false };
    /// Beside others, to its end.
    pub const WHOLE_BESIDE: Self = Self { alone: false, cancels: false };
}

#[derive(Debug)]
struct Task {
    number: u64,
    /// The device, and those that it also needs.
    names: Vec<String>,
    verb: &'static str,
    kind: Kind,
    background: bool,
    tag: Option<String>,
    begun: Instant,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    cancelled: AtomicBool,
}

struct Past {
    task: Arc<Task>,
    took: Duration,
    outcome: Result<Option<Box<RawValue>>, Fault>,
}

/// A running verb, until this is dropped; one in the background until [`Jobs::end`].
pub struct Job {
    shared: Arc<Shared>,
    task: Arc<Task>,
    caller: Caller,
}

/// What this thread runs in the background.
struct Background {
    /// Who waits for its beginning.
    tell: mpsc::Sender<Result<Box<RawValue>, Fault>>,
    number: Option<u64>,
    /// That is what it waits for no more.
    told: bool,
}

/// A verb as it is shown.
#[derive(Debug, Serialize, Deserialize)]
pub struct Shown {
    /// Its number.
    pub job: u64,
    /// The device, of `restore` the file.
    pub name: String,
    pub verb: String,
    /// `running`, `finished`, `failed` or `cancelled`.
    pub state: String,
    pub background: bool,
    /// How the client calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    pub done_bytes: u64,
    /// 0 where it is not known yet.
    pub total_bytes: u64,
    /// How long it has run.
    pub seconds: f64,
    /// What it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Box<RawValue>>,
    /// How it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Fault>,
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

/// Which verbs are meant; all that is said is true of them.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Which {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verb: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

impl Which {
    fn is(&self, task: &Task) -> bool {
        self.name.as_ref().is_none_or(|name| task.names.contains(name))
            && self.verb.as_ref().is_none_or(|verb| verb.replace('.', " ") == task.verb)
            && self.job.is_none_or(|job| job == task.number)
            && (self.tag.is_none() || self.tag == task.tag)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        // Nothing in here can be half done.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        let background = BACKGROUND.with_borrow(Option::is_some);
        let mut table = self.0.lock();
        let busy = |name: &&str| {
            let other = table.running.values().find(|task| task.kind.alone && task.is_on(name))?;
            Some(Fault::failed(Errno::EBUSY, format!("{name}: {} is running there", other.verb)))
        };
        if let Some(fault) = names.iter().filter(|_| kind.alone).find_map(busy) {
            return Err(fault);
        }
        if background && table.running.values().filter(|task| task.background).count() >= BACKGROUND_MAX {
            let why = format!("{}: {verb}: {BACKGROUND_MAX} verbs run in the background already", names[0]);
            return Err(Fault::failed(Errno::EBUSY, why));
        }
        table.last += 1;
        let task = Arc::new(Task {
            number: table.last,
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            verb,
            kind,
            background,
            tag: caller.tag().map(str::to_owned),
            begun: Instant::now(),
            done_bytes: 0.into(),
            total_bytes: 0.into(),
            cancelled: false.into(),
        });
        table.running.insert(task.number, Arc::clone(&task));
        drop(table);
        BACKGROUND.with_borrow_mut(|background| {
            if let Some(background) = background {
                background.number = Some(task.number);
            }
        });
        Ok(Job { shared: Arc::clone(&self.0), task, caller })
    }

    /// This thread runs a verb in the background from now on. `tell` hears when it has begun.
    pub fn enter_background(tell: mpsc::Sender<Result<Box<RawValue>, Fault>>) {
        BACKGROUND.set(Some(Background { tell, number: None, told: false }));
    }

    /// The verb of the background that this thread runs has ended. Who waits is told, where it had
    /// not even begun.
    pub fn end(&self, outcome: Result<Box<RawValue>, Fault>) {
        let Some(Background { tell, number, told }) = BACKGROUND.take() else { return };
        let mut table = self.0.lock();
        let task = number.and_then(|number| table.running.remove(&number));
        if !told {
            // Who has gone away meanwhile does not hear it.
            let _ = tell.send(outcome);
        } else if let Some(task) = task {
            if let Err(fault) = &outcome
                && !fault.is(Errno::ECANCELED)
            {
                tracing::warn!("{}", fault.message);
            }
            let outcome = outcome.map(|result| Some(result).filter(|r| r.get().len() <= RESULT_BYTES_MAX));
            let took = task.begun.elapsed();
            table.past.push_back(Past { task, took, outcome });
            if table.past.len() > PAST_MAX {
                table.past.pop_front();
            }
        }
        self.0.ended.notify_all();
    }

    /// What runs on a device.
    pub fn show(&self, name: &str) -> Option<Progress> {
        let table = self.0.lock();
        let task = table.running.values().find(|task| task.is_on(name))?;
        let Shown { job, verb, done_bytes, total_bytes, .. } = task.show();
        Some(Progress { verb, done_bytes, total_bytes, job })
    }

    /// All of these, in the order of their numbers.
    pub fn all(&self, which: &Which) -> Vec<Shown> {
        let table = self.0.lock();
        let past = table.past.iter().filter(|past| which.is(&past.task)).map(Past::show);
        let running = table.running.values().filter(|task| which.is(task)).map(|task| task.show());
        let mut all: Vec<_> = past.chain(running).collect();
        all.sort_unstable_by_key(|shown| shown.job);
        all
    }

    /// Has these end early; those of them that can.
    pub fn cancel(&self, which: &Which) -> Result<Vec<Shown>, Fault> {
        let table = self.0.lock();
        let mut whole = None;
        let mut told = Vec::new();
        for task in table.running.values().filter(|task| which.is(task)) {
            if task.kind.cancels {
                task.cancelled.store(true, SeqCst);
                told.push(task.show());
            } else {
                whole = Some(task);
            }
        }
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
    }

    /// Waits until none runs in the background any more, or so long.
    pub fn wait_ended(&self, grace: Duration) {
        let runs = |table: &mut Table| table.running.values().any(|task| task.background);
        drop(self.0.ended.wait_timeout_while(self.0.lock(), grace, runs));
    }
}

impl Task {
    fn is_on(&self, name: &str) -> bool {
        self.names.iter().any(|own| own == name)
    }

    fn show(&self) -> Shown {
        Shown {
            job: self.number,
            name: self.names[0].clone(),
            verb: self.verb.to_owned(),
            state: "running".to_owned(),
            background: self.background,
            tag: self.tag.clone(),
            done_bytes: self.done_bytes.load(SeqCst),
            total_bytes: self.total_bytes.load(SeqCst),
            seconds: rounded(self.begun.elapsed()),
            result: None,
            error: None,
        }
    }
}

impl Past {
    fn show(&self) -> Shown {
        let (state, result, error) = match &self.outcome {
            Ok(result) => ("finished", result.clone(), None),
            Err(fault) if fault.is(Errno::ECANCELED) => ("cancelled", None, Some(fault.clone())),
            Err(fault) => ("failed", None, Some(fault.clone())),
        };
        let seconds = rounded(self.took);
        Shown { state: state.to_owned(), result, error, seconds, ..self.task.show() }
    }
}

/// To the millisecond.
fn rounded(time: Duration) -> f64 {
    time.as_millis() as f64 / 1000.0
}

impl Job {
    /// In the background the client is answered that it has begun: with its number, and with what
    /// else it `says`.
    pub fn tell(&self, says: Value) {
        BACKGROUND.with_borrow_mut(|background| {
            let Some(background) = background.as_mut().filter(|background| !background.told) else { return };
            let Task { number, names, verb, .. } = &*self.task;
            let mut begun = json!({ "job": number, "name": names[0], "verb": verb });
            if let (Value::Object(begun), Value::Object(says)) = (&mut begun, says) {
                begun.extend(says);
            }
            let begun = to_raw_value(&begun).map_err(|e| Fault::internal(format!("{verb}: {e}")));
            // Who has gone away meanwhile does not hear it.
            let _ = background.tell.send(begun);
            background.told = true;
        });
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
            return Some("the server is ending");
        }
        if self.task.cancelled.load(SeqCst) {
            return Some("that was asked for");
        }
        (!self.task.background && self.caller.is_gone()).then_some("the client went away")
    }

    /// What is answered then, to a client that is gone as well; `after` says how things are left.
    pub fn cancelled(&self, after: &str) -> Fault {
        let what = format!("{}: {}", self.task.names[0], self.task.verb);
        let why = self.why_over().unwrap_or("that was asked for");
        tracing::info!("{what}: cancelled, {why}");
        Fault::failed(Errno::ECANCELED, format!("{what}: cancelled, because {why}; {after}"))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.task.background {
            self.shared.lock().running.remove(&self.task.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use serde_json::value::to_raw_value;

    use super::{Errno, Fault, Jobs, Kind, Progress, Which};

    fn of(name: &str) -> Which {
        Which { name: Some(name.to_owned()), ..Which::default() }
    }

    #[test]
    fn one_at_a_time_and_shown_while_it_runs() {
        let jobs = Jobs::default();
        let job = jobs.begin("f", "delta save", Kind::ALONE).unwrap();
        assert!(job.at(1, 2));
        let shown = Progress { verb: "delta save".into(), done_bytes: 1, total_bytes: 2, job: 1 };
        assert_eq!(jobs.show("f"), Some(shown));
        let second = jobs.begin("f", "merge", Kind::ALONE).err().unwrap().message;
        assert_eq!(second, "f: delta save is running there");
        assert!(jobs.begin_on(&["h", "f"], "delta save", Kind::ALONE).is_err());
        assert!(jobs.begin("f", "compact", Kind::BESIDE).is_ok());
        assert!(jobs.begin("g", "merge", Kind::ALONE).is_ok());
        drop(job);
        assert_eq!(jobs.show("f"), None);
        assert!(jobs.begin("f", "merge", Kind::ALONE).is_ok());
        assert!(jobs.all(&Which::default()).is_empty());
    }

    #[test]
    fn what_is_cancelled_is_told_and_the_rest_goes_on() {
        let jobs = Jobs::default();
        let one = jobs.begin("a", "save", Kind::ALONE).unwrap();
        let other = jobs.begin("a", "compact", Kind::BESIDE).unwrap();
        let last = jobs.begin("b", "remove", Kind::WHOLE_BESIDE).unwrap();
        let only = Which { verb: Some("save".to_owned()), ..of("a") };
        assert_eq!(jobs.cancel(&only).unwrap().len(), 1);
        assert!(one.is_over() && !other.is_over());
        let said = one.cancelled("f is as it was");
        assert!(said.is(Errno::ECANCELED));
        assert_eq!(said.message, "a: save: cancelled, because that was asked for; f is as it was");
        assert_eq!(jobs.cancel(&of("b")).unwrap_err().message, "b: remove cannot be taken back; it goes on");
        assert!(jobs.cancel(&of("c")).unwrap().is_empty());
        jobs.end_all();
        assert!(other.is_over() && !last.is_over());
    }

    #[test]
    fn in_the_background_the_end_is_remembered() {
        let jobs = Jobs::default();
        let run = |outcome: Result<&str, Fault>, begins: bool| {
            let (tell, told) = mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(|| {
                    Jobs::enter_background(tell);
                    let job = begins.then(|| jobs.begin("r", "save", Kind::ALONE).unwrap());
                    drop(job);
                    jobs.end(outcome.map(|text| to_raw_value(text).unwrap()));
                });
            });
            told.recv().unwrap().map(|begun| begun.get().to_owned())
        };
        assert_eq!(run(Ok("well"), true).unwrap(), r#"{"job":1,"name":"r","verb":"save"}"#);
        run(Err(Fault::failed(Errno::EIO, "r: no")), true).unwrap();
        run(Err(Fault::failed(Errno::ECANCELED, "r: ended")), true).unwrap();
        assert_eq!(run(Err(Fault::failed(Errno::EIO, "r: no")), false).unwrap_err().message, "r: no");
        let all = jobs.all(&of("r"));
        let states: Vec<_> = all.iter().map(|shown| (shown.job, shown.state.as_str())).collect();
        assert_eq!(states, [(1, "finished"), (2, "failed"), (3, "cancelled")]);
        assert_eq!(all[0].result.as_ref().unwrap().get(), "\"well\"");
        assert_eq!(all[1].error.as_ref().unwrap().message, "r: no");
    }
}
