//! What vhost-user frontends send, and what their drivers write to their memory.

mod device;
mod driver;
mod expected;
mod files;
mod judge;
mod messages;
mod plain;
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
use freestone_vhost_user::{Options, serve_here};

/// Panics of the threads of queues, which end with their thread and are seen nowhere else.
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

/// What serves frontends, for any number of checks one after the other.
pub struct VhostUser {
    budget: Arc<Budget>,
    workers: Workers,
}

impl VhostUser {
    /// Nobody is served yet.
    #[allow(clippy::new_without_default, reason = "it changes the process's panic hook")]
    pub fn new() -> Self {
        LazyLock::force(&PANICS);
        // What is checked follows the requests in order: there are no workers.
        Self { budget: Budget::new(budget::DEFAULT_BYTES), workers: Workers::new(1) }
    }

    /// Serves a frontend on this thread until it leaves.
    fn serve(&self, device: Arc<dyn Device>, read_only: bool, socket: OwnedFd) {
        let options =
            Options { read_only, workers: self.workers.clone(), ..Options::new(Arc::clone(&self.budget)) };
        serve_here(device, &options, socket);
    }

    /// Nothing panicked so far, and nothing is held while nobody is served.
    fn assert_sound(&self) {
        assert_eq!(PANICS.load(Ordering::SeqCst), 0, "a queue's thread has panicked");
        assert_eq!(self.budget.bytes().1, 0, "bytes of the budget are held");
    }
}
