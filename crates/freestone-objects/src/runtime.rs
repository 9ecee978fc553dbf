//! The thread that runs all requests of the process to object stores, and blocking calls to this thread.
//!
//! The first request starts the thread. Callers outside of this crate see only blocking calls. Host names are
//! resolved on other threads, because the resolver of the system blocks.

use std::future::{Future, pending};
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use freestone_store::objects::{CallLimits, Fault, Result};
use tokio::runtime::{Builder, Handle};

use crate::text::plain;

/// Name of the request thread, within the kernel's limit of 15 bytes.
const THREAD: &str = "fs-objects";
/// Maximum number of threads that resolve host names. Idle threads exit.
const LOOKUPS_MAX: usize = 4;
/// Interval at which a waiting caller checks whether its call was cancelled.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Returns the handle of the request thread, which runs until the process exits. If the thread cannot be
/// started, all later calls fail, too.
fn handle() -> Result<&'static Handle> {
    static HANDLE: OnceLock<std::result::Result<Handle, String>> = OnceLock::new();
    let started = HANDLE.get_or_init(|| {
        let mut builder = Builder::new_current_thread();
        builder.enable_all().max_blocking_threads(LOOKUPS_MAX).thread_name("fs-lookup");
        let runtime = builder.build().map_err(|e| e.to_string())?;
        let handle = runtime.handle().clone();
        let thread = thread::Builder::new().name(THREAD.to_owned());
        thread.spawn(move || runtime.block_on(pending::<()>())).map_err(|e| e.to_string())?;
        Ok(handle)
    });
    started.as_ref().map_err(|e| Fault::Other(format!("the thread for requests cannot be started: {e}")))
}

/// Runs `work` on the request thread and waits for the result. At the deadline, or if the call is cancelled,
/// `work` is dropped.
pub fn call<T: Send + 'static>(
    limits: CallLimits<'_>,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    freestone_core::trail::step!();
    limits.check()?;
    let (sender, receiver) = sync_channel(1);
    let task = handle()?.spawn(async move {
        freestone_core::trail::arrive!();
        // The receiver is gone if the caller has given up.
        let _ = sender.send(work.await);
    });
    loop {
        let left = limits.deadline.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left.min(CHECK_INTERVAL)) {
            Ok(result) => {
                freestone_core::trail::arrive!();
                return result;
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Err(fault) = limits.check() {
                    task.abort();
                    return Err(fault);
                }
            }
            // The task panicked. HTTP libraries panic on some invalid headers.
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Fault::Other(plain("the request ended without an answer")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn calls_run_on_one_dedicated_thread() {
        let ask = || {
            let name = async { Ok((thread::current().id(), thread::current().name().map(str::to_owned))) };
            call(CallLimits::within(Duration::from_secs(5)), name).unwrap()
        };
        let first = ask();
        assert_eq!(first.1.as_deref(), Some(THREAD));
        assert_ne!(first.0, thread::current().id());
        assert_eq!(thread::spawn(ask).join().unwrap(), first);
    }

    struct SetWhenDropped(Arc<AtomicBool>);

    impl Drop for SetWhenDropped {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn never(dropped: &Arc<AtomicBool>) -> impl Future<Output = Result<()>> + Send + 'static {
        let set = SetWhenDropped(dropped.clone());
        async move {
            let _set = set;
            pending().await
        }
    }

    fn wait_for(flag: &AtomicBool) {
        let since = Instant::now();
        while !flag.load(Ordering::SeqCst) {
            assert!(since.elapsed() < Duration::from_secs(5));
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn abandoned_call_is_dropped() {
        let dropped = Arc::default();
        let since = Instant::now();
        let late = call(CallLimits::within(Duration::from_millis(120)), never(&dropped));
        assert_eq!(late, Err(Fault::TimedOut));
        assert!(since.elapsed() >= Duration::from_millis(120), "{:?}", since.elapsed());
        wait_for(&dropped);

        let dropped = Arc::default();
        let asked = AtomicUsize::new(0);
        let is_cancelled = || asked.fetch_add(1, Ordering::SeqCst) == 5;
        let deadline = Instant::now() + Duration::from_secs(60);
        assert_eq!(
            call(CallLimits { deadline, is_cancelled: &is_cancelled }, never(&dropped)),
            Err(Fault::Cancelled)
        );
        wait_for(&dropped);
    }

    #[test]
    fn panic_fails_only_its_call() {
        let soon = CallLimits::within(Duration::from_secs(5));
        let broken = call::<()>(soon, async { panic!("on purpose") });
        assert!(matches!(broken, Err(Fault::Other(_))), "{broken:?}");
        assert_eq!(call(soon, async { Ok(7) }), Ok(7));
    }
}
