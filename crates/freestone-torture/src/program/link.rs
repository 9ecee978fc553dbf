//! A client's connection to a device, over any kind of export.

use std::path::PathBuf;

use freestone_testkit::Rng;

use super::block::Block;
use super::machine::Driver;
use super::protocol::{ConnectionError, Properties, Reply};
use super::wire::Wire;

/// An address of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A socket for NBD clients.
    Nbd(PathBuf),
    /// A socket for a virtual machine.
    Machine(PathBuf),
    /// A block device of this machine.
    Block(PathBuf),
}

/// A connection.
pub enum Connection {
    Nbd(Box<Wire>),
    Machine(Box<Driver>),
    Block(Box<Block>),
}

impl Connection {
    /// Connects to the device with this name.
    pub fn connect(place: &Address, name: &str, rng: &mut Rng) -> Result<Self, ConnectionError> {
        Ok(match place {
            Address::Nbd(path) => Self::Nbd(Box::new(Wire::connect(path, name, rng)?)),
            Address::Machine(path) => Self::Machine(Box::new(Driver::connect(path, rng)?)),
            Address::Block(path) => Self::Block(Box::new(Block::connect(path, rng)?)),
        })
    }

    pub fn properties(&self) -> Properties {
        match self {
            Self::Nbd(wire) => wire.properties,
            Self::Machine(driver) => driver.properties,
            Self::Block(block) => block.properties,
        }
    }

    /// Returns the name of the kind for statistics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nbd(_) => "nbd",
            Self::Machine(_) => "vhost-user",
            Self::Block(_) => "ublk",
        }
    }

    /// Returns true if the connection survives verbs that end connections.
    pub fn survives_disconnects(&self) -> bool {
        matches!(self, Self::Block(_))
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        match self {
            Self::Nbd(wire) => wire.in_flight(),
            Self::Machine(driver) => driver.in_flight(),
            Self::Block(block) => block.in_flight(),
        }
    }

    /// Returns the cookie of the next request.
    pub fn next(&self) -> u64 {
        match self {
            Self::Nbd(wire) => wire.next(),
            Self::Machine(driver) => driver.next(),
            Self::Block(block) => block.next(),
        }
    }

    pub fn send(
        &mut self,
        flags: u16,
        command: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> Result<(), ConnectionError> {
        match self {
            Self::Nbd(wire) => wire.send(flags, command, offset, len, data).map(drop),
            Self::Machine(driver) => driver.send(flags, command, offset, len, data),
            Self::Block(block) => {
                block.send(flags, command, offset, len, data);
                Ok(())
            }
        }
    }

    /// Returns the next reply, to any request.
    pub fn reply(&mut self) -> Result<Reply, ConnectionError> {
        match self {
            Self::Nbd(wire) => wire.reply(),
            Self::Machine(driver) => driver.reply(),
            Self::Block(block) => block.reply(),
        }
    }

    /// Ends the connection in order.
    pub fn leave(self) {
        if let Self::Nbd(wire) = self {
            // The server may have ended the connection already.
            let _ = wire.leave();
        }
    }
}
