//! Selection of the I/O engine of a file: `io_uring` or threads.

use std::io;
use std::sync::Arc;

use super::Engine;
use super::backing::Backing;
use super::job::Job;
use super::ring::Ring;
use super::threads::Threads;

/// A running I/O engine. Dropping the engine waits until all submitted requests have completed.
#[derive(Debug)]
pub(super) enum ActiveEngine {
    Ring(Ring),
    Threads(Threads),
}

impl ActiveEngine {
    pub fn start(kind: Engine, backing: &Arc<Backing>) -> io::Result<Self> {
        match kind {
            Engine::IoUring => Ring::start(backing).map(Self::Ring),
            Engine::Threads => Threads::start(backing).map(Self::Threads),
            // The simulator needs deterministic completions, but the kernel completes requests of a
            // ring at any time.
            Engine::Auto if cfg!(freestone_sim) => Threads::start(backing).map(Self::Threads),
            Engine::Auto => match Ring::start(backing) {
                Ok(ring) => Ok(Self::Ring(ring)),
                Err(reason) => {
                    let path = backing.path.display();
                    tracing::warn!("{path}: io_uring is not available ({reason}); using threads");
                    Threads::start(backing).map(Self::Threads)
                }
            },
        }
    }

    pub fn kind(&self) -> Engine {
        match self {
            Self::Ring(_) => Engine::IoUring,
            Self::Threads(_) => Engine::Threads,
        }
    }

    pub fn submit(&self, job: Job) {
        match self {
            Self::Ring(ring) => ring.submit(job),
            Self::Threads(threads) => threads.submit(job),
        }
    }
}
