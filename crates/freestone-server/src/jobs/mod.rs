//! Jobs: runs of long verbs, with their progress, their cancellation and the history of background
//! jobs.
//!
//! A foreground job is cancelled when its client disconnects; a background job is not. Both are
//! cancelled by [`Jobs::cancel`] and by the shutdown of the server. A verb calls [`Job::advance`]
//! between pieces of work, and stops if that returns false. A limited number of background jobs run
//! at once, each on a thread; further jobs wait in a queue, and their parameters are not parsed
//! before they start.

mod history;
mod queue;
mod task;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use freestone_control::caller::Caller;
use freestone_control::protocol::RpcError;
use freestone_core::sync::{Condvar, Mutex, MutexGuard};
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use history::{EndedJob, JobHistory};
use queue::{JobQueue, QueuedJob, THREADS_MAX, WAITING_MAX};
pub use queue::{JobRequest, Outcome};
use task::Task;
pub use task::{JobFilter, JobInfo, JobKind, RUNNING, WAITING};

thread_local! {
    static BACKGROUND: RefCell<Option<Background>> = const { RefCell::new(None) };
}

/// State after the cancellation of a job that still waited in the queue, as the error message
/// reports it.
const NOT_STARTED: &str = "it had not started";
/// Reasons for a cancellation, as the error message reports them.
const CANCEL_REQUESTED: &str = "requested by a client";
const SERVER_ENDING: &str = "the server is shutting down";

/// The running and waiting jobs of a server, and the background jobs that have ended.
#[derive(Default)]
pub struct Jobs(Arc<Shared>);

/// State of [`Jobs`], shared with the jobs. The lock is held only for short accesses.
#[derive(Default)]
struct Shared {
    table: Mutex<Table>,
    /// Notified when a background thread ends.
    thread_ended: Condvar,
    /// True once the server shuts down.
    ending: AtomicBool,
}

#[derive(Default)]
struct Table {
    /// Number of the newest job.
    last_number: u64,
    running: BTreeMap<u64, Arc<Task>>,
    queue: JobQueue,
    history: JobHistory,
}

/// A running job. Dropping it ends a foreground job; a background job ends when its thread has
/// recorded the outcome.
pub struct Job {
    shared: Arc<Shared>,
    task: Arc<Task>,
    caller: Caller,
}

/// Receiver of the progress of an operation, which can also cancel the operation.
pub trait ProgressSink: Sync {
    /// Returns true if the work must stop. Once true, it stays true.
    fn should_stop(&self) -> bool;
    /// Records the progress in bytes. `total` is 0 while unknown.
    fn report(&self, done: u64, total: u64);
}

/// State of the background job that the current thread runs.
struct Background {
    /// Channel for the response to the client that started the job; `None` once the response is
    /// sent.
    response: Option<mpsc::Sender<Outcome>>,
    /// Number of the job. `None` until the verb begins, unless the job waited in the queue.
    number: Option<u64>,
}

/// Progress of a job: `{"verb": "delta save", "done_bytes": 4096, "total_bytes": 8192, "job": 1}`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub verb: String,
    pub done_bytes: u64,
    /// Size of the whole work, in bytes; 0 while unknown.
    pub total_bytes: u64,
    pub job: u64,
}

impl Shared {
    /// Runs a background job on this thread, and records its outcome.
    fn run(&self, background: Background, tag: Option<String>, run: Box<dyn FnOnce() -> Outcome + Send>) {
        Caller::set_tag(tag);
        BACKGROUND.set(Some(background));
        // A panic ends only this job, not the thread, which runs further jobs.
        let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(panic_fault()));
        let Some(Background { response, number }) = BACKGROUND.take() else { return };
        let task = number.and_then(|number| self.table.lock().running.get(&number).cloned());
        // The history contains only jobs whose client has received the response that the job
        // started or waits.
        let (refused, ended) = match (&response, &task) {
            (None, Some(task)) => {
                if let Err(fault) = &outcome
                    && !fault.has_errno(Errno::ECANCELED)
                {
                    tracing::warn!("{}", fault.message);
                }
                (None, Some(EndedJob::new(Arc::clone(task), outcome)))
            }
            _ => (Some(outcome), None),
        };
        let mut table = self.table.lock();
        if let Some(task) = task {
            table.running.remove(&task.number);
        }
        if let Some(ended) = ended {
            table.history.add(ended);
        }
        drop(table);
        if let (Some(response), Some(outcome)) = (response, refused) {
            // The receiver may be gone.
            let _ = response.send(outcome);
        }
    }

    /// Takes the next queued job and marks it as running. If the queue is empty, returns `None`,
    /// and the calling thread must end.
    fn next(&self) -> Option<QueuedJob> {
        let mut table = self.table.lock();
        let next = table.queue.next();
        match &next {
            Some(next) => drop(table.running.insert(next.task.number, Arc::clone(&next.task))),
            None => self.thread_ended.notify_all(),
        }
        next
    }
}

impl Table {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Removes the matching jobs from the queue and adds them to the history as cancelled.
    fn cancel_waiting(&mut self, filter: &JobFilter, why: &str) -> Vec<JobInfo> {
        let cancel = |task: Arc<Task>| {
            let fault = task.cancelled(why, NOT_STARTED);
            let ended = EndedJob::new(task, Err(fault));
            let info = ended.info();
            self.history.add(ended);
            info
        };
        self.queue.remove(filter).into_iter().map(cancel).collect()
    }
}

fn panic_fault() -> RpcError {
    RpcError::internal("a background job failed inside the server; see its log")
}

impl Jobs {
    /// Begins a job on a device. For a background job, also sends the client the response that the
    /// job has started.
    pub fn begin(&self, name: &str, verb: &'static str, kind: JobKind) -> Result<Job, RpcError> {
        let job = self.begin_on(&[name], verb, kind)?;
        job.respond_started(json!({}));
        Ok(job)
    }

    /// Begins a job on the first device in `names`; the job also uses the other devices. The client
    /// of a background job waits until [`Job::respond_started`] or the end of the job.
    pub fn begin_on(&self, names: &[&str], verb: &'static str, kind: JobKind) -> Result<Job, RpcError> {
        let caller = Caller::current();
        let background = BACKGROUND.with_borrow(|background| background.as_ref().map(|it| it.number));
        let queued_number = background.flatten();
        let mut table = self.0.table.lock();
        let conflict = |name: &&str| {
            let other = table.running.values().find(|task| task.kind.exclusive && task.is_on(name))?;
            let advice = if other.kind.cancellable { ", or cancel it" } else { "" };
            let (verb, number) = (&other.verb, other.number);
            Some(rpc_error!(EBUSY, "{name}: is in use by {verb} (job {number}); wait for its end{advice}"))
        };
        if let Some(fault) = names.iter().filter(|_| kind.exclusive).find_map(conflict) {
            return Err(fault);
        }
        // The job may have been cancelled since it left the queue.
        let queued = queued_number.and_then(|number| table.running.get(&number));
        if let Some(task) = queued.filter(|task| task.cancelled.load(SeqCst)) {
            return Err(task.cancelled(CANCEL_REQUESTED, NOT_STARTED));
        }
        let number = queued_number.unwrap_or_else(|| table.next_number());
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let task = Task::new(number, names, verb.to_owned(), caller.tag().map(str::to_owned));
        let task = Arc::new(Task { kind, background: background.is_some(), ..task });
        table.running.insert(task.number, Arc::clone(&task));
        drop(table);
        BACKGROUND.with_borrow_mut(|background| {
            if let Some(background) = background {
                background.number = Some(task.number);
            }
        });
        Ok(Job { shared: Arc::clone(&self.0), task, caller })
    }

    /// Runs a background job, now or once a thread is free. Returns when the job has started, has
    /// failed to start, or waits in the queue.
    pub fn run(&self, request: JobRequest) -> Outcome {
        let mut table = self.0.table.lock();
        if !table.queue.reserve_thread() {
            return self.enqueue(table, request);
        }
        drop(table);
        let JobRequest { verb, tag, run, .. } = request;
        let shared = Arc::clone(&self.0);
        let (response, started) = mpsc::channel();
        let spawned = thread::Builder::new().name("job".into()).spawn(move || {
            shared.run(Background { response: Some(response), number: None }, tag, run);
            while let Some(QueuedJob { task, run, .. }) = shared.next() {
                let background = Background { response: None, number: Some(task.number) };
                shared.run(background, task.tag.clone(), run);
            }
        });
        if let Err(e) = spawned {
            // The other threads run the jobs that were queued meanwhile.
            self.0.table.lock().queue.release_thread();
            self.0.thread_ended.notify_all();
            refuse!(ENOMEM, "{verb}: cannot start a thread: {e}");
        }
        started.recv().unwrap_or_else(|_| Err(panic_fault()))
    }

    /// Adds a job to the queue. Fails if the queue is full or the server shuts down.
    fn enqueue(&self, mut table: MutexGuard<'_, Table>, request: JobRequest) -> Outcome {
        let JobRequest { name, verb, tag, bytes, run } = request;
        if !table.queue.has_room_for(bytes) {
            refuse!(
                EBUSY,
                "{name}: {verb}: {THREADS_MAX} background jobs are running and the queue is full (limits: \
                 {WAITING_MAX} jobs, 16M of requests)"
            );
        }
        let task = Arc::new(Task::new(table.next_number(), vec![name], verb, tag));
        // Checked under the lock: end_all() sets the flag, and then cancels the queued jobs under
        // the lock.
        if self.0.ending.load(SeqCst) {
            return Err(task.cancelled(SERVER_ENDING, NOT_STARTED));
        }
        table.queue.push(QueuedJob { task: Arc::clone(&task), bytes, run });
        drop(table);
        task.started_response(json!({ "state": WAITING }))
    }

    /// Returns the progress of a job that runs on a device, or `None` if no job does.
    pub fn progress_of(&self, name: &str) -> Option<Progress> {
        let table = self.0.table.lock();
        let task = table.running.values().find(|task| task.is_on(name))?;
        let JobInfo { job, verb, done_bytes, total_bytes, .. } = task.info(RUNNING);
        Some(Progress { verb, done_bytes, total_bytes, job })
    }

    /// Returns the matching jobs in the order of their numbers.
    pub fn list(&self, filter: &JobFilter) -> Vec<JobInfo> {
        let table = self.0.table.lock();
        let running =
            table.running.values().filter(|task| filter.matches(task)).map(|task| task.info(RUNNING));
        let waiting = table.queue.iter().filter(|task| filter.matches(task)).map(|task| task.info(WAITING));
        let mut all: Vec<_> = table.history.list(filter).chain(running).chain(waiting).collect();
        all.sort_unstable_by_key(|info| info.job);
        all
    }

    /// Cancels the matching jobs that can be cancelled, and returns information about them. Waiting
    /// jobs end at once, running jobs at their next check.
    pub fn cancel(&self, filter: &JobFilter) -> Result<Vec<JobInfo>, RpcError> {
        let mut table = self.0.table.lock();
        let mut uncancellable = None;
        let mut cancelled = Vec::new();
        for task in table.running.values().filter(|task| filter.matches(task)) {
            if task.kind.cancellable {
                task.cancelled.store(true, SeqCst);
                cancelled.push(task.info(RUNNING));
            } else {
                uncancellable = Some(Arc::clone(task));
            }
        }
        cancelled.extend(table.cancel_waiting(filter, CANCEL_REQUESTED));
        cancelled.sort_unstable_by_key(|info| info.job);
        match uncancellable {
            Some(task) if cancelled.is_empty() => {
                let (name, verb) = (&task.names[0], &task.verb);
                refuse!(EOPNOTSUPP, "{name}: {verb} cannot be cancelled; it continues")
            }
            _ => Ok(cancelled),
        }
    }

    /// Cancels all jobs that can be cancelled, and refuses new background jobs that would have to
    /// wait.
    pub fn end_all(&self) {
        self.0.ending.store(true, SeqCst);
        let waited = self.0.table.lock().cancel_waiting(&JobFilter::default(), SERVER_ENDING).len();
        if waited > 0 {
            tracing::info!("{waited} waiting jobs were cancelled: {SERVER_ENDING}");
        }
    }

    /// Waits until no background job runs, for at most `grace`.
    pub fn wait_ended(&self, grace: Duration) {
        let is_busy = |table: &mut Table| !table.queue.is_idle();
        drop(self.0.thread_ended.wait_timeout_while(self.0.table.lock(), grace, is_busy));
    }
}

impl Job {
    /// Sends the response that the job has started: its number and the `extra` members. Does
    /// nothing in the foreground.
    pub fn respond_started(&self, extra: Value) {
        let response = BACKGROUND.with_borrow_mut(|background| background.as_mut()?.response.take());
        if let Some(response) = response {
            // The receiver may be gone.
            let _ = response.send(self.task.started_response(extra));
        }
    }

    /// Records the progress in bytes. Returns false if the job must stop. Each call costs a system
    /// call, so call it between larger pieces of work.
    pub fn advance(&self, done: u64, total: u64) -> bool {
        self.report(done, total);
        !self.should_stop()
    }

    /// Records the progress in bytes. `total` is 0 while unknown.
    pub fn report(&self, done: u64, total: u64) {
        self.task.done_bytes.store(done, SeqCst);
        self.task.total_bytes.store(total, SeqCst);
    }

    /// Returns true if the job must stop. Once true, it stays true.
    pub fn should_stop(&self) -> bool {
        self.task.kind.cancellable && self.cancel_reason().is_some()
    }

    /// Returns true if a client has cancelled the job. Returns false if its client disconnected or
    /// the server shuts down.
    pub fn is_cancelled(&self) -> bool {
        self.task.cancelled.load(SeqCst)
    }

    fn cancel_reason(&self) -> Option<&'static str> {
        if self.shared.ending.load(SeqCst) {
            return Some(SERVER_ENDING);
        }
        if self.task.cancelled.load(SeqCst) {
            return Some(CANCEL_REQUESTED);
        }
        (!self.task.background && self.caller.has_disconnected()).then_some("the client disconnected")
    }

    /// Logs the cancellation of the job, and returns the error for it. `after` describes the
    /// resulting state for the message.
    pub fn cancelled(&self, after: &str) -> RpcError {
        let why = self.cancel_reason().unwrap_or(CANCEL_REQUESTED);
        tracing::info!("{}: {}: cancelled: {why}", self.task.names[0], self.task.verb);
        self.task.cancelled(why, after)
    }
}

impl ProgressSink for Job {
    fn should_stop(&self) -> bool {
        self.should_stop()
    }

    fn report(&self, done: u64, total: u64) {
        self.report(done, total);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.task.background {
            self.shared.table.lock().running.remove(&self.task.number);
        }
    }
}
