//! vhost-user backend with arbitrary messages of frontends, and arbitrary memory of their drivers.

mod chain;
mod device;
mod driver;
mod expected;
mod files;
mod messages;
mod reference;
mod requests;
mod rings;
mod script;

use std::os::fd::OwnedFd;
use std::panic;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use freestone::budget::{self, Budget};
use freestone::device::Device;
use freestone_nbd::Workers;
use freestone_testkit::vhost_user::wire;
use freestone_vhost_user::{Options, serve_socket};

/// Number of panics of queue threads. A panic ends only its own thread, so a panic hook counts the panics.
static PANICS: LazyLock<Arc<AtomicUsize>> = LazyLock::new(|| {
    let panics = Arc::new(AtomicUsize::new(0));
    let (count, before) = (Arc::clone(&panics), panic::take_hook());
    panic::set_hook(Box::new(move |info| {
        if std::thread::current().name().is_some_and(|name| name.starts_with("vhost-q")) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        before(info);
    }));
    panics
});

/// Serves frontends for any number of consecutive checks.
pub struct VhostUser {
    budget: Arc<Budget>,
    workers: Workers,
}

impl VhostUser {
    #[allow(clippy::new_without_default, reason = "it changes the process's panic hook")]
    pub fn new() -> Self {
        LazyLock::force(&PANICS);
        // The checks need the effects of requests in order, so there is only one worker.
        Self { budget: Budget::new(budget::DEFAULT_BYTES), workers: Workers::new(1) }
    }

    /// Serves a frontend on this thread until it disconnects.
    fn serve(&self, device: Arc<dyn Device>, read_only: bool, socket: OwnedFd) {
        let options =
            Options { read_only, workers: self.workers.clone(), ..Options::new(Arc::clone(&self.budget)) };
        serve_socket(device, &options, socket);
    }

    /// Asserts that no queue thread panicked, and that no memory of the budget is in use. No frontend may be
    /// connected.
    fn assert_sound(&self) {
        assert_eq!(PANICS.load(Ordering::SeqCst), 0, "a queue's thread has panicked");
        assert_eq!(self.budget.bytes().1, 0, "memory of the budget is in use");
    }
}
