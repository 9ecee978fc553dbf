//! A test device that executes requests in order, and completes them in random order when a check requests it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use freestone::device::{Device, Request};
use freestone_testkit::{Manner, Model, Rng, TestDevice};
use rustix::event::{EventfdFlags, eventfd};

pub struct CheckDevice<D: Device + ?Sized = Model> {
    pub device: Arc<TestDevice<D>>,
    order: Arc<Order>,
}

/// Order in which held requests complete.
pub struct Order {
    pub rng: Mutex<Rng>,
    /// True if some held requests are dropped without completion.
    forgets: bool,
    /// Event descriptor that is readable after a submit.
    submitted: OwnedFd,
}

impl Order {
    /// Completes or drops one held request. Returns false if no request is held.
    pub fn release<D: Device + ?Sized>(&self, device: &TestDevice<D>) -> bool {
        // The read resets the event descriptor. The read fails if nothing was submitted.
        let _ = rustix::io::read(&self.submitted, &mut [0; 8]);
        device.release_by(|held| {
            let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
            (rng.below(held as u64) as usize, self.forgets && rng.chance(20))
        })
    }

    /// Makes the event descriptor readable.
    pub fn notify(&self) {
        // The write fails only if the counter is full, and then the descriptor is already readable.
        let _ = rustix::io::write(&self.submitted, &1_u64.to_ne_bytes());
    }
}

impl<D: Device + ?Sized> CheckDevice<D> {
    /// Creates a check device. `seed` determines the order of completions. `on_submitted` is called after each
    /// submitted request.
    pub fn new(
        device: TestDevice<D>,
        seed: u64,
        forgets: bool,
        on_submitted: impl Fn(&TestDevice<D>, &Request, &Order) + Send + Sync + 'static,
    ) -> Self {
        let submitted =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor is left");
        let order = Arc::new(Order { rng: Mutex::new(Rng::new(seed)), forgets, submitted });
        let shared = Arc::clone(&order);
        let device = device.on_submitted(move |device, request| on_submitted(device, request, &shared));
        Self { device: Arc::new(device), order }
    }

    /// Returns the event descriptor that is readable after a submit.
    pub fn submitted(&self) -> BorrowedFd<'_> {
        self.order.submitted.as_fd()
    }

    /// Completes or drops one held request. Returns false if no request is held.
    pub fn release(&self) -> bool {
        self.order.release(&self.device)
    }

    /// Completes all held requests. Later requests complete at once.
    pub fn release_all(&self) {
        self.device.set(Manner::Submitted);
        while self.release() {}
    }
}
