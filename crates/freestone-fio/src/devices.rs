//! The devices of a fio process. Jobs with the same device specification share one device.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Once};

use freestone::device::Device;
use freestone::sync::Mutex;
use freestone_spec::{OpenError, OpenedDevice, open_device};

/// Open devices by specification. The lock is held while a device is opened or dropped, so that a
/// specification never has two devices. Nothing called under the lock takes it again.
static DEVICES: Mutex<BTreeMap<String, DeviceEntry>> = Mutex::new(BTreeMap::new());

/// A device and the number of its jobs. The device stays open between two consecutive jobs of a fio
/// run.
struct DeviceEntry {
    device: Arc<SharedDevice>,
    /// Number of jobs of the fio run that have not ended yet, including jobs that have not started.
    jobs: usize,
}

pub struct SharedDevice {
    opened: OpenedDevice,
    label: CString,
}

impl SharedDevice {
    pub fn device(&self) -> &Arc<dyn Device> {
        self.opened.device()
    }

    /// Returns the label of the device in fio, which is unique in this process.
    pub fn label(&self) -> &CString {
        &self.label
    }
}

/// Returns the device of a specification. The first job that needs the device opens it. `jobs` is
/// the number of jobs of the fio run that use the device. `say` prints a message for the user.
pub fn attach(spec: &str, jobs: usize, say: &dyn Fn(&str)) -> Result<Arc<SharedDevice>, OpenError> {
    let mut devices = DEVICES.lock();
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

/// Records the end of a job of the fio run. The last job drops the device.
pub fn release_job(spec: &str) {
    let mut devices = DEVICES.lock();
    let Some(entry) = devices.get_mut(spec) else { return };
    entry.jobs = entry.jobs.saturating_sub(1);
    if entry.jobs == 0 {
        devices.remove(spec);
    }
}

fn label(name: &str, others: &BTreeMap<String, DeviceEntry>) -> CString {
    let taken = |label: &CString| others.values().any(|entry| entry.device.label == *label);
    let named = |text: String| CString::new(text).unwrap_or_default();
    let first = named(format!("freestone:{name}"));
    if !taken(&first) {
        return first;
    }
    let next = |number: usize| named(format!("freestone:{name}#{number}"));
    // There are more candidates than other devices, so one candidate is unused.
    (2..others.len() + 2).map(next).find(|label| !taken(label)).unwrap_or(first)
}

/// Registers an exit handler that drops all devices: fio calls no cleanup for a job that it did not
/// start.
fn end_at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn end() {
        DEVICES.lock().clear();
    }
    ONCE.call_once(|| {
        exit::at_exit(end);
    });
}

/// Logs warnings to stderr, as `freestone serve` does.
fn start_log() {
    // Fails if another engine in this process has set a subscriber, which is then used.
    let _ = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .try_init();
}

mod exit {
    #![expect(unsafe_code)]
    // UNSAFETY: the standard library has no safe equivalent of `atexit`.

    /// Registers `f` to run at process exit. If memory is short, `f` is not registered.
    pub fn at_exit(f: extern "C" fn()) {
        // SAFETY: the engine's library, and so `f`, stays loaded until the process ends (linked
        // with `-z nodelete`).
        let _ = unsafe { libc::atexit(f) };
    }
}
