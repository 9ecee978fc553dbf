//! Runs ops on a stack, one after the other, with some requests in flight, and judges what comes of
//! them.

mod ask;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};

use freestone::device::{Device, Result as Answer};
use freestone_core::workers::Workers;

use crate::ops::{self, Op};
use crate::rt::sync::{Arc, mpsc};
use crate::rt::thread::{self, JoinHandle};
use crate::rt::time::{Duration, Instant};
use crate::stack::{About, Act, Finish, NodeId, Task, World, Wrong};
use ask::{Ask, Asked, Asker, Hands};

/// Requests in flight at one time.
const FLIGHTS_MAX: usize = 8;
/// How long one wait for events is.
const SLICE: Duration = Duration::from_millis(20);
/// Bytes that one read of a check has.
const CHECK_BYTES: u64 = 128 << 10;
/// Threads to which requests are handed on.
const WORKERS: usize = 2;
/// Ops that are done beside a verb at most.
const BESIDE_MAX: u32 = 16;

/// What a run is judged by.
#[derive(Debug, Clone, Copy)]
pub struct Judge {
    /// So long may a request or a verb take, after all that hangs was let go.
    pub bound: Duration,
    /// So long what hangs below is left hanging when something is waited for.
    pub patience: Duration,
    /// Each op is told, on standard error.
    pub trace: bool,
    /// Threads and descriptors of the process are counted: nothing else may run in it.
    pub process: bool,
}

impl Default for Judge {
    fn default() -> Self {
        Self {
            bound: Duration::from_secs(60),
            patience: Duration::from_millis(100),
            trace: false,
            process: false,
        }
    }
}

/// What a run did.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// How often what happened.
    pub tally: BTreeMap<&'static str, u64>,
}

/// What a run met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// In this op of those of the stack and the run together, counted from 1; behind the last one
    /// it is the end.
    pub op: usize,
    /// What must not be.
    pub wrong: Wrong,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op {}: {}", self.op, self.wrong)
    }
}

/// Runs `ops` on the stack of this seed; `None` is an empty one.
///
/// # Errors
/// The first thing that must not be.
pub fn run(stack_seed: Option<u64>, ops: &[Op], judge: Judge) -> Result<Report, Failure> {
    let before = judge.process.then(Process::now);
    let stack = stack_seed.map(ops::stack).unwrap_or_default();
    let mut runner = Runner::new(judge);
    let outcome = stack.iter().chain(ops).try_for_each(|op| runner.step(op));
    let outcome = outcome.and_then(|()| {
        runner.at += 1;
        runner.end()
    });
    let at = runner.at;
    let report = Report { tally: runner.world.tally().clone() };
    let ended = match outcome {
        Ok(()) => runner.close().and_then(|()| before.map_or(Ok(()), |before| before.is_again(judge.bound))),
        Err(wrong) => {
            // What hangs in it is left alone.
            runner.abandon();
            Err(wrong)
        }
    };
    ended.map(|()| report).map_err(|wrong| Failure { op: at, wrong })
}

/// What comes back to the one thread that knows the world.
enum Event {
    /// Of the request with this number, with what was read.
    Answer(u64, Answer<()>, Vec<u8>),
    /// Who asked has let go of the device.
    Asked(u64),
    Finish(Finish),
    /// Something went wrong on another thread.
    Wrong(Wrong),
}

/// A request that was begun and not answered.
struct Flight {
    task: Task,
    began: Instant,
    /// Who asks still holds the device, so that what is removed would outlive its removal.
    is_asking: bool,
    answer: Option<(Answer<()>, Vec<u8>)>,
    /// Where a worker has it: what is begun by it ends with it.
    _by: Option<Arc<Hands>>,
}

impl Flight {
    fn new(task: Task, is_asking: bool, by: Option<Arc<Hands>>) -> Self {
        Self { task, began: Instant::now(), is_asking, answer: None, _by: by }
    }
}

/// A verb that is under way.
struct Acting {
    what: String,
    about: About,
    began: Instant,
    /// Ops that were begun beside it.
    beside: u32,
}

struct Runner {
    judge: Judge,
    /// Ops so far.
    at: usize,
    world: World,
    events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
    flights: BTreeMap<u64, Flight>,
    acting: Option<Acting>,
    next: u64,
    acts: Option<mpsc::Sender<Act>>,
    actor: Option<JoinHandle<()>>,
    /// Threads that ask devices; without any the runner does.
    askers: Vec<Asker>,
    /// To whom some requests are handed on.
    workers: Workers,
}

impl Runner {
    fn new(judge: Judge) -> Self {
        let (sender, events) = mpsc::channel();
        let (acts, todo) = mpsc::channel::<Act>();
        let finished = sender.clone();
        let actor = thread::spawn(move || {
            while let Ok(act) = todo.recv() {
                let finish = panic::catch_unwind(AssertUnwindSafe(act))
                    .unwrap_or_else(|_| Box::new(|_| Err(Wrong::Said("a verb panicked".into()))));
                if finished.send(Event::Finish(finish)).is_err() {
                    return;
                }
            }
        });
        Self {
            judge,
            at: 0,
            world: World::new(),
            events,
            sender,
            flights: BTreeMap::new(),
            acting: None,
            next: 0,
            acts: Some(acts),
            actor: Some(actor),
            askers: Vec::new(),
            workers: Workers::new(WORKERS),
        }
    }

    fn step(&mut self, op: &Op) -> Result<(), Wrong> {
        self.at += 1;
        while let Ok(event) = self.events.try_recv() {
            self.take(event)?;
        }
        self.beside(op)?;
        match op {
            Op::Io(io) => {
                let Some((task, device)) = self.world.begin_io(io) else { return Ok(()) };
                self.trace(|runner| format!("{} {:?} {io:?}", runner.world.name(task.node), task.request));
                let id = self.issue(task, device, io.submit)?;
                if io.wait {
                    self.until("a request", |runner| !runner.flights.contains_key(&id))?;
                }
                self.until("a request", |runner| runner.flights.len() < FLIGHTS_MAX)?;
            }
            Op::Check(number) => {
                let all = self.world.targets();
                if let Some(node) = self.world.choose(&all, *number) {
                    self.trace(|runner| format!("check {}", runner.world.name(node)));
                    self.check(node)?;
                }
            }
            Op::Await => self.quiet()?,
            Op::Focus(on) => self.world.focus(*on),
            Op::Askers(count) => {
                while self.askers.len() < usize::from(*count) {
                    self.askers.push(Asker::new(&self.sender));
                }
            }
            op => {
                let Some(about) = self.world.about(op) else { return Ok(()) };
                self.trace(|runner| format!("{op:?} of {}", runner.world.names(&about)));
                self.verb(op, about)?;
            }
        }
        let complaints = self.world.complaints();
        if complaints.is_empty() { Ok(()) } else { Err(Wrong::Said(complaints.join("; "))) }
    }

    /// Waits for the verb that is under way, where this op cannot be done beside it.
    fn beside(&mut self, op: &Op) -> Result<(), Wrong> {
        let can = self.acting.as_mut().is_none_or(|acting| {
            acting.beside += 1;
            op.is_beside() && acting.beside <= BESIDE_MAX
        });
        if can { Ok(()) } else { self.settle() }
    }

    /// Waits for the verb that is under way.
    fn settle(&mut self) -> Result<(), Wrong> {
        self.until("a verb", |runner| runner.acting.is_none())
    }

    fn trace(&self, what: impl FnOnce(&Self) -> String) {
        if self.judge.trace {
            eprintln!("{:>5} {}", self.at, what(self));
        }
    }

    /// Begins a verb, which goes on beside the next ops.
    fn verb(&mut self, op: &Op, about: About) -> Result<(), Wrong> {
        self.world.prelude(op, &about);
        let quiet = about.quiet.clone();
        self.until("the requests before a verb", |runner| quiet.iter().all(|&id| runner.world.is_quiet(id)))?;
        self.world.hold(&about);
        if let Some(act) = self.world.begin(op, &about) {
            return self.act(format!("{op:?}"), about, act);
        }
        self.world.let_go(&about);
        Ok(())
    }

    fn act(&mut self, what: String, about: About, act: Act) -> Result<(), Wrong> {
        let sent = self.acts.as_ref().is_some_and(|acts| acts.send(act).is_ok());
        if !sent {
            return Err(Wrong::Said(format!("{what}: the thread of the verbs is gone")));
        }
        self.acting = Some(Acting { what, about, began: Instant::now(), beside: 0 });
        Ok(())
    }

    // ---- requests -------------------------------------------------------------------------------

    /// Asks a device, as an export does, and returns the flight's number; what is done at once is
    /// none.
    fn issue(&mut self, mut task: Task, device: Arc<dyn Device>, submit: bool) -> Result<u64, Wrong> {
        let id = self.next;
        self.next += 1;
        let (request, data) = (task.request, std::mem::take(&mut task.data));
        // Of those that are only submitted, every other one is a worker's.
        let by = (submit && id % 2 == 1).then(|| Hands::new(&device, &self.workers));
        let ask = Ask { id, request, data, device, submit, by: by.clone() };
        if !self.askers.is_empty() {
            self.flights.insert(id, Flight::new(task, true, by));
            let asker = &self.askers[id as usize % self.askers.len()];
            return match asker.asks.send(ask) {
                Ok(()) => Ok(id),
                Err(_) => Err(Wrong::Said("a thread of the requests is gone".into())),
            };
        }
        match ask.tries()? {
            Asked::Answered(answer, bytes) => self.world.end_io(task, answer, &bytes)?,
            Asked::Waits(rest) => {
                self.flights.insert(id, Flight::new(task, false, by));
                rest.submit(self.sender.clone());
            }
        }
        Ok(id)
    }

    /// Reads all of a node, and waits for it.
    fn check(&mut self, node: NodeId) -> Result<(), Wrong> {
        let mut at = 0;
        while let Some((task, device)) = self.world.begin_check(node, at, CHECK_BYTES) {
            at += task.request.len;
            let id = self.issue(task, device, false)?;
            self.until("a read", |runner| !runner.flights.contains_key(&id))?;
        }
        Ok(())
    }

    fn quiet(&mut self) -> Result<(), Wrong> {
        self.until("what is in flight", |runner| runner.flights.is_empty())
    }

    // ---- waiting --------------------------------------------------------------------------------

    fn take(&mut self, event: Event) -> Result<(), Wrong> {
        match event {
            Event::Answer(id, answer, bytes) => {
                let Some(flight) = self.flights.get_mut(&id).filter(|flight| flight.answer.is_none()) else {
                    return Err(Wrong::Said(format!("flight {id} was answered twice")));
                };
                let took = flight.began.elapsed();
                if took > self.judge.bound {
                    let request = flight.task.request;
                    return Err(Wrong::Said(format!("{request:?} was answered only after {took:?}")));
                }
                flight.answer = Some((answer, bytes));
                self.landed(id)
            }
            Event::Asked(id) => {
                self.flights.get_mut(&id).into_iter().for_each(|flight| flight.is_asking = false);
                self.landed(id)
            }
            Event::Finish(finish) => {
                let Some(Acting { what, about, began, .. }) = self.acting.take() else {
                    return Err(Wrong::Said("a verb ended twice".into()));
                };
                finish(&mut self.world)?;
                self.world.let_go(&about);
                let took = began.elapsed();
                if took > self.judge.bound {
                    return Err(Wrong::Said(format!("{what}: ended only after {took:?}")));
                }
                Ok(())
            }
            Event::Wrong(wrong) => Err(wrong),
        }
    }

    /// Judges a request that is answered, once nobody holds its device for it.
    fn landed(&mut self, id: u64) -> Result<(), Wrong> {
        let is_over = |flight: &Flight| flight.answer.is_some() && !flight.is_asking;
        if !self.flights.get(&id).is_some_and(is_over) {
            return Ok(());
        }
        let Some(Flight { task, answer: Some((answer, bytes)), .. }) = self.flights.remove(&id) else {
            return Ok(());
        };
        self.world.end_io(task, answer, &bytes)
    }

    /// Takes what comes until something is so. What hangs below is let go after a while.
    fn until(&mut self, what: &str, is: impl Fn(&Self) -> bool) -> Result<(), Wrong> {
        let began = Instant::now();
        while !is(self) {
            let waited = began.elapsed();
            if waited > self.judge.bound {
                let flights: Vec<String> = self
                    .flights
                    .values()
                    .map(|flight| format!("{}: {:?}", self.world.name(flight.task.node), flight.task.request))
                    .collect();
                let verb = self.acting.as_ref().map_or("none", |acting| &acting.what);
                return Err(Wrong::Said(format!(
                    "{what}: no end after {waited:?}; verb: {verb}; in flight: {}",
                    flights.join(", ")
                )));
            }
            if waited >= self.judge.patience {
                self.world.release();
            }
            if let Ok(event) = self.events.recv_timeout(SLICE) {
                self.take(event)?;
            }
        }
        Ok(())
    }

    // ---- the end --------------------------------------------------------------------------------

    /// All is well below, everything is looked at, and goes.
    fn end(&mut self) -> Result<(), Wrong> {
        self.world.heal();
        self.settle()?;
        self.quiet()?;
        self.world.outlast();
        self.world.images_are_whole()?;
        for node in self.world.targets() {
            self.check(node)?;
        }
        while let Some(last) = self.world.last() {
            let act = self.world.remove(last);
            self.act("a removal".into(), About::default(), act)?;
            self.settle()?;
        }
        let began = Instant::now();
        loop {
            match self.world.accounts() {
                Ok(()) => return Ok(()),
                Err(wrong) if began.elapsed() > self.judge.bound => return Err(wrong),
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Everything is dropped.
    fn close(mut self) -> Result<(), Wrong> {
        let world = std::mem::take(&mut self.world);
        let dropped: Act = Box::new(move || {
            drop(world);
            Box::new(|_| Ok(()))
        });
        self.act("the end of the families".into(), About::default(), dropped)?;
        self.settle()?;
        self.acts = None;
        self.askers.drain(..).for_each(Asker::end);
        self.workers.stop();
        if let Some(actor) = self.actor.take() {
            // What panicked there was told.
            let _ = actor.join();
        }
        Ok(())
    }

    /// After a failure: nothing is waited for, since it may never end.
    fn abandon(mut self) {
        self.world.heal();
        let world = std::mem::take(&mut self.world);
        let flights = std::mem::take(&mut self.flights);
        // Not joined.
        self.askers.clear();
        if let Some(acts) = self.acts.take() {
            let left: Act = Box::new(move || {
                drop((flights, world));
                Box::new(|_| Ok(()))
            });
            let _ = acts.send(left);
        }
    }
}

/// What the process has.
struct Process {
    threads: usize,
    descriptors: usize,
}

impl Process {
    fn now() -> Self {
        let count = |path| std::fs::read_dir(path).map_or(0, Iterator::count);
        Self { threads: count("/proc/self/task"), descriptors: count("/proc/self/fd") }
    }

    /// Threads end a moment after those who wait for them were told.
    fn is_again(&self, bound: Duration) -> Result<(), Wrong> {
        let began = Instant::now();
        loop {
            let now = Self::now();
            if now.threads == self.threads && now.descriptors == self.descriptors {
                return Ok(());
            }
            if began.elapsed() > bound {
                return Err(Wrong::Said(format!(
                    "the process had {} threads and {} descriptors, and has {} and {}",
                    self.threads, self.descriptors, now.threads, now.descriptors
                )));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use freestone::device::{
        Blocking, Buffer, Completion, Extent, Geometry, IoBuf, Op as DeviceOp, Request, Tried,
    };
    use freestone_testkit::Model;

    use super::*;
    use crate::rt::sync::Mutex;

    /// A device that forgets one write of so many.
    struct Forgetful(Model, Mutex<u32>);

    impl Device for Forgetful {
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }
        fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Answer<Tried> {
            let mut left = self.1.lock().unwrap();
            *left -= u32::from(request.op == DeviceOp::Write);
            if *left == 0 {
                *left = 20;
                return Ok(Tried::Done);
            }
            drop(left);
            self.0.try_io(request, buffer)
        }
        fn submit(&self, request: freestone::device::Request, buffer: IoBuf, done: Completion) {
            self.0.submit(request, buffer, done);
        }
        fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Answer<u64> {
            self.0.extents(offset, len, row)
        }
    }

    #[test]
    fn runs_end_well() {
        for seed in [2, 5, 8, 12] {
            let report = run(Some(seed), &ops::draw(seed, 150), Judge::default());
            let report = report.unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
            assert!(report.tally["reads"] > 0);
        }
    }

    #[test]
    fn a_device_that_forgets_is_found() {
        let broken = Forgetful(Model::new(1 << 20, 512), Mutex::new(20));
        broken.0.write_zeroes(0, 512, freestone::device::Flags::empty()).unwrap();
        let mut runner = Runner::new(Judge::default());
        runner.world.add_device("forgetful", Arc::new(broken));
        // Verbs might take it away.
        let ops = ops::draw(1, 400).into_iter().filter(|op| matches!(op, Op::Io(_) | Op::Await));
        let found = ops.into_iter().try_for_each(|op| runner.step(&op)).and_then(|()| runner.end());
        assert!(matches!(found, Err(Wrong::Content(_))), "{found:?}");
        runner.abandon();
    }

    #[test]
    fn a_device_that_never_answers_is_found() {
        let disk = crate::disk::SimDisk::new(crate::disk::DiskConfig::default(), 1);
        let hangs = crate::disk::Chances { hang: 1000, ..Default::default() };
        disk.control().set_plan(crate::disk::Plan { read: hangs, write: hangs, ..Default::default() });
        let judge = Judge { bound: Duration::from_millis(300), ..Judge::default() };
        let mut runner = Runner::new(judge);
        runner.world.add_device("silent", Arc::new(disk));
        let mut ops = ops::draw(1, 100).into_iter().filter(|op| matches!(op, Op::Io(_) | Op::Await));
        let found = ops.try_for_each(|op| runner.step(&op));
        assert!(matches!(&found, Err(Wrong::Said(what)) if what.contains("no end")), "{found:?}");
        runner.abandon();
    }
}
