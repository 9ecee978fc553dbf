//! A queue as the frontend sets it up, and its thread while it runs.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use freestone_core::answers::Answers;
use freestone_core::budget::Budget;
use freestone_core::device::Disk;
use freestone_core::workers::Workers;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::guest::Guest;
use crate::inflight::Inflight;
use crate::queue::{self, Parts, Sleep};
use crate::ring::{Addresses, Broken, Ring};
use crate::task::Finished;
use crate::wire::feature;

/// What all queues of a connection need.
#[derive(Debug)]
pub struct Around {
    /// The device.
    pub disk: Arc<Disk>,
    /// What queues share.
    pub guest: Arc<Guest>,
    /// Bytes for requests.
    pub budget: Arc<Budget>,
    /// For dear requests.
    pub workers: Workers,
    /// See [`Options`](crate::Options).
    pub look_out: bool,
    /// Where it is noted what is in flight, if the frontend wants that.
    pub inflight: Option<Inflight>,
}

/// A queue.
#[derive(Debug, Default)]
pub struct Vring {
    /// Entries; 0 where it was never set.
    pub size: u16,
    /// Where its rings are.
    pub addresses: Option<Addresses>,
    /// Where it goes on.
    pub base: u16,
    /// What the driver writes to.
    pub kick: Option<Arc<OwnedFd>>,
    /// What the queue writes to; may change while it runs.
    pub call: Arc<Mutex<Option<OwnedFd>>>,
    /// Tells that the queue has ended by itself.
    pub err: Option<Arc<OwnedFd>>,
    /// Whether the frontend wants it served.
    pub enabled: bool,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    answers: Arc<Answers<Finished>>,
    thread: JoinHandle<u16>,
}

/// An eventfd that never blocks. Anything else is refused: a write to a full pipe, say, would hold
/// its thread up for ever.
pub fn event(fd: OwnedFd) -> io::Result<OwnedFd> {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    if kind.as_os_str() != "anon_inode:[eventfd]" {
        return Err(io::Error::other("a file descriptor is no eventfd"));
    }
    fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
    Ok(fd)
}

impl Vring {
    /// Starts or stops the queue, as it is set up now. What is in flight when it stops is waited
    /// for.
    pub fn settle(&mut self, index: usize, around: &Around, features: u64) -> Result<(), StartError> {
        let (Some(addresses), Some(kick), true, true) =
            (self.addresses, self.kick.clone(), self.enabled, self.size > 0)
        else {
            self.stop();
            return Ok(());
        };
        if self.running.is_some() {
            return Ok(());
        }
        let has = |bit| features & bit != 0;
        let memory = around.guest.memory();
        let kinds = (has(feature::EVENT_IDX), has(feature::INDIRECT_DESC));
        let mut ring = Ring::new(&memory, &addresses, self.size, kinds, self.base)?;
        let mut notes = around.inflight.as_ref().and_then(|inflight| inflight.notes(index, self.size));
        let used = ring.used_index();
        let mut again = Vec::new();
        if let Some(begun) = notes.as_mut().and_then(|notes| notes.recover(used)) {
            // What was taken is either answered or begun.
            ring.next_avail = used.wrapping_add(begun.len() as u16);
            again = begun;
            again.reverse();
        }
        let answers = Arc::new(Answers::new()?);
        let parts = Parts {
            index,
            disk: Arc::clone(&around.disk),
            guest: Arc::clone(&around.guest),
            share: around.budget.share(&around.disk.failures, queue::granted(&answers)),
            answers: Arc::clone(&answers),
            workers: around.workers.clone(),
            look_out: around.look_out,
            ring,
            addresses,
            notes,
            again,
            sleep: Sleep::new(&*kick, answers.wake_fd())?,
            call: Arc::clone(&self.call),
            err: self.err.clone(),
        };
        let name = format!("vhost-q{index}");
        let thread = std::thread::Builder::new().name(name).spawn(move || queue::run(parts))?;
        self.running = Some(Running { answers, thread });
        Ok(())
    }

    /// Stops the queue where it runs, once what is in flight is done.
    pub fn stop(&mut self) {
        self.ask_to_stop();
        if let Some(Running { thread, .. }) = self.running.take()
            && let Ok(base) = thread.join()
        {
            self.base = base;
        }
    }

    /// As [`stop`](Self::stop), without waiting.
    pub fn ask_to_stop(&self) {
        if let Some(running) = &self.running {
            running.answers.end();
        }
    }

    /// Has the queue look at the memory again.
    pub fn wake(&self) {
        if let Some(running) = &self.running {
            running.answers.wake();
        }
    }

    /// Where completions are told from now on.
    pub fn set_call(&self, call: Option<OwnedFd>) {
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = call;
    }
}

/// Why a queue does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its rings.
    #[error("{0}")]
    Ring(#[from] Broken),
    /// The system.
    #[error("{0}")]
    System(#[from] io::Error),
}
