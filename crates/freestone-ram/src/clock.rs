//! Coarse time for ages and deadlines, and a once-a-second tick for registered listeners.

use std::sync::Weak;
use std::time::Duration;

use freestone_core::sync::{Arc, Instant, LazyLock, Mutex};

/// Interval between calls of [`Ticks::tick`].
pub const TICK: Duration = Duration::from_secs(1);

/// Returns milliseconds since an arbitrary moment before the first call.
pub fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64
}

/// Converts a duration to milliseconds; saturates at `u64::MAX`.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A listener that does periodic work.
pub trait Ticks: Send + Sync {
    /// Called about once a second, on one thread for the whole process: must be short and not
    /// block.
    fn tick(&self);
}

static LISTENERS: LazyLock<Mutex<Vec<Weak<dyn Ticks>>>> = LazyLock::new(Mutex::default);

/// Registers `listener`; ticks stop when its last strong reference is dropped.
///
/// # Errors
/// Fails if the process's clock thread cannot be started.
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
        // This thread may drop the last reference of a listener: drop it outside the lock.
        for listener in listeners {
            listener.tick();
        }
    }
}
