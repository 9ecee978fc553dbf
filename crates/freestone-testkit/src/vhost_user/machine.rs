//! A virtual machine with one disk.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frontend::{Config, Frontend, wrong};
use super::memory::Memory;
use super::queue::{Answer, Queue};
use super::shape::Shape;
use super::wire::{self, EVENT_IDX, INDIRECT, USER};

/// Offset of the writeback field in the configuration space.
const WRITEBACK_AT: u32 = 32;

/// A virtual machine with one disk.
#[derive(Debug)]
pub struct Machine {
    front: Frontend,
    shape: Shape,
    memory: Arc<Memory>,
    /// The queues. Whoever takes them drives them.
    pub queues: Vec<Queue>,
    notes: Option<(Vec<u8>, OwnedFd)>,
    features: u64,
    config: Config,
}

impl Machine {
    /// Connects, negotiates and starts the queues.
    ///
    /// # Errors
    /// The connection has ended, a reply takes longer than `patience`, or the server violates the
    /// protocol (`InvalidData`).
    pub fn connect(path: &Path, shape: Shape, patience: Duration) -> io::Result<Self> {
        let memory = Arc::new(Memory::new(u64::from(shape.queues) * Queue::bytes(&shape))?);
        let queues = (0..shape.queues).map(|index| Queue::new(&memory, shape, index));
        let queues = queues.collect::<io::Result<_>>()?;
        let mut front = Frontend::connect(path, patience)?;
        let features = front.number(wire::GET_FEATURES)?;
        let config = Self::negotiate(&mut front, &shape, features)?;
        let mut machine = Self { front, shape, memory, queues, notes: None, features, config };
        if shape.inflight {
            machine.notes = Some(machine.front.inflight(shape.queues, Queue::size(&shape))?);
        }
        machine.start()?;
        Ok(machine)
    }

    /// Connects to another server, or again to the same one. Requests stay in flight; without an
    /// inflight region none may be in flight.
    ///
    /// # Errors
    /// See [`connect`](Self::connect).
    pub fn reconnect(&mut self, path: &Path, patience: Duration) -> io::Result<()> {
        self.front = Frontend::connect(path, patience)?;
        let offered = self.front.number(wire::GET_FEATURES)?;
        if offered != self.features {
            return Err(wrong(format!("features {offered:#x} are offered, which were {:#x}", self.features)));
        }
        self.config = Self::negotiate(&mut self.front, &self.shape, offered)?;
        self.start()?;
        self.queues.iter().for_each(Queue::kick);
        Ok(())
    }

    /// Negotiates features and returns the configuration space.
    fn negotiate(front: &mut Frontend, shape: &Shape, offered: u64) -> io::Result<Config> {
        let mut features = offered;
        for (has, bit) in [(shape.indirect, INDIRECT), (shape.event_idx, EVENT_IDX)] {
            if !has {
                features &= !bit;
            }
        }
        front.say(wire::SET_OWNER, 0, &[], &[])?;
        let protocols = front.number(wire::GET_PROTOCOL_FEATURES)?;
        if protocols & wire::PROTOCOL != wire::PROTOCOL {
            return Err(wrong(format!("protocol features {protocols:#x} are offered")));
        }
        front.say(wire::SET_PROTOCOL_FEATURES, 0, &wire::u64s(&[protocols]), &[])?;
        front.must(wire::SET_FEATURES, &wire::u64s(&[features]), &[])?;
        let config = front.config()?;
        if config.queues() < shape.queues {
            return Err(wrong(format!("{} queues are offered", config.queues())));
        }
        if shape.write_through && offered & wire::CONFIG_WCE != 0 {
            front.must(wire::SET_CONFIG, &[&wire::u32s(&[WRITEBACK_AT, 1, 0])[..], &[0]].concat(), &[])?;
        }
        Ok(config)
    }

    fn start(&mut self) -> io::Result<()> {
        let (front, shape) = (&mut self.front, &self.shape);
        if let Some((area, file)) = &self.notes {
            front.must(wire::SET_INFLIGHT_FD, area, &[file.as_fd()])?;
        }
        let region = wire::region(0, self.memory.bytes(), USER);
        if shape.table {
            // A table of one region, without the padding of a single region.
            let table = [&wire::u32s(&[1, 0])[..], &region[8..]].concat();
            front.must(wire::SET_MEM_TABLE, &table, &[self.memory.fd()])?;
        } else {
            front.must(wire::ADD_MEM_REG, &region, &[self.memory.fd()])?;
        }
        for (index, queue) in (0_u32..).zip(&self.queues) {
            let state = |number: u16| wire::u32s(&[index, number.into()]);
            let [desc, used, avail] = queue.places().map(|at| USER + at);
            front.must(wire::SET_VRING_NUM, &state(Queue::size(shape)), &[])?;
            front.must(wire::SET_VRING_BASE, &state(queue.used()), &[])?;
            front.must(wire::SET_VRING_ADDR, &wire::addresses(index, desc, used, avail), &[])?;
            let number = wire::u64s(&[index.into()]);
            front.must(wire::SET_VRING_CALL, &number, &[queue.call.as_fd()])?;
            front.must(wire::SET_VRING_KICK, &number, &[queue.kick.as_fd()])?;
            front.must(wire::SET_VRING_ENABLE, &state(1), &[])?;
        }
        Ok(())
    }

    /// Returns the configuration space as of the last connection.
    pub fn config(&self) -> Config {
        self.config
    }

    /// Returns the features offered by the server.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the memory, for tests that truncate it.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the connection.
    pub fn socket(&mut self) -> &mut UnixStream {
        &mut self.front.socket
    }

    /// Returns true if requests in flight survive the server (inflight region).
    pub fn is_noted(&self) -> bool {
        self.notes.is_some()
    }

    /// Takes a completed request and returns it with its queue.
    ///
    /// # Errors
    /// The used entry is not valid.
    pub fn answer(&mut self) -> io::Result<Option<(u16, Answer)>> {
        for (index, queue) in (0..).zip(&mut self.queues) {
            if let Some(answer) = queue.answer()? {
                return Ok(Some((index, answer)));
            }
        }
        Ok(None)
    }

    /// Waits for a possible completion.
    ///
    /// # Errors
    /// The connection has ended (`UnexpectedEof`).
    pub fn wait(&mut self) -> io::Result<()> {
        let mut fds: Vec<_> =
            self.queues.iter().map(|queue| PollFd::new(&queue.call, PollFlags::IN)).collect();
        fds.push(PollFd::new(&self.front.socket, PollFlags::IN));
        poll(&mut fds, None::<&Timespec>)?;
        // The server sends no message without a request.
        let has_ended = fds.last().is_some_and(|fd| !fd.revents().is_empty());
        self.queues.iter().for_each(Queue::hush);
        if has_ended { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}
