//! Coarse time, for ages and deadlines, and who is told that a second has passed.

use std::sync::Weak;
use std::time::Duration;

use freestone_core::sync::{Arc, Instant, LazyLock, Mutex};

/// How often [`Ticks::tick`] is called.
pub const TICK: Duration = Duration::from_secs(1);

/// Milliseconds since some moment before the first call.
pub fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64
}

/// A duration in milliseconds.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Something that wants to know of time passing.
pub trait Ticks: Send + Sync {
    /// Called about once a second, on a thread that all share: short work only.
    fn tick(&self);
}

static LISTENERS: LazyLock<Mutex<Vec<Weak<dyn Ticks>>>> = LazyLock::new(Mutex::default);

/// Has `listener` called from now on, as long as it lives.
///
/// # Errors
/// The process's one thread for this could not be started.
pub fn listen(listener: Weak<dyn Ticks>) -> std::io::Result<()> {
    static RUNNING: LazyLock<Mutex<bool>> = LazyLock::new(Mutex::default);
    let mut running = RUNNING.lock();
    if !*running {
        freestone_core::sync::thread::Builder::new().name("clock".into()).spawn(run)?;
        *running = true;
    }
    LISTENERS.lock().push(listener);
    Ok(())
}

fn run() {
    loop {
        freestone_core::sync::thread::sleep(TICK);
        let listeners: Vec<Arc<dyn Ticks>> = {
            let mut listeners = LISTENERS.lock();
            listeners.retain(|listener| listener.strong_count() > 0);
            listeners.iter().filter_map(Weak::upgrade).collect()
        };
        // The last owner of one of them may be this thread: it is dropped outside of the lock.
        for listener in listeners {
            listener.tick();
        }
    }
}
