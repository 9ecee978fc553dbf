//! Server shutdown: flushes and closes all devices within a deadline, even if verbs still hold devices or a
//! disk hangs. Also tracks devices whose removal has not finished.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use freestone::device::{Completion, Device, DropObserver, Error, IoBuf, Request};
use freestone_core::sync::{Condvar, Mutex};
use freestone_spec::kinds::Entry;
use freestone_spec::machine::trim_heap;
use tracing::error;

/// Longest time to flush, close and remove all devices of a server together.
pub const FLUSH_MAX: Duration = Duration::from_secs(60);
/// Pause before repeating a flush that failed because a power cut of the device is being simulated.
const GONE_PAUSE: Duration = Duration::from_millis(20);
/// Delay before freed memory is returned to the system. Devices are often removed one after the other, and
/// one call then returns the memory of several devices.
const HEAP_TRIM_DELAY: Duration = Duration::from_secs(1);
/// Poll interval while waiting for the last reference to a device.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Flushes all devices at the same time, until `end` at most. Logs each device that could not be flushed, and
/// returns the number of these devices.
pub fn flush(entries: &[Arc<Entry>], end: Instant) -> usize {
    let devices: Vec<_> = entries.iter().filter_map(|entry| Some((entry, flush_target(entry)?))).collect();
    let (sender, outcomes) = mpsc::channel();
    let begin = |at: usize| {
        let sender = sender.clone();
        let done = Completion::new(move |outcome, _| {
            // The receiver may be gone after the deadline.
            let _ = sender.send((at, outcome));
        });
        let device: &Arc<dyn Device> = &devices[at].1;
        device.submit(Request::flush(), IoBuf::empty(), done);
    };
    let mut left = vec![true; devices.len()];
    let mut failed = 0;
    (0..devices.len()).for_each(&begin);
    while left.contains(&true) {
        match outcomes.recv_timeout(end.saturating_duration_since(Instant::now())) {
            // The verb power_cut simulates a power loss of this device; the flush is repeated when it may be
            // over.
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

/// Returns the layer of a device to flush, under the layers of faults and pace, which affect only requests of
/// clients. Returns `None` if the device has nothing to flush.
fn flush_target(entry: &Entry) -> Option<Arc<dyn Device>> {
    if entry.is_read_only() {
        return None;
    }
    match (entry.kind.cow(), &entry.layers.quiesce) {
        // Completed writes are on the COW device, which has an entry of its own if it must be flushed.
        (Some(_), _) => None,
        (None, Some(quiesce)) => Some(Arc::clone(quiesce) as _),
        (None, None) => entry.device().cloned(),
    }
}

/// Devices that complete something outside of this process when they are dropped. Files, origins and the COW
/// devices of their snapshots record a clean close, power layers the last entries of their logs, and zoned
/// devices the state of their zones. The thread that drops the last reference does this. It can be a thread
/// that ends a merge or completes a request, after all entries have been dropped.
pub struct Closing(Vec<(String, Vec<DropObserver>)>);

impl Closing {
    /// Returns the devices of `entries` whose drop completes something.
    pub fn of(entries: &[Arc<Entry>]) -> Self {
        let observers = |entry: &Arc<Entry>| {
            let (power, zones) = (&entry.layers.power, &entry.layers.zones);
            let observers = [
                entry.kind.drop_observer(),
                power.as_ref().map(|power| power.drop_observer()),
                zones.as_ref().map(|zones| zones.drop_observer()),
            ];
            (entry.name().to_owned(), observers.into_iter().flatten().collect())
        };
        Self(entries.iter().map(observers).collect())
    }

    /// Waits until all devices are dropped, until `end` at most. Logs each device that is not closed, and
    /// returns the number of these devices.
    pub fn wait(mut self, end: Instant) -> usize {
        loop {
            self.0.retain(|(_, observers)| !observers.iter().all(DropObserver::is_dropped));
            if self.0.is_empty() || Instant::now() >= end {
                break;
            }
            thread::sleep(CLOSE_POLL_INTERVAL);
        }
        for (name, _) in &self.0 {
            error!("{name}: could not be closed in time");
        }
        self.0.len()
    }
}

/// Devices that are no longer registered but not destroyed yet: their destructors may wait for disks.
#[derive(Default)]
pub struct PendingRemovals {
    names: Mutex<Vec<String>>,
    one_has_ended: Condvar,
    /// True while a thread waits for [`HEAP_TRIM_DELAY`] before it returns freed memory to the system.
    is_trim_pending: Arc<AtomicBool>,
}

/// Guard of the removal of one device.
pub struct PendingRemoval<'a>(&'a PendingRemovals, &'a str);

impl PendingRemovals {
    /// Begins the removal of a device, which ends when the guard is dropped.
    pub fn begin<'a>(&'a self, name: &'a str) -> PendingRemoval<'a> {
        self.names.lock().push(name.to_owned());
        PendingRemoval(self, name)
    }

    /// Waits for all removals, until `end` at most. Logs each device whose removal has not ended, and returns
    /// the number of these devices.
    pub fn wait(&self, end: Instant) -> usize {
        let left = end.saturating_duration_since(Instant::now());
        let (names, _) =
            self.one_has_ended.wait_timeout_while(self.names.lock(), left, |names| !names.is_empty());
        for name in names.iter() {
            error!("{name}: could not be removed in time, unflushed writes may be lost");
        }
        names.len()
    }

    /// Returns freed memory to the system after a delay. A removed device frees many small allocations, which
    /// the allocator would otherwise keep.
    fn trim_heap_later(&self) {
        if self.is_trim_pending.swap(true, SeqCst) {
            return;
        }
        let is_trim_pending = Arc::clone(&self.is_trim_pending);
        let trim = move || {
            thread::sleep(HEAP_TRIM_DELAY);
            is_trim_pending.store(false, SeqCst);
            trim_heap();
        };
        if thread::Builder::new().name("give-back".into()).spawn(trim).is_err() {
            // The next removal tries again to start the thread.
            self.is_trim_pending.store(false, SeqCst);
        }
    }
}

impl Drop for PendingRemoval<'_> {
    fn drop(&mut self) {
        let mut names = self.0.names.lock();
        if let Some(at) = names.iter().position(|name| name == self.1) {
            names.swap_remove(at);
        }
        self.0.one_has_ended.notify_all();
        drop(names);
        self.0.trim_heap_later();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::AtomicUsize;

    use freestone::device::{Blocking as _, Buffer, Flags, Result, TryResult, forward_device};

    use super::*;
    use freestone_spec::kinds::NullData;
    use freestone_spec::kinds::build;
    use freestone_spec::kinds::registry::Registry;

    /// A device that counts flushes.
    struct Drive {
        below: Arc<dyn Device>,
        /// Outcome of a flush, or `None` if it does not complete.
        outcome: Option<Result<()>>,
        flushes: AtomicUsize,
        held: Mutex<Vec<Completion>>,
    }

    impl Device for Drive {
        forward_device!(|drive| drive.below => geometry, extents; prefetch: none, zoned: none, changes: none);

        fn try_io(&self, _: &Request, _: Buffer<'_>) -> Result<TryResult> {
            Ok(TryResult::WouldBlock)
        }

        fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
            assert_eq!(request, Request::flush());
            self.flushes.fetch_add(1, SeqCst);
            match self.outcome {
                Some(outcome) => done.complete(outcome, buffer),
                None => self.held.lock().push(done),
            }
        }
    }

    fn drive(outcome: Option<Result<()>>) -> (Arc<Drive>, Arc<Entry>) {
        let null = build("n=null,size=1M".parse().unwrap(), &Arc::new(Registry::default())).unwrap();
        let below = Arc::clone(null.device().unwrap());
        let drive = Arc::new(Drive { below, outcome, flushes: 0.into(), held: Mutex::default() });
        let device = Some(Arc::clone(&drive) as _);
        let entry = Entry::new(null.spec.clone(), Box::new(NullData::Nothing), device, Vec::new());
        (drive, Arc::new(entry))
    }

    #[test]
    fn flush_counts_failures_and_does_not_wait_for_hung_drive() {
        let outcomes = [None, Some(Err(Error::Media)), Some(Ok(())), None, Some(Ok(()))];
        let (drives, entries): (Vec<_>, Vec<_>) = outcomes.into_iter().map(drive).unzip();
        let began = Instant::now();
        assert_eq!(flush(&entries, began + Duration::from_millis(50)), 3);
        assert!(began.elapsed() < Duration::from_secs(30));
        assert!(drives.iter().all(|drive| drive.flushes.load(SeqCst) == 1));
        assert_eq!(flush(&entries[4..], began), 0, "an immediate completion needs no time");
        // Completions after the deadline are ignored.
        for drive in drives {
            drive.held.lock().clear();
        }
    }

    #[test]
    fn closing_waits_for_last_reference() {
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
    fn closing_waits_for_the_end_of_a_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let spec = format!("r=ram,disksize=1M,power_cut=yes,record={}", log.display());
        let entry = Arc::new(build(spec.parse().unwrap(), &Arc::new(Registry::default())).unwrap());
        let device = Arc::clone(entry.device().unwrap());
        device.write_at(0, &vec![1; 1 << 20], Flags::default()).unwrap();
        let closing = Closing::of(&[entry]);
        let late = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(device);
        });
        assert_eq!(closing.wait(Instant::now() + Duration::from_secs(3600)), 0);
        // The header counts the write, and the flush of the close.
        assert_eq!(fs::read(&log).unwrap()[16..24], 2_u64.to_le_bytes());
        late.join().unwrap();
    }

    #[test]
    fn pending_removal_is_waited_for() {
        let removals = PendingRemovals::default();
        assert_eq!(removals.wait(Instant::now() + Duration::from_secs(3600)), 0);
        let one = removals.begin("a");
        assert_eq!(removals.wait(Instant::now() + Duration::from_millis(10)), 1);
        thread::scope(|scope| {
            let waits = scope.spawn(|| removals.wait(Instant::now() + Duration::from_secs(3600)));
            drop(one);
            assert_eq!(waits.join().unwrap(), 0);
        });
    }
}
