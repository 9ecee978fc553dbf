//! The one thread that all requests of the process run on, and how other threads wait for them.
//!
//! It is started with the first request. Nothing outside of this crate sees that it is asynchronous. Beside it
//! only names of hosts are looked up, as the system's call for that waits.

use std::future::{Future, pending};
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use freestone_store::objects::{Fault, Result, Until};
use tokio::runtime::{Builder, Handle};

use crate::text::plain;

/// Name of the thread; the kernel shows 15 bytes.
const THREAD: &str = "fs-objects";
/// Threads on which names are looked up at once; they end when they have nothing to do.
const LOOKUPS_MAX: usize = 4;
/// How often who waits is asked whether it still does.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// The thread never ends, so what it said when it was started is true for ever.
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

/// Runs `work` on that thread and waits for it; it is dropped when the call is over before.
pub fn call<T: Send + 'static>(
    until: Until<'_>,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    until.check()?;
    let (sender, receiver) = sync_channel(1);
    let task = handle()?.spawn(async move {
        // Nobody takes it where the caller has given up.
        let _ = sender.send(work.await);
    });
    loop {
        let left = until.deadline.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left.min(ASK_EVERY)) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) => {
                if let Err(fault) = until.check() {
                    task.abort();
                    return Err(fault);
                }
            }
            // It panicked: libraries below us do where a header cannot be written.
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
    fn all_run_on_one_thread_of_its_own() {
        let ask = || {
            let name = async { Ok((thread::current().id(), thread::current().name().map(str::to_owned))) };
            call(Until::within(Duration::from_secs(5)), name).unwrap()
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
    fn what_nobody_waits_for_is_dropped() {
        let dropped = Arc::default();
        let since = Instant::now();
        let late = call(Until::within(Duration::from_millis(120)), never(&dropped));
        assert_eq!(late, Err(Fault::Late));
        assert!(since.elapsed() >= Duration::from_millis(120), "{:?}", since.elapsed());
        wait_for(&dropped);

        let dropped = Arc::default();
        let asked = AtomicUsize::new(0);
        let is_over = || asked.fetch_add(1, Ordering::SeqCst) == 5;
        let deadline = Instant::now() + Duration::from_secs(60);
        assert_eq!(call(Until { deadline, is_over: &is_over }, never(&dropped)), Err(Fault::Cancelled));
        wait_for(&dropped);
    }

    #[test]
    fn a_panic_is_a_fault_of_that_call_only() {
        let soon = Until::within(Duration::from_secs(5));
        let broken = call::<()>(soon, async { panic!("on purpose") });
        assert!(matches!(broken, Err(Fault::Other(_))), "{broken:?}");
        assert_eq!(call(soon, async { Ok(7) }), Ok(7));
    }
}
