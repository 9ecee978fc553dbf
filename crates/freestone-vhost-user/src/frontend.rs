//! The state that all queues of a connected frontend share.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use freestone_core::sync::Mutex;

use crate::channel;
use crate::memory::Memory;

/// The shared state of a frontend. Locks are held only for short accesses.
#[derive(Debug)]
pub struct FrontendState {
    memory: Mutex<Arc<Memory>>,
    generation: AtomicU64,
    /// True if the driver uses a write-back cache: writes need not be durable before they complete.
    pub writeback: AtomicBool,
    /// True if a queue has run since the frontend connected or the device was reset, so that the
    /// driver may have cached content. A paused machine has no running queue.
    pub has_driver: AtomicBool,
    /// Set when completions are no longer published to the driver.
    pub stopped_publishing: AtomicBool,
    /// The socket of the connection. A queue shuts the socket down if the frontend has truncated
    /// its memory.
    pub socket: OwnedFd,
    /// The socket for messages that the backend sends on its own; `None` until the frontend sets
    /// it.
    backend_socket: Mutex<Option<Arc<OwnedFd>>>,
}

impl FrontendState {
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            memory: Mutex::default(),
            generation: AtomicU64::new(0),
            writeback: AtomicBool::new(false),
            has_driver: AtomicBool::new(false),
            stopped_publishing: AtomicBool::new(false),
            socket,
            backend_socket: Mutex::default(),
        }
    }

    pub fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.memory.lock())
    }

    /// Sets the socket for messages that the backend sends on its own.
    pub fn set_backend_socket(&self, socket: OwnedFd) {
        let socket = Some(Arc::new(socket));
        let old = std::mem::replace(&mut *self.backend_socket.lock(), socket);
        drop(old);
    }

    /// Notifies the frontend that the configuration space has changed, if the frontend has set a
    /// socket for such messages.
    pub fn notify_config_change(&self) {
        let socket = self.backend_socket.lock().clone();
        if let Some(socket) = socket {
            channel::notify_config_change(socket.as_fd());
        }
    }

    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    pub fn set_memory(&self, memory: Memory) {
        let old = std::mem::replace(&mut *self.memory.lock(), Arc::new(memory));
        self.generation.fetch_add(1, Ordering::SeqCst);
        drop(old);
    }
}
