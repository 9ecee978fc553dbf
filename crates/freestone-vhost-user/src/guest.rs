//! A frontend: its memory, and what else all its queues share.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::channel;
use crate::memory::Memory;

/// What the queues of a frontend share.
#[derive(Debug)]
pub struct Guest {
    /// The memory as of now; locked for a look or a change.
    memory: Mutex<Arc<Memory>>,
    /// Changes of the memory so far.
    generation: AtomicU64,
    /// Writes may sit in the device's cache.
    pub writeback: AtomicBool,
    /// The driver is shown no more answers.
    pub silent: AtomicBool,
    /// The connection, which a queue ends whose memory is gone.
    pub socket: OwnedFd,
    /// Where the frontend is told what it did not ask; locked for a look or a change.
    backend_socket: Mutex<Option<Arc<OwnedFd>>>,
}

impl Guest {
    /// Of a frontend that has no memory yet.
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            memory: Mutex::default(),
            generation: AtomicU64::new(0),
            writeback: AtomicBool::new(false),
            silent: AtomicBool::new(false),
            socket,
            backend_socket: Mutex::default(),
        }
    }

    /// The memory as of now.
    pub fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.memory.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// It is told at this socket from now on what it did not ask.
    pub fn set_backend_socket(&self, socket: OwnedFd) {
        let socket = Some(Arc::new(socket));
        let old = {
            let mut now = self.backend_socket.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *now, socket)
        };
        drop(old);
    }

    /// Tells that the configuration space has changed, if it can be told.
    pub fn tell_config_change(&self) {
        let socket = self.backend_socket.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(socket) = socket {
            channel::tell_config_change(socket.as_fd());
        }
    }

    /// Changes so far.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// There is other memory from now on.
    pub fn set_memory(&self, memory: Memory) {
        let old = {
            let mut now = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *now, Arc::new(memory))
        };
        self.generation.fetch_add(1, Ordering::SeqCst);
        drop(old);
    }
}
