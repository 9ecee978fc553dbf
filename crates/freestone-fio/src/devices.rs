//! The devices of this process. Jobs with the same device specification share one device.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use freestone::device::Device;
use freestone_spec::{OpenError, Opened, open_device};

/// Devices by specification. The lock is held while a device is opened or dropped, so that a
/// specification never has two devices. Nothing called under it takes it.
static DEVICES: Mutex<BTreeMap<String, DeviceEntry>> = Mutex::new(BTreeMap::new());

/// A device, also kept between two consecutive jobs of the run.
struct DeviceEntry {
    device: Arc<SharedDevice>,
    /// Jobs of the run that have not ended yet, including jobs that have not started.
    jobs: usize,
}

pub struct SharedDevice {
    opened: Opened,
    label: CString,
}

impl SharedDevice {
    pub fn device(&self) -> &Arc<dyn Device> {
        self.opened.device()
    }

    /// Returns the device's label, which is unique in this process.
    pub fn label(&self) -> &CString {
        &self.label
    }
}

/// Returns the device of a specification, opened by the first job that needs it. `jobs` is the
/// number of jobs of the run that use it.
pub fn attach(spec: &str, jobs: usize, say: &dyn Fn(&str)) -> Result<Arc<SharedDevice>, OpenError> {
    let mut devices = lock();
    if let Some(entry) = devices.get(spec) {
        return Ok(Arc::clone(&entry.device));
    }
    start_log();
    let opened = open_device(spec)?;
    for seed in opened.seeds() {
        say(&seed);
    }
    let device = Arc::new(SharedDevice { label: label(opened.name(), &devices), opened });
    devices.insert(spec.to_owned(), DeviceEntry { device: Arc::clone(&device), jobs: jobs.max(1) });
    end_at_exit();
    Ok(device)
}

/// Counts the end of a job of the run. The last one drops the device.
pub fn release_job(spec: &str) {
    let mut devices = lock();
    let Some(entry) = devices.get_mut(spec) else { return };
    entry.jobs = entry.jobs.saturating_sub(1);
    if entry.jobs == 0 {
        devices.remove(spec);
    }
}

fn lock() -> MutexGuard<'static, BTreeMap<String, DeviceEntry>> {
    // Each change is a single call, so poisoning is ignored.
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn label(name: &str, others: &BTreeMap<String, DeviceEntry>) -> CString {
    let taken = |label: &CString| others.values().any(|entry| entry.device.label == *label);
    let named = |text: String| CString::new(text).unwrap_or_default();
    let first = named(format!("freestone:{name}"));
    if !taken(&first) {
        return first;
    }
    let next = |number: usize| named(format!("freestone:{name}#{number}"));
    // There are more candidates than other devices, so one is free.
    (2..others.len() + 2).map(next).find(|label| !taken(label)).unwrap_or(first)
}

/// fio calls no cleanup for a job that it did not start; such devices are dropped at exit.
fn end_at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn end() {
        lock().clear();
    }
    ONCE.call_once(|| {
        exit::at_exit(end);
    });
}

/// Logs warnings to stderr, as `freestone serve` does.
fn start_log() {
    // Another engine in this process may have set a subscriber.
    let _ = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .try_init();
}

mod exit {
    #![expect(unsafe_code)]
    // UNSAFETY: the standard library has no atexit.

    /// Registers `f` to run at process exit. Ignored if memory is short.
    pub fn at_exit(f: extern "C" fn()) {
        // SAFETY: the library, and so the function, stays loaded until the process ends (-z
        // nodelete).
        let _ = unsafe { libc::atexit(f) };
    }
}
