//! The devices of this process: each is there once, for all jobs that asked for it with the same
//! words.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use freestone::device::Device;
use freestone_spec::{OpenError, Opened, open_device};

/// The devices by their words. The lock is held while one is opened or ended, so that the same
/// words never are two devices; nothing that is called under it takes it.
static DEVICES: Mutex<BTreeMap<String, Kept>> = Mutex::new(BTreeMap::new());

/// A device, kept between two jobs of the run that come one after the other.
struct Kept {
    device: Arc<SharedDevice>,
    /// Jobs of the run that have not gone yet, also those that have not come.
    jobs: usize,
}

/// A device that jobs share.
pub struct SharedDevice {
    opened: Opened,
    label: CString,
}

impl SharedDevice {
    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.opened.device()
    }

    /// A name that no other device of this process has.
    pub fn label(&self) -> &CString {
        &self.label
    }
}

/// The device of these words, opened by the first who asks. `jobs` is how many jobs of the run will
/// come and go.
pub fn attach(words: &str, jobs: usize, say: &dyn Fn(&str)) -> Result<Arc<SharedDevice>, OpenError> {
    let mut devices = lock();
    if let Some(kept) = devices.get(words) {
        return Ok(Arc::clone(&kept.device));
    }
    start_log();
    let opened = open_device(words)?;
    for seed in opened.seeds() {
        say(&seed);
    }
    let device = Arc::new(SharedDevice { label: label(opened.name(), &devices), opened });
    devices.insert(words.to_owned(), Kept { device: Arc::clone(&device), jobs: jobs.max(1) });
    end_at_exit();
    Ok(device)
}

/// A job of the run has gone; with the last one the device ends.
pub fn job_gone(words: &str) {
    let mut devices = lock();
    let Some(kept) = devices.get_mut(words) else { return };
    kept.jobs = kept.jobs.saturating_sub(1);
    if kept.jobs == 0 {
        devices.remove(words);
    }
}

fn lock() -> MutexGuard<'static, BTreeMap<String, Kept>> {
    // Each change is one call.
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn label(name: &str, others: &BTreeMap<String, Kept>) -> CString {
    let taken = |label: &CString| others.values().any(|kept| kept.device.label == *label);
    let named = |text: String| CString::new(text).unwrap_or_default();
    let first = named(format!("freestone:{name}"));
    if !taken(&first) {
        return first;
    }
    let next = |number: usize| named(format!("freestone:{name}#{number}"));
    // One of as many is free.
    (2..others.len() + 2).map(next).find(|label| !taken(label)).unwrap_or(first)
}

/// fio never calls for the end of a job that it did not start: what is left ends with the process.
fn end_at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn end() {
        lock().clear();
    }
    ONCE.call_once(|| {
        exit::at_exit(end);
    });
}

/// What `freestone serve` would warn of goes to stderr.
fn start_log() {
    // Another engine of this process may have done so.
    let _ = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .try_init();
}

mod exit {
    #![expect(unsafe_code)]
    // UNSAFETY: the standard library has no atexit.

    /// Has `f` called when the process exits. Where there is no memory for that, it is not.
    pub fn at_exit(f: extern "C" fn()) {
        // SAFETY: the library stays loaded until the process ends (-z nodelete), and so does the
        // function.
        let _ = unsafe { libc::atexit(f) };
    }
}
