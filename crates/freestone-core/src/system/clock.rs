//! Coarse time for page ages and deadlines, and a once-a-second tick for registered listeners.

use std::sync::Weak;
use std::time::Duration;

use crate::sync::{Arc, Instant, LazyLock, Mutex};

/// Interval between calls of [`Ticks::tick`].
pub const TICK: Duration = Duration::from_secs(1);

/// Returns the milliseconds since the first call in this process.
pub fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64
}

/// Returns the duration in milliseconds, or `u64::MAX` if it is longer.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A listener that the clock thread calls about once a second.
pub trait Ticks: Send + Sync {
    /// Called about once a second. A single thread calls all listeners of the process, so the work
    /// must be short and must not block.
    fn tick(&self);
}

static LISTENERS: LazyLock<Mutex<Vec<Weak<dyn Ticks>>>> = LazyLock::new(Mutex::default);

/// Registers `listener`; its ticks stop when the last strong reference to it is dropped.
///
/// # Errors
/// Fails if the clock thread of the process cannot be started.
pub fn listen(listener: Weak<dyn Ticks>) -> std::io::Result<()> {
    static RUNNING: LazyLock<Mutex<bool>> = LazyLock::new(Mutex::default);
    let mut running = RUNNING.lock();
    if !*running {
        crate::sync::thread::Builder::new().name("clock".into()).spawn(run)?;
        *running = true;
    }
    LISTENERS.lock().push(listener);
    Ok(())
}

fn run() {
    loop {
        crate::sync::thread::sleep(TICK);
        let listeners: Vec<Arc<dyn Ticks>> = {
            let mut listeners = LISTENERS.lock();
            listeners.retain(|listener| listener.strong_count() > 0);
            listeners.iter().filter_map(Weak::upgrade).collect()
        };
        // The upgraded reference may be the last one to a listener: it is dropped outside the lock.
        for listener in listeners {
            listener.tick();
        }
    }
}
