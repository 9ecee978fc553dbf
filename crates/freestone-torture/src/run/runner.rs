//! The runner: executes ops, starts verbs, waits for events, and judges completed requests.

use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};

use freestone::device::{Device, Result as Answer};
use freestone_core::workers::Workers;

use super::issue::{DeviceRequest, RequestThread, TryOutcome, WorkerUser};
use super::{Event, RunSettings};
use crate::ops::Op;
use crate::rt::sync::{Arc, mpsc};
use crate::rt::thread::{self, JoinHandle};
use crate::rt::time::{Duration, Instant};
use crate::stack::{Finding, NodeId, Scope, Task, VerbTask, World};

/// Maximum number of requests in flight on all nodes.
const IN_FLIGHT_MAX: usize = 8;
/// Longest wait for one event before the runner checks the time limits again.
const EVENT_WAIT: Duration = Duration::from_millis(20);
/// Bytes per read when a check reads a whole node.
const CHECK_BYTES: u64 = 128 << 10;
/// Number of worker threads, which execute some of the requests.
const WORKERS: usize = 2;
/// Maximum number of ops that run while one verb (an op other than a request) is in progress.
const CONCURRENT_OPS_MAX: u32 = 16;

/// A request that was issued and not yet judged.
struct InFlight {
    task: Task,
    began: Instant,
    /// The issuing thread still holds a reference to the device. The request is judged only after
    /// the release: otherwise the reference would keep a removed device alive.
    is_device_held: bool,
    answer: Option<(Answer<()>, Vec<u8>)>,
    /// Keeps the worker's user alive: requests queued at the worker do not start after the user is
    /// dropped.
    _worker: Option<Arc<WorkerUser>>,
}

impl InFlight {
    fn new(task: Task, is_device_held: bool, worker: Option<Arc<WorkerUser>>) -> Self {
        Self { task, began: Instant::now(), is_device_held, answer: None, _worker: worker }
    }
}

struct RunningVerb {
    what: String,
    scope: Scope,
    began: Instant,
    /// Number of ops started while the verb is in progress.
    concurrent: u32,
}

pub(super) struct Runner {
    settings: RunSettings,
    /// Number of the current op, counted from 1.
    pub(super) op_number: usize,
    pub(super) world: World,
    events: mpsc::Receiver<Event>,
    event_sender: mpsc::Sender<Event>,
    in_flight: BTreeMap<u64, InFlight>,
    running_verb: Option<RunningVerb>,
    next_id: u64,
    verb_sender: Option<mpsc::Sender<VerbTask>>,
    verb_thread: Option<JoinHandle<()>>,
    /// Threads that issue requests. If there are none, the runner issues the requests itself.
    request_threads: Vec<RequestThread>,
    /// Workers that execute some of the requests.
    workers: Workers,
}

impl Runner {
    pub(super) fn new(settings: RunSettings) -> Self {
        let (event_sender, events) = mpsc::channel();
        let (verb_sender, todo) = mpsc::channel::<VerbTask>();
        let finished = event_sender.clone();
        let verb_thread = thread::spawn(move || {
            while let Ok(task) = todo.recv() {
                let verb_result = panic::catch_unwind(AssertUnwindSafe(task))
                    .unwrap_or_else(|_| Box::new(|_| Err(Finding::Message("a verb panicked".into()))));
                if finished.send(Event::VerbResult(verb_result)).is_err() {
                    return;
                }
            }
        });
        Self {
            settings,
            op_number: 0,
            world: World::new(),
            events,
            event_sender,
            in_flight: BTreeMap::new(),
            running_verb: None,
            next_id: 0,
            verb_sender: Some(verb_sender),
            verb_thread: Some(verb_thread),
            request_threads: Vec::new(),
            workers: Workers::new(WORKERS),
        }
    }

    pub(super) fn step(&mut self, op: &Op) -> Result<(), Finding> {
        self.op_number += 1;
        while let Ok(event) = self.events.try_recv() {
            self.handle_event(event)?;
        }
        self.wait_unless_concurrent(op)?;
        match op {
            Op::Io(io) => {
                let Some((task, device)) = self.world.begin_io(io) else { return Ok(()) };
                self.trace(|runner| format!("{} {:?} {io:?}", runner.world.name(task.node), task.request));
                let id = self.issue(task, device, io.submit)?;
                if io.wait {
                    self.wait_until("a request", |runner| !runner.in_flight.contains_key(&id))?;
                }
                self.wait_until("a request", |runner| runner.in_flight.len() < IN_FLIGHT_MAX)?;
            }
            Op::Check(number) => {
                let all = self.world.targets();
                if let Some(node) = self.world.choose(&all, *number) {
                    self.trace(|runner| format!("check {}", runner.world.name(node)));
                    self.check_content(node)?;
                }
            }
            Op::Await => self.wait_idle()?,
            Op::Focus(on) => self.world.focus(*on),
            Op::RequestThreads(count) => {
                while self.request_threads.len() < usize::from(*count) {
                    self.request_threads.push(RequestThread::new(&self.event_sender));
                }
            }
            op => {
                let Some(scope) = self.world.scope(op) else { return Ok(()) };
                self.trace(|runner| format!("{op:?} of {}", runner.world.names(&scope)));
                self.prepare_verb(op, scope)?;
            }
        }
        let violations = self.world.violations();
        if violations.is_empty() { Ok(()) } else { Err(Finding::Message(violations.join("; "))) }
    }

    fn wait_unless_concurrent(&mut self, op: &Op) -> Result<(), Finding> {
        let can = self.running_verb.as_mut().is_none_or(|verb| {
            verb.concurrent += 1;
            op.is_concurrent() && verb.concurrent <= CONCURRENT_OPS_MAX
        });
        if can { Ok(()) } else { self.wait_verb() }
    }

    /// Waits for the running verb, if any.
    fn wait_verb(&mut self) -> Result<(), Finding> {
        self.wait_until("a verb", |runner| runner.running_verb.is_none())
    }

    fn trace(&self, what: impl FnOnce(&Self) -> String) {
        if self.settings.trace {
            eprintln!("{:>5} {}", self.op_number, what(self));
        }
    }

    /// Starts a verb once its nodes are idle. The verb continues while the next ops run.
    fn prepare_verb(&mut self, op: &Op, scope: Scope) -> Result<(), Finding> {
        self.world.before_wait(op, &scope);
        let idle = scope.idle.clone();
        self.wait_until("the requests before a verb", |runner| {
            idle.iter().all(|&id| runner.world.is_idle(id))
        })?;
        self.world.pause_nodes(&scope);
        if let Some(verb_task) = self.world.begin(op, &scope) {
            return self.start_verb(format!("{op:?}"), scope, verb_task);
        }
        self.world.resume_nodes(&scope);
        Ok(())
    }

    fn start_verb(&mut self, what: String, scope: Scope, verb_task: VerbTask) -> Result<(), Finding> {
        let sent = self.verb_sender.as_ref().is_some_and(|verb_sender| verb_sender.send(verb_task).is_ok());
        if !sent {
            return Err(Finding::Message(format!("{what}: the verb thread has ended")));
        }
        self.running_verb = Some(RunningVerb { what, scope, began: Instant::now(), concurrent: 0 });
        Ok(())
    }

    // ---- requests -------------------------------------------------------------------------------

    /// Issues a request as an export does, and returns the number of the request. A request that
    /// completes at once is never in `in_flight`.
    fn issue(&mut self, mut task: Task, device: Arc<dyn Device>, submit: bool) -> Result<u64, Finding> {
        let id = self.next_id;
        self.next_id += 1;
        let (request, data) = (task.request, std::mem::take(&mut task.data));
        // Give a worker every other request that skips the try.
        let worker = (submit && id % 2 == 1).then(|| WorkerUser::new(&device, &self.workers));
        let device_request = DeviceRequest { id, request, data, device, submit, worker: worker.clone() };
        if !self.request_threads.is_empty() {
            self.in_flight.insert(id, InFlight::new(task, true, worker));
            let request_thread = &self.request_threads[id as usize % self.request_threads.len()];
            return match request_thread.requests.send(device_request) {
                Ok(()) => Ok(id),
                Err(_) => Err(Finding::Message("a request thread has ended".into())),
            };
        }
        match device_request.try_inline()? {
            TryOutcome::Completed(answer, bytes) => self.world.end_io(task, answer, &bytes)?,
            TryOutcome::Blocked(remainder) => {
                self.in_flight.insert(id, InFlight::new(task, false, worker));
                remainder.submit(self.event_sender.clone());
            }
        }
        Ok(id)
    }

    /// Reads all of a node, waits for each read, and judges the bytes.
    fn check_content(&mut self, node: NodeId) -> Result<(), Finding> {
        let mut op_number = 0;
        while let Some((task, device)) = self.world.begin_check(node, op_number, CHECK_BYTES) {
            op_number += task.request.len;
            let id = self.issue(task, device, false)?;
            self.wait_until("a read", |runner| !runner.in_flight.contains_key(&id))?;
        }
        Ok(())
    }

    fn wait_idle(&mut self) -> Result<(), Finding> {
        self.wait_until("requests in flight", |runner| runner.in_flight.is_empty())
    }

    // ---- waiting --------------------------------------------------------------------------------

    fn handle_event(&mut self, event: Event) -> Result<(), Finding> {
        match event {
            Event::Completed(id, answer, bytes) => {
                let Some(request) = self.in_flight.get_mut(&id).filter(|request| request.answer.is_none())
                else {
                    return Err(Finding::Message(format!("request {id} completed twice")));
                };
                let took = request.began.elapsed();
                if took > self.settings.max_duration {
                    let request = request.task.request;
                    return Err(Finding::Message(format!("{request:?} completed only after {took:?}")));
                }
                request.answer = Some((answer, bytes));
                self.judge_completed(id)
            }
            Event::Released(id) => {
                self.in_flight.get_mut(&id).into_iter().for_each(|request| request.is_device_held = false);
                self.judge_completed(id)
            }
            Event::VerbResult(verb_result) => {
                let Some(RunningVerb { what, scope, began, .. }) = self.running_verb.take() else {
                    return Err(Finding::Message("a verb ended twice".into()));
                };
                verb_result(&mut self.world)?;
                self.world.resume_nodes(&scope);
                let took = began.elapsed();
                if took > self.settings.max_duration {
                    return Err(Finding::Message(format!("{what}: ended only after {took:?}")));
                }
                Ok(())
            }
            Event::Finding(finding) => Err(finding),
        }
    }

    /// Judges a completed request once the issuing thread has released the device.
    fn judge_completed(&mut self, id: u64) -> Result<(), Finding> {
        let is_over = |request: &InFlight| request.answer.is_some() && !request.is_device_held;
        if !self.in_flight.get(&id).is_some_and(is_over) {
            return Ok(());
        }
        let Some(InFlight { task, answer: Some((answer, bytes)), .. }) = self.in_flight.remove(&id) else {
            return Ok(());
        };
        self.world.end_io(task, answer, &bytes)
    }

    /// Handles events until `is` returns true. Releases hanging requests after `release_after`.
    fn wait_until(&mut self, what: &str, is: impl Fn(&Self) -> bool) -> Result<(), Finding> {
        let began = Instant::now();
        while !is(self) {
            let waited = began.elapsed();
            if waited > self.settings.max_duration {
                let in_flight: Vec<String> = self
                    .in_flight
                    .values()
                    .map(|request| {
                        format!("{}: {:?}", self.world.name(request.task.node), request.task.request)
                    })
                    .collect();
                let verb = self.running_verb.as_ref().map_or("none", |verb| &verb.what);
                return Err(Finding::Message(format!(
                    "{what}: no end after {waited:?}; verb: {verb}; in flight: {}",
                    in_flight.join(", ")
                )));
            }
            if waited >= self.settings.release_after {
                self.world.release();
            }
            if let Ok(event) = self.events.recv_timeout(EVENT_WAIT) {
                self.handle_event(event)?;
            }
        }
        Ok(())
    }

    // ---- the end --------------------------------------------------------------------------------

    /// Ends all faults, checks the content of all nodes, and removes them.
    pub(super) fn end(&mut self) -> Result<(), Finding> {
        self.world.heal();
        self.wait_verb()?;
        self.wait_idle()?;
        self.world.wait_store_faults_over();
        self.world.check_images()?;
        for node in self.world.targets() {
            self.check_content(node)?;
        }
        while let Some(last) = self.world.any_removable() {
            let verb_task = self.world.remove(last);
            self.start_verb("a removal".into(), Scope::default(), verb_task)?;
            self.wait_verb()?;
        }
        let began = Instant::now();
        loop {
            match self.world.check_released() {
                Ok(()) => return Ok(()),
                Err(finding) if began.elapsed() > self.settings.max_duration => return Err(finding),
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Drops the remaining devices on the verb thread, so that a drop that hangs is detected.
    pub(super) fn close(mut self) -> Result<(), Finding> {
        let world = std::mem::take(&mut self.world);
        let dropped: VerbTask = Box::new(move || {
            drop(world);
            Box::new(|_| Ok(()))
        });
        self.start_verb("the end of the families".into(), Scope::default(), dropped)?;
        self.wait_verb()?;
        self.verb_sender = None;
        self.request_threads.drain(..).for_each(RequestThread::end);
        self.workers.stop();
        if let Some(verb_thread) = self.verb_thread.take() {
            // The panic hook has already reported a panic of that thread.
            let _ = verb_thread.join();
        }
        Ok(())
    }

    /// Cleans up after a failure. Waits for no request or thread, since it may never end.
    pub(super) fn abandon(mut self) {
        self.world.heal();
        let world = std::mem::take(&mut self.world);
        let in_flight = std::mem::take(&mut self.in_flight);
        // Drop the request threads without joining them: a request may still hang.
        self.request_threads.clear();
        if let Some(verb_sender) = self.verb_sender.take() {
            let left: VerbTask = Box::new(move || {
                drop((in_flight, world));
                Box::new(|_| Ok(()))
            });
            let _ = verb_sender.send(left);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use freestone::device::{Op as DeviceOp, TryResult};
    use freestone_testkit::{Model, TestDevice};

    use super::*;
    use crate::ops;

    #[test]
    fn forgetful_device_is_found() {
        // The device reports success for every 20th write but discards it.
        let writes = AtomicU32::new(0);
        let model = Arc::new(Model::new(1 << 20, 512));
        let broken = TestDevice::over(model).on_try(move |model, request, buffer| {
            let is_write = request.op == DeviceOp::Write;
            if is_write && writes.fetch_add(1, Ordering::SeqCst) % 20 == 19 {
                return Ok(TryResult::Done);
            }
            model.try_io(request, buffer)
        });
        let mut runner = Runner::new(RunSettings::default());
        runner.world.add_device("forgetful", Arc::new(broken));
        // Run requests only: a verb might remove the broken device.
        let ops = ops::draw(1, 400).into_iter().filter(|op| matches!(op, Op::Io(_) | Op::Await));
        let found = ops.into_iter().try_for_each(|op| runner.step(&op)).and_then(|()| runner.end());
        assert!(matches!(found, Err(Finding::Content(_))), "{found:?}");
        runner.abandon();
    }

    #[test]
    fn hanging_device_is_found() {
        let disk = crate::disk::SimDisk::new(crate::disk::DiskConfig::default(), 1);
        let hangs = crate::disk::FaultRates { hang: 1000, ..Default::default() };
        disk.control().set_plan(crate::disk::Plan { read: hangs, write: hangs, ..Default::default() });
        let settings = RunSettings { max_duration: Duration::from_millis(300), ..RunSettings::default() };
        let mut runner = Runner::new(settings);
        runner.world.add_device("silent", Arc::new(disk));
        let mut ops = ops::draw(1, 100).into_iter().filter(|op| matches!(op, Op::Io(_) | Op::Await));
        let found = ops.try_for_each(|op| runner.step(&op));
        assert!(matches!(&found, Err(Finding::Message(what)) if what.contains("no end")), "{found:?}");
        runner.abandon();
    }
}
