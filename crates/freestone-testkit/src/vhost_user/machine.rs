//! A virtual machine with one disk, connected to a vhost-user-blk server.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frontend::{Config, Frontend, protocol_error};
use super::machine_config::MachineConfig;
use super::memory::GuestMemory;
use super::queue::{Queue, QueueCompletion};
use super::wire::{self, EVENT_IDX, INDIRECT, USER};

/// Offset in bytes of the writeback field in the configuration space.
const WRITEBACK_AT: u32 = 32;

/// A virtual machine with one vhost-user-blk disk.
#[derive(Debug)]
pub struct Machine {
    front: Frontend,
    shape: MachineConfig,
    memory: Arc<GuestMemory>,
    /// The queues of the disk. The owner of a queue submits its requests and takes its completions.
    pub queues: Vec<Queue>,
    inflight_log: Option<(Vec<u8>, OwnedFd)>,
    features: u64,
    config: Config,
}

impl Machine {
    /// Connects to a server, negotiates features, and starts the queues.
    ///
    /// # Errors
    /// Fails if the connection ends, a reply takes longer than `patience`, or the server violates
    /// the protocol (`InvalidData`).
    pub fn connect(path: &Path, shape: MachineConfig, patience: Duration) -> io::Result<Self> {
        let memory = Arc::new(GuestMemory::new(u64::from(shape.queues) * Queue::bytes(&shape))?);
        let queues = (0..shape.queues).map(|index| Queue::new(&memory, shape, index));
        let queues = queues.collect::<io::Result<_>>()?;
        let mut front = Frontend::connect(path, patience)?;
        let features = front.number(wire::GET_FEATURES)?;
        let config = Self::negotiate(&mut front, &shape, features)?;
        let mut machine = Self { front, shape, memory, queues, inflight_log: None, features, config };
        if shape.inflight {
            machine.inflight_log = Some(machine.front.inflight(shape.queues, Queue::size(&shape))?);
        }
        machine.start()?;
        Ok(machine)
    }

    /// Connects to another server, or again to the same one. Requests in flight stay so, which
    /// requires an inflight region; without one, no request may be in flight.
    ///
    /// # Errors
    /// See [`connect`](Self::connect).
    pub fn reconnect(&mut self, path: &Path, patience: Duration) -> io::Result<()> {
        self.front = Frontend::connect(path, patience)?;
        let offered = self.front.number(wire::GET_FEATURES)?;
        if offered != self.features {
            return Err(protocol_error(format!(
                "features {offered:#x} are offered, which were {:#x}",
                self.features
            )));
        }
        self.config = Self::negotiate(&mut self.front, &self.shape, offered)?;
        self.start()?;
        self.queues.iter().for_each(Queue::kick);
        Ok(())
    }

    /// Asks the server to end the connection, which it does when no request is being executed any more.
    ///
    /// # Errors
    /// Fails if the connection has ended.
    pub fn hang_up(&self) -> io::Result<()> {
        self.front.socket.shutdown(Shutdown::Write)
    }

    /// Negotiates the features, and returns the configuration space.
    fn negotiate(front: &mut Frontend, shape: &MachineConfig, offered: u64) -> io::Result<Config> {
        let mut features = offered;
        for (has, bit) in [(shape.indirect, INDIRECT), (shape.event_idx, EVENT_IDX)] {
            if !has {
                features &= !bit;
            }
        }
        front.send(wire::SET_OWNER, 0, &[], &[])?;
        let protocols = front.number(wire::GET_PROTOCOL_FEATURES)?;
        if protocols & wire::PROTOCOL != wire::PROTOCOL {
            return Err(protocol_error(format!("protocol features {protocols:#x} are offered")));
        }
        front.send(wire::SET_PROTOCOL_FEATURES, 0, &wire::u64s(&[protocols]), &[])?;
        front.send_acknowledged(wire::SET_FEATURES, &wire::u64s(&[features]), &[])?;
        let config = front.config()?;
        if config.queues() < shape.queues {
            return Err(protocol_error(format!("{} queues are offered", config.queues())));
        }
        if shape.write_through && offered & wire::CONFIG_WCE != 0 {
            front.send_acknowledged(
                wire::SET_CONFIG,
                &[&wire::u32s(&[WRITEBACK_AT, 1, 0])[..], &[0]].concat(),
                &[],
            )?;
        }
        Ok(config)
    }

    fn start(&mut self) -> io::Result<()> {
        let (front, shape) = (&mut self.front, &self.shape);
        if let Some((area, file)) = &self.inflight_log {
            front.send_acknowledged(wire::SET_INFLIGHT_FD, area, &[file.as_fd()])?;
        }
        let region = wire::region(0, self.memory.bytes(), USER);
        if shape.table {
            // Send a table of one region, without the padding that precedes a region in its own
            // message.
            let table = [&wire::u32s(&[1, 0])[..], &region[8..]].concat();
            front.send_acknowledged(wire::SET_MEM_TABLE, &table, &[self.memory.fd()])?;
        } else {
            front.send_acknowledged(wire::ADD_MEM_REG, &region, &[self.memory.fd()])?;
        }
        for (index, queue) in (0_u32..).zip(&self.queues) {
            let state = |number: u16| wire::u32s(&[index, number.into()]);
            let [desc, used, avail] = queue.places().map(|at| USER + at);
            front.send_acknowledged(wire::SET_VRING_NUM, &state(Queue::size(shape)), &[])?;
            front.send_acknowledged(wire::SET_VRING_BASE, &state(queue.used()), &[])?;
            front.send_acknowledged(wire::SET_VRING_ADDR, &wire::addresses(index, desc, used, avail), &[])?;
            let number = wire::u64s(&[index.into()]);
            front.send_acknowledged(wire::SET_VRING_KICK, &number, &[queue.kick.as_fd()])?;
            front.send_acknowledged(wire::SET_VRING_ENABLE, &state(1), &[])?;
            // As in QEMU, the server may have completed requests by now.
            front.send_acknowledged(wire::SET_VRING_CALL, &number, &[queue.call.as_fd()])?;
        }
        Ok(())
    }

    pub fn config(&self) -> Config {
        self.config
    }

    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the guest memory, for tests that truncate it.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    pub fn socket(&mut self) -> &mut UnixStream {
        &mut self.front.socket
    }

    /// Returns true if requests in flight survive the server, because an inflight region logs them.
    pub fn has_inflight_log(&self) -> bool {
        self.inflight_log.is_some()
    }

    /// Takes a completed request from any queue. Returns the queue index and the completion, or
    /// `None` if no request has completed.
    ///
    /// # Errors
    /// Fails if an entry in a used ring is invalid.
    pub fn take_completion(&mut self) -> io::Result<Option<(u16, QueueCompletion)>> {
        for (index, queue) in (0..).zip(&mut self.queues) {
            if let Some(answer) = queue.take_completion()? {
                return Ok(Some((index, answer)));
            }
        }
        Ok(None)
    }

    /// Waits until the server sends a notification, so that a request may have completed.
    ///
    /// # Errors
    /// Fails if the connection has ended (`UnexpectedEof`).
    pub fn wait(&mut self) -> io::Result<()> {
        let mut fds: Vec<_> =
            self.queues.iter().map(|queue| PollFd::new(&queue.call, PollFlags::IN)).collect();
        fds.push(PollFd::new(&self.front.socket, PollFlags::IN));
        poll(&mut fds, None::<&Timespec>)?;
        // The server sends no messages on its own, so a readable socket means the end of the
        // connection.
        let has_ended = fds.last().is_some_and(|fd| !fd.revents().is_empty());
        self.queues.iter().for_each(Queue::count_notifications);
        if has_ended { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}
