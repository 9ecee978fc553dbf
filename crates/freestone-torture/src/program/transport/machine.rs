//! A virtual machine as a client: sends requests through the queues of its disk. When the server
//! ends, the machine reconnects with the requests in flight.

use std::collections::HashMap;
use std::path::Path;

use freestone_testkit::Rng;
use freestone_testkit::vhost_user::{Data, Machine, MachineConfig, QueueRequest, wire};

use super::protocol::{
    ConnectionError, EIO, ENOTSUP, FLUSH, NO_HOLE, Properties, READ, Reply, TRIM, WRITE, WRITE_ZEROES,
};
use crate::program::watch::REQUEST_MAX;

/// Largest request of a machine, in bytes.
pub const DATA_BYTES_MAX: u64 = 256 << 10;
/// A request type that virtio-blk does not define.
const NO_KIND: u32 = 99;

/// A machine whose requests have cookies, as those of the other clients.
pub struct MachineClient {
    machine: Machine,
    slots: u16,
    cookies: HashMap<(u16, u16), u64>,
    next: u64,
    has_ended: bool,
    rng: Rng,
    pub properties: Properties,
}

impl MachineClient {
    /// Connects a machine with random numbers of queues and slots to the socket at `path`.
    pub fn connect(path: &Path, rng: &mut Rng) -> Result<Self, ConnectionError> {
        let shape = MachineConfig {
            queues: 1 + rng.below(3) as u16,
            slots: 4 << rng.below(4),
            slot_bytes: DATA_BYTES_MAX,
            indirect: rng.chance(70),
            event_idx: rng.chance(70),
            inflight: rng.chance(75),
            write_through: rng.chance(25),
            table: rng.chance(30),
        };
        let machine = Machine::connect(path, shape, REQUEST_MAX)?;
        let write_through = shape.write_through && machine.features() & wire::CONFIG_WCE != 0;
        let properties = Properties { write_through, ..properties(&machine, &shape) };
        let (next, rng) = (rng.word(), Rng::new(rng.word()));
        Ok(Self {
            machine,
            slots: shape.slots,
            cookies: HashMap::new(),
            next,
            has_ended: false,
            rng,
            properties,
        })
    }

    /// Connects again, to the same server or the next one, and offers it the requests in flight.
    pub fn reconnect(&mut self, path: &Path) -> Result<(), ConnectionError> {
        self.has_ended = false;
        self.machine.reconnect(path, REQUEST_MAX)?;
        self.properties.size = self.machine.config().capacity() * 512;
        Ok(())
    }

    /// Ends the connection. Returns the cookies of the requests that the server has completed before.
    pub fn hang_up(&mut self) -> Vec<u64> {
        // An error only means that the server has already ended the connection.
        let _ = self.machine.hang_up();
        std::iter::from_fn(|| self.reply().ok()).map(|reply| reply.cookie).collect()
    }

    /// Returns true if the server has ended the connection, all completions were taken, and the
    /// requests in flight are logged.
    pub fn can_reconnect(&self) -> bool {
        self.has_ended && self.machine.has_inflight_log()
    }

    pub fn in_flight(&self) -> usize {
        self.cookies.len()
    }

    pub fn next(&self) -> u64 {
        self.next
    }

    /// Makes a request available to the server, in a queue with a free slot.
    pub fn send(
        &mut self,
        flags: u16,
        command: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> Result<(), ConnectionError> {
        // A discard has no flags: only a write of zeroes may ask for unmapping.
        let range = wire::range(offset, len.into(), command == WRITE_ZEROES && flags & NO_HOLE == 0);
        let range = &range[..];
        let (kind, offset, data) = match command {
            READ => (wire::IN, offset, Data::In(len as usize)),
            WRITE => (wire::OUT, offset, Data::Out(data)),
            FLUSH => (wire::FLUSHES, 0, Data::None),
            TRIM => (wire::DISCARD, 0, Data::Out(range)),
            WRITE_ZEROES => (wire::WRITE_ZEROES, 0, Data::Out(range)),
            _ => (NO_KIND, offset, Data::None),
        };
        let asked = QueueRequest { kind, offset, data, pieces: 1 + self.rng.below(8) };
        let first = self.rng.below(self.machine.queues.len() as u64) as usize;
        for n in 0..self.machine.queues.len() {
            let index = (first + n) % self.machine.queues.len();
            if let Some(slot) = self.machine.queues[index].begin(asked) {
                self.cookies.insert((index as u16, slot), self.next);
                self.next = self.next.wrapping_add(0x1_0001);
                return Ok(());
            }
        }
        Err(ConnectionError::Protocol(format!(
            "{} requests are in flight, and {} slots have room",
            self.in_flight(),
            self.slots
        )))
    }

    /// Waits for the next completion. Includes the completions from before the end of the
    /// connection.
    pub fn reply(&mut self) -> Result<Reply, ConnectionError> {
        loop {
            if let Some((queue, answer)) = self.machine.take_completion()? {
                let Some(cookie) = self.cookies.remove(&(queue, answer.slot)) else {
                    return Err(ConnectionError::Protocol(format!(
                        "a completion of unused slot {}",
                        answer.slot
                    )));
                };
                let error = match answer.status {
                    wire::OK => 0,
                    wire::UNSUPP => ENOTSUP,
                    _ => EIO,
                };
                return Ok(Reply { cookie, error, data: answer.data, extents: Vec::new() });
            }
            if self.has_ended {
                return Err(ConnectionError::Ended("the server closed the machine's connection".into()));
            }
            match self.machine.wait() {
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => self.has_ended = true,
                other => other?,
            }
        }
    }
}

fn properties(machine: &Machine, shape: &MachineConfig) -> Properties {
    let has = |bit: u64| machine.features() & bit == bit;
    let both = has(wire::DISCARD_AND_ZEROES);
    Properties {
        size: machine.config().capacity() * 512,
        writable: !has(wire::RO),
        zeroes: both,
        trims: both,
        contexts: false,
        fua: false,
        is_coarse: true,
        depth: usize::from(shape.queues) * usize::from(shape.slots),
        ..Properties::default()
    }
}
