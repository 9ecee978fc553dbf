//! The life of an export of one device: the device can be replaced, new requests or clients can be held, and at the
//! end the threads of the export release the device.
//!
//! The owner of an export and its threads share a [`Life`]. The crates of exports use this room, except for the NBD
//! server, whose exports share threads and tables.

use crate::device::{Device, Disk, Failures};
use crate::sync::{Arc, AtomicU64, Condvar, Instant, Mutex, MutexGuard, Ordering};

/// The part of the state that one kind of export adds to [`LifeState`].
pub trait ExportState {
    /// Wakes the threads of the export, which then apply the changed state. Called with the state locked.
    fn wake_threads(&self) {}
}

/// The shared state of an export.
///
/// Lock order: `state` is the innermost lock, held for short accesses only. No disk is dropped under it, because that
/// may wait for I/O.
pub struct Life<T> {
    name: String,
    read_only: bool,
    /// Version of the state that the threads apply, increased by each change; written under the lock of `state`.
    version: AtomicU64,
    state: Mutex<LifeState<T>>,
    /// Notified of each change.
    changed: Condvar,
}

/// The state of an export, protected by the lock.
pub struct LifeState<T> {
    /// The exported device; `None` once the threads have released it at the end.
    pub disk: Option<Arc<Disk>>,
    /// Number of holds. While it is not zero, new requests or clients wait.
    pub holds: usize,
    /// True once the export must end.
    pub ending: bool,
    /// True once all threads have released the device.
    pub ended: bool,
    /// State of the kind of export.
    pub own: T,
}

impl<T: ExportState> Life<T> {
    /// Creates the state of an export of `disk`.
    pub fn new(disk: Disk, own: T) -> Self {
        let (name, read_only) = (disk.name.clone(), disk.read_only);
        let state = LifeState { disk: Some(Arc::new(disk)), holds: 0, ending: false, ended: false, own };
        let (version, state) = (AtomicU64::new(0), Mutex::new(state));
        Self { name, read_only, version, state, changed: Condvar::new() }
    }

    /// Returns the name of the exported device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns true if the export refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Locks the state.
    pub fn lock(&self) -> MutexGuard<'_, LifeState<T>> {
        self.state.lock()
    }

    /// Returns the current version of the state that the threads apply.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// Changes state that the threads of the export do not apply, and wakes those that wait for a change.
    pub fn update<R>(&self, change: impl FnOnce(&mut LifeState<T>) -> R) -> R {
        let changed = change(&mut self.lock());
        self.changed.notify_all();
        changed
    }

    /// Changes state that the threads of the export apply, and wakes them and those that wait for a change.
    pub fn update_and_wake<R>(&self, change: impl FnOnce(&mut LifeState<T>) -> R) -> R {
        self.update(|state| {
            let changed = change(state);
            self.version.fetch_add(1, Ordering::SeqCst);
            state.own.wake_threads();
            changed
        })
    }

    /// Waits for a change of the state.
    pub fn wait<'a>(&'a self, state: MutexGuard<'a, LifeState<T>>) -> MutexGuard<'a, LifeState<T>> {
        self.changed.wait(state)
    }

    /// Waits until the state meets a condition, at most until `end`. Returns false on timeout.
    pub fn wait_until(&self, end: Instant, condition: impl Fn(&LifeState<T>) -> bool) -> bool {
        let mut state = self.lock();
        while !condition(&state) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).0;
        }
        true
    }

    /// Replaces the device for all requests or clients that have not begun. At the end, drops the new device.
    pub fn replace(&self, device: Arc<dyn Device>, failures: Arc<Failures>) {
        let disk = Arc::new(Disk::new(&self.name, self.read_only, device, failures));
        let old = self.update_and_wake(|state| match &mut state.disk {
            Some(now) => std::mem::replace(now, disk),
            None => disk,
        });
        drop(old);
    }

    /// Releases the device at the end. Called once, by the last thread that uses the export.
    pub fn finish(&self) {
        let disk = self.update(|state| state.disk.take());
        drop(disk);
        self.update(|state| state.ended = true);
    }
}
