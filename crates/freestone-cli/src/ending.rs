//! The end of a server: what its devices hold back is made durable, whatever verbs hold and disks
//! do.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use freestone::device::{Completion, Device, Error, IoBuf, Request};
use freestone_spec::kinds::Entry;
use freestone_spec::machine::give_back_heap;
use tracing::error;

/// How long the devices may take for that, all together.
pub const FLUSH_MAX: Duration = Duration::from_secs(60);
/// Pause before a device is asked again whose power is just off.
const GONE_PAUSE: Duration = Duration::from_millis(20);
/// Devices are often removed one after the other; what they leave is given back once.
const GIVE_BACK_PAUSE: Duration = Duration::from_secs(1);
/// Pause before it is looked again whether all has let go of a device.
const CLOSING_PAUSE: Duration = Duration::from_millis(1);

/// Flushes all devices at the same time. What could not be flushed until `end` is logged by name;
/// how many those were.
pub fn flush(entries: &[Arc<Entry>], end: Instant) -> usize {
    let devices: Vec<_> = entries.iter().filter_map(|entry| Some((entry, flushed(entry)?))).collect();
    let (tell, told) = mpsc::channel();
    let begin = |at: usize| {
        let tell = tell.clone();
        let done = Completion::new(move |outcome, _| {
            // One that comes too late is told to nobody.
            let _ = tell.send((at, outcome));
        });
        let device: &Arc<dyn Device> = &devices[at].1;
        device.submit(Request::flush(), IoBuf::empty(), done);
    };
    let mut left = vec![true; devices.len()];
    let mut failed = 0;
    (0..devices.len()).for_each(&begin);
    while left.contains(&true) {
        match told.recv_timeout(end.saturating_duration_since(Instant::now())) {
            // A verb has switched it off, and not on again yet.
            Ok((at, Err(Error::Gone))) if devices[at].0.layers.quiesce.is_some() && Instant::now() < end => {
                thread::sleep(GONE_PAUSE);
                begin(at);
            }
            Ok((at, outcome)) => {
                left[at] = false;
                if let Err(why) = outcome {
                    error!(
                        "{}: could not be flushed, unflushed writes may be lost: {why}",
                        devices[at].0.name()
                    );
                    failed += 1;
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    for ((entry, _), _) in devices.iter().zip(left).filter(|(_, left)| *left) {
        let name = entry.name();
        error!("{name}: could not be flushed in time, unflushed writes may be lost");
        failed += 1;
    }
    failed
}

/// What has to be flushed of a device: without faults and pace, which are for its clients.
fn flushed(entry: &Entry) -> Option<Arc<dyn Device>> {
    if entry.is_read_only() {
        return None;
    }
    match (entry.kind.cow(), &entry.layers.quiesce) {
        // What it has answered is on its COW device. Where that holds anything back it is one of
        // the others.
        (Some(_), _) => None,
        (None, Some(quiesce)) => Some(Arc::clone(quiesce) as _),
        (None, None) => entry.device().cloned(),
    }
}

/// What says beside its data how it was closed: origins and the COW devices of their snapshots. The
/// last to let go of one says so, and that may be a thread that ends a merge or answers a request,
/// after all entries are gone.
pub struct Closing(Vec<(String, Weak<dyn Device>)>);

impl Closing {
    /// Of these devices.
    pub fn of(entries: &[Arc<Entry>]) -> Self {
        let closes = |entry: &Arc<Entry>| Some((entry.name().to_owned(), entry.kind.closes()?));
        Self(entries.iter().filter_map(closes).collect())
    }

    /// Waits until all are closed. Those that are not until `end` are logged by name; how many
    /// those were.
    pub fn wait(mut self, end: Instant) -> usize {
        loop {
            self.0.retain(|(_, device)| device.strong_count() > 0);
            if self.0.is_empty() || Instant::now() >= end {
                break;
            }
            thread::sleep(CLOSING_PAUSE);
        }
        for (name, _) in &self.0 {
            error!("{name}: could not be closed in time");
        }
        self.0.len()
    }
}

/// Devices that are no longer registered and not gone yet: what ends them may wait for their disks.
#[derive(Default)]
pub struct Leaving {
    names: Mutex<Vec<String>>,
    one_is_gone: Condvar,
    /// A thread gives back what they left, soon.
    giving_back: Arc<AtomicBool>,
}

/// A device leaves until this is dropped.
pub struct Leaves<'a>(&'a Leaving, &'a str);

impl Leaving {
    /// A device is about to leave.
    pub fn begin<'a>(&'a self, name: &'a str) -> Leaves<'a> {
        self.lock().push(name.to_owned());
        Leaves(self, name)
    }

    /// Waits until all have left. Those that have not until `end` are logged by name; how many
    /// those were.
    pub fn wait(&self, end: Instant) -> usize {
        let mut names = self.lock();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if names.is_empty() || left.is_zero() {
                break;
            }
            names = self.one_is_gone.wait_timeout(names, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        for name in names.iter() {
            error!("{name}: could not be removed in time, unflushed writes may be lost");
        }
        names.len()
    }

    /// Many small pieces of memory go with a device, and the allocator would keep them.
    fn give_back(&self) {
        if self.giving_back.swap(true, SeqCst) {
            return;
        }
        let giving_back = Arc::clone(&self.giving_back);
        let give_back = move || {
            thread::sleep(GIVE_BACK_PAUSE);
            giving_back.store(false, SeqCst);
            give_back_heap();
        };
        if thread::Builder::new().name("give-back".into()).spawn(give_back).is_err() {
            // The next one to leave tries again.
            self.giving_back.store(false, SeqCst);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        // Nothing in here can be half done.
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        let mut names = self.0.lock();
        if let Some(at) = names.iter().position(|name| name == self.1) {
            names.swap_remove(at);
        }
        self.0.one_is_gone.notify_all();
        drop(names);
        self.0.give_back();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use freestone::device::{Buffer, Extent, Geometry, Result, Tried};

    use super::*;
    use freestone_spec::kinds::NullData;
    use freestone_spec::kinds::build;
    use freestone_spec::kinds::registry::Registry;

    /// How often it is asked to flush, and what it says; `None` is nothing.
    struct Drive {
        below: Arc<dyn Device>,
        says: Option<Result<()>>,
        asked: AtomicUsize,
        unanswered: Mutex<Vec<Completion>>,
    }

    impl Device for Drive {
        fn geometry(&self) -> Geometry {
            self.below.geometry()
        }

        fn try_io(&self, _: &Request, _: Buffer<'_>) -> Result<Tried> {
            Ok(Tried::WouldBlock)
        }

        fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
            assert_eq!(request, Request::flush());
            self.asked.fetch_add(1, SeqCst);
            match self.says {
                Some(outcome) => done.complete(outcome, buffer),
                None => self.unanswered.lock().unwrap().push(done),
            }
        }

        fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
            self.below.extents(offset, len, row)
        }
    }

    fn drive(says: Option<Result<()>>) -> (Arc<Drive>, Arc<Entry>) {
        let null = build("n=null,size=1M".parse().unwrap(), &Arc::new(Registry::default())).unwrap();
        let below = Arc::clone(null.device().unwrap());
        let drive = Arc::new(Drive { below, says, asked: 0.into(), unanswered: Mutex::default() });
        let device = Some(Arc::clone(&drive) as _);
        let entry = Entry::new(null.spec.clone(), Box::new(NullData::Nothing), device, Vec::new());
        (drive, Arc::new(entry))
    }

    #[test]
    fn one_that_hangs_holds_up_no_other_and_all_that_failed_are_counted() {
        let outcomes = [None, Some(Err(Error::Media)), Some(Ok(())), None, Some(Ok(()))];
        let (drives, entries): (Vec<_>, Vec<_>) = outcomes.into_iter().map(drive).unzip();
        let began = Instant::now();
        assert_eq!(flush(&entries, began + Duration::from_millis(50)), 3);
        assert!(began.elapsed() < Duration::from_secs(30));
        assert!(drives.iter().all(|drive| drive.asked.load(SeqCst) == 1));
        assert_eq!(flush(&entries[4..], began), 0, "what is answered at once needs no time");
        // Answers that come later are heard by nobody.
        for drive in drives {
            drive.unanswered.lock().unwrap().clear();
        }
    }

    #[test]
    fn a_thread_that_lets_go_late_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let spec = format!("f=file,path={},size=1M", dir.path().join("f").display());
        let entry = Arc::new(build(spec.parse().unwrap(), &Arc::new(Registry::default())).unwrap());
        let closing = || Closing::of(&[Arc::clone(&entry)]);
        assert_eq!(closing().wait(Instant::now() + Duration::from_millis(10)), 1);
        let waits = closing();
        let late = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(entry);
        });
        assert_eq!(waits.wait(Instant::now() + Duration::from_secs(3600)), 0);
        late.join().unwrap();
    }

    #[test]
    fn who_leaves_is_waited_for() {
        let leaving = Leaving::default();
        assert_eq!(leaving.wait(Instant::now() + Duration::from_secs(3600)), 0);
        let one = leaving.begin("a");
        assert_eq!(leaving.wait(Instant::now() + Duration::from_millis(10)), 1);
        thread::scope(|scope| {
            let waits = scope.spawn(|| leaving.wait(Instant::now() + Duration::from_secs(3600)));
            drop(one);
            assert_eq!(waits.join().unwrap(), 0);
        });
    }
}
